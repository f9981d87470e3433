"""A view of the fleet of several trackers, made of what each of them tells its watchers.

Theory. Each tracker has a view of its own hosts and swarms (fleet_view.py) and tells what changed
in it. This view takes such changes in, those of its own tracker too, and tells its watchers what
changed in the whole, in the same words. A host has its home at one tracker and is a guest at the
others that own something of what it holds or fetches; here it is one row. It is away when no
tracker sees it, receives when one of them says so, and is as far as the blob that lacks most.

Nothing here grows with the fleet: a tracker tells of HOSTS_SHOWN_MAX hosts and SWARMS_SHOWN_MAX
swarms, TRACKERS_MAX trackers are listed, and the rows are HOSTS_SHOWN_MAX in all. Totals count all
hosts, and of the others what the rows show.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from heapq import nsmallest
from itertools import islice

from tracker.core.views.fleet_view import (
    AWAY,
    BLAMED,
    FORGOTTEN_MAX,
    HOSTS_SHOWN_MAX,
    RECEIVING,
    SHUNNED,
    SLOW,
    STORY_MAX,
    SWARMS_SHOWN_MAX,
    TROUBLED_SHOWN_MAX,
    Change,
    HostRow,
    StoryLine,
    SwarmRow,
    Totals,
    View,
)
from tracker.core.views.tree_view import ABSENT, NO_PARENT, Row, TreeRows, TreeView

OWN = ""
"""Names the part of this tracker itself."""


@dataclass(slots=True)
class _Told:
    """A host as one tracker tells of it."""

    name: str
    zone: str
    rack: str
    done: int = 1000
    flags: int = 0


@dataclass(slots=True)
class _Part:
    """What one tracker has told."""

    hosts: dict[int, _Told] = field(default_factory=dict)
    """Its hosts by the numbers that it gives them."""
    totals: Totals | None = None
    swarms: list[SwarmRow] = field(default_factory=list)
    troubled: list[tuple[int, str]] = field(default_factory=list)
    lines: int = 0
    """The last line of its story that was taken in."""


@dataclass(slots=True)
class JoinedView:
    """The rows of all trackers' hosts and swarms by version, and the changes since a version."""

    own: View
    version: int = 0
    _own_version: int = 0
    _parts: dict[str, _Part] = field(default_factory=dict)
    """By tracker what it has told. `take`, `lose`."""
    _silent: dict[str, str] = field(default_factory=dict)
    """Trackers that tell nothing now, and why. `take`, `lose`."""
    _rows: dict[str, HostRow] = field(default_factory=dict)
    """Rows by host name."""
    _seen: dict[str, dict[str, int]] = field(default_factory=dict)
    """By host name the trackers that tell of it, and its number there."""
    _touched: dict[str, None] = field(default_factory=dict)
    """Hosts of which something was told since the last update."""
    _numbers: int = 0
    _forgotten: deque[tuple[int, int]] = field(default_factory=lambda: deque(maxlen=FORGOTTEN_MAX))
    _story: deque[tuple[int, int, float, str, str]] = field(default_factory=lambda: deque(maxlen=STORY_MAX))
    _lines: int = 0

    def update(self, *, now: float) -> None:
        """Take in what changed at this tracker, and join what the others have told; begins a new
        version."""
        self.own.update(now=now)
        self.take(OWN, self.own.since(self._own_version, now=now), now=now)
        self._own_version = self.own.version
        self.version += 1
        touched, self._touched = self._touched, {}
        for name in touched:
            self._join(name)

    def take(self, tracker: str, change: Change, *, now: float) -> None:
        """A tracker tells what changed there."""
        self._silent.pop(tracker, None)
        part = self._parts.setdefault(tracker, _Part())
        if change.whole:
            for number in list(part.hosts):
                self._forget(tracker, part, number)
            part.lines = 0
        for number in change.forgotten:
            self._forget(tracker, part, number)
        for number, name, zone, rack in change.hosts:
            self._hear(tracker, part, number, _Told(name, zone, rack))
        for number, done, flags in change.states:
            if (told := part.hosts.get(number)) is not None:
                told.done, told.flags = done, flags
                self._touched[told.name] = None
        part.totals, part.swarms, part.troubled = change.totals, change.swarms, change.troubled
        for line in change.story:
            if line.number > part.lines:
                part.lines = line.number
                self._lines += 1
                self._story.append((self.version + 1, self._lines, now - line.age_s, line.swarm, line.event))

    def lose(self, tracker: str, why: str) -> None:
        """A tracker tells nothing any more, or did not begin to."""
        part = self._parts.pop(tracker, None)
        for number in list(part.hosts) if part is not None else ():
            assert part is not None
            self._forget(tracker, part, number)
        self._silent[tracker] = why

    def keep(self, trackers: Iterable[str]) -> None:
        """The other trackers are these: nothing is said of any other."""
        listed = {OWN, *trackers}
        for name in [name for name in (self._parts | self._silent) if name not in listed]:
            self.lose(name, "")
            del self._silent[name]

    def number(self, tracker: str, number: int) -> int | None:
        """The number here of the host to which a tracker gives a number."""
        part = self._parts.get(tracker)
        told = part.hosts.get(number) if part is not None else None
        row = self._rows.get(told.name) if told is not None else None
        return row.number if row is not None else None

    def tree(self, stripe: int) -> TreeView:
        """A view of a stripe's tree, of a swarm of this tracker, with the numbers that hosts have
        here."""
        return self.own.tree(stripe, lambda name: self._rows[name].number if name in self._rows else None)

    def since(self, version: int, *, now: float, tree: TreeRows | None = None) -> Change:
        """What changed after a version; everything when more hosts were forgotten since than are
        remembered."""
        if version and len(self._forgotten) == FORGOTTEN_MAX and self._forgotten[0][0] > version:
            version = 0
        rows = self._rows.values()
        return Change(
            self.version,
            not version,
            self._totals(),
            self._swarms(),
            [(row.number, row.name, row.zone, row.rack) for row in rows if row.named > version],
            [(row.number, row.done, row.flags) for row in rows if row.changed > version],
            [number for forgotten_in, number in self._forgotten if forgotten_in > version] if version else [],
            self._troubled(),
            [
                StoryLine(number, round(now - moment, 3), swarm, text)
                for line_version, number, moment, swarm, text in self._story
                if line_version > version
            ],
            tree.since(version) if tree is not None else [],
            sorted(self._silent.items()),
        )

    # -- hosts

    def _hear(self, tracker: str, part: _Part, number: int, told: _Told) -> None:
        before = part.hosts.get(number)
        if before is None and len(part.hosts) >= HOSTS_SHOWN_MAX:
            return
        if before is not None:
            told.done, told.flags = before.done, before.flags
            if before.name != told.name:
                self._forget(tracker, part, number)
        part.hosts[number] = told
        self._seen.setdefault(told.name, {})[tracker] = number
        self._touched[told.name] = None

    def _forget(self, tracker: str, part: _Part, number: int) -> None:
        told = part.hosts.pop(number, None)
        if told is None:
            return
        seen = self._seen.get(told.name, {})
        if seen.get(tracker) == number:
            del seen[tracker]
        if not seen:
            self._seen.pop(told.name, None)
        self._touched[told.name] = None

    def _join(self, name: str) -> None:
        """Bring a host's row up to what all trackers tell of it."""
        told = [self._parts[tracker].hosts[number] for tracker, number in self._seen.get(name, {}).items()]
        row = self._rows.get(name)
        if not told:
            if row is not None:
                del self._rows[name]
                self._forgotten.append((self.version, row.number))
            return
        # A tracker that sees it knows better where it is than one that does not.
        told.sort(key=lambda each: bool(each.flags & AWAY))
        zone, rack = told[0].zone, told[0].rack
        if row is None:
            if len(self._rows) >= HOSTS_SHOWN_MAX:
                return
            self._numbers += 1
            row = self._rows[name] = HostRow(self._numbers, name, zone, rack, self.version, self.version)
        if (row.zone, row.rack) != (zone, rack):
            row.zone, row.rack, row.named = zone, rack, self.version
        flags = told[0].flags & AWAY
        for each in told:
            flags |= each.flags & ~AWAY
        done = min((each.done for each in told if each.flags & RECEIVING), default=1000)
        if (flags, done) != (row.flags, row.done):
            row.flags, row.done, row.changed = flags, done, self.version

    # -- the whole

    def _swarms(self) -> list[SwarmRow]:
        """Swarms with receivers, the largest first, then the largest of the others; one that goes
        from one tracker to another as the tracker has it that knows more hosts."""
        swarms: dict[str, SwarmRow] = {}
        for part in self._parts.values():
            for row in part.swarms:
                if row.digest not in swarms or swarms[row.digest].hosts < row.hosts:
                    swarms[row.digest] = row
        return nsmallest(SWARMS_SHOWN_MAX, swarms.values(), key=_rank)

    def _troubled(self) -> list[tuple[int, str]]:
        """The hosts in trouble, each once; one that is away only where it was a guest is not."""
        whys: dict[int, dict[str, None]] = {}
        for part in self._parts.values():
            for number, why in part.troubled:
                told = part.hosts.get(number)
                row = self._rows.get(told.name) if told is not None else None
                if told is not None and row is not None and (row.flags & AWAY or not told.flags & AWAY):
                    whys.setdefault(row.number, {})[why] = None
        return [(number, "; ".join(why)) for number, why in islice(whys.items(), TROUBLED_SHOWN_MAX)]

    def _totals(self) -> Totals:
        parts = [part.totals for part in self._parts.values() if part.totals is not None]
        flags = Counter(row.flags for row in self._rows.values())

        def having(flag: int) -> int:
            return sum(count for combination, count in flags.items() if combination & flag)

        return Totals(
            max(len(self._rows), sum(each.hosts - each.guests for each in parts)),
            having(AWAY),
            having(RECEIVING),
            having(SLOW),
            having(BLAMED),
            having(SHUNNED),
            sum(each.swarms for each in parts),
            sum(each.running for each in parts),
            sum(each.stalled for each in parts),
            sum(each.origin_leases for each in parts),
            sum(each.rate_bytes_s for each in parts),
        )


