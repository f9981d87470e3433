"""What goes wrong in a simulation, when, and to whom; and schedules of it drawn from a seed."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from random import Random
from typing import TYPE_CHECKING

from p2pdist.model.errors import Corrupt, P2PDistError, Unavailable
from p2pdist.simulate.network import TRACKER_NAME, Cut

if TYPE_CHECKING:
    from p2pdist.simulate.simulation import Simulation


@dataclass(frozen=True, slots=True)
class Crash:
    """A host's process dies, or with `power` the whole host; it comes back after a while, or never
    (None)."""

    host: str
    at: float
    back_after_s: float | None
    power: bool = False


@dataclass(frozen=True, slots=True)
class Leave:
    """A host's process is asked to end: it hands over to others, ends when nobody receives from it,
    after `within_s` at the latest, and comes back a while later, or never (None)."""

    host: str
    at: float
    back_after_s: float | None
    within_s: float = 5.0


@dataclass(frozen=True, slots=True)
class Slow:
    """A host's uplink, with `both` its downlink too, has this share of its rate from a time on."""

    host: str
    at: float
    share: float
    both: bool = False


@dataclass(frozen=True, slots=True)
class Partition:
    """A group is cut from the other hosts, from the tracker, from the origin, as the cut says, for
    a while or for good (None)."""

    cut: Cut
    at: float
    for_s: float | None


@dataclass(frozen=True, slots=True)
class WrongBytes:
    """A host sends wrong bytes for this share of the pieces."""

    host: str
    at: float
    share: float


@dataclass(frozen=True, slots=True)
class Silent:
    """A host accepts streams from a time on, and sends nothing in them."""

    host: str
    at: float


@dataclass(frozen=True, slots=True)
class TrackerLoss:
    """The tracker's process dies, and a new one starts after a while, or never (None)."""

    at: float
    back_after_s: float | None


@dataclass(frozen=True, slots=True)
class TrackerLosses:
    """The tracker's process dies again and again, every so often until all pulls have ended; each
    time a new one starts after a while."""

    every_s: float
    back_after_s: float


@dataclass(frozen=True, slots=True)
class OriginOutage:
    """The origin answers that it is unavailable, for a while or for good (None)."""

    at: float
    for_s: float | None


@dataclass(frozen=True, slots=True)
class OriginWrong:
    """The origin holds these pieces of every blob with wrong bytes."""

    pieces: frozenset[int]


@dataclass(frozen=True, slots=True)
class Late:
    """A host starts only at this time."""

    host: str
    at: float


@dataclass(frozen=True, slots=True)
class Busy:
    """For a while the processes of these hosts (TRACKER_NAME: the tracker's; None: all, with the
    tracker's) have this share of a processor, or none at all (0), as on a machine that is
    paused."""

    at: float
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
    | OriginOutage
    | OriginWrong
    | Late
    | Busy
)

LOOK_S = 0.02
"""How often a host that leaves looks whether somebody still receives from it."""

KINDS = ("crash", "leave", "slow", "partition", "wrong", "silent", "tracker", "origin", "origin-wrong", "late", "busy")


ORIGIN_ALLOWANCE = {
    Crash: 0.25, Leave: 0.15, Slow: 0.2, Partition: 0.9, WrongBytes: 0.2, Silent: 0.4, TrackerLoss: 0.5, TrackerLosses: 0.5,
    OriginOutage: 0.3, OriginWrong: 2.0,
}  # fmt: skip
"""How much of the blob the origin may send beyond one copy for each kind of fault that happens, as
a share of the blob. A lease holder that goes away takes what it has not passed on with it; both
sides of a partition need a copy while it lasts; newcomers that find a new tracker before those who
were under way get a reader of their own until they are back."""


def origin_limit(faults: Iterable[Fault]) -> float:
    """How many copies of the blob the origin may send at most under these faults."""
    kinds = {type(fault): None for fault in faults}
    return 1.0 + sum(ORIGIN_ALLOWANCE.get(kind, 0.0) for kind in kinds)


def late_hosts(faults: Iterable[Fault]) -> frozenset[str]:
    """The hosts that do not start at once."""
    return frozenset(fault.host for fault in faults if isinstance(fault, Late))


def failures(faults: Iterable[Fault]) -> tuple[type[P2PDistError], ...]:
    """With what a pull may fail under these faults, when all goes as it should."""
    found: list[type[P2PDistError]] = []
    for fault in faults:
        match fault:
            case OriginWrong():
                found.append(Corrupt)
            case OriginOutage(_, None):
                found.append(Unavailable)
    return tuple(found)


