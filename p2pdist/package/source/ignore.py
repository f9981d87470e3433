"""Which files a package leaves out: patterns as in a .gitignore file (gitignore(5)), from the
project file, `.p2pdistignore` and flags.

The last pattern that fits a path decides, so a flag wins over `.p2pdistignore`, and that over the
project file. What lies in a directory that is left out is left out with it, and no pattern brings
it back: callers do not enter such a directory. So a pattern is compared with a path itself and
never with the directories above it, byte by byte, as git does it (dir.c, wildmatch.c).
"""

from __future__ import annotations

import codecs
import os
import re
import string
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from p2pdist.files import read_content
from p2pdist.model.errors import TooLarge, UsageError

IGNORE_FILE = ".p2pdistignore"
IGNORE_BYTES_MAX = 1 << 20
PATTERNS_MAX = 10_000

Ignore = Callable[[bytes, bool], bool]
"""Given a path relative to the source and whether it is a directory: is it left out?"""


@dataclass(frozen=True, slots=True)
class _Rule:
    """What a pattern says: leave out what fits, or keep it."""

    fits: Callable[[bytes], object]
    leaves_out: bool
    of_directories: bool
    """It is about directories alone."""
    of_paths: bool
    """It is compared with whole paths, not with names."""


def matcher(patterns: Sequence[str], *, where: str = "the patterns") -> Ignore | None:
    """Says which paths match `patterns`; None when there is nothing to match. Raises UsageError
    naming the pattern that is none."""
    if len(patterns) > PATTERNS_MAX:
        raise TooLarge(
            f"{where} are {len(patterns)}, over the limit of {PATTERNS_MAX}", remedy="Write fewer, with wildcards"
        )
    rules = [rule for pattern in reversed(patterns) if (rule := _rule(pattern, where)) is not None]
    if not rules:
        return None

    def matches(path: bytes, is_directory: bool) -> bool:
        name = path.rpartition(b"/")[2]
        for rule in rules:
            if (is_directory or not rule.of_directories) and rule.fits(path if rule.of_paths else name):
                return rule.leaves_out
        return False

    return matches


def _rule(text: str, where: str) -> _Rule | None:
    """None for a blank line or a comment. Raises UsageError."""
    try:
        pattern = _trimmed(os.fsencode(text))
        if not pattern or pattern.startswith(b"#"):
            return None
        plain = pattern.removeprefix(b"!")
        glob = _REPEATED.sub(b"**/", plain.removesuffix(b"/"))
        if not plain:
            raise ValueError("there is nothing behind the exclamation mark")
        fits = re.compile(b"".join(_expressions(glob.removeprefix(b"/"))), re.DOTALL).fullmatch
    except (ValueError, IndexError):  # git takes it for one that fits nothing
        raise UsageError(
            f"{text[:200]!r} in {where} is not a pattern", remedy="Write patterns as in a .gitignore file"
        ) from None
    return _Rule(fits, plain == pattern, plain.endswith(b"/"), b"/" in glob)


def _trimmed(pattern: bytes) -> bytes:
    """Without the spaces at its end that no backslash quotes."""
    at = end = 0
    while at < len(pattern):
        quotes = pattern[at] == _BACKSLASH
        if quotes or pattern[at : at + 1] != b" ":
            end = at + 1 + quotes
        at += 1 + quotes
    return pattern[:end]


