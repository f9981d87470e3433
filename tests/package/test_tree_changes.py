"""What a second version costs: unchanged files are not read, known chunks not written, and old
catalogs and packs do not pile up."""

from __future__ import annotations

import os
import random
import shutil
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from formats_rig import encode_pages
from tree_rig import listed, read_back

from p2pdist.model.catalog import Catalog, Pack, record
from p2pdist.model.digest import Digest
from p2pdist.model.errors import Corrupt, NotFound
from p2pdist.model.manifest import CATALOG_TYPE, MANIFEST_BYTES_MAX, PACK_TYPE, Descriptor, Reference, parse_reference
from p2pdist.model.torrent import TORRENT_TYPE, torrent_reference
from p2pdist.model.tree import PAGE_ENTRIES_MAX, WHOLE_MAX, Entry, File, HardLink, Whiteout, decode_root, ends_page
from p2pdist.origin.layout import LocalLayout
from p2pdist.package.pack import Packed, Settings, pack
from p2pdist.package.repository.push import push
from p2pdist.package.tree.builder import CachedTree, Scanned, TreeBuilder
from p2pdist.package.tree.cache import FilesCache
from p2pdist.package.tree.pack_pool import CATALOGS_KEPT, CATALOGS_MAX, PackPool, Part, plan_parts
from p2pdist.package.tree.usage import ChunkIndex

BASE, V1, V2, V3 = (parse_reference(text) for text in ("team/env:1", "trainer:v1", "trainer:v2", "trainer:v3"))


@pytest.fixture
async def origin(tmp_path: Path) -> AsyncIterator[LocalLayout]:
    opened = LocalLayout(tmp_path / "origin")
    yield opened
    await opened.close()


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """A few hundred files in a few directories."""
    made = tmp_path / "source"
    noise = random.Random(1)
    for number in range(300):
        path = made / f"lib/{number % 7}/{number:03}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(noise.randbytes(noise.randrange(2000)))
    return made


def age(root: Path) -> None:
    """Wait until every change below `root` is old enough to be told from a later one."""
    while time.time_ns() - max(path.lstat().st_ctime_ns for path in [root, *root.rglob("*")]) < 150_000_000:
        time.sleep(0.01)


def lying(layout: LocalLayout) -> dict[str, tuple[int, int]]:
    """Every file of the layout with its inode and time: equal when nothing was written."""
    files = [path for path in layout.directory.rglob("*") if path.is_file()]
    return {str(path): (path.stat().st_ino, path.stat().st_mtime_ns) for path in files}


def cache_files(layout: LocalLayout) -> tuple[Path, Path]:
    """The only state of a layout: the file that is replaced, and its volume."""
    file, volume = sorted((layout.directory / ".pack").iterdir(), key=lambda path: len(path.name))
    return file, volume


async def pack_tree(source: Path, reference: Reference, layout: LocalLayout, **options: Any) -> Packed:
    return await pack(source, reference, layout, format="tree", **options)


def kinds(packed: Packed) -> tuple[int, int]:
    """How many catalogs and packs."""
    found = [part.media_type for part in packed.parts]
    return found.count(CATALOG_TYPE), found.count(PACK_TYPE)


def digests(packed: Packed) -> set[str]:
    """What the package draws on."""
    return {part.digest for part in packed.parts}


def reads() -> int:
    """Bytes that this process has read from files."""
    return int(Path("/proc/self/io").read_text().split()[1])


# -- nothing has changed


async def test_an_unchanged_directory_is_neither_read_nor_written(
    layout: LocalLayout, origin: LocalLayout, source: Path
) -> None:
    (source / "weights").write_bytes(random.Random(2).randbytes(30 << 20))
    age(source)
    first = await pack_tree(source, V1, layout)
    before, seen = lying(layout), reads()
    again = await pack_tree(source, V1, layout)
    assert reads() - seen < 1 << 20
    assert lying(layout) == before
    assert (again.digest, again.bytes_written, again.parts) == (first.digest, 0, first.parts)
    assert (again.files, again.bytes_total) == (first.files, first.bytes_total)
    await push(V1, layout, origin)
    assert (await push(V1, layout, origin)).bytes_sent == 0
    other = await pack_tree(source, V2, layout, settings=Settings(["./run"]))
    assert other.layers == first.layers
    assert other.bytes_written < 3000


