"""The simulated network: links with a rate, paths with a latency, streams that break, and cuts.

Model. A block occupies its sender's uplink first come, first served: it has been sent at max(now,
uplink free) + bytes / rate. It has arrived at max(sent + latency, downlink free + bytes / rate),
cut through: the receiver takes it in while it is being sent. What is on its way when a stream
closes is lost. Of one stream at most WINDOW_PIECES wait for the receiver's downlink: then its
window is full, and the sender's kernel takes no more until there is room. Opening a stream takes a
round trip.

Racks share an uplink and a downlink each, through which everything passes that crosses the rack's
boundary. A block for another rack waits first for its own rack's uplink and then for the other
rack's downlink, and one from the origin for the latter. Of such a stream at most CROSSING_PIECES
are on their way.

Sites share a link to the WAN each, like racks, and paths between sites are longer. The origin and
what has no site are beyond the WAN for all. A stream over the WAN has WAN_WINDOW_BYTES on its way,
as its connection has buffers for that.

A process that dies breaks its streams at once. A host without power and a cut path are silent:
blocks into them are stuck until the path heals, and after GIVES_UP_S the kernel gives the stream up
on both sides. A stream that has lost its other end breaks when the path heals.

The network knows hosts as the ends of streams (Receiver, Sender), the tracker as sessions whose
path is cut and heals, and the origin as a name.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from p2pdist.model.digest import Digest
from p2pdist.model.pieces import PieceSet
from p2pdist.simulate.clock import Call, Processor, World

CONNECT_TIMEOUT_S = 2.0
GIVES_UP_S = 10.0
WINDOW_PIECES = 4
CROSSING_PIECES = 2
WAN_WINDOW_BYTES = 16 << 20

SLOW_BLOCK_S, SLOW_BLOCK_TIMES, STUCK_S = 0.2, 2.0, 1.0
"""A block that takes longer than this, and than twice as long as over a link with its full rate,
keeps its sender's uplink core ticking: it may have to be taken for stuck. So does one that takes as
long as no block may."""

ORIGIN_NAME = "@origin"
TRACKER_NAME = "@tracker"
"""One tracker of several has a number behind this."""

DATABASE_NAME = "@database"


class Rack:
    """One rack's link to the others, or a site's to the WAN. `bytes_s` is the rate of each
    direction, 0 for no limit; `site` is the link of a rack's site.

    Like a host's link each direction is first come, first served and cut through: a block passes
    while it comes in, when nothing else is in its way.
    """

    __slots__ = ("bytes_in", "bytes_out", "bytes_s", "down_free_at", "name", "site", "up_free_at")

    def __init__(self, name: str, bytes_s: float, site: Rack | None = None) -> None:
        self.name, self.bytes_s, self.site = name, bytes_s, site
        #: When each direction will have carried what it has been given, in seconds.
        self.up_free_at = self.down_free_at = 0.0
        #: What has crossed the boundary, in bytes.
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


class Link:
    """One host's link: rates in bytes/s, and when each direction will have carried what it has been
    given, in seconds."""

    __slots__ = ("_full", "down_bytes_s", "down_free_at", "up_bytes_s", "up_free_at")

    def __init__(self, up_bytes_s: float, down_bytes_s: float) -> None:
        self.up_bytes_s, self.down_bytes_s = up_bytes_s, down_bytes_s
        self.up_free_at = self.down_free_at = 0.0
        self._full = up_bytes_s, down_bytes_s

    def slow_to(self, share: float, up: bool, down: bool) -> None:
        """Let the uplink, or the downlink, or both, have this share of their rate."""
        if up:
            self.up_bytes_s = self._full[0] * share
        if down:
            self.down_bytes_s = self._full[1] * share

    def send(self, now: float, length: int) -> float:
        """When a block that is given to the uplink now will have been sent."""
        self.up_free_at = max(now, self.up_free_at) + length / self.up_bytes_s
        return self.up_free_at

    def stuck(self, length: int, takes_s: float) -> bool:
        """Whether a block that takes so long to send may have to be taken for stuck."""
        usual_s = length / self._full[0]
        return takes_s > SLOW_BLOCK_S and (takes_s > SLOW_BLOCK_TIMES * usual_s or takes_s > STUCK_S)


class Wires:
    """Carries blocks that were sent to the hosts that receive them: over the links of racks and
    sites and the downlink, with `latency_s` on each path, one way, and `wan_s` between sites."""

    __slots__ = ("_latency_s", "_wan_s", "_world")

    def __init__(self, world: World, latency_s: float, wan_s: float = 0.0) -> None:
        self._world, self._latency_s, self._wan_s = world, latency_s, wan_s

    def arrival(self, link: Link, length: int) -> float:
        """When a block that has just been sent will have arrived; occupies the downlink until
        then."""
        filled = link.down_free_at + length / link.down_bytes_s
        soonest = self._world.now + self._latency_s
        arrives = filled if filled > soonest else soonest
        link.down_free_at = arrives
        return arrives

    def cross(self, source: Rack | None, child: Endpoint, length: int, call: Call, *arguments: object) -> None:
        """Carry a block that was just sent from a rack (None: the origin) to a host outside it, and
        make the call when it arrives."""
        now = self._world.now
        passed = source.leave(now, length) if source is not None else now
        site = child.rack.site if child.rack is not None else None
        if site is None or (source is not None and source.site is site):
            self._at(passed, self._enter, child, length, call, arguments)
        else:
            self._at(passed, self._leave_site, source, child, length, call, arguments)

    def _leave_site(
        self, source: Rack | None, child: Endpoint, length: int, call: Call, arguments: tuple[object, ...]
    ) -> None:
        now = self._world.now
        passed = source.site.leave(now, length) if source is not None and source.site is not None else now
        self._world.at(passed + self._wan_s, self._enter_site, child, length, call, arguments)

    def _enter_site(self, child: Endpoint, length: int, call: Call, arguments: tuple[object, ...]) -> None:
        now = self._world.now
        site = child.rack.site if child.rack is not None else None
        self._at(site.enter(now, length) if site is not None else now, self._enter, child, length, call, arguments)

    def _enter(self, child: Endpoint, length: int, call: Call, arguments: tuple[object, ...]) -> None:
        now = self._world.now
        passed = child.rack.enter(now, length) if child.rack is not None else now
        self._at(passed, self._reach, child, length, call, arguments)

    def _reach(self, child: Endpoint, length: int, call: Call, arguments: tuple[object, ...]) -> None:
        self._world.at(self.arrival(child.link, length), call, *arguments)

    def _at(self, time: float, call: Call, *arguments: object) -> None:
        if time > self._world.now:
            self._world.at(time, call, *arguments)
        else:
            call(*arguments)


class Endpoint(Protocol):
    """A host as an end of a stream, or of a connection between peers."""

    name: str
    link: Link
    rack: Rack | None


class Receiver(Endpoint, Protocol):
    """The end of a stream that receives: the child."""

    zone: str
    processor: Processor

    def arrived(self, stream: Stream, piece: int, length: int, good: bool) -> None:
        """A piece has come in whole; `good` says whether its bytes are right."""

    def ended(self, stream: Stream, reason: str) -> None:
        """The stream has ended from the other side, or could not be opened."""

    def lead(self, blob: Digest, stripe: int) -> int:
        """By how many pieces of a stripe the host is ahead of its own children."""

    def hold_back(self, stream: Stream) -> None:
        """The origin sends no more until the host's children have caught up (Origin.read_on)."""


