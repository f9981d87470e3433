"""URLs: those of trackers, checked, and any without the secrets in them, fit for messages, logs and
responses."""

from __future__ import annotations

import re
from collections.abc import Iterable

from p2pdist.model.errors import UsageError, printable

_AUTHORITY = re.compile(r"(\[[^\]]*\]|[^:\[\]]*)(:\d+)?\Z")
"""Without user information: a name or an address, and a port."""


_HTTP = re.compile(
    r"https?://([^/?#@]*@)?(?P<host>\[[0-9A-Fa-f:.]+(%[\w.-]+)?\]|[^\s:/?#@\[\]]+)(:(?P<port>\d{1,5}))?([/?#].*)?\Z",
    re.IGNORECASE,
)
HIDDEN = "***"

_SECRETS = re.compile(
    r"(?P<scheme>://)[^\s/?#'\"<>]*@"
    r"|(?P<scheme_of>\bauthorization['\"]?\s*+[:=]\s*+['\"]?(?:(?:bearer|basic|digest|negotiate|token)\s+)?)[^\s'\",;]+"
    r"|(?P<bearer>\b(?:bearer|basic)\s++)[A-Za-z0-9+/=._~-]{8,}"
    r"|(?P<name>(?:password|passwd|passphrase|secret|token|signature|credential|api[_-]?key|access[_-]?key)[\w-]{0,64}+"
    r"['\"]?\s*+[:=]\s*+['\"]?)[^\s&'\",;]+"
    r"|(?P<sig>[?&]sig=)[^\s&'\"]+",
    re.IGNORECASE,
)
"""Takes time in proportion to any text: other hosts choose some of it, and the event loop waits."""

PORT_MAX = 65535
LABEL_CHARACTERS_MAX, NAME_CHARACTERS_MAX = 63, 253
"""Of a host's name (RFC 1035, 2.3.4)."""


def tracker_urls(texts: Iterable[str]) -> list[str]:
    """The URLs of trackers that are not empty, without blanks around them and slashes behind.
    Raises UsageError for what no program could connect to."""
    urls = [url.strip().rstrip("/") for url in texts if url.strip()]
    for url in urls:
        if not _is_http(url):
            shown = printable(redacted(url))[:200]
            raise UsageError(f"{shown!r} is no address of a tracker", remedy="Write http://host:7070")
    return urls


def _is_http(url: str) -> bool:
    parts = _HTTP.match(url)
    host = parts["host"] if parts else ""
    if not parts or not host.isprintable() or len(host) > NAME_CHARACTERS_MAX:
        return False
    labels = [] if host.startswith("[") else host.rstrip(".").split(".")
    port = int(parts["port"] or 80)
    return all(0 < len(label) <= LABEL_CHARACTERS_MAX for label in labels) and 0 < port <= PORT_MAX


def redacted(url: str) -> str:
    """`url` without user information, query and fragment, any of which may hold credentials. A text
    that is no URL loses all before its last @."""
    scheme, separator, rest = url.partition("://")
    if not separator:
        return _path(url).rpartition("@")[2]
    shown = _path(rest[len(_user(rest)) :])
    return f"{scheme}://{shown.rstrip('/') or shown}"


def secrets_in(url: str) -> list[str]:
    """The parts of `url` that may be secrets: a user with a password, and a query. A database's
    query is one only where it has a password."""
    scheme, separator, rest = url.partition("://")
    if not separator:
        return []
    user = _user(rest)
    before, _, fragment = rest[len(user) :].partition("#")
    query = before.partition("?")[2]
    if "@" in fragment:  # the rest of a password
        query = f"{query}#{fragment}" if query else fragment
    if scheme.lower().startswith("postgres") and "password" not in query.lower():
        query = ""
    return [part for part in (user.removesuffix("@") if ":" in user else "", query) if part]


def without_secrets(text: str) -> str:
    """The text with credentials left out."""
    return _SECRETS.sub(
        lambda match: next(filter(None, match.groups()), "") + HIDDEN + ("@" if match["scheme"] else ""), text
    )


def _user(rest: str) -> str:
    """User information at the head of what follows the scheme, with its @. A password with a slash,
    a question mark or a number sign in it ends the authority too early (RFC 3986, 3.2): what is no
    authority then goes on to the last @."""
    authority, _, path = _path(rest).partition("/")
    whole = _AUTHORITY.match(authority) if "@" not in authority else None
    # A name with digits behind a colon may be a host and a port, or a user and a password up to its
    # first slash: with an @ to come it is kept to itself.
    if whole and not (whole[2] and not authority.startswith("[") and "@" in path):
        return ""
    end = authority.rfind("@") if "@" in authority else rest.rfind("@")
    return rest[: end + 1]


def _path(text: str) -> str:
    return text.split("#", 1)[0].split("?", 1)[0]
