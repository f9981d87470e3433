"""Eviction: which blobs leave a store that needs room.

Theory: blobs that were used long ago are the least likely to be asked for again, so they go first. A blob that no other host of the zone
holds costs a read from the origin to get back, so such blobs go only when all others have gone. Pinned blobs and blobs in use never go.
It is all or nothing: when even everything that may go would not be enough, nothing goes, since that would cost content and help nobody.
"""

from __future__ import annotations

from collections.abc import Sequence

from p2pdist.model.candidate import Candidate
from p2pdist.model.digest import Digest


def evictable_bytes(candidates: Sequence[Candidate]) -> int:
    """Bytes that could be freed at most."""
    return sum(candidate.size for candidate in candidates if _may_go(candidate))


def choose(candidates: Sequence[Candidate], needed: int) -> list[Digest] | None:
    """The blobs to evict, in this order, so that at least `needed` bytes become free; no blob of the answer is superfluous at its end.

    An empty list when nothing is needed, None when it is impossible. Equal times are ordered by digest, so that the answer
    depends on the candidates alone.
    """
    freed = 0
    chosen: list[Digest] = []
    for candidate in sorted(filter(_may_go, candidates), key=_order):
        if freed >= needed:
            break
        freed += candidate.size
        chosen.append(candidate.digest)
    return chosen if freed >= needed else None


def _may_go(candidate: Candidate) -> bool:
    # An empty blob frees nothing, so evicting it could only lose it.
    return not candidate.pinned and not candidate.in_use and candidate.size > 0


def _order(candidate: Candidate) -> tuple[bool, float, Digest]:
    return candidate.last_copy_in_zone, candidate.last_used, candidate.digest
