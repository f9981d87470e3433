"""Failures as S3 clients read them: error documents with a code and a message.

Clients retry 500 and 503, and believe all else. So what is not known is 404, what may not be read
403, and what cannot be given now (no tracker, a full disk, a pull that failed) 503.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping

from aiohttp import web

from p2pdist.model.errors import (
    NotFound,
    P2PDistError,
    Refused,
    Unauthenticated,
    UsageError,
    foreseen,
)

_CODES_OF_HTTP = {
    404: "NoSuchKey",
    405: "MethodNotAllowed",
    412: "PreconditionFailed",
    413: "EntityTooLarge",
    416: "InvalidRange",
}
_TEXTS_OF_HTTP = {
    405: "objects are read here, and written where the package is pushed",
    412: "a condition of the request does not hold for this object",
    416: "no byte of the range is in the object",
}

logger = logging.getLogger(__name__)


class S3Failure(Exception):
    """A failure with the status, code and message of its error document."""

    def __init__(self, status: int, code: str, what: str, *, headers: Mapping[str, str] | None = None) -> None:
        super().__init__(what)
        self.status, self.code, self.what = status, code, what
        self.headers = dict(headers or {})


def no_such_bucket(name: str) -> S3Failure:
    """The failure of a bucket that does not exist, or that the client may not read."""
    return S3Failure(404, "NoSuchBucket", f"there is no bucket {name} here")


def no_such_key(key: bytes) -> S3Failure:
    """The failure of an object that does not exist."""
    return S3Failure(404, "NoSuchKey", f"there is no object {key[:200].decode(errors='backslashreplace')!r} here")


def as_failure(error: Exception) -> S3Failure:
    """What an exception means to a client. An unexpected one is logged, and its text stays here."""
    match error:
        case S3Failure():
            return error
        case NotFound():
            return S3Failure(404, "NoSuchKey", str(error))
        case Unauthenticated() | Refused():
            return S3Failure(403, "AccessDenied", str(error))
        case UsageError():
            return S3Failure(400, "InvalidRequest", str(error))
        case P2PDistError():
            return S3Failure(503, "ServiceUnavailable", str(error))
        case web.HTTPException():
            kept = {name: value for name, value in error.headers.items() if name in ("Allow", "Content-Range", "ETag")}
            code = _CODES_OF_HTTP.get(error.status, "InvalidRequest")
            return S3Failure(error.status, code, _TEXTS_OF_HTTP.get(error.status, error.reason), headers=kept)
        case ConnectionError():
            return S3Failure(503, "ServiceUnavailable", "the client closed the connection")
    expected = foreseen(error) if isinstance(error, OSError) else None
    if expected is not None:
        logger.warning("a request for an object failed: %s", expected)
        return S3Failure(503, "ServiceUnavailable", str(expected))
    logger.error("unexpected failure of a request for an object", exc_info=error)
    return S3Failure(500, "InternalError", "an internal failure; the log of the agent has the details")
