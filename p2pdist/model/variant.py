"""Names of variants: files with the content of an object and other attributes than the object has, kept with one tree.

    <64 hex: BLAKE3 of the content>.<32 hex: of mode, time and attributes>

So what must be in a variant can be verified by its name, and files of a tree that look the same share one.
"""

from __future__ import annotations

import re

import msgspec

from p2pdist.model.tree import Xattrs, content_hash

_NAME = re.compile(r"([0-9a-f]{64})\.[0-9a-f]{32}")


def variant_name(content: bytes, mode: int, mtime_ns: int, xattrs: Xattrs) -> str:
    """The name of the variant of a content with this mode, modification time in nanoseconds and extended attributes."""
    look = content_hash(msgspec.msgpack.encode((mode, mtime_ns, xattrs)))
    return f"{content.hex()}.{look[:16].hex()}"


def content_of(name: str) -> bytes | None:
    """The BLAKE3 of what a variant must hold; None for what is no name of one."""
    found = _NAME.fullmatch(name)
    return bytes.fromhex(found[1]) if found else None
