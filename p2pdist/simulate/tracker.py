"""A simulated tracker: the service around the real fleet core, and its sessions with the hosts.

Model. Messages of a session arrive in order, each after the network's latency, and wait while the
path is cut; a path that stays cut for SILENCE_S ends the session on both sides, as heartbeats do.
A tracker's process can die, and every session with it; the next process knows nothing. One that is
frozen handles nothing, and hosts give their sessions with it up after SILENCE_S. A host opens its
session again whenever it breaks, after the pauses that agents make, and reports at the interval
that the tracker asks for.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import inf
from typing import Protocol

from p2pdist.model.digest import Digest
from p2pdist.model.messages import (
    Assign,
    EpochSeen,
    FromAgent,
    FromTracker,
    Hello,
    Holding,
    Holdings,
    Listed,
    NotOwner,
    OwnershipChanged,
    Pace,
    Recall,
    Reject,
    Report,
    Reread,
    Welcome,
)
from p2pdist.simulate.clock import Processor, World
from p2pdist.simulate.network import CONNECT_TIMEOUT_S, TRACKER_NAME, Network
from tracker.core.events import (
    Broadcast,
    Command,
    Drop,
    Due,
    Event,
    LookAtOrigin,
    OriginSeen,
    Received,
    Send,
    SessionClosed,
    SessionOpened,
    Tick,
)
from tracker.core.fleet import Fleet

RETRY_FIRST_S = 0.2
RETRY_MAX_S = 5.0
TICK_S = 0.05
USUAL_S = 0.0001
"""What a tracker's process takes for a message, about."""

LOOK_S = 0.05
"""What a look at the origin takes, about."""

SILENCE_S = 5.0
"""Both sides end a session when its path has been silent for so long (heartbeats)."""


SwarmMessage = Assign | Reject | Listed | Reread | Recall
"""What a tracker sends about a blob."""


OwnershipNews = Welcome | OwnershipChanged | NotOwner
"""What a tracker says of ownership."""

Owned = Callable[[Digest], bool]
"""Whether a blob is one of those of which a session speaks."""


def every(_blob: Digest) -> bool:
    """A session with the only tracker speaks of every blob."""
    return True


class TrackerSessions(Protocol):
    """How a host speaks with its trackers."""

    @property
    def welcomed(self) -> bool:
        """Whether a tracker answers."""

    def answers(self, blob: Digest) -> bool:
        """Whether the tracker of a blob answers."""

    def tracker_of(self, blob: Digest) -> Tracker | None:
        """The tracker with which the host speaks of a blob, as far as it knows one."""

    def start(self) -> None:
        """The host's process has started."""

    def stop(self) -> None:
        """The host's process is gone."""

    def send(self, message: FromAgent) -> None:
        """Send a message to the tracker that it is for, if that one answers."""

    def report(self) -> None:
        """Report at once what is new."""