@pytest.mark.slow
async def test_unchanged_files_are_not_read_again(layout: LocalLayout, source: Path) -> None:
    (source / "weights").write_bytes(random.Random(2).randbytes(30 << 20))
    (source / "lib/0/large").write_bytes(random.Random(3).randbytes(3 << 20))
    age(source)
    await pack_tree(source, V1, layout)
    (source / "lib/0/000.py").write_bytes(b"edited")
    seen = reads()
    packed = await pack_tree(source, V2, layout)
    assert reads() - seen < 2 << 20
    package = await read_back(layout, packed)
    assert package.content(b"lib/0/000.py") == b"edited"
    without = [entry for entry in listed(source) if entry.path != b"weights"]
    assert [entry for entry in package.trees[0] if entry.path != b"weights"] == without


@pytest.mark.slow
async def test_versions_have_the_digests_that_they_have_alone(
    layout: LocalLayout, source: Path, tmp_path: Path
) -> None:
    """Of directories that did not change entries, checks and ends of pages are taken over: the
    result is that of packing from nothing. The tree has pages of every kind: short ones, and ones
    that are cut because they are long."""
    for number in range(6000):
        path = source / f"many/{'all' if number < 5000 else number % 9}/{number:04}"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    os.link(source / "many/0/5004", source / "linked")
    for reference, path in ((V1, "lib/0/000.py"), (V2, "many/all/2222"), (V3, "many/3/new"), (V3, "zz/last")):
        (source / path).parent.mkdir(exist_ok=True)
        (source / path).write_bytes(path.encode())
        age(source)
        packed = await pack_tree(source, reference, layout)
        alone = LocalLayout(tmp_path / f"alone-{path.replace('/', '-')}")
        assert (await pack_tree(source, reference, alone)).layers == packed.layers
        await alone.close()
    root = decode_root(await layout.read(Digest(packed.layers[0].digest)))
    assert len(root.pages) > root.entries // PAGE_ENTRIES_MAX + 1


async def test_the_cache_of_an_earlier_release_is_not_used(layout: LocalLayout, source: Path) -> None:
    """Nobody is told of damage, and what takes their place is used again."""
    age(source)
    first = await pack_tree(source, V1, layout)
    cache_file, _ = cache_files(layout)
    cache_file.write_bytes(b"p2pdist-pack-state-1\n" + cache_file.read_bytes()[21:])
    seen = reads()
    packed = await pack_tree(source, V1, layout)
    assert (packed.layers, packed.warnings) == (first.layers, ())
    assert reads() - seen > first.bytes_total
    before = lying(layout)
    await pack_tree(source, V1, layout)
    assert lying(layout) == before


@pytest.mark.parametrize("seed", range(6))
def test_pages_are_cut_as_the_format_says(seed: int) -> None:
    """By positions that are known to end one as by looking at every path."""
    choose = random.Random(seed)
    names = sorted({b"%08x" % choose.getrandbits(32) for _ in range([0, 1, 2048, 5000, 9000, 20_000][seed])})
    entries: list[Entry] = [Whiteout(name) for name in names]
    if seed % 2:  # nothing but the largest pages
        entries = [entry for entry in entries if not ends_page(entry.path)]
    top = Scanned(b"", b"", entries)
    builder = TreeBuilder([top], [(top, 0, len(entries))] if entries else [])
    builder.fill([])
    pages, _ = builder.pages(CachedTree(FilesCache()), lambda _: True)
    assert list(pages.values()) == list(encode_pages(entries))


async def test_a_known_tree_in_another_place_adds_nothing(layout: LocalLayout, source: Path, tmp_path: Path) -> None:
    first = await pack_tree(source, V1, layout)
    shutil.copytree(source, tmp_path / "copy", symlinks=True)
    second = await pack_tree(tmp_path / "copy", V1, layout)
    assert (second.layers, second.parts, second.bytes_written) == (first.layers, first.parts, 0)


