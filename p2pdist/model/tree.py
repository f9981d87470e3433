"""Trees: the file list of a `tree` layer.

A tree is a list of entries in walking order: by path, compared component by component as bytes, so
that what is in a directory follows it at once. The directory itself has no entry: it is shown with
mode 0755. Regular files name their content by its BLAKE3; owners are left out. Equal trees have
equal bytes, wherever and whenever they were packed.

The list is cut into pages, so that an edit changes one of them: a page ends behind an entry whose
path hashes to a certain value, one in PAGE_ENTRIES, and at PAGE_ENTRIES_MAX; one of more than
PAGE_BYTES_MAX is halved. A page is the MessagePack of its entries, each an array that begins with
its kind. The root, which is the layer's blob, is the MessagePack of counts and the BLAKE3 of every
page. Catalogs (catalog.py) say where pages and contents lie, not the root: it depends on what was
packed before. Versions of a tree share the pages that they have in common, also in memory
(Entries).

The content of a file of more than WHOLE_MAX bytes is a list of chunks (ChunkList); that of a
smaller one is one chunk.

Holes: a tree does not state where the holes of a file were, since equal contents are equal however
they were stored. So every whole block of zeros becomes a hole when a content is written to a file
(`data_ranges`).

Variants: a variant is a file with the content of an object and another mode or time than the object
has, kept with one tree. Its name is <64 hex: BLAKE3 of the content>.<mode in octal>.<modification
time in nanoseconds>: by its name a variant is verified, and files of a tree that look the same
share one.
"""

from __future__ import annotations

import re
import struct
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain
from typing import overload

import msgspec
from blake3 import blake3

from p2pdist.model.errors import UNDECODABLE, Corrupt

PAGE_ENTRIES = 512
PAGE_ENTRIES_MAX = 2048
PAGE_BYTES_MAX = 32 << 20
PAGES_MAX = 1 << 18
ENTRIES_MAX = 1 << 24
ENTRY_BYTES = 300
"""Memory that an entry takes in an agent besides its encoded bytes: values, and its slots in lists
and in the contents of its page."""
PAGE_BYTES = 1500
"""Memory that a page takes besides its entries."""
TREE_BYTES_MAX = 640 << 20
"""Of memory for one tree, estimated."""
PATH_BYTES_MAX = 4095
"""limits.h, PATH_MAX without the final zero."""

NAME_BYTES_MAX = 255
DEPTH_MAX = 1000
TARGET_BYTES_MAX = 4095
XATTR_BYTES_MAX = 64 << 10
SIZE_MAX = 1 << 46
"""A file of 64 TiB is refused."""

WHOLE_MAX = 4 << 20
"""Bytes of the largest file that is one chunk."""

CHUNK_MAX = WHOLE_MAX
CHUNK_LEAST = 4096
"""Chunks of a chunk list have at least so many bytes in the mean; they are cut much longer."""

HASH_SIZE = 32
MODE_MASK = 0o1777
"""Permission bits and the sticky bit; setuid and setgid are not carried."""

_TIME_LEAST, _TIME_MOST = -(1 << 63), (1 << 63) - 1
_FORMAT = "p2pdist-tree-1"
_RECORD = struct.Struct("<32sI")

Xattrs = tuple[tuple[bytes, bytes], ...]


class File(msgspec.Struct, frozen=True, array_like=True, tag_field="kind", tag=0, gc=False):
    """A regular file: mode bits, modification time in nanoseconds since 1970, size in bytes, the
    BLAKE3 of its content. `chunks` is the BLAKE3 of its chunk list, empty up to WHOLE_MAX bytes.
    Extended attributes are sorted by name."""

    path: bytes
    mode: int
    mtime_ns: int
    size: int
    content: bytes
    chunks: bytes = b""
    xattrs: Xattrs = ()


class Directory(msgspec.Struct, frozen=True, array_like=True, tag_field="kind", tag=1, gc=False):
    """A directory. `opaque`: it hides what lower layers have in it."""

    path: bytes
    mode: int
    mtime_ns: int
    opaque: bool = False
    xattrs: Xattrs = ()


