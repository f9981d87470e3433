"""The BitTorrent session of an agent: one libtorrent session, and the one thread that speaks with
it.

Theory. libtorrent runs in threads of its own and tells what happens in alerts. The thread here
waits for alerts and for calls from outside, and hands each alert to the member, a torrent that
fetches or seeds, whose it is. So members need no locks: all their methods but those that say
otherwise run in this thread. What they have to tell the event loop they post to a Mailbox. Peers
get a piece from libtorrent before anything is heard of it here, so there is no hurry before the
last ones: alerts are gathered for GATHER_S, and many pieces share a wake-up.

Invariants: at most one member for an info hash. Whoever is added hears `removed` exactly once, as
the last thing, when libtorrent has let go of the file, which may then be renamed or deleted. Alerts
that wait are bounded (ALERTS_MAX); when some were dropped, members look themselves at how things
stand (`overlooked`). Addresses of peers in data centres are local ones; the rate limits hold for
these as well, which libtorrent would exempt.

libtorrent is imported when a session starts: it takes some time and 20 MB that agents without
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
"""How long alerts are gathered; the second while a member waits for its last pieces, and somebody
for it."""

STATS_S = 1.0
"""How often counters are asked for."""

logger = logging.getLogger(__name__)


class Member(Protocol):
    """A torrent of a session. The session's thread calls everything but `info_hash`."""

    @property
    def info_hash(self) -> bytes:
        """Of version 1, 20 bytes."""

    def parameters(self, lt: Any) -> lt.add_torrent_params:
        """What to add; raises P2PDistError."""

    def added(self, handle: lt.torrent_handle) -> None: ...
    def alert(self, alert: lt.alert) -> None: ...
    def overlooked(self) -> None:
        """Alerts were lost."""

    def tick(self, now: float) -> float | None:
        """Do what is due at `now` (time.monotonic); returns when to come again."""

    @property
    def nearly_done(self) -> bool:
        """Whether it waits for its last pieces."""

    def close(self) -> None:
        """The session ends. `removed` must come of it, sooner or later. May be called from any
        thread."""

    def removed(self, error: P2PDistError | None) -> None:
        """libtorrent has nothing to do with it any more; `error` says why it did not get to add
        it."""


class TorrentSession:
    """See the module's text. start() and close() block; the rest returns at once, from any
    thread."""

    def __init__(self, settings: TorrentSettings) -> None:
        self._settings = settings
        self._calls: deque[Callable[[], None]] = deque()
        self._lock = threading.Lock()
        self._open = False
        self._closing = False
        self._members: dict[bytes, Member] = {}
        self._handles: dict[bytes, lt.torrent_handle] = {}
        self._session: lt.session | None = None
        self._ready = threading.Event()
        self._failure: P2PDistError | None = None
        self._wake_in, self._wake_out = -1, -1
        self._alert_in, self._alert_out = -1, -1
        self._poll, self._poll_all = select.poll(), select.poll()
        self._heard_at = 0.0
        self._stats_at = 0.0
        self._watchers = 0
        self._thread = threading.Thread(target=self._run, name="bittorrent", daemon=True)
        self.port = 0
        self.sent_bytes = self.received_bytes = 0
        """Payload over all torrents, looked at every STATS_S."""
        self.peers_banned = 0

    def start(self) -> None:
        """Listen; once only. Raises Unavailable when the address or libtorrent cannot be used."""
        self._wake_in, self._wake_out = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self._alert_in, self._alert_out = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        for poll, descriptor in (
            (self._poll, self._wake_in),
            (self._poll_all, self._wake_in),
            (self._poll_all, self._alert_in),
        ):
            poll.register(descriptor, select.POLLIN)
        with self._lock:
            self._open = True
        self._thread.start()
        if not self._ready.wait(START_TIMEOUT_S):
            self._failure = Unavailable("libtorrent does not begin to listen", remedy="See the agent's log")
        if self._failure is not None:
            self.close()
            raise self._failure

    def close(self, timeout_s: float = CLOSE_TIMEOUT_S) -> bool:
        """Remove all torrents, then end; False when libtorrent has not let go of all files within
        `timeout_s`. Idempotent."""
        if self.call(self._begin_close) or self._thread.is_alive():
            self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def add(self, member: Member) -> None:
        """Take part in a swarm. What becomes of it the member is told; where the session is closed
        that is `removed`, in this thread."""
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
        """How many connections a torrent may have while it is fetched; -1 for as many as come."""
        return self._settings.peers_max

    @property
    def closing(self) -> bool:
        """Whether the session is about to end."""
        return self._closing

    def replace(self, member: Member) -> None:
        """Another member takes over the torrent that has its info hash; the one before hears
        nothing more."""
        self._members[member.info_hash] = member
        member.added(self._handles[member.info_hash])

    def watch_blocks(self, watch: bool) -> None:
        """Whether one more member, or one less, wants to hear of every block. That costs: there are
        thousands a second."""
        self._watchers += 1 if watch else -1
        self._apply({"alert_mask": self._mask()})

    # -- the thread

    def _run(self) -> None:
        try:
            self._begin()
            while not (self._closing and not self._members):
                self._turn()
        except Exception as error:
            logger.exception("BitTorrent fails")
            self._failure = Unavailable(f"BitTorrent has failed: {error!r}", remedy="See the agent's log")
        finally:
            self._end()

    def _begin(self) -> None:
        import libtorrent as lt

        self._lt = lt
        self._session = lt.session({**self._settings.pack(), "alert_mask": self._mask()})
        everybody = lt.ip_filter()
        everybody.add_rule("0.0.0.0", "255.255.255.255", 1 << lt.session.global_peer_class_id)
        everybody.add_rule("::", "ffff:ffff:ffff:ffff:ffff:ffff:ffff:ffff", 1 << lt.session.global_peer_class_id)
        self._session.set_peer_class_filter(everybody)
        self._session.set_alert_fd(self._alert_out)

    def _mask(self) -> int:
        wanted = self._lt.alert_category
        mask = wanted.error | wanted.status | wanted.storage | wanted.piece_progress | wanted.peer | wanted.tracker
        return mask | wanted.block_progress if self._watchers else mask

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

    def _turn(self) -> None:
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
        """Until there are calls, or alerts that have been gathered for a while, or it is `due`. Who
        hears of blocks looks at connections that may be gone a moment later."""
        hurry = any(member.nearly_done for member in self._members.values())
        gather_s = 0.0 if self._watchers else GATHER_LAST_S if hurry else GATHER_S
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
