"""What a host keeps for preseeds, over a real store and a real origin, with the tracker's words
given by hand."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from waits import LoopClock, until

from p2pdist.agent import preseeds as module
from p2pdist.agent.agent import Agent, AgentSettings
from p2pdist.agent.preseeds import Preseeds
from p2pdist.model.digest import Digest
from p2pdist.model.manifest import blob_reference
from p2pdist.model.messages import Keep, Kept, Release
from p2pdist.model.plan import ORIGIN, Plan, StripePlan
from p2pdist.origin.layout import LocalLayout
from p2pdist.package.repository.push import push_blob

PIECE = 64 << 10


class Rig:
    """An agent, an origin, and what the agent says of its preseeds."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.layout = LocalLayout(directory / "origin")
        self.layout.scratch()
        self.said: list[Kept] = []
        self.clock_ahead_s: float | None = None
        self.open()

    def open(self) -> None:
        settings = AgentSettings((), "h1", "127.0.0.1:7071", self.directory / "store", origin=self.layout.url)
        self.agent = Agent(settings)
        agent = self.agent
        self.preseeds = Preseeds(
            agent.store,
            agent.pulls,
            agent.packages,
            agent.images,
            agent.models,
            self.said.append,
            lambda: self.clock_ahead_s,
        )

    async def close(self) -> None:
        await self.preseeds.stop()
        await self.agent.stop()

    async def publish(self, pieces: int = 4) -> Digest:
        file = self.directory / "content"
        file.write_bytes(os.urandom(pieces * PIECE))
        return (await push_blob(file, self.layout)).digest

    async def keep(
        self, identifier: str, digest: Digest, until: float | None = None, left_s: float | None = None
    ) -> None:
        self.preseeds.receive(Keep(identifier, str(blob_reference(digest)), until=until, left_s=left_s))

    async def arrive(self, digest: Digest) -> None:
        """Let a blob that is being pulled come from the origin."""
        await until(lambda: digest in self.agent.registry._fetching)
        self.agent.registry._fetching[digest].planned(Plan(digest, (StripePlan(0, ORIGIN),)))

    def states(self, identifier: str) -> list[str]:
        return [kept.state for kept in self.said if kept.id == identifier]

    def owners(self, digest: Digest) -> set[str]:
        return self.agent.store.pins.owners(digest)


@pytest.fixture
async def rig(tmp_path: Path) -> AsyncIterator[Rig]:
    made = Rig(tmp_path)
    try:
        yield made
    finally:
        await made.close()
        await made.layout.close()


async def test_it_is_pinned_before_it_is_there_and_until_it_is_released(rig: Rig) -> None:
    digest = await rig.publish()
    await rig.keep("p1", digest)
    await until(lambda: digest in rig.agent.registry._fetching)
    assert rig.owners(digest) == {"preseed:p1"}
    assert rig.agent.registry._fetching[digest].priority == "preseed"
    await rig.arrive(digest)
    await until(lambda: rig.states("p1")[-1:] == ["done"])
    assert rig.states("p1") == ["waiting", "pulling", "done"]
    assert (rig.said[-1].bytes_done, rig.said[-1].bytes_total) == (4 * PIECE, 4 * PIECE)
    await rig.keep("p1", digest)
    assert rig.states("p1")[-1] == "done", "said again, nothing is done again"
    await rig.keep("p2", digest)
    await until(lambda: rig.states("p2")[-1:] == ["done"])
    assert rig.owners(digest) == {"preseed:p1", "preseed:p2"}
    rig.preseeds.receive(Release("p1"))
    rig.preseeds.receive(Release("unknown"))
    await until(lambda: rig.owners(digest) == {"preseed:p2"})


async def test_what_is_released_while_it_comes_is_not_pinned_in_the_end(rig: Rig) -> None:
    digest = await rig.publish()
    for _ in range(3):
        await rig.keep("p1", digest)
        rig.preseeds.receive(Release("p1"))
    await rig.keep("p1", digest)
    await until(lambda: digest in rig.agent.registry._fetching)
    rig.preseeds.receive(Release("p1"))
    await until(lambda: not rig.owners(digest))
    await until(lambda: [pull.state for pull in rig.agent.pulls.list()][-1:] == ["failed"])
    assert "needs" in str(rig.agent.pulls.list()[-1].error)
    rig.said.clear()
    rig.preseeds.connected()
    assert rig.said == []


async def test_a_release_that_comes_while_pins_are_set_wins(rig: Rig) -> None:
    digest = await rig.publish()
    async with rig.preseeds._pinning:
        await rig.keep("p1", digest)
        await until(lambda: rig.preseeds._preseeds["p1"].blobs)
        await asyncio.sleep(0)
        rig.preseeds.receive(Release("p1"))
    await until(lambda: not rig.preseeds._background)
    assert not rig.owners(digest)


