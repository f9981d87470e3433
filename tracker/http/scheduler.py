"""What operators and schedulers ask: hosts, swarms, stories; preseeds and rankings.

Answers are encoded by msgspec: while one is made no session is served, and ten thousand hosts take
it 1.5 ms, the standard library 10 ms.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Any

import msgspec
from aiohttp import web

from p2pdist.model.digest import parse_digest
from p2pdist.model.errors import NotFound, UsageError
from p2pdist.model.preseed import PreseedRequest, RankRequest, decode_request
from tracker.core.host import Host
from tracker.core.preseeds.selectors import near
from tracker.core.swarm import Swarm
from tracker.http.keys import PRESEEDING, SERVICE


def _answer(body: Any, status: int = 200) -> web.Response:
    return web.Response(body=msgspec.json.encode(body), status=status, content_type="application/json")


def _host(host: Host) -> dict[str, Any]:
    absent_s = None
    if host.session is None and host.absent_since is not None:
        absent_s = max(0.0, time.monotonic() - host.absent_since)
    return {
        "host": host.name,
        "address": host.address,
        "zone": host.zone,
        "rack": host.rack,
        "present": host.session is not None,
        "absent_s": round(absent_s, 1) if absent_s is not None else None,
        "leaving": host.leaving,
        "blobs": len(host.swarms),
        "blamed": {by: reason for by, (reason, _) in host.penalties.items()},
    }


def _swarm(swarm: Swarm) -> dict[str, Any]:
    pieces = sum(swarm.totals)
    held = sum(sum(member.counts) for member in swarm.members.values())
    return {
        "digest": swarm.blob,
        "size": swarm.layout.size,
        "pieces": pieces,
        "stripes": swarm.stripes,
        "hosts": len(swarm.members),
        "complete": len(swarm.members) - swarm.receivers,
        "origin_leases": sum(map(len, swarm.edges.roots)),
        "progress": held / max(1, pieces * len(swarm.members)),
    }


async def hosts(request: web.Request) -> web.Response:
    """GET /v1/hosts: those connected, and those that ended without a word in the last hour."""
    fleet = request.app[SERVICE].fleet
    return _answer([_host(host) for host in (*fleet.hosts.values(), *fleet.lost.values())])


async def host(request: web.Request) -> web.Response:
    """GET /v1/hosts/{name}"""
    name = request.match_info["name"]
    fleet = request.app[SERVICE].fleet
    found = fleet.hosts.get(name) or fleet.lost.get(name)
    if found is None:
        guess = near(name[:255], fleet.hosts)
        raise NotFound(f"no host named {name[:255]!r} is known here", remedy=f"Did you mean {guess}?" if guess else "")
    swarms = [fleet.swarms[key].blob for key in found.swarms if key in fleet.swarms]
    return _answer(_host(found) | {"swarms": swarms})


async def reachability(request: web.Request) -> web.Response:
    """GET /v1/hosts/{name}/reachability: whether the tracker can connect to it; `problem` says why
    not."""
    return _answer(await request.app[SERVICE].reach.look(request.match_info["name"], request.remote or ""))


def _find_swarm(request: web.Request) -> Swarm:
    digest = parse_digest(request.match_info["digest"])
    found = request.app[SERVICE].fleet.swarms.get(digest)
    if found is None:
        raise NotFound(f"no agent holds or wants {digest}")
    return found


async def swarms(request: web.Request) -> web.Response:
    """GET /v1/swarms"""
    return _answer([_swarm(swarm) for swarm in request.app[SERVICE].fleet.swarms.values()])


async def swarm(request: web.Request) -> web.Response:
    """GET /v1/swarms/{digest}: the swarm with each member's progress and parents."""
    found = _find_swarm(request)
    members = [
        {"host": each.host, "counts": each.counts, "parents": each.parents, "seed": each.seed, "children": each.load}
        for each in found.members.values()
    ]
    return _answer(_swarm(found) | {"members": members})


async def story(request: web.Request) -> web.Response:
    """GET /v1/swarms/{digest}/story: what happened, newest last; `age_s` is how long ago."""
    now = time.monotonic()
    events = [{"age_s": round(now - at, 3), "event": text} for at, text in _find_swarm(request).story]
    return _answer(events)


# -- preseeds and rankings


def routes() -> Iterable[web.RouteDef]:
    """What a tracker answers that takes preseeds."""
    return [
        web.post("/v1/preseeds", preseed),
        web.get("/v1/preseeds", preseeds),
        web.put("/v1/preseeds/{id}", put_preseed),
        web.get("/v1/preseeds/{id}", preseed_progress),
        web.delete("/v1/preseeds/{id}", cancel_preseed),
        web.post("/v1/rank", rank),
    ]


async def _create(request: web.Request, wanted: PreseedRequest) -> web.Response:
    progress, created = await request.app[PRESEEDING].create(wanted)
    return _answer(progress, 201 if created else 200)


async def preseed(request: web.Request) -> web.Response:
    """POST /v1/preseeds: 201 and how far it is; 200 when it was asked for before."""
    return await _create(request, decode_request(await request.read(), PreseedRequest))


async def put_preseed(request: web.Request) -> web.Response:
    """PUT /v1/preseeds/{id}: the same with this id."""
    wanted = decode_request(await request.read(), PreseedRequest)
    plain = {**msgspec.to_builtins(wanted), "id": request.match_info["id"]}
    named = decode_request(msgspec.json.encode(plain), PreseedRequest)
    if wanted.id not in (None, named.id):
        raise UsageError(f"the preseed in the body is {wanted.id}, the one in the path {named.id}")
    return await _create(request, named)


async def preseeds(request: web.Request) -> web.Response:
    """GET /v1/preseeds: all, in short."""
    return _answer(request.app[PRESEEDING].listed())


async def preseed_progress(request: web.Request) -> web.Response:
    """GET /v1/preseeds/{id}; `?brief=1` for what does not depend on how many hosts it has."""
    return _told(request)


def _told(request: web.Request) -> web.Response:
    preseeding, name = request.app[PRESEEDING], request.match_info["id"]
    return _answer(preseeding.brief(name) if request.query.get("brief") == "1" else preseeding.progress(name))


async def cancel_preseed(request: web.Request) -> web.Response:
    """DELETE /v1/preseeds/{id}: cancels it and answers as GET does; it can still be asked how it
    ended."""
    await request.app[PRESEEDING].cancel(request.match_info["id"])
    return _told(request)


async def rank(request: web.Request) -> web.Response:
    """POST /v1/rank"""
    return _answer(await request.app[PRESEEDING].rank(decode_request(await request.read(), RankRequest)))
