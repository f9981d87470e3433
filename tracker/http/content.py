"""Small content for agents: what references name, whole bundles, and manifests, configs and piece
lists by digest.

What policies say: of one package, for agents; all of them, for operators.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import msgspec
from aiohttp import ETag, web

from p2pdist.model.digest import Digest, parse_digest
from p2pdist.model.errors import Corrupt, NotFound, P2PDistError, Refused, TooLarge, Unavailable, UsageError
from p2pdist.model.manifest import BUNDLE_TYPE, MANIFEST_TYPE, Descriptor, Reference, parse_reference
from p2pdist.model.messages import PackageKeys
from p2pdist.model.policy import NO_POLICY, POLICY_HEADER, PackagePolicy, encode_policy
from p2pdist.transfer.guard import identity_of
from p2pdist.transfer.openapi import Answer, Query, Route
from tracker.cluster.siblings import Known
from tracker.content import Content
from tracker.http.keys import SERVICE
from tracker.http.trackers import announce
from tracker.joined_reads import ASKER
from tracker.policies import note_package


class PolicyStatus(PackagePolicy, frozen=True, kw_only=True):
    """A policy: what agents hear of its packages, how many hosts may read them from the origin at
    once, the zones and sites that may have them, and the tags that are kept warm."""

    readers: int | None
    zones: tuple[str, ...]
    warm: tuple[str, ...]
    sites: tuple[str, ...] = ()


class Policies(msgspec.Struct, frozen=True):
    """The policies in force. `problem` says why the file of policies was not read when it changed,
    empty when it was."""

    policies: list[PolicyStatus]
    problem: str


class DescriptorDocument(msgspec.Struct, frozen=True, rename="camel"):
    """An OCI content descriptor (image specification 1.0, descriptor.md)."""

    media_type: str
    digest: Digest
    size: int
    annotations: dict[str, str]


async def readable_package(request: web.Request, reference: Reference) -> Descriptor:
    """The manifest that a reference names, where the identity that asks may read it. Raises
    NotFound otherwise, as for what does not exist."""
    service, identity = request.app[SERVICE], identity_of(request)
    if service.access is None:
        return await service.content.resolve(reference)
    return await service.access.packages.find(identity, reference)


def require_blob(request: web.Request, digest: Digest) -> None:
    """Raises NotFound where the identity that asks may read no package that has the blob or
    document."""
    book = request.app[SERVICE].fleet.policies
    identity_of(request).require_read(book.readers_of(digest), f"{digest}")


def zone_of(request: web.Request) -> str:
    """The zone that a request names, "" for none. Raises Refused for one in which the identity may
    not be."""
    zone, identity = request.query.get("zone", ""), identity_of(request)
    if zone and identity.zones and zone not in identity.zones:
        raise Refused(
            f"{identity} may not be in the zone {zone[:100]!r}",
            remedy=f"Its join token is for {', '.join(identity.zones[:5])}",
        )
    return zone


async def policy_header(request: web.Request, reference: Reference, digest: Digest) -> dict[str, str]:
    """The header for an agent that asks for a package, in the zone that it names; none without a
    policy. Raises Refused."""
    service = request.app[SERVICE]
    await note_package(service.fleet.policies, service.content, reference, digest)
    policy = service.fleet.policies.for_agents(reference, zone_of(request), request.query.get("site"))
    return {POLICY_HEADER: encode_policy(policy)} if policy != NO_POLICY else {}


async def policies(request: web.Request) -> web.Response:
    """List the policies in order, or say what holds for one package. With a reference the answer is
    what an agent in that zone hears of the package. Raises Refused where it may not have it."""
    book = request.app[SERVICE].fleet.policies
    identity = identity_of(request)
    if "reference" in request.query:
        reference = parse_reference(request.query["reference"])
        identity.require_read([reference.name], str(reference))
        if reference.digest is not None and not identity.reads_everything:
            await readable_package(request, reference)  # whose tags, of other names, would tell by their policies
        policy = book.for_agents(reference, zone_of(request), request.query.get("site"))
        return web.Response(text=encode_policy(policy), content_type="application/json")
    listed = [
        PolicyStatus(
            *msgspec.structs.astuple(policy.for_agents()),
            readers=policy.readers.readers,
            zones=policy.zones.zones,
            sites=policy.sites.sites,
            warm=policy.warm.tags,
        )
        for policy in book.table.policies
        if identity.reads_everything or identity.read.contains(policy.match.partition(":")[0])
    ]
    return _json(Policies(listed, book.problem if identity.reads_everything else ""))


CHUNK = 256 << 10
"""Bytes of a bundle that wait for one slow agent; handed over whole, each agent would cost a copy
of it."""


def _json(body: Any) -> web.Response:
    return web.Response(body=msgspec.json.encode(body), content_type="application/json", charset="utf-8")


def _described(descriptor: Descriptor) -> web.Response:
    annotations = dict(descriptor.annotations)
    return _json(DescriptorDocument(descriptor.media_type, descriptor.digest, descriptor.size, annotations))


def _source(request: web.Request) -> Content:
    """The content, read on account of the address that asks."""
    ASKER.set(request.remote or "")
    return request.app[SERVICE].content


async def _require_form(request: web.Request, reference: Reference, digest: Digest) -> None:
    """Raises Refused for a package that must be encrypted and is not; and, where it is, for an
    agent of a release that would take it for another."""
    service, identity = request.app[SERVICE], identity_of(request)
    if service.access is None or not (rules := service.access.control.state.rules).sealed:
        return
    sealed = await service.access.sealed.is_sealed(digest)
    if not sealed and rules.requires_sealed(reference.name):
        raise Refused(
            f"{reference} is not encrypted, and its namespace takes no other packages",
            remedy="Push it with p2pdist push --encrypt-to RECIPIENT; p2pdist key list prints the recipient",
        )
    if sealed and identity.kind == "agent" and request.query.get("sealed") != "1":
        raise Refused(
            f"{reference} is encrypted, and the release of this agent cannot open it", remedy="Upgrade the agent"
        )


async def keys(request: web.Request) -> web.Response:
    """Give the keys of a sealed package to an agent that may read it."""
    reference, identity = parse_reference(request.query.get("reference", "")), identity_of(request)
    _source(request)
    access = request.app[SERVICE].access
    if access is None:
        raise NotFound("this tracker runs without access control", remedy="Start it with --access")
    note = partial(
        access.control.audit.note, "keys", identity=identity, address=request.remote or "", subject=f"{reference}"
    )
    try:
        digest = (await readable_package(request, reference)).digest
        await policy_header(request, reference, digest)  # which refuses where a policy does
        opened = await access.sealed.of(reference.name, digest)
    except P2PDistError as error:
        note(outcome=error.what)
        raise
    note()
    body = msgspec.json.encode(PackageKeys(dict(opened)))
    return web.Response(body=body, content_type="application/json", headers={"Cache-Control": "no-store"})


async def resolve(request: web.Request) -> web.Response:
    """Find the manifest that a reference names."""
    reference = parse_reference(request.query.get("reference", ""))
    _source(request)
    return _described(await readable_package(request, reference))


async def package(request: web.Request) -> web.StreamResponse:
    """Serve a package's bundle: its manifest and small documents in MessagePack. The ETag is the
    manifest's digest; the header P2pdist-Policy says how to move and keep the package."""
    source = _source(request)
    reference = parse_reference(request.query.get("reference", ""))
    digest = (await readable_package(request, reference)).digest
    await _require_form(request, reference, digest)
    policy_headers = await policy_header(request, reference, digest)
    await announce(request, Known(reference.name, digest))
    response = web.StreamResponse(headers={"Content-Type": BUNDLE_TYPE, **policy_headers})
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
    """Serve a small document by digest: a config, a piece list, a manifest."""
    digest = parse_digest(request.match_info["digest"])
    require_blob(request, digest)
    source = _source(request)
    if request.query.get("as") == "manifest":
        await source.read(digest)  # raises what is wrong with it at the origin
        try:
            return web.Response(body=await source.manifest(digest), content_type=MANIFEST_TYPE)
        except Corrupt as error:
            raise UsageError(error.what, remedy="Ask for it without as=manifest") from error
    return web.Response(body=await source.read(digest))


