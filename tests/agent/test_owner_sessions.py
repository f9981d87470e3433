"""An agent's sessions with several trackers that share its blobs. The trackers are real; which of
them owns what is told to each by the test, as their database would."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import msgspec
import pytest
from aiohttp import web
from waits import until

from p2pdist.agent.tracker import trackers as module
from p2pdist.agent.tracker.connection import ToHost
from p2pdist.agent.tracker.session import TrackerSession
from p2pdist.agent.tracker.trackers import HostSide, Owned, Trackers
from p2pdist.model.digest import Digest, digest_of
from p2pdist.model.messages import (
    PROTOCOL_VERSION,
    Advance,
    Assign,
    Hello,
    Holding,
    Left,
    OriginShare,
    Reject,
    Report,
)
from p2pdist.model.ownership import Ownership, Tracker, owner
from p2pdist.model.pieces import PieceLayout
from p2pdist.model.plan import Plan
from tracker.content import Content
from tracker.core.events import Followed
from tracker.core.fleet import Fleet
from tracker.http.app import make_app
from tracker.service import Service

PIECE = 1 << 20
PIECES = 16
STRIPES = PieceLayout(PIECES * PIECE, PIECE).stripes
BLOBS = [digest_of(str(number).encode()) for number in range(40)]


class Site:
    """A tracker in this process."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.heard_epochs: list[int] = []

    async def start(self) -> None:
        self.service = Service(Fleet(started_at=asyncio.get_running_loop().time()), Content(None))
        self.service.heard_epoch = lambda epoch, by: self.heard_epochs.append(epoch)
        self.runner = web.AppRunner(make_app(self.service), shutdown_timeout=0.1, handler_cancellation=True)
        await self.runner.setup()
        await web.TCPSite(self.runner, "127.0.0.1", 0).start()
        self.url = f"http://127.0.0.1:{self.runner.addresses[0][1]}"
        self.clock = asyncio.create_task(self.service.run())

    async def stop(self) -> None:
        self.clock.cancel()
        await self.runner.cleanup()

    def follow(self, ownership: Ownership) -> None:
        self.service.submit(Followed(ownership, self.name))

    @property
    def listed(self) -> Tracker:
        return Tracker(self.name, (self.url,))

    @property
    def blobs(self) -> set[Digest]:
        """Of which it has a swarm."""
        return set(self.service.fleet.swarms)

    @property
    def sessions(self) -> int:
        return self.service.sessions


