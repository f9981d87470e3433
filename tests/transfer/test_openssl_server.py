"""The server's end of TLS connections (openssl/server.py), beside the ssl module, below both event
loops and between a plain transport and what it serves: the same certificates are refused, and bytes
come whole and in order or not at all."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import secrets
import shutil
import socket
import ssl
import struct
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import IO, Any

import pytest
import uvloop
from authority import Authority, server_by_ssl
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import rsa
from OpenSSL import SSL
from test_openssl_client import CLIENT, FIELD_CASES, PEM, SERVER, issue, same_fields

from p2pdist.transfer.openssl import bindings, contexts
from p2pdist.transfer.openssl.client import TlsSocket
from p2pdist.transfer.openssl.server import DirectTls, ServerContext, ServerTls
from p2pdist.transfer.stream.connections import prepare
from p2pdist.transfer.tls import ServedTls, Tls, TlsError, TlsFiles

LOOPS = {"asyncio": asyncio.new_event_loop, "uvloop": uvloop.new_event_loop}

Handler = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Any]


async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while data := await reader.read(65536):
        writer.write(data)
        await writer.drain()
    writer.close()


class Closed(asyncio.Protocol):
    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        transport.close()


class Service:
    """A service over TLS by an event loop of a thread of its own. `peers`: the certificates of the
    clients that were let in; `failures`: what the loop had to tell. `direct`: TLS is around a plain
    transport, where the context can be."""

    def __init__(self, context: ssl.SSLContext, loop: str, handler: Handler = echo, *, direct: bool = False) -> None:
        self._direct = direct
        self.peers: list[dict[str, Any] | None] = []
        self.ciphers: list[str] = []
        self.failures: list[dict[str, Any]] = []
        self._handler, self._context = handler, context
        self._loop = LOOPS[loop]()
        self._loop.set_exception_handler(lambda _, told: self.failures.append(told))
        ready = threading.Event()
        self._thread = threading.Thread(target=self._run, args=(ready,), daemon=True)
        self._thread.start()
        assert ready.wait(30)

    def _run(self, ready: threading.Event) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_until_complete(self._serve(ready))
        self._loop.close()

    async def _serve(self, ready: threading.Event) -> None:
        self._over = asyncio.Event()
        if self._direct and isinstance(self._context, ServerContext):
            listening = await self._loop.create_server(self._around, "127.0.0.1", 0)
        else:
            listening = await asyncio.start_server(
                self._taken, "127.0.0.1", 0, ssl=self._context, ssl_handshake_timeout=10, ssl_shutdown_timeout=2
            )
        self.port = listening.sockets[0].getsockname()[1]
        ready.set()
        await self._over.wait()
        listening.close()
        for task in asyncio.all_tasks() - {asyncio.current_task()}:
            task.cancel()
        await asyncio.sleep(0.05)

    def _around(self) -> asyncio.BaseProtocol:
        assert isinstance(self._context, ServerContext)
        served = asyncio.StreamReaderProtocol(asyncio.StreamReader(), self._taken)
        verified = self._loop.create_future()
        verified.add_done_callback(lambda verified: verified.exception())
        try:
            return self._context.tls_protocol(served, verified, handshake_s=10, shutdown_s=2)
        except OSError:  # where a loop calls for a protocol, it closes nothing
            return Closed()

    async def _taken(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.peers.append(writer.get_extra_info("peercert"))
        self.ciphers.append(writer.get_extra_info("cipher")[0])
        try:
            await self._handler(reader, writer)
        except OSError:
            writer.close()

    def connect(self) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self.port), 30)

    def stop(self) -> None:
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._over.set)
            self._thread.join(30)
        assert not self._thread.is_alive()


@pytest.fixture(params=["asyncio", "uvloop", "asyncio direct", "uvloop direct"])
def serve(request: pytest.FixtureRequest) -> Iterator[Callable[..., Service]]:
    services: list[Service] = []

    def start(context: ssl.SSLContext, handler: Handler = echo) -> Service:
        loop, _, direct = request.param.partition(" ")
        services.append(Service(context, loop, handler, direct=bool(direct)))
        return services[-1]

    yield start
    for one in services:
        one.stop()


def client_by_ssl(authority: Authority, files: TlsFiles | None) -> ssl.SSLContext:
    """A client that checks the authority alone, and shows what is in the files."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.set_ciphers("DEFAULT:@SECLEVEL=0")
    context.load_verify_locations(authority.path)
    if files is not None:
        context.load_cert_chain(files.certificate, files.key)
    return context


