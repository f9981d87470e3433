"""The page and its events over real sockets: what is served, how it is protected, what watchers
hear, and five thousand hosts in a browser."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from browser import CHROMIUM, browser
from fleet_rig import BLOB, PIECES, fleet_of, join_all, tracker_of

from p2pdist.model.digest import digest_of
from p2pdist.model.messages import Holding
from p2pdist.model.pieces import PieceLayout
from tracker.core.events import Received
from tracker.http import pages
from tracker.http.pages import POLICY

STATIC = Path(pages.__file__).parent / "static"


@asynccontextmanager
async def listening(http: aiohttp.ClientSession, url: str) -> AsyncIterator[AsyncIterator[tuple[str, Any]]]:
    """The events of a stream: kind and document."""

    async def read(answer: aiohttp.ClientResponse) -> AsyncIterator[tuple[str, Any]]:
        kind = ""
        while line := (await asyncio.wait_for(answer.content.readline(), 60)).decode():
            name, _, value = line.rstrip("\n").partition(": ")
            if name == "event":
                kind = value
            elif name == "data":
                yield kind, json.loads(value)

    async with http.get(url) as answer:
        assert answer.status == 200, await answer.text()
        assert answer.content_type == "text/event-stream"
        yield read(answer)


@pytest.fixture
async def http() -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession(read_bufsize=1 << 24, connector=aiohttp.TCPConnector(limit=0)) as session:
        yield session


async def test_the_page_lets_the_browser_load_nothing_from_elsewhere(http: aiohttp.ClientSession) -> None:
    async with tracker_of(fleet_of(1)) as (_, url):
        types = {".html": "text/html", ".js": "text/javascript", ".css": "text/css"}
        stored = [file for file in STATIC.rglob("*.*") if file.suffix in (".js", ".css")]
        files = {f"/static/{file.relative_to(STATIC)}": types[file.suffix] for file in stored}
        assert {"/static/main.js", "/static/vendor/uPlot.iife.min.js"} < files.keys(), "each file of the page is served"
        for path, kind in {"/": "text/html", **files}.items():
            async with http.get(url + path) as answer:
                body = await answer.text()
                assert (answer.status, answer.content_type) == (200, kind)
                assert answer.headers["Content-Security-Policy"] == POLICY
                assert answer.headers["X-Content-Type-Options"] == "nosniff"
                head, _, rest = body.partition("*/")  # a library names its home in a comment
                assert "://" not in (rest if "/vendor/" in path else body), "nothing is fetched from elsewhere"
                assert "http" not in head or "/vendor/" in path
                etag = answer.headers["ETag"]
            async with http.get(url + path, headers={"If-None-Match": etag}) as answer:
                assert answer.status == 304
        assert "'unsafe" not in POLICY and "default-src 'none'" in POLICY
        async with http.get(url + "/static/../app.py") as answer:
            assert answer.status == 404


async def test_watchers_hear_everything_and_then_what_changes(
    http: aiohttp.ClientSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pages, "WATCHED_S", 0.05)
    hosts = fleet_of(4)
    join_all(hosts)
    async with (
        tracker_of(hosts) as (_, url),
        listening(http, f"{url}/v1/events?swarm={BLOB}&stripe=1") as events,
    ):
        kind, first = await anext(events)
        assert kind == "change" and first["whole"] and len(first["hosts"]) == len(first["tree"]) == 4
        assert first["swarms"][0]["digest"] == BLOB
        hosts.report("h2", (0, 7))
        async for _, change in events:
            if change["states"]:
                break
        assert not change["whole"] and not change["hosts"]
        assert [state[0] for state in change["states"]] == [row[0] for row in change["tree"]] == [3]


async def test_what_is_asked_for_wrongly_is_refused(http: aiohttp.ClientSession) -> None:
    hosts = fleet_of(2)
    join_all(hosts)
    async with tracker_of(hosts) as (_, url):
        for query in ("swarm=nonsense", f"swarm={BLOB}&stripe=2", f"swarm={BLOB}&stripe=-1", f"swarm={BLOB}&stripe=x"):
            async with http.get(f"{url}/v1/events?{query}") as answer:
                assert answer.status == 400 and (await answer.json(content_type=None))["type"].endswith("bad-request")
        async with listening(http, f"{url}/v1/events?swarm={digest_of(b'unknown')}") as events:
            assert (await anext(events))[1]["tree"] == []


async def test_each_swarm_of_a_blob_that_is_cut_in_two_ways_can_be_watched(http: aiohttp.ClientSession) -> None:
    hosts = fleet_of(2)
    join_all(hosts, ["h0"])
    layout = PieceLayout(3 << 20, 1 << 20)
    holding = Holding(BLOB, layout.size, layout.piece_size, (0,) * layout.stripes)
    hosts.fleet.handle(Received(hosts.sessions["h1"], holding), now=hosts.now)
    assert len(hosts.fleet.swarms) == 2
    async with tracker_of(hosts) as (_, url):
        for key in hosts.fleet.swarms:
            async with http.get(f"{url}/v1/events", params={"swarm": key}) as answer:
                assert answer.status == 200


async def test_there_are_only_so_many_watchers_and_trees(
    http: aiohttp.ClientSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pages, "WATCHERS_MAX", 3)
    monkeypatch.setattr(pages, "TREES_MAX", 1)
    hosts = fleet_of(2)
    join_all(hosts)
    tree = f"/v1/events?swarm={BLOB}&stripe="
    async with tracker_of(hosts) as (_, url):
        async with listening(http, url + tree + "0") as one, listening(http, url + tree + "0") as two:
            assert (await anext(one))[1]["tree"] and (await anext(two))[1]["tree"]
            async with http.get(url + tree + "1") as answer:
                assert answer.status == 503 and "trees" in (await answer.json(content_type=None))["detail"]
            async with listening(http, url + "/v1/events") as three:
                await anext(three)
                async with http.get(url + "/v1/events") as answer:
                    assert answer.status == 503
        for _ in range(3000):  # until the tracker has noticed that they went
            async with http.get(url + tree + "1") as answer:
                if answer.status == 200:
                    break
            await asyncio.sleep(0.02)
        assert answer.status == 200


async def test_a_tracker_that_stops_ends_its_streams_in_order(http: aiohttp.ClientSession) -> None:
    async with AsyncExitStack() as tracker:
        _, url = await tracker.enter_async_context(tracker_of(fleet_of(1)))
        async with listening(http, url + "/v1/events") as events:
            await anext(events)
            await tracker.aclose()
            assert [kind async for kind, _ in events] == [], "a connection that was broken off would raise"


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason="needs chromium (Debian package chromium)")
async def test_five_thousand_hosts_are_shown_and_follow_what_happens() -> None:
    count = 5000
    hosts = fleet_of(count)
    join_all(hosts)
    async with tracker_of(hosts) as (_, url), browser(url + "/") as page:
        await page.until(f"swarmHealth.hosts.size === {count} && swarmHealth.nodes.size === {count}")
        hosts.now = time.monotonic()
        for number in range(count):
            hosts.report(f"h{number}", (PIECES // 4, PIECES // 4))
        hosts.close("h17")
        await page.until("[...swarmHealth.hosts.values()].every((host) => host.done === 500)")
        await page.until("/h17/.test(document.querySelector('#troubled').innerText)")
        assert await page.evaluate("[...swarmHealth.nodes.values()].filter((node) => node.parent === -1).length") == 2
        places = await page.evaluate("new Set([...swarmHealth.hosts.values()].map((h) => h.x + ' ' + h.y)).size")
        assert places == count, "no host hides another"
        assert page.complaints == []
        await page.screenshot("health-5000")