class Sender(Endpoint, Protocol):
    """The end of a stream that sends: the parent."""

    running: bool

    def serve(self, stream: Stream, have: PieceSet) -> str:
        """A child that holds `have` asks for a stripe; returns the reason of a refusal, or ""."""

    def block_sent(self, stream: Stream, length: int) -> None:
        """The uplink has sent the stream's block."""

    def stopped_serving(self, stream: Stream) -> None:
        """The stream is closed on this side."""

    def watch_uplink(self) -> None:
        """A block takes long: the uplink core must look at the time."""

    def spoils(self, piece: int) -> bool:
        """Whether the host sends wrong bytes for this piece."""


class Feed(Protocol):
    """What reads the origin for a swarm, in the place of the child of a stream."""

    def arrived(self, piece: int, length: int, good: bool) -> None:
        """A piece has come in whole."""

    def ended(self) -> None:
        """The origin does not answer, or the path to it is cut."""


class Stream:
    """One stripe on its way from `parent` (None: the origin) to `child`.

    `number` names it in the child's download core. `pull` is the child's record of the blob, which
    the network passes on unread. `feed`, if any, takes what arrives.
    """

    __slots__ = (
        "began_at",
        "bytes_s",
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
        "path_s",
        "pull",
        "sending",
        "serving",
        "stripe",
        "stuck",
        "transit",
        "unread",
        "versions",
        "window",
    )

    def __init__(
        self, child: Receiver, parent: Sender | None, pull: Any, number: int, stripe: int, feed: Feed | None = None
    ) -> None:
        self.child, self.parent, self.pull = child, parent, pull
        self.number, self.stripe, self.feed = number, stripe, feed
        #: The latency of its path, one way, in seconds; Network sets it.
        self.path_s = 0.0
        #: What the child asks for at most, in bytes/s; 0 for no limit. The child sets it.
        self.bytes_s = 0.0
        #: Its name in the parent's uplink core; the parent sets it.
        self.serving = 0
        #: Whether each side is open; the child, the parent and the network close them.
        self.child_open, self.parent_open = True, False
        #: The piece of the block in flight, or -1, and when the uplink began with it, in seconds.
        self.sending, self.began_at = -1, 0.0
        #: Pieces that were sent and have not arrived.
        self.transit: list[int] = []
        #: When the last of them arrives within the rack, in seconds.
        self.last_arrival = 0.0
        #: The piece after which the child closes the stream, or -1; the child sets it.
        self.finishing = -1
        #: Length of a block that was sent and waits for room in the window, or 0.
        self.held_up = 0
        #: Pieces that arrived and after which the child does not read on yet.
        self.unread = 0
        #: Whether the sender has given everything, and pieces are still crossing between racks.
        self.ending = False
        self.crosses = parent is not None and parent.rack is not child.rack
        limited = self.crosses and child.rack is not None and child.rack.bytes_s > 0
        #: How many pieces may wait for the receiver before the sender waits.
        self.window = CROSSING_PIECES if limited else WINDOW_PIECES
        #: Since when the path is cut, in seconds.
        self.cut_since: float | None = None
        #: Blocks that were sent since then: piece, length, whether it ends the piece.
        self.stuck: list[tuple[int, int, bool]] = []
        #: Versions of pieces on their way that are not the blob's bytes (vouching/listing.py).
        self.versions: dict[int, int] = {}

    def __str__(self) -> str:
        return f"stripe {self.stripe} from {self.parent.name if self.parent else 'the origin'} to {self.child.name}"


