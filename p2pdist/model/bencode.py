"""Bencoding (BEP 3) in its canonical form: the encoding of BitTorrent's metainfo files and of
trackers' responses.

An integer reads `i-7e`, a byte string `3:abc`, a list `l...e`, a dictionary `d...e` with byte
strings as keys. In the canonical form integers and lengths have no leading zeros, there is no `-0`,
and keys ascend as raw bytes without a repetition, so that equal values have equal bytes: an info
hash depends on it. The decoder refuses everything else. (Libraries for bencoding take more than the
canonical form, have no limits, or bring a whole BitTorrent client.)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NoReturn

from p2pdist.model.errors import Corrupt

Value = int | bytes | list["Value"] | dict[bytes, "Value"]
Encodable = int | bytes | Sequence["Encodable"] | Mapping[bytes, "Encodable"]

DEPTH_MAX = 32
"""Lists and dictionaries within each other; a metainfo file of one directory has six."""

BYTES_MAX = 64 << 20
ITEMS_MAX = 1 << 18
"""Integers, strings (keys, too), lists and dictionaries in all: two bytes can make an object of
sixty."""

INTEGER_MIN, INTEGER_MAX = -(1 << 63), (1 << 64) - 1
"""What fits 64 bits, with or without a sign."""

_DIGITS_MAX = 20
_DIGITS = frozenset(b"0123456789")


def encode(value: Encodable) -> bytes:
    """The canonical bytes of `value`; a TypeError for what has none is a bug of the caller. Raises
    Corrupt for an integer out of range."""
    out: list[bytes] = []
    _write(value, out)
    return b"".join(out)


def _write(value: Encodable, out: list[bytes]) -> None:
    if isinstance(value, bytes):
        out += (b"%d:" % len(value), value)
    elif isinstance(value, bool | str | bytearray | memoryview):  # each would pass for something else below
        raise TypeError(f"{type(value).__name__} cannot be bencoded")
    elif isinstance(value, int):
        if not INTEGER_MIN <= value <= INTEGER_MAX:
            raise Corrupt("an integer of more than 64 bits cannot be bencoded")
        out.append(b"i%de" % value)
    elif isinstance(value, Mapping):
        out.append(b"d")
        for key in sorted(value):
            if not isinstance(key, bytes):
                raise TypeError("keys of a bencoded dictionary are bytes")
            _write(key, out)
            _write(value[key], out)
        out.append(b"e")
    elif isinstance(value, Sequence):
        out.append(b"l")
        for item in value:
            _write(item, out)
        out.append(b"e")
    else:
        raise TypeError(f"{type(value).__name__} cannot be bencoded")


def decode(data: bytes, *, bytes_max: int = BYTES_MAX) -> Value:
    """The value that `data`, all of it, is the canonical form of. Raises Corrupt for anything else
    and over a limit."""
    if len(data) > bytes_max:
        raise Corrupt(f"{len(data)} bencoded bytes are over the limit of {bytes_max}")
    reader = _Reader(data)
    value = reader.value(0)
    if reader.at != len(data):
        reader.refuse("something follows the value")
    return value


class _Reader:
    """Reads values from position `at` on."""

    def __init__(self, data: bytes) -> None:
        self._data, self.at, self._items = data, 0, 0

    def value(self, depth: int) -> Value:
        self._items += 1
        if depth > DEPTH_MAX or self._items > ITEMS_MAX:
            self.refuse("it is nested too deeply" if depth > DEPTH_MAX else "it has too many items")
        kind = self._data[self.at : self.at + 1]
        if kind == b"i":
            self.at += 1
            return self._number(b"e", signed=True)
        if kind == b"l":
            return self._list(depth)
        if kind == b"d":
            return self._dictionary(depth)
        return self._string()

    def _list(self, depth: int) -> Value:
        self.at += 1
        items: list[Value] = []
        while not self._ends():
            items.append(self.value(depth + 1))
        return items

    def _dictionary(self, depth: int) -> Value:
        self.at += 1
        items: dict[bytes, Value] = {}
        last: bytes | None = None
        while not self._ends():
            self._items += 1
            key = self._string()
            if last is not None and key <= last:
                self.refuse("its keys are out of order")
            last = key
            items[key] = self.value(depth + 1)
        return items

    def _string(self) -> bytes:
        length = self._number(b":", signed=False)
        start, self.at = self.at, self.at + length
        if self.at > len(self._data):
            self.refuse("it is cut short")
        return self._data[start : self.at]

    def _number(self, end: bytes, *, signed: bool) -> int:
        """The digits up to `end`, which is passed."""
        stop = self._data.find(end, self.at, self.at + _DIGITS_MAX + 2)
        text = self._data[self.at : max(stop, 0)]
        digits = text[1:] if signed and text[:1] == b"-" else text
        if not digits or not _DIGITS.issuperset(digits):
            self.refuse("a number is malformed")
        if (digits[:1] == b"0" and len(text) > 1) or not INTEGER_MIN <= int(text) <= INTEGER_MAX:
            self.refuse("a number has leading zeros, is a negative zero, or is over 64 bits")
        self.at = stop + 1
        return int(text)

    def _ends(self) -> bool:
        """Whether the list or dictionary ends here; its end is passed."""
        if self._data[self.at : self.at + 1] != b"e":
            return False
        self.at += 1
        return True

    def refuse(self, why: str) -> NoReturn:
        raise Corrupt(f"what was sent is not canonical bencoding: at byte {self.at}, {why}")
