"""Central storage as an agent reaches it: by its own setting, else where its tracker says."""

from __future__ import annotations

import asyncio
import logging
from importlib import import_module

from p2pdist.agent.tracker_session import TrackerSession
from p2pdist.model.errors import P2PDistError, Unavailable
from p2pdist.origin.origin import Origin, open_origin

ORIGINS_MAX = 16
"""Origins that trackers may name in the life of an agent."""

_logger = logging.getLogger(__name__)


class Origins:
    """`own` is the agent's own origin, if it was given one. On the event loop."""

    def __init__(self, own: Origin | None, session: TrackerSession) -> None:
        self._own, self._session = own, session
        self._named: dict[str, Origin] = {}
        self._preparing: asyncio.Task[None] | None = None

    def get(self) -> Origin:
        """The one to read now. Raises Unavailable."""
        if self._own is not None:
            return self._own
        url = self._session.origin
        if not url:
            raise Unavailable(
                "neither this agent nor its tracker was given an origin", remedy="Start one with --origin"
            )
        if url not in self._named:
            if len(self._named) >= ORIGINS_MAX:
                raise Unavailable(
                    f"trackers have named {ORIGINS_MAX} origins by now",
                    remedy="Restart this agent, or give it --origin",
                )
            self._named[url] = open_origin(url, serving=True)
        return self._named[url]

    def prepare(self) -> None:
        """A tracker answers, and may have named an origin."""
        if self._own is None and self._session.origin:
            self._preparing = asyncio.create_task(self._prepare(), name="prepare-origin")

    async def _prepare(self) -> None:
        """Load the driver of central storage now: the holder of a lease keeps everybody below it
        waiting."""
        try:
            await asyncio.to_thread(import_module, "p2pdist.origin.bucket")
            self.get()
        except P2PDistError as error:
            _logger.warning("the origin that the tracker names cannot be used: %s", error)

    async def close(self) -> None:
        for origin in (*self._named.values(), *([self._own] if self._own is not None else [])):
            await origin.close()
