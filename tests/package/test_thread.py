"""A cancelled caller waits for its thread, so that what the thread writes to can be removed."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from p2pdist.model.errors import P2PDistError
from p2pdist.package.thread import stoppable, until


async def test_nothing_is_written_after_a_cancellation(tmp_path: Path) -> None:
    stopped, begun, ended = threading.Event(), threading.Event(), threading.Event()

    def write(report: Callable[[int], None]) -> None:
        try:
            for number in range(1_000_000):
                (tmp_path / "file").write_text(str(number))
                report(number)
                begun.set()
        finally:
            ended.set()

    task = asyncio.create_task(stoppable(stopped, write, until(stopped, lambda number: None)))
    await asyncio.to_thread(begun.wait)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert ended.is_set()


def test_a_report_ends_what_it_reports() -> None:
    stopped, said = threading.Event(), list[int]()
    report = until(stopped, said.append)
    report(1)
    stopped.set()
    with pytest.raises(P2PDistError, match="cancelled"):
        report(2)
    assert said == [1]
