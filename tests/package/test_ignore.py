"""Patterns of files that are left out."""

from __future__ import annotations

import os
import random
import shutil
import socket
import subprocess
from pathlib import Path

import pytest
from effort import examples

from p2pdist.model.errors import TooLarge, UsageError
from p2pdist.package.source.ignore import IGNORE_BYTES_MAX, PATTERNS_MAX, matcher, read_patterns
from p2pdist.package.source.stages import walk


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
        (["*.key"], b"a\nb/x.key", False, True),
        (["**/secret"], b"a\nb/secret", False, True),
        (["*.log"], b"x.log\n", False, False),
        (["[[:digit:]].key"], b"1.key", False, True),
        (["node_modules", "!/packages/"], b"packages/node_modules", True, True),
        (["data/**", "!data/keep"], b"data", True, False),
        (["data/**", "!data/keep"], b"data/keep", False, False),
        (["key**/x"], b"keys/a/x", False, True),
        (["key**/x"], b"keyx", False, True),
        (["k?y**/x"], b"keys/a/x", False, False),
        (["\\key**/x"], b"keys/a/x", False, False),
        (["**\\/x"], b"a/b/x", False, True),
        (["**\\/x"], b"x", False, False),
        (["a/" + "**/" * 20 + "b"], b"a/" * 60 + b"a", False, False),
        (["a\\\\  "], b"a\\", False, True),
        (["/"], b"a", True, False),
    ],
)
def test_patterns_are_those_of_gitignore(patterns: list[str], path: bytes, directory: bool, expected: bool) -> None:
    assert left_out(patterns, path, directory=directory) is expected


NAMES = [
    b"a",
    b"b",
    b"foo",
    b"x.log",
    b"a b",
    b"a\nb",
    b"b\n",
    b"\xc3\xa9",
    b"\xff",
    b" a",
    b"!a",
    b"#a",
    b"a[b]",
    b"a*b",
    b"-",
]
PARTS = [
    b"a",
    b"foo",
    b"*",
    b"**",
    b"***",
    b"?",
    b"*.log",
    b"[ab]",
    b"[!a]",
    b"[^b]",
    b"f*",
    b"f**",
    b"?**",
    b"*o",
    b"[a-f]oo",
    b"a b",
    b"\xff",
]
PARTS += [
    b"\\!a",
    b"\\#a",
    b"#a",
    b"a\\[b]",
    b"a\\*b",
    b"[]a]",
    b"[]-]",
    b"[a-]",
    b"[[]",
    b"[\\]]",
    b"a\\ ",
    b"*[[:space:]]*",
    b"[[:alpha:]]",
]


def planted(directory: Path, chance: random.Random, depth: int) -> None:
    for name in chance.sample(NAMES, chance.randint(1, 3)):
        path = directory / os.fsdecode(name)
        if depth and chance.random() < 0.5:
            path.mkdir()
            planted(path, chance, depth - 1)
        else:
            path.touch()


def made_up(chance: random.Random) -> bytes:
    pattern = b"/".join(chance.choice(PARTS) for _ in range(chance.randint(1, 3)))
    return chance.choice([b"", b"", b"/"]) + pattern + chance.choice([b"", b"", b"/"])


def test_git_leaves_the_same_out(tmp_path: Path) -> None:
    """Trees and patterns at random, and the files that git itself does not ignore."""
    repository = ["git", f"--git-dir={tmp_path}/git", "-c", "core.bare=false", f"--work-tree={tmp_path}/tree"]
    (tmp_path / "tree").mkdir()
    subprocess.run([*repository, "init", "-q"], check=True, cwd=tmp_path)
    for seed in range(examples(300)):
        chance = random.Random(seed)
        shutil.rmtree(tmp_path / "tree")
        (tmp_path / "tree").mkdir()
        planted(tmp_path / "tree", chance, 3)
        patterns = [chance.choice([b"", b"", b"!"]) + made_up(chance) for _ in range(chance.randint(1, 3))]
        (tmp_path / "patterns").write_bytes(b"\n".join(patterns) + b"\n")
        command = [*repository, "ls-files", "--others", f"--exclude-from={tmp_path}/patterns", "-z"]
        kept = subprocess.run(command, check=True, stdout=subprocess.PIPE, cwd=tmp_path / "tree").stdout
        ignore = matcher([*map(os.fsdecode, patterns)])
        files = {entry.path for entry in walk(tmp_path / "tree", ignore=ignore) if not entry.is_directory}
        assert files == {name for name in kept.split(b"\0") if name}, (seed, patterns)


def test_no_pattern_leaves_nothing_out() -> None:
    assert matcher([]) is None
    assert matcher(["# only a comment", ""]) is None


def test_a_wrong_pattern_is_named() -> None:
    with pytest.raises(UsageError, match=r"'!' in the flags"):
        matcher(["*.log", "!"], where="the flags")
    with pytest.raises(UsageError, match=r"'\[z-a\]' in the flags"):
        matcher(["*.log", "[z-a]"], where="the flags")
    for wrong in ("a[", "a\\", "[[:letter:]]", "!/["):
        with pytest.raises(UsageError, match="in the flags is not a pattern"):
            matcher([wrong], where="the flags")
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
