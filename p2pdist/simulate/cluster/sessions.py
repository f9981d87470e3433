"""A host's sessions with several trackers, as an agent keeps them (agent/tracker/trackers.py).

A host begins with any tracker, which tells it the ownership. From then on it keeps a session with
each owner of a blob that it pulls or holds, and while an owner does not answer with another tracker
besides, which tells it of a new ownership. Of each blob it speaks with the owner alone.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from functools import partial

from p2pdist.model.digest import Digest
from p2pdist.model.messages import (
    Assign,
    Complaint,
    EpochSeen,
    FromAgent,
    Hello,
    Holding,
    Holdings,
    Judged,
    Leaving,
    Left,
    NotOwner,
    Report,
    Vouched,
    Welcome,
)
from p2pdist.model.ownership import Ownership, owner
from p2pdist.model.rendezvous import ranked
from p2pdist.simulate.clock import Processor, World
from p2pdist.simulate.tracker import AgentSession, Owned, OwnershipNews, SwarmMessage, Tracker

WATCH_S = 1.0
"""How often a host looks at which sessions it needs, while not all that it needs are open."""

LATE_S = 3.0
"""How long the new owner of a blob may take until the blob's pull takes itself to be alone."""


class OwnerSessions:
    """All sessions of one host. `blobs` are what it pulls or holds; the others are as AgentSession
    has them, of the blobs for which the predicate holds."""

    __slots__ = (
        "_blobs",
        "_hello",
        "_holdings",
        "_life",
        "_on_change",
        "_on_held",
        "_on_message",
        "_order",
        "_owners",
        "_processor",
        "_refused",
        "_report",
        "_sessions",
        "_trackers",
        "_watched",
        "_world",
        "ownership",
    )

    def __init__(
        self,
        hello: Hello,
        trackers: Mapping[str, Tracker],
        processor: Processor,
        blobs: Collection[Digest],
        *,
        holdings: Callable[[Owned], tuple[Holding, ...]],
        report: Callable[[Owned], Report | None],
        on_message: Callable[[SwarmMessage], None],
        on_change: Callable[[bool, Owned], None],
        on_held: Callable[[Owned], None],
    ) -> None:
        self._hello, self._trackers, self._processor, self._blobs = hello, trackers, processor, blobs
        self._holdings, self._report = holdings, report
        self._on_message, self._on_change, self._on_held = on_message, on_change, on_held
        self._world: World = next(iter(trackers.values())).world
        #: Trackers in the order in which this host turns to them.
        self._order = ranked(hello.host.encode(), trackers, len(trackers))
        #: The latest ownership that this life has heard of.
        self.ownership: Ownership | None = None
        #: By blob the tracker that owns it by that ownership; hosts ask at every message.
        self._owners: dict[Digest, str] = {}
        self._sessions: dict[str, AgentSession] = {}
        #: By tracker, blobs that it refused since it went by an older ownership.
        self._refused: dict[str, dict[Digest, None]] = {}
        #: Counts lives, so that a look of an earlier one does nothing.
        self._life = 0
        #: Whether a look is due.
        self._watched = False

    @property
    def welcomed(self) -> bool:
        """Whether any tracker answers."""
        return any(session.welcomed for session in self._sessions.values())

    def answers(self, blob: Digest) -> bool:
        """Whether the owner of a blob answers."""
        session = self._session_of(blob)
        return session is not None and session.welcomed

    def tracker_of(self, blob: Digest) -> Tracker | None:
        """The tracker that owns a blob, as far as this host has heard."""
        session = self._session_of(blob)
        return session.tracker if session is not None else None

    def start(self) -> None:
        """The host's process has started."""
        self._life += 1
        self._go_by(None)
        self._watched = False
        self._open(self._order[0])
        self._watch()

    def stop(self) -> None:
        """The host's process is gone."""
        self._life += 1
        for name in list(self._sessions):
            self._close(name)

    def send(self, message: FromAgent) -> None:
        """Send a message to the tracker that it is for, if that one answers."""
        match message:
            case Holding(blob) | Complaint(blob) | Left(blob) | Vouched(blob) | Judged(blob):
                session = self._session_of(blob)
                if session is not None:
                    session.send(message)
            case Leaving():
                for session in self._sessions.values():
                    session.send(message)

    def report(self) -> None:
        """Report at once what is new."""
        for session in self._sessions.values():
            session.report()

    # -- which session

    def _session_of(self, blob: Digest) -> AgentSession | None:
        return self._sessions.get(self._owner(blob)) if self.ownership is not None else None

    def _owner(self, blob: Digest) -> str:
        """The name of the tracker that owns a blob by the latest ownership; "" while none is
        known."""
        name = self._owners.get(blob)
        if name is None:
            name = self._owners[blob] = owner(self.ownership, blob).id if self.ownership is not None else ""
        return name

    def _go_by(self, ownership: Ownership | None) -> None:
        self.ownership = ownership
        self._owners.clear()

    def _owned(self, name: str) -> Owned:
        def owned(blob: Digest) -> bool:
            return self._owner(blob) == name

        return owned

    def _open(self, name: str) -> None:
        if name in self._sessions:
            return
        owned = self._owned(name)
        session = self._sessions[name] = AgentSession(
            self._hello,
            self._trackers[name],
            self._processor,
            holdings=lambda: self._holdings(owned),
            report=lambda: self._report(owned),
            on_message=partial(self._deliver, owned),
            on_change=partial(self._changed, owned),
            on_held=lambda: self._on_held(owned),
            on_ownership=partial(self._heard, name),
        )
        session.start()

    def _close(self, name: str) -> None:
        self._sessions.pop(name).stop()
        self._refused.pop(name, None)

    def _needed(self) -> dict[str, None]:
        if self.ownership is None:
            return {}
        return {self._owner(blob): None for blob in self._blobs}

    def _watch(self) -> None:
        if not self._watched:
            self._watched = True
            self._world.after(WATCH_S, self._look, self._life)

    def _look(self, life: int) -> None:
        """Open the sessions that are needed, and close the others once these are open."""
        if life != self._life:
            return
        self._watched = False
        needed = self._needed()
        for name in needed:
            self._open(name)
        if needed and all(self._sessions[name].welcomed for name in needed):
            for name in [name for name in self._sessions if name not in needed]:
                self._close(name)
            return
        if not self.welcomed:
            self._open_another()
        self._watch()

    def _open_another(self) -> None:
        """Turn to a tracker with which there is no session, in the place of one that does not
        answer."""
        others = [name for name in self._order if name not in self._sessions]
        needed = self._needed()
        for name in [name for name, session in self._sessions.items() if not session.welcomed and name not in needed]:
            self._close(name)
        if others:
            self._open(others[0])

    # -- what trackers say

    def _changed(self, owned: Owned, present: bool) -> None:
        self._on_change(present, owned)
        if not present:
            self._watch()

    def _deliver(self, owned: Owned, message: SwarmMessage) -> None:
        blob = message.plan.blob if isinstance(message, Assign) else message.blob
        if blob is None or owned(blob):
            self._on_message(message)

    def _heard(self, name: str, news: OwnershipNews) -> None:
        """A tracker says which tracker owns which blobs."""
        told, known = news.ownership, self.ownership
        if told is None:
            return
        if known is None or told.epoch > known.epoch:
            self._follow(told, fresh=name if isinstance(news, Welcome) else "")
        elif told.epoch < known.epoch:
            self._sessions[name].send(EpochSeen(known.epoch))
            if isinstance(news, NotOwner):
                self._refused.setdefault(name, {}).update(dict.fromkeys(news.blobs))
        if self.ownership is not None and told.epoch == self.ownership.epoch and name in self._refused:
            self._tell(name, self._refused.pop(name))

    def _follow(self, ownership: Ownership, *, fresh: str) -> None:
        """Go by an ownership from now on: each new owner hears what is here of its blobs. The
        session with `fresh` has just opened, and tells all."""
        before = self.ownership
        self._go_by(ownership)
        moved: dict[str, dict[Digest, None]] = {}
        for blob in self._blobs:
            name = self._owner(blob)
            if before is None or owner(before, blob).id != name:
                moved.setdefault(name, {})[blob] = None
        for name, blobs in moved.items():
            if name in self._sessions and self._sessions[name].welcomed:
                if name != fresh:
                    self._tell(name, blobs)
                continue
            self._open(name)
            if before is not None:
                self._world.after(LATE_S, self._late, self._life, name, blobs)
        self._watch()

    def _tell(self, name: str, blobs: Iterable[Digest]) -> None:
        owned = self._owned(name)
        theirs = {blob: None for blob in blobs if owned(blob)}
        session = self._sessions.get(name)
        if session is None or not theirs:
            return
        holdings = self._holdings(theirs.__contains__)
        if holdings:
            session.send(Holdings(holdings))
        self._on_change(True, theirs.__contains__)
        self._on_held(theirs.__contains__)

    def _late(self, life: int, name: str, blobs: Mapping[Digest, None]) -> None:
        session = self._sessions.get(name)
        if life == self._life and (session is None or not session.welcomed):
            owned = self._owned(name)
            self._on_change(False, lambda blob: blob in blobs and owned(blob))
