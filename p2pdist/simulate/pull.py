"""Blobs, and what one host has to do with one of them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from p2pdist.core import download as dl
from p2pdist.core import uplink as ul
from p2pdist.model.digest import Digest
from p2pdist.model.errors import P2PDistError
from p2pdist.model.messages import Priority
from p2pdist.model.pieces import PieceLayout, PieceSet
from p2pdist.simulate.network import Stream

if TYPE_CHECKING:
    from p2pdist.simulate.ways import Ways


class Blob:
    """One blob of a simulation: how it is cut, how urgent its pulls are, and what else is the same
    for it at every host."""

    __slots__ = ("digest", "layout", "lengths", "priority", "stripes", "verified")

    def __init__(self, digest: Digest, layout: PieceLayout, priority: Priority) -> None:
        self.digest, self.layout, self.priority = digest, layout, priority
        self.stripes = layout.stripes
        self.lengths = [layout.length(piece) for piece in range(layout.count)]
        self.verified = [ul.Verified(digest, piece) for piece in range(layout.count)]


class Pull:
    """One blob at one host. `have` is what the disk holds; `proof` is the invariants' own record of
    it. `bytes_again` came for nothing: the host held them, or had closed their stream and asked
    another source for them; `bytes_swarm` are those of the others that came by BitTorrent. `moves`
    counts how often the pull left a way for the other."""

    __slots__ = (
        "blob",
        "bytes_again",
        "bytes_origin",
        "bytes_peers",
        "bytes_swarm",
        "completed_at",
        "download",
        "duplicates",
        "error",
        "have",
        "incoming",
        "joined_at",
        "moves",
        "proof",
        "rejected",
        "reported",
        "ways",
    )

    def __init__(self, blob: Blob) -> None:
        self.blob = blob
        self.have = PieceSet(blob.layout.count)
        self.download: dl.Download | None = None
        self.ways: Ways | None = None
        self.incoming: dict[int, Stream] = {}
        self.reported: tuple[int, ...] = ()
        self.proof = bytearray(blob.layout.count)
        self.joined_at: float | None = None
        self.completed_at: float | None = None
        self.error: P2PDistError | None = None
        self.bytes_origin = self.bytes_peers = self.bytes_swarm = self.bytes_again = 0
        self.duplicates = self.rejected = self.moves = 0

    @property
    def settled(self) -> bool:
        return self.completed_at is not None or self.error is not None

    def counts(self) -> tuple[int, ...]:
        if self.download is not None:
            return tuple(self.download.counts)
        return tuple(self.have.stripe_counts(self.blob.stripes))
