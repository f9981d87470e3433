"""Changes the way that one blob's pull goes, from trees to a swarm and back, as core/transport.py decides.

One way writes into the blob at a time: streams end after the pieces under way, or after LEAVE_S, and a transfer has ended when its
StreamClosed comes. Only when no writer of the blob is left, those of an earlier pull included (`writers` counts them), the other way
begins, with what is held by then. While a swarm brings the pieces the download core is paused: it counts them, and knows the tracker's
plan.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Coroutine
from typing import Any, Protocol

from p2pdist.agent.swarm_fetch import SwarmFetch
from p2pdist.agent.swarming import Swarming
from p2pdist.core.transport import TransportChoice, Way
from p2pdist.model.digest import Digest
from p2pdist.model.errors import P2PDistError
from p2pdist.model.messages import Priority, Reason
from p2pdist.model.plan import Plan
from p2pdist.store.blob import Blob
from p2pdist.transfer.client import StreamClosed, StreamEvent

LEAVE_S = 1.0
"""How long streams may take to finish the pieces under way when the way changes."""

PEERS_V1_S = 2.0
"""A swarm that gives nothing for so long is a reason to ask whether there are peers of version 1."""

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

    def origin_ranks(self) -> dict[int, int]:
        """See Download in core/download.py."""

    async def read_origin(self, piece: int) -> bytes:
        """A piece, once this host may read it."""

    def complain_of_origin(self, stripe: int, reason: Reason, error: P2PDistError) -> None: ...


class Ways:
    """See the module's text; without `swarming` all goes by trees. `post` hears a transfer's events. Lives on the event loop."""

    def __init__(
        self,
        pull: Pull,
        host: str,
        swarming: Swarming | None,
        writers: Counter[Digest],
        post: Callable[[StreamEvent], None],
    ) -> None:
        self._pull, self._blob, self._writers = pull, pull.blob, writers
        now = asyncio.get_running_loop().time()
        policy = swarming.policy if swarming is not None else "trees"
        self._choice = TransportChoice(policy, host, self._blob.digest, now)
        self._fetch = SwarmFetch(pull, host, swarming, post) if swarming is not None else None
        self._way: Way | None = "trees"
        self._target: Way | None = "trees"
        self._leave_by = 0.0
        self._over = False
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def reading(self) -> set[int]:
        """The stripes that are being read from the origin for a swarm."""
        return self._fetch.reading if self._fetch is not None else set()

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
            self._spawn(self._find_torrent(self._fetch))
            self.steer()

    def steer(self) -> None:
        """Leave the present way when it is time for another, and begin that once nothing else writes into the blob."""
        if self._over or self._fetch is None:
            return
        now = asyncio.get_running_loop().time()
        if self._way == self._target:
            waited_for = self._pull.priority == "start"
            target = self._choice.choose(fed=self._pull.fed(), waited_for=waited_for, now=now)
            if target == self._way:
                return
            _logger.info("blob=%s comes by %s from now on, by %s before", self._blob.digest, target, self._way)
            left, self._way, self._target, self._leave_by = self._way, None, target, now + LEAVE_S
            if left == "trees":
                self._pull.pause(True)
            elif left is not None:
                self._fetch.close()
        if self._writers[self._blob.digest]:
            if now >= self._leave_by:
                self._pull.close_streams()
            return
        self._way = self._target
        if self._way == "trees":
            self._pull.pause(False)
        elif self._way is not None:
            self.begin_write()
            self._fetch.begin(self._way)

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
        self._choice.progressed(now=asyncio.get_running_loop().time())

    def swarm_closed(self, closed: StreamClosed) -> None:
        """The transfer has let go of the file."""
        assert self._fetch is not None
        self._fetch.closed()
        if closed.reason in ("failed", "corrupt"):
            _logger.warning("blob=%s no longer comes by BitTorrent: %s", self._blob.digest, closed.detail)
            self._choice.torrent = False
            if closed.reason == "corrupt":
                self._fetch.lying()

    def end(self) -> bool:
        """The pull has ended. Whether nothing is left to wait for; else the transfer's StreamClosed comes yet."""
        self._over = True
        for task in self._tasks:
            task.cancel()
        if self._fetch is not None and self._fetch.running:
            self._fetch.close()
            return False
        if self._fetch is not None:
            self._fetch.stop()
        return True

    async def _find_torrent(self, fetch: SwarmFetch) -> None:
        """Learn whether the blob has a torrent; later, while a swarm of it gives nothing, whether it has peers of version 1."""
        choice, loop = self._choice, asyncio.get_running_loop()
        choice.torrent = await fetch.find(at_once=choice.policy == "swarm")
        if not choice.torrent:
            _logger.info("blob=%s has no torrent: it comes by trees", self._blob.digest)
        self.steer()
        while choice.torrent:
            await asyncio.sleep(PEERS_V1_S)
            if self._way == "swarm" and choice.still_s(now=loop.time()) > PEERS_V1_S:
                choice.peers_v1 = await fetch.peers_v1()

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            _logger.error("%s finds no swarm", self._blob.digest, exc_info=task.exception())
