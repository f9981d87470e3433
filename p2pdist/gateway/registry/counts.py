"""What a mirror counts: requests, and bytes of bodies."""

from __future__ import annotations

from collections import Counter
from itertools import product

from p2pdist.gateway.answers import result_of

KINDS = ("manifest", "blob", "tags", "referrers", "base", "token", "other")
SOURCES = ("store", "swarm", "tracker", "none")
"""store: it was here. swarm: it came while the client read, from other hosts or from upstream.
tracker: a document that was asked for. none: no content was given."""

_MOVING = ("store", "swarm", "tracker")
CHECK_REPOSITORY = "p2pdist-check/"
"""Begins the repository that `p2pdist mirror check` has a runtime ask for, which is nowhere; a
number of that check follows."""

CHECKS_MAX = 16


class MirrorCounts:
    """Of all requests since the agent began. On the event loop; metrics read it from threads."""

    def __init__(self) -> None:
        self.requests: Counter[tuple[str, str, str]] = Counter(
            dict.fromkeys(product(("manifest", "blob"), ("ok",), ("store", "swarm")), 0)
        )
        """By kind, result and source; the names that dashboards look for are there at once."""
        self.bytes: Counter[str] = Counter(dict.fromkeys(_MOVING, 0))
        """Bytes of bodies, by source."""
        self.fallbacks: Counter[str] = Counter({"unknown": 0, "unavailable": 0})
        """Requests for manifests and blobs that got 404 or 5xx before any byte of a body, so that
        the client turns to the registry itself."""

        self.checks: dict[str, None] = {}
        """The repositories of checks that were asked for last."""

        self.address = ""
        """HOST:PORT of the mirror's own port; empty when it has none."""

    @property
    def total(self) -> int:
        """All requests, however they were answered."""
        return sum(self.requests.values())

    def asked(self, repository: str) -> None:
        """An image of a repository is asked for: a check wants to hear of its own."""
        if repository.startswith(CHECK_REPOSITORY):
            self.checks.pop(repository, None)
            self.checks[repository] = None
            while len(self.checks) > CHECKS_MAX:
                del self.checks[next(iter(self.checks))]

    def answered(self, kind: str, status: int, source: str, *, whole: bool = True) -> None:
        """A request was answered with `status`; not `whole`: its body ended early."""
        result = result_of(status, whole=whole)
        self.requests[kind, result, source if result in ("ok", "broken") else "none"] += 1
        if kind in ("manifest", "blob") and result in self.fallbacks:
            self.fallbacks[result] += 1
