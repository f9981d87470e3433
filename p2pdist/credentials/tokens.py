"""Tokens of schedulers, operators and other programs: JSON Web Tokens (RFC 7519) that a fleet's
tracker signs with EdDSA (RFC 8037).

Claims: `iss` the fleet, `sub` the name of the owner, `role` a role of the access file, `jti` the
token's id, by which it is revoked, `exp`. The head names the signing key (`kid`).

A client is given `p2pt1.PIN.JWT`: PIN is the fingerprint of the fleet's authority, so the client
knows its trackers at the first contact, as a host with a join token does. The secret part is the
JWT; a tracker takes both forms.
"""

from __future__ import annotations

import base64
import re
import secrets
from collections.abc import Mapping
from dataclasses import dataclass

import jwt
import msgspec
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

from p2pdist.credentials.signing import SigningKey
from p2pdist.model.access import SKEW_S
from p2pdist.model.errors import Unauthenticated, UsageError

TOKEN_CHARACTERS_MAX = 4096
PREFIX = "p2pt1."
ALGORITHM = "EdDSA"
LIFE_S_MAX = 10 * 365 * 86400.0

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}\Z")
_FORM = re.compile(r"p2pt1\.([0-9a-f]{64})\.([A-Za-z0-9_-]+\.[A-Za-z0-9_-]+\.[A-Za-z0-9_-]+)\Z")
_JWT = re.compile(r"[A-Za-z0-9_-]+\.[A-Za-z0-9_-]+\.[A-Za-z0-9_-]+\Z")
_REMEDY = "Ask for another: p2pdist token create makes it"


class TokenRecord(msgspec.Struct, frozen=True):
    """What is kept of a token: everything but the token. Times are seconds since the epoch; `key`
    names the signing key."""

    id: str
    role: str
    name: str
    created: float
    expires: float
    key: str = ""


@dataclass(frozen=True, slots=True)
class Claims:
    """What a token says whose signature is right and whose time is not over."""

    id: str
    role: str
    name: str
    expires: float


def check_name(name: str, what: str) -> str:
    """Raises UsageError for what cannot name the owner of a token or a role."""
    if not _NAME.match(name):
        raise UsageError(
            f"{name[:80]!r} cannot be {what}", remedy="Use letters, digits, dots, dashes and underscores, up to 63"
        )
    return name


def create_token(
    key: SigningKey, fleet: str, pin: str, role: str, *, name: str = "", now: float, lasts_s: float
) -> tuple[str, TokenRecord]:
    """A new token and what is to be kept of it. `name` is its owner's, by default its id."""
    if not 0 < lasts_s <= LIFE_S_MAX:
        raise UsageError("a token lasts up to ten years", remedy="Give --ttl, such as 30d")
    identifier = secrets.token_hex(8)
    record = TokenRecord(
        identifier,
        check_name(role, "the name of a role"),
        check_name(name or identifier, "the name of a token's owner"),
        float(int(now)),
        float(int(now + lasts_s)),
        key.name,
    )
    claims = {
        "iss": fleet,
        "sub": record.name,
        "role": record.role,
        "jti": identifier,
        "iat": int(now),
        "exp": int(record.expires),
    }
    text = jwt.encode(claims, key.private, algorithm=ALGORITHM, headers={"kid": key.name})
    return f"{PREFIX}{pin}.{text}", record


def split_token(text: str) -> tuple[str, str]:
    """The pin ("" where the token has none) and the JWT of a token. Raises UsageError, whose text
    does not show what was given."""
    text = text.strip()
    if len(text) <= TOKEN_CHARACTERS_MAX and text.isascii():
        if match := _FORM.match(text):
            return match[1], match[2]
        if _JWT.match(text):
            return "", text
    raise UsageError("that is no token: it reads p2pt1.PIN.JWT", remedy=_REMEDY)


def unverified(text: str) -> tuple[str, str]:
    """The key's name and the issuer that a JWT states, each "" where it states none: they decide
    by which keys it is checked, and nothing else. Raises Unauthenticated for what is no JWT."""
    try:
        header = jwt.get_unverified_header(text)
        claims = jwt.decode(text, options={"verify_signature": False})
    except (jwt.InvalidTokenError, ValueError, RecursionError) as error:
        raise _refused("it cannot be read") from error
    key, issuer = header.get("kid"), claims.get("iss")
    return key if isinstance(key, str) else "", issuer if isinstance(issuer, str) else ""


def verify_token(text: str, keys: Mapping[str, str], fleet: str) -> Claims:
    """What a JWT of this fleet says. `keys`: public halves of signing keys, base64 by name. Raises
    Unauthenticated where it is not one, or has expired."""
    name, _ = unverified(text)
    public = keys.get(name)
    if public is None:
        raise _refused("it was signed with a key that this fleet does not use")
    try:
        claims = jwt.decode(
            text,
            Ed25519PublicKey.from_public_bytes(base64.b64decode(public, validate=True)),
            algorithms=[ALGORITHM],
            issuer=fleet,
            leeway=SKEW_S,
            options={"require": ["iss", "sub", "exp", "jti"], "verify_aud": False, "verify_iat": False},
        )
    except jwt.ExpiredSignatureError as error:
        raise _refused("it has expired") from error
    except jwt.InvalidIssuerError as error:
        raise _refused("it is of another fleet") from error
    except (jwt.InvalidTokenError, ValueError, RecursionError) as error:
        raise _refused("its signature or its claims are wrong") from error
    identifier, role, owner = claims["jti"], claims.get("role"), claims["sub"]
    if not all(isinstance(value, str) and _NAME.match(value) for value in (identifier, role, owner)):
        raise _refused("its claims are wrong")
    return Claims(identifier, str(role), owner, float(claims["exp"]))


def _refused(why: str) -> Unauthenticated:
    return Unauthenticated(f"the token is not valid: {why}", remedy=_REMEDY)
