"""Packs that are laid out by a trace: what a start reads lies first, in its order, and equal inputs
give equal packs."""

from __future__ import annotations

import os
import random
import resource
import subprocess
from itertools import accumulate
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tree_rig import read_back

from p2pdist.model.device import CELL_BYTES
from p2pdist.model.errors import DiskFull, P2PDistError
from p2pdist.model.manifest import parse_reference
from p2pdist.model.trace import Part
from p2pdist.model.tree import ChunkList, File
from p2pdist.origin.layout import LocalLayout
from p2pdist.package.layers import PackOptions, pack_layers, plain_layer
from p2pdist.package.pack import Packed
from p2pdist.package.tree.order import FileChunks, WaitingChunks
from p2pdist.package.tree.packfile import PackWriter
from p2pdist.package.tree.reader import CUT_MAX, CUT_MIN

ORDER = tuple(Part(path, 0, 99) for path in (b"d/zz", b"large", b"no/such", b"b", b"d/zz", b"a"))


def make_source(directory: Path) -> Path:
    source, drawn = directory / "source", random.Random(3)
    for name in ("a", "b", "c", "d/aa", "d/zz", "e"):
        path = source / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(drawn.randbytes(5000))
    (source / "large").write_bytes(drawn.randbytes(5 << 20))
    (source / "same").write_bytes((source / "c").read_bytes())
    return source


async def packed(source: Path, layout: Path, order: tuple[Part, ...]) -> tuple[Packed, list[bytes]]:
    """The package, and its files in the order in which their first chunks lie in the packs."""
    opened = LocalLayout(layout)
    try:
        options = PackOptions(order=order)
        made, _ = await pack_layers([plain_layer(source, "tree", ())], parse_reference("app:v1"), opened, options)
        package = await read_back(opened, made)
        for path in source.rglob("*"):
            if path.is_file():
                assert package.content(os.fsencode(path.relative_to(source))) == path.read_bytes()
        chunks = [stored.chunk for catalog in package.catalogs for pack in catalog.packs for stored in pack.chunks()]
        lists = {entry.path: entry.content for entry in package.trees[-1] if getattr(entry, "size", 0)}
        paths = [next((path for path, content in lists.items() if content == chunk), b"large") for chunk in chunks]
        return made, list(dict.fromkeys(paths))
    finally:
        await opened.close()


async def stored(source: Path, layout: Path, order: tuple[Part, ...]) -> list[tuple[bytes, bytes, int]]:
    """Path of the file, name and length of each chunk, in the order of the packs."""
    opened = LocalLayout(layout)
    try:
        options = PackOptions(order=order)
        made, _ = await pack_layers([plain_layer(source, "tree", ())], parse_reference("app:v1"), opened, options)
        package = await read_back(opened, made)
        of = {
            name: b"large"
            for catalog in package.catalogs
            for data in catalog.chunk_lists
            for name, _ in ChunkList.decode(data).chunks
        }
        of |= {
            entry.content: entry.path
            for entry in reversed(package.trees[-1])
            if type(entry) is File and not entry.chunks
        }
        chunks = (chunk for catalog in package.catalogs for pack in catalog.packs for chunk in pack.chunks())
        return [(of[chunk.chunk], chunk.chunk, chunk.length) for chunk in chunks]
    finally:
        await opened.close()


async def test_what_a_trace_names_lies_first(tmp_path: Path) -> None:
    source = make_source(tmp_path)
    plain, as_listed = await packed(source, tmp_path / "plain", ())
    ordered, paths = await packed(source, tmp_path / "ordered", ORDER)
    assert as_listed == [b"a", b"b", b"c", b"d/aa", b"d/zz", b"e", b"large"]
    assert paths == [b"d/zz", b"large", b"b", b"a", b"c", b"d/aa", b"e"]
    assert ordered.layers == plain.layers, "the tree is the same"
    again, _ = await packed(source, tmp_path / "again", ORDER)
    assert again.digest == ordered.digest != plain.digest
    known, _ = await packed(source, tmp_path / "ordered", ORDER)
    assert (known.digest, known.bytes_written) == (ordered.digest, 0)


