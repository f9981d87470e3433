"""The packages that an agent has mounted, and the claims that keep their blobs.

`PackageMounts` leads from a reference to a mounted view: it pulls the package and holds its layers.
`Mounts` keeps the table of mounted views. An entry exists from the mount to the unmount, and its
blobs are held from before the mount until after the unmount. Callers that mount the layer images
themselves get entries too ("images/<id>"). Mounting and unmounting run in threads.

Mounted views outlive the agent, since programs that read a view may have nothing open at the
moment: the next agent finds the records and takes the views over. A view that belongs to a process
(that of `run`) is unmounted when the process and the programs started from the view have ended,
however they end; any other view stays until it is unmounted by request.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import secrets
import stat
import time
from collections.abc import Callable, Collection, Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Protocol, TypeVar

from msgspec import structs

from p2pdist.agent.caller import Caller, make_directory, private_directory
from p2pdist.agent.lazy.view import LazyView
from p2pdist.agent.lazy.views import LazyViews, eager
from p2pdist.agent.pull.packages import Package
from p2pdist.agent.pull.pulls import Pulls
from p2pdist.model.digest import Digest, is_digest, parse_digest
from p2pdist.model.errors import Conflict, Corrupt, NotFound, P2PDistError, Refused, TooLarge, Unavailable, UsageError
from p2pdist.model.image import is_image
from p2pdist.model.manifest import TREE_TYPE, Config, Descriptor, Manifest, decode_manifest
from p2pdist.model.messages import MountRequest, MountStatus
from p2pdist.model.modelpack import blob_name, decode_model, is_model, model_entries
from p2pdist.mount.erofs.patch import is_intact
from p2pdist.mount.layers import Layer, SquashfsLayer, TreeLayer
from p2pdist.mount.lazy.view import mount_lazy, view_directory
from p2pdist.mount.records import IMAGES, LAZY, Process, process, records, user
from p2pdist.mount.sight import NOTHING, Identity, seen
from p2pdist.mount.views import Leftover, MountedView, clean_leftovers, hand_out, mount_view, unmount_view
from p2pdist.store.blobs.blob import Blob
from p2pdist.store.store import BlobStore

logger = logging.getLogger(__name__)

ATTEMPTS = 3
"""Pulls of a package that is evicted again before it can be held."""

MOUNTS_MAX, MOUNTS_OF_USER_MAX = 1000, 500
"""Views at once, and those of one user other than root and the agent's own: the others are left
some."""

RECORDS = "records"
IMAGES_PREFIX = "images/"
TREES_MOUNTED = "erofs"
"""The mount method whose views read the store's files by name."""

LOOK_S, LOOK_S_MAX = 1.0, 60.0
"""Seconds between two checks whether the owner of a view has ended; and at most between two tries
to unmount a view that is still in use then, by something that this agent cannot see."""

Release = Callable[[], None]
"""Gives up a claim on blobs."""

Value = TypeVar("Value")


def _drop_damaged(layers: Sequence[Layer]) -> bool:
    """Remove the damaged images of trees, which the next mount makes again. Returns whether there
    were any."""
    damaged = [layer.image for layer in layers if isinstance(layer, TreeLayer) and not is_intact(layer.image)]
    for image in damaged:
        logger.warning("the image %s is damaged and is made again", image)
        image.unlink(missing_ok=True)
    return bool(damaged)


