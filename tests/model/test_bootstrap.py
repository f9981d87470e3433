"""Bootstraps: what they say comes back as it was, and one that is wrong is told from one that is
not, whatever is wrong with it."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import msgspec
import pytest
import zstandard
from effort import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from p2pdist.model import bootstrap
from p2pdist.model.bootstrap import (
    BOOTSTRAP_BYTES_MAX,
    DECODED_BYTES_MAX,
    FORMAT,
    NAME_BYTES,
    WINDOW,
    PackedImage,
    PlacedChunks,
    bootstrap_of,
    decode_bootstrap,
    encode_bootstrap,
    is_named,
)
from p2pdist.model.device import BLOCKS_MAX, DeviceLayout
from p2pdist.model.digest import Digest, digest_of
from p2pdist.model.errors import Corrupt, TooLarge
from p2pdist.model.manifest import BOOTSTRAP, CATALOG_TYPE, PACK_TYPE, SQUASHFS_TYPE, TREE_TYPE, Descriptor, Manifest
from p2pdist.model.tree import CHUNK_LEAST, CHUNK_MAX, ChunkList, content_hash

Absent: Any = None

Change = Callable[[Any], object]
"""Changes a decoded array."""


@dataclass
class Made:
    """A package whose contents have chunks of these `lengths`, laid into packs in turns of three,
    with an image for each layer. Chunks of the second pack lie in another order than in the
    device."""

    lengths: Sequence[Sequence[int]]
    packs: int = 1
    layers: int = 1

    def __post_init__(self) -> None:
        sizes: dict[bytes, int] = {}
        lists: dict[bytes, bytes] = {}
        for number, lengths in enumerate(self.lengths):
            content = content_hash(b"content %d" % number)
            sizes[content] = sum(lengths)
            if len(lengths) > 1:
                names = [content_hash(b"%d %d" % (number, at)) for at in range(len(lengths))]
                lists[content] = ChunkList(tuple(zip(names, lengths, strict=True))).encode()
        self.layout = DeviceLayout(sizes, lists)
        self.digests = [digest_of(b"pack %d" % number) for number in range(self.packs)]
        ends = [0] * self.packs
        self.places: dict[bytes, tuple[Digest, int, int]] = {}
        chunks = list({chunk.chunk: chunk.length for chunk in self.layout.chunks()}.items())
        for number, (name, length) in enumerate(chunks if self.packs == 1 else chunks[::-1]):
            pack, stored = number // 3 % self.packs, max(1, length // 2)
            self.places[name] = self.digests[pack], ends[pack], stored
            ends[pack] += stored
        drawn = random.Random(self.layers)
        self.images = [drawn.randbytes(5000) + bytes(3 << 20) + drawn.randbytes(7) for _ in range(self.layers)]
        trees = tuple(Descriptor(TREE_TYPE, digest_of(b"tree %d" % layer), 9) for layer in range(self.layers))
        self.manifest = Manifest(Absent, trees, ())

    def encoded(self) -> bytes:
        data = encode_bootstrap(self.manifest, self.images, self.layout, self.places)
        assert data is not None
        return data


MADE = {
    "nothing": Made([]),
    "small": Made([[1], [70_000], [4096], [9]]),
    "cut": Made([[5], [CHUNK_LEAST + 3, CHUNK_LEAST, 40_000], [CHUNK_LEAST, 7], [8]]),
    "packs": Made([[number + 1] for number in range(20)] + [[CHUNK_LEAST, 9]], packs=3),
    "layers": Made([[300], [CHUNK_LEAST, 9]], layers=2),
    "own cells": Made([[1], [3 << 20], [CHUNK_LEAST] * 30, [2]], packs=2),
}

LENGTHS = st.one_of(
    st.lists(st.integers(1, CHUNK_MAX), min_size=1, max_size=1),
    st.lists(st.integers(CHUNK_LEAST, CHUNK_LEAST + 9000), min_size=2, max_size=4),
)


def check(made: Made) -> None:
    """What a bootstrap says is what the trees and catalogs say, by short names."""
    found = decode_bootstrap(made.encoded())
    assert found.layers == tuple(layer.digest for layer in made.manifest.layers)
    assert [b"".join(image.parts()) for image in found.images] == made.images
    assert [image.size for image in found.images] == list(map(len, made.images))
    stated = found.arrangement, found.size, found.bytes_content
    assert stated == (made.layout.arrangement, made.layout.size, sum(map(sum, made.lengths)))
    layout, placed = found.contents()
    assert made.layout.agrees_with(layout)
    chunks = [(chunk.at, chunk.content, chunk.offset, chunk.chunk, chunk.length) for chunk in layout.chunks()]
    assert chunks == [
        (chunk.at, chunk.content[:NAME_BYTES], chunk.offset, chunk.chunk[:NAME_BYTES], chunk.length)
        for chunk in made.layout.chunks()
    ]
    lengths = {chunk.chunk: chunk.length for chunk in made.layout.chunks()}
    assert places(placed) == sorted((name[:NAME_BYTES], lengths[name], *made.places[name]) for name in lengths)
    assert len({each.pack for each in placed}) == len(placed)


def places(placed: Sequence[PlacedChunks]) -> list[tuple[Any, ...]]:
    """Name, length, pack, offset and stored length of each chunk."""
    columns = [(each, zip(each.names, each.lengths, each.offsets, each.stored, strict=True)) for each in placed]
    return sorted((name, length, each.pack, at, stored) for each, rows in columns for name, length, at, stored in rows)


@pytest.mark.parametrize("made", MADE.values(), ids=MADE.keys())
def test_a_bootstrap_comes_back_as_it_was(made: Made) -> None:
    check(made)


@given(st.lists(LENGTHS, max_size=9), st.integers(1, 3), st.integers(1, 2))
@settings(max_examples=examples(60))
def test_places_are_those_of_the_trees(lengths: list[list[int]], packs: int, layers: int) -> None:
    check(Made(lengths, packs, layers))


def test_a_chunk_that_a_content_has_twice_is_in_one_place() -> None:
    """As in a file of zeros."""
    made = Made([[4], [CHUNK_LEAST] * 4, [5]])
    (content,) = made.layout.chunk_lists
    names = [content_hash(b"%d" % number) for number in (0, 1, 1, 0)]
    lists = {content: ChunkList(tuple((name, CHUNK_LEAST) for name in names)).encode()}
    sizes = dict(zip(made.layout.contents, map(sum, made.lengths), strict=True))
    made.layout = DeviceLayout(sizes, lists)
    made.places |= {names[0]: (made.digests[0], 10**6, 50), names[1]: (made.digests[0], 10**6 + 50, 60)}
    layout, placed = decode_bootstrap(made.encoded()).contents()
    assert [chunk.chunk for chunk in layout.chunks() if chunk.content == content[:NAME_BYTES]] == [
        name[:NAME_BYTES] for name in names
    ]
    cut = [place for place in places(placed) if place[3] >= 10**6]
    assert sorted(place[3:] for place in cut) == 2 * [(10**6, 50)] + 2 * [(10**6 + 50, 60)]
    assert {place[0]: place[3] for place in cut} == {names[0][:8]: 10**6, names[1][:8]: 10**6 + 50}


def test_the_same_package_has_the_same_bootstrap() -> None:
    made = MADE["packs"]
    assert made.encoded() == Made(made.lengths, packs=3).encoded()
    assert made.encoded() != Made(made.lengths, packs=2).encoded()


# -- packages that have none


def test_an_image_among_the_layers_has_none() -> None:
    made = Made([[5]])
    image = Descriptor(SQUASHFS_TYPE, digest_of(b"image"), 9)
    manifest = replace(made.manifest, layers=(*made.manifest.layers, image))
    assert encode_bootstrap(manifest, made.images, made.layout, made.places) is None


@pytest.mark.parametrize("lists", [False, True], ids=["contents", "content and chunk"])
def test_equal_short_names_have_none(lists: bool) -> None:
    first, second = bytes(8) + b"a" * 24, bytes(8) + b"b" * 24
    parts = ((second, CHUNK_LEAST), (bytes([1]) * 32, 9))
    sizes = {first: CHUNK_LEAST + 9} if lists else {first: 5, second: 6}
    layout = DeviceLayout(sizes, {first: ChunkList(parts).encode()} if lists else {})
    found = {chunk.chunk: (digest_of(b""), 0, 1) for chunk in layout.chunks()}
    manifest = Made([]).manifest
    assert encode_bootstrap(manifest, [b""], layout, found) is None
    other = {bytes([7]) + name[1:]: size for name, size in sizes.items() if name == first}
    layout = DeviceLayout(other, {}) if lists else DeviceLayout(other | {second: 6}, {})
    found = {chunk.chunk: (digest_of(b""), 0, 1) for chunk in layout.chunks()}
    assert encode_bootstrap(manifest, [b""], layout, found) is not None


@pytest.mark.parametrize("limit", ["DECODED_BYTES_MAX", "BOOTSTRAP_BYTES_MAX", "CHUNKS_MAX", "PACKS_MAX"])
def test_what_is_over_a_limit_has_none(monkeypatch: pytest.MonkeyPatch, limit: str) -> None:
    made = MADE["packs"]
    data = made.encoded()
    images = sum(map(len, made.images))
    amount = {"DECODED_BYTES_MAX": images, "BOOTSTRAP_BYTES_MAX": len(data) - 1, "CHUNKS_MAX": 21, "PACKS_MAX": 2}
    monkeypatch.setattr(bootstrap, limit, amount[limit])
    assert encode_bootstrap(made.manifest, made.images, made.layout, made.places) is None
    monkeypatch.setattr(bootstrap, limit, amount[limit] + (images if "BYTES" in limit else 1))
    assert made.encoded() == data


def test_one_that_grows_too_much_is_not_made(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hosts would refuse it."""
    made = MADE["packs"]
    array = msgspec.msgpack.decode(made.encoded())
    grown, frame = zstandard.frame_content_size(array[6]), len(array[6])
    monkeypatch.setattr(bootstrap, "EXPANSION_MAX", 1)
    monkeypatch.setattr(bootstrap, "SPARE_BYTES", grown - frame)
    data = made.encoded()
    decode_bootstrap(data)
    monkeypatch.setattr(bootstrap, "SPARE_BYTES", grown - frame - 1)
    assert encode_bootstrap(made.manifest, made.images, made.layout, made.places) is None
    with pytest.raises(Corrupt):
        decode_bootstrap(data)


