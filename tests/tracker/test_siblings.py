"""What trackers ask each other: several in this process, over real sockets. Their database is left
out: the test tells each of them the ownership."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from types import SimpleNamespace
from typing import Any, cast

import aiohttp
import msgspec
import programs
import pytest
from aiohttp import web
from aiohttp.typedefs import Handler
from yarl import URL

from p2pdist.cli.verbs.evict import _failure
from p2pdist.client import RankRequest
from p2pdist.client import Tracker as AsyncClient
from p2pdist.model.digest import Digest
from p2pdist.model.errors import NotFound, Unavailable
from p2pdist.model.fleet import Eviction, EvictRequest
from p2pdist.model.messages import PROTOCOL_VERSION, EpochSeen, Hello
from p2pdist.model.ownership import Ownership, Tracker
from tracker.cluster.cluster import Cluster
from tracker.cluster.membership import Row
from tracker.cluster.siblings import Siblings
from tracker.content import Content
from tracker.core.events import Received
from tracker.core.fleet import Fleet
from tracker.core.ownership.ownerships import MembersSeen, Registered
from tracker.http.app import make_app
from tracker.http.pages import WATCH
from tracker.http.trackers import _status
from tracker.preseed_service import PreseedService
from tracker.service import Service
from tracker.state.preseeds import PreseedDatabase


class Site:
    """A tracker, and the requests that came to it."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.asked: list[str] = []
        self.headers: list[Any] = []

    async def start(self, stack: AsyncExitStack) -> None:
        service = self.service = Service(Fleet(started_at=asyncio.get_running_loop().time()), Content(None))
        self.cluster = Cluster(cast(Any, SimpleNamespace(me=self.name)), service)
        service.heard_epoch = self.cluster.heard
        self.siblings = Siblings(self.cluster)
        stack.push_async_callback(self.siblings.close)
        app = make_app(service, siblings=self.siblings)
        self.watch = app[WATCH]

        @web.middleware
        async def note(request: web.Request, handler: Handler) -> web.StreamResponse:
            self.asked.append(request.raw_path)
            self.headers.append(request.headers.get("Authorization"))
            return await handler(request)

        app.middlewares.append(note)
        runner = web.AppRunner(app, shutdown_timeout=0.1, handler_cancellation=True)
        await runner.setup()
        self.stop = runner.cleanup
        stack.push_async_callback(self.stop)
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        self.url = f"http://127.0.0.1:{runner.addresses[0][1]}"


@asynccontextmanager
async def sites(*names: str) -> AsyncIterator[list[Site]]:
    async with AsyncExitStack() as stack:
        made = [Site(name) for name in names]
        for site in made:
            await site.start(stack)
        ownership = Ownership(1, tuple(Tracker(site.name, (site.url,)) for site in made))
        for site in made:
            site.cluster._handle(MembersSeen((), ownership))
        yield made


@pytest.mark.parametrize(
    "path",
    [
        "/v1/hosts/x",
        "/v1/hosts/x%3Flocal=0%26",
        "/v1/hosts/x%3Flocal=0%26y%253Flocal=0%2526",
        "/v1/hosts/x%2F..%2F..%2Fhosts%3Flocal=0%26",
        "/v1/hosts/x%23y",
    ],
)
async def test_each_other_tracker_is_asked_once_whatever_a_path_says(path: str) -> None:
    """What a client wrote into it must not become a query, by which a tracker would ask all others
    again, and each of these again."""
    async with sites("a", "b", "c") as (a, b, c), aiohttp.ClientSession() as http:
        async with http.get(URL(a.url + path, encoded=True)) as answer:
            assert answer.status == 404
        assert [a.asked, b.asked, c.asked] == [[path], [f"{path}?local=1"], [f"{path}?local=1"]]


async def test_a_tracker_with_tls_shows_tokens_to_no_tracker_without() -> None:
    async with sites("a", "b") as (a, b):
        careful = Siblings(a.cluster, ssl.create_default_context)
        try:
            with pytest.raises(Unavailable, match="TLS"):
                await careful.ask(a.cluster.others()[0], "/v1/hosts", {"Authorization": "Bearer secret"})
        finally:
            await careful.close()
        assert b.asked == []
        answer = await a.siblings.ask(a.cluster.others()[0], "/v1/hosts", {"Authorization": "Bearer secret"})
        assert answer.status == 200 and b.headers == ["Bearer secret"]


@pytest.mark.parametrize(("hosts", "believed"), [(1, True), (2, False)])
async def test_an_agent_is_believed_alone_where_there_is_no_other(hosts: int, believed: bool) -> None:
    async with sites("a", "b") as (a, _):
        sessions = [a.service.open_session(Hello(PROTOCOL_VERSION, f"h{n}", f"h{n}:1"))[0] for n in range(hosts)]
        a.service.submit(Received(sessions[0], EpochSeen(5)))
        assert a.service.fleet.handover.leases_allowed is not believed


