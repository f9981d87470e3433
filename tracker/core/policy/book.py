"""The book of policies: which hold now, and which blobs and tags are of which packages.

Theory. Policies are for packages, by reference; swarms and leases are of blobs. So the book notes
what tags turned out to mean and which blobs manifests name, as the tracker reads them for agents.
All of this is soft and bounded: what is forgotten, or was never read here, goes by no policy until
an agent asks for the package again.

A manifest has the names of the tags that lead, or led, to it. A blob may be of several packages:
hosts of a zone and site may have it when they may have one of these, and of the limits on readers
the one that stands first in the file holds.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field

from p2pdist.model.digest import Digest
from p2pdist.model.manifest import Reference
from p2pdist.model.messages import Holding, Priority
from p2pdist.model.policy import NO_POLICY, PackagePolicy
from tracker.core.policy.table import Policy, PolicyTable, names_of
from tracker.core.swarm import layout_of

MANIFESTS_MAX = 20_000
BLOBS_MAX = 200_000
READABLE_MAX = 400_000
"""Blobs and documents of which the names are remembered by which they may be read."""

NAMES_MAX = 64
"""Names by which one blob may be read; tags that are remembered of one manifest; and manifests of
one blob."""


@dataclass(slots=True)
class PolicyBook:
    """The policies in force, and what packages consist of. `problem`: why the policies that were
    written last are not in force, "" when they are."""

    table: PolicyTable = field(default_factory=PolicyTable)
    problem: str = ""
    _tags: OrderedDict[Digest, dict[Reference, None]] = field(default_factory=OrderedDict)
    _packages: OrderedDict[Digest, dict[Reference, None]] = field(default_factory=OrderedDict)
    _known: OrderedDict[Reference, None] = field(default_factory=OrderedDict)
    _found: dict[Reference, Policy | None] = field(default_factory=dict)
    _readable: OrderedDict[Digest, dict[str, None]] = field(default_factory=OrderedDict)
    """Names of packages by manifest, document and blob, as far as tags of them lead, or led, there.
    `bind`."""

    def replace(self, table: PolicyTable) -> None:
        """These policies hold from now on."""
        self.table, self.problem = table, ""
        self._found.clear()

    # -- what is of what

    def known(self, reference: Reference, digest: Digest) -> bool:
        """Whether it has been noted what `reference`, which means the manifest `digest`, consists
        of."""
        tags = self._tags.get(digest, {})
        return Reference(reference.name, digest=digest) in self._known and (
            reference.digest is not None or reference in tags
        )

    def note(self, reference: Reference, digest: Digest, blobs: Iterable[Digest]) -> None:
        """A reference turned out to mean the manifest `digest`, which consists of these blobs."""
        package = Reference(reference.name, digest=digest)
        if reference.digest is None:
            _note(self._tags, digest, reference, MANIFESTS_MAX)
            self._found.pop(package, None)
        self._known[package] = None
        for blob in blobs:
            for forgotten in _note(self._packages, blob, package, BLOBS_MAX):
                self._known.pop(forgotten, None)
        if len(self._known) > MANIFESTS_MAX:
            self._known.popitem(last=False)

    def title(self, blob: Digest) -> str:
        """What a blob is of, in words for operators: the tag that was asked for last of the package
        that was noted last, without a tag that package's name; "" for what is not known here."""
        return next((self.name_of(package) for package in self.packages_of(blob)), "")

    def packages_of(self, blob: Digest) -> list[Reference]:
        """The packages of a blob by digest, the one that was noted last first."""
        return list(reversed(self._packages.get(blob, {})))

    def name_of(self, package: Reference) -> str:
        """A package by the tag that was asked for last; without a tag its name."""
        tags = self._tags.get(package.digest, {}) if package.digest is not None else {}
        return str(next((tag for tag in reversed(tags) if tag.name == package.name), package.name))

    # -- rights to read

    def bind(self, name: str, manifest: Digest, parts: Iterable[Digest]) -> None:
        """A package of this name is known to be the manifest, which consists of these blobs and
        documents. The manifest is remembered as the first, and forgotten before its parts."""
        for digest in (manifest, *parts):
            names = self._readable.setdefault(digest, {})
            self._readable.move_to_end(digest)
            names.pop(name, None)
            names[name] = None
            if len(names) > NAMES_MAX:
                del names[next(iter(names))]
        while len(self._readable) > READABLE_MAX:
            self._readable.popitem(last=False)

    def readers_of(self, digest: Digest) -> Collection[str]:
        """Names of packages: an identity that may read one of these may read the manifest, document
        or blob. Empty for what is not known here."""
        return self._readable.get(digest, {}).keys()

    # -- what holds

    def of(self, reference: Reference) -> Policy | None:
        """The policy of a package."""
        if not self.table.policies:
            return None
        if reference not in self._found:
            if len(self._found) >= MANIFESTS_MAX:
                self._found.clear()
            tags = self._tags.get(reference.digest, {}) if reference.digest is not None else {}
            self._found[reference] = self.table.find([*names_of(reference), *map(str, tags)])
        return self._found[reference]

    def for_agents(self, reference: Reference, zone: str, site: str | None = None) -> PackagePolicy:
        """What an agent in `zone` and at `site` (None: it does not say) is told of a package.
        Raises Refused when it may not have it."""
        policy = self.of(reference)
        if policy is None:
            return NO_POLICY
        policy.zones.check(zone, str(reference), policy.match)
        if site is not None:
            policy.sites.check(site or zone, str(reference), policy.match)
        return policy.for_agents()

    def admit(self, zone: str, holding: Holding, site: str = "") -> None:
        """Raises Refused for a host in `zone` and at `site` (empty: that of its zone) that wants a
        blob of which it may have no package. A host that holds all of it may give it."""
        packages = self._packages.get(holding.blob)
        if not self.table.policies or packages is None or len(packages) >= NAMES_MAX:
            return  # of a blob that so many packages have not all are remembered
        if sum(holding.counts) >= layout_of(holding).count:
            return
        at = site or zone
        refusing = [
            policy
            for policy in map(self.of, packages)
            if policy is not None and not (policy.zones.allow(zone) and policy.sites.allow(at))
        ]
        if len(refusing) == len(packages):
            refusing[0].zones.check(zone, holding.blob, refusing[0].match)
            refusing[0].sites.check(at, holding.blob, refusing[0].match)

    def limits_rate(self, blob: Digest) -> bool:
        """Whether a policy limits how fast hosts send or receive a blob, so that their pace says
        nothing of them."""
        if not self.table.policies:
            return False
        return any(policy is not None and policy.rates.any for policy in map(self.of, self._packages.get(blob, ())))

    def ignores_budget(self, blob: Digest, priority: Priority) -> bool:
        """Whether a swarm of a blob goes on whatever the budgets of sites say: the policy of a
        package that has it says so."""
        if not self.table.policies:
            return False
        policies = map(self.of, self._packages.get(blob, ()))
        return any(policy is not None and policy.budget.ignores(priority) for policy in policies)

    def readers(self, blob: Digest) -> tuple[str, int] | None:
        """The policy, by its pattern, that limits the leases on a blob, and to how many together
        with all others of that policy."""
        if not self.table.policies or blob not in self._packages:
            return None
        held = {policy.match for policy in map(self.of, self._packages[blob]) if policy is not None}
        for policy in self.table.policies if held else ():
            if policy.match in held and policy.readers.readers is not None:
                return policy.match, policy.readers.readers
        return None


def _note(
    table: OrderedDict[Digest, dict[Reference, None]], key: Digest, value: Reference, most: int
) -> list[Reference]:
    """Note one thing more of a key, forgetting the oldest over the limits; returns what was
    forgotten of some key."""
    known = table.setdefault(key, {})
    table.move_to_end(key)
    known[value] = None
    forgotten: list[Reference] = []
    if len(known) > NAMES_MAX:
        forgotten.append(next(iter(known)))
        del known[forgotten[0]]
    if len(table) > most:
        forgotten += table.popitem(last=False)[1]
    return forgotten
