"""The cluster of trackers, as one of them takes part in it: beats, and carries out what the core of
ownership decides (tracker/core/ownership/ownerships.py).

Two tasks share the work. One beats and looks at the database every BEAT_S, in a thread, so that a
database which hangs holds up nothing. The other gives the core the time, so that the core notices
when this process stood still. The number that a tracker beats with is the count of ticks of its
service: an event loop that hangs, or a service whose ticks fail, is dead to the others.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Mapping
from heapq import nlargest
from typing import Protocol

from p2pdist.model.digest import Digest
from p2pdist.model.errors import P2PDistError
from p2pdist.model.ownership import Ownership, Tracker, owner
from tracker.cluster.membership import Beat, Look, MembershipDatabase
from tracker.core.events import Event, Followed, LeasesAllowed
from tracker.core.fleet import Fleet
from tracker.core.ownership.ownerships import (
    AllowLeases,
    EpochHeard,
    Follow,
    LoadSeen,
    Ownerships,
    Publish,
    Tick,
)
from tracker.core.ownership.ownerships import Event as OwnershipEvent
from tracker.core.swarm import Swarm

BEAT_S = 0.5
TICK_S = 0.25
LOAD_S = 2.0
JOIN_S_MAX = 15.0
"""How long a tracker that starts waits for its place before it answers agents."""

LEAVE_S_MAX = 5.0
"""How long a tracker that ends waits for the database."""

HAND_OVER_S = 5.0
"""How long a tracker that ends waits for the others to take its blobs."""

TOLD_S = 0.5
"""Then it goes on for so long, so that its agents hear of it."""

SWARMS_NAMED = 16
"""The largest swarms, of which one may go to another tracker."""

logger = logging.getLogger(__name__)


class Planning(Protocol):
    """What the cluster needs of the tracker's service."""

    fleet: Fleet
    ticks: int
    """Ticks of the service's clock that went well."""

    @property
    def load(self) -> float:
        """The share of a processor that this process takes."""
        ...

    @property
    def lag_s(self) -> float:
        """How late the last tick came."""
        ...

    def submit(self, event: Event) -> None:
        """Hand an event to the fleet."""


