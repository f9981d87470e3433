"""Sessions and the tracker's service: the shell around the fleet core, with messages that take time
and tracker processes that die.

A host's side of its session: opened again whenever it breaks, with the agent's pauses; reports
at the interval that the tracker asks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import inf
from typing import TYPE_CHECKING

from p2pdist.model.messages import (
    PROTOCOL_VERSION,
    Assign,
    FromAgent,
    FromTracker,
    Hello,
    Holdings,
    Pace,
    Reject,
    Welcome,
)
from p2pdist.simulate.clock import World
from p2pdist.simulate.host import holdings, report
from p2pdist.simulate.network import CONNECT_TIMEOUT_S, TRACKER_NAME, Network
from p2pdist.simulate.processor import Processor
from tracker.core.events import Command, Drop, Due, Event, Received, Send, SessionClosed, SessionOpened, Tick
from tracker.core.fleet import Fleet

if TYPE_CHECKING:
    from p2pdist.simulate.host import Host


RETRY_FIRST_S = 0.2
RETRY_MAX_S = 5.0


class AgentSession:
    """See the module's text. `welcomed`: whether a tracker answers."""

    __slots__ = ("_interval_s", "_life", "_network", "_reporting", "_session", "_tracker", "_world", "host", "welcomed")

    def __init__(self, host: Host, tracker: Tracker) -> None:
        self.host = host
        self.welcomed = False
        self._tracker, self._world, self._network = tracker, tracker.world, tracker.network
        self._session: Session | None = None
        self._life = 0
        self._interval_s = 0.0
        self._reporting = 0

    def start(self) -> None:
        """The host's process starts."""
        self._life += 1
        self._connect(self._life, RETRY_FIRST_S)

    def stop(self) -> None:
        """The host's process is gone."""
        self._life += 1
        if self._session is not None:
            self._session.close_from_host()
            self._session = None
        self.welcomed = False

    def tell(self, message: FromAgent) -> None:
        """Say something to the tracker, if there is one."""
        if self._session is not None and self.welcomed:
            self._session.to_tracker(message)

    def report(self) -> None:
        """Tell at once what is new."""
        news = report(self.host)
        if news is not None:
            self.tell(news)

    def ended(self, session: Session) -> None:
        """The session broke: what runs goes on, and another session is tried for."""
        session.closed(host=True)
        if session is not self._session:
            return
        self._session = None
        self.welcomed = False
        self.host.tracker_changed(False)
        self._retry(self._life, RETRY_FIRST_S)

    def told(self, session: Session, message: FromTracker) -> None:
        """A message of the tracker has arrived."""
        self.host.processor.run(self._told, session, message)

    def _told(self, session: Session, message: FromTracker) -> None:
        if session is not self._session:
            return
        match message:
            case Welcome(_, interval_s):
                self.welcomed = True
                self.host.tracker_changed(True)
                held = holdings(self.host)
                if held:
                    self.tell(Holdings(held))
                self._report_every(session, interval_s)
            case Pace(interval_s):
                self._report_every(session, interval_s)
            case Assign() | Reject():
                self.host.decided(message)

    def _connect(self, life: int, pause_s: float) -> None:
        if life != self._life or self._session is not None:
            return
        if not self._network.reachable(self.host.name, TRACKER_NAME):
            self._world.after(CONNECT_TIMEOUT_S, self._retry, life, pause_s)
            return
        host = self.host
        hello = Hello(PROTOCOL_VERSION, host.name, host.address, host.zone, host.rack.name if host.rack else "")
        self._session = self._tracker.connect(self, hello)
        if self._session is None:
            self._retry(life, pause_s)

    def _retry(self, life: int, pause_s: float) -> None:
        wait_s = pause_s * self._world.random.uniform(0.5, 1.0)
        self._world.after(wait_s, self._connect, life, min(RETRY_MAX_S, pause_s * 1.7))

    def _report_every(self, session: Session, interval_s: float) -> None:
        self._interval_s = interval_s
        self._reporting += 1
        self._world.after(self._world.random.uniform(0, interval_s), self._report, session, self._reporting)

    def _report(self, session: Session, number: int) -> None:
        self.host.processor.run(self._report_now, session, number)

    def _report_now(self, session: Session, number: int) -> None:
        if session is not self._session or number != self._reporting:
            return
        self.report()
        self._world.after(self._interval_s, self._report, session, number)


TICK_S = 0.05
USUAL_S = 0.0001
"""A message takes a tracker about so long."""

SILENCE_S = 5.0
"""A session over a path that has been silent for so long is given up by both sides (heartbeats)."""

Watcher = Callable[[Fleet, Event, list[Command], Mapping[int, "Session"]], None]
"""Sees each event that a fleet core has handled, what it commanded, and the open sessions."""


