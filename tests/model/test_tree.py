"""The file lists of trees, and what is refused in them."""

from __future__ import annotations

import os
from contextlib import suppress
from dataclasses import replace
from itertools import pairwise

import msgspec
import pytest
from effort import examples
from formats_rig import encode_pages
from hypothesis import given, settings
from hypothesis import strategies as st

from p2pdist.model.errors import Corrupt
from p2pdist.model.tree import (
    PAGE_ENTRIES_MAX,
    WHOLE_MAX,
    ChunkList,
    Directory,
    Entry,
    File,
    HardLink,
    Root,
    Symlink,
    Whiteout,
    check_entries,
    check_page,
    check_pages,
    content_hash,
    decode_page,
    decode_root,
    decode_tree,
    encode_root,
    walking_order,
)

HASH = bytes(range(32))


def file(path: bytes, *, size: int = 1, mode: int = 0o644, chunks: bytes = b"") -> File:
    return File(path, mode, 5, size, HASH, chunks)


def packed(entries: list[Entry]) -> tuple[Root, dict[bytes, bytes]]:
    pages = {content_hash(page): page for page in encode_pages(entries)}
    files = [entry for entry in entries if isinstance(entry, File)]
    return Root(len(entries), len(files), sum(entry.size for entry in files), tuple(pages)), pages


TREE: list[Entry] = [
    Directory(b"a", 0o755, 1),
    file(b"a/b"),
    Directory(b"a/c", 0o1777, -1, True, ((b"user.x", b"1"),)),
    HardLink(b"a/c/d", b"a/b"),
    Symlink(b"a/loop", 3, b"loop"),
    file(b"a-b", size=0),
    Whiteout(b"gone\xff\n"),
]


def test_a_tree_comes_back_as_it_was():
    root, pages = packed(TREE)
    assert decode_root(encode_root(root)) == root
    assert decode_tree(root, pages) == TREE


def test_what_is_in_a_directory_follows_it_at_once():
    assert sorted([b"a", b"a-b", b"a/b", b"a.b/c", b"a.b"], key=walking_order) == [
        b"a",
        b"a/b",
        b"a-b",
        b"a.b",
        b"a.b/c",
    ]


def test_an_edit_changes_one_page_and_an_insertion_at_most_two():
    many: list[Entry] = [file(b"%06d" % number) for number in range(20_000)]
    before = set(packed(many)[0].pages)
    edited = [*many[:7000], msgspec.structs.replace(many[7000], size=2), *many[7001:]]
    assert len(set(packed(edited)[0].pages) - before) == 1
    inserted = sorted([*many, file(b"007000x")], key=lambda entry: walking_order(entry.path))
    assert len(set(packed(inserted)[0].pages) - before) <= 2
    assert len(before) > 20
    assert all(len(decode_page(page)) <= PAGE_ENTRIES_MAX for page in packed(many)[1].values())


@pytest.mark.parametrize(
    "entries",
    [
        [file(b"../x")],
        [file(b"..")],
        [file(b".")],
        [file(b"")],
        [file(b"/etc/passwd")],
        [Directory(b"a", 0o755, 0), file(b"a/../x")],
        [Directory(b"a", 0o755, 0), file(b"a//x")],
        [Directory(b"a", 0o755, 0), file(b"a/")],
        [file(b"x\0y")],
        [file(b"x" * 256)],
        [file(b"x"), file(b"x")],
        [file(b"y"), file(b"x")],
        [file(b"x"), Directory(b"x", 0o755, 0)],
        [file(b"x"), file(b"x/y")],
        [Symlink(b"x", 0, b"/etc"), file(b"x/passwd")],
        [Whiteout(b"x"), file(b"x/y")],
        [file(b"missing/y")],
        [Symlink(b"x", 0, b"")],
        [Symlink(b"x", 0, b"a\0b")],
        [Symlink(b"x", 0, b"a" * 4096)],
        [Symlink(b"x", 1 << 63, b"a")],
        [HardLink(b"x", b"y"), file(b"y")],
        [Symlink(b"x", 0, b"y"), HardLink(b"y", b"x")],
        [HardLink(b"x", b"/etc/passwd")],
        [file(b"x", size=-1)],
        [file(b"x", size=1 << 60, chunks=HASH)],
        [file(b"x", size=WHOLE_MAX + 1)],
        [file(b"x", chunks=HASH)],
        [file(b"x", mode=0o4755)],
        [file(b"x", mode=-1)],
        [msgspec.structs.replace(file(b"x"), content=b"short")],
        [msgspec.structs.replace(file(b"x"), xattrs=((b"trusted.overlay.redirect", b"/etc"),))],
        [msgspec.structs.replace(file(b"x"), xattrs=((b"security.capability", b"1"),))],
        [msgspec.structs.replace(file(b"x"), xattrs=((b"user.", b""),))],
        [msgspec.structs.replace(file(b"x"), xattrs=((b"user.b", b""), (b"user.a", b"")))],
        [msgspec.structs.replace(file(b"x"), xattrs=((b"user.a", b"x" * 70_000),))],
        [Directory(b"/".join([b"d"] * depth), 0o755, 0) for depth in range(1, 1003)],
    ],
)
def test_entries_that_must_not_be_shown_are_refused(entries):
    with pytest.raises(Corrupt):
        check_entries(entries)


