"""The client's end of a TLS connection by pyOpenSSL, for receiving streams with less processor time
than by the ssl module: its OpenSSL is newer than most interpreters', and reads the descriptor
itself.

Certificates are verified as the ssl module does for Tls.client: TLS 1.3 alone, OpenSSL's own check
of the chain up to the same authorities for the purpose of a server, without a callback that could
let one through, and of the name or IP address within the handshake; the subject's common name
stands for no host. With access on the name is left to `Tls.host_in`, which reads `certificate`.

Invariants: no byte is sent or handed out before the handshake has verified the peer; whatever is
not understood raises. The context is that of the newest Credentials.

Only stream/connections.py imports this module, when an agent with certificates starts.
"""

from __future__ import annotations

import errno
import ipaddress
import os
import select
import socket
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

from OpenSSL import SSL

from p2pdist.transfer.openssl.bindings import exported, lib, reason_of, verification
from p2pdist.transfer.openssl.certificate import UNREADABLE, described
from p2pdist.transfer.openssl.contexts import client_context
from p2pdist.transfer.tls import RECORD_BYTES, Credentials, TlsConnection, TlsError

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer, WriteableBuffer

Done = TypeVar("Done")


class TlsSocket(TlsConnection):
    """Takes the descriptor of `connection`, which has connected, from it. `name` is what the peer
    is told to be called, unless it is an IP address; `compared`: its certificate must be made out
    to that. Nothing is sent before `handshake`. Raises ValueError for what cannot be a name, and
    TlsError for credentials that cannot be used.

    Time limits are those of a socket (settimeout), for each call as a whole."""

    def __init__(self, connection: socket.socket, credentials: Credentials, name: str, *, compared: bool) -> None:
        super().__init__(connection.family, connection.type, connection.proto, fileno=connection.fileno())
        timeout_s = connection.gettimeout()
        connection.detach()
        self._tls: SSL.Connection | None = None
        """None once it is closed: OpenSSL would go on with the number of the descriptor."""
        self._verified = False
        """Whether the handshake is over; written by `handshake`."""
        self._readable: Any = None
        """OpenSSL's connection, from the handshake to the end or `close`."""
        self._over = False
        """Whether a read has met the end, after which OpenSSL is not asked again."""
        try:
            self.settimeout(timeout_s)
            self._tls = SSL.Connection(client_context(credentials), self)
            _expect(self._tls, name, compared=compared)
            self._tls.set_connect_state()
        except BaseException:
            self.close()
            raise

    def handshake(self, timeout_s: float | None) -> None:
        """Verify the peer, within `timeout_s`, the time limit from now on as well. Raises TlsError
        for a certificate that is not valid and for what is no TLS, TimeoutError and OSError."""
        tls = self._open()
        self.settimeout(timeout_s)
        try:
            self._finish(tls.do_handshake)
        except SSL.ZeroReturnError:
            raise TlsError("the peer ended the connection in the handshake") from None
        except SSL.SysCallError as error:
            raise _broken(error, "the peer closed the connection in the handshake") from None
        except SSL.Error as error:
            _raise_failed(tls, error)
        if (code := verification(tls)[0]) or tls.get_peer_certificate() is None:
            raise TlsError(f"no certificate was verified ({code})", unverified=True)
        if tls.get_protocol_version() != SSL.TLS1_3_VERSION:
            raise TlsError("the peer speaks an older version of TLS")
        self._verified = True
        self._readable = tls._ssl

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

    def recv_all_into(self, buffer: memoryview) -> int:
        """Fill `buffer`, with one call for all the records that this takes; fewer bytes come only
        at the end of the connection. Raises TlsError and OSError, and ValueError where there is a
        time limit."""
        if self.gettimeout() is not None:
            raise ValueError("a time limit would lose what has come")
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

    def _recv_into(self, place: Any, count: int, failed: int | None) -> int:
        """Go on with a read that did not succeed at once; `failed`: what OpenSSL returned, None
        where it was not asked."""
        tls = self._ready()
        if not count or self._over:
            return 0

        def read() -> int:
            nonlocal failed
            result, failed = failed, None
            return _read(tls, place, count) if result is None else _refuse(tls, result)

        try:
            return self._finish(read)
        except SSL.ZeroReturnError:
            self._end()
            return 0
        except SSL.SysCallError as error:
            if error.args[0] != -1:
                raise _broken(error, "") from None
            self._end()  # without TLS's own mark, as peers close that are shut down
            return 0
        except SSL.Error as error:
            raise TlsError(reason_of(error)) from None

    def recv(self, bufsize: int, flags: int = 0) -> bytes:
        """As `recv_into`; b"" at the end."""
        data = bytearray(min(bufsize, RECORD_BYTES))
        return bytes(data[: self.recv_into(data, 0, flags)])

    def sendall(self, data: ReadableBuffer, flags: int = 0) -> None:
        """Send all of `data`. Raises TlsError, OSError and TimeoutError."""
        if flags:
            raise ValueError("flags do not go with TLS")
        tls, view, sent = self._ready(), memoryview(data).cast("B"), 0
        deadline = self._deadline()
        try:
            while sent < len(view):
                rest = view[sent:]
                sent += self._finish(lambda rest=rest: tls.send(rest), deadline)  # type: ignore[misc]
        except SSL.SysCallError as error:
            raise _broken(error, "the peer closed the connection") from None
        except SSL.Error as error:
            raise TlsError(reason_of(error)) from None

    def pending(self) -> int:
        return self._ready().pending()

    def close(self) -> None:
        """Close the descriptor, without a word to the peer. Idempotent. Only the thread that reads
        may close it; others `shutdown`: a read would go on with the number of the descriptor."""
        self._tls = self._readable = None
        super().close()

    def _denied(self, *_: object, **__: object) -> NoReturn:
        raise NotImplementedError("this would pass by TLS")

    send = sendto = sendmsg = sendfile = recvfrom = recvfrom_into = recvmsg = recvmsg_into = _denied
    makefile = dup = detach = _denied

    # --

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

    def _deadline(self) -> float | None:
        timeout_s = self.gettimeout()
        return None if timeout_s is None else time.monotonic() + timeout_s

    def _finish(self, step: Callable[[], Done], deadline: float | None = None) -> Done:
        """Take a step of TLS until it is done, and wait for the peer in between, by the socket's
        own time limit where no `deadline` (time.monotonic) is given."""
        deadline = self._deadline() if deadline is None else deadline
        while True:
            try:
                return step()
            except SSL.WantReadError:
                awaited = select.POLLIN
            except SSL.WantWriteError:
                awaited = select.POLLOUT
            self._await(awaited, deadline)

    def _await(self, awaited: int, deadline: float | None) -> None:
        if self.gettimeout() is None and os.get_blocking(self.fileno()):
            return  # a signal came: the step waits itself, and a mark (SO_RCVLOWAT) is not for poll
        if not self.gettimeout():
            if awaited == select.POLLIN:
                raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))
            raise TlsError("TLS has to send first, and the connection takes nothing")
        assert deadline is not None
        left_s = deadline - time.monotonic()
        poll = select.poll()
        poll.register(self.fileno(), awaited)
        if left_s <= 0 or not poll.poll(int(left_s * 1000) + 1):  # never before the deadline
            raise TimeoutError("the peer did not answer in time")


def _broken(error: SSL.SysCallError, ended: str) -> OSError:
    number = error.args[0]
    return TlsError(ended) if number == -1 else OSError(number, os.strerror(number))


def _raise_failed(tls: SSL.Connection, error: SSL.Error) -> NoReturn:
    """Raise TlsError for a handshake that failed."""
    reason = reason_of(error)
    if "certificate verify failed" in reason:
        raise TlsError(verification(tls)[1], unverified=True) from None
    raise TlsError(reason, plain="wrong version number" in reason) from None


def _read(tls: SSL.Connection, place: Any, count: int) -> int:
    """As SSL.Connection.recv_into, which takes every record to a place of its own first and copies
    it: a third of the receiver's time."""
    taken = int(lib.SSL_read(tls._ssl, place, count))
    return taken if taken > 0 else _refuse(tls, taken)


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
