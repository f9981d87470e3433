"""Plans: from which host each host receives each stripe, as the tracker decides."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from msgspec import Meta

from p2pdist.model.digest import WireDigest
from p2pdist.model.ownership import Epoch

STRIPES_MAX = 1024
ALTERNATES_MAX = 64
KEEPERS_MAX = 64
HELD_CHARACTERS_MAX = 500
TICKET_CHARACTERS_MAX = 1024

# What decoding refuses. A name without white space and control characters can stand in a line of a
# log.
HostName = Annotated[str, Meta(max_length=255, pattern=r"\A[^\s\x00-\x1f\x7f-\x9f]*\Z")]
Address = Annotated[str, Meta(max_length=300, pattern=r"\A((\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9._-]+):[0-9]{1,5})?\Z")]
StripeNumber = Annotated[int, Meta(ge=0, lt=STRIPES_MAX)]


@dataclass(frozen=True, slots=True)
class Source:
    """Where a stripe comes from: an agent at `address` (host:port), or the origin when both fields
    are empty."""

    host: HostName
    address: Address

    @property
    def is_origin(self) -> bool:
        return not self.host and not self.address

    def __str__(self) -> str:
        return self.host or "origin"


ORIGIN = Source("", "")


@dataclass(frozen=True, slots=True)
class StripePlan:
    """The parent of one stripe and up to two alternates; without a parent the host waits for the
    next plan. Only the holder of a lease reads the origin, so ORIGIN as the parent is the lease.
    `bytes_s`: the stripe comes no faster than that, 0 for no limit; it crosses the WAN of a site
    that has a budget."""

    stripe: StripeNumber
    parent: Source | None
    alternates: Annotated[tuple[Source, ...], Meta(max_length=ALTERNATES_MAX)] = ()
    bytes_s: Annotated[float, Meta(ge=0)] = 0.0


@dataclass(frozen=True, slots=True)
class Plan:
    """Parents of some stripes of one blob for one host. A stripe that is not named keeps its
    parent. `keepers` are the superpeers of its zone: while no tracker answers, hosts receive from
    them, and only they read the origin; an empty tuple leaves the former ones. `dealt`: in a swarm
    the superpeers read the origin now, each its share, instead of the holders of leases
    (p2pdist/core/origin_seeding.py). `epoch` is that of the ownership by which the tracker planned
    (ownership.py), 0 where there is one tracker: a host that has a plan of a blob takes none of an
    older epoch. `held`: why the host's site waits with what comes from other sites, so that what it
    lacks may not come for hours, and a stripe without a parent is to end; empty: it waits no more;
    None: as before."""

    blob: WireDigest
    stripes: Annotated[tuple[StripePlan, ...], Meta(max_length=STRIPES_MAX)]
    keepers: Annotated[tuple[Source, ...], Meta(max_length=KEEPERS_MAX)] = ()
    dealt: bool = False
    epoch: Epoch = 0
    held: Annotated[str, Meta(max_length=HELD_CHARACTERS_MAX)] | None = None
