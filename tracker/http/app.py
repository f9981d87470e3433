"""The tracker's aiohttp application."""

from __future__ import annotations

from importlib.metadata import version

from aiohttp import web
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest

from p2pdist.transfer.problems import name_request, problems
from tracker.http import bittorrent, content, scheduler, sessions
from tracker.http.keys import PRESEEDING, REGISTRY, SERVICE
from tracker.http.metrics import registry
from tracker.http.pages import add_pages
from tracker.preseed_service import Preseeding
from tracker.service import Service

BODY_BYTES_MAX = 1 << 20
VERSION = version("p2pdist")


async def _health(request: web.Request) -> web.Response:
    """GET /healthz and /readyz: the tracker keeps only soft state, so it is ready as soon as it
    answers."""
    service = request.app[SERVICE]
    book = service.fleet.policies
    return web.json_response(
        {
            "status": "ok",
            "version": VERSION,
            "lag_s": round(service.lag_s, 4),
            "sessions": service.sessions,
            "swarms": len(service.fleet.swarms),
            "policies": {"count": len(book.table.policies), "problem": book.problem},
        }
    )


async def _metrics(request: web.Request) -> web.Response:
    """GET /metrics in the Prometheus text format."""
    return web.Response(body=generate_latest(request.app[REGISTRY]), headers={"Content-Type": CONTENT_TYPE_LATEST})


def make_app(service: Service, preseeding: Preseeding | None = None) -> web.Application:
    """All routes of the tracker; those of preseeds and rankings where it takes these."""
    app = web.Application(middlewares=[problems], client_max_size=BODY_BYTES_MAX)
    app.on_response_prepare.append(name_request)
    app[SERVICE] = service
    watch = add_pages(app, service, preseeding)
    app[REGISTRY] = registry(service, watch.view, preseeding)
    app.add_routes(
        [
            web.get("/healthz", _health),
            web.get("/readyz", _health),
            web.get("/metrics", _metrics),
            web.get("/v1/session", sessions.session),
            web.get("/v1/resolve", content.resolve),
            web.get("/v1/packages", content.package),
            web.get("/v1/content/{digest}", content.content),
            web.get("/v1/layers/{digest}", content.layer),
            web.get("/announce", bittorrent.announce),
            web.get("/scrape", bittorrent.scrape),
            web.get("/v1/blobs/{digest}/torrent", bittorrent.blob_torrent),
            web.get("/v1/packages/{reference:.+}/torrent", bittorrent.package_torrent),
            web.get("/v1/policies", content.policies),
            web.get("/v1/hosts", scheduler.hosts),
            web.get("/v1/hosts/{name}", scheduler.host),
            web.get("/v1/hosts/{name}/reachability", scheduler.reachability),
            web.get("/v1/swarms", scheduler.swarms),
            web.get("/v1/swarms/{digest}", scheduler.swarm),
            web.get("/v1/swarms/{digest}/story", scheduler.story),
        ]
    )
    if preseeding is not None:
        app[PRESEEDING] = preseeding
        app.add_routes(scheduler.routes())
    return app
