"""A simulated host: the real download, sources and uplink cores, and around them what the agent's
shell does.

What survives a crash is the disk: the verified pieces of each blob. Everything else, the cores
included, begins anew.

How a simulated host takes in what arrives: after each piece its downlink core says for how long
it does not read the stream on.

Blobs, and what one host has to do with one of them.

What a simulated host tells the tracker of itself.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from p2pdist.core import download as dl
from p2pdist.core import pull as pl
from p2pdist.core import uplink as ul
from p2pdist.core.downlink import Downlink
from p2pdist.core.sources import Sources
from p2pdist.core.transport import CutShort
from p2pdist.model.digest import Digest
from p2pdist.model.errors import P2PDistError, from_problem
from p2pdist.model.messages import (
    Advance,
    Assign,
    Complaint,
    Holding,
    Leaving,
    Left,
    Priority,
    Reject,
    Report,
)
from p2pdist.model.pieces import PieceLayout, PieceSet
from p2pdist.model.plan import Source
from p2pdist.simulate.bittorrent_fetch import SwarmFetch
from p2pdist.simulate.context import Surroundings
from p2pdist.simulate.network import Link, Network, Rack, Stream
from p2pdist.simulate.processor import Processor


class Intake:
    """One life of a host's downlink."""

    __slots__ = ("_downlink", "_network")

    def __init__(self, network: Network) -> None:
        self._network = network
        self._downlink = Downlink()

    def arrived(self, stream: Stream, length: int) -> None:
        """A piece has come in whole: there is room for another once the host reads on."""
        if stream.transit:
            stream.transit.pop(0)
        pause_s = self._downlink.received(stream.pull.blob.priority, length, self._network.world.now)
        if pause_s:
            stream.unread += 1
            self._network.world.after(pause_s, self._look, stream)
        elif stream.held_up:
            self._network.room(stream)

    def _look(self, stream: Stream) -> None:
        world = self._network.world
        pause_s = self._downlink.held_s(stream.pull.blob.priority, world.now)
        if pause_s and stream.child_open:
            world.after(pause_s, self._look, stream)
            return
        stream.unread -= 1
        if stream.held_up:
            self._network.room(stream)
        if stream.parent is None and self._network.origin is not None:
            self._network.origin.go_on([stream])


class Blob:
    """One blob of a simulation: how it is cut, how urgent its pulls are, and what else is the same
    for it at every host."""

    __slots__ = ("digest", "layout", "lengths", "priority", "stripes", "verified")

    def __init__(self, digest: Digest, layout: PieceLayout, priority: Priority) -> None:
        self.digest, self.layout, self.priority = digest, layout, priority
        self.stripes = layout.stripes
        self.lengths = [layout.length(piece) for piece in range(layout.count)]
        self.verified = [ul.Verified(digest, piece) for piece in range(layout.count)]


class Pull:
    """One blob at one host. `have` is what the disk holds; `proof` is the invariants' own record of
    it. `bytes_again` came for nothing: the host held them, or had closed their stream and asked
    another source for them; `bytes_swarm` are those of the others that came by BitTorrent. `moves`
    counts how often the pull left a transport for the other."""

    __slots__ = (
        "blob",
        "bytes_again",
        "bytes_origin",
        "bytes_peers",
        "bytes_swarm",
        "completed_at",
        "core",
        "download",
        "duplicates",
        "error",
        "have",
        "incoming",
        "joined_at",
        "moves",
        "proof",
        "rejected",
        "reported",
        "swarm",
    )

    def __init__(self, blob: Blob) -> None:
        self.blob = blob
        self.have = PieceSet(blob.layout.count)
        self.download: dl.Download | None = None
        self.core: pl.PullCore | None = None
        self.swarm: SwarmFetch | None = None
        self.incoming: dict[int, Stream] = {}
        self.reported: tuple[int, ...] = ()
        self.proof = bytearray(blob.layout.count)
        self.joined_at: float | None = None
        self.completed_at: float | None = None
        self.error: P2PDistError | None = None
        self.bytes_origin = self.bytes_peers = self.bytes_swarm = self.bytes_again = 0
        self.duplicates = self.rejected = self.moves = 0

    @property
    def settled(self) -> bool:
        return self.completed_at is not None or self.error is not None

    def counts(self) -> tuple[int, ...]:
        if self.download is not None:
            return tuple(self.download.counts)
        return tuple(self.have.stripe_counts(self.blob.stripes))


