"""Pre-content events of fanotify(7): the kernel asks before it reads a file, and waits.

Source: include/uapi/linux/fanotify.h (Linux 6.14). A group of class FAN_CLASS_PRE_CONTENT with a
mark FAN_PRE_ACCESS on a file gets an event before each read of it, which states the range; the
reader, a page fault included, waits until the event is answered. Once the last descriptor of a
group is closed, readers wait no more and get what is there.

No library on the package index knows these events, so the two system calls are made directly.
"""

from __future__ import annotations

import ctypes
import errno
import os
import select
import signal
import struct
from dataclasses import dataclass
from pathlib import Path

_FAN_CLOEXEC = 0x1
_FAN_NONBLOCK = 0x2
_FAN_CLASS_PRE_CONTENT = 0x8
_FAN_UNLIMITED_QUEUE = 0x10
_FAN_MARK_ADD, _FAN_MARK_REMOVE = 0x1, 0x2
_FAN_PRE_ACCESS = 0x00100000
_FAN_ALLOW, _FAN_DENY = 0x1, 0x2
_ERRNO_SHIFT = 24
_INFO_RANGE = 6
_AT_FDCWD = -100
_VERSION = 3

_EVENT = struct.Struct("=IBBHQii")
"""struct fanotify_event_metadata: length, version, reserved, its length, mask, descriptor, pid."""

_INFO = struct.Struct("=BBHIQQ")
"""struct fanotify_event_info_range: type, padding, length, padding, offset, count."""

_RESPONSE = struct.Struct("=iI")
EVENTS_BYTES = 1 << 16
PROBE_S = 5.0

_libc = ctypes.CDLL(None, use_errno=True)
_libc.fanotify_mark.argtypes = (ctypes.c_int, ctypes.c_uint, ctypes.c_uint64, ctypes.c_int, ctypes.c_char_p)


@dataclass(frozen=True, slots=True)
class Fault:
    """A reader that waits for `count` bytes of the file from `offset`. `key` names it in the
    answer: the number of the descriptor that came with the event in the process that read it. `pid`
    is the reader's process, 0 where that is not known."""

    key: int
    offset: int
    count: int
    pid: int = 0


def _check(result: int, what: str) -> int:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), what)
    return result


def open_group(*, writable: bool = False) -> int:
    """A group for pre-content events. `writable`: the descriptors that come with events may be
    written to. Raises OSError: EPERM without CAP_SYS_ADMIN, EINVAL before Linux 6.14."""
    flags = _FAN_CLOEXEC | _FAN_NONBLOCK | _FAN_CLASS_PRE_CONTENT | _FAN_UNLIMITED_QUEUE
    access = os.O_RDWR if writable else os.O_RDONLY
    return _check(_libc.fanotify_init(flags, access | os.O_CLOEXEC | os.O_LARGEFILE), "fanotify_init")


def mark(group: int, path: Path) -> None:
    """Have `group` asked before the file is read. Raises OSError: EINVAL or EOPNOTSUPP where the
    kernel or the file system has no such events."""
    _check(_libc.fanotify_mark(group, _FAN_MARK_ADD, _FAN_PRE_ACCESS, _AT_FDCWD, os.fsencode(path)), str(path))


def unmark(group: int, path: Path) -> None:
    """Let the file be read without events from now on. Raises OSError."""
    _check(_libc.fanotify_mark(group, _FAN_MARK_REMOVE, _FAN_PRE_ACCESS, _AT_FDCWD, os.fsencode(path)), str(path))


def read_faults(group: int) -> list[Fault]:
    """The readers that wait; none where no event has come. The caller closes the descriptor `key`
    of each once it has answered. Raises OSError for what is no event of this kernel."""
    try:
        data = os.read(group, EVENTS_BYTES)
    except BlockingIOError:
        return []
    faults, at = [], 0
    while at < len(data):
        length, version, _, head, _, key, pid = _EVENT.unpack_from(data, at)
        if version != _VERSION or length < head:
            raise OSError(errno.EPROTO, f"events have version {version}, not {_VERSION}")
        offset, count, info = 0, 0, at + head
        while info < at + length:
            kind, _, size = struct.unpack_from("=BBH", data, info)
            if kind == _INFO_RANGE:
                offset, count = _INFO.unpack_from(data, info)[4:]
            info += size
        faults.append(Fault(key, offset, count, pid))
        at += length
    return faults


def answer(group: int, key: int, error: int = 0) -> bool:
    """Let a reader go on, or have it get `error` (an errno: EIO, EPERM, EBUSY, EAGAIN, ENOSPC).
    False where no reader waits under this key. Raises OSError."""
    verdict = _FAN_DENY | error << _ERRNO_SHIFT if error else _FAN_ALLOW
    try:
        os.write(group, _RESPONSE.pack(key, verdict))
    except FileNotFoundError:
        return False
    return True


def open_silently(path: Path) -> int:
    """A descriptor of the file, for reading and writing, whose use makes no events in any group:
    such are the ones that come with an event, so a thread makes one. Raises OSError."""
    group = open_group(writable=True)
    try:
        mark(group, path)
        child = os.fork()
        if child == 0:
            try:
                os.close(group)  # else nothing would end its wait, nor that of others, when its parent is killed
                with open(path, "rb", buffering=0) as file:
                    file.read(1)
            finally:
                os._exit(0)
        try:
            if not select.select([group], [], [], PROBE_S)[0]:
                raise OSError(errno.ETIME, "no event has come", str(path))
            (fault, *others) = read_faults(group)
            for other in (fault, *others):
                answer(group, other.key)
            for other in others:
                os.close(other.key)
            return fault.key
        finally:
            os.kill(child, signal.SIGKILL)  # other groups may be asked about its read as well
            os.waitpid(child, 0)
    finally:
        os.close(group)
