"""A client of trackers for asyncio."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Collection, Sequence
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, TypeVar
from urllib.parse import quote

import msgspec

from p2pdist.client.access import NAME_A_TRACKER, Access
from p2pdist.client.pulse import Hangs, Pulse
from p2pdist.model.errors import UNDECODABLE, NotFound, P2PDistError, Unavailable, UsageError, from_problem, unreached
from p2pdist.model.fleet import (
    UNANSWERED_HEADER,
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
from p2pdist.model.preseed import (
    ENDED,
    PreseedBrief,
    PreseedRequest,
    PreseedSummary,
    Progress,
    RankRequest,
    quorum_hosts,
)
from p2pdist.model.request_id import HEADER
from p2pdist.model.url import tracker_urls

if TYPE_CHECKING:
    import aiohttp

ANSWER_BYTES_MAX = 256 << 20
REQUEST_S_MAX = 60.0
CONNECT_S_MAX = 5.0

WAIT_S = 20.0
"""How long `wait` has a tracker keep a question waiting."""

POLL_S = 0.5
"""A tracker is asked at most this often, also one of an earlier release, which keeps no question
waiting."""

AWAY_S_MAX = 120.0
"""How long `wait` goes on while no tracker answers, as during a restart."""

UNREAD_S_MAX = 5.0
"""How long another of several trackers may take to read of a new preseed."""

Value = TypeVar("Value")


class Tracker:
    """Asks the first of the trackers that answers; an asynchronous context manager. `urls` are one
    or several, also with commas between; `token` is what `p2pdist token create` prints. Every call
    raises the failure that the tracker reports, or Unavailable when none answers. Raises
    UsageError, Unauthenticated for a token that has expired."""

    def __init__(self, urls: str | Sequence[str], *, token: str = "", access: Access | None = None) -> None:
        self._urls = tracker_urls(urls.split(",") if isinstance(urls, str) else urls)
        if not self._urls:
            raise UsageError("no tracker is named", remedy="Write http://host:7070")
        self._session: aiohttp.ClientSession | None = None
        self._access = access if access is not None else Access(token)
        self._pulse = Pulse(self._access)
        self.answered = ""
        """The URL of the tracker that was asked last, without secrets."""
        self.unanswered: tuple[str, ...] = ()
        """Other trackers that said nothing to it then: what they know is not in its answer."""

    async def __aenter__(self) -> Self:
        import aiohttp

        self._session = aiohttp.ClientSession(headers={HEADER: os.urandom(8).hex()})
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._pulse.close()
        if self._session is not None:
            await self._session.close()

    # -- preseeds and rankings

    async def preseed(self, order: PreseedRequest) -> Progress:
        """Order a preseed; the same order under the same id again changes nothing. One without an
        id gets one here: a tracker that does not answer may have taken the order, and the next one
        that is asked is not to take it for another."""
        named = order if order.id is not None else msgspec.structs.replace(order, id=os.urandom(8).hex())
        return await self.send("POST", "/v1/preseeds", Progress, named)

    async def progress(self, identifier: str, *, wait_s: float = 0.0, quorum: float = 1.0) -> Progress:
        """How far a preseed is. With `wait_s`, up to 60, the answer comes when this share of the
        hosts is done or the preseed has ended, at the latest after this time."""
        query = f"?wait_s={wait_s:.9g}&quorum={quorum:.9g}" if wait_s else ""
        decode = msgspec.json.Decoder(Progress).decode
        progress: Progress = await self._first("GET", _preseed(identifier) + query, None, decode, wait_s)
        return progress

    async def wait(
        self,
        identifier: str,
        *,
        quorum: float = 1.0,
        pause_s: float = WAIT_S,
        told: Callable[[Progress], None] | None = None,
        away: Callable[[Unavailable], None] | None = None,
    ) -> Progress:
        """Wait until a share of a preseed's hosts is done or it has ended; `told` hears of each
        answer, every `pause_s` at most. Trackers may be away for AWAY_S_MAX; `away` hears of each
        time that none answers. A preseed without a deadline may never end: then bound this with
        asyncio.timeout."""
        loop = asyncio.get_running_loop()
        since = loop.time()
        while True:
            asked_at = loop.time()
            try:
                progress = await self.progress(identifier, wait_s=pause_s, quorum=quorum)
                since = loop.time()
                if told is not None:
                    told(progress)
                if is_over(progress, quorum):
                    return progress
            except Unavailable as error:
                if loop.time() - since > AWAY_S_MAX:
                    raise
                if away is not None:
                    away(error)
            except NotFound:
                if loop.time() - since > UNREAD_S_MAX:
                    raise
            await asyncio.sleep(max(0.0, asked_at + POLL_S - loop.time()))

    async def brief(self, identifier: str) -> PreseedBrief:
        """A preseed without what depends on its hosts."""
        return await self.send("GET", _preseed(identifier) + "?brief=1", PreseedBrief)

    async def preseeds(self) -> list[PreseedSummary]:
        """All preseeds that this identity sees, the newest last."""
        return await self.send("GET", "/v1/preseeds", list[PreseedSummary])

    async def cancel(self, identifier: str) -> Progress:
        """Have the hosts of a preseed released."""
        return await self.send("DELETE", _preseed(identifier), Progress)

    async def rank(self, request: RankRequest) -> list[Ranked]:
        """Hosts, those first that lack the fewest bytes of the request's packages."""
        return await self.send("POST", "/v1/rank", list[Ranked], request)

    async def assign(self, request: RankRequest) -> Assignment:
        """Which hosts the roles of a job get."""
        return await self.send("POST", "/v1/rank", Assignment, request)

    # -- hosts and swarms

    async def hosts(self) -> list[HostStatus]:
        """The hosts that are connected, and those that were lost in the last hour."""
        return await self.send("GET", "/v1/hosts", list[HostStatus])

    async def host(self, name: str) -> HostDetail:
        """One host."""
        return await self.send("GET", f"/v1/hosts/{segment(name)}", HostDetail)

    async def drain(self, name: str) -> None:
        """Have a host serve no other host, until `fill`, or a new start of a tracker that has no
        `--state`."""
        await self.send("POST", f"/v1/hosts/{segment(name)}/drain", type(None))

    async def fill(self, name: str) -> None:
        """Have a host that is drained serve other hosts again."""
        await self.send("DELETE", f"/v1/hosts/{segment(name)}/drain", type(None))

    async def evict(self, request: EvictRequest) -> Eviction:
        """Remove a package from the stores of hosts; what came of it at each host."""
        decode = msgspec.json.Decoder(Eviction).decode
        eviction: Eviction = await self._first("POST", "/v1/evictions", request, decode, request.wait_s)
        return eviction

    async def me(self) -> Me:
        """What this client may do."""
        return await self.send("GET", "/v1/me", Me)

    async def swarms(self) -> list[SwarmStatus]:
        """The swarms of blobs that this identity may read."""
        return await self.send("GET", "/v1/swarms", list[SwarmStatus])

    async def swarm(self, digest: str) -> SwarmDetail:
        """One swarm with its members."""
        return await self.send("GET", f"/v1/swarms/{quote(digest, safe=':')}", SwarmDetail)

    async def story(self, digest: str) -> list[StoryEvent]:
        """What happened in a swarm, the newest last."""
        return await self.send("GET", f"/v1/swarms/{quote(digest, safe=':')}/story", list[StoryEvent])

    # -- any route

    async def send(self, method: str, path: str, kind: type[Value], body: Any = None) -> Value:
        """The answer to a request with the JSON `body`, which is of this type."""
        answer: Value = await self._first(method, path, body, msgspec.json.Decoder(kind).decode)
        return answer

    async def ask(self, method: str, path: str, body: Any = None, *, fields: Collection[str] = ()) -> Any:
        """The JSON that the tracker answers to a request with the JSON `body`; None for no content.
        With `fields` it is an object that has them."""
        return await self._first(
            method, path, body, partial(_decoded, fields=fields) if fields else msgspec.json.decode
        )

    async def read(self, path: str) -> bytes:
        """What the tracker answers to a GET, whatever it is."""
        return bytes(await self._first("GET", path, None, bytes))

    async def _first(
        self, method: str, path: str, body: Any, decode: Callable[[bytearray], Any], wait_s: float = 0.0
    ) -> Any:
        """What the first tracker answers that does; it is asked to wait so long before."""
        failure: Unavailable | None = None
        urls = list(self._urls)
        for number, url in enumerate(urls, 1):
            asking = self._ask(method, url, path, body, decode, wait_s)
            try:
                return await (asking if number == len(urls) else self._pulse.watched(url, asking))
            except Unavailable as error:
                if isinstance(error, Hangs):  # it is asked last from now on
                    self._urls = [*(other for other in self._urls if other != url), url]
                failure = error
        assert failure is not None
        raise failure

    async def _ask(
        self, method: str, url: str, path: str, body: Any, decode: Callable[[bytearray], Any], wait_s: float
    ) -> Any:
        import aiohttp

        from p2pdist.model.url import redacted

        assert self._session is not None, "a client of trackers is used inside `async with`"
        self.answered = redacted(url)
        try:
            secured = dict(await self._access.request(url))
            if body is not None:
                secured["headers"] = {**secured.get("headers", {}), "Content-Type": "application/json"}
                secured["data"] = msgspec.json.encode(body)
            secured["timeout"] = aiohttp.ClientTimeout(total=REQUEST_S_MAX + wait_s, sock_connect=CONNECT_S_MAX)
            async with self._session.request(method, url + path, **secured) as answer:
                silent = answer.headers.get(UNANSWERED_HEADER, "")
                self.unanswered = tuple(filter(None, silent.split(",")))
                data = bytearray()
                async for chunk in answer.content.iter_chunked(1 << 18):
                    self._pulse.heard(url)
                    data += chunk
                    if len(data) > ANSWER_BYTES_MAX:
                        raise P2PDistError(f"the tracker {redacted(url)} answered more than {ANSWER_BYTES_MAX} bytes")
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            reason = unreached(error).replace(url, redacted(url))
            raise Unavailable(
                f"the tracker {redacted(url)} does not answer: {reason}", remedy=self._access.remedy(url, error)
            ) from error
        try:
            if answer.status >= 400:
                problem = from_problem(msgspec.json.decode(data, type=dict[str, Any]))
                raise self._access.hinted(problem, url)
            return decode(data) if answer.status != 204 else None
        except UNDECODABLE as error:
            raise Unavailable(
                f"{redacted(url)} answers, but not as a tracker does (HTTP {answer.status})", remedy=NAME_A_TRACKER
            ) from error


