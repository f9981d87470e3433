"""The server's end of TLS connections by pyOpenSSL, below the event loop's own TLS: its OpenSSL
encrypts with half the processor time of most interpreters', or less.

An event loop speaks TLS through the object that `ssl.SSLContext.wrap_bio` returns, and moves the
encrypted bytes by two `ssl.MemoryBIO`, one for each way. A ServerContext returns a ServerTls, which
does by pyOpenSSL what an `ssl.SSLObject` does. The event loop keeps what it did before: time limits
of the handshake and of the end, what waits to be sent, the pauses of a reader that is full.

An event loop's own transport for TLS does not tell what the plain one below it still holds, so
nobody else can send on its socket in order. A ServerContext's protocol is asyncio's for TLS over a
plain transport that is ours, and that tells. While it holds nothing, a sender's block is encrypted
and handed to the kernel at once, which spares the block two copies and the event loop a turn. What
the kernel does not take goes to the plain transport, as does everything else that TLS says.

Certificates of clients are verified as by the ssl module: OpenSSL's own check of the chain up to
the authorities, for the purpose of a client.

Invariants: nothing is decrypted or encrypted for the caller before the handshake is over; a peer's
mistakes are `ssl.SSLError`, as event loops expect; a connection goes by the Credentials that were
the newest when it began; the kernel gets the records of a connection in the order in which they
were encrypted.
"""

from __future__ import annotations

import asyncio
import socket
import ssl
from asyncio import sslproto
from typing import TYPE_CHECKING, Any, Literal, NoReturn, cast

from OpenSSL import SSL

from p2pdist.transfer.openssl.bindings import exported, ffi, lib, reason_of, verification
from p2pdist.transfer.openssl.certificate import UNREADABLE, described
from p2pdist.transfer.openssl.contexts import server_context
from p2pdist.transfer.tls import RECORD_BYTES, RECORD_MAX, ServedTls, ServingContext, Tls, TlsError

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer, WriteableBuffer

WRITE_BYTES = 256 << 10
"""Most bytes that one write encrypts: OpenSSL keeps room for as many while the connection is
open."""

TAKE_BYTES = 64 << 10
"""Most encrypted bytes that a read gives to OpenSSL: what is left with the event loop counts
towards its limits."""

DIRECT_BYTES = 260 << 10
"""Most bytes that are sent past the event loop at once."""

PLACE_BYTES = 320 << 10
"""Memory for encrypted bytes on their way: those of DIRECT_BYTES, and the head and the tag of each
record."""


class ServerContext(ServingContext):
    """What a listener of an event loop is given to speak TLS with the certificates of `tls`. For
    one thread."""

    _tls: Tls
    _place: bytearray

    def __new__(cls, tls: Tls) -> ServerContext:
        context = super().__new__(cls, ssl.PROTOCOL_TLS_SERVER)
        context._tls, context._place = tls, bytearray(PLACE_BYTES)
        return context

    def wrap_bio(
        self,
        incoming: ssl.MemoryBIO,
        outgoing: ssl.MemoryBIO,
        server_side: bool = False,
        server_hostname: str | bytes | None = None,
        session: ssl.SSLSession | None = None,
    ) -> ssl.SSLObject:
        """The server's end of a new connection. Raises ValueError for the client's, and TlsError
        for credentials that cannot be used."""
        if not server_side:
            raise ValueError("this is a server's context")
        return cast(ssl.SSLObject, ServerTls(self._tls, incoming, outgoing, self._place))

    def tls_protocol(
        self, served: asyncio.Protocol, verified: asyncio.Future[None], *, handshake_s: float, shutdown_s: float
    ) -> asyncio.BaseProtocol:
        return _Protocol(DirectTls(self._tls, self._place), served, verified, handshake_s, shutdown_s)