def opened(service: Service, context: ssl.SSLContext, *, session: ssl.SSLSession | None = None) -> ssl.SSLSocket:
    return context.wrap_socket(
        service.connect(), server_hostname="127.0.0.1", suppress_ragged_eofs=False, session=session
    )


def let_in(service: Service, context: ssl.SSLContext) -> bool:
    """Whether a client is served."""
    before = len(service.peers)
    try:
        with opened(service, context) as connection:
            connection.sendall(b"x")
            came = connection.recv(1) == b"x"
    except OSError:
        came = False
    assert came == (len(service.peers) > before)
    return came


def exactly(connection: socket.socket, count: int) -> bytes:
    data = bytearray()
    while len(data) < count and (part := connection.recv(count - len(data))):
        data += part
    return bytes(data)


def until(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.01)


# -- certificates, as the ssl module judges them


@pytest.mark.parametrize(
    ("make", "right"),
    [
        (lambda a: issue(a, None), True),
        (lambda a: issue(a, None, purposes=[CLIENT]), True),
        (lambda a: issue(a, None, purposes=[CLIENT, SERVER]), True),
        (lambda a: issue(a, None, purposes=[SERVER]), False),
        (lambda a: issue(a, None, until=-timedelta(hours=1)), False),
        (lambda a: issue(a, None, since=timedelta(hours=1)), False),
        (lambda a: issue(a, None, alone=True), False),
        (lambda a: issue(a, None, key=rsa.generate_private_key(65537, 2048)), True),
        (lambda a: issue(a, None, key=rsa.generate_private_key(65537, 1024)), False),
        (lambda a: None, False),
    ],
    ids=["plain", "client", "both", "server alone", "expired", "not yet", "own", "RSA 2048", "RSA 1024", "none"],
)
def test_clients_are_judged_as_by_the_ssl_module(
    serve: Callable[..., Service],
    authority: Authority,
    tls: Tls,
    make: Callable[[Authority], TlsFiles | None],
    right: bool,
) -> None:
    context = client_by_ssl(authority, make(authority))
    services = serve(server_by_ssl(tls)), serve(ServerContext(tls))
    assert [let_in(one, context) for one in services] == [right, right]
    assert services[1].failures == []


def test_another_authority_of_the_same_name_is_refused(
    serve: Callable[..., Service], authority: Authority, tls: Tls, tmp_path: Path
) -> None:
    (tmp_path / "other").mkdir()
    context = client_by_ssl(authority, Authority(tmp_path / "other").issue())
    assert not let_in(serve(server_by_ssl(tls)), context)
    assert not let_in(serve(ServerContext(tls)), context)


def test_chains_of_clients_are_judged_as_by_the_ssl_module(
    serve: Callable[..., Service], authority: Authority, tls: Tls, tmp_path: Path
) -> None:
    """An authority below the trusted one counts when it is sent along and may issue."""
    for ca, sent, right in ((True, True, True), (True, False, False), (False, True, False)):
        below = Authority(tmp_path, f"below-{ca}-{sent}")
        builder = authority._builder(below.name, below.key)
        signed = builder.add_extension(x509.BasicConstraints(ca, None), critical=True)
        below.path.write_bytes(signed.sign(authority.key, hashes.SHA256()).public_bytes(PEM))
        files = below.issue(f"client-{ca}-{sent}")
        if sent:
            files.certificate.write_bytes(files.certificate.read_bytes() + below.path.read_bytes())
        context = client_by_ssl(authority, files)
        assert let_in(serve(server_by_ssl(tls)), context) == right
        assert let_in(serve(ServerContext(tls)), context) == right