def inject(simulation: Simulation, fault: Fault) -> None:
    """Let a fault happen at its time."""
    world, network, hosts = simulation.world, simulation.network, simulation.hosts
    match fault:
        case Crash(name, at, _, _):
            world.at(at, _crash, simulation, fault)
        case Leave(name, at, _, _):
            world.at(at, _leave, simulation, fault)
        case Slow(name, at, share, both):
            world.at(at, hosts[name].link.slow_to, share, both)
        case Partition(cut, at, for_s):
            world.at(at, network.cut, cut)
            if for_s is not None:
                world.at(at + for_s, network.heal, cut)
        case WrongBytes(name, at, share):
            world.at(at, setattr, hosts[name], "wrong_bytes", share)
        case Silent(name, at):
            world.at(at, setattr, hosts[name], "silent", True)
        case TrackerLoss(at, back_after_s):
            world.at(at, simulation.tracker.kill)
            if back_after_s is not None:
                world.at(at + back_after_s, simulation.tracker.start)
        case TrackerLosses(every_s, _):
            world.at(every_s, _lose_tracker, simulation, fault)
        case OriginOutage(at, for_s):
            world.at(at, simulation.origin.set_available, False)
            if for_s is not None:
                world.at(at + for_s, simulation.origin.set_available, True)
        case OriginWrong(pieces):
            simulation.origin.wrong = {blob.digest: pieces for blob in simulation.blobs}
        case Late(name, at):
            world.at(at, hosts[name].start)
        case Busy(at, for_s, share):
            world.at(at, _slow_processors, simulation, fault, share, at + for_s)
            world.at(at + for_s, _slow_processors, simulation, fault, 1.0, at + for_s)


def _slow_processors(simulation: Simulation, fault: Busy, share: float, until: float) -> None:
    processors = {name: host.processor for name, host in simulation.hosts.items()}
    processors[TRACKER_NAME] = simulation.tracker.processor
    for name in processors if fault.hosts is None else sorted(fault.hosts):
        processors[name].slow_to(share, until=until)


def _crash(simulation: Simulation, fault: Crash) -> None:
    host = simulation.hosts[fault.host]
    if not host.running:
        return
    host.crash(power=fault.power)
    if fault.back_after_s is None:
        simulation.lose(host)
    else:
        simulation.world.after(fault.back_after_s, _restart, simulation, fault)


def _leave(simulation: Simulation, fault: Leave) -> None:
    host = simulation.hosts[fault.host]
    if host.running and not host.leaving:
        host.leave()
        simulation.world.after(LOOK_S, _see_off, simulation, fault, simulation.world.now + fault.within_s)


def _see_off(simulation: Simulation, fault: Leave, end_at: float) -> None:
    host = simulation.hosts[fault.host]
    if not host.running or not host.leaving:
        return  # something else has ended it meanwhile
    if host.outgoing and simulation.world.now < end_at:
        simulation.world.after(LOOK_S, _see_off, simulation, fault, end_at)
        return
    host.crash(power=False)
    if fault.back_after_s is None:
        simulation.lose(host)
    else:
        simulation.world.after(fault.back_after_s, _restart, simulation, fault)


def _restart(simulation: Simulation, fault: Crash | Leave) -> None:
    if isinstance(fault, Crash) and fault.power:
        simulation.network.power(fault.host, on=True)
    simulation.hosts[fault.host].start()


def _lose_tracker(simulation: Simulation, fault: TrackerLosses) -> None:
    if not simulation.ended:
        simulation.tracker.kill()
        simulation.world.after(fault.back_after_s, simulation.tracker.start)
        simulation.world.after(fault.every_s, _lose_tracker, simulation, fault)


class _Draw:
    """Draws one schedule."""

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
                        name,
                        self.time(),
                        self.span(0.2, 8.0) if random.random() < 0.6 else None,
                        random.random() < 0.4,
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
                some = random.sample(range(self.pieces), random.choice((1, 3, self.pieces)))
                return [OriginWrong(frozenset(some))]
            case "busy":
                return [Busy(self.time(), self.span(0.5, 4.0), random.choice((0.0, 0.1, 0.3)))]
            case "late":
                return [
                    Late(name, self.span(0.0, 1.5 * self.duration_s)) for name in self.some(1, len(self.names) // 2)
                ]
        raise ValueError(f"there is no fault of the kind {kind!r}")

    def _tracker_losses(self) -> list[Fault]:
        found: list[Fault] = []
        at = self.time() * 0.5
        for _ in range(self.random.randint(1, 3)):
            away = self.span(0.1, 4.0)
            found.append(TrackerLoss(at, away))
            at += away + self.span(0.2, 6.0)
        return found


WEIGHTS = {
    "crash": 5, "leave": 3, "slow": 3, "partition": 4, "wrong": 3, "silent": 2, "tracker": 4, "origin": 3, "origin-wrong": 1, "late": 3,
}  # fmt: skip


def schedule(
    seed: int, names: list[str], *, pieces: int, duration_s: float, kinds: tuple[str, ...] = ()
) -> tuple[Fault, ...]:
    """A schedule drawn from a seed: one to four kinds of faults, or those named, within about
    `duration_s`."""
    draw = _Draw(seed, names, pieces, duration_s)
    chosen = list(kinds)
    while not kinds and len(chosen) < 1 + seed % 4:
        kind = draw.random.choices(list(WEIGHTS), list(WEIGHTS.values()))[0]
        if kind not in chosen:
            chosen.append(kind)
    faults = [fault for kind in chosen for fault in draw.draw(kind)]
    late = late_hosts(faults)
    return tuple(fault for fault in faults if not (isinstance(fault, Crash | Leave) and fault.host in late))
