"""The tail: hosts that are behind when others are done.

Theory. A stripe that fell behind cannot catch up through its own tree, since the inner hosts there
are busy with all their children. Once hosts have the whole of a stripe and few children left to
serve, their uplinks are idle, wholly or in part. Near the end of a swarm the tracker moves late
hosts to them, the one that lacks most first, if it gets a larger part of the uplink there than of
its parent's; what it used to take is left to others. A host with a slow downlink would gain
nothing, and its new parent would first have to find that out; nor would a receiver that yields.
Hosts are not moved for a few pieces, and stay within their rack. Where no host in the rack has the
whole stripe, the late hosts line up (chains.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from p2pdist.model.digest import Digest
from tracker.core.member import Member, yields
from tracker.core.rebalance.chains import PIECES_MIN, due, line_up
from tracker.core.swarm import Swarm


@dataclass(slots=True)
class Tail:
    """Finds swarms with late hosts and moves these."""

    _noted: dict[Digest, None] = field(default_factory=dict)
    """Keys of swarms in which hosts got the last piece of a stripe, or were moved, since the last
    look. `note`, `catch_up`."""

    def note(self, blob: Digest) -> None:
        """A host has got the whole of a stripe."""
        self._noted.setdefault(blob)

    def catch_up(self, swarms: Mapping[Digest, Swarm], *, now: float) -> list[Digest]:
        """Move late hosts; returns the swarms in which some were moved."""
        found = []
        for blob in list(self._noted):
            if blob not in swarms:
                del self._noted[blob]
                continue
            swarm = swarms[blob]
            moved, looks = hand_over(swarm), due(swarm, now=now)
            lined_up = line_up(swarm, now=now) if looks else 0
            if looks and not lined_up:
                del self._noted[blob]
            if moved or lined_up:
                found.append(blob)
        return found


def hand_over(swarm: Swarm) -> int:
    """Move hosts that lack much of a stripe to idler hosts that have all of it; return how many
    moved."""
    moved = 0
    for names in swarm.racks.values():
        members = [swarm.members[name] for name in names]
        # Not the hosts with uplinks that are held to be slow.
        idle = [member for member in members if member.present and swarm.stripes <= member.slots > member.load]
        if idle:
            for stripe in range(swarm.stripes):
                moved += _hand_over(swarm, stripe, members, idle)
    return moved


def _hand_over(swarm: Swarm, stripe: int, members: list[Member], idle: list[Member]) -> int:
    """Move late hosts of one rack in one stripe; return how many moved."""
    total = swarm.totals[stripe]
    whole = [member for member in idle if member.counts[stripe] == total and member.load < member.slots]
    if not whole:
        return 0
    # The best one last. Children with slow downlinks count for nothing in the load, but they do
    # take turns.
    whole.sort(key=lambda each: (each.load, sum(map(len, each.children)), each.order), reverse=True)
    late = [each for each in members if _may_move(swarm, each, stripe)]
    late.sort(key=lambda each: (each.counts[stripe], each.order))
    moved = 0
    for child in late:
        if not whole:
            break
        above, parent = swarm.members[child.parents[stripe] or ""], whole[-1]
        gains = parent.load + 1 < above.load or (not parent.load and above.counts[stripe] < total)
        if not gains:
            continue
        whole.pop()
        if (child.host, parent.host) in swarm.edges.avoided or swarm.edges.receives_through(
            stripe, parent.host, child.host
        ):
            continue
        swarm.edges.move(stripe, child, parent)
        moved += 1
    return moved


def _may_move(swarm: Swarm, member: Member, stripe: int) -> bool:
    """Whether a host lacks much and does not yet have a source to itself that has everything."""
    parent = member.parents[stripe]
    if (
        not member.present
        or member.slow_receiver
        or yields(member)
        or not parent
        or swarm.totals[stripe] - member.counts[stripe] < PIECES_MIN
    ):
        return False
    above = swarm.members[parent]
    return above.counts[stripe] < swarm.totals[stripe] or above.load > 1
