"""Affinity: which hosts lack the fewest bytes of what a job needs.

Theory. Swarms know who holds what: every agent says all its complete blobs when it connects (`Holding`) and how far it is with the others
(`Report`). So the bytes that a host lacks of some packages are the sizes of their blobs, each counted once however many packages share it,
less what it said last that it holds; a host that lost content while it was away says so when it connects. A partial blob counts by its
pieces: which of them is the last, shorter one is not known, so each counts as a whole one, and a host that lacks a piece lacks at least a
byte.

The time that the missing bytes take is estimated from the rate that the host has shown (capacity.py), or a typical one where it has
shown none, or RATE_ASSUMED_BYTES_S while no host has.

Invariant: 0 <= bytes missing <= bytes in all, and 0 exactly when every blob that is not empty is complete.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import msgspec

from p2pdist.model.digest import Digest
from p2pdist.model.errors import Conflict
from tracker.core.capacity import Capacities
from tracker.core.host import Host
from tracker.core.member import Member
from tracker.core.swarm import Swarm

RATE_ASSUMED_BYTES_S = 125e6
"""1 Gbit/s, while no host has shown another rate."""

BLOBS_REMEMBERED_MAX = 256
"""What ten thousand hosts hold of one blob takes a tenth of a megabyte."""

Parts = Mapping[Digest, int]
"""The blobs that are needed, with their sizes in bytes."""


class Ranked(msgspec.Struct, frozen=True, gc=False):
    """A host and what it lacks. `present`: its agent is connected. A struct, because ten thousand dataclasses take a quarter of the time of
    an answer to make."""

    host: str
    bytes_missing: int
    bytes_total: int
    seconds_estimated: float
    present: bool = True


@dataclass(frozen=True, slots=True)
class Wanted:
    """A role: its name, what its hosts need, and how many of them there shall be."""

    name: str
    parts: Parts
    count: int


@dataclass(slots=True)
class Affinity:
    """Shares the fleet's hosts, swarms and capacities, and changes none of them."""

    hosts: Mapping[str, Host]
    swarms: Mapping[Digest, Swarm]
    capacities: Capacities
    _order: list[str] = field(default_factory=list)
    _places: dict[str, int] = field(default_factory=dict)
    _remembered: dict[Digest, tuple[object, list[int]]] = field(default_factory=dict)

    def missing(self, parts: Parts, names: Collection[str]) -> dict[str, int]:
        """Bytes that each host lacks."""
        total = sum(parts.values())
        order = list(self.hosts)
        if order != self._order:
            self._order = order
            self._places = {name: place for place, name in enumerate(order)}
            self._remembered.clear()
        swarms = [(swarm, size) for digest, size in parts.items() if (swarm := self.swarms.get(digest)) is not None]
        left = dict.fromkeys(names, total)
        if swarms and left.keys() >= self.hosts.keys():
            columns = [self._column(swarm, size) for swarm, size in swarms]
            left.update(zip(self._order, (total - sum(row) for row in zip(*columns, strict=True)), strict=True))
            return left
        for swarm, size in swarms:
            for name in left if len(left) < len(swarm.members) else left.keys() & swarm.members.keys():
                if (member := swarm.members.get(name)) is not None:
                    left[name] -= _held(swarm, size, member)
        return left

    def _column(self, swarm: Swarm, size: int) -> list[int]:
        """What each host of the fleet holds of a blob, in the fleet's order. Remembered as long as the swarm stays as it is, which its
        clock, its numbers and its story show: of thousands of packages few move at a time."""
        story = swarm.story[-1] if swarm.story else None
        mark = (size, swarm.now, len(swarm.members), swarm.receivers, story)
        known = self._remembered.pop(swarm.blob, None)
        if known is None or known[0] != mark:
            column = [0] * len(self._order)
            for name, member in swarm.members.items():
                column[self._places[name]] = size if member.seed else _held(swarm, size, member)
            known = mark, column
        self._remembered[swarm.blob] = known
        if len(self._remembered) > BLOBS_REMEMBERED_MAX:
            del self._remembered[next(iter(self._remembered))]
        return known[1]

    def rank(self, parts: Parts, names: Collection[str]) -> list[Ranked]:
        """The hosts, best first: those that are present, that lack the fewest bytes, that will have them soonest; then by name."""
        missing, total = self.missing(parts, names), sum(parts.values())
        usual = self.capacities.typical() or RATE_ASSUMED_BYTES_S
        rate, hosts = self.capacities.rate, self.hosts
        present: list[tuple[int, float, str]] = []
        away: list[tuple[int, float, str]] = []
        for name, lacking in missing.items():
            host = hosts.get(name)
            seconds = lacking / (rate(name) or usual) if lacking else 0.0
            (away if host is None or host.session is None else present).append((lacking, seconds, name))
        present.sort()
        away.sort()
        return [
            *(Ranked(name, lacking, total, seconds) for lacking, seconds, name in present),
            *(Ranked(name, lacking, total, seconds, False) for lacking, seconds, name in away),
        ]

    def coherent(self, ranked: Sequence[Ranked], count: int) -> list[Ranked]:
        """`count` of the hosts in as few racks as that many need and, among the choices of so few racks, with few bytes missing: whole
        racks, those with the fewest bytes missing per host first as long as the rest still fits the racks that are left, then the best
        hosts of the one that needs the fewest."""
        racks: dict[tuple[str, str], list[Ranked]] = {}
        for each in ranked:
            host = self.hosts.get(each.host)
            racks.setdefault((host.zone, host.rack) if host is not None else ("", ""), []).append(each)
        order = sorted(racks, key=lambda rack: (_mean(racks[rack]), rack))
        sizes = sorted(map(len, racks.values()))
        count = min(count, len(ranked))
        chosen: list[Ranked] = []
        left = _racks_needed(sizes, count)
        most = sum(sizes[-left:]) if left else 0  # that the racks which are left can hold
        while left > 1:
            lacking, smallest = count - len(chosen), sizes[-left]
            best = next(rack for rack in order if most - smallest + min(len(racks[rack]), smallest) >= lacking)
            size = len(racks[best])
            most -= max(size, smallest)
            sizes.pop(bisect_left(sizes, size))
            order.remove(best)
            chosen += racks[best]
            left -= 1
        if left:
            lacking = count - len(chosen)
            fitting = [rack for rack in order if len(racks[rack]) >= lacking]
            chosen += racks[min(fitting, key=lambda rack: (_mean(racks[rack][:lacking]), len(racks[rack]), rack))][
                :lacking
            ]
        return chosen

    def assign(self, roles: Sequence[Wanted], names: Collection[str]) -> dict[str, list[Ranked]]:
        """Distinct hosts for each role, those with the fewest bytes missing first, and of equal ones those that would be worse in the
        other roles. Greedy: it may miss the least sum. Raises Conflict when there are too few hosts."""
        wanted = sum(role.count for role in roles)
        if wanted > len(names):
            raise Conflict(
                f"{wanted} hosts are asked for and {len(names)} may be chosen",
                remedy="Ask for fewer, or select more hosts",
            )
        ranked = {role.name: {each.host: each for each in self.rank(role.parts, names)} for role in roles}
        pairs: list[tuple[int, int, str, str]] = []
        for name in names:
            lacking = {role: hosts[name].bytes_missing for role, hosts in ranked.items()}
            lowest = heapq.nsmallest(2, lacking.values())
            for role, bytes_missing in lacking.items():
                other = lowest[-1] if bytes_missing == lowest[0] else lowest[0]
                pairs.append((bytes_missing, -other, name, role))
        pairs.sort()
        open_seats = {role.name: role.count for role in roles}
        taken: set[str] = set()
        found: dict[str, list[Ranked]] = {role.name: [] for role in roles}
        for _, _, name, role in pairs:
            if open_seats[role] and name not in taken:
                open_seats[role] -= 1
                taken.add(name)
                found[role].append(ranked[role][name])
        return found

    def pick(self, parts: Parts, names: Iterable[str], count: int, taken: Iterable[str] = ()) -> list[str]:
        """Up to `count` hosts: the fewest bytes missing first; of those that lack the same, one from each rack in turn, beginning with the
        racks where the fewest of `taken` stand."""
        if count <= 0:
            return []
        missing = self.missing(parts, list(names))
        load = Counter(self._rack(name) for name in taken)
        chosen: list[str] = []
        groups: dict[int, list[str]] = {}
        for name in sorted(missing):
            groups.setdefault(missing[name], []).append(name)
        for _, group in sorted(groups.items()):
            racks: dict[tuple[str, str], list[str]] = {}
            for name in reversed(group):
                racks.setdefault(self._rack(name), []).append(name)
            turns = [(load[rack], rack) for rack in racks]
            heapq.heapify(turns)
            while turns:
                if len(chosen) == count:
                    return chosen
                _, rack = heapq.heappop(turns)
                chosen.append(racks[rack].pop())
                load[rack] += 1
                if racks[rack]:
                    heapq.heappush(turns, (load[rack], rack))
        return chosen

    def _rack(self, name: str) -> tuple[str, str]:
        host = self.hosts.get(name)
        return (host.zone, host.rack) if host is not None else ("", "")


def _held(swarm: Swarm, size: int, member: Member) -> int:
    """Bytes that a host holds of a blob."""
    return size if member.seed else max(0, min(size - 1, sum(member.counts) * swarm.layout.piece_size))


def _mean(hosts: Sequence[Ranked]) -> float:
    return sum(each.bytes_missing for each in hosts) / max(1, len(hosts))


def _racks_needed(sizes: Sequence[int], count: int) -> int:
    """How many racks `count` hosts take at least; the largest rack is the last."""
    needed = 0
    for size in reversed(sizes):
        if count <= 0:
            break
        count -= size
        needed += 1
    return needed
