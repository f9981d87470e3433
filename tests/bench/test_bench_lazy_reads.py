"""The benchmark of reads reads the same bytes of both views, and tells which goals are missed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from lazy_marks import needs_events

from bench.lazy_reads import KINDS, LAZY, MIB, PLAIN, STATES, Row, reads, table, views

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.root
@needs_events
def test_all_views_have_the_content(tmp_path: Path) -> None:
    with views(tmp_path, 3 * MIB + 17) as made:
        content = (tmp_path / "source").read_bytes()
        for view in made.values():
            assert view.path.read_bytes() == content
        counts = {kind: {name: read(view.path) for name, view in made.items()} for kind, read in reads(MIB).items()}
    assert all(len(count) == len(KINDS) and len(set(count.values())) == 1 for count in counts.values())
    assert counts["sequential"][PLAIN] == len(content) and counts["mmap"][PLAIN] == MIB


@pytest.mark.slow
@pytest.mark.root
@needs_events
def test_every_kind_is_read_in_every_state(tmp_path: Path) -> None:
    words = [sys.executable, "-m", "bench.lazy_reads", "--size-mib", "2", "--random-mib", "1", "--repeat", "1"]
    env = {**os.environ, "PYTHONPATH": str(ROOT), "TMPDIR": str(tmp_path)}
    ended = subprocess.run([*words, "--json"], capture_output=True, text=True, cwd=ROOT, env=env, check=False)
    assert ended.returncode == 0, ended.stderr
    rows = json.loads(ended.stdout)["rows"]
    told = {(row["way"], row["kind"], row["state"]) for row in rows}
    assert told == {(way, kind, state) for way in LAZY for kind in reads(MIB) for state in STATES}
    assert all(row["ratio"] > 0.0 for row in rows) and not any(tmp_path.iterdir())


@pytest.mark.slow
@pytest.mark.root
@needs_events
def test_one_that_is_killed_leaves_no_mount(tmp_path: Path) -> None:
    words = [sys.executable, "-m", "bench.lazy_reads", "--size-mib", "2", "--repeat", "1000"]
    env = {**os.environ, "PYTHONPATH": str(ROOT), "TMPDIR": str(tmp_path)}
    with subprocess.Popen(words, cwd=ROOT, env=env) as program:
        mounted = Path(f"/proc/{program.pid}/mountinfo")
        while mounted.read_text().count(str(tmp_path)) < len(KINDS):
            assert program.poll() is None
        assert str(tmp_path) not in Path("/proc/self/mountinfo").read_text()
        program.kill()
    assert str(tmp_path) not in Path("/proc/self/mountinfo").read_text()


def test_a_goal_that_is_missed_is_told() -> None:
    lines = table([Row("fuse", "mmap", "disk", 80.0, 100.0), Row("fuse", "mmap", "cached", 91.0, 100.0)]).splitlines()
    assert [line for line in lines if "MISSED" in line] == [line for line in lines if "mmap, disk" in line]
