"""Trees as plain files: by reflink, hard link or copy, with root and without. Without a test's own
note all of this needs root."""

from __future__ import annotations

import os
import resource
import shutil
import stat
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from shown_trees import MTIME_NS, Seen, Store, expected, random_tree, squashed, walk, without_groups
from unprivileged import NOBODY, as_nobody

from p2pdist.model.errors import Corrupt, DiskFull, P2PDistError
from p2pdist.model.tree import Directory, Entry, Symlink, Whiteout
from p2pdist.mount import kernel
from p2pdist.mount.files import tree as tree_files
from p2pdist.mount.layers import TreeLayer
from p2pdist.mount.views import mount_view, unmount_view

LayerMaker = Callable[..., Path]
pytestmark = pytest.mark.root


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


def test_a_tree_is_placed_where_few_directories_are(tmp_path: Path, work: Path) -> None:
    """Not beside the directory in which it is shown, where much may just have been removed: in
    another group of inodes of ext4."""
    if shutil.which("mkfs.ext4") is None:
        pytest.skip("needs mkfs.ext4")
    image, place = tmp_path / "disk", tmp_path / "mounted"
    with image.open("wb") as file:
        file.truncate(64 << 20)
    words = ["-q", "-O", "^has_journal,^flex_bg", "-b", "1024", "-g", "8192", "-N", "8192", str(image)]
    subprocess.run(["mkfs.ext4", *words], check=True, capture_output=True)
    place.mkdir()
    subprocess.run(["mount", "-o", "loop", str(image), str(place)], check=True)
    try:
        store = Store(place / "store")
        entries = [Directory(b"d", 0o755, 1), store.file(b"d/file", b"some")]
        (place / "views").mkdir()
        done = mount_view([store.layer("app", entries)], place / "views" / "view", work=work, method="hardlink")
        beside, top, below = (
            (found.stat().st_ino - 1) // 1024 for found in (place / "views", done.path, done.path / "d")
        )
        assert top == below != beside
        unmount_view(done.path, work=work)
    finally:
        subprocess.run(["umount", str(place)], check=True)


@pytest.mark.parametrize("method", ["reflink", "unpack", None])
def test_a_generated_tree_where_blocks_are_shared(on_cloning: Path, work: Path, method: str | None) -> None:
    """Also as the best way without a mount."""
    store = Store(on_cloning / "store")
    entries = random_tree(11, store, count=300)
    layer = store.layer("tree", entries)
    done = mount_view([layer], on_cloning / "view", work=work, method=method)
    assert done.method == ("erofs" if method is None else "reflink")
    assert walk(done.path) == expected([entries], store)
    unmount_view(done.path, work=work)


