"""The load generator for trackers, with a few hosts: it opens real sessions, and says what it
measured."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.slow
def test_sixty_hosts_are_planned_and_report() -> None:
    words = ["--hosts", "60", "--pieces", "256", "--seconds", "1", "--report-interval", "0.5", "--json"]
    command = [sys.executable, "-m", "bench.tracker_load", *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["hosts"] == 60 and found["stripes"] == 2
    for name, phase in (("at-once", "join"), ("connecting", "connect")):
        assert found[name][phase]["assigns"] >= 60
        assert 0 < found[name][phase]["planned_s"] <= found[name][phase]["settled_s"]
        assert found[name]["steady"]["reports"] > 0 and found[name]["plans"] >= 1


@pytest.mark.slow
def test_a_list_that_hosts_vouch_for_goes_to_all() -> None:
    words = ["--hosts", "20", "--seconds", "1", "--join", "at-once", "--vouched", "--json"]
    command = [sys.executable, "-m", "bench.tracker_load", *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)["at-once"]["vouch"]
    assert found["listed"] == 20 * found["messages_per_host"] > 20
    assert found["listed_bytes"] >= 20 * 2048 * 40
    assert 0 < found["microseconds_per_host"] < found["milliseconds_per_listed"] * 1000
