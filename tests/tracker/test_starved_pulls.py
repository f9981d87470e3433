"""Pulls beside hosts that claim pieces and give none, in virtual time: the cores of tracker and
host together. What the time goes into shows here, on a machine of any speed."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import pytest

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
from p2pdist.core.sources import Sources
from p2pdist.model.digest import digest_of
from p2pdist.model.messages import PROTOCOL_VERSION, Advance, Assign, Complaint, Hello, Holding, Report
from p2pdist.model.pieces import PieceLayout, PieceSet
from p2pdist.model.plan import Source
from tracker.core import events
from tracker.core.fleet import Fleet
from tracker.core.planning.rescue import RESCUES_MAX

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
    "half" (they give the first half of a stripe), "wrong" (wrong bytes)."""

    def __init__(self, how: str = "silent", *, whole_s: float = WHOLE_S) -> None:
        self.fleet, self.now, self.how = Fleet(-100.0), 0.0, how
        self.pieces_s = LAYOUT.count / whole_s
        self.hosts: dict[str, Host] = {}
        self.numbers: dict[str, int] = {}
        self.said: dict[str, list[int]] = {}
        """What strangers say that they have."""
        self.mail: list[tuple[str, Planned]] = []
        """Plans that are on their way."""

    # -- the tracker

    def tell(self, name: str, message: object) -> None:
        self._sent(self.fleet.handle(events.Received(self.numbers[name], message), now=self.now))  # type: ignore[arg-type]

    def open(self, name: str) -> None:
        number = self.numbers[name] = len(self.numbers)
        hello = Hello(PROTOCOL_VERSION, name, f"{name}:1")
        self._sent(self.fleet.handle(events.SessionOpened(number, hello), now=self.now))

    def _sent(self, commands: Iterable[events.Command]) -> None:
        for command in commands:
            if isinstance(command, events.Send) and isinstance(command.message, Assign):
                name = next(each for each, number in self.numbers.items() if number == command.session)
                self.mail.append((name, Planned(command.message.plan)))

    # -- hosts

    def pull(self, name: str) -> Host:
        self.open(name)
        core = Download(BLOB, LAYOUT, STRIPES, PieceSet(LAYOUT.count), Sources(), self.now, host=name, hedges=True)
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
        for stream, (source, stripe, due) in list(host.streams.items()):
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
            if all(piece in host.core.have for piece in host.hedges.get(stream, (-1,))) and stream in host.streams:
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
        for host in self.hosts.values():
            self._receive(host)
            early = self.now - host.joined_at < EARLY_S and not len(host.core.have)
            if passed(EARLY_LOOK_S if early else TICK_S, host.joined_at):
                self._look(host)
            if self.now >= host.tick_at:
                self.submit(host, Tick())
                host.tick_at = self.now + max(EARLY_LOOK_S, min(TICK_S, host.core.due_s(self.now)))
        if passed(REPORT_S):
            self._get_on()
            for host in self.hosts.values():
                self.tell(host.name, Report((Advance(BLOB, tuple(host.core.counts)),)))
        if passed(FLEET_TICK_S):
            self._sent(self.fleet.handle(events.Tick(), now=self.now))

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


@pytest.mark.parametrize("seeds", [True, False])
@pytest.mark.parametrize("how", ["silent", "head", "waits", "drips", "wrong"])
@pytest.mark.parametrize("count", [4, 20, 120])
def test_strangers_that_vouch_for_each_other_cost_a_pull_as_much_again_at_most(
    count: int, how: str, seeds: bool
) -> None:
    lab = Lab(how)
    lab.strangers(count, seeds=seeds)
    host = lab.pull("h1")
    assert lab.until_complete(host) <= 2 * usual_s()
    assert host.from_origin == LAYOUT.count and bool(host.starvers) == (how != "wrong")


