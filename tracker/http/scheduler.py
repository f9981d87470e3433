"""Routes for operators and job schedulers: hosts, swarms and their stories; preseeds and rankings.

Answers are encoded by msgspec: no session is served while one is made, and ten thousand hosts take
it 1.5 ms, the standard library 10 ms.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any, TypeVar

import msgspec
from aiohttp import web

from p2pdist.model.access import Identity, Right
from p2pdist.model.digest import Digest, parse_digest
from p2pdist.model.errors import (
    UNDECODABLE,
    Conflict,
    Corrupt,
    NotFound,
    Refused,
    TooLarge,
    Unavailable,
    UsageError,
    printable,
)
from p2pdist.model.fleet import (
    UNANSWERED_HEADER,
    Assignment,
    HostDetail,
    HostStatus,
    MemberStatus,
    Ranked,
    StoryEvent,
    SwarmDetail,
    SwarmStatus,
)
from p2pdist.model.hub import is_hub, parse_hub
from p2pdist.model.image import is_image, parse_image
from p2pdist.model.manifest import Descriptor, parse_reference
from p2pdist.model.messages import Reachability
from p2pdist.model.preseed import (
    WAIT_S_MAX,
    PreseedBrief,
    PreseedRequest,
    PreseedSummary,
    Progress,
    RankRequest,
    decode_request,
    given_id,
    own_id,
    quorum_hosts,
)
from p2pdist.transfer.connections import address_key
from p2pdist.transfer.guard import identity_of
from p2pdist.transfer.openapi import Answer, Query, Route
from p2pdist.transfer.places import Places
from tracker.access.sessions import SessionAccess
from tracker.core.affinity import Affinity, Parts
from tracker.core.host import Host
from tracker.core.preseeds.selectors import near, no_match, parse_selector
from tracker.core.swarm import Swarm
from tracker.http.keys import PRESEEDS, SERVICE
from tracker.http.trackers import LOCAL_QUERY, fleet_affinity, from_others, from_owner
from tracker.preseed_service import TICK_S, PreseedService, sees

NOTE = "P2pdist-Note"
_HOSTS = "p2pdist hosts lists them"
"""Header field of a ranking without hosts: why there are none."""

WAITING_MAX, WAITING_PER_ADDRESS_MAX = 1000, 500
"""Questions for a preseed's progress that wait at one time, in all and from one address; further
ones are answered at once."""


_Row = TypeVar("_Row")
_hosts_decoder = msgspec.json.Decoder(list[HostStatus])
_host_decoder = msgspec.json.Decoder(HostDetail)
_swarms_decoder = msgspec.json.Decoder(list[SwarmStatus])


def _answer(body: Any, status: int = 200, *, headers: Mapping[str, str] | None = None) -> web.Response:
    encoded = msgspec.json.encode(body)
    return web.Response(body=encoded, status=status, content_type="application/json", headers=headers)


def _decoded(body: bytes, decoder: msgspec.json.Decoder[list[_Row]]) -> list[_Row]:
    """What another tracker answered; nothing of one whose version answers otherwise."""
    try:
        return decoder.decode(body)
    except UNDECODABLE:
        return []


def _decoded_one(body: bytes) -> HostDetail | None:
    try:
        return _host_decoder.decode(body)
    except UNDECODABLE:
        return None


def _host(host: Host) -> HostStatus:
    absent_s = None
    if host.session is None and host.absent_since is not None:
        absent_s = round(max(0.0, time.monotonic() - host.absent_since), 1)
    return HostStatus(
        host.name,
        host.address,
        host.zone,
        host.rack,
        host.session is not None,
        absent_s,
        host.leaving,
        len(host.swarms),
        {name: reason for name, (reason, _) in host.penalties.items()},
        host.site,
        host.partial,
        host.drained,
    )


_Status = TypeVar("_Status", bound=HostStatus)


def _joined(statuses: Iterable[_Status]) -> list[_Status]:
    """The hosts as several trackers see them, each once: as its home sees it, with what the others
    know of its blobs."""
    joined: dict[str, _Status] = {}
    for status in statuses:
        other = joined.get(status.host)
        if other is None:
            joined[status.host] = status
            continue
        first, second = sorted((other, status), key=lambda each: (not each.present, each.partial))
        both = {"blobs": first.blobs + second.blobs, "blamed": {**second.blamed, **first.blamed}}
        if isinstance(first, HostDetail) and isinstance(second, HostDetail):
            both["swarms"] = list(dict.fromkeys((*first.swarms, *second.swarms)))
        joined[status.host] = msgspec.structs.replace(first, **both)
    return list(joined.values())


def _swarm(swarm: Swarm) -> SwarmStatus:
    pieces = sum(swarm.totals)
    held = sum(sum(member.counts) for member in swarm.members.values())
    return SwarmStatus(
        swarm.blob,
        swarm.layout.size,
        pieces,
        swarm.stripes,
        len(swarm.members),
        len(swarm.members) - swarm.receivers,
        swarm.leases(),
        held / max(1, pieces * len(swarm.members)),
        dict(swarm.wan.waiting),
    )


async def hosts(request: web.Request) -> web.Response:
    """List the hosts that are connected, and the ones whose sessions broke in the last hour."""
    fleet = request.app[SERVICE].fleet
    rows = [_host(host) for host in (*fleet.hosts.values(), *fleet.lost.values())]
    bodies, unanswered = await from_others(request)
    for body in bodies:
        rows += _decoded(body, _hosts_decoder)
    return _answer(_joined(rows) if bodies else rows, headers=unanswered)


async def host(request: web.Request) -> web.Response:
    """Describe one host."""
    name = request.match_info["name"]
    fleet = request.app[SERVICE].fleet
    host = fleet.hosts.get(name) or fleet.lost.get(name)
    details: list[HostDetail] = []
    if host is not None:
        swarms = [fleet.swarms[key].blob for key in host.swarms if key in fleet.swarms]
        details.append(
            HostDetail(
                **msgspec.structs.asdict(_host(host)),
                swarms=_readable(request, swarms),
                uplink_bytes_s=fleet.capacities.uplink(name),
                download_bytes_s=host.download_bytes_s or None,
                **_condition(request, name),
            )
        )
    bodies, unanswered = await from_others(request)
    details += [detail for body in bodies if (detail := _decoded_one(body)) is not None and detail.host == name]
    if not details and unanswered:
        raise Unavailable(
            f"no host named {name[:255]!r} is known here, and no answer came from {', '.join(unanswered.values())}",
            remedy="Ask again in a few seconds: another tracker takes its place",
        )
    if not details:
        guess = near(name[:255], fleet.hosts)
        raise NotFound(
            f"no host named {name[:255]!r} is known here", remedy=f"Did you mean {guess}?" if guess else _HOSTS
        )
    return _answer(_joined(details)[0], headers=unanswered)


def _condition(request: web.Request, name: str) -> dict[str, Any]:
    """What a host last said of itself. Of what it shows, the packages that the identity may
    read."""
    condition, identity = request.app[SERVICE].desk.conditions.get(name), identity_of(request)
    if condition is None:
        return {}
    fields = msgspec.structs.asdict(condition)
    names = [text for text in condition.mounted if identity.reads_everything or identity.may_read([_name(text)])]
    return {**fields, "mounted": names}


def _name(reference: str) -> str:
    """The name in a reference, without tag and digest."""
    head, _, last = reference.partition("@")[0].rpartition("/")
    return f"{head}/{last.partition(':')[0]}" if head else last.partition(":")[0]


async def reachability(request: web.Request) -> web.Response:
    """Connect to a host and say whether it can be reached at its address."""
    name, identity = request.match_info["name"], identity_of(request)
    if not identity.may("watch") and identity.name != name:
        raise NotFound(f"no host named {name[:255]!r} is known here", remedy=_HOSTS)
    return _answer(await request.app[SERVICE].reach.look(name, request.remote or ""))


def _readable(request: web.Request, digests: Iterable[Digest]) -> list[Digest]:
    """Those of some blobs that the identity may read."""
    identity, book = identity_of(request), request.app[SERVICE].fleet.policies
    if identity.reads_everything:
        return list(digests)
    return [digest for digest in digests if identity.may_read(book.readers_of(digest))]


def _find_swarm(request: web.Request) -> Swarm:
    digest = parse_digest(request.match_info["digest"])
    swarm = request.app[SERVICE].fleet.swarms.get(digest)
    if swarm is None or not _readable(request, [swarm.blob]):
        raise NotFound(f"no agent holds or wants {digest}")
    return swarm


async def swarms(request: web.Request) -> web.Response:
    """List the swarms of blobs that the identity may read."""
    swarms = request.app[SERVICE].fleet.swarms.values()
    readable = set(_readable(request, (swarm.blob for swarm in swarms)))
    rows = [_swarm(swarm) for swarm in swarms if swarm.blob in readable]
    bodies, unanswered = await from_others(request)
    for body in bodies:
        rows += _decoded(body, _swarms_decoder)
    return _answer(rows, headers=unanswered)


async def swarm(request: web.Request) -> web.Response:
    """Describe one swarm, with each member's progress and parents."""
    elsewhere = await from_owner(request, parse_digest(request.match_info["digest"]))
    if elsewhere is not None:
        return elsewhere
    swarm = _find_swarm(request)
    members = [
        MemberStatus(member.host, list(member.counts), member.parents, member.seed, member.load)
        for member in swarm.members.values()
    ]
    return _answer(SwarmDetail(**msgspec.structs.asdict(_swarm(swarm)), members=members))


