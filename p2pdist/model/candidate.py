"""Candidates for eviction: what a store knows of its blobs and trees, and the signature of the
function that chooses which of them go."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from p2pdist.model.digest import Digest


@dataclass(frozen=True, slots=True)
class Candidate:
    """A stored blob or tree that might make room. `size` is the bytes that its removal alone frees,
    `last_used` seconds since the epoch.

    `redundant`: no mounted view of this host needs it; it is kept only to serve other hosts.
    `needed_by`: the trees that must be removed with it. `first`: a policy says that it is not to be
    kept.
    """

    digest: Digest
    size: int
    last_used: float
    pinned: bool = False
    in_use: bool = False
    redundant: bool = False
    needed_by: frozenset[Digest] = frozenset()
    first: bool = False


@dataclass(frozen=True, slots=True)
class Share:
    """`size` bytes that several trees have in common: free when all `owners`, which are candidates,
    were removed."""

    owners: frozenset[Digest]
    size: int


Chooser = Callable[[Sequence[Candidate], int, Sequence[Share]], list[Digest] | None]
"""From candidates, bytes to free and what candidates share: what to evict, in order; None when
evicting all that may go would not be enough."""
