"""Trees read one after the other: what is kept of those before spares work and changes nothing
else."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from io import BytesIO

import pytest
from effort import examples
from formats_rig import encode_pages
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from store_tree_rig import CHUNK, Packed, Publisher, bring, noise, pull

from p2pdist.model.catalog import Catalog, Pack, encode_catalog, record
from p2pdist.model.digest import Digest, digest_of
from p2pdist.model.errors import Conflict, Corrupt
from p2pdist.model.pieces import PieceList
from p2pdist.model.tree import (
    ENTRY_BYTES,
    HASH_SIZE,
    TREE_BYTES_MAX,
    WHOLE_MAX,
    Directory,
    Entry,
    File,
    HardLink,
    Root,
    content_hash,
    encode_root,
)
from p2pdist.store.blobs.blob import Blob
from p2pdist.store.store import BlobStore
from p2pdist.store.trees import reader as tree_reader
from p2pdist.store.trees.missing_contents import EMPTY, contents_of
from p2pdist.store.trees.reader import TreeRead, TreeReader

MANY = {b"d%02d/f%04d" % (number // 100, number): b"content %d" % number for number in range(4000)}


@dataclass
class Asked:
    """A store's blobs, and which of them were asked for."""

    store: BlobStore
    digests: list[Digest] = field(default_factory=list)

    def __call__(self, digest: Digest) -> Blob | None:
        self.digests.append(digest)
        return self.store.get(digest)


def put(store: BlobStore, data: bytes) -> Digest:
    """Have a blob complete in a store."""
    pieces = PieceList.of_stream(BytesIO(data), len(data))
    digest = digest_of(data)
    blob = store.begin(digest, pieces)
    if not blob.complete:
        for piece in range(pieces.layout.count):
            assert blob.write(
                piece, data[pieces.layout.offset(piece) : pieces.layout.offset(piece) + pieces.layout.length(piece)]
            )
        blob.finish()
    return digest


def as_before(tree: TreeRead) -> tuple[object, ...]:
    """What whoever asks for a tree gets, however it was read."""
    return (
        list(tree.tree.entries),
        tree.tree.contents,
        tree.tree.chunk_lists,
        [(each.packs, each.chunk_lists, each.pages) for each in tree.catalogs],
    )


def file(path: bytes, content: bytes, size: int, chunks: bytes) -> File:
    return File(path, 0o644, 0, size, content, chunks)


PageEntries = tuple[Entry, ...]
Version = tuple[list[PageEntries], list[list[PageEntries]]]

CONTENTS = [bytes([number]) * HASH_SIZE for number in range(4)]
LARGE = WHOLE_MAX + 1
NONE = st.just(b"")


def files(path: bytes) -> st.SearchStrategy[Entry]:
    """Small ones, an empty one, and large ones of one content with one of two chunk lists."""
    return st.one_of(
        st.builds(file, st.just(path), st.sampled_from(CONTENTS[:2]), st.just(1), NONE),
        st.builds(file, st.just(path), st.just(CONTENTS[2]), st.just(LARGE), st.sampled_from(CONTENTS[:2])),
        st.builds(file, st.just(path), st.just(EMPTY), st.just(0), NONE),
    )


def liars(path: bytes) -> st.SearchStrategy[Entry]:
    """Files that contradict themselves or others."""
    return st.builds(file, st.just(path), st.sampled_from([EMPTY, *CONTENTS[:2]]), st.sampled_from([0, 2]), NONE)


def directories(path: bytes) -> st.SearchStrategy[Entry]:
    return st.builds(Directory, st.just(path), st.sampled_from([0o755, 0o700]), st.just(0))


def links(path: bytes, *targets: bytes) -> st.SearchStrategy[Entry]:
    return st.builds(HardLink, st.just(path), st.sampled_from(targets))


PLACES: list[tuple[st.SearchStrategy[PageEntries], st.SearchStrategy[PageEntries]]] = [
    (st.tuples(files(b"a")), st.tuples(st.one_of(directories(b"a"), liars(b"a")))),
    (st.tuples(directories(b"b")), st.tuples(files(b"b"))),
    (
        st.tuples(files(b"b/c"), st.one_of(files(b"b/d"), links(b"b/d", b"a"))),
        st.tuples(directories(b"b/c"), links(b"b/d", b"b", b"e")),
    ),
    (st.tuples(files(b"c")), st.tuples(liars(b"c"))),
    (st.tuples(directories(b"d"), files(b"d/e")), st.tuples(liars(b"d/e"))),
    (st.tuples(st.one_of(files(b"e"), links(b"e", b"a", b"b/c"))), st.tuples(links(b"e", b"c", b"d", b"e"))),
]
"""Strategies for pages, in order: those that make trees, and those that are likely to break
them."""


