"""Packages with trees in every way that they can be shown. Without a test's own note all of this needs root."""

from __future__ import annotations

import os
import resource
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec
import pytest
from shown_trees import MTIME_NS, Seen, Store, expected, random_tree, walk
from unprivileged import NOBODY, as_nobody

from p2pdist.model.errors import Conflict, Corrupt, DiskFull, P2PDistError, UsageError
from p2pdist.model.tree import Directory, Entry, HardLink, Symlink, Whiteout
from p2pdist.mount import kernel
from p2pdist.mount.layers import SquashfsLayer, TreeLayer
from p2pdist.mount.show import clean_leftovers, show, shown, unshow

LayerMaker = Callable[..., Path]
pytestmark = pytest.mark.root

NAMES = [b"a", b"b", b"c", b"lib", b"\xff", b"a.b"]


@pytest.fixture
def store(tmp_path: Path) -> Store:
    """An empty store, on the file system of the temporary directory."""
    return Store(tmp_path / "store")


@pytest.fixture
def view(tmp_path: Path) -> Path:
    return tmp_path / "view"


@pytest.fixture(scope="module", params=["btrfs", "xfs"])
def cloning(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A file system that shares blocks between files."""
    kind = request.param
    tool = f"mkfs.{kind}"
    if shutil.which(tool) is None:
        pytest.skip(f"needs {tool}")
    directory = tmp_path_factory.mktemp(kind)
    image, place = directory / "disk", directory / "mounted"
    with image.open("wb") as file:
        file.truncate(400 << 20)
    subprocess.run([tool, "-q", str(image)], check=True, capture_output=True)
    place.mkdir()
    subprocess.run(["mount", "-o", "loop", str(image), str(place)], check=True)
    try:
        yield place
    finally:
        subprocess.run(["umount", str(place)], check=True)  # the loop device clears itself


@pytest.fixture
def on_cloning(cloning: Path, request: pytest.FixtureRequest) -> Iterator[Path]:
    """An empty directory there."""
    place = cloning / "test"
    place.mkdir()
    yield place
    shutil.rmtree(place)


# -- every way shows the same


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("how", ["erofs", "copy"])
def test_a_generated_tree(store: Store, view: Path, work: Path, how: str, seed: int) -> None:
    """Kinds, bytes, modes, times, targets, hard links and attributes are those of the tree; nothing is left afterwards."""
    entries = random_tree(seed, store, count=300)
    done = show([store.layer("tree", entries)], view, work=work, how=how)
    assert done.how == how and done.why.startswith(f"{how}: ")
    assert walk(view) == expected([entries], store)
    unshow(view, work=work)
    assert not view.exists() and not list(work.iterdir())


@pytest.mark.parametrize("how", ["reflink", "unpack", None])
def test_a_generated_tree_where_blocks_are_shared(on_cloning: Path, work: Path, how: str | None) -> None:
    """Also as the best way without a mount."""
    store = Store(on_cloning / "store")
    entries = random_tree(11, store, count=300)
    layer = store.layer("tree", entries)
    done = show([layer], on_cloning / "view", work=work, how=how)
    assert done.how == ("erofs" if how is None else "reflink")
    assert walk(done.path) == expected([entries], store)
    unshow(done.path, work=work)


def without_groups(seen: dict[bytes, Seen]) -> dict[bytes, Seen]:
    """Hard links of equal contents to one object are one file."""
    return {path: Seen(one.kind, one.mode, one.mtime_ns, one.data, one.xattrs) for path, one in seen.items()}


@pytest.mark.parametrize("seed", range(4))
def test_a_generated_tree_by_hard_links(store: Store, view: Path, work: Path, seed: int) -> None:
    """The same but for equal files being one; every name that the tree says is the same file is."""
    entries = random_tree(seed, store, count=300)
    done = show([store.layer("tree", entries)], view, work=work, how="hardlink")
    assert without_groups(walk(view)) == without_groups(expected([entries], store))
    for entry in entries:
        if isinstance(entry, HardLink):
            assert (view / os.fsdecode(entry.path)).samefile(view / os.fsdecode(entry.target))
    assert "files are those of the store" in done.why and "copies" in done.why
    unshow(view, work=work)


def test_who_gets_the_object_and_who_a_copy(store: Store, view: Path, work: Path, tmp_path: Path) -> None:
    """The first entry gives it mode and time; one with others, with attributes, or that others may write to is a copy. A later package
    may give it others once nobody links it."""
    entries = [
        store.file(b"first", b"same", 0o755, 5),
        store.file(b"mode", b"same", 0o644, 5),
        store.file(b"second", b"same", 0o755, 5),
        store.file(b"time", b"same", 0o755, 6),
        store.file(b"attributes", b"same", 0o755, 5, ((b"user.k", b"v"),)),
        store.file(b"open", b"other", 0o666, 5),
        store.file(b"unreadable", b"third", 0o200, 5),
    ]
    ours = store.object(entries[0].content)
    done = show([store.layer("tree", entries)], view, work=work, how="hardlink")
    assert without_groups(walk(view)) == without_groups(expected([sorted(entries, key=lambda e: e.path)], store))
    linked = {path.name for path in view.iterdir() if path.stat().st_nlink > 1}
    # In walking order `attributes` comes first, and does not touch the object.
    assert linked == {"first", "second"}
    assert (view / "first").samefile(ours)
    assert "2 of 7 files are those of the store, 5 are copies" in done.why
    other = store.layer("other", [store.file(b"x", b"same", 0o644, 7)])
    show([other], tmp_path / "other", work=work, how="hardlink")
    assert not (tmp_path / "other" / "x").samefile(ours)
    unshow(view, work=work)
    unshow(tmp_path / "other", work=work)
    show([other], view, work=work, how="hardlink")
    assert (view / "x").samefile(ours)
    unshow(view, work=work)
    assert ours.read_bytes() == b"same"


def test_copies_keep_holes(store: Store, view: Path, work: Path) -> None:
    """A file that is mostly holes takes as few blocks in a copy, at its beginning, within and at its end."""
    data = bytes(1 << 20) + b"x" * 4096 + bytes(5 << 20) + b"y" + bytes(3 << 20)
    entry = store.file(b"sparse", data)
    place = store.object(entry.content)
    place.unlink()
    with place.open("wb") as file:
        file.truncate(len(data))
        os.pwrite(file.fileno(), b"x" * 4096, 1 << 20)
        os.pwrite(file.fileno(), b"y", (1 << 20) + 4096 + (5 << 20))
    show([store.layer("tree", [entry])], view, work=work, how="copy")
    assert (view / "sparse").read_bytes() == data
    assert (view / "sparse").stat().st_blocks <= place.stat().st_blocks < 100
    unshow(view, work=work)


# -- stacks


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("how", ["erofs", "copy", "hardlink"])
def test_trees_over_trees(store: Store, view: Path, work: Path, how: str, seed: int) -> None:
    """Three layers that meet in every way: whiteouts and opaque directories hide what is below, files replace directories and the other
    way round. The slow model says what is seen."""
    trees = [random_tree(seed * 3 + number, store, names=NAMES) for number in range(3)]
    layers = [store.layer(str(number), entries) for number, entries in enumerate(trees)]
    show(layers, view, work=work, how=how)
    seen, wanted = walk(view), expected(trees, store)
    assert (without_groups(seen) == without_groups(wanted)) if how == "hardlink" else (seen == wanted)
    unshow(view, work=work)
    assert not list(work.iterdir())


def squashed(tmp_path: Path, name: str, entries: list[Entry], store: Store, *, xattrs: bool = True) -> SquashfsLayer:
    """A squashfs image with the content of a tree, made from a directory as an overlay's upper one."""
    source = tmp_path / "squashed" / name
    source.mkdir(parents=True)
    for entry in entries:
        path = source / os.fsdecode(entry.path)
        match entry:
            case Directory():
                path.mkdir()
                for name, value in (*entry.xattrs, *([(b"trusted.overlay.opaque", b"y")] if entry.opaque else [])):
                    os.setxattr(path, name, value)
            case Whiteout():
                os.mknod(path, stat.S_IFCHR, 0)
            case Symlink():
                path.symlink_to(os.fsdecode(entry.target))
            case HardLink():
                path.hardlink_to(source / os.fsdecode(entry.target))
            case _:
                path.write_bytes(store.object(entry.content).read_bytes() if entry.size else b"")
    image = tmp_path / f"{name}.squashfs"
    command = ["mksquashfs", source, image, "-quiet", "-no-progress", "-all-root", "-comp", "gzip"]
    command.append("-xattrs" if xattrs else "-no-xattrs")
    subprocess.run(command, check=True, capture_output=True)
    return SquashfsLayer(image)


@pytest.mark.parametrize("xattrs", [False, True])
@pytest.mark.parametrize("kinds", ["ts", "st", "tst", "sts", "stst"])
def test_mixed_stacks(store: Store, tmp_path: Path, work: Path, kinds: str, xattrs: bool) -> None:
    """Squashfs layers and trees in any order: the kernel and plain files agree, and nearly so with the model, which knows nothing of the
    times of a squashfs. Images with extended attributes are not mounted beside a tree."""
    trees = [
        [entry for entry in random_tree(50 + number, store, names=NAMES) if kind == "t" or not _listed(entry)]
        for number, kind in enumerate(kinds)
    ]
    if not xattrs:
        trees = [
            [_plain(entry) for entry in entries] if kind == "s" else entries
            for kind, entries in zip(kinds, trees, strict=True)
        ]
    layers = [
        store.layer(str(number), entries)
        if kind == "t"
        else squashed(tmp_path, str(number), entries, store, xattrs=xattrs)
        for number, (kind, entries) in enumerate(zip(kinds, trees, strict=True))
    ]
    mounted = show(layers, tmp_path / "mounted", work=work)
    assert ("extended attributes" if xattrs else "of them trees") in mounted.why
    assert (mounted.how == "erofs") is not xattrs
    copied = show(layers, tmp_path / "copied", work=work, how="copy")
    seen = walk(mounted.path)
    assert seen == walk(copied.path)
    assert {path: (one.kind, one.data) for path, one in seen.items()} == {
        path: (one.kind, one.data) for path, one in expected(trees, store).items()
    }
    unshow(mounted.path, work=work)
    unshow(copied.path, work=work)


def _plain(entry: Entry) -> Entry:
    """Without what extended attributes say."""
    return msgspec.structs.replace(entry, opaque=False, xattrs=()) if isinstance(entry, Directory) else entry


def _listed(entry: Entry) -> bool:
    """Whiteouts that hide nothing: in a squashfs layer without such a directory below, the kernel lists their names."""
    return isinstance(entry, Whiteout) and b"/" in entry.path


def test_sixty_trees_share_their_objects(store: Store, view: Path, work: Path) -> None:
    """One data-only layer serves them all, and the options fit into a page."""
    layers = [
        store.layer(str(number), [store.file(b"%d" % number, b"%d" % number), store.file(b"last", b"%d" % number)])
        for number in range(60)
    ]
    show(layers, view, work=work)
    assert {path.name: path.read_text() for path in view.iterdir()} == {
        **{str(number): str(number) for number in range(60)},
        "last": "59",
    }
    unshow(view, work=work)


def test_trees_of_two_stores(store: Store, tmp_path: Path, view: Path, work: Path) -> None:
    """Each has its own objects."""
    other = Store(tmp_path / "a,b:c d")
    layers = [store.layer("1", [store.file(b"a", b"1")]), other.layer("2", [other.file(b"b", b"2")])]
    show(layers, view, work=work, how="erofs")
    assert ((view / "a").read_bytes(), (view / "b").read_bytes()) == (b"1", b"2")
    unshow(view, work=work)


# -- writing to what is shown


@pytest.mark.parametrize("how", ["erofs", "copy", "unpack"])
def test_a_writable_view_leaves_the_objects_alone(store: Store, view: Path, work: Path, how: str) -> None:
    """Contents, modes, names and directories are changed; the store stays as it was, and so does the next view."""
    entries = [
        Directory(b"d", 0o755, 1),
        store.file(b"d/a", b"one"),
        store.file(b"d/b", b"two"),
        store.file(b"d/c", b"three"),
    ]
    layer = store.layer("tree", entries)
    show([layer], view, work=work, how=how, writable=True)
    (view / "d/a").chmod(0o600)
    assert (view / "d/a").read_bytes() == b"one"
    with (view / "d/a").open("ab") as file:
        file.write(b" more")
    (view / "d/b").write_bytes(b"new")
    (view / "d/c").rename(view / "c")
    (view / "d").rename(view / "e")
    (view / "e" / "n").write_bytes(b"n")
    assert (view / "c").read_bytes() == b"three"
    assert {path.name: path.read_bytes() for path in (view / "e").iterdir()} == {
        "a": b"one more",
        "b": b"new",
        "n": b"n",
    }
    unshow(view, work=work)
    show([layer], view, work=work)
    assert walk(view) == expected([entries], store)
    unshow(view, work=work)


def test_a_mounted_view_is_read_only_and_grants_nothing(store: Store, view: Path, work: Path) -> None:
    """Also by its flags."""
    show([store.layer("tree", [store.file(b"a", b"1")])], view, work=work)
    flags = os.statvfs(view).f_flag
    assert flags & os.ST_NOSUID and flags & os.ST_NODEV and flags & os.ST_RDONLY
    with pytest.raises(OSError, match="Read-only"):
        (view / "a").write_bytes(b"2")
    unshow(view, work=work)


# -- what is wrong


@pytest.mark.parametrize("how", ["erofs", "copy", "hardlink"])
@pytest.mark.parametrize("damage", ["missing", "short", "long", "link", "directory"])
def test_an_object_that_is_not_as_stated(store: Store, view: Path, work: Path, how: str, damage: str) -> None:
    """Is named before anything is shown, and nothing is left."""
    entry = store.file(b"dir/a"[4:], b"right", 0o444)
    place = store.object(entry.content)
    place.unlink()
    match damage:
        case "short":
            place.write_bytes(b"r")
        case "long":
            place.write_bytes(b"right, and more")
        case "link":
            place.symlink_to(place.parent / "other")
            (place.parent / "other").write_bytes(b"right")
        case "directory":
            place.mkdir()
    for checked in (False, True) if how != "erofs" else (False,):  # plain files are looked at in any case
        with pytest.raises(Corrupt, match=entry.content.hex()):
            show([store.layer("tree", [entry])], view, work=work, how=how, checked=checked)
    assert not view.exists() and not list(work.iterdir())
    assert not [entry for entry in kernel.mounted() if view.parent in entry.point.parents]


def test_one_content_with_two_sizes(store: Store, view: Path, work: Path) -> None:
    """A tree that says so is wrong, whichever size the object has."""
    entry = store.file(b"a", b"12345")
    other = type(entry)(b"b", 0o644, 1, 4, entry.content)
    for layer in (store.layer("1", [entry, other]), store.layer("2", [other, store.file(b"c", b"12345")])):
        with pytest.raises(Corrupt, match="is stated with"):
            show([layer], view, work=work)


def test_checked_objects_are_not_looked_at(store: Store, view: Path, work: Path) -> None:
    """With the image in place not even the entries are asked for."""
    layer = store.layer("tree", [store.file(b"a", b"1")])
    show([layer], view, work=work)
    unshow(view, work=work)

    def never() -> list[Entry]:
        raise AssertionError

    show([TreeLayer(never, layer.image, layer.objects)], view, work=work, checked=True)
    assert (view / "a").read_bytes() == b"1"
    unshow(view, work=work)


def test_ways_that_are_impossible_say_why(store: Store, view: Path, work: Path, layer: LayerMaker) -> None:
    """Each names the way and the reason, and leaves nothing behind."""
    tree = store.layer("tree", [store.file(b"a", b"1")])
    with pytest.raises(P2PDistError, match=r"cannot be shown by reflink: no reflink \(\w+"):
        show([tree], view, work=work, how="reflink")
    with pytest.raises(P2PDistError, match="the files may be written to"):
        show([tree], view, work=work, how="hardlink", writable=True)
    image = layer("l", {"a": "1"})
    for how in ("erofs", "reflink", "hardlink", "copy"):
        with pytest.raises(UsageError, match="this has none"):
            show([image], view, work=work, how=how)
    with pytest.raises(UsageError, match="no way"):
        show([tree], view, work=work, how="squashfs")
    assert not view.exists() and not list(work.iterdir())


def test_objects_on_another_file_system(store: Store, tmp_path: Path, work: Path) -> None:
    """They cannot be linked; the best way that is left is a copy, which says so, and a full disk is said before anything is written."""
    entries = [store.file(b"a", b"1"), store.file(b"big", b"x" * 300_000), store.file(b"big2", b"x" * 300_000)]
    small = tmp_path / "small"
    small.mkdir()
    kernel.mount("small", small, "tmpfs", options="size=1m")
    try:
        with pytest.raises(P2PDistError, match="cross-device"):
            show([store.layer("tree", entries)], small / "view", work=work, how="hardlink")
        done = show([store.layer("tree", entries)], small / "view", work=work, how="unpack")
        assert done.how == "copy"
        assert "no reflink" in done.why and "no hardlink (Invalid cross-device link)" in done.why
        unshow(done.path, work=work)
        more = store.file(b"huge", b"y" * 800_000)
        with pytest.raises(DiskFull) as failure:
            show([store.layer("more", [*entries, more])], small / "view", work=work, how="copy")
        assert failure.value.details["needed"] >= 1_400_000
        assert not list(small.iterdir()) and not list(work.iterdir())
    finally:
        kernel.unmount(small)


_FALLS_BACK = """
import sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from shown_trees import Store
from p2pdist.mount.show import show, unshow
place = Path(sys.argv[2])
store = Store(place / "store")
done = show([store.layer("tree", [store.file(b"a", b"1")])], place / "view", work=place / "records")
print(done.why)
unshow(place / "view", work=place / "records")
"""


def test_root_without_the_right_to_mount(tmp_path: Path, work: Path) -> None:
    """As in a container: the next best way is taken, and told."""
    command = [
        "setpriv",
        "--bounding-set=-sys_admin",
        sys.executable,
        "-c",
        _FALLS_BACK,
        str(Path(__file__).parent),
        str(tmp_path),
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.partition(":")[0] in ("hardlink", "reflink")
    assert "mounting is not possible here (Operation not permitted)" in done.stdout
    assert not list(work.iterdir())


def test_an_image_where_the_kernel_cannot_mount_it(store: Store, tmp_path: Path, view: Path, work: Path) -> None:
    """On a tmpfs, and with kernels that are too old: plain files unless the mount is forced."""
    memory = tmp_path / "memory"
    memory.mkdir()
    kernel.mount("memory", memory, "tmpfs")
    try:
        tree = store.layer("tree", [store.file(b"a", b"1")])
        tree = TreeLayer(tree.entries, memory / "image", tree.objects)
        with pytest.raises(P2PDistError, match="memory/image: this kernel mounts no EROFS image"):
            show([tree], view, work=work, how="erofs")
        done = show([tree], view, work=work)
        assert done.how in ("hardlink", "reflink")
        assert "mounting is not possible here (this kernel mounts no EROFS image from a file there)" in done.why
        unshow(view, work=work)
    finally:
        kernel.unmount(memory)
    assert not list(work.iterdir())


def test_the_same_tree_shown_many_times_at_once(store: Store, tmp_path: Path, work: Path) -> None:
    """Mounted and as plain files, by several threads."""
    entries = random_tree(3, store)
    layer, wanted = store.layer("tree", entries), expected([entries], store)

    def one(number: int) -> dict[bytes, Seen]:
        place = tmp_path / f"view{number}"
        show([layer], place, work=work, how=("erofs", "hardlink", "copy")[number % 3])
        try:
            return without_groups(walk(place))
        finally:
            unshow(place, work=work)

    with ThreadPoolExecutor(6) as threads:
        assert list(threads.map(one, range(12))) == [without_groups(wanted)] * 12
    assert not list(work.iterdir())


# -- layers that mean harm


@pytest.mark.parametrize("base", ["squashfs", "tree"])
def test_links_of_a_lower_layer_are_not_followed(
    store: Store, tmp_path: Path, work: Path, layer: LayerMaker, base: str
) -> None:
    """Where the tree has directories, files and whiteouts the base has links to a directory outside: all of them are replaced."""
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "victim").write_text("x")
    before = outside.stat()
    names = ["trap", "file", "deep/trap", "opaque"]
    if base == "squashfs":
        nodes = [f"{name} s 777 0 0 {outside}" for name in names]
        lower: Path | TreeLayer = layer("base", {"deep": None}, *nodes)
    else:
        links = [Symlink(name.encode(), 1, os.fsencode(outside)) for name in names]
        lower = store.layer("base", [Directory(b"deep", 0o755, 1), *links])
    entries = [
        Directory(b"deep", 0o755, 1),
        Directory(b"deep/trap", 0o700, 2),
        store.file(b"deep/trap/victim", b"new"),
        store.file(b"file", b"new"),
        Directory(b"opaque", 0o700, 3, True),
        Directory(b"trap", 0o711, 4, False, ((b"user.k", b"v"),)),
        store.file(b"trap/new", b"new"),
        Whiteout(b"trap/victim"),
    ]
    tree = store.layer("app", entries)
    for how in ("copy", "erofs"):
        done = show([lower, tree], tmp_path / how, work=work, how=how)
        assert walk(done.path) == expected([entries], store)
        unshow(done.path, work=work)
    assert (outside / "victim").read_text() == "x"
    assert [path.name for path in outside.iterdir()] == ["victim"]
    after = outside.stat()
    assert (after.st_mode, after.st_mtime_ns) == (before.st_mode, before.st_mtime_ns)
    assert not os.listxattr(outside)


def test_a_squashfs_over_a_tree_does_not_follow_its_links(
    store: Store, tmp_path: Path, work: Path, layer: LayerMaker
) -> None:
    """Nor do its whiteouts."""
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "victim").write_text("x")
    base = store.layer("base", [Symlink(b"trap", 1, os.fsencode(outside))])
    app = layer("app", {"trap/new": "2"}, "trap/victim c 644 0 0 0 0")
    done = show([base, app], tmp_path / "view", work=work, how="copy")
    assert set(walk(done.path)) == {b"trap", b"trap/new"}
    assert [path.name for path in outside.iterdir()] == ["victim"]
    unshow(done.path, work=work)


