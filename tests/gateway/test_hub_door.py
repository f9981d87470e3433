"""The door for clients of model hubs: what they ask for, answered as the hub does, from one reading
of the hub for the fleet."""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
from collections.abc import AsyncIterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from hub_rig import git_oid, pointer_of
from hub_site import HubSite, hub_site, make_files
from waits import until

from p2pdist.gateway.huggingface import door


@pytest.fixture
async def site(tmp_path: Path) -> AsyncIterator[HubSite]:
    async with hub_site(tmp_path, "h1") as running:
        yield running


async def test_a_model_is_read_through_the_door(site: HubSite) -> None:
    files = make_files()
    commit = site.hub.repository("org/tiny").commit(files)
    info = await site.ask("/api/models/org/tiny/revision/main")
    assert info.status == 200 and json.loads(info.body)["sha"] == commit
    tree = await site.ask(f"/api/models/org/tiny/tree/{commit}?recursive=true&expand=false")
    entries = {entry["path"]: entry for entry in json.loads(tree.body)}
    assert entries.keys() == files.keys() | {"nested", "nested/deep"}
    assert b"xet" not in tree.body
    for path, data in files.items():
        large = path.endswith(".safetensors")
        etag = hashlib.sha256(data).hexdigest() if large else git_oid(data)
        assert entries[path]["size"] == len(data)
        assert ("lfs" in entries[path]) == large
        head = await site.ask(f"/org/tiny/resolve/main/{path}", "HEAD")
        assert head.status == 200 and head.headers["X-Repo-Commit"] == commit
        assert head.headers["ETag"] == f'"{etag}"' and int(head.headers["Content-Length"]) == len(data)
        assert not [name for name in head.headers if "xet" in name.lower()] and "Location" not in head.headers
        whole = await site.ask(f"/org/tiny/resolve/{commit}/{path}")
        assert whole.status == 200 and whole.body == data and "Content-Encoding" not in whole.headers
        if data:
            part = await site.ask(f"/org/tiny/resolve/{commit}/{path}", headers={"Range": "bytes=1-"})
            assert part.status == 206 and part.body == data[1:]
            assert part.headers["Content-Range"] == f"bytes 1-{len(data) - 1}/{len(data)}"
    assert site.sent == sum(len(data) for path, data in files.items() if path.endswith(".safetensors"))
    for path in files:
        assert site.hub.count("HEAD", f"resolve/{commit}/{path}") == path.endswith(".safetensors")
    assert not any(site.hub.shown)


async def test_a_byte_is_asked_for_to_learn_the_size(site: HubSite, monkeypatch: pytest.MonkeyPatch) -> None:
    """As Hugging Face's client in JavaScript does, of any file: of an empty one, and of one whose
    pieces nothing has proven yet, without waiting for the rest of it."""
    files = make_files()
    site.hub.repository("org/tiny").commit(files)
    for path in ("config.json", "empty.txt"):
        answer = await site.ask(f"/org/tiny/resolve/main/{path}", headers={"Range": "bytes=0-0"})
        assert (answer.status, answer.body) == ((206, files[path][:1]) if files[path] else (200, b""))
        assert answer.headers["Content-Range"].endswith(f"/{len(files[path])}")
    monkeypatch.setattr(door, "BEGIN_S", 600.0)
    url, data = f"{site.doors['h1']}/org/tiny/resolve/main/model-1.safetensors", files["model-1.safetensors"]
    site.hub.rate_bytes_s = 2e6
    async with aiohttp.ClientSession() as http, http.get(url) as whole:
        assert await whole.content.read(1) == data[:1]
        site.hub.hangs = "/lfs/"
        async with http.get(url, headers={"Range": "bytes=0-0"}) as answer:
            assert (answer.status, answer.headers["Content-Range"]) == (206, f"bytes 0-0/{len(data)}")
            assert answer.headers["ETag"] == f'"{hashlib.sha256(data).hexdigest()}"'


@pytest.mark.parametrize("method", ["GET", "HEAD"])
async def test_a_file_that_is_another_one_by_now_is_not_given(site: HubSite, method: str) -> None:
    """A client that goes on with a file of a branch says which one it has begun."""
    site.hub.repository("org/tiny").commit(make_files())
    for path in ("resolve/main/config.json", "resolve/main/model-1.safetensors", "raw/main/model-1.safetensors"):
        known = (await site.ask(f"/org/tiny/{path}", "HEAD")).headers["ETag"]
        for tag, status in (('"other"', 412), (known, 200)):
            answer = await site.ask(f"/org/tiny/{path}", method, headers={"If-Match": tag})
            assert (answer.status, answer.headers["ETag"]) == (status, known), (path, tag)


