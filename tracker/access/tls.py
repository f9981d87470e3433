"""TLS of the tracker's port: a certificate of the fleet's newest authority, which the tracker makes
for itself, and clients that show a certificate if they have one (TLS 1.3).

When the certificate is renewed, or an authority comes or goes, new connections get the new context
and open ones go on. The listening socket keeps its context, so the context of a connection is
chosen when its client says hello, which TLS calls the server name callback (it is called without a
name as well).
"""

from __future__ import annotations

import os
import ssl
from collections.abc import Iterable

from p2pdist.credentials.authority import CERTIFICATE_S, encode_key, make_key, make_request
from tracker.access.directory import AccessState


class TrackerTls:
    """The contexts of a tracker that is reached under `addresses`, IP addresses and names."""

    def __init__(self, addresses: Iterable[str]) -> None:
        self._addresses = tuple(addresses)
        self.context: ssl.SSLContext | None = None
        """That of the listening socket. `use`."""
        self.client: ssl.SSLContext | None = None
        """For connections to other trackers of the fleet, to which this one shows its certificate.
        `use`."""
        self._current: ssl.SSLContext | None = None
        self._made_at = self._renew_at = 0.0

    def use(self, state: AccessState, *, now: float) -> None:
        """Serve new connections with a new certificate, and trust these authorities alone. `now`:
        seconds since the epoch."""
        key = make_key()
        certificate = state.authorities[0].issue(make_request(key), "tracker", "tracker", self._addresses, now=now)
        made = state.chain(certificate), encode_key(key), state.trusted
        self._current, self.client = _context(*made), _context(*made, client=True)
        self._made_at, self._renew_at = now, now + CERTIFICATE_S / 2
        if self.context is None:
            self.context = self._current
            self.context.sni_callback = self._choose

    def renew(self, state: AccessState, *, now: float) -> None:
        """A new certificate, where half of its life is over, or where it was made by a clock that
        was ahead and has been set since: clients would not take it before that time comes."""
        if not self._made_at <= now < self._renew_at:
            self.use(state, now=now)

    def _choose(self, connection: ssl.SSLObject | ssl.SSLSocket, name: str | None, first: ssl.SSLContext) -> None:
        if self._current is not None and self._current is not first:
            connection.context = self._current


def _context(chain: bytes, key: bytes, authorities: bytes, *, client: bool = False) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT if client else ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    if not client:
        context.verify_mode = ssl.CERT_OPTIONAL
        context.num_tickets = 0  # a session that is resumed would outlive its certificate
    context.load_verify_locations(cadata=authorities.decode())
    memory = os.memfd_create("certificate", os.MFD_CLOEXEC)  # the ssl module reads files alone
    try:
        os.write(memory, key + chain)
        context.load_cert_chain(f"/proc/self/fd/{memory}")
    finally:
        os.close(memory)
    return context
