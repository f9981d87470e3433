"""Variants: files with the content of an object and another mode or time than the object has, kept
with one tree.

Names: <64 hex: BLAKE3 of the content>.<mode in octal>.<modification time in nanoseconds>

So all that a variant must be can be verified by its name, and files of a tree that look the same
share one.
"""

from __future__ import annotations

import re

BLOCK = 4096
_NAME = re.compile(r"([0-9a-f]{64})\.[0-7]{3,4}\.-?[0-9]{1,20}")


def variant_name(content: bytes, mode: int, mtime_ns: int) -> str:
    """The name of the variant of a content with this mode and modification time in nanoseconds."""
    return f"{content.hex()}.{mode:03o}.{mtime_ns}"


def content_of(name: str) -> bytes | None:
    """The BLAKE3 of what a variant must hold; None for what is no name of one."""
    found = _NAME.fullmatch(name)
    return bytes.fromhex(found[1]) if found else None


def bytes_counted(size: int) -> int:
    """What a variant of `size` bytes counts: whole blocks, since there may be many of a small
    content."""
    return -(-size // BLOCK) * BLOCK