class PackageMounts:
    """Pulls packages and mounts them. `roots` gives the directories below which users other than
    root and the agent's own may have views; none for no limit. On the event loop."""

    def __init__(
        self,
        store: BlobStore,
        pulls: Pulls,
        mounts: Mounts,
        lazy: LazyViews,
        *,
        roots: Callable[[], Sequence[str]] = tuple,
    ) -> None:
        self._store, self._pulls, self._mounts, self._roots = store, pulls, mounts, roots
        self._lazy = mounts.lazy = lazy
        mounts.hold_inherited(self._hold_again)
        self.observe: Callable[[MountStatus, float], None] = lambda shown, began: None
        """Hears of each view that was made, and when that began, by the monotonic clock."""

    def start(self) -> None:
        """Serve the lazy views of an earlier agent."""
        for status in self._mounts.list():
            if status.how == LAZY:
                name = f"{status.reference.partition('@')[0].partition(':')[0]}@{status.digest}"
                self._serve(status.path, partial(self._lazy.resume, status.path, name))

    def _serve(self, path: str, serve: Callable[[Path], None]) -> None:
        directory = view_directory(path, self._mounts.work)
        if directory is not None:  # else it was unmounted at once
            serve(directory)

    async def mount(self, request: MountRequest, caller: Caller | None = None) -> MountStatus:
        """Pull a package and mount it for `caller`, or the agent itself. Raises what pulling and
        mounting raise."""
        if caller is not None and request.path:
            caller.require_able(f"show a package at {request.path}")
            if not caller.trusted:
                real = await _without_links(_absolute(request.path), caller)
                await _look(check_below, real, self._roots())
        began = time.monotonic()
        if request.lazy and (shown := await self._mount_lazily(request, caller)) is not None:
            self.observe(shown, began)
            return shown
        package, release = await self._pulled(request.package, caller)
        try:
            began = time.monotonic()
            shown = await self._mount(package, request, caller)
            self.observe(shown, began)
            return shown
        finally:
            release()

    async def _mount_lazily(self, request: MountRequest, caller: Caller | None) -> MountStatus | None:
        """Mount a package before its contents are here; None when they are. Raises Conflict, with
        the member `eager`, where that is not possible."""
        if request.how:
            raise eager(f"it is to be shown as {request.how}")
        if is_image(request.package):
            raise eager("it is a model of a registry")
        command = request.command if request.until_exit else None
        alone = request.until_exit and not request.path
        opened = await self._lazy.open(request.package, command, alone=alone)
        if opened is None:
            return None
        # A caller that goes away must not leave a view behind that nothing fills.
        show = self._show_lazily if os.geteuid() == 0 else self._hand_out_lazily
        return await self._mounts.finish(show(*opened, request, caller))

    async def _show_lazily(
        self, view: LazyView, package: Package, request: MountRequest, caller: Caller | None
    ) -> MountStatus:
        """Mount an open view, and serve it."""
        loop = asyncio.get_running_loop()
        try:
            show = partial(
                mount_lazy,
                await self._lazy.package_of(view),
                method=await self._lazy.fill_method(package.manifest),
                stand_by=view.stand_by,
                served=lambda directory: loop.call_soon_threadsafe(view.serve, directory),
            )
            shown = await self._mounts.mount(
                str(package.reference),
                package.digest,
                (),
                package.config,
                request,
                lambda: _nothing_held,
                caller,
                roots=self._roots(),
                show=show,
            )
        except BaseException as error:
            await view.close()
            if isinstance(error, Unavailable | Corrupt):  # Corrupt: images of the bootstrap are broken
                raise eager(error.what) from error
            raise
        self._serve(shown.path, partial(self._lazy.mounted, shown.path, view))
        return structs.replace(shown, lazy=view.status())

    async def _hand_out_lazily(
        self, view: LazyView, package: Package, request: MountRequest, caller: Caller | None
    ) -> MountStatus:
        """Have the caller mount images that it reads through this agent."""
        try:
            identity = (str(package.reference), package.digest, (), package.config)
            asked = structs.replace(request, how=IMAGES)
            shown = await self._mounts.mount(*identity, asked, lambda: _nothing_held, caller)
        except BaseException:
            await view.close()
            raise
        self._lazy.handed_out(shown.path, view)
        layers = package.manifest.layers
        digests, sizes = tuple(layer.digest for layer in layers), tuple(layer.size for layer in layers)
        return structs.replace(shown, images=digests, image_bytes=sizes, lazy=view.status())

    async def _pulled(self, reference: str, caller: Caller | None) -> tuple[Package, Callable[[], None]]:
        """A package that is here and held, and what gives the claim up. Between the end of the pull
        and the claim the store may evict it."""
        for _ in range(ATTEMPTS - 1):
            package = await self._pulls.package(reference, caller)
            with suppress(NotFound, Conflict):
                return package, self._hold(package.manifest)
        package = await self._pulls.package(reference, caller)
        return package, self._hold(package.manifest)

    async def _mount(self, package: Package, request: MountRequest, caller: Caller | None) -> MountStatus:
        layers = self._layers(package)

        def hold() -> Callable[[], None]:
            return self._hold(package.manifest)

        identity = (str(package.reference), package.digest, layers, package.config)
        mount = partial(self._mounts.mount, *identity, request, hold, caller, roots=self._roots())
        try:
            return await mount()
        except Corrupt:
            if not await asyncio.to_thread(_drop_damaged, layers):
                raise
            return await mount()

    def _hold(self, manifest: Manifest) -> Callable[[], None]:
        """Hold all layers of a package; returns what gives them up. Raises NotFound, Conflict."""
        claims = ExitStack()
        try:
            for layer in manifest.layers:
                if layer.size or not is_model(manifest):  # nothing is stored of an empty file of a model
                    claims.enter_context(self._held(layer))
        except BaseException:
            claims.close()
            raise
        return claims.close

    def _hold_again(self, digest: Digest) -> Callable[[], None]:
        """Hold the layers of a view that an earlier agent mounted: its programs read on, and the
        kernel opens objects late. One of which something is damaged is held as well: nothing else
        of it may go."""
        claims = ExitStack()
        try:  # the record may be damaged
            data = self._store.read_document(self._store.opened.manifest(digest))
            if data is None:
                raise NotFound(f"the manifest {digest} is not in the store")
            layers = (decode_model(data) or decode_manifest(data)).layers
        except P2PDistError as error:
            logger.error("a package that is still in use cannot be kept from eviction: %s", error)
            return claims.close
        for layer in filter(lambda layer: layer.size, layers):
            try:
                claims.enter_context(self._held_in_part(layer))
            except P2PDistError as error:
                logger.error("a layer of a package that is still in use is gone: %s", error)
        return claims.close

    def _held_in_part(self, layer: Descriptor) -> AbstractContextManager[object]:
        """Holds what is here of a layer. Raises NotFound."""
        if layer.media_type == TREE_TYPE:
            return self._store.trees.held(layer.digest, in_part=True)
        blob = self._store.get(layer.digest)
        if blob is None:
            raise NotFound(f"{layer.digest} is not in the store")
        return blob.held()

    def _layers(self, package: Package) -> list[Layer]:
        """What a view of the package shows, bottom to top. Raises Corrupt, UsageError."""
        layers = package.manifest.layers
        if not is_model(package.manifest):
            return [self._layer(layer) for layer in layers]
        entries, store = model_entries(layers), self._store
        blobs = {self._complete(layer).path.parent for layer in layers if layer.size}
        image = store.trees.images.path(package.digest)
        return [TreeLayer(lambda: entries, image, next(iter(blobs), store.root), name=blob_name)]

    def _layer(self, layer: Descriptor) -> Layer:
        if layer.media_type != TREE_TYPE:
            return SquashfsLayer(self._complete(layer).path)
        trees, root = self._store.trees, layer.digest
        variants = partial(trees.keep_variants, root)
        return TreeLayer(lambda: trees.entries(root), trees.images.path(root), self._store.objects.directory, variants)

    def _held(self, layer: Descriptor) -> AbstractContextManager[object]:
        """Holds what a view of the layer reads."""
        if layer.media_type == TREE_TYPE:
            return self._store.trees.held(layer.digest)
        return self._complete(layer).held()

    def _complete(self, layer: Descriptor) -> Blob:
        blob = self._store.get(layer.digest)
        if blob is None or not blob.complete:
            raise NotFound(f"the layer {layer.digest} was evicted", remedy="Give the store more capacity")
        return blob


