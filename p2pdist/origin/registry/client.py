"""Requests to an OCI registry: authentication, redirects, retries, and what its errors mean (OCI
distribution specification 1.1).

A registry answers 401 with the kind of credential that it wants (authentication.py). Credentials
stand in the URL, or in Docker's config.json (accounts.py). They go to the registry and its realm
alone: where a blob is behind a redirect to other storage, that storage gets none. Where redirects
and realms may lead, addresses.py says.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from email.utils import parsedate_to_datetime
from typing import Any, Literal
from urllib.parse import unquote, urlsplit

import aiohttp
from aiohttp.abc import AbstractResolver
from aiohttp.helpers import get_env_proxy_for_url
from yarl import URL

from p2pdist.model.errors import NotFound, P2PDistError, Refused, TooLarge, Unavailable, unreached
from p2pdist.origin.registry.accounts import Account, Accounts, Fixed, docker_accounts
from p2pdist.origin.registry.addresses import (
    AllowedAddresses,
    ElsewhereResolver,
    HomeResolver,
    is_inner,
    is_loopback,
)
from p2pdist.origin.registry.authentication import Authentication, PullToken, TokenSource

CONNECT_TIMEOUT_S = 5.0
READ_TIMEOUT_S = 30.0
CONNECTIONS_MAX = 16
TRIES_MAX = 4
PAUSE_MAX_S = 30.0
"""How long a registry may ask to be left alone (Retry-After) before a request counts as failed."""

LIMITED_S_MAX, BUSY_S_MAX = 300.0, 60.0
"""How long a service that asks to be left alone is taken at its word: where it limits requests
(429), and where it has too much to do, which any proxy on the way to it may say as well. What
follows is one question (tracker/upstreams/pauses.py), not those of a fleet."""

LIMITED_S = 30.0
"""How long a service is taken to want that limits requests and does not say it."""

TOKEN_LEFT_S_MIN = 20.0
"""A token that another host gets is valid for so long at least, where the realm's last long
enough."""

ERROR_BYTES_MAX = 16384
TOKEN_BYTES_MAX = 1 << 20
REDIRECTS_MAX = 5
_BUSY = frozenset({408, 425, 429, 500, 502, 503, 504})
_REDIRECT = frozenset({301, 302, 303, 307, 308})
Place = Literal["home", "elsewhere", "proxy"]
"""Where a connection leads: to the registry itself, where it sends its readers, or to a proxy that
leads to either."""


@dataclass(slots=True)
class RegistryClient:
    """Requests to one registry. Every failure names `url`. Use it from one event loop."""

    url: str
    """For messages, without credentials."""
    base: URL
    accounts: Accounts
    source: TokenSource | None = None
    """Asked for tokens before the realm is."""
    tries_max: int = TRIES_MAX
    """How often a busy registry is asked."""
    pause_max_s: float = PAUSE_MAX_S
    """How long a request waits for a registry that asks to be left alone."""
    redirects: Sequence[str] = ()
    """Hosts and networks to which the registry may send its readers, besides what it may anyway."""
    private: bool = False
    """Whether that may be any private network: for a registry of ours."""
    authentication: Authentication = field(init=False)
    _allowed: AllowedAddresses = field(init=False)
    _sessions: dict[Place, aiohttp.ClientSession] = field(default_factory=dict)
    """Connections by where they lead."""
    _closed: bool = False

    def __post_init__(self) -> None:
        self._allowed = AllowedAddresses(self.url, self.base.host or "", listed=self.redirects, private=self.private)
        self.authentication = Authentication(self.url, self.base, self.accounts, self._ask_realm, self.source)

    @classmethod
    def of(cls, url: str, shown: str) -> RegistryClient:
        """The client of an `oci://` or `oci+http://` URL. Plain HTTP is spoken to this machine, and
        where the scheme says so."""
        parts = urlsplit(url)
        host = parts.hostname or ""
        plain = parts.scheme.lower() == "oci+http" or is_loopback(host)
        base = URL.build(scheme="http" if plain else "https", host=host, port=parts.port)
        if parts.username is not None:
            account = Fixed(Account(unquote(parts.username), unquote(parts.password or "")))
            return cls(shown, base, account, private=True)
        return cls(shown, base, docker_accounts(parts.netloc.rpartition("@")[2]), private=True)

    async def close(self) -> None:
        """End the connections. Requests that are under way raise Unavailable."""
        self._closed = True
        for session in self._sessions.values():
            await session.close()

    @asynccontextmanager
    async def request(
        self,
        method: str,
        path: str | URL,
        scope: str,
        *,
        headers: Mapping[str, str] | None = None,
        data: Any = None,
        params: Mapping[str, str] | None = None,
        expect: frozenset[int] = frozenset({200}),
        retry: bool = True,
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        """One request and its response, whose status is in `expect`. `scope` is what a token must
        allow, such as `repository:team/app:pull`. A busy registry is asked again, a few times,
        unless `data` can be sent once only (`retry`). Raises NotFound, Refused, Unavailable."""
        url = self.base.join(URL(str(path))).update_query(params or {})
        for tries in range(1, self.tries_max + 1):
            last = tries == self.tries_max or not retry
            try:
                response = await self._once(method, url, scope, dict(headers or {}), data)
            except (aiohttp.ClientError, TimeoutError, OSError) as error:
                if last:
                    raise self._away(method, url, error) from error
                await asyncio.sleep(_pause_s(None, tries))
                continue
            if response.status in _BUSY and not last:
                pause_s = _pause_s(response, tries)
                response.release()
                if pause_s <= self.pause_max_s:
                    await asyncio.sleep(pause_s)
                    continue
                raise self._busy(f"{self.url} asks to be left alone for {pause_s:.0f} s", response)
            async with response:
                try:
                    if response.status not in expect:
                        raise await self._failure(method, url, response)
                    yield response
                except (aiohttp.ClientError, TimeoutError) as error:
                    raise self._away(method, url, error) from error
            return

    async def _once(
        self, method: str, url: URL, scope: str, headers: dict[str, str], data: Any
    ) -> aiohttp.ClientResponse:
        """Send a request, with a credential where the registry wants one, and follow redirects
        without it."""
        used = self.authentication.header(scope) if url.origin() == self.base.origin() else ""
        if used:
            headers["Authorization"] = used
        response = await self._send(method, url, headers, data)
        if response.status == 401 and url.origin() == self.base.origin():
            challenges = response.headers.getall("WWW-Authenticate", [])
            response.release()
            headers["Authorization"] = await self.authentication.answer(challenges, scope, used)
            response = await self._send(method, url, headers, data)
        for followed in range(REDIRECTS_MAX + 1):
            if response.status not in _REDIRECT or method not in ("GET", "HEAD"):
                break
            location = response.headers.get("Location", "")
            response.release()
            if followed == REDIRECTS_MAX:
                raise Refused(f"{self.url} redirects {method} {url.path} more than {REDIRECTS_MAX} times")
            url = redirect_target(self.url, self.base, url, location)
            if url.origin() != self.base.origin():
                headers.pop("Authorization", None)
            response = await self._send(method, url, headers, data)
        return response

    async def pull_token(self, repository: str) -> PullToken:
        """What lets another host read a repository; empty where the registry asks for nothing.
        Raises Refused where it takes an account alone, NotFound, Unavailable."""
        scope = f"repository:{repository}:pull"
        known = await self.authentication.token(scope)
        if not known.token or known.lasts_s < TOKEN_LEFT_S_MIN:
            self.authentication.forget(scope)
            path = f"/v2/{repository}/tags/list"
            async with self.request("GET", path, scope, params={"n": "1"}, expect=frozenset({200, 404})):
                pass
            known = await self.authentication.token(scope)
        return known

    async def _send(self, method: str, url: URL, headers: dict[str, str], data: Any) -> aiohttp.ClientResponse:
        """Raises Refused where the registry may not send readers to `url`. What a proxy connects
        to is that proxy's to say."""
        proxy, proxy_auth = await asyncio.to_thread(proxy_of, url)
        place: Place = "proxy" if proxy is not None else "home" if url.origin() == self.base.origin() else "elsewhere"
        if place == "elsewhere":
            self._allowed.require_literal(url.host or "")
        if self._closed:  # by other settings, or at the end
            raise Unavailable(f"the connections to {self.url} were closed before it answered", remedy="Try again")
        return await self._session(place).request(
            method,
            url,
            headers=headers,
            data=data() if callable(data) else data,
            allow_redirects=False,
            proxy=proxy,
            proxy_auth=proxy_auth,
        )

    def _session(self, place: Place) -> aiohttp.ClientSession:
        session = self._sessions.get(place)
        if session is None:
            match place:
                case "home":
                    resolver: AbstractResolver | None = HomeResolver(self._allowed)
                case "elsewhere":
                    resolver = ElsewhereResolver(self._allowed)
                case "proxy":
                    resolver = None
            session = self._sessions[place] = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=CONNECTIONS_MAX, resolver=resolver, use_dns_cache=False),
                timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_TIMEOUT_S, sock_read=READ_TIMEOUT_S),
                auto_decompress=False,
                cookie_jar=aiohttp.DummyCookieJar(),
                headers={"User-Agent": "p2pdist", "Accept-Encoding": "identity"},
            )
        return session

    async def _ask_realm(
        self, realm: URL, query: dict[str, str], authorization: str, form: dict[str, str] | None
    ) -> tuple[int, bytes]:
        """Status and body of a realm's answer."""
        headers = {"Authorization": authorization} if authorization else {}
        if form is not None:
            response = await self._send("POST", realm, headers, form)
        else:
            response = await self._send("GET", realm.update_query(query), headers, None)
        async with response:
            if response.status in _BUSY:
                raise self._busy(f"the realm of {self.url} answers {response.status}", response)
            return response.status, await read_limited(response, TOKEN_BYTES_MAX, self.url)

    async def _failure(self, method: str, url: URL, response: aiohttp.ClientResponse) -> P2PDistError:
        """What an unexpected status means."""
        status, why = response.status, _reason(await response.content.read(ERROR_BYTES_MAX), response.reason or "")
        what = f"{self.url} answers {method} {url.path} with {status}: {why}"
        if status in (404, 410):
            return NotFound(what, remedy="Check the name, and where it was pushed to", origin=self.url)
        if status in _BUSY:
            return self._busy(what, response)
        if status in (401, 403):
            return Refused(what, remedy=f"Check the rights of the account: docker login {self.base.authority}")
        return Refused(what, remedy="See the log of the registry")

    def _busy(self, what: str, response: aiohttp.ClientResponse) -> Unavailable:
        """A registry that has too much to do, and for how long it wants to be left alone."""
        if response.status == 429:
            what = f"{what}, too many requests"
        left_s = left_alone_s(response)
        details = {"retry_after": left_s} if left_s is not None else {}
        return Unavailable(what, remedy="Try again later", **details)

    def _away(self, method: str, url: URL, error: Exception) -> Unavailable:
        what = f"{self.url} cannot be reached ({method} {url.path}): {unreached(error)}"
        return Unavailable(what, remedy="Check that the address is right and the server is up")


