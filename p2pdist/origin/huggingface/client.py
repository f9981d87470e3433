"""Requests to a hub of models and data sets: redirects, retries, and what its errors mean.

A hub says why it fails in fields of the header. X-Error-Code is taken from there, and where it is
missing the status decides. A client's token goes to the hub alone: where a file is behind a
redirect to other storage, that storage gets none. Where redirects may lead,
origin/registry/addresses.py says.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Literal, cast, get_args

import aiohttp
from aiohttp.abc import AbstractResolver
from yarl import URL

from p2pdist.model.errors import (
    Corrupt,
    NotFound,
    P2PDistError,
    Refused,
    TooLarge,
    Unauthenticated,
    Unavailable,
    printable,
    unreached,
)
from p2pdist.model.hub import Code, failure
from p2pdist.origin.registry.addresses import AllowedAddresses, ElsewhereResolver, HomeResolver
from p2pdist.origin.registry.client import asked_s, left_alone_s, proxy_of, read_limited, redirect_target

CONNECT_TIMEOUT_S = 5.0
READ_TIMEOUT_S = 30.0
CONNECTIONS_MAX = 16
REDIRECTS_MAX = 5
TRIES_MAX = 2
PAUSE_S, PAUSE_MAX_S = 0.2, 1.0
"""Between two tries; a hub that asks for more is left alone instead."""

MESSAGE_CHARACTERS_MAX = 300

_BUSY = frozenset({408, 425, 429, 500, 502, 503, 504})
_REDIRECT = frozenset({301, 302, 303, 307, 308})
_CODES = frozenset(get_args(Code))

Place = Literal["home", "elsewhere", "proxy"]


class HubClient:
    """Connections to one hub, and to where it sends its readers. On one event loop."""

    def __init__(self, url: str) -> None:
        self.url, self.base = url, URL(url)
        self._allowed = AllowedAddresses(url, self.base.host or "")
        self._looked_up = False
        self._sessions: dict[Place, aiohttp.ClientSession] = {}

    async def close(self) -> None:
        """End the connections."""
        for session in self._sessions.values():
            await session.close()

    def is_own(self, url: URL) -> bool:
        """Whether an address is at the hub itself."""
        return url.origin() == self.base.origin()

    @asynccontextmanager
    async def request(
        self,
        method: str,
        url: URL,
        *,
        token: str = "",
        headers: Mapping[str, str] | None = None,
        expect: frozenset[int] = frozenset({200}),
        follow: Literal["all", "home"] = "all",
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        """One request and its response, whose status is in `expect`. Redirects are followed, with
        `home` those alone that stay at the hub: the first other one is the response. Raises
        NotFound and Refused, with what the hub says of it (model/hub.py, `failure`), and
        Unavailable."""
        sent = {"Accept-Encoding": "identity", **(headers or {})}
        for tries in range(1, TRIES_MAX + 1):
            try:
                response = await self._followed(method, url, token, sent, follow)
            except (aiohttp.ClientError, TimeoutError, OSError) as error:
                if tries == TRIES_MAX:
                    raise self._away(method, url, error) from error
                await asyncio.sleep(PAUSE_S)
                continue
            pause_s = asked_s(response)
            if response.status in _BUSY and response.status != 429 and tries < TRIES_MAX:
                response.release()
                if pause_s is None or pause_s <= PAUSE_MAX_S:
                    await asyncio.sleep(PAUSE_S if pause_s is None else pause_s)
                    continue
            async with response:
                try:
                    if response.status not in expect:
                        raise self._failure(method, url, response)
                    yield response
                except (aiohttp.ClientError, TimeoutError) as error:
                    raise self._away(method, url, error) from error
            return

    async def read_body(self, response: aiohttp.ClientResponse, limit: int) -> bytes:
        """The whole body. Raises Corrupt where it is encoded or over `limit` bytes, and ClientError
        where the connection breaks off."""
        if response.headers.get("Content-Encoding", "identity") != "identity":
            raise Corrupt(f"{self.url} encodes {response.url.path}, which changes its bytes")
        try:
            return await read_limited(response, limit, self.url)
        except TooLarge as error:  # the caller did not ask for too much: the hub sent it
            raise Corrupt(error.what, remedy="Tell the hub's operator") from error

    async def _followed(
        self, method: str, url: URL, token: str, headers: dict[str, str], follow: str
    ) -> aiohttp.ClientResponse:
        response = await self._send(method, url, token, headers)
        for followed in range(REDIRECTS_MAX + 1):
            if response.status not in _REDIRECT:
                break
            try:
                target = redirect_target(self.url, self.base, url, response.headers.get("Location", ""))
            except Refused:
                response.release()
                raise
            if follow == "home" and not self.is_own(target):
                break
            response.release()
            if followed == REDIRECTS_MAX:
                raise Refused(f"{self.url} redirects {method} {url.path} more than {REDIRECTS_MAX} times")
            url = target
            response = await self._send(method, url, token, headers)
        return response

    async def _send(self, method: str, url: URL, token: str, headers: dict[str, str]) -> aiohttp.ClientResponse:
        proxy, proxy_auth = await asyncio.to_thread(proxy_of, url)
        own = self.is_own(url)
        place: Place = "proxy" if proxy is not None else "home" if own else "elsewhere"
        if place == "elsewhere":
            await self._note_home()
            self._allowed.require_literal(url.host or "")
        shown = {"Authorization": f"Bearer {token}"} if token and own else {}
        return await self._session(place).request(
            method, url, headers={**headers, **shown}, allow_redirects=False, proxy=proxy, proxy_auth=proxy_auth
        )

    async def _note_home(self) -> None:
        """Look up where the hub is: what it may send its readers to depends on that."""
        if not self._looked_up:
            await HomeResolver(self._allowed).resolve(self.base.host or "")
            self._looked_up = True

    def _session(self, place: Place) -> aiohttp.ClientSession:
        if (session := self._sessions.get(place)) is None:
            resolvers: dict[Place, type[HomeResolver | ElsewhereResolver]]
            resolvers = {"home": HomeResolver, "elsewhere": ElsewhereResolver}
            made = resolvers.get(place)
            resolver: AbstractResolver | None = made(self._allowed) if made is not None else None
            session = self._sessions[place] = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=CONNECTIONS_MAX, resolver=resolver, use_dns_cache=False),
                timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_TIMEOUT_S, sock_read=READ_TIMEOUT_S),
                auto_decompress=False,
                cookie_jar=aiohttp.DummyCookieJar(),
                headers={"User-Agent": "p2pdist"},
            )
        return session

    def _failure(self, method: str, url: URL, response: aiohttp.ClientResponse) -> P2PDistError:
        """What an unexpected status means."""
        status, stated = response.status, response.headers.get("X-Error-Code", "")
        why = printable(response.headers.get("X-Error-Message", "") or response.reason or "")[:MESSAGE_CHARACTERS_MAX]
        what = f"{self.url} answers {method} {url.path} with {status}: {why}"
        code = cast(Code, stated) if stated in _CODES else None
        if status in _BUSY:
            left_s = left_alone_s(response)
            details = {"retry_after": left_s} if left_s is not None else {}
            return Unavailable(what, remedy="Try again later", **details)
        if code == "GatedRepo":
            remedy = "Ask for access at the hub, and show a token of an account that has it"
            return failure(Refused(what, remedy=remedy), code, status, why)
        if code is not None or status in (404, 410):
            error = NotFound(what, remedy="Check the name, and show a token if it is private", origin=self.url)
            return failure(error, code, status, why) if code is not None else error
        if status == 401:
            return failure(Unauthenticated(what, remedy="Show a token that the hub takes"), None, status, why)
        return Refused(what, remedy="See the log of the hub")

    def _away(self, method: str, url: URL, error: Exception) -> Unavailable:
        what = f"{self.url} cannot be reached ({method} {url.path}): {unreached(error)}"
        return Unavailable(what, remedy="Check that the address is right and the server is up")
