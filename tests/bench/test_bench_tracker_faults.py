"""Broadcasts while something happens to the trackers: cases, what logs say, and the table."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import postgresql
import psycopg
import pytest

from bench.broadcast import Run
from bench.cases import Links
from bench.tracker_faults import CASES, broken, empty, look, table
from bench.yardstick.trackers import database_processes, parent, stopped

LINKS = Links()


def run_of(name: str, number: int, **figures: object) -> Run:
    [case] = [case for case in CASES if case.name == name]
    brought = [{"fault": "kill", "ended_s": 1.0}] * len([fault for fault in case.faults.split(",") if fault])
    broadcast = case.broadcast(LINKS)
    whole = {"makespan_s": broadcast.bound_s * 1.04, "origin_tx_x": 1.05, "broken": {}, "brought": brought, **figures}
    return Run("p2pdist", broadcast, number, whole)


def test_streams_that_broke_are_counted_by_reason() -> None:
    """As p2pdist/agent/pull/blob.py logs them."""
    lines = [
        "2026-01-01 info p2pdist.agent.pull.blob: stream from h3 (10.77.1.4:7071), stripe 1, ended: reset by peer",
        "stream from origin, stripe 0, ended: unavailable",
        "stream from h4, stripe 0, ended: reset ",
        "a tracker answers again",
    ]
    assert broken(lines) == {"reset": 2, "unavailable": 1}


def test_the_logs_of_a_run_are_read(tmp_path: Path) -> None:
    for host in ("h000", "h001", "c"):
        (tmp_path / host).mkdir()
        (tmp_path / host / "log").write_text("stream from h9, stripe 0, ended: stalled\n")
    (tmp_path / "c" / "log").write_text('{"fault": "kill", "at_s": 3.0}\nnot JSON\n{"fault": "kill", "ended_s": 3.1}\n')
    found = look(tmp_path)
    assert found["broken"] == {"stalled": 2}
    assert [entry["fault"] for entry in found["brought"]] == ["kill", "kill"]
    assert json.dumps(found)


def test_medians_and_goals_that_were_missed() -> None:
    runs = {
        "early": [run_of("early", number, origin_tx_x=copies) for number, copies in enumerate((1.05, 1.2, 1.06))],
        "late": [run_of("late", 0, broken={"reset": 2}), run_of("late", 1, origin_tx_x=1.3, brought=[])],
        "cut": [run_of("cut", 0, broken={"reset": 7}, origin_tx_x=1.1)],
        "freeze": [Run("p2pdist", CASES[0].broadcast(LINKS), 0, error="a copy is not what was sent")],
    }
    lines = {line.split("  ")[0]: line for line in table(LINKS, runs).splitlines()}
    assert "MISSED" not in lines["the owner is killed at 30 %"] and "1.060" in lines["the owner is killed at 30 %"]
    late = lines["the owner is killed at 60 %"]
    assert "no stream breaks" in late and "origin_tx_x goal 1.06" in late and "1 of 2 runs ended before" in late
    assert "MISSED" not in lines["cut from each other and from half"]
    assert "1 of 1 runs FAILED" in lines["the owner stands still for 6 s"]


def test_a_minute_without_the_database_passes_during_the_broadcast() -> None:
    [case] = [case for case in CASES if case.name == "database"]
    assert 0.9 * case.broadcast(LINKS).bound_s > 60.0


def test_processes_that_stand_still_go_on_whatever_happens() -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        with pytest.raises(KeyboardInterrupt), stopped([process.pid]):
            assert os.WIFSTOPPED(os.waitpid(process.pid, os.WUNTRACED)[1])
            raise KeyboardInterrupt
        process.communicate(b"\n")
    assert process.returncode == 0


@pytest.mark.slow
@pytest.mark.skipif(postgresql.binaries() is None, reason="PostgreSQL is not installed")
def test_the_server_of_a_database_is_found_and_emptied() -> None:
    """And no other server of the machine: two run here."""
    with postgresql.running_server() as url, postgresql.running_server() as other:
        ours, others = database_processes(url), database_processes(other)
        assert len(ours) > 1 and not {*ours} & {*others}
        assert all(parent(pid) in (ours[0], 0) for pid in ours[1:])
        with psycopg.connect(url, autocommit=True) as connection:
            connection.execute("CREATE TABLE cluster_ownership (body bytea)")
        empty(url)
        with psycopg.connect(url) as connection:
            assert connection.execute("SELECT to_regclass('cluster_ownership')").fetchone() == (None,)
