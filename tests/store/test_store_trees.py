"""Trees in a store: what is lacking, filling it from packs, keeping and removing."""

from __future__ import annotations

import contextlib
import os
import sqlite3
import threading
import time
from collections.abc import Callable, Sequence
from io import BytesIO
from pathlib import Path

import pytest
from formats_rig import encode_pages
from store_rig import flip, pretend_other_boot
from store_tree_rig import CHUNK, Packed, Publisher, bring, check, noise, pull, text

from p2pdist.core.eviction import choose
from p2pdist.model.candidate import Candidate, Share
from p2pdist.model.catalog import Catalog, Pack, decode_catalog, encode_catalog
from p2pdist.model.digest import Digest, digest_of
from p2pdist.model.errors import Conflict, Corrupt, Damaged, DiskFull, NotFound
from p2pdist.model.manifest import PACK_TYPE, PIECES_DIGEST, PIECES_SIZE, Descriptor
from p2pdist.model.pieces import PieceList
from p2pdist.model.selection import Selection, pieces_covering
from p2pdist.model.tree import WHOLE_MAX, ChunkList, File, Root, content_hash, decode_root, encode_root
from p2pdist.store import verification as verification_module
from p2pdist.store.scrub import read_objects
from p2pdist.store.store import BlobStore
from p2pdist.store.trees.assembly import SelectedPack
from p2pdist.store.verification import Pace

OpenStore = Callable[..., BlobStore]
MIB = 1 << 20
SMALL = {b"d%d/f%d" % (number % 7, number): text(number, 200 + 40 * number) for number in range(60)}
BIG = noise(900, WHOLE_MAX + 3 * CHUNK + 77)


def replaced(packed: Packed, catalog: Catalog) -> Packed:
    """The same tree, but that its last catalog is another one."""
    data = encode_catalog(catalog)
    blobs = {**packed.blobs, digest_of(data): data}
    return Packed(
        packed.root, packed.entries, packed.contents, blobs, [*packed.catalogs[:-1], digest_of(data)], packed.packs
    )


def selected(packed: Packed, store: BlobStore, pack: str, ranges: list[tuple[int, int]]) -> SelectedPack:
    """The pieces that cover ranges of a pack, as a complete blob."""
    data = packed.blobs[pack]  # type: ignore[index]
    whole = PieceList.of_stream(BytesIO(data), len(data))
    annotations = {PIECES_DIGEST: whole.digest, PIECES_SIZE: str(whole.layout.piece_size)}
    descriptor = Descriptor(PACK_TYPE, digest_of(data), len(data), annotations)
    selection = Selection.of(descriptor, whole, pieces_covering(whole.layout, ranges))
    blob = store.begin(selection.digest, selection.pieces)
    for number, piece in enumerate(selection.chosen):
        start = whole.layout.offset(piece)
        assert blob.write(number, data[start : start + whole.layout.length(piece)])
    blob.finish()
    return SelectedPack(selection, blob)


def test_a_tree_becomes_complete(store: BlobStore) -> None:
    """Small files, an empty one, two with one content, one of many chunks: all are objects, and the
    tree is what was packed."""
    packed = Publisher().pack({**SMALL, b"empty": b"", b"twin": SMALL[b"d0/f0"], b"big": BIG})
    assert not store.trees.complete(packed.root) and store.trees.list() == []
    bring(store, packed, packed.small)
    with store.trees.missing(packed.root, packed.catalogs) as missing:
        assert len(missing.contents) == 61
        assert missing.bytes_content == sum(map(len, packed.contents.values())) == store.usage().bytes_expected
        (need,) = missing.needs
        assert need.pack == packed.packs[0] and need.ranges == ((0, need.size),) and need.stored == need.size
        assert need.size == len(packed.blobs[need.pack])
        assert store.trees.fill(missing).missing == 61
        with pytest.raises(Conflict, match="61 contents are missing"):
            store.trees.finish(missing)
        bring(store, packed, packed.packs)
        filled = store.trees.fill(missing)
        assert (filled.objects, filled.missing) == (61, 0)
        assert store.trees.fill(missing).objects == 0
        assert not store.trees.complete(packed.root)
        store.trees.finish(missing)
        assert store.trees.complete(packed.root)
        assert store.trees.entries(packed.root) is missing.tree.entries, "it is decoded once"
    check(store, packed)
    assert store.trees.entries(packed.root) == packed.entries
    assert store.usage().bytes_expected == 0
    (status,) = store.trees.list()
    assert (status.root, status.complete, status.pinned, status.in_use) == (packed.root, True, False, False)
    with pytest.raises(Conflict, match="no longer kept"):
        store.trees.finish(missing)


