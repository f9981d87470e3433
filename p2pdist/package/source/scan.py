"""A scan of a source directory: the entries of every directory with the fields of stat(2), and what
packings share about entries: which ones are left out, which cannot be packed, which cannot be read.

A scan of 200,000 unchanged files must take well under a second, so it makes no object for an entry:
the rows of a directory are encoded at once, and the hash over all of them (`fingerprint`) tells
whether anything has changed since an earlier scan. Rows are in the order of readdir(3), which stays
while nothing changes; readers sort them by name. A change of content, mode, owner, links or
extended attributes changes an inode's ctime, and with it the fingerprint. Of the source directory
itself only the names in it count.
"""

from __future__ import annotations

import ctypes
import errno
import os
import stat
import sys
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import compress, islice
from pathlib import Path

import msgspec
from blake3 import blake3

from p2pdist.files import own_descriptor
from p2pdist.model.errors import Corrupt, NotFound, P2PDistError, UsageError, foreseen, printable
from p2pdist.model.tree import DEPTH_MAX, ENTRIES_MAX

DROPPED_SHOWN_MAX = 1000

KINDS_DROPPED = {
    stat.S_IFBLK: "block device",
    stat.S_IFCHR: "character device",
    stat.S_IFIFO: "FIFO",
    stat.S_IFSOCK: "socket",
}


CAPABILITIES = "file capabilities"
ACCESS_LIST = "access control list"
ATTRIBUTES = "extended attributes"
EXECUTABLE = 0o111
"""Of a mode: whether any user may execute the file. Only then may its capabilities matter."""

Ignore = Callable[[bytes, bool], bool]
"""Whether to leave out the entry with this path below the source, which is a directory or not; a
directory with all that is in it."""


@dataclass(frozen=True, slots=True)
class Dropped:
    """Something that a package does not carry. `path` is relative to the source, with surrogates
    for bytes that are not UTF-8; `what` is `socket`, `FIFO`, `block device`, `character device`,
    `setuid bit`, `setgid bit`, `file capabilities`, `access control list` or `extended
    attributes`."""

    path: str
    what: str


@dataclass(frozen=True, slots=True)
class Link:
    """A symbolic link of a source: its path relative to it, the path it holds, and what of that a
    user should know."""

    path: str
    target: str
    what: str


@dataclass(slots=True)
class Scan:
    """Counts over a source or an archive."""

    files: int = 0
    bytes_total: int = 0
    """Bytes in these files."""
    dropped: list[Dropped] = field(default_factory=list)
    """The first DROPPED_SHOWN_MAX things that a package does not carry."""
    dropped_total: int = 0
    excluded: list[bytes] = field(default_factory=list)
    """The paths that were left out by request; of a directory its own path alone."""

    def drop(self, path: str, what: str) -> None:
        """Count a thing that the package does not carry."""
        self.dropped_total += 1
        if len(self.dropped) < DROPPED_SHOWN_MAX:
            self.dropped.append(Dropped(path, what))


def source_directory(source: Path) -> Path:
    """The path of the directory `source`, absolute and without symbolic links: mksquashfs packs a
    link as a link, whatever it leads to, and programs that run in other directories are given this
    path. Raises NotFound, and UsageError when there is something else."""
    real = source_path(source)
    if not real.is_dir():
        raise UsageError(f"{source} is not a directory", remedy="Name the directory to pack")
    return real


def source_path(source: Path, kind: str = "directory") -> Path:
    """The path of `source`, absolute and without symbolic links; a name of a descriptor of this
    process, such as /dev/stdin, stays as it is, since what it leads to may have no path. `kind` is
    what should be there. Raises NotFound, UsageError and P2PDistError saying why there is
    nothing."""
    try:
        if own_descriptor(source) is not None and source.exists() and not source.is_dir():
            return source.absolute()
        return Path(os.path.realpath(source, strict=True))
    except ValueError as error:  # a NUL
        raise UsageError(f"{str(source)!r} is not a path", remedy="Name the directory to pack") from error
    except OSError as error:
        raise _not_there(source, kind, error) from error


def _not_there(source: Path, kind: str, error: OSError) -> P2PDistError:
    shown = printable(str(source))
    if error.errno not in (errno.ENOENT, errno.ENOTDIR, errno.ELOOP):
        return unreadable(str(source), error)
    if not source.is_absolute() and not _has_working_directory():
        return NotFound(f"cannot look for {shown}: the working directory was removed", remedy="Name an absolute path")
    if error.errno == errno.ELOOP:
        return UsageError(f"{shown} is a link that leads to itself", remedy=f"Name the {kind}")
    if source.is_symlink():
        target = printable(os.readlink(source))
        return NotFound(f"{shown} is a link to {target}, which is not there", remedy=f"Name the {kind}")
    return NotFound(f"there is no {kind} {shown}", remedy="Check the path")