class ServerTls:
    """What event loops use of an `ssl.SSLObject`. `place` is memory that connections of one thread
    share."""

    def __init__(self, tls: Tls, incoming: ssl.MemoryBIO, outgoing: ssl.MemoryBIO, place: bytearray) -> None:
        self._tls = connection = SSL.Connection(server_context(tls.credentials), None)
        connection.set_accept_state()
        self._ssl = connection._ssl
        lib.SSL_clear_mode(self._ssl, lib.SSL_MODE_ENABLE_PARTIAL_WRITE)  # one call for all records of a write
        self._encrypted_in, self._encrypted_out = connection._into_ssl, connection._from_ssl
        self._incoming, self._outgoing = incoming, outgoing
        self._place, self._placed = ffi.from_buffer(place), memoryview(place)
        self._start = ffi.new("char **")
        """Where OpenSSL says that bytes lie; nobody reads it."""
        self._verified = False
        """Whether the handshake is over; written by `do_handshake`."""

    def do_handshake(self) -> None:
        """Go on with the handshake. Raises SSLWantReadError until it is over, and SSLError for a
        certificate that is not valid and for what is no TLS."""
        self._take()
        try:
            self._tls.do_handshake()
        except SSL.Error as error:
            self._fail(error)
        finally:
            self._give()
        if (code := verification(self._tls)[0]) or self._tls.get_protocol_version() != SSL.TLS1_3_VERSION:
            raise ssl.SSLError(ssl.SSL_ERROR_SSL, f"the peer has not been verified ({code})")
        self._verified = True

    def getpeercert(self) -> dict[str, Any] | None:
        """The verified certificate of the client, None where it has none: its subject, issuer, and
        of the alternative names those of DNS and URI. Raises SSLError for one that cannot be
        read."""
        self._require_verified()
        try:
            certificate = self._tls.get_peer_certificate(as_cryptography=True)
            return described(certificate) if certificate is not None else None
        except UNREADABLE as error:
            raise ssl.SSLError(ssl.SSL_ERROR_SSL, f"the certificate cannot be read: {error}") from None

    def cipher(self) -> tuple[str, str, int] | None:
        """Name, version of TLS, and secret bits of the cipher."""
        name, version, bits = self._tls.get_cipher_name(), self._tls.get_cipher_version(), self._tls.get_cipher_bits()
        return (name, version, bits) if name and version and bits else None

    def compression(self) -> None:
        """None: TLS 1.3 has none."""

    def pending(self) -> int:
        """How many bytes are here of which `incoming` does not tell; those of half a record count,
        so a read may still raise SSLWantReadError."""
        return int(lib.SSL_pending(self._ssl)) + _waiting(self._encrypted_in, self._start)

    def read(self, length: int = RECORD_BYTES, buffer: WriteableBuffer | None = None) -> Any:
        """Up to a record's bytes, or with `buffer` how many were put there; none at the end. Raises
        SSLWantReadError and SSLError."""
        self._require_verified()
        if _waiting(self._encrypted_in, self._start) < RECORD_MAX:
            self._take(TAKE_BYTES)
        length = min(length, RECORD_BYTES)
        try:
            if buffer is None:
                return self._tls.recv(length)
            with exported(buffer) as place:
                taken = int(lib.SSL_read(self._ssl, place, min(length, len(place))))
            if taken <= 0:
                self._refuse(taken)
            return taken
        except SSL.ZeroReturnError:
            return b"" if buffer is None else 0
        except SSL.Error as error:
            self._fail(error)
        finally:
            self._give()

    def write(self, data: ReadableBuffer) -> int:
        """Encrypt `data`, WRITE_BYTES at most; returns how many bytes that is. Raises SSLError."""
        try:
            return self._encrypt(data, WRITE_BYTES)
        finally:
            self._give()

    def encrypt(self, data: ReadableBuffer) -> memoryview:
        """Encrypt `data`, at most DIRECT_BYTES and not none, while nothing is `unsent`; returns
        what the peer is to be sent for it, which is good until a connection of this thread encrypts
        again. Raises SSLError."""
        self._encrypt(data, DIRECT_BYTES)
        count = int(lib.BIO_read(self._encrypted_out, self._place, PLACE_BYTES))
        if count <= 0 or _waiting(self._encrypted_out, self._start):
            raise TlsError(f"{len(data)} bytes were encrypted, and {count} came")  # type: ignore[arg-type]
        return self._placed[:count]

    def unsent(self) -> bool:
        """Whether something is encrypted that has not been taken."""
        return bool(self._outgoing.pending or _waiting(self._encrypted_out, self._start))

    def unwrap(self) -> None:
        """Tell the peer that nothing follows. Raises SSLWantReadError until the peer has told the
        same, and SSLError."""
        self._take()
        try:
            done = self._tls.shutdown()
        except SSL.Error as error:
            self._fail(error)
        finally:
            self._give()
        if not done:
            raise ssl.SSLWantReadError(ssl.SSL_ERROR_WANT_READ, "the peer has not ended")

    # --

    def _require_verified(self) -> None:
        if not self._verified:
            raise ssl.SSLError(ssl.SSL_ERROR_SSL, "the handshake is not over")

    def _encrypt(self, data: ReadableBuffer, most: int) -> int:
        self._require_verified()
        with ffi.from_buffer(data) as place:
            if not len(place):
                return 0
            done = int(lib.SSL_write(self._ssl, place, min(len(place), most)))
        try:
            if done <= 0:
                self._refuse(done)
        except SSL.Error as error:
            self._fail(error)
        return done

    def _take(self, count: int = -1) -> None:
        """Give OpenSSL what has come, `count` bytes at most."""
        if self._incoming.pending:
            data = self._incoming.read(count)
            if lib.BIO_write(self._encrypted_in, data, len(data)) != len(data):
                raise MemoryError("OpenSSL has no room for what has come")

    def _give(self) -> None:
        """Give the event loop what is to be sent."""
        if not _waiting(self._encrypted_out, self._start):
            return
        while True:
            count = int(lib.BIO_read(self._encrypted_out, self._place, PLACE_BYTES))
            if count > 0:
                self._outgoing.write(self._placed[:count])
            if count < PLACE_BYTES:
                return

    def _refuse(self, result: int) -> NoReturn:
        """Raise what pyOpenSSL does for a call of this thread that returned `result`, the last
        thing that OpenSSL did."""
        self._tls._raise_ssl_error(self._ssl, result)
        raise TlsError(f"TLS ended with {result} and no error")

    def _fail(self, error: SSL.Error) -> NoReturn:
        """Raise what the ssl module would."""
        if isinstance(error, SSL.WantReadError):
            raise ssl.SSLWantReadError(ssl.SSL_ERROR_WANT_READ, "more must come first") from None
        if isinstance(error, SSL.ZeroReturnError):
            raise ssl.SSLZeroReturnError(ssl.SSL_ERROR_ZERO_RETURN, "the peer has ended") from None
        reason = reason_of(error)
        if "certificate verify failed" in reason:
            raise ssl.SSLCertVerificationError(ssl.SSL_ERROR_SSL, verification(self._tls)[1]) from None
        raise ssl.SSLError(ssl.SSL_ERROR_SSL, reason) from None


