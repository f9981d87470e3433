"""The entries of trees as plain files, with contents given from the store by reflink, hard link or
copy.

Every entry is made relative to a descriptor of its directory, and never over something that exists:
what a lower layer has at the path is removed first, so no link of it leads a write elsewhere. A
PathWalk opens directories in walking order, each step an openat(2) relative to the directory before
it, so neither links that lower layers left nor the length of a path lead astray. Directories are
open to this user until `finish` sets modes, times and attributes, the deepest first.

"reflink" (ioctl_ficlone(2): Btrfs, XFS) gives a file of its own that shares blocks with the object.
"hardlink" gives the object itself another name, which costs no bytes, but it has one mode and one
time: those of the entry that links it first, whichever thread that is. An entry that says
otherwise, or has attributes, gets a copy, which may be kept to be linked next time (see
variants.py). A process that may write to such a file writes to the store: root links no file that
group or others may write to, and other agents leave write permission out. Root, and the agent's own
user after a chmod, can write all the same, so this method is taken only when it is asked for.
"copy" keeps holes.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import os
import secrets
import stat
import threading
from collections import deque
from collections.abc import Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from types import TracebackType

from p2pdist.model.errors import P2PDistError, printable
from p2pdist.model.tree import Directory, Entry, File, HardLink, Symlink, Whiteout, variant_name, walking_order
from p2pdist.mount import kernel
from p2pdist.mount.erofs.writer import ContentName, object_name
from p2pdist.mount.files.variants import VariantSource, linked_mode
from p2pdist.mount.layers import check_object, wrong_object
from p2pdist.removal import remove_tree

logger = logging.getLogger(__name__)

ATTRIBUTE_ROOM_BYTES = 16 << 20
"""A file system with so much free space is not full."""

OPEN_MAX = 32
"""Of the directories between the last one opened and the top so many stay open."""

THREADS_MAX = {"reflink": 4, "hardlink": 1, "copy": 4}
"""Threads that make files by each method, beside the one that makes directories. Linking is so
short that two threads often take longer than one, which also makes the copies of a first mount."""

FILES_PER_SHARE = 500
"""So many a thread makes at a time: with fewer it takes longer to begin than it saves."""

_NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
_READ = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC
_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_NO_DIRECTORY = {errno.ENOENT, errno.ENOTDIR, errno.ELOOP}
_SEND_MAX = 1 << 30

_linking = tuple(threading.Lock() for _ in range(64))
"""Between looking at an object's mode and time and having linked it, no other thread may give it
others."""

_counting = threading.Lock()


class PathWalk:
    """Opens directories below the descriptor `top`, which stays the caller's. A context: what it
    opened is closed at its end."""

    def __init__(self, top: int) -> None:
        self._opened = [(b"", top)]

    def __enter__(self) -> PathWalk:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        while len(self._opened) > 1:
            self._close()

    def _close(self) -> None:
        os.close(self._opened.pop()[1])

    def open(self, path: bytes) -> int:
        """A descriptor of the directory `path`, relative and without dots; good until the next
        call. Raises OSError: ENOENT, ENOTDIR or ELOOP when it, or one above it, is no directory."""
        opened = self._opened
        while opened[-1][0] != path:
            above, descriptor = opened[-1]
            if above and not path.startswith(above + b"/"):
                self._close()
                continue
            begin = len(above) + 1 if above else 0
            name = path[begin:].partition(b"/")[0]
            found = os.open(name, _DIRECTORY, dir_fd=descriptor)
            if len(opened) > OPEN_MAX:
                self._close()
            opened.append((path[: begin + len(name)], found))
        return opened[-1][1]


@dataclass(slots=True)
class Given:
    """Counts of files with content."""

    files: int = 0
    copied: int = 0
    """Those that were copied because nothing in the store could be linked for them."""


class TreeWriter:
    """Writes one tree into the directory `top` (a descriptor), over what is there. `method` is
    reflink, hardlink or copy, `objects` a descriptor of the directory of objects, `kept` the
    variants that are linked, too; `named` says where in it a content is. What was done is added to
    `given`."""

    def __init__(
        self,
        top: int,
        objects: int,
        method: str,
        given: Given,
        kept: VariantSource | None = None,
        named: ContentName = object_name,
    ) -> None:
        self._top, self._objects, self._method, self._given, self._kept = top, objects, method, given, kept
        self._named = named

    def write(self, entries: Sequence[Entry]) -> list[Directory]:
        """Write all entries, which are checked and in walking order. Returns the directories, the
        root among them, which are yet to be finished. Raises Corrupt for an object that is not
        there as stated, or OSError.

        No two entries have one path, and what is no directory has nothing below it: so files may be
        made in any order, by several threads, while directories behind theirs are made."""
        directories = [Directory(b"", 0o755, 0)]
        files: list[File | Symlink] = []
        links: list[HardLink] = []
        started: deque[Future[None]] = deque()
        with ThreadPoolExecutor(min(THREADS_MAX[self._method], os.cpu_count() or 1), "tree-files") as pool:
            try:
                with PathWalk(self._top) as walk:
                    for entry in entries:
                        match entry:
                            case Directory():
                                parent, _, name = entry.path.rpartition(b"/")
                                _make_directory(name, walk.open(parent), opaque=entry.opaque)
                                directories.append(entry)
                            case Whiteout():
                                parent, _, name = entry.path.rpartition(b"/")
                                _remove(name, walk.open(parent))
                            case HardLink():
                                links.append(entry)
                            case _:
                                files.append(entry)
                                if len(files) == FILES_PER_SHARE:
                                    started.append(pool.submit(self._make, files))
                                    files = []
                                    while started and started[0].done():
                                        started.popleft().result()
                started.append(pool.submit(self._make, files))
                for share in started:
                    share.result()
            finally:
                for share in started:
                    share.cancel()
        self._make(links)
        return directories

    def _make(self, entries: Iterable[File | Symlink | HardLink]) -> None:
        """Make entries that are no directories, in walking order; what is in the way is removed."""
        maker = _Maker(self._objects, self._method, self._kept, self._named)
        with PathWalk(self._top) as walk, PathWalk(self._top) as targets:
            for entry in entries:
                parent, _, name = entry.path.rpartition(b"/")
                place = walk.open(parent)
                try:
                    maker.make(entry, name, place, targets)
                except FileExistsError:
                    _remove(name, place)
                    maker.make(entry, name, place, targets)
        with _counting:
            self._given.files += maker.given.files
            self._given.copied += maker.given.copied


class _Maker:
    """Makes files, one after the other. For one thread; what was done is in `given`."""

    def __init__(self, objects: int, method: str, kept: VariantSource | None, named: ContentName) -> None:
        self._objects, self._method, self._kept, self.given = objects, method, kept, Given()
        self._named = named
        self._root = os.geteuid() == 0
        self._checked: os.stat_result | None = None
        """Of the object of the file that is being made, when it was looked at."""

    def make(self, entry: File | Symlink | HardLink, name: bytes, place: int, targets: PathWalk) -> None:
        """Make what is no directory; raises FileExistsError, and has changed nothing, when there is
        something already."""
        match entry:
            case File():
                self._checked = None
                links = entry.size > 0 and self._method == "hardlink"
                if not (links and self._link(entry, name, place)):
                    self._new_file(entry, name, place, entry.mode)
                    self.given.copied += links
                self.given.files += entry.size > 0
            case Symlink():
                os.symlink(entry.target, name, dir_fd=place)
                os.utime(name, ns=(entry.mtime_ns, entry.mtime_ns), dir_fd=place, follow_symlinks=False)
            case HardLink():
                parent, _, target = entry.target.rpartition(b"/")
                source = targets.open(parent)
                os.link(target, name, src_dir_fd=source, dst_dir_fd=place, follow_symlinks=False)

    def _new_file(self, entry: File, name: bytes, place: int, mode: int) -> None:
        file = os.open(name, _NEW, 0o600, dir_fd=place)
        try:
            if entry.size:
                self._fill(entry, file)
            _attach(file, entry)  # while the file may be written to: the kernel asks for that
            os.fchmod(file, mode)
            os.utime(file, ns=(entry.mtime_ns, entry.mtime_ns))
        finally:
            os.close(file)

    def _fill(self, entry: File, file: int) -> None:
        content = self._named(entry.content)
        found = self._checked or check_object(entry, self._objects, content)
        source = os.open(content, _READ, dir_fd=self._objects)
        try:
            if self._method == "reflink":
                fcntl.ioctl(file, kernel.FICLONE, source)
            elif found.st_blocks * 512 >= entry.size:
                _send(entry, source, file, 0, entry.size)  # there can be no holes
            else:
                _copy(entry, source, file)
        finally:
            os.close(source)

    def _link(self, entry: File, name: bytes, place: int) -> bool:
        """Link what is in the store, if it can have the entry's mode and time. Raises
        FileExistsError like every way to make a file."""
        mode = linked_mode(entry, root=self._root)
        if mode is None:
            return False
        try:
            if self._kept is not None and entry.content in self._kept.contents:
                return self._link_variant(self._kept.directory, entry, mode, name, place)
            return self._link_object(entry, mode, name, place)
        except OSError as error:
            if error.errno not in (errno.EMLINK, errno.EXDEV):
                raise
            return False

    def _link_object(self, entry: File, mode: int, name: bytes, place: int) -> bool:
        content = self._named(entry.content)
        with _linking[entry.content[0] % len(_linking)]:
            found = self._checked = check_object(entry, self._objects, content)
            if not _looks(found, entry, mode):
                if found.st_nlink > 1:
                    return False
                os.chmod(content, mode, dir_fd=self._objects)
                os.utime(content, ns=(entry.mtime_ns, entry.mtime_ns), dir_fd=self._objects)
            os.link(content, name, src_dir_fd=self._objects, dst_dir_fd=place, follow_symlinks=False)
        return True

    def _link_variant(self, directory: int, entry: File, mode: int, name: bytes, place: int) -> bool:
        """Link the variant of an object. One that is missing is made, and so is one that was
        changed through a link to it."""
        variant = variant_name(entry.content, mode, entry.mtime_ns)
        for _ in range(2):
            with contextlib.suppress(FileNotFoundError):
                found = os.stat(variant, dir_fd=directory, follow_symlinks=False)
                if stat.S_ISREG(found.st_mode) and found.st_size == entry.size and _looks(found, entry, mode):
                    os.link(variant, name, src_dir_fd=directory, dst_dir_fd=place, follow_symlinks=False)
                    return True
            if not self._make_variant(directory, entry, mode, variant):
                break
        return False

    def _make_variant(self, directory: int, entry: File, mode: int, variant: str) -> bool:
        """Make a variant, or make it anew; it gets its name when it is whole. False when it cannot
        be made."""
        temporary = b".%s" % secrets.token_hex(8).encode()
        try:
            self._new_file(entry, temporary, directory, mode)
            os.rename(temporary, variant, src_dir_fd=directory, dst_dir_fd=directory)
        except BaseException as error:
            with contextlib.suppress(OSError):
                os.unlink(temporary, dir_fd=directory)
            if not isinstance(error, OSError):
                raise
            logger.info("the variant %s cannot be kept: %s", variant, error)
            return False
        return True


def _looks(found: os.stat_result, entry: File, mode: int) -> bool:
    """Whether a file has this mode, and the time of an entry."""
    return stat.S_IMODE(found.st_mode) == mode and found.st_mtime_ns == entry.mtime_ns


def _copy(entry: File, source: int, file: int) -> None:
    """Copy what is no hole. Raises Corrupt when the source has become shorter."""
    end = 0
    while end < entry.size:
        try:
            begin = os.lseek(source, end, os.SEEK_DATA)
        except OSError as error:
            if error.errno != errno.ENXIO:
                raise
            break  # nothing but a hole up to the end
        end = os.lseek(source, begin, os.SEEK_HOLE)
        os.lseek(file, begin, os.SEEK_SET)
        _send(entry, source, file, begin, end)
    os.truncate(file, entry.size)


def _send(entry: File, source: int, file: int, begin: int, end: int) -> None:
    """Copy to where the file is. Raises Corrupt when the source has become shorter."""
    while begin < end:
        sent = os.sendfile(file, source, begin, min(end - begin, _SEND_MAX))
        if sent == 0:
            raise wrong_object(entry, f"ends at {begin} of {entry.size} bytes")
        begin += sent


def _make_directory(name: bytes, place: int, *, opaque: bool) -> None:
    """Make a directory, or take the one that is there; `opaque` ones are emptied, and anything else
    in its place is removed."""
    try:
        os.mkdir(name, 0o700, dir_fd=place)
    except FileExistsError:
        if not stat.S_ISDIR(os.stat(name, dir_fd=place, follow_symlinks=False).st_mode):
            os.unlink(name, dir_fd=place)
            os.mkdir(name, 0o700, dir_fd=place)
        elif opaque:
            remove_tree(name, keep=True, dir_fd=place)


def _remove(name: bytes, place: int) -> None:
    try:
        found = os.stat(name, dir_fd=place, follow_symlinks=False)
    except FileNotFoundError:
        return
    if stat.S_ISDIR(found.st_mode):
        remove_tree(name, dir_fd=place)
    else:
        os.unlink(name, dir_fd=place)


def finish(top: int, directories: Iterable[Directory]) -> None:
    """Give directories below `top` their modes, times and attributes; of several for one path the
    last counts, and what is no directory any more is passed over. The top itself stays writable, or
    it could not be renamed. Raises OSError."""
    found = {directory.path: directory for directory in directories}
    with PathWalk(top) as walk:
        for path in sorted(found, key=walking_order, reverse=True):
            parent, _, name = path.rpartition(b"/")
            try:
                place = os.open(name or b".", _DIRECTORY, dir_fd=walk.open(parent))
            except OSError as error:
                if error.errno in _NO_DIRECTORY:
                    continue
                raise
            try:
                _set_attributes(place, found[path])
            finally:
                os.close(place)


def _attach(handle: int, entry: File | Directory) -> None:
    """Give what is open the extended attributes of an entry. Raises P2PDistError where its file
    system has none, or not so long ones: ext4 says of these that no space is left."""
    for attribute, value in entry.xattrs:
        try:
            os.setxattr(handle, attribute, value)
        except OSError as error:
            space = os.fstatvfs(handle)
            room = space.f_bavail * space.f_frsize > ATTRIBUTE_ROOM_BYTES
            if error.errno not in (errno.EOPNOTSUPP, errno.E2BIG) and not (error.errno == errno.ENOSPC and room):
                raise
            raise P2PDistError(
                f"{printable(os.fsdecode(entry.path))} has the extended attribute {printable(os.fsdecode(attribute))} "
                f"of {len(value)} bytes, which the file system here cannot hold",
                remedy="Take another file system (Btrfs holds 16 KiB, XFS 64 KiB), or pack it without --xattrs",
            ) from error


def _set_attributes(place: int, directory: Directory) -> None:
    wanted = dict(directory.xattrs)
    for name in _attributes(place):
        if name.startswith("user.") and os.fsencode(name) not in wanted:
            os.removexattr(place, name)  # of a lower layer
    _attach(place, directory)
    os.fchmod(place, directory.mode | (0 if directory.path else stat.S_IRWXU))
    os.utime(place, ns=(directory.mtime_ns, directory.mtime_ns))


def _attributes(place: int) -> list[str]:
    try:
        return os.listxattr(place)
    except OSError as error:
        if error.errno == errno.EOPNOTSUPP:
            return []  # the file system keeps none
        raise
