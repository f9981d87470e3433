"""Trees for tests: a store of objects, generated entries, and what a directory holds, to be
compared."""

from __future__ import annotations

import errno
import os
import random
import stat
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from p2pdist.model.tree import (
    WHOLE_MAX,
    Directory,
    Entry,
    File,
    HardLink,
    Symlink,
    Whiteout,
    Xattrs,
    check_entries,
    content_hash,
    walking_order,
)
from p2pdist.mount.erofs.writer import object_name
from p2pdist.mount.layers import SquashfsLayer, TreeLayer

MTIME_NS = 1_700_000_000_123_456_789


@dataclass(frozen=True)
class Store:
    """Objects and images below one directory."""

    path: Path

    @property
    def objects(self) -> Path:
        return self.path / "objects"

    def object(self, content: bytes) -> Path:
        return self.objects / object_name(content).decode()

    def put(self, data: bytes) -> bytes:
        """Store a content as the agent does; returns its name."""
        content = content_hash(data)
        place = self.object(content)
        place.parent.mkdir(parents=True, exist_ok=True)
        if data and not place.exists():
            place.write_bytes(data)
            place.chmod(0o444)
        return content

    def file(self, path: bytes, data: bytes, mode: int = 0o644, mtime_ns: int = MTIME_NS, xattrs: Xattrs = ()) -> File:
        chunks = bytes(32) if len(data) > WHOLE_MAX else b""
        return File(path, mode, mtime_ns, len(data), self.put(data), chunks, xattrs)

    def layer(self, name: str, entries: Sequence[Entry]) -> TreeLayer:
        """The layer with these entries, in any order."""
        ordered = sorted(entries, key=lambda entry: walking_order(entry.path))
        check_entries(ordered)
        self.objects.mkdir(parents=True, exist_ok=True)
        return TreeLayer(lambda: ordered, self.path / f"{name}.erofs", self.objects)


def random_tree(seed: int, store: Store, *, names: Sequence[bytes] = (), count: int = 120) -> list[Entry]:
    """About `count` entries of every kind, with names from `names` or odd ones; few names make
    layers meet in many places."""
    choose = random.Random(seed)

    def name() -> bytes:
        if names:
            return choose.choice(names)
        length = choose.choice([1, 2, 3, 17, 255])
        return bytes(choose.choice(b"!.-a\x01\x7f\x80\xff\n\\:, Z") for _ in range(length))

    def mtime_ns() -> int:
        return choose.randrange(-(10**18), 4 * 10**18)

    found: dict[bytes, Entry] = {}
    directories = [b""]
    files: list[bytes] = []
    for _ in range(count):
        above, last = choose.choice(directories), name()
        path = above + b"/" + last if above else last
        if last in (b".", b"..") or path in found or len(path) > 2000:
            continue
        mode = choose.choice([0o644, 0o755, 0o600, 0o444, 0o555, 0o1777, 0o666, 0])
        xattrs = ((b"user.note", choose.randbytes(choose.randrange(60))),) if choose.random() < 0.2 else ()
        match choose.randrange(10):
            case 0 | 1 | 2 | 3:
                found[path] = Directory(path, mode, mtime_ns(), choose.random() < 0.3, xattrs)
                directories.append(path)
            case 4:
                found[path] = Symlink(path, mtime_ns(), choose.choice([b"/", b"..", b"a", b"loop", b"t" * 1000]))
            case 5:
                found[path] = Whiteout(path)
            case 6 if files:
                found[path] = HardLink(path, choose.choice(files))
            case _:
                data = choose.choice([b"", b"x", b"y" * choose.randrange(10000), choose.randbytes(9)])
                found[path] = store.file(path, data, mode, mtime_ns(), xattrs)
                files.append(path)
    return _first_names_first(found)


def _first_names_first(found: dict[bytes, Entry]) -> list[Entry]:
    """In walking order, with the file at the first of its names."""
    groups: dict[bytes, list[bytes]] = {}
    for path, entry in found.items():
        if isinstance(entry, HardLink):
            groups.setdefault(entry.target, [entry.target]).append(path)
    for target, paths in groups.items():
        file = found[target]
        assert isinstance(file, File)
        first, *others = sorted(paths, key=walking_order)
        found[first] = File(first, file.mode, file.mtime_ns, file.size, file.content, b"", file.xattrs)
        found.update((path, HardLink(path, first)) for path in others)
    return [found[path] for path in sorted(found, key=walking_order)]


@dataclass(frozen=True)
class Seen:
    """What is seen of one name. `same` is the first name in walking order that is the same file."""

    kind: str
    mode: int
    mtime_ns: int
    data: bytes = b""
    xattrs: Xattrs = ()
    same: bytes = b""


Read = Callable[[File], bytes]


