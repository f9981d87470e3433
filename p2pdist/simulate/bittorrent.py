"""A simulated BitTorrent swarm of one blob: what libtorrent does, as far as switches between trees
and swarms depend on it.

Model. A member knows some hosts by name: from the tracker's plans, from announces, and from its own
peers (BEP 11). It connects to all of the first, and to as many of the others, by chance, as give it
OUTGOING_MAX connections; it tries a host that does not answer TRIES_MAX times. A host answers if it
is a member, or has the whole blob; a host that fetches the blob by trees does not. Both sides of a
connection know what the other has. A side requests up to REQUESTS_MAX pieces at once, the rarest
among its peers first, chance deciding among equals. It uploads to UPLOAD_SLOTS peers at once, every
RECHOKE_S to the ones that gave most, and one of them by chance (optimistic unchoking). Each
connection sends one piece at a time; all connections of a host share its uplink with its streams,
first come, first served, and the receiver's downlink and the racks between as in network.py. A
piece is verified when it has arrived; a member bans a peer that sent a wrong one. It makes a
request that was not answered for REQUEST_S elsewhere. What is sent into a cut path is lost; a
connection that was cut for PEER_TIMEOUT_S ends, and that of a process that dies at once.

Left out: blocks below a piece, and with them pieces from several peers, the end game, and what a
broken transfer loses besides whole pieces; the time that news of pieces takes; limits on
connections that no host reaches here; the swarm of version 1; fast resume; the second or less that
a host needs to become a seed again after its transfer.

Invariants: a member requests no piece that it holds or has requested; it counts only what has
verified.

A simulated pull as a member of a BitTorrent swarm: the look-up of its torrent, its membership,
and what the host brings from the origin, as in p2pdist/agent/bittorrent/fetch.py.

Model. Every blob has a torrent, which a host finds while a tracker answers it. A session takes
OPEN_S to start, and libtorrent CLOSE_S to let go of the file. A piece that was read from the origin
and has verified is held at once: the second that libtorrent may keep it in memory is left out, and
so is the swarm of version 1.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from random import Random
from typing import Any, Protocol

from p2pdist.core.download.download import Download
from p2pdist.core.origin_seeding import LOOK_S, OriginSeeding
from p2pdist.core.pull import SWARM, Event, SwarmClosed, TorrentKnown
from p2pdist.model.digest import Digest
from p2pdist.model.messages import Complaint, Reason
from p2pdist.model.pieces import PieceSet
from p2pdist.model.plan import ORIGIN, Plan
from p2pdist.simulate.context import Context
from p2pdist.simulate.network import TRACKER_NAME, Endpoint, Receiver, Stream
from p2pdist.simulate.origin import Blob
from p2pdist.simulate.tracker import TrackerSessions

OUTGOING_MAX = 8
CONNECT_TIMEOUT_S = 3.0
RECONNECT_S = 1.0
TRIES_MAX = 4
REQUESTS_MAX = 4
UPLOAD_SLOTS = 8
RECHOKE_S = 3.0
REQUEST_S = 5.0
PEER_TIMEOUT_S = 15.0
ANNOUNCED_MAX = 50
ANNOUNCE_S = 30.0
ANNOUNCE_AGAIN_S = 10.0
EXCHANGE_S = 60.0


class Uploader(Protocol):
    """What a host sends with, as a swarm uses it."""

    silent: bool

    def spoils(self, piece: int) -> bool:
        """Whether the host sends wrong bytes for this piece."""

    def count_sent(self, length: int) -> None:
        """The uplink has sent so many bytes."""


class SwarmPull(Protocol):
    """One blob at one host, as a swarm uses it."""

    blob: Blob
    have: PieceSet
    proof: bytearray
    bytes_again: int
    bytes_peers: int
    bytes_swarm: int
    duplicates: int
    rejected: int

    @property
    def ended(self) -> bool:
        """Whether the pull has ended."""


class SwarmHost(Endpoint, Protocol):
    """A host, as a swarm uses it."""

    leaving: bool

    @property
    def running(self) -> bool:
        """Whether the host's process runs."""

    @property
    def server(self) -> Uploader:
        """What the host sends with."""

    @property
    def pulls(self) -> Mapping[Digest, SwarmPull]:
        """What the host holds and fetches, by blob."""

    def keep(self, pull: Any, number: int, piece: int) -> None:
        """Store a piece that has verified."""


