"""What trackers of a cluster ask each other, so that any of them answers for the fleet.

An answer names the trackers that said nothing (UNANSWERED_HEADER), and holds what the others said.
A request that a tracker sends has `local=1`, and is answered from what that tracker itself knows:
nothing is passed on twice. It carries the client's token, and each tracker checks its rights
itself.

The owner of a blob may not have read any package that has the blob: agents ask one tracker for the
package, and speak to another of its blobs. So a tracker that answers for a package tells the others
of it first (`tell`), and each of them reads its manifest.
"""

from __future__ import annotations

import asyncio
import logging
import ssl
import time
from collections import OrderedDict
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from math import inf
from typing import Annotated

import aiohttp
import msgspec
from msgspec import Meta
from yarl import URL

from p2pdist.credentials.authority import TRACKER_DNS
from p2pdist.model.digest import Digest, WireDigest
from p2pdist.model.errors import UNDECODABLE, Unavailable
from p2pdist.model.hub import FILE_BYTES_MAX
from p2pdist.model.ownership import Tracker
from p2pdist.transfer.names import NAMES, Resolver
from p2pdist.transfer.server_events import events_of
from tracker.cluster.cluster import Cluster
from tracker.core.views.fleet_view import Change

ASK_S = 3.0
"""How long another tracker may take to answer. One that is frozen is given up after about as
long."""

CONNECT_S = 1.0
ASKED_AT_ONCE = 32
ANSWER_BYTES_MAX = 64 << 20
TELL_S = 2.0
"""How long an agent waits for the other trackers to read a package."""

RETELL_S = 5.0
TOLD_MAX = 50_000
BLOBS_MAX = 10_000
"""Blobs of one ranking."""

HELD_PATH = "/v1/trackers/held"
POOL_PATH = "/v1/trackers/pool"
KNOWN_PATH = "/v1/trackers/known"
VIEW_PATH = "/v1/trackers/view"
SILENCE_S = 5.0
"""A tracker that is watched tells something every second."""

STREAMS_MAX = 128
"""Other trackers, and trees of theirs, that are watched at once."""

LOCAL = "local"
"""Field of a query: 1 for what the tracker itself knows."""

logger = logging.getLogger(__name__)


class Known(msgspec.Struct, frozen=True):
    """A package, or an image of an upstream registry, that agents ask for: its name, without tag,
    and the digest of its manifest. With a `size` a file of a repository of the fleet's hub, and
    its digest."""

    name: Annotated[str, Meta(max_length=512)]
    digest: WireDigest
    image: bool = False
    size: Annotated[int, Meta(ge=0, le=FILE_BYTES_MAX)] = 0


class HeldRequest(msgspec.Struct, frozen=True):
    """Which blobs a ranking is about."""

    blobs: Annotated[tuple[WireDigest, ...], Meta(max_length=BLOBS_MAX)]


class HostBrief(msgspec.Struct, frozen=True, array_like=True):
    """A host with its home at the tracker that answers; `available`: it is connected and not about
    to end."""

    host: str
    zone: str
    rack: str
    available: bool
    site: str = ""


class Held(msgspec.Struct, frozen=True):
    """What one tracker knows: its hosts; by blob of its own, the bytes that each host holds; and
    which of its hosts need not fetch a blob."""

    hosts: tuple[HostBrief, ...]
    held: dict[Digest, dict[str, int]]
    spare: dict[Digest, tuple[str, ...]]


_held_decoder = msgspec.json.Decoder(Held)
_change_decoder = msgspec.json.Decoder(Change)


@dataclass(frozen=True, slots=True)
class Asked:
    """What another tracker answered: `status` and `body`."""

    status: int
    body: bytes


