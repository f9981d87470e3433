"""The name of the request that something is done for: one for a command, and for all that it causes
at its agent, trackers and peers.

It travels as the header field X-Request-ID, comes back in the answer and in problem documents, and
stands in every line of a log that is written for the request. Whoever asks may choose it; what is
not short and plain is replaced, since it ends up in logs and headers.
"""

from __future__ import annotations

import re
from contextvars import ContextVar

HEADER = "X-Request-ID"
CHARACTERS_MAX = 64

REQUEST_ID: ContextVar[str] = ContextVar("request_id", default="")
"""That of the request at hand, "" where there is none. Tasks inherit it from whoever starts
them."""

_sane = re.compile(rf"[A-Za-z0-9._-]{{1,{CHARACTERS_MAX}}}")


def is_sane(text: str) -> bool:
    """Whether this may be the name of a request."""
    return _sane.fullmatch(text) is not None


def passed_on() -> dict[str, str]:
    """The header fields of a request that the one at hand causes."""
    name = REQUEST_ID.get()
    return {HEADER: name} if name else {}