def holdings(host: Host) -> tuple[Holding, ...]:
    """What a tracker must know of a host."""
    if host.leaving:
        return ()
    return tuple(holding_of(pull) for pull in host.pulls.values() if pull.error is None)


def holding_of(pull: Pull) -> Holding:
    """What it must know of one pull."""
    blob = pull.blob
    pull.reported = pull.counts()
    parents = pull.download.parents() if pull.download is not None else ()
    if pull.swarm is not None and parents:
        read = pull.swarm.reading
        parents = tuple("" if stripe in read else host for stripe, host in enumerate(parents))
    by_swarm = pull.core.report_swarm() if pull.core is not None else False
    layout = blob.layout
    return Holding(blob.digest, layout.size, layout.piece_size, pull.reported, parents, blob.priority, by_swarm)


def report(host: Host) -> Report | None:
    """What is new since the last report, None when nothing is."""
    advances = []
    for pull in host.pulls.values():
        counts = pull.counts() if pull.error is None else pull.reported
        if counts != pull.reported:
            pull.reported = counts
            advances.append(Advance(pull.blob.digest, counts))
    sent_bytes, busy_s = host.uplink.take_sample(host.world.now)
    waiting = any(not pull.settled for pull in host.pulls.values())
    return Report(tuple(advances), sent_bytes, busy_s) if advances or busy_s or waiting else None


DOWNLOAD_TICK_S = 0.25
UPLINK_TICK_S = 0.1


