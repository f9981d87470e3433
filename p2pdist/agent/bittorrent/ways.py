"""Changes the way that one blob's pull goes, from trees to a swarm and back, as core/transport.py
and core/transport.py decide.

One way writes into the blob at a time: a transfer has ended when its StreamClosed comes, and
`writers` counts all who write, those of an earlier pull included. While a swarm brings the pieces
the download core is paused: it counts them, and knows the tracker's plan.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable
from typing import Protocol

from p2pdist.agent.bittorrent.fetch import SwarmFetch
from p2pdist.agent.bittorrent.service import Swarming
from p2pdist.agent.tasks import Tasks
from p2pdist.core.origin_seeding import Readers
from p2pdist.core.transport import Begin, CutShort, Handover, Leave, TransportChoice
from p2pdist.model.digest import Digest
from p2pdist.model.errors import P2PDistError
from p2pdist.model.messages import Priority, Reason
from p2pdist.model.plan import Plan
from p2pdist.store.blobs.blob import Blob
from p2pdist.transfer.stream.events import StreamClosed, StreamEvent

PEERS_V1_S = 2.0
"""A swarm that gives nothing for so long is a reason to ask whether there are peers of version
1."""

_logger = logging.getLogger(__name__)


class Pull(Protocol):
    """What is needed of a blob's pull."""

    blob: Blob
    priority: Priority

    def pause(self, paused: bool) -> None:
        """End the streams after the pieces under way, and open no more; or go on."""

    def close_streams(self) -> None:
        """End them now."""

    def fed(self) -> bool:
        """Whether every stripe that lacks something has a source."""

    def readers(self) -> Readers:
        """See Download in core/download.py."""

    async def read_origin(self, piece: int) -> bytes:
        """A piece, once this host may read it."""

    def complain_of_origin(self, stripe: int, reason: Reason, error: P2PDistError) -> None: ...


class Ways:
    """See the module's text; without `swarming` all goes by trees. `post` hears a transfer's
    events. Lives on the event loop."""

    def __init__(
        self,
        pull: Pull,
        host: str,
        swarming: Swarming | None,
        writers: Counter[Digest],
        post: Callable[[StreamEvent], None],
    ) -> None:
        self._pull, self._blob, self._writers = pull, pull.blob, writers
        self._loop = asyncio.get_running_loop()
        now = self._loop.time()
        policy = swarming.policy_of(pull.blob.digest) if swarming is not None else "trees"
        swarming = swarming if policy != "trees" else None
        self._choice = TransportChoice(policy, host, self._blob.digest, now)
        self._fetch = SwarmFetch(pull, host, swarming, post) if swarming is not None else None
        self._handover = Handover()
        self._told = False
        self._over = False
        self._tasks = Tasks(_logger, f"{self._blob.digest} finds no swarm")

    @property
    def reading(self) -> set[int]:
        """The stripes that are being read from the origin for a swarm."""
        return self._fetch.reading if self._fetch is not None else set()

    @property
    def changed(self) -> bool:
        """Whether the tracker was told that the blob comes by a swarm and it does not, or the
        reverse."""
        return self._by_swarm != self._told

    def tell(self) -> bool:
        """What the tracker is told now: whether the blob comes by a swarm, or is to."""
        self._told = self._by_swarm
        return self._told

    @property
    def _by_swarm(self) -> bool:
        waits = self._choice.way is None and self._choice.policy == "swarm" and self._choice.torrent is not False
        return waits or self._handover.target in ("swarm", "swarm-v1")

    def read_here(self, piece: int) -> bool:
        """Whether this host brought a piece from the origin into the swarm."""
        return self._fetch is not None and self._fetch.read_here(piece)

    def begin_write(self) -> None:
        """One writer of the blob more."""
        self._writers[self._blob.digest] += 1

    def end_write(self) -> None:
        """One writer of the blob less."""
        self._writers[self._blob.digest] -= 1
        if not self._writers[self._blob.digest]:
            del self._writers[self._blob.digest]

    def start(self) -> None:
        """Begin with the first way."""
        if self._fetch is not None and not self._blob.have.complete:
            self._tasks.spawn(self._find_torrent(self._fetch))
            self.steer()

    def steer(self) -> None:
        """Leave the present way when it is time for another, and begin that once nothing else
        writes into the blob."""
        if self._over or self._fetch is None:
            return
        steps = self._handover.steer(
            self._choice,
            writers=self._writers[self._blob.digest],
            fed=self._pull.fed(),
            waited_for=self._pull.priority == "start",
            now=asyncio.get_running_loop().time(),
        )
        for step in steps:
            match step:
                case Leave(way, target):
                    _logger.info("blob=%s comes by %s from now on, by %s before", self._blob.digest, target, way)
                    if way == "trees":
                        self._pull.pause(True)
                    else:
                        self._fetch.close()
                case CutShort():
                    self._pull.close_streams()
                case Begin("trees"):
                    self._pull.pause(False)
                case Begin(way):
                    self.begin_write()
                    self._fetch.begin(way)

    def planned(self, plan: Plan) -> None:
        """A tracker, or this host itself, has planned."""
        if self._fetch is not None:
            self._fetch.planned(plan)
            self._choice.planned()

    def tracker_changed(self, present: bool) -> None:
        """Whether a tracker answers from now on."""
        self._choice.tracker_changed(present, now=asyncio.get_running_loop().time())

    def progressed(self, piece: int) -> None:
        """A piece has been stored."""
        if self._fetch is not None:
            self._fetch.held(piece)
        self._choice.progressed(now=self._loop.time())

    def swarm_closed(self, closed: StreamClosed) -> None:
        """The transfer has let go of the file."""
        assert self._fetch is not None
        self._fetch.closed(done=closed.reason == "done")
        if closed.reason in ("failed", "corrupt"):
            _logger.warning("blob=%s no longer comes by BitTorrent: %s", self._blob.digest, closed.detail)
            self._choice.torrent = False
            if closed.reason == "corrupt":
                self._fetch.lying()

    def end(self) -> bool:
        """The pull has ended. Whether nothing is left to wait for; else the transfer's StreamClosed
        comes yet."""
        self._over = True
        self._tasks.cancel()
        if self._fetch is not None and self._fetch.running:
            self._fetch.close()
            return False
        if self._fetch is not None:
            self._fetch.stop()
        return True

    async def _find_torrent(self, fetch: SwarmFetch) -> None:
        """Learn whether the blob has a torrent; later, while a swarm of it gives nothing, whether
        it has peers of version 1."""
        choice, loop = self._choice, asyncio.get_running_loop()
        choice.torrent = await fetch.find(at_once=choice.policy == "swarm")
        if not choice.torrent:
            _logger.info("blob=%s has no torrent: it comes by trees", self._blob.digest)
        self.steer()
        while choice.torrent:
            await asyncio.sleep(PEERS_V1_S)
            if self._handover.way == "swarm" and choice.still_s(now=loop.time()) > PEERS_V1_S:
                choice.peers_v1 = await fetch.peers_v1()