def test_a_link_over_a_directory_does_not_lead_attributes_outside(store: Store, tmp_path: Path, work: Path) -> None:
    """What a lower layer said of directories that are no longer there is forgotten."""
    outside = tmp_path / "outside"
    (outside / "sub").mkdir(parents=True)
    before = (outside / "sub").stat()
    base = store.layer("base", [Directory(b"trap", 0o711, 1), Directory(b"trap/sub", 0o711, 1)])
    app = store.layer("app", [Symlink(b"trap", 2, os.fsencode(outside))])
    done = show([base, app], tmp_path / "view", work=work, how="copy")
    after = (outside / "sub").stat()
    assert (after.st_mode, after.st_mtime_ns) == (before.st_mode, before.st_mtime_ns)
    assert (done.path / "trap").readlink() == outside
    unshow(done.path, work=work)


def test_a_squashfs_cannot_show_any_object(store: Store, tmp_path: Path, view: Path, work: Path) -> None:
    """By the attributes with which trees are made: they would lead to what another package has in the store."""
    content = store.put(b"secret").hex()
    source = tmp_path / "source"
    source.mkdir()
    (source / "stolen").write_bytes(bytes(6))
    os.setxattr(source / "stolen", "trusted.overlay.metacopy", b"")
    os.setxattr(source / "stolen", "trusted.overlay.redirect", f"/{content[:2]}/{content[2:]}".encode())
    image = tmp_path / "evil.squashfs"
    subprocess.run(["mksquashfs", source, image, "-quiet", "-no-progress", "-xattrs"], check=True, capture_output=True)
    layers = [store.layer("base", [store.file(b"f", b"base")]), SquashfsLayer(image)]
    for how in ("erofs", "overlay"):
        with pytest.raises(P2PDistError, match="extended attributes"):
            show(layers, view, work=work, how=how)
    done = show(layers, view, work=work)
    assert (view / "stolen").read_bytes() == bytes(6) and "extended attributes" in done.why
    unshow(view, work=work)
    assert not list(work.iterdir())


