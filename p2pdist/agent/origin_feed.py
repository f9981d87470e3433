"""Brings pieces from central storage into a BitTorrent swarm, at the hosts that may read it.

Theory. Peers of a swarm get a blob from each other; what nobody of them has, somebody must read from the origin, and only he. Who that is
the swarm does not decide: a holder of the tracker's lease for a stripe reads that stripe, and while no tracker answers the first keeper of
the stripe (p2pdist/core/candidates.py). Pieces are given to libtorrent as if they had just come (`TorrentTransfer.give_piece`), and it
tells its peers of them. A web seed (BEP 19) would do the same with less control: libtorrent asks it for any piece, and every such
host would read the whole blob.

A piece is read when none of the peers that are connected has it, in order of number. A keeper waits until for some time no missing piece
of the stripe has turned up in the swarm, the longer the higher its rank: then those before it do not read, or nobody hears of it. As
soon as another host brings such a piece it waits again.

Invariants: at most READS_AT_ONCE pieces of a stripe are being read, and GIVEN_MAX on their way through libtorrent; none is given that has
not verified by the piece list.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Protocol

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
"""Pieces of a stripe that were given and are not held yet: libtorrent keeps what it has in memory for up to a second."""

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

    def origin_ranks(self) -> dict[int, int]:
        """The stripes that this host may read, 0 with a lease, else its place among the keepers from 1."""

    async def read_origin(self, piece: int) -> bytes:
        """A piece, once it may be read."""

    def complain_of_origin(self, stripe: int, reason: Reason, error: P2PDistError) -> None: ...


class OriginFeed:
    """See the module's text. `host` is this host's name. Lives on the event loop."""

    def __init__(self, blob: Blob, host: str, receiver: Receiver, pull: FeedSide) -> None:
        self._blob, self._receiver, self._pull = blob, receiver, pull
        self._stripes = blob.layout.stripes
        now = asyncio.get_running_loop().time()
        begin = now + (SETTLE_S if len(blob.have) else 0.0)
        self._heard = [begin] * self._stripes
        self._not_before = [begin] * self._stripes
        self._retry_s = [RETRY_FIRST_S] * self._stripes
        self._spread = [fraction(f"{blob.digest}/{stripe}".encode(), host) for stripe in range(self._stripes)]
        self._wanted: list[deque[int]] = [deque() for _ in range(self._stripes)]
        self._seen: list[int] = []
        self._reading: list[set[asyncio.Task[None]]] = [set() for _ in range(self._stripes)]
        self._under_way: set[int] = set()
        self._given_at: list[dict[int, float]] = [{} for _ in range(self._stripes)]
        self.given: set[int] = set()
        """All pieces that came this way."""
        self._task = asyncio.create_task(self._run(), name=f"origin-feed-{blob.digest}")

    def stop(self) -> None:
        """End; what is being read is dropped."""
        for task in (self._task, *(task for tasks in self._reading for task in tasks)):
            task.cancel()

    def held(self, piece: int) -> None:
        """A piece has been stored."""
        if self._given_at[piece % self._stripes].pop(piece, None) is not None:
            self._read_more()

    @property
    def stripes(self) -> set[int]:
        """The stripes that are being read."""
        return {stripe for stripe, tasks in enumerate(self._reading) if tasks}

    async def _run(self) -> None:
        loop = asyncio.get_running_loop()
        while not self._blob.have.complete:
            if self._pull.origin_ranks():
                self._look(await self._availability(), loop.time())
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

    def _look(self, counts: list[int], now: float) -> None:
        """Find what nobody has, and what others have brought since the last look."""
        have, before = self._blob.have, self._seen
        self._seen = counts = counts or [0] * self._blob.layout.count
        for stripe in range(self._stripes):
            given = self._given_at[stripe]
            for piece in [piece for piece, since in given.items() if now - since > TAKEN_S]:
                _logger.debug("piece %d of %s was given to the swarm and not taken", piece, self._blob.digest)
                del given[piece]
            missing = have.missing(stripe, self._stripes)
            self._wanted[stripe] = deque(
                p for p in missing if not counts[p] and p not in self._under_way and p not in given
            )
            if before and any(counts[p] and not before[p] and p not in self.given for p in missing):
                self._heard[stripe] = now

    def _read_more(self) -> None:
        now = asyncio.get_running_loop().time()
        for stripe, rank in self._pull.origin_ranks().items():
            due = self._not_before[stripe]
            if rank:
                due = max(due, self._heard[stripe] + KEEPER_PAUSE_S * (rank - 1 + self._spread[stripe]))
            tasks, given = self._reading[stripe], self._given_at[stripe]
            room = min(READS_AT_ONCE - len(tasks), GIVEN_MAX - len(tasks) - len(given)) if now >= due else 0
            while room > 0 and self._wanted[stripe]:
                piece = self._wanted[stripe].popleft()
                if piece in self._blob.have:
                    continue
                room -= 1
                self._under_way.add(piece)
                task = asyncio.create_task(self._bring(stripe, piece))
                tasks.add(task)
                task.add_done_callback(partial(self._brought, tasks))

    def _brought(self, tasks: set[asyncio.Task[None]], done: asyncio.Task[None]) -> None:
        tasks.discard(done)
        if not done.cancelled():
            self._read_more()

    async def _bring(self, stripe: int, piece: int) -> None:
        try:
            data = await self._pull.read_origin(piece)
            if piece in self._blob.have:
                return
            if not await asyncio.to_thread(self._blob.pieces.verify, piece, data):
                raise Corrupt(f"piece {piece} of {self._blob.digest} is wrong at the origin", remedy="Push it again")
            self.given.add(piece)
            self._given_at[stripe][piece] = asyncio.get_running_loop().time()
            self._receiver.give_piece(piece, data)
            self._retry_s[stripe] = RETRY_FIRST_S
        except P2PDistError as error:
            pause_s = self._retry_s[stripe]
            self._retry_s[stripe] = min(RETRY_MAX_S, 2 * pause_s)
            self._not_before[stripe] = asyncio.get_running_loop().time() + pause_s
            self._pull.complain_of_origin(stripe, "corrupt" if isinstance(error, Corrupt) else "unavailable", error)
        finally:
            self._under_way.discard(piece)
