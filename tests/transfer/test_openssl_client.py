"""The client's end of streams over TLS (openssl/client.py), beside the ssl module: the same
certificates are refused, and nothing is sent or handed out before."""

from __future__ import annotations

import gc
import ipaddress
import itertools
import os
import secrets
import socket
import ssl
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import NoReturn

import pytest
from authority import DAY, Authority, server_by_ssl
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID
from OpenSSL import SSL
from ports import free_port

from p2pdist.model.errors import Refused, UsageError
from p2pdist.model.plan import Source
from p2pdist.transfer.openssl import bindings, contexts
from p2pdist.transfer.openssl.certificate import described
from p2pdist.transfer.openssl.client import TlsSocket
from p2pdist.transfer.stream.connections import Unreachable, prepare, secure
from p2pdist.transfer.tls import Tls, TlsConnection, TlsError, TlsFiles

PEM = serialization.Encoding.PEM
Behave = Callable[[socket.socket], None]


class Peer:
    """A listener that lets `behave` deal with each connection, in a thread."""

    def __init__(self, behave: Behave) -> None:
        self.listening = socket.create_server(("127.0.0.1", 0))
        self.port = self.listening.getsockname()[1]
        self._behave = behave
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def _serve(self) -> None:
        while True:
            try:
                connection, _ = self.listening.accept()
            except OSError:
                return
            with connection:
                try:
                    connection.settimeout(30)
                    self._behave(connection)
                except OSError:
                    pass

    def connect(self) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self.port), 30)

    def close(self) -> None:
        if self.listening.fileno() >= 0:
            self.listening.shutdown(socket.SHUT_RDWR)
            self.listening.close()
            self._thread.join(30)


@pytest.fixture
def peer() -> Iterator[Callable[[Behave], Peer]]:
    peers: list[Peer] = []

    def start(behave: Behave) -> Peer:
        peers.append(Peer(behave))
        return peers[-1]

    yield start
    for one in peers:
        one.close()


def speaking(context: ssl.SSLContext, then: Callable[[ssl.SSLSocket], None] = lambda secured: None) -> Behave:
    def behave(connection: socket.socket) -> None:
        with context.wrap_socket(connection, server_side=True) as secured:
            then(secured)

    return behave


def opened(peer: Peer, tls: Tls, name: str = "127.0.0.1", timeout_s: float | None = 30) -> TlsSocket:
    connection = TlsSocket(peer.connect(), tls.credentials, name, compared=True)
    try:
        connection.handshake(timeout_s)
    except BaseException:
        connection.close()
        raise
    return connection


def until(found: Callable[[], list[bytes]]) -> list[bytes]:
    """What `found` returns when there is anything, or after ten seconds."""
    deadline = time.monotonic() + 10
    while not found() and time.monotonic() < deadline:
        time.sleep(0.01)
    return found()


# -- certificates, as the ssl module judges them

Names = list[x509.GeneralName]
DNS, IP, URI = x509.DNSName, lambda text: x509.IPAddress(ipaddress.ip_address(text)), x509.UniformResourceIdentifier


def issue(
    authority: Authority,
    names: Names | None,
    *,
    common: str = "peer",
    since: timedelta = -DAY,
    until: timedelta = DAY,
    purposes: list[x509.ObjectIdentifier] | None = None,
    key: ec.EllipticCurvePrivateKey | rsa.RSAPrivateKey | None = None,
    alone: bool = False,
    subject: x509.Name | None = None,
) -> TlsFiles:
    """A certificate of the authority, or of itself (`alone`), and its key."""
    key = key or ec.generate_private_key(ec.SECP256R1())
    now = datetime.now(UTC)
    subject = subject or x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, common)])
    builder = x509.CertificateBuilder(
        subject_name=subject, issuer_name=subject if alone else authority.name, public_key=key.public_key()
    ).serial_number(x509.random_serial_number())
    builder = builder.not_valid_before(now + since).not_valid_after(now + until)
    if names is not None:
        builder = builder.add_extension(x509.SubjectAlternativeName(names), critical=False)
    if purposes:
        builder = builder.add_extension(x509.ExtendedKeyUsage(purposes), critical=False)
    signed = builder.sign(key if alone else authority.key, hashes.SHA256())
    files = TlsFiles(authority.directory / "peer.pem", authority.directory / "peer.key", authority.path)
    files.certificate.write_bytes(signed.public_bytes(PEM))
    files.key.write_bytes(key.private_bytes(PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()))
    return files


def serving(files: TlsFiles) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.set_ciphers("DEFAULT:@SECLEVEL=0")
    context.load_cert_chain(files.certificate, files.key)
    return context


