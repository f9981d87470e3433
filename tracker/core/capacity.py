"""Upload capacity: how fast the hosts' uplinks and downlinks are, and how many upload slots follow.

Which share of a typical uplink a host has is judged from its children (monitor/progress.py): what
its own kernel took says less, since children that have all they can get look like a slow uplink. A
judgement outlives swarms for FORGIVEN_AFTER_S, so a host that was slow is planned around from the
start. A host that limits its own uplink says so, and is believed.

A judgement may be wrong: a process that gets no processor time for a second gives nothing, and one
whose children are hard to feed gives a good part. Neither looks like a link of a tenth of the rate.
Where slots are short, such hosts are tried again after RETRY_S, and twice as late each time.

Fanout: how many children a host feeds where a blob has but one stripe. Such a blob has few pieces,
and what counts is how soon they travel down the tree. A host sends a piece to its k children one
after the other, so the last one has it after k times what one takes, and every level costs HOP_S
besides. N hosts, of which each feeds k, make a tree of log_k(1 + (k - 1) N) - 1 levels: exact where
the tree is full, in between where it is not, and N - 1 for the chain that k = 1 is. Pieces that
follow the first come k times what one takes apart. Together

    levels * (k * piece + HOP_S) + (pieces - 1) * k * piece        seconds,

which is tried for every k: small where the uplink is slow or pieces are many, large where levels
count. More hosts, a shorter piece and fewer pieces never ask for fewer children.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from math import log
from statistics import median

from p2pdist.model.pieces import PieceLayout

HOP_S = 0.0015
"""What a level costs beside the sending: a round trip, and two processes that wake, verify, write
and pass on."""

SEND_S = 0.0001
"""What a piece for one child costs the sender's event loop, beside the time on the wire
(profiled)."""

RATE_BYTES_S = 125e6
"""Taken for a typical uplink while none was measured: 1 Gbit/s. On a faster network that costs a
few milliseconds; to take a slow one for fast costs tenths of a second."""

FANOUT_MAX = 64

BUSY_MIN_S = 0.4
"""Measurements are added up until data was waiting for so long: shorter ones say little."""

FORGIVEN_AFTER_S = 300.0
ROUND_UP = 0.3
"""A slot that a slow uplink can all but fill is kept: the judgement is rough, and too few slots
cost all hosts."""

UPLINKS_MAX = 200_000
"""Hosts that are remembered; beyond, the ones that were met first are forgotten."""

RETRY_S = 2.0
RETRIES_MAX = 8
WORSE_SHARE = 0.7
"""A host that was called slow is called slower still when it shows less than this part of what it
was thought to have."""

SURE_SHARES = (0.02, 0.25)
"""A share between these is that of a slow link."""


def fanout(hosts: int, layout: PieceLayout, rate_bytes_s: float) -> int:
    """Children of a host in a swarm of so many hosts that send `rate_bytes_s` each; 0 when that is
    not known."""
    most = max(1, min(FANOUT_MAX, hosts - 1))
    return min(range(1, most + 1), key=lambda children: arrival_s(children, hosts, layout, rate_bytes_s))


def arrival_s(children: int, hosts: int, layout: PieceLayout, rate_bytes_s: float) -> float:
    """Seconds until the last host has everything, where each feeds so many children."""
    piece_s = layout.length(0) / (rate_bytes_s or RATE_BYTES_S) + SEND_S
    return levels(children, hosts) * (children * piece_s + HOP_S) + (layout.count - 1) * children * piece_s


def levels(children: int, hosts: int) -> float:
    """Levels below the root of a tree of so many hosts."""
    if children == 1:
        return hosts - 1.0
    return log(1 + (children - 1) * hosts) / log(children) - 1


@dataclass(slots=True)
class _Uplink:
    """What is known of one host."""

    rate_bytes_s: float | None = None
    """Learned upload rate; None while not measured. `sample`."""
    limit_bytes_s: float = 0.0
    """What the host lets itself send; 0 for no limit. `declare`."""
    sent_bytes: int = 0
    """Bytes of the present measurement. `sample`."""
    busy_s: float = 0.0
    """Time in which data was waiting, of the present measurement. `sample`."""
    share: float | None = None
    """Share of a typical link; None while the host is not held to be slow. `mark_slow`, `retry`,
    `slots`."""
    slow_since: float = 0.0
    """Time of the last judgement. `mark_slow`."""
    retries: int = 0
    """How often the host was tried again. `retry`."""
    slow_receiver: bool = False
    """The downlink is slow. `mark_slow`, `clear_slow_receiver`."""


@dataclass(slots=True)
class Capacities:
    """Links of all hosts; rates are in bytes/s."""

    _uplinks: dict[str, _Uplink] = field(default_factory=dict)
    """Links by host name, in the order in which hosts were met."""
    _told: dict[str, float] = field(default_factory=dict)
    """When people were last told of a slow uplink that costs no upload slot, by host, the oldest
    first. `report_slow`, `expire`."""
    _median: float = 0.0
    """Median of the learned rates when it was last computed. `typical`."""
    _stale: int = 0
    """Questions until the median is computed anew. `typical`."""

    def sample(self, host: str, sent_bytes: int, busy_s: float) -> None:
        """Take one measurement of a sender: bytes that its kernel took over the time in which data
        was waiting."""
        if busy_s <= 0 or sent_bytes < 0:
            return
        uplink = self._uplink(host)
        uplink.sent_bytes += sent_bytes
        uplink.busy_s += busy_s
        if uplink.busy_s >= BUSY_MIN_S:
            rate, old = uplink.sent_bytes / uplink.busy_s, uplink.rate_bytes_s
            uplink.sent_bytes, uplink.busy_s = 0, 0.0
            uplink.rate_bytes_s = rate if old is None else old + 0.5 * (rate - old)

    def declare(self, host: str, limit_bytes_s: float) -> None:
        """The host sends no faster than this; 0 for no limit."""
        if limit_bytes_s or host in self._uplinks:
            self._uplink(host).limit_bytes_s = limit_bytes_s

    def mark_slow(self, host: str, share: float, *, downlink: bool, now: float) -> bool:
        """A host's children, or its own lagging, show that its uplink, or its downlink, has only
        this share of what others have; return whether that is news."""
        uplink = self._uplink(host)
        if uplink.share is not None and share >= WORSE_SHARE * uplink.share and (uplink.slow_receiver or not downlink):
            return False
        uplink.slow_since, uplink.share, uplink.slow_receiver = now, share, downlink or uplink.slow_receiver
        return True

    def report_slow(self, host: str, *, now: float) -> bool:
        """People are told that a host has a slow uplink; for `slots` it goes on to be a typical
        one. Returns whether that is news."""
        news = self._told.pop(host, None) is None
        self._told[host] = now
        if len(self._told) > UPLINKS_MAX:
            del self._told[next(iter(self._told))]
        return news

    def expire(self, *, now: float) -> None:
        """Tell people no longer of what was seen long ago. Called often and regularly."""
        while self._told and now - next(iter(self._told.values())) > FORGIVEN_AFTER_S:
            del self._told[next(iter(self._told))]

    def slots(self, host: str, slots: int, *, now: float) -> int:
        """Upload slots of a host in a swarm where a host with a typical uplink has `slots`: fewer
        when its own is slow."""
        uplink = self._uplinks.get(host)
        if uplink is None:
            return slots
        if uplink.share is not None and now - uplink.slow_since > FORGIVEN_AFTER_S:
            uplink.share, uplink.slow_receiver, uplink.retries = None, False, 0
        if uplink.limit_bytes_s:
            slots = int(slots * min(1.0, uplink.limit_bytes_s / max(self.typical(), 1.0)) + ROUND_UP)
        return slots if uplink.share is None else max(0, min(slots - 1, int(slots * uplink.share + ROUND_UP)))

    def slow_receiver(self, host: str) -> bool:
        """Whether the host's downlink is so slow that it takes next to nothing of its parents'
        uplinks."""
        uplink = self._uplinks.get(host)
        return uplink is not None and uplink.slow_receiver

    def retry(self, host: str, *, now: float) -> bool:
        """Whether a host that was called slow may be tried again; it is slow no longer then, until
        it shows that it is."""
        uplink = self._uplinks.get(host)
        if uplink is None or uplink.share is None or uplink.slow_receiver:
            return False
        if SURE_SHARES[0] < uplink.share < SURE_SHARES[1]:
            return False
        if now - uplink.slow_since < RETRY_S * 2 ** min(uplink.retries, RETRIES_MAX):
            return False
        uplink.share = None
        uplink.retries += 1
        return True

    def clear_slow_receiver(self, host: str) -> None:
        """The host keeps up with others: its downlink is not slow after all."""
        uplink = self._uplinks.get(host)
        if uplink is not None:
            uplink.slow_receiver = False

    def rate(self, host: str) -> float | None:
        """Learned upload rate in bytes/s, None when never measured."""
        uplink = self._uplinks.get(host)
        return uplink.rate_bytes_s if uplink else None

    def uplink(self, host: str) -> float | None:
        """What a host can send in bytes/s: its own limit, or else the learned rate; None while
        neither is known."""
        uplink = self._uplinks.get(host)
        return (uplink.limit_bytes_s or uplink.rate_bytes_s) if uplink is not None else None

    def limit(self, host: str) -> float:
        """What a host lets itself send in bytes/s, 0 for no limit."""
        uplink = self._uplinks.get(host)
        return uplink.limit_bytes_s if uplink is not None else 0.0

    def slow(self, host: str) -> bool:
        """Whether the host's uplink or downlink is held to be slow."""
        uplink = self._uplinks.get(host)
        return host in self._told or (uplink is not None and uplink.share is not None)

    def slow_uplink(self, host: str) -> bool:
        """Whether the host has fewer upload slots for its slow uplink."""
        uplink = self._uplinks.get(host)
        return uplink is not None and uplink.share is not None and not uplink.slow_receiver

    def slow_hosts(self, *, now: float) -> list[str]:
        """Hosts with uplinks or downlinks that are held to be slow. `slots` forgives those that
        are planned for; a host that rests is forgiven here."""
        judged = {
            host: None
            for host, uplink in self._uplinks.items()
            if uplink.share is not None and now - uplink.slow_since <= FORGIVEN_AFTER_S
        }
        return list(judged | dict.fromkeys(self._told))

    def typical(self) -> float:
        """Median of the learned rates in bytes/s, 0 while none is known; computed anew only as
        often as keeps the cost of a question constant."""
        self._stale -= 1
        if self._stale <= 0:
            rates = [uplink.rate_bytes_s for uplink in self._uplinks.values() if uplink.rate_bytes_s is not None]
            self._median = median(rates) if rates else 0.0
            self._stale = len(self._uplinks) // 8
        return self._median

    def _uplink(self, host: str) -> _Uplink:
        uplink = self._uplinks.get(host)
        if uplink is None:
            if len(self._uplinks) >= UPLINKS_MAX:
                del self._uplinks[next(iter(self._uplinks))]
            uplink = self._uplinks[host] = _Uplink()
        return uplink
