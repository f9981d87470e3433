"""The scrub of a store: everything is read once a period and compared with its name.

A round goes over parts of the store in an order that stays the same: what is pinned first, then by
name. Where a round stands is a value (`Round`), which the agent writes down now and then, so a
round outlasts restarts. A part that is pinned or arrives behind the place where the round is has
its turn in the next round. Reading is slow enough to leave the disk to pulls, and fast enough that
a round ends in half its period.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

RATE_MIN_BYTES_S, RATE_MAX_BYTES_S = 4 << 20, 64 << 20
BEGIN_S_MAX = 600.0
"""So long after the start of the agent the first round of a store begins, at the latest."""

BUSY_PAUSE_S = 1.0
"""How long the scrub stands still before it looks again whether pulls run."""

LATEST_S = 3600.0
"""A round that is due is looked for at least so often: a clock may be set."""


@dataclass(frozen=True, slots=True)
class Part:
    """What is read in one go, and continued after a restart from its beginning."""

    name: str
    """A blob's digest, or the directory of some objects."""
    pinned: bool = False

    @property
    def key(self) -> str:
        """Its place in the order."""
        return f"{'0' if self.pinned else '1'} {self.name}"


@dataclass(frozen=True, slots=True)
class Round:
    """One reading of everything, under way or ended. Times are in seconds since the epoch."""

    began: float
    ended: float = 0.0
    """0 while it is under way."""
    after: str = ""
    """The key of the last part that was read."""
    checked: int = 0
    bytes_checked: int = 0
    wrong: int = 0


@dataclass(frozen=True, slots=True)
class Rest:
    """Nothing is to be read for so many seconds."""

    seconds: float


@dataclass(frozen=True, slots=True)
class Read:
    """Read this part next."""

    part: Part


class Scrub:
    """What is read next. `period_s` is 0 for never; `last` is the round that was written down
    last."""

    def __init__(self, period_s: float, last: Round | None, *, now: float) -> None:
        self.period_s = period_s
        first = now - period_s + min(BEGIN_S_MAX, period_s / 10)  # so that the first one is due soon
        # One that began in the future was written down under another clock.
        self.round = last if last is not None and last.began <= now else Round(first, ended=first)

    @property
    def running(self) -> bool:
        """Whether a round is under way."""
        return self.period_s > 0 and not self.round.ended

    def next(self, parts: Iterable[Part], *, now: float) -> Rest | Read:
        """What to do now; `parts` are those that there are."""
        if not self.period_s:
            return Rest(LATEST_S)
        if self.round.ended:
            due_s = self.round.began + self.period_s - now
            if 0 < due_s <= self.period_s:
                return Rest(min(due_s, LATEST_S))
            self.round = Round(began=now)
        left = [part for part in parts if part.key > self.round.after]
        if left:
            return Read(min(left, key=lambda part: part.key))
        self.round = replace(self.round, ended=now)
        return Rest(min(max(0.0, self.round.began + self.period_s - now), LATEST_S))

    def read(self, part: Part, *, checked: int, bytes_checked: int, wrong: int) -> None:
        """A part was read: so many things of so many bytes, of which so many were wrong."""
        last = self.round
        self.round = replace(
            last,
            after=part.key,
            checked=last.checked + checked,
            bytes_checked=last.bytes_checked + bytes_checked,
            wrong=last.wrong + wrong,
        )

    def pause_s(self, bytes_read: int, bytes_total: int) -> float:
        """How long to wait after so many bytes of a store of `bytes_total`."""
        rate = 2 * bytes_total / self.period_s if self.period_s else 0.0
        return bytes_read / min(max(rate, RATE_MIN_BYTES_S), RATE_MAX_BYTES_S)