class Peer:
    """One side of a connection between two members."""

    __slots__ = (
        "choking",
        "cut_since",
        "member",
        "open",
        "other",
        "outgoing",
        "queue",
        "received",
        "requested",
        "sending",
        "theirs",
    )

    def __init__(self, member: Member, *, outgoing: bool) -> None:
        self.member, self.outgoing = member, outgoing
        #: The other side; the member that connects sets it.
        self.other: Peer = self
        self.open = True
        #: Whether this side uploads nothing to the other.
        self.choking = True
        #: Whether a piece for the other side is in the uplink.
        self.sending = False
        #: The pieces that the other side has, as far as this one knows, as bits.
        self.theirs = 0
        #: Pieces that this side has requested, with the times in seconds.
        self.requested: dict[int, float] = {}
        #: Pieces that the other side has requested and that are not sent yet.
        self.queue: deque[int] = deque()
        #: Bytes that the other side has sent since the last choice of peers to upload to.
        self.received = 0
        #: Since when the path is cut, as the member's last tick saw it, in seconds.
        self.cut_since: float | None = None

    @property
    def interested(self) -> bool:
        """Whether the other side lacks a piece that this one has, as far as it knows."""
        return bool(self.other.theirs & ~self.other.member.have)

    @property
    def reachable(self) -> bool:
        """Whether the path to the other side is whole."""
        return self.member.network.paths.reachable(self.member.name, self.other.member.name)

    def look(self) -> None:
        """Learn what the other side has."""
        new = self.other.member.have & ~self.theirs
        self.theirs |= new
        self.member.count(new, 1)

    def cancelled(self, piece: int) -> None:
        """The other side needs a piece no more; it is sent all the same once that has begun."""
        if piece in self.queue:
            self.queue.remove(piece)


class Contacts:
    """The hosts that a member may connect to."""

    __slots__ = ("_banned", "_connecting", "_named", "_tries")

    def __init__(self) -> None:
        #: How many tries have failed, less one for each time that the host was named again.
        self._tries: dict[str, int] = {}
        #: Hosts that plans named.
        self._named: dict[str, None] = {}
        #: Hosts that have sent wrong bytes.
        self._banned: dict[str, None] = {}
        #: Hosts that a try to connect to, or the pause after it, is under way for.
        self._connecting: dict[str, None] = {}

    def add(self, name: str, *, named: bool) -> None:
        """A host may be a member, too; `named` by a plan."""
        self._tries[name] = max(0, self._tries.get(name, 0) - 1)
        if named:
            self._named[name] = None

    def choose(self, peers: Mapping[str, Peer], random: Random) -> list[str]:
        """The hosts to connect to now, beside these peers."""
        names = [
            name
            for name, tries in self._tries.items()
            if tries < TRIES_MAX and name not in peers and name not in self._connecting and name not in self._banned
        ]
        named = [name for name in names if name in self._named]
        others = [name for name in names if name not in self._named]
        outgoing = [name for name, peer in peers.items() if peer.outgoing and name not in self._named]
        room = OUTGOING_MAX - len(outgoing) - sum(name not in self._named for name in self._connecting)
        chosen = [*named, *random.sample(others, min(len(others), max(0, room)))]
        self._connecting.update(dict.fromkeys(chosen))
        return chosen

    def failed(self, name: str) -> float:
        """A try has failed; returns for how many seconds there is no other."""
        self._tries[name] += 1
        return self._tries[name] * RECONNECT_S

    def tried(self, name: str) -> None:
        """A try, with the pause after it, is over."""
        self._connecting.pop(name, None)

    def ban(self, name: str) -> None:
        """Have nothing to do with a host any more."""
        self._banned[name] = None

    def banned(self, name: str) -> bool:
        """Whether the host has sent wrong bytes."""
        return name in self._banned


