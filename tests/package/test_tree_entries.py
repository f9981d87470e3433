"""What a packing remembers, and what it does not dare to."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from p2pdist.model.errors import Corrupt
from p2pdist.model.tree import File, HardLink, content_hash
from p2pdist.package.source.scan import Row, scan_tree
from p2pdist.package.tree.builder import Draft, Known
from p2pdist.package.tree.cache import Draft as StateDraft
from p2pdist.package.tree.cache import Index, Notes
from p2pdist.package.tree.entries import Assembler
from p2pdist.package.tree.reader import SETTLED_COARSE_NS, SETTLED_NS, Read, settled

NOW_NS = 1_700_000_000_000_000_001
SECOND_NS = 1_000_000_000


def row(*, mtime_ns: int, ctime_ns: int) -> Row:
    return Row(b"name", 0o100644, 7, 1, mtime_ns, ctime_ns, 1, 1)


@pytest.mark.parametrize(
    ("ctime_ns", "mtime_ns", "expected"),
    [
        (NOW_NS - SETTLED_NS - 1, 0, True),
        (NOW_NS - SETTLED_NS, 0, False),
        (NOW_NS + 5, 0, False),
        (0, NOW_NS - 5, False),
        (1, NOW_NS + SETTLED_NS + 1, True),
        (NOW_NS // SECOND_NS * SECOND_NS, 0, False),
        ((NOW_NS - SETTLED_COARSE_NS) // SECOND_NS * SECOND_NS - SECOND_NS, 0, True),
        ((NOW_NS - SETTLED_COARSE_NS) // SECOND_NS * SECOND_NS + SECOND_NS, 0, False),
    ],
)
def test_what_was_just_written_to_is_not_settled(ctime_ns: int, mtime_ns: int, expected: bool) -> None:
    """A second write within one tick would leave the times as they are; where times are whole
    seconds, a tick is long."""
    assert settled(row(mtime_ns=mtime_ns, ctime_ns=ctime_ns), NOW_NS) is expected


def remembered(draft: Draft) -> Known:
    """What the next packing knows of a complete draft."""
    state = StateDraft(Notes(), anew=True)
    directories = [directory.remember((), state) for directory in draft.looked]
    return Known(Notes(Index(directories=directories), b"".join(state.blocks)))


@pytest.mark.parametrize("is_settled", [True, False])
def test_a_file_that_is_not_settled_is_read_again(tmp_path: Path, is_settled: bool) -> None:
    """It is remembered without its stamp, its directory without its fingerprint, and the whole is
    not taken for unchanged."""
    (tmp_path / "sub").mkdir()
    for name in ("sub/a", "sub/b", "c"):
        (tmp_path / name).write_text(name)
    os.utime(tmp_path / "c", (1, 1))

    def assemble(known: Known, available: bool = True) -> Draft:
        return Assembler(scan_tree(tmp_path), known, lambda _: available).assemble()

    draft = assemble(Known(Notes()))
    assert [os.path.basename(file.path) for file in draft.wanted] == [b"c", b"a", b"b"]
    draft.looked[0].settled = True  # however long ago the directory below was made
    draft.fill([Read(content_hash(name), settled=is_settled or name != b"a") for name in (b"c", b"a", b"b")])
    assert draft.settled is is_settled
    known = remembered(draft)
    top, sub = (known.directory(known.numbers[path]) for path in (b"", b"sub"))
    stamps = [stamp for _, stamp in known.files(known.numbers[b"sub"]).values()]
    assert [stamp is not None for stamp in stamps] == [is_settled, True]
    assert bool(sub.fingerprint) is is_settled
    assert top.fingerprint
    again = assemble(known)
    assert [os.path.basename(file.path) for file in again.wanted] == ([] if is_settled else [b"a"])
    contents = {entry.path: entry.content for entry in again.directories[1].entries if isinstance(entry, File)}
    assert contents[b"sub/b"] == content_hash(b"b")
    assert len(assemble(known, available=False).wanted) == 3


def test_what_was_looked_at_is_checked(tmp_path: Path) -> None:
    """A tree that nobody would show is not packed: entries of directories that have changed are
    checked among those that have not."""
    for name in ("kept/a", "sub/a", "sub/b"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()

    def draft(known: Known) -> Draft:
        made = Assembler(scan_tree(tmp_path), known, lambda _: True).assemble()
        listed = [entry.path for directory, begin, end in made.runs for entry in directory.entries[begin:end]]
        assert listed == [b"kept", b"kept/a", b"sub", b"sub/a", b"sub/b"]
        return made

    first = draft(Known(Notes()))
    first.fill([])
    for directory in first.looked:
        directory.settled = directory.path != b"sub"  # however new it is
    known = remembered(first)
    draft(known).fill([])
    wrong = (
        (b"sub", 1, File(b"sub/b", 0o4644, 0, 0, content_hash(b""))),
        (b"sub", 0, File(b"sub/b", 0o644, 0, 0, content_hash(b""))),  # comes twice
        (b"sub", 1, HardLink(b"sub/b", b"kept")),
        (b"", 1, File(b"sub", 0o644, 0, 0, content_hash(b""))),  # holds the others
    )
    for path, position, entry in wrong:
        second = draft(known)
        assert [directory.path for directory in second.looked] == [b"sub"]
        (changed,) = (directory for directory in second.directories if directory.path == path)
        changed.entries[position] = entry
        with pytest.raises(Corrupt):
            second.fill([])
