"""The door for clients of model hubs under clients that mean no good, or know no better."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import AsyncIterator
from contextlib import suppress
from pathlib import Path
from urllib.parse import urlsplit

import aiohttp
import pytest
from hub_site import HubSite, hub_site
from waits import until

from p2pdist.agent.models import models
from p2pdist.gateway.huggingface import door
from p2pdist.transfer import documents

MANY = 3000
LONG = "/".join(["x" * 250] * 7)
"""With it an answer about MANY files is larger than what the kernel takes for a client."""


@pytest.fixture
async def site(tmp_path: Path) -> AsyncIterator[HubSite]:
    async with hub_site(tmp_path, "h1") as running:
        yield running


async def raw(site: HubSite, head: bytes) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Send bytes to the door; `HF` in them is its prefix."""
    reader, writer = await asyncio.open_connection("127.0.0.1", urlsplit(site.doors["h1"]).port, limit=1 << 12)
    writer.write(head)
    return reader, writer


async def test_a_model_of_the_owner_datasets_is_not_the_data_set(site: HubSite) -> None:
    """Both would be one name, and what the hub says of the one would count for the other: a client
    could have a data set denied to all hosts for a while."""
    site.hub.repository("squad", "datasets").commit({"a.json": b"{}"})
    assert (await site.ask("/api/models/datasets/squad")).status == 400
    assert (await site.ask("/api/datasets/squad")).status == 200
    assert not site.hub.count("GET", "/api/models/")


@pytest.mark.slow
async def test_a_repository_that_lies_about_a_file_keeps_nobody_from_it_elsewhere(site: HubSite) -> None:
    """Whoever has a repository may list the digest of a file of others, and give another one."""
    data, lie = os.urandom(2 << 20), "/evil/copy/resolve/main/stolen.safetensors"
    site.hub.repository("org/honest").commit({"model.safetensors": data})
    site.hub.repository("evil/copy").commit({"stolen.safetensors": data})
    site.hub.change = lambda path, content: bytes(len(content)) if "stolen" in path else content
    with suppress(aiohttp.ClientError):  # some of it may have been sent
        assert (await site.ask(lie)).status == 502
    sent = site.sent
    again = await site.ask(lie)
    assert again.status == 502 and "stolen.safetensors" in again.headers["X-Error-Message"]
    assert site.sent == sent, "it is not read again at once"
    assert (await site.ask("/org/honest/resolve/main/model.safetensors")).body == data
    assert (await site.ask(lie)).body == data, "what is here is right, whoever lists it"