class AgentSession:
    """A host's side of its session with the tracker, over all lives of its process.

    `holdings` says what the host holds and wants, `report` what is new since the last report (None:
    nothing), `on_message` hears what is said of blobs, `on_change` whether a tracker answers,
    `on_held` that it was told what the host holds, `on_ownership` what is said of ownership.
    """

    __slots__ = (
        "_hello",
        "_holdings",
        "_interval_s",
        "_life",
        "_network",
        "_on_change",
        "_on_held",
        "_on_message",
        "_on_ownership",
        "_processor",
        "_report",
        "_reporting",
        "_session",
        "_world",
        "tracker",
        "welcomed",
    )

    def __init__(
        self,
        hello: Hello,
        tracker: Tracker,
        processor: Processor,
        *,
        holdings: Callable[[], tuple[Holding, ...]],
        report: Callable[[], Report | None],
        on_message: Callable[[SwarmMessage], None],
        on_change: Callable[[bool], None],
        on_held: Callable[[], None],
        on_ownership: Callable[[OwnershipNews], None] = lambda news: None,
    ) -> None:
        self._hello, self.tracker, self._processor = hello, tracker, processor
        self._world, self._network = tracker.world, tracker.network
        self._holdings, self._report = holdings, report
        self._on_message, self._on_change, self._on_held = on_message, on_change, on_held
        self._on_ownership = on_ownership
        #: Whether a tracker answers; set by the welcome, cleared when the session ends.
        self.welcomed = False
        #: The session that is open or being opened.
        self._session: Session | None = None
        #: Counts starts and stops of the process, so that a retry of an earlier life does nothing.
        self._life = 0
        #: Time between reports, as the tracker asked last.
        self._interval_s = 0.0
        #: Counts the intervals that were asked for, so that the reports of an earlier one end.
        self._reporting = 0

    @property
    def host(self) -> str:
        """The name of the host."""
        return self._hello.host

    def answers(self, blob: Digest) -> bool:
        """Whether the tracker answers."""
        return self.welcomed

    def tracker_of(self, blob: Digest) -> Tracker | None:
        """The tracker."""
        return self.tracker

    def start(self) -> None:
        """Connect: the host's process has started."""
        self._life += 1
        self._connect(self._life, RETRY_FIRST_S)

    def stop(self) -> None:
        """End the session, without a word: the host's process is gone."""
        self._life += 1
        if self._session is not None:
            self._session.close_from_host()
            self._session = None
        self.welcomed = False

    def send(self, message: FromAgent) -> None:
        """Send a message to the tracker; without a tracker it is dropped."""
        if self._session is not None and self.welcomed:
            self._session.to_tracker(message)

    def report(self) -> None:
        """Report at once what is new."""
        report = self._report()
        if report is not None:
            self.send(report)

    def ended(self, session: Session) -> None:
        """The session broke: the host's pulls go on, and it tries to open another session."""
        session.closed(host=True)
        if session is not self._session:
            return
        self._session = None
        self.welcomed = False
        self._on_change(False)
        self._retry(self._life, RETRY_FIRST_S)

    def received(self, session: Session, message: FromTracker) -> None:
        """A message of the tracker has arrived; the process handles it when it gets to it."""
        self._processor.run(self._handle, session, message)

    def _handle(self, session: Session, message: FromTracker) -> None:
        if session is not self._session:
            return
        match message:
            case Welcome(_, interval_s):
                self.welcomed = True
                self._on_ownership(message)
                self._on_change(True)
                holdings = self._holdings()
                if holdings:
                    self.send(Holdings(holdings))
                    self._on_held()
                self._report_every(session, interval_s)
            case Pace(interval_s):
                self._report_every(session, interval_s)
            case Assign() | Reject() | Listed() | Reread() | Recall():
                self._on_message(message)
            case OwnershipChanged() | NotOwner():
                self._on_ownership(message)

    def _connect(self, life: int, pause_s: float) -> None:
        if life != self._life or self._session is not None:
            return
        if not self._network.paths.reachable(self.host, self.tracker.name):
            self._world.after(CONNECT_TIMEOUT_S, self._retry, life, pause_s)
            return
        self._session = self.tracker.connect(self, self._hello)
        if self._session is None:
            self._retry(life, pause_s)
        elif self.tracker.frozen:
            self._world.after(SILENCE_S, self._unanswered, self._session)

    def _unanswered(self, session: Session) -> None:
        """A tracker that accepted the connection has not said welcome."""
        if session is self._session and not self.welcomed:
            session.abandoned()

    def _retry(self, life: int, pause_s: float) -> None:
        wait_s = pause_s * self._world.random.uniform(0.5, 1.0)
        self._world.after(wait_s, self._connect, life, min(RETRY_MAX_S, pause_s * 1.7))

    def _report_every(self, session: Session, interval_s: float) -> None:
        self._interval_s = interval_s
        self._reporting += 1
        self._world.after(self._world.random.uniform(0, interval_s), self._report_due, session, self._reporting)

    def _report_due(self, session: Session, number: int) -> None:
        self._processor.run(self._report_now, session, number)

    def _report_now(self, session: Session, number: int) -> None:
        if session is not self._session or number != self._reporting:
            return
        self.report()
        self._world.after(self._interval_s, self._report_due, session, number)


Watcher = Callable[[Fleet, Event, list[Command], Mapping[int, "Session"]], None]
"""Sees each event that a fleet core has handled, what it commanded, and the open sessions."""