class DirectTls(ServedTls):
    """TLS with the certificates of `tls` on a plain transport. `place` is memory that connections
    of one thread share. Within its event loop."""

    def __init__(self, tls: Tls, place: bytearray) -> None:
        self._credentials_of, self._place = tls, place
        self._below: asyncio.Transport | None = None
        """None before the connection is made, and after it is lost; written by `begin` and
        `end`."""
        self._emptied: asyncio.Future[None] | None = None
        """Has a result once `_below` holds nothing, or is lost; None while it holds nothing."""

    def wrap_bio(
        self, incoming: ssl.MemoryBIO, outgoing: ssl.MemoryBIO, server_side: bool, server_hostname: str | None
    ) -> ssl.SSLObject:
        """Stand for an SSLContext towards `asyncio.sslproto`, which asks it for nothing else."""
        self._tls = ServerTls(self._credentials_of, incoming, outgoing, self._place)
        return cast(ssl.SSLObject, self._tls)

    def send_now(self, data: memoryview, connection: socket.socket) -> Literal["no", "some", "all"]:
        below = self._below
        if below is None or below.is_closing() or below.get_write_buffer_size() or self._tls.unsent():
            return "no"
        if len(data) > DIRECT_BYTES:
            return "no"
        encrypted = self._tls.encrypt(data)
        try:
            sent = connection.send(encrypted)
        except OSError:  # it is full; or it is broken, which the transport finds out as well
            sent = 0
        if sent == len(encrypted):
            return "all"
        below.write(bytes(encrypted[sent:]))
        return "some"

    async def emptied(self) -> None:
        while self._emptied is not None:  # again, where more of what was said before has followed
            await asyncio.shield(self._emptied)

    def begin(self, below: asyncio.Transport) -> None:
        """The connection is made."""
        self._below = below
        below.set_write_buffer_limits(0)  # so that a pause tells that it holds something

    def filled(self) -> None:
        """The plain transport holds something."""
        self._emptied = asyncio.get_running_loop().create_future()

    def drained(self) -> None:
        """The plain transport holds nothing."""
        emptied, self._emptied = self._emptied, None
        if emptied is not None and not emptied.done():
            emptied.set_result(None)

    def end(self) -> None:
        """The connection is lost."""
        self._below = None
        self.drained()


class _Protocol(sslproto.SSLProtocol):
    """What a plain transport serves: TLS by `direct`, around `served`."""

    max_size = RECORD_BYTES  # of its buffer, of which every connection has one

    def __init__(
        self,
        direct: DirectTls,
        served: asyncio.Protocol,
        verified: asyncio.Future[None],
        handshake_s: float,
        shutdown_s: float,
    ) -> None:
        self._direct = direct
        self._begun = False
        """Whether there is, or was, a transport; written by `_get_app_transport`."""
        super().__init__(
            asyncio.get_running_loop(),
            served,
            cast(ssl.SSLContext, direct),
            verified,
            server_side=True,
            ssl_handshake_timeout=cast(int, handshake_s),  # any number of seconds does
            ssl_shutdown_timeout=shutdown_s,
        )

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._direct.begin(cast(asyncio.Transport, transport))
        super().connection_made(transport)

    def connection_lost(self, exc: BaseException | None) -> None:
        self._direct.end()
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        self._direct.filled()
        super().pause_writing()

    def resume_writing(self) -> None:
        self._direct.drained()
        super().resume_writing()

    def _get_app_transport(self) -> Any:
        if not self._begun:
            self._begun, self._app_transport = True, _Transport(self._loop, self)
        return self._app_transport


class _Transport(sslproto._SSLProtocolTransport):
    """As asyncio's, which after a second `close` answers no question any more."""

    def close(self) -> None:
        if not self.is_closing():
            super().close()


def _waiting(memory: Any, start: Any) -> int:
    """How many bytes lie in OpenSSL's `memory`."""
    return int(lib.BIO_get_mem_data(memory, start))
