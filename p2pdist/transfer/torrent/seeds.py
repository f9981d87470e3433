"""Seeds complete blobs of the store to BitTorrent peers.

Theory. libtorrent reads the store's own files; there is no second copy, and nothing is read before
a peer requests it. libtorrent is set up to have everything and only to upload, so it never opens a
file for writing, not even a damaged one: peers check what they get. An open file keeps its bytes on
the disk after it was removed, so the store's eviction releases a blob here first.

Invariants: at most `count_max` seeds, the blobs that were used last. A blob that is being fetched
by BitTorrent is not seeded: the session has one member for an info hash. Several torrents may seed
one blob, such as one of version 1 for old clients.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from p2pdist.model.digest import Digest
from p2pdist.model.errors import P2PDistError, Unavailable
from p2pdist.model.torrent import Torrent
from p2pdist.transfer.torrent.session import TorrentSession
from p2pdist.transfer.torrent.swarm import OpenFile, Swarm, torrent_parameters
from p2pdist.transfer.torrent.transfer import TorrentTransfer

if TYPE_CHECKING:
    import libtorrent as lt

SEEDS_MAX = 200
RELEASE_TIMEOUT_S = 5.0
logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Seed:
    """A complete blob: its file, its torrent, and when it was used last (by one clock for all
    seeds)."""

    digest: Digest
    path: Path
    torrent: Torrent
    last_used: float
    swarm: Swarm


class TorrentSeeds:
    """The seeds of a session. Methods may be called from any thread."""

    def __init__(self, session: TorrentSession, *, count_max: int = SEEDS_MAX) -> None:
        self._session = session
        self._count_max = count_max
        self._lock = threading.Lock()
        self._active: dict[bytes, _ActiveSeed] = {}

    @property
    def digests(self) -> set[Digest]:
        """The blobs that are seeded, or about to be."""
        with self._lock:
            return {active.seed.digest for active in self._active.values()}

    def keep(self, seeds: Iterable[Seed]) -> None:
        """Seed the `count_max` of `seeds` that were used last, and no others; returns at once."""
        newest = sorted(seeds, key=lambda seed: seed.last_used, reverse=True)[: self._count_max]
        made = {active.info_hash: active for active in (_ActiveSeed(self, self._session, seed) for seed in newest)}
        with self._lock:
            gone = [active for info_hash, active in self._active.items() if info_hash not in made]
            new = [active for info_hash, active in made.items() if info_hash not in self._active]
            self._active.update((active.info_hash, active) for active in new)
        for active in gone:
            active.close()
        for active in new:
            self._session.add(active)

    def take_over(self, seed: Seed, transfer: TorrentTransfer) -> None:
        """Seed the torrent of a transfer that is done, without a pause for its peers."""
        active = _ActiveSeed(self, self._session, seed)
        with self._lock:
            if active.info_hash in self._active:
                return
            self._active[active.info_hash] = active
        transfer.hand_over(active.take, lambda: active.removed(None))

    def release(self, digest: Digest, timeout_s: float = RELEASE_TIMEOUT_S) -> bool:
        """Stop seeding a blob and wait until its file is closed; True at once for a blob that is
        not seeded, False when libtorrent has not closed the file within `timeout_s`. Blocks; not
        for the session's thread, which it waits for."""
        with self._lock:
            seeding = [active for active in self._active.values() if active.seed.digest == digest]
        for active in seeding:
            active.close()
        deadline = time.monotonic() + timeout_s
        return all(active.over.wait(max(0.0, deadline - time.monotonic())) for active in seeding)

    def forget(self, active: _ActiveSeed) -> None:
        """Remove a seed whose file libtorrent has closed."""
        with self._lock:
            if self._active.get(active.info_hash) is active:
                del self._active[active.info_hash]


class _ActiveSeed:
    """One seed as a member of the session."""

    nearly_done = False

    def __init__(self, seeds: TorrentSeeds, session: TorrentSession, seed: Seed) -> None:
        self.seed = seed
        self.info_hash = seed.torrent.info_hash_v1
        self.over = threading.Event()
        self._seeds = seeds
        self._session = session
        self._lt: Any = None
        self._file: OpenFile | None = None
        self._added = self._closing = False

    def close(self) -> None:
        self._session.call(self._finish)

    def parameters(self, lt: Any) -> lt.add_torrent_params:
        seed = self.seed
        if self._closing:
            raise Unavailable("it was released before")
        self._lt = lt
        params = torrent_parameters(lt, seed.torrent, seed.path, seed.swarm)
        # All pieces are verified, so libtorrent need not hash one when a peer first requests it.
        params.verified_pieces = [True] * -(-seed.torrent.size // seed.torrent.piece_size)
        params.flags |= lt.torrent_flags.seed_mode | lt.torrent_flags.upload_mode
        return params

    def take(self, lt: Any, file: OpenFile) -> _ActiveSeed:
        """Make this the member of a torrent that libtorrent reads from `file`."""
        self._lt, self._file = lt, file
        return self

    def added(self, handle: lt.torrent_handle) -> None:
        self._added = True
        handle.set_max_connections(-1)  # none of its own
        if self._closing:
            self._session.remove(self.info_hash)

    def alert(self, alert: lt.alert) -> None:
        if isinstance(alert, self._lt.file_error_alert | self._lt.torrent_error_alert):
            logger.warning("%s is not seeded any more: %s", self.seed.digest, alert.message())
            self._finish()

    def overlooked(self) -> None:
        """Do nothing: a seed waits only for its removal, which the session notices."""

    def tick(self, now: float) -> float | None:
        return None

    def removed(self, error: P2PDistError | None) -> None:
        if error is not None:
            logger.info("%s is not seeded: %s", self.seed.digest, error)
        if self._file is not None:
            self._file.close()
        self._seeds.forget(self)
        self.over.set()

    def _finish(self) -> None:
        if not self._closing:
            self._closing = True
            if self._added:
                self._session.remove(self.info_hash)