async def layer(request: web.Request) -> web.Response:
    """Describe a layer of a package that was read lately."""
    digest = parse_digest(request.match_info["digest"])
    require_blob(request, digest)
    return _described(await request.app[SERVICE].content.layer(digest))


_REFERENCE = Query("reference", "the package, as name:tag or name@digest", required=True)
PLACE_QUERY = (
    Query("zone", "the zone of the agent that asks"),
    Query("site", "its site, empty where the zone is one by itself"),
)
_READ_ERRORS = (UsageError, NotFound, Corrupt, Unavailable)

ROUTES = (
    Route(
        "GET",
        "/v1/resolve",
        resolve,
        (Answer(DescriptorDocument),),
        (_REFERENCE,),
        errors=_READ_ERRORS,
        right="read",
    ),
    Route(
        "GET",
        "/v1/packages",
        package,
        (Answer(media_type=BUNDLE_TYPE), Answer(status=304, media_type="")),
        (_REFERENCE, *PLACE_QUERY, Query("sealed", "1: the client can open encrypted packages")),
        errors=(*_READ_ERRORS, Refused),
        right="read",
    ),
    Route(
        "GET",
        "/v1/keys",
        keys,
        (Answer(PackageKeys),),
        (_REFERENCE, *PLACE_QUERY),
        errors=(*_READ_ERRORS, Refused),
        right="agent",
    ),
    Route(
        "GET",
        "/v1/content/{digest}",
        content,
        (Answer(media_type="application/octet-stream"), Answer(media_type=MANIFEST_TYPE)),
        (Query("as", "manifest: it is one, and its layers can be asked for from then on"),),
        errors=(*_READ_ERRORS, TooLarge),
        right="read",
    ),
    Route(
        "GET",
        "/v1/layers/{digest}",
        layer,
        (Answer(DescriptorDocument),),
        errors=(UsageError, NotFound),
        right="agent",
    ),
    Route(
        "GET",
        "/v1/policies",
        policies,
        (Answer(Policies), Answer(PackagePolicy)),
        (Query("reference", "the package; all policies if left out"), *PLACE_QUERY),
        errors=(*_READ_ERRORS, Refused),
        right="read",
    ),
)
