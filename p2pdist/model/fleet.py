"""Hosts, swarms, rankings and evictions as a tracker answers them (GET /v1/hosts, GET /v1/swarms,
POST /v1/rank, POST /v1/evictions)."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from p2pdist.model.digest import Digest
from p2pdist.model.plan import HostName

EVICTION_S_MAX = 60.0
"""How long an eviction may wait for the answers of hosts."""

UNANSWERED_HEADER = "P2PDist-Unanswered"
"""Names the trackers that said nothing to a question which one answers for the whole fleet."""

EVICTION_HOSTS_MAX = 20_000
EVICTION_HOSTS_SHOWN_MAX = 1000


class HostStatus(msgspec.Struct, frozen=True, gc=False):
    """A host. `absent_s` is how long ago its session ended, null while it is connected; `leaving`:
    its agent is about to end; `blobs` is the number of its swarms; `blamed` names the hosts that
    complained of it, and why. `site` is empty where the zone is a site by itself. `partial`: it has
    its home with another tracker. `drained`: an operator has it serve no other host."""

    host: str
    address: str
    zone: str
    rack: str
    present: bool
    absent_s: float | None
    leaving: bool
    blobs: int
    blamed: dict[str, str]
    site: str = ""
    partial: bool = False
    drained: bool = False


class HostDetail(HostStatus, frozen=True, gc=False, kw_only=True):
    """A host, and the blobs of its swarms. `uplink_bytes_s` is what it can send, by its own limit
    or as the tracker has learned it, and `download_bytes_s` its own limit of what it receives, null
    where these are not known. What its agent last said stands behind them, null where it says
    nothing: its `version`, the bytes of its store and their limit (null: the disk alone), the free
    bytes of its disk, how many views it shows, and of which packages, the first of them."""

    swarms: list[Digest]
    uplink_bytes_s: float | None = None
    download_bytes_s: float | None = None
    version: str | None = None
    store_bytes: int | None = None
    capacity_bytes: int | None = None
    disk_free_bytes: int | None = None
    mounts: int | None = None
    mounted: list[str] = []


class EvictRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Body of POST /v1/evictions: `package` leaves the stores of some `hosts`, of those that match
    a `selector` such as "zone=eu-1", or with `everywhere` of all that are connected; one of the
    three is given. With a `digest`, of the package's manifest, all names of that package go. The
    answer comes when all hosts have answered, at most after `wait_s`."""

    package: Annotated[str, Meta(min_length=1, max_length=512)]
    digest: Annotated[str, Meta(pattern=r"\A(sha256:[0-9a-f]{64})?\Z")] = ""
    hosts: Annotated[tuple[HostName, ...], Meta(max_length=EVICTION_HOSTS_MAX)] = ()
    selector: Annotated[str, Meta(max_length=4096)] = ""
    everywhere: bool = False
    wait_s: Annotated[float, Meta(ge=0, le=EVICTION_S_MAX)] = 20.0


class EvictedHost(msgspec.Struct, frozen=True):
    """A host that evicted a package, and what became free."""

    host: str
    bytes_freed: int


class StayedHost(msgspec.Struct, frozen=True):
    """A host that keeps a package, and why."""

    host: str
    reason: str


class Eviction(msgspec.Struct, frozen=True):
    """What came of an eviction: of the hosts that were `asked` so many `evicted` the package and
    freed `bytes_freed` together, `lacked` did not have it, in `stayed` it stays, and `silent` have
    not answered and may still evict it. The first EVICTION_HOSTS_SHOWN_MAX of each are named.
    `unanswered` are trackers that did not answer, whose hosts were perhaps not asked; and
    `absent_hosts` those that the request named and that are connected to no tracker that did:
    the package stays there if they have it."""

    package: str
    asked: int
    evicted: int
    bytes_freed: int
    lacked: int
    stayed: int
    silent: int
    seconds: float
    evicted_hosts: list[EvictedHost]
    stayed_hosts: list[StayedHost]
    silent_hosts: list[str]
    unanswered: list[str] = []
    absent_hosts: list[str] = []


class Me(msgspec.Struct, frozen=True):
    """Answer to GET /v1/me: what the sender of the request is, and its rights. `kind` is "open"
    where access is off and every request may do everything; "anonymous" for one that shows neither
    token nor certificate. `read` are the patterns of the packages that it may read."""

    kind: str
    name: str
    rights: list[str]
    read: list[str]


class SwarmStatus(msgspec.Struct, frozen=True):
    """A swarm. `complete` of its `hosts` have the whole blob; `progress` is the part of all their
    pieces that has arrived. `waiting`: by site that waits with what comes over its WAN, why."""

    digest: Digest
    size: int
    pieces: int
    stripes: int
    hosts: int
    complete: int
    origin_leases: int
    progress: float
    waiting: dict[str, str] = {}


class MemberStatus(msgspec.Struct, frozen=True):
    """A host in a swarm: its pieces and its parent in each stripe ("" for the origin, null for
    none), whether it has the whole blob, and the number of its children."""

    host: str
    counts: list[int]
    parents: list[str | None]
    seed: bool
    children: int


class SwarmDetail(SwarmStatus, frozen=True, kw_only=True):
    """A swarm and its members."""

    members: list[MemberStatus]


class StoryEvent(msgspec.Struct, frozen=True):
    """What happened in a swarm `age_s` seconds ago."""

    age_s: float
    event: str


class Ranked(msgspec.Struct, frozen=True, gc=False):
    """A host and what it lacks. `present`: its agent is connected and not about to end. A struct,
    because ten thousand dataclasses take a quarter of the time of an answer to make."""

    host: str
    bytes_missing: int
    bytes_total: int
    seconds_estimated: float
    present: bool = True


class RoleHosts(msgspec.Struct, frozen=True):
    """The hosts that a role of a job gets."""

    role: str
    hosts: list[Ranked]


class Assignment(msgspec.Struct, frozen=True):
    """The hosts of all roles of a job, and the bytes that all of these together lack."""

    assignment: list[RoleHosts]
    bytes_missing: int
