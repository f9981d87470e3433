"""An agent that no tracker answers and that looks for no neighbours: alone it reads its own origin; with a tracker that is away it waits,
says so, and gives up. And what can never fit into its store, which it says before it evicts anything."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
from pathlib import Path

import pytest
from test_many_blobs import push

from p2pdist.agent.agent import Agent, AgentSettings
from p2pdist.agent.pulls import Pull
from p2pdist.model.errors import DiskFull, Unavailable
from p2pdist.model.messages import PullRequest
from p2pdist.model.package import parse_reference
from p2pdist.origin.layout import LocalLayout
from p2pdist.package.layering import Making, pack_layers, plain_layer
from p2pdist.package.push import push_blob

Start = Callable[..., Awaitable[Agent]]
TAG = parse_reference("app:v1")
PIECE = 64 << 10
NOBODY = "http://127.0.0.1:9"


@pytest.fixture
def origin(tmp_path: Path) -> LocalLayout:
    made = LocalLayout(tmp_path / "origin")
    made.scratch()
    return made


@pytest.fixture
async def start(tmp_path: Path, origin: LocalLayout) -> AsyncIterator[Start]:
    """Starts agents that look for nobody; they end with the test."""
    async with AsyncExitStack() as agents:

        async def make(*trackers: str, tracker_wait_s: float = 60.0, capacity: int | None = None) -> Agent:
            made = Agent(
                AgentSettings(
                    trackers,
                    "h1",
                    "127.0.0.1:1",
                    tmp_path / "store",
                    origin=origin.url,
                    tracker_wait_s=tracker_wait_s,
                    capacity_bytes=capacity,
                )
            )
            agents.push_async_callback(made.stop)
            await made.start()
            return made

        yield make


async def ended(pull: Pull) -> Pull:
    assert pull.task is not None
    await asyncio.wait([pull.task], timeout=30)
    return pull


async def pulled(agent: Agent, **what: str) -> Pull:
    return await ended(agent.pulls.start(PullRequest(**what)))


async def pack_tree(place: Path, origin: LocalLayout, contents: list[bytes]) -> None:
    source = place / "source"
    source.mkdir()
    for number, content in enumerate(contents):
        (source / f"f{number}").write_bytes(content)
    await pack_layers([plain_layer(source, "tree", ())], TAG, origin, Making())


async def test_alone_it_reads_its_own_origin(start: Start, origin: LocalLayout, tmp_path: Path) -> None:
    """A blob of many stripes, and a tree with its packs; without a tracker nothing else can bring them."""
    (tmp_path / "weights").write_bytes(os.urandom(64 * PIECE + 1))
    blob = (await push_blob(tmp_path / "weights", origin)).digest
    await pack_tree(tmp_path, origin, [os.urandom(3 * PIECE), b"small"])
    agent = await start()
    for what in ({"blob": blob}, {"package": str(TAG)}):
        status = (await pulled(agent, **what)).status()
        assert status.state == "done" and status.bytes_origin == status.bytes_total > 0, status


async def test_with_a_tracker_that_is_away_it_waits_and_leaves_the_origin_alone(
    start: Start, origin: LocalLayout, tmp_path: Path
) -> None:
    """Thousands of agents may wait like it. It says for what, and ends as a new pull does that waits for a tracker."""
    (tmp_path / "weights").write_bytes(os.urandom(PIECE))
    blob = (await push_blob(tmp_path / "weights", origin)).digest
    agent = await start(NOBODY, tracker_wait_s=1.0)
    pull = agent.pulls.start(PullRequest(blob=blob))
    notes = set()
    while pull.seconds is None:
        notes.add(pull.status().note)
        await asyncio.sleep(0.02)
    assert any(note.startswith(f"waiting for a tracker ({NOBODY}") for note in notes), notes
    assert isinstance(pull.error, Unavailable) and "no tracker answered for 1 s" in pull.error.what
    status = pull.status()
    assert (status.bytes_origin, status.note) == (0, "") and not agent.received_bytes


@pytest.mark.parametrize("form", ["blob", "layers", "tree"])
async def test_what_can_never_fit_is_told_from_what_does_not_fit_now(
    start: Start, origin: LocalLayout, tmp_path: Path, form: str
) -> None:
    """Each part would fit by itself, and what is here already stays: it would be evicted to no avail."""
    (tmp_path / "kept").write_bytes(os.urandom(2 * PIECE))
    kept = (await push_blob(tmp_path / "kept", origin)).digest
    what = {"package": str(TAG)}
    if form == "blob":
        (tmp_path / "weights").write_bytes(os.urandom(17 * PIECE))
        what = {"blob": (await push_blob(tmp_path / "weights", origin)).digest}
    elif form == "layers":
        await push(origin, TAG, [os.urandom(6 * PIECE) for _ in range(3)])
    else:
        await pack_tree(tmp_path, origin, [bytes([number]) * (1 << 20) for number in range(17)])
    agent = await start(capacity=16 * PIECE)
    assert (await pulled(agent, blob=kept)).error is None
    error = (await pulled(agent, **what)).error
    assert isinstance(error, DiskFull) and error.never_fits, error
    assert error.details["needed"] > error.details["capacity"] == 16 * PIECE
    assert agent.store.get(kept) is not None


async def test_what_others_keep_from_fitting_may_fit_later(start: Start, origin: LocalLayout, tmp_path: Path) -> None:
    (tmp_path / "kept").write_bytes(os.urandom(10 * PIECE))
    kept = (await push_blob(tmp_path / "kept", origin)).digest
    await push(origin, TAG, [os.urandom(5 * PIECE) for _ in range(2)])
    agent = await start(capacity=16 * PIECE)
    assert (await pulled(agent, blob=kept)).error is None
    agent.store.pin(kept, "somebody")
    error = (await pulled(agent, package=str(TAG))).error
    assert isinstance(error, DiskFull) and not error.never_fits, error
    agent.store.unpin("somebody")
    assert (await pulled(agent, package=str(TAG))).error is None
