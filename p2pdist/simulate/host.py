"""A simulated host: the real download, sources, downlink and uplink cores, and around them what the
agent does.

What survives a crash is the disk: the verified pieces of each blob. Everything else, the cores
included, begins anew.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

from p2pdist.core import pull as pl
from p2pdist.core import uplink as ul
from p2pdist.core.downlink import Downlink
from p2pdist.core.download import events as dl
from p2pdist.core.download.download import Download
from p2pdist.core.sources import Sources
from p2pdist.core.transport import CutShort
from p2pdist.core.vouched.whole import CheckWhole, Judge, VerifyPieces
from p2pdist.model.digest import Digest
from p2pdist.model.errors import P2PDistError, from_problem
from p2pdist.model.messages import (
    PROTOCOL_VERSION,
    Advance,
    Assign,
    Complaint,
    Hello,
    Holding,
    Leaving,
    Left,
    Listed,
    Recall,
    Report,
    Reread,
)
from p2pdist.model.pieces import PieceSet
from p2pdist.model.plan import ORIGIN, Plan, Source
from p2pdist.simulate.bittorrent import SwarmFetch
from p2pdist.simulate.clock import Processor
from p2pdist.simulate.cluster.sessions import OwnerSessions
from p2pdist.simulate.context import Context
from p2pdist.simulate.network import Link, Network, Rack, Stream
from p2pdist.simulate.origin import Blob, Origin
from p2pdist.simulate.tracker import AgentSession, Owned, SwarmMessage, TrackerSessions, every
from p2pdist.simulate.vouching.listing import GARBAGE, Listing

DOWNLOAD_TICK_S, DOWNLOAD_TICK_MAX_S = 0.25, 0.5
"""Where a turn of large pieces takes longer than the first, a download is looked at once a turn,
but no more seldom than the second."""

UPLINK_TICK_S = 0.1


class Pull:
    """One blob at one host: what its disk holds, the core that fetches the rest, and figures."""

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
        "listing",
        "moves",
        "paces",
        "proof",
        "rejected",
        "reported",
        "sources",
        "streams",
        "swarm",
    )

    def __init__(self, blob: Blob) -> None:
        self.blob = blob
        #: The pieces on the disk; of a life that downloads, the download core's own set.
        self.have = PieceSet(blob.layout.count)
        #: A byte for each piece, 1 once it was stored: the record of the invariants.
        self.proof = bytearray(blob.layout.count)
        #: The cores of this life, None while the host fetches nothing of the blob.
        self.download: Download | None = None
        self.core: pl.PullCore | None = None
        #: Its vouched list, where there is no other.
        self.listing: Listing | None = None
        #: Its part in a swarm, where the host may fetch by one.
        self.swarm: SwarmFetch | None = None
        #: Open streams by their number in the download core; StreamClient keeps them.
        self.incoming: dict[int, Stream] = {}
        #: Stripes that cross a WAN with a budget, and how fast they may come, in bytes/s.
        self.paces: dict[int, float] = {}
        #: The host that each stripe came from last, "" for the origin, and how many streams were
        #: opened in all.
        self.sources: list[str | None] = [None] * blob.stripes
        self.streams = 0
        #: Pieces of each stripe, as the tracker has heard of last.
        self.reported: tuple[int, ...] = ()
        #: When the host started for the first time, and when it had all pieces, in seconds.
        self.joined_at: float | None = None
        self.completed_at: float | None = None
        #: Why the pull gave up.
        self.error: P2PDistError | None = None
        #: Good bytes from the origin and from peers, and what of both came by BitTorrent.
        self.bytes_origin = self.bytes_peers = self.bytes_swarm = 0
        #: Bytes that came for nothing: the host held them, or had closed their stream.
        self.bytes_again = 0
        #: Pieces that the host held already, and pieces with wrong bytes.
        self.duplicates = self.rejected = 0
        #: How often the pull left one transport for another.
        self.moves = 0

    @property
    def ended(self) -> bool:
        """Whether the pull has completed or given up."""
        return self.completed_at is not None or self.error is not None

    def counts(self) -> tuple[int, ...]:
        """How many pieces of each stripe the host holds."""
        if self.download is not None:
            return tuple(self.download.counts)
        return tuple(self.have.stripe_counts(self.blob.stripes))

    def holding(self) -> Holding:
        """What a tracker must know of the pull; what is in it counts as reported."""
        blob, layout = self.blob, self.blob.layout
        self.reported = self.counts()
        parents = self.download.parents() if self.download is not None else ()
        if self.swarm is not None and parents:
            read = self.swarm.reading
            parents = tuple("" if stripe in read else host for stripe, host in enumerate(parents))
        by_swarm = self.core.report_swarm() if self.core is not None else False
        listing = self.listing
        return Holding(
            blob.digest,
            layout.size,
            layout.piece_size,
            self.reported,
            parents,
            blob.priority,
            by_swarm,
            vouched=listing is not None,
            matched=listing is not None and listing.matched,
        )

    def advance(self) -> Advance | None:
        """What is new since the last report, None when nothing is."""
        counts = self.counts() if self.error is None else self.reported
        if counts == self.reported:
            return None
        self.reported = counts
        return Advance(self.blob.digest, counts)


class FrameReader:
    """How a host reads its streams, in one life of its process: after each piece the downlink core
    says for how long the host does not read the stream on."""

    __slots__ = ("_downlink", "_network", "_origin")

    def __init__(self, network: Network, origin: Origin) -> None:
        self._network, self._origin = network, origin
        self._downlink = Downlink()

    def arrived(self, stream: Stream, length: int) -> None:
        """A piece has come in whole: there is room for another once the host reads on."""
        if stream.transit:
            stream.transit.pop(0)
        pause_s = self._downlink.received(stream.pull.blob.priority, length, self._network.world.now)
        if pause_s:
            stream.unread += 1
            self._network.world.after(pause_s, self._read_on, stream)
        elif stream.held_up:
            self._network.room(stream)

    def _read_on(self, stream: Stream) -> None:
        world = self._network.world
        pause_s = self._downlink.held_s(stream.pull.blob.priority, world.now)
        if pause_s and stream.child_open:
            world.after(pause_s, self._read_on, stream)
            return
        stream.unread -= 1
        if stream.held_up:
            self._network.room(stream)
        if stream.parent is None:
            self._origin.read_on([stream])


class StreamClient:
    """The receiving end of a host: its streams from parents and from the origin.

    `on_event` hears what the core of a pull must know, `on_piece` of each good piece, with the
    number of its stream.
    """

    __slots__ = (
        "_context",
        "_network",
        "_on_event",
        "_on_piece",
        "_reader",
        "_server",
        "link",
        "name",
        "processor",
        "rack",
        "zone",
    )

    def __init__(
        self,
        server: StreamServer,
        zone: str,
        processor: Processor,
        context: Context,
        *,
        on_event: Callable[[Pull, dl.Event], None],
        on_piece: Callable[[Pull, int, int], None],
    ) -> None:
        self.name, self.link, self.rack, self.zone = server.name, server.link, server.rack, zone
        self.processor = processor
        self._server, self._context, self._network = server, context, context.network
        self._on_event, self._on_piece = on_event, on_piece
        self._reader = FrameReader(context.network, context.origin)

    def start(self) -> None:
        """The host's process starts, and reads from its downlink anew."""
        self._reader = FrameReader(self._network, self._context.origin)

    def open(self, pull: Pull, number: int, source: Source, stripe: int) -> None:
        """Open stream `number` of a pull."""
        pull.sources[stripe], pull.streams = source.host, pull.streams + 1
        if source.is_origin:
            stream = pull.incoming[number] = Stream(self, None, pull, number, stripe)
            self._context.origin.open(stream)
            return
        parent = self._context.senders[source.host]
        stream = pull.incoming[number] = Stream(self, parent, pull, number, stripe)
        stream.bytes_s = pull.paces.get(stripe, 0.0)
        have = PieceSet(pull.blob.layout.count, pull.have.bits)
        for other in pull.incoming.values():
            if other.finishing >= 0:
                have.add(other.finishing)
        self._network.open(stream, have)

    def close(self, stream: Stream, *, after_piece: bool) -> None:
        """Close a stream, with `after_piece` once the piece that is coming is complete."""
        if after_piece and stream.parent is not None:
            stream.finishing = self._network.in_flight(stream)
            if stream.pull.listing is not None and stream.pull.listing.waits(stream):
                stream.finishing = -1  # it would keep the stream for as long as the list takes
        if stream.finishing < 0:
            self._close_now(stream)

    def close_all(self, pull: Pull) -> None:
        """Close the streams of a pull; its core hears of each."""
        for stream in list(pull.incoming.values()):
            self._close_now(stream)

    def drop_all(self, pull: Pull) -> None:
        """Close the streams of a pull that has ended."""
        for stream in list(pull.incoming.values()):
            self._drop(stream)
            self._network.close(stream)

    def _close_now(self, stream: Stream) -> None:
        self._drop(stream)
        self._network.close(stream)
        if stream.pull.download is not None:
            self._on_event(stream.pull, dl.StreamEnded(stream.number, "closed"))

    def _drop(self, stream: Stream) -> None:
        stream.child_open = False
        if stream.pull.listing is not None:
            stream.pull.bytes_again += stream.pull.listing.dropped(stream)
        stream.pull.incoming.pop(stream.number, None)
        if stream.parent is None:
            self._context.origin.closed(stream)

    def ended(self, stream: Stream, reason: str) -> None:
        """A stream has ended from the other side."""
        self.processor.run(self._ended, stream, reason)

    def _ended(self, stream: Stream, reason: str) -> None:
        if not stream.child_open:
            return
        if stream.feed is not None:
            stream.feed.ended()
            return
        if reason == "done" and stream.pull.listing is not None and stream.pull.listing.waits(stream):
            stream.pull.listing.end_after(stream)  # the last piece is still to be taken
            return
        self._drop(stream)
        if not stream.parent_open:
            self._network.forget(stream)
        closed = stream.finishing >= 0
        self._on_event(stream.pull, dl.StreamEnded(stream.number, "closed" if closed else reason))

    def arrived(self, stream: Stream, piece: int, length: int, good: bool) -> None:
        """A piece has come in whole; `good` is what verifying it will show."""
        if self.processor.idle:  # as nearly always, and for every piece: no list of arguments
            self._arrived(stream, piece, length, good)
        else:
            self.processor.run(self._arrived, stream, piece, length, good)

    def _arrived(self, stream: Stream, piece: int, length: int, good: bool) -> None:
        if stream.feed is not None:
            stream.feed.arrived(piece, length, good)
            return
        pull: Pull = stream.pull
        if pull.listing is not None:
            self._arrived_unlisted(pull.listing, stream, piece, length, good)
            return
        self._reader.arrived(stream, length)
        if not stream.child_open or (stream.finishing >= 0 and piece != stream.finishing):
            if self._server.running:
                pull.bytes_again += length
            return
        assert pull.download is not None
        if not good:
            self._reject(stream, piece)
            return
        self._store(stream, piece, length)

    def _arrived_unlisted(self, listing: Listing, stream: Stream, piece: int, length: int, good: bool) -> None:
        """A piece of a blob with a vouched list has come: it may have to wait for its hash."""
        wanted = stream.parent is not None or piece % stream.pull.blob.stripes == stream.stripe
        if not stream.child_open or not wanted or (stream.finishing >= 0 and piece != stream.finishing):
            self._reader.arrived(stream, length)
            stream.pull.bytes_again += length if self._server.running else 0
            return
        if stream.parent is None:
            version = 0 if good else self._context.origin.wrong_version
        else:
            version = stream.versions.pop(piece, 0) if good else GARBAGE
        listing.arrived(stream, piece, length, version)

    def take(self, stream: Stream, piece: int, length: int) -> None:
        """Store a piece that is as its list has it."""
        self._reader.arrived(stream, length)
        self._store(stream, piece, length)

    def _store(self, stream: Stream, piece: int, length: int) -> None:
        pull: Pull = stream.pull
        if stream.parent is None:
            pull.bytes_origin += length
        else:
            pull.bytes_peers += length
        if pull.proof[piece]:
            pull.duplicates += 1
            pull.bytes_again += length
        self._on_piece(pull, stream.number, piece)
        if stream.finishing == piece and stream.child_open:
            self._close_now(stream)

    def refuse(self, stream: Stream, reason: str, piece: int) -> None:
        """End a stream that brought other bytes than are listed."""
        stream.pull.rejected += 1
        self._drop(stream)
        self._network.close(stream)
        self._on_event(stream.pull, dl.StreamEnded(stream.number, reason, piece))

    def _reject(self, stream: Stream, piece: int) -> None:
        stream.pull.rejected += 1
        self._drop(stream)
        self._network.close(stream)
        self._on_event(stream.pull, dl.StreamEnded(stream.number, "corrupt", piece))

    def lead(self, blob: Digest, stripe: int) -> int:
        """By how many pieces of a stripe the host is ahead of its children."""
        return self._server.uplink.lead(blob, stripe)

    def hold_back(self, stream: Stream) -> None:
        """Let a stream from the origin wait until the host's children may have caught up."""
        self._server.hold_back(stream)


