"""The state of one swarm: who holds and wants a blob, and the trees that carry its stripes.

Theory. A blob's pieces are dealt into S stripes. Each stripe has its own tree; a host forwards
mainly in one stripe, its home, and is a leaf in the others (SplitStream, SOSP 2003), so every
uplink works. A host has a budget of seats (child streams), S when its uplink is like the others'
(fanout.py says how many where S is 1), which is allotted to stripes. A stripe with n receivers and
one root needs n - 1 seats, and counting them exactly is what keeps the last host close to the
bound.

A member is a receiver (it lacks pieces) or a seed. A receiver's place in a stripe is its parent:
another member, the origin (then it is a root and holds the lease), or nobody yet. Seeds have no
parents. A member whose session ended, and that has not said since what it holds, is absent: its
streams may well be running, so its edges stay for a while, but it gets no new parents and no new
children.

Hosts stand in racks. Within a rack bandwidth is plentiful, its uplink is shared; so in each stripe
one host of a rack, its importer, receives from outside and the others from inside (see planner.py).
Hosts that name no rack count as one. `zones` and `racks` hold the names of the members that stand
there, and none that is empty.

`avoided` holds (child, parent) pairs that failed a moment ago, with the time until which they are
not joined again; `parted` those of them between which too little came, though the parent is there
and gives: the origin is not read instead of it. `unplanned` holds the (stripe, host) that wait for
a parent, `changed` the (host, stripe) whose parent the host has not been told yet. A swarm is
`under_way` when hosts joined it with pieces or streams that this tracker did not plan, and
`strained` when somebody was given more children than seats since its trees were drawn. `starting`
are the receivers that say that a job's start waits for them, `swarming` those that receive by
BitTorrent, `tree_seeds` the seeds that did not, as far as is known; `dealt` are the keepers that
read for a swarm, by zone (dealing.py), and `undealt` says that this went wrong. `fanout` is the
budget of a host with a typical uplink, `typical_pace` how many pieces of a stripe hosts get in a
second; `keepers` are names by zone, with how many they were chosen from; `held` are the bytes that
each member holds, kept beside the counts because rankings (affinity.py) ask for those of all hosts
at once; `now` is the time of the last event, `spread_at` and `lined_up_at` those of the last such
passes, and `rested_at` says when the next plan may be made.

`key` names the swarm within the tracker. It is the blob's digest, or `key_of` where hosts say of
one blob that it is cut in different ways: nobody can send pieces to a host that counts others, so
each way is a swarm of its own, and a host that lies is alone in its swarm.

Invariants: the edges of a stripe form a forest (no cycles); only receivers have parents; a lease
belongs to the host whose parent is the origin; all here is soft and rebuilt from what agents
report.

One host in a swarm, as the tracker knows it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from hashlib import blake2b
from itertools import chain
from math import inf

from p2pdist.model.digest import Digest
from p2pdist.model.errors import UsageError
from p2pdist.model.messages import Holding, Priority
from p2pdist.model.pieces import PIECE_SIZE_MAX, PIECE_SIZE_MIN, PIECES_LIMIT, PieceLayout
from p2pdist.model.plan import Source


@dataclass(frozen=True, slots=True)
class Lag:
    """Since when a host lags behind its parent, and how many pieces of the stripe it had then."""

    since: float
    count: int


@dataclass(slots=True)
class Member:
    """One host in a swarm. `counts`: verified pieces per stripe; `seats`: seats allotted per
    stripe; `parents`: host name, FROM_ORIGIN or None, per stripe; `children`: host names, in the
    order in which they came; `complaints`: how often the host complained in a stripe since it last
    got a piece of it; `moved_at`: when pieces of a stripe last came, or its parent changed;
    `attached_at`: when its parent changed; `pace`: pieces a second of late; `lags`: since when it
    lags behind its parent, if it does (progress.py); `heard_at`: when it last reported; `light`:
    its downlink is so slow that it takes no seat; `relieved_at`: when it lost its seats;
    `fair_reports`: so many in a row said that it is not light; `taken`: seats that its children
    take, per stripe; `order`: a number that orders hosts differently for each blob; `keepers`:
    those that the host was told of in its session."""

    host: str
    counts: list[int]
    allotted: list[int]
    parents: list[str | None]
    children: list[dict[str, None]]
    joined_at: float
    slots: int
    complaints: list[int]
    moved_at: list[float]
    attached_at: list[float]
    rates: list[float]
    lags: list[Lag | None]
    order: int
    zone: str = ""
    rack: str = ""
    seed: bool = False
    absent_since: float | None = None
    silent: bool = False
    heard_at: float = 0.0
    slow_receiver: bool = False
    relieved_at: float = -inf
    fair_reports: int = 0
    taken: list[int] = field(default_factory=list)
    superpeers: tuple[Source, ...] = ()

    @property
    def present(self) -> bool:
        """Whether the host has said in its present session what it holds."""
        return self.absent_since is None

    @property
    def unallotted(self) -> int:
        """Seats of the budget that are allotted to no stripe."""
        return self.slots - sum(self.allotted)

    def free(self, stripe: int) -> int:
        return self.allotted[stripe] - self.taken[stripe]

    @property
    def load(self) -> int:
        """Seats that children take, in all stripes."""
        return sum(self.taken)


FROM_ORIGIN = ""
"""Stands for the origin where a parent's host name is expected."""

