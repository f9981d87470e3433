"""The packages that an agent shows, and the claims that keep their blobs.

An entry is made when a package is shown and goes when it is no longer; from before the mount until after the unmount its blobs are
held. Entries are also made for callers that show the layer images to themselves ("images/<id>"). Mounting is done in threads.
"""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from p2pdist.model.digest import Digest
from p2pdist.model.errors import Conflict, NotFound, P2PDistError, TooLarge, UsageError
from p2pdist.model.messages import MountRequest, MountStatus
from p2pdist.model.package import Config
from p2pdist.mount.layers import Layer, SquashfsLayer
from p2pdist.mount.show import Leftover, Shown, clean_leftovers, show, shown, unshow
from p2pdist.mount.sight import NOTHING, Identity, seen

MOUNTS_MAX = 1000
IMAGES_PREFIX = "images/"
TREES_MOUNTED = "erofs"
"""The way of showing that reads the store's files by name as long as it lasts."""

Release = Callable[[], None]

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Entry:
    status: MountStatus
    release: Release


def _nothing_held() -> None:
    return None


class Mounts:
    """What this agent shows. `work_dir` is created; records of mounts are below it, and packages for which no path was asked.

    The constructor removes what a killed agent left behind. What is still in use stays, is listed, and can be removed with `unshow`.
    Used from one event loop; one agent at a time may use a `work_dir`.
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
        self.leftovers: list[Leftover] = clean_leftovers(self._work)
        for leftover in self.leftovers:
            outcome = "removed" if leftover.removed else f"kept: {leftover.note}"
            _log.warning("a mount at %s was left by an earlier agent: %s", leftover.path, outcome)
        for kept in shown(self._work):
            self._entries[str(kept.path)] = _Entry(_adopted(kept), _nothing_held)

    def adopt(self, hold: Callable[[Digest], Release]) -> None:
        """Claim what a package shown by an earlier agent, and still in use, is shown from: `hold` is given the manifest's digest."""
        for path, entry in self._entries.items():
            if entry.release is _nothing_held and entry.status.digest:
                self._entries[path] = _Entry(entry.status, hold(Digest(entry.status.digest)))

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
    ) -> MountStatus:
        """Show verified `layers`, bottom to top, as `request` says. `hold` claims them and returns what gives the claim up. Raises
        what `p2pdist.mount.show.show` raises, and TooLarge over MOUNTS_MAX; then nothing is held."""
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
        )
        images = [layer.path for layer in layers if isinstance(layer, SquashfsLayer)]
        if len(images) == len(layers):
            if request.how == "userns" or (request.how == "images" and os.geteuid() != 0):
                return self._hand_out(status, images, hold)
        elif request.how == "userns":
            raise UsageError("a package with tree layers cannot be shown in a user namespace", remedy="Leave out --how")
        target = self._target(request.path)
        key = str(target)
        if key in self._entries or key in self._reserved:
            raise Conflict(f"a package is shown at {target} already", remedy=f"p2pdist umount {target}")
        self._reserved.add(key)
        return await self._finish(self._show(key, status, layers, hold))

    async def unshow(self, path: str, force: bool = False, caller_sees: Identity | None = None) -> MountStatus:
        """Undo `show`; returns what was shown. Raises NotFound, or Conflict when it is in use or the caller sees something else at `path`,
        and not `force`."""
        key = path if path.startswith(IMAGES_PREFIX) else os.path.realpath(path)
        if caller_sees is not None and not force and key in self._entries and seen(key) not in (None, caller_sees):
            raise Conflict(
                f"what the agent shows at {path} is not what the caller sees there, which has mounts of its own",
                remedy="Unmount it from the host's mount namespace, or use --force",
            )
        return await self._finish(self._unshow(key, force))

    async def close(self) -> None:
        """A clean stop: nothing is shown any more. What is in use is taken out of sight; its users keep what they have open. A tree that
        is in use stays, for the next agent to keep: the kernel looks its objects up by name when they are first opened."""
        self._closed = True
        while self._running:
            await asyncio.wait(self._running)
        for key in list(self._entries):
            try:
                try:
                    await self._unshow(key, False)
                except Conflict as conflict:
                    if self._entries[key].status.how == TREES_MOUNTED:
                        _log.warning("%s; it stays until its users have ended", conflict.what)
                        continue
                    _log.warning("%s; unmounting it lazily", conflict.what)
                    await self._unshow(key, True)
            except P2PDistError as error:
                _log.error("%s", error)

    async def _finish(self, work: Coroutine[Any, Any, MountStatus]) -> MountStatus:
        # A caller that goes away must not leave a mount behind that nobody knows of.
        task = asyncio.create_task(work)
        self._running.add(task)
        task.add_done_callback(self._running.discard)
        return await asyncio.shield(task)

    def _hand_out(self, status: MountStatus, layers: Sequence[Path], hold: Callable[[], Release]) -> MountStatus:
        key = IMAGES_PREFIX + secrets.token_hex(8)
        fields = {"path": key, "how": "images", "images": tuple(str(path.resolve()) for path in layers)}
        status = replace(status, **fields, why="images: the agent is not root, the caller shows them to itself")
        self._entries[key] = _Entry(status, hold())
        return status

    def _target(self, path: str) -> Path:
        if not path:
            return self._places.resolve() / secrets.token_hex(8)
        if not os.path.isabs(path) or "\0" in path:
            raise UsageError(f"{path!r} is not an absolute path", remedy="Name the directory from the root on")
        return Path(os.path.realpath(path))

    async def _show(
        self, key: str, status: MountStatus, layers: Sequence[Layer], hold: Callable[[], Release]
    ) -> MountStatus:
        how = None if status.how in ("", "images") else status.how
        release: Release = _nothing_held
        try:
            release = hold()
            done: Shown = await asyncio.to_thread(
                show,
                layers,
                Path(key),
                work=self._work,
                writable=status.writable,
                how=how,
                label=f"{status.reference} {status.digest}",
                checked=True,
            )
        except BaseException:
            release()
            raise
        finally:
            self._reserved.discard(key)
        device, inode = seen(done.path) or NOTHING
        status = replace(status, path=str(done.path), how=done.how, why=done.why, device=device, inode=inode)
        self._entries[key] = _Entry(status, release)
        return status

    async def _unshow(self, key: str, force: bool) -> MountStatus:
        entry = self._entries.get(key)
        if entry is None or key in self._reserved:
            raise NotFound(f"no package is shown at {key}", remedy="p2pdist status lists what is shown")
        in_use = False
        if not key.startswith(IMAGES_PREFIX):
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


def _adopted(kept: Leftover) -> MountStatus:
    reference, _, digest = kept.label.partition(" ")
    return MountStatus(reference, digest, str(kept.path), kept.how, why="left by an earlier agent and still in use")
