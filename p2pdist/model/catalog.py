"""Catalogs: the pages, chunk lists and chunks that one packing added to a package's pack pool.

Trees of a package name pages, chunk lists and chunks by BLAKE3; its catalogs say where they are. A
catalog carries pages and chunk lists itself, and lists the chunks in packs. A pack is a blob of
stored chunks, one after the other, with nothing between them. Packing a new version writes one
catalog, and packs with what no earlier catalog has.

Encoded: one zstd frame of the MessagePack of pages, chunk lists and packs. A pack's chunks are
records of 40 bytes: BLAKE3, length and stored length (little-endian), in the order of the pack.

A stored chunk is the chunk itself when its stored length is its length. Otherwise it is cut into
blocks, each of them one zstd frame, or as it is when that would not make it shorter. A content that
is one chunk has blocks of BLOCK_SIZE; Btrfs takes such frames as they are (ioctl
BTRFS_IOC_ENCODED_WRITE). Chunks of a content that is cut begin anywhere within a sector: their
blocks have at most CUT_BLOCK_MAX, so that the bytes before them in their first sector can be put
before them (see store/objects/btrfs.py).

Where there is more than one block, a word for each comes first (u32, little-endian): its stored
length, and in the upper 8 bits the sectors that every block but the last has, or none where that is
BLOCK_SIZE, as all blocks had in earlier releases. Without words the chunk is one frame, and begins
with 0xFD2FB528, which is no such word.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Annotated

import msgspec
import zstandard
from msgspec import Meta

from p2pdist.model.digest import Digest, is_digest
from p2pdist.model.errors import UNDECODABLE, Corrupt, TooLarge
from p2pdist.model.tree import CHUNK_MAX, PAGES_MAX

SECTOR = 4096
BLOCK_SIZE = 128 << 10
CUT_BLOCK_MAX = BLOCK_SIZE - SECTOR
LEVEL = 5
"""Of zstd. A tree is packed once and moved to every host, so fewer bytes than at level 3 are worth
more time; level 6 saves little more. Decompressing takes the same."""
CATALOG_LEVEL, CATALOG_WINDOW, CATALOG_TABLES = 9, 27, 22
"""Of zstd, and logarithms: how far back in a catalog and among how many places a repetition is
found. Most of a catalog are hashes, and each is there twice, in a page or chunk list and in the
record of its chunk, megabytes apart."""
PACKS_MAX = 1024
CHUNK_LISTS_MAX = 1 << 19
CATALOG_BYTES_MAX = 320 << 20
SPARE_BYTES = 16 << 20
EXPANSION_MAX = 32
"""Decompressed, all catalogs of a tree together have at most CATALOG_BYTES_MAX, and SPARE_BYTES and
EXPANSION_MAX times their bytes: hashes, most of it, do not compress. Nor do they have more than
PAGES_MAX pages and CHUNK_LISTS_MAX chunk lists, since each takes memory of its own."""

HEAD_BYTES = 18
"""Of a catalog, at its beginning: the longest head of a zstd frame (RFC 8878, 3.1.1.1), which
states the decompressed size."""

_FORMAT = "p2pdist-catalog-1"
_RECORD = struct.Struct("<32sII")
_MAGIC_BITS = zstandard.MAGIC_NUMBER >> 24
_STORED_BITS = 24


class Stored(msgspec.Struct, frozen=True, gc=False):
    """A chunk in a pack: its BLAKE3, its length, and where in the pack how many bytes of it are."""

    chunk: bytes
    length: int
    offset: int
    stored: int


@dataclass(frozen=True, slots=True)
class Pack:
    """The chunks of a pack, a blob of `size` bytes: encoded records."""

    digest: Digest
    size: int
    records: bytes

    def __len__(self) -> int:
        return len(self.records) // _RECORD.size

    def chunks(self) -> Iterator[Stored]:
        """The chunks in the order of the pack."""
        offset = 0
        for chunk, length, stored in _RECORD.iter_unpack(self.records):
            yield Stored(chunk, length, offset, stored)
            offset += stored


@dataclass(frozen=True, slots=True)
class Catalog:
    """Encoded pages and chunk lists, and the packs."""

    pages: tuple[bytes, ...] = ()
    chunk_lists: tuple[bytes, ...] = ()
    packs: tuple[Pack, ...] = ()


class _Pack(msgspec.Struct, frozen=True, array_like=True):
    digest: str
    size: int
    records: bytes


class _Catalog(msgspec.Struct, frozen=True, array_like=True):
    format: str
    pages: Annotated[list[bytes], Meta(max_length=PAGES_MAX)]
    chunk_lists: Annotated[list[bytes], Meta(max_length=CHUNK_LISTS_MAX)]
    packs: Annotated[list[_Pack], Meta(max_length=PACKS_MAX)]


def record(chunk: bytes, length: int, stored: int) -> bytes:
    """The record of one chunk, to be appended to the records of its pack."""
    return _RECORD.pack(chunk, length, stored)


def encode_catalog(catalog: Catalog) -> bytes:
    """Bytes of a catalog."""
    packs = [_Pack(pack.digest, pack.size, pack.records) for pack in catalog.packs]
    plain = msgspec.msgpack.encode(_Catalog(_FORMAT, list(catalog.pages), list(catalog.chunk_lists), packs))
    if len(plain) > CATALOG_BYTES_MAX:
        raise TooLarge(
            f"the list of files takes {len(plain)} bytes, over the limit of {CATALOG_BYTES_MAX}",
            remedy="Pack fewer files, or split them over several packages",
        )
    parameters = zstandard.ZstdCompressionParameters.from_level(
        CATALOG_LEVEL,
        window_log=CATALOG_WINDOW,
        hash_log=CATALOG_TABLES,
        chain_log=CATALOG_TABLES,
        write_content_size=True,
    )
    return zstandard.ZstdCompressor(compression_params=parameters).compress(plain)


def check_expansion(catalogs: Iterable[tuple[int, bytes]]) -> None:
    """Raises Corrupt unless the catalogs of a tree, by length and first HEAD_BYTES bytes, state
    that they stay within their limits when they are decompressed. Decompresses nothing."""
    stored = stated = 0
    for length, head in catalogs:
        try:
            size = zstandard.frame_content_size(head)
        except zstandard.ZstdError as error:
            raise Corrupt(f"this is no catalog: {error}") from error
        if size < 0:
            raise Corrupt("a catalog does not state its size when decompressed")
        stored, stated = stored + length, stated + size
    if stated > min(CATALOG_BYTES_MAX, SPARE_BYTES + EXPANSION_MAX * stored):
        raise Corrupt(
            f"catalogs of {stored} bytes state {stated} bytes when decompressed, over the limit",
            remedy="Pack fewer files, or split them over several packages",
        )


def decode_catalog(data: bytes) -> Catalog:
    """Parse a catalog and check that its packs add up; raises Corrupt."""
    check_expansion([(len(data), data[:HEAD_BYTES])])
    try:
        # The one frame itself says how much memory it takes.
        decompressed = zstandard.ZstdDecompressor().decompress(data, read_across_frames=False, allow_extra_data=False)
        plain = msgspec.msgpack.decode(decompressed, type=_Catalog)
    except (zstandard.ZstdError, *UNDECODABLE) as error:
        raise Corrupt(f"this is no catalog: {error}") from error
    if plain.format != _FORMAT or len(plain.packs) > PACKS_MAX:
        raise Corrupt("this is no catalog, or one of a later format", remedy="Use a newer release, or pack it again")
    packs = tuple(_checked(pack) for pack in plain.packs)
    return Catalog(tuple(plain.pages), tuple(plain.chunk_lists), packs)


def _checked(pack: _Pack) -> Pack:
    if not is_digest(pack.digest) or len(pack.records) % _RECORD.size:
        raise Corrupt("a catalog names an impossible pack")
    total = 0
    for _, length, stored in _RECORD.iter_unpack(pack.records):
        if not 0 < stored <= length <= CHUNK_MAX:
            raise Corrupt(f"a catalog lists a chunk of an impossible length in {pack.digest}")
        total += stored
    if total != pack.size:
        raise Corrupt(f"the chunks that a catalog lists in {pack.digest} do not fill it")
    return Pack(Digest(pack.digest), pack.size, pack.records)


class ChunkEncoder:
    """Encodes chunks, one after the other, in one thread at a time. Its first chunk allocates a
    megabyte, which costs more than compressing most files."""

    def __init__(self) -> None:
        self._compressor = zstandard.ZstdCompressor(level=LEVEL, write_content_size=True, write_checksum=False)

    def encode(self, data: bytes | memoryview, *, cut: bool = False) -> bytes:
        """The stored form of a chunk of 1 to CHUNK_MAX bytes: compressed where that makes it
        shorter. `cut`: it may begin anywhere within a sector of a file, as the chunks of a content
        that is cut do."""
        size = _cut_block_size(len(data)) if cut else BLOCK_SIZE
        blocks = []
        for at in range(0, len(data), size):
            block = data[at : at + size]
            frame = self._compressor.compress(block)
            blocks.append(frame if len(frame) < len(block) else bytes(block))
        above = size // SECTOR << _STORED_BITS if cut else 0
        words = struct.pack(f"<{len(blocks)}I", *(above | len(block) for block in blocks)) if len(blocks) > 1 else b""
        stored = words + b"".join(blocks)
        return stored if len(stored) < len(data) else bytes(data)


def _cut_block_size(length: int) -> int:
    """The size of the blocks of a chunk that is cut: whole sectors, for blocks as few and as even
    as possible."""
    count = -(-length // CUT_BLOCK_MAX)
    return -(-length // (count * SECTOR)) * SECTOR


def one_frame(stored: bytes | memoryview, length: int) -> bool:
    """Whether a stored chunk, shorter than the `length` bytes that it decodes to, should be one
    frame."""
    return length <= BLOCK_SIZE and (len(stored) < 4 or stored[3] == _MAGIC_BITS)


def chunk_blocks(stored: bytes | memoryview, length: int) -> Iterator[tuple[bytes | memoryview, int]]:
    """The blocks of a stored chunk of `length` bytes: stored bytes and length of each; equal
    lengths mean that it is not compressed. Raises Corrupt."""
    if len(stored) == length or one_frame(stored, length):
        yield stored, length
        return
    above = stored[3] if len(stored) > 3 else 0
    full = above * SECTOR or BLOCK_SIZE
    count = -(-length // full)
    at = 4 * count
    if count == 1 or at > len(stored) or full > BLOCK_SIZE:
        raise Corrupt("a stored chunk is cut short, or its blocks are too long")
    sizes = [word - (above << _STORED_BITS) for word in struct.unpack_from(f"<{count}I", stored)]
    if at + sum(sizes) != len(stored):
        raise Corrupt("a stored chunk is broken: its blocks do not fill it")
    for number, size in enumerate(sizes):
        block = min(full, length - number * full)
        if not 0 < size <= block:
            raise Corrupt("a stored chunk holds a block of an impossible length")
        yield stored[at : at + size], block
        at += size


def decode_chunk(stored: bytes | memoryview, length: int) -> bytes:
    """The chunk of `length` bytes; raises Corrupt. Its BLAKE3 is yet to be compared."""
    if len(stored) == length:
        return bytes(stored)
    decompressor = zstandard.ZstdDecompressor()
    blocks = []
    for block, size in chunk_blocks(stored, length):
        if len(block) == size:
            blocks.append(bytes(block))
            continue
        try:
            # The frame itself says how much memory it takes.
            if zstandard.frame_content_size(block) != size:
                raise Corrupt("a stored chunk holds a block of another length than it states")
            blocks.append(decompressor.decompress(block))
        except zstandard.ZstdError as error:
            raise Corrupt(f"a stored chunk cannot be decompressed: {error}") from error
    return b"".join(blocks)
