"""The client's end of a TLS connection by pyOpenSSL, for receiving streams with less processor time
than by the ssl module: its OpenSSL is newer than most interpreters'.

Theory. OpenSSL on a descriptor takes each record with two calls of the kernel. Here one call takes
several records to memory that OpenSSL then reads as if it were the connection. Decrypting is still
a call a record, in which other threads may run; so few threads that receive fast do it at
once (semaphore.py), and take more with a call then.

Certificates are verified as the ssl module does for Tls.client: TLS 1.3 alone, OpenSSL's own check
of the chain up to the same authorities for the purpose of a server, without a callback that could
let one through, and of the name or IP address within the handshake; the subject's common name
stands for no host. With access on the name is left to `Tls.host_in`, which reads `certificate`.

Invariants: no byte is sent or handed out before the handshake has verified the peer; whatever is
not understood raises. The context is that of the newest Credentials.

Only stream/connections.py imports this module, when an agent with certificates starts.
"""

from __future__ import annotations

import contextlib
import errno
import ipaddress
import os
import socket
import time
from typing import TYPE_CHECKING, Any, NoReturn

from OpenSSL import SSL

from p2pdist.transfer.openssl.bindings import exported, ffi, lib, reason_of, verification
from p2pdist.transfer.openssl.certificate import UNREADABLE, described
from p2pdist.transfer.openssl.contexts import client_context
from p2pdist.transfer.openssl.semaphore import HOLD_BYTES, RECEIVING, Permit
from p2pdist.transfer.tls import RECORD_BYTES, RECORD_MAX, Credentials, TlsConnection, TlsError

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer, WriteableBuffer

TAKEN_MAX = 256 << 10
"""Bytes for which encrypted ones are taken from the kernel at once: larger calls save little."""

RECORD_OVERHEAD = 22
"""Bytes of a record in TLS 1.3 beside its data: head, type and tag (RFC 8446, 5.2)."""


