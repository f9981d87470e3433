"""Sites above zones: what enters a site over the WAN enters it once, and no link carries it
twice in one direction."""

from collections import Counter
from collections.abc import Callable

import pytest
from test_fleet import Control

from p2pdist.model.digest import digest_of
from p2pdist.model.messages import PROTOCOL_VERSION, Advance, Assign, Hello, Holding, Report
from p2pdist.model.pieces import PieceLayout
from tracker.core.edges import pairs
from tracker.core.events import Received, Send, SessionOpened, Tick
from tracker.core.host import SITE_END
from tracker.core.member import FROM_ORIGIN
from tracker.core.monitor.progress import IMPORT_S, slow_alone
from tracker.core.origin.superpeers import SUPERPEERS, superpeers
from tracker.core.planning.assignments import alternates
from tracker.core.planning.planner import Planner
from tracker.core.planning.schedule import JOIN_BATCH_S
from tracker.core.repair.remedies import yield_lease
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
        for child, parent in pairs(swarm.edges, stripe)
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


@pytest.mark.parametrize("dead", [0, 3])
def test_where_slots_are_short_a_site_does_not_begin_where_another_ends(dead: int) -> None:
    """Hosts that have just died give no slots and want a parent still: then no rack has one over,
    and a chain of sites would be as deep as all their trees together."""
    swarm = Swarm(BLOB, PieceLayout(1024 * 65536, 65536))
    for number in range(640):
        swarm.add(f"h{number}", [0, 0], slots=2 * (number % 200 >= dead), now=0.0, zone=f"s{number % 8}{SITE_END}z")
    Planner(origin_sites=frozenset(["s0"])).plan(swarm, leases=2)
    for stripe in range(2):
        deepest = max(swarm.edges.depth(stripe, host) for host in swarm.members)
        assert deepest <= 8 + 8, "one edge for each site, and the tree of the last one"
        assert len(crossings(swarm, stripe)) == 8


def test_hosts_of_far_sites_that_come_a_moment_later_are_not_below_all_of_the_first_site() -> None:
    """Of few large pieces, too: each level costs the time of two of them."""
    swarm = Swarm(BLOB, PieceLayout(48 << 24, 1 << 24))
    planner = Planner(origin_sites=frozenset(["s0"]))
    for sites in (range(1), range(1, 8)):
        for number in range(100 * sites.start, 100 * sites.stop):
            swarm.add(f"h{number}", [0, 0], slots=2, now=0.0, zone=f"s{number // 100}{SITE_END}z")
        planner.plan(swarm, leases=64)
    for stripe in range(2):
        assert max(swarm.edges.depth(stripe, host) for host in swarm.members) <= 8 + 7


