"""The head of an HTTP/1.1 response, read from a blocking socket without taking one byte of what
follows it (RFC 9112).

Only what an agent sends is understood: no folded lines, no chunked bodies. MSG_PEEK looks at bytes
before they are taken, so frames that have arrived with the head stay in the socket. TLS has no such
look: there the reader takes only as many bytes at a time as the blank line must still have.
"""

from __future__ import annotations

import re
import socket
from dataclasses import dataclass

import msgspec

from p2pdist.model.errors import UNDECODABLE, P2PDistError, Unavailable, from_problem
from p2pdist.transfer.tls import TlsConnection

HEAD_BYTES_MAX = 16 << 10
PROBLEM_BYTES_MAX = 64 << 10

_STATUS_LINE = re.compile(rb"HTTP/1\.[01] ([1-9][0-9]{2})(?: [^\r\n]*)?\Z")
_FIELD = re.compile(rb"([!#$%&'*+.^_`|~0-9A-Za-z-]+):[ \t]*([^\r\n\0]*?)[ \t]*\Z")
_END = b"\r\n\r\n"
_TLS_RECORDS = (b"\x15\x03", b"\x16\x03")
"""How alerts and handshakes begin (RFC 8446, 5.1)."""


class MalformedResponse(Exception):
    """What came is not an HTTP/1.x response that fits the limits."""


class EndOfConnection(Exception):
    """The connection ended before the head did."""


@dataclass(frozen=True, slots=True)
class Head:
    """Status and header fields; field names are lower case, and a repeated field is joined with
    commas (RFC 9110, 5.3)."""

    status: int
    fields: dict[str, str]

    def media_type(self) -> str:
        return self.fields.get("content-type", "").partition(";")[0].strip().lower()


def read_head(connection: socket.socket) -> Head:
    """Take exactly the head of a response from a blocking socket; raises MalformedResponse,
    EndOfConnection and OSError."""
    taken = b""
    while not taken.endswith(_END):
        if len(taken) >= HEAD_BYTES_MAX:
            raise MalformedResponse(f"the head of the answer is longer than {HEAD_BYTES_MAX} bytes")
        count = _until_end(taken) if isinstance(connection, TlsConnection) else _seen_of_head(connection, taken)
        taken += _take(connection, count)
    return parse_head(taken)


def _until_end(taken: bytes) -> int:
    """How many bytes the head has at least, beyond the ones that were taken."""
    return next(len(_END) - length for length in range(len(_END) - 1, -1, -1) if taken.endswith(_END[:length]))


def _seen_of_head(connection: socket.socket, taken: bytes) -> int:
    """How many bytes of the head have come and were not taken."""
    seen = connection.recv(HEAD_BYTES_MAX, socket.MSG_PEEK)
    if not seen:
        raise EndOfConnection
    if not taken and seen[:2] in _TLS_RECORDS:
        raise MalformedResponse("the answer is TLS, which this agent was not set up to speak (--tls-cert)")
    end = (taken + seen).find(_END, max(0, len(taken) - len(_END) + 1))
    return end + len(_END) - len(taken) if end >= 0 else len(seen)


def _take(connection: socket.socket, count: int) -> bytes:
    data = b""
    while len(data) < count:
        part = connection.recv(count - len(data))
        if not part:
            raise EndOfConnection
        data += part
    return data


def parse_head(data: bytes) -> Head:
    """Parse a whole head, blank line included; raises MalformedResponse."""
    lines = data.removesuffix(_END).split(b"\r\n")
    status = _STATUS_LINE.match(lines[0])
    if status is None:
        raise MalformedResponse(f"the answer begins {lines[0][:60]!r}, which is not HTTP/1.x")
    fields: dict[str, str] = {}
    for line in lines[1:]:
        field = _FIELD.match(line)
        if field is None:
            raise MalformedResponse(f"the answer has a malformed header line {line[:60]!r}")
        name, value = field[1].decode("ascii").lower(), field[2].decode("latin-1")
        fields[name] = f"{fields[name]}, {value}" if name in fields else value
    return Head(int(status[1]), fields)


def read_problem(connection: socket.socket, head: Head) -> P2PDistError:
    """The failure that a response with an error status describes. The bare status replaces a body
    that is no problem document, is over the limit or does not come in time."""
    bare = Unavailable(f"the peer answered with status {head.status}")
    length = head.fields.get("content-length", "")
    if head.media_type() != "application/problem+json" or not length.isdecimal() or len(length) > 6:
        return bare
    if int(length) > PROBLEM_BYTES_MAX:
        return bare
    try:
        body = msgspec.json.decode(_take(connection, int(length)), type=dict[str, object])
        return from_problem(body)
    except (*UNDECODABLE, OSError, EndOfConnection, TypeError, ValueError):
        return bare
