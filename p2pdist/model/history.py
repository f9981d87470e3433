"""The history of a fleet: what a tracker remembers of hosts, pulls, broadcasts and settings, as its
core makes it, its database keeps it and its API gives it.

A record says one thing that has happened, in one line of text, and the fields by which it is found.
Durations and moments within a broadcast are in seconds from its beginning; times of day are seconds
since the epoch by the tracker's clock.
"""

from __future__ import annotations

from typing import Annotated, Literal, get_args

import msgspec
from msgspec import Meta

from p2pdist.model.errors import UsageError
from p2pdist.model.units import parse_duration

HistoryKind = Literal[
    "host-lost",
    "host-back",
    "host-slow",
    "wrong-bytes",
    "clock-off",
    "pull-failed",
    "broadcast",
    "preseed-failed",
    "origin",
    "site",
    "change",
]
"""A host ended without saying so; a lost host has come back; a host has a slow link; a host sent
another wrong bytes; the clock of a host is off; a host could not pull something; many hosts have
received a package; a preseed failed; the origin cannot be read, or can again; a site waits with
what comes over its WAN, or goes on; a setting of the tracker changed."""

HOST_KINDS: tuple[HistoryKind, ...] = ("host-lost", "host-back", "clock-off")
"""These say of hosts alone, and nothing of packages."""

KINDS: tuple[HistoryKind, ...] = get_args(HistoryKind)

HEX_SHOWN = 12
"""Digits of a digest that people are shown."""

HEX_MIN = 6
"""Digits of a digest by which one may be asked for."""

TEXT_CHARACTERS_MAX = 700
PACKAGE_CHARACTERS_MAX = 512
RECORDS_PER_PAGE_MAX = 1000
_LONE_BLOB = "blob:sha256-"


class Straggler(msgspec.Struct, frozen=True, omit_defaults=True):
    """A host that took much longer than the others, or did not get everything. `joined_s` after
    the beginning it joined; `seconds` later it had everything, None where it never had. `reason`:
    what held it up, "unknown" where the tracker does not know."""

    host: str
    reason: str
    joined_s: float = 0.0
    seconds: float | None = None


class Broadcast(msgspec.Struct, frozen=True, omit_defaults=True):
    """How many hosts received a package, or a blob of none, at about the same time.

    `hosts` lacked something when they joined, `complete` of them got everything. `seconds` is the
    time from the first join to the last completion; `to_50_s`, `to_99_s` and `to_100_s` the time
    until that share of `hosts` was complete, None where it never was; `own_p50_s` and `own_p99_s`
    the percentiles of the hosts' own times, each from its own join.

    `wanted_bytes` is what the hosts lacked together, `origin_bytes` what those with a lease read
    of the origin as they reported it; `origin_copies` is that over the blobs' `bytes`, None where
    hosts read the origin by BitTorrent and no tracker hears how much. `bound_s` is the time that no
    distribution can beat, as far as rates are known, and `ratio` is `seconds` over it; None where
    no rate is known. `unknown` names the terms of the bound that are not known.

    `curve` has moments and how many hosts were complete then. `stragglers` are those that never
    were complete, then the slowest, `stragglers_more` how many are left out. `resumed` hosts came
    with a part of it: the beginning may be that of the tracker, not of the broadcast."""

    blobs: int
    bytes: int
    hosts: int
    complete: int
    seconds: float
    wanted_bytes: int = 0
    to_50_s: float | None = None
    to_99_s: float | None = None
    to_100_s: float | None = None
    own_p50_s: float | None = None
    own_p99_s: float | None = None
    origin_bytes: int = 0
    origin_copies: float | None = None
    bound_s: float | None = None
    ratio: float | None = None
    unknown: tuple[str, ...] = ()
    curve: tuple[tuple[float, int], ...] = ()
    stragglers: tuple[Straggler, ...] = ()
    stragglers_more: int = 0
    resumed: int = 0


class Event(msgspec.Struct, frozen=True, omit_defaults=True):
    """What the core of a tracker reports: `text` is all of it in one line. `package` is a
    reference, with its tag where that is known (an image's without docker://), and `digest` its
    manifest, or the blob where no package is known. `address` is where a host was reached last;
    `began_s` ago it began (a host was lost, a pull failed, a broadcast began)."""

    kind: HistoryKind
    text: str
    package: str = ""
    digest: str = ""
    host: str = ""
    zone: str = ""
    address: str = ""
    reason: str = ""
    began_s: float = 0.0
    broadcast: Broadcast | None = None
    key: str = ""
    """Names what happened where several trackers report the same; empty where only one does."""


class HistoryRecord(msgspec.Struct, frozen=True, omit_defaults=True):
    """An event as it is kept: `number` grows with each one, `at` is when it was reported and
    `since` when it began, in seconds since the epoch; `tracker` is the one that reports it, empty
    where there is one tracker."""

    number: int
    at: float
    since: float
    tracker: str
    event: Event


class HistoryPage(msgspec.Struct, frozen=True):
    """Records, the newest first. `next`: what to give as `before` for older ones, 0 where there are
    none."""

    records: list[HistoryRecord]
    next: int = 0


class HistoryFilter(msgspec.Struct, frozen=True):
    """Which records are asked for: all that is given must match. `package` is a reference, a name
    without a tag, or a digest or its beginning; `since` is in seconds since the epoch; `before`
    leaves out that number and higher ones."""

    kinds: tuple[HistoryKind, ...] = ()
    package: str = ""
    host: str = ""
    since: float = 0.0
    before: int = 0
    limit: Annotated[int, Meta(ge=1, le=RECORDS_PER_PAGE_MAX)] = 100
    meaning: str = ""
    """The digest that `package`, a tag, names: preseeds, and trackers that were asked for no tag,
    report the package by it."""


def parse_kinds(text: str) -> tuple[HistoryKind, ...]:
    """Kinds from a list with commas. Raises UsageError."""
    names = [name.strip() for name in text.split(",") if name.strip()]
    kinds = tuple(kind for kind in KINDS if kind in names)
    if wrong := [name for name in names if name not in KINDS]:
        raise UsageError(f"there is no kind of event {wrong[0][:40]!r}", remedy=f"Write some of {', '.join(KINDS)}")
    return kinds


def parse_since(text: str, *, now: float) -> float:
    """A moment, as seconds since the epoch or as a time ago such as 2h. Raises UsageError."""
    try:
        moment = float(text)
    except ValueError:
        return now - parse_duration(text)
    if not 0 <= moment < 1e12:
        raise UsageError(f"{text[:40]!r} is no time", remedy="Write a time ago such as 2h, or seconds since the epoch")
    return moment


def short_name(package: str, digest: str) -> str:
    """How people are shown a package or blob: by its tag, or by its name and 12 digits of its
    digest."""
    name, _, pinned = package.partition("@")
    digits = (pinned or digest).partition(":")[2][:HEX_SHOWN]
    if name.startswith(_LONE_BLOB):  # a blob that was pushed alone
        return f"blob {name.removeprefix(_LONE_BLOB)[:HEX_SHOWN]}"
    if not name:
        return digits or "something"
    return f"{name}@{digits}" if digits and ":" not in name.rpartition("/")[2] else name


def digest_prefix(text: str) -> str:
    """The digest or beginning of one that a text may mean, "" where it cannot be one."""
    hexadecimal = text.partition("@")[2] or text
    hexadecimal = hexadecimal.removeprefix("sha256:")
    usable = HEX_MIN <= len(hexadecimal) <= 64 and all(char in "0123456789abcdef" for char in hexadecimal)
    return f"sha256:{hexadecimal}" if usable else ""
