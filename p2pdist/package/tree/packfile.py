"""Writing packs: stored chunks one behind the other, hashed on the way to the disk.

How large the pieces of a pack are depends on its size, which is not known before its end; so the
hashes of all piece sizes that come into question are kept (two, with packs of at most
PACK_BYTES_MAX).
"""

from __future__ import annotations

import errno
import hashlib
import os
import secrets
from dataclasses import dataclass
from pathlib import Path

from blake3 import blake3

from p2pdist.model.catalog import Pack, record
from p2pdist.model.digest import Digest
from p2pdist.model.errors import DiskFull, P2PDistError, remedy_of
from p2pdist.model.pieces import PIECE_SIZE_MIN, PieceLayout, PieceList, piece_size_for
from p2pdist.package.repository.contract import Content

PACK_BYTES_MAX = 512 << 20
_PIECE_SIZE_MAX = piece_size_for(PACK_BYTES_MAX)
_PIECE_SIZES = tuple(PIECE_SIZE_MIN << step for step in range((_PIECE_SIZE_MAX // PIECE_SIZE_MIN).bit_length()))


@dataclass(frozen=True, slots=True)
class Written:
    """A pack in the file at `path`, synced."""

    path: Path
    content: Content
    pack: Pack


class PackWriter:
    """Writes packs of at most `limit` bytes into `directory`. Chunks lie in the order of the calls.
    `close` ends the last pack, `abandon` deletes all. Raises DiskFull and P2PDistError."""

    def __init__(self, directory: Path, *, limit: int = PACK_BYTES_MAX) -> None:
        self.chunks: set[bytes] = set()
        self.packs: list[Written] = []
        self._directory, self._limit = directory, limit
        self._open: _Open | None = None

    def add(self, chunk: bytes, length: int, stored: bytes) -> None:
        """Append the stored form of a chunk of `length` bytes."""
        if self._open and self._open.size + len(stored) > self._limit:
            self._finish()
        try:
            self._open = self._open or _Open(self._directory / secrets.token_hex(12))
            self._open.add(record(chunk, length, len(stored)), stored)
        except OSError as error:
            raise self._failure(error) from error
        self.chunks.add(chunk)

    def close(self) -> list[Written]:
        """The packs, in the order in which they were written."""
        if self._open:
            self._finish()
        return self.packs

    def abandon(self) -> None:
        """Delete what has not been moved away."""
        if self._open:
            self._open.close()
            self._open.path.unlink(missing_ok=True)
        for written in self.packs:
            written.path.unlink(missing_ok=True)

    def _finish(self) -> None:
        assert self._open is not None
        try:
            self.packs.append(self._open.finish())
        except OSError as error:
            raise self._failure(error) from error
        self._open = None

    def _failure(self, error: OSError) -> P2PDistError:
        needed = sum(pack.content.pieces.layout.size for pack in self.packs) + (self._open.size if self._open else 0)
        return write_failure(self._directory, error, needed=needed)


def write_failure(directory: Path, error: OSError, *, needed: int) -> P2PDistError:
    """What to raise where so many bytes could not be written into a directory."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        space = os.statvfs(directory)
        return DiskFull.on(str(directory), space, needed=needed, code=error.errno, kept=False)
    return P2PDistError(f"cannot write to {directory}: {error.strerror}", remedy=remedy_of(error))


class _Open:
    """A pack that is being written."""

    def __init__(self, path: Path) -> None:
        self.path, self.size = path, 0
        self._handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        self._sha256 = hashlib.sha256()
        self._hashes = {size: bytearray() for size in _PIECE_SIZES}
        self._records = bytearray()
        self._buffer = bytearray()

    def add(self, row: bytes, stored: bytes) -> None:
        self.size += len(stored)
        self._records += row
        self._buffer += stored
        if len(self._buffer) >= 8 * _PIECE_SIZE_MAX:
            self._flush(len(self._buffer) // _PIECE_SIZE_MAX * _PIECE_SIZE_MAX)

    def finish(self) -> Written:
        self._flush(len(self._buffer))
        os.fsync(self._handle)
        self.close()
        layout = PieceLayout(self.size, piece_size_for(self.size))
        digest = Digest("sha256:" + self._sha256.hexdigest())
        content = Content(digest, PieceList(layout, bytes(self._hashes[layout.piece_size])))
        return Written(self.path, content, Pack(digest, self.size, bytes(self._records)))

    def close(self) -> None:
        if self._handle >= 0:
            os.close(self._handle)
            self._handle = -1

    def _flush(self, length: int) -> None:
        """Hash and write the first bytes of the buffer: whole pieces of every size, except at the
        end."""
        with memoryview(self._buffer) as view, view[:length] as data:
            self._sha256.update(data)
            for size, hashes in self._hashes.items():
                hashes.extend(b"".join(blake3(data[at : at + size]).digest() for at in range(0, length, size)))
            done = 0
            while done < length:
                done += os.write(self._handle, data[done:])
        del self._buffer[:length]
