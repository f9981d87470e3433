"""Sessions of agents: one WebSocket each, JSON documents both ways (see
p2pdist/model/messages.py).

A connection costs a descriptor from its first packet on, long before a request shows what it is
for. So a tracker bounds the connections that are no sessions (p2pdist/transfer/connections.py), far
above what ten thousand agents behind one address need that connect at one moment; a connection that
has become a session counts no longer.
"""

from __future__ import annotations

import asyncio
import logging
import resource
from collections.abc import Iterator
from typing import Literal

from aiohttp import WSCloseCode, WSMessage, WSMsgType, web
from aiohttp.http import WSMessageTextBytes

from p2pdist.model.errors import P2PDistError, UsageError
from p2pdist.model.messages import (
    MESSAGE_BYTES_MAX,
    FromAgent,
    FromTracker,
    Hello,
    Holding,
    Holdings,
    Reject,
    decode_from_agent,
    encode,
)
from p2pdist.transfer.connections import ConnectionBook, release
from p2pdist.transfer.guard import identity_of, peer_of
from p2pdist.transfer.input import MESSAGES, Input, input_of, message_taken
from p2pdist.transfer.openapi import Answer, Route
from tracker.core.events import Received
from tracker.http.access import note_refusal
from tracker.http.keys import SERVICE
from tracker.service import Outbox, Service

HELLO_TIMEOUT_S = 10.0
HEARTBEAT_S = 15.0
SIGN_S = 0.5
"""At least so often an agent that is held back hears that the tracker lives."""

HANDSHAKE_S_MAX = 60.0
"""As many agents as connect at one moment after a restart: the last of ten thousand TLS handshakes
ends long after it began."""

CONNECTIONS_MAX = 1 << 16
"""Connections that are no sessions."""

CONNECTIONS_PART = 2
"""One of so many parts of the process's descriptors is for them."""

INPUT_BYTES_MAX = 512 << 20
"""What all connections, those of sessions too, may have sent of messages that are not whole: as
much as thousands of agents say at one moment after a restart."""

FAREWELL_S = 1.0
"""How long a session that ends may take to send what is queued for it, and then the other side to
answer the closing."""

Socket = web.WebSocketResponse[Literal[False]]
"""Its text frames come as bytes."""

CONTROLS = WSMsgType.PING, WSMsgType.PONG
_CLOSED_WELL = (WSCloseCode.OK, WSCloseCode.GOING_AWAY)

HOLDINGS_AT_ONCE = 50
"""Holdings of one message that the core handles before others have their turn."""

logger = logging.getLogger(__name__)