def test_a_path_over_the_limit_is_refused():
    names = [b"n" * 250] * 17
    with pytest.raises(Corrupt, match="longer"):
        check_entries([Directory(b"/".join(names[:depth]), 0o755, 0) for depth in range(1, 18)])


def test_a_root_must_fit_its_pages():
    root, pages = packed(TREE)
    for wrong in (replace(root, files=1), replace(root, bytes_total=9), replace(root, entries=6)):
        with pytest.raises(Corrupt):
            decode_tree(wrong, pages)
    for impossible in (replace(root, entries=1 << 30), replace(root, files=99), replace(root, bytes_total=-1)):
        with pytest.raises(Corrupt):
            decode_root(encode_root(impossible))
    with pytest.raises(Corrupt):
        decode_root(encode_root(root)[:-1])


def test_a_page_has_one_form_only():
    plain = msgspec.msgpack.encode([[1, b"a", 0o755, 1]])  # without the fields that have defaults
    assert isinstance(msgspec.msgpack.decode(plain, type=list[Entry])[0], Directory)
    with pytest.raises(Corrupt, match="canonical"):
        decode_page(plain)
    with pytest.raises(Corrupt):
        decode_page(msgspec.msgpack.encode([]))


@settings(max_examples=examples(300))
@given(st.binary(max_size=200), st.data())
def test_wrong_bytes_are_corrupt_and_nothing_else(noise, drawn):
    _, pages = packed(TREE)
    page = bytearray(next(iter(pages.values())))
    page[drawn.draw(st.integers(0, len(page) - 1))] ^= drawn.draw(st.integers(1, 255))
    for parse, data in (
        (decode_page, bytes(page)),
        (decode_page, noise),
        (decode_root, noise),
        (ChunkList.decode, noise),
    ):
        with suppress(Corrupt):
            found = parse(data)
            if parse is decode_page:
                check_entries(found)


PATHS = [b"a", b"a/b", b"a/b/c", b"a/b/d", b"a/c", b"a-b", b"a-b/c", b"b", b"b/b", b"c", b"c/a", b"d"]
KINDS = st.sampled_from(["file", "directory", "link", "symlink", "whiteout"])


def entry(path: bytes, kind: str, target: bytes, size: int) -> Entry:
    match kind:
        case "file":
            return file(path, size=size)
        case "directory":
            return Directory(path, 0o755, size)
        case "link":
            return HardLink(path, target)
        case "symlink":
            return Symlink(path, size, target)
        case _:
            return Whiteout(path)


ENTRIES = st.builds(entry, st.sampled_from(PATHS), KINDS, st.sampled_from(PATHS), st.integers(0, 3))


@st.composite
def trees(draw: st.DrawFn) -> list[list[Entry]]:
    """Pages of a tree that may be shown, cut at random: what cannot stay becomes something else."""
    made: dict[bytes, Entry] = {}
    for path in sorted(draw(st.sets(st.sampled_from(PATHS), min_size=1)), key=walking_order):
        parent = path.rpartition(b"/")[0]
        if parent and not isinstance(made.get(parent), Directory):
            continue
        files = [other for other, entry in made.items() if isinstance(entry, File)]
        kind = draw(st.sampled_from(["file", "directory", "directory", "link" if files else "whiteout"]))
        made[path] = entry(path, kind, draw(st.sampled_from(files)) if files else b"", draw(st.integers(0, 3)))
    return cut(draw, list(made.values()))


