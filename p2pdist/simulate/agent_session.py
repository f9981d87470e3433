"""A host's side of its session: opened again whenever it breaks, with the agent's pauses; reports
at the interval that the tracker asks."""

from __future__ import annotations

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
from p2pdist.simulate.network import CONNECT_TIMEOUT_S, TRACKER_NAME
from p2pdist.simulate.session import Session, Tracker
from p2pdist.simulate.telling import holdings, report

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
