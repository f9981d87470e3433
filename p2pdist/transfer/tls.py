"""TLS between agents, and of agents with trackers: one certificate and key for serving and for
fetching, and the authorities from which certificates of others must come (TLS 1.3).

A fleet speaks TLS as a whole or not at all. The client of a connection checks that the server's
certificate was made out to the address that was called, or to one name that all agents'
certificates share. With access on it is the host of the plan that the certificate must name,
whichever authority made it (`host_in`). A server refuses a peer without a
certificate, or with `strangers` leaves it to its routes what such a peer may request.

Certificates and authorities are exchanged while connections run (`reload`, `trust`): every new
connection is made with the newest contexts, and open ones go on. The listener keeps the one context
that it was given, which hands each handshake over to the newest one.
"""

from __future__ import annotations

import ssl
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from p2pdist.files import read_content
from p2pdist.model.errors import UsageError

PEM_BYTES_MAX = 4 << 20

PeerName = Callable[[str, str], str]
"""The DNS name in the certificate of a host, by the host's name and the host in its address."""

HostIn = Callable[[Mapping[str, Any] | None], str]
"""The host that a verified certificate names, as ssl.SSLSocket.getpeercert returns it; "" for
none. Raises Refused for a host that is revoked."""


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


class Tls:
    """The TLS contexts for both ends of a connection. `peer_name` replaces the name in `files`.
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
        self._lock = threading.Lock()
        """Held while the contexts change: files, further authorities and both come from several
        threads, and the contexts must be of the newest of all."""
        self._serving, self.client, self.peers = self._made()
        self.server, _, _ = self._made()
        """For a listener."""
        self.server.sni_callback = self._hand_over

    def reload(self) -> None:
        """Read the files again, for connections from now on. Raises UsageError, and changes
        nothing, when a file cannot be used."""
        with self._lock:
            self._serving, self.client, self.peers = self._made()

    def exchange(self, files: TlsFiles) -> None:
        """Use other files for connections from now on. Raises UsageError, and changes nothing, when
        one cannot be used."""
        with self._lock:
            before, self.files = self.files, files
            try:
                self._serving, self.client, self.peers = self._made()
            except UsageError:
                self.files = before
                raise

    def trust(self, authorities: str) -> None:
        """Let certificates of these authorities (PEM) count, besides that of the file, for
        connections from now on; those that were given before count no more. Raises UsageError, and
        changes nothing."""
        with self._lock:
            before, self._trusted = self._trusted, authorities
            try:
                self._serving, self.client, self.peers = self._made()
            except UsageError:
                self._trusted = before
                raise

    def peer_name(self, host: str, called: str) -> str:
        """What the certificate of `host`, with `called` as the host of its address, must be made
        out to."""
        if self._peer_name is not None:
            return self._peer_name(host, called)
        return self.files.name or called

    def _hand_over(self, connection: ssl.SSLObject, name: str | None, context: ssl.SSLContext) -> None:
        """Let a handshake that has just begun go on with the newest certificate and authorities."""
        connection.context = self._serving

    def _made(self) -> tuple[ssl.SSLContext, ssl.SSLContext, ssl.SSLContext]:
        """The contexts of a server, of a client, and of a client that leaves names to its caller,
        from what the files hold now."""
        files, former = self.files, dict(self._former) if self._keeps_former else {}
        server, client = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        peers = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        peers.check_hostname = False
        server.verify_mode = ssl.CERT_OPTIONAL if self._strangers else ssl.CERT_REQUIRED
        server.num_tickets = 0  # streams are long; a session that is resumed would outlive its certificate
        try:
            for path in filter(None, (files.certificate, files.key, files.authority, files.further)):
                if len(pem := read_content(path, PEM_BYTES_MAX).data) > PEM_BYTES_MAX:
                    raise ValueError(f"{path} has more than {PEM_BYTES_MAX} bytes")
                if path in (files.authority, files.further):
                    former[pem.decode("ascii", "ignore")] = None
            for context in (server, client, peers):
                context.minimum_version = ssl.TLSVersion.TLSv1_3
                context.load_cert_chain(files.certificate, files.key)
                for authorities in filter(None, (*former, self._trusted)):
                    context.load_verify_locations(cadata=authorities)
        except (OSError, ValueError) as error:
            raise UsageError(
                f"the TLS files {files.certificate}, {files.key} and {files.authority} cannot be used: {error}",
                remedy="Give PEM files with --tls-cert, --tls-key (not encrypted) and --tls-ca",
            ) from error
        self._former = former
        return server, client, peers
