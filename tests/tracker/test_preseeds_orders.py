"""The core of preseeds: whom it asks, releases, picks and replaces, and what it says of it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from effort import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from preseed_world import SIZE, World

from p2pdist.model.errors import Conflict, NotFound, UsageError
from p2pdist.model.messages import Keep, Kept, Release
from p2pdist.model.preseed import Failure, PreseedRequest, canonical
from tracker.core.events import Tick as FleetTick
from tracker.core.preseeds import orders as module
from tracker.core.preseeds.orders import RECONNECT_GRACE_S, RECONNECT_S_MAX, RETURNING_PART
from tracker.core.preseeds.picks import REPLACE_S
from tracker.core.preseeds.preseed import RETRY_S, TRIES_MAX, Reported, SaveFailed, Synced


@pytest.fixture
def world() -> World:
    """A tracker that has run for a while, with no hosts yet."""
    made = World()
    made.settle()
    return made


def test_named_hosts_are_asked_when_they_are_there_and_when_they_come(world: World) -> None:
    world.join("h1")
    world.ask("p", hosts=["h1", "h2"])
    assert world.tracker.told == [("h1", Keep("p", world.rows["p"].package))]
    assert (world.state("p"), world.failures("p")) == ("running", {"h2": "not-connected"})
    world.join("h2", "h3")
    assert [host for host, _ in world.tracker.told] == ["h1", "h2"], "h3 is not asked"
    world.finish("p")
    found = world.progress("p")
    assert (found.state, found.hosts_total, found.hosts_done, found.bytes_done) == ("done", 2, 2, 2 * SIZE)
    assert (found.eta_s, found.failures) == (0.0, [])
    assert world.rows["p"].state == "done"


def test_for_whom_it_waits_that_may_never_come_is_said(world: World) -> None:
    """A selector that no host fits, names that no host has, hosts that are lost, more than there
    are; nothing of the others."""

    def notes(**asked: Any) -> tuple[str, ...]:
        world.ask("p", **asked)
        found = world.progress("p").notes
        world.cancel("p")
        assert world.progress("p").notes == ()
        del world.rows["p"], world.tracker.core.by_id["p"]
        return tuple(found)

    world.join("eu-1/r1/node1", "eu-1/r2/node2", "eu-2/r1/node3")
    assert notes(selector="zone=eu1") == ("no host has zone=eu1; zones here: eu-1, eu-2; did you mean eu-1?",)
    assert notes(selector="zone=eu-2,rack=r2") == ("no host has zone=eu-2,rack=r2",)
    assert notes(hosts=["node1", "nodd2"]) == ("no host called nodd2 is connected; did you mean node2?",)
    assert notes(hosts=["node1", "other"]) == ("no host called other is connected",)
    assert notes(count=4) == ("4 hosts are wanted, 3 that may be taken are connected",)
    assert notes(replicas=2) == ("2 copies are wanted in each zone, eu-2 has 1",)
    assert notes(selector="zone=eu-1") == notes(hosts=["node1"]) == notes(count=3) == ()

    world.leave("node2")
    world.wait(5.0)
    world.tracker.fleet.handle(FleetTick(), now=world.now)
    world.ask("q", selector="zone=eu-1")
    world.finish("q")
    found = world.progress("q")
    assert (found.state, found.hosts_total, found.hosts_absent) == ("done", 1, 1), "a lost host counts as absent"
    assert notes(hosts=["node1", "node2"]) == ("not connected: node2",)


def test_the_hosts_that_still_lack_it_are_named_the_farthest_behind_first(world: World) -> None:
    """Connected ones alone: the others are told as failures."""
    world.join("h1", "h2", "h3")
    world.ask("p", hosts=["h1", "h2", "h3", "h4"])
    for name, state, count in (("h1", "pulling", SIZE // 2), ("h2", "done", SIZE)):
        world.tracker.handle(Reported(name, Kept("p", state, count)))
    assert world.progress("p").waiting == ("h3", "h1")
    assert world.failures("p") == {"h4": "not-connected"}
    world.finish("p")
    assert world.progress("p").waiting == ()
    world.cancel("p")
    assert world.progress("p").waiting == ()


def test_nobody_is_there_yet(world: World) -> None:
    world.ask("p", count=1)
    assert world.state("p") == "pending"
    world.join("h1")
    assert (world.state("p"), world.rows["p"].picked) == ("running", ("h1",))


def test_hosts_that_match_later_are_asked_later(world: World) -> None:
    world.join("a/r1/h1", "b/r1/h2")
    world.ask("p", selector="zone=a")
    world.finish("p")
    assert world.state("p") == "done"
    world.join("a/r2/h3")
    assert (world.state("p"), world.progress("p").hosts_total) == ("running", 2)
    world.finish("p")
    assert world.keeping("p") == ["h1", "h3"]
    assert world.state("p") == "done"


def test_picks_are_saved_before_anybody_is_asked(world: World) -> None:
    world.join("h1", "h2", "h3")
    world.slow = True
    world.ask("p", count=2)
    assert world.tracker.told == []
    world.wait(1)
    assert len(world.tracker.unsaved) == 1, "one change at a time"
    world.slow = False
    world.tracker.save()
    assert sorted(host for host, _ in world.tracker.told) == sorted(world.rows["p"].picked)
    assert len(world.rows["p"].picked) == 2


def test_a_save_that_failed_is_tried_again(world: World) -> None:
    world.join("h1")
    world.slow = True
    world.ask("p", count=1)
    world.tracker.unsaved.clear()
    world.tracker.handle(SaveFailed("p"))
    world.slow = False
    world.wait(1)
    assert world.keeping("p") == ["h1"]


def test_a_pick_that_dies_is_replaced_and_released_when_it_returns(world: World) -> None:
    world.join("h1", "h2")
    world.ask("p", count=1)
    assert world.keeping("p") == ["h1"]
    world.leave("h1")
    world.wait(REPLACE_S - 1)
    assert world.rows["p"].picked == ("h1",), "it may be back in a moment"
    world.wait(2)
    assert world.rows["p"].picked == ("h2",)
    assert world.failures("p") == {"h1": "not-connected"}
    world.finish("p")
    assert world.state("p") == "done"
    world.join("h1")
    assert ("h1", Release("p")) in world.tracker.told
    assert (world.keeping("p"), world.failures("p")) == (["h2"], {})


def test_a_failure_is_tried_again_then_given_up_until_the_host_returns(world: World) -> None:
    world.join("h1")
    world.ask("p", hosts=["h1"])
    for number in range(TRIES_MAX):
        assert sum(isinstance(message, Keep) for _, message in world.tracker.told) == number + 1
        world.say("p", "failed", "h1", reason="disk-full: /store lacks space")
        world.wait(RETRY_S * 4**number + 1)
    assert sum(isinstance(message, Keep) for _, message in world.tracker.told) == TRIES_MAX
    found = world.progress("p")
    assert found.state == "failed"
    assert [(each.host, each.reason, each.detail) for each in found.failures] == [
        ("h1", "disk-full", "/store lacks space")
    ]
    assert found.failures_by_reason == {"disk-full": 1}
    world.leave("h1")
    world.join("h1")
    assert (world.state("p"), world.hosts["h1"].keeps["p"]) == ("running", "pulling")


def test_names_that_no_host_has_are_compared_with_those_of_all_once(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To compare a dozen names with those of ten thousand hosts takes a third of a second,
    for each question after a preseed with hosts that are switched off."""
    compared, before = list[str](), module.near
    monkeypatch.setattr(module, "near", lambda name, hosts: compared.append(name) or before(name, hosts))
    world.join(*(f"r1n{number:02}" for number in range(20)))
    world.ask("p", hosts=[f"r2n{number:02}" for number in range(15)])
    for _ in range(5):
        assert world.progress("p").notes[0] == "no host called r2n00 is connected; did you mean r1n00?"
    assert len(compared) == len(set(compared)) <= 3


