"""Routes about the trackers of a cluster, and how any of them answers for the fleet: it asks the
owner of a blob, or all others (tracker/cluster/siblings.py)."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from typing import Literal

import msgspec
from aiohttp import web

from p2pdist.credentials.authority import issued_by_fleet, name_in
from p2pdist.model.digest import Digest
from p2pdist.model.errors import Corrupt, NotFound, Refused, TooLarge, Unavailable, UsageError
from p2pdist.model.fleet import UNANSWERED_HEADER
from p2pdist.model.image import image_name
from p2pdist.model.manifest import parse_reference
from p2pdist.model.ownership import Ownership
from p2pdist.model.preseed import decode_request
from p2pdist.model.vouched_list import vouched_layout
from p2pdist.transfer.guard import identity_of, peer_of
from p2pdist.transfer.openapi import JSON_TYPE, Answer, Query, Route
from p2pdist.transfer.problems import PROBLEM_TYPE
from tracker.cluster.membership import Row
from tracker.cluster.siblings import (
    BLOBS_MAX,
    HELD_PATH,
    KNOWN_PATH,
    LOCAL,
    POOL_PATH,
    Held,
    HeldRequest,
    HostBrief,
    Known,
    Siblings,
)
from tracker.core.affinity import Affinity, Parts
from tracker.core.host import Host
from tracker.http.keys import PRESEEDS, SERVICE, SIBLINGS
from tracker.policies import note_image, note_package
from tracker.service import Service

LOCAL_QUERY = (Query(LOCAL, "1: only what this tracker itself knows"),)

SILENT_S = 3.0
"""A tracker that has not beaten for so long is shown as silent."""

TrackerState = Literal["owner", "growing", "draining", "drained", "waiting", "silent"]


class TrackerStatus(msgspec.Struct, frozen=True):
    """A tracker of the cluster. `share` of the blobs is 1 in general. `state`: it is an owner; its
    share grows; it drains, as an operator asked, or has drained; it waits for a share; it is
    silent. `hosts` are those that have their home there, `swarms` those that it plans; `load` is
    the share of a processor that it takes, `lag_s` the delay of its event loop. `beat_s` and
    `started_s` ago it beat last and started, by the database's clock."""

    id: str
    urls: tuple[str, ...]
    state: TrackerState
    share: float
    hosts: int
    swarms: int
    load: float
    lag_s: float
    beat_s: float
    started_s: float


class TrackersStatus(msgspec.Struct, frozen=True):
    """The trackers of the fleet as the tracker `me` sees them, at the epoch by which it goes; pins
    are blobs with an owner of their own. `problem` says why their database does not answer: then
    the rest is as it was `age_s` ago."""

    me: str
    epoch: int
    trackers: list[TrackerStatus]
    pins: dict[Digest, str] = {}
    problem: str = ""
    age_s: float = 0.0


async def trackers(request: web.Request) -> web.Response:
    """List the trackers of the fleet, and how they share its blobs. A tracker that is alone is
    not in the list."""
    siblings = request.app.get(SIBLINGS)
    if siblings is None:
        return _json(TrackersStatus("", 0, []))
    cluster, look = siblings.cluster, siblings.cluster.look
    ownership = cluster.ownership
    rows = [_status(row, ownership) for row in sorted(look.rows, key=_id)] if look is not None else []
    pins = dict(ownership.pins) if ownership is not None and identity_of(request).reads_everything else {}
    status = TrackersStatus(
        cluster.me,
        ownership.epoch if ownership is not None else 0,
        rows,
        pins,
        cluster.problem,
        round(max(0.0, time.monotonic() - cluster.looked_at), 1) if look is not None else 0.0,
    )
    return _json(status)


def _id(row: Row) -> str:
    return row.registered.id


def _status(row: Row, ownership: Ownership | None) -> TrackerStatus:
    member = row.registered
    listed = ownership.tracker(member.id) if ownership is not None else None
    share = listed.share if listed is not None else 0.0
    state: TrackerState = "owner" if share == 1 else "growing" if share else "waiting"
    if row.beat_s > SILENT_S:
        state = "silent"  # it can no longer be seen whether it has drained
    elif member.draining:
        state = "draining" if share or row.swarms else "drained"
    return TrackerStatus(
        member.id,
        member.urls,
        state,
        share,
        row.hosts,
        row.swarms,
        round(member.load, 3),
        round(row.lag_s, 4),
        round(row.beat_s, 2),
        round(row.started_s, 1),
    )


