"""Keeps warm what policies say (tracker/core/policy/warm.py): asks at intervals what their tags
mean, and orders preseeds."""

from __future__ import annotations

import asyncio
import logging
import time

from p2pdist.model.digest import Digest
from p2pdist.model.errors import P2PDistError
from p2pdist.model.manifest import parse_reference
from p2pdist.model.preseed import ENDED
from tracker.content import Content
from tracker.core.policy.book import PolicyBook
from tracker.core.policy.warm import Changes, Warm, changes, rest_s, stem_of
from tracker.preseed_service import PreseedService

TICK_S = 0.5
RETRY_S = 5.0
"""After an order that could not be given."""

SAID_MAX = 1000
OWNER = "tracker"
"""Owns the preseeds that keep tags warm."""

logger = logging.getLogger(__name__)


class WarmTags:
    """Keeps the tags of policies warm, while `run` runs."""

    def __init__(self, book: PolicyBook, content: Content, preseeds: PreseedService) -> None:
        self._book, self._content, self._preseeds = book, content, preseeds
        self._meanings: dict[str, Digest] = {}
        self._due: dict[str, float] = {}
        self._said: dict[str, str] = {}
        self._rest_until = 0.0

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            try:
                await self._step()
            except Exception:
                logger.exception("tags are not kept warm")
            await asyncio.sleep(TICK_S)

    async def _step(self) -> None:
        warms = [policy.warm for policy in self._book.table.policies if policy.warm.tags]
        tags = {tag for warm in warms for tag in warm.tags}
        for gone in self._due.keys() - tags:
            del self._due[gone]
            self._meanings.pop(gone, None)
            self._said.pop(gone, None)
        for warm in warms:
            for tag in warm.tags:
                if time.monotonic() >= self._due.get(tag, 0.0):
                    self._due[tag] = time.monotonic() + warm.every_s
                    await self._ask(tag)
        if time.monotonic() >= self._rest_until:
            await self._order(warms)

    async def _ask(self, tag: str) -> None:
        """What a tag means now. When that cannot be said, what it meant."""
        try:
            self._meanings[tag] = (await self._content.resolve(parse_reference(tag))).digest
            self._said.pop(tag, None)
        except P2PDistError as error:
            self._complain(tag, error)

    async def _order(self, warms: list[Warm]) -> None:
        wanted = self._changes(warms)
        for tag in wanted.doubtful:
            await self._ask(tag)
        if wanted.doubtful:
            wanted = self._changes(warms)
        failed: set[str] = set()
        for request in wanted.order:
            try:
                await self._preseeds.create(request, owner=OWNER)
            except P2PDistError as error:
                self._rest_until = time.monotonic() + RETRY_S
                self._complain(request.package, error)
                failed.add(stem_of(str(request.id)))
                continue
            self._said.pop(request.package, None)
            logger.info("%s is kept warm by the preseed %s", request.package, request.id)
        for name in wanted.cancel:
            if stem_of(name) in failed:
                continue  # the order before stays until there is the new one
            try:
                await self._preseeds.cancel(name)
            except P2PDistError as error:
                self._rest_until = time.monotonic() + RETRY_S
                self._complain(name, error)
                continue
            logger.info("the preseed %s ends: another one, or none, keeps that warm", name)

    def _changes(self, warms: list[Warm]) -> Changes:
        records = [preseed.record for preseed in self._preseeds.core.by_id.values()]
        live = {record.id: record.state not in ENDED for record in records}
        now = self._preseeds.now()
        resting = {
            record.id
            for record in records
            if record.ended_at is not None and stem_of(record.id) and now - record.ended_at < rest_s(record.id)
        }
        return changes(warms, self._meanings, live, resting)

    def _complain(self, about: str, error: P2PDistError) -> None:
        """Once for each new reason."""
        if self._said.get(about) != error.what:
            if len(self._said) >= SAID_MAX:
                self._said.clear()
            self._said[about] = error.what
            logger.warning("%s is not kept warm: %s", about, error)
