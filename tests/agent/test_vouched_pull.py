"""Blobs without a piece list, pulled by agents over real sockets with a real tracker: one copy from
upstream, and nothing is complete before the whole has matched."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path

import pytest
from vouched_rig import Site, is_whole, pull_all

PIECE = 64 << 10
COUNT = 100
DATA = random.Random(1).randbytes(COUNT * PIECE - 77)


@pytest.fixture
async def site(tmp_path: Path) -> AsyncIterator[Site]:
    async with AsyncExitStack() as stack:
        made = Site(tmp_path, stack)
        await made.start(DATA)
        yield made


async def test_four_hosts_cost_upstream_one_copy(site: Site) -> None:
    hosts = await site.agents(4)
    blobs = await pull_all(hosts, DATA)
    assert all(is_whole(blob, DATA) for blob in blobs)
    assert site.upstream.copies == 1.0 and max(site.upstream.sent.values()) == 1
    assert sum(host.peers_bytes for host in hosts) >= 3 * len(DATA)
