"""Cache: how the stores of agents keep a package once it is there (p2pdist/core/eviction.py does
it)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self, cast, get_args

import msgspec

from p2pdist.model.policy import SECONDS_MAX, Keeping, PackagePolicy
from p2pdist.model.units import parse_duration
from tracker.core.policy.rule import Rule
from tracker.core.policy.section import Section


@dataclass(frozen=True)
class Cache(Rule):
    """`cache = "lru"`, `"pin"` or `"none"`; or `ttl = "2h"`, in seconds here."""

    keeping: Keeping = "lru"
    ttl_s: float | None = None

    @classmethod
    def read(cls, section: Section) -> Self:
        named = cast("Keeping | None", section.choice("cache", get_args(Keeping)))
        ttl_s = section.parsed("ttl", parse_duration, "2h")
        if ttl_s is not None and ttl_s > SECONDS_MAX:
            section.wrong("ttl", "it is longer than ten years", 'Write cache = "pin" for ever')
        if section.has("ttl") and named not in (None, "ttl"):
            section.wrong("ttl", f'it contradicts cache = "{named}"', "Remove one of them")
        if named == "ttl" and not section.has("ttl"):
            section.wrong("cache", "it does not say for how long", 'Write ttl = "2h" instead')
        return cls("ttl", ttl_s) if ttl_s is not None else cls(named or "lru")

    def told(self, policy: PackagePolicy) -> PackagePolicy:
        return msgspec.structs.replace(policy, cache=self.keeping, ttl_s=self.ttl_s)