@pytest.mark.parametrize("method", ["hardlink", "copy"])
def test_several_threads_write_one_tree_over_another(
    store: Store, view: Path, work: Path, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    monkeypatch.setattr(tree_files, "FILES_PER_SHARE", 2)
    monkeypatch.setattr(os, "cpu_count", lambda: 4)
    trees = [random_tree(seed, store, count=400) for seed in (21, 22)]
    layers = [store.layer(f"tree-{number}", entries) for number, entries in enumerate(trees)]
    done = mount_view(layers, view, work=work, method=method)
    assert done.method == method
    assert walk(done.path) == expected(trees, store)
    unmount_view(done.path, work=work)


def test_who_gets_the_object_and_who_a_copy(store: Store, view: Path, work: Path, tmp_path: Path) -> None:
    """The first entry gives it mode and time; one with others, with attributes, or that others may
    write to is a copy. A later package may give it others once nobody links it."""
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
    done = mount_view([store.layer("tree", entries)], view, work=work, method="hardlink")
    assert without_groups(walk(view)) == without_groups(expected([sorted(entries, key=lambda e: e.path)], store))
    linked = {path.name for path in view.iterdir() if path.stat().st_nlink > 1}
    # In walking order `attributes` comes first, and does not touch the object.
    assert linked == {"first", "second"}
    assert (view / "first").samefile(ours)
    assert "2 of 7 files are those of the store, 5 are copies" in done.why
    other = store.layer("other", [store.file(b"x", b"same", 0o644, 7)])
    mount_view([other], tmp_path / "other", work=work, method="hardlink")
    assert not (tmp_path / "other" / "x").samefile(ours)
    unmount_view(view, work=work)
    unmount_view(tmp_path / "other", work=work)
    mount_view([other], view, work=work, method="hardlink")
    assert (view / "x").samefile(ours)
    unmount_view(view, work=work)
    assert ours.read_bytes() == b"same"


def test_copies_keep_holes(store: Store, view: Path, work: Path) -> None:
    """A file that is mostly holes takes as few blocks in a copy, at its beginning, within and at
    its end."""
    data = bytes(1 << 20) + b"x" * 4096 + bytes(5 << 20) + b"y" + bytes(3 << 20)
    entry = store.file(b"sparse", data)
    place = store.object(entry.content)
    place.unlink()
    with place.open("wb") as file:
        file.truncate(len(data))
        os.pwrite(file.fileno(), b"x" * 4096, 1 << 20)
        os.pwrite(file.fileno(), b"y", (1 << 20) + 4096 + (5 << 20))
    mount_view([store.layer("tree", [entry])], view, work=work, method="copy")
    assert (view / "sparse").read_bytes() == data
    assert (view / "sparse").stat().st_blocks <= place.stat().st_blocks < 100
    unmount_view(view, work=work)


def test_objects_on_another_file_system(store: Store, tmp_path: Path, work: Path) -> None:
    """They cannot be linked; the best way that is left is a copy, which says so, and a full disk is
    said before anything is written."""
    entries = [store.file(b"a", b"1"), store.file(b"big", b"x" * 300_000), store.file(b"big2", b"x" * 300_000)]
    small = tmp_path / "small"
    small.mkdir()
    kernel.mount("small", small, "tmpfs", options="size=1m")
    try:
        with pytest.raises(P2PDistError, match="cross-device"):
            mount_view([store.layer("tree", entries)], small / "view", work=work, method="hardlink")
        done = mount_view([store.layer("tree", entries)], small / "view", work=work, method="unpack")
        assert done.method == "copy"
        assert "no reflink" in done.why
        unmount_view(done.path, work=work)
        more = store.file(b"huge", b"y" * 800_000)
        with pytest.raises(DiskFull) as failure:
            mount_view([store.layer("more", [*entries, more])], small / "view", work=work, method="copy")
        assert failure.value.details["needed"] >= 1_400_000
        assert not list(small.iterdir()) and not list(work.iterdir())
    finally:
        kernel.unmount(small)


@pytest.mark.parametrize("base", ["squashfs", "tree"])
def test_links_of_a_lower_layer_are_not_followed(
    store: Store, tmp_path: Path, work: Path, layer: LayerMaker, base: str
) -> None:
    """Where the tree has directories, files and whiteouts the base has links to a directory
    outside: all of them are replaced."""
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
    for method in ("copy", "erofs"):
        done = mount_view([lower, tree], tmp_path / method, work=work, method=method)
        assert walk(done.path) == expected([entries], store)
        unmount_view(done.path, work=work)
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
    done = mount_view([base, app], tmp_path / "view", work=work, method="copy")
    assert set(walk(done.path)) == {b"trap", b"trap/new"}
    assert [path.name for path in outside.iterdir()] == ["victim"]
    unmount_view(done.path, work=work)


def test_a_link_over_a_directory_does_not_lead_attributes_outside(store: Store, tmp_path: Path, work: Path) -> None:
    """What a lower layer said of directories that are no longer there is forgotten."""
    outside = tmp_path / "outside"
    (outside / "sub").mkdir(parents=True)
    before = (outside / "sub").stat()
    base = store.layer("base", [Directory(b"trap", 0o711, 1), Directory(b"trap/sub", 0o711, 1)])
    app = store.layer("app", [Symlink(b"trap", 2, os.fsencode(outside))])
    done = mount_view([base, app], tmp_path / "view", work=work, method="copy")
    after = (outside / "sub").stat()
    assert (after.st_mode, after.st_mtime_ns) == (before.st_mode, before.st_mtime_ns)
    assert (done.path / "trap").readlink() == outside
    unmount_view(done.path, work=work)


@pytest.mark.parametrize("base", ["squashfs", "tree"])
def test_attributes_of_a_lower_directory_do_not_shine_through(
    store: Store, tmp_path: Path, work: Path, base: str
) -> None:
    """As in an overlay, a directory's attributes are those of the highest layer that has it."""
    entries: list[Entry] = [Directory(b"d", 0o755, 1, False, ((b"user.low", b"1"),))]
    lower = squashed(tmp_path, "1", entries, store) if base == "squashfs" else store.layer("1", entries)
    upper = store.layer("2", [Directory(b"d", 0o700, 2, False, ((b"user.high", b"2"),))])
    for method in ("copy", "erofs") if base == "tree" else ("copy",):
        done = mount_view([lower, upper], tmp_path / method, work=work, method=method)
        assert walk(done.path)[b"d"] == Seen("directory", 0o700, 2, b"", ((b"user.high", b"2"),))
        unmount_view(done.path, work=work)


@pytest.mark.slow
def test_deep_and_long_trees_are_written_and_removed(store: Store, tmp_path: Path, work: Path) -> None:
    """Deeper than descriptors are kept, and with paths that are too long once a directory is put in
    front."""
    entries: list[Entry] = [Directory(b"/".join([b"d"] * depth), 0o755, depth) for depth in range(1, 1001)]
    long = [b"n" * 255] * 15
    entries += [Directory(b"/".join(long[:depth]), 0o500, depth) for depth in range(1, 16)]
    entries.append(store.file(b"/".join([*long, b"m" * 240]), b"long"))
    for depth in (500, 40, 3):
        entries.append(store.file(b"/".join([b"d"] * depth) + b"/f", b"%d" % depth))
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/proc/self/fd")) + 100, hard))
    try:
        done = mount_view([store.layer("tree", entries)], tmp_path / "view", work=work, method="copy")
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
    unmount_view(done.path, work=work)
    assert not done.path.exists()


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
from shown_trees import squashed, Store
from p2pdist.model.tree import Directory, Symlink
from p2pdist.mount.views import mount_view, unmount_view
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
done = mount_view(layers, home / "view", work=home / "work", method=sys.argv[4] or None)
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
unmount_view(home / "view", work=home / "work")
print(os.listdir(home / "work"), (home / "view").exists())
"""


def as_nobody_shows(home: Path, store: Path, method: str = "") -> list[str]:
    """What NOBODY is told when a package is shown from `store`."""
    words = (sys.executable, "-c", _AS_NOBODY, str(Path(__file__).parent), home, store, method)
    command = as_nobody(home.parent / "hold", *words)
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd="/", timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_without_root_objects_are_linked_but_never_writable(home: Path) -> None:
    """Even to the agent's own user; closed directories are no hindrance, neither for a layer above
    nor for removing them."""
    why, plain, marked, unreadable, closed, trap, *rest = as_nobody_shows(home, home / "store", "hardlink")
    assert why.startswith("hardlink: as asked for; ")
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
    assert plain == "0o100644 False"


def test_without_root_nothing_is_linked_unasked(home: Path) -> None:
    """The agent's own user may give itself the right to write, and does so to the file of the
    store."""
    why, plain, *_ = as_nobody_shows(home, home / "store")
    assert why.partition(":")[0] in ("copy", "reflink")
    assert plain.endswith(" False")


@pytest.mark.parametrize("method", [None, "unpack", "copy", "reflink", "hardlink"])
def test_what_root_writes_in_place_reaches_the_store_only_by_a_link_that_was_asked_for(
    store: Store, tmp_path: Path, work: Path, method: str | None
) -> None:
    """Writing in place, appending, and writing after a chmod: a second showing and another package
    have what was packed."""
    entries = [store.file(name, name * 100, 0o444, MTIME_NS) for name in (b"append", b"chmod", b"place")]
    memory = tmp_path / "memory"
    memory.mkdir()
    kernel.mount("memory", memory, "tmpfs")  # where no EROFS image can be mounted
    try:
        one = TreeLayer(lambda: entries, memory / "one", store.layer("one", entries).objects)
        other = TreeLayer(lambda: [*entries, store.file(b"x", b"more")], memory / "other", one.objects)
        try:
            done = mount_view([one], tmp_path / "first", work=work, method=method)
        except P2PDistError:
            assert method == "reflink", "this file system has none"
            return
        for name in ("append", "place", "chmod"):
            (tmp_path / "first" / name).chmod(0o644)
            with (tmp_path / "first" / name).open("ab" if name == "append" else "r+b") as file:
                file.write(b"changed")
        assert (done.method == "hardlink") == (method == "hardlink")
        if method == "hardlink":
            assert done.why.endswith("root can write through them into the store")
            with pytest.raises(Corrupt, match="append") as failure:
                mount_view([one], tmp_path / "second", work=work, method=method)
            assert "p2pdist verify" in failure.value.remedy
        else:
            for number, layer in enumerate((one, other)):
                mount_view([layer], tmp_path / f"again{number}", work=work, method=method)
                for entry in entries:
                    assert (tmp_path / f"again{number}" / os.fsdecode(entry.path)).read_bytes() == entry.path * 100
                unmount_view(tmp_path / f"again{number}", work=work)
        unmount_view(tmp_path / "first", work=work)
    finally:
        kernel.unmount(memory)


def test_an_object_goes_on_when_what_is_shown_is_removed(store: Store, view: Path, work: Path) -> None:
    """Removing hard links removes no object and changes nothing of it."""
    entry = store.file(b"a", b"1", 0o444, MTIME_NS)
    mount_view([store.layer("tree", [entry])], view, work=work, method="hardlink")
    unmount_view(view, work=work)
    place = store.object(entry.content)
    assert place.read_bytes() == b"1"
    assert (stat.S_IMODE(place.stat().st_mode), place.stat().st_nlink) == (0o444, 1)
