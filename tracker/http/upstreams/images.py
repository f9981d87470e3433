"""Images of upstream registries, for agents: manifests and indexes, tags, referrers, sizes of
blobs, and short-lived tokens for hosts that read blobs.

An image is a package named `upstream/repository`, and rights are compared with that name before
anything is asked upstream.
"""

from __future__ import annotations

from typing import Any

import msgspec
from aiohttp import ETag, web

from p2pdist.model.digest import Digest, is_digest, parse_digest
from p2pdist.model.errors import Corrupt, NotFound, Refused, Unavailable, UsageError
from p2pdist.model.image import ImageName, ImageReference, image_name, is_tag
from p2pdist.model.image_manifest import ACCEPTED_TYPES, ImageDocument
from p2pdist.model.policy import NO_POLICY, POLICY_HEADER, encode_policy
from p2pdist.model.upstream import Upstream
from p2pdist.origin.registry.upstream import TAG_PAGE_MAX
from p2pdist.transfer.guard import identity_of
from p2pdist.transfer.openapi import Answer, Query, Route
from tracker.cluster.siblings import Known
from tracker.http.content import PLACE_QUERY, zone_of
from tracker.http.keys import SERVICE
from tracker.http.trackers import announce
from tracker.joined_reads import ASKER
from tracker.policies import note_image
from tracker.upstreams.upstreams import Upstreams


class TagList(msgspec.Struct, frozen=True):
    """Some tags of a repository, in the registry's order; `more`: further ones follow."""

    tags: tuple[str, ...]
    more: bool


class BlobSize(msgspec.Struct, frozen=True):
    """A blob of an image, and its size in bytes."""

    digest: Digest
    size: int


class TokenDocument(msgspec.Struct, frozen=True):
    """A token that reads one repository of the upstream for `lasts_s` seconds; empty where the
    upstream asks for none."""

    token: str
    lasts_s: float


def _json(body: Any) -> web.Response:
    return web.Response(body=msgspec.json.encode(body), content_type="application/json", charset="utf-8")


def _image(request: web.Request) -> tuple[Upstreams, ImageName]:
    """The upstreams, asked on account of the address that asks, and the image, which the identity
    may read. Raises NotFound, UsageError."""
    service, info = request.app[SERVICE], request.match_info
    # Agents encode slashes, so that no name of a repository looks like another path.
    name = image_name(info["upstream"], info["repository"].replace("%2F", "/").replace("%2f", "/"))
    if service.access is not None:
        service.access.images.require(identity_of(request), name)
    ASKER.set(request.remote or "")
    return service.upstreams, name


async def _note(request: web.Request, name: ImageName, tag: str, found: ImageDocument) -> None:
    """Note what belongs to an image, for policies and for rights."""
    service = request.app[SERVICE]
    note_image(service.fleet.policies, name, tag, found)
    if service.access is not None and not identity_of(request).reads_everything:
        await service.access.images.bind(name, found)


async def upstreams(request: web.Request) -> web.Response:
    """List the upstream registries of this fleet."""
    return _json(request.app[SERVICE].upstreams.listed)


async def manifest(request: web.Request) -> web.Response:
    """Serve a manifest or index of an image, as its registry serves it. The ETag is its digest;
    the header P2pdist-Policy says how to move and keep the image."""
    known, name = _image(request)
    target, zone = request.match_info["target"], zone_of(request)
    if not is_tag(target) and not is_digest(target):
        raise UsageError(f"{target[:100]!r} is neither a tag nor a digest")
    found = await known.manifest(name, target)
    tag = "" if is_digest(target) else target
    await _note(request, name, tag, found)
    await announce(request, Known(str(name), found.digest, image=True))
    reference = ImageReference(name, tag, None if tag else found.digest).package
    policy = request.app[SERVICE].fleet.policies.for_agents(reference, zone, request.query.get("site"))
    headers = {POLICY_HEADER: encode_policy(policy)} if policy != NO_POLICY else {}
    if ETag(found.digest) in (request.if_none_match or ()):
        response = web.Response(status=304, headers=headers)
    else:
        response = web.Response(body=found.data, headers={"Content-Type": found.media_type, **headers})
    response.etag = found.digest
    return response


