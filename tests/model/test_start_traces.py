"""Traces: their encoding, how recordings become one, and what a new version inherits; compared with
slow looks at every chunk."""

from __future__ import annotations

import random
from statistics import median_low

import msgspec
import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from p2pdist.model.device import BLOCK_BYTES, CELL_BLOCKS, CELL_BYTES, Cells, DeviceLayout
from p2pdist.model.digest import digest_of
from p2pdist.model.errors import Corrupt, TooLarge, UsageError
from p2pdist.model.trace import (
    AT_MS_MAX,
    CHUNKS_MAX,
    CONTENTS_MAX,
    DECODED_BYTES_MAX,
    JOINED_MS,
    PATHS_BYTES_MAX,
    TRACE_BYTES_MAX,
    Place,
    Span,
    Trace,
    TraceBuilder,
    Traced,
    check_entry,
    decode_trace,
    encode_trace,
    entry_name,
    inherit,
    merge,
    placed,
    read_chunks,
)
from p2pdist.model.tree import Entry, File, Symlink, content_hash

NAMES = [content_hash(b"%d" % number) for number in range(6)]
READS = st.lists(st.tuples(st.sampled_from(NAMES), st.integers(0, 5), st.integers(0, 4 * JOINED_MS)), max_size=30)


def recorded(reads: list[tuple[bytes, int, int]], lasted_ms: int = 0) -> Trace:
    """The trace of reads, each so long after the one before."""
    builder, at_ms = TraceBuilder(), 0
    for content, number, later_ms in reads:
        at_ms += later_ms
        builder.add(content, number, at_ms)
    return builder.trace({name: b"file-" + name.hex().encode() for name in NAMES}, max(at_ms, lasted_ms))


PACKS = tuple(str(digest_of(b"%d" % number)) for number in range(2))


def test_chunks_that_lie_one_behind_the_other_are_one_place() -> None:
    one, other = PACKS
    chunks = [(one, 0, 5), (one, 5, 7), (other, 12, 1), (one, 12, 2), (one, 20, 2), (one, 18, 2)]
    trace = placed(recorded([(NAMES[0], 0, 0)]), chunks)
    assert trace.packs == PACKS
    assert trace.places == (Place(0, 0, 12), Place(1, 12, 1), Place(0, 12, 2), Place(0, 20, 2), Place(0, 18, 2))
    assert decode_trace(encode_trace(trace)) == trace


def test_a_trace_has_the_places_of_the_newest_recording_that_has_some() -> None:
    reads = [(NAMES[0], 0, 0), (NAMES[1], 0, 1)]
    newest, newer, old = (
        recorded(reads),
        placed(recorded(reads), [(PACKS[1], 3, 4)]),
        placed(recorded(reads), [(PACKS[0], 0, 9)]),
    )
    merged = merge([newest, newer, old])
    assert (merged.packs, merged.places) == ((PACKS[1],), (Place(0, 3, 4),))
    assert expanded(merged) == expanded(newest)
    assert merge([old]) == old


def test_a_trace_of_an_earlier_release_has_no_places() -> None:
    trace = recorded([(NAMES[0], 0, 0)], 7)
    plain = msgspec.msgpack.encode(["p2pdist-trace-1", 7, trace.contents, trace.spans])
    assert decode_trace(zstandard.ZstdCompressor(write_content_size=True).compress(plain)) == trace


@pytest.mark.parametrize(
    ("packs", "places"),
    [
        (("sha256:1",), ()),
        (PACKS[:1], (Place(1, 0, 1),)),
        (PACKS[:1], (Place(-1, 0, 1),)),
        (PACKS[:1], (Place(0, -1, 1),)),
        (PACKS[:1], (Place(0, 1 << 62, 1),)),
        (PACKS[:1], (Place(0, 0, 0),)),
        (PACKS[:1], (Place(0, 0, 1 << 62),)),
        (PACKS[:1] * 1025, ()),
        (PACKS[:1], (Place(0, 0, 1),) * (CHUNKS_MAX + 1)),
    ],
)
def test_impossible_places_are_refused(packs: tuple[str, ...], places: tuple[Place, ...]) -> None:
    with pytest.raises(Corrupt, match="places"):
        decode_trace(encode_trace(Trace(packs=packs, places=places)))


def test_places_over_the_limits_are_left_out() -> None:
    trace = recorded([(NAMES[0], 0, 0)])
    assert len(placed(trace, ((PACKS[0], 2 * number, 1) for number in range(CHUNKS_MAX + 5))).places) == CHUNKS_MAX
    many = placed(trace, ((str(digest_of(b"%d" % number)), 0, 1) for number in range(1030)))
    assert len(many.packs) == len(many.places) == 1024
    assert decode_trace(encode_trace(many)) == many


