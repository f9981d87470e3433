"""The vouched list of one blob at one simulated host: what the agent's store and its reader of
upstream do around the real pull core.

Model. Bytes have a version: 0 are the blob's, any other number stands for other bytes, and the hash
of a piece follows from piece and version. A piece that comes before its hash is listed waits in its
stream, whose window fills, and with it all that comes after it in that stream. What the host reads
from upstream it lists itself, stores, and states to the tracker, together with all that it reads
within BATCH_S. Comparing the whole takes CHECK_S: agents hash while pieces come.

The list and the versions of stored pieces are on the disk, and survive a crash.
"""

from __future__ import annotations

from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

from p2pdist.core import uplink as ul
from p2pdist.core.download import events as dl
from p2pdist.core.download.download import Download
from p2pdist.core.pull import AskList
from p2pdist.core.vouched.read_ahead import ReadAhead
from p2pdist.core.vouched.whole import CheckWhole, Judge, ListChanged, VerifyPieces, WholeChecked
from p2pdist.model.messages import LISTED_MAX, Basis, Judged, Listed, Recall, Reread, Vouched
from p2pdist.model.pieces import HASH_SIZE
from p2pdist.model.vouched_list import VouchedList
from p2pdist.simulate.context import Context
from p2pdist.simulate.network import Stream
from p2pdist.simulate.origin import Blob

BATCH_S = 0.02
CHECK_S = 0.002
RETRY_S = 1.0
REQUESTS_MAX = 4
GARBAGE = -1
"""The version of bytes that match no hash that any host states."""

ARBITER = -2
"""The number of the stream by which an arbiter reads."""

Command = CheckWhole | Judge | VerifyPieces | AskList


@dataclass(frozen=True, slots=True)
class Lie:
    """What a lying host states of what it reads: other hashes, for this share of all pieces.
    `stores`: it passes on bytes that match them. `judges`: it says that the whole matches."""

    version: int
    share: float
    stores: bool = True
    judges: bool = False

    def about(self, piece: int) -> bool:
        """Whether it lies about a piece, always the same ones."""
        return (piece * 2654435761 % 1000) < self.share * 1000


def hash_of(blob: Blob, piece: int, version: int) -> bytes:
    """The hash of a version of a piece."""
    return blake2b(f"{blob.digest} {piece} {version}".encode(), digest_size=HASH_SIZE).digest()


