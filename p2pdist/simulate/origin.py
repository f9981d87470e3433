"""Central storage in a simulation: the blobs that it holds, and one uplink that its readers share
first come, first served.

A lease holder keeps REQUESTS_MAX piece requests under way for its stripe, and waits when it would
be more than LEAD_MAX pieces ahead of the children that it feeds, pieces under way included, as
`Uplink.reading` in agent/uplink.py does. A host that reads for a swarm asks for each piece by
itself (bittorrent.py). The origin does not serve the requests of a reader that has gone.
While it is away it answers that it is unavailable.
"""

from __future__ import annotations

from collections import deque

from p2pdist.core.uplink import Verified
from p2pdist.model.digest import Digest
from p2pdist.model.messages import Priority
from p2pdist.model.pieces import PieceLayout
from p2pdist.simulate.clock import World
from p2pdist.simulate.network import GIVES_UP_S, Network, Stream
from tracker.core.events import LookAtOrigin, OriginSeen

REQUESTS_MAX = 4
LEAD_MAX = 4


class Blob:
    """One blob of a simulation: how it is cut, how urgent its pulls are, and what else is the same
    for it at every host."""

    __slots__ = ("digest", "hashes", "layout", "lengths", "priority", "stripes", "verified")

    def __init__(self, digest: Digest, layout: PieceLayout, priority: Priority) -> None:
        self.digest, self.layout, self.priority = digest, layout, priority
        #: By piece its hash, where hosts vouch for the list.
        self.hashes: list[bytes] = []
        self.stripes = layout.stripes
        #: By piece: its length in bytes, and the event that an uplink core gets of it.
        self.lengths = [layout.length(piece) for piece in range(layout.count)]
        self.verified = [Verified(digest, piece) for piece in range(layout.count)]