def expected(layers: Sequence[Sequence[Entry]], store: Store) -> dict[bytes, Seen]:
    """What `layers`, bottom to top, show: slow and obvious."""
    merged: dict[bytes, tuple[Entry, int]] = {}

    def remove(path: bytes, *, keep: bool = False) -> None:
        for other in [other for other in merged if other.startswith(path + b"/") or (other == path and not keep)]:
            del merged[other]

    for number, entries in enumerate(layers):
        files = {entry.path: entry for entry in entries if isinstance(entry, File)}
        for entry in entries:
            there = merged.get(entry.path)
            if not (isinstance(entry, Directory) and there and isinstance(there[0], Directory)) or entry.opaque:
                remove(entry.path)
            if not isinstance(entry, Whiteout):
                merged[entry.path] = (entry, number)
        for path, (entry, layer) in list(merged.items()):
            if isinstance(entry, HardLink) and layer == number:
                merged[path] = (files[entry.target], number)
    first: dict[tuple[bytes, int], bytes] = {}
    for path in sorted(merged, key=walking_order):
        entry, number = merged[path]
        if isinstance(entry, File):
            first.setdefault((entry.path, number), path)
    return {path: _seen(entry, store, first.get((entry.path, number), b"")) for path, (entry, number) in merged.items()}


def _seen(entry: Entry, store: Store, same: bytes) -> Seen:
    match entry:
        case File():
            data = store.object(entry.content).read_bytes() if entry.size else b""
            return Seen("file", entry.mode, entry.mtime_ns, data, entry.xattrs, same)
        case Directory():
            return Seen("directory", entry.mode, entry.mtime_ns, b"", entry.xattrs)
        case Symlink():
            return Seen("symlink", 0o777, entry.mtime_ns, entry.target)
    raise AssertionError(entry)


def walk(top: Path) -> dict[bytes, Seen]:
    """What is below a directory, by relative path."""
    found: dict[bytes, Seen] = {}
    inodes: dict[tuple[int, int], bytes] = {}
    root = os.fsencode(top)
    paths = []
    for above, directories, files in os.walk(root):
        paths += [os.path.relpath(os.path.join(above, name), root) for name in directories + files]
    for path in sorted(paths, key=walking_order):
        place = os.path.join(root, path)
        entry = os.lstat(place)
        mode, mtime_ns = stat.S_IMODE(entry.st_mode), entry.st_mtime_ns
        if stat.S_ISLNK(entry.st_mode):
            found[path] = Seen("symlink", mode, mtime_ns, os.readlink(place))
            continue
        xattrs = tuple((os.fsencode(name), os.getxattr(place, name)) for name in _attributes(place))
        if stat.S_ISDIR(entry.st_mode):
            found[path] = Seen("directory", mode, mtime_ns, b"", xattrs)
        else:
            assert stat.S_ISREG(entry.st_mode), path
            same = inodes.setdefault((entry.st_dev, entry.st_ino), path)
            found[path] = Seen("file", mode, mtime_ns, Path(os.fsdecode(place)).read_bytes(), xattrs, same)
            assert entry.st_size == len(found[path].data)
    return found


def _attributes(place: bytes) -> list[str]:
    try:
        return sorted(name for name in os.listxattr(place) if name.startswith("user."))
    except OSError as error:
        if error.errno == errno.EOPNOTSUPP:
            return []  # from a squashfs image that has none at all
        raise


def without_groups(seen: dict[bytes, Seen]) -> dict[bytes, Seen]:
    """Hard links of equal contents to one object are one file."""
    return {path: Seen(one.kind, one.mode, one.mtime_ns, one.data, one.xattrs) for path, one in seen.items()}


def lay_out(entries: Sequence[Entry], store: Store, top: Path) -> None:
    """Make a directory as an overlay's upper one with these entries; modes and times are left to
    `finish`."""
    top.mkdir(parents=True)
    for entry in entries:
        path = top / os.fsdecode(entry.path)
        match entry:
            case Directory():
                path.mkdir()
                if entry.opaque:
                    os.setxattr(path, b"trusted.overlay.opaque", b"y")
            case Whiteout():
                os.mknod(path, stat.S_IFCHR, 0)
            case Symlink():
                path.symlink_to(os.fsdecode(entry.target))
            case HardLink():
                path.hardlink_to(top / os.fsdecode(entry.target))
            case _:
                path.write_bytes(store.object(entry.content).read_bytes() if entry.size else b"")
        for name, value in entry.xattrs if isinstance(entry, File | Directory) else ():
            os.setxattr(path, name, value)


def finish(entries: Sequence[Entry], top: Path) -> None:
    """Give what was laid out the modes and times of the entries."""
    for entry in reversed(entries):
        path = top / os.fsdecode(entry.path)
        if isinstance(entry, File | Directory):
            path.chmod(entry.mode)
        if isinstance(entry, File | Directory | Symlink):
            os.utime(path, ns=(entry.mtime_ns, entry.mtime_ns), follow_symlinks=False)


def squashed(tmp_path: Path, name: str, entries: list[Entry], store: Store, *, xattrs: bool = True) -> SquashfsLayer:
    """A squashfs image with the content of a tree, made from a directory as an overlay's upper
    one."""
    source = tmp_path / "squashed" / name
    lay_out(entries, store, source)
    image = tmp_path / f"{name}.squashfs"
    command = ["mksquashfs", source, image, "-quiet", "-no-progress", "-all-root", "-comp", "gzip"]
    command.append("-xattrs" if xattrs else "-no-xattrs")
    subprocess.run(command, check=True, capture_output=True)
    return SquashfsLayer(image)
