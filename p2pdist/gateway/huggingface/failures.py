"""Failures as clients of a hub read them: a status, and why in the fields X-Error-Code and
X-Error-Message.

A client tells what is missing by the code: an optional file that is not there is EntryNotFound, and
a bare 404 would be taken for something worse. 408 and 429 are asked again by all clients, for files
too; 5xx where a document is asked for. What is wrong at the hub itself, and would be wrong again,
is 502.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping

import msgspec
from aiohttp import web

from p2pdist.model.errors import (
    Corrupt,
    NotFound,
    P2PDistError,
    Refused,
    Unauthenticated,
    Unavailable,
    UsageError,
    foreseen,
    printable,
)

MESSAGE_CHARACTERS_MAX = 500
JSON_TYPE = "application/json"
_STATUSES = frozenset({401, 403, 404})

logger = logging.getLogger(__name__)


class HubErrorDocument(msgspec.Struct, frozen=True):
    """Body of an answer to a client of a hub that failed."""

    error: str


def failure_response(error: Exception, *, headers: Mapping[str, str] | None = None) -> web.Response:
    """What an exception means to a client. An unexpected one is logged, and its text stays here."""
    status, code, what, more = _meaning(error)
    message = printable(what).encode("ascii", "backslashreplace").decode()[:MESSAGE_CHARACTERS_MAX]
    sent = {**(headers or {}), **more, "X-Error-Message": message}
    if code:
        sent["X-Error-Code"] = code
    body = msgspec.json.encode(HubErrorDocument(message))
    return web.Response(status=status, body=body, content_type=JSON_TYPE, headers=sent)


def _meaning(error: Exception) -> tuple[int, str, str, dict[str, str]]:
    """Status, code, message and further fields."""
    if isinstance(error, P2PDistError) and (stated := error.details.get("hub_status")):
        usual = 403 if isinstance(error, Refused) else 404
        status = stated if isinstance(stated, int) and stated in _STATUSES else usual
        code, message = error.details.get("hub_code", ""), error.details.get("hub_message", "")
        return status, str(code), str(message) or error.what, {}
    match error:
        case NotFound():
            return 404, "RepoNotFound", str(error), {}
        case Unauthenticated():
            return 401, "", str(error), {}
        case Refused():
            return 403, "", str(error), {}
        case UsageError():
            return error.http_status, "", str(error), {}
        case Unavailable():
            asked_s = error.details.get("retry_after")
            if isinstance(asked_s, int | float):
                return 429, "", str(error), {"Retry-After": str(max(1, math.ceil(asked_s)))}
            return 503, "", str(error), {}
        case Corrupt() | P2PDistError():
            return error.http_status, "", str(error), {}
        case web.HTTPException():
            kept = {name: value for name, value in error.headers.items() if name in ("Allow", "Content-Range", "ETag")}
            return error.status, "", error.reason, kept
        case ConnectionError():
            return 503, "", "the client closed the connection", {}
    expected = foreseen(error) if isinstance(error, OSError) else None
    if expected is not None:
        logger.warning("a request for a model failed: %s", expected)
        return 503, "", str(expected), {}
    logger.error("unexpected failure of a request for a model", exc_info=error)
    return 500, "", "an internal failure; the log of the agent has the details", {}
