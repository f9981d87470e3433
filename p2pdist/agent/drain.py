"""The drain of an agent: it ends without harm to the hosts that receive from it.

An agent that is asked to end tells its tracker (`Leaving`), which gives its children other parents
at once. A child changes its parent between two pieces, so no stream breaks and no piece comes
twice. Meanwhile the agent fetches nothing more, and serves what it has until all its streams have
ended or its time is up. An agent that serves no stream ends at once.

While no tracker answers, the children of an incomplete blob cannot get other parents: their streams
end at once, and they connect to their alternates.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable

from p2pdist.agent.uplink import Uplink
from p2pdist.model.messages import Drained

DRAIN_S = 5.0
"""Seconds: longer than it takes a tracker to plan anew and a child to finish its piece."""

logger = logging.getLogger(__name__)


class Drain:
    """Waits for the request to end, then for the streams of `uplink`. `announce` sends `Leaving` to
    the tracker, if one answers. All methods are called on the event loop."""

    def __init__(self, uplink: Uplink, announce: Callable[[], None]) -> None:
        self._uplink, self._announce = uplink, announce
        self._asked = asyncio.Event()
        """Set by the first request to end."""
        self._insisted = asyncio.Event()
        """Set by the second request, which ends the drain at once."""
        self._limit_s = 0.0
        """How long the drain may take."""
        self._over: asyncio.Future[Drained] | None = None

    @property
    def draining(self) -> bool:
        """Whether the agent has been asked to end."""
        return self._asked.is_set()

    def ask(self, limit_s: float) -> None:
        """Ask the agent to end, within `limit_s` of now; nothing changes when it was asked
        before."""
        if not self.draining:
            self._limit_s = limit_s
            self._asked.set()

    def insist(self, limit_s: float) -> None:
        """Ask the agent to end as a signal does: the second request ends it at once."""
        if self.draining:
            self._insisted.set()
        self.ask(limit_s)

    async def run(self, stop_fetching: Callable[[], Awaitable[None]]) -> Drained:
        """Wait until the agent is asked to end, then until it may; returns the outcome.
        `stop_fetching` ends the agent's own pulls."""
        await self._asked.wait()
        started = time.monotonic()
        logger.info("leaving, with %d streams to hand over within %.1f s", self._uplink.open_count, self._limit_s)
        self._announce()
        waits = asyncio.ensure_future(self._hand_over(stop_fetching))
        insisted = asyncio.ensure_future(self._insisted.wait())
        try:
            await asyncio.wait([waits, insisted], timeout=self._limit_s, return_when=asyncio.FIRST_COMPLETED)
        finally:
            waits.cancel()
            insisted.cancel()
        drained = Drained(self._uplink.open_count, round(time.monotonic() - started, 3))
        log = logger.warning if drained.streams else logger.info
        log("handed over after %.3f s; %d streams are left and end now", drained.seconds, drained.streams)
        if not self._outcome.done():
            self._outcome.set_result(drained)
        return drained

    async def over(self) -> Drained:
        """The outcome of `run`, once there is one; the request may come before `run` begins."""
        return await asyncio.shield(self._outcome)

    @property
    def _outcome(self) -> asyncio.Future[Drained]:
        if self._over is None:
            self._over = asyncio.get_running_loop().create_future()
        return self._over

    async def _hand_over(self, stop_fetching: Callable[[], Awaitable[None]]) -> None:
        await stop_fetching()
        await self._uplink.idle()
