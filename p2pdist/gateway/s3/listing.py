"""Pages of a listing of keys. Keys are bytes in UTF-8, in the order of their bytes.

Keys that have the prefix and a delimiter behind it are one common prefix, which counts as one entry
of the page. A page follows an entry of the page before it (`After`), so that pages of a listing fit
together also where the keys have changed meanwhile: each is asked for behind the last one seen.
"""

from __future__ import annotations

import base64
import binascii
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

TOKEN_CHARACTERS_MAX = 2048


@dataclass(frozen=True, slots=True)
class After:
    """What a page follows: a key, or with `common` all keys that begin so."""

    text: bytes = b""
    common: bool = False

    @property
    def token(self) -> str:
        """A continuation token."""
        return base64.urlsafe_b64encode((b"p" if self.common else b"k") + self.text).decode()

    @classmethod
    def parse(cls, token: str) -> After | None:
        """What a continuation token says; None for what is none."""
        try:
            data = base64.b64decode(token[:TOKEN_CHARACTERS_MAX].encode(), altchars=b"-_", validate=True)
        except (binascii.Error, ValueError):
            return None
        return cls(data[1:], data[:1] == b"p") if data[:1] in (b"k", b"p") else None


@dataclass(frozen=True, slots=True)
class Page:
    """Keys and common prefixes, each in order, and what the next page follows; None where nothing
    does."""

    keys: tuple[bytes, ...]
    prefixes: tuple[bytes, ...]
    after: After | None


def page_of(keys: Sequence[bytes], *, prefix: bytes, delimiter: bytes, after: After, count: int) -> Page:
    """The page of at most `count` entries behind `after`. `keys` are in order. Takes time in
    proportion to the entries, whatever lies behind common prefixes."""
    found: list[bytes] = []
    prefixes: list[bytes] = []
    behind = _behind(keys, after.text) if after.common else bisect_right(keys, after.text) if after.text else 0
    position, last = max(behind, bisect_left(keys, prefix)), After()
    while count and position < len(keys) and keys[position].startswith(prefix):
        if len(found) + len(prefixes) == count:
            return Page(tuple(found), tuple(prefixes), last)
        key = keys[position]
        cut = key.find(delimiter, len(prefix)) if delimiter else -1
        if cut < 0:
            found.append(key)
            position, last = position + 1, After(key)
        else:
            last = After(key[: cut + len(delimiter)], common=True)
            prefixes.append(last.text)
            position = _behind(keys, last.text, position)
    return Page(tuple(found), tuple(prefixes), None)


def _behind(keys: Sequence[bytes], prefix: bytes, low: int = 0) -> int:
    """Where the keys end that begin with `prefix`."""
    text = prefix.rstrip(b"\xff")
    if not text:
        return len(keys)
    return bisect_left(keys, text[:-1] + bytes([text[-1] + 1]), low)