class Origin:
    """Central storage, with an uplink of `rate_bytes_s`."""

    def __init__(self, world: World, network: Network, rate_bytes_s: float) -> None:
        self.rate_bytes_s = rate_bytes_s
        #: Bytes of all pieces that were sent, and the same by the zone of the reader.
        self.bytes_sent = 0
        self.bytes_by_zone: dict[str, int] = {}
        #: Whether it answers; set_available() changes it.
        self.available = True
        #: Whether it gives parts of a blob; else a reader gets all of it, from the beginning.
        self.ranges = True
        #: The version of its wrong bytes (vouching/listing.py); change() makes others.
        self.wrong_version = 1
        self._stalled = False
        self._wrong: dict[Digest, frozenset[int]] = {}
        self._world, self._network = world, network
        #: Requests that have arrived, and whether the uplink is sending a piece.
        self._queue: deque[tuple[Stream, int]] = deque()
        self._serving = False
        #: By reader: pieces to ask for, how many requests are under way, and pieces that the
        #: origin could not send over a path that is cut.
        self._todo: dict[Stream, deque[int]] = {}
        self._outstanding: dict[Stream, int] = {}
        self._held_up: dict[Stream, list[int]] = {}

    def spoil(self, pieces: frozenset[int], blobs: list[Blob]) -> None:
        """Hold these pieces of these blobs with wrong bytes."""
        self._wrong = {blob.digest: pieces for blob in blobs}

    def change(self, pieces: frozenset[int], blobs: list[Blob]) -> None:
        """Hold other bytes from now on for these pieces, and the right ones for the others."""
        self.wrong_version += 1
        self.spoil(pieces, blobs)

    def seen(self, wanted: LookAtOrigin) -> OriginSeen:
        """What a tracker sees that looks for a blob here."""
        if not self.available:
            return OriginSeen(wanted.swarm, "unknown", "the origin is away")
        wrong = not self._wrong.get(wanted.blob, frozenset()).isdisjoint(wanted.pieces)
        return OriginSeen(wanted.swarm, "corrupt" if wrong else "right")

    def stall(self, stalled: bool) -> None:
        """Send nothing more, though requests are taken; or go on."""
        self._stalled = stalled
        if not stalled and not self._serving:
            self._serve()

    def break_off(self) -> None:
        """End every response in the middle of it."""
        for stream in list(self._todo):
            if stream.cut_since is None and stream.feed is None:
                self._world.after(stream.path_s, stream.child.ended, stream, "short")

    def open(self, stream: Stream) -> None:
        """A lease holder begins to read a stripe, after a round trip."""
        self._network.open_from_origin(stream, self._resume)
        self._world.after(2 * stream.path_s, self._opened, stream)

    def ask(self, stream: Stream, piece: int) -> None:
        """A host reads a piece for a swarm."""
        network = self._network
        if stream not in self._todo:
            network.open_from_origin(stream, self._resume)
            self._todo[stream], self._outstanding[stream] = deque(), 0
            if stream.cut_since is not None:
                self._world.after(GIVES_UP_S, stream.child.ended, stream, "unavailable")
        self._todo[stream].append(piece)
        if self.available:
            self._request(stream)
        else:
            self._world.after(2 * stream.path_s, stream.child.ended, stream, "unavailable")

    def _opened(self, stream: Stream) -> None:
        if not stream.child_open:
            return
        if stream.cut_since is not None:
            self._world.after(GIVES_UP_S, stream.child.ended, stream, "unavailable")
        elif not self.available:
            stream.child.ended(stream, "unavailable")
        else:
            missing = stream.pull.have.missing(stream.stripe, stream.pull.blob.stripes)
            self._todo[stream] = deque(missing if self.ranges else range(max(missing, default=-1) + 1))
            self._outstanding[stream] = 0
            for _ in range(REQUESTS_MAX):
                self._request(stream)

    def _request(self, stream: Stream) -> None:
        todo = self._todo.get(stream)
        blob: Blob = stream.pull.blob
        lead = stream.child.lead(blob.digest, todo[0] % blob.stripes) if todo else 0
        lead_max = LEAD_MAX if stream.pull.listing is None else stream.pull.listing.lead_max(stream.stripe)
        if lead and lead + self._outstanding[stream] > lead_max:
            stream.child.hold_back(stream)
        elif todo:
            self._outstanding[stream] += 1
            self._world.after(stream.path_s, self._requested, stream, todo.popleft())

    def _requested(self, stream: Stream, piece: int) -> None:
        self._queue.append((stream, piece))
        if not self._serving and not self._stalled:
            self._serve()

    def _serve(self) -> None:
        self._serving = False
        while self._queue and not self._stalled:
            stream, piece = self._queue.popleft()
            if not stream.child_open or not self.available:
                continue
            if stream.cut_since is not None:
                self._held_up.setdefault(stream, []).append(piece)
                continue
            length: int = stream.pull.blob.lengths[piece]
            self._serving = True
            self._world.after(length / self.rate_bytes_s, self._sent, stream, piece, length)
            return

    def _sent(self, stream: Stream, piece: int, length: int) -> None:
        self.bytes_sent += length
        zone = stream.child.zone
        self.bytes_by_zone[zone] = self.bytes_by_zone.get(zone, 0) + length
        if stream.cut_since is not None:
            self._held_up.setdefault(stream, []).append(piece)
        elif stream.child_open:
            blob: Blob = stream.pull.blob
            good = piece not in self._wrong.get(blob.digest, ())
            self._network.wires.cross(None, stream.child, length, self._arrived, stream, piece, length, good)
        self._serve()

    def _arrived(self, stream: Stream, piece: int, length: int, good: bool) -> None:
        if stream.child_open:
            self._outstanding[stream] -= 1
        stream.child.arrived(stream, piece, length, good)
        stream.child.processor.then(self._taken_in, stream)

    def _taken_in(self, stream: Stream) -> None:
        """The reader's process has handled a piece: it asks for another."""
        if stream not in self._todo:
            return
        if not stream.unread:
            self._request(stream)
        if stream.feed is not None:
            return
        if not self._outstanding[stream] and not self._todo[stream] and stream not in self._held_up:
            stream.child.ended(stream, "done")

    def read_on(self, streams: list[Stream]) -> None:
        """Ask for more where readers had been held back, if their children have caught up."""
        for stream in streams:
            self._request(stream)

    def _resume(self, stream: Stream) -> None:
        """The path to a reader has healed: it asks again for what was lost."""
        for piece in self._held_up.pop(stream, ()):
            self._world.after(stream.path_s, self._requested, stream, piece)

    def closed(self, stream: Stream) -> None:
        """Forget a reader, which is gone."""
        for table in (self._todo, self._outstanding, self._held_up):
            table.pop(stream, None)

    def set_available(self, available: bool) -> None:
        """Go away, which readers learn, or come back."""
        self.available = available
        if not available:
            for stream in list(self._todo):
                if stream.cut_since is None:
                    self._world.after(stream.path_s, stream.child.ended, stream, "unavailable")
