"""A BitTorrent swarm of one blob: what libtorrent does as the other way of moving bytes, as far as
handoffs between the ways depend on it.

Model. Members know some hosts by name: those of the tracker's plans, those that an announce names,
those that their own peers know (BEP 11). A member dials all of the first, and of the others as
many, by chance, as give it DIALLED_MAX connections; who does not answer is tried TRIES_MAX times.
Those answer that are in the swarm, or have the whole blob; who fetches it by trees does not. Of a
connection both sides know what the other has. A side asks for up to WINDOW pieces at once, the
rarest among its peers first, chance deciding among equals; it uploads to SLOTS peers at once, every
RECHOKE_S to those who gave most, and one of them by chance. Each connection sends one piece at a
time; all of a host's share its uplink with its streams, first come, first served, and the
receiver's downlink and the racks between as in network.py. A piece is verified when it has arrived;
who sent a wrong one is not talked to again. A request that was not answered for REQUEST_S is made
elsewhere. What is sent into a cut path is lost; a connection that was cut for PEER_TIMEOUT_S ends,
that of a process that dies at once.

Left out: blocks below a piece, and with them pieces from several peers, the end game, and what a
broken transfer loses besides whole pieces; the time that news of pieces takes; limits on
connections that nobody reaches here; the swarm of version 1; fast resume; the second or less that a
host needs to become a seed again after its transfer.

Invariants: a member asks for no piece that it holds or has asked for; it counts only what has
verified.

A connection between two members of a simulated BitTorrent swarm, as one of them sees it; see
mesh.py.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import TYPE_CHECKING

from p2pdist.core.pull import SWARM
from p2pdist.model.digest import Digest
from p2pdist.simulate.network import TRACKER_NAME

if TYPE_CHECKING:
    from p2pdist.simulate.context import Surroundings
    from p2pdist.simulate.host import Host, Pull


class Peer:
    """One side of a connection. `choking`: this side uploads nothing to the other; `asked` is what
    it asked the other for, and when; `queue` what the other waits for from it; `got` what it got
    since the last choice of whom to upload to."""

    __slots__ = (
        "asked",
        "choking",
        "cut_since",
        "dialled",
        "got",
        "member",
        "open",
        "other",
        "queue",
        "seen",
        "sending",
    )

    def __init__(self, member: Member, *, dialled: bool) -> None:
        self.member, self.dialled = member, dialled
        self.other: Peer = self
        self.open = self.choking = True
        self.sending = False
        self.seen = 0
        self.asked: dict[int, float] = {}
        self.queue: deque[int] = deque()
        self.got = 0
        self.cut_since: float | None = None

    @property
    def wanted(self) -> bool:
        """Whether the other side lacks something that this one has, as far as it knows."""
        return bool(self.other.seen & ~self.other.member.have)

    def look(self) -> None:
        """See what the other side has."""
        new = self.other.member.have & ~self.seen
        self.seen |= new
        self.member.count(new, 1)


DIALLED_MAX = 8
DIAL_TIMEOUT_S = 3.0
RECONNECT_S = 1.0
TRIES_MAX = 4
WINDOW = 4
SLOTS = 8
RECHOKE_S = 3.0
REQUEST_S = 5.0
PEER_TIMEOUT_S = 15.0
ANNOUNCED_MAX = 50
ANNOUNCE_S = 30.0
ANNOUNCE_AGAIN_S = 10.0
EXCHANGE_S = 60.0


class Mesh:
    """All members of one blob's swarm, by host."""

    def __init__(self, digest: Digest, around: Surroundings) -> None:
        self.digest, self.around = digest, around
        self.world, self.network = around.world, around.network
        self.members: dict[str, Member] = {}

    def join(self, host: Host, pull: Pull, known: Iterable[str]) -> Member:
        """A host takes part from now on; `known` are hosts that may, too."""
        member = self.members[host.name] = Member(self, host, pull)
        member.meet(known, named=True)
        member.announce()
        member.tick()
        return member

    def gone(self, name: str) -> None:
        """A host's process has died."""
        member = self.members.get(name)
        if member is not None:
            member.leave()

    def answer(self, name: str) -> Member | None:
        """Who takes a connection at a host, None when nobody does. A host with the whole blob
        becomes a seed when somebody knocks."""
        member = self.members.get(name)
        if member is None:
            host = self.around.hosts[name]
            pull = host.pulls.get(self.digest)
            if pull is not None and host.running and not host.leaving and pull.have.complete:
                member = self.members[name] = Member(self, host, pull)
                member.tick()
        return member


