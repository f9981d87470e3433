"""The index of a store: which blobs, pins and packages there are.

SQLite in WAL mode with synchronous NORMAL: what was committed survives a killed process; a lost machine may lose the last commits but the
index stays consistent, and recovery reconciles it with the files. Nothing is written here per piece.
"""

from __future__ import annotations

import sqlite3
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from p2pdist.model.digest import Digest
from p2pdist.model.errors import Corrupt, DiskFull, P2PDistError
from p2pdist.store.disk import free_bytes

_VERSION = 1
_SCHEMA = """
CREATE TABLE IF NOT EXISTS blobs (
    digest TEXT PRIMARY KEY, size INTEGER NOT NULL, piece_size INTEGER NOT NULL, pieces_digest TEXT NOT NULL,
    complete INTEGER NOT NULL, durable INTEGER NOT NULL, boot TEXT NOT NULL, last_used REAL NOT NULL, added REAL NOT NULL
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS pins (digest TEXT NOT NULL, owner TEXT NOT NULL, PRIMARY KEY (digest, owner)) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS packages (
    reference TEXT PRIMARY KEY, manifest_digest TEXT NOT NULL, last_used REAL NOT NULL
) WITHOUT ROWID;
"""


@dataclass(frozen=True, slots=True)
class Entry:
    """A blob in the index. `boot` is the boot id under which it became complete, `durable` whether it has reached the disk since."""

    digest: Digest
    size: int
    piece_size: int
    pieces_digest: Digest
    complete: bool
    durable: bool
    boot: str
    last_used: float
    added: float


@dataclass(frozen=True, slots=True)
class PackageRecord:
    """A package that was pulled here."""

    reference: str
    manifest_digest: Digest
    last_used: float


class Index:
    """Thread-safe. Methods raise DiskFull, Corrupt (the file is damaged) or P2PDistError."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lock = threading.Lock()
        with self._failures():
            self._database = sqlite3.connect(path, check_same_thread=False, isolation_level=None)
            try:
                self._prepare()
            except BaseException:
                self._database.close()
                raise

    def _prepare(self) -> None:
        self._database.execute("PRAGMA journal_mode=WAL")
        self._database.execute("PRAGMA synchronous=NORMAL")
        version = self._database.execute("PRAGMA user_version").fetchone()[0]
        if version not in {0, _VERSION}:
            raise P2PDistError(
                f"the store {self._path.parent} was made by another release (index version {version})",
                remedy="Use that release, or another store directory",
            )
        self._database.executescript(_SCHEMA)
        self._database.execute(f"PRAGMA user_version={_VERSION}")

    def close(self) -> None:
        with self._failures(), self._lock:
            self._database.close()

    def checkpoint(self) -> None:
        """Flush what was committed to the disk, without keeping writers waiting."""
        with self._failures(), closing(sqlite3.connect(self._path)) as second:
            second.execute("PRAGMA wal_checkpoint(PASSIVE)")

    # -- blobs

    def entries(self) -> list[Entry]:
        rows = self._query("SELECT * FROM blobs")
        return [
            Entry(row[0], row[1], row[2], row[3], bool(row[4]), bool(row[5]), row[6], row[7], row[8]) for row in rows
        ]

    def add(self, entry: Entry) -> None:
        values = (entry.digest, entry.size, entry.piece_size, entry.pieces_digest, entry.complete, entry.durable)
        self._run(
            "INSERT OR REPLACE INTO blobs VALUES (?,?,?,?,?,?,?,?,?)",
            (*values, entry.boot, entry.last_used, entry.added),
        )

    def set_complete(self, digest: Digest, *, complete: bool, boot: str) -> None:
        """Note that a blob became complete, or no longer is; it is not durable for now."""
        self._run("UPDATE blobs SET complete=?, durable=0, boot=? WHERE digest=?", (complete, boot, digest))

    def set_durable(self, digest: Digest) -> None:
        self._run("UPDATE blobs SET durable=1 WHERE digest=? AND complete=1", (digest,))

    def distrust(self, digest: Digest) -> None:
        """Have the blob verified at the next opening."""
        self._run("UPDATE blobs SET durable=0, boot='' WHERE digest=?", (digest,))

    def touch(self, used: list[tuple[float, Digest]]) -> None:
        """Record when blobs were last used."""
        with self._failures(), self._lock:
            self._database.execute("BEGIN")
            try:
                self._database.executemany("UPDATE blobs SET last_used=? WHERE digest=?", used)
            except BaseException:
                self._database.execute("ROLLBACK")
                raise
            self._database.execute("COMMIT")

    def delete(self, digest: Digest) -> None:
        self._run("DELETE FROM blobs WHERE digest=?", (digest,))

    # -- pins and packages

    def pins(self) -> list[tuple[Digest, str]]:
        return [(row[0], row[1]) for row in self._query("SELECT digest, owner FROM pins")]

    def pin(self, digest: Digest, owner: str) -> None:
        self._run("INSERT OR IGNORE INTO pins VALUES (?,?)", (digest, owner))

    def unpin(self, owner: str) -> None:
        self._run("DELETE FROM pins WHERE owner=?", (owner,))

    def packages(self) -> list[PackageRecord]:
        return [PackageRecord(*row) for row in self._query("SELECT * FROM packages ORDER BY reference")]

    def record_package(self, record: PackageRecord) -> None:
        self._run(
            "INSERT OR REPLACE INTO packages VALUES (?,?,?)",
            (record.reference, record.manifest_digest, record.last_used),
        )

    def forget_package(self, reference: str) -> None:
        self._run("DELETE FROM packages WHERE reference=?", (reference,))

    # -- inner workings

    def _run(self, statement: str, values: tuple[object, ...]) -> None:
        with self._failures(), self._lock:
            self._database.execute(statement, values)

    def _query(self, statement: str) -> list[Any]:
        with self._failures(), self._lock:
            return self._database.execute(statement).fetchall()

    @contextmanager
    def _failures(self) -> Iterator[None]:
        try:
            yield
        except sqlite3.DatabaseError as error:
            code = getattr(error, "sqlite_errorcode", None)
            if code == sqlite3.SQLITE_FULL:
                raise DiskFull(str(self._path.parent), needed=1 << 20, free=free_bytes(self._path.parent)) from error
            if code in {sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB}:
                raise Corrupt(
                    f"the index {self._path} is damaged: {error}",
                    remedy="Move the store directory away; what it held will be fetched again",
                ) from error
            raise P2PDistError(f"the index {self._path} cannot be used: {error}", remedy="Check the disk") from error
