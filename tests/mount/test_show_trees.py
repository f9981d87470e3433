"""Packages with trees: every way shows the same, alone and in stacks, and what is wrong is said.
All of this needs root."""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec
import pytest
from shown_trees import Seen, Store, expected, random_tree, squashed, walk, without_groups

from p2pdist.model.errors import Corrupt, P2PDistError, UsageError
from p2pdist.model.tree import Directory, Entry, HardLink, Whiteout
from p2pdist.mount import kernel
from p2pdist.mount.views import mount_view, unmount_view

LayerMaker = Callable[..., Path]
pytestmark = pytest.mark.root

NAMES = [b"a", b"b", b"c", b"lib", b"\xff", b"a.b"]


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("method", ["erofs", "copy"])
def test_a_generated_tree(store: Store, view: Path, work: Path, method: str, seed: int) -> None:
    """Kinds, bytes, modes, times, targets, hard links and attributes are those of the tree; nothing
    is left afterwards."""
    entries = random_tree(seed, store, count=300)
    done = mount_view([store.layer("tree", entries)], view, work=work, method=method)
    assert done.method == method and done.why.startswith(f"{method}: ")
    assert walk(view) == expected([entries], store)
    unmount_view(view, work=work)
    assert not view.exists() and not list(work.iterdir())


@pytest.mark.parametrize("seed", range(4))
def test_a_generated_tree_by_hard_links(store: Store, view: Path, work: Path, seed: int) -> None:
    """The same but for equal files being one; every name that the tree says is the same file is."""
    entries = random_tree(seed, store, count=300)
    done = mount_view([store.layer("tree", entries)], view, work=work, method="hardlink")
    assert without_groups(walk(view)) == without_groups(expected([entries], store))
    for entry in entries:
        if isinstance(entry, HardLink):
            assert (view / os.fsdecode(entry.path)).samefile(view / os.fsdecode(entry.target))
    assert "files are those of the store" in done.why and "copies" in done.why
    unmount_view(view, work=work)


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("method", ["erofs", "copy", "hardlink"])
def test_trees_over_trees(store: Store, view: Path, work: Path, method: str, seed: int) -> None:
    """Three layers that meet in every way: whiteouts and opaque directories hide what is below,
    files replace directories and the other way round. The slow model says what is seen."""
    trees = [random_tree(seed * 3 + number, store, names=NAMES) for number in range(3)]
    layers = [store.layer(str(number), entries) for number, entries in enumerate(trees)]
    mount_view(layers, view, work=work, method=method)
    seen, wanted = walk(view), expected(trees, store)
    assert (without_groups(seen) == without_groups(wanted)) if method == "hardlink" else (seen == wanted)
    unmount_view(view, work=work)
    assert not list(work.iterdir())


@pytest.mark.parametrize("xattrs", [False, True])
@pytest.mark.parametrize("kinds", ["ts", "st", "tst", "sts", "stst"])
def test_mixed_stacks(store: Store, tmp_path: Path, work: Path, kinds: str, xattrs: bool) -> None:
    """Squashfs layers and trees in any order: the kernel and plain files agree, and nearly so with
    the model, which knows nothing of the times of a squashfs. Images with extended attributes are
    not mounted beside a tree."""
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
    mounted = mount_view(layers, tmp_path / "mounted", work=work)
    assert ("extended attributes" if xattrs else "of them trees") in mounted.why
    assert (mounted.method == "erofs") is not xattrs
    copied = mount_view(layers, tmp_path / "copied", work=work, method="copy")
    seen = walk(mounted.path)
    assert seen == walk(copied.path)
    assert {path: (one.kind, one.data) for path, one in seen.items()} == {
        path: (one.kind, one.data) for path, one in expected(trees, store).items()
    }
    unmount_view(mounted.path, work=work)
    unmount_view(copied.path, work=work)


def _plain(entry: Entry) -> Entry:
    """Without what extended attributes say."""
    return msgspec.structs.replace(entry, opaque=False, xattrs=()) if isinstance(entry, Directory) else entry


def _listed(entry: Entry) -> bool:
    """Whiteouts that hide nothing: in a squashfs layer without such a directory below, the kernel
    lists their names."""
    return isinstance(entry, Whiteout) and b"/" in entry.path