class Siblings:
    """Asks the other trackers of a cluster. `secure` gives the TLS of connections to them, by which
    this one shows its certificate; None where trackers speak plain HTTP."""

    def __init__(self, cluster: Cluster, secure: Callable[[], ssl.SSLContext | None] | None = None) -> None:
        self.cluster, self._secure = cluster, secure
        self._http: aiohttp.ClientSession | None = None
        self._streams: aiohttp.ClientSession | None = None
        """For answers that go on, so that these leave connections to the others."""
        self._told: OrderedDict[tuple[str, Known], float] = OrderedDict()
        """By process of another tracker and package, when it is to be told again; at most
        TOLD_MAX."""
        self._telling: dict[tuple[str, Known], asyncio.Task[None]] = {}
        """What other trackers are being told of."""

    async def close(self) -> None:
        """Close connections."""
        for http in (self._http, self._streams):
            if http is not None:
                await http.close()

    def owner(self, blob: Digest) -> Tracker | None:
        """The other tracker that owns a blob; None where it is this one."""
        return self.cluster.owner(blob)

    async def ask(self, tracker: Tracker, path: str, headers: Mapping[str, str]) -> Asked:
        """What a tracker answers to a GET of a path, encoded as in a URL: what a client wrote into
        it must not become a query. Raises Unavailable."""
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

    async def send_all(
        self, method: str, path: str, headers: Mapping[str, str], body: bytes | None = None
    ) -> tuple[dict[str, Asked], list[str]]:
        """What the other trackers answer to a request that changes something, by their ids, and the
        ids of those that did not answer."""

        async def one(tracker: Tracker) -> Asked | None:
            try:
                async with asyncio.timeout(ASK_S):
                    return await self._send(method, tracker, f"{path}?{LOCAL}=1", headers, body)
            except (aiohttp.ClientError, TimeoutError, OSError) as error:
                logger.debug("%s does not answer: %r", tracker.id, error)
                return None

        others = self.cluster.others()
        answers = await asyncio.gather(*map(one, others))
        found = {each.id: asked for each, asked in zip(others, answers, strict=True) if asked is not None}
        return found, [each.id for each in others if each.id not in found]

    async def held(
        self, wanted: HeldRequest, headers: Mapping[str, str], path: str = HELD_PATH
    ) -> tuple[list[Held], list[str]]:
        """What the other trackers know of hosts and of blobs, and the ids of those that do not say
        it."""
        body = msgspec.json.encode(wanted)

        async def one(tracker: Tracker) -> Held | None:
            try:
                async with asyncio.timeout(ASK_S):
                    asked = await self._send("POST", tracker, path, headers, body)
                return _held_decoder.decode(asked.body) if asked.status == 200 else None
            except (aiohttp.ClientError, TimeoutError, OSError, *UNDECODABLE) as error:
                logger.debug("%s does not say what hosts hold: %r", tracker.id, error)
                return None

        others = self.cluster.others()
        found = await asyncio.gather(*map(one, others))
        silent = [each.id for each, held in zip(others, found, strict=True) if held is None]
        return [held for held in found if held is not None], silent

    async def changes(self, tracker: Tracker, tree: tuple[Digest, int] | None) -> AsyncGenerator[Change]:
        """What another tracker tells of its hosts and swarms, and of the tree of one of its blobs:
        everything, then what changes. Raises what aiohttp raises, and UNDECODABLE."""
        if self._streams is None:
            timeout = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_S, sock_read=SILENCE_S)
            self._streams = _session(STREAMS_MAX, timeout)
        query = f"?swarm={tree[0]}&stripe={tree[1]}" if tree is not None else ""
        async with self._opened(self._streams, "GET", tracker, VIEW_PATH + query, {}) as answer:
            if answer.status != 200:
                raise aiohttp.ClientPayloadError(f"it answers with status {answer.status}")
            async for kind, data in events_of(answer.content):
                if kind == "change":
                    yield _change_decoder.decode(data)

    async def announce(self, known: Known) -> None:
        """Tell each other tracker of a package, once, however many requests for it come together.
        One that fails hears of it again with a request that comes RETELL_S later."""
        rows = self.cluster.look.rows if self.cluster.look is not None else ()
        instances = {row.registered.id: row.registered.instance for row in rows}
        now = time.monotonic()
        for tracker in self.cluster.others():
            key = instances.get(tracker.id, tracker.id), known
            if key not in self._telling and self._told.get(key, 0.0) <= now:
                self._telling[key] = asyncio.create_task(self._tell(tracker, key))
        waiting = [task for (_, told), task in self._telling.items() if told == known] if self._telling else []
        if waiting:
            await asyncio.wait(waiting)

    async def _tell(self, tracker: Tracker, key: tuple[str, Known]) -> None:
        again_at = time.monotonic() + RETELL_S
        try:
            async with asyncio.timeout(TELL_S):
                asked = await self._send("POST", tracker, KNOWN_PATH, {}, msgspec.json.encode(key[1]))
            if asked.status == 204:
                again_at = inf
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            logger.debug("%s does not hear of %s: %r", tracker.id, key[1], error)
        finally:
            del self._telling[key]
        self._told[key] = again_at
        if len(self._told) > TOLD_MAX:
            self._told.popitem(last=False)

    async def _ask(self, tracker: Tracker, path: str, headers: Mapping[str, str]) -> Asked:
        return await self._send("GET", tracker, f"{path}?{LOCAL}=1", headers)

    async def _send(
        self, method: str, tracker: Tracker, path: str, headers: Mapping[str, str], body: bytes | None = None
    ) -> Asked:
        if self._http is None:
            self._http = _session(ASKED_AT_ONCE, aiohttp.ClientTimeout(total=ASK_S, sock_connect=CONNECT_S))
        async with self._opened(self._http, method, tracker, path, headers, body) as answer:
            return Asked(answer.status, await _limited(answer))

    @asynccontextmanager
    async def _opened(
        self,
        http: aiohttp.ClientSession,
        method: str,
        tracker: Tracker,
        path: str,
        headers: Mapping[str, str],
        body: bytes | None = None,
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        """What a tracker answers, at the first of its URLs that does."""
        secure = self._secure() if self._secure is not None else None
        failure: aiohttp.ClientError | OSError = aiohttp.ClientConnectionError("it names no URL")
        for url in tracker.urls:
            if secure is not None and not url.startswith("https:"):
                failure = aiohttp.ClientConnectionError("it does not speak TLS, and would be shown a client's token")
                continue
            try:
                answer = await http.request(
                    method,
                    URL(url.rstrip("/") + path, encoded=True),
                    data=body,
                    headers={**headers, **({"Content-Type": "application/json"} if body is not None else {})},
                    ssl=secure if secure is not None else True,
                    server_hostname=TRACKER_DNS if secure is not None else None,
                    allow_redirects=False,
                )
            except (aiohttp.ClientConnectionError, OSError) as error:
                failure = error
                continue
            async with answer:
                yield answer
            return
        raise failure


def _session(limit: int, timeout: aiohttp.ClientTimeout) -> aiohttp.ClientSession:
    connector = aiohttp.TCPConnector(limit=limit, resolver=Resolver(NAMES), use_dns_cache=False)
    return aiohttp.ClientSession(connector=connector, timeout=timeout)


async def _limited(answer: aiohttp.ClientResponse) -> bytes:
    body = bytearray()
    async for chunk in answer.content.iter_chunked(1 << 16):
        body += chunk
        if len(body) > ANSWER_BYTES_MAX:
            raise aiohttp.ClientPayloadError("it answers with more than a tracker has to say")
    return bytes(body)
