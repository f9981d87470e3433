"""Lazy views of packages: shown once their metadata is here, filled while they are read.

A mount begins the pull of the package as a preseed, waits until the lists of files are here, and
mounts the trees over an empty device (p2pdist/mount/lazy). Then the pull computes what is missing.
From then on a reader that waits has the chunks that it reads fetched as a start, before what the
pull brings. When the pull has ended, the rest of the device is filled from objects; then nothing
supervises the view any more, and nothing of the store is kept for it. A view outlives its agent:
the next one connects to its supervisor and computes the same layout from the package again.

What follows what a reader waited for is filled as well (readahead.py).

Where the tracker has a trace of the start, the device is filled in its order from the beginning
(prefetch.py, traces.py): what it names comes while the view is mounted, from where it is foreseen
to be (forecast.py), and the pull computes what is missing after it.

A reader waits for `limit_s` at most, then it gets EIO, and the log says why. While no agent
answers, the supervisor gives it EIO SUPERVISOR_GRACE_S later.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import shutil
import socket
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from p2pdist.agent.lazy.chunks import Fetcher, Whereabouts
from p2pdist.agent.lazy.filler import Filler, keep_filling, keep_trying
from p2pdist.agent.lazy.forecast import forecast
from p2pdist.agent.lazy.images import LazyImages
from p2pdist.agent.lazy.prefetch import Prefetch, cells_of_trace
from p2pdist.agent.lazy.readahead import ReadAhead
from p2pdist.agent.lazy.stalls import Stalls
from p2pdist.agent.lazy.traces import Start, Traces, ViewContent
from p2pdist.agent.pull.packages import Package, Packages
from p2pdist.agent.pull.pulls import Pulls
from p2pdist.agent.pull.trees import Sources
from p2pdist.model.catalog import Pack
from p2pdist.model.device import ARRANGEMENT, Cells, DeviceLayout
from p2pdist.model.errors import Conflict, NotFound, P2PDistError, Unavailable
from p2pdist.model.manifest import CATALOG_TYPE, TREE_TYPE, Descriptor, Manifest, parse_reference
from p2pdist.model.messages import LazyStatus, PullRequest, PullStatus
from p2pdist.model.modelpack import is_model
from p2pdist.model.trace import entry_name, inherit
from p2pdist.model.tree import Entry
from p2pdist.mount.lazy.fill_method import FUSE, METHODS, FillMethod, supervise
from p2pdist.mount.lazy.plain import cover, identity, write_plain
from p2pdist.mount.lazy.trial import Choice, choose
from p2pdist.mount.lazy.view import LazyPackage, arrangement_of, cells_of, device_bytes, is_filled, mark_filled
from p2pdist.mount.records import CHANGE_S_MAX, changing
from p2pdist.mount.sight import Identity
from p2pdist.mount.supervisor import protocol
from p2pdist.mount.supervisor.protocol import ANSWER, EXPIRED, FAULT, NOTICE, ORDER, READ, WHOLE, Notice
from p2pdist.store.store import BlobStore
from p2pdist.store.trees.missing_contents import Missing

VIEWS_MAX = 16
ROOM_TIMES = 3
"""The disk must have so many times the bytes of the contents free: for packs, objects, device."""

LIMIT_S = 60.0
"""How long a reader waits, unless the agent is told otherwise."""

SUPERVISOR_GRACE_S = 5.0
"""The supervisor waits so much longer than the agent, which knows better why nothing came."""

TRIES = 8
TRY_S = 0.25
"""A supervisor that does not answer so often in a row is gone: its guard takes less time."""

REVIVED_S = 0.8 * CHANGE_S_MAX
"""Another supervisor has so long to begin: an unmount of the view waits for it."""

TRIED_AGAIN_S = 60.0
"""Where no way to fill works, the ways are tried again after so long."""

SHOWN_S_MAX = 10.0
"""The pull waits so long for the view to be shown, before it computes what is missing."""

PULL_AGAIN_S, PULL_AGAIN_S_MAX = 1.0, 60.0
"""Between two attempts to get what is missing: this at first, then twice as long each time."""

COVER_S, COVER_S_MAX = 10.0, 600.0
"""Between two looks whether processes have mapped something of a view that lacks nothing: this at
first, by when the program that had it mounted has seen that it sees the same, then twice as long
each time."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class LazySettings:
    """How an agent shows packages lazily."""

    limit_s: float = LIMIT_S
    """How long a read waits for its bytes."""
    ways: tuple[str, ...] = ()
    """The ways to fill views that are tried; none for all."""


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


