"""The bitmap of a partial blob on disk: which pieces have verified.

A bit is set with one pwrite after the piece's own pwrite, so both lie in the page cache in that
order and a killed process loses neither. What a lost machine loses is another matter: the header
names the boot under which bits were set, and bits of another boot are hints to be verified, unless
the file is marked clean, which is done only after data and bits were synchronised and undone before
the next bit is set. pwrite is used rather than a shared mapping because a full disk then gives an
error instead of SIGBUS.

Format: the 16 bytes `p2pdist-have-001`, boot id (16 bytes), number of pieces (u32 big-endian),
clean (one byte, 0 or 1), 27 zero bytes, then the bitmap of PieceSet.
"""

from __future__ import annotations

import errno
import os
import struct
from dataclasses import dataclass
from pathlib import Path
from uuid import UUID

from p2pdist.model.pieces import PieceLayout, PieceSet
from p2pdist.store.disk import UNREADABLE, pwrite_all

_MAGIC = b"p2pdist-have-001"
_HEAD = struct.Struct(">16s16sIB27x")


@dataclass(frozen=True, slots=True)
class Bitmap:
    """What a bitmap file says."""

    pieces: PieceSet
    boot: UUID
    """The boot under which bits were last set."""
    clean: bool
    """Whether content and bits had reached the disk when the file was closed."""


def has_bitmap(layout: PieceLayout) -> bool:
    """Whether a partial blob has a bitmap. One of a single piece has everything or nothing, and
    after a crash its content tells."""
    return layout.count > 1


def read_bitmap(path: Path, count: int) -> Bitmap | None:
    """Read the bitmap of a blob of `count` pieces; None when there is none or it is damaged. Raises
    OSError."""
    try:
        data = path.read_bytes()
    except OSError as error:
        if error.errno != errno.ENOENT and error.errno not in UNREADABLE:
            raise
        return None
    if len(data) != _HEAD.size + (count + 7) // 8:
        return None
    magic, boot, stated, clean = _HEAD.unpack_from(data)
    if magic != _MAGIC or stated != count or clean > 1:
        return None
    return Bitmap(PieceSet(count, data[_HEAD.size :]), UUID(bytes=boot), bool(clean))


class BitmapFile:
    """A bitmap file that is open for writing. Not thread-safe: BlobFiles.disk guards it. All
    methods raise OSError."""

    __slots__ = ("_fd", "count")

    def __init__(self, path: Path, count: int, *, create: bool = False) -> None:
        self.count = count
        self._fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | (os.O_CREAT | os.O_TRUNC if create else 0), 0o644)

    @classmethod
    def create(cls, path: Path, have: PieceSet, boot: UUID) -> BitmapFile:
        """Write a new file, whole, so that no later bit needs new space."""
        file = cls(path, have.count, create=True)
        try:
            pwrite_all(file._fd, _HEAD.pack(_MAGIC, boot.bytes, have.count, 0) + have.to_bytes(), 0)
        except OSError:
            file.close()
            raise
        return file

    def store(self, have: PieceSet, piece: int, held: bool) -> None:
        """Set or clear the bit of `piece`; `have` holds the other bits of its byte."""
        index, mask = piece >> 3, 1 << (piece & 7)
        byte = have.bits[index] | mask if held else have.bits[index] & ~mask
        pwrite_all(self._fd, byte.to_bytes(1, "big"), _HEAD.size + index)

    def stamp(self, boot: UUID, *, clean: bool) -> None:
        """Flush the bits, then write the header and flush that."""
        os.fdatasync(self._fd)
        pwrite_all(self._fd, _HEAD.pack(_MAGIC, boot.bytes, self.count, clean), 0)
        os.fdatasync(self._fd)

    def distrust(self) -> None:
        """Have all bits verified before they are trusted: they were set under no boot."""
        pwrite_all(self._fd, _HEAD.pack(_MAGIC, bytes(16), self.count, False), 0)

    def close(self) -> None:
        """Close the file."""
        os.close(self._fd)