@pytest.mark.parametrize("base", ["squashfs", "tree"])
def test_attributes_of_a_lower_directory_do_not_shine_through(
    store: Store, tmp_path: Path, work: Path, base: str
) -> None:
    """As in an overlay, a directory's attributes are those of the highest layer that has it."""
    entries: list[Entry] = [Directory(b"d", 0o755, 1, False, ((b"user.low", b"1"),))]
    lower = squashed(tmp_path, "1", entries, store) if base == "squashfs" else store.layer("1", entries)
    upper = store.layer("2", [Directory(b"d", 0o700, 2, False, ((b"user.high", b"2"),))])
    for how in ("copy", "erofs") if base == "tree" else ("copy",):
        done = show([lower, upper], tmp_path / how, work=work, how=how)
        assert walk(done.path)[b"d"] == Seen("directory", 0o700, 2, b"", ((b"user.high", b"2"),))
        unshow(done.path, work=work)


def test_deep_and_long_trees_are_written_and_removed(store: Store, tmp_path: Path, work: Path) -> None:
    """Deeper than descriptors are kept, and with paths that are too long once a directory is put in front."""
    entries: list[Entry] = [Directory(b"/".join([b"d"] * depth), 0o755, depth) for depth in range(1, 1001)]
    long = [b"n" * 255] * 15
    entries += [Directory(b"/".join(long[:depth]), 0o500, depth) for depth in range(1, 16)]
    entries.append(store.file(b"/".join([*long, b"m" * 240]), b"long"))
    for depth in (500, 40, 3):
        entries.append(store.file(b"/".join([b"d"] * depth) + b"/f", b"%d" % depth))
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/proc/self/fd")) + 100, hard))
    try:
        done = show([store.layer("tree", entries)], tmp_path / "view", work=work, how="copy")
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    place = os.open(done.path, os.O_PATH)
    for depth in range(1, 1001):
        below = os.open(b"d", os.O_PATH, dir_fd=place)
        os.close(place)
        place = below
        assert os.fstat(place).st_mtime_ns == depth
        if depth in (500, 40, 3):
            assert os.stat(b"f", dir_fd=place).st_size == len(str(depth))
    os.close(place)
    unshow(done.path, work=work)
    assert not done.path.exists()


