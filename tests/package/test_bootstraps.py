"""Packages that get a bootstrap when they are packed: which do, what it says, and what becomes of
it."""

from __future__ import annotations

import os
import random
from pathlib import Path
from typing import Any

import programs
import pytest
from tree_rig import Package, read_back

from p2pdist.agent.lazy.view import layout_of
from p2pdist.cli.output import contents
from p2pdist.cli.verbs.pack import Choices, _pack_options
from p2pdist.model import tree
from p2pdist.model.bootstrap import BOOTSTRAP_BYTES_MAX, FORMAT, NAME_BYTES, Bootstrap, bootstrap_of, decode_bootstrap
from p2pdist.model.catalog import Catalog, Pack, decode_chunk, record
from p2pdist.model.digest import digest_of
from p2pdist.model.manifest import (
    BOOTSTRAP,
    CATALOG_TYPE,
    PACK_TYPE,
    TREE_TYPE,
    Descriptor,
    Manifest,
    is_bootstrap,
    parse_reference,
)
from p2pdist.model.pieces import PieceList
from p2pdist.model.tree import WHOLE_MAX, content_hash
from p2pdist.mount.erofs.writer import device_image
from p2pdist.mount.lazy import view as lazy_view
from p2pdist.mount.lazy.fill_method import FANOTIFY
from p2pdist.mount.lazy.view import LazyPackage
from p2pdist.origin.layout import LocalLayout
from p2pdist.package.layers import Layer, PackOptions, pack_layers
from p2pdist.package.pack import Packed, pack
from p2pdist.package.repository.gc import sweep
from p2pdist.package.repository.push import push
from p2pdist.package.tree import bootstrap as bootstraps
from p2pdist.package.tree import builder
from p2pdist.package.tree.bootstrap import Bootstrapping, without_bootstraps
from p2pdist.package.tree.pack_pool import read_pack_pool
from p2pdist.store.store import BlobStore

BASE, V1, V2 = (parse_reference(text) for text in ("team/env:1", "trainer:v1", "trainer:v2"))
ALWAYS, USEFUL = Bootstrapping(device_image, always=True), Bootstrapping(device_image)


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """A directory of small files, a large one, and what has no content."""
    made, drawn = tmp_path / "source", random.Random(5)
    (made / "lib/deep").mkdir(parents=True)
    for number in range(60):
        (made / f"lib/{'deep/' * (number % 2)}m{number}.py").write_bytes(b"x = %d\n" % number * drawn.randrange(1, 999))
    (made / "large.bin").write_bytes(drawn.randbytes(WHOLE_MAX + 70_001))
    (made / "empty").touch()
    (made / "link").symlink_to("large.bin")
    os.link(made / "large.bin", made / "same.bin")
    return made


async def packed_with(
    source: Path, layout: LocalLayout, how: Bootstrapping | None = ALWAYS, reference: Any = V1, **options: Any
) -> Packed:
    return await pack(source, reference, layout, format="tree", bootstrapping=how, **options)


def bootstraps_in(packed: Packed | Manifest) -> list[Descriptor]:
    return [part for part in packed.parts if is_bootstrap(part)]


async def check(layout: LocalLayout, packed: Packed) -> tuple[Package, Bootstrap]:
    """The package and its bootstrap, which says of every chunk of its trees where it is: the bytes
    that are there are compared."""
    package = await read_back(layout, packed)
    (part,) = bootstraps_in(packed)
    assert bootstrap_of(package.manifest) == part
    found = decode_bootstrap(await layout.read(part.digest, limit=BOOTSTRAP_BYTES_MAX))
    assert found.layers == tuple(layer.digest for layer in package.manifest.layers)
    layout_found, placed = found.contents()
    named = {each.digest for each in package.manifest.parts if each.media_type == PACK_TYPE and each != part}
    assert {each.pack for each in placed} <= named
    names = {chunk.chunk for chunk in layout_found.chunks()}
    for each in placed:
        data = layout.blob_path(each.pack).read_bytes()
        for name, length, at, stored in zip(each.names, each.lengths, each.offsets, each.stored, strict=True):
            assert content_hash(decode_chunk(data[at : at + stored], length)).startswith(name)
            names.discard(name)
    assert not names, "of some it does not say it"
    return package, found


def listed_store(directory: Path, layout: LocalLayout, manifest: Manifest) -> BlobStore:
    """A store that has the roots and catalogs of a package."""
    store = BlobStore(directory)
    for part in (*manifest.layers, *manifest.parts):
        if part.media_type in (TREE_TYPE, CATALOG_TYPE):
            data = layout.blob_path(part.digest).read_bytes()
            pieces = PieceList.decode(layout.blob_path(part.pieces_digest).read_bytes())
            blob = store.begin(part.digest, pieces)
            for piece in range(pieces.layout.count):
                assert blob.write(piece, data[pieces.layout.offset(piece) :][: pieces.layout.length(piece)])
            blob.finish()
    return store


