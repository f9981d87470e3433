"""The files of one blob: its content, and the bitmap that a partial one of several pieces has.

    partial/<hex>.data, .have   content, of its full length from the beginning, and bitmap
    partial/<hex>.hashes        the hashes of its pieces, as long as it has no piece list
    blobs/sha256/<hex>          content of a complete blob, read-only

Index, content and bitmap change in such an order that recovery completes what was begun, wherever
a kill cuts it off: it believes a bitmap before the index, and `complete` removes the bitmap last.

Two locks. A disk may hang at any call, and a call that hangs keeps `disk`. Under `lock` nothing
waits for the disk, so the event loop may take it. A thread takes `disk` before `lock`.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from dataclasses import dataclass
from uuid import UUID

from p2pdist.model.digest import Digest
from p2pdist.model.pieces import PieceLayout, PieceList, PieceSet
from p2pdist.store.blobs.bitmap import BitmapFile, has_bitmap
from p2pdist.store.blobs.hashes import HashesFile, StoredHash
from p2pdist.store.disk import allocate, failures
from p2pdist.store.index import Index
from p2pdist.store.layout import Paths


@dataclass(frozen=True, slots=True)
class BlobContext:
    """What the blobs of one store share."""

    paths: Paths
    index: Index
    boot: UUID
    """The running boot of the machine."""
    load: Callable[[Digest], PieceList]
    """Reads a piece list; raises Corrupt."""
    sync: Callable[[Digest, Digest], None]
    """Brings a complete blob, named with its piece list, to the disk in the background."""
    keep: Callable[[PieceList], Digest]
    """Stores a piece list, under the store's lock, and returns its digest."""
    in_memory: bool = False
    """Whether the store is on tmpfs: no call waits for a disk."""


