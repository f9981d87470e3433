"""Patterns of package references, as in fnmatch: `*` stands for anything, `?` for one character,
`[abc]` for one of them.

A reference reads `name:tag`. One by digest has no tag: it is matched as `name:`, as
`name@sha256:<hex>`, and as each tag that the tracker knows to lead there, so that `trainer:*` holds
for a preseed, too, which names its package by digest. Patterns are ASCII without white space, since
references are.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from fnmatch import fnmatchcase

from p2pdist.model.errors import UsageError
from p2pdist.model.manifest import Reference, parse_reference
from p2pdist.model.policy import PATTERN_CHARACTERS_MAX

_PATTERN = re.compile(r"[A-Za-z0-9._/:@*?\[\]!-]+\Z")


def parse_pattern(text: str) -> str:
    """Raises UsageError for what no reference could match."""
    if not _PATTERN.match(text) or len(text) > PATTERN_CHARACTERS_MAX:
        raise UsageError(f"{text[:80]!r} matches no reference", remedy='Write one such as "team/trainer:*"')
    if not any(mark in text for mark in "*?["):
        if ":" not in text:
            raise UsageError(f"{text!r} names no tag", remedy=f'Write "{text}:*" for all its tags')
        parse_reference(text)
    return text


def matches(pattern: str, names: Iterable[str]) -> bool:
    """Whether the pattern matches any of a package's names."""
    return any(fnmatchcase(name, pattern) for name in names)


def names_of(reference: Reference) -> tuple[str, ...]:
    """What a reference is matched as, apart from tags that lead to its digest."""
    return (str(reference), f"{reference.name}:") if reference.digest is not None else (str(reference),)
