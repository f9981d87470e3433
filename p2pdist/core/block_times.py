"""How long the kernel takes the blocks of each stream, and which streams are sluggish beside the
quickest.

Those that are left when the quick ones have gone are not quick for that: what a stream took that
was closed is forgotten slowly (FORGET_S). Else whoever came then would wait for each block of a
slow child, as if this host's link were that slow. Of open ones what counts is what their last
blocks took on average: a short one that an empty buffer takes at once says nothing about the link.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from p2pdist.core.turn_order import Claim

STUCK_TIMES = 4
STUCK_MAX_S = 1.0
SLUGGISH_TIMES = 5
SLUGGISH_MIN_S = 0.01
"""A block is stuck, and a stream sluggish, when it takes so many times as long as the quickest
stream's blocks, and at least so long; whatever these take, a block is stuck after STUCK_MAX_S."""

FORGET_S = 1.0
"""After so long twice the time of a stream that is gone counts as quick."""


@dataclass(slots=True)
class BlockTimes:
    """See the module's text. Times are in seconds."""

    _quickest_byte_s: float = 0.0
    _left_byte_s: float = 0.0
    _left_at: float = 0.0

    def learn(self, claim: Claim, byte_s: float, claims: Iterable[Claim], *, now: float) -> None:
        """The kernel took `byte_s` for a byte of this one of the `claims`."""
        claim.byte_s = byte_s if claim.byte_s == 0.0 else 0.75 * claim.byte_s + 0.25 * byte_s
        quickest = claim.byte_s
        for each in claims:  # for every block: no generator, and no call
            if 0.0 < each.byte_s < quickest:
                quickest = each.byte_s
        self._quickest_byte_s = min(quickest, self._remembered(now)) if self._left_byte_s else quickest

    def left(self, claim: Claim, *, now: float) -> None:
        """This one is gone. What it took is remembered if it was quick."""
        if claim.byte_s:
            self._left_byte_s, self._left_at = min(claim.byte_s, self._remembered(now) or claim.byte_s), now

    def _remembered(self, now: float) -> float:
        return self._left_byte_s * 2 ** min(64.0, (now - self._left_at) / FORGET_S)

    def usual_s(self, length: int) -> float:
        """How long a block of so many bytes may take."""
        return min(STUCK_MAX_S, STUCK_TIMES * self._quickest_byte_s * length)

    def sluggish(self, claim: Claim, length: int) -> bool:
        """Whether blocks of so many bytes take much longer than the quickest stream's would."""
        return claim.byte_s > SLUGGISH_TIMES * self._quickest_byte_s and claim.byte_s * length > SLUGGISH_MIN_S
