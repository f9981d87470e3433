"""The process that asks over the Unix socket, and what the agent does for it with its own rights.

A member of the socket's group may use the agent, and does not become the agent, which often is
root. So the agent opens, makes or replaces what a request names on the host's file system with the
rights of the process that asks: its user, group and further groups, which the kernel noted when it
connected (unix(7), SO_PEERCRED and SO_PEERGROUPS). A thread of its own takes these on for the file
system and gives up all capabilities, which Linux keeps for each thread (credentials(7),
setfsuid(2)), and ends afterwards. As file servers do, it changes the file system's user alone: a
process of that user can then neither signal nor trace it.
"""

from __future__ import annotations

import asyncio
import contextvars
import ctypes
import errno
import os
import platform
import socket
import stat
import struct
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, TypeVar

from p2pdist.model.errors import P2PDistError, Refused

GROUPS_MAX = 65536
"""NGROUPS_MAX of Linux."""

THREADS_OF_USER = 64
"""Threads with the rights of one user. Those that look at a file system which hangs stay, also when
nobody waits for them any more: what else the user asks for then waits."""

ROOM_S = 0.05
"""How often somebody who waits looks whether one has ended."""

_SO_PEERGROUPS = 59
_SYS_SETGROUPS = {"x86_64": 116, "aarch64": 159, "riscv64": 159}
"""The call itself: that of the C library changes all threads (nptl(7))."""

_CAPABILITY_VERSION_3 = 0x20080522
_NO_CHANGE = ctypes.c_uint(-1)
_UCRED = struct.Struct("=iII")
_libc = ctypes.CDLL(None, use_errno=True)

_ACL_VERSION, _NOBODY = 2, 0xFFFFFFFF
_USER_OBJ, _USER, _GROUP_OBJ, _MASK, _OTHER = 0x01, 0x02, 0x04, 0x10, 0x20
"""Entries of an access list (acl(5)), as Linux keeps them in an extended attribute."""

_rooms: dict[int, threading.Semaphore] = {}
"""Room for threads, by user."""

Value = TypeVar("Value")


class Numbered(Protocol):
    """A socket, of whatever event loop."""

    def fileno(self) -> int: ...


