"""A job scheduler's requests to a tracker (POST /v1/preseeds, POST /v1/rank), and the record of a
preseed.

A preseed is an order: hosts shall hold a package by a deadline. The hosts are `hosts` by name, the
ones that `selector` matches (tracker/core/preseeds/selectors.py), or `count` of either or of all,
which the tracker picks; besides, `replicas` copies in each zone. `deadline` and `ttl` are seconds
from when the order is given, so that the same order given again reads the same. A package may be an
image, `docker://...`: each host holds that of its own platform, or all that of `platform`.
"""

from __future__ import annotations

import hashlib
import math
import re
from dataclasses import dataclass
from typing import Annotated, Literal, TypeVar

import msgspec
from msgspec import Meta

from p2pdist.model.digest import Digest
from p2pdist.model.errors import UNDECODABLE, TooLarge, UsageError
from p2pdist.model.messages import PreseedId, Priority
from p2pdist.model.plan import HostName

HOSTS_MAX = 20_000
"""Hosts that one request names."""

PACKAGES_MAX = 64
ROLES_MAX = 16
COUNT_MAX = 200_000
WAIT_S_MAX = 60.0
"""How long a tracker keeps a question for the progress waiting."""

REPLICAS_MAX = 100
SECONDS_MAX = 10 * 365 * 86400.0
BODY_BYTES_MAX = 1 << 20
ID_CHARACTERS_MAX = 128
OWN_DIGITS = 16
_OWN = "--"
_UNKNOWN = re.compile(r"unknown field `([^`]*)`")
_STEP = re.compile(r"\.(\w+)|\[(\d+)\]")
"""Of a place in a request as msgspec writes it, such as `$.roles[0].count`."""


PackageName = Annotated[str, Meta(min_length=1, max_length=512)]
Names = Annotated[tuple[Annotated[HostName, Meta(min_length=1)], ...], Meta(min_length=1, max_length=HOSTS_MAX)]
Selection = Annotated[str, Meta(min_length=1, max_length=2000)] | dict[str, str]
Number = Annotated[int, Meta(ge=1, le=COUNT_MAX)]
Seconds = Annotated[float, Meta(gt=0, le=SECONDS_MAX)]
Packages = Annotated[tuple[PackageName, ...], Meta(min_length=1, max_length=PACKAGES_MAX)]

PreseedState = Literal["running", "done", "failed", "cancelled", "expired"]
"""The state in a preseed's record. `done` means that it once was; `failed`, that its deadline
passed before it was."""

ShownState = Literal["pending", "running", "done", "failed", "cancelled", "expired"]
"""The state that a tracker shows: `pending` while no host is there, `failed` also where all hosts
are done or given up."""

ENDED: frozenset[PreseedState] = frozenset(["failed", "cancelled", "expired"])


class PreseedRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """Body of POST /v1/preseeds and PUT /v1/preseeds/{id}."""

    package: PackageName
    id: PreseedId | None = None
    hosts: Names | None = None
    selector: Selection | None = None
    count: Number | None = None
    replicas: Annotated[int, Meta(ge=1, le=REPLICAS_MAX)] | None = None
    priority: Priority = "preseed"
    deadline: Seconds | None = None
    ttl: Seconds | None = None
    platform: Annotated[str, Meta(min_length=1, max_length=64)] | None = None
    callback: Annotated[str, Meta(min_length=1, max_length=1000)] | None = None
    """A URL that the tracker tells of the end (p2pdist/model/callback.py)."""