@dataclass(slots=True)
class _Sight:
    """How soon a view was seen, by the monotonic clock. On the event loop."""

    begun: float = field(default_factory=time.monotonic)
    """When the view was asked for, or taken over."""
    steps: dict[str, float] = field(default_factory=dict)
    """After how many seconds each step of the start had ended first."""
    pull: Callable[[], PullStatus] | None = None
    """Says how far the pull of the package is."""
    bytes_metadata: int = 0
    """What had come of the package when its metadata was here."""
    shown_s: float = 0.0
    """How much later it was mounted; 0 until then, and where an earlier agent did so."""
    identity: Identity | None = None
    """That of what covers it; None where nothing does, or this is not known yet."""
    over: asyncio.Event = field(default_factory=asyncio.Event)
    """Set once it is mounted, or will not be."""
    traced: bool = False
    """Whether there is a trace of its start."""
    prepared: asyncio.Event = field(default_factory=asyncio.Event)
    """Set once what the trace names has come, or a reader waits for what the pull is to compute."""
    gone: asyncio.Event = field(default_factory=asyncio.Event)
    """Set once its readers are served no more."""
    _known_at: float = 0.0

    def end(self, step: str) -> None:
        """A step of the start has ended."""
        self.steps.setdefault(step, round(time.monotonic() - self.begun, 4))

    def know(self) -> None:
        """The metadata is here."""
        self.end("listed")
        self._known_at = time.monotonic()
        if self.pull is not None:
            status = self.pull()
            self.bytes_metadata = status.bytes_peers + status.bytes_origin

    def show(self) -> None:
        """The view is mounted."""
        self.end("mounted")
        self.shown_s = time.monotonic() - self._known_at
        self.over.set()


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
        """None until roots and catalogs are here, and once nothing serves the view any more."""
        self._bytes_content, self._pinned = 0, ""
        """Those of the trees; and what is pulled again, as its tag may move meanwhile."""
        self.whole = False
        self.known: asyncio.Future[Package | None] = asyncio.get_running_loop().create_future()
        """Gets the package once its lists of files are here and something is missing; None: nothing
        is."""
        self.sight = _Sight()
        self._store, self._pulls, self._reference, self._limit_s = store, pulls, reference, limit_s
        self._filler = Filler(store, fetcher)
        self._filler.chunks.lost, self._filler.chunks.awaited = self._pull_again, self.sight.prepared.set
        self._start = start
        """None for a view that an earlier agent mounted."""
        total = start.traces.prefetched if start is not None else Counter[str]()
        self._prefetch = Prefetch(self._filler, lambda: bool(self._awaited), total)
        self._ahead = ReadAhead(self._filler)
        self._opened = asyncio.Event()
        """Set once the device can be written to."""
        self._filler.device.cells = cells
        self._arranged, self._located, self._pulled = asyncio.Event(), asyncio.Event(), asyncio.Event()
        """Set once it is known where contents lie in the device, where they come from, and once all
        of them are here."""
        self._awaited: dict[int, int] = {}
        """Bytes that each waiting reader waits for, by its number."""
        self._stalls, self._told_refused, self._misses = Stalls(stalls), 0, 0
        """The waits here, how many refusals the supervisor has told of, and reads of what was
        missing."""
        self._holds = ExitStack()
        self._tasks: set[asyncio.Task[None]] = set()
        self._trouble = "it has not come"  # or why the pull failed last
        self._ended = self._served = False

    # -- the package

    def cut(self, method: FillMethod) -> None:
        """Have its device in the cells of the method by which it will be filled. Before it is
        served."""
        self._filler.device.cells = method.cells

    def begin(self) -> None:
        """Begin to pull the package, in the background and until it is here."""
        self._spawn(self._pull())
        if self._start is not None:
            self._spawn(self._start.find())
            self._spawn(_fill_ahead(self, self._start))

    async def _pull(self) -> None:
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
                self._trouble = error.what
                logger.warning("the rest of %s does not come: %s", self._reference, error)
                await asyncio.sleep(pause_s)
                pause_s = min(2 * pause_s, PULL_AGAIN_S_MAX)

    def _pull_again(self) -> None:
        """A content that was here when the package had been pulled was damaged, or evicted."""
        if self._pulled.is_set() and not self.whole:
            self._pulled.clear()
            self._spawn(self._pull())

    async def _list(self, package: Package) -> None:
        """The lists of files are here: the view is shown before what is missing is computed, and
        what the trace names comes before as far as it is known from where."""
        self._tell(package)
        if not self._served:
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
            self._spawn(self._know(package))

    async def _here(self, package: Package) -> None:
        """Everything is here: hold it until it is in the device. Raises NotFound, Conflict when it
        was evicted meanwhile."""
        self._pinned = f"{package.reference.name}@{package.digest}"
        with ExitStack() as holds:
            for layer in package.manifest.layers:
                if layer.media_type == TREE_TYPE:
                    holds.enter_context(self._store.trees.held(layer.digest))
            self._holds.push(holds.pop_all())
        _place(self, replace(self._filler.chunks.whereabouts, replaced=None), "located")
        if not self.known.done():
            self.known.set_result(None)
        elif self.known.result() is None or self._served:
            await self._know(package)
        self._pulled.set()

    async def _know(self, package: Package) -> None:
        if self.layout is None:
            await self.read_layout(package.manifest)

    async def read_layout(self, manifest: Manifest) -> Sequence[Pack]:
        """Compute where contents lie; returns the packs of the catalogs. Raises what `layout_of`
        raises."""
        self.layers, layout, packs = await asyncio.to_thread(layout_of, self._store, manifest, self.arrangement)
        await self.images.begin(images_of(manifest), device_bytes(layout, self._filler.device.cells))
        self.layout = self._filler.layout = layout
        self._bytes_content = layout.bytes_content
        parts = (part for part in (*manifest.layers, *manifest.parts) if part.media_type in (TREE_TYPE, CATALOG_TYPE))
        for blob in filter(None, (self._store.get(part.digest) for part in parts)):
            with suppress(NotFound):  # another agent computes the layout from them
                self._holds.enter_context(blob.held())
        self._arranged.set()
        self.sight.end("arranged")
        return packs

    # -- readers

    def serve(self, directory: Path) -> None:
        """Serve readers of the view whose files are in `directory`, and fill it. Idempotent."""
        if not self._served:
            self._served, self.images.directory = True, directory
            if self._start is not None and self.layout is not None and None not in self.layers:
                trees = [entries for entries in self.layers if entries is not None]
                self._start.mounted(ViewContent(trees, self.layout, self._filler.device.cells))
            self._spawn(self._serve(directory))

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
            self._stalls.refuse(max(0, greeting.refused - self._told_refused))
            self._told_refused = greeting.refused
            self._filler.device.take(greeting.filler, greeting.group)
            self._opened.set()
            with greeting.connection as connection:
                connection.setblocking(False)
                filling = asyncio.create_task(self._fill(directory, connection))
                try:
                    await self._listen(connection)
                finally:
                    filling.cancel()
                    await asyncio.gather(filling, return_exceptions=True)
        self._finish()
        if self.whole:
            await _cover_unused(self, directory)

    async def _listen(self, connection: socket.socket) -> None:
        """Serve readers until the supervisor has ended, or gave its place to its guard."""
        loop = asyncio.get_running_loop()
        while True:
            try:
                notice = Notice.parse(await loop.sock_recv(connection, NOTICE.size))
            except OSError:
                return
            match notice:
                case None:
                    return
                case Notice(kind=kind, number=number, offset=offset, count=count) if kind == FAULT:
                    self._spawn(self._fault(connection, number, offset, count))
                case Notice(kind=kind, offset=offset, count=count) if kind == READ:
                    self._read(self._filler.device.cells.covering(offset, count))
                case Notice(kind=kind, number=number) if kind == EXPIRED:
                    self._told_refused += 1
                    self._stalls.refuse()
                    self._awaited.pop(number, None)

    async def _fault(self, connection: socket.socket, number: int, offset: int, count: int) -> None:
        """Have what a reader waits for filled, and let it go on."""
        began = asyncio.get_running_loop().time()
        self._awaited[number] = count
        failed, refused = [self._trouble], errno.EIO
        try:
            async with asyncio.timeout(self._limit_s):
                await _planned(self)
                assert self.layout is not None
                end = min(offset + count, device_bytes(self.layout, self._filler.device.cells))
                cells = self._filler.device.cells.covering(offset, end - offset)
                self._read(cells)
                missing = [cell for cell in cells if not self._filler.has_cell(cell)]
                self._misses += bool(missing)
                await asyncio.gather(*(keep_trying(self._filler, cell, failed) for cell in missing))
                await self.images.bring(offset, count, failed)
                self._ahead.missed(missing)
            refused = 0
        except (P2PDistError, TimeoutError) as error:
            reason = error.what if isinstance(error, P2PDistError) else failed[-1]
            waited = f"{asyncio.get_running_loop().time() - began:.1f} s, it waited for {count} bytes at {offset}"
            logger.error("a reader of %s gets EIO after %s: %s", self._reference, waited, reason)
        except Exception:
            logger.exception("a reader of %s gets EIO", self._reference)
        finally:
            self._awaited.pop(number, None)
        self._stalls.add(asyncio.get_running_loop().time() - began, refused=bool(refused))
        with suppress(OSError):  # the supervisor has ended: its guard asks again
            connection.send(ORDER.pack(ANSWER, number, refused))

    def _read(self, cells: range) -> None:
        """A reader reads these cells, filled or not."""
        self._ahead.read(cells)
        self._prefetch.read(cells)
        if self._start is not None:
            self._start.read(cells)

    def follow(self) -> None:
        """Note when everything is here, of images that are mounted elsewhere."""
        self.sight.over.set()
        self._spawn(_follow(self))

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
        self.sight.over.set()
        self.sight.prepared.set()
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._finish()
        self.images.close()

    def _finish(self) -> None:
        self.sight.gone.set()
        if self._start is not None:
            self._start.end()
        for task in self._tasks - {asyncio.current_task()}:
            task.cancel()
        self._holds.close()
        self._ahead.close()
        self._filler.close()
        # A view may be shown for months, and the pull of its package is remembered.
        self.layers, self.layout = [], None

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


