"""The history over HTTP: pages, filters, events as they come, and who may see what."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
import msgspec
import pytest
from access_rig import ACCESS, TRACKER_DNS, access_site, ask
from aiohttp import web
from waits import until

from p2pdist.model.digest import digest_of
from p2pdist.model.errors import Refused, Unavailable, UsageError, from_problem
from p2pdist.model.history import HistoryPage, HistoryRecord
from p2pdist.model.messages import PROTOCOL_VERSION, Hello, PullFailed, Reject, Welcome, decode_from_tracker, encode
from tracker.content import Content
from tracker.core.fleet import Fleet
from tracker.core.monitor.presence import ABSENCE_S
from tracker.history import recorder
from tracker.http.app import make_app
from tracker.http.history import routes
from tracker.policies import PolicyFile, check_policies
from tracker.service import Service

MANIFEST = digest_of(b"manifest")


class Site:
    """A tracker whose clocks run."""

    def __init__(self, service: Service, http: aiohttp.ClientSession) -> None:
        self.service, self.http = service, http

    async def page(self, query: str = "") -> HistoryPage:
        async with self.http.get(f"/v1/history{query}") as answer:
            body = await answer.read()
            if answer.status >= 400:
                raise from_problem(msgspec.json.decode(body))
            return msgspec.json.decode(body, type=HistoryPage)

    async def texts(self, query: str = "") -> list[str]:
        return [record.event.text for record in (await self.page(query)).records]

    async def session(self, host: str) -> aiohttp.ClientWebSocketResponse:
        socket = await self.http.ws_connect("/v1/session")
        await socket.send_str(encode(Hello(PROTOCOL_VERSION, host, "127.0.0.1:7071", "z1")).decode())
        welcome = decode_from_tracker(await socket.receive_str())
        assert isinstance(welcome, Welcome) and welcome.failures, "it says that it takes failures"
        return socket

    async def recorded(self, number: int) -> None:
        """Returns when so many records are kept."""
        async with asyncio.timeout(60):
            while len((await self.page("?limit=1000")).records) < number:
                await asyncio.sleep(0.01)


@asynccontextmanager
async def running() -> AsyncIterator[Site]:
    service = Service(Fleet(asyncio.get_running_loop().time() - 100.0), Content(None))
    runner = web.AppRunner(make_app(service), access_log=None, shutdown_timeout=0.5, handler_cancellation=True)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    tasks = [asyncio.create_task(each) for each in (service.run(), service.history.run())]
    async with aiohttp.ClientSession(f"http://127.0.0.1:{runner.addresses[0][1]}") as http:
        yield Site(service, http)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    await runner.cleanup()
    await service.history.stop()


@pytest.mark.slow
async def test_what_hosts_say_and_how_they_end_is_remembered() -> None:
    async with running() as site:
        first, second = await site.session("h1"), await site.session("h2")
        await first.send_str(encode(PullFailed("team/a:v7", "disk-full: the store is full", MANIFEST, 2.0)).decode())
        await site.recorded(1)
        await second.close()
        assert first._response.connection is not None and first._response.connection.transport is not None
        first._response.connection.transport.abort()
        await site.recorded(3)
        lost = (await site.page("?kind=host-lost")).records
        reasons = {record.event.host: record.event.reason for record in lost}
        assert reasons == {"h1": "its connection broke", "h2": "its agent closed the session"}
        assert all(record.event.address == "127.0.0.1:7071" for record in lost)
        assert all(ABSENCE_S <= record.at - record.since < 60.0 for record in lost)
        (failed,) = (await site.page(f"?package={MANIFEST[7:19]}")).records
        assert (failed.event.host, failed.event.package) == ("h1", "team/a:v7") and failed.at - failed.since >= 2.0
        third = await site.session("h1")
        await site.recorded(4)
        assert (await site.texts("?host=h1&limit=1"))[0].startswith("h1 is back after ")
        await third.close()


async def test_pages_lead_to_older_ones() -> None:
    async with running() as site:
        for number in range(25):
            site.service.fleet.history.changed(f"change {number}")
        await site.recorded(25)
        seen, query = [], "?limit=10"
        while True:
            found = await site.page(query)
            seen += [record.event.text for record in found.records]
            if not found.next:
                break
            query = f"?limit=10&before={found.next}"
        assert seen == [f"change {number}" for number in reversed(range(25))]
        assert await site.texts("?since=1h&limit=1") == ["change 24"] and await site.texts("?since=9999999999") == []
        for wrong in ("kind=x", "limit=-1", "limit=1001", "before=x", "since=soon", f"package={'a' * 600}"):
            with pytest.raises(UsageError):
                await site.page(f"?{wrong}")


async def test_followers_hear_what_they_asked_for_and_are_let_go() -> None:
    async with running() as site:
        history = site.service.fleet.history
        history.changed("before")
        await site.recorded(1)
        async with site.http.get("/v1/history/events?kind=change&host=") as answer:
            assert answer.content_type == "text/event-stream"
            assert await answer.content.readuntil(b"\n\n") == b": following\n\n"
            session = await site.session("h1")
            await session.send_str(encode(PullFailed("team/a:v7", "failed: no")).decode())
            await site.recorded(2)
            history.changed("after")
            kind, data = (await answer.content.readuntil(b"\n\n")).splitlines()[:2]
            assert kind == b"event: record"
            assert msgspec.json.decode(data[6:], type=HistoryRecord).event.text == "after"
            site.service.history.end()
            assert await answer.content.read() == b""
            await session.close()


async def test_one_address_leaves_places_to_others_that_follow() -> None:
    async with running() as site:
        history, following = site.service.history, []
        for _ in range(recorder.FOLLOWERS_PER_ADDRESS_MAX):
            following.append(history.follow("192.0.2.1"))
            assert await anext(following[-1]) is None
        with pytest.raises(Unavailable, match=f"{recorder.FOLLOWERS_PER_ADDRESS_MAX} from 192.0.2.1"):
            await anext(history.follow("192.0.2.1"))
        following.append(history.follow("192.0.2.2"))
        assert await anext(following[-1]) is None
        for each in following:
            await each.aclose()


async def test_followers_hear_of_the_tracker_while_only_others_records_come(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(routes, "SILENCE_S", 0.2)
    async with running() as site, site.http.get("/v1/history/events?kind=broadcast") as answer:
        assert await answer.content.readuntil(b"\n\n") == b": following\n\n"

        async def change() -> None:
            while True:
                site.service.fleet.history.changed("another")
                await asyncio.sleep(0.01)

        changing = asyncio.create_task(change())
        async with asyncio.timeout(30):
            assert await answer.content.readuntil(b"\n\n") == b": silence\n\n"
        changing.cancel()


async def test_a_follower_that_takes_nothing_is_let_go(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recorder, "BEHIND_MAX", 10)
    async with running() as site:
        following = site.service.history.follow()
        assert await anext(following) is None
        for number in range(30):
            site.service.fleet.history.changed(f"change {number}")
        await until(lambda: site.service.history._followers[0].behind)
        assert [record async for record in following] == []
        assert site.service.history._followers == []


async def test_hostile_hosts_fill_neither_memory_nor_terminal() -> None:
    async with running() as site:
        session = await site.session("h1")
        await session.send_str('{"type":"pullfailed","reference":"a:v1","reason":"%s"}' % ("x" * 1_000_000))
        last = decode_from_tracker(await session.receive_str())
        assert isinstance(last, Reject) and "malformed" in str(last.problem)
        again = await site.session("h2")
        await again.send_str(encode(PullFailed("a:v1", "failed: \x1b[2J\x00\u202e\n\r evil")).decode())
        await site.recorded(1)
        for record in (await site.page("?kind=pull-failed")).records:
            assert record.event.host == "h2" and record.event.text.isprintable() and record.event.reason.isprintable()
        await again.close()


async def test_a_watcher_sees_what_is_of_packages_that_it_may_read(tmp_path: Path) -> None:
    roles = ACCESS + '\n[role.watcher]\nmay = ["watch"]\nread = ["team-a/*"]\n'
    async with access_site(tmp_path, roles) as site:
        writing = asyncio.create_task(site.service.history.run())
        agent = await site.join("h1")
        session = await agent.session()
        await session.hear(Welcome)
        mine, theirs = site.layers["team-a/x:v1"], site.layers["team-b/y:v1"]
        for name in ("team-a/x:v1", "team-b/y:v1"):
            await ask(agent.http, "GET", f"/v1/packages?reference={name}")
            await session.say(PullFailed(name, "failed: no", site.manifests[name]))
        for blob in (mine, theirs, MANIFEST):
            await session.say(PullFailed(blob, "failed: no"))
        site.service.fleet.history.changed("the policy of team-b/y is another one")
        watcher, ops = await site.stranger(site.token("watcher")), await site.stranger(site.token("ops"))
        async with asyncio.timeout(60):
            while len(await _events(ops)) < 6:
                await asyncio.sleep(0.01)
        assert {(kind, package or digest) for kind, package, digest in await _events(watcher)} == {
            ("pull-failed", "team-a/x:v1"),
            ("pull-failed", mine),
        }
        assert await _events(watcher, "?package=team-b/y") == []
        assert len(await _events(watcher, "?limit=2")) == 2, "what one may not see makes a page no shorter"
        for query in ("package=team-b/y", f"package={theirs}", "kind=change"):
            found = msgspec.json.decode(await ask(watcher, "GET", f"/v1/history?limit=1&{query}"), type=HistoryPage)
            assert found == HistoryPage([]), "that there are records of it is not told either"
        for http, told in ((ops, True), (watcher, False)):
            async with http.get("/v1/history/events", server_hostname=TRACKER_DNS) as answer:
                await answer.content.readuntil(b"\n\n")
                await session.say(PullFailed("team-b/y:v1", f"failed: {told}"))
                await session.say(PullFailed("team-a/x:v1", f"failed: {told}"))
                text = await answer.content.readuntil(b"\n\n")
                assert (b"team-b" in text) == told
        for role in ("slurm", "reader"):
            http = await site.stranger(site.token(role))
            for path in ("/v1/history", "/v1/history/events"):
                with pytest.raises(Refused):
                    await ask(http, "GET", path)
        writing.cancel()
        await asyncio.gather(writing, return_exceptions=True)
        await site.service.history.stop()


async def _events(http: aiohttp.ClientSession, query: str = "") -> list[tuple[str, str, str]]:
    found = msgspec.json.decode(await ask(http, "GET", f"/v1/history{query}"), type=HistoryPage)
    return [(record.event.kind, record.event.package, record.event.digest) for record in found.records]


async def test_policies_that_change_are_told_and_so_are_mistakes(tmp_path: Path) -> None:
    fleet, path = Fleet(0.0), tmp_path / "policies.toml"
    path.write_text('[[policy]]\nmatch = "team/*"\nreaders = 4\n')
    file = PolicyFile(path, fleet.policies, fleet.history.changed)
    file.load()
    assert [event.text for event in fleet.history.take()] == [f"1 policies of {path} hold"]
    watching = asyncio.create_task(file.watch())
    path.write_text('[[policy]]\nmatch = "team/*"\nreaders = "many"\n')
    file.reload()
    told: list[str] = []
    await until(lambda: told.extend(event.text for event in fleet.history.take()) or told)
    assert told[0].startswith(f"the policies stay as they were: the policies in {path} cannot be used")
    watching.cancel()
    await asyncio.gather(watching, return_exceptions=True)


def test_rates_of_policies_that_may_be_bits_or_bytes_are_told_and_hold(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A tracker that is upgraded starts with the file that it had."""
    path = tmp_path / "policies.toml"
    path.write_text(
        '[[policy]]\nmatch = "team/*"\nupload = "1Gb/s"\ndownload = "1GB/s"\n[[site]]\nname = "s0"\nrate = "2Gb/s"\n'
    )
    table, mistakes = check_policies(path)
    assert (mistakes, table.policies[0].rates.upload_bytes_s) == ([], 1e9)
    told = sorted(caplog.messages)
    assert [
        f"[[{name}]], {key}: {rate!r} may be bits" in text
        for (name, key, rate), text in zip(
            (("policy", "upload", "1Gb/s"), ("site", "rate", "2Gb/s")), told, strict=True
        )
    ] == [True, True]