class TlsSocket(TlsConnection):
    """Takes the descriptor of `connection`, which has connected, from it. `name` is what the peer
    is told to be called, unless it is an IP address; `compared`: its certificate must be made out
    to that. Nothing is sent before `handshake`. For one thread, except `shutdown`. Raises
    ValueError for what cannot be a name, and TlsError for credentials that cannot be used.

    Time limits are those of a socket (settimeout), for each call as a whole; `sendall` may take as
    long for every part that the kernel takes."""

    def __init__(self, connection: socket.socket, credentials: Credentials, name: str, *, compared: bool) -> None:
        super().__init__(connection.family, connection.type, connection.proto, fileno=connection.fileno())
        timeout_s = connection.gettimeout()
        connection.detach()
        self._tls: SSL.Connection | None = None
        """None once it is closed."""
        self._verified = False
        """Whether the handshake is over; written by `handshake`."""
        self._readable: Any = None
        """OpenSSL's connection, from the handshake to the end or `close`."""
        self._over = False
        """Whether a read has met the end, after which nothing is asked again."""
        self._taken = memoryview(b"")
        """Memory for encrypted bytes, and those that were taken last."""
        self._incoming: Any = None
        """OpenSSL's view of it; what is left of it has not been decrypted."""
        self._decrypted: Any = None
        """The memory that this view is of: it may not go before the view does."""
        self._start = ffi.new("char **")
        """Where OpenSSL says that bytes lie; nobody reads it."""
        self._permit: Permit | None = None
        """Of RECEIVING, which this thread holds, unless it has lost it."""
        self._held_bytes = 0
        """How many bytes it took with it."""
        self._unsent = bytearray()
        """What OpenSSL had to send and the kernel has not taken."""
        try:
            self.settimeout(timeout_s)
            self._tls = SSL.Connection(client_context(credentials), None)
            _expect(self._tls, name, compared=compared)
            self._tls.set_connect_state()
            self._ssl, self._outgoing = self._tls._ssl, self._tls._from_ssl
            self._tls._into_ssl = None  # which `_take` replaces
            self._make_room(RECORD_MAX)
        except BaseException:
            self.close()
            raise

    def handshake(self, timeout_s: float | None) -> None:
        """Verify the peer, within `timeout_s`, the time limit from now on as well. Raises TlsError
        for a certificate that is not valid and for what is no TLS, TimeoutError and OSError."""
        tls = self._open()
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        try:
            while not self._shaken(tls):
                if deadline is not None:
                    self.settimeout(_left_s(deadline))
                if not self._take(RECORD_MAX):
                    raise TlsError("the peer closed the connection in the handshake")
        finally:
            if self._tls is not None:
                self.settimeout(timeout_s)
        if (code := verification(tls)[0]) or tls.get_peer_certificate() is None:
            raise TlsError(f"no certificate was verified ({code})", unverified=True)
        if tls.get_protocol_version() != SSL.TLS1_3_VERSION:
            raise TlsError("the peer speaks an older version of TLS")
        self._verified = True
        self._readable = self._ssl

    def _shaken(self, tls: SSL.Connection) -> bool:
        """Go on with the handshake; whether it is over."""
        try:
            tls.do_handshake()
            done = True
        except SSL.WantReadError:
            done = False
        except SSL.ZeroReturnError:
            raise TlsError("the peer ended the connection in the handshake") from None
        except SSL.Error as error:
            self._flush_alert()
            _raise_failed(tls, error)
        self._flush()
        return done

    def certificate(self) -> dict[str, Any]:
        """The verified certificate of the peer, in the form of ssl.SSLSocket.getpeercert: subject,
        issuer, and of the alternative names those of DNS and URI. Raises ValueError for one that
        cannot be read."""
        tls = self._ready()
        try:
            found = tls.get_peer_certificate(as_cryptography=True)
            assert found is not None
            return described(found)
        except UNREADABLE as error:
            raise ValueError(f"the certificate cannot be read: {error}") from None

    # -- as a socket

    def recv_into(self, buffer: WriteableBuffer, nbytes: int = 0, flags: int = 0) -> int:
        """Take up to a record's bytes; 0 at the end of the connection, which may lack TLS's own
        mark of it. Raises TlsError, OSError, BlockingIOError, and TimeoutError."""
        if flags:
            raise ValueError("flags do not go with TLS")
        with exported(buffer) as place:
            count = min(nbytes or len(place), len(place))
            ssl = self._readable
            if ssl is not None and count and (taken := lib.SSL_read(ssl, place, count)) > 0:
                return int(taken)
            return self._recv_into(place, count, taken if ssl is not None and count else None)

    def recv_all_into(self, buffer: memoryview, *, permit: bool = False) -> int:
        if self.gettimeout() is not None:
            raise ValueError("a time limit would lose what has come")
        if permit and self._permit is None:
            self._acquire()
        taken, read = 0, lib.SSL_read
        with exported(buffer) as place:
            count = len(place)
            while taken < count:
                ssl, more = self._readable, 0  # looked up in each turn: `close` takes it away
                if ssl is None or (more := read(ssl, place + taken, count - taken)) <= 0:
                    more = self._recv_into(place + taken, count - taken, more if ssl is not None else None)
                if not more:
                    break
                taken += more
        return taken

    def rest(self) -> None:
        permit, self._permit = self._permit, None
        if permit is not None:
            RECEIVING.release(permit)

    def _recv_into(self, place: Any, count: int, failed: int | None) -> int:
        """Go on with a read that did not succeed at once; `failed`: what OpenSSL returned, None
        where it was not asked."""
        tls = self._ready()
        if not count or self._over:
            return 0
        taken = int(lib.SSL_read(self._ssl, place, count)) if failed is None else failed
        timeout_s = self.gettimeout()
        deadline = time.monotonic() + timeout_s if timeout_s else None
        try:
            while taken <= 0:
                with contextlib.suppress(SSL.WantReadError):
                    _refuse(tls, taken)
                if deadline is not None:
                    self.settimeout(_left_s(deadline))
                if not self._take(encrypted_length(count)):
                    self._end()  # without TLS's own mark, as peers close that are shut down
                    return 0
                taken = int(lib.SSL_read(self._ssl, place, count))
        except SSL.ZeroReturnError:
            self._end()
            return 0
        except SSL.Error as error:
            self._flush_alert()
            raise TlsError(reason_of(error)) from None
        finally:
            if deadline is not None and self._tls is not None:
                self.settimeout(timeout_s)
        return taken

    def recv(self, bufsize: int, flags: int = 0) -> bytes:
        """As `recv_into`; b"" at the end."""
        data = bytearray(min(bufsize, RECORD_BYTES))
        return bytes(data[: self.recv_into(data, 0, flags)])

    def sendall(self, data: ReadableBuffer, flags: int = 0) -> None:
        """Send all of `data`. Raises TlsError, OSError and TimeoutError."""
        if flags:
            raise ValueError("flags do not go with TLS")
        tls, view, sent = self._ready(), memoryview(data).cast("B"), 0
        while sent < len(view):
            try:
                sent += tls.send(view[sent : sent + RECORD_BYTES])
            except SSL.Error as error:
                raise TlsError(reason_of(error)) from None
        self._flush()

    def pending(self) -> int:
        self._ready()
        return int(lib.SSL_pending(self._ssl)) + self._left()

    def close(self) -> None:
        """Close the descriptor, without a word to the peer. Idempotent. Only the thread that reads
        may close it; others `shutdown`: a read would go on with the number of the descriptor."""
        self._tls = self._readable = None
        self.rest()
        super().close()

    def _denied(self, *_: object, **__: object) -> NoReturn:
        raise NotImplementedError("this would pass by TLS")

    send = sendto = sendmsg = sendfile = recvfrom = recvfrom_into = recvmsg = recvmsg_into = _denied
    makefile = dup = detach = _denied

    # --

    def _make_room(self, count: int) -> None:
        """Have memory for so many encrypted bytes."""
        room = bytearray(count)
        self._room, self._taken = ffi.from_buffer(room), memoryview(room)

    def _take(self, count: int) -> bool:
        """Take up to `count` encrypted bytes from the kernel, or TAKEN_MAX with a permit, once all
        that were taken before have been decrypted; False at the end of the connection. Raises
        OSError, BlockingIOError, TimeoutError."""
        self._flush()  # the peer may wait for it
        if self._permit is not None:
            count = encrypted_length(TAKEN_MAX)
        if count > len(self._taken):
            self._make_room(count)
        taken = self._take_permitted(count) if self._permit is not None else super().recv_into(self._taken, count)
        if not taken:
            return False
        self._decrypted = self._room
        self._incoming = lib.BIO_new_mem_buf(self._room, taken)
        if self._incoming == ffi.NULL:
            raise MemoryError("OpenSSL has no room for what has come")
        lib.BIO_set_mem_eof_return(self._incoming, -1)  # its end is not that of the connection
        lib.SSL_set_bio(self._ssl, self._incoming, self._outgoing)  # frees the former one
        return True

    def _take_permitted(self, count: int) -> int:
        """Take what is there; another thread may have the permit while this one waits."""
        if self._held_bytes >= HOLD_BYTES and RECEIVING.waiting:
            self.rest()
            self._acquire()
        try:
            taken = super().recv_into(self._taken, count, socket.MSG_DONTWAIT)
        except BlockingIOError:
            self.rest()
            taken = super().recv_into(self._taken, count)
            if taken:
                self._acquire()
        self._held_bytes += taken
        return taken

    def _acquire(self) -> None:
        self._permit, self._held_bytes = RECEIVING.acquire(), 0

    def _left(self) -> int:
        """How many bytes were taken from the kernel and not by OpenSSL."""
        return int(lib.BIO_get_mem_data(self._incoming, self._start)) if self._incoming is not None else 0

    def _flush(self) -> None:
        """Send what OpenSSL has to send, which may wait for the peer. Raises OSError, TimeoutError,
        and TlsError where it may not wait."""
        if count := int(lib.BIO_get_mem_data(self._outgoing, self._start)):
            data = bytearray(count)
            with exported(data) as place:
                self._unsent += data[: int(lib.BIO_read(self._outgoing, place, count))]
        if self._unsent:
            self.rest()
        while self._unsent:
            try:
                del self._unsent[: super().send(self._unsent)]
            except BlockingIOError:
                raise TlsError("TLS has to send first, and the connection takes nothing") from None

    def _flush_alert(self) -> None:
        """Tell the peer what is wrong, where that needs no waiting."""
        with contextlib.suppress(OSError):
            self.settimeout(0)
            self._flush()

    def _end(self) -> None:
        self._over, self._readable = True, None

    def _open(self) -> SSL.Connection:
        tls = self._tls
        if tls is None:
            raise OSError(errno.EBADF, os.strerror(errno.EBADF))
        return tls

    def _ready(self) -> SSL.Connection:
        tls = self._open()
        if not self._verified:
            raise TlsError("the peer has not been verified", unverified=True)
        return tls


