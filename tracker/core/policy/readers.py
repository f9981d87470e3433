"""Readers: how many leases on the origin all blobs of a policy's packages may hold together, in all
zones.

A blob of several packages goes by the first policy in the file that limits one of them. A limit
below the number of a blob's stripes makes stripes wait for each other.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

from tracker.core.policy.rule import Rule
from tracker.core.policy.section import Section

READERS_MAX = 100_000


@dataclass(frozen=True)
class Readers(Rule):
    """`readers = 4`; None for no limit but the tracker's own."""

    readers: int | None = None

    @classmethod
    def read(cls, section: Section) -> Self:
        return cls(section.number("readers", 1, READERS_MAX))
