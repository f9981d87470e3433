"""What watchers of a fleet are told: everything first, then only what changed; hosts in trouble,
swarms that advance or stand still."""

from __future__ import annotations

import pytest
from fleet_rig import BLOB, PIECE, PIECES, Hosts, fleet_of, join_all

from p2pdist.model.digest import Digest, digest_of
from tracker.core.views.fleet_view import (
    AWAY,
    BLAMED,
    GONE_S,
    RECEIVING,
    SHUNNED,
    SLOW,
    STORY_PER_UPDATE_MAX,
    Change,
    View,
)
from tracker.core.views.rates import STALLED_S, VISITS_MAX, SwarmRates
from tracker.core.views.tree_view import ABSENT, NO_PARENT, ORIGIN

HALF = PIECES // 4
WHOLE = PIECES // 2


class Watcher:
    """Keeps what it is told, as a page does."""

    def __init__(self, hosts: Hosts, *, stripe: int | None = None) -> None:
        self.hosts = hosts
        self.view = View(hosts.fleet)
        self.tree = self.view.tree(stripe) if stripe is not None else None
        self.version = 0
        self.names: dict[int, str] = {}
        self.states: dict[str, tuple[int, int]] = {}
        self.parents: dict[str, tuple[int, str]] = {}

    def look(self) -> Change:
        self.view.update(now=self.hosts.now)
        if self.tree is not None:
            self.tree.update(self.hosts.fleet.swarms.get(BLOB), self.view.version)
        return self.hear()

    def hear(self) -> Change:
        change = self.view.since(self.version, now=self.hosts.now, tree=self.tree)
        self.version = change.version
        self.names.update({number: name for number, name, _, _ in change.hosts})
        for number in change.forgotten:
            del self.states[self.names.pop(number)]
        self.states.update({self.names[number]: (done, flags) for number, done, flags in change.states})
        special = {ORIGIN: "origin", NO_PARENT: "nobody"}
        self.parents.update(
            {
                self.names[number]: (done, special.get(parent) or self.names[parent])
                for number, done, parent in change.tree
            }
        )
        return change


def test_the_first_answer_is_whole_and_the_next_says_what_changed() -> None:
    watcher = Watcher(fleet_of(6, racks_of=2))
    first = watcher.look()
    assert first.whole and [name for _, name, _, _ in first.hosts] == [f"h{number}" for number in range(6)]
    assert first.hosts[5][2:] == ("z1", "r2") and first.totals.hosts == 6
    join_all(watcher.hosts, ["h1"])
    second = watcher.look()
    assert not second.whole and not second.hosts
    assert [watcher.names[number] for number, _, _ in second.states] == ["h1"]
    assert watcher.states["h1"] == (0, RECEIVING) and watcher.states["h0"] == (1000, 0)
    third = watcher.look()
    assert not third.states and not third.story and third.version == 3


