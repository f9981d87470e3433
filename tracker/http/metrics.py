"""The tracker's metrics, read from its state at scrape time. Labels are bounded: no host or blob
names."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator
from importlib.metadata import version
from typing import get_args

from prometheus_client import CollectorRegistry, GCCollector, Histogram, PlatformCollector, ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from p2pdist.model.history import KINDS
from p2pdist.model.preseed import ShownState
from tracker.cluster.cluster import Cluster
from tracker.core.history.history import CLOCK_OFF_S
from tracker.core.views.fleet_view import View
from tracker.core.views.rates import SwarmState
from tracker.history.recorder import SHARES
from tracker.preseed_service import PreseedService
from tracker.service import Service

ZONES_MAX = 32
"""Zones that have a label of their own, those that came first; the rest are together `other`."""

VERSIONS_MAX = 8
"""Versions of agents that have a label of their own, those of the most hosts."""

PLAN_BUCKETS_S = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0)


BROADCAST_BUCKETS_S = (0.5, 1, 2, 5, 10, 20, 30, 60, 120, 300, 600, 1200, 3600, 7200)


class TrackerCollector(Collector):
    """Snapshots the fleet."""

    def __init__(
        self, service: Service, view: View, preseeds: PreseedService | None, cluster: Cluster | None = None
    ) -> None:
        self._service, self._view, self._preseed_service = service, view, preseeds
        self._cluster = cluster
        self._zones: dict[str, None] = {}

    def collect(self) -> Iterator[Metric]:
        info = GaugeMetricFamily("p2pdist_build_info", "The version of p2pdist that runs", labels=["version"])
        info.add_metric([version("p2pdist")], 1.0)
        yield info
        yield from self._hosts()
        yield from self._agents()
        yield from self._swarms()
        yield from self._origin()
        yield from self._wan()
        yield from self._preseeds()
        yield from self._policies()
        yield from self._refusals()
        yield from self._upstreams()
        yield from self._trackers()
        yield from self._events()
        yield from self._traces()
        yield GaugeMetricFamily("p2pdist_tracker_sessions", "Open agent sessions", value=self._service.sessions)
        yield GaugeMetricFamily("p2pdist_tracker_lag_seconds", "Delay of the event loop", value=self._service.lag_s)
        replans = CounterMetricFamily("p2pdist_tracker_replans", "Plans made anew", labels=["reason"])
        for reason, number in self._service.fleet.schedule.replans.items():
            replans.add_metric([reason], number)
        yield replans
        name, text = "p2pdist_tracker_blamed_hosts", "Times that a host was found to have stated wrong hashes"
        yield CounterMetricFamily(name, text, value=self._service.blamed_hosts)

    def _hosts(self) -> Iterator[Metric]:
        hosts = GaugeMetricFamily(
            "p2pdist_tracker_hosts", "Hosts connected, and those lost within an hour", labels=["zone", "state"]
        )
        shown: Counter[tuple[str, str]] = Counter()
        for host in self._service.fleet.hosts.values():
            if not host.partial:  # else another tracker counts it
                shown[self._zone(host.zone), "present" if host.session is not None else "absent"] += 1
        for host in self._service.fleet.lost.values():
            shown[self._zone(host.zone), "absent"] += 1
        self._zones = {zone: None for zone in self._zones if (zone, "present") in shown or (zone, "absent") in shown}
        for zone in {zone for zone, _ in shown} or {""}:
            for state in ("present", "absent"):
                hosts.add_metric([zone, state], shown[zone, state])
        yield hosts
        fleet = self._service.fleet
        slow = len(fleet.capacities.slow_hosts(now=time.monotonic()))
        yield GaugeMetricFamily("p2pdist_tracker_slow_hosts", "Hosts held to have a slow link", value=slow)
        shunned = sum(host.banned for host in fleet.hosts.values())
        yield GaugeMetricFamily("p2pdist_tracker_shunned_hosts", "Hosts from which no other receives", value=shunned)

        name, text = (
            "p2pdist_tracker_unreachable_hosts",
            "Hosts connected that no other can reach: others read storage instead",
        )
        yield GaugeMetricFamily(name, text, value=self._service.reach.unreachable())

    def _agents(self) -> Iterator[Metric]:
        """What agents say of themselves when they connect."""
        present = [host for host in self._service.fleet.hosts.values() if host.session is not None and not host.partial]
        versions = Counter(host.version or "unknown" for host in present)
        agents = GaugeMetricFamily("p2pdist_tracker_agents", "Hosts connected, by version", labels=["version"])
        named = Counter(dict(versions.most_common(VERSIONS_MAX))) or Counter({version("p2pdist"): 0})
        if other := versions.total() - named.total():
            named["other"] += other  # a version may be called that: one sample for each label
        for name, number in named.items():
            agents.add_metric([name], number)
        yield agents
        skews = [abs(host.clock_ahead_s) for host in present if host.clock_ahead_s is not None]
        name, text = "p2pdist_tracker_clock_skew_seconds", "The farthest that the clock of a connected host is off"
        yield GaugeMetricFamily(name, text, value=max(skews, default=0.0))
        name, text = (
            "p2pdist_tracker_clock_off_hosts",
            f"Hosts connected whose clock is off by over {CLOCK_OFF_S:.0f} s",
        )
        yield GaugeMetricFamily(name, text, value=sum(skew > CLOCK_OFF_S for skew in skews))

    def _trackers(self) -> Iterator[Metric]:
        cluster = self._cluster
        ownership = cluster.ownership if cluster is not None else None
        listed = ownership.tracker(cluster.me) if cluster is not None and ownership is not None else None
        name, text = "p2pdist_tracker_epoch", "Number of the ownership that this tracker goes by; 0 for one alone"
        yield GaugeMetricFamily(name, text, value=ownership.epoch if ownership is not None else 0)
        share = listed.share if listed is not None else float(cluster is None)
        yield GaugeMetricFamily("p2pdist_tracker_share", "Weight of this tracker in sharing the blobs", value=share)
        owners = sum(each.share > 0 for each in ownership.trackers) if ownership is not None else 1
        yield GaugeMetricFamily("p2pdist_tracker_owners", "Trackers that share the blobs of the fleet", value=owners)
        age_s = time.monotonic() - cluster.looked_at if cluster is not None and cluster.look is not None else 0.0
        name, text = "p2pdist_tracker_database_age_seconds", "Since the trackers' common database answered last"
        yield GaugeMetricFamily(name, text, value=age_s)

    def _events(self) -> Iterator[Metric]:
        history, recorder = self._service.fleet.history, self._service.history
        happened = CounterMetricFamily("p2pdist_tracker_events", "Events of the fleet's history", labels=["kind"])
        for kind in KINDS:
            happened.add_metric([kind], history.counts[kind])
        yield happened
        name, text = (
            "p2pdist_tracker_events_left_out",
            "Events that the history has not: hosts repeat themselves, or the database is away",
        )
        left_out = CounterMetricFamily(name, text, labels=["reason"])
        left_out.add_metric(["repeated"], history.untold)
        left_out.add_metric(["database"], recorder.given_up)
        yield left_out

    def _zone(self, zone: str) -> str:
        """The label of a zone, the same from scrape to scrape."""
        if zone not in self._zones and len(self._zones) < ZONES_MAX:
            self._zones[zone] = None
        return zone if zone in self._zones else "other"

    def _swarms(self) -> Iterator[Metric]:
        rates, states = self._view.rates, Counter[str]()
        held = wanted = 0
        rate_bytes_s = 0.0
        for swarm in self._service.fleet.swarms.values():
            states[rates.state(swarm)] += 1
            if swarm.receivers:
                size, pieces = swarm.layout.size, sum(swarm.totals)
                held += size * rates.pieces(swarm) // pieces
                wanted += size * len(swarm.members)
                rate_bytes_s += rates.bytes_s(swarm)
        swarms = GaugeMetricFamily("p2pdist_tracker_swarms", "Swarms", labels=["state"])
        for state in get_args(SwarmState):
            swarms.add_metric([state], states[state])
        yield swarms
        name, text = "p2pdist_tracker_late_sites", "Sites with less than half of what another has, over all swarms"
        yield GaugeMetricFamily(name, text, value=rates.sites_late())
        name = "p2pdist_tracker_swarm_bytes"
        sizes = GaugeMetricFamily(name, "Bytes in swarms that some host still lacks, over all hosts", labels=["state"])
        sizes.add_metric(["held"], held)
        sizes.add_metric(["missing"], max(0, wanted - held))
        yield sizes
        yield GaugeMetricFamily("p2pdist_tracker_delivery_bytes_per_second", "What all hosts get", value=rate_bytes_s)

    def _origin(self) -> Iterator[Metric]:
        fleet, watch = self._service.fleet, self._service.content.watch
        name, text = "p2pdist_tracker_origin_reachable", "Whether the tracker could read the origin when it last tried"
        reachable = GaugeMetricFamily(name, text, labels=["origin"])
        if watch.reachable is not None:
            reachable.add_metric([fleet.origin], float(watch.reachable))
        yield reachable
        yield GaugeMetricFamily("p2pdist_tracker_origin_leases", "Origin leases that are out", value=fleet.leases())
        name = "p2pdist_tracker_origin_leases_limit"
        yield GaugeMetricFamily(name, "Origin leases that may be out", value=fleet.origin_streams_max)
        name = "p2pdist_tracker_origin_budget_bytes_per_second"
        yield GaugeMetricFamily(name, "What may be read from the origin; 0 for no limit", value=fleet.origin_bytes_s)

    def _wan(self) -> Iterator[Metric]:
        """What came to sites with a budget; of these there are few."""
        fleet, now = self._service.fleet, time.monotonic()
        name, text = "p2pdist_tracker_wan_bytes", "What came to a site with a budget over its WAN, by hosts' reports"
        came = CounterMetricFamily(name, text, labels=["site"])
        name, text = "p2pdist_tracker_wan_hour_bytes", "Of the last hour, and what this tracker lets come in one"
        hour = GaugeMetricFamily(name, text, labels=["site", "kind"])
        name, text = "p2pdist_tracker_wan_waiting", "Swarms of which hosts of a site wait for its budget"
        waiting = GaugeMetricFamily(name, text, labels=["site"])
        waits = Counter(site for swarm in fleet.swarms.values() for site in swarm.wan.waiting)
        for site, usage in fleet.imports.usage_by_site.items():
            came.add_metric([site], usage.total)
            hour.add_metric([site, "used"], usage.used(now=now))
            if (allowed := fleet.imports.allowed(site)) is not None:
                hour.add_metric([site, "allowed"], allowed)
            waiting.add_metric([site], waits[site])
        yield from (came, hour, waiting)

    def _preseeds(self) -> Iterator[Metric]:
        preseeds = GaugeMetricFamily("p2pdist_tracker_preseeds", "Preseeds", labels=["state"])
        states = self._preseed_service.core.states() if self._preseed_service is not None else Counter[str]()
        for state in get_args(ShownState):
            preseeds.add_metric([state], states[state])
        yield preseeds

    def _policies(self) -> Iterator[Metric]:
        book = self._service.fleet.policies
        yield GaugeMetricFamily("p2pdist_tracker_policies", "Policies that hold", value=len(book.table.policies))
        name, text = "p2pdist_tracker_policies_stale", "Whether what was written last has mistakes and older ones hold"
        yield GaugeMetricFamily(name, text, value=float(bool(book.problem)))

    def _refusals(self) -> Iterator[Metric]:
        name, text = "p2pdist_tracker_refused", "Requests that were refused, by the right that their routes ask for"
        refused = CounterMetricFamily(name, text, labels=["right"])
        access = self._service.access
        if access is not None:
            for right, number in access.control.audit.refused.items():
                refused.add_metric([right], number)
        yield refused

    def _upstreams(self) -> Iterator[Metric]:
        name, text = "p2pdist_tracker_upstream_requests", "Questions to upstreams, by what became of them"
        asked = CounterMetricFamily(name, text, labels=["upstream", "result"])
        for (upstream, result), number in self._service.upstreams.asked.items():
            asked.add_metric([upstream, result], number)
        hubs = self._service.hubs
        for result, number in hubs.asked.items():
            asked.add_metric([hubs.url, result], number)
        yield asked

    def _traces(self) -> Iterator[Metric]:
        traces = self._service.traces
        kept = traces.counts
        name, text = "p2pdist_tracker_trace_entries", "Entry points of packages with recordings of lazy starts"
        yield GaugeMetricFamily(name, text, value=kept.entries)
        name, text = "p2pdist_tracker_trace_recordings", "Recordings of lazy starts that are kept"
        yield GaugeMetricFamily(name, text, value=kept.recordings)
        name, text = "p2pdist_tracker_trace_bytes", "Bytes of the recordings of lazy starts that are kept"
        yield GaugeMetricFamily(name, text, value=kept.bytes)
        text = "Traces that were made of recordings"
        yield CounterMetricFamily("p2pdist_tracker_traces_merged", text, value=traces.merged)
        name, text = "p2pdist_tracker_trace_requests", "Requests for a trace, by whether there is one"
        asked = CounterMetricFamily(name, text, labels=["result"])
        for result in ("found", "none"):
            asked.add_metric([result], traces.answered[result])
        yield asked


def registry(
    service: Service, view: View, preseeds: PreseedService | None = None, cluster: Cluster | None = None
) -> CollectorRegistry:
    """A registry with the metrics of a tracker, its process and its interpreter; `cluster` is None
    where it is alone."""
    made = CollectorRegistry()
    ProcessCollector(registry=made)
    PlatformCollector(registry=made)
    GCCollector(registry=made)
    made.register(TrackerCollector(service, view, preseeds, cluster))
    name, text = "p2pdist_tracker_plan_seconds", "Time to plan and assign after an event"
    service.observe_plan = Histogram(name, text, registry=made, buckets=PLAN_BUCKETS_S).observe
    name, text = "p2pdist_tracker_broadcast_seconds", "Time until a share of a broadcast's hosts was complete"
    times = Histogram(name, text, ["share"], registry=made, buckets=BROADCAST_BUCKETS_S)
    for share in SHARES:
        times.labels(share)
    service.history.observe = lambda share, seconds: times.labels(share).observe(seconds)
    return made