async def test_every_way_of_changing_is_seen(layout: LocalLayout, source: Path) -> None:
    """Also a rewrite of the same length that keeps the modification time, right after the packing,
    and a swap of two files."""
    path = source / "lib/3/003.py"
    path.write_bytes(b"0" * 100)
    status = path.stat()
    for number in range(1, 9):
        await pack_tree(source, V1, layout)
        path.write_bytes(b"%d" % number * 100)
        os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
        package = await read_back(layout, await pack_tree(source, V1, layout))
        assert package.content(b"lib/3/003.py") == path.read_bytes()

    def mode() -> None:
        path.chmod(0o700)

    def touch() -> None:
        os.utime(path, ns=(1, 5))

    def swap() -> None:
        path.rename(source / "aside")
        (source / "lib/3/010.py").rename(path)
        (source / "aside").rename(source / "lib/3/010.py")

    def link() -> None:
        os.link(path, source / "a-link")

    def unlink() -> None:
        (source / "a-link").unlink()

    def move() -> None:
        (source / "lib/5").rename(source / "moved")

    def become() -> None:
        path.unlink()
        path.mkdir()

    def directory() -> None:
        (source / "lib/4").chmod(0o700)

    for change in (mode, touch, swap, link, unlink, move, become, directory):
        await pack_tree(source, V1, layout)
        change()
        package = await read_back(layout, await pack_tree(source, V1, layout))
        assert package.trees[0] == listed(source), change.__name__


async def test_which_name_is_the_first_is_found_out_each_time(layout: LocalLayout, source: Path) -> None:
    """With another choice of paths a directory that has not changed holds the file instead of a
    further name of it, and back."""
    for name in ("lib/1/name", "lib/2/name"):
        os.link(source / "lib/0/000.py", source / name)
    age(source)
    for left_out in (b"", b"lib/0", b"lib/1", b"lib/0", b""):
        packed = await pack_tree(source, V1, layout, ignore=lambda path, _, left_out=left_out: path == left_out)
        package = await read_back(layout, packed)
        kept = [
            name for name in (b"lib/0/000.py", b"lib/1/name", b"lib/2/name") if not name.startswith(left_out + b"/")
        ]
        first, *others = [package.entries[name] for name in kept]
        assert isinstance(first, File)
        assert others == [HardLink(name, kept[0]) for name in kept[1:]]


@pytest.mark.slow
async def test_a_file_that_is_written_to_right_after_packing_is_read_again(layout: LocalLayout, source: Path) -> None:
    """Whoever relied on times alone would miss a second write within one tick of the kernel's
    clock."""
    path = source / "lib/0/000.py"
    for number in range(30):
        path.write_bytes(b"%03d" % number)
        await pack_tree(source, V1, layout)
        with path.open("r+b") as stream:
            stream.write(b"%03d" % (number + 500))
        packed = await pack_tree(source, V2, layout)
        assert (await read_back(layout, packed)).content(b"lib/0/000.py") == b"%03d" % (number + 500)


@pytest.mark.parametrize("where", [0, 30, 60, 1000, -1])
async def test_a_damaged_cache_is_ignored_and_reported(layout: LocalLayout, source: Path, where: int) -> None:
    age(source)
    first = await pack_tree(source, V1, layout)
    cache_file, _ = cache_files(layout)
    data = bytearray(cache_file.read_bytes())
    data[where] ^= 1
    cache_file.write_bytes(data)
    (source / "more").write_bytes(b"more")
    packed = await pack_tree(source, V1, layout)
    assert len(packed.warnings) == 1
    assert "damaged" in packed.warnings[0]
    assert (await read_back(layout, packed)).trees[0] == listed(source)
    cache_file.write_bytes(data[:40])
    (source / "more").unlink()
    os.utime(source, ns=(1, 1))
    packed = await pack_tree(source, V1, layout)
    assert len(packed.warnings) == 1
    assert packed.layers == first.layers
    assert not (await pack_tree(source, V1, layout)).warnings


