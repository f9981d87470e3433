"""Rates: what each host may send and receive of all packages of a policy together, beside the
limits that it was given itself."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

import msgspec

from p2pdist.model.policy import RATE_BYTES_S_MAX, PackagePolicy
from p2pdist.model.units import parse_rate
from tracker.core.policy.rule import Rule
from tracker.core.policy.section import Section

EXAMPLE = "200MB/s"


@dataclass(frozen=True)
class Rates(Rule):
    """`upload = "200MB/s"`, `download = "2Gbit/s"`; bytes/s, None for no limit."""

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

    def told(self, policy: PackagePolicy) -> PackagePolicy:
        return msgspec.structs.replace(
            policy, upload_bytes_s=self.upload_bytes_s, download_bytes_s=self.download_bytes_s
        )
