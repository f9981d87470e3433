"""A packing with the files cache of the one before, against one of the same directory into a copy
of the layout without a cache: the same manifest, so the same root, catalogs and packs, whatever was
edited, and whatever became of the layout meanwhile."""

from __future__ import annotations

import os
import random
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tree_edits import Edits
from tree_rig import read_back

from p2pdist.model import tree
from p2pdist.model.errors import Corrupt
from p2pdist.model.manifest import PACK_TYPE, parse_reference
from p2pdist.origin.layout import LocalLayout
from p2pdist.package.pack import Packed, pack
from p2pdist.package.tree import builder, cache, pack_pool, usage
from p2pdist.package.tree import pack as tree_pack
from p2pdist.package.tree import pack_pool as tree_plan
from p2pdist.package.tree.usage import Rows

STEPS = 10


def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Limits that a small tree comes to: pages, merged catalogs, packages in the pool, tables, new
    volumes."""
    monkeypatch.setattr(tree, "PAGE_ENTRIES", 8)
    monkeypatch.setattr(builder, "PAGE_ENTRIES_MAX", 12)
    monkeypatch.setattr(tree, "PAGE_ENTRIES_MAX", 12)
    monkeypatch.setattr(tree_plan, "CATALOGS_MAX", 5)
    monkeypatch.setattr(tree_plan, "CATALOGS_KEPT", 2)
    monkeypatch.setattr(pack_pool, "PACKAGES_MAX", 4)
    monkeypatch.setattr(usage, "SEARCHES_MAX", 3)
    monkeypatch.setattr(cache, "NEWER_BYTES_MIN", 2000)


def settle(source: Path) -> None:
    """Wait until every change is old enough to be told from a later one."""
    while time.time_ns() - max(path.lstat().st_ctime_ns for path in [source, *source.rglob("*")]) < 150_000_000:
        time.sleep(0.02)


def taken_over(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many pages each packing took over as they were; -1 where it began from nothing."""
    counts: list[int] = []
    pages = builder.TreeBuilder.pages

    def counting(
        tree_builder: builder.TreeBuilder, cached: builder.CachedTree, available: Callable[[bytes], bool]
    ) -> Any:
        found = pages(tree_builder, cached, available)
        counts.append(sum(page is None for page in found[0].values()) if cached.numbers else -1)
        return found

    monkeypatch.setattr(builder.TreeBuilder, "pages", counting)
    return counts


async def pack_tree(source: Path, name: str, layout: LocalLayout, **options: Any) -> Packed:
    return await pack(source, parse_reference(name), layout, format="tree", **options)


async def without_cache(source: Path, name: str, layout: LocalLayout, aside: Path, **options: Any) -> Packed:
    """The same packing into a copy of the layout, with all that decides the order of the pool, but
    without a files cache."""
    shutil.copytree(layout.directory, aside, ignore=shutil.ignore_patterns(".pack"))
    copy = LocalLayout(aside)
    packed = await pack_tree(source, name, copy, **options)
    await copy.close()
    shutil.rmtree(aside)
    return packed


def ignore(path: bytes, _: bool) -> bool:
    return path.rpartition(b"/")[2].startswith(b"m")


VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "xattrs": {"xattrs": True},
    "mtime": {"mtime": 1_000_000_000},
    "ignore": {"ignore": ignore},
    "base": {"base": parse_reference("base:1")},
}


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("variant", VARIANTS)
async def test_the_same_comes_of_it_as_without_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, variant: str, seed: int
) -> None:
    small(monkeypatch)
    counts, options = taken_over(monkeypatch), VARIANTS[variant]
    source, layout = tmp_path / "source", LocalLayout(tmp_path / "layout")
    source.mkdir()
    edits = Edits(source, seed)
    shutil.copytree(source, tmp_path / "below")
    for _ in range(25):
        edits.new_directory()
    edits.some(10)
    below = Edits(tmp_path / "below", seed + 100)
    below.some(20)
    await pack_tree(tmp_path / "below", "base:1", layout)
    packed, by_cache = await pack_tree(source, "app:0", layout, **options), 0
    for step in range(STEPS):
        name = f"app:{step if seed else 1}"
        what = edits.some(edits.choose.randrange(1, 5))
        if edits.choose.random() < 0.3:  # another package, with contents of its own and of this one
            below.some(3)
            await pack_tree(tmp_path / "below", f"other:{step}", layout)
        if step % 5 == 4:
            victim = edits.choose.choice([part for part in packed.parts if part.media_type == PACK_TYPE])
            if "base" not in options:
                layout.blob_path(victim.digest).unlink()
        if edits.choose.random() < 0.3 and step:
            await layout.untag(packed.reference)
        if edits.choose.random() < 0.7:
            settle(source)
        given = options
        if edits.choose.random() < 0.2:
            kept = [os.fsencode(path.relative_to(source)) for path in edits.paths()]
            given = options | {"only": [path for path in kept if hash_of(path) % 3]}
        counts.clear()
        expected = await without_cache(source, name, layout, tmp_path / "aside", **given)
        packed = await pack_tree(source, name, layout, **given)
        assert set(packed.warnings) <= set(expected.warnings)
        assert packed.layers == expected.layers, (step, what)
        if len(counts) == 2:  # else the edit was of nothing that is packed, and what was packed last is named again
            assert (packed.digest, packed.parts) == (expected.digest, expected.parts), (step, what)
            by_cache += counts[1] > 0
        assert (packed.files, packed.bytes_total) == (expected.files, expected.bytes_total)
        assert (packed.dropped, packed.dropped_total) == (expected.dropped, expected.dropped_total)
    package = await read_back(layout, packed)
    assert package.trees
    assert by_cache > 1, "the cache was of no use"
    await layout.close()


