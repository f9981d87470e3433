"""The trackers of a cluster, each with the real ownerships core, and the database that they share.

Model. A tracker that runs, and reaches the database, writes its row there every BEAT_S and reads
all rows; both take no time. It takes no session before it follows an ownership. One that is told to
drain ends when it owns no swarm any more, after DRAIN_MAX_S at the latest.
"""

from __future__ import annotations

from p2pdist.model.digest import Digest
from p2pdist.model.ownership import Ownership, owner
from p2pdist.model.ownership import Tracker as Listed
from p2pdist.simulate.clock import World
from p2pdist.simulate.faults import DatabaseLoss, RollingRestart, TrackerCut, TrackerFreeze, TrackerLoss
from p2pdist.simulate.network import DATABASE_NAME, Cut, Paths
from p2pdist.simulate.tracker import Tracker
from tracker.core.events import Followed, LeasesAllowed
from tracker.core.ownership.ownerships import (
    AllowLeases,
    EpochHeard,
    Event,
    Follow,
    MembersSeen,
    Ownerships,
    Publish,
    Registered,
    Tick,
)

BEAT_S = 0.5
DRAIN_LOOK_S = 0.5
DRAIN_MAX_S = 10.0
NEXT_S = 5.0
"""In a rolling restart the next tracker drains so long after the last one started."""

ClusterFault = TrackerLoss | TrackerFreeze | TrackerCut | DatabaseLoss | RollingRestart


class Database:
    """What the trackers of a cluster share."""

    __slots__ = ("available", "rows", "stored")

    def __init__(self) -> None:
        #: Whether it answers.
        self.available = True
        self.rows: dict[str, Registered] = {}
        #: The ownership of the latest epoch.
        self.stored: Ownership | None = None

    def come_back(self) -> None:
        """Answer again."""
        self.available = True

    def publish(self, ownership: Ownership, expected: int) -> None:
        """Take an ownership, if the latest epoch is still `expected`."""
        if (self.stored.epoch if self.stored is not None else 0) == expected:
            self.stored = ownership


class Node:
    """One tracker of a cluster, over all lives of its process."""

    __slots__ = ("_database", "_draining", "_life", "_paths", "_progress", "_world", "id", "ownerships", "tracker")

    def __init__(self, name: str, tracker: Tracker, database: Database) -> None:
        self.id, self.tracker, self._database = name, tracker, database
        self._world: World = tracker.world
        self._paths: Paths = tracker.network.paths
        #: The core of this life.
        self.ownerships = Ownerships(name)
        self._draining = False
        #: Counts lives, so that a beat of an earlier one does nothing.
        self._life = 0
        self._progress = 0
        tracker.on_epoch_seen = lambda host, epoch: self._handle(EpochHeard(epoch, host))

    @property
    def running(self) -> bool:
        """Whether the process runs."""
        return self.tracker.fleet is not None

    @property
    def drained(self) -> bool:
        """Whether it owns nothing any more."""
        return self.tracker.fleet is None or not self.tracker.fleet.swarms

    def start(self) -> None:
        """The process starts, and registers."""
        if self.running:
            return
        self._life += 1
        self._draining = False
        self.ownerships = Ownerships(self.id)
        self.tracker.open = False
        self.tracker.start()
        self.tracker.handle(LeasesAllowed(False))
        self._beat(self._life)

    def kill(self) -> None:
        """The process dies."""
        self._life += 1
        self.tracker.kill()

    def drain(self) -> None:
        """The process is asked to give its swarms away."""
        self._draining = True

    def _beat_due(self, life: int) -> None:
        self.tracker.processor.run(self._beat, life)

    def _beat(self, life: int) -> None:
        if life != self._life or not self.running:
            return
        self._world.after(BEAT_S, self._beat_due, life)
        self._handle(Tick())
        if not self._database.available or not self._paths.reachable(self.tracker.name, DATABASE_NAME):
            return
        self._progress += 1
        self._database.rows[self.id] = Registered(self.id, (), str(life), self._progress, self._draining)
        self._handle(MembersSeen(tuple(self._database.rows.values()), self._database.stored))

    def _handle(self, event: Event) -> None:
        for command in self.ownerships.handle(event, now=self._world.now):
            match command:
                case Publish(ownership, expected):
                    self._database.publish(ownership, expected)
                case Follow(ownership):
                    self.tracker.open = True
                    self.tracker.handle(Followed(ownership, self.id))
                case AllowLeases(allowed):
                    self.tracker.handle(LeasesAllowed(allowed))


