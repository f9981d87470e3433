"""Where chunks of a package will come from, as far as that is certain before the pull has computed
what is missing (store/trees/missing_contents.py): of many files that takes as long as a program
starts.

A pack of which more than half is needed is pulled whole. Whatever of it is needed besides, its
chunks can be fetched at once; chunks of other packs wait for the pull.
"""

from __future__ import annotations

import asyncio
import struct
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from itertools import accumulate, chain

from p2pdist.agent.lazy.chunks import Whereabouts
from p2pdist.agent.pull.trees import SELECTED_SHARE_MAX
from p2pdist.model.catalog import Pack, Stored
from p2pdist.model.device import DeviceLayout
from p2pdist.model.digest import Digest
from p2pdist.model.manifest import PACK_TYPE, Manifest
from p2pdist.model.tree import ChunkList
from p2pdist.store.store import BlobStore
from p2pdist.store.trees.missing_contents import remoteness

_RECORD = struct.Struct("<32sII")
"""A pack's record of a chunk (model/catalog.py): BLAKE3, length, stored length."""


class _Pack:
    """The records of a pack of which there is one at least, as columns: what goes through all of
    them stays in the interpreter's own loops."""

    def __init__(self, pack: Pack) -> None:
        self.digest, self.size = pack.digest, pack.size
        names, self.lengths, self.stored = zip(*_RECORD.iter_unpack(pack.records), strict=True)
        self.numbers: dict[bytes, int] = dict(zip(names, range(len(names)), strict=True))
        """The number of the record of each chunk."""
        self.offsets = list(accumulate(self.stored, initial=0))

    def bytes_of(self, chunks: Collection[bytes]) -> int:
        """As how many bytes chunks of it are stored."""
        return self.size if len(chunks) == len(self.stored) else sum(self.stored[self.numbers[name]] for name in chunks)


class PackedChunks(Mapping[bytes, tuple[Digest, Stored]]):
    """Where in packs their chunks are; of several packs the first. Values are made when they are
    asked for, since a start asks for few."""

    def __init__(self, packs: Sequence[_Pack]) -> None:
        self._packs = packs

    def __getitem__(self, chunk: bytes) -> tuple[Digest, Stored]:
        for pack in self._packs:
            number = pack.numbers.get(chunk)
            if number is not None:
                return pack.digest, Stored(chunk, pack.lengths[number], pack.offsets[number], pack.stored[number])
        raise KeyError(chunk)

    def __iter__(self) -> Iterator[bytes]:
        return iter(dict.fromkeys(chain.from_iterable(pack.numbers for pack in self._packs)))

    def __len__(self) -> int:
        return sum(1 for _ in self)


def forecast(store: BlobStore, manifest: Manifest, packs: Iterable[Pack], layout: DeviceLayout) -> Whereabouts:
    """Where chunks of a package come from whose catalogs list these `packs`. In a thread."""
    lists, objects = layout.chunk_lists, store.objects
    wanted = set(layout.contents).difference(lists, objects.sizes)
    if not objects.chunk_lists():  # else older objects may have some of these chunks
        for content, encoded in lists.items():
            if content not in objects:
                wanted.update(chunk for chunk, _ in ChunkList.decode(encoded).chunks)
    descriptors = {part.digest: part for part in manifest.parts if part.media_type == PACK_TYPE}
    listed = (pack for pack in packs if pack.digest in descriptors and len(pack))
    certain: list[_Pack] = []
    for pack in map(_Pack, sorted(listed, key=lambda pack: remoteness(store.get(pack.digest)))):
        needed = pack.numbers.keys() & wanted
        wanted -= needed  # of several packs that have a chunk the first one counts
        if pack.bytes_of(needed) > SELECTED_SHARE_MAX * pack.size:
            certain.append(pack)
    sources = {pack.digest: (descriptors[pack.digest], None) for pack in certain}
    return Whereabouts(PackedChunks(certain), {}, sources, asyncio.Event())
