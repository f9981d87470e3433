"""Streams and ranges over TLS: with the right certificates like plain ones, with any others not at
all."""

from __future__ import annotations

import asyncio
import os
import resource
import select
import shutil
import socket
import ssl
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

import pytest
from aiohttp import ClientSession, TCPConnector, web
from authority import Authority, server_by_ssl
from stream_rig import PIECE, Pieces, Receiver, SampleBlob, Server, StartApp

from p2pdist.model.errors import UsageError
from p2pdist.model.messages import STREAM_END
from p2pdist.transfer.openssl import contexts
from p2pdist.transfer.openssl.client import TlsSocket
from p2pdist.transfer.openssl.server import ServerContext
from p2pdist.transfer.stream import frames
from p2pdist.transfer.stream.events import StreamClosed
from p2pdist.transfer.stream.frames import FRAME, CutShort, TlsFrameReader
from p2pdist.transfer.stream.ranges import RangeOptions, serve_range
from p2pdist.transfer.tls import Tls, TlsFiles


@pytest.fixture
async def secured(blob: SampleBlob, start_app: StartApp, tls: Tls) -> Server:
    server = Server(blob)
    server.port = await start_app("POST", "/v1/streams", server.streams, ServerContext(tls))
    return server


async def ending(receiver: Receiver, port: int, tls: Tls | None) -> StreamClosed:
    closed = await receiver.closed(receiver.open(port, tls=tls))
    assert not receiver.received(receiver.streams[-1])
    return closed


async def test_a_stream_over_tls_is_whole(receiver: Receiver, secured: Server, tls: Tls, blob: SampleBlob) -> None:
    streams = [receiver.open(secured.port, stripe=stripe, stripes=2, tls=tls) for stripe in (0, 1)]
    for stream in streams:
        assert (await receiver.closed(stream)).reason == "done"
    assert receiver.copy.path.read_bytes() == blob.data


