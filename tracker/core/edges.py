"""Edges: the parent of each receiver of a swarm, in each stripe.

Each stripe of a blob has a tree of its own. An edge joins a child to its parent in one stripe; the
parent is another member or the origin, and a child of the origin is a root and holds the stripe's
lease.

Invariants: the edges of a stripe form a forest; only receivers have parents; a host is a root
exactly if its parent is the origin; a receiver without a parent in a stripe that it lacks is
unplanned there.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import chain
from math import inf

from tracker.core.host import SITE_END
from tracker.core.member import FROM_ORIGIN, Member, add, set_time, shared


@dataclass(slots=True)
class Edges:
    """The trees of one swarm, the receivers that wait for a parent, and the pairs of hosts between
    which no edge is wanted."""

    members: dict[str, Member]
    """The swarm's members by host name, shared with the Swarm, which adds and removes them."""
    totals: tuple[int, ...]
    """Pieces of each stripe, shared with the Swarm."""
    roots: list[dict[str, None]] = field(default_factory=list)
    """Hosts that read a stripe from the origin, by stripe. `attach`, `detach`."""
    importers: list[dict[str, None]] = field(default_factory=list)
    """Hosts whose parent is a host at another site, by stripe. `attach`, `detach`, and `placed`
    below."""
    unplanned: dict[tuple[int, str], None] = field(default_factory=dict)
    """(stripe, host) of receivers that wait for a parent. `wait`, `attach`, `detach`, `remove`,
    `finish`."""
    changed: dict[str, tuple[int, ...]] = field(default_factory=dict)
    """By host the stripes of which it is still to be told the parent. `attach`, `notify`,
    `told`, `forget_change`."""
    avoided: dict[tuple[str, str], float] = field(default_factory=dict)
    """(child, parent) pairs that failed, and the time until which they are not joined again.
    `avoid`, `forgive`, `expire`."""
    parted: dict[tuple[str, str], float] = field(default_factory=dict)
    """Pairs between which too little came though the parent is there and gives, and the time until
    which they are not parted again. The origin is not read instead of such a parent. `part`,
    `forget_parted`, `expire`."""
    left: dict[tuple[int, str], float] = field(default_factory=dict)
    """(stripe, host) of receivers that said that their parent stands still, and when: since then
    they may receive from an alternate. `leave`, `notify`, `detach`, `finish`, `remove`."""
    _expires_at: float = inf
    """Time before which no such pair has had its time. `avoid`, `part`, `expire`."""
    now: float = 0.0
    """Time that `attach` notes for an edge. `set_now`."""
    times: tuple[float, ...] = ()
    """It for each stripe. `set_now`."""

    def __post_init__(self) -> None:
        self.roots, self.importers = [{} for _ in self.totals], [{} for _ in self.totals]
        self.times = (self.now,) * len(self.totals)

    # -- changes

    def set_now(self, now: float) -> None:
        """Edges that are made from now on are of this time."""
        if now != self.now:
            self.now, self.times = now, (now,) * len(self.totals)

    def attach(self, stripe: int, child: str, parent: str) -> None:
        """`child` receives `stripe` from `parent` (FROM_ORIGIN: with the lease). A cycle is a bug
        of ours."""
        member = self.members[child]
        assert not member.seed and not self.receives_through(stripe, parent, child), f"cycle: {child} under {parent}"
        self._unlink(stripe, member)
        member.parents[stripe] = parent
        same, member.moved_at = member.moved_at is member.attached_at, set_time(member.moved_at, stripe, self.times)
        member.attached_at = member.moved_at if same else set_time(member.attached_at, stripe, self.times)
        member.set_lag(stripe, None)
        member.promised &= ~(1 << stripe)
        if parent == FROM_ORIGIN:
            self.roots[stripe][child] = None
        else:
            above = self.members[parent]
            member.promised |= bool(above.counts[stripe]) << stripe
            above.children[stripe] += (child,)
            if not member.slow_receiver:
                above.taken = add(above.taken, stripe, 1)
            if above.site != member.site and SITE_END in member.zone:
                self.importers[stripe][child] = None
        self.unplanned.pop((stripe, child), None)
        if not self.unplanned:
            self.unplanned.clear()  # an emptied dictionary keeps its room otherwise
        self.notify(child, stripe)

    def rescue(self, stripe: int, child: str) -> None:
        """`child`, which was starved, keeps the lease of a stripe that it has, besides the root of
        its site."""
        self.members[child].rescued |= {stripe}

    def detach(self, stripe: int, child: str) -> None:
        """`child` loses its parent and waits for another."""
        member = self.members[child]
        self._unlink(stripe, member)
        if member.counts[stripe] < self.totals[stripe]:
            self.unplanned[stripe, child] = None

    def move(self, stripe: int, child: Member, parent: Member) -> None:
        """`child` leaves its parent, which is a host, for another, which allots a slot for it."""
        above = self.members[child.parents[stripe] or ""]
        if not child.slow_receiver and above.allotted[stripe] >= above.taken[stripe]:
            above.allot(stripe, -1)
        parent.grant_slot(stripe)
        self.attach(stripe, child.host, parent.host)

    def wait(self, stripe: int, host: str) -> None:
        """A host without a parent waits for one."""
        self.unplanned[stripe, host] = None

    def finish(self, stripe: int, member: Member) -> None:
        """A member has the whole of a stripe and needs no parent there; its parent's slot is
        free."""
        self._unlink(stripe, member)
        self.unplanned.pop((stripe, member.host), None)
        self.forget_change(member.host, stripe)

    def remove(self, member: Member) -> None:
        """A host that left the swarm has no edges any more: its children wait for other parents.
        The swarm has taken it out of the members before."""
        for stripe in range(len(self.totals)):
            for child in list(member.children[stripe]):
                self._unlink(stripe, self.members[child])
                self.unplanned[stripe, child] = None
            self._unlink(stripe, member)
            self.unplanned.pop((stripe, member.host), None)
        self.changed.pop(member.host, None)

    def set_slow_receiver(self, member: Member, slow: bool) -> bool:
        """A member takes no slots of its parents any more, or takes them again; returns whether
        that overloads a parent."""
        overloads = False
        member.slow_receiver = slow
        for stripe, parent in enumerate(member.parents):
            if above := self.members.get(parent or ""):
                above.taken = add(above.taken, stripe, -1 if slow else 1)
                overloads = overloads or 0 < above.slots < above.load
        return overloads

    def _unlink(self, stripe: int, member: Member) -> None:
        parent = member.parents[stripe]
        if parent is None:
            return
        member.parents[stripe] = None
        member.set_lag(stripe, None)
        self.left.pop((stripe, member.host), None)
        if parent == FROM_ORIGIN:
            self.roots[stripe].pop(member.host, None)
            member.rescued -= {stripe}
            return
        self.importers[stripe].pop(member.host, None)
        if parent in self.members:
            above = self.members[parent]
            above.children[stripe] = tuple(name for name in above.children[stripe] if name != member.host)
            if not member.slow_receiver:
                above.taken = add(above.taken, stripe, -1)

    # -- what hosts are still to be told

    def notify(self, host: str, stripe: int) -> None:
        """The host is to be told its parent in a stripe (again), and goes to it."""
        self.left.pop((stripe, host), None)
        stripes = self.changed.get(host, ())
        if stripe not in stripes:
            self.changed[host] = shared((*stripes, stripe))

    def notify_children(self, host: str) -> None:
        """The host is back, perhaps at another address: its children are to be told."""
        for stripe, children in enumerate(self.members[host].children):
            for child in children:
                self.notify(child, stripe)

    def forget_change(self, host: str, stripe: int) -> None:
        """The host has the parent that it was told of before."""
        left = shared(tuple(each for each in self.changed.get(host, ()) if each != stripe))
        if left:
            self.changed[host] = left
        else:
            self.changed.pop(host, None)

    def plan_sent(self, host: str) -> None:
        """The host has been told."""
        self.changed.pop(host, None)
        if not self.changed:
            self.changed.clear()  # an emptied dictionary keeps its room otherwise

    # -- hosts that left their parents by themselves

    def leave(self, stripe: int, child: str, *, now: float) -> None:
        """The child says that its parent stands still, and may turn to an alternate."""
        self.left[stripe, child] = now

    # -- pairs that are not to be joined

    def avoid(self, child: str, parent: str, until: float) -> None:
        """The parent failed the child: the planner does not join them until then."""
        self.avoided[child, parent] = until
        self._expires_at = min(until, self._expires_at)

    def part(self, child: str, parent: str, until: float) -> None:
        """Too little comes to the child from a parent that is there and gives."""
        self.parted[child, parent] = until
        self._expires_at = min(until, self._expires_at)

    def forgive(self) -> None:
        """The bytes for which hosts avoid others may have been right after all."""
        self.avoided = {pair: until for pair, until in self.avoided.items() if pair[1] == FROM_ORIGIN}

    def forget_parted(self, child: str) -> None:
        """The child failed for another reason than its own rate: the other parents that gave it
        little may be just as far away."""
        self.parted = {pair: until for pair, until in self.parted.items() if pair[0] != child}

    def expire(self, now: float) -> None:
        """Forget the pairs that have had their time."""
        if now < self._expires_at:
            return
        self.avoided = {pair: until for pair, until in self.avoided.items() if until > now}
        self.parted = {pair: until for pair, until in self.parted.items() if until > now}
        self._expires_at = min(chain(self.avoided.values(), self.parted.values()), default=inf)

    # -- questions

    def receives_through(self, stripe: int, host: str, ancestor: str) -> bool:
        """Whether `host` is `ancestor` or receives the stripe through it."""
        current: str | None = host
        while current:
            if current == ancestor:
                return True
            current = self.members[current].parents[stripe]
        return False

    def blocked(self, stripe: int, host: str) -> str | None:
        """The first host on the path from `host` up, itself included, whose parent has more of the
        stripe than it has, is absent, or is yet to be found. None when all wait for the origin."""
        current = host
        while True:
            member = self.members[current]
            parent = member.parents[stripe]
            if parent == FROM_ORIGIN:
                return None
            above = self.members[parent] if parent is not None else None
            if above is None or not above.present or above.counts[stripe] > member.counts[stripe]:
                return current
            current = above.host

    def depth(self, stripe: int, host: str) -> int:
        """Edges between the host and the origin, a seed, or a host without a parent."""
        steps = 0
        current = self.members[host].parents[stripe]
        while current is not None:
            steps += 1
            current = self.members[current].parents[stripe] if current else None
        return steps

    def rooted(self, stripe: int, host: str) -> bool:
        """Whether the path from the host up ends at the origin, at a seed or at a host that has
        the whole stripe."""
        current: str | None = host
        for _ in range(len(self.members) + 1):
            if not current or self.members[current].counts[stripe] == self.totals[stripe]:
                return current is not None
            current = self.members[current].parents[stripe]
        raise AssertionError(f"the way up from {host} is a cycle")


def pairs(edges: Edges, stripe: int) -> Iterator[tuple[str, str]]:
    """(child, parent) of every edge of a stripe; the parent may be FROM_ORIGIN."""
    for member in edges.members.values():
        parent = member.parents[stripe]
        if parent is not None:
            yield member.host, parent


def placed(edges: Edges, member: Member) -> None:
    """A member is at another place now."""
    for stripe, children in enumerate(member.children):
        for host in (member.host, *children):
            child = edges.members[host]
            above = edges.members.get(child.parents[stripe] or "")
            edges.importers[stripe].pop(host, None)
            if above is not None and above.site != child.site and SITE_END in child.zone:
                edges.importers[stripe][host] = None


def changes(edges: Edges) -> Iterator[tuple[str, int]]:
    """(host, stripe) of every parent that a host is still to be told."""
    return ((host, stripe) for host, stripes in edges.changed.items() for stripe in stripes)


def only_leaves(members: Mapping[str, Member], stripe: int, member: Member) -> bool:
    """Whether the children of a member forward the stripe to no other host."""
    return not any(members[child].children[stripe] for child in member.children[stripe])
