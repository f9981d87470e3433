"""The agent's metrics, read from its state at scrape time. Labels are bounded: no host or blob
names. They stand apart from the routes, since routes and metrics read the agent for different
readers, and grow apart."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from p2pdist.agent.agent import Agent
from p2pdist.agent.api.hub import hub_metrics
from p2pdist.agent.api.mirror import mirror_metrics
from p2pdist.agent.api.s3 import s3_metrics

PULL_BUCKETS_S = (0.1, 0.5, 1, 2, 5, 10, 20, 60, 120, 300, 1200)
STALL_BUCKETS_S = (0.001, 0.005, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 20, 60)


class AgentCollector(Collector):
    """The metrics of an agent, as a snapshot of its state."""

    def __init__(self, agent: Agent) -> None:
        self._agent = agent

    def collect(self) -> Iterator[Metric]:
        """The figures of this moment, at each scrape."""
        agent = self._agent
        received = CounterMetricFamily("p2pdist_agent_received_bytes", "Verified bytes received", labels=["source"])
        for source in ("origin", "upstream", "peer", "bittorrent"):
            received.add_metric([source], agent.resources.received_bytes[source])
        yield received
        yield CounterMetricFamily(
            "p2pdist_agent_received_twice_bytes",
            "Bytes of pieces that had come already",
            value=agent.resources.received_bytes["twice"],
        )
        sent = CounterMetricFamily("p2pdist_agent_sent_bytes", "Bytes sent to other agents", labels=["transport"])
        sent.add_metric(["trees"], agent.uplink.sent_bytes_total)
        sent.add_metric(["bittorrent"], agent.swarming.sent_bytes if agent.swarming is not None else 0)
        yield sent
        rejected = CounterMetricFamily("p2pdist_agent_pieces_rejected", "Pieces that did not verify", labels=["reason"])
        for reason in ("corrupt",):
            rejected.add_metric([reason], agent.resources.rejected[reason])
        yield rejected
        yield from self._store()
        yield from mirror_metrics(agent.mirrored)
        yield from s3_metrics(agent.s3_counts)
        yield from hub_metrics(agent.doored)
        yield from self._lazy()
        yield GaugeMetricFamily("p2pdist_agent_streams", "Streams served to other agents", value=agent.uplink.streams)
        yield from self._tracker()

    def _lazy(self) -> Iterator[Metric]:
        """Views whose contents come while they are read."""
        lazy = self._agent.lazy
        statuses = lazy.all()
        views = GaugeMetricFamily("p2pdist_agent_lazy_views", "Lazy views that are mounted", labels=["state"])
        whole = sum(status.whole for status in statuses)
        views.add_metric(["whole"], whole)
        views.add_metric(["filling"], len(statuses) - whole)
        yield views
        yield GaugeMetricFamily(
            "p2pdist_agent_lazy_awaited_bytes",
            "Bytes that readers of lazy views wait for",
            value=sum(status.bytes_awaited for status in statuses),
        )
        yield CounterMetricFamily(
            "p2pdist_agent_lazy_refused",
            "Reads of lazy views that failed since their bytes did not come",
            value=lazy.stalls.refused,
        )
        prefetched = CounterMetricFamily(
            "p2pdist_agent_lazy_prefetched_bytes",
            "Bytes filled by a trace before they were read, and those of them that were read since",
            labels=["state"],
        )
        for state in ("filled", "read"):
            prefetched.add_metric([state], lazy.traces.prefetched[state])
        yield prefetched

    def _tracker(self) -> Iterator[Metric]:
        agent = self._agent
        yield GaugeMetricFamily(
            "p2pdist_agent_tracker_connected", "Whether a tracker answers", value=float(agent.session.connected)
        )
        yield GaugeMetricFamily(
            "p2pdist_agent_unreachable",
            "Whether other hosts cannot reach this one",
            value=float(bool(agent.reachability.problem)),
        )
        name, text = (
            "p2pdist_agent_clock_ahead_seconds",
            "This host's clock less the tracker's; 0 where it is not known",
        )
        yield GaugeMetricFamily(name, text, value=agent.session.clock_ahead_s or 0.0)

    def _store(self) -> Iterator[Metric]:
        """The states add up to all bytes that the store counts; held bytes are part of them."""
        usage = self._agent.store.usage()
        store = GaugeMetricFamily("p2pdist_agent_store_bytes", "Bytes in the store", labels=["state"])
        store.add_metric(["complete"], usage.bytes_complete)
        store.add_metric(["partial"], usage.bytes_partial)
        store.add_metric(["small"], usage.bytes_small)
        store.add_metric(["objects"], usage.bytes_objects)
        store.add_metric(["expected"], usage.bytes_expected)
        store.add_metric(["images"], usage.bytes_images)
        store.add_metric(["variants"], usage.bytes_variants)
        yield store
        capacity = usage.capacity if usage.capacity is not None else usage.bytes_total + usage.disk_free
        yield GaugeMetricFamily("p2pdist_agent_store_capacity_bytes", "Bytes that the store may hold", value=capacity)
        yield from self._rest()
        held = sum(
            blob.size for blob in self._agent.store.blobs() if blob.in_use or self._agent.store.pins.owners(blob.digest)
        )
        name = "p2pdist_agent_store_held_bytes"
        yield GaugeMetricFamily(name, "Bytes of blobs that may not go: pinned, shown or being pulled", value=held)

    def _rest(self) -> Iterator[Metric]:
        """What is read again of what is stored."""
        scrub = self._agent.scrub
        status = scrub.status()
        yield CounterMetricFamily(
            "p2pdist_agent_store_damaged",
            "Stored things that had changed and were dropped",
            value=sum(status.damaged.values()),
        )
        yield CounterMetricFamily(
            "p2pdist_agent_scrub_checked", "Stored things that the scrub has read", value=scrub.checked
        )
        yield CounterMetricFamily(
            "p2pdist_agent_scrub_bytes", "Bytes that the scrub has read", value=scrub.bytes_checked
        )
        yield CounterMetricFamily(
            "p2pdist_agent_scrub_wrong", "Stored things that the scrub found wrong", value=scrub.wrong
        )
        yield GaugeMetricFamily(
            "p2pdist_agent_scrub_running",
            "Whether a round of the scrub is under way",
            value=float(status.running),
        )
        yield GaugeMetricFamily(
            "p2pdist_agent_scrub_ended_timestamp_seconds",
            "When a round of the scrub ended last, in seconds since the epoch; 0 for never",
            value=status.ended,
        )


def registry(agent: Agent) -> CollectorRegistry:
    """A registry with the agent's metrics."""
    made = CollectorRegistry()
    made.register(AgentCollector(agent))
    seconds = Histogram(
        "p2pdist_agent_pull_seconds", "Time of pulls that succeeded", registry=made, buckets=PULL_BUCKETS_S
    )
    agent.pulls.observe(lambda pull: seconds.observe(pull.seconds or 0.0) if pull.state == "done" else None)
    stalls = Histogram(
        "p2pdist_agent_lazy_stall_seconds",
        "Time that reads of lazy views waited for their bytes",
        registry=made,
        buckets=STALL_BUCKETS_S,
    )
    agent.lazy.stalls.observe(stalls.observe)
    return made