def test_a_pick_that_failed_for_good_is_replaced(world: World) -> None:
    world.join("h1", "h2")
    world.ask("p", count=1)
    for number in range(TRIES_MAX):
        world.say("p", "failed", "h1", reason="disk-full: no room")
        world.wait(RETRY_S * 4**number + 1)
    assert world.rows["p"].picked == ("h2",)
    assert world.failures("p") == {"h1": "disk-full"}


def test_at_least_so_many_copies_in_each_zone(world: World) -> None:
    world.join("a/r1/a1", "a/r2/a2", "a/r1/a3", "b/r1/b1", "b/r1/b2", "b/r2/b3", "c/r1/c1")
    world.ask("p", count=3, replicas=2)
    assert world.keeping("p") == ["a1", "a2", "b1", "b3", "c1"], "spread over racks; the zone c has no second host"
    world.finish("p")
    assert world.progress("p").replicas == {"a": 2, "b": 2, "c": 1}
    world.leave("a1", "b1")
    world.wait(REPLACE_S + 1)
    world.finish("p")
    assert world.keeping("p") == ["a2", "a3", "b2", "b3", "c1"]
    world.join("c/r1/c2")
    assert "c2" in world.keeping("p")


def test_replicas_beside_named_hosts(world: World) -> None:
    world.join("a/r1/a1", "a/r2/a2", "b/r1/b1")
    world.ask("p", hosts=["a1"], replicas=1)
    assert world.keeping("p") == ["a1", "b1"]
    world.leave("a1")
    world.wait(REPLACE_S + 1)
    assert world.keeping("p") == ["a2", "b1"]
    assert world.progress("p").hosts_total == 3, "a1 is still one of those that shall hold it"


