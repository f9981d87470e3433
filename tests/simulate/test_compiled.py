"""Compiled cores are the same source and decide the same."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

RUN = """
from dataclasses import replace
import p2pdist.core.uplink, p2pdist.simulate.network, tracker.core.fleet
from p2pdist.simulate.faults import TrackerLoss, TrackerLosses, schedule
from p2pdist.simulate.scenario import Scenario, crash_share, slow_share
from p2pdist.simulate.simulation import Simulation
for module in (p2pdist.core.uplink, p2pdist.simulate.network, tracker.core.fleet):
    print(module.__file__)
base = Scenario(60, 96 * 65536, 1e6, racks=6, rack_bytes_s=2e6, zones=3, arrivals="ramp", arrivals_s=2.0)
sites = replace(base, sites=3, wan_bytes_s=3e6, wan_s=0.04, origin_sites=frozenset(["s0"]))
faults = (*slow_share(base, 0.1, 0.1), *crash_share(base, 0.05))
names = base.host_names()
for scenario in (
    replace(base, faults=(*faults, TrackerLosses(3.0, 0.5))),
    replace(sites, faults=crash_share(sites, 0.05)),
    replace(base, faults=schedule(7, names, pieces=96, duration_s=4.0), blobs=2, preseeds=1),
    replace(base, transport="auto", faults=(TrackerLoss(3.0, 20.0),)),
    replace(base, vouched=True, size=32 << 20, nic_bytes_s=4e6),
    replace(base, trackers=3, faults=(TrackerLoss(2.0, 4.0),)),
):
    print(Simulation(scenario).run())
"""


def run(*command: str | Path, **variables: str) -> str:
    environment = {**os.environ, **variables}
    done = subprocess.run(command, env=environment, cwd="/", capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_a_compiled_wheel_runs_as_its_source_does(tmp_path: Path) -> None:
    """Every figure and every fingerprint is the same, and each part was indeed compiled."""
    source, site = tmp_path / "source", tmp_path / "site"
    for room in ("p2pdist", "tracker"):
        shutil.copytree(ROOT / room, source / room, ignore=shutil.ignore_patterns("__pycache__", "*.so"))
    for name in ("setup.py", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    pip = (sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet")
    build = (*pip, "wheel", "--no-build-isolation", "--no-deps", "--no-index", "--wheel-dir", tmp_path, source)
    run(*build, P2PDIST_COMPILED="quick")
    (wheel,) = tmp_path.glob("*.whl")
    assert not wheel.stem.endswith("none-any"), "a compiled wheel is for one interpreter"
    run(*pip, "install", "--no-deps", "--no-index", "--target", site, wheel)
    plain = run(sys.executable, "-c", RUN, PYTHONPATH=str(ROOT)).splitlines()
    compiled = run(sys.executable, "-c", RUN, PYTHONPATH=str(site)).splitlines()
    assert [Path(line).suffix for line in plain[:3]] == [".py"] * 3
    assert [Path(line).suffix for line in compiled[:3]] == [".so"] * 3
    assert all(Path(line).is_relative_to(site) for line in compiled[:3])
    assert compiled[3:] == plain[3:]
    assert sum("fingerprint" in line for line in plain) == 6


def test_a_build_says_which_words_it_knows() -> None:
    """Whatever else the variable says, an operator that asks for compiled cores gets them or hears
    of it."""
    command = (sys.executable, "setup.py", "--name")
    environment = {**os.environ, "P2PDIST_COMPILED": "yes"}
    done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode != 0
    assert "P2PDIST_COMPILED is 'yes': say 1 to compile the cores" in done.stderr
