"""Trees: which of them a store can mount, and what makes them so.

A tree is known here by the digest of its root. Its record names its catalogs and its contents, and
keeps all of these in the store; it is complete while every content has an object, and root and
catalogs are complete blobs. A complete record vouches for its contents: it is made incomplete
before an object goes. So a pull of the next version looks only for contents of pages that differ.

Before there is a record, a Missing that is open keeps what its tree needs, what is here and what is
to come. What neither a record nor an open Missing names is garbage: a pull that was broken off left
it, and it goes when room is needed, or at collect(). A tree that is pinned, held or being pulled is
neither evicted nor removed.

The event loop holds trees and lets go of them, so that takes no lock under which a disk is waited
for: `TreeHolds` has one of its own.

Lock order: Missing.extraction, store, holds, objects.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

from p2pdist.model.candidate import Candidate, Share
from p2pdist.model.digest import Digest, parse_digest
from p2pdist.model.errors import Conflict, Corrupt, Damaged, DiskFull
from p2pdist.model.tree import Entry
from p2pdist.store.blobs.blob import Blob
from p2pdist.store.index import Index, TreeRecord
from p2pdist.store.layout import Paths
from p2pdist.store.objects.files import Objects
from p2pdist.store.trees.assembly import DamagedObject
from p2pdist.store.trees.extraction import Extracted, Extraction
from p2pdist.store.trees.images import Images
from p2pdist.store.trees.missing_contents import Backed, Missing, OpenPulls, back, plan, remoteness
from p2pdist.store.trees.reader import TreeReader
from p2pdist.store.trees.records import TreeRecords, shared_bytes
from p2pdist.store.trees.variants import Variants


@dataclass(frozen=True, slots=True)
class TreeContext:
    """What trees need of their store."""

    lock: threading.RLock
    paths: Paths
    index: Index
    get: Callable[[Digest], Blob | None]
    owners: Callable[[Digest], set[str]]
    """The owners of the pins of a digest."""
    make_room: Callable[[int, int, DiskFull | None], Collection[Digest]]
    """Makes room for so many bytes and files, after a failure to make these if there was one;
    raises DiskFull."""
    sync_objects: Callable[[], None]
    """Brings objects to the disk in the background."""


@dataclass(frozen=True, slots=True)
class TreeStatus:
    """A tree that the store has a record of."""

    root: Digest
    catalogs: tuple[Digest, ...]
    complete: bool
    last_used: float
    """In seconds since the epoch."""
    pinned: bool
    in_use: bool


class TreeHolds:
    """How often each tree is held. Thread-safe; waits for no disk."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: dict[Digest, int] = {}
        self._going: set[Digest] = set()
        """Trees that are being removed."""

    def __contains__(self, root: Digest) -> bool:
        return root in self._counts

    def add(self, root: Digest, complete: Callable[[Digest], bool]) -> bool:
        """Hold a tree; False where it is not complete, or is being removed."""
        with self._lock:
            if root in self._going or not complete(root):
                return False
            self._counts[root] = self._counts.get(root, 0) + 1
            return True

    def remove(self, root: Digest) -> None:
        """End one hold."""
        with self._lock:
            assert self._counts.get(root, 0) > 0, "release without hold"
            self._counts[root] -= 1
            if not self._counts[root]:
                del self._counts[root]

    @contextmanager
    def barred(self, root: Digest) -> Iterator[bool]:
        """Have nothing hold a tree within a `with` block; False where something does already."""
        with self._lock:
            free = root not in self._counts
            if free:
                self._going.add(root)
        try:
            yield free
        finally:
            with self._lock:
                self._going.discard(root)


