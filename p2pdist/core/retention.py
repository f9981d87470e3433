"""Retention: which packages a store lets go, by what policies say of how they are kept.

Theory. A package is used while something shows, fetches, serves or pins any of its blobs, and was
used last when that ended. One that is kept for a time goes when it has not been used for so long,
one that is not kept after NONE_S: whoever pulled it may be about to show it. The others stay until
room is needed. Until then, too, what no package asks to be kept goes before all else that may go
(eviction.py).

Times are in seconds since the epoch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf

from p2pdist.model.digest import Digest
from p2pdist.model.policy import PackagePolicy

NONE_S = 5.0


@dataclass(frozen=True, slots=True)
class Stored:
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


def due(packages: Sequence[Stored], *, now: float) -> list[str]:
    """The packages whose time is over, the longest unused first."""
    over = [
        (package.last_used, package.reference)
        for package in packages
        if package.last_used is not None and now - package.last_used >= lasts_s(package.policy)
    ]
    return [reference for _, reference in sorted(over)]


def goes_first(packages: Sequence[Stored]) -> frozenset[Digest]:
    """Blobs that are evicted before all others: those of packages that are not kept, and of no
    others."""
    kept = {blob for package in packages if package.policy.cache != "none" for blob in package.blobs}
    return frozenset(blob for package in packages if package.policy.cache == "none" for blob in package.blobs) - kept
