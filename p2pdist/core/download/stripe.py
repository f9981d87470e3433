"""One stripe of a download: its sources, the stream that brings it, and what it says of that."""

from __future__ import annotations

from dataclasses import dataclass, field
from math import ceil, log2
from typing import Literal

from p2pdist.core.download.events import Quiet, Starved, StreamEnded
from p2pdist.core.sources import Candidates, Sources
from p2pdist.model.pieces import PieceLayout
from p2pdist.model.plan import ORIGIN, Source

STALL_MAX_S = 30.0
"""A source is complained of after this long at the latest, however often it was before."""

STALL_PACES = 4.0
"""A stripe stands still for so many times as long as its pieces take before that is complained
of."""

CONNECT_S, RESPONSE_CONNECTS = 0.6, 4.0
"""A source has so long to take a connection, and so many times as long as that took to respond:
where this host's uplink is full, what it asks waits behind the pieces that it sends, and the source
is not silent. A host that left its parent for that would stay at an alternate, which has no upload
slot for it."""

INITIAL_WINDOW_BYTES = 10 * 1448
"""What TCP sends in the first round trip of a connection (RFC 6928); it doubles in each."""

SLOW_SHARE = 0.4
SLOW_PIECES = 8
"""A stripe is slow that gets less than this share of what the best one got in a window, when that
got at least so many pieces (stillness.py)."""

MOVING_BYTES_S = 4096.0
"""A stream that has given no piece yet is silent while bytes come more slowly than that."""

STALE_MAX = 3
"""So often a source may send what was listed before: it has not heard yet."""

STARVED_MAX = 2
"""So often a stripe's sources are said to starve this host, before it has a piece of the blob."""


@dataclass(frozen=True, slots=True)
class Waiting:
    """No stream brings the stripe, and none is opened before `until`."""

    until: float = 0.0


@dataclass(slots=True)
class Receiving:
    """A stream from `source` brings the stripe."""

    stream: int
    source: Source
    quiet_since: float
    """When a piece of the stripe was stored last, its stream opened or complained of."""
    opened_at: float
    delivered: int = 0
    """Pieces that the stream brought."""
    moved_at: float = 0.0
    """When bytes came last, the source responded, or its silence was complained of (`Quiet`)."""
    responded: bool = False
    received_bytes: int = 0
    """As of `moved_at`."""
    response_s: float = 0.0
    """How long the source took to respond, which is a round trip at least; 0 while not known
    (`silent`)."""
    awaiting: bool = False
    """A piece has come and waits for its hash."""
    starves: bool = False
    """It was said that the source gives nothing to this host, which has nothing (`starved`)."""
    still_at: float = -1.0
    """When a piece of the blob came last, as of when it was said that the source gives no more
    (`Standstill`)."""
    hedged: dict[Source, None] = field(default_factory=dict)
    """Sources that were asked as well since it gave a piece (`Standstill`)."""

    def silent_s(self, event: Quiet, *, now: float) -> float:
        """For how long the source has been silent, before its first piece."""
        moved_bytes = event.received_bytes - self.received_bytes
        moves = moved_bytes > 0 and moved_bytes >= MOVING_BYTES_S * (now - self.moved_at)
        if moves or event.responded != self.responded:
            self.moved_at, self.responded, self.received_bytes = now, event.responded, event.received_bytes
        return now - self.moved_at


@dataclass(frozen=True, slots=True)
class Complete:
    """The stripe lacks nothing."""


End = Literal["has nothing else", "gave", "failed"]
"""What the end of a stream says of its source: the stripe's last pieces are under way from another
one; it gave what it had; it failed."""