@pytest.mark.parametrize("whole_s", [WHOLE_S, 8.0])
@pytest.mark.parametrize("claim", ["everything", "most", "little"])
def test_strangers_that_give_half_of_each_stripe_and_stop_are_left_for_the_origin(claim: str, whole_s: float) -> None:
    """Each proves itself by what it gives. Those that claim `everything` or `most` say that they
    have the rest; those that claim `little` hold the leases and read nothing more. Of those that
    got most while they were here, as honest parents do, a few are tried in turn."""
    lab = Lab("half", whole_s=whole_s)
    lab.strangers(20, seeds=claim == "everything")
    if claim == "most":
        lab.said = {name: [LAYOUT.count // STRIPES - 1] * STRIPES for name in lab.said}
    host = lab.pull("h1")
    assert lab.until_complete(host) <= (3 if claim == "most" else 2) * usual_s(whole_s=whole_s)
    assert host.from_origin == LAYOUT.count // 2


def test_hosts_that_strangers_stopped_giving_to_read_the_origin_few_times() -> None:
    """The first one that is rescued gives to the others."""
    lab = Lab("half")
    lab.strangers(20, seeds=True)
    hosts = [lab.pull(f"h{number}") for number in range(8)]
    lab.until_complete(*hosts)
    assert sum(host.from_origin for host in hosts) <= RESCUES_MAX * LAYOUT.count // 2


@pytest.mark.parametrize("seeds", [True, False])
def test_starved_hosts_receive_from_one_that_was_rescued(seeds: bool) -> None:
    """Eight hosts among twenty strangers: few read the origin, the others get it from these."""
    lab = Lab()
    lab.strangers(20, seeds=seeds)
    hosts = [lab.pull(f"h{number}") for number in range(8)]
    lab.until_complete(*hosts)
    lab.run(0.5)
    assert sum(host.from_origin for host in hosts) <= RESCUES_MAX * LAYOUT.count
    for stripe in range(STRIPES):
        assert not lab.fleet.swarms[BLOB].edges.roots[stripe].keys() & {host.name for host in hosts}
    assert not lab.fleet.swarms[BLOB].starved


def test_a_stranger_that_was_rescued_keeps_no_other_from_the_origin() -> None:
    """It says that it starves, as any process can, and starves those that receive from it."""
    lab = Lab()
    lab.strangers(20, seeds=False)
    swarm = lab.fleet.swarms[BLOB]
    lab.open("liar")
    lab.tell("liar", Holding(BLOB, LAYOUT.size, LAYOUT.piece_size, (0,) * STRIPES))
    lab.run(0.3)
    for stripe, parent in enumerate(swarm.members["liar"].parents):
        lab.tell("liar", Complaint(BLOB, stripe, parent or "", "slow", starved=True))
    assert swarm.members["liar"].parents == ["", ""]
    lab.said["liar"] = [5] * STRIPES
    lab.run(0.3)
    assert lab.until_complete(lab.pull("h1")) <= 3 * usual_s()


@pytest.mark.parametrize("count", [2, 5, 8])
def test_strangers_that_were_rescued_keep_no_stripe_from_a_host_that_has_another(count: int) -> None:
    """They hold the leases of starved hosts, and receive from each other; the host gets one stripe
    from the origin and has tried few of them for the other one."""
    lab = Lab()
    lab.strangers(20, seeds=False)
    swarm = lab.fleet.swarms[BLOB]
    liars = [f"liar{number}" for number in range(count)]
    for liar in liars:
        lab.open(liar)
        lab.tell(liar, Holding(BLOB, LAYOUT.size, LAYOUT.piece_size, (0,) * STRIPES))
    lab.run(0.3)
    for _ in range(4):
        for liar in liars:
            for stripe, parent in enumerate(swarm.members[liar].parents):
                if parent:
                    lab.tell(liar, Complaint(BLOB, stripe, parent, "slow", starved=True))
        lab.run(0.1)
    lab.said.update((liar, [5] * STRIPES) for liar in liars)
    lab.run(0.3)
    assert lab.until_complete(lab.pull("h1")) <= 15 * usual_s()


@pytest.mark.parametrize("before", [True, False])
def test_a_parent_that_waits_is_left_if_it_had_claimed_pieces(before: bool) -> None:
    """One that says so once it is the parent has its first piece since a moment ago, and gives it
    next."""
    lab, parent = Lab("waits"), "parent"
    for name in (parent, "child"):
        lab.open(name)
        counts = (5 if before and name == parent else 0,) * STRIPES
        lab.tell(name, Holding(BLOB, LAYOUT.size, LAYOUT.piece_size, counts))
        lab.run(0.3)
    member = lab.fleet.swarms[BLOB].members["child"]
    assert member.parents == [parent] * STRIPES
    lab.tell(parent, Report((Advance(BLOB, (6,) * STRIPES),)))
    for stripe in range(STRIPES):
        lab.tell("child", Complaint(BLOB, stripe, parent, "slow", starved=True, waits=True))
    assert (parent not in member.parents) == before


def test_hosts_that_get_on_read_the_origin_once() -> None:
    """A fleet of hosts that give is not disturbed by what starved hosts may do."""
    lab = Lab()
    hosts = [lab.pull(f"h{number}") for number in range(8)]
    lab.until_complete(*hosts)
    assert sum(host.from_origin for host in hosts) == LAYOUT.count
    assert not any(host.starvers for host in hosts)