def test_strangers_are_let_in_where_they_may_and_no_one_with_a_wrong_certificate(
    serve: Callable[..., Service], authority: Authority, tmp_path: Path
) -> None:
    (tmp_path / "other").mkdir()
    service = serve(ServerContext(Tls(authority.issue(), strangers=True)))
    assert let_in(service, client_by_ssl(authority, None))
    assert not let_in(service, client_by_ssl(authority, Authority(tmp_path / "other").issue()))
    assert let_in(service, client_by_ssl(authority, authority.issue("h0")))
    assert service.peers[0] is None and service.peers[1] is not None and len(service.peers) == 2


@pytest.mark.parametrize(("names", "subject"), FIELD_CASES)
def test_a_request_sees_the_fields_that_the_ssl_module_shows(
    serve: Callable[..., Service], authority: Authority, tls: Tls, names: Any, subject: x509.Name | None
) -> None:
    context = client_by_ssl(authority, issue(authority, names, subject=subject))
    services = serve(server_by_ssl(tls)), serve(ServerContext(tls))
    assert all(let_in(one, context) for one in services)
    by_ssl, found = services[0].peers[0], services[1].peers[0]
    assert by_ssl and found and same_fields(found, by_ssl)


def test_new_connections_go_by_the_newest_certificates_and_authorities(
    serve: Callable[..., Service], authority: Authority, tls: Tls, tmp_path: Path
) -> None:
    (tmp_path / "other").mkdir()
    other = Authority(tmp_path / "other", "other")
    theirs, ours = client_by_ssl(authority, other.issue()), client_by_ssl(authority, authority.issue("h1"))
    service = serve(ServerContext(tls))
    with opened(service, ours) as first:
        until(lambda: len(service.peers) == 1)
        assert not let_in(service, theirs)
        tls.trust(other.path.read_text())
        assert let_in(service, theirs)
        tls.exchange(authority.issue("renewed"))
        with opened(service, ours) as second:
            assert second.getpeercert(binary_form=True) != first.getpeercert(binary_form=True)
            until(lambda: len(service.peers) == 3)
        tls.trust("")
        assert not let_in(service, theirs)
        first.sendall(b"goes on")
        assert exactly(first, 7) == b"goes on"


def test_credentials_that_cannot_be_used_end_the_connection(
    serve: Callable[..., Service], authority: Authority, tls: Tls
) -> None:
    service = serve(ServerContext(tls))
    tls.credentials = replace(tls.credentials, key=b"no key")
    assert not let_in(service, client_by_ssl(authority, authority.issue("h1")))
    with pytest.raises(TlsError, match="cannot use") as told:
        contexts.server_context(tls.credentials)
    assert "no key" not in str(told.value) and not service.peers


@pytest.mark.parametrize(
    ("only", "taken"), [(None, "TLS_AES_128_GCM_SHA256"), ("TLS_AES_256_GCM_SHA384", "TLS_AES_256_GCM_SHA384")]
)
def test_streams_go_by_the_cheapest_cipher_that_both_may(
    serve: Callable[..., Service], tls: Tls, monkeypatch: pytest.MonkeyPatch, only: str | None, taken: str
) -> None:
    service = serve(ServerContext(tls))
    contexts.server_context(tls.credentials)
    if only:
        monkeypatch.setattr(contexts, "CIPHERS", only.encode())
    with TlsSocket(service.connect(), tls.credentials, "127.0.0.1", compared=True) as connection:
        connection.handshake(30)
        connection.sendall(b"x")
        assert connection.recv(1) == b"x"
    assert service.ciphers == [taken]