class Mesh:
    """All members of one blob's swarm, by host. `hosts` are all hosts of the simulation."""

    def __init__(self, digest: Digest, context: Context, hosts: Mapping[str, SwarmHost]) -> None:
        self.digest, self.context, self.hosts = digest, context, hosts
        self.world, self.network = context.world, context.network
        self.members: dict[str, Member] = {}

    def join(self, host: SwarmHost, pull: SwarmPull, names: Iterable[str]) -> Member:
        """Let a host be a member from now on; `names` are hosts that may be members, too."""
        member = self.members[host.name] = Member(self, host, pull)
        member.meet(names, named=True)
        member.announce()
        member.tick()
        return member

    def gone(self, name: str) -> None:
        """A host's process has died."""
        member = self.members.get(name)
        if member is not None:
            member.leave()

    def answer(self, name: str) -> Member | None:
        """The member that takes a connection at a host, None when there is none. A host with the
        whole blob becomes a seed when another one connects."""
        member = self.members.get(name)
        if member is None:
            host = self.hosts[name]
            pull = host.pulls.get(self.digest)
            if pull is not None and host.running and not host.leaving and pull.have.complete:
                member = self.members[name] = Member(self, host, pull)
                member.tick()
        return member


class Member:
    """One host in a swarm."""

    def __init__(self, mesh: Mesh, host: SwarmHost, pull: SwarmPull) -> None:
        self.mesh, self.host, self.pull, self.name = mesh, host, pull, host.name
        self.world, self.network = mesh.world, mesh.network
        #: The pieces that the host holds, and the pieces that it has requested, as bits.
        self.have = int.from_bytes(pull.have.bits, "little")
        self.under_way = 0
        #: How many of the peers have each piece.
        self.counts = [0] * pull.have.count
        #: Connections, by host.
        self.peers: dict[str, Peer] = {}
        self.left = False
        self._contacts = Contacts()
        #: When peers are next asked for theirs, in seconds.
        self._exchange_at = self.world.now + EXCHANGE_S

    # -- connections

    def meet(self, names: Iterable[str], *, named: bool = False) -> None:
        """Hosts that may be members, too; `named` by a plan."""
        for name in names:
            if name and name != self.name and name in self.mesh.hosts:
                self._contacts.add(name, named=named)
        self._connect()

    def announce(self) -> None:
        """Ask the tracker for other members, and again every ANNOUNCE_S."""
        if self.left:
            return
        fleet = self.mesh.context.tracker.fleet
        if fleet is None or not self.network.paths.reachable(self.name, TRACKER_NAME):
            self.world.after(ANNOUNCE_AGAIN_S, self.announce)
            return
        swarm = fleet.swarms.get(self.mesh.digest)
        names = sorted(name for name, member in swarm.members.items() if member.present) if swarm is not None else []
        self.meet(self.world.random.sample(names, min(ANNOUNCED_MAX, len(names))))
        self.world.after(ANNOUNCE_S, self.announce)

    def _connect(self) -> None:
        for name in self._contacts.choose(self.peers, self.world.random):
            if self.network.paths.reachable(self.name, name):
                self.world.after(2 * self.network.latency_s, self._reached, name)
            else:
                self.world.after(CONNECT_TIMEOUT_S, self._refused, name)

    def _reached(self, name: str) -> None:
        whole = self.network.paths.reachable(self.name, name)
        other = self.mesh.answer(name) if whole and not self.left else None
        if other is None or other._contacts.banned(self.name):
            self._refused(name)
            return
        self._contacts.tried(name)
        if name in self.peers:
            return
        before = other.peers.get(self.name)
        if before is not None:  # the path was cut, or this host died and is back
            other._drop(before)
        here, there = Peer(self, outgoing=True), Peer(other, outgoing=False)
        here.other, there.other = there, here
        self.peers[name], other.peers[self.name] = here, there
        for peer in (here, there):
            peer.look()
        for peer in (here, there):
            peer.member._offer(peer)

    def _refused(self, name: str) -> None:
        self.world.after(self._contacts.failed(name), self._reconnect, name)

    def _reconnect(self, name: str) -> None:
        self._contacts.tried(name)
        if not self.left:
            self._connect()

    def leave(self) -> None:
        """Be a member no more: what is under way is lost, and the peers learn it."""
        self.left = True
        if self.mesh.members.get(self.name) is self:
            del self.mesh.members[self.name]
        for peer in list(self.peers.values()):
            self._close(peer)

    def _close(self, peer: Peer) -> None:
        """End a connection; the other side learns it if the path is whole."""
        self._drop(peer)
        if peer.reachable:
            self.world.after(self.network.latency_s, peer.other.member._drop, peer.other)

    def _drop(self, peer: Peer) -> None:
        if not peer.open:
            return
        peer.open = False
        name = peer.other.member.name
        if self.peers.get(name) is peer:
            del self.peers[name]
        self.count(peer.theirs, -1)
        self._choked(peer)
        peer.queue.clear()
        if not self.left:
            self._ask_all()
            self._connect()

    # -- every RECHOKE_S

    def tick(self) -> None:
        """Choose anew the peers to upload to, and look after what does not move."""
        if self.left or not self.host.running:
            return
        now = self.world.now
        for peer in list(self.peers.values()):
            if peer.reachable:
                if peer.cut_since is not None:
                    peer.cut_since = None
                    peer.look()
            elif peer.cut_since is None:
                peer.cut_since = now
            elif now - peer.cut_since >= PEER_TIMEOUT_S:
                self._drop(peer)
                continue
            for piece in [piece for piece, since in peer.requested.items() if now - since >= REQUEST_S]:
                del peer.requested[piece]
                self._cancel(peer, piece)
                self.under_way &= ~(1 << piece)
        if now >= self._exchange_at:
            self._exchange_at = now + EXCHANGE_S
            self.meet([name for peer in self.peers.values() if peer.reachable for name in peer.other.member.peers])
        self._rechoke()
        self._ask_all()
        self._connect()
        self.world.after(RECHOKE_S, self.tick)

    def _rechoke(self) -> None:
        interested = [peer for peer in self.peers.values() if peer.interested]
        self.world.random.shuffle(interested)
        optimistic, rest = interested[:1], interested[1:]
        rest.sort(key=lambda peer: -peer.received)
        chosen = [*optimistic, *rest[: UPLOAD_SLOTS - 1]]
        for peer in self.peers.values():
            peer.received = 0
            if peer not in chosen and not peer.choking:
                peer.choking = True
                peer.queue.clear()
                peer.other.member._choked(peer.other)
        for peer in chosen:
            self._offer(peer)

    def _choked(self, peer: Peer) -> None:
        """The other side answers no requests any more."""
        for piece in peer.requested:
            self.under_way &= ~(1 << piece)
        peer.requested.clear()

    def _offer(self, peer: Peer) -> None:
        """Upload to the other side, if it is interested and there is a slot."""
        if peer.choking and peer.interested and sum(not other.choking for other in self.peers.values()) < UPLOAD_SLOTS:
            peer.choking = False
            self.world.after(self.network.latency_s, peer.other.member.ask, peer.other)

    # -- receiving

    def ask(self, peer: Peer) -> None:
        """Request the rarest pieces from the other side, REQUESTS_MAX at once."""
        if not peer.open or peer.other.choking or self.pull.ended:
            return
        while len(peer.requested) < REQUESTS_MAX:
            piece = self._rarest(peer.theirs & ~self.have & ~self.under_way)
            if piece is None:
                return
            self.mesh.context.checks.asking(self.host, self.pull, piece)
            peer.requested[piece] = self.world.now
            self.under_way |= 1 << piece
            if peer.reachable:
                self.world.after(self.network.latency_s, peer.other.member._asked, peer.other, piece)

    def _ask_all(self) -> None:
        for peer in list(self.peers.values()):
            self.ask(peer)

    def _rarest(self, bits: int) -> int | None:
        rarest: list[int] = []
        least = len(self.peers) + 1
        while bits:
            low = bits & -bits
            piece = low.bit_length() - 1
            bits ^= low
            if self.counts[piece] < least:
                least, rarest = self.counts[piece], [piece]
            elif self.counts[piece] == least:
                rarest.append(piece)
        return self.world.random.choice(rarest) if rarest else None

    def _arrived(self, peer: Peer, piece: int, length: int, good: bool) -> None:
        pull = self.pull
        if peer.open and peer.requested.pop(piece, None) is not None:
            self.under_way &= ~(1 << piece)
        if self.left or not self.host.running:
            pull.bytes_again += length if self.host.running else 0
        elif not good:
            pull.rejected += 1
            self._contacts.ban(peer.other.member.name)
            if peer.open:
                self._close(peer)
        elif pull.proof[piece]:
            pull.duplicates += 1
            pull.bytes_again += length
        else:
            peer.received += length
            pull.bytes_peers += length
            pull.bytes_swarm += length
            self.host.keep(pull, SWARM, piece)
        if not self.left:
            self.ask(peer)

    def held(self, piece: int) -> None:
        """The host holds a piece from now on, from whatever source: the member requests it no more,
        and its peers hear of it."""
        bit = 1 << piece
        self.have |= bit
        for peer in list(self.peers.values()):
            if peer.requested.pop(piece, None) is not None:
                self.under_way &= ~bit
                self._cancel(peer, piece)
            if peer.reachable:
                there = peer.other
                if not there.theirs & bit:
                    there.theirs |= bit
                    there.member.counts[piece] += 1
                self._offer(peer)
                if not there.member.have & bit:
                    there.member.ask(there)

    def _cancel(self, peer: Peer, piece: int) -> None:
        """The other side need not send a piece that it has not begun to send."""
        if peer.reachable:
            self.world.after(self.network.latency_s, peer.other.cancelled, piece)

    def count(self, bits: int, by: int) -> None:
        """So many peers more have these pieces."""
        while bits:
            low = bits & -bits
            self.counts[low.bit_length() - 1] += by
            bits ^= low

    # -- sending

    def _asked(self, peer: Peer, piece: int) -> None:
        if peer.open and not peer.choking:
            peer.queue.append(piece)
            self._send(peer)

    def _send(self, peer: Peer) -> None:
        if peer.sending or not peer.queue or self.host.server.silent:
            return
        piece = peer.queue.popleft()
        length = self.pull.blob.lengths[piece]
        peer.sending = True
        self.world.at(self.host.link.send(self.world.now, length), self._sent, peer, piece, length)

    def _sent(self, peer: Peer, piece: int, length: int) -> None:
        peer.sending = False
        if self.left or not self.host.running:
            return
        server = self.host.server
        server.count_sent(length)
        child, network = peer.other.member.host, self.network
        if peer.reachable:
            good = not server.spoils(piece)
            arrived = peer.other.member._arrived
            if self.host.rack is child.rack:
                self.world.at(network.wires.arrival(child.link, length), arrived, peer.other, piece, length, good)
            else:
                network.wires.cross(self.host.rack, child, length, arrived, peer.other, piece, length, good)
        if peer.open:
            self._send(peer)


