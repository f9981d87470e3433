"""The benchmark of a small blob: a process of agents that dies does not do so in silence."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from bench.small_blob import PORTS_FROM, Worker

NOWHERE = "http://127.0.0.1:1"


def test_a_process_that_fails_is_told_with_its_last_words(tmp_path: Path) -> None:
    worker = Worker("no url at all", "sha256:0", ["h0"], tmp_path, PORTS_FROM)
    try:
        with pytest.raises(RuntimeError, match=r"(?s)ended with 1; it said last:.*is not the URL of a tracker"):
            worker.hear()
    finally:
        worker.end()


def test_a_process_that_is_killed_is_told(tmp_path: Path) -> None:
    worker = Worker(NOWHERE, "sha256:0", ["h0", "h1"], tmp_path, PORTS_FROM)
    try:
        assert worker.pid is not None
        os.kill(worker.pid, signal.SIGKILL)
        with pytest.raises(RuntimeError, match="ended with -9"):
            worker.hear()
    finally:
        worker.end()
