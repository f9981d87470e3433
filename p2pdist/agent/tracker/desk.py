"""What operators see of this host and have it do, through its tracker: its condition, and packages
that are to leave its store.

The condition is looked up in a thread, as a disk may hang; while it does, the tracker keeps what it
was told last.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from contextlib import suppress

from p2pdist.agent.tracker.session import TrackerSession
from p2pdist.model.errors import P2PDistError, Unavailable, printable
from p2pdist.model.messages import REASON_CHARACTERS_MAX, Condition, Evict, Evicted

logger = logging.getLogger(__name__)

LOOK_S = 15.0
"""Between two looks at the condition."""

NOISE_BYTES = 64 << 20
"""Free bytes of the disk are rounded to this: what else uses the disk is no news each time."""

EVICTIONS_MAX = 100
"""Evictions that wait; they are carried out one after the other."""


class Desk:
    """Tells the tracker of a session how this host does, and evicts what it is asked to. `look`
    says the condition and may block; `evict` removes a package, by its manifest's digest where that
    is not empty, else by its name and what that means to the tracker, and says how many bytes
    became free."""

    def __init__(
        self, session: TrackerSession, look: Callable[[], Condition], evict: Callable[[str, str, str], Awaitable[int]]
    ) -> None:
        self._session, self._look, self._evict = session, look, evict
        self._told: Condition | None = None
        """What the tracker that answers was told last."""
        self._due = asyncio.Event()
        self._evictions: dict[str, asyncio.Task[None]] = {}
        self._one = asyncio.Lock()

    def connected(self) -> None:
        """A tracker begins to answer: tell it everything."""
        self._told = None
        self._due.set()

    def receive(self, message: Evict) -> None:
        """Carry out a request of the tracker, and answer it."""
        if message.id in self._evictions:
            return
        if len(self._evictions) >= EVICTIONS_MAX:
            error = Unavailable(f"this host has {EVICTIONS_MAX} packages to evict already")
            self._session.send(Evicted(message.id, 0, error.slug, error.what))
            return
        task = self._evictions[message.id] = asyncio.create_task(self._carry_out(message), name="eviction")
        task.add_done_callback(lambda _: self._evictions.pop(message.id, None))

    async def run(self) -> None:
        """Tell the condition when it has changed, until cancelled."""
        try:
            while True:
                self._due.clear()
                if self._session.connected and self._session.takes_conditions:
                    await self._tell()
                with suppress(TimeoutError):
                    async with asyncio.timeout(LOOK_S):
                        await self._due.wait()
        finally:
            for task in self._evictions.values():
                task.cancel()

    async def _tell(self) -> None:
        try:
            condition = await asyncio.to_thread(self._look)
        except (P2PDistError, OSError) as error:
            logger.warning("the condition of this host cannot be told: %s", error)
            return
        if not self._due.is_set() and condition != self._told:  # else another tracker answers by now
            self._told = condition
            self._session.send(condition)

    async def _carry_out(self, message: Evict) -> None:
        try:
            async with self._one:
                freed = await self._evict(message.package, message.digest, message.meaning)
            answer = Evicted(message.id, freed)
            logger.info("evicted %s for an operator, %d bytes are free", message.package, freed)
        except P2PDistError as error:
            answer = Evicted(message.id, 0, error.slug, printable(error.what)[:REASON_CHARACTERS_MAX])
        except OSError as error:
            answer = Evicted(message.id, 0, "io", printable(str(error))[:REASON_CHARACTERS_MAX])
        self._session.send(answer)
        self._due.set()