# -- which part of a package is one


def part(**annotations: str) -> Descriptor:
    return Descriptor(PACK_TYPE, digest_of(repr(annotations).encode()), 100, {"other": "1"} | annotations)


def test_the_bootstrap_of_a_package_is_the_part_that_says_so() -> None:
    known, later, pack = part(**{BOOTSTRAP: FORMAT}), part(**{BOOTSTRAP: "2"}), part()
    catalog = replace(known, media_type=CATALOG_TYPE)
    large = replace(known, size=BOOTSTRAP_BYTES_MAX + 1)
    manifest = Made([]).manifest
    assert bootstrap_of(replace(manifest, parts=(pack, catalog, later, large, known))) == known
    assert bootstrap_of(replace(manifest, parts=(pack, catalog, later, large))) is None


def test_a_short_name_is_the_begin_of_the_hash() -> None:
    name = content_hash(b"data")
    assert is_named(b"data", name) and is_named(b"data", name[:NAME_BYTES])
    assert not is_named(b"data", name[: NAME_BYTES - 1]) and not is_named(b"data", b"")
    assert not is_named(b"other", name[:NAME_BYTES]) and not is_named(b"data", name[1:9])


# -- wrong ones


def compressed(data: bytes) -> bytes:
    parameters = zstandard.ZstdCompressionParameters.from_level(3, window_log=WINDOW, write_content_size=True)
    return zstandard.ZstdCompressor(compression_params=parameters).compress(data)


