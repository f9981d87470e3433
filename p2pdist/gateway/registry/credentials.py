"""What a client shows with a request for an image, and the tokens by which registry clients carry
it.

Registry clients ask for a challenge, and turn it into a token at its realm; those that have no
credential get a token as well, which says so. The tokens that this mirror gives are what the client
has shown, in another form: nothing is issued, and nothing is kept.

A credential is one of three. A token of the fleet, as Bearer or as the password of Basic with any
user name. One for an upstream, as Basic or Bearer. Or none.
"""

from __future__ import annotations

import base64
import binascii
import re
from dataclasses import dataclass
from typing import Literal

from p2pdist.model.errors import Unauthenticated

AUTHORIZATION_CHARACTERS_MAX = 8192
NO_CREDENTIAL = "anonymous"
"""The Bearer token of a client that has no credential."""

_CARRIED = "basic."
"""Begins the Bearer token that carries a Basic credential."""

_WORD = re.compile(r"[A-Za-z0-9._~+/=-]+\Z")
_HOST = re.compile(r"(?:[A-Za-z0-9._-]{1,253}|\[[0-9A-Fa-f:.]{2,45}\])(?::[0-9]{1,5})?\Z")


@dataclass(frozen=True, slots=True)
class Credential:
    """What a request shows. `secret`: the token of Bearer, the password of Basic; `user` is that of
    Basic."""

    kind: Literal["none", "bearer", "basic"] = "none"
    secret: str = ""
    user: str = ""

    @property
    def authorization(self) -> str:
        """The header field with which it is shown to an upstream; "" for none."""
        if self.kind == "bearer":
            return f"Bearer {self.secret}"
        return f"Basic {_encoded(f'{self.user}:{self.secret}')}" if self.kind == "basic" else ""

    @property
    def carried(self) -> str:
        """The Bearer token that stands for it from now on."""
        if self.kind == "basic":
            return _CARRIED + _encoded(f"{self.user}:{self.secret}")
        return self.secret or NO_CREDENTIAL


NONE = Credential()


def parse_credential(authorization: str) -> Credential:
    """The credential in an Authorization header field; clients that have none may send Basic with
    nothing in it. Raises Unauthenticated, whose text does not show what was given."""
    if len(authorization) > AUTHORIZATION_CHARACTERS_MAX:
        raise Unauthenticated("the credential is longer than any that is taken here")
    scheme, _, rest = authorization.strip().partition(" ")
    rest = rest.strip()
    match scheme.lower():
        case "":
            return NONE
        case "bearer" if rest.startswith(_CARRIED):
            return _basic(rest.removeprefix(_CARRIED))
        case "bearer" if rest in ("", NO_CREDENTIAL):
            return NONE
        case "bearer" if _WORD.match(rest):
            return Credential("bearer", rest)
        case "basic":
            return _basic(rest)
    raise Unauthenticated("the credential cannot be read", remedy="Send Authorization as Bearer or Basic")


def _basic(encoded: str) -> Credential:
    try:
        text = base64.b64decode(encoded, validate=True).decode()
    except (binascii.Error, ValueError) as error:
        raise Unauthenticated("the credential is not Basic as RFC 7617 writes it") from error
    user, _, password = text.partition(":")
    return Credential("basic", password, user) if password else NONE


def _encoded(text: str) -> str:
    return base64.b64encode(text.encode()).decode()


def challenge(scheme: str, host: str, *, scope: str = "", insufficient: bool = False) -> str:
    """The WWW-Authenticate of an answer 401 to a client that reached this mirror at `scheme` and
    `host`; `insufficient`: it has shown a token that does not do."""
    if not _HOST.match(host):
        host = "localhost"
    text = f'Bearer realm="{scheme}://{host}/v2/token",service="p2pdist"'
    if scope:
        text += f',scope="{scope}"'
    return text + (',error="insufficient_scope"' if insufficient else "")
