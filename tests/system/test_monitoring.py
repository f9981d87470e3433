"""Dashboards and alerts with a real Prometheus over a live swarm: every panel shows something,
alerts fire when there is a cause and not otherwise."""

from __future__ import annotations

import json
import math
import os
import re
import urllib.request

import pytest
from lazy_marks import events_work
from prometheus_rig import PROMETHEUS, ROOT, WINDOW, Prometheus, running_prometheus
from site_rig import Agent, Site, free_port, until, wait_for
from test_lazy_views import View, nothing_stays, source  # noqa: F401

from p2pdist.agent.api.client import LocalClient

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(PROMETHEUS is None, reason="needs prometheus (Debian package prometheus)"),
]

MIB = 1 << 20
BUDGET = 2 * MIB


def expressions() -> list[str]:
    """What the panels of all dashboards ask, with every host chosen."""
    found = []
    for file in sorted((ROOT / "grafana" / "dashboards").glob("*.json")):
        for panel in json.loads(file.read_text())["panels"]:
            for target in panel["targets"]:
                expr = target["expr"].replace("$__rate_interval", WINDOW)
                found.append(re.sub(r"\$(instance|tracker|zone)", ".*", expr))
    return found


def has_numbers(prometheus: Prometheus, expr: str) -> bool:
    return any(math.isfinite(float(sample["value"][1])) for sample in prometheus.query(expr))


def test_every_panel_shows_something_and_a_sound_swarm_raises_no_alert(
    site: Site, request: pytest.FixtureRequest
) -> None:
    """Readers wait in a lazy view where this host has such views: without them the quantiles of
    their waits are of nothing."""
    if events_work():
        request.getfixturevalue("source")
    agents = site.agents(4, zone="a", rack="r1")
    with running_prometheus() as prometheus:
        prometheus.watch([f"127.0.0.1:{site.tracker_port}"], [f"127.0.0.1:{agent.port}" for agent in agents])
        until(lambda: prometheus.query("sum(p2pdist_agent_streams >= 0)") and len(prometheus.query("up == 1")) == 5)
        for agent in agents:
            agent.pull(blob=site.publish(MIB // 4))
        if events_work():
            (View(agents[0]).path / "weights.bin").read_bytes()
        site.origin.rate_bytes_s = MIB
        digest = site.publish(16 * MIB)
        pulls = [agent.start_pull(blob=digest) for agent in agents]
        lacking = [expr for expr in expressions() if events_work() or "lazy_stall" not in expr]
        assert len(lacking) > 40

        def shown() -> bool:
            lacking[:] = [expr for expr in lacking if not has_numbers(prometheus, expr)]
            return not lacking

        try:
            until(shown)
        except AssertionError:
            raise AssertionError("nothing is shown by:\n" + "\n".join(lacking)) from None
        assert prometheus.firing() == {}
        site.origin.rate_bytes_s = 0
        for pull in pulls:
            pull.result()
        assert prometheus.firing() == {}


def test_alerts_fire_when_the_origin_is_bypassed_a_peer_corrupts_and_a_store_is_full(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    site.kill_tracker()
    monkeypatch.setenv("P2PDIST_TRACKER_ORIGIN_LIMIT", f"{BUDGET}B/s")
    site.start_tracker()
    agents = site.agents(3)
    small = Agent(site, "small", capacity=f"{4 * MIB + 7 * MIB // 8}B").start()
    monkeypatch.delenv("P2PDIST_TRACKER_ORIGIN_LIMIT")
    everybody = [*agents, small]
    with running_prometheus() as prometheus:
        prometheus.watch([f"127.0.0.1:{site.tracker_port}"], [f"127.0.0.1:{agent.port}" for agent in everybody])
        until(lambda: len(prometheus.query("up == 1")) == 5)
        digest = site.publish(4 * MIB + MIB // 2)
        for pull in [agent.start_pull(blob=digest) for agent in agents]:
            pull.result()
        until(lambda: has_numbers(prometheus, "p2pdist:origin_read_bytes:rate1m > 0"))
        assert prometheus.firing() == {}

        pin(small, digest)
        until(lambda: prometheus.firing() == {"P2PDistStoreFull": {f"127.0.0.1:{small.port}"}})
        small.stop()
        prometheus.watch([f"127.0.0.1:{site.tracker_port}"], [f"127.0.0.1:{agent.port}" for agent in agents])
        until(lambda: prometheus.firing() == {})

        for holder in agents:
            spoil(holder, digest)
        agents.append(Agent(site, "late").start())
        prometheus.watch([f"127.0.0.1:{site.tracker_port}"], [f"127.0.0.1:{agent.port}" for agent in agents])
        until(lambda: len(prometheus.query("up == 1")) == 5)
        site.origin.rate_bytes_s = MIB
        agents[3].pull(blob=digest)
        assert agents[3].metric("p2pdist_agent_pieces_rejected_total") > 0
        until(lambda: prometheus.firing() == {"P2PDistCorruptPieces": {f"127.0.0.1:{agents[3].port}"}})
        until(lambda: prometheus.firing() == {})

        site.origin.rate_bytes_s = 0
        large = site.publish(64 * MIB)
        stray = stray_agent(site).start()
        watched = [f"127.0.0.1:{agent.port}" for agent in [*agents, stray]]
        prometheus.watch([f"127.0.0.1:{site.tracker_port}"], watched)
        until(lambda: len(prometheus.query("up == 1")) == 6)
        pulling = stray.start_pull(blob=large)
        until(lambda: prometheus.firing() == {"P2PDistOriginOverBudget": {""}})
        pulling.result()
        until(lambda: prometheus.firing() == {})


def stray_agent(site: Site) -> Agent:
    """An agent that follows another tracker, which knows no budget, and reads the same origin past
    its server."""
    port = free_port()
    log = site.directory / "stray.log"
    words = ["tracker", "--listen", f"127.0.0.1:{port}", "--origin", f"file://{site.layout}"]
    wait_for(f"http://127.0.0.1:{port}/readyz", site.spawn(words, log), log)
    return Agent(site, "stray", tracker=f"http://127.0.0.1:{port}")


def pin(agent: Agent, digest: str) -> None:
    LocalClient(agent.socket).pin("blob:" + digest.replace(":", "-"))


def spoil(agent: Agent, digest: str) -> None:
    """Other bytes where a complete blob is stored, behind the agent's back."""
    path = agent.store / "blobs" / "sha256" / digest.removeprefix("sha256:")
    size = path.stat().st_size
    path.chmod(0o600)
    with path.open("r+b") as file:
        file.write(os.urandom(size))


def test_the_metrics_say_what_the_interface_promises(site: Site) -> None:
    (agent,) = site.agents(1)
    agent.pull(blob=site.publish(MIB))
    for url in (site.tracker_url, agent.url):
        with urllib.request.urlopen(url + "/metrics", timeout=60) as answer:
            assert answer.headers["Content-Type"].startswith("text/plain")
    assert agent.metric('p2pdist_agent_received_bytes_total{source="origin"}') == MIB
    assert agent.metric('p2pdist_agent_store_bytes{state="complete"}') == MIB
    assert agent.metric("p2pdist_agent_pull_seconds_count") == 1
