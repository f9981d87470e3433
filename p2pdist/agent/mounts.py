"""The packages that an agent shows, and the claims that keep their blobs.

An entry is made when a package is shown and goes when it is no longer; from before the mount until after the unmount its blobs are
held. Entries are also made for callers that show the layer images to themselves ("images/<id>"). Mounting is done in threads.

What is shown outlives the agent, since programs that read it may have nothing open at the moment: the next agent finds the records and
takes it over. A view that belongs to a process (that of `run`) goes when the process and the programs started from the view have ended,
however they end; any other view stays until it is unmounted.
"""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from msgspec import structs

from p2pdist.model.digest import Digest
from p2pdist.model.errors import Conflict, NotFound, P2PDistError, TooLarge, UsageError
from p2pdist.model.messages import MountRequest, MountStatus
from p2pdist.model.package import Config
from p2pdist.mount.holders import Process, process, user
from p2pdist.mount.layers import Layer, SquashfsLayer
from p2pdist.mount.record import IMAGES
from p2pdist.mount.show import Leftover, Shown, clean_leftovers, hand_out, show, unshow

MOUNTS_MAX = 1000
IMAGES_PREFIX = "images/"
TREES_MOUNTED = "erofs"
"""The way of showing that reads the store's files by name as long as it lasts."""

LOOK_S, LOOK_S_MAX = 1.0, 60.0
"""How often it is looked whether the owner of a view has ended; and, when something uses the view then which this agent cannot see, how
rarely at most it is tried to take the view away."""

Release = Callable[[], None]

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Entry:
    status: MountStatus
    release: Release
    owner: Process | None = None
    """The process for which it is shown; None when it stays until it is unmounted."""


def _nothing_held() -> None:
    return None