class Cluster:
    """All trackers of a simulation, by their ids."""

    def __init__(self, world: World, trackers: list[Tracker]) -> None:
        self._world = world
        self.database = Database()
        names = {tracker.name.lstrip("@"): tracker for tracker in trackers}
        self.nodes = {name: Node(name, tracker, self.database) for name, tracker in names.items()}

    def start(self) -> None:
        """Start all trackers, as a cluster that has run for long."""
        self.database.rows = {name: Registered(name, (), "", 0) for name in self.nodes}
        self.database.stored = Ownership(1, tuple(map(Listed, sorted(self.nodes))))
        for node in self.nodes.values():
            node.start()

    def disturb(self, fault: ClusterFault, blob: Digest) -> None:
        """Let a fault happen now; where it names no tracker, to the owner of `blob`."""
        match fault:
            case TrackerLoss(_, back_after_s, number):
                node = self._node(number, blob)
                node.kill()
                if back_after_s is not None:
                    self._world.after(back_after_s, node.start)
            case TrackerFreeze(_, for_s, number):
                self._node(number, blob).tracker.freeze(for_s)
            case TrackerCut(_, for_s, hosts, number):
                tracker = self._node(number, blob).tracker
                cut = Cut(frozenset([tracker.name]), others=hosts | {DATABASE_NAME})
                tracker.network.paths.cut(cut)
                if for_s is not None:
                    self._world.after(for_s, tracker.network.paths.heal, cut)
            case DatabaseLoss(_, for_s):
                self.database.available = False
                if for_s is not None:
                    self._world.after(for_s, self.database.come_back)
            case RollingRestart(_, away_s):
                self._roll(list(self.nodes.values()), away_s)

    def _node(self, number: int | None, blob: Digest) -> Node:
        return self.owner_of(blob) if number is None else list(self.nodes.values())[number]

    def owner_of(self, blob: Digest) -> Node:
        """The tracker that owns a blob now, by what the database has."""
        stored = self.database.stored
        return self.nodes[owner(stored, blob).id] if stored is not None else next(iter(self.nodes.values()))

    @property
    def at_rest(self) -> bool:
        """Whether no tracker stands still, and every tracker that runs, and reaches the database,
        follows the latest epoch and has given away what it does not own."""
        stored = self.database.stored
        if stored is None:
            return not any(node.running for node in self.nodes.values())
        for node in self.nodes.values():
            fleet = node.tracker.fleet
            if fleet is not None and node.tracker.frozen:
                return False  # its books agree with its hosts once it has read what they said
            if fleet is None or not _reaches(node):
                continue
            if fleet.handover.epoch != stored.epoch or any(
                not fleet.handover.mine(swarm.blob) for swarm in fleet.swarms.values()
            ):
                return False
        return True

    def _roll(self, left: list[Node], away_s: float) -> None:
        if not left:
            return
        node = left[0]
        node.drain()
        self._world.after(DRAIN_LOOK_S, self._end_drained, left, away_s, self._world.now + DRAIN_MAX_S)

    def _end_drained(self, left: list[Node], away_s: float, end_at: float) -> None:
        node = left[0]
        listed = self.database.stored.tracker(node.id) if self.database.stored is not None else None
        drained = node.drained and (listed is None or not listed.share)
        if not drained and self._world.now < end_at:
            self._world.after(DRAIN_LOOK_S, self._end_drained, left, away_s, end_at)
            return
        node.kill()
        self._world.after(away_s, node.start)
        self._world.after(away_s + NEXT_S, self._roll, left[1:], away_s)


def _reaches(node: Node) -> bool:
    return node.tracker.network.paths.reachable(node.tracker.name, DATABASE_NAME)