class Listing:
    """The list, and what the host does about it, over all lives of its process."""

    __slots__ = (
        "_batch",
        "_context",
        "_ending",
        "_host",
        "_pull",
        "_reading",
        "_waiting",
        "ahead",
        "lie",
        "list",
        "matched",
        "own",
        "versions",
    )

    def __init__(self, host: Any, pull: Any, context: Context) -> None:
        self._host, self._pull, self._context = host, pull, context
        blob: Blob = pull.blob
        self.list = VouchedList(blob.layout)
        #: Versions of stored pieces that are not the blob's bytes.
        self.versions: dict[int, int] = {}
        #: By piece the hash that this host stated of what it read.
        self.own: dict[int, bytes] = {}
        #: Whether the whole was found to match.
        self.matched = False
        #: What the host lies about; None: nothing.
        self.lie: Lie | None = None
        self.ahead = [ReadAhead(len(range(stripe, blob.layout.count, blob.stripes))) for stripe in range(blob.stripes)]
        self._batch: list[int] = []
        #: By stream the pieces that wait for their hashes: piece, length, version.
        self._waiting: dict[Stream, list[tuple[int, int, int]]] = {}
        #: Those of the streams that end when these pieces are taken.
        self._ending: dict[Stream, None] = {}
        #: What an arbiter reads; None while the host is none.
        self._reading: Rereading | None = None

    # -- pieces

    def arrived(self, stream: Stream, piece: int, length: int, version: int) -> None:
        """A piece has come, by a stream that is open."""
        if stream.parent is None:
            self._read(stream, piece, length, version)
        elif stream in self._waiting:
            self._waiting[stream].append((piece, length, version))
        elif not self._take(stream, piece, length, version):
            self._waiting[stream] = [(piece, length, version)]
            self._host.submit(self._pull, dl.Awaiting(stream.number))

    def _take(self, stream: Stream, piece: int, length: int, version: int) -> bool:
        """Store a piece from a peer, or refuse it; returns False when it must wait."""
        match self.list.verdict(piece, self._hash(piece, version)):
            case "unlisted":
                return False
            case "good":
                if not self._pull.proof[piece]:
                    self.note(piece, version)
                self._host.client.take(stream, piece, length)
            case "stale":
                self._host.client.refuse(stream, "stale", piece)
            case "wrong":
                self._host.client.refuse(stream, "corrupt", piece)
        return True

    def _read(self, stream: Stream, piece: int, length: int, version: int) -> None:
        """The host has read a piece itself, from upstream: it states the hash in any case."""
        stated, version = self.vouch(piece, version)
        self.ahead[piece % self._pull.blob.stripes].read(piece)
        if not self.list.suggest(piece, stated):
            self._host.client.refuse(stream, "corrupt", piece)
            return
        if not self._pull.proof[piece]:
            self.note(piece, version)
        self._host.client.take(stream, piece, length)

    def vouch(self, piece: int, version: int) -> tuple[bytes, int]:
        """State the hash of a piece that was read; returns it, and the version to store."""
        stated = self._hash(piece, version)
        if self.lie is not None and self.lie.about(piece):
            stated = self._hash(piece, self.lie.version)
            version = self.lie.version if self.lie.stores else version
        self._context.checks.vouching(self._host, self._pull, piece, stated == self._hash(piece, 0))
        self.own[piece] = stated
        if not self._batch:
            self._context.world.after(BATCH_S, self._send_batch)
        self._batch.append(piece)
        return stated, version

    def _send_batch(self) -> None:
        batch, self._batch = self._batch, []
        if self._host.running:
            self._state(batch, self.own, "read")

    def _state(self, pieces: list[int], hashes: dict[int, bytes], basis: Basis) -> None:
        for start in range(0, len(pieces), LISTED_MAX):
            part = tuple(pieces[start : start + LISTED_MAX])
            stated = b"".join(hashes[piece] for piece in part)
            self._host.session.send(Vouched(self._pull.blob.digest, self.list.round, part, stated, basis))

    def _hash(self, piece: int, version: int) -> bytes:
        return hash_of(self._pull.blob, piece, version) if version else self._pull.blob.hashes[piece]

    def note(self, piece: int, version: int) -> None:
        """A piece is stored in this version."""
        if version:
            self.versions[piece] = version
        else:
            self.versions.pop(piece, None)

    def dropped(self, stream: Stream) -> int:
        """A stream is closed; returns the bytes that waited in it."""
        self._ending.pop(stream, None)
        return sum(length for _, length, _ in self._waiting.pop(stream, ()))

    def waits(self, stream: Stream) -> bool:
        """Whether a piece of a stream waits for its hash."""
        return stream in self._waiting

    def end_after(self, stream: Stream) -> None:
        """The sender of a stream has given everything; what waits in it comes first."""
        self._ending[stream] = None

    def lead_max(self, stripe: int) -> int:
        """How far the reader of a stripe may be ahead of its children."""
        return self.ahead[stripe].lead_max

    # -- the list

    def welcomed(self) -> None:
        """A tracker answers: it counts its own rounds."""
        self.list.begin(0)

    def held(self) -> None:
        """The tracker knows what the host holds: say what it read."""
        if not self.matched:
            self._state(sorted(self.own), self.own, "read")

    def heard(self, message: Listed | Reread | Recall) -> None:
        """The tracker speaks of the list."""
        match message:
            case Recall():
                known = {piece: self.list.hash_of(piece) or b"" for piece in self.list.listed}
                self._state(list(known), known, "whole" if self.matched else "told")
            case Listed():
                self._listed(message)
            case Reread(_, number):
                if self._pull.download is not None and not self._pull.ended:
                    self._begin(number)
                    self._reading = Rereading(self, self._host, self._pull, self._context, number)

    def _begin(self, number: int) -> None:
        if number > self.list.round:
            self.list.begin(number)

    def _listed(self, message: Listed) -> None:
        if message.round < self.list.round or self._pull.download is None or self._pull.ended:
            return
        self._begin(message.round)
        lost = []
        for index, piece in enumerate(message.pieces):
            if (
                self.list.put(piece, message.hashes[index * HASH_SIZE : (index + 1) * HASH_SIZE])
                and self._pull.proof[piece]
            ):
                lost.append(piece)
        for ahead in self.ahead:
            ahead.listed(message.pieces)
        self.changed(tuple(lost))
        self._host.server.children_advanced()

    def learned(self, other: Listing) -> None:
        """A peer has said what it knows of the list."""
        if self._pull.download is None or self._pull.ended:
            return
        for piece in other.list.listed:
            self.list.suggest(piece, other.list.hash_of(piece) or b"")
        self.changed(())

    def changed(self, lost: tuple[int, ...]) -> None:
        """The list has changed: drop what is lost, and take the pieces that waited for it."""
        for piece in lost:
            self._pull.proof[piece] = 0
            self.versions.pop(piece, None)
        if lost:
            self._host.server.handle(ul.Lost(self._pull.blob.digest, lost))
        self._host.submit(self._pull, ListChanged(self.list.complete, lost, self.list.round))
        for stream in list(self._waiting):
            waiting = self._waiting.get(stream, [])
            while waiting and stream in self._waiting and self._take(stream, *waiting[0]):
                waiting.pop(0)
            if not waiting and stream in self._waiting:
                del self._waiting[stream]
                if stream in self._ending:
                    del self._ending[stream]
                    self._host.client.ended(stream, "done")
            elif waiting and stream in self._waiting:
                self._host.submit(self._pull, dl.Awaiting(stream.number))

    # -- the core's commands

    def obey(self, command: Command) -> None:
        """Do what the core commands about the list."""
        world, pull = self._context.world, self._pull
        match command:
            case CheckWhole(check):
                world.after(CHECK_S, self._checked, pull.download, check)
            case Judge(matches, number):
                self.matched = matches
                self._host.session.send(Judged(pull.blob.digest, number, matches))
            case VerifyPieces():
                world.after(CHECK_S, self._verified, pull.download)
            case AskList(source):
                world.after(2 * self._context.network.latency_s, self._asked, pull.download, source.host)

    def _checked(self, download: Download, check: int) -> None:
        if self._pull.download is download:
            lies = self.lie is not None and self.lie.judges
            self._host.submit(self._pull, WholeChecked(not self.versions or lies, check))

    def _verified(self, download: Download) -> None:
        if self._pull.download is download and not download.finished:
            self.changed(())

    def _asked(self, download: Download, name: str) -> None:
        listing = self._context.listing_of(name, self._pull.blob.digest)
        reachable = self._context.network.paths.reachable(self._host.name, name)
        if self._pull.download is download and listing is not None and reachable:
            self.learned(listing)

    def stopped(self) -> None:
        """The host's process has died, or fetches nothing more."""
        self._waiting.clear()
        self._ending.clear()
        self._batch.clear()
        if self._reading is not None:
            self._reading.stop()
            self._reading = None


