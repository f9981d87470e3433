"""The BitTorrent session of an agent: one libtorrent session, and the one thread that calls it.

Theory. libtorrent runs in threads of its own and reports in alerts. The session's thread waits for
alerts and for calls from other threads, and passes each alert to its member: a torrent that fetches
or seeds. So members need no locks: their methods run in this thread unless they say otherwise. They
post events for the event loop to a Mailbox. libtorrent gives a piece to peers before it reports it,
so only a transfer's last pieces are urgent: alerts are gathered for GATHER_S, and many pieces share
a wake-up.

Invariants: at most one member for an info hash. The session calls `removed` of each added member
exactly once, last, when libtorrent has closed the file, which may then be renamed or deleted.
Waiting alerts are bounded (ALERTS_MAX); when libtorrent dropped some, members query the state of
their torrents (`overlooked`). Peers in data centres have local addresses, which libtorrent would
exempt from the rate limits; the session does not.

libtorrent is imported when a session starts, since it takes time and memory that agents without
BitTorrent should not pay.
"""

from __future__ import annotations

import logging
import os
import select
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Protocol

from p2pdist.model.errors import Conflict, P2PDistError, Unavailable
from p2pdist.transfer.torrent.settings import TorrentSettings, limits

if TYPE_CHECKING:
    import libtorrent as lt

START_TIMEOUT_S = 5.0
CLOSE_TIMEOUT_S = 5.0
GATHER_S, GATHER_LAST_S = 0.2, 0.02
"""How long alerts are gathered: at most, and while a member waits for its last pieces."""

STATS_S = 1.0
"""How often the session queries libtorrent's counters."""

logger = logging.getLogger(__name__)


class Member(Protocol):
    """A torrent of a session. The session's thread calls all methods but `info_hash` and
    `close`."""

    @property
    def info_hash(self) -> bytes:
        """The info hash of version 1, 20 bytes."""

    def parameters(self, lt: Any) -> lt.add_torrent_params:
        """What libtorrent is to add; raises P2PDistError."""

    def added(self, handle: lt.torrent_handle) -> None: ...
    def alert(self, alert: lt.alert) -> None: ...
    def overlooked(self) -> None:
        """Query the torrent's state: libtorrent dropped some alerts."""

    def tick(self, now: float) -> float | None:
        """Do what is due at `now` (time.monotonic); returns when the next tick is due."""

    @property
    def nearly_done(self) -> bool:
        """Whether the torrent waits for its last pieces."""

    def close(self) -> None:
        """Have the torrent removed, since the session ends; `removed` follows. May be called from
        any thread."""

    def removed(self, error: P2PDistError | None) -> None:
        """Clean up: libtorrent no longer has the torrent. `error` says why it was never added."""


