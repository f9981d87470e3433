"""Where chunks of a package will come from, as far as that is certain before the pull has computed
what is missing (store/trees/missing.py): of many files that takes as long as a program starts.

A pack of which more than half is needed is pulled whole. Whatever of it is needed besides, its
chunks can be fetched at once; chunks of other packs wait for the pull.
"""

from __future__ import annotations

import asyncio
import struct
from collections.abc import Iterable, Iterator, Mapping
from itertools import accumulate

from p2pdist.agent.lazy.chunks import Whereabouts
from p2pdist.agent.pull.trees import SELECTED_SHARE_MAX
from p2pdist.model.catalog import Pack, Stored
from p2pdist.model.device import DeviceLayout
from p2pdist.model.digest import Digest
from p2pdist.model.manifest import PACK_TYPE, Manifest
from p2pdist.model.tree import ChunkList
from p2pdist.store.store import BlobStore

_RECORD = struct.Struct("<32sII")
_STORED = struct.Struct("<36xI")
"""A pack's record of a chunk (model/catalog.py): BLAKE3, length, stored length; and the last of
these alone."""


class PackedChunks(Mapping[bytes, tuple[Digest, Stored]]):
    """Where in packs their chunks are. Values are made when they are asked for, since a start asks
    for few."""

    def __init__(self) -> None:
        self._records: dict[bytes, tuple[int, int]] = {}
        """By chunk: number of its pack, and of its record there."""
        self._packs: list[tuple[Pack, list[int]]] = []
        """With where each chunk of the pack begins."""

    def add(self, pack: Pack) -> None:
        """Have the chunks of a pack, but for those of packs before it."""
        place = len(self._packs)
        self._packs.append((pack, list(accumulate((size for (size,) in _STORED.iter_unpack(pack.records)), initial=0))))
        chunks = enumerate(_RECORD.iter_unpack(pack.records))
        self._records = {chunk: (place, number) for number, (chunk, _, _) in chunks} | self._records

    def __getitem__(self, chunk: bytes) -> tuple[Digest, Stored]:
        place, number = self._records[chunk]
        pack, offsets = self._packs[place]
        _, length, stored = _RECORD.unpack_from(pack.records, number * _RECORD.size)
        return pack.digest, Stored(chunk, length, offsets[number], stored)

    def __contains__(self, chunk: object) -> bool:
        return chunk in self._records

    def __iter__(self) -> Iterator[bytes]:
        return iter(self._records)

    def __len__(self) -> int:
        return len(self._records)


def forecast(store: BlobStore, manifest: Manifest, packs: Iterable[Pack], layout: DeviceLayout) -> Whereabouts:
    """Where chunks of a package come from whose catalogs list these `packs`. In a thread."""
    contents, lists = layout.contents, layout.chunk_lists
    wanted = {content for content in contents if content not in store.objects and content not in lists}
    if not store.objects.chunk_lists():  # else older objects may have some of these chunks
        for content, encoded in lists.items():
            if content not in store.objects:
                wanted.update(chunk for chunk, _ in ChunkList.decode(encoded).chunks)
    descriptors = {part.digest: part for part in manifest.parts if part.media_type == PACK_TYPE}
    chunks, sources = PackedChunks(), {}
    listed = (pack for pack in packs if pack.digest in descriptors)
    for pack in sorted(listed, key=lambda pack: _remoteness(store, pack)):
        needed = {chunk: stored for chunk, _, stored in _RECORD.iter_unpack(pack.records) if chunk in wanted}
        wanted -= needed.keys()  # of several packs that have a chunk the first one counts
        if sum(needed.values()) > SELECTED_SHARE_MAX * pack.size:
            sources[pack.digest] = descriptors[pack.digest], None
            chunks.add(pack)
    return Whereabouts(chunks, {}, sources, asyncio.Event())


def _remoteness(store: BlobStore, pack: Pack) -> int:
    """The order in which the pull takes chunks from packs: complete ones, partial ones, those that
    are not here."""
    blob = store.get(pack.digest)
    return 2 if blob is None else 0 if blob.complete else 1
