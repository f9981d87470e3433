"""Images made from those of earlier versions: always the bytes that the slow way, write_image,
makes. None of this needs root."""

from __future__ import annotations

import random
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import pytest
from blake3 import blake3
from effort import examples
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from shown_trees import Store, random_tree

from p2pdist.model.tree import Directory, Entries, Entry, File, HardLink, Symlink, Whiteout, content_hash
from p2pdist.mount.erofs.format import DIRENT_SIZE, INODE, PART_SIZE, REST_AT, ROOT_AT, SLOT
from p2pdist.mount.erofs.patch import CHANGED_DIVISOR, changed_entries, draw, patch_image
from p2pdist.mount.erofs.writer import write_image

TIB = 1 << 40


def file(path: bytes, data: bytes = b"data", mode: int = 0o644, mtime_ns: int = 5, **more: object) -> File:
    return File(path, mode, mtime_ns, len(data), content_hash(data), **more)  # type: ignore[arg-type]


def image_of(entries: list[Entry], path: Path) -> bytes:
    write_image(entries, path)
    return path.read_bytes()


def patched(tmp_path: Path, old: list[Entry], new: list[Entry]) -> bytes | None:
    """What patching makes of the image of `old`, None where it refuses. Whatever it says, no other
    file may be left."""
    write_image(old, tmp_path / "old")
    (tmp_path / "new").unlink(missing_ok=True)
    changed = changed_entries(old, new, most=len(new))
    if changed is None or not patch_image(tmp_path / "old", tmp_path / "new", changed):
        assert {path.name for path in tmp_path.glob("new*")} == set()
        return None
    assert {path.name for path in tmp_path.glob("new*")} == {"new"}
    return (tmp_path / "new").read_bytes()


def seal(data: bytearray) -> None:
    """Give an image the identity that agrees with what is in it."""
    ends = [*range(1 << 20, len(data), 1 << 20), len(data)]
    parts = b"".join(blake3(data[begin:end]).digest() for begin, end in pairwise([REST_AT, *ends]))
    data[1024 + 48 : 1024 + 64] = blake3(parts + data[ROOT_AT : ROOT_AT + INODE.size]).digest(16)


def edited(entry: Entry, choose: random.Random) -> Entry:
    """The entry after an edit that changes the length of nothing."""
    mode, mtime_ns = choose.choice([0o644, 0o755, 0, 0o1777]), choose.randrange(-(10**18), 4 * 10**18)
    match entry:
        case File():
            size = choose.randrange(1, 1 << 40) if entry.size else 0
            content = choose.randbytes(32) if size else entry.content
            return File(entry.path, mode, mtime_ns, size, content, bytes(32), _values(entry.xattrs, choose))
        case Directory():
            return Directory(entry.path, mode, mtime_ns, entry.opaque, _values(entry.xattrs, choose))
        case Symlink():
            return Symlink(entry.path, mtime_ns, choose.randbytes(len(entry.target)).replace(b"\0", b"x"))
    return entry


def _values(xattrs: tuple[tuple[bytes, bytes], ...], choose: random.Random) -> tuple[tuple[bytes, bytes], ...]:
    return tuple((name, choose.randbytes(len(value))) for name, value in xattrs)


def torn(entry: Entry, choose: random.Random) -> Entry:
    """The entry after an edit of any kind, with the same path."""
    match choose.randrange(6), entry:
        case 0, File():
            return file(entry.path, b"" if entry.size else b"full", xattrs=entry.xattrs)
        case 1, File():
            return file(entry.path, b"x", xattrs=((b"user.other", choose.randbytes(choose.randrange(130))),))
        case 2, Directory():
            return Directory(entry.path, 0o755, 1, not entry.opaque, entry.xattrs)
        case 3, Symlink():
            return Symlink(entry.path, 1, entry.target + b"longer")
        case 4, File() | Symlink():
            return Whiteout(entry.path)
    return edited(entry, choose)


