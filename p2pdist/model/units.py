"""Sizes, rates and durations as people write them: 200GiB, 300MB/s, 2h."""

from __future__ import annotations

import re

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
_BITS = re.compile(r"([0-9.]+) ?([KMGT]?)bit/s\Z", re.IGNORECASE)
_UNCLEAR = re.compile(r"([0-9.]+) ?([KMGTkmgt]?)([Ii]?)b(?:/s)?\Z")
"""A lower-case b stands for bits as often as for bytes."""

_DURATION = re.compile(r"([0-9]+(?:\.[0-9]+)?)([smhd])")
_SECONDS = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}


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


def parse_rate(text: str) -> float:
    """Bytes per second of a rate such as 300MB/s, 1GiB/s or 25Gbit/s, more than 0. Raises
    UsageError. A lower-case b is taken for bytes: see `doubt_of_rate`."""
    bits = _BITS.match(text.strip())
    try:
        rate = parse_size(f"{bits[1]}{bits[2].upper()}B" if bits else text.strip().removesuffix("/s"))
    except UsageError:
        raise UsageError(
            f"{text!r} is no rate", remedy="Write a number and a unit, such as 300MB/s or 10Gbit/s"
        ) from None
    return rate / (8 if bits else 1)


def doubt_of_rate(text: str) -> str:
    """What its author should hear of a rate with a lower-case b, such as 10Gb/s; empty for a rate
    that leaves no doubt, and for none. Earlier versions took it for bytes, and settings of fleets
    that run rely on that."""
    if not (unclear := _UNCLEAR.match(text.strip())):
        return ""
    number, prefix, binary = unclear[1], unclear[2].upper(), unclear[3].lower()
    return (
        f"{text.strip()[:100]!r} may be bits or bytes and is taken for bytes. Write {number}{prefix}{binary}B/s, or "
        f"{number}{prefix}bit/s for bits"
    )


def parse_duration(text: str) -> float:
    """Seconds of a time such as 90s, 10m, 1h30m or 1d, more than 0. Raises UsageError."""
    parts = _DURATION.findall(text.strip())
    seconds = sum(float(number) * _SECONDS[unit] for number, unit in parts)
    if "".join(number + unit for number, unit in parts) != text.strip() or seconds <= 0:
        raise UsageError(
            f"{text[:100]!r} is not a time", remedy="Write a number and a unit, such as 90s, 10m, 1h30m or 1d"
        )
    return seconds
