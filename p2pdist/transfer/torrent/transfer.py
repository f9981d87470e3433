"""One blob fetched from a BitTorrent swarm, straight into the file of the store's partial blob.

Theory. The torrent's one file is mapped onto the blob's data file, so there is no second copy.
libtorrent takes the blob's pieces as held, without reading them; it fetches the others and writes
them in place. When a piece has passed libtorrent's hashes (SHA-1 and SHA-256), the transfer reads
it back and verifies it by the blob's piece list (BLAKE3), and only then the blob holds it.
libtorrent may report the piece before the bytes have left its own cache. So the transfer looks
again at a piece that does not verify yet, a little later each time, then has libtorrent flush its
cache; a piece that is wrong after FLUSHES was never right: the torrent lies, and the transfer ends
as corrupt. The torrent's hashes come from the document that a manifest names, so a torrent that
lies was published so.

A host that leaves a swarm at its last piece takes a source from peers that miss pieces, and they
need a while to find another. So a transfer may stay when it is done: libtorrent goes on uploading,
and writes no more, until another member of the session gets the torrent (`hand_over`), or for
STAY_S. libtorrent opens the file by a descriptor of this process (/proc/self/fd, proc(5)), whatever
it is called meanwhile.

A transfer begins with few peers (settings.py), and gets more while next to nothing comes
(PeerLimit). libtorrent may keep pieces that came wrong from being requested again, for ever: the
transfer has it begin the torrent anew then (WrongPieces).

Invariants: nothing else writes into the blob from start() until StreamClosed, and a piece counts
only through Blob.import_piece. Exactly one StreamClosed is posted, as the last event, after
libtorrent has closed the file, or only reads it: then others may rename or write it. Pieces that
were under way are garbage in the file by then, and are not held. What libtorrent uploads has passed
the torrent's hashes, which its peers check as well; the blob's own piece list counts for all other
uploads.
"""

from __future__ import annotations

import errno
import itertools
import logging
import os
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from p2pdist.model.digest import Digest
from p2pdist.model.errors import DiskFull, P2PDistError, Unavailable, UsageError
from p2pdist.model.pieces import PieceLayout, PieceSet
from p2pdist.model.torrent import BLOCK_SIZE, Torrent
from p2pdist.transfer.stream.events import Ending, PieceReceived, StreamClosed, StreamEvent
from p2pdist.transfer.torrent.session import Member, TorrentSession
from p2pdist.transfer.torrent.swarm import (
    PEERS_MAX,
    Address,
    OpenFile,
    Swarm,
    check_peers,
    priorities,
    torrent_parameters,
)

if TYPE_CHECKING:
    import libtorrent as lt


STILL_S = 2.0
"""A transfer to which no piece has come for so long may have twice as many peers: the ones that it
has may all be silent."""

DOUBLED_BELOW = 1000
"""From so many peers on only the session's limit holds."""


class PeerLimit:
    """How many connections a transfer may have: `count`, -1 for no limit. Times are
    time.monotonic()."""

    def __init__(self, count: int) -> None:
        self.count = count
        self._came_at = 0.0
        self._bytes = 0

    def came(self, now: float) -> None:
        """Note that a piece has come, or that the transfer begins."""
        self._came_at = now

    def raise_if_still(self, handle: lt.torrent_handle, now: float) -> float | None:
        """Double the limit when next to nothing has come, less than a block from each peer;
        returns when to look again."""
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


class WrongPieces:
    """Pieces that came wrong and have not come since. libtorrent locks such a piece until its disk
    threads have let go of it, which some releases (2.1.1) forget where the piece was just being
    written. Times are time.monotonic()."""

    def __init__(self) -> None:
        self._pieces: set[int] = set()
        self._look_at = 0.0

    def failed(self, piece: int, now: float) -> None:
        """Note that a piece came wrong."""
        self._pieces.add(piece)
        self._look_at = now + STILL_S

    def passed(self, piece: int, now: float) -> None:
        """Note that a piece came."""
        self._pieces.discard(piece)
        self._look_at = now + STILL_S

    def locked(self, lt: Any, handle: lt.torrent_handle, now: float) -> bool:
        """Whether nothing has come for STILL_S, and peers that would give one of the pieces are
        asked for nothing."""
        if not self._pieces or now < self._look_at:
            return False
        self._look_at = now + STILL_S
        peers = [peer for peer in handle.get_peer_info() if not peer.flags & lt.peer_info.remote_choked]
        givers = [peer for peer in peers if self._gives(peer.pieces)]
        return bool(givers) and not any(peer.download_queue_length for peer in givers)

    def _gives(self, has: Sequence[bool]) -> bool:
        """Whether a peer has one of the pieces; `has` is empty before it has said so."""
        return any(piece < len(has) and has[piece] for piece in self._pieces)


