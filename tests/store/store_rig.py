"""Blobs to store: their content follows from a number, so that every process of a test agrees on
it."""

from __future__ import annotations

import random
import sqlite3
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from uuid import UUID

import pytest
from blake3 import blake3

from p2pdist.model.digest import Digest, digest_of, hex_of
from p2pdist.model.pieces import PieceLayout, PieceList
from p2pdist.store.blobs.blob import Blob

KIB = 1 << 10
PIECE = 64 * KIB
OTHER_BOOT = UUID("00000000-1111-2222-3333-444444444444")


@dataclass(frozen=True)
class Sample:
    """A blob as its publisher has it."""

    data: bytes
    pieces: PieceList
    digest: Digest

    def piece(self, number: int) -> bytes:
        start = self.pieces.layout.offset(number)
        return self.data[start : start + self.pieces.layout.length(number)]

    @property
    def count(self) -> int:
        return self.pieces.layout.count


def sample(seed: int, size: int, *, piece_size: int = PIECE) -> Sample:
    """A blob of `size` bytes."""
    data = random.Random(seed).randbytes(size)
    layout = PieceLayout(size, piece_size)
    hashes = b"".join(
        blake3(data[layout.offset(piece) : layout.offset(piece) + layout.length(piece)]).digest()
        for piece in range(layout.count)
    )
    return Sample(data, PieceList(layout, hashes), digest_of(data))


def fill(blob: Blob, found: Sample, *, finish: bool = True) -> Blob:
    """Write every piece of a blob."""
    for piece in range(found.count):
        assert blob.write(piece, found.piece(piece))
    if finish:
        blob.finish()
    return blob


def flip(path: Path, offset: int) -> None:
    """Flip one bit of a file, read-only or not."""
    path.chmod(0o644)
    with path.open("r+b") as file:
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([byte ^ 0x10]))


def pretend_other_boot(root: Path, *, durable: int = 0) -> None:
    """Make a closed store look as if the machine had been lost: nothing was left clean, and all was
    written under another boot id. `durable` is up to which batch objects had reached the disk."""
    for path in (root / "partial").glob("*.have"):
        with path.open("r+b") as file:
            file.seek(16)
            file.write(OTHER_BOOT.bytes)
            file.seek(36)
            file.write(b"\0")
    with sqlite3.connect(root / "index.sqlite") as database:
        database.execute("UPDATE blobs SET boot=?, durable=0", (str(OTHER_BOOT),))
        database.execute("UPDATE objects_state SET boot=?, durable=?", (str(OTHER_BOOT), durable))
    database.close()


def data_file(root: Path, digest: Digest) -> Path:
    return root / "partial" / f"{hex_of(digest)}.data"


def complete_file(root: Path, digest: Digest) -> Path:
    return root / "blobs" / "sha256" / hex_of(digest)


def bitmap_file(root: Path, digest: Digest) -> Path:
    return root / "partial" / f"{hex_of(digest)}.have"


def in_index(root: Path, statement: str, *values: object) -> None:
    """Change one row of the index behind the store's back."""
    with sqlite3.connect(root / "index.sqlite") as database:
        assert database.execute(statement, values).rowcount == 1
    database.close()


@contextmanager
def keep_from_removal(path: Path) -> Iterator[None]:
    """Within a `with` block a file cannot be removed, or the rows of blobs in the index of a
    store."""
    if path.is_dir():
        with sqlite3.connect(path / "index.sqlite") as database:
            database.execute("CREATE TRIGGER kept BEFORE DELETE ON blobs BEGIN SELECT RAISE(ABORT, 'kept'); END")
        database.close()
    elif subprocess.run(["chattr", "+i", path], check=False).returncode:
        pytest.skip("the file system has no files that stay")
    try:
        yield
    finally:
        if path.is_dir():
            with sqlite3.connect(path / "index.sqlite") as database:
                database.execute("DROP TRIGGER kept")
            database.close()
        else:
            subprocess.run(["chattr", "-i", path], check=True)


def files(root: Path) -> set[str]:
    """Names of the content files of a store."""
    return {
        path.relative_to(root).as_posix()
        for name in ("blobs/sha256", "partial", "tmp")
        for path in (root / name).iterdir()
    }


def on_disk(root: Path) -> dict[bytes, bytes]:
    """The object files of a store by the content that their names say."""
    files = (path for path in (root / "objects").rglob("*") if path.is_file())
    return {bytes.fromhex(path.parent.name + path.name): path.read_bytes() for path in files}


def read_piece(blob: Blob, piece: int) -> bytes:
    """The bytes of a held piece."""
    return blob.read_range(blob.layout.offset(piece), blob.layout.length(piece))