class Cluster:
    """This tracker's part in the cluster. On the event loop."""

    def __init__(self, database: MembershipDatabase, service: Planning) -> None:
        self._database, self._service = database, service
        self.me = database.me
        self._core = Ownerships(database.me)
        self._replaced = False
        """Another process has taken this tracker's id."""
        self._before = 0
        """Beats before the service's clock ran."""
        self._load_at = 0.0
        self._problem = ""
        self._changed = asyncio.Event()
        """Set when another ownership counts."""
        self.look: Look | None = None
        """What the database had when it answered last."""
        self.looked_at = 0.0
        """When that was, by the monotonic clock."""

    @property
    def ownership(self) -> Ownership | None:
        """The ownership that this tracker goes by."""
        return self._core.followed

    @property
    def problem(self) -> str:
        """Why the database does not answer, in words for people; "" while it does."""
        return self._problem

    def others(self) -> list[Tracker]:
        """The other trackers that own blobs."""
        return [each for each in self.ownership.trackers if each.id != self.me] if self.ownership is not None else []

    def owner(self, blob: Digest) -> Tracker | None:
        """The other tracker that owns a blob; None where it is this one."""
        tracker = owner(self.ownership, blob) if self.ownership is not None else None
        return tracker if tracker is not None and tracker.id != self.me else None

    async def start(self) -> None:
        """Register, and wait for a place among the trackers, at most JOIN_S_MAX. Raises
        Unavailable, and Conflict where the others have another authority."""
        self._service.submit(LeasesAllowed(False))
        await asyncio.to_thread(self._database.register)
        deadline = time.monotonic() + JOIN_S_MAX
        while self.ownership is None or self.ownership.tracker(self.me) is None:
            self._before += 1
            if not await self._beat(self._before):
                await asyncio.sleep(BEAT_S)
            if time.monotonic() >= deadline:
                logger.warning("this tracker, %s, owns no blobs yet: %s", self.me, self._problem or "others decide")
                break

    async def run(self) -> None:
        """Beat, and look at the others, until cancelled."""
        ticking = asyncio.create_task(self._tick())
        try:
            while True:
                again = await self._beat(self._before + self._service.ticks)
                if self._replaced:
                    return
                await asyncio.sleep(0.0 if again else BEAT_S)
        finally:
            ticking.cancel()
            await asyncio.gather(ticking, return_exceptions=True)

    async def hand_over(self) -> None:
        """Give this tracker's blobs to the others before it ends, while `run` goes on. Returns when
        agents have heard of it, and after HAND_OVER_S at the latest."""
        if self._replaced or not any(tracker.share for tracker in self.others()):
            return
        try:
            async with asyncio.timeout(HAND_OVER_S):
                await self.drain(self.me, True)
                while _share(self.ownership, self.me):
                    self._changed.clear()
                    await self._changed.wait()
                await asyncio.sleep(TOLD_S)
        except (P2PDistError, TimeoutError) as error:
            logger.warning("the other trackers do not take over before %s ends: %s", self.me, error or "too late")

    async def stop(self) -> None:
        """Leave the cluster: the others take over this tracker's blobs."""
        try:
            async with asyncio.timeout(LEAVE_S_MAX):
                await asyncio.to_thread(self._database.leave)
        except (P2PDistError, TimeoutError) as error:
            logger.warning("the trackers' database does not hear that %s ends: %s", self.me, error)
        self._database.close()

    async def drain(self, tracker: str, draining: bool) -> None:
        """Have a tracker give its blobs to the others, or take its share again. Raises NotFound,
        Unavailable."""
        await asyncio.to_thread(self._database.drain, tracker, draining)

    def heard(self, epoch: int, by: str) -> None:
        """An agent has told of an ownership of this epoch."""
        alone = bool(by) and all(host.voter == by for host in self._service.fleet.hosts.values())
        self._handle(EpochHeard(epoch, by, alone=alone))

    async def _beat(self, progress: int) -> bool:
        """Beat once, and do what follows; returns whether another look is worth it at once."""
        fleet, service = self._service.fleet, self._service
        hosts = sum(not host.partial and host.session is not None for host in fleet.hosts.values())
        beat = Beat(progress, service.load, hosts, len(fleet.swarms), service.lag_s)
        try:
            look = await asyncio.to_thread(self._database.beat, beat)
            if look.replaced:
                await self._lost_row(look)
                return False
            self.look, self.looked_at = look, time.monotonic()
            if self._problem:
                logger.info("the trackers' database answers again")
            self._problem = ""
            published = False
            for proposal in self._handle(look.seen):
                published = await asyncio.to_thread(self._database.publish, proposal.ownership, proposal.expected)
            return published
        except P2PDistError as error:
            if str(error) != self._problem:
                logger.warning("%s; the trackers go on as they are", error)
            self._problem = str(error)
        except Exception as error:
            logger.exception("a beat failed")
            self._problem = f"unexpected {type(error).__name__}"
        return False

    async def _lost_row(self, look: Look) -> None:
        """Another process has this tracker's id, or its row was removed while it was away."""
        if all(row.registered.id != self.me for row in look.rows):
            await asyncio.to_thread(self._database.register)
            return
        self._replaced = True
        self._service.submit(LeasesAllowed(False))
        logger.error(
            "another process runs as tracker %s, and this one grants no more reads of storage. "
            "Give each tracker an --advertise of its own",
            self.me,
        )

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(TICK_S)
            now = time.monotonic()
            try:
                self._handle(Tick())
                if now - self._load_at >= LOAD_S:
                    self._load_at = now
                    self._handle(self._load(self._service.fleet.swarms))
            except Exception:
                logger.exception("a tick of the cluster failed")

    def _load(self, swarms: Mapping[Digest, Swarm]) -> LoadSeen:
        largest = nlargest(SWARMS_NAMED, swarms.values(), key=lambda swarm: len(swarm.members))
        named = tuple((swarm.blob, len(swarm.members)) for swarm in largest)
        return LoadSeen(self._service.load, named, sum(len(swarm.members) for swarm in swarms.values()))

    def _handle(self, event: OwnershipEvent) -> list[Publish]:
        """Hand an event to the core and carry out what it decides; returns what is to be
        published."""
        proposals: list[Publish] = []
        for command in self._core.handle(event, now=time.monotonic()):
            match command:
                case Publish():
                    proposals.append(command)
                case Follow(ownership):
                    names = ", ".join(f"{each.id} {each.share:.0%}" for each in ownership.trackers)
                    logger.info("epoch %d of the trackers: %s", ownership.epoch, names)
                    self._service.submit(Followed(ownership, self.me))
                    self._changed.set()
                case AllowLeases(allowed):
                    self._service.submit(LeasesAllowed(allowed and not self._replaced))
        return proposals


def _share(ownership: Ownership | None, tracker: str) -> float:
    listed = ownership.tracker(tracker) if ownership is not None else None
    return listed.share if listed is not None else 0.0
