"""Where chunks come from before a pull has computed what is missing: beside what it computes, and
what a start does with it meanwhile."""

from __future__ import annotations

import asyncio
import os
import random
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import accumulate
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from lazy_rig import FetchedPack

from p2pdist.agent.lazy.chunks import Chunks, Whereabouts
from p2pdist.agent.lazy.filler import Filler
from p2pdist.agent.lazy.forecast import forecast
from p2pdist.agent.lazy.prefetch import Places, Prefetch
from p2pdist.agent.lazy.sight import Sight
from p2pdist.agent.lazy.traces import ViewContent, recorded
from p2pdist.agent.lazy.view import _started
from p2pdist.agent.pull.trees import SELECTED_SHARE_MAX
from p2pdist.model.catalog import Pack, Stored, record
from p2pdist.model.device import BLOCK_BYTES, CELL_BLOCKS, CELL_BYTES, Cells, DeviceChunk, DeviceLayout
from p2pdist.model.digest import digest_of
from p2pdist.model.manifest import PACK_TYPE, PIECES_SIZE, Descriptor, Manifest
from p2pdist.model.trace import Place, Trace, placed
from p2pdist.model.tree import ChunkList, content_hash
from p2pdist.store.store import BlobStore
from p2pdist.store.trees.missing_contents import Contents, Entries, Missing, Tree, back, plan

Absent: Any = None
CELLS = Cells(headed=True)


def packed(name: str, chunks: Sequence[tuple[bytes, int, int]]) -> Pack:
    """A pack of these chunks: BLAKE3, length and stored length."""
    return Pack(
        digest_of(name.encode()), sum(stored for _, _, stored in chunks), b"".join(record(*chunk) for chunk in chunks)
    )


def planned(
    store: BlobStore, sizes: Mapping[bytes, int], lists: Mapping[bytes, bytes], packs: Sequence[Pack]
) -> Missing:
    """What a pull computes."""
    names = {content: content_hash(encoded) for content, encoded in lists.items()}
    missing = Missing(Absent, (), Tree(Entries(()), {b"": Contents(dict(sizes), names)}, names, None, {}), ())
    missing.contents = {content: size for content, size in sizes.items() if content not in store.objects}
    by_name = {content_hash(encoded): encoded for encoded in lists.values()}
    plan(missing, back(missing, by_name, packs), packs, store.objects.chunk_lists())
    return missing


@pytest.mark.parametrize("seed", range(20))
def test_what_is_forecast_is_what_the_pull_computes(tmp_path: Path, seed: int) -> None:
    """Every pack that is foreseen is needed for more than its half, and its chunks are taken from
    where the pull takes them; of an empty store all of a package's own packs are foreseen."""
    drawn, store = random.Random(seed), BlobStore(tmp_path)
    here = [drawn.randbytes(drawn.randrange(1, 50)) for _ in range(drawn.choice((0, 0, 10)))]
    assert all(store.objects.add(content_hash(data), data) for data in here)
    sizes = {content_hash(data): len(data) for data in here}
    sizes |= {drawn.randbytes(32): drawn.randrange(1, 1000) for _ in range(60)}
    cut = [(drawn.randbytes(32), drawn.randrange(5000, 9000)) for _ in range(9)]
    lists = {}
    for first in range(0, len(cut), 3):
        content, part = drawn.randbytes(32), cut[first : first + 3]
        sizes[content], lists[content] = sum(length for _, length in part), ChunkList(tuple(part)).encode()
    chunks = [(name, size, drawn.randrange(1, size + 1)) for name, size in (*sizes.items(), *cut) if name not in lists]
    other = [(drawn.randbytes(32), 500, drawn.randrange(1, 500)) for _ in range(60)]  # of other versions
    drawn.shuffle(chunks)
    own = seed < 5 and not here
    packs = [packed("first", chunks[:40]), packed("second", chunks[40:] if own else chunks[30:] + other[:20])]
    packs += [] if own else [packed("third", chunks[:5] + other[20:]), packed("none", [])]
    parts = tuple(Descriptor(PACK_TYPE, pack.digest, pack.size) for pack in packs)
    foreseen = forecast(store, Manifest(Absent, (), (), parts), packs, DeviceLayout(sizes, lists))
    missing = planned(store, sizes, lists, packs)
    assert foreseen.replaced is not None and not foreseen.objects
    needed = {need.pack: need for need in missing.needs}
    for pack, (descriptor, selection) in foreseen.sources.items():
        assert selection is None and descriptor.digest == pack
        assert needed[pack].stored > SELECTED_SHARE_MAX * needed[pack].size
    for chunk, place in missing.located.items():
        assert foreseen.packs.get(chunk) == place or place[0] not in foreseen.sources
    assert set(foreseen.packs) <= {name for name, _, _ in (*chunks, *other)} and len(set(foreseen.packs)) == len(
        foreseen.packs
    )
    if own:
        assert dict(foreseen.packs) == missing.located and len(foreseen.sources) == 2


