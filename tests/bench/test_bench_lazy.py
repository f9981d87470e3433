"""The benchmark of lazy starts: every way is taken on a small package, which stays for the next
run."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from lazy_marks import needs_events

from bench.lazy import EAGER, LAZY, LOCAL, TRACED, WAYS
from bench.lazy_package import MADE, prepared
from p2pdist.mount import kernel

ROOT = Path(__file__).resolve().parents[2]
FILES, SIZE_MIB, MIB = 60, 8, 1 << 20


@pytest.fixture
def wheels(tmp_path: Path) -> Path:
    """What stands for installed wheels: a module that reads its data."""
    wheels = tmp_path / "wheels"
    (wheels / "module").mkdir(parents=True)
    (wheels / "module" / "data.bin").write_bytes(os.urandom(1 << 20))
    lines = ["import pathlib", "assert len(pathlib.Path(__file__).with_name('data.bin').read_bytes()) == 1 << 20"]
    (wheels / "module" / "__init__.py").write_text("\n".join(lines))
    return wheels


def run(directory: Path, *words: str) -> dict[str, Any]:
    program = [sys.executable, "-m", "bench.lazy", "--package", str(directory), "--modules", "module", "--json"]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    ended = subprocess.run([*program, *words], capture_output=True, text=True, cwd=ROOT, env=env, check=False)
    assert ended.returncode == 0, ended.stderr
    return dict(json.loads(ended.stdout))


@pytest.mark.long
@pytest.mark.timeout(1200)
@pytest.mark.root
@needs_events
def test_every_way_is_taken_and_what_came_is_told(tmp_path: Path, wheels: Path) -> None:
    directory = tmp_path / "package"
    made = prepared(directory, wheels, files=FILES, size=SIZE_MIB * MIB)
    document = run(directory, "--repeat", "1", "--rate-mbit", "100")
    assert document["package"]["files"] == FILES and document["package"]["bytes_source"] >= SIZE_MIB * MIB
    rows = {row["way"]: row for row in document["rows"]}
    assert list(rows) == list(WAYS) and document["tracker_mib"] > 0
    assert rows[LOCAL]["here_s"] is None and rows[LOCAL]["first_line_bytes"] == 0
    assert made.bytes_stored <= rows[EAGER]["first_line_bytes"]
    for way in (LAZY, TRACED):
        row = rows[way]
        assert 0.0 < row["first_line_s"] <= row["whole_s"] and 0.0 < row["here_s"] <= row["whole_s"]
        assert row["shown_ms"] > 0.0 and 0 < row["metadata_bytes"] < made.bytes_stored
        assert row["agent_mib"] > 0.0 and row["first_line_bytes"] > row["metadata_bytes"]
        ends = [row["asked_s"] + row["steps"][step] for step in ("found", "listed", "arranged", "mounted")]
        assert 0.0 < row["asked_s"] <= ends[0] and ends == sorted(ends) and ends[-1] <= row["first_line_s"]
        assert sum(row["link_bytes"]) <= row["first_line_bytes"] and row["steps"]["located"] > 0.0
    assert 0 < rows[TRACED]["trace_bytes"] <= made.bytes_stored and rows[LAZY]["trace_bytes"] == 0
    brief = run(directory, "--repeat", "1", "--rate-mbit", "100", "--brief")["rows"]
    assert [row["way"] for row in brief] == [LOCAL, LAZY, TRACED]
    assert all(row["whole_s"] is None and row["first_line_s"] > 0.0 for row in brief)


def spaces() -> set[str]:
    return {path.name for path in Path("/run/netns").glob("p2plazy-*")}


@pytest.mark.long
@pytest.mark.timeout(1200)
@pytest.mark.root
@needs_events
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT], ids=lambda number: number.name)
def test_an_interrupted_run_leaves_nothing_behind(tmp_path: Path, wheels: Path, number: signal.Signals) -> None:
    """SIGINT comes from a terminal, to agents and programs as well."""
    directory, place, before = tmp_path / "package", tmp_path / "place", spaces()
    prepared(directory, wheels, files=FILES, size=SIZE_MIB * MIB)
    place.mkdir()
    words = [sys.executable, "-m", "bench.lazy", "--package", str(directory), "--modules", "module"]
    env = {**os.environ, "PYTHONPATH": str(ROOT), "TMPDIR": str(place)}
    words += ["--rate-mbit", "2"]
    with subprocess.Popen(words, cwd=ROOT, env=env, start_new_session=True, stderr=subprocess.PIPE) as program:
        while not (views := [entry for entry in kernel.mounted() if place in entry.point.parents]):
            assert program.poll() is None, program.communicate()
            time.sleep(0.05)
        (os.kill if number == signal.SIGTERM else os.killpg)(program.pid, number)
        program.communicate()
    assert program.returncode != 0
    points = {view.point for view in views}
    assert not [entry for entry in kernel.mounted() if entry.point in points or place in entry.point.parents]
    assert list(place.iterdir()) == [] and spaces() == before
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):
            assert os.fsencode(place) not in path.read_bytes(), "a process goes on"


def test_a_package_is_made_once_and_an_interrupted_attempt_is_none(tmp_path: Path, wheels: Path) -> None:
    directory = tmp_path / "package"
    (directory / "source").mkdir(parents=True)
    (directory / "source" / "left").write_text("of an attempt that was interrupted")
    made = prepared(directory, wheels, files=10)
    assert made.files == 10 and not (made.source / "left").exists()
    assert prepared(directory, tmp_path / "nothing") == made
    (directory / MADE).unlink()
    with pytest.raises(subprocess.CalledProcessError):
        prepared(directory, tmp_path / "nothing")
