"""A pack whose pieces come when they are asked for, for tests of what fills lazy views."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from p2pdist.agent.lazy.chunks import Whereabouts
from p2pdist.core.demand.reading_queue import Reading
from p2pdist.model.catalog import Stored
from p2pdist.model.digest import digest_of
from p2pdist.model.manifest import PACK_TYPE, Descriptor
from p2pdist.model.messages import Priority
from p2pdist.model.pieces import PieceLayout, PieceList
from p2pdist.model.selection import Selection
from p2pdist.model.tree import content_hash
from p2pdist.store.blobs.blob import Blob
from p2pdist.store.store import BlobStore


class FetchedPack:
    """A pack of these contents, begun in a store, and what fetches it: what is asked for comes
    at once."""

    def __init__(self, store: BlobStore, contents: Sequence[bytes]) -> None:
        pack, layout = b"".join(contents), PieceLayout(sum(map(len, contents)), 1 << 16)
        self.cuts = [pack[layout.offset(piece) :][: layout.length(piece)] for piece in range(layout.count)]
        self.blob = store.begin(digest_of(pack), PieceList(layout, b"".join(map(content_hash, self.cuts))))
        descriptor = Descriptor(PACK_TYPE, self.blob.digest, self.blob.size)
        self.asked: list[tuple[bool, tuple[int, ...]]] = []
        places: dict[bytes, tuple[Any, Stored]] = {}
        at = 0
        for data in contents:
            places[content_hash(data)] = self.blob.digest, Stored(content_hash(data), len(data), at, len(data))
            at += len(data)
        self.whereabouts = Whereabouts(places, {}, {self.blob.digest: (descriptor, None)})

    async def fetch(self, layer: Descriptor, priority: Priority, selection: Selection | None) -> tuple[Blob, Any]:
        return self.blob, self

    async def demand(self, pieces: Sequence[int], *, prefetch: bool = False, reading: Reading | None = None) -> None:
        self.asked.append((prefetch, tuple(pieces)))
        for piece in pieces:
            self.blob.write(piece, self.cuts[piece])
