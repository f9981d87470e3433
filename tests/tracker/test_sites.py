"""Sites above zones: what enters a site over the WAN enters it once, and no link carries it
twice in one direction."""

from collections import Counter

import pytest
from test_fleet import Control

from p2pdist.model.digest import digest_of
from p2pdist.model.messages import PROTOCOL_VERSION, Assign, Hello, Holding
from p2pdist.model.pieces import PieceLayout
from tracker.core.events import Received, Send, SessionOpened
from tracker.core.host import SITE_END
from tracker.core.member import FROM_ORIGIN
from tracker.core.origin.superpeers import SUPERPEERS, superpeers
from tracker.core.planning.assignments import alternates
from tracker.core.planning.planner import Planner
from tracker.core.planning.schedule import JOIN_BATCH_S
from tracker.core.swarm import Swarm

BLOB = digest_of(b"blob")
SITES = 4


def at_sites(hosts: int, *, zones: int = 2, racks: int = 2, slots: int = 2) -> Swarm:
    """Hosts in turn at SITES sites, which have zones with racks of the same names."""
    swarm = Swarm(BLOB, PieceLayout(64 << 20, 65536))
    for number in range(hosts):
        site, place = number % SITES, number // SITES
        zone = f"s{site}{SITE_END}z{place % zones}"
        swarm.add(f"h{number}", [0, 0], slots=slots, now=0.0, zone=zone, rack=f"r{place // zones % racks}")
    return swarm


def crossings(swarm: Swarm, stripe: int) -> list[tuple[str, str]]:
    """For each edge into a site the site where it begins ("": the origin) and the one that it
    enters."""
    return [
        ("" if parent == FROM_ORIGIN else swarm.members[parent].site, swarm.members[child].site)
        for child, parent in swarm.edges.pairs(stripe)
        if parent == FROM_ORIGIN or swarm.members[parent].site != swarm.members[child].site
    ]


def test_each_site_reads_the_origin_for_itself() -> None:
    """Its zones do not."""
    swarm = at_sites(96)
    Planner().plan(swarm, leases=64)
    for stripe in range(2):
        assert sorted(crossings(swarm, stripe)) == [("", f"s{site}") for site in range(SITES)]
    assert not swarm.edges.unplanned


def test_where_one_site_may_read_the_others_form_a_chain() -> None:
    """Each stripe leaves the origin once, enters each site once, and leaves a site once at most."""
    swarm = at_sites(96)
    Planner(origin_sites=frozenset(["s1"])).plan(swarm, leases=64)
    assert not swarm.edges.unplanned
    for stripe in range(2):
        edges = crossings(swarm, stripe)
        assert ("", "s1") in edges and len(edges) == SITES
        assert set(Counter(into for _, into in edges).values()) == {1}
        assert set(Counter(out for out, _ in edges).values()) == {1}


@pytest.mark.parametrize("slots", [0, 1, 2])
def test_a_site_that_lacks_slots_overloads_its_hosts_rather_than_the_wan(slots: int) -> None:
    swarm = at_sites(96, slots=slots)
    Planner(origin_sites=frozenset(["s1"])).plan(swarm, leases=64)
    assert not swarm.edges.unplanned
    for stripe in range(2):
        assert set(Counter(into for _, into in crossings(swarm, stripe)).values()) == {1}


def test_a_tracker_that_does_not_know_which_hosts_import_lets_no_other_import() -> None:
    """It has just started, and the host by which a stripe enters a site has not spoken yet."""
    planner = Planner(origin_sites=frozenset(["s1"]))
    swarm = at_sites(96)
    planner.plan(swarm, leases=64)
    [importer] = [
        child
        for child, parent in swarm.edges.pairs(0)
        if parent and swarm.members[parent].site == "s1" and swarm.members[child].site != "s1"
    ]
    site = swarm.members[importer].site
    swarm.edges.detach(0, importer)
    orphan = swarm.members[importer].children[0][0]
    swarm.edges.detach(0, orphan)
    for _ in range(2):
        planner.plan(swarm, leases=64, imports=False)
        assert not [edge for edge in crossings(swarm, 0) if edge[1] == site]
    planner.plan(swarm, leases=64)
    assert not swarm.edges.unplanned
    assert [into for _, into in crossings(swarm, 0)].count(site) == 1


def test_an_importer_that_is_lost_is_replaced_and_there_is_one_again() -> None:
    swarm = at_sites(96)
    planner = Planner(origin_sites=frozenset(["s1"]))
    planner.plan(swarm, leases=64)
    for _ in range(8):
        importers = [
            child
            for child, parent in swarm.edges.pairs(0)
            if parent != FROM_ORIGIN and swarm.members[parent].site != swarm.members[child].site
        ]
        swarm.remove(importers[0])
        for _ in range(3):
            planner.plan(swarm, leases=64)
        assert not swarm.edges.unplanned
        assert set(Counter(into for _, into in crossings(swarm, 0)).values()) == {1}


def test_zones_and_racks_of_one_name_at_two_sites_are_two() -> None:
    """A zone that names no site is a site by itself, whatever its name."""
    swarm = at_sites(96)
    assert len(swarm.racks) == SITES * 2 * 2 and sorted(swarm.sites) == ["s0", "s1", "s2", "s3"]
    swarm.add("lone", [0, 0], slots=2, now=0.0, zone="s0/z0")
    assert swarm.members["lone"].site == "s0/z0"
    Planner().plan(swarm, leases=64)
    assert ("", "s0/z0") in crossings(swarm, 0)


def test_superpeers_and_alternates_are_of_the_same_site() -> None:
    swarm = at_sites(96)
    Planner().plan(swarm, leases=64)
    names = superpeers(swarm, "s2")
    assert len(names) == SUPERPEERS
    assert {swarm.members[name].site for name in names} == {"s2"}
    here = list(swarm.sites["s2"])
    for host in here:
        others = alternates(swarm, ([], here), 0, host)
        assert {swarm.members[other].site for other in others} <= {"s2"}


def test_a_host_says_its_site() -> None:
    """And is told parents at its own site, but for one host a stripe."""
    control = Control()
    for number in range(12):
        site = f"s{number % 2}"
        hello = Hello(PROTOCOL_VERSION, f"h{number}", f"h{number}:1", zone="z", site=site)
        control.sessions[hello.host] = number
        control.fleet.handle(SessionOpened(number, hello), now=0.0)
        control.fleet.handle(Received(number, Holding(BLOB, 64 << 20, 65536, (0, 0), (None, None))), now=0.0)
    told = [each.message for each in control.tick(JOIN_BATCH_S) if isinstance(each, Send)]
    plans = [message.plan for message in told if isinstance(message, Assign)]
    assert len(plans) == 12
    swarm = control.fleet.swarms[BLOB]
    for stripe in range(2):
        assert sorted(crossings(swarm, stripe)) == [("", "s0"), ("", "s1")]


@pytest.mark.parametrize(("site", "reads"), [("s1", True), ("s2", False)])
def test_a_starved_host_reads_the_origin_only_where_its_site_may(site: str, reads: bool) -> None:
    swarm = at_sites(96)
    planner = Planner(origin_sites=frozenset(["s1"]))
    planner.plan(swarm, leases=64)
    host = next(name for name in swarm.sites[site] if name not in swarm.edges.roots[0])
    swarm.edges.detach(0, host)
    swarm.starved[host] = None
    planner.plan(swarm, leases=64)
    assert (swarm.members[host].parents[0] == FROM_ORIGIN) is reads
    assert swarm.members[host].parents[0] is not None