def _rank(row: SwarmRow) -> tuple[int, int, str]:
    receivers = row.hosts - row.complete
    return -bool(receivers), -(receivers or row.hosts), row.digest


@dataclass(slots=True)
class RelayedTree:
    """A stripe's tree as the tracker tells of it that owns the blob, with the numbers that hosts
    have here."""

    view: JoinedView
    tracker: str = ""
    """The tracker that tells. `begin`."""
    _nodes: dict[int, tuple[int, int]] = field(default_factory=dict)
    """By the tracker's number of a host, how much it has, and the tracker's number of its
    parent."""
    _rows: dict[int, tuple[int, Row]] = field(default_factory=dict)
    """By the number of a host here the version in which its row changed, and the row."""

    def begin(self, tracker: str) -> None:
        """This tracker tells from now on."""
        self.tracker = tracker
        self._nodes.clear()

    def take(self, change: Change) -> None:
        """The tracker tells what changed in the tree."""
        if change.whole:
            self._nodes.clear()
        for number, done, parent in change.tree:
            if done == ABSENT:
                self._nodes.pop(number, None)
            elif number in self._nodes or len(self._nodes) < HOSTS_SHOWN_MAX:
                self._nodes[number] = done, parent

    def end(self) -> None:
        """The tracker tells nothing any more."""
        self._nodes.clear()

    def update(self, version: int) -> None:
        """Bring the rows up to what the tracker has told, in a new version."""
        rows: dict[int, Row] = {}
        for number, (done, parent) in self._nodes.items():
            here = self.view.number(self.tracker, number)
            above = parent if parent < 0 else self.view.number(self.tracker, parent)
            if here is not None:
                rows[here] = here, done, NO_PARENT if above is None else above
        for here, (_, row) in self._rows.items():
            rows.setdefault(here, (here, ABSENT, row[2]))
        for here, row in rows.items():
            if here not in self._rows or self._rows[here][1] != row:
                self._rows[here] = version, row

    def since(self, version: int) -> list[Row]:
        """Rows that changed after a version. Rows of hosts that are gone are left out at first."""
        return [row for changed, row in self._rows.values() if changed > version and (version or row[1] != ABSENT)]
