"""Mounts as the Linux kernel does them: mount(2), umount2(2), loop devices (linux/loop.h) and
mountinfo (proc(5)); and what it is told of files (ioctl_ficlone(2), ioctl_iflags(2)).

The system calls are made directly, not by mount(8): their errors are told apart by number, paths
need no quoting, and the option string of an overlay is passed on whole (newer versions of mount(8)
cut values at 256 bytes).
"""

from __future__ import annotations

import errno
import fcntl
import os
import re
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import ctypes

MS_RDONLY = 0x1
MS_NOSUID = 0x2
MS_NODEV = 0x4
MS_BIND = 0x1000
MS_REC = 0x4000
MS_PRIVATE = 0x40000
MNT_DETACH = 0x2
UMOUNT_NOFOLLOW = 0x8
CLONE_NEWNS = 0x00020000
CLONE_NEWUSER = 0x10000000
PR_SET_PDEATHSIG = 1
FICLONE = 0x40049409
"""ioctl_ficlone(2)"""
FS_IOC_GETFLAGS = 0x80086601
FS_IOC_SETFLAGS = 0x40086602
FS_TOPDIR_FL = 0x00020000
"""ioctl_iflags(2)"""

_AT_FDCWD, _AT_SYMLINK_NOFOLLOW = -100, 0x100
_STATX_BTIME = 0x800
_STATX_BYTES, _STATX_BTIME_AT = 256, 80
"""statx(2): the length of struct statx, and where in it the time of birth is, in seconds and
nanoseconds; what it holds stands in the first word."""

OPTIONS_BYTES_MAX = 4095
"""The kernel reads mount options from one page, the last byte of which is the terminating zero."""

_LOOP_CONTROL = "/dev/loop-control"
_LOOP_CTL_GET_FREE = 0x4C82
_LOOP_CONFIGURE = 0x4C0A
_LOOP_GET_STATUS64 = 0x4C05
_LOOP_CHANGE_FD = 0x4C06
_LO_FLAGS_READ_ONLY = 1
_LO_FLAGS_AUTOCLEAR = 4
_LO_FLAGS_DIRECT_IO = 16
_LOOP_INFO = struct.Struct("=52xI64s112x")
"""struct loop_info64: flags, and a name that the kernel keeps and does not use."""

_LOOP_ATTEMPTS_MAX = 100


@cache
def _libc() -> ctypes.CDLL:
    """The C library, loaded for the first call: many commands import this module and make none."""
    import ctypes

    library = ctypes.CDLL(None, use_errno=True)
    library.mount.argtypes = (ctypes.c_char_p, ctypes.c_char_p, ctypes.c_char_p, ctypes.c_ulong, ctypes.c_char_p)
    library.umount2.argtypes = (ctypes.c_char_p, ctypes.c_int)
    return library


def _check(result: int, path: Path | str) -> None:
    if result != 0:
        import ctypes

        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), os.fspath(path))


def mount(source: str | Path, target: Path | str, kind: str, flags: int = 0, options: str = "") -> None:
    """mount(2); raises OSError with its number and the target."""
    data = os.fsencode(options)
    if len(data) > OPTIONS_BYTES_MAX:
        raise OSError(errno.E2BIG, f"mount options of {len(data)} bytes", os.fspath(target))
    _check(_libc().mount(os.fsencode(source), os.fsencode(target), os.fsencode(kind), flags, data), target)


def unmount(target: Path | str, *, lazily: bool = False) -> None:
    """umount2(2); `lazily` takes the mount out of sight at once and ends it when its last user is
    gone. Raises OSError."""
    _check(_libc().umount2(os.fsencode(target), MNT_DETACH if lazily else 0), target)


