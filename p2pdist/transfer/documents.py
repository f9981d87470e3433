"""Large answers that are whole in memory, such as listings: what they take together, and how long.

Theory. A handler that returns such an answer has ended before a byte of it is read, so no limit of
requests counts it, and a client that reads nothing keeps it for ever. Here the request lasts until
the kernel has all but the last of the body. Answers that wait for their clients take BYTES_MAX in
all, then further ones are refused; a client that does not take its own in SECONDS_MAX, and the time
that this takes at BYTES_S_MIN, is left. Where clients of a network ask, an address takes a part of
BYTES_MAX, so that one that reads nothing does not keep the others from what they need.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter

from aiohttp import web
from aiohttp.typedefs import Handler, Middleware

from p2pdist.model.errors import Unavailable
from p2pdist.transfer.connections import address_key, in_use

LARGE_BYTES = 128 << 10
BYTES_MAX = 256 << 20
SECONDS_MAX, BYTES_S_MIN = 60.0, 256 << 10
ADDRESS_PART = 4
"""An address takes one of so many parts of BYTES_MAX."""

logger = logging.getLogger(__name__)


def large_answers(*, by_address: bool = False) -> Middleware:
    """Middleware of one application that limits its large answers, with `by_address` also those of
    one address. A single one may be of any size."""
    waiting = Counter[str]()

    @web.middleware
    async def limit(request: web.Request, handler: Handler) -> web.StreamResponse:
        response = await handler(request)
        if request.method == "HEAD" or not isinstance(response, web.Response) or response.prepared:
            return response
        size = response.content_length or 0
        if size < LARGE_BYTES:
            return response
        address = address_key(request.remote or "") if by_address else ""
        of_all, of_one = waiting.total(), waiting[address]
        part = BYTES_MAX // ADDRESS_PART if by_address else BYTES_MAX
        if (of_all and of_all + size > BYTES_MAX) or (of_one and of_one + size > part):
            raise Unavailable(
                f"clients have yet to read answers of {of_all} bytes, and this one has {size}",
                remedy="Ask again",
                retry_after=1,
            )
        waiting[address] += size
        seconds = SECONDS_MAX + size / BYTES_S_MIN
        try:
            with in_use(request):
                async with asyncio.timeout(seconds):
                    await response.prepare(request)
                    await response.write_eof()
        except TimeoutError:
            logger.info("%s has not read %d bytes in %.0f s, and is left", request.remote, size, seconds)
            if request.transport is not None:
                request.transport.abort()
        except ConnectionError:
            pass  # the client has gone away
        finally:
            waiting[address] -= size
            if not waiting[address]:
                del waiting[address]
        return response

    return limit
