"""The state of one swarm: the hosts that hold or want a blob, and the trees that carry its stripes.

Theory. The pieces of a blob are divided among S stripes, and each stripe has its own tree. A host
forwards mainly in one stripe, its home, and is a leaf in the others (SplitStream, SOSP 2003), so
that every uplink works. A host has upload slots (child streams): S when its uplink is like the
others', or as many as capacity.fanout says where S is 1. They are allotted to stripes. A stripe
with n receivers and one root needs n - 1 slots, and counting them exactly is what keeps the last
host close to the bound.

Bandwidth is plentiful within a rack, and a rack's uplink is shared. So in each stripe one host of a
rack, its importer, receives from outside and the others receive from inside (planning/planner.py).
Hosts that name no rack count as one rack.

Invariants: the edges keep theirs (edges.py); `receivers`, `bytes_held`, `sites` and `racks` agree
with the members; everything here is soft and is built again from what agents report.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from hashlib import blake2b
from itertools import chain
from math import inf
from operator import eq, gt

from p2pdist.model.digest import Digest
from p2pdist.model.errors import UsageError
from p2pdist.model.messages import Holding, Priority
from p2pdist.model.pieces import PIECE_SIZE_MAX, PIECE_SIZE_MIN, PIECES_LIMIT, PieceLayout
from tracker.core.edges import Edges, placed
from tracker.core.member import Member, rack_in, set_times, shared, site_of

STORY_EVENTS_MAX = 256

LEASE_MOVE_S = 2.0
LEASE_MOVE_MAX_S = 64.0
"""The pause between moves of a lease doubles with each, up to this, and is short again after a
quiet time of this length."""

FAILURES_MAX = 1000
"""Hosts of a swarm of which it is kept what they met at the origin."""

ZONES_MAX = 1000
"""Zones of a swarm whose superpeers are remembered."""


@dataclass(frozen=True, slots=True)
class OriginFailure:
    """What a host met at the origin: `reason` as in its complaint, in the name of which `witness`
    (a host or an address), and at which piece."""

    witness: str
    reason: str
    piece: int


@dataclass(slots=True)
class OriginReads:
    """How a swarm reads the origin, beside the leases of its roots."""

    lease_moved_at: list[float]
    """Time of the last move of each stripe's lease. `lease_moved`."""
    lease_pause_s: list[float]
    """Pause before each stripe's lease may move again. `lease_moved`."""
    shares: dict[str, tuple[str, ...]] = field(default_factory=dict)
    """By site the superpeers that read the blob, each its share; empty while the roots read.
    `share`."""
    sharing_failed: bool = False
    """A superpeer could not read its share. `fail_sharing`."""
    leases_lost: int = 0
    """Idle leases that went to other swarms. `lose_lease`."""
    failures: dict[str, OriginFailure] = field(default_factory=dict)
    """By host what it last met at the origin that was wrong or missing; the latest comes last.
    `fail`."""
    looks: bool = False
    """Whether the tracker looks at the origin now. `look`, `looked`."""
    looked_at: float = -inf
    """When the tracker last began to. `look`."""
    barred: dict[str, None] = field(default_factory=dict)
    """Hosts that may not read it, since they lied of what they read (vouching/vouching.py). `bar`,
    `unbar`."""
    superpeers: dict[str, tuple[tuple[str, ...], int]] = field(default_factory=dict)
    """By site the superpeers that were chosen, and from how many members. `choose`."""

    def share(self, shares: dict[str, tuple[str, ...]]) -> None:
        """These superpeers read the blob from now on."""
        self.shares = shares

    def fail_sharing(self) -> None:
        """A superpeer cannot read its share: the blob is not shared again."""
        self.sharing_failed = True

    def choose(self, key: str, names: tuple[str, ...], candidates: int) -> None:
        """These were chosen from so many members."""
        if len(self.superpeers) >= ZONES_MAX:
            self.superpeers.clear()
        self.superpeers[key] = names, candidates

    def bar(self, host: str) -> None:
        """The host may not read the blob from now on."""
        self.barred[host] = None
        self.superpeers.clear()

    def unbar(self, host: str) -> None:
        """The host may read it again."""
        self.barred.pop(host, None)

    def lose_lease(self) -> None:
        """An idle lease goes to another swarm."""
        self.leases_lost += 1

    def fail(self, host: str, failure: OriginFailure) -> None:
        """A host met wrong or missing content."""
        self.failures.pop(host, None)
        self.failures[host] = failure
        if len(self.failures) > FAILURES_MAX:
            del self.failures[next(iter(self.failures))]

    def witnesses(self) -> int:
        """In how many names hosts said so."""
        return len({failure.witness for failure in self.failures.values()})

    def may_look(self, again: float, lost: float) -> bool:
        """Whether the tracker may look at the origin: it last began to before `again`, and does not
        now, unless it began before `lost`."""
        return self.looked_at <= (lost if self.looks else again)

    def look(self, now: float) -> None:
        """The tracker begins to look at the origin."""
        self.looks, self.looked_at = True, now

    def looked(self) -> None:
        """The tracker has looked."""
        self.looks = False

    def lease_rests(self, stripe: int, *, now: float) -> bool:
        """Whether the stripe's lease moved too recently to move again."""
        return now - self.lease_moved_at[stripe] < self.lease_pause_s[stripe]

    def lease_moved(self, stripe: int, *, now: float) -> None:
        """The stripe's lease moves now."""
        longer = now - self.lease_moved_at[stripe] < LEASE_MOVE_MAX_S
        self.lease_moved_at[stripe] = now
        self.lease_pause_s[stripe] = min(LEASE_MOVE_MAX_S, 2 * self.lease_pause_s[stripe]) if longer else LEASE_MOVE_S


