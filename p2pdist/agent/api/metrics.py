"""The agent's metrics, read from its state at scrape time. Labels are bounded: no host or blob
names. They stand apart from the routes, since routes and metrics read the agent for different
readers, and grow apart."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from importlib.metadata import version

from prometheus_client import CollectorRegistry, GCCollector, Histogram, PlatformCollector, ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from p2pdist.agent.agent import Agent
from p2pdist.agent.api.hub import hub_metrics
from p2pdist.agent.api.mirror import mirror_metrics
from p2pdist.agent.api.s3 import s3_metrics
from p2pdist.agent.pull.pulls import Pull
from p2pdist.model.errors import slugs
from p2pdist.model.messages import MOUNT_METHODS
from p2pdist.mount.records import IMAGES, LAZY
from p2pdist.store.disk import disk_bytes
from p2pdist.store.store import evictions

PULL_BUCKETS_S = (0.1, 0.5, 1, 2, 5, 10, 20, 60, 120, 300, 1200)
STALL_BUCKETS_S = (0.001, 0.005, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 20, 60)
METHODS = ("squashfs", *MOUNT_METHODS, IMAGES, LAZY, "other")
"""How packages are shown, as labels."""


class PullCounts:
    """What became of an agent's pulls, by the reason of failures, and of which bytes they were."""

    def __init__(self) -> None:
        self.failed = dict.fromkeys(slugs(), 0)
        self.bytes = {"store": 0, "peer": 0, "origin": 0}

    def count(self, pull: Pull) -> None:
        """A pull has ended."""
        if pull.error is not None:
            self.failed[pull.error.slug] = self.failed.get(pull.error.slug, 0) + 1
            return
        status = pull.status()
        self.bytes["store"] += status.bytes_cached
        self.bytes["peer"] += status.bytes_peers
        self.bytes["origin"] += status.bytes_origin + status.bytes_upstream


class AgentCollector(Collector):
    """The metrics of an agent, as a snapshot of its state."""

    def __init__(self, agent: Agent) -> None:
        self._agent = agent
        self._ended = PullCounts()
        agent.pulls.observe(self._ended.count)

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
        yield from build_info()
        yield from self._store()
        yield from self._pulls()
        yield from mirror_metrics(agent.mirrored)
        yield from s3_metrics(agent.s3_counts)
        yield from hub_metrics(agent.doored)
        yield from self._lazy()
        yield GaugeMetricFamily("p2pdist_agent_streams", "Streams served to other agents", value=agent.uplink.streams)
        yield from self._tracker()

    def _pulls(self) -> Iterator[Metric]:
        """Pulls and what shows their packages."""
        agent = self._agent
        running = GaugeMetricFamily("p2pdist_agent_pulls", "Pulls that have not ended", labels=["state"])
        states = Counter(pull.state for pull in agent.pulls.list())
        for state in ("waiting", "running"):
            running.add_metric([state], states[state])
        yield running
        failed = CounterMetricFamily("p2pdist_agent_pulls_failed", "Pulls that failed, by reason", labels=["reason"])
        for reason, number in self._ended.failed.items():
            failed.add_metric([reason], number)
        yield failed
        name, text = "p2pdist_agent_pulled_bytes", "Bytes of pulls that succeeded, by where they were"
        came = CounterMetricFamily(name, text, labels=["source"])
        for source, number in self._ended.bytes.items():
            came.add_metric([source], number)
        yield came
        text = "Bytes of encrypted packages that were opened"
        yield CounterMetricFamily("p2pdist_agent_decrypted_bytes", text, value=agent.sealed.bytes_decrypted)
        text = "Blobs and trees that went from the store to make room"
        yield CounterMetricFamily("p2pdist_agent_evictions", text, value=evictions(agent.store))
        mounts = GaugeMetricFamily("p2pdist_agent_mounts", "Views of packages, by how they are shown", labels=["way"])
        ways = Counter(mount.how if mount.how in METHODS else "other" for mount in agent.mounts.list())
        for way in METHODS:
            mounts.add_metric([way], ways[way])
        yield mounts

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
        disk = GaugeMetricFamily("p2pdist_agent_disk_bytes", "Bytes of the store's file system", labels=["state"])
        disk.add_metric(["free"], usage.disk_free)
        disk.add_metric(["total"], disk_bytes(self._agent.store.root))
        yield disk
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


def build_info() -> Iterator[Metric]:
    """The version that runs, as the one label of a metric that is always 1."""
    info = GaugeMetricFamily("p2pdist_build_info", "The version of p2pdist that runs", labels=["version"])
    info.add_metric([version("p2pdist")], 1.0)
    yield info


def registry(agent: Agent) -> CollectorRegistry:
    """A registry with the metrics of an agent, its process and its interpreter."""
    made = CollectorRegistry()
    ProcessCollector(registry=made)
    PlatformCollector(registry=made)
    GCCollector(registry=made)
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