def _has_working_directory() -> bool:
    try:
        return bool(os.getcwd())
    except FileNotFoundError:
        return False


def with_parents(paths: Collection[bytes]) -> frozenset[bytes]:
    """The paths and the directories above them."""
    complete = set(paths)
    for path in paths:
        while (path := path.rpartition(b"/")[0]) and path not in complete:
            complete.add(path)
    return frozenset(complete)


def leaves_out(path: bytes, is_directory: bool, ignore: Ignore | None, only: Collection[bytes] | None) -> bool:
    """Whether an entry is left out by request; `only` includes the directories above its paths."""
    return (only is not None and path not in only) or (ignore is not None and ignore(path, is_directory))


def unreadable(path: str, error: OSError) -> P2PDistError:
    """The failure of packing an entry that cannot be read."""
    if error.errno in (errno.EACCES, errno.EPERM):
        remedy = "Make it readable, or pack as its owner"
    else:
        known = foreseen(error)
        remedy = known.remedy if known else ""
    return P2PDistError(f"cannot read {printable(path)}: {(error.strerror or str(error)).lower()}", remedy=remedy)


MADE_UP = {
    0x9FA0: "proc",
    0x62656572: "sysfs",
    0x27E0EB: "cgroup",
    0x63677270: "cgroup2",
    0x64626720: "debugfs",
    0x74726163: "tracefs",
    0x73636673: "securityfs",
    0x62656570: "configfs",
    0xF97CFF8C: "selinuxfs",
    0xCAFE4A11: "bpf",
    0xDE5E81E4: "efivarfs",
}
"""File systems whose files the kernel makes up as they are read, by f_type (statfs(2),
linux/magic.h). Their sizes are 0 or a page, whatever they hold."""

_libc = ctypes.CDLL(None, use_errno=True)
_STATFS_BYTES_MAX = 256
_TYPE = (1 << 32) - 1
_S_IFMT = 0o170000
_OPAQUE = "trusted.overlay.opaque"
_NO_ATTRIBUTE = (errno.ENODATA, errno.ENOTSUP, errno.EPERM, errno.EACCES)
_DEVICES = (stat.S_IFCHR, stat.S_IFBLK)
_AT_ONCE = 4096


class Row(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """An entry of a directory and its lstat(2); times in nanoseconds. `size` is the device number
    where the entry is a device."""

    name: bytes
    mode: int
    inode: int
    size: int
    mtime_ns: int
    ctime_ns: int
    links: int
    device: int


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(list[Row]).decode
_FILE_SYSTEM = sys.getfilesystemencoding(), sys.getfilesystemencodeerrors()


@dataclass(frozen=True, slots=True)
class TreeScan:
    """The entries below `source`. Paths are relative to it; b"" is the source itself."""

    source: bytes
    directories: dict[bytes, bytes]
    """The encoded rows of each directory."""
    digests: dict[bytes, bytes]
    """The BLAKE3 of the rows of each directory."""
    names: dict[bytes, bytes]
    """The names in each directory in the order of readdir(3), with NUL between them."""
    fingerprint: bytes
    """The BLAKE3 over all directories."""
    excluded: list[bytes]
    """The paths that were left out by request; of a directory its own path alone."""
    changed_ns: int
    """The mtime of the source: when an entry in it came or went last."""
    links: list[bytes]
    """The paths of symbolic links."""
    narrow: list[bytes]
    """The paths of files and directories that their owner or group may read or execute, and other
    users may not."""

    def rows(self, directory: bytes) -> list[Row]:
        """The entries of a directory, sorted by name."""
        return sorted(_decode(self.directories[directory]), key=_name)

    def path(self, entry: bytes) -> bytes:
        """Where the entry with this path below the source is."""
        return self.source + b"/" + entry if entry else self.source


def scan_tree(source: Path, *, ignore: Ignore | None = None, only: Collection[bytes] | None = None) -> TreeScan:
    """Look at everything below `source` but what `ignore` leaves out and, with `only`, what is
    neither one of these paths nor a directory above one. Raises NotFound, UsageError when it is no
    directory or over a limit, and P2PDistError naming what cannot be read."""
    kept = None if only is None else with_parents(only)
    root = os.fsencode(source_directory(source))
    directories: dict[bytes, bytes] = {}
    digests: dict[bytes, bytes] = {}
    names: dict[bytes, bytes] = {}
    hasher = blake3()
    entries, excluded = 0, list[bytes]()
    links, narrow = list[bytes](), list[bytes]()
    with _opened(root, b"") as handle:
        status = os.fstat(handle)
    devices = set[int]()
    pending = [(b"", 0)]
    while pending:
        directory, depth = pending.pop()
        if depth > DEPTH_MAX:
            raise UsageError(
                f"{source} is nested deeper than {DEPTH_MAX} directories", remedy="Leave that part out with --ignore"
            )
        rows, below, others = _list(root, directory, ignore, kept)
        excluded += others
        entries += len(rows)
        if entries > ENTRIES_MAX:
            raise UsageError(f"{source} has more than {ENTRIES_MAX} entries", remedy="Pack parts of it as layers")
        pending += ((path, depth + 1) for path in below)
        prefix = directory + b"/" if directory else b""
        found = {row[7]: row[0] for row in rows if row[7] not in devices and row[1] & _S_IFMT == stat.S_IFREG}
        for name in found.values():
            _check_stored(os.path.join(root, prefix + name))
        devices.update(found)
        links += [prefix + row[0] for row in rows if row[1] & _S_IFMT == stat.S_IFLNK]
        narrow += [prefix + row[0] for row in rows if row[1] & 0o005 != 0o005 and _is_narrow(row[1])]
        try:
            data = _encode(rows)
        except OverflowError as error:
            raise UsageError(
                f"a file in {printable(os.fsdecode(directory))!r} has an impossible time",
                remedy="Set another time with touch",
            ) from error
        directories[directory] = data
        names[directory] = b"\0".join([row[0] for row in rows])
        digests[directory] = digest = blake3(data).digest()
        hasher.update(_encode((directory, digest)))
    return TreeScan(
        root,
        directories,
        digests,
        names,
        hasher.digest(),
        sorted(excluded),
        status.st_mtime_ns,
        sorted(links),
        sorted(narrow),
    )


def file_system(path: bytes) -> int:
    """The type of the file system that a file is on: f_type of statfs(2), the first word of what it
    fills in. Raises OSError."""
    filled = ctypes.create_string_buffer(_STATFS_BYTES_MAX)
    if _libc.statfs(path, filled):
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), path)
    return ctypes.c_ulong.from_buffer(filled).value & _TYPE


