"""How many neighbours a transfer by BitTorrent may have."""

from __future__ import annotations

from typing import TYPE_CHECKING

from p2pdist.model.torrent import BLOCK_SIZE

if TYPE_CHECKING:
    import libtorrent as lt

STILL_S = 2.0
"""A transfer to which no piece has come for so long may have twice as many neighbours: those that
it has may all be silent."""

DOUBLED_BELOW = 1000
"""From so many on there is no limit but the session's."""


class NeighbourLimit:
    """Begins with `count` connections, -1 for no limit; times are time.monotonic()."""

    def __init__(self, count: int) -> None:
        self.count = count
        self._came_at = 0.0
        self._bytes = 0

    def came(self, now: float) -> None:
        """A piece has come, or the transfer begins."""
        self._came_at = now

    def raise_if_still(self, handle: lt.torrent_handle, now: float) -> float | None:
        """Have more neighbours when next to nothing comes, less than a block from each; says when
        to look again."""
        if self.count < 0:
            return None
        if now - self._came_at >= STILL_S:
            # A large piece takes longer than this to come over a slow link.
            self._came_at, before = now, self._bytes
            self._bytes = handle.status(0).total_payload_download
            if self._bytes - before < self.count * BLOCK_SIZE:
                self.count = 2 * self.count if self.count < DOUBLED_BELOW else -1
                handle.set_max_connections(self.count)
        return self._came_at + STILL_S
