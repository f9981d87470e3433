"""The store: verified blobs in one directory, and the room that they take.

    lock                        flock of the one process that uses the store; holds its process id
    index.sqlite                blobs, pins, packages, most documents
    reserve                     room for the index to say what goes, on a disk that others filled
    blobs/sha256/<hex>          complete blobs, read-only
    partial/<hex>.data, .have   partial blobs and which of their pieces are verified
    partial/<hex>.hashes        the hashes of the pieces of one that has no piece list
    small/sha256/<hex>          larger manifests, configs, piece lists
    objects/<2 hex>/<62 hex>    contents of trees (objects/files.py)
    images/<hex>                metadata images of trees (trees/images.py)
    variants/<boot>/<hex>/      objects with another mode or time (trees/variants.py)

Sizes are counted as reserved: a partial blob counts in full from its beginning. When room is
needed, garbage goes first, which nothing names. After that the caller's Chooser (core/eviction)
decides what to evict, and the store carries it out.

Lock order: store, blob, index.
"""

from __future__ import annotations

import errno
import logging
import os
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from p2pdist.model.candidate import Candidate, Chooser, Share
from p2pdist.model.digest import Digest, parse_digest
from p2pdist.model.errors import Conflict, Corrupt, DiskFull, NotFound, P2PDistError
from p2pdist.model.manifest import Manifest, decode_manifest
from p2pdist.model.pieces import PieceList
from p2pdist.store.blobs.admission import Admission
from p2pdist.store.blobs.blob import Blob
from p2pdist.store.blobs.documents import Documents
from p2pdist.store.blobs.files import BlobContext
from p2pdist.store.blobs.recovery import recover
from p2pdist.store.disk import (
    Pulse,
    boot_id,
    failures,
    free_bytes,
    in_memory,
    largest_bytes,
    refusal,
    sync_filesystem,
    usable_bytes,
    usable_files,
)
from p2pdist.store.index import Index, lost_digests
from p2pdist.store.integrity import Integrity
from p2pdist.store.layout import Paths, lock_directory
from p2pdist.store.objects.files import Objects
from p2pdist.store.opened_records import OpenedRecords
from p2pdist.store.pins import ImageRecords, PackageRecords, Pins, TagRecords
from p2pdist.store.sync import BackgroundSync
from p2pdist.store.trees.inventory import TreeContext, Trees
from p2pdist.store.verification import Checked, verify

logger = logging.getLogger(__name__)

PARTIAL_IDLE_S = 3600.0
"""A partial blob that was not used for this long may be evicted like a complete one; so may one
that was used so much later than now, before the clock was set back."""

USE_SAVED_S = 60.0
"""Uses are kept in memory for so long: a crash costs some order of eviction, not a write per
use."""

QUOTA_STEPS = 16
"""In about so many steps room is made within a quota: after each the file system is flushed, which
waits for what others wrote to it."""

DOCUMENT_IDLE_S = 86400.0
"""A document that nothing refers to is removed at the first opening after this time."""


@dataclass(frozen=True, slots=True)
class Usage:
    """Bytes of a store. Partial blobs count as reserved, in full, and so do objects that a pull is
    about to make."""

    bytes_complete: int
    bytes_partial: int
    bytes_small: int
    capacity: int | None
    """None means: as much as the disk has."""
    disk_free: int
    bytes_objects: int = 0
    bytes_expected: int = 0
    """Of objects to come."""
    bytes_images: int = 0
    bytes_variants: int = 0

    @property
    def bytes_total(self) -> int:
        """All that counts against the capacity."""
        blobs = self.bytes_complete + self.bytes_partial + self.bytes_small
        return blobs + self.bytes_objects + self.bytes_expected + self.bytes_images + self.bytes_variants