LOOK_AGAIN_S = 0.01
"""After so long the transfer looks again at a piece that was not there yet; doubled each time."""

FLUSH_AFTER_S = 1.0
FLUSHES = 3
"""A piece is wrong if it is so after as many flushes: up to two that libtorrent began of itself,
before the piece, may end late."""

LAST_PIECES = 16
"""With no more than these missing the session gathers alerts for a short time only."""

STAY_S = 5.0
"""How long a transfer that is done waits for another member to take its torrent over."""

_FULL = {errno.ENOSPC, errno.EDQUOT}
logger = logging.getLogger(__name__)
_numbers = itertools.count(1 << 32)
"""Far from the numbers that a download core gives to its streams."""


class PartialBlob(Protocol):
    """What a transfer needs of the store's Blob."""

    digest: Digest
    layout: PieceLayout
    have: PieceSet

    @property
    def path(self) -> Path: ...
    def import_piece(self, piece: int) -> bool: ...
    def hold(self) -> None: ...
    def release(self) -> None: ...


@dataclass(slots=True)
class _Unseen:
    """A piece that libtorrent has and that did not verify yet: when the transfer first looked at
    it, when it looks next, and how many flushes have ended since."""

    since: float
    due: float
    pause_s: float = LOOK_AGAIN_S
    flushes: int = 0