async def drain(request: web.Request) -> web.Response:
    """Have a tracker give all its blobs to the others, until it starts anew."""
    return await _drain(request, draining=True)


async def fill(request: web.Request) -> web.Response:
    """Have a tracker that drains take its share of the blobs again."""
    return await _drain(request, draining=False)


async def _drain(request: web.Request, *, draining: bool) -> web.Response:
    siblings, name = request.app.get(SIBLINGS), request.match_info["id"]
    if siblings is None:
        raise NotFound(
            "this tracker is alone, and there is no other to give its blobs to",
            remedy="p2pdist hosts drain drains a host",
        )
    await siblings.cluster.drain(name, draining)
    service = request.app[SERVICE]
    service.fleet.history.changed(f"the tracker {name[:63]} {'drains' if draining else 'takes its share of the blobs'}")
    access = service.access
    if access is not None:
        access.control.audit.note(
            "drain" if draining else "fill",
            identity=identity_of(request),
            address=request.remote or "",
            right="trackers",
            subject=f"tracker:{name[:63]}",
        )
    return web.Response(status=204)


def require_tracker(request: web.Request) -> None:
    """Raises Refused unless another tracker of the fleet asks, where there is access control."""
    access = request.app[SERVICE].access
    if access is not None:
        peer, fleet = peer_of(request), access.control.state.rules.fleet
        if not (issued_by_fleet(peer, fleet) and name_in(peer, fleet, "tracker")):
            raise Refused("the connection shows no certificate of a tracker")


async def known(request: web.Request) -> web.Response:
    """Read a package that agents ask another tracker for: blobs of it may be this tracker's."""
    require_tracker(request)
    service = request.app[SERVICE]
    told = decode_request(await request.read(), Known)
    if told.size:
        _learn_file(service, told)
    elif told.image:
        await _read_image(service, told)
    else:
        await _read_package(service, told)
    return web.Response(status=204)


def _learn_file(service: Service, told: Known) -> None:
    service.hubs.learned(((told.digest, vouched_layout(told.size)),))
    if service.access is not None:
        service.fleet.policies.bind(told.name, told.digest, ())


async def _read_package(service: Service, told: Known) -> None:
    reference = parse_reference(f"{told.name}@{told.digest}")
    if service.access is not None:
        await service.access.packages.vouch(reference.name, told.digest)
    await note_package(service.fleet.policies, service.content, reference, told.digest)
    await service.content.manifest(told.digest)  # the blobs of which are described from then on


async def _read_image(service: Service, told: Known) -> None:
    upstream, _, repository = told.name.partition("/")
    name = image_name(upstream, repository)
    found = await service.upstreams.manifest(name, told.digest)
    note_image(service.fleet.policies, name, "", found)
    if service.access is not None:
        await service.access.images.bind(name, found)


# -- rankings


async def held(request: web.Request) -> web.Response:
    """Say which hosts have their home here, and what hosts hold. Other trackers rank hosts by
    it."""
    identity, book = identity_of(request), request.app[SERVICE].fleet.policies
    wanted = decode_request(await request.read(), HeldRequest)
    return _held(
        request,
        [blob for blob in wanted.blobs if identity.reads_everything or identity.may_read(book.readers_of(blob))],
    )


async def candidate_hosts(request: web.Request) -> web.Response:
    """Say the same to another tracker, which picks hosts for a preseed among those of all."""
    require_tracker(request)
    return _held(request, decode_request(await request.read(), HeldRequest).blobs)


def _held(request: web.Request, blobs: Sequence[Digest]) -> web.Response:
    fleet = request.app[SERVICE].fleet
    redundant = request.app[PRESEEDS].affinity.redundant if PRESEEDS in request.app else {}
    hosts = tuple(
        HostBrief(host.name, host.zone, host.rack, host.available, host.site)
        for host in fleet.hosts.values()
        if host.address and not host.partial
    )
    bytes_held = {blob: dict(fleet.swarms[blob].bytes_held) for blob in blobs if blob in fleet.swarms}
    spare = {blob: tuple(redundant[blob]) for blob in blobs if blob in redundant}
    return _json(Held(hosts, bytes_held, spare))


async def fleet_affinity(request: web.Request, own: Affinity, parts: Parts) -> tuple[Affinity, list[str]]:
    """What all trackers know of the hosts that need some blobs, and which of them do not say it."""
    siblings = request.app.get(SIBLINGS)
    if siblings is None:
        return own, []
    found, silent = await siblings.held(HeldRequest(tuple(parts)[:BLOBS_MAX]), passed_on(request))
    return _joined(own, parts, found), silent


