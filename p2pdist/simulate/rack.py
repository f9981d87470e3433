"""Racks: a shared uplink and a shared downlink each, through which everything passes that crosses
the rack's boundary."""

from __future__ import annotations


class Rack:
    """One rack. `bytes_s` is the rate of each direction, 0 for no limit; `bytes_in` and `bytes_out`
    count what has crossed its boundary.

    Like a host's link each direction is first come, first served and cut through: a block passes
    while it comes in, when nothing else is in its way.
    """

    __slots__ = ("bytes_in", "bytes_out", "bytes_s", "down_free_at", "name", "up_free_at")

    def __init__(self, name: str, bytes_s: float) -> None:
        self.name, self.bytes_s = name, bytes_s
        self.up_free_at = self.down_free_at = 0.0
        self.bytes_in = self.bytes_out = 0

    def leave(self, now: float, length: int) -> float:
        """When a block that has just come from a host of the rack has passed the rack's uplink."""
        self.bytes_out += length
        if not self.bytes_s:
            return now
        self.up_free_at = max(now, self.up_free_at + length / self.bytes_s)
        return self.up_free_at

    def enter(self, now: float, length: int) -> float:
        """When a block that has just come from outside has passed the rack's downlink."""
        self.bytes_in += length
        if not self.bytes_s:
            return now
        self.down_free_at = max(now, self.down_free_at + length / self.bytes_s)
        return self.down_free_at
