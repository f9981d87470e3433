"""The trees of a package on their way into the store: roots and catalogs, then the packs that hold
what is lacking, then objects.

A tree that is here whole needs nothing, not even its catalogs. Of a pack that holds little of what
is lacking only the pieces that cover it are fetched (p2pdist/model/selection.py). Objects are made
while packs come, each time that a share of them is here.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Protocol

from p2pdist.agent.tasks import in_thread
from p2pdist.model.digest import Digest
from p2pdist.model.errors import Conflict, Damaged, NotFound, P2PDistError
from p2pdist.model.manifest import CATALOG_TYPE, PACK_TYPE, TREE_TYPE, Descriptor, Manifest
from p2pdist.model.pieces import PieceList
from p2pdist.model.selection import Selection, pieces_covering
from p2pdist.model.tree import Entry
from p2pdist.mount.erofs.patch import draw
from p2pdist.mount.erofs.writer import is_image
from p2pdist.mount.layers import make_image
from p2pdist.store.blobs.blob import Blob
from p2pdist.store.disk import failures
from p2pdist.store.store import BlobStore
from p2pdist.store.trees.assembly import SelectedPack
from p2pdist.store.trees.missing_contents import Missing

COME_SHARE, COME_BYTES_MIN = 1 / 16, 8 << 20
"""Objects are made each time that this share of all packs has come, and at least so many bytes:
every time all chunks that are lacking are looked at."""

COME_POLL_S = 0.1

PUT_OFF_S_MAX = 10.0
"""While readers wait for single pieces, what has come is made objects of so much later at most: it
takes the processor from the readers, who are given what comes from the packs themselves."""

SELECTED_SHARE_MAX = 0.5
"""A pack of which more is needed is fetched whole: then this host can serve all of it."""


class Fetch(Protocol):
    """Brings one blob, or a selection of its pieces, into the store; held there until the pull
    ends."""

    def __call__(self, blob: Descriptor, selection: Selection | None = None) -> Awaitable[Blob]: ...


Sources = Mapping[Digest, tuple[Descriptor, Selection | None]]
"""By pack, the blob to fetch: the pack, or a selection of its pieces."""

Planned = Callable[[Sequence[Missing], Sources], None]
"""Hears what is missing of which trees, and from where it comes, before any of it does."""


class TreePull:
    """The trees of one package. `holds` keeps them from eviction once they are here. `skipped`
    hears of the bytes of blobs that need not be moved, `planned` of what is going to be."""

    def __init__(
        self,
        manifest: Manifest,
        store: BlobStore,
        fetch: Fetch,
        pieces: Callable[[Descriptor], PieceList],
        holds: ExitStack,
        skipped: Callable[[int], None],
        planned: Planned | None = None,
    ) -> None:
        self._manifest, self._store, self._fetch, self._pieces = manifest, store, fetch, pieces
        self._holds, self._skipped, self._planned = holds, skipped, planned
        self._filling = asyncio.Lock()
        self.bytes_content = 0  # of the contents that are made of packs, for which room is kept
        self.listed: Callable[[], Awaitable[None]] | None = None
        """Called once roots and catalogs are here; what is missing is computed after it."""
        self.waited_for: Callable[[], bool] = lambda: False
        """Says whether readers wait for single pieces of the packs; the owner sets it."""
        self.selects = True
        """Whether a pack may come in part."""

    async def run(self) -> None:
        """Bring everything that is lacking, and hold the trees. Raises what fetching raises,
        Corrupt for a package that contradicts itself, Damaged for what changed on the disk after it
        had come, DiskFull."""
        roots = {layer.digest: layer for layer in self._manifest.layers if layer.media_type == TREE_TYPE}
        absent = [root for root in roots if not self._hold(root)]
        self._skipped(sum(layer.size for root, layer in roots.items() if root not in absent))
        if not absent:
            self._skipped(sum(part.size for part in self._manifest.parts))
            if self._planned is not None:
                self._planned((), {})
            return
        catalogs = [part for part in self._manifest.parts if part.media_type == CATALOG_TYPE]
        await together(self._fetch(blob) for blob in (*(roots[root] for root in absent), *catalogs))
        if self.listed is not None:
            await self.listed()
        with ExitStack() as claims:
            incomplete = []
            for root in absent:
                try:
                    missing = await self._opened(root, [catalog.digest for catalog in catalogs])
                except NotFound as error:  # a scrub has dropped pieces since
                    raise Damaged(error.what, remedy=error.remedy) from error
                incomplete.append(claims.enter_context(missing))
                self.bytes_content += missing.bytes_content
            await self._bring_packs(incomplete)
            await self._fill(incomplete)  # also what needs no pack
            for missing in incomplete:
                try:
                    await asyncio.to_thread(self._store.trees.finish, missing)
                except Conflict as error:  # what had come was dropped again: it had changed on the disk
                    raise Damaged(error.what, remedy=error.remedy) from error
                self._hold(missing.root)
                await asyncio.to_thread(self._draw, missing.root)  # its room is kept as long as the set is open

    def _hold(self, root: Digest) -> bool:
        """Hold a tree that is here whole; False when it is not."""
        try:
            self._holds.enter_context(self._store.trees.held(root))
        except (NotFound, Conflict):
            return False
        return True

    async def _opened(self, root: Digest, catalogs: list[Digest]) -> Missing:
        """What is missing of the tree. Its room is kept until it is closed."""
        packs = [part.digest for part in self._manifest.parts if part.media_type == PACK_TYPE]
        return await in_thread(
            lambda: self._store.trees.missing(root, catalogs, packs), lambda missing: missing.close()
        )

    async def _bring_packs(self, incomplete: Sequence[Missing]) -> None:
        """Fetch the packs, or parts of them, that the incomplete trees need."""
        ranges: dict[Digest, list[tuple[int, int]]] = {}
        for missing in incomplete:
            for need in missing.needs:
                ranges.setdefault(need.pack, []).extend(need.ranges)
        packs = [part for part in self._manifest.parts if part.media_type == PACK_TYPE]
        self._skipped(sum(pack.size for pack in packs if pack.digest not in ranges))
        chosen = [(pack, self._selection(pack, ranges[pack.digest])) for pack in packs if pack.digest in ranges]
        if self._planned is not None:
            sources = {pack.digest: (part.descriptor if part else pack, part) for pack, part in chosen}
            self._planned(incomplete, sources)
        brought = asyncio.Event()

        async def bring() -> None:
            await together(self._bring(pack, selection, incomplete) for pack, selection in chosen)
            brought.set()

        whole = [pack for pack, selection in chosen if selection is None]
        await together((bring(), self._fill_meanwhile(incomplete, whole, brought)))

    async def _fill_meanwhile(
        self, incomplete: Sequence[Missing], packs: Sequence[Descriptor], brought: asyncio.Event
    ) -> None:
        """Make objects of packs that are here in part, until all are brought."""
        step = max(COME_BYTES_MIN, COME_SHARE * sum(pack.size for pack in packs))
        used, loop = 0, asyncio.get_running_loop()
        filled_at = loop.time()
        while not brought.is_set():
            come = sum(self._come(pack) for pack in packs)
            if come - used >= step and not (self.waited_for() and loop.time() - filled_at < PUT_OFF_S_MAX):
                used = come
                await self._fill(incomplete)
                filled_at = loop.time()
            with suppress(TimeoutError):
                async with asyncio.timeout(COME_POLL_S):
                    await brought.wait()

    def _come(self, pack: Descriptor) -> int:
        """About how many bytes of the pack are here."""
        blob = self._store.get(pack.digest)
        return len(blob.have) * blob.layout.piece_size if blob is not None else 0

    async def _bring(self, pack: Descriptor, selection: Selection | None, incomplete: Sequence[Missing]) -> None:
        if selection is None:
            await self._fetch(pack)
        else:
            self._skipped(pack.size - selection.descriptor.size)
            blob = await self._fetch(selection.descriptor, selection)
            for missing in incomplete:
                missing.selected[pack.digest] = SelectedPack(selection, blob)
        await self._fill(incomplete)

    def _selection(self, pack: Descriptor, ranges: list[tuple[int, int]]) -> Selection | None:
        """The pieces of a pack to fetch, None for all of it."""
        if not self.selects or self._store.get(pack.digest) is not None:
            return None
        whole = self._pieces(pack)
        chosen = pieces_covering(whole.layout, ranges)
        return Selection.of(pack, whole, chosen) if len(chosen) <= SELECTED_SHARE_MAX * chosen.count else None

    async def _fill(self, incomplete: Sequence[Missing]) -> None:
        """Make objects of what is here. One at a time: it takes the disk and the processor. It ends
        only when its thread has: closing the set would have the loop wait for that."""
        async with self._filling:
            for missing in incomplete:
                working = asyncio.ensure_future(asyncio.to_thread(self._store.trees.fill, missing))
                try:
                    await asyncio.shield(working)
                except asyncio.CancelledError:
                    await asyncio.wait([working])
                    if not working.cancelled():
                        working.exception()  # the pull ends for another reason, and asyncio would log this one
                    raise

    def _draw(self, root: Digest) -> None:
        """Write the image by which the tree is mounted, so that showing it need not."""
        trees = self._store.trees
        image = trees.images.path(root)
        if not is_image(image):
            entries = trees.entries(root)
            with failures(image):
                make_image(image, lambda: draw(image, entries, self._previous(root, len(entries))))

    def _previous(self, root: Digest, count: int) -> tuple[Path, Sequence[Entry]] | None:
        """Image and entries of the tree that was used last, of those with `count` entries that are
        in memory: likely an earlier version."""
        trees = self._store.trees
        for other in sorted(trees.list(), key=lambda status: status.last_used, reverse=True):
            entries = trees.reader.known(other.root)
            if other.root != root and entries is not None and len(entries) == count:
                return trees.images.path(other.root), entries
        return None


async def together(work: Iterable[Awaitable[object]]) -> None:
    """Await all; the first failure cancels the others and is raised on its own."""
    try:
        async with asyncio.TaskGroup() as group:
            for job in work:
                group.create_task(_run(job))
    except BaseExceptionGroup as group:
        # Not `except*`: Python before 3.11.4, as in Debian 12, puts what is raised there into
        # another group.
        expected, others = group.split(P2PDistError)
        if expected is None or others is not None:
            raise
        failure: BaseException = expected
        while isinstance(failure, BaseExceptionGroup):
            failure = failure.exceptions[0]
        raise failure from None


async def _run(job: Awaitable[object]) -> None:
    await job