def bomb(size: int, stated: int) -> bytes:
    """A frame of zeros that states another size."""
    frame = bytearray(compressed(bytes(size)))
    at = 5 if frame[4] >> 5 & 1 else 6  # RFC 8878, 3.1.1.1: without or with a byte for the window
    frame[at : at + 4] = stated.to_bytes(4, "little")
    assert zstandard.frame_content_size(bytes(frame)) == stated
    return bytes(frame)


def changed(made: Made, change: Change) -> bytes:
    """A bootstrap whose outer array is another."""
    array = msgspec.msgpack.decode(made.encoded())
    change(array)
    return msgspec.msgpack.encode(array)


def rechunked(made: Made, change: Change) -> bytes:
    """A bootstrap that says something else of chunks."""

    def change_chunks(array: Any) -> None:
        chunks = msgspec.msgpack.decode(zstandard.ZstdDecompressor().decompress(array[6]))
        change(chunks)
        array[6] = compressed(msgspec.msgpack.encode(chunks))

    return changed(made, change_chunks)


def put(*path: Any) -> Change:
    """The last of these at the place that the others say."""

    def change(array: Any) -> None:
        *places, last, value = path
        for place in places:
            array = array[place]
        array[last] = value(array[last]) if callable(value) else value

    return change


def read_all(data: bytes) -> None:
    """Everything that an agent reads of a bootstrap."""
    found = decode_bootstrap(data)
    for image in found.images:
        came = 0
        for each in image.parts():
            came += len(each)
            assert came <= image.size, "more comes than was stated"
    layout, placed = found.contents()
    list(layout.chunks())
    assert all(len(each.names) == len(each.offsets) for each in placed)


