"""A view of the tree of one stripe: how much each host has of it, and its parent.

A host that has the whole stripe has no parent any more. The one that it had last is shown all the
same, so that the tree is still there when the stripe has arrived. Costs time in proportion to the
swarm's members per update.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from tracker.core.member import FROM_ORIGIN
from tracker.core.swarm import Swarm

ORIGIN = -1
NO_PARENT = -2
"""In place of a parent's number."""

ABSENT = -1
"""In place of the share of a host that is in the swarm no more."""

Row = tuple[int, int, int]
"""A host's number, how much it has of the stripe in thousandths, and its parent's number."""


class TreeRows(Protocol):
    """A view of a tree, as far as those who watch it are concerned."""

    def since(self, version: int) -> list[Row]:
        """Rows that changed after a version."""


@dataclass(slots=True)
class TreeView:
    """Rows by host, each with the version in which it changed last. `number` gives a host's number,
    None for one that is not shown."""

    stripe: int
    number: Callable[[str], int | None]
    _rows: dict[str, tuple[int, Row]] = field(default_factory=dict)

    def update(self, swarm: Swarm | None, version: int) -> None:
        """Read the swarm. None counts as a swarm without members, and so does one that is cut
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
            before = self._rows.get(host)
            number = before[1][0] if before is not None else self.number(host)
            if number is None:
                continue
            parent = member.parents[stripe]
            if parent == FROM_ORIGIN:
                above = ORIGIN
            elif parent is not None:
                parent_number = self._rows[parent][1][0] if parent in self._rows else self.number(parent)
                above = parent_number if parent_number is not None else NO_PARENT
            else:
                whole = member.counts[stripe] >= total
                above = before[1][2] if before is not None and whole else NO_PARENT
            row = (number, _thousandths(member.counts[stripe], total), above)
            if before is None or before[1] != row:
                self._rows[host] = (version, row)

    def since(self, version: int) -> list[Row]:
        """Rows that changed after a version. Rows of hosts that are gone are left out at first."""
        return [row for changed, row in self._rows.values() if changed > version and (version or row[1] != ABSENT)]


def _thousandths(part: int, whole: int) -> int:
    """Rounded down, so that only the whole is 1000."""
    return 1000 * part // whole if whole else 1000
