"""Answers to a registry's challenges: which header field shows that a client may do something
(RFC 9110, 11.6.1; https://distribution.github.io/distribution/spec/auth/token/).

For `Bearer` a token is fetched for the repository and the action from the realm that the registry
names, once however many requests wait for it, and used until shortly before it expires. The token
may come from another place: an agent has its tracker fetch it, and needs no account of its own.
"""

from __future__ import annotations

import asyncio
import json
import math
import re
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from yarl import URL

from p2pdist.model.errors import Refused
from p2pdist.origin.registry.accounts import Accounts
from p2pdist.origin.registry.addresses import is_inner

TOKEN_S = 60.0
"""Life of a token whose realm states none (token specification)."""

TOKEN_S_MAX = 86400.0
TOKEN_SPARE_S = 10.0
TOKEN_CHARACTERS_MAX = 64 << 10
TOKENS_MAX = 10_000
_CHALLENGE = re.compile(r"(?:^|,)\s*(bearer|basic|[a-z][a-z0-9-]*)(?=\s+[a-z_]+\s*=|\s*(?:,|$))", re.IGNORECASE)
_PARAMETER = re.compile(r'([a-zA-Z_]+)\s*=\s*(?:"([^"]*)"|([^\s",]+))')
_QUOTED = re.compile(r'"[^"]*"')
_SCOPE = re.compile(r"repository:([a-z0-9._/-]{1,255}):[a-z,*]{1,64}\Z")


@dataclass(frozen=True, slots=True)
class PullToken:
    """What lets its bearer read one repository for `lasts_s` seconds; empty where the registry asks
    for none."""

    token: str
    lasts_s: float

    def __repr__(self) -> str:
        """Without what is secret."""
        return f"PullToken(lasts_s={self.lasts_s!r})"


TokenSource = Callable[[str], Awaitable[PullToken | None]]
"""The token for a scope from elsewhere; None where there is none. Raises P2PDistError."""

Fetch = Callable[[URL, dict[str, str], str, dict[str, str] | None], Awaitable[tuple[int, bytes]]]
"""Asks a realm: its address, the query, the header field Authorization, and a form that is sent
instead of the query. Returns status and body."""


@dataclass(slots=True)
class _Kept:
    header: str
    until: float


