"""Follows what the other trackers tell of their hosts and swarms, while the fleet is watched here.

Each other tracker is asked once for everything, and then tells what changes, every second: that is
taken into the joined view (tracker/core/views/joined_view.py). The tree of a blob that another
tracker owns is followed at its owner. While no one watches, nothing is asked and nothing is kept.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable

import aiohttp

from p2pdist.model.digest import Digest
from p2pdist.model.errors import UNDECODABLE, P2PDistError
from p2pdist.model.ownership import Tracker
from tracker.cluster.siblings import Siblings
from tracker.core.views.fleet_view import Change
from tracker.core.views.joined_view import JoinedView, RelayedTree

LOOK_S = 1.0
"""How often it is looked which trackers there are, and asked again one that did not answer."""

WHY_CHARACTERS_MAX = 200

logger = logging.getLogger(__name__)


class SiblingViews:
    """Tells a joined view what the other trackers tell. On the event loop."""

    def __init__(self, siblings: Siblings, view: JoinedView) -> None:
        self._siblings, self._view = siblings, view
        self._following: dict[str, asyncio.Task[None]] = {}

    async def run(self) -> None:
        """Follow all other trackers until cancelled."""
        try:
            while True:
                others = {tracker.id: tracker for tracker in self._siblings.cluster.others()}
                for name in [name for name in self._following if name not in others]:
                    self._following.pop(name).cancel()
                self._view.keep(others)
                for name, tracker in others.items():
                    if name not in self._following:
                        self._view.lose(name, "it has not answered yet")
                        self._following[name] = asyncio.create_task(self._follow(tracker))
                await asyncio.sleep(LOOK_S)
        finally:
            tasks = list(self._following.values())
            self._following.clear()
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            self._view.keep(())

    async def _follow(self, tracker: Tracker) -> None:
        def take(change: Change) -> None:
            self._view.take(tracker.id, change, now=time.monotonic())

        while True:
            why = await self._listen(tracker, None, take)
            self._view.lose(tracker.id, why)
            await asyncio.sleep(LOOK_S)

    async def follow_tree(self, blob: Digest, stripe: int, tree: RelayedTree) -> None:
        """Follow a tree at the tracker that owns the blob, whichever that is, until cancelled."""
        while True:
            owner = self._siblings.owner(blob)
            if owner is not None:
                tree.begin(owner.id)
                await self._listen(owner, (blob, stripe), tree.take)
            tree.end()
            await asyncio.sleep(LOOK_S)

    async def _listen(self, tracker: Tracker, tree: tuple[Digest, int] | None, take: Callable[[Change], None]) -> str:
        """Hand on what a tracker tells, until it tells nothing more; return why."""
        try:
            async for change in self._siblings.changes(tracker, tree):
                take(change)
            why = "it tells nothing more"
        except (aiohttp.ClientError, TimeoutError, OSError, P2PDistError, *UNDECODABLE) as error:
            why = str(error) or type(error).__name__
        except Exception:
            logger.exception("what tracker %s tells could not be taken in", tracker.id)
            why = "what it tells could not be taken in"
        logger.debug("tracker %s does not tell of its hosts: %s", tracker.id, why)
        return why[:WHY_CHARACTERS_MAX]