class TorrentTransfer:
    """Fetches `blob` by `torrent`. `on_event` is called in the session's thread (see Mailbox);
    `number` names the transfer in its events, by default one that no stream has; `stay`: the
    torrent stays when it is done. Raises UsageError when the torrent does not fit the blob."""

    def __init__(
        self,
        session: TorrentSession,
        blob: PartialBlob,
        torrent: Torrent,
        swarm: Swarm,
        on_event: Callable[[StreamEvent], None],
        *,
        number: int | None = None,
        stay: bool = False,
    ) -> None:
        layout = blob.layout
        if [size for _, size in torrent.files] != [layout.size] or torrent.piece_size != layout.piece_size:
            raise UsageError(
                f"the torrent {torrent.name!r} is cut otherwise than {blob.digest}",
                remedy="Push the blob again, which makes a torrent that fits",
            )
        self.number = next(_numbers) if number is None else number
        self.info_hash = torrent.info_hash_v1
        self.torrent = torrent
        self._session, self._blob, self._swarm = session, blob, swarm
        self._file = OpenFile() if stay else None
        self._leaves_at: float | None = None
        """When a transfer that stays leaves the swarm; None before it is done, and once it left."""
        self._on_event = on_event
        self._handle: lt.torrent_handle | None = None
        self._lt: Any = None
        self._unseen: dict[int, _Unseen] = {}
        self._flushing = False
        """A flush of libtorrent's cache is under way."""
        self._closed: StreamClosed | None = None
        """The last event, once the end is decided; written by `_finish`, `_done` and `removed`."""
        self._neighbours, self._wrong = PeerLimit(session.peers_max), WrongPieces()
        self._anew = False
        """Whether the torrent is removed to be added again; written by `tick` and `removed`."""
        self._banned: set[Address] = set()
        """Peers that libtorrent banned, which it would not know once it begins anew."""
        self._over = threading.Event()

    # -- from any thread

    def start(self) -> None:
        """Begin; once only. Raises NotFound when the blob was removed."""
        self._blob.hold()
        self._session.add(self)

    def close(self) -> None:
        """End soon: StreamClosed follows when libtorrent has closed the file."""
        self._session.call(lambda: self._finish("closed"))

    def finish_piece_and_close(self) -> None:
        """Close now: the parts of a piece under way have come from many peers, and the next
        transfer fetches them again."""
        self.close()

    def join(self, timeout_s: float | None = None) -> bool:
        """Wait until StreamClosed has been posted; False when it has not within `timeout_s`."""
        return self._over.wait(timeout_s)

    def hand_over(self, take: Callable[[Any, OpenFile], Member], otherwise: Callable[[], object]) -> None:
        """Give the torrent to the member that `take` makes, in the session's thread, of libtorrent
        and the open file, which that member closes. `otherwise` is called when this transfer has
        left the swarm."""
        if not self._session.call(lambda: self._hand_over(take, otherwise)):
            otherwise()

    def give_piece(self, piece: int, data: bytes) -> None:
        """Bring a piece that came from elsewhere into the swarm. PieceReceived follows once it has
        verified."""
        self._session.call(lambda: self._give(piece, data))

    def count_copies(self, report: Callable[[list[int]], object]) -> None:
        """Call `report` in the session's thread with how many of the connected peers have each
        piece."""
        self._session.call(lambda: self._count_copies(report))

    def add_peers(self, peers: Sequence[Address]) -> None:
        """Connect to these peers too. Raises UsageError."""
        check_peers(peers)
        self._session.call(lambda: self._connect(peers))

    # -- as a member of the session, in its thread

    def parameters(self, lt: Any) -> lt.add_torrent_params:
        """What libtorrent is to fetch, and where it writes."""
        if self._closed is not None:
            raise Unavailable(f"the transfer of {self._blob.digest} was closed before it began")
        self._lt = lt
        path = self._file.open(self._blob.path) if self._file is not None else self._blob.path
        peers = tuple(peer for peer in self._swarm.peers if peer not in self._banned)
        params = torrent_parameters(lt, self.torrent, path, replace(self._swarm, peers=peers))
        params.piece_priorities = priorities(self._blob.layout.count)
        params.max_connections = self._neighbours.count
        params.have_pieces = [piece in self._blob.have for piece in range(self._blob.layout.count)]
        return params

    @property
    def nearly_done(self) -> bool:
        """Whether the transfer waits for its last pieces."""
        return self._closed is None and self._blob.have.count - len(self._blob.have) <= LAST_PIECES

    def added(self, handle: lt.torrent_handle) -> None:
        """Begin: libtorrent has added the torrent."""
        self._handle = handle
        self._neighbours.came(time.monotonic())
        if self._blob.have.complete:
            self._done()

    def alert(self, alert: lt.alert) -> None:
        """Handle an alert of libtorrent about the torrent."""
        lt = self._lt
        match alert:
            case lt.piece_finished_alert():
                self._passed(alert.piece_index)
            case lt.torrent_finished_alert():
                if self._unseen:
                    self._flush()
            case lt.cache_flushed_alert():
                self._flushed()
            case lt.hash_failed_alert():
                # libtorrent fetches it again, and bans the sender.
                self._wrong.failed(alert.piece_index, time.monotonic())
                logger.warning("piece %d of %s came wrong by BitTorrent", alert.piece_index, self._blob.digest)
            case lt.peer_ban_alert() if len(self._banned) < PEERS_MAX:
                self._banned.add(alert.endpoint)
            case lt.file_error_alert():
                self._fail(_file_error(self._blob, alert))
            case lt.torrent_error_alert():
                self._fail(P2PDistError(f"BitTorrent cannot fetch {self._blob.digest}: {alert.error.message()}"))

    def overlooked(self) -> None:
        """Query which pieces libtorrent has: it dropped some alerts."""
        if self._closed is not None or self._handle is None:
            return
        status = self._handle.status(self._lt.status_flags_t.query_pieces)
        for piece, there in enumerate(status.pieces):
            if there:
                self._passed(piece)
        self._flushing = False

    def tick(self, now: float) -> float | None:
        """Look again at the pieces that are due, and leave the swarm when that is due."""
        if self._leaves_at is not None and (now >= self._leaves_at or self._session.closing):
            self._leave()
        if self._closed is not None:
            return self._leaves_at
        for piece, unseen in list(self._unseen.items()):
            if unseen.due > now or self._look(piece) or self._closed is not None:
                continue
            unseen.pause_s *= 2
            unseen.due = now + unseen.pause_s
            if now - unseen.since > FLUSH_AFTER_S:
                self._flush()
        if self._closed is None and self._handle is not None and self._wrong.locked(self._lt, self._handle, now):
            logger.info("%s begins anew: BitTorrent requests nothing that came wrong", self._blob.digest)
            self._anew, self._handle = True, None
            self._session.remove(self.info_hash)
        still_at = self._neighbours.raise_if_still(self._handle, now) if self._handle is not None else None
        return min((unseen.due for unseen in self._unseen.values()), default=still_at)

    def removed(self, error: P2PDistError | None) -> None:
        """Verify the last pieces and post StreamClosed, or begin anew: libtorrent has closed the
        file."""
        if self._anew and self._closed is None and error is None:
            self._add_again()
            return
        if self._closed is None:
            failure = error or P2PDistError(f"libtorrent has dropped the torrent of {self._blob.digest}")
            self._closed = StreamClosed(self.number, "failed", failure.what, failure)
        self._handle = None
        if self._file is not None:
            self._file.close()
        if self._over.is_set():
            return
        for piece in list(self._unseen):
            self._look(piece)
        if self._blob.have.complete:
            self._closed = StreamClosed(self.number, "done")
        self._blob.release()
        self._on_event(self._closed)
        self._over.set()

    def _add_again(self) -> None:
        """Add the torrent as one of which nothing is known but the pieces that are here."""
        self._anew = self._flushing = False
        if self._file is not None:
            self._file.close()
        for piece in list(self._unseen):
            self._look(piece)
        self._unseen.clear()
        self._neighbours, self._wrong = PeerLimit(self._session.peers_max), WrongPieces()
        if self._closed is None:
            self._session.add(self)
        else:
            self.removed(None)

    # -- pieces

    def _passed(self, piece: int) -> None:
        """Look at a piece that has passed the torrent's hashes. libtorrent reports pieces that came
        by `give_piece` as well."""
        if piece in self._blob.have or piece in self._unseen:
            return
        now = time.monotonic()
        self._neighbours.came(now)
        self._wrong.passed(piece, now)
        self._unseen[piece] = _Unseen(now, now + LOOK_AGAIN_S)
        self._look(piece)

    def _look(self, piece: int) -> bool:
        """Verify a piece in the file; True when the blob holds it from now on."""
        try:
            if not self._blob.import_piece(piece):
                return False
        except P2PDistError as error:
            self._fail(error)
            return False
        del self._unseen[piece]
        self._on_event(PieceReceived(self.number, piece, True))
        if self._blob.have.complete:
            self._done()
        return True

    def _flush(self) -> None:
        if self._handle is not None and self._closed is None and not self._flushing:
            self._flushing = True
            self._handle.flush_cache()

    def _flushed(self) -> None:
        """Look again at all pieces: a flush has ended, perhaps one that began before this piece."""
        self._flushing = False
        for piece, unseen in list(self._unseen.items()):
            if self._look(piece) or self._closed is not None:
                continue
            unseen.flushes += 1
            if unseen.flushes >= FLUSHES:
                logger.warning("piece %d of %s agrees with its torrent alone", piece, self._blob.digest)
                self._on_event(PieceReceived(self.number, piece, False))
                self._finish("corrupt", f"the torrent {self.torrent.name!r} is not one of {self._blob.digest}")
        if self._unseen:
            self._flush()

    def _count_copies(self, report: Callable[[list[int]], object]) -> None:
        if self._handle is not None:
            report(self._handle.piece_availability())

    def _give(self, piece: int, data: bytes) -> None:
        if self._handle is not None and self._closed is None:
            self._handle.add_piece(piece, data, 0)

    # -- the end

    def _connect(self, peers: Sequence[Address]) -> None:
        if self._closed is None:
            known = dict.fromkeys((*self._swarm.peers, *peers))
            self._swarm = replace(self._swarm, peers=tuple(known)[-PEERS_MAX:])
        if self._handle is not None and self._closed is None:
            for peer in peers:
                if peer not in self._banned:
                    self._handle.connect_peer(peer)

    def _done(self) -> None:
        """End, or stay in the swarm: all pieces are verified."""
        if self._file is None or self._handle is None or self._closed is not None:
            self._finish("done")
            return
        self._closed, self._leaves_at = StreamClosed(self.number, "done"), time.monotonic() + STAY_S
        self._blob.release()
        self._on_event(self._closed)
        self._over.set()

    def _hand_over(self, take: Callable[[Any, OpenFile], Member], otherwise: Callable[[], object]) -> None:
        if self._leaves_at is None or self._file is None or self._session.closing:
            otherwise()
            return
        self._leaves_at = self._handle = None
        self._session.replace(take(self._lt, self._file))

    def _leave(self) -> None:
        self._leaves_at = None
        self._session.remove(self.info_hash)

    def _finish(self, reason: Ending, detail: str = "", error: P2PDistError | None = None) -> None:
        """Have libtorrent remove the torrent: it closes all connections, writes its cache and
        closes the file."""
        if self._closed is not None:
            return
        self._closed = StreamClosed(self.number, reason, detail, error)
        if self._handle is not None:
            self._session.remove(self.info_hash)

    def _fail(self, error: P2PDistError) -> None:
        if self._leaves_at is not None:
            self._leave()
        self._finish("failed", error.what, error)


def _file_error(blob: PartialBlob, alert: lt.file_error_alert) -> P2PDistError:
    """What a failure of libtorrent to use the blob's file means to a user."""
    path = blob.path
    if alert.error.value() in _FULL:
        needed = max(0, blob.layout.size - len(blob.have) * blob.layout.piece_size)
        return DiskFull.on(str(path.parent), os.statvfs(path.parent), needed=needed, code=alert.error.value())
    return P2PDistError(
        f"{path} cannot be used: {alert.error.message()}",
        remedy="Check the disk and the permissions of the directory",
    )
