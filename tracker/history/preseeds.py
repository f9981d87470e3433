"""Preseeds that fail, for the history of the fleet: each once."""

from __future__ import annotations

import asyncio
import logging

from tracker.core.history.history import History
from tracker.core.preseeds.selectors import no_match
from tracker.preseed_service import PreseedService

LOOK_S = 1.0

logger = logging.getLogger(__name__)


class FailedPreseeds:
    """Reports to a history which preseeds fail from now on."""

    def __init__(self, preseeds: PreseedService, history: History) -> None:
        self._preseeds, self._history = preseeds, history
        known = preseeds.core.by_id.items()
        self._reported = {identifier for identifier, preseed in known if preseed.record.state == "failed"}

    async def run(self) -> None:
        """Look every LOOK_S, until cancelled."""
        while True:
            await asyncio.sleep(LOOK_S)
            try:
                self.look()
            except Exception:
                logger.exception("it was not looked at which preseeds failed")

    def look(self) -> None:
        """Report the preseeds that have failed since the last look."""
        by_id = self._preseeds.core.by_id
        self._reported &= by_id.keys()
        failed = [
            identifier
            for identifier, preseed in by_id.items()
            if preseed.tally.state == "failed" and identifier not in self._reported
        ]
        for identifier in failed:
            self._reported.add(identifier)
            progress, selector = self._preseeds.progress(identifier), by_id[identifier].selector
            reasons = [
                (failure.host, ": ".join(filter(None, (failure.reason, failure.detail))))
                for failure in progress.failures
            ]
            self._history.preseed_failed(
                identifier,
                progress.package,
                progress.hosts_done,
                progress.hosts_total,
                reasons,
                max(0.0, self._preseeds.now() - progress.created_at),
                [no_match(selector, self._history.hosts.values())] if selector and not progress.hosts_total else (),
                ordered_at=progress.created_at,
            )
