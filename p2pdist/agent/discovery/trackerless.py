"""What an agent does with those it discovers: trackers go to the session, and while none answers
neighbours are planned with.

A pull that begins without a tracker asks all neighbours at once whether they hold or fetch the
blob. Others may begin at the same moment and not know of each other yet, so GATHER_S later all are
asked again, and the plan that is made then stays (core/trackerless.py). Who counts on each other
stands in the order that both know; who has chosen its sources without this host will not turn to
it, and can be asked wherever it stands. In its first SETTLE_S an agent may not have heard of
everybody, and plans nothing.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping

import aiohttp
import msgspec

from p2pdist.agent.discovery.mdns import DiscoverySettings
from p2pdist.agent.pull.blob import BlobPull
from p2pdist.agent.tracker.session import TrackerSession
from p2pdist.core.trackerless import Announcement, Kind, plan_without_tracker
from p2pdist.model.digest import Digest
from p2pdist.model.errors import UNDECODABLE
from p2pdist.model.messages import BlobHolding, Hello
from p2pdist.model.request_id import passed_on
from p2pdist.transfer.stream.connect import parse_address
from p2pdist.transfer.tls import Tls

SETTLE_S = 1.5
GATHER_S = 0.4
ASK_S = 0.5
"""How long a neighbour may take to say whether it has a blob; one on the same link takes
milliseconds."""

ANSWER_BYTES_MAX = 1 << 12
ASKED_AT_ONCE = 64

logger = logging.getLogger(__name__)


class Neighbourhood:
    """See the module's text. `me` is what this host says of itself. Raises UsageError as Discovery
    does."""

    def __init__(self, me: Announcement, settings: DiscoverySettings, session: TrackerSession, tls: Tls | None) -> None:
        from p2pdist.agent.discovery.mdns import Discovery  # takes a tenth of a second, and not all want it

        self._me, self._session, self._tls = me, session, tls
        browse: tuple[Kind, ...] = ("tracker", "agent") if settings.trackers else ("agent",)
        self.discovery = Discovery("agent", me, settings, browse=browse, on_change=self._changed)
        self._settled = asyncio.Event()
        self._counted: dict[Digest, frozenset[str]] = {}
        self._plans: set[asyncio.Task[None]] = set()
        self._http: aiohttp.ClientSession | None = None
        session.searching = settings.trackers

    async def start(self) -> None:
        await self.discovery.start()
        self._http = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=ASKED_AT_ONCE, force_close=True))
        asyncio.get_running_loop().call_later(SETTLE_S, self._settled.set)

    async def stop(self) -> None:
        """Take leave of the others."""
        for task in self._plans:
            task.cancel()
        await asyncio.gather(*self._plans, return_exceptions=True)
        if self._http is not None:
            await self._http.close()
        await self.discovery.stop()

    def agents(self) -> list[Announcement]:
        return self.discovery.neighbours.agents()

    def plan(self, pull: BlobPull) -> None:
        """Plan a pull that begins, unless a tracker does."""
        if self._session.connected:
            return
        task = asyncio.create_task(self._plan(pull), name=f"plan-{pull.blob.digest}")
        self._plans.add(task)
        task.add_done_callback(self._planned)

    def _planned(self, task: asyncio.Task[None]) -> None:
        self._plans.discard(task)
        if not task.cancelled() and task.exception() is not None:
            logger.error("a plan without a tracker failed", exc_info=task.exception())

    def settled(self, digest: Digest, host: str) -> bool:
        """Whether the sources of a pull are chosen, and `host` is not among those that it may turn
        to."""
        counted = self._counted.get(digest)
        return self._session.connected if counted is None else host not in counted

    async def _plan(self, pull: BlobPull) -> None:
        digest = pull.blob.digest
        await self._settled.wait()
        found = await self._holders(digest)
        if any(holding.settled for holding in found.values()):
            self._give(pull, found)
        if self.agents():
            await asyncio.sleep(GATHER_S)
            found = await self._holders(digest)
        self._give(pull, found)
        self._counted[digest] = frozenset(neighbour.host for neighbour in found)
        pull.done.add_done_callback(lambda done: self._counted.pop(digest, None))

    def _give(self, pull: BlobPull, found: Mapping[Announcement, BlobHolding]) -> None:
        if self._session.connected or pull.done.done():
            return
        blob = pull.blob
        earlier = {neighbour.host for neighbour, holding in found.items() if holding.settled}
        logger.info(
            "no tracker answers: planning %s with %d neighbours, %d before it", blob.digest, len(found), len(earlier)
        )
        pull.planned(plan_without_tracker(blob.digest, blob.layout, self._me, found, earlier))

    def _changed(self) -> None:
        self._session.offer([tracker.url for tracker in self.discovery.neighbours.trackers()])

    # -- who has it

    async def _holders(self, digest: Digest) -> dict[Announcement, BlobHolding]:
        """The neighbours that hold or fetch a blob, and what they say of it."""
        neighbours = self.agents()
        answers = await asyncio.gather(*(self._ask(each, digest) for each in neighbours))
        return {each: holding for each, holding in zip(neighbours, answers, strict=True) if holding is not None}

    async def _ask(self, neighbour: Announcement, digest: Digest) -> BlobHolding | None:
        """None where it neither holds nor fetches the blob, or does not say so in time."""
        assert self._http is not None
        host, _ = parse_address(neighbour.address)
        name = self._tls.host_to_check(host) if self._tls is not None else None
        secure = self._tls.client if self._tls is not None else True
        url = f"{neighbour.url}/v1/blobs/{digest}/holding"
        query = {"host": self._me.host}
        try:
            async with (
                asyncio.timeout(ASK_S),
                self._http.get(url, params=query, ssl=secure, server_hostname=name, headers=passed_on()) as answer,
            ):
                body = await answer.content.read(ANSWER_BYTES_MAX)
                return msgspec.json.decode(body, type=BlobHolding) if answer.status == 200 else None
        except (aiohttp.ClientError, TimeoutError, OSError, *UNDECODABLE) as error:
            logger.debug("%s at %s does not answer: %r", neighbour.host, neighbour.address, error)
            return None


def neighbourhood(
    settings: DiscoverySettings | None, hello: Hello, session: TrackerSession, tls: Tls | None, origin: str
) -> Neighbourhood | None:
    """That of an agent which says `hello` to trackers and may read `origin` by itself; None without
    settings."""
    if settings is None:
        return None
    me = Announcement(
        settings.network,
        hello.host,
        hello.address,
        hello.zone,
        hello.rack,
        hello.protocol,
        tls=tls is not None,
        origin=bool(origin),
    )
    return Neighbourhood(me, settings, session, tls)