async def story(request: web.Request) -> web.Response:
    """Tell what happened in a swarm, the newest event last."""
    elsewhere = await from_owner(request, parse_digest(request.match_info["digest"]))
    if elsewhere is not None:
        return elsewhere
    now = time.monotonic()
    return _answer([StoryEvent(round(now - moment, 3), text) for moment, text in _find_swarm(request).story])


# -- preseeds and rankings

_SEE: tuple[Right, ...] = ("watch", "cancel-any")
"""Rights that show the preseeds of others."""


async def _create(request: web.Request, order: PreseedRequest) -> web.Response:
    identity, access = identity_of(request), request.app[SERVICE].access
    if access is None:
        progress, created = await request.app[PRESEEDS].create(order, source=address_key(request.remote or ""))
        return _answer(progress, 201 if created else 200)
    found = await _require_package(access, identity, order.package)
    if found is not None:
        await access.packages.vouch(parse_reference(order.package).name, found.digest)
    progress, created = await request.app[PRESEEDS].create(
        order, owner=str(identity), sees=lambda record: sees(record, identity, *_SEE)
    )
    if created:
        _note(request, "preseed", progress.id, package=progress.package)
    return _answer(replace(progress, id=order.id or progress.id), 201 if created else 200)


async def _require_package(access: SessionAccess, identity: Identity, text: str) -> Descriptor | None:
    """The manifest of a package that the identity may read; None for an image or
    a repository of a hub, of which its name says enough: upstream is asked for what belongs to it.
    Raises NotFound."""
    if is_image(text):
        access.images.require(identity, parse_image(text).name)
        return None
    if is_hub(text):
        name = str(parse_hub(text).name)
        identity.require_read([name], name)
        return None
    return await access.packages.find(identity, parse_reference(text))


