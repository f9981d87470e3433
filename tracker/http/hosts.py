"""Routes by which operators have hosts do something: drain them, and evict packages from them; and
by which a client learns what it may do.

Where several trackers share a fleet, the one that is asked passes a request on: a host is drained
at each tracker, as each plans its own swarms, and evicts what its home tracker says.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from typing import NoReturn

import msgspec
from aiohttp import web

from p2pdist.model.digest import Digest
from p2pdist.model.errors import UNDECODABLE, NotFound, Refused, TooLarge, Unavailable, UsageError
from p2pdist.model.fleet import EvictedHost, Eviction, EvictRequest, Me, StayedHost
from p2pdist.model.history import short_name
from p2pdist.model.hub import is_hub, parse_hub
from p2pdist.model.image import SCHEME, is_image, parse_image
from p2pdist.model.manifest import Reference, parse_reference
from p2pdist.model.plan import HostName
from p2pdist.model.preseed import decode_request
from p2pdist.transfer.guard import identity_of
from p2pdist.transfer.openapi import JSON_TYPE, Answer, Route
from tracker.cluster.siblings import Known
from tracker.content import TAG_WAIT_S
from tracker.core.events import HostDrained
from tracker.core.preseeds.selectors import near, no_match, parse_selector
from tracker.hosts.drains import Drains
from tracker.http.keys import DRAINS, SERVICE, SIBLINGS
from tracker.http.trackers import LOCAL_QUERY, announce, passed_on, siblings_of
from tracker.service import Service
from tracker.state.drains import DrainRecords

PASSED_ON_S = 2.0
"""How long other trackers wait for the answers of their hosts: they must answer this one in time
(tracker/cluster/siblings.py)."""

PASSED_ON_TAG_WAIT_S = 0.5
"""How long an eviction waits for what the origin says of a tag at the trackers to which it is
passed on."""


def _json(body: object) -> web.Response:
    return web.Response(body=msgspec.json.encode(body), content_type=JSON_TYPE)


async def me(request: web.Request) -> web.Response:
    """Say which rights the sender of the request has. It needs none for this."""
    identity = identity_of(request)
    rights = sorted(identity.rights) if identity.kind != "open" else []
    return _json(Me(identity.kind, identity.name, [str(right) for right in rights], list(identity.read.patterns)))


# -- draining


def drains_of(service: Service, where: str) -> Drains:
    """The drains of a tracker's hosts, with the record of them in its state (database.py)."""
    return Drains(
        DrainRecords(where),
        lambda host, drained: service.submit(HostDrained(host, drained)),
        service.fleet.reputation.drained,
    )


async def drain(request: web.Request) -> web.Response:
    """Have a host serve no other host, but for what none else has. Its children get other parents,
    and no preseed picks it; it goes on to receive. It lasts until a DELETE, also where a tracker
    starts anew."""
    return await _drain(request, drained=True)


async def fill(request: web.Request) -> web.Response:
    """Have a host that is drained serve other hosts again."""
    return await _drain(request, drained=False)


async def _drain(request: web.Request, *, drained: bool) -> web.Response:
    service, name = request.app[SERVICE], request.match_info["name"]
    siblings = siblings_of(request)
    fleet = service.fleet
    known = name in fleet.hosts or name in fleet.lost or name in fleet.reputation.drained
    silent: list[str] = []
    if siblings is not None:
        path, headers = request.rel_url.raw_path, passed_on(request)
        answers, silent = await siblings.send_all(request.method, path, headers)
        known = known or any(answer.status == 204 for answer in answers.values())
        silent += [tracker for tracker, answer in answers.items() if answer.status not in (204, 404)]
    # Of another tracker's hosts some may come later; what can be no host's name is not written.
    taken = known or (_local(request) and SIBLINGS in request.app and _may_be(name))
    if taken and await request.app[DRAINS].order(name, drained):
        silent = []  # they read of it
    if not known:
        _unknown(name, fleet.hosts)
    _note(request, "drain" if drained else "fill", f"host:{name[:255]}")
    if not _local(request):
        what = "is drained: it serves no other host" if drained else "serves other hosts again"
        fleet.history.changed(f"{name[:255]} {what}", host=name[:255])
    if silent:
        raise Unavailable(
            f"{', '.join(silent)} did not hear of it, all other trackers did",
            remedy="Do the same again when they answer",
        )
    return web.Response(status=204)


