"""Which way one blob comes to a host at the moment: down the tracker's trees, or from a BitTorrent
swarm.

Theory. Trees are planned, cost half the CPU of a swarm and read the origin once; they need somebody
who plans. A swarm needs nobody, but it knows nothing of uplinks and races for pieces. So `auto`
uses trees as long as a tracker plans and pieces come, and a swarm when no tracker has answered for
some seconds and the pull stands still or has lost a parent, or when it stands still for long
whatever the tracker says. Hosts that stand still together move at times of their own: between once
and twice the time, by a hash of host and blob.

Who is in a swarm stays until the blob is done or the swarm stands still. To go back as soon as a
tracker plans would cost the pieces under way at every host at the same moment, and a tracker that
comes and goes would have all hosts move with it. Children in the trees are served meanwhile by
whoever has pieces. Once a tracker has planned again a swarm is given less time to stand still.

A way that gave nothing is left, for longer each time before it is tried again: the hybrid swarm,
the one of version 1 if peers are known there, the trees, and so on. `swarm` begins with the swarm
and knows the trees as a way out only; without a torrent all go by trees.

Preseeds stay in the trees under `auto`: only there they give way to what somebody waits for.

Invariants: the way changes only here, and only in `choose`; nothing leaves trees for a torrent that
is not known. Times are in seconds.

From one way to the other in the middle of a blob (transport.py says when): who writes into it
ends before who comes next begins.

Theory. Streams end after the pieces under way, or after LEAVE_S; a swarm has let go of the file
when its transfer is counted no more. What has verified by then is held, and the next way fetches
the rest: so no piece comes twice but those that were under way when a way was left.

Invariants: a way begins only when nothing else writes into the blob, those of an earlier pull
included; `way` is None in between, and while the first way waits for the torrent document.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from p2pdist.model.digest import Digest
from p2pdist.model.rendezvous import fraction

LEAVE_S = 1.0
"""How long streams may take to finish the pieces under way when the way changes."""


@dataclass(frozen=True, slots=True)
class Leave:
    """End a way: streams after the pieces under way, a swarm at once."""

    way: Way
    target: Way | None


@dataclass(frozen=True, slots=True)
class CutShort:
    """Streams have had their time: end them now."""


@dataclass(frozen=True, slots=True)
class Begin:
    way: Way


Step = Leave | CutShort | Begin


@dataclass(slots=True)
class Handover:
    """See the module's text. `way` is the present way, `target` the one that is to be."""

    way: Way | None = "trees"
    target: Way | None = "trees"
    _leave_by: float = 0.0

    def steer(self, choice: TransportChoice, *, writers: int, fed: bool, waited_for: bool, now: float) -> list[Step]:
        """What to do now, in this order. `writers` counts who writes into the blob; see
        TransportChoice for the rest."""
        steps: list[Step] = []
        if self.way == self.target:
            target = choice.choose(fed=fed, waited_for=waited_for, now=now)
            if target == self.way:
                return steps
            left, self.way, self.target, self._leave_by = self.way, None, target, now + LEAVE_S
            if left is not None:
                steps.append(Leave(left, target))
        if writers:
            if now >= self._leave_by:
                steps.append(CutShort())
            return steps
        self.way = self.target
        if self.way is not None:
            steps.append(Begin(self.way))
        return steps


Policy = Literal["trees", "swarm", "auto"]
Way = Literal["trees", "swarm", "swarm-v1"]
"""`swarm-v1` is the torrent of version 1 alone, whose peers are others
(p2pdist/model/torrent.py)."""

DOCUMENT_S = 5.0
"""How long a pull that is to come by a swarm waits for the torrent document before it begins with
trees."""

AWAY_S = 3.0
STILL_S = 1.0
"""Trees are left when trackers have been away for AWAY_S and no piece has come for STILL_S."""

UNFED_S = 2.0
"""Or when a stripe has had no source for so long."""

STUCK_S = 10.0
"""Trees are left, whatever the tracker says, when no piece has come for so long."""

