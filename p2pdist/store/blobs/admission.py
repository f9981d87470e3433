"""Taking blobs into a store: what is there of a blob already, whether it can be gone on with, and
making a new partial blob.

A blob is named by its SHA-256, and cut and verified by a piece list. Two lists of one blob may
differ: packages of different makers name it. And a list may describe another content than the
digest does. So a blob that is begun by one list is gone on with by that list alone; a complete one
stays for every list once its SHA-256 was compared.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Collection

from p2pdist.model.digest import EMPTY_DIGEST, Digest, parse_digest
from p2pdist.model.errors import Corrupt, DiskFull, NotFound, UsageError
from p2pdist.model.pieces import (
    PIECE_SIZE_MAX,
    PIECES_LIMIT,
    PieceLayout,
    PieceList,
    PieceSet,
    encoded_size,
)
from p2pdist.model.vouched_list import vouched_layout
from p2pdist.store.blobs.blob import Blob, content_digest
from p2pdist.store.blobs.documents import Documents
from p2pdist.store.blobs.files import BlobContext
from p2pdist.store.blobs.hashes import VOUCHED
from p2pdist.store.disk import failures
from p2pdist.store.index import Entry

FILES_A_BLOB = 2
"""Contents, and a bitmap until they are complete."""

logger = logging.getLogger(__name__)


class Admission:
    """Thread-safe; methods raise P2PDistError when the disk fails. `lock` is the store's and guards
    `blobs`, the store's own mapping. `room` makes room for so many bytes and files, after the
    failure of an attempt to make these if there was one, or raises DiskFull, and returns what it
    evicted; `discard` removes a blob or raises Conflict when it is in use; both are called under
    the lock. `begun` is called after a blob was made."""

    def __init__(
        self,
        context: BlobContext,
        lock: threading.RLock,
        blobs: dict[Digest, Blob],
        documents: Documents,
        *,
        room: Callable[[int, int, DiskFull | None], Collection[Digest]],
        discard: Callable[[Blob], None],
        begun: Callable[[], None],
    ) -> None:
        self._context, self._lock, self._blobs, self._documents = context, lock, blobs, documents
        self._room, self._discard, self._begun = room, discard, begun

    def begin(self, digest: Digest, pieces: PieceList) -> Blob:
        """The blob, a new partial one if there was none; not yet held. What an earlier process left
        of it is read again first.

        A blob that came by another piece list stays if it is complete and its SHA-256 is its name
        (this reads it all); otherwise it is begun anew, or Conflict when it is in use. Raises
        DiskFull when neither the disk nor the capacity has room after eviction.
        """

        def usable(found: Blob) -> bool:
            return found.pieces_digest == pieces.digest or (found.complete and self._is_whole(found))

        return self._begin(digest, pieces.layout, pieces, usable)

    def begin_vouched(self, digest: Digest, size: int) -> Blob:
        """The blob of `size` bytes, of which nobody has made a piece list: complete; or partial and
        vouched for; or partial with a piece list of which this store knows that it describes what
        the digest names. Not yet held. What an earlier process left of it is read again first.

        A complete blob whose SHA-256 was never compared is read once. What is not what its name
        says is begun anew, or Conflict when it is in use. Raises DiskFull, UsageError for a size
        that the blob cannot have, and Corrupt for another one than that of the blob which is here.
        """
        if not 0 <= size <= PIECES_LIMIT * PIECE_SIZE_MAX or (size == 0) != (digest == EMPTY_DIGEST):
            raise UsageError(f"no blob has {size} bytes")

        def usable(found: Blob) -> bool:
            if found.size != size and self._is_whole(found):
                raise Corrupt(f"{digest} has {found.size} bytes, and not {size}", remedy="Push the image again")
            return found.size == size and (found.vouched is not None or self._is_whole(found))

        return self._begin(digest, vouched_layout(size), None, usable)

    def held(self, begin: Callable[[], Blob]) -> Blob:
        """The blob that `begin` gives, held for the caller to release."""
        try:
            blob = begin()
            blob.hold()
        except NotFound:
            # Under the lock nothing else can be begun. Only a complete blob of another piece list
            # that came in between is read within it.
            with self._lock:
                blob = begin()
                blob.hold()
        return blob

    def _begin(
        self, digest: Digest, layout: PieceLayout, pieces: PieceList | None, usable: Callable[[Blob], bool]
    ) -> Blob:
        parse_digest(digest)
        while True:
            found = self._blobs.get(digest)
            lost = found is not None and (bool(found.gone) or _has_lost_files(found))
            if found is not None and not lost and usable(found):
                if bad := found.recheck():
                    logger.warning(
                        "%s: %d of its pieces are not as they were verified and are dropped", digest, len(bad)
                    )
                return found
            with self._lock:
                if self._blobs.get(digest) is not found:
                    continue  # another thread was faster
                if found is not None:
                    why = "has lost its files" if lost else "was stored by another piece list"
                    why = "could not be removed" if found.gone else why
                    logger.warning("%s %s and is begun anew", digest, why)
                    self._discard(found)
                return self._create(digest, layout, pieces)

    def _is_whole(self, blob: Blob) -> bool:
        """Whether a blob is, or can become, nothing else than what its digest names. Reads a
        complete one whose SHA-256 was never compared."""
        if not blob.whole and blob.complete and content_digest(blob) == blob.digest:
            self._context.index.add_whole(blob.digest, blob.pieces_digest)
            blob.whole = True
        return blob.whole

    def _create(self, digest: Digest, layout: PieceLayout, pieces: PieceList | None) -> Blob:
        tried = False
        while True:
            self._room(layout.size + encoded_size(layout), FILES_A_BLOB, None)
            try:
                return self._reserve(digest, layout, pieces)
            except DiskFull as full:
                # A disk may give less than it said, or something else was faster: ask it again.
                if not self._room(layout.size, FILES_A_BLOB, full) and tried:
                    raise
            tried = True  # garbage may have gone

    def _reserve(self, digest: Digest, layout: PieceLayout, pieces: PieceList | None) -> Blob:
        now = time.time()
        pieces_digest = self._documents.put([pieces.encode()])[0] if pieces is not None else VOUCHED
        entry = Entry(digest, layout.size, layout.piece_size, pieces_digest, False, False, "", now, now)
        blob = Blob(
            self._context,
            entry,
            PieceSet(layout.count),
            complete=False,
            pieces=pieces,
            vouched={} if pieces is None else None,
        )
        try:
            self._context.index.add(entry)
            with failures(self._context.paths.partial, needed=layout.size):
                blob.files.create(blob.have)
        except BaseException:
            self._discard(blob)
            raise
        self._blobs[digest] = blob
        self._begun()
        return blob


def _has_lost_files(blob: Blob) -> bool:
    """Whether files of a partial blob that nothing uses were removed; one that is used is looked at
    when it is begun the next time."""
    if blob.complete or blob.in_use:  # and a disk that hangs may keep the lock
        return False
    with blob.files.disk, failures(blob.path):
        return not (blob.complete or blob.in_use or blob.files.stand(blob.have))
