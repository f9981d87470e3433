"""The agent's session with a tracker: one WebSocket that is opened again whenever it breaks, and
small reads over HTTP.

Losing the tracker stops nothing that runs: messages sent meanwhile are dropped, because after a new
session opens the agent says all it holds again.

Trackers are given, or found (`offer`) while the session runs. They are tried in turn, from the best
one again when a new one is found; a session that is open is kept as long as it works.

What waits to be said to a tracker, in as few messages as will do.

A package of hundreds of small blobs is hundreds of joins and as many completions within a second:
said one by one they would cost the tracker as many messages and passes. What was said about one
blob stays in order, and so does everything else.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NoReturn
from urllib.parse import urlsplit

import aiohttp
import msgspec

from p2pdist.agent.tracker.address import address_for_others
from p2pdist.model.digest import Digest, digest_of, parse_digest
from p2pdist.model.errors import UNDECODABLE, Corrupt, P2PDistError, Unavailable, UsageError, from_problem
from p2pdist.model.manifest import DOCUMENT_BYTES_MAX, Bundle, Descriptor, Reference, decode_bundle
from p2pdist.model.messages import (
    BLOBS_PER_MESSAGE_MAX,
    MESSAGE_BYTES_MAX,
    PROTOCOL_VERSION,
    Advance,
    Assign,
    FromAgent,
    FromTracker,
    Hello,
    Holding,
    Holdings,
    Keep,
    OriginShare,
    Pace,
    Reject,
    Release,
    Report,
    Welcome,
    decode_from_tracker,
    encode,
)
from p2pdist.model.policy import POLICY_HEADER, PackagePolicy, decode_policy
from p2pdist.model.request_id import passed_on
from p2pdist.model.url import redacted
from p2pdist.transfer.names import NAMES, Resolver


def gathered(messages: Iterable[FromAgent]) -> list[FromAgent]:
    """The same in fewer messages: holdings of several blobs become one, and then the reports of
    that time one."""
    run = _Run()
    for message in messages:
        run.add(message)
    run.end()
    return run.said


class _Run:
    """Holdings that can go into one message, and reports that can follow in another. A holding
    states more than all that was said of its blob before, an advance more than the advances
    before."""

    def __init__(self) -> None:
        self.said: list[FromAgent] = []
        self._holdings: dict[Digest, Holding] = {}
        self._advances: dict[Digest, Advance] = {}
        self._reports: list[Report] = []

    def add(self, message: FromAgent) -> None:
        match message:
            case Holding(blob):
                if blob in self._advances or len(self._holdings) >= BLOBS_PER_MESSAGE_MAX:
                    self.end()
                self._holdings[blob] = message
            case Report(blobs):
                if len(self._advances) + len(blobs) > BLOBS_PER_MESSAGE_MAX:
                    self.end()
                self._advances.update((advance.blob, advance) for advance in blobs)
                self._reports.append(message)
            case _:
                self.end()
                self.said.append(message)

    def end(self) -> None:
        """What follows goes into other messages."""
        holdings, reports = tuple(self._holdings.values()), self._reports
        if holdings:
            self.said.append(Holdings(holdings) if len(holdings) > 1 else holdings[0])
        if reports:
            sent_bytes, busy_s = sum(each.sent_bytes for each in reports), sum(each.busy_s for each in reports)
            self.said.append(Report(tuple(self._advances.values()), sent_bytes, busy_s))
        self._holdings, self._advances, self._reports = {}, {}, []


RETRY_FIRST_S = 0.2
RETRY_MAX_S = 5.0
HEARTBEAT_S = 10.0
REPORT_S_MIN, REPORT_S_MAX = 0.05, 60.0
"""Limits to how often a tracker may have this host report."""

REQUEST_TIMEOUT_S = 30.0
CONNECT_TIMEOUT_S = 5.0
WELCOME_TIMEOUT_S = 10.0
SETTLED_S = 2.0
"""A session that lasts less is no success: the next try comes later than the last one did."""

GATHER_S = 0.002
"""So long a join or a report waits for others of the same moment, which go out with it."""

CLOCK_OFF_S = 5.0
"""Clocks that differ by more are warned of: logs do not fit together, and certificates and signed
requests to storage may be refused."""

OUTBOX_MAX = 4096
"""Messages to a tracker that does not read them, before the session is broken off."""

logger = logging.getLogger(__name__)


class TrackerSession:
    """See the module's text.

    `holdings` says what the host holds and wants, `report` what is new since the last report (None:
    nothing), `on_message` hears Assign, OriginShare, Keep, Release and Reject, `on_change` whether
    a tracker answers. `problem` says why none does, for people. Raises UsageError for what is no
    URL of a tracker. Credentials in a URL are used and never shown. While `searching`, trackers may
    be offered later. With `listens`, 0.0.0.0 or :: and a port, the host is reached at that port of
    the address that it has in its session with the tracker (links.py), not at that in `hello`.
    `address` is the one that was told last.
    """

    def __init__(
        self,
        urls: Sequence[str],
        hello: Hello,
        *,
        holdings: Callable[[], list[Holding]],
        report: Callable[[], Report | None],
        on_message: Callable[[Assign | OriginShare | Keep | Release | Reject], None],
        on_change: Callable[[bool], None],
    ) -> None:
        self._urls = [_checked(url).rstrip("/") for url in urls]
        self._hello = hello
        self._holdings, self._report = holdings, report
        self._on_message, self._on_change = on_message, on_change
        self._http: aiohttp.ClientSession | None = None
        self._broken: asyncio.Future[NoReturn] | None = None
        self._outbox: asyncio.Queue[FromAgent] = asyncio.Queue(OUTBOX_MAX)
        self._welcomed = asyncio.Event()
        self._interval_s = REPORT_S_MAX
        self._reporting: asyncio.TimerHandle | None = None
        self._given = tuple(self._urls)
        self._turn = 0
        self._offered = asyncio.Event()
        self._url = self._urls[0] if self._urls else ""
        self.searching = False
        self.listens: tuple[str, int] | None = None
        self.address = hello.address
        self.connected = False
        self.clock_ahead_s: float | None = None
        """How far this host's clock is ahead of that of the tracker that answered last; None where
        it does not tell the time."""
        self.origin = self.problem = ""

    @property
    def url(self) -> str:
        """The tracker that is in use or being tried, "" when there is none; for people, without
        credentials."""
        return redacted(self._url)

    @property
    def urls(self) -> list[str]:
        """All trackers, for people."""
        return [redacted(url) for url in self._urls]

    async def run(self) -> None:
        """Keep a session open until cancelled; ends at once where there is no tracker and none is
        searched for."""
        pause = RETRY_FIRST_S
        timeout = aiohttp.ClientTimeout(total=300.0, sock_connect=CONNECT_TIMEOUT_S)
        connector = aiohttp.TCPConnector(limit=16, resolver=Resolver(NAMES), use_dns_cache=False)
        async with aiohttp.ClientSession(connector=connector, timeout=timeout) as http:
            self._http = http
            try:
                while self._urls or self.searching:
                    if not self._urls:
                        await self._offered.wait()
                    self._offered.clear()
                    if not self._urls:
                        continue
                    self._url = self._urls[self._turn % len(self._urls)]
                    self._turn += 1
                    if await self._one_session(http):
                        pause = RETRY_FIRST_S
                    await self._rest(pause * random.uniform(0.5, 1.0))
                    pause = min(RETRY_MAX_S, pause * 1.7)
            finally:
                self._http = None

    def offer(self, urls: Sequence[str]) -> None:
        """The trackers that were found, best first, instead of those found before. New ones are
        tried at once if none answers. Who finds them vouches for their form."""
        found = [*self._given, *(url for url in urls if url not in self._given)]
        if not set(found) <= set(self._urls):
            self._turn = 0
            self._offered.set()
        self._urls = found
        if not self.connected and self._url not in found:
            self._url = found[0] if found else ""

    async def _rest(self, pause_s: float) -> None:
        """Between two tries: shorter when a tracker is found meanwhile, but never nothing."""
        floor_s = min(pause_s, RETRY_FIRST_S / 2)
        await asyncio.sleep(floor_s)
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._offered.wait(), pause_s - floor_s)

    def send(self, message: FromAgent) -> None:
        """Send a message if a tracker answers. Never waits: a tracker that does not read is left,
        and told everything anew later."""
        if not self.connected or self._outbox.full():
            return
        self._outbox.put_nowait(message)
        if self._outbox.full() and self._broken is not None and not self._broken.done():
            self._broken.set_exception(Unavailable(f"it leaves {OUTBOX_MAX} messages unread"))

    async def wait_connected(self, timeout_s: float) -> bool:
        """Wait until a tracker answers; False when none does in time."""
        try:
            await asyncio.wait_for(self._welcomed.wait(), timeout_s)
        except TimeoutError:
            return False
        return True

    async def bundle(self, reference: Reference, known: Digest | None = None) -> tuple[Bundle, PackagePolicy]:
        """Ask the tracker for all small documents of a package, and its policy; the documents are
        unverified. Where the reference still names the manifest `known`, none are sent. Raises
        NotFound, Refused, Corrupt, Unavailable."""
        headers = {"If-None-Match": f'"{known}"'} if known is not None else {}
        status, body, told = await self._exchange("/v1/packages", self._about(reference), headers)
        bundle = Bundle(known) if status == 304 and known is not None else decode_bundle(body)
        if reference.digest is not None and bundle.digest != reference.digest:
            raise Corrupt(f"the tracker {self.url} sent something else for {reference}")
        return bundle, decode_policy(told)

    async def policy(self, reference: Reference) -> PackagePolicy:
        """Ask the tracker what holds for a package. Raises NotFound, Refused, Corrupt,
        Unavailable."""
        return decode_policy(await self.get("/v1/policies", self._about(reference)))

    def _about(self, reference: Reference) -> dict[str, str]:
        return {"reference": str(reference), "zone": self._hello.zone}

    async def resolve(self, reference: Reference) -> Descriptor:
        """Ask the tracker what a reference names. Raises NotFound, Corrupt, Unavailable."""
        return _descriptor(await self.get("/v1/resolve", {"reference": str(reference)}))

    async def layer(self, digest: Digest) -> Descriptor:
        """Ask the tracker for the descriptor of a layer that it met in some manifest. Raises
        NotFound, Unavailable."""
        return _descriptor(await self.get(f"/v1/layers/{digest}", {}))

    async def content(self, digest: Digest, *, manifest: bool = False) -> bytes:
        """Ask the tracker for a small blob; verified. Raises NotFound, Corrupt, Unavailable."""
        data = await self.get(f"/v1/content/{digest}", {"as": "manifest"} if manifest else {})
        if digest_of(data) != digest:
            raise Corrupt(f"the tracker {self.url} sent something else for {digest}")
        return data

    # -- session

    async def _one_session(self, http: aiohttp.ClientSession) -> bool:
        """Returns whether a tracker welcomed this host and kept it for a while."""
        loop = asyncio.get_running_loop()
        welcomed_at = float("inf")
        try:
            async with http.ws_connect(
                self._url + "/v1/session",
                heartbeat=HEARTBEAT_S,
                max_msg_size=MESSAGE_BYTES_MAX,
                timeout=aiohttp.ClientWSTimeout(ws_close=1.0),
            ) as socket:
                welcome = await self._say_hello(socket)
                welcomed_at = loop.time()
                await self._talk(socket, welcome)
        except (P2PDistError, aiohttp.ClientError, TimeoutError, OSError) as error:
            self._note_problem(str(error) or type(error).__name__)
        except Exception as error:
            # Whatever a tracker says, the next try may find a better one; without this loop the
            # host would be alone for good.
            logger.exception("the session with tracker %s failed", self.url)
            self._note_problem(f"unexpected {type(error).__name__}")
        finally:
            if self.connected:
                self.connected = False
                self._welcomed.clear()
                logger.warning("the tracker %s is away; what runs goes on", self.url)
                self._on_change(False)
        return loop.time() - welcomed_at >= SETTLED_S

    def _note_problem(self, text: str) -> None:
        """Say what is wrong with a tracker, once for as long as it stays the same."""
        text = text.replace(self._url, self.url)[:500]
        level = logging.DEBUG if text == self.problem else logging.WARNING
        logger.log(level, "tracker %s: %s", self.url, text)
        self.problem = text

    async def _say_hello(self, socket: aiohttp.ClientWebSocketResponse) -> Welcome:
        asked_at = time.monotonic()
        await socket.send_frame(encode(self._hello_over(socket)), aiohttp.WSMsgType.TEXT)
        welcome = await asyncio.wait_for(self._next(socket), WELCOME_TIMEOUT_S)
        on_the_way_s = (time.monotonic() - asked_at) / 2
        if isinstance(welcome, Reject):
            raise from_problem(welcome.problem)
        if not isinstance(welcome, Welcome):
            raise Unavailable("it does not answer as a tracker does")
        if welcome.protocol != PROTOCOL_VERSION:
            raise P2PDistError(f"it speaks protocol {welcome.protocol}, this agent {PROTOCOL_VERSION}")
        self._compare_clocks(welcome, on_the_way_s)
        return welcome

    def _compare_clocks(self, welcome: Welcome, on_the_way_s: float) -> None:
        self.clock_ahead_s = time.time() - welcome.time - on_the_way_s if welcome.time else None
        if self.clock_ahead_s is not None and abs(self.clock_ahead_s) > CLOCK_OFF_S:
            way = "ahead of" if self.clock_ahead_s > 0 else "behind"
            logger.warning(
                "the clock of this host is %.0f s %s that of the tracker %s. Run chrony or systemd-timesyncd on both",
                abs(self.clock_ahead_s),
                way,
                self.url,
            )

    def _hello_over(self, socket: aiohttp.ClientWebSocketResponse) -> Hello:
        local = socket.get_extra_info("sockname")
        if self.listens is None or not local:
            return self._hello
        host = address_for_others(local[0], self.listens[0])
        self.address = f"[{host}]:{self.listens[1]}" if ":" in host else f"{host}:{self.listens[1]}"
        return msgspec.structs.replace(self._hello, address=self.address)

    async def _talk(self, socket: aiohttp.ClientWebSocketResponse, welcome: Welcome) -> None:
        """Until either side ends the session; raises why."""
        self.origin = welcome.origin
        self._set_pace(welcome.report_interval_s)
        self._outbox = asyncio.Queue(OUTBOX_MAX)
        self._broken = asyncio.get_running_loop().create_future()
        self.connected, self.problem = True, ""
        self._on_change(True)
        holdings = self._holdings()
        for start in range(0, len(holdings), BLOBS_PER_MESSAGE_MAX):
            self.send(Holdings(tuple(holdings[start : start + BLOBS_PER_MESSAGE_MAX])))
        self._welcomed.set()
        logger.info("the tracker %s answers", self.url)
        tasks = [asyncio.create_task(work) for work in (self._read(socket), self._write(socket))]
        self._report_later(self._interval_s * random.random())
        try:
            done, _ = await asyncio.wait([*tasks, self._broken], return_when=asyncio.FIRST_COMPLETED)
            for ended in done:
                ended.result()
        finally:
            self._broken.cancel()
            if self._reporting is not None:
                self._reporting.cancel()
                self._reporting = None
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _read(self, socket: aiohttp.ClientWebSocketResponse) -> NoReturn:
        last_word: P2PDistError | None = None
        while True:
            try:
                message = await self._next(socket)
            except aiohttp.ClientError as ended:
                raise last_word or ended from None
            if isinstance(message, Reject) and message.blob is None:
                last_word = from_problem(message.problem)
            if isinstance(message, Pace):
                self._set_pace(message.report_interval_s)
            elif isinstance(message, Assign | OriginShare | Keep | Release | Reject):
                self._on_message(message)

    async def _next(self, socket: aiohttp.ClientWebSocketResponse) -> FromTracker:
        frame = await socket.receive()
        if frame.type not in (aiohttp.WSMsgType.TEXT, aiohttp.WSMsgType.BINARY):
            raise aiohttp.ClientConnectionError("the session ended")
        return decode_from_tracker(frame.data)

    async def _write(self, socket: aiohttp.ClientWebSocketResponse) -> NoReturn:
        while True:
            waiting = [await self._outbox.get()]
            if isinstance(waiting[0], Holding | Report):
                await asyncio.sleep(GATHER_S)
            while not self._outbox.empty():
                waiting.append(self._outbox.get_nowait())
            for message in gathered(waiting):
                await socket.send_frame(encode(message), aiohttp.WSMsgType.TEXT)

    def _set_pace(self, interval_s: float) -> None:
        self._interval_s = min(max(interval_s, REPORT_S_MIN), REPORT_S_MAX)
        if self._reporting is not None:
            # A new pace counts at once: who is asked to report often and sleeps on is taken for
            # silent.
            self._reporting.cancel()
            self._report_later(self._interval_s * random.random())

    def _report_later(self, delay_s: float) -> None:
        self._reporting = asyncio.get_running_loop().call_later(delay_s, self._report_now)

    def _report_now(self) -> None:
        """Say what is new, when something is. That this host lives the WebSocket's own heartbeat
        shows."""
        try:
            report = self._report()
        except Exception as error:
            if self._broken is not None and not self._broken.done():
                self._broken.set_exception(error)
            return
        if report is not None:
            self.send(report)
        self._report_later(self._interval_s)

    # -- small reads

    async def get(self, path: str, query: dict[str, str]) -> bytes:
        """What the tracker answers to a GET. Raises what its problem document says, Corrupt,
        Unavailable."""
        return (await self._exchange(path, query, {}))[1]

    async def _exchange(self, path: str, query: dict[str, str], headers: dict[str, str]) -> tuple[int, bytes, str]:
        """Status, 200 or 304, body and policy of a GET; raises what a problem document says."""
        if self._http is None or not self._url:
            raise Unavailable("this agent knows no tracker", remedy="Give it --tracker")
        headers, timeout = headers | passed_on(), aiohttp.ClientTimeout(total=REQUEST_TIMEOUT_S, connect=3.0)
        try:
            async with self._http.get(self._url + path, params=query, headers=headers, timeout=timeout) as answer:
                body = await _limited(answer)
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            said = str(error).replace(self._url, self.url) or type(error).__name__
            raise Unavailable(f"the tracker {self.url} does not answer: {said}") from error
        if answer.status not in (200, 304):
            raise _problem(body, f"the tracker {self.url} answered {answer.status}")
        return answer.status, body, answer.headers.get(POLICY_HEADER, "{}")


def _checked(url: str) -> str:
    """Raises UsageError unless `url` can be the URL of a tracker."""
    try:
        parts = urlsplit(url)
        known = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        known = False
    if not known or parts.query or parts.fragment or any(mark.isspace() for mark in url):
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