async def test_nothing_is_sent_in_the_clear(
    receiver: Receiver, blob: SampleBlob, start_app: StartApp, tls: Tls, secured: Server
) -> None:
    """What goes over the wire, as a relay in between sees it, has no piece in it."""
    seen = bytearray()

    async def relay(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        above, below = await asyncio.open_connection("127.0.0.1", secured.port)

        async def pump(source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
            while data := await source.read(65536):
                seen.extend(data)
                sink.write(data)
            sink.close()

        await asyncio.gather(pump(reader, below), pump(above, writer), return_exceptions=True)

    listener = await asyncio.start_server(relay, "127.0.0.1", 0)
    stream = receiver.open(listener.sockets[0].getsockname()[1], tls=tls)
    assert (await receiver.closed(stream)).reason == "done"
    listener.close()
    assert len(seen) > len(blob.data)
    assert b" HTTP/1.1\r\n" not in seen  # four letters alone are in a megabyte now and then
    assert blob.data[:64] not in seen


async def test_a_peer_without_a_certificate_is_refused(
    receiver: Receiver, secured: Server, tls: Tls, monkeypatch: pytest.MonkeyPatch
) -> None:
    contexts.server_context(tls.credentials)
    monkeypatch.setattr(contexts, "_identify", lambda context, credentials: None)
    closed = await ending(receiver, secured.port, tls)
    assert closed.reason == "reset" or "certificate" in closed.detail
    assert not secured.outgoing


async def test_a_peer_of_another_authority_is_refused_by_both_sides(
    receiver: Receiver, secured: Server, authority: Authority, tmp_path: Path
) -> None:
    (tmp_path / "other").mkdir()
    stranger = Authority(tmp_path / "other", "stranger").issue()
    closed = await ending(receiver, secured.port, Tls(stranger))
    assert closed.reason == "refused" and "certificate" in closed.detail
    trusting = TlsFiles(stranger.certificate, stranger.key, authority.path)
    closed = await ending(receiver, secured.port, Tls(trusting))
    assert closed.reason == "reset" or "certificate" in closed.detail
    assert not secured.outgoing


async def test_a_certificate_for_another_host_is_refused_unless_it_has_the_name_of_the_fleet(
    receiver: Receiver, blob: SampleBlob, start_app: StartApp, authority: Authority
) -> None:
    server = Server(blob)
    other = Tls(authority.issue("other", host="agents.example"))
    server.port = await start_app("POST", "/v1/streams", server.streams, ServerContext(other))
    closed = await ending(receiver, server.port, Tls(authority.issue("mine")))
    assert closed.reason == "refused" and "127.0.0.1" in closed.detail
    fleet = receiver.open(server.port, tls=Tls(authority.issue("mine", name="agents.example")))
    assert (await receiver.closed(fleet)).reason == "done"


async def test_plain_and_tls_do_not_meet_and_say_so(
    receiver: Receiver, server: Server, secured: Server, tls: Tls
) -> None:
    closed = await ending(receiver, secured.port, None)
    assert "TLS" in closed.detail and closed.reason in ("short", "protocol")
    closed = await ending(receiver, server.port, tls)
    assert "does not speak TLS" in closed.detail and closed.reason == "refused"


async def test_older_tls_is_refused(secured: Server, authority: Authority) -> None:
    files = authority.issue("old")
    context = ssl.create_default_context(cafile=str(authority.path))
    context.load_cert_chain(files.certificate, files.key)
    context.maximum_version = ssl.TLSVersion.TLSv1_2
    with pytest.raises((ssl.SSLError, ConnectionError)):
        await asyncio.open_connection("127.0.0.1", secured.port, ssl=context, server_hostname="127.0.0.1")


@pytest.mark.parametrize("how", ["close", "finish_piece_and_close"])
async def test_a_stream_is_closed_from_this_side_and_the_sender_notices(
    receiver: Receiver, secured: Server, tls: Tls, how: str
) -> None:
    secured.make = lambda layout, wanted: Pieces(layout, wanted, available={0})
    stream = receiver.open(secured.port, tls=tls)
    await receiver.until(lambda: receiver.received(stream) == [0])
    getattr(stream, how)()
    assert (await receiver.closed(stream)).reason == "closed"
    async with asyncio.timeout(60):
        while not secured.ended:
            await asyncio.sleep(0.01)
    assert secured.outgoing[0].cancelled


async def test_a_file_that_is_too_short_is_truncated_over_tls_too(
    receiver: Receiver, secured: Server, tls: Tls, blob: SampleBlob
) -> None:
    with blob.path.open("r+b") as file:
        file.truncate(3 * PIECE + 10)
    stream = receiver.open(secured.port, tls=tls)
    assert (await receiver.closed(stream)).reason in ("short", "reset")
    assert receiver.received(stream) in ([0, 1], [0, 1, 2]), "what the transport still held may be lost with it"


async def test_ranges_over_tls(blob: SampleBlob, start_app: StartApp, tls: Tls) -> None:
    async def handler(request: web.Request) -> web.StreamResponse:
        with blob.path.open("rb") as file:
            options = RangeOptions({}, ranges_max=2)
            return await serve_range(request, blob.digest, file, blob.layout, options=options)

    port = await start_app("GET", "/blob", handler, ServerContext(tls))
    async with ClientSession(connector=TCPConnector(ssl=tls.client)) as session:
        url = f"https://127.0.0.1:{port}/blob"
        async with session.get(url, headers={"Range": f"bytes=5-{3 * PIECE}"}) as answer:
            assert (answer.status, await answer.read()) == (206, blob.data[5 : 3 * PIECE + 1])
        async with session.get(url, headers={"Range": f"bytes=5-{3 * PIECE},0-9"}) as answer:
            body = await answer.read()
            assert len(body) == answer.content_length and body.count(b"Content-Range: ") == 2
            assert blob.data[5 : 3 * PIECE + 1] + b"\r\n--" in body and b"\r\n\r\n" + blob.data[:10] in body
        async with session.get(url) as answer:
            assert await answer.read() == blob.data


async def test_certificates_are_read_again(authority: Authority, tls: Tls, secured: Server) -> None:
    def shown() -> bytes | None:
        plain = socket.create_connection(("127.0.0.1", secured.port), 5)
        with tls.client.wrap_socket(plain, server_hostname="127.0.0.1") as connection:
            return connection.getpeercert(binary_form=True)

    first = await asyncio.to_thread(shown)
    renewed = authority.issue("renewed")
    shutil.copy(renewed.certificate, tls.files.certificate)  # the key has not come yet
    with pytest.raises(UsageError, match="cannot be used"):
        tls.reload()
    assert await asyncio.to_thread(shown) == first
    shutil.copy(renewed.key, tls.files.key)
    tls.reload()
    assert await asyncio.to_thread(shown) not in (None, first)


def test_files_that_do_not_fit_are_told(authority: Authority) -> None:
    one, two = authority.issue("one"), authority.issue("two")
    with pytest.raises(UsageError, match=r"one\.pem"):
        Tls(TlsFiles(one.certificate, two.key, authority.path))
    with pytest.raises(UsageError, match="absent"):
        Tls(TlsFiles(one.certificate, one.key, authority.directory / "absent"))


Taken = TypeVar("Taken")


def tls_connection(tls: Tls, address: tuple[str, int]) -> TlsSocket:
    connection = TlsSocket(socket.create_connection(address), tls.credentials, "127.0.0.1", compared=False)
    connection.handshake(None)
    return connection


class Slow:
    """A peer over TLS that sends frames in small records, one at a time, and then hangs up, `cut`
    bytes before their end."""

    def __init__(self, tls: Tls, sizes: Sequence[int], record: int, pause_s: float, *, cut: int = 0) -> None:
        self.frames = [FRAME.pack(number, size) + os.urandom(size) for number, size in enumerate(sizes)]
        self._cut = cut
        self._listening = socket.create_server(("127.0.0.1", 0))
        self._thread = threading.Thread(target=self._serve, args=(tls, record, pause_s), daemon=True)
        self._thread.start()
        self.connection = tls_connection(tls, self._listening.getsockname())

    def _serve(self, tls: Tls, record: int, pause_s: float) -> None:
        accepted, _ = self._listening.accept()
        accepted.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        with server_by_ssl(tls).wrap_socket(accepted, server_side=True) as sending:
            data = b"".join(self.frames)
            data = data[: len(data) - self._cut]
            for start in range(0, len(data), record):
                sending.sendall(data[start : start + record])
                time.sleep(pause_s)

    def close(self) -> None:
        self.connection.close()
        self._thread.join()
        self._listening.close()


@pytest.mark.parametrize("record", [7, 100, 4096, 70_000])
def test_frames_over_tls_are_read_whatever_their_records(tls: Tls, record: int) -> None:
    """No frame waits for bytes that come only after it."""
    sizes = [0, 1, 300, 5000, 65536, 17, 40_000] if record > 7 else [0, 1, 300, 700]
    peer = Slow(tls, sizes, record, 0.001)
    reader = TlsFrameReader(peer.connection, max(sizes))
    for number, size in enumerate(sizes):
        assert reader.head(0 if number else sizes[0]) == (number, size)
        assert FRAME.pack(number, size) + bytes(reader.data(size)) == peer.frames[number]
        reader.done()
    with pytest.raises(CutShort):
        reader.head(0)
    peer.close()


def test_fast_frames_over_tls_are_taken_whole_record_by_record(tls: Tls, monkeypatch: pytest.MonkeyPatch) -> None:
    """A frame that is cut short says how much is missing."""
    monkeypatch.setattr(frames, "RATE_BYTES", 1)
    monkeypatch.setattr(frames, "TLS_FAST_BYTES_S", 0.0)
    sizes = [100, 65536, 65536, 3, 40_000, 65536]
    peer = Slow(tls, sizes, 70_000, 0.001, cut=65536 - 50_000)
    reader = TlsFrameReader(peer.connection, max(sizes))
    for number, size in enumerate(sizes[:-1]):
        assert reader.head(size) == (number, size)
        assert FRAME.pack(number, size) + bytes(reader.data(size)) == peer.frames[number]
        reader.done()
    assert reader.head(65536) == (5, 65536)
    with pytest.raises(CutShort) as cut:
        reader.data(65536)
    assert cut.value.missing == 65536 - 50_000
    peer.close()


def test_a_slow_frame_over_tls_wakes_its_thread_seldom(tls: Tls) -> None:
    """A record is a hundredth of the frame; the thread sleeps until much more is there."""
    sizes, record = [200_000, 200_000], 2000
    peer = Slow(tls, sizes, record, 0.002)
    reader = TlsFrameReader(peer.connection, max(sizes))
    switches = []

    def read() -> None:
        before = resource.getrusage(resource.RUSAGE_THREAD).ru_nvcsw
        for number, size in enumerate(sizes):
            assert reader.head(size) == (number, size)
            assert bytes(reader.data(size)) == peer.frames[number][FRAME.size :]
            reader.done()
        switches.append(resource.getrusage(resource.RUSAGE_THREAD).ru_nvcsw - before)

    thread = threading.Thread(target=read)
    thread.start()
    thread.join(60)
    peer.close()
    assert switches and switches[0] < sum(sizes) / record / 4


@pytest.mark.parametrize("record", [7, pytest.param(100, marks=pytest.mark.slow), 4096, 16_384, 70_000])
def test_frames_over_tls_are_taken_when_the_connection_is_readable(tls: Tls, record: int) -> None:
    """As an event loop takes them: what is there, and then it waits for the connection, which tells
    of the rest, whatever of a record TLS has taken already."""
    sizes = [0, 1, 300, 5000, 65536, 17, 65536, 65536, 40_000] if record > 7 else [0, 1, 300, 700]
    peer = Slow(tls, sizes, record, 0.001)
    reader = TlsFrameReader(peer.connection, max(sizes))
    waiting = select.poll()
    waiting.register(peer.connection, select.POLLIN)

    def taken(take: Callable[[], Taken | None]) -> Taken:
        while (found := take()) is None:
            assert reader.ready or waiting.poll(30_000), "it waits for what does not come"
        return found

    reader.expect(0)
    for number, size in enumerate(sizes):
        if number == 3:  # a thread takes one, and then the loop goes on
            peer.connection.settimeout(None)
            assert reader.head(size) == (number, size)
            data = reader.data(size)
        else:
            assert taken(lambda: reader.head_if_there(0)) == (number, size)
            data = taken(lambda size=size: reader.data_if_there(size))  # type: ignore[misc]
        assert FRAME.pack(number, size) + bytes(data) == peer.frames[number]
        reader.done()
        reader.expect(sizes[number + 1] if number + 1 < len(sizes) else 0)
    with pytest.raises(CutShort):
        taken(lambda: reader.head_if_there(0))
    peer.close()


class Halting:
    """A peer over TLS that sends a frame in two parts, the second one after a pause, and the next
    frame only once this one was `taken`."""

    def __init__(self, tls: Tls, frames: Sequence[bytes], rest: int) -> None:
        self.taken = threading.Semaphore(0)
        self._listening = socket.create_server(("127.0.0.1", 0))
        self._thread = threading.Thread(target=self._serve, args=(tls, frames, rest), daemon=True)
        self._thread.start()
        self.connection = tls_connection(tls, self._listening.getsockname())

    def _serve(self, tls: Tls, frames: Sequence[bytes], rest: int) -> None:
        incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        sending = server_by_ssl(tls).wrap_bio(incoming, outgoing, server_side=True)
        accepted, _ = self._listening.accept()
        accepted.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        with accepted:
            while True:
                try:
                    sending.do_handshake()
                    break
                except ssl.SSLWantReadError:
                    accepted.sendall(outgoing.read())
                    incoming.write(accepted.recv(1 << 16))
            for frame in frames:
                sending.write(frame)
                data = outgoing.read()
                accepted.sendall(data[:-rest])
                time.sleep(0.02)
                accepted.sendall(data[-rest:])
                self.taken.acquire(timeout=60)

    def close(self) -> None:
        self.connection.close()
        self._thread.join()
        self._listening.close()


@pytest.mark.parametrize("rest", [1, 3000, 16_400, 30_000])
def test_a_record_of_which_tls_has_taken_a_part_is_waited_for_to_its_end(tls: Tls, rest: int) -> None:
    """The connection then has fewer bytes to come than the frame lacks."""
    sizes = [65536] * 4
    frames = [FRAME.pack(number, size) + os.urandom(size) for number, size in enumerate(sizes)]
    peer = Halting(tls, frames, rest)
    reader, waiting = TlsFrameReader(peer.connection, max(sizes)), select.poll()
    waiting.register(peer.connection, select.POLLIN)
    reader.expect(sizes[0])
    for number, size in enumerate(sizes):
        while reader.head_if_there(size) is None or (data := reader.data_if_there(size)) is None:
            assert reader.ready or waiting.poll(10_000), "it waits for what does not come"
        assert bytes(data) == frames[number][FRAME.size :]
        reader.done()
        reader.expect(size)
        peer.taken.release()
    peer.close()


@pytest.mark.parametrize("fast", [False, True], ids=["slow", "fast"])
@pytest.mark.parametrize("rest", [1, 50, 100])
def test_a_thread_gets_the_rest_of_a_record_when_it_comes(
    tls: Tls, rest: int, fast: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Encrypted, a frame is a little longer than what its thread sleeps for: the end of its last
    record may come later, and is less than that. So it is with frames that come fast, when an event
    loop had the connection before."""
    if fast:
        monkeypatch.setattr(frames, "RATE_BYTES", 1)
        monkeypatch.setattr(frames, "TLS_FAST_BYTES_S", 0.0)
    sizes = [65536] * 4
    sent = [FRAME.pack(number, size) + os.urandom(size) for number, size in enumerate(sizes)]
    peer = Halting(tls, sent, rest)
    reader = TlsFrameReader(peer.connection, max(sizes))
    taken = []

    def read() -> None:
        for size in sizes:
            reader.head(size)
            taken.append(bytes(reader.data(size)))
            reader.done()
            if fast:
                reader.expect(size)
                peer.connection.settimeout(None)
            peer.taken.release()

    thread = threading.Thread(target=read, daemon=True)
    thread.start()
    thread.join(10)
    assert taken == [frame[FRAME.size :] for frame in sent], "it waits for what comes only with the next frame"
    peer.close()


@pytest.mark.parametrize("sleeps", [True, False], ids=["while a thread sleeps", "before"])
def test_an_end_that_nobody_promised_is_there_at_once_after_shorten(tls: Tls, sleeps: bool) -> None:
    end = FRAME.pack(STREAM_END, 0)
    peer = Halting(tls, [FRAME.pack(0, 65536) + bytes(65536), end], len(end))
    reader, heads = TlsFrameReader(peer.connection, 65536), list[tuple[int, int]]()
    reader.head(65536)
    reader.data(65536)
    reader.done()
    if not sleeps:
        reader.shorten()
    thread = threading.Thread(target=lambda: heads.append(reader.head(65536)), daemon=True)
    thread.start()
    if sleeps:
        time.sleep(0.05)
        reader.shorten()
    peer.taken.release()
    thread.join(10)
    assert heads == [(STREAM_END, 0)]
    peer.taken.release()
    peer.close()
