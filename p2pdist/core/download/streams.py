"""The streams of a download: of stripes, of pieces that readers want, and hedges.

What a program of a lazy view reads goes before everything else in three steps: the agent demands
its pieces of the pull (agent/pull/blob.py, `BlobPull.demand`); `Streams.demand` asks sources for
them, here; and each sender sends what a reader waits for first (core/uplink.py, `ChildStream`).
When a piece counts as late and is asked for twice says stillness.py.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from math import inf

from p2pdist.core.download.events import CloseStream, OpenDemand, OpenStream, StreamEnded
from p2pdist.core.download.stripe import Receiving, Stripe, Waiting
from p2pdist.core.sources import Sources
from p2pdist.model.messages import DEMAND_PIECES_MAX
from p2pdist.model.pieces import PieceSet
from p2pdist.model.plan import Source

WANTED_S = 2.0
"""A wanted piece that has not come for so long is requested from the next source as well."""

PROMISE_MIN_S = 0.25
PROMISE_PACES = 4.0
"""A wanted piece that its source has sent over the stream of the stripe is not requested again for
so long, and as long as so many pieces of the stripe take."""

DEMANDS_MAX = 4
"""Streams at once that bring wanted pieces of one stripe."""

COMING_BYTES = 192 << 10
"""So much of what a stream brings next is on its way, in the kernels of both hosts and between
them: what a reader would request of it anew would come after it, and twice."""

PREFETCHES_MAX = 2
"""Streams beside these that bring pieces of one stripe for which a reader is going to wait."""


@dataclass(slots=True)
class Demand:
    """A stream that brings wanted pieces of a stripe."""

    stripe: int
    pieces: frozenset[int]
    source: Source
    opened_at: float
    prefetch: bool
    hedges: int = 0
    """The number of the stream that stands still, 0 where a reader waits."""
    closed: bool = False
    """Whether it was commanded to end."""

    def coming(self, have: PieceSet, next_ones: int, *, prefetch: bool) -> frozenset[int]:
        """The pieces that need not be requested once more. A reader that waits, without `prefetch`,
        does not wait behind what comes ahead but for the `next_ones` of it: any other piece is
        requested alone, and the source leaves it out of this stream."""
        if prefetch or not self.prefetch:
            return self.pieces
        return frozenset(sorted(piece for piece in self.pieces if piece not in have)[:next_ones])


@dataclass(slots=True)
class Streams:
    """The streams of a download, by number: one for each stripe that is Receiving, others that
    finish a piece, and others that bring wanted pieces."""

    next_ones: int = 1
    """How many pieces of a stream are on their way (COMING_BYTES)."""
    writing: set[int] = field(default_factory=set)
    """Those that were opened and have not ended."""
    stripes: dict[int, Stripe] = field(default_factory=dict)
    """The stripes that are Receiving."""
    finishing: dict[int, int] = field(default_factory=dict)
    """Those that were closed after the piece under way and have not ended: numbers of stripes."""
    demands: dict[int, Demand] = field(default_factory=dict)
    """Those that bring wanted pieces."""
    _promised: dict[int, float] = field(default_factory=dict)
    """Wanted pieces that are to come over the stream of their stripe: until when (`ended`)."""
    _last: int = 0

    def _number(self) -> int:
        self._last += 1
        self.writing.add(self._last)
        return self._last

    def open(self, stripe: Stripe, source: Source, *, now: float) -> OpenStream:
        """Have a waiting stripe come from a source."""
        stream = self._number()
        stripe.state, stripe.stored_at = Receiving(stream, source, now, now, moved_at=now), now
        self.stripes[stream] = stripe
        return OpenStream(stream, source, stripe.number)

    def close(self, stripe: Stripe, *, after_piece: bool) -> Iterator[CloseStream]:
        """Have a stripe wait, if it is Receiving."""
        if isinstance(stripe.state, Receiving):
            stream, stripe.state = stripe.state.stream, Waiting()
            if after_piece:
                self.finishing[stream] = stripe.number
            self.stripes.pop(stream, None)
            yield CloseStream(stream, after_piece)

    def demand(
        self,
        stripes: Sequence[Stripe],
        pieces: set[int],
        sources: Sources,
        have: PieceSet,
        *,
        prefetch: bool,
        now: float,
    ) -> list[OpenDemand | CloseStream]:
        """Open streams for wanted pieces: one for each stripe of which no stream brings them."""
        opened = list[OpenDemand | CloseStream]()
        for stripe in stripes:
            mine = {piece for piece in pieces if piece % len(stripes) == stripe.number}
            if prefetch and mine:
                opened += self._displace(stripe, min(mine))
            if mine and (demand := self._demand_of(stripe, mine, sources, have, prefetch, now=now)) is not None:
                if not prefetch:
                    self._divert(demand)
                stream = self._number()
                self.demands[stream] = demand
                chosen = tuple(sorted(demand.pieces))
                opened.append(OpenDemand(stream, demand.source, stripe.number, chosen, prefetch))
        return opened

    def _divert(self, demand: Demand) -> None:
        """What readers wait for comes alone from now on: the source leaves it out of the streams of
        what comes ahead. Should it not come, it is requested once more."""
        for other in self.demands.values():
            if other.prefetch and (other.stripe, other.source) == (demand.stripe, demand.source):
                other.pieces -= demand.pieces

    def _displace(self, stripe: Stripe, piece: int) -> Iterator[CloseStream]:
        """Where as many streams as may bring what readers are going to wait for, and none of them
        so low a piece, have the last one make room: readers take turns from the lowest on."""
        lowest = {
            min(demand.pieces, default=inf): stream
            for stream, demand in self.demands.items()
            if demand.prefetch and demand.stripe == stripe.number
        }
        if len(lowest) >= PREFETCHES_MAX and min(lowest) > piece:
            del self.demands[lowest[max(lowest)]]
            yield CloseStream(lowest[max(lowest)], False)

    def _demand_of(
        self, stripe: Stripe, wanted: set[int], sources: Sources, have: PieceSet, prefetch: bool, *, now: float
    ) -> Demand | None:
        """From where a stripe comes, else from another choice of the tracker. What is late counts
        as not coming, unless no reader waits for it yet."""
        wanted = {piece for piece in wanted if self._promised.get(piece, now) <= now}
        opened = [demand for demand in self.demands.values() if demand.stripe == stripe.number]
        late = {demand.source for demand in opened if now - demand.opened_at >= WANTED_S and not prefetch}
        under_way = (demand for demand in opened if demand.source not in late)
        wanted = wanted.difference(*(demand.coming(have, self.next_ones, prefetch=prefetch) for demand in under_way))
        state, candidates = stripe.state, stripe.candidates
        first = state.source if isinstance(state, Receiving) else None
        for source in (first, candidates.parent, *candidates.alternates):
            if source is not None and source not in late and sources.usable(source, now=now):
                alike = sum(demand.prefetch == prefetch for demand in opened)
                many = not wanted or alike >= (PREFETCHES_MAX if prefetch else DEMANDS_MAX)
                first_ones = frozenset(sorted(wanted)[:DEMAND_PIECES_MAX])
                return None if many else Demand(stripe.number, first_ones, source, now, prefetch)
        return None

    def hedge(self, demand: Demand) -> OpenDemand:
        """Open a stream beside one that stands still."""
        stream = self._number()
        self.demands[stream] = demand
        return OpenDemand(stream, demand.source, demand.stripe, tuple(demand.pieces), hedge=True)

    def leave_demands(self, stripe: Stripe, source: Source) -> Iterator[CloseStream]:
        """Have wanted pieces of a stripe requested anew that do not come from its source."""
        for stream, demand in list(self.demands.items()):
            if demand.stripe == stripe.number and demand.source != source:
                del self.demands[stream]
                yield CloseStream(stream, False)

    def hold_back(self, stream: int, *, now: float) -> None:
        """A stream is held back here."""
        stripe = self.stripes.get(stream)
        if stripe is not None and isinstance(stripe.state, Receiving):
            stripe.state.quiet_since = stripe.stored_at = now

    def finish(self, stripe: Stripe) -> bool:
        """Whether another stream than its own brings pieces of a stripe."""
        demanded = any(demand.stripe == stripe.number for demand in self.demands.values())
        return demanded or stripe.number in self.finishing.values()

    def ended(self, event: StreamEnded, stripes: Sequence[Stripe], have: PieceSet, *, now: float) -> Stripe | None:
        """A stream has let go of the file. Returns the stripe that came by it until now."""
        self.writing.discard(event.stream)
        demand = self.demands.pop(event.stream, None)
        if demand is not None and event.reason == "done":
            until = now + min(WANTED_S, max(PROMISE_MIN_S, PROMISE_PACES * stripes[demand.stripe].pace_s))
            self._promised = {piece: late for piece, late in self._promised.items() if late > now}
            elsewhere = set[int]().union(*(other.pieces for other in self.demands.values()))
            left = (piece for piece in demand.pieces if piece not in have and piece not in elsewhere)
            self._promised.update((piece, until) for piece in left)
        self.finishing.pop(event.stream, None)
        return self.stripes.pop(event.stream, None)