@pytest.mark.parametrize("damage", ["altered", "cut", "gone"])
async def test_damage_of_what_is_needed_of_the_volume_is_told(layout: LocalLayout, source: Path, damage: str) -> None:
    age(source)
    await pack_tree(source, V1, layout)
    _, volume = cache_files(layout)
    data = volume.read_bytes()
    if damage == "gone":
        volume.unlink()
    else:
        volume.write_bytes(bytes(byte ^ 1 for byte in data) if damage == "altered" else data[:-1])
    before = lying(layout)
    assert not (await pack_tree(source, V1, layout)).warnings  # nothing has changed, nothing is looked up
    assert lying(layout) == before
    (source / "lib/0/more").write_bytes(b"more")
    packed = await pack_tree(source, V1, layout)
    assert len(packed.warnings) == 1
    assert "damaged" in packed.warnings[0]
    assert (await read_back(layout, packed)).trees[0] == listed(source)
    (source / "lib/0/more").unlink()
    assert not (await pack_tree(source, V1, layout)).warnings
    assert len(list((layout.directory / ".pack").iterdir())) == 2


async def test_blobs_that_were_deleted_are_made_again(layout: LocalLayout, source: Path) -> None:
    age(source)
    first = await pack_tree(source, V1, layout)
    pack_of_first = next(part for part in first.parts if part.media_type == PACK_TYPE)
    layout.blob_path(pack_of_first.digest).unlink()
    again = await pack_tree(source, V1, layout)
    assert again.layers == first.layers
    assert again.bytes_written >= pack_of_first.size
    assert (await read_back(layout, again)).trees[0] == listed(source)


# -- something has changed


@pytest.mark.slow
@pytest.mark.parametrize("depth", [1, 12])
async def test_an_edit_costs_the_file_and_little_more(
    layout: LocalLayout, origin: LocalLayout, tmp_path: Path, depth: int
) -> None:
    """What a host with the version before lacks: root, catalog, pack, piece lists, manifest. Bound:
    the file and 128 KiB, whichever file it is, and after many versions too."""
    source, noise = tmp_path / "many", random.Random(7)
    for number in range(6000):
        path = source / f"site-packages/package{number // 60:03}/module_{number % 60:02}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"%d" % number * noise.randrange(1, 200))
    await pack_tree(source, V1, layout)
    await push(V1, layout, origin)
    for version in range(2, 2 + depth):
        reference = parse_reference(f"trainer:v{version}")
        path = source / f"site-packages/package{noise.randrange(100):03}/module_{noise.randrange(60):02}.py"
        path.write_bytes(noise.randbytes(4000))
        packed = await pack_tree(source, reference, layout)
        sent = (await push(reference, layout, origin)).bytes_sent
        assert sent == packed.bytes_written
        assert 4000 < sent < 4000 + (128 << 10), (version, kinds(packed))
    assert (await read_back(layout, packed)).trees[0] == listed(source)


def test_a_chunk_counts_for_the_first_pack_that_has_it() -> None:
    """A tree does not draw on two packs for the same bytes, and one that is dead but for what
    others have is not needed at all."""
    pool, chunk_index = PackPool(), ChunkIndex()
    names = [bytes([number]) * 32 for number in range(4)]
    for number, chunks in enumerate((names[:2], names[1:], names[:3])):
        records = b"".join(record(name, 100, 50) for name in chunks)
        found = Pack(Digest(f"sha256:{number:064x}"), 50 * len(chunks), records)
        described = Descriptor(PACK_TYPE, found.digest, found.size)
        part = Part(described, described, False)
        pool.add(part, Path(), Catalog(packs=(found,)), {found.digest: (part, None)})
        chunk_index.add(found.digest, records, lambda _: False)
    order = pool.order
    chunk_index.need(names)
    assert chunk_index.live_bytes(order) == {0: 100, 1: 100}
    assert chunk_index.live_bytes(order[::-1]) == {0: 150, 1: 50}
    assert plan_parts(pool, chunk_index.live_bytes(order), (), (), adds=False).packs == {0, 1}
    assert [chunk_index.is_first(digest, names[1], order) for digest in order] == [True, False, False]
    chunk_index.release([names[0], names[2], names[3]])
    assert plan_parts(pool, chunk_index.live_bytes(order), (), (), adds=False).packs == {0}
    assert chunk_index.forget([order[0]])
    assert chunk_index.live_bytes(order) == {1: 50}
    assert chunk_index.forget([order[2]])
    assert chunk_index.shared == {}
    assert chunk_index.live_bytes(order) == {1: 50}
    assert not chunk_index.forget([order[1]])


