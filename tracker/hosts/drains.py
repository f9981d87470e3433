"""Drains of hosts: what an operator orders holds at once, after a new start of the tracker, and at
all trackers that share a database.

An order goes to the fleet first and into the database next; where that does not answer, it is
written later. A tracker that shares its database looks there every LOOK_S, and drains and fills
what other trackers were told; its own orders that are not written yet hold against what it
reads.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping

from p2pdist.model.errors import P2PDistError
from tracker.core.repair.reputation import DRAINED_MAX
from tracker.state.drains import DrainRecords

LOOK_S = 5.0
"""How often the database is read, where others write there, and how often what it lacks is written
again."""

STOP_S_MAX = 5.0
"""How long a tracker that ends waits for the database."""

logger = logging.getLogger(__name__)


class Drains:
    """Has hosts drained. `apply` tells the fleet that a host is drained, or no more; `drained` are
    the hosts that the fleet has drained. All methods are called on the event loop."""

    def __init__(
        self, records: DrainRecords, apply: Callable[[str, bool], None], drained: Mapping[str, object]
    ) -> None:
        self._records, self._apply, self._drained = records, apply, drained
        self._unwritten: dict[str, bool] = {}
        """Orders that the database does not have yet, by host."""
        self._writes = asyncio.Lock()

    async def load(self) -> None:
        """Drain what was drained before the tracker started. Raises Unavailable."""
        self._follow(await asyncio.to_thread(self._records.names, DRAINED_MAX))

    async def order(self, host: str, drained: bool) -> bool:
        """Drain a host, or end that. Returns whether all trackers that share the database will know
        of it by themselves."""
        self._apply(host, drained)
        self._unwritten[host] = drained
        return await self._write() and self._records.shared

    async def run(self) -> None:
        """Write what is not written, and follow the other trackers, until cancelled."""
        while True:
            await asyncio.sleep(LOOK_S)
            if self._unwritten and not await self._write():
                continue
            if self._records.shared:
                await self._look()

    async def close(self) -> None:
        """Write what is not written, once, and disconnect; gives up after STOP_S_MAX."""
        try:
            async with asyncio.timeout(STOP_S_MAX):
                if self._unwritten:
                    await self._write()
                await asyncio.to_thread(self._records.close)
        except TimeoutError:
            logger.warning("which hosts are drained (%s) is not written down", ", ".join(self._unwritten)[:300])

    async def _write(self) -> bool:
        async with self._writes:
            orders = dict(self._unwritten)
            try:
                await asyncio.to_thread(self._records.write, orders.items())
            except P2PDistError as error:
                logger.warning(
                    "which hosts are drained (%s) is not written down yet: %s", ", ".join(orders)[:300], error
                )
                return False
            for host, drained in orders.items():
                if self._unwritten.get(host) == drained:
                    del self._unwritten[host]
            return True

    async def _look(self) -> None:
        async with self._writes:  # an order that comes meanwhile is in `_unwritten`
            try:
                names = await asyncio.to_thread(self._records.names, DRAINED_MAX)
            except P2PDistError as error:
                logger.debug("which hosts are drained cannot be read: %s", error)
                return
            self._follow(names)

    def _follow(self, names: set[str]) -> None:
        for host in names ^ self._drained.keys():
            if host not in self._unwritten:
                self._apply(host, host in names)
