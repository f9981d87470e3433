"""Preseeds of some number of hosts pick among the hosts of all trackers, whichever took the
order."""

from __future__ import annotations

import pytest
from preseed_world import World

from p2pdist.model.errors import UsageError
from tracker.core.host import Host
from tracker.core.preseeds.picks import REPLACE_S
from tracker.core.preseeds.preseed import CANDIDATES_S
from tracker.core.preseeds.selectors import no_match, parse_selector


def asking_each_other(trackers: int) -> World:
    world = World(trackers=trackers)
    for tracker in world.trackers:
        tracker.core.asks_others = True
    world.settle()
    return world


def test_the_order_goes_to_hosts_whose_home_is_elsewhere() -> None:
    """The tracker that takes the order has one host; the others have the rest."""
    world = asking_each_other(3)
    world.join("a/r0/h0")
    world.join("a/r1/h1", "a/r2/h2", tracker=1)
    world.join("a/r3/h3", tracker=2)
    world.ask("p", count=4)
    assert world.rows["p"].picked == ("h0", "h1", "h2", "h3"), "at once, by the tracker that took it"
    world.wait(2)
    assert world.keeping("p") == ["h0", "h1", "h2", "h3"]
    world.finish("p")
    world.wait(1)
    assert world.state("p") == "done" and world.rows["p"].picked == ("h0", "h1", "h2", "h3")


def test_the_fullest_hosts_are_picked_whichever_tracker_they_are_at() -> None:
    """Racks in turn over all hosts, not first the tracker's own."""
    world = asking_each_other(2)
    world.join("a/r0/h0", "a/r0/h1", "a/r0/h2")
    world.join("a/r1/h3", tracker=1)
    world.ask("p", count=2)
    assert sorted(world.rows["p"].picked) == ["h0", "h3"]


def test_picks_stay_until_their_tracker_has_told_of_them() -> None:
    """No tracker takes them for lost before that, and none picks more than are wanted."""
    world = asking_each_other(3)
    for number in range(9):
        world.join(f"a/r{number}/h{number}", tracker=number % 3)
    world.ask("p", count=5)
    picked = world.rows["p"].picked
    assert len(picked) == 5
    world.wait(REPLACE_S + CANDIDATES_S + 2)
    assert world.rows["p"].picked == picked and len(world.keeping("p")) == 5


def test_a_tracker_that_does_not_answer_holds_nothing_up() -> None:
    world = asking_each_other(3)
    world.join("a/r0/h0")
    world.join("a/r1/h1", tracker=1)
    world.join("a/r2/h2", tracker=2)
    world.deaf = [world.trackers[2]]
    world.ask("p", count=2)
    assert world.rows["p"].picked == ("h0", "h1")


def test_a_pick_that_left_is_replaced_by_a_host_of_another_tracker() -> None:
    world = asking_each_other(2)
    world.join("a/r0/h0")
    world.join("a/r1/h1", "a/r2/h2", tracker=1)
    world.ask("p", count=2)
    assert world.rows["p"].picked == ("h0", "h1")
    world.wait(2)
    world.leave("h0")
    world.wait(REPLACE_S + CANDIDATES_S + 3)
    assert sorted(world.rows["p"].picked) == ["h1", "h2"] and world.keeping("p") == ["h1", "h2"]


def test_people_hear_how_many_hosts_all_trackers_have() -> None:
    """While there are too few, and not once there are enough."""
    world = asking_each_other(2)
    world.join("a/r0/h0")
    world.join("a/r1/h1", "a/r2/h2", tracker=1)
    world.ask("p", count=4)
    world.wait(1)
    assert world.progress("p").notes == ("4 hosts are wanted, 3 that may be taken are connected",)
    world.join("a/r3/h3", tracker=1)
    world.wait(CANDIDATES_S + 3)
    assert sorted(world.rows["p"].picked) == ["h0", "h1", "h2", "h3"] and world.progress("p").notes == ()


def test_what_all_trackers_knew_is_not_kept() -> None:
    world = asking_each_other(2)
    world.join("a/r0/h0")
    world.join("a/r1/h1", tracker=1)
    world.ask("p", count=2)
    assert world.tracker.core.by_id["p"].candidates is not None
    world.finish("p")
    world.wait(CANDIDATES_S + 2)
    assert all(tracker.core.by_id["p"].candidates is None for tracker in world.trackers)
    asked = world.surveys
    world.wait(30)
    assert world.surveys == asked, "a preseed that lacks nothing asks nothing"


# -- selectors of sites


def test_hosts_are_selected_by_site() -> None:
    """A zone that names no site is a site by itself."""
    hosts = [Host("h0", zone="z0", site="east"), Host("h1", zone="z1", site="east"), Host("h2", zone="west")]
    for text, names in (("site=east", "h0 h1"), ("site=west", "h2"), ("site=east,zone=z1", "h1"), ("zone=west", "h2")):
        assert " ".join(host.name for host in hosts if parse_selector(text).matches(host)) == names
    assert str(parse_selector({"site": "east", "zone": "z0"})) == "zone=z0,site=east"
    assert (
        no_match(parse_selector("site=easst"), hosts)
        == "no host has site=easst; sites here: east, west; did you mean east?"
    )
    with pytest.raises(UsageError, match="zone, rack, host, site"):
        parse_selector("planet=earth")


def test_a_preseed_of_a_site_reaches_the_hosts_of_its_zones() -> None:
    world = asking_each_other(2)
    world.join("east/r/h0")
    world.join("west/r/h1", tracker=1)
    world.ask("p", selector="site=west")
    world.wait(2)
    assert world.keeping("p") == ["h1"]
