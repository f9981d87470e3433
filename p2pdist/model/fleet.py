"""Hosts, swarms and rankings as a tracker answers them (GET /v1/hosts, GET /v1/swarms, POST
/v1/rank)."""

from __future__ import annotations

import msgspec

from p2pdist.model.digest import Digest


class HostStatus(msgspec.Struct, frozen=True, gc=False):
    """A host. `absent_s` is how long ago its session ended, null while it is connected; `leaving`:
    its agent is about to end; `blobs` is the number of its swarms; `blamed` names the hosts that
    complained of it, and why. `site` is empty where the zone is a site by itself. `partial`: it has
    its home with another tracker."""

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


class HostDetail(HostStatus, frozen=True, gc=False, kw_only=True):
    """A host, and the blobs of its swarms. `uplink_bytes_s` is what it can send, by its own limit
    or as the tracker has learned it, and `download_bytes_s` its own limit of what it receives, null
    where these are not known."""

    swarms: list[Digest]
    uplink_bytes_s: float | None = None
    download_bytes_s: float | None = None


class SwarmStatus(msgspec.Struct, frozen=True):
    """A swarm. `complete` of its `hosts` have the whole blob; `progress` is the part of all their
    pieces that has arrived."""

    digest: Digest
    size: int
    pieces: int
    stripes: int
    hosts: int
    complete: int
    origin_leases: int
    progress: float


class MemberStatus(msgspec.Struct, frozen=True):
    """A host in a swarm: its pieces and its parent in each stripe ("" for the origin, null for
    none), whether it has the whole blob, and the number of its children."""

    host: str
    counts: list[int]
    parents: list[str | None]
    seed: bool
    children: int


class SwarmDetail(SwarmStatus, frozen=True):
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
