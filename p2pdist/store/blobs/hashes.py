"""The file that stands beside the bitmap of a partial blob without a piece list: the hash of every
piece that is held, as the vouched list had it when the piece was stored.

What is stored can thus be verified after a restart, before any host says again what the list is. A
slot is written before the piece is marked, with one pwrite, so a killed process loses no hash of a
marked piece. What a lost machine tore is found as every wrong piece is: it does not match.

Format: the 16 bytes `p2pdist-hash-001`, number of pieces (u32 big-endian), 44 zero bytes, then 33
bytes a piece: 0 for none, 1 for held, 2 for read from upstream by this host; and the hash.
"""

from __future__ import annotations

import errno
import os
import struct
from dataclasses import dataclass
from pathlib import Path

from p2pdist.model.digest import Digest
from p2pdist.model.pieces import HASH_SIZE
from p2pdist.store.disk import UNREADABLE, pwrite_all

VOUCHED = Digest(f"sha256:{'0' * 64}")
"""What the index names as the piece list of a blob that has none: no document has this digest, so
a release that knows no vouched blobs drops what it finds of one."""

_MAGIC = b"p2pdist-hash-001"
_HEAD = struct.Struct(">16sI44x")
_SLOT = 1 + HASH_SIZE
_HELD, _OWN = 1, 2


@dataclass(frozen=True, slots=True)
class StoredHash:
    """The hash of a piece. `own`: this host has read the piece from upstream itself."""

    hash: bytes
    own: bool


def read_hashes(path: Path, count: int) -> dict[int, StoredHash] | None:
    """The hashes in the file of a blob of `count` pieces; None when there is no such file, or it is
    damaged. Raises OSError."""
    try:
        data = path.read_bytes()
    except OSError as error:
        if error.errno != errno.ENOENT and error.errno not in UNREADABLE:
            raise
        return None
    if len(data) != _HEAD.size + count * _SLOT or _HEAD.unpack_from(data) != (_MAGIC, count):
        return None
    slots = [data[start : start + _SLOT] for start in range(_HEAD.size, len(data), _SLOT)]
    return {
        piece: StoredHash(slot[1:], slot[0] == _OWN) for piece, slot in enumerate(slots) if slot[0] in (_HELD, _OWN)
    }


class HashesFile:
    """A file of hashes that is open for writing. Not thread-safe: BlobFiles.disk guards it. All
    methods raise OSError."""

    __slots__ = ("_fd",)

    def __init__(self, path: Path, *, create: bool = False) -> None:
        self._fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | (os.O_CREAT | os.O_TRUNC if create else 0), 0o644)

    @classmethod
    def create(cls, path: Path, count: int) -> HashesFile:
        """Write a new file, whole, so that no later hash needs new space."""
        file = cls(path, create=True)
        try:
            pwrite_all(file._fd, _HEAD.pack(_MAGIC, count) + bytes(count * _SLOT), 0)
        except OSError:
            file.close()
            raise
        return file

    def store(self, piece: int, stored: StoredHash) -> None:
        """Write the hash of a piece that is about to be marked."""
        slot = bytes([_OWN if stored.own else _HELD]) + stored.hash
        pwrite_all(self._fd, slot, _HEAD.size + piece * _SLOT)

    def flush(self) -> None:
        """Bring what was written to the disk."""
        os.fdatasync(self._fd)

    def close(self) -> None:
        """Close the file."""
        os.close(self._fd)