@settings(max_examples=examples(60), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(seed=st.integers(0, 1 << 30), count=st.integers(1, 250), share=st.floats(0, 1))
def test_edits_that_move_nothing_are_patched(tmp_path: Path, seed: int, count: int, share: float) -> None:
    """Trees of every kind of entry; any of them edited. The image is that of the new tree, and the
    whole image was not written."""
    choose = random.Random(seed)
    old = random_tree(seed, Store(tmp_path / "store"), count=count)
    new = [edited(entry, choose) if choose.random() < share else entry for entry in old]
    assert patched(tmp_path, old, new) == image_of(new, tmp_path / "whole")


@settings(max_examples=examples(60), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(seed=st.integers(0, 1 << 30), count=st.integers(1, 60))
def test_any_edit_is_patched_rightly_or_not_at_all(tmp_path: Path, seed: int, count: int) -> None:
    """Also what changes lengths, kinds or what shows through."""
    choose = random.Random(seed)
    old = random_tree(seed, Store(tmp_path / "store"), count=count)
    targets = {entry.target for entry in old if isinstance(entry, HardLink)}
    new = [torn(entry, choose) if choose.random() < 0.1 and entry.path not in targets else entry for entry in old]
    found = patched(tmp_path, old, new)
    assert found is None or found == image_of(new, tmp_path / "whole")


@pytest.mark.parametrize("count", [1, 100, 300, 5000])
def test_every_name_of_a_directory_of_any_size_is_found(tmp_path: Path, count: int) -> None:
    """In one block or several, below the root and in another directory, whatever sorts before the
    dots."""
    choose = random.Random(count)
    names = sorted(
        {bytes(choose.choice(b"!#-.abc\xff") for _ in range(n % 250 + 1)) for n in range(count)} - {b".", b".."}
    )
    old: list[Entry] = [Directory(b"\x01", 0o755, 0), *(file(b"\x01/" + name) for name in names)]
    old += [file(name) for name in names]
    new = [edited(entry, choose) for entry in old]
    assert patched(tmp_path, old, new) == image_of(new, tmp_path / "whole")


def test_a_thousand_directories_below_each_other(tmp_path: Path) -> None:
    old: list[Entry] = [Directory(b"/".join([b"d"] * depth), 0o755, depth) for depth in range(1, 1001)]
    old.append(file(old[-1].path + b"/end"))
    new = [*old[:-1], file(old[-1].path, b"other")]
    assert patched(tmp_path, old, new) == image_of(new, tmp_path / "whole")


def test_an_image_of_several_parts(tmp_path: Path) -> None:
    """Images are copied in parts; attributes may lie on both sides of the border between two."""
    part = PART_SIZE
    value = bytes(60_000)
    old: list[Entry] = [
        file(b"%03d" % number, xattrs=((b"user.v", value),)) for number in range(3 * part // len(value))
    ]
    new = [file(entry.path, b"!", xattrs=((b"user.v", b"\1" * len(value)),)) for entry in old]
    assert (size := len(image_of(new, tmp_path / "whole"))) > 2 * part
    assert size % part
    assert patched(tmp_path, old, new) == (tmp_path / "whole").read_bytes()
    for place in (0, len(old) // 2, len(old) - 1):
        one = [*old[:place], new[place], *old[place + 1 :]]
        assert patched(tmp_path, old, one) == image_of(one, tmp_path / "whole")


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (file(b"a", b""), file(b"a", b"full")),
        (file(b"a", b"full"), file(b"a", b"")),
        (file(b"a"), file(b"a", xattrs=((b"user.a", b""),))),
        (File(b"a", 0o644, 1, 8 * TIB, bytes(32), bytes(32)), File(b"a", 0o644, 1, 9 * TIB, bytes(32), bytes(32))),
        (Directory(b"a", 0o755, 1), Directory(b"a", 0o755, 1, True)),
        (Directory(b"a", 0o755, 1, True), Directory(b"a", 0o755, 1)),
        (Directory(b"a", 0o755, 1), Directory(b"a", 0o755, 1, False, ((b"user.a", b""),))),
        (Symlink(b"a", 1, b"t"), Symlink(b"a", 1, b"tt")),
        (Symlink(b"a", 1, b"t"), file(b"a", b"t")),
        (Whiteout(b"a"), Directory(b"a", 0o755, 1)),
        (file(b"a"), file(b"b")),
    ],
)
def test_what_moves_other_things_is_left_to_the_whole_image(tmp_path: Path, before: Entry, after: Entry) -> None:
    """Lengths, kinds and names."""
    old: list[Entry] = [before, file(b"z")]
    new: list[Entry] = [after, file(b"z")]
    assert patched(tmp_path, old, new) is None
    draw(tmp_path / "new", new, (tmp_path / "old", old))
    assert (tmp_path / "new").read_bytes() == image_of(new, tmp_path / "whole")


def test_marks_of_a_directory_stay(tmp_path: Path) -> None:
    """One that is opaque, one that holds whiteouts, one that holds them and is no longer told from
    an opaque one by its length."""
    old: list[Entry] = [
        Directory(b"o", 0o755, 1, True),
        Whiteout(b"o/gone"),
        Directory(b"w", 0o755, 1, False, ((b"user.a", b"1"),)),
        Whiteout(b"w/gone"),
    ]
    new: list[Entry] = [
        Directory(b"o", 0o700, 2, True),
        old[1],
        Directory(b"w", 0o700, 2, False, ((b"user.a", b"2"),)),
        old[3],
    ]
    assert patched(tmp_path, old, new) == image_of(new, tmp_path / "whole")
    for place in (0, 2):
        other = old[place]
        assert isinstance(other, Directory)
        changed = [*old]
        changed[place] = Directory(other.path, 0o700, 2, not other.opaque, other.xattrs)
        assert patched(tmp_path, old, changed) is None


def test_a_changed_hard_link_or_an_entry_more_is_no_small_change() -> None:
    old: list[Entry] = [file(b"a"), file(b"b"), HardLink(b"c", b"a")]
    assert changed_entries(old, [*old[:2], HardLink(b"c", b"b")], most=9) is None
    assert changed_entries(old, old[:2], most=9) is None
    assert changed_entries(old, [*old, file(b"d")], most=9) is None
    assert changed_entries(old, tuple(old), most=9) == []


def test_of_all_entries_the_changed_ones_are_found() -> None:
    """In any run of entries that are compared at once; too many of them are none."""
    old: list[Entry] = [file(b"%04d" % number) for number in range(2000)]
    new: list[Entry] = [file(b"%04d" % number, mtime_ns=6 if number % 331 == 0 else 5) for number in range(2000)]
    changed = changed_entries(old, new, most=7)
    assert changed == [entry for number, entry in enumerate(new) if number % 331 == 0]
    assert len(changed) == 7
    assert changed_entries(old, new, most=6) is None


@pytest.mark.slow
@pytest.mark.parametrize("make", [random_tree, None], ids=["all kinds", "whole blocks"])
def test_no_byte_of_a_damaged_image_is_taken_over(tmp_path: Path, make: Callable[..., list[Entry]] | None) -> None:
    """Whichever byte is wrong: not even where nothing is patched, and in directories and inodes
    that lead astray."""
    names: list[Entry] = [file(b"%04d" % number * 30) for number in range(100)]
    old = make(3, Store(tmp_path / "store"), count=40) if make else names
    data = image_of(old, tmp_path / "old")
    changed = [edited(entry, random.Random(1)) for entry in old if isinstance(entry, File | Directory | Symlink)]
    choose = random.Random(5)
    places = [*range(1024, 1400), *choose.sample(range(len(data)), 600)]
    for place in places:
        wrong = bytearray(data)
        wrong[place] ^= 1 << choose.randrange(8)
        (tmp_path / "old").write_bytes(wrong)
        assert not patch_image(tmp_path / "old", tmp_path / "new", changed), place
    for cut in (b"", data[:1000], data[:1200], data[:-1], data[:-4096], data + bytes(4096), bytes(len(data))):
        (tmp_path / "old").write_bytes(cut)
        assert not patch_image(tmp_path / "old", tmp_path / "new", changed)
    (tmp_path / "old").unlink()
    assert not patch_image(tmp_path / "old", tmp_path / "new", changed)
    assert not list(tmp_path.glob("new*"))


@settings(max_examples=examples(200), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(seed=st.integers(0, 1 << 30))
def test_an_image_that_lies_does_no_harm(tmp_path: Path, seed: int) -> None:
    """An image with wrong numbers and an identity that agrees with them: at worst another image
    comes out, of the same length."""
    choose = random.Random(seed)
    names: list[Entry] = [file(b"%04d" % number * 30) for number in range(60)]
    old: list[Entry] = [Directory(b"/d", 0o755, 1), Symlink(b"l", 1, b"t" * 4090), *names]
    old[0] = Directory(b"#", 0o755, 1)
    old.insert(1, file(b"#/f"))
    data = bytearray(image_of(old, tmp_path / "old"))
    for _ in range(choose.randrange(1, 20)):
        place = choose.randrange(REST_AT, len(data) - 8)
        data[place : place + 4] = choose.choice([choose.randbytes(4), b"\xff" * 4, bytes(4)])
    seal(data)
    (tmp_path / "old").write_bytes(data)
    changed = [edited(entry, choose) for entry in old]
    if patch_image(tmp_path / "old", tmp_path / "new", changed):
        assert (tmp_path / "new").stat().st_size == len(data)
    (tmp_path / "new").unlink(missing_ok=True)
    assert not list(tmp_path.glob("new*"))


def test_an_inode_that_ends_behind_the_image_is_not_written(tmp_path: Path) -> None:
    """Its head is still within."""
    old: list[Entry] = [file(b"a")]
    write_image(old, tmp_path / "old")
    data = bytearray((tmp_path / "old").read_bytes())
    place = data.rindex(b"...a") - DIRENT_SIZE  # of the file, behind the dots
    at = int.from_bytes(data[place : place + 8], "little") * SLOT
    data[-INODE.size :] = data[at : at + INODE.size]
    data[place : place + 8] = ((len(data) - INODE.size) // SLOT).to_bytes(8, "little")
    seal(data)
    (tmp_path / "old").write_bytes(data)
    assert not patch_image(tmp_path / "old", tmp_path / "new", [file(b"a", b"other")])
    assert not list(tmp_path.glob("new*"))


def test_the_image_of_another_tree_is_not_used(tmp_path: Path) -> None:
    """Where a path is not in it."""
    write_image([file(b"a")], tmp_path / "old")
    assert not patch_image(tmp_path / "old", tmp_path / "new", [file(b"b")])
    assert not patch_image(tmp_path / "old", tmp_path / "new", [file(b"a/b")])
    assert not patch_image(tmp_path / "old", tmp_path / "new", [file(b"z/b")])


def test_drawing_takes_the_short_way_when_little_has_changed(tmp_path: Path) -> None:
    """Else the old image is not even looked at."""
    count = 4 * CHANGED_DIVISOR
    old: list[Entry] = [file(b"%04d" % number) for number in range(count)]
    few = [file(old[0].path, b"new"), *old[1:]]
    many = [file(entry.path, b"new") if number < 5 else entry for number, entry in enumerate(old)]
    before = image_of(old, tmp_path / "old")
    for new in (few, many, old):
        draw(tmp_path / "new", new, (tmp_path / "old", old))
        assert (tmp_path / "new").read_bytes() == image_of(new, tmp_path / "whole")
    assert (tmp_path / "old").read_bytes() == before
    draw(tmp_path / "new", few, (tmp_path / "gone", old))
    assert (tmp_path / "new").read_bytes() == image_of(few, tmp_path / "whole")
    draw(tmp_path / "new", few)
    assert (tmp_path / "new").read_bytes() == image_of(few, tmp_path / "whole")


def test_a_disk_that_fails_is_told(tmp_path: Path) -> None:
    """The new image cannot be written: that is no matter of the old one."""
    old: list[Entry] = [file(b"a")]
    write_image(old, tmp_path / "old")
    with pytest.raises(OSError, match="No such file"):
        patch_image(tmp_path / "old", tmp_path / "no" / "new", [file(b"a", b"b")])


@given(
    seed=st.integers(0, 2**32),
    cuts=st.lists(st.integers(0, 60), max_size=4),
    edits=st.integers(0, 4),
    moved=st.booleans(),
)
def test_shared_pages_hide_no_change(seed: int, cuts: list[int], edits: int, moved: bool) -> None:
    """What two versions have in common as pages is not looked at; what is found is what a look at
    everything finds."""
    choose = random.Random(seed)
    old = [file(b"f%03d" % number, b"%d" % number) for number in range(60)]
    new = list(old)
    for number in choose.sample(range(60), edits):
        new[number] = edited(new[number], choose)
    bounds = sorted({0, 60, *cuts})
    before = Entries([old[begin:end] for begin, end in pairwise(bounds)])
    pages = [new[begin:end] for begin, end in pairwise(bounds if not moved else sorted({0, 60, *cuts, 30}))]
    after = Entries([next((known for known in before.pages if known == page), page) for page in pages])
    assert changed_entries(before, after, most=60) == changed_entries(old, new, most=60)
    assert changed_entries(before, Entries([new[:-1]]), most=60) is None
