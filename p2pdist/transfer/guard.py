"""The guard of an HTTP server: which identity sends a request, and whether the route's right is one
of its rights (p2pdist/model/access.py).

Every route names its right in the table of routes (openapi.py). While access is off every request
may do everything: the function that finds identities returns OPEN, or there is none.

A page of another site, open in a browser on a machine that reaches this server, must not act with
what the machine may do: requests that change something, and sessions, are refused when their Origin
(RFC 6454) is not this server. That holds with access off as well.

Such a page could also let the name of its site lead to this server (DNS rebinding); then nothing in
its requests but the name tells it from this server's own clients. So while access is off, requests
for a name that is not this server's are refused: `OwnNames`.
"""

from __future__ import annotations

import socket
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Iterable
from ipaddress import ip_address
from pathlib import Path
from typing import Any

from aiohttp import web
from aiohttp.typedefs import Handler, Middleware

from p2pdist.model.access import ANONYMOUS, OPEN, Identity, Right
from p2pdist.model.errors import NotFound, Refused
from p2pdist.transfer.openapi import route_of

SAFE_METHODS = frozenset(["GET", "HEAD", "OPTIONS"])
CHECKED_BY_HANDLER: frozenset[Right] = frozenset(["join", "ticket", "image", "object"])
"""Rights that something in the request gives, which its handler reads."""

LEARNT_MAX = 64

PRIVATE_DOMAINS = (".localhost", ".local", ".internal", ".home.arpa", ".svc")
"""Domains that the public DNS does not have (RFC 6761, RFC 6762, RFC 8375, ICANN's .internal; .svc
is that of Kubernetes' Services)."""

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


class OwnNames:
    """The names of a server: under which its clients may reach it while access is off. Addresses
    and names of the machine are; `given` are others; and so is any name that no site of the public
    DNS can have: without a dot, as in compose files, or in one of PRIVATE_DOMAINS.

    A name is learnt as well from a request that no page can make: one that asks for a WebSocket and
    has no Origin, which browsers always send with it (RFC 6455, 4.1). So a tracker that agents
    reach under a name need not be told the name. At most LEARNT_MAX are kept.
    """

    def __init__(self, given: Iterable[str] = ()) -> None:
        machine = socket.gethostname().lower()
        domains = _search_domains()
        self._names = {machine, *(f"{machine}.{domain}" for domain in domains), *map(_plain, given)}
        self._learnt: OrderedDict[str, None] = OrderedDict()

    def check(self, request: web.Request) -> None:
        """Raises Refused for a request under a name that is not this server's. On a Unix socket
        each name is as good as another."""
        name = _plain(request.host)
        if (
            not name
            or not request.remote
            or name in self._names
            or name in self._learnt
            or "." not in name
            or name.endswith(PRIVATE_DOMAINS)
            or _is_ip(name)
        ):
            return
        if request.headers.get("Upgrade", "").lower() == "websocket" and "Origin" not in request.headers:
            self._learnt[name] = None
            if len(self._learnt) > LEARNT_MAX:
                self._learnt.popitem(last=False)
            return
        raise Refused(
            f"{name[:100]} is not known as a name of this server",
            remedy="Use its address, or start it with --hostnames and that name",
        )


def _plain(host: str) -> str:
    """The host in a Host field, without its port."""
    text = host.strip().lower()
    if text.startswith("["):
        return text[1:].partition("]")[0]
    return (text.rpartition(":")[0] if text.count(":") == 1 else text).rstrip(".")


def _is_ip(name: str) -> bool:
    try:
        ip_address(name)
    except ValueError:
        return False
    return True


def _search_domains() -> list[str]:
    """The domains in which this machine looks for short names (resolv.conf(5))."""
    try:
        lines = Path("/etc/resolv.conf").read_text(errors="replace").lower().splitlines()
    except OSError:
        return []
    fields = (line.split() for line in lines)
    return [domain.strip(".") for field in fields if field[:1] in (["search"], ["domain"]) for domain in field[1:]]


def guard(
    identify: Identify | None,
    refused: Refusal = lambda request, right, error: None,
    *,
    names: OwnNames | None = None,
) -> Middleware:
    """Middleware that checks the right of the request's route; `identify` is None while access is
    off. `names` are those of a server that others than this machine's processes reach. What is in
    no table of routes is not served while access is on."""

    @web.middleware
    async def guarded(request: web.Request, handler: Handler) -> web.StreamResponse:
        route = route_of(request)
        right = route.right if route is not None else None
        if identify is not None:
            request[_KEY] = ANONYMOUS
        try:
            if request.method not in SAFE_METHODS or request.headers.get("Upgrade"):
                refuse_other_sites(request)
            if request.match_info.http_exception is not None:
                return await handler(request)  # it says that nothing is there
            identity = OPEN if identify is None else await identify(request)
            request[_KEY] = identity
            # An image may be for any process of this machine while access is on, too.
            unidentified = identity.kind == "open" or (identity.kind == "anonymous" and right == "image")
            if names is not None and right != "open" and unidentified:
                names.check(request)
            if identity.kind != "open":
                if right is None or route is None:
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
