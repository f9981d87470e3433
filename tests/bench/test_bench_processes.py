"""Nothing of a benchmark's program outlives the run."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from bench.processes import ProgramFailed, remove_network, run

PATIENCE_S = 60.0


def gone(pid: int) -> bool:
    """Whether a process has ended (nobody may have waited for it yet)."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except (FileNotFoundError, ProcessLookupError):
        return True


def wait_for(path: Path) -> str:
    """The line that a program writes into a file, once it is there."""
    deadline = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline:
        with contextlib.suppress(FileNotFoundError):
            if (text := path.read_text()).endswith("\n"):
                return text.strip()
        time.sleep(0.02)
    raise AssertionError(f"{path.name} was not written")


def all_gone(pids: list[int]) -> bool:
    """Whether processes that were just killed have ended."""
    deadline = time.monotonic() + PATIENCE_S
    while not all(map(gone, pids)) and time.monotonic() < deadline:
        time.sleep(0.02)
    return all(map(gone, pids))


def test_output_and_exit_code() -> None:
    ended = run(["sh", "-c", "echo out; echo a problem >&2; exit 3"], timeout_s=PATIENCE_S)
    assert (ended.code, ended.output, ended.tail()) == (3, "out\n", "a problem")


def test_variables_are_added() -> None:
    assert run(["sh", "-c", "echo $BENCH_WORD"], timeout_s=PATIENCE_S, env={"BENCH_WORD": "word"}).output == "word\n"


def test_a_program_that_is_not_there() -> None:
    with pytest.raises(ProgramFailed, match="no-such-program could not be started"):
        run(["no-such-program"], timeout_s=PATIENCE_S)


def test_children_that_stay_are_ended(tmp_path: Path) -> None:
    pid = tmp_path / "pid"
    run(["sh", "-c", f"sleep 1000 & echo $! > {pid}"], timeout_s=PATIENCE_S)
    assert all_gone([int(wait_for(pid))])


@pytest.mark.slow
def test_a_program_that_takes_too_long_is_interrupted(tmp_path: Path) -> None:
    """It may tidy up first."""
    tidied = tmp_path / "tidied"
    text = (
        f"import time\ntry:\n  print('begun', flush=True)\n  time.sleep(1000)\nfinally:\n  open({str(tidied)!r}, 'w')\n"
    )
    with pytest.raises(ProgramFailed, match="took longer than 5 s"):
        run([sys.executable, "-c", text], timeout_s=5.0)
    assert tidied.exists()


def test_interrupt_ends_the_program_and_its_children(tmp_path: Path) -> None:
    """Ctrl-C, twice, reaches whoever runs the benchmarks; the program is in another session."""
    pid, child = tmp_path / "pid", tmp_path / "child"
    words = ["sh", "-c", f"sleep 1000 & echo $! > {child}; echo $$ > {pid}; wait"]
    root = Path(__file__).resolve().parents[2]
    text = f"from bench.processes import run\nrun({words!r}, timeout_s=1000)\n"
    process = subprocess.Popen([sys.executable, "-c", text], cwd=root, stderr=subprocess.PIPE)
    try:
        pids = [int(wait_for(pid)), int(wait_for(child))]
        process.send_signal(signal.SIGINT)
        process.send_signal(signal.SIGINT)
        errors = process.communicate(timeout=PATIENCE_S)[1]
    finally:
        process.kill()
        process.wait()
    assert b"KeyboardInterrupt" in errors
    assert all_gone(pids)


@pytest.mark.root
def test_namespaces_of_a_prefix_go_with_their_processes() -> None:
    prefix = f"p2pd{os.getpid()}-"
    ours, other = f"{prefix}h1", f"p2pd{os.getpid()}0-h1"
    for name in (ours, other):
        subprocess.run(["ip", "netns", "add", name], check=True)
    process = subprocess.Popen(["ip", "netns", "exec", ours, "sleep", "1000"])
    try:
        deadline = time.monotonic() + PATIENCE_S
        while not subprocess.run(["ip", "netns", "pids", ours], capture_output=True, check=False).stdout.strip():
            assert time.monotonic() < deadline
            time.sleep(0.02)
        remove_network(prefix)
        assert process.wait(PATIENCE_S) == -signal.SIGKILL
        names = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=False).stdout.split()
        assert ours not in names
        assert other in names
    finally:
        process.kill()
        process.wait()
        for name in (ours, other):
            subprocess.run(["ip", "netns", "delete", name], capture_output=True, check=False)
