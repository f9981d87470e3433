"""The name of a request: one for a command, and for all requests that it causes at its agent,
trackers and peers.

It travels as the header field X-Request-ID, comes back in the response and in problem documents,
and is in every line of a log that is written for the request. The client may choose it; a server
replaces a name that is not short and plain, since it ends up in logs and headers.
"""

from __future__ import annotations

import re
from contextvars import ContextVar

HEADER = "X-Request-ID"
CHARACTERS_MAX = 64

REQUEST_ID: ContextVar[str] = ContextVar("request_id", default="")
"""The name of the current request, "" where there is none. A task inherits it from the code that
starts it."""

_sane = re.compile(rf"[A-Za-z0-9._-]{{1,{CHARACTERS_MAX}}}")


def is_sane(text: str) -> bool:
    """Whether `text` may be the name of a request."""
    return _sane.fullmatch(text) is not None


def passed_on() -> dict[str, str]:
    """The header fields by which another request carries on the current request's name."""
    name = REQUEST_ID.get()
    return {HEADER: name} if name else {}
