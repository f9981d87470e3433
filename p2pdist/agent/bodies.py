"""Bodies of blobs for clients of other projects: from the store, or while the swarm brings them.

A fetch that a client began goes on when that client leaves or has waited long enough: the next
request finds what has come.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import replace
from functools import partial

from aiohttp import web

from p2pdist.agent.pull.blob import BlobPull, Body, DemandedBody
from p2pdist.agent.pull.registry import ClientInterest
from p2pdist.agent.uplink import RangeFlow
from p2pdist.gateway.answers import Late, Sent
from p2pdist.model.digest import Digest
from p2pdist.model.errors import NotFound, Unavailable
from p2pdist.store.blobs.blob import Blob
from p2pdist.store.store import BlobStore
from p2pdist.transfer.connections import in_use
from p2pdist.transfer.stream.ranges import RangeOptions, requested_part, serve_range

BYTES_TYPE = "application/octet-stream"

ATTEMPTS = 3
"""So often a blob may be evicted between its fetch and its reading."""

Brought = tuple[Blob, BlobPull | None]
"""A blob, not yet held, and its pull; None when the blob is complete."""

Count = Callable[[str, int], None]
"""Hears of bytes that were sent, and of their source: store or swarm."""


async def held(stack: contextlib.ExitStack, digest: Digest, bring: Callable[[], Awaitable[Brought]]) -> Brought:
    """The blob that `bring` brings, which `stack` holds, and its pull. Raises what `bring`
    raises, and Unavailable."""
    for _ in range(ATTEMPTS):
        blob, pull = await bring()
        with contextlib.suppress(NotFound):  # evicted this very moment: clients would take it for nowhere
            stack.enter_context(blob.held())
            return blob, pull
    raise gone_again(digest)


def gone_again(digest: Digest) -> Unavailable:
    """The failure of a client for which a blob came and was evicted."""
    return Unavailable(f"{digest} was here and is gone again", remedy="Ask again")


class BlobBodies:
    """Sends blobs. `count` hears how many bytes were sent. `interest`: what its clients alone want
    is fetched as long as they want it; without, to the end. On the event loop."""

    def __init__(self, store: BlobStore, count: Count, interest: ClientInterest | None = None) -> None:
        self._store, self._count, self._interest = store, count, interest
        self._beginning: set[asyncio.Task[Brought]] = set()
        """Fetches that have not begun yet."""

    async def send(
        self,
        request: web.Request,
        digest: Digest,
        fetch: Callable[[], Awaitable[Brought]],
        options: RangeOptions,
        *,
        read: Callable[[BlobPull], Body] = lambda pull: pull.body(),
        flow: RangeFlow | None = None,
    ) -> Sent:
        """Answer a GET for a blob that `fetch` brings, or for ranges of it; `read` begins a reading
        while it comes. Raises what `fetch` raises, and Late when it has not begun by
        `options.begin_by`; both before the head was sent."""
        with contextlib.ExitStack() as stack:
            stack.enter_context(in_use(request))
            if self._interest is not None:
                stack.enter_context(self._interest.asking(digest))
            bring = partial(self._brought, digest, fetch, options.begin_by)
            blob, pull = await held(stack, digest, bring)
            body = read(pull) if pull is not None else None
            if isinstance(body, DemandedBody):
                stack.callback(body.close)
            return await self._send(request, blob, body, options, flow)

    async def _brought(
        self, digest: Digest, fetch: Callable[[], Awaitable[Brought]], begin_by: float | None
    ) -> Brought:
        """The blob and its pull. Raises what `send` raises."""
        begun = asyncio.create_task(self._begin(digest, fetch))
        self._beginning.add(begun)
        begun.add_done_callback(self._begun)
        try:
            async with asyncio.timeout_at(begin_by):
                return await asyncio.shield(begun)  # which goes on for the next request
        except TimeoutError:
            why = f"{digest} does not begin to come in the time that a client may wait"
            raise Late(why, remedy="Ask again") from None

    async def _begin(self, digest: Digest, fetch: Callable[[], Awaitable[Brought]]) -> Brought:
        stored = self._store.get(digest)
        if stored is not None and stored.complete:  # such clients compare nothing before they read
            await asyncio.to_thread(self._store.integrity.look, [digest])
        return await fetch()

    def _begun(self, task: asyncio.Task[Brought]) -> None:
        self._beginning.discard(task)
        if not task.cancelled():
            task.exception()  # marks it as seen: there may be no request that waits

    async def _send(
        self, request: web.Request, blob: Blob, body: Body | None, options: RangeOptions, flow: RangeFlow | None
    ) -> Sent:
        source, sent = "store" if body is None else "swarm", 0

        def count(length: int) -> None:
            nonlocal sent
            sent += length
            self._count(source, length)

        opened = blob.files.opened or blob.in_memory
        response = await serve_range(
            request,
            blob.digest,
            blob.fileno() if opened else await asyncio.to_thread(blob.fileno),
            blob.layout,
            have=blob.have if body is not None else None,
            wait_for=body.piece if body is not None else None,
            proven=body.proven if body is not None else None,
            flow=flow,
            disk=not blob.in_memory,
            options=replace(options, sent=count),
        )
        expected = response.content_length if response.status in (200, 206) else 0
        return Sent(response, source, sent >= (expected or 0))


def demanded(request: web.Request, pull: BlobPull, *, ranges_max: int = 1) -> DemandedBody:
    """A reading of the bytes that a request asks for, ahead of all else that the pull brings."""
    layout = pull.blob.layout
    start, end, length = requested_part(request.headers.get("Range", ""), layout.size, ranges_max=ranges_max)
    return DemandedBody(pull, layout.covering(start, end), length)


def counting(counter: Counter[str]) -> Count:
    """Counts bytes by their source."""

    def count(source: str, length: int) -> None:
        counter[source] += length

    return count