def unmount_here(target: Path, *, lazily: bool = False) -> None:
    """umount2(2) for the real path `target`, in a directory that another user may move: raises
    OSError, ESTALE, where a symbolic link leads elsewhere by now."""
    parent = os.open(target.parent, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        if os.readlink(f"/proc/self/fd/{parent}") != str(target.parent):
            raise OSError(errno.ESTALE, "the path leads elsewhere by now", str(target))
        place = os.fsencode(f"/proc/self/fd/{parent}/{target.name}")
        _check(_libc().umount2(place, UMOUNT_NOFOLLOW | (MNT_DETACH if lazily else 0)), target)
    finally:
        os.close(parent)


def unshare(flags: int) -> None:
    """unshare(2) for the calling process, which must have one thread when it asks for a user
    namespace. Raises OSError."""
    _check(_libc().unshare(flags), "unshare")


def die_with_parent(number: int) -> None:
    """Ask for signal `number` when the parent ends (prctl(2), PR_SET_PDEATHSIG); lost when a setuid
    program is executed."""
    _check(_libc().prctl(PR_SET_PDEATHSIG, number, 0, 0, 0), "prctl")


def born_ns(path: Path) -> int:
    """When a file or directory was made, in nanoseconds since the epoch (statx(2)); 0 where its
    file system, or the C library, does not say, or it is not there. Links are not followed."""
    import ctypes

    statx = getattr(_libc(), "statx", None)  # glibc before 2.28 has none
    data = ctypes.create_string_buffer(_STATX_BYTES)
    if statx is None or statx(_AT_FDCWD, os.fsencode(path), _AT_SYMLINK_NOFOLLOW, _STATX_BTIME, data) != 0:
        return 0
    (known,) = struct.unpack_from("=I", data)
    seconds, nanoseconds = struct.unpack_from("=qI", data, _STATX_BTIME_AT)
    return int(seconds * 10**9 + nanoseconds) if known & _STATX_BTIME else 0


def spread_below(directory: Path) -> bool:
    """Tell the file system that each directory made in `directory` begins a hierarchy of its own
    (chattr(1), attribute T): ext4 then places it where there are fewest directories, not beside its
    parent, and what is below it there too. False where the file system knows no such hint. Raises
    OSError when `directory` cannot be opened."""
    place = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        flags = bytearray(8)  # the numbers of the calls say long, what is read and written is an int
        fcntl.ioctl(place, FS_IOC_GETFLAGS, flags)
        struct.pack_into("=I", flags, 0, struct.unpack_from("=I", flags)[0] | FS_TOPDIR_FL)
        fcntl.ioctl(place, FS_IOC_SETFLAGS, flags)
    except OSError:
        return False  # it is only a hint, and which error file systems have for it differs
    finally:
        os.close(place)
    return True


@dataclass(frozen=True, slots=True)
class Mounted:
    """One line of /proc/self/mountinfo."""

    point: Path
    kind: str
    source: str
    number: int
    """That of the mount (`mount_number`)."""
    device: tuple[int, int]
    """Major and minor number of the file system, as /proc/PID/maps has them."""


_OCTAL = re.compile(rb"\\([0-7]{3})")


def unescaped(field: bytes) -> bytes:
    """A field of mountinfo as it was before the kernel escaped it."""
    return _OCTAL.sub(lambda found: bytes([int(found[1], 8)]), field) if b"\\" in field else field


def _plain(field: bytes) -> str:
    return os.fsdecode(unescaped(field))


def mounted() -> list[Mounted]:
    """Every mount that this process sees, the oldest first; of several at one point the last is the
    visible one."""
    return [_mounted(line) for line in _lines()]


def _lines() -> list[bytes]:
    # Of what ends a line elsewhere the kernel escapes the line feed alone.
    return Path("/proc/self/mountinfo").read_bytes().split(b"\n")[:-1]


def _mounted(line: bytes) -> Mounted:
    before, _, after = line.partition(b" - ")
    kind, source = after.split(b" ")[:2]
    number, _, device, _, point, *_ = before.split(b" ")
    major, minor = map(int, device.split(b":"))
    return Mounted(Path(_plain(point)), _plain(kind), _plain(source), int(number), (major, minor))


def mount_number(descriptor: int) -> int:
    """The number of the mount in which an open file or directory is (proc(5), fdinfo)."""
    lines = Path(f"/proc/self/fdinfo/{descriptor}").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("mnt_id:"))


def mounted_at(target: Path) -> Mounted | None:
    """What is visible at `target` (a real path), or None when nothing is mounted there."""
    place = os.fsencode(target)
    for line in reversed(_lines()):
        point = line.split(b" ", 5)[4]
        # A path is decoded only where it is another one as it stands: a host may have thousands of
        # mounts.
        if _plain(point) == str(target) if b"\\" in point else point == place:
            return _mounted(line)
    return None