class Rereading:
    """An arbiter's reading of all pieces, in order, in the place of the child of a stream."""

    def __init__(self, listing: Listing, host: Any, pull: Any, context: Context, number: int) -> None:
        self._listing, self._host, self._pull, self._context = listing, host, pull, context
        self._download, self._number = pull.download, number
        self._left = list(range(pull.blob.layout.count - 1, -1, -1))
        self._under_way: dict[int, None] = {}
        self._stream: Stream | None = None
        self._read_on()

    def stop(self) -> None:
        """End; drop what is being read."""
        self._left.clear()
        self._under_way.clear()
        self._forget()

    def _over(self) -> bool:
        pull = self._pull
        return pull.ended or pull.download is not self._download or self._listing.list.round != self._number

    def _read_on(self) -> None:
        if self._over():
            self.stop()
            return
        if self._stream is None:
            self._stream = Stream(self._host.client, None, self._pull, ARBITER, 0, feed=self)
        while self._left and len(self._under_way) < REQUESTS_MAX:
            piece = self._left.pop()
            self._under_way[piece] = None
            self._context.origin.ask(self._stream, piece)

    def arrived(self, piece: int, length: int, good: bool) -> None:
        """Take in a piece that upstream has sent."""
        if piece not in self._under_way:
            return
        del self._under_way[piece]
        if self._over():
            self.stop()
            return
        listing, pull = self._listing, self._pull
        pull.bytes_origin += length
        stated, version = listing.vouch(piece, 0 if good else self._context.origin.wrong_version)
        differs = listing.list.put(piece, stated)
        listing.changed((piece,) if differs and pull.proof[piece] else ())
        if not pull.proof[piece] and pull.download is self._download and not pull.ended:
            listing.note(piece, version)
            self._host.keep(pull, ARBITER, piece)
        self._read_on()

    def ended(self) -> None:
        """Take in that upstream does not answer, or the path to it is cut."""
        self._left += reversed(self._under_way)
        self._under_way.clear()
        self._forget()
        self._context.world.after(RETRY_S, self._read_on)

    def _forget(self) -> None:
        if self._stream is not None:
            self._stream.child_open = False
            self._context.origin.closed(self._stream)
            self._context.network.forget(self._stream)
            self._stream = None