@dataclass(frozen=True, slots=True)
class _Entry:
    status: MountStatus
    release: Release
    owner: Process | None = None
    """The process to which the view belongs; None when it stays until it is unmounted."""
    uid: int | None = None
    """The user that mounted it; None where that is not known."""
    made: Caller | None = None
    """The process by the rights of which the directory was made; None where it was there before."""


class Show(Protocol):
    """Makes a package visible; arguments are those of `mount_view`."""

    def __call__(
        self, target: Path, /, *, work: Path, writable: bool, label: str, at: int | None, owner: Process | None
    ) -> MountedView: ...


_paths = ThreadPoolExecutor(32, thread_name_prefix="mount-paths")
"""Looks at paths that users name. They may be on file systems that hang, and what else is done in
threads is not to wait behind them, nor is a view of which no user names the path."""


async def _look(look: Callable[..., Value], *arguments: Any) -> Value:
    """Call a function of a path that a user names, in a thread. Raises what it raises."""
    return await asyncio.get_running_loop().run_in_executor(_paths, partial(look, *arguments))


def _shown(show: Callable[[], MountedView]) -> tuple[MountedView, Identity]:
    """Show a package; returns the view, and what is seen there. In a thread."""
    view = show()
    return view, seen(view.path) or NOTHING


def _nothing_held() -> None:
    return None


