"""Candidates for eviction: what a store says about a blob, and the form of the decision it is handed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from p2pdist.model.digest import Digest


@dataclass(frozen=True, slots=True)
class Candidate:
    """A stored blob that might make room. `size` is bytes freed, `last_used` seconds since the epoch. The store does not know
    whether it holds the zone's last copy; whoever does sets it."""

    digest: Digest
    size: int
    last_used: float
    pinned: bool = False
    in_use: bool = False
    last_copy_in_zone: bool = False


Chooser = Callable[[Sequence[Candidate], int], list[Digest] | None]
"""Given candidates and bytes to free: the blobs to evict, in order; None when all that may go would not be enough."""