def _check_stored(path: bytes) -> None:
    """Raises UsageError where the files of a file system have no content of their own, of which
    `path` is one."""
    try:
        kind = MADE_UP.get(file_system(path))
    except FileNotFoundError as error:
        raise changed(path, "vanished") from error
    except OSError as error:
        raise unreadable(os.fsdecode(path), error) from error
    if kind:
        raise UsageError(
            f"{printable(os.fsdecode(path))} is on {kind}, whose files the kernel makes up as they are read",
            remedy="Leave it out with --ignore, or copy it to a directory and pack that",
        )


def check_unchanged(
    before: TreeScan,
    *,
    ignore: Ignore | None = None,
    only: Collection[bytes] | None = None,
    times_of_directories: bool = True,
) -> None:
    """Look again, and raise Corrupt naming the first entry that appeared, vanished or changed since
    `before`, which was made with the same `ignore` and `only`. Access times count for nothing. That
    of a directory changes with any entry that comes or goes, also one that is there no more or is
    left out; without `times_of_directories` that counts for nothing either."""
    after = scan_tree(Path(os.fsdecode(before.source)), ignore=ignore, only=only)
    touched: list[bytes] = []
    for directory in sorted(before.directories.keys() & after.directories.keys()):
        if before.digests[directory] == after.digests[directory]:
            continue
        then, now = ({row.name: row for row in scan.rows(directory)} for scan in (before, after))
        for name in sorted(then.keys() | now.keys()):
            path = before.path(directory + b"/" + name if directory else name)
            was, is_now = then.get(name), now.get(name)
            if was is None or is_now is None:
                raise changed(path, "vanished" if was else "appeared")
            if _lasting(was) != _lasting(is_now):
                raise changed(path)
            if was != is_now:
                touched.append(path)
    if times_of_directories and before.changed_ns != after.changed_ns:
        touched.append(before.source)
    if times_of_directories and touched:
        raise changed(touched[0])


def _lasting(row: Row) -> tuple[int, ...]:
    """The fields that stay unless the entry itself changes; entries of a directory may change."""
    if stat.S_ISDIR(row.mode):
        return row.mode, row.inode, row.device
    return row.mode, row.inode, row.device, row.size, row.mtime_ns, row.ctime_ns


