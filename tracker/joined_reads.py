"""Reads of small content for many agents at once: each is done once, however many wait for it, and
what does not exist is not sought again for a while. Documents are kept by digest, up to a limit.
"""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import Callable, Coroutine, Sized
from contextvars import ContextVar
from typing import Any, Generic, TypeVar

from p2pdist.model.digest import Digest
from p2pdist.model.errors import NotFound, Unavailable

ABSENT_S = 1.0
"""So long what was not there is not sought again."""

ABSENT_MAX = 10_000
MISSES_PER_S, MISSES_BURST = 20.0, 500
"""Reads of what is not there that one address may cause: a second, and at once after a while
without. Storage is paid for each."""

ASKERS_MAX = 10_000
ASKER: ContextVar[str] = ContextVar("asker", default="")
"""The address for which content is read; empty: the tracker itself, which no limit keeps."""

Key = TypeVar("Key")
Value = TypeVar("Value")
Document = TypeVar("Document", bound=Sized)


class JoinedReads:
    """Reads that are under way, by key, and what was not there. `source` is what they read, in
    words for the user; `absent_s` is for how long it is not asked again for what it did not have,
    ABSENT_S by default."""

    def __init__(self, source: str, absent_s: float | None = None) -> None:
        self._source, self._absent_s = source, absent_s
        self._reads: dict[str, asyncio.Task[Any]] = {}
        self._absent: OrderedDict[str, tuple[float, NotFound]] = OrderedDict()
        """By key until when it is taken not to be there, and what was said."""
        self._misses: OrderedDict[str, float] = OrderedDict()
        """By address until when its misses take at the rate MISSES_PER_S."""

    async def read(self, key: str, read: Callable[[], Coroutine[Any, Any, Value]]) -> Value:
        """What `read` returns, or another read of the same key that is under way. Raises what it
        raises, and Unavailable for an address that causes too many misses."""
        now, absent = time.monotonic(), self._absent.get(key)
        if absent is not None and now < absent[0]:
            raise NotFound(absent[1].what, remedy=absent[1].remedy, **absent[1].details)
        task = self._reads.get(key)
        if task is None:
            asker = ASKER.get()
            if self._misses.get(asker, 0.0) > now + MISSES_BURST / MISSES_PER_S:
                raise Unavailable(
                    f"{asker} asks for too much that {self._source} does not have", remedy="Try again in a minute"
                )
            task = self._reads[key] = asyncio.ensure_future(read())
            task.add_done_callback(lambda done: self._ended(key, asker, done))
        value: Value = await asyncio.shield(task)
        return value

    def _ended(self, key: str, asker: str, task: asyncio.Task[Any]) -> None:
        del self._reads[key]
        error = None if task.cancelled() else task.exception()  # marks it as seen: the callers may have gone away
        if isinstance(error, NotFound):
            now = time.monotonic()
            absent_s = self._absent_s if self._absent_s is not None else ABSENT_S
            remember(self._absent, key, (now + absent_s, error), ABSENT_MAX)
            if asker:
                remember(self._misses, asker, max(now, self._misses.get(asker, now)) + 1 / MISSES_PER_S, ASKERS_MAX)


class DocumentCache(Generic[Document]):
    """Documents by digest, the most lately used ones, up to `bytes_max` in all."""

    def __init__(self, bytes_max: int) -> None:
        self._bytes_max = bytes_max
        self._bytes = 0
        self._kept: OrderedDict[Digest, Document] = OrderedDict()

    def get(self, digest: Digest) -> Document | None:
        """A document, if it is here."""
        data = self._kept.get(digest)
        if data is not None:
            self._kept.move_to_end(digest)
        return data

    def put(self, digest: Digest, data: Document) -> None:
        """Keep a document; others go."""
        if digest in self._kept:
            return
        self._kept[digest] = data
        self._bytes += len(data)
        while self._bytes > self._bytes_max and len(self._kept) > 1:
            self._bytes -= len(self._kept.popitem(last=False)[1])


def remember(table: OrderedDict[Key, Value], key: Key, value: Value, limit: int) -> None:
    """Note a value, the latest, in a table of at most `limit` entries."""
    table[key] = value
    table.move_to_end(key)
    while len(table) > limit:
        table.popitem(last=False)