class Symlink(msgspec.Struct, frozen=True, array_like=True, tag_field="kind", tag=2, gc=False):
    """A symbolic link; the target is kept as it is, absolute, dangling and looping ones too."""

    path: bytes
    mtime_ns: int
    target: bytes


class HardLink(msgspec.Struct, frozen=True, array_like=True, tag_field="kind", tag=3, gc=False):
    """Another name of the file at `target`, which is the first of its names in walking order."""

    path: bytes
    target: bytes


class Whiteout(msgspec.Struct, frozen=True, array_like=True, tag_field="kind", tag=4, gc=False):
    """Hides what lower layers have at this path (a character device 0/0 where an overlay wrote
    it)."""

    path: bytes


Entry = File | Directory | Symlink | HardLink | Whiteout


@dataclass(frozen=True, slots=True)
class Root:
    """The layer's blob: how many entries, regular files (hard links not counted) and bytes in them
    there are, and the BLAKE3 of each page."""

    entries: int
    files: int
    bytes_total: int
    pages: tuple[bytes, ...]


class _Root(msgspec.Struct, frozen=True, array_like=True):
    format: str
    entries: int
    files: int
    bytes_total: int
    pages: bytes


_pack = msgspec.msgpack.Encoder().encode
_unpack_page = msgspec.msgpack.Decoder(list[Entry]).decode
_unpack_root = msgspec.msgpack.Decoder(_Root).decode


def content_hash(data: bytes | bytearray | memoryview) -> bytes:
    """The BLAKE3 that names a content, a chunk, a page or a chunk list."""
    return blake3(data).digest()


def walking_order(path: bytes) -> bytes:
    """The key by which entries are sorted: no byte of a name is smaller than the one that replaces
    the slash."""
    return path.replace(b"/", b"\0")


def ends_page(path: bytes) -> bool:
    """Whether a page ends behind the entry with this path."""
    return int.from_bytes(blake3(path).digest(4), "little") % PAGE_ENTRIES == 0


def encode_root(root: Root) -> bytes:
    """Canonical bytes of a root."""
    return _pack(_Root(_FORMAT, root.entries, root.files, root.bytes_total, b"".join(root.pages)))


def decode_root(data: bytes) -> Root:
    """Parse a root; raises Corrupt."""
    try:
        plain = _unpack_root(data)
    except UNDECODABLE as error:
        raise Corrupt(f"this is no tree: {error}") from error
    counts = (plain.entries, plain.files, plain.bytes_total)
    if plain.format != _FORMAT or len(plain.pages) % HASH_SIZE or min(counts) < 0:
        raise Corrupt("this is no tree, or one of a later format", remedy="Use a newer release, or pack it again")
    count = len(plain.pages) // HASH_SIZE
    if count > PAGES_MAX:
        raise Corrupt(f"a tree of {count} pages is over the limit of {PAGES_MAX}")
    if not plain.files <= plain.entries <= ENTRIES_MAX or not (count <= plain.entries <= count * PAGE_ENTRIES_MAX):
        raise Corrupt(f"a tree of {plain.entries} entries in {count} pages is impossible")
    pages = tuple(plain.pages[at : at + HASH_SIZE] for at in range(0, len(plain.pages), HASH_SIZE))
    if len(set(pages)) != count:
        raise Corrupt("a tree names a page twice")
    return Root(*counts, pages)


def check_memory(size: int) -> None:
    """Raises Corrupt where a tree that is estimated to take `size` bytes of memory in an agent is
    over the limit."""
    if size > TREE_BYTES_MAX:
        raise Corrupt(
            f"a tree would take {size} bytes of memory, over the limit of {TREE_BYTES_MAX}",
            remedy="Pack fewer files, or split them over several packages",
        )


def decode_page(data: bytes) -> list[Entry]:
    """Parse one page; raises Corrupt unless it is in canonical form. `check_page` and `check_pages`
    check what entries say of each other."""
    if len(data) > PAGE_BYTES_MAX:
        raise Corrupt(f"a page of {len(data)} bytes is over the limit of {PAGE_BYTES_MAX}")
    try:
        entries = _unpack_page(data)
    except UNDECODABLE as error:
        raise Corrupt(f"a page of a tree is broken: {error}") from error
    if not 1 <= len(entries) <= PAGE_ENTRIES_MAX or _pack(entries) != data:
        raise Corrupt("a page of a tree is not in its canonical form")
    return entries


