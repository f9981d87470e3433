"""Candidates for eviction: what a store says about blobs and trees, and the form of the decision it
is handed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from p2pdist.model.digest import Digest


@dataclass(frozen=True, slots=True)
class Candidate:
    """A stored blob or tree that might make room. `size` is bytes freed by its going alone,
    `last_used` seconds since the epoch. The store does not know whether it holds the zone's last
    copy; whoever does sets it.

    `spare`: nothing here needs it to show something; it is kept only to serve others. `needed_by`:
    trees without which alone it can go. `first`: a policy says that it is not to be kept.
    """

    digest: Digest
    size: int
    last_used: float
    pinned: bool = False
    in_use: bool = False
    last_copy_in_zone: bool = False
    spare: bool = False
    needed_by: frozenset[Digest] = frozenset()
    first: bool = False


@dataclass(frozen=True, slots=True)
class Share:
    """`size` bytes that several trees have in common: free when all `owners`, which are candidates,
    have gone."""

    owners: frozenset[Digest]
    size: int


Chooser = Callable[[Sequence[Candidate], int, Sequence[Share]], list[Digest] | None]
"""Given candidates, bytes to free, and what candidates share: what to evict, in order; None when
all that may go would not be enough."""