LOOK_UP_S = (0.3, 2.0)
LOOK_UP_AGAIN_S = (1.0, 2.0)
OPEN_S = 0.2
"""How long a session takes to start, and a transfer in it."""

CLOSE_S = 0.1
"""How long libtorrent takes to let go of the file."""


class FetchPull(SwarmPull, Protocol):
    """One blob at one host, as its part in a swarm uses it."""

    download: Download | None
    bytes_origin: int


class FetchHost(SwarmHost, Protocol):
    """A host that fetches by a swarm."""

    session: TrackerSessions

    @property
    def client(self) -> Receiver:
        """What the host receives with."""

    def submit(self, pull: Any, event: Event) -> None:
        """Hand an event to the pull's core, and do what it commands."""


class SwarmFeed:
    """Brings pieces from the origin into the swarm, as core/origin_seeding.py decides."""

    def __init__(self, host: FetchHost, pull: FetchPull, member: Member, context: Context) -> None:
        self._host, self._pull, self._member, self._context = host, pull, member, context
        self._world = context.world
        self._core = OriginSeeding(pull.blob.digest, host.name, pull.have, self._world.now)
        self._stream: Stream | None = None
        self._over = False
        self._world.after(self._world.random.uniform(0, LOOK_S), self._look)

    @property
    def stripes(self) -> set[int]:
        """The stripes that this host alone reads."""
        download = self._pull.download
        if download is None or download.readers().shared:
            return set()
        return {piece % self._pull.blob.stripes for piece in self._core.under_way}

    def stop(self) -> None:
        """End; drop what is being read."""
        self._over = True
        if self._stream is not None:
            self._forget(self._stream)

    def held(self, piece: int) -> None:
        """Take in that a piece has been stored."""
        if self._core.held(piece):
            self._read_more()

    def arrived(self, piece: int, length: int, good: bool) -> None:
        """Take in a piece that the origin has sent."""
        pull, now = self._pull, self._world.now
        if self._over:
            pull.bytes_again += length
            return
        if not good:
            pull.rejected += 1
            self._core.failed(piece, now=now)
            self._complain(piece % pull.blob.stripes, "corrupt")
        elif pull.proof[piece]:
            self._core.dropped(piece)
            pull.duplicates += 1
            pull.bytes_again += length
        else:
            self._core.brought(piece, now=now)
            pull.bytes_origin += length
            pull.bytes_swarm += length
            self._host.keep(pull, SWARM, piece)
        self._read_more()

    def ended(self) -> None:
        """Take in that the origin does not answer, or the path to it is cut."""
        if self._stream is not None:
            self._forget(self._stream)
        for piece in list(self._core.under_way):
            self._core.failed(piece, now=self._world.now)
            self._complain(piece % self._pull.blob.stripes, "unavailable")

    def _look(self) -> None:
        download = self._pull.download
        if self._over or download is None:
            return
        readers = download.readers()
        if readers.any:
            self._core.look(readers, self._member.counts, now=self._world.now)
            self._read_more()
        self._world.after(LOOK_S, self._look)

    def _read_more(self) -> None:
        download = self._pull.download
        if self._over or download is None:
            return
        while (piece := self._core.next(download.readers(), now=self._world.now)) is not None:
            self._context.checks.feeding(self._host, self._pull, piece)
            if self._stream is None:
                self._stream = Stream(self._host.client, None, self._pull, SWARM, 0, feed=self)
            self._context.origin.ask(self._stream, piece)

    def _forget(self, stream: Stream) -> None:
        stream.child_open = False
        self._context.origin.closed(stream)
        self._context.network.forget(stream)
        self._stream = None

    def _complain(self, stripe: int, reason: Reason) -> None:
        self._host.session.send(Complaint(self._pull.blob.digest, stripe, ORIGIN.host, reason))


