"""Selectors: hosts by where they stand. `zone=a,rack=r1` means both; a key that is named twice means either value."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from p2pdist.model.errors import UsageError
from tracker.core.host import Host

KEYS = ("zone", "rack", "host")
TERMS_MAX = 64


@dataclass(frozen=True, slots=True)
class Selector:
    """Values that are allowed, by key; a key without values allows all."""

    zones: frozenset[str] = frozenset()
    racks: frozenset[str] = frozenset()
    hosts: frozenset[str] = frozenset()

    def matches(self, host: Host) -> bool:
        """Whether the host stands where the selector says."""
        return (
            (not self.zones or host.zone in self.zones)
            and (not self.racks or host.rack in self.racks)
            and (not self.hosts or host.name in self.hosts)
        )


def parse_selector(text: str | Mapping[str, str]) -> Selector:
    """A selector as text, `key=value` with commas between, or as a JSON object. Raises UsageError."""
    terms = list(_terms(text) if isinstance(text, str) else text.items())
    if not 0 < len(terms) <= TERMS_MAX:
        raise UsageError(f"a selector has from 1 to {TERMS_MAX} terms, not {len(terms)}")
    found: dict[str, set[str]] = {key: set() for key in KEYS}
    for key, value in terms:
        if key not in found or not value or any(mark.isspace() for mark in value):
            raise UsageError(
                f"{f'{key}={value}'[:200]!r} selects nothing",
                remedy=f"Write key=value with commas between; keys are {', '.join(KEYS)}",
            )
        found[key].add(value)
    return Selector(*(frozenset(found[key]) for key in KEYS))


def _terms(text: str) -> Iterable[tuple[str, str]]:
    for term in text.split(","):
        key, _, value = term.strip().partition("=")
        yield key.strip(), value.strip()