def expanded(trace: Trace) -> list[tuple[bytes, int]]:
    """The chunks of a trace, one by one."""
    return [
        (trace.contents[span.content].content, number)
        for span in trace.spans
        for number in range(span.first, span.first + span.count)
    ]


@given(READS)
def test_a_trace_has_each_chunk_once_in_the_order_of_first_reads(reads: list[tuple[bytes, int, int]]) -> None:
    trace = recorded(reads)
    assert expanded(trace) == list(dict.fromkeys((content, number) for content, number, _ in reads))
    assert decode_trace(encode_trace(trace)) == trace
    assert trace.chunks == len(expanded(trace))


def test_chunks_that_are_read_behind_each_other_are_one_span() -> None:
    a, b = NAMES[:2]
    reads = [(a, 0, 0), (a, 1, 1), (b, 0, 1), (b, 2, 1), (a, 2, 1), (a, 3, JOINED_MS + 1)]
    assert recorded(reads).spans == (
        Span(0, 0, 2, 0),
        Span(1, 0, 1, 2),
        Span(1, 2, 1, 3),
        Span(0, 2, 1, 4),
        Span(0, 3, 1, 5 + JOINED_MS),
    )


def test_a_recording_ends_at_its_limits() -> None:
    """What a start reads first counts."""
    builder = TraceBuilder()
    assert all(builder.add(NAMES[0], number, 0) for number in range(CHUNKS_MAX))
    assert not builder.add(NAMES[0], CHUNKS_MAX, 0) and not builder.add(NAMES[0], 0, 0)
    assert builder.trace({}, 0).chunks == CHUNKS_MAX
    builder = TraceBuilder()
    contents = [content_hash(b"content %d" % number) for number in range(CONTENTS_MAX + 1)]
    assert [builder.add(content, 0, 0) for content in contents] == [True] * CONTENTS_MAX + [False]
    assert not TraceBuilder().add(NAMES[0], 0, AT_MS_MAX + 1)
    long = {content: b"%04d" % number * 1000 for number, content in enumerate(contents)}
    shortened = builder.trace(long, 5)
    assert 0 < len(shortened.contents) < CONTENTS_MAX and shortened.lasted_ms == 0
    assert sum(len(traced.path) for traced in shortened.contents) <= PATHS_BYTES_MAX
    assert decode_trace(encode_trace(shortened)) == shortened


def plain(*fields: object) -> bytes:
    return zstandard.ZstdCompressor(write_content_size=True).compress(msgspec.msgpack.encode(fields))


A, B = [NAMES[0], b"a"], [NAMES[1], b"b"]
HOSTILE = [
    b"",
    b"PK\x03\x04",
    encode_trace(Trace()) + b"x",
    encode_trace(Trace())[:-1],
    plain("p2pdist-trace-2", 0, [], []),
    plain("p2pdist-trace-1", 0, [A, A], []),
    plain("p2pdist-trace-1", 0, [[b"short", b"a"]], []),
    plain("p2pdist-trace-1", 0, [[NAMES[0], b"a" * 4096]], []),
    plain("p2pdist-trace-1", 0, [A], [[1, 0, 1, 0]]),
    plain("p2pdist-trace-1", 0, [A], [[-1, 0, 1, 0]]),
    plain("p2pdist-trace-1", 0, [A], [[0, -1, 1, 0]]),
    plain("p2pdist-trace-1", 0, [A], [[0, 1 << 60, 1, 0]]),
    plain("p2pdist-trace-1", 0, [A], [[0, 0, 0, 0]]),
    plain("p2pdist-trace-1", 0, [A], [[0, 0, 1 << 60, 0]]),
    plain("p2pdist-trace-1", 0, [A, B], [[0, 0, CHUNKS_MAX, 0], [1, 0, 1, 0]]),
    plain("p2pdist-trace-1", 5, [A], [[0, 0, 1, 6]]),
    plain("p2pdist-trace-1", 9, [A], [[0, 0, 1, 6], [0, 1, 1, 5]]),
    plain("p2pdist-trace-1", AT_MS_MAX + 1, [], []),
    plain("p2pdist-trace-1", 0, [[NAMES[0], "text"]], []),
    zstandard.ZstdCompressor(write_content_size=False).compress(b"abc"),
    zstandard.ZstdCompressor().compress(bytes(DECODED_BYTES_MAX + 1)),
    bytes(TRACE_BYTES_MAX + 1),
]


