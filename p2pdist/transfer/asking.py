"""Asks another agent for a stream, over a connection that is open."""

from __future__ import annotations

import socket
from collections.abc import Mapping

import msgspec

from p2pdist.model.messages import StreamRequest
from p2pdist.model.plan import Source
from p2pdist.transfer.answer import MalformedAnswer, read_head
from p2pdist.transfer.frames import STREAM_PATH, STREAM_TYPE
from p2pdist.transfer.stream_events import refusal


def ask(
    connection: socket.socket, source: Source, request: StreamRequest, fields: Mapping[str, str], length: int | None
) -> bool:
    """Send a request with these header fields and read the answer's head. With the `length` that
    the stream will have the connection may serve others after it; returns whether it does. Raises
    Ended when `source` refuses, MalformedAnswer, EndOfConnection and OSError."""
    body = msgspec.json.encode(request)
    head = (
        f"POST {STREAM_PATH} HTTP/1.1\r\nHost: {source.address}\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(body)}\r\nAccept: {STREAM_TYPE}\r\n"
        + "".join(f"{key}: {value}\r\n" for key, value in fields.items())
    )
    head += "Connection: close\r\n\r\n" if length is None else "\r\n"
    connection.sendall(head.encode("ascii") + body)
    answer = read_head(connection)
    if answer.status != 200:
        raise refusal(connection, answer, source)
    if answer.media_type() != STREAM_TYPE:
        raise MalformedAnswer(f"the answer is {answer.media_type()[:60]!r}, not a stream")
    stated = answer.fields.get("content-length")
    if "transfer-encoding" in answer.fields or "content-encoding" in answer.fields:
        raise MalformedAnswer("the answer is framed or encoded by HTTP, which a stream is not")
    if stated is not None and (length is None or stated != str(length)):
        raise MalformedAnswer(f"the answer is to have {stated[:20]} bytes, and the stream has {length or 0}")
    return stated is not None and answer.fields.get("connection", "").lower() != "close"
