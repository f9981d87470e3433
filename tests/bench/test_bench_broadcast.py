"""Broadcasts: whose turn it is, what a run's output means, what the tables say."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from bench.broadcast import Run, failure, goal_notes, last_line, notes, of_ours, row, side_by_side, turns
from bench.cases import Links, cases
from bench.methods import METHODS, one_by_one_s

LINKS = Links()
[UNIFORM] = cases("uniform", LINKS)
OURS, LIBTORRENT, HTTP = (
    next(each for each in METHODS if each.name == name) for name in ("p2pdist", "libtorrent", "http")
)


def a_run(number: int = 0, method: str = "p2pdist", **figures: Any) -> Run:
    usual = {
        "verified": True,
        "makespan_s": 14.74,
        "origin_tx_x": 1.05,
        "total_tx_x": 1.06,
        "agents_cpu_s_per_gib": 5.5,
        "idle_pct": 60.0,
    }
    return Run(method, UNIFORM, number, usual | figures)


def test_methods_take_turns() -> None:
    """A B C A B, where C is run once."""
    order = [(turn.method.name, turn.number) for turn in turns([OURS, LIBTORRENT, HTTP], [UNIFORM], 2)]
    assert order == [("p2pdist", 0), ("libtorrent", 0), ("http", 0), ("p2pdist", 1), ("libtorrent", 1)]


def test_cases_take_turns() -> None:
    slow = cases("slow", LINKS)
    assert [turn.case for turn in turns([OURS], slow, 2)] == slow + slow


def test_plain_http_gets_a_smaller_blob_when_it_takes_long() -> None:
    """24 copies of 64 MiB over 80 Mbit/s are 168 s; of 256 MiB they would be 674."""
    assert one_by_one_s(LINKS) == pytest.approx(168.4, abs=0.1)
    assert HTTP.adapted(UNIFORM) == UNIFORM
    big = replace(UNIFORM, links=replace(LINKS, size_mib=256))
    assert HTTP.adapted(big).links.size_mib == 68
    assert OURS.adapted(big) == big


def test_ratio_is_to_the_bound_on_the_wire() -> None:
    """14.74 s over 64 MiB at 40 Mbit/s with headers, as the yardstick's ratio_wire."""
    assert a_run().ratio == pytest.approx(14.74 * 40e6 / (64 * 2**20 * 8) * 1448 / 1514)


def test_row_has_the_medians() -> None:
    runs = [
        a_run(0, makespan_s=20.0, idle_pct=50.0),
        a_run(1, makespan_s=15.0, idle_pct=70.0),
        a_run(2, makespan_s=14.0),
    ]
    assert row(runs) == ["15.00", "1.069", "1.050", "1.060", "5.5", "60", ""]


def test_failed_runs_are_counted_and_left_out() -> None:
    runs = [
        a_run(0),
        Run("p2pdist", UNIFORM, 1, {"makespan_s": 99.0, "origin_tx_x": 9.0}, "2 of 24 hosts were complete in time"),
    ]
    assert row(runs)[:3] == ["14.74", "1.050", "1.050"]
    assert runs[1].ratio is None
    assert notes(runs) == ["1 of 2 runs FAILED"]
    assert row([runs[1]]) == ["-", "-", "-", "-", "-", "-", "1 of 1 runs FAILED"]


def test_busy_machines_are_noted() -> None:
    assert notes([a_run(idle_pct=40.0)]) == []
    assert notes([a_run(idle_pct=39.9), a_run(1)]) == ["1 of 2 runs under 40 % idle: they measured the CPU"]


def test_what_cases_add_to_a_row() -> None:
    assert notes([a_run(others_ratio_wire=1.06)]) == ["without the slow host 1.060"]
    assert notes([a_run(rack_rx_x=[1.05, 1.31, 1.07])]) == ["into a rack at most 1.31 copies"]


def test_missed_goals_are_marked() -> None:
    assert goal_notes([a_run()]) == []
    assert goal_notes([a_run(makespan_s=16.0)]) == ["MISSED: ratio_wire goal 1.10"]
    assert goal_notes([a_run(origin_tx_x=1.2)]) == ["MISSED: origin_tx_x goal 1.10"]


def test_table_of_all_methods() -> None:
    """Every method has its row, also one that could not run; the goal is ours alone; the bound
    comes last."""
    runs = [a_run(), a_run(1), a_run(0, "http", makespan_s=168.0)]
    lines = side_by_side(UNIFORM, [OURS, LIBTORRENT, HTTP], runs, {"libtorrent": "libtorrent in .venv"}).splitlines()
    assert lines[1] == "== 24 hosts, 64 MiB, 40 Mbit/s, origin 80 Mbit/s; median of 2"
    ours, libtorrent, http, bound = lines[4:]
    assert ours.split()[:3] == ["p2pdist", "14.74", "1.050"]
    assert libtorrent.endswith("skipped, missing: libtorrent in .venv")
    assert http.endswith("run once")
    assert "MISSED" not in http
    assert bound.split()[:6] == ["the", "bound", "14.03", "1.000", "1.046", "1.046"]


def test_table_of_cases_names_each_bound_and_short_ones() -> None:
    slow = cases("slow", LINKS)
    lines = of_ours(slow, [replace(a_run(), case=slow[1])]).splitlines()
    assert [line.split()[:4] for line in lines[4:]] == [
        ["slow", "host", "0", "14.03"],
        ["slow", "host", "12", "14.03"],
        ["slow", "host", "23", "14.03"],
    ]
    assert "1.050" in lines[5]
    assert "1.050" not in lines[4]
    assert "say little" in of_ours(cases("few", Links(size_mib=1)), [])


def test_last_line_of_the_output_counts() -> None:
    assert last_line('{"run": 0}\n{"run": 1}\nsome words\n17\n') == {"run": 1}
    assert last_line("") == {}


def test_why_a_run_is_not_valid() -> None:
    assert failure({"finished": 22, "expected": 24}) == "22 of 24 hosts were complete in time"
    assert failure({"finished": 24, "expected": 24}) == "a copy is not what was sent"
    assert failure({}) == ""
