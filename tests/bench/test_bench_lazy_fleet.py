"""The benchmark of many hosts that start one package at once."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from lazy_marks import needs_events

from bench.lazy_fleet import ALONE, EAGER, LAZY, Round, missed, table

ROOT = Path(__file__).resolve().parents[2]
ALONE_ROUND = Round(ALONE, (10.0,), 1.0, 0.0)


def test_each_goal_is_missed_by_itself() -> None:
    assert missed(Round(LAZY, (9.0, 12.9), 1.09, 1.9), ALONE_ROUND) == ""
    assert missed(Round(LAZY, (9.0, 13.1), 1.09, 1.9), ALONE_ROUND) == "MISSED: last 1.31 > 1.3"
    assert missed(Round(LAZY, (9.0, 12.9), 1.12, 1.9), ALONE_ROUND) == "MISSED: copies 1.12 > 1.1"
    assert missed(Round(LAZY, (9.0, 12.9), 1.09, 2.1), ALONE_ROUND) == "MISSED: twice 2.10 > 2"
    text = table([ALONE_ROUND, Round(EAGER, (20.0, 30.0), 1.2, 0.0), Round(LAZY, (9.0, 13.1), 1.12, 0.0)], "title")
    assert text.count("MISSED") == 1 and "3.00" in text, "goals are those of lazy hosts"


@pytest.mark.long
@pytest.mark.timeout(1200)
@pytest.mark.root
@needs_events
def test_every_round_comes_to_its_end(tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    for number in range(20):
        (source / f"module{number}.py").write_bytes(os.urandom(50_000))
    words = [sys.executable, "-m", "bench.lazy_fleet", "--hosts", "2", "--rate-mbit", "40", "--source", str(source)]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    ended = subprocess.run(words, capture_output=True, text=True, cwd=ROOT, env=env, check=False)
    assert ended.returncode == 0, ended.stderr
    rows = [line.split("  ")[0] for line in ended.stdout.splitlines()]
    assert [row for row in rows if row in (ALONE, EAGER, LAZY)] == [ALONE, EAGER, LAZY]
