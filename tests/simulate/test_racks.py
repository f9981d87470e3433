"""Racks and zones: what crosses a rack's boundary shares its links, and waits there without holding
up the rest."""

import pytest

from p2pdist.simulate import simulation as running
from p2pdist.simulate.network import CROSSING_PIECES, WINDOW_PIECES, Rack
from p2pdist.simulate.scenario import Scenario
from p2pdist.simulate.simulation import Simulation
from tracker.core.events import SessionOpened


def test_each_direction_of_a_rack_is_first_come_first_served_and_idle_time_is_not_saved_up() -> None:
    rack = Rack("r0", 100.0)
    assert [rack.leave(0.0, 50), rack.leave(0.0, 50)] == [0.5, 1.0]
    assert rack.enter(0.0, 50) == 0.5
    assert rack.leave(9.0, 50) == 9.0
    assert rack.leave(9.0, 50) == 9.5
    assert (rack.bytes_out, rack.bytes_in) == (200, 50)


def test_without_a_limit_a_rack_only_counts() -> None:
    rack = Rack("r0", 0.0)
    assert [rack.enter(3.0, 1 << 30), rack.enter(3.0, 1 << 30)] == [3.0, 3.0]
    assert rack.bytes_in == 2 << 30


def test_hosts_are_dealt_into_racks_and_racks_into_zones_in_blocks() -> None:
    scenario = Scenario(10, 1 << 20, 1e6, racks=4, zones=2)
    assert [scenario.rack_of(host) for host in range(10)] == [0, 0, 0, 1, 1, 2, 2, 2, 3, 3]
    assert [scenario.zone_of(host) for host in range(10)] == [0, 0, 0, 0, 0, 1, 1, 1, 1, 1]
    assert [Scenario(4, 1, 1e6, zones=2).zone_of(host) for host in range(4)] == [0, 0, 1, 1]
    assert (Scenario(4, 1, 1e6).rack_of(3), Scenario(4, 1, 1e6).zone_of(3)) == (-1, -1)


def test_the_tracker_is_told_rack_and_zone() -> None:
    simulation = Simulation(Scenario(6, 16 << 16, 1e6, racks=3, zones=2))
    places, watch = {}, simulation.invariants.fleet_handled

    def watcher(fleet, event, commands, sessions) -> None:  # type: ignore[no-untyped-def]
        if isinstance(event, SessionOpened):
            places[event.hello.host] = event.hello.rack, event.hello.zone
        watch(fleet, event, commands, sessions)

    simulation.tracker._watcher = watcher
    simulation.run()
    assert places["h00000"] == ("r0", "z0")
    assert places["h00003"] == ("r1", "z0")
    assert places["h00005"] == ("r2", "z1")


@pytest.mark.parametrize("racks", [2, 6])
def test_no_rack_takes_in_more_than_its_downlink_can(racks: int) -> None:
    """A rack at half of one host's rate: however the trees are drawn, what came in cannot have come
    faster, and every host completes."""
    scenario = Scenario(24, 96 << 16, 4e6, racks=racks, rack_bytes_s=2e6, latency_s=0.001)
    report = Simulation(scenario).run()
    assert report.complete == 24
    assert report.bound_s == pytest.approx((96 << 16) / 2e6)
    assert report.makespan_s >= 0.98 * report.rack_rx_ratio_max * report.bound_s
    assert 1.0 <= report.rack_rx_ratio_mean <= report.rack_rx_ratio_max <= 24 / racks + 0.5


def test_racks_without_a_limit_cost_nothing() -> None:
    plain = Simulation(Scenario(24, 96 << 16, 4e6)).run()
    wide = Simulation(Scenario(24, 96 << 16, 4e6, racks=3, rack_bytes_s=1e12)).run()
    assert wide.makespan_s <= 1.3 * plain.makespan_s
    assert plain.rack_rx_ratio_max == 0.0 < 0.99 <= wide.rack_rx_ratio_mean


