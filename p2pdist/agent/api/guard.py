"""The guard before every route of the agent: it learns whose request it is, and compares that with
the right that the route names.

Over TCP a request comes from the host in the certificate of its connection, from the bearer of a
token, or is anonymous; while access is off all may do everything there, as the network is then the
fence. On the Unix socket it comes from a process, which the kernel vouches for. Which blobs and
packages an identity may have is asked by the handlers, which know what is requested.
"""

from __future__ import annotations

from collections.abc import Sequence

from aiohttp import web
from aiohttp.typedefs import Handler, Middleware

from p2pdist.agent.agent import Agent
from p2pdist.agent.caller import Caller
from p2pdist.credentials.authority import peer_name
from p2pdist.model.access import ANONYMOUS, OPEN, TICKET_HEADER, Identity, Right
from p2pdist.model.digest import Digest, is_digest
from p2pdist.model.errors import NotFound, Refused, Unauthenticated, UsageError
from p2pdist.model.manifest import Reference, parse_reference
from p2pdist.model.messages import Priority
from p2pdist.transfer.openapi import Route

IDENTITY: web.RequestKey[Identity] = web.RequestKey("identity", Identity)
"""Where the guard leaves the identity of a request."""

_BLOB = "blob:sha256-"
_SAFE = ("GET", "HEAD", "OPTIONS")


def right_of(request: web.Request, rights: dict[tuple[str, str], Right | None]) -> Right | None:
    """The right that the route of a request names; None for a path that is not served."""
    resource = request.match_info.route.resource
    method = "GET" if request.method == "HEAD" else request.method
    return rights.get((method, resource.canonical)) if resource is not None else None


def public_guard(agent: Agent, routes: Sequence[Route]) -> Middleware:
    """The guard of `routes`, which are served over TCP."""
    rights = _rights(routes)

    @web.middleware
    async def guard(request: web.Request, handler: Handler) -> web.StreamResponse:
        if request.match_info.http_exception is not None:
            return await handler(request)  # no such path or method
        refuse_foreign_origin(request)
        request[IDENTITY] = identity = _remote(agent, request)
        _require(identity, right_of(request, rights), request)
        return await handler(request)

    return guard


def local_guard(agent: Agent, routes: Sequence[Route]) -> Middleware:
    """The guard of `routes`, which are served on the Unix socket."""
    rights = _rights(routes)

    @web.middleware
    async def guard(request: web.Request, handler: Handler) -> web.StreamResponse:
        if request.match_info.http_exception is not None:
            return await handler(request)
        refuse_foreign_origin(request)
        caller = caller_of(request)
        right = right_of(request, rights)
        if right == "local-admin":
            caller.require_trusted(f"request {request.path}")
        request[IDENTITY] = identity = await agent.access.callers.identity(caller, agent.access.peers.local)
        _require(identity, right, request)
        return await handler(request)

    return guard


def caller_of(request: web.Request) -> Caller:
    """The process at the other end of the Unix socket. Raises ConnectionError when it is gone."""
    connection = request.transport.get_extra_info("socket") if request.transport is not None else None
    if connection is None:
        raise ConnectionResetError("the process that asked is gone")
    return Caller.of(connection)


def refuse_foreign_origin(request: web.Request) -> None:
    """Raises Refused for a request that changes something and that a web page of another server
    makes through a user's browser."""
    origin = request.headers.get("Origin", "")
    if origin and request.method not in _SAFE and origin.partition("://")[2] != request.host:
        raise Refused("requests from web pages of other servers are refused", remedy="Use p2pdist or curl")


# -- what handlers ask


def peer_of(request: web.Request) -> str:
    """The host whose agent sent a request over TCP, by its certificate; "" for any other sender,
    and while access is off."""
    identity = request[IDENTITY]
    return identity.name if identity.kind == "agent" else ""


def require_agent(request: web.Request) -> None:
    """Raises Unauthenticated, while access is on, for a request over TCP without a certificate."""
    identity = request[IDENTITY]
    if identity.kind == "anonymous":
        raise Unauthenticated(
            "streams are for agents with a certificate of this fleet", remedy="Give that agent a --join-file"
        )


def admit(agent: Agent, request: web.Request, blob: Digest, asked: Priority) -> Priority:
    """The priority at which the sender of a request over TCP may receive a blob. Raises Refused."""
    return agent.access.admit(blob, request.headers.get(TICKET_HEADER, ""), peer_of(request), asked)


def require_blob(agent: Agent, request: web.Request, blob: Digest) -> None:
    """Raises NotFound where the sender of a request, over TCP, may not have a blob, as for a blob
    that is not here."""
    try:
        admit(agent, request, blob, "start")
    except Refused as error:
        raise NotFound(f"this agent neither holds nor fetches {blob}") from error


def may_read(agent: Agent, request: web.Request, text: str) -> bool:
    """Whether the process that asks may read what a reference names, or a blob by its digest."""
    try:
        require_reference(agent, request, text)
    except (NotFound, UsageError):
        return False
    return True


def require_reference(agent: Agent, request: web.Request, text: str) -> None:
    """Raises NotFound where the process that asks may not read the package that a reference names,
    UsageError for what is no reference. A name says nothing of a digest: rules that do not let a
    process read everything let it name digests only of packages that were found here under a name
    that it may read."""
    identity = request[IDENTITY]
    if identity.read.everything or identity.kind == "open":
        return
    reference: Reference = parse_reference(text)
    identity.require_read([reference.name], text)
    if reference.digest is not None:
        _require_digest(agent, identity, reference.digest, text)


def require_named(agent: Agent, request: web.Request, text: str) -> None:
    """Raises NotFound where the process that asks may not read a package, named by its reference,
    or a single blob, named by its digest or as `blob:sha256-<hex>`."""
    digest = text if is_digest(text) else f"sha256:{text.removeprefix(_BLOB)}" if text.startswith(_BLOB) else ""
    if is_digest(digest):
        require_digest(agent, request, Digest(digest))
    else:
        require_reference(agent, request, text)


def require_digest(agent: Agent, request: web.Request, digest: Digest) -> None:
    """Raises NotFound where the process that asks may not read a blob or document."""
    identity = request[IDENTITY]
    _require_digest(agent, identity, digest, str(digest))


def may_read_digest(agent: Agent, request: web.Request, digest: Digest) -> bool:
    """Whether the process that asks may read a blob or document."""
    identity = request[IDENTITY]
    return identity.may_read(agent.access.names.of(digest))


def _require_digest(agent: Agent, identity: Identity, digest: Digest, what: str) -> None:
    identity.require_read(agent.access.names.of(digest), what)


# -- whose request it is


def _rights(routes: Sequence[Route]) -> dict[tuple[str, str], Right | None]:
    return {(route.method, route.path): route.right for route in routes}


def _require(identity: Identity, right: Right | None, request: web.Request) -> None:
    """Raises Refused where an identity lacks a right; a route that names none is served to nobody.
    Handlers ask for tickets, which are for a blob."""
    if identity.kind == "open" or right == "ticket":
        return
    if right is None:
        raise Refused(f"{request.method} {request.path[:100]} names no right, and is served to nobody")
    identity.require(right)


def _remote(agent: Agent, request: web.Request) -> Identity:
    """The identity of a request over TCP. Raises Refused for a revoked host."""
    peers = agent.access.peers
    if not peers.on:
        return OPEN
    certificate = request.transport.get_extra_info("peercert") if request.transport is not None else None
    host = peer_name(certificate)
    if host:
        peers.require(host)
        return Identity("agent", host, frozenset({"open", "agent"}))
    return ANONYMOUS