def test_no_pick_is_replaced_while_hosts_come_back_one_after_the_other(world: World) -> None:
    """Ten thousand TLS handshakes after a new start of the tracker take half a minute. Hosts that
    have the package would lose it to others that must fetch it."""
    names = [f"h{number:02}" for number in range(40)]
    world.join(*names)
    world.ask("p", count=20)
    world.finish("p")
    picked = world.rows["p"].picked
    world.restart()
    for name in [*sorted(set(names) - set(picked)), *picked]:
        world.wait(1)
        world.join(name)
        assert world.rows["p"].picked == picked
    world.wait(RETURNING_PART * RECONNECT_GRACE_S + 1)
    assert world.rows["p"].picked == picked and world.state("p") == "done"
    world.restart()
    world.join("h00")
    world.wait(RECONNECT_GRACE_S + REPLACE_S + 1)
    assert world.rows["p"].picked != picked, "where none comes any more the others are gone"


def test_a_pick_at_another_tracker_may_be_away_for_as_long_as_one_here() -> None:
    world = World(trackers=2)
    world.settle()
    world.join("h1", "h2")
    world.join("h3", tracker=1)
    world.wait(2)
    world.ask("p", count=3)
    world.wait(2)
    world.finish("p")
    world.join("h4")
    world.wait(1)
    assert world.rows["p"].picked == ("h1", "h2", "h3")
    for _ in range(2):
        world.leave("h3")
        world.wait(REPLACE_S - 1)
        assert world.rows["p"].picked == ("h1", "h2", "h3")
        world.join("h3", tracker=1)
        world.wait(2)
    world.leave("h3")
    world.wait(REPLACE_S + 2)
    assert world.rows["p"].picked == ("h1", "h2", "h4")


def test_no_tracker_replaces_picks_that_return_to_another_one() -> None:
    world = World(trackers=2)
    world.settle()
    names = [f"h{number:02}" for number in range(20)]
    world.join(*names)
    world.wait(1)
    world.ask("p", count=20)
    world.finish("p")
    world.join("spare", tracker=1)
    world.wait(2)
    picked = world.rows["p"].picked
    world.restart()
    for name in names:
        world.wait(1)
        world.join(name)
        assert world.rows["p"].picked == picked
    world.wait(RETURNING_PART * RECONNECT_GRACE_S + 2)
    assert world.rows["p"].picked == picked and world.state("p") == world.state("p", 1) == "done"
    world.leave(names[0])
    world.wait(REPLACE_S + 2)
    assert "spare" in world.rows["p"].picked


def test_hosts_that_come_all_the_time_hold_nothing_up_for_ever(world: World) -> None:
    world.ask("p", hosts=["h1"], deadline=10.0)
    world.restart()
    for number in range(int(RECONNECT_S_MAX) + 5):
        world.wait(1)
        world.join(f"g{number}")
    assert world.state("p") == "failed"


def test_the_deadline_passes(world: World) -> None:
    """Who is done keeps it; who is not is released and named."""
    world.join("h1", "h2", "h4")
    world.ask("p", hosts=["h1", "h2", "h3", "h4"], deadline=20, ttl=60)
    world.say("p", "done", "h1")
    world.say("p", "failed", "h4", reason="disk-full: no room")
    world.wait(21)
    assert world.state("p") == "failed"
    assert world.failures("p") == {"h2": "deadline", "h3": "not-connected", "h4": "disk-full"}
    assert (world.keeping("p"), world.progress("p").hosts_done) == (["h1"], 1)
    world.leave("h1")
    world.join("h1", "h3")
    assert world.keeping("p") == ["h1"]
    world.wait(60)
    assert (world.state("p"), world.keeping("p")) == ("expired", [])