def judged(peer: Peer, tls: Tls, name: str) -> tuple[bool, bool]:
    """Whether ssl, and whether TlsSocket accepts the peer for `name`."""
    verdicts = []
    try:
        with tls.client.wrap_socket(peer.connect(), server_hostname=name):
            verdicts.append(True)
    except ssl.SSLCertVerificationError:
        verdicts.append(False)
    try:
        opened(peer, tls, name).close()
        verdicts.append(True)
    except TlsError as error:
        assert error.unverified, error
        verdicts.append(False)
    return verdicts[0], verdicts[1]


NAMES: list[tuple[Names | None, str, bool]] = [
    ([DNS("agents.example")], "agents.example", True),
    ([DNS("agents.example")], "AGENTS.example", True),
    ([DNS("agents.example")], "agents.example.org", False),
    ([DNS("agents.example")], "gents.example", False),
    ([DNS("agents.example")], "a.agents.example", False),
    ([DNS("h0")], "h0", True),
    ([DNS("h_0.example")], "h_0.example", True),
    ([DNS("*.example.org")], "a.example.org", True),
    ([DNS("*.example.org")], "example.org", False),
    ([DNS("*.example.org")], "a.b.example.org", False),
    ([DNS("a*.example.org")], "ab.example.org", False),
    ([DNS("*a.example.org")], "ba.example.org", False),
    ([DNS("b.*.org")], "b.example.org", False),
    ([DNS("*.org")], "example.org", False),
    ([DNS("*")], "h0", False),
    ([DNS("xn--bcher-kva.example")], "bücher.example", True),
    ([DNS("agents.example\0.other")], "agents.example", False),
    ([DNS("127.0.0.1")], "127.0.0.1", False),
    ([IP("127.0.0.1")], "127.0.0.1", True),
    ([IP("127.0.0.2")], "127.0.0.1", False),
    ([IP("127.0.0.2"), DNS("x"), IP("127.0.0.1")], "127.0.0.1", True),
    ([IP("fd00::1")], "fd00::1", True),
    ([IP("fd00::1")], "fd00:0:0:0:0:0:0:1", True),
    ([IP("fd00::1")], "fd00::2", False),
    ([IP("::ffff:127.0.0.1")], "127.0.0.1", False),
    ([URI("spiffe://fleet/agent/h0")], "h0", False),
    ([x509.RFC822Name("a@h0")], "h0", False),
    (None, "h0", False),
]


@pytest.mark.parametrize(("names", "wanted", "right"), NAMES)
def test_names_are_compared_as_by_the_ssl_module(
    peer: Callable[[Behave], Peer], authority: Authority, tls: Tls, names: Names | None, wanted: str, right: bool
) -> None:
    server = peer(speaking(serving(issue(authority, names))))
    assert judged(server, tls, wanted) == (right, right)


def test_the_common_name_of_a_subject_is_no_host(
    peer: Callable[[Behave], Peer], authority: Authority, tls: Tls
) -> None:
    server = peer(speaking(serving(issue(authority, None, common="h0.example"))))
    assert judged(server, tls, "h0.example")[1] is False


@pytest.mark.parametrize("name", ["", ".example.org", "a\0b", "a..b", "fe80::1%lo", "x" * 64 + ".example"])
def test_what_cannot_be_a_name_is_refused_before_anything_is_sent(
    peer: Callable[[Behave], Peer], tls: Tls, name: str
) -> None:
    came: list[bytes] = []
    server = peer(lambda connection: came.append(connection.recv(100)))
    with pytest.raises(ValueError):
        TlsSocket(server.connect(), tls.credentials, name, compared=True)
    assert until(lambda: came) == [b""]


HERE: Names = [IP("127.0.0.1")]
CLIENT, SERVER = ExtendedKeyUsageOID.CLIENT_AUTH, ExtendedKeyUsageOID.SERVER_AUTH


@pytest.mark.parametrize(
    ("make", "right"),
    [
        (lambda a: issue(a, HERE), True),
        (lambda a: issue(a, HERE, purposes=[SERVER]), True),
        (lambda a: issue(a, HERE, purposes=[CLIENT, SERVER]), True),
        (lambda a: issue(a, HERE, purposes=[CLIENT]), False),
        (lambda a: issue(a, HERE, until=-timedelta(hours=1)), False),
        (lambda a: issue(a, HERE, since=timedelta(hours=1)), False),
        (lambda a: issue(a, HERE, alone=True), False),
        (lambda a: issue(a, HERE, key=rsa.generate_private_key(65537, 2048)), True),
        (lambda a: issue(a, HERE, key=rsa.generate_private_key(65537, 1024)), False),
    ],
    ids=["plain", "server", "both", "client alone", "expired", "not yet", "own", "RSA 2048", "RSA 1024"],
)
def test_certificates_are_judged_as_by_the_ssl_module(
    peer: Callable[[Behave], Peer],
    authority: Authority,
    tls: Tls,
    make: Callable[[Authority], TlsFiles],
    right: bool,
) -> None:
    server = peer(speaking(serving(make(authority))))
    assert judged(server, tls, "127.0.0.1") == (right, right)


