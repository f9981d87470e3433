"""TLS between agents: one certificate, key and authority for serving and for fetching (TLS 1.3,
both sides show a certificate).

A fleet speaks TLS as a whole or not at all. An agent refuses a peer without a certificate of the
authority. The client of a connection checks that the server's certificate was made out to the
address that it called, or to one name that all agents' certificates share.
"""

from __future__ import annotations

import ssl
from dataclasses import dataclass
from pathlib import Path

from p2pdist.model.errors import UsageError


@dataclass(frozen=True, slots=True)
class TlsFiles:
    """PEM files: the certificate (and the chain from it to the authority), its key, the authority.
    `name` is what certificates of peers must be made out to; empty: the host in their address."""

    certificate: Path
    key: Path
    authority: Path
    name: str = ""


class Tls:
    """The TLS contexts for both ends of a connection. Raises UsageError when a file cannot be
    used."""

    def __init__(self, files: TlsFiles) -> None:
        self.files = files
        self.server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self.client = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        self.server.verify_mode = ssl.CERT_REQUIRED
        self.server.num_tickets = 0  # streams are long; a session that is resumed would outlive its certificate
        for context in (self.server, self.client):
            context.minimum_version = ssl.TLSVersion.TLSv1_3
            self._load(context)

    def reload(self) -> None:
        """Read the files again, for connections from now on. A new authority is added; the former
        ones stay. Raises UsageError, and changes nothing, when a file cannot be used."""
        Tls(self.files)  # what is wrong is found before anything is changed
        for context in (self.server, self.client):
            self._load(context)

    def host_to_check(self, host: str) -> str:
        """What the certificate of the peer at `host` must be made out to."""
        return self.files.name or host

    def _load(self, context: ssl.SSLContext) -> None:
        files = self.files
        try:
            context.load_cert_chain(files.certificate, files.key)
            context.load_verify_locations(files.authority)
        except (OSError, ValueError) as error:
            raise UsageError(
                f"the TLS files {files.certificate}, {files.key} and {files.authority} cannot be used: {error}",
                remedy="Give PEM files with --tls-cert, --tls-key (not encrypted) and --tls-ca",
            ) from error