class Host:
    """See the module's text."""

    __slots__ = (
        "_around", "_block_sent", "_intake", "_life", "_number", "_sources", "_watching", "address", "ahead", "checks", "leaving", "link",
        "name", "network", "outgoing", "processor", "pulls", "rack", "running", "sent_bytes", "session", "silent", "uplink", "world",
        "wrong_bytes", "zone",
    )  # fmt: skip

    def __init__(
        self,
        name: str,
        link: Link,
        blobs: Sequence[Blob],
        around: Surroundings,
        rack: Rack | None = None,
        zone: str = "",
    ) -> None:
        self.name, self.link, self.rack, self.zone = name, link, rack, zone
        self.address = f"{name}:7071"
        self.world, self.network, self.checks = around.world, around.network, around.checks
        self.pulls = {blob.digest: Pull(blob) for blob in blobs}
        self.running = self.leaving = self.silent = False
        self.wrong_bytes = 0.0
        self.outgoing: dict[int, Stream] = {}
        self.ahead: list[Stream] = []
        self.sent_bytes = 0
        self.uplink = ul.Uplink(blocks_per_piece=around.blocks_per_piece)
        self._intake = Intake(self.network)
        self._around = around
        self._sources = Sources()
        pieces = [blob.layout.piece_size for blob in blobs]
        self.processor = Processor(self.world, max(pieces, default=0) / link.up_bytes_s)
        from p2pdist.simulate.tracker import AgentSession

        self.session = AgentSession(self, around.tracker)
        self._life = 0
        self._number = 0
        self._watching = False
        self._block_sent: dict[int, ul.BlockSent] = {}

    def spoils(self, piece: int) -> bool:
        """Whether this host's copy of a piece goes out with wrong bytes: the share `wrong_bytes` of
        all pieces, always the same ones."""
        return (piece * 2654435761 % 1000) < self.wrong_bytes * 1000

    # -- life and death

    def start(self) -> None:
        """The agent's process starts: it opens a session and goes on with its pulls."""
        assert not self.running
        self.running, self.leaving = True, False
        self._life += 1
        self.outgoing.clear()
        self.ahead.clear()
        self._block_sent.clear()
        self._watching = False
        self.uplink = ul.Uplink(blocks_per_piece=self._around.blocks_per_piece)
        self._intake = Intake(self.network)
        self._sources = Sources()
        for pull in self.pulls.values():
            self._begin(pull)
        self.session.start()

    def crash(self, *, power: bool) -> None:
        """The process dies; without power its peers are not even told."""
        assert self.running
        self.running = False
        self._life += 1
        if power:
            self.network.power(self.name, on=False)
        self._stop_pulling()
        for mesh in self._around.meshes.values():
            mesh.gone(self.name)
        for stream in list(self.outgoing.values()):
            self.network.abandon(stream)
        self.outgoing.clear()
        self.session.stop()

    def leave(self) -> None:
        """The process is asked to end: it fetches nothing more, tells the tracker, and serves on
        (p2pdist/agent/drain.py)."""
        self.leaving = True
        self.session.tell(Leaving())
        self._stop_pulling()

    def _stop_pulling(self) -> None:
        for pull in self.pulls.values():
            if pull.swarm is not None:
                pull.swarm.stop()
            for stream in list(pull.incoming.values()):
                self._drop(stream)
                self.network.close(stream)
            pull.download = None

    def _begin(self, pull: Pull) -> None:
        blob, now = pull.blob, self.world.now
        if pull.joined_at is None:
            pull.joined_at = now
        if pull.error is not None:
            return
        if not pull.have.complete:
            around = self._around
            download = dl.Download(
                blob.digest, blob.layout, blob.stripes, pull.have, self._sources, now, around.patience_s, self.name
            )
            pull.download, pull.have = download, download.have
            policy = around.transport_of(self.name)
            pull.core = pl.PullCore(download, policy, priority=blob.priority)
            if policy != "trees":
                pull.swarm = SwarmFetch(self, pull, around)
            self.submit(pull, dl.TrackerChanged(self.session.welcomed))
            self.world.after(self.world.random.uniform(0, DOWNLOAD_TICK_S), self._tick_download, pull, self._life)
        self._feed(ul.Held(blob.digest, blob.layout, blob.stripes, pull.have))

    # -- session

    def tracker_changed(self, present: bool) -> None:
        """A tracker answers, or none does."""
        if present and self.leaving:
            self.session.tell(Leaving())
        for pull in self.pulls.values():
            if pull.download is not None:
                self.submit(pull, dl.TrackerChanged(present))

    def decided(self, message: Assign | Reject) -> None:
        """The tracker has decided something about a pull."""
        if isinstance(message, Assign):
            blob, event = message.plan.blob, dl.Planned(message.plan)
            pull = self.pulls.get(blob)
            if pull is not None and pull.swarm is not None:
                pull.swarm.planned(message.plan)
            if pull is not None and pull.download is not None:
                self.submit(pull, event)
        elif message.blob is not None:
            pull = self.pulls.get(message.blob)
            if pull is not None and pull.download is not None:
                self.submit(pull, dl.Rejected(from_problem(message.problem)))

    # -- receiving

    def _tick_download(self, pull: Pull, life: int) -> None:
        self.processor.run(self._tick_downloads, pull, life)

    def _tick_downloads(self, pull: Pull, life: int) -> None:
        if life == self._life and pull.download is not None and not pull.download.finished:
            self.submit(pull, dl.Tick())
            self.world.after(DOWNLOAD_TICK_S, self._tick_download, pull, life)

    def submit(self, pull: Pull, event: pl.Event) -> None:
        """Hand an event to the pull's core, and do what it commands."""
        assert pull.core is not None
        commands = pull.core.handle(event, now=self.world.now)
        if commands:
            self._obey(pull, commands)

    def _obey(self, pull: Pull, commands: Iterable[pl.Command]) -> None:
        for command in commands:
            self.checks.commanded(self, pull, command)
            match command:
                case dl.OpenStream(number, source, stripe):
                    self._open(pull, number, source, stripe)
                case dl.CloseStream(number, after_piece):
                    self._close(pull.incoming[number], after_piece)
                case dl.Complain(stripe, source, reason, piece):
                    self.session.tell(Complaint(pull.blob.digest, stripe, source.host, reason, piece))
                case dl.Completed():
                    pull.completed_at = self.world.now
                    self.session.report()
                    self._end_swarm(pull)
                    self._around.on_settled(self, pull)
                case dl.GaveUp(error):
                    self._gave_up(pull, error)
                case pl.TellTracker():
                    self.session.tell(holding_of(pull))
                case CutShort():
                    for stream in list(pull.incoming.values()):
                        self.closed(stream)
                case pl.Switched():
                    pull.moves += 1
                case pl.BeginSwarm() if pull.swarm is not None:
                    pull.swarm.begin()
                case pl.EndSwarm() if pull.swarm is not None:
                    pull.swarm.close()

    def _end_swarm(self, pull: Pull) -> None:
        if pull.swarm is not None:
            pull.swarm.end()

    def _gave_up(self, pull: Pull, error: P2PDistError) -> None:
        pull.error = error
        self._end_swarm(pull)
        for stream in list(pull.incoming.values()):
            self._drop(stream)
            self.network.close(stream)
        self.session.tell(Left(pull.blob.digest))
        for stream in [each for each in self.outgoing.values() if each.pull.blob is pull.blob]:
            self.network.close_serving(stream)
            self.network.abandon(stream)
        self._feed(ul.Dropped(pull.blob.digest))
        self._around.on_settled(self, pull)

    def _open(self, pull: Pull, number: int, source: Source, stripe: int) -> None:
        if source.is_origin:
            stream = pull.incoming[number] = Stream(self, None, pull, number, stripe)
            self._around.origin.open(stream)
            return
        parent = self._around.hosts[source.host]
        stream = pull.incoming[number] = Stream(self, parent, pull, number, stripe)
        have = PieceSet(pull.blob.layout.count, pull.have.bits)
        for other in pull.incoming.values():
            if other.finishing >= 0:
                have.add(other.finishing)
        self.network.open(stream, have)

    def _close(self, stream: Stream, after_piece: bool) -> None:
        if after_piece and stream.parent is not None:
            stream.finishing = self.network.under_way(stream)
        if stream.finishing < 0:
            self.closed(stream)

    def _drop(self, stream: Stream) -> None:
        stream.child_open = False
        stream.pull.incoming.pop(stream.number, None)
        if stream.parent is None:
            self._around.origin.closed(stream)

    def closed(self, stream: Stream) -> None:
        """This side has closed a stream, as commanded."""
        self._drop(stream)
        self.network.close(stream)
        if stream.pull.download is not None:
            self.submit(stream.pull, dl.StreamEnded(stream.number, "closed"))

    def ended(self, stream: Stream, reason: str) -> None:
        """A stream has ended from the other side."""
        self.processor.run(self._ended, stream, reason)

    def _ended(self, stream: Stream, reason: str) -> None:
        if not stream.child_open:
            return
        if stream.feed is not None:
            stream.feed.ended()
            return
        self._drop(stream)
        if not stream.parent_open:
            self.network.streams.pop(stream, None)
        closed = stream.finishing >= 0
        self.submit(stream.pull, dl.StreamEnded(stream.number, "closed" if closed else reason))

    def arrived(self, stream: Stream, piece: int, length: int, good: bool) -> None:
        """A piece has come in whole. It is verified; a good one is stored and at once offered to
        this host's children."""
        self.processor.run(self._arrived, stream, piece, length, good)

    def _arrived(self, stream: Stream, piece: int, length: int, good: bool) -> None:
        if stream.feed is not None:
            stream.feed.arrived(piece, length, good)
            return
        self._intake.arrived(stream, length)
        pull = stream.pull
        if not stream.child_open or (stream.finishing >= 0 and piece != stream.finishing):
            if self.running:
                pull.bytes_again += length
            return
        download = pull.download
        assert download is not None
        if not good:
            self._reject(stream, piece)
            return
        if stream.parent is None:
            pull.bytes_origin += length
        else:
            pull.bytes_peers += length
        if pull.proof[piece]:
            pull.duplicates += 1
            pull.bytes_again += length
        self.keep(pull, stream.number, piece)
        if stream.finishing == piece and stream.child_open:
            self.closed(stream)

    def keep(self, pull: Pull, number: int, piece: int) -> None:
        """Store a piece that has verified, from stream `number`."""
        assert pull.core is not None
        self.checks.stored(pull, piece, True)
        now = self.world.now
        for send in self.uplink.handle(pull.blob.verified[piece], now=now):
            self._give(send)
        if pull.swarm is not None:
            pull.swarm.held(piece)
        commands = pull.core.handle(dl.PieceStored(number, piece), now=now)
        if commands:
            self._obey(pull, commands)

    def _reject(self, stream: Stream, piece: int) -> None:
        stream.pull.rejected += 1
        self._drop(stream)
        self.network.close(stream)
        self.submit(stream.pull, dl.StreamEnded(stream.number, "corrupt", piece))

    # -- sending

    def serve(self, stream: Stream, have: PieceSet) -> str:
        """A child asks for a stripe; returns why not, or "" when it will be served."""
        pull = self.pulls.get(stream.pull.blob.digest)
        if pull is None or pull.error is not None:
            return "missing"
        self._number += 1
        stream.serving, stream.parent_open = self._number, True
        self.outgoing[self._number] = stream
        if not self.silent:
            self._block_sent[self._number] = ul.BlockSent(self._number)
            self._feed(ul.Opened(self._number, pull.blob.digest, stream.stripe, have, pull.blob.priority))
        return ""

    def block_sent(self, stream: Stream, length: int) -> None:
        """The uplink has sent a stream's block."""
        self.sent_bytes += length
        self.processor.run(self._block_was_sent, stream)

    def _block_was_sent(self, stream: Stream) -> None:
        if stream.serving not in self._block_sent:
            return  # the stream was closed before the process got to this
        for command in self.uplink.handle(self._block_sent[stream.serving], now=self.world.now):
            self._give(command)
        if self.ahead:
            self._wait_less()

    def stopped_serving(self, stream: Stream) -> None:
        """A child's stream is closed."""
        if self.outgoing.pop(stream.serving, None) is not None:
            self._block_sent.pop(stream.serving, None)
            self._feed(ul.Closed(stream.serving))
            self._wait_less()

    def _wait_less(self) -> None:
        """Children may have caught up with the stripes that this host reads from the origin."""
        ahead, self.ahead = self.ahead, []
        self._around.origin.go_on(ahead)

    def watch_uplink(self) -> None:
        """Tick the uplink core while blocks are in flight."""
        if not self._watching:
            self._watching = True
            self.world.after(UPLINK_TICK_S, self._tick_uplink, self._life)

    def _tick_uplink(self, life: int) -> None:
        if life != self._life:
            return
        self._watching = False
        self._feed(ul.Tick())
        if self.uplink.in_flight:
            self.watch_uplink()

    def _feed(self, event: ul.Event) -> None:
        for command in self.uplink.handle(event, now=self.world.now):
            self._give(command)

    def _give(self, command: ul.Command) -> None:
        stream = self.outgoing.get(command.stream)
        if stream is None:
            return
        if isinstance(command, ul.Send):
            pull = self.pulls[stream.pull.blob.digest]
            piece, end = command.piece, command.offset + command.length
            self.checks.sending(stream, pull, piece, command.offset)
            self.network.send(stream, piece, command.length, end == pull.blob.lengths[piece])
        else:
            self.network.finish(stream)