@dataclass(slots=True)
class Passes:
    """What the passes over a swarm (planner, overload, chains) keep for the next ones."""

    begun: bool = False
    """A host joined with pieces or streams that this tracker did not plan. `begin`."""
    drawn_for: int = 0
    """Receivers when the trees were last drawn anew; 0 before. `drawn`."""
    kept_for: int = 0
    """Receivers when drawing anew last turned out not to pay. `kept`."""
    strained: bool = False
    """A host was given more children than upload slots since. `strain`, `clear_strain`."""
    spread_at: float = 0.0
    """Time of the last pass that spread overload. `spread`."""
    lined_up_at: float = -inf
    """Time of the last pass that lined up late hosts. `lined_up`."""
    rested_at: float = -inf
    """Time from which the next plan may be made. `rest`."""

    def begin(self) -> None:
        """A host brought pieces or streams along."""
        self.begun = True

    def drawn(self, receivers: int) -> None:
        """The trees were drawn for so many receivers."""
        self.drawn_for = receivers

    def keep(self, receivers: int) -> None:
        """With so many receivers the trees are not worth drawing anew."""
        self.kept_for = receivers

    def strain(self) -> None:
        """A host has more children than upload slots."""
        self.strained = True

    def clear_strain(self) -> None:
        """No host is overloaded, or all trees are drawn anew."""
        self.strained = False

    def spread(self, now: float) -> None:
        """Overload is being spread."""
        self.spread_at = now

    def lined_up(self, now: float) -> None:
        """Late hosts are being lined up."""
        self.lined_up_at = now

    def rest(self, until: float) -> None:
        """A plan is made now; the next one not before that time."""
        self.rested_at = until