def _decoded(data: bytearray, *, fields: Collection[str]) -> dict[str, Any]:
    """A JSON object with these fields. Raises msgspec.DecodeError for anything else."""
    answer = msgspec.json.decode(data, type=dict[str, Any])
    if missing := set(fields) - answer.keys():
        raise msgspec.ValidationError(f"{', '.join(sorted(missing))}: not in the answer")
    return answer


def is_over(progress: Progress, quorum: float) -> bool:
    """Whether a preseed has ended or reached its quorum."""
    return progress.state in ENDED or is_reached(progress, quorum)


def is_reached(progress: Progress, quorum: float) -> bool:
    """Whether this share of a preseed's hosts is done. Not while a tracker that has just started
    does not know yet how many hosts there are."""
    total = progress.hosts_total
    return progress.settled and total > 0 and progress.hosts_done >= quorum_hosts(quorum, total)


def segment(name: str) -> str:
    """A name as a segment of a path. Raises UsageError for what would be another path (RFC 3986,
    5.2.4)."""
    if name in ("", ".", ".."):
        raise UsageError(f"{name!r} is the name of nothing", remedy="Write the name of a host, tracker or preseed")
    return quote(name, safe="")


def _preseed(identifier: str) -> str:
    return f"/v1/preseeds/{segment(identifier)}"