@dataclass(frozen=True, slots=True)
class Stock:
    """What is in a store, as far as room is concerned."""

    root: Path
    capacity: int | None
    """In bytes; None means: as much as the disk has."""
    blobs: Mapping[Digest, Blob]
    """The store's own mapping, which changes."""
    documents: Documents
    objects: Objects
    trees: Trees
    pins: Pins
    opened: OpenedRecords
    discard: Callable[[Blob], None]
    """Removes a blob; raises Conflict when it is in use."""

    def usage(self) -> Usage:
        """The bytes of what there is."""
        sizes = {True: 0, False: 0}
        for blob in list(self.blobs.values()):
            sizes[blob.complete] += blob.size
        with failures(self.root):
            free = free_bytes(self.root)
        return Usage(
            sizes[True],
            sizes[False],
            self.documents.bytes_total,
            self.capacity,
            free,
            self.objects.bytes_total,
            self.objects.expected.bytes_total,
            self.trees.bytes_images(),
            self.trees.variants.bytes_total,
        )

    def bytes_ahead(self) -> int:
        """Bytes that partial blobs and expected objects will yet take from the disk; 0 for blobs
        where the filesystem reserved them."""
        ahead = self.objects.expected.bytes_total
        for blob in list(self.blobs.values()):
            if not blob.complete:
                path = blob.path
                with failures(path), suppress(FileNotFoundError):  # it may have become complete meanwhile
                    ahead += max(0, blob.size - path.stat().st_blocks * 512)
        return ahead

    def files_of(self, candidates: Sequence[Candidate]) -> int:
        """How many files go with those of them that may go."""
        may_go = [item for item in candidates if not item.pinned and not item.in_use]
        names = {item.digest for item in may_go}
        going = {item.digest for item in may_go if item.needed_by <= names}
        blobs = [blob for digest in going if (blob := self.blobs.get(digest)) is not None]
        lists = self.documents.files_of({blob.pieces_digest for blob in blobs})
        return sum(blob.files.count for blob in blobs) + lists + self.trees.files_of(going)

    def candidates(self) -> tuple[list[Candidate], Sequence[Share]]:
        """What might make room: blobs, and trees with their roots. See core/eviction. The caller
        holds the store's lock."""
        now = time.time()
        trees, shares = self.trees.candidates()
        roots, needed_by = {tree.digest for tree in trees}, self.trees.records.needed_by()
        redundant = self.trees.redundant_packs() | self.opened.redundant(self.trees.complete)
        awaited = self.trees.pulls.packs()
        blobs = [
            Candidate(
                blob.digest,
                blob.size,
                blob.last_used,
                pinned=blob.digest in self.pins,
                in_use=blob.in_use or blob.digest in awaited,
                redundant=blob.digest in redundant,
                needed_by=frozenset(needed_by.get(blob.digest, ())),
            )
            for blob in self.blobs.values()
            if blob.digest not in roots
            and (blob.complete or abs(now - blob.last_used) > PARTIAL_IDLE_S or blob.digest in redundant)
        ]
        return [*trees, *blobs], shares

    def evict(self, digest: Digest) -> bool:
        """Remove a blob or tree that was chosen to make room; False when it has been taken into use
        since."""
        assert digest not in self.pins, "what is pinned was chosen for eviction"
        gone = False
        with suppress(Conflict):
            if digest in self.trees.records:
                self.trees.remove(digest)
                gone = True
            blob = self.blobs.get(digest)
            if blob is not None and not self.trees.records.needing(digest):  # a tree that was held since stays
                self.discard(blob)
                gone = True
        return gone