def test_another_authority_of_the_same_name_is_refused(
    peer: Callable[[Behave], Peer], tmp_path: Path, tls: Tls
) -> None:
    (tmp_path / "other").mkdir()
    server = peer(speaking(serving(Authority(tmp_path / "other").issue())))
    assert judged(server, tls, "127.0.0.1") == (False, False)


def test_chains_are_judged_as_by_the_ssl_module(
    peer: Callable[[Behave], Peer], authority: Authority, tls: Tls, tmp_path: Path
) -> None:
    """An authority below the trusted one counts when it is sent along and may issue; and one that
    is trusted alone, without the one above it, does not count."""

    def below(path_length: int | None, *, ca: bool) -> Authority:
        made = Authority(tmp_path, "below")
        builder = authority._builder(made.name, made.key)  # the authority issues it
        constraints = x509.BasicConstraints(ca, path_length)
        signed = builder.add_extension(constraints, critical=True).sign(authority.key, hashes.SHA256())
        made.path.write_bytes(signed.public_bytes(PEM))
        return made

    def chained(made: Authority) -> TlsFiles:
        files = made.issue("chained")
        files.certificate.write_bytes(files.certificate.read_bytes() + made.path.read_bytes())
        return files

    made = below(0, ca=True)
    assert judged(peer(speaking(serving(chained(made)))), tls, "127.0.0.1") == (True, True)
    assert judged(peer(speaking(serving(made.issue("alone")))), tls, "127.0.0.1") == (False, False)
    partial = Tls(replace(tls.files, authority=made.path))
    first, second = judged(peer(speaking(serving(made.issue("alone")))), partial, "127.0.0.1")
    assert first == second
    assert judged(peer(speaking(serving(chained(below(None, ca=False))))), tls, "127.0.0.1") == (False, False)


def test_a_new_connection_goes_by_the_newest_certificates_and_authorities(
    peer: Callable[[Behave], Peer], authority: Authority, tls: Tls, tmp_path: Path
) -> None:
    (tmp_path / "other").mkdir()
    other = Authority(tmp_path / "other", "other")
    shown: list[bytes | None] = []
    context = serving(other.issue())
    context.load_verify_locations(authority.path)
    context.verify_mode = ssl.CERT_REQUIRED

    def then(secured: ssl.SSLSocket) -> None:
        shown.append(secured.getpeercert(binary_form=True))
        secured.sendall(b"x")

    server = peer(speaking(context, then))
    with pytest.raises(TlsError, match="issuer"):
        opened(server, tls)
    tls.trust(other.path.read_text())
    for files in (tls.files, authority.issue("renewed")):
        tls.exchange(files)
        with opened(server, tls) as connection:
            assert connection.recv(1) == b"x"
    tls.trust("")
    with pytest.raises(TlsError, match="issuer"):
        opened(server, tls)
    assert len(set(shown)) == 2 and len(shown) == 2


def test_keys_in_other_forms_are_read(authority: Authority) -> None:
    files = authority.issue()
    key = serialization.load_pem_private_key(files.key.read_bytes(), None)
    for form in (serialization.PrivateFormat.TraditionalOpenSSL, serialization.PrivateFormat.PKCS8):
        pem = key.private_bytes(PEM, form, serialization.NoEncryption())
        parameters = b"-----BEGIN EC PARAMETERS-----\nBggqhkjOPQMBBw==\n-----END EC PARAMETERS-----\n"
        for before in (b"", parameters, b"text before\n"):
            files.key.write_bytes(before + pem)
            assert contexts.client_context(Tls(files).credentials)


# -- the fields of a certificate

FIELDS = ("subject", "issuer", "subjectAltName")


def same_fields(found: dict[str, object], by_ssl: dict[str, object]) -> bool:
    """Equal in what is read of them: all of the names, but those alone of DNS and URI."""
    names = tuple(one for one in by_ssl.get("subjectAltName", ()) if one[0] in ("DNS", "URI"))  # type: ignore[attr-defined]
    wanted = {"subject": by_ssl["subject"], "issuer": by_ssl["issuer"]}
    return found == wanted | ({"subjectAltName": names} if "subjectAltName" in by_ssl else {})


