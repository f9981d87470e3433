"""Traces: which chunks of a package a start of its program reads, in order, and when.

A recording is the trace of one start, as one host saw it. Several recordings make one trace
(`merge`): a chunk is in it when at least half of the recordings read it, of those that lasted until
then, in the order of the median times. Contents are named by their BLAKE3, so a version of a
package inherits the trace of the one before (`inherit`): what it still has keeps its place, and a
file with another content takes the place of the content that was at its path.

A recording also says where in packs lay what was read, other chunks of the cells that were read
included (`Place`): a host without the package can ask for these pieces at once, before it knows
where its contents are. That holds for these packs alone, so a trace has the places of the newest
recording.

Traces are kept by the package's name without its tag, and by entry point (`entry_name`).

Encoded, a trace is a zstd frame of MessagePack. Nothing in one is trusted: it only says in which
order a host fetches contents of the package that it fetches anyhow.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from statistics import median_low
from typing import NamedTuple

import msgspec
import zstandard

from p2pdist.model.catalog import PACKS_MAX
from p2pdist.model.device import Cells, DeviceChunk, DeviceLayout
from p2pdist.model.digest import is_digest
from p2pdist.model.errors import UNDECODABLE, Corrupt, TooLarge, UsageError
from p2pdist.model.tree import CHUNK_LEAST, HASH_SIZE, PATH_BYTES_MAX, SIZE_MAX, Entry, File

TRACE_TYPE = "application/vnd.p2pdist.trace"
WANTED_HEADER = "P2pdist-Trace-Wanted"
"""With it a tracker asks the host that asks for a trace to record its start."""

TRACE_BYTES_MAX = 640 << 10
"""Bytes of an encoded trace: with all that is around it in JSON less than a tracker takes."""

DECODED_BYTES_MAX = 4 << 20
PATHS_BYTES_MAX = 2 << 20
CONTENTS_MAX = 1 << 13
CHUNKS_MAX = 1 << 15
"""Chunks that a trace names; what a start reads first comes first."""

CHUNK_NUMBER_MAX = SIZE_MAX // CHUNK_LEAST
AT_MS_MAX = 24 * 3600 * 1000
JOINED_MS = 100
"""Chunks of a content that are read one behind the other become one span while so little time is
between them."""

ENTRY_CHARACTERS_MAX = 128
LEVEL = 6

_FORMAT = "p2pdist-trace-1"
_ENTRY = re.compile(r"[A-Za-z0-9._+:@-]*")
_INTERPRETER = re.compile(r"(python|pypy|perl|ruby|node|bash|sh|dash|zsh|env|exec|java)[0-9.]*")


class Span(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Chunks that were read one behind the other: the number of their content in the trace, the
    first chunk, how many, and when the first one was read, in milliseconds since the start."""

    content: int
    first: int
    count: int
    at_ms: int