@dataclass(slots=True)
class WanCrossings:
    """What the budgets of sites (wan/imports.py) let a swarm do, and which edges they count."""

    closed: dict[str, bool] = field(default_factory=dict)
    """Sites that may import nothing now, and whether their hosts may not read the origin either.
    `close`."""
    rates: dict[str, float] = field(default_factory=dict)
    """How much may come to a site in a second by its budget, where it has one; 0 where it is
    closed. `close`."""
    waiting: dict[str, str] = field(default_factory=dict)
    """Those of the closed sites of which a host finds no parent, and why they wait. `wait`."""
    paced: set[str] = field(default_factory=set)
    """Sites whose imports have a rate: what is slow there says nothing of hosts. `pace`."""
    imports: dict[tuple[str, int], float] = field(default_factory=dict)
    """(host, stripe) of the edges into sites with a budget, and the bytes/s that the host is told;
    0 for no limit, infinity where it has not been decided. Imports."""
    stopped: dict[tuple[str, int], None] = field(default_factory=dict)
    """Edges that were taken away, of which the last pieces may still come. Imports."""
    untold: dict[str, None] = field(default_factory=dict)
    """Hosts that are to be told whether their site waits. Imports, `told`."""
    rests: bool = False
    """Whether only time can help the members that wait for a parent. Imports."""

    def close(self, sites: dict[str, bool], rates: dict[str, float]) -> None:
        """These sites are closed from now on, and no others; sites with a budget get that much."""
        self.closed, self.rates = sites, rates

    def slower(self, site: str, other: str) -> bool:
        """Whether a site gets less than another may."""
        return bool(self.rates) and self.rates.get(site, inf) < self.rates.get(other, inf)

    def wait(self, sites: dict[str, str]) -> None:
        """These sites wait from now on, and no others."""
        self.waiting = sites

    def set_rated(self, sites: set[str]) -> None:
        """These sites have a rate from now on, and no others."""
        self.paced = sites

    def plan_sent(self, host: str) -> None:
        """The host has been told."""
        self.untold.pop(host, None)


