"""The fleet as any of several trackers shows it: the hosts and swarms of all, each once, what
changes, and which tracker says nothing."""

from __future__ import annotations

from typing import Any

import aiohttp
import msgspec
import pytest
from fleet_rig import BLOB, PIECE, PIECES, Hosts, fleet_of
from test_siblings import Site, sites
from waits import until

from p2pdist.cli.fleet_watch import FleetState, follow
from p2pdist.model.digest import digest_of
from p2pdist.model.messages import PROTOCOL_VERSION, Advance, Hello, Holding, Report
from p2pdist.model.ownership import owner
from p2pdist.model.pieces import PieceLayout
from tracker.core.events import Received, SessionOpened, Tick
from tracker.core.fleet import Fleet
from tracker.core.views import joined_view
from tracker.core.views.fleet_view import AWAY, RECEIVING, Change, View
from tracker.core.views.joined_view import JoinedView, RelayedTree
from tracker.core.views.tree_view import ORIGIN
from tracker.http import pages

STRIPES = PieceLayout(PIECES * PIECE, PIECE).stripes
NOTHING, HALF = (0,) * STRIPES, (PIECES // STRIPES // 2,) * STRIPES


class Told:
    """Another tracker, whose changes cross the wire as documents."""

    def __init__(self, name: str, hosts: Hosts) -> None:
        self.name, self.hosts = name, hosts
        self.view, self.version = View(hosts.fleet), 0
        self.tree = self.view.tree(0)

    def guest(self, name: str) -> None:
        """A host with its home elsewhere comes."""
        hosts = self.hosts
        hosts.sessions[name] = number = 1000 + len(hosts.sessions)
        hello = Hello(PROTOCOL_VERSION, name, f"{name}:1", "z0", "r0", partial=True)
        hosts.fleet.handle(SessionOpened(number, hello), now=hosts.now)

    def tell(self, joined: JoinedView) -> Change:
        self.view.update(now=self.hosts.now)
        self.tree.update(self.hosts.fleet.swarms.get(BLOB), self.view.version)
        change = self.view.since(self.version, now=self.hosts.now, tree=self.tree)
        self.version = change.version
        told = msgspec.json.decode(msgspec.json.encode(change), type=Change)
        joined.take(self.name, told, now=self.hosts.now)
        return told


def seen(state: FleetState) -> dict[str, tuple[int, int]]:
    return {host.name: (host.done, host.flags) for host in state.hosts.values()}


def test_a_host_is_shown_once_and_as_far_as_its_slowest_blob() -> None:
    """h0 and h1 have their homes here, and receive a blob that another tracker owns."""
    here, there = fleet_of(2, zones=1), Told("b", fleet_of(0))
    joined, state = JoinedView(View(here.fleet)), FleetState()
    there.guest("h0")
    there.guest("h1")
    there.hosts.open("g0", zone="z1")
    for name in ("h0", "g0"):
        there.hosts.hold(name, NOTHING)
    there.hosts.report("h0", HALF)
    there.tell(joined)
    joined.update(now=here.now)
    state.take(joined.since(0, now=here.now))
    assert seen(state) == {"h0": (500, RECEIVING), "h1": (1000, 0), "g0": (0, RECEIVING)}
    assert state.totals is not None
    assert (state.totals.hosts, state.totals.receiving, state.totals.swarms, state.totals.away) == (3, 2, 1, 0)
    assert [row.digest for row in state.swarms] == [BLOB]
    assert not any("away" in line.event for line in state.story), "a guest that goes is at its home"

    there.hosts.close("h1")
    there.hosts.pass_time(10.0)
    there.tell(joined)
    joined.update(now=here.now)
    change = joined.since(1, now=here.now)
    assert not change.forgotten and [row for row in change.states if row[2] & AWAY] == []
    here.close("h1")
    joined.update(now=here.now)
    state.take(joined.since(1, now=here.now))
    assert seen(state)["h1"][1] == AWAY


def test_watchers_hear_only_of_what_changed() -> None:
    here, there = fleet_of(3, zones=1), Told("b", fleet_of(0))
    joined = JoinedView(View(here.fleet))
    for number in range(3):
        there.hosts.open(f"g{number}")
        there.hosts.hold(f"g{number}", NOTHING)
    there.tell(joined)
    joined.update(now=here.now)
    assert len(joined.since(0, now=here.now).hosts) == 6
    there.hosts.report("g1", HALF)
    there.tell(joined)
    joined.update(now=here.now)
    change = joined.since(1, now=here.now)
    names = {number: name for number, name, _, _ in joined.since(0, now=here.now).hosts}
    assert not change.whole and not change.hosts
    assert [(names[number], done) for number, done, _ in change.states] == [("g1", 500)]
    joined.update(now=here.now)
    assert not joined.since(2, now=here.now).states


def test_a_tracker_that_says_nothing_is_named_and_takes_its_hosts_with_it() -> None:
    here, there = fleet_of(1, zones=1), Told("b", fleet_of(2, zones=1))
    there.hosts.open("g0")
    joined, state = JoinedView(View(here.fleet)), FleetState()
    there.tell(joined)
    joined.update(now=here.now)
    state.take(joined.since(0, now=here.now))
    assert set(seen(state)) == {"h0", "h1", "g0"} and state.silent == []
    joined.lose("b", "it does not answer")
    joined.update(now=here.now)
    state.take(joined.since(1, now=here.now))
    assert set(seen(state)) == {"h0"} and state.silent == [("b", "it does not answer")]
    there.version = 0
    there.tell(joined)
    joined.update(now=here.now)
    state.take(joined.since(2, now=here.now))
    assert set(seen(state)) == {"h0", "h1", "g0"} and state.silent == []
    joined.lose("b", "it does not answer")
    joined.keep(["c"])
    joined.update(now=here.now)
    assert joined.since(3, now=here.now).silent == [], "it is no tracker of this fleet any more"


def test_rows_have_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(joined_view, "HOSTS_SHOWN_MAX", 4)
    here, there = fleet_of(3, zones=1), Told("b", fleet_of(0))
    joined = JoinedView(View(here.fleet))
    for number in range(9):
        there.hosts.open(f"g{number}")
    there.tell(joined)
    joined.update(now=here.now)
    change = joined.since(0, now=here.now)
    assert len(change.hosts) == 4 and change.totals.hosts == 12, "the totals count all"


def test_a_tree_of_another_tracker_has_the_numbers_of_this_one() -> None:
    here, there = fleet_of(5, zones=1), Told("b", fleet_of(0))
    joined = JoinedView(View(here.fleet))
    joined.update(now=here.now)
    for name in ("g0", "g1"):
        there.hosts.open(name)
        there.hosts.hold(name, NOTHING)
    there.hosts.pass_time(1.0)
    tree = RelayedTree(joined, "b")
    tree.take(there.tell(joined))
    joined.update(now=here.now)
    tree.update(joined.version)
    names = {number: name for number, name, _, _ in joined.since(0, now=here.now).hosts}
    rows = tree.since(0)
    assert {names[number] for number, _, _ in rows} == {"g0", "g1"}
    roots = [names[number] for number, _, parent in rows if parent == ORIGIN]
    assert len(roots) == 1
    assert {names[parent] for _, _, parent in rows if parent >= 0} == set(roots)
    tree.end()
    tree.update(joined.version + 1)
    assert [done for _, done, _ in tree.since(joined.version)] == [-1, -1]


# -- over sockets


def host_at(site: Site, name: str, *, guest: bool = False) -> int:
    session, _ = site.service.open_session(Hello(PROTOCOL_VERSION, name, f"{name}:1", partial=guest))
    return session


def blob_of(name: str, made: list[Site]) -> Any:
    """A blob that a tracker owns."""
    ownership = made[0].cluster.ownership
    assert ownership is not None
    blobs = (digest_of(b"blob %d" % number) for number in range(1000))
    return next(blob for blob in blobs if owner(ownership, blob).id == name)


async def test_any_tracker_shows_the_fleet_and_names_one_that_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hosts at three trackers, a tree at another tracker, and a tracker that ends meanwhile."""
    monkeypatch.setattr(pages, "WATCHED_S", 0.05)
    async with sites("a", "b", "c") as made, aiohttp.ClientSession(read_bufsize=1 << 20) as http:
        a, b, c = made
        blob = blob_of("b", made)
        host_at(a, "at-a")
        home = host_at(b, "at-b")
        host_at(c, "at-c")
        guest = host_at(b, "at-a", guest=True)
        for session in (home, guest):
            b.service.submit(Received(session, Holding(blob, PIECES * PIECE, PIECE, NOTHING)))
        b.service.submit(Received(guest, Report((Advance(blob, HALF),))))
        b.service.fleet.handle(Tick(), now=b.service.fleet.started_at + 100.0)
        names = set[str]()
        async for state in follow(http, a.url, blob, 0):
            names = {host.name for host in state.hosts.values()}
            if names == {"at-a", "at-b", "at-c"} and not state.silent and state.tree:
                break
        assert seen(state)["at-a"] == (500, RECEIVING)
        assert {state.name(number) for number in state.tree} == {"at-a", "at-b"}
        assert [row.digest for row in state.swarms] == [blob]

        async for state in follow(http, a.url):
            if len(state.hosts) == 3 and not state.silent:
                await c.stop()
            if state.silent and len(state.hosts) == 2:
                break
        assert [name for name, _ in state.silent] == ["c"] and state.silent[0][1]


async def test_nothing_is_asked_while_no_one_watches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pages, "WATCHED_S", 0.05)
    async with sites("a", "b") as (a, b), aiohttp.ClientSession() as http:
        assert b.asked == []
        async for state in follow(http, a.url):
            if not state.silent:
                break
        assert b.asked == ["/v1/trackers/view"]
        await until(lambda: not a.watch._of_all, "the watcher is gone")
        assert a.watch._following is None and b.asked == ["/v1/trackers/view"]


async def test_a_tracker_that_is_watched_by_another_asks_no_third(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pages, "WATCHED_S", 0.05)
    async with sites("a", "b", "c") as (a, b, c), aiohttp.ClientSession() as http:
        async for state in follow(http, a.url):
            if not state.silent:
                break
        assert (a.asked, b.asked, c.asked) == (["/v1/events"], ["/v1/trackers/view"], ["/v1/trackers/view"])


def test_the_fleet_of_one_tracker_is_its_own() -> None:
    assert View(Fleet(0.0)).since(0, now=0.0).silent == []
