"""Budgets of the WAN of sites: what `[[site]]` tables say, and the key `budget` of policies, which
says for which packages no budget holds.

[[site]]
name = "west"
rate = "200MB/s"
hourly = "100GB"
hours = ["22:00-06:00"]

A site is one that agents name (--site). What counts is what its hosts receive from other sites, and
what they read of the origin unless the table says that the origin is near.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from math import inf
from typing import Any, Literal, Self, cast, get_args

from p2pdist.model.messages import Priority
from p2pdist.model.policy import RATE_BYTES_S_MAX
from p2pdist.model.units import parse_rate, parse_size
from tracker.core.policy.rules import Rule
from tracker.core.policy.section import SHOWN_MAX, Mistake, Section, quoted

SITES_MAX = 64
"""Sites with a budget; metrics have a series for each."""

HOURS_MAX = 8
HOURLY_BYTES_MAX = 1 << 60
HOUR_S, DAY_S = 3600.0, 86400
EXAMPLE = '["22:00-06:00"]'

_hours = re.compile(r"([01][0-9]|2[0-3]):([0-5][0-9])-([01][0-9]|2[0-3]):([0-5][0-9])\Z")

Keeps = Literal["keep", "ignore-starts", "ignore"]
"""A package keeps to the budgets of sites; does so but while a start waits for it; never does."""


@dataclass(frozen=True)
class Budget(Rule):
    """`budget = "keep"`, `"ignore-starts"` or `"ignore"`: whether packages of a policy keep to the
    budgets of sites. Those that do not are counted all the same."""

    keeps: Keeps = "keep"

    @classmethod
    def read(cls, section: Section) -> Self:
        return cls(cast("Keeps | None", section.choice("budget", get_args(Keeps))) or "keep")

    def ignores(self, priority: Priority) -> bool:
        """Whether a swarm of this priority goes on whatever the budget."""
        return self.keeps == "ignore" or (self.keeps == "ignore-starts" and priority == "start")


@dataclass(frozen=True)
class Hours:
    """A time of day, UTC, in seconds since midnight; one that ends before it begins goes over
    midnight."""

    begin_s: int
    end_s: int

    def covers(self, utc_s: float) -> bool:
        """Whether a moment, in seconds since the epoch, is within."""
        at_s = utc_s % DAY_S
        if self.begin_s < self.end_s:
            return self.begin_s <= at_s < self.end_s
        return at_s >= self.begin_s or at_s < self.end_s

    def __str__(self) -> str:
        return "-".join(f"{at_s // 3600:02d}:{at_s % 3600 // 60:02d}" for at_s in (self.begin_s, self.end_s))


@dataclass(frozen=True)
class SiteBudget:
    """What may come to a site over its WAN: bytes a second and bytes within any hour, None for no
    limit, and at which hours of the day; none: at all. `counts_origin`: what its hosts read of the
    origin counts too."""

    name: str
    rate_bytes_s: float | None = None
    hourly_bytes: int | None = None
    hours: tuple[Hours, ...] = ()
    counts_origin: bool = True

    @property
    def usual_bytes_s(self) -> float:
        """What comes to the site in a second at most, over hours; infinity where it has hours
        alone."""
        hourly = self.hourly_bytes / HOUR_S if self.hourly_bytes is not None else inf
        return min(hourly, self.rate_bytes_s if self.rate_bytes_s is not None else inf)

    def open_at(self, utc_s: float) -> bool:
        """Whether the WAN may be used at this hour."""
        return not self.hours or any(hours.covers(utc_s) for hours in self.hours)

    @classmethod
    def read(cls, section: Section) -> SiteBudget:
        """The budget that a table states; mistakes are noted in the section."""
        name = section.text("name", 'Write the name as agents give it with --site, such as name = "west"')
        if not section.has("name"):
            section.wrong("name", "it is missing", 'Say which site it is: name = "west"')
        elif name is not None and (not 0 < len(name) <= 255 or any(mark.isspace() for mark in name)):
            section.wrong("name", f"{name[:SHOWN_MAX]!r} is the name of no site", "Write it as agents do with --site")
        rate_bytes_s = section.parsed("rate", parse_rate, "200MB/s")
        if rate_bytes_s is not None and rate_bytes_s > RATE_BYTES_S_MAX:
            section.wrong("rate", "no WAN is so fast", "Leave it out for no limit")
        hourly_bytes = section.parsed("hourly", parse_size, "100GB")
        if hourly_bytes is not None and hourly_bytes > HOURLY_BYTES_MAX:
            section.wrong("hourly", "nothing sends so much in an hour", "Leave it out for no limit")
        hours = _read_hours(section)
        near = section.choice("origin", ("near", "far")) == "near"
        if not any(map(section.has, ("rate", "hourly", "hours"))):
            section.wrong("rate", "it limits nothing", 'Write rate = "200MB/s", hourly = "100GB" or hours')
        section.end()
        return cls(name or "", rate_bytes_s, hourly_bytes, hours, not near)


def _read_hours(section: Section) -> tuple[Hours, ...]:
    hours = []
    for text in section.texts("hours", HOURS_MAX, EXAMPLE) or ():
        match = _hours.match(text)
        if match is None:
            section.wrong("hours", f"{text[:SHOWN_MAX]!r} is no time of day", f"Write UTC, such as {EXAMPLE}")
            continue
        begin, begin_minute, end, end_minute = map(int, match.groups())
        hours.append(Hours(begin * 3600 + begin_minute * 60, end * 3600 + end_minute * 60))
        if hours[-1].begin_s == hours[-1].end_s:
            section.wrong("hours", f"{text} has no end", "Leave hours out for the whole day")
    return tuple(hours)


def read_sites(tables: list[dict[str, Any]], mistakes: list[Mistake]) -> Mapping[str, SiteBudget]:
    """The budgets that a document states, by site."""
    budgets: dict[str, SiteBudget] = {}
    for number, values in enumerate(tables[:SITES_MAX], start=1):
        said = values.get("name")
        named = f" ({said[:SHOWN_MAX]})" if isinstance(said, str) else ""
        section = Section(f"[[site]] {number}{named}", values, mistakes)
        budget = SiteBudget.read(section)
        if budget.name in budgets:
            section.wrong("name", f"there is a table for {quoted(budget.name)} already", "Join the two")
        budgets[budget.name] = budget
    return budgets