# -- what it says


async def test_a_package_has_one_more_part_and_the_same_one_when_it_is_packed_again(
    layout: LocalLayout, source: Path, tmp_path: Path
) -> None:
    plain = await packed_with(source, layout, None, V2)
    packed = await packed_with(source, layout)
    (part,) = bootstraps_in(packed)
    assert packed.layers == plain.layers and packed.parts == (*plain.parts, part)
    assert part.annotations[BOOTSTRAP] == FORMAT == "1"
    package, _ = await check(layout, packed)
    assert part.pieces_digest in {item.digest for item in package.manifest.piece_lists}
    again = await packed_with(source, layout)
    assert again.digest == packed.digest
    other = LocalLayout(tmp_path / "other")
    assert (await packed_with(source, other)).digest == packed.digest
    await other.close()


async def test_what_a_bootstrap_says_is_what_a_host_computes_of_lists(
    layout: LocalLayout, source: Path, tmp_path: Path
) -> None:
    """Of two layers; byte for byte, so that a view of one is as a view of the other."""
    upper = tmp_path / "upper"
    (upper / "lib").mkdir(parents=True)
    (upper / "lib/m1.py").write_bytes(b"another\n" * 999)
    (upper / "same as below").write_bytes((source / "lib/m0.py").read_bytes())
    (upper / "more.bin").write_bytes(random.Random(9).randbytes(WHOLE_MAX + 1))
    await packed_with(source, layout, None, BASE)
    packed = await packed_with(upper, layout, base=BASE)
    package, found = await check(layout, packed)
    assert len(package.trees) == len(found.images) == 2
    store = listed_store(tmp_path / "store", layout, package.manifest)
    layers, there, _ = layout_of(store, package.manifest)
    here, _ = found.contents()
    assert there.agrees_with(here) and (found.arrangement, found.size) == (there.arrangement, there.size)
    assert found.bytes_content == there.bytes_content
    assert here.contents == tuple(content[:NAME_BYTES] for content in there.contents)
    trees = [entries for entries in layers if entries is not None]
    for name, shown in (("lists", LazyPackage(trees, there, 1.0)), ("packed", LazyPackage(found.images, found, 1.0))):
        (tmp_path / name).mkdir()
        lazy_view._write_images(shown, tmp_path / name, FANOTIFY)
    images = {path.name: path.read_bytes() for path in (tmp_path / "lists").iterdir()}
    assert images == {path.name: path.read_bytes() for path in (tmp_path / "packed").iterdir()}
    assert len(images) == 2 and all(map(len, images.values()))
    store.close()


async def test_a_package_without_contents_has_one_that_can_be_read(layout: LocalLayout, tmp_path: Path) -> None:
    (tmp_path / "none").mkdir()
    (tmp_path / "none/empty").touch()
    _, found = await check(layout, await packed_with(tmp_path / "none", layout))
    assert (found.size, found.bytes_content) == (0, 0)


def test_packs_that_the_package_does_not_name_do_not_count() -> None:
    """Catalogs list them still."""
    name, chunks = content_hash(b"data"), [record(content_hash(b"other"), 9, 7), record(content_hash(b"data"), 4, 3)]
    gone, here = (Pack(digest_of(text), 10, b"".join(chunks)) for text in (b"gone", b"here"))
    catalogs = [Catalog((), (), (gone,)), Catalog((), (), (here,))]
    assert bootstraps._places(catalogs, {here.digest})[name] == (here.digest, 7, 3)
    assert bootstraps._places(catalogs, {gone.digest, here.digest})[name] == (gone.digest, 7, 3)


# -- which packages have one


