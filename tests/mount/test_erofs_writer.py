"""EROFS images of trees, mounted by the kernel under an overlay: all of this needs root."""

from __future__ import annotations

import errno
import os
import random
import stat
import subprocess
import sys
from io import FileIO
from pathlib import Path
from typing import BinaryIO, cast

import pytest
from formats_rig import encode_pages
from shown_trees import MTIME_NS, Store, expected, random_tree, walk

from p2pdist.model.device import Cells, DeviceLayout
from p2pdist.model.errors import Corrupt
from p2pdist.model.tree import Directory, Entry, File, HardLink, Symlink, Whiteout, content_hash, walking_order
from p2pdist.mount import kernel
from p2pdist.mount.erofs.writer import BLOCK_SIZE, Device, is_image, mount_image, write_image, write_image_to
from p2pdist.mount.views import mount_view, unmount_view
from p2pdist.store.trees.images import image_bytes_max

pytestmark = pytest.mark.root


@pytest.fixture
def store(tmp_path: Path) -> Store:
    """An empty store."""
    return Store(tmp_path / "store")


@pytest.fixture
def view(tmp_path: Path) -> Path:
    return tmp_path / "view"


def shown(store: Store, entries: list[Entry], view: Path, work: Path) -> dict[bytes, object]:
    """What the kernel shows of a tree."""
    mount_view([store.layer("tree", entries)], view, work=work, method="erofs")
    try:
        return dict(walk(view))
    finally:
        unmount_view(view, work=work)


@pytest.mark.parametrize("seed", range(8))
def test_generated_trees_look_as_they_are(store: Store, view: Path, work: Path, seed: int) -> None:
    """Every kind of entry, odd names, times before 1970, attributes, hard links: all of it comes
    back; whiteouts are not seen."""
    entries = random_tree(seed, store, count=400)
    assert len({type(entry) for entry in entries}) == 5
    assert shown(store, entries, view, work) == expected([entries], store)


def test_whiteouts_of_the_lowest_layer_are_not_listed(store: Store, view: Path, work: Path) -> None:
    """Also in directories that no other layer has, and below opaque ones."""
    entries = [
        Whiteout(b"a"),
        Directory(b"d", 0o755, 0),
        Whiteout(b"d/gone"),
        Directory(b"o", 0o755, 0, True),
        Directory(b"o/d", 0o755, 0),
        Whiteout(b"o/d/gone"),
        Whiteout(b"o/gone"),
    ]
    assert set(shown(store, entries, view, work)) == {b"d", b"o", b"o/d"}


def test_the_root_and_counts_of_links(store: Store, view: Path, work: Path) -> None:
    """The directory itself has mode 0755 and time 0; link counts are those of the tree; owners are
    root."""
    entries = [store.file(b"a", b"1"), HardLink(b"b", b"a"), Directory(b"d", 0o700, 5), HardLink(b"d/c", b"a")]
    mount_view([store.layer("tree", entries)], view, work=work)
    root = view.stat()
    assert (stat.S_IMODE(root.st_mode), root.st_mtime_ns, root.st_uid, root.st_gid) == (0o755, 0, 0, 0)
    assert (view / "a").stat().st_nlink == 3
    assert (view / "d").stat().st_nlink == 2
    assert root.st_nlink == 3
    unmount_view(view, work=work)


@pytest.mark.parametrize("count", [300, 5000])
def test_every_name_of_a_large_directory_is_found(store: Store, view: Path, work: Path, count: int) -> None:
    """Names are dealt into blocks so that the kernel's search by name finds each, whatever sorts
    before the dots, and no other."""
    choose = random.Random(count)
    names = {bytes(choose.choice(b"!#-./abc\xff".replace(b"/", b"")) for _ in range(n % 250 + 1)) for n in range(count)}
    names -= {b".", b".."}
    content = store.put(b"x")
    entries = [File(name, 0o644, 1, 1, content) for name in sorted(names)]
    found = shown(store, list(entries), view, work)
    assert set(found) == names
    mount_view([store.layer("tree", entries)], view, work=work)
    for name in names:
        absent = name[:-1] + b"~"
        assert not os.path.lexists(os.path.join(os.fsencode(view), absent))
    unmount_view(view, work=work)