def test_who_listens_seldom_is_told_the_same() -> None:
    watcher, hosts = Watcher(fleet_of(8)), fleet_of(0)
    hosts = watcher.hosts
    often = Watcher(hosts)
    often.view = watcher.view
    watcher.look()
    often.hear()
    join_all(hosts)
    for count in (10, 20, 40):
        for number in range(count // 10, 8):
            hosts.report(f"h{number}", (count, count))
        watcher.view.update(now=hosts.now)
        often.hear()
    watcher.hear()
    assert watcher.states == often.states
    assert {name: done for name, (done, _) in watcher.states.items()} == {
        f"h{number}": 1000 * 2 * {0: 0, 1: 10, 2: 20, 3: 20}.get(number, 40) // PIECES for number in range(8)
    }


def test_progress_rate_and_time_left_follow_from_two_looks() -> None:
    hosts = fleet_of(4)
    watcher = Watcher(hosts)
    join_all(hosts)
    (row,) = watcher.look().swarms
    assert (row.state, row.hosts, row.complete, row.bytes_held, row.eta_s) == ("running", 4, 0, 0, None)
    hosts.pass_time(2.0)
    for name in hosts.sessions:
        hosts.report(name, (HALF, HALF))
    (row,) = watcher.look().swarms
    assert row.bytes_held * 2 == row.bytes_wanted == 4 * PIECES * PIECE
    assert row.rate_bytes_s == pytest.approx(2 * PIECES * PIECE / 2.0) and row.eta_s == pytest.approx(2.0)
    for name in hosts.sessions:
        hosts.report(name, (WHOLE, WHOLE))
    change = watcher.look()
    (row,) = change.swarms
    assert (row.state, row.complete, row.eta_s, row.bytes_held) == ("seeded", 4, 0.0, row.bytes_wanted)
    assert change.totals.running == 0 and change.totals.receiving == 0


def test_a_swarm_stands_still_when_no_host_gets_a_piece() -> None:
    hosts = fleet_of(3)
    rates = SwarmRates(hosts.fleet.swarms)
    join_all(hosts)
    swarm = hosts.fleet.swarms[BLOB]
    rates.look(now=hosts.now)
    hosts.pass_time(STALLED_S - 1)
    rates.look(now=hosts.now)
    assert rates.state(swarm) == "running"
    hosts.pass_time(2)
    rates.look(now=hosts.now)
    assert rates.state(swarm) == "stalled" and rates.eta_s(swarm) is None
    hosts.report("h1", (1, 0))
    hosts.pass_time(1)
    rates.look(now=hosts.now)
    assert rates.state(swarm) == "running"


def test_a_swarm_does_not_stand_still_while_those_who_lack_pieces_are_away() -> None:
    hosts = fleet_of(2)
    rates = SwarmRates(hosts.fleet.swarms)
    hosts.hold("h0", (WHOLE, WHOLE))
    hosts.hold("h1")
    hosts.pass_time(1)
    rates.look(now=hosts.now)
    hosts.now += 2 * STALLED_S
    hosts.close("h1")
    rates.look(now=hosts.now)
    assert rates.state(hosts.fleet.swarms[BLOB]) == "running"


@pytest.mark.slow
def test_one_look_visits_so_many_members_and_takes_swarms_in_turn() -> None:
    hosts = fleet_of(VISITS_MAX // 8 + 1)
    blobs: list[Digest] = [digest_of(b"%d" % number) for number in range(16)]
    for blob in blobs:
        for name in hosts.sessions:
            hosts.hold(name, (1,), blob, 8)
    rates = SwarmRates(hosts.fleet.swarms)
    looked = []
    for _ in range(3):
        hosts.now += 1.0
        rates.look(now=hosts.now)
        looked.append(sum(rates.pieces(hosts.fleet.swarms[blob]) > 0 for blob in blobs))
    assert looked == [7, 14, 16]


def test_a_host_that_is_gone_is_shown_for_a_while_and_may_come_back() -> None:
    hosts = fleet_of(3)
    watcher = Watcher(hosts)
    join_all(hosts)
    watcher.look()
    hosts.close("h1")
    change = watcher.look()
    assert watcher.states["h1"][1] & AWAY and change.totals.away == 1
    assert [line.event for line in change.story] == ["h1 is away"]
    hosts.pass_time(10.0)
    assert "h1" not in hosts.fleet.hosts
    change = watcher.look()
    assert watcher.states["h1"][1] == AWAY and [why for _, why in change.troubled] == ["away: its session ended"]
    hosts.open("h1", zone="elsewhere")
    change = watcher.look()
    assert change.hosts == [(2, "h1", "elsewhere", "")] and not change.troubled
    assert watcher.states["h1"] == (1000, 0) and "h1 is back" in [line.event for line in change.story]


def test_a_host_that_stays_away_is_forgotten() -> None:
    hosts = fleet_of(2)
    watcher = Watcher(hosts)
    watcher.look()
    hosts.close("h0")
    watcher.look()
    hosts.pass_time(GONE_S + 5)
    change = watcher.look()
    assert change.forgotten == [1] and set(watcher.states) == {"h1"} and change.totals.hosts == 1
    late = Watcher(hosts)
    late.view = watcher.view
    assert late.hear().forgotten == [], "who never heard of it need not hear that it is forgotten"


def test_slow_and_blamed_hosts_come_with_reasons() -> None:
    hosts = fleet_of(5)
    watcher = Watcher(hosts)
    join_all(hosts)
    hosts.fleet.capacities.sample("h1", 1_000_000, 0.5)
    hosts.fleet.capacities.mark_slow("h1", 0.1, downlink=False, now=hosts.now)
    hosts.fleet.capacities.mark_slow("h2", 0.1, downlink=True, now=hosts.now)
    hosts.complain("h0", "h3")
    hosts.complain("h1", "h3")
    hosts.complain("h1", "h4", "reset")
    change = watcher.look()
    whys = {watcher.names[number]: why for number, why in change.troubled}
    assert whys == {
        "h1": "slow uplink, sends 2.0 MB/s",
        "h2": "slow downlink",
        "h3": "shunned: corrupt by 2",
        "h4": "blamed: reset by 1",
    }
    assert watcher.states["h3"][1] == RECEIVING | BLAMED | SHUNNED and watcher.states["h1"][1] == RECEIVING | SLOW
    assert (change.totals.slow, change.totals.blamed, change.totals.shunned) == (2, 2, 1)


def test_the_tree_stays_when_the_stripe_has_arrived() -> None:
    hosts = fleet_of(5)
    watcher = Watcher(hosts, stripe=0)
    join_all(hosts)
    watcher.look()
    before = {name: parent for name, (_, parent) in watcher.parents.items()}
    assert list(before.values()).count("origin") == 2, "one in each zone"
    assert set(before.values()) <= {"origin", *hosts.sessions}
    for name in hosts.sessions:
        hosts.report(name, (WHOLE, HALF))
    watcher.look()
    assert all(done == 1000 for done, _ in watcher.parents.values())
    assert {name: parent for name, (_, parent) in watcher.parents.items()} == before
    assert not watcher.look().tree, "nothing changed"


def test_who_left_the_swarm_is_taken_out_of_the_tree() -> None:
    hosts = fleet_of(3)
    watcher = Watcher(hosts, stripe=1)
    join_all(hosts)
    watcher.look()
    hosts.close("h2")
    hosts.pass_time(10.0)
    assert (3, ABSENT) in [(number, done) for number, done, _ in watcher.look().tree]
    assert watcher.tree is not None
    assert sorted(number for number, _, _ in watcher.tree.since(0)) == [1, 2], "who comes later does not hear of it"


def test_a_blob_that_is_cut_otherwise_since_has_no_such_tree() -> None:
    hosts = fleet_of(2)
    watcher = Watcher(hosts, stripe=1)
    join_all(hosts)
    assert len(watcher.look().tree) == 2
    for name in list(hosts.sessions):
        hosts.close(name)
    hosts.pass_time(10.0)
    assert not hosts.fleet.swarms
    hosts.open("h0")
    hosts.hold("h0", (0,), pieces=8)
    assert [done for _, done, _ in watcher.look().tree] == [ABSENT, ABSENT]


def test_lines_of_a_story_come_once_each_in_their_order() -> None:
    hosts = fleet_of(3)
    watcher = Watcher(hosts)
    watcher.look()
    for name in hosts.sessions:
        hosts.hold(name)
    change = watcher.look()
    assert [line.event for line in change.story] == [f"h{number} joins with 0 pieces" for number in range(3)]
    assert {line.swarm for line in change.story} == {BLOB}
    hosts.pass_time(1.0)
    hosts.report("h0", (WHOLE, WHOLE))
    assert [line.event for line in watcher.look().story] == ["h0 is complete"]
    assert [line.age_s for line in Watcher(hosts).look().story] == [1.0, 1.0, 1.0, 0.0]


def test_a_crowd_tells_its_last_lines_only() -> None:
    hosts = fleet_of(3 * STORY_PER_UPDATE_MAX)
    watcher = Watcher(hosts)
    watcher.look()
    join_all(hosts)
    story = watcher.look().story
    assert len(story) == STORY_PER_UPDATE_MAX and story[-1].event.startswith(f"h{3 * STORY_PER_UPDATE_MAX - 1} ")
