"""The agent's session with a tracker: one WebSocket that is opened again whenever it breaks, and
small reads over HTTP.

Losing the tracker stops nothing that runs. Messages sent meanwhile are dropped, because the agent
reports all it holds whenever a new session opens. Of several trackers that share the blobs of a
fleet an agent has a session with each one that it needs (trackers.py).

Trackers are given at the start, or discovered and offered (`offer`) while the session runs. The
session tries them in turn, from the best one again when a new one is offered; an open session is
kept as long as it works.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import ssl
import time
from collections.abc import Iterable, Mapping, Sequence
from socket import gethostname
from typing import Any
from urllib.parse import urlsplit

import aiohttp
import msgspec

from p2pdist.agent.tracker.address import address_for_others
from p2pdist.agent.tracker.attention import Attention
from p2pdist.agent.tracker.connection import GOODBYE_S, SLACK_MAX, Connection, Handlers, receive
from p2pdist.credentials.exchange import in_words
from p2pdist.model.address import Vicinity, address_text, host_part
from p2pdist.model.digest import Digest, digest_of, parse_digest
from p2pdist.model.errors import UNDECODABLE, Corrupt, P2PDistError, Unavailable, UsageError, from_problem
from p2pdist.model.manifest import DOCUMENT_BYTES_MAX, Bundle, Descriptor, Reference, decode_bundle
from p2pdist.model.messages import (
    MESSAGE_BYTES_MAX,
    PROTOCOL_VERSION,
    FromAgent,
    FromTracker,
    Hello,
    Reject,
    Welcome,
    encode,
)
from p2pdist.model.policy import POLICY_HEADER, PackagePolicy, decode_policy
from p2pdist.model.rendezvous import ranked
from p2pdist.model.request_id import passed_on
from p2pdist.model.url import redacted
from p2pdist.transfer.names import NAMES, Resolver
from p2pdist.transfer.tls import Tls

logger = logging.getLogger(__name__)

RETRY_FIRST_S = 0.2
RETRY_MAX_S = 5.0
REQUEST_TIMEOUT_S, REQUEST_CONNECT_S = 30.0, 3.0
"""For a small read, in which it may wait for one of the connections, and for a new one."""

CONNECT_TIMEOUT_S = 5.0
WELCOME_TIMEOUT_S, SEVERAL_WELCOME_TIMEOUT_S = 10.0, 6.0
"""How long a tracker may take to answer the request that opens a session, and then the hello; and
the latter where there are other trackers."""

SETTLED_S = 2.0
"""A session that lasts less counts as a failure: the pause before the next try grows."""

CLOCK_OFF_S = 5.0
"""The agent warns of clocks that differ by more: logs do not fit together, and certificates and
signed requests to storage may be refused."""


class TrackerSession:
    """Keeps one tracker of several connected, and reads small documents from it.

    `hello` introduces this host. With `listens`, 0.0.0.0 or :: and a port, other hosts reach this
    one at that port of the address that it has in its session with the tracker (address.py), not at
    the address in `hello`. With `searching`, trackers may be offered later. With `tls` the agent
    shows its certificate to trackers and believes its own authorities alone; a tracker's
    certificate must then be made out to `tracker_name`, None for the host in its URL. Credentials
    in a URL are used and never shown. Raises UsageError for what is no URL of a tracker.
    """

    def __init__(
        self,
        urls: Sequence[str],
        hello: Hello,
        *,
        listens: tuple[str, int] | None = None,
        searching: bool = False,
        tls: Tls | None = None,
        tracker_name: str | None = None,
    ) -> None:
        self._urls = [_checked(url).rstrip("/") for url in urls]
        self._given = tuple(self._urls)
        self._others: tuple[str, ...] = ()
        """Further trackers of the fleet, to try after those that were given or offered."""
        self._hello, self._listens = hello, listens
        self._tls, self._tracker_name = tls, tracker_name
        self._http: aiohttp.ClientSession | None = None
        self.attention = Attention()
        """Whether that tracker hangs."""
        self._connection: Connection | None = None
        """The WebSocket of a tracker that has welcomed this host."""
        self._welcomed = asyncio.Event()
        self._slack = 1.0
        """How many times as long as usual a tracker may be silent."""
        self._next = 0
        """Number of the tracker to try next, modulo the number of trackers."""
        self._offered = asyncio.Event()
        """Set when a new tracker is offered, cleared by the next try."""
        self._url = self._urls[0] if self._urls else ""
        self.searching = searching
        self.address = hello.address
        """Where other hosts reach this one, as the last hello stated it."""
        self.vicinity = Vicinity(host_part(hello.address), machine=gethostname())
        self.clock_ahead_s: float | None = None
        """How far this host's clock is ahead of the clock of the last tracker that answered; None
        where that tracker does not state its time."""
        self.origin = ""
        """The URL of the origin that the tracker named last."""
        self.tracker = ""
        """The id of the tracker that answers, "" while none does and where there is one alone."""
        self.takes_failures = self.takes_conditions = False
        """Whether the tracker that answered last takes PullFailed, and Condition."""
        self.problem = ""
        """Why no tracker answers, in words for the user."""
        self.place = {"zone": hello.zone, "site": hello.site}
        """Where this host is, as questions about packages say it: policies may go by it."""
        self.instance = hello.instance
        """Names this process towards trackers; no other program may hear it."""

    @property
    def connected(self) -> bool:
        """Whether a tracker answers."""
        return self._connection is not None

    @property
    def url(self) -> str:
        """The tracker that is in use or being tried, "" when there is none; for people, without
        credentials."""
        return redacted(self._url)

    @property
    def secured(self) -> bool:
        """Whether the tracker has shown a certificate of this agent's authorities."""
        return self.connected and self._tls is not None and self._url.startswith("https:")

    @property
    def _context(self) -> ssl.SSLContext | bool:
        """How connections to trackers at https URLs are secured; True: as a web browser does."""
        return self._tls.client if self._tls is not None else True

    @property
    def urls(self) -> list[str]:
        """All trackers, for people, without credentials."""
        return [redacted(url) for url in self._urls]

    def addressed(self) -> list[str]:
        """All trackers, as they are asked: with credentials."""
        return list(dict.fromkeys((*self._urls, *self._others)))

    async def run(self, handlers: Handlers) -> None:
        """Keep a session open until cancelled; ends at once where there is no tracker and none is
        searched for."""
        pause_s = RETRY_FIRST_S
        # A tracker that hangs takes the connection and says nothing, and another may be there.
        timeout = aiohttp.ClientTimeout(total=300.0, sock_connect=CONNECT_TIMEOUT_S, sock_read=WELCOME_TIMEOUT_S)
        connector = aiohttp.TCPConnector(limit=16, resolver=Resolver(NAMES), use_dns_cache=False)
        async with aiohttp.ClientSession(connector=connector, timeout=timeout) as http:
            self._http = http
            try:
                while self._urls or self.searching:
                    while not self._urls:
                        self._offered.clear()
                        await self._offered.wait()
                    self._offered.clear()
                    candidates = self.addressed()
                    self._url = candidates[self._next % len(candidates)]
                    self._next += 1
                    if await self._one_session(http, handlers):
                        pause_s = RETRY_FIRST_S
                    await self._rest(pause_s * random.uniform(0.5, 1.0))
                    pause_s = min(RETRY_MAX_S, pause_s * 1.7)
            finally:
                self._http = None

    def offer(self, urls: Sequence[str]) -> None:
        """Use these discovered trackers, best first, instead of those discovered before. The
        session tries a new one at once if no tracker answers. The caller vouches for the URLs'
        form."""
        usable = [*self._given, *(url for url in urls if url not in self._given)]
        if not set(usable) <= set(self._urls):
            self._next = 0
            self._offered.set()
        self._urls = usable
        if not self.connected and self._url not in usable:
            self._url = usable[0] if usable else ""

    def know(self, urls: Iterable[str]) -> None:
        """Use these trackers of the fleet, too, when none of those given or offered answers: each
        host in another order."""
        others = set(urls)
        self._others = tuple(ranked(self._hello.host.encode(), others, len(others)))

    def leave(self, reason: str) -> None:
        """End the session with the tracker that answers, and turn to the next one."""
        if self._connection is not None:
            self._connection.end(Unavailable(reason))

    async def _rest(self, pause_s: float) -> None:
        """Pause between two tries: shorter when a tracker is offered meanwhile, but never zero."""
        floor_s = min(pause_s, RETRY_FIRST_S / 2)
        await asyncio.sleep(floor_s)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(pause_s - floor_s):
                await self._offered.wait()

    def send(self, message: FromAgent) -> None:
        """Send a message if a tracker answers. Never waits: the session with a tracker that does
        not read ends, and the next one begins with all holdings."""
        if self._connection is not None:
            self._connection.send(message)

    async def wait_connected(self, timeout_s: float) -> bool:
        """Wait until a tracker answers; False when none does in time."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._welcomed.wait()
        return self._welcomed.is_set()

    # -- one session

    async def _one_session(self, http: aiohttp.ClientSession, handlers: Handlers) -> bool:
        """Returns whether a tracker welcomed this host and kept it for SETTLED_S."""
        loop = asyncio.get_running_loop()
        welcomed_at = float("inf")
        try:
            async with http.ws_connect(
                self._url + "/v1/session",
                autoping=False,  # pongs show that the tracker lives
                max_msg_size=MESSAGE_BYTES_MAX,
                timeout=aiohttp.ClientWSTimeout(ws_close=GOODBYE_S),
                ssl=self._context,
                server_hostname=self._tracker_name,
            ) as socket:
                welcome = await self._say_hello(socket)
                welcomed_at = loop.time()
                self.origin, self.problem, self.tracker = welcome.origin, "", welcome.tracker
                self.takes_failures, self.takes_conditions = welcome.failures, welcome.conditions
                self.attention.opened(self._url, self._context, self._tracker_name)
                self._connection = Connection(
                    socket,
                    handlers,
                    welcome.report_interval_s,
                    self.attention,
                    lambda: len(self.addressed()) > 1,
                    self._slack,
                )
                handlers.on_ownership(welcome)
                handlers.on_change(True)
                self._connection.send_holdings()
                self._welcomed.set()
                logger.info("the tracker %s answers", self.url)
                await self._connection.run()
        except (P2PDistError, aiohttp.ClientError, TimeoutError, OSError) as error:
            if self._connection is not None:
                self._slack = min(2 * self._connection.slack, SLACK_MAX) if self._connection.silent else 1.0
            self._note_problem(in_words(error, self._url))
        except Exception as error:
            # Whatever a tracker sends, the next try may find a better one; without this loop the
            # host would be alone for good.
            logger.exception("the session with tracker %s failed", self.url)
            self._note_problem(f"unexpected {type(error).__name__}")
        finally:
            if self.connected:
                self._connection, self.tracker = None, ""
                self.attention.closed()
                self._welcomed.clear()
                logger.warning("the tracker %s is away; what runs goes on", self.url)
                handlers.on_change(False)
        return loop.time() - welcomed_at >= SETTLED_S

    def _note_problem(self, text: str) -> None:
        """Log what is wrong with a tracker, once for as long as it stays the same."""
        text = text.replace(self._url, self.url)[:500]
        logger.log(logging.DEBUG if text == self.problem else logging.WARNING, "tracker %s: %s", self.url, text)
        self.problem = text

    async def _say_hello(self, socket: aiohttp.ClientWebSocketResponse) -> Welcome:
        asked_at = time.monotonic()
        await socket.send_frame(encode(self._hello_over(socket)), aiohttp.WSMsgType.TEXT)
        async with asyncio.timeout(SEVERAL_WELCOME_TIMEOUT_S if len(self.addressed()) > 1 else WELCOME_TIMEOUT_S):
            welcome = _welcome(await receive(socket))
        one_way_s = (time.monotonic() - asked_at) / 2
        self.clock_ahead_s = _clock_ahead_s(welcome, one_way_s, self.url)
        return welcome

    def _hello_over(self, socket: aiohttp.ClientWebSocketResponse) -> Hello:
        local = socket.get_extra_info("sockname")
        hello = msgspec.structs.replace(self._hello, time=round(time.time(), 3))
        if self._listens is not None and local:
            self.address = address_text(address_for_others(local[0], self._listens[0]), self._listens[1])
            hello = msgspec.structs.replace(hello, address=self.address)
        self.vicinity = Vicinity(host_part(self.address), local[0] if local else "", gethostname())
        return hello

    # -- small reads

    async def bundle(self, reference: Reference, known: Digest | None = None) -> tuple[Bundle, PackagePolicy]:
        """Ask the tracker for all small documents of a package, and its policy; the documents are
        unverified. Where the reference still names the manifest `known`, none are sent. Raises
        NotFound, Refused, Corrupt, Unavailable."""
        headers = {"If-None-Match": f'"{known}"'} if known is not None else {}
        status, body, answered = await self.exchange(
            "/v1/packages", {"reference": str(reference), "sealed": "1", **self.place}, headers
        )
        bundle = Bundle(known) if status == 304 and known is not None else decode_bundle(body)
        if reference.digest is not None and bundle.digest != reference.digest:
            raise Corrupt(f"the tracker {self.url} sent something else for {reference}")
        return bundle, decode_policy(answered.get(POLICY_HEADER, "{}"))

    async def policy(self, reference: Reference) -> PackagePolicy:
        """Ask the tracker for the policy of a package. Raises what `get` raises, Corrupt."""
        return decode_policy(await self.get("/v1/policies", {"reference": str(reference), **self.place}))

    async def resolve(self, reference: Reference) -> Descriptor:
        """Ask the tracker what a reference names. Raises NotFound, Corrupt, Unavailable."""
        return _descriptor(await self.get("/v1/resolve", {"reference": str(reference)}))

    async def layer(self, digest: Digest) -> Descriptor:
        """Ask for the descriptor of a layer that the tracker met in a manifest. Raises as `get`."""
        return _descriptor(await self.get(f"/v1/layers/{digest}", {}))

    async def content(self, digest: Digest, *, manifest: bool = False) -> bytes:
        """Ask the tracker for a small blob; verified. Raises NotFound, Corrupt, Unavailable."""
        data = await self.get(f"/v1/content/{digest}", {"as": "manifest"} if manifest else {})
        if digest_of(data) != digest:
            raise Corrupt(f"the tracker {self.url} sent something else for {digest}")
        return data

    async def get(self, path: str, query: dict[str, str]) -> bytes:
        """The body of the answer to a GET. Raises what its problem document says, Unavailable."""
        return (await self.exchange(path, query, {}))[1]

    async def exchange(
        self, path: str, query: dict[str, str], headers: dict[str, str], body: bytes | None = None
    ) -> tuple[int, bytes, Mapping[str, str]]:
        """Status, 200 or 304, body and header of the answer to a GET, or to a POST of a body;
        raises what a problem document says."""
        if self._http is None or not self._url:
            raise Unavailable("this agent knows no tracker", remedy="Give it --tracker")
        timeout = aiohttp.ClientTimeout(total=REQUEST_TIMEOUT_S, sock_connect=REQUEST_CONNECT_S)
        try:
            async with self._http.request(
                "GET" if body is None else "POST",
                self._url + path,
                data=body,
                params=query,
                headers=headers | passed_on(),
                timeout=timeout,
                ssl=self._context,
                server_hostname=self._tracker_name,
            ) as answer:
                answered = await _limited(answer)
            self.attention.heard()
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            reason = in_words(error, self._url).replace(self._url, self.url)
            raise Unavailable(f"the tracker {self.url} does not answer: {reason}") from error
        if answer.status not in (200, 304):
            raise _problem(answered, f"the tracker {self.url} answered {answer.status}")
        return answer.status, answered, answer.headers


def _welcome(answer: FromTracker) -> Welcome:
    """What a tracker answers a hello, if it takes this host; raises what it says, or what is wrong
    with it."""
    if isinstance(answer, Reject):
        raise from_problem(answer.problem)
    if not isinstance(answer, Welcome):
        raise Unavailable("it does not answer as a tracker does")
    if answer.protocol != PROTOCOL_VERSION:
        raise P2PDistError(f"it speaks protocol {answer.protocol}, this agent {PROTOCOL_VERSION}")
    return answer


def _clock_ahead_s(welcome: Welcome, one_way_s: float, url: str) -> float | None:
    """How far this host's clock is ahead of the tracker's, None where it does not say; warns of
    much."""
    ahead_s = time.time() - welcome.time - one_way_s if welcome.time else None
    if ahead_s is not None and abs(ahead_s) > CLOCK_OFF_S:
        logger.warning(
            "the clock of this host is %.0f s %s that of the tracker %s. Run chrony or systemd-timesyncd on both",
            abs(ahead_s),
            "ahead of" if ahead_s > 0 else "behind",
            url,
        )
    return ahead_s


def is_tracker_url(url: str) -> bool:
    """Whether a text can be the URL of a tracker."""
    try:
        parts = urlsplit(url)
        usable = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        return False
    return usable and not (parts.query or parts.fragment or any(mark.isspace() for mark in url))


def _checked(url: str) -> str:
    """Raises UsageError unless `url` can be the URL of a tracker."""
    if not is_tracker_url(url):
        raise UsageError(f"{redacted(url)!r} is not the URL of a tracker", remedy="Write http://host:7070")
    return url


async def _limited(answer: aiohttp.ClientResponse) -> bytes:
    body = bytearray()
    async for chunk in answer.content.iter_chunked(1 << 16):
        body += chunk
        if len(body) > DOCUMENT_BYTES_MAX:
            raise Corrupt("the tracker sent more than a small blob may hold")
    return bytes(body)


def _problem(body: bytes, otherwise: str) -> P2PDistError:
    try:
        return from_problem(msgspec.json.decode(body, type=dict[str, Any]))
    except UNDECODABLE:
        return Unavailable(otherwise)


def _descriptor(body: bytes) -> Descriptor:
    try:
        plain = msgspec.json.decode(body, type=dict[str, Any])
        annotations = {str(key): str(value) for key, value in dict(plain.get("annotations", {})).items()}
        return Descriptor(str(plain["mediaType"]), parse_digest(plain["digest"]), int(plain["size"]), annotations)
    except (*UNDECODABLE, KeyError, ValueError, TypeError) as error:
        raise Corrupt(f"the tracker sent a malformed descriptor: {error!r}") from error
