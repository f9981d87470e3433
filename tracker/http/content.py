"""Small content for agents: what references name, and manifests, configs and piece lists by digest."""

from __future__ import annotations

from typing import Any

from aiohttp import web

from p2pdist.model.digest import parse_digest
from p2pdist.model.package import MANIFEST_TYPE, Descriptor, parse_reference
from tracker.http.keys import SERVICE


def _json(descriptor: Descriptor) -> dict[str, Any]:
    return {
        "mediaType": descriptor.media_type,
        "digest": descriptor.digest,
        "size": descriptor.size,
        "annotations": dict(descriptor.annotations),
    }


async def resolve(request: web.Request) -> web.Response:
    """GET /v1/resolve?reference=name:tag"""
    reference = parse_reference(request.query.get("reference", ""))
    return web.json_response(_json(await request.app[SERVICE].content.resolve(reference)))


async def content(request: web.Request) -> web.Response:
    """GET /v1/content/{digest}; `?as=manifest` for a manifest."""
    digest = parse_digest(request.match_info["digest"])
    source = request.app[SERVICE].content
    if request.query.get("as") == "manifest":
        return web.Response(body=await source.manifest(digest), content_type=MANIFEST_TYPE)
    return web.Response(body=await source.read(digest))


async def layer(request: web.Request) -> web.Response:
    """GET /v1/layers/{digest}: the descriptor of a layer of some package."""
    return web.json_response(
        _json(await request.app[SERVICE].content.layer(parse_digest(request.match_info["digest"])))
    )