class BlobFiles:
    """Every method but `fileno` and `close_content` expects the caller to hold `disk`; methods
    raise OSError."""

    __slots__ = (
        "_context",
        "_digest",
        "_layout",
        "bitmap",
        "disk",
        "fd",
        "hashed",
        "hashes",
        "inode",
        "lock",
        "marked",
        "path",
        "unsettled",
        "writable",
    )

    def __init__(
        self, context: BlobContext, digest: Digest, layout: PieceLayout, *, complete: bool, hashed: bool = False
    ) -> None:
        self._context, self._digest, self._layout = context, digest, layout
        self.disk = threading.RLock()
        """Held around every call that may wait for the disk."""
        self.lock = threading.Lock()
        """Guards `fd`, and the holds of the blob."""
        self.fd = -1
        """Descriptor of the content, -1 while it is closed."""
        self.inode = 0
        """Of the content once it is complete, 0 while that is not known."""
        self.bitmap: BitmapFile | None = None
        """The bitmap while it is open: from the first change of a piece until `close_bitmap`."""
        self.marked = has_bitmap(layout)
        self.hashes: HashesFile | None = None
        """The hashes of pieces while their file is open, as the bitmap is."""
        self.hashed = hashed
        """Whether the blob has such a file, instead of a piece list."""
        self.writable = not complete
        """Whether the content is that of a partial blob; `complete` and `reopen` change it."""
        self.unsettled = False
        """Whether the blob lost pieces and is still called complete: the disk took no change."""
        self.path = (context.paths.complete if complete else context.paths.data)(digest)
        """The content; changes with `writable`."""

    @property
    def opened(self) -> bool:
        """Whether the content is open, and stays so while the blob is held."""
        return self.fd >= 0

    @property
    def count(self) -> int:
        """How many files the blob has."""
        return 1 + self.writable * (self.marked + self.hashed)

    def create(self, have: PieceSet) -> None:
        """Create the files of a new partial blob, the bitmap first, with their space reserved."""
        with self.disk:
            if self.marked:
                self._create_bitmap(have)
            if self.hashed:
                self.hashes = HashesFile.create(self._context.paths.hashes(self._digest), self._layout.count)
            self.fd = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o644)
            allocate(self.fd, self._layout.size)

    def fileno(self) -> int:
        """A descriptor of the content; opens the file if need be, and then waits for the disk.
        Raises P2PDistError."""
        with self.disk:
            if self.fd < 0:
                with failures(self.path):
                    opened = os.open(self.path, (os.O_RDWR if self.writable else os.O_RDONLY) | os.O_CLOEXEC)
                with self.lock:
                    self.fd = opened
            return self.fd

    def mark(self, have: PieceSet, piece: int, held: bool) -> None:
        """Set or clear the bit of a piece of a partial blob; `have` holds the other bits of its
        byte."""
        if self.marked:
            (self.bitmap or self._open_bitmap()).store(have, piece, held)

    def note(self, piece: int, stored: StoredHash) -> None:
        """Write the hash of a piece that is about to be marked."""
        if self.hashes is None:
            self.hashes = HashesFile(self._context.paths.hashes(self._digest))
        self.hashes.store(piece, stored)

    def complete(self) -> None:
        """Make the content that of a complete blob, in index and on disk; `remove_bitmap` comes
        after it."""
        context = self._context
        context.index.set_complete(self._digest, complete=True, boot=str(context.boot))
        with failures(self.path):
            self.path.chmod(0o444)
            self.path = self.path.rename(context.paths.complete(self._digest))
            self.inode = self.path.stat().st_ino
            self.writable = False

    def reopen(self, have: PieceSet) -> None:
        """Make the content of a complete blob that of a partial one again. An open descriptor keeps
        its number, from which a thread may be sending."""
        context, self.unsettled = self._context, True
        if self.marked:  # first: recovery believes it before the index
            self._create_bitmap(have)
        context.index.set_complete(self._digest, complete=False, boot=str(context.boot))
        self.path.chmod(0o644)
        content = os.open(self.path, os.O_RDWR | os.O_CLOEXEC)
        try:
            self.path = self.path.rename(context.paths.data(self._digest))
        except OSError:
            os.close(content)
            raise
        self.writable = True
        with self.lock:
            if self.fd < 0:
                self.fd = content
            else:
                os.dup2(content, self.fd, inheritable=False)
                os.close(content)
        self.unsettled = False

    def confirm(self) -> None:
        """Bring index and bitmap in line with a complete content."""
        self._context.index.set_complete(self._digest, complete=True, boot=str(self._context.boot))
        self.remove_bitmap()

    def stand(self, have: PieceSet) -> bool:
        """Whether content and hashes of a partial blob are where they belong: somebody may have
        removed them, and what is written then is lost. A bitmap that is missing is written anew."""
        paths = self._context.paths
        try:
            content = os.lstat(self.path)
            if self.hashed:
                os.lstat(paths.hashes(self._digest))
        except FileNotFoundError:
            return False
        with self.lock:  # the last one that holds the blob closes the file, from any thread
            opened = os.dup(self.fd) if self.fd >= 0 else -1
        if opened >= 0:
            try:
                if not os.path.samestat(content, os.fstat(opened)):
                    return False
            finally:
                os.close(opened)
        if self.marked and not paths.bitmap(self._digest).exists():
            self.close_bitmap()
            self.rewrite_bitmap(have)
        return True

    def rewrite_bitmap(self, have: PieceSet) -> None:
        """Write the bitmap anew: the new boot id must never stand above bits of another boot."""
        if self.marked:
            BitmapFile.create(self._context.paths.bitmap(self._digest), have, self._context.boot).close()

    def flush(self) -> None:
        """Bring content and bitmap to the disk and mark the bitmap clean, if it is open: its bits
        are then trusted after a restart of the machine, too. Where the disk does not take them they
        are trusted no more: the kernel says that once."""
        if self.bitmap is not None:
            try:
                os.fdatasync(self.fileno())
                if self.hashes is not None:
                    self.hashes.flush()
            except OSError:
                self.bitmap.distrust()
                raise
            self.bitmap.stamp(self._context.boot, clean=True)

    def close_content(self) -> None:
        """Close the content; the caller holds `lock`, and nothing holds the blob."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1

    def close_bitmap(self) -> None:
        """Close the bitmap, and the file of hashes. Idempotent."""
        if self.bitmap is not None:
            self.bitmap.close()
            self.bitmap = None
        if self.hashes is not None:
            self.hashes.close()
            self.hashes = None

    def remove_bitmap(self) -> None:
        """Close and remove the bitmap, and the file of hashes. Idempotent."""
        self.close_bitmap()
        if self.marked:
            self._context.paths.bitmap(self._digest).unlink(missing_ok=True)
        if self.hashed:
            self._context.paths.hashes(self._digest).unlink(missing_ok=True)
            self.hashed = False

    def _create_bitmap(self, have: PieceSet) -> None:
        self.close_bitmap()  # of an attempt that failed later
        self.bitmap = BitmapFile.create(self._context.paths.bitmap(self._digest), have, self._context.boot)

    def _open_bitmap(self) -> BitmapFile:
        bitmap = BitmapFile(self._context.paths.bitmap(self._digest), self._layout.count)
        try:  # a bitmap left clean says that all its bits can be trusted, which the next one could not be
            bitmap.stamp(self._context.boot, clean=False)
        except OSError:
            bitmap.close()
            raise
        self.bitmap = bitmap
        return bitmap