@pytest.mark.parametrize("data", HOSTILE, ids=range(len(HOSTILE)))
def test_what_is_no_trace_is_refused(data: bytes) -> None:
    with pytest.raises(Corrupt):
        decode_trace(data)


@given(st.binary(max_size=200))
def test_any_bytes_are_a_trace_or_corrupt(noise: bytes) -> None:
    for data in (noise, zstandard.ZstdCompressor().compress(noise)):
        try:
            decode_trace(data)
        except Corrupt:
            continue


def test_what_does_not_fit_is_not_encoded() -> None:
    contents = tuple(Traced(content_hash(b"%d" % number), b"p" * 4000) for number in range(2000))
    with pytest.raises(TooLarge):
        encode_trace(Trace(contents, (), 0))


# -- several recordings


@given(READS)
def test_equal_recordings_make_an_equal_trace(reads: list[tuple[bytes, int, int]]) -> None:
    trace = recorded(reads)
    assert expanded(merge([trace])) == expanded(merge([trace] * 3)) == expanded(trace)
    assert merge([]) == Trace()


@given(st.lists(st.tuples(READS, st.integers(0, 2000)), min_size=2, max_size=6))
def test_half_of_those_that_lasted_so_long_decide(runs: list[tuple[list[tuple[bytes, int, int]], int]]) -> None:
    recordings = [recorded(reads, lasted_ms) for reads, lasted_ms in runs]
    times: dict[tuple[bytes, int], list[int]] = {}
    for trace in recordings:
        for span in trace.spans:
            for number in range(span.first, span.first + span.count):
                times.setdefault((trace.contents[span.content].content, number), []).append(span.at_ms)
    expected = {}
    for chunk, read_ms in times.items():
        at_ms = median_low(read_ms)
        if 2 * len(read_ms) >= sum(trace.lasted_ms >= at_ms for trace in recordings):
            expected[chunk] = at_ms
    merged = merge(recordings)
    found = expanded(merged)
    assert set(found) == set(expected) and len(found) == len(expected)
    assert [expected[chunk] for chunk in found] == sorted(expected.values())
    assert decode_trace(encode_trace(merged)) == merged


def test_one_of_three_decides_nothing() -> None:
    a, b, c = NAMES[:3]
    usual, liar = recorded([(a, 0, 0), (b, 0, 5)]), recorded([(c, 0, 0), (b, 0, 5)])
    assert expanded(merge([liar, usual, usual])) == [(a, 0), (b, 0)]


def test_a_recording_that_was_cut_short_says_nothing_of_what_came_later() -> None:
    """The views of quick hosts are whole soon, and nothing is recorded from then on."""
    a, b = NAMES[:2]
    whole, short = recorded([(a, 0, 0), (b, 0, 500)]), recorded([(a, 0, 0)], 100)
    assert expanded(merge([short, short, short, whole])) == [(a, 0), (b, 0)]
    assert expanded(merge([recorded([(a, 0, 0)], 900)] * 3 + [whole])) == [(a, 0)]


# -- versions


def file(path: bytes, content: bytes) -> Entry:
    return File(path, 0o644, 0, 5, content)


def test_a_version_inherits_by_content_and_by_path() -> None:
    a, b, c, d, e = NAMES[:5]
    builder = TraceBuilder()
    for at_ms, content in enumerate((c, a, b, d)):
        builder.add(content, 0, at_ms)
    trace = builder.trace({a: b"a.py", b: b"b.py", c: b"c.py", d: b"d.py"}, 9)
    tree = [file(b"a.py", e), file(b"moved.py", c), file(b"b.py", b), Symlink(b"d.py", 0, b"b.py")]
    inherited = inherit(trace, [tree])
    assert expanded(inherited) == [(c, 0), (e, 0), (b, 0)]
    assert [part.path for part in inherited.parts] == [b"c.py", b"a.py", b"b.py"] and inherited.lasted_ms == 9


def test_the_upper_layer_has_the_path() -> None:
    a, b, c = NAMES[:3]
    trace = recorded([(a, 0, 0)])
    path = trace.contents[0].path
    assert expanded(inherit(trace, [[file(path, b)], [file(path, c)]])) == [(c, 0)]
    assert expanded(inherit(trace, [[file(path, a)], [file(path, c)]])) == [(a, 0)]
    assert inherit(trace, [[file(b"other", b)]]).spans == ()


@given(READS, st.sets(st.sampled_from(NAMES)))
def test_what_is_inherited_is_in_the_tree_and_in_order(reads: list[tuple[bytes, int, int]], left: set[bytes]) -> None:
    trace = recorded(reads)
    found = expanded(inherit(trace, [[file(name.hex().encode(), name) for name in sorted(left)]]))
    assert found == [chunk for chunk in expanded(trace) if chunk[0] in left]