def test_a_hundred_thousand_names_in_one_directory(store: Store, view: Path, work: Path) -> None:
    """Listed and found."""
    content = store.put(b"x")
    entries: list[Entry] = [Directory(b"big", 0o755, 1)]
    entries += [File(b"big/%06d" % number, 0o644, number, 1, content) for number in range(100_000)]
    mount_view([store.layer("tree", entries)], view, work=work)
    assert sorted(os.listdir(view / "big")) == [f"{number:06}" for number in range(100_000)]
    for number in range(0, 100_000, 997):
        assert (view / "big" / f"{number:06}").stat().st_mtime_ns == number
    unmount_view(view, work=work)


def test_directories_around_the_size_of_a_block(store: Store, view: Path, work: Path) -> None:
    """Where the names just fit behind the inode, no longer fit, fill a block, or need another."""
    entries: list[Entry] = []
    for size in range(BLOCK_SIZE - 150, BLOCK_SIZE + 20):
        directory = b"%04d" % size
        entries.append(Directory(directory, 0o755, 1))
        left = size - 2 * 12 - 3  # `.` and `..`
        names = [b"%03d" % number + b"n" * 197 for number in range(left // 212)]
        left -= 212 * len(names)
        names += [b"x" * (left - 12)] if left > 12 else []
        assert sum(map(len, names)) + 12 * len(names) + 27 in range(size - 12, size + 1)
        entries += [Symlink(directory + b"/" + name, 1, b"t") for name in names]
    assert shown(store, entries, view, work) == expected([entries], store)


def test_links_of_every_length(store: Store, view: Path, work: Path) -> None:
    """Short targets lie behind their inode, within a block; the longest have a block of their
    own."""
    lengths = [1, 2, 31, 32, 33, 500, 1000, 2000, 3000, 4000, 4031, 4032, 4033, 4094, 4095] * 3
    entries: list[Entry] = [Symlink(b"%05d" % number, number, b"t" * length) for number, length in enumerate(lengths)]
    assert shown(store, entries, view, work) == expected([entries], store)


def test_attributes_of_any_size(store: Store, view: Path, work: Path) -> None:
    """Across blocks, empty ones, and up to all that a tree may carry."""
    many = tuple((b"user.%05d" % number, bytes([number % 256]) * 10) for number in range(3000))
    one = ((b"user." + b"n" * 250, b""), (b"user.v", b"v" * 60_000))
    entries: list[Entry] = [
        Directory(b"d", 0o755, 1, False, one),
        store.file(b"d/f", b"1", xattrs=many),
        store.file(b"empty", b"", xattrs=one),
        store.file(b"f", b"1", xattrs=one),
        Directory(b"o", 0o755, 1, True, ((b"user.k", b"v"),)),
    ]
    layer = store.layer("tree", entries)
    write_image(layer.entries(), layer.image)
    view.mkdir()
    mount_image(layer.image, view)  # a list of that many names is too long to be asked for through an overlay
    try:
        for entry in entries:
            path = view / os.fsdecode(entry.path)
            for name, value in entry.xattrs:  # type: ignore[union-attr]
                assert os.getxattr(path, name) == value
        assert os.getxattr(view / "f", "trusted.overlay.metacopy") == b""
        assert len(os.getxattr(view / "f", "trusted.overlay.redirect")) == 66
        assert os.getxattr(view / "o", "trusted.overlay.opaque") == b"y"
        assert os.listxattr(view / "empty") == [os.fsdecode(name) for name, _ in one]
    finally:
        kernel.unmount(view)


def test_a_deep_tree_and_the_longest_path(store: Store, view: Path, work: Path) -> None:
    """A thousand directories below each other, and a path of 4,095 bytes."""
    entries: list[Entry] = [Directory(b"/".join([b"d"] * depth), 0o755, depth) for depth in range(1, 1001)]
    entries.append(store.file(entries[-1].path + b"/end", b"deep"))
    long = [b"n" * 255] * 15 + [b"n" * 240]
    entries += [Directory(b"/".join(long[:depth]), 0o755, depth) for depth in range(1, 16)]
    entries.append(store.file(b"/".join(long) + b"/leaf"[:0], b"long"))
    layer = store.layer("tree", entries)
    mount_view([layer], view, work=work)
    try:
        assert (view / os.fsdecode(entries[1000].path)).read_bytes() == b"deep"
        place = os.open(view, os.O_PATH)
        for name in long[:-1]:
            below = os.open(name, os.O_PATH, dir_fd=place)
            os.close(place)
            place = below
        assert os.stat(long[-1], dir_fd=place).st_size == 4
        os.close(place)
    finally:
        unmount_view(view, work=work)


def test_files_that_are_larger_than_a_chunk(store: Store, view: Path) -> None:
    """Sizes up to the limit of 64 TiB; read from the image itself, such a file is one hole."""
    sizes = [(8 << 40) - 1, 8 << 40, (8 << 40) + 1, 64 << 40]
    content, chunks = content_hash(b"?"), bytes(32)
    entries: list[Entry] = [File(b"%d" % number, 0o644, 1, size, content, chunks) for number, size in enumerate(sizes)]
    layer = store.layer("tree", entries)
    write_image(entries, layer.image)
    view.mkdir()
    mount_image(layer.image, view)
    try:
        for number, size in enumerate(sizes):
            with (view / str(number)).open("rb") as file:
                assert os.fstat(file.fileno()).st_size == size
                assert os.pread(file.fileno(), 5, size - 3) == bytes(3)
    finally:
        kernel.unmount(view)


def test_an_empty_tree(store: Store, view: Path, work: Path) -> None:
    """Nothing in it, and no objects at all."""
    assert shown(store, [], view, work) == {}


_WRITE = """
import sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from shown_trees import Store, random_tree
from p2pdist.mount.erofs.writer import write_image
write_image(random_tree(7, Store(Path(sys.argv[2]))), Path(sys.argv[3]))
"""


def test_equal_trees_give_equal_images(store: Store, tmp_path: Path) -> None:
    """In any process; other trees give others, also where only the identity of the file system is
    compared."""
    images = []
    for seed in ("1", "2"):
        image = tmp_path / f"{seed}.erofs"
        command = [sys.executable, "-c", _WRITE, str(Path(__file__).parent), str(store.path), str(image)]
        subprocess.run(command, env={**os.environ, "PYTHONHASHSEED": seed}, check=True)
        images.append(image.read_bytes())
    assert images[0] == images[1]
    other = tmp_path / "other.erofs"
    write_image(random_tree(8, store), other)
    assert other.read_bytes()[1024 + 48 : 1024 + 64] != images[0][1024 + 48 : 1024 + 64]
    assert not list(tmp_path.glob("*.partial"))


def test_what_is_no_whole_image_is_known(store: Store, tmp_path: Path) -> None:
    """Missing, cut short, empty or something else."""
    image = tmp_path / "image"
    assert not is_image(image)
    write_image([store.file(b"a", b"1")], image)
    assert is_image(image)
    data = image.read_bytes()
    for damaged in (b"", data[:1000], data[:-1], data + b"x", bytes(len(data)), b"x" * len(data)):
        image.write_bytes(damaged)
        assert not is_image(image)


@pytest.mark.parametrize("code", [errno.EIO, errno.EBADMSG, errno.EUCLEAN, errno.EACCES])
def test_what_the_disk_has_lost_is_no_image(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, code: int) -> None:
    """By whatever number its file system says so. What else cannot be read may be one."""
    image = tmp_path / "image"

    def lost(path: Path, mode: str) -> BinaryIO:
        raise OSError(code, os.strerror(code), path)

    monkeypatch.setattr(Path, "open", lost)
    if code == errno.EACCES:
        with pytest.raises(PermissionError):
            is_image(image)
    else:
        assert not is_image(image)


def test_a_broken_image_is_made_again(store: Store, view: Path, work: Path) -> None:
    """What a crash of the machine left is no reason to fail; one that is whole is used as it is."""
    layer = store.layer("tree", [store.file(b"a", b"1")])
    layer.image.write_bytes(b"")
    mount_view([layer], view, work=work, method="erofs")
    assert (view / "a").read_bytes() == b"1"
    unmount_view(view, work=work)
    inode = layer.image.stat().st_ino
    mount_view([layer], view, work=work, method="erofs")
    unmount_view(view, work=work)
    assert layer.image.stat().st_ino == inode


def test_a_damaged_image_never_hangs_the_kernel(store: Store, tmp_path: Path, view: Path) -> None:
    """The writer's own images are not handed on, so it is enough that damage is an error and no
    crash."""
    image = tmp_path / "image"
    write_image([Directory(b"d", 0o755, MTIME_NS), store.file(b"d/a", b"1")], image)
    data = bytearray(image.read_bytes())
    data[1152] = 0xFF  # the root's format
    image.write_bytes(data)
    view.mkdir()
    with pytest.raises((Corrupt, OSError)):
        mount_image(image, view)


def test_order_is_that_of_the_kernel() -> None:
    """Walking order puts the names of one directory in the order of their bytes, which the
    directory's blocks rely on."""
    names = [b"a", b"a!", b"a.b", b"a-", b"ab", b"\x01", b"\xff", b"A"]
    assert sorted(names, key=walking_order) == sorted(names)


@pytest.mark.parametrize("seed", range(6))
def test_the_store_keeps_enough_room(store: Store, tmp_path: Path, seed: int) -> None:
    """An image is no longer than the bound that counts until it is there, also where directories
    just miss what fits into a block."""
    names = [bytes([97 + number]) * (1 + 37 * number) for number in range(7)] if seed % 2 else []
    found = {entry.path: entry for entry in random_tree(seed, store, names=names, count=600)}
    if seed > 3:
        wide = [Directory(b"w%d" % number, 0o755, 0) for number in range(40)]
        found |= {each.path: each for each in wide}
        for each in wide:
            for number in range(13 + seed):
                path = each.path + b"/" + b"%03d" % number + b"n" * 250
                found[path] = store.file(path, b"")
    entries = store.layer("any", found.values()).entries()
    write_image(entries, tmp_path / "image")
    assert (tmp_path / "image").stat().st_size <= image_bytes_max(len(entries), sum(map(len, encode_pages(entries))))


class _Counted(FileIO):
    """A file that knows how much of it came at once."""

    at_once = 0

    def write(self, data: bytes) -> int:  # type: ignore[override]
        self.at_once = max(self.at_once, len(data))
        return super().write(data)


@pytest.mark.parametrize("whole", [True, False])
def test_the_image_of_a_huge_file_is_written_in_parts(tmp_path: Path, whole: bool) -> None:
    """Its inode has 8 bytes for each block."""
    size, name, path = 10 << 30, bytes(32), tmp_path / "image"
    device = Device(size, DeviceLayout({name: size}, {}).first_blocks(), Cells(headed=True), whole)
    with _Counted(path, "w") as file:
        write_image_to(cast(BinaryIO, file), [File(b"weights", 0o644, 0, size, name)], device)
        assert file.at_once < 10 << 20
    assert is_image(path) and path.stat().st_size > size // BLOCK_SIZE * 8
