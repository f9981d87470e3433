"""Pulls beside hosts that claim pieces and give none, in virtual time."""

from __future__ import annotations

import pytest
from starved_lab import BLOB, LAYOUT, STRIPES, WHOLE_S, Lab, usual_s

from p2pdist.model.digest import digest_of
from p2pdist.model.messages import Advance, Complaint, Holding, Report
from tracker.core.planning.rescue import RESCUES_MAX


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


def test_strangers_that_stop_half_way_cost_no_more_beside_a_tracker_that_has_just_started() -> None:
    """That they join with everything is a claim at any time: no parent holds them up."""
    lab = Lab("half", started_at=0.0)
    lab.strangers(20, seeds=True)
    host = lab.pull("h1")
    assert lab.until_complete(host) <= 2 * usual_s()
    assert host.from_origin == LAYOUT.count // 2


def test_strangers_that_stop_half_way_cost_no_more_right_after_other_pulls() -> None:
    """The host says nothing between short pulls, as it lacks nothing: it is not late with that."""
    lab, full = Lab("half"), tuple(len(range(stripe, LAYOUT.count, STRIPES)) for stripe in range(STRIPES))
    for name in (f"s{number}" for number in range(20)):
        lab.open(name)
        lab.said[name] = list(full)
        lab.tell(name, Holding(BLOB, LAYOUT.size, LAYOUT.piece_size, full))
    lab.gets_on = False
    lab.run(1.06)  # hosts have just been counted
    lab.open("h1")
    for blob, steps in ((b"first", ((0.01, (1,) * STRIPES), (0.2, full))), (b"second", ((0.3, full),))):
        lab.tell("h1", Holding(digest_of(blob), LAYOUT.size, LAYOUT.piece_size, (0,) * STRIPES))
        for wait_s, counts in steps:
            lab.run(wait_s)
            lab.tell("h1", Report((Advance(digest_of(blob), counts),)))
    lab.run(0.5)
    host = lab.pull("h1")
    assert lab.until_complete(host) <= 2 * usual_s()
    assert host.from_origin == LAYOUT.count // 2


def test_hosts_that_strangers_stopped_giving_to_read_the_origin_few_times() -> None:
    """A few a stripe at once, and another once one of them is done; they give to the others."""
    lab = Lab("half")
    lab.strangers(20, seeds=True)
    hosts = [lab.pull(f"h{number}") for number in range(8)]
    lab.until_complete(*hosts)
    assert sum(host.from_origin for host in hosts) <= (RESCUES_MAX + 1) * LAYOUT.count // 2


@pytest.mark.parametrize("count", [4, 24])
@pytest.mark.parametrize("still_s", [0.2, 0.4])
def test_hosts_with_certificates_that_stand_still_as_they_begin_read_the_origin_once(
    count: int, still_s: float
) -> None:
    """For as long as their first handshakes may take on one machine."""
    lab = Lab(whole_s=4.0, certified=True)
    lab.measure()
    hosts = [lab.pull(f"h{number}") for number in range(count)]
    lab.stand_still(still_s)
    lab.until_complete(*hosts)
    assert sum(host.from_origin for host in hosts) == LAYOUT.count


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
