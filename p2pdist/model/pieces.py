"""Pieces: the unit of transfer, verification and resume.

A blob of `size` bytes is cut into `count` pieces of `piece_size` bytes; the last may be shorter.
Stripe `s` of `S` holds the pieces i with i mod S = s. A piece list is the BLAKE3 hash of every
piece in order; its own SHA-256 digest stands next to the blob's in the manifest, so a piece is
trusted through manifest, descriptor, piece list.

Encoded piece list: the 16 bytes `p2pdist-pieces-1`, size (u64 big-endian), piece size (u32
big-endian), then 32 bytes a piece.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import BinaryIO

from blake3 import blake3

from p2pdist.model.digest import Digest, digest_of
from p2pdist.model.errors import Corrupt

PIECE_SIZE_MIN = 64 << 10
PIECE_SIZE_MAX = 16 << 20
PIECES_WANTED_MAX = 4096
PIECES_LIMIT = 1 << 20
"""A piece list longer than this (16 TiB of content) is refused."""

FEW = 64
"""So many missing pieces are found one by one."""

HASH_SIZE = 32
_MAGIC = b"p2pdist-pieces-1"
_HEAD = struct.Struct(">16sQI")


STRIPED_MIN = 16
FINE_PIECES = 2048
FINE_SIZE = 1 << 20
"""A blob of at least so many pieces, of so many bytes each, has more stripes."""


TURN_BYTES_S = 8e6
LARGE_TURN_S = 0.6
"""Pieces are large when a turn on a link of TURN_BYTES_S, which is slow, takes longer than this."""


def piece_size_for(size: int) -> int:
    """Piece size in bytes for a blob of `size` bytes: the smallest power of two that keeps the
    pieces at 4,096 or fewer.

    What a broadcast loses beyond the physical bound falls with the number of pieces, which speaks
    for many; per-piece work sets the ceiling.
    """
    piece = PIECE_SIZE_MIN
    while piece < PIECE_SIZE_MAX and size > piece * PIECES_WANTED_MAX:
        piece *= 2
    return piece


@dataclass(frozen=True, slots=True)
class PieceLayout:
    """How a blob of `size` bytes is cut into pieces of `piece_size` bytes."""

    size: int
    piece_size: int
    count: int = field(init=False, repr=False, compare=False)
    """Number of pieces; stored, since each piece that comes reads it several times."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "count", -(-self.size // self.piece_size))

    @property
    def stripes(self) -> int:
        """Number of stripes. It follows from the layout alone, so that every host and every tracker
        agrees.

        With one stripe the uplinks of the leaves would be idle. More stripes fill slower, by depth
        x stripes x the time of a piece, and each costs a stream; but a host with a slow ancestor in
        one of them loses less. So there are two, and four where pieces are many enough for the
        filling, and large enough for the streams, not to count.
        """
        if self.count < STRIPED_MIN:
            return 1
        return 4 if self.count >= FINE_PIECES and self.piece_size >= FINE_SIZE else 2

    def turn_s(self, rate_bytes_s: float = 0.0) -> float:
        """How long a link of this rate (0: a slow one) takes for a turn: a piece of each stripe."""
        return self.stripes * self.piece_size / (rate_bytes_s or TURN_BYTES_S)

    @property
    def large(self) -> bool:
        """Whether a piece takes long enough on a slow link to look as if nothing came."""
        return self.turn_s() > LARGE_TURN_S

    def length(self, piece: int) -> int:
        """Length in bytes of piece `piece`."""
        return self.piece_size if piece < self.count - 1 else self.size - piece * self.piece_size

    def offset(self, piece: int) -> int:
        return piece * self.piece_size

    def covering(self, start: int, end: int) -> range:
        """The pieces that hold bytes start (inclusive) to end (exclusive)."""
        return range(start // self.piece_size, -(-end // self.piece_size))


class PieceSet:
    """A set of piece numbers below `count`, as a bitmap (bit i of the set is bit i % 8 of byte i //
    8, least significant first)."""

    __slots__ = ("bits", "count", "size")

    def __init__(self, count: int, bits: bytes | bytearray | memoryview | None = None) -> None:
        length = (count + 7) // 8
        if bits is None:
            self.bits = bytearray(length)
        elif len(bits) != length:
            raise Corrupt(f"a piece bitmap of {len(bits)} bytes does not fit {count} pieces")
        else:
            self.bits = bytearray(bits)
        self.count = count
        if count % 8 and self.bits:
            self.bits[-1] &= (1 << (count % 8)) - 1
        self.size = int.from_bytes(self.bits, "little").bit_count()

    @classmethod
    def full(cls, count: int) -> PieceSet:
        return cls(count, b"\xff" * ((count + 7) // 8))

    def __contains__(self, piece: int) -> bool:
        return bool(self.bits[piece >> 3] >> (piece & 7) & 1)

    def __len__(self) -> int:
        return self.size

    def __iter__(self) -> Iterator[int]:
        return (piece for piece in range(self.count) if piece in self)

    def add(self, piece: int) -> bool:
        """Add `piece`; returns False if it was there."""
        index, mask = piece >> 3, 1 << (piece & 7)
        if self.bits[index] & mask:
            return False
        self.bits[index] |= mask
        self.size += 1
        return True

    def discard(self, piece: int) -> None:
        if piece in self:
            self.bits[piece >> 3] &= ~(1 << (piece & 7))
            self.size -= 1

    @property
    def complete(self) -> bool:
        return self.size == self.count

    def beyond(self, other: PieceSet) -> set[int]:
        """The pieces that are in this set and not in `other`, of the same `count`."""
        more = int.from_bytes(self.bits, "little") & ~int.from_bytes(other.bits, "little")
        pieces = set()
        while more:
            lowest = more & -more
            pieces.add(lowest.bit_length() - 1)
            more ^= lowest
        return pieces

    def offers(self, other: PieceSet, stripe: int, stripes: int) -> bool:
        """Whether a piece of a stripe is in this set and not in `other`, of the same `count`."""
        more = int.from_bytes(self.bits, "little") & ~int.from_bytes(other.bits, "little")
        if stripes > 1 and more:
            period = stripes * 8  # bits after which both stripes and bytes begin anew
            one = sum(1 << bit for bit in range(stripe, period, stripes)).to_bytes(stripes, "little")
            more &= int.from_bytes(one * (len(self.bits) // stripes + 1), "little")
        return more != 0

    def missing(self, stripe: int = 0, stripes: int = 1) -> list[int]:
        """The pieces of a stripe that are not in the set, ascending."""
        bits = self.bits
        if self.count - self.size <= FEW:
            return [piece for piece in self._few_missing() if piece % stripes == stripe]
        return [piece for piece in range(stripe, self.count, stripes) if not bits[piece >> 3] >> (piece & 7) & 1]

    def _few_missing(self) -> Iterator[int]:
        """The pieces that are not in the set, ascending, in a step for each."""
        absent = ((1 << self.count) - 1) ^ int.from_bytes(self.bits, "little")
        while absent:
            lowest = absent & -absent
            yield lowest.bit_length() - 1
            absent ^= lowest

    def stripe_counts(self, stripes: int) -> list[int]:
        """How many pieces of each stripe are in the set."""
        if self.complete:
            return [len(range(stripe, self.count, stripes)) for stripe in range(stripes)]
        counts = [0] * stripes
        for piece in self:
            counts[piece % stripes] += 1
        return counts

    def to_bytes(self) -> bytes:
        return bytes(self.bits)


@dataclass(frozen=True, slots=True)
class PieceList:
    """The BLAKE3 hash of each piece of one blob: `hashes` is 32 bytes a piece, in order."""

    layout: PieceLayout
    hashes: bytes

    def encode(self) -> bytes:
        return _HEAD.pack(_MAGIC, self.layout.size, self.layout.piece_size) + self.hashes

    @property
    def digest(self) -> Digest:
        return digest_of(self.encode())

    def verify(self, piece: int, data: bytes | bytearray | memoryview) -> bool:
        """Whether `data` is piece number `piece`."""
        start = piece * HASH_SIZE
        return len(data) == self.layout.length(piece) and (
            blake3(data).digest() == self.hashes[start : start + HASH_SIZE]
        )

    @classmethod
    def decode(cls, data: bytes) -> PieceList:
        """Parse an encoded piece list; raises Corrupt when it breaks the format or a limit."""
        if len(data) < _HEAD.size:
            raise Corrupt("a piece list is cut short")
        magic, size, piece_size = _HEAD.unpack_from(data)
        if magic != _MAGIC:
            raise Corrupt("a piece list has an unknown format")
        if piece_size & (piece_size - 1) or not PIECE_SIZE_MIN <= piece_size <= PIECE_SIZE_MAX:
            raise Corrupt(f"a piece list states an impossible piece size of {piece_size} bytes")
        layout = PieceLayout(size, piece_size)
        hashes = data[_HEAD.size :]
        if layout.count > PIECES_LIMIT or len(hashes) != layout.count * HASH_SIZE:
            raise Corrupt("a piece list does not have one hash for each piece")
        return cls(layout, hashes)

    @classmethod
    def of_stream(cls, stream: BinaryIO, size: int) -> PieceList:
        """Hash the next `size` bytes of a binary stream; raises Corrupt if it ends before."""
        layout = PieceLayout(size, piece_size_for(size))
        hashes = bytearray()
        for piece in range(layout.count):
            data = stream.read(layout.length(piece))
            if len(data) != layout.length(piece):
                raise Corrupt("the content ended before its stated size")
            hashes += blake3(data).digest()
        return cls(layout, bytes(hashes))


def encoded_size(layout: PieceLayout) -> int:
    """Bytes of the encoded piece list of a blob cut as `layout`."""
    return _HEAD.size + layout.count * HASH_SIZE
