"""What an agent without a tracker hears of its neighbours, over real connections: of many, of many
blobs at once, and beside ones that hang."""

from __future__ import annotations

import asyncio
import os
import socket
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec
import pytest
from aiohttp import web

from p2pdist.agent.access.service import AgentAccess
from p2pdist.agent.discovery import trackerless
from p2pdist.agent.discovery.links import DiscoverySettings
from p2pdist.agent.discovery.trackerless import Neighbourhood
from p2pdist.agent.tracker.session import TrackerSession
from p2pdist.core.trackerless import PEERS_MAX, Announcement
from p2pdist.model.digest import Digest, digest_of
from p2pdist.model.messages import BlobHolding, Hello
from p2pdist.model.pieces import PieceLayout
from p2pdist.model.plan import Plan

NETWORK = f"neighbours-{os.getpid()}"
LAYOUT = PieceLayout(1 << 20, 64 << 10)


@asynccontextmanager
async def neighbourhood(directory: Path) -> AsyncIterator[Neighbourhood]:
    """That of the agent h, which announces itself on loopback and knows no tracker."""
    session = TrackerSession([], Hello(1, "h", "127.0.0.1:7071"))
    access = AgentAccess("h", directory, None, None, alone=lambda: True, clock_ahead_s=lambda: 0.0)
    own = Announcement(NETWORK, "h", "127.0.0.1:7071", origin=True)
    made = Neighbourhood(own, DiscoverySettings(("127.0.0.1", 7071), NETWORK, ("lo",)), session, access)
    await made.start()
    try:
        yield made
    finally:
        await made.stop()


@asynccontextmanager
async def holder(asked: Counter[str], *, after_s: float = 0.0, answers_max: int = 1 << 30) -> AsyncIterator[str]:
    """The address of an agent that holds every blob, and says so after a time, so often; `asked`
    counts the questions by connection."""

    async def holding(request: web.Request) -> web.Response:
        asked[str(request.get_extra_info("peername"))] += 1
        await asyncio.sleep(after_s if asked.total() <= answers_max else 3600)
        return web.Response(body=msgspec.json.encode(BlobHolding(16, 16, True)))

    app = web.Application()
    app.router.add_get("/v1/blobs/{digest}/holding", holding)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    listening = socket.create_server(("127.0.0.1", 0), backlog=PEERS_MAX)
    await web.SockSite(runner, listening).start()
    try:
        yield f"127.0.0.1:{listening.getsockname()[1]}"
    finally:
        await runner.cleanup()


def know(agent: Neighbourhood, names: list[str], address: str) -> None:
    for name in names:
        announced = Announcement(NETWORK, name, address, origin=True)
        assert agent.discovery.neighbours.heard("agent", "lo", name, announced)


async def planned(agent: Neighbourhood, blobs: list[Digest]) -> dict[Digest, Plan]:
    """The last plan of each blob, all of which are begun at the same moment."""
    plans, done = dict[Digest, Plan](), asyncio.get_running_loop().create_future()
    for blob in blobs:
        agent.plan(blob, LAYOUT, done, lambda plan: plans.__setitem__(plan.blob, plan))
    async with asyncio.timeout(200):
        while agent._counted.keys() != set(blobs):
            await asyncio.sleep(0.02)
    done.set_result(None)
    return plans


def hosts(plan: Plan) -> set[str]:
    return {source.host for source in plan.keepers} - {"h"}


@pytest.mark.slow
async def test_neighbours_that_hang_keep_none_from_being_heard(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As after a rack lost its power: its agents are announced for 20 minutes more."""
    monkeypatch.setattr(trackerless, "ASK_S", 3.0)
    monkeypatch.setattr(trackerless, "ASKED_AT_ONCE", 8)
    live = ["z1", "z2"]
    with socket.create_server(("127.0.0.1", 0), backlog=4 * PEERS_MAX) as hangs:  # the kernel answers, no program
        async with neighbourhood(tmp_path) as agent, holder(Counter(), after_s=0.05) as address:
            dead = [f"a{number:03}" for number in range(8)]
            know(agent, dead, f"127.0.0.1:{hangs.getsockname()[1]}")
            know(agent, live, address)
            blobs = [digest_of(bytes([number])) for number in range(5)]
            plans = await planned(agent, blobs)
    assert [hosts(plans[blob]) for blob in blobs] == [set(live)] * len(blobs)


@pytest.mark.slow
async def test_many_blobs_that_begin_at_once_are_asked_for_at_all_neighbours(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As of a package of many layers: no question fails since others come before it."""
    monkeypatch.setattr(trackerless, "ASK_S", 5.0)
    monkeypatch.setattr(trackerless, "ASKED_AT_ONCE", 2)
    names, asked = [f"n{number:02}" for number in range(12)], Counter[str]()
    async with neighbourhood(tmp_path) as agent, holder(asked, after_s=0.1) as address:
        know(agent, names, address)
        blobs = [digest_of(bytes([number])) for number in range(10)]
        plans = await planned(agent, blobs)
    assert {blob: hosts(plans[blob]) for blob in blobs} == {blob: set(names) for blob in blobs}
    assert asked.total() == 2 * len(names) * len(blobs)
    assert len(asked) < asked.total() / 2, "connections are used again"


async def test_a_neighbour_that_lost_a_blob_meanwhile_is_no_source(tmp_path: Path) -> None:
    """As one whose own pull failed, or that withdrew its announcement."""
    blob, agents = digest_of(b"blob"), list[Neighbourhood]()

    async def holding(request: web.Request) -> web.Response:
        if request.query.get("host") != "h" or not answers:
            return web.Response(status=404)
        if answers.pop() == "gone":
            assert agents[0].discovery.neighbours.gone("agent", "lo", "n2")
        return web.Response(body=msgspec.json.encode(BlobHolding(16, 16, True)))

    answers = ["gone", "held"]
    app = web.Application()
    app.router.add_get("/v1/blobs/{digest}/holding", holding)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    listening = socket.create_server(("127.0.0.1", 0))
    await web.SockSite(runner, listening).start()
    try:
        async with neighbourhood(tmp_path) as agent:
            agents.append(agent)
            know(agent, ["n1", "n2"], f"127.0.0.1:{listening.getsockname()[1]}")
            plans = await planned(agent, [blob])
    finally:
        await runner.cleanup()
    assert not answers and hosts(plans[blob]) == set()


@pytest.mark.slow
async def test_a_neighbour_that_says_nothing_the_second_time_still_holds_what_it_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trackerless, "ASK_S", 3.0)
    asked, blob = Counter[str](), digest_of(b"blob")
    async with neighbourhood(tmp_path) as agent, holder(asked, answers_max=1) as address:
        know(agent, ["n1"], address)
        plans = await planned(agent, [blob])
    assert asked.total() == 2
    assert hosts(plans[blob]) == {"n1"}