@dataclass(slots=True)
class Stripe:
    """What is known of one stripe."""

    number: int
    missing: int
    """Pieces that are not stored."""
    candidates: Candidates
    state: Waiting | Receiving | Complete
    stored_at: float
    """When a piece was stored last, or a stream opened."""
    doubted: bool = False
    """Whether the last stream that ended well brought nothing (`_ended`)."""
    pace_s: float = 0.0
    """How long a piece takes, smoothed."""
    complaints: int = 0
    """How often its sources were complained of as stalled since a piece was stored."""
    stale: int = 0
    """How often sources sent what was listed before, since a piece was stored."""
    denials: int = 0
    """How often sources did not take this host's ticket since a piece was stored."""
    starved_by: int = 0
    """How often its sources were said to starve this host (`starved`)."""
    pieces: int = 0
    """Pieces stored since the pull began."""
    gained: int = 0
    """Pieces stored since the window began (`is_slow`)."""
    slow_windows: int = 0
    """Windows in a row in which the stripe was slow."""
    bytes_s: float = 0.0
    """No faster than this it comes, by the last plan; 0 for no limit."""

    def stored(self, *, now: float) -> None:
        """One of its pieces was stored."""
        self.missing -= 1
        self.pieces += 1
        self.gained += 1
        self.pace_s += 0.25 * (now - self.stored_at - self.pace_s)
        self.stored_at = now
        self.complaints = self.denials = self.stale = 0

    def lost(self, *, planned: bool) -> None:
        """A piece that was stored is no more. `planned`: a tracker will say where it comes from."""
        self.missing += 1
        if isinstance(self.state, Complete):
            self.state = Waiting()
            if planned:
                self.candidates.planned(None, ())

    def await_hash(self) -> None:
        """A piece of its stream waits for its hash."""
        if isinstance(self.state, Receiving):
            self.state.awaiting = True

    def wants_back(self, sources: Sources, *, now: float) -> bool:
        """Whether it is time to leave its source for one that the tracker prefers."""
        return isinstance(self.state, Receiving) and self.candidates.wants_back(self.state.source, sources, now=now)

    @property
    def awaits(self) -> Source | None:
        """The source of a piece that waits for its hash."""
        return self.state.source if isinstance(self.state, Receiving) and self.state.awaiting else None

    def excuses(self, event: StreamEnded, receiving: Receiving) -> bool:
        """Whether a list explains other bytes than are listed: the source has not heard of the
        latest round, unless that happens again and again, or the origin differs from the list. An
        error with it says what else is wrong with the origin, such as its length."""
        self.stale += event.reason == "stale"
        differs = event.reason == "corrupt" and receiving.source == ORIGIN and event.error is None
        return differs or (event.reason == "stale" and self.stale <= STALE_MAX)

    def retry(self) -> None:
        """Let a waiting stripe try its sources at once."""
        if isinstance(self.state, Waiting):
            self.state = Waiting()

    @property
    def reads_unasked(self) -> bool:
        """Whether it comes from the origin without a lease."""
        reads_origin = isinstance(self.state, Receiving) and self.state.source == ORIGIN
        return reads_origin and self.candidates.parent != ORIGIN

    def end_of(self, receiving: Receiving, reason: str, *, finishing: bool) -> End:
        """What the end of its stream says of the source. `finishing`: another stream brings pieces
        of the stripe."""
        if reason not in ("done", "closed"):
            return "failed"
        if receiving.delivered:
            return "gave"
        if finishing:  # the source was told that this piece is under way from another one
            return "has nothing else"
        # The piece that was under way when the last stream was closed may have been lost, and with
        # it nothing was left to send. A source that says twice running that it gave everything, and
        # gave nothing, does not keep its word.
        return "failed" if self.doubted else "gave"

    def stalled(self, receiving: Receiving, least_s: float, *, alone_since: float | None, now: float) -> bool:
        """Whether it has stood still for so long, at least `least_s`, that its source is complained
        of. `alone_since`: since when no tracker answers, None while one does."""
        if receiving.awaiting:
            return False
        stall_s = max(least_s, STALL_PACES * self.pace_s)
        if alone_since is None:
            longest_s = max(STALL_MAX_S, least_s) if self.bytes_s else STALL_MAX_S
            limit_s = min(longest_s, stall_s * 2.0 ** min(self.complaints, 10))
            return now - receiving.quiet_since >= limit_s
        limit_s = self.candidates.patience_s(receiving.source, stall_s, fed=receiving.delivered > 0)
        return now - max(self.stored_at, alone_since) >= limit_s

    def silent(self, event: Quiet, sources: Sources, *, now: float) -> Source | None:
        """Its source, if that has been silent for too long before its first piece."""
        receiving = self.state
        if not isinstance(receiving, Receiving) or receiving.delivered or receiving.source.is_origin:
            return None
        receiving.response_s = event.response_s
        if receiving.awaiting or event.waits:
            return None
        limit_s = sources.silence_s(receiving.source, responded=event.responded)
        if not event.responded:
            limit_s = max(limit_s, CONNECT_S if event.connected_s is None else RESPONSE_CONNECTS * event.connected_s)
        if receiving.silent_s(event, now=now) < limit_s:
            return None
        receiving.moved_at = receiving.quiet_since = now
        return receiving.source

    def starved(self, sources: Sources, layout: PieceLayout, event: Quiet, *, now: float) -> list[Starved]:
        """What is to be said of its source, which has given nothing so far to this host, which has
        nothing."""
        receiving = self.state
        if not isinstance(receiving, Receiving) or receiving.source.is_origin or receiving.awaiting:
            return []
        late = now - receiving.opened_at >= sources.times.starved_s(layout.piece_size, event.connected_s)
        if receiving.starves or self.starved_by >= STARVED_MAX or not late:
            return []
        receiving.starves = True
        self.starved_by += 1
        return [Starved(self.number, receiving.source, event.waits)]

    def is_slow(self, best: int) -> bool:
        """Whether a complaint is due since it got far less than the `best` in the window that ends
        now: at the first such window, the second, the fourth ... in a row."""
        gained, self.gained = self.gained, 0
        receives = isinstance(self.state, Receiving) and not self.state.awaiting
        slow = receives and best >= SLOW_PIECES and gained < SLOW_SHARE * best
        self.slow_windows = self.slow_windows + 1 if slow else 0
        return self.slow_windows.bit_count() == 1


def first_piece_s(piece_size: int, round_trip_s: float) -> float:
    """How long a new connection takes to carry its first piece, however fast the path is. Over a
    long path that is no stall: a stream that is opened anew begins from the smallest window
    again."""
    return round_trip_s * ceil(log2(1 + piece_size / INITIAL_WINDOW_BYTES))