class TrackerPath(Protocol):
    """A host's session with a tracker, as far as cuts concern it: the names of both."""

    host: str
    peer: str

    def path_changed(self, *, whole: bool) -> None:
        """The path was cut, or is whole again."""


@dataclass(frozen=True, slots=True)
class Cut:
    """A group of hosts that cannot reach, nor be reached from, the hosts outside it (`peers`), the
    trackers, the origin, as the flags say. `others` are the only names that the cut is from; none:
    all outside the group, as the flags say."""

    group: frozenset[str]
    peers: bool = True
    tracker: bool = False
    origin: bool = False
    others: frozenset[str] = frozenset()

    def separates(self, one: str, other: str) -> bool:
        """Whether the path between two names is cut."""
        if (one in self.group) == (other in self.group):
            return False
        outside = other if one in self.group else one
        if self.others:
            return outside in self.others
        if outside.startswith(TRACKER_NAME):
            return self.tracker
        return self.origin if outside == ORIGIN_NAME else self.peers


class Paths:
    """The paths between hosts, tracker (TRACKER_NAME) and origin (ORIGIN_NAME): which are cut, or
    lead to a host without power. `on_change` is called after each change, before the sessions, with
    the name of the only host whose paths may have changed, or None."""

    __slots__ = ("_cuts", "_on_change", "_sessions", "_sessions_of", "_unpowered", "_whole")

    def __init__(self, on_change: Callable[[str | None], None]) -> None:
        self._on_change = on_change
        self._cuts: list[Cut] = []
        self._unpowered: dict[str, None] = {}
        self._sessions: dict[TrackerPath, None] = {}
        #: The same by host.
        self._sessions_of: dict[str, dict[TrackerPath, None]] = {}
        #: Whether there is neither a cut nor a host without power.
        self._whole = True

    def reachable(self, one: str, other: str) -> bool:
        """Whether the path between two names (hosts, trackers, ORIGIN_NAME) is there."""
        if self._whole:
            return True
        if one in self._unpowered or other in self._unpowered:
            return False
        return not any(cut.separates(one, other) for cut in self._cuts)

    def cut(self, cut: Cut) -> None:
        """Begin a cut."""
        self._cuts.append(cut)
        self._changed(None)

    def heal(self, cut: Cut) -> None:
        """End a cut."""
        self._cuts.remove(cut)
        self._changed(None)

    def power(self, name: str, *, on: bool) -> None:
        """Let a host's link go silent, or come back."""
        if on:
            self._unpowered.pop(name, None)
        else:
            self._unpowered[name] = None
        self._changed(name)

    def watch(self, session: TrackerPath) -> None:
        """Tell a session from now on when its path is cut or heals."""
        self._sessions[session] = None
        self._sessions_of.setdefault(session.host, {})[session] = None

    def unwatch(self, session: TrackerPath) -> None:
        """Tell a session of no more cuts."""
        self._sessions.pop(session, None)
        sessions = self._sessions_of.get(session.host, {})
        sessions.pop(session, None)
        if not sessions:
            self._sessions_of.pop(session.host, None)

    def _changed(self, name: str | None) -> None:
        self._whole = not self._cuts and not self._unpowered
        self._on_change(name)
        for session in list(self._sessions if name is None else self._sessions_of.get(name, ())):
            session.path_changed(whole=self.reachable(session.host, session.peer))


