"""Failures as problem documents (RFC 9457) and names of requests, for the HTTP servers of agents
and trackers.

Every request has a name (p2pdist/model/request_id.py): the one in its header, if that is short and
plain, else a new one.
"""

from __future__ import annotations

import asyncio
import http
import logging
import os
from typing import Any

import msgspec
from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError
from aiohttp.typedefs import Handler

from p2pdist.model.errors import (
    PROBLEM_BASE,
    NotFound,
    P2PDistError,
    Refused,
    TooLarge,
    Unavailable,
    UsageError,
    foreseen,
)
from p2pdist.model.request_id import HEADER, REQUEST_ID, is_sane

PROBLEM_TYPE = "application/problem+json"

logger = logging.getLogger(__name__)

_KINDS: dict[int, type[P2PDistError]] = {
    kind.http_status: kind for kind in (UsageError, Refused, NotFound, TooLarge, Unavailable)
}
_DROPPED = {"Content-Type", "Content-Length"}


def problem_response(error: P2PDistError) -> web.Response:
    """The response that reports `error` to a client."""
    return _response(error.http_status, error.problem())


def _response(status: int, body: dict[str, Any]) -> web.Response:
    if name := REQUEST_ID.get():
        body = {**body, "request_id": name}
    return web.Response(status=status, body=msgspec.json.encode(body, enc_hook=str), content_type=PROBLEM_TYPE)


def _of_http(request: web.BaseRequest, error: web.HTTPException) -> web.Response:
    """The problem document of an error that aiohttp itself raises, such as 404, 405 and 413; header
    fields such as Allow are kept."""
    kind = _KINDS.get(error.status)
    slug = kind.slug if kind else http.HTTPStatus(error.status).phrase.lower().replace(" ", "-")
    title = kind.title if kind else error.reason
    detail = f"{request.method} {request.path[:200]}: {error.reason}"
    body = {"type": PROBLEM_BASE + slug, "title": title, "status": error.status, "detail": detail}
    response = _response(error.status, body)
    response.headers.extend({name: value for name, value in error.headers.items() if name not in _DROPPED})
    return response


def _unreadable(request: web.BaseRequest, error: Exception) -> UsageError:
    """The failure of a request whose body is not what its header fields say."""
    message = getattr(error, "message", "") or str(error)
    coding = request.headers.get("Content-Encoding", "")
    what = f"a body that is said to be {coding[:50]!r}" if coding else "the body"
    why = " ".join(message.split())[:200]
    return UsageError(
        f"{request.method} {request.path[:200]}: {what} cannot be read: {why}",
        remedy="Send it as its header fields say",
    )


def _unexpected(request: web.BaseRequest, error: BaseException) -> P2PDistError:
    """What a client learns of a failure that no handler foresaw. A cancellation is one where nobody
    cancelled the request: what it waited for was given up, and to break the connection off would
    leave the client without a word."""
    logger.error("unexpected failure of %s %s", request.method, request.path[:200], exc_info=error)
    if isinstance(error, asyncio.CancelledError):
        return Unavailable("what the request waited for was given up", remedy="Ask again", retry_after=1)
    common = foreseen(error) if isinstance(error, OSError) else None
    return common or P2PDistError("an internal failure", remedy="The log of the service has the details")


@web.middleware
async def problems(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Middleware that responds to every failure of a handler with a problem document; an unexpected
    exception is logged with its traceback, which no client sees. A failure after the head has gone
    out breaks the connection, so that the client sees a truncated response. Log lines of the
    handler, and of tasks that it starts, carry the request's name."""
    given = request.headers.get(HEADER, "")
    name = given if is_sane(given) else os.urandom(8).hex()
    before = REQUEST_ID.set(name)
    try:
        response = await _answered(request, handler)
        if not response.prepared:
            response.headers[HEADER] = name
        logger.debug("%s %s is answered: %d", request.method, request.path[:200], response.status)
        return response
    finally:
        REQUEST_ID.reset(before)


async def name_request(request: web.Request, response: web.StreamResponse) -> None:
    """Signal on_response_prepare: adds the request's name to a response that a handler begins
    itself."""
    if name := REQUEST_ID.get():
        response.headers[HEADER] = name


async def _answered(request: web.Request, handler: Handler) -> web.StreamResponse:
    try:
        return await handler(request)
    except web.HTTPException as error:
        if error.status < 400:
            raise
        response = _of_http(request, error)
    except P2PDistError as error:
        response = problem_response(error)
    except (web.RequestPayloadError, HttpProcessingError) as error:
        response = problem_response(_unreadable(request, error))
        request.content.feed_eof()  # or aiohttp reads on after the answer, and logs that it cannot
        response.force_close()
    except (Exception, asyncio.CancelledError) as error:
        gone = request.transport is None or request.transport.is_closing()
        task = asyncio.current_task()
        if isinstance(error, asyncio.CancelledError) and (gone or task is None or task.cancelling()):
            raise  # the client has gone, or the service ends
        if gone and isinstance(error, ConnectionError):
            response = problem_response(Unavailable("the client closed the connection"))  # which nobody gets
        else:
            response = problem_response(_unexpected(request, error))
    if request.writer.output_size > 0 and request.transport is not None:
        request.transport.abort()
    return response
