"""Broadcasts: many hosts receive the same package at about the same time.

Theory. A broadcast is of a package, or of a blob that no known package has. It begins when the
first host joins a swarm of one of its blobs and lacks something, and has ended when none of the
hosts that joined lacks anything, all of them complete or gone, for QUIET_S: a host takes the blobs
of a package some at a time, and is between two of them for a moment. Fewer than HOSTS_MIN hosts
make no broadcast.

A host that leaves a swarm before it is complete has missed that blob, unless it joins again.
One that goes on after BROADCAST_S_MAX is reported as it is then, and what still comes belongs to
another one.

Invariants: `outstanding` counts the receivers that lack something; receivers over all broadcasts
never exceed RECEIVERS_MAX, hosts beyond are not followed.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from math import ceil

from p2pdist.model import history
from p2pdist.model.digest import Digest
from p2pdist.model.history import Straggler
from tracker.core.capacity import Capacities
from tracker.core.history.bound import Links, bound
from tracker.core.host import Host
from tracker.core.member import FROM_ORIGIN, Member
from tracker.core.policy.book import PolicyBook
from tracker.core.swarm import Swarm

QUIET_S = 5.0
HOSTS_MIN = 2
BROADCAST_S_MAX = 6 * 3600.0
RUNNING_MAX = 1000
RECEIVERS_MAX = 400_000
BLOBS_MAX = 4096
"""Blobs of one broadcast."""

STRAGGLERS_MAX = 20
STRAGGLER_FACTOR, STRAGGLER_S_MIN = 1.5, 1.0
"""A straggler takes so many times as long as the median host, and so much longer."""

CURVE_POINTS_MAX = 100
OWN_LIMIT_SHARE = 0.7
"""A host that took what it lacked at this part of its own limit, or faster, was held up by that."""

UNKNOWN = "unknown"


@dataclass(slots=True)
class _Receiver:
    """One host in a broadcast."""

    began_at: float
    """Time of its first join. `join`."""
    lacks: int = 0
    """Blobs of which it lacks pieces. `join`, `_complete`, `leave`."""
    missed: dict[Digest, None] | None = None
    """Blobs whose swarms it left before it was complete. `miss`; `join` takes them back."""
    origin_read: dict[Digest, int] | None = None
    """By blob that it lacks: what its pull has read of the origin, as it says. `read`."""
    wanted_bytes: int = 0
    """What it lacked when it joined, but for what it missed. `join`, `leave`."""
    completed_at: float | None = None
    """Time at which it last lacked nothing any more. `_complete`; `join` and `leave` take it
    back."""
    reason: str = ""
    """What held it up, or why it missed a blob. `_complete`, `leave`."""

    def miss(self, blob: Digest) -> None:
        """It leaves the swarm of a blob of which it lacks pieces."""
        self.missed = {} if self.missed is None else self.missed
        self.missed[blob] = None

    def read(self, blob: Digest, origin_bytes: int) -> int:
        """Its pull says what it has read of the origin so far; returns how much that is more than
        before."""
        before = (self.origin_read or {}).get(blob, 0)
        if origin_bytes or before:  # most hosts read nothing
            self.origin_read = {} if self.origin_read is None else self.origin_read
            self.origin_read[blob] = origin_bytes
        return origin_bytes - (before if origin_bytes >= before else 0)  # less: another pull of the blob


@dataclass(slots=True)
class Running:
    """A broadcast that has not ended."""

    key: Digest
    """The manifest of its package, or the blob."""
    package: str
    """Reference of its package, "" for a blob of none."""
    began_at: float
    changed_at: float
    """When a receiver last joined, was complete or left."""
    blobs: dict[Digest, int] = field(default_factory=dict)
    """Sizes of its blobs."""
    waiting: dict[Digest, dict[str, None]] = field(default_factory=dict)
    """By blob the receivers that lack it. `join`, `advance`, `leave`."""
    unseeded: dict[Digest, int] = field(default_factory=dict)
    """Sizes of the blobs that no host held when the first one joined."""
    receivers: dict[str, _Receiver] = field(default_factory=dict)
    outstanding: int = 0
    origin_bytes: int = 0
    """What hosts read of the origin, as they report it."""
    origin_by_blob: dict[Digest, int] = field(default_factory=dict)
    """The parts of `origin_bytes` by blob. `advance`."""
    shared: bool = False
    """Superpeers read shares by BitTorrent, of which no tracker hears."""
    resumed: int = 0
    uplinks: dict[str, None] = field(default_factory=dict)
    """Hosts that could send besides the receivers: they were in a swarm when a blob of it came."""

    def ended(self, now: float) -> bool:
        """Whether it is over."""
        if now - self.began_at >= BROADCAST_S_MAX:
            return True
        return not self.outstanding and now - self.changed_at >= QUIET_S


@dataclass(slots=True)
class Broadcasts:
    """The broadcasts that run; `hosts`, `capacities` and `book` are the fleet's and are only
    read."""

    hosts: dict[str, Host]
    capacities: Capacities
    book: PolicyBook
    origin_bytes_s: float
    """What all hosts together may read of the origin; 0 for no limit."""
    running: dict[Digest, Running] = field(default_factory=dict)
    receivers: int = 0
    """Receivers over all of them."""
    _of_blob: dict[Digest, dict[Digest, None]] = field(default_factory=dict)
    """Keys of running broadcasts by blob."""

    def join(self, swarm: Swarm, member: Member, *, now: float) -> None:
        """A member says what it holds; it may be in the broadcast already."""
        blob = swarm.blob
        if member.seed or self._find(blob, member.host) is not None:
            return
        running = self._running(swarm, member.host, now)
        if running is None:
            return
        receiver = running.receivers.get(member.host)
        if receiver is None:
            receiver = running.receivers[member.host] = _Receiver(now)
            self.receivers += 1
            running.resumed += any(member.counts)
        running.outstanding += not receiver.lacks
        running.waiting[blob][member.host] = None
        receiver.lacks += 1
        if receiver.missed:
            receiver.missed.pop(blob, None)
        receiver.completed_at, receiver.reason = None, ""
        held, size = swarm.bytes_held[member.host], swarm.layout.size
        lacks = size - held if held else size  # a sum would be a number of its own for each receiver
        receiver.wanted_bytes = receiver.wanted_bytes + lacks if receiver.wanted_bytes else lacks
        running.changed_at = now

    def advance(
        self, swarm: Swarm, member: Member, counts: tuple[int, ...], origin_bytes: int | None = None, *, now: float
    ) -> None:
        """A member that lacks pieces reports new counts, which the swarm does not have yet, and
        what its pull has read of the origin so far. Of an agent that does not say that, the pieces
        of stripes count of which it holds the lease now: where a lease has moved meanwhile, too
        few."""
        running = self._find(swarm.blob, member.host)
        if running is None:
            return
        receiver, count = running.receivers[member.host], 0
        if origin_bytes is not None:
            count = receiver.read(swarm.blob, origin_bytes)
        elif swarm.blob not in (receiver.origin_read or ()) and FROM_ORIGIN in member.parents:
            for stripe, parent in enumerate(member.parents):
                if parent == FROM_ORIGIN:
                    count += (counts[stripe] - member.counts[stripe]) * swarm.layout.piece_size
        if count:
            running.origin_bytes += count
            running.origin_by_blob[swarm.blob] = running.origin_by_blob.get(swarm.blob, 0) + count
        running.shared = running.shared or bool(swarm.origin.shares)
        if counts == swarm.totals:
            self._complete(running, swarm, member, now)

    def leave(self, swarm: Swarm, host: str, why: str, *, now: float) -> None:
        """A member is about to leave a swarm."""
        running = self._find(swarm.blob, host)
        if running is None:
            return
        receiver = running.receivers[host]
        del running.waiting[swarm.blob][host]
        receiver.lacks -= 1
        receiver.miss(swarm.blob)
        receiver.wanted_bytes -= swarm.layout.size - swarm.bytes_held[host]
        receiver.reason, running.changed_at = why, now
        running.outstanding -= not receiver.lacks

    def origin_bytes(self, blob: Digest) -> int | None:
        """What hosts have read of a blob from the origin in the broadcasts that run; None without
        one, and where no tracker hears how much it is."""
        running = [self.running[key] for key in self._of_blob.get(blob, ())]
        if not running or any(broadcast.shared for broadcast in running):
            return None
        return sum(broadcast.origin_by_blob.get(blob, 0) for broadcast in running)

    def end(self, *, now: float) -> Iterator[tuple[Running, history.Broadcast]]:
        """The broadcasts that have ended, which are forgotten."""
        for key in [key for key, running in self.running.items() if running.ended(now)]:
            running = self.running.pop(key)
            self.receivers -= len(running.receivers)
            for blob in running.blobs:
                keys = self._of_blob[blob]
                del keys[key]
                if not keys:
                    del self._of_blob[blob]
            if len(running.receivers) >= HOSTS_MIN:
                yield running, self._report(running)

    # -- which broadcast

    def _find(self, blob: Digest, host: str) -> Running | None:
        """The broadcast in which a host lacks a blob."""
        for key in self._of_blob.get(blob, ()):
            if host in self.running[key].waiting[blob]:
                return self.running[key]
        return None

    def _running(self, swarm: Swarm, host: str, now: float) -> Running | None:
        """The broadcast that a host joins by lacking a blob, a new one if need be; None over the
        limits. A blob may be of several packages: one that the host already receives counts first,
        then the one that was asked for last."""
        blob = swarm.blob
        packages = self.book.packages_of(blob)
        keys = [package.digest for package in packages if package.digest is not None] or [blob]
        key = next((key for key in keys if key in self.running and host in self.running[key].receivers), keys[0])
        running = self.running.get(key)
        if self.receivers >= RECEIVERS_MAX and (running is None or host not in running.receivers):
            return None
        if running is None:
            if len(self.running) >= RUNNING_MAX:
                return None
            package = next((package for package in packages if package.digest == key), None)
            title = self.book.name_of(package) if package is not None else ""
            running = self.running[key] = Running(key, title, now, now)
        if blob not in running.blobs:
            if len(running.blobs) >= BLOBS_MAX:
                return None
            running.blobs[blob], running.waiting[blob] = swarm.layout.size, {}
            if not any(member.seed for member in swarm.members.values()):
                running.unseeded[blob] = swarm.layout.size
            running.uplinks.update((name, None) for name in swarm.members if name != host)
        self._of_blob.setdefault(blob, {})[key] = None
        return running

    # -- receivers

    def _complete(self, running: Running, swarm: Swarm, member: Member, now: float) -> None:
        receiver = running.receivers[member.host]
        del running.waiting[swarm.blob][member.host]
        receiver.lacks -= 1
        if receiver.origin_read:
            receiver.origin_read.pop(swarm.blob, None)
        running.changed_at = now
        if 2 * running.outstanding <= len(running.receivers):  # one of the later half
            receiver.reason = self._reason(receiver, member, now) or receiver.reason
        if not receiver.lacks:
            running.outstanding -= 1
            receiver.completed_at = now if not receiver.missed else None

    def _reason(self, receiver: _Receiver, member: Member, now: float) -> str:
        """What holds a host up that is about to be complete, "" where that is not known."""
        host, links = self.hosts[member.host], self.capacities
        if links.slow_receiver(member.host):
            return "slow downlink"
        passed_s = now - receiver.began_at
        if host.download_bytes_s and receiver.wanted_bytes >= OWN_LIMIT_SHARE * host.download_bytes_s * passed_s:
            return f"its own limit of {host.download_bytes_s / 1e6:.1f} MB/s"
        parents = [parent for parent in member.parents if parent]
        for parent in dict.fromkeys(parents):
            if links.slow(parent):
                return f"received from {parent}, which has a slow link"
        if links.slow(member.host):
            return "slow uplink"
        return "read the origin itself" if FROM_ORIGIN in member.parents else ""

    # -- the report

    def _report(self, running: Running) -> history.Broadcast:
        ends = sorted(
            r.completed_at - running.began_at for r in running.receivers.values() if r.completed_at is not None
        )
        own = sorted(r.completed_at - r.began_at for r in running.receivers.values() if r.completed_at is not None)
        hosts, size = len(running.receivers), sum(running.blobs.values())
        seconds = ends[-1] if ends else running.changed_at - running.began_at
        wanted = sum(receiver.wanted_bytes for receiver in running.receivers.values())
        least = bound(sum(running.unseeded.values()), wanted, hosts, self._links(running))
        stragglers = self._stragglers(running, _percentile(own, 0.5) or 0.0)
        return history.Broadcast(
            blobs=len(running.blobs),
            bytes=size,
            hosts=hosts,
            complete=len(ends),
            seconds=round(seconds, 3),
            wanted_bytes=wanted,
            to_50_s=_reached(ends, hosts, 0.5),
            to_99_s=_reached(ends, hosts, 0.99),
            to_100_s=_reached(ends, hosts, 1.0),
            own_p50_s=_percentile(own, 0.5),
            own_p99_s=_percentile(own, 0.99),
            origin_bytes=running.origin_bytes,
            origin_copies=round(running.origin_bytes / size, 3) if size and not running.shared else None,
            bound_s=round(least.seconds, 3) if least.seconds is not None else None,
            ratio=round(seconds / least.seconds, 3) if least.seconds else None,
            unknown=least.unknown,
            curve=_curve(ends),
            stragglers=tuple(stragglers[:STRAGGLERS_MAX]),
            stragglers_more=max(0, len(stragglers) - STRAGGLERS_MAX),
            resumed=running.resumed,
        )

    def _links(self, running: Running) -> Links:
        uplinks = [self.capacities.uplink(host) for host in {**running.uplinks, **running.receivers}]
        known = [rate for rate in uplinks if rate is not None]
        downlinks = [
            (receiver.wanted_bytes, host.download_bytes_s)
            for name, receiver in running.receivers.items()
            if (host := self.hosts.get(name)) is not None and host.download_bytes_s
        ]
        return Links(self.origin_bytes_s, downlinks, len(uplinks) - len(known), sum(known))

    @staticmethod
    def _stragglers(running: Running, median_s: float) -> list[Straggler]:
        """Those that never were complete, then the slowest."""
        late_s = max(median_s * STRAGGLER_FACTOR, median_s + STRAGGLER_S_MIN)
        lost: list[Straggler] = []
        slow: list[Straggler] = []
        for name, receiver in running.receivers.items():
            joined_s = round(receiver.began_at - running.began_at, 3)
            if receiver.completed_at is None:
                reason = receiver.reason or ("still receiving" if receiver.lacks else UNKNOWN)
                lost.append(Straggler(name, reason, joined_s))
            elif (seconds := receiver.completed_at - receiver.began_at) > late_s:
                slow.append(Straggler(name, receiver.reason or UNKNOWN, joined_s, round(seconds, 3)))
        slow.sort(key=lambda straggler: (-(straggler.seconds or 0.0), straggler.host))
        return [*sorted(lost, key=lambda straggler: straggler.host), *slow]


def _percentile(ordered: list[float], share: float) -> float | None:
    """The smallest value that at least `share` of the values do not pass (nearest rank)."""
    return round(ordered[max(0, ceil(share * len(ordered)) - 1)], 3) if ordered else None


def _reached(ends: list[float], hosts: int, share: float) -> float | None:
    """When this share of the hosts was complete."""
    number = ceil(share * hosts)
    return round(ends[number - 1], 3) if 0 < number <= len(ends) else None


def _curve(ends: list[float]) -> tuple[tuple[float, int], ...]:
    """At most CURVE_POINTS_MAX moments, and how many hosts were complete then."""
    points = min(CURVE_POINTS_MAX, len(ends))
    counts = [ceil(len(ends) * number / points) for number in range(1, points + 1)]
    return tuple((round(ends[count - 1], 3), count) for count in counts)
