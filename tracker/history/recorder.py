"""The history of a fleet while its tracker runs: takes what the core reports, logs it, keeps it in
the database, and passes it on to those that follow.

One thread writes and reads the database, never the event loop, and never the threads that all
else in the tracker shares: a database that is slow would take them all. While it does not answer
events wait, the oldest of more than WAITING_MAX are given up, and the log says so.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import deque
from collections.abc import AsyncGenerator, Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import ParamSpec, TypeVar

import msgspec

from p2pdist.model.errors import P2PDistError, Unavailable
from p2pdist.model.history import Event, HistoryFilter, HistoryPage, HistoryRecord
from p2pdist.transfer.places import Places
from tracker.core.history.history import WAITING_MAX, History
from tracker.state.history import LATE_NUMBERS, HistoryDatabase, Written

RETRY_S = 2.0
BATCH_MAX = 500
POLL_S = 1.0
"""How often a shared database is asked what other trackers have reported, while someone follows."""

FOLLOWERS_MAX, FOLLOWERS_PER_ADDRESS_MAX = 64, 32
BEHIND_MAX = 2000
"""Records that a follower may be behind; one that takes nothing is let go."""

STOP_S_MAX = 5.0
READ_MAX = 1000
"""Records that are read at a time where the caller may not see all of them."""

READERS_MAX, READERS_PER_ADDRESS_MAX = 32, 16
"""Requests for pages that are answered or wait at a time, in all and from one address."""

SHARES = ("0.5", "0.99", "1")
"""Of the hosts of a broadcast, as metrics name them."""

logger = logging.getLogger(__name__)

Given = ParamSpec("Given")
Result = TypeVar("Result")

Sees = Callable[[HistoryRecord], bool]


class Follower:
    """One that follows: the records that wait to be taken, oldest first."""

    def __init__(self) -> None:
        self.waiting: deque[HistoryRecord] = deque()
        self.arrived = asyncio.Event()
        self.behind = False


class HistoryRecorder:
    """Keeps what `history` reports. `observe` hears how long broadcasts took, by share of hosts.
    All methods are called on the event loop."""

    def __init__(self, history: History, database: HistoryDatabase | None = None) -> None:
        self._history, self._kept = history, database
        self._waiting: deque[Written] = deque()
        self._arrived = asyncio.Event()
        self._followers: list[Follower] = []
        self._last = 0
        """Number of the last record that followers have heard of."""
        self._heard: deque[int] = deque(maxlen=2 * LATE_NUMBERS)
        self._ended = False
        self._writing: asyncio.Task[None] | None = None
        self.observe: Callable[[str, float], None] = lambda share, seconds: None
        self._thread = ThreadPoolExecutor(1, "history")
        self._following = Places(FOLLOWERS_MAX, FOLLOWERS_PER_ADDRESS_MAX)
        self._reading = Places(READERS_MAX, READERS_PER_ADDRESS_MAX)
        self.given_up = 0
        """Events that were not kept, since the database did not answer; a metric."""

    @property
    def _database(self) -> HistoryDatabase:
        """The given database, or one in memory once it is needed."""
        if self._kept is None:
            self._kept = HistoryDatabase("")
        return self._kept

    def collect(self) -> None:
        """Take what the core has to report."""
        events = self._history.take()
        if not events:
            return
        now = round(time.time(), 3)
        for event in events:
            logger.info("%s", event.text)
            if event.broadcast is not None:
                for share, seconds in _times(event).items():
                    self.observe(share, seconds)
            self._waiting.append((now, event))
        over = len(self._waiting) - WAITING_MAX
        for _ in range(over):
            self._waiting.popleft()
        self.given_up += max(0, over)
        self._arrived.set()

    async def run(self) -> None:
        """Write what waits, and tell followers, until cancelled."""
        failing = False
        while True:
            with contextlib.suppress(TimeoutError):
                polls = bool(self._followers) and self._database.shared
                async with asyncio.timeout(POLL_S if polls else None):
                    await self._arrived.wait()
            self._arrived.clear()
            try:
                await self._write()
                await self._tell()
                failing = False
            except P2PDistError as error:
                if not failing:
                    logger.warning("%d events of the history wait to be kept: %s", len(self._waiting), error)
                failing = True
                self._arrived.set()
                await asyncio.sleep(RETRY_S)
            except Exception:
                logger.exception("the history could not be kept")
                await asyncio.sleep(RETRY_S)

    def end(self) -> None:
        """Let followers go: the tracker stops."""
        self._ended = True
        for follower in self._followers:
            follower.arrived.set()

    async def stop(self) -> None:
        """Write what waits, and leave the database."""
        self.end()
        try:
            async with asyncio.timeout(STOP_S_MAX):
                await self._write()
        except TimeoutError:
            logger.warning("%d events of the history are not kept: the database is slow", len(self._waiting))
            self._thread.shutdown(wait=False, cancel_futures=True)
            return  # a write is under way: to close SQLite under it would crash the process
        except P2PDistError as error:
            logger.warning("%d events of the history are not kept: %s", len(self._waiting), error)
        await asyncio.to_thread(self._database.close)  # its own thread may hang
        self._thread.shutdown(wait=False)

    async def _in_thread(self, work: Callable[Given, Result], *given: Given.args, **named: Given.kwargs) -> Result:
        return await asyncio.get_running_loop().run_in_executor(self._thread, partial(work, *given, **named))

    async def _write(self) -> None:
        """Write what waits. A write goes on when its caller is cancelled, so that nothing is
        written twice."""
        if self._writing is None or self._writing.done():
            self._writing = asyncio.create_task(self._write_batches())
        await asyncio.shield(self._writing)

    async def _write_batches(self) -> None:
        while self._waiting:
            batch = [self._waiting[number] for number in range(min(BATCH_MAX, len(self._waiting)))]
            await self._in_thread(self._database.add, batch, now=time.time())
            for written in batch:
                if self._waiting and self._waiting[0] is written:  # else it was given up meanwhile
                    self._waiting.popleft()

    # -- readers

    async def page(self, wanted: HistoryFilter, sees: Sees | None = None, *, remote: str = "") -> HistoryPage:
        """The newest records that match and that the caller, at the address `remote`, may see; None
        sees all. Where there are none the page is as if no record matched: nothing tells of those
        that are hidden. Raises Unavailable, also over READERS_MAX requests at a time."""
        with self._reading.place(remote) as room:
            if not room:
                raise Unavailable("too many ask for this fleet's history at once", remedy="Try again in a moment")
            return await self._page(wanted, sees)

    async def _page(self, wanted: HistoryFilter, sees: Sees | None) -> HistoryPage:
        records: list[HistoryRecord] = []
        before, many = wanted.before, wanted.limit + 1 if sees is None else READ_MAX
        while len(records) <= wanted.limit:
            asked = msgspec.structs.replace(wanted, before=before, limit=many)
            read = await self._in_thread(self._database.read, asked)
            records += read if sees is None else filter(sees, read)
            if len(read) < many:
                break
            before = read[-1].number
        found = records[: wanted.limit]
        return HistoryPage(found, found[-1].number if len(records) > wanted.limit else 0)

    async def follow(self, remote: str = "") -> AsyncGenerator[HistoryRecord | None, None]:
        """What is reported from now on, after a None that says that it has begun, for a follower at
        the address `remote`. Raises Unavailable over FOLLOWERS_MAX followers, or
        FOLLOWERS_PER_ADDRESS_MAX at one address."""
        with self._following.place(remote) as room:
            if not room:
                raise Unavailable(
                    f"{FOLLOWERS_MAX} follow this fleet's history already, or {FOLLOWERS_PER_ADDRESS_MAX} from {remote}",
                    remedy="End some of them",
                )
            async with contextlib.aclosing(self._follow()) as records:
                async for record in records:
                    yield record

    async def _follow(self) -> AsyncGenerator[HistoryRecord | None, None]:
        if not self._followers:
            self._last = await self._in_thread(self._database.last)
            before = await self._in_thread(self._database.after, self._last, 0)
            self._heard.extend(record.number for record in before)
        follower = Follower()
        self._followers.append(follower)
        self._arrived.set()
        try:
            yield None
            while not (self._ended or follower.behind):
                if not follower.waiting:
                    follower.arrived.clear()
                    await follower.arrived.wait()
                    continue
                yield follower.waiting.popleft()
        finally:
            self._followers.remove(follower)

    async def _tell(self) -> None:
        if not self._followers:
            return
        while True:
            read = await self._in_thread(self._database.after, self._last, BATCH_MAX)
            fresh = [record for record in read if record.number not in self._heard]
            if not fresh:
                return
            self._heard.extend(record.number for record in fresh)
            self._last = max(self._last, fresh[-1].number)
            for follower in self._followers:
                follower.behind = follower.behind or len(follower.waiting) + len(fresh) > BEHIND_MAX
                follower.waiting += fresh if not follower.behind else ()
                follower.arrived.set()


def _times(event: Event) -> Mapping[str, float]:
    """How long a broadcast took to reach shares of its hosts."""
    report = event.broadcast
    assert report is not None
    moments = (report.to_50_s, report.to_99_s, report.to_100_s)
    return {share: seconds for share, seconds in zip(SHARES, moments, strict=True) if seconds is not None}