async def test_hosts_that_start_at_once_take_one_copy(site: HubSite) -> None:
    files = make_files()
    site.hub.repository("org/tiny").commit(files)
    hosts = ["h1", "h2", "h3", "h4"]
    for name in hosts[1:]:
        await site.start(name)

    async def read(host: str, path: str) -> None:
        assert (await site.ask(f"/org/tiny/resolve/main/{path}", at=host)).body == files[path]

    await asyncio.gather(*(read(host, path) for host in hosts for path in files))
    # One copy, and what a busy machine takes again; each by itself would take four.
    assert site.sent < 3.5 * sum(len(data) for path, data in files.items() if path.endswith(".safetensors"))
    twice = {key: number for key, number in site.hub.requests.items() if number > 1 and "/lfs/" not in key[1]}
    assert not twice


async def test_a_tree_comes_in_pages_that_name_the_door(site: HubSite) -> None:
    files = {f"d{number % 3}/f{number:04}": b"%d" % number for number in range(250)}
    site.hub.page = 37
    first = site.hub.repository("org/name", "datasets").commit(files)
    found, url, pages = set[str](), "/api/datasets/org/name/tree/main?recursive=true&limit=100", 0
    while url:
        page = await site.ask(url)
        assert page.status == 200 and page.headers["X-Repo-Commit"] == first
        found |= {entry["path"] for entry in json.loads(page.body) if entry["type"] == "file"}
        url, pages = page.next, pages + 1
        assert not url or url.startswith(site.doors["h1"])
        if pages == 1:  # the pages after the first are of the same commit
            site.hub.repository("org/name", "datasets").commit({"other": b""})
    assert found == files.keys() and pages == 3
    named = await site.ask(f"/api/datasets/org/name/tree/{first}?limit=1", headers={"Host": "door_1:7073"})
    assert named.next.startswith("http://door_1:7073/hf/"), "compose files name containers so"
    flat = json.loads((await site.ask(f"/api/datasets/org/name/tree/{first}")).body)
    assert [(entry["type"], entry["path"]) for entry in flat] == [("directory", f"d{number}") for number in range(3)]
    below = json.loads((await site.ask(f"/api/datasets/org/name/tree/{first}/d1")).body)
    assert {entry["path"] for entry in below} == {path for path in files if path.startswith("d1/")}
    absent = await site.ask(f"/api/datasets/org/name/tree/{first}/additional_chat_templates")
    assert (absent.status, absent.code) == (404, "EntryNotFound")
    asked: dict[str, Any] = {"paths": ["d1/f0001", "d2", "none"]}
    bodies: tuple[dict[str, Any], ...] = ({"json": asked}, {"data": [("paths", path) for path in asked["paths"]]})
    for body in bodies:
        described = await site.ask(f"/api/datasets/org/name/paths-info/{first}", "POST", **body)
        assert [(entry["type"], entry["path"]) for entry in json.loads(described.body)] == [
            ("file", "d1/f0001"),
            ("directory", "d2"),
        ]


async def test_a_file_as_git_keeps_it(site: HubSite) -> None:
    files = make_files(300_000)
    site.hub.repository("org/tiny").commit(files)
    pointer, weight = pointer_of(files["model-1.safetensors"]), "/org/tiny/raw/main/model-1.safetensors"
    answer = await site.ask(weight)
    assert (answer.status, answer.body, answer.headers["ETag"]) == (200, pointer, f'"{git_oid(pointer)}"')
    assert (await site.ask(weight, headers={"If-None-Match": answer.headers["ETag"]})).status == 304
    head = await site.ask(weight, "HEAD")
    assert (head.status, head.headers["Content-Length"]) == (200, str(len(pointer)))
    assert (await site.ask("/org/tiny/raw/main/config.json")).body == files["config.json"]
    absent = await site.ask("/org/tiny/raw/main/none.json", "HEAD")
    assert (absent.status, absent.code) == (404, "EntryNotFound")
    assert not site.sent, "the content was not brought"


