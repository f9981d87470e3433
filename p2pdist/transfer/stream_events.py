"""What is told of a stream that is being received, and how it ends."""

from __future__ import annotations

import socket
from dataclasses import dataclass
from typing import Literal

from msgspec import Struct

from p2pdist.model.errors import P2PDistError, Refused
from p2pdist.model.plan import Source
from p2pdist.transfer.answer import Head, MalformedAnswer, read_problem

PROBLEM_TIMEOUT_S = 2.0

Ending = Literal["done", "closed", "refused", "reset", "short", "corrupt", "missing", "busy", "protocol", "failed"]
"""Why a stream ended: all was received; it was closed from this side; the peer refused, or could
not be reached; broke the connection; ended early; sent wrong bytes; lacks the blob; is over its
limits; broke the protocol; this side failed."""


class PieceReceived(Struct, frozen=True, gc=False):
    """A piece has come in whole; `ok` says whether it was verified and stored."""

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
    """Ends a stream from within, wherever it is being received."""

    def __init__(self, reason: Ending, detail: str = "", error: P2PDistError | None = None) -> None:
        super().__init__(detail)
        self.reason: Ending = reason
        self.detail = detail
        self.error = error


def refusal(connection: socket.socket, answer: Head, source: Source) -> Ended:
    """How a stream ends that `source` answers with a problem. Raises MalformedAnswer, and
    OSError."""
    connection.settimeout(PROBLEM_TIMEOUT_S)
    problem = read_problem(connection, answer)
    detail = f"{source}: {problem.what[:500]}"
    match answer.status:
        case 404:
            return Ended("missing", detail, problem)
        case 429 | 503:
            return Ended("busy", detail, problem)
        case status if status >= 400:
            return Ended("refused", detail, Refused(detail) if status in (401, 403) else problem)
    raise MalformedAnswer(f"the answer has status {answer.status}")
