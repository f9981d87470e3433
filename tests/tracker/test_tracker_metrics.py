"""The tracker's metrics: the names that others rely on, zeros where nothing is yet, and labels that
stay few."""

from __future__ import annotations

import time
from typing import get_args

from fleet_rig import BLOB, PIECES, Hosts, fleet_of, join_all
from prometheus_client import generate_latest
from prometheus_client.parser import text_string_to_metric_families

from p2pdist.model.messages import PROTOCOL_VERSION, Hello, Leaving
from p2pdist.model.preseed import ShownState
from tracker.content import Content
from tracker.core.capacity import FORGIVEN_AFTER_S
from tracker.core.events import Received, SessionOpened
from tracker.core.fleet import Fleet
from tracker.core.monitor.presence import LOST_S
from tracker.core.views.fleet_view import View
from tracker.core.views.rates import STALLED_S
from tracker.http.metrics import VERSIONS_MAX, ZONES_MAX, registry
from tracker.service import Service

Samples = dict[str, dict[tuple[str, ...], float]]


class Scraped:
    """A tracker's metrics, scraped again and again."""

    def __init__(self, hosts: Hosts) -> None:
        self.hosts = hosts
        self.view = View(hosts.fleet)
        self.service = Service(hosts.fleet, Content(None))
        self._registry = registry(self.service, self.view)

    def samples(self) -> Samples:
        """Values by sample name and label values, in the order of the labels' names."""
        self.view.update(now=self.hosts.now)
        found: Samples = {}
        for family in text_string_to_metric_families(generate_latest(self._registry).decode()):
            for sample in family.samples:
                key = tuple(value for _, value in sorted(sample.labels.items()))
                found.setdefault(sample.name, {})[key] = sample.value
        return found


def test_every_metric_of_the_interface_is_there_before_anything_happens() -> None:
    found = Scraped(Hosts(Fleet(time.monotonic()))).samples()
    assert found["p2pdist_tracker_hosts"] == {("absent", ""): 0, ("present", ""): 0}
    assert found["p2pdist_tracker_swarms"] == {("running",): 0, ("stalled",): 0, ("seeded",): 0}
    assert found["p2pdist_tracker_preseeds"] == {(state,): 0 for state in get_args(ShownState)}
    assert found["p2pdist_tracker_origin_leases"] == {(): 0}
    assert found["p2pdist_tracker_plan_seconds_count"] == {(): 0}


def test_hosts_and_swarms_are_counted_by_state() -> None:
    scraped = Scraped(fleet_of(4, origin_bytes_s=2e6, origin_streams_max=7))
    hosts = scraped.hosts
    join_all(hosts)
    hosts.close("h3")
    hosts.fleet.capacities.mark_slow("h1", 0.1, downlink=False, now=hosts.now)
    found = scraped.samples()
    assert found["p2pdist_tracker_hosts"] == {
        ("present", "z0"): 2, ("absent", "z0"): 0, ("present", "z1"): 1, ("absent", "z1"): 1
    }  # fmt: skip
    assert found["p2pdist_tracker_swarms"] == {("running",): 1, ("stalled",): 0, ("seeded",): 0}
    assert found["p2pdist_tracker_slow_hosts"] == {(): 1} and found["p2pdist_tracker_shunned_hosts"] == {(): 0}
    hosts.fleet.capacities.mark_slow("h1", 0.01, downlink=False, now=hosts.now - FORGIVEN_AFTER_S - 60)
    assert scraped.samples()["p2pdist_tracker_slow_hosts"] == {(): 0}
    assert found["p2pdist_tracker_origin_leases"] == {(): hosts.fleet.leases()} != {(): 0}
    assert found["p2pdist_tracker_origin_leases_limit"] == {(): 7}
    assert found["p2pdist_tracker_origin_budget_bytes_per_second"] == {(): 2e6}
    assert found["p2pdist_tracker_replans_total"][("join",)] == 4


