"""Processes that a benchmark starts of itself, which answer lines on standard input with lines on
standard output."""

from __future__ import annotations

import contextlib
import subprocess
from collections.abc import Iterator


@contextlib.contextmanager
def child(command: list[str]) -> Iterator[subprocess.Popen[str]]:
    """Runs until the block ends; a child ends when its standard input does."""
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        yield process
    finally:
        assert process.stdin is not None
        process.stdin.close()
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def tell(process: subprocess.Popen[str], *, wait: bool = True) -> str:
    """Send an empty line, and wait for the answer if `wait`."""
    assert process.stdin is not None
    print(file=process.stdin, flush=True)
    return answer(process) if wait else ""


def answer(process: subprocess.Popen[str]) -> str:
    """The next line of a child."""
    assert process.stdout is not None
    line = process.stdout.readline()
    if not line:
        raise SystemExit("a process of the benchmark ended early")
    return line
