"""The protocol of rules: each is one part of a policy, in one module, as a frozen value with the
decisions that follow from it."""

from __future__ import annotations

from typing import Protocol, Self

from p2pdist.model.policy import PackagePolicy
from tracker.core.policy.section import Section


class Rule(Protocol):
    """A rule is read from the keys of a policy's table that are its own; without them it asks for
    nothing."""

    @classmethod
    def read(cls, section: Section) -> Self:
        """The rule that the table states; mistakes are noted in the section."""

    def told(self, policy: PackagePolicy) -> PackagePolicy:
        """What agents are told, with what they do of this rule; the rest is done at the tracker."""
        return policy
