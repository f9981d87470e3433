"""The agent's metrics, read from its state at scrape time. Labels are bounded: no host or blob
names."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from p2pdist.agent.agent import Agent

PULL_BUCKETS_S = (0.1, 0.5, 1, 2, 5, 10, 20, 60, 120, 300, 1200)


class AgentCollector(Collector):
    """Snapshots the agent."""

    def __init__(self, agent: Agent) -> None:
        self._agent = agent

    def collect(self) -> Iterator[Metric]:
        agent = self._agent
        received = CounterMetricFamily("p2pdist_agent_received_bytes", "Verified bytes received", labels=["source"])
        for source in ("origin", "peer", "bittorrent"):
            received.add_metric([source], agent.received_bytes[source])
        yield received
        sent = CounterMetricFamily("p2pdist_agent_sent_bytes", "Bytes sent to other agents", labels=["transport"])
        sent.add_metric(["trees"], agent.turns.sent_bytes_total)
        sent.add_metric(["bittorrent"], agent.swarming.sent_bytes if agent.swarming is not None else 0)
        yield sent
        rejected = CounterMetricFamily("p2pdist_agent_pieces_rejected", "Pieces that did not verify", labels=["reason"])
        for reason in ("corrupt",):
            rejected.add_metric([reason], agent.rejected[reason])
        yield rejected
        yield from self._store()
        yield GaugeMetricFamily("p2pdist_agent_streams", "Streams served to other agents", value=agent.turns.streams)
        yield from self._tracker()

    def _tracker(self) -> Iterator[Metric]:
        agent = self._agent
        yield GaugeMetricFamily(
            "p2pdist_agent_tracker_connected", "Whether a tracker answers", value=float(agent.session.connected)
        )
        yield GaugeMetricFamily(
            "p2pdist_agent_unreachable",
            "Whether other hosts cannot reach this one",
            value=float(bool(agent.reached.problem)),
        )
        name, text = (
            "p2pdist_agent_clock_ahead_seconds",
            "This host's clock less the tracker's; 0 where it is not known",
        )
        yield GaugeMetricFamily(name, text, value=agent.session.clock_ahead_s or 0.0)

    def _store(self) -> Iterator[Metric]:
        """The states add up to all that the store counts; what is held is part of them."""
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
        held = sum(
            blob.size for blob in self._agent.store.blobs() if blob.in_use or self._agent.store.owners(blob.digest)
        )
        name = "p2pdist_agent_store_held_bytes"
        yield GaugeMetricFamily(name, "Bytes of blobs that may not go: pinned, shown or being pulled", value=held)


def registry(agent: Agent) -> CollectorRegistry:
    """A registry with the agent's metrics."""
    made = CollectorRegistry()
    made.register(AgentCollector(agent))
    seconds = Histogram(
        "p2pdist_agent_pull_seconds", "Time of pulls that succeeded", registry=made, buckets=PULL_BUCKETS_S
    )
    agent.pulls.observe_seconds = seconds.observe
    return made
