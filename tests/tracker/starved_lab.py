"""A tracker, hosts that pull, and strangers, in virtual time: the cores of tracker and host
together. What the time goes into shows here, on a machine of any speed."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from p2pdist.agent.pull.blob import EARLY_LOOK_S, EARLY_S, TICK_S
from p2pdist.core.download.download import Download
from p2pdist.core.download.events import (
    CloseStream,
    Command,
    Complain,
    Event,
    OpenDemand,
    OpenStream,
    PieceStored,
    Planned,
    Quiet,
    Starved,
    StreamEnded,
    Tick,
)
from p2pdist.core.sources import ResponseTimes, Sources
from p2pdist.model.digest import digest_of
from p2pdist.model.messages import PROTOCOL_VERSION, Advance, Assign, Complaint, Hello, Holding, Left, Report
from p2pdist.model.pieces import PieceLayout, PieceSet
from p2pdist.model.plan import Source
from tracker.core import events
from tracker.core.fleet import Fleet

LAYOUT = PieceLayout(8 << 20, 65536)
STRIPES = LAYOUT.stripes
BLOB = digest_of(b"blob")
STEP_S, REPORT_S, FLEET_TICK_S = 0.01, 0.25, 0.05
WHOLE_S = 0.3
"""The origin sends the whole blob in so long; so does a host to another."""


@dataclass
class Host:
    """A host that wants the blob: its core, and the streams that are open."""

    name: str
    number: int
    core: Download
    joined_at: float
    streams: dict[int, tuple[Source, int, float]] = field(default_factory=dict)
    """By number the source, the stripe, and pieces that are due."""
    hedges: dict[int, tuple[int, ...]] = field(default_factory=dict)
    """The pieces of streams that bring no more."""
    tick_at: float = 0.0
    completed_at: float | None = None
    from_origin: int = 0
    starvers: set[str] = field(default_factory=set)
    """Hosts that gave it nothing while it had nothing."""


class Lab:
    """A tracker, hosts, and strangers. `how` strangers treat a child: "silent", "head" (they
    respond and send nothing), "waits" (they say that they have none), "drips" (a byte a second),
    "half" (they give the first half of a stripe), "wrong" (wrong bytes). The tracker started at
    `started_at`; `certified`: hosts have certificates."""

    def __init__(
        self, how: str = "silent", *, whole_s: float = WHOLE_S, started_at: float = -100.0, certified: bool = False
    ) -> None:
        self.fleet, self.now, self.how = Fleet(started_at), 0.0, how
        self.pieces_s, self.certified = LAYOUT.count / whole_s, certified
        self.hosts: dict[str, Host] = {}
        self.numbers: dict[str, int] = {}
        self.opened = 0
        """Sessions so far."""
        self.harm: Callable[[str, Planned], None] = lambda *_: None
        """What a stranger does with a plan."""
        self.gets_on = True
        """Whether strangers say that they get pieces."""
        self.habit: Callable[[], None] = lambda: None
        """What strangers do every STEP_S."""
        self.said: dict[str, list[int]] = {}
        """What strangers say that they have."""
        self.mail: list[tuple[str, Planned]] = []
        """Plans that are on their way."""
        self.still = False
        """Whether no host has time to give or read: all streams are silent."""

    # -- the tracker

    def tell(self, name: str, message: object) -> None:
        self._sent(self.fleet.handle(events.Received(self.numbers[name], message), now=self.now))  # type: ignore[arg-type]

    def open(self, name: str, source: str = "") -> None:
        self.opened += 1
        number = self.numbers[name] = self.opened
        hello = Hello(PROTOCOL_VERSION, name, f"{name}:1")
        self._sent(self.fleet.handle(events.SessionOpened(number, hello, source), now=self.now))

    def _sent(self, commands: Iterable[events.Command]) -> None:
        for command in commands:
            if isinstance(command, events.Send) and isinstance(command.message, Assign):
                names = (each for each, number in self.numbers.items() if number == command.session)
                self.mail += [(name, Planned(command.message.plan)) for name in names]

    # -- hosts

    def seed(self, name: str) -> Host:
        """A host that has pulled the blob, and serves it."""
        host = self.pull(name)
        self.until_complete(host)
        self.run(REPORT_S)
        return host

    def measure(self) -> None:
        """A host reads another blob: the tracker knows how long a first piece takes."""
        blob, name = digest_of(b"another"), "reader"
        self.open(name)
        self.tell(name, Holding(blob, LAYOUT.size, LAYOUT.piece_size, (0,) * STRIPES))
        self.run(REPORT_S)
        self.tell(name, Report((Advance(blob, (1,) * STRIPES),)))
        self.tell(name, Left(blob))

    def pull(self, name: str, source: str = "") -> Host:
        if name not in self.numbers:
            self.open(name, source)
        sources = Sources(ResponseTimes(certified=self.certified))
        core = Download(BLOB, LAYOUT, STRIPES, PieceSet(LAYOUT.count), sources, self.now, host=name, hedges=True)
        host = self.hosts[name] = Host(name, self.numbers[name], core, self.now)
        self.tell(name, Holding(BLOB, LAYOUT.size, LAYOUT.piece_size, (0,) * STRIPES))
        return host

    def submit(self, host: Host, event: Event) -> None:
        if host.completed_at is None:
            self._obey(host, host.core.handle(event, now=self.now))

    def _obey(self, host: Host, commands: list[Command]) -> None:
        for command in commands:
            match command:
                case OpenStream(stream, source, stripe):
                    host.streams[stream] = (source, stripe, 0.0)
                case OpenDemand(stream, source, stripe, pieces):
                    host.streams[stream], host.hedges[stream] = (source, stripe, 0.0), pieces
                case CloseStream(stream, _):
                    del host.streams[stream]
                    self.submit(host, StreamEnded(stream, "closed"))
                case Complain(stripe, source, reason):
                    self.tell(host.name, Complaint(BLOB, stripe, source.host, reason))
                case Starved(stripe, source, waits):
                    if not len(host.core.have):
                        host.starvers.add(source.host)
                    self.tell(host.name, Report((Advance(BLOB, tuple(host.core.counts)),)))
                    self.tell(host.name, Complaint(BLOB, stripe, source.host, "slow", starved=True, waits=waits))
        if host.core.finished and host.completed_at is None:
            host.completed_at = self.now

    def _receive(self, host: Host) -> None:
        for stream, (source, stripe, due) in list(() if self.still else host.streams.items()):
            sender = self.hosts.get(source.host)
            if source.host in self.said and self.how == "wrong":
                del host.streams[stream]
                self.submit(host, StreamEnded(stream, "corrupt", stripe))
                continue
            if not source.is_origin and sender is None and self.how != "half":
                continue
            due += self.pieces_s / STRIPES * STEP_S
            end = LAYOUT.count // 2 if source.host in self.said else LAYOUT.count
            for piece in host.hedges.get(stream, range(stripe, LAYOUT.count, STRIPES)):
                if piece >= end:
                    break
                if due < 1.0 or stream not in host.streams:
                    break
                if piece not in host.core.have and (sender is None or piece in sender.core.have):
                    due -= 1.0
                    host.from_origin += source.is_origin
                    self.submit(host, PieceStored(stream, piece))
            demanded = host.hedges.get(stream, ())
            if demanded and stream in host.streams and all(piece in host.core.have for piece in demanded):
                del host.streams[stream]
                self.submit(host, StreamEnded(stream, "done"))
            if stream in host.streams:
                host.streams[stream] = (source, stripe, min(due, 1.0))

    def _look(self, host: Host) -> None:
        for stream, (source, stripe, _) in list(host.streams.items()):
            gives = self.how == "half" and any(
                piece not in host.core.have for piece in range(stripe, LAYOUT.count // 2, STRIPES)
            )
            if source.host in self.said and stream in host.streams and not gives:
                responded, dripped = self.how != "silent", int(self.now) if self.how == "drips" else 0
                self.submit(host, Quiet(stream, responded, 200 * responded + dripped, self.how == "waits"))
            elif self.still and not source.is_origin and stream in host.streams:
                self.submit(host, Quiet(stream, False, 0))

    # -- strangers

    def strangers(self, count: int, *, seeds: bool) -> None:
        """Hosts that say they have everything (`seeds`), or how they get on; the others that they
        get on with these."""
        full = [len(range(stripe, LAYOUT.count, STRIPES)) for stripe in range(STRIPES)]
        for number in range(count):
            name = f"s{number}"
            self.open(name)
            counts = full if seeds and number % 2 else [0] * STRIPES
            self.said[name] = list(counts)
            self.tell(name, Holding(BLOB, LAYOUT.size, LAYOUT.piece_size, tuple(counts)))
        self.run(1.0)
        assert any(sum(counts) for counts in self.said.values())

    def _get_on(self) -> None:
        for name, counts in self.said.items():
            self.said[name] = (
                [min(count + 5, LAYOUT.count // STRIPES - 1) for count in counts] if 0 in counts else counts
            )
            self.tell(name, Report((Advance(BLOB, tuple(self.said[name])),)))

    # -- time

    def run(self, seconds: float) -> None:
        for _ in range(round(seconds / STEP_S)):
            self.step()

    def step(self) -> None:
        before, self.now = self.now, self.now + STEP_S

        def passed(every_s: float, since: float = 0.0) -> bool:
            return int((self.now - since + 1e-9) / every_s) > int((before - since + 1e-9) / every_s)

        mail, self.mail = self.mail, []
        for name, plan in mail:
            if name in self.hosts:
                self.submit(self.hosts[name], plan)
            else:
                self.harm(name, plan)
        self.habit()
        for host in self.hosts.values():
            self._receive(host)
            early = self.now - host.joined_at < EARLY_S and not all(host.core.counts)
            if passed(EARLY_LOOK_S if early else TICK_S, host.joined_at):
                self._look(host)
            if self.now >= host.tick_at:
                self.submit(host, Tick())
                host.tick_at = self.now + max(EARLY_LOOK_S, min(TICK_S, host.core.due_s(self.now)))
        if passed(REPORT_S):
            if self.gets_on:
                self._get_on()
            for host in self.hosts.values():
                self.tell(host.name, Report((Advance(BLOB, tuple(host.core.counts)),)))
        if passed(FLEET_TICK_S):
            self._sent(self.fleet.handle(events.Tick(), now=self.now))

    def stand_still(self, seconds: float) -> None:
        """The machine on which all hosts run has no time for them."""
        self.still = True
        self.run(seconds)
        self.still = False

    def until_complete(self, *hosts: Host) -> float:
        """How long the last of these pulls takes."""
        began = self.now
        while any(host.completed_at is None for host in hosts):
            self.step()
            assert self.now - began < 60.0
        return self.now - began


def usual_s(count: int = 1, *, whole_s: float = WHOLE_S) -> float:
    """How long pulls of so many hosts take without strangers."""
    lab = Lab(whole_s=whole_s)
    return lab.until_complete(*[lab.pull(f"h{number}") for number in range(count)])
