"""The neighbours of an agent: it offers discovered trackers to its session, and while no tracker
answers it plans with the agents that it discovered.

A pull that begins without a tracker asks all neighbours at once whether they hold or fetch the
blob. Other agents may begin at the same moment and not know of each other yet, so the pull asks
again GATHER_S later, and the plan that is made then stays (core/trackerless.py). Two agents that
count on each other take the order that both know. An agent that has chosen its sources without this
host will not ask it for pieces, so it can be a source wherever it is in that order. In its first
SETTLE_S an agent may not have discovered all neighbours, and plans nothing.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import aiohttp
import msgspec

from p2pdist.agent.access.service import AgentAccess
from p2pdist.agent.discovery.links import DiscoverySettings
from p2pdist.agent.tasks import Tasks
from p2pdist.agent.tracker.session import TrackerSession
from p2pdist.core.trackerless import Announcement, Kind, plan_without_tracker
from p2pdist.model.access import TICKET_HEADER
from p2pdist.model.address import parse_address
from p2pdist.model.digest import Digest
from p2pdist.model.errors import UNDECODABLE
from p2pdist.model.messages import BlobHolding, Hello
from p2pdist.model.pieces import PieceLayout
from p2pdist.model.plan import Plan
from p2pdist.model.request_id import passed_on

if TYPE_CHECKING:
    from p2pdist.agent.discovery.mdns import Discovery

SETTLE_S = 1.5
GATHER_S = 0.4
ASK_S = 0.5
"""How long a neighbour may take to say whether it has a blob; one on the same link takes
milliseconds."""

LATE_S = 0.05
"""What came while this process was busy is read first, before a neighbour is called silent."""

ANSWER_BYTES_MAX = 1 << 12
ASKED_AT_ONCE = 64
IDLE_S = 2.0
"""How long a connection to a neighbour waits for the next question."""

logger = logging.getLogger(__name__)


class Neighbourhood:
    """Plans pulls with the agents on the same links. `own` is what this host announces. Raises
    UsageError as Discovery does."""

    def __init__(
        self,
        own: Announcement,
        settings: DiscoverySettings,
        session: TrackerSession,
        access: AgentAccess,
    ) -> None:
        from p2pdist.agent.discovery.mdns import Discovery  # takes a tenth of a second, which few agents need

        self._own, self._session, self._tls, self._access = own, session, access.tls, access
        browse: tuple[Kind, ...] = ("tracker", "agent") if settings.trackers else ("agent",)
        self.discovery = Discovery("agent", own, settings, browse=browse, on_change=self._changed)
        self._settled = asyncio.Event()
        """Set SETTLE_S after `start`."""
        self._counted: dict[Digest, frozenset[str]] = {}
        """For each pull that was planned here, the hosts among which it may choose sources."""
        self._plans = Tasks(logger, "a plan without a tracker failed")
        self._http: aiohttp.ClientSession | None = None
        self._turns = asyncio.Semaphore(ASKED_AT_ONCE)
        self._silent_at: dict[str, float] = {}
        """When a neighbour last did not answer in time, by its name, in the loop's time; of the
        neighbours that are announced now. `_ask`."""

    async def start(self) -> None:
        """Announce this host and look for neighbours."""
        await self.discovery.start()
        self._http = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=ASKED_AT_ONCE, keepalive_timeout=IDLE_S)
        )
        asyncio.get_running_loop().call_later(SETTLE_S, self._settled.set)

    async def stop(self) -> None:
        """End all planning, and withdraw this host's announcement."""
        await self._plans.stop()
        if self._http is not None:
            await self._http.close()
        await self.discovery.stop()

    def agents(self) -> list[Announcement]:
        """The agents that are announced now."""
        return self.discovery.neighbours.agents()

    def plan(
        self,
        blob: Digest,
        layout: PieceLayout,
        done: asyncio.Future[None],
        planned: Callable[[Plan], None],
        *,
        origin: bool = False,
    ) -> None:
        """Plan a pull that begins while no tracker answers: `planned` gets one plan or two, until
        `done`, which is the end of the pull, or until a tracker answers. `origin`: each host that
        fetches the blob can read it from where it comes from."""
        if not self._session.attention.answers:
            self._plans.spawn(self._plan(blob, layout, done, planned, origin=origin))

    def has_chosen_others(self, digest: Digest, host: str) -> bool:
        """Whether the sources of a pull are chosen and `host` is none of them."""
        counted = self._counted.get(digest)
        return self._session.connected if counted is None else host not in counted

    async def _plan(
        self,
        blob: Digest,
        layout: PieceLayout,
        done: asyncio.Future[None],
        planned: Callable[[Plan], None],
        *,
        origin: bool,
    ) -> None:
        def reader(host: Announcement) -> Announcement:
            return msgspec.structs.replace(host, origin=True) if origin else host

        def give(holders: Mapping[Announcement, BlobHolding]) -> None:
            if self._session.attention.answers or done.done():
                return
            earlier = {neighbour.host for neighbour, holding in holders.items() if holding.settled}
            counts = len(holders), len(earlier)
            logger.info("no tracker answers: planning %s with %d neighbours, %d before it", blob, *counts)
            planned(plan_without_tracker(blob, layout, reader(self._own), map(reader, holders), earlier))

        await self._settled.wait()
        holders = await self._holders(blob)
        if any(holding.settled for holding in holders.values()):
            give(holders)
        if self.agents():
            await asyncio.sleep(GATHER_S)
            first, asked_at = holders, asyncio.get_running_loop().time()
            holders = await self._holders(blob)
            for neighbour, holding in first.items():  # one that is busy by now, and says nothing, holds it still
                if self._silent_at.get(neighbour.host, asked_at) > asked_at:
                    holders[neighbour] = holding
        give(holders)
        self._counted[blob] = frozenset(neighbour.host for neighbour in holders)
        done.add_done_callback(lambda _: self._counted.pop(blob, None))

    def _changed(self) -> None:
        self._session.offer(_usable(self.discovery, secured=self._access.joined))

    # -- the neighbours that hold a blob

    async def _holders(self, digest: Digest) -> dict[Announcement, BlobHolding]:
        """The neighbours that hold or fetch a blob, and how much of it each holds."""
        neighbours = self.agents()
        names = {neighbour.host for neighbour in neighbours}
        self._silent_at = {name: at for name, at in self._silent_at.items() if name in names}
        answers = await asyncio.gather(*(self._ask(neighbour, digest) for neighbour in neighbours))
        return {neighbour: holding for neighbour, holding in zip(neighbours, answers, strict=True) if holding}

    async def _ask(self, neighbour: Announcement, digest: Digest) -> BlobHolding | None:
        """How much of a blob a neighbour holds; None where it neither holds nor fetches it, or does
        not answer in time."""
        loop = asyncio.get_running_loop()
        began_at = loop.time()
        async with self._turns:
            if self._silent_at.get(neighbour.host, began_at) > began_at:
                return None
            asking = asyncio.create_task(self._answer(neighbour, digest))
            try:
                done, _ = await asyncio.wait([asking], timeout=ASK_S)
                if not done:
                    done, _ = await asyncio.wait([asking], timeout=LATE_S)
                if done:
                    return asking.result()
                self._silent_at[neighbour.host] = loop.time()
                reason = f"it says nothing for {ASK_S:g} s"
            except (aiohttp.ClientError, TimeoutError, OSError, *UNDECODABLE) as error:
                reason = repr(error)
            finally:
                asking.cancel()
            logger.debug("%s at %s does not answer: %s", neighbour.host, neighbour.address, reason)
            return None

    async def _answer(self, neighbour: Announcement, digest: Digest) -> BlobHolding | None:
        """What a neighbour answers; None where it neither holds nor fetches the blob."""
        assert self._http is not None
        host, _ = parse_address(neighbour.address)
        name = self._tls.peer_name(neighbour.host, host) if self._tls is not None else None
        secure = self._tls.client if self._tls is not None else True
        url = f"{neighbour.url}/v1/blobs/{digest}/holding"
        query, headers, ticket = {"host": self._own.host}, passed_on(), self._access.tickets.get(digest)
        if ticket:
            headers[TICKET_HEADER] = ticket
        async with self._http.get(url, params=query, ssl=secure, server_hostname=name, headers=headers) as answer:
            body = await answer.content.read(ANSWER_BYTES_MAX)
            return msgspec.json.decode(body, type=BlobHolding) if answer.status == 200 else None