async def test_what_packs_have_stays_where_it_is(tmp_path: Path) -> None:
    source = make_source(tmp_path)
    plain, as_listed = await packed(source, tmp_path / "layout", ())
    ordered, paths = await packed(source, tmp_path / "layout", ORDER)
    assert paths == as_listed and ordered.parts == plain.parts
    for name in ("f", "g"):
        (source / name).write_bytes(os.urandom(3000))
    _, paths = await packed(source, tmp_path / "layout", (Part(b"g", 0, 1), Part(b"f", 0, 1)))
    assert paths.index(b"g") < paths.index(b"f")


@given(st.lists(st.integers(CUT_MIN, CUT_MAX), min_size=1, max_size=40), st.integers(0, 45), st.integers(1, 45))
def test_chunks_that_share_cells_with_a_part_come_with_it(lengths: list[int], first: int, count: int) -> None:
    chunks = [(b"%d" % number, length) for number, length in enumerate(lengths)]
    ends = list(accumulate(lengths))
    cells = [
        range((end - length) // CELL_BYTES, -(-end // CELL_BYTES)) for end, length in zip(ends, lengths, strict=True)
    ]
    part = {cell for span in cells[first : first + count] for cell in span}
    wanted = [b"%d" % number for number, span in enumerate(cells) if part.intersection(span)]
    assert list(FileChunks(chunks).brought_by(Part(b"file", first, count))) == wanted


async def test_only_the_chunks_that_a_trace_names_lie_first(tmp_path: Path) -> None:
    """A start reads some of a library, something small, and then more of the library."""
    source = make_source(tmp_path)
    plain = await stored(source, tmp_path / "plain", ())
    library = [(name, length) for path, name, length in plain if path == b"large"]
    (small,) = (name for path, name, _ in plain if path == b"e")
    last = Part(b"large", len(library) - 1, 1)
    order = (last, Part(b"e", 0, 1), Part(b"large", 4, 2), Part(b"large", len(library), 9), Part(b"none", 0, 1))
    ordered = await stored(source, tmp_path / "ordered", order)
    assert sorted(ordered) == sorted(plain)
    begin = [*FileChunks(library).brought_by(last), small, *FileChunks(library).brought_by(order[2])]
    rest = [name for name, _ in library if name not in begin]
    assert rest and [name for _, name, _ in ordered][: len(begin) + len(rest)] == begin + rest


def test_what_waits_is_written_whole_or_not_at_all(tmp_path: Path) -> None:
    """Small chunks on a full disk, for which the limit of file sizes stands; and a file that was
    cut off."""
    waiting, packs = WaitingChunks(tmp_path), PackWriter(tmp_path)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, before[1]))
    try:
        waiting.add(b"one", 600, bytes(600))
        with pytest.raises(P2PDistError, match="cannot write to"):
            waiting.add(b"two", 600, bytes(600))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert list(waiting.chunks) == [b"one"]
    os.truncate(waiting._file.fileno(), 100)
    with pytest.raises(P2PDistError, match="has lost"):
        waiting.write(packs, ())
    packs.abandon()
    waiting.close()


@pytest.mark.root
async def test_a_disk_without_room_for_what_waits_is_called_full(tmp_path: Path) -> None:
    """What the files of a trace hold waits on the disk of the layout, and is gone after that."""
    source, layout = make_source(tmp_path), tmp_path / "layout"
    layout.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", layout], check=True)
    try:
        with pytest.raises(DiskFull, match="lacks space"):
            await stored(source, layout, (Part(b"large", 0, 99),))
        assert [path for path in layout.rglob("*") if path.is_file() and path.stat().st_size > 1 << 16] == []
    finally:
        subprocess.run(["umount", layout], check=True)