# -- without root


@pytest.fixture
def home() -> Iterator[Path]:
    """A directory of NOBODY's, and beside it one for setting up."""
    path = Path(tempfile.mkdtemp(prefix="p2pdist-test-", dir="/tmp"))
    path.chmod(0o755)
    (path / "hold").mkdir()
    (path / "home").mkdir()
    os.chown(path / "home", NOBODY, NOBODY)
    yield path / "home"
    shutil.rmtree(path)


_AS_NOBODY = """
import os, sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from shown_trees import Store
from p2pdist.model.tree import Directory, Symlink
from p2pdist.mount.show import show, unshow
home, store = Path(sys.argv[2]), Store(Path(sys.argv[3]))
(home / "work").mkdir()
entries = [
    Directory(b"closed", 0o555, 7, False, ((b"user.k", b"v"),)),
    Directory(b"closed/sub", 0o500, 7),
    store.file(b"closed/tool", b"tool", 0o755, 5),
    store.file(b"marked", b"marked", 0o444, 5, ((b"user.k", b"v"),)),
    store.file(b"plain", b"plain", 0o644, 6),
    Symlink(b"trap", 8, b"/etc"),
    store.file(b"unreadable", b"unreadable", 0, 6),
]
above = [Directory(b"closed", 0, 9), store.file(b"closed/more", b"more", 0o600, 5), Directory(b"trap", 0o500, 3)]
layers = [store.layer("base", entries), store.layer("app", above)]
done = show(layers, home / "view", work=home / "work")
print(done.why)
for name in ("plain", "marked", "unreadable", "closed", "trap"):
    print(oct((home / "view" / name).lstat().st_mode), (home / "view" / name).lstat().st_nlink > 1)
os.chmod(home / "view" / "closed", 0o700)
print(sorted(os.listdir(home / "view" / "closed")), os.listxattr(home / "view" / "closed"))
try:
    (home / "view" / "plain").open("r+b").close()
    print("written to")
except PermissionError:
    print("refused")
os.chmod(home / "view" / "closed", 0)
unshow(home / "view", work=home / "work")
print(os.listdir(home / "work"), (home / "view").exists())
"""