class Traced(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A content of a trace: its BLAKE3, and the path of a file that had it."""

    content: bytes
    path: bytes


class Place(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """So many bytes, from `offset` on, of the pack with this number in the trace."""

    pack: int
    offset: int
    length: int


class Part(NamedTuple):
    """So many `chunks` of the file at `path`, from the chunk number `first` on."""

    path: bytes
    first: int
    chunks: int


@dataclass(frozen=True, slots=True)
class Trace:
    """Spans in the order in which they were read. What was read later than `lasted_ms` is not
    known."""

    contents: tuple[Traced, ...] = ()
    spans: tuple[Span, ...] = ()
    lasted_ms: int = 0
    packs: tuple[str, ...] = ()
    """Digests of the packs of `places`."""
    places: tuple[Place, ...] = ()
    """Where what was read lay, in the order in which it was."""

    @property
    def chunks(self) -> int:
        """How many chunks it names."""
        return sum(span.count for span in self.spans)

    @property
    def parts(self) -> tuple[Part, ...]:
        """What it names, in order, by the paths of files."""
        named = ((self.contents[span.content].path, span) for span in self.spans)
        return tuple(Part(path, span.first, span.count) for path, span in named if path)


class _Trace(msgspec.Struct, frozen=True, array_like=True):
    format: str
    lasted_ms: int
    contents: list[Traced]
    spans: list[Span]
    packs: list[str] = []
    places: list[Place] = []


_pack = msgspec.msgpack.Encoder().encode
_unpack = msgspec.msgpack.Decoder(_Trace).decode


def entry_name(command: Sequence[str]) -> str:
    """The name of the start that a command line makes: of the program, or of the module or script
    that an interpreter runs; what follows says how it runs, not what it reads. Empty for a view
    that is mounted for no program."""
    name = ""
    for word, before in zip(command, ("", *command), strict=False):
        if word.startswith("-"):
            if word in ("-c", "-e"):
                break  # the program is the next word
            continue
        if name == "env" and "=" in word:
            continue
        name = word.rstrip("/").rpartition("/")[2]
        if before == "-m" or _INTERPRETER.fullmatch(name) is None:
            break
    return re.sub(r"[^A-Za-z0-9._+:@-]", "_", name)[:ENTRY_CHARACTERS_MAX]


def check_entry(name: str) -> str:
    """The name of an entry point; raises UsageError for what is none."""
    if len(name) > ENTRY_CHARACTERS_MAX or _ENTRY.fullmatch(name) is None:
        raise UsageError(f"{name[:200]!r} is no entry point", remedy="p2pdist trace ls prints those that have traces")
    return name


def encode_trace(trace: Trace) -> bytes:
    """Bytes of a trace. Raises TooLarge."""
    named = (list(trace.contents), list(trace.spans), list(trace.packs), list(trace.places))
    plain = _pack(_Trace(_FORMAT, trace.lasted_ms, *named))
    data = zstandard.ZstdCompressor(level=LEVEL, write_content_size=True).compress(plain)
    if len(data) > TRACE_BYTES_MAX or len(plain) > DECODED_BYTES_MAX:
        raise TooLarge(f"a trace of {len(trace.spans)} spans takes {len(data)} bytes, over {TRACE_BYTES_MAX}")
    return data


def decode_trace(data: bytes) -> Trace:
    """Parse and check a trace. Raises Corrupt."""
    try:
        size = zstandard.frame_content_size(data) if len(data) <= TRACE_BYTES_MAX else DECODED_BYTES_MAX + 1
        if not 0 <= size <= DECODED_BYTES_MAX:
            raise Corrupt(f"this is no trace, or one of more than {TRACE_BYTES_MAX} bytes")
        # The one frame itself says how much memory it takes.
        plain = zstandard.ZstdDecompressor().decompress(data, read_across_frames=False, allow_extra_data=False)
        stated = _unpack(plain)
    except (zstandard.ZstdError, *UNDECODABLE) as error:
        raise Corrupt(f"this is no trace: {error}") from error
    if stated.format != _FORMAT:
        raise Corrupt("this is no trace, or one of a later format", remedy="Use a newer release, or record it again")
    named = (tuple(stated.contents), tuple(stated.spans), stated.lasted_ms)
    trace = Trace(*named, tuple(stated.packs), tuple(stated.places))
    _check(trace)
    _check_places(trace)
    return trace


def _check(trace: Trace) -> None:
    contents, spans = trace.contents, trace.spans
    if len(contents) > CONTENTS_MAX or len({traced.content for traced in contents}) != len(contents):
        raise Corrupt(f"a trace names a content twice, or more than {CONTENTS_MAX} contents")
    if any(len(traced.content) != HASH_SIZE or len(traced.path) > PATH_BYTES_MAX for traced in contents):
        raise Corrupt("a trace names an impossible content or path")
    sound = all(
        0 <= span.content < len(contents)
        and 0 < span.count <= CHUNKS_MAX
        and 0 <= span.first <= CHUNK_NUMBER_MAX
        and 0 <= span.at_ms <= trace.lasted_ms
        for span in spans
    )
    ordered = all(before.at_ms <= after.at_ms for before, after in pairwise(spans))
    if not sound or not ordered or not 0 <= trace.lasted_ms <= AT_MS_MAX or trace.chunks > CHUNKS_MAX:
        raise Corrupt("a trace has spans that are impossible, out of order, or too many")


def _check_places(trace: Trace) -> None:
    packs, places = trace.packs, trace.places
    sound = all(
        0 <= place.pack < len(packs) and 0 <= place.offset <= SIZE_MAX and 0 < place.length <= SIZE_MAX
        for place in places
    )
    if len(packs) > PACKS_MAX or len(places) > CHUNKS_MAX or not sound or not all(map(is_digest, packs)):
        raise Corrupt("a trace names places in packs that are impossible, or too many")


@dataclass(slots=True)
class TraceBuilder:
    """Makes a trace of chunks as they are read. Each counts once; what is over a limit is left
    out."""

    _seen: dict[bytes, set[int]] = field(default_factory=dict)
    """Chunks by content; contents are in the order of their first chunks."""
    _numbers: dict[bytes, int] = field(default_factory=dict)
    """The number that each content has in the trace."""
    _spans: list[Span] = field(default_factory=list)
    _last_ms: int = 0
    """When the chunk was read that was added last."""
    chunks: int = 0
    """How many were added."""

    def add(self, content: bytes, number: int, at_ms: int) -> bool:
        """Add the chunk `number` of a content, read `at_ms` after the start and not before the last
        one. Returns whether it is new, and within the limits."""
        seen = self._seen.get(content)
        if self.chunks >= CHUNKS_MAX or not 0 <= at_ms <= AT_MS_MAX or (seen is not None and number in seen):
            return False
        if seen is None:
            if len(self._numbers) >= CONTENTS_MAX:
                return False
            self._numbers[content] = len(self._numbers)
            seen = self._seen[content] = set()
        seen.add(number)
        self.chunks += 1
        at_ms = max(at_ms, self._last_ms)
        last, index = self._spans[-1] if self._spans else None, self._numbers[content]
        behind = last is not None and (last.content, last.first + last.count) == (index, number)
        if last is not None and behind and at_ms - self._last_ms <= JOINED_MS:
            self._spans[-1] = Span(index, last.first, last.count + 1, last.at_ms)
        else:
            self._spans.append(Span(index, number, 1, at_ms))
        self._last_ms = at_ms
        return True

    @property
    def contents(self) -> frozenset[bytes]:
        """The contents of which chunks were read."""
        return frozenset(self._numbers)

    def trace(self, paths: dict[bytes, bytes], lasted_ms: int) -> Trace:
        """The trace so far, shortened from its end until it can be encoded. `paths` has a path of
        each content that has one."""
        contents = tuple(Traced(content, paths.get(content, b"")) for content in self._numbers)
        lasted_ms = min(AT_MS_MAX, max(lasted_ms, self._last_ms))
        return _fitting(Trace(contents, tuple(self._spans), lasted_ms))


def _fitting(trace: Trace) -> Trace:
    """A trace, shortened from its end until it can be encoded."""
    while trace.spans and not _fits(trace):
        trace = _shortened(trace)
    return trace


def _fits(trace: Trace) -> bool:
    if sum(len(traced.path) for traced in trace.contents) > PATHS_BYTES_MAX:
        return False
    try:
        encode_trace(trace)
    except TooLarge:
        return False
    return True


def _shortened(trace: Trace) -> Trace:
    """The first three quarters of the spans; how it went on is not known then."""
    spans = trace.spans[: len(trace.spans) * 3 // 4]
    contents = trace.contents[: 1 + max((span.content for span in spans), default=-1)]
    places = trace.places[: len(trace.places) * 3 // 4]
    return Trace(contents, spans, spans[-1].at_ms if spans else 0, trace.packs, places)


def placed(trace: Trace, places: Iterable[tuple[str, int, int]]) -> Trace:
    """A trace with where in packs lay what was read, in that order: pack, offset and bytes of each
    chunk. Those that lie one behind the other become one place. What is over a limit is left
    out."""
    packs: dict[str, int] = {}
    found: list[Place] = []
    for pack, offset, length in places:
        number = packs.setdefault(pack, len(packs))
        last = found[-1] if found else None
        if number >= PACKS_MAX:
            del packs[pack]
        elif last is not None and (last.pack, last.offset + last.length) == (number, offset):
            found[-1] = Place(number, last.offset, last.length + length)
        elif len(found) < CHUNKS_MAX:
            found.append(Place(number, offset, length))
    return _fitting(replace(trace, packs=tuple(packs), places=tuple(found)))


def read_chunks(layout: DeviceLayout, cells: Cells, read_ms: Mapping[int, int]) -> Iterator[tuple[DeviceChunk, int]]:
    """The chunks that were read of a device, each once with a time, when these cells were, in order
    by their times. A cell may hold the end of one chunk and the beginning of another, and only one
    of them may have been read. So a chunk of several cells counts when a cell that it fills was
    read, or all of its cells were; and where nothing of a cell counts, what begins in it does."""
    counted: set[int] = set()
    for cell, at_ms in read_ms.items():
        chunks = list(layout.cell_chunks(cell))
        mine = [chunk for chunk in chunks if _was_read(cells.holding(chunk.at, chunk.length), read_ms)]
        for chunk in mine or chunks[-1:]:
            if chunk.at not in counted:
                counted.add(chunk.at)
                yield chunk, at_ms


def _was_read(cells: range, read_ms: Mapping[int, int]) -> bool:
    if len(cells) <= 2:
        return all(cell in read_ms for cell in cells)
    return any(cell in read_ms for cell in cells[1:-1])


def merge(recordings: Sequence[Trace]) -> Trace:
    """One trace of several recordings, the newest first: the chunks that at least half of them
    read, of those that lasted so long, by the median time of their first reads."""
    if len(recordings) <= 1:
        # It may have been encoded in fewer bytes than are possible here.
        return _fitting(recordings[0]) if recordings else Trace()
    times: dict[tuple[bytes, int], list[int]] = {}
    paths: dict[bytes, bytes] = {}
    for trace in recordings:
        for span in trace.spans:
            traced = trace.contents[span.content]
            paths.setdefault(traced.content, traced.path)
            for number in range(span.first, span.first + span.count):
                times.setdefault((traced.content, number), []).append(span.at_ms)
    lasted = sorted(trace.lasted_ms for trace in recordings)
    builder = TraceBuilder()
    for chunk in _ordered(times, lasted):
        builder.add(*chunk)
    newest = next((trace for trace in recordings if trace.places), Trace())
    return _fitting(replace(builder.trace(paths, lasted[-1]), packs=newest.packs, places=newest.places))


def _ordered(times: dict[tuple[bytes, int], list[int]], lasted: list[int]) -> list[tuple[bytes, int, int]]:
    """Content, number and time of the chunks that enough recordings read, in order. The order of
    equal times is that of the newest recording that read the chunk, which `times` has."""
    chosen: list[tuple[bytes, int, int]] = []
    for (content, number), read_ms in times.items():
        at_ms = median_low(read_ms) if len(read_ms) > 1 else read_ms[0]
        could = sum(lasted_ms >= at_ms for lasted_ms in lasted)
        if 2 * len(read_ms) >= could:
            chosen.append((content, number, at_ms))
    chosen.sort(key=lambda chunk: chunk[2])
    return chosen


def shortened(trace: Trace, count: int) -> Trace:
    """A trace whose contents are named by the first `count` bytes of their names."""
    return replace(trace, contents=tuple(Traced(traced.content[:count], traced.path) for traced in trace.contents))


def inherit(trace: Trace, trees: Iterable[Iterable[Entry]]) -> Trace:
    """The part of a trace that is about contents of these trees, bottom to top, in its order. A
    content that is gone gives its place to the one that is at its path now."""
    wanted = {traced.path for traced in trace.contents}
    named = {traced.content for traced in trace.contents}
    here: set[bytes] = set()
    at_path: dict[bytes, bytes] = {}
    for entries in trees:
        for entry in entries:
            if type(entry) is not File or not entry.size:
                continue
            if entry.content in named:
                here.add(entry.content)
            if entry.path in wanted:
                at_path[entry.path] = entry.content
    builder = TraceBuilder()
    paths: dict[bytes, bytes] = {}
    for span in trace.spans:
        traced = trace.contents[span.content]
        content = traced.content if traced.content in here else at_path.get(traced.path)
        if content is None:
            continue
        paths.setdefault(content, traced.path)
        for number in range(span.first, span.first + span.count):
            builder.add(content, number, span.at_ms)
    return builder.trace(paths, trace.lasted_ms)
