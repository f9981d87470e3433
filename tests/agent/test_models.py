"""Models of a hub by their names: hosts pull, hold and rank by them, as by packages."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "gateway"))

from hub_site import HubSite, hub_site, make_files
from image_site import pulled
from test_images_late import Relay
from waits import until

from p2pdist.agent.tracker import connection
from p2pdist.model.digest import digest_of
from p2pdist.model.errors import NotFound, Unavailable, UsageError
from p2pdist.model.hub import HubAdmission, HubName, hub_name
from p2pdist.model.preseed import PreseedRequest, RankRequest


@pytest.fixture
async def site(tmp_path: Path) -> AsyncIterator[HubSite]:
    async with hub_site(tmp_path, "h1", "h2", "h3") as running:
        yield running


@pytest.fixture
async def relay() -> AsyncIterator[Relay]:
    async with Relay().running() as running:
        yield running


async def test_a_model_that_was_pulled_is_given_without_a_tracker(site: HubSite) -> None:
    files = make_files(300_000)
    commit = site.hub.repository("org/tiny").commit(files)
    status = (await pulled(site.site.agents["h1"], "hf://org/tiny")).status()
    large = sum(len(data) for path, data in files.items() if path.endswith(".safetensors"))
    assert (status.reference, status.digest) == ("hf://org/tiny@main", commit)
    assert (status.bytes_total, status.bytes_done) == (large, large)
    await site.site.stop_tracker()
    await until(lambda: not site.site.agents["h1"].session.connected)
    for path, data in files.items():
        assert (await site.ask(f"/org/tiny/resolve/main/{path}")).body == data
    with pytest.raises(UsageError):
        await site.site.agents["h1"].pulls.package("hf://org/tiny")


async def test_hosts_hold_a_commit_and_are_ranked_by_it(site: HubSite) -> None:
    files = make_files(300_000)
    commit = site.hub.repository("org/data", "datasets").commit(files)
    blobs = {digest_of(data): len(data) for path, data in files.items() if path.endswith(".safetensors")}
    preseeds, size = site.site.preseeds, sum(blobs.values())
    assert preseeds is not None
    progress, _ = await preseeds.create(PreseedRequest("hf://datasets/org/data", hosts=("h1", "h2")))
    site.hub.repository("org/data", "datasets").commit({"other.bin": b"x"})
    async with asyncio.timeout(120):
        while (progress := preseeds.progress(progress.id)).state != "done":
            assert progress.state == "running"
            await asyncio.sleep(0.05)
    assert progress.package == f"hf://datasets/org/data@{commit}" and progress.bytes_total == 2 * size
    for name in ("h1", "h2"):
        store = site.site.agents[name].store
        assert all(f"preseed:{progress.id}" in store.pins.owners(blob) for blob in blobs)
        assert all((blob := store.get(digest)) is not None and blob.complete for digest in blobs)
    ranked = await preseeds.rank(RankRequest(packages=(progress.package,)))
    assert isinstance(ranked, list)
    assert {host.host: host.bytes_missing for host in ranked} == {"h1": 0, "h2": 0, "h3": size}


async def test_what_the_hub_does_not_give_to_everybody_is_not_pulled_by_name(site: HubSite) -> None:
    site.hub.repository("org/private").private = True
    site.hub.repository("org/private").commit(make_files(1000))
    for reference in ("hf://org/private", "hf://org/none"):
        with pytest.raises(NotFound):
            await pulled(site.site.agents["h1"], reference)
    assert site.site.preseeds is not None
    with pytest.raises(NotFound):
        await site.site.preseeds.create(PreseedRequest("hf://org/private", count=1))


async def test_a_tracker_hears_of_files_that_agents_ask_another_one_for(site: HubSite) -> None:
    digest = digest_of(b"a file")
    told = {"name": "hf.co/org/tiny", "digest": str(digest), "size": 6}
    url = f"http://127.0.0.1:{site.site.port}/v1/trackers/known"
    assert (await site.ask(url, "POST", json=told)).status == 204
    service = site.site.service
    assert service is not None
    await until(lambda: service.fleet.membership.described(digest))


async def test_what_this_host_has_is_given_while_the_tracker_hangs(
    site: HubSite, relay: Relay, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As one does whose process is stopped: its host keeps the connections."""
    monkeypatch.setattr(connection, "HEARTBEAT_S", 3600.0)  # on a busy machine too nothing else tells of it
    files = make_files(300_000)
    commit = site.hub.repository("org/tiny").commit(files)
    relay.target, site.site.port = site.site.port, relay.port
    await pulled(await site.start("h4"), "hf://org/tiny")
    await site.site.stop_agent("h4")
    agent = await site.start("h4")
    relay.frozen.set()
    info = await site.ask("/api/models/org/tiny/revision/main", at="h4")
    assert (info.status, json.loads(info.body)["sha"]) == (200, commit)
    for path, data in files.items():
        for method in ("HEAD", "GET"):
            answer = await site.ask(f"/org/tiny/resolve/main/{path}", method, at="h4")
            assert answer.status == 200 and answer.body == (data if method == "GET" else b""), path
    assert agent.session.connected, "it has not been told that the tracker is gone"


async def test_a_repository_that_is_closed_meanwhile_is_not_given_as_one_that_was_open(
    site: HubSite, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its tracker answers one client, and then no other one."""
    site.hub.repository("org/tiny").commit(make_files(1000))
    models, name = site.site.agents["h1"].models, hub_name("models", "org/tiny")
    await models.admit(name, "")
    models._admitted.clear()
    asked, gate = asyncio.Event(), asyncio.Event()

    async def admission(_: HubName, token: str) -> HubAdmission:
        if not token:
            raise NotFound("closed")
        asked.set()
        await gate.wait()
        raise Unavailable("away")

    monkeypatch.setattr(models._tracked, "admission", admission)
    waiting = asyncio.create_task(models.admit(name, "token"))
    await asked.wait()
    with pytest.raises(NotFound):
        await models.admit(name, "")
    gate.set()
    with pytest.raises(Unavailable):
        await waiting
