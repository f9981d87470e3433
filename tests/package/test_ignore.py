"""Patterns of files that are left out."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

from p2pdist.model.errors import TooLarge, UsageError
from p2pdist.package.source.ignore import IGNORE_BYTES_MAX, PATTERNS_MAX, matcher, read_patterns


def left_out(patterns: list[str], path: bytes, *, directory: bool = False) -> bool:
    ignore = matcher(patterns)
    assert ignore is not None
    return ignore(path, directory)


@pytest.mark.parametrize(
    ("patterns", "path", "directory", "expected"),
    [
        (["*.log"], b"a/b.log", False, True),
        (["*.log"], b"a/b.log.txt", False, False),
        (["/build/"], b"build", True, True),
        (["/build/"], b"build", False, False),
        (["/build/"], b"a/build", True, False),
        (["build/"], b"a/build", True, True),
        (["*.log", "!keep.log"], b"x/keep.log", False, False),
        (["!keep.log", "*.log"], b"x/keep.log", False, True),
        (["a/**/z"], b"a/b/c/z", False, True),
        (["# comment", "", "x"], b"x", False, True),
        (["*.log"], b"\xff\xfe.log", False, True),
        (["a\nb"], b"a\nb", False, True),
    ],
)
def test_patterns_are_those_of_gitignore(patterns: list[str], path: bytes, directory: bool, expected: bool) -> None:
    assert left_out(patterns, path, directory=directory) is expected


def test_no_pattern_leaves_nothing_out() -> None:
    assert matcher([]) is None
    assert matcher(["# only a comment", ""]) is None


def test_a_wrong_pattern_is_named() -> None:
    with pytest.raises(UsageError, match=r"'!' in the flags"):
        matcher(["*.log", "!"], where="the flags")
    with pytest.raises(UsageError, match=r"'\[z-a\]' in the flags"):
        matcher(["*.log", "[z-a]"], where="the flags")
    with pytest.raises(TooLarge):
        matcher(["x"] * (PATTERNS_MAX + 1))


def test_the_file_in_the_source(tmp_path: Path) -> None:
    assert read_patterns(tmp_path) == []
    (tmp_path / ".p2pdistignore").write_bytes(b"*.log\n# x\n\xff*\n")
    assert read_patterns(tmp_path) == ["*.log", "# x", os.fsdecode(b"\xff*")]
    (tmp_path / ".p2pdistignore").write_bytes(bytes(IGNORE_BYTES_MAX + 1))
    with pytest.raises(TooLarge, match=r"\.p2pdistignore"):
        read_patterns(tmp_path)


def test_patterns_are_read_as_git_reads_them(tmp_path: Path) -> None:
    """Without a byte order mark; no other character than LF ends a line."""
    (tmp_path / ".p2pdistignore").write_bytes("\ufeff.env\r\na\u2028b\n\nc\fd\\ \n".encode())
    assert read_patterns(tmp_path) == [".env", "a\u2028b", "c\fd\\ "]
    assert left_out(read_patterns(tmp_path), b".env")
    assert not left_out(read_patterns(tmp_path), b"b")


@pytest.mark.timeout(20)
@pytest.mark.parametrize("kind", ["FIFO", "link to a FIFO", "directory", "socket"])
def test_what_is_no_file_is_named_and_not_waited_for(tmp_path: Path, kind: str) -> None:
    file = tmp_path / ".p2pdistignore"
    if kind == "directory":
        file.mkdir()
    elif kind == "socket":
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(str(file))
    else:
        os.mkfifo(tmp_path / "fifo")
        (tmp_path / "fifo").rename(file) if kind == "FIFO" else file.symlink_to("fifo")
    with pytest.raises(UsageError, match=r"\.p2pdistignore: it is not a regular file"):
        read_patterns(tmp_path)
