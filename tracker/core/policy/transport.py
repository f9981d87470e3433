"""Transport: how the blobs of a package come to agents that were not told so themselves
(p2pdist/core/transport.py)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self, cast, get_args

import msgspec

from p2pdist.model.policy import PackagePolicy, Transport
from tracker.core.policy.rule import Rule
from tracker.core.policy.section import Section


@dataclass(frozen=True)
class TransportRule(Rule):
    """`transport = "trees"`, `"swarm"` or `"auto"`."""

    transport: Transport | None = None

    @classmethod
    def read(cls, section: Section) -> Self:
        return cls(cast("Transport | None", section.choice("transport", get_args(Transport))))

    def told(self, policy: PackagePolicy) -> PackagePolicy:
        return msgspec.structs.replace(policy, transport=self.transport)