def candidates_of(siblings: Siblings, own: Affinity) -> Callable[[Parts], Awaitable[Affinity]]:
    """Says what all trackers know of the hosts that a preseed may pick."""

    async def candidates(parts: Parts) -> Affinity:
        found, _ = await siblings.held(HeldRequest(tuple(parts)[:BLOBS_MAX]), {}, POOL_PATH)
        return _joined(own, parts, found)

    return candidates


def _joined(own: Affinity, parts: Parts, answers: Iterable[Held]) -> Affinity:
    hosts, held = dict(own.hosts), dict(own.elsewhere)
    redundant = {blob: list(own.redundant[blob]) for blob in parts if blob in own.redundant}
    for answer in answers:
        for brief in answer.hosts:
            there = Host(
                brief.host, zone=brief.zone, rack=brief.rack, site=brief.site, session=0, leaving=not brief.available
            )
            known = hosts.get(brief.host)
            if known is None or known.partial or not known.available:
                hosts[brief.host] = there
        held.update((blob, counts) for blob, counts in answer.held.items() if blob not in own.swarms)
        for blob, names in answer.spare.items():
            redundant.setdefault(blob, []).extend(names)
    return Affinity(hosts, own.swarms, own.capacities, redundant, held)


# -- for the fleet


async def announce(request: web.Request, known: Known) -> None:
    """Tell the other trackers of a package that is asked for here."""
    siblings = request.app.get(SIBLINGS)
    if siblings is not None:
        await siblings.announce(known)


def siblings_of(request: web.Request) -> Siblings | None:
    """The other trackers, where a request is to be answered for the fleet."""
    return request.app.get(SIBLINGS) if request.query.get(LOCAL) != "1" else None


def passed_on(request: web.Request) -> Mapping[str, str]:
    """The client's token, for the other trackers."""
    token = request.headers.get("Authorization")
    return {"Authorization": token} if token else {}


async def from_owner(request: web.Request, blob: Digest) -> web.Response | None:
    """What the owner of a blob answers to a GET; None where that is this tracker. Raises
    Unavailable."""
    siblings = siblings_of(request)
    owner = siblings.owner(blob) if siblings is not None else None
    if siblings is None or owner is None:
        return None
    asked = await siblings.ask(owner, request.rel_url.raw_path, passed_on(request))
    kind = JSON_TYPE if asked.status < 400 else PROBLEM_TYPE
    return web.Response(body=asked.body, status=asked.status, content_type=kind)


async def from_others(request: web.Request) -> tuple[list[bytes], dict[str, str]]:
    """The bodies that the other trackers answer with to a GET, none where this one is alone; and a
    header that names those that do not answer."""
    siblings = siblings_of(request)
    if siblings is None:
        return [], {}
    bodies, silent = await siblings.ask_all(request.rel_url.raw_path, passed_on(request))
    return bodies, {UNANSWERED_HEADER: ",".join(silent)} if silent else {}


def _json(body: object) -> web.Response:
    return web.Response(body=msgspec.json.encode(body), content_type=JSON_TYPE)


ROUTES = (
    Route("GET", "/v1/trackers", trackers, (Answer(TrackersStatus),), right="watch"),
    Route(
        "POST",
        "/v1/trackers/{id}/drain",
        drain,
        (Answer(status=204, media_type=""),),
        errors=(NotFound, Unavailable),
        right="trackers",
    ),
    Route(
        "DELETE",
        "/v1/trackers/{id}/drain",
        fill,
        (Answer(status=204, media_type=""),),
        errors=(NotFound, Unavailable),
        right="trackers",
    ),
    Route(
        "POST",
        HELD_PATH,
        held,
        (Answer(Held),),
        request=HeldRequest,
        errors=(UsageError, TooLarge),
        right="rank",
    ),
    Route(
        "POST",
        POOL_PATH,
        candidate_hosts,
        (Answer(Held),),
        request=HeldRequest,
        errors=(UsageError, TooLarge, Refused),
        right="open",
    ),
    Route(
        "POST",
        KNOWN_PATH,
        known,
        (Answer(status=204, media_type=""),),
        request=Known,
        errors=(UsageError, NotFound, Refused, Corrupt, Unavailable),
        right="open",
    ),
)
