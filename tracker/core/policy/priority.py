"""Priority: how urgent every pull of a package is, whatever it was asked as
(p2pdist/core/fair_queue.py says what that is worth)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self, cast, get_args

import msgspec

from p2pdist.model.messages import Priority
from p2pdist.model.policy import PackagePolicy
from tracker.core.policy.rule import Rule
from tracker.core.policy.section import Section


@dataclass(frozen=True)
class PriorityRule(Rule):
    """`priority = "start"` or `"preseed"`."""

    priority: Priority | None = None

    @classmethod
    def read(cls, section: Section) -> Self:
        return cls(cast("Priority | None", section.choice("priority", get_args(Priority))))

    def told(self, policy: PackagePolicy) -> PackagePolicy:
        return msgspec.structs.replace(policy, priority=self.priority)