def test_a_later_tree_needs_what_changed_only(tmp_path: Path, open_store: OpenStore) -> None:
    """One small file, and one chunk of a large one of which the older object has the others; also
    after reopening, from the index."""
    publisher = Publisher()
    first = publisher.pack({**SMALL, b"big": BIG})
    edited = BIG[: 5 * CHUNK] + noise(901, CHUNK) + BIG[6 * CHUNK :]
    second = publisher.pack({**SMALL, b"big": edited, b"d0/new": b"new"})
    store = open_store(tmp_path)
    pull(store, first)
    store.close()
    store = open_store(tmp_path)
    assert store.trees.complete(first.root)
    bring(store, second, second.small)
    with store.trees.missing(second.root, second.catalogs) as missing:
        assert [need.pack for need in missing.needs] == second.packs[1:]
        assert missing.contents.keys() == {content_hash(b"new"), content_hash(edited)}
        assert {stored.chunk for need in missing.needs for stored in need.chunks} == {
            content_hash(b"new"),
            content_hash(noise(901, CHUNK)),
        }
        bring(store, second, second.packs[1:])
        assert store.trees.fill(missing).missing == 0
        store.trees.finish(missing)
    check(store, first)
    check(store, second)
    assert pull(store, second).needs == ()


def test_chunks_move_within_a_large_file(store: BlobStore) -> None:
    """Where older chunks have other offsets, not in step with blocks, and where the pack brings
    some in between."""
    publisher = Publisher(chunk=100_003)
    first = publisher.pack({b"big": BIG})
    pull(store, first)
    cut = [BIG[at : at + 100_003] for at in range(0, len(BIG), 100_003)]
    moved = b"".join([*cut[20:30], noise(902, 100_003), *cut[:20], *cut[30:]])
    second = publisher.pack({b"big": moved})
    missing = pull(store, second)
    assert sum(len(need.chunks) for need in missing.needs) <= 2 + len(cut) - 30
    check(store, second)


def test_zeros_of_large_contents_are_holes(store: BlobStore) -> None:
    """From packs and from older objects; what is between the holes is right to the byte."""
    publisher = Publisher(chunk=300_001)
    first_data = b"begin" + bytes(20 * MIB) + b"middle" + bytes(10 * MIB + 13) + b"end"
    first = publisher.pack({b"big": first_data})
    second = publisher.pack({b"big": first_data + b"appended" + bytes(3 * MIB)})
    for packed in (first, second):
        pull(store, packed)
        check(store, packed)
        (name,) = packed.contents
        assert store.objects.path(name).stat().st_blocks * 512 < MIB


def test_packs_that_are_here_in_part_are_used(store: BlobStore) -> None:
    """Each call makes what the pieces that have come by then cover; the pieces of a large file come
    in any order."""
    packed = Publisher().pack({**{b"n%d" % seed: noise(seed, 9000) for seed in range(40)}, b"big": BIG})
    bring(store, packed, packed.small)
    data = packed.blobs[packed.packs[0]]
    pieces = PieceList.of_stream(BytesIO(data), len(data))
    with store.trees.missing(packed.root, packed.catalogs) as missing:
        blob = store.begin(packed.packs[0], pieces)
        left = []
        for piece in reversed(range(pieces.layout.count)):
            start = pieces.layout.offset(piece)
            assert blob.write(piece, data[start : start + pieces.layout.length(piece)])
            if piece % 16 == 0 or piece < 6:
                left.append(store.trees.fill(missing).missing)
        assert left == sorted(left, reverse=True) and left[-1] == 0 and len(set(left)) > 3
        store.trees.finish(missing)
    check(store, packed)


def test_a_selection_of_pieces_is_enough(store: BlobStore) -> None:
    """Of a large pack a host that has most contents needs few pieces, which are not side by
    side."""
    datas = {b"n%03d" % seed: noise(seed, 20_000) for seed in range(100)}
    packed = Publisher().pack(datas)
    bring(store, packed, packed.small)
    wanted = [datas[b"n%03d" % seed] for seed in (3, 4, 40, 99)]
    for data in datas.values():
        if data not in wanted:
            store.objects.add(content_hash(data), data)
    with store.trees.missing(packed.root, packed.catalogs) as missing:
        (need,) = missing.needs
        assert need.ranges == ((60_000, 100_000), (800_000, 820_000), (1_980_000, 2_000_000)), "neighbours are merged"
        missing.selected[need.pack] = selected(packed, store, need.pack, list(need.ranges))
        assert store.trees.fill(missing).missing == 0
        store.trees.finish(missing)
    check(store, packed)
    spare = {candidate.digest for candidate in store.candidates()[0] if candidate.redundant}
    assert spare == {blob.digest for blob in store.blobs()} - {packed.root, *packed.catalogs}


