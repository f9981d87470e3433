"""What readers over TCP may have this host fetch.

Any HTTP client may read a blob through any agent, and the agent fetches what it lacks. A client
that the agent does not know must not cost the host what its users keep here. So a fetch for such a
reader takes free room, and the room of blobs that came for readers before; it evicts nothing else.
What came for a reader counts as unused, so that it goes first when the host's own pulls need room.
A few fetches are under way for readers at once, some for one address; what is being fetched anyway,
or about to be, is joined without limits.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import Counter, OrderedDict
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from functools import partial

from p2pdist.agent.bittorrent.service import SwarmService
from p2pdist.agent.pull.blob import BlobPull
from p2pdist.agent.pull.pulls import Pulls
from p2pdist.agent.pull.registry import Registry
from p2pdist.model.digest import Digest
from p2pdist.model.errors import Conflict, NotFound, Unavailable
from p2pdist.model.pieces import encoded_size
from p2pdist.store.store import BlobStore, room_left

FETCHES_MAX, FETCHES_OF_ADDRESS_MAX = 16, 8
BROUGHT_MAX = 4096
LOOK_AGAIN_S, LOOKS_MAX = 0.2, 25
"""A pull holds its blob a moment longer than its reader does: that is looked at again so often.
What is held for longer is in use."""

UNUSED_SINCE = 1.0
"""When a blob that came for a reader was used last, in seconds since the epoch."""

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class _Fetch:
    """A blob that is fetched for readers."""

    address: str
    """Of the reader that asked first."""

    requests: int = 0
    """Those that began before there was a pull, until they or their pull end."""

    entering: int = 0
    """Of these, those that make room."""


class Readers:
    """Fetches blobs for readers over TCP. On the event loop."""

    def __init__(self, store: BlobStore, pulls: Pulls, registry: Registry, swarming: SwarmService | None) -> None:
        self._store, self._pulls, self._registry, self._swarming = store, pulls, registry, swarming
        self._fetches: dict[Digest, _Fetch] = {}
        """Fetches under way for readers."""
        self._claimed: dict[Digest, int] = {}
        """Bytes of blobs that are about to take their room."""
        self._brought: OrderedDict[Digest, None] = OrderedDict()
        """Blobs that came for readers, the oldest first."""
        self._reading: Counter[Digest] = Counter()
        """Readers of each blob."""

    async def fetch(self, digest: Digest, address: str) -> BlobPull | None:
        """The pull of a blob that is not complete here; None once it is. Raises its failure, and
        Unavailable when there is no room for it, or too many fetches are under way."""

        async def size() -> int:
            layout = (await self._registry.describe(digest)).layout
            return layout.size + encoded_size(layout)

        return await self.bring(digest, address, size, partial(self._pulls.blob, digest))

    async def bring(
        self,
        digest: Digest,
        address: str,
        size: Callable[[], Awaitable[int]],
        begin: Callable[[], Awaitable[BlobPull | None]],
    ) -> BlobPull | None:
        """What `fetch` does, for a blob whose size `size` finds and whose pull `begin` starts or
        joins."""
        if self._registry.fetching(digest) is not None:
            return await begin()
        if (fetch := self._fetches.get(digest)) is None:
            own = sum(other.address == address for other in self._fetches.values())
            if len(self._fetches) >= FETCHES_MAX or own >= FETCHES_OF_ADDRESS_MAX:
                raise Unavailable("this agent fetches as much as it may for readers", remedy="Ask again soon")
            fetch = self._fetches[digest] = _Fetch(address)
        fetch.requests += 1
        pull = None
        try:
            pull = await self._within_room(digest, fetch, await size(), begin)
        finally:
            if pull is None:
                self._ended(digest, fetch)
        if pull is not None:
            pull.done.add_done_callback(lambda _: self._ended(digest, fetch))
        return pull

    @contextlib.contextmanager
    def reading(self, digest: Digest) -> Iterator[None]:
        """Around the reading of a blob over TCP: of one that came for readers it is no use."""
        self._reading[digest] += 1
        try:
            yield
        finally:
            self._reading[digest] -= 1
            if not self._reading[digest]:
                del self._reading[digest]
                self._mark_unused(digest)

    async def _within_room(
        self, digest: Digest, fetch: _Fetch, size: int, begin: Callable[[], Awaitable[BlobPull | None]]
    ) -> BlobPull | None:
        new = self._store.get(digest) is None  # else it has its room already
        if new:
            self._claimed[digest] = size
            fetch.entering += 1
        try:
            if new:
                await asyncio.to_thread(self._make_room, digest)
                self._brought[digest] = None
                self._brought.move_to_end(digest)
                while len(self._brought) > BROUGHT_MAX:
                    self._brought.popitem(last=False)
            return await begin()
        finally:
            fetch.entering -= new
            if not fetch.entering:
                self._claimed.pop(digest, None)

    def _make_room(self, digest: Digest) -> None:
        """Have what came for readers before give way, the oldest first. Raises Unavailable when
        that is not enough. In a thread."""
        going = [other for other in list(self._brought) if other != digest]
        while room_left(self._store) < self._claimed_bytes():
            if not going:
                raise Unavailable(
                    f"this agent has no room to fetch {digest} for a reader",
                    remedy="Pull it through the agent's Unix socket, which makes room, or ask another agent",
                )
            self._give_up(going.pop(0))

    def _claimed_bytes(self) -> int:
        """Those of blobs that are not in the store: the others have their room. In a thread."""
        return sum(size for digest, size in list(self._claimed.items()) if self._store.get(digest) is None)

    def _give_up(self, digest: Digest) -> None:
        blob = self._store.get(digest)
        if blob is not None and (blob.in_use or digest in self._store.pins):
            return
        self._brought.pop(digest, None)
        if blob is None:
            return
        if self._swarming is not None:
            self._swarming.release(digest)
        with contextlib.suppress(Conflict, NotFound):
            self._store.remove(digest)
            logger.info("%s came for a reader and makes room for another", digest)

    def _ended(self, digest: Digest, fetch: _Fetch) -> None:
        """A request for a fetch has ended, or its pull."""
        fetch.requests -= 1
        if not fetch.requests:
            del self._fetches[digest]
        self._mark_unused(digest)

    def _mark_unused(self, digest: Digest, again: int = LOOKS_MAX) -> None:
        """Let a blob that came for readers go before all others, once none reads it and the pull
        that brought it holds it no longer."""
        blob = self._store.get(digest) if digest in self._brought and digest not in self._reading else None
        if blob is None:
            return
        if not blob.in_use:
            blob.last_used = UNUSED_SINCE
        elif again:
            asyncio.get_running_loop().call_later(LOOK_AGAIN_S, self._mark_unused, digest, again - 1)