class Role(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One part of a job: `count` hosts that need `packages`."""

    name: Annotated[str, Meta(min_length=1, max_length=255)]
    packages: Packages
    count: Number


class RankRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """Body of POST /v1/rank; exactly one of packages and roles."""

    packages: Packages | None = None
    roles: Annotated[tuple[Role, ...], Meta(min_length=1, max_length=ROLES_MAX)] | None = None
    hosts: Names | None = None
    selector: Selection | None = None
    count: Number | None = None
    coherent: Literal["rack"] | None = None

    @property
    def named(self) -> tuple[str, ...]:
        """The packages that it names, of all roles."""
        return (*(self.packages or ()), *(package for role in self.roles or () for package in role.packages))


@dataclass(frozen=True, slots=True)
class Failure:
    """A host that does not hold a preseed's package. `reason` is a problem's slug, "not-connected",
    "deadline" or "replaced"."""

    host: str
    reason: str
    detail: str = ""


CallState = Literal["done", "failed", "cancelled", "expired"]


@dataclass(frozen=True, slots=True)
class Call:
    """What the callback of a preseed was told last, or is being told: `tries` attempts were begun,
    the next one is due at `at` (seconds since the epoch), unless it is `told`."""

    state: CallState
    tries: int
    at: float
    told: bool = False


@dataclass(frozen=True, slots=True)
class PreseedRecord:
    """A preseed as it outlives a tracker. `version` counts its changes; `body` is the request in
    canonical form; `package` the reference by digest that it meant then; `blobs` the blobs that
    hosts need, with sizes in bytes; `picked` the hosts that trackers chose; `owner` the identity
    that ordered it, empty where access was off; `source` then the address that it came from. Times
    are in seconds since the epoch."""

    id: str
    version: int
    body: str
    package: str
    blobs: tuple[tuple[Digest, int], ...]
    state: PreseedState
    created_at: float
    picked: tuple[str, ...] = ()
    deadline_at: float | None = None
    expires_at: float | None = None
    done_at: float | None = None
    ended_at: float | None = None
    owner: str = ""
    call: Call | None = None
    source: str = ""

    @property
    def request(self) -> PreseedRequest:
        return msgspec.json.decode(self.body, type=PreseedRequest)


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a preseed is. While it is not `settled` hosts may be on their way back to a tracker
    that was started again, and are not in `hosts_total`. `hosts_absent` counts members, and lost
    hosts that the selector matches, that are connected nowhere. Bytes count layers, over all hosts.
    `failures` are in the order of their reasons, at most 1000. `notes` tell people
    what the preseed waits for that may never come. `owner` is the identity that ordered it, empty
    where access was off. `waiting` are connected hosts that do not hold the package yet, those with
    the fewest bytes first, at most 20. `asked` is the package as the order named it,
    `package` what that meant then."""

    id: str
    state: ShownState
    settled: bool
    package: str
    priority: str
    hosts_total: int
    hosts_done: int
    hosts_absent: int
    bytes_total: int
    bytes_done: int
    eta_s: float | None
    failures: list[Failure]
    failures_by_reason: dict[str, int]
    replicas: dict[str, int]
    picked: tuple[str, ...]
    created_at: float
    deadline_at: float | None
    expires_at: float | None
    notes: tuple[str, ...] = ()
    owner: str = ""
    waiting: tuple[str, ...] = ()
    asked: str = ""


class PreseedBrief(msgspec.Struct, frozen=True):
    """A preseed without what depends on its hosts. `fingerprint` is the hash of its order."""

    id: str
    state: PreseedState
    package: str
    fingerprint: str


class PreseedSummary(msgspec.Struct, frozen=True):
    """A preseed in short. `created_at` is in seconds since the epoch; `owner` is the identity that
    ordered it, empty where access was off."""

    id: str
    state: ShownState
    package: str
    hosts_total: int
    hosts_done: int
    created_at: float
    owner: str = ""


Body = TypeVar("Body", bound=msgspec.Struct)


def decode_request(data: bytes, kind: type[Body]) -> Body:
    """The body of a request. Raises UsageError, TooLarge."""
    if len(data) > BODY_BYTES_MAX:
        raise TooLarge(f"a request of {len(data)} bytes is over the limit of {BODY_BYTES_MAX}")
    try:
        return msgspec.json.decode(data, type=kind)
    except UNDECODABLE as error:
        raise _mistake(" ".join(str(error).split())[:300], kind) from error


def _mistake(text: str, kind: type[msgspec.Struct]) -> UsageError:
    """What is wrong with a request, by the text of msgspec, and where (RFC 9457: `errors`, each
    with a JSON pointer as fragment). A field that is unknown is answered with those that are
    known."""
    what, _, place = text.partition(" - at `$")
    steps = [first or second for first, second in _STEP.findall(place)]
    remedy = "See docs/protocol.md"
    if unknown := _UNKNOWN.search(what):
        from difflib import get_close_matches

        names = msgspec.structs.fields(Role if steps[:1] == ["roles"] else kind)
        known = [each.encode_name for each in names]
        steps.append(unknown[1])
        guess = get_close_matches(unknown[1][:64], known, n=1)
        remedy = f"Known fields are {', '.join(known)}" + (f". Did you mean {guess[0]}?" if guess else "")
    pointer = "#" + "".join(f"/{step.replace('~', '~0').replace('/', '~1')}" for step in steps)
    return UsageError(f"malformed request: {text}", remedy=remedy, errors=[{"detail": what, "pointer": pointer}])


def canonical(request: PreseedRequest) -> str:
    """A preseed's request without its id, as JSON: equal for orders that mean the same. Raises
    UsageError for an order that names no hosts."""
    if request.hosts is not None and request.selector is not None:
        raise UsageError("a preseed names hosts or a selector, not both")
    if request.hosts is None and request.selector is None and request.count is None and request.replicas is None:
        raise UsageError("a preseed names no hosts", remedy="Give hosts, a selector, a count, or replicas")
    hosts = tuple(sorted(set(request.hosts))) if request.hosts is not None else None
    plain = msgspec.structs.replace(request, id=None, hosts=hosts)
    return msgspec.json.encode(plain, order="deterministic").decode()


def quorum_hosts(share: float, hosts: int) -> int:
    """How many of some hosts a share of them is: 0.999 of 1000 is 999, whatever floating point
    says."""
    return math.ceil(share * hosts - 1e-9)


def own_id(identifier: str, owner: str) -> str:
    """The id under which a preseed of `owner` is kept when another's has the id that it was given;
    the same again where that is too long to be made another of."""
    kept = f"{identifier}{_OWN}{hashlib.sha256(f'{owner} {identifier}'.encode()).hexdigest()[:OWN_DIGITS]}"
    return kept if len(kept) <= ID_CHARACTERS_MAX else identifier


def given_id(kept: str, owner: str) -> str:
    """The id that `owner` gave a preseed, by the id under which it is kept."""
    given = kept[: -OWN_DIGITS - len(_OWN)]
    return given if given and own_id(given, owner) == kept else kept


def fingerprint(body: str) -> str:
    """A short name of an order's canonical form."""
    return hashlib.sha256(body.encode()).hexdigest()