class StreamServer:
    """The sending end of a host: its streams to children; their blocks go out as the uplink core
    commands."""

    __slots__ = (
        "_block_sent",
        "_checks",
        "_context",
        "_life",
        "_network",
        "_number",
        "_paced",
        "_processor",
        "_pulls",
        "_tick_s",
        "_waiting",
        "_watching",
        "_world",
        "_wrong_share",
        "link",
        "name",
        "outgoing",
        "rack",
        "running",
        "sent_bytes",
        "silent",
        "uplink",
    )

    def __init__(
        self,
        name: str,
        link: Link,
        rack: Rack | None,
        pulls: Mapping[Digest, Pull],
        processor: Processor,
        context: Context,
    ) -> None:
        self.name, self.link, self.rack = name, link, rack
        self._pulls, self._processor, self._context = pulls, processor, context
        self._world, self._network, self._checks = context.world, context.network, context.checks
        #: Whether the host's process runs; start() and stop() set it.
        self.running = False
        #: Whether the host accepts streams and sends nothing in them.
        self.silent = False
        #: The share of the pieces that go out with wrong bytes.
        self._wrong_share = 0.0
        #: Bytes sent in all lives, also to peers of swarms.
        self.sent_bytes = 0
        self.uplink = ul.Uplink(blocks_per_piece=context.blocks_per_piece)
        #: Streams by their number in the uplink core, and the number of the last.
        self.outgoing: dict[int, Stream] = {}
        self._number = 0
        #: The event that the uplink core gets after each block, by stream.
        self._block_sent: dict[int, ul.BlockSent] = {}
        #: Streams from the origin to this host that wait until its children have caught up.
        self._waiting: list[Stream] = []
        #: Counts lives, so that a tick of an earlier one does nothing.
        self._life = 0
        #: Whether a tick of the uplink core is due, and how often one is: a piece that takes long
        #: anyway is no sooner taken for stuck.
        self._paced = False  # whether a child has asked for a limit
        self._watching = False
        pieces_s = (pull.blob.layout.piece_size / link.up_bytes_s for pull in pulls.values())
        self._tick_s = max(UPLINK_TICK_S, *pieces_s)

    # -- life and faults

    def start(self) -> None:
        """The host's process starts, with a new uplink core."""
        self.running = True
        self._life += 1
        self.outgoing.clear()
        self._waiting.clear()
        self._block_sent.clear()
        self._watching = False
        self.uplink = ul.Uplink(blocks_per_piece=self._context.blocks_per_piece)

    def stop(self) -> None:
        """The host's process is dead; abandon() follows."""
        self.running = False
        self._life += 1

    def abandon(self) -> None:
        """Break all streams."""
        for stream in list(self.outgoing.values()):
            self._network.abandon(stream)
        self.outgoing.clear()

    def fall_silent(self) -> None:
        """Send nothing from now on in streams that are opened."""
        self.silent = True

    def spoil(self, share: float) -> None:
        """Send wrong bytes from now on for this share of all pieces, always the same ones."""
        self._wrong_share = share

    def spoils(self, piece: int) -> bool:
        """Whether this host's copy of a piece goes out with wrong bytes."""
        return (piece * 2654435761 % 1000) < self._wrong_share * 1000

    # -- streams

    def serve(self, stream: Stream, have: PieceSet) -> str:
        """A child asks for a stripe; returns the reason of a refusal, or "" when it is served."""
        pull = self._pulls.get(stream.pull.blob.digest)
        if pull is None or pull.error is not None:
            return "missing"
        self._number += 1
        stream.serving, stream.parent_open = self._number, True
        self.outgoing[self._number] = stream
        if not self.silent:
            self._block_sent[self._number] = ul.BlockSent(self._number)
            blob = pull.blob
            opened = ul.Opened(self._number, blob.digest, stream.stripe, have, blob.priority, bytes_s=stream.bytes_s)
            self._paced = self._paced or stream.bytes_s > 0
            self.handle(opened)
        return ""

    def drop(self, blob: Blob) -> None:
        """End all streams of a blob, of which the host gives nothing any more."""
        for stream in [stream for stream in self.outgoing.values() if stream.pull.blob is blob]:
            self._network.close_serving(stream)
            self._network.abandon(stream)
        self.handle(ul.Dropped(blob.digest))

    def count_sent(self, length: int) -> None:
        """The uplink has sent so many bytes."""
        self.sent_bytes += length

    def block_sent(self, stream: Stream, length: int) -> None:
        """The uplink has sent a stream's block."""
        self.sent_bytes += length
        if self._processor.idle:  # for every block
            self._block_was_sent(stream)
        else:
            self._processor.run(self._block_was_sent, stream)

    def _block_was_sent(self, stream: Stream) -> None:
        if stream.serving not in self._block_sent:
            return  # the stream was closed before the process got to this
        self.handle(self._block_sent[stream.serving])
        if self._waiting:
            self._wait_less()

    def stopped_serving(self, stream: Stream) -> None:
        """A child's stream is closed."""
        if self.outgoing.pop(stream.serving, None) is not None:
            self._block_sent.pop(stream.serving, None)
            self.handle(ul.Closed(stream.serving))
            self._wait_less()

    def hold_back(self, stream: Stream) -> None:
        """Let a stream from the origin to this host wait until its children may have caught up."""
        self._waiting.append(stream)

    def children_advanced(self) -> None:
        """The host's readers may be further ahead than before, or its children have caught up."""
        if self._waiting:
            self._wait_less()

    def _wait_less(self) -> None:
        waiting, self._waiting = self._waiting, []
        self._context.origin.read_on(waiting)

    # -- the uplink core

    def handle(self, event: ul.Event) -> None:
        """Let the uplink core hear of something, and do what it commands."""
        for command in self.uplink.handle(event, now=self._world.now):
            stream = self.outgoing.get(command.stream)
            if stream is None:
                continue
            if isinstance(command, ul.Send):
                pull = self._pulls[stream.pull.blob.digest]
                piece, end = command.piece, command.offset + command.length
                self._checks.sending(stream, pull, piece, command.offset)
                if pull.listing is not None and (version := pull.listing.versions.get(piece, 0)):
                    stream.versions[piece] = version
                self._network.send(stream, piece, command.length, end == pull.blob.lengths[piece])
            else:
                self._network.finish(stream)
        if self._paced and (wait_s := self.uplink.wait_s(self._world.now)) is not None:
            self._world.after(wait_s, self._paced_due, self._life)

    def _paced_due(self, life: int) -> None:
        """A stream may have waited for its limit."""
        if life == self._life:
            self.handle(ul.Tick())

    def watch_uplink(self) -> None:
        """Tick the uplink core while blocks are in flight."""
        if not self._watching:
            self._watching = True
            self._world.after(self._tick_s, self._tick, self._life)

    def _tick(self, life: int) -> None:
        if life != self._life:
            return
        self._watching = False
        self.handle(ul.Tick())
        if self.uplink.in_flight:
            self.watch_uplink()


