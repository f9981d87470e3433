"""One blob in a store, partial or complete.

Invariants: a piece enters `have` after its bytes, verified, were written; a complete blob has every
piece in `have`; `have` is one object for the blob's whole life, read by anyone and changed under
the blob's disk lock. A blob that is held is neither evicted nor removed. A disk may hang at any
call, and what hangs keeps the disk lock. So hold(), release(), and fileno() of a file that is open,
which the event loop calls, take the other lock only, and under that nothing waits for the disk.
Order: disk lock, then the other.

A blob of one piece has no bitmap on disk: it has everything or nothing, and after a crash a look at
its content tells.

Pieces that an earlier process marked are read again before anything is added to them or the blob
becomes complete (`recheck`): a bitmap, or bytes, that changed while nobody looked would make wrong
content complete. Until then only peers get them, who verify what they receive.
"""

from __future__ import annotations

import hashlib
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar
from uuid import UUID

from p2pdist.model.digest import Digest
from p2pdist.model.errors import Conflict, Corrupt, NotFound, UsageError
from p2pdist.model.pieces import PieceLayout, PieceList, PieceSet
from p2pdist.store.blobs.bitmap import BitmapFile
from p2pdist.store.blobs.placement import Copy, place
from p2pdist.store.disk import allocate, failure, failures, pwrite_all
from p2pdist.store.index import Entry, Index
from p2pdist.store.layout import Paths

READ_BYTES_MAX = 64 << 20
"""More than this is not read in one call."""

_STEP = 4 << 20
_RECHECK_THREADS = min(4, os.cpu_count() or 1)
_Bytes = TypeVar("_Bytes", bytes, memoryview)


@dataclass(frozen=True, slots=True)
class BlobContext:
    """What the blobs of one store share. `load` reads a piece list (raises Corrupt), `sync` is
    told of blobs that became complete; `in_memory` says whether the store is on no disk, so that no
    call waits for one."""

    paths: Paths
    index: Index
    boot: UUID
    load: Callable[[Digest], PieceList]
    sync: Callable[[Blob], None]
    in_memory: bool = False


