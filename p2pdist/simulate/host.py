"""A simulated host: the real download, sources and uplink cores, and around them what the agent's shell does.

What survives a crash is the disk: the verified pieces of each blob. Everything else, the cores included, begins anew.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from p2pdist.core import download as dl
from p2pdist.core import uplink as ul
from p2pdist.core.sources import Sources
from p2pdist.model.errors import P2PDistError, from_problem
from p2pdist.model.messages import (
    Advance,
    Assign,
    Complaint,
    Holding,
    Left,
    Reject,
    Report,
)
from p2pdist.model.pieces import PieceSet
from p2pdist.model.plan import Source
from p2pdist.simulate.agent_session import AgentSession
from p2pdist.simulate.intake import Intake
from p2pdist.simulate.network import Link, Network, Stream
from p2pdist.simulate.origin import Origin
from p2pdist.simulate.pull import Blob, Pull
from p2pdist.simulate.rack import Rack
from p2pdist.simulate.session import Tracker
from p2pdist.simulate.world import World

DOWNLOAD_TICK_S = 0.25
UPLINK_TICK_S = 0.1


class Checks(Protocol):
    """Where a host says what it does, so that somebody may object (see invariants.py)."""

    def stored(self, pull: Pull, piece: int, good: bool) -> None:
        """The host took a piece for good."""

    def sending(self, stream: Stream, pull: Pull, piece: int, offset: int) -> None:
        """The host's uplink core sends a block."""

    def commanded(self, host: Host, pull: Pull, command: dl.Command) -> None:
        """The host's download core commands something."""


@dataclass(frozen=True, slots=True)
class Surroundings:
    """What all hosts of a simulation share. `on_settled` is called when a pull completes or is given up."""

    world: World
    network: Network
    origin: Origin
    tracker: Tracker
    checks: Checks
    blocks_per_piece: int
    patience_s: float
    hosts: dict[str, Host]
    on_settled: Callable[[Host, Pull], None]


