"""One host in a swarm, as the tracker knows it."""

from __future__ import annotations

from dataclasses import dataclass, field
from math import inf

from p2pdist.model.plan import Source


@dataclass(frozen=True, slots=True)
class Lag:
    """Since when a host lags behind its parent, and how many pieces of the stripe it had then."""

    since: float
    count: int


@dataclass(slots=True)
class Member:
    """One host in a swarm. `counts`: verified pieces per stripe; `seats`: seats allotted per
    stripe; `parents`: host name, FROM_ORIGIN or None, per stripe; `children`: host names, in the
    order in which they came; `complaints`: how often the host complained in a stripe since it last
    got a piece of it; `moved_at`: when pieces of a stripe last came, or its parent changed;
    `attached_at`: when its parent changed; `pace`: pieces a second of late; `lags`: since when it
    lags behind its parent, if it does (progress.py); `heard_at`: when it last reported; `light`:
    its downlink is so slow that it takes no seat; `relieved_at`: when it lost its seats;
    `fair_reports`: so many in a row said that it is not light; `taken`: seats that its children
    take, per stripe; `order`: a number that orders hosts differently for each blob; `keepers`:
    those that the host was told of in its session."""

    host: str
    counts: list[int]
    seats: list[int]
    parents: list[str | None]
    children: list[dict[str, None]]
    joined_at: float
    budget: int
    complaints: list[int]
    moved_at: list[float]
    attached_at: list[float]
    pace: list[float]
    lags: list[Lag | None]
    order: int
    zone: str = ""
    rack: str = ""
    seed: bool = False
    absent_since: float | None = None
    silent: bool = False
    heard_at: float = 0.0
    light: bool = False
    relieved_at: float = -inf
    fair_reports: int = 0
    taken: list[int] = field(default_factory=list)
    keepers: tuple[Source, ...] = ()

    @property
    def present(self) -> bool:
        """Whether the host has said in its present session what it holds."""
        return self.absent_since is None

    @property
    def spare(self) -> int:
        """Seats of the budget that are allotted to no stripe."""
        return self.budget - sum(self.seats)

    def free(self, stripe: int) -> int:
        return self.seats[stripe] - self.taken[stripe]

    @property
    def load(self) -> int:
        """Seats that children take, in all stripes."""
        return sum(self.taken)