def as_nobody_shows(home: Path, store: Path) -> list[str]:
    """What NOBODY is told when a package is shown from `store`."""
    command = as_nobody(home.parent / "hold", sys.executable, "-c", _AS_NOBODY, str(Path(__file__).parent), home, store)
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd="/", timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_without_root_objects_are_linked_but_never_writable(home: Path) -> None:
    """Even to the agent's own user; closed directories are no hindrance, neither for a layer above nor for removing them."""
    why, plain, marked, unreadable, closed, trap, *rest = as_nobody_shows(home, home / "store")
    assert why.startswith("hardlink: not root; no reflink (")
    assert why.endswith(
        "3 of 5 files are those of the store, without permission to write to them, "
        "2 are copies since mode, time or attributes differ"
    )
    assert (plain, marked, unreadable) == ("0o100444 True", "0o100444 False", "0o100000 False")
    assert closed.startswith("0o40000 ") and trap.startswith("0o40500 ")
    assert rest == ["['more', 'sub', 'tool'] []", "refused", "[] False"]


def test_without_root_objects_of_somebody_else_are_copied(home: Path) -> None:
    """Nobody may give them mode and time but their owner."""
    store = Store(home.parent / "store")
    for data in (b"tool", b"marked", b"plain", b"unreadable", b"more"):
        store.put(data)
    why, plain, *_ = as_nobody_shows(home, store.path)
    assert why.startswith("copy: not root; no reflink (")
    assert "no hardlink (the objects belong to somebody else)" in why
    assert plain == "0o100644 False"


