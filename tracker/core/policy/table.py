"""The table of policies: patterns of package references, each with its rules; the first that
matches holds, and alone.

[[policy]]
match = "team/trainer:*"
priority = "start"
transport = "trees"
readers = 8

[[policy]]
match = "datasets/*"
download = "500MB/s"
ttl = "2h"
zones = ["eu-1"]
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from p2pdist.model.policy import PackagePolicy
from tracker.core.policy.cache import Cache
from tracker.core.policy.pattern import matches, parse_pattern
from tracker.core.policy.priority import PriorityRule
from tracker.core.policy.rates import Rates
from tracker.core.policy.readers import Readers
from tracker.core.policy.rule import Rule
from tracker.core.policy.section import SHOWN_MAX, Mistake, Section
from tracker.core.policy.transport import TransportRule
from tracker.core.policy.warm import Warm
from tracker.core.policy.zones import Zones

POLICIES_MAX = 1000


@dataclass(frozen=True)
class Policy:
    """What holds for packages whose reference matches `match`."""

    match: str
    priority: PriorityRule = field(default_factory=PriorityRule)
    rates: Rates = field(default_factory=Rates)
    transport: TransportRule = field(default_factory=TransportRule)
    cache: Cache = field(default_factory=Cache)
    readers: Readers = field(default_factory=Readers)
    zones: Zones = field(default_factory=Zones)
    warm: Warm = field(default_factory=Warm)

    @classmethod
    def read(cls, section: Section) -> Policy:
        """The policy that a table states; mistakes are noted in the section."""
        match = section.parsed("match", parse_pattern, "trainer:*")
        if not section.has("match"):
            section.wrong("match", "it is missing", 'Say for which packages it is: match = "trainer:*"')
        policy = cls(
            match or "",
            PriorityRule.read(section),
            Rates.read(section),
            TransportRule.read(section),
            Cache.read(section),
            Readers.read(section),
            Zones.read(section),
            Warm.read(section),
        )
        section.end()
        return policy

    @property
    def rules(self) -> tuple[Rule, ...]:
        return (self.priority, self.rates, self.transport, self.cache, self.readers, self.zones, self.warm)

    def told(self) -> PackagePolicy:
        """What agents are told of a package of this policy."""
        told = PackagePolicy(self.match)
        for rule in self.rules:
            told = rule.told(told)
        return told


@dataclass(frozen=True)
class PolicyTable:
    """Policies in the order of their file."""

    policies: tuple[Policy, ...] = ()

    def find(self, names: Iterable[str]) -> Policy | None:
        """The first policy that matches any of a package's names."""
        known = tuple(names)
        return next((policy for policy in self.policies if matches(policy.match, known)), None)


def read_table(document: Mapping[str, Any]) -> tuple[PolicyTable, list[Mistake]]:
    """The policies of a file's document, and what is wrong with it: with any mistake the table is
    not to be used."""
    mistakes: list[Mistake] = []
    whole = Section("", document, mistakes)
    tables = whole.tables("policy")
    whole.end()
    if len(tables) > POLICIES_MAX:
        whole.wrong("policy", f"there are {len(tables)} policies", f"Join some; there may be {POLICIES_MAX}")
    found: list[Policy] = []
    for number, values in enumerate(tables[:POLICIES_MAX], start=1):
        match = values.get("match")
        name = f"[[policy]] {number}" + (f" ({match[:SHOWN_MAX]})" if isinstance(match, str) else "")
        section = Section(name, values, mistakes)
        policy = Policy.read(section)
        shadow = next((each for each in found if each.match in (policy.match, "*")), None)
        if shadow is not None and policy.match:
            section.wrong("match", f"the policy {shadow.match!r} before it holds already", "Remove it, or put it first")
        _check_warm(policy, found, section)
        found.append(policy)
    return PolicyTable(tuple(found)), mistakes


def _check_warm(policy: Policy, before: list[Policy], section: Section) -> None:
    """A tag that is kept warm goes by the policy that says so, or by another that says how: a
    reader must not have to guess which."""
    for tag in policy.warm.tags:
        holder = PolicyTable((*before, policy)).find([tag])
        if holder is not policy and policy.match:
            why = f"the policy {holder.match!r} holds for {tag}" if holder else f"{policy.match!r} does not match {tag}"
            section.wrong("warm.tags", why, "Put it into the policy that holds for it")
