"""The tracker as a process: one writer around the pure core.

Every event, from whichever session, goes through `submit` on the event loop, so the core is never
entered twice. What it answers is queued per session; a session that does not read its queue is
ended.

The core is called when a message comes, every TICK_S, and when it wants to be: a small blob's batch
of joins does not wait for a tick.

Reports are most of what a tracker hears, so agents are asked for fewer of them the more there are
(tracker/core/report_rate.py). They are told in the welcome, and again (`Pace`) whenever their
number has doubled or halved: while a fleet grows that is about one message a session.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Callable, Coroutine
from typing import TYPE_CHECKING, Any, Protocol

import msgspec

from p2pdist.model.access import OPEN, Identity
from p2pdist.model.digest import Digest
from p2pdist.model.messages import (
    Assign,
    Condition,
    EpochSeen,
    Evicted,
    FromTracker,
    Hello,
    Holding,
    Holdings,
    Kept,
    Leaving,
    Pace,
    Reject,
    Report,
    Spares,
    Welcome,
    encode,
)
from p2pdist.model.url import redacted
from tracker.content import Content
from tracker.core.bittorrent.announce import Announces
from tracker.core.events import (
    Broadcast,
    Described,
    Drop,
    Due,
    Event,
    ListFound,
    ListMatched,
    ListWanted,
    LookAtOrigin,
    Received,
    Send,
    SessionClosed,
    SessionOpened,
    Tick,
    WrongHashes,
)
from tracker.core.fleet import Fleet
from tracker.core.report_rate import ReportRate
from tracker.founding import Founding
from tracker.history.recorder import HistoryRecorder
from tracker.hosts.desk import HostDesk
from tracker.names import Names, conflict
from tracker.networks import Network, check_address
from tracker.piece_lists import PieceLists
from tracker.reach import Reach
from tracker.traces import Traces
from tracker.upstreams.hubs import Hubs
from tracker.upstreams.upstreams import Upstreams

if TYPE_CHECKING:  # a tracker without access control need not load what it is made of
    from tracker.access.control import AccessControl
    from tracker.access.sessions import SessionAccess

TICK_S = 0.05
LOAD_S = 2.0
"""How often it is looked at how busy this process is."""

OUTBOX_MAX = 4096

logger = logging.getLogger(__name__)

_BLAMED = (
    "%s stated wrong hashes for %d pieces of %s: it lies, or upstream sends it other bytes than others;"
    " it reads nothing more from upstream for an hour"
)


class Outbox:
    """Messages waiting to be sent to one agent, one for many agents encoded; None ends the session.
    A list and at times a future: there are as many as sessions."""

    __slots__ = ("_arrival", "_waiting", "ended")

    def __init__(self) -> None:
        self._waiting: list[FromTracker | bytes | None] = []
        self._arrival: asyncio.Future[None] | None = None
        self.ended = False

    def put(self, message: FromTracker | bytes | None) -> None:
        if self.ended:
            return
        if message is None or len(self._waiting) >= OUTBOX_MAX:
            self.ended = True
            message = None
        self._waiting.append(message)
        if self._arrival is not None and not self._arrival.done():
            self._arrival.set_result(None)

    async def take(self) -> list[FromTracker | bytes | None]:
        """All that waits, once there is something; for one reader."""
        while not self._waiting:
            self._arrival = asyncio.get_running_loop().create_future()
            await self._arrival
        self._arrival = None
        taken, self._waiting = self._waiting, []
        return taken


class Listener(Protocol):
    """Hears which hosts are connected, and what they say of preseeds and of blobs that they need
    not fetch."""

    def opened(self, host: str) -> None: ...

    def closed(self, host: str) -> None: ...

    def draining(self, host: str) -> None: ...

    def heard(self, host: str, message: Kept | Spares) -> None: ...


class _ReportRates:
    """Asks agents to report as often as their number and the load of this process allow."""

    def __init__(self, fleet: Fleet, outboxes: dict[int, Outbox], names: dict[int, str]) -> None:
        self._fleet, self._outboxes, self._names = fleet, outboxes, names
        self._report_rate, self._rated_for = ReportRate(fleet.report_interval_s), 1
        self._load_at, self._load_cpu_s = time.monotonic(), time.process_time()
        self._patient_until = 0.0
        self.load = 0.0
        """The share of a processor that this process took lately."""

    def count(self, sessions: int) -> None:
        """There are so many sessions: agents hear of it when there are twice or half as many as
        when they were told last."""
        if self._rated_for < 2 * sessions and sessions < 2 * self._rated_for:
            return
        self._rated_for = max(1, sessions)
        self._send()

    def adjust(self, now: float) -> None:
        """Let agents report less often while this process is busy; agents with an older rate had
        time to hear of the new one."""
        if now >= self._patient_until:
            self._fleet.patience_s = 0.0
        if now - self._load_at < LOAD_S:
            return
        cpu_s = time.process_time()
        self.load = (cpu_s - self._load_cpu_s) / (now - self._load_at)
        self._load_at, self._load_cpu_s = now, cpu_s
        if self._report_rate.loaded(self.load):
            self._send()

    def _send(self) -> None:
        fleet, interval_s = self._fleet, self._report_rate.interval_s(self._rated_for)
        if interval_s == fleet.report_interval_s:
            return
        if interval_s < fleet.report_interval_s:
            fleet.patience_s = max(fleet.patience_s, fleet.report_interval_s)
            self._patient_until = time.monotonic() + fleet.patience_s
        fleet.report_interval_s = interval_s
        for session, outbox in self._outboxes.items():
            if self._names.get(session) not in fleet.probing.asked_at:  # they are told when the watch is over
                outbox.put(Pace(interval_s))


class Service:
    """The single writer around the fleet. `observe_plan` hears the seconds that each planning step
    took. `web_origin` is the address of an OCI image layout that any BitTorrent client may read
    over HTTP (a cache or a limited server, not the bare origin); empty for none. `access` is None
    while access is off. `upstreams` are the registries that it reads for its fleet, `hubs` its
    hub of models."""

    def __init__(
        self,
        fleet: Fleet,
        content: Content,
        *,
        web_origin: str = "",
        access: AccessControl | None = None,
        upstreams: Upstreams | None = None,
        hubs: Hubs | None = None,
    ) -> None:
        self.fleet = fleet
        self.content = content
        self.announces = Announces(fleet.hosts, fleet.swarms)
        self.reach = Reach(fleet.hosts)
        self.networks: tuple[Network, ...] = ()
        """Where agents may be reached; none: anywhere (tracker/networks.py)."""
        self._disputes = Names()
        self.web_origin = redacted(web_origin).rstrip("/")
        self.upstreams = upstreams if upstreams is not None else Upstreams()
        self.hubs = hubs if hubs is not None else Hubs()
        content.learned = self.upstreams.learned = lambda layouts: self.submit(Described(layouts))
        self.hubs.learned = content.learned
        content.watch.changed = fleet.history.origin
        self.observe_plan: Callable[[float], None] = lambda seconds: None
        self.listener: Listener | None = None
        self.access: SessionAccess | None = None
        if access is not None:
            from tracker.access.sessions import SessionAccess

            self.access = SessionAccess(access, fleet, content, self.upstreams)
            access.changed.append(self._access_changed)
        self._outboxes: dict[int, Outbox] = {}
        self._names: dict[int, str] = {}
        self._founding, self._next_session = Founding(), 1
        self._rates = _ReportRates(fleet, self._outboxes, self._names)
        self._lag_s, self._due_at = 0.0, math.inf
        self._timer: asyncio.TimerHandle | None = None
        self.ticks = 0
        """Ticks of the clock that went well (tracker/cluster/cluster.py)."""
        self.heard_epoch: Callable[[int, str], None] = lambda epoch, by: None
        """Hears that an agent knows an ownership of this epoch, and from which address."""
        self.blamed_hosts = 0
        """How often a host was blamed for wrong hashes of a vouched list; a metric."""
        self._lists = PieceLists(content.documents)
        self.desk = HostDesk(self.send)
        """What operators have hosts do."""
        self.history = HistoryRecorder(fleet.history)
        """What has happened; the owner may give another one, which outlives the process."""
        self.traces = Traces()
        """Of the starts of packages; the owner may give others, which outlive the process."""
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def sessions(self) -> int:
        return len(self._outboxes)

    @property
    def load(self) -> float:
        """The share of a processor that this process took lately."""
        return self._rates.load

    @property
    def lag_s(self) -> float:
        """How late the last tick came: the event loop's delay in seconds."""
        return self._lag_s

    async def resolve_name(self, hello: Hello, remote: str) -> int | None:
        """Find out whether an agent that says hello from the address `remote` may have the name
        that it says: the number of the session that it takes over, None when there is none. Raises
        Conflict when another agent has the name, Unavailable (tracker/names.py), Refused for an
        address that is not believed (tracker/networks.py)."""
        check_address(hello, remote, self.networks)
        known = self.fleet.hosts.get(hello.host)
        if known is None or known.session not in self._outboxes:
            return None
        session = known.session
        await self._disputes.resolve(known, hello, remote)
        return session

    def open_session(
        self, hello: Hello, identity: Identity = OPEN, *, replaces: int | None = None, source: str = ""
    ) -> tuple[int, Outbox]:
        """Take a host in: the number and the outbox of its session. Raises Conflict when the host
        has a session other than `replaces`, which the new one takes over. `source` is the address
        that the connection came from."""
        known = self.fleet.hosts.get(hello.host)
        older = self._outboxes.get(known.session) if known is not None and known.session is not None else None
        if known is not None and older is not None:
            rival = conflict(known)
            if known.session != replaces:
                raise rival
            older.put(Reject(rival.problem()))
        number = self._next_session
        self._next_session += 1
        self._rates.count(len(self._outboxes) + 1)
        outbox = self._outboxes[number] = Outbox()
        if self.access is not None:
            self.access.open(number, identity)
        try:
            ahead_s = round(hello.time - time.time(), 3) if hello.time else None
            self.submit(SessionOpened(number, hello, source, identity.credential.startswith("join:"), ahead_s))
        except BaseException:
            self.close_session(number)
            raise
        self._names[number] = hello.host
        self._founding.opened(number, source)
        if self.access is not None:
            outbox.put(self.access.control.encoded)
        if self.listener is not None and self._at_home(number) is not None:
            self.listener.opened(hello.host)
        return number, outbox

    def close_session(self, number: int, why: str = "") -> None:
        """End a session, on either side's initiative; `why` in words for people."""
        outbox = self._outboxes.pop(number, None)
        if outbox is not None:
            outbox.put(None)
        if self.access is not None:
            self.access.close(number)
        host = self._at_home(number)
        self._names.pop(number, None)
        self._founding.closed(number)
        self.submit(SessionClosed(number, why))
        if host is not None:
            self.desk.closed(host)
        if self.listener is not None and host is not None:
            self.listener.closed(host)
        self._rates.count(len(self._outboxes))

    def held_back_s(self, session: int, message: Holding | Holdings) -> float:
        """How long the reader of a session is to wait before it submits a message: 0 unless the
        session founds swarms faster than FOUNDED_PER_S, of blobs that no manifest names."""
        holdings = message.blobs if isinstance(message, Holdings) else (message,)
        founded = sum(map(self.fleet.membership.founds, holdings))
        if not founded:
            return 0.0
        return self._founding.held_back_s(session, founded)

    def send(self, host: str, message: FromTracker) -> None:
        """Queue a message for a host; nothing happens when it is not connected."""
        known = self.fleet.hosts.get(host)
        outbox = self._outboxes.get(known.session) if known is not None and known.session is not None else None
        if outbox is not None:
            outbox.put(message)

    def _access_changed(self) -> None:
        """Tell all agents, and end the sessions of hosts that may no longer be here."""
        if self.access is None:
            return
        self.fleet.history.changed("the access rules have changed")
        refused = self.access.refused()
        for number, outbox in self._outboxes.items():
            outbox.put(self.access.control.encoded)  # a host that is revoked stops to serve when it hears of it
            if (error := refused.get(number)) is not None:
                outbox.put(Reject(error.problem()))
                outbox.put(None)

    def _host_of(self, session: int) -> str | None:
        """The host that has this session, unless it was not taken in or has another one by now."""
        known = self.fleet.hosts.get(self._names.get(session, ""))
        return known.name if known is not None and known.session == session else None

    def _at_home(self, session: int) -> str | None:
        """The host whose home session this is, of which alone the listener hears."""
        name = self._host_of(session)
        return name if name is not None and not self.fleet.hosts[name].partial else None

    def submit(self, event: Event) -> None:
        """Hand an event to the core and queue what it answers."""
        if isinstance(event, Received):
            if not isinstance(event.message, Report) and _told(self, event):  # most are reports
                return
            if self.access is not None:
                admitted = self._admitted(self.access, event)
                if admitted is None:
                    return
                event = admitted
        now = time.monotonic()
        commands = self.fleet.handle(event, now=now)
        if self.fleet.wake_at < self._due_at:
            self._due_at = self.fleet.wake_at
            # Rounded up: uvloop counts in milliseconds, and would call too early.
            delay_s = math.ceil(max(0.0, self._due_at - now) * 1000) / 1000
            if self._timer is not None:
                self._timer.cancel()  # else it would set another one for what has one already
            self._timer = asyncio.get_running_loop().call_later(delay_s, self._plan_due)
        planned = False
        for command in commands:
            match command:
                case Send(session, message) if (outbox := self._outboxes.get(session)) is not None:
                    planned = planned or isinstance(message, Assign)
                    outbox.put(self._completed(session, message))
                case Drop(session) if (outbox := self._outboxes.get(session)) is not None:
                    outbox.put(None)
                case Send() | Drop():
                    pass  # the session has ended meanwhile
                case LookAtOrigin():
                    self._begin(self._look(command))
                case Broadcast() | ListMatched() | ListWanted() | WrongHashes():
                    self._about_lists(command)
        if isinstance(event, Received):
            if isinstance(event.message, Leaving):
                host = self._at_home(event.session)
                if self.listener is not None and host is not None:
                    self.listener.draining(host)
            if self.access is not None and (host := self._host_of(event.session)):
                for assign in self.access.renewals(event.session, host, event.message):
                    self._outboxes[event.session].put(assign)
        self.history.collect()
        if planned:
            self.observe_plan(time.monotonic() - now)

    def _completed(self, session: int, message: FromTracker) -> FromTracker:
        """A message of the core with what the core does not know."""
        if isinstance(message, Welcome):
            return msgspec.structs.replace(message, time=round(time.time(), 3), failures=True, conditions=True)
        if self.access is not None and isinstance(message, Assign):
            return self.access.with_ticket(session, self._names[session], message)
        return message

    def _about_lists(self, command: Broadcast | ListMatched | ListWanted | WrongHashes) -> None:
        """Carry out what the core commands about vouched piece lists."""
        match command:
            case Broadcast(sessions, message):
                encoded = encode(message)
                for session in sessions:
                    if (outbox := self._outboxes.get(session)) is not None:
                        outbox.put(encoded)
            case ListMatched(blob, pieces, voters):
                self._begin(self._lists.keep(blob, pieces, voters))
            case ListWanted(blob):
                self._begin(self._find_list(blob))
            case WrongHashes(host, blob, count):
                self.blamed_hosts += 1
                logger.warning(_BLAMED, host, count, blob)

    async def _look(self, wanted: LookAtOrigin) -> None:
        self.submit(await self.content.looks.look(wanted))

    async def _find_list(self, blob: Digest) -> None:
        if (found := await self._lists.find(blob)) is not None:
            self.submit(ListFound(blob, *found))

    def _begin(self, work: Coroutine[Any, Any, None]) -> None:
        """Do something that reads or writes documents, beside the sessions."""
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _admitted(self, access: SessionAccess, event: Received) -> Received | None:
        """What of a message the host may say; the rest is answered here."""
        message, rejects = access.admit(event.session, event.message)
        outbox = self._outboxes.get(event.session)
        if outbox is not None:
            for reject in rejects:
                outbox.put(reject)
        return Received(event.session, message) if message is not None else None

    def _plan_due(self) -> None:
        self._due_at = math.inf
        try:
            self.submit(Due())
        except Exception:
            logger.exception("planning failed")

    async def run(self) -> None:
        """Drive the core's clock until cancelled."""
        due = time.monotonic()
        while True:
            due += TICK_S
            await asyncio.sleep(max(0.0, due - time.monotonic()))
            self._lag_s = max(0.0, time.monotonic() - due)
            due = max(due, time.monotonic() - TICK_S)
            try:
                self.announces.expire(now=time.monotonic())
                self.submit(Tick(time.time()))
                self._rates.adjust(time.monotonic())
                self.ticks += 1
            except Exception:
                logger.exception("a tick failed")


def _told(service: Service, event: Received) -> bool:
    """Whether a message is not the core's. What is said of preseeds and spare blobs is the
    listener's."""
    match event.message:
        case Kept() | Spares() as message:
            host = service._at_home(event.session)
            if service.listener is not None and host is not None:
                service.listener.heard(host, message)
        case Condition() | Evicted() as message:
            if (host := service._at_home(event.session)) is not None:
                service.desk.heard(host, message)
        case EpochSeen(epoch):
            known = service.fleet.hosts.get(service._names.get(event.session, ""))
            service.heard_epoch(epoch, known.voter if known is not None else "")
        case _:
            return False
    return True
