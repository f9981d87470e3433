"""How long an upstream is left alone that asks for it (Retry-After), and which question is the
first one afterwards.

What asks may be the upstream, or any proxy on the way to it, and it may be wrong. So it is taken at
its word for some minutes at most (origin/registry/client.py, `left_alone_s`). Then one question of
the whole fleet goes to it, and the others wait for what becomes of that: either it asks again to be
left alone, or all are asked.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from p2pdist.model.errors import P2PDistError, Unavailable


class Pause:
    """What an upstream, called `name` in words for the user, asked for last. On one event loop."""

    def __init__(self, name: str, remedy: str) -> None:
        self._name, self._remedy = name, remedy
        self.until = 0.0
        """Until when it is left alone (time.monotonic)."""
        self._unproven = False
        """Whether no question was answered since then."""
        self._probe: asyncio.Future[None] | None = None
        """Done once the first question after the pause has ended."""

    def require_over(self) -> None:
        """Raises Unavailable while the upstream is left alone."""
        left_s = self.until - time.monotonic()
        if left_s > 0:
            raise Unavailable(
                f"{self._name} asked to be left alone for another {left_s:.0f} s",
                remedy=self._remedy,
                retry_after=round(left_s, 1),
            )

    @asynccontextmanager
    async def question(self) -> AsyncIterator[None]:
        """Within it the upstream may be asked. Raises Unavailable while it is left alone."""
        while self._probe is not None:
            await asyncio.shield(self._probe)
        self.require_over()
        if not self._unproven:
            yield
            return
        probe = self._probe = asyncio.get_running_loop().create_future()
        self._unproven = False
        try:
            yield
        finally:
            self._probe = None
            probe.set_result(None)

    def note(self, error: P2PDistError) -> float:
        """A question failed: for how many seconds the upstream asks to be left alone, 0 where it
        does not."""
        asked_s = error.details.get("retry_after")
        if not isinstance(error, Unavailable) or not isinstance(asked_s, int | float) or asked_s <= 0:
            return 0.0
        self.until = max(self.until, time.monotonic() + asked_s)
        self._unproven = True
        return float(asked_s)