async def test_what_is_missing_is_said_as_the_hub_does(site: HubSite) -> None:
    commit = site.hub.repository("org/tiny").commit({"a.json": b"{}"})
    for method in ("GET", "HEAD"):
        for path, status, code in (
            ("/org/tiny/resolve/main/none.json", 404, "EntryNotFound"),
            ("/org/tiny/resolve/none/a.json", 404, "RevisionNotFound"),
            (f"/org/tiny/resolve/{'0' * 40}/a.json", 404, "RevisionNotFound"),
            ("/org/none/resolve/main/a.json", 401, "RepoNotFound"),
            ("/api/models/org/none", 401, "RepoNotFound"),
            ("/org/tiny/resolve/main/..%2Fa.json", 400, ""),
            ("/org/tiny/blob/main/a.json", 404, "RepoNotFound"),
        ):
            answer = await site.ask(path, method)
            assert (answer.status, answer.code) == (status, code), (method, path)
            assert answer.headers["X-Error-Message"]
    assert (await site.ask("/org/tiny/resolve/main/none.json")).headers["X-Repo-Commit"] == commit
    assert (await site.ask("/org/tiny/resolve/main/a.json", "POST")).status == 405


def bearer(token: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {token}"}


async def test_a_private_repository_is_for_clients_that_may_read_it(
    site: HubSite, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("DEBUG")
    files = make_files(300_000)
    for name, gated in (("org/private", False), ("org/gated", True)):
        repository = site.hub.repository(name)
        repository.private, repository.gated = not gated, gated
        repository.commit(files)
    site.hub.tokens = {"hf_reads": {"org/private", "org/gated"}, "hf_other": set()}
    await site.start("h2")
    for name, code in (("org/private", "RepoNotFound"), ("org/gated", "GatedRepo")):
        for at in ("h1", "h2"):
            for path in files:
                answer = await site.ask(f"/{name}/resolve/main/{path}", at=at, headers=bearer("hf_reads"))
                assert answer.body == files[path]
            for path in ("config.json", "model-1.safetensors"):  # which are here by now
                refusals = (({}, 401), (bearer("hf_other"), 404 if code == "RepoNotFound" else 403))
                for headers, status in refusals:
                    refused = await site.ask(f"/{name}/resolve/main/{path}", at=at, headers=headers)
                    assert (refused.status, refused.code) == (status, code)
            invalid = await site.ask(f"/{name}/resolve/main/config.json", at=at, headers=bearer("hf_wrong"))
            assert (invalid.status, invalid.code) == (401, "")
            assert invalid.headers["X-Error-Message"] == "Invalid credentials in Authorization header"
    assert "hf_reads" not in caplog.text and "hf_other" not in caplog.text
    stored = b"".join(path.read_bytes() for path in site.site.directory.rglob("*") if path.is_file())
    assert b"hf_reads" not in stored


async def test_a_listing_that_names_content_of_others_gives_none_of_it(site: HubSite) -> None:
    """Whoever pushes to an open repository may know the SHA-256 of a private file, or the git
    object id of a small one."""
    files = {"model.safetensors": os.urandom(300_000), "config.json": b'{"secret": true}'}
    private, forged = site.hub.repository("org/private"), site.hub.repository("org/forged")
    private.private, site.hub.tokens = True, {"hf_reads": {"org/private"}}
    private.commit(files)
    forged.commit(files)
    forged.lost |= files.keys()
    await site.start("h2")
    for path, data in files.items():
        answer = await site.ask(f"/org/private/resolve/main/{path}", headers=bearer("hf_reads"))
        assert answer.body == data
        for at in ("h1", "h2"):
            answer = await site.ask(f"/org/forged/resolve/main/{path}", at=at)
            assert (answer.status, answer.code) == (404, "EntryNotFound")


async def test_a_token_is_checked_once_for_the_fleet(site: HubSite) -> None:
    repository = site.hub.repository("org/private")
    repository.private, site.hub.tokens = True, {"hf_reads": {"org/private"}}
    files = make_files(300_000)
    repository.commit(files)
    hosts = ["h1", "h2", "h3"]
    for name in hosts[1:]:
        await site.start(name)
    await asyncio.gather(
        *(
            site.ask(f"/org/private/resolve/main/{path}", at=host, headers=bearer("hf_reads"))
            for host in hosts
            for path in files
        )
    )
    assert site.hub.count("GET", "auth-check") == 2  # without and with the token


async def test_the_tokens_of_clients_never_reach_storage(site: HubSite) -> None:
    repository = site.hub.repository("org/private")
    repository.private, site.hub.tokens = True, {"hf_reads": {"org/private"}}
    files = make_files(300_000)
    repository.commit(files)
    shown: list[str] = []

    def change(path: str, data: bytes) -> bytes:
        if path.endswith(".safetensors"):
            shown.append(site.hub.shown[-1])
        return data

    site.hub.change = change
    answer = await site.ask("/org/private/resolve/main/model-1.safetensors", headers=bearer("hf_reads"))
    assert answer.body == files["model-1.safetensors"] and shown and not any(shown)


async def test_a_hub_that_limits_is_left_alone_and_clients_are_told(site: HubSite) -> None:
    site.hub.repository("org/tiny").commit({"a.json": b"{}"})
    site.hub.statuses.append(("auth-check", 429, {"Retry-After": "400"}))
    first = await site.ask("/org/tiny/resolve/main/a.json", "HEAD")
    again = await site.ask("/org/tiny/resolve/main/a.json", "HEAD")
    for answer in (first, again):
        assert answer.status == 429 and 1 <= int(answer.headers["Retry-After"]) <= 400
    assert sum(site.hub.requests.values()) == 1


async def test_a_hub_that_fails_now_and_then_is_asked_again(site: HubSite, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(door, "BEGIN_S", 60.0)
    site.hub.repository("org/tiny").commit({"a.json": b"{}"})
    site.hub.statuses += [("auth-check", 502, {}), ("tree", 500, {}), ("resolve", 503, {})]
    assert (await site.ask("/org/tiny/resolve/main/a.json")).body == b"{}"
    site.hub.always["org/away"] = 500
    assert (await site.ask("/org/away/resolve/main/a.json", "HEAD")).status == 503


async def test_addresses_of_storage_that_ran_out_are_asked_for_again(site: HubSite) -> None:
    files = make_files(300_000)
    site.hub.repository("org/tiny").commit(files)
    site.hub.statuses.append(("/lfs/", 403, {}))
    answer = await site.ask("/org/tiny/resolve/main/model-1.safetensors")
    assert answer.body == files["model-1.safetensors"]
    assert site.hub.count("HEAD", "resolve") == 2


@pytest.mark.slow
async def test_wrong_content_is_never_served_as_whole(site: HubSite) -> None:
    files = make_files(2 << 20)
    site.hub.repository("org/tiny").commit(files)
    site.hub.change = lambda path, data: data[:-1] + bytes([data[-1] ^ 1])
    small = await site.ask("/org/tiny/resolve/main/config.json")
    assert small.status == 502 and files["config.json"][:-1] not in small.body
    with pytest.raises(aiohttp.ClientError):
        answer = await site.ask("/org/tiny/resolve/main/model-1.safetensors")
        assert answer.status == 502
        raise aiohttp.ClientError("it failed before its head")
    again = await site.ask("/org/tiny/resolve/main/model-1.safetensors", headers={"Range": "bytes=1048576-"})
    assert again.status == 502 and "model-1.safetensors" in again.headers["X-Error-Message"]


async def test_a_hub_that_redirects_for_ever_is_left(site: HubSite) -> None:
    site.hub.repository("org/tiny").commit({"a.json": b"{}"})
    loop = ("/auth-check", 307, {"Location": "/api/models/org/tiny/auth-check"})
    site.hub.statuses += [loop] * 20
    answer = await site.ask("/org/tiny/resolve/main/a.json", "HEAD")
    assert answer.status == 403 and "redirects" in answer.headers["X-Error-Message"]
    assert site.hub.count("GET", "/auth-check") == 6


async def test_a_file_that_storage_lost_is_not_found(site: HubSite) -> None:
    site.hub.repository("org/tiny").commit(make_files(300_000))
    site.hub.always["/lfs/"] = 404
    answer = await site.ask("/org/tiny/resolve/main/model-1.safetensors")
    assert (answer.status, answer.code) == (404, "EntryNotFound")


@pytest.mark.parametrize("path", ["config.json", "model-1.safetensors"])
async def test_a_file_of_which_the_hub_says_nothing_is_missing_not_its_repository(site: HubSite, path: str) -> None:
    site.hub.repository("org/tiny").commit(make_files(300_000))
    site.hub.always["/resolve/"] = 404
    answer = await site.ask(f"/org/tiny/resolve/main/{path}")
    assert (answer.status, answer.code) == (404, "EntryNotFound")


async def test_a_repository_that_was_renamed_is_read_where_it_is(site: HubSite) -> None:
    commit = site.hub.repository("org/new").commit({"a.json": b"{}"})
    for rest in ("/auth-check", "/revision/main", f"/tree/{commit}"):
        site.hub.statuses.append((f"/old{rest}", 307, {"Location": f"/api/models/org/new{rest}?recursive=true"}))
    site.hub.statuses.append(("/old/resolve/", 307, {"Location": f"/org/new/resolve/{commit}/a.json"}))
    assert (await site.ask("/org/old/resolve/main/a.json")).body == b"{}"


@pytest.mark.slow
async def test_a_file_that_is_too_short_ends_early(site: HubSite) -> None:
    files = make_files(2 << 20)
    site.hub.repository("org/tiny").commit(files)
    site.hub.change = lambda path, data: data[: len(data) - 5000] if len(data) > 1 << 20 else data
    with suppress(aiohttp.ClientError):  # some of it may have been sent
        assert (await site.ask("/org/tiny/resolve/main/model-1.safetensors")).status == 502
    assert (await site.ask("/org/tiny/resolve/main/model-1.safetensors")).status == 502


@pytest.mark.slow
async def test_wrong_content_fails_on_all_hosts_alike(site: HubSite) -> None:
    files = make_files(2 << 20)
    site.hub.repository("org/tiny").commit(files)
    site.hub.change = lambda path, data: data[:-1] + bytes([data[-1] ^ 1]) if len(data) > 1 << 20 else data
    hosts = ["h1", "h2", "h3"]
    for name in hosts[1:]:
        await site.start(name)

    async def read(host: str) -> int:
        try:
            return (await site.ask("/org/tiny/resolve/main/model-1.safetensors", at=host)).status
        except aiohttp.ClientError:
            return 0

    assert set(await asyncio.gather(*map(read, hosts))) <= {0, 502}
    assert [await read(host) for host in hosts] == [502] * 3
    # Nothing was wrong with the hosts, and what is right comes from the same ones.
    site.hub.change = lambda path, data: data
    for host in hosts:
        site.site.agents[host].vouched_blobs.wrong.forget()
    answer = await site.ask("/org/tiny/resolve/main/nested/model-2.safetensors", at="h2")
    assert answer.body == files["nested/model-2.safetensors"]


async def test_a_commit_with_a_bad_name_is_refused_by_name(site: HubSite) -> None:
    site.hub.repository("org/bad").commit({"good.json": b"{}", "a/../../evil": b"x"})
    commit = site.hub.repositories["models", "org/bad"].refs["main"]
    description = "/api/models/org/bad"  # some clients take the names from there
    for path in (description, f"{description}/tree/{commit}?recursive=true", f"/org/bad/resolve/{commit}/good.json"):
        answer = await site.ask(path)
        assert answer.status == 403 and "a/../../evil" in answer.headers["X-Error-Message"]


async def test_a_branch_that_is_pushed_over_changes_nothing_under_way(site: HubSite) -> None:
    repository = site.hub.repository("org/tiny")
    first = repository.commit({"a.json": b"1", "b.json": b"1"})
    head = await site.ask("/org/tiny/resolve/main/a.json", "HEAD")
    assert head.headers["X-Repo-Commit"] == first
    second = repository.commit({"a.json": b"2", "b.json": b"2"})
    assert (await site.ask(f"/org/tiny/resolve/{first}/b.json")).body == b"1"
    assert (await site.ask(f"/org/tiny/resolve/{second}/b.json")).body == b"2"
    assert site.hub.count("GET", "revision/main") == 1


async def test_what_is_here_is_given_without_tracker_and_hub(site: HubSite) -> None:
    files = make_files(300_000)
    commit = site.hub.repository("org/tiny").commit(files)
    private = site.hub.repository("org/private")
    private.private, site.hub.tokens = True, {"hf_reads": {"org/private"}}
    private.commit(files)
    for path, data in files.items():
        assert (await site.ask(f"/org/tiny/resolve/main/{path}")).body == data
        assert (await site.ask(f"/org/private/resolve/main/{path}", headers=bearer("hf_reads"))).body == data
    await site.site.stop_tracker()
    await until(lambda: not site.site.agents["h1"].session.connected)
    models = site.site.agents["h1"].models
    models._admitted.clear()
    models._fresh.clear()
    models._commits.clear()
    for path, data in files.items():
        answer = await site.ask(f"/org/tiny/resolve/main/{path}")
        assert answer.body == data and answer.headers["X-Repo-Commit"] == commit
    closed = await site.ask("/org/private/resolve/main/config.json", headers=bearer("hf_reads"))
    assert closed.status == 503


@pytest.mark.parametrize("path", ["config.json", "model-1.safetensors"])
async def test_a_file_waits_for_a_tracker_that_is_away_and_clients_ask_again(
    site: HubSite, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    """A tracker that restarts in the middle of a model costs its clients time, and no failure."""
    files = make_files(300_000)
    site.hub.repository("org/tiny").commit(files)
    monkeypatch.setattr(door, "BEGIN_S", 600.0)
    monkeypatch.setattr(site.site.agents["h1"].packages, "_wait_s", 600.0)
    assert (await site.ask(f"/org/tiny/resolve/main/{path}", "HEAD")).status == 200
    await site.site.stop_tracker()
    await until(lambda: not site.site.agents["h1"].session.connected)
    monkeypatch.setattr(door, "BEGIN_S", 0.5)
    answer = await site.ask(f"/org/tiny/resolve/main/{path}")
    assert (answer.status, answer.headers["Retry-After"]) == (429, "1")
    monkeypatch.setattr(door, "BEGIN_S", 600.0)
    reading = asyncio.create_task(site.ask(f"/org/tiny/resolve/main/{path}"))
    await site.site.start_tracker()
    assert (await reading).body == files[path]


async def test_a_door_that_answers_enough_has_clients_ask_again(site: HubSite, monkeypatch: pytest.MonkeyPatch) -> None:
    site.hub.repository("org/tiny").commit({"a.json": b"{}"})
    monkeypatch.setattr(door, "REQUESTS_MAX", 0)
    await site.start("h2")
    answer = await site.ask("/org/tiny/resolve/main/a.json", at="h2")
    assert (answer.status, answer.headers["Retry-After"]) == (429, "1")


@pytest.mark.parametrize("path", ["config.json", "model-1.safetensors"])
async def test_a_file_that_does_not_begin_in_time_is_asked_for_again(
    site: HubSite, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    """Clients repeat a GET of a file on 429, and fail on 503; meanwhile the read goes on."""
    files = make_files(300_000)
    site.hub.repository("org/tiny").commit(files)
    assert (await site.ask(f"/org/tiny/resolve/main/{path}", "HEAD")).status == 200
    monkeypatch.setattr(door, "BEGIN_S", 0.5)
    site.hub.hangs = f"/{path}"
    answer = await site.ask(f"/org/tiny/resolve/main/{path}")
    assert (answer.status, answer.headers["Retry-After"]) == (429, "1")


async def test_a_hub_that_hangs_keeps_no_client_waiting(site: HubSite, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(door, "BEGIN_S", 0.5)
    files = make_files(300_000)
    site.hub.repository("org/tiny").commit(files)
    path = "/org/tiny/resolve/main/model-1.safetensors"
    site.hub.hangs = "/tree/"
    async with asyncio.timeout(60):
        while not site.hub.count("GET", "/tree/"):
            assert (await site.ask(path, "HEAD")).status == 503
    site.hub.hangs = ""
    site.site.agents["h1"].models._reads.clear()
    assert site.site.service is not None
    site.site.service.hubs._reads._reads.clear()
    monkeypatch.setattr(door, "BEGIN_S", 30.0)
    assert (await site.ask(path, "HEAD")).status == 200
    monkeypatch.setattr(door, "BEGIN_S", 0.5)
    site.hub.hangs = "/lfs/"
    async with aiohttp.ClientSession() as http, http.get(site.doors["h1"] + path) as answer:
        # The head comes without a byte: a client asks again when a body stands still.
        assert answer.status == 200 and answer.content_length == len(files["model-1.safetensors"])