def test_what_was_done_in_time_stays_done(world: World) -> None:
    world.join("h1", "h2")
    world.ask("p", count=1, deadline=20)
    world.finish("p")
    world.wait(30)
    assert world.state("p") == "done"
    world.leave("h1")
    world.wait(REPLACE_S + 1)
    assert world.state("p") == "running", "it is repaired, whatever the deadline was"


def test_its_time_is_up_or_it_is_cancelled(world: World) -> None:
    world.join("h1", "h2")
    world.ask("p", hosts=["h1"], ttl=10)
    world.ask("q", hosts=["h1", "h2"])
    assert world.tracker.told[0] == (
        "h1",
        Keep("p", world.rows["p"].package, until=world.rows["p"].expires_at, left_s=10.0),
    )
    world.wait(11)
    assert (world.state("p"), world.keeping("p")) == ("expired", [])
    world.leave("h2")
    world.cancel("q")
    assert (world.state("q"), world.keeping("q"), world.progress("q").hosts_done) == ("cancelled", [], 0)
    world.join("h2")
    assert world.keeping("q") == [], "it was away then, and is released when it says what it keeps"


def test_a_restarted_tracker_finds_everything_again(world: World) -> None:
    world.join("h1", "h2", "h3")
    world.ask("p", count=2)
    world.say("p", "done", "h1")
    world.restart()
    world.join("h3")
    world.wait(RECONNECT_GRACE_S - 1)
    assert world.rows["p"].picked == ("h1", "h2"), "they may be on their way back"
    world.join("h1")
    assert world.progress("p").hosts_done == 1
    world.wait(RETURNING_PART * RECONNECT_GRACE_S + REPLACE_S + 2)
    assert world.rows["p"].picked == ("h1", "h3")


def test_a_host_that_returns_is_believed_only_when_it_has_spoken(world: World) -> None:
    """Its disk was replaced while it was away."""
    world.join("h1")
    world.ask("p", hosts=["h1"])
    world.finish("p")
    world.leave("h1")
    world.hosts["h1"].keeps.clear()
    world.join("h1")
    assert (world.state("p"), world.progress("p").hosts_done) == ("running", 0)


def test_what_is_at_another_tracker_is_waited_for() -> None:
    world = World(trackers=2)
    world.settle()
    world.join("a/r/h1")
    world.join("a/r/h2", tracker=1)
    world.wait(1)
    world.ask("p", selector="zone=a")
    world.say("p", "done", "h1")
    assert (world.state("p"), world.progress("p").settled) == ("running", False)
    world.wait(1)
    assert (world.state("p"), world.progress("p").hosts_total) == ("running", 2)
    world.finish("p")
    world.wait(1)
    assert world.state("p") == "done"


def test_a_selector_is_not_done_before_hosts_could_return(world: World) -> None:
    world.join("a/r/h1", "a/r/h2")
    world.ask("p", selector="zone=a")
    world.say("p", "done", "h1")
    world.restart()
    world.join("h1")
    assert (world.state("p"), world.progress("p").settled) == ("running", False)
    world.join("h2")
    world.wait(RECONNECT_GRACE_S + 1)
    assert (world.state("p"), world.progress("p").settled) == ("running", True)
    assert world.rows["p"].state == "running"


def test_what_nobody_asked_for_is_released(world: World) -> None:
    world.join("h1")
    world.tracker.handle(Reported("h1", Kept("unknown", "done")))
    assert world.tracker.told == [("h1", Release("unknown"))]
    world.tracker.handle(Reported("nobody", Kept("unknown", "done")))
    assert len(world.tracker.told) == 1


def test_an_id_that_another_tracker_may_know_is_released_after_two_looks() -> None:
    world = World(trackers=2)
    world.join("h1")
    world.tracker.handle(Reported("h1", Kept("unknown", "done")))
    world.tracker.exchange()
    assert world.tracker.told == [], "this look may have begun before it was said"
    world.tracker.exchange()
    assert world.tracker.told == [("h1", Release("unknown"))]


def test_what_only_a_tracker_of_a_later_release_can_read_is_not_released() -> None:
    world = World(trackers=2)
    world.join("h1")
    world.tracker.handle(Reported("h1", Kept("later", "done")))
    for _ in range(3):
        world.tracker.handle(Synced(frozenset({"later"})))
    assert world.tracker.told == []


