"""One blob in a store, partial or complete: its pieces, and the holds that keep it.

Invariants: a piece enters `have` after its bytes, verified, were written. A complete blob has every
piece in `have`. `have` is one object for the blob's whole life; any thread reads it, and a thread
that holds `BlobFiles.disk` changes it, or VouchedPieces under its lock as long as the blob is
vouched for. A blob that is held is neither evicted nor removed. The
event loop may call hold(), release(), and fileno() of a file that is open: these take
`BlobFiles.lock` alone, under which nothing waits for the disk.

Pieces that an earlier process marked are read again before a piece is added to them or the blob
becomes complete (`recheck`): a bitmap, or bytes, that changed meanwhile would make wrong content
complete.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from p2pdist.model.digest import Digest, hex_of
from p2pdist.model.errors import Conflict, Corrupt, NotFound, UsageError
from p2pdist.model.pieces import PieceLayout, PieceList, PieceSet
from p2pdist.store.blobs.audit import sha256_of, wrong_pieces, wrong_pieces_in_threads
from p2pdist.store.blobs.files import BlobContext, BlobFiles
from p2pdist.store.blobs.hashes import StoredHash
from p2pdist.store.blobs.placement import Copy, place
from p2pdist.store.blobs.vouched_pieces import HashWait, Unlisted, VouchedPieces
from p2pdist.store.disk import failure, failures, pwrite_all
from p2pdist.store.index import Entry

READ_BYTES_MAX = 64 << 20
"""More than this is not read in one call."""

_Bytes = TypeVar("_Bytes", bytes, memoryview)


class Blob:
    """Thread-safe. Made by the store only. Every method raises NotFound once the blob was removed,
    and P2PDistError when the disk fails."""

    def __init__(
        self,
        context: BlobContext,
        entry: Entry,
        have: PieceSet,
        *,
        complete: bool,
        pieces: PieceList | None = None,
        vouched: Mapping[int, StoredHash] | None = None,
        unread: bool = False,
    ) -> None:
        """`vouched` are the stored hashes of a blob without a piece list. `unread`: an earlier
        process marked the pieces of `have`."""
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
        self.files = BlobFiles(context, entry.digest, self.layout, complete=complete, hashed=vouched is not None)
        self._context = context
        self._pieces = pieces
        self.whole = False
        """Whether the SHA-256 of the content that the piece list describes is known to be the
        digest; the store writes it, and finish()."""
        self.vouched = VouchedPieces(self.layout, have, vouched) if vouched is not None else None
        """The list of a partial blob that has no piece list of its own; finish() ends it."""
        self._lock, self._holds = self.files.lock, 0
        self.gone = ""
        """Why the blob can no longer be used, also where its files could not be removed; "" while
        it can."""
        self._unread = threading.Lock() if unread else None
        """Held while pieces of an earlier process are read again; None when there are none."""

    def __repr__(self) -> str:
        return f"<Blob {self.digest} {len(self.have)}/{self.layout.count}{' complete' if self.complete else ''}>"

    @property
    def pieces(self) -> PieceList:
        """The piece list; raises Corrupt when the store has lost it. While the blob is vouched for,
        what is listed so far, which fits every piece that is held."""
        if (vouched := self.vouched) is not None:
            return vouched.provisional()
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
            if self.gone:
                raise NotFound(f"{self.digest} {self.gone}")
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

    def write(self, piece: int, data: bytes | bytearray | memoryview, wait: HashWait | None = None) -> bool:
        """Verify `data` as piece number `piece`, write it and mark it; the buffer must not change
        meanwhile. Where the blob is vouched for, this waits until the hash of the piece is listed,
        or `wait` is cancelled. False means wrong bytes, and nothing was written. A piece that is
        held already is True without a look at `data`. Raises DiskFull, Unlisted, and UsageError for
        a piece that does not exist."""
        _require_piece(self, piece)
        if piece in self.have:
            return True
        self.hold()
        try:
            digest, vouched = b"", self.vouched
            if vouched is not None:
                digest = vouched.match(piece, data, wait or HashWait())
            if not (digest if vouched is not None else self.pieces.verify(piece, data)):
                return False
            self._put(piece, data, digest)
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
            self._put(piece)
        return True

    def _put(self, piece: int, data: bytes | bytearray | memoryview | None = None, digest: bytes = b"") -> None:
        """Write the verified bytes of a piece, unless they are in place, and note that they are.
        A blob that is vouched for must know their hash. Raises OSError."""
        files, vouched = self.files, self.vouched
        if piece in self.have:
            return
        if vouched is None and data is not None:
            pwrite_all(self.fileno(), data, self.layout.offset(piece))
        with files.disk:
            if self.gone:
                raise NotFound(f"{self.digest} {self.gone}")
            if piece in self.have:
                return
            if vouched is None:
                files.mark(self.have, piece, True)
                self.have.add(piece)
                return
            assert data is not None and self.vouched is vouched, "a blob is completed while it is written to"
            _put_listed(self, vouched, piece, data, digest)

    def holds(self, start: int, length: int) -> bool:
        """Whether every piece of a range within the blob is held."""
        return self.complete or all(piece in self.have for piece in self.layout.covering(start, start + length))

    def read_range(self, start: int, length: int) -> bytes:
        """`length` bytes from `start`, at most READ_BYTES_MAX; raises NotFound unless every piece
        in it is held, UsageError for a range outside the blob. They were verified when written."""
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
        missing, and as long as the SHA-256 of a blob that is vouched for has not matched."""
        files = self.files
        proven = _proven_list(self)
        pieces_digest = self._context.keep(proven) if proven is not None else self.pieces_digest
        with files.disk:
            if self.complete:
                return
            if missing := self.have.count - len(self.have):
                raise Conflict(f"{self.digest} is not complete: {missing} of {self.have.count} pieces are missing")
            if self.gone:
                raise NotFound(f"{self.digest} {self.gone}")
            if proven is not None:
                _require_still(self, proven)
                self._context.index.set_pieces(self.digest, pieces_digest)
                self.pieces_digest, self._pieces, self.whole, self.vouched = pieces_digest, proven, True, None
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
            wrong = wrong_pieces(self.fileno(), self.layout, list(self.have), _hashes(self))
            return drop_if_wrong(self, wrong) if drop else wrong

    def recheck(self) -> list[int]:
        """Read the pieces that an earlier process marked, unless that was done, and drop those
        whose bytes are wrong; returns these."""
        if (unread := self._unread) is None:
            return []
        with unread:
            if self._unread is None:  # another thread was at it
                return []
            with self.held():
                wrong = wrong_pieces_in_threads(self.fileno(), self.layout, list(self.have), _hashes(self))
                self.drop(wrong)
            self._unread = None
        return wrong

    def drop(self, wrong: Sequence[int]) -> None:
        """Take pieces out of `have`; a complete blob that loses some becomes partial again."""
        if wrong:
            with self.files.disk, failures(self.path):
                _drop(self, wrong)

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

    def retire(self) -> None:
        """Close the files for removal; raises Conflict when the blob is in use."""
        with self._lock:
            if self._holds:
                raise Conflict(f"{self.digest} is in use", remedy="Wait until pulls and mounts of it have ended")
            self.gone = "was removed from the store; pull it again"
        with self.files.disk:
            self.files.close_bitmap()
            with self._lock:
                self.files.close_content()

    def close(self) -> None:
        """Close the files at the end of the store. A partial blob is synchronised and marked clean,
        so that it is trusted after a restart of the machine too. Raises OSError."""
        files, vouched = self.files, self.vouched
        if vouched is not None:
            vouched.close()
        with files.disk:
            with self._lock:
                self.gone = "cannot be used: the store is closed"
            try:
                files.flush()
            finally:
                files.close_bitmap()
                with self._lock:
                    # A thread that holds the blob may be using the number, which must not come to
                    # mean another file.
                    if self._holds == 0:
                        files.close_content()


