"""The tracker's look at its origin: what is said of one that cannot be read, once each time."""

from __future__ import annotations

import logging
import shutil
from pathlib import Path

import pytest

from p2pdist.origin.layout import LocalLayout
from tracker.content import OriginWatch


async def test_an_origin_that_goes_and_comes_back_is_told_once_each(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A missing tag is an answer; a missing directory is none."""
    (tmp_path / "origin").mkdir()
    origin = LocalLayout(tmp_path / "origin")
    watch = OriginWatch(origin)
    assert watch.reachable is None
    with caplog.at_level(logging.INFO, "tracker.content"):
        await watch.ask(origin)
        assert (watch.reachable, watch.problem, caplog.messages) == (True, "", [])
        (tmp_path / "origin" / "index.json").write_text("{")
        for _ in range(2):
            await watch.ask(origin)
        assert watch.reachable is False and "malformed" in watch.problem
        shutil.rmtree(tmp_path / "origin")
        (tmp_path / "origin").mkdir()
        await watch.ask(origin)
    assert watch.reachable
    assert len(caplog.messages) == 2
    assert "cannot be read" in caplog.messages[0] and "can be read again" in caplog.messages[1]
    await origin.close()


async def test_a_tracker_without_an_origin_has_nothing_to_watch() -> None:
    watch = OriginWatch(None)
    await watch.run()
    assert (watch.reachable, watch.problem) == (None, "")