AT_ONCE = {
    "format": put(0, "p2pdist-bootstrap-2"),
    "blocks below 0": put(2, -1),
    "more blocks than a device has": put(2, BLOCKS_MAX),
    "too few images": put(5, lambda images: images[1:]),
    "an image that is none": put(5, 0, b"no frame"),
    "no array": lambda array: array.clear(),
    "an image that states too much": put(5, 0, bomb(70_000, DECODED_BYTES_MAX)),
    "images that state too much together": put(5, [bomb(70_000, DECODED_BYTES_MAX // 2)] * 2),
    "chunks that state too much": put(6, bomb(70_000, 20 << 20)),
    "an image without a size": put(5, 0, zstandard.ZstdCompressor(write_content_size=False).compress(b"data")),
}
"""What is found before anything is decompressed."""

OUTER = {
    "another device": put(2, lambda blocks: blocks + 1),
    "other bytes": put(3, lambda count: count - 1),
    "an image of less than it states": put(5, 0, bomb(70_000, 70_001)),
    "an image of more than it states": put(5, 0, bomb(64 << 20, 3 << 20)),
    "an image that was cut": put(5, 0, lambda frame: frame[:-9]),
    "chunks of more than they state": put(6, bomb(64 << 20, 70_000)),
    "chunks of less than they state": put(6, bomb(70_000, 80_000)),
    "chunks with something behind them": put(6, lambda frame: frame + frame),
    "chunks that are none": put(6, compressed(b"no chunks")),
}


@pytest.mark.parametrize("change", AT_ONCE.values(), ids=AT_ONCE.keys())
def test_one_that_states_what_is_impossible_is_refused_at_once(change: Change) -> None:
    with pytest.raises(Corrupt):
        decode_bootstrap(changed(MADE["layers"], change))


@pytest.mark.parametrize("change", OUTER.values(), ids=OUTER.keys())
def test_one_that_states_something_wrong_is_corrupt(change: Change) -> None:
    made = MADE["layers"]
    read_all(made.encoded())
    with pytest.raises(Corrupt):
        read_all(changed(made, change))


PACKS, NAMES, CHUNK_LENGTHS, STORED, RUNS, CUTS = range(6)
"""Places in the array of chunks."""


def plane(number: int, value: int) -> Change:
    """One more byte for the last chunk in the plane of a column of lengths."""
    return lambda planes: (
        planes[: (len(planes) // 4) * (number + 1) - 1] + bytes([value]) + planes[(len(planes) // 4) * (number + 1) :]
    )


CHUNKS = {
    "names too short": put(NAMES, lambda names: names[:-1]),
    "a name too few": put(NAMES, lambda names: names[:-NAME_BYTES]),
    "lengths too few": put(CHUNK_LENGTHS, lambda planes: planes[:-4]),
    "stored lengths too many": put(STORED, lambda planes: planes + bytes(4)),
    "a chunk that is too long": put(CHUNK_LENGTHS, plane(3, 1)),
    "a chunk longer as stored": put(STORED, plane(2, 255)),
    "a chunk of no bytes": put(STORED, lambda planes: bytes(len(planes))),
    "a name twice": put(NAMES, lambda names: names[:-8] + names[:8]),
    "a digest that is none": put(PACKS, 0, "sha256:abc"),
    "a pack that does not exist": put(RUNS, -1, 1, 3),
    "a pack below 0": put(RUNS, -1, 1, -1),
    "an offset below 0": put(RUNS, -1, 2, -1),
    "runs out of order": put(RUNS, lambda runs: [runs[0], *runs[:0:-1]]),
    "a run of nothing": put(RUNS, lambda runs: [runs[0], *runs]),
    "a first run too late": put(RUNS, lambda runs: [[1, *runs[0][1:]], *runs[1:]]),
    "a run behind the end": put(RUNS, lambda runs: [*runs, [10**6, 0, 0]]),
    "no runs": put(RUNS, []),
    "cuts out of order": put(CUTS, lambda cuts: cuts[::-1]),
    "cuts that overlap": put(CUTS, lambda cuts: [[cuts[0][0], 4, cuts[0][2]], *cuts[1:]]),
    "a cut twice": put(CUTS, lambda cuts: [[*cuts[0][:2], cuts[1][2]], *cuts[1:]]),
    "a cut of nothing": put(CUTS, 0, 1, 0),
    "a cut of less than nothing": put(CUTS, 0, 1, -1),
    "a cut before the begin": put(CUTS, 0, 0, -1),
    "a cut behind the end": put(CUTS, -1, 1, 10**6),
    "a cut with a full name": put(CUTS, 0, 2, bytes(32)),
}

CHUNKED = Made([[5], [CHUNK_LEAST] * 3, [CHUNK_LEAST, 70_000], [6], [70_000]], packs=3)


@pytest.mark.parametrize("change", CHUNKS.values(), ids=CHUNKS.keys())
def test_one_that_says_something_wrong_of_chunks_is_corrupt(change: Change) -> None:
    read_all(rechunked(CHUNKED, lambda chunks: None))
    with pytest.raises(Corrupt):
        read_all(rechunked(CHUNKED, change))


def test_an_image_gives_no_more_than_its_size() -> None:
    came = 0
    with pytest.raises(Corrupt):
        for each in PackedImage(compressed(bytes(5 << 20)), 70_000).parts():
            came += len(each)
    assert came <= 70_000


def test_one_that_is_wrong_in_itself_alone_is_corrupt() -> None:
    """Its device is as large as it states."""
    with pytest.raises(Corrupt, match="length"):
        read_all(Made([[CHUNK_MAX + 1]]).encoded())
    read_all(Made([[CHUNK_MAX]]).encoded())
    array = msgspec.msgpack.decode(rechunked(CHUNKED, CHUNKS["a name twice"]))
    array[2] -= 1
    array[3] -= 5
    with pytest.raises(Corrupt, match="twice"):
        read_all(msgspec.msgpack.encode(array))


@pytest.mark.parametrize("limit", ["CHUNKS_MAX", "BOOTSTRAP_BYTES_MAX", "DECODED_BYTES_MAX"])
def test_one_over_a_limit_is_corrupt(monkeypatch: pytest.MonkeyPatch, limit: str) -> None:
    data = CHUNKED.encoded()
    amounts = {"CHUNKS_MAX": 7, "BOOTSTRAP_BYTES_MAX": len(data) - 1, "DECODED_BYTES_MAX": 3 << 20}
    monkeypatch.setattr(bootstrap, limit, amounts[limit])
    with pytest.raises(Corrupt):
        read_all(data)


def test_contents_that_no_device_holds_are_too_large(monkeypatch: pytest.MonkeyPatch) -> None:
    data = CHUNKED.encoded()
    monkeypatch.setattr("p2pdist.model.device.BLOCKS_MAX", 20)
    with pytest.raises(TooLarge):
        decode_bootstrap(data).contents()


SMALL = Made([[5], [CHUNK_LEAST] * 2, [6]], packs=2)
SMALL.images = [b"image " * 50]


@given(st.integers(0, 2), st.lists(st.tuples(st.floats(0, 1), st.integers(1, 255)), min_size=1, max_size=6))
@settings(max_examples=examples(1000))
def test_whatever_is_flipped_is_found_or_harmless(where: int, flips: list[tuple[float, int]]) -> None:
    """In all of it; in what its frame of chunks holds; and among the numbers of these alone, which
    most flips of the whole do not come to."""

    def flip(data: bytes) -> bytes:
        flipped = bytearray(data)
        for share, mask in flips:
            flipped[round(share * (len(flipped) - 1))] ^= mask
        return bytes(flipped)

    def flip_numbers(chunks: Any) -> None:
        for column in (RUNS, CUTS):
            for share, mask in flips:
                row = chunks[column][round(share * (len(chunks[column]) - 1))]
                row[mask % 2 + (column == RUNS)] ^= mask

    def flip_chunks(array: Any) -> None:
        array[6] = compressed(flip(zstandard.ZstdDecompressor().decompress(array[6])))

    try:
        if where == 0:
            read_all(flip(SMALL.encoded()))
        elif where == 1:
            read_all(changed(SMALL, flip_chunks))
        else:
            read_all(rechunked(SMALL, flip_numbers))
    except (Corrupt, TooLarge):
        pass