def test_what_was_removed_from_the_database_is_released(world: World) -> None:
    world.join("h1")
    world.ask("p", hosts=["h1"])
    world.rows.clear()
    world.tracker.handle(Synced(frozenset()))
    assert world.keeping("p") == []
    with pytest.raises(NotFound):
        world.progress("p")


def test_two_trackers_share_one_preseed() -> None:
    world = World(trackers=2)
    world.settle()
    world.join("a/r/h1", "a/r/h2")
    world.join("a/r/h3", "a/r/h4", tracker=1)
    world.ask("p", count=3)
    world.wait(2)
    assert (len(world.rows["p"].picked), len(world.keeping("p"))) == (3, 3)
    world.finish("p")
    world.wait(1)
    for tracker in range(2):
        found = world.progress("p", tracker)
        assert (found.state, found.hosts_done, found.bytes_done) == ("done", 3, 3 * SIZE)
    gone = next(name for name in world.rows["p"].picked if name in ("h1", "h2"))
    world.leave(gone)
    world.join(gone, tracker=1)
    world.wait(REPLACE_S + 2)
    assert gone in world.rows["p"].picked, "it moved to the other tracker"
    world.leave(gone)
    world.wait(REPLACE_S + 2)
    assert gone not in world.rows["p"].picked
    assert len(world.keeping("p")) == 3


def test_two_trackers_that_pick_at_the_same_moment_pick_no_more_than_needed() -> None:
    world = World(trackers=2)
    world.settle()
    world.join("h1", "h2")
    world.join("h3", "h4", tracker=1)
    world.slow = True
    world.ask("p", count=2)
    world.wait(1)
    assert [len(tracker.unsaved) for tracker in world.trackers] == [1, 1]
    world.slow = False
    for tracker in world.trackers:
        tracker.save()
    world.wait(1)
    assert (len(world.rows["p"].picked), len(world.keeping("p"))) == (2, 2)


def test_copies_in_each_zone_are_not_made_twice_before_another_tracker_has_said_where_its_hosts_stand() -> None:
    """It picked them a moment ago, and this one reads of that before it hears from them."""
    world = World(trackers=2)
    world.settle()
    world.join("a/r/h0", "b/r/h1", "a/r/h4", "b/r/h5")
    world.join("a/r/h2", "b/r/h3", "a/r/h6", "b/r/h7", tracker=1)
    world.ask("p", count=5, replicas=2)
    world.wait(REPLACE_S + 2)
    assert (len(world.rows["p"].picked), len(world.keeping("p"))) == (5, 5)


@pytest.mark.parametrize("said", ["a@sha256:" + 64 * "0", ""])
def test_what_a_host_keeps_of_an_earlier_order_under_the_same_id_is_not_done(world: World, said: str) -> None:
    """As where the tracker lost its state, and a scheduler gives its order anew, for what the tag
    means by now: a host that comes back still has what it was asked for before."""
    world.join("h1")
    world.ask("p", hosts=["h1"])
    world.tracker.handle(Reported("h1", Kept("p", "done", SIZE, SIZE, package=said)))
    world.tracker.tick()
    assert world.state("p") == ("running" if said else "done")  # an earlier release does not say
    world.tracker.handle(Reported("h1", Kept("p", "done", SIZE, SIZE, package=world.rows["p"].package)))
    world.tracker.tick()
    assert world.state("p") == "done" and world.progress("p").bytes_done == SIZE


