"""Whether one of several trackers that is late lives: a process that hangs keeps its connections,
and would keep whoever asks as long.

A tracker from which nothing has come for LATE_S is asked whether it lives, over a connection of its
own: questions that wait may have taken all others.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Coroutine
from contextlib import aclosing, suppress
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, TypeVar

from p2pdist.client.access import Access
from p2pdist.model.errors import P2PDistError, Unavailable

if TYPE_CHECKING:
    import aiohttp

LATE_S, LATE_S_MAX = 3.0, 12.0
"""After so long without a sign a tracker is asked, then again after twice as long each time."""

LIVES_S_MAX = 2.0
"""It has so long to answer."""

Value = TypeVar("Value")


class Hangs(Unavailable):
    """A tracker takes connections and does not answer."""


class Pulse:
    """What is known of trackers by URL, and asks them. On the event loop."""

    def __init__(self, access: Access) -> None:
        self._access = access
        self._session: aiohttp.ClientSession | None = None
        self._asked: dict[str, asyncio.Task[bool]] = {}
        """The question that is under way, or was the last."""
        self._heard_at: dict[str, float] = {}
        """When a part of an answer came last, in the event loop's time."""

    def heard(self, url: str) -> None:
        """A part of an answer has come from the tracker at `url`."""
        self._heard_at[url] = asyncio.get_running_loop().time()

    async def watched(self, url: str, asking: Coroutine[Any, Any, Value]) -> Value:
        """What `asking` returns, which asks the tracker at `url`. Raises Hangs where that does."""
        from p2pdist.model.url import redacted

        loop, pause_s = asyncio.get_running_loop(), LATE_S
        task = loop.create_task(asking)
        try:
            while not (await asyncio.wait([task], timeout=pause_s))[0]:
                if loop.time() - self._heard_at.get(url, float("-inf")) < pause_s:
                    continue
                if not await self._lives(url) and not _answered(task):
                    raise Hangs(f"the tracker {redacted(url)} hangs", remedy="Ask another one, or restart it")
                pause_s = min(2 * pause_s, LATE_S_MAX)
            return task.result()
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    async def each(self, url: str, values: AsyncGenerator[Value, None]) -> AsyncIterator[Value]:
        """What `values` gives, which comes from the tracker at `url` for as long as that lives.
        Raises Hangs where it does not, and what `values` raises."""

        async def following() -> tuple[Value, ...]:
            async for value in values:
                return (value,)
            return ()

        async with aclosing(values):
            while got := await self.watched(url, following()):
                yield got[0]

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Ask nothing any more."""
        for probe in self._asked.values():
            probe.cancel()
        await asyncio.gather(*self._asked.values(), return_exceptions=True)
        if self._session is not None:
            await self._session.close()

    async def _lives(self, url: str) -> bool:
        if (probe := self._asked.get(url)) is None or probe.done():
            probe = self._asked[url] = asyncio.create_task(self._answers(url))
        return await asyncio.shield(probe)

    async def _answers(self, url: str) -> bool:
        import aiohttp

        if self._session is None:
            self._session = aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=LIVES_S_MAX))
        with suppress(aiohttp.ClientError, TimeoutError, OSError, P2PDistError):
            async with asyncio.timeout(LIVES_S_MAX):  # the first time it is asked for its authorities, too
                secured = await self._access.request(url)
            async with self._session.get(f"{url}/healthz", **secured) as answer:
                return answer.status < 500
        return False


def _answered(task: asyncio.Task[Any]) -> bool:
    """Whether a question has got an answer, be it a failure; one that could not even be put, as
    where TLS waits for the other side, has none."""
    return task.done() and not task.cancelled() and not isinstance(task.exception(), Unavailable)