def _ends(stream: Stream) -> tuple[str, ...]:
    """The names of the hosts at both ends of a stream."""
    return (stream.child.name, stream.parent.name) if stream.parent is not None else (stream.child.name,)


class Network:
    """Streams, and what is on its way on them. `latency_s` is that of each path, one way, to which
    `wan_s` comes between sites."""

    def __init__(self, world: World, latency_s: float, wan_s: float = 0.0) -> None:
        self.world = world
        self.latency_s, self._wan_s = latency_s, wan_s
        #: The site of each host and tracker, where there are sites.
        self.sites: dict[str, Rack] = {}
        #: Streams of which at least one side is open, with what to call when their path heals.
        self.streams: dict[Stream, Callable[[Stream], None] | None] = {}
        #: The same by the names of their ends: when one of a hundred thousand hosts loses its power
        #: the streams of the others are as they were.
        self._streams_of: dict[str, dict[Stream, None]] = {}
        self.paths = Paths(self._paths_changed)
        self.wires = Wires(world, latency_s, wan_s)

    def path_s(self, one: str, other: str) -> float:
        """The latency between two names (hosts, trackers, ORIGIN_NAME), one way."""
        if not self.sites or self.sites.get(one) is self.sites.get(other):
            return self.latency_s
        return self.latency_s + self._wan_s

    # -- cuts

    def _paths_changed(self, name: str | None) -> None:
        """Note which streams (None: of all hosts) are cut now, and which are whole again."""
        for stream in list(self.streams if name is None else self._streams_of.get(name, ())):
            whole = self.paths.reachable(stream.child.name, stream.parent.name if stream.parent else ORIGIN_NAME)
            if not whole and stream.cut_since is None:
                stream.cut_since = self.world.now
                self.world.after(GIVES_UP_S, self._give_up, stream, stream.cut_since)
            elif whole and stream.cut_since is not None:
                stream.cut_since = None
                self._healed(stream)

    def _healed(self, stream: Stream) -> None:
        if not stream.child_open or (stream.parent is not None and not stream.parent_open):
            self.world.after(stream.path_s, self._break, stream)
            return
        on_heal = self.streams.get(stream)
        if on_heal is not None:
            on_heal(stream)
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
        self.forget(stream)

    # -- streams

    def open_from_origin(self, stream: Stream, on_heal: Callable[[Stream], None]) -> None:
        """A host asks the origin for pieces; the network calls `on_heal` when the path, after a
        cut, is whole again."""
        self._note(stream, on_heal)
        stream.path_s = self.path_s(stream.child.name, ORIGIN_NAME)
        if not self.paths.reachable(stream.child.name, ORIGIN_NAME):
            stream.cut_since = self.world.now

    def forget(self, stream: Stream) -> None:
        """Both sides of a stream are closed."""
        self.streams.pop(stream, None)
        for name in _ends(stream):
            streams = self._streams_of.get(name, {})
            streams.pop(stream, None)
            if not streams:
                self._streams_of.pop(name, None)

    def _note(self, stream: Stream, on_heal: Callable[[Stream], None] | None) -> None:
        self.streams[stream] = on_heal
        for name in _ends(stream):
            self._streams_of.setdefault(name, {})[stream] = None

    def open(self, stream: Stream, have: PieceSet) -> None:
        """The child, which holds `have`, asks the parent for a stripe."""
        assert stream.parent is not None
        self._note(stream, None)
        stream.path_s = self.path_s(stream.child.name, stream.parent.name)
        if stream.path_s > self.latency_s:
            stream.window = max(WINDOW_PIECES, WAN_WINDOW_BYTES // stream.pull.blob.layout.piece_size)
        if self.paths.reachable(stream.child.name, stream.parent.name):
            self.world.after(2 * stream.path_s, self._asked, stream, have)
        else:
            stream.cut_since = self.world.now
            self.world.after(CONNECT_TIMEOUT_S, stream.child.ended, stream, "refused")

    def _asked(self, stream: Stream, have: PieceSet) -> None:
        parent = stream.parent
        assert parent is not None
        if not stream.child_open:
            self.forget(stream)
        elif stream.cut_since is not None:
            self.world.after(CONNECT_TIMEOUT_S, stream.child.ended, stream, "refused")
        elif not parent.running:
            stream.child.ended(stream, "refused")
        else:
            refusal = parent.serve(stream, have)
            if refusal:
                self.world.after(stream.path_s, stream.child.ended, stream, refusal)

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
        if done - now > SLOW_BLOCK_S and link.stuck(length, done - now):
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
        good = not parent.spoils(piece)
        if last:
            stream.transit.append(piece)
        if stream.crosses:
            self.wires.cross(parent.rack, child, length, self._crossed, stream, piece, length, last, good)
        else:
            arrives = self.wires.arrival(child.link, length)
            if last:
                stream.last_arrival = arrives
                self.world.at(arrives, child.arrived, stream, piece, length, good)
        if len(stream.transit) + stream.unread <= stream.window:
            stream.sending = -1
            parent.block_sent(stream, length)
        else:
            stream.held_up = length
            parent.watch_uplink()

    def _crossed(self, stream: Stream, piece: int, length: int, last: bool, good: bool) -> None:
        if last:
            stream.child.arrived(stream, piece, length, good)
            if stream.ending and not stream.transit:
                self._finished(stream)

    def room(self, stream: Stream) -> None:
        """Let a block that waited for room in the window go: a piece has arrived."""
        length, stream.held_up = stream.held_up, 0
        if stream.parent_open and stream.parent is not None:
            stream.sending = -1
            stream.parent.block_sent(stream, length)

    def finish(self, stream: Stream) -> None:
        """The sender has given everything: the child learns it after the last piece."""
        if stream.transit and stream.crosses:
            stream.ending = True  # when the last piece gets through is not known yet
        else:
            soonest = self.world.now + stream.path_s
            self.world.at(max(soonest, stream.last_arrival), self._finished, stream)
        self.close_serving(stream)

    def _finished(self, stream: Stream) -> None:
        if stream.child_open and stream.cut_since is None:
            stream.child.ended(stream, "done")
        if not stream.child_open:
            self.forget(stream)

    def in_flight(self, stream: Stream) -> int:
        """The piece whose bytes the child is receiving, or -1."""
        if stream.transit:
            return stream.transit[0]
        if stream.held_up:
            return -1  # what the sender's kernel took last has arrived, and the next has not begun
        if stream.sending >= 0 and stream.parent_open and stream.began_at + stream.path_s <= self.world.now:
            return stream.sending
        return -1

    def close(self, stream: Stream) -> None:
        """The child's side has closed: the parent learns it, if the path is there."""
        if stream.cut_since is None:
            self.world.after(stream.path_s, self._closed, stream)

    def _closed(self, stream: Stream) -> None:
        if stream.cut_since is None:
            self.close_serving(stream)
            self.forget(stream)

    def close_serving(self, stream: Stream) -> None:
        """End a stream on its parent's side."""
        if stream.parent_open and stream.parent is not None:
            stream.parent_open = False
            stream.parent.stopped_serving(stream)

    def abandon(self, stream: Stream) -> None:
        """The parent's process is gone: the child's stream breaks, if the path is there."""
        stream.parent_open = False
        if stream.cut_since is None:
            self.world.after(stream.path_s, self._abandoned, stream)

    def _abandoned(self, stream: Stream) -> None:
        if stream.cut_since is None:
            self._break(stream)
