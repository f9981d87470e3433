"""The index of a store: its blobs, pins, packages, objects and trees, and documents of few bytes.

SQLite in WAL mode with synchronous NORMAL: what was committed survives a killed process; a lost
machine may lose the last commits but the index stays consistent, and recovery reconciles it with
the files. Nothing is written here per piece.
"""

from __future__ import annotations

import os
import sqlite3
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from p2pdist.model.digest import Digest
from p2pdist.model.errors import Corrupt, DiskFull, P2PDistError
from p2pdist.model.tree import HASH_SIZE
from p2pdist.store.disk import INDEX_BYTES, Reserve
from p2pdist.store.layout import FILE_MODE

_VERSION = 4
_OPENED_VERSION = _VERSION + 1
"""Of a store with something that was decrypted: earlier releases would give it to other hosts."""

FAILED = "!"
"""Before a boot it makes one that no machine has: earlier releases then verify, too."""

_SCHEMA = """
CREATE TABLE IF NOT EXISTS blobs (
    digest TEXT PRIMARY KEY, size INTEGER NOT NULL, piece_size INTEGER NOT NULL, pieces_digest TEXT NOT NULL,
    complete INTEGER NOT NULL, durable INTEGER NOT NULL, boot TEXT NOT NULL, last_used REAL NOT NULL, added REAL NOT NULL
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS pins (digest TEXT NOT NULL, owner TEXT NOT NULL, PRIMARY KEY (digest, owner)) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS packages (
    reference TEXT PRIMARY KEY, manifest_digest TEXT NOT NULL, last_used REAL NOT NULL
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS smalls (digest TEXT PRIMARY KEY, stored REAL NOT NULL, data BLOB NOT NULL);
CREATE TABLE IF NOT EXISTS objects (
    content BLOB PRIMARY KEY, size INTEGER NOT NULL, batch INTEGER NOT NULL
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS chunk_lists (content BLOB PRIMARY KEY, chunks BLOB NOT NULL) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS objects_state (
    one INTEGER PRIMARY KEY CHECK (one = 1), boot TEXT NOT NULL, clean INTEGER NOT NULL, durable INTEGER NOT NULL
);
CREATE TABLE IF NOT EXISTS trees (
    root TEXT PRIMARY KEY, catalogs TEXT NOT NULL, packs TEXT NOT NULL, complete INTEGER NOT NULL, last_used REAL NOT NULL,
    contents BLOB NOT NULL, pages BLOB NOT NULL DEFAULT x''
);
CREATE TABLE IF NOT EXISTS tree_pages (name BLOB PRIMARY KEY, contents BLOB NOT NULL);
CREATE TABLE IF NOT EXISTS wholes (digest TEXT NOT NULL, pieces_digest TEXT NOT NULL, PRIMARY KEY (digest, pieces_digest))
WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS images (
    name TEXT NOT NULL, target TEXT NOT NULL, digest TEXT NOT NULL, media_type TEXT NOT NULL, last_used REAL NOT NULL,
    PRIMARY KEY (name, target)
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS tags (reference TEXT PRIMARY KEY, digest TEXT NOT NULL, told REAL NOT NULL) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS notes (name TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS opened (digest TEXT PRIMARY KEY, source TEXT NOT NULL, manifest INTEGER NOT NULL) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS opened_names (manifest TEXT NOT NULL, name TEXT NOT NULL, PRIMARY KEY (manifest, name)) WITHOUT ROWID;
"""

