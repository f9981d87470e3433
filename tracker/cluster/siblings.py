"""What trackers of a cluster ask each other, so that any of them answers for the fleet.

An answer names the trackers that said nothing (UNANSWERED_HEADER), and holds what the others said.
A request that a tracker sends has `local=1`, and is answered from what that tracker itself knows:
nothing is passed on twice. It carries the client's token, and each tracker checks its rights
itself.
"""

from __future__ import annotations

import asyncio
import logging
import ssl
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import aiohttp

from p2pdist.model.digest import Digest
from p2pdist.model.errors import Unavailable
from p2pdist.model.ownership import Tracker
from p2pdist.transfer.names import NAMES, Resolver
from tracker.cluster.cluster import Cluster

ASK_S = 3.0
"""How long another tracker may take to answer. One that is frozen is given up after about as
long."""

CONNECT_S = 1.0
ASKED_AT_ONCE = 32
ANSWER_BYTES_MAX = 64 << 20
UNANSWERED_HEADER = "P2PDist-Unanswered"
LOCAL = "local"
"""Field of a query: 1 for what the tracker itself knows."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Asked:
    """What another tracker answered: `status` and `body`."""

    status: int
    body: bytes


class Siblings:
    """Asks the other trackers of a cluster. `authorities` says which certificates, PEM, theirs must
    come of; None where trackers speak plain HTTP."""

    def __init__(self, cluster: Cluster, authorities: Callable[[], str] | None = None) -> None:
        self.cluster, self._authorities = cluster, authorities
        self._http: aiohttp.ClientSession | None = None
        self._secure: tuple[str, ssl.SSLContext] | None = None

    async def close(self) -> None:
        """Close connections."""
        if self._http is not None:
            await self._http.close()

    def owner(self, blob: Digest) -> Tracker | None:
        """The other tracker that owns a blob; None where it is this one."""
        return self.cluster.owner(blob)

    async def ask(self, tracker: Tracker, path: str, headers: Mapping[str, str]) -> Asked:
        """What a tracker answers to a GET of a path. Raises Unavailable."""
        try:
            async with asyncio.timeout(ASK_S):
                return await self._ask(tracker, path, headers)
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise Unavailable(
                f"the tracker {tracker.id} does not answer: {str(error)[:200] or type(error).__name__}",
                remedy="Ask again in a few seconds: another tracker takes its place",
            ) from error

    async def ask_all(self, path: str, headers: Mapping[str, str]) -> tuple[list[bytes], list[str]]:
        """The bodies that the other trackers answer with, and the ids of those that did not answer.
        A tracker that knows nothing of what is asked for has answered."""

        async def one(tracker: Tracker) -> Asked | None:
            try:
                return await self.ask(tracker, path, headers)
            except Unavailable as error:
                logger.debug("%s", error)
                return None

        others = self.cluster.others()
        answers = dict(zip(others, await asyncio.gather(*map(one, others)), strict=True))
        silent = [each.id for each, asked in answers.items() if asked is None or asked.status not in (200, 404)]
        return [asked.body for asked in answers.values() if asked is not None and asked.status == 200], silent

    async def _ask(self, tracker: Tracker, path: str, headers: Mapping[str, str]) -> Asked:
        if self._http is None:
            connector = aiohttp.TCPConnector(limit=ASKED_AT_ONCE, resolver=Resolver(NAMES), use_dns_cache=False)
            timeout = aiohttp.ClientTimeout(total=ASK_S, sock_connect=CONNECT_S)
            self._http = aiohttp.ClientSession(connector=connector, timeout=timeout)
        failure: aiohttp.ClientError | OSError = aiohttp.ClientConnectionError("it names no URL")
        for url in tracker.urls:
            try:
                async with self._http.get(
                    url.rstrip("/") + path,
                    params={LOCAL: "1"},
                    headers=dict(headers),
                    ssl=self._context(),
                    allow_redirects=False,
                ) as answer:
                    return Asked(answer.status, await _limited(answer))
            except (aiohttp.ClientConnectionError, OSError) as error:
                failure = error
        raise failure

    def _context(self) -> ssl.SSLContext | bool:
        if self._authorities is None:
            return True
        trusted = self._authorities()
        if self._secure is None or self._secure[0] != trusted:
            self._secure = trusted, ssl.create_default_context(cadata=trusted)
        return self._secure[1]


async def _limited(answer: aiohttp.ClientResponse) -> bytes:
    body = bytearray()
    async for chunk in answer.content.iter_chunked(1 << 16):
        body += chunk
        if len(body) > ANSWER_BYTES_MAX:
            raise aiohttp.ClientPayloadError("it answers with more than a tracker has to say")
    return bytes(body)
