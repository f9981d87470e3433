"""Joins, renewals and the authorities of a fleet; and which identity sends a request to the
tracker.

While access is off none of these routes exists for a client, and every request may do everything.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

import msgspec
from aiohttp import web
from aiohttp.typedefs import Middleware

from p2pdist.model.access import Identity, Right
from p2pdist.model.errors import NotFound, P2PDistError, Refused, TooLarge, Unauthenticated, Unavailable, UsageError
from p2pdist.model.messages import Joined, JoinRequest, RenewRequest
from p2pdist.model.preseed import decode_request
from p2pdist.transfer.guard import OwnNames, guard, identity_of, peer_of
from p2pdist.transfer.openapi import Answer, Route, route_of
from tracker.http.keys import SERVICE

if TYPE_CHECKING:
    from tracker.access.control import AccessControl

PEM_TYPE = "application/x-pem-file"
BODY_BYTES_MAX = 64 << 10

Body = TypeVar("Body", bound=msgspec.Struct)


def guard_of(control: AccessControl | None, names: OwnNames) -> Middleware:
    """The middleware that checks rights by an access file, and notes refusals; without one, that
    requests are for one of the tracker's own names."""
    if control is None:
        return guard(None, names=names)

    async def identify(request: web.Request) -> Identity:
        return await control.identities.of(peer_of(request), request.headers.get("Authorization", ""))

    def refused(request: web.Request, right: Right | None, error: Refused) -> None:
        note_refusal(request, error, right)

    return guard(identify, refused)


async def still_allowed(request: web.Request) -> bool:
    """Whether a request whose answer takes long would be served as much if it came now: its token
    may have expired, or been revoked, and its role may read less than when the answer began."""
    access, route = request.app[SERVICE].access, route_of(request)
    if access is None or route is None or route.right is None:
        return access is None
    try:
        identity = await access.control.identities.of(peer_of(request), request.headers.get("Authorization", ""))
        identity.require(route.right, route.also)
    except P2PDistError:
        return False
    gone = set(identity_of(request).read.patterns) - set(identity.read.patterns)  # mostly none, of up to thousands
    return all(map(identity.read.contains, gone))


def note_refusal(request: web.Request, error: P2PDistError, right: Right | None = None) -> None:
    """Write to the audit that a request, or a session, was refused."""
    access = request.app[SERVICE].access
    if access is not None:
        access.control.audit.refuse(
            identity=identity_of(request),
            address=request.remote or "",
            right=right or getattr(route_of(request), "right", None) or "",
            subject=f"{request.method} {request.path[:200]}",
            why=error.what,
        )


def _control(request: web.Request) -> AccessControl:
    access = request.app[SERVICE].access
    if access is None:
        raise NotFound("this tracker runs without access control", remedy="Start it with --access")
    return access.control


async def _body(request: web.Request, kind: type[Body]) -> Body:
    data = await request.read()
    if len(data) > BODY_BYTES_MAX:
        raise TooLarge(f"a request of {len(data)} bytes is over the limit of {BODY_BYTES_MAX}")
    return decode_request(data, kind)


def _answer(joined: Joined) -> web.Response:
    return web.Response(body=msgspec.json.encode(joined), content_type="application/json")


async def authorities(request: web.Request) -> web.Response:
    """State the certificates of the fleet's authorities, the newest first. A client compares them
    with the fingerprint in its token before it trusts any."""
    return web.Response(body=_control(request).state.bundle, content_type=PEM_TYPE)


async def join(request: web.Request) -> web.Response:
    """Give the certificate of an agent to a host that has a join token."""
    control = _control(request)
    return _answer(await control.joins.join(await _body(request, JoinRequest), request.remote or ""))


async def renew(request: web.Request) -> web.Response:
    """Give a new certificate to the agent whose certificate the connection shows."""
    control = _control(request)
    wanted = await _body(request, RenewRequest)
    return _answer(await control.joins.renew(identity_of(request), wanted, request.remote or ""))


ROUTES = (
    Route(
        "GET", "/v1/access/authorities", authorities, (Answer(media_type=PEM_TYPE),), errors=(NotFound,), right="open"
    ),
    Route(
        "POST",
        "/v1/join",
        join,
        (Answer(Joined),),
        request=JoinRequest,
        errors=(UsageError, TooLarge, Unauthenticated, Refused, NotFound, Unavailable),
        right="join",
    ),
    Route(
        "POST",
        "/v1/renew",
        renew,
        (Answer(Joined),),
        request=RenewRequest,
        errors=(UsageError, TooLarge, Unauthenticated, Refused, NotFound),
        right="agent",
    ),
)
