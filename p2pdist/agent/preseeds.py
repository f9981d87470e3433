"""The preseeds of this host: packages that a tracker asked it to keep, fetched and pinned.

Each preseed pins the blobs of its package for an owner of its own, `preseed:<id>`, before it
fetches them, so that none is evicted before the last has come. Pins are in the store's index and
survive the agent: a new agent finds its preseeds there and reports them (`Kept`, waiting), and the
tracker answers for which packages they are (`Keep`), or that they are over (`Release`).

The duration of a preseed counts by a clock that is never set. A tracker of an earlier version
states a time instead, from which the difference of the two clocks gives a duration.

A few preseeds are fetched at a time, in the order in which the tracker asked for them.

Trackers rank hosts by what they hold, so the agent also reports redundant packs: packs, and
encrypted blobs, that it need not fetch, because this host has their contents already. The store
knows them (`redundant_parts`) and is asked every LOOK_S, in a thread.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

from p2pdist.agent.images.images import Images
from p2pdist.agent.models.models import Models
from p2pdist.agent.pull.packages import Packages
from p2pdist.agent.pull.pulls import Pull, Pulls
from p2pdist.model.digest import Digest
from p2pdist.model.errors import Conflict, P2PDistError, Unavailable
from p2pdist.model.hub import is_hub, parse_hub
from p2pdist.model.image import is_image, parse_image
from p2pdist.model.manifest import PACK_TYPE, SEALED_TYPE, Manifest, parse_reference
from p2pdist.model.messages import (
    BLOBS_PER_MESSAGE_MAX,
    REASON_CHARACTERS_MAX,
    Keep,
    Kept,
    KeptState,
    PullRequest,
    Release,
    Spares,
)
from p2pdist.store.store import BlobStore, redundant_parts

logger = logging.getLogger(__name__)

LOOK_S = 2.0
"""Between two questions for redundant packs."""

OWNER = "preseed:"
AT_ONCE = 4
"""Preseeds that are fetched at once."""

PRESEEDS_MAX = 1000
PROGRESS_S = 5.0
"""How often a host reports the progress of a preseed. A tracker learns more from the reports of
pieces, except for trees, of which only a part is transferred."""

TIMER_S_MAX = 86400.0


class RedundantPacks:
    """Reports redundant packs to the tracker. `find` returns them and may block; `send` sends a
    message if a tracker answers."""

    def __init__(self, find: Callable[[], set[Digest]], send: Callable[[Spares], None]) -> None:
        self._find, self._send = find, send
        self._reported: set[Digest] = set()
        """What the tracker that answers was sent last."""
        self._due = asyncio.Event()
        """Set when a tracker begins to answer."""
        self._task: asyncio.Task[None] | None = None

    def connected(self) -> None:
        """A tracker begins to answer: report everything to it."""
        self._reported = set()
        self._due.set()
        if self._task is None:
            self._task = asyncio.create_task(self._run(), name="redundant-packs")

    async def stop(self) -> None:
        """End the reports."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def _run(self) -> None:
        while True:
            self._due.clear()
            try:
                self._report(await asyncio.to_thread(self._find))
            except P2PDistError as error:
                logger.warning("which packs are redundant cannot be reported: %s", error)
            with suppress(TimeoutError):
                async with asyncio.timeout(LOOK_S):
                    await self._due.wait()

    def _report(self, packs: set[Digest]) -> None:
        if self._due.is_set() or packs == self._reported:  # another tracker answers by now: it gets them at once
            return
        self._reported = packs
        blobs = sorted(packs)
        for start in range(0, max(1, len(blobs)), BLOBS_PER_MESSAGE_MAX):
            self._send(Spares(tuple(blobs[start : start + BLOBS_PER_MESSAGE_MAX]), more=start > 0))


@dataclass(slots=True)
class _Preseed:
    """One preseed of this host."""

    keep: Keep | None = None
    """The tracker's request; None after a restart until the tracker repeats it."""
    ends_at: float | None = None
    """When it is over, by the loop's clock; None for never."""
    state: KeptState = "waiting"
    reason: str = ""
    """Why it failed, "" while it has not."""
    blobs: tuple[Digest, ...] = ()
    """The pinned blobs, once the manifest is known."""
    pull: Pull | None = None
    task: asyncio.Task[None] | None = None
    """Pins and fetches the package."""
    expiry: asyncio.TimerHandle | None = None
    """Releases it at `ends_at`."""
    reported: Kept | None = None


