"""What differs between packages with trees, path by path and in bytes."""

from __future__ import annotations

import os
import random
from pathlib import Path

import pytest
from tree_rig import read_back

from p2pdist.model.errors import Corrupt, NotFound
from p2pdist.model.manifest import CATALOG_TYPE, PACK_TYPE, Manifest, parse_reference
from p2pdist.model.tree import WHOLE_MAX, Directory, Entry, File, HardLink, Symlink, Whiteout
from p2pdist.origin.layout import LocalLayout
from p2pdist.package.pack import Packed, pack
from p2pdist.package.repository.push import compare
from p2pdist.package.tree.diff import changes_of, compare_packages, compare_trees, merge

BASE, V1, V2 = (parse_reference(text) for text in ("team/env:1", "trainer:v1", "trainer:v2"))


def file(path: bytes, content: int = 0, **more: int) -> File:
    return File(path, more.get("mode", 0o644), more.get("mtime_ns", 0), 1, bytes([content]) * 32)


def directory(path: bytes, **more: int) -> Directory:
    return Directory(path, more.get("mode", 0o755), more.get("mtime_ns", 0), bool(more.get("opaque")))


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        ([], [file(b"a")], ([b"a"], [], [])),
        ([file(b"a")], [file(b"a")], ([], [], [])),
        ([file(b"a")], [file(b"a", 1)], ([], [b"a"], [])),
        ([file(b"a")], [file(b"a", mode=0o600)], ([], [b"a"], [])),
        ([file(b"a")], [file(b"a", mtime_ns=1)], ([], [b"a"], [])),
        ([directory(b"a")], [directory(b"a", mtime_ns=1), file(b"a/b")], ([b"a/b"], [], [])),
        ([directory(b"a")], [directory(b"a", mode=0o700)], ([], [b"a"], [])),
        ([file(b"a"), file(b"b")], [file(b"a"), HardLink(b"b", b"a")], ([], [], [])),
        ([file(b"a"), HardLink(b"b", b"a")], [file(b"a", 1), HardLink(b"b", b"a")], ([], [b"a", b"b"], [])),
        ([Symlink(b"a", 0, b"x")], [Symlink(b"a", 0, b"y")], ([], [b"a"], [])),
        ([file(b"a"), file(b"c")], [Symlink(b"a", 0, b"c"), file(b"b")], ([b"b"], [b"a"], [b"c"])),
    ],
)
def test_paths_that_differ(
    old: list[Entry], new: list[Entry], expected: tuple[list[bytes], list[bytes], list[bytes]]
) -> None:
    assert compare_trees(old, new) == tuple(map(tuple, expected))


def test_layers_show_what_an_overlay_shows() -> None:
    """Whiteouts and opaque directories hide what is below them, files take the place of directories
    with all that is in them."""
    lower: list[Entry] = [
        directory(b"a", mode=0o700),
        file(b"a/x"),
        HardLink(b"a/y", b"a/x"),
        file(b"a.b"),
        directory(b"b"),
        file(b"b/x"),
        directory(b"c"),
        directory(b"c/d"),
        file(b"c/d/x"),
        file(b"d"),
        file(b"d.x"),
        directory(b"e"),
        file(b"e/x"),
    ]
    upper: list[Entry] = [
        directory(b"a"),
        file(b"a/x", 1),
        directory(b"b", opaque=1),
        file(b"b/z"),
        Whiteout(b"c"),
        Whiteout(b"d"),
        file(b"e", 2),
    ]
    assert merge([lower, upper]) == [
        directory(b"a"),
        file(b"a/x", 1),
        file(b"a/y"),
        file(b"a.b"),
        directory(b"b", opaque=1),
        file(b"b/z"),
        file(b"d.x"),
        file(b"e", 2),
    ]


async def manifest_of(layout: LocalLayout, packed: Packed) -> Manifest:
    return (await read_back(layout, packed)).manifest


