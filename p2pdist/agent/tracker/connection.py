"""The WebSocket of a session with a tracker: what is said over it, and whether the tracker still
lives.

Messages that wait for the tracker leave in as few as will do. A package of hundreds of small blobs
means hundreds of holdings and as many completions within a second, which one by one would cost the
tracker as many messages and passes. Messages about one blob stay in order, and so do all others.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import NoReturn

import aiohttp
import msgspec

from p2pdist.agent.tracker.attention import Attention
from p2pdist.model.digest import Digest
from p2pdist.model.errors import P2PDistError, Unavailable, from_problem
from p2pdist.model.messages import (
    BLOBS_PER_MESSAGE_MAX,
    Access,
    Advance,
    Assign,
    Evict,
    FromAgent,
    FromTracker,
    Holding,
    Holdings,
    Keep,
    Listed,
    NotOwner,
    OriginShare,
    OwnershipChanged,
    Pace,
    Recall,
    Reject,
    Release,
    Report,
    Reread,
    Welcome,
    decode_from_tracker,
    encode,
)
from p2pdist.transfer.stream.connections import bytes_received

logger = logging.getLogger(__name__)

HEARTBEAT_S, PATIENCE_S = 10.0, 5.0
"""A tracker from which nothing came for so long is pinged, and has so long to show that it
lives."""

SEVERAL_HEARTBEAT_S_MIN, SEVERAL_HEARTBEAT_S_MAX = 0.75, 4.0
HEARTBEAT_INTERVALS = 3.0
SEVERAL_PATIENCE_S = 2.0
"""The same where another tracker can take the place of one that is silent: it is pinged after so
many intervals of reports, which are long where the tracker has many hosts or much to do. Those of
one with up to 2,500, and little to do, notice that it hangs before 3 s have passed."""

SLACK_MAX, SLACK_S = 16.0, 60.0
"""After each session that ended by silence a tracker may be silent for twice as long, up to so many
times, in the first SLACK_S of the next: over a slow link its pong waits behind all holdings."""

LATE_S = 0.05
"""What came while this process was busy is read first, before a tracker is called silent."""

GOODBYE_S = 1.0
"""How long a tracker may take to take, and to answer, the end of a session."""

REPORT_S_MIN, REPORT_S_MAX = 0.05, 60.0
"""Limits of the interval at which a tracker has this host report."""

GATHER_S = 0.002
"""How long a holding or a report waits for others of the same moment, to leave with them."""

OUTBOX_MAX = 4096
"""Messages to a tracker that does not read them, before the session is broken off."""

ToHost = Assign | Access | OriginShare | Keep | Evict | Release | Reject | Listed | Reread | Recall
"""What a tracker sends that is not about the session itself."""

OwnershipNews = Welcome | OwnershipChanged | NotOwner
"""What says which tracker of several owns which blobs."""


@dataclass(frozen=True, slots=True)
class Handlers:
    """What a session asks its host, and where it delivers what a tracker sends."""

    holdings: Callable[[], list[Holding]]
    """All that the host holds and fetches; called when a session opens."""
    report: Callable[[], Report | None]
    """Progress since the last report, None when there is none."""
    on_message: Callable[[ToHost], None]
    on_change: Callable[[bool], None]
    """Gets True when a tracker answers and False when the session breaks."""
    on_ownership: Callable[[OwnershipNews], None] = lambda news: None
    """Gets every welcome, before `on_change`, and what the tracker says later of which tracker owns
    which blobs."""


def gathered(messages: Iterable[FromAgent]) -> list[FromAgent]:
    """The same information in fewer messages: the holdings of several blobs in one, and the reports
    that follow in one."""
    batch = _Batch()
    for message in messages:
        batch.add(message)
    batch.end()
    return batch.messages


class _Batch:
    """Joins holdings into one message, and the reports that follow into another. A holding states
    all that earlier messages stated of its blob, and an advance all that earlier advances did, but
    that the pull yielded: it did if one of them says so."""

    def __init__(self) -> None:
        self.messages: list[FromAgent] = []
        self._holdings: dict[Digest, Holding] = {}
        self._advances: dict[Digest, Advance] = {}
        self._reports: list[Report] = []

    def add(self, message: FromAgent) -> None:
        match message:
            case Holding(blob):
                if blob in self._advances or len(self._holdings) >= BLOBS_PER_MESSAGE_MAX:
                    self.end()
                self._holdings[blob] = message
            case Report(blobs):
                if len(self._advances) + len(blobs) > BLOBS_PER_MESSAGE_MAX:
                    self.end()
                for advance in blobs:
                    before = self._advances.get(advance.blob)
                    yields = before is not None and before.yields
                    self._advances[advance.blob] = msgspec.structs.replace(advance, yields=True) if yields else advance
                self._reports.append(message)
            case _:
                self.end()
                self.messages.append(message)

    def end(self) -> None:
        """Close the two messages: what follows goes into others."""
        holdings, reports = tuple(self._holdings.values()), self._reports
        if holdings:
            self.messages.append(Holdings(holdings) if len(holdings) > 1 else holdings[0])
        if reports:
            sent_bytes, busy_s = sum(report.sent_bytes for report in reports), sum(report.busy_s for report in reports)
            self.messages.append(Report(tuple(self._advances.values()), sent_bytes, busy_s))
        self._holdings, self._advances, self._reports = {}, {}, []


class Connection:
    """The WebSocket of a tracker that has welcomed this host: writes what waits to be sent, reads,
    and reports every `interval_s`."""

    def __init__(
        self,
        socket: aiohttp.ClientWebSocketResponse,
        handlers: Handlers,
        interval_s: float,
        attention: Attention,
        several: Callable[[], bool],
        slack: float,
    ) -> None:
        self._socket, self._handlers, self._attention = socket, handlers, attention
        self._interval_s = _clamped(interval_s)
        self._several = several
        """Whether another tracker can take the place of this one."""
        self.slack = slack
        """How many times as long as usual it may be silent; as usual after SLACK_S."""
        self.silent = False
        """Whether the session ends because the tracker was silent."""
        self._ping: asyncio.Task[None] | None = None
        """The last ping."""
        self._heard = asyncio.Event()
        """Something came from the tracker since it was pinged. `_heard_at` says when it came last,
        in the event loop's time."""
        self._heard_at = self._began_at = asyncio.get_running_loop().time()
        self._outbox: asyncio.Queue[FromAgent] = asyncio.Queue(OUTBOX_MAX)
        self._broken: asyncio.Future[NoReturn] = asyncio.get_running_loop().create_future()
        """Gets the failure that ends the session, where neither reading nor writing raises it."""
        self._reporting: asyncio.TimerHandle | None = None
        """The next report, while `run` runs."""

    def send(self, message: FromAgent) -> None:
        """Queue a message; an outbox that is full breaks the session."""
        if self._outbox.full():
            return
        self._outbox.put_nowait(message)
        if self._outbox.full():
            self.end(Unavailable(f"it leaves {OUTBOX_MAX} messages unread"))

    def send_holdings(self) -> None:
        """Queue all that the host holds and fetches."""
        holdings = self._handlers.holdings()
        for start in range(0, len(holdings), BLOBS_PER_MESSAGE_MAX):
            self.send(Holdings(tuple(holdings[start : start + BLOBS_PER_MESSAGE_MAX])))

    async def run(self) -> None:
        """Read, write and report until either side ends the session; raises why."""
        tasks = [asyncio.create_task(work) for work in (self._read(), self._write(), self._watch())]
        self._report_later(self._interval_s * random.random())
        try:
            done, _ = await asyncio.wait([*tasks, self._broken], return_when=asyncio.FIRST_COMPLETED)
            for ended in done:
                ended.result()
        finally:
            self._broken.cancel()
            if self._reporting is not None:
                self._reporting.cancel()
                self._reporting = None
            running = [*tasks, *([self._ping] if self._ping is not None else [])]
            for task in running:
                task.cancel()
            await asyncio.gather(*running, return_exceptions=True)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(GOODBYE_S):
                    await self._socket.close()

    def end(self, error: Exception) -> None:
        """End the session for this reason."""
        if not self._broken.done():
            self._broken.set_exception(error)

    async def _read(self) -> NoReturn:
        last_rejection: P2PDistError | None = None
        while True:
            try:
                message = await receive(self._socket, self._note_heard)
            except aiohttp.ClientError as ended:
                raise last_rejection or ended from None
            if isinstance(message, Reject) and message.blob is None:
                last_rejection = from_problem(message.problem)
            if isinstance(message, Pace):
                self._set_interval(message.report_interval_s)
            elif isinstance(message, ToHost):
                self._handlers.on_message(message)
            elif isinstance(message, OwnershipChanged | NotOwner):
                self._handlers.on_ownership(message)

    def _note_heard(self) -> None:
        """Something came from the tracker, be it a pong."""
        self._heard_at = asyncio.get_running_loop().time()
        self._heard.set()
        self._attention.heard()

    async def _watch(self) -> NoReturn:
        """End the session with a tracker that is silent. It shows by any message or pong that it
        lives, be it one that has come in part, and a ping asks it to; one that hangs may not even
        take that."""
        loop = asyncio.get_running_loop()
        while True:
            pause_s, patience_s = heartbeat_s(self._several(), self._interval_s)
            if (rest_s := self._heard_at + pause_s - loop.time()) > 0:
                await asyncio.sleep(rest_s)
                continue
            if loop.time() >= self._began_at + SLACK_S:
                self.slack = 1.0
            self._heard.clear()
            received = self._bytes_received()
            if self._ping is None or self._ping.done():
                # A task that is not awaited: it waits while the tracker takes nothing, and a writer
                # that is cancelled while it waits fails the others.
                self._ping = loop.create_task(self._socket.ping())
                self._ping.add_done_callback(_note_taken)
            try:
                async with asyncio.timeout(patience_s * self.slack):
                    await self._heard.wait()
            except TimeoutError:
                await asyncio.sleep(LATE_S)
                if not self._heard.is_set() and self._bytes_received() > received:
                    self._note_heard()  # over a slow link a large message takes its time
                self.silent = not self._heard.is_set()
                if self.silent:
                    raise Unavailable(f"it has been silent for {loop.time() - self._heard_at:.0f} s") from None

    def _bytes_received(self) -> int:
        connection = self._socket.get_extra_info("socket")
        return bytes_received(connection) if connection is not None else 0

    async def _write(self) -> NoReturn:
        while True:
            waiting = [await self._outbox.get()]
            if isinstance(waiting[0], Holding | Report):
                await asyncio.sleep(GATHER_S)
            while not self._outbox.empty():
                waiting.append(self._outbox.get_nowait())
            for message in gathered(waiting):
                await self._socket.send_frame(encode(message), aiohttp.WSMsgType.TEXT)

    def _set_interval(self, interval_s: float) -> None:
        self._interval_s = _clamped(interval_s)
        if self._reporting is not None:
            # A new interval counts at once: the tracker would take a host that sleeps on through
            # the old one for silent.
            self._reporting.cancel()
            self._report_later(self._interval_s * random.random())

    def _report_later(self, delay_s: float) -> None:
        self._reporting = asyncio.get_running_loop().call_later(delay_s, self._report_now)

    def _report_now(self) -> None:
        """Send what is new, when something is. That this host lives shows by pings and pongs."""
        try:
            report = self._handlers.report()
        except Exception as error:
            self.end(error)
            return
        if report is not None:
            self.send(report)
        self._report_later(self._interval_s)