_LOST = """
CREATE TABLE IF NOT EXISTS lost (digest TEXT PRIMARY KEY) WITHOUT ROWID;
CREATE TRIGGER IF NOT EXISTS blob_lost AFTER UPDATE OF complete ON blobs WHEN OLD.complete > NEW.complete
    BEGIN INSERT OR IGNORE INTO lost VALUES (OLD.digest); END;
CREATE TRIGGER IF NOT EXISTS blob_whole AFTER UPDATE OF complete ON blobs WHEN NEW.complete
    BEGIN DELETE FROM lost WHERE digest=NEW.digest; END;
CREATE TRIGGER IF NOT EXISTS blob_gone AFTER DELETE ON blobs BEGIN DELETE FROM lost WHERE digest=OLD.digest; END;
CREATE TRIGGER IF NOT EXISTS tree_lost AFTER UPDATE OF complete ON trees WHEN OLD.complete > NEW.complete
    BEGIN INSERT OR IGNORE INTO lost VALUES (OLD.root); END;
CREATE TRIGGER IF NOT EXISTS tree_whole AFTER INSERT ON trees WHEN NEW.complete
    BEGIN DELETE FROM lost WHERE digest=NEW.root; END;
CREATE TRIGGER IF NOT EXISTS tree_gone AFTER DELETE ON trees BEGIN DELETE FROM lost WHERE digest=OLD.root; END;
"""
"""What lost something and is not complete again. By triggers, so that it is written with the loss
itself: an agent that is killed before the repair finds it."""

_MOVED_NAMES = """
BEGIN;
INSERT OR IGNORE INTO opened_names SELECT source, substr(digest, length(source) + 2) FROM opened WHERE manifest=2;
DELETE FROM opened WHERE manifest=2;
COMMIT;
"""
"""Earlier releases kept these names among what was opened, as "MANIFEST NAME"."""


@dataclass(frozen=True, slots=True)
class Entry:
    """A blob in the index."""

    digest: Digest
    size: int
    piece_size: int
    pieces_digest: Digest
    complete: bool
    durable: bool
    """Whether it has reached the disk since it became complete."""
    boot: str
    """The boot id under which it became complete."""
    last_used: float
    """In seconds since the epoch, as `added`."""
    added: float


@dataclass(frozen=True, slots=True)
class PackageRecord:
    """A package that was pulled here."""

    reference: str
    manifest_digest: Digest
    last_used: float


@dataclass(frozen=True, slots=True)
class TagRecord:
    """What a tag was said to name."""

    reference: str
    digest: Digest
    told: float
    """When a tracker or the origin said so last, in seconds since the epoch."""


@dataclass(frozen=True, slots=True)
class ImageRecord:
    """What a tag or digest of an image was found to name."""

    name: str
    """Upstream and repository."""
    target: str
    digest: Digest
    media_type: str
    last_used: float
    """In seconds since the epoch."""


@dataclass(frozen=True, slots=True)
class ObjectsState:
    """What the index says of all objects."""

    boot: str
    """The boot under which the store was last opened; behind FAILED where the disk failed to take
    objects since."""
    clean: bool
    """Whether rows and files agreed when it was left."""
    durable: int
    """The last batch of which all objects have reached the disk."""


@dataclass(frozen=True, slots=True)
class TreeRecord:
    """A tree in the index."""

    root: Digest
    catalogs: tuple[Digest, ...]
    packs: tuple[Digest, ...]
    """All packs that the catalogs list."""
    complete: bool
    """Whether every content had an object when it was last looked at."""
    last_used: float