def _usable(discovery: Discovery, *, secured: bool) -> list[str]:
    """The URLs of discovered trackers, best first; with `secured` of trackers that speak TLS, whose
    certificates show which of them are of the fleet."""
    return [tracker.url for tracker in discovery.neighbours.trackers() if tracker.tls or not secured]


@asynccontextmanager
async def looking_for_trackers(
    settings: DiscoverySettings | None, host: str, zone: str
) -> AsyncIterator[Callable[[], list[str]]]:
    """Within it the yielded function gives the URLs of trackers that speak TLS and announce
    themselves; nothing is announced. Without settings there are none."""
    if settings is None or not settings.trackers:
        yield list
        return
    from p2pdist.agent.discovery.mdns import Discovery

    own = Announcement(settings.network, host, zone=zone)
    discovery = Discovery("agent", own, settings, browse=("tracker",), silent=True)
    await discovery.start()
    try:
        yield lambda: _usable(discovery, secured=True)
    finally:
        await discovery.stop()


def neighbourhood(
    settings: DiscoverySettings | None, hello: Hello, session: TrackerSession, access: AgentAccess, origin: str
) -> Neighbourhood | None:
    """The neighbourhood of an agent that introduces itself to trackers with `hello` and has
    `origin` for its own central storage; None without settings."""
    if settings is None:
        return None
    own = Announcement(
        settings.network,
        hello.host,
        hello.address,
        hello.zone,
        hello.rack,
        hello.protocol,
        tls=access.tls is not None,
        origin=bool(origin),
    )
    return Neighbourhood(own, settings, session, access)