async def test_packs_that_are_mostly_dead_are_left_behind(layout: LocalLayout, source: Path) -> None:
    """Their live chunks move to a pack of their own, which a host with the version before need not
    load."""
    first = await pack_tree(source, V1, layout)
    old = next(part for part in first.parts if part.media_type == PACK_TYPE)
    kept = {path for path in source.rglob("*.py") if path.name < "050"}
    for path in set(source.rglob("*.py")) - kept:
        path.write_bytes(b"new " + path.read_bytes())
    packed = await pack_tree(source, V2, layout)
    assert kinds(packed) == (2, 2)
    assert old.digest not in {part.digest for part in packed.parts}
    package = await read_back(layout, packed)
    assert package.trees[0] == listed(source)
    for path in source.rglob("*.py"):
        assert package.content(os.fsencode(path.relative_to(source))) == path.read_bytes()
    live = {entry.content for entry in package.trees[0] if type(entry) is File and entry.size}
    assert package.catalogs[0].pages
    assert not package.catalogs[1].pages
    moved = {stored.chunk for stored in package.catalogs[1].packs[0].chunks()}
    assert len(moved) == len([path for path in kept if path.stat().st_size])
    assert moved < live


async def test_an_altered_pack_is_not_copied_from(layout: LocalLayout, source: Path) -> None:
    first = await pack_tree(source, V1, layout)
    old = next(part for part in first.parts if part.media_type == PACK_TYPE)
    for path in source.rglob("*.py"):
        if path.name >= "050":
            path.write_bytes(b"new " + path.read_bytes())
    path = layout.blob_path(old.digest)
    path.write_bytes(bytes(path.stat().st_size))
    with pytest.raises(Corrupt, match=old.digest):
        await pack_tree(source, V2, layout)
    assert not list(layout.scratch().iterdir())


@pytest.mark.slow
async def test_catalogs_do_not_pile_up(layout: LocalLayout, tmp_path: Path) -> None:
    """Every version changes another file. At the limit the smallest catalogs move into the new
    one."""
    source = tmp_path / "scattered"
    source.mkdir()
    for number in range(CATALOGS_MAX + 10):
        # Names that end their pages: each file has a page of its own.
        (source / f"{number:03}").write_bytes(random.Random(number).randbytes(50))
        (source / f"large{number:03}").write_bytes(
            random.Random(number).randbytes(WHOLE_MAX + 1) if not number else b""
        )
    counts = []
    for number in range(CATALOGS_MAX + 10):
        (source / f"{number:03}").write_bytes(random.Random(1000 + number).randbytes(3000))
        packed = await pack_tree(source, parse_reference(f"many:{number}"), layout)
        counts.append(kinds(packed)[0])
        assert packed.parts[0].size < 20_000, "what is new stands first, apart from what moved"
        assert packed.bytes_written < 200_000 or not number
    assert max(counts) <= CATALOGS_MAX
    assert CATALOGS_KEPT + 2 in counts[CATALOGS_MAX - 1 :]
    package = await read_back(layout, packed)
    assert {path: package.content(path) for path in package.entries} == {
        os.fsencode(path.name): path.read_bytes() for path in source.iterdir()
    }


# -- bases and neighbours