class Host:
    """See the module's text."""

    __slots__ = (
        "_around", "_block_sent", "_intake", "_life", "_number", "_sources", "_watching", "address", "ahead", "checks", "link", "name",
        "network", "outgoing", "pulls", "rack", "running", "sent_bytes", "session", "silent", "uplink", "world", "wrong_bytes",
        "zone",
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
        self.running = False
        self.silent = False
        self.wrong_bytes = 0.0
        self.outgoing: dict[int, Stream] = {}
        self.ahead: list[Stream] = []
        self.sent_bytes = 0
        self.uplink = ul.Uplink(blocks_per_piece=around.blocks_per_piece)
        self._intake = Intake(self.network)
        self._around = around
        self._sources = Sources()
        self.session = AgentSession(self, around.tracker)
        self._life = 0
        self._number = 0
        self._watching = False
        self._block_sent: dict[int, ul.BlockSent] = {}

    def spoils(self, piece: int) -> bool:
        """Whether this host's copy of a piece goes out with wrong bytes: the share `wrong_bytes` of all pieces, always the same ones."""
        return (piece * 2654435761 % 1000) < self.wrong_bytes * 1000

    # -- life and death

    def start(self) -> None:
        """The agent's process starts: it opens a session and goes on with its pulls."""
        assert not self.running
        self.running = True
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
        for pull in self.pulls.values():
            for stream in list(pull.incoming.values()):
                self._drop(stream)
                self.network.close(stream)
            pull.incoming.clear()
            pull.download = None
        for stream in list(self.outgoing.values()):
            self.network.abandon(stream)
        self.outgoing.clear()
        self.session.stop()

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
            self._submit(pull, dl.TrackerChanged(self.session.welcomed))
            self.world.after(self.world.random.uniform(0, DOWNLOAD_TICK_S), self._tick_download, pull, self._life)
        self._feed(ul.Held(blob.digest, blob.layout, blob.stripes, pull.have))

    # -- session

    def tracker_changed(self, present: bool) -> None:
        """A tracker answers, or none does."""
        for pull in self.pulls.values():
            if pull.download is not None:
                self._submit(pull, dl.TrackerChanged(present))

    def holdings(self) -> tuple[Holding, ...]:
        """What a tracker must know of this host."""
        found = []
        for pull in self.pulls.values():
            if pull.error is None:
                layout = pull.blob.layout
                pull.reported = pull.counts()
                parents = pull.download.parents() if pull.download is not None else ()
                blob = pull.blob
                found.append(
                    Holding(blob.digest, layout.size, layout.piece_size, pull.reported, parents, blob.priority)
                )
        return tuple(found)

    def report(self) -> Report | None:
        """What is new since the last report, None when nothing is."""
        advances = []
        for pull in self.pulls.values():
            counts = pull.counts() if pull.error is None else pull.reported
            if counts != pull.reported:
                pull.reported = counts
                advances.append(Advance(pull.blob.digest, counts))
        sent_bytes, busy_s = self.uplink.take_sample(self.world.now)
        waiting = any(not pull.settled for pull in self.pulls.values())
        return Report(tuple(advances), sent_bytes, busy_s) if advances or busy_s or waiting else None

    def decided(self, message: Assign | Reject) -> None:
        """The tracker has decided something about a pull."""
        if isinstance(message, Assign):
            blob, event = message.plan.blob, dl.Planned(message.plan)
            pull = self.pulls.get(blob)
            if pull is not None and pull.download is not None:
                self._submit(pull, event)
        elif message.blob is not None:
            pull = self.pulls.get(message.blob)
            if pull is not None and pull.download is not None:
                self._submit(pull, dl.Rejected(from_problem(message.problem)))

    # -- receiving

    def _tick_download(self, pull: Pull, life: int) -> None:
        if life == self._life and pull.download is not None and not pull.download.finished:
            self._submit(pull, dl.Tick())
            self.world.after(DOWNLOAD_TICK_S, self._tick_download, pull, life)

    def _submit(self, pull: Pull, event: dl.Event) -> None:
        assert pull.download is not None
        commands = pull.download.handle(event, now=self.world.now)
        if commands:
            self._obey(pull, commands)

    def _obey(self, pull: Pull, commands: list[dl.Command]) -> None:
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
                    self._around.on_settled(self, pull)
                case dl.GaveUp(error):
                    self._gave_up(pull, error)

    def _gave_up(self, pull: Pull, error: P2PDistError) -> None:
        pull.error = error
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
            self._closed(stream)

    def _drop(self, stream: Stream) -> None:
        stream.child_open = False
        stream.pull.incoming.pop(stream.number, None)
        if stream.parent is None:
            self._around.origin.closed(stream)

    def _closed(self, stream: Stream) -> None:
        """This side has closed a stream, as commanded."""
        self._drop(stream)
        self.network.close(stream)
        if stream.pull.download is not None:
            self._submit(stream.pull, dl.StreamEnded(stream.number, "closed"))

    def ended(self, stream: Stream, reason: str) -> None:
        """A stream has ended from the other side."""
        if not stream.child_open:
            return
        self._drop(stream)
        if not stream.parent_open:
            self.network.streams.pop(stream, None)
        closed = stream.finishing >= 0
        self._submit(stream.pull, dl.StreamEnded(stream.number, "closed" if closed else reason))

    def arrived(self, stream: Stream, piece: int, length: int, good: bool) -> None:
        """A piece has come in whole. It is verified; a good one is stored and at once offered to this host's children."""
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
        self.checks.stored(pull, piece, good)
        now = self.world.now
        for send in self.uplink.handle(pull.blob.verified[piece], now=now):
            self._give(send)
        commands = download.handle(dl.PieceStored(stream.number, piece), now=now)
        if commands:
            self._obey(pull, commands)
        if stream.finishing == piece and stream.child_open:
            self._closed(stream)

    def _reject(self, stream: Stream, piece: int) -> None:
        stream.pull.rejected += 1
        self._drop(stream)
        self.network.close(stream)
        self._submit(stream.pull, dl.StreamEnded(stream.number, "corrupt", piece))

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
