"""Plans: who sends what to whom, as the tracker decides and agents follow."""

from __future__ import annotations

from dataclasses import dataclass

from p2pdist.model.digest import Digest


@dataclass(frozen=True, slots=True)
class Source:
    """Where a stripe comes from: an agent at `address` (host:port), or the origin when both fields are empty."""

    host: str
    address: str

    @property
    def is_origin(self) -> bool:
        return not self.host and not self.address

    def __str__(self) -> str:
        return self.host or "origin"


ORIGIN = Source("", "")


@dataclass(frozen=True, slots=True)
class StripePlan:
    """The parent of one stripe and up to two alternates; no parent means: wait for the next plan. Only the holder of a lease reads
    the origin, so ORIGIN as the parent is the lease."""

    stripe: int
    parent: Source | None
    alternates: tuple[Source, ...] = ()


@dataclass(frozen=True, slots=True)
class Plan:
    """Parents of some stripes of one blob for one host. A stripe that is not named keeps its parent."""

    blob: Digest
    stripes: tuple[StripePlan, ...]