def rdn(*parts: tuple[x509.ObjectIdentifier, str]) -> x509.RelativeDistinguishedName:
    return x509.RelativeDistinguishedName([x509.NameAttribute(oid, text) for oid, text in parts])


CN, OU = NameOID.COMMON_NAME, NameOID.ORGANIZATIONAL_UNIT_NAME


FIELD_CASES: list[tuple[Names | None, x509.Name | None]] = [
    ([DNS("a.example"), URI("spiffe://fleet/agent/h%200"), IP("127.0.0.1"), DNS("*.b")], None),
    ([IP("::1")], None),
    (None, None),
    ([URI("spiffe://x/y\0z")], x509.Name([rdn((CN, "a"), (OU, "token")), rdn((NameOID.ORGANIZATION_NAME, "ü€"))])),
    ([x509.RFC822Name("a@b"), DNS("x")], x509.Name([rdn((OU, "one")), rdn((OU, "two"))])),
    ([DNS("x")], x509.Name([])),
    (
        [DNS("x")],
        x509.Name(
            [
                x509.NameAttribute(CN, "bmp é", x509.name._ASN1Type.BMPString),
                x509.NameAttribute(OU, "printable", x509.name._ASN1Type.PrintableString),
            ]
        ),
    ),
]


@pytest.mark.parametrize(("names", "subject"), FIELD_CASES)
def test_fields_are_those_of_the_ssl_module(
    peer: Callable[[Behave], Peer], authority: Authority, tls: Tls, names: Names | None, subject: x509.Name | None
) -> None:
    server = peer(speaking(serving(issue(authority, names, subject=subject))))
    tls.client.check_hostname = False
    with tls.client.wrap_socket(server.connect()) as connection:
        by_ssl = connection.getpeercert()
    assert by_ssl
    with TlsSocket(server.connect(), tls.credentials, "x", compared=False) as secured:
        secured.handshake(30)
        assert same_fields(secured.certificate(), by_ssl)


def test_a_name_that_is_no_text_is_refused(authority: Authority) -> None:
    """Cryptography reads it as bytes or not at all: never as another host."""
    pem = issue(authority, [DNS("abcdefgh")]).certificate.read_bytes()
    der = x509.load_pem_x509_certificate(pem).public_bytes(serialization.Encoding.DER)
    assert der.count(b"abcdefgh") == 1
    with pytest.raises(ValueError):
        described(x509.load_der_x509_certificate(der.replace(b"abcdefgh", b"\xff\xfedefghi")))


def source(peer: Peer) -> Source:
    return Source(host="h0", address=f"127.0.0.1:{peer.port}")


def test_with_access_on_the_host_in_the_certificate_counts(
    peer: Callable[[Behave], Peer], authority: Authority, tls: Tls
) -> None:
    server = peer(speaking(serving(issue(authority, [URI("spiffe://fleet/agent/h0")]))))
    seen: list[object] = []

    def host_in(certificate: object) -> str:
        seen.append(certificate)
        return "h0"

    def attempt() -> TlsConnection:
        return secure(server.connect(), source(server), tls, kept.append, timeout_s=30)

    kept: list[socket.socket] = []
    tls.host_in = host_in
    attempt()
    assert seen[0]["subjectAltName"] == (("URI", "spiffe://fleet/agent/h0"),)  # type: ignore[index]
    for other, text in (("h1", "certificate of h1"), ("", "no host")):
        tls.host_in = lambda certificate, other=other: other  # type: ignore[misc]
        with pytest.raises(Unreachable, match=text):
            attempt()

    def revoked(certificate: object) -> str:
        raise Refused("host h0 is revoked")

    tls.host_in = revoked
    with pytest.raises(Unreachable, match="h0 is revoked"):
        attempt()
    seen.clear()
    tls.host_in = host_in
    server = peer(speaking(serving(issue(authority, [DNS("h0")], alone=True))))
    with pytest.raises(Unreachable, match="no valid certificate"):
        attempt()
    assert not seen, "a certificate is read before it is verified"
    for connection in kept:
        connection.close()


# -- handshakes that fail


def test_nothing_is_sent_or_taken_before_the_handshake(peer: Callable[[Behave], Peer], tls: Tls) -> None:
    came: list[bytes] = []
    server = peer(lambda connection: came.append(connection.recv(100)))
    connection = TlsSocket(server.connect(), tls.credentials, "127.0.0.1", compared=True)
    for use in (
        lambda: connection.sendall(b"x"),
        lambda: connection.recv(1),
        lambda: connection.recv_into(bytearray(1)),
        connection.pending,
        connection.certificate,
    ):
        with pytest.raises(TlsError, match="not been verified"):
            use()
    for denied in (connection.send, connection.sendto, connection.sendmsg, connection.recvmsg, connection.makefile):
        with pytest.raises(NotImplementedError):
            denied(b"x")
    connection.close()
    assert until(lambda: came) == [b""]


