"""A hub at the tracker: read once for the fleet, kept over restarts, left alone when it asks for
it, and for identities that may read its repositories."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec
import pytest
from access_rig import access_site, ask
from hub_rig import Hub, running_hub

from p2pdist.model.digest import digest_of
from p2pdist.model.errors import Corrupt, NotFound, Refused, Unavailable
from p2pdist.model.hub import HubListing, decode_listing, hub_name, parse_hub
from p2pdist.model.vouched_list import vouched_layout
from tracker.state.documents import Documents
from tracker.upstreams.hubs import Hubs

NAME = hub_name("models", "org/name")
FILES = {"a.json": b"{}", "b/c.txt": b"text\n", "m.safetensors": os.urandom(100_000)}
RULES = """
fleet = "prod"
[join.default]
read = ["*"]
[join.a]
read = ["hf.co/team-a/*"]
[role.slurm]
may = ["preseed", "rank"]
read = ["hf.co/team-a/*"]
"""


@pytest.fixture
def hub() -> Iterator[Hub]:
    with running_hub() as running:
        yield running


@asynccontextmanager
async def opened(hub: Hub, state: Path | None = None, *, ttl_s: float = 30.0) -> AsyncIterator[Hubs]:
    """What a tracker that has just started knows of the hub."""
    documents = Documents(state) if state is not None else None
    hubs = Hubs(hub.base, documents, ttl_s=ttl_s)
    try:
        yield hubs
    finally:
        await hubs.close()
        if documents is not None:
            documents.close()


async def read(hubs: Hubs, token: str = "") -> HubListing:
    """Everything that a host asks for."""
    found = await hubs.revision(NAME, "main", token)
    listing = decode_listing(await hubs.listing(NAME, found.commit, token))
    for file in listing.files:
        assert await hubs.file(NAME, found.commit, file.path, token) == file
        if file.sha256:
            await hubs.location(NAME, found.commit, file.path, token)
        else:
            assert await hubs.content(NAME, found.commit, file.path, token) == FILES[file.path]
    return listing


async def test_a_fleet_that_asks_at_once_asks_the_hub_each_thing_once(hub: Hub) -> None:
    commit = hub.repository("org/name").commit(FILES)
    async with opened(hub) as hubs:
        learned = []
        hubs.learned = learned.append
        listings = await asyncio.gather(*(read(hubs) for _ in range(50)))
        assert {listing.commit for listing in listings} == {commit}
        assert set(hub.requests.values()) == {1}
        data = FILES["m.safetensors"]
        assert set(learned) == {((digest_of(data), vouched_layout(len(data))),)}
        assert hubs.asked == {"ok": sum(hub.requests.values())}


async def test_what_a_commit_consists_of_outlives_the_tracker_and_the_hub(hub: Hub, tmp_path: Path) -> None:
    commit = hub.repository("org/name").commit(FILES)
    async with opened(hub, tmp_path) as hubs:
        before = await read(hubs)
    asked = hub.requests.copy()
    async with opened(hub, tmp_path) as hubs:
        await hubs.admit(NAME)
        assert decode_listing(await hubs.listing(NAME, commit)) == before
        assert await hubs.content(NAME, commit, "a.json") == FILES["a.json"]
        assert {path for _, path in (hub.requests - asked)} == {"/api/models/org/name/auth-check"}
        hub.always["/api/"] = 500
        assert (await hubs.revision(NAME, "main")).commit == commit


async def test_a_branch_is_asked_for_again_after_a_while(hub: Hub) -> None:
    first = hub.repository("org/name").commit(FILES)
    async with opened(hub, ttl_s=0.0) as hubs:
        assert (await hubs.revision(NAME, "main")).commit == first
        second = hub.repository("org/name").commit({"other": b""})
        assert (await hubs.revision(NAME, "main")).commit == second
        assert len(decode_listing(await hubs.listing(NAME, first)).files) == len(FILES)
        hub.always["/revision/"] = 503
        assert (await hubs.revision(NAME, "main")).commit == second
        del hub.always["/revision/"]
        del hub.repository("org/name").refs["main"]
        hubs._away_until = 0.0
        with pytest.raises(NotFound) as failed:
            await hubs.revision(NAME, "main")
        assert failed.value.details["hub_code"] == "RevisionNotFound"


async def test_clients_are_asked_about_once_and_again_after_a_while(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    repository = hub.repository("org/name")
    repository.private, hub.tokens = True, {"good": {"org/name"}, "wrong": set()}
    repository.commit(FILES)
    async with opened(hub) as hubs:
        for _ in range(3):
            assert await hubs.admit(NAME, "good") is False
            for token in ("", "wrong"):
                with pytest.raises(NotFound):
                    await hubs.admit(NAME, token)
        assert hub.count("GET", "auth-check") == 3
        await read(hubs, "good")
        commit = repository.refs["main"]
        for token in ("", "wrong"):
            for call in (hubs.listing(NAME, commit, token), hubs.content(NAME, commit, "a.json", token)):
                with pytest.raises(NotFound):
                    await call
        hub.tokens["good"].clear()
        assert await hubs.admit(NAME, "good") is False
        hubs._answers.clear()
        with pytest.raises(NotFound):
            await hubs.listing(NAME, commit, "good")
        kept = repr(vars(hubs))
        assert "good" not in kept and "wrong" not in kept


async def test_a_hub_without_the_route_for_that_tells_by_its_info(hub: Hub) -> None:
    hub.auth_check = False
    hub.repository("org/name").commit(FILES)
    gated = hub.repository("org/gated")
    gated.gated, hub.tokens = True, {"good": {"org/gated"}}
    gated.commit(FILES)
    async with opened(hub) as hubs:
        assert await hubs.admit(NAME) is True
        with pytest.raises(Refused) as failed:
            await hubs.admit(hub_name("models", "org/gated"), "good")
        assert failed.value.details["hub_code"] == "GatedRepo"
        with pytest.raises(NotFound):
            await hubs.admit(hub_name("models", "org/none"), "good")


async def test_a_hub_that_asks_for_it_is_left_alone(hub: Hub) -> None:
    hub.repository("org/name").commit(FILES)
    async with opened(hub, ttl_s=0.0) as hubs:
        await read(hubs)
        hub.statuses.append(("/revision/", 429, {"Retry-After": "600"}))
        before = sum(hub.requests.values())
        for _ in range(3):
            await read(hubs)  # by what is known
        assert sum(hub.requests.values()) == before + 1
        with pytest.raises(Unavailable) as failed:
            await hubs.revision(hub_name("models", "org/more"), "main")
        assert 0 < failed.value.details["retry_after"] <= 600


async def test_a_token_that_is_limited_keeps_the_hub_from_no_other(hub: Hub) -> None:
    """Whoever has used up an account at the hub would have the fleet wait for as long as the hub
    says to that account."""
    hub.repository("org/name").commit(FILES)
    private = hub.repository("org/private")
    private.private = True
    private.commit(FILES)
    hub.tokens = {"good": {"org/private"}, "spent": {"org/private"}}
    hub.limited["spent"] = 600
    async with opened(hub) as hubs:
        with pytest.raises(Unavailable) as failed:
            await hubs.admit(hub_name("models", "org/private"), "spent")
        assert 0 < failed.value.details["retry_after"] <= 600
        await read(hubs)
        assert not await hubs.admit(hub_name("models", "org/private"), "good")
        before = sum(hub.requests.values())
        with pytest.raises(Unavailable):
            await hubs.admit(hub_name("models", "org/private"), "spent")
        assert sum(hub.requests.values()) == before, "it is left alone by that token"


async def test_an_address_that_is_stale_is_asked_for_again(hub: Hub) -> None:
    commit = hub.repository("org/name").commit(FILES)
    async with opened(hub) as hubs:
        first = await hubs.location(NAME, commit, "m.safetensors")
        assert first.url.startswith(hub.storage) and first.hub == hub.base
        assert await hubs.location(NAME, commit, "m.safetensors", stale="http://other") == first
        assert hub.count("HEAD", "m.safetensors") == 1
        await hubs.location(NAME, commit, "m.safetensors", stale=first.url)
        assert hub.count("HEAD", "m.safetensors") == 2


async def test_what_is_wrong_is_not_kept(hub: Hub) -> None:
    commit = hub.repository("org/name").commit(FILES)
    hub.change = lambda path, data: data + b"x"
    async with opened(hub) as hubs:
        with pytest.raises(Corrupt):
            await hubs.content(NAME, commit, "a.json")
        hub.change = lambda path, data: data
        assert await hubs.content(NAME, commit, "a.json") == FILES["a.json"]


async def test_a_listing_that_goes_on_elsewhere_or_for_ever_is_refused(
    hub: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("p2pdist.origin.huggingface.hub.PAGES_MAX", 2)
    hub.page = 1
    commit = hub.repository("org/name").commit(FILES)
    async with opened(hub) as hubs:
        with pytest.raises(Refused):
            await hubs.listing(NAME, commit)
        hub.base = hub.storage
        with pytest.raises(Refused):
            await hubs.listing(NAME, commit)


async def test_a_tracker_without_a_hub_says_what_to_do() -> None:
    hubs = Hubs()
    with pytest.raises(NotFound, match="--hub"):
        await hubs.admit(NAME)


async def test_a_preseed_learns_how_all_files_are_cut(hub: Hub) -> None:
    commit = hub.repository("org/name").commit(FILES)
    async with opened(hub) as hubs:
        data = FILES["m.safetensors"]
        assert await hubs.blobs(parse_hub("hf://org/name")) == (commit, {digest_of(data): len(data)})


async def test_identities_read_the_repositories_that_rules_let_them(hub: Hub, tmp_path: Path) -> None:
    for name in ("team-a/x", "team-b/y"):
        hub.repository(name).commit(FILES)
    async with access_site(tmp_path, RULES, hub=hub.base) as site:
        agent = await site.join("host-a", "a")
        slurm = await site.stranger(site.token("slurm"))
        base, book = "/v1/hub/models", site.service.fleet.policies
        found = msgspec.json.decode(await ask(agent.http, "GET", f"{base}/team-a%2Fx/revision?revision=main"))
        query = f"commit={found['commit']}&path=m.safetensors"
        await ask(agent.http, "GET", f"{base}/team-a%2Fx/file?{query}")
        digest = digest_of(FILES["m.safetensors"])
        assert set(book.readers_of(digest)) == {"hf.co/team-a/x"}
        before = sum(hub.requests.values())
        for path in ("", "/revision?revision=main", f"/file?{query}", f"/location?{query}", "/refs"):
            with pytest.raises(NotFound):
                await ask(agent.http, "GET", f"{base}/team-b%2Fy{path}")
        for method, path, body in (
            ("POST", "/v1/preseeds", {"package": "hf://team-b/y", "count": 1}),
            ("POST", "/v1/rank", {"packages": ["hf://team-b/y"]}),
        ):
            with pytest.raises(NotFound):
                await ask(slurm, method, path, body)
        assert sum(hub.requests.values()) == before, "what may not be read is not asked for either"
        made = msgspec.json.decode(await ask(slurm, "POST", "/v1/preseeds", {"package": "hf://team-a/x", "count": 1}))
        assert made["package"] == f"hf://team-a/x@{found['commit']}"
