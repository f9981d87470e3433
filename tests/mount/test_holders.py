"""Who uses a view: processes by number and start, programs by their environment, and the hold that
they inherit."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from p2pdist.mount.program import hold, is_held
from p2pdist.mount.records import Process, parse_process, process, records, run_from, user


def test_a_process_is_alive_until_it_ends() -> None:
    """A zombie is not; nor is another process that has got the number since. What is not known of
    its start does not count."""
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    assert child.stdin is not None
    with child.stdin:
        found = process(child.pid)
        assert found.alive and found.started > 0
        assert parse_process(str(found)) == found
        assert not replace(found, started=found.started - 1).alive
        assert replace(found, started=0).alive
        child.kill()
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
        assert not found.alive, "it has ended and its parent has not asked"
        child.wait()
    assert not found.alive
    assert not replace(found, started=0).alive
    assert parse_process("") is None
    assert Process(1).alive


def test_a_program_is_known_by_its_environment(tmp_path: Path) -> None:
    """Of this very view, whatever it has open; a name that only begins alike is another view."""
    view, other = tmp_path / "view", tmp_path / "vie"
    command = [sys.executable, "-c", "print(flush=True); input()"]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd="/", env={**os.environ, "P2PDIST_ROOT": str(view)}
    ) as program:
        assert program.stdout is not None
        program.stdout.readline()
        assert run_from(view) == user(view) == process(program.pid)
        assert run_from(other) is None and user(other) is None
        program.kill()
    assert run_from(view) is None and user(view) is None


def test_a_hold_is_inherited(tmp_path: Path) -> None:
    """As long as one process has it open, also one that has forgotten its environment; two programs
    may hold one view."""
    held, again = hold(tmp_path), hold(tmp_path)
    assert held is not None and again is not None
    os.close(again)
    assert is_held(tmp_path)
    with subprocess.Popen(["sleep", "100"], cwd="/", env={}, pass_fds=(held,)) as program:
        os.close(held)
        assert is_held(tmp_path)
        program.kill()
    assert not is_held(tmp_path)
    assert not is_held(tmp_path / "none") and hold(tmp_path / "none") is None


RECORD = '{"id": "0123456789abcdef", "target": "/v\\udcff", "how": "overlay", "images": ["/a"], "owner": "1:2"}'


@pytest.mark.parametrize(
    "text",
    [
        *("", "1", "null", '"x"', "[]", "{}", '{"how": "copy"}', "no JSON"),
        *(RECORD.replace(right, wrong) for right, wrong in (('"1:2"', "-1"), ('"/a"', "1"), ('"/v\\udcff"', "[]"))),
    ],
)
def test_files_that_are_no_records_are_left_alone(tmp_path: Path, text: str) -> None:
    stray = tmp_path / "0123456789abcdef.json"
    stray.write_text(text)
    assert records(tmp_path) == [] and stray.read_text() == text
    stray.write_text(RECORD)
    assert [record.target for record in records(tmp_path)] == ["/v\udcff"]
