"""A loop that waits for a sign or for a time ends when it is cancelled, also at the moment the sign
comes: else the service that stops would wait for it for ever."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest

from p2pdist.agent.tracker.reachability import ReachabilityCheck
from tracker.core.policy.book import PolicyBook
from tracker.policies import PolicyFile
from tracker.upstreams.settings import UpstreamsFile


def reachability(place: Path) -> tuple[Coroutine[Any, Any, None], Callable[[], None]]:
    session: Any = type("Away", (), {"connected": False})()
    check = ReachabilityCheck("h1", session)
    return check.run(), check.connected


def policies(place: Path) -> tuple[Coroutine[Any, Any, None], Callable[[], None]]:
    path = place / "policies.toml"
    path.write_text("")
    file = PolicyFile(path, PolicyBook())
    return file.watch(), file.reload


def upstreams(place: Path) -> tuple[Coroutine[Any, Any, None], Callable[[], None]]:
    async def take(upstreams: object) -> None: ...

    path = place / "upstreams.toml"
    path.write_text("")
    file = UpstreamsFile((), path, take)
    return file.watch(), file.reload


@pytest.mark.parametrize("turns", range(4))
@pytest.mark.parametrize("made", [reachability, policies, upstreams])
async def test_who_is_cancelled_as_the_sign_comes_ends(made: Any, turns: int, tmp_path: Path) -> None:
    loop, sign = made(tmp_path)
    task = asyncio.create_task(loop)
    for _ in range(5):
        await asyncio.sleep(0)
    sign()
    for _ in range(turns):
        await asyncio.sleep(0)
    task.cancel()
    await asyncio.wait([task], timeout=5)
    ended = task.cancelled()
    task.cancel()
    assert ended
