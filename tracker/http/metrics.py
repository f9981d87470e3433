"""The tracker's metrics, read from its state at scrape time. Labels are bounded: no host or blob names."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from tracker.service import Service

ZONES_MAX = 64


class TrackerCollector(Collector):
    """Snapshots the fleet."""

    def __init__(self, service: Service) -> None:
        self._service = service

    def collect(self) -> Iterator[Metric]:
        fleet = self._service.fleet
        hosts = GaugeMetricFamily("p2pdist_tracker_hosts", "Hosts known", labels=["zone", "state"])
        counted = Counter(
            (host.zone, "present" if host.session is not None else "absent") for host in fleet.hosts.values()
        )
        zones = {zone for zone, _ in list(counted)[:ZONES_MAX]}
        shown: Counter[tuple[str, str]] = Counter()
        for (zone, state), number in counted.items():
            shown[zone if zone in zones else "other", state] += number
        for (zone, state), number in shown.items():
            hosts.add_metric([zone, state], number)
        yield hosts
        swarms = GaugeMetricFamily("p2pdist_tracker_swarms", "Swarms", labels=["state"])
        running = sum(1 for swarm in fleet.swarms.values() if swarm.receivers)
        swarms.add_metric(["running"], running)
        swarms.add_metric(["seeded"], len(fleet.swarms) - running)
        yield swarms
        yield GaugeMetricFamily("p2pdist_tracker_origin_leases", "Origin leases that are out", value=fleet.leases())
        yield GaugeMetricFamily("p2pdist_tracker_sessions", "Open agent sessions", value=self._service.sessions)
        yield GaugeMetricFamily("p2pdist_tracker_lag_seconds", "Delay of the event loop", value=self._service.lag_s)
        replans = CounterMetricFamily("p2pdist_tracker_replans", "Plans made anew", labels=["reason"])
        for reason, number in fleet.schedule.replans.items():
            replans.add_metric([reason], number)
        yield replans


def registry(service: Service) -> CollectorRegistry:
    """A registry with the tracker's metrics."""
    made = CollectorRegistry()
    made.register(TrackerCollector(service))
    seconds = Histogram(
        "p2pdist_tracker_plan_seconds",
        "Time to plan and assign after an event",
        registry=made,
        buckets=(0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0),
    )
    service.observe_plan = seconds.observe
    return made