def test_a_request_never_reaches_a_peer_that_is_not_verified(
    peer: Callable[[Behave], Peer], authority: Authority, tls: Tls
) -> None:
    came: list[bytes] = []
    server = peer(speaking(serving(issue(authority, [DNS("other")])), lambda secured: came.append(secured.recv(1))))
    connection = TlsSocket(server.connect(), tls.credentials, "127.0.0.1", compared=True)
    with pytest.raises(TlsError, match="IP address mismatch"):
        connection.handshake(30)
    with pytest.raises(TlsError, match="not been verified"):
        connection.sendall(b"secret")
    connection.close()
    server.close()
    assert came in ([], [b""])


@pytest.mark.parametrize(
    ("answer", "plain"),
    [
        (b"HTTP/1.1 400 Bad Request\r\n\r\n", True),
        (b"", False),
        (b"\x16\x03\x03\x00\x05hello", False),
        (os.urandom(99), None),
    ],
    ids=["plain", "closes", "garbage in a record", "garbage"],
)
def test_what_is_no_tls_is_told(peer: Callable[[Behave], Peer], tls: Tls, answer: bytes, plain: bool | None) -> None:
    def behave(connection: socket.socket) -> None:
        connection.recv(4096)
        connection.sendall(answer)

    server = peer(behave)
    with pytest.raises(TlsError) as failure:
        opened(server, tls)
    assert not failure.value.unverified and str(failure.value)
    assert plain is None or failure.value.plain is plain


def test_a_handshake_has_a_time_limit(peer: Callable[[Behave], Peer], tls: Tls) -> None:
    """One for all of it, though bytes keep coming."""
    over = threading.Event()

    def behave(connection: socket.socket) -> None:
        connection.sendall(b"\x16\x03\x03\x40\x00")
        while not over.wait(0.05):
            connection.sendall(b"\x02")

    server = peer(behave)
    began = time.monotonic()
    with pytest.raises(TimeoutError):
        opened(server, tls, timeout_s=0.4)
    assert 0.4 <= time.monotonic() - began < 5
    over.set()


def test_older_tls_is_refused(peer: Callable[[Behave], Peer], authority: Authority, tls: Tls) -> None:
    context = serving(authority.issue("older"))
    context.maximum_version = ssl.TLSVersion.TLSv1_2
    with pytest.raises(TlsError, match="version"):
        opened(peer(speaking(context)), tls)


def test_a_client_certificate_is_refused_after_the_handshake(
    peer: Callable[[Behave], Peer], authority: Authority, tls: Tls, tmp_path: Path
) -> None:
    (tmp_path / "other").mkdir()
    context = serving(authority.issue("strict"))
    context.load_verify_locations(Authority(tmp_path / "other").path)
    context.verify_mode = ssl.CERT_REQUIRED
    with opened(peer(speaking(context)), tls) as connection, pytest.raises(TlsError, match="alert"):
        connection.recv(1)


# -- what comes after it


class Between:
    """Relays a TLS connection to `target`, and hands the records of the server
    through `change`; hangs up after one that it made shorter."""

    def __init__(self, peer: Callable[[Behave], Peer], target: Peer, change: Callable[[bytes], bytes]) -> None:
        self.changing = False

        def behave(connection: socket.socket) -> None:
            with target.connect() as above:
                threading.Thread(target=self._up, args=(connection, above), daemon=True).start()
                while head := _exactly(above, 5):
                    record = head + _exactly(above, struct.unpack(">H", head[3:])[0])
                    changed = change(record) if self.changing else record
                    connection.sendall(changed)
                    if len(changed) < len(record):
                        connection.shutdown(socket.SHUT_RDWR)  # the other thread reads it
                        return

        self.peer = peer(behave)

    @staticmethod
    def _up(below: socket.socket, above: socket.socket) -> None:
        try:
            while data := below.recv(65536):
                above.sendall(data)
        except OSError:
            pass


def _exactly(connection: socket.socket, count: int) -> bytes:
    data = b""
    while len(data) < count and (part := connection.recv(count - len(data))):
        data += part
    return data


def answering(data: bytes) -> Callable[[ssl.SSLSocket], None]:
    def then(secured: ssl.SSLSocket) -> None:
        secured.recv(1)
        secured.sendall(data)
        secured.recv(1)

    return then