def test_only_packs_of_the_package_are_needed(store: BlobStore) -> None:
    """An old catalog may list a pack that the package no longer has, since another one has what it
    needs of it."""
    publisher = Publisher()
    first = publisher.pack(SMALL)
    publisher.known.clear()
    second = publisher.pack(SMALL)
    third = publisher.pack({**SMALL, b"more": noise(1, 1000)})
    old = decode_catalog(third.blobs[first.catalogs[0]]).packs[0]
    assert third.packs[0] == third.packs[1] == old.digest, "the same contents make the same pack"
    publisher = Publisher(pack_bytes=4000)
    publisher.catalogs = list(first.catalogs)
    publisher.blobs = dict(first.blobs)
    fourth = publisher.pack(SMALL)
    bring(store, fourth, fourth.small)
    with store.trees.missing(fourth.root, fourth.catalogs, fourth.packs) as missing:
        assert {need.pack for need in missing.needs} == set(fourth.packs)
    with store.trees.missing(fourth.root, fourth.catalogs) as missing:
        assert [need.pack for need in missing.needs] == first.packs
    bring(store, fourth, fourth.packs)
    with store.trees.missing(fourth.root, fourth.catalogs) as missing:
        assert {need.pack for need in missing.needs} == set(fourth.packs), "what is here is taken"
    with pytest.raises(Corrupt, match="no catalog says where"):
        store.trees.missing(fourth.root, fourth.catalogs, fourth.packs[1:])
    assert second.root == first.root


def test_a_pack_that_lies_is_named(store: BlobStore) -> None:
    """Its pieces verify, but a chunk is not what the catalog says: the others are made, and nothing
    has the wrong name."""
    packed = Publisher().pack(SMALL)
    catalog = decode_catalog(packed.blobs[packed.catalogs[0]])
    (pack,) = catalog.packs
    records = bytearray(pack.records)
    wrong = content_hash(b"not there")
    right = bytes(records[400:432])
    records[400:432] = wrong
    entries = list(packed.entries)
    for number, entry in enumerate(entries):
        if getattr(entry, "content", b"") == right:
            entries[number] = type(entry)(entry.path, 0o644, 0, entry.size, wrong)  # type: ignore[call-arg, union-attr]
    pages = tuple(encode_pages(entries))
    old_root = decode_root(packed.blobs[packed.root])
    root = encode_root(
        type(old_root)(old_root.entries, old_root.files, old_root.bytes_total, tuple(map(content_hash, pages)))
    )
    packed.blobs[digest_of(root)] = root
    packed.root = digest_of(root)
    packed = replaced(packed, Catalog(pages, (), (Pack(pack.digest, pack.size, bytes(records)),)))
    bring(store, packed, [*packed.small, *packed.packs])
    with store.trees.missing(packed.root, packed.catalogs) as missing:
        with pytest.raises(Corrupt, match=f"{pack.digest} does not hold the chunk {wrong.hex()}"):
            store.trees.fill(missing)
        assert wrong not in store.objects
        with pytest.raises(Conflict):
            store.trees.finish(missing)
    assert all(content_hash(store.objects.path(name).read_bytes()) == name for name in store.objects.contents())


def test_chunks_that_do_not_make_up_their_content_are_found(store: BlobStore) -> None:
    """Each chunk is right, and so is the chunk list; only the file list names another content."""
    packed = Publisher().pack({b"big": BIG})
    (entry,) = packed.entries
    assert isinstance(entry, File)
    page = next(encode_pages([File(entry.path, 0o644, 0, entry.size, content_hash(b"?"), entry.chunks)]))
    root = encode_root(Root(1, 1, entry.size, (content_hash(page),)))
    catalog = decode_catalog(packed.blobs[packed.catalogs[0]])
    packed.root = digest_of(root)
    packed.blobs[packed.root] = root
    packed = replaced(packed, Catalog((page,), catalog.chunk_lists, catalog.packs))
    bring(store, packed, [*packed.small, *packed.packs])
    with store.trees.missing(packed.root, packed.catalogs) as missing:
        with pytest.raises(Corrupt, match=content_hash(b"?").hex()):
            store.trees.fill(missing)
        assert len(store.objects) == 0
    with pytest.raises(Conflict, match="no longer kept"):
        store.trees.fill(missing)


