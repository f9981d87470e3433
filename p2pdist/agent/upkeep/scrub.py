"""The background reading of the store: what was changed while the agent was away, then everything
once a period (core/scrub.py).

A thread of its own reads, behind all others at processor and disk, and stands still while pulls
run. What is wrong is dropped, and the packages that it belongs to are pulled again, pinned ones
first. Where a round stands is in the index, as is what was dropped, so rounds and repairs outlast
kills, and a full disk costs no more than having read something twice.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

import msgspec

from p2pdist.agent.upkeep.maintenance import Verification
from p2pdist.core.scrub import BUSY_PAUSE_S, Part, Rest, Round, Scrub
from p2pdist.model.digest import Digest, is_digest
from p2pdist.model.errors import P2PDistError
from p2pdist.store.scrub import read_blob, read_objects, read_variants, yield_to_others
from p2pdist.store.store import BlobStore
from p2pdist.store.verification import Checked

NOTE = "scrub"
"""The note of the index in which the last round is."""

SAVE_S = 30.0
LOOK_S = 60.0
"""How often it is written down that all is right: what changes later is read again after a kill."""

RETRY_S = 300.0
"""After the disk or the index failed, or pulls that repair were refused."""

STOP_S_MAX = 5.0
"""So long the end of the agent waits for a read that does not return."""

VARIANTS = "variants"

logger = logging.getLogger(__name__)


class Stopped(Exception):
    """The agent ends, or a part is not to be read to its end."""


class ScrubStatus(msgspec.Struct, frozen=True):
    """What the scrub of an agent does and found. Times are in seconds since the epoch, 0 for never;
    `period_s` 0: it is switched off. `share` is how much of the parts of a round under way was
    read. `damaged` counts what was found to be wrong since the agent was started, by this or
    before a use."""

    period_s: float
    running: bool
    began: float
    ended: float
    share: float
    checked: int
    bytes_checked: int
    wrong: int
    damaged: dict[str, int]


class StoreScrub:
    """Runs the scrub of one store. `busy` says whether pulls run; `clock` is the time in seconds
    since the epoch, `wait` waits for so many seconds in the thread and says whether it is to end.
    On the event loop."""

    def __init__(
        self,
        store: BlobStore,
        verification: Verification,
        busy: Callable[[], bool],
        *,
        period_s: float,
        clock: Callable[[], float] = time.time,
        wait: Callable[[float], bool] | None = None,
    ) -> None:
        self._store, self._verification, self._busy, self._clock = store, verification, busy, clock
        self._stopping = threading.Event()
        self._wait = wait or self._stopping.wait
        self._scrub = Scrub(period_s, _round(store.note(NOTE)), now=clock())
        self._saved_at = clock()
        self._look_for_lost_at = 0.0
        """When the index is next asked for what was dropped and not repaired; inf: never."""

        self._bytes_total = 0
        self._share = 0.0
        self.checked = self.bytes_checked = self.wrong = 0
        """What was read since the agent was started, and how much of it was wrong."""

    @property
    def round(self) -> Round:
        """The round that is under way, or the last one."""
        return self._scrub.round

    def status(self) -> ScrubStatus:
        """A snapshot."""
        last, running = self._scrub.round, self._scrub.running
        return ScrubStatus(
            self._scrub.period_s,
            running,
            last.began if running or last.checked else 0.0,
            last.ended if last.checked else 0.0,
            self._share if running else 0.0,
            last.checked,
            last.bytes_checked,
            last.wrong,
            {str(kind): count for kind, count in self._store.integrity.damaged.items()},
        )

    async def run(self) -> None:
        """Until cancelled."""
        thread = ThreadPoolExecutor(1, thread_name_prefix="scrub", initializer=yield_to_others)
        step: asyncio.Future[list[str]] | None = None
        try:
            while True:
                step = asyncio.get_running_loop().run_in_executor(thread, self.step)
                if wrong := await asyncio.shield(step):
                    await self._repair(wrong)
        finally:
            self._stopping.set()
            if step is not None:
                await asyncio.wait([step], timeout=STOP_S_MAX)  # the store is closed next
            thread.shutdown(wait=False)

    async def _repair(self, wrong: Sequence[str]) -> None:
        try:
            repaired, failed = await self._verification.repair(wrong)
        except P2PDistError as error:  # such as too many pulls
            logger.error("%d things are damaged, and not fetched again for now: %s", len(wrong), error)
            self._look_for_lost_at = self._clock() + RETRY_S
            return
        for name in repaired:
            logger.info("%s was damaged and is whole again", name)
        for reason in failed:
            logger.error("damaged, and not fetched again: %s", reason)

    def step(self) -> list[str]:
        """Read one part, or wait until there is something to read; returns the names of what was
        wrong and is dropped. Blocks."""
        try:
            wrong = self._look()
            if wrong:
                return wrong
            parts = self._parts()
            found = self._scrub.next(parts, now=self._clock())
            if isinstance(found, Rest):
                self._save()
                self._wait(min(found.seconds, LOOK_S))
                return []
            behind = sum(part.key < found.part.key for part in parts)
            self._share = behind / len(parts)
            return self._read(found.part)
        except Stopped:
            return []
        except P2PDistError as error:
            logger.warning("the store cannot be read in the background: %s", error)
            self._look_for_lost_at = 0.0  # it may have dropped something before
            self._wait(RETRY_S)
            return []

    def _look(self) -> list[str]:
        """What was dropped and never repaired, since the agent ended or something failed; then what
        was changed, or may have been, while it was away."""
        if self._clock() >= self._look_for_lost_at:
            lost = self._store.lost()
            self._look_for_lost_at = math.inf
            if lost:
                return [*lost]
        integrity = self._store.integrity
        wrong = integrity.look_at_all(lambda: not self._stopping.is_set())
        for digest in integrity.doubtful:
            if self._stopping.is_set():
                raise Stopped
            wrong += integrity.look([digest])
        integrity.mark(after_s=SAVE_S)
        return wrong

    def _parts(self) -> list[Part]:
        pins = self._store.pins
        blobs = [Part(blob.digest, blob.digest in pins) for blob in self._store.blobs() if blob.complete]
        self._bytes_total = self._store.usage().bytes_total
        objects = [Part(f"{number:02x}") for number in range(256)] if len(self._store.objects) else []
        return [*blobs, *objects, Part(VARIANTS)]

    def _read(self, part: Part) -> list[str]:
        self._pace(0)
        checked = list(self._checked(part))
        wrong = [thing.name for thing in checked if not thing.ok]
        size = sum(thing.size for thing in checked)
        self._scrub.read(part, checked=len(checked), bytes_checked=size, wrong=len(wrong))
        self.checked, self.bytes_checked, self.wrong = (
            self.checked + len(checked),
            self.bytes_checked + size,
            self.wrong + len(wrong),
        )
        if wrong or self._clock() - self._saved_at >= SAVE_S or self._clock() < self._saved_at:
            self._save()
        return wrong

    def _checked(self, part: Part) -> Iterator[Checked]:
        if part.name == VARIANTS:
            yield from read_variants(self._store, self._pace)
        elif is_digest(part.name):
            blob = self._store.get(Digest(part.name))
            thing = read_blob(self._store, blob, self._pace) if blob is not None else None
            if thing is not None:
                yield thing
        else:
            yield from read_objects(self._store, part.name, self._pace)

    def _pace(self, count: int) -> None:
        """Wait after reading so many bytes, and as long as pulls run."""
        while self._busy():
            if self._wait(BUSY_PAUSE_S):
                raise Stopped
        if self._wait(self._scrub.pause_s(count, self._bytes_total)):
            raise Stopped

    def _save(self) -> None:
        self._saved_at = self._clock()
        try:
            self._store.set_note(NOTE, msgspec.json.encode(self._scrub.round).decode())
        except P2PDistError as error:  # such as a full disk: some is read twice after a restart
            logger.info("where the scrub is could not be written down: %s", error)


def _round(text: str | None) -> Round | None:
    """The round that a note of the index tells, None where it tells none."""
    with contextlib.suppress(msgspec.DecodeError, TypeError):
        return msgspec.json.decode(text, type=Round) if text else None
    return None
