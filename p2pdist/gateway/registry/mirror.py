"""The registry interface of an agent (OCI distribution specification 1.1, the pulling part):
clients of container registries read the images of upstreams through it.

Theory. A client of a mirror asks the registry itself when the mirror fails at once, and waits,
often for half a minute a blob, when it says nothing. So no request is silent: within BEGIN_S the
head of an answer goes out, or 404 for what is unknown and 503 for what cannot be given now. The
body of a blob begins with its first verified piece and follows the others in order as they come;
the last piece of a body, that of a range included, is sent once the SHA-256 of the whole matched. A
pull that fails later breaks the connection, so that the client sees a truncated body and resumes
with a Range, here or elsewhere.

Content goes out as it is stored: no Content-Encoding is ever added. Nothing can be pushed.

Where documents and bytes come from is the agent's: see `Images` and `Bodies`.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Collection
from datetime import UTC, datetime
from typing import Protocol
from urllib.parse import urlencode

import msgspec
from aiohttp import web
from aiohttp.typedefs import Handler

from p2pdist.gateway.answers import Answers, Interface, Sent, answer_by, precondition
from p2pdist.gateway.registry.admission import Admission, unauthorized
from p2pdist.gateway.registry.counts import MirrorCounts
from p2pdist.gateway.registry.credentials import parse_credential
from p2pdist.gateway.registry.failures import JSON_TYPE, RegistryFailure, as_failure, failure_response
from p2pdist.gateway.registry.names import RegistryRequest, parse_request
from p2pdist.model.digest import Digest
from p2pdist.model.errors import Unavailable
from p2pdist.model.image import ImageName, is_tag
from p2pdist.model.image_manifest import INDEX_TYPE, ImageDocument, TagPage

BEGIN_S = 2.0
"""How long a client waits for the head of an answer, at most."""

REQUESTS_MAX = 512
"""Requests answered at once."""

TAGS_MAX = 1000
"""Tags of one page."""

TOKEN_S = 300
"""How long a client uses the form in which a token carries its credential."""

VERSION = {"Docker-Distribution-API-Version": "registry/2.0"}

_MEDIA_TYPE = re.compile(r"[A-Za-z0-9!#$&^_.+-]{1,127}/[A-Za-z0-9!#$&^_.+-]{1,127}\Z")
_COUNT = re.compile(r"[0-9]{1,6}\Z")


class Images(Protocol):
    """What is known of images. Every method raises NotFound, Refused and Unavailable; what belongs
    to another repository than the one named is not found."""

    def known_upstreams(self) -> Collection[str]:
        """The names of upstreams that are configured, as far as is known here."""

    def keeps(self, name: ImageName, target: str) -> bool:
        """Whether a manifest is in this host's store."""

    async def manifest(self, name: ImageName, target: str) -> ImageDocument:
        """A manifest or index by tag or digest."""

    async def tags(self, name: ImageName, count: int, last: str) -> TagPage:
        """Up to `count` tags after the tag `last` ("": from the first on)."""

    async def referrers(self, name: ImageName, digest: Digest, artifact_type: str) -> ImageDocument:
        """The index of what refers to a manifest, of one type where one is given."""

    async def blob_size(self, name: ImageName, digest: Digest) -> int:
        """The size of a blob of an image, which need not be here."""

    async def confirm(self, name: ImageName, digest: Digest) -> None:
        """Raises NotFound unless the registry has a blob in this repository: manifests may name
        blobs of others."""


class Bodies(Protocol):
    """Sends the bytes of blobs."""

    async def send(self, request: web.Request, name: ImageName, digest: Digest, deadline: float) -> Sent:
        """Answer a GET for a blob, or for ranges of it. Raises what `Images` raises, and
        Unavailable when at `deadline` (of the event loop) no byte can be given yet; both before the
        head was sent."""