def _place(view: LazyView, whereabouts: Whereabouts, step: str) -> None:
    """From now on contents can be filled in, from there."""
    before, view._filler.chunks.whereabouts = view._filler.chunks.whereabouts, whereabouts
    if before.replaced is not None:
        before.replaced.set()
    view._located.set()
    view.sight.end(step)


async def _foresee(view: LazyView, manifest: Manifest, packs: Sequence[Pack], layout: DeviceLayout) -> None:
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


async def _gone(view: LazyView) -> None:
    await view.sight.gone.wait()


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
        sum(view._awaited.values()),
        len(view._awaited),
        view._stalls.count,
        round(view._stalls.quantile(0.5), 4),
        round(view._stalls.quantile(0.99), 4),
        view._stalls.refused,
        view._misses,
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


async def _cover_unused(view: LazyView, directory: Path) -> None:
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


async def _fill_ahead(view: LazyView, start: Start) -> None:
    """Fill what the trace of the start names, in its order."""
    try:
        trace = await start.trace
        view.sight.traced = trace is not None
        await view._arranged.wait()
        if trace is None:
            return
        trees = [entries for entries in view.layers if entries is not None]
        mine = await asyncio.to_thread(inherit, trace, trees)
        await _planned(view)
        if view.layout is not None:
            cells = list(cells_of_trace(mine, view.layout, view._filler.device.cells))
            view._prefetch.bytes_packed = view._filler.bytes_packed(cells)
            await view._prefetch.run(cells, view._opened)
            view.sight.end("prefetched")
    finally:
        view.sight.prepared.set()


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