@pytest.mark.parametrize(("beat_s", "swarms", "state"), [(0.5, 7, "draining"), (0.5, 0, "drained"), (9.0, 7, "silent")])
def test_a_tracker_that_died_while_it_drained_is_silent(beat_s: float, swarms: int, state: str) -> None:
    """It would be draining for an hour else, and an operator waits for the end of that."""
    row = Row(Registered("a", ("http://a:7070",), "one", 9, draining=True), beat_s, 60.0, 2, swarms, 0.0)
    assert _status(row, Ownership(2, (Tracker("b", ("http://b:7070",)),))).state == state


@pytest.mark.parametrize("name", ["%00", "a%20b", "h" * 300])
async def test_what_can_be_no_name_of_a_host_is_not_drained(name: str) -> None:
    """Of the host of another tracker this one need not know. A name that the database does not take
    would keep all later orders out of it."""
    async with sites("a", "b") as (a, _), aiohttp.ClientSession() as http:
        for host, status in ((name, 404), ("h1", 404)):
            async with http.post(URL(f"{a.url}/v1/hosts/{host}/drain?local=1", encoded=True)) as answer:
                assert answer.status == status
        assert list(a.service.fleet.reputation.drained) == ["h1"]


async def test_a_host_that_is_named_and_away_is_not_taken_for_one_that_evicted() -> None:
    """Each tracker knows its own hosts, and all together which name is of none."""
    async with sites("a", "b") as (a, b), aiohttp.ClientSession() as http:
        for site, host in ((a, "h1"), (b, "h2")):
            site.service.open_session(Hello(PROTOCOL_VERSION, host, f"{host}:1"))
        body = {"package": "team/a:v1", "hosts": ["h9", "h2", "h1", "h9"], "wait_s": 0}
        async with http.post(f"{a.url}/v1/evictions", json=body) as answer:
            eviction = msgspec.json.decode(await answer.read(), type=Eviction)
    assert (eviction.asked, eviction.stayed, eviction.absent_hosts) == (2, 2, ["h9"])
    failure = _failure(msgspec.structs.replace(eviction, stayed=0, stayed_hosts=[], evicted=2))
    assert isinstance(failure, Unavailable) and "not connected: h9; team/a:v1 stays there" in failure.what


async def test_a_tracker_that_does_not_do_its_part_of_an_order_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever it answers: the hosts there still have the package, or serve on."""
    async with sites("a", "b") as (a, b), AsyncClient(a.url) as client:
        for site, host in ((a, "h1"), (b, "h2")):
            site.service.open_session(Hello(PROTOCOL_VERSION, host, f"{host}:1"))

        async def full(*_: object) -> Eviction:
            raise Unavailable("100 evictions are under way")

        monkeypatch.setattr(b.service.desk, "evict", full)
        assert (await client.evict(EvictRequest("team/a:v1", everywhere=True))).unanswered == ["b"]
        monkeypatch.setattr(b.service.fleet.reputation, "drained", None)  # it fails at the order
        with pytest.raises(Unavailable, match="b did not hear of it"):
            await client.drain("h1")


async def test_a_ranking_says_whose_hosts_are_not_in_it(monkeypatch: pytest.MonkeyPatch) -> None:
    async with sites("a", "b") as (a, b), AsyncExitStack() as stack:
        preseeds = PreseedService(a.service, PreseedDatabase(""))

        async def nothing(*_: object) -> tuple[str, dict[Digest, int]]:
            return "team/a", {}

        monkeypatch.setattr(preseeds, "_package", nothing)
        runner = web.AppRunner(make_app(a.service, preseeds, siblings=a.siblings), shutdown_timeout=0.1)
        await runner.setup()
        stack.push_async_callback(runner.cleanup)
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        for site, host in ((a, "h1"), (b, "h2")):
            site.service.open_session(Hello(PROTOCOL_VERSION, host, f"{host}:1"))
        client = await stack.enter_async_context(AsyncClient(f"http://127.0.0.1:{runner.addresses[0][1]}"))
        wanted = RankRequest(packages=("team/a:v1",))
        assert [row.host for row in await client.rank(wanted)] == ["h1", "h2"] and [*client.unanswered] == []
        await b.stop()
        assert [row.host for row in await client.rank(wanted)] == ["h1"] and [*client.unanswered] == ["b"]


async def test_a_list_of_hosts_says_which_tracker_is_not_in_it() -> None:
    """And a host that is at such a one is not said to be nowhere."""
    async with sites("a", "b") as (a, b), AsyncClient(a.url) as client:
        a.service.open_session(Hello(PROTOCOL_VERSION, "h1", "h1:1"))
        b.service.open_session(Hello(PROTOCOL_VERSION, "h2", "h2:1"))
        assert [host.host for host in await client.hosts()] == ["h1", "h2"] and [*client.unanswered] == []
        with pytest.raises(NotFound):
            await client.host("h9")
        await b.stop()
        code, out, errors = await asyncio.to_thread(_run, "hosts", "--tracker", a.url)
        assert code == 0 and "h1" in out and "h2" not in out and "no answer from the tracker b" in errors
        with pytest.raises(Unavailable, match="from b"):
            await client.host("h2")
        assert (await client.host("h1")).host == "h1" and [*client.unanswered] == ["b"]


def _run(*words: str) -> tuple[int, str, str]:
    done = programs.run(*words)
    return done.returncode, done.stdout, done.stderr