def decode_tree(root: Root, pages: Mapping[bytes, bytes]) -> list[Entry]:
    """The entries of a tree in walking order, checked. `pages` are verified pages by BLAKE3. Raises
    Corrupt; KeyError for a page that is not among them."""
    found = [check_page(decode_page(pages[name])) for name in root.pages]
    check_pages(root, found)
    return [entry for page in found for entry in page.entries]


def check_entries(entries: Sequence[Entry]) -> None:
    """Raises Corrupt unless the entries may be shown below a directory: paths in walking order,
    without `..` or other tricks, each in a directory of the tree; hard links to files before them;
    nothing over its limit."""
    if entries:
        _check_joined([check_page(entries)], ())


@dataclass(frozen=True, slots=True, eq=False)
class Page:
    """Entries, at least one, that are right in themselves, and what they require of other pages of
    a tree: keys (walking_order) below `first` in the pages before and above `last` in the pages
    after, the directories `parents`, and the files that `links` lead to.

    `files` regular files have `bytes_total` bytes. Pages are compared by identity: an equal page is
    no reason to trust another one.
    """

    entries: Sequence[Entry]
    first: bytes
    last: bytes
    parents: frozenset[bytes]
    links: tuple[HardLink, ...]
    files: int
    bytes_total: int


def check_page(entries: Sequence[Entry]) -> Page:
    """The page with these entries. Raises Corrupt when no tree could have it."""
    directories = {b""}
    files: set[bytes] = set()
    parents: set[bytes] = set()
    links: list[HardLink] = []
    before = b""
    size = 0
    for entry in entries:
        path = entry.path
        parent, _, name = path.rpartition(b"/")
        if parent not in directories:
            parents.add(parent)
        if not name or len(name) > NAME_BYTES_MAX or name in (b".", b"..") or b"\0" in name or path[0] == 47:
            raise _wrong(path, "is no name of a file")
        key = path.replace(b"/", b"\0")  # walking_order
        if key <= before:
            raise _wrong(path, "comes twice or out of order")
        before = key
        kind = type(entry)
        if kind is File:
            if not _is_common(entry):  # type: ignore[arg-type]
                _check_file(entry)  # type: ignore[arg-type]
            files.add(path)
            size += entry.size  # type: ignore[union-attr]
        elif kind is Directory:
            if path.count(b"/") >= DEPTH_MAX:
                raise _wrong(path, f"is nested deeper than {DEPTH_MAX} directories")
            _check_attributes(path, entry.mode, entry.mtime_ns, entry.xattrs)  # type: ignore[union-attr]
            directories.add(path)
        elif kind is Symlink:
            target = entry.target  # type: ignore[union-attr]
            if not target or len(target) > TARGET_BYTES_MAX or b"\0" in target:
                raise _wrong(path, "is a symbolic link with an impossible target")
            _check_attributes(path, 0, entry.mtime_ns, ())  # type: ignore[union-attr]
        elif kind is HardLink and entry.target not in files:  # type: ignore[union-attr]
            links.append(entry)  # type: ignore[arg-type]
        if len(path) > PATH_BYTES_MAX:
            raise _wrong(path, f"is longer than {PATH_BYTES_MAX} bytes")
    first = walking_order(entries[0].path)
    return Page(entries, first, before, frozenset(parents), tuple(links), len(files), size)


def check_pages(root: Root, pages: Sequence[Page], before: Sequence[Page] = ()) -> None:
    """Raises Corrupt unless the pages make the tree of this root. `before` are the pages of a tree
    that has passed: what pages of both require of each other is not checked again, so that the work
    grows with the pages that differ."""
    _check_joined(pages, before)
    counts = (sum(len(page.entries) for page in pages), sum(page.files for page in pages))
    if (*counts, sum(page.bytes_total for page in pages)) != (root.entries, root.files, root.bytes_total):
        raise Corrupt("a tree has other entries than its root states")


