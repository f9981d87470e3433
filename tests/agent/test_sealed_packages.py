"""Sealed packages on their whole way: packed, pushed encrypted, moved between hosts, opened where
that may be, and refused where not. The tracker is the real one, with its access file."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from sealed_rig import MARK, SealedSite, holds_mark, sealed_site

from p2pdist.model.digest import digest_of


@pytest.fixture
async def site(tmp_path: Path) -> AsyncIterator[SealedSite]:
    async with sealed_site(tmp_path) as made:
        yield made


async def test_an_image_is_opened_on_hosts_and_nowhere_else(site: SealedSite) -> None:
    pushed = await site.push("team-a/trainer:v1", site.source())
    assert not holds_mark(site.origin_path), "storage sees ciphertext"
    first = await site.agent("h0", "a")
    pull = await site.pull(first, "team-a/trainer:v1")
    assert pull.error is None, pull.error
    status = pull.status()
    assert status.digest == pushed.digest and status.bytes_origin == status.bytes_total == status.bytes_done
    assert pull.package is not None
    (layer,) = pull.package.manifest.layers
    path = first.agent.store.get(layer.digest).path
    assert digest_of(path.read_bytes()) == layer.digest
    assert path.read_bytes() == site.layout.blob_path(layer.digest).read_bytes()
    second = await site.agent("h1", "a")
    pull = await site.pull(second, "team-a/trainer:v1")
    assert pull.error is None and pull.status().bytes_peers == pull.status().bytes_total
