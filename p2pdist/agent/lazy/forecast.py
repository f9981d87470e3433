"""Where chunks of a package will come from, as far as that is certain before the pull has computed
what is missing (store/trees/missing_contents.py): of many files that takes as long as a program
starts.

A pack of which more than half is needed is pulled whole. Whatever of it is needed besides, its
chunks can be fetched at once; chunks of other packs wait for the pull. It is computed from
catalogs, or from a bootstrap before they are here.
"""

from __future__ import annotations

import asyncio
import struct
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate, chain

from p2pdist.agent.lazy.chunks import Whereabouts
from p2pdist.agent.pull.trees import SELECTED_SHARE_MAX
from p2pdist.model.bootstrap import NAME_BYTES, PlacedChunks
from p2pdist.model.catalog import Pack, Stored
from p2pdist.model.device import DeviceLayout
from p2pdist.model.digest import Digest
from p2pdist.model.errors import Corrupt
from p2pdist.model.manifest import PACK_TYPE, Descriptor, Manifest
from p2pdist.model.tree import ChunkList
from p2pdist.store.store import BlobStore
from p2pdist.store.trees.missing_contents import remoteness

_RECORD = struct.Struct("<32sII")
"""A pack's record of a chunk (model/catalog.py): BLAKE3, length, stored length."""


class _Pack:
    """The chunks of a pack, one at least, as columns: what goes through all of them stays in the
    interpreter's own loops. `size` is that of the pack, which may have other chunks besides."""

    def __init__(self, size: int, chunks: PlacedChunks) -> None:
        self.digest, self.size = chunks.pack, size
        self.lengths, self.stored, self.offsets = chunks.lengths, chunks.stored, chunks.offsets
        self.numbers: dict[bytes, int] = dict(zip(chunks.names, range(len(chunks.names)), strict=True))
        """The number of each chunk."""

    @classmethod
    def of(cls, pack: Pack) -> _Pack:
        """That of a catalog's pack."""
        names, lengths, stored = zip(*_RECORD.iter_unpack(pack.records), strict=True)
        return cls(pack.size, PlacedChunks(pack.digest, names, lengths, stored, list(accumulate(stored, initial=0))))

    def bytes_of(self, chunks: Collection[bytes]) -> int:
        """As how many bytes chunks of it are stored."""
        if len(chunks) == len(self.stored):
            return sum(self.stored)
        return sum(self.stored[self.numbers[name]] for name in chunks)


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


def located(packs: Iterable[Pack]) -> PackedChunks:
    """Where in these packs their chunks are. In a thread."""
    return PackedChunks([_Pack.of(pack) for pack in packs if len(pack)])


def forecast(store: BlobStore, manifest: Manifest, packs: Iterable[Pack], layout: DeviceLayout) -> Whereabouts:
    """Where chunks of a package come from whose catalogs list these `packs`. In a thread."""
    lists, objects = layout.chunk_lists, store.objects
    wanted = set(layout.contents).difference(lists, objects.sizes)
    if not objects.chunk_lists():  # else older objects may have some of these chunks
        for content, encoded in lists.items():
            if content not in objects:
                wanted.update(chunk for chunk, _ in ChunkList.decode(encoded).chunks)
    descriptors = _packs_of(manifest)
    listed = (_Pack.of(pack) for pack in packs if pack.digest in descriptors and len(pack))
    return _certain(store, descriptors, listed, wanted)


def forecast_by_bootstrap(
    store: BlobStore, manifest: Manifest, chunks: Iterable[PlacedChunks], layout: DeviceLayout
) -> Whereabouts:
    """Where chunks of a package come from whose bootstrap says so of these `chunks`. By a short
    name nothing is taken from an object: it only says that one with this name is here, so that the
    pull may not need the chunk. Raises Corrupt where one lies outside its pack. In a thread."""
    objects, descriptors = store.objects, _packs_of(manifest)
    listed = [_Pack(descriptors[placed.pack].size, placed) for placed in chunks if placed.pack in descriptors]
    if any(max(map(int.__add__, pack.offsets, pack.stored)) > pack.size for pack in listed):
        raise Corrupt("a bootstrap lists a chunk outside its pack", remedy="Pack it again")
    wanted: set[bytes] | None = None
    if objects.sizes:  # else all is wanted, as on a new host, and no chunk is in two packs
        here = {content[:NAME_BYTES] for content in tuple(objects.sizes)}
        wanted = set(layout.contents).difference(layout.cuts, here)
        if not objects.chunk_lists():
            for content, (_, names) in layout.cuts.items():
                if content not in here:
                    wanted.update(names)
    return replace(_certain(store, descriptors, listed, wanted), name_bytes=NAME_BYTES)


def _packs_of(manifest: Manifest) -> dict[Digest, Descriptor]:
    return {part.digest: part for part in manifest.parts if part.media_type == PACK_TYPE}


def _certain(
    store: BlobStore, descriptors: Mapping[Digest, Descriptor], packs: Iterable[_Pack], wanted: set[bytes] | None
) -> Whereabouts:
    """Where the wanted chunks, None for all, come from that packs hold which are pulled whole."""
    certain: list[_Pack] = []
    for pack in sorted(packs, key=lambda pack: remoteness(store.get(pack.digest))):
        needed: Collection[bytes] = pack.numbers.keys()
        if wanted is not None:
            needed = pack.numbers.keys() & wanted
            wanted.difference_update(needed)  # of several packs that have a chunk the first one counts
        if pack.bytes_of(needed) > SELECTED_SHARE_MAX * pack.size:
            certain.append(pack)
    sources = {pack.digest: (descriptors[pack.digest], None) for pack in certain}
    return Whereabouts(PackedChunks(certain), {}, sources, asyncio.Event())
