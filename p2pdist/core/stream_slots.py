"""The streams that a host serves at once, and which peers have them.

Theory. Slots are few, and a child that opens streams and reads none of them would keep them from
all others, at no cost. So one address has ADDRESS_SHARE of the slots at most: many agents may share
an address, but the rest is for others. When a child finds no slot, a stream to a child that has
taken nothing for STUCK_S gives its slot up: a stream of the address that is over its share, else of
the address with most streams, there of the host with most of them, and of these the one that has
been stuck longest. A child that reads loses nothing. While there are free slots a child may be as
slow as it likes. The names of hosts are claims, so they never earn an address more.

Invariants: no more than `slots_max` streams are counted; a stream is displaced only for another
one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

ADDRESS_SHARE = 3 / 4
STUCK_S = 3.0


@dataclass(frozen=True, slots=True)
class Peer:
    """The other end of a stream: its address, and the host that it says it is."""

    address: str = ""
    host: str = ""


@dataclass(frozen=True, slots=True)
class Displace:
    """There is room once this stream has ended."""

    stream: int


@dataclass(slots=True)
class StreamSlots:
    """Counts streams and decides which of them make room."""

    slots_max: int
    _peers: dict[int, Peer] = field(default_factory=dict)
    """The peer of each open stream."""
    _addresses: Counter[str] = field(default_factory=Counter)
    """Streams of each address."""

    def room(self, peer: Peer, stuck_s: Mapping[int, float]) -> Displace | bool:
        """Whether a stream of `peer` finds room, or which stream would have to end for it.
        `stuck_s`: for how long the children of streams have taken nothing."""
        own = self._addresses[peer.address]
        if own >= max(1, int(self.slots_max * ADDRESS_SHARE)):
            return self._displaced(peer.address, stuck_s)
        if len(self._peers) < self.slots_max:
            return True
        for address, count in self._addresses.most_common():
            if count > own and (displaced := self._displaced(address, stuck_s)):
                return displaced
        return False

    def opened(self, stream: int, peer: Peer) -> None:
        """Count a stream."""
        self._peers[stream] = peer
        self._addresses[peer.address] += 1

    def closed(self, stream: int) -> None:
        """Count a stream no more."""
        peer = self._peers.pop(stream, None)
        if peer is None:
            return
        self._addresses[peer.address] -= 1
        if not self._addresses[peer.address]:
            del self._addresses[peer.address]

    def __len__(self) -> int:
        return len(self._peers)

    def _displaced(self, address: str, stuck_s: Mapping[int, float]) -> Displace | bool:
        """The stream of an address that makes room; False when none is stuck."""
        peers = {stream: peer for stream, peer in self._peers.items() if peer.address == address}
        stuck = [stream for stream in peers if stuck_s.get(stream, 0.0) >= STUCK_S]
        if not stuck:
            return False
        hosts = Counter(peer.host for peer in peers.values())
        return Displace(max(stuck, key=lambda stream: (hosts[peers[stream].host], stuck_s[stream])))
