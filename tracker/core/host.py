"""What the tracker knows of one host."""

from __future__ import annotations

from dataclasses import dataclass, field

from p2pdist.model.digest import Digest

BLAMERS_MIN = 2
"""So many hosts must blame a host before it is shunned: one alone may be at fault itself."""


@dataclass(slots=True)
class Host:
    """One host: where others reach it, its session (None while absent) and who blames it for what."""

    name: str
    address: str = ""
    zone: str = ""
    rack: str = ""
    session: int | None = None
    absent_since: float | None = None
    swarms: dict[Digest, None] = field(default_factory=dict)
    blamed: dict[str, str] = field(default_factory=dict)

    @property
    def shunned(self) -> bool:
        """Whether several hosts found it sending wrong bytes or refusing to serve."""
        return len(self.blamed) >= BLAMERS_MIN
