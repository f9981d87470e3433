"""Benchmarks that are programs of their own: what is read from their documents, and how their
failures show."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from bench.__main__ import arguments
from bench.parts import Outcome, Part, loopback_lines, measure, simulated_lines, small_lines, tracker_lines


def stream(path: str, gb_s: float, **more: Any) -> dict[str, Any]:
    return {"path": path, "gb_s": gb_s, "rx_cpu_s_per_gib": 0.3, "tx_cpu_s_per_gib": 0.1, **more}


def test_streams_are_measured_against_the_better_nginx() -> None:
    """Plain ones against plain, those over TLS against TLS; whether a goal is met is for the
    program to say."""
    rows = [stream("nginx -> curl", 3.0), stream("streams", 1.0, met=True), stream("nginx -> curl", 4.0)]
    secured = [stream("nginx -> curl over TLS", 2.0), stream("TLS streams", 1.0, met=False)]
    nginx, plain, tls_nginx, tls = loopback_lines({"rows": rows, "tls_rows": secured})
    assert (nginx.bound, nginx.ratio, nginx.met) == ("4.00 GB/s", 1.0, None)
    assert (plain.ratio, plain.met) == (4.0, True)
    assert (tls_nginx.bound, tls.ratio, tls.met) == ("2.00 GB/s", 2.0, False)
    assert tls.measured == "1.00 GB/s, 0.40 CPU-s/GiB"


def test_streams_without_nginx_have_no_bound() -> None:
    [line] = loopback_lines({"rows": [stream("streams, 64 KiB pieces", 1.0)]})
    assert (line.bound, line.ratio, line.goal, line.met) == ("no nginx or curl", None, "", None)


def tracker_document(planned_s: float, share: float) -> dict[str, Any]:
    connect = {"accept_s": 4.0, "tracker_cpu_s": 2.0}
    join = {"planned_s": planned_s, "tracker_cpu_s": 3.0, "silent_s": 0.5}
    steady = {"reports": 20_000, "wall_s": 10.0, "tracker_share": share, "microseconds_per_report": 100.0}
    return {"hosts": 10_000, "at-once": {"connect": connect, "join": join, "steady": steady}}


def test_tracker_is_measured_against_its_core() -> None:
    accepted, joined, silent, reports = tracker_lines(tracker_document(4.5, 0.2))
    assert (accepted.what, accepted.ratio) == ("10,000 sessions accepted", 2.0)
    assert (joined.ratio, joined.met) == (1.5, True)
    assert silent.met is True
    assert (reports.what, reports.bound, reports.ratio) == ("  2,000 reports/s", "10,000/s", 0.2)
    assert [line.met for line in tracker_lines(tracker_document(11.0, 0.6))] == [None, False, True, False]


def test_a_small_blob_has_the_goal_that_its_program_names() -> None:
    document = {"hosts": 200, "size": 65536, "last_s": 0.6, "cpu_s": 0.5, "goal_s": 0.5}
    assert [line.met for line in small_lines(document)] == [False]
    assert [line.met for line in small_lines(document | {"last_s": 0.4})] == [True]


def test_simulated_ratio_has_a_goal() -> None:
    document = {"makespan_s": 10.6, "bound_s": 10.0, "ratio": 1.06, "origin_ratio": 1.0}
    assert [line.met for line in simulated_lines(document)] == [False, None]


def program(tmp_path: Path, text: str) -> Part:
    file = tmp_path / "program.py"
    file.write_text(text)
    return Part("a part", (sys.executable, str(file)), simulated_lines, file)


def test_a_part_that_works(tmp_path: Path) -> None:
    document = {"makespan_s": 10.2, "bound_s": 10.0, "ratio": 1.02, "origin_ratio": 1.0}
    outcome = measure(program(tmp_path, f"print('''{json.dumps(document)}''')"))
    assert not outcome.error
    assert outcome.document == document
    assert "1.02" in outcome.table()


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("import sys; sys.exit('the disk is full')", "exit code 1: the disk is full"),
        ("print('no json')", "is not one JSON document"),
        ("print('{}')", "lacks what is read from it: KeyError('ratio')"),
    ],
)
def test_a_part_that_fails_says_why(tmp_path: Path, text: str, error: str) -> None:
    outcome = measure(program(tmp_path, text))
    assert error in outcome.error
    assert "FAILED" in outcome.table()


def test_a_part_that_is_not_there(tmp_path: Path) -> None:
    part = program(tmp_path, "")
    assert part.file is not None
    part.file.unlink()
    assert "program.py is missing" in measure(part).error


def test_missed_goals_show_in_the_table() -> None:
    lines = simulated_lines({"makespan_s": 10.6, "bound_s": 10.0, "ratio": 1.06, "origin_ratio": 1.0})
    assert "at most 1.05 x  MISSED" in Outcome("streams", lines, {}).table()


def test_yardstick_comes_from_a_variable_and_sizes_from_quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("YARDSTICK", "some/swarm.py")
    chosen = arguments(["--quick", "--size-mib", "4"])
    assert (chosen.yardstick, chosen.hosts, chosen.size_mib, chosen.repeat) == (Path("some/swarm.py"), 8, 4, 1)
    monkeypatch.delenv("YARDSTICK")
    usual = arguments([])
    assert (usual.yardstick, usual.hosts, usual.size_mib, usual.repeat) == (None, 24, 64, 3)
    assert usual.case == ["uniform"]