def test_the_time_left_follows_the_rate_of_late(world: World) -> None:
    world.join("h1")
    world.ask("p", hosts=["h1"])
    assert world.progress("p").eta_s is None
    world.now += 10
    world.tracker.handle(Reported("h1", Kept("p", "pulling", SIZE // 4, SIZE)))
    assert world.progress("p").eta_s == pytest.approx(30)


def test_limits(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "LIVE_MAX", 2)
    world.ask("p", count=1)
    world.tracker.core.check_room()
    world.ask("q", count=1)
    with pytest.raises(Conflict, match="2 preseeds go on"):
        world.tracker.core.check_room()
    world.cancel("q")
    world.tracker.core.check_room()


def test_one_identity_leaves_room_for_the_orders_of_others(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "LIVE_MAX", 4)
    monkeypatch.setattr(module, "KEPT_MAX", 10)
    core = world.tracker.core

    def order(name: str, owner: str) -> None:
        core.check_room(owner)
        world.ask(name, count=1)
        world.rows[name] = core.by_id[name].record = replace(world.rows[name], owner=owner)

    order("p", "alice")
    order("q", "alice")
    with pytest.raises(Conflict, match="2 preseeds of alice go on"):
        core.check_room("alice")
    order("r", "bob")
    world.cancel("q")
    for number in range(3):  # what has ended is remembered, too
        order(f"q{number}", "alice")
        world.cancel(f"q{number}")
    with pytest.raises(Conflict, match="5 are remembered") as refused:
        core.check_room("alice")
    assert "Cancel" not in refused.value.remedy and "a day after its end" in refused.value.remedy
    core.check_room("bob")


def test_one_address_leaves_room_for_the_orders_of_others(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """While access is off nothing else tells who orders."""
    monkeypatch.setattr(module, "LIVE_MAX", 4)
    core = world.tracker.core
    for name in ("p", "q"):
        core.check_room(source="10.0.0.1")
        world.ask(name, count=1)
        world.rows[name] = core.by_id[name].record = replace(world.rows[name], source="10.0.0.1")
    with pytest.raises(Conflict, match=r"2 preseeds of 10\.0\.0\.1 go on") as refused:
        core.check_room(source="10.0.0.1")
    assert "--access" in (refused.value.remedy or "")
    core.check_room(source="10.0.0.2")
    core.check_room("alice")
    world.cancel("q")
    core.check_room(source="10.0.0.1")


def test_what_is_looked_at_in_one_call_is_bounded(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    world.join("h1")
    for number in range(6):
        world.ask(f"p{number}", hosts=["h1", "h2"])
    before = len(world.tracker.told)
    monkeypatch.setattr(module, "VISITS_MAX", 5)
    world.join("h2")
    assert len(world.tracker.told) - before == 2
    world.wait(1)
    assert len(world.tracker.told) - before == 6, "the others had their turn later"


def test_hosts_that_a_selector_does_not_match_are_looked_at_as_well(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With orders for each rack of a large fleet one call would compare all hosts with hundreds of
    selectors, and keep the tracker from its sessions for seconds."""
    racks = [f"a/r{number}/h{number}" for number in range(32)]
    world.join(*racks)
    for number in range(32):
        world.ask(f"p{number}", selector=f"rack=r{number}")
        world.say(f"p{number}", "done", f"h{number}")
    looked, before = list[str](), world.tracker.core._look

    def look(preseed: Any, now: float, out: list[Any]) -> int:
        looked.append(preseed.record.id)
        return before(preseed, now, out)

    monkeypatch.setattr(module, "VISITS_MAX", 24)
    monkeypatch.setattr(module.Preseeds, "_look", lambda core, preseed, now, out: look(preseed, now, out))
    world.tracker.core._dirty.update({f"p{number}": None for number in range(32)})
    world.tracker.tick()
    assert len(looked) < 8
    world.wait(8)
    assert len(set(looked)) == 32, "the others had their turn later"


def test_orders_that_mean_the_same_read_the_same() -> None:
    one = PreseedRequest("a:v1", id="x", hosts=("h2", "h1", "h2"), deadline=5.0)
    assert canonical(one) == canonical(PreseedRequest("a:v1", hosts=("h1", "h2"), deadline=5.0))
    assert canonical(one) != canonical(PreseedRequest("a:v1", hosts=("h1", "h2"), deadline=6.0))
    with pytest.raises(UsageError):
        canonical(PreseedRequest("a:v1"))
    with pytest.raises(UsageError):
        canonical(PreseedRequest("a:v1", hosts=("h1",), selector="zone=a"))


NAMES = ["a/r1/h0", "a/r2/h1", "a/r2/h2", "b/r1/h3", "b/r1/h4", "b/r2/h5"]
ORDERS: list[dict[str, Any]] = [
    {"count": 3},
    {"count": 2, "selector": "zone=a"},
    {"selector": "zone=b"},
    {"hosts": ["h0", "h3", "h9"]},
    {"replicas": 2},
    {"hosts": ["h1"], "replicas": 1, "deadline": 30.0},
    {"count": 4, "ttl": 40.0},
]
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("flip"), st.integers(0, 5)),
        st.tuples(st.just("done"), st.integers(0, 5)),
        st.tuples(st.just("fail"), st.integers(0, 5)),
        st.tuples(st.just("wait"), st.integers(1, 12)),
        st.tuples(st.just("cancel"), st.integers(0, 2)),
        st.tuples(st.sampled_from(["restart", "slow", "save"]), st.just(0)),
    ),
    max_size=30,
)


@settings(max_examples=examples(150), deadline=None)
@given(st.integers(1, 2), st.lists(st.sampled_from(ORDERS), min_size=1, max_size=3), STEPS)
def test_in_the_end_exactly_those_keep_it_who_shall(
    trackers: int, orders: list[dict[str, Any]], steps: list[tuple[str, int]]
) -> None:
    """Whatever happened: once all hosts are back and nothing else happens, hosts keep what records
    say, and enough of them."""
    world = World(trackers=trackers)
    for number, text in enumerate(NAMES):
        world.join(text, tracker=number % trackers)
    for number, order in enumerate(orders):
        world.ask(f"p{number}", **order)
    for what, which in steps:
        name, identifier = f"h{which % 6}", f"p{which % len(orders)}"
        agent = world.hosts[name]
        if what == "flip" and agent.tracker is None:
            world.join(name, tracker=which % trackers)
        elif what == "flip":
            world.leave(name)
        elif what in ("done", "fail") and agent.tracker is not None:
            for kept in list(agent.keeps):
                agent.say(kept, "done" if what == "done" else "failed", "disk-full: no room")
        elif what == "wait":
            world.wait(which)
        elif what == "cancel" and which < len(orders):
            world.cancel(identifier)
        elif what == "restart":
            world.restart()
        else:
            world.slow = what == "slow"
            for tracker in world.trackers if not world.slow else ():
                tracker.save()
    world.slow = False
    for number, text in enumerate(NAMES):
        name = text.rpartition("/")[2]
        if world.hosts[name].tracker is not None:
            world.leave(name)
        world.join(name, tracker=number % trackers)
    for tracker in world.trackers:
        tracker.save()
    for _ in range(6):
        world.wait(RECONNECT_GRACE_S)
        for identifier in world.rows:
            world.finish(identifier)
    for identifier, row in world.rows.items():
        preseed, order = world.tracker.core.find(identifier), orders[int(identifier[1:])]
        for name, agent in world.hosts.items():
            host = agent.tracker.core.hosts[name] if agent.tracker is not None else None
            state: Any = agent.keeps.get(identifier, "waiting")
            shall = preseed.stays(name, host, state)
            assert (identifier in agent.keeps) == shall, (identifier, name, row)
        if row.state not in ("cancelled", "expired", "failed"):
            keeping = world.keeping(identifier)
            zones = [world.hosts[name].zone for name in keeping]
            assert len(row.picked) == len(set(row.picked))
            assert len(keeping) >= min(order.get("count", 0), 3 if "selector" in order else 6)
            assert all(zones.count(zone) >= order.get("replicas", 0) for zone in "ab")
            if "replicas" not in order and "count" in order:
                assert len(keeping) == order["count"]
            if "h9" not in order.get("hosts", ()):
                assert {world.state(identifier, tracker) for tracker in range(trackers)} == {"done"}


def test_notes_say_what_hosts_that_pull_wait_for(world: World) -> None:
    """As they report it, and no more once they go on."""
    world.join("h1", "h2", "h3")
    world.ask("p", hosts=["h1", "h2", "h3"])
    world.say("p", "pulling", "h1", "h2", "h3")
    assert world.progress("p").notes == ()
    world.say("p", "pulling", "h1", "h2", reason="site west waits: its WAN is for 22:00-06:00 UTC")
    assert world.progress("p").notes == ("2 hosts wait: site west waits: its WAN is for 22:00-06:00 UTC",)
    assert world.failures("p") == {}
    world.say("p", "pulling", "h1", "h2")
    assert world.progress("p").notes == ()


def test_what_a_host_waited_for_at_the_deadline_is_no_reason_of_its_own(world: World) -> None:
    """Programs go by reasons, of which protocol.md has the list; what people read is the detail."""
    world.join("h1")
    world.ask("p", hosts=["h1"], deadline=20)
    world.say("p", "pulling", "h1", reason="site west waits: its WAN is for 22:00-06:00 UTC")
    world.wait(21)
    progress = world.progress("p")
    assert tuple(progress.failures) == (Failure("h1", "deadline", "site west waits: its WAN is for 22:00-06:00 UTC"),)
    assert progress.failures_by_reason == {"deadline": 1}