class Room:
    """Makes room in one store; the caller holds the store's lock."""

    def __init__(self, stock: Stock, temporary: Path, choose: Chooser | None) -> None:
        """`temporary` is a directory of the store's filesystem for files that may go at any
        time."""
        self._root, self._temporary, self._stock, self._choose = stock.root, temporary, stock, choose
        self.evicted = 0
        """Blobs and trees that went since the store was opened."""

    def make(self, needed: int, files: int = 0, after: DiskFull | None = None) -> list[Digest]:
        """Evict what must go for `needed` more bytes and so many new files to fit; returns what
        went. `after`: how making them failed just now. Raises DiskFull when that is impossible.
        Then nothing went, unless the file system gave back less than it had seemed to hold."""
        if (short := self._short_of_files(files)) > 0:
            self._stock.trees.collect()
            if (short := self._short_of_files(files)) > self._stock.files_of(self._stock.candidates()[0]):
                raise self._without_inodes(needed)
        evicted = self._make_bytes(needed)
        if after is not None and after.details.get("short_of") == "quota":
            evicted += self._make_quota(needed)
        return [*evicted, *self._make_files(files, needed)] if short > 0 else evicted

    def _make_bytes(self, needed: int) -> list[Digest]:
        evicted: list[Digest] = []
        collected = False
        while (short := needed - self.free()) > 0:
            if not collected:
                collected = True
                if self._stock.trees.collect():
                    continue
            if evicted:
                # Some filesystems give space back late: look again before more has to go.
                with failures(self._root):
                    sync_filesystem(self._root)
                if (short := needed - self.free()) <= 0:
                    break
            candidates, shares = self._stock.candidates()
            chosen = self._choose(candidates, short, shares) if self._choose is not None else None
            went = [digest for digest in chosen or [] if self._stock.evict(digest)]
            for digest in went:
                logger.info("%s evicted to make room", digest)
            if not went:
                could = self._evictable(candidates, shares) if self._choose is not None else 0
                raise DiskFull(str(self._root), needed=needed, free=max(0, needed - short + could))
            evicted += went
            self.evicted += len(went)
        return evicted

    def _make_files(self, files: int, needed: int) -> list[Digest]:
        """What may go goes in its usual order until so many files fit: bytes do not tell of how
        many files something is."""
        candidates, shares = self._stock.candidates()
        everything = self._evictable(candidates, shares)
        chosen = self._choose(candidates, everything, shares) if self._choose is not None else None
        evicted: list[Digest] = []
        waiting = iter(chosen or [])
        while self._short_of_files(files) > 0:
            digest = next(waiting, None)
            if digest is None:
                raise self._without_inodes(needed)
            if self._stock.evict(digest):
                logger.info("%s evicted to make room for files", digest)
                evicted.append(digest)
                self.evicted += 1
        return evicted

    def _make_quota(self, needed: int) -> list[Digest]:
        """What may go goes in its usual order until the quota of this user has room for so many
        bytes, which only trying tells."""
        evicted: list[Digest] = []
        if self._is_over_quota(needed):
            self._stock.trees.collect()
        while self._is_over_quota(needed):
            candidates, shares = self._stock.candidates()
            evictable = self._evictable(candidates, shares)
            step = min(evictable, max(1, needed // QUOTA_STEPS))
            enough = evicted or evictable >= needed or not self._is_over_quota(needed - evictable)
            chosen = self._choose(candidates, step, shares) if self._choose is not None and enough else None
            went = [digest for digest in chosen or [] if self._stock.evict(digest)]
            if not went:
                raise DiskFull(str(self._root), needed=needed, free=0, short_of="quota")
            for digest in went:
                logger.info("%s evicted to make room within the quota", digest)
            evicted += went
            self.evicted += len(went)
        return evicted

    def _is_over_quota(self, needed: int) -> bool:
        with failures(self._root):
            sync_filesystem(self._root)  # some give space back late
            return refusal(self._temporary, needed) == errno.EDQUOT

    def _short_of_files(self, files: int) -> int:
        """How many of so many new files, and of those that pulls will make, do not fit."""
        with failures(self._root):
            left = usable_files(self._root, self._temporary)
        return 0 if left is None else max(0, files + len(self._stock.objects.expected) - left)

    def _without_inodes(self, needed: int) -> DiskFull:
        return DiskFull(str(self._root), needed=needed, free=max(0, self.free()), short_of="inodes")

    @staticmethod
    def _evictable(candidates: Sequence[Candidate], shares: Sequence[Share]) -> int:
        going = [item for item in candidates if not item.pinned and not item.in_use]
        names = {item.digest for item in going}
        sizes = [item.size for item in going if item.needed_by <= names]
        return sum(sizes) + sum(share.size for share in shares if share.owners <= names)

    def free(self) -> int:
        """Bytes that still fit; negative when over capacity."""
        with failures(self._root):
            room = usable_bytes(self._root) - self._stock.bytes_ahead()
        capacity = self._stock.capacity
        return room if capacity is None else min(room, capacity - self._stock.usage().bytes_total)


class BlobStore:
    """Blobs, documents, objects, trees, pins and package records of one directory. Thread-safe. All
    methods raise P2PDistError when the disk fails and UsageError for what is no digest."""

    def __init__(
        self,
        root: Path,
        *,
        capacity_bytes: int | None = None,
        choose: Chooser | None = None,
        mounted: Collection[Digest] = (),
    ) -> None:
        """Open the store, creating it if need be; verifies what a crash of the machine may have
        damaged and removes leftovers.

        `choose` decides what to evict (see core/eviction); without it nothing is evicted. `mounted`
        are manifests of packages that are mounted, which stay although no tag may name them any
        more. Raises Conflict when another process uses the directory.
        """
        self._paths = Paths(root)
        self._capacity = capacity_bytes
        self._lock = threading.RLock()
        self._closed = False
        self._use_saved_at = time.time()
        with failures(root):
            self._paths.make()
            self._lock_fd = lock_directory(self._paths)
        end_of_line = len(str(os.getpid()))
        self.pulse = Pulse(self._lock_fd, end_of_line, self._paths.lock)
        try:
            self._open(choose, mounted)
        except BaseException:
            os.close(self._lock_fd)
            raise

    def _open(self, choose: Chooser | None, mounted: Collection[Digest]) -> None:
        self._index = Index(self._paths.index)
        self._sync = BackgroundSync(self._paths, self._index)
        try:
            with failures(self._paths.root):
                self._documents = Documents(self._paths, self._index)
            self._blob_context = BlobContext(
                self._paths,
                self._index,
                boot_id(),
                partial(_load_pieces, self.root, self._documents),
                self._sync.add,
                partial(_keep_pieces, self._lock, self._documents),
                in_memory(self._lock_fd),
            )
            self._blobs = recover(self._blob_context)
            self.note, self.set_note = self._index.note, self._index.set_note
            self.lost = partial(lost_digests, self._index)
            self.packages = PackageRecords(self._index, self._lock)
            self.images = ImageRecords(self._index, self._lock)
            self.tags = TagRecords(self._index, self._lock)
            self.pins = Pins(self._index, self._lock)
            self.opened = OpenedRecords(self._index, self._lock, self._blobs, self._documents)
            self._documents.sweep(self._named_documents(mounted), idle_s=DOCUMENT_IDLE_S)
            self.objects = Objects(self._paths, self._index, self._blob_context.boot)
            self.trees = Trees(self._tree_context(), self.objects)
            self._stock = Stock(
                self.root,
                self._capacity,
                self._blobs,
                self._documents,
                self.objects,
                self.trees,
                self.pins,
                self.opened,
                self._discard,
            )
            self._room = Room(self._stock, self._paths.temporary, choose)
            self._admission = Admission(
                self._blob_context,
                self._lock,
                self._blobs,
                self._documents,
                room=self._room.make,
                discard=self._discard,
                begun=partial(self._save_use, USE_SAVED_S),
            )
            self.integrity = Integrity(self._paths, self._index, self._blobs, self.objects, self.trees)
            self._index.reserve.keep()
        except BaseException:
            self._sync.close()
            self._index.close()
            raise

    def _tree_context(self) -> TreeContext:
        sync_objects = partial(self._sync.add_task, self.objects.sync)
        return TreeContext(
            self._lock, self._paths, self._index, self.get, self.pins.owners, self.make_room, sync_objects
        )

    def close(self) -> None:
        """Bring everything to the disk and unlock the directory. Idempotent; blobs cannot be used
        afterwards. What a disk does not take, as one that became read-only, is logged: the next
        start verifies it."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            blobs = [blob.close for blob in self._blobs.values()]
            steps = [self._save_use, self._sync.close, *blobs, self.integrity.close, self.objects.close]
            _end(self._paths.root, [*steps, self._index.close])
            os.close(self._lock_fd)

    @property
    def root(self) -> Path:
        """The directory of the store."""
        return self._paths.root

    # -- blobs

    def get(self, digest: Digest) -> Blob | None:
        """The blob, complete or partial; the same object each time. A complete blob was checked
        piece by piece against the piece list `blob.pieces_digest`: compare it with the manifest's,
        or call begin, which does."""
        blob = self._blobs.get(parse_digest(digest))
        return None if blob is None or blob.gone else blob

    def blobs(self) -> list[Blob]:
        """All blobs."""
        # Without the lock, which a thread that makes room may hold for seconds.
        return [blob for blob in list(self._blobs.values()) if not blob.gone]

    def begin(self, digest: Digest, pieces: PieceList) -> Blob:
        """The blob, a new partial one if there was none; not yet held (Admission.begin)."""
        return self._admission.begin(digest, pieces)

    def begin_held(self, digest: Digest, pieces: PieceList) -> Blob:
        """The blob that begin() gives, held for the caller to release. One that is not held gives
        way to the next blob that is begun."""
        return self._admission.held(lambda: self.begin(digest, pieces))

    def begin_vouched(self, digest: Digest, size: int) -> Blob:
        """The blob of `size` bytes, which has no piece list, held for the caller to
        release (Admission.begin_vouched)."""
        return self._admission.held(lambda: self._admission.begin_vouched(digest, size))

    def remove(self, digest: Digest) -> None:
        """Remove a blob; raises NotFound, and Conflict when it is pinned, in use, or the root or a
        catalog of a tree."""
        with self._lock:
            blob = self._blobs.get(parse_digest(digest))
            if blob is None:
                raise NotFound(f"{digest} is not in the store")
            if owners := self.pins.owners(digest):
                raise Conflict(
                    f"{digest} is pinned by {', '.join(sorted(owners)[:3])}", remedy="Remove what pins it first"
                )
            if trees := self.trees.records.needing(digest):
                raise Conflict(f"{digest} is needed by the tree {min(trees)}", remedy="Remove that tree first")
            self._discard(blob)

    def drop_partial(self, digest: Digest) -> None:
        """Remove a partial blob, pinned or not; nothing happens when there is none. Raises Conflict
        when it is in use or complete."""
        with self._lock:
            blob = self._blobs.get(parse_digest(digest))
            if blob is None:
                return
            if blob.complete:
                raise Conflict(f"{digest} is complete", remedy="Remove it instead")
            self._discard(blob)

    def _discard(self, blob: Blob) -> None:
        blob.retire()
        digest = blob.digest
        # Files before the index: on a full disk the index can be written only after they are gone.
        with failures(self._paths.root):
            paths = self._paths
            for path in (paths.complete(digest), paths.data(digest), paths.bitmap(digest), paths.hashes(digest)):
                path.unlink(missing_ok=True)
        self._index.reserve.use()
        self._index.delete(digest)
        self.opened.removed(digest)
        self._blobs.pop(digest, None)
        lists = {other.pieces_digest for other in self._blobs.values()}
        if blob.pieces_digest not in lists and blob.pieces_digest not in self.pins:
            self._documents.remove(blob.pieces_digest)

    # -- documents

    def put_document(self, data: bytes) -> Digest:
        """Store a manifest, config or piece list. Raises TooLarge, DiskFull."""
        return self.put_documents([data])[0]

    def put_documents(self, documents: Sequence[bytes]) -> list[Digest]:
        """Store several documents, for which room is made at once. Raises TooLarge, DiskFull."""
        with self._lock:
            self._room.make(sum(map(len, documents)), self._documents.files_new(documents))
            return self._documents.put(documents)

    def read_document(self, digest: Digest) -> bytes | None:
        """A manifest, config or piece list, verified; None when it is not here."""
        return self._documents.read(parse_digest(digest))

    def document_size(self, digest: Digest) -> int:
        """The bytes of a manifest, config or piece list; 0 when it is not here."""
        return self._documents.size(digest)

    def _named_documents(self, mounted: Collection[Digest]) -> set[Digest]:
        wanted = {blob.pieces_digest for blob in self._blobs.values()} | self.pins.digests() | self.images.digests()
        named = [(record.reference, record.manifest_digest) for record in self.packages.list()]
        wanted |= {*mounted, *map(self.opened.manifest, mounted)}
        for reference, digest in [*named, *((record.reference, record.digest) for record in self.tags.list())]:
            for manifest in {digest, self.opened.manifest(digest)}:
                wanted.add(manifest)
                data = self._documents.read(manifest)
                if data is not None:
                    try:
                        wanted.update(small.digest for small in decode_manifest(data).documents())
                    except Corrupt as error:
                        logger.warning("%s: %s", reference, error)
        return wanted

    # -- room

    @property
    def capacity(self) -> int:
        """Bytes that fit into the store when nothing else is in it or on its disk."""
        with failures(self.root):
            disk = largest_bytes(self.root)
        return disk if self._capacity is None else min(disk, self._capacity)

    def usage(self) -> Usage:
        """The bytes of what is in the store."""
        return self._stock.usage()

    def candidates(self) -> tuple[list[Candidate], Sequence[Share]]:
        """What might make room (see core/eviction)."""
        with self._lock:
            return self._stock.candidates()

    def make_room(self, needed: int, files: int = 0, after: DiskFull | None = None) -> list[Digest]:
        """Evict what must go for `needed` more bytes and so many new files to fit; returns what
        went. `after`: how making them failed just now. Raises DiskFull when that is impossible."""
        with self._lock:
            return self._room.make(needed, files, after)

    def collect(self) -> int:
        """Remove garbage, beside pulls and mounts; returns the bytes that went."""
        return self.trees.collect()

    def verify(self, *, bytes_s: float | None = None, stop: threading.Event | None = None) -> Iterator[Checked]:
        """Read everything and drop what is wrong (see verify.verify); iterate in a thread."""
        return verify(self.blobs(), self.objects, self.trees, bytes_s=bytes_s, stop=stop)

    def _save_use(self, after_s: float = 0.0) -> None:
        """Write to the index when blobs were used since the last call, unless that was less than
        `after_s` ago."""
        now = time.time()
        if 0 <= now - self._use_saved_at < after_s:
            return
        self._index.reserve.keep()
        since, self._use_saved_at = self._use_saved_at, now
        if since > now:  # the clock was set back, and times do not tell what was used since
            since = 0.0
        self._index.touch([(blob.last_used, blob.digest) for blob in self._blobs.values() if blob.last_used >= since])
        self.trees.records.save_use(since)


def _keep_pieces(lock: threading.RLock, documents: Documents, pieces: PieceList) -> Digest:
    """Store the piece list of a blob; room was made for it when the blob was begun."""
    with lock:
        return documents.put([pieces.encode()])[0]


def _load_pieces(root: Path, documents: Documents, digest: Digest) -> PieceList:
    data = documents.read(digest)
    if data is None:
        raise Corrupt(
            f"the store {root} has lost the piece list {digest}", remedy="Remove the package and pull it again"
        )
    return PieceList.decode(data)


def stored_manifest(store: BlobStore, digest: Digest) -> Manifest | None:
    """The manifest by which a store keeps a package: of a sealed one that was opened here, what was
    opened and what is encrypted of it. None where it is not here. Raises Corrupt."""
    data = store.read_document(store.opened.manifest(parse_digest(digest)))
    return decode_manifest(data) if data is not None else None


def begin_opened(store: BlobStore, digest: Digest, pieces: PieceList, encrypted: Digest) -> Blob | None:
    """The blob, complete or partial, held for the caller to release, to be decrypted from the blob
    `encrypted`: a partial one is marked as such. None while a pull fetches it as it is: what is
    written then goes to other hosts. Raises what BlobStore.begin raises."""
    while True:
        with store._lock:
            found = store._blobs.get(parse_digest(digest))
            if found is not None and (found.gone or (not found.complete and digest not in store.opened)):
                if found.in_use:
                    return None
                store._discard(found)
                found = None
            if found is None:  # the mark before the blob, and nothing in between
                store.opened.record({digest: encrypted})
                try:
                    return store.begin_held(digest, pieces)
                except BaseException:
                    store.opened.forget(digest)
                    raise
        blob = store.begin_held(digest, pieces)  # which may read it, and not under the lock
        if blob.complete or digest in store.opened:
            return blob
        blob.release()  # it was evicted meanwhile, or is of another piece list


def drop_opened(store: BlobStore, digest: Digest) -> bool:
    """Remove what is decrypted of a blob in part, but for its piece list; returns whether that is
    gone, or complete. False while it is in use."""
    with store._lock:
        blob = store._blobs.get(parse_digest(digest))
        if blob is None or blob.complete or digest not in store.opened:
            return True
        if blob.in_use:
            return False
        pieces = store.read_document(blob.pieces_digest)
        store._discard(blob)
        if pieces is not None:  # by which the blob is begun anew
            store.put_document(pieces)
        return True


def redundant_parts(store: BlobStore) -> set[Digest]:
    """Packs and encrypted blobs that a store does not need: their contents are here. Blocks."""
    opened = {part.digest for manifest in store.opened.packages().values() for part in manifest.parts}
    return (store.trees.redundant_packs() - opened) | store.opened.redundant(store.trees.complete)


def room_left(store: BlobStore) -> int:
    """Bytes that fit into a store without evicting anything."""
    with store._lock:
        return max(0, store._room.free())


def evictions(store: BlobStore) -> int:
    """Blobs and trees of a store that went to make room since it was opened."""
    return store._room.evicted


def _end(root: Path, steps: Sequence[Callable[[], None]]) -> None:
    """Do all steps of the end of a store; log how the first one failed, and how many did."""
    errors: list[P2PDistError] = []
    for step in steps:
        try:
            with failures(root):
                step()
        except P2PDistError as error:
            errors.append(error)
    if errors:
        logger.error(
            "%d parts of the store at %s could not be closed in order, and are verified at the next start: %s",
            len(errors),
            root,
            errors[0],
        )
