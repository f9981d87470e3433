"""Files of one content with other modes, times or attributes, shown by hard links."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from shown_trees import Store, expected, random_tree, walk, without_groups

from p2pdist.model.tree import Entry, variant_content
from p2pdist.mount.files import tree as tree_files
from p2pdist.mount.files.variants import varied
from p2pdist.mount.layers import TreeLayer
from p2pdist.mount.views import mount_view, unmount_view

pytestmark = pytest.mark.root


@pytest.fixture
def kept(tmp_path: Path) -> Iterator[Path]:
    """Where variants are kept: on the filesystem of the store."""
    place = tmp_path / "variants"
    place.mkdir()
    yield place


def entries_of(store: Store) -> list[Entry]:
    return [
        store.file(b"first", b"same", 0o755, 5),
        store.file(b"mode", b"same", 0o644, 5),
        store.file(b"second", b"same", 0o755, 5),
        store.file(b"time", b"same", 0o755, 6),
        store.file(b"attributes", b"same", 0o755, 5, ((b"user.k", b"v"),)),
        store.file(b"open", b"same", 0o666, 5),
        store.file(b"alone", b"other", 0o644, 5),
        store.file(b"empty", b"", 0o644, 5),
        store.file(b"empty too", b"", 0o644, 6),
    ]


def layer_with(store: Store, entries: list[Entry], kept: Path | None, asked: list[int]) -> TreeLayer:
    layer = store.layer("tree", entries)

    def keep(most: int) -> Path | None:
        asked.append(most)
        return kept

    return TreeLayer(layer.entries, layer.image, layer.objects, keep)


def test_they_are_made_once_and_linked(store: Store, tmp_path: Path, work: Path, kept: Path) -> None:
    """Only what others may write to, or has attributes, is a private copy."""
    entries, asked = entries_of(store), list[int]()
    layer = layer_with(store, entries, kept, asked)
    wanted = without_groups(expected([sorted(entries, key=lambda entry: entry.path)], store))
    places = [tmp_path / "one", tmp_path / "two"]
    for place in places:
        done = mount_view([layer], place, work=work, method="hardlink")
        assert without_groups(walk(place)) == wanted
        assert "5 of 7 files are those of the store, 2 are copies" in done.why
    assert asked == [3 * 4096, 3 * 4096], "blocks of the looks that can be linked"
    for name in ("first", "mode", "second", "time", "alone"):
        assert (places[0] / name).samefile(places[1] / name), name
    for name in ("open", "attributes"):
        assert not (places[0] / name).samefile(places[1] / name)
    assert (places[0] / "alone").samefile(store.object(entries[6].content))  # type: ignore[union-attr]
    assert len(list(kept.iterdir())) == 3
    assert {variant_content(path.name) for path in kept.iterdir()} == {entries[0].content}  # type: ignore[union-attr]
    for place in places:
        unmount_view(place, work=work)
    assert {path.stat().st_nlink for path in kept.iterdir()} == {1}
    assert store.object(entries[0].content).stat().st_nlink == 1  # type: ignore[union-attr]


def test_they_are_not_asked_for_without_need(store: Store, view: Path, work: Path, kept: Path) -> None:
    """Where nothing differs, where nothing that differs can be linked, or where another way is
    taken."""
    asked = list[int]()
    same = [store.file(b"%d" % number, b"same", 0o644, 5) for number in range(3)]
    writable = [store.file(b"%d" % number, b"same", 0o664, number) for number in range(3)]
    one = [*same, store.file(b"x", b"same", 0o666, 7)]
    for entries, method in ((same, "hardlink"), (writable, "hardlink"), (one, "hardlink"), (entries_of(store), "copy")):
        mount_view([layer_with(store, entries, kept, asked)], view, work=work, method=method)
        unmount_view(view, work=work)
    assert asked == [] and not list(kept.iterdir())


def test_without_room_there_are_copies(store: Store, view: Path, work: Path) -> None:
    entries = entries_of(store)
    done = mount_view([layer_with(store, entries, None, [])], view, work=work, method="hardlink")
    assert "3 of 7 files are those of the store, 4 are copies" in done.why
    assert without_groups(walk(view)) == without_groups(
        expected([sorted(entries, key=lambda entry: entry.path)], store)
    )
    unmount_view(view, work=work)


def test_generated_trees_over_one_another(
    store: Store, tmp_path: Path, work: Path, kept: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By several threads, and again when all variants are there."""
    monkeypatch.setattr(tree_files, "FILES_PER_SHARE", 2)
    monkeypatch.setattr(os, "cpu_count", lambda: 4)
    trees = [random_tree(seed, store, count=300) for seed in (31, 32)]
    assert any(varied(entries, root=True).contents for entries in trees), "or nothing is tested"
    layers = []
    for number, entries in enumerate(trees):
        plain = store.layer(f"tree-{number}", entries)
        layers.append(TreeLayer(plain.entries, plain.image, plain.objects, lambda _: kept))
    for name in ("one", "two"):
        mount_view(layers, tmp_path / name, work=work, method="hardlink")
        assert walk(tmp_path / name) == expected(trees, store)
    for name in ("one", "two"):
        unmount_view(tmp_path / name, work=work)


def test_one_that_was_changed_is_made_anew(store: Store, tmp_path: Path, work: Path, kept: Path) -> None:
    """Root can write through a link into the store: what it did to mode, time or size is not shown
    elsewhere."""
    entries = entries_of(store)
    layer = layer_with(store, entries, kept, [])
    wanted = without_groups(expected([sorted(entries, key=lambda entry: entry.path)], store))
    mount_view([layer], tmp_path / "one", work=work, method="hardlink")
    (tmp_path / "one" / "mode").chmod(0o777)
    os.utime(tmp_path / "one" / "time", ns=(9, 9))
    (tmp_path / "one" / "first").write_bytes(b"x")
    os.utime(tmp_path / "one" / "first", ns=(5, 5))
    done = mount_view([layer], tmp_path / "two", work=work, method="hardlink")
    assert without_groups(walk(tmp_path / "two")) == wanted
    assert "5 of 7 files are those of the store" in done.why
    assert (tmp_path / "one" / "first").read_bytes() == b"x", "what is shown elsewhere is left alone"
    for name in ("one", "two"):
        unmount_view(tmp_path / name, work=work)


def test_where_a_tree_is_shown_leaves_no_trace_in_the_store(
    store: Store, tmp_path: Path, work: Path, kept: Path
) -> None:
    """A directory gives its group to the files that are made in it."""
    entries = entries_of(store)
    layer = layer_with(store, entries, kept, [])
    for number, name in enumerate(("one", "two")):
        place = tmp_path / name
        place.mkdir()
        os.chown(place, 0, 4242 + number)
        place.chmod(0o2755)
        mount_view([layer], place / "view", work=work, method="hardlink")
    groups = {path.stat().st_gid for path in kept.iterdir()}
    assert groups == {os.getegid()}
    for name in ("one", "two"):
        unmount_view(tmp_path / name / "view", work=work)


def test_kept_on_another_filesystem_they_are_of_no_use(store: Store, view: Path, work: Path) -> None:
    """The package is shown all the same."""
    entries = entries_of(store)
    with tempfile.TemporaryDirectory(dir="/dev/shm") as elsewhere:
        done = mount_view([layer_with(store, entries, Path(elsewhere), [])], view, work=work, method="hardlink")
        assert "1 of 7 files are those of the store, 6 are copies" in done.why
    assert without_groups(walk(view)) == without_groups(
        expected([sorted(entries, key=lambda entry: entry.path)], store)
    )
    unmount_view(view, work=work)
