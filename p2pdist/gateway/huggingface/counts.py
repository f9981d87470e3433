"""What the door for clients of hubs counts: requests, and bytes of files."""

from __future__ import annotations

from collections import Counter

from p2pdist.gateway.answers import result_of

KINDS = ("info", "tree", "paths-info", "refs", "auth-check", "file", "raw", "other")
SOURCES = ("store", "swarm", "tracker")
"""store: it was here. swarm: it came while the client read, from other hosts or from the hub.
tracker: a small file."""


class HubCounts:
    """Of all requests since the agent began. On the event loop; metrics read it from threads."""

    def __init__(self) -> None:
        self.requests: Counter[tuple[str, str]] = Counter({("file", "ok"): 0})
        """By kind and result, as in gateway/answers.py."""
        self.bytes: Counter[str] = Counter(dict.fromkeys(SOURCES, 0))
        """Bytes of files given to clients, by source."""

    def answered(self, kind: str, status: int, source: str, *, whole: bool = True) -> None:
        """A request was answered with `status`; not `whole`: its body ended early."""
        self.requests[kind, result_of(status, whole=whole)] += 1