def connection_book(descriptors: int = 0) -> ConnectionBook:
    """Counts the connections that are no sessions, in a process that may have so many descriptors;
    0 for those of this one."""
    descriptors = descriptors or resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    unlimited = descriptors == resource.RLIM_INFINITY
    total_max = CONNECTIONS_MAX if unlimited else max(8, min(CONNECTIONS_MAX, descriptors // CONNECTIONS_PART))
    return ConnectionBook(total_max, idle_max=total_max, input_bytes_max=INPUT_BYTES_MAX)


async def session(request: web.Request) -> Socket:
    """Open an agent's session, a WebSocket. Each frame is one JSON document."""
    socket: Socket = web.WebSocketResponse(
        timeout=FAREWELL_S,
        max_msg_size=MESSAGE_BYTES_MAX,
        heartbeat=HEARTBEAT_S,
        compress=False,
        autoping=False,  # what it takes counts, too
        decode_text=False,
    )
    await socket.prepare(request)
    try:
        return await _serve(request, socket)
    finally:
        await socket.close()  # or its heartbeat keeps what came of a message for HEARTBEAT_S more


async def _serve(request: web.Request, socket: Socket) -> Socket:
    service, source = request.app[SERVICE], input_of(request)
    try:
        hello = await _hello(source, socket)
        identity, remote = identity_of(request), request.remote or ""
        if service.access is not None:
            identity = service.access.check_hello(hello, peer_of(request), remote)
        replaces = await service.resolve_name(hello, remote)
        if service.access is not None and replaces is not None:
            # It may have been revoked while the agents that say its name were asked.
            identity = service.access.check_hello(hello, peer_of(request), remote)
        number, outbox = service.open_session(hello, identity, replaces=replaces, source=remote)
    except P2PDistError as error:
        logger.warning("no session for %s: %s", request.remote, error)
        note_refusal(request, error)
        await socket.send_frame(encode(Reject(error.problem())), WSMsgType.TEXT)
        return socket
    release(request)
    writer = asyncio.create_task(_write(socket, outbox))
    try:
        await _read(source, socket, service, number, outbox)
    finally:
        try:
            service.close_session(number, _why_closed(socket, outbox))
        finally:
            await asyncio.wait([writer], timeout=FAREWELL_S)
            writer.cancel()
    return socket


ROUTES = (
    Route(
        "GET",
        "/v1/session",
        session,
        (Answer(status=101, media_type=""),),
        messages={"agent": FromAgent, "tracker": FromTracker},
        right="agent",
    ),
)


async def _hello(source: Input | None, socket: Socket) -> Hello:
    try:
        async with asyncio.timeout(HELLO_TIMEOUT_S):
            frame = await _receive(source, socket)
    except TimeoutError as error:
        raise UsageError(f"no hello arrived within {HELLO_TIMEOUT_S:.0f} s") from error
    if frame.type is not WSMsgType.TEXT:
        raise UsageError("a session begins with a hello, as a text frame")
    hello = decode_from_agent(frame.data)
    if not isinstance(hello, Hello):
        raise UsageError("a session begins with a hello")
    return hello


async def _receive(source: Input | None, socket: Socket) -> WSMessage | WSMessageTextBytes:
    """The next frame that is no ping or pong; `source` counts what the connection has sent."""
    while True:
        frame = await socket.receive()
        if source is not None:
            message_taken(source, frame)
        if frame.type not in CONTROLS:
            return frame
        if frame.type is WSMsgType.PING:
            await socket.pong(frame.data)


async def _read(source: Input | None, socket: Socket, service: Service, number: int, outbox: Outbox) -> None:
    while True:
        frame = await _receive(source, socket)
        if outbox.ended or frame.type not in MESSAGES:
            return
        try:
            message = decode_from_agent(frame.data)
            if isinstance(message, (Holding, Holdings)):
                await _submit(service, number, message, socket)
            else:
                service.submit(Received(number, message))
        except UsageError as error:
            logger.warning("session %d ends: %s", number, error)
            outbox.put(Reject(error.problem()))
            return
        del frame, message  # the next one may be long in coming, and there are many sessions


async def _submit(service: Service, number: int, message: Holding | Holdings, socket: Socket) -> None:
    for part in _parts(message):
        wait_s = service.held_back_s(number, part)
        while wait_s > 0:
            await socket.pong()  # without its ping, which waits meanwhile behind these holdings
            await asyncio.sleep(min(wait_s, SIGN_S))
            wait_s -= SIGN_S
        service.submit(Received(number, part))
        if isinstance(part, Holdings):
            await asyncio.sleep(0)  # between two parts others have their turn


def _why_closed(socket: Socket, outbox: Outbox) -> str:
    """Why a session ended, in words for people."""
    if isinstance(socket.exception(), TimeoutError):
        return f"it did not answer for {HEARTBEAT_S:.0f} s"
    if outbox.ended:
        return "the tracker ended its session"
    return "its agent closed the session" if socket.close_code in _CLOSED_WELL else "its connection broke"


def _parts(message: Holding | Holdings) -> Iterator[Holding | Holdings]:
    """A message in parts that the core handles one after the other."""
    if not isinstance(message, Holdings) or len(message.blobs) <= HOLDINGS_AT_ONCE:
        yield message
        return
    for start in range(0, len(message.blobs), HOLDINGS_AT_ONCE):
        yield Holdings(message.blobs[start : start + HOLDINGS_AT_ONCE])


async def _write(socket: Socket, outbox: Outbox) -> None:
    try:
        while True:
            for message in await outbox.take():
                if message is None:
                    return
                await socket.send_frame(message if isinstance(message, bytes) else encode(message), WSMsgType.TEXT)
                del message  # the next one may be long in coming, and there are many sessions
    except (ConnectionError, RuntimeError) as error:
        logger.debug("a session broke while writing: %r", error)
    finally:
        await socket.close()