async def test_an_agent_that_was_started_again_says_what_it_keeps(rig: Rig) -> None:
    digest = await rig.publish()
    await rig.keep("p1", digest)
    await rig.arrive(digest)
    await until(lambda: rig.states("p1")[-1:] == ["done"])
    await rig.close()
    rig.said.clear()
    rig.open()
    rig.preseeds.connected()
    assert rig.said == [Kept("p1", "waiting")]
    assert rig.owners(digest) == {"preseed:p1"}
    await rig.keep("p1", digest)
    await until(lambda: rig.states("p1")[-1] == "done")
    rig.preseeds.receive(Release("p1"))
    await until(lambda: not rig.owners(digest))


async def test_its_time_is_up_without_a_tracker(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    clock, digest = LoopClock(monkeypatch), await rig.publish()
    await rig.keep("p1", digest, until=time.time() + 600)
    await until(lambda: digest in rig.agent.registry._fetching)
    assert rig.owners(digest) == {"preseed:p1"}
    clock.put_forward(601)
    await until(lambda: not rig.owners(digest))
    pulls = len(rig.agent.pulls.list())
    rig.said.clear()
    await rig.keep("p2", digest, left_s=-1.0)
    rig.preseeds.connected()
    await asyncio.sleep(0.1)
    assert rig.said == [] and not rig.owners(digest) and len(rig.agent.pulls.list()) == pulls


async def test_a_failure_says_why_and_is_tried_again_when_it_is_asked_for_again(rig: Rig) -> None:
    missing = Digest("sha256:" + "ab" * 32)
    await rig.keep("p1", missing)
    await until(lambda: rig.states("p1")[-1:] == ["failed"])
    assert rig.said[-1].reason.startswith("not-found: ")
    await rig.keep("p1", missing)
    await until(lambda: rig.states("p1").count("failed") == 2)


async def test_another_package_under_an_id_takes_the_place_of_the_first(rig: Rig) -> None:
    first, second = await rig.publish(), await rig.publish()
    await rig.keep("p1", first)
    await rig.arrive(first)
    await until(lambda: rig.states("p1")[-1:] == ["done"])
    await rig.keep("p1", second)
    await rig.arrive(second)
    await until(lambda: rig.owners(second) == {"preseed:p1"} and not rig.owners(first))
    rig.said.clear()
    rig.preseeds.connected()
    keep = rig.preseeds._preseeds["p1"].keep
    assert keep is not None and [each.package for each in rig.said] == [keep.package], "what it is of is said"


async def test_what_is_kept_has_a_limit(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PRESEEDS_MAX", 1)
    digest = await rig.publish()
    await rig.keep("p1", digest)
    await rig.keep("p2", digest)
    assert rig.said[-1].id == "p2" and rig.said[-1].reason.startswith("unavailable: this host keeps 1 preseeds")


@pytest.mark.parametrize("ahead_s", [7200.0, -7200.0, 599.0])
async def test_a_preseed_lasts_as_long_on_a_host_whose_clock_is_wrong(rig: Rig, ahead_s: float) -> None:
    """`until` is by the tracker's clock; what counts is how long it is from now on."""
    digest = await rig.publish(1)
    await rig.keep("p1", digest, until=time.time() - ahead_s + 600, left_s=600.0)
    left_s = rig.preseeds._preseeds["p1"].ends_at - asyncio.get_running_loop().time()  # type: ignore[operator]
    assert 590 < left_s <= 600
    await rig.arrive(digest)
    await until(lambda: rig.states("p1")[-1:] == ["done"])
    rig.preseeds._preseeds["p1"].ends_at = asyncio.get_running_loop().time()
    rig.preseeds._expire_later("p1", rig.preseeds._preseeds["p1"])
    await until(lambda: not rig.owners(digest))


@pytest.mark.parametrize("ahead_s", [7200.0, -7200.0])
async def test_a_time_by_the_trackers_clock_is_turned_into_a_duration(rig: Rig, ahead_s: float) -> None:
    """An earlier tracker names a time only; the session has measured by how much the clocks
    differ."""
    digest, rig.clock_ahead_s = await rig.publish(1), ahead_s
    await rig.keep("p1", digest, until=time.time() - ahead_s + 600)
    left_s = rig.preseeds._preseeds["p1"].ends_at - asyncio.get_running_loop().time()  # type: ignore[operator]
    assert 590 < left_s <= 600


async def test_what_is_over_by_this_hosts_clock_alone_fails_for_its_clock(rig: Rig) -> None:
    """A tracker that tells neither how long nor what time it is: nothing is dropped without a
    word."""
    digest = await rig.publish(1)
    await rig.keep("p1", digest, until=time.time() - 6600)
    assert rig.states("p1") == ["failed"] and "clock" in rig.said[-1].reason
    assert not rig.owners(digest)
