"""A client of trackers for programs without asyncio: each call of `Tracker`, finished before it
returns."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Self

from p2pdist.client.tracker import WAIT_S, Tracker
from p2pdist.model.fleet import (
    Assignment,
    Eviction,
    EvictRequest,
    HostDetail,
    HostStatus,
    Me,
    Ranked,
    StoryEvent,
    SwarmDetail,
    SwarmStatus,
)
from p2pdist.model.preseed import PreseedRequest, PreseedSummary, Progress, RankRequest


class SyncTracker:
    """A `Tracker` on an event loop of its own; a context manager, for one thread. Within a running
    event loop `Tracker` is to be used."""

    def __init__(self, urls: str | Sequence[str], *, token: str = "") -> None:
        self._tracker = Tracker(urls, token=token)
        self._runner = asyncio.Runner()

    def __enter__(self) -> Self:
        self._runner.run(self._tracker.__aenter__())
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self._runner.run(self._tracker.__aexit__(kind, error, trace))
        finally:
            self._runner.close()

    def preseed(self, order: PreseedRequest) -> Progress:
        """Order a preseed; the same order under the same id again changes nothing."""
        return self._runner.run(self._tracker.preseed(order))

    def progress(self, identifier: str, *, wait_s: float = 0.0, quorum: float = 1.0) -> Progress:
        """How far a preseed is, as `Tracker.progress`."""
        return self._runner.run(self._tracker.progress(identifier, wait_s=wait_s, quorum=quorum))

    def wait(
        self,
        identifier: str,
        *,
        quorum: float = 1.0,
        pause_s: float = WAIT_S,
        told: Callable[[Progress], None] | None = None,
        timeout_s: float | None = None,
    ) -> Progress:
        """Wait as `Tracker.wait`. Raises TimeoutError after `timeout_s`."""

        async def bounded() -> Progress:
            async with asyncio.timeout(timeout_s):
                return await self._tracker.wait(identifier, quorum=quorum, pause_s=pause_s, told=told)

        return self._runner.run(bounded())

    def preseeds(self) -> list[PreseedSummary]:
        """All preseeds that this identity sees, the newest last."""
        return self._runner.run(self._tracker.preseeds())

    def cancel(self, identifier: str) -> Progress:
        """Have the hosts of a preseed released."""
        return self._runner.run(self._tracker.cancel(identifier))

    def rank(self, request: RankRequest) -> list[Ranked]:
        """Hosts, those first that lack the fewest bytes of the request's packages."""
        return self._runner.run(self._tracker.rank(request))

    def assign(self, request: RankRequest) -> Assignment:
        """Which hosts the roles of a job get."""
        return self._runner.run(self._tracker.assign(request))

    def hosts(self) -> list[HostStatus]:
        """The hosts that are connected, and those that were lost in the last hour."""
        return self._runner.run(self._tracker.hosts())

    def host(self, name: str) -> HostDetail:
        """One host."""
        return self._runner.run(self._tracker.host(name))

    def drain(self, name: str) -> None:
        """Have a host serve no other host, until `fill`, or a new start of a tracker that has no
        `--state`."""
        self._runner.run(self._tracker.drain(name))

    def fill(self, name: str) -> None:
        """Have a host that is drained serve other hosts again."""
        self._runner.run(self._tracker.fill(name))

    def evict(self, request: EvictRequest) -> Eviction:
        """Remove a package from the stores of hosts; what came of it at each host."""
        return self._runner.run(self._tracker.evict(request))

    def me(self) -> Me:
        """What this client may do."""
        return self._runner.run(self._tracker.me())

    def swarms(self) -> list[SwarmStatus]:
        """The swarms of blobs that this identity may read."""
        return self._runner.run(self._tracker.swarms())

    def swarm(self, digest: str) -> SwarmDetail:
        """One swarm with its members."""
        return self._runner.run(self._tracker.swarm(digest))

    def story(self, digest: str) -> list[StoryEvent]:
        """What happened in a swarm, the newest last."""
        return self._runner.run(self._tracker.story(digest))