def _note(request: web.Request, event: str, name: str, **more: str) -> None:
    """Write a change to the audit."""
    access = request.app[SERVICE].access
    if access is not None:
        identity, address = identity_of(request), request.remote or ""
        access.control.audit.note(
            event, identity=identity, address=address, right="preseed", subject=f"preseed:{name}", **more
        )


async def _own(request: web.Request, *rights: Right) -> str:
    """The id under which the preseed in the path is kept. Raises NotFound for one that the
    identity neither ordered nor has a right to see, Unavailable."""
    service, given, identity = request.app[PRESEEDS], request.match_info["id"], identity_of(request)
    if identity.kind == "open":
        await service.know(given)
        return given
    own = own_id(given, str(identity))
    if own not in service.core.by_id and not service.visible(given, identity, *rights):
        await service.know(own, given)
    kept = own if own in service.core.by_id else given
    if not service.visible(kept, identity, *rights):
        raise NotFound(f"there is no preseed {given[:128]!r}", remedy="p2pdist preseed --list names them")
    return kept


async def preseed(request: web.Request) -> web.Response:
    """Order a preseed. The answer is 201 for a new order, 200 for one that was given before."""
    return await _create(request, decode_request(await request.read(), PreseedRequest))


async def put_preseed(request: web.Request) -> web.Response:
    """Order a preseed under this id. The answer is 201 for a new order, 200 for one that was given
    before."""
    order = decode_request(await request.read(), PreseedRequest)
    plain = {**msgspec.to_builtins(order), "id": request.match_info["id"]}
    named = decode_request(msgspec.json.encode(plain), PreseedRequest)
    if order.id not in (None, named.id):
        raise UsageError(f"the preseed in the body is {order.id}, the one in the path {named.id}")
    return await _create(request, named)