def test_what_trees_share_is_told_to_whoever_decides(store: BlobStore) -> None:
    """Each tree with what is its own, root and image; what both have in common apart; and nothing
    that a pull counts on."""
    publisher = Publisher()
    first = publisher.pack({b"a": noise(1, 100), b"c": noise(3, 1000), b"d": noise(4, 5000)})
    second = publisher.pack({b"b": noise(2, 200), b"c": noise(3, 1000), b"d": noise(4, 5000)})
    third = publisher.pack({b"d": noise(4, 5000)})
    for packed in (first, second):
        pull(store, packed)
    store.trees.images.path(first.root).write_bytes(bytes(17))

    def sizes() -> dict[str, int]:
        return {c.digest: c.size for c in store.candidates()[0] if c.digest in (first.root, second.root)}

    roots = {packed.root: len(packed.blobs[packed.root]) for packed in (first, second)}
    assert sizes() == {first.root: 117 + roots[first.root], second.root: 200 + roots[second.root]}
    assert store.candidates()[1] == [Share(frozenset(roots), 6000)]
    bring(store, third, third.small)
    with store.trees.missing(third.root, third.catalogs):
        assert store.candidates()[1] == [Share(frozenset(roots), 1000)]
    assert store.candidates()[1] == [Share(frozenset(roots), 6000)]


@pytest.mark.parametrize("part", ["pages", "chunk_lists", "packs"])
def test_what_is_nowhere_is_named(store: BlobStore, part: str) -> None:
    packed = Publisher().pack({**SMALL, b"big": BIG})
    catalog = decode_catalog(packed.blobs[packed.catalogs[0]])
    parts = {"pages": catalog.pages, "chunk_lists": catalog.chunk_lists, "packs": catalog.packs, part: ()}
    broken = replaced(packed, Catalog(**parts))  # type: ignore[arg-type]
    bring(store, broken, broken.small)
    with pytest.raises(Corrupt, match="no catalog"):
        store.trees.missing(broken.root, broken.catalogs)
    assert store.usage().bytes_expected == 0
    assert all(not blob.in_use for blob in store.blobs()), "a missing that failed claims nothing"


def test_blobs_that_a_tree_needs_must_be_here(store: BlobStore) -> None:
    packed = Publisher().pack(SMALL)
    with pytest.raises(NotFound, match=packed.root):
        store.trees.missing(packed.root, packed.catalogs)
    bring(store, packed, [packed.root])
    with pytest.raises(NotFound, match=packed.catalogs[0]):
        store.trees.missing(packed.root, packed.catalogs)
    for ask in (store.trees.entries, store.trees.hold, store.trees.remove):
        with pytest.raises(NotFound):
            ask(packed.root)


def test_a_tree_that_is_no_tree_is_refused(store: BlobStore) -> None:
    packed = Publisher().pack(SMALL)
    bring(store, packed, [*packed.small, *packed.packs])
    with pytest.raises(Corrupt):
        store.trees.missing(packed.packs[0], packed.catalogs)
    with pytest.raises(Corrupt):
        store.trees.missing(packed.root, packed.packs)


def test_removing_a_tree_spares_what_others_need(store: BlobStore) -> None:
    """The last one takes its objects and its image along; root and catalogs can be removed only
    after the trees."""
    publisher = Publisher()
    first = publisher.pack(SMALL)
    second = publisher.pack({**SMALL, b"more": noise(1, 5000)})
    pull(store, first)
    pull(store, second)
    store.trees.images.path(first.root).write_bytes(b"image one")
    store.trees.images.path(second.root).write_bytes(b"image two!")
    assert store.usage().bytes_images == 19
    for digest in (first.root, second.root, *second.catalogs):
        with pytest.raises(Conflict, match="is needed by the tree"):
            store.remove(digest)
    store.trees.remove(first.root)
    assert not store.trees.complete(first.root) and not store.trees.images.path(first.root).exists()
    check(store, second)
    store.remove(first.root)
    store.trees.remove(second.root)
    assert len(store.objects) == 0 and store.usage().bytes_objects == store.usage().bytes_images == 0
    assert not any(path.is_file() for path in (store.root / "objects").rglob("*"))
    for digest in (second.root, *second.catalogs):
        store.remove(digest)


