"""Selectors of hosts by zone, rack, name and site. `zone=a,rack=r1` means both; a key that is named
twice means either value."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from itertools import islice

from p2pdist.model.errors import UsageError
from tracker.core.host import Host

KEYS = ("zone", "rack", "host", "site")
TERMS_MAX = 64
NAMES_SHOWN_MAX = 12
NAMES_COMPARED_MAX = 2000
"""Names that are compared with an unknown one; more would keep the tracker from its sessions."""


@dataclass(frozen=True, slots=True)
class Selector:
    """Values that are allowed, by key; a key without values allows all."""

    zones: frozenset[str] = frozenset()
    racks: frozenset[str] = frozenset()
    hosts: frozenset[str] = frozenset()
    sites: frozenset[str] = frozenset()
    """A zone that names no site is a site by itself."""

    def __str__(self) -> str:
        values = zip(KEYS, (self.zones, self.racks, self.hosts, self.sites), strict=True)
        return ",".join(f"{key}={value}" for key, allowed in values for value in sorted(allowed)[:NAMES_SHOWN_MAX])

    def matches(self, host: Host) -> bool:
        """Whether the host has one of the values of each key."""
        return (
            (not self.zones or host.zone in self.zones)
            and (not self.racks or host.rack in self.racks)
            and (not self.hosts or host.name in self.hosts)
            and (not self.sites or (host.site or host.zone) in self.sites)
        )


def no_match(selector: Selector, hosts: Iterable[Host]) -> str:
    """A sentence for people: no host matches the selector, and which of its values no host has."""
    connected = list(hosts)
    parts = [f"no host has {selector}"]
    for key, selected, present in (
        ("zone", selector.zones, {host.zone for host in connected}),
        ("rack", selector.racks, {host.rack for host in connected}),
        ("host", selector.hosts, {host.name for host in connected}),
        ("site", selector.sites, {host.site or host.zone for host in connected}),
    ):
        if selected and selected.isdisjoint(present):
            values = sorted(present - {""})
            what = ", ".join(values[:NAMES_SHOWN_MAX]) + (" and others" if len(values) > NAMES_SHOWN_MAX else "")
            guess = near(min(selected), present)
            parts += [f"{key}s here: {what or 'none'}"] if key != "host" else []
            parts += [f"did you mean {guess}?"] if guess else []
    return "; ".join(parts)


def near(name: str, names: Iterable[str]) -> str:
    """The one of `names` that is most like an unknown `name`; empty where none is like it."""
    alike = (candidate for candidate in names if abs(len(candidate) - len(name)) <= 2)
    matches = get_close_matches(name, islice(alike, NAMES_COMPARED_MAX), n=1, cutoff=0.75)
    return matches[0] if matches else ""


def parse_selector(text: str | Mapping[str, str]) -> Selector:
    """A selector as text, `key=value` with commas between, or as a JSON object. Raises
    UsageError."""
    terms = list(_terms(text) if isinstance(text, str) else text.items())
    if not 0 < len(terms) <= TERMS_MAX:
        raise UsageError(f"a selector has from 1 to {TERMS_MAX} terms, not {len(terms)}")
    values: dict[str, set[str]] = {key: set() for key in KEYS}
    for key, value in terms:
        if key not in values or not value or any(mark.isspace() for mark in value):
            raise UsageError(
                f"{f'{key}={value}'[:200]!r} selects nothing",
                remedy=f"Write key=value with commas between; keys are {', '.join(KEYS)}",
            )
        values[key].add(value)
    return Selector(*(frozenset(values[key]) for key in KEYS))


def _terms(text: str) -> Iterable[tuple[str, str]]:
    for term in text.split(","):
        key, _, value = term.strip().partition("=")
        yield key.strip(), value.strip()
