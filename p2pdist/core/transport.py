"""Which transport brings a blob to a host, the tracker's trees or a BitTorrent swarm, and how a
pull switches from one to the other in the middle of the blob.

Theory of the choice. Trees are planned, cost half the CPU of a swarm and read the origin once; they
need a planner. A swarm needs none, but it knows nothing of uplinks and races for pieces. So the
policy `auto` uses trees as long as a tracker plans and pieces come. It turns to a swarm when no
tracker has answered for some seconds and the pull stands still or has lost a parent, or when it
stands still for long whatever the tracker says. Hosts that stand still together switch at times of
their own: between once and twice the limit, by a hash of host and blob.

A host in a swarm stays there until the blob is done or the swarm stands still. To go back as soon
as a tracker plans would cost the pieces under way at every host at the same moment, and a tracker
that comes and goes would take all hosts with it. Children in the trees are served meanwhile from
the pieces that the host has. Once a tracker has planned again a swarm is given less time to stand
still.

A transport that gave nothing is left, and for longer each time before it is tried again: the hybrid
swarm, the swarm of version 1 where it has peers, the trees, and so on. The policy `swarm` begins
with the swarm and knows the trees as a way out only; without a torrent every blob comes by trees. A
preseed stays in the trees under `auto`: only there it gives way to starts.

Theory of the switch. Streams end after the pieces under way, or after LEAVE_S; a swarm ends when
its transfer has let go of the file. What has verified by then is held, and the next transport
fetches the rest, so only pieces under way when a transport was left come twice.

Invariants: the transport changes in `TransportChoice.choose` alone; nothing leaves the trees for a
torrent that is not known; a transport begins only when nothing writes into the blob, writers of an
earlier pull included. All times are in seconds.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from p2pdist.model.digest import Digest
from p2pdist.model.messages import Priority
from p2pdist.model.rendezvous import fraction

Policy = Literal["trees", "swarm", "auto"]
Transport = Literal["trees", "swarm", "swarm-v1"]
"""`swarm-v1` is the torrent of version 1 alone, which has peers of its own
(p2pdist/model/torrent.py)."""

LEAVE_S = 1.0
"""How long streams may take to finish the pieces under way when the transport changes."""

DOCUMENT_S = 5.0
"""How long a pull with the policy `swarm` waits for the torrent document before it begins with
trees."""

AWAY_S = 3.0
STILL_S = 1.0
"""Trees are left when trackers have been away for AWAY_S and no piece has come for STILL_S."""

UNFED_S = 2.0
"""Or when trackers are away and a stripe has had no source for so long."""

STUCK_S = 10.0
"""Trees are left, whatever the tracker says, when no piece has come for so long."""

SWARM_STILL_S = 8.0
ELSEWHERE_STILL_S = 4.0
"""A swarm is left when no piece has come for so long; the second limit holds where pieces are known
to be elsewhere: a tracker has planned since the swarm was chosen, or version 1 has peers."""

PACES = 4.0
"""A piece is late only when it also takes several times as long as the pieces before it."""

DOUBLINGS_MAX = 4


@dataclass(slots=True)
class TransportChoice:
    """Chooses the transport of one pull. `host` and `blob` decide when this host switches among
    others that stand still."""

    policy: Policy
    host: str
    blob: Digest
    started_at: float
    torrent: bool | None = None
    """Whether the blob has a torrent; None while that is not known. Set by the owner."""
    peers_v1: bool = False
    """Whether the swarm of version 1 has peers. Set by the owner."""
    transport: Transport | None = None
    """What `choose` returned last."""
    _tracker: bool = True
    _since: float = 0.0
    """When the transport was chosen (`choose`)."""
    _progressed_at: float = 0.0
    _away_since: float = 0.0
    """When the last tracker went away, or came (`tracker_changed`)."""
    _fed_at: float = 0.0
    """When every stripe had a source last, or a swarm was the transport (`choose`)."""
    _planned: bool = False
    """Whether a tracker has planned since the transport was chosen."""
    _swarmed: bool = False
    """Whether a swarm was chosen before."""
    _barren: int = 0
    """How many transports in a row gave nothing, up to DOUBLINGS_MAX."""
    _pace_s: float = 0.0
    """How long a piece takes, smoothed (`progressed`)."""
    _spread: float = field(init=False)
    """From 1 to 2: this host's share of the time between the limits."""

    def __post_init__(self) -> None:
        self._spread = 1.0 + fraction(f"transport/{self.blob}".encode(), self.host)
        self._progressed_at = self._since = self._fed_at = self.started_at
        if self.policy == "trees":
            self.torrent = False

    def progressed(self, *, now: float) -> None:
        """Note that a piece has come."""
        if self._progressed_at > self._since:
            self._pace_s += 0.25 * (now - self._progressed_at - self._pace_s)
        self._progressed_at, self._barren = now, 0

    def held(self, *, now: float) -> None:
        """Note that the host's site waits: that the pull stands still says nothing of its
        transport."""
        self._progressed_at = self._fed_at = now

    def planned(self) -> None:
        """Note a plan; it counts if a tracker made it."""
        self._planned = self._planned or self._tracker

    def tracker_changed(self, present: bool, *, now: float) -> None:
        """Note whether a tracker answers from now on."""
        if present != self._tracker:
            self._tracker, self._away_since = present, now

    def choose(self, *, fed: bool, priority: Priority = "start", now: float) -> Transport | None:
        """The transport from now on; None while the pull waits for the torrent. `fed`: every stripe
        that lacks something has a source."""
        if fed or self.transport != "trees":
            self._fed_at = now
        stays = self.policy == "auto" and self.transport == "trees" and priority == "preseed"
        transport = self.transport if stays else self._next(now)
        if transport != self.transport:
            if self.transport is not None and self._progressed_at < self._since:
                self._barren = min(DOUBLINGS_MAX, self._barren + 1)
            self.transport, self._since, self._planned = transport, now, False
            self._swarmed = self._swarmed or transport != "trees"
        return transport

    def still_s(self, *, now: float) -> float:
        """How long the present transport has given nothing."""
        return now - max(self._progressed_at, self._since)

    def _next(self, now: float) -> Transport | None:
        if self.torrent is False:
            return "trees"
        if self.transport is None:
            if self.policy == "swarm" and self.torrent is None and now - self.started_at < DOCUMENT_S:
                return None
            return "swarm" if self.policy == "swarm" and self.torrent else "trees"
        if self.transport == "trees":
            return "swarm" if self.torrent and self._leaves_trees(now) else "trees"
        elsewhere = self._planned or (self.transport == "swarm" and self.peers_v1)
        limit_s = ELSEWHERE_STILL_S if elsewhere else SWARM_STILL_S
        if self.still_s(now=now) < self._patience_s(limit_s):
            return self.transport
        return "swarm-v1" if self.transport == "swarm" and self.peers_v1 else "trees"

    def _leaves_trees(self, now: float) -> bool:
        still_s = self.still_s(now=now)
        if self.policy == "swarm" and not self._swarmed:
            return True  # the torrent document came late
        if self._tracker or self.policy == "swarm":
            return still_s >= self._patience_s(STUCK_S)
        if now - self._away_since < AWAY_S * self._spread:
            return False
        return still_s >= self._patience_s(STILL_S) or now - self._fed_at >= self._patience_s(UNFED_S)

    def _patience_s(self, limit_s: float) -> float:
        return max(limit_s, PACES * self._pace_s) * self._spread * 2.0**self._barren