@pytest.mark.slow
async def test_a_commit_of_a_hundred_thousand_files_is_listed_and_read(
    site: HubSite, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(door, "BEGIN_S", 600.0)
    files = {f"d{number % 100:02}/f{number:06}.json": b"%d" % number for number in range(100_000)}
    site.hub.page = 20_000
    site.hub.repository("org/many", "datasets").commit(files)
    url, found = "/api/datasets/org/many/tree/main?recursive=true", list[str]()
    while url:
        page = await site.ask(url)
        assert page.status == 200
        found += [entry["path"] for entry in json.loads(page.body) if entry["type"] == "file"]
        url = page.next
    assert found == sorted(files), "each one once"
    path = "d42/f031342.json"
    assert (await site.ask(f"/datasets/org/many/resolve/main/{path}")).body == files[path]
    assert site.hub.count("GET", "/tree/") == 6, "the hub was asked for its pages once"


@pytest.mark.slow
async def test_a_branch_that_is_pushed_over_while_a_file_comes_changes_nothing_of_it(site: HubSite) -> None:
    """The commit that it named goes on being read, and stays readable beside the next one."""
    first, second = os.urandom(4 << 20), os.urandom(1 << 20)
    repository, path = site.hub.repository("org/tiny"), "/org/tiny/resolve/main/model.safetensors"
    commit = repository.commit({"model.safetensors": first})
    site.hub.rate_bytes_s = 1 << 20
    reading = asyncio.create_task(site.ask(path))
    await until(lambda: site.sent > 0, within_s=60)
    pushed = repository.commit({"model.safetensors": second})
    site.hub.rate_bytes_s = 0.0
    answer = await reading
    assert answer.body == first and answer.headers["X-Repo-Commit"] == commit
    assert (await site.ask(f"/org/tiny/resolve/{commit}/model.safetensors")).body == first
    assert (await site.ask(f"/org/tiny/resolve/{pushed}/model.safetensors")).body == second


async def test_a_hub_that_wants_to_be_left_alone_for_a_file_is_asked_again_then(site: HubSite) -> None:
    """A client is told how long; what was read meanwhile stays known."""
    site.hub.repository("org/tiny").commit({"a.json": b"{}", "b.json": b"[]"})
    assert (await site.ask("/org/tiny/resolve/main/a.json")).body == b"{}"
    site.hub.statuses.append(("/b.json", 429, {"Retry-After": "1"}))
    answer = await site.ask("/org/tiny/resolve/main/b.json")
    assert (answer.status, answer.headers["Retry-After"]) == (429, "1")
    assert (await site.ask("/org/tiny/resolve/main/a.json")).body == b"{}"

    async def given() -> bool:
        return (await site.ask("/org/tiny/resolve/main/b.json")).status == 200

    async with asyncio.timeout(60):
        while not await given():
            await asyncio.sleep(0.05)


@pytest.mark.parametrize(
    ("name", "part"), [("a/../../evil", "a/../../evil"), ("a\nbad", "bad"), ("\x1b[2Jgone", "gone")]
)
async def test_a_commit_with_a_bad_name_is_refused_and_the_name_is_said(site: HubSite, name: str, part: str) -> None:
    site.hub.repository("org/bad").commit({"good.json": b"{}", name: b"x"})
    answer = await site.ask("/org/bad/resolve/main/good.json")
    said = answer.headers["X-Error-Message"]
    assert answer.status == 403 and said.isprintable() and part in said


@pytest.mark.parametrize(
    ("body", "content_type"),
    [
        (b'{"paths": 5}', "application/json"),
        (b'{"paths": null}', "application/json"),
        (b'{"paths": [5]}', "application/json"),
        (b"[" * 100_000, "application/json"),
        (b"paths=a", "application/x-www-form-urlencoded; charset=none-such"),
        (b"paths=\xff", "application/x-www-form-urlencoded; charset=utf-16"),
        (b"--x\r\nnot a part", "multipart/form-data; boundary=x"),
        (b"--x", "multipart/form-data"),
    ],
)
async def test_paths_that_cannot_be_read_are_the_mistake_of_the_client(
    site: HubSite, body: bytes, content_type: str
) -> None:
    site.hub.repository("org/tiny").commit({"a.json": b"{}"})
    url, headers = "/api/models/org/tiny/paths-info/main", {"Content-Type": content_type}
    assert (await site.ask(url, "POST", headers=headers, data=body)).status == 400
    good = await site.ask(url, "POST", json={"paths": ["a.json"]})
    assert [entry["path"] for entry in json.loads(good.body)] == ["a.json"], "the connection goes on"


@pytest.mark.parametrize("kind", [b"application/json", b"application/x-www-form-urlencoded"])
async def test_paths_that_are_not_coded_as_they_are_said_to_be_are_the_mistake_of_the_client(
    site: HubSite, kind: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    site.hub.repository("org/tiny").commit({"a.json": b"{}"})
    head = b"POST /hf/api/models/org/tiny/paths-info/main HTTP/1.1\r\nHost: localhost\r\nContent-Type: " + kind
    reader, writer = await raw(site, head + b"\r\nContent-Encoding: gzip\r\nContent-Length: 8\r\n\r\nnonsense")
    answer = await asyncio.wait_for(reader.read(), 30)
    writer.close()
    assert answer.startswith(b"HTTP/1.1 400 ") and b"gzip" in answer
    assert not [record for record in caplog.records if record.levelname == "ERROR"]


async def test_paths_that_do_not_arrive_are_not_waited_for_long(site: HubSite, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their request is one of those that the door answers at once."""
    site.hub.repository("org/tiny").commit({"a.json": b"{}"})
    monkeypatch.setattr(door, "BODY_S_MAX", 0.3)
    head = b"POST /hf/api/models/org/tiny/paths-info/main HTTP/1.1\r\nHost: localhost\r\n"
    reader, writer = await raw(site, head + b"Content-Type: application/json\r\nContent-Length: 100\r\n\r\n{")
    answer = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 30)
    writer.close()
    assert answer.startswith(b"HTTP/1.1 400 ") and b"did not arrive" in answer


@pytest.mark.parametrize("version", [b"1.0", b"1.1"])
async def test_a_page_is_given_whatever_stands_in_the_query(site: HubSite, version: bytes) -> None:
    """A character that is none, and no field Host: the next page has an address all the same."""
    site.hub.repository("org/tiny").commit({f"{number}.json": b"{}" for number in range(3)})
    head = b"GET /hf/api/models/org/tiny/tree/main?limit=1&x=%ff HTTP/" + version
    host = b"\r\nHost: localhost" if version == b"1.1" else b""
    reader, writer = await raw(site, head + host + b"\r\nConnection: close\r\n\r\n")
    answer = await reader.read(1 << 16)
    writer.close()
    assert answer.split(b"\r\n", 1)[0].endswith(b"200 OK") and b'rel="next"' in answer


async def test_clients_that_read_nothing_take_a_share_of_memory(site: HubSite, monkeypatch: pytest.MonkeyPatch) -> None:
    site.hub.repository("org/many").commit({f"{LONG}/{number}.json": b"{}" for number in range(MANY)})
    path = "/api/models/org/many?blobs=true"
    monkeypatch.setattr(door, "BEGIN_S", 600.0)
    size = len((await site.ask(path)).body)
    monkeypatch.setattr(documents, "BYTES_MAX", 8 * size)
    monkeypatch.setattr(documents, "SECONDS_MAX", 3600.0)
    silent = []

    async def refused() -> bool:
        silent.append(await raw(site, f"GET /hf{path} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode()))
        answer = await site.ask(path)
        assert answer.status == 200 or b"have yet to read" in answer.body
        return answer.status == 429

    async with asyncio.timeout(300):
        while not await refused():
            assert len(silent) < 50
    assert (await site.ask("/api/models/org/many/auth-check")).status == 200, "small answers are given"
    for _, writer in silent:
        writer.transport.abort()

    async def given() -> bool:
        return (await site.ask(path)).status == 200

    async with asyncio.timeout(300):
        while not await given():
            await asyncio.sleep(0.05)


async def test_a_small_file_among_too_many_large_answers_is_asked_for_again(
    site: HubSite, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Clients repeat a GET of a file on 429, and fail on 503."""
    size, silent = 6 << 20, []
    site.hub.repository("org/tiny").commit({"tokenizer.json": os.urandom(size)})
    path = "/org/tiny/resolve/main/tokenizer.json"
    monkeypatch.setattr(door, "BEGIN_S", 600.0)
    monkeypatch.setattr(documents, "BYTES_MAX", 2 * size)
    monkeypatch.setattr(documents, "SECONDS_MAX", 3600.0)
    async with asyncio.timeout(120):
        while (answer := await site.ask(path)).status == 200:
            assert len(silent) < 10
            silent.append(await raw(site, f"GET /hf{path} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode()))
    for _, writer in silent:
        writer.transport.abort()
    assert (answer.status, answer.headers["Retry-After"]) == (429, "1")


async def test_what_the_hub_says_of_many_revisions_takes_a_share_of_memory_and_disk(
    site: HubSite, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(models, "REVISIONS_BYTES_MAX", 1 << 20)
    monkeypatch.setattr(models, "KEPT_BYTES_MAX", 1 << 20)
    repository, agent = site.hub.repository("org/many"), site.site.agents["h1"]
    for number in range(6):
        commit = repository.commit({f"{number}{name:0200}.json": b"{}" for name in range(1500)}, f"b{number}")
        assert (await site.ask(f"/api/models/org/many/revision/{commit}")).status == 200
    kept = [len(found.info) for _, found in agent.models._fresh.values()]
    assert 1 <= len(kept) < 6 and sum(kept) <= 1 << 20
    records = [record for record in agent.store.images.list() if record.target.startswith("hub revision ")]
    sizes = [agent.store.document_size(record.digest) for record in records]
    assert 1 <= len(records) < 6 and sum(sizes) <= 1 << 20, "on disk as well"
    assert [record.target for record in records if record.target.endswith(commit)], "the latest is kept"
