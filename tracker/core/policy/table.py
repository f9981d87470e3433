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

Patterns of package references, as in fnmatch: `*` stands for anything, `?` for one character,
`[abc]` for one of them.

A reference reads `name:tag`. One by digest has no tag: it is matched as `name:`, as
`name@sha256:<hex>`, and as each tag that the tracker knows to lead there, so that `trainer:*` holds
for a preseed, too, which names its package by digest. Patterns are ASCII without white space, since
references are.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any

from p2pdist.model.errors import UsageError
from p2pdist.model.image import parse_image
from p2pdist.model.manifest import Reference, parse_reference
from p2pdist.model.policy import PATTERN_CHARACTERS_MAX, PackagePolicy
from tracker.core.policy.budget import SITES_MAX, Budget, SiteBudget, read_sites
from tracker.core.policy.rules import Cache, Lazy, PriorityRule, Rates, Readers, Rule, Sites, TransportRule, Zones
from tracker.core.policy.section import SHOWN_MAX, Mistake, Section
from tracker.core.policy.warm import Warm

_PATTERN = re.compile(r"[A-Za-z0-9._/:@*?\[\]!-]+\Z")


def parse_pattern(text: str) -> str:
    """Raises UsageError for what no reference could match."""
    if not _PATTERN.match(text) or len(text) > PATTERN_CHARACTERS_MAX:
        raise UsageError(f"{text[:80]!r} matches no reference", remedy='Write one such as "team/trainer:*"')
    if not any(mark in text for mark in "*?["):
        registry, slash, rest = text.partition("/")
        port = bool(slash) and ":" in registry
        if ":" not in (rest if port else text):
            raise UsageError(f"{text!r} names no tag", remedy=f'Write "{text}:*" for all its tags')
        if port:
            parse_image(f"docker://{text}")
        else:
            parse_reference(text)
    return text


def matches(pattern: str, names: Iterable[str]) -> bool:
    """Whether the pattern matches any of a package's names."""
    return any(fnmatchcase(name, pattern) for name in names)


def names_of(reference: Reference) -> tuple[str, ...]:
    """What a reference is matched as, apart from tags that lead to its digest."""
    return (str(reference), f"{reference.name}:") if reference.digest is not None else (str(reference),)


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
    lazy: Lazy = field(default_factory=Lazy)
    sites: Sites = field(default_factory=Sites)
    budget: Budget = field(default_factory=Budget)

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
            Lazy.read(section),
            Sites.read(section),
            Budget.read(section),
        )
        section.end()
        return policy

    @property
    def rules(self) -> tuple[Rule, ...]:
        told = self.priority, self.rates, self.transport, self.cache, self.lazy
        return (*told, self.readers, self.zones, self.sites, self.budget, self.warm)

    def for_agents(self) -> PackagePolicy:
        """What agents are told of a package of this policy."""
        combined = PackagePolicy(self.match)
        for rule in self.rules:
            combined = rule.extend(combined)
        return combined


@dataclass(frozen=True)
class PolicyTable:
    """Policies in the order of their file, and the budgets of sites by name."""

    policies: tuple[Policy, ...] = ()
    budgets: Mapping[str, SiteBudget] = field(default_factory=dict)

    def find(self, names: Iterable[str]) -> Policy | None:
        """The first policy that matches any of a package's names."""
        known = tuple(names)
        return next((policy for policy in self.policies if matches(policy.match, known)), None)


def read_table(document: Mapping[str, Any]) -> tuple[PolicyTable, list[Mistake]]:
    """The policies of a file's document, and what is wrong with it: with any mistake the table is
    not to be used."""
    mistakes: list[Mistake] = []
    whole = Section("", document, mistakes)
    tables, sites = whole.tables("policy"), whole.tables("site")
    whole.end()
    if len(sites) > SITES_MAX:
        whole.wrong("site", f"there are {len(sites)} sites with a budget", f"There may be {SITES_MAX}")
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
    return PolicyTable(tuple(found), read_sites(sites, mistakes)), mistakes


def _check_warm(policy: Policy, before: list[Policy], section: Section) -> None:
    """A tag that is kept warm goes by the policy that says so, or by another that says how: a
    reader must not have to guess which."""
    for tag in policy.warm.tags:
        holder = PolicyTable((*before, policy)).find([tag])
        if holder is not policy and policy.match:
            why = f"the policy {holder.match!r} holds for {tag}" if holder else f"{policy.match!r} does not match {tag}"
            section.wrong("warm.tags", why, "Put it into the policy that holds for it")
