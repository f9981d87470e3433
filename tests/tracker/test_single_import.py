"""A site receives a stripe once: which of two importers goes on, and that plans come to rest."""

import random
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest

from p2pdist.model.digest import digest_of
from p2pdist.model.pieces import PieceLayout
from tracker.core.edges import Edges, pairs
from tracker.core.host import SITE_END
from tracker.core.member import FROM_ORIGIN, Member
from tracker.core.planning import single_import
from tracker.core.planning.planner import Planner
from tracker.core.repair.remedies import yield_lease
from tracker.core.swarm import Swarm

BLOB = digest_of(b"blob")


def swarm_of(parents: dict[str, str], **counts: int) -> Swarm:
    """Hosts named by their site, a letter and perhaps their rack, as "1a" and "2b-r1", with the
    parents of both stripes ("": the origin, "-": none), and 40 pieces of each, or as many as
    said."""
    swarm = Swarm(BLOB, PieceLayout(64 << 20, 65536))
    for host in parents:
        zone, rack = f"s{host[0]}{SITE_END}z", host.partition("-")[2] or "r0"
        swarm.add(host, [0, 0], slots=3, now=0.0, zone=zone, rack=rack)
    for host, parent in parents.items():
        for stripe in range(2):
            if parent != "-":
                swarm.edges.attach(stripe, host, parent)
    for host in parents:
        if number := counts.get(f"n{host[:2]}", 40):
            swarm.advance(host, (number, number), now=1.0)
    return swarm


def planned(swarm: Swarm, planner: Planner | None = None, *, imports: bool = True) -> dict[str, str | None]:
    """By host the parent in the first stripe after some plans, the last of which change nothing."""
    seen: list[dict[str, str | None]] = []
    for _ in range(5):
        (planner or Planner()).plan(swarm, leases=64, rescues=0, imports=imports)
        seen.append({host: member.parents[0] for host, member in swarm.members.items()})
    assert seen[-1] == seen[-2] == seen[-3]
    return seen[-1]


@pytest.mark.parametrize("pieces", [0, 40])
def test_a_host_in_a_new_rack_of_a_site_that_imports_receives_inside(pieces: int) -> None:
    """Rather than read the origin, be held for a second importer, and read it again."""
    counts = dict.fromkeys(("n1a", "n2a", "n2b", "n2c"), pieces)
    swarm = swarm_of({"1a": "", "2a": "1a", "2b": "2a", "2c-r1": "-"}, **counts)
    assert planned(swarm)["2c-r1"] in {"2a", "2b"}


def test_where_the_only_reader_is_in_doubt_a_host_of_a_site_that_imports_from_it_reads() -> None:
    swarm = swarm_of({"1a": "", "1b": "1a", "2a": "1a", "2b": "2a", "2c-r1": "-"}, n2c=30)
    swarm.members["1a"].doubt(99.0)
    assert planned(swarm)["2c-r1"] == FROM_ORIGIN


def test_a_reader_in_doubt_does_not_make_a_site_import_twice() -> None:
    swarm = swarm_of({"1a": "", "2x": "", "2a": "1a", "2c-r1": "-"}, n2c=30)
    swarm.members["2x"].doubt(99.0)
    assert planned(swarm)["2c-r1"] == "2a"


@pytest.mark.parametrize("why", ["absent", "slow"])
def test_a_root_that_gives_others_nothing_does_not_keep_other_sites_from_reading(why: str) -> None:
    swarm = swarm_of({"1a": "", "1b": "1a", "3x": "", "2a": "1a"}, n1b=38, n2a=38)
    if why == "absent":
        swarm.members["3x"].mark_absent(2.0)
    else:
        swarm.set_slow_receiver(swarm.members["3x"], True)
    swarm.remove("1a")
    after = planned(swarm)
    assert {after["1b"], after["2a"]} in ({FROM_ORIGIN, "1b"}, {FROM_ORIGIN, "2a"})


@pytest.mark.parametrize("totals", [40, 512])
def test_a_reader_goes_on_where_the_other_importer_receives_through_a_host_that_is_away(totals: int) -> None:
    swarm = swarm_of({"1a": "-", "2a": "1a", "2b": "2a", "2c-r1": ""}, n1a=totals, n2c=41)
    swarm.members["1a"].mark_absent(2.0)
    assert planned(swarm)["2c-r1"] == FROM_ORIGIN


def test_a_reader_whose_site_may_read_goes_on_beside_an_importer_below_one_whose_site_may_not() -> None:
    """That one began while no tracker answered. Once it loses the lease, no other would wait for
    it."""
    swarm = swarm_of({"2u": "", "0i": "2u", "0l-r1": "", "0m": "0i"}, n0i=48, n2u=50)
    planner = Planner(origin_sites=frozenset(["s0"]))
    assert planned(swarm, planner)["0l-r1"] == FROM_ORIGIN
    swarm.edges.detach(0, "2u")
    after = planned(swarm, planner)
    assert None not in after.values() and after["2u"] != FROM_ORIGIN


def test_a_host_that_was_rescued_does_not_keep_other_sites_from_reading() -> None:
    """It may be a stranger, and the others its like."""
    swarm = swarm_of({"1a": "", "1b": "1a", "3x": "", "2a": "1a"}, n1b=38, n2a=38, n3x=0)
    for stripe in range(2):
        swarm.edges.rescue(stripe, "3x")
    swarm.remove("1a")
    assert FROM_ORIGIN in {planned(swarm)[host] for host in ("1b", "2a")}