def cut(draw: st.DrawFn, entries: list[Entry]) -> list[list[Entry]]:
    ends = sorted(draw(st.sets(st.integers(1, max(1, len(entries))), max_size=6)) | {0, len(entries)})
    return [page for start, end in pairwise(ends) if (page := entries[start:end])]


@st.composite
def changed(draw: st.DrawFn, pages: list[list[Entry]]) -> list[list[Entry]]:
    """Another tree that has pages in common with one, or no tree at all."""
    pages = list(pages)
    for _ in range(draw(st.integers(1, 3))):
        at = draw(st.integers(0, len(pages) - 1)) if pages else 0
        match draw(st.sampled_from(["edit", "edit", "edit", "drop", "repeat", "swap", "insert"])):
            case "edit" if pages:
                page = {each.path: each for each in pages[at]}
                for each in draw(st.lists(ENTRIES, max_size=2)):
                    page[each.path] = each
                for path in draw(st.sets(st.sampled_from(PATHS), max_size=2)):
                    page.pop(path, None)
                pages[at : at + 1] = cut(draw, sorted(page.values(), key=lambda each: walking_order(each.path)))
            case "drop" if pages:
                del pages[at]
            case "repeat" if pages:
                pages.insert(draw(st.integers(0, len(pages))), pages[at])
            case "swap" if pages:
                other = draw(st.integers(0, len(pages) - 1))
                pages[at], pages[other] = pages[other], pages[at]
            case "insert":
                pages.insert(at, draw(st.lists(ENTRIES, min_size=1, max_size=2)))
    return pages


def may_be_shown(entries: list[Entry]) -> bool:
    """The rules on what entries are to each other, one by one."""
    paths = [entry.path for entry in entries]
    keys = [walking_order(path) for path in paths]
    kinds = {entry.path: type(entry) for entry in entries}
    return (
        sorted(set(keys)) == keys
        and all(kinds.get(path.rpartition(b"/")[0], Directory) is Directory for path in paths if b"/" in path)
        and all(path.rpartition(b"/")[0] in kinds for path in paths if b"/" in path)
        and all(
            kinds.get(entry.target) is File and paths.index(entry.target) < paths.index(entry.path)
            for entry in entries
            if isinstance(entry, HardLink)
        )
    )


@settings(max_examples=examples(600))
@given(trees(), st.data())
def test_what_a_tree_has_in_common_with_one_that_passed_need_not_be_checked_again(before, drawn):
    """The verdict is that on the whole tree, also where directories become files, links lose their
    targets, pages come twice."""
    known = {id(page): check_page(page) for page in before}
    after = drawn.draw(changed(before))

    def accepted(before: tuple) -> bool:
        try:
            pages = [known.get(id(page)) or check_page(page) for page in after]
            files = sum(page.files for page in pages)
            root = Root(sum(map(len, after)), files, sum(page.bytes_total for page in pages), ())
            check_pages(root, pages, before)
        except Corrupt:
            return False
        return True

    assert may_be_shown([entry for page in before for entry in page])
    expected = may_be_shown([entry for page in after for entry in page])
    assert accepted(tuple(known.values())) == expected
    assert accepted(()) == expected


def test_chunk_lists():
    chunks = ChunkList(((HASH, 1), (os.urandom(32), WHOLE_MAX)))
    assert ChunkList.decode(chunks.encode()) == chunks
    assert ChunkList.size_of(chunks.encode()) == WHOLE_MAX + 1
    many = ChunkList(((HASH, 1),) * 100)
    for wrong in (ChunkList(((HASH, 0),)), ChunkList(((HASH, WHOLE_MAX + 1),)), many):
        with pytest.raises(Corrupt):
            ChunkList.decode(wrong.encode())


def test_a_page_is_named_once() -> None:
    """Or a few bytes would stand for any number of entries."""
    root, _ = packed(TREE)
    with pytest.raises(Corrupt, match="twice"):
        decode_root(encode_root(Root(2 * root.entries, 2 * root.files, 0, root.pages * 2)))
