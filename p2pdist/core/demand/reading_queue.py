"""Which readings of one blob may have their pieces come first.

Theory. A client that asks for many ranges at once, such as a loader of weights, can go on with the
first that is whole. Were all of them brought alike, all would end at the end. So readings take
turns: the long one at the lowest piece has a turn, and those behind it when it ends, or its client
takes nothing, or it stands still for STILL_S. The others meanwhile get what comes anyway, which is
everything in the end. The piece at which a reading has waited for long comes without a turn: a
client leaves a connection over which nothing comes (several do after 3 s). A short reading, which
may be a header without which its client does not know what to ask for, holds up no other one.

Invariants: of the readings whose clients read, one has a turn at least; a reading that is left
holds up no other one for longer than GAP_S. Times are in seconds.
"""

from __future__ import annotations

from dataclasses import dataclass, field

GAP_S = 0.25
"""A client that reads again within so long has not stopped."""

STILL_S = 1.0

WAIT_S = 2.0
"""A reading waits so long at a piece until that comes without a turn."""

SHORT_BYTES = 1 << 20
"""A range of up to so many bytes is a short reading."""


@dataclass(slots=True, eq=False)
class Reading:
    """One reading of a range."""

    short: bool
    over: bool = False
    """Its client waits no longer; written by the owner."""


@dataclass(slots=True)
class _Place:
    piece: int
    """Where the reading is."""
    since: float
    """Since when it is there."""
    seen_at: float
    """When its client read or waited last."""


@dataclass(slots=True)
class ReadingQueue:
    """The readings of a blob, and whose turn it is."""

    _places: dict[Reading, _Place] = field(default_factory=dict)

    def reads(self, reading: Reading, piece: int, *, now: float) -> None:
        """A client reads a piece, or waits for it: to be said again and again meanwhile."""
        self._places = {other: place for other, place in self._places.items() if now - place.seen_at <= GAP_S}
        place = self._places.setdefault(reading, _Place(piece, now, now))
        if place.piece != piece:
            place.piece, place.since = piece, now
        place.seen_at = now

    def late(self, reading: Reading, *, now: float) -> bool:
        """Whether the piece at which a reading waits is to come without a turn."""
        own = self._places.get(reading)
        return own is not None and now - own.since >= WAIT_S

    def has(self, reading: Reading, *, now: float) -> bool:
        """Whether a reading has a turn. One whose client takes nothing has none."""
        own = self._places.get(reading)
        if own is None or now - own.seen_at > GAP_S:
            return False
        return not any(
            place.piece < own.piece and now - place.seen_at <= GAP_S and now - place.since < STILL_S
            for other, place in self._places.items()
            if not other.short and not other.over
        )
