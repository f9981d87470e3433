"""Small documents (manifests, configs, piece lists) kept in SQLite, so that a restarted tracker need not read the origin again.

Least recently used ones go when the total passes BYTES_MAX. Everything read back is checked against its digest by the caller's rule that
nothing is trusted before it verified: `read` does it.
"""

from __future__ import annotations

import sqlite3
import time
from pathlib import Path

from p2pdist.model.digest import Digest, digest_of
from p2pdist.model.errors import P2PDistError

BYTES_MAX = 1 << 30
FILE_NAME = "tracker.sqlite"


class Documents:
    """One SQLite file below `directory`, which is created. Raises P2PDistError when the file cannot be used."""

    def __init__(self, directory: Path, *, bytes_max: int = BYTES_MAX) -> None:
        self._bytes_max = bytes_max
        self._path = directory / FILE_NAME
        try:
            directory.mkdir(parents=True, exist_ok=True)
            self._database = sqlite3.connect(self._path, check_same_thread=False, isolation_level=None)
            self._database.execute("PRAGMA journal_mode=WAL")
            self._database.execute("PRAGMA synchronous=NORMAL")
            self._database.execute(
                "CREATE TABLE IF NOT EXISTS documents (digest TEXT PRIMARY KEY, data BLOB NOT NULL, used REAL NOT NULL)"
            )
        except (sqlite3.Error, OSError) as error:
            raise P2PDistError(
                f"the tracker cannot keep its state in {directory}: {error}", remedy="Give another --state directory"
            ) from error

    def read(self, digest: Digest) -> bytes | None:
        """A document, verified; None when it is not here or damaged."""
        row = self._database.execute("SELECT data FROM documents WHERE digest = ?", (digest,)).fetchone()
        if row is None:
            return None
        data = bytes(row[0])
        if digest_of(data) != digest:
            self._database.execute("DELETE FROM documents WHERE digest = ?", (digest,))
            return None
        self._database.execute("UPDATE documents SET used = ? WHERE digest = ?", (time.time(), digest))
        return data

    def write(self, digest: Digest, data: bytes) -> None:
        """Keep a verified document."""
        self._database.execute("INSERT OR REPLACE INTO documents VALUES (?, ?, ?)", (digest, data, time.time()))
        total = self._database.execute("SELECT COALESCE(SUM(LENGTH(data)), 0) FROM documents").fetchone()[0]
        while total > self._bytes_max:
            oldest = self._database.execute(
                "SELECT digest, LENGTH(data) FROM documents ORDER BY used LIMIT 1"
            ).fetchone()
            self._database.execute("DELETE FROM documents WHERE digest = ?", (oldest[0],))
            total -= oldest[1]

    def close(self) -> None:
        self._database.close()
