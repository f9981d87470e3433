"""One lazy view of a package: shown once the package's metadata is here, filled while it is read.

A mount begins the pull of the package as a preseed, waits until the lists of files are here, and
mounts the trees over an empty device (p2pdist/mount/lazy). Then the pull computes what is missing.
Where the package has a bootstrap (bootstrap.py), and little of the lists is here, the view is
mounted by that, readers are served by what it says of places, and the pull begins once the program
has started. From then on chunks have their full names.

A reader that waits has the chunks that it reads fetched as a start, before what the pull brings
(readers.py). When the pull has ended, the rest of the device is filled from objects; then nothing
supervises the view any more, and nothing of the store is kept for it. A view outlives its agent:
the next one connects to its supervisor and computes the same layout from the package again.

What follows what a reader waited for is filled as well (readahead.py).

Where the tracker has a trace of the start, the device is filled in its order from the beginning
(prefetch.py, traces.py): what it names comes while the view is mounted, from where it is foreseen
to be (forecast.py), and the pull computes what is missing after it.

While no agent answers, the supervisor gives readers EIO SUPERVISOR_GRACE_S later than an agent
would.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import time
from collections import Counter
from collections.abc import Coroutine, Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from p2pdist.agent.lazy.bootstrap import bring_lists
from p2pdist.agent.lazy.chunks import Fetcher, Whereabouts
from p2pdist.agent.lazy.filler import Filler, keep_filling
from p2pdist.agent.lazy.forecast import forecast, forecast_by_bootstrap
from p2pdist.agent.lazy.images import LazyImages
from p2pdist.agent.lazy.prefetch import Places, Prefetch, cells_of_trace
from p2pdist.agent.lazy.readers import Readers, Stalls
from p2pdist.agent.lazy.sight import Sight
from p2pdist.agent.lazy.traces import Start, ViewContent
from p2pdist.agent.pull.packages import Package
from p2pdist.agent.pull.pulls import Pulls
from p2pdist.agent.pull.trees import Sources
from p2pdist.model.bootstrap import NAME_BYTES, Bootstrap
from p2pdist.model.catalog import Pack, Stored
from p2pdist.model.device import ARRANGEMENT, Cells, DeviceLayout
from p2pdist.model.digest import Digest
from p2pdist.model.errors import Corrupt, NotFound, P2PDistError
from p2pdist.model.manifest import CATALOG_TYPE, TREE_TYPE, Descriptor, Manifest
from p2pdist.model.messages import LazyStatus, PullRequest
from p2pdist.model.trace import Trace, inherit, shortened
from p2pdist.model.tree import Entry
from p2pdist.mount.lazy.fill_method import FillMethod, StandBy, supervise
from p2pdist.mount.lazy.plain import cover, identity, write_plain
from p2pdist.mount.lazy.view import (
    device_bytes,
    mark_filled,
)
from p2pdist.mount.records import CHANGE_S_MAX, changing
from p2pdist.mount.supervisor import protocol
from p2pdist.mount.supervisor.protocol import ORDER, WHOLE
from p2pdist.store.store import BlobStore
from p2pdist.store.trees.missing_contents import Missing

SUPERVISOR_GRACE_S = 5.0
"""The supervisor waits so much longer than the agent, which knows better why nothing came."""

TRIES = 8
TRY_S = 0.25
"""A supervisor that does not answer so often in a row is gone: its guard takes less time."""

REVIVED_S = 0.8 * CHANGE_S_MAX
"""Another supervisor has so long to begin: an unmount of the view waits for it."""

SHOWN_S_MAX = 10.0
"""The pull waits so long for the view to be shown, before it computes what is missing, and so long
for the start of a program that is shown by a bootstrap."""

QUIET_S = 0.5
"""A program whose reads have waited for nothing for so long has started, or has it here."""

PULL_AGAIN_S, PULL_AGAIN_S_MAX = 1.0, 60.0
"""Between two attempts to get what is missing: this at first, then twice as long each time."""

COVER_S, COVER_S_MAX = 10.0, 600.0
"""Between two looks whether processes have mapped something of a view that lacks nothing: this at
first, by when the program that had it mounted has seen that it sees the same, then twice as long
each time."""

logger = logging.getLogger(__name__)


def layout_of(
    store: BlobStore, manifest: Manifest, arrangement: int = ARRANGEMENT
) -> tuple[list[Sequence[Entry] | None], DeviceLayout, list[Pack]]:
    """The trees of a package, bottom to top, None for an image among them, where their contents lie
    by the rule with the number `arrangement`, and the packs that their catalogs list. Roots and
    catalogs are in the store. Raises NotFound, Corrupt, TooLarge. In a thread."""
    catalogs = [part.digest for part in manifest.parts if part.media_type == CATALOG_TYPE]
    layers: list[Sequence[Entry] | None] = []
    sizes: dict[bytes, int] = {}
    chunk_lists: dict[bytes, bytes] = {}
    packs: dict[str, Pack] = {}
    for layer in manifest.layers:
        if layer.media_type != TREE_TYPE:
            layers.append(None)
            continue
        read = store.trees.reader.read(layer.digest, catalogs)
        layers.append(read.tree.entries)
        contents = read.tree.contents
        sizes.update((content, size) for content, size in contents.items() if content not in sizes)
        lists = read.chunk_lists()
        chunk_lists.update((content, lists[name]) for content, name in read.tree.chunk_lists.items())
        packs.update((pack.digest, pack) for catalog in read.catalogs for pack in catalog.packs)
    return layers, DeviceLayout(sizes, chunk_lists, arrangement), list(packs.values())


def images_of(manifest: Manifest) -> list[Descriptor]:
    """The layers of a package that are images."""
    return [layer for layer in manifest.layers if layer.media_type != TREE_TYPE]


class LazyView:
    """One lazy view: what it has of its package, and who waits for what. On the event loop."""

    def __init__(
        self,
        store: BlobStore,
        pulls: Pulls,
        fetcher: Fetcher,
        reference: str,
        limit_s: float,
        stalls: Stalls,
        cells: Cells,
        start: Start | None = None,
    ) -> None:
        self.layers: list[Sequence[Entry] | None] = []
        """Trees, None for an image among them."""
        self.images = LazyImages(fetcher)
        self.arrangement = ARRANGEMENT  # by which contents lie in the device; `resume`
        self.layout: DeviceLayout | None = None
        """None until roots and catalogs are here, or a bootstrap, and once nothing serves the view
        any more."""
        self.bootstrap: Bootstrap | None = None
        """By which it is to be mounted; None for one that is mounted by its trees, and since."""
        self.stated_size: int | None = None
        """Bytes of its device by the bootstrap that it was mounted by; None without."""
        self.bootstrap_read = asyncio.Event()
        """Set once it is known what that says of contents, or that it cannot be: then the trees are
        compared with it."""
        self.stand_by: StandBy | None = None
        """What is to supervise it, where that was begun before it is mounted; closed by `close`,
        and once the view is served."""
        self.listed = asyncio.Event()
        """Set once the trees are known."""
        self._finding = False
        """Whether the trace has been asked for."""
        self.places: Places | None = None
        """What comes from where the trace says; None where it does not say so."""
        self._bytes_content, self._pinned = 0, ""
        """Those of the trees; and what is pulled again, as its tag may move meanwhile."""
        self.whole = False
        self.known: asyncio.Future[Package | None] = asyncio.get_running_loop().create_future()
        """Gets the package once its lists of files are here and something is missing; None: nothing
        is."""
        self.sight = Sight()
        self._store, self._pulls, self._reference, self._limit_s = store, pulls, reference, limit_s
        self._fetcher = fetcher
        self._filler = Filler(store, fetcher)
        self._filler.chunks.lost, self._filler.chunks.awaited = self._pull_again, self.sight.await_pull
        self._start = start
        """None for a view that an earlier agent mounted."""
        total = start.traces.prefetched if start is not None else Counter[str]()
        self.readers = Readers(reference, limit_s, stalls, self._filler, self.images, self._extent, start)
        self._prefetch = Prefetch(self._filler, lambda: bool(self.readers.awaited), total)
        self.readers.prefetch = self._prefetch
        self._opened = asyncio.Event()
        """Set once the device can be written to."""
        self._filler.device.cells = cells
        self._arranged, self._located, self._pulled = asyncio.Event(), asyncio.Event(), asyncio.Event()
        """Set once it is known where contents lie in the device, where they come from, and once all
        of them are here."""
        self._holds = ExitStack()
        self._tasks: set[asyncio.Task[None]] = set()
        self._ended = self._served = False

    # -- the package

    def cut(self, method: FillMethod) -> None:
        """Have its device in the cells of the method by which it will be filled. Before it is
        served."""
        self._filler.device.cells = method.cells

    def begin(self) -> None:
        """Begin to pull the package, in the background and until it is here."""
        self.find_trace()
        self.spawn(self._pull())

    def find_trace(self, manifest: Manifest | None = None) -> None:
        """Ask for the trace of the start, and fill what it names, in the background; where no
        content is here, what it places in packs of this `manifest` is asked for at once.
        Idempotent."""
        if self._start is not None and not self._finding:
            self._finding = True
            self.spawn(self._start.find())
            self.spawn(_fill_ahead(self, self._start))
            if manifest is not None and not self._store.objects.sizes:
                self.spawn(_bring_ahead(self, self._start, manifest))

    def show(self, bootstrap: Bootstrap, package: Package) -> None:
        """Show it by its bootstrap; the package is pulled once that is done."""
        self.bootstrap, self.stated_size, self._bytes_content = bootstrap, bootstrap.size, bootstrap.bytes_content
        self._pinned = f"{package.reference.name}@{package.digest}"
        self.known.set_result(package)
        if self._start is not None:
            cells = self._filler.device.cells
            self._start.late = partial(_content, self._store, self._fetcher, package.manifest, cells)
        self.spawn(_arrange(self, bootstrap, package.manifest))
        self.begin()

    async def _pull(self) -> None:
        if self.stated_size is not None and not self.layers:
            await _started(self)
            if (package := self.known.result()) is not None:
                with suppress(P2PDistError):  # the pull says why
                    await bring_lists(self._store, self._fetcher, package.manifest)
        pause_s = PULL_AGAIN_S
        while not self._pulled.is_set():
            try:
                request = PullRequest(package=self._pinned or self._reference, priority="preseed")
                pull = self._pulls.start(request, planned=self._plan)
                self.sight.pull, pull.listed = pull.status, self._list
                assert pull.task is not None
                await asyncio.wait([pull.task])
                if pull.error is not None:
                    raise pull.error
                assert pull.package is not None
                await self._here(pull.package)
            except P2PDistError as error:
                if not self.known.done():
                    self.known.set_exception(error)
                    self.known.exception()
                    return
                self.readers.trouble = error.what
                logger.warning("the rest of %s does not come: %s", self._reference, error)
                await asyncio.sleep(pause_s)
                pause_s = min(2 * pause_s, PULL_AGAIN_S_MAX)

    def _pull_again(self) -> None:
        """A content that was here when the package had been pulled was damaged, or evicted."""
        if self._pulled.is_set() and not self.whole:
            self._pulled.clear()
            self.spawn(self._pull())

    async def _list(self, package: Package) -> None:
        """The lists of files are here: the view is shown before what is missing is computed, and
        what the trace names comes before as far as it is known from where."""
        self._tell(package)
        if self.stated_size is not None:
            await self._know(package)
        elif not self._served:
            await _shown(self)

    def _tell(self, package: Package) -> None:
        if not self.known.done():
            self.sight.know()
            self.known.set_result(package)

    def _plan(self, package: Package, incomplete: Sequence[Missing], sources: Sources) -> None:
        """What is missing is known: readers can be served from now on."""
        blobs = [self._store.get(layer.digest) for layer in images_of(package.manifest)]
        if not incomplete and all(blob is not None and blob.complete for blob in blobs):
            return  # nothing is missing
        self._pinned = f"{package.reference.name}@{package.digest}"
        _place(self, Whereabouts.of(incomplete, sources), "located")
        self._tell(package)
        if self._served:
            self.spawn(self._know(package))

    async def _here(self, package: Package) -> None:
        """Everything is here: hold it until it is in the device. Raises NotFound, Conflict when it
        was evicted meanwhile."""
        self._pinned = f"{package.reference.name}@{package.digest}"
        with ExitStack() as holds:
            for layer in package.manifest.layers:
                if layer.media_type == TREE_TYPE:
                    holds.enter_context(self._store.trees.held(layer.digest))
            self._holds.push(holds.pop_all())
        if self.stated_size is not None:
            await self._know(package)
            await asyncio.to_thread(_record, self._store, self.known.result())
        _place(self, replace(self._filler.chunks.whereabouts, replaced=None), "located")
        if not self.known.done():
            self.known.set_result(None)
        elif self.known.result() is None or self._served:
            await self._know(package)
        self._pulled.set()

    async def _know(self, package: Package) -> None:
        if not self.layers:
            await self.read_layout(package.manifest)

    async def read_layout(self, manifest: Manifest) -> Sequence[Pack]:
        """Compute where contents lie; returns the packs of the catalogs. Raises what `layout_of`
        raises, and Corrupt where the bootstrap says something else."""
        layers, layout, packs = await asyncio.to_thread(layout_of, self._store, manifest, self.arrangement)
        await self.images.begin(images_of(manifest), device_bytes(layout, self._filler.device.cells))
        if self.stated_size is not None:
            if self.sight.over.is_set():  # else it is read later, and readers need not wait for that
                await self.bootstrap_read.wait()
            await _replace(self, manifest, packs, layout)
        self.layers, self.layout = layers, layout
        self._filler.arrange(layout)
        self._bytes_content = layout.bytes_content
        _tell_content(self, packs)
        parts = (part for part in (*manifest.layers, *manifest.parts) if part.media_type in (TREE_TYPE, CATALOG_TYPE))
        for blob in filter(None, (self._store.get(part.digest) for part in parts)):
            with suppress(NotFound):  # another agent computes the layout from them
                self._holds.enter_context(blob.held())
        self._arranged.set()
        self.listed.set()
        self.sight.end("arranged")
        return packs

    # -- readers

    def serve(self, directory: Path) -> None:
        """Serve readers of the view whose files are in `directory`, and fill it. Idempotent."""
        if not self._served:
            self._served, self.images.directory, self.bootstrap, self.stand_by = True, directory, None, None
            if self._start is not None:
                self._start.mounted()
            self.spawn(self._serve(directory))

    async def _serve(self, directory: Path) -> None:
        tries = 0
        while not self._ended:
            try:
                greeting = await asyncio.to_thread(protocol.connect, directory)
            except OSError as error:
                if self.whole or not directory.is_dir():  # it was unmounted while programs read it
                    break
                tries += 1
                if tries > TRIES:
                    tries = 0
                    limit_s, held = self._limit_s + SUPERVISOR_GRACE_S, self._filler.device.held
                    await asyncio.to_thread(_revive, directory, error, limit_s, held)
                await asyncio.sleep(TRY_S)
                continue
            tries = 0
            self.readers.note_refused(greeting.refused)
            self._filler.device.take(greeting.filler, greeting.group)
            self._opened.set()
            with greeting.connection as connection:
                connection.setblocking(False)
                filling = asyncio.create_task(self._fill(directory, connection))
                try:
                    await self.readers.listen(connection)
                finally:
                    filling.cancel()
                    await asyncio.gather(filling, return_exceptions=True)
        self._finish()
        if self.whole:
            await cover_unused(self, directory)

    async def _extent(self) -> int:
        """The bytes of the device, once contents can be filled in."""
        await _planned(self)
        assert self.layout is not None
        return device_bytes(self.layout, self._filler.device.cells)

    def follow(self) -> None:
        """Note when everything is here, of images that are mounted elsewhere."""
        self.sight.over.set()
        self.spawn(_follow(self))

    async def _fill(self, directory: Path, connection: socket.socket) -> None:
        """Fill what is missing once the package is here, and end the supervision."""
        await self._pulled.wait()
        await self._arranged.wait()
        await _complete(self, directory)
        self.whole = True
        logger.info("the lazy view of %s lacks nothing any more", self._reference)
        with suppress(OSError):
            await asyncio.get_running_loop().sock_sendall(connection, ORDER.pack(WHOLE, 0, 0))

    def status(self) -> LazyStatus:
        """How far it is."""
        return _status_of(self)

    async def close(self) -> None:
        """End, with the view or with the agent: what is supervised stays so."""
        self._ended = True
        if self.stand_by is not None:
            await asyncio.to_thread(self.stand_by.close)
        self.sight.over.set()
        self.sight.prepared.set()
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self.readers.stop()
        self._finish()
        self.images.close()

    def _finish(self) -> None:
        self.sight.gone.set()
        if self._start is not None:
            self._start.end()
        for task in self._tasks - {asyncio.current_task()}:
            task.cancel()
        self._holds.close()
        self.readers.close()
        self._filler.close()
        # A view may be shown for months, and the pull of its package is remembered.
        self.layers, self.layout = [], None

    def spawn(self, work: Coroutine[Any, Any, None]) -> None:
        """Work on it in the background, until it is closed."""
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


def _record(store: BlobStore, package: Package | None) -> None:
    """Note that a package was used here by its tag, of which a pull by digest knows nothing. In a
    thread."""
    if package is not None:
        told = store.tags.get(str(package.reference))
        if told is None or told.digest == package.digest:  # else it has moved since
            store.packages.record(str(package.reference), package.digest)


async def _arrange(view: LazyView, bootstrap: Bootstrap, manifest: Manifest) -> None:
    """Compute from its bootstrap where contents of a view lie, and come from."""
    await view.sight.over.wait()  # it would take the processor from what mounts it
    try:
        layout, chunks = await asyncio.to_thread(bootstrap.contents)
        whereabouts = await asyncio.to_thread(forecast_by_bootstrap, view._store, manifest, chunks, layout)
    except P2PDistError as error:
        logger.warning("readers of %s wait for its lists of files: %s", view._reference, error)
        view.sight.unforeseen.set()
        return
    finally:
        view.bootstrap_read.set()
    if view.layout is None and not view.sight.gone.is_set():
        view.layout = layout
        view._filler.arrange(layout)
        view._arranged.set()
        view.sight.end("arranged")
        if whereabouts.sources:
            _place(view, whereabouts, "foreseen")
        else:
            view.sight.unforeseen.set()


async def _replace(view: LazyView, manifest: Manifest, packs: Sequence[Pack], layout: DeviceLayout) -> None:
    """Have chunks named in full from now on, as the new layout names them, and in their places.
    Raises Corrupt where other contents lie there by the bootstrap: then readers get nothing
    more."""
    whereabouts = await asyncio.to_thread(forecast, view._store, manifest, packs, layout)
    compared, agree = None, layout.size == view.stated_size
    while agree and view.layout is not compared:  # the bootstrap's may have become known meanwhile
        compared = view.layout
        agree = compared is None or await asyncio.to_thread(layout.agrees_with, compared)
    if not agree:
        view._arranged.clear()
        raise Corrupt("its bootstrap and its trees contradict each other", remedy="Pack it again and mount that")
    _place(view, whereabouts, "foreseen")
    if not whereabouts.sources:
        view._located.clear()


async def _content(store: BlobStore, fetcher: Fetcher, manifest: Manifest, cells: Cells) -> ViewContent:
    """What a view of a package of trees shows, from the lists of the package. Raises
    P2PDistError."""
    await bring_lists(store, fetcher, manifest)
    trees, layout, packs = await asyncio.to_thread(layout_of, store, manifest)
    return ViewContent([entries for entries in trees if entries is not None], layout, cells, packs)


def _tell_content(view: LazyView, packs: Sequence[Pack]) -> None:
    """Say what is recorded as read, by its full names."""
    if view._start is not None and view.layout is not None and None not in view.layers:
        trees = [entries for entries in view.layers if entries is not None]
        view._start.content = ViewContent(trees, view.layout, view._filler.device.cells, packs)


def _place(view: LazyView, whereabouts: Whereabouts, step: str) -> None:
    """From now on contents can be filled in, from there."""
    before, view._filler.chunks.whereabouts = view._filler.chunks.whereabouts, whereabouts
    if before.replaced is not None:
        before.replaced.set()
    view._located.set()
    view.sight.end(step)


async def foresee(view: LazyView, manifest: Manifest, packs: Sequence[Pack], layout: DeviceLayout) -> None:
    """Have contents filled in that are certain to come from a pack, before the pull has computed
    all."""
    whereabouts = await asyncio.to_thread(forecast, view._store, manifest, packs, layout)
    if not view._located.is_set() and whereabouts.sources:
        _place(view, whereabouts, "foreseen")


async def _shown(view: LazyView) -> None:
    """Return once the view is mounted, and what its trace names has come as far as it is known from
    where, or neither will be soon."""
    with suppress(TimeoutError):
        async with asyncio.timeout(SHOWN_S_MAX):
            await view.sight.over.wait()
            if view._located.is_set() and view.sight.traced:
                await view.sight.prepared.wait()


async def _started(view: LazyView) -> None:
    """Return once a view is mounted, what its trace names is filled in, and its readers have waited
    for nothing for QUIET_S, or wait for what the pull is to compute, or soon: to compute that takes
    the processor from them."""
    await _shown(view)
    with suppress(TimeoutError):
        async with asyncio.timeout(SHOWN_S_MAX):
            if view.sight.traced:
                await view.sight.prepared.wait()
            while (left := view.readers.quiet_in(QUIET_S)) > 0:
                with suppress(TimeoutError):
                    async with asyncio.timeout(left):
                        await view.sight.unforeseen.wait()
                        return


async def _follow(view: LazyView) -> None:
    await view._pulled.wait()
    view.whole = True


async def _planned(view: LazyView) -> None:
    """Return once contents can be filled in."""
    await view._arranged.wait()
    await view._located.wait()


def _status_of(view: LazyView) -> LazyStatus:
    total = view.images.bytes_total + view._bytes_content
    return LazyStatus(
        view.whole,
        total,
        total if view.whole else view._filler.bytes_filled + view.images.bytes_here,
        sum(view.readers.awaited.values()),
        len(view.readers.awaited),
        view.readers.stalls.count,
        round(view.readers.stalls.quantile(0.5), 4),
        round(view.readers.stalls.quantile(0.99), 4),
        view.readers.stalls.refused,
        view.readers.misses,
        view._prefetch.bytes,
        view._prefetch.hits,
        view._prefetch.unread_bytes,
        round(view.sight.shown_s, 4),
        view.sight.bytes_metadata,
        round(time.monotonic() - view.sight.begun, 4),
        dict(view.sight.steps),
        view._prefetch.bytes_packed,
    )


async def _complete(view: LazyView, directory: Path) -> None:
    """Fill what is missing, and write what will cover the view."""
    assert view.layout is not None
    cells = view._filler.device.cells
    filling = keep_filling(view._filler, cells.holding(0, view.layout.size), view.images.check, view._reference)
    trees = [entries for entries in view.layers if entries is not None]
    writing = [asyncio.to_thread(_write_plain, directory, trees, view.layout)] if cells.headed else []
    await asyncio.gather(filling, *writing)
    with suppress(OSError):  # the view is out of sight by now
        await asyncio.to_thread(mark_filled, directory)


def _write_plain(directory: Path, trees: Sequence[Sequence[Entry]], layout: DeviceLayout) -> None:
    try:
        write_plain(directory, trees, layout)
    except FileNotFoundError:
        return  # it was unmounted
    except (P2PDistError, OSError) as error:
        logger.warning("the lazy view in %s stays as slow as it is: %s", directory, error)


async def cover_unused(view: LazyView, directory: Path) -> None:
    """Cover a view that lacks nothing (mount/lazy/plain.py), once no process has mapped anything of
    it."""
    pause_s = COVER_S
    while True:
        await asyncio.sleep(pause_s)
        try:
            outcome = await asyncio.to_thread(cover, directory)
            if outcome == "covered":
                view.sight.identity = await asyncio.to_thread(identity, directory)
                view.sight.end(outcome)
            if outcome != "used":
                return
        except FileNotFoundError:
            return  # it was unmounted
        except (P2PDistError, OSError) as error:
            logger.warning("the lazy view in %s stays as slow as it is: %s", directory, error)
        pause_s = min(2 * pause_s, COVER_S_MAX)


async def _bring_ahead(view: LazyView, start: Start, manifest: Manifest) -> None:
    """Have the pieces come that the trace of the start names by places in packs."""
    trace = await start.trace
    try:
        if trace is not None and trace.places:
            view.places = Places(trace, manifest)
            await view.places.bring(view._fetcher)
    except P2PDistError as error:
        view.places = None
        logger.info("some of a trace is left to the pull: %s", error)


async def _fill_ahead(view: LazyView, start: Start) -> None:
    """Fill what the trace of the start names, in its order."""
    try:
        trace = await start.trace
        view.sight.traced = trace is not None
        await view._arranged.wait()
        if trace is None:
            return
        view.readers.ahead.fetches = False
        early = not view.layers
        await _fill_in_order_of(view, trace)
        view.sight.end("prefetched")
    finally:
        view.sight.prepared.set()
        view.readers.ahead.fetches = True
    if early:  # what has another content at the path of the one in the trace is known with the trees
        await view.listed.wait()
        await _fill_in_order_of(view, trace)


def _nowhere(pack: Digest, stored: Stored) -> bool:
    return False


async def _fill_in_order_of(view: LazyView, trace: Trace) -> None:
    layout = view.layout
    if view.layers:
        trees = [entries for entries in view.layers if entries is not None]
        trace = await asyncio.to_thread(inherit, trace, trees)
    else:
        trace = shortened(trace, NAME_BYTES)
    if layout is not None:
        named = list(cells_of_trace(trace, layout, view._filler.device.cells))
        await _planned(view)
        hold = view.places.hold if view.places is not None else _nowhere
        cells = view._filler.without_neighbours(named, hold)
        await view._prefetch.run(cells, view._opened)
        view._prefetch.bytes_packed = view._prefetch.bytes_packed or view._filler.bytes_packed(cells)


def _revive(directory: Path, error: OSError, limit_s: float, held: tuple[int, ...]) -> None:
    """Start another supervisor where the one before was killed with its guard. Meanwhile readers
    get EIO, or wait where this agent still holds the group. In a thread."""
    with ExitStack() as stack:
        try:
            stack.enter_context(changing(directory))
        except OSError:
            return  # it is being unmounted, or has been
        if not directory.is_dir():
            return
        logger.error("nothing supervises the lazy view in %s any more: %s", directory, error)
        try:
            supervise(directory, limit_s, held, ready_s=REVIVED_S)
        except (P2PDistError, OSError) as failure:
            logger.error("no other supervisor can be started: %s", failure)
