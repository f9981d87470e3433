"""What an agent and the supervisor of a lazy view say to each other, over a Unix socket that keeps
messages apart (SOCK_SEQPACKET).

Offsets are those of the device. Where a view has more files than that (mount/lazy/fuse.py), they
count as if each lay behind the one before, from a block on (`begins`).

The supervisor says GREETING first, with the descriptor through which the agent fills the device and
that of the fanotify group, and how many readers it has refused so far because nothing filled what
they waited for; then FAULT for each reader that waits, those of before among them, and EXPIRED for
each that it refuses. It says READ, without a number, of a reader that found all it reads; that may
be lost. The agent says ANSWER for a reader whose bytes are in the device (error 0), or will not be;
WHOLE when nothing is missing any more; DROP when the view is gone. After the last two the
supervisor ends.
"""

from __future__ import annotations

import os
import socket
import struct
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path

GREETING, FAULT, EXPIRED, READ = 1, 2, 3, 4
ANSWER, WHOLE, DROP = 1, 2, 3

NOTICE = struct.Struct("=IQQQ")
"""From the supervisor: kind, number, offset, count. Each reader has a number of its own: the answer
to an earlier one, which may come late or twice, is not taken for the answer to another."""

ORDER = struct.Struct("=IQI")
"""From the agent: kind, number, error."""

SOCKET, DEVICE, MARK = "socket", "device", "whole"
"""Files of a lazy view: the socket, the device, and the mark that the device lacks nothing."""

CONNECT_S = 5.0
BLOCK_BYTES = 4096


def begins(sizes: Sequence[int]) -> list[int]:
    """Where files of these sizes begin, in the counting of the protocol."""
    return list(accumulate((size + -size % BLOCK_BYTES for size in sizes[:-1]), initial=0)) if sizes else []


@dataclass(frozen=True, slots=True)
class Notice:
    """A message of the supervisor."""

    kind: int
    number: int
    offset: int
    count: int

    @classmethod
    def parse(cls, data: bytes) -> Notice | None:
        """None for what is no such message."""
        return cls(*NOTICE.unpack(data)) if len(data) == NOTICE.size else None


@dataclass(frozen=True, slots=True)
class Greeting:
    """A connection to a supervisor, and what it gave: descriptors for filling the device and of the
    group that is asked, which the caller closes; how many readers were refused."""

    connection: socket.socket
    filler: int
    group: int
    refused: int


def connect(directory: Path) -> Greeting:
    """Connect to the supervisor of the view in `directory`. Raises OSError where none is there."""
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC)
    try:
        connection.settimeout(CONNECT_S)
        # The path of a socket may have 107 bytes, that of a store is longer.
        place = os.open(directory, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            connection.connect(f"/proc/self/fd/{place}/{SOCKET}")
        finally:
            os.close(place)
        data, descriptors, _, _ = socket.recv_fds(connection, NOTICE.size, 2)
        notice = Notice.parse(data)
        if notice is None or notice.kind != GREETING or len(descriptors) != 2:
            raise ConnectionError("the supervisor of a lazy view has ended")
        return Greeting(connection, descriptors[0], descriptors[1], notice.count)
    except BaseException:
        connection.close()
        raise


def dismiss(directory: Path, kind: int = DROP) -> None:
    """Have the supervisor of a view that is gone, or WHOLE, end, if there is one. Returns when it
    has, or has not within CONNECT_S."""
    with suppress(OSError):
        greeting = connect(directory)
        os.close(greeting.filler)
        os.close(greeting.group)
        with greeting.connection as connection:
            connection.send(ORDER.pack(kind, 0, 0))
            # Closed at once, a connection with unread notices would be reset, and the order lost.
            while connection.recv(NOTICE.size):
                pass