@dataclass(frozen=True, slots=True)
class Leave:
    """End a transport: streams after the pieces under way, a swarm at once. `target` is None while
    the pull waits for the torrent document."""

    transport: Transport
    target: Transport | None


@dataclass(frozen=True, slots=True)
class CutShort:
    """End the streams now: they have had LEAVE_S."""


@dataclass(frozen=True, slots=True)
class Begin:
    """Begin a transport."""

    transport: Transport


Step = Leave | CutShort | Begin


@dataclass(slots=True)
class TransportSwitch:
    """Carries one pull from transport to transport."""

    transport: Transport | None = "trees"
    """The present transport; None between two, and while the pull waits for the torrent."""
    target: Transport | None = "trees"
    """The transport that is to be the present one."""
    _leave_by: float = 0.0
    """When the streams of the transport that was left are cut short."""

    def steer(self, choice: TransportChoice, *, writers: int, fed: bool, priority: Priority, now: float) -> list[Step]:
        """What to do now, in this order. `writers` counts the streams and swarms that write into
        the blob; see `TransportChoice.choose` for `fed` and `priority`."""
        steps: list[Step] = []
        if self.transport == self.target:
            target = choice.choose(fed=fed, priority=priority, now=now)
            if target == self.transport:
                return steps
            left, self.transport, self.target, self._leave_by = self.transport, None, target, now + LEAVE_S
            if left is not None:
                steps.append(Leave(left, target))
        if writers:
            if now >= self._leave_by:
                steps.append(CutShort())
            return steps
        self.transport = self.target
        if self.transport is not None:
            steps.append(Begin(self.transport))
        return steps