STORY_EVENTS_MAX = 256


@dataclass(slots=True)
class Swarm:
    """See the module's text. Changing edges goes through `attach` and `detach` only."""

    blob: Digest
    layout: PieceLayout
    members: dict[str, Member] = field(default_factory=dict)
    held: dict[str, int] = field(default_factory=dict)
    zones: dict[str, dict[str, None]] = field(default_factory=dict)
    racks: dict[str, dict[str, None]] = field(default_factory=dict)
    roots: list[dict[str, None]] = field(default_factory=list)
    unplanned: dict[tuple[int, str], None] = field(default_factory=dict)
    changed: dict[tuple[str, int], None] = field(default_factory=dict)
    story: deque[tuple[float, str]] = field(default_factory=lambda: deque(maxlen=STORY_EVENTS_MAX))
    stripes: int = 0
    fanout: int = 0
    totals: list[int] = field(default_factory=list)
    receivers: int = 0
    starting: dict[str, None] = field(default_factory=dict)
    swarming: dict[str, None] = field(default_factory=dict)
    tree_seeds: dict[str, None] = field(default_factory=dict)
    shares: dict[str, tuple[str, ...]] = field(default_factory=dict)
    sharing_failed: bool = False
    under_way: bool = False
    drawn_for: int = 0
    kept_for: int = 0
    strained: bool = False
    typical_rate: float = 0.0
    now: float = 0.0
    spread_at: float = 0.0
    lined_up_at: float = float("-inf")
    rested_at: float = float("-inf")
    avoided: dict[tuple[str, str], float] = field(default_factory=dict)
    parted: dict[tuple[str, str], float] = field(default_factory=dict)
    origin_failures: dict[str, None] = field(default_factory=dict)
    superpeers: dict[str, tuple[tuple[str, ...], int]] = field(default_factory=dict)
    key: Digest = ""  # type: ignore[assignment]
    lease_moved_at: list[float] = field(default_factory=list)
    lease_pause_s: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.key = self.key or self.blob
        count = self.layout.count
        self.stripes = self.fanout = self.layout.stripes
        self.totals = [len(range(stripe, count, self.stripes)) for stripe in range(self.stripes)]
        self.roots = [{} for _ in range(self.stripes)]
        self.lease_moved_at = [float("-inf")] * self.stripes
        self.lease_pause_s = [0.0] * self.stripes

    def check_counts(self, counts: list[int]) -> None:
        """Raises UsageError unless `counts` can be piece counts of this blob."""
        possible = (0 <= count <= total for count, total in zip(counts, self.totals, strict=True))
        if len(counts) != self.stripes or not all(possible):
            raise UsageError(f"impossible piece counts {counts} for {self.blob}")

    def add(self, host: str, counts: list[int], *, slots: int, now: float, zone: str = "", rack: str = "") -> Member:
        """A host joins with `counts` verified pieces per stripe. Racks of one name in two zones are
        two; names hold no white space, so a space keeps them apart."""
        member = Member(
            host,
            counts,
            [0] * self.stripes,
            [None] * self.stripes,
            [{} for _ in range(self.stripes)],
            now,
            slots,
            [0] * self.stripes,
            [now] * self.stripes,
            [now] * self.stripes,
            [0.0] * self.stripes,
            [None] * self.stripes,
            order_key(self.blob, host),
            zone,
            f"{zone} {rack}",
            seed=counts == self.totals,
            heard_at=now,
            taken=[0] * self.stripes,
        )
        self.members[host] = member
        self._count(member)
        self._enter(member)
        if member.seed:
            self.tree_seeds[host] = None
        else:
            self.receivers += 1
            for stripe in range(self.stripes):
                if counts[stripe] < self.totals[stripe]:
                    self.unplanned[stripe, host] = None
        return member

    @property
    def mixed(self) -> bool:
        """Whether some receive by trees and others by BitTorrent."""
        return 0 < len(self.swarming) < self.receivers

    @property
    def priority(self) -> Priority:
        """That of its most urgent receiver who is present; nobody present is in a hurry."""
        return "start" if any(self.members[host].present for host in self.starting) else "preseed"

    def set_priority(self, host: str, priority: Priority) -> None:
        """The host says how urgent its pull is; who has everything pulls nothing."""
        if priority == "start" and not self.members[host].seed:
            self.starting[host] = None
        else:
            self.starting.pop(host, None)

    def set_transport(self, host: str, swarm: bool) -> None:
        """The host says whether it receives by BitTorrent."""
        if swarm and not self.members[host].seed:
            self.swarming[host] = None
        else:
            self.swarming.pop(host, None)

    def set_location(self, host: str, zone: str, rack: str) -> None:
        """The host says where it stands; its streams stay until they are planned anew."""
        member, name = self.members[host], f"{zone} {rack}"
        if (member.zone, member.rack) == (zone, name):
            return
        self._exit(member)
        member.zone, member.rack = zone, name
        self._enter(member)

    def remove(self, host: str) -> None:
        """A host leaves: its children are unplanned again."""
        member = self.members.pop(host)
        del self.held[host]
        self.starting.pop(host, None)
        self.swarming.pop(host, None)
        self.tree_seeds.pop(host, None)
        self._exit(member)
        if not member.seed:
            self.receivers -= 1
        for stripe in range(self.stripes):
            for child in list(member.children[stripe]):
                self._unlink(stripe, self.members[child])
                self.unplanned[stripe, child] = None
            self._unlink(stripe, member)
            self.unplanned.pop((stripe, host), None)
            self.changed.pop((host, stripe), None)

    def attach(self, stripe: int, child: str, parent: str) -> None:
        """`child` receives `stripe` from `parent` (FROM_ORIGIN: with the lease). A cycle is a bug
        of ours."""
        member = self.members[child]
        assert not member.seed and not self.receives_through(stripe, parent, child), f"cycle: {child} under {parent}"
        self._unlink(stripe, member)
        member.parents[stripe] = parent
        member.moved_at[stripe] = member.attached_at[stripe] = self.now
        member.lags[stripe] = None
        if parent == FROM_ORIGIN:
            self.roots[stripe][child] = None
        else:
            above = self.members[parent]
            above.children[stripe][child] = None
            above.taken[stripe] += not member.slow_receiver
        self.unplanned.pop((stripe, child), None)
        self.changed[child, stripe] = None

    def detach(self, stripe: int, child: str) -> None:
        """`child` loses its parent and waits for another."""
        member = self.members[child]
        self._unlink(stripe, member)
        if member.counts[stripe] < self.totals[stripe]:
            self.unplanned[stripe, child] = None

    def advance(self, host: str, counts: list[int], *, now: float) -> bool:
        """Take new piece counts; returns whether the host became a seed. A finished stripe frees
        its parent's seat."""
        member = self.members[host]
        if member.seed:
            return False
        self.now = now
        for stripe, (old, new) in enumerate(zip(member.counts, counts, strict=True)):
            if new > old:
                member.complaints[stripe] = 0
                member.moved_at[stripe] = now
                if new == self.totals[stripe]:
                    self._finish_stripe(stripe, member)
        member.counts = counts
        member.seed = counts == self.totals
        self._count(member)
        if not member.seed:
            return False
        self.receivers -= 1
        self.starting.pop(host, None)
        if host not in self.swarming:
            self.tree_seeds[host] = None
        self.swarming.pop(host, None)
        return True

    def forget_pieces(self, host: str, counts: list[int]) -> None:
        """The host holds less than it said before, as after losing its store."""
        member = self.members[host]
        if member.seed:
            member.seed = False
            self.tree_seeds.pop(host, None)
            self.receivers += 1
        member.counts = counts
        self._count(member)
        for stripe in range(self.stripes):
            if counts[stripe] == self.totals[stripe]:
                self._finish_stripe(stripe, member)
            elif member.parents[stripe] is None:
                self.unplanned[stripe, host] = None

    def move(self, stripe: int, child: Member, parent: Member) -> None:
        """`child` leaves its parent, which is a host, for another, which gets a seat for it."""
        above = self.members[child.parents[stripe] or ""]
        if not child.slow_receiver and above.allotted[stripe] >= above.taken[stripe]:
            above.allotted[stripe] -= 1
        self.grant_slot(parent, stripe)
        self.attach(stripe, child.host, parent.host)

    def grant_slot(self, member: Member, stripe: int) -> None:
        """Allot one more seat of `member` to `stripe`, from its spare ones or from a stripe where
        one stands idle; a host that has neither is overloaded and keeps its allotment."""
        if member.unallotted <= 0:
            donor = next((each for each in range(self.stripes) if each != stripe and member.free(each) > 0), None)
            if donor is None:
                return
            member.allotted[donor] -= 1
        member.allotted[stripe] += 1

    def receives_through(self, stripe: int, host: str, ancestor: str) -> bool:
        """Whether `host` is `ancestor` or receives the stripe through it."""
        at: str | None = host
        while at:
            if at == ancestor:
                return True
            at = self.members[at].parents[stripe]
        return False

    def set_slow_receiver(self, member: Member, slow_receiver: bool) -> None:
        """Whether a host's downlink is so slow that it takes next to nothing of its parents'
        uplinks."""
        if member.slow_receiver == slow_receiver:
            return
        member.slow_receiver = slow_receiver
        for stripe, parent in enumerate(member.parents):
            if above := self.members.get(parent or ""):
                above.taken[stripe] += -1 if slow_receiver else 1
                self.strained = self.strained or 0 < above.slots < above.load

    def notify_children(self, host: str) -> None:
        """The host is back, perhaps at another address: let its children know."""
        for stripe, children in enumerate(self.members[host].children):
            for child in children:
                self.changed[child, stripe] = None

    def blocked(self, stripe: int, host: str) -> str | None:
        """The first host on the way up from `host`, itself included, whose parent has more of the
        stripe than it has, is absent, or is yet to be found. None when there is none: everybody
        waits for the origin."""
        at = host
        while True:
            member = self.members[at]
            parent = member.parents[stripe]
            if parent == FROM_ORIGIN:
                return None
            above = self.members[parent] if parent is not None else None
            if above is None or not above.present or above.counts[stripe] > member.counts[stripe]:
                return at
            at = above.host

    def depth(self, stripe: int, host: str) -> int:
        """Edges between the host and the origin, a seed, or whoever has no parent."""
        steps = 0
        at = self.members[host].parents[stripe]
        while at is not None:
            steps += 1
            at = self.members[at].parents[stripe] if at else None
        return steps

    def rooted(self, stripe: int, host: str) -> bool:
        """Whether the host's way up ends at the origin, at a seed or at a host that has the whole
        stripe."""
        at: str | None = host
        for _ in range(len(self.members) + 1):
            if not at or self.members[at].counts[stripe] == self.totals[stripe]:
                return at is not None
            at = self.members[at].parents[stripe]
        raise AssertionError(f"the way up from {host} is a cycle")

    def edges(self, stripe: int) -> Iterator[tuple[str, str]]:
        """(child, parent) of every edge of a stripe; the parent may be FROM_ORIGIN."""
        for member in self.members.values():
            parent = member.parents[stripe]
            if parent is not None:
                yield member.host, parent

    def readers(self) -> list[str]:
        """Who may read the origin, once for each lease."""
        return list(chain(*self.shares.values())) if self.shares else list(chain(*self.roots))

    def leases(self) -> int:
        """Origin leases that are out, or will be as soon as the reading is not dealt any more,
        which nobody is asked about."""
        return max(len(self.readers()), sum(map(len, self.roots)))

    def record(self, now: float, text: str) -> None:
        """Add a line to the swarm's story."""
        self.story.append((now, text))

    def _count(self, member: Member) -> None:
        """Note the bytes that a member holds. Which of its pieces is the last, shorter one is not
        known, so each counts as a whole one, and who lacks a piece lacks at least a byte."""
        size = self.layout.size
        self.held[member.host] = size if member.seed else min(size - 1, sum(member.counts) * self.layout.piece_size)

    def _enter(self, member: Member) -> None:
        self.zones.setdefault(member.zone, {})[member.host] = None
        self.racks.setdefault(member.rack, {})[member.host] = None

    def _exit(self, member: Member) -> None:
        for places, name in ((self.zones, member.zone), (self.racks, member.rack)):
            del places[name][member.host]
            if not places[name]:
                del places[name]

    def _finish_stripe(self, stripe: int, member: Member) -> None:
        """A member has the whole of a stripe and needs no parent there."""
        self._unlink(stripe, member)
        self.unplanned.pop((stripe, member.host), None)
        self.changed.pop((member.host, stripe), None)

    def _unlink(self, stripe: int, member: Member) -> None:
        parent = member.parents[stripe]
        if parent is None:
            return
        member.parents[stripe] = None
        member.lags[stripe] = None
        if parent == FROM_ORIGIN:
            self.roots[stripe].pop(member.host, None)
        elif parent in self.members:
            above = self.members[parent]
            del above.children[stripe][member.host]
            above.taken[stripe] -= not member.slow_receiver


