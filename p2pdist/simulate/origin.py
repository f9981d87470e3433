"""Central storage as the network model sees it: one uplink shared first come, first served by the
requests of lease holders.

A lease holder keeps REQUESTS_MAX piece requests under way for its stripe, and waits when it would
be more than LEAD_MAX pieces ahead of the children that it feeds, those under way included
(`Uplink.reading` in agent/uplink.py). Who reads for a swarm asks for each piece by itself
(swarm_feed.py). A request whose reader has gone is not served. While the origin is away it answers
that it is unavailable.
"""

from __future__ import annotations

from collections import deque

from p2pdist.model.digest import Digest
from p2pdist.simulate.clock import World
from p2pdist.simulate.network import GIVES_UP_S, ORIGIN_NAME, Network, Stream

REQUESTS_MAX = 4
LEAD_MAX = 4


class Origin:
    """See the module's text. `bytes_sent` counts every piece served, `bytes_by_zone` by the zone of
    the reader; `wrong` are the pieces that it holds with wrong bytes."""

    def __init__(self, world: World, network: Network, rate_bytes_s: float) -> None:
        self.rate_bytes_s = rate_bytes_s
        self.bytes_sent = 0
        self.bytes_by_zone: dict[str, int] = {}
        self.available = True
        self.wrong: dict[Digest, frozenset[int]] = {}
        self._world, self._network = world, network
        self._queue: deque[tuple[Stream, int]] = deque()
        self._serving = False
        self._todo: dict[Stream, deque[int]] = {}
        self._outstanding: dict[Stream, int] = {}
        self._held_up: dict[Stream, list[int]] = {}
        network.origin = self

    def open(self, stream: Stream) -> None:
        """A lease holder begins to read a stripe, after a round trip."""
        self._network.streams[stream] = None
        if not self._network.reachable(stream.child.name, ORIGIN_NAME):
            stream.cut_since = self._world.now
        self._world.after(2 * self._network.latency_s, self._opened, stream)

    def ask(self, stream: Stream, piece: int) -> None:
        """A host reads a piece for a swarm."""
        network = self._network
        if stream not in self._todo:
            network.streams[stream] = None
            self._todo[stream], self._outstanding[stream] = deque(), 0
            if not network.reachable(stream.child.name, ORIGIN_NAME):
                stream.cut_since = self._world.now
                self._world.after(GIVES_UP_S, stream.child.ended, stream, "unavailable")
        self._todo[stream].append(piece)
        if self.available:
            self._request(stream)
        else:
            self._world.after(2 * network.latency_s, stream.child.ended, stream, "unavailable")

    def _opened(self, stream: Stream) -> None:
        if not stream.child_open:
            return
        if stream.cut_since is not None:
            self._world.after(GIVES_UP_S, stream.child.ended, stream, "unavailable")
        elif not self.available:
            stream.child.ended(stream, "unavailable")
        else:
            self._todo[stream] = deque(stream.pull.have.missing(stream.stripe, stream.pull.blob.stripes))
            self._outstanding[stream] = 0
            for _ in range(REQUESTS_MAX):
                self._request(stream)

    def _request(self, stream: Stream) -> None:
        todo = self._todo.get(stream)
        blob = stream.pull.blob
        lead = stream.child.uplink.lead(blob.digest, todo[0] % blob.stripes) if todo else 0
        if lead and lead + self._outstanding[stream] > LEAD_MAX:
            stream.child.ahead.append(stream)
        elif todo:
            self._outstanding[stream] += 1
            self._world.after(self._network.latency_s, self._requested, stream, todo.popleft())

    def _requested(self, stream: Stream, piece: int) -> None:
        self._queue.append((stream, piece))
        if not self._serving:
            self._serve()

    def _serve(self) -> None:
        self._serving = False
        while self._queue:
            stream, piece = self._queue.popleft()
            if not stream.child_open or not self.available:
                continue
            if stream.cut_since is not None:
                self._held_up.setdefault(stream, []).append(piece)
                continue
            length = stream.pull.blob.lengths[piece]
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
            blob = stream.pull.blob
            good = piece not in self.wrong.get(blob.digest, ())
            self._network.cross(None, stream.child, length, self._arrived, stream, piece, length, good)
        self._serve()

    def _arrived(self, stream: Stream, piece: int, length: int, good: bool) -> None:
        if stream.child_open:
            self._outstanding[stream] -= 1
        stream.child.arrived(stream, piece, length, good)
        stream.child.processor.then(self._taken_in, stream)

    def _taken_in(self, stream: Stream) -> None:
        """The reader has got to a piece: it asks for another."""
        if stream not in self._todo:
            return
        if not stream.unread:
            self._request(stream)
        if stream.feed is not None:
            return
        if not self._outstanding[stream] and not self._todo[stream] and stream not in self._held_up:
            stream.child.ended(stream, "done")

    def go_on(self, streams: list[Stream]) -> None:
        """The children of readers that were ahead may have caught up."""
        for stream in streams:
            self._request(stream)

    def resume(self, stream: Stream) -> None:
        """The path to a reader has healed: what was lost on it is asked for again."""
        for piece in self._held_up.pop(stream, ()):
            self._world.after(self._network.latency_s, self._requested, stream, piece)

    def closed(self, stream: Stream) -> None:
        """A reader is gone."""
        for table in (self._todo, self._outstanding, self._held_up):
            table.pop(stream, None)

    def set_available(self, available: bool) -> None:
        """The origin goes away, and its readers are told; or it comes back."""
        self.available = available
        if not available:
            for stream in list(self._todo):
                if stream.cut_since is None:
                    self._world.after(self._network.latency_s, stream.child.ended, stream, "unavailable")
