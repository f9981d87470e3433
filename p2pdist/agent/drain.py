"""How an agent ends without harm to those who receive from it.

An agent that is asked to end tells its tracker (`Leaving`), which gives its children other parents
at once. A child changes its parent between two pieces, so no stream breaks and no piece comes
twice. Meanwhile the agent fetches nothing more, and serves what it has until nobody takes anything
from it, or until its time is up. Nobody is waited for where nobody receives.

While no tracker answers nobody can find other parents for those who receive what is not complete
here: their streams end at once, and they turn to their alternates.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable

from p2pdist.agent.uplink import Uplink
from p2pdist.model.messages import Drained

DRAIN_S = 5.0
"""Longer than it takes a tracker to plan anew and a child to finish its piece."""

logger = logging.getLogger(__name__)


class Drain:
    """See the module's text. `say` tells the tracker, if one answers; `stop_fetching` ends the
    agent's own pulls. All methods are called on the event loop."""

    def __init__(self, uplink: Uplink, say: Callable[[], None]) -> None:
        self._uplink, self._say = uplink, say
        self._asked, self._hurried = asyncio.Event(), asyncio.Event()
        self._limit_s = 0.0
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
        """The same, from somebody who does not wait: asking a second time ends it at once."""
        if self.draining:
            self._hurried.set()
        self.ask(limit_s)

    async def run(self, stop_fetching: Callable[[], Awaitable[None]]) -> Drained:
        """Wait until the agent is asked to end, then until it may; returns what it came to."""
        await self._asked.wait()
        started = time.monotonic()
        logger.info("leaving, with %d streams to hand over within %.1f s", self._uplink.open_count, self._limit_s)
        self._say()
        waits = asyncio.ensure_future(self._hand_over(stop_fetching))
        hurried = asyncio.ensure_future(self._hurried.wait())
        try:
            await asyncio.wait([waits, hurried], timeout=self._limit_s, return_when=asyncio.FIRST_COMPLETED)
        finally:
            waits.cancel()
            hurried.cancel()
        drained = Drained(self._uplink.open_count, round(time.monotonic() - started, 3))
        log = logger.warning if drained.streams else logger.info
        log("handed over after %.3f s; %d streams are left and end now", drained.seconds, drained.streams)
        if not self._outcome.done():
            self._outcome.set_result(drained)
        return drained

    async def over(self) -> Drained:
        """Wait until the agent may end, after it was asked to; that may have been before it had
        started."""
        return await asyncio.shield(self._outcome)

    @property
    def _outcome(self) -> asyncio.Future[Drained]:
        if self._over is None:
            self._over = asyncio.get_running_loop().create_future()
        return self._over

    async def _hand_over(self, stop_fetching: Callable[[], Awaitable[None]]) -> None:
        await stop_fetching()
        await self._uplink.idle()
