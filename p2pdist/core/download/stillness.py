"""Which stripes of a download are slow or stand still, by the measure of the others."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from p2pdist.core.download.events import CloseStream, Command, Complain, Starved
from p2pdist.core.download.streams import Demand, Streams
from p2pdist.core.download.stripe import STALL_PACES, Receiving, Stripe, first_piece_s
from p2pdist.core.sources import Sources
from p2pdist.model.pieces import PieceLayout, PieceSet
from p2pdist.model.plan import Source

STALL_FIRST_S = 0.6
"""The least time after which a stripe that stands still is complained of."""

STALL_TURNS, FILL_TURNS = 3.0, 12.0
"""Where pieces are large a stripe stands still between two of them, while the other stripes have
their turns at the downlink (PieceLayout.turn_s). It may do so for STALL_TURNS turns as long as they
took of late, and before its first piece, which comes through a tree of some depth, for FILL_TURNS,
but not longer than for STALL_TURNS turns on a slow link."""

SLOW_WINDOW_S = 0.5

STILL_MIN_S, STILL_PACES, STILL_GAPS = 0.15, 4.0, 2.0
"""A stripe stands still that got nothing for so many times as long as its pieces take, and as the
longest gap of late between two pieces of any stripe, and for STILL_MIN_S."""

GAP_FADES = 0.98
"""With each piece the longest gap counts for less."""

STILL_PIECES = 3
"""Pieces of a stripe that show how long one takes."""

STARVED_STILLS = 1.1
"""A host that has pieces says that it gets no more after so many times as long."""

HEDGES_LEAST, HEDGES_SHARE = 4, 1 / 64
"""A hedge brings one piece; a pull has so many, or this share of its pieces."""


@dataclass(slots=True)
class Window:
    """A window of SLOW_WINDOW_S, in which the stripes are compared."""

    began_at: float = 0.0

    def complaints(self, stripes: list[Stripe], *, now: float) -> Iterator[Complain]:
        """The stripes that turn out slow at the end of a window, which is now."""
        self.began_at = now
        best = max(stripe.gained for stripe in stripes)
        for stripe in stripes:
            if stripe.is_slow(best) and isinstance(stripe.state, Receiving):
                yield Complain(stripe.number, stripe.state.source, "slow")


@dataclass(slots=True)
class TurnTimes:
    """How long turns at the downlink take, in which each stripe has a piece."""

    layout: PieceLayout
    stripes: int
    _first_at: float = 0.0
    """When the first piece came."""
    _last_at: float = 0.0
    """When the last one came."""
    _pieces: int = 0
    """Pieces that came."""

    def stored(self, *, now: float) -> None:
        """A piece was stored."""
        if not self._pieces:
            self._first_at = now
        self._pieces, self._last_at = self._pieces + 1, now

    def stall_s(self, receiving: Receiving, bytes_s: float, *, begun: bool) -> float:
        """For how long a stripe may stand still at least, where it comes no faster than `bytes_s`
        (0: no limit). `begun`: a piece of it has come."""
        opening_s = 0.0 if receiving.delivered else first_piece_s(self.layout.piece_size, receiving.response_s)
        opening_s += STALL_PACES * self.layout.piece_size / bytes_s if bytes_s else 0.0
        if not self.layout.large:
            return STALL_FIRST_S + opening_s
        limit_s = STALL_TURNS * self.layout.turn_s()
        if self._pieces > 1:
            turn_s = self.stripes * (self._last_at - self._first_at) / (self._pieces - 1)
            limit_s = STALL_TURNS * turn_s if begun else min(limit_s, FILL_TURNS * turn_s)
        return max(STALL_FIRST_S, limit_s) + opening_s


@dataclass(slots=True)
class Standstill:
    """Finds stripes that stand still by the measure of their pull, and hedges."""

    streams: Streams
    layout: PieceLayout
    sources: Sources
    stripes: Sequence[Stripe]
    hedges: int = field(init=False)
    """How many pieces may still be asked for so."""
    turns: TurnTimes = field(init=False)
    _longest_s: float = 0.0
    """The longest gap of late between two pieces of one stream."""

    def __post_init__(self) -> None:
        self.hedges = max(HEDGES_LEAST, int(HEDGES_SHARE * self.layout.count))
        self.turns = TurnTimes(self.layout, len(self.stripes))

    def gap(self, seconds: float) -> None:
        """A stream gave a piece so long after the one before."""
        self._longest_s = max(seconds, GAP_FADES * self._longest_s)

    def due_s(self, *, now: float) -> float:
        """In how many seconds a stripe may stand still at the earliest."""
        receiving = [(stripe, state) for stripe in self.stripes if (state := self._judged(stripe)) is not None]
        still = [(stripe.stored_at - now, self._still_s(stripe, state)) for stripe, state in receiving]
        due = [since + share * still_s for since, still_s in still for share in (1.0, STARVED_STILLS)]
        return min((left_s for left_s in due if left_s > 0), default=STILL_MIN_S)

    def look(self, have: PieceSet, progressed_at: float, *, now: float) -> list[Command]:
        """Ask other sources for the next pieces of stripes that stand still, and say it where the
        whole pull does; a piece of the blob came last at `progressed_at`."""
        return [*self._hedge(have, now), *self._starved(progressed_at, now)]

    def _hedge(self, have: PieceSet, now: float) -> Iterator[Command]:
        open_hedges = {demand.hedges: stream for stream, demand in self.streams.demands.items() if demand.hedges}
        for stripe in self.stripes:
            state = self._judged(stripe)
            if state is None or now - stripe.stored_at < self._still_s(stripe, state):
                continue
            stream = open_hedges.pop(state.stream, None)
            if stream is not None and now - self.streams.demands[stream].opened_at < self._still_s(stripe, None):
                continue
            if stream is not None:
                yield from self._close(stream)
            named = (stripe.candidates.parent, *stripe.candidates.alternates)
            untried = (each for each in named if each is not None and each != state.source and each not in state.hedged)
            source = next((each for each in untried if not each.is_origin and self.sources.usable(each, now=now)), None)
            if source is not None and self.hedges > 0:
                self.hedges -= 1
                state.hedged[source] = None
                missing = range(stripe.number, self.layout.count, len(self.stripes))
                piece = next(piece for piece in missing if piece not in have)
                yield self.streams.hedge(Demand(stripe.number, frozenset((piece,)), source, now, False, state.stream))
        for stream in open_hedges.values():  # of streams that gave a piece since, or have ended
            yield from self._close(stream)

    def winner(self, stripe: Stripe, number: int) -> Source | None:
        """The source of a hedge that gave its piece while the source of the stripe gave nothing."""
        hedge, state = self.streams.demands.get(number), stripe.state
        if hedge is None or not isinstance(state, Receiving) or hedge.hedges != state.stream:
            return None
        return hedge.source if stripe.stored_at <= hedge.opened_at else None

    def _starved(self, progressed_at: float, now: float) -> list[Starved]:
        """What is to be said of the sources, once the whole pull stands still."""
        lacking = [(stripe, self._judged(stripe)) for stripe in self.stripes if stripe.missing]
        still_s = STARVED_STILLS * max((self._still_s(stripe, state) for stripe, state in lacking), default=0.0)
        since = max([progressed_at, *(stripe.stored_at for stripe, _ in lacking)])  # of one that is held back: now
        if now - since < still_s:
            return []
        told = []
        for stripe, state in lacking:
            if state is None:
                return []
            if state.still_at != progressed_at:
                state.still_at = progressed_at
                told.append(Starved(stripe.number, state.source))
        return told

    def _judged(self, stripe: Stripe) -> Receiving | None:
        """How a stripe is received, if it can be told how long its pieces take."""
        state = stripe.state
        if not isinstance(state, Receiving) or state.awaiting or state.source.is_origin:
            return None
        return state if stripe.pieces >= STILL_PIECES and not self.layout.large else None

    def _still_s(self, stripe: Stripe, state: Receiving | None) -> float:
        """After how long without a piece a stripe stands still; `state` None: a hedge for it."""
        opening_s = (
            0.0 if state is not None and state.delivered else self.sources.times.starved_s(self.layout.piece_size)
        )
        return max(STILL_MIN_S, STILL_PACES * stripe.pace_s, STILL_GAPS * self._longest_s, opening_s)

    def _close(self, stream: int) -> Iterator[CloseStream]:
        if not self.streams.demands[stream].closed:
            self.streams.demands[stream].closed = True
            yield CloseStream(stream, after_piece=False)