class Session:
    """One session between a host and a tracker's process, with the messages on their way."""

    __slots__ = (
        "_cut_since",
        "_waiting",
        "agent",
        "host",
        "host_open",
        "number",
        "path_s",
        "peer",
        "tracker",
        "tracker_open",
    )

    def __init__(self, tracker: Tracker, agent: AgentSession, number: int) -> None:
        self.tracker, self.agent, self.number = tracker, agent, number
        #: The names of the host and of the tracker.
        self.host, self.peer = agent.host, tracker.name
        #: The latency between them, one way, in seconds.
        self.path_s = tracker.network.path_s(agent.host, tracker.name)
        #: Whether each side is open; closed() changes them.
        self.host_open = self.tracker_open = True
        #: Since when the path is cut, in seconds; path_changed() keeps it.
        self._cut_since: float | None = None
        #: Messages and ends sent since then.
        self._waiting: list[tuple[Callable[..., object], tuple[object, ...]]] = []

    def to_tracker(self, message: FromAgent) -> None:
        """Carry a message of the host."""
        self._carry(self.tracker.received, self, message)

    def to_host(self, message: FromTracker) -> None:
        """Carry a message of the tracker."""
        self._carry(self.agent.received, self, message)

    def _carry(self, deliver: Callable[..., object], *arguments: object) -> None:
        if self._cut_since is None:
            self.tracker.world.after(self.path_s, deliver, *arguments)
        else:
            self._waiting.append((deliver, arguments))

    def close_from_host(self) -> None:
        """Close the host's side; the tracker learns it once the path is whole."""
        self.closed(host=True)
        self._carry(self.tracker.session_ended, self)

    def close_from_tracker(self) -> None:
        """Close the tracker's side; the host learns it once the path is whole."""
        self.closed(host=False)
        self._carry(self.agent.ended, self)

    def closed(self, *, host: bool) -> None:
        """One side is closed. Once both are, the network reports no cuts to the session."""
        if host:
            self.host_open = False
        else:
            self.tracker_open = False
        if not self.host_open and not self.tracker_open:
            self.tracker.network.paths.unwatch(self)

    def path_changed(self, *, whole: bool) -> None:
        """The path between host and tracker was cut, or is whole again."""
        world = self.tracker.world
        if not whole and self._cut_since is None:
            self._cut_since = world.now
            world.after(SILENCE_S, self._give_up, self._cut_since)
        elif whole and self._cut_since is not None:
            self._cut_since = None
            waiting, self._waiting = self._waiting, []
            for deliver, arguments in waiting:
                self._carry(deliver, *arguments)

    def abandoned(self) -> None:
        """The host gives the session up: the tracker is silent, and learns it when it wakes."""
        self._waiting.clear()
        self.agent.ended(self)
        self._carry(self.tracker.session_ended, self)

    def _give_up(self, since: float) -> None:
        if self._cut_since == since:
            self._waiting.clear()
            self.tracker.session_ended(self)
            self.agent.ended(self)