class Trees:
    """Thread-safe. All methods raise P2PDistError when the disk fails and UsageError for what is no
    digest."""

    def __init__(self, context: TreeContext, objects: Objects) -> None:
        self._context, self._objects, self._lock = context, objects, context.lock
        self.records = TreeRecords(context.index)
        self.pulls = OpenPulls()
        """What pulls under way miss."""
        self.reader = TreeReader(context.get)
        self.images = Images(context.paths.images, context.paths.image)
        """The metadata images; an image is removed with its tree."""
        self.variants = Variants(
            context.paths.variants, objects.boot, lambda needed: context.make_room(needed, 0, None)
        )
        self.holds = TreeHolds()
        self._garbage = True
        """Whether there may be something for collect() to remove."""
        self._shares: tuple[dict[Digest, int], list[Share]] | None = None
        """Bytes that trees have alone and share, None when records or pulls changed since they were
        counted."""
        if objects.lost:
            for record in self.records:
                if record.complete and not objects.sizes.keys() >= self.records.contents(record.root):
                    self.records.set_incomplete(record.root)
        # None survives the loss of the machine for certain, nor a disk that fails, and nothing in
        # them could tell.
        self.images.sweep(self._is_needed, opening=True, everything=objects.unsure)
        self.variants.open(lambda root: not (objects.unsure or objects.lost) and self._is_needed(root))

    # -- what is here

    def complete(self, root: Digest) -> bool:
        """Whether the tree can be mounted."""
        record = self.records.find(root)
        if record is None or not record.complete:
            return False
        blobs = map(self._context.get, (record.root, *record.catalogs))
        return all(blob is not None and blob.complete for blob in blobs)

    def list(self) -> Sequence[TreeStatus]:
        """All trees with a record, complete or not, by root."""
        with self._lock:
            return [
                TreeStatus(
                    record.root,
                    record.catalogs,
                    self.complete(record.root),
                    record.last_used,
                    bool(self._context.owners(record.root)),
                    self._in_use(record.root),
                )
                for record in sorted(self.records, key=lambda record: record.root)
            ]

    def entries(self, root: Digest) -> Sequence[Entry]:
        """The entries of a tree with a record, in walking order. Raises NotFound, Corrupt."""
        with self._lock:
            record = self.records.get(root)
        return self.reader.entries(record.root, record.catalogs)

    def keep_variants(self, root: Digest, most: int) -> Path | None:
        """The directory for variants of a tree, which take at most `most` bytes (see
        Variants.keep). They count from now on and are removed with the tree. Raises NotFound."""
        with self._lock:
            taken, contents = self._objects.taken, self.records.contents(self.records.get(root).root)
            return self.variants.keep(root, most, sum(taken.get(content, 0) for content in contents))

    # -- pulling a tree

    def missing(self, root: Digest, catalogs: Sequence[Digest], packs: Sequence[Digest] | None = None) -> Missing:
        """What must be pulled for the tree; root and catalogs are complete blobs here. Chunks are
        taken only from `packs`, if given.

        The room that its objects and its image will take is made and kept until it is closed.
        Raises NotFound for a blob that is not here, Corrupt, DiskFull.
        """
        parse_digest(root)
        with ExitStack() as claims:
            for digest in (root, *catalogs):
                claims.enter_context(self.reader.blob(digest).held())
            read = self.reader.read(root, catalogs)
            listed = [pack for catalog in read.catalogs for pack in catalog.packs]
            missing = Missing(root, tuple(catalogs), read.tree, tuple({pack.digest for pack in listed}))
            if packs is not None:
                allowed = set(packs)
                listed = [pack for pack in listed if pack.digest in allowed]
            listed.sort(key=lambda pack: remoteness(self._context.get(pack.digest)))
            with self._lock:
                self.pulls.add(missing)
                self._shares = None
                claims.callback(self._close, missing)
                absent = self._absent(missing)
                missing.contents = dict(absent)
            # Others must not give way to a tree that claims what nothing backs.
            backed = back(missing, read.chunk_lists(), listed) if absent else Backed({}, {}, {})
            missing.bytes_content = sum(backed.room.values())
            with self._lock:
                # Before room is made, and all of them until it is known which ones count.
                old = self._objects.chunk_lists() if backed.chunked else []
                missing.sources = frozenset(content for content, _ in old)
                image = 0 if self.images.size(root) or self.images.expected(root) else read.image_bytes_max
                expected = self._objects.expected
                self._context.make_room(expected.bytes_new(backed.room) + image, expected.files_new(backed.room), None)
                expected.add(backed.room)
                claims.callback(self._objects.expected.remove, absent)
                self.images.expect(root, read.image_bytes_max)
                missing.image_bytes_max = read.image_bytes_max
            if absent:
                plan(missing, backed, listed, old)
                with self._lock:
                    # Fewer objects are counted on from here on; those of evicted trees may go.
                    self._shares, self._garbage = None, True
            missing.close = claims.pop_all().close
        return missing

    def fill(self, missing: Missing) -> Extracted:
        """Make objects from the packs that are here. May be called as often as packs or pieces
        arrive; blocks, so call it in a thread. Raises Corrupt, naming pack and chunk, when a pack
        whose pieces verify does not hold what a catalog says; Damaged where the disk is at fault,
        once what is wrong was dropped; DiskFull; Conflict after it was closed."""
        with missing.extraction:
            self.pulls.require(missing)
            try:
                return _extract(missing, self._objects, self._context)
            except DamagedObject as error:
                self.drop_objects({error.content})
                raise Damaged(
                    f"the object {error.content.hex()} in the store is damaged and was removed", remedy="Pull again"
                ) from error

    def finish(self, missing: Missing) -> None:
        """Record the tree of an open Missing as complete. Raises Conflict when contents are
        missing."""
        with self._lock:
            self.pulls.require(missing)
            if absent := self._absent(missing):
                raise Conflict(
                    f"{missing.root} is not complete: {len(absent)} contents are missing", remedy="Pull again"
                )
            packs = (*missing.packs, *(pack.blob.digest for pack in missing.selected.values()))
            record = TreeRecord(missing.root, missing.catalogs, packs, True, time.time())
            self._objects.save()
            self.records.add(record, {name: page.sizes for name, page in missing.tree.pages.items()})
            self._shares = None
            self._context.sync_objects()

    def _close(self, missing: Missing) -> None:
        with missing.extraction, self._lock:
            for assembly in missing.assemblies.values():
                assembly.close()
            if missing.image_bytes_max is not None:
                self.images.unexpect(missing.root, missing.image_bytes_max)
            self.pulls.remove(missing)
            self._shares = None
            self._garbage = True

    def _absent(self, missing: Missing) -> Mapping[bytes, int]:
        """Contents of its tree that have no object, with their sizes. Raises Corrupt when one has
        another size than the tree states. What a complete tree has, too, is here and was
        compared."""
        tree, sizes = missing.tree, self._objects.sizes
        base = self.records.find(tree.base) if tree.base is not None else None
        doubtful = tree.changed if base is not None and base.complete else tree.contents
        if doubtful.items() <= sizes.items():
            return {}
        wrong = next((content for content, size in doubtful.items() if sizes.get(content, size) != size), None)
        if wrong is not None:
            raise Corrupt(f"the tree {missing.root} states another size for the content {wrong.hex()} than it has")
        return {content: size for content, size in doubtful.items() if content not in sizes}

    # -- keeping and removing

    def hold(self, root: Digest, *, in_part: bool = False) -> None:
        """Keep a tree from eviction and removal until release(); holds add up. Raises NotFound, and
        Conflict when it is not complete, unless it may be there `in_part`. Waits for no disk."""
        record = self.records.get(root)
        if not self.holds.add(root, (lambda _: True) if in_part else self.complete):
            raise Conflict(f"{root} is not complete", remedy="Pull it again")
        self.records.use(record.root)

    def release(self, root: Digest) -> None:
        """End one hold. Waits for no disk."""
        self.records.use(root)  # first: else it could seem unused since hold() for a moment
        self.holds.remove(root)

    @contextmanager
    def held(self, root: Digest, *, in_part: bool = False) -> Iterator[None]:
        """Hold a tree within a `with` block."""
        self.hold(root, in_part=in_part)
        try:
            yield
        finally:
            self.release(root)

    def remove(self, root: Digest) -> None:
        """Remove a tree, its image and variants, and the objects that no other tree needs; root and
        catalogs become ordinary blobs. Raises NotFound, and Conflict when it is pinned or in
        use."""
        with self._lock:
            self.records.get(root)
            if owners := self._context.owners(root):
                raise Conflict(
                    f"{root} is pinned by {', '.join(sorted(owners)[:3])}", remedy="Remove what pins it first"
                )
            with self.holds.barred(root) as free:
                if not free or self.pulls.of(root):
                    raise Conflict(f"{root} is in use", remedy="Wait until pulls and mounts of it have ended")
                contents = self.records.contents(root)
                self.images.remove(root)
                self.variants.remove(root)
                self.records.remove(root)
            self._shares = None
            self._objects.remove(contents - self._named(contents))

    def drop_objects(self, contents: set[bytes]) -> None:
        """Remove objects that are not what their names say. Each tree is looked at once for all of
        them, which takes long where it has many contents."""
        with self._lock:
            self._context.index.reserve.use()
            # First, since a tree that is called complete vouches for its contents.
            for root in self.records.with_any(contents):
                self.records.set_incomplete(root)
                self.variants.drop(root, contents)
            self._objects.remove(contents)

    def collect(self) -> int:
        """Remove what neither a tree nor a pull names: objects, and images and variants without a
        tree. Returns the bytes that the objects had."""
        with self._lock:
            if not self._garbage:
                return 0
            here = set(self._objects.contents())
            freed = self._objects.remove(here - self._named(here))
            self.images.sweep(self._is_needed)
            self.variants.sweep(self._is_needed)
            self._garbage = bool(self.pulls)
            return freed

    # -- what may make room

    def redundant_packs(self) -> set[Digest]:
        """Packs that were needed for complete trees only: their contents are here as objects."""
        with self._lock:
            packs = {pack for record in self.records if self.complete(record.root) for pack in record.packs}
            return packs - self.pulls.packs()

    def bytes_images(self) -> int:
        """Bytes of all images, those of pulls under way among them."""
        return self.images.bytes_total(record.root for record in self.records)

    def files_of(self, roots: set[Digest]) -> int:
        """How many files go with these trees: objects that no other tree names, images and
        variants. What is no tree here has none."""
        here = [record.root for record in self.records if record.root in roots]
        contents: set[bytes] = set().union(*map(self.records.contents, here))
        for record in self.records:
            if record.root not in roots:
                contents -= self.records.contents(record.root)
        for missing in self.pulls:
            contents -= missing.tree.contents.keys() | missing.sources
        beside = sum(bool(self.images.size(root)) + self.variants.files_of(root) for root in here)
        return len(contents & self._objects.contents()) + beside

    def candidates(self) -> tuple[Sequence[Candidate], Sequence[Share]]:
        """Trees with the bytes that are theirs alone, root, image and variants among them, and what
        they share."""
        if self._shares is None:
            contents = {record.root: self.records.contents(record.root) for record in self.records}
            staying = chain.from_iterable((*missing.tree.contents, *missing.sources) for missing in self.pulls)
            self._shares = shared_bytes(contents, staying, self._objects.taken)
        own, shares = self._shares
        candidates = []
        for record in self.records:
            root = record.root
            blob = self._context.get(root)
            beside = self.images.size(root) + self.variants.size(root)
            size = own.get(root, 0) + beside + (blob.size if blob is not None else 0)
            in_use = self._in_use(root) or (blob is not None and blob.in_use)
            candidates.append(Candidate(root, size, record.last_used, bool(self._context.owners(root)), in_use))
        return candidates, shares

    def _in_use(self, root: Digest) -> bool:
        return root in self.holds or self.pulls.of(root)

    def _is_needed(self, root: Digest) -> bool:
        return root in self.records or self._in_use(root)

    def _named(self, contents: set[bytes]) -> set[bytes]:
        """Those of `contents` that a tree or an open Missing names."""
        named: set[bytes] = set()
        for record in self.records:
            named |= contents & self.records.contents(record.root)
        for missing in self.pulls:
            named |= contents & (missing.tree.contents.keys() | missing.sources)
        return named


def _extract(missing: Missing, objects: Objects, context: TreeContext) -> Extracted:
    """Make objects of a tree. Where the disk gave less than it had said, or something else wrote to
    it, more goes for what is missing yet."""
    while True:
        try:
            return Extraction(missing, objects, context.get).run()
        except DiskFull as full:
            evicted: Collection[Digest] = ()
            with suppress(DiskFull):  # the first one says more
                evicted = context.make_room(sum(missing.contents.values()), 0, full)  # its files are expected
            if not evicted:
                raise