async def test_a_base_of_either_kind(layout: LocalLayout, source: Path, tmp_path: Path) -> None:
    app = tmp_path / "app"
    app.mkdir()
    (app / "main.py").write_text("print(1)")
    shutil.copy2(source / "lib/0/000.py", app / "copy.py")
    image = await pack(source, BASE, layout)
    on_image = await pack_tree(app, V1, layout, base=BASE)
    assert on_image.layers[0] == image.layers[0]
    assert kinds(on_image) == (1, 1)
    assert len((await read_back(layout, on_image)).trees) == 1
    tree = await pack_tree(source, BASE, layout)
    on_tree = await pack_tree(app, V2, layout, base=BASE)
    assert on_tree.layers == (tree.layers[0], on_image.layers[1])
    assert digests(tree) <= digests(on_tree)
    package = await read_back(layout, on_tree)
    assert [len(tree) for tree in package.trees] == [len(listed(source)), 2]
    assert package.content(b"copy.py") == (source / "lib/0/000.py").read_bytes()
    above = await pack(app, V3, layout, base=V2)
    assert above.parts == on_tree.parts
    assert len(above.layers) == 3


async def test_a_base_at_the_origin_is_drawn_on(
    layout: LocalLayout, origin: LocalLayout, source: Path, tmp_path: Path
) -> None:
    """Its packs stay there; what it has is not stored again. Without the base nobody could say
    where they are, so they do not count."""
    base = await pack_tree(source, BASE, layout)
    await push(BASE, layout, origin)
    fresh = LocalLayout(tmp_path / "fresh")
    shutil.copytree(source, tmp_path / "copy")
    (tmp_path / "copy/more").write_text("more")
    packed = await pack_tree(tmp_path / "copy", V1, fresh, base=BASE, origin=origin)
    size = sum(part.size for part in base.parts)
    assert packed.bytes_written < size / 4
    assert digests(base) <= digests(packed)
    assert (await push(V1, fresh, origin)).bytes_sent < size / 4
    alone = await pack_tree(tmp_path / "copy", V2, fresh)
    assert alone.bytes_written > size / 2
    assert await fresh.size(next(part.digest for part in alone.parts if part.media_type == PACK_TYPE)) is not None
    assert (await read_back(fresh, alone)).trees[0] == listed(tmp_path / "copy")
    await fresh.close()


async def test_a_catalog_that_cannot_be_read_is_named(layout: LocalLayout, source: Path) -> None:
    first = await pack_tree(source, V1, layout)
    catalog = next(part for part in first.parts if part.media_type == CATALOG_TYPE)
    path = layout.blob_path(catalog.digest)
    data = path.read_bytes()
    (source / "more").write_text("more")
    for damaged, kind in ((bytes(len(data)), Corrupt), (None, NotFound)):
        path.unlink()
        if damaged is not None:
            path.write_bytes(damaged)
        with pytest.raises(kind, match=catalog.digest):
            await pack_tree(source, V2, layout)


async def test_tags_of_other_tools_are_left_alone(layout: LocalLayout, source: Path) -> None:
    """Manifests that this project did not make, and packages without trees, are no concern of the
    pool."""
    await pack(source, BASE, layout)
    body = b'{"schemaVersion":2,"config":{"mediaType":"a/b","digest":"sha256:%s","size":1},"layers":[]}' % (b"0" * 64)
    digest = await layout.write_document(body)
    await layout.tag(V1, Descriptor("application/vnd.oci.image.manifest.v1+json", Digest(digest), len(body)))
    packed = await pack_tree(source, V2, layout)
    assert (await read_back(layout, packed)).trees[0] == listed(source)


async def test_a_tag_of_what_is_no_manifest_is_of_any_size(layout: LocalLayout, source: Path) -> None:
    """Where the layout is central storage, too, torrents are tagged there; that of a package of
    many pieces is larger than any manifest."""
    data = bytes(MANIFEST_BYTES_MAX + 1)
    digest = await layout.write_document(data)
    await layout.tag(torrent_reference(digest), Descriptor(TORRENT_TYPE, digest, len(data)))
    packed = await pack_tree(source, V1, layout)
    assert (await read_back(layout, packed)).trees[0] == listed(source)