class Host:
    """A host with its pulls, of which it has the same ones in each life of its process."""

    __slots__ = (
        "_context",
        "_life",
        "_sources",
        "_tick_s",
        "client",
        "leaving",
        "link",
        "name",
        "network",
        "processor",
        "pulls",
        "rack",
        "server",
        "session",
        "world",
        "zone",
    )

    def __init__(
        self,
        name: str,
        link: Link,
        blobs: Sequence[Blob],
        context: Context,
        rack: Rack | None = None,
        zone: str = "",
        site: str = "",
    ) -> None:
        self.name, self.link, self.rack, self.zone = name, link, rack, zone
        self.world, self.network, self._context = context.world, context.network, context
        self.pulls = {blob.digest: Pull(blob) for blob in blobs}
        for pull in self.pulls.values():
            if pull.blob.hashes:
                pull.listing = Listing(self, pull, context)
        #: Whether the process was asked to end: it fetches nothing more, and serves on.
        self.leaving = False
        #: The sources core, which all pulls of a life share.
        self._sources = Sources()
        piece_size = max((blob.layout.piece_size for blob in blobs), default=0)
        turn_s = max((blob.layout.turn_s(link.down_bytes_s) for blob in blobs), default=0.0)
        #: How often a download core is told that time has passed, in seconds.
        self._tick_s = max(DOWNLOAD_TICK_S, min(DOWNLOAD_TICK_MAX_S, turn_s))
        self.processor = Processor(self.world, piece_size / link.up_bytes_s)
        self.server = StreamServer(name, link, rack, self.pulls, self.processor, context)
        self.client = StreamClient(
            self.server, site or zone, self.processor, context, on_event=self.submit, on_piece=self.keep
        )
        self.session = self._trackers(
            Hello(PROTOCOL_VERSION, name, f"{name}:7071", zone, rack.name if rack is not None else "", site=site)
        )
        #: Counts starts and crashes, so that a tick of an earlier life does nothing.
        self._life = 0

    @property
    def running(self) -> bool:
        """Whether the agent's process runs."""
        return self.server.running

    def _trackers(self, hello: Hello) -> TrackerSessions:
        context = self._context
        if context.cluster is None:
            return AgentSession(
                hello,
                context.tracker,
                self.processor,
                holdings=self._holdings,
                report=self._report,
                on_message=self._decided,
                on_change=self._tracker_changed,
                on_held=self._held,
            )
        return OwnerSessions(
            hello,
            {name: node.tracker for name, node in context.cluster.nodes.items()},
            self.processor,
            self.pulls,
            holdings=self._holdings,
            report=self._report,
            on_message=self._decided,
            on_change=self._tracker_changed,
            on_held=self._held,
        )

    # -- the process

    def start(self) -> None:
        """The agent's process starts: it opens a session and goes on with its pulls."""
        assert not self.running
        self.leaving = False
        self._life += 1
        self.server.start()
        self.client.start()
        self._sources = Sources()
        for pull in self.pulls.values():
            self._begin(pull)
        self.session.start()

    def crash(self, *, power: bool) -> None:
        """The process dies; with `power` the host goes silent, and its peers learn nothing."""
        assert self.running
        self.server.stop()
        self._life += 1
        if power:
            self.network.paths.power(self.name, on=False)
        self._stop_pulling()
        for mesh in self._context.meshes.values():
            mesh.gone(self.name)
        self.server.abandon()
        self.session.stop()

    def leave(self) -> None:
        """The process is asked to end: it fetches nothing more, tells the tracker, and serves on
        (p2pdist/agent/drain.py)."""
        self.leaving = True
        self.session.send(Leaving())
        self._stop_pulling()

    def _stop_pulling(self) -> None:
        for pull in self.pulls.values():
            if pull.swarm is not None:
                pull.swarm.stop()
            self.client.drop_all(pull)
            pull.download = None
            if pull.listing is not None:
                pull.listing.stopped()

    # -- the session

    def _holdings(self, owned: Owned = every) -> tuple[Holding, ...]:
        if self.leaving:
            return ()
        return tuple(pull.holding() for pull in self._of(owned) if pull.error is None)

    def _of(self, owned: Owned) -> list[Pull]:
        return [pull for blob, pull in self.pulls.items() if owned(blob)]

    def _report(self, owned: Owned = every) -> Report | None:
        pulls = self._of(owned)
        advances = tuple(advance for pull in pulls if (advance := pull.advance()) is not None)
        sent_bytes, busy_s = self.server.uplink.take_sample(self.world.now)
        waiting = any(not pull.ended for pull in pulls)
        return Report(advances, sent_bytes, busy_s) if advances or busy_s or waiting else None

    def _tracker_changed(self, present: bool, owned: Owned = every) -> None:
        if present and self.leaving:
            self.session.send(Leaving())
        for pull in self._of(owned):
            if present and pull.listing is not None:
                pull.listing.welcomed()
            if pull.download is not None:
                self.submit(pull, dl.TrackerChanged(present))

    def _held(self, owned: Owned = every) -> None:
        """A tracker has been told what the host holds."""
        for pull in self._of(owned):
            if pull.listing is not None and not self.leaving and pull.error is None:
                pull.listing.held()

    def _decided(self, message: SwarmMessage) -> None:
        if isinstance(message, Listed | Reread | Recall):
            pull = self.pulls.get(message.blob)
            if pull is not None and pull.listing is not None:
                pull.listing.heard(message)
            return
        if isinstance(message, Assign):
            pull = self.pulls.get(message.plan.blob)
            if pull is not None and pull.swarm is not None:
                pull.swarm.planned(message.plan)
            if pull is not None and pull.download is not None:
                self._pace(pull, message.plan)
                self.submit(pull, dl.Planned(message.plan))
        elif message.blob is not None:
            pull = self.pulls.get(message.blob)
            if pull is not None and pull.download is not None:
                self.submit(pull, dl.Rejected(from_problem(message.problem)))

    def _pace(self, pull: Pull, plan: Plan) -> None:
        """Keep to the rates of a plan: a stream from a parent that stays is opened anew."""
        for choice in plan.stripes:
            before = pull.paces.pop(choice.stripe, 0.0)
            if choice.bytes_s:
                pull.paces[choice.stripe] = choice.bytes_s
            for stream in list(pull.incoming.values()) if choice.bytes_s != before else ():
                if stream.stripe == choice.stripe and pull.sources[choice.stripe] == (choice.parent or ORIGIN).host:
                    self.client.close(stream, after_piece=True)

    # -- pulls

    def _begin(self, pull: Pull) -> None:
        blob, now, context = pull.blob, self.world.now, self._context
        if pull.joined_at is None:
            pull.joined_at = now
        if pull.error is not None:
            return
        if not pull.have.complete or (pull.listing is not None and not pull.listing.matched):
            download = Download(
                blob.digest, blob.layout, blob.stripes, pull.have, self._sources, now, context.patience_s, self.name
            )
            pull.download, pull.have = download, download.have
            policy = context.transport_of(self.name)
            pull.core = pl.PullCore(download, policy, priority=blob.priority, vouched=pull.listing is not None)
            if policy != "trees":
                pull.swarm = SwarmFetch(self, pull, context)
            self.submit(pull, dl.TrackerChanged(self.session.answers(blob.digest)))
            self.world.after(self.world.random.uniform(0, self._tick_s), self._tick_due, pull, self._life)
        self.server.handle(ul.Held(blob.digest, blob.layout, blob.stripes, pull.have))

    def _tick_due(self, pull: Pull, life: int) -> None:
        self.processor.run(self._tick, pull, life)

    def _tick(self, pull: Pull, life: int) -> None:
        if life == self._life and pull.download is not None and not pull.download.finished:
            self.submit(pull, dl.Tick())
            self.world.after(self._tick_s, self._tick_due, pull, life)

    def submit(self, pull: Pull, event: pl.Event) -> None:
        """Hand an event to the pull's core, and do what it commands."""
        assert pull.core is not None
        commands = pull.core.handle(event, now=self.world.now)
        if commands:
            self._obey(pull, commands)

    def keep(self, pull: Pull, number: int, piece: int) -> None:
        """Store a piece that has verified, from stream `number`, and offer it to the children."""
        self._context.checks.stored(pull, piece, True)
        self.server.handle(pull.blob.verified[piece])
        if pull.swarm is not None:
            pull.swarm.held(piece)
        self.submit(pull, dl.PieceStored(number, piece))

    def _obey(self, pull: Pull, commands: Iterable[pl.Command]) -> None:
        for command in commands:
            self._context.checks.commanded(self, pull, command)
            match command:
                case dl.OpenStream(number, source, stripe):
                    self.client.open(pull, number, source, stripe)
                case dl.CloseStream(number, after_piece):
                    self.client.close(pull.incoming[number], after_piece=after_piece)
                case dl.Complain(stripe, source, reason, piece):
                    self.session.send(Complaint(pull.blob.digest, stripe, source.host, reason, piece))
                case dl.Completed():
                    pull.completed_at = self.world.now
                    self.session.report()
                    if pull.swarm is not None:
                        pull.swarm.end()
                    self._context.on_ended(self, pull)
                case dl.GaveUp(error):
                    self._gave_up(pull, error)
                case pl.ReportTransport():
                    self.session.send(pull.holding())
                case CutShort():
                    self.client.close_all(pull)
                case pl.Switched():
                    pull.moves += 1
                case pl.BeginSwarm() if pull.swarm is not None:
                    pull.swarm.begin()
                case pl.EndSwarm() if pull.swarm is not None:
                    pull.swarm.close()
                case CheckWhole() | Judge() | VerifyPieces() | pl.AskList() if pull.listing is not None:
                    pull.listing.obey(command)

    def _gave_up(self, pull: Pull, error: P2PDistError) -> None:
        pull.error = error
        if pull.swarm is not None:
            pull.swarm.end()
        self.client.drop_all(pull)
        if pull.listing is not None:
            pull.listing.stopped()
        self.session.send(Left(pull.blob.digest))
        self.server.drop(pull.blob)
        self._context.on_ended(self, pull)
