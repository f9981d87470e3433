"""The lazy views of an agent: opens them, by the bootstrap of the package where it has one, and
serves those that an earlier agent mounted.
"""

from __future__ import annotations

import asyncio
import logging
import os
import shutil
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from p2pdist.agent.lazy.bootstrap import bring_bootstrap, useful_bootstrap
from p2pdist.agent.lazy.chunks import Fetcher
from p2pdist.agent.lazy.readers import Stalls
from p2pdist.agent.lazy.traces import Start, Traces
from p2pdist.agent.lazy.view import SUPERVISOR_GRACE_S, LazyView, cover_unused, foresee, images_of
from p2pdist.agent.pull.packages import Package, Packages
from p2pdist.agent.pull.pulls import Pulls
from p2pdist.model.bootstrap import Bootstrap
from p2pdist.model.device import Cells, DeviceLayout
from p2pdist.model.errors import Conflict, Unavailable
from p2pdist.model.manifest import Descriptor, Manifest, parse_reference
from p2pdist.model.messages import LazyStatus
from p2pdist.model.modelpack import is_model
from p2pdist.model.trace import entry_name
from p2pdist.mount.lazy.fill_method import FUSE, METHODS, FillMethod
from p2pdist.mount.lazy.trial import Choice, choose
from p2pdist.mount.lazy.view import (
    LazyPackage,
    arrangement_of,
    cells_of,
    is_filled,
    stand_by_for,
)
from p2pdist.mount.sight import Identity
from p2pdist.mount.supervisor import protocol
from p2pdist.mount.supervisor.protocol import WHOLE
from p2pdist.store.store import BlobStore

VIEWS_MAX = 16
ROOM_TIMES = 3
"""The disk must have so many times the bytes of the contents free: for packs, objects, device."""

LIMIT_S = 60.0
"""How long a reader waits, unless the agent is told otherwise."""

TRIED_AGAIN_S = 60.0
"""Where no way to fill works, the ways are tried again after so long."""


logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class LazySettings:
    """How an agent shows packages lazily."""

    limit_s: float = LIMIT_S
    """How long a read waits for its bytes."""
    ways: tuple[str, ...] = ()
    """The ways to fill views that are tried; none for all."""


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
        self._going: dict[str, asyncio.Task[None]] = {}
        """Wait until nothing serves views that are out of sight, by their names."""
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
            view.find_trace(found.manifest)
            part = await asyncio.to_thread(useful_bootstrap, self._store, found.manifest) if root else None
            if part is not None and await self._begin_by(part, view, found):
                return view, found
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
            self._check_room(view.layout)
            if view.sight.traced:  # else nothing is read before the view is mounted
                await foresee(view, package.manifest, packs, view.layout)
        except BaseException:
            await view.close()
            raise
        return view, package

    async def _begin_by(self, part: Descriptor, view: LazyView, package: Package) -> bool:
        """Have a view shown by the bootstrap of its package. False where that is not possible, and
        nothing has begun. Raises Conflict (`eager`)."""
        come = partial(view.sight.know, part.size)
        bringing = asyncio.create_task(bring_bootstrap(self._fetcher, part, package.manifest.layers, come))
        try:  # it comes while the ways are tried
            method = await self.fill_method(package.manifest)
            if method.cells.headed:
                with suppress(OSError):  # it is begun when the view is mounted then
                    limit_s = self._settings.limit_s + SUPERVISOR_GRACE_S
                    view.stand_by = await asyncio.to_thread(stand_by_for, self._work, limit_s)
            bootstrap = await bringing if method.cells.headed else None
        finally:
            bringing.cancel()
        if bootstrap is None:
            return False
        self._check_room(bootstrap)
        view.cut(method)
        view.show(bootstrap, package)
        return True

    def _check_room(self, content: DeviceLayout | Bootstrap) -> None:
        """Raises Conflict (`eager`) where there is no room for a view and what it shows."""
        if content.bytes_content > self._store.capacity:
            raise eager(f"the store has room for {self._store.capacity} bytes, of {content.bytes_content}")
        free = shutil.disk_usage(self._store.root).free
        if free < ROOM_TIMES * content.size:
            raise eager(f"the disk of the store has {free} bytes free, of {ROOM_TIMES * content.size}")

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
        if (bootstrap := view.bootstrap) is not None:
            return LazyPackage(bootstrap.images, bootstrap, self._settings.limit_s + SUPERVISOR_GRACE_S)
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
            view.spawn(cover_unused(view, directory))
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
            self._views[name] = view
            going = self._going[name] = asyncio.create_task(_gone(view))
            going.add_done_callback(lambda _: view.images.close())
            going.add_done_callback(lambda _: (self._views.pop(name, None), self._going.pop(name, None)))
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


async def _gone(view: LazyView) -> None:
    await view.sight.gone.wait()