async def test_bytes_to_move_are_those_that_a_host_lacks(layout: LocalLayout, tmp_path: Path) -> None:
    """Root and catalog whole, of packs the chunks that are new: an inserted byte in a large file is
    a chunk or two of it."""
    source, noise = tmp_path / "source", random.Random(1)
    source.mkdir()
    for number in range(50):
        (source / f"{number:02}").write_bytes(noise.randbytes(2000))
    large = noise.randbytes(WHOLE_MAX + 3_000_000)
    (source / "large").write_bytes(large)
    first = await manifest_of(layout, await pack(source, V1, layout, format="tree"))
    (source / "07").write_bytes(noise.randbytes(3000))
    (source / "large").write_bytes(large[:3_000_000] + b"x" + large[3_000_000:])
    (source / "08").unlink()
    os.link(source / "09", source / "linked")
    second = await manifest_of(layout, await pack(source, V2, layout, format="tree"))
    found, paths = await compare_packages(first, second, [layout])
    assert paths == ((b"linked",), (b"07", b"large"), (b"08",))
    fresh = [part for part in second.parts if part.digest not in {part.digest for part in first.parts}]
    assert {part.media_type for part in fresh} == {CATALOG_TYPE, PACK_TYPE}
    assert found.bytes_to_move == sum(blob.size for blob in (*fresh, second.layers[0]))
    assert found.bytes_to_move == compare(first, second).bytes_to_move < 1_200_000
    back, paths = await compare_packages(second, first, [layout])
    assert paths == ((b"08",), (b"07", b"large"), (b"linked",))
    assert 4000 + first.layers[0].size < back.bytes_to_move < 1_200_000
    assert (await compare_packages(first, first, [layout]))[0].bytes_to_move == 0


async def test_images_and_trees_are_compared_too(layout: LocalLayout, tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    (source / "file").write_bytes(random.Random(1).randbytes(100_000))
    image = await manifest_of(layout, await pack(source, BASE, layout))
    tree = await manifest_of(layout, await pack(source, V1, layout, format="tree"))
    found, paths = await compare_packages(image, tree, [layout])
    assert found.bytes_to_move == sum(blob.size for blob in tree.blobs)
    assert paths == ((b"file",), (), ())
    found, _ = await compare_packages(tree, image, [layout])
    assert found.bytes_to_move == image.layers[0].size
    assert (await compare_packages(image, image, [layout]))[1] is None


async def test_what_cannot_be_read_is_told(layout: LocalLayout, tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    (source / "file").write_bytes(b"x")
    tree = await manifest_of(layout, await pack(source, V1, layout, format="tree"))
    catalog = next(part for part in tree.parts if part.media_type == CATALOG_TYPE)
    without = Manifest(tree.config, tree.layers, tree.piece_lists)
    with pytest.raises(Corrupt, match=tree.layers[0].digest):
        await compare_packages(tree, without, [layout])
    layout.blob_path(catalog.digest).unlink()
    with pytest.raises(NotFound, match=catalog.digest):
        await compare_packages(tree, tree, [layout])


def test_each_change_says_what_it_is() -> None:
    """Content, mode, time and kind are told apart, with sizes before and after."""
    old = [
        File(b"content", 0o644, 1, 3, b"a" * 32),
        File(b"mode", 0o644, 1, 3, b"a" * 32),
        File(b"time", 0o644, 1, 3, b"a" * 32),
        File(b"all", 0o644, 1, 3, b"a" * 32),
        File(b"gone", 0o644, 1, 7, b"a" * 32),
        Symlink(b"link", 1, b"x"),
        Symlink(b"kind", 1, b"x"),
    ]
    new = [
        Directory(b"added", 0o755, 1),
        File(b"all", 0o755, 2, 4, b"b" * 32),
        File(b"content", 0o644, 1, 5, b"b" * 32),
        File(b"kind", 0o644, 1, 1, b"a" * 32),
        Symlink(b"link", 1, b"y"),
        File(b"mode", 0o755, 1, 3, b"a" * 32),
        File(b"time", 0o644, 2, 3, b"a" * 32),
    ]
    changes = {change.path: change for change in changes_of(old, new)}
    aspects = {path.decode(): change.aspects for path, change in changes.items() if change.what == "changed"}
    assert aspects == {
        "all": ("content", "mode", "time"),
        "content": ("content",),
        "kind": ("kind",),
        "link": ("target",),
        "mode": ("mode",),
        "time": ("time",),
    }
    assert (changes[b"content"].size_before, changes[b"content"].size_after) == (3, 5)
    assert (changes[b"gone"].what, changes[b"gone"].size_before, changes[b"gone"].size_after) == ("removed", 7, None)
    assert changes[b"added"].directory and changes[b"added"].what == "added"