class SwarmFetch:
    """One pull's part in a swarm, in one life of its host. The host's process stops it when it
    dies."""

    def __init__(self, host: FetchHost, pull: FetchPull, context: Context) -> None:
        self._host, self._pull, self._context = host, pull, context
        self._world, self._mesh = context.world, context.meshes[pull.blob.digest]
        self._names: dict[str, None] = {}  # hosts that plans named
        self._member: Member | None = None
        self._feed: SwarmFeed | None = None
        self._closing = False  # between close() and the next begin()
        self._over = False
        at_once = context.transport_of(host.name) == "swarm"
        self._world.after(0.0 if at_once else self._world.random.uniform(*LOOK_UP_S), self._look_up)

    @property
    def reading(self) -> set[int]:
        """The stripes that are being read from the origin."""
        return self._feed.stripes if self._feed is not None else set()

    def begin(self) -> None:
        """Take part soon."""
        self._closing = False
        self._context.checks.joining(self._host, self._pull)
        self._world.after(OPEN_S, self._open)

    def close(self) -> None:
        """Leave the swarm; SwarmClosed follows."""
        self._closing = True
        if self._feed is not None:
            self._feed.stop()
        if self._member is not None:
            self._member.leave()
            self._world.after(CLOSE_S, self._closed)
        self._member = self._feed = None

    def planned(self, plan: Plan) -> None:
        """Take the hosts that the tracker's plan names for peers."""
        names = [superpeer.host for superpeer in plan.keepers]
        for stripe in plan.stripes:
            sources = (stripe.parent, *stripe.alternates)
            names += [source.host for source in sources if source is not None and not source.is_origin]
        self._names.update(dict.fromkeys(names))
        if self._member is not None:
            self._member.meet(names, named=True)

    def held(self, piece: int) -> None:
        """Take in that a piece has been stored."""
        if self._member is not None:
            self._member.held(piece)
        if self._feed is not None:
            self._feed.held(piece)

    def end(self) -> None:
        """Take in that the pull has ended. A member that has everything stays as a seed."""
        self._over = True
        if self._feed is not None:
            self._feed.stop()
        if self._member is not None and not self._pull.have.complete:
            self._member.leave()

    def stop(self) -> None:
        """End: the process dies, or fetches nothing more."""
        self._over = True
        self.close()

    def _look_up(self) -> None:
        if self._over:
            return
        if self._host.session.welcomed:
            self._world.after(2 * self._context.network.latency_s, self._found)
        else:
            self._world.after(self._world.random.uniform(*LOOK_UP_AGAIN_S), self._look_up)

    def _found(self) -> None:
        if not self._over:
            self._host.submit(self._pull, TorrentKnown(True))

    def _open(self) -> None:
        if self._over:
            return
        if self._closing:  # it was left before it began
            self._closed()
            return
        self._member = self._mesh.join(self._host, self._pull, self._names)
        self._feed = SwarmFeed(self._host, self._pull, self._member, self._context)

    def _closed(self) -> None:
        if not self._over:
            self._host.submit(self._pull, SwarmClosed("closed"))
