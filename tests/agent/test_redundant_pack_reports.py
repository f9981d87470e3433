"""What a tracker is told of packs that this host need not fetch."""

from __future__ import annotations

import asyncio

import pytest

from p2pdist.agent import preseeds as module
from p2pdist.agent.preseeds import RedundantPacks
from p2pdist.model.digest import Digest, digest_of
from p2pdist.model.messages import BLOBS_PER_MESSAGE_MAX, Spares


async def test_a_tracker_is_told_everything_once_and_then_what_is_so_after_a_change(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "LOOK_S", 0.01)
    spare: set[Digest] = set()
    said: asyncio.Queue[Spares] = asyncio.Queue()
    packs = RedundantPacks(lambda: set(spare), said.put_nowait)
    try:
        packs.connected()
        await asyncio.sleep(0.05)
        assert said.empty(), "of nothing there is nothing to say"
        blobs = sorted(digest_of(str(number).encode()) for number in range(BLOBS_PER_MESSAGE_MAX + 1))
        spare.update(blobs)
        for _ in range(2):  # a second session hears it anew
            first, more = await asyncio.wait_for(said.get(), 60), await asyncio.wait_for(said.get(), 60)
            assert [*first.blobs, *more.blobs] == blobs and (first.more, more.more) == (False, True)
            await asyncio.sleep(0.05)
            assert said.empty()
            packs.connected()
        await asyncio.wait_for(said.get(), 60)
        await asyncio.wait_for(said.get(), 60)
        spare.clear()
        assert await asyncio.wait_for(said.get(), 60) == Spares(())
    finally:
        await packs.stop()