def _check_joined(pages: Sequence[Page], before: Sequence[Page]) -> None:
    """Check what pages require of each other. In walking order a directory precedes its entries. A
    page of `before` required nothing that was missing; so it can miss only entries of pages that
    are gone."""
    last = b""
    for page in pages:
        if page.first <= last:
            raise _wrong(page.entries[0].path, "comes twice or out of order")
        last = page.last
    common = set(before).intersection(pages)
    gone = {entry.path for page in before if page not in common for entry in page.entries}
    firsts = [page.first for page in pages]
    for page in pages:
        passed = page in common
        for path in page.parents & gone if passed else page.parents:
            if type(_find(path, pages, firsts)) is not Directory:
                raise _wrong(path, "is not a directory of the tree, but has entries")
        for link in page.links:
            if passed and link.target not in gone:
                continue
            target = _find(link.target, pages, firsts)
            if type(target) is not File or walking_order(link.target) > walking_order(link.path):
                raise _wrong(link.path, "is a hard link to no file before it")


def _find(path: bytes, pages: Sequence[Page], firsts: Sequence[bytes]) -> Entry | None:
    """The entry with a path in pages that are in order; `firsts` are their first keys."""
    key = walking_order(path)
    number = bisect_right(firsts, key) - 1
    if number < 0:
        return None
    entries = pages[number].entries
    index = bisect_left(entries, key, key=lambda entry: walking_order(entry.path))
    return entries[index] if index < len(entries) and entries[index].path == path else None


def _is_common(entry: File) -> bool:
    """Whether `_check_file` has nothing against a file, as far as that is seen at once; most are
    such files, and a tree has many."""
    return (
        0 <= entry.size <= WHOLE_MAX
        and len(entry.content) == HASH_SIZE
        and not (entry.mode & ~MODE_MASK or entry.chunks or entry.xattrs)
        and _TIME_LEAST <= entry.mtime_ns <= _TIME_MOST
    )


def _check_file(entry: File) -> None:
    if len(entry.content) != HASH_SIZE or not 0 <= entry.size <= SIZE_MAX:
        raise _wrong(entry.path, "has an impossible size or content")
    if len(entry.chunks) != (HASH_SIZE if entry.size > WHOLE_MAX else 0):
        raise _wrong(entry.path, "has no chunk list, or one that it must not have")
    _check_attributes(entry.path, entry.mode, entry.mtime_ns, entry.xattrs)


def _check_attributes(path: bytes, mode: int, mtime_ns: int, xattrs: Xattrs) -> None:
    if mode & ~MODE_MASK or not _TIME_LEAST <= mtime_ns <= _TIME_MOST:
        raise _wrong(path, "has an impossible mode or time")
    if xattrs:
        names = [name for name, _ in xattrs]
        if names != sorted(set(names)) or sum(len(name) + len(value) for name, value in xattrs) > XATTR_BYTES_MAX:
            raise _wrong(path, "has too many extended attributes, or not in order")
        for name in names:
            if not name.startswith(b"user.") or name == b"user." or b"\0" in name or len(name) > NAME_BYTES_MAX:
                raise _wrong(path, "has an extended attribute that a package may not carry")


def _wrong(path: bytes, what: str) -> Corrupt:
    shown = path[:200].decode("utf-8", "backslashreplace")
    return Corrupt(f"a tree is broken: {shown!r} {what}", remedy="Pack it again; nothing of it was shown")


@dataclass(frozen=True, slots=True)
class ChunkList:
    """The chunks of a content, in order: the BLAKE3 and the length in bytes of each. Encoded as 36
    bytes each, the length little-endian."""

    chunks: tuple[tuple[bytes, int], ...]

    def encode(self) -> bytes:
        return b"".join(_RECORD.pack(name, length) for name, length in self.chunks)

    @staticmethod
    def size_of(data: bytes) -> int:
        """The size that an encoded list states, in no more memory than it takes itself. Raises
        Corrupt unless it can be decoded."""
        if len(data) % _RECORD.size:
            raise Corrupt("a chunk list is cut short")
        size: int = sum(length for _, length in _RECORD.iter_unpack(data))
        if len(data) // _RECORD.size > 1 + size // CHUNK_LEAST:
            raise Corrupt("a chunk list has more chunks than its content can be cut into")
        if any(not 0 < length <= CHUNK_MAX for _, length in _RECORD.iter_unpack(data)):
            raise Corrupt("a chunk list holds a chunk of an impossible length")
        return size

    @classmethod
    def decode(cls, data: bytes) -> ChunkList:
        """Raises Corrupt."""
        cls.size_of(data)
        return cls(tuple(_RECORD.iter_unpack(data)))


