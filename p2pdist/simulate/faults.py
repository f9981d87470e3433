"""What goes wrong in a simulation, when (in seconds) and where, and schedules drawn from a seed.

Faults are data; Simulation.inject lets them happen.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from random import Random

from p2pdist.model.errors import Corrupt, P2PDistError, Unavailable
from p2pdist.simulate.network import Cut


@dataclass(frozen=True, slots=True)
class Crash:
    """A host's process dies, or with `power` the whole host; it comes back after a while, or never
    (None)."""

    host: str
    at_s: float
    back_after_s: float | None
    power: bool = False


@dataclass(frozen=True, slots=True)
class Leave:
    """A host's process is asked to end: the tracker moves its children to other parents, it ends
    when it has no children, after `within_s` at the latest, and comes back a while later, or never
    (None)."""

    host: str
    at_s: float
    back_after_s: float | None
    within_s: float = 5.0


@dataclass(frozen=True, slots=True)
class Slow:
    """A host's uplink, with `both` its downlink too, has this share of its rate from a time on;
    without `up` its downlink alone."""

    host: str
    at_s: float
    share: float
    both: bool = False
    up: bool = True


@dataclass(frozen=True, slots=True)
class Partition:
    """A group is cut from the other hosts, from the tracker, from the origin, as the cut says, for
    a while or for good (None)."""

    cut: Cut
    at_s: float
    for_s: float | None


@dataclass(frozen=True, slots=True)
class WrongBytes:
    """A host sends wrong bytes for this share of the pieces."""

    host: str
    at_s: float
    share: float


@dataclass(frozen=True, slots=True)
class Silent:
    """A host accepts streams from a time on, and sends nothing in them."""

    host: str
    at_s: float


@dataclass(frozen=True, slots=True)
class TrackerLoss:
    """The tracker's process dies, and a new one starts after a while, or never (None). Of several
    trackers it is `tracker`, a number, or (None) the owner of the first blob."""

    at_s: float
    back_after_s: float | None
    tracker: int | None = None


@dataclass(frozen=True, slots=True)
class TrackerLosses:
    """The tracker's process dies again and again, every so often until all pulls have ended; each
    time a new one starts after a while."""

    every_s: float
    back_after_s: float


@dataclass(frozen=True, slots=True)
class TrackerFreeze:
    """One of several trackers stands still for a while: `tracker`, or (None) the owner of the first
    blob."""

    at_s: float
    for_s: float
    tracker: int | None = None


@dataclass(frozen=True, slots=True)
class TrackerCut:
    """One of several trackers is cut off from the database and from these hosts, for a while or for
    good (None): `tracker`, or (None) the owner of the first blob."""

    at_s: float
    for_s: float | None
    hosts: frozenset[str]
    tracker: int | None = None


@dataclass(frozen=True, slots=True)
class DatabaseLoss:
    """The database that several trackers share does not answer, for a while or for good (None)."""

    at_s: float
    for_s: float | None


@dataclass(frozen=True, slots=True)
class RollingRestart:
    """Several trackers are restarted one after the other: each drains, ends and starts again
    `away_s` later."""

    at_s: float
    away_s: float = 1.0


@dataclass(frozen=True, slots=True)
class OriginOutage:
    """The origin answers that it is unavailable, for a while or for good (None)."""

    at_s: float
    for_s: float | None


@dataclass(frozen=True, slots=True)
class OriginWrong:
    """The origin holds these pieces of every blob with wrong bytes."""

    pieces: frozenset[int]


@dataclass(frozen=True, slots=True)
class LyingVoucher:
    """A host states wrong hashes for this share of the pieces that it reads (vouched lists only).
    An empty name: the first host that reads stripe `reader`. `stores`: it passes on bytes that
    match what it states; `judges`: it says that the whole matches."""

    host: str = ""
    share: float = 1.0
    stores: bool = True
    judges: bool = False
    reader: int = 0


@dataclass(frozen=True, slots=True)
class UpstreamChange:
    """The origin holds wrong bytes for these pieces from a time on, for a while or for good (None),
    and no list tells (vouched lists only)."""

    pieces: frozenset[int]
    at_s: float
    for_s: float | None


@dataclass(frozen=True, slots=True)
class UpstreamStall:
    """The origin takes requests and sends nothing, for a while."""

    at_s: float
    for_s: float


@dataclass(frozen=True, slots=True)
class UpstreamBreak:
    """The origin ends all responses in the middle of them."""

    at_s: float


@dataclass(frozen=True, slots=True)
class UpstreamWhole:
    """The origin knows no ranges: a reader gets all from the beginning of the blob."""


@dataclass(frozen=True, slots=True)
class Late:
    """A host starts only at this time."""

    host: str
    at_s: float


@dataclass(frozen=True, slots=True)
class Busy:
    """For a while the processes of these hosts (TRACKER_NAME: the tracker's; None: all, with the
    tracker's) have this share of a processor, or none at all (0), as on a machine that is
    paused."""

    at_s: float
    for_s: float
    share: float
    hosts: frozenset[str] | None = None


Fault = (
    Crash
    | Leave
    | Slow
    | Partition
    | WrongBytes
    | Silent
    | TrackerLoss
    | TrackerLosses
    | TrackerFreeze
    | TrackerCut
    | DatabaseLoss
    | RollingRestart
    | OriginOutage
    | OriginWrong
    | Late
    | Busy
    | LyingVoucher
    | UpstreamChange
    | UpstreamStall
    | UpstreamBreak
    | UpstreamWhole
)

KINDS = ("crash", "leave", "slow", "partition", "wrong", "silent", "tracker", "origin", "origin-wrong", "late", "busy")
VOUCHED_KINDS = ("lie", "change", "stall", "break", "whole")
"""What goes wrong where hosts vouch for a piece list: a reader lies, and upstream holds other bytes
for a while, stalls, breaks off, and knows no ranges."""


CLUSTER_KINDS = ("owner", "freeze", "isolate", "database", "roll")
"""What goes wrong among several trackers: the owner of the first blob dies, stands still, or is cut
off from the database and half of the hosts; the database is away; all are restarted in turn."""

ORIGIN_ALLOWANCE = {
    Crash: 0.25, Leave: 0.15, Slow: 0.2, Partition: 0.9, WrongBytes: 0.2, Silent: 0.4, TrackerLoss: 0.5, TrackerLosses: 0.5,
    OriginOutage: 0.3, OriginWrong: 2.0, TrackerFreeze: 0.5, TrackerCut: 1.5, RollingRestart: 1.0,
}  # fmt: skip
"""How much of the blob the origin may send beyond one copy for each kind of fault that happens, as
a share of the blob. What a lease holder that goes away has not passed on is read again; both sides
of a partition need a copy while it lasts; hosts that find a new tracker before the hosts of the
last one did get a reader of their own until these are back. While a tracker is cut off its hosts
may need a copy that the new owner's hosts have too."""


def origin_limit(faults: Iterable[Fault]) -> float:
    """How many copies of the blob the origin may send at most under these faults."""
    kinds = {type(fault): None for fault in faults}
    return 1.0 + sum(ORIGIN_ALLOWANCE.get(kind, 0.0) for kind in kinds)


def late_hosts(faults: Iterable[Fault]) -> frozenset[str]:
    """The hosts that do not start at once."""
    return frozenset(fault.host for fault in faults if isinstance(fault, Late))


def failures(faults: Iterable[Fault]) -> tuple[type[P2PDistError], ...]:
    """The errors that a pull may fail with under these faults, without a defect of ours."""
    errors: list[type[P2PDistError]] = []
    for fault in faults:
        match fault:
            case OriginWrong():
                errors.append(Corrupt)
            case UpstreamChange(_, _, None):
                errors.append(Corrupt)
            case OriginOutage(_, None):
                errors.append(Unavailable)
    return tuple(errors)


class _Draw:
    """The chance behind one schedule."""

    def __init__(self, seed: int, names: list[str], pieces: int, duration_s: float) -> None:
        self.random = Random(f"faults {seed}")
        self.names, self.pieces, self.duration_s = names, pieces, duration_s

    def time(self) -> float:
        return self.random.uniform(0.05, 0.95) * self.duration_s

    def some(self, least: int, most: int) -> list[str]:
        return self.random.sample(self.names, min(len(self.names), self.random.randint(least, most)))

    def span(self, least_s: float, most_s: float) -> float:
        return self.random.uniform(least_s, most_s)

    def draw(self, kind: str) -> list[Fault]:
        """The faults of one kind."""
        random = self.random
        match kind:
            case "crash":
                return [
                    Crash(
                        name, self.time(), self.span(0.2, 8.0) if random.random() < 0.6 else None, random.random() < 0.4
                    )
                    for name in self.some(1, max(1, len(self.names) // 8))
                ]
            case "leave":
                return [
                    Leave(name, self.time(), self.span(0.2, 8.0) if random.random() < 0.6 else None)
                    for name in self.some(1, max(1, len(self.names) // 4))
                ]
            case "slow":
                return [
                    Slow(name, 0.0 if random.random() < 0.5 else self.time(), random.choice((0.05, 0.1, 0.3, 0.6)))
                    for name in self.some(1, 3)
                ]
            case "partition":
                group = frozenset(self.some(1, len(self.names) // 2))
                tracker, origin = random.random() < 0.5, random.random() < 0.5
                return [Partition(Cut(group, True, tracker, origin), self.time(), self.span(0.3, 15.0))]
            case "wrong":
                return [
                    WrongBytes(name, 0.0 if random.random() < 0.5 else self.time(), random.choice((0.01, 0.2, 1.0)))
                    for name in self.some(1, 3)
                ]
            case "silent":
                return [Silent(name, 0.0 if random.random() < 0.5 else self.time()) for name in self.some(1, 2)]
            case "tracker":
                return self._tracker_losses()
            case "origin":
                return [OriginOutage(self.time(), self.span(0.3, 10.0))]
            case "origin-wrong":
                pieces = random.sample(range(self.pieces), random.choice((1, 3, self.pieces)))
                return [OriginWrong(frozenset(pieces))]
            case "busy":
                return [Busy(self.time(), self.span(0.5, 4.0), random.choice((0.0, 0.1, 0.3)))]
            case "lie":
                stores, judges = random.random() < 0.6, random.random() < 0.4
                return [LyingVoucher("", random.choice((1.0, 0.2, 0.03)), stores, judges)]
            case "change":
                pieces = random.sample(range(self.pieces), random.choice((1, 3, self.pieces)))
                return [UpstreamChange(frozenset(pieces), self.time() * 0.5, self.span(0.2, 2.0))]
            case "stall":
                return [UpstreamStall(self.time(), self.span(0.3, 10.0))]
            case "break":
                return [UpstreamBreak(self.time()) for _ in range(random.randint(1, 3))]
            case "whole":
                return [UpstreamWhole()]
            case "late":
                return [
                    Late(name, self.span(0.0, 1.5 * self.duration_s)) for name in self.some(1, len(self.names) // 2)
                ]
        return self._among_trackers(kind)

    def _among_trackers(self, kind: str) -> list[Fault]:
        random = self.random
        match kind:
            case "owner":
                return [TrackerLoss(self.time(), self.span(0.1, 30.0) if random.random() < 0.7 else None)]
            case "freeze":
                return [TrackerFreeze(self.time(), self.span(0.5, 20.0))]
            case "isolate":
                group = frozenset(random.sample(self.names, len(self.names) // 2))
                return [TrackerCut(self.time(), self.span(0.5, 20.0), group)]
            case "database":
                return [DatabaseLoss(self.time(), self.span(0.5, 20.0))]
            case "roll":
                return [RollingRestart(self.time() * 0.3)]
        raise ValueError(f"there is no fault of the kind {kind!r}")

    def _tracker_losses(self) -> list[Fault]:
        losses: list[Fault] = []
        at_s = self.time() * 0.5
        for _ in range(self.random.randint(1, 3)):
            away_s = self.span(0.1, 4.0)
            losses.append(TrackerLoss(at_s, away_s))
            at_s += away_s + self.span(0.2, 6.0)
        return losses


WEIGHTS = {
    "crash": 5, "leave": 3, "slow": 3, "partition": 4, "wrong": 3, "silent": 2, "tracker": 4, "origin": 3, "origin-wrong": 1, "late": 3,
}  # fmt: skip


def schedule(
    seed: int, names: list[str], *, pieces: int, duration_s: float, kinds: tuple[str, ...] = (), trackers: int = 1
) -> tuple[Fault, ...]:
    """A schedule drawn from a seed: one to four kinds of faults, or `kinds`, within about
    `duration_s`. A late host neither crashes nor leaves. With several `trackers` these are among
    what goes wrong."""
    draw = _Draw(seed, names, pieces, duration_s)
    chosen = list(kinds)
    while not kinds and len(chosen) < 1 + seed % 4:
        weights = WEIGHTS if trackers == 1 else {**WEIGHTS, **dict.fromkeys(CLUSTER_KINDS, 4)}
        kind = draw.random.choices(list(weights), list(weights.values()))[0]
        if kind not in chosen:
            chosen.append(kind)
    faults = [fault for kind in chosen for fault in draw.draw(kind)]
    late = late_hosts(faults)
    return tuple(fault for fault in faults if not (isinstance(fault, Crash | Leave) and fault.host in late))
