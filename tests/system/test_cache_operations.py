"""Whole agents under a quota: whatever is done in whatever order, and whenever they are killed,
nothing is lost that is pinned, shown or on its way, and what is shown is what was packed."""

from __future__ import annotations

import faulthandler
import os
import subprocess
import tempfile
import threading
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path

import pytest
from cache_rig import Host, Stopped, publish
from site_rig import Agent, Site, running_site, wait_for

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="mounting needs root")

CAPACITY = 6 << 20
"""A third of what all packages take: what is kept and on its way may need more, and then there is
no room."""


@pytest.fixture
def place() -> Iterator[Path]:
    """A directory on a disk, with a short name; whatever is still mounted below it is taken
    away."""
    with tempfile.TemporaryDirectory(prefix="p2pdist-") as directory:
        yield Path(directory)
        left = subprocess.run(["findmnt", "-rn", "-o", "TARGET"], capture_output=True, text=True).stdout
        for point in reversed([line for line in left.splitlines() if line.startswith(f"{directory}/")]):
            subprocess.run(["umount", "-l", point], check=False)


def start_tracker(site: Site) -> None:
    """One that names the directory as the origin."""
    log = site.directory / "tracker.log"
    words = ["tracker", "--listen", f"127.0.0.1:{site.tracker_port}", "--origin", f"file://{site.layout}"]
    wait_for(site.tracker_url + "/readyz", site.spawn([*words, "--state", str(site.directory / "state")], log), log)


def operate(place: Path, *, agents: int, operations: int, seed: int) -> Counter[str]:
    """Do so many things in all, by as many threads as there are agents; what was done how often."""
    with running_site(place, tracker=False) as site:
        packages = publish(site.layout, place / "sources")
        assert sum(package.bytes_max for package in packages) > 2 * CAPACITY
        start_tracker(site)
        stopped = threading.Event()
        started: list[Agent] = site.agents(agents, capacity=str(CAPACITY), log_level="warning", transport="trees")
        hosts = [Host(agent, packages, CAPACITY, seed + number, stopped) for number, agent in enumerate(started)]
        with ThreadPoolExecutor(agents) as threads:
            runs = [threads.submit(host.run, operations // agents) for host in hosts]
            wait(runs)
        failures = [failure for run in runs if (failure := run.exception()) is not None]
        for failure in sorted(failures, key=lambda failure: isinstance(failure, Stopped)):
            raise failure
        counted: Counter[str] = sum((host.counted for host in hosts), Counter())
    return counted


@pytest.mark.slow
def test_nothing_kept_is_lost(place: Path) -> None:
    """A few hundred operations on two agents."""
    counted = operate(place, agents=2, operations=200, seed=11)
    assert counted["mount"] and counted["pin"] and counted["remove"]


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_nothing_kept_is_lost_in_ten_thousand_operations(place: Path) -> None:
    """On three agents. P2PDIST_SEED tells another story."""
    faulthandler.cancel_dump_traceback_later()  # it looks into threads that are running, and takes longer than a test should
    counted = operate(place, agents=3, operations=10_000, seed=int(os.environ.get("P2PDIST_SEED", "1")))
    print(dict(sorted(counted.items())))
    assert counted["crash"] + counted["crash_amid"] >= 50
    assert counted["no room"] < 0.2 * (counted["pull"] + counted["pull_and_wait"] + counted["mount"])
