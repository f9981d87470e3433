"""The audit of an agent: a line for each request of a process that changes something, and for each
that is refused (p2pdist/transfer/audit.py). It is kept while access is on, or where a file for it
is named.

What a line says a request was about comes from its query and from its body, as far as the handler
decoded one.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import msgspec
from aiohttp import web
from aiohttp.typedefs import Handler, Middleware

from p2pdist.agent.agent import Agent
from p2pdist.agent.api.guard import caller_of
from p2pdist.model.access import Right
from p2pdist.model.errors import P2PDistError, Refused
from p2pdist.transfer.audit import Audit
from p2pdist.transfer.guard import SAFE_METHODS, identity_of
from p2pdist.transfer.openapi import route_of

EVENTS = {
    ("POST", "/v1/pulls"): "pull",
    ("POST", "/v1/mounts"): "mount",
    ("DELETE", "/v1/mounts"): "unmount",
    ("DELETE", "/v1/packages"): "remove",
    ("POST", "/v1/pins"): "pin",
    ("DELETE", "/v1/pins"): "unpin",
    ("POST", "/v1/collect"): "collect",
    ("POST", "/v1/prune"): "prune",
    ("POST", "/v1/verify"): "verify",
    ("POST", "/v1/drain"): "drain",
}
"""What routes that change something are called."""

SUBJECT_FIELDS = ("package", "reference", "blob", "path", "output", "owner", "repair", "seconds", "dry_run", "tagged")
"""What of a query or a body a line names."""

BODY: Any = getattr(web, "RequestKey", lambda name, kind: name)("p2pdist.body", msgspec.Struct)
"""The decoded body of a request, which its handler notes; a key with a type where aiohttp has
these, since 3.14."""


class AgentAudit:
    """Writes the audit of one agent."""

    def __init__(self, agent: Agent) -> None:
        self._agent, self._audit = agent, Audit()

    @property
    def _on(self) -> bool:
        return self._agent.settings.audited or self._agent.access.peers.on

    def refused(self, request: web.Request, right: Right | None, error: Refused) -> None:
        """A request was refused."""
        if self._on:
            self._audit.refuse(
                identity=identity_of(request),
                address=_address(request),
                right=right or "",
                subject=f"{request.method} {request.path[:200]}",
                why=error.what,
            )

    def changes(self) -> Middleware:
        """Middleware that notes requests which change something, once they have ended."""

        @web.middleware
        async def noted(request: web.Request, handler: Handler) -> web.StreamResponse:
            if request.method in SAFE_METHODS:
                return await handler(request)
            outcome = "the client has gone"
            try:
                response = await handler(request)
                outcome = "done"
            except P2PDistError as error:
                outcome = "" if isinstance(error, Refused) else error.what  # the guard notes a refusal
                raise
            except Exception as error:
                outcome = type(error).__name__
                raise
            finally:
                if outcome and self._on:
                    self._note(request, outcome)
            return response

        return noted

    def _note(self, request: web.Request, outcome: str) -> None:
        route = route_of(request)
        self._audit.note(
            EVENTS.get((request.method, request.path), "request"),
            identity=identity_of(request),
            address=_address(request),
            right=(route.right or "") if route is not None else "",
            subject=", ".join(_subject(request)) or f"{request.method} {request.path[:200]}",
            outcome=outcome,
        )


def _address(request: web.Request) -> str:
    """Where a request came from: an address, or the process at the Unix socket."""
    if request.remote:
        return request.remote
    with contextlib.suppress(ConnectionError, OSError):
        caller = caller_of(request)
        return f"uid:{caller.uid}"
    return ""


def _subject(request: web.Request) -> Iterator[str]:
    body = request.get(BODY)
    for name in SUBJECT_FIELDS:
        value = request.query.get(name) or getattr(body, name, None)
        if value:
            yield f"{name}={value}"