def _may_be(name: str) -> bool:
    """Whether a host can have this name."""
    try:
        return bool(msgspec.convert(name, HostName))
    except msgspec.ValidationError:
        return False


def _local(request: web.Request) -> bool:
    """Whether another tracker passed the request on."""
    return request.query.get("local") == "1"


def _unknown(name: str, hosts: Iterable[str]) -> NoReturn:
    guess = near(name[:255], hosts)
    raise NotFound(
        f"no host named {name[:255]!r} is known here",
        remedy=f"Did you mean {guess}?" if guess else "p2pdist hosts lists them",
    )


# -- evicting


async def evict(request: web.Request) -> web.Response:
    """Have hosts remove a package from their stores. What is mounted, pinned or being pulled stays
    there. The answer says what came of it at each host."""
    service, wanted = request.app[SERVICE], decode_request(await request.read(), EvictRequest)
    name = await _require_readable(request, wanted)
    names = _chosen(request, wanted)
    siblings = siblings_of(request)
    unanswered: list[str] = []
    meaning = await _meaning(service, wanted, PASSED_ON_TAG_WAIT_S if _local(request) else TAG_WAIT_S)
    eviction = await service.desk.evict(wanted.package, wanted.digest, names, wanted.wait_s, meaning)
    eviction = msgspec.structs.replace(eviction, absent_hosts=sorted(set(wanted.hosts) - set(names)))
    if siblings is not None:
        body = msgspec.json.encode(msgspec.structs.replace(wanted, wait_s=min(wanted.wait_s, PASSED_ON_S)))
        answers, unanswered = await siblings.send_all("POST", request.rel_url.raw_path, passed_on(request), body)
        unanswered += [tracker for tracker, answer in answers.items() if answer.status != 200]
        bodies = (answer.body for answer in answers.values() if answer.status == 200)
        eviction = _joined(eviction, bodies, unanswered)
    if not eviction.asked and not _local(request):
        hosts = service.fleet.hosts
        if wanted.hosts:
            _unknown(wanted.hosts[0], hosts)
        why = no_match(parse_selector(wanted.selector), hosts.values()) if wanted.selector else "no host is connected"
        raise NotFound(f"{short_name(name, wanted.digest)} was evicted from no host: {why}")
    _note(request, "evict", f"package:{wanted.package}")
    if eviction.evicted and not _local(request):
        text = f"{short_name(wanted.package.removeprefix(SCHEME), wanted.digest)} was evicted from {_count(eviction.evicted)}"
        only = wanted.hosts[0] if len(wanted.hosts) == 1 else ""
        text += f", {only}" if only else ""
        service.fleet.history.changed(
            text, host=only, package=wanted.package.removeprefix(SCHEME), digest=wanted.digest
        )
    return _json(eviction)


async def _meaning(service: Service, wanted: EvictRequest, wait_s: float) -> str:
    """The manifest that a tag names, "" where that is not known or the order names one itself."""
    if wanted.digest or is_image(wanted.package) or is_hub(wanted.package):
        return ""
    return await service.content.last_meaning(parse_reference(wanted.package), wait_s) or ""


def _count(hosts: int) -> str:
    return "one host" if hosts == 1 else f"{hosts} hosts"


