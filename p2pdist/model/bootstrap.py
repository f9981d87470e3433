"""Bootstraps: what a host needs to show a package of trees and to read it, in one small blob.

The term is that of Nydus, whose bootstrap is the metadata of an image. Ours has the EROFS image of
each tree over a device (device.py), as the kernel mounts it, and where in packs the chunks of this
device are. A view is mounted from it before catalogs are here, and nothing is computed for it.

Chunks are named by the first NAME_BYTES of their BLAKE3: that is most of what a catalog holds, and
does not compress. Such a name protects from disks and mistakes, and not from people; what comes is
verified as pieces of packs, whose lists the manifest names, before a bootstrap says what of it
belongs where. Full names come with the catalogs. What a bootstrap says of paths, modes and places
is the packer's word, as an image of SquashFS is; agents compare the places with the trees later.

A bootstrap is a part of the type of packs, with an annotation: agents that do not know it fetch no
pack which their catalogs do not list. It names the layers that it is of: a package made on top of
another does not use the bootstrap of that one.

Encoded: MessagePack, in which each image is a zstd frame, and what says where chunks are another
one. Names, lengths and stored lengths of chunks are columns in the order of the device; of lengths
the first bytes of all come first, then the second ones, and so on. Offsets in packs follow from
runs of chunks that lie one behind the other in a pack.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Annotated

import msgspec
import zstandard
from msgspec import Meta

from p2pdist.model.catalog import CATALOG_LEVEL, EXPANSION_MAX, PACKS_MAX, SPARE_BYTES
from p2pdist.model.device import BLOCK_BYTES, BLOCKS_MAX, DeviceLayout
from p2pdist.model.digest import Digest, is_digest
from p2pdist.model.errors import UNDECODABLE, Corrupt
from p2pdist.model.manifest import BOOTSTRAP, LAYERS_MAX, TREE_TYPE, Descriptor, Manifest, is_bootstrap
from p2pdist.model.tree import CHUNK_MAX, content_hash

FORMAT = "1"
"""The number of the format, which the annotation of a bootstrap's descriptor gives."""

NAME_BYTES = 8
BOOTSTRAP_BYTES_MAX = 64 << 20
DECODED_BYTES_MAX = 256 << 20
"""A package that needs more has none, and is shown once its catalogs are here. As catalogs, what
says where chunks are has SPARE_BYTES and EXPANSION_MAX times its bytes at most when decompressed:
images are decompressed a part at a time."""

CHUNKS_MAX = 1 << 22
WINDOW = 24
"""Logarithm of how far back zstd looks: images repeat themselves within a few megabytes."""

PART_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class PlacedChunks:
    """Chunks of one pack, as columns: their names, lengths, stored lengths and offsets in it."""

    pack: Digest
    names: Sequence[bytes]
    lengths: Sequence[int]
    stored: Sequence[int]
    offsets: Sequence[int]