def check_names(scan: TreeScan, *, ignore: Ignore | None = None, only: Collection[bytes] | None = None) -> None:
    """Raises Corrupt naming a file that appeared or vanished since the scan, which was made with
    the same `ignore` and `only`."""
    kept = None if only is None else with_parents(only)
    for directory, then in scan.names.items():
        now = _names(scan.source, directory, ignore, kept)
        if now == then:
            continue
        if differ := set(now.split(b"\0")) ^ set(then.split(b"\0")):
            name = min(filter(None, differ))
            appeared = name in now.split(b"\0")
            raise changed(scan.path(directory) + b"/" + name, "appeared" if appeared else "vanished")


def changed(path: bytes, how: str = "changed") -> Corrupt:
    """The failure of packing an entry that changes meanwhile."""
    return Corrupt(
        f"{printable(os.fsdecode(path))} {how} while it was packed", remedy="Try again when nothing writes there"
    )


def is_opaque(path: bytes) -> bool:
    """Whether a directory hides all of what is in the one below it; only root sees the mark. Raises
    OSError."""
    try:
        return os.getxattr(path, _OPAQUE, follow_symlinks=False) == b"y"
    except OSError as error:
        if error.errno in _NO_ATTRIBUTE:
            return False
        raise


def has_capabilities(path: bytes) -> bool:
    """Whether a file has capabilities (capabilities(7)), the finer sister of the setuid bit. Raises
    OSError."""
    try:
        return bool(os.getxattr(path, "security.capability", follow_symlinks=False))
    except OSError as error:
        if error.errno in _NO_ATTRIBUTE:
            return False
        raise


_Row = tuple[bytes, int, int, int, int, int, int, int]


def _list(
    root: bytes, directory: bytes, ignore: Ignore | None, only: Collection[bytes] | None
) -> tuple[list[_Row], list[bytes], list[bytes]]:
    """The rows of a directory, the paths of its subdirectories, and the paths that are left out."""
    prefix = directory + b"/" if directory else b""
    rows: list[_Row] = []
    others: list[bytes] = []
    with _opened(root, directory) as handle, os.scandir(handle) as entries:
        while batch := list(islice(entries, _AT_ONCE)):
            # Names are encoded, and tuples made, for many entries at a time: that takes less than
            # the system calls do.
            names = "\0".join([entry.name for entry in batch]).encode(*_FILE_SYSTEM).split(b"\0")
            if ignore is not None or only is not None:  # what is left out is not looked at: it may vanish
                stays = [
                    not leaves_out(prefix + name, entry.is_dir(follow_symlinks=False), ignore, only)
                    for name, entry in zip(names, batch, strict=True)
                ]
                others += [prefix + name for name, stay in zip(names, stays, strict=True) if not stay]
                names, batch = list(compress(names, stays)), list(compress(batch, stays))
            rows += [
                (
                    name,
                    status.st_mode,
                    status.st_ino,
                    status.st_rdev if status.st_mode & _S_IFMT in _DEVICES else status.st_size,
                    status.st_mtime_ns,
                    status.st_ctime_ns,
                    status.st_nlink,
                    status.st_dev,
                )
                for name, status in zip(names, [entry.stat(follow_symlinks=False) for entry in batch], strict=True)
            ]
    return rows, [prefix + row[0] for row in rows if row[1] & _S_IFMT == stat.S_IFDIR], others


def _is_narrow(mode: int) -> bool:
    return bool((mode >> 6 | mode >> 3) & ~mode & 0o005) and mode & _S_IFMT in (stat.S_IFREG, stat.S_IFDIR)


def _names(root: bytes, directory: bytes, ignore: Ignore | None, only: Collection[bytes] | None) -> bytes:
    """The names of a directory's rows, with NUL between them; nothing is asked of the entries
    themselves."""
    with _opened(root, directory) as handle:
        if ignore is None and only is None:
            return "\0".join(os.listdir(handle)).encode(*_FILE_SYSTEM)
        with os.scandir(handle) as entries:
            names = {entry.name.encode(*_FILE_SYSTEM): entry.is_dir(follow_symlinks=False) for entry in entries}
    prefix = directory + b"/" if directory else b""
    return b"\0".join(
        name for name, is_directory in names.items() if not leaves_out(prefix + name, is_directory, ignore, only)
    )


@contextmanager
def _opened(root: bytes, directory: bytes) -> Iterator[int]:
    """A descriptor of a directory. An OSError in the block becomes the failure to read it."""
    path = root + b"/" + directory if directory else root
    try:
        # Relative to a descriptor the kernel walks no path for each entry.
        handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | (os.O_NOFOLLOW if directory else 0))
        try:
            yield handle
        finally:
            os.close(handle)
    except FileNotFoundError as error:
        raise changed(path, "or what is in it vanished") from error
    except OSError as error:
        where = error.filename if isinstance(error.filename, str | bytes) else path
        raise unreadable(os.fsdecode(where), error) from error


def _name(row: Row) -> bytes:
    return row.name