def test_a_tracker_that_does_not_know_which_hosts_import_lets_no_other_import() -> None:
    """It has just started, and the host by which a stripe enters a site has not spoken yet."""
    planner = Planner(origin_sites=frozenset(["s1"]))
    swarm = at_sites(96)
    planner.plan(swarm, leases=64)
    [importer] = [
        child
        for child, parent in pairs(swarm.edges, 0)
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
            for child, parent in pairs(swarm.edges, 0)
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


class Broadcast:
    """Eight hosts at each of two sites, of which `near` reads the origin. All report every
    INTERVAL_S how many pieces they have."""

    INTERVAL_S = 0.5

    def __init__(self) -> None:
        planner = Planner(origin_sites=frozenset(["near"]))
        self.control = Control(planner=planner, report_interval_s=self.INTERVAL_S)
        self.now = 0.0
        self.counts = {f"{site}{number}": [0, 0] for site in ("near", "far") for number in range(8)}
        for session, host in enumerate(self.counts):
            hello = Hello(PROTOCOL_VERSION, host, f"{host}:1", zone="z", site=host[:-1])
            self.control.fleet.handle(SessionOpened(session, hello), now=0.0)
            joins = Holding(BLOB, 1024 << 16, 65536, (0, 0), (None, None))
            self.control.fleet.handle(Received(session, joins), now=0.0)
        self.go(1, lambda host, stripe: 0)

    @property
    def swarm(self) -> Swarm:
        return self.control.fleet.swarms[BLOB]

    def imports(self) -> list[tuple[int, str, str]]:
        """Stripe, host and parent of each edge over the WAN."""
        return [
            (stripe, child, parent)
            for stripe in range(2)
            for child, parent in pairs(self.swarm.edges, stripe)
            if parent != FROM_ORIGIN and self.swarm.members[parent].site != self.swarm.members[child].site
        ]

    def go(self, reports: int, gain: Callable[[str, int], int]) -> None:
        """Let so many reports pass, in each of which a host gains so many pieces of a stripe."""
        for _ in range(reports):
            for session, (host, counts) in enumerate(self.counts.items()):
                for stripe in range(2):
                    counts[stripe] = min(512, counts[stripe] + gain(host, stripe))
                report = Report((Advance(BLOB, tuple(counts)),))
                self.control.fleet.handle(Received(session, report), now=self.now)
            for _ in range(5):
                self.now += self.INTERVAL_S / 5
                self.control.fleet.handle(Tick(), now=self.now)


def test_a_wan_that_is_slower_than_the_hosts_is_no_fault_of_a_host() -> None:
    """Every host beyond it lags behind the other site. None loses upload slots, and the streams
    over the WAN, which begin slowly, go on."""
    broadcast = Broadcast()
    before = broadcast.imports()
    assert len(before) == 2
    broadcast.go(20, lambda host, stripe: 20 if host.startswith("near") else 4)
    assert broadcast.imports() == before
    assert all(member.slots == 2 for member in broadcast.swarm.members.values())
    assert not any("complains" in text or "lags" in text for _, text in broadcast.swarm.story)


def test_an_import_that_gets_far_less_than_the_other_one_gets_another_parent_in_time() -> None:
    """But no sooner than streams over a long path need until each has its share, and without a
    word against the hosts at its ends."""
    broadcast = Broadcast()
    stripe, child, parent = broadcast.imports()[0]
    reports = int(IMPORT_S / broadcast.INTERVAL_S)

    def gain(host: str, which: int) -> int:
        return 20 if host.startswith("near") else (1 if which == stripe else 10)

    broadcast.go(reports - 2, gain)
    assert broadcast.swarm.members[child].parents[stripe] == parent
    broadcast.go(6, gain)
    assert broadcast.swarm.members[child].parents[stripe] != parent
    assert all(member.slots == 2 for member in broadcast.swarm.members.values())


@pytest.mark.parametrize(("share", "anew"), [(6, True), (18, False)])
def test_the_last_import_begins_anew_where_it_leaves_free_what_the_others_had(share: int, anew: bool) -> None:
    """Its window grows by a segment in a round trip, while that of a new stream doubles; where the
    stream gets about all that the WAN gives, it goes on."""
    broadcast = Broadcast()
    stripe, child, parent = broadcast.imports()[0]
    broadcast.go(26, lambda host, which: 60 if host.startswith("near") else (6 if which == stripe else 20))
    member = broadcast.swarm.members[child]
    assert member.counts[1 - stripe] == 512 and member.parents[stripe] == parent
    broadcast.go(4, lambda host, which: share)
    assert (member.parents[stripe] != parent) is anew
    assert all(each.slots == 2 for each in broadcast.swarm.members.values())


@pytest.mark.parametrize(("before", "anew"), [((0, 0), [1]), ((7, 1), [])])
def test_what_a_host_had_when_it_joined_is_no_rate(before: tuple[int, int], anew: list[int]) -> None:
    """As after the start of a new tracker, which hosts tell what they have."""
    swarm = Swarm(BLOB, PieceLayout(1024 * 65536, 65536))
    swarm.add("near", [512, 512], slots=2, now=0.0, zone=f"near{SITE_END}z")
    swarm.add("far", list(before), slots=2, now=0.0, zone=f"far{SITE_END}z")
    swarm.edges.attach(1, "far", "near")
    swarm.advance("far", (512, 100), now=2.0)
    far = swarm.members["far"]
    far.set_rates([0.0, 3.0])
    assert slow_alone(swarm, far, now=20.0) == anew


def test_the_last_import_of_large_pieces_has_the_time_of_a_few() -> None:
    """The first one after the others were done came partly while it had a small share."""
    large = 16 << 20
    swarm = Swarm(BLOB, PieceLayout(16 * large, large))
    zones = {"near": f"near{SITE_END}z", "far": f"far{SITE_END}z"}
    for host, zone in zones.items():
        swarm.add(host, [0, 0], slots=2, now=0.0, zone=zone)
    swarm.advance("near", (8, 8), now=1.0)
    swarm.edges.attach(1, "far", "near")
    swarm.set_typical_rate(0.5)
    swarm.advance("far", (8, 2), now=20.0)
    far = swarm.members["far"]
    far.set_rates([0.0, 0.1])
    assert slow_alone(swarm, far, now=22.0) == []
    assert slow_alone(swarm, far, now=27.0) == [1]


def chain_of_sites() -> Swarm:
    """Of four sites s1 reads the origin; all hosts have some pieces."""
    swarm = at_sites(96)
    Planner(origin_sites=frozenset(["s1"])).plan(swarm, leases=64)
    for host in swarm.members:
        swarm.advance(host, (40, 40), now=1.0)
    return swarm


def at_site(swarm: Swarm, site: str) -> tuple[str, list[str]]:
    """The host that imports the first stripe at a site, and the others there that feed none."""
    [importer] = [host for host in swarm.edges.importers[0] if swarm.members[host].site == site]
    return importer, [host for host in swarm.sites[site] if not swarm.members[host].children[0] and host != importer]


@pytest.mark.parametrize("pieces", [38, 41, 60])
def test_a_superpeer_that_read_while_no_tracker_answered_gives_way_to_the_host_that_imports(pieces: int) -> None:
    """Both would go on to the end, each with all bytes over the WAN. Where it is far ahead, it goes
    on and the other one receives from inside."""
    swarm = chain_of_sites()
    importer, others = at_site(swarm, "s2")
    swarm.members[others[0]].counts = (pieces, 40)
    assert yield_lease(swarm, 0, others[0])
    swarm.edges.attach(0, others[0], FROM_ORIGIN)
    for _ in range(2):
        Planner().plan(swarm, leases=0)
    assert Counter(into for _, into in crossings(swarm, 0)) == dict.fromkeys(swarm.sites, 1)
    assert (others[0] in swarm.edges.roots[0]) is (pieces == 60)
    assert (importer in swarm.edges.importers[0]) is (pieces != 60)
    assert not swarm.edges.unplanned


def test_a_host_that_found_a_parent_at_another_site_while_no_tracker_answered_gets_one_inside() -> None:
    swarm = chain_of_sites()
    for site in ("s2", "s3"):
        _, others = at_site(swarm, site)
        swarm.edges.attach(0, others[0], next(iter(swarm.edges.roots[0])))
    for _ in range(2):
        Planner(origin_sites=frozenset(["s1"])).plan(swarm, leases=0, imports=False)
    assert Counter(into for _, into in crossings(swarm, 0)) == dict.fromkeys(swarm.sites, 1)
    assert not swarm.edges.unplanned


def test_a_host_that_comes_to_another_site_than_its_parent_imports() -> None:
    """As hosts that others have named before they spoke do."""
    swarm = chain_of_sites()
    before = [dict(hosts) for hosts in swarm.edges.importers]
    host = at_site(swarm, "s2")[1][0]
    zone, rack = swarm.members[host].zone, swarm.members[host].rack.split()[-1]
    swarm.set_location(host, f"s3{SITE_END}z0", "r0")
    assert host in swarm.edges.importers[0]
    swarm.set_location(host, zone, rack)
    assert [dict(hosts) for hosts in swarm.edges.importers] == before


def test_a_slow_importer_does_not_end_the_import_of_another_host() -> None:
    """The others at its site would get the stripe at the rate of its downlink."""
    swarm = chain_of_sites()
    importer, others = at_site(swarm, "s2")
    swarm.edges.attach(0, others[0], next(iter(swarm.edges.roots[0])))
    swarm.members[others[0]].counts = (60, 40)
    swarm.set_slow_receiver(swarm.members[others[0]], True)
    Planner(origin_sites=frozenset(["s1"])).plan(swarm, leases=0)
    assert importer in swarm.edges.importers[0] and others[0] not in swarm.edges.importers[0]


@pytest.mark.parametrize("starved", [False, True], ids=["", "with a starved host"])
def test_no_other_site_reads_where_a_root_is_lost_half_way(starved: bool) -> None:
    """Though hosts that wait for a parent are at all of them, and no site has a path up until the
    root has a successor."""
    swarm = chain_of_sites()
    root = next(iter(swarm.edges.roots[0]))
    importers = [at_site(swarm, site)[0] for site in ("s0", "s2", "s3")]
    host = at_site(swarm, "s2")[1][0]
    swarm.remove(root)
    for importer in importers:
        swarm.edges.detach(0, swarm.members[importer].children[0][0])
    if starved:
        swarm.edges.detach(1, host)
        swarm.starved[host] = None
    for _ in range(3):
        Planner().plan(swarm, leases=64, rescues=0)
    assert not swarm.edges.unplanned
    edges = crossings(swarm, 0)
    assert len([into for out, into in edges if not out]) == 1
    assert Counter(into for _, into in edges) == dict.fromkeys(swarm.sites, 1)


def test_a_site_that_read_before_reads_again_in_trees_that_are_drawn_anew() -> None:
    swarm = at_sites(96)
    Planner().plan(swarm, leases=64)
    for host in list(swarm.members):
        swarm.advance(host, (1, 1), now=1.0)
    for number in range(96, 96 * 4):
        swarm.add(f"h{number}", [0, 0], slots=2, now=1.0, zone=f"s{number % SITES}{SITE_END}z0", rack="r0")
    Planner().plan(swarm, leases=64)
    for stripe in range(2):
        assert sorted(crossings(swarm, stripe)) == [("", f"s{site}") for site in range(SITES)]
