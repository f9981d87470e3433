"""The senders of requests to the agent, and what each may have (p2pdist/transfer/guard.py checks
the rights of routes).

Over TCP a request comes from the host in the certificate of its connection, from the bearer of a
token, or is anonymous; while access is off all may do everything there, as the network is then the
fence. On the Unix socket it comes from a process, which the kernel vouches for. Which blobs and
packages an identity may have is asked by the handlers, which know what is requested.
"""

from __future__ import annotations

from contextlib import AbstractContextManager

from aiohttp import web

from p2pdist.agent.access.peers import Ends
from p2pdist.agent.agent import Agent
from p2pdist.agent.caller import Caller
from p2pdist.model.access import ANONYMOUS, OPEN, TICKET_HEADER, Identity
from p2pdist.model.digest import Digest, is_digest
from p2pdist.model.errors import NotFound, Refused, Unauthenticated, Unavailable, UsageError
from p2pdist.model.image import package_reference
from p2pdist.model.messages import Priority
from p2pdist.transfer.guard import Identify, identity_of, peer_of
from p2pdist.transfer.openapi import route_of

_BLOB = "blob:sha256-"
_BEARER = "bearer "


def remote_identities(agent: Agent) -> Identify:
    """The identities of requests over TCP."""

    async def identify(request: web.Request) -> Identity:
        peers = agent.access.peers
        if not peers.on:
            return OPEN
        certificate = peer_of(request)
        if host := peers.host_in(certificate):
            join = peers.join_in(certificate)
            peers.require(host, join)
            return Identity("agent", host, frozenset({"open", "agent"}), credential=f"join:{join}")
        given = request.headers.get("Authorization", "")
        if given[: len(_BEARER)].lower() == _BEARER:
            return peers.bearer(given[len(_BEARER) :])
        return ANONYMOUS

    return identify


def local_identities(agent: Agent) -> Identify:
    """The identities of requests on the Unix socket."""

    async def identify(request: web.Request) -> Identity:
        caller, route = caller_of(request), route_of(request)
        if route is not None and route.right == "local-admin":
            caller.require_trusted(f"request {request.path}")
        if route is not None and route.right == "local" and not (agent.access.peers.ruled or caller.trusted):
            raise Unavailable(
                f"what user {caller.uid} may read is not known before a tracker has answered",
                remedy="Ask again when the agent's log says that a tracker answers",
            )
        return await agent.access.callers.identity(caller, agent.access.peers.local)

    return identify


def caller_of(request: web.Request) -> Caller:
    """The process at the other end of the Unix socket. Raises ConnectionError when it is gone."""
    connection = request.transport.get_extra_info("socket") if request.transport is not None else None
    if connection is None:
        raise ConnectionResetError("the process that asked is gone")
    return Caller.of(connection)


# -- what handlers ask


def host_of(request: web.Request) -> str:
    """The host of the agent that sent a request over TCP, by its certificate; "" for any other
    sender, and while access is off."""
    identity = identity_of(request)
    return identity.name if identity.kind == "agent" else ""


def serving(agent: Agent, request: web.Request, served: Ends) -> AbstractContextManager[None]:
    """Within it something is sent to the sender of a request over TCP, and ends when that host is
    revoked."""
    return agent.access.peers.serving(host_of(request), _join_of(request), served)


def _join_of(request: web.Request) -> str:
    """The id of the join token in the certificate of the agent that sent a request."""
    return identity_of(request).credential.removeprefix("join:")


def require_agent(request: web.Request) -> None:
    """Raises Unauthenticated, while access is on, for a request over TCP without a certificate."""
    identity = identity_of(request)
    if identity.kind == "anonymous":
        raise Unauthenticated(
            "streams are for agents with a certificate of this fleet", remedy="Give that agent a --join-file"
        )


def admit(agent: Agent, request: web.Request, blob: Digest, asked: Priority) -> Priority:
    """The priority at which the sender of a request over TCP may receive a blob. Raises Refused."""
    ticket, host = request.headers.get(TICKET_HEADER, ""), host_of(request)
    return agent.access.admit(blob, ticket, host, asked, join=_join_of(request) if host else None)


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
    identity = identity_of(request)
    if identity.read.everything or identity.kind == "open":
        return
    reference = package_reference(text)
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
    identity = identity_of(request)
    _require_digest(agent, identity, digest, str(digest))


def may_read_digest(agent: Agent, request: web.Request, digest: Digest) -> bool:
    """Whether the process that asks may read a blob or document."""
    identity = identity_of(request)
    return identity.may_read(agent.access.names.of(digest))


def _require_digest(agent: Agent, identity: Identity, digest: Digest, what: str) -> None:
    identity.require_read(agent.access.names.of(digest), what)
