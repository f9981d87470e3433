"""The agent's metrics: the names that others rely on, and a store whose parts add up."""

from __future__ import annotations

import asyncio
import io
import os
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from prometheus_client import generate_latest
from prometheus_client.parser import text_string_to_metric_families

from p2pdist.agent.agent import Agent, AgentSettings
from p2pdist.agent.api.metrics import registry
from p2pdist.model.digest import digest_of
from p2pdist.model.messages import PullRequest
from p2pdist.model.pieces import PieceList

SIZE = 200_000


@pytest.fixture
async def agent(tmp_path: Path) -> AsyncIterator[Agent]:
    made = Agent(AgentSettings((), "h1", "127.0.0.1:1", tmp_path / "store", capacity_bytes=1 << 20))
    yield made
    await made.stop()


def samples(agent: Agent) -> dict[str, dict[str, float]]:
    """Values by sample name and label value, without the histogram's buckets."""
    found: dict[str, dict[str, float]] = {}
    for family in text_string_to_metric_families(generate_latest(registry(agent)).decode()):
        for sample in family.samples:
            found.setdefault(sample.name, {})[next(iter(sample.labels.values()), "")] = sample.value
    return found


async def test_every_metric_of_the_interface_is_there_from_the_start(agent: Agent) -> None:
    found = samples(agent)
    assert found["p2pdist_agent_received_bytes_total"] == {"origin": 0, "upstream": 0, "peer": 0, "bittorrent": 0}
    assert "trees" in found["p2pdist_agent_sent_bytes_total"]
    assert found["p2pdist_agent_pieces_rejected_total"] == {"corrupt": 0}
    assert found["p2pdist_agent_pull_seconds_count"] == {"": 0}
    assert found["p2pdist_agent_store_capacity_bytes"] == {"": 1 << 20}
    assert set(found["p2pdist_agent_store_bytes"]) >= {"complete", "partial"}
    assert found["p2pdist_agent_store_held_bytes"] == {"": 0}


async def test_what_is_pinned_or_held_is_counted_as_such(agent: Agent) -> None:
    data = os.urandom(SIZE)
    pieces = PieceList.of_stream(io.BytesIO(data), SIZE)
    blob = agent.store.begin(digest_of(data), pieces)
    assert samples(agent)["p2pdist_agent_store_bytes"]["partial"] == SIZE
    agent.store.pins.pin(blob.digest, "somebody")
    assert samples(agent)["p2pdist_agent_store_held_bytes"] == {"": SIZE}
    agent.store.pins.unpin("somebody")
    assert samples(agent)["p2pdist_agent_store_held_bytes"] == {"": 0}
    with blob.held():
        assert samples(agent)["p2pdist_agent_store_held_bytes"] == {"": SIZE}
    usage = agent.store.usage()
    assert sum(samples(agent)["p2pdist_agent_store_bytes"].values()) == usage.bytes_total


async def test_pulls_are_counted_by_what_became_of_them(agent: Agent, tmp_path: Path) -> None:
    """One that fails by the kind of its failure; a host's process and disk are there as well."""
    found = samples(agent)
    assert set(found["p2pdist_agent_pulls_failed_total"]) >= {"not-found", "unavailable", "disk-full", "corrupt"}
    assert found["p2pdist_agent_pulls"] == {"waiting": 0, "running": 0}
    assert found["p2pdist_agent_evictions_total"] == {"": 0}
    assert set(found["p2pdist_agent_mounts"]) >= {"squashfs", "erofs", "copy", "lazy", "other"}
    disk = found["p2pdist_agent_disk_bytes"]
    assert 0 < disk["free"] <= disk["total"]
    assert "process_cpu_seconds_total" in found and "python_info" in found
    assert list(found["p2pdist_build_info"].values()) == [1.0]
    registered = registry(agent)
    pull = agent.pulls.start(PullRequest(blob=digest_of(b"not anywhere"), output=str(tmp_path / "no" / "file")))
    assert pull.task is not None
    await asyncio.wait([pull.task])
    assert pull.error is not None
    text = generate_latest(registered).decode()
    assert f'p2pdist_agent_pulls_failed_total{{reason="{pull.error.slug}"}} 1.0' in text


async def test_bytes_of_evicted_blobs_are_made_room_for(agent: Agent) -> None:
    for _ in range(7):  # of 200 kB, in a store of 1 MiB
        data = os.urandom(SIZE)
        blob = agent.store.begin(digest_of(data), PieceList.of_stream(io.BytesIO(data), SIZE))
        for piece in range(blob.layout.count):
            offset = blob.layout.offset(piece)
            blob.write(piece, data[offset : offset + blob.layout.length(piece)])
        blob.finish()
    assert samples(agent)["p2pdist_agent_evictions_total"][""] >= 2