async def preseeds(request: web.Request) -> web.Response:
    """List all preseeds in short, the newest last."""
    service, identity = request.app[PRESEEDS], identity_of(request)
    listed = service.summaries()
    if identity.kind != "open":
        listed = [
            msgspec.structs.replace(summary, id=given_id(summary.id, summary.owner))
            if summary.owner == str(identity)
            else summary
            for summary in listed
            if service.visible(summary.id, identity, *_SEE)
        ]
    return _answer(listed)


async def preseed_progress(request: web.Request) -> web.Response:
    """Say how far a preseed is. With `wait_s` the answer comes when a quorum of hosts is done or
    the preseed has ended, at the latest after this time."""
    wait_s = _number(request, "wait_s", 0.0, WAIT_S_MAX)
    quorum = _number(request, "quorum", 1.0, 1.0)
    kept = await _own(request, *_SEE)
    await request.app[WAITS].wait(request.app[PRESEEDS], kept, quorum, wait_s, remote=request.remote or "")
    return _progress(request, kept)


def _number(request: web.Request, name: str, default: float, most: float) -> float:
    """A number of the query, from 0 to `most`. Raises UsageError."""
    text = request.query.get(name)
    try:
        number = float(text) if text is not None else default
    except ValueError:
        number = -1.0
    if not 0 <= number <= most:
        raise UsageError(f"{name}={(text or '')[:40]!r} is no number from 0 to {most:g}")
    return number


class Waits:
    """The questions for progress that wait, until the tracker stops."""

    def __init__(self) -> None:
        self.places = Places(WAITING_MAX, WAITING_PER_ADDRESS_MAX)
        self._stopping = asyncio.Event()

    async def stop(self, app: web.Application) -> None:
        """Have all that wait answered (signal on_shutdown)."""
        self._stopping.set()

    async def wait(self, service: PreseedService, kept: str, quorum: float, wait_s: float, *, remote: str) -> None:
        """Wait until a quorum is done, the preseed has ended or is gone, or the time is over; not
        at all where no place is left for the address `remote`."""
        until = time.monotonic() + wait_s
        with self.places.place(remote) as room:
            while room and not self._stopping.is_set() and not _over(service, kept, quorum):
                if (left_s := until - time.monotonic()) <= 0:
                    return
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(min(TICK_S, left_s)):
                        await self._stopping.wait()


WAITS: web.AppKey[Waits] = web.AppKey("waits", Waits)


def _over(service: PreseedService, kept: str, quorum: float) -> bool:
    """Whether a quorum of a preseed's hosts is done, or it has ended or is gone."""
    preseed = service.core.by_id.get(kept)
    if preseed is None or preseed.tally.state not in ("pending", "running"):
        return True
    tally = preseed.tally
    if not tally.hosts_total or tally.hosts_done < quorum_hosts(quorum, tally.hosts_total):
        return False
    return service.core.all_known(kept, now=service.now())


def _progress(request: web.Request, kept: str) -> web.Response:
    service, given = request.app[PRESEEDS], request.match_info["id"]
    if request.query.get("brief") == "1":
        return _answer(msgspec.structs.replace(service.brief(kept), id=given))
    return _answer(replace(service.progress(kept), id=given))


async def cancel_preseed(request: web.Request) -> web.Response:
    """Cancel a preseed and say how far it was. The tracker still answers how it ended."""
    kept = await _own(request, "cancel-any")
    await request.app[PRESEEDS].cancel(kept)
    _note(request, "cancel", kept)
    return _progress(request, kept)


