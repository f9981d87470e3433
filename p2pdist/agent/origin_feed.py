"""Brings pieces from central storage into a BitTorrent swarm, at the hosts that may read it.

Theory. Peers of a swarm get a blob from each other; what nobody of them has, somebody must read from the origin, and only he. Who that is
the swarm does not decide (p2pdist/core/readers.py): the keepers of the zone, each its part, or the holder of a tracker's lease. Pieces are
given to libtorrent as if they had just come (`TorrentTransfer.give_piece`), and it tells its peers of them. A web seed (BEP 19) would
do the same with less control: libtorrent asks it for any piece, and every such host would read the whole blob.

A piece is read when none of the peers that are connected has it, in order of number. Where others come before this host, it waits until for
some time none of the first one's pieces has turned up in the swarm, the longer the more there are: then they do not read, or nobody hears
of it. As soon as such a piece turns up it waits again. While no tracker answers hosts may disagree on who the keepers are, so the first
one waits a little, too.

Invariants: at most READS_AT_ONCE pieces are being read, and GIVEN_MAX on their way through libtorrent; none is given that has not verified
by the piece list.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable
from typing import Protocol

from p2pdist.core.readers import Readers
from p2pdist.model.errors import Corrupt, P2PDistError
from p2pdist.model.messages import Reason
from p2pdist.model.rendezvous import fraction
from p2pdist.store.blob import Blob

READS_AT_ONCE = 4
LOOK_S = 0.25
ANSWER_S = 2.0
SETTLE_S = 1.0
"""A host that held pieces before it came to the swarm waits so long for connections: peers may have what it lacks."""

KEEPER_PAUSE_S = 1.5
GIVEN_MAX = 64
"""Pieces that were given and are not held yet: libtorrent keeps what it has in memory for up to a second."""

TAKEN_S = 5.0
"""A piece that was given and is not held after so long is read again."""

RETRY_FIRST_S, RETRY_MAX_S = 0.5, 15.0

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
        now = asyncio.get_running_loop().time()
        self._begin = self._not_before = now + (SETTLE_S if len(blob.have) else 0.0)
        self._heard: dict[str, float] = {}
        self._retry_s = RETRY_FIRST_S
        self._spread = fraction(str(blob.digest).encode(), host)
        self._wanted: deque[int] = deque()
        self._seen: list[int] = []
        self._reading: set[asyncio.Task[None]] = set()
        self._under_way: set[int] = set()
        self._given_at: dict[int, float] = {}
        self.given: set[int] = set()
        """All pieces that came this way."""
        self._task = asyncio.create_task(self._run(), name=f"origin-feed-{blob.digest}")

    def stop(self) -> None:
        """End; what is being read is dropped."""
        for task in (self._task, *self._reading):
            task.cancel()

    def held(self, piece: int) -> None:
        """A piece has been stored."""
        if self._given_at.pop(piece, None) is not None:
            self._read_more()

    @property
    def stripes(self) -> set[int]:
        """The stripes that this host alone reads."""
        return set() if self._pull.readers().dealt else {piece % self._stripes for piece in self._under_way}

    async def _run(self) -> None:
        loop = asyncio.get_running_loop()
        while not self._blob.have.complete:
            readers = self._pull.readers()
            if readers.any:
                self._look(readers, await self._availability(), loop.time())
                self._read_more()
            await asyncio.sleep(LOOK_S)

    async def _availability(self) -> list[int]:
        """How many peers have each piece; what was known before while libtorrent has no time to say, or the swarm has been left."""
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[list[int]] = loop.create_future()

        def told(counts: list[int]) -> None:
            if not answer.done():
                answer.set_result(counts)

        self._receiver.look_around(lambda counts: loop.call_soon_threadsafe(told, counts))
        await asyncio.wait([answer], timeout=ANSWER_S)
        return answer.result() if answer.done() else self._seen

    def _look(self, readers: Readers, counts: list[int], now: float) -> None:
        """Find what nobody has and is due, and what others have brought since the last look."""
        have, before = self._blob.have, self._seen
        self._seen = counts = counts or [0] * self._blob.layout.count
        for piece in [piece for piece, since in self._given_at.items() if now - since > TAKEN_S]:
            _logger.debug("piece %d of %s was given to the swarm and not taken", piece, self._blob.digest)
            del self._given_at[piece]
        if before:
            turned_up = (p for p, count in enumerate(counts) if count and not before[p] and p not in self.given)
            self._heard.update((readers.first(piece), now) for piece in turned_up)
        self._wanted = deque(
            piece
            for piece, count in enumerate(counts)
            if not count
            and piece not in have
            and piece not in self._under_way
            and piece not in self._given_at
            and self._due(readers, piece, now)
        )

    def _due(self, readers: Readers, piece: int, now: float) -> bool:
        """Whether this host may read a piece now."""
        rank = readers.rank(piece)
        if rank is None:
            return False
        if not rank and not readers.alone:
            return True
        heard = self._heard.get(readers.first(piece), self._begin)
        return now >= heard + KEEPER_PAUSE_S * (rank + self._spread)

    def _read_more(self) -> None:
        now = asyncio.get_running_loop().time()
        room = min(READS_AT_ONCE - len(self._reading), GIVEN_MAX - len(self._reading) - len(self._given_at))
        while room > 0 and self._wanted and now >= self._not_before:
            piece = self._wanted.popleft()
            if piece in self._blob.have:
                continue
            room -= 1
            self._under_way.add(piece)
            task = asyncio.create_task(self._bring(piece))
            self._reading.add(task)
            task.add_done_callback(self._brought)

    def _brought(self, done: asyncio.Task[None]) -> None:
        self._reading.discard(done)
        if not done.cancelled():
            self._read_more()

    async def _bring(self, piece: int) -> None:
        try:
            data = await self._pull.read_origin(piece)
            if piece in self._blob.have:
                return
            if not await asyncio.to_thread(self._blob.pieces.verify, piece, data):
                raise Corrupt(f"piece {piece} of {self._blob.digest} is wrong at the origin", remedy="Push it again")
            self.given.add(piece)
            self._given_at[piece] = asyncio.get_running_loop().time()
            self._receiver.give_piece(piece, data)
            self._retry_s = RETRY_FIRST_S
        except P2PDistError as error:
            pause_s, self._retry_s = self._retry_s, min(RETRY_MAX_S, 2 * self._retry_s)
            self._not_before = asyncio.get_running_loop().time() + pause_s
            reason: Reason = "corrupt" if isinstance(error, Corrupt) else "unavailable"
            self._pull.complain_of_origin(piece % self._stripes, reason, error)
        finally:
            self._under_way.discard(piece)
