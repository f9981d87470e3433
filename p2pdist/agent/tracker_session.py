"""The agent's session with a tracker: one WebSocket that is opened again whenever it breaks, and small reads over HTTP.

Losing the tracker stops nothing that runs: messages sent meanwhile are dropped, because after a new session opens the agent says all
it holds again.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable, Sequence
from typing import Any

import aiohttp
import msgspec

from p2pdist.model.digest import Digest, digest_of, parse_digest
from p2pdist.model.errors import UNDECODABLE, Corrupt, P2PDistError, Unavailable, from_problem
from p2pdist.model.messages import (
    BLOBS_PER_MESSAGE_MAX,
    MESSAGE_BYTES_MAX,
    PROTOCOL_VERSION,
    Assign,
    FromAgent,
    FromTracker,
    Hello,
    Holding,
    Holdings,
    Reject,
    Report,
    Welcome,
    decode_from_tracker,
    encode,
)
from p2pdist.model.package import SMALL_BYTES_MAX, Descriptor, Reference

RETRY_FIRST_S = 0.2
RETRY_MAX_S = 5.0
HEARTBEAT_S = 10.0
IDLE_REPORT_S = 5.0
REQUEST_TIMEOUT_S = 30.0

_logger = logging.getLogger(__name__)


class TrackerSession:
    """See the module's text.

    `holdings` says what the host holds and wants, `report` what is new since the last report (None: nothing), `on_message` hears Assign and
    Reject, `on_change` whether a tracker answers.
    """

    def __init__(
        self,
        urls: Sequence[str],
        hello: Hello,
        *,
        holdings: Callable[[], list[Holding]],
        report: Callable[[], Report | None],
        on_message: Callable[[Assign | Reject], None],
        on_change: Callable[[bool], None],
    ) -> None:
        self._urls = [url.rstrip("/") for url in urls]
        self._hello = hello
        self._holdings, self._report = holdings, report
        self._on_message, self._on_change = on_message, on_change
        self._http: aiohttp.ClientSession | None = None
        self._socket: aiohttp.ClientWebSocketResponse | None = None
        self._outbox: asyncio.Queue[FromAgent] = asyncio.Queue()
        self._welcomed = asyncio.Event()
        self.url = self._urls[0] if self._urls else ""
        self.origin = ""
        self.connected = False

    @property
    def urls(self) -> list[str]:
        return self._urls

    async def run(self) -> None:
        """Keep a session open until cancelled."""
        pause = RETRY_FIRST_S
        turn = 0
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=16)) as http:
            self._http = http
            try:
                while self._urls:
                    self.url = self._urls[turn % len(self._urls)]
                    if await self._one_session(http):
                        pause = RETRY_FIRST_S
                    turn += 1
                    await asyncio.sleep(pause * random.uniform(0.5, 1.0))
                    pause = min(RETRY_MAX_S, pause * 1.7)
            finally:
                self._http = None

    def send(self, message: FromAgent) -> None:
        """Send a message if a tracker answers."""
        if self.connected:
            self._outbox.put_nowait(message)

    async def wait_connected(self, timeout_s: float) -> bool:
        """Wait until a tracker answers; False when none does in time."""
        try:
            await asyncio.wait_for(self._welcomed.wait(), timeout_s)
        except TimeoutError:
            return False
        return True

    async def resolve(self, reference: Reference) -> Descriptor:
        """Ask the tracker what a reference names. Raises NotFound, Unavailable."""
        return _descriptor(await self._get("/v1/resolve", {"reference": str(reference)}))

    async def layer(self, digest: Digest) -> Descriptor:
        """Ask the tracker for the descriptor of a layer that it met in some manifest. Raises NotFound, Unavailable."""
        return _descriptor(await self._get(f"/v1/layers/{digest}", {}))

    async def content(self, digest: Digest, *, manifest: bool = False) -> bytes:
        """Ask the tracker for a small blob; verified. Raises NotFound, Corrupt, Unavailable."""
        data = await self._get(f"/v1/content/{digest}", {"as": "manifest"} if manifest else {})
        if digest_of(data) != digest:
            raise Corrupt(f"the tracker {self.url} sent something else for {digest}")
        return data

    # -- session

    async def _one_session(self, http: aiohttp.ClientSession) -> bool:
        """Returns whether a tracker welcomed this host."""
        welcomed = False
        try:
            async with http.ws_connect(
                self.url + "/v1/session",
                heartbeat=HEARTBEAT_S,
                max_msg_size=MESSAGE_BYTES_MAX,
                timeout=aiohttp.ClientWSTimeout(ws_close=1.0),
            ) as socket:
                await socket.send_str(encode(self._hello).decode())
                welcome = await asyncio.wait_for(self._next(socket), 10.0)
                if not isinstance(welcome, Welcome):
                    raise from_problem(welcome.problem) if isinstance(welcome, Reject) else Unavailable("no welcome")
                welcomed = True
                await self._talk(socket, welcome)
        except P2PDistError as error:
            _logger.error("tracker %s: %s", self.url, error)
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            _logger.debug("tracker %s: %r", self.url, error)
        finally:
            if self.connected:
                self.connected = False
                self._welcomed.clear()
                _logger.warning("the tracker %s is away; what runs goes on", self.url)
                self._on_change(False)
        return welcomed

    async def _talk(self, socket: aiohttp.ClientWebSocketResponse, welcome: Welcome) -> None:
        if welcome.protocol != PROTOCOL_VERSION:
            raise P2PDistError(f"the tracker speaks protocol {welcome.protocol}, this agent {PROTOCOL_VERSION}")
        self.origin = welcome.origin
        self._outbox = asyncio.Queue()
        self.connected = True
        self._on_change(True)
        holdings = self._holdings()
        for start in range(0, len(holdings), BLOBS_PER_MESSAGE_MAX):
            self.send(Holdings(tuple(holdings[start : start + BLOBS_PER_MESSAGE_MAX])))
        self._welcomed.set()
        _logger.info("the tracker %s answers", self.url)
        tasks = [asyncio.create_task(self._write(socket)), asyncio.create_task(self._report_often(welcome))]
        try:
            while True:
                message = await self._next(socket)
                if isinstance(message, Assign | Reject):
                    self._on_message(message)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _next(self, socket: aiohttp.ClientWebSocketResponse) -> FromTracker:
        frame = await socket.receive()
        if frame.type not in (aiohttp.WSMsgType.TEXT, aiohttp.WSMsgType.BINARY):
            raise aiohttp.ClientConnectionError("the session ended")
        return decode_from_tracker(frame.data)

    async def _write(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        try:
            while True:
                await socket.send_str(encode(await self._outbox.get()).decode())
        except (aiohttp.ClientError, ConnectionError) as error:
            _logger.debug("the session broke while writing: %r", error)
            await socket.close()

    async def _report_often(self, welcome: Welcome) -> None:
        interval = min(max(welcome.report_interval_s, 0.05), 60.0)
        quiet = 0.0
        await asyncio.sleep(interval * random.random())
        while True:
            report = self._report()
            quiet += interval
            if report is not None or quiet >= IDLE_REPORT_S:
                self.send(report or Report())
                quiet = 0.0
            await asyncio.sleep(interval)

    # -- small reads

    async def _get(self, path: str, query: dict[str, str]) -> bytes:
        if self._http is None or not self._urls:
            raise Unavailable("this agent knows no tracker", remedy="Give it --tracker")
        timeout = aiohttp.ClientTimeout(total=REQUEST_TIMEOUT_S, connect=3.0)
        try:
            async with self._http.get(self.url + path, params=query, timeout=timeout) as answer:
                body = await _limited(answer)
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise Unavailable(f"the tracker {self.url} does not answer: {error}") from error
        if answer.status != 200:
            raise _problem(body, f"the tracker {self.url} answered {answer.status}")
        return body


async def _limited(answer: aiohttp.ClientResponse) -> bytes:
    body = bytearray()
    async for chunk in answer.content.iter_chunked(1 << 16):
        body += chunk
        if len(body) > SMALL_BYTES_MAX:
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