async def _require_readable(request: web.Request, wanted: EvictRequest) -> str:
    """The name of a package, an image or a repository of a hub that the identity may read. Hosts
    evict a package by its digest, under whatever names, so that must be one of the name. Raises
    NotFound, UsageError."""
    identity, access, package = identity_of(request), request.app[SERVICE].access, wanted.package
    digests: set[Digest] = set()
    if is_image(package):
        name = str(parse_image(package).name)
    elif is_hub(package):
        name = str(parse_hub(package).name)
    else:
        reference = parse_reference(package)
        name = reference.name
        digests = {Digest(digest) for digest in (wanted.digest, reference.digest) if digest}
    if access is not None:
        identity.require_read([name], name)
        for digest in digests:
            await access.packages.require_found(identity, Reference(name, digest=digest))
            if not (identity.reads_everything or _local(request)):
                await announce(request, Known(name, digest))  # or they would not find it, either
    return name


def _chosen(request: web.Request, wanted: EvictRequest) -> list[str]:
    """The connected hosts with their home here that are to evict. Raises UsageError."""
    given = bool(wanted.hosts) + bool(wanted.selector) + wanted.everywhere
    if given != 1:
        raise UsageError(
            "an eviction is from hosts, from what a selector matches, or from everywhere",
            remedy='Give one of "hosts", "selector" and "everywhere"',
        )
    fleet = request.app[SERVICE].fleet
    selector = parse_selector(wanted.selector) if wanted.selector else None
    named = frozenset(wanted.hosts)
    return [
        host.name
        for host in fleet.hosts.values()
        if host.session is not None
        and not host.partial
        and (wanted.everywhere or host.name in named or (selector is not None and selector.matches(host)))
    ]


def _joined(own: Eviction, bodies: Iterable[bytes], unanswered: list[str]) -> Eviction:
    """One report from those of several trackers."""
    reports = [own]
    for body in bodies:
        try:
            reports.append(msgspec.json.decode(body, type=Eviction))
        except UNDECODABLE:
            continue
    evicted: OrderedDict[str, EvictedHost] = OrderedDict()
    stayed: OrderedDict[str, StayedHost] = OrderedDict()
    for report in reports:
        evicted.update((host.host, host) for host in report.evicted_hosts)
        stayed.update((host.host, host) for host in report.stayed_hosts)
    sums = {
        name: sum(getattr(report, name) for report in reports)
        for name in ("asked", "evicted", "bytes_freed", "lacked", "stayed", "silent")
    }
    return Eviction(
        own.package,
        **sums,
        seconds=max(report.seconds for report in reports),
        evicted_hosts=list(evicted.values()),
        stayed_hosts=list(stayed.values()),
        silent_hosts=[host for report in reports for host in report.silent_hosts],
        unanswered=unanswered,
        absent_hosts=sorted(set[str].intersection(*(set(report.absent_hosts) for report in reports))),
    )


def _note(request: web.Request, event: str, subject: str) -> None:
    """Write a change to the audit."""
    access = request.app[SERVICE].access
    if access is not None:
        access.control.audit.note(
            event, identity=identity_of(request), address=request.remote or "", right="hosts", subject=subject
        )


ROUTES = (
    Route("GET", "/v1/me", me, (Answer(Me),), right="open"),
    Route(
        "POST",
        "/v1/hosts/{name}/drain",
        drain,
        (Answer(status=204, media_type=""),),
        LOCAL_QUERY,
        errors=(NotFound, Unavailable),
        right="hosts",
    ),
    Route(
        "DELETE",
        "/v1/hosts/{name}/drain",
        fill,
        (Answer(status=204, media_type=""),),
        LOCAL_QUERY,
        errors=(NotFound, Unavailable),
        right="hosts",
    ),
    Route(
        "POST",
        "/v1/evictions",
        evict,
        (Answer(Eviction),),
        LOCAL_QUERY,
        request=EvictRequest,
        errors=(UsageError, TooLarge, Refused, NotFound, Unavailable),
        right="hosts",
    ),
)