def redirect_target(shown: str, base: URL, url: URL, location: str) -> URL:
    """Where a redirect of the service at `base`, called `shown`, leads from `url`. Raises Refused
    for an address to which no storage of a registry would send its clients."""
    try:
        target = url.join(URL(location, encoded=True))
        host = target.host or ""
    except ValueError as error:
        raise Refused(f"{shown} redirects to something that is no address") from error
    if not location or target.scheme not in ("http", "https") or not host:
        raise Refused(f"{shown} redirects to {target.scheme or 'nowhere'}, which is not followed")
    if url.scheme == "https" and target.scheme == "http":
        raise Refused(f"{shown} redirects to http, which is not followed")
    if target.user is not None or target.password is not None:
        raise Refused(f"{shown} redirects to an address with credentials in it, which is not followed")
    if is_inner(host) and not is_inner(base.host or ""):
        raise Refused(f"{shown} redirects to {host}, an address of this machine alone")
    return target


async def read_limited(response: aiohttp.ClientResponse, limit: int, where: str) -> bytes:
    """The whole body. Raises TooLarge over `limit` bytes, and ClientError where the connection
    breaks off."""
    data = bytearray()
    async for chunk in response.content.iter_any():
        data += chunk
        if len(data) > limit:
            raise TooLarge(f"{where} sent more than {limit} bytes of {response.url.path}")
    return bytes(data)