def test_sixty_trees_share_their_objects(store: Store, view: Path, work: Path) -> None:
    """One data-only layer serves them all, and the options fit into a page."""
    layers = [
        store.layer(str(number), [store.file(b"%d" % number, b"%d" % number), store.file(b"last", b"%d" % number)])
        for number in range(60)
    ]
    mount_view(layers, view, work=work)
    assert {path.name: path.read_text() for path in view.iterdir()} == {
        **{str(number): str(number) for number in range(60)},
        "last": "59",
    }
    unmount_view(view, work=work)


def test_trees_of_two_stores(store: Store, tmp_path: Path, view: Path, work: Path) -> None:
    """Each has its own objects."""
    other = Store(tmp_path / "a,b:c d")
    layers = [store.layer("1", [store.file(b"a", b"1")]), other.layer("2", [other.file(b"b", b"2")])]
    mount_view(layers, view, work=work, method="erofs")
    assert ((view / "a").read_bytes(), (view / "b").read_bytes()) == (b"1", b"2")
    unmount_view(view, work=work)


@pytest.mark.parametrize("method", ["erofs", "copy", "unpack"])
def test_a_writable_view_leaves_the_objects_alone(store: Store, view: Path, work: Path, method: str) -> None:
    """Contents, modes, names and directories are changed; the store stays as it was, and so does
    the next view."""
    entries = [
        Directory(b"d", 0o755, 1),
        store.file(b"d/a", b"one"),
        store.file(b"d/b", b"two"),
        store.file(b"d/c", b"three"),
    ]
    layer = store.layer("tree", entries)
    mount_view([layer], view, work=work, method=method, writable=True)
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
    unmount_view(view, work=work)
    mount_view([layer], view, work=work)
    assert walk(view) == expected([entries], store)
    unmount_view(view, work=work)


@pytest.mark.parametrize("method", ["erofs", "copy", "hardlink"])
@pytest.mark.parametrize("damage", ["missing", "short", "long", "link", "directory"])
def test_an_object_that_is_not_as_stated(store: Store, view: Path, work: Path, method: str, damage: str) -> None:
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
    for checked in (False, True) if method != "erofs" else (False,):  # plain files are looked at in any case
        with pytest.raises(Corrupt, match=entry.content.hex()):
            mount_view([store.layer("tree", [entry])], view, work=work, method=method, checked=checked)
    assert not view.exists() and not list(work.iterdir())
    assert not [entry for entry in kernel.mounted() if view.parent in entry.point.parents]


def test_one_content_with_two_sizes(store: Store, view: Path, work: Path) -> None:
    """A tree that says so is wrong, whichever size the object has."""
    entry = store.file(b"a", b"12345")
    other = type(entry)(b"b", 0o644, 1, 4, entry.content)
    for layer in (store.layer("1", [entry, other]), store.layer("2", [other, store.file(b"c", b"12345")])):
        with pytest.raises(Corrupt, match="is stated with"):
            mount_view([layer], view, work=work)


def test_ways_that_are_impossible_say_why(store: Store, view: Path, work: Path, layer: LayerMaker) -> None:
    """Each names the way and the reason, and leaves nothing behind."""
    tree = store.layer("tree", [store.file(b"a", b"1")])
    with pytest.raises(P2PDistError, match=r"cannot be shown by reflink: no reflink \(\w+"):
        mount_view([tree], view, work=work, method="reflink")
    with pytest.raises(P2PDistError, match="the files may be written to"):
        mount_view([tree], view, work=work, method="hardlink", writable=True)
    image = layer("l", {"a": "1"})
    for method in ("erofs", "reflink", "hardlink", "copy"):
        with pytest.raises(UsageError, match="this has none"):
            mount_view([image], view, work=work, method=method)
    with pytest.raises(UsageError, match="no way"):
        mount_view([tree], view, work=work, method="squashfs")
    assert not view.exists() and not list(work.iterdir())


def test_the_same_tree_shown_many_times_at_once(store: Store, tmp_path: Path, work: Path) -> None:
    """Mounted and as plain files, by several threads."""
    entries = random_tree(3, store)
    layer, wanted = store.layer("tree", entries), expected([entries], store)

    def one(number: int) -> dict[bytes, Seen]:
        place = tmp_path / f"view{number}"
        mount_view([layer], place, work=work, method=("erofs", "hardlink", "copy")[number % 3])
        try:
            return without_groups(walk(place))
        finally:
            unmount_view(place, work=work)

    with ThreadPoolExecutor(6) as threads:
        assert list(threads.map(one, range(12))) == [without_groups(wanted)] * 12
    assert not list(work.iterdir())