def test_packs_that_the_package_does_not_name_are_not_foreseen(tmp_path: Path) -> None:
    sizes = {bytes([number]) * 32: 100 for number in range(10)}
    pack = packed("pack", [(content, 100, 100) for content in sizes])
    foreseen = forecast(BlobStore(tmp_path), Manifest(Absent, (), (), ()), [pack], DeviceLayout(sizes, {}))
    assert not foreseen.sources and not foreseen.packs


def test_chunks_that_older_objects_may_have_are_not_counted_as_needed(tmp_path: Path) -> None:
    """The pull takes them from there, and may take little of the pack then."""
    store = BlobStore(tmp_path)
    parts = [random.Random(number).randbytes(5000) for number in range(3)]
    cut = tuple((content_hash(part), len(part)) for part in parts)
    content, encoded = content_hash(b"another version"), ChunkList(cut).encode()
    pack = packed("pack", [(name, length, length) for name, length in cut])
    manifest = Manifest(Absent, (), (), (Descriptor(PACK_TYPE, pack.digest, pack.size),))
    layout = DeviceLayout({content: sum(length for _, length in cut)}, {content: encoded})
    assert forecast(store, manifest, [pack], layout).sources
    draft, older = store.objects.begin(), b"".join(parts)
    os.write(draft.fd, older)
    store.objects.name(draft, content_hash(older), len(older), encoded)
    assert not forecast(store, manifest, [pack], layout).sources
    missing = planned(store, {content: len(older)}, {content: encoded}, [pack])
    assert not missing.needs


CONTENTS = [random.Random(number).randbytes(CELL_BYTES) for number in range(200)]


async def test_a_reader_of_what_was_not_foreseen_waits_for_the_pull(tmp_path: Path) -> None:
    """And says so, since the pull waits for the start otherwise."""
    store = BlobStore(tmp_path)
    packs = FetchedPack(store, CONTENTS[:2])
    chunks, awaited = Chunks(store, packs), asyncio.Event()
    chunks.awaited = awaited.set
    chunks.whereabouts = foreseen = Whereabouts({}, {}, {}, asyncio.Event())
    name = content_hash(CONTENTS[1])
    reading = asyncio.create_task(chunks.read(DeviceChunk(0, name, 0, name, CELL_BYTES)))
    async with asyncio.timeout(60):
        await awaited.wait()
        chunks.whereabouts = packs.whereabouts
        assert foreseen.replaced is not None
        foreseen.replaced.set()
        assert await reading == CONTENTS[1]


async def test_bytes_of_a_blob_that_is_no_source_any_more_are_not_taken_for_those_of_its_place(tmp_path: Path) -> None:
    """A pack was foreseen and has begun, and the pull takes a selection of it."""
    store = BlobStore(tmp_path)
    packs, other = FetchedPack(store, CONTENTS[:2]), FetchedPack(store, CONTENTS[2:4])
    chunks, name = Chunks(store, packs), content_hash(CONTENTS[1])
    chunks.whereabouts = packs.whereabouts
    chunk = DeviceChunk(0, name, 0, name, CELL_BYTES)
    await other.demand(range(other.blob.layout.count))
    blobs = await chunks.bring([chunk])
    assert chunks.here(chunk, blobs) == CONTENTS[1]
    assert chunks.here(chunk, {packs.blob.digest: other.blob}) is None


async def test_pieces_of_a_trace_come_before_there_is_a_device(tmp_path: Path) -> None:
    """All of them; the device is filled once it is open."""
    store = BlobStore(tmp_path / "store")
    packs = FetchedPack(store, CONTENTS)
    filler = Filler(store, packs)
    filler.layout = DeviceLayout({content_hash(data): len(data) for data in CONTENTS}, {})
    filler.chunks.whereabouts = packs.whereabouts
    prefetch, opened = Prefetch(filler, lambda: False, Counter()), asyncio.Event()
    with packs.blob.held():
        running = asyncio.create_task(prefetch.run(range(len(CONTENTS)), opened))
        async with asyncio.timeout(60):
            while len(packs.blob.have) < packs.blob.layout.count:
                await asyncio.sleep(0.001)
            assert not filler.has_cell(0) and prefetch.bytes == 0
            device = tmp_path / "device"
            device.write_bytes(b"")
            os.truncate(device, CELLS.file_size(filler.layout.size))
            filler.device.take(os.open(device, os.O_RDWR), os.open(os.devnull, os.O_RDONLY))
            opened.set()
            await running
    assert all(map(filler.has_cell, range(len(CONTENTS)))) and prefetch.bytes == CELL_BYTES * len(CONTENTS)
    assert {ahead for ahead, _ in packs.asked} == {True}
    filler.close()