class Mounts:
    """What this agent shows. `work_dir` is created; records of mounts are below it, and packages for which no path was asked.

    The constructor takes over what an earlier agent showed, and removes what a killed one had not finished. Used from one event loop;
    one agent at a time may use a `work_dir`. `start` begins to look after views that belong to a process.
    """

    def __init__(self, work_dir: Path) -> None:
        self._work = work_dir / "records"
        self._places = work_dir / "shown"
        for directory in (self._work, self._places):
            directory.mkdir(mode=0o755, parents=True, exist_ok=True)
        self._entries: dict[str, _Entry] = {}
        self._reserved: set[str] = set()
        self._kept: list[Release] = []
        """Claims that are not given up any more."""
        self._running: set[asyncio.Task[Any]] = set()
        self._closed = False
        self._watches: set[asyncio.Task[None]] = set()
        """One task for each view that belongs to a process."""
        self._started = False
        self.leftovers: list[Leftover] = clean_leftovers(self._work)
        for leftover in self.leftovers:
            outcome = "removed" if leftover.removed else leftover.note or "kept"
            _log.info("an earlier agent showed a package at %s: %s", leftover.path, outcome)
            if not leftover.removed:
                self._entries[str(leftover.path)] = _Entry(_adopted(leftover), _nothing_held, leftover.owner)

    def adopt(self, hold: Callable[[Digest], Release]) -> None:
        """Claim what the packages that an earlier agent showed are shown from: `hold` is given the manifest's digest."""
        for path, entry in self._entries.items():
            if entry.release is _nothing_held and entry.status.digest:
                self._entries[path] = replace(entry, release=hold(Digest(entry.status.digest)))

    def start(self) -> None:
        """Look after the views that belong to a process, those of an earlier agent among them."""
        self._started = True
        for key, entry in self._entries.items():
            self._watch(key, entry)

    def list(self) -> list[MountStatus]:
        """What is shown now, and images that are handed out, by path."""
        return [self._entries[path].status for path in sorted(self._entries)]

    async def show(
        self,
        reference: str,
        manifest_digest: Digest,
        layers: Sequence[Layer],
        config: Config,
        request: MountRequest,
        hold: Callable[[], Release],
        pid: int = 0,
    ) -> MountStatus:
        """Show verified `layers`, bottom to top, as `request` says. `hold` claims them and returns what gives the claim up. `pid` is the
        process to which the view belongs, 0 for none. Raises what `p2pdist.mount.show.show` raises, and TooLarge over MOUNTS_MAX; then
        nothing is held."""
        if self._closed:
            raise Conflict("the agent is stopping and shows nothing new", remedy="Start it again")
        if len(self._entries) + len(self._reserved) >= MOUNTS_MAX:
            raise TooLarge(f"{MOUNTS_MAX} packages are shown already", remedy="Unmount some: p2pdist status lists them")
        status = MountStatus(
            reference,
            manifest_digest,
            "",
            request.how,
            writable=request.writable,
            entrypoint=config.entrypoint,
            env=config.env,
            working_dir=config.working_dir,
            pid=pid,
        )
        images = [layer.path for layer in layers if isinstance(layer, SquashfsLayer)]
        if len(images) == len(layers):
            if request.how == "userns" or (request.how == "images" and os.geteuid() != 0):
                return await self._finish(self._hand_out(status, images, hold))
        elif request.how == "userns":
            raise UsageError("a package with tree layers cannot be shown in a user namespace", remedy="Leave out --how")
        target = self._target(request.path)
        key = str(target)
        if key in self._entries or key in self._reserved:
            raise Conflict(f"a package is shown at {target} already", remedy=f"p2pdist umount {target}")
        self._reserved.add(key)
        return await self._finish(self._show(key, status, layers, hold))

    async def unshow(self, path: str, force: bool = False) -> MountStatus:
        """Undo `show`; returns what was shown. Raises NotFound, or Conflict when it is in use and not `force`."""
        key = path if path.startswith(IMAGES_PREFIX) else os.path.realpath(path)
        return await self._finish(self._unshow(key, force))

    async def close(self) -> None:
        """A clean stop: what is shown stays, for the next agent to take over, and claims are given up."""
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
        task = asyncio.create_task(self._outlast(key, entry, entry.owner), name=f"view {key}")
        self._watches.add(task)
        task.add_done_callback(self._watches.discard)

    async def _outlast(self, key: str, entry: _Entry, owner: Process) -> None:
        """Take a view away when its last user has ended. A program that uses it after its owner is waited for as the owner was."""
        pause = LOOK_S
        while self._entries.get(key) is entry:
            if owner.alive:
                await asyncio.sleep(LOOK_S)
                continue
            found = None if key.startswith(IMAGES_PREFIX) else await asyncio.to_thread(user, Path(key))
            if found is not None:
                owner, pause = found, LOOK_S
                continue
            try:
                await self.unshow(key)
            except NotFound:
                return  # it was unmounted meanwhile
            except P2PDistError as error:
                level = logging.DEBUG if isinstance(error, Conflict) else logging.ERROR
                _log.log(level, "the view of a process that has ended stays: %s", error)
                await asyncio.sleep(pause)
                pause = min(2 * pause, LOOK_S_MAX)
            else:
                _log.info("%s is no longer shown: its process has ended", key)

    async def _finish(self, work: Coroutine[Any, Any, MountStatus]) -> MountStatus:
        # A caller that goes away must not leave a mount behind that nobody knows of.
        task = asyncio.create_task(work)
        self._running.add(task)
        task.add_done_callback(self._running.discard)
        return await asyncio.shield(task)

    async def _hand_out(self, status: MountStatus, layers: Sequence[Path], hold: Callable[[], Release]) -> MountStatus:
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
                work=self._work,
                label=_label(status),
                writable=status.writable,
                owner=owner,
            )
        except BaseException:
            release()
            raise
        return self._enter(key, _Entry(status, release, owner))

    def _enter(self, key: str, entry: _Entry) -> MountStatus:
        self._entries[key] = entry
        self._watch(key, entry)
        return entry.status

    def _target(self, path: str) -> Path:
        if not path:
            return self._places.resolve() / secrets.token_hex(8)
        if not os.path.isabs(path) or "\0" in path:
            raise UsageError(f"{path!r} is not an absolute path", remedy="Name the directory from the root on")
        return Path(os.path.realpath(path))

    async def _show(
        self, key: str, status: MountStatus, layers: Sequence[Layer], hold: Callable[[], Release]
    ) -> MountStatus:
        how = None if status.how in ("", IMAGES) else status.how
        release: Release = _nothing_held
        owner = _owner(status)
        try:
            release = hold()
            done: Shown = await asyncio.to_thread(
                show,
                layers,
                Path(key),
                work=self._work,
                writable=status.writable,
                how=how,
                label=_label(status),
                checked=True,
                owner=owner,
            )
        except BaseException:
            release()
            raise
        finally:
            self._reserved.discard(key)
        status = structs.replace(status, path=str(done.path), how=done.how, why=done.why)
        return self._enter(key, _Entry(status, release, owner))

    async def _unshow(self, key: str, force: bool) -> MountStatus:
        entry = self._entries.get(key)
        if entry is None or key in self._reserved:
            raise NotFound(f"no package is shown at {key}", remedy="p2pdist status lists what is shown")
        self._reserved.add(key)
        try:
            in_use = await asyncio.to_thread(self._take_away, Path(key), force)
        finally:
            self._reserved.discard(key)
        del self._entries[key]
        if in_use and entry.status.how == TREES_MOUNTED:
            _log.warning("%s is out of sight and in use; what it shows is kept until this agent ends", key)
            self._kept.append(entry.release)
        else:
            entry.release()
        return entry.status

    def _take_away(self, path: Path, force: bool) -> bool:
        """Unmount; returns whether it was in use. Raises Conflict when it is and not `force`."""
        try:
            unshow(path, work=self._work)
        except Conflict:
            if not force:
                raise
            unshow(path, work=self._work, force=True)
            return True
        return False


def _label(status: MountStatus) -> str:
    return f"{status.reference} {status.digest}"


def _owner(status: MountStatus) -> Process | None:
    return process(status.pid) if status.pid else None


def _adopted(kept: Leftover) -> MountStatus:
    reference, _, digest = kept.label.partition(" ")
    return MountStatus(
        reference,
        digest,
        str(kept.path),
        kept.how,
        why="shown by an earlier agent",
        writable=kept.writable,
        images=kept.images if kept.how == IMAGES else (),
        pid=kept.owner.pid if kept.owner else 0,
    )