def _lazy(status: MountStatus, views: LazyViews) -> MountStatus:
    """The status of a view, with how far it is if it is lazy; such a one may be covered since."""
    lazy, cover = views.status(status.path), views.cover_at(status.path)
    if cover is not None:
        status = structs.replace(status, device=cover[0], inode=cover[1])
    return status if lazy is None else structs.replace(status, lazy=lazy)


async def _sees_else(path: str, caller_sees: Identity | None) -> bool:
    """Whether this process sees at `path` something else than a caller, where both say."""
    return caller_sees is not None and await _look(seen, path) not in (None, caller_sees)


def _method(request: MountRequest) -> str | None:
    return None if request.how in ("", IMAGES) else request.how


class Mounts:
    """The mounted views of this agent. `work_dir` is created; it holds the records of mounts, and
    the views for which the request names no path.

    A view without a path lies in a directory that lets its user alone in and belongs to the agent,
    so that the user cannot lead the mount elsewhere.

    The constructor takes over the views of an earlier agent, and removes what a killed agent had
    not finished. Used from one event loop; one agent at a time may use a `work_dir`. `start` begins
    to watch the views that belong to a process.
    """

    def __init__(self, work_dir: Path) -> None:
        self.work = work_dir / RECORDS
        self._views = work_dir / "shown"
        work_dir.mkdir(mode=0o755, parents=True, exist_ok=True)
        make_directory(self.work, 0o700)  # mount points of layers among them
        make_directory(self._views, 0o711)
        self._views = self._views.resolve()
        self._entries: dict[str, _Entry] = {}
        """By path, or "images/<id>"."""
        self._reserved: set[str] = set()
        """Paths at which a mount or an unmount is under way."""
        self._kept: list[Release] = []
        """Claims of views that are unmounted and still in use: they last as long as this agent."""
        self._running: set[asyncio.Task[Any]] = set()
        """Mounts and unmounts under way."""
        self._closed = False
        self._watches: set[asyncio.Task[None]] = set()
        """One task for each view that belongs to a process, or whose file system hangs."""
        self.lazy: LazyViews | None = None
        self._started = False
        self.leftovers: list[Leftover] = clean_leftovers(self.work)
        for leftover in self.leftovers:
            outcome = "removed" if leftover.removed else leftover.note or "kept"
            logger.info("an earlier agent showed a package at %s: %s", leftover.path, outcome)
            if not leftover.removed:
                self._entries[str(leftover.path)] = _Entry(
                    _inherited(leftover), _nothing_held, leftover.owner, _user(leftover)
                )

    def hold_inherited(self, hold: Callable[[Digest], Release]) -> None:
        """Hold what the views of an earlier agent read: `hold` gets the digest of each manifest."""
        for path, entry in self._entries.items():
            if entry.release is _nothing_held and entry.status.digest and entry.status.how != LAZY:
                self._entries[path] = replace(entry, release=hold(Digest(entry.status.digest)))

    def start(self) -> None:
        """Watch the views that belong to a process, those of an earlier agent included."""
        self._started = True
        hanging = {str(leftover.path): leftover.later for leftover in self.leftovers if leftover.later is not None}
        for key, entry in self._entries.items():
            if key in hanging:
                self._keep(asyncio.create_task(self._cleaned(key, entry, asyncio.wrap_future(hanging[key]))))
            else:
                self._watch(key, entry)

    async def _cleaned(self, key: str, entry: _Entry, outcome: asyncio.Future[Leftover]) -> None:
        """Go on with a view whose file system did not answer at first, once it does."""
        removed = (await outcome).removed
        if self._entries.get(key) is not entry:
            return
        if removed:
            del self._entries[key]
            if self.lazy is not None:
                await self.lazy.unmounted(key, in_use=False)
            entry.release()
        else:
            self._watch(key, entry)

    def list(self) -> list[MountStatus]:
        """The mounted views, and the images that callers mount themselves, by path."""
        statuses = [self._entries[path].status for path in sorted(self._entries)]
        if self.lazy is None:
            return statuses
        return [_lazy(status, self.lazy) for status in statuses]

    async def mount(
        self,
        reference: str,
        manifest_digest: Digest,
        layers: Sequence[Layer],
        config: Config,
        request: MountRequest,
        hold: Callable[[], Release],
        caller: Caller | None = None,
        *,
        roots: Sequence[str] = (),
        show: Show | None = None,
    ) -> MountStatus:
        """Mount verified `layers`, bottom to top, as `request` says, for `caller`, or the agent
        itself; `show` mounts in their place where it is given. `roots` are directories below which
        a caller that is not trusted may name a path; none for no limit. `hold` claims them and
        returns what gives the claim up. Raises what `p2pdist.mount.views.mount_view` raises,
        Refused for a path that the caller may not write to, and TooLarge over MOUNTS_MAX and
        MOUNTS_OF_USER_MAX; then nothing is held."""
        caller = caller or Caller.agent()
        if self._closed:
            raise Conflict("the agent is stopping and shows nothing new", remedy="Start it again")
        _require_room(self._entries.values(), len(self._reserved), caller)
        status = MountStatus(
            reference,
            manifest_digest,
            "",
            request.how,
            writable=request.writable,
            entrypoint=config.entrypoint,
            env=config.env,
            working_dir=config.working_dir,
            pid=caller.pid if request.until_exit else 0,
        )
        images = [layer.path for layer in layers if isinstance(layer, SquashfsLayer)]
        show = show or partial(mount_view, layers, method=_method(request), checked=True)
        if len(images) == len(layers):
            if request.how == "userns" or (request.how == "images" and os.geteuid() != 0):
                return await self.finish(self._hand_out(status, images, hold, caller.uid))
        elif request.how == "userns":
            raise UsageError("a package with tree layers cannot be shown in a user namespace", remedy="Leave out --how")
        if request.path and not caller.trusted:
            return await self.finish(self._mount_for(caller, request.path, status, show, hold, roots))
        target = await (_look if request.path else asyncio.to_thread)(self._target, request.path, caller.uid)
        self._reserve(target)
        return await self.finish(self._mount(str(target), status, show, hold, uid=caller.uid))

    def _reserve(self, target: Path) -> None:
        key = str(target)
        if key in self._entries or key in self._reserved:
            raise Conflict(f"a package is shown at {target} already", remedy=f"p2pdist umount {target}")
        self._reserved.add(key)

    async def _mount_for(
        self,
        caller: Caller,
        path: str,
        status: MountStatus,
        show: Show,
        hold: Callable[[], Release],
        roots: Sequence[str],
    ) -> MountStatus:
        """Mount at a path of another user, which only that user's rights open, and which that user
        may move at any time."""
        target = _absolute(path)
        at, made = await caller.act(partial(_claim, target, caller.uid), f"show a package at {target}")
        try:
            real = Path(os.readlink(f"/proc/self/fd/{at}"))
            await _look(check_below, real, roots)  # of what is open: the user may have moved the directory meanwhile
            self._reserve(real)
            return await self._mount(
                str(real), status, show, hold, uid=caller.uid, at=at, made=caller if made else None
            )
        except BaseException:
            if made:
                await caller.act(partial(_remove_empty, target), f"remove {target}")
            raise
        finally:
            os.close(at)

    async def unmount(
        self, path: str, force: bool = False, caller: Caller | None = None, *, caller_sees: Identity | None = None
    ) -> MountStatus:
        """Unmount a view; returns its last status. Raises NotFound, Refused for a view of another
        user, or Conflict when it is in use or the caller sees something else at `path`, unless
        `force`."""
        ours = path in self._entries and path.startswith(f"{self._views}/")
        key = path if ours or path.startswith(IMAGES_PREFIX) else str(await _without_links(_absolute(path), caller))
        entry = self._entries.get(key)
        if caller is not None and entry is not None and entry.uid != caller.uid:
            caller.require_trusted(f"unmount {key}, which is shown for another user")
        if not force and entry is not None and await _sees_else(key, caller_sees):
            raise Conflict(
                f"what the agent shows at {path} is not what the caller sees there, which has mounts of its own",
                remedy="Unmount it from the host's mount namespace, or use --force",
            )
        return await self.finish(self._unmount(key, force))

    async def close(self) -> None:
        """A clean stop: views stay mounted, for the next agent to take over, and claims are given
        up."""
        self._closed = True
        for watch in self._watches:
            watch.cancel()
        while self._running:
            await asyncio.wait(self._running)
        for entry in self._entries.values():
            entry.release()
        self._entries.clear()

    def _watch(self, key: str, entry: _Entry) -> None:
        if entry.owner is None or not self._started or self._closed:
            return
        self._keep(asyncio.create_task(_outlast(self, key, entry, entry.owner), name=f"view {key}"))

    def _keep(self, task: asyncio.Task[None]) -> None:
        self._watches.add(task)
        task.add_done_callback(self._watches.discard)

    async def finish(self, work: Coroutine[Any, Any, MountStatus]) -> MountStatus:
        """Do `work` to its end: a caller that goes away must leave no mount without entry."""
        task = asyncio.create_task(work)
        self._running.add(task)
        task.add_done_callback(self._running.discard)
        return await asyncio.shield(task)

    async def _hand_out(
        self, status: MountStatus, layers: Sequence[Path], hold: Callable[[], Release], uid: int
    ) -> MountStatus:
        key = IMAGES_PREFIX + secrets.token_hex(8)
        images = tuple(str(path.resolve()) for path in layers)
        why = "images: the agent is not root, the caller shows them to itself"
        status = structs.replace(status, path=key, how=IMAGES, images=images, why=why)
        owner, release = _owner(status), hold()
        try:
            await asyncio.to_thread(
                hand_out,
                key,
                images,
                work=self.work,
                label=_label(status, uid),
                writable=status.writable,
                owner=owner,
            )
        except BaseException:
            release()
            raise
        return self._enter(key, _Entry(status, release, owner, uid))

    def _enter(self, key: str, entry: _Entry) -> MountStatus:
        self._entries[key] = entry
        self._watch(key, entry)
        return entry.status

    def _target(self, path: str, uid: int) -> Path:
        if not path:
            return private_directory(self._views, uid) / secrets.token_hex(8)
        return Path(os.path.realpath(_absolute(path)))

    async def _mount(
        self,
        key: str,
        status: MountStatus,
        show: Show,
        hold: Callable[[], Release],
        *,
        uid: int,
        at: int | None = None,
        made: Caller | None = None,
    ) -> MountStatus:
        release: Release = _nothing_held
        owner = _owner(status)
        try:
            release = hold()
            label = _label(status, uid)
            make = partial(show, Path(key), work=self.work, writable=status.writable, label=label, at=at, owner=owner)
            view, (device, inode) = await asyncio.to_thread(_shown, make)
        except BaseException:
            release()
            raise
        finally:
            self._reserved.discard(key)
        fields = {"path": str(view.path), "how": view.method, "why": view.why, "device": device, "inode": inode}
        return self._enter(key, _Entry(structs.replace(status, **fields), release, owner, uid, made))

    async def _unmount(self, key: str, force: bool) -> MountStatus:
        entry = self._entries.get(key)
        if entry is None or key in self._reserved:
            raise NotFound(f"no package is shown at {key}", remedy="p2pdist status lists what is shown")
        self._reserved.add(key)
        try:
            in_use = await asyncio.to_thread(self._unmount_blocking, Path(key), force)
        finally:
            self._reserved.discard(key)
        self._entries.pop(key, None)
        if self.lazy is not None:
            await self.lazy.unmounted(key, in_use=in_use)
        if in_use and entry.status.how == TREES_MOUNTED:
            logger.warning("%s is out of sight and in use; what it shows is kept until this agent ends", key)
            self._kept.append(entry.release)
        else:
            entry.release()
        if entry.made is not None:  # last: the file system of the user may hang
            await entry.made.act(partial(_remove_empty, Path(key)), f"remove {key}")
        return entry.status

    def _unmount_blocking(self, path: Path, force: bool) -> bool:
        """Unmount in a thread; returns whether the view was in use. Raises Conflict when it is,
        unless `force`."""
        try:
            unmount_view(path, work=self.work)
        except Conflict:
            if not force:
                raise
            unmount_view(path, work=self.work, force=True)
            return True
        return False