def manifest_of(pack: FetchedPack) -> Manifest:
    cut = {PIECES_SIZE: str(pack.blob.layout.piece_size)}
    return Manifest(Absent, (), (), (Descriptor(PACK_TYPE, pack.blob.digest, pack.blob.size, cut),))


async def test_pieces_come_by_their_places_in_the_order_of_the_trace(tmp_path: Path) -> None:
    """Each once, before it is known where contents are; places of other packs and versions name
    none."""
    store = BlobStore(tmp_path / "store")
    pack = FetchedPack(store, CONTENTS)
    size, piece = pack.blob.size, pack.blob.layout.piece_size
    last = pack.blob.layout.count - 1
    other, parts = str(digest_of(b"other")), [(size - 1, 1), (0, 1), (1, piece), (size - 5, 5), (size - 5, 6)]
    trace = placed(Trace(), [(other, 0, 7), *((str(pack.blob.digest), *part) for part in parts)])
    places = Places(trace, manifest_of(pack))
    await places.bring(pack)
    assert pack.asked == [(True, (last, 0, 1))]
    held = [places.hold(pack.blob.digest, Stored(b"", 1, at, 1)) for at in (0, 2 * piece - 1, 2 * piece, size - 1)]
    assert held == [True, True, False, True]
    assert not places.hold(digest_of(b"other"), Stored(b"", 1, 0, 1))


