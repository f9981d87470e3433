"""Whether the tracker of a session does anything: a process that hangs keeps its connections, since
its host does that.

A tracker that has much to do may be late with any answer, so lateness says nothing. One that does
not even say within PROBE_S that it works is taken to hang, until anything comes from it. A probe is
made only where an answer is late and something else can be done without it.
"""

from __future__ import annotations

import asyncio
import logging
import ssl
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Protocol, TypeVar

import aiohttp

from p2pdist.model.errors import Unavailable
from p2pdist.transfer.names import NAMES, Resolver

PROBE_S = 0.7
LATE_S = 0.25
"""An answer of a tracker that takes longer has this host see whether the tracker hangs."""

Value = TypeVar("Value")
logger = logging.getLogger(__name__)


class Attention:
    """What is known of the tracker of a session. On the event loop."""

    def __init__(self) -> None:
        self._ask: Callable[[], Awaitable[bool]] | None = None
        """Asks the tracker that is connected; None while there is none."""
        self._heard_at = self._silent_at = float("-inf")
        """When anything came from the tracker last, and when a probe got no answer last, in the
        event loop's time."""
        self._probe: asyncio.Task[bool] | None = None
        """The probe under way."""
        self._looks: set[asyncio.Task[bool]] = set()
        """Looks whether a silent tracker answers again."""

    def opened(self, url: str, context: ssl.SSLContext | bool, name: str | None) -> None:
        """The tracker at `url` has welcomed this host; its certificate is made out to `name`."""
        self._ask = partial(self._ask_at, url, context, name)
        self.heard()

    def closed(self) -> None:
        """No tracker is connected any more."""
        self._ask = None

    def heard(self) -> None:
        """Something has come from the tracker."""
        self._heard_at = asyncio.get_running_loop().time()

    @property
    def answers(self) -> bool:
        """Whether a tracker is connected, and does not hang as far as is known."""
        return self._ask is not None and self._heard_at >= self._silent_at

    @property
    def silent(self) -> bool:
        """Whether a tracker is connected that left the last probe without an answer, and has said
        nothing since."""
        return self._ask is not None and self._heard_at < self._silent_at

    async def responds(self) -> bool:
        """Whether a tracker is connected and does anything, asked now and known within PROBE_S.
        Callers of one moment share the question."""
        if self._probe is None and self._ask is not None:
            self._probe = asyncio.ensure_future(self._ask())
            self._probe.add_done_callback(self._asked)
        return self._probe is not None and await asyncio.shield(self._probe)

    def look(self) -> None:
        """Have it be seen later whether a silent tracker answers again."""
        self._looks.add(look := asyncio.create_task(self.responds()))
        look.add_done_callback(self._looks.discard)

    def _asked(self, probe: asyncio.Future[bool]) -> None:
        self._probe = None
        if not probe.cancelled():
            probe.exception()  # marks it as seen: the callers may have gone away

    async def _ask_at(self, url: str, context: ssl.SSLContext | bool, name: str | None) -> bool:
        began, timeout = asyncio.get_running_loop().time(), aiohttp.ClientTimeout(total=PROBE_S)
        # A connection of its own: questions that wait for their answers may have taken all others.
        connector = aiohttp.TCPConnector(resolver=Resolver(NAMES), use_dns_cache=False)
        try:
            async with (
                aiohttp.ClientSession(connector=connector, timeout=timeout) as http,
                http.get(url + "/healthz", ssl=context, server_hostname=name),
            ):
                self.heard()
        except (aiohttp.ClientError, TimeoutError, OSError):
            if self._heard_at < began:
                if not self.silent:
                    logger.warning("the tracker keeps its connections, and does not answer")
                self._silent_at = asyncio.get_running_loop().time()
                return False
        return True


class WatchedSession(Protocol):
    """A session with a tracker."""

    attention: Attention

    @property
    def url(self) -> str:
        """That of the tracker, for messages."""


async def answer_unless_silent(
    session: WatchedSession, question: Callable[[], Awaitable[Value]], wait_s: float | None = None
) -> Value:
    """What the tracker of a session answers, for a caller that can go on without it. Raises what
    `question` raises, and Unavailable too where that takes longer than `wait_s`, and soon where the
    tracker hangs."""
    attention, loop = session.attention, asyncio.get_running_loop()
    if attention.silent:
        attention.look()
        raise Unavailable(f"the tracker {session.url} does not answer")
    deadline = loop.time() + wait_s if wait_s is not None else None
    asked = asyncio.ensure_future(question())
    try:
        await asyncio.wait([asked], timeout=LATE_S)
        if not asked.done():
            async with asyncio.timeout_at(deadline):
                if not await attention.responds() and not asked.done():
                    raise Unavailable(f"the tracker {session.url} does not answer")
                return await asked
        return asked.result()
    except TimeoutError as error:
        raise Unavailable(f"the tracker {session.url} does not answer within {wait_s} s") from error
    finally:
        asked.cancel()
