"""The network: links with a rate, paths with a latency, streams that break, and cuts.

Model. A block occupies its sender's uplink first come, first served: it has been sent at max(now,
uplink free) + bytes / rate. It has arrived at max(sent + latency, downlink free + bytes / rate),
cut through: the receiver takes it in while it is being sent. What is on its way when a stream
closes is lost. Of one stream at most WINDOW_PIECES wait for the receiver's downlink: its window is
full then, and the sender's kernel takes no more until there is room. Opening a stream takes a round
trip.

Between the two, a block for another rack waits its turn on its own rack's uplink and then on the
other rack's downlink (rack.py), and one from the origin on the latter. Of such a stream at most
CROSSING_PIECES are on their way, whichever queue they stand in.

A process that dies breaks its streams at once. A host without power and a cut path are silent:
blocks into them are stuck until the path heals, and after GIVES_UP_S the kernel gives the stream up
on both sides. A stream whose other end is gone breaks when the path heals.

Racks: a shared uplink and a shared downlink each, through which everything passes that crosses
the rack's boundary.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from p2pdist.model.pieces import PieceSet
from p2pdist.simulate.clock import Call, World

if TYPE_CHECKING:
    from p2pdist.simulate.bittorrent_fetch import SwarmFeed
    from p2pdist.simulate.host import Host, Pull
    from p2pdist.simulate.origin import Origin
    from p2pdist.simulate.tracker import Session


class Rack:
    """One rack. `bytes_s` is the rate of each direction, 0 for no limit; `bytes_in` and `bytes_out`
    count what has crossed its boundary.

    Like a host's link each direction is first come, first served and cut through: a block passes
    while it comes in, when nothing else is in its way.
    """

    __slots__ = ("bytes_in", "bytes_out", "bytes_s", "down_free_at", "name", "up_free_at")

    def __init__(self, name: str, bytes_s: float) -> None:
        self.name, self.bytes_s = name, bytes_s
        self.up_free_at = self.down_free_at = 0.0
        self.bytes_in = self.bytes_out = 0

    def leave(self, now: float, length: int) -> float:
        """When a block that has just come from a host of the rack has passed the rack's uplink."""
        self.bytes_out += length
        if not self.bytes_s:
            return now
        self.up_free_at = max(now, self.up_free_at + length / self.bytes_s)
        return self.up_free_at

    def enter(self, now: float, length: int) -> float:
        """When a block that has just come from outside has passed the rack's downlink."""
        self.bytes_in += length
        if not self.bytes_s:
            return now
        self.down_free_at = max(now, self.down_free_at + length / self.bytes_s)
        return self.down_free_at


CONNECT_TIMEOUT_S = 2.0
GIVES_UP_S = 10.0
WINDOW_PIECES = 4
CROSSING_PIECES = 2

SLOW_BLOCK_S = 0.2
"""A block that takes longer than this keeps its sender's uplink core ticking: it may have to be
taken for stuck."""

ORIGIN_NAME = "@origin"
TRACKER_NAME = "@tracker"


class Link:
    """One host's link: rates in bytes/s, and when each direction will have done what it has been
    given."""

    __slots__ = ("_full", "down_bytes_s", "down_free_at", "up_bytes_s", "up_free_at")

    def __init__(self, up_bytes_s: float, down_bytes_s: float) -> None:
        self.up_bytes_s, self.down_bytes_s = up_bytes_s, down_bytes_s
        self.up_free_at = self.down_free_at = 0.0
        self._full = up_bytes_s, down_bytes_s

    def slow_to(self, share: float, both: bool) -> None:
        """Let the uplink, with `both` the downlink too, have this share of its rate."""
        self.up_bytes_s = self._full[0] * share
        if both:
            self.down_bytes_s = self._full[1] * share


class Stream:
    """One stripe on its way from `parent` (None: the origin) to `child`. `number` is its name in
    the child's download core, `serving` in the parent's uplink core. `finishing` is the piece after
    which the child closes it, or -1; `unread` are pieces that arrived and after which the child
    does not read on yet (transfer/stream/frames.py). `feed` is what reads the origin for a swarm, where that
    does."""

    __slots__ = (
        "began_at",
        "child",
        "child_open",
        "crosses",
        "cut_since",
        "ending",
        "feed",
        "finishing",
        "held_up",
        "last_arrival",
        "number",
        "parent",
        "parent_open",
        "pull",
        "sending",
        "serving",
        "stripe",
        "stuck",
        "transit",
        "unread",
        "window",
    )

    def __init__(
        self, child: Host, parent: Host | None, pull: Pull, number: int, stripe: int, feed: SwarmFeed | None = None
    ) -> None:
        self.child, self.parent, self.pull = child, parent, pull
        self.number, self.stripe, self.feed = number, stripe, feed
        self.serving = 0
        self.child_open, self.parent_open = True, False
        self.sending, self.began_at = -1, 0.0
        self.transit: list[int] = []
        self.last_arrival = 0.0
        self.finishing = -1
        self.held_up = self.unread = 0
        self.ending = False
        self.crosses = parent is not None and parent.rack is not child.rack
        limited = self.crosses and child.rack is not None and child.rack.bytes_s > 0
        self.window = CROSSING_PIECES if limited else WINDOW_PIECES
        self.cut_since: float | None = None
        self.stuck: list[tuple[int, int, bool]] = []

    def __str__(self) -> str:
        return f"stripe {self.stripe} from {self.parent.name if self.parent else 'the origin'} to {self.child.name}"