# -- leftovers


_KILLED = """
import os, signal, sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from shown_trees import Store, random_tree
from p2pdist.mount import erofs, show, tree_files
place, moment = Path(sys.argv[2]), sys.argv[3]
kill = lambda *_, **_more: os.kill(os.getpid(), signal.SIGKILL)
store = Store(place / "store")
layers = [store.layer(str(number), random_tree(number, store)) for number in range(2)]
if moment == "image":
    erofs._Writer._finish = kill
elif moment == "mounting":
    show.mount_layers.__globals__["merge"] = kill
elif moment == "writing":
    tree_files.TreeWriter._new_file = kill
elif moment == "finishing":
    tree_files._set_attributes = kill
how = {"image": None, "mounting": None, "erofs": None, "hardlink": "hardlink"}.get(moment, "copy")
show.show(layers, place / "view", work=place / "records", how=how, label="x")
kill()
"""


@pytest.mark.parametrize("moment", ["image", "mounting", "erofs", "writing", "finishing", "copy", "hardlink"])
def test_what_a_killed_process_left_is_cleaned(store: Store, tmp_path: Path, work: Path, moment: str) -> None:
    """Whenever it happens, the next start finds it by its record; the same package can be shown then."""
    command = [sys.executable, "-c", _KILLED, str(Path(__file__).parent), str(tmp_path), moment]
    assert subprocess.run(command).returncode == -signal.SIGKILL
    mounts = [entry.point for entry in kernel.mounted() if tmp_path in entry.point.parents]
    assert len(mounts) == {"mounting": 2, "erofs": 3}.get(moment, 0)
    found = clean_leftovers(work)
    assert [(left.path, left.removed, left.label) for left in found] == (
        [(tmp_path / "view", True, "x")] if moment != "image" else []
    )
    assert not [entry for entry in kernel.mounted() if tmp_path in entry.point.parents]
    assert {path.name for path in tmp_path.iterdir()} == {"records", "store"}
    assert not list(work.iterdir())
    trees = [random_tree(number, store) for number in range(2)]
    layers = [store.layer(str(number), entries) for number, entries in enumerate(trees)]
    show(layers, tmp_path / "view", work=work)
    assert walk(tmp_path / "view") == expected(trees, store)
    unshow(tmp_path / "view", work=work)
    assert {path.name for path in store.path.iterdir()} == {"objects", "0.erofs", "1.erofs"}