def whole_size(response: aiohttp.ClientResponse) -> int | None:
    """The size of what a response to a request for its first byte is a part of."""
    if response.status == 200:
        return response.content_length
    total = response.headers.get("Content-Range", "").rpartition("/")[2]
    return int(total) if total.isascii() and total.isdecimal() and len(total) < 20 else None


def proxy_of(url: URL) -> tuple[URL | None, aiohttp.BasicAuth | None]:
    """The proxy of the environment through which a URL is reached; no proxy for none. A session
    that trusts the environment would also show registries the accounts of ~/.netrc."""
    try:
        return get_env_proxy_for_url(url)
    except LookupError:
        return None, None


def _pause_s(response: aiohttp.ClientResponse | None, tries: int) -> float:
    pause_s = asked_s(response) if response is not None else None
    return pause_s if pause_s is not None else 0.2 * 2**tries


def asked_s(response: aiohttp.ClientResponse) -> float | None:
    """For how long a response asks that no request follows (RFC 9110, 10.2.3); None where it does
    not."""
    text = response.headers.get("Retry-After", "")
    if text.isascii() and text.isdecimal() and len(text) < 10:
        return float(text)
    try:
        return max(0.0, parsedate_to_datetime(text).timestamp() - time.time())
    except (ValueError, TypeError, OverflowError):
        return None


def left_alone_s(response: aiohttp.ClientResponse) -> float | None:
    """For how long a service that answers so is not to be asked; None where it does not ask for
    that."""
    left_s = asked_s(response)
    if response.status == 429:
        return LIMITED_S if left_s is None else min(left_s, LIMITED_S_MAX)
    return None if left_s is None else min(left_s, BUSY_S_MAX)


def _reason(body: bytes, otherwise: str) -> str:
    """The registry's own words, from its error document."""
    try:
        error = json.loads(body)["errors"][0]
        return " ".join(f"{error.get('code', '')} {error.get('message', '')}".split())[:200]
    except (ValueError, LookupError, TypeError, AttributeError):
        return otherwise[:200]
