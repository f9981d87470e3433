"""Trees: which of them a store can show, and what makes them so.

A tree is known here by the digest of its root. Its record names its catalogs and its contents, and
keeps all of these in the store; it is complete while every content has an object and root and
catalogs are complete blobs. A complete record vouches for its contents: it is made incomplete
before an object goes, so that of the next version only contents of pages that differ are looked
for. A Missing that is open keeps what its tree needs, what is here and what is to come, before there is a
record. What neither a record nor an open Missing names is garbage: a pull that was broken off left it, and
it goes when room is needed, or at collect().

A tree that is pinned, held or being pulled is neither evicted nor removed. Lock order: Missing.filling,
store, objects.

Which objects of trees become free with which trees.

What trees see of the store they are in.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from itertools import chain, filterfalse
from pathlib import Path

from p2pdist.model.candidate import Candidate, Share
from p2pdist.model.digest import Digest, parse_digest
from p2pdist.model.errors import Conflict, Corrupt, NotFound
from p2pdist.model.tree import Entry
from p2pdist.store.blobs.blob import Blob
from p2pdist.store.index import Index, TreeRecord
from p2pdist.store.layout import Paths
from p2pdist.store.objects.objects import Objects
from p2pdist.store.trees.assembly import Damaged
from p2pdist.store.trees.filling import Filled, Filling
from p2pdist.store.trees.images import Images
from p2pdist.store.trees.missing import Backed, Missing, back, plan
from p2pdist.store.trees.reader import TreeReader
from p2pdist.store.trees.variants import Variants


def shared_bytes(
    trees: Mapping[Digest, Iterable[bytes]], staying: Iterable[bytes], sizes: Mapping[bytes, int]
) -> tuple[dict[Digest, int], list[Share]]:
    """Bytes of the contents that one tree alone names, and of those that several do. `trees` are
    the contents of each, without repetition; `staying` stay whichever of them go; what has no size
    here counts nothing."""
    owners: dict[bytes, int] = {}
    roots = list(trees)
    for number, root in enumerate(roots):
        bit = 1 << number
        for content in trees[root]:
            owners[content] = owners.get(content, 0) | bit
    for content in staying:
        owners.pop(content, None)
    totals: dict[int, int] = {}
    for content, mask in owners.items():
        totals[mask] = totals.get(mask, 0) + sizes.get(content, 0)
    own: dict[Digest, int] = {}
    shares = []
    for mask, size in totals.items():
        named = [root for number, root in enumerate(roots) if mask >> number & 1]
        if len(named) == 1:
            own[named[0]] = size
        else:
            shares.append(Share(frozenset(named), size))
    return own, shares


@dataclass(frozen=True, slots=True)
class TreeContext:
    """`sync_objects` brings objects to the disk in the background."""

    lock: threading.RLock
    paths: Paths
    index: Index
    get: Callable[[Digest], Blob | None]
    owners: Callable[[Digest], set[str]]
    make_room: Callable[[int], object]
    sync_objects: Callable[[], None]


logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class TreeStatus:
    """A tree that the store has a record of. `last_used` is in seconds since the epoch."""

    root: Digest
    catalogs: tuple[Digest, ...]
    complete: bool
    last_used: float
    pinned: bool
    in_use: bool


class Trees:
    """Thread-safe. All methods raise P2PDistError when the disk fails and UsageError for what is no
    digest."""

    def __init__(self, context: TreeContext, objects: Objects) -> None:
        self._context, self._objects = context, objects
        self._index, self._lock = context.index, context.lock
        self._records = {record.root: record for record in self._index.trees()}
        self._holds: dict[Digest, int] = {}
        self._missing: list[Missing] = []
        self._reader = TreeReader(context.get)
        self._images = Images(context.paths.images, context.paths.image)
        self.variants = Variants(context.paths.variants, objects.boot, context.make_room)
        self._garbage = True
        self._shares: tuple[dict[Digest, int], list[Share]] | None = None
        if objects.lost:
            for record in list(self._records.values()):
                if record.complete and self._without_object(self._contents(record.root)):
                    self._set_complete(record.root, False)
        # None survives the loss of the machine for certain, and nothing in them could tell.
        self._images.sweep(self._needs_image, opening=True, everything=objects.other_boot)
        self.variants.open(lambda root: not (objects.other_boot or objects.lost) and self._needs_image(root))

    # -- what is here

    def complete(self, root: Digest) -> bool:
        """Whether the tree can be shown."""
        record = self._records.get(parse_digest(root))
        return record is not None and record.complete and self._blobs_here(record)

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
                for record in sorted(self._records.values(), key=lambda record: record.root)
            ]

    def entries(self, root: Digest) -> Sequence[Entry]:
        """The entries of a tree with a record, in walking order. Raises NotFound, Corrupt."""
        with self._lock:
            record = self._record(root)
        return self._reader.entries(record.root, record.catalogs)

    def known_entries(self, root: Digest) -> Sequence[Entry] | None:
        """The entries of a tree if they are in memory, in walking order."""
        return self._reader.known(root)

    def image(self, root: Digest) -> Path:
        """Where the metadata image of a tree belongs: to be written beside it and renamed. It is
        removed with the tree."""
        return self._images.path(root)

    def keep_variants(self, root: Digest, most: int) -> Path | None:
        """See Variants.keep; they count from now on and are removed with the tree. Raises
        NotFound."""
        with self._lock:
            taken, contents = self._objects.taken, self._contents(self._record(root).root)
            return self.variants.keep(root, most, sum(taken.get(content, 0) for content in contents))

    def touch(self, root: Digest) -> None:
        """Note that the tree was used now. Raises NotFound."""
        with self._lock:
            self._use(self._record(root))

    def with_any(self, contents: set[bytes]) -> set[Digest]:
        """The trees that have one of these contents."""
        return {root for root in list(self._records) if not contents.isdisjoint(self._contents(root))}

    # -- getting one

    def missing(self, root: Digest, catalogs: Sequence[Digest], packs: Sequence[Digest] | None = None) -> Missing:
        """What must be pulled for the tree; root and catalogs are complete blobs here. Chunks are
        taken only from `packs`, if given.

        The room that its objects and its image will take is made and kept until it is closed.
        Raises NotFound for a blob that is not here, Corrupt, DiskFull.
        """
        parse_digest(root)
        with ExitStack() as claims:
            for digest in (root, *catalogs):
                claims.enter_context(self._reader.blob(digest).held())
            read = self._reader.read(root, catalogs)
            tree = read.tree
            allowed = None if packs is None else set(packs)
            listed = [
                pack for catalog in read.catalogs for pack in catalog.packs if allowed is None or pack.digest in allowed
            ]
            packs_listed = {pack.digest for catalog in read.catalogs for pack in catalog.packs}
            listed.sort(key=lambda pack: self._remoteness(pack.digest))
            missing = Missing(root, tuple(catalogs), tree, tuple(packs_listed))
            with self._lock:
                self._missing.append(missing)
                self._shares = None
                claims.callback(self._end, missing)
                absent = self._absent(missing)
                missing.contents = dict(absent)
            # Others must not give way to a tree that claims what nothing backs.
            backed = back(missing, read.chunk_lists(), listed) if absent else Backed({}, {}, {})
            missing.bytes_content = sum(backed.room.values())
            with self._lock:
                # Before room is made, and all of them until it is known which ones count.
                old = self._objects.chunk_lists() if backed.chunked else []
                missing.sources = frozenset(content for content, _ in old)
                image = 0 if self._images.size(root) or self._images.expected(root) else read.image_bytes_max
                self._context.make_room(self._objects.unexpected(backed.room) + image)
                self._objects.expect(backed.room)
                claims.callback(self._objects.unexpect, absent)
                self._images.expect(root, read.image_bytes_max)
                claims.callback(self._forget_image, root, read.image_bytes_max)
            if absent:
                plan(missing, backed, listed, old)
                with self._lock:
                    self._shares = None  # fewer objects are counted on from here on
            missing.close = claims.pop_all().close
        return missing

    def fill(self, missing: Missing) -> Filled:
        """Make objects from the packs that are here. May be called as often as packs or pieces
        arrive; blocks, so call it in a thread. Raises Corrupt, naming pack and chunk, when a pack
        does not hold what a catalog says; DiskFull; Conflict after it was closed."""
        with missing.filling:
            self._require_open(missing)
            try:
                return Filling(missing, self._objects, self._context.get).run()
            except Damaged as error:
                self.drop_object(error.content)
                raise Corrupt(
                    f"the object {error.content.hex()} in the store is damaged and was removed", remedy="Pull again"
                ) from error

    def finish(self, missing: Missing) -> None:
        """Record the tree of an open Missing as complete. Raises Conflict when contents are
        missing."""
        with self._lock:
            self._require_open(missing)
            if absent := self._absent(missing):
                raise Conflict(
                    f"{missing.root} is not complete: {len(absent)} contents are missing", remedy="Pull again"
                )
            packs = (*missing.packs, *(pack.blob.digest for pack in missing.selected.values()))
            record = TreeRecord(missing.root, missing.catalogs, packs, True, time.time())
            self._objects.save()
            self._index.add_tree(record, {name: page.sizes for name, page in missing.tree.pages.items()})
            self._records[missing.root] = record
            self._shares = None
            self._context.sync_objects()

    # -- keeping and removing

    def hold(self, root: Digest) -> None:
        """Keep a tree from eviction and removal until release(); holds add up. Raises NotFound, and
        Conflict when it is not complete."""
        with self._lock:
            record = self._record(root)
            if not self.complete(root):
                raise Conflict(f"{root} is not complete", remedy="Pull it again")
            self._holds[root] = self._holds.get(root, 0) + 1
            self._use(record)

    def release(self, root: Digest) -> None:
        """End one hold."""
        with self._lock:
            assert self._holds.get(root, 0) > 0, "release without hold"
            self._holds[root] -= 1
            if not self._holds[root]:
                del self._holds[root]
            if root in self._records:
                self._use(self._records[root])

    @contextmanager
    def held(self, root: Digest) -> Iterator[None]:
        """Hold a tree within a `with` block."""
        self.hold(root)
        try:
            yield
        finally:
            self.release(root)

    def remove(self, root: Digest) -> None:
        """Remove a tree, its image and variants, and the objects that no other tree needs; root and
        catalogs become ordinary blobs. Raises NotFound, and Conflict when it is pinned or in
        use."""
        with self._lock:
            self._record(root)
            if owners := self._context.owners(root):
                raise Conflict(
                    f"{root} is pinned by {', '.join(sorted(owners)[:3])}", remedy="Remove what pins it first"
                )
            if self._in_use(root):
                raise Conflict(f"{root} is in use", remedy="Wait until pulls and mounts of it have ended")
            mine = self._contents(root)
            self._images.remove(root)
            self.variants.remove(root)
            self._index.remove_tree(root)
            del self._records[root]
            self._shares = None
            self._objects.remove(mine - self._named(mine))

    def drop_object(self, content: bytes) -> None:
        """Remove an object that is not what its name says, whoever needs it; trees that do are no
        longer complete."""
        with self._lock:
            # First, since a tree that is called complete vouches for its contents.
            for root in list(self._records):
                if content in self._contents(root):
                    self._set_complete(root, False)
                    self.variants.drop(root, content)
            self._objects.remove([content])

    def collect(self) -> int:
        """Remove what neither a tree nor a pull names: objects, and images and variants without a
        tree. Returns the bytes that the objects had."""
        with self._lock:
            if not self._garbage:
                return 0
            here = set(self._objects.contents())
            freed = self._objects.remove(here - self._named(here))
            self._images.sweep(self._needs_image)
            self.variants.sweep(self._needs_image)
            self._garbage = bool(self._missing)
            return freed

    # -- for the store: what may make room

    def needing(self, digest: Digest) -> set[Digest]:
        """The trees that keep a blob: their root or a catalog."""
        return {root for root, record in self._records.items() if digest == root or digest in record.catalogs}

    def needed_by(self) -> dict[Digest, set[Digest]]:
        """For each catalog of a tree, the trees."""
        found: dict[Digest, set[Digest]] = {}
        for root, record in self._records.items():
            for catalog in record.catalogs:
                found.setdefault(catalog, set()).add(root)
        return found

    def known(self, root: Digest) -> bool:
        """Whether there is a record of the tree."""
        return root in self._records

    def packs_awaited(self) -> set[Digest]:
        """Packs that are needed by pulls under way."""
        return {need.pack for missing in self._missing for need in missing.needs}

    def redundant_packs(self) -> set[Digest]:
        """Packs that were needed for complete trees only: what they hold stands here as objects."""
        with self._lock:
            found = {pack for root, record in self._records.items() if self.complete(root) for pack in record.packs}
            return found - self.packs_awaited()

    def bytes_images(self) -> int:
        return self._images.bytes_total(list(self._records))

    def candidates(self) -> tuple[Sequence[Candidate], Sequence[Share]]:
        """Trees with the bytes that are theirs alone, root, image and variants among them, and what
        they share."""
        own, shares = self._sharing()
        found = []
        for root, record in self._records.items():
            blob = self._context.get(root)
            shown = self._images.size(root) + self.variants.size(root)
            size = own.get(root, 0) + shown + (blob.size if blob is not None else 0)
            in_use = self._in_use(root) or (blob is not None and blob.in_use)
            found.append(Candidate(root, size, record.last_used, bool(self._context.owners(root)), in_use))
        return found, shares

    def save_use(self, since: float) -> None:
        """Write down when trees were used, of those that were used since then. A row is written
        whole, with the names of all pages."""
        self._index.touch_trees(
            [(record.last_used, record.root) for record in self._records.values() if record.last_used >= since]
        )

    # -- inner workings

    def _record(self, root: Digest) -> TreeRecord:
        record = self._records.get(parse_digest(root))
        if record is None:
            raise NotFound(f"the tree {root} is not in the store", remedy="Pull the package first")
        return record

    def _use(self, record: TreeRecord) -> None:
        self._records[record.root] = replace(record, last_used=time.time())

    def _in_use(self, root: Digest) -> bool:
        return root in self._holds or any(missing.root == root for missing in self._missing)

    def _blobs_here(self, record: TreeRecord) -> bool:
        blobs = map(self._context.get, (record.root, *record.catalogs))
        return all(blob is not None and blob.complete for blob in blobs)

    def _without_object(self, contents: Iterable[bytes]) -> Sequence[bytes]:
        return list(filterfalse(self._objects.sizes.__contains__, contents))

    def _absent(self, missing: Missing) -> Mapping[bytes, int]:
        """Contents of its tree that have no object, with their sizes. Raises Corrupt when one has
        another size than the tree states. What a complete tree has, too, is here and was
        compared."""
        tree, sizes = missing.tree, self._objects.sizes
        base = self._records.get(tree.base) if tree.base is not None else None
        doubtful = tree.changed if base is not None and base.complete else tree.contents
        if doubtful.items() <= sizes.items():
            return {}
        wrong = next((content for content, size in doubtful.items() if sizes.get(content, size) != size), None)
        if wrong is not None:
            raise Corrupt(f"the tree {missing.root} states another size for the content {wrong.hex()} than it has")
        return {content: size for content, size in doubtful.items() if content not in sizes}

    def _set_complete(self, root: Digest, complete: bool) -> None:
        self._index.set_tree(root, complete=complete)
        self._records[root] = replace(self._records[root], complete=complete)

    def _remoteness(self, pack: Digest) -> int:
        blob = self._context.get(pack)
        return 2 if blob is None else 0 if blob.complete else 1

    def _require_open(self, missing: Missing) -> None:
        if not any(other is missing for other in self._missing):
            raise Conflict(f"what {missing.root} lacks is no longer kept for it", remedy="Pull again")

    def _end(self, missing: Missing) -> None:
        with missing.filling, self._lock:
            for assembly in missing.assemblies.values():
                assembly.close()
            self._missing = [other for other in self._missing if other is not missing]
            self._shares = None
            self._garbage = True

    def _contents(self, root: Digest) -> set[bytes]:
        return self._index.tree_contents(root)

    def _named(self, contents: set[bytes]) -> set[bytes]:
        """Those of `contents` that a tree or an open Missing names."""
        named: set[bytes] = set()
        for root in self._records:
            named |= contents & self._contents(root)
        for missing in self._missing:
            named |= contents & (missing.tree.contents.keys() | missing.sources)
        return named

    def _sharing(self) -> tuple[dict[Digest, int], Sequence[Share]]:
        if self._shares is None:
            trees = {root: self._contents(root) for root in self._records}
            staying = chain.from_iterable((*missing.tree.contents, *missing.sources) for missing in self._missing)
            self._shares = shared_bytes(trees, staying, self._objects.taken)
        return self._shares

    def _forget_image(self, root: Digest, most: int) -> None:
        with self._lock:
            self._images.unexpect(root, most)

    def _needs_image(self, root: Digest) -> bool:
        return root in self._records or self._in_use(root)