@pytest.mark.parametrize("how", ["erofs", "copy"])
def test_what_is_in_use_stays(store: Store, view: Path, work: Path, how: str) -> None:
    """A program that outlives its agent keeps its files; force takes them out of sight."""
    show([store.layer("tree", [store.file(b"a", b"1")])], view, work=work, how=how, label="job")
    user = subprocess.Popen(["sleep", "60"], cwd=view)
    try:
        with pytest.raises(Conflict, match="in use"):
            unshow(view, work=work)
        assert [left.removed for left in clean_leftovers(work)] == [False]
        assert [(left.label, left.how) for left in shown(work)] == [("job", how)]
        assert (view / "a").read_bytes() == b"1"
        unshow(view, work=work, force=True)
        assert not view.exists()
    finally:
        user.kill()
        user.wait()


def test_an_object_goes_on_when_what_is_shown_is_removed(store: Store, view: Path, work: Path) -> None:
    """Removing hard links removes no object and changes nothing of it."""
    entry = store.file(b"a", b"1", 0o444, MTIME_NS)
    show([store.layer("tree", [entry])], view, work=work, how="hardlink")
    unshow(view, work=work)
    place = store.object(entry.content)
    assert place.read_bytes() == b"1"
    assert (stat.S_IMODE(place.stat().st_mode), place.stat().st_nlink) == (0o444, 1)
