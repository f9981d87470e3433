"""Which sources a host trusts to try: backoff after failures, long avoidance after wrong bytes.

A source that fails is left alone for a time that doubles with each failure in a row; one that sent
wrong bytes is left alone for CORRUPT_S. The origin is never avoided for wrong bytes: who reads it
decides how often to try again.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from p2pdist.model.messages import Reason
from p2pdist.model.plan import Source

BACKOFF_FIRST_S = 0.25
BACKOFF_MAX_S = 15.0
CORRUPT_S = 600.0
SOURCES_MAX = 4096


@dataclass(slots=True)
class _Record:
    failures: int
    avoid_until: float
    reason: Reason


@dataclass(slots=True)
class Sources:
    """What this host has seen of its sources. At most SOURCES_MAX are remembered, the oldest
    forgotten first."""

    _records: dict[Source, _Record] = field(default_factory=dict)

    def failed(self, source: Source, reason: Reason, *, now: float) -> None:
        """Note that `source` failed for `reason`."""
        old = self._records.pop(source, None)
        failures = old.failures + 1 if old else 1
        if reason == "corrupt" and not source.is_origin:
            until = now + CORRUPT_S
        else:
            until = now + min(BACKOFF_MAX_S, BACKOFF_FIRST_S * 2 ** min(failures - 1, 10))
        if old is not None and old.reason == "corrupt" and not source.is_origin:
            reason = "corrupt"
        self._records[source] = _Record(failures, max(until, old.avoid_until if old else 0.0), reason)
        if len(self._records) > SOURCES_MAX:
            del self._records[next(iter(self._records))]

    def delivered(self, source: Source) -> None:
        """Note that `source` gave a good piece: failures are forgiven, wrong bytes are not."""
        record = self._records.get(source)
        if record is not None and (record.reason != "corrupt" or source.is_origin):
            del self._records[source]

    def usable(self, source: Source, *, now: float) -> bool:
        record = self._records.get(source)
        return record is None or now >= record.avoid_until

    def complaint(self, source: Source, *, now: float) -> Reason | None:
        """Why the source is not usable; None when it is."""
        record = self._records.get(source)
        return record.reason if record is not None and now < record.avoid_until else None

    def usable_at(self, source: Source) -> float:
        """When the source may be tried again (0 for at once)."""
        record = self._records.get(source)
        return record.avoid_until if record else 0.0