def test_no_session_is_taken_up_again(serve: Callable[..., Service], authority: Authority, tls: Tls) -> None:
    """It would outlive its certificate."""
    context = client_by_ssl(authority, authority.issue("h1"))
    service = serve(ServerContext(tls))
    session = None
    for _ in range(3):
        with opened(service, context, session=session) as connection:
            connection.sendall(b"x")
            assert connection.recv(1) == b"x" and not connection.session_reused
            session = connection.session
    assert len(service.peers) == 3 and all(service.peers)


def test_older_tls_is_refused(serve: Callable[..., Service], authority: Authority, tls: Tls) -> None:
    context = client_by_ssl(authority, authority.issue("h1"))
    context.maximum_version = ssl.TLSVersion.TLSv1_2
    service = serve(ServerContext(tls))
    assert not let_in(service, context) and service.failures == []


# -- bytes


@pytest.mark.parametrize("size", [0, 1, 16384, 16385, 300_000, 5_000_000])
def test_what_is_sent_comes_back(serve: Callable[..., Service], authority: Authority, tls: Tls, size: int) -> None:
    """The client reads while it sends: what both hold has an end."""
    data, service = secrets.token_bytes(size), serve(ServerContext(tls))
    context = client_by_ssl(authority, authority.issue("h1"))

    async def talk() -> bytes:
        reader, writer = await asyncio.open_connection(
            "127.0.0.1", service.port, ssl=context, server_hostname="127.0.0.1"
        )

        async def send() -> None:
            for start in range(0, size, 50_000):
                writer.write(data[start : start + 50_000])
                await writer.drain()

        _, came = await asyncio.gather(send(), reader.readexactly(size))
        writer.close()
        return came

    assert asyncio.run(asyncio.wait_for(talk(), 60)) == data


