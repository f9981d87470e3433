"""What policies say: of one package, for agents; all of them, for operators."""

from __future__ import annotations

import msgspec
from aiohttp import web

from p2pdist.model.digest import Digest
from p2pdist.model.manifest import Reference, parse_reference
from p2pdist.model.policy import NO_POLICY, POLICY_HEADER, encode_policy
from tracker.http.keys import SERVICE
from tracker.policies import note_package


async def header(request: web.Request, reference: Reference, digest: Digest) -> dict[str, str]:
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