def _note_taken(ping: asyncio.Task[None]) -> None:
    """Mark the failure of a ping as seen: reading tells of it, too."""
    if not ping.cancelled():
        ping.exception()


def heartbeat_s(several: bool, interval_s: float) -> tuple[float, float]:
    """After how many seconds of silence a tracker is pinged that has this host report every
    `interval_s`, and how many more it may be silent; `several`: another can take its place."""
    if not several:
        return HEARTBEAT_S, PATIENCE_S
    pause_s = max(SEVERAL_HEARTBEAT_S_MIN, HEARTBEAT_INTERVALS * interval_s)
    return min(pause_s, SEVERAL_HEARTBEAT_S_MAX), SEVERAL_PATIENCE_S


def _clamped(interval_s: float) -> float:
    return min(max(interval_s, REPORT_S_MIN), REPORT_S_MAX)


async def receive(socket: aiohttp.ClientWebSocketResponse, heard: Callable[[], None] = lambda: None) -> FromTracker:
    """The tracker's next message; calls `heard` for each frame that comes. Answers pings."""
    while (frame := await socket.receive()).type in (aiohttp.WSMsgType.PING, aiohttp.WSMsgType.PONG):
        heard()
        if frame.type == aiohttp.WSMsgType.PING:
            await socket.pong(frame.data)
    if frame.type not in (aiohttp.WSMsgType.TEXT, aiohttp.WSMsgType.BINARY):
        raise aiohttp.ClientConnectionError("the session ended")
    heard()
    return decode_from_tracker(frame.data)