@dataclass(frozen=True, slots=True)
class Comparison:
    """How the SHA-256 of a blob that is vouched for compares with its digest."""

    matches: bool
    lost: tuple[int, ...] = ()
    """Pieces whose bytes on disk were no longer what was stored, and that were dropped: without
    them nothing can be said."""


def vouch(blob: Blob, piece: int, data: bytes, *, prevail: bool = False) -> tuple[bytes, bool]:
    """Store a piece that this host has read from upstream, in a blob that is vouched for. Returns
    its hash, and whether it is stored: where the list has another hash it is not, unless `prevail`.
    Raises what Blob.write raises, and Conflict once the blob has a piece list."""
    _require_piece(blob, piece)
    vouched = require_vouched(blob)
    digest = vouched.hash(piece, data)
    listed = vouched.vouch(piece, digest, prevail=prevail)
    return digest, listed and store_vouched(blob, piece, data, digest)


def store_vouched(blob: Blob, piece: int, data: bytes, digest: bytes) -> bool:
    """Store a piece whose `digest` was listed; False when the list has another hash since. Raises
    what Blob.write raises."""
    with blob.held(), failures(blob.path, needed=len(data)):
        try:
            blob._put(piece, data, digest)
        except Unlisted:
            return False
    return True


def unmark(blob: Blob, lost: Sequence[int]) -> None:
    """Bring the bitmap in line after `VouchedPieces.put` has taken pieces out of `blob.have`. Waits
    for the disk."""
    with blob.files.disk, failures(blob.path):
        if not blob.complete:
            for piece in lost:
                blob.files.mark(blob.have, piece, piece in blob.have)


