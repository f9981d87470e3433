"""Zones: where the hosts stand that may have a package. It orders a fleet and protects no secret:
hosts name their own zones."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

from p2pdist.model.errors import Refused
from tracker.core.policy.rule import Rule
from tracker.core.policy.section import Section

ZONES_MAX = 256
NAMED_MAX = 5


@dataclass(frozen=True)
class Zones(Rule):
    """`zones = ["a", "b"]`; none for all. Hosts that name no zone stand in none of them."""

    zones: tuple[str, ...] = ()

    @classmethod
    def read(cls, section: Section) -> Self:
        zones = section.texts("zones", ZONES_MAX, '["eu-1", "eu-2"]') or ()
        for zone in zones:
            if len(zone) > 255 or any(mark.isspace() for mark in zone):
                section.wrong(
                    "zones", f"{zone[:80]!r} is the name of no zone", "Write names as agents give with --zone"
                )
        return cls(zones)

    def allow(self, zone: str) -> bool:
        return not self.zones or zone in self.zones

    def check(self, zone: str, what: str, match: str) -> None:
        """Raises Refused when hosts of `zone` may not have `what`."""
        if self.allow(zone):
            return
        named = ", ".join(self.zones[:NAMED_MAX]) + (", ..." if len(self.zones) > NAMED_MAX else "")
        stands = f"zone {zone}" if zone else "no zone"
        raise Refused(
            f"{what} is for hosts in {named}, and this one stands in {stands}",
            remedy=f"Use a host there, give the agent its --zone, or change zones of the policy {match!r} at the tracker",
        )