@dataclass(slots=True)
class Authentication:
    """The header fields by which one registry lets this process do something."""

    shown: str
    """The registry, for messages."""
    base: URL
    accounts: Accounts
    fetch: Fetch
    source: TokenSource | None = None
    """Asked for tokens first."""
    _kept: OrderedDict[str, _Kept] = field(default_factory=OrderedDict)
    """By scope."""
    _locks: dict[str, asyncio.Lock] = field(default_factory=dict)
    """By scope, of the tokens that are being fetched."""

    def header(self, scope: str) -> str:
        """What shows the right to `scope`, as far as it is known; "" for nothing."""
        kept = self._kept.get(scope)
        return kept.header if kept is not None and kept.until > time.monotonic() else ""

    async def token(self, scope: str) -> PullToken:
        """The token that is known for a scope, for another host; empty where none was needed so
        far. Raises Refused where the registry takes the account alone, or gives tokens that hold
        it."""
        header = self.header(scope)
        if not header:
            return PullToken("", TOKEN_S)
        kind, _, token = header.partition(" ")
        account = await self.accounts.account()
        if kind != "Bearer":
            raise self.refused("it takes a user and a password alone, which are not passed on")
        if account is not None and account.given_away_by(token):
            raise self.refused("the tokens of its realm hold the account itself, which is not passed on")
        return PullToken(token, max(1.0, self._kept[scope].until - time.monotonic()))

    def forget(self, scope: str) -> None:
        """Have the next request for a scope begin without a token."""
        self._kept.pop(scope, None)

    async def answer(self, challenges: Sequence[str], scope: str, used: str) -> str:
        """The header field that answers challenges, the best one that is known here. `used` is what
        the refused request showed. Raises Refused, Unavailable."""
        kinds = _kinds(challenges)
        lock = self._locks.setdefault(scope, asyncio.Lock())
        try:
            async with lock:
                known = self.header(scope)
                if known and known != used:
                    return known  # another request has fetched it meanwhile
                if "bearer" in kinds:
                    return await self._bearer(kinds["bearer"], scope, refused=bool(used))
                if "basic" in kinds:
                    return await self._basic(scope, refused=bool(used))
        finally:
            if self._locks.get(scope) is lock and not lock.locked():
                del self._locks[scope]
        shown = ", ".join(kinds)[:40]
        raise self.refused(f"it asks for credentials of a kind that is not known here, {shown!r}")

    async def _basic(self, scope: str, *, refused: bool) -> str:
        account = await self.accounts.account(refused=refused)
        if account is None or not account.user:
            raise self.refused("it asks for a user and a password, and was given none")
        return self._keep(scope, account.basic(), math.inf)

    async def _bearer(self, fields: dict[str, str], scope: str, *, refused: bool) -> str:
        if self.source is not None:
            given = await self.source(scope)
            if given is not None and given.token:
                return self._keep(scope, f"Bearer {given.token}", given.lasts_s)
        try:
            realm = URL(fields.get("realm", ""))
        except ValueError:
            realm = URL()
        secure = realm.scheme == "https" or (realm.scheme == "http" and self.base.scheme == "http")
        inner = is_inner(realm.host or "") and not is_inner(self.base.host or "")
        if not secure or not realm.host or realm.user is not None or inner:
            raise self.refused("the realm of its tokens is no address that can be trusted")
        query = {"scope": _asked(scope, fields.get("scope", ""))}
        query |= {"service": fields["service"]} if "service" in fields else {}
        account = await self.accounts.account(refused=refused)
        if account is not None and account.identity_token:
            grant = {"grant_type": "refresh_token", "refresh_token": account.identity_token, "client_id": "p2pdist"}
            status, data = await self.fetch(realm, {}, "", {**query, **grant})
        else:
            status, data = await self.fetch(realm, query, account.basic() if account is not None else "", None)
        if status != 200:
            raise self.refused(f"its realm gives no token: it answers {status}")
        token, lasts_s = self._decoded(data)
        return self._keep(scope, f"Bearer {token}", lasts_s)

    def _decoded(self, data: bytes) -> tuple[str, float]:
        try:
            body: Any = json.loads(data)
        except (ValueError, RecursionError) as error:
            raise self.refused("its realm answers with no JSON") from error
        plain = body if isinstance(body, dict) else {}
        token, lasts = plain.get("token") or plain.get("access_token"), plain.get("expires_in")
        if not isinstance(token, str) or not token or len(token) > TOKEN_CHARACTERS_MAX or not token.isprintable():
            raise self.refused("its realm gave no token")
        if not isinstance(lasts, int | float) or not 0 < lasts < math.inf:
            return token, TOKEN_S
        return token, float(min(TOKEN_S_MAX, lasts))

    def _keep(self, scope: str, header: str, lasts_s: float) -> str:
        until = time.monotonic() + max(1.0, lasts_s - TOKEN_SPARE_S)
        self._kept[scope] = _Kept(header, until)
        self._kept.move_to_end(scope)
        while len(self._kept) > TOKENS_MAX:
            self._kept.popitem(last=False)
        return header

    def refused(self, why: str) -> Refused:
        """The failure of a request that the registry does not allow."""
        return Refused(
            f"{self.shown} refuses access: {why}",
            remedy=f"docker login {self.base.authority}, or oci://USER:PASSWORD@... in the environment",
        )


def _kinds(challenges: Sequence[str]) -> dict[str, dict[str, str]]:
    """The kinds of credentials that are asked for, in lower case, and their parameters."""
    kinds: dict[str, dict[str, str]] = {}
    for challenge in challenges[:8]:
        text = challenge[:4096]
        plain_text = _QUOTED.sub(lambda quoted: "x" * len(quoted[0]), text)  # which may hold commas
        marks = list(_CHALLENGE.finditer(plain_text))
        for mark, following in zip(marks, [*marks[1:], None], strict=True):
            part = text[mark.end() : following.start() if following is not None else 4096]
            fields = {name.lower(): quoted or plain for name, quoted, plain in _PARAMETER.findall(part)}
            kinds.setdefault(mark[1].lower(), fields)
    return kinds


def _asked(scope: str, stated: str) -> str:
    """The scope to ask a realm for: ours, but for the repository's name, which the registry may
    know otherwise (`library/debian` for `debian`)."""
    match = _SCOPE.match(stated)
    kind, _, rest = scope.partition(":")
    name, _, actions = rest.rpartition(":")
    return f"{kind}:{match[1]}:{actions}" if match and (f"/{match[1]}").endswith(f"/{name}") else scope
