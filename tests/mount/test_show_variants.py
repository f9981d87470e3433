"""Files of one content with other modes, times or attributes, shown by hard links."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from shown_trees import Store, expected, random_tree, walk, without_groups

from p2pdist.model.tree import Entry
from p2pdist.model.variant import content_of
from p2pdist.mount import tree_files
from p2pdist.mount.layers import TreeLayer
from p2pdist.mount.show import show, unshow
from p2pdist.mount.variants import varied

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
    """Only what others may write to is a private copy."""
    entries, asked = entries_of(store), list[int]()
    layer = layer_with(store, entries, kept, asked)
    wanted = without_groups(expected([sorted(entries, key=lambda entry: entry.path)], store))
    places = [tmp_path / "one", tmp_path / "two"]
    for place in places:
        done = show([layer], place, work=work, how="hardlink")
        assert without_groups(walk(place)) == wanted
        assert "6 of 7 files are those of the store, 1 are copies" in done.why
    assert asked == [5 * 4, 5 * 4], "bytes of the looks of one content"
    for name in ("first", "mode", "second", "time", "attributes", "alone"):
        assert (places[0] / name).samefile(places[1] / name), name
    assert not (places[0] / "open").samefile(places[1] / "open")
    assert (places[0] / "alone").samefile(store.object(entries[6].content))  # type: ignore[union-attr]
    assert len(list(kept.iterdir())) == 4
    assert {content_of(path.name) for path in kept.iterdir()} == {entries[0].content}  # type: ignore[union-attr]
    for place in places:
        unshow(place, work=work)
    assert {path.stat().st_nlink for path in kept.iterdir()} == {1}
    assert store.object(entries[0].content).stat().st_nlink == 1  # type: ignore[union-attr]


def test_they_are_not_asked_for_without_need(store: Store, view: Path, work: Path, kept: Path) -> None:
    """Where nothing differs, or another way is taken."""
    asked = list[int]()
    same = [store.file(b"%d" % number, b"same", 0o644, 5) for number in range(3)]
    for entries, how in ((same, "hardlink"), (entries_of(store), "copy")):
        show([layer_with(store, entries, kept, asked)], view, work=work, how=how)
        unshow(view, work=work)
    assert asked == [] and not list(kept.iterdir())


def test_without_room_there_are_copies(store: Store, view: Path, work: Path) -> None:
    entries = entries_of(store)
    done = show([layer_with(store, entries, None, [])], view, work=work, how="hardlink")
    assert "3 of 7 files are those of the store, 4 are copies" in done.why
    assert without_groups(walk(view)) == without_groups(
        expected([sorted(entries, key=lambda entry: entry.path)], store)
    )
    unshow(view, work=work)


def test_generated_trees_over_one_another(
    store: Store, tmp_path: Path, work: Path, kept: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By several threads, and again when all variants are there."""
    monkeypatch.setattr(tree_files, "FILES_PER_SHARE", 2)
    monkeypatch.setattr(os, "cpu_count", lambda: 4)
    trees = [random_tree(seed, store, count=300) for seed in (31, 32)]
    assert any(varied(entries).contents for entries in trees), "or nothing is tested"
    layers = []
    for number, entries in enumerate(trees):
        plain = store.layer(f"tree-{number}", entries)
        layers.append(TreeLayer(plain.entries, plain.image, plain.objects, lambda _: kept))
    for name in ("one", "two"):
        show(layers, tmp_path / name, work=work, how="hardlink")
        assert walk(tmp_path / name) == expected(trees, store)
    for name in ("one", "two"):
        unshow(tmp_path / name, work=work)