class Session:
    """One session; messages arrive in order after the latency, and wait while the path is cut."""

    __slots__ = ("_cut_since", "_waiting", "agent", "host", "host_open", "number", "tracker", "tracker_open")

    def __init__(self, tracker: Tracker, agent: AgentSession, number: int) -> None:
        self.tracker, self.agent, self.number = tracker, agent, number
        self.host = agent.host
        self.host_open = self.tracker_open = True
        self._cut_since: float | None = None
        self._waiting: list[tuple[Callable[..., object], tuple[object, ...]]] = []

    def to_tracker(self, message: FromAgent) -> None:
        """The host says something."""
        self._carry(self.tracker.received, self, message)

    def to_host(self, message: FromTracker) -> None:
        """The tracker says something."""
        self._carry(self.agent.told, self, message)

    def _carry(self, deliver: Callable[..., object], *arguments: object) -> None:
        if self._cut_since is None:
            self.tracker.world.after(self.tracker.network.latency_s, deliver, *arguments)
        else:
            self._waiting.append((deliver, arguments))

    def close_from_host(self) -> None:
        """The host's side is gone."""
        self.closed(host=True)
        self._carry(self.tracker.session_ended, self)

    def close_from_tracker(self) -> None:
        """The tracker's side is gone."""
        self.closed(host=False)
        self._carry(self.agent.ended, self)

    def closed(self, *, host: bool) -> None:
        """One side is closed. Once both are, cuts no longer matter."""
        if host:
            self.host_open = False
        else:
            self.tracker_open = False
        if not self.host_open and not self.tracker_open:
            self.tracker.network.sessions.pop(self, None)

    def path_changed(self, *, whole: bool) -> None:
        """The path between host and tracker was cut or healed."""
        world = self.tracker.world
        if not whole and self._cut_since is None:
            self._cut_since = world.now
            world.after(SILENCE_S, self._give_up, self._cut_since)
        elif whole and self._cut_since is not None:
            self._cut_since = None
            waiting, self._waiting = self._waiting, []
            for deliver, arguments in waiting:
                self._carry(deliver, *arguments)

    def _give_up(self, since: float) -> None:
        if self._cut_since == since:
            self._waiting.clear()
            self.tracker.session_ended(self)
            self.agent.ended(self)


class Tracker:
    """The tracker's process: one fleet core at a time, none while it is away."""

    def __init__(self, world: World, network: Network, watcher: Watcher, make_fleet: Callable[[float], Fleet]) -> None:
        self.world, self.network = world, network
        self.fleet: Fleet | None = None
        self.messages = 0
        self._watcher, self._make_fleet = watcher, make_fleet
        self._sessions: dict[int, Session] = {}
        self._number = 0
        self._life = 0
        self._due_at = inf
        self.processor = Processor(world, USUAL_S)

    def start(self) -> None:
        """A new process, which knows nothing."""
        self._life += 1
        self._due_at = inf
        self.fleet = self._make_fleet(self.world.now)
        self.world.after(TICK_S, self._tick, self._life)

    def kill(self) -> None:
        """The process dies, and every session with it."""
        self.fleet = None
        for session in list(self._sessions.values()):
            session.close_from_tracker()
        self._sessions.clear()

    def connect(self, agent: AgentSession, hello: Hello) -> Session | None:
        """A host opens a session; None when no process listens. The first message is on its way to
        the host when this returns."""
        if self.fleet is None:
            return None
        self._number += 1
        session = Session(self, agent, self._number)
        self._sessions[session.number] = session
        self.network.sessions[session] = None
        self._handle(SessionOpened(session.number, hello))
        return session

    def received(self, session: Session, message: FromAgent) -> None:
        """A host's message has arrived."""
        self.processor.run(self._received, session, message)

    def _received(self, session: Session, message: FromAgent) -> None:
        if session.tracker_open:
            self.messages += 1
            self._handle(Received(session.number, message))

    def session_ended(self, session: Session) -> None:
        """The other side of a session is gone."""
        if session.tracker_open:
            session.closed(host=False)
            self._handle(SessionClosed(session.number))
        self._sessions.pop(session.number, None)

    def _tick(self, life: int) -> None:
        self.processor.run(self._tick_now, life)

    def _tick_now(self, life: int) -> None:
        if life == self._life and self.fleet is not None:
            self._handle(Tick())
            self.world.after(TICK_S, self._tick, life)

    def _due(self, life: int) -> None:
        self.processor.run(self._due_now, life)

    def _due_now(self, life: int) -> None:
        if life == self._life and self.fleet is not None:
            self._due_at = inf
            self._handle(Due())

    def _handle(self, event: Event) -> None:
        assert self.fleet is not None
        commands = self.fleet.handle(event, now=self.world.now)
        if self.fleet.schedule.wake_at < self._due_at:
            self._due_at = self.fleet.schedule.wake_at
            self.world.at(self._due_at, self._due, self._life)
        self._watcher(self.fleet, event, commands, self._sessions)
        for command in commands:
            session = self._sessions.get(command.session)
            if session is None:
                continue
            match command:
                case Send(_, message):
                    session.to_host(message)
                case Drop():
                    session.close_from_tracker()
                    del self._sessions[session.number]