@pytest.mark.parametrize("rescued", ["1x-r1", "2x"], ids=["of another rack", "of another site"])
def test_a_starved_host_stays_with_a_rescued_one_though_its_rack_and_site_import(rescued: str) -> None:
    """It was attached and detached in each plan, and got nothing: what starves it may be the root
    of its rack."""
    swarm = swarm_of({"1a": "", rescued: "", "1s": "-"}, n1s=0)
    for stripe in range(2):
        swarm.edges.rescue(stripe, rescued)
    swarm.starved["1s"] = None
    assert planned(swarm)["1s"] == rescued
    swarm.advance("1s", (1, 1), now=2.0)
    assert planned(swarm)["1s"] == rescued


def test_a_site_does_not_import_from_a_reader_that_gets_less_than_it_may() -> None:
    swarm = swarm_of({"1a": "", "1b": "1a", "2a": "-", "2b": "-"}, n2a=0, n2b=0)
    swarm.wan.close({}, {"s1": 1e5})
    after = planned(swarm)
    assert FROM_ORIGIN in {after["2a"], after["2b"]}


def test_a_site_that_may_not_import_reads_where_it_may() -> None:
    swarm = swarm_of({"1a": "", "1b": "1a", "2a": "-", "2b": "-"}, n2a=38, n2b=37)
    swarm.wan.close({"s2": False}, {"s2": 0.0})
    after = planned(swarm)
    assert after["2a"] == FROM_ORIGIN and after["2b"] == "2a"


def test_as_many_read_at_a_site_as_may() -> None:
    swarm = swarm_of({"1a": "", "2a": "1a", "1b-r1": ""})
    assert planned(swarm, Planner(origin_streams_max=2))["1b-r1"] == FROM_ORIGIN


def test_thousands_that_say_that_they_import_do_not_hold_up_the_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    """Any host may say so. Each looks up its own path a few times, and not once for each other."""
    parents = {"1a": ""} | {f"2{number}": "1a" for number in range(2000)}
    swarm = swarm_of(parents)
    above, through, looked = single_import._above, Edges.receives_through, Counter[str]()

    def climb(*arguments: Any) -> Iterator[Member]:
        looked["above"] += 1
        return above(*arguments)

    def receives_through(*arguments: Any) -> bool:
        looked["through"] += 1
        return through(*arguments)

    monkeypatch.setattr(single_import, "_above", climb)
    monkeypatch.setattr(Edges, "receives_through", receives_through)
    Planner().plan(swarm, leases=0)
    assert len(swarm.edges.importers[0]) == 1
    assert looked["above"] >= len(parents)
    assert looked.total() <= 20 * len(parents)


@pytest.mark.parametrize("seed", range(60))
def test_plans_come_to_rest_and_a_site_imports_once(seed: int) -> None:
    """Whatever is lost, adopted or moved: importers are known, no host waits that could receive,
    and two hosts import for a site only where neither can serve."""
    rng = random.Random(seed)
    swarm = Swarm(BLOB, PieceLayout(64 << 20, 65536))
    sites, racks = rng.choice((2, 3, 4)), rng.choice((1, 2, 4))

    def place() -> tuple[str, str]:
        return f"s{rng.randrange(sites)}{SITE_END}z{rng.randrange(2)}", f"r{rng.randrange(racks)}"

    for number in range(rng.choice((12, 40, 90))):
        zone, rack = place()
        swarm.add(f"h{number}", [0, 0], slots=rng.choice((1, 2, 3)), now=0.0, zone=zone, rack=rack)
    planner = Planner(origin_sites=frozenset(rng.choice(((), ("s0",)))))
    planner.plan(swarm, leases=rng.choice((2, 64)))
    for round_ in range(3):
        swarm.edges.set_now(round_ + 1.0)
        for host in list(swarm.members):
            now = [max(count, 40 * round_ + rng.randrange(6)) for count in swarm.members[host].counts]
            swarm.advance(host, now, now=round_ + 1.0)
        for _ in range(rng.randrange(1, 7)):
            host, stripe = rng.choice(list(swarm.members)), rng.randrange(2)
            other = rng.choice(list(swarm.members))
            match rng.randrange(6):
                case 0 if len(swarm.members) > 4:
                    swarm.remove(host)
                case 1 if swarm.edges.roots[stripe] and len(swarm.members) > 4:
                    swarm.remove(next(iter(swarm.edges.roots[stripe])))
                case 2 if other != host and not swarm.edges.receives_through(stripe, other, host):
                    swarm.edges.attach(stripe, host, other)
                case 3 if yield_lease(swarm, stripe, host):
                    swarm.edges.attach(stripe, host, FROM_ORIGIN)
                case 4:
                    swarm.set_location(host, *place())
                case _:
                    swarm.edges.detach(stripe, host)
        for _ in range(6):
            planner.plan(swarm, leases=64)
        before = [dict(pairs(swarm.edges, stripe)) for stripe in range(2)]
        planner.plan(swarm, leases=64)
        assert [dict(pairs(swarm.edges, stripe)) for stripe in range(2)] == before
        members = swarm.members
        for stripe, edges in enumerate(before):
            crossing = {host for host, parent in edges.items() if parent and members[parent].site != members[host].site}
            assert set(swarm.edges.importers[stripe]) == crossing
            rooted = {host for host in edges if swarm.edges.rooted(stripe, host)}
            if planner.origin_sites and any(members[root].site != "s0" for root in swarm.edges.roots[stripe]):
                continue
            for site in {members[host].site for host in crossing}:
                ends = [host for host in edges if host in crossing or host in swarm.edges.roots[stripe]]
                fit = [host for host in ends if members[host].site == site and members[host].slots and host in rooted]
                assert len(fit) < 2, f"{fit} import stripe {stripe} for {site}"
        if not planner.origin_sites:
            assert not swarm.edges.unplanned