async def rank(request: web.Request) -> web.Response:
    """Rank hosts by how little of some packages they lack, or assign hosts to the roles of a
    job."""
    wanted = decode_request(await request.read(), RankRequest)
    access, identity = request.app[SERVICE].access, identity_of(request)
    if access is not None:
        for package in wanted.named:
            await _require_package(access, identity, package)
    preseeds, silent = request.app[PRESEEDS], list[str]()

    async def candidates(parts: Parts) -> Affinity:
        affinity, names = await fleet_affinity(request, preseeds.affinity, parts)
        silent.extend(names)
        return affinity

    ranked = await preseeds.rank(wanted, candidates)
    headers = {UNANSWERED_HEADER: ",".join(silent)} if silent else {}
    return _answer(ranked, headers=headers | ({NOTE: _nobody(request, wanted)} if ranked == [] else {}))


def _nobody(request: web.Request, wanted: RankRequest) -> str:
    """Why no host was ranked. It names no zone or host that the identity may not see."""
    if wanted.selector is None or not identity_of(request).may("watch"):
        return "no host is connected here" if wanted.selector is None else "no host that is connected here matches"
    hosts = request.app[SERVICE].fleet.hosts.values()
    return printable(no_match(parse_selector(wanted.selector), hosts)).encode("ascii", "backslashreplace").decode()


ROUTES = (
    Route("GET", "/v1/hosts", hosts, (Answer(list[HostStatus]),), LOCAL_QUERY, right="watch"),
    Route(
        "GET",
        "/v1/hosts/{name}",
        host,
        (Answer(HostDetail),),
        LOCAL_QUERY,
        errors=(NotFound, Unavailable),
        right="watch",
    ),
    Route(
        "GET",
        "/v1/hosts/{name}/reachability",
        reachability,
        (Answer(Reachability),),
        errors=(NotFound, Unavailable),
        right="watch",
        also=("agent",),
    ),
    Route("GET", "/v1/swarms", swarms, (Answer(list[SwarmStatus]),), LOCAL_QUERY, right="watch"),
    Route(
        "GET",
        "/v1/swarms/{digest}",
        swarm,
        (Answer(SwarmDetail),),
        LOCAL_QUERY,
        errors=(UsageError, NotFound, Unavailable),
        right="watch",
    ),
    Route(
        "GET",
        "/v1/swarms/{digest}/story",
        story,
        (Answer(list[StoryEvent]),),
        LOCAL_QUERY,
        errors=(UsageError, NotFound, Unavailable),
        right="watch",
    ),
)

_ORDERED = (Answer(Progress), Answer(Progress, 201))
_PROGRESS = (Answer(Progress), Answer(PreseedBrief))
_BRIEF = (Query("brief", "1: only what does not depend on the number of hosts"),)
_WAIT = (
    Query(
        "wait_s",
        f"answer when the quorum is done or the preseed has ended, at most after so many seconds, up to {WAIT_S_MAX:g}",
    ),
    Query("quorum", "with wait_s: the share of hosts that is waited for, such as 0.99 (1 without it)"),
)
_ORDER_ERRORS = (UsageError, TooLarge, Refused, NotFound, Conflict, Corrupt, Unavailable)

PRESEED_ROUTES = (
    Route("POST", "/v1/preseeds", preseed, _ORDERED, request=PreseedRequest, errors=_ORDER_ERRORS, right="preseed"),
    Route(
        "GET",
        "/v1/preseeds",
        preseeds,
        (Answer(list[PreseedSummary]),),
        right="preseed",
        also=("watch", "cancel-any"),
    ),
    Route(
        "PUT",
        "/v1/preseeds/{id}",
        put_preseed,
        _ORDERED,
        request=PreseedRequest,
        errors=_ORDER_ERRORS,
        right="preseed",
    ),
    Route(
        "GET",
        "/v1/preseeds/{id}",
        preseed_progress,
        _PROGRESS,
        (*_BRIEF, *_WAIT),
        errors=(UsageError, NotFound, Unavailable),
        right="preseed",
        also=("watch", "cancel-any"),
    ),
    Route(
        "DELETE",
        "/v1/preseeds/{id}",
        cancel_preseed,
        _PROGRESS,
        _BRIEF,
        errors=(UsageError, NotFound, Conflict, Unavailable),
        right="preseed",
        also=("cancel-any",),
    ),
    Route(
        "POST",
        "/v1/rank",
        rank,
        (Answer(list[Ranked]), Answer(Assignment)),
        request=RankRequest,
        errors=_ORDER_ERRORS,
        right="rank",
    ),
)
"""Routes of a tracker that takes preseeds."""