def test_a_stream_between_racks_has_little_on_its_way(monkeypatch: pytest.MonkeyPatch) -> None:
    """Over a rack's link at a tenth of a host's, senders are held up: they cannot push ahead of
    what gets through."""
    monkeypatch.setattr(running, "SLICE_EVENTS", 20)
    simulation = Simulation(Scenario(12, 64 << 16, 10e6, racks=3, rack_bytes_s=1e6))
    most: dict[bool, int] = {}

    def look(_done: int, _total: int) -> None:
        for stream in simulation.network.streams:
            most[stream.crosses] = max(most.get(stream.crosses, 0), len(stream.transit))

    assert simulation.run(look).complete == 12
    assert most[True] == CROSSING_PIECES + 1 < WINDOW_PIECES


def test_what_waits_between_racks_does_not_hold_up_what_stays_inside() -> None:
    """A downlink is not kept free for blocks that are still in the racks' queues."""
    simulation = Simulation(Scenario(4, 1 << 20, 1e6, racks=2, rack_bytes_s=1e3, latency_s=0.0))
    network, world = simulation.network, simulation.world
    sender, receiver = simulation.hosts["h00000"], simulation.hosts["h00002"]
    arrived: list[tuple[str, float]] = []
    for number in range(3):
        network.wires.cross(sender.rack, receiver, 1000, lambda n=number: arrived.append((f"across {n}", world.now)))
    world.at(
        0.5, lambda: world.at(network.wires.arrival(receiver.link, 1000), lambda: arrived.append(("inside", world.now)))
    )
    world.run(until=10.0, events_max=100)
    assert [what for what, _ in arrived] == ["inside", "across 0", "across 1", "across 2"]
    assert [when for _, when in arrived] == pytest.approx([0.5, 1.0, 2.0, 3.0])


def test_blocks_to_different_racks_share_the_uplink_of_their_own() -> None:
    simulation = Simulation(Scenario(3, 1 << 20, 1e6, racks=3, rack_bytes_s=1e3, latency_s=0.0))
    network, world, arrived = simulation.network, simulation.world, []
    source = simulation.racks[0]
    for name in ("h00001", "h00002"):
        network.wires.cross(source, simulation.hosts[name], 1000, lambda: arrived.append(world.now))
    world.run(until=10.0, events_max=100)
    assert arrived == pytest.approx([1.0, 2.0])
    assert [rack.bytes_out for rack in simulation.racks] == [2000, 0, 0]
    assert [rack.bytes_in for rack in simulation.racks] == [0, 1000, 1000]


def test_a_block_from_outside_takes_the_hosts_downlink_when_it_gets_there() -> None:
    """It passes the rack by 1.0 s; what is sent from inside at that moment waits until the downlink
    has taken it in."""
    simulation = Simulation(Scenario(2, 1 << 20, 2e3, racks=1, rack_bytes_s=1e3, latency_s=0.0))
    network, world, arrived = simulation.network, simulation.world, []
    receiver = simulation.hosts["h00001"]
    network.wires.cross(None, receiver, 1000, lambda: arrived.append(world.now))
    world.at(1.0, lambda: arrived.append(network.wires.arrival(receiver.link, 1000)))
    world.run(until=10.0, events_max=100)
    assert arrived == pytest.approx([1.0, 1.5]) or arrived == pytest.approx([1.5, 1.0])


def test_what_comes_from_the_origin_passes_the_racks_downlink() -> None:
    """One host alone in its rack is as slow as the rack, not as the origin."""
    report = Simulation(Scenario(1, 64 << 16, 8e6, racks=1, rack_bytes_s=1e6)).run()
    assert report.rack_rx_ratio_max == 1.0
    assert report.makespan_s == pytest.approx((64 << 16) / 1e6, rel=0.1)


def test_what_the_origin_sent_is_counted_by_zone() -> None:
    report = Simulation(Scenario(12, 64 << 16, 4e6, zones=3)).run()
    assert set(report.zone_origin_ratios) <= {"z0", "z1", "z2"}
    assert sum(report.zone_origin_ratios.values()) == pytest.approx(report.origin_ratio)
