"""The network model, one block at a time."""

import pytest

from p2pdist.simulate.clock import World
from p2pdist.simulate.network import ORIGIN_NAME, TRACKER_NAME, Cut, Link, Paths, Wires
from p2pdist.simulate.scenario import Scenario
from p2pdist.simulate.simulation import Simulation


def test_what_is_due_first_happens_first_and_ties_keep_their_order() -> None:
    world, seen = World(1), []
    world.after(2.0, seen.append, "late")
    world.after(1.0, seen.append, "first of two")
    world.at(1.0, seen.append, "second of two")
    world.at(-5.0, seen.append, "the past is now")
    assert world.run(until=1.5, events_max=10) is False
    assert seen == ["the past is now", "first of two", "second of two"]
    assert world.now == 1.5
    world.run(until=9.0, events_max=10)
    assert (seen[-1], world.events) == ("late", 4)


def test_a_block_arrives_after_the_latency_or_when_the_downlink_is_free() -> None:
    """Cut through: an idle downlink adds nothing but the latency, a busy one makes the block
    wait."""
    world = World(1)
    wires, link = Wires(world, 0.01), Link(100.0, 100.0)
    assert wires.arrival(link, 50) == pytest.approx(0.5)
    assert wires.arrival(link, 50) == pytest.approx(1.0)
    world.now = 5.0
    assert wires.arrival(link, 50) == pytest.approx(5.01)


def test_one_host_takes_as_long_as_its_link_needs() -> None:
    """A pull alone: 64 pieces of 64 KiB at 1 MiB/s are 4 s, and the set-up is the rest."""
    report = Simulation(Scenario(1, 64 * 65536, float(1 << 20), latency_s=0.001)).run()
    assert 4.0 <= report.makespan_s <= 4.3


def test_two_hosts_share_what_the_origin_gives() -> None:
    """With an origin at half a host's rate, each host gets half from the origin and half from the
    other, if it is fast enough."""
    simulation = Simulation(Scenario(2, 256 * 65536, float(1 << 22), origin_bytes_s=float(1 << 21)))
    report = simulation.run()
    assert report.makespan_s == pytest.approx(8.0, rel=0.06)
    assert report.origin_ratio == 1.0


def test_a_cut_separates_what_it_says() -> None:
    paths = Paths(lambda name: None)
    inside = frozenset({"a", "b"})
    cut = Cut(inside, peers=True, tracker=False, origin=True)
    assert paths.reachable("a", "c")
    paths.cut(cut)
    assert paths.reachable("a", "b") and paths.reachable("c", "d") and paths.reachable("a", TRACKER_NAME)
    assert not paths.reachable("a", "c") and not paths.reachable("c", "b")
    assert not paths.reachable("a", ORIGIN_NAME) and paths.reachable("c", ORIGIN_NAME)
    paths.heal(cut)
    assert paths.reachable("a", "c")


def test_a_host_without_power_is_unreachable() -> None:
    paths = Paths(lambda name: None)
    paths.power("a", on=False)
    assert not paths.reachable("a", "b") and not paths.reachable(TRACKER_NAME, "a") and paths.reachable("b", "c")
    paths.power("a", on=True)
    assert paths.reachable("a", "b")
