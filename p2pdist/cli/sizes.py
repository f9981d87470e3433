"""Sizes as people write them: 200GiB, 1.5TB, 4096."""

from __future__ import annotations

from p2pdist.model.errors import UsageError

_UNITS = {
    "": 1,
    "K": 1000,
    "M": 1000**2,
    "G": 1000**3,
    "T": 1000**4,
    "KI": 1 << 10,
    "MI": 1 << 20,
    "GI": 1 << 30,
    "TI": 1 << 40,
}


def parse_size(text: str) -> int:
    """Bytes of a size such as 200GiB, 1.5TB or 4096, at least 1. Raises UsageError."""
    number = text.strip().rstrip("BKMGTIbkmgti ")
    unit = text.strip()[len(number) :].strip().upper().removesuffix("B")
    try:
        size = int(float(number) * _UNITS[unit])
    except (ValueError, KeyError, OverflowError):
        size = 0
    if size <= 0:
        raise UsageError(f"{text!r} is not a size", remedy="Write a number and a unit, such as 200GiB")
    return size