SWARM_STILL_S = 8.0
ELSEWHERE_STILL_S = 4.0
"""A swarm is left when no piece has come for so long; the second where somebody else is known to
have something to give: a tracker has planned since the swarm was chosen, or there are peers of
version 1."""

PACES = 4.0
"""A piece is late, too, only when it takes several times as long as those before it."""

DOUBLINGS_MAX = 4


@dataclass(slots=True)
class TransportChoice:
    """See the module's text. `host` and `blob` say when this host moves among others; `torrent` is
    whether the blob has one, None while that is not known; `peers_v1` whether the swarm of version
    1 has any."""

    policy: Policy
    host: str
    blob: Digest
    started_at: float
    torrent: bool | None = None
    peers_v1: bool = False
    way: Way | None = None
    _tracker: bool = True
    _since: float = 0.0
    _progressed_at: float = 0.0
    _away_since: float = 0.0
    _fed_at: float = 0.0
    _planned: bool = False
    _swarmed: bool = False
    _barren: int = 0
    _pace_s: float = 0.0
    _spread: float = field(init=False)

    def __post_init__(self) -> None:
        self._spread = 1.0 + fraction(f"transport/{self.blob}".encode(), self.host)
        self._progressed_at = self._since = self._fed_at = self.started_at
        if self.policy == "trees":
            self.torrent = False

    def progressed(self, *, now: float) -> None:
        """A piece came."""
        if self._progressed_at > self._since:
            self._pace_s += 0.25 * (now - self._progressed_at - self._pace_s)
        self._progressed_at, self._barren = now, 0

    def planned(self) -> None:
        """There is a plan; it counts if a tracker made it."""
        self._planned = self._planned or self._tracker

    def tracker_changed(self, present: bool, *, now: float) -> None:
        """Whether a tracker answers from now on."""
        if present != self._tracker:
            self._tracker, self._away_since = present, now

    def choose(self, *, fed: bool, waited_for: bool = True, now: float) -> Way | None:
        """The way from now on; None while that waits for the torrent. `fed`: every stripe that
        lacks something has a source. `waited_for`: it is no preseed."""
        if fed or self.way != "trees":
            self._fed_at = now
        stays = self.policy == "auto" and self.way == "trees" and not waited_for
        way = self.way if stays else self._next(now)
        if way != self.way:
            if self.way is not None and self._progressed_at < self._since:
                self._barren = min(DOUBLINGS_MAX, self._barren + 1)
            self.way, self._since, self._planned = way, now, False
            self._swarmed = self._swarmed or way != "trees"
        return way

    def still_s(self, *, now: float) -> float:
        """How long the present way has given nothing."""
        return now - max(self._progressed_at, self._since)

    def _next(self, now: float) -> Way | None:
        if self.torrent is False:
            return "trees"
        if self.way is None:
            if self.policy == "swarm" and self.torrent is None and now - self.started_at < DOCUMENT_S:
                return None
            return "swarm" if self.policy == "swarm" and self.torrent else "trees"
        if self.way == "trees":
            return "swarm" if self.torrent and self._leaves_trees(now) else "trees"
        elsewhere = self._planned or (self.way == "swarm" and self.peers_v1)
        limit_s = ELSEWHERE_STILL_S if elsewhere else SWARM_STILL_S
        if self.still_s(now=now) < self._patience_s(limit_s):
            return self.way
        return "swarm-v1" if self.way == "swarm" and self.peers_v1 else "trees"

    def _leaves_trees(self, now: float) -> bool:
        still_s = self.still_s(now=now)
        if self.policy == "swarm" and not self._swarmed:
            return True  # its torrent came late
        if self._tracker or self.policy == "swarm":
            return still_s >= self._patience_s(STUCK_S)
        if now - self._away_since < AWAY_S * self._spread:
            return False
        return still_s >= self._patience_s(STILL_S) or now - self._fed_at >= self._patience_s(UNFED_S)

    def _patience_s(self, limit_s: float) -> float:
        return max(limit_s, PACES * self._pace_s) * self._spread * 2.0**self._barren
