"""What this host keeps for preseeds: packages that a tracker asked it to hold, fetched and pinned.

Each preseed pins the blobs of its package for an owner of its own, `preseed:<id>`, before it
fetches them, so that none is evicted before the last has come. Pins are in the store's index and
survive the agent: one that was started again finds its preseeds there, says that it has something
for them (`Kept`, waiting), and hears from the tracker for which packages (`Keep`), or that they are
over (`Release`).

How long a preseed holds is a duration, counted by a clock that nobody sets. A tracker of an earlier
version says a time instead, which the difference of the two clocks turns into a duration.

A few preseeds are fetched at a time, in the order in which they were asked for.

So that trackers pick and rank hosts well, they are also told what need not be fetched here
(spares.py).

Tells the tracker which packs this host need not fetch, though it may not hold them: their
contents stand here in trees that are whole.

The tracker counts them as present when it ranks hosts. The store knows them (`Trees.spare`) and is
asked every LOOK_S, in a thread.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from p2pdist.agent.pull.packages import Packages
from p2pdist.agent.pull.pulls import Pull, Pulls
from p2pdist.model.digest import Digest
from p2pdist.model.errors import Conflict, P2PDistError, Unavailable
from p2pdist.model.manifest import PACK_TYPE, Manifest, parse_reference
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
from p2pdist.store.store import BlobStore

LOOK_S = 2.0


class RedundantPacks:
    """`find` gives what is spare now and may block; `send` says something to the tracker, if one
    answers."""

    def __init__(self, find: Callable[[], set[Digest]], send: Callable[[Spares], None]) -> None:
        self._find, self._send = find, send
        self._said: set[Digest] = set()
        self._wanted = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    def connected(self) -> None:
        """A tracker answers, and knows nothing yet."""
        self._said = set()
        self._wanted.set()
        if self._task is None:
            self._task = asyncio.create_task(self._run(), name="spare-packs")

    async def stop(self) -> None:
        """Say no more."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def _run(self) -> None:
        while True:
            self._wanted.clear()
            try:
                self._tell(await asyncio.to_thread(self._find))
            except P2PDistError as error:
                logger.warning("which packs are spare cannot be told: %s", error)
            with suppress(TimeoutError):
                async with asyncio.timeout(LOOK_S):
                    await self._wanted.wait()

    def _tell(self, found: set[Digest]) -> None:
        if self._wanted.is_set() or found == self._said:  # another tracker answers by now, and is told at once
            return
        self._said = found
        blobs = sorted(found)
        for start in range(0, max(1, len(blobs)), BLOBS_PER_MESSAGE_MAX):
            self._send(Spares(tuple(blobs[start : start + BLOBS_PER_MESSAGE_MAX]), more=start > 0))


OWNER = "preseed:"
AT_ONCE = 4
PRESEEDS_MAX = 1000
PROGRESS_S = 5.0
"""How often a host that fetches says how far it is; trackers know better from its reports, but for
trees, of which not all is moved."""

TIMER_S_MAX = 86400.0

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class _Kept:
    """One preseed; `keep` is None until the tracker says, after a restart, what it is for.
    `ends_at` is when its time is up, by the loop's clock; None for never."""

    keep: Keep | None = None
    ends_at: float | None = None
    state: KeptState = "waiting"
    reason: str = ""
    blobs: tuple[Digest, ...] = ()
    pull: Pull | None = None
    task: asyncio.Task[None] | None = None
    expiry: asyncio.TimerHandle | None = None
    said: Kept | None = field(default=None)