def check_whole(blob: Blob) -> Comparison:
    """Compare the SHA-256 of a blob that is vouched for, all of whose pieces are held. Where it
    differs, what is stored is compared with the list first: this host's own disk may be wrong.
    Raises Conflict while pieces are missing."""
    vouched = blob.vouched
    if vouched is None:
        return Comparison(blob.complete)
    with blob.held(), failures(blob.path):
        vouched.whole.follow(blob.fileno)
    if vouched.prove(hex_of(blob.digest)):
        return Comparison(True)
    lost = blob.verify(drop=True)
    if not lost and not blob.have.complete:
        raise Conflict(f"{blob.digest} has lost pieces meanwhile")
    return Comparison(False, tuple(lost))


def _put_listed(
    blob: Blob, vouched: VouchedPieces, piece: int, data: bytes | bytearray | memoryview, digest: bytes
) -> None:
    """Write and mark a piece whose hash is listed, unless the list changes meanwhile: Unlisted is
    raised then. The caller holds `files.disk`."""
    files = blob.files
    files.note(piece, vouched.admit(piece, digest))
    pwrite_all(blob.fileno(), data, blob.layout.offset(piece))
    files.mark(blob.have, piece, True)
    try:
        vouched.keep(piece, digest)
    except Unlisted:
        files.mark(blob.have, piece, False)
        raise


def drop_if_wrong(blob: Blob, pieces: Sequence[int]) -> list[int]:
    """Drop those of `pieces` that are held and still wrong; returns these. Since they were read,
    which may be long ago, others may have dropped them and brought them again."""
    if not pieces:
        return []
    # What is held is not written to, and under this lock nothing comes to be held.
    with blob.held(), blob.files.disk, failures(blob.path):
        held = [piece for piece in pieces if piece in blob.have]
        wrong = wrong_pieces(blob.fileno(), blob.layout, held, _hashes(blob))
        if wrong:
            _drop(blob, wrong)
    return wrong


def _drop(blob: Blob, wrong: Sequence[int]) -> None:
    """The caller holds `files.disk`. Raises OSError."""
    files = blob.files
    if blob.vouched is not None:
        blob.vouched.drop(wrong)
    for piece in wrong:
        if not blob.complete:
            files.mark(blob.have, piece, False)
        blob.have.discard(piece)
    if blob.complete:
        files.reopen(blob.have)
        blob.complete = False


def _hashes(blob: Blob) -> Callable[[], PieceList]:
    """The piece list, when it is needed; what is listed so far is put together once."""
    vouched = blob.vouched
    if vouched is None:
        return lambda: blob.pieces
    listed = vouched.provisional()
    return lambda: listed


def require_vouched(blob: Blob) -> VouchedPieces:
    """The list of a blob that is vouched for. Raises Conflict for any other blob."""
    if (vouched := blob.vouched) is None:
        raise Conflict(f"{blob.digest} is vouched for no more: it has a piece list")
    return vouched


def _proven_list(blob: Blob) -> PieceList | None:
    """The piece list that a blob becomes complete with, where it was vouched for. Raises Conflict
    as long as the SHA-256 of the whole has not matched."""
    vouched = blob.vouched
    if vouched is None:
        return None
    if not vouched.proven:
        raise Conflict(f"{blob.digest} is not complete: the SHA-256 of the whole has not matched yet")
    return vouched.provisional()


def _require_still(blob: Blob, proven: PieceList) -> None:
    """The list that `_proven_list` gave is still the one. Raises Conflict. The caller holds
    `files.disk`, so that no piece is dropped from here on."""
    if _proven_list(blob) != proven:
        raise Conflict(f"{blob.digest} has lost pieces, and got others, while it was completed")


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
