"""A view of the fleet for its operators: hosts, swarms, hosts in trouble and why, and the latest
events.

Theory. Watchers want to hear only of what changed. So each row carries the version in which it
changed last, and a watcher that knows a version gets the rows with later ones: the view keeps no
state of watchers, and a slow one skips versions. An update goes over all hosts once, a microsecond
or so each; swarms are looked at in turn (rates.py).

The fleet forgets a host some seconds after its session ended. The view keeps it, so that operators
can find it: a lost host as long as the fleet remembers it (Fleet.lost), one that reported that it
leaves for LEFT_S.

The view reads the fleet and changes nothing of it.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from heapq import nsmallest
from itertools import islice

from p2pdist.model.digest import Digest
from p2pdist.model.history import short_name
from tracker.core.fleet import Fleet
from tracker.core.host import Host
from tracker.core.monitor.presence import LOST_S
from tracker.core.swarm import Swarm
from tracker.core.views.rates import SwarmRates, SwarmState
from tracker.core.views.tree_view import Row, TreeRows, TreeView

HOSTS_SHOWN_MAX = 20_000
SWARMS_SHOWN_MAX = 200
TROUBLED_SHOWN_MAX = 200
STORY_MAX = 500
STORY_PER_UPDATE_MAX = 100
FORGOTTEN_MAX = 20_000
GONE_S = LOST_S
LEFT_S = 600.0
BLOBS_COUNTED_MAX = 8
"""Of the blobs that a host is receiving, how many count for how far it is."""

AWAY, RECEIVING, SLOW, BLAMED, SHUNNED, DRAINED = 1, 2, 4, 8, 16, 32
"""Flags of a host."""


@dataclass(slots=True)
class HostRow:
    """One host. `done` is in thousandths of what it is receiving; `named` and `changed` are
    versions."""

    number: int
    name: str
    zone: str
    rack: str
    named: int
    changed: int
    done: int = 1000
    flags: int = 0
    gone_at: float | None = None
    left: bool = False  # it reported that it was about to leave
    guest: bool = False  # it has its home at another tracker


@dataclass(frozen=True, slots=True)
class SwarmRow:
    """One swarm. Bytes and `rate_bytes_s` are of all hosts together. `title` is what the blob is
    of, such as `docker.io/library/debian:12`, as far as that is known; `package` the same for
    people, with 12 digits of the digest where there is no tag, and `manifest` the digest of that
    package. `origin_bytes` is what hosts have read of the origin in the broadcast that runs, None
    without one. `waits`: why some sites wait with what comes over their WAN; empty where none
    does."""

    digest: Digest
    size: int
    stripes: int
    state: SwarmState
    priority: str
    hosts: int
    complete: int
    bytes_held: int
    bytes_wanted: int
    rate_bytes_s: float
    eta_s: float | None
    origin_leases: int
    title: str = ""
    package: str = ""
    manifest: str = ""
    origin_bytes: int | None = None
    waits: str = ""


@dataclass(frozen=True, slots=True)
class Totals:
    """Of the whole fleet, also of what is not shown. `guests` are hosts with their home at another
    tracker."""

    hosts: int
    away: int
    receiving: int
    slow: int
    blamed: int
    shunned: int
    swarms: int
    running: int
    stalled: int
    origin_leases: int
    rate_bytes_s: float
    guests: int = 0


@dataclass(frozen=True, slots=True)
class StoryLine:
    """`age_s` is how long ago it was; `swarm` is empty where it is about no swarm alone."""

    number: int
    age_s: float
    swarm: str
    event: str


@dataclass(frozen=True, slots=True)
class Change:
    """What changed after the version that a watcher knew; when that is 0, everything. `hosts`:
    number, name, zone, rack; `states`: number, thousandths, flags; `forgotten`: numbers;
    `troubled`: number, why; `tree`: rows of tree_view.py; `silent`: trackers whose hosts and swarms
    are not here, and why."""

    version: int
    whole: bool
    totals: Totals
    swarms: list[SwarmRow]
    hosts: list[tuple[int, str, str, str]]
    states: list[tuple[int, int, int]]
    forgotten: list[int]
    troubled: list[tuple[int, str]]
    story: list[StoryLine]
    tree: list[Row]
    silent: list[tuple[str, str]] = field(default_factory=list)


@dataclass(slots=True)
class View:
    """The rows of hosts and swarms by version, and the changes since a version."""

    fleet: Fleet
    rates: SwarmRates = field(init=False)
    version: int = 0
    _rows: dict[str, HostRow] = field(default_factory=dict)
    _numbers: int = 0
    _forgotten: deque[tuple[int, int]] = field(default_factory=lambda: deque(maxlen=FORGOTTEN_MAX))
    _story: deque[tuple[int, int, float, str, str]] = field(default_factory=lambda: deque(maxlen=STORY_MAX))
    _lines: int = 0
    _read_until: float = float("-inf")
    _totals: Totals = field(init=False)
    _swarms: list[SwarmRow] = field(default_factory=list)
    _troubled: list[tuple[int, str]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.rates = SwarmRates(self.fleet.swarms)
        self._totals = self._count([])

    def update(self, *, now: float) -> None:
        """Read the fleet; begins a new version."""
        self.version += 1
        self.rates.look(now=now)
        slow = set(self.fleet.capacities.slow_hosts(now=now))
        for host in self.fleet.hosts.values():
            row = self._rows.get(host.name)
            if row is None:
                if len(self._rows) >= HOSTS_SHOWN_MAX:
                    continue
                row = self._take_in(host)
            self._refresh(row, host, host.name in slow, now)
        for host in self.fleet.lost.values():
            if host.name not in self._rows and len(self._rows) < HOSTS_SHOWN_MAX:
                self._take_in(host)  # it came and went between two updates
        for name in [row.name for row in self._rows.values() if row.name not in self.fleet.hosts]:
            self._gone(self._rows[name], now)
        self._read_stories(now)
        running = [swarm for swarm in self.fleet.swarms.values() if swarm.receivers]
        self._swarms = [self._swarm(swarm) for swarm in self._shown(running)]
        self._totals = self._count(running)
        troubled = (row for row in self._rows.values() if row.flags & ~RECEIVING)
        self._troubled = [
            (row.number, "; ".join(self._reasons(row, self.fleet.hosts.get(row.name), now)))
            for row in islice(troubled, TROUBLED_SHOWN_MAX)
        ]

    def tree(self, stripe: int, number: Callable[[str], int | None] | None = None) -> TreeView:
        """A view of a stripe's tree with the numbers that hosts have here, or that `number`
        gives."""
        return TreeView(stripe, number or (lambda name: self._rows[name].number if name in self._rows else None))

    def since(self, version: int, *, now: float, tree: TreeRows | None = None) -> Change:
        """What changed after a version; everything when more hosts were forgotten since than are
        remembered."""
        if version and len(self._forgotten) == FORGOTTEN_MAX and self._forgotten[0][0] > version:
            version = 0
        rows = self._rows.values()
        return Change(
            self.version,
            not version,
            self._totals,
            self._swarms,
            [(row.number, row.name, row.zone, row.rack) for row in rows if row.named > version],
            [(row.number, row.done, row.flags) for row in rows if row.changed > version],
            [number for forgotten_in, number in self._forgotten if forgotten_in > version] if version else [],
            self._troubled,
            [
                StoryLine(number, round(now - moment, 3), swarm, text)
                for line_version, number, moment, swarm, text in self._story
                if line_version > version
            ],
            tree.since(version) if tree is not None else [],
        )

    # -- hosts

    def _take_in(self, host: Host) -> HostRow:
        self._numbers += 1
        row = HostRow(self._numbers, host.name, host.zone, host.rack, self.version, self.version)
        self._rows[host.name] = row
        return row

    def _refresh(self, row: HostRow, host: Host, slow: bool, now: float) -> None:
        if row.zone != host.zone or row.rack != host.rack:
            row.zone, row.rack, row.named = host.zone, host.rack, self.version
        flags, done, row.left, row.guest = 0, 1000, host.leaving, host.partial
        if host.receiving:
            flags, done = RECEIVING, self._done(host)
        if host.session is None:
            flags |= AWAY
        if slow:
            flags |= SLOW
        if host.drained:
            flags |= DRAINED
        if host.penalties:
            flags |= BLAMED | (SHUNNED if host.banned else 0)
        if flags & AWAY and not row.flags & AWAY:
            row.gone_at = now
            self._tell_presence(row, now, "is away")
        elif row.flags & AWAY and not flags & AWAY:
            row.gone_at = None
            self._tell_presence(row, now, "is back")
        if flags != row.flags or done != row.done:
            row.flags, row.done, row.changed = flags, done, self.version

    def _done(self, host: Host) -> int:
        """Thousandths of what it is receiving, rounded down."""
        held = wanted = 0
        for blob in islice(host.receiving, BLOBS_COUNTED_MAX):
            swarm = self.fleet.swarms[blob]
            piece_size = swarm.layout.piece_size
            held += sum(swarm.members[host.name].counts) * piece_size
            wanted += sum(swarm.totals) * piece_size
        return 1000 * held // wanted if wanted else 1000

    def _reasons(self, row: HostRow, host: Host | None, now: float) -> Iterator[str]:
        if row.flags & AWAY:
            minutes = int((now - row.gone_at) // 60) if row.gone_at is not None else 0
            yield "away: its session ended" + (f" {minutes} min ago" if minutes else "")
        if host is None:
            return
        if host.leaving:
            yield "leaving: its agent is about to end"
        if host.drained:
            yield "drained: an operator has it serve no other host"
        if row.flags & SLOW:
            which = "downlink" if self.fleet.capacities.slow_receiver(host.name) else "uplink"
            rate = self.fleet.capacities.rate(host.name)
            yield f"slow {which}" + (f", sends {rate / 1e6:.1f} MB/s" if rate is not None else "")
        if host.penalties:
            reasons = Counter(reason for reason, _ in host.penalties.values())
            complaints = ", ".join(f"{reason} by {count}" for reason, count in reasons.most_common())
            yield f"{'shunned' if host.banned else 'blamed'}: {complaints}"

    def _gone(self, row: HostRow, now: float) -> None:
        """The fleet knows the host no more."""
        if not row.flags & AWAY:  # it went and was forgotten between two updates
            self._tell_presence(row, now, "is away")
        if row.gone_at is None:
            lost = self.fleet.lost.get(row.name)
            row.gone_at = lost.absent_since if lost is not None and lost.absent_since is not None else now
        if row.flags != AWAY:
            row.flags, row.changed = AWAY, self.version
        # That a guest is gone may mean that it needs nothing more from here: its home knows.
        if row.guest or now - row.gone_at >= (LEFT_S if row.left else GONE_S):
            del self._rows[row.name]
            self._forgotten.append((self.version, row.number))

    def _tell_presence(self, row: HostRow, now: float, what: str) -> None:
        if not row.guest:  # else its home says so
            self._add_line(now, "", f"{row.name} {what}")

    # -- swarms

    def _shown(self, running: list[Swarm]) -> list[Swarm]:
        """Swarms with receivers, the largest first, then the largest of the others."""
        shown = nsmallest(SWARMS_SHOWN_MAX, running, key=_rank)
        if len(shown) < SWARMS_SHOWN_MAX:
            seeded = (swarm for swarm in self.fleet.swarms.values() if not swarm.receivers)
            shown += nsmallest(SWARMS_SHOWN_MAX - len(shown), seeded, key=_rank)
        return shown

    def _swarm(self, swarm: Swarm) -> SwarmRow:
        hosts, size = len(swarm.members), swarm.layout.size
        policies = self.fleet.policies
        package = next(iter(policies.packages_of(swarm.blob)), None)
        title = policies.name_of(package) if package is not None else ""
        manifest = package.digest or "" if package is not None else ""
        return SwarmRow(
            swarm.key,
            size,
            swarm.stripes,
            self.rates.state(swarm),
            swarm.priority,
            hosts,
            hosts - swarm.receivers,
            size * self.rates.pieces(swarm) // sum(swarm.totals),
            size * hosts,
            self.rates.bytes_s(swarm),
            self.rates.eta_s(swarm),
            swarm.leases(),
            title,
            short_name(title, manifest) if package is not None else "",
            manifest,
            self.fleet.history.broadcasts.origin_bytes(swarm.blob),
            "; ".join(swarm.wan.waiting.values()),
        )

    def _count(self, running: list[Swarm]) -> Totals:
        flags = Counter(row.flags for row in self._rows.values())

        def having(flag: int) -> int:
            return sum(count for combination, count in flags.items() if combination & flag)

        return Totals(
            max(len(self._rows), len(self.fleet.hosts)),
            having(AWAY),
            having(RECEIVING),
            having(SLOW),
            having(BLAMED),
            having(SHUNNED),
            len(self.fleet.swarms),
            len(running),
            sum(self.rates.state(swarm) == "stalled" for swarm in running),
            sum(swarm.leases() for swarm in running),
            sum(self.rates.bytes_s(swarm) for swarm in running),
            sum(row.guest for row in self._rows.values()),
        )

    # -- what happened

    def _add_line(self, moment: float, swarm: str, text: str) -> None:
        self._lines += 1
        self._story.append((self.version, self._lines, moment, swarm, text))

    def _read_stories(self, now: float) -> None:
        """Copy the lines that were added to the stories of swarms since the last update, the newest
        STORY_PER_UPDATE_MAX."""
        lines: list[tuple[float, str, str]] = []
        latest = self._read_until
        for swarm in self.fleet.swarms.values():
            if not swarm.story or swarm.story[-1][0] <= self._read_until:
                continue
            for moment, text in islice(reversed(swarm.story), STORY_PER_UPDATE_MAX):
                if moment <= self._read_until:
                    break
                latest = max(latest, moment)
                lines.append((moment, swarm.key, text))
        lines.reverse()  # lines of one moment keep their order: sorting is stable
        lines.sort(key=lambda line: line[0])
        self._read_until = latest
        for moment, swarm_key, text in lines[-STORY_PER_UPDATE_MAX:]:
            self._add_line(moment, swarm_key, text)


def _rank(swarm: Swarm) -> tuple[int, str]:
    return -swarm.receivers or -len(swarm.members), swarm.key
