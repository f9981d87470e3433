"""What the S3 interface counts: requests, and bytes of objects."""

from __future__ import annotations

from collections import Counter
from itertools import product

from p2pdist.gateway.s3.names import OPERATIONS

RESULTS = ("ok", "unknown", "unavailable", "refused", "invalid", "broken")
"""ok: answered as asked for. unknown: 404. unavailable: 5xx. refused: 401 and 403. invalid: every
other 4xx. broken: the body ended early, because the client went away or the pull failed."""

SOURCES = ("store", "swarm", "none")
"""store: it was here. swarm: it came while the client read. none: no content was given."""


class S3Counts:
    """Of all requests since the agent began. On the event loop; metrics read it from threads."""

    def __init__(self) -> None:
        self.requests: Counter[tuple[str, str]] = Counter(dict.fromkeys(product(("GetObject",), RESULTS), 0))
        """By operation ("other" for what is none) and result."""
        self.bytes: Counter[str] = Counter(dict.fromkeys(SOURCES[:2], 0))
        """Bytes of objects, by source."""

    def answered(self, operation: str, status: int, *, whole: bool = True) -> None:
        """A request was answered with `status`; not `whole`: its body ended early."""
        operation = operation if operation in OPERATIONS else "other"
        self.requests[operation, _result(status) if whole else "broken"] += 1


def _result(status: int) -> str:
    if status < 400:
        return "ok"
    if status == 404:
        return "unknown"
    if status in (401, 403):
        return "refused"
    return "unavailable" if status >= 500 else "invalid"