class Index:
    """The rows of the index; `reserve` keeps room for removing some. Thread-safe. Methods raise
    DiskFull, Corrupt (the file is damaged) or P2PDistError."""

    def __init__(self, path: Path) -> None:
        self._path, self.reserve = path, Reserve(path.parent)
        self._lock = threading.Lock()
        with self._failures():
            with suppress(OSError):  # SQLite says what is wrong; it gives its other files the mode of this one
                os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, FILE_MODE))
            self._database = _connect(path)
            try:
                self._prepare()
            except BaseException:
                self._database.close()
                raise

    def _prepare(self) -> None:
        self._database.execute("PRAGMA journal_mode=WAL")
        self._database.execute("PRAGMA synchronous=NORMAL")
        version = self._database.execute("PRAGMA user_version").fetchone()[0]
        if version not in range(_OPENED_VERSION + 1):  # 1 had no documents, 2 no trees, 3 no pages of trees
            raise P2PDistError(
                f"the store {self._path.parent} was made by another release (index version {version})",
                remedy="Use that release, or another store directory",
            )
        if version == _OPENED_VERSION:
            _check_opened(self._database, self._path)
        self._database.executescript(_SCHEMA + _LOST)
        if not any(row[1] == "pages" for row in self._database.execute("PRAGMA table_info(trees)")):
            self._database.execute("ALTER TABLE trees ADD COLUMN pages BLOB NOT NULL DEFAULT x''")
        self._database.executescript(_MOVED_NAMES)
        opened = self._database.execute("SELECT EXISTS (SELECT 1 FROM opened)").fetchone()[0]
        self._database.execute(f"PRAGMA user_version={_OPENED_VERSION if opened else _VERSION}")

    def close(self) -> None:
        with self._failures(), self._lock:
            self._database.close()

    def checkpoint(self) -> None:
        """Flush what was committed to the disk, without keeping writers waiting."""
        with self._failures(), closing(_connect(self._path)) as second:
            second.execute("PRAGMA wal_checkpoint(PASSIVE)")

    # -- blobs

    def entries(self) -> list[Entry]:
        """All blobs."""
        rows = self._query("SELECT * FROM blobs")
        return [
            Entry(row[0], row[1], row[2], row[3], bool(row[4]), bool(row[5]), row[6], row[7], row[8]) for row in rows
        ]

    def add(self, entry: Entry) -> None:
        """Write or replace a blob."""
        values = (entry.digest, entry.size, entry.piece_size, entry.pieces_digest, entry.complete, entry.durable)
        self._run(
            "INSERT OR REPLACE INTO blobs VALUES (?,?,?,?,?,?,?,?,?)",
            (*values, entry.boot, entry.last_used, entry.added),
        )

    def set_complete(self, digest: Digest, *, complete: bool, boot: str) -> None:
        """Note that a blob became complete, or no longer is; it is not durable for now."""
        self._run("UPDATE blobs SET complete=?, durable=0, boot=? WHERE digest=?", (complete, boot, digest))

    def set_durable(self, digests: list[Digest]) -> None:
        """Note that complete blobs have reached the disk."""
        self._run_all("UPDATE blobs SET durable=1 WHERE digest=? AND complete=1", [(digest,) for digest in digests])

    def set_pieces(self, digest: Digest, pieces_digest: Digest) -> None:
        """Give a blob that had no piece list its own, which is whole."""
        with self._transaction():
            self._database.execute("UPDATE blobs SET pieces_digest=? WHERE digest=?", (pieces_digest, digest))
            self._database.execute("INSERT OR IGNORE INTO wholes VALUES (?,?)", (digest, pieces_digest))

    def wholes(self) -> set[tuple[Digest, Digest]]:
        """Blobs, each with a piece list that is whole: the SHA-256 of the content that the list
        describes is the digest of the blob."""
        return {(row[0], row[1]) for row in self._query("SELECT digest, pieces_digest FROM wholes")}

    def add_whole(self, digest: Digest, pieces_digest: Digest) -> None:
        """Note that the piece list of a blob is whole."""
        self._run("INSERT OR IGNORE INTO wholes VALUES (?,?)", (digest, pieces_digest))

    def distrust(self, digest: Digest) -> None:
        """Mark a blob for verification at the next opening."""
        self._run("UPDATE blobs SET durable=0, boot='' WHERE digest=?", (digest,))

    def touch(self, used: list[tuple[float, Digest]]) -> None:
        """Record when blobs were last used."""
        self._run_all("UPDATE blobs SET last_used=? WHERE digest=?", used)

    def delete(self, digest: Digest) -> None:
        with self._transaction():
            self._database.execute("DELETE FROM blobs WHERE digest=?", (digest,))
            self._database.execute("DELETE FROM wholes WHERE digest=?", (digest,))
            self._database.execute("DELETE FROM opened WHERE digest=?", (digest,))

    # -- pins and packages

    def pins(self) -> list[tuple[Digest, str]]:
        return [(row[0], row[1]) for row in self._query("SELECT digest, owner FROM pins")]

    def pin(self, digest: Digest, owner: str) -> None:
        self._run("INSERT OR IGNORE INTO pins VALUES (?,?)", (digest, owner))

    def unpin(self, owner: str, digest: Digest | None = None) -> None:
        self._run("DELETE FROM pins WHERE owner=? AND digest=ifnull(?, digest)", (owner, digest))

    def packages(self) -> list[PackageRecord]:
        return [PackageRecord(*row) for row in self._query("SELECT * FROM packages ORDER BY reference")]

    def record_package(self, record: PackageRecord) -> None:
        self._run(
            "INSERT OR REPLACE INTO packages VALUES (?,?,?)",
            (record.reference, record.manifest_digest, record.last_used),
        )

    def forget_package(self, reference: str) -> None:
        self._run("DELETE FROM packages WHERE reference=?", (reference,))

    def tags(self) -> list[TagRecord]:
        return [TagRecord(*row) for row in self._query("SELECT * FROM tags ORDER BY told")]

    def record_tag(self, record: TagRecord) -> None:
        self._run("INSERT OR REPLACE INTO tags VALUES (?,?,?)", (record.reference, record.digest, record.told))

    def forget_tags(self, references: Sequence[str]) -> None:
        self._run_all("DELETE FROM tags WHERE reference=?", [(reference,) for reference in references])

    def images(self) -> list[ImageRecord]:
        return [ImageRecord(*row) for row in self._query("SELECT * FROM images ORDER BY last_used")]

    def record_images(self, records: Sequence[ImageRecord]) -> None:
        rows = [(each.name, each.target, each.digest, each.media_type, each.last_used) for each in records]
        self._run_all("INSERT OR REPLACE INTO images VALUES (?,?,?,?,?)", rows)

    def forget_images(self, keys: Sequence[tuple[str, str]]) -> None:
        self._run_all("DELETE FROM images WHERE name=? AND target=?", keys)

    # -- documents

    def document_sizes(self) -> dict[Digest, int]:
        return {row[0]: row[1] for row in self._query("SELECT digest, LENGTH(data) FROM smalls")}

    def document(self, digest: Digest) -> bytes | None:
        """The data, unverified; None when there is none."""
        rows = self._query("SELECT data FROM smalls WHERE digest=?", (digest,))
        return bytes(rows[0][0]) if rows else None

    def put_documents(self, documents: dict[Digest, bytes]) -> None:
        now = time.time()
        rows = [(digest, now, data) for digest, data in documents.items()]
        self._run_all("INSERT OR REPLACE INTO smalls VALUES (?,?,?)", rows)

    def remove_document(self, digest: Digest) -> None:
        self._run("DELETE FROM smalls WHERE digest=?", (digest,))

    def old_documents(self, before: float) -> list[Digest]:
        """Documents that were stored before a time in seconds since the epoch."""
        return [row[0] for row in self._query("SELECT digest FROM smalls WHERE stored<?", (before,))]

    # -- objects

    def objects_state(self) -> ObjectsState | None:
        rows = self._query("SELECT boot, clean, durable FROM objects_state")
        return ObjectsState(rows[0][0], bool(rows[0][1]), rows[0][2]) if rows else None

    def set_objects_state(self, state: ObjectsState) -> None:
        self._run("INSERT OR REPLACE INTO objects_state VALUES (1,?,?,?)", (state.boot, state.clean, state.durable))

    def objects(self, *, after: int = -1) -> dict[bytes, int]:
        """Sizes by content of the objects of batches after one."""
        return dict(self._query("SELECT content, size FROM objects WHERE batch>?", (after,)))

    def last_batch(self) -> int:
        return self._query("SELECT COALESCE(MAX(batch), 0) FROM objects")[0][0]  # type: ignore[no-any-return]

    def add_objects(self, rows: Sequence[tuple[bytes, int, int]]) -> None:
        """Write objects: contents, sizes in bytes and batches."""
        self._run_all("INSERT OR REPLACE INTO objects VALUES (?,?,?)", rows)

    def remove_objects(self, contents: Sequence[bytes]) -> None:
        rows = [(content,) for content in contents]
        self._run_all("DELETE FROM chunk_lists WHERE content=?", rows)
        self._run_all("DELETE FROM objects WHERE content=?", rows)

    def add_chunk_list(self, content: bytes, chunks: bytes) -> None:
        self._run("INSERT OR REPLACE INTO chunk_lists VALUES (?,?)", (content, chunks))

    def chunk_lists(self) -> list[tuple[bytes, bytes]]:
        """Contents and the encoded chunk lists from which their objects were made."""
        return self._query("SELECT content, chunks FROM chunk_lists")

    # -- trees

    def trees(self) -> list[TreeRecord]:
        rows = self._query("SELECT root, catalogs, packs, complete, last_used FROM trees")
        return [TreeRecord(row[0], tuple(row[1].split()), tuple(row[2].split()), bool(row[3]), row[4]) for row in rows]

    def add_tree(self, record: TreeRecord, pages: Mapping[bytes, Iterable[bytes]]) -> None:
        """Write a tree. `pages` are the names of the contents of each of its pages, by the name of
        the page; all names have HASH_SIZE bytes. A page that another tree has is not written
        again."""
        values = (record.root, " ".join(record.catalogs), " ".join(record.packs), record.complete, record.last_used)
        with self._transaction():
            stored = {row[0] for row in self._database.execute("SELECT name FROM tree_pages")}
            new = ((name, b"".join(contents)) for name, contents in pages.items() if name not in stored)
            self._database.executemany("INSERT INTO tree_pages VALUES (?,?)", new)
            self._database.execute("INSERT OR REPLACE INTO trees VALUES (?,?,?,?,?,x'',?)", (*values, b"".join(pages)))

    def tree_contents(self, root: Digest) -> set[bytes]:
        """The names of all contents of a tree; none when there is no record of it."""
        names: set[bytes] = set()
        with self._failures(), self._lock:
            # A record of an earlier release has its contents in one piece.
            for contents, pages in self._database.execute("SELECT contents, pages FROM trees WHERE root=?", (root,)):
                names.update(_names(contents))
                for name in _names(pages):
                    page = self._database.execute("SELECT contents FROM tree_pages WHERE name=?", (name,)).fetchone()
                    if page is None:
                        raise sqlite3.DatabaseError(f"it lacks the page {name.hex()} of {root}")
                    names.update(_names(page[0]))
        return names

    def set_tree(self, root: Digest, *, complete: bool) -> None:
        self._run("UPDATE trees SET complete=? WHERE root=?", (complete, root))

    def touch_trees(self, used: list[tuple[float, Digest]]) -> None:
        self._run_all("UPDATE trees SET last_used=? WHERE root=?", used)

    def remove_tree(self, root: Digest) -> None:
        """Remove a tree with the pages that no other tree has."""
        with self._transaction():
            database = self._database
            gone = {
                name
                for row in database.execute("SELECT pages FROM trees WHERE root=?", (root,))
                for name in _names(row[0])
            }
            database.execute("DELETE FROM trees WHERE root=?", (root,))
            for row in database.execute("SELECT pages FROM trees"):
                gone.difference_update(_names(row[0]))
            database.executemany("DELETE FROM tree_pages WHERE name=?", [(name,) for name in gone])

    # -- notes

    def note(self, name: str) -> str | None:
        """What `set_note` wrote last, None where it wrote nothing."""
        rows = self._query("SELECT value FROM notes WHERE name=?", (name,))
        return str(rows[0][0]) if rows else None

    def set_note(self, name: str, value: str) -> None:
        self._run("INSERT OR REPLACE INTO notes VALUES (?,?)", (name, value))

    # -- inner workings

    def _run(self, statement: str, values: tuple[object, ...]) -> None:
        with self._failures(), self._lock:
            self._database.execute(statement, values)

    def _run_all(self, statement: str, rows: Sequence[tuple[object, ...]]) -> None:
        """Run a statement for each of `rows`, in one transaction."""
        with self._transaction():
            self._database.executemany(statement, rows)

    @contextmanager
    def _transaction(self) -> Iterator[None]:
        with self._failures(), self._lock:
            self._database.execute("BEGIN")
            try:
                yield
            except BaseException:
                self._database.execute("ROLLBACK")
                raise
            self._database.execute("COMMIT")

    def _query(self, statement: str, values: tuple[object, ...] = ()) -> list[Any]:
        with self._failures(), self._lock:
            return self._database.execute(statement, values).fetchall()

    @contextmanager
    def _failures(self) -> Iterator[None]:
        try:
            yield
        except sqlite3.DatabaseError as error:
            code = getattr(error, "sqlite_errorcode", 0)
            # SQLite calls want of room for its -wal and -shm files, or of quota, an I/O error.
            if code & 0xFF in {sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR}:
                with suppress(OSError):  # the directory is gone, or the disk fails: no room would help
                    space, refused = os.statvfs(self._path.parent), self.reserve.doubt()
                    if code == sqlite3.SQLITE_FULL or refused:
                        full = DiskFull.on(str(self._path.parent), space, needed=INDEX_BYTES, code=refused)
                        raise full from error
            if code in {sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB}:
                raise Corrupt(
                    f"the index {self._path} is damaged: {error}",
                    remedy="Move the store directory away; what it held will be fetched again",
                ) from error
            raise P2PDistError(f"the index {self._path} cannot be used: {error}", remedy="Check the disk") from error


