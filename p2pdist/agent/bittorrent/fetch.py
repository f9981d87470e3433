"""One blob's pull as a member of a BitTorrent swarm: its torrent, its peers, the transfer while
there is one, and the pieces that this host brings from the origin into the swarm.

Theory. A pull that may come to need a swarm looks for the torrent document while a tracker answers.
When core/pull.py commands BeginSwarm a TorrentTransfer fetches what the blob lacks into the store's
own file. Peers are the hosts of the tracker's plans, discovered agents, and the peers that a
tracker's /announce names.

An OriginFeed brings what no peer has, where core/origin_seeding.py lets this host read it. It gives
pieces to libtorrent as if they had just come (`TorrentTransfer.give_piece`), and libtorrent tells
its peers of them. A web seed (BEP 19) would do the same with less control: libtorrent asks it for
any piece, and every such host would read the whole blob.

Invariants: between `begin` and its StreamClosed, which carries SWARM, the blob is libtorrent's to
write; one transfer at a time; no piece is given to the swarm that the piece list does not verify.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Protocol

from p2pdist.agent.bittorrent.service import SwarmService
from p2pdist.agent.tasks import Tasks
from p2pdist.core.origin_seeding import LOOK_S, OriginSeeding, Readers
from p2pdist.core.pull import SWARM
from p2pdist.core.transport import Transport
from p2pdist.model.errors import Corrupt, P2PDistError, Unavailable
from p2pdist.model.messages import Reason
from p2pdist.model.plan import Plan
from p2pdist.model.torrent import Torrent
from p2pdist.store.blobs.blob import Blob
from p2pdist.transfer.stream.events import StreamClosed, StreamEvent
from p2pdist.transfer.torrent.swarm import Address, Swarm
from p2pdist.transfer.torrent.transfer import TorrentTransfer

logger = logging.getLogger(__name__)

ANSWER_S = 2.0
"""How long libtorrent may take to say how many peers have each piece."""

LOOK_UP_S = (0.3, 2.0)
"""When a pull by trees asks for its torrent, which it may never need: thousands begin at once, and
many are over sooner."""

LOOK_UP_AGAIN_S = 2.0
ADDRESSES_MAX = 256


class Receiver(Protocol):
    """What an OriginFeed needs of a TorrentTransfer."""

    def give_piece(self, piece: int, data: bytes) -> None:
        """Take a piece as if a peer had sent it."""

    def count_copies(self, report: Callable[[list[int]], object]) -> None:
        """Call `report`, from any thread, with how many peers have each piece."""


@dataclass(frozen=True, slots=True)
class OriginAccess:
    """How a swarm's pull reads the origin."""

    readers: Callable[[], Readers]
    """Which hosts may read which pieces at the moment."""
    read: Callable[[int], Awaitable[bytes]]
    """Reads a piece once this host's children and the fleet's share allow it. Raises
    P2PDistError."""
    complain: Callable[[int, Reason, P2PDistError], None]
    """Tells the tracker that a stripe could not be read, and why."""


class OriginFeed:
    """Brings the pieces from the origin into the swarm that no peer has. `host` is this host's
    name. Lives on the event loop."""

    def __init__(self, blob: Blob, host: str, receiver: Receiver, origin: OriginAccess) -> None:
        self._blob, self._receiver, self._origin = blob, receiver, origin
        self._stripes = blob.layout.stripes
        self._core = OriginSeeding(blob.digest, host, blob.have, asyncio.get_running_loop().time())
        self._reading: set[asyncio.Task[None]] = set()
        self._task = asyncio.create_task(self._run(), name=f"origin-feed-{blob.digest}")

    def stop(self) -> None:
        """End; drop what is being read."""
        for task in (self._task, *self._reading):
            task.cancel()

    def held(self, piece: int) -> None:
        """Take in that a piece has been stored."""
        if self._core.held(piece):
            self._read_more()

    @property
    def given(self) -> set[int]:
        """All pieces that this host brought."""
        return self._core.given

    @property
    def stripes(self) -> set[int]:
        """The stripes that this host alone reads."""
        return set() if self._origin.readers().shared else {piece % self._stripes for piece in self._core.under_way}

    async def _run(self) -> None:
        loop = asyncio.get_running_loop()
        while not self._blob.have.complete:
            readers = self._origin.readers()
            if readers.any:
                self._core.look(readers, await self._availability(), now=loop.time())
                self._read_more()
            await asyncio.sleep(LOOK_S)

    async def _availability(self) -> Sequence[int]:
        """How many peers have each piece; the last answer while libtorrent gives none within
        ANSWER_S, or the swarm has been left."""
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[list[int]] = loop.create_future()

        def answered(counts: list[int]) -> None:
            if not answer.done():
                answer.set_result(counts)

        self._receiver.count_copies(lambda counts: loop.call_soon_threadsafe(answered, counts))
        await asyncio.wait([answer], timeout=ANSWER_S)
        return answer.result() if answer.done() else self._core.seen

    def _read_more(self) -> None:
        now, readers = asyncio.get_running_loop().time(), self._origin.readers()
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
            data = await self._origin.read(piece)
            if piece in self._blob.have:
                return
            if not await asyncio.to_thread(self._blob.pieces.verify, piece, data):
                raise Corrupt(f"piece {piece} of {self._blob.digest} is wrong at the origin", remedy="Push it again")
            self._core.brought(piece, now=loop.time())
            self._receiver.give_piece(piece, data)
        except P2PDistError as error:
            self._core.failed(piece, now=loop.time())
            reason: Reason = "corrupt" if isinstance(error, Corrupt) else "unavailable"
            self._origin.complain(piece % self._stripes, reason, error)
        finally:
            self._core.dropped(piece)


