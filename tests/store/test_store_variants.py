"""Variants of objects: how they count, and when they go."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
from store_rig import flip, pretend_other_boot
from store_tree_rig import Packed, Publisher, check, noise, pull

from p2pdist.core.eviction import choose
from p2pdist.model.errors import NotFound
from p2pdist.model.tree import variant_bytes, variant_content, variant_name
from p2pdist.store.store import BlobStore

OpenStore = Callable[..., BlobStore]
MIB = 1 << 20
ONE = 102_400
"""What a variant of 100,000 bytes counts: whole blocks."""


def packed_tree(seed: int = 1) -> Packed:
    return Publisher().pack({b"a": noise(seed, MIB), b"b": noise(seed + 100, 100_000)})


def keep(store: BlobStore, packed: Packed, count: int = 2) -> list[Path]:
    """So many variants of the small content, written as whoever shows the tree does."""
    content, data = next((name, data) for name, data in packed.contents.items() if len(data) == 100_000)
    directory = store.trees.keep_variants(packed.root, count * variant_bytes(len(data)))
    assert directory is not None
    paths = [directory / variant_name(content, 0o644, number) for number in range(count)]
    for number, path in enumerate(paths):
        path.write_bytes(data)
        path.chmod(0o644)
        os.utime(path, ns=(number, number))
    return paths


def test_they_belong_to_a_tree(store: BlobStore) -> None:
    first, second = packed_tree(), packed_tree(2)
    pull(store, first)
    pull(store, second)
    before = store.usage().bytes_total
    kept, other = keep(store, first), keep(store, second, 1)
    assert store.usage().bytes_variants == 3 * ONE and store.usage().bytes_total == before + 3 * ONE
    sizes = {each.digest: each.size for each in store.candidates()[0]}
    assert sizes[first.root] - sizes[second.root] == pytest.approx(ONE, abs=1000)
    store.trees.remove(first.root)
    assert not any(path.exists() for path in kept) and other[0].exists()
    assert store.usage().bytes_variants == ONE
    with pytest.raises(NotFound):
        store.trees.keep_variants(first.root, 1)
    check(store, second)


def test_they_count_once_and_as_they_are_when_the_store_is_opened(tmp_path: Path, open_store: OpenStore) -> None:
    """What belongs to no tree is removed then, and everything that the loss of the machine may have
    torn."""
    packed = packed_tree()
    store, other = open_store(tmp_path), packed_tree(2)
    pull(store, packed)
    pull(store, other)
    kept = keep(store, packed)
    assert store.trees.keep_variants(packed.root, 50_000) == kept[0].parent
    assert store.usage().bytes_variants == 2 * ONE
    kept[1].unlink()
    boot = kept[0].parent.parent
    for place in (boot / ("0" * 64), boot.parent / "another boot"):
        place.mkdir()
        (place / "x").touch()
    (boot / "stray").touch()
    (boot / other.root.removeprefix("sha256:")).touch()
    (kept[0].parent / ".draft").touch()
    (kept[0].parent / "directory").mkdir()
    store.close()
    store = open_store(tmp_path)
    assert store.usage().bytes_variants == ONE
    assert list(boot.parent.iterdir()) == [boot] and list(boot.iterdir()) == [kept[0].parent]
    assert list(kept[0].parent.iterdir()) == [kept[0]]
    store.close()
    pretend_other_boot(tmp_path, durable=1)
    store = open_store(tmp_path)
    assert store.usage().bytes_variants == 0 and not kept[0].exists()


def test_those_of_another_boot_go_even_if_the_index_has_forgotten_it(tmp_path: Path, open_store: OpenStore) -> None:
    """An agent may have been killed after it had written down the new boot, and before they were
    removed."""
    packed = packed_tree()
    store = open_store(tmp_path)
    pull(store, packed)
    kept = keep(store, packed)
    store.close()
    ours = kept[0].parent.parent
    ours.rename(ours.with_name("00000000-0000-0000-0000-000000000001"))
    store = open_store(tmp_path)
    assert list((tmp_path / "variants").iterdir()) == [] and store.usage().bytes_variants == 0


def test_none_are_kept_that_are_too_many_or_do_not_fit(tmp_path: Path, open_store: OpenStore) -> None:
    """They make others go, but not what is held; and they never take more than a quarter of the
    tree."""
    store = open_store(tmp_path)
    packed, other = packed_tree(), packed_tree(2)
    pull(store, packed)
    size = sum(map(len, packed.contents.values()))
    assert store.trees.keep_variants(packed.root, size // 4 + 1) is None
    assert store.usage().bytes_variants == 0
    pull(store, other)
    store.close()
    capacity = 2 * size + 200_000
    store = open_store(tmp_path, capacity_bytes=capacity, choose=choose)
    with store.trees.held(packed.root):
        with store.trees.held(other.root):
            assert store.trees.keep_variants(packed.root, 250_000) is None
        assert store.usage().bytes_variants == 0
        assert store.trees.keep_variants(packed.root, 250_000) is not None
    assert not store.trees.complete(other.root) and store.trees.complete(packed.root)
    assert store.usage().bytes_total <= capacity


def test_holes_entitle_to_nothing(store: BlobStore) -> None:
    packed = Publisher(chunk=512 << 10).pack({b"hole": bytes(64 * MIB), b"a": noise(1, 100_000)})
    pull(store, packed)
    assert store.trees.keep_variants(packed.root, MIB) is None


def test_verifying_removes_what_is_not_what_its_name_says(store: BlobStore) -> None:
    """Bytes, mode or time; drafts are left to those who write them."""
    packed = Publisher().pack({b"a": noise(1, 4 * MIB), b"b": noise(101, 100_000)})
    pull(store, packed)
    kept = keep(store, packed, 4)
    flip(kept[1], 77)
    os.utime(kept[1], ns=(1, 1))
    kept[2].chmod(0o666)
    os.utime(kept[3], ns=(4, 4))
    (kept[0].parent / "stray").touch()
    (kept[0].parent / "directory").mkdir()
    draft = kept[0].parent / ".draft"
    draft.touch()
    wrong = [each for each in store.verify() if not each.ok]
    assert [(each.kind, each.name) for each in wrong] == [("variant", f"variant {packed.root}")] * 5
    assert set(kept[0].parent.iterdir()) == {kept[0], draft}
    assert all(each.ok for each in store.verify())
    check(store, packed)


def test_those_of_a_damaged_object_go_with_it(store: BlobStore) -> None:
    """They may have been copied from it."""
    packed = packed_tree()
    pull(store, packed)
    kept = keep(store, packed)
    large = next(name for name, data in packed.contents.items() if len(data) == MIB)
    store.trees.drop_objects({large})
    assert all(path.exists() for path in kept)
    store.trees.drop_objects({variant_content(kept[0].name) or b""})
    assert not any(path.exists() for path in kept)


def test_names() -> None:
    """Of a content, a mode and a time."""
    content = bytes(range(32))
    looks = [(0o644, 5), (0o755, 5), (0o644, -6), (0, 5)]
    names = {variant_name(content, *look) for look in looks}
    assert len(names) == 4 and {variant_content(name) for name in names} == {content}
    assert variant_content("../" + names.pop()) is variant_content("x") is None