async def tags(request: web.Request) -> web.Response:
    """List tags of a repository, page by page."""
    known, name = _image(request)
    text, last = request.query.get("n", str(TAG_PAGE_MAX)), request.query.get("last", "")
    if not text.isascii() or not text.isdecimal() or len(text) > 6:
        raise UsageError(f"{text[:20]!r} is no number of tags")
    if last and not is_tag(last):
        raise UsageError(f"{last[:100]!r} is no tag")
    page = await known.tags(name, min(int(text), TAG_PAGE_MAX), last)
    return _json(TagList(page.names, page.more))


async def referrers(request: web.Request) -> web.Response:
    """Serve the index of what refers to a manifest, such as signatures."""
    known, name = _image(request)
    digest = parse_digest(request.match_info["digest"])
    artifact_type = request.query.get("artifactType", "")
    if len(artifact_type) > 255 or not artifact_type.isprintable():
        raise UsageError(f"{artifact_type[:100]!r} is no type of artifacts")
    found = await known.referrers(name, digest, artifact_type)
    response = web.Response(body=found.data, headers={"Content-Type": found.media_type})
    response.etag = found.digest
    return response


async def blob(request: web.Request) -> web.StreamResponse:
    """Say how large a blob of an image is. A HEAD request says it as the length of the content.
    With `confirm` a blob is found only where the registry has it in this repository, whatever
    manifests name."""
    known, name = _image(request)
    digest = parse_digest(request.match_info["digest"])
    size = await known.blob_size(name, digest)
    if request.query.get("confirm") and not await known.has_blob(name, digest):
        raise NotFound(f"{name} has no blob {digest} at its registry")
    service = request.app[SERVICE]
    if service.access is not None and not identity_of(request).reads_everything:
        await service.access.images.bind_blob(name, digest)
    if request.method == "HEAD":
        return web.Response(headers={"Content-Length": str(size), "Content-Type": "application/octet-stream"})
    return _json(BlobSize(digest, size))


async def token(request: web.Request) -> web.Response:
    """Give a token that reads one repository of the upstream for a few minutes. The account for
    which the upstream gives it stays here."""
    known, name = _image(request)
    found = await known.token(name)
    response = _json(TokenDocument(found.token, found.lasts_s))
    response.headers["Cache-Control"] = "no-store"
    return response


_IMAGE = "/v1/images/{upstream}/{repository:.+}"
_ERRORS = (UsageError, NotFound, Refused, Corrupt, Unavailable)

ROUTES = (
    Route("GET", "/v1/upstreams", upstreams, (Answer(list[Upstream]),), right="read"),
    Route(
        "GET",
        _IMAGE + "/manifests/{target}",
        manifest,
        (*(Answer(media_type=kind) for kind in ACCEPTED_TYPES), Answer(status=304, media_type="")),
        PLACE_QUERY,
        errors=_ERRORS,
        right="read",
    ),
    Route(
        "GET",
        _IMAGE + "/tags",
        tags,
        (Answer(TagList),),
        (Query("n", "at most so many"), Query("last", "those after this tag")),
        errors=_ERRORS,
        right="read",
    ),
    Route(
        "GET",
        _IMAGE + "/referrers/{digest}",
        referrers,
        (Answer(media_type=ACCEPTED_TYPES[0]),),
        (Query("artifactType", "only those of this type"),),
        errors=_ERRORS,
        right="read",
    ),
    Route(
        "GET",
        _IMAGE + "/blobs/{digest}",
        blob,
        (Answer(BlobSize),),
        (Query("confirm", "1: the registry has it in this repository"),),
        errors=_ERRORS,
        right="read",
    ),
    Route("GET", _IMAGE + "/token", token, (Answer(TokenDocument),), errors=_ERRORS, right="agent"),
)