def test_a_tree_that_is_pinned_held_or_pulled_stays(store: BlobStore) -> None:
    packed = Publisher().pack(SMALL)
    pull(store, packed)
    store.pins.pin(packed.root, "me")
    with pytest.raises(Conflict, match="pinned by me"):
        store.trees.remove(packed.root)
    store.pins.unpin("me")
    with store.trees.held(packed.root), pytest.raises(Conflict, match="in use"):
        store.trees.remove(packed.root)
    with store.trees.missing(packed.root, packed.catalogs), pytest.raises(Conflict, match="in use"):
        store.trees.remove(packed.root)
    store.trees.remove(packed.root)


def test_the_end_of_a_hold_is_a_use(store: BlobStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """Noted as long as it is held: what a policy does not keep goes a time after its last use."""
    packed = Publisher().pack({b"file": noise(1, 1000)})
    pull(store, packed)
    records, held = store.trees.records, []
    use = records.use
    monkeypatch.setattr(records, "use", lambda root: (held.append(root in store.trees.holds), use(root))[1])
    store.trees.hold(packed.root)
    store.trees.release(packed.root)
    assert held == [True, True]
    assert packed.root not in store.trees.holds


def test_a_tree_that_is_held_while_room_is_made_stays_whole(tmp_path: Path, open_store: OpenStore) -> None:
    """A view that begins once it was decided what goes keeps its tree, and with it the catalogs."""
    tree = Publisher().pack({b"file": noise(1, 1000)})

    def choose_held(candidates: Sequence[Candidate], needed: int, shares: Sequence[Share] = ()) -> list[Digest] | None:
        chosen = choose(candidates, needed, shares)
        if chosen and tree.root not in store.trees.holds:
            store.trees.hold(tree.root)
        return chosen

    store = open_store(tmp_path / "store", capacity_bytes=100_000, choose=choose_held)
    pull(store, tree)
    everything = 100_000 - store.usage().bytes_small
    with pytest.raises(DiskFull):
        store.make_room(everything)
    assert store.trees.complete(tree.root)
    check(store, tree)
    store.trees.release(tree.root)
    store.trees.hold(tree.root)


def test_what_a_pull_counts_on_does_not_vanish(store: BlobStore) -> None:
    """Objects that were here when it began, although the tree that had them goes; what it left
    behind is collected afterwards."""
    publisher = Publisher()
    first = publisher.pack({**SMALL, b"big": BIG})
    second = publisher.pack({**SMALL, b"big": BIG[: 20 * CHUNK] + b"?" + BIG[20 * CHUNK :], b"more": noise(1, 5000)})
    pull(store, first)
    bring(store, second, second.small)
    missing = store.trees.missing(second.root, second.catalogs)
    store.trees.remove(first.root)
    assert store.collect() == 0
    assert content_hash(BIG) in store.objects, "a large file is made from it"
    bring(store, second, [need.pack for need in missing.needs])
    assert store.trees.fill(missing).missing == 0
    store.trees.finish(missing)
    missing.close()
    assert store.collect() == len(BIG)
    check(store, second)


def test_room_is_made_of_what_a_pull_no_longer_counts_on(tmp_path: Path, open_store: OpenStore) -> None:
    """A pull counts on all large objects until it knows which ones it needs. What a tree left that
    was evicted meanwhile gives its room to the pull's packs."""
    size = WHOLE_MAX + MIB
    store = open_store(tmp_path, capacity_bytes=2 * size + MIB, choose=choose)
    first, second, other = (Publisher().pack({b"big": noise(seed, size)}) for seed in range(3))
    pull(store, first)
    bring(store, other, other.packs)  # used later
    bring(store, second, second.small)
    with store.trees.missing(second.root, second.catalogs) as missing:
        assert store.trees.list() == [], "it was evicted for the objects to come"
        bring(store, second, second.packs)
        assert store.trees.fill(missing).missing == 0
        store.trees.finish(missing)
    check(store, second)


def test_what_a_broken_pull_left_is_found_again_or_collected(tmp_path: Path, open_store: OpenStore) -> None:
    packed = Publisher().pack(SMALL)
    store = open_store(tmp_path)
    bring(store, packed, [*packed.small, *packed.packs])
    with store.trees.missing(packed.root, packed.catalogs) as missing:
        store.trees.fill(missing)
    store.close()
    store = open_store(tmp_path)
    assert store.trees.list() == [] and len(store.objects) == len(packed.contents)
    with store.trees.missing(packed.root, packed.catalogs) as missing:
        assert missing.needs == () and missing.bytes_content == 0
        assert store.collect() == 0
    assert store.collect() == sum(map(len, packed.contents.values())) and len(store.objects) == 0


def test_the_room_of_a_pull_is_kept_for_it(tmp_path: Path, open_store: OpenStore) -> None:
    """A pull that cannot fit is refused before anything moves; one that fits finds its room, though
    others want it too."""
    packed = Publisher().pack({b"a": noise(1, MIB), b"b": noise(2, MIB)})
    other = Publisher().pack({b"c": noise(3, MIB)})
    store = open_store(tmp_path, capacity_bytes=5 * MIB, choose=choose)
    bring(store, packed, packed.small)
    with store.trees.missing(packed.root, packed.catalogs) as missing:
        bring(store, packed, packed.packs)
        bring(store, other, other.small)
        with pytest.raises(DiskFull):
            store.trees.missing(other.root, other.catalogs)
        assert store.trees.fill(missing).missing == 0
        store.trees.finish(missing)
    assert store.usage().bytes_total <= 5 * MIB
    huge = Publisher().pack({b"huge": noise(4, WHOLE_MAX)})
    bring(store, huge, huge.small)
    store.pins.pin(packed.root, "me")
    with pytest.raises(DiskFull):
        store.trees.missing(huge.root, huge.catalogs)
    check(store, packed)
    assert store.trees.complete(packed.root), "nothing may go in vain"


@pytest.mark.parametrize("what", ["no list", "a short list", "a chunk over the limit", "no pack"])
def test_nothing_gives_way_to_what_is_only_claimed(tmp_path: Path, open_store: OpenStore, what: str) -> None:
    """A tree that states sizes with nothing behind them is wrong, and no reason to evict another
    one or to say that the disk is full."""
    store = open_store(tmp_path, capacity_bytes=16 * MIB, choose=choose)
    kept = Publisher().pack({b"f": noise(1, 2 * MIB)})
    pull(store, kept)
    name = bytes(32)
    match what:
        case "no list":
            claim = [File(b"claim", 0o644, 0, 1 << 46, name, name)]
        case "a short list":
            chunks = content_hash(_list_of(BIG))
            claim = [File(b"claim", 0o644, 0, 1 << 46, name, chunks)]
        case "a chunk over the limit":
            chunks = content_hash(_list_of(b"", (name, 1 << 31), (name, 1 << 31)))
            claim = [File(b"claim", 0o644, 0, 1 << 32, name, chunks)]
        case "no pack":
            claim = [File(b"%d" % number, 0o644, 0, WHOLE_MAX, content_hash(b"%d" % number)) for number in range(2)]
    packed = Publisher().pack({b"big": BIG}, claim)
    catalog = decode_catalog(packed.blobs[packed.catalogs[0]])
    lists = (*catalog.chunk_lists, _list_of(b"", (name, 1 << 31), (name, 1 << 31)))
    packed = replaced(packed, Catalog(catalog.pages, lists, catalog.packs))
    bring(store, packed, packed.small)
    with pytest.raises(Corrupt):
        store.trees.missing(packed.root, packed.catalogs)
    assert store.trees.complete(kept.root) and store.get(kept.packs[0]) is not None
    assert store.usage().bytes_expected == 0


def _list_of(data: bytes, *chunks: tuple[bytes, int]) -> bytes:
    """The encoded chunk list of `data`, as Publisher cuts it, with more chunks behind."""
    cut = (data[at : at + CHUNK] for at in range(0, len(data), CHUNK))
    return ChunkList((*((content_hash(each), len(each)) for each in cut), *chunks)).encode()


def test_packs_go_before_what_shows_something_and_trees_by_use(tmp_path: Path, open_store: OpenStore) -> None:
    """Room is made from the packs of complete trees, though used last; then from the tree used
    longest ago, whose catalog goes after it."""
    store = open_store(tmp_path, capacity_bytes=11 * MIB, choose=choose)
    trees = [Publisher().pack({b"f": noise(seed, MIB), b"same": noise(9, 2 * MIB)}) for seed in range(2)]
    for packed in trees:
        pull(store, packed)
    store.trees.records.use(trees[0].root)
    packs = [packed.packs[0] for packed in trees]
    free = 11 * MIB - store.usage().bytes_total
    assert store.make_room(free + 1) == packs[:1]
    free = 11 * MIB - store.usage().bytes_total
    assert store.make_room(free + 3 * MIB + MIB // 2) == [packs[1], trees[1].root]
    check(store, trees[0])
    assert store.get(trees[1].root) is None
    assert not store.trees.complete(trees[1].root) and store.trees.complete(trees[0].root)
    free = 11 * MIB - store.usage().bytes_total
    with store.trees.held(trees[0].root), pytest.raises(DiskFull):
        store.make_room(free + MIB)
    went = store.make_room(free + MIB)
    assert trees[0].root in went and len(store.objects) == 0


def test_the_use_of_a_tree_alone_is_written_down(tmp_path: Path, open_store: OpenStore) -> None:
    """The row of a large tree has megabytes, so those of trees that nobody used are left alone."""
    store = open_store(tmp_path)
    trees = [Publisher().pack({b"f": noise(seed, 1000)}) for seed in range(2)]
    for packed in trees:
        pull(store, packed)
    store.close()
    store = open_store(tmp_path)
    with contextlib.closing(sqlite3.connect(tmp_path / "index.sqlite")) as index, index:
        index.execute("UPDATE trees SET last_used = 1.0")
    before = time.time()
    store.trees.records.use(trees[0].root)
    store.close()
    with contextlib.closing(sqlite3.connect(tmp_path / "index.sqlite")) as index:
        used = dict(index.execute("SELECT root, last_used FROM trees").fetchall())
    assert used[trees[0].root] >= before and used[trees[1].root] == 1.0


def test_a_damaged_object_is_found_and_fetched_again(store: BlobStore) -> None:
    """verify() says which; the tree is no longer complete, and the next pull lacks that content
    alone. A bad blob becomes partial."""
    packed = Publisher().pack(SMALL)
    pull(store, packed)
    assert all(checked.ok for checked in store.verify())
    bad = content_hash(SMALL[b"d3/f3"])
    flip(store.objects.path(bad), 10)
    found = list(store.verify(bytes_s=1e9))
    assert [checked.name for checked in found if not checked.ok] == [bad.hex()]
    assert len(found) == len(packed.contents) + len(store.blobs())
    assert bad not in store.objects and not store.trees.complete(packed.root)
    with pytest.raises(Conflict, match="not complete"):
        store.trees.hold(packed.root)
    again = pull(store, packed)
    assert again.bytes_content == len(SMALL[b"d3/f3"]) and store.trees.complete(packed.root)
    check(store, packed)
    flip(store.blobs()[0].path, 3)
    assert [checked.kind for checked in store.verify() if not checked.ok] == ["blob"]
    assert not store.blobs()[0].complete


@pytest.mark.parametrize("reader", ["scrub", "verify"])
def test_an_object_that_was_made_anew_while_it_was_read_stays(
    store: BlobStore, monkeypatch: pytest.MonkeyPatch, reader: str
) -> None:
    """A pull has found the damage first, and has the object again."""
    data = noise(70, 5000)
    tree = Publisher().pack({b"file": data})
    pull(store, tree)
    content = content_hash(data)
    flip(store.objects.path(content), 3)

    def heal() -> None:
        if store.objects.path(content).read_bytes() != data:
            store.trees.drop_objects({content})
            pull(store, tree)

    hash_of = verification_module._hash_of

    def read_and_heal(file: int, pace: Pace | None) -> bytes:
        found = hash_of(file, pace)
        heal()
        return found

    if reader == "scrub":
        checked = list(read_objects(store, content.hex()[:2], lambda count: heal()))
    else:
        monkeypatch.setattr(verification_module, "_hash_of", read_and_heal)
        checked = [each for each in store.verify() if each.kind == "object"]
    assert [each.ok for each in checked] == [True]
    assert store.trees.complete(tree.root)
    check(store, tree)


@pytest.mark.parametrize("reader", ["scrub", "verify"])
@pytest.mark.parametrize("other", ["pipe", "link"])
def test_what_is_no_file_is_no_object(store: BlobStore, tmp_path: Path, reader: str, other: str) -> None:
    """Nobody waits at a pipe until somebody writes into it, or reads what a link leads to."""
    data = noise(70, 5000)
    pull(store, Publisher().pack({b"file": data}))
    content = content_hash(data)
    path = store.objects.path(content)
    (tmp_path / "copy").write_bytes(data)
    path.unlink()
    if other == "pipe":
        os.mkfifo(path)
    else:
        path.symlink_to(tmp_path / "copy")
    if reader == "scrub":
        checked = list(read_objects(store, content.hex()[:2], lambda count: None))
    else:
        checked = [each for each in store.verify() if each.kind == "object"]
    assert [each.ok for each in checked] == [False]
    assert not os.path.lexists(path) and content not in store.objects


def test_a_damaged_older_object_does_not_get_into_a_new_one(store: BlobStore) -> None:
    """It is removed when that is noticed, and then the pack is needed."""
    publisher = Publisher()
    first = publisher.pack({b"big": BIG})
    second = publisher.pack({b"big": BIG + b"more"})
    pull(store, first)
    flip(store.objects.path(content_hash(BIG)), 7 * CHUNK + 5)
    bring(store, second, [*second.small, *second.packs])
    with (
        store.trees.missing(second.root, second.catalogs) as missing,
        pytest.raises(Damaged, match="damaged and was removed"),
    ):
        store.trees.fill(missing)
    assert not store.trees.complete(first.root)
    pull(store, second)
    check(store, second)


def test_images_belong_to_trees(tmp_path: Path, open_store: OpenStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of unknown trees and half-written ones are gone at the next opening; the others stay
    unless the machine was lost."""
    packed = Publisher().pack(SMALL)
    store = open_store(tmp_path)
    pull(store, packed)
    image = store.trees.images.path(packed.root)
    assert image.parent == tmp_path / "images"
    half = image.with_name(".draft")
    made = image.with_name(f"{image.name}.partial")  # as agents make them
    made.write_bytes(b"image")
    made.rename(image)
    stray = image.with_name("0" * 64)
    stray.write_bytes(b"stray")
    half.write_bytes(b"half")
    store.collect()
    assert half.exists(), "somebody may be writing it"
    # One that was made within a tick of the clock before the store was closed is made again.
    later = time.time() + 3600
    monkeypatch.setattr("time.time", lambda: later)
    store.close()
    store = open_store(tmp_path)
    assert list(image.parent.iterdir()) == [image]
    store.close()
    pretend_other_boot(tmp_path)
    store = open_store(tmp_path)
    assert not image.exists() and store.trees.complete(packed.root)


def test_pulls_at_once_share_what_they_make(store: BlobStore) -> None:
    """Several threads pull trees that have most contents in common."""
    publisher = Publisher()
    trees = [publisher.pack({**SMALL, b"own%d" % number: noise(number, 3000)}) for number in range(4)]
    errors: list[BaseException] = []

    def run(packed: Packed) -> None:
        try:
            pull(store, packed)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(packed,)) for packed in trees]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    for packed in trees:
        assert store.trees.complete(packed.root)
        check(store, packed)
    assert store.usage().bytes_expected == 0 and len(os.listdir(store.root / "tmp")) == 0


def test_a_hole_of_many_chunks_has_no_blocks_at_the_seams(tmp_path: Path, open_store: OpenStore) -> None:
    """Chunks of zeros that begin and end within a block of the file leave that block a hole,
    too."""
    data = noise(1, 5000) + bytes(WHOLE_MAX) + noise(2, 5000)
    packed = Publisher(chunk=100_001).pack({b"big": data})
    store = open_store(tmp_path / "store")
    pull(store, packed)
    check(store, packed)
    assert store.objects.path(content_hash(data)).stat().st_blocks * 512 <= 24 << 10


def test_holes_take_no_room(tmp_path: Path, open_store: OpenStore) -> None:
    """A file that is larger than the store fits if its content does; what it takes is the same
    after the next opening, and goes with it."""
    hole = 512 << 10
    packed = Publisher(chunk=hole).pack(
        {b"big": noise(1, hole) + bytes(64 * hole) + noise(2, 700), b"f": noise(3, MIB)}
    )
    store = open_store(tmp_path / "store", capacity_bytes=16 * MIB)
    bring(store, packed, packed.small)
    with store.trees.missing(packed.root, packed.catalogs) as missing:
        assert missing.bytes_content == store.usage().bytes_expected == hole + 700 + MIB + 64 * 4096
    missing = pull(store, packed)
    check(store, packed)
    used = store.usage()
    assert (used.bytes_objects, used.bytes_expected) == (missing.bytes_content, 0)
    assert used.bytes_objects >= sum(path.stat().st_blocks * 512 for path in (tmp_path / "store/objects").glob("??/*"))
    candidates, shares = store.candidates()
    assert (
        not shares
        and missing.bytes_content <= next(each.size for each in candidates if each.digest == packed.root) < 2 * MIB
    )
    store.close()
    again = open_store(tmp_path / "store", capacity_bytes=16 * MIB)
    assert again.usage().bytes_objects == used.bytes_objects
    again.trees.remove(packed.root)
    assert again.usage().bytes_objects == 0
