"""Affinity: which hosts lack the fewest bytes of what a job needs.

Theory. Swarms know who holds what: every agent says all its complete blobs when it connects
(`Holding`) and how far it is with the others (`Report`). So the bytes that a host lacks of some
packages are the sizes of their blobs, each counted once however many packages share it, less what
it said last that it holds; a host that lost content while it was away says so when it connects. A
partial blob counts by its pieces (`Swarm.bytes_held`).

Packs are means to make trees. Once a tree is here whole its packs may go, and are not fetched again
for a later version either, which takes what it needs of them from the objects here. Hosts say which
packs these are (`spares`, see spares.py); they count as held.

The time that the missing bytes take is estimated from the rate that the host has shown
(capacity.py), or a typical one where it has shown none, or RATE_ASSUMED_BYTES_S while no host has.

Invariant: 0 <= bytes missing <= bytes in all, and 0 exactly when every blob that is not empty is
complete.

Blobs that hosts hold no more and need not fetch: packs whose contents stand in trees that are
there whole.

Each host says which they are when it connects, and again when they change (`Spares`). What it said
ends with its session.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import repeat
from operator import sub

import msgspec

from p2pdist.model.digest import Digest
from p2pdist.model.errors import Conflict
from p2pdist.model.messages import Spares
from tracker.core.capacity import Capacities
from tracker.core.host import Host
from tracker.core.swarm import Swarm

PER_HOST_MAX = 4000


@dataclass(slots=True)
class RedundantPacks:
    """`hosts`: for each blob, the hosts that need not fetch it; none stands there without one."""

    hosts: dict[Digest, dict[str, None]] = field(default_factory=dict)
    _blobs: dict[str, dict[Digest, None]] = field(default_factory=dict)

    def note(self, host: str, spares: Spares) -> None:
        """Take a host's word; what exceeds PER_HOST_MAX is not noted, and counts as missing."""
        if not spares.more:
            self.forget(host)
        blobs = self._blobs.setdefault(host, {})
        for blob in spares.blobs[: PER_HOST_MAX - len(blobs)]:
            blobs[blob] = None
            self.hosts.setdefault(blob, {})[host] = None

    def forget(self, host: str) -> None:
        """The host has gone, or is about to say everything anew."""
        for blob in self._blobs.pop(host, {}):
            hosts = self.hosts[blob]
            del hosts[host]
            if not hosts:
                del self.hosts[blob]


RATE_ASSUMED_BYTES_S = 125e6
"""1 Gbit/s, while no host has shown another rate."""

Parts = Mapping[Digest, int]
"""The blobs that are needed, with their sizes in bytes."""


class Ranked(msgspec.Struct, frozen=True, gc=False):
    """A host and what it lacks. `present`: its agent is connected and not about to end. A struct,
    because ten thousand dataclasses take a quarter of the time of an answer to make."""

    host: str
    bytes_missing: int
    bytes_total: int
    seconds_estimated: float
    present: bool = True


class RoleHosts(msgspec.Struct, frozen=True):
    """The hosts that a role of a job gets."""

    role: str
    hosts: list[Ranked]


class Assignment(msgspec.Struct, frozen=True):
    """The hosts of all roles of a job, and the bytes that all of these together lack."""

    assignment: list[RoleHosts]
    bytes_missing: int


@dataclass(frozen=True, slots=True)
class RoleNeed:
    """A role: its name, what its hosts need, and how many of them there shall be."""

    name: str
    parts: Parts
    count: int


