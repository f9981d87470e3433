"""Affinity: which hosts lack the fewest bytes of what a job needs.

Theory. Swarms know what each host holds: an agent reports all its complete blobs when it connects
(`Holding`) and its progress with the others (`Report`). The bytes that a host lacks of some
packages are the sizes of their blobs, each counted once however many packages share it, less what
the host last reported of them. A partial blob counts by its pieces (`Swarm.bytes_held`).

Packs are means to make trees. Once a tree is in a store whole its packs are redundant: they may go,
and are not fetched for a later version either, which takes their contents from the objects in the
store. Each host reports its redundant packs when it connects and when they change (`Spares`); they
count as held until its session ends.

The time that the missing bytes take is estimated from the rate that the host has shown
(capacity.py), or a typical one where it has shown none, or RATE_ASSUMED_BYTES_S while no host has.

Invariant: 0 <= bytes missing <= bytes in all, and 0 exactly when every blob that is not empty is
complete or redundant."""

from __future__ import annotations

import heapq
from bisect import bisect_left
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import repeat
from operator import sub

from p2pdist.model.digest import Digest
from p2pdist.model.errors import Conflict
from p2pdist.model.fleet import Ranked
from p2pdist.model.messages import Spares
from tracker.core.capacity import Capacities
from tracker.core.host import Host
from tracker.core.swarm import Swarm

PER_HOST_MAX = 4000
"""Redundant packs that are noted of one host."""


@dataclass(slots=True)
class RedundantPacks:
    """Packs that hosts need not fetch, as they reported."""

    hosts: dict[Digest, dict[str, None]] = field(default_factory=dict)
    """The hosts by pack, each with at least one."""

    _blobs: dict[str, dict[Digest, None]] = field(default_factory=dict)
    """The packs by host, up to PER_HOST_MAX."""

    def note(self, host: str, spares: Spares) -> None:
        """Note a host's report; packs over PER_HOST_MAX are not noted, and count as missing."""
        if not spares.more:
            self.forget(host)
        blobs = self._blobs.setdefault(host, {})
        for blob in spares.blobs[: PER_HOST_MAX - len(blobs)]:
            blobs[blob] = None
            self.hosts.setdefault(blob, {})[host] = None

    def forget(self, host: str) -> None:
        """Drop the packs of a host that has gone, or reports all of them anew."""
        for blob in self._blobs.pop(host, {}):
            hosts = self.hosts[blob]
            del hosts[host]
            if not hosts:
                del self.hosts[blob]


RATE_ASSUMED_BYTES_S = 125e6
"""1 Gbit/s, while no host has shown another rate."""

Parts = Mapping[Digest, int]
"""The blobs that are needed, with their sizes in bytes."""


@dataclass(frozen=True, slots=True)
class RoleNeed:
    """A role: its name, what its hosts need, and how many of them there shall be."""

    name: str
    parts: Parts
    count: int


@dataclass(slots=True)
class Affinity:
    """Ranks the fleet's hosts; shares its hosts, swarms and capacities, and changes none of them.
    `redundant`: the hosts that need not fetch a pack, by pack."""

    hosts: Mapping[str, Host]
    swarms: Mapping[Digest, Swarm]
    capacities: Capacities
    redundant: Mapping[Digest, Collection[str]] = field(default_factory=dict)
    elsewhere: Mapping[Digest, Mapping[str, int]] = field(default_factory=dict)
    """The bytes that hosts hold of blobs whose swarms other trackers plan."""

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
        """The bytes of a blob that each host holds or need not fetch; None where no host does."""
        swarm, hosts = self.swarms.get(digest), self.redundant.get(digest)
        # Agents may be wrong about a size, the manifest that named the blob is not.
        held = swarm.bytes_held if swarm is not None and swarm.layout.size == size else self.elsewhere.get(digest)
        if not hosts:
            return held
        return {**(held or {}), **dict.fromkeys(hosts, size)}

    def rank(self, parts: Parts, names: Collection[str]) -> list[Ranked]:
        """The hosts in order: present hosts first, then by bytes missing, by the time that these
        take, and by name."""
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
        racks, with few bytes missing: first whole racks, in the order of their bytes missing per
        host, as long as the rest still fits the racks that are left; then the best hosts of the
        rack that needs the fewest."""
        racks: dict[tuple[str, str], list[Ranked]] = {}
        for entry in ranked:
            racks.setdefault(self._rack(entry.host), []).append(entry)
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
        """Distinct hosts for each role, in the order of their bytes missing; of equal hosts first
        the one that would be worse in the other roles. Greedy: it may miss the least sum. Raises
        Conflict when there are too few hosts."""
        needed = sum(role.count for role in roles)
        if needed > len(names):
            raise Conflict(
                f"{needed} hosts are asked for and {len(names)} may be chosen",
                remedy="Ask for fewer, or select more hosts",
            )
        missing = [self.missing(role.parts, names) for role in roles]
        pairs: list[tuple[int, int, str, int]] = []
        for name, lacking in zip(names, zip(*(row.values() for row in missing), strict=True), strict=True):
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
            role.name: self.rank(role.parts, [name for name, role_number in taken.items() if role_number == number])
            for number, role in enumerate(roles)
        }

    def pick(self, parts: Parts, names: Iterable[str], count: int, taken: Iterable[str] = ()) -> list[str]:
        """Up to `count` hosts, in the order of their bytes missing; of equal hosts one from each
        rack in turn, beginning with the racks that have the fewest of `taken`."""
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
            queue = [(load[rack], rack) for rack in racks]
            heapq.heapify(queue)
            while queue:
                if len(chosen) == count:
                    return chosen
                _, rack = heapq.heappop(queue)
                chosen.append(racks[rack].pop())
                load[rack] += 1
                if racks[rack]:
                    heapq.heappush(queue, (load[rack], rack))
        return chosen

    def _rack(self, name: str) -> tuple[str, str]:
        host = self.hosts.get(name)
        return (host.zone, host.rack) if host is not None else ("", "")


def _mean(hosts: Sequence[Ranked]) -> float:
    return sum(host.bytes_missing for host in hosts) / max(1, len(hosts))


def _racks_needed(sizes: Sequence[int], count: int) -> int:
    """How many racks `count` hosts take at least; the largest rack is the last."""
    needed = 0
    for size in reversed(sizes):
        if count <= 0:
            break
        count -= size
        needed += 1
    return needed