# -- entry points


@pytest.mark.parametrize(
    ("command", "name"),
    [
        ([], ""),
        (["${P2PDIST_ROOT}/bin/train"], "train"),
        (["python3.11", "-m", "trainer.main", "--steps", "3"], "trainer.main"),
        (["/usr/bin/python", "-I", "train.py"], "train.py"),
        (["python", "-c", "import torch; print('ready')"], "python"),
        (["env", "A=1", "python", "serve.py"], "serve.py"),
        (["bash", "-e", "start.sh"], "bash"),
        (["bin/ä b"], "__b"),
        (["x" * 500], "x" * 128),
    ],
)
def test_an_entry_point_is_named_by_its_program(command: list[str], name: str) -> None:
    assert entry_name(command) == name
    assert check_entry(name) == name


@given(st.lists(st.text(max_size=20), max_size=5))
def test_each_command_line_has_a_name(command: list[str]) -> None:
    assert check_entry(entry_name(command)) == entry_name(command)


@pytest.mark.parametrize("name", ["a b", "a/b", "ä", "\n", "x" * 129])
def test_other_names_are_refused(name: str) -> None:
    with pytest.raises(UsageError):
        check_entry(name)


# -- cells of a device


def test_a_cell_that_two_chunks_share_counts_for_the_one_that_was_read() -> None:
    blocks = 2 * CELL_BLOCKS + 1
    names = [content_hash(b"content %d" % number) for number in range(4)]
    layout = DeviceLayout(dict.fromkeys(names[:3], blocks * BLOCK_BYTES) | {names[3]: 5}, {})
    cells = Cells(headed=True)

    def read(*numbers: int) -> list[tuple[bytes, int]]:
        chunks = read_chunks(layout, cells, {cell: at_ms for at_ms, cell in enumerate(numbers)})
        return [(chunk.content, at_ms) for chunk, at_ms in chunks]

    a, b, c, d = names
    assert read(0, 1, 2) == [(a, 0)], "the next one has bytes in the last cell"
    assert read(3, 4, 2) == [(b, 0)]
    assert read(5, 4, 3, 2) == [(c, 0), (b, 1)]
    assert read(2) == [(b, 0)], "what begins there"
    assert read(6) == [(d, 0)]
    assert read(4, 5, 6) == [(c, 0), (d, 2)]


@given(st.lists(st.integers(1, 4 * CELL_BYTES), min_size=1, max_size=12), st.data())
def test_what_was_read_is_of_the_cells_that_were_read(sizes: list[int], data: st.DataObject) -> None:
    names = [content_hash(b"content %d" % number) for number in range(len(sizes))]
    layout = DeviceLayout(dict(zip(names, sizes, strict=True)), {})
    cells = Cells(headed=True)
    everything = cells.holding(0, layout.size)
    read = data.draw(st.lists(st.sampled_from(everything), unique=True))
    found = list(read_chunks(layout, cells, {cell: at_ms for at_ms, cell in enumerate(read)}))
    assert len({chunk.at for chunk, _ in found}) == len(found)
    covered = {cell for chunk, _ in found for cell in cells.holding(chunk.at, chunk.length)}
    assert set(read) <= covered
    assert [at_ms for _, at_ms in found] == sorted(at_ms for _, at_ms in found)
    whole = read_chunks(layout, cells, dict.fromkeys(everything, 0))
    assert {chunk.at for chunk, _ in whole} == {chunk.at for chunk in layout.chunks()}


def test_a_recording_that_was_encoded_in_fewer_bytes_than_here_makes_a_trace() -> None:
    """What a host states need not come from this encoder."""
    drawn = random.Random(3)
    paths = [drawn.randbytes(4000) for _ in range(125)]
    paths += [bytes(4000)] * 550 + paths
    contents = [Traced(content_hash(b"%d" % number), path) for number, path in enumerate(paths)]
    spans = [Span(number, 0, 1, number) for number in range(len(paths))]
    plain = msgspec.msgpack.encode(["p2pdist-trace-1", len(paths), contents, spans])
    tight = decode_trace(zstandard.ZstdCompressor(level=19, write_content_size=True).compress(plain))
    with pytest.raises(TooLarge):
        encode_trace(tight)
    made = decode_trace(encode_trace(merge([tight])))
    assert made.spans and made.spans == tight.spans[: len(made.spans)]
    assert merge([tight, tight]).spans == made.spans