class TorrentSession:
    """One libtorrent session and its members. start() and close() block; the other methods return
    at once, in any thread."""

    def __init__(self, settings: TorrentSettings) -> None:
        self._settings = settings
        self._calls: deque[Callable[[], None]] = deque()
        """What other threads want run in the session's thread; written by `call`."""
        self._lock = threading.Lock()
        self._open = False
        """Whether `call` is possible; written under the lock."""
        self._closing = False
        self._closed = False
        """Whether `close` was called; written under the lock."""
        self._members: dict[bytes, Member] = {}
        self._handles: dict[bytes, lt.torrent_handle] = {}
        """By info hash, as are the members."""
        self._session: lt.session | None = None
        self._ready = threading.Event()
        self._failure: P2PDistError | None = None
        self._wake_in, self._wake_out = -1, -1
        self._alert_in, self._alert_out = -1, -1
        self._poll, self._poll_all = select.poll(), select.poll()
        self._heard_at = 0.0
        """When the last alert came (time.monotonic)."""
        self._stats_at = 0.0
        """When counters are queried next."""
        self._thread = threading.Thread(target=self._run, name="bittorrent", daemon=True)
        self.port = 0
        self.sent_bytes = self.received_bytes = 0
        """Payload over all torrents, read every STATS_S."""
        self.peers_banned = 0

    def start(self) -> None:
        """Listen; once only. Raises Unavailable when the address or libtorrent cannot be used, or
        the session was closed before."""
        with self._lock:  # who closes it meanwhile waits for a thread that runs
            if self._closed:
                raise Unavailable("BitTorrent is not running")
            self._wake_in, self._wake_out = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
            self._alert_in, self._alert_out = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
            for poll, descriptor in (
                (self._poll, self._wake_in),
                (self._poll_all, self._wake_in),
                (self._poll_all, self._alert_in),
            ):
                poll.register(descriptor, select.POLLIN)
            self._open = True
            self._thread.start()
        if not self._ready.wait(START_TIMEOUT_S):
            self._failure = Unavailable("libtorrent does not begin to listen", remedy="See the agent's log")
        if self._failure is not None:
            self.close()
            raise self._failure

    def close(self, timeout_s: float = CLOSE_TIMEOUT_S) -> bool:
        """Remove all torrents, then end; False when libtorrent has not closed all files within
        `timeout_s`. Idempotent."""
        with self._lock:
            self._closed = True
        if self.call(self._begin_close) or self._thread.is_alive():
            self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def add(self, member: Member) -> None:
        """Add a torrent. The session calls the member's methods from then on; a closed session
        calls only `removed`, in the caller's thread."""
        if not self.call(lambda: self._add(member)):
            member.removed(Unavailable("BitTorrent is not running"))

    def call(self, function: Callable[[], None]) -> bool:
        """Run `function` in the session's thread; False when that has ended."""
        with self._lock:
            if not self._open:
                return False
            self._calls.append(function)
            try:
                os.write(self._wake_out, b"\0")
            except BlockingIOError:  # so full that the thread is sure to wake up
                logger.debug("the session's thread is behind")
        return True

    def set_limits(self, upload_bytes_s: int, download_bytes_s: int) -> None:
        """Limit the rates over all torrents; 0 is no limit."""
        self.call(lambda: self._apply(limits(upload_bytes_s, download_bytes_s)))

    # -- for members, in the session's thread

    def remove(self, info_hash: bytes) -> None:
        """Begin to remove a torrent; files stay."""
        assert self._session is not None
        self._session.remove_torrent(self._handles[info_hash])

    @property
    def peers_max(self) -> int:
        """How many connections a torrent may have while it is fetched; -1 for no limit."""
        return self._settings.peers_max

    @property
    def closing(self) -> bool:
        """Whether the session is about to end."""
        return self._closing

    def replace(self, member: Member) -> None:
        """Make `member` the member of the torrent with its info hash. The session calls the former
        one no more."""
        self._members[member.info_hash] = member
        member.added(self._handles[member.info_hash])

    # -- the thread

    def _run(self) -> None:
        try:
            self._begin()
            while not (self._closing and not self._members):
                self._step()
        except Exception as error:
            logger.exception("BitTorrent fails")
            self._failure = Unavailable(f"BitTorrent has failed: {error!r}", remedy="See the agent's log")
        finally:
            self._end()

    def _begin(self) -> None:
        import libtorrent as lt

        self._lt = lt
        self._session = lt.session({**self._settings.pack(), "alert_mask": self._mask()})
        addresses = lt.ip_filter()
        addresses.add_rule("0.0.0.0", "255.255.255.255", 1 << lt.session.global_peer_class_id)
        addresses.add_rule("::", "ffff:ffff:ffff:ffff:ffff:ffff:ffff:ffff", 1 << lt.session.global_peer_class_id)
        self._session.set_peer_class_filter(addresses)
        self._session.set_alert_fd(self._alert_out)

    def _mask(self) -> int:
        category = self._lt.alert_category
        mask = category.error | category.status | category.storage | category.piece_progress
        return mask | category.peer | category.tracker

    def _end(self) -> None:
        self._session = None  # waits for libtorrent's threads
        with self._lock:
            self._open = False
        failure = self._failure or Unavailable("BitTorrent is not running")
        while self._calls:
            self._calls.popleft()()
        for member in list(self._members.values()):
            member.removed(failure)
        self._members.clear()
        self._handles.clear()
        for descriptor in (self._wake_in, self._wake_out, self._alert_in, self._alert_out):
            os.close(descriptor)
        self._ready.set()

    def _step(self) -> None:
        """Tick the members, wait, and run the calls and alerts that have come."""
        assert self._session is not None
        now = time.monotonic()
        if now >= self._stats_at:
            self._stats_at = now + STATS_S
            self._session.post_session_stats()
        due = self._stats_at
        for member in list(self._members.values()):
            due = min(due, member.tick(now) or due)
        self._wait(due)
        for _ in range(len(self._calls)):
            self._calls.popleft()()
        for alert in self._session.pop_alerts():
            self._heard_at = now
            self._dispatch(alert)

    def _wait(self, due: float) -> None:
        """Wait until there are calls, or alerts that have been gathered for a while, or it is
        `due`."""
        last_pieces = any(member.nearly_done for member in self._members.values())
        gather_s = GATHER_LAST_S if last_pieces else GATHER_S
        for poll, until in ((self._poll, min(due, self._heard_at + gather_s)), (self._poll_all, due)):
            if not self._calls:
                poll.poll(max(0.0, until - time.monotonic()) * 1000)
        for descriptor in (self._wake_in, self._alert_in):
            with suppress(BlockingIOError):
                os.read(descriptor, 65536)

    def _dispatch(self, alert: lt.alert) -> None:
        lt = self._lt
        match alert:
            case lt.torrent_removed_alert():
                self._forget(alert.info_hashes.v1.to_bytes(), None)
            case lt.torrent_alert():
                if isinstance(alert, lt.peer_ban_alert):
                    self.peers_banned += 1
                    logger.warning("peer=%s:%d is banned for wrong bytes", *alert.endpoint)
                elif isinstance(alert, lt.tracker_error_alert | lt.tracker_warning_alert):
                    logger.info("BitTorrent tracker: %s", alert.message())
                member = self._members.get(alert.handle.info_hashes().v1.to_bytes())
                if member is not None:
                    member.alert(alert)
            case lt.session_stats_alert():
                values = alert.values
                self.sent_bytes = values["net.sent_payload_bytes"]
                self.received_bytes = values["net.recv_payload_bytes"]
            case lt.alerts_dropped_alert():
                self._overlooked()
            case lt.listen_succeeded_alert():
                self.port = self._session.listen_port() if self._session is not None else 0
                self._ready.set()
            case lt.listen_failed_alert():
                where = f"{self._settings.listen_address}:{self._settings.listen_port}"
                error = Unavailable(
                    f"BitTorrent cannot listen on {where}: {alert.error.message()}", remedy="Give it another port"
                )
                if self._ready.is_set():
                    logger.warning("%s", error)
                else:
                    self._failure = error
                    self._ready.set()

    def _overlooked(self) -> None:
        logger.warning("alerts of libtorrent were dropped; looking at every torrent")
        for info_hash, member in list(self._members.items()):
            if self._handles[info_hash].is_valid():
                member.overlooked()
            else:
                self._forget(info_hash, None)

    def _add(self, member: Member) -> None:
        info_hash = member.info_hash
        if self._session is None or self._closing:
            member.removed(Unavailable("BitTorrent is not running"))
        elif info_hash in self._members:
            member.removed(Conflict(f"the torrent {info_hash.hex()} is active already"))
        else:
            try:
                handle = self._session.add_torrent(member.parameters(self._lt))
            except P2PDistError as error:
                member.removed(error)
            except RuntimeError as error:
                member.removed(P2PDistError(f"libtorrent does not take the torrent {info_hash.hex()}: {error}"))
            else:
                self._members[info_hash], self._handles[info_hash] = member, handle
                member.added(handle)

    def _forget(self, info_hash: bytes, error: P2PDistError | None) -> None:
        member = self._members.pop(info_hash, None)
        self._handles.pop(info_hash, None)
        if member is not None:
            member.removed(error)

    def _apply(self, settings: lt.settings_pack) -> None:
        if self._session is not None:
            self._session.apply_settings(settings)

    def _begin_close(self) -> None:
        self._closing = True
        for member in list(self._members.values()):
            member.close()
