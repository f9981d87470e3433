"""Eviction: which blobs and trees leave a store that needs room.

Theory: what a policy says is not to be kept goes first. What was used long ago is the least likely
to be asked for again, so it goes next. What no other host of the zone holds costs a read from the
origin to get back, so it goes only when all else has gone. Packs whose contents stand here as
objects are kept only to serve others, and go before what is needed to show something. Pinned things
and things in use never go, and what a tree needs (its catalogs) goes after the tree. Trees share
contents: what they share becomes free when the last of them goes.

It is all or nothing: when even everything that may go would not be enough, nothing goes, since that
would cost content and help nobody.
"""

from __future__ import annotations

from collections.abc import Sequence

from p2pdist.model.candidate import Candidate, Share
from p2pdist.model.digest import Digest


def evictable_bytes(candidates: Sequence[Candidate], shares: Sequence[Share] = ()) -> int:
    """Bytes that could be freed at most."""
    going = _order(candidates, shares)
    gone = {candidate.digest for candidate in going}
    return sum(candidate.size for candidate in going) + sum(share.size for share in shares if share.owners <= gone)


def choose(candidates: Sequence[Candidate], needed: int, shares: Sequence[Share] = ()) -> list[Digest] | None:
    """What to evict, in this order, so that at least `needed` bytes become free; the last one of
    the answer is not superfluous.

    An empty list when nothing is needed, None when it is impossible. Equal times are ordered by
    digest, so that the answer depends on the candidates alone.
    """
    staying = [set(share.owners) for share in shares]
    of_tree: dict[Digest, list[int]] = {}
    for number, share in enumerate(shares):
        for owner in share.owners:
            of_tree.setdefault(owner, []).append(number)
    freed = 0
    chosen: list[Digest] = []
    for candidate in _order(candidates, shares):
        if freed >= needed:
            break
        freed += candidate.size
        chosen.append(candidate.digest)
        for number in of_tree.get(candidate.digest, ()):
            staying[number].discard(candidate.digest)
            if not staying[number]:
                freed += shares[number].size
    return chosen if freed >= needed else None


def _order(candidates: Sequence[Candidate], shares: Sequence[Share]) -> list[Candidate]:
    """All that may go, in the order in which it would: least recently used first, each after the
    trees that need it."""
    with_share = {owner for share in shares if share.size for owner in share.owners}
    waiting = sorted((candidate for candidate in candidates if _may_go(candidate, with_share)), key=_rank)
    ordered: list[Candidate] = []
    gone: set[Digest] = set()
    while True:
        left = []
        for candidate in waiting:
            if candidate.needed_by <= gone:
                ordered.append(candidate)
                gone.add(candidate.digest)
            else:
                left.append(candidate)
        if len(left) == len(waiting):
            return ordered
        waiting = left


def _may_go(candidate: Candidate, with_share: set[Digest]) -> bool:
    # An empty blob frees nothing, so evicting it could only lose it.
    frees = candidate.size > 0 or candidate.digest in with_share
    return not candidate.pinned and not candidate.in_use and frees


def _rank(candidate: Candidate) -> tuple[bool, bool, bool, float, Digest]:
    return not candidate.first, candidate.last_copy_in_zone, not candidate.spare, candidate.last_used, candidate.digest