async def test_small_packages_and_small_additions_have_none_of_themselves(
    layout: LocalLayout, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A large package has one, and an addition to it where it is asked for."""
    for module in (tree, builder):
        monkeypatch.setattr(module, "PAGE_ENTRIES_MAX", 12)
    monkeypatch.setattr(tree, "PAGE_ENTRIES", 8)
    for number in range(200):
        (source / f"lib/deep/n{number}.py").write_text(f"y = {number}")
    entries = sum(1 for _ in source.rglob("*"))
    assert not bootstraps_in(await packed_with(source, layout, USEFUL))
    monkeypatch.setattr(bootstraps, "ENTRIES_MIN", entries + 1)
    assert not bootstraps_in(await packed_with(source, layout, USEFUL))
    monkeypatch.setattr(bootstraps, "ENTRIES_MIN", entries)
    first = await packed_with(source, layout, USEFUL)
    await check(layout, first)
    (source / "lib/m7.py").write_text("a small change")
    (source / "one more").touch()
    second = await packed_with(source, layout, USEFUL, V2)
    catalogs = [part.size for part in second.parts if part.media_type == CATALOG_TYPE]
    assert len(catalogs) == 2 and min(catalogs) < max(catalogs) / 8, "this is no small addition"
    assert not bootstraps_in(second)
    _, found = await check(layout, await packed_with(source, layout, ALWAYS, V2))
    assert found.layers == (second.layers[0].digest,)
    assert not bootstraps_in(await packed_with(source, layout, None, V2))


async def test_a_large_addition_has_one(
    layout: LocalLayout, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It counts with what it was packed on."""
    upper, drawn = tmp_path / "upper", random.Random(6)
    upper.mkdir()
    for number in range(64):
        (upper / f"file{number}").write_bytes(drawn.randbytes(99))
    await packed_with(source, layout, None, BASE)
    entries = 64 + sum(1 for _ in source.rglob("*"))
    monkeypatch.setattr(bootstraps, "ENTRIES_MIN", entries + 1)
    assert not bootstraps_in(await packed_with(upper, layout, USEFUL, base=BASE))
    monkeypatch.setattr(bootstraps, "ENTRIES_MIN", entries)
    await check(layout, await packed_with(upper, layout, USEFUL, base=BASE))


async def test_a_package_with_as_many_parts_as_may_be_has_none(
    layout: LocalLayout, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    parts = len((await packed_with(source, layout, None)).parts)
    monkeypatch.setattr(bootstraps, "PARTS_MAX", parts)
    assert not bootstraps_in(await packed_with(source, layout))
    monkeypatch.setattr(bootstraps, "PARTS_MAX", parts + 1)
    assert bootstraps_in(await packed_with(source, layout))


async def test_an_image_below_leaves_none(layout: LocalLayout, source: Path, tmp_path: Path) -> None:
    (tmp_path / "app").mkdir()
    (tmp_path / "app/file").write_bytes(b"x" * 5000)
    await pack(tmp_path / "app", BASE, layout, format="squashfs", bootstrapping=ALWAYS)
    packed = await packed_with(source, layout, base=BASE)
    assert len(packed.layers) == 2 and not bootstraps_in(packed)


async def test_a_base_at_the_origin_is_covered_too(layout: LocalLayout, source: Path, tmp_path: Path) -> None:
    """Its trees are read there."""
    (tmp_path / "app").mkdir()
    (tmp_path / "app/file").write_bytes(b"above" * 5000)
    origin, fresh = LocalLayout(tmp_path / "origin"), LocalLayout(tmp_path / "fresh")
    await packed_with(source, layout, None, BASE)
    await push(BASE, layout, origin)
    packed = await packed_with(tmp_path / "app", fresh, base=BASE, origin=origin)
    assert packed.digest == (await packed_with(tmp_path / "app", layout, base=BASE)).digest
    await push(V1, fresh, origin)
    await check(origin, packed)
    await fresh.close()
    await origin.close()


async def test_of_several_layers_the_last_one_brings_it(layout: LocalLayout, source: Path) -> None:
    """None is made that the next layer would drop."""
    options = PackOptions(bootstrapping=ALWAYS)
    packed, _ = await pack_layers([Layer(source / "lib", "tree"), Layer(source, "tree")], V1, layout, options)
    _, found = await check(layout, packed)
    assert len(found.layers) == 2
    made = [path for path in (layout.directory / "blobs/sha256").iterdir() if b"p2pdist-bootstrap" in path.read_bytes()]
    assert [path.name for path in made] == [part.digest.partition(":")[2] for part in bootstraps_in(packed)]


@pytest.mark.parametrize("how", [ALWAYS, None], ids=["with", "without"])
async def test_the_bootstrap_of_a_base_does_not_come_along(
    layout: LocalLayout, source: Path, tmp_path: Path, how: Bootstrapping | None
) -> None:
    """It is of other layers. The one of the whole covers the contents of all."""
    (tmp_path / "app").mkdir()
    (tmp_path / "app/file").write_bytes(b"above" * 5000)
    (below,) = bootstraps_in(await packed_with(source, layout, ALWAYS, BASE))
    packed = await packed_with(tmp_path / "app", layout, how, base=BASE)
    assert below not in packed.parts and len(bootstraps_in(packed)) == (how is not None)
    manifest = (await read_back(layout, packed)).manifest
    assert below.pieces_digest not in {item.digest for item in manifest.piece_lists}
    if how is not None:
        _, found = await check(layout, packed)
        assert len(found.layers) == 2
        assert found.bytes_content == 25_000 + sum(
            len(data) for data in {path.read_bytes() for path in source.rglob("*") if path.is_file()}
        )


async def test_a_piece_list_that_others_have_too_stays(layout: LocalLayout, source: Path) -> None:
    packed = await packed_with(source, layout)
    manifest = (await read_back(layout, packed)).manifest
    (part,) = bootstraps_in(manifest)
    twin = Descriptor(PACK_TYPE, packed.layers[0].digest, part.size, {**part.annotations, BOOTSTRAP: "2"})
    others = {name: value for name, value in part.annotations.items() if name != BOOTSTRAP}
    pack_alike = Descriptor(PACK_TYPE, packed.layers[0].digest, part.size, others)
    assert without_bootstraps(_with(manifest, twin)).piece_lists == without_bootstraps(manifest).piece_lists
    kept = without_bootstraps(_with(manifest, pack_alike))
    assert kept.parts[-1] == pack_alike and kept.piece_lists == manifest.piece_lists


def _with(manifest: Manifest, part: Descriptor) -> Manifest:
    return Manifest(manifest.config, manifest.layers, manifest.piece_lists, (*manifest.parts, part))


# -- what becomes of it


async def test_the_next_version_draws_on_packs_and_not_on_the_bootstrap(layout: LocalLayout, source: Path) -> None:
    packed = await packed_with(source, layout)
    (part,) = bootstraps_in(packed)
    pool = await read_pack_pool("trainer", layout, None, [layout], {})
    assert {each.digest for each in pool.packs} == {
        each.digest for each in packed.parts if each.media_type == PACK_TYPE and each != part
    }
    (source / "lib/m7.py").write_text("a small change")
    nexts = await packed_with(source, layout, None, V2)
    assert part not in nexts.parts
    assert {each.digest for each in packed.parts if each != part} <= {each.digest for each in nexts.parts}
    assert not bootstraps_in(nexts)


async def test_a_collection_keeps_it_with_its_package(layout: LocalLayout, source: Path) -> None:
    packed = await packed_with(source, layout)
    (part,) = bootstraps_in(packed)
    assert (await sweep(layout, older_than_s=-1)).blobs_removed == 0
    await packed_with(source, layout, None)  # the tag is of another one from now on
    await sweep(layout, older_than_s=-1)
    for digest in (part.digest, part.pieces_digest):
        assert await layout.size(digest) is None
    await check(layout, await packed_with(source, layout))
    await layout.untag(V1)
    await sweep(layout, older_than_s=-1)
    assert await layout.blobs() == []


async def test_a_push_brings_it_along(layout: LocalLayout, source: Path, tmp_path: Path) -> None:
    packed = await packed_with(source, layout)
    (part,) = bootstraps_in(packed)
    origin = LocalLayout(tmp_path / "origin")
    assert (await push(V1, layout, origin)).digest == packed.digest
    assert await origin.read(part.digest, limit=BOOTSTRAP_BYTES_MAX) == layout.blob_path(part.digest).read_bytes()
    await check(origin, packed)
    await origin.close()


# -- commands


def command(*words: object, layout: Path) -> str:
    done = programs.run(*map(str, words), "--layout", str(layout))
    assert done.returncode == 0, done.stderr
    return str(done.stdout + done.stderr)


async def test_people_are_told_of_it(source: Path, tmp_path: Path) -> None:
    """It is no pack. Without being asked for a small package has none."""
    place = tmp_path / "layout"
    words = ("pack", source, "--format", "tree", "-t")
    assert "1 layer, 1 catalog, 1 pack, 1 bootstrap" in command(*words, V1, "--bootstrap", layout=place)
    assert "1 pack, 1 bootstrap" in command("inspect", V1, layout=place)
    for options in ((), ("--no-bootstrap",)):
        assert "bootstrap" not in command(*words, V2, *options, layout=place)
    layout = LocalLayout(place)
    packed = await packed_with(source, layout)
    assert contents(packed.layers, packed.parts).endswith("1 layer, 1 catalog, 1 pack, 1 bootstrap")
    await check(layout, packed)
    await layout.close()


def test_people_say_whether_a_package_gets_one() -> None:
    said = {given: _pack_options(Choices(bootstrap=given), None).bootstrapping for given in (None, True, False)}
    assert said[None] == USEFUL and said[True] == ALWAYS and said[False] is None


def test_an_export_is_as_it_was(source: Path, tmp_path: Path) -> None:
    place, out = tmp_path / "layout", tmp_path / "out"
    command("pack", source, "-t", V1, "--format", "tree", "--bootstrap", layout=place)
    command("export", V1, "--dir", "-o", out, layout=place)
    files = {path.relative_to(source) for path in source.rglob("*")}
    assert files == {path.relative_to(out) for path in out.rglob("*")}
    assert all((out / name).read_bytes() == (source / name).read_bytes() for name in files if (source / name).is_file())
