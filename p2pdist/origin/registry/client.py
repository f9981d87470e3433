"""Requests to an OCI registry: authentication, redirects, retries, and what its errors mean (OCI
distribution specification 1.1; https://distribution.github.io/distribution/spec/auth/token/).

A registry answers 401 with the kind of credential that it wants. For `Basic` the client sends user
and password; for `Bearer` it fetches a token for the repository and the action from the realm that
the registry names, and uses it until shortly before it expires. Credentials stand in the URL, or in
Docker's config.json. They go to the registry and its realm alone: where a blob is behind a redirect
to other storage, that storage gets none.
"""

from __future__ import annotations

import asyncio
import base64
import json
import os
import re
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import aiohttp
from yarl import URL

from p2pdist.model.errors import Corrupt, NotFound, P2PDistError, Refused, TooLarge, Unavailable, UsageError

CONNECT_TIMEOUT_S = 5.0
READ_TIMEOUT_S = 30.0
CONNECTIONS_MAX = 16
TRIES_MAX = 4
PAUSE_MAX_S = 30.0
"""How long a registry may ask to be left alone (Retry-After) before a request counts as failed."""

TOKEN_S = 60.0
"""Life of a token whose realm states none (token specification)."""

TOKEN_SPARE_S = 10.0
ERROR_BYTES_MAX = 16384
REDIRECTS_MAX = 5
_PARAMETER = re.compile(r'([a-zA-Z_]+)="([^"]*)"')
_BUSY = frozenset({408, 425, 429, 500, 502, 503, 504})
_REDIRECT = frozenset({301, 302, 303, 307, 308})
_LOOPBACK = frozenset({"localhost", "127.0.0.1", "::1"})


@dataclass(frozen=True, slots=True)
class Account:
    """A user and a password, or a token that is exchanged for others."""

    user: str
    password: str
    identity_token: str = ""

    def __repr__(self) -> str:
        """Without what is secret."""
        return f"Account({self.user!r})"

    def basic(self) -> str:
        """The header field of HTTP's basic scheme (RFC 7617)."""
        return "Basic " + base64.b64encode(f"{self.user}:{self.password}".encode()).decode()


def docker_account(host: str, config: Path | None = None) -> Account | None:
    """The account that Docker's config.json has for a registry; None for none. Credential helpers
    are not asked. Raises UsageError for a file that cannot be read."""
    folder = os.environ.get("DOCKER_CONFIG") or str(Path.home() / ".docker")
    path = config or Path(folder) / "config.json"
    try:
        auths = json.loads(path.read_bytes()).get("auths", {})
        entry = next((auths[key] for key in (host, f"https://{host}", f"https://{host}/v2/") if key in auths), None)
        if not entry:
            return None
        if token := str(entry.get("identitytoken", "")):
            return Account("", "", token)
        if "auth" in entry:
            user, _, password = base64.b64decode(entry["auth"]).decode().partition(":")
            return Account(user, password)
        return Account(str(entry["username"]), str(entry["password"]))
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it has another form"
        raise UsageError(f"{path} has no credentials for {host}: {why}", remedy=f"docker login {host}") from error


@dataclass(slots=True)
class _Token:
    header: str
    until: float


