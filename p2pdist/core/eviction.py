"""Eviction and retention: which packages a store lets go by policy, and which blobs and trees leave
it when it needs room.

Theory of eviction (`choose`). What a policy says is not to be kept goes first. Packs whose contents
are in this store as objects are kept only to serve other hosts, and go next, before what is needed
to show something. Of the rest what was used longest ago is the least likely to be asked for again.
Pinned things and things in use never go, and what a tree needs (its
catalogs) goes after the tree. Trees share contents: what they share becomes free when the last of
them goes. It is all or nothing: when even everything that may go would not be enough, nothing goes,
since that would cost content and help no pull.

Theory of retention (`due`). A package is used while something shows, fetches, serves or pins any of
its blobs, and was used last when that ended. One that is kept for a time goes when it has not been
used for so long, one that is not kept after NONE_S: the user that pulled it may be about to show
it. The others stay until room is needed. Until then, too, what no package asks to be kept goes
before all else that may go.

Times are in seconds since the epoch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf

from p2pdist.model.candidate import Candidate, Share
from p2pdist.model.digest import Digest
from p2pdist.model.policy import PackagePolicy

NONE_S = 5.0


@dataclass(frozen=True, slots=True)
class StoredPackage:
    """A package in a store. `last_used` is None while it is in use."""

    reference: str
    policy: PackagePolicy
    blobs: tuple[Digest, ...]
    last_used: float | None


def lasts_s(policy: PackagePolicy) -> float:
    """For how long after its last use a package is kept though nothing else needs the room."""
    match policy.cache:
        case "none":
            return NONE_S
        case "ttl":
            return policy.ttl_s if policy.ttl_s is not None else inf
        case "lru" | "pin":
            return inf


def due(packages: Sequence[StoredPackage], *, now: float) -> list[str]:
    """The packages whose time is over, the longest unused first."""
    unused = [
        (package.last_used, package.reference)
        for package in packages
        if package.last_used is not None and now - package.last_used >= lasts_s(package.policy)
    ]
    return [reference for _, reference in sorted(unused)]


def goes_first(packages: Sequence[StoredPackage]) -> frozenset[Digest]:
    """Blobs that are evicted before all others: they belong only to packages that are not kept."""
    kept = {blob for package in packages if package.policy.cache != "none" for blob in package.blobs}
    return frozenset(blob for package in packages if package.policy.cache == "none" for blob in package.blobs) - kept


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
    """All that may go, in the order in which it would (`_rank`), each after the trees that need
    it."""
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


def _rank(candidate: Candidate) -> tuple[bool, bool, float, Digest]:
    return (
        not candidate.first,
        not candidate.redundant,
        candidate.last_used,
        candidate.digest,
    )