class SwarmFetch:
    """Takes part in the swarm of one blob for its pull. `post` hears the transfer's events. Lives
    on the event loop."""

    def __init__(
        self, blob: Blob, host: str, swarming: SwarmService, origin: OriginAccess, post: Callable[[StreamEvent], None]
    ) -> None:
        self._blob, self._host, self._swarming = blob, host, swarming
        self._origin, self._post = origin, post
        self._torrent: Torrent | None = None
        self._addresses: dict[str, None] = {}  # where the hosts of plans answer, the last ADDRESSES_MAX
        self._transfer: TorrentTransfer | None = None
        self._feed: OriginFeed | None = None
        self._from_origin: set[int] = set()  # pieces that earlier feeds brought
        self._peers: dict[Address, None] = {}  # all that transfers were given
        self._closing = False  # between close() and the next begin()
        self._tasks = Tasks(logger, f"the swarm of {self._blob.digest} fails")

    async def find(self, *, at_once: bool) -> bool:
        """Whether the blob has a torrent; waits until a tracker or the origin can say. `at_once`:
        the pull is to begin with the swarm."""
        if not at_once:
            await asyncio.sleep(random.uniform(*LOOK_UP_S))
        while True:
            try:
                self._torrent = await self._swarming.torrents.find(self._blob.digest, self._blob.layout)
                return self._torrent is not None
            except Unavailable:
                await asyncio.sleep(LOOK_UP_AGAIN_S * random.uniform(0.5, 1.0))
            except P2PDistError as error:
                logger.warning("%s comes by trees only: %s", self._blob.digest, error)
                return False

    async def peers_v1(self) -> bool:
        """Whether a tracker knows peers that have this blob by version 1 alone."""
        return self._torrent is not None and await self._swarming.torrents.count_peers(self._torrent.v1_only()) > 0

    def planned(self, plan: Plan) -> None:
        """Take the hosts that a plan names for peers."""
        sources = [*plan.keepers]
        for stripe in plan.stripes:
            sources += [stripe.parent, *stripe.alternates] if stripe.parent is not None else stripe.alternates
        new = {source.address: None for source in sources if source.address not in self._addresses and source.address}
        self._addresses.update(new)
        while len(self._addresses) > ADDRESSES_MAX:
            del self._addresses[next(iter(self._addresses))]
        if new and self._transfer is not None:
            self._tasks.spawn(self._meet(self._transfer, list(new)))

    def begin(self, transport: Transport) -> None:
        """Take part. StreamClosed follows in any case."""
        self._closing = False
        self._tasks.spawn(self._begin(transport))

    def close(self) -> None:
        """End soon: StreamClosed follows when libtorrent has let go of the file."""
        self._closing = True
        if self._feed is not None:
            self._feed.stop()
            self._from_origin |= self._feed.given
            self._feed = None
        if self._transfer is not None:
            self._transfer.close()

    def closed(self, closed: StreamClosed) -> None:
        """Take in that the transfer has let go of the file. A torrent of another blob is forgotten;
        that of a complete blob stays with libtorrent as a seed."""
        self.close()
        transfer, self._transfer = self._transfer, None
        peers = tuple(self._peers)[:ADDRESSES_MAX]
        self._swarming.left(self._blob, peers, transfer if closed.reason == "done" else None)
        if closed.reason in ("failed", "corrupt"):
            logger.warning("blob=%s no longer comes by BitTorrent: %s", self._blob.digest, closed.detail)
        if closed.reason == "corrupt":
            self._torrent = None
            self._swarming.torrents.forget(self._blob.digest)

    def held(self, piece: int) -> None:
        """Take in that a piece has been stored."""
        if self._feed is not None:
            self._feed.held(piece)

    def read_here(self, piece: int) -> bool:
        """Whether this host brought a piece from the origin into the swarm."""
        return piece in self._from_origin or (self._feed is not None and piece in self._feed.given)

    @property
    def reading(self) -> set[int]:
        """The stripes that are being read from the origin."""
        return self._feed.stripes if self._feed is not None else set()

    def stop(self) -> None:
        """Drop what is under way: the pull has ended, and no transfer runs."""
        self._tasks.cancel()

    async def _begin(self, transport: Transport) -> None:
        blob = self._blob
        try:
            session = await self._swarming.open()
            await asyncio.to_thread(self._swarming.release, blob.digest)
            peers = await self._swarming.peers(self._addresses)
            self._peers.update(dict.fromkeys(peers))
            swarm = Swarm(self._swarming.announces(blob.digest), peers)
            if self._closing or self._torrent is None:
                self._post(StreamClosed(SWARM, "closed"))
                return
            torrent = self._torrent.v1_only() if transport == "swarm-v1" else self._torrent
            transfer = TorrentTransfer(session, blob, torrent, swarm, self._post, number=SWARM, stay=True)
            transfer.start()
        except P2PDistError as error:
            self._post(StreamClosed(SWARM, "failed", error.what, error))
            return
        except Exception as error:
            logger.exception("%s cannot come by BitTorrent", blob.digest)
            self._post(StreamClosed(SWARM, "failed", repr(error), P2PDistError(f"BitTorrent failed: {error!r}")))
            return
        self._transfer = transfer
        self._feed = OriginFeed(blob, self._host, transfer, self._origin)

    async def _meet(self, transfer: TorrentTransfer, addresses: list[str]) -> None:
        with suppress(P2PDistError):  # no host has such an address
            peers = await self._swarming.peers(addresses)
            self._peers.update(dict.fromkeys(peers))
            transfer.add_peers(peers)