@dataclass(slots=True)
class Affinity:
    """Shares the fleet's hosts, swarms and capacities, and changes none of them. `spares`: hosts
    that need not fetch a blob, by blob."""

    hosts: Mapping[str, Host]
    swarms: Mapping[Digest, Swarm]
    capacities: Capacities
    redundant: Mapping[Digest, Collection[str]] = field(default_factory=dict)

    def missing(self, parts: Parts, names: Collection[str]) -> dict[str, int]:
        """Bytes that each host lacks. Costs a lookup for each host and blob, all of them in loops
        of the interpreter's own."""
        total = sum(parts.values())
        known = [held for digest, size in parts.items() if (held := self._held(digest, size)) is not None]
        if not known:
            return dict.fromkeys(names, total)
        rows = zip(*(map(held.get, names, repeat(0)) for held in known), strict=True)
        return dict(zip(names, map(sub, repeat(total), map(sum, rows)), strict=False))

    def _held(self, digest: Digest, size: int) -> Mapping[str, int] | None:
        """What each host holds of a blob, or need not fetch of it; None when there is none that
        does."""
        swarm, hosts = self.swarms.get(digest), self.redundant.get(digest)
        # Agents may be wrong about a size, the manifest that named the blob is not.
        held = swarm.bytes_held if swarm is not None and swarm.layout.size == size else None
        if not hosts:
            return held
        return {**(held or {}), **dict.fromkeys(hosts, size)}

    def rank(self, parts: Parts, names: Collection[str]) -> list[Ranked]:
        """The hosts, best first: those that are present, that lack the fewest bytes, that will have
        them soonest; then by name."""
        missing, total = self.missing(parts, names), sum(parts.values())
        usual = self.capacities.typical() or RATE_ASSUMED_BYTES_S
        rate, hosts = self.capacities.rate, self.hosts
        present: list[tuple[int, float, str]] = []
        away: list[tuple[int, float, str]] = []
        for name, lacking in missing.items():
            host = hosts.get(name)
            seconds = lacking / (rate(name) or usual) if lacking else 0.0
            (away if host is None or not host.available else present).append((lacking, seconds, name))
        present.sort()
        away.sort()
        return [
            *(Ranked(name, lacking, total, seconds) for lacking, seconds, name in present),
            *(Ranked(name, lacking, total, seconds, False) for lacking, seconds, name in away),
        ]

    def coherent(self, ranked: Sequence[Ranked], count: int) -> list[Ranked]:
        """`count` of the hosts in as few racks as that many need and, among the choices of so few
        racks, with few bytes missing: whole racks, those with the fewest bytes missing per host
        first as long as the rest still fits the racks that are left, then the best hosts of the one
        that needs the fewest."""
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

    def assign(self, roles: Sequence[RoleNeed], names: Collection[str]) -> dict[str, list[Ranked]]:
        """Distinct hosts for each role, those with the fewest bytes missing first, and of equal
        ones those that would be worse in the other roles. Greedy: it may miss the least sum. Raises
        Conflict when there are too few hosts."""
        wanted = sum(role.count for role in roles)
        if wanted > len(names):
            raise Conflict(
                f"{wanted} hosts are asked for and {len(names)} may be chosen",
                remedy="Ask for fewer, or select more hosts",
            )
        missing = [self.missing(role.parts, names) for role in roles]
        pairs: list[tuple[int, int, str, int]] = []
        for name, lacking in zip(names, zip(*(each.values() for each in missing), strict=True), strict=True):
            lowest = sorted(lacking)[:2]
            for role, bytes_missing in enumerate(lacking):
                other = lowest[-1] if bytes_missing == lowest[0] else lowest[0]
                pairs.append((bytes_missing, -other, name, role))
        pairs.sort()
        open_slots = [role.count for role in roles]
        taken: dict[str, int] = {}
        for _, _, name, role in pairs:
            if open_slots[role] and name not in taken:
                open_slots[role] -= 1
                taken[name] = role
        return {
            role.name: self.rank(role.parts, [name for name, place in taken.items() if place == number])
            for number, role in enumerate(roles)
        }

    def pick(self, parts: Parts, names: Iterable[str], count: int, taken: Iterable[str] = ()) -> list[str]:
        """Up to `count` hosts: the fewest bytes missing first; of those that lack the same, one
        from each rack in turn, beginning with the racks where the fewest of `taken` stand."""
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
