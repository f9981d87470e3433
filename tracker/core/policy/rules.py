"""The rules of a policy: each reads its own keys of the policy's table into a frozen value, and has
the decisions that follow from them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, Self, cast, get_args

import msgspec

from p2pdist.model.errors import Refused
from p2pdist.model.messages import Priority
from p2pdist.model.policy import RATE_BYTES_S_MAX, SECONDS_MAX, Keeping, PackagePolicy, Transport
from p2pdist.model.units import parse_duration, parse_rate
from tracker.core.policy.section import Section


class Rule(Protocol):
    """A rule is read from the keys of a policy's table that are its own; without them it asks for
    nothing."""

    @classmethod
    def read(cls, section: Section) -> Self:
        """The rule that the table states; mistakes are noted in the section."""

    def extend(self, policy: PackagePolicy) -> PackagePolicy:
        """What agents are told, with what they do of this rule; the rest is done at the tracker."""
        return policy


@dataclass(frozen=True)
class Cache(Rule):
    """`cache = "lru"`, `"pin"` or `"none"`; or `ttl = "2h"`, in seconds here: how the stores of
    agents keep a package (p2pdist/core/eviction.py)."""

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

    def extend(self, policy: PackagePolicy) -> PackagePolicy:
        return msgspec.structs.replace(policy, cache=self.keeping, ttl_s=self.ttl_s)


@dataclass(frozen=True)
class PriorityRule(Rule):
    """`priority = "start"` or `"preseed"`: how urgent every pull of a package is, whatever it asks
    for (p2pdist/core/fair_queue.py)."""

    priority: Priority | None = None

    @classmethod
    def read(cls, section: Section) -> Self:
        return cls(cast("Priority | None", section.choice("priority", get_args(Priority))))

    def extend(self, policy: PackagePolicy) -> PackagePolicy:
        return msgspec.structs.replace(policy, priority=self.priority)


@dataclass(frozen=True)
class Lazy(Rule):
    """`lazy = true` or `false`: whether `run` and `mount` show a package before its contents are
    here, unless a user says otherwise; false holds whatever users say. None: they say."""

    lazy: bool | None = None

    @classmethod
    def read(cls, section: Section) -> Self:
        return cls(section.truth("lazy"))

    def extend(self, policy: PackagePolicy) -> PackagePolicy:
        return msgspec.structs.replace(policy, lazy=self.lazy)


EXAMPLE = "200MB/s"


@dataclass(frozen=True)
class Rates(Rule):
    """`upload = "200MB/s"`, `download = "2Gbit/s"`: what each host may send and receive of all
    packages of a policy together, beside its own limits; bytes/s, None for no limit."""

    upload_bytes_s: float | None = None
    download_bytes_s: float | None = None

    @classmethod
    def read(cls, section: Section) -> Self:
        rates = cls(section.parsed("upload", parse_rate, EXAMPLE), section.parsed("download", parse_rate, EXAMPLE))
        for key, rate in (("upload", rates.upload_bytes_s), ("download", rates.download_bytes_s)):
            if rate is not None and rate > RATE_BYTES_S_MAX:
                section.wrong(key, "no host is so fast, and no agent takes it", "Leave it out for no limit")
            if section.has(key) and section.raw("transport") == "swarm":
                section.wrong(key, "BitTorrent keeps no rate of a policy", 'Write transport = "trees", or no rate')
        return rates

    @property
    def any(self) -> bool:
        """Whether there is a limit at all."""
        return self.upload_bytes_s is not None or self.download_bytes_s is not None

    def extend(self, policy: PackagePolicy) -> PackagePolicy:
        return msgspec.structs.replace(
            policy, upload_bytes_s=self.upload_bytes_s, download_bytes_s=self.download_bytes_s
        )


READERS_MAX = 100_000


@dataclass(frozen=True)
class Readers(Rule):
    """`readers = 4`: how many leases on the origin all blobs of a policy's packages may hold
    together, in all zones; None for no limit but the tracker's own.

    A blob of several packages goes by the first policy in the file that limits one of them. A limit
    below the number of a blob's stripes makes stripes wait for each other."""

    readers: int | None = None

    @classmethod
    def read(cls, section: Section) -> Self:
        return cls(section.number("readers", 1, READERS_MAX))


@dataclass(frozen=True)
class TransportRule(Rule):
    """`transport = "trees"`, `"swarm"` or `"auto"`: how the blobs of a package come to agents
    without --transport (p2pdist/core/transport.py)."""

    transport: Transport | None = None

    @classmethod
    def read(cls, section: Section) -> Self:
        return cls(cast("Transport | None", section.choice("transport", get_args(Transport))))

    def extend(self, policy: PackagePolicy) -> PackagePolicy:
        return msgspec.structs.replace(policy, transport=self.transport)


ZONES_MAX = 256
NAMED_MAX = 5


@dataclass(frozen=True)
class Zones(Rule):
    """`zones = ["a", "b"]`: hosts of these zones may have a package; none for all. Hosts that name
    no zone are in none of them. Zones order a fleet and protect no secret: hosts name their own."""

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


SITES_MAX = 64


@dataclass(frozen=True)
class Sites(Rule):
    """`sites = ["east"]`: hosts at these sites may have a package; none for all. A zone that names
    no site is a site by itself. Like zones, sites order a fleet and protect no secret."""

    sites: tuple[str, ...] = ()

    @classmethod
    def read(cls, section: Section) -> Self:
        sites = section.texts("sites", SITES_MAX, '["east", "west"]') or ()
        for site in sites:
            if len(site) > 255 or any(mark.isspace() for mark in site):
                section.wrong(
                    "sites", f"{site[:80]!r} is the name of no site", "Write names as agents give with --site"
                )
        return cls(sites)

    def allow(self, site: str) -> bool:
        """Whether hosts at a site may have the package."""
        return not self.sites or site in self.sites

    def check(self, site: str, what: str, match: str) -> None:
        """Raises Refused when hosts at `site` may not have `what`."""
        if self.allow(site):
            return
        named = ", ".join(self.sites[:NAMED_MAX]) + (", ..." if len(self.sites) > NAMED_MAX else "")
        raise Refused(
            f"{what} is for hosts at the sites {named}, and this one is at {site or 'none'}",
            remedy=f"Use a host there, give the agent its --site, or change sites of the policy {match!r} at the tracker",
        )
