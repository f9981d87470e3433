"""Failures as clients of registries read them: error documents of the OCI distribution
specification 1.1, with a code and a message.

A client of a mirror has another place to ask, and goes there at once for most failures; for 408 and
429 it asks here again, so these are never given. What is not known is 404, and what cannot be given
now (busy, full, no tracker) 503.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping

import msgspec
from aiohttp import web

from p2pdist.model.errors import (
    NotFound,
    P2PDistError,
    Refused,
    TooLarge,
    Unauthenticated,
    UsageError,
    foreseen,
    printable,
)

UNKNOWN_CODES = {
    "manifest": "MANIFEST_UNKNOWN",
    "blob": "BLOB_UNKNOWN",
    "tags": "NAME_UNKNOWN",
    "referrers": "NAME_UNKNOWN",
}
"""What a thing that does not exist is called, by the kind of the request."""

MESSAGE_CHARACTERS_MAX = 1000
JSON_TYPE = "application/json"
_CODES_OF_HTTP = {404: "UNSUPPORTED", 405: "UNSUPPORTED", 413: "SIZE_INVALID", 416: "RANGE_INVALID"}

logger = logging.getLogger(__name__)


class ErrorEntry(msgspec.Struct, frozen=True):
    """One error: a code of the specification, and what happened."""

    code: str
    message: str


class ErrorDocument(msgspec.Struct, frozen=True):
    """Body of an answer to a client of a registry that failed; `errors` has one entry."""

    errors: tuple[ErrorEntry, ...]


class RegistryFailure(Exception):
    """A failure that the registry interface itself finds: status, code and message of its error
    document."""

    def __init__(self, status: int, code: str, what: str, *, headers: Mapping[str, str] | None = None) -> None:
        super().__init__(what)
        self.status, self.code, self.what = status, code, what
        self.headers = dict(headers or {})


def as_failure(error: Exception, kind: str = "") -> RegistryFailure:
    """What an exception means to a client that asked for a `kind` of thing. An unexpected one is
    logged, and its text stays here."""
    match error:
        case RegistryFailure():
            return error
        case NotFound():
            return RegistryFailure(404, UNKNOWN_CODES.get(kind, "NAME_UNKNOWN"), str(error))
        case Unauthenticated():
            return RegistryFailure(401, "UNAUTHORIZED", str(error))
        case Refused():
            return RegistryFailure(403, "DENIED", str(error))
        case TooLarge():
            return RegistryFailure(413, "SIZE_INVALID", str(error))
        case UsageError():
            return RegistryFailure(400, "NAME_INVALID" if kind else "UNSUPPORTED", str(error))
        case P2PDistError():
            return RegistryFailure(503, "UNAVAILABLE", str(error))
        case web.HTTPException():
            return _of_http(error)
        case ConnectionError():
            return RegistryFailure(503, "UNAVAILABLE", "the client closed the connection")
    expected = foreseen(error) if isinstance(error, OSError) else None
    if expected is not None:
        logger.warning("a request for an image failed: %s", expected)
        return RegistryFailure(503, "UNAVAILABLE", str(expected))
    logger.error("unexpected failure of a request for an image", exc_info=error)
    return RegistryFailure(500, "UNKNOWN", "an internal failure; the log of the agent has the details")


def _of_http(error: web.HTTPException) -> RegistryFailure:
    kept = {name: value for name, value in error.headers.items() if name in ("Allow", "Content-Range", "ETag")}
    what = {405: "this is a mirror, and takes no pushes: push to the registry itself"}.get(error.status, error.reason)
    return RegistryFailure(error.status, _CODES_OF_HTTP.get(error.status, "UNSUPPORTED"), what, headers=kept)


def failure_response(failure: RegistryFailure) -> web.Response:
    """The error document of a failure."""
    message = printable(failure.what)[:MESSAGE_CHARACTERS_MAX]
    body = msgspec.json.encode(ErrorDocument((ErrorEntry(failure.code, message),)))
    return web.Response(status=failure.status, body=body, content_type=JSON_TYPE, headers=failure.headers)