class Host:
    """What the sessions need of an agent: blobs that it holds whole or wants."""

    def __init__(self, trackers: Trackers, blobs: list[Digest]) -> None:
        self.trackers = trackers
        self.blobs = set(blobs)
        self.heard: list[ToHost] = []
        self.changes: list[tuple[bool, frozenset[Digest]]] = []
        self.homes: list[bool] = []
        self.drains = False
        self.advances: list[Advance] = []

    def holding(self, blob: Digest) -> Holding:
        return Holding(blob, PIECES * PIECE, PIECE, tuple([PIECES // STRIPES] * STRIPES))

    def report(self, reader: str, owned: Owned) -> Report | None:
        mine = tuple(advance for advance in self.advances if owned(advance.blob))
        self.advances = [advance for advance in self.advances if advance not in mine]
        return Report(mine) if mine else None

    @property
    def side(self) -> HostSide:
        return HostSide(
            lambda: self.blobs,
            lambda owned: [self.holding(blob) for blob in self.blobs if owned(blob)],
            self.report,
            self.heard.append,
            self.homes.append,
            lambda present, owned: self.changes.append((present, frozenset(filter(owned, self.blobs)))),
            lambda: self.drains,
        )


@asynccontextmanager
async def sites(*names: str) -> AsyncIterator[list[Site]]:
    made = [Site(name) for name in names]
    for site in made:
        await site.start()
    try:
        yield made
    finally:
        for site in made:
            await site.stop()


@asynccontextmanager
async def host_at(*urls: str, blobs: list[Digest] = BLOBS) -> AsyncIterator[Host]:
    hello = Hello(PROTOCOL_VERSION, "h1", "127.0.0.1:7071", instance="one")
    part = msgspec.structs.replace(hello, partial=True)
    made = Host(Trackers(TrackerSession(urls, hello), lambda theirs: TrackerSession(theirs, part)), blobs)
    task = asyncio.create_task(made.trackers.run(made.side))
    try:
        yield made
        assert not task.done()
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


def shared(epoch: int, *trackers: Tracker, pins: dict[Digest, str] | None = None) -> Ownership:
    return Ownership(epoch, trackers, pins or {})


def parts(ownership: Ownership) -> dict[str, set[Digest]]:
    """Which blobs each tracker owns."""
    owned: dict[str, set[Digest]] = {tracker.id: set() for tracker in ownership.trackers}
    for blob in BLOBS:
        owned[owner(ownership, blob).id].add(blob)
    return owned


async def test_one_tracker_alone_hears_of_everything() -> None:
    """A tracker that tells no ownership is the only one: one session, as ever."""
    async with sites("a") as (a,), host_at(a.url) as host:
        await until(lambda: a.blobs == set(BLOBS))
        assert a.sessions == host.trackers.sessions == 1
        assert host.changes == [(True, frozenset(BLOBS))] and host.homes == [True]
        assert host.trackers.answers(BLOBS[0])


async def test_each_owner_hears_of_its_blobs_and_of_no_others() -> None:
    """A host that holds many blobs tells each tracker its part, and has a session with each."""
    async with sites("a", "b", "c") as (a, b, c):
        ownership = shared(1, a.listed, b.listed, c.listed)
        for site in (a, b, c):
            site.follow(ownership)
        async with host_at(a.url) as host:
            await until(lambda: {site.name: site.blobs for site in (a, b, c)} == parts(ownership))
            assert (a.sessions, b.sessions, c.sessions) == (1, 1, 1)
            assert [site.service.fleet.hosts["h1"].partial for site in (a, b, c)] == [False, True, True]
            blob = min(parts(ownership)["b"])
            host.advances = [Advance(blob, tuple([1] * STRIPES))]
            host.trackers.send(Left(blob))
            await until(lambda: blob not in b.blobs)


async def test_a_host_that_wants_one_blob_has_no_session_it_needs_not() -> None:
    """Sessions are opened with owners of what the host has, and no others."""
    async with sites("a", "b", "c") as (a, b, c):
        ownership = shared(1, a.listed, b.listed, c.listed)
        for site in (a, b, c):
            site.follow(ownership)
        theirs = parts(ownership)
        async with host_at(a.url, blobs=[min(theirs["a"])]) as host:
            await until(lambda: a.blobs)
            assert (b.sessions, c.sessions) == (0, 0)
            new = min(theirs["c"])
            host.blobs.add(new)
            assert host.trackers.answers(new), "its owner is about to"
            host.trackers.send(host.holding(new))
            await until(lambda: c.blobs == {new})
            assert b.sessions == 0


async def test_a_session_that_is_needed_no_more_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Some time after the last blob of an owner has gone."""
    monkeypatch.setattr(module, "TIDY_S", 0.05)
    monkeypatch.setattr(module, "IDLE_S", 0.2)
    async with sites("a", "b") as (a, b):
        ownership = shared(1, a.listed, b.listed)
        for site in (a, b):
            site.follow(ownership)
        blob = min(parts(ownership)["b"])
        async with host_at(a.url, blobs=[blob]) as host:
            await until(lambda: b.blobs == {blob})
            host.blobs.clear()
            host.trackers.send(Left(blob))
            await until(lambda: b.sessions == 0)
            assert a.sessions == 1


async def test_a_new_epoch_moves_the_blobs_whose_owner_changed_and_no_others() -> None:
    """The new owner hears what the host holds; pulls of these blobs hear that a tracker answers."""
    async with sites("a", "b", "c") as (a, b, c):
        first, second = shared(1, a.listed, b.listed), shared(2, a.listed, b.listed, c.listed)
        for site in (a, b, c):
            site.follow(first)
        async with host_at(a.url) as host:
            await until(lambda: a.blobs | b.blobs == set(BLOBS))
            host.changes.clear()
            for site in (a, b, c):
                site.follow(second)
            await until(lambda: {site.name: site.blobs for site in (a, b, c)} == parts(second))
            moved = parts(second)["c"]
            told = [blobs for present, blobs in host.changes if present]
            assert frozenset().union(*told) == moved, "the others go on"
            assert not any(blobs for present, blobs in host.changes if not present)


async def test_a_tracker_that_lags_behind_hears_again_once_it_has_caught_up() -> None:
    """It refuses the blobs that it does not own yet; the agent says which epoch there is, and
    speaks of them again later."""
    async with sites("a", "b") as (a, b):
        first, second = shared(1, a.listed, b.listed), shared(2, b.listed)
        for site in (a, b):
            site.follow(first)
        async with host_at(a.url) as host:
            await until(lambda: a.blobs | b.blobs == set(BLOBS))
            a.follow(second)  # the news reaches the agent before it reaches the other tracker
            await until(lambda: host.trackers.ownership == second and b.sessions == 1)
            host.trackers.send(host.holding(min(parts(first)["a"])))
            await asyncio.sleep(0.2)
            assert b.blobs == parts(first)["b"]
            b.follow(second)
            await until(lambda: b.blobs == set(BLOBS))


async def test_an_owner_that_dies_is_missed_by_its_blobs_alone() -> None:
    """Pulls of other blobs hear nothing of it; those of its blobs hear that they are alone, and of
    the successor when there is one."""
    async with sites("a", "b") as (a, b):
        first, second = shared(1, a.listed, b.listed), shared(2, a.listed)
        for site in (a, b):
            site.follow(first)
        theirs = frozenset(parts(first)["b"])
        async with host_at(a.url) as host:
            await until(lambda: a.blobs | b.blobs == set(BLOBS))
            host.changes.clear()
            await b.stop()
            await until(lambda: (False, theirs) in host.changes)
            assert not host.trackers.answers(min(theirs)) and host.trackers.answers(min(parts(first)["a"]))
            host.changes.clear()
            a.follow(second)
            await until(lambda: a.blobs == set(BLOBS))
            assert host.changes == [(True, theirs)]
            assert host.homes == [True]


async def test_the_home_moves_when_its_tracker_gives_everything_away() -> None:
    """A tracker that drains is left, for any other of the ownership; nothing is lost by it."""
    async with sites("a", "b") as (a, b):
        first = shared(1, a.listed, b.listed)
        for site in (a, b):
            site.follow(first)
        async with host_at(a.url) as host:
            await until(lambda: a.blobs | b.blobs == set(BLOBS))
            second = shared(2, msgspec.structs.replace(a.listed, share=0.0), b.listed)
            for site in (a, b):
                site.follow(second)
            await until(lambda: host.trackers.home.tracker == "b" and b.blobs == set(BLOBS))
            await until(lambda: a.sessions == 0 and b.sessions == 1)
            assert not b.service.fleet.hosts["h1"].partial
            assert host.homes == [True, False, True]


async def test_an_agent_that_finds_its_tracker_dead_turns_to_another_of_the_fleet() -> None:
    """It was given one tracker, and has learnt of the others."""
    async with sites("a", "b") as (a, b):
        first = shared(1, a.listed, b.listed)
        for site in (a, b):
            site.follow(first)
        async with host_at(a.url) as host:
            await until(lambda: a.blobs | b.blobs == set(BLOBS))
            await a.stop()
            await until(lambda: host.trackers.home.tracker == "b")
            b.follow(shared(2, b.listed))
            await until(lambda: b.blobs == set(BLOBS))
            assert b.sessions == 1


async def test_what_another_tracker_says_of_a_blob_does_not_count() -> None:
    """Plans and rejections of a tracker that does not own the blob are dropped, and its words on
    the session are heard."""
    async with sites("a", "b") as (a, b):
        ownership = shared(1, a.listed, b.listed)
        for site in (a, b):
            site.follow(ownership)
        async with host_at(a.url) as host:
            await until(lambda: a.blobs | b.blobs == set(BLOBS))
            host.heard.clear()
            of_a, of_b = min(parts(ownership)["a"]), min(parts(ownership)["b"])
            b.service.send("h1", Assign(Plan(of_a, ())))
            b.service.send("h1", Reject({"type": "urn:p2pdist:problem:not-found"}, of_a))
            b.service.send("h1", Assign(Plan(of_b, ())))
            await until(lambda: host.heard)
            assert host.heard == [Assign(Plan(of_b, ()))]


async def test_shares_of_the_origin_add_up() -> None:
    """Each owner lets the host read at some rate."""
    async with sites("a", "b") as (a, b):
        ownership = shared(1, a.listed, b.listed)
        for site in (a, b):
            site.follow(ownership)
        async with host_at(a.url) as host:
            await until(lambda: a.blobs | b.blobs == set(BLOBS))
            a.service.send("h1", OriginShare(100.0))
            b.service.send("h1", OriginShare(50.0))
            await until(lambda: OriginShare(150.0) in host.heard)
            a.service.send("h1", OriginShare(10.0))
            await until(lambda: OriginShare(60.0) in host.heard)


async def test_a_share_that_has_ended_is_given_back() -> None:
    """The rate of the last one stays: nothing is read by it, until there is another one."""
    async with sites("a", "b") as (a, b):
        ownership = shared(1, a.listed, b.listed)
        for site in (a, b):
            site.follow(ownership)
        async with host_at(a.url) as host:
            await until(lambda: a.blobs | b.blobs == set(BLOBS))
            a.service.send("h1", OriginShare(100.0))
            b.service.send("h1", OriginShare(50.0))
            await until(lambda: OriginShare(150.0) in host.heard)
            host.heard.clear()
            a.service.send("h1", OriginShare(100.0, ended=True))
            await until(lambda: host.heard)
            assert host.heard == [OriginShare(50.0)]
            a.service.send("h1", OriginShare(100.0))
            await until(lambda: host.heard[-1] == OriginShare(150.0))
            b.service.close_session(b.service.fleet.hosts["h1"].session or 0)
            await until(lambda: host.heard[-1] == OriginShare(100.0), "a new session tells of its leases anew")
            a.service.send("h1", OriginShare(100.0, ended=True))
            a.service.send("h1", OriginShare(30.0))
            await until(lambda: host.heard[-1] == OriginShare(30.0))


async def test_the_share_of_a_tracker_that_is_left_is_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """It lets other hosts read at that rate."""
    monkeypatch.setattr(module, "TIDY_S", 0.05)
    monkeypatch.setattr(module, "IDLE_S", 0.2)
    async with sites("a", "b") as (a, b):
        ownership = shared(1, a.listed, b.listed)
        for site in (a, b):
            site.follow(ownership)
        async with host_at(a.url) as host:
            await until(lambda: a.blobs | b.blobs == set(BLOBS))
            a.service.send("h1", OriginShare(100.0))
            b.service.send("h1", OriginShare(50.0))
            await until(lambda: OriginShare(150.0) in host.heard)
            host.heard.clear()
            host.blobs -= parts(ownership)["b"]
            await until(lambda: host.heard, "the session with the other one ends")
            assert host.heard == [OriginShare(100.0)]


async def test_the_share_of_a_former_home_is_given_back() -> None:
    """As where it drains: its blobs, and what they may be read at, are others' then."""
    async with sites("a", "b") as (a, b):
        first, second = shared(1, a.listed, b.listed), shared(2, b.listed)
        for site in (a, b):
            site.follow(first)
        async with host_at(a.url) as host:
            await until(lambda: a.blobs | b.blobs == set(BLOBS))
            a.service.send("h1", OriginShare(100.0))
            b.service.send("h1", OriginShare(50.0))
            await until(lambda: OriginShare(150.0) in host.heard)
            host.heard.clear()
            for site in (a, b):
                site.follow(second)
            await until(lambda: host.trackers.home.tracker == "b")
            await until(lambda: OriginShare(50.0) in host.heard)


async def test_an_agent_tells_a_tracker_of_a_newer_epoch() -> None:
    """A tracker that has not heard of it grants no leases then."""
    async with sites("a", "b") as (a, b):
        a.follow(shared(5, a.listed, b.listed))
        b.follow(shared(4, a.listed, b.listed))
        async with host_at(a.url):
            await until(lambda: b.heard_epochs == [5])
            assert a.heard_epochs == []


@pytest.mark.parametrize("other", ["another of the fleet", "one that is alone"])
async def test_a_url_that_leads_to_another_tracker_is_no_session_with_the_owner(other: str) -> None:
    """What answers there does not own the blobs, and must not plan them: nothing is told to it."""
    async with sites("a", "c") as (a, c):
        ownership = shared(1, a.listed, Tracker("b", (c.url,)), c.listed)
        a.follow(ownership)
        if other == "another of the fleet":
            c.follow(ownership)
        of_b = min(parts(ownership)["b"])
        async with host_at(a.url, blobs=[of_b, *parts(ownership)["a"]]) as host:
            await until(lambda: a.blobs == parts(ownership)["a"])
            link = host.trackers._links["b"].session
            await until(lambda: "at the URL of b" in link.problem)
            assert not link.connected and not c.blobs
            assert (True, frozenset({of_b})) not in host.changes


async def test_a_url_that_none_can_turn_to_costs_no_other_session() -> None:
    """One tracker's row may name anything: the agent stays with the others."""
    async with sites("a") as (a,):
        ownership = shared(1, a.listed, Tracker("b", ("http://127.0.0.1:70707", "http://[::zz]:1", "http://:1")))
        a.follow(ownership)
        async with host_at(a.url) as host:
            await until(lambda: a.blobs == parts(ownership)["a"])
            assert host.homes == [True]
            assert not host.trackers.answers(min(parts(ownership)["b"]))
