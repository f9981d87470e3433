"""Failed pulls, for the tracker: people see in one place which hosts could not pull what."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from typing import Protocol

from p2pdist.agent.tracker.session import TrackerSession
from p2pdist.model.digest import is_digest
from p2pdist.model.errors import P2PDistError, printable
from p2pdist.model.messages import REASON_CHARACTERS_MAX, PullFailed

WAITING_MAX = 50
"""Failures that wait for a tracker, the latest."""


class EndedPull(Protocol):
    """A pull that is done or has failed."""

    @property
    def reference(self) -> str: ...

    @property
    def digest(self) -> str: ...

    @property
    def error(self) -> P2PDistError | None: ...


class PullFailures:
    """Tells the tracker of a session which pulls fail, at once or when it answers. A tracker that
    does not take that is not told. `observe` calls what it is given with each pull that has
    ended."""

    def __init__(self, session: TrackerSession, observe: Callable[[Callable[[EndedPull], None]], None]) -> None:
        self._session = session
        observe(self._ended)
        self._waiting: deque[tuple[float, PullFailed]] = deque(maxlen=WAITING_MAX)
        """Failures and when they were met, of the monotonic clock."""

    def _ended(self, pull: EndedPull) -> None:
        """A pull is done or has failed."""
        if pull.error is None:
            return
        reason = printable(f"{pull.error.slug}: {pull.error.what}")[:REASON_CHARACTERS_MAX]
        digest = pull.digest if is_digest(pull.digest) else ""
        self._waiting.append((time.monotonic(), PullFailed(pull.reference[:512], reason, digest)))
        self.report()

    def report(self) -> None:
        """Send what waits, if the tracker answers."""
        if not self._session.connected:
            return
        while self._waiting:
            met_at, failed = self._waiting.popleft()
            if self._session.takes_failures:
                age_s = round(max(0.0, time.monotonic() - met_at), 3)
                self._session.send(PullFailed(failed.reference, failed.reason, failed.digest, age_s))