def hash_of(path: bytes) -> int:
    return tree.content_hash(path)[0]


async def test_no_page_is_taken_over_that_hosts_refuse(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Earlier releases made pages of any length, with extended attributes. Who packs such a
    directory again, unchanged or edited, gets a package that hosts take."""
    source, layout = tmp_path / "source", LocalLayout(tmp_path / "layout")
    source.mkdir()
    for number in range(100):
        (source / f"{number:03}{'n' * 200}").touch()
    settle(source)
    with monkeypatch.context() as earlier:
        earlier.setattr(tree_pack, "XATTRS_KEY", True)
        await pack_tree(source, "app:1", layout, xattrs=True)
    for module in (tree, builder):
        monkeypatch.setattr(module, "PAGE_BYTES_MAX", 3000)
    again = await pack_tree(source, "app:2", layout, xattrs=True)
    assert len((await read_back(layout, again)).entries) == 100
    counts = taken_over(monkeypatch)
    (source / "zz").touch()
    await read_back(layout, await pack_tree(source, "app:3", layout, xattrs=True))
    assert counts != [-1], "and its own cache is taken"


async def test_a_page_whose_catalog_is_gone_is_made_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that came with new modes has a catalog without packs, which nobody but its package
    names."""
    small(monkeypatch)
    source, layout = tmp_path / "source", LocalLayout(tmp_path / "layout")
    for number in range(200):
        path = source / f"{number // 20:02}/{number}"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"%d" % number)
    settle(source)
    await pack_tree(source, "app:1", layout)
    (source / "02/45").chmod(0o700)
    settle(source)
    await pack_tree(source, "app:2", layout)
    await layout.untag(parse_reference("app:2"))
    (source / "09/199").write_bytes(b"edited")
    expected = await without_cache(source, "app:3", layout, tmp_path / "aside")
    counts = taken_over(monkeypatch)
    packed = await pack_tree(source, "app:3", layout)
    assert packed.digest == expected.digest
    assert counts[0] > 0
    assert (await read_back(layout, packed)).entries
    await layout.close()


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2))
async def test_an_edit_reads_little_of_what_is_known(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    """Of directories that have nothing to do with it neither entries nor pages are read, and no
    catalog is decoded."""
    choose = random.Random(seed)
    source, layout = tmp_path / "source", LocalLayout(tmp_path / "layout")
    for number in range(12_000):
        path = source / f"{number // 2000}/{number // 100}/{number}"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"%d" % number)
    settle(source)
    await pack_tree(source, "app:1", layout)
    (source / f"{(number := choose.randrange(12_000)) // 2000}/{number // 100}/{number}").write_bytes(b"edited")
    bodies: list[int] = []
    read = builder.CachedTree._body
    monkeypatch.setattr(
        builder.CachedTree, "_body", lambda cached, number: (bodies.append(number), read(cached, number))[1]
    )
    monkeypatch.setattr(Rows, "table", lambda _: pytest.fail("a table of all chunks was made"))
    monkeypatch.setattr(pack_pool, "decode_catalog", lambda _: pytest.fail("a catalog was decoded"))
    expected = tmp_path / "aside"
    packed = await pack_tree(source, "app:2", layout)
    monkeypatch.undo()
    # The one that was edited and those above it, and what else is on its page, of at most 2048
    # entries, and on the one behind it.
    assert 0 < len(set(bodies)) <= 100
    alone = LocalLayout(expected)
    assert (await pack_tree(source, "app:2", alone)).layers == packed.layers
    await alone.close()
    await layout.close()


@pytest.mark.parametrize("change", ["appears", "vanishes"])
async def test_a_file_that_comes_or_goes_while_packing_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: str
) -> None:
    """Also in a directory that had not changed when it was looked at."""
    source, layout = tmp_path / "source", LocalLayout(tmp_path / "layout")
    for name in ("a/one", "b/two"):
        (source / name).parent.mkdir(parents=True)
        (source / name).write_text(name)
    settle(source)
    await pack_tree(source, "app:1", layout)
    (source / "a/one").write_text("edited")
    assemble = tree_pack.Assembler.assemble

    def changing(assembler: tree_pack.Assembler) -> Any:
        if change == "appears":
            (source / "b/three").touch()
        else:
            (source / "b/two").unlink()
        return assemble(assembler)

    monkeypatch.setattr(tree_pack.Assembler, "assemble", changing)
    with pytest.raises(Corrupt, match="b/t"):
        await pack_tree(source, "app:2", layout)
    monkeypatch.undo()
    await pack_tree(source, "app:2", layout)
    await layout.close()


@pytest.mark.parametrize("width", [32, 40])
def test_rows_are_found_by_search_as_by_table(width: int) -> None:
    """Also where the bytes of a name stand across two rows, and where a name comes twice."""
    choose = random.Random(width)
    rows = [bytes(choose.choices((0, 1), weights=(9, 1), k=width)) for _ in range(400)]
    names = {row[:32] for row in rows} | {bytes(choose.choices((0, 1), weights=(9, 1), k=32)) for _ in range(400)}
    data = b"".join(rows)
    names |= {data[at : at + 32] for at in range(0, len(data) - 32, 7)}
    table = Rows([data], width)
    table.table()
    grown = Rows([data[: 100 * width]], width)
    grown.table()
    grown.add(data[100 * width :])
    first = {row[:32]: at * width for at, row in reversed(list(enumerate(rows)))}
    for name in sorted(names):
        searched = Rows([data[: 50 * width], data[50 * width :]], width).find(name)
        assert searched == table.find(name) == grown.find(name) == first.get(name, -1)
