"""The guard of an HTTP server: which identity sends a request, and whether the route's right is one
of its rights (p2pdist/model/access.py).

Every route names its right in the table of routes (openapi.py). While access is off the guard is
given no function that finds identities, and every request may do everything.

A page of another site, open in a browser on a machine that reaches this server, must not act with
what the machine may do: requests that change something, and sessions, are refused when their Origin
(RFC 6454) is not this server. That holds with access off as well.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from aiohttp import web
from aiohttp.typedefs import Handler, Middleware

from p2pdist.model.access import ANONYMOUS, OPEN, Identity, Right
from p2pdist.model.errors import NotFound, Refused
from p2pdist.transfer.openapi import route_of

SAFE_METHODS = frozenset(["GET", "HEAD", "OPTIONS"])
CHECKED_BY_HANDLER: frozenset[Right] = frozenset(["join", "ticket", "image"])
"""Rights that something in the request gives, which its handler reads."""

_KEY: Any = getattr(web, "RequestKey", lambda name, kind: name)("p2pdist.identity", Identity)
"""A key with a type where aiohttp has these, since 3.14."""

Identify = Callable[[web.Request], Awaitable[Identity]]
"""The identity of a request. Raises Unauthenticated for a credential that is not valid."""

Refusal = Callable[[web.Request, Right | None, Refused], None]
"""Hears of a request that was refused, and the right that its route names."""


def identity_of(request: web.Request) -> Identity:
    """The identity that sent a request; OPEN while access is off."""
    identity: Identity = request.get(_KEY, OPEN)
    return identity


def peer_of(request: web.Request) -> dict[str, Any] | None:
    """The verified certificate at the other end of the connection, as ssl.SSLSocket.getpeercert
    returns it; None without one."""
    peer: dict[str, Any] | None = request.get_extra_info("peercert")
    return peer or None


def guard(identify: Identify | None, refused: Refusal = lambda request, right, error: None) -> Middleware:
    """Middleware that checks the right of the request's route; `identify` is None while access is
    off."""

    @web.middleware
    async def guarded(request: web.Request, handler: Handler) -> web.StreamResponse:
        route = route_of(request)
        right = route.right if route is not None else None
        if identify is not None:
            request[_KEY] = ANONYMOUS
        try:
            if request.method not in SAFE_METHODS or request.headers.get("Upgrade"):
                refuse_other_sites(request)
            if identify is not None and route is not None:
                identity = request[_KEY] = await identify(request)
                if right is None:
                    raise NotFound(f"{request.method} {request.path[:200]}: it is not served")
                if right not in CHECKED_BY_HANDLER:
                    identity.require(right, route.also)
            return await handler(request)
        except Refused as error:
            refused(request, right, error)
            raise

    return guarded


def refuse_other_sites(request: web.Request) -> None:
    """Raises Refused for a request that a browser sends for a page of another site."""
    origin = request.headers.get("Origin")
    if origin is not None and origin.partition("://")[2].lower() != request.host.lower():
        raise Refused("a page of another site may not do this", remedy="Use the p2pdist command")