class Blob:
    """Thread-safe. Made by the store only. Every method raises NotFound once the blob was removed,
    and P2PDistError when the disk fails."""

    def __init__(
        self, context: BlobContext, entry: Entry, have: PieceSet, *, complete: bool, pieces: PieceList | None = None
    ) -> None:
        self.digest = entry.digest
        self.layout = PieceLayout(entry.size, entry.piece_size)
        self.pieces_digest = entry.pieces_digest
        self.have = have
        self.complete = complete
        self.last_used = entry.last_used
        self._context = context
        self._pieces = pieces
        self._disk = threading.RLock()
        self._lock = threading.Lock()
        self._holds = 0
        self._gone = ""
        self._found: tuple[bool, Path] | None = None
        self._fd = -1
        self._bitmap: BitmapFile | None = None
        self._unread: threading.Lock | None = None
        """Held while pieces that an earlier process marked are read again; None when there are
        none."""

    def __repr__(self) -> str:
        return f"<Blob {self.digest} {len(self.have)}/{self.layout.count}{' complete' if self.complete else ''}>"

    @property
    def size(self) -> int:
        return self.layout.size

    @property
    def has_bitmap(self) -> bool:
        """Whether, as long as the blob is partial, a bitmap on disk says which pieces it has."""
        return self.layout.count > 1

    @property
    def in_memory(self) -> bool:
        """Whether a piece can be written without waiting for a disk, which may hang: only then the
        event loop may."""
        return self._context.in_memory

    @property
    def pieces(self) -> PieceList:
        """The piece list; raises Corrupt when the store has lost it."""
        if self._pieces is None:
            self._pieces = self._context.load(self.pieces_digest)
        return self._pieces

    @property
    def path(self) -> Path:
        """The file with the content; changes in finish()."""
        complete, found, paths = self.complete, self._found, self._context.paths
        if found is None or found[0] != complete:  # kept: to make one takes as long as to verify a small piece
            found = self._found = complete, (paths.complete if complete else paths.data)(self.digest)
        return found[1]

    # -- holding

    @property
    def in_use(self) -> bool:
        return self._holds > 0

    def hold(self) -> None:
        """Keep the blob from eviction and removal until release(); holds add up. Raises NotFound
        when it is gone already."""
        with self._lock:
            self._require_present()
            self._holds += 1
            self.last_used = time.time()

    def release(self) -> None:
        """End one hold."""
        with self._lock:
            assert self._holds > 0, "release without hold"
            self._holds -= 1
            self.last_used = time.time()
            if self._holds == 0 and self._bitmap is None:
                self._close_data()

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
        stays valid, also across finish(). Waits for the disk unless `opened`."""
        with self._lock:
            assert self._holds > 0, "fileno() needs a hold"
            if self._fd >= 0:
                return self._fd
        with self._disk:
            return self._data()

    @property
    def opened(self) -> bool:
        """Whether the file is open, and stays so while the blob is held."""
        return self._fd >= 0

    # -- pieces

    def write(self, piece: int, data: bytes | bytearray | memoryview) -> bool:
        """Verify `data` as piece number `piece`, write it and mark it; the buffer must not change
        meanwhile.

        False means wrong bytes, and nothing was written. A piece that is held already is True
        without a look at `data`. Raises DiskFull, and UsageError for a piece that does not exist.
        """
        self._check(piece)
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
        """Verify what another writer (BitTorrent) has left in the place of `piece`, and mark it if
        right.

        False: other bytes lie there. The writer must not touch the piece any more, and nothing else
        may write into the blob meanwhile.
        """
        self._check(piece)
        if piece in self.have:
            return True
        with self.held(), failures(self.path):
            data = os.pread(self.fileno(), self.layout.length(piece), self.layout.offset(piece))
            if not self.pieces.verify(piece, data):
                return False
            self._mark(piece)
        return True

    def holds(self, start: int, length: int) -> bool:
        """Whether every piece of a range within the blob is held."""
        return self.complete or all(piece in self.have for piece in self.layout.covering(start, start + length))

    def read(self, piece: int) -> bytes:
        """The bytes of a held piece; raises NotFound when it is not held."""
        self._check(piece)
        return self.read_range(self.layout.offset(piece), self.layout.length(piece))

    def read_range(self, start: int, length: int) -> bytes:
        """`length` bytes from `start`, at most READ_BYTES_MAX; raises NotFound unless every piece
        in it is held, UsageError for a range outside the blob. The pieces were verified when
        written, not again now."""
        return self._read(start, length, lambda fd: os.pread(fd, length, start))

    def read_into(self, start: int, buffer: memoryview) -> None:
        """As read_range, as many bytes as `buffer` takes: for who reads much, and uses it again."""
        self._read(start, len(buffer), lambda fd: buffer[: os.preadv(fd, [buffer], start)])

    def finish(self) -> None:
        """Make the blob complete: every piece is held. Idempotent; raises Conflict when pieces are
        missing."""
        with self._disk:
            if self.complete:
                return
            if not self.have.complete:
                missing = self.have.count - len(self.have)
                raise Conflict(f"{self.digest} is not complete: {missing} of {self.have.count} pieces are missing")
            self._require_present()
            context, data = self._context, self.path
            # Index, rename, bitmap: recovery completes what was begun wherever this is cut off.
            context.index.set_complete(self.digest, complete=True, boot=str(context.boot))
            with failures(data):
                data.chmod(0o444)
                data.rename(context.paths.complete(self.digest))
                self.complete = True
                self._remove_bitmap()
            with self._lock:
                if self._holds == 0:
                    self._close_data()
        context.sync(self)

    # -- checking and giving

    def verify(self, *, drop: bool = False) -> list[int]:
        """Read every held piece; returns those whose bytes on disk are wrong. `drop` takes them out
        of `have`; a complete blob that loses pieces becomes partial again."""
        with self.held():
            bad = self._wrong(list(self.have))
            if drop and bad:
                self._drop(bad)
        return bad

    def recheck(self) -> list[int]:
        """Read the pieces that an earlier process marked, unless that was done, and drop those
        whose bytes are wrong; returns these."""
        unread = self._unread
        if unread is None:
            return []
        with unread:
            if self._unread is None:  # another thread was at it
                return []
            pieces = list(self.have)
            share = -(-len(pieces) // _RECHECK_THREADS) or 1
            with self.held(), ThreadPoolExecutor(_RECHECK_THREADS, thread_name_prefix="store-recheck") as pool:
                parts = [pieces[at : at + share] for at in range(0, len(pieces), share)]
                bad = [piece for found in pool.map(self._wrong, parts) for piece in found]
                if bad:
                    self._drop(bad)
            self._unread = None
        return bad

    def _wrong(self, pieces: Sequence[int]) -> list[int]:
        """Those of these pieces whose bytes on disk are wrong. Only while the blob is held."""
        bad: list[int] = []
        buffer = memoryview(bytearray(min(self.layout.piece_size, self.layout.size)))
        fd = self.fileno()
        for piece in pieces:
            view = buffer[: self.layout.length(piece)]
            try:
                count = os.preadv(fd, [view], self.layout.offset(piece))
            except OSError:
                count = -1
            if count != len(view) or not self.pieces.verify(piece, view):
                bad.append(piece)
        return bad

    def sha256(self) -> Digest:
        """The SHA-256 of the content of a complete blob, in the form of a digest; its name, unless
        whoever pushed it lied."""
        self._require_complete()
        state = hashlib.sha256()
        buffer = memoryview(bytearray(_STEP))
        with self.held(), failures(self.path):
            offset = 0
            while count := os.preadv(self.fileno(), [buffer], offset):
                state.update(buffer[:count])
                offset += count
        return Digest(f"sha256:{state.hexdigest()}")

    def give(self, output: Path) -> str:
        """Place a copy of a complete blob at `output`, atomically; see placement.place for the ways
        and errors. It is never a link to the store's own file, which root could write to through
        it. Raises Conflict for a place in the store."""
        self._require_complete()
        self._require_outside(output)
        with self.held():
            return place(self.fileno(), self.size, output)

    def begin_copy(self, output: Path) -> Copy | None:
        """A copy that is written while the pieces arrive, by whoever reads them; None where give()
        does better. Raises as give()."""
        self._require_outside(output)
        with self.held():
            return Copy.begin(self.fileno(), self.size, output)

    def _require_outside(self, output: Path) -> None:
        root = self._context.paths.root.resolve()
        if output.parent.resolve().is_relative_to(root):
            raise Conflict(f"{output} is in the agent's store", remedy="Name a file elsewhere")

    # -- for the store

    def open_new(self) -> None:
        """Create the files of a new partial blob, bitmap first; raises OSError. The space is
        reserved by the store."""
        with self._disk:
            paths = self._context.paths
            if self.has_bitmap:
                self._bitmap = BitmapFile.create(paths.bitmap(self.digest), self.have, self._context.boot)
            self._fd = os.open(paths.data(self.digest), os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o644)
            allocate(self._fd, self.size)

    def reconcile(self, *, trusted: bool) -> None:
        """At opening, before anyone else has the blob: bring `have`, index and files in line,
        wherever they were left. Unless `trusted`, every piece of `have` is verified first. Raises
        OSError."""
        if not trusted:
            for piece in self.verify():
                self.have.discard(piece)
        elif not self.complete and len(self.have):
            self._unread = threading.Lock()
            if self.have.complete:
                self.recheck()
        with self._disk:
            if self.complete and not self.have.complete:
                self._reopen_as_partial()
            elif self.complete:
                self._context.index.set_complete(self.digest, complete=True, boot=str(self._context.boot))
                self._remove_bitmap()
                self._context.sync(self)
            elif self.has_bitmap and not trusted:
                # Written anew, not amended: the new boot id must never stand above bits of the old
                # one.
                BitmapFile.create(self._context.paths.bitmap(self.digest), self.have, self._context.boot).close()
        if not self.complete and self.have.complete:
            self.finish()

    def retire(self) -> None:
        """Close the files for removal; raises Conflict when the blob is in use."""
        with self._lock:
            if self._holds:
                raise Conflict(f"{self.digest} is in use", remedy="Wait until pulls and mounts of it have ended")
            self._gone = "was removed from the store; pull it again"
        with self._disk:
            self._close_bitmap()
            with self._lock:
                self._close_data()

    def close(self) -> None:
        """Close the files at the end of the store. A partial blob is synchronised and marked clean,
        so that it is trusted after a restart of the machine too. Raises OSError."""
        with self._disk:
            with self._lock:
                self._gone = "cannot be used: the store is closed"
            try:
                if self._bitmap is not None:
                    os.fdatasync(self._data())
                    self._bitmap.stamp(self._context.boot, clean=True)
            finally:
                self._close_bitmap()
                with self._lock:
                    if (
                        self._holds == 0
                    ):  # else a thread may be using the number, which must not come to mean another file
                        self._close_data()

    # -- inner workings; those below are called with the disk lock held, but for the checks

    def _check(self, piece: int) -> None:
        if not 0 <= piece < self.layout.count:
            raise UsageError(f"{self.digest} has no piece {piece}: it has {self.layout.count}")

    def _read(self, start: int, length: int, read: Callable[[int], _Bytes]) -> _Bytes:  # called without the lock
        if start < 0 or length < 0 or length > READ_BYTES_MAX or start + length > self.layout.size:
            raise UsageError(f"bytes {start} to {start + length} of {self.layout.size} cannot be read at once")
        with self.held():
            for piece in self.layout.covering(start, start + length):
                if piece not in self.have:
                    raise NotFound(f"piece {piece} of {self.digest} is not held")
            with failures(self.path):
                data = read(self.fileno())
        if len(data) != length:
            raise Corrupt(f"the stored file {self.path} is shorter than it was", remedy="Run p2pdist verify")
        return data

    def _mark(self, piece: int) -> None:
        """Its bytes are in place and verified. Called without a lock; raises OSError."""
        with self._disk:
            self._require_present()
            if piece not in self.have:
                if self.has_bitmap:
                    self._open_bitmap().store(self.have, piece, True)
                self.have.add(piece)

    def _require_present(self) -> None:
        if self._gone:
            raise NotFound(f"{self.digest} {self._gone}")

    def _require_complete(self) -> None:
        if not self.complete:
            raise Conflict(f"{self.digest} is not complete: {len(self.have)} of {self.have.count} pieces are held")

    def _data(self) -> int:
        if self._fd < 0:
            with failures(path := self.path):
                opened = os.open(path, (os.O_RDONLY if self.complete else os.O_RDWR) | os.O_CLOEXEC)
            with self._lock:
                self._fd = opened
        return self._fd

    def _open_bitmap(self) -> BitmapFile:
        if self._bitmap is None:
            bitmap = BitmapFile(self._context.paths.bitmap(self.digest), self.have.count)
            try:  # a file that was left clean says that all its bits can be trusted, which the next one could not be
                bitmap.stamp(self._context.boot, clean=False)
            except OSError:
                bitmap.close()
                raise
            self._bitmap = bitmap
        return self._bitmap

    def _drop(self, bad: list[int]) -> None:
        with self._disk, failures(self.path):
            for piece in bad:
                if self.has_bitmap and not self.complete:
                    self._open_bitmap().store(self.have, piece, False)
                self.have.discard(piece)
            if self.complete:
                self._reopen_as_partial()

    def _reopen_as_partial(self) -> None:
        context, old = self._context, self.path
        if self.has_bitmap:  # first: recovery believes it before the index
            self._bitmap = BitmapFile.create(context.paths.bitmap(self.digest), self.have, context.boot)
        context.index.set_complete(self.digest, complete=False, boot=str(context.boot))
        old.chmod(0o644)
        writable = os.open(old, os.O_RDWR | os.O_CLOEXEC)
        old.rename(context.paths.data(self.digest))
        self.complete = False
        with self._lock:
            # The number stays the same: somebody may be sending from it.
            if self._fd < 0:
                self._fd = writable
            else:
                os.dup2(writable, self._fd, inheritable=False)
                os.close(writable)

    def _close_data(self) -> None:  # with both locks, or the other one alone
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _remove_bitmap(self) -> None:
        self._close_bitmap()
        if self.has_bitmap:
            self._context.paths.bitmap(self.digest).unlink(missing_ok=True)

    def _close_bitmap(self) -> None:
        if self._bitmap is not None:
            self._bitmap.close()
            self._bitmap = None
