"""Which files a package leaves out: patterns as in a .gitignore file (gitignore(5)), from the
project file, `.p2pdistignore` and flags.

The last pattern that matches a path decides, so a flag wins over `.p2pdistignore`, and that over
the project file. What lies in a directory that is left out is left out with it.
"""

from __future__ import annotations

import codecs
import os
import re
from collections.abc import Callable, Sequence
from pathlib import Path

from p2pdist.files import read_content
from p2pdist.model.errors import TooLarge, UsageError

IGNORE_FILE = ".p2pdistignore"
IGNORE_BYTES_MAX = 1 << 20
PATTERNS_MAX = 10_000

Ignore = Callable[[bytes, bool], bool]
"""Given a path relative to the source and whether it is a directory: is it left out?"""


def matcher(patterns: Sequence[str], *, where: str = "the patterns") -> Ignore | None:
    """Says which paths match `patterns`; None when there is nothing to match. Raises UsageError
    naming the pattern that is none."""
    if len(patterns) > PATTERNS_MAX:
        raise TooLarge(
            f"{where} are {len(patterns)}, over the limit of {PATTERNS_MAX}", remedy="Write fewer, with wildcards"
        )
    if not patterns:
        return None
    from pathspec import GitIgnoreSpec  # most packages have none, and it takes long to load

    try:
        spec = GitIgnoreSpec.from_lines(patterns)
    except (ValueError, re.error):  # gitignore(5) takes [z-a]; no file matches it
        wrong = next((pattern for pattern in patterns if not _is_pattern(pattern)), "")
        raise UsageError(
            f"{wrong[:200]!r} in {where} is not a pattern", remedy="Write patterns as in a .gitignore file"
        ) from None
    if all(pattern.include is None for pattern in spec.patterns):
        return None

    def matches(path: bytes, is_directory: bool) -> bool:
        return spec.match_file(os.fsdecode(path) + ("/" if is_directory else ""))

    return matches


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


def _is_pattern(pattern: str) -> bool:
    from pathspec import GitIgnoreSpec

    try:
        GitIgnoreSpec.from_lines([pattern])
    except (ValueError, re.error):
        return False
    return True