class _Run(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """From the chunk with this number on chunks lie one behind the other in a pack, the first one
    at `offset`, until the next run begins."""

    first: int
    pack: int
    offset: int


class _Cut(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A content of several chunks: the number of the first one, how many, and its own name."""

    first: int
    count: int
    name: bytes


class _Bootstrap(msgspec.Struct, frozen=True, array_like=True):
    format: str
    arrangement: int
    blocks: int
    bytes_content: int
    layers: Annotated[list[str], Meta(max_length=LAYERS_MAX)]
    images: Annotated[list[bytes], Meta(max_length=LAYERS_MAX)]
    chunks: bytes


class _Chunks(msgspec.Struct, frozen=True, array_like=True):
    packs: Annotated[list[str], Meta(max_length=PACKS_MAX)]
    names: bytes
    lengths: bytes
    stored: bytes
    runs: Annotated[list[_Run], Meta(max_length=CHUNKS_MAX)]
    cuts: Annotated[list[_Cut], Meta(max_length=CHUNKS_MAX)]


@dataclass(frozen=True, slots=True)
class PackedImage:
    """An EROFS image of `size` bytes, as a zstd frame."""

    frame: bytes
    size: int

    def parts(self) -> Iterator[bytes]:
        """The bytes of the image, some at a time. Raises Corrupt."""
        left = self.size
        try:
            with zstandard.ZstdDecompressor(max_window_size=1 << WINDOW).stream_reader(self.frame) as reader:
                while part := reader.read(min(PART_BYTES, left + 1)):
                    left -= len(part)
                    if left < 0:
                        break
                    yield part
        except zstandard.ZstdError as error:
            raise Corrupt(f"an image of a bootstrap is broken: {error}") from error
        if left:
            raise Corrupt("an image of a bootstrap has another size than it states")


@dataclass(frozen=True, slots=True)
class Bootstrap:
    """A bootstrap as far as a view is mounted by it: images of the trees with the digests `layers`,
    bottom to top, over a device whose contents lie by the rule with the number `arrangement`, and
    have `size` bytes with what is between them, `bytes_content` without."""

    layers: tuple[str, ...]
    images: tuple[PackedImage, ...]
    arrangement: int
    size: int
    bytes_content: int
    _chunks: bytes

    def contents(self) -> tuple[DeviceLayout, tuple[PlacedChunks, ...]]:
        """Where contents lie in the device, and where chunks lie in packs. Contents and chunks have
        short names. Raises Corrupt, TooLarge. Of many files it takes longer than all else here."""
        plain = _unpacked(self._chunks)
        names = [plain.names[at : at + NAME_BYTES] for at in range(0, len(plain.names), NAME_BYTES)]
        lengths, stored = _from_planes(plain.lengths), _from_planes(plain.stored)
        if names and (max(lengths) > CHUNK_MAX or min(stored) < 1 or any(map(int.__gt__, stored, lengths))):
            raise Corrupt("a bootstrap lists a chunk of an impossible length")
        layout = _layout(plain, names, lengths, self.arrangement)
        if (layout.size, layout.bytes_content) != (self.size, self.bytes_content):
            raise Corrupt("a bootstrap has a device of another size than it states")
        return layout, tuple(_placed(plain, names, lengths, stored))


_FORMAT = f"p2pdist-bootstrap-{FORMAT}"
_pack = msgspec.msgpack.Encoder().encode
_unpack = msgspec.msgpack.Decoder(_Bootstrap).decode
_unpack_chunks = msgspec.msgpack.Decoder(_Chunks).decode


def bootstrap_of(manifest: Manifest) -> Descriptor | None:
    """The bootstrap of a package, None where it has none that is known here."""
    found = (part for part in manifest.parts if is_bootstrap(part) and part.annotations[BOOTSTRAP] == FORMAT)
    return next((part for part in found if part.size <= BOOTSTRAP_BYTES_MAX), None)


def encode_bootstrap(
    manifest: Manifest,
    images: Sequence[bytes],
    layout: DeviceLayout,
    places: Mapping[bytes, tuple[Digest, int, int]],
) -> bytes | None:
    """Bytes of the bootstrap of a package: `images` of its trees over a device with this `layout`;
    `places` has pack, offset and stored length of each chunk. None for a package that can have
    none: it has layers that are no trees, is too large, or short names do not tell its chunks
    apart."""
    if any(layer.media_type != TREE_TYPE for layer in manifest.layers):
        return None
    chunks = list(layout.chunks())
    cut = [chunk for chunk in chunks if chunk.content != chunk.chunk and not chunk.number]
    counts = {chunk.content: 0 for chunk in cut}
    for chunk in chunks:
        if chunk.content in counts:
            counts[chunk.content] += 1
    full = {chunk.chunk for chunk in chunks} | counts.keys()
    if len(chunks) > CHUNKS_MAX or len({name[:NAME_BYTES] for name in full}) != len(full):
        return None
    packs: dict[Digest, int] = {}
    runs: list[_Run] = []
    after: tuple[int, int] | None = None
    for number, chunk in enumerate(chunks):
        digest, offset, stored = places[chunk.chunk]
        pack = packs.setdefault(digest, len(packs))
        if after != (pack, offset):
            runs.append(_Run(number, pack, offset))
        after = pack, offset + stored
    firsts = {chunk.content: number for number, chunk in enumerate(chunks) if not chunk.number}
    plain = _pack(
        _Chunks(
            list(packs),
            b"".join(chunk.chunk[:NAME_BYTES] for chunk in chunks),
            _planes([chunk.length for chunk in chunks]),
            _planes([places[chunk.chunk][2] for chunk in chunks]),
            runs,
            [_Cut(firsts[content], count, content[:NAME_BYTES]) for content, count in counts.items()],
        )
    )
    if len(plain) + sum(map(len, images)) > DECODED_BYTES_MAX or len(packs) > PACKS_MAX:
        return None
    parameters = zstandard.ZstdCompressionParameters.from_level(
        CATALOG_LEVEL, window_log=WINDOW, write_content_size=True
    )
    compress = zstandard.ZstdCompressor(compression_params=parameters).compress
    layers: list[str] = [layer.digest for layer in manifest.layers]
    frames, places_frame = [compress(image) for image in images], compress(plain)
    if len(plain) > _expanded_max(places_frame):
        return None
    stated = (layout.arrangement, layout.blocks, layout.bytes_content)
    data = _pack(_Bootstrap(_FORMAT, *stated, layers, frames, places_frame))
    return data if len(data) <= BOOTSTRAP_BYTES_MAX else None


def decode_bootstrap(data: bytes) -> Bootstrap:
    """Parse and check a bootstrap. Raises Corrupt."""
    try:
        plain = _unpack(data)
        frames = (*plain.images, plain.chunks)
        sizes = [zstandard.frame_content_size(frame) for frame in frames]
    except (zstandard.ZstdError, *UNDECODABLE) as error:
        raise Corrupt(f"this is no bootstrap: {error}") from error
    sound = (
        plain.format == _FORMAT
        and len(data) <= BOOTSTRAP_BYTES_MAX
        and len(plain.images) == len(plain.layers)
        and 0 <= plain.blocks < BLOCKS_MAX
        and min(sizes) >= 0
        and sum(sizes) <= DECODED_BYTES_MAX
        and sizes[-1] <= _expanded_max(plain.chunks)
    )
    if not sound:
        raise Corrupt("this is no bootstrap, or one of a later format, or over its limits")
    images = tuple(map(PackedImage, plain.images, sizes))
    size = plain.blocks * BLOCK_BYTES
    return Bootstrap(tuple(plain.layers), images, plain.arrangement, size, plain.bytes_content, plain.chunks)


def _expanded_max(frame: bytes) -> int:
    """Bytes that what says where chunks are may have when decompressed."""
    return SPARE_BYTES + EXPANSION_MAX * len(frame)


def _unpacked(frame: bytes) -> _Chunks:
    """The columns of chunks. Raises Corrupt."""
    try:
        # The one frame itself says how much memory it takes.
        data = zstandard.ZstdDecompressor().decompress(frame, read_across_frames=False, allow_extra_data=False)
        plain = _unpack_chunks(data)
    except (zstandard.ZstdError, *UNDECODABLE) as error:
        raise Corrupt(f"a bootstrap does not say where chunks are: {error}") from error
    count = len(plain.names) // NAME_BYTES
    sound = (
        count <= CHUNKS_MAX
        and len(plain.names) == count * NAME_BYTES
        and len(plain.lengths) == len(plain.stored) == 4 * count
        and all(map(is_digest, plain.packs))
    )
    if not sound:
        raise Corrupt("a bootstrap has columns of different lengths, or too many chunks")
    return plain


def is_named(data: bytes | memoryview, name: bytes) -> bool:
    """Whether a chunk has this name, in full or short."""
    return len(name) >= NAME_BYTES and content_hash(data).startswith(name)


def _layout(plain: _Chunks, names: Sequence[bytes], lengths: Sequence[int], arrangement: int) -> DeviceLayout:
    """Where contents lie. Raises Corrupt, TooLarge."""
    sizes: dict[bytes, int] = {}
    cuts: dict[bytes, tuple[list[int], list[bytes]]] = {}
    at = 0
    for cut in plain.cuts:
        end = cut.first + cut.count
        if not at <= cut.first < end <= len(names) or len(cut.name) != NAME_BYTES:
            raise Corrupt("a bootstrap has contents that are out of order, or of no chunks")
        sizes.update(zip(names[at : cut.first], lengths[at : cut.first], strict=True))
        offsets = list(accumulate(lengths[cut.first : end], initial=0))
        cuts[cut.name] = offsets, list(names[cut.first : end])
        sizes[cut.name] = offsets[-1]
        at = end
    sizes.update(zip(names[at:], lengths[at:], strict=True))
    if len(sizes) != len(names) - sum(cut.count - 1 for cut in plain.cuts):
        raise Corrupt("a bootstrap names a content twice")
    return DeviceLayout(sizes, {}, arrangement, cuts)


def _placed(
    plain: _Chunks, names: Sequence[bytes], lengths: Sequence[int], stored: Sequence[int]
) -> Iterator[PlacedChunks]:
    """The chunks of each pack. Raises Corrupt."""
    columns: dict[int, tuple[list[bytes], list[int], list[int], list[int]]] = {}
    firsts = [run.first for run in plain.runs]
    if firsts[:1] != [0] * bool(names) or any(before >= after for before, after in pairwise((*firsts, len(names)))):
        raise Corrupt("a bootstrap does not say where its chunks are")
    for run, end in zip(plain.runs, (*firsts, len(names))[1:], strict=True):
        if not 0 <= run.pack < len(plain.packs) or run.offset < 0:
            raise Corrupt("a bootstrap names an impossible place in a pack")
        mine = slice(run.first, end)
        column = columns.setdefault(run.pack, ([], [], [], []))
        column[0].extend(names[mine])
        column[1].extend(lengths[mine])
        column[2].extend(stored[mine])
        column[3].extend(list(accumulate(stored[mine], initial=run.offset))[:-1])
    for pack, column in columns.items():
        yield PlacedChunks(Digest(plain.packs[pack]), *column)


def _planes(numbers: Sequence[int]) -> bytes:
    """Numbers below 2**32 as columns of bytes, the lowest first."""
    data = b"".join(number.to_bytes(4, "little") for number in numbers)
    return b"".join(data[plane::4] for plane in range(4))


def _from_planes(planes: bytes) -> list[int]:
    count = len(planes) // 4
    data = bytearray(len(planes))
    for plane in range(4):
        data[plane::4] = planes[plane * count : (plane + 1) * count]
    numbers = array("I", bytes(data))
    assert numbers.itemsize == 4  # as on all that this runs on, little-endian too
    return numbers.tolist()
