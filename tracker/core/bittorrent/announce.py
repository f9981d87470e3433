"""The tracker as a BitTorrent tracker: it notes the peers of each torrent and tells them of each
other (BEP 3, 7, 23, 48, 52).

Theory. A torrent is registered under its info hashes (SHA-1, and the first 20 bytes of SHA-256),
which lead to one swarm; the tracker refuses what was not registered, or it would be a tracker for
anything. A peer hears of peers that announced themselves under the same hash, as others could not
talk to it, and counts are those of the hash, too; our agents answer to both. A peer is known by its
id and key, so a peer that moves to another address, or has two, stays one peer; without a key it is
known by its id and address, so that none can speak for another. It is forgotten when it stops, or
has not announced itself for two intervals. A client that stops may have announces on their way by
another hash: for STOPPED_S only one that says `started` makes it a peer again.

Agents with a BitTorrent port are peers of the torrents of what they hold, announced or not: what
they hold is read from the fleet. Where an agent announces itself as well, its announce counts.

The interval grows with the number of peers, so that announces stay below ANNOUNCES_PER_S.

Invariants: what is kept is limited (torrents, peers in all, of a torrent and of an address), and so
is the work for one announce. All of it is soft: peers announce themselves again, and torrents are
registered again when a client asks for them."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush
from itertools import islice
from math import inf
from typing import Literal

from p2pdist.model.digest import Digest
from p2pdist.model.errors import NotFound, TooLarge
from tracker.core.bittorrent.addresses import AddressIndex, packed_ip
from tracker.core.bittorrent.peers import Peer, TorrentSwarm
from tracker.core.host import Host
from tracker.core.swarm import Swarm

ANNOUNCES_PER_S = 200
INTERVAL_MIN_S, INTERVAL_MAX_S = 30, 1800
MISSED_MAX = 2
EXPIRY_GRACE_S = 30.0
"""A peer is forgotten after MISSED_MAX intervals and this."""

STOPPED_S, STOPPED_MAX = 60.0, 10_000
"""How long, and of how many peers, the tracker remembers that they stopped."""

NUMWANT, NUMWANT_MAX = 50, 200
TORRENTS_MAX = 100_000
PEERS_MAX = 500_000
TORRENT_PEERS_MAX = 20_000
NETWORK_TORRENT_PEERS_MAX = 64
"""Peers of one torrent at one address (of IPv6, in one /64: a host has as many addresses there as
it likes)."""

NETWORK_PEERS_MAX = 10_000
EXPIRED_AT_ONCE = 256
SYNC_S = 1.0
MEMBERS_PER_S = 2_000
"""Members of a fleet's swarms that are looked at in a second, for each torrent that is asked
for."""

MEMBERS_LOOK_MAX = 20_000
"""So many at once; of a larger fleet the others are not counted."""

ADDED_AT_ONCE = 1_000
"""Of members that are new, the others follow after SYNC_S: taking one in costs ten times as much as
looking at it."""

WEB_SEEDS_MAX = 8
WEB_SEEDS_LOOK_MAX = 2_000

AnnounceEvent = Literal["", "started", "stopped", "completed", "paused"]
"""`paused`: a peer that wants nothing more although it lacks something (BEP 21)."""


@dataclass(frozen=True, slots=True)
class Announce:
    """What a peer says of itself. `ip` is packed; `numwant` is None where it is left to the
    tracker; zone and rack are set where they are known."""

    info_hash: bytes
    peer_id: bytes
    ip: bytes
    port: int
    left: int = 0
    event: AnnounceEvent = ""
    numwant: int | None = None
    key: bytes = b""
    zone: str = ""
    rack: str = ""


@dataclass(frozen=True, slots=True)
class Contact:
    """Where a peer is reached; its id is empty where it is not known."""

    peer_id: bytes
    ip: bytes
    port: int


@dataclass(frozen=True, slots=True)
class AnnounceAnswer:
    """The answer to an announce. `complete` and `incomplete` count seeds and others; `warning` is
    for its user."""

    interval_s: int
    min_interval_s: int
    complete: int
    incomplete: int
    peers: tuple[Contact, ...] = ()
    warning: str = ""


@dataclass(frozen=True, slots=True)
class Scraped:
    """The state of a torrent (BEP 48)."""

    info_hash: bytes
    complete: int
    downloaded: int
    incomplete: int


@dataclass(slots=True)
class Announces:
    """Torrents and their peers. Shares the fleet's hosts and swarms, and changes nothing of
    them."""

    hosts: dict[str, Host]
    swarms: dict[Digest, Swarm]
    peers: int = 0
    addresses: AddressIndex = field(init=False)
    _torrents: OrderedDict[tuple[bytes, ...], TorrentSwarm] = field(default_factory=OrderedDict)
    _by_hash: dict[bytes, TorrentSwarm] = field(default_factory=dict)
    _networks: dict[tuple[TorrentSwarm | None, bytes], int] = field(default_factory=dict)
    _expiry: list[tuple[float, int, TorrentSwarm, Peer]] = field(default_factory=list)
    _stopped: OrderedDict[tuple[tuple[bytes, ...], bytes, bytes], float] = field(default_factory=OrderedDict)
    """When each peer of a torrent stopped, the one that did so longest ago first."""
    _serial: int = 0

    def __post_init__(self) -> None:
        self.addresses = AddressIndex(self.hosts)

    # -- torrents

    def register(self, hashes: Sequence[bytes], blobs: Sequence[Digest] = ()) -> None:
        """From now on the torrent with these info hashes (20 bytes each) is tracked. The one that
        was registered longest ago and has no peers makes room for it; raises TooLarge when there is
        none."""
        key = tuple(hashes)
        if key in self._torrents:
            self._torrents.move_to_end(key)
            return
        if len(self._torrents) >= TORRENTS_MAX:
            idle = (torrent for torrent in islice(self._torrents.values(), 64) if not torrent.announced)
            oldest = next(idle, None)
            if oldest is None:
                raise TooLarge(f"this tracker has {len(self._torrents)} torrents already", remedy="Try again later")
            self._drop(oldest)
        torrent = self._torrents[key] = TorrentSwarm(key, tuple(blobs))
        for info_hash in key:
            self._by_hash.setdefault(info_hash, torrent)

    def __contains__(self, info_hash: bytes) -> bool:
        return info_hash in self._by_hash

    def __len__(self) -> int:
        return len(self._torrents)

    def _drop(self, torrent: TorrentSwarm) -> None:
        del self._torrents[torrent.hashes]
        for info_hash in torrent.hashes:
            if self._by_hash.get(info_hash) is torrent:
                del self._by_hash[info_hash]

    # -- peers

    def announce(self, event: Announce, *, now: float, chance: int) -> AnnounceAnswer:
        """Note a peer and tell it of others; `chance` are 64 random bits. Raises NotFound
        for a torrent that is not registered, and TooLarge where its address has too many peers."""
        self.expire(now=now)
        torrent = self._by_hash.get(event.info_hash)
        if torrent is None:
            raise NotFound(
                "this tracker knows no torrent with this info hash",
                remedy="Get the .torrent file from it again, at /v1/blobs/{digest}/torrent",
            )
        self._sync(torrent, now)
        if self._has_stopped(torrent, event, now):
            return self._answer(torrent, event.info_hash, (), "")
        peer, warning = self._record(torrent, event, now)
        wanted = NUMWANT if event.numwant is None else max(0, min(event.numwant, NUMWANT_MAX))
        chosen = torrent.choose(peer, event.info_hash, wanted, chance)
        family = len(event.ip)
        contacts = []
        for other in chosen:
            ip = other.ips.get(family) or next(iter(other.ips.values()))
            contacts.append(Contact(other.peer_id, ip, other.port))
        return self._answer(torrent, event.info_hash, tuple(contacts), warning)

    def scrape(self, hashes: Sequence[bytes], *, now: float) -> list[Scraped]:
        """The state of the torrents among `hashes` that are registered."""
        self.expire(now=now)
        found = []
        for info_hash in hashes:
            torrent = self._by_hash.get(info_hash)
            if torrent is not None:
                self._sync(torrent, now)
                complete, incomplete = (torrent.count(info_hash, seeds=seeds) for seeds in (True, False))
                found.append(Scraped(info_hash, complete, torrent.completed, incomplete))
        return found

    def expire(self, *, now: float) -> None:
        """Forget peers that were not heard of for long, some at a time."""
        for _ in range(EXPIRED_AT_ONCE):
            if not self._expiry or self._expiry[0][0] > now:
                return
            _, _, torrent, peer = heappop(self._expiry)
            if _is_known(torrent, peer):
                self._forget(torrent, peer)

    def interval_s(self) -> int:
        """How often each peer is to announce itself."""
        return max(INTERVAL_MIN_S, min(INTERVAL_MAX_S, self.peers // ANNOUNCES_PER_S))

    def web_seeds(self, blob: Digest, ip: bytes, *, now: float, chance: int) -> list[str]:
        """URLs (http://host:port, https: of an agent that speaks TLS) of agents that hold the whole
        blob, the nearest to `ip` first, then the least busy ones."""
        swarm = self.swarms.get(blob)
        if swarm is None:
            return []
        zone, rack = self.addresses.find(ip, now=now)
        found = []
        for member in islice(swarm.members.values(), WEB_SEEDS_LOOK_MAX):
            host = self.hosts[member.host]
            if member.seed and member.present and not host.banned:
                near = (host.zone == zone != "") + (host.zone == zone and host.rack == rack != "")
                found.append((-near, member.load, f"{'https' if host.tls else 'http'}://{host.address}"))
        turn = chance % len(found) if found else 0
        found = found[turn:] + found[:turn]
        found.sort(key=lambda seed: seed[:2])
        return [url for _, _, url in found[:WEB_SEEDS_MAX]]

    def _answer(
        self, torrent: TorrentSwarm, info_hash: bytes, contacts: tuple[Contact, ...], warning: str
    ) -> AnnounceAnswer:
        interval_s = self.interval_s()
        complete, incomplete = (torrent.count(info_hash, seeds=seeds) for seeds in (True, False))
        return AnnounceAnswer(interval_s, max(INTERVAL_MIN_S, interval_s // 2), complete, incomplete, contacts, warning)

    def _known(self, torrent: TorrentSwarm, event: Announce) -> Peer | None:
        return torrent.announced.get((event.peer_id, _identity(event)))

    def _has_stopped(self, torrent: TorrentSwarm, event: Announce, now: float) -> bool:
        """Whether the peer stops, which is noted here, or did so a moment ago."""
        key = torrent.hashes, event.peer_id, _identity(event)
        if event.event == "stopped":
            known = self._known(torrent, event)
            if known is not None:
                self._forget(torrent, known)
            self._stopped[key] = now
            self._stopped.move_to_end(key)
            if len(self._stopped) > STOPPED_MAX:
                self._stopped.popitem(last=False)
            return True
        if event.event == "started":
            self._stopped.pop(key, None)
        return now - self._stopped.get(key, -inf) < STOPPED_S

    def _record(self, torrent: TorrentSwarm, event: Announce, now: float) -> tuple[Peer, str]:
        """The peer as it is now, noted unless there is no room; then the warning says so."""
        known = self._known(torrent, event)
        zone, rack = (event.zone, event.rack) if event.zone else self.addresses.find(event.ip, now=now)
        ips = dict(known.ips) if known is not None and known.port == event.port else {}
        ips[len(event.ip)] = event.ip
        until = now + MISSED_MAX * self.interval_s() + EXPIRY_GRACE_S
        heard = {info_hash: time for info_hash, time in known.heard.items() if time > now} if known is not None else {}
        heard[event.info_hash] = until
        peer = Peer(event.peer_id, event.port, ips, heard, zone, rack, event.left == 0, _identity(event))
        peer.expires_at = until
        if known is not None:
            peer.load = known.load // 2
            torrent.completed += event.event == "completed" and peer.seed and not known.seed
            self._forget(torrent, known)
        for endpoint in peer.endpoints():
            before = torrent.at.get(endpoint)
            if before is not None:  # the agent as a member of the fleet, or a client that was there before
                self._forget(torrent, before)
        if self.peers >= PEERS_MAX or len(torrent.announced) >= TORRENT_PEERS_MAX:
            return peer, "this tracker has too many peers: you are told of others, and no one is told of you"
        for scope, network in self._scopes(torrent, peer):
            if self._networks.get((scope, network), 0) >= (NETWORK_TORRENT_PEERS_MAX if scope else NETWORK_PEERS_MAX):
                raise TooLarge("this address has too many peers here", remedy="Stop some, or wait until they expire")
        torrent.add(peer)
        self.peers += 1
        for place in self._scopes(torrent, peer):
            self._networks[place] = self._networks.get(place, 0) + 1
        self._remind(torrent, peer)
        return peer, ""

    def _remind(self, torrent: TorrentSwarm, peer: Peer) -> None:
        """Expire the peer when its time is up. A peer that announced itself again, or stopped, is
        then another object or gone; its old entries are removed now and then."""
        self._serial += 1
        heappush(self._expiry, (peer.expires_at, self._serial, torrent, peer))
        if len(self._expiry) > 2 * self.peers + 1024:
            self._expiry = [entry for entry in self._expiry if _is_known(entry[2], entry[3])]
            heapify(self._expiry)

    def _forget(self, torrent: TorrentSwarm, peer: Peer) -> None:
        torrent.remove(peer)
        if peer.host:
            return
        self.peers -= 1
        for place in self._scopes(torrent, peer):
            self._networks[place] -= 1
            if not self._networks[place]:
                del self._networks[place]

    def _scopes(self, torrent: TorrentSwarm, peer: Peer) -> Iterator[tuple[TorrentSwarm | None, bytes]]:
        """What limits of an address a peer counts for: of the torrent, and of all."""
        for ip in peer.ips.values():
            network = ip if len(ip) == 4 else ip[:8]
            yield torrent, network
            yield None, network

    # -- the fleet

    def _sync(self, torrent: TorrentSwarm, now: float) -> None:
        """Bring the members of the fleet that take part in the torrent up to date; the larger its
        swarm, the less often."""
        if not torrent.blobs or now < torrent.synced_until:
            return
        swarms = [self.swarms[blob] for blob in torrent.blobs if blob in self.swarms]
        whole = len(swarms) == len(torrent.blobs)
        names = min((swarm.members for swarm in swarms), key=len) if whole else {}
        looked = min(MEMBERS_LOOK_MAX, len(names) * len(swarms))
        torrent.synced_until = now + max(SYNC_S, looked / MEMBERS_PER_S)
        for name, peer in list(torrent.members.items()):
            holds = self._holds(name, swarms) if name in names else None
            if holds is None or not _same(peer, self.hosts[name], seed=holds[0]):
                torrent.remove(peer)
            else:
                peer.load = holds[1]
        room = ADDED_AT_ONCE
        for name in islice(names, MEMBERS_LOOK_MAX // max(1, len(swarms))):
            holds = self._holds(name, swarms) if name not in torrent.members else None
            if holds is None or not room:
                continue
            host = self.hosts[name]
            ip = packed_ip(host.address) or b""
            if (ip, host.bt_port) not in torrent.at:
                seed, load = holds
                heard = dict.fromkeys(torrent.hashes, inf)
                torrent.add(
                    Peer(b"", host.bt_port, {len(ip): ip}, heard, host.zone, host.rack, seed, host=name, load=load)
                )
                room -= 1
        if not room:
            torrent.synced_until = now + SYNC_S

    def _holds(self, name: str, swarms: Sequence[Swarm]) -> tuple[bool, int] | None:
        """Of a host that takes part in all these swarms and can be reached by BitTorrent: whether
        it has everything, and its children."""
        host = self.hosts[name]
        if not host.bt_port or packed_ip(host.address) is None:
            return None
        seed, load = True, 0
        for swarm in swarms:
            member = swarm.members.get(name)
            if member is None or not member.present:
                return None
            seed, load = seed and member.seed, load + member.load
        return seed, load


def _identity(event: Announce) -> bytes:
    """What shows that it is the same peer: its key; else its address, which cannot be made up."""
    return b"key " + event.key if event.key else b"ip " + event.ip


def _is_known(torrent: TorrentSwarm, peer: Peer) -> bool:
    return torrent.announced.get((peer.peer_id, peer.key)) is peer


def _same(peer: Peer, host: Host, *, seed: bool) -> bool:
    """Whether the agent still has the port, zone, rack, state and address of its peer."""
    here = (host.bt_port, host.zone, host.rack, seed) == (peer.port, peer.zone, peer.rack, peer.seed)
    return here and packed_ip(host.address) in peer.ips.values()
