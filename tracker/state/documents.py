"""Small documents (manifests, configs, piece lists) kept in SQLite, so that a restarted tracker
need not read the origin again; and what tags and layers were said to be last, for a restart while
the origin is away.

Least recently used documents go when their total passes BYTES_MAX, the oldest descriptors over
DESCRIPTORS_MAX. A document that is read back is checked against its digest. They are a convenience:
a disk that fails later is logged, and the origin is read instead.
"""

from __future__ import annotations

import logging
import sqlite3
import threading
import time
from collections.abc import Mapping
from pathlib import Path

import msgspec

from p2pdist.model.digest import Digest, digest_of
from p2pdist.model.errors import UNDECODABLE, P2PDistError
from p2pdist.model.manifest import Descriptor
from tracker.state.files import StateDamaged, is_damage, make_private

BYTES_MAX = 1 << 30
DESCRIPTORS_MAX = 100_000
FILE_NAME = "tracker.sqlite"
LAST = "\U0010ffff"
"""Comes after every other character."""

logger = logging.getLogger(__name__)


class Documents:
    """One SQLite file below `directory`, which is created. Thread-safe. Raises P2PDistError when
    the file cannot be used at the start."""

    def __init__(self, directory: Path, *, bytes_max: int = BYTES_MAX) -> None:
        self._bytes_max = bytes_max
        self._path = directory / FILE_NAME
        self._lock = threading.Lock()
        try:
            make_private(self._path)
            self._database = sqlite3.connect(self._path, check_same_thread=False, isolation_level=None)
            self._database.execute("PRAGMA journal_mode=WAL")
            self._database.execute("PRAGMA synchronous=NORMAL")
            self._database.execute(
                "CREATE TABLE IF NOT EXISTS documents (digest TEXT PRIMARY KEY, data BLOB NOT NULL, used REAL NOT NULL)"
            )
            self._database.execute(
                "CREATE TABLE IF NOT EXISTS descriptors (name TEXT PRIMARY KEY, descriptor BLOB NOT NULL)"
            )
        except (sqlite3.Error, OSError) as error:
            if is_damage(error):
                raise StateDamaged(self._path, error) from error
            why = error.strerror if isinstance(error, OSError) else error
            raise P2PDistError(
                f"the tracker cannot keep its state in {directory}: {why}", remedy="Give another --state directory"
            ) from error

    def read(self, digest: Digest) -> bytes | None:
        """A document, verified; None when it is not here, damaged, or cannot be read."""
        try:
            with self._lock:
                return self._read(digest)
        except sqlite3.Error as error:
            logger.warning("%s cannot be read: %s", self._path, error)
            return None

    def write(self, digest: Digest, data: bytes) -> None:
        """Keep a verified document, if the disk takes it."""
        try:
            with self._lock:
                self._write(digest, data)
        except sqlite3.Error as error:
            logger.warning("%s cannot be written: %s", self._path, error)

    def note(self, named: Mapping[str, Descriptor], *, kind: str = "", kind_max: int = DESCRIPTORS_MAX) -> None:
        """Keep what each name means, if the disk takes it; with a `kind`, of the names that begin
        with it the latest `kind_max`."""
        rows = [(name, msgspec.json.encode(descriptor)) for name, descriptor in named.items()]
        try:
            with self._lock, self._database:
                self._database.execute("BEGIN")
                self._database.executemany("INSERT OR REPLACE INTO descriptors VALUES (?, ?)", rows)
                self._database.execute(
                    "DELETE FROM descriptors WHERE rowid IN (SELECT rowid FROM descriptors ORDER BY rowid "
                    "LIMIT MAX(0, (SELECT COUNT(*) FROM descriptors) - ?))",
                    (DESCRIPTORS_MAX,),
                )
                if kind:
                    of_kind = (kind, kind + LAST)
                    self._database.execute(
                        "DELETE FROM descriptors WHERE name BETWEEN ? AND ? AND rowid NOT IN (SELECT rowid FROM "
                        "descriptors WHERE name BETWEEN ? AND ? ORDER BY rowid DESC LIMIT ?)",
                        (*of_kind, *of_kind, kind_max),
                    )
        except sqlite3.Error as error:
            logger.warning("%s cannot be written: %s", self._path, error)

    def recall(self, name: str) -> Descriptor | None:
        """What a name meant last; None when it is not here or cannot be read."""
        try:
            with self._lock:
                row = self._database.execute("SELECT descriptor FROM descriptors WHERE name = ?", (name,)).fetchone()
            return msgspec.json.decode(row[0], type=Descriptor) if row is not None else None
        except (sqlite3.Error, TypeError, *UNDECODABLE) as error:
            logger.warning("%s cannot be read: %s", self._path, error)
            return None

    def close(self) -> None:
        with self._lock:
            self._database.close()

    def _read(self, digest: Digest) -> bytes | None:
        row = self._database.execute("SELECT data FROM documents WHERE digest = ?", (digest,)).fetchone()
        if row is None:
            return None
        data = row[0]
        if not isinstance(data, bytes) or digest_of(data) != digest:
            self._database.execute("DELETE FROM documents WHERE digest = ?", (digest,))
            return None
        self._database.execute("UPDATE documents SET used = ? WHERE digest = ?", (time.time(), digest))
        return data

    def _write(self, digest: Digest, data: bytes) -> None:
        self._database.execute("INSERT OR REPLACE INTO documents VALUES (?, ?, ?)", (digest, data, time.time()))
        total = self._database.execute("SELECT COALESCE(SUM(LENGTH(data)), 0) FROM documents").fetchone()[0]
        while total > self._bytes_max:
            oldest = self._database.execute(
                "SELECT digest, LENGTH(data) FROM documents ORDER BY used LIMIT 1"
            ).fetchone()
            self._database.execute("DELETE FROM documents WHERE digest = ?", (oldest[0],))
            total -= oldest[1]