def test_a_client_that_reads_late_pauses_the_service(
    serve: Callable[..., Service], authority: Authority, tls: Tls
) -> None:
    """What it has not taken waits here, and no more of it than the limits of the event loop."""
    data = secrets.token_bytes(32_000_000)
    sent = bytearray()

    async def handler(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        for start in range(0, len(data), 64_000):
            writer.write(memoryview(data)[start : start + 64_000])
            await writer.drain()
            sent.append(1)
        writer.close()

    service = serve(ServerContext(tls), handler)
    with opened(service, client_by_ssl(authority, authority.issue("h1"))) as connection:
        until(lambda: len(sent) > 10)
        time.sleep(0.5)
        assert len(sent) < 500
        assert exactly(connection, len(data) + 1) == data
    assert len(sent) == 500


def test_empty_writes_are_none(serve: Callable[..., Service], authority: Authority, tls: Tls) -> None:
    async def handler(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.writelines([b"", b"one", b""])
        writer.writelines([b""])
        writer.write(b"two")
        writer.close()

    service = serve(ServerContext(tls), handler)
    with opened(service, client_by_ssl(authority, authority.issue("h1"))) as connection:
        assert exactly(connection, 100) == b"onetwo"


class Recorder:
    """What a client of OpenSSL sends, in the records that it makes, held back until `flush`."""

    def __init__(self, service: Service, authority: Authority, files: TlsFiles) -> None:
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self.tls = client_by_ssl(authority, files).wrap_bio(self._incoming, self._outgoing)
        self.connection = service.connect()
        while True:
            try:
                self.tls.do_handshake()
                break
            except ssl.SSLWantReadError:
                self.flush()
                self._incoming.write(self.connection.recv(65536))
        self.flush()

    def held(self) -> bytes:
        return self._outgoing.read()

    def flush(self) -> None:
        self.connection.sendall(self.held())

    def read(self, count: int) -> bytes:
        data = b""
        while len(data) < count:
            try:
                if not (part := self.tls.read(count - len(data))):
                    break
                data += part
            except ssl.SSLWantReadError:
                if not (came := self.connection.recv(65536)):
                    break
                self._incoming.write(came)
        return data


def test_many_records_that_come_at_once_are_read_without_another(
    serve: Callable[..., Service], authority: Authority, tls: Tls
) -> None:
    service = serve(ServerContext(tls))
    recorder = Recorder(service, authority, authority.issue("h1"))
    data = secrets.token_bytes(3000)
    for byte in data:
        recorder.tls.write(bytes([byte]))
    with recorder.connection:
        recorder.flush()
        assert recorder.read(len(data)) == data


def test_records_that_come_byte_by_byte_are_read(serve: Callable[..., Service], authority: Authority, tls: Tls) -> None:
    service = serve(ServerContext(tls))
    recorder = Recorder(service, authority, authority.issue("h1"))
    with recorder.connection:
        recorder.connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for part in (b"one", b"two" * 10):
            recorder.tls.write(part)
        for byte in recorder.held():
            recorder.connection.sendall(bytes([byte]))
        assert recorder.read(33) == b"one" + b"two" * 10


@pytest.mark.parametrize("where", [0, 3, 5, 20, -1])
def test_a_record_with_a_flipped_bit_ends_the_connection(
    serve: Callable[..., Service], authority: Authority, tls: Tls, where: int
) -> None:
    came: list[bytes] = []

    async def handler(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while data := await reader.read(65536):
                came.append(data)
        finally:
            came.append(b"end")
            writer.close()

    service = serve(ServerContext(tls), handler)
    recorder = Recorder(service, authority, authority.issue("h1"))
    with recorder.connection:
        recorder.tls.write(b"whole")
        recorder.flush()
        until(lambda: came == [b"whole"])
        recorder.tls.write(b"flipped")
        record = bytearray(recorder.held())
        record[where] ^= 0x40
        recorder.connection.sendall(record)
        if where == 3:  # a record that claims to be longer than it is, and may be
            recorder.connection.sendall(bytes(20_000))
        until(lambda: came[1:] == [b"end"])
    assert service.failures == []


@pytest.mark.parametrize("sent", [b"GET / HTTP/1.1\r\n\r\n", b"\x16\x03\x01\xff\xff", os.urandom(2000), b"\0" * 70_000])
def test_what_is_no_tls_is_left_without_a_word(
    serve: Callable[..., Service], authority: Authority, tls: Tls, sent: bytes
) -> None:
    service = serve(ServerContext(tls))
    with service.connect() as connection:
        try:
            connection.sendall(sent)
            connection.shutdown(socket.SHUT_WR)
            while connection.recv(65536):
                pass
        except OSError as error:  # it is closed at any moment
            assert not isinstance(error, TimeoutError)
    assert let_in(service, client_by_ssl(authority, authority.issue("h1")))
    assert len(service.peers) == 1 and service.failures == []


@pytest.mark.parametrize("kept", range(0, 1200, 100))
def test_a_handshake_that_is_cut_lets_no_one_in(
    serve: Callable[..., Service], authority: Authority, tls: Tls, kept: int
) -> None:
    """Whatever part of what a client sends in the handshake arrives."""
    service, left = serve(ServerContext(tls)), kept
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    client = client_by_ssl(authority, authority.issue("h1")).wrap_bio(incoming, outgoing)
    with service.connect() as connection:
        while True:
            try:
                client.do_handshake()
                break
            except ssl.SSLWantReadError:
                sent = outgoing.read()
                connection.sendall(sent[:left])
                left -= len(sent)
                if left <= 0:
                    break
                incoming.write(connection.recv(65536))
        last = outgoing.read()
        whole = bool(last) and left >= len(last)
        connection.sendall(last[: max(0, left)])
        if not whole:
            connection.shutdown(socket.SHUT_WR)
            try:
                while connection.recv(65536):
                    pass
            except ConnectionResetError:
                pass
            assert service.peers == []
    assert service.failures == []


def test_both_ends_tell_that_nothing_follows(serve: Callable[..., Service], authority: Authority, tls: Tls) -> None:
    """Where one is cut off, a reader that looks for the end of a body would take it for whole."""
    ended: list[bytes] = []

    async def handler(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        ended.append(await reader.read(3))
        writer.write(b"last")
        writer.close()

    service = serve(ServerContext(tls), handler)
    context = client_by_ssl(authority, authority.issue("h1"))
    with opened(service, context) as connection:
        connection.sendall(b"one")
        assert exactly(connection, 100) == b"last", "an end without TLS's own mark is an error here"
        connection.unwrap().close()
    assert ended == [b"one"] and service.failures == []


def test_the_end_that_a_client_tells_is_the_end_of_what_it_sent(
    serve: Callable[..., Service], authority: Authority, tls: Tls
) -> None:
    whole: list[bytes] = []

    async def handler(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        whole.append(await reader.read(-1))
        writer.close()

    service = serve(ServerContext(tls), handler)
    with opened(service, client_by_ssl(authority, authority.issue("h1"))) as connection:
        connection.sendall(b"all of it")
        connection.unwrap().close()
    until(lambda: whole == [b"all of it"])
    assert service.failures == []


def test_keys_are_exchanged_while_a_connection_is_open(
    serve: Callable[..., Service], authority: Authority, tls: Tls
) -> None:
    """As OpenSSL's own client does when it is told to (openssl-s_client(1), K)."""
    if not (openssl := shutil.which("openssl")):
        pytest.fail("openssl is needed")
    service = serve(ServerContext(tls))
    files = authority.issue("h1")
    command = [openssl, "s_client", "-connect", f"127.0.0.1:{service.port}", "-quiet", "-cert", files.certificate]
    command = [*map(str, command), "-key", str(files.key), "-CAfile", str(authority.path), "-no_ign_eof"]
    with subprocess.Popen([*command], stdin=-1, stdout=-1, stderr=subprocess.DEVNULL, bufsize=0) as client:
        assert client.stdin and client.stdout
        try:
            for line in (b"one\n", b"two\n", b"three\n"):
                client.stdin.write(line)
                assert client.stdout.readline() == line
                client.stdin.write(b"K\n")
                time.sleep(0.2)
        finally:
            client.kill()
    assert len(service.peers) == 1


def test_what_is_not_read_counts_towards_the_limits_of_the_event_loop(authority: Authority, tls: Tls) -> None:
    up, down = ssl.MemoryBIO(), ssl.MemoryBIO()
    context = client_by_ssl(authority, authority.issue("h1"))
    client, one = context.wrap_bio(down, up), ServerContext(tls).wrap_bio(up, down, server_side=True)
    over: set[object] = set()
    while len(over) < 2:
        for end in (client, one):
            try:
                end.do_handshake()
                over.add(end)
            except ssl.SSLWantReadError:
                pass
    data = secrets.token_bytes(1 << 20)
    client.write(data)
    came = one.read(4096)
    assert up.pending > len(data) - (128 << 10)
    while len(came) < len(data):
        came += one.read(65536)
    assert came == data and not up.pending and not one.pending()
    with pytest.raises(ssl.SSLWantReadError):
        one.read(1)


def test_authorities_are_read_as_by_the_ssl_module(
    serve: Callable[..., Service], authority: Authority, tls: Tls
) -> None:
    """Certificates of a version that nobody has made yet, as old bundles hold, are no reason to let
    no one in."""
    pem = authority.path.read_text()
    der = bytearray(ssl.PEM_cert_to_DER_cert(pem))
    at = der.index(b"\xa0\x03\x02\x01\x02")
    der[at + 4] = 3
    authority.path.write_text(f"text before\n{ssl.DER_cert_to_PEM_cert(bytes(der))}{pem}")
    prepare(tls)
    tls.reload()
    assert let_in(serve(ServerContext(tls)), client_by_ssl(authority, authority.issue("h1")))


# -- what it leaves


@pytest.mark.slow
def test_connections_leave_no_descriptor_and_no_memory(
    serve: Callable[..., Service], authority: Authority, tls: Tls
) -> None:
    service, context = serve(ServerContext(tls)), client_by_ssl(authority, authority.issue("h1"))

    def rounds(count: int) -> tuple[int, int]:
        for _ in range(count):
            assert let_in(service, context)
            service.peers.clear()
            service.ciphers.clear()
        time.sleep(0.2)
        resident = int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE")
        return len(os.listdir("/proc/self/fd")), resident

    rounds(50)
    gc.collect()
    descriptors, resident = rounds(1)
    after = rounds(300)
    assert after[0] <= descriptors + 2 and after[1] < resident + (16 << 20)


def test_nothing_is_taken_or_given_before_the_handshake_is_over(tls: Tls) -> None:
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    one = ServerContext(tls).wrap_bio(incoming, outgoing, server_side=True)
    incoming.write(b"\x17\x03\x03" + struct.pack(">H", 20) + bytes(20))
    for use in (lambda: one.read(10), lambda: one.write(b"x"), one.getpeercert):
        with pytest.raises(ssl.SSLError, match="not over"):
            use()
    with pytest.raises(ssl.SSLError):
        one.do_handshake()
    with pytest.raises(ssl.SSLError, match="not over"):
        one.read(10)
    with pytest.raises(ValueError, match="server"):
        ServerContext(tls).wrap_bio(incoming, outgoing)


def test_what_pyopenssl_keeps_to_itself_is_there(tls: Tls) -> None:
    for name in (
        "SSL_read",
        "SSL_write",
        "SSL_pending",
        "SSL_clear_mode",
        "SSL_MODE_ENABLE_PARTIAL_WRITE",
        "SSL_get_verify_result",
        "BIO_read",
        "BIO_write",
        "BIO_get_mem_data",
    ):
        assert hasattr(bindings.lib, name), name
    connection = SSL.Connection(SSL.Context(SSL.TLS_SERVER_METHOD), None)
    for name in ("_ssl", "_into_ssl", "_from_ssl", "_raise_ssl_error"):
        assert hasattr(connection, name), name


def ask(client: IO[bytes], over: threading.Event) -> None:
    """Have openssl-s_client(1) send something again and again, and change keys in between, until it
    is over: of several lines that it reads at once, the first of which asks for new keys, it sends
    none."""
    number = 0
    with contextlib.suppress(BrokenPipeError):  # it has had everything
        while not over.wait(0.001):
            client.write(b"K\n" if number % 3 == 0 else b"ask\n")
            number += 1


@pytest.mark.parametrize("loop", sorted(LOOPS))
@pytest.mark.parametrize("send_buffer", [4 << 10, 4 << 20])
def test_what_is_sent_past_the_event_loop_keeps_its_place(
    authority: Authority, tls: Tls, loop: str, send_buffer: int
) -> None:
    """Between what goes through the transport, and while the client exchanges keys, which the
    server answers at any moment."""
    if not (openssl := shutil.which("openssl")):
        pytest.fail("openssl is needed")
    rounds = 120
    size = [(number * 9973) % 70_000 + 1 for number in range(rounds)]
    data, taken = secrets.token_bytes(sum(size)), set[str]()

    async def handler(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        around = writer.get_extra_info("sslcontext")
        assert isinstance(around, ServedTls)
        with writer.get_extra_info("socket").dup() as connection:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, send_buffer)
            start = 0
            for number in range(rounds):
                await reader.readexactly(1)
                block = memoryview(bytearray(data[start : start + size[number]]))
                start += size[number]
                done = around.send_now(block, connection) if number % 5 else "no"
                if done == "no":
                    writer.write(block)
                    await writer.drain()
                else:
                    block[:] = bytes(len(block))  # it is free
                taken.add(done)
                if number % 7 == 0:
                    await around.emptied()
        with contextlib.suppress(ConnectionError):
            await reader.read()  # a peer that is still sending is reset at a close, and loses what it has not read
        writer.close()

    service = Service(ServerContext(tls), loop, handler, direct=True)
    files = authority.issue("h1")
    command = [openssl, "s_client", "-connect", f"127.0.0.1:{service.port}", "-quiet", "-cert", files.certificate]
    command = [*map(str, command), "-key", str(files.key), "-CAfile", str(authority.path), "-no_ign_eof"]
    try:
        with subprocess.Popen(command, stdin=-1, stdout=-1, stderr=subprocess.DEVNULL, bufsize=0) as client:
            assert client.stdin and client.stdout
            over = threading.Event()
            asking = threading.Thread(target=ask, args=(client.stdin, over))
            asking.start()
            came = bytearray()
            try:
                while len(came) < len(data) and (part := client.stdout.read(1 << 20)):
                    came += part
            finally:
                over.set()
                asking.join()
                client.kill()
        assert came == data
        assert ("some" if send_buffer < 1 << 20 else "all") in taken
    finally:
        service.stop()
    assert service.failures == []


@pytest.mark.parametrize("loop", sorted(LOOPS))
def test_nothing_passes_by_what_the_transport_holds(authority: Authority, tls: Tls, loop: str) -> None:
    """Although the kernel has room again, of which the event loop has not heard."""
    first, second, answers = secrets.token_bytes(200_000), secrets.token_bytes(50_000), list[str]()

    async def handler(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        around = writer.get_extra_info("sslcontext")
        with writer.get_extra_info("socket").dup() as connection:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
            answers.append(around.send_now(memoryview(first), connection))
            time.sleep(0.3)  # the client reads, and the event loop stands still
            answers.append(around.send_now(memoryview(second), connection))
            writer.write(second)
            await around.emptied()
            answers.append(around.send_now(memoryview(bytes(10)), connection))
        writer.close()

    service = Service(ServerContext(tls), loop, handler, direct=True)
    try:
        with opened(service, client_by_ssl(authority, authority.issue("h1"))) as connection:
            connection.settimeout(30)
            came = exactly(connection, len(first) + len(second) + 10)
    finally:
        service.stop()
    assert answers[:2] == ["some", "no"] and answers[2] != "no"
    assert came == first + second + bytes(10)
    assert service.failures == []


def test_connections_that_are_over_leave_nothing(authority: Authority, tls: Tls) -> None:
    """Also before the interpreter collects cycles, which a service does seldom."""

    def count() -> int:
        return sum(isinstance(each, DirectTls | ServerTls) for each in gc.get_objects())

    service = Service(ServerContext(tls), "uvloop", direct=True)
    context = client_by_ssl(authority, authority.issue("h1"))
    gc.collect()
    before = count()
    gc.disable()
    try:
        for _ in range(5):
            with opened(service, context) as connection:
                connection.sendall(b"x")
                assert connection.recv(1) == b"x"
            with service.connect():
                pass
        until(lambda: count() == before)
    finally:
        gc.enable()
        service.stop()


def test_a_transport_answers_after_it_was_closed_twice(authority: Authority, tls: Tls) -> None:
    answers: list[object] = []

    async def handler(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.close()
        writer.close()
        transport = writer.transport
        answers.extend(
            [transport.is_closing(), transport.get_write_buffer_size(), transport.get_protocol() is not None]
        )
        answers.append(transport.get_extra_info("socket") is not None)
        transport.abort()

    service = Service(ServerContext(tls), "uvloop", handler, direct=True)
    try:
        with opened(service, client_by_ssl(authority, authority.issue("h1"))):
            until(lambda: len(answers) == 4)
    finally:
        service.stop()
    assert answers == [True, 0, True, True]