def test_a_trace_that_names_too_many_pieces_names_the_first_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What another host recorded is not trusted: each place may name all pieces of a pack."""
    pack = FetchedPack(BlobStore(tmp_path / "store"), CONTENTS)
    piece = pack.blob.layout.piece_size
    monkeypatch.setattr("p2pdist.agent.lazy.prefetch.PIECES_MAX", 2)
    trace = placed(Trace(), [(str(pack.blob.digest), at * piece, 1) for at in (2, 0, 1)])
    places = Places(trace, manifest_of(pack))
    assert [places.hold(pack.blob.digest, Stored(b"", 1, at * piece, 1)) for at in range(3)] == [True, False, True]


def test_cells_with_chunks_that_do_not_come_are_left_to_readers(tmp_path: Path) -> None:
    """But for those of a chunk that has no place itself, as one of another version."""
    store = BlobStore(tmp_path / "store")
    packs = FetchedPack(store, CONTENTS)
    filler = Filler(store, packs)
    small = [drawn.to_bytes(2, "big") * 1024 for drawn in range(2 * CELL_BLOCKS)]  # half a block each, a cell has many
    filler.layout = layout = DeviceLayout({content_hash(data): len(data) for data in small}, {})
    stored = {content_hash(data): Stored(content_hash(data), len(data), at, len(data)) for at, data in enumerate(small)}
    pack = packs.blob.digest
    filler.chunks.whereabouts = Whereabouts({name: (pack, place) for name, place in stored.items()})
    first, *_, last = layout.chunks()
    named = [(0, first), (0, first), (1, last)]
    every = set(range(len(small)))

    def without(*places: int) -> list[int]:
        return filler.without_neighbours(named, lambda _, place: place.offset in every.difference(places))

    assert without() == [0, 1]
    assert without(1) == [1]
    assert without(0, 1) == [0, 1]
    assert without(*every) == [0, 1]


def test_what_is_recorded_says_where_the_chunks_of_cells_lie_in_packs() -> None:
    names = [content_hash(bytes((number,))) for number in range(4)]
    layout = DeviceLayout(dict.fromkeys(names, CELL_BYTES), {})
    packs = [
        packed("one", [(names[2], CELL_BYTES, 7), (names[0], CELL_BYTES, 9)]),
        packed("two", [(names[1], CELL_BYTES, 5)]),
    ]
    trace = recorded(ViewContent([], layout, CELLS, packs), {1: 0, 2: 5, 0: 5, 3: 6}, 10)
    assert trace.packs == (packs[1].digest, packs[0].digest)
    assert trace.places == (Place(0, 0, 5), Place(1, 0, 16))


async def test_the_pull_begins_when_what_the_trace_names_is_there(tmp_path: Path) -> None:
    """To compute what is missing takes the interpreter from what fills the device."""
    view: Any = SimpleNamespace(
        sight=Sight(traced=True), readers=SimpleNamespace(quiet_in=lambda _: 0.0), _located=asyncio.Event()
    )
    view.sight.over.set()
    started = asyncio.create_task(_started(view))
    for _ in range(100):
        await asyncio.sleep(0)
    assert not started.done()
    view.sight.prepared.set()
    await started


@pytest.mark.parametrize("seed", range(10))
async def test_what_is_written_at_once_is_what_the_contents_are(tmp_path: Path, seed: int) -> None:
    """Of contents of several chunks, of which some were written before: these stay as they are, and
    so do heads of cells."""
    drawn = random.Random(seed)
    chunks = [drawn.randbytes(drawn.choice((1, 100, 4000, 4096, 5000, 70_000))) for _ in range(80)]
    store = BlobStore(tmp_path / "store")
    packs = FetchedPack(store, chunks)
    filler = Filler(store, packs)
    sizes, cuts, rest = dict[bytes, int](), dict[bytes, tuple[list[int], list[bytes]]](), list(chunks)
    contents = []
    while rest:
        parts = [rest.pop() for _ in range(min(len(rest), drawn.randrange(1, 4)))]
        contents.append(b"".join(parts))
        name = content_hash(contents[-1])
        sizes[name] = len(contents[-1])
        if len(parts) > 1:
            cuts[name] = list(accumulate(map(len, parts), initial=0)), list(map(content_hash, parts))
    filler.layout = layout = DeviceLayout(sizes, {}, cuts=cuts)
    filler.chunks.whereabouts = packs.whereabouts
    device = tmp_path / "device"
    device.write_bytes(b"")
    os.truncate(device, CELLS.file_size(layout.size))
    filler.device.take(os.open(device, os.O_RDWR), os.open(os.devnull, os.O_RDONLY))
    cells = CELLS.holding(0, layout.size)
    with packs.blob.held():
        for chunk in drawn.sample(list(layout.chunks()), 25):
            await filler.fill(chunk)
        for some in (drawn.sample(cells, len(cells) // 2), cells):
            await filler.fill_in_order(some, await filler.bring(some))
    assert all(map(filler.has_cell, cells))
    expected = bytearray(CELLS.file_size(layout.size))
    for name, first in layout.first_blocks().items():
        data = next(content for content in contents if content_hash(content) == name)
        for offset, begin, end in CELLS.places(first * BLOCK_BYTES, len(data)):
            expected[offset : offset + end - begin] = data[begin:end]
    for cell in cells:
        at, head = CELLS.head(cell)
        expected[at : at + len(head)] = head
    assert device.read_bytes() == expected
    filler.close()


async def test_a_chunk_that_is_wrong_in_its_pack_is_never_written(tmp_path: Path) -> None:
    """Others that are read with it are; it is dropped, and fetched again."""
    store = BlobStore(tmp_path / "store")
    packs = FetchedPack(store, CONTENTS[:20])
    filler = Filler(store, packs)
    filler.layout = DeviceLayout({content_hash(data): len(data) for data in CONTENTS[:20]}, {})
    filler.chunks.whereabouts = packs.whereabouts
    device = tmp_path / "device"
    device.write_bytes(b"")
    os.truncate(device, CELLS.file_size(filler.layout.size))
    filler.device.take(os.open(device, os.O_RDWR), os.open(os.devnull, os.O_RDONLY))
    with packs.blob.held():
        blobs = await filler.bring(range(20))
        with packs.blob.path.open("r+b") as file:
            file.seek(7 * CELL_BYTES + 5)
            file.write(bytes((CONTENTS[7][5] ^ 1,)))
        filled = await filler.fill_in_order(range(20), blobs)
        assert 7 not in filled and len(filled) > 10
        await filler.fill_in_order(range(20), await filler.bring(range(20)))
    assert all(map(filler.has_cell, range(20)))
    written = device.read_bytes()
    for cell, data in enumerate(CONTENTS[:20]):
        ((offset, _, _),) = CELLS.places(cell * CELL_BYTES, CELL_BYTES)
        assert written[offset : offset + CELL_BYTES] == data
    filler.close()
