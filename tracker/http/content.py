"""Small content for agents: what references name, whole bundles, and manifests, configs and piece
lists by digest.

What policies say: of one package, for agents; all of them, for operators.
"""

from __future__ import annotations

from typing import Any

import msgspec
from aiohttp import ETag, web

from p2pdist.model.digest import Digest, parse_digest
from p2pdist.model.manifest import BUNDLE_TYPE, MANIFEST_TYPE, Descriptor, Reference, parse_reference
from p2pdist.model.policy import NO_POLICY, POLICY_HEADER, encode_policy
from tracker.http.keys import SERVICE
from tracker.policies import note_package


async def policy_header(request: web.Request, reference: Reference, digest: Digest) -> dict[str, str]:
    """The header for an agent that asks for a package, in the zone that it names; none without a
    policy. Raises Refused."""
    service = request.app[SERVICE]
    await note_package(service.fleet.policies, service.content, reference, digest)
    told = service.fleet.policies.told(reference, request.query.get("zone", ""))
    return {POLICY_HEADER: encode_policy(told)} if told != NO_POLICY else {}


async def policies(request: web.Request) -> web.Response:
    """GET /v1/policies: what holds, in order; with ?reference=name:tag&zone=z what an agent in that
    zone is told of a package, as one JSON document. Raises Refused where it may not have it."""
    book = request.app[SERVICE].fleet.policies
    if "reference" in request.query:
        told = book.told(parse_reference(request.query["reference"]), request.query.get("zone", ""))
        return web.Response(text=encode_policy(told), content_type="application/json")
    shown = [
        msgspec.to_builtins(policy.told())
        | {"readers": policy.readers.readers, "zones": policy.zones.zones, "warm": policy.warm.tags}
        for policy in book.table.policies
    ]
    body = msgspec.json.encode({"policies": shown, "problem": book.problem})
    return web.Response(body=body, content_type="application/json")


CHUNK = 256 << 10
"""Bytes of a bundle that wait for one slow agent; handed over whole, each agent would cost a copy
of it."""


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


async def package(request: web.Request) -> web.StreamResponse:
    """GET /v1/packages?reference=name:tag&zone=z: the bundle (p2pdist/model/manifest.py), with the
    manifest's digest as its ETag, and in a header the package's policy."""
    source = request.app[SERVICE].content
    reference = parse_reference(request.query.get("reference", ""))
    digest = (await source.resolve(reference)).digest
    told = await policy_header(request, reference, digest)
    response = web.StreamResponse(headers={"Content-Type": BUNDLE_TYPE, **told})
    response.etag = digest
    if ETag(digest) in (request.if_none_match or ()):
        response.set_status(304)
        await response.prepare(request)
        return response
    body = memoryview(await source.bundle(digest))
    response.content_length = len(body)
    await response.prepare(request)
    for start in range(0, len(body), CHUNK):
        await response.write(body[start : start + CHUNK])
    return response


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