class Entries(Sequence[Entry]):
    """The entries of all `pages`, in order, without a copy. Equal to any sequence of equal entries.
    Several readers of a tree share one while any of them uses it."""

    __hash__ = None  # type: ignore[assignment]  # it is compared by what is in it
    __slots__ = ("__weakref__", "_ends", "pages")

    def __init__(self, pages: Iterable[Sequence[Entry]]) -> None:
        self.pages = tuple(pages)
        self._ends = tuple(accumulate(map(len, self.pages)))

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    def __iter__(self) -> Iterator[Entry]:
        return chain.from_iterable(self.pages)

    @overload
    def __getitem__(self, index: int) -> Entry: ...

    @overload
    def __getitem__(self, index: slice) -> Sequence[Entry]: ...

    def __getitem__(self, index: int | slice) -> Entry | Sequence[Entry]:
        if isinstance(index, slice):
            return list(self)[index]
        position = range(len(self))[index]
        page = bisect_right(self._ends, position)
        return self.pages[page][position - self._ends[page]]

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Sequence):
            return NotImplemented
        return len(self) == len(other) and all(one == another for one, another in zip(self, other, strict=True))


HOLE_BYTES = 4096
"""Bytes of zeros, at a multiple of it, that become a hole."""

_ZEROS = bytes(HOLE_BYTES)


def data_ranges(offset: int, data: bytes | memoryview) -> Iterator[tuple[int, int]]:
    """Ranges (begin, end) of `data`, which belongs at `offset` of a new file, that must be written.
    Zeros at both ends, in blocks that adjacent data shares, are not written either: else a hole of
    many chunks would have a block at every seam."""
    view = memoryview(data)
    first = min(-offset % HOLE_BYTES, len(view))
    last = max(first, len(view) - (offset + len(view)) % HOLE_BYTES)
    begin = 0 if any(view[:first]) else first
    end = len(view) if any(view[last:]) else last
    for hole in _holes(offset, data):
        if begin < hole:
            yield begin, hole
        begin = hole + HOLE_BYTES
    if begin < end:
        yield begin, end


def has_hole(offset: int, data: bytes | memoryview) -> bool:
    """Whether a whole block of the file is zeros."""
    return next(_holes(offset, data), None) is not None


def _holes(offset: int, data: bytes | memoryview) -> Iterator[int]:
    """Where in `data` whole blocks of the file are zeros. The first byte of a block mostly rules it
    out."""
    start = -offset % HOLE_BYTES
    for number, byte in enumerate(data[start::HOLE_BYTES]):
        at = start + number * HOLE_BYTES
        if byte == 0 and bytes(data[at : at + HOLE_BYTES]) == _ZEROS:
            yield at


VARIANT_BLOCK_BYTES = 4096
"""Variants are counted in blocks of so many bytes."""

_VARIANT_NAME = re.compile(r"([0-9a-f]{64})\.[0-7]{3,4}\.-?[0-9]{1,20}")


def variant_name(content: bytes, mode: int, mtime_ns: int) -> str:
    """The name of the variant of a content with this mode and modification time in nanoseconds."""
    return f"{content.hex()}.{mode:03o}.{mtime_ns}"


def variant_content(name: str) -> bytes | None:
    """The BLAKE3 of the content that a variant must have; None for a name that is no variant's."""
    match = _VARIANT_NAME.fullmatch(name)
    return bytes.fromhex(match[1]) if match else None


def variant_bytes(size: int) -> int:
    """The bytes that a variant of `size` bytes counts: whole blocks, since a small content may have
    many variants."""
    return -(-size // VARIANT_BLOCK_BYTES) * VARIANT_BLOCK_BYTES