def test_bytes_of_running_swarms_follow_reports() -> None:
    scraped = Scraped(fleet_of(4))
    hosts = scraped.hosts
    join_all(hosts)
    scraped.samples()
    hosts.pass_time(1.0)
    for name in hosts.sessions:
        hosts.report(name, (PIECES // 8, PIECES // 8))
    found = scraped.samples()
    size = hosts.fleet.swarms[BLOB].layout.size
    assert found["p2pdist_tracker_swarm_bytes"] == {("held",): size, ("missing",): 3 * size}
    assert found["p2pdist_tracker_delivery_bytes_per_second"][()] > 0
    hosts.pass_time(STALLED_S + 1)
    assert scraped.samples()["p2pdist_tracker_swarms"][("stalled",)] == 1


def test_zones_beyond_the_limit_are_one_label() -> None:
    hosts = Hosts(Fleet(time.monotonic() - 100))
    for number in range(ZONES_MAX + 10):
        hosts.open(f"h{number}", zone=f"z{number}")
    found = Scraped(hosts).samples()["p2pdist_tracker_hosts"]
    assert ZONES_MAX == 32 and len({zone for _, zone in found}) == ZONES_MAX + 1
    assert found["present", "other"] == 10
    assert sum(found.values()) == ZONES_MAX + 10


def test_a_host_that_came_and_went_unseen_is_counted_for_an_hour() -> None:
    """The page looks every few seconds and a scrape comes every 15: a host that ended without a
    word is in both, one that took its leave in neither, nor one that is back."""
    scraped = Scraped(fleet_of(3, zones=1))
    hosts = scraped.hosts
    for name in ("h0", "h1"):
        hosts.open(name, zone="z0")
    hosts.fleet.handle(Received(hosts.sessions["h1"], Leaving()), now=hosts.now)
    for name in ("h0", "h1"):
        hosts.close(name)
    hosts.pass_time(10.0)
    assert set(hosts.fleet.hosts) == {"h2"} and set(hosts.fleet.lost) == {"h0"}
    assert scraped.samples()["p2pdist_tracker_hosts"] == {("present", "z0"): 1, ("absent", "z0"): 1}
    change = scraped.view.since(0, now=hosts.now)
    assert change.totals.away == 1 and [why for _, why in change.troubled] == ["away: its session ended"]
    hosts.pass_time(120.0)
    scraped.samples()
    assert [why for _, why in scraped.view.since(0, now=hosts.now).troubled] == ["away: its session ended 2 min ago"]
    hosts.pass_time(LOST_S)
    assert scraped.samples()["p2pdist_tracker_hosts"] == {("present", "z0"): 1, ("absent", "z0"): 0}
    hosts.close("h2")
    hosts.pass_time(10.0)
    hosts.open("h2", zone="z0")
    assert not hosts.fleet.lost and scraped.samples()["p2pdist_tracker_hosts"] == {
        ("present", "z0"): 1,
        ("absent", "z0"): 0,
    }


def test_clocks_versions_and_the_origin_are_told() -> None:
    hosts = Hosts(Fleet(time.monotonic() - 100, origin="https://models.example"))
    for number in range(VERSIONS_MAX + 3):
        hello = Hello(PROTOCOL_VERSION, f"h{number}", "h:1", version=f"1.{number}" if number else "")
        opened = SessionOpened(900 + number, hello, clock_ahead_s=[3.0, -45.0, None][number % 3])
        hosts.fleet.handle(opened, now=hosts.now)
    scraped = Scraped(hosts)
    found = scraped.samples()
    assert found["p2pdist_tracker_clock_skew_seconds"] == {(): 45.0}
    assert found["p2pdist_tracker_clock_off_hosts"] == {(): 4}
    assert len(found["p2pdist_tracker_agents"]) == VERSIONS_MAX + 1 and found["p2pdist_tracker_agents"]["other",] == 3
    assert sum(found["p2pdist_tracker_agents"].values()) == VERSIONS_MAX + 3
    assert "p2pdist_tracker_origin_reachable" not in found, "it was not asked yet"
    scraped.service.content.watch.reachable = False
    assert scraped.samples()["p2pdist_tracker_origin_reachable"] == {("https://models.example",): 0}
    assert "process_cpu_seconds_total" in found and len(found["p2pdist_build_info"]) == 1


def test_a_version_that_is_called_as_the_rest_has_no_sample_twice() -> None:
    """Prometheus would drop one of them."""
    hosts = Hosts(Fleet(time.monotonic() - 100))
    versions = [*(f"1.{number}" for number in range(VERSIONS_MAX + 3)), "other", "other"]
    for number, version in enumerate(versions):
        hello = Hello(PROTOCOL_VERSION, f"h{number}", "h:1", version=version)
        hosts.fleet.handle(SessionOpened(900 + number, hello), now=hosts.now)
    text = generate_latest(Scraped(hosts)._registry).decode()
    (line,) = [line for line in text.splitlines() if line.startswith('p2pdist_tracker_agents{version="other"}')]
    assert float(line.split()[-1]) == 6