@pytest.mark.parametrize("where", [5, 20, -1])
def test_a_record_with_a_flipped_bit_is_an_error_and_gives_no_byte(
    peer: Callable[[Behave], Peer], tls: Tls, where: int
) -> None:
    def flipped(record: bytes) -> bytes:
        changed = bytearray(record)
        changed[where] ^= 4
        return bytes(changed)

    between = Between(peer, peer(speaking(server_by_ssl(tls), answering(b"data" * 100))), flipped)
    with opened(between.peer, tls) as connection:
        between.changing = True
        connection.sendall(b"x")
        view = bytearray(400)
        for _ in range(2):
            with pytest.raises(TlsError, match=r"bad record mac|failed before"):
                connection.recv_into(view)
        assert view == bytes(400)


def test_a_connection_that_is_cut_in_a_record_ends_there(peer: Callable[[Behave], Peer], tls: Tls) -> None:
    lengths = iter((None, 50))

    def cut(record: bytes) -> bytes:
        return record[: next(lengths)]

    def then(secured: ssl.SSLSocket) -> None:
        secured.recv(1)
        secured.sendall(b"whole")
        secured.sendall(b"cut" * 100)
        secured.recv(1)

    between = Between(peer, peer(speaking(server_by_ssl(tls), then)), cut)
    with opened(between.peer, tls) as connection:
        between.changing = True
        connection.sendall(b"x")
        assert connection.recv(1000) == b"whole"
        assert connection.recv(1000) == b"" == connection.recv(1000)


def test_a_buffer_is_filled_from_as_many_records_as_it_takes(peer: Callable[[Behave], Peer], tls: Tls) -> None:
    data = secrets.token_bytes(100_000)

    def then(secured: ssl.SSLSocket) -> None:
        secured.recv(1)
        for start in range(0, len(data), 7000):
            secured.sendall(data[start : start + 7000])
        secured.recv(1)

    with opened(peer(speaking(server_by_ssl(tls), then)), tls, timeout_s=None) as connection:
        connection.sendall(b"x")
        buffer = bytearray(90_010)
        view = memoryview(buffer)
        assert connection.recv_all_into(view[:0]) == 0
        assert connection.recv_all_into(view[5:60_005]) == 60_000
        assert connection.recv_all_into(view[60_005:90_005]) == 30_000
        assert buffer == bytes(5) + data[:90_000] + bytes(5)
        connection.sendall(b"x")
        assert connection.recv_all_into(view) == 10_000 and bytes(view[:10_000]) == data[90_000:]
        assert connection.recv_all_into(view) == 0
        connection.settimeout(30)
        with pytest.raises(ValueError, match="time limit"):
            connection.recv_all_into(view)


def test_a_buffer_is_filled_no_further_than_a_record_that_is_damaged(peer: Callable[[Behave], Peer], tls: Tls) -> None:
    records = itertools.count()

    def flipped(record: bytes) -> bytes:
        return record if next(records) < 2 else record[:-1] + bytes([record[-1] ^ 1])

    def then(secured: ssl.SSLSocket) -> None:
        secured.recv(1)
        for _ in range(4):
            secured.sendall(b"data")
        secured.recv(1)

    between = Between(peer, peer(speaking(server_by_ssl(tls), then)), flipped)
    with opened(between.peer, tls, timeout_s=None) as connection:
        between.changing = True
        connection.sendall(b"x")
        view = memoryview(bytearray(16))
        with pytest.raises(TlsError, match="bad record mac"):
            connection.recv_all_into(view)
        assert bytes(view) == b"datadata" + bytes(8)


@pytest.mark.parametrize("read", [TlsSocket.recv_into, TlsSocket.recv_all_into])
def test_a_view_in_the_traceback_of_an_error_is_exported_no_more(
    peer: Callable[[Behave], Peer], tls: Tls, read: Callable[[TlsSocket, memoryview], int]
) -> None:
    """The interpreter would crash when it collects a cycle with the view in it."""

    def then(secured: ssl.SSLSocket) -> None:
        secured.recv(1)
        secured.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))

    with opened(peer(speaking(server_by_ssl(tls), then)), tls, timeout_s=None) as connection:
        connection.sendall(b"x")
        view = memoryview(bytearray(16))
        with pytest.raises(ConnectionResetError) as failed:
            read(connection, view)
        assert failed.value.__traceback__ is not None
        view.release()  # BufferError while it is exported


def test_another_thread_ends_a_buffer_that_is_being_filled(peer: Callable[[Behave], Peer], tls: Tls) -> None:
    ended: list[object] = []
    with opened(peer(speaking(server_by_ssl(tls), answering(b"some"))), tls, timeout_s=None) as connection:
        connection.sendall(b"x")
        thread = threading.Thread(target=lambda: ended.append(connection.recv_all_into(memoryview(bytearray(10)))))
        thread.start()
        time.sleep(0.1)
        connection.shutdown(socket.SHUT_RDWR)
        thread.join(10)
        assert not thread.is_alive() and ended == [4]


