"""The tree of one stripe, for those who watch it: how much each host has of it, and from whom it
has it.

A host that has the whole stripe has no parent any more. The one that it had last is shown all the
same, so that the tree is still there when the stripe has arrived. Costs time in proportion to the
swarm's members per update.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from tracker.core.member import FROM_ORIGIN
from tracker.core.swarm import Swarm

ORIGIN = -1
NOBODY = -2
"""What stands in a row where a parent's number is expected."""

ABSENT = -1
"""What stands in a row for the share of a host that is in the swarm no more."""

Row = tuple[int, int, int]
"""A host's number, how much it has of the stripe in thousandths, and its parent's number."""


@dataclass(slots=True)
class TreeView:
    """Rows by host, each with the version in which it changed last. `number` gives a host's number,
    None for one that is not shown."""

    stripe: int
    number: Callable[[str], int | None]
    _rows: dict[str, tuple[int, Row]] = field(default_factory=dict)

    def update(self, swarm: Swarm | None, version: int) -> None:
        """Take in how things are now; no swarm is one without members, and so is one that is cut
        otherwise since and lacks this stripe."""
        if swarm is not None and self.stripe >= swarm.stripes:
            swarm = None
        members = swarm.members if swarm is not None else {}
        for host in [host for host in self._rows if host not in members]:
            row = self._rows[host][1]
            if row[1] != ABSENT:
                self._rows[host] = (version, (row[0], ABSENT, row[2]))
        if swarm is None:
            return
        stripe, total = self.stripe, swarm.totals[self.stripe]
        for host, member in members.items():
            known = self._rows.get(host)
            number = known[1][0] if known is not None else self.number(host)
            if number is None:
                continue
            parent = member.parents[stripe]
            if parent == FROM_ORIGIN:
                above = ORIGIN
            elif parent is not None:
                found = self._rows[parent][1][0] if parent in self._rows else self.number(parent)
                above = found if found is not None else NOBODY
            else:
                whole = member.counts[stripe] >= total
                above = known[1][2] if known is not None and whole else NOBODY
            row = (number, _thousandths(member.counts[stripe], total), above)
            if known is None or known[1] != row:
                self._rows[host] = (version, row)

    def since(self, version: int) -> list[Row]:
        """Rows that changed after a version; those of hosts that are gone only if they were told
        before."""
        return [row for changed, row in self._rows.values() if changed > version and (version or row[1] != ABSENT)]


def _thousandths(part: int, whole: int) -> int:
    """Rounded down, so that only the whole is 1000."""
    return 1000 * part // whole if whole else 1000