class Preseeds:
    """See the module's text. `send` says something to the tracker, if one answers. `clock_ahead_s`
    is how far this host's clock is ahead of the tracker's, None where the tracker does not tell the
    time."""

    def __init__(
        self,
        store: BlobStore,
        pulls: Pulls,
        packages: Packages,
        send: Callable[[Kept | Spares], None],
        clock_ahead_s: Callable[[], float | None] = lambda: None,
    ) -> None:
        self._store, self._pulls, self._packages, self._send = store, pulls, packages, send
        self._clock_ahead_s = clock_ahead_s
        self._spares = RedundantPacks(store.trees.redundant_packs, send)
        self._kept: dict[str, _Kept] = {}
        self._slots = asyncio.Semaphore(AT_ONCE)
        self._pinning = asyncio.Lock()
        self._background: set[asyncio.Task[Any]] = set()
        for blob in store.blobs():
            for owner in store.pins.owners(blob.digest):
                if owner.startswith(OWNER):
                    self._kept.setdefault(owner.removeprefix(OWNER), _Kept())

    def connected(self) -> None:
        """A tracker answers: tell it of everything that is kept, and of packs that are needed no
        more."""
        self._spares.connected()
        for identifier in self._kept:
            self._tell(identifier, again=True)

    def receive(self, message: Keep | Release) -> None:
        """What the tracker asks for."""
        match message:
            case Keep():
                self._keep(message)
            case Release(identifier):
                self._release(identifier)

    async def stop(self) -> None:
        """Fetch nothing more; pins stay."""
        await self._spares.stop()
        tasks = [kept.task for kept in self._kept.values() if kept.task is not None]
        for kept in self._kept.values():
            if kept.expiry is not None:
                kept.expiry.cancel()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, *self._background, return_exceptions=True)

    # -- one preseed

    def _keep(self, wanted: Keep) -> None:
        kept = self._kept.get(wanted.id)
        if kept is not None and kept.keep is not None and kept.keep.package != wanted.package:
            self._release(wanted.id)
            kept = None
        if kept is None:
            if len(self._kept) >= PRESEEDS_MAX:
                error = Unavailable(f"this host keeps {PRESEEDS_MAX} preseeds already")
                self._send(Kept(wanted.id, "failed", reason=_reason(error)))
                return
            kept = self._kept[wanted.id] = _Kept()
        kept.keep = wanted
        left_s = self._left_s(wanted)
        kept.ends_at = asyncio.get_running_loop().time() + left_s if left_s is not None else None
        self._expire_later(wanted.id, kept)
        if self._kept.get(wanted.id) is not kept:
            if wanted.left_s is None:
                self._refuse(wanted)
            return  # its time is up
        running = kept.task is not None and not kept.task.done()
        if not running and not (kept.state == "done" and self._whole(kept)):
            kept.state, kept.reason, kept.pull = "waiting", "", None
            kept.task = asyncio.create_task(self._run(wanted, kept), name=f"preseed-{wanted.id}")
        self._tell(wanted.id, again=True)

    def _release(self, identifier: str) -> None:
        kept = self._kept.pop(identifier, None)
        if kept is None:
            return
        if kept.expiry is not None:
            kept.expiry.cancel()
        if kept.task is not None:
            kept.task.cancel()
        self._later(self._unpin(identifier))

    async def _run(self, wanted: Keep, kept: _Kept) -> None:
        try:
            async with self._slots:
                kept.state = "pulling"
                self._tell(wanted.id)
                await self._fetch(wanted, kept)
            kept.state = "done"
        except P2PDistError as error:
            kept.state, kept.reason = "failed", _reason(error)
        except Exception as error:
            logger.exception("preseed=%s failed", wanted.id)
            kept.state, kept.reason = "failed", f"failed: the agent failed: {error!r}"[:REASON_CHARACTERS_MAX]
        self._tell(wanted.id)

    async def _fetch(self, wanted: Keep, kept: _Kept) -> None:
        package = await self._packages.find(parse_reference(wanted.package), lambda text: None)
        kept.blobs = _pinned(package.manifest)
        # Whether or not this is cancelled meanwhile, pins are set before a release, which waits
        # behind them for the lock, takes them away.
        await asyncio.shield(self._later(self._pin(wanted.id, kept.blobs)))
        pull = kept.pull = self._pulls.start(PullRequest(package=wanted.package, priority=wanted.priority))
        assert pull.task is not None
        try:
            while not (await asyncio.wait([pull.task], timeout=PROGRESS_S))[0]:
                self._tell(wanted.id)
        except asyncio.CancelledError:
            pull.task.cancel()
            await asyncio.wait([pull.task])
            if pull.state not in ("done", "failed"):
                pull.state, pull.error = "failed", Conflict(f"the preseed {wanted.id} needs {wanted.package} no longer")
            raise
        if pull.error is not None:
            raise pull.error

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

    def _whole(self, kept: _Kept) -> bool:
        found = [self._store.get(digest) for digest in kept.blobs]
        return all(blob is not None and blob.complete for blob in found)

    def _left_s(self, wanted: Keep) -> float | None:
        """How long it holds from now on, None for ever."""
        if wanted.left_s is not None or wanted.until is None:
            return wanted.left_s
        return wanted.until - (time.time() - (self._clock_ahead_s() or 0.0))

    def _refuse(self, wanted: Keep) -> None:
        """The tracker asks for what is over by this host's clock: the two clocks differ, and the
        tracker does not tell how much."""
        late_s = -(self._left_s(wanted) or 0.0)
        error = Unavailable(
            f"the preseed ended {late_s:.0f} s ago by this host's clock",
            remedy="Set the clocks of this host and of the tracker (chrony, systemd-timesyncd)",
        )
        logger.warning("preseed=%s is not fetched: %s", wanted.id, error)
        self._send(Kept(wanted.id, "failed", reason=_reason(error)))

    def _expire_later(self, identifier: str, kept: _Kept) -> None:
        """Release it when its time is up, whether or not a tracker is there to say so."""
        if kept.expiry is not None:
            kept.expiry.cancel()
            kept.expiry = None
        if kept.ends_at is None:
            return
        loop = asyncio.get_running_loop()
        left_s = kept.ends_at - loop.time()
        if left_s <= 0:
            self._release(identifier)
            return
        kept.expiry = loop.call_later(min(left_s, TIMER_S_MAX), self._expire_later, identifier, kept)

    # -- saying

    def _tell(self, identifier: str, *, again: bool = False) -> None:
        kept = self._kept.get(identifier)
        if kept is None:
            return
        status = kept.pull.status() if kept.pull is not None else None
        done, total = (status.bytes_done, status.bytes_total) if status is not None else (0, 0)
        saying = Kept(identifier, kept.state, done, total, kept.reason)
        if again or saying != kept.said:
            kept.said = saying
            self._send(saying)

    def _later(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._background.add(task)
        task.add_done_callback(self._background.discard)
        return task


def _pinned(manifest: Manifest) -> tuple[Digest, ...]:
    """What must stay for a package to be here: its layers and catalogs. Packs are means to make a
    tree's contents, which its root pins."""
    return tuple(blob.digest for blob in manifest.blobs if blob.media_type != PACK_TYPE)


def _reason(error: P2PDistError) -> str:
    return f"{error.slug}: {error.what}"[:REASON_CHARACTERS_MAX]
