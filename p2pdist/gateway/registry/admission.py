"""Which images a client of the mirror may read.

Rights come from the client's identity, which the agent finds. A client that shows a credential for
an upstream, instead of one of this fleet, may read what that upstream lets it read: the upstream is
asked once with that credential, for the very thing that the client wants, and the answer counts for
the repository for a while. Nothing else is done with such a credential.

A client of which upstreams did not take credentials time and again is asked to wait: it could try
passwords through this host, and the upstream would shut this host out for it.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from typing import Protocol

from aiohttp import web

from p2pdist.gateway.registry.credentials import Credential, challenge, parse_credential
from p2pdist.gateway.registry.failures import RegistryFailure
from p2pdist.gateway.registry.names import RegistryRequest
from p2pdist.model.access import Identity
from p2pdist.model.errors import NotFound, Unavailable

ALLOWED_S, DENIED_S = 300.0, 20.0
"""How long an upstream's answer about a credential counts."""

ANSWERS_MAX = 4096
QUESTIONS_MAX = 16
"""Questions to upstreams at once: clients choose what is asked."""


class Upstreams(Protocol):
    """Asks an upstream what a credential may read."""

    async def lets(self, asked: RegistryRequest, credential: Credential) -> bool:
        """Whether the upstream gives `asked` to the bearer of `credential`. Raises Unavailable when
        it does not say."""


class WrongCredentials(Protocol):
    """Counts the credentials of each client that upstreams did not take."""

    def full(self, request: web.Request) -> bool:
        """Whether the client of a request has shown as many as it may for now."""

    def add(self, request: web.Request) -> None:
        """The client of a request has shown one."""


class Admission:
    """Decides for each request. `identity_of` finds the identity of a request; without `upstreams`
    only the fleet's own rights count, and without `wrong` clients may show any number of wrong
    credentials. On the event loop."""

    def __init__(
        self,
        identity_of: Callable[[web.Request], Identity],
        upstreams: Upstreams | None,
        clock: Callable[[], float],
        wrong: WrongCredentials | None = None,
    ) -> None:
        self._wrong = wrong
        self._identity_of, self._upstreams, self._clock = identity_of, upstreams, clock
        self._salt = os.urandom(16)
        self._answers: OrderedDict[bytes, tuple[float, bool]] = OrderedDict()
        """Until when an upstream's answer counts, and what it was, by credential and repository."""
        self._asking: dict[bytes, asyncio.Task[bool]] = {}

    def identity(self, request: web.Request) -> Identity:
        """The identity that sent a request."""
        return self._identity_of(request)

    async def require(self, request: web.Request, asked: RegistryRequest) -> None:
        """Raises RegistryFailure 401 where a credential might help, NotFound for an image that the
        client may not read, as for one that does not exist, and Unavailable."""
        identity, name = self._identity_of(request), str(asked.name)
        if identity.may_read([name]):
            return
        credential = parse_credential(request.headers.get("Authorization", ""))
        if identity.kind == "anonymous" and credential.kind == "none":
            raise unauthorized(request, scope=f"repository:{asked.name.repository}:pull")
        if identity.kind != "anonymous" or not await self._upstream_lets(credential, asked, request):
            raise NotFound(f"{name} is not known here")

    async def _upstream_lets(self, credential: Credential, asked: RegistryRequest, request: web.Request) -> bool:
        if self._upstreams is None:
            return False
        shown = f"{asked.name}\n{credential.authorization}"
        key = hashlib.blake2b(shown.encode(), key=self._salt).digest()
        until, allowed = self._answers.get(key, (0.0, False))
        if self._clock() < until:
            self._answers.move_to_end(key)
            return allowed
        if self._wrong is not None and self._wrong.full(request):
            raise Unavailable(
                "this client has shown too many credentials that upstreams do not take",
                remedy="Try again in a minute",
            )
        if (task := self._asking.get(key)) is None:
            if len(self._asking) >= QUESTIONS_MAX:
                raise Unavailable("too many credentials are being checked at their upstreams")
            question = self._upstreams.lets(asked, credential)
            task = self._asking[key] = asyncio.create_task(self._ask(key, question, request))
            task.add_done_callback(lambda _: self._asking.pop(key, None))
        return await asyncio.shield(task)

    async def _ask(self, key: bytes, question: Awaitable[bool], request: web.Request) -> bool:
        """What the upstream says to the client of a request, which may have left meanwhile: it
        could come back for the answer."""
        allowed = await question
        if self._wrong is not None and not allowed:
            self._wrong.add(request)
        self._answers[key] = self._clock() + (ALLOWED_S if allowed else DENIED_S), allowed
        self._answers.move_to_end(key)
        if len(self._answers) > ANSWERS_MAX:
            self._answers.popitem(last=False)
        return allowed


def unauthorized(request: web.Request, *, scope: str = "") -> RegistryFailure:
    """The failure that has a client look for a credential."""
    shown = bool(request.headers.get("Authorization"))
    text = challenge(request.scheme, request.host, scope=scope, insufficient=shown)
    return RegistryFailure(
        401,
        "UNAUTHORIZED",
        "this needs a token of the fleet, or a credential that the registry itself takes",
        headers={"WWW-Authenticate": text},
    )
