"""What one host brings from central storage into a BitTorrent swarm of one blob, and when.

Theory of what (`Readers`). Peers of a swarm get a blob from each other; a piece that none of them
has must be read from the origin, once. A swarm is as fast as its hosts have something to give each
other. A host that reads a whole stripe is asked for each of its pieces by many at once, and the
pieces leave it no faster than its uplink carries them. So the superpeers of a zone share the
reading: the pieces i with i mod GROUPS = g are read by the first of the superpeers in the order of
rendezvous hashing on blob and g. Hosts that know the same superpeers agree on that without a word.
The other superpeers come in that order, should the ones before bring nothing for some time. A
tracker says whether the reading is shared, which it counts like leases. Where it is not, the holder
of a stripe's lease reads that stripe. While no tracker answers it is always shared.

Theory of when (`OriginSeeding`). A piece is read when none of the connected peers has it, in order
of number. Where other superpeers come before this host, it waits until for some time none of the
first one's pieces has turned up in the swarm, the longer the more there are: then they do not read,
or no peer hears of it. As soon as such a piece turns up it waits again. Where the origin is slow
the superpeers before it are no faster, so the time that its own reading takes counts as well. While
no tracker answers hosts may disagree on the superpeers, so the first one waits a little, too.

Invariants: at most READS_AT_ONCE pieces are being read, and GIVEN_MAX on their way through the
swarm; none is read that is held, that a peer has, or that is being read or on its way already. All
times are in seconds.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache

from p2pdist.model.digest import Digest
from p2pdist.model.pieces import PieceSet
from p2pdist.model.rendezvous import fraction, ranked

GROUPS = 64


@dataclass(frozen=True, slots=True)
class Readers:
    """Which hosts of a swarm may read which pieces, as `host` knows it."""

    blob: Digest
    host: str
    stripes: int
    leased: frozenset[int] = frozenset()
    """The stripes of which `host` holds the leases."""
    superpeers: tuple[str, ...] = ()
    """The superpeers of its zone."""
    shared: bool = False
    """The superpeers share the reading."""
    alone: bool = False
    """No tracker answers."""

    @property
    def groups(self) -> int:
        """Pieces whose numbers are the same modulo this are read by the same hosts."""
        return GROUPS if self._by_superpeers else self.stripes

    @property
    def any(self) -> bool:
        """Whether this host may read anything."""
        return self.host in self.superpeers if self._by_superpeers else bool(self.leased)

    def rank(self, piece: int) -> int | None:
        """How many hosts come before this one for a piece; None when it may not read it."""
        if not self._by_superpeers:
            return 0 if piece % self.stripes in self.leased else None
        return self._order(piece).index(self.host) if self.host in self.superpeers else None

    def first(self, piece: int) -> str:
        """The host that is to read a piece, "" when it is for the holder of a lease."""
        return self._order(piece)[0] if self._by_superpeers else ""

    @property
    def _by_superpeers(self) -> bool:
        return bool(self.superpeers) and (self.shared or self.alone)

    def _order(self, piece: int) -> tuple[str, ...]:
        return _orders(self.blob, self.superpeers)[piece % GROUPS]


@lru_cache(maxsize=256)
def _orders(blob: Digest, superpeers: tuple[str, ...]) -> tuple[tuple[str, ...], ...]:
    """The superpeers of each group in their order; asked for several times a second in a swarm, and
    seldom another."""
    return tuple(tuple(ranked(f"{blob}/{group}".encode(), superpeers, len(superpeers))) for group in range(GROUPS))


READS_AT_ONCE = 4
"""Pieces that a host reads at once, at most one more than it has brought or waits for in vain:
reads that many hosts begin at once all end late, and no host has anything to give till then."""

LATE_S = 1.0
"""A host waits for a read in vain when it takes longer."""

LOOK_S = 0.25
"""How often the host looks at what peers have."""

CONNECT_S = 1.0
"""How long a host that held pieces before it joined the swarm waits for connections: peers may have
what it lacks."""

SUPERPEER_PAUSE_S = 1.5
READ_TIMES = 2.0
"""The pause is SUPERPEER_PAUSE_S and so many times what a piece takes from the origin."""

GIVEN_MAX = 64
"""Pieces that were given and are not held yet: libtorrent keeps what it has in memory for up to a
second."""

TAKEN_S = 5.0
"""A piece that was given and is not held after so long is read again."""

RETRY_FIRST_S, RETRY_MAX_S = 0.5, 15.0


@dataclass(slots=True)
class OriginSeeding:
    """Chooses the pieces that one host reads for its swarm."""

    blob: Digest
    host: str
    have: PieceSet
    """The pieces that the host holds; shared with the owner, and grows."""
    begun_at: float
    given: set[int] = field(default_factory=set)
    """All pieces that this host brought."""
    under_way: dict[int, float] = field(default_factory=dict)
    """The pieces that are being read, since when."""
    seen: Sequence[int] = ()
    """How many peers had each piece at the last look."""
    _heard: dict[str, float] = field(default_factory=dict)
    """When a piece of each superpeer turned up last (`look`)."""
    _due_pieces: deque[int] = field(default_factory=deque)
    """The pieces to read, by the last look."""
    _given_at: dict[int, float] = field(default_factory=dict)
    """Pieces that were given and are not held yet."""
    _read_s: float = 0.0
    """How long a piece takes from the origin, smoothed (`brought`)."""
    _retry_s: float = RETRY_FIRST_S
    """The pause after the next failure."""
    _not_before: float = field(init=False)
    """No piece is read before this."""
    _connected_at: float = field(init=False)
    """From when on what superpeers bring may turn up."""
    _spread: float = field(init=False)
    """From 0 to 1: this host's part of a pause."""

    def __post_init__(self) -> None:
        self._connected_at = self._not_before = self.begun_at + (CONNECT_S if len(self.have) else 0.0)
        self._spread = fraction(str(self.blob).encode(), self.host)

    def look(self, readers: Readers, counts: Sequence[int], *, now: float) -> None:
        """Find the pieces that no peer has and that are due, and the pieces that other superpeers
        have brought since the last look. `counts` says how many peers have each piece; it is empty
        while that is unknown."""
        before = self.seen
        self.seen = counts = counts or [0] * self.have.count
        for piece in [piece for piece, since in self._given_at.items() if now - since > TAKEN_S]:
            del self._given_at[piece]
        if before:
            turned_up = (
                piece for piece, count in enumerate(counts) if count and not before[piece] and piece not in self.given
            )
            self._heard.update((readers.first(piece), now) for piece in turned_up)
        pause_s = SUPERPEER_PAUSE_S + READ_TIMES * max(self._read_s, now - min(self.under_way.values(), default=now))
        due = [self._due(readers, group, pause_s, now) for group in range(readers.groups)]
        self._due_pieces = deque(
            piece
            for piece, count in enumerate(counts)
            if not count
            and due[piece % len(due)]
            and piece not in self.have
            and piece not in self.under_way
            and piece not in self._given_at
        )

    def next(self, readers: Readers, *, now: float) -> int | None:
        """A piece to read from the origin now; None when there is none, or enough is under way. A
        tracker may have come back since the last look, or a lease gone to another."""
        late = sum(now - since > LATE_S for since in self.under_way.values())
        at_once = min(READS_AT_ONCE, 1 + len(self.given) + late)
        room = min(at_once - len(self.under_way), GIVEN_MAX - len(self.under_way) - len(self._given_at))
        while room > 0 and now >= self._not_before and self._due_pieces:
            piece = self._due_pieces.popleft()
            if piece not in self.have and readers.rank(piece) is not None:
                self.under_way[piece] = now
                return piece
        return None

    def brought(self, piece: int, *, now: float) -> None:
        """Note that a piece was read, verified, and is given to the swarm."""
        took_s = now - self.under_way.pop(piece, now)
        self._read_s += (0.25 if self._read_s else 1.0) * (took_s - self._read_s)
        self.given.add(piece)
        self._given_at[piece] = now
        self._retry_s = RETRY_FIRST_S

    def dropped(self, piece: int) -> None:
        """Note that a piece is not needed any more, or its reading was broken off."""
        self.under_way.pop(piece, None)

    def failed(self, piece: int, *, now: float) -> None:
        """Note that a piece could not be read: there is a pause, longer each time."""
        self.under_way.pop(piece, None)
        self._not_before = now + self._retry_s
        self._retry_s = min(RETRY_MAX_S, 2 * self._retry_s)

    def held(self, piece: int) -> bool:
        """Note that a piece is held; returns whether that makes room for another."""
        return self._given_at.pop(piece, None) is not None

    def _due(self, readers: Readers, piece: int, pause_s: float, now: float) -> bool:
        """Whether this host may read a piece now."""
        rank = readers.rank(piece)
        if rank is None:
            return False
        if not rank and not readers.alone:
            return True
        heard = self._heard.get(readers.first(piece), self._connected_at)
        return now >= heard + pause_s * (rank + self._spread)