async def _outlast(mounts: Mounts, key: str, entry: _Entry, owner: Process) -> None:
    """Unmount a view when its last user has ended. A program that uses the view after its owner
    has ended becomes its owner."""
    pause_s = LOOK_S
    while mounts._entries.get(key) is entry:
        if owner.alive:
            await asyncio.sleep(LOOK_S)
            continue
        heir = None if key.startswith(IMAGES_PREFIX) else await asyncio.to_thread(user, Path(key))
        if heir is not None:
            owner, pause_s = heir, LOOK_S
            continue
        try:
            await mounts.unmount(key)
        except NotFound:
            return  # it was unmounted meanwhile
        except P2PDistError as error:
            level = logging.DEBUG if isinstance(error, Conflict) else logging.ERROR
            logger.log(level, "the view of a process that has ended stays: %s", error)
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, LOOK_S_MAX)
        else:
            logger.info("%s is no longer shown: its process has ended", key)


def _require_room(entries: Collection[_Entry], coming: int, caller: Caller) -> None:
    """Raises TooLarge where there are as many views as there may be, of all users or of one that is
    not trusted."""
    if len(entries) + coming >= MOUNTS_MAX:
        raise TooLarge(f"{MOUNTS_MAX} packages are shown already", remedy="Unmount some: p2pdist status lists them")
    if not caller.trusted and sum(entry.uid == caller.uid for entry in entries) >= MOUNTS_OF_USER_MAX:
        raise TooLarge(
            f"{MOUNTS_OF_USER_MAX} packages are shown for user {caller.uid} already",
            remedy="Unmount some: p2pdist status lists them",
        )