@dataclass(slots=True)
class RegistryClient:
    """Requests to one registry. Every failure names `url`. Use it from one event loop."""

    url: str
    """For messages, without credentials."""
    base: URL
    account: Account | None
    _session: aiohttp.ClientSession | None = None
    _tokens: dict[str, _Token] = field(default_factory=dict)
    """By scope. `_authenticate`."""

    @classmethod
    def of(cls, url: str, shown: str) -> RegistryClient:
        """The client of an `oci://` or `oci+http://` URL. Plain HTTP is spoken to this machine, and
        where the scheme says so."""
        parts = urlsplit(url)
        host = parts.hostname or ""
        plain = parts.scheme.lower() == "oci+http" or host in _LOOPBACK
        base = URL.build(scheme="http" if plain else "https", host=host, port=parts.port)
        if parts.username is not None:
            return cls(shown, base, Account(unquote(parts.username), unquote(parts.password or "")))
        return cls(shown, base, docker_account(parts.netloc.rpartition("@")[2]))

    async def close(self) -> None:
        """End the connections."""
        if self._session is not None:
            await self._session.close()

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
        for tries in range(1, TRIES_MAX + 1):
            last = tries == TRIES_MAX or not retry
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
                if pause_s <= PAUSE_MAX_S:
                    await asyncio.sleep(pause_s)
                    continue
                raise Unavailable(f"{self.url} asks to be left alone for {pause_s:.0f} s", remedy="Try again then")
            async with response:
                if response.status not in expect:
                    raise await self._failure(method, url, response)
                try:
                    yield response
                except (aiohttp.ClientError, TimeoutError) as error:
                    raise self._away(method, url, error) from error
            return

    async def _once(
        self, method: str, url: URL, scope: str, headers: dict[str, str], data: Any
    ) -> aiohttp.ClientResponse:
        """Send a request, with a credential where the registry wants one, and follow redirects
        without it."""
        if (token := self._tokens.get(scope)) is not None and token.until > time.monotonic():
            headers["Authorization"] = token.header
        response = await self._send(method, url, headers, data)
        if response.status == 401 and url.origin() == self.base.origin():
            challenge = response.headers.get("WWW-Authenticate", "")
            response.release()
            headers["Authorization"] = await self._authenticate(challenge, scope)
            response = await self._send(method, url, headers, data)
        for _ in range(REDIRECTS_MAX):
            if response.status not in _REDIRECT or method not in ("GET", "HEAD"):
                break
            target = url.join(URL(response.headers.get("Location", "")))
            response.release()
            if target.scheme not in ("http", "https") or (url.scheme == "https" and target.scheme == "http"):
                raise Refused(f"{self.url} redirects to {target.scheme}, which is not followed")
            if target.origin() != self.base.origin():
                headers.pop("Authorization", None)
            url = target
            response = await self._send(method, url, headers, data)
        return response

    async def _send(self, method: str, url: URL, headers: dict[str, str], data: Any) -> aiohttp.ClientResponse:
        if self._session is None:
            timeout = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_TIMEOUT_S, sock_read=READ_TIMEOUT_S)
            self._session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=CONNECTIONS_MAX),
                timeout=timeout,
                auto_decompress=False,
                trust_env=True,
                headers={"User-Agent": "p2pdist", "Accept-Encoding": "identity"},
            )
        body = data() if callable(data) else data
        return await self._session.request(method, url, headers=headers, data=body, allow_redirects=False)

    async def _authenticate(self, challenge: str, scope: str) -> str:
        """The header field that answers a challenge (RFC 9110, 11.6.1)."""
        scheme, _, rest = challenge.partition(" ")
        if scheme.lower() == "basic":
            if self.account is None or not self.account.user:
                raise self._refused("it asks for a user and a password, and was given none")
            return self._keep(scope, self.account.basic(), float("inf"))
        if scheme.lower() != "bearer":
            raise self._refused(f"it asks for credentials of a kind that is not known here, {scheme[:40]!r}")
        fields = dict(_PARAMETER.findall(rest))
        realm = URL(fields.get("realm", ""))
        if realm.scheme not in ("http", "https") or (self.base.scheme == "https" and realm.scheme != "https"):
            raise self._refused("the realm of its tokens is no address that can be trusted")
        query = {"scope": scope, **({"service": fields["service"]} if "service" in fields else {})}
        body = await self._fetch_token(realm, query)
        token = body.get("token") or body.get("access_token")
        if not isinstance(token, str) or not token:
            raise self._refused("its realm gave no token")
        lasts = body.get("expires_in")
        lasts_s = float(lasts) if isinstance(lasts, int | float) else TOKEN_S
        return self._keep(scope, f"Bearer {token}", time.monotonic() + max(1.0, lasts_s - TOKEN_SPARE_S))

    async def _fetch_token(self, realm: URL, query: dict[str, str]) -> dict[str, Any]:
        account = self.account
        if account is not None and account.identity_token:
            grant = {"grant_type": "refresh_token", "refresh_token": account.identity_token, "client_id": "p2pdist"}
            response = await self._send("POST", realm, {}, {**query, **grant})
        else:
            headers = {"Authorization": account.basic()} if account is not None else {}
            response = await self._send("GET", realm.update_query(query), headers, None)
        async with response:
            if response.status != 200:
                raise self._refused(f"its realm gives no token: {response.status} {response.reason}")
            data = await read_limited(response, 1 << 20, self.url)
        try:
            body = json.loads(data)
        except ValueError as error:
            raise self._refused("its realm answers with no JSON") from error
        return body if isinstance(body, dict) else {}

    def _keep(self, scope: str, header: str, until: float) -> str:
        self._tokens[scope] = _Token(header, until)
        return header

    async def _failure(self, method: str, url: URL, response: aiohttp.ClientResponse) -> P2PDistError:
        """What an unexpected status means."""
        status, why = response.status, _reason(await response.content.read(ERROR_BYTES_MAX), response.reason or "")
        what = f"{self.url} answers {method} {url.path} with {status}: {why}"
        if status in (404, 410):
            return NotFound(what, remedy="Check the name, and where it was pushed to", origin=self.url)
        if status in _BUSY:
            return Unavailable(what, remedy="Try again later")
        if status in (401, 403):
            return Refused(what, remedy=f"Check the rights of the account: docker login {self.base.authority}")
        return Refused(what, remedy="See the log of the registry")

    def _refused(self, why: str) -> Refused:
        return Refused(
            f"{self.url} refuses access: {why}",
            remedy=f"docker login {self.base.authority}, or oci://USER:PASSWORD@... in the environment",
        )

    def _away(self, method: str, url: URL, error: Exception) -> Unavailable:
        why = "no answer in time" if isinstance(error, TimeoutError) else str(error) or type(error).__name__
        return Unavailable(f"{self.url} cannot be reached ({method} {url.path}): {why}", remedy="Try again later")


async def read_limited(response: aiohttp.ClientResponse, limit: int, where: str) -> bytes:
    """The whole body. Raises TooLarge over `limit` bytes, Corrupt where it ends early."""
    data = bytearray()
    try:
        async for chunk in response.content.iter_any():
            data += chunk
            if len(data) > limit:
                raise TooLarge(f"{where} sent more than {limit} bytes of {response.url.path}")
    except aiohttp.ClientPayloadError as error:
        raise Corrupt(f"{where} ended {response.url.path} early", remedy="Try again") from error
    return bytes(data)


def _pause_s(response: aiohttp.ClientResponse | None, tries: int) -> float:
    asked = response.headers.get("Retry-After", "") if response is not None else ""
    return float(asked) if asked.isascii() and asked.isdecimal() else 0.2 * 2**tries


def _reason(body: bytes, otherwise: str) -> str:
    """The registry's own words, from its error document."""
    try:
        error = json.loads(body)["errors"][0]
        return " ".join(f"{error.get('code', '')} {error.get('message', '')}".split())[:200]
    except (ValueError, LookupError, TypeError, AttributeError):
        return otherwise[:200]
