"""Blobs that hosts hold no more and need not fetch: packs whose contents stand in trees that are
there whole.

Each host says which they are when it connects, and again when they change (`Spares`). What it said
ends with its session.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from p2pdist.model.digest import Digest
from p2pdist.model.messages import Spares

PER_HOST_MAX = 4000


@dataclass(slots=True)
class SparedBlobs:
    """`hosts`: for each blob, the hosts that need not fetch it; none stands there without one."""

    hosts: dict[Digest, dict[str, None]] = field(default_factory=dict)
    _blobs: dict[str, dict[Digest, None]] = field(default_factory=dict)

    def said(self, host: str, spares: Spares) -> None:
        """Take a host's word; what exceeds PER_HOST_MAX is not noted, and counts as missing."""
        if not spares.more:
            self.forget(host)
        blobs = self._blobs.setdefault(host, {})
        for blob in spares.blobs[: PER_HOST_MAX - len(blobs)]:
            blobs[blob] = None
            self.hosts.setdefault(blob, {})[host] = None

    def forget(self, host: str) -> None:
        """The host has gone, or is about to say everything anew."""
        for blob in self._blobs.pop(host, {}):
            hosts = self.hosts[blob]
            del hosts[host]
            if not hosts:
                del self.hosts[blob]
