"""TLS between agents, and of agents with trackers: one certificate and key for serving and for
fetching, and the authorities from which certificates of others must come (TLS 1.3).

A fleet speaks TLS as a whole or not at all. The client of a connection checks that the server's
certificate was made out to the address that was called, or to one name that all agents'
certificates share. With access on it is the host of the plan that the certificate must name,
whichever authority made it (`host_in`). A server refuses a peer without a
certificate, or with `strangers` leaves it to its routes what such a peer may request.

Certificates and authorities are exchanged while connections run (`reload`, `trust`): every new
connection is made with the newest of them, and open ones go on.

Servers, and what receives streams, speak TLS by pyOpenSSL (openssl/), which makes its contexts of
the Credentials; requests of agents to others go by the ssl module and the context here.
"""

from __future__ import annotations

import asyncio
import os
import socket
import ssl
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from p2pdist.files import read_content
from p2pdist.model.errors import UsageError

PEM_BYTES_MAX = 4 << 20
RECORD_BYTES = 16 << 10
"""Most bytes that a record of TLS holds (RFC 8446, 5.1), and so most that one read brings."""

RECORD_MAX = 5 + RECORD_BYTES + 256
"""Most bytes that TLS takes from a connection for one record, its head included (RFC 8446, 5.2)."""

PeerName = Callable[[str, str], str]
"""The DNS name in the certificate of a host, by the host's name and the host in its address."""

HostIn = Callable[[Mapping[str, Any] | None], str]
"""The host that a verified certificate names, which is handed over in the form of
ssl.SSLSocket.getpeercert; "" for none. Raises Refused for a host that is revoked."""


@dataclass(frozen=True, slots=True)
class TlsFiles:
    """PEM files: the certificate (and the chain from it to the authority), its key, the authority.
    `name` is what certificates of peers must be made out to; empty: the host in their address.
    `further`: more authorities."""

    certificate: Path
    key: Path
    authority: Path
    name: str = ""
    further: Path | None = None


class TlsError(OSError):
    """TLS failed on a connection that had been opened; the text is the reason. `unverified`: the
    peer's certificate is not valid. `plain`: the peer does not speak TLS."""

    def __init__(self, reason: str, *, unverified: bool = False, plain: bool = False) -> None:
        super().__init__(reason)
        self.unverified, self.plain = unverified, plain


class TlsConnection(socket.socket):
    """A connection over TLS to a peer that has been verified; bytes come by `recv` and `recv_into`,
    and go by `sendall`."""

    def pending(self) -> int:
        """How many bytes are decrypted and not yet taken, of which the descriptor does not tell."""
        raise NotImplementedError

    def recv_all_into(self, buffer: memoryview, *, permit: bool = False) -> int:
        """Fill `buffer`, record by record; fewer bytes come only at the end of the connection.
        `permit`: few threads do so at once (openssl/semaphore.py), and this one is one of them
        until `rest`, except while it waits for the peer. Raises TlsError and OSError, and
        ValueError where there is a time limit."""
        raise NotImplementedError

    def rest(self) -> None:
        """Let another thread have this one's permit, if it has one: it will wait, or do something
        else. By the thread that receives."""
        raise NotImplementedError


class ServedTls:
    """The server's end of TLS on a plain transport. Of the connection's transport that is served it
    is the extra information "sslcontext"."""

    def send_now(self, data: memoryview, connection: socket.socket) -> Literal["no", "some", "all"]:
        """Encrypt `data` and hand it to the kernel, by a copy of the connection's socket: "no", and
        nothing is done, where something else waits to be sent; "some" where the kernel does not
        take all, and the rest waits. `data` is free then. Raises ssl.SSLError."""
        raise NotImplementedError

    async def emptied(self) -> None:
        """Wait until the kernel has taken what was to be sent, or the connection is lost."""
        raise NotImplementedError


class ServingContext(ssl.SSLContext):
    """A server's context whose connections are served through a ServedTls."""

    def tls_protocol(
        self, served: asyncio.Protocol, verified: asyncio.Future[None], *, handshake_s: float, shutdown_s: float
    ) -> asyncio.BaseProtocol:
        """What a plain transport is to be connected with, to speak TLS around `served`: with time
        limits of the handshake, and of the end, where both say that nothing follows. `verified` has
        a result once the handshake is over, and its error where it failed (OSError). Raises
        TlsError for credentials that cannot be used."""
        raise NotImplementedError


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class Credentials:
    """What an end of a connection shows and what it trusts, PEM: the certificate with its chain,
    the key, the authorities. `strangers`: a server lets clients without a certificate in. Every
    read of the files makes another object."""

    chain: bytes
    key: bytes = field(repr=False)
    authorities: tuple[str, ...]
    strangers: bool = False


