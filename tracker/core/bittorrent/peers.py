"""The peers of one torrent, and which of them a peer hears of.

Theory. A peer hears of peers in its rack first, then in its zone, then of any; of seeds before
others, as they have what it lacks; of the least handed out first. An eighth of the answer is kept
for each wider circle as long as it has peers: a swarm of peers that know only their own racks would
fall apart into islands (Bindal et al., "Improving Traffic Locality in BitTorrent via Biased
Neighbor Selection", ICDCS 2006). Seeds do not hear of seeds.

A hybrid torrent has two info hashes (BEP 52), and a connection begins with one of them: a client
that does not know it hangs up. So a peer that announces itself under one hash hears only of peers
of the same hash; clients of both versions announce themselves under both.

A swarm may have tens of thousands of peers, so no call looks at all of them: peers are in pools (by
rack, by zone, all; seeds and others, and each info hash, apart), and a call looks at a bounded
sample of a pool, which begins and strides as a random number says that is passed in.

Invariants: a peer is in exactly the pools of its rack, zone, state and info hashes; an endpoint
(address and port) belongs to one peer."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from math import gcd, inf

from p2pdist.model.digest import Digest

FAR_SHARE = 8
"""One of so many places in an answer is kept for each wider circle."""

LOOK_TIMES = 2
"""A sample has so many peers for each one that is wanted: with two to choose from, loads are nearly
even (Mitzenmacher, "The Power of Two Choices in Randomized Load Balancing", IEEE TPDS 2001)."""


@dataclass(slots=True, eq=False)
class Peer:
    """One client. `ips` are its packed addresses (4 or 16 bytes) by their length, one of each
    family at most. `heard` are the info hashes that it answers to, each with the time until which
    its announce holds. `load` is how often it was handed out lately; `host` names an agent
    that did not announce itself, whose `peer_id` is unknown (empty)."""

    peer_id: bytes
    port: int
    ips: dict[int, bytes]
    heard: dict[bytes, float]
    zone: str = ""
    rack: str = ""
    seed: bool = False
    key: bytes = b""
    host: str = ""
    load: int = 0
    expires_at: float = inf

    def endpoints(self) -> Iterator[tuple[bytes, int]]:
        for ip in self.ips.values():
            yield ip, self.port

    def circles(self) -> tuple[tuple[str, ...], ...]:
        """Its rack, its zone, all; an unnamed rack or zone is no circle."""
        zone: tuple[tuple[str, ...], ...] = ((self.zone,),) if self.zone else ()
        rack: tuple[tuple[str, ...], ...] = ((self.zone, self.rack),) if self.rack else ()
        return (*rack, *zone, ())


class PeerSet:
    """Peers in no order, of which a sample can be taken without looking at the others."""

    __slots__ = ("_at", "_peers")

    def __init__(self) -> None:
        self._peers: list[Peer] = []
        self._at: dict[Peer, int] = {}

    def __len__(self) -> int:
        return len(self._peers)

    def add(self, peer: Peer) -> None:
        self._at[peer] = len(self._peers)
        self._peers.append(peer)

    def remove(self, peer: Peer) -> None:
        at, last = self._at.pop(peer), self._peers.pop()
        if last is not peer:
            self._peers[at] = last
            self._at[last] = at

    def sample(self, count: int, chance: int) -> Iterator[Peer]:
        """Up to `count` different peers; the number `chance`, 64 random bits, says which and in
        what order."""
        size = len(self._peers)
        if not size:
            return
        at, stride = chance % size, chance // size % size or 1
        while gcd(stride, size) != 1:
            stride += 1
        for _ in range(min(count, size)):
            yield self._peers[at]
            at = (at + stride) % size


@dataclass(slots=True, eq=False)
class TorrentSwarm:
    """The peers of a torrent. `blobs` are what it consists of, where agents take part; `members`
    are the agents that did not announce themselves; `announced` are all other peers; `completed`
    counts the downloads that ended."""

    hashes: tuple[bytes, ...]
    blobs: tuple[Digest, ...] = ()
    completed: int = 0
    synced_until: float = -inf
    members: dict[str, Peer] = field(default_factory=dict)
    announced: dict[tuple[bytes, bytes], Peer] = field(default_factory=dict)
    at: dict[tuple[bytes, int], Peer] = field(default_factory=dict)
    _pools: dict[tuple[tuple[str, ...], bool, bytes], PeerSet] = field(default_factory=dict)

    def count(self, info_hash: bytes, *, seeds: bool) -> int:
        """The number of seeds, or of other peers, under this info hash."""
        pool = self._pools.get(((), seeds, info_hash))
        return len(pool) if pool is not None else 0

    def add(self, peer: Peer) -> None:
        """Take a peer in. Its endpoints must be free."""
        for endpoint in peer.endpoints():
            assert endpoint not in self.at, "an endpoint belongs to one peer"
            self.at[endpoint] = peer
        if peer.host:
            self.members[peer.host] = peer
        else:
            self.announced[peer.peer_id, peer.key] = peer
        for place in _places(peer):
            self._pools.setdefault(place, PeerSet()).add(peer)

    def remove(self, peer: Peer) -> None:
        for endpoint in peer.endpoints():
            del self.at[endpoint]
        if peer.host:
            del self.members[peer.host]
        else:
            del self.announced[peer.peer_id, peer.key]
        for place in _places(peer):
            pool = self._pools[place]
            pool.remove(peer)
            if not pool:
                del self._pools[place]

    def choose(self, asker: Peer, info_hash: bytes, count: int, chance: int) -> list[Peer]:
        """Up to `count` peers for `asker`, which asked under `info_hash`, nearest first; never the
        asker itself, and no seeds for a seed."""
        chosen: dict[Peer, None] = {}
        circles, far = asker.circles(), count // FAR_SHARE
        for number, circle in enumerate(circles, start=1):
            self._fill(chosen, (circle, info_hash), count - far * (len(circles) - number), asker, chance)
        for circle in circles:  # places that were kept for wider circles, and that these did not need
            self._fill(chosen, (circle, info_hash), count, asker, chance)
        for peer in chosen:
            peer.load += 1
        return list(chosen)

    def _fill(
        self, chosen: dict[Peer, None], where: tuple[tuple[str, ...], bytes], limit: int, asker: Peer, chance: int
    ) -> None:
        circle, info_hash = where
        for seeds in (False,) if asker.seed else (True, False):
            pool = self._pools.get((circle, seeds, info_hash))
            room = limit - len(chosen)
            if pool is None or room <= 0:
                continue
            # The sample may hold peers that were chosen before, and the asker.
            found = [
                peer
                for peer in pool.sample(room * LOOK_TIMES + len(chosen) + 1, chance)
                if peer not in chosen and peer is not asker and peer.peer_id != asker.peer_id
            ]
            found.sort(key=lambda peer: (peer.ips.keys().isdisjoint(asker.ips), peer.load))
            chosen.update(dict.fromkeys(found[:room]))


def _places(peer: Peer) -> Iterator[tuple[tuple[str, ...], bool, bytes]]:
    """The pools that a peer is in."""
    for circle in peer.circles():
        for info_hash in peer.heard:
            yield circle, peer.seed, info_hash
