"""The tracker as a process: one writer around the pure core.

Every event, from whichever session, goes through `submit` on the event loop, so the core is never entered twice. What it answers is
queued per session; a session that does not read its queue is ended.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable

from p2pdist.model.errors import Conflict
from p2pdist.model.messages import Assign, FromTracker, Hello, Reject
from tracker.content import Content
from tracker.core.events import Drop, Event, Send, SessionClosed, SessionOpened, Tick
from tracker.core.fleet import Fleet

TICK_S = 0.05
OUTBOX_MAX = 4096

_logger = logging.getLogger(__name__)


class Outbox:
    """Messages waiting to be sent to one agent; None ends the session."""

    def __init__(self) -> None:
        self.queue: asyncio.Queue[FromTracker | None] = asyncio.Queue()
        self.ended = False

    def put(self, message: FromTracker | None) -> None:
        if self.ended:
            return
        if message is None or self.queue.qsize() >= OUTBOX_MAX:
            self.ended = True
            message = None
        self.queue.put_nowait(message)


class Service:
    """See the module's text. `observe_plan` hears the seconds that each planning step took."""

    def __init__(self, fleet: Fleet, content: Content) -> None:
        self.fleet = fleet
        self.content = content
        self.observe_plan: Callable[[float], None] = lambda seconds: None
        self._outboxes: dict[int, Outbox] = {}
        self._next_session = 1
        self._lag_s = 0.0

    @property
    def sessions(self) -> int:
        return len(self._outboxes)

    @property
    def lag_s(self) -> float:
        """How late the last tick came: the event loop's delay in seconds."""
        return self._lag_s

    def open_session(self, hello: Hello) -> tuple[int, Outbox]:
        """Take a host in: the number and the outbox of its session. Raises Conflict when another agent uses its name.

        The same address means the same agent, started again while its last session is not yet known to be dead: the new session takes
        over. Two agents of one name would otherwise drive each other out for ever; when the other one is really gone its heartbeat is
        missed before long, and the next try succeeds.
        """
        known = self.fleet.hosts.get(hello.host)
        older = self._outboxes.get(known.session) if known is not None and known.session is not None else None
        if known is not None and older is not None:
            rival = Conflict(
                f"another agent named {hello.host} is connected, from {known.address}",
                remedy="Give each agent its own --name, and --listen or --advertise its own address",
            )
            if known.address != hello.address:
                raise rival
            older.put(Reject(rival.problem()))
        number = self._next_session
        self._next_session += 1
        outbox = self._outboxes[number] = Outbox()
        try:
            self.submit(SessionOpened(number, hello))
        except BaseException:
            del self._outboxes[number]
            raise
        return number, outbox

    def close_session(self, number: int) -> None:
        """End a session, whoever ended it first."""
        outbox = self._outboxes.pop(number, None)
        if outbox is not None:
            outbox.put(None)
        self.submit(SessionClosed(number))

    def submit(self, event: Event) -> None:
        """Hand an event to the core and queue what it answers."""
        started = time.perf_counter()
        commands = self.fleet.handle(event, now=time.monotonic())
        planned = False
        for command in commands:
            outbox = self._outboxes.get(command.session)
            if outbox is None:
                continue
            match command:
                case Send(_, message):
                    planned = planned or isinstance(message, Assign)
                    outbox.put(message)
                case Drop():
                    outbox.put(None)
        if planned:
            self.observe_plan(time.perf_counter() - started)

    async def run(self) -> None:
        """Drive the core's clock until cancelled."""
        due = time.monotonic()
        while True:
            due += TICK_S
            await asyncio.sleep(max(0.0, due - time.monotonic()))
            self._lag_s = max(0.0, time.monotonic() - due)
            due = max(due, time.monotonic() - TICK_S)
            try:
                self.submit(Tick())
            except Exception:
                _logger.exception("a tick failed")