def _absolute(path: str) -> Path:
    """Raises UsageError."""
    if not os.path.isabs(path) or "\0" in path:
        raise UsageError(f"{path!r} is not an absolute path", remedy="Name the directory from the root on")
    return Path(path)


async def _without_links(path: Path, caller: Caller | None) -> Path:
    """Where a path leads, as far as the caller itself can see: the rights of the agent would tell
    where the links of others lead. The path may be on a file system that hangs."""
    if caller is None or caller.trusted or os.geteuid() != 0:
        return await _look(_real, path)
    return await caller.act(partial(_real, path), f"look at {path}")


def _real(path: Path) -> Path:
    return Path(os.path.realpath(path))


def check_below(path: Path, roots: Sequence[str]) -> None:
    """Raises Refused for a path without links that is below none of the directories `roots`; where
    there are none it may be anywhere."""
    real = [Path(os.path.realpath(root)) for root in roots]
    if real and not any(root in path.parents for root in real):
        raise Refused(
            f"packages are not shown at {path} for users of this host",
            remedy=f"Name a directory below {' or '.join(roots[:5])}, or leave out the path",
        )


def _claim(target: Path, uid: int) -> tuple[int, bool]:
    """With the rights of a user: a descriptor of a directory that the user may cover with a mount,
    and whether it was made for that. The user may write to the directory and, where other users may
    as well (the sticky bit), owns it. Raises OSError, NotFound, Conflict."""
    made = False
    try:
        target.mkdir(0o755)
        made = True
    except FileExistsError:
        pass
    except FileNotFoundError as error:
        raise NotFound(f"{target.parent} does not exist", remedy="Create it first") from error
    try:
        descriptor = os.open(target, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    except NotADirectoryError as error:
        raise Conflict(f"{target} is not a directory", remedy="Name an empty directory, or a new one") from error
    try:
        status = os.fstat(descriptor)
        if status.st_mode & stat.S_ISVTX and status.st_uid != uid:
            raise PermissionError(errno.EPERM, os.strerror(errno.EPERM), str(target))
        if (
            not made
        ):  # whether it may be written to is tried: what modes, lists and mounts say together the kernel knows
            probe = f".p2pdist-{secrets.token_hex(8)}"
            os.mkdir(probe, 0o700, dir_fd=descriptor)
            os.rmdir(probe, dir_fd=descriptor)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor, made


def _remove_empty(path: Path) -> None:
    with suppress(OSError):  # the directory is gone, or no longer empty
        path.rmdir()


def _label(status: MountStatus, uid: int) -> str:
    return f"{status.reference} {status.digest} {uid}"


def _owner(status: MountStatus) -> Process | None:
    return process(status.pid) if status.pid else None


def mounted_manifests(work_dir: Path) -> set[Digest]:
    """The manifests of the views that an earlier agent with this `work_dir` mounted."""
    labels = (record.label.split(" ") for record in records(work_dir / RECORDS))
    return {parse_digest(label[1]) for label in labels if len(label) > 1 and is_digest(label[1])}


def _inherited(leftover: Leftover) -> MountStatus:
    reference, digest, *_ = [*leftover.label.split(" "), "", ""]
    return MountStatus(
        reference,
        Digest(digest),
        str(leftover.path),
        leftover.method,
        why="shown by an earlier agent",
        writable=leftover.writable,
        images=leftover.images if leftover.method == IMAGES else (),
        pid=leftover.owner.pid if leftover.owner else 0,
    )


def _user(leftover: Leftover) -> int | None:
    """The user that mounted it; earlier releases did not note it."""
    _, _, uid, *_ = [*leftover.label.split(" "), "", "", ""]
    return int(uid) if uid.isdecimal() else None
