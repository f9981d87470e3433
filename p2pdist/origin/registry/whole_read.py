"""Reading ranges of a blob from a registry that ignores Range (RFC 9110, 14.2): it sends the blob
whole, which by ranges it would once for each."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager, AsyncExitStack, suppress

from aiohttp import ClientError, ClientResponse

from p2pdist.model.digest import Digest
from p2pdist.model.errors import Corrupt, P2PDistError, Unavailable, unreached

READ_BYTES = 1 << 20
BEHIND_BYTES_MAX = 64 << 20
"""Bytes that are kept for readers that ask for them a little late."""

IDLE_S, PART_IDLE_S = 5.0, 60.0
"""How long a response waits for another reader, and while a part of it has not come: a host that
keeps to a limit asks seldom, and another response would begin again from the first byte."""

PARKED_MAX = 8
"""Responses of one registry that wait for longer than IDLE_S: each has a connection, of which there
are few (client.py), and up to BEHIND_BYTES_MAX."""

Respond = Callable[[], AbstractAsyncContextManager[ClientResponse]]


class WholeRead:
    """A response with all of a blob, which several readers of ranges share. It goes forward as far
    as a reader waits for, and keeps the last BEHIND_BYTES_MAX bytes; a reader of earlier ones has
    it begin again. `name` is the repository, for messages; `respond` begins a response, `ended` is
    called when this reads no more. Those of one registry share `parked`, which holds the ones that
    wait for longer than IDLE_S."""

    def __init__(
        self,
        name: str,
        digest: Digest,
        respond: Respond,
        ended: Callable[[], object],
        parked: set[WholeRead],
    ) -> None:
        self._name, self._digest, self._respond, self._ended = name, digest, respond, ended
        self._parked = parked
        self._was_parked = False
        """Whether the response has waited for longer than IDLE_S; its server may not have."""
        self._waiting: list[tuple[int, int, asyncio.Future[bytes]]] = []
        self._kept = bytearray()
        """The bytes before `_passed` that are still here."""
        self._passed = 0
        """Bytes of the response that have come."""
        self._response: ClientResponse | None = None
        self._held = AsyncExitStack()
        """Ends the response."""
        self._task: asyncio.Task[None] | None = None
        self._asked = asyncio.Event()

    @property
    def is_new(self) -> bool:
        """Whether nothing has been read."""
        return self._response is None and self._task is None

    def begin(self, response: ClientResponse, held: AsyncExitStack) -> None:
        """Go on with a response that has come already, for a blob without a reader."""
        assert self.is_new
        self._response, self._held = response, held

    async def read(self, start: int, length: int) -> bytes:
        """Bytes of the blob. Raises the failure of the response."""
        waiter: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        entry = (start, length, waiter)
        self._waiting.append(entry)
        self._asked.set()
        if self._task is None:
            self._task = asyncio.create_task(self._run(), name=f"read-whole-{self._digest[7:19]}")
        try:
            return await waiter
        finally:
            if entry in self._waiting:
                self._waiting.remove(entry)

    def close(self) -> None:
        """End now."""
        if self._task is not None:
            self._task.cancel()

    async def _run(self) -> None:
        failure: BaseException = Unavailable(f"{self._name}: reading {self._digest} was left")
        try:
            while await self._is_asked():
                await self._advance()
        except P2PDistError as error:
            failure = error
        except Exception as error:
            why = unreached(error)
            failure = Unavailable(f"{self._name}: reading {self._digest} broke off: {why}", remedy="Try again")
        finally:
            self._ended()
            for _, _, waiter in self._waiting:
                if not waiter.done():
                    waiter.set_exception(failure)
            await self._held.aclose()

    async def _is_asked(self) -> bool:
        """Wait for a reader; False when none has come in time."""
        if await self._asked_within(IDLE_S):
            return True
        ended = self._response is None or self._response.content.at_eof()
        if ended or len(self._parked) >= PARKED_MAX:
            return False
        self._parked.add(self)
        self._was_parked = True
        try:
            return await self._asked_within(PART_IDLE_S - IDLE_S)
        finally:
            self._parked.discard(self)

    async def _asked_within(self, seconds: float) -> bool:
        if not self._waiting:
            with suppress(TimeoutError):
                async with asyncio.timeout(seconds):
                    while not self._waiting:
                        self._asked.clear()
                        await self._asked.wait()
        return bool(self._waiting)

    async def _advance(self) -> None:
        """Give readers what has come, then take the next bytes."""
        if self._serve() or not self._waiting:
            return
        oldest = self._passed - len(self._kept)
        if self._response is None or any(start < oldest for start, _, _ in self._waiting):
            await self._held.aclose()
            self._kept, self._passed, self._was_parked = bytearray(), 0, False
            self._response = await self._held.enter_async_context(self._respond())
        try:
            chunk = await self._response.content.read(READ_BYTES)
        except ClientError:
            if not self._was_parked:
                raise
            chunk = b""
        if not chunk and self._was_parked:
            self._response = None  # the server did not wait for so long: begin again
            return
        if not chunk:
            raise Corrupt(
                f"{self._name}: the registry ended {self._digest} after {self._passed} bytes",
                remedy="Try again; if it stays so, the registry's copy is damaged",
            )
        self._kept += chunk
        self._passed += len(chunk)
        if len(self._kept) > BEHIND_BYTES_MAX:
            del self._kept[: len(self._kept) - BEHIND_BYTES_MAX]

    def _serve(self) -> bool:
        """Answer the readers whose bytes are here; whether there were any."""
        first = self._passed - len(self._kept)
        ready = [entry for entry in self._waiting if first <= entry[0] and entry[0] + entry[1] <= self._passed]
        for entry in ready:
            start, length, waiter = entry
            self._waiting.remove(entry)
            if not waiter.done():
                waiter.set_result(bytes(self._kept[start - first : start - first + length]))
        return bool(ready)
