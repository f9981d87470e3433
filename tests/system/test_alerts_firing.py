"""Alerts for what an operator is to mend, in a real Prometheus over a fleet of processes: none
fires before its fault is made, each then names the process that it is about, and ends with the
fault."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import programs
import pytest
from prometheus_rig import PROMETHEUS, Prometheus, running_prometheus
from site_rig import Agent, running_site, until
from test_faults_named import Fleet, Origin

from p2pdist.model.errors import P2PDistError

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(PROMETHEUS is None, reason="needs prometheus (Debian package prometheus)"),
    pytest.mark.skipif(os.geteuid() != 0, reason="mounts a file system"),
]

MIB = 1 << 20
FAILED_PULLS = 8
WITHIN_S = 300.0
INTERVAL, WINDOW, PAUSE = "10s", "50s", "30s"
"""On a busy machine an answer may take seconds: an agent that gives none to three scrapes, each
with ten seconds for it, is down."""


class Watch:
    """A Prometheus, and what it is to say of a fleet."""

    def __init__(self, prometheus: Prometheus, fleet: Fleet) -> None:
        self.prometheus, self.fleet = prometheus, fleet
        self.tracker = f"127.0.0.1:{fleet.site.tracker_port}"

    @contextmanager
    def fault(self, alert: str, *instances: str) -> Iterator[None]:
        """A fault is made in the block: its alert has not fired before, and fires then, about just
        these instances. It may have ended by itself meanwhile."""
        assert alert not in self.prometheus.fired(), self.prometheus.fired()
        yield
        try:
            until(lambda: self.prometheus.fired().get(alert), within_s=WITHIN_S)
        except AssertionError:
            raise AssertionError(f"{alert} does not fire; these do: {self.prometheus.firing()}") from None
        until(lambda: self.prometheus.fired()[alert] == set(instances), alert, within_s=WITHIN_S)

    def ends(self, alert: str) -> None:
        """Wait until an alert fires no more."""
        until(lambda: alert not in self.prometheus.firing(), f"the end of {alert}", within_s=WITHIN_S)


@contextmanager
def small_disk(directory: Path, size: int) -> Iterator[Path]:
    directory.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", directory], check=True)
    try:
        yield directory
    finally:
        subprocess.run(["umount", "--lazy", directory], check=True)


@pytest.mark.timeout(1800)
def test_each_fault_fires_its_alert_and_none_before(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", 32 * MIB) as disk, running_site(tmp_path, tracker=False) as site:
        site.origin.stop()
        site.origin = Origin(site.layout)
        site.origin.start()
        fleet = Fleet(site)
        fleet.start()
        small = Agent(site, "small", store=str(disk / "store"), zone="eu-1").start()
        addresses = [f"127.0.0.1:{agent.port}" for agent in (*fleet.agents, small)]
        tracker = f"127.0.0.1:{site.tracker_port}"
        with running_prometheus([tracker], addresses, interval=INTERVAL, window=WINDOW, pause=PAUSE) as prometheus:
            until(lambda: len(prometheus.query("up == 1")) == 6)
            until(lambda: prometheus.query("p2pdist_tracker_origin_reachable == 1"))
            watch = Watch(prometheus, fleet)
            a_disk_that_is_nearly_full(watch, disk, addresses[4])
            a_policy_that_is_wrong(watch)
            pulls_that_fail(watch)
            a_preseed_that_fails(watch)
            an_origin_that_is_away(watch)
            an_agent_that_is_gone(watch, addresses[3])
            many_hosts_with_slow_links(watch)


def a_disk_that_is_nearly_full(watch: Watch, disk: Path, address: str) -> None:
    filler = disk / "filler"
    with watch.fault("P2PDistDiskNearlyFull", address):
        filler.write_bytes(bytes(31 * MIB))
    filler.unlink()
    watch.ends("P2PDistDiskNearlyFull")


def a_policy_that_is_wrong(watch: Watch) -> None:
    with watch.fault("P2PDistPoliciesStale", watch.tracker):
        watch.fleet.policies.write_text('[[policy]]\nmatch = ["team/*"]\nkeeps = "1h"\n')
    watch.fleet.policies.write_text("")
    watch.ends("P2PDistPoliciesStale")


def pulls_that_fail(watch: Watch) -> None:
    packages = [f"team/no-{number}:v1" for number in range(FAILED_PULLS)]
    with watch.fault("P2PDistPullsFail", watch.tracker):
        for pull in [agent.start_pull(package=package) for package in packages for agent in watch.fleet.agents]:
            with pytest.raises(P2PDistError):
                pull.result(WITHIN_S)
    watch.ends("P2PDistPullsFail")


def a_preseed_that_fails(watch: Watch) -> None:
    watch.fleet.push("team/zone:v1", MIB)
    words = ("--selector", "zone=eu-2", "--deadline", "1s", "--tracker", watch.fleet.site.tracker_url)
    with watch.fault("P2PDistPreseedFailed", watch.tracker):
        programs.run("preseed", "team/zone:v1", *words)
    watch.ends("P2PDistPreseedFailed")


def an_origin_that_is_away(watch: Watch) -> None:
    site = watch.fleet.site
    port = site.origin.port
    with watch.fault("P2PDistOriginUnreachable", watch.tracker):
        site.origin.stop()
    site.origin = Origin(site.layout)
    site.origin.port = port
    site.origin.start()
    watch.ends("P2PDistOriginUnreachable")


def an_agent_that_is_gone(watch: Watch, address: str) -> None:
    victim = watch.fleet.agents[3]
    with watch.fault("P2PDistAgentDown", address):
        victim.kill()
    victim.start()
    watch.ends("P2PDistAgentDown")


def many_hosts_with_slow_links(watch: Watch) -> None:
    """Three hosts of eight take next to nothing. The alert outlasts them: trackers remember a slow
    link for minutes."""
    site = watch.fleet.site
    slow = [Agent(site, f"slow-{number}", zone="eu-1", download_limit="200KB/s").start() for number in range(3)]
    watch.fleet.push("team/slow:v1", 48 * MIB)
    site.origin.rate_bytes_s = 4 * MIB
    with watch.fault("P2PDistManySlowHosts", watch.tracker):
        for agent in (*watch.fleet.agents, *slow):
            agent.start_pull(package="team/slow:v1")
    site.origin.rate_bytes_s = 0
    for agent in slow:
        agent.kill()
