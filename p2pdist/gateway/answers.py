"""What the interfaces for clients of other projects have in common: a limit on the requests that
are answered at once, the count of what became of each, and how long a client waits.

Every request is counted once, under what it asked for and what became of it, also where it fails or
its client goes away. A request is answered where it is asked for: exceptions of handlers become
answers here, so that the next middleware sees none, but for a body that cannot be read: after such
a request its connection ends (p2pdist/transfer/problems.py).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError

from p2pdist.model.entity_tag import names_tag
from p2pdist.model.errors import Unavailable

RESULTS = ("ok", "unknown", "unavailable", "refused", "invalid", "broken")
"""ok: answered as asked for. unknown: 404. unavailable: 5xx. refused: 401 and 403. invalid: every
other 4xx. broken: the body ended early, because the client went away or the pull failed."""

Value = TypeVar("Value")
Asked = TypeVar("Asked")
logger = logging.getLogger(__name__)


class Late(Unavailable):
    """What a client asks for has not come in the time that it may wait. The read goes on."""


@dataclass(frozen=True, slots=True)
class Sent:
    """An answer. `source`: where its content came from, one of the SOURCES of its interface;
    `whole`: its body did not end early."""

    response: web.StreamResponse
    source: str = "none"
    whole: bool = True


class Count(Protocol):
    """Counts a request that was answered."""

    def __call__(self, kind: str, status: int, source: str, /, *, whole: bool) -> None: ...


@dataclass(frozen=True, slots=True)
class Interface(Generic[Asked]):
    """How requests of one interface are read, counted and answered where they fail."""

    requests_max: int
    """Requests answered at once."""

    busy: Callable[[], Unavailable]
    """What one more is told."""

    kind: Callable[[Asked], str]
    """What a request counts as; one that cannot be read is "other"."""

    count: Count
    failed: Callable[[web.Request, Exception, Asked | None], web.Response]
    """What an exception means to the client of a request, as far as that could be read."""


class Answers(Generic[Asked]):
    """Answers the requests of one interface. On the event loop."""

    def __init__(self, interface: Interface[Asked]) -> None:
        self._interface, self._answering = interface, 0

    async def answer(
        self,
        request: web.Request,
        parse: Callable[[web.Request], Asked],
        give: Callable[[web.Request, Asked], Awaitable[Sent]],
    ) -> web.StreamResponse:
        """Answer a request with what `give` gives for what `parse` reads, or with its failure."""
        interface, asked, kind = self._interface, None, "other"
        self._answering += 1
        try:
            if self._answering > interface.requests_max:
                raise interface.busy()
            asked = parse(request)
            kind = interface.kind(asked)
            sent = await give(request, asked)
        except asyncio.CancelledError:
            interface.count(kind, 200, "none", whole=False)
            raise
        except (web.RequestPayloadError, HttpProcessingError):
            interface.count(kind, 400, "none", whole=True)
            raise
        except Exception as error:
            response = interface.failed(request, error, asked)
            interface.count(kind, response.status, "none", whole=True)
            if response.status >= 500:
                logger.info("%s %s is not answered: %s", request.method, request.rel_url.raw_path[:200], error)
            return response
        finally:
            self._answering -= 1
        interface.count(kind, sent.response.status, sent.source, whole=sent.whole)
        return sent.response


async def answer_by(deadline: float, work: Awaitable[Value]) -> Value:
    """What `work` gives. Raises Late when that is not there at `deadline`, in the event
    loop's time."""
    try:
        async with asyncio.timeout_at(deadline):
            return await work
    except TimeoutError as error:
        raise Late("there is no answer in the time that a client may wait", remedy="Ask again") from error


def precondition(request: web.Request, tag: str, headers: Mapping[str, str]) -> web.Response | None:
    """The answer, with these fields, where a condition on an entity tag decides a request (RFC
    9110, 13.2.2); None where none does. Raises HTTPPreconditionFailed."""
    if (field := request.headers.get("If-Match", "")) and not names_tag(field, tag):
        raise web.HTTPPreconditionFailed(headers=headers)
    if names_tag(request.headers.get("If-None-Match", ""), tag, weakly=True):
        return web.Response(status=304, headers=headers)
    return None


def result_of(status: int, *, whole: bool = True) -> str:
    """What a status counts as; not `whole`: its body ended early."""
    if not whole:
        return "broken"
    if status < 400:
        return "ok"
    if status == 404:
        return "unknown"
    if status in (401, 403):
        return "refused"
    return "unavailable" if status >= 500 else "invalid"