def _expressions(glob: bytes) -> Iterator[bytes]:
    """The parts of a regular expression for what a glob fits. Raises ValueError and IndexError.

    Git compares the characters before the first wildcard on their own, and takes what follows for
    the beginning of a glob: asterisks there are those of whole names (`key**/x` as `**/x`)."""
    at, is_first = 0, True
    while at < len(glob):
        char, start = glob[at : at + 1], at
        at += 1
        if char == b"*":
            while glob[at : at + 1] == b"*":
                at += 1
            begins = is_first or glob[start - 1 : start] == b"/"
            after = glob[at : at + 2]
            if at - start == 1 or not begins or (after and after[:1] != b"/" and after != rb"\/"):
                yield rb"[^/]*"
            elif after[:1] == b"/":
                at += 1
                yield rb"(?:.*/)?"
            else:
                yield rb".*"
        elif char == b"?":
            yield rb"[^/]"
        elif char == b"[":
            fitting, at = _set(glob, at)
            yield b"[%s]" % b"".join(b"\\x%02x" % byte for byte in sorted(fitting)) if fitting else rb"(?!)"
        else:
            if char == b"\\":
                char, at = bytes((glob[at],)), at + 1
            yield re.escape(char)
        is_first &= glob[start] not in b"*?[\\"


def _set(glob: bytes, at: int) -> tuple[set[int], int]:
    """The bytes that fit a bracket expression whose bracket stands before `at`, and where it ends.
    Raises ValueError for a range or class that is none, IndexError where it does not end."""
    negated = glob[at] in b"!^"
    at += negated
    chosen: set[int] = set()
    before, start = 0, at
    while at == start or glob[at] != _CLOSING:
        char = glob[at]
        if char == _DASH and before and glob[at + 1] != _CLOSING:
            at += 2 if glob[at + 1] == _BACKSLASH else 1
            if before > glob[at]:
                raise ValueError("it ends before it begins")
            chosen.update(range(before, glob[at] + 1))
            before = 0
        elif named := _CLASS.match(glob, at):
            chosen.update(_CLASSES[named[1]] if named[1] in _CLASSES else _no_class(named[1]))
            at, before = named.end() - 1, 0
        else:
            at += char == _BACKSLASH
            before = glob[at]
            chosen.add(before)
        at += 1
    return (set(range(256)) - chosen if negated else chosen) - {_SLASH}, at + 1


def _no_class(name: bytes) -> bytes:
    raise ValueError(f"there is no class of characters {name!r}")


_CLOSING, _DASH, _BACKSLASH, _SLASH = b"]-\\/"
_REPEATED = re.compile(rb"(?<![^/])(?:\*{2,}/){2,}")
"""Asterisks that say one thing several times: an expression of them all would try every way to
share a path among them."""
_CLASS = re.compile(rb"\[:([^\]]*):\]")
_CLASSES = {
    b"alnum": (string.ascii_letters + string.digits).encode(),
    b"alpha": string.ascii_letters.encode(),
    b"blank": b" \t",
    b"cntrl": bytes((*range(32), 127)),
    b"digit": string.digits.encode(),
    b"graph": bytes(range(33, 127)),
    b"lower": string.ascii_lowercase.encode(),
    b"print": bytes(range(32, 127)),
    b"punct": string.punctuation.encode(),
    b"space": b" \t\n\r",
    b"upper": string.ascii_uppercase.encode(),
    b"xdigit": string.hexdigits.encode(),
}
"""Classes of characters, as git has them."""


def read_patterns(source: Path) -> list[str]:
    """The lines of `.p2pdistignore` in the directory `source`; none without that file. Raises
    UsageError when it cannot be read."""
    file = source / IGNORE_FILE
    try:
        data = read_content(file, IGNORE_BYTES_MAX).data
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        raise UsageError(
            f"cannot read {file}: {error.strerror}", remedy="Make it a file that you may read, or remove it"
        ) from error
    if len(data) > IGNORE_BYTES_MAX:
        raise TooLarge(f"{file} is over {IGNORE_BYTES_MAX} bytes", remedy="Write fewer patterns, with wildcards")
    # As git reads it (dir.c): a byte order mark is no part of the first pattern, and lines end with
    # LF or CR LF alone.
    lines = data.removeprefix(codecs.BOM_UTF8).split(b"\n")
    return [os.fsdecode(line.removesuffix(b"\r")) for line in lines if line]
