"""The packages that an agent shows, and the claims that keep their blobs.

An entry is made when a package is shown and goes when it is no longer; from before the mount until after the unmount its blobs are
held. Entries are also made for callers that show the layer images to themselves ("images/<id>"). Mounting is done in threads.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import secrets
import stat
from collections.abc import Callable, Coroutine, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from msgspec import structs

from p2pdist.agent.caller import Caller
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
    """`owner` is the user for which it is shown, None where that is not known; `made`: the process that made the directory for it."""

    status: MountStatus
    release: Release
    owner: int | None = None
    made: Caller | None = None


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
            self._entries[str(kept.path)] = _Entry(_adopted(kept), _nothing_held, _owner(kept))

    def adopt(self, hold: Callable[[Digest], Release]) -> None:
        """Claim what a package shown by an earlier agent, and still in use, is shown from: `hold` is given the manifest's digest."""
        for path, entry in self._entries.items():
            if entry.release is _nothing_held and entry.status.digest:
                self._entries[path] = replace(entry, release=hold(Digest(entry.status.digest)))

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
        caller: Caller | None = None,
    ) -> MountStatus:
        """Show verified `layers`, bottom to top, as `request` says, for `caller`, or the agent itself. `hold` claims them and returns what
        gives the claim up. Raises what `p2pdist.mount.show.show` raises, Refused for a place that the caller may not write to, and
        TooLarge over MOUNTS_MAX; then nothing is held."""
        caller = caller or Caller.agent()
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
                return self._hand_out(status, images, hold, caller)
        elif request.how == "userns":
            raise UsageError("a package with tree layers cannot be shown in a user namespace", remedy="Leave out --how")
        if request.path and not caller.trusted:
            return await self._finish(self._show_for(caller, request.path, status, layers, hold))
        target = self._target(request.path)
        self._reserve(target)
        return await self._finish(self._show(str(target), status, layers, hold, owner=caller.uid))

    def _reserve(self, target: Path) -> None:
        key = str(target)
        if key in self._entries or key in self._reserved:
            raise Conflict(f"a package is shown at {target} already", remedy=f"p2pdist umount {target}")
        self._reserved.add(key)

    async def _show_for(
        self, caller: Caller, path: str, status: MountStatus, layers: Sequence[Layer], hold: Callable[[], Release]
    ) -> MountStatus:
        """Show at a place of another user, which that user's rights open and may move at any time."""
        target = _absolute(path)
        at, made = await caller.act(partial(_claim, target, caller.uid), f"show a package at {target}")
        try:
            real = Path(os.readlink(f"/proc/self/fd/{at}"))
            self._reserve(real)
            return await self._show(
                str(real), status, layers, hold, owner=caller.uid, at=at, made=caller if made else None
            )
        except BaseException:
            if made:
                await caller.act(partial(_remove_empty, target), f"remove {target}")
            raise
        finally:
            os.close(at)

    async def unshow(
        self, path: str, force: bool = False, caller: Caller | None = None, *, caller_sees: Identity | None = None
    ) -> MountStatus:
        """Undo `show`; returns what was shown. Raises NotFound, Refused for what is shown for another user, or Conflict when it is in use
        or the caller sees something else at `path`, and not `force`."""
        key = path if path.startswith(IMAGES_PREFIX) else os.path.realpath(path)
        entry = self._entries.get(key)
        if caller is not None and entry is not None and entry.owner != caller.uid:
            caller.require_trusted(f"unmount {key}, which is shown for another user")
        if caller_sees is not None and not force and entry is not None and seen(key) not in (None, caller_sees):
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

    def _hand_out(
        self, status: MountStatus, layers: Sequence[Path], hold: Callable[[], Release], caller: Caller
    ) -> MountStatus:
        key = IMAGES_PREFIX + secrets.token_hex(8)
        fields = {"path": key, "how": "images", "images": tuple(str(path.resolve()) for path in layers)}
        status = structs.replace(status, **fields, why="images: the agent is not root, the caller shows them to itself")
        self._entries[key] = _Entry(status, hold(), caller.uid)
        return status

    def _target(self, path: str) -> Path:
        if not path:
            return self._places.resolve() / secrets.token_hex(8)
        return Path(os.path.realpath(_absolute(path)))

    async def _show(
        self,
        key: str,
        status: MountStatus,
        layers: Sequence[Layer],
        hold: Callable[[], Release],
        *,
        owner: int,
        at: int | None = None,
        made: Caller | None = None,
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
                label=f"{status.reference} {status.digest} {owner}",
                checked=True,
                at=at,
            )
        except BaseException:
            release()
            raise
        finally:
            self._reserved.discard(key)
        device, inode = seen(done.path) or NOTHING
        fields = {"path": str(done.path), "how": done.how, "why": done.why, "device": device, "inode": inode}
        status = structs.replace(status, **fields)
        self._entries[key] = _Entry(status, release, owner, made)
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
        if entry.made is not None:
            await entry.made.act(partial(_remove_empty, Path(key)), f"remove {key}")
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


def _absolute(path: str) -> Path:
    """Raises UsageError."""
    if not os.path.isabs(path) or "\0" in path:
        raise UsageError(f"{path!r} is not an absolute path", remedy="Name the directory from the root on")
    return Path(path)


def _claim(target: Path, uid: int) -> tuple[int, bool]:
    """With the rights of a user: a descriptor of a directory that the user may hide by a mount, and whether it was made for that. It is a
    directory to which the user may write and, where others may too (the sticky bit), which is the user's own. Raises OSError, NotFound,
    Conflict."""
    made = False
    try:
        target.mkdir(0o755)
        made = True
    except FileExistsError:
        pass
    except FileNotFoundError as error:
        raise NotFound(f"{target.parent} does not exist", remedy="Create it first") from error
    try:
        at = os.open(target, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    except NotADirectoryError as error:
        raise Conflict(f"{target} is not a directory", remedy="Name an empty directory, or a new one") from error
    try:
        found = os.fstat(at)
        if found.st_mode & stat.S_ISVTX and found.st_uid != uid:
            raise PermissionError(errno.EPERM, os.strerror(errno.EPERM), str(target))
        if (
            not made
        ):  # whether it may be written to is tried: what modes, lists and mounts say together the kernel knows
            probe = f".p2pdist-{secrets.token_hex(8)}"
            os.mkdir(probe, 0o700, dir_fd=at)
            os.rmdir(probe, dir_fd=at)
    except BaseException:
        os.close(at)
        raise
    return at, made


def _remove_empty(path: Path) -> None:
    with suppress(OSError):  # it is gone, or holds something by now
        path.rmdir()


def _adopted(kept: Leftover) -> MountStatus:
    reference, digest, *_ = [*kept.label.split(" "), "", ""]
    return MountStatus(reference, digest, str(kept.path), kept.how, why="left by an earlier agent and still in use")


def _owner(kept: Leftover) -> int | None:
    """The user for which it was shown; earlier releases did not note it."""
    _, _, owner, *_ = [*kept.label.split(" "), "", "", ""]
    return int(owner) if owner.isdecimal() else None