@st.composite
def versions(draw: st.DrawFn) -> list[Version]:
    """Trees drawn from a few pages, and which of these their two catalogs carry."""
    usual = [draw(st.tuples(place, place)) for place, _ in PLACES]
    odd = [draw(place) for _, place in PLACES]
    found: list[Version] = []
    for _ in range(draw(st.integers(2, 5))):
        pages = [draw(st.sampled_from(each)) for each in usual]
        carried = list(pages)
        at = draw(st.integers(0, len(pages) - 1))
        match draw(st.integers(0, 9)):
            case 0:
                del pages[at]
            case 1:
                pages = list(draw(st.permutations([*pages, pages[at]])))
            case 2:
                del carried[at]
            case 3 | 4:
                pages[at] = carried[at] = odd[at]
        earlier = [page for version in found[-1:] for page in version[0]]
        found.append((pages, [draw(st.sampled_from([earlier, []])), carried]))
    return found


@pytest.fixture(scope="module")
def shelf(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BlobStore]:
    store = BlobStore(tmp_path_factory.mktemp("store"))
    yield store
    store.close()


def encoded(page: PageEntries) -> bytes:
    return b"".join(encode_pages(page))


@settings(max_examples=examples(250), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(versions=versions(), forget=st.integers(1, 4))
def test_a_tree_is_the_same_whatever_was_read_before(shelf: BlobStore, versions: list[Version], forget: int) -> None:
    """Also the verdict on one that contradicts itself, or whose catalogs do not carry a page that
    an earlier one had."""
    reader = TreeReader(shelf.get)
    for number, (pages, carried) in enumerate(versions):
        entries = [entry for page in pages for entry in page]
        regular = [entry for entry in entries if isinstance(entry, File)]
        names = tuple(content_hash(encoded(page)) for page in pages)
        root = put(shelf, encode_root(Root(len(entries), len(regular), sum(entry.size for entry in regular), names)))
        catalogs = [put(shelf, encode_catalog(Catalog(tuple(map(encoded, each))))) for each in carried]
        if number == forget:
            reader = TreeReader(shelf.get)
        try:
            expected = as_before(TreeReader(shelf.get).read(root, catalogs))
        except Corrupt as error:
            with pytest.raises(Corrupt) as again:
                reader.read(root, catalogs)
            assert ("no catalog" in str(error)) == ("no catalog" in str(again.value))
            continue
        read = reader.read(root, catalogs)
        assert as_before(read) == expected
        whole = contents_of(entries)
        assert read.tree.contents == whole.sizes and read.tree.chunk_lists == whole.chunk_lists
        known = reader.known(read.tree.base) if read.tree.base else None
        before = contents_of(known).sizes.items() if known is not None else set()
        assert read.tree.contents.items() - before <= read.tree.changed.items() <= read.tree.contents.items()


def test_of_the_next_version_only_what_is_new_is_read(store: BlobStore) -> None:
    """Its root and its catalog; the entries of the pages in common are the same objects."""
    publisher = Publisher()
    first = publisher.pack(MANY)
    second = publisher.pack({**MANY, b"d07/f0700": b"edited"})
    third = publisher.pack({**MANY, b"d07/f0700": b"again"})
    bring(store, third, [first.root, second.root, *third.small])
    asked = Asked(store)
    reader = TreeReader(asked)
    before = reader.read(first.root, first.catalogs).tree
    assert before.base is None and before.changed == before.contents and len(before.contents) == 4000
    asked.digests.clear()
    after = reader.read(second.root, second.catalogs).tree
    assert set(asked.digests) == {second.root, second.catalogs[1]}
    assert after.base == first.root and len(after.changed) < 2100
    assert after.contents.keys() - before.contents.keys() == {content_hash(b"edited")}
    assert after.entries == second.entries
    assert sum(new is old for new, old in zip(after.entries, before.entries, strict=True)) > 1900
    asked.digests.clear()
    reader = TreeReader(asked)
    reader.read(second.root, second.catalogs)
    asked.digests.clear()
    reader.read(first.root, first.catalogs)
    assert set(asked.digests) == {first.root, first.catalogs[0]}, "it carries a page that is not known"
    reader.read(third.root, third.catalogs)
    asked.digests.clear()
    assert reader.entries(third.root, third.catalogs) == third.entries and asked.digests == []


def test_little_is_kept(store: BlobStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """So many trees, and so many bytes; what versions share counts once."""
    publisher = Publisher()
    trees = [publisher.pack({**MANY, b"d07/f0700": b"%d" % number}) for number in range(6)]
    bring(store, trees[-1], [*(packed.root for packed in trees), *trees[-1].catalogs])
    reader = TreeReader(store.get)

    def kept() -> list[int]:
        return [number for number, packed in enumerate(trees) if reader.known(packed.root) is not None]

    for packed in trees:
        reader.read(packed.root, packed.catalogs)
    assert kept() == [2, 3, 4, 5] and len(kept()) == tree_reader.KEPT_TREES_MAX
    monkeypatch.setattr(tree_reader, "KEPT_BYTES_MAX", 2_400_000)
    reader.read(trees[2].root, trees[2].catalogs)
    assert kept() == [2, 5], "read last"
    monkeypatch.setattr(tree_reader, "KEPT_BYTES_MAX", 100_000)
    entries = reader.entries(trees[0].root, trees[0].catalogs)
    assert kept() == [0], "somebody has it"
    assert reader.entries(trees[0].root, trees[0].catalogs) is entries
    del entries
    assert kept() == []


def test_a_content_that_vanished_is_missed(store: BlobStore) -> None:
    """Before anything is said to be lacking, and before the tree is called complete; though the
    version before had it."""
    publisher = Publisher()
    first = publisher.pack(MANY)
    second = publisher.pack({**MANY, b"d07/f0700": b"edited"})
    pull(store, first)
    bring(store, second, [*second.small, *second.packs])
    gone = content_hash(MANY[b"d30/f3000"])
    with store.trees.missing(second.root, second.catalogs) as missing:
        assert missing.contents == {content_hash(b"edited"): 6}
        assert store.trees.fill(missing).missing == 0
        store.trees.drop_objects({gone})
        with pytest.raises(Conflict, match="1 contents are missing"):
            store.trees.finish(missing)
    with store.trees.missing(second.root, second.catalogs) as missing:
        assert missing.contents == {gone: len(MANY[b"d30/f3000"])}
        assert store.trees.fill(missing).missing == 0
        store.trees.finish(missing)
    assert store.trees.complete(second.root) and not store.trees.complete(first.root)


def test_what_only_a_removed_tree_had_is_lacking(store: BlobStore) -> None:
    """Its pages are still known, its objects are gone."""
    publisher = Publisher()
    first = publisher.pack(MANY)
    second = publisher.pack({**MANY, b"d07/f0700": b"edited"})
    pull(store, first)
    assert store.trees.reader.known(first.root) == first.entries
    store.trees.remove(first.root)
    bring(store, second, second.small)
    with store.trees.missing(second.root, second.catalogs) as missing:
        assert missing.contents.keys() == second.contents.keys()
    assert store.trees.reader.known(digest_of(b"never read")) is None


def test_chunk_lists_and_packs_of_known_catalogs_are_found(store: BlobStore) -> None:
    """A large content that is to be made again: all that says how is in a catalog that was read
    before."""
    publisher = Publisher()
    data = noise(1, WHOLE_MAX + 5 * CHUNK)
    small = {b"n%02d" % number: random.Random(number).randbytes(100) for number in range(50)}
    first = publisher.pack({**small, b"big": data})
    second = publisher.pack({**small, b"big": data, b"more": b"more"})
    pull(store, first)
    store.trees.drop_objects({content_hash(data)})
    store.trees.drop_objects({content_hash(small[b"n07"])})
    store.remove(first.packs[0])
    bring(store, second, second.small)
    with store.trees.missing(second.root, second.catalogs) as missing:
        assert missing.contents.keys() == {content_hash(each) for each in (data, small[b"n07"], b"more")}
        assert {need.pack for need in missing.needs} == set(second.packs)
        bring(store, second, second.packs)
        assert store.trees.fill(missing).missing == 0
        store.trees.finish(missing)


def packed_tree(store: BlobStore, lists: list[bytes], entries: list[Entry]) -> tuple[Digest, Digest]:
    """Root and catalog of a tree of one page."""
    (page,) = encode_pages(entries)
    regular = [each for each in entries if isinstance(each, File)]
    root = Root(len(entries), len(regular), sum(each.size for each in regular), (content_hash(page),))
    return put(store, encode_root(root)), put(store, encode_catalog(Catalog((page,), tuple(lists))))


def test_catalogs_of_a_tree_are_refused_together_before_one_is_decompressed(store: BlobStore) -> None:
    """Each alone is within its limits."""
    root, catalog = packed_tree(store, [], [Directory(b"d", 0o755, 0)])
    bombs = [put(store, encode_catalog(Catalog((), (bytes(9 << 20) + bytes([number]),)))) for number in range(2)]
    reader = TreeReader(store.get)
    for bomb in bombs:
        assert len(reader.read(root, [catalog, bomb, bomb]).tree.entries) == 1
    with pytest.raises(Corrupt, match="over the limit"):
        reader.read(root, [catalog, *bombs])
    with pytest.raises(Corrupt, match="over the limit"):
        TreeReader(store.get).read(root, [catalog, *bombs])


def test_a_tree_that_would_take_the_memory_is_refused_before_its_pages_are_read(store: BlobStore) -> None:
    count = TREE_BYTES_MAX // ENTRY_BYTES + 1
    names = tuple(content_hash(b"%d" % number) for number in range(-(-count // 2048)))
    root = put(store, encode_root(Root(count, 0, 0, names)))
    with pytest.raises(Corrupt, match="memory, over the limit"):
        TreeReader(store.get).read(root, [])


def test_of_chunk_lists_those_are_kept_that_trees_name(store: BlobStore) -> None:
    """What a later tree names of a catalog that is known is found in it again."""
    lists = [bytes([number]) * 72 for number in range(3)]
    large = [file(b"a%d" % number, CONTENTS[number], LARGE, content_hash(lists[number])) for number in range(2)]
    first, catalog = packed_tree(store, lists, [large[0]])
    second, other = packed_tree(store, [], large)
    reader = TreeReader(store.get)
    assert reader.read(first, [catalog]).chunk_lists() == {content_hash(lists[0]): lists[0]}
    both = {content_hash(each): each for each in lists[:2]}
    assert reader.read(second, [catalog, other]).chunk_lists() == both
    assert reader.read(first, [catalog]).chunk_lists() == both
    assert TreeReader(store.get).read(second, [other, catalog]).chunk_lists() == both


def with_one_more(store: BlobStore, packed: Packed, entry: File) -> tuple[Digest, list[Digest]]:
    """Root and catalogs of a tree with another file, whose content a pack is said to hold, not
    compressed."""
    entries = [*packed.entries, entry]
    regular = [each for each in entries if isinstance(each, File)]
    names = tuple(map(content_hash, [*encode_pages(packed.entries), encoded((entry,))]))
    root = encode_root(Root(len(entries), len(regular), sum(each.size for each in regular), names))
    pack = Pack(digest_of(b"pack"), entry.size, record(entry.content, entry.size, entry.size))
    return put(store, root), [*packed.catalogs, put(store, encode_catalog(Catalog((encoded((entry,)),), (), (pack,))))]


def test_another_size_for_a_content_is_refused(store: BlobStore) -> None:
    """Though only what changed is compared: one of the version before, one that is here, and one
    that comes by another way meanwhile."""
    first = Publisher().pack(MANY)
    pull(store, first)
    root, catalogs = with_one_more(store, first, file(b"z", content_hash(MANY[b"d07/f0700"]), 77, b""))
    with pytest.raises(Corrupt, match="states impossible sizes"):
        store.trees.missing(root, catalogs)
    assert store.objects.add(content_hash(b"twin"), b"twin")
    root, catalogs = with_one_more(store, first, file(b"z", content_hash(b"twin"), 77, b""))
    with pytest.raises(Corrupt, match="states another size"):
        store.trees.missing(root, catalogs)
    root, catalogs = with_one_more(store, first, file(b"z", content_hash(b"late"), 77, b""))
    with store.trees.missing(root, catalogs) as missing:
        assert missing.contents == {content_hash(b"late"): 77}
        assert store.objects.add(content_hash(b"late"), b"late")
        with pytest.raises(Corrupt, match="states another size"):
            store.trees.finish(missing)