def encrypted_length(count: int) -> int:
    """How many encrypted bytes to take for so many: what they are in records that are full, and at
    least one such record."""
    count = min(count, TAKEN_MAX)
    return max(RECORD_MAX, count + RECORD_OVERHEAD * (count // RECORD_BYTES + 1))


def _left_s(deadline: float) -> float:
    left_s = deadline - time.monotonic()
    if left_s <= 0:
        raise TimeoutError("the peer did not answer in time")
    return left_s


def _raise_failed(tls: SSL.Connection, error: SSL.Error) -> NoReturn:
    """Raise TlsError for a handshake that failed."""
    reason = reason_of(error)
    if "certificate verify failed" in reason:
        raise TlsError(verification(tls)[1], unverified=True) from None
    raise TlsError(reason, plain="wrong version number" in reason) from None


def _refuse(tls: SSL.Connection, result: int) -> NoReturn:
    """Raise what pyOpenSSL does for a read of this thread that returned `result`, the last thing
    that OpenSSL did."""
    tls._raise_ssl_error(tls._ssl, result)
    raise TlsError(f"a read ended with {result} and no error")


def _expect(tls: SSL.Connection, name: str, *, compared: bool) -> None:
    """Send `name` to the server, and with `compared` let the handshake fail unless the certificate
    is made out to it: an IP address by its bytes, else a DNS name. Raises ValueError."""
    encoded = name.encode("idna")  # as the ssl module
    if not encoded or encoded.startswith(b".") or b"\0" in encoded:
        raise ValueError(f"{name[:80]!r} cannot be a name in a certificate")
    try:
        address = ipaddress.ip_address(name).packed if "%" not in name else None
    except ValueError:
        address = None
    if address is None:
        tls.set_tlsext_host_name(encoded)
    if not compared:
        return
    rules = lib.SSL_get0_param(tls._ssl)
    lib.X509_VERIFY_PARAM_set_hostflags(
        rules, lib.X509_CHECK_FLAG_NO_PARTIAL_WILDCARDS | lib.X509_CHECK_FLAG_NEVER_CHECK_SUBJECT
    )
    if address is None:
        done = lib.X509_VERIFY_PARAM_set1_host(rules, encoded, len(encoded))
    else:
        done = lib.X509_VERIFY_PARAM_set1_ip(rules, address, len(address))
    if done != 1:
        raise ValueError(f"{name[:80]!r} cannot be compared with certificates")
