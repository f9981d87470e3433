"""What a packing remembers, and what it does not dare to."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from p2pdist.model.errors import Corrupt
from p2pdist.model.tree import File, HardLink, content_hash
from p2pdist.package.source.scan import Row, scan_tree
from p2pdist.package.tree.builder import CachedTree, TreeBuilder
from p2pdist.package.tree.cache import CacheBuilder, FilesCache, Index
from p2pdist.package.tree.entries import Assembler
from p2pdist.package.tree.reader import STABLE_COARSE_NS, STABLE_NS, Read, stable

NOW_NS = 1_700_000_000_000_000_001
SECOND_NS = 1_000_000_000


def row(*, mtime_ns: int, ctime_ns: int) -> Row:
    return Row(b"name", 0o100644, 7, 1, mtime_ns, ctime_ns, 1, 1)


@pytest.mark.parametrize(
    ("ctime_ns", "mtime_ns", "expected"),
    [
        (NOW_NS - STABLE_NS - 1, 0, True),
        (NOW_NS - STABLE_NS, 0, False),
        (NOW_NS + 5, 0, False),
        (0, NOW_NS - 5, False),
        (1, NOW_NS + STABLE_NS + 1, True),
        (NOW_NS // SECOND_NS * SECOND_NS, 0, False),
        ((NOW_NS - STABLE_COARSE_NS) // SECOND_NS * SECOND_NS - SECOND_NS, 0, True),
        ((NOW_NS - STABLE_COARSE_NS) // SECOND_NS * SECOND_NS + SECOND_NS, 0, False),
    ],
)
def test_what_was_just_written_to_is_not_stable(ctime_ns: int, mtime_ns: int, expected: bool) -> None:
    """A second write within one tick would leave the times as they are; where times are whole
    seconds, a tick is long."""
    assert stable(row(mtime_ns=mtime_ns, ctime_ns=ctime_ns), NOW_NS) is expected


def remembered(builder: TreeBuilder) -> CachedTree:
    """What the next packing knows of a complete builder."""
    cache_builder = CacheBuilder(FilesCache(), anew=True)
    directories = [directory.remember((), cache_builder) for directory in builder.scanned]
    return CachedTree(FilesCache(Index(directories=directories), b"".join(cache_builder.blocks)))


@pytest.mark.parametrize("is_stable", [True, False])
def test_a_file_that_is_not_stable_is_read_again(tmp_path: Path, is_stable: bool) -> None:
    """It is remembered without its stamp, its directory without its fingerprint, and the whole is
    not taken for unchanged."""
    (tmp_path / "sub").mkdir()
    for name in ("sub/a", "sub/b", "c"):
        (tmp_path / name).write_text(name)
    os.utime(tmp_path / "c", (1, 1))

    def assemble(cached: CachedTree, available: bool = True) -> TreeBuilder:
        return Assembler(scan_tree(tmp_path), cached, lambda _: available).assemble()

    builder = assemble(CachedTree(FilesCache()))
    assert [os.path.basename(file.path) for file in builder.unread] == [b"c", b"a", b"b"]
    builder.scanned[0].stable = True  # however long ago the directory below was made
    builder.fill([Read(content_hash(name), stable=is_stable or name != b"a") for name in (b"c", b"a", b"b")])
    assert builder.stable is is_stable
    cached = remembered(builder)
    top, sub = (cached.directory(cached.numbers[path]) for path in (b"", b"sub"))
    stamps = [stamp for _, stamp in cached.files(cached.numbers[b"sub"]).values()]
    assert [stamp is not None for stamp in stamps] == [is_stable, True]
    assert bool(sub.fingerprint) is is_stable
    assert top.fingerprint
    again = assemble(cached)
    assert [os.path.basename(file.path) for file in again.unread] == ([] if is_stable else [b"a"])
    contents = {entry.path: entry.content for entry in again.directories[1].entries if isinstance(entry, File)}
    assert contents[b"sub/b"] == content_hash(b"b")
    assert len(assemble(cached, available=False).unread) == 3


def test_what_was_looked_at_is_checked(tmp_path: Path) -> None:
    """A tree that nobody would show is not packed: entries of directories that have changed are
    checked among those that have not."""
    for name in ("kept/a", "sub/a", "sub/b"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()

    def builder(cached: CachedTree) -> TreeBuilder:
        made = Assembler(scan_tree(tmp_path), cached, lambda _: True).assemble()
        listed = [entry.path for directory, begin, end in made.runs for entry in directory.entries[begin:end]]
        assert listed == [b"kept", b"kept/a", b"sub", b"sub/a", b"sub/b"]
        return made

    first = builder(CachedTree(FilesCache()))
    first.fill([])
    for directory in first.scanned:
        directory.stable = directory.path != b"sub"  # however new it is
    cached = remembered(first)
    builder(cached).fill([])
    wrong = (
        (b"sub", 1, File(b"sub/b", 0o4644, 0, 0, content_hash(b""))),
        (b"sub", 0, File(b"sub/b", 0o644, 0, 0, content_hash(b""))),  # comes twice
        (b"sub", 1, HardLink(b"sub/b", b"kept")),
        (b"", 1, File(b"sub", 0o644, 0, 0, content_hash(b""))),  # holds the others
    )
    for path, position, entry in wrong:
        second = builder(cached)
        assert [directory.path for directory in second.scanned] == [b"sub"]
        (changed,) = (directory for directory in second.directories if directory.path == path)
        changed.entries[position] = entry
        with pytest.raises(Corrupt):
            second.fill([])