@dataclass(frozen=True, slots=True)
class Cut:
    """`group` cannot reach, nor be reached from, the hosts outside it, the tracker, the origin, as
    the flags say."""

    group: frozenset[str]
    peers: bool = True
    tracker: bool = False
    origin: bool = False

    def separates(self, one: str, other: str) -> bool:
        if (one in self.group) == (other in self.group):
            return False
        outside = other if one in self.group else one
        if outside == TRACKER_NAME:
            return self.tracker
        return self.origin if outside == ORIGIN_NAME else self.peers


class Network:
    """See the module's text. `latency_s` is one way."""

    def __init__(self, world: World, latency_s: float) -> None:
        self.world = world
        self.latency_s = latency_s
        self.streams: dict[Stream, None] = {}
        self.sessions: dict[Session, None] = {}
        self.unpowered: dict[str, None] = {}
        self.origin: Origin | None = None
        self._cuts: list[Cut] = []
        self._whole = True

    # -- cuts

    def reachable(self, one: str, other: str) -> bool:
        """Whether the path between two names (hosts, ORIGIN_NAME, TRACKER_NAME) is there."""
        if self._whole:
            return True
        if one in self.unpowered or other in self.unpowered:
            return False
        return not any(cut.separates(one, other) for cut in self._cuts)

    def cut(self, cut: Cut) -> None:
        """Begin a cut."""
        self._cuts.append(cut)
        self._reconsider()

    def heal(self, cut: Cut) -> None:
        """End a cut."""
        self._cuts.remove(cut)
        self._reconsider()

    def power(self, name: str, *, on: bool) -> None:
        """A host's link goes silent, or comes back."""
        if on:
            self.unpowered.pop(name, None)
        else:
            self.unpowered[name] = None
        self._reconsider()

    def _reconsider(self) -> None:
        """Note which streams and sessions are cut off now, and which are whole again."""
        self._whole = not self._cuts and not self.unpowered
        for stream in list(self.streams):
            whole = self.reachable(stream.child.name, stream.parent.name if stream.parent else ORIGIN_NAME)
            if not whole and stream.cut_since is None:
                stream.cut_since = self.world.now
                self.world.after(GIVES_UP_S, self._give_up, stream, stream.cut_since)
            elif whole and stream.cut_since is not None:
                stream.cut_since = None
                self._healed(stream)
        for session in list(self.sessions):
            session.path_changed(whole=self.reachable(session.host.name, TRACKER_NAME))

    def _healed(self, stream: Stream) -> None:
        if not stream.child_open or (stream.parent is not None and not stream.parent_open):
            self.world.after(self.latency_s, self._break, stream)
            return
        if stream.parent is None and self.origin is not None:
            self.origin.resume(stream)
        stuck, stream.stuck = stream.stuck, []
        for piece, length, last in stuck:
            self._transmit(stream, piece, length, last)

    def _give_up(self, stream: Stream, since: float) -> None:
        if stream.cut_since == since:
            self._break(stream)

    def _break(self, stream: Stream) -> None:
        """End a stream on the sides where it is still open."""
        if stream.child_open:
            stream.child.ended(stream, "reset" if stream.parent is not None else "unavailable")
        self.close_serving(stream)
        self.streams.pop(stream, None)

    # -- streams between hosts

    def open(self, stream: Stream, have: PieceSet) -> None:
        """The child asks the parent for a stripe; `have` is what it holds."""
        assert stream.parent is not None
        self.streams[stream] = None
        if self.reachable(stream.child.name, stream.parent.name):
            self.world.after(2 * self.latency_s, self._asked, stream, have)
        else:
            stream.cut_since = self.world.now
            self.world.after(CONNECT_TIMEOUT_S, stream.child.ended, stream, "refused")

    def _asked(self, stream: Stream, have: PieceSet) -> None:
        parent = stream.parent
        assert parent is not None
        if not stream.child_open:
            self.streams.pop(stream, None)
        elif stream.cut_since is not None:
            self.world.after(CONNECT_TIMEOUT_S, stream.child.ended, stream, "refused")
        elif not parent.running:
            stream.child.ended(stream, "refused")
        else:
            refusal = parent.serve(stream, have)
            if refusal:
                self.world.after(self.latency_s, stream.child.ended, stream, refusal)

    def send(self, stream: Stream, piece: int, length: int, last: bool) -> None:
        """The sender gives a block to its uplink; `last` says that it ends its piece."""
        parent = stream.parent
        assert parent is not None
        world, link = self.world, parent.link
        now, free = world.now, link.up_free_at
        begins = free if free > now else now
        link.up_free_at = done = begins + length / link.up_bytes_s
        stream.sending, stream.began_at = piece, begins
        world.at(done, self._sent, stream, piece, length, last)
        if done - now > SLOW_BLOCK_S:
            parent.watch_uplink()

    def _sent(self, stream: Stream, piece: int, length: int, last: bool) -> None:
        if not stream.parent_open:
            return
        if stream.cut_since is not None:
            stream.stuck.append((piece, length, last))
            assert stream.parent is not None
            stream.parent.watch_uplink()
            return
        self._transmit(stream, piece, length, last)

    def _transmit(self, stream: Stream, piece: int, length: int, last: bool) -> None:
        child, parent = stream.child, stream.parent
        assert parent is not None
        good = not parent.wrong_bytes or not parent.spoils(piece)
        if last:
            stream.transit.append(piece)
        if stream.crosses:
            self.cross(parent.rack, child, length, self._crossed, stream, piece, length, last, good)
        else:
            arrives = self.arrival(child.link, length)
            if last:
                stream.last_arrival = arrives
                self.world.at(arrives, child.arrived, stream, piece, length, good)
        if len(stream.transit) + stream.unread <= stream.window:
            stream.sending = -1
            parent.block_sent(stream, length)
        else:
            stream.held_up = length
            parent.watch_uplink()

    def cross(self, source: Rack | None, child: Host, length: int, call: Call, *arguments: object) -> None:
        """Carry a block that was just sent from a rack (None: the origin) to a host outside it;
        `call` happens when it arrives."""
        now = self.world.now
        passed = source.leave(now, length) if source is not None else now
        self._later(passed, self._enter, child, length, call, arguments)

    def _enter(self, child: Host, length: int, call: Call, arguments: tuple[object, ...]) -> None:
        now = self.world.now
        passed = child.rack.enter(now, length) if child.rack is not None else now
        self._later(passed, self._reach, child, length, call, arguments)

    def _reach(self, child: Host, length: int, call: Call, arguments: tuple[object, ...]) -> None:
        self.world.at(self.arrival(child.link, length), call, *arguments)

    def _later(self, time: float, call: Call, *arguments: object) -> None:
        if time > self.world.now:
            self.world.at(time, call, *arguments)
        else:
            call(*arguments)

    def _crossed(self, stream: Stream, piece: int, length: int, last: bool, good: bool) -> None:
        if last:
            stream.child.arrived(stream, piece, length, good)
            if stream.ending and not stream.transit:
                self._finished(stream)

    def room(self, stream: Stream) -> None:
        """A piece has arrived: a block that waited for room in the window goes."""
        length, stream.held_up = stream.held_up, 0
        if stream.parent_open and stream.parent is not None:
            stream.sending = -1
            stream.parent.block_sent(stream, length)

    def arrival(self, link: Link, length: int) -> float:
        """When a block that has just been sent will have arrived; occupies the downlink until
        then."""
        filled = link.down_free_at + length / link.down_bytes_s
        soonest = self.world.now + self.latency_s
        arrives = filled if filled > soonest else soonest
        link.down_free_at = arrives
        return arrives

    def finish(self, stream: Stream) -> None:
        """The sender has given everything: the child learns it after the last piece."""
        if stream.transit and stream.crosses:
            stream.ending = True  # nobody knows yet when the last piece gets through
        else:
            soonest = self.world.now + self.latency_s
            self.world.at(max(soonest, stream.last_arrival), self._finished, stream)
        self.close_serving(stream)

    def _finished(self, stream: Stream) -> None:
        if stream.child_open and stream.cut_since is None:
            stream.child.ended(stream, "done")
        if not stream.child_open:
            self.streams.pop(stream, None)

    def under_way(self, stream: Stream) -> int:
        """The piece whose bytes the child is receiving, or -1."""
        if stream.transit:
            return stream.transit[0]
        if stream.held_up:
            return -1  # what the sender's kernel took last has arrived, and the next has not begun
        if stream.sending >= 0 and stream.parent_open and stream.began_at + self.latency_s <= self.world.now:
            return stream.sending
        return -1

    def close(self, stream: Stream) -> None:
        """The child's side has closed: the parent learns it, if the path is there."""
        if stream.cut_since is None:
            self.world.after(self.latency_s, self._closed, stream)

    def _closed(self, stream: Stream) -> None:
        if stream.cut_since is None:
            self.close_serving(stream)
            self.streams.pop(stream, None)

    def close_serving(self, stream: Stream) -> None:
        """End a stream on its parent's side."""
        if stream.parent_open and stream.parent is not None:
            stream.parent_open = False
            stream.parent.stopped_serving(stream)

    def abandon(self, stream: Stream) -> None:
        """The parent's process is gone: the child's stream breaks, if the path is there."""
        stream.parent_open = False
        if stream.cut_since is None:
            self.world.after(self.latency_s, self._abandoned, stream)

    def _abandoned(self, stream: Stream) -> None:
        if stream.cut_since is None:
            self._break(stream)