class Preseeds:
    """The preseeds of this host. `send` sends a message if a tracker answers. `clock_ahead_s` is
    how far this host's clock is ahead of the tracker's, None where the tracker does not state its
    time. On the event loop."""

    def __init__(
        self,
        store: BlobStore,
        pulls: Pulls,
        packages: Packages,
        images: Images,
        models: Models,
        send: Callable[[Kept | Spares], None],
        clock_ahead_s: Callable[[], float | None] = lambda: None,
    ) -> None:
        self._store, self._pulls, self._packages, self._send = store, pulls, packages, send
        self._images, self._models = images, models
        self._clock_ahead_s = clock_ahead_s
        self._redundant = RedundantPacks(partial(redundant_parts, store), send)
        self._preseeds: dict[str, _Preseed] = {}
        """By identifier."""
        self._slots = asyncio.Semaphore(AT_ONCE)
        self._pinning = asyncio.Lock()
        self._background: set[asyncio.Task[Any]] = set()
        for blob in store.blobs():
            for owner in store.pins.owners(blob.digest):
                if owner.startswith(OWNER):
                    self._preseeds.setdefault(owner.removeprefix(OWNER), _Preseed())

    def connected(self) -> None:
        """A tracker begins to answer: report all preseeds and redundant packs to it."""
        self._redundant.connected()
        for identifier in self._preseeds:
            self._report(identifier, again=True)

    def receive(self, message: Keep | Release) -> None:
        """Carry out a request of the tracker."""
        match message:
            case Keep():
                self._keep(message)
            case Release(identifier):
                self._release(identifier)

    async def stop(self) -> None:
        """End all fetching; pins stay."""
        await self._redundant.stop()
        tasks = [preseed.task for preseed in self._preseeds.values() if preseed.task is not None]
        for preseed in self._preseeds.values():
            if preseed.expiry is not None:
                preseed.expiry.cancel()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, *self._background, return_exceptions=True)

    # -- one preseed

    def _keep(self, keep: Keep) -> None:
        preseed = self._preseeds.get(keep.id)
        if preseed is not None and preseed.keep is not None and preseed.keep.package != keep.package:
            self._release(keep.id)
            preseed = None
        if preseed is None:
            if len(self._preseeds) >= PRESEEDS_MAX:
                error = Unavailable(f"this host keeps {PRESEEDS_MAX} preseeds already")
                self._send(Kept(keep.id, "failed", reason=_reason(error)))
                return
            preseed = self._preseeds[keep.id] = _Preseed()
        preseed.keep = keep
        left_s = self._left_s(keep)
        preseed.ends_at = asyncio.get_running_loop().time() + left_s if left_s is not None else None
        self._expire_later(keep.id, preseed)
        if self._preseeds.get(keep.id) is not preseed:
            if keep.left_s is None:
                self._refuse(keep)
            return  # its time is up
        running = preseed.task is not None and not preseed.task.done()
        if not running and not (preseed.state == "done" and self._whole(preseed)):
            preseed.state, preseed.reason, preseed.pull = "waiting", "", None
            preseed.task = asyncio.create_task(self._run(keep, preseed), name=f"preseed-{keep.id}")
        self._report(keep.id, again=True)

    def _release(self, identifier: str) -> None:
        preseed = self._preseeds.pop(identifier, None)
        if preseed is None:
            return
        if preseed.expiry is not None:
            preseed.expiry.cancel()
        if preseed.task is not None:
            preseed.task.cancel()
        self._later(self._unpin(identifier))

    async def _run(self, keep: Keep, preseed: _Preseed) -> None:
        try:
            async with self._slots:
                preseed.state = "pulling"
                self._report(keep.id)
                await self._fetch(keep, preseed)
            preseed.state = "done"
        except P2PDistError as error:
            preseed.state, preseed.reason = "failed", _reason(error)
        except Exception as error:
            logger.exception("preseed=%s failed", keep.id)
            preseed.state, preseed.reason = "failed", f"failed: the agent failed: {error!r}"[:REASON_CHARACTERS_MAX]
        self._report(keep.id)

    async def _fetch(self, keep: Keep, preseed: _Preseed) -> None:
        if is_image(keep.package):
            image = await self._images.find(parse_image(keep.package))
            preseed.blobs = tuple(blob.digest for blob in image.blobs if blob.size)
        elif is_hub(keep.package):
            commit = await self._models.find(parse_hub(keep.package))
            preseed.blobs = tuple(blob.digest for blob in commit.blobs if blob.size)
        else:
            package = await self._packages.find(parse_reference(keep.package), lambda text: None)
            preseed.blobs = _pinned(package.manifest)
        # Whether or not this is cancelled meanwhile, pins are set before a release, which waits
        # behind them for the lock, takes them away.
        await asyncio.shield(self._later(self._pin(keep.id, preseed.blobs)))
        pull = preseed.pull = self._pulls.start(PullRequest(package=keep.package, priority=keep.priority))
        assert pull.task is not None
        try:
            while not (await asyncio.wait([pull.task], timeout=PROGRESS_S))[0]:
                self._report(keep.id)
        except asyncio.CancelledError:
            pull.task.cancel()
            await asyncio.wait([pull.task])
            if pull.state not in ("done", "failed"):
                pull.state, pull.error = "failed", Conflict(f"the preseed {keep.id} needs {keep.package} no longer")
            raise
        if pull.error is not None:
            raise pull.error
        if pull.package is not None and pull.package.manifest.encrypted:
            preseed.blobs = _pinned(pull.package.manifest)  # what was opened
            await asyncio.shield(self._later(self._pin(keep.id, preseed.blobs)))

    async def _pin(self, identifier: str, blobs: tuple[Digest, ...]) -> None:
        async with self._pinning:
            await asyncio.to_thread(self._pin_all, identifier, blobs)

    def _pin_all(self, identifier: str, blobs: tuple[Digest, ...]) -> None:
        for digest in blobs:
            self._store.pins.pin(digest, OWNER + identifier)

    async def _unpin(self, identifier: str) -> None:
        async with self._pinning:
            try:
                await asyncio.to_thread(self._store.pins.unpin, OWNER + identifier)
            except P2PDistError as error:
                logger.error("preseed=%s is over and still pinned: %s", identifier, error)

    def _whole(self, preseed: _Preseed) -> bool:
        blobs = [self._store.get(digest) for digest in preseed.blobs]
        return all(blob is not None and blob.complete for blob in blobs)

    def _left_s(self, keep: Keep) -> float | None:
        """How many seconds a preseed lasts from now on, None for ever."""
        if keep.left_s is not None or keep.until is None:
            return keep.left_s
        return keep.until - (time.time() - (self._clock_ahead_s() or 0.0))

    def _refuse(self, keep: Keep) -> None:
        """Report that a preseed is over by this host's clock before it began: the two clocks
        differ, and the tracker does not state its time."""
        late_s = -(self._left_s(keep) or 0.0)
        error = Unavailable(
            f"the preseed ended {late_s:.0f} s ago by this host's clock",
            remedy="Set the clocks of this host and of the tracker (chrony, systemd-timesyncd)",
        )
        logger.warning("preseed=%s is not fetched: %s", keep.id, error)
        self._send(Kept(keep.id, "failed", reason=_reason(error)))

    def _expire_later(self, identifier: str, preseed: _Preseed) -> None:
        """Release a preseed when its time is up, whether or not a tracker answers then."""
        if preseed.expiry is not None:
            preseed.expiry.cancel()
            preseed.expiry = None
        if preseed.ends_at is None:
            return
        loop = asyncio.get_running_loop()
        left_s = preseed.ends_at - loop.time()
        if left_s <= 0:
            self._release(identifier)
            return
        preseed.expiry = loop.call_later(min(left_s, TIMER_S_MAX), self._expire_later, identifier, preseed)

    # -- status reports

    def _report(self, identifier: str, *, again: bool = False) -> None:
        preseed = self._preseeds.get(identifier)
        if preseed is None:
            return
        status = preseed.pull.status() if preseed.pull is not None else None
        done, total = (status.bytes_done, status.bytes_total) if status is not None else (0, 0)
        note = status.note.removeprefix("waiting, ") if status is not None and preseed.state == "pulling" else ""
        reason, package = preseed.reason or note[:REASON_CHARACTERS_MAX], preseed.keep.package if preseed.keep else ""
        report = Kept(identifier, preseed.state, done, total, reason, package)
        if again or report != preseed.reported:
            preseed.reported = report
            self._send(report)

    def _later(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._background.add(task)
        task.add_done_callback(self._background.discard)
        return task


def _pinned(manifest: Manifest) -> tuple[Digest, ...]:
    """The blobs to pin for a package: its layers and catalogs. Packs are not pinned: they serve to
    make the contents of a tree, which its root pins. Of encrypted blobs the first alone is, by
    which this host knows the preseed again: others serve to make what is opened."""
    pinned = [blob for blob in manifest.blobs if blob.media_type not in (PACK_TYPE, SEALED_TYPE)]
    return tuple(blob.digest for blob in (*pinned, *manifest.encrypted[:1]))


def _reason(error: P2PDistError) -> str:
    return f"{error.slug}: {error.what}"[:REASON_CHARACTERS_MAX]
