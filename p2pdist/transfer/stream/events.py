"""The events of a stream that is being received, and the mailbox that carries them from receiver
threads to an event loop: many posts, few wake-ups.
"""

from __future__ import annotations

import asyncio
import contextvars
import socket
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, Literal, TypeVar

from msgspec import Struct

from p2pdist.model.errors import P2PDistError, Refused
from p2pdist.model.plan import Source
from p2pdist.transfer.stream.response import Head, MalformedResponse, read_problem

Letter = TypeVar("Letter")

PAUSE_S = 0.001
"""How long the mailbox gathers letters when they come fast. uvloop's timers cannot be shorter."""


class Mailbox(Generic[Letter]):
    """Collects what threads post and hands it to `deliver` on the loop, in order of posting, in
    batches.

    A wake-up of the loop costs a system call and two switches of threads. So a letter that comes
    after a silence is delivered at once; one that comes within `pause_s` of the last delivery waits
    for the rest of that time, and as long as letters come that fast a timer of the loop collects
    them, and posting wakes nothing. The queue is bounded by its writers: a stream posts one event
    for each piece and one when it closes. `deliver` never gets an empty batch, and runs in
    `context`, that of the mailbox's creator, so that it works and logs for the same request.
    """

    def __init__(
        self, loop: asyncio.AbstractEventLoop, deliver: Callable[[list[Letter]], None], *, pause_s: float = PAUSE_S
    ) -> None:
        self.loop = loop
        self._deliver = deliver
        self._pause_s = pause_s
        self.context = contextvars.copy_context()
        self._letters: deque[Letter] = deque()
        self._awake = False
        """Whether the loop will look at the letters without being woken; written by any thread."""
        self._gathering = False
        """Whether a timer collects the letters."""
        self._quiet_until = 0.0
        """Loop time before which no batch is delivered."""

    def post(self, letter: Letter) -> None:
        """Add a letter; called from any thread. Letters are dropped once the loop has closed."""
        self._letters.append(letter)
        # Without a lock two threads may both see False and wake the loop twice, which costs a look
        # at an empty queue. None is lost: the loop looks once more after it has cleared the flag.
        if not self._awake:
            self._awake = True
            try:
                self.loop.call_soon_threadsafe(self._woken, context=self.context)
            except RuntimeError:
                if not self.loop.is_closed():
                    raise

    def deliver(self, letter: Letter) -> None:
        """Deliver a letter now, after the ones that were posted before; called on the loop, in
        `context`, and not from `deliver` itself."""
        if self._letters:
            self._letters.append(letter)
            self._open()
        else:
            self._deliver([letter])

    def _woken(self) -> None:
        if self._gathering:
            return
        if self.loop.time() < self._quiet_until:
            self._gathering = True
            self.loop.call_at(self._quiet_until, self._gathered)
            return
        self._awake = False  # before the letters are taken: a post from now on wakes the loop again
        self._open()

    def _gathered(self) -> None:
        if not self._letters:
            self._awake = False
            if not self._letters:
                self._gathering = False
                return
            self._awake = True
        self.loop.call_later(self._pause_s, self._gathered)
        self._open()

    def _open(self) -> None:
        self._quiet_until = self.loop.time() + self._pause_s
        batch = [self._letters.popleft() for _ in range(len(self._letters))]
        if batch:
            self._deliver(batch)


PROBLEM_TIMEOUT_S = 2.0

Ending = Literal[
    "done", "closed", "refused", "denied", "reset", "short", "corrupt", "stale", "missing", "busy", "protocol", "failed"
]
"""Why a stream ended: all was received; this side closed it; the peer refused, or could not be
reached; does not take this host's ticket; broke the connection; ended early; sent wrong bytes; sent
a piece whose hash is not listed, or is another one since a moment ago; lacks the blob; is over its
limits; broke the protocol; this side failed."""


class PieceReceived(Struct, frozen=True, gc=False):
    """A whole piece was received; `ok` says whether it was verified and stored."""

    stream: int
    piece: int
    ok: bool


@dataclass(frozen=True, slots=True)
class StreamClosed:
    """The last event of a stream. `error` is the failure of this side ("failed") or the problem
    that the peer answered with."""

    stream: int
    reason: Ending
    detail: str = ""
    error: P2PDistError | None = None


StreamEvent = PieceReceived | StreamClosed


class Ended(Exception):
    """Ends a stream from within the thread or loop that receives it."""

    def __init__(self, reason: Ending, detail: str = "", error: P2PDistError | None = None) -> None:
        super().__init__(detail)
        self.reason: Ending = reason
        self.detail = detail
        self.error = error


def refusal(connection: socket.socket, response: Head, source: Source) -> Ended:
    """How a stream ends when `source` responds with a problem. Raises MalformedResponse and
    OSError."""
    connection.settimeout(PROBLEM_TIMEOUT_S)
    problem = read_problem(connection, response)
    detail = f"{source}: {problem.what[:500]}"
    match response.status:
        case 404:
            return Ended("missing", detail, problem)
        case 429 | 503:
            return Ended("busy", detail, problem)
        case 401 | 403:
            return Ended("denied", detail, Refused(detail))
        case status if status >= 400:
            return Ended("refused", detail, problem)
    raise MalformedResponse(f"the answer has status {response.status}")
