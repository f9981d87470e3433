"""Readers: which pieces of a blob each host of a swarm brings from the origin, where several do.

Theory. A swarm is as fast as its hosts have something to give each other. One that reads a whole
stripe is asked for each of its pieces by many at once, and the pieces leave it no faster than its
uplink carries them. So the reading is dealt among the keepers of a zone: the pieces i with i mod
GROUPS = g are read by the first of the keepers in the order of rendezvous hashing on blob and g.
Hosts that name the same keepers agree on that without a word. The others come in that order, should
those before them bring nothing for some time.

A tracker says whether the reading is dealt, which it counts like leases. Where it is not, the
holder of a stripe's lease reads that stripe. While no tracker answers it is always dealt.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from p2pdist.model.digest import Digest
from p2pdist.model.rendezvous import ranked

GROUPS = 64


@dataclass(frozen=True, slots=True)
class Readers:
    """`leased` are the stripes, out of `stripes`, whose leases `host` holds, `keepers` the names of
    those that its zone has. `dealt`: the reading is dealt; `alone`: no tracker answers."""

    blob: Digest
    host: str
    stripes: int
    leased: frozenset[int] = frozenset()
    keepers: tuple[str, ...] = ()
    dealt: bool = False
    alone: bool = False

    @property
    def groups(self) -> int:
        """Pieces whose numbers are the same modulo this are read by the same hosts."""
        return GROUPS if self._by_keepers else self.stripes

    @property
    def any(self) -> bool:
        """Whether this host may read anything."""
        return self.host in self.keepers if self._by_keepers else bool(self.leased)

    def rank(self, piece: int) -> int | None:
        """How many hosts come before this one for a piece; None when it may not read it."""
        if not self._by_keepers:
            return 0 if piece % self.stripes in self.leased else None
        return self._order(piece).index(self.host) if self.host in self.keepers else None

    def first(self, piece: int) -> str:
        """Who is to read a piece, "" when it is for the holder of a lease."""
        return self._order(piece)[0] if self._by_keepers else ""

    @property
    def _by_keepers(self) -> bool:
        return bool(self.keepers) and (self.dealt or self.alone)

    def _order(self, piece: int) -> tuple[str, ...]:
        return _orders(self.blob, self.keepers)[piece % GROUPS]


@lru_cache(maxsize=256)
def _orders(blob: Digest, keepers: tuple[str, ...]) -> tuple[tuple[str, ...], ...]:
    """The keepers of each group; the hosts of a swarm ask for it several times a second, and they
    seldom change."""
    return tuple(tuple(ranked(f"{blob}/{group}".encode(), keepers, len(keepers))) for group in range(GROUPS))
