"""What a tag was last said to name counts for a while where nobody answers, and no longer than it
may. Agents of this process with an origin of their own that goes away."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from pathlib import Path

import pytest
from joined_rig import push_package

from p2pdist.agent.agent import Agent, AgentSettings
from p2pdist.agent.pull.pulls import Pull
from p2pdist.model.errors import NotFound, Unavailable
from p2pdist.model.manifest import parse_reference
from p2pdist.model.messages import PullRequest
from p2pdist.origin.layout import LocalLayout
from p2pdist.store import pins

NOBODY = "http://127.0.0.1:9"
TAG = "team/app:v1"

Start = Callable[..., AsyncExitStack]


class OneHost:
    """One agent after another over the same store."""

    def __init__(self, store: Path, stack: AsyncExitStack) -> None:
        self._store, self._stack = store, stack
        self._stop = AsyncExitStack()

    async def start(self, *trackers: str, **settings: object) -> Agent:
        await self._stop.aclose()
        agent = Agent(AgentSettings(trackers, "h1", "127.0.0.1:1", self._store, tracker_wait_s=0.1, **settings))  # type: ignore[arg-type]
        self._stop.push_async_callback(agent.stop)
        self._stack.push_async_callback(self._stop.aclose)
        await agent.start()
        return agent


@pytest.fixture
async def host(tmp_path: Path) -> AsyncIterator[OneHost]:
    async with AsyncExitStack() as stack:
        yield OneHost(tmp_path / "store", stack)


async def pulled(agent: Agent, reference: str = TAG) -> Pull:
    pull = agent.pulls.start(PullRequest(package=reference))
    assert pull.task is not None
    await pull.task
    return pull


async def test_a_tag_counts_as_it_was_last_known_while_no_tracker_answers(
    host: OneHost, origin: LocalLayout, caplog: pytest.LogCaptureFixture
) -> None:
    digest = await push_package(origin, TAG, b"content")
    began = time.time()
    status = (await pulled(await host.start(origin=origin.url))).status()
    assert status.state == "done" and status.tag_age_s is None, status
    pull = await pulled(await host.start(NOBODY))
    status = pull.status()
    assert (status.state, status.digest) == ("done", digest), status
    assert status.tag_age_s is not None and 0 <= status.tag_age_s <= time.time() - began
    assert f"package={TAG} digest={digest} as of " in caplog.text and "no tracker answered" in caplog.text


async def test_it_counts_no_longer_than_it_may(host: OneHost, origin: LocalLayout) -> None:
    await push_package(origin, TAG, b"content")
    await pulled(await host.start(origin=origin.url))
    pull = await pulled(await host.start(NOBODY, stale_tag_s=0.0))
    assert isinstance(pull.error, Unavailable) and "no tracker answered" in pull.error.what


@pytest.mark.slow
async def test_a_tag_that_was_never_told_here_or_is_no_more_is_not_made_up(host: OneHost, origin: LocalLayout) -> None:
    """That there is no such tag any more is an answer, too."""
    await push_package(origin, TAG, b"content")
    await push_package(origin, "team/app:v2", b"other")
    agent = await host.start(origin=origin.url)
    for reference in (TAG, "team/app:v2"):
        assert (await pulled(agent, reference)).error is None
    await origin.untag(parse_reference(TAG))
    assert isinstance((await pulled(agent)).error, NotFound)
    agent = await host.start(NOBODY)
    for reference in (TAG, "team/app:v3"):
        assert isinstance((await pulled(agent, reference)).error, Unavailable), reference
    assert (await pulled(agent, "team/app:v2")).error is None


async def test_a_tag_that_moved_is_known_as_it_is_now(host: OneHost, origin: LocalLayout) -> None:
    await push_package(origin, TAG, b"content")
    agent = await host.start(origin=origin.url)
    await pulled(agent)
    digest = await push_package(origin, TAG, b"another")
    assert (await pulled(agent)).status().digest == digest
    assert (await pulled(await host.start(NOBODY))).status().digest == digest


async def test_tags_are_limited_and_blobs_are_none(
    host: OneHost, origin: LocalLayout, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pins, "TAGS_MAX", 2)
    agent = await host.start(origin=origin.url)
    for number in range(3):
        await push_package(origin, f"team/app:v{number}", b"content %d" % number)
        await pulled(agent, f"team/app:v{number}")
    assert [record.reference for record in agent.store.tags.list()] == ["team/app:v1", "team/app:v2"]
    agent = await host.start(NOBODY)
    assert [record.reference for record in agent.store.tags.list()] == ["team/app:v1", "team/app:v2"]


async def test_a_clock_that_was_set_back_makes_no_tag_current(host: OneHost, origin: LocalLayout) -> None:
    """What was told in what is now the future has no age."""
    await push_package(origin, TAG, b"content")
    agent = await host.start(origin=origin.url)
    with pytest.MonkeyPatch.context() as patch:
        later = time.time() + 3600
        patch.setattr(pins.time, "time", lambda: later)
        await pulled(agent)
    assert isinstance((await pulled(await host.start(NOBODY))).error, Unavailable)