def test_a_reset_is_told_as_one(peer: Callable[[Behave], Peer], tls: Tls) -> None:
    def then(secured: ssl.SSLSocket) -> None:
        secured.recv(1)
        secured.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))

    with opened(peer(speaking(server_by_ssl(tls), then)), tls) as connection:
        connection.sendall(b"x")
        with pytest.raises(ConnectionResetError):
            connection.recv(1)


def test_the_end_that_tls_marks_comes_after_the_bytes(peer: Callable[[Behave], Peer], tls: Tls) -> None:
    def then(secured: ssl.SSLSocket) -> None:
        secured.sendall(b"x" * 20_000)
        secured.unwrap()

    with opened(peer(speaking(server_by_ssl(tls), then)), tls) as connection:
        taken = b""
        while part := connection.recv(65536):
            taken += part
        assert taken == b"x" * 20_000 and connection.recv(1) == b""


def test_keys_are_updated_by_the_server(
    peer: Callable[[Behave], Peer], authority: Authority, tls: Tls, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By openssl s_server, which sends a KeyUpdate and asks for one (K)."""
    files = authority.issue("updating")
    port = free_port()
    words = ["openssl", "s_server", "-accept", str(port), "-cert", files.certificate, "-key", files.key, "-tls1_3"]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as server:
        assert server.stdin and server.stdout
        try:
            while b"ACCEPT" not in server.stdout.readline():
                pass
            plain = socket.create_connection(("127.0.0.1", port), 30)
            with TlsSocket(plain, tls.credentials, "127.0.0.1", compared=True) as connection:
                connection.handshake(30)
                for word, answer in ((b"one\n", b"one\n"), (b"K\n", b""), (b"two\n", b"two\n")):
                    server.stdin.write(word)
                    server.stdin.flush()
                    time.sleep(0.2)
                    taken = b""
                    while len(taken) < len(answer):
                        taken += connection.recv(100)
                    assert taken == answer
                connection.sendall(b"back\n")
                while b"back" not in (line := server.stdout.readline()):
                    assert line
        finally:
            server.kill()


# -- as a socket


def test_time_limits_and_reads_that_do_not_wait(peer: Callable[[Behave], Peer], tls: Tls) -> None:
    with opened(peer(speaking(server_by_ssl(tls), answering(b"abc"))), tls) as connection:
        connection.settimeout(0.1)
        began = time.monotonic()
        with pytest.raises(TimeoutError) as late:
            connection.recv(1)
        assert time.monotonic() - began >= 0.1 and late.value.errno is None
        connection.settimeout(0)
        with pytest.raises(BlockingIOError):
            connection.recv_into(bytearray(10))
        connection.sendall(b"x")
        connection.settimeout(30)
        assert connection.recv(1) == b"a" and connection.pending() == 2
        view = memoryview(bytearray(10))
        assert connection.recv_into(view[4:]) == 2 and view[4:6] == b"bc"
        assert connection.recv_into(view[:0]) == 0
        with pytest.raises(ValueError):
            connection.recv(1, socket.MSG_PEEK)


def test_much_is_sent_to_a_peer_that_reads_late(peer: Callable[[Behave], Peer], tls: Tls) -> None:
    """A time limit makes the descriptor one that does not block."""
    data, taken = os.urandom(8 << 20), bytearray()

    def then(secured: ssl.SSLSocket) -> None:
        time.sleep(0.3)
        while len(taken) < len(data):
            taken.extend(secured.recv(1 << 20))
        secured.sendall(b"x")

    server = peer(speaking(server_by_ssl(tls), then))
    with opened(server, tls) as connection:
        connection.sendall(data)
        assert connection.recv(1) == b"x"
    assert taken == data


@pytest.mark.parametrize("timeout_s", [None, 30])
def test_another_thread_ends_a_read_that_waits(
    peer: Callable[[Behave], Peer], tls: Tls, timeout_s: float | None
) -> None:
    ended: list[object] = []
    with opened(peer(speaking(server_by_ssl(tls), answering(b""))), tls) as connection:
        connection.settimeout(timeout_s)

        def read() -> None:
            try:
                ended.append(connection.recv(1))
            except OSError as error:
                ended.append(error)

        thread = threading.Thread(target=read)
        thread.start()
        time.sleep(0.1)
        connection.shutdown(socket.SHUT_RDWR)
        thread.join(10)
        assert not thread.is_alive() and ended == [b""]


def test_a_closed_connection_uses_no_descriptor(peer: Callable[[Behave], Peer], tls: Tls) -> None:
    """Its number may be another connection's by then."""
    connection = opened(peer(speaking(server_by_ssl(tls), answering(b""))), tls)
    connection.close()
    for use in (lambda: connection.recv(1), lambda: connection.sendall(b"x"), connection.pending):
        with pytest.raises(OSError, match="Bad file descriptor"):
            use()
    connection.close()


def test_connections_leave_no_descriptor_and_no_memory(peer: Callable[[Behave], Peer], tls: Tls) -> None:
    server = peer(speaking(server_by_ssl(tls), lambda secured: secured.sendall(b"x")))

    def rounds(count: int) -> tuple[int, int]:
        for _ in range(count):
            with opened(server, tls) as connection:
                assert connection.recv(1) == b"x"
        resident = int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE")
        return len(os.listdir("/proc/self/fd")), resident

    rounds(50)
    gc.collect()
    gc.disable()
    try:
        descriptors, resident = rounds(1)
        after = rounds(200)
    finally:
        gc.enable()
    assert after[0] <= descriptors + 1 and after[1] < resident + (4 << 20), "the collector should not be needed"


def test_credentials_that_cannot_be_used_leave_no_descriptor(peer: Callable[[Behave], Peer], tls: Tls) -> None:
    server = peer(lambda connection: None)
    before = len(os.listdir("/proc/self/fd"))
    broken = replace(tls.credentials, key=b"no key")
    for _ in range(3):
        with pytest.raises(TlsError, match="cannot use"):
            TlsSocket(server.connect(), broken, "127.0.0.1", compared=True)
    assert len(os.listdir("/proc/self/fd")) <= before + 1
    assert b"no key" not in repr(broken).encode()


def test_what_pyopenssl_keeps_to_itself_is_there() -> None:
    """A version of it, or of cryptography, without these names verifies no peer: every handshake
    fails."""
    for name in (
        "SSL_read",
        "SSL_get0_param",
        "SSL_get_verify_result",
        "X509_VERIFY_PARAM_set_hostflags",
        "X509_VERIFY_PARAM_set1_host",
        "X509_VERIFY_PARAM_set1_ip",
        "X509_verify_cert_error_string",
        "X509_CHECK_FLAG_NO_PARTIAL_WILDCARDS",
        "X509_CHECK_FLAG_NEVER_CHECK_SUBJECT",
    ):
        assert hasattr(bindings.lib, name), name
    assert hasattr(SSL.Connection(SSL.Context(SSL.TLS_CLIENT_METHOD)), "_ssl")
    assert hasattr(SSL.Connection, "_raise_ssl_error")


def test_what_streams_need_is_made_before_the_first(tls: Tls, monkeypatch: pytest.MonkeyPatch) -> None:
    """And certificates that it cannot use are told then."""
    prepare(tls)
    tls.reload()
    made: list[object] = []
    monkeypatch.setattr(contexts, "_made", lambda credentials, method: made.append(method))
    contexts.client_context(tls.credentials)
    contexts.server_context(tls.credentials)
    assert made == []
    before = tls.credentials
    monkeypatch.setattr(contexts, "_made", failing)
    for change in (tls.reload, lambda: tls.exchange(tls.files), lambda: tls.trust("")):
        with pytest.raises(UsageError, match="no such curve"):
            change()
    assert tls.credentials is before, "what cannot be used changes nothing"


def failing(credentials: object, method: int) -> NoReturn:
    raise ValueError("no such curve")


def test_plain_agents_do_not_load_it() -> None:
    code = "import sys, p2pdist.cli.main, p2pdist.agent.agent, p2pdist.transfer.stream.client; assert 'OpenSSL' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_a_time_limit_is_that_of_a_read_as_a_whole(peer: Callable[[Behave], Peer], tls: Tls) -> None:
    """Of a record whose bytes come one by one."""
    done = threading.Event()

    def then(secured: ssl.SSLSocket) -> None:
        secured.recv(1)
        raw = socket.socket(fileno=secured.detach())
        with raw:
            for byte in b"\x17\x03\x03\x40\x00" + bytes(200):
                if done.wait(0.05):
                    break
                raw.sendall(bytes([byte]))

    with opened(peer(speaking(server_by_ssl(tls), then)), tls, timeout_s=0.5) as connection:
        connection.sendall(b"x")
        began = time.monotonic()
        with pytest.raises(TimeoutError):
            connection.recv(1)
        assert time.monotonic() - began < 5 and connection.gettimeout() == 0.5
        done.set()