class Tls:
    """What both ends of connections speak TLS with. `peer_name` replaces the name in `files`.
    `strangers`: clients without a certificate are let in. `keeps_former`: an authority that leaves
    its file stays trusted until the process ends, so that hosts may change theirs one after the
    other. Raises UsageError when a file cannot be used."""

    def __init__(
        self,
        files: TlsFiles,
        *,
        peer_name: PeerName | None = None,
        strangers: bool = False,
        keeps_former: bool = True,
    ) -> None:
        self.files = files
        self._peer_name, self._strangers, self._keeps_former = peer_name, strangers, keeps_former
        self._former: dict[str, None] = {}
        """What the authority's file has held, PEM."""
        self._trusted = ""
        """Further authorities, PEM; set by `trust`."""
        self.host_in: HostIn | None = None
        """How certificates of hosts are read; None while the names of TLS itself are compared."""
        self._prepare: Callable[[Credentials], None] = lambda credentials: None
        """Called with new credentials before they count; set by `prepare_by`."""
        self._lock = threading.Lock()
        """Held while the contexts change: files, further authorities and both come from several
        threads, and the contexts must be of the newest of all."""
        self.client, self.credentials = self._made()

    def reload(self) -> None:
        """Read the files again, for connections from now on. Raises UsageError, and changes
        nothing, when a file cannot be used."""
        with self._changing():
            pass

    def exchange(self, files: TlsFiles) -> None:
        """Use other files for connections from now on. Raises UsageError, and changes nothing, when
        one cannot be used."""
        with self._changing():
            self.files = files

    def trust(self, authorities: str) -> None:
        """Let certificates of these authorities (PEM) count, besides that of the file, for
        connections from now on; those that were given before count no more. Raises UsageError, and
        changes nothing."""
        with self._changing():
            self._trusted = authorities

    def prepare_by(self, make: Callable[[Credentials], None]) -> None:
        """Let `make` make what connections need of the credentials, now and whenever they are
        others, before these count. It raises TlsError for some that it cannot use, and they are
        refused as files that cannot be used are: UsageError."""
        with self._changing():
            self._prepare = make

    @contextmanager
    def _changing(self) -> Iterator[None]:
        """Make the context and the credentials anew once the body has changed what they are made
        of. Raises UsageError, and takes the change back, where they cannot be used."""
        with self._lock:
            before = self.files, self._trusted, self._prepare
            yield
            try:
                self.client, self.credentials = self._made()
            except UsageError:
                self.files, self._trusted, self._prepare = before
                raise

    def peer_name(self, host: str, called: str) -> str:
        """What the certificate of `host`, with `called` as the host of its address, must be made
        out to."""
        if self._peer_name is not None:
            return self._peer_name(host, called)
        return self.files.name or called

    def _made(self) -> tuple[ssl.SSLContext, Credentials]:
        """The context of a client, and what it was made of, from what the files hold now."""
        files, former = self.files, dict(self._former) if self._keeps_former else {}
        client = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        client.minimum_version = ssl.TLSVersion.TLSv1_3
        try:
            chain, key = _pem(files.certificate), _pem(files.key)
            for path in filter(None, (files.authority, files.further)):
                former[_pem(path).decode("ascii", "ignore")] = None
            credentials = Credentials(chain, key, tuple(filter(None, (*former, self._trusted))), self._strangers)
            _load(client, credentials)
            self._prepare(credentials)
        except (OSError, ValueError) as error:
            raise UsageError(
                f"the TLS files {files.certificate}, {files.key} and {files.authority} cannot be used: {error}",
                remedy="Give PEM files with --tls-cert, --tls-key (not encrypted) and --tls-ca",
            ) from error
        self._former = former
        return client, credentials


def _pem(path: Path) -> bytes:
    """What a file holds; raises OSError, and ValueError for one that is too long."""
    if len(pem := read_content(path, PEM_BYTES_MAX).data) > PEM_BYTES_MAX:
        raise ValueError(f"{path} has more than {PEM_BYTES_MAX} bytes")
    return pem


@contextmanager
def file_of(pem: bytes) -> Iterator[str]:
    """The path of a file in memory with these bytes, while the context is open: OpenSSL and the ssl
    module read keys from files alone. Raises OSError."""
    memory = os.memfd_create("pem", os.MFD_CLOEXEC)
    try:
        with open(memory, "wb", closefd=False) as file:
            file.write(pem)
        yield f"/proc/self/fd/{memory}"
    finally:
        os.close(memory)


def _load(context: ssl.SSLContext, credentials: Credentials) -> None:
    """Give a context these very bytes, whatever becomes of the files. Raises OSError and
    ValueError."""
    with file_of(credentials.chain) as chain, file_of(credentials.key) as key:
        context.load_cert_chain(chain, key)
    for authorities in credentials.authorities:
        context.load_verify_locations(cadata=authorities)