class Member:
    """One host in a swarm. `have` are its pieces, and `under_way` those that it asked for, as bits;
    `counts` how many of its peers have each piece."""

    def __init__(self, mesh: Mesh, host: Host, pull: Pull) -> None:
        self.mesh, self.host, self.pull = mesh, host, pull
        self.world, self.network = mesh.world, mesh.network
        self.have = int.from_bytes(pull.have.bits, "little")
        self.under_way = 0
        self.counts = [0] * pull.have.count
        self.peers: dict[str, Peer] = {}
        self.left = False
        self._known: dict[str, int] = {}
        self._named: dict[str, None] = {}
        self._banned: dict[str, None] = {}
        self._dialling: dict[str, None] = {}
        self._exchange_at = self.world.now + EXCHANGE_S

    # -- who knows whom

    def meet(self, names: Iterable[str], *, named: bool = False) -> None:
        """Hosts that may take part, too; `named` by a plan."""
        for name in names:
            if name and name != self.host.name and name in self.mesh.around.hosts:
                self._known[name] = max(0, self._known.get(name, 0) - 1)
                if named:
                    self._named[name] = None
        self._dial()

    def announce(self) -> None:
        """Ask the tracker who else takes part, now and then."""
        if self.left:
            return
        fleet = self.mesh.around.tracker.fleet
        if fleet is None or not self.network.reachable(self.host.name, TRACKER_NAME):
            self.world.after(ANNOUNCE_AGAIN_S, self.announce)
            return
        swarm = fleet.swarms.get(self.mesh.digest)
        names = sorted(name for name, member in swarm.members.items() if member.present) if swarm is not None else []
        self.meet(self.world.random.sample(names, min(ANNOUNCED_MAX, len(names))))
        self.world.after(ANNOUNCE_S, self.announce)

    def _dial(self) -> None:
        open_to = [
            name
            for name, tries in self._known.items()
            if tries < TRIES_MAX and name not in self.peers and name not in self._dialling and name not in self._banned
        ]
        named = [name for name in open_to if name in self._named]
        others = [name for name in open_to if name not in self._named]
        dialled = [name for name, peer in self.peers.items() if peer.dialled and name not in self._named]
        room = DIALLED_MAX - len(dialled) - sum(name not in self._named for name in self._dialling)
        for name in [*named, *self.world.random.sample(others, min(len(others), max(0, room)))]:
            self._dialling[name] = None
            if self.network.reachable(self.host.name, name):
                self.world.after(2 * self.network.latency_s, self._reached, name)
            else:
                self.world.after(DIAL_TIMEOUT_S, self._refused, name)

    def _reached(self, name: str) -> None:
        whole = self.network.reachable(self.host.name, name)
        other = self.mesh.answer(name) if whole and not self.left else None
        if other is None or self.host.name in other._banned:
            self._refused(name)
            return
        self._dialling.pop(name, None)
        if name in self.peers:
            return
        before = other.peers.get(self.host.name)
        if before is not None:  # it was cut off, or has come back before the other side knew that it was gone
            other._drop(before)
        here, there = Peer(self, dialled=True), Peer(other, dialled=False)
        here.other, there.other = there, here
        self.peers[name], other.peers[self.host.name] = here, there
        for peer in (here, there):
            peer.look()
        for peer in (here, there):
            peer.member._offer(peer)

    def _refused(self, name: str) -> None:
        self._known[name] += 1
        self.world.after(self._known[name] * RECONNECT_S, self._redial, name)

    def _redial(self, name: str) -> None:
        self._dialling.pop(name, None)
        if not self.left:
            self._dial()

    # -- the end

    def leave(self) -> None:
        """Take part no more: what is under way is lost, and the others learn it."""
        self.left = True
        if self.mesh.members.get(self.host.name) is self:
            del self.mesh.members[self.host.name]
        for peer in list(self.peers.values()):
            self._close(peer)

    def _close(self, peer: Peer) -> None:
        """This side ends a connection; the other one is told, if the path is there."""
        self._drop(peer)
        if self._whole(peer):
            self.world.after(self.network.latency_s, peer.other.member._drop, peer.other)

    def _drop(self, peer: Peer) -> None:
        if not peer.open:
            return
        peer.open = False
        name = peer.other.member.host.name
        if self.peers.get(name) is peer:
            del self.peers[name]
        self.count(peer.seen, -1)
        for piece in peer.asked:
            self.under_way &= ~(1 << piece)
        peer.asked.clear()
        peer.queue.clear()
        if not self.left:
            self._ask_all()
            self._dial()

    # -- now and then

    def tick(self) -> None:
        """Choose anew to whom to upload, and look after what does not move."""
        if self.left or not self.host.running:
            return
        now = self.world.now
        for peer in list(self.peers.values()):
            if self._whole(peer):
                if peer.cut_since is not None:
                    peer.cut_since = None
                    peer.look()
            elif peer.cut_since is None:
                peer.cut_since = now
            elif now - peer.cut_since >= PEER_TIMEOUT_S:
                self._drop(peer)
                continue
            for piece in [piece for piece, since in peer.asked.items() if now - since >= REQUEST_S]:
                del peer.asked[piece]
                self._cancel(peer, piece)
                self.under_way &= ~(1 << piece)
        if now >= self._exchange_at:
            self._exchange_at = now + EXCHANGE_S
            self.meet([name for peer in self.peers.values() if self._whole(peer) for name in peer.other.member.peers])
        self._rechoke()
        self._ask_all()
        self._dial()
        self.world.after(RECHOKE_S, self.tick)

    def _rechoke(self) -> None:
        wanting = [peer for peer in self.peers.values() if peer.wanted]
        self.world.random.shuffle(wanting)
        lucky, rest = wanting[:1], wanting[1:]
        rest.sort(key=lambda peer: -peer.got)
        chosen = [*lucky, *rest[: SLOTS - 1]]
        for peer in self.peers.values():
            peer.got = 0
            if peer not in chosen and not peer.choking:
                peer.choking = True
                peer.queue.clear()
                peer.other.member._choked(peer.other)
        for peer in chosen:
            self._offer(peer)

    def _choked(self, peer: Peer) -> None:
        """The other side answers no more."""
        for piece in peer.asked:
            self.under_way &= ~(1 << piece)
        peer.asked.clear()

    def _offer(self, peer: Peer) -> None:
        """Upload to the other side, if it wants something and there is a slot."""
        if peer.choking and peer.wanted and sum(not each.choking for each in self.peers.values()) < SLOTS:
            peer.choking = False
            self.world.after(self.network.latency_s, peer.other.member.ask, peer.other)

    # -- receiving

    def ask(self, peer: Peer) -> None:
        """Ask the other side for what is rarest, as far as the window is open."""
        if not peer.open or peer.other.choking or self.pull.settled:
            return
        while len(peer.asked) < WINDOW:
            piece = self._rarest(peer.seen & ~self.have & ~self.under_way)
            if piece is None:
                return
            self.mesh.around.checks.asking(self.host, self.pull, piece)
            peer.asked[piece] = self.world.now
            self.under_way |= 1 << piece
            if self._whole(peer):
                self.world.after(self.network.latency_s, peer.other.member._asked, peer.other, piece)

    def _ask_all(self) -> None:
        for peer in list(self.peers.values()):
            self.ask(peer)

    def _rarest(self, bits: int) -> int | None:
        found: list[int] = []
        least = len(self.peers) + 1
        while bits:
            low = bits & -bits
            piece = low.bit_length() - 1
            bits ^= low
            if self.counts[piece] < least:
                least, found = self.counts[piece], [piece]
            elif self.counts[piece] == least:
                found.append(piece)
        return self.world.random.choice(found) if found else None

    def _arrived(self, peer: Peer, piece: int, length: int, good: bool) -> None:
        pull = self.pull
        asked = peer.open and peer.asked.pop(piece, None) is not None
        if asked:
            self.under_way &= ~(1 << piece)
        if self.left or not self.host.running:
            pull.bytes_again += length if self.host.running else 0
        elif not good:
            pull.rejected += 1
            self._banned[peer.other.member.host.name] = None
            if peer.open:
                self._close(peer)
        elif pull.proof[piece]:
            pull.duplicates += 1
            pull.bytes_again += length
        else:
            peer.got += length
            pull.bytes_peers += length
            pull.bytes_swarm += length
            self.host.keep(pull, SWARM, piece)
        if not self.left:
            self.ask(peer)

    def held(self, piece: int) -> None:
        """The host holds a piece from now on, whoever it came from: it is asked for no more, and
        peers hear of it."""
        bit = 1 << piece
        self.have |= bit
        for peer in list(self.peers.values()):
            if peer.asked.pop(piece, None) is not None:
                self.under_way &= ~bit
                self._cancel(peer, piece)
            if self._whole(peer):
                there = peer.other
                if not there.seen & bit:
                    there.seen |= bit
                    there.member.counts[piece] += 1
                self._offer(peer)
                if not there.member.have & bit:
                    there.member.ask(there)

    def _cancel(self, peer: Peer, piece: int) -> None:
        """The other side need not send a piece that it has not begun to send."""
        if self._whole(peer):
            self.world.after(self.network.latency_s, peer.other.member._cancelled, peer.other, piece)

    def _cancelled(self, peer: Peer, piece: int) -> None:
        if piece in peer.queue:
            peer.queue.remove(piece)

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
        if peer.sending or not peer.queue or self.host.silent:
            return
        piece, link, now = peer.queue.popleft(), self.host.link, self.world.now
        length = self.pull.blob.lengths[piece]
        link.up_free_at = max(now, link.up_free_at) + length / link.up_bytes_s
        peer.sending = True
        self.world.at(link.up_free_at, self._sent, peer, piece, length)

    def _sent(self, peer: Peer, piece: int, length: int) -> None:
        peer.sending = False
        if self.left or not self.host.running:
            return
        self.host.sent_bytes += length
        child, network = peer.other.member.host, self.network
        if self._whole(peer):
            good = not self.host.wrong_bytes or not self.host.spoils(piece)
            arrived = peer.other.member._arrived
            if self.host.rack is child.rack:
                self.world.at(network.arrival(child.link, length), arrived, peer.other, piece, length, good)
            else:
                network.cross(self.host.rack, child, length, arrived, peer.other, piece, length, good)
        if peer.open:
            self._send(peer)

    def _whole(self, peer: Peer) -> bool:
        return self.network.reachable(self.host.name, peer.other.member.host.name)
