"""The tracker's aiohttp application."""

from __future__ import annotations

from collections.abc import Iterable
from importlib.metadata import version

import msgspec
from aiohttp import web
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest

from p2pdist.transfer.guard import OwnNames, identity_of
from p2pdist.transfer.openapi import Answer, Index, Route, index, serve
from p2pdist.transfer.problems import name_request, problems
from tracker.cluster.siblings import Siblings
from tracker.hosts.drains import Drains
from tracker.http import access, bittorrent, content, hosts, pages, scheduler, sessions, traces, trackers
from tracker.http.history import routes as history
from tracker.http.keys import DRAINS, PRESEEDS, REGISTRY, SERVICE, SIBLINGS
from tracker.http.metrics import registry
from tracker.http.upstreams import hubs, images
from tracker.preseed_service import PreseedService
from tracker.service import Service

BODY_BYTES_MAX = 1 << 20
VERSION = version("p2pdist")


class PolicyHealth(msgspec.Struct, frozen=True):
    """How many policies hold, and why their file was not read when it changed."""

    count: int
    problem: str


class OriginHealth(msgspec.Struct, frozen=True):
    """`reachable`: whether the origin could be read last, null before it was asked and for a
    tracker without one; `problem` why not, for those that may read everything."""

    reachable: bool | None
    problem: str = ""


class Health(msgspec.Struct, frozen=True):
    """`status` is "ok", or "degraded" while the origin cannot be read. `lag_s` is how late the last
    tick of the tracker's clock was."""

    status: str
    version: str
    lag_s: float
    sessions: int
    swarms: int
    policies: PolicyHealth
    origin: OriginHealth


async def _health(request: web.Request) -> web.Response:
    """Say that the tracker works. It is ready as soon as it answers, as it keeps only soft
    state; without its origin it is degraded, and ready."""
    return _health_of(request.app[SERVICE], everything=identity_of(request).reads_everything)


async def _probed_health(request: web.Request) -> web.Response:
    """Say that the tracker works, to whatever reaches the port for probes."""
    service = request.app[SERVICE]
    return _health_of(service, everything=service.access is None)


def _health_of(service: Service, *, everything: bool) -> web.Response:
    book, origin = service.fleet.policies, service.content.watch
    health = Health(
        "degraded" if origin.problem else "ok",
        VERSION,
        round(service.lag_s, 4),
        service.sessions,
        len(service.fleet.swarms),
        # It names packages, which a stranger need not know.
        PolicyHealth(len(book.table.policies), book.problem if everything else ""),
        OriginHealth(origin.reachable, origin.problem if everything else ""),
    )
    return web.Response(body=msgspec.json.encode(health), content_type="application/json", charset="utf-8")


async def _metrics(request: web.Request) -> web.Response:
    """Serve metrics in the Prometheus text format."""
    return web.Response(body=generate_latest(request.app[REGISTRY]), headers={"Content-Type": CONTENT_TYPE_LATEST})


METRICS = Route("GET", "/metrics", _metrics, (Answer(media_type="text/plain"),), right="metrics")
PROBE_ROUTES = (
    Route("GET", "/healthz", _probed_health, (Answer(Health),), right="open"),
    Route("GET", "/readyz", _probed_health, (Answer(Health),), right="open"),
    METRICS,
)
ROUTES = (
    Route("GET", "/healthz", _health, (Answer(Health),), right="open"),
    Route("GET", "/readyz", _health, (Answer(Health),), right="open"),
    METRICS,
    Route("GET", "/v1", index, (Answer(Index),), right="open"),
    *access.ROUTES,
    *sessions.ROUTES,
    *content.ROUTES,
    *images.ROUTES,
    *hubs.ROUTES,
    *traces.ROUTES,
    *bittorrent.ROUTES,
    *scheduler.ROUTES,
    *hosts.ROUTES,
    *trackers.ROUTES,
    *history.ROUTES,
    *pages.ROUTES,
)


def make_app(
    service: Service,
    preseeds: PreseedService | None = None,
    *,
    hostnames: Iterable[str] = (),
    siblings: Siblings | None = None,
    drains: Drains | None = None,
) -> web.Application:
    """The tracker's application, with routes for preseeds and rankings where it takes these.
    `hostnames` are further names under which clients reach it; `siblings` the other trackers of a
    cluster, None where this one is alone; `drains` remembers which hosts are drained, None for as
    long as the application lives."""
    control = service.access.control if service.access is not None else None
    checks = access.guard_of(control, OwnNames(hostnames))
    app = web.Application(middlewares=[problems, checks], client_max_size=BODY_BYTES_MAX)
    app.on_response_prepare.append(name_request)
    app[SERVICE] = service
    app[DRAINS] = drains if drains is not None else hosts.drains_of(service, "")
    if siblings is not None:
        app[SIBLINGS] = siblings
    watch = pages.add_watch(app, service, preseeds, siblings)
    app.on_shutdown.append(history.end_following)
    app[REGISTRY] = registry(service, watch.view, preseeds, siblings.cluster if siblings is not None else None)
    if preseeds is not None:
        app[PRESEEDS], app[scheduler.WAITS] = preseeds, (waits := scheduler.Waits())
        app.on_shutdown.append(waits.stop)
        if siblings is not None:
            preseeds.core.asks_others, preseeds.candidates = True, trackers.candidates_of(siblings, preseeds.affinity)
        if service.access is not None:
            service.access.packages.ordered = preseeds.ordered
    routes = ROUTES if preseeds is None else (*ROUTES, *scheduler.PRESEED_ROUTES)
    serve(app, routes, title="p2pdist tracker")
    return app


def make_probe_app(app: web.Application) -> web.Application:
    """The application of the port for probes, beside the tracker's: whether it works, and its
    metrics, to every client."""
    probes = web.Application(middlewares=[problems], client_max_size=BODY_BYTES_MAX)
    probes.on_response_prepare.append(name_request)
    probes[SERVICE], probes[REGISTRY] = app[SERVICE], app[REGISTRY]
    serve(probes, PROBE_ROUTES, title="p2pdist tracker, probes")
    return probes