class LazyViews:
    """The lazy views of an agent, by path. `traces` say what starts read, `work` has the records of
    mounts, and `policy` says what that of a package says of showing it lazily."""

    def __init__(
        self,
        store: BlobStore,
        packages: Packages,
        pulls: Pulls,
        fetcher: Fetcher,
        traces: Traces,
        work: Path,
        settings: LazySettings,
        *,
        policy: Callable[[str], bool | None] = lambda reference: None,
    ) -> None:
        self._settings, self._policy, self.traces = settings, policy, traces
        self.stalls = Stalls()
        """The waits in all views since the agent was started."""
        self._work = work
        self._choices: dict[tuple[str, ...], asyncio.Task[Choice]] = {}
        """Which of some ways works on this host, tried when the first view asks for it."""
        self._store, self._packages, self._pulls, self._fetcher = store, packages, pulls, fetcher
        self._views: dict[str, LazyView] = {}
        self._opening = 0
        """Views that are not open yet."""
        self._opened: list[LazyView] = []
        """Views that are open; those that are mounted by now, or will not be, go later."""

    async def open(
        self, reference: str, command: Sequence[str] | None = None, *, alone: bool = False
    ) -> tuple[LazyView, Package] | None:
        """A view of a package, which is known and not mounted yet; None when all of the package is
        here, and there is nothing to wait for. `command` is what follows the package's entry point
        in the command line of the program that the view is for, None without a program. `alone`:
        one program may see it without root, and mounts images itself. Raises Conflict (`eager`)
        where it cannot be lazy, and what pulling raises."""
        self._opened = [view for view in self._opened if not (view.sight.over.is_set() or view.sight.gone.is_set())]
        filling = sum(not view.whole for view in self._views.values())
        if self._opening + len(self._opened) + filling >= VIEWS_MAX:
            raise eager(f"{VIEWS_MAX} lazy views are being filled")
        self._opening += 1
        try:
            opened = await self._open(reference, command, alone, time.monotonic())
        finally:
            self._opening -= 1
        if opened is not None:
            self._opened.append(opened[0])
        return opened

    async def _open(
        self, reference: str, command: Sequence[str] | None, alone: bool, asked_at: float
    ) -> tuple[LazyView, Package] | None:
        found = await self._packages.find(parse_reference(reference), lambda _: None)
        if self._policy(str(found.reference)) is False:
            raise eager("its policy says so")
        if found.manifest.is_sealed:
            raise eager("it is encrypted")
        if is_model(found.manifest):
            raise eager("it is a model, whose files are blobs")
        root = os.geteuid() == 0
        if not root and (not alone or len(images_of(found.manifest)) < len(found.manifest.layers)):
            raise eager("the agent is not root")
        entry = "" if command is None else entry_name((*found.config.entrypoint, *command))
        records = not images_of(found.manifest)
        view = self._view(reference, FUSE.cells, Start(self.traces, reference, entry, records=records))
        view.sight.begun = asked_at
        view.sight.end("found")
        try:
            view.begin()
            if root:  # the metadata comes while the ways are tried
                view.cut(await self.fill_method(found.manifest))
            package = await asyncio.shield(view.known)
            if package is None:
                await view.close()
                return None
            if package.digest != found.digest:  # the other one may want other cells
                raise eager(f"{reference} has become another package meanwhile")
            packs = await view.read_layout(package.manifest)
            assert view.layout is not None
            if view.layout.bytes_content > self._store.capacity:
                raise eager(f"the store has room for {self._store.capacity} bytes, of {view.layout.bytes_content}")
            free = shutil.disk_usage(self._store.root).free
            if free < ROOM_TIMES * view.layout.size:
                raise eager(f"the disk of the store has {free} bytes free, of {ROOM_TIMES * view.layout.size}")
            if view.sight.traced:  # else nothing is read before the view is mounted
                await _foresee(view, package.manifest, packs, view.layout)
        except BaseException:
            await view.close()
            raise
        return view, package

    def _view(self, reference: str, cells: Cells, start: Start | None = None) -> LazyView:
        limit_s = self._settings.limit_s
        return LazyView(self._store, self._pulls, self._fetcher, reference, limit_s, self.stalls, cells, start)

    async def fill_method(self, manifest: Manifest) -> FillMethod:
        """The method to fill a view of a package on this host. Raises Conflict (`eager`) where
        there is none."""
        names = [method.name for method in METHODS if not self._settings.ways or method.name in self._settings.ways]
        if images_of(manifest):
            names = [name for name in names if name == FUSE.name]
        key = tuple(names)
        trial = self._choices.get(key)
        if trial is None:
            trial = self._choices[key] = asyncio.create_task(asyncio.to_thread(choose, self._work, key))
        choice = await asyncio.shield(trial)
        if choice.method is None:
            # What was in the way may go: a full disk, too many processes.
            asyncio.get_running_loop().call_later(TRIED_AGAIN_S, self._forget_choice, key, trial)
            what = "only FUSE fills images" if images_of(manifest) else "no way to fill it works here"
            raise eager(f"{what} ({'; '.join(choice.reasons) or 'it is not among the --lazy-way of the agent'})")
        return choice.method

    def _forget_choice(self, key: tuple[str, ...], trial: asyncio.Task[Choice]) -> None:
        if self._choices.get(key) is trial:
            del self._choices[key]

    async def package_of(self, view: LazyView) -> LazyPackage:
        """What is to be mounted of an open view."""
        assert view.layout is not None
        images = iter(await asyncio.to_thread(view.images.paths))
        layers = [next(images) if entries is None else entries for entries in view.layers]
        return LazyPackage(layers, view.layout, self._settings.limit_s + SUPERVISOR_GRACE_S)

    def mounted(self, path: str, view: LazyView, directory: Path) -> None:
        """A view was mounted at `path` just now: serve it."""
        view.sight.show()
        logger.info("%s is shown, %.0f ms after its metadata", path, 1000 * view.sight.shown_s)
        self._serve(path, view, directory)

    def handed_out(self, path: str, view: LazyView) -> None:
        """The images of a view are mounted by the program that asked for it, and known as `path`
        here."""
        self._views[path] = view
        view.follow()

    def resume(self, path: str, reference: str, directory: Path) -> None:
        """Serve a view that an earlier agent mounted."""
        try:
            cells, arrangement = cells_of(directory), arrangement_of(directory)
        except Unavailable as error:  # readers get EIO, and never what does not belong there
            logger.error("the lazy view %s is not filled: %s", path, error)
            return
        view = self._view(reference, cells)
        view.arrangement = arrangement
        if is_filled(directory):
            view.whole = True
            self._views[path] = view
            protocol.dismiss(directory, WHOLE)  # the agent may have ended before it said so
            view._spawn(_cover_unused(view, directory))
            return
        view.known.set_result(None)
        view.begin()
        self._serve(path, view, directory)

    def _serve(self, path: str, view: LazyView, directory: Path) -> None:
        self._views[path] = view
        view.serve(directory)

    def all(self) -> list[LazyStatus]:
        """How far each view is."""
        return [view.status() for view in self._views.values()]

    def status(self, path: str) -> LazyStatus | None:
        """How far the view at `path` is; None when it is not lazy."""
        view = self._views.get(path)
        return view.status() if view is not None else None

    def cover_at(self, path: str) -> Identity | None:
        """What covers the view at `path`; None where nothing is known to."""
        view = self._views.get(path)
        return view.sight.identity if view is not None else None

    async def unmounted(self, path: str, *, in_use: bool) -> None:
        """A view is gone; one that is still `in_use`, out of sight, is filled to its end."""
        view = self._views.pop(path, None)
        if view is None:
            return
        if in_use and not view.whole:
            name = f"{path} (out of sight {id(view):x})"
            self._views[name], going = view, asyncio.create_task(_gone(view))
            going.add_done_callback(lambda _: view.images.close())
            going.add_done_callback(lambda _: self._views.pop(name, None))
            view._tasks.add(going)
        else:
            await view.close()

    async def close(self) -> None:
        """The agent stops; views and their supervisors stay."""
        for view in list(self._views.values()):  # mounts and unmounts under way end meanwhile
            await view.close()
        self._views.clear()
        await self.traces.close()


def eager(reason: str) -> Conflict:
    """Why a view cannot be lazy."""
    return Conflict(f"the package is not shown lazily: {reason}", remedy="Show it without --lazy", eager=reason)