@dataclass(slots=True)
class Swarm:
    """The members of one swarm and their counts. `edges` are the trees, `origin` how
    the origin is read, `passes` what the planner remembers; each part changes through its own
    methods."""

    blob: Digest
    layout: PieceLayout
    """How the blob is cut into pieces and stripes."""
    key: Digest = ""  # type: ignore[assignment]
    """Names the swarm within the tracker: the digest, or `key_of` where hosts disagree on the
    layout (a host cannot send pieces to one that counts other pieces, so a host that lies is alone
    in its swarm). `rename`."""
    members: dict[str, Member] = field(default_factory=dict)
    """Members by host name. `add`, `remove`."""
    bytes_held: dict[str, int] = field(default_factory=dict)
    """Bytes that each member holds; rankings (affinity.py) ask for all hosts at once. `_count`."""
    sites: dict[str, dict[str, None]] = field(default_factory=dict)
    """Names of the members of each site; no site is empty. `_enter`, `_exit`."""
    racks: dict[str, dict[str, None]] = field(default_factory=dict)
    """Names of the members of each rack; no rack is empty. `_enter`, `_exit`."""
    receivers: int = 0
    """Members that lack pieces. `add`, `remove`, `advance`, `forget_pieces`."""
    starting: dict[str, None] = field(default_factory=dict)
    """Receivers for which a job's start waits. `set_priority`."""
    swarming: dict[str, None] = field(default_factory=dict)
    """Receivers that receive by BitTorrent. `set_transport`."""
    starved: dict[str, None] = field(default_factory=dict)
    """Members without a piece of a stripe that several parents gave nothing. Complaints,
    `advance`, `remove`."""
    claims: dict[str, bool] = field(default_factory=dict)
    """Members that say they have pieces which no host has seen, and whether their first children
    have a deadline (repair/claims.py). Claims, `remove`."""
    claims_doubted: dict[str, None] = field(default_factory=dict)
    """Those of them that are doubted. Claims, `remove`."""
    claims_proved: int = 0
    """Members whose claims were proved. Claims."""
    tree_seeds: dict[str, None] = field(default_factory=dict)
    """Seeds that did not become so by BitTorrent, as far as is known. `add`, `advance`."""
    story: deque[tuple[float, str]] = field(default_factory=lambda: deque(maxlen=STORY_EVENTS_MAX))
    """The latest events: time and text. `record`."""
    fanout: int = 0
    """Upload slots of a host with a typical uplink. `set_fanout`."""
    typical_rate: float = 0.0
    """Pieces of a stripe that a typical host gets in a second; 0 while unknown.
    `set_typical_rate`."""
    stripes: int = field(init=False)
    large: bool = field(init=False)
    """Whether its pieces are large (PieceLayout.large): each report asks."""
    totals: tuple[int, ...] = field(init=False)
    """Pieces of each stripe."""
    edges: Edges = field(init=False)
    origin: OriginReads = field(init=False)
    _none_yet: tuple[int, ...] = field(init=False)
    _no_lags: tuple[None, ...] = field(init=False)
    """What members share that have said nothing of their stripes yet."""
    passes: Passes = field(default_factory=Passes)
    """What the planner and the rebalancing passes remember."""
    wan: WanCrossings = field(default_factory=WanCrossings)

    def __post_init__(self) -> None:
        self.key = self.key or self.blob
        count = self.layout.count
        self.stripes = self.fanout = self.layout.stripes
        self.large = self.layout.large
        self.totals = tuple(len(range(stripe, count, self.stripes)) for stripe in range(self.stripes))
        self.edges = Edges(self.members, self.totals)
        self._none_yet, self._no_lags = shared((0,) * self.stripes), (None,) * self.stripes
        self.origin = OriginReads([-inf] * self.stripes, [0.0] * self.stripes)

    # -- members

    def check_counts(self, counts: tuple[int, ...]) -> None:
        """Raises UsageError unless `counts` can be piece counts of this blob."""
        if len(counts) != self.stripes or min(counts, default=0) < 0 or any(map(gt, counts, self.totals)):
            raise UsageError(f"impossible piece counts {counts} for {self.blob}")

    def add(
        self,
        host: str,
        piece_counts: Iterable[int],
        *,
        slots: int,
        now: float,
        zone: str = "",
        rack: str = "",
        slow_receiver: bool = False,
    ) -> Member:
        """A host joins with `piece_counts` verified pieces per stripe."""
        stripes, counts = self.stripes, self._shared(tuple(piece_counts))
        none, times = self._none_yet, (now,) * self.stripes
        member = Member(
            host,
            counts,
            allotted=none,
            parents=[None] * stripes,
            children=[()] * stripes,
            joined_at=now,
            had=any(counts),
            slots=slots,
            complaints=none,
            moved_at=times,
            attached_at=times,
            rates=none,
            lags=self._no_lags,
            order=order_key(self.blob, host),
            zone=zone,
            site=site_of(zone),
            rack=rack_in(zone, rack),
            seed=counts == self.totals,
            heard_at=now,
            slow_receiver=slow_receiver,
            taken=none,
        )
        self.members[host] = member
        self._count(member)
        self._enter(member)
        if member.seed:
            self.tree_seeds[host] = None
        else:
            self.receivers += 1
            for stripe in range(stripes):
                if counts[stripe] < self.totals[stripe]:
                    self.edges.wait(stripe, host)
        return member

    def remove(self, host: str) -> None:
        """A host leaves: its children wait for other parents."""
        member = self.members.pop(host)
        del self.bytes_held[host]
        self.starting.pop(host, None)
        self.swarming.pop(host, None)
        self.tree_seeds.pop(host, None)
        self.claims.pop(host, None)
        self.claims_doubted.pop(host, None)
        self.starved.pop(host, None)
        self._exit(member)
        if not member.seed:
            self.receivers -= 1
        self.edges.remove(member)

    def advance(self, host: str, piece_counts: Iterable[int], *, now: float) -> bool:
        """Take new piece counts; returns whether the host became a seed. A finished stripe frees
        its parent's upload slot."""
        member, counts = self.members[host], self._shared(tuple(piece_counts))
        if member.seed:
            return False
        self.edges.set_now(now)
        totals, before, complaints = self.totals, member.counts, any(member.complaints)
        moved = [stripe for stripe, new in enumerate(counts) if new > before[stripe]]
        if moved:
            member.moved_at = set_times(member.moved_at, moved, self.edges.times)
        for stripe in moved if complaints else ():
            member.forgive(stripe)
        for stripe in moved if any(map(eq, counts, totals)) else ():
            if counts[stripe] == totals[stripe]:
                self.edges.finish(stripe, member)
        if member.starvation is not None and any(counts) and not member.starvation.feed(counts, moved):
            self.starved.pop(host, None)
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

    def forget_pieces(self, host: str, piece_counts: Iterable[int]) -> None:
        """The host holds less than it said before, as after losing its store."""
        member, counts = self.members[host], self._shared(tuple(piece_counts))
        if member.seed:
            member.seed = False
            self.tree_seeds.pop(host, None)
            self.receivers += 1
        member.counts = counts
        self._count(member)
        for stripe in range(self.stripes):
            if counts[stripe] == self.totals[stripe]:
                self.edges.finish(stripe, member)
            elif member.parents[stripe] is None:
                self.edges.wait(stripe, host)

    def _shared(self, counts: tuple[int, ...]) -> tuple[int, ...]:
        """These counts, as one object for all members that have nothing, or everything."""
        return self.totals if counts == self.totals else counts if any(counts) else self._none_yet

    def _count(self, member: Member) -> None:
        """Note the bytes that a member holds. Which of its pieces is the last, shorter one is not
        known, so each counts as a whole one, and a host that lacks a piece lacks at least a
        byte."""
        size = self.layout.size
        held = size if member.seed else min(size - 1, sum(member.counts) * self.layout.piece_size)
        self.bytes_held[member.host] = held

    # -- what members say of themselves

    def set_priority(self, host: str, priority: Priority) -> None:
        """The host says how urgent its pull is; a seed pulls nothing."""
        if priority == "start" and not self.members[host].seed:
            self.starting[host] = None
        else:
            self.starting.pop(host, None)

    def set_transport(self, host: str, by_bittorrent: bool) -> None:
        """The host says whether it receives by BitTorrent."""
        if by_bittorrent and not self.members[host].seed:
            self.swarming[host] = None
        else:
            self.swarming.pop(host, None)

    def set_location(self, host: str, zone: str, rack: str) -> None:
        """The host says its zone and rack; its streams stay until they are planned anew."""
        member, name = self.members[host], rack_in(zone, rack)
        if (member.zone, member.rack) == (zone, name):
            return
        self._exit(member)
        member.zone, member.site, member.rack = zone, site_of(zone), name
        self._enter(member)
        placed(self.edges, member)

    def set_slow_receiver(self, member: Member, slow: bool) -> None:
        """Whether a host's downlink is so slow that it takes next to nothing of its parents'
        uplinks."""
        if member.slow_receiver != slow and self.edges.set_slow_receiver(member, slow):
            self.passes.strain()

    def _enter(self, member: Member) -> None:
        self.sites.setdefault(member.site, {})[member.host] = None
        self.racks.setdefault(member.rack, {})[member.host] = None

    def _exit(self, member: Member) -> None:
        for names_by_location, name in ((self.sites, member.site), (self.racks, member.rack)):
            del names_by_location[name][member.host]
            if not names_by_location[name]:
                del names_by_location[name]

    # -- the swarm as a whole

    @property
    def mixed(self) -> bool:
        """Whether some receive by trees and others by BitTorrent."""
        return 0 < len(self.swarming) < self.receivers

    @property
    def priority(self) -> Priority:
        """That of the most urgent receiver that is present; a preseed where none is."""
        members = self.members
        for host in self.starting:  # nearly always the first one is
            if members[host].present:
                return "start"
        return "preseed"

    def readers(self) -> list[str]:
        """The hosts that may read the origin, once for each lease."""
        return list(chain(*self.origin.shares.values())) if self.origin.shares else list(chain(*self.edges.roots))

    def leases(self) -> int:
        """Origin leases that are out, or will be as soon as superpeers no longer share the reading:
        the roots then read without asking again."""
        return max(len(self.readers()), sum(map(len, self.edges.roots)))

    def set_fanout(self, fanout: int) -> None:
        """A host with a typical uplink has so many upload slots."""
        self.fanout = fanout

    def set_typical_rate(self, rate: float) -> None:
        """A typical host gets so many pieces of a stripe in a second."""
        self.typical_rate = rate

    def rename(self, key: Digest) -> Digest:
        """The swarm has another key; returns the old one."""
        old, self.key = self.key, key
        return old

    def record(self, now: float, text: str) -> None:
        """Add an event to the swarm's story."""
        self.story.append((now, text))


def order_key(blob: str, host: str) -> int:
    """A number that orders hosts differently for each blob, the same in every process."""
    return int.from_bytes(blake2b(f"{blob}/{host}".encode(), digest_size=8).digest(), "big")


def key_of(blob: Digest, layout: PieceLayout) -> Digest:
    """The key of the swarm of hosts that cut a blob like this, where the blob's digest is the key
    of another swarm."""
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