def only_leaves(swarm: Swarm, stripe: int, member: Member) -> bool:
    """Whether nobody receives the stripe through the host's children."""
    return not any(swarm.members[child].children[stripe] for child in member.children[stripe])


def order_key(blob: str, host: str) -> int:
    """A number that orders hosts differently for each blob, the same in every process."""
    return int.from_bytes(blake2b(f"{blob}/{host}".encode(), digest_size=8).digest(), "big")


def key_of(blob: Digest, layout: PieceLayout) -> Digest:
    """The key of the swarm of those who say that a blob is cut like this, where the blob's digest
    is the key of another swarm."""
    return Digest(f"{blob}/{layout.size}/{layout.piece_size}")


def layout_of(holding: Holding) -> PieceLayout:
    """How a blob is cut that an agent speaks of; raises UsageError when no blob can be cut like
    that."""
    piece_size = holding.piece_size
    if piece_size & (piece_size - 1) or not PIECE_SIZE_MIN <= piece_size <= PIECE_SIZE_MAX:
        raise UsageError(f"{holding.blob} cannot have pieces of {piece_size} bytes")
    layout = PieceLayout(holding.size, piece_size)
    if not 0 < layout.count <= PIECES_LIMIT:
        raise UsageError(f"{holding.blob} cannot have {layout.count} pieces")
    return layout
