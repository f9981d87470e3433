"""Ownerships: which trackers of a cluster live, and the next ownership.

Theory. The trackers of a cluster register in a database, and each counts up a number there while
its event loop turns (`MembersSeen`). A tracker whose number stands still for DEAD_S is dead,
whatever else it does: a process that is frozen, or a loop that hangs, plans nothing. What the
database says is the only clock that counts: while it does not answer no tracker ages, and after a
pause each has its next beat first.

Every tracker works out the next ownership from what it sees, and proposes it (`Publish`); the
database takes one proposal for each epoch, by compare-and-set. So that not all propose at once,
they wait for as long as their place in the order of the live ones says. Every tracker follows what
the database has (`Follow`).

A tracker that comes, or comes back, owns FIRST_SHARE of what the others do, and more with each
STEP_S, so that its swarms reach it a little at a time. One that drains has no share. A tracker that
is overloaded for long pins one of its swarms to another, which has room for it.

Without the database a tracker goes on with the ownership that it has. It grants no origin lease
once it knows, or must fear, that others go on without it: agents or trackers have heard of a newer
epoch (`EpochHeard`), or its own process stood still for so long that it may have been given up. The
next look at the database tells. An agent is not believed alone (HEARSAY_MIN), unless there is no
other one. Where agents know a higher epoch than the database, it was restored from a backup: epochs
go on above theirs.

Invariants: the epochs that a tracker follows grow; a proposal is above all epochs that it knows;
this tracker is never dead to itself, and proposes nothing while it is to others.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from math import inf

from p2pdist.model.digest import Digest
from p2pdist.model.ownership import EPOCH_MAX, PINS_MAX, TRACKERS_MAX, Ownership, Tracker, owner

DEAD_S = 3.0
GAP_MAX_S = 1.0
"""Two looks at the database that lie farther apart count as this: the database was away, or this
tracker was, and the others had no occasion to be seen."""

RANK_S = 0.7
"""A tracker waits for so long before it proposes, for each live tracker before it."""

FIRST_SHARE, SHARE_STEP = 0.1, 0.1
STEP_S = 10.0
FOUND_S = 1.0
"""The first ownership waits for so long: trackers that start together are all in it."""

FROZEN_S = 1.5
"""A pause between two events after which this tracker may have been given up."""

UNCONFIRMED_S = 5.0
"""After such a pause the database has so long to say otherwise; then it is away, and this tracker
goes on."""

HEARSAY_MIN = 2
HEARSAY_MAX = 256
"""Agents whose word of a newer epoch is remembered; so many must say so."""

DEAF_S = 60.0
"""Agents are not listened to for so long after they told of an epoch that the database did not
have: each time all hosts hear of another epoch, and no lease is granted for a moment."""

EPOCH_AHEAD_MAX = 1_000_000
"""A higher epoch than that above the present one is not believed."""

BUSY, BUSY_S = 0.75, 10.0
"""A tracker is overloaded whose process takes this share of a processor for so long."""

ROOM = 0.5
"""A tracker has room while it takes no more than this share of a processor."""

PIN_S = 30.0
"""Pause between two pins: the load of the last one has shown by then."""

# -- events


@dataclass(frozen=True, slots=True)
class Registered:
    """A tracker as the database has it. `instance` names its process and `progress` counts up while
    its loop turns; `load` is the share of a processor that it takes."""

    id: str
    urls: tuple[str, ...]
    instance: str
    progress: int
    draining: bool = False
    load: float = 0.0


@dataclass(frozen=True, slots=True)
class MembersSeen:
    """What the database has now: the registered trackers, and the ownership of the latest epoch
    (None before the first one)."""

    members: tuple[Registered, ...]
    stored: Ownership | None


@dataclass(frozen=True, slots=True)
class EpochHeard:
    """`by` has told of an ownership of this epoch: an agent (the address of its connection, where
    that is known), or with `trusted` a tracker. `alone`: no other agent could tell."""

    epoch: int
    by: str
    trusted: bool = False
    alone: bool = False


@dataclass(frozen=True, slots=True)
class LoadSeen:
    """The share of a processor that this tracker's process takes, and its largest swarms with their
    numbers of members, all members of all its swarms being `members`."""

    load: float
    swarms: tuple[tuple[Digest, int], ...]
    members: int


@dataclass(frozen=True, slots=True)
class Tick:
    """Comes often and regularly."""


Event = MembersSeen | EpochHeard | LoadSeen | Tick

# -- commands


@dataclass(frozen=True, slots=True)
class Publish:
    """Put this ownership into the database, if the latest epoch there is still `expected` (0: there
    is none). The next MembersSeen tells what came of it."""

    ownership: Ownership
    expected: int


@dataclass(frozen=True, slots=True)
class Follow:
    """This ownership counts from now on (fleet event Followed)."""

    ownership: Ownership


@dataclass(frozen=True, slots=True)
class AllowLeases:
    """From now on this tracker may grant origin leases, or may not (fleet event LeasesAllowed)."""

    allowed: bool


Command = Publish | Follow | AllowLeases

# -- state


@dataclass(slots=True)
class _Watched:
    """A registered tracker, as this one has seen it."""

    last: Registered
    silent_s: float = 0.0
    """How long its progress has stood still, in time in which the database answered."""
    proved: bool = False
    """Whether its progress has moved since it is watched: a row may be all that is left of it."""

    def seen(self, member: Registered, gap_s: float) -> None:
        """The database has it like this, `gap_s` after the last look."""
        if (member.instance, member.progress) != (self.last.instance, self.last.progress):
            self.silent_s, self.proved = 0.0, True
        else:
            self.silent_s += gap_s
        self.last = member


@dataclass(slots=True)
class Ownerships:
    """Decides for one tracker of a cluster; `handle` alone changes it."""

    me: str
    """The id of this tracker."""
    followed: Ownership | None = None
    """The ownership that counts here. `_seen`."""
    leases_allowed: bool = False
    """What the last AllowLeases said; none is allowed before there is an ownership."""
    _watched: dict[str, _Watched] = field(default_factory=dict)
    """The registered trackers by id. `_watch`."""
    _looked_at: float = -inf
    """Time of the last MembersSeen."""
    _awake_at: float = inf
    """Time of the last event; after the first one."""
    _frozen_at: float | None = None
    """Time at which this tracker found that it had stood still, until the database was seen."""
    _followed_at: float = -inf
    """Time at which `followed` changed."""
    _differs_since: float | None = None
    """Since when the next ownership would be another one."""
    _hearsay: dict[str, int] = field(default_factory=dict)
    """The latest epoch of which each agent told, at most HEARSAY_MAX."""
    _told: int = 0
    """The latest epoch of which a tracker told, or the only agent."""
    _floor: int = 0
    """The latest epoch that was heard of and that the database did not have: proposals go above."""
    _deaf_until: float = -inf
    """Until when agents are not listened to."""
    _busy_since: float | None = None
    """Since when this tracker is overloaded. `_loaded`."""
    _pin: tuple[Digest, str] | None = None
    """A swarm to be pinned with the next proposal, and to which tracker."""
    _pinned_at: float = -inf
    """Time at which a pin was chosen last."""

    def handle(self, event: Event, *, now: float) -> list[Command]:
        """Take an event; returns what is to be done, in this order."""
        if now - self._awake_at >= FROZEN_S:
            self._frozen_at = now
        self._awake_at = now
        out: list[Command] = []
        match event:
            case MembersSeen():
                self._seen(event, now, out)
            case EpochHeard():
                self._heard(event, now)
            case LoadSeen():
                self._loaded(event, now)
            case Tick():
                if self._frozen_at is not None and now - self._frozen_at >= UNCONFIRMED_S:
                    self._frozen_at = None
        current = self.followed is not None and self._newest_heard() <= max(self._epoch, self._floor)
        allowed = current and self._frozen_at is None
        if allowed != self.leases_allowed:
            self.leases_allowed = allowed
            out.append(AllowLeases(allowed))
        return out

    @property
    def _epoch(self) -> int:
        return self.followed.epoch if self.followed is not None else 0

    # -- what the database says

    def _seen(self, event: MembersSeen, now: float, out: list[Command]) -> None:
        """Follow what the database has, and propose the next ownership when it is time."""
        self._watch(event.members, min(GAP_MAX_S, max(0.0, now - self._looked_at)))
        self._looked_at, self._frozen_at = now, None
        stored = event.stored
        if stored is not None and stored.epoch > self._epoch:
            self.followed, self._followed_at, self._differs_since = stored, now, None
            out.append(Follow(stored))
        if (heard := self._newest_heard()) > max(self._epoch, self._floor):
            self._floor, self._deaf_until = heard, now + DEAF_S
        latest = stored.epoch if stored is not None else 0
        if self._given_up():
            return
        proposal = self._next(stored, now)
        behind = latest < max(self._epoch, self._floor)
        same = stored is not None and (proposal.trackers, proposal.pins) == (stored.trackers, stored.pins)
        if not proposal.trackers or (same and not behind):
            self._differs_since = None
            return
        if self._differs_since is None:
            self._differs_since = now
        wait_s = RANK_S * self._rank() + (FOUND_S if stored is None else 0.0)
        if now - self._differs_since >= wait_s and proposal.epoch <= EPOCH_MAX:
            out.append(Publish(proposal, latest))

    def _watch(self, members: tuple[Registered, ...], gap_s: float) -> None:
        present = {member.id: member for member in members[: 4 * TRACKERS_MAX]}
        self._watched = {name: watched for name, watched in self._watched.items() if name in present}
        for name, member in present.items():
            if name in self._watched:
                self._watched[name].seen(member, gap_s)
            else:
                self._watched[name] = _Watched(member)

    def _live(self, stored: Ownership | None) -> list[Registered]:
        """The trackers that live, by id: this one, and each other one whose progress moves."""
        listed = {tracker.id for tracker in stored.trackers} if stored is not None else set()
        return [
            watched.last
            for name, watched in sorted(self._watched.items())
            if name == self.me or ((watched.proved or name in listed) and watched.silent_s < DEAD_S)
        ][:TRACKERS_MAX]

    def _given_up(self) -> bool:
        """Whether this tracker counts up no more, although it reaches the database, and another one
        lives: that one leaves it out, and each would undo what the other proposes."""
        mine = self._watched.get(self.me)
        others = (watched for name, watched in self._watched.items() if name != self.me and watched.proved)
        return mine is not None and mine.silent_s >= DEAD_S and any(other.silent_s < DEAD_S for other in others)

    def _rank(self) -> int:
        """How many live trackers propose before this one."""
        return sum(
            1 for name, watched in self._watched.items() if name < self.me and watched.proved and not watched.silent_s
        )

    def _next(self, stored: Ownership | None, now: float) -> Ownership:
        """The ownership as it should be now."""
        live = self._live(stored)
        shares = {tracker.id: tracker.share for tracker in stored.trackers} if stored is not None else {}
        step = SHARE_STEP if now - self._followed_at >= STEP_S else 0.0
        alone = not any(member.id in shares for member in live)
        trackers = tuple(
            Tracker(member.id, member.urls, _share(member, None if alone else shares.get(member.id, 0.0), step))
            for member in live
        )
        pins = dict(stored.pins) if stored is not None else {}
        if self._pin is not None:
            blob, name = self._pin
            pins[blob] = name
        names = {tracker.id for tracker in trackers}
        kept = [(blob, name) for blob, name in pins.items() if name in names][-PINS_MAX:]  # the latest ones
        epoch = max(self._epoch, self._floor, stored.epoch if stored is not None else 0) + 1
        return Ownership(epoch, trackers, dict(kept))

    # -- hearsay

    def _heard(self, event: EpochHeard, now: float) -> None:
        if not event.trusted and now < self._deaf_until:
            return
        if event.epoch <= self._epoch or event.epoch > max(self._epoch, self._floor) + EPOCH_AHEAD_MAX:
            return
        if event.trusted or event.alone:
            self._told = max(self._told, event.epoch)
            return
        self._hearsay[event.by] = max(event.epoch, self._hearsay.pop(event.by, 0))
        if len(self._hearsay) > HEARSAY_MAX:
            del self._hearsay[next(iter(self._hearsay))]

    def _newest_heard(self) -> int:
        """The latest epoch of which a tracker told, or HEARSAY_MIN agents did."""
        told = sorted(self._hearsay.values(), reverse=True)
        return max(self._told, told[HEARSAY_MIN - 1] if len(told) >= HEARSAY_MIN else 0)

    # -- load

    def _loaded(self, event: LoadSeen, now: float) -> None:
        """Choose a swarm for another tracker, where this one is overloaded for long."""
        if event.load < BUSY:
            self._busy_since = None
        elif self._busy_since is None:
            self._busy_since = now
        if self._pin is not None and now - self._pinned_at >= PIN_S:
            self._pin = None
        if self._busy_since is None or now - self._busy_since < BUSY_S or now - self._pinned_at < PIN_S:
            return
        ownership = self.followed
        others = [] if ownership is None else [tracker for tracker in ownership.trackers if tracker.id != self.me]
        loads = {
            tracker.id: self._watched[tracker.id].last.load
            for tracker in others
            if tracker.share == 1 and tracker.id in self._watched
        }
        if ownership is None or not loads or not event.members:
            return
        target = min(loads, key=lambda name: (loads[name], name))
        for blob, members in sorted(event.swarms, key=lambda swarm: (-swarm[1], swarm[0])):
            moved = event.load * members / event.members
            if loads[target] + moved <= ROOM and owner(ownership, blob).id == self.me:
                self._pin, self._pinned_at = (blob, target), now
                return


def _share(member: Registered, share: float | None, step: float) -> float:
    """The next share of a live tracker that had this `share` (0: it was not listed, or gave all
    away; None: no tracker has any)."""
    if member.draining:
        return 0.0
    if share is None:
        return 1.0
    if not share:
        return FIRST_SHARE
    return min(1.0, round(share + step, 3))
