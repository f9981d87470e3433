"""What the S3 interface counts: requests, and bytes of objects."""

from __future__ import annotations

from collections import Counter
from itertools import product

from p2pdist.gateway.answers import RESULTS, result_of
from p2pdist.gateway.s3.names import OPERATIONS

SOURCES = ("store", "swarm", "none")
"""store: it was here. swarm: it came while the client read. none: no content was given."""


class S3Counts:
    """Of all requests since the agent began. On the event loop; metrics read it from threads."""

    def __init__(self) -> None:
        self.requests: Counter[tuple[str, str]] = Counter(dict.fromkeys(product(("GetObject",), RESULTS), 0))
        """By operation ("other" for what is none) and result."""
        self.bytes: Counter[str] = Counter(dict.fromkeys(SOURCES[:2], 0))
        """Bytes of objects, by source."""

    def answered(self, operation: str, status: int, source: str, *, whole: bool = True) -> None:
        """A request was answered with `status`; not `whole`: its body ended early."""
        operation = operation if operation in OPERATIONS else "other"
        self.requests[operation, result_of(status, whole=whole)] += 1
