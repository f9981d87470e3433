"""Brings pieces from central storage into a BitTorrent swarm, at the hosts that may read it, as
core/origin_seeding.py decides.

Pieces are given to libtorrent as if they had just come (`TorrentTransfer.give_piece`), and it tells
its peers of them. A web seed (BEP 19) would do the same with less control: libtorrent asks it for
any piece, and every such host would read the whole blob. None is given that has not verified by the
piece list.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from typing import Protocol

from p2pdist.core.origin_seeding import LOOK_S, Feed, Readers
from p2pdist.model.errors import Corrupt, P2PDistError
from p2pdist.model.messages import Reason
from p2pdist.store.blobs.blob import Blob

ANSWER_S = 2.0

_logger = logging.getLogger(__name__)


class Receiver(Protocol):
    """What is needed of a TorrentTransfer."""

    def give_piece(self, piece: int, data: bytes) -> None: ...
    def look_around(self, tell: Callable[[list[int]], object]) -> None: ...


class FeedSide(Protocol):
    """What is needed of the pull."""

    def readers(self) -> Readers:
        """Who may read what."""

    async def read_origin(self, piece: int) -> bytes:
        """A piece, once it may be read."""

    def complain_of_origin(self, stripe: int, reason: Reason, error: P2PDistError) -> None: ...


class OriginFeed:
    """See the module's text. `host` is this host's name. Lives on the event loop."""

    def __init__(self, blob: Blob, host: str, receiver: Receiver, pull: FeedSide) -> None:
        self._blob, self._receiver, self._pull = blob, receiver, pull
        self._stripes = blob.layout.stripes
        self._core = Feed(blob.digest, host, blob.have, asyncio.get_running_loop().time())
        self._reading: set[asyncio.Task[None]] = set()
        self._task = asyncio.create_task(self._run(), name=f"origin-feed-{blob.digest}")

    def stop(self) -> None:
        """End; what is being read is dropped."""
        for task in (self._task, *self._reading):
            task.cancel()

    def held(self, piece: int) -> None:
        """A piece has been stored."""
        if self._core.held(piece):
            self._read_more()

    @property
    def given(self) -> set[int]:
        """All pieces that came this way."""
        return self._core.given

    @property
    def stripes(self) -> set[int]:
        """The stripes that this host alone reads."""
        return set() if self._pull.readers().dealt else {piece % self._stripes for piece in self._core.under_way}

    async def _run(self) -> None:
        loop = asyncio.get_running_loop()
        while not self._blob.have.complete:
            readers = self._pull.readers()
            if readers.any:
                self._core.look(readers, await self._availability(), now=loop.time())
                self._read_more()
            await asyncio.sleep(LOOK_S)

    async def _availability(self) -> Sequence[int]:
        """How many peers have each piece; what was known before while libtorrent has no time to
        say, or the swarm has been left."""
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[list[int]] = loop.create_future()

        def told(counts: list[int]) -> None:
            if not answer.done():
                answer.set_result(counts)

        self._receiver.look_around(lambda counts: loop.call_soon_threadsafe(told, counts))
        await asyncio.wait([answer], timeout=ANSWER_S)
        return answer.result() if answer.done() else self._core.seen

    def _read_more(self) -> None:
        now, readers = asyncio.get_running_loop().time(), self._pull.readers()
        while (piece := self._core.next(readers, now=now)) is not None:
            task = asyncio.create_task(self._bring(piece))
            self._reading.add(task)
            task.add_done_callback(self._brought)

    def _brought(self, done: asyncio.Task[None]) -> None:
        self._reading.discard(done)
        if not done.cancelled():
            self._read_more()

    async def _bring(self, piece: int) -> None:
        loop = asyncio.get_running_loop()
        try:
            data = await self._pull.read_origin(piece)
            if piece in self._blob.have:
                return
            if not await asyncio.to_thread(self._blob.pieces.verify, piece, data):
                raise Corrupt(f"piece {piece} of {self._blob.digest} is wrong at the origin", remedy="Push it again")
            self._core.brought(piece, now=loop.time())
            self._receiver.give_piece(piece, data)
        except P2PDistError as error:
            self._core.failed(piece, now=loop.time())
            reason: Reason = "corrupt" if isinstance(error, Corrupt) else "unavailable"
            self._pull.complain_of_origin(piece % self._stripes, reason, error)
        finally:
            self._core.dropped(piece)