def backing_file(device: str) -> str:
    """The file behind a loop device such as /dev/loop7, or "" when there is none (sysfs,
    loop/backing_file)."""
    try:
        name = Path(f"/sys/block/{Path(device).name}/loop/backing_file").read_bytes().rstrip(b"\n")
    except OSError:
        return ""
    return os.fsdecode(name.removesuffix(b" (deleted)"))


@contextmanager
def loop_device(image: Path, *, name: bytes = b"", direct: bool = False) -> Iterator[str]:
    """A read-only loop device over `image`. It clears itself once the block ends and nothing
    mounted uses it. `name`, of up to 63 bytes, is for `change_backing`. `direct`: what is read from
    it is read from the file once each time, several reads at once, and fails as a whole: without
    that the kernel reads zeros where the file gives an error in the middle of a range. Raises
    OSError, ENXIO where there is no loop device to be had, or none that is direct."""
    source = os.open(image, os.O_RDONLY | os.O_CLOEXEC | (os.O_DIRECT if direct else 0))
    try:
        try:
            device, path = _attach(source, name)
        except OSError as error:
            reason = f"no loop device can be had: {error.strerror}"
            raise OSError(errno.ENXIO, reason, error.filename or _LOOP_CONTROL) from error
        try:
            if direct and not _loop_info(device)[0] & _LO_FLAGS_DIRECT_IO:
                raise OSError(errno.ENXIO, "the loop device reads through the page cache", os.fspath(image))
            yield path
        finally:
            os.close(device)
    finally:
        os.close(source)


def change_backing(device: str, name: bytes, image: Path) -> None:
    """Have a loop device read from `image`, as long as the file before. What is read from it
    meanwhile comes from either, and the call returns when nothing is read from the former any more.
    Raises OSError: ENODEV where the device is not the one that was made under this name."""
    loop = os.open(device, os.O_RDONLY | os.O_CLOEXEC)
    try:
        if _loop_info(loop)[1] != name:
            raise OSError(errno.ENODEV, "the loop device is another one's by now", device)
        try:
            _change(loop, image, os.O_DIRECT)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            _change(loop, image, 0)  # the file system has no direct reads
    finally:
        os.close(loop)


def _change(loop: int, image: Path, access: int) -> None:
    source = os.open(image, os.O_RDONLY | os.O_CLOEXEC | access)
    try:
        fcntl.ioctl(loop, _LOOP_CHANGE_FD, source)
    finally:
        os.close(source)


def _loop_info(device: int) -> tuple[int, bytes]:
    """Flags and name of a loop device."""
    info = bytearray(_LOOP_INFO.size)
    fcntl.ioctl(device, _LOOP_GET_STATUS64, info)
    flags, name = _LOOP_INFO.unpack(info)
    return flags, name.rstrip(b"\0")


def _attach(source: int, name: bytes) -> tuple[int, str]:
    # struct loop_config: fd, block size, struct loop_info64, eight reserved words.
    flags = _LO_FLAGS_READ_ONLY | _LO_FLAGS_AUTOCLEAR
    if fcntl.fcntl(source, fcntl.F_GETFL) & os.O_DIRECT:
        flags |= _LO_FLAGS_DIRECT_IO
    config = struct.pack("=II", source, 0) + _LOOP_INFO.pack(flags, name) + bytes(64)
    control = os.open(_LOOP_CONTROL, os.O_RDWR | os.O_CLOEXEC)
    try:
        for _attempt in range(_LOOP_ATTEMPTS_MAX):
            path = f"/dev/loop{fcntl.ioctl(control, _LOOP_CTL_GET_FREE)}"
            device = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            try:
                fcntl.ioctl(device, _LOOP_CONFIGURE, config)
            except OSError as error:
                os.close(device)
                if error.errno != errno.EBUSY:  # else another program was quicker: ask for another device
                    raise
            else:
                return device, path
    finally:
        os.close(control)
    raise OSError(errno.EBUSY, "other programs were quicker each time", _LOOP_CONTROL)