def _connect(path: Path) -> sqlite3.Connection:
    """A connection to the index. The VFS keeps the index of the -wal file in memory that the
    connections of this process share, and other processes out: a -shm file is a shared mapping, and
    where the disk is full (btrfs writes each page to a new place) a write to one is SIGBUS."""
    return sqlite3.connect(
        f"{path.absolute().as_uri()}?vfs=unix-excl", uri=True, check_same_thread=False, isolation_level=None
    )


def _check_opened(database: sqlite3.Connection, path: Path) -> None:
    """Raises Corrupt where an index lost the table of what was opened."""
    if not database.execute("SELECT 1 FROM sqlite_master WHERE type='table' AND name='opened'").fetchone():
        raise Corrupt(
            f"the index {path} does not say any more what was decrypted, which no other host may get",
            remedy="Remove the store directory and pull again",
        )


def lost_digests(index: Index) -> list[Digest]:
    """The blobs and trees that were complete, lost something and are not complete again."""
    return [row[0] for row in index._query("SELECT digest FROM lost ORDER BY digest")]


def opened_rows(index: Index) -> list[tuple[Digest, Digest, int]]:
    """What was opened, from what, and 1 where a manifest is what is opened."""
    return index._query("SELECT digest, source, manifest FROM opened")


def add_opened(index: Index, rows: Sequence[tuple[Digest, Digest, int]]) -> None:
    """Write what is opened, as opened_rows gives it. From then on releases that would serve it
    refuse the store."""
    index._run(f"PRAGMA user_version={_OPENED_VERSION}", ())
    index._run_all("INSERT OR REPLACE INTO opened VALUES (?,?,?)", rows)


def opened_names(index: Index) -> list[tuple[Digest, str]]:
    """The names of packages by which the keys of each opened manifest were given to this host."""
    return index._query("SELECT manifest, name FROM opened_names")


def add_opened_name(index: Index, manifest: Digest, name: str) -> None:
    """Write a row of opened_names."""
    index._run("INSERT OR IGNORE INTO opened_names VALUES (?,?)", (manifest, name))


def remove_opened_names(index: Index, manifests: Sequence[Digest]) -> None:
    """Forget the names of opened manifests."""
    index._run_all("DELETE FROM opened_names WHERE manifest=?", [(manifest,) for manifest in manifests])


def remove_opened(index: Index, digests: Sequence[Digest]) -> None:
    """Forget that these were opened."""
    index._run_all("DELETE FROM opened WHERE digest=?", [(digest,) for digest in digests])


def _names(encoded: bytes) -> Iterator[bytes]:
    """The names of which `encoded` consists."""
    return (encoded[begin : begin + HASH_SIZE] for begin in range(0, len(encoded), HASH_SIZE))