class Mirror:
    """Answers requests of clients. On the event loop."""

    def __init__(self, images: Images, bodies: Bodies, admission: Admission, counts: MirrorCounts) -> None:
        self._images, self._bodies, self._admission, self._counts = images, bodies, admission, counts
        self._answers: Answers[RegistryRequest] = Answers(
            Interface(REQUESTS_MAX, _busy, lambda asked: asked.kind, counts.answered, self._failed)
        )

    @web.middleware
    async def failures(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Middleware that answers failures of the registry interface as its specification says,
        those of the router and the guard included, and sends clients that leave the last slash of
        the base out to where it is."""
        if request.path == "/v2" and request.method in ("GET", "HEAD"):
            self._counts.answered("base", 301, "none")
            return web.Response(status=301, headers={"Location": "/v2/", **VERSION})
        if request.path != "/v2" and not request.path.startswith("/v2/"):
            return await handler(request)
        try:
            response = await handler(request)
        except Exception as error:
            failure = as_failure(error)
            if failure.status == 401 and "WWW-Authenticate" not in failure.headers:
                failure.headers["WWW-Authenticate"] = 'Basic realm="p2pdist"'
            self._counts.answered("other", failure.status, "none")
            response = failure_response(failure)
        if not response.prepared:
            response.headers.update(VERSION)
        return response

    async def base(self, request: web.Request) -> web.StreamResponse:
        """Say that this is a registry. While access is on, a client that shows no credential is
        told where to get a token."""
        if self._admission.identity(request).kind == "anonymous" and not request.headers.get("Authorization"):
            raise unauthorized(request)
        self._counts.answered("base", 200, "none")
        return web.Response(body=b"{}", content_type=JSON_TYPE)

    async def token(self, request: web.Request) -> web.StreamResponse:
        """Give a registry client its own credential as the Bearer token that such clients expect.
        Nothing is issued."""
        carried = parse_credential(request.headers.get("Authorization", "")).carried
        now = datetime.fromtimestamp(time.time(), UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        body = {"token": carried, "access_token": carried, "expires_in": TOKEN_S, "issued_at": now}
        self._counts.answered("token", 200, "none")
        headers = {"Cache-Control": "no-store"}
        return web.Response(body=msgspec.json.encode(body), content_type=JSON_TYPE, headers=headers)

    async def image(self, request: web.Request) -> web.StreamResponse:
        """Serve a manifest, blob, list of tags or list of referrers of an image. `?ns=` names the
        upstream, else the first part of the path does where it looks like a host, else it is Docker
        Hub."""
        return await self._answers.answer(request, self._asked, self._answer)

    def _asked(self, request: web.Request) -> RegistryRequest:
        namespaces = request.query.getall("ns", [])
        asked = parse_request(request.rel_url.raw_path, namespaces, self._images.known_upstreams())
        self._counts.asked(asked.name.repository)
        return asked

    def _failed(self, request: web.Request, error: Exception, asked: RegistryRequest | None) -> web.Response:
        known = asked is not None and asked.name.upstream in self._images.known_upstreams()
        return failure_response(as_failure(error, asked.kind if asked is not None and known else ""))

    async def _answer(self, request: web.Request, asked: RegistryRequest) -> Sent:
        deadline = asyncio.get_running_loop().time() + BEGIN_S
        await answer_by(deadline, self._admission.require(request, asked))
        name = asked.name
        match asked.kind:
            case "blob" if request.method == "HEAD":
                digest = Digest(asked.target)
                size = await answer_by(deadline, self._images.blob_size(name, digest))
                return await _head(request, digest, size)
            case "blob":
                if not self._admission.identity(request).reads_everything:
                    await answer_by(deadline, self._images.confirm(name, Digest(asked.target)))
                return await self._bodies.send(request, name, Digest(asked.target), deadline)
            case "manifest":
                source = "store" if self._images.keeps(name, asked.target) else "tracker"
                document = await answer_by(deadline, self._images.manifest(name, asked.target))
                response = _manifest(request, document)
            case "tags":
                source, count, last = "tracker", _count(request), _last(request)
                page = await answer_by(deadline, self._images.tags(name, count, last))
                response = _tags(request, name, page, count)
            case "referrers":
                source, kind = "tracker", _artifact_type(request)
                index = await answer_by(deadline, self._images.referrers(name, Digest(asked.target), kind))
                headers = {"OCI-Filters-Applied": "artifactType"} if kind else {}
                response = web.Response(body=index.data, headers={"Content-Type": INDEX_TYPE, **headers})
        if isinstance(response.body, bytes) and request.method == "GET":
            self._counts.bytes[source] += len(response.body)
        return Sent(response, source)


def _busy() -> Unavailable:
    return Unavailable("this mirror answers as many requests as it may")


async def _head(request: web.Request, digest: Digest, size: int) -> Sent:
    headers = {"ETag": f'"{digest}"', "Accept-Ranges": "bytes", "Docker-Content-Digest": str(digest), **VERSION}
    if (early := precondition(request, digest, headers)) is not None:
        return Sent(early)
    response = web.StreamResponse(headers=headers)
    response.content_type = "application/octet-stream"
    response.content_length = size
    await response.prepare(request)
    return Sent(response)


def _manifest(request: web.Request, document: ImageDocument) -> web.Response:
    media_type = document.media_type if _MEDIA_TYPE.match(document.media_type) else "application/octet-stream"
    headers = {"ETag": f'"{document.digest}"', "Docker-Content-Digest": str(document.digest)}
    if (early := precondition(request, document.digest, headers)) is not None:
        return early
    return web.Response(body=document.data, headers={**headers, "Content-Type": media_type})


def _count(request: web.Request) -> int:
    text = request.query.get("n", "")
    if text and not _COUNT.match(text):
        raise RegistryFailure(400, "UNSUPPORTED", f"{text[:20]!r} is no number of tags")
    return min(int(text or TAGS_MAX), TAGS_MAX)


def _last(request: web.Request) -> str:
    last = request.query.get("last", "")
    if last and not is_tag(last):
        raise RegistryFailure(400, "UNSUPPORTED", f"{last[:128]!r} is no tag to go on after")
    return last


def _tags(request: web.Request, name: ImageName, page: TagPage, count: int) -> web.Response:
    response = web.Response(
        body=msgspec.json.encode({"name": name.repository, "tags": list(page.names)}), content_type=JSON_TYPE
    )
    if page.more and page.names:
        query = {"n": str(count), "last": page.names[-1]}
        if namespace := request.query.get("ns"):
            query["ns"] = namespace
        response.headers["Link"] = f'<{request.rel_url.raw_path}?{urlencode(query)}>; rel="next"'
    return response


def _artifact_type(request: web.Request) -> str:
    text = request.query.get("artifactType", "")
    if text and not _MEDIA_TYPE.match(text):
        raise RegistryFailure(400, "UNSUPPORTED", f"{text[:100]!r} is no type of artifacts")
    return text
