"""A simulated pull as a member of a BitTorrent swarm: the look-up of its torrent, its membership,
and what the host brings from the origin, as in p2pdist/agent/bittorrent/fetch.py.

Model. Every blob has a torrent, which a host finds while a tracker answers it. A session takes
OPEN_S to start, and libtorrent CLOSE_S to let go of the file. A piece that was read from the origin
and has verified is held at once: the second that libtorrent may keep it in memory is left out, and
so is the swarm of version 1.
"""

from __future__ import annotations

from typing import Any, Protocol

from p2pdist.core.download import Download
from p2pdist.core.origin_seeding import LOOK_S, OriginSeeding
from p2pdist.core.pull import SWARM, Event, SwarmClosed, TorrentKnown
from p2pdist.model.messages import Complaint, Reason
from p2pdist.model.plan import ORIGIN, Plan
from p2pdist.simulate.bittorrent import Member, SwarmHost, SwarmPull
from p2pdist.simulate.context import Context
from p2pdist.simulate.network import Receiver, Stream
from p2pdist.simulate.tracker import AgentSession

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

    session: AgentSession

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