class Tracker:
    """The tracker's process, around one fleet core at a time. `watcher` sees each event that the
    core has handled; `make_fleet` makes a core, given the time; `name` is the one that paths to it
    have."""

    def __init__(
        self,
        world: World,
        network: Network,
        watcher: Watcher,
        make_fleet: Callable[[float], Fleet],
        name: str = TRACKER_NAME,
    ) -> None:
        self.world, self.network, self.name = world, network, name
        #: The core of the process that runs, None while none does; start() and kill() set it.
        self.fleet: Fleet | None = None
        #: How many messages of hosts have been handled, by all processes.
        self.messages = 0
        #: Whether it takes sessions; one of several takes none before it knows what it owns.
        self.open = True
        #: Hears which host has told of which epoch.
        self.on_epoch_seen: Callable[[str, int], None] = lambda host, epoch: None
        #: Looks at the origin.
        self.look: Callable[[LookAtOrigin], OriginSeen] = lambda wanted: OriginSeen(wanted.swarm, "unknown")
        self._frozen_until = 0.0
        self._watcher, self._make_fleet = watcher, make_fleet
        self._sessions: dict[int, Session] = {}
        self._number = 0
        #: Counts processes, so that a timer of an earlier one does nothing.
        self._life = 0
        #: When the core is to be woken next, in seconds.
        self._due_at = inf
        #: Counts wake-ups, so that one that another has overtaken does nothing.
        self._wakes = 0
        self.processor = Processor(world, USUAL_S)

    def start(self) -> None:
        """Start a new process, which knows nothing."""
        self._life += 1
        self._due_at = inf
        self.fleet = self._make_fleet(self.world.now)
        self.world.after(TICK_S, self._tick, self._life)

    def kill(self) -> None:
        """Kill the process, and every session with it."""
        if self.fleet is not None:
            # The parts of a core refer to each other, and what they hold of a large fleet would
            # stay for as long as the collector sees nothing to do.
            self.fleet.hosts.clear()
            self.fleet.swarms.clear()
        self.fleet = None
        if self.frozen:
            self._frozen_until = self.world.now
            self.processor = Processor(self.world, USUAL_S)
        for session in list(self._sessions.values()):
            session.close_from_tracker()
        self._sessions.clear()

    @property
    def frozen(self) -> bool:
        """Whether the process stands still."""
        return self.world.now < self._frozen_until

    def freeze(self, for_s: float) -> None:
        """Let the process stand still: what comes for it waits, and hosts give their sessions
        up."""
        self._frozen_until = self.world.now + for_s
        self.processor.slow_to(0.0, until=self._frozen_until)
        self.world.after(SILENCE_S, self._silent, self._frozen_until, tuple(self._sessions.values()))

    def _silent(self, until: float, sessions: tuple[Session, ...]) -> None:
        for session in sessions if self.world.now < until else ():
            if session.host_open:
                session.abandoned()

    def connect(self, agent: AgentSession, hello: Hello) -> Session | None:
        """Open a session for a host; None when no process listens. The first message is on its way
        to the host when this returns."""
        if self.fleet is None or not self.open:
            return None
        self._number += 1
        session = Session(self, agent, self._number)
        self._sessions[session.number] = session
        self.network.paths.watch(session)
        if self.frozen:
            self.processor.run(self._opened, session, hello)
        else:
            self.handle(SessionOpened(session.number, hello))
        return session

    def _opened(self, session: Session, hello: Hello) -> None:
        if session.tracker_open and session.number in self._sessions:
            self.handle(SessionOpened(session.number, hello))

    def received(self, session: Session, message: FromAgent) -> None:
        """A host's message has arrived; the process handles it when it gets to it."""
        self.processor.run(self._received, session, message)

    def _received(self, session: Session, message: FromAgent) -> None:
        if session.tracker_open:
            self.messages += 1
            if isinstance(message, EpochSeen):
                self.on_epoch_seen(session.host, message.epoch)
            self.handle(Received(session.number, message))

    def session_ended(self, session: Session) -> None:
        """The host's side of a session is gone."""
        if self.frozen:
            self.processor.run(self.session_ended, session)
            return
        if session.tracker_open:
            session.closed(host=False)
            self.handle(SessionClosed(session.number))
        self._sessions.pop(session.number, None)

    def _looked(self, life: int, wanted: LookAtOrigin) -> None:
        if life == self._life and self.fleet is not None:
            self.handle(self.look(wanted))

    def _tick(self, life: int) -> None:
        self.processor.run(self._tick_now, life)

    def _tick_now(self, life: int) -> None:
        if life == self._life and self.fleet is not None:
            self.handle(Tick(self.world.now))  # the clock begins at midnight
            self.world.after(TICK_S, self._tick, life)

    def _due(self, life: int, number: int) -> None:
        if number == self._wakes:
            self.processor.run(self._due_now, life)

    def _due_now(self, life: int) -> None:
        if life == self._life and self.fleet is not None:
            self._due_at = inf
            self.handle(Due())

    def handle(self, event: Event) -> None:
        """Let the core hear of something, and do what it commands."""
        assert self.fleet is not None
        commands = self.fleet.handle(event, now=self.world.now)
        if self.fleet.wake_at < self._due_at:
            self._due_at = self.fleet.wake_at
            self._wakes += 1
            self.world.at(max(self.world.now, self._due_at), self._due, self._life, self._wakes)
        self._watcher(self.fleet, event, commands, self._sessions)
        for command in commands:
            match command:
                case Send(number, message) if (session := self._sessions.get(number)) is not None:
                    session.to_host(message)
                case Broadcast(numbers, message):
                    for session in filter(None, map(self._sessions.get, numbers)):
                        session.to_host(message)
                case LookAtOrigin():
                    self.world.after(LOOK_S, self._looked, self._life, command)
                case Drop(number) if (session := self._sessions.get(number)) is not None:
                    session.close_from_tracker()
                    del self._sessions[number]
