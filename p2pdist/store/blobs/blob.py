"""One blob in a store, partial or complete: its pieces, and the holds that keep it.

Invariants: a piece enters `have` after its bytes, verified, were written. A complete blob has every
piece in `have`. `have` is one object for the blob's whole life; any thread reads it, and a thread
that holds `BlobFiles.disk` changes it. A blob that is held is neither evicted nor removed. The
event loop may call hold(), release(), and fileno() of a file that is open: these take
`BlobFiles.lock` alone, under which nothing waits for the disk.

Pieces that an earlier process marked are read again before a piece is added to them or the blob
becomes complete (`recheck`): a bitmap, or bytes, that changed meanwhile would make wrong content
complete. Until then they are sent to peers, which verify what they receive.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

from p2pdist.model.digest import Digest
from p2pdist.model.errors import Conflict, Corrupt, NotFound, UsageError
from p2pdist.model.pieces import PieceLayout, PieceList, PieceSet
from p2pdist.store.blobs.audit import sha256_of, wrong_pieces, wrong_pieces_in_threads
from p2pdist.store.blobs.files import BlobContext, BlobFiles
from p2pdist.store.blobs.placement import Copy, place
from p2pdist.store.disk import failure, failures, pwrite_all
from p2pdist.store.index import Entry

READ_BYTES_MAX = 64 << 20
"""More than this is not read in one call."""

_Bytes = TypeVar("_Bytes", bytes, memoryview)


class Blob:
    """Thread-safe. Made by the store only. Every method raises NotFound once the blob was removed,
    and P2PDistError when the disk fails."""

    def __init__(
        self, context: BlobContext, entry: Entry, have: PieceSet, *, complete: bool, pieces: PieceList | None = None
    ) -> None:
        self.digest = entry.digest
        self.layout = PieceLayout(entry.size, entry.piece_size)
        self.size = entry.size
        """In bytes, of the whole content."""
        self.pieces_digest = entry.pieces_digest
        self.have = have
        """The pieces that have verified."""
        self.complete = complete
        """Whether it is read-only and has every piece; finish() and dropped pieces change it."""
        self.last_used = entry.last_used
        """In seconds since the epoch; hold() and release() set it."""
        self.in_memory = context.in_memory
        """Whether no write waits for a disk, which may hang: only then the event loop writes."""
        self.files = BlobFiles(context, entry.digest, self.layout, complete=complete)
        self._context = context
        self._pieces = pieces
        self._lock = self.files.lock
        self._holds = 0
        self._gone = ""
        """Why the blob can no longer be used; "" while it can."""
        self._unread: threading.Lock | None = None
        """Held while pieces of an earlier process are read again; None when there are none."""

    def __repr__(self) -> str:
        return f"<Blob {self.digest} {len(self.have)}/{self.layout.count}{' complete' if self.complete else ''}>"

    @property
    def pieces(self) -> PieceList:
        """The piece list; raises Corrupt when the store has lost it."""
        if self._pieces is None:
            self._pieces = self._context.load(self.pieces_digest)
        return self._pieces

    @property
    def path(self) -> Path:
        """The file with the content; changes in finish()."""
        return self.files.path

    # -- holding

    @property
    def in_use(self) -> bool:
        """Whether the blob is held."""
        return self._holds > 0

    def hold(self) -> None:
        """Keep the blob from eviction and removal until release(); holds add up. Raises NotFound
        when it is gone already."""
        with self._lock:
            if self._gone:
                raise NotFound(f"{self.digest} {self._gone}")
            self._holds += 1
            self.last_used = time.time()

    def release(self) -> None:
        """End one hold."""
        with self._lock:
            assert self._holds > 0, "release without hold"
            self._holds -= 1
            self.last_used = time.time()
            if self._holds == 0 and self.files.bitmap is None:
                self.files.close_content()

    @contextmanager
    def held(self) -> Iterator[Blob]:
        """Hold the blob within a `with` block."""
        self.hold()
        try:
            yield self
        finally:
            self.release()

    def fileno(self) -> int:
        """A descriptor of the content, for sendfile and pread. Only while the blob is held; it then
        stays valid, also across finish(). Waits for the disk unless `files.opened`."""
        with self._lock:
            assert self._holds > 0, "fileno() needs a hold"
            fd = self.files.fd
            if fd >= 0:
                return fd
        return self.files.fileno()

    # -- pieces

    def write(self, piece: int, data: bytes | bytearray | memoryview) -> bool:
        """Verify `data` as piece number `piece`, write it and mark it; the buffer must not change
        meanwhile.

        False means wrong bytes, and nothing was written. A piece that is held already is True
        without a look at `data`. Raises DiskFull, and UsageError for a piece that does not exist.
        """
        _require_piece(self, piece)
        if piece in self.have:
            return True
        self.hold()
        try:
            if not self.pieces.verify(piece, data):
                return False
            if piece in self.have:
                return True
            pwrite_all(self.fileno(), data, self.layout.offset(piece))
            self._mark(piece)
        except OSError as error:
            needed = min(self.size, (self.have.count - len(self.have)) * self.layout.piece_size)
            raise failure(error, self.path, needed=needed) from error
        finally:
            self.release()
        return True

    def import_piece(self, piece: int) -> bool:
        """Verify the bytes that another writer (BitTorrent) has written where `piece` belongs, and
        mark the piece if they are right.

        False: other bytes lie there. The other writer must be done with the piece, and nothing else
        may write into the blob meanwhile.
        """
        _require_piece(self, piece)
        if piece in self.have:
            return True
        with self.held(), failures(self.path):
            data = os.pread(self.fileno(), self.layout.length(piece), self.layout.offset(piece))
            if not self.pieces.verify(piece, data):
                return False
            self._mark(piece)
        return True

    def _mark(self, piece: int) -> None:
        """Note that the bytes of a piece are in place and verified. Raises OSError."""
        files = self.files
        with files.disk:
            if self._gone:
                raise NotFound(f"{self.digest} {self._gone}")
            if piece not in self.have:
                files.mark(self.have, piece, True)
                self.have.add(piece)

    def holds(self, start: int, length: int) -> bool:
        """Whether every piece of a range within the blob is held."""
        return self.complete or all(piece in self.have for piece in self.layout.covering(start, start + length))

    def read_range(self, start: int, length: int) -> bytes:
        """`length` bytes from `start`, at most READ_BYTES_MAX; raises NotFound unless every piece
        in it is held, UsageError for a range outside the blob. The pieces were verified when
        written, not again now."""
        return self._read(start, length, lambda fd: os.pread(fd, length, start))

    def read_into(self, start: int, buffer: memoryview) -> None:
        """Fill `buffer`, which the caller can use again, with the bytes from `start`; raises what
        read_range raises."""
        self._read(start, len(buffer), lambda fd: buffer[: os.preadv(fd, [buffer], start)])

    def _read(self, start: int, length: int, read: Callable[[int], _Bytes]) -> _Bytes:
        if start < 0 or length < 0 or length > READ_BYTES_MAX or start + length > self.size:
            raise UsageError(f"bytes {start} to {start + length} of {self.size} cannot be read at once")
        with self.held():
            for piece in self.layout.covering(start, start + length):
                if piece not in self.have:
                    raise NotFound(f"piece {piece} of {self.digest} is not held")
            with failures(self.path):
                data = read(self.fileno())
        if len(data) != length:
            raise Corrupt(f"the stored file {self.path} is shorter than it was", remedy="Run p2pdist verify")
        return data

    def finish(self) -> None:
        """Make the blob complete: every piece is held. Idempotent; raises Conflict when pieces are
        missing."""
        files = self.files
        with files.disk:
            if self.complete:
                return
            if not self.have.complete:
                missing = self.have.count - len(self.have)
                raise Conflict(f"{self.digest} is not complete: {missing} of {self.have.count} pieces are missing")
            if self._gone:
                raise NotFound(f"{self.digest} {self._gone}")
            files.complete()
            self.complete = True
            with failures(self.path):
                files.remove_bitmap()
            with self._lock:
                if self._holds == 0:
                    files.close_content()
        self._context.sync(self.digest, self.pieces_digest)

    # -- checking and copying

    def verify(self, *, drop: bool = False) -> list[int]:
        """Read every held piece; returns those whose bytes on disk are wrong. `drop` takes them out
        of `have`; a complete blob that loses pieces becomes partial again."""
        with self.held():
            wrong = wrong_pieces(self.fileno(), self.layout, list(self.have), lambda: self.pieces)
            if drop:
                self.drop(wrong)
        return wrong

    def recheck(self) -> list[int]:
        """Read the pieces that an earlier process marked, unless that was done, and drop those
        whose bytes are wrong; returns these."""
        unread = self._unread
        if unread is None:
            return []
        with unread:
            if self._unread is None:  # another thread was at it
                return []
            with self.held():
                wrong = wrong_pieces_in_threads(self.fileno(), self.layout, list(self.have), lambda: self.pieces)
                self.drop(wrong)
            self._unread = None
        return wrong

    def drop(self, wrong: list[int]) -> None:
        """Take pieces out of `have`; a complete blob that loses some becomes partial again."""
        if not wrong:
            return
        files = self.files
        with files.disk, failures(self.path):
            for piece in wrong:
                if not self.complete:
                    files.mark(self.have, piece, False)
                self.have.discard(piece)
            if self.complete:
                files.reopen(self.have)
                self.complete = False

    def give(self, output: Path) -> str:
        """Place a copy of a complete blob at `output`, atomically, and return the method (see
        placement.place, which also says what is raised). The copy is never a link to the store's
        own file, which root could write to through it. Raises Conflict for a path in the store."""
        _require_complete(self)
        _require_outside(output, self._context.paths.root)
        with self.held():
            return place(self.fileno(), self.size, output)

    def begin_copy(self, output: Path) -> Copy | None:
        """A copy that the caller writes while the pieces arrive; None where give() does better.
        Raises what give() raises."""
        _require_outside(output, self._context.paths.root)
        with self.held():
            return Copy.begin(self.fileno(), self.size, output)

    # -- for the store

    def reconcile(self, *, trusted: bool) -> None:
        """At opening, before others have the blob: bring `have`, index and files in line. Unless
        `trusted`, every piece of `have` is verified first. Raises OSError."""
        files = self.files
        if not trusted:
            for piece in self.verify():
                self.have.discard(piece)
        elif not self.complete and len(self.have):
            self._unread = threading.Lock()
            if self.have.complete:
                self.recheck()
        with files.disk:
            if self.complete and not self.have.complete:
                files.reopen(self.have)
                self.complete = False
            elif self.complete:
                files.confirm()
                self._context.sync(self.digest, self.pieces_digest)
            elif not trusted:
                files.rewrite_bitmap(self.have)
        if not self.complete and self.have.complete:
            self.finish()

    def retire(self) -> None:
        """Close the files for removal; raises Conflict when the blob is in use."""
        with self._lock:
            if self._holds:
                raise Conflict(f"{self.digest} is in use", remedy="Wait until pulls and mounts of it have ended")
            self._gone = "was removed from the store; pull it again"
        with self.files.disk:
            self.files.close_bitmap()
            with self._lock:
                self.files.close_content()

    def close(self) -> None:
        """Close the files at the end of the store. A partial blob is synchronised and marked clean,
        so that it is trusted after a restart of the machine too. Raises OSError."""
        files = self.files
        with files.disk:
            with self._lock:
                self._gone = "cannot be used: the store is closed"
            try:
                files.flush()
            finally:
                files.close_bitmap()
                with self._lock:
                    # A thread that holds the blob may be using the number, which must not come to
                    # mean another file.
                    if self._holds == 0:
                        files.close_content()


def content_digest(blob: Blob) -> Digest:
    """The SHA-256 of the content of a complete blob, in the form of a digest: its name, unless the
    manifest names another content."""
    _require_complete(blob)
    with blob.held(), failures(blob.path):
        return sha256_of(blob.fileno())


def _require_piece(blob: Blob, piece: int) -> None:
    if not 0 <= piece < blob.layout.count:
        raise UsageError(f"{blob.digest} has no piece {piece}: it has {blob.layout.count}")


def _require_complete(blob: Blob) -> None:
    if not blob.complete:
        raise Conflict(f"{blob.digest} is not complete: {len(blob.have)} of {blob.have.count} pieces are held")


def _require_outside(output: Path, root: Path) -> None:
    if output.parent.resolve().is_relative_to(root.resolve()):
        raise Conflict(f"{output} is in the agent's store", remedy="Name a file elsewhere")