@dataclass(frozen=True, slots=True)
class Caller:
    """A process by its user, its group and its further groups. `pid` is 0 where the process is
    outside of this agent's process namespace, or unknown."""

    uid: int
    gid: int
    groups: tuple[int, ...] = ()
    pid: int = 0

    @classmethod
    def of(cls, connection: Numbered) -> Caller:
        """The process at the other end of a Unix socket. Raises OSError."""
        pid, uid, gid = _UCRED.unpack(_option(connection, socket.SO_PEERCRED, _UCRED.size))
        groups = _option(connection, _SO_PEERGROUPS, 4 * GROUPS_MAX)
        return cls(uid, gid, struct.unpack(f"={len(groups) // 4}I", groups), pid)

    @classmethod
    def agent(cls) -> Caller:
        """The agent itself."""
        return cls(os.geteuid(), os.getegid())

    @property
    def trusted(self) -> bool:
        """Whether it may do whatever the agent may: it is root, or the agent's own user."""
        return self.uid in (0, os.geteuid())

    def require_trusted(self, what: str) -> None:
        """Raises Refused for any other process; `what` is what it may not do."""
        if not self.trusted:
            raise Refused(f"user {self.uid} may not {what}", remedy="Ask as root, or as the agent's own user")

    def require_able(self, what: str) -> None:
        """Raises Refused where the agent cannot take on the rights of the process."""
        if not self.trusted and os.geteuid() != 0:
            raise Refused(
                f"the agent is not root, and cannot {what} with the rights of user {self.uid}",
                remedy="Leave out the path and take what the agent shows or sends, or run the agent as that user",
            )

    async def act(self, function: Callable[[], Value], what: str) -> Value:
        """Call a function that blocks, in a thread with the rights of this process. Raises what the
        function raises, Refused where the rights do not suffice; `what` names the action."""
        self.require_able(what)
        if self.trusted:
            return await asyncio.to_thread(function)
        room = _rooms.setdefault(self.uid, threading.Semaphore(THREADS_OF_USER))
        while not room.acquire(blocking=False):  # noqa: ASYNC110 - threads give the room back
            await asyncio.sleep(ROOM_S)
        context = contextvars.copy_context()
        pool = ThreadPoolExecutor(1, thread_name_prefix=f"as-user-{self.uid}")
        try:
            try:
                acting = pool.submit(context.run, self._call, function)
            except BaseException:
                room.release()
                raise
            acting.add_done_callback(lambda _: room.release())
            return await asyncio.wrap_future(acting)
        except (P2PDistError, OSError) as error:
            if isinstance(error, PermissionError) or isinstance(error.__cause__, PermissionError):
                remedy = "Name a place where that user may write"
                raise Refused(f"user {self.uid} may not {what}", remedy=remedy) from error
            if isinstance(error, OSError):
                remedy = "Name another place"
                raise P2PDistError(f"the agent cannot {what}: {error.strerror or error}", remedy=remedy) from error
            raise
        finally:
            pool.shutdown(wait=False)  # its thread is never used again

    def _call(self, function: Callable[[], Value]) -> Value:
        """In the thread: take on the rights, for good."""
        number = _SYS_SETGROUPS.get(platform.machine())
        groups = (ctypes.c_uint * len(self.groups))(*self.groups)
        taken = number is not None and _libc.syscall(number, len(self.groups), groups) == 0
        _libc.setfsgid(ctypes.c_uint(self.gid))
        _libc.setfsuid(ctypes.c_uint(self.uid))
        # They say nothing of success; a call that changes nothing tells what holds.
        taken = taken and _libc.setfsgid(_NO_CHANGE) == ctypes.c_int(self.gid).value
        taken = taken and _libc.setfsuid(_NO_CHANGE) == ctypes.c_int(self.uid).value
        head, nothing = struct.pack("=Ii", _CAPABILITY_VERSION_3, 0), bytes(24)
        if not taken or _libc.capset(head, nothing) != 0:
            raise Refused(
                f"the agent cannot take on the rights of user {self.uid} here",
                remedy="Let it have the capabilities CAP_SETUID and CAP_SETGID",
            )
        return function()


def make_directory(path: Path, mode: int) -> None:
    """Make a directory of this mode; one of this user that is there gets it, and what a link leads
    to stays as it is. Raises OSError."""
    path.mkdir(mode=mode, exist_ok=True)
    if path.is_symlink():
        return
    directory = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        found = os.fstat(directory)
        if found.st_uid == os.geteuid() and stat.S_IMODE(found.st_mode) != mode:
            os.fchmod(directory, mode)
    finally:
        os.close(directory)


def private_directory(parent: Path, uid: int) -> Path:
    """A directory below `parent` that a user alone may enter, and that belongs to this process's
    user, so that the other one cannot exchange what is in it. Where the file system has no access
    lists its names alone keep others out: no other user can list them. Raises OSError."""
    path = parent / str(uid)
    if uid == os.geteuid():
        make_directory(path, 0o700)
        return path
    with suppress(FileExistsError):
        path.mkdir(mode=0o700)
    entries = [(_USER_OBJ, 7, _NOBODY), (_USER, 5, uid), (_GROUP_OBJ, 0, _NOBODY)]
    entries += [(_MASK, 5, _NOBODY), (_OTHER, 0, _NOBODY)]
    acl = struct.pack("<I", _ACL_VERSION) + b"".join(struct.pack("<HHI", *entry) for entry in entries)
    try:
        os.setxattr(path, "system.posix_acl_access", acl, follow_symlinks=False)
    except OSError as error:
        if error.errno not in (errno.EOPNOTSUPP, errno.EPERM, errno.EINVAL):
            raise
        make_directory(path, 0o711)
    return path


def _option(connection: Numbered, name: int, size: int) -> bytes:
    value, length = ctypes.create_string_buffer(size), ctypes.c_uint(size)
    if _libc.getsockopt(connection.fileno(), socket.SOL_SOCKET, name, value, ctypes.byref(length)) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return value.raw[: length.value]
