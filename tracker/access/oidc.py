"""People with tokens of an OpenID Connect issuer (OpenID Connect Core 1.0; Discovery 1.0).

The issuer's keys are read when a token is first shown, in a thread, and kept for KEPT_S; a key that
is not among them makes them be read sooner. The issuer is asked at most every REFRESH_S. While it
does not state its keys, those that it stated last hold, and of others it cannot be said whether
they are its own.
"""

from __future__ import annotations

import asyncio
import http.client
import json
import logging
import re
import time
import urllib.request
from typing import Any
from urllib.parse import urlsplit

import jwt

from p2pdist.model.access import SKEW_S, Identity, Role
from p2pdist.model.errors import Unauthenticated, Unavailable
from tracker.access.file import AccessRules, OidcDocument

LOOPBACK = ("127.0.0.1", "localhost", "::1")
ALGORITHMS = ("RS256", "ES256", "EdDSA")
REFRESH_S = 30.0
KEPT_S = 3600.0
READ_S_MAX = 5.0
DOCUMENT_BYTES_MAX = 1 << 20
READ_BYTES = 1 << 16

logger = logging.getLogger(__name__)

_SUBJECT = re.compile(r"[!-~]{1,200}\Z")
_REMEDY = "Log in with the issuer again"
_BROKEN = (
    OSError,
    http.client.HTTPException,
    jwt.PyJWTError,
    ValueError,
    TypeError,
    LookupError,
    AttributeError,
    RecursionError,
)
"""What reading the keys may raise where the issuer breaks off, or answers something else."""


class OidcIssuer:
    """One issuer, and the roles that the values of its claims give."""

    def __init__(self, document: OidcDocument) -> None:
        self.document = document
        self._keys: dict[str, Any] = {}
        self._read_at = -KEPT_S
        """When it stated them last."""
        self._asked_at = -REFRESH_S
        self._failure: Unavailable | None = None
        """Why it did not state them when it was asked last."""
        self._asking: asyncio.Task[None] | None = None
        """The question for them, which goes on when those that wait for it leave."""

    async def identity(self, text: str, rules: AccessRules) -> Identity:
        """The person that this token names. Raises Unauthenticated, Unavailable."""
        key = await self._key(text)
        try:
            claims = jwt.decode(
                text,
                key,
                algorithms=list(ALGORITHMS),
                audience=self.document.audience,
                issuer=self.document.issuer,
                leeway=SKEW_S,
                options={"require": ["iss", "sub", "exp", "aud"]},
            )
        except jwt.ExpiredSignatureError as error:
            raise Unauthenticated("the token has expired", remedy=_REMEDY) from error
        except (jwt.PyJWTError, ValueError, TypeError, RecursionError) as error:
            raise Unauthenticated("the token is not valid for this fleet", remedy=_REMEDY) from error
        subject = claims["sub"]
        if not isinstance(subject, str) or not _SUBJECT.match(subject):
            raise Unauthenticated("the token names no person", remedy=_REMEDY)
        role = self._role(claims, rules)
        if role is None:
            raise Unauthenticated(
                f"the token of {subject} gives no role here", remedy="Map one of its claims to a role in [oidc]"
            )
        return role.identity("person", subject, credential=f"token:{subject}")

    def _role(self, claims: dict[str, Any], rules: AccessRules) -> Role | None:
        """The first role of the map that a claim gives."""
        for claim, roles in self.document.map.items():
            value = claims.get(claim)
            values = value if isinstance(value, list) else [value]
            for wanted, role in roles.items():
                if wanted in values:
                    return rules.roles.get(role)
        return None

    async def _key(self, text: str) -> Any:
        try:
            name = jwt.get_unverified_header(text).get("kid")
        except (jwt.PyJWTError, ValueError, RecursionError) as error:
            raise Unauthenticated("the token cannot be read", remedy=_REMEDY) from error
        if not isinstance(name, str):
            raise Unauthenticated("the token names no key", remedy=_REMEDY)
        if self._knows(name):
            return self._keys[name]  # also while the issuer is slow to answer for a key that it may not have
        if self._asking is None and time.monotonic() - self._asked_at > REFRESH_S:
            self._asked_at = time.monotonic()
            self._asking = asyncio.create_task(self._ask())
        if self._asking is not None:
            await asyncio.shield(self._asking)
        if name in self._keys:
            return self._keys[name]
        if self._failure is not None:
            raise Unavailable(self._failure.what, remedy=self._failure.remedy)
        raise Unauthenticated("the token was signed with a key that its issuer does not state", remedy=_REMEDY)

    def _knows(self, name: str) -> bool:
        """Whether the issuer stated a key not long ago."""
        return name in self._keys and time.monotonic() - self._read_at <= KEPT_S

    async def _ask(self) -> None:
        try:
            self._keys = await asyncio.to_thread(self._read)
        except Unavailable as error:
            logger.warning("%s", error)
            self._failure = error
        else:
            self._read_at, self._failure = time.monotonic(), None
        finally:
            self._asking = None

    def _read(self) -> dict[str, Any]:
        """The issuer's keys by name. Raises Unavailable."""
        issuer = self.document.issuer.rstrip("/")
        try:
            discovery = _fetch(f"{issuer}/.well-known/openid-configuration")
            if discovery.get("issuer") != self.document.issuer:
                raise ValueError("its discovery document is of another issuer")
            keys = jwt.PyJWKSet.from_dict(_fetch(str(discovery.get("jwks_uri")))).keys
            return {key.key_id: key.key for key in keys if key.key_id}
        except _BROKEN as error:
            raise Unavailable(
                f"the issuer {issuer} does not state its keys: {str(error)[:200]}", remedy="Try again later"
            ) from error


def _require_encrypted(url: str) -> None:
    """Raises ValueError for a URL over which anybody could give keys as the issuer's."""
    parts = urlsplit(url)
    if parts.scheme != "https" and (parts.scheme != "http" or parts.hostname not in LOOPBACK):
        raise ValueError("it names an address that is not encrypted")


class _Redirects(urllib.request.HTTPRedirectHandler):
    """Follows redirects to encrypted addresses alone."""

    def redirect_request(
        self, req: urllib.request.Request, fp: Any, code: int, msg: str, headers: Any, newurl: str
    ) -> urllib.request.Request | None:
        _require_encrypted(newurl)
        return super().redirect_request(req, fp, code, msg, headers, newurl)


def _fetch(url: str) -> dict[str, Any]:
    _require_encrypted(url)
    data, until = b"", time.monotonic() + READ_S_MAX
    with urllib.request.build_opener(_Redirects).open(url, timeout=READ_S_MAX) as answer:
        while len(data) <= DOCUMENT_BYTES_MAX and (more := answer.read1(READ_BYTES)):
            data += more
            if time.monotonic() > until:
                raise ValueError(f"it takes longer than {READ_S_MAX:g} s to answer")
    if len(data) > DOCUMENT_BYTES_MAX:
        raise ValueError(f"it answers more than {DOCUMENT_BYTES_MAX} bytes")
    document = json.loads(data)
    if not isinstance(document, dict):
        raise ValueError("it answers what is no document")
    return document
