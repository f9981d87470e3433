"""Callbacks of preseeds: real trackers tell a real HTTP server of ends, signed, again after
failures and restarts, once from several trackers, and only where their operator allows."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
import pytest
from aiohttp import web
from test_preseeds_http import Tracker as At
from test_preseeds_http import blobs, connected, layout, package

from p2pdist.client import PreseedRequest, Progress, Refused, Tracker, UsageError, check_callback
from p2pdist.model.digest import Digest
from p2pdist.model.preseed import Call
from p2pdist.origin.drivers import open_origin
from tracker import callbacks as module
from tracker.callbacks import Callbacks, CallbackSettings, read_callbacks
from tracker.content import Content
from tracker.core.fleet import Fleet
from tracker.http.app import make_app
from tracker.preseed_service import PreseedService
from tracker.service import Service
from tracker.state.preseeds import PreseedDatabase

KEY = "0123456789abcdef0123456789abcdef"

__all__ = ["blobs", "layout"]  # fixtures


class Receiver:
    """A scheduler that takes callbacks: `answers` are the next statuses, then 204."""

    def __init__(self) -> None:
        self.url = ""
        self.answers: list[int] = []
        self.heard: list[tuple[str, Progress]] = []
        self.requests = 0
        self.pause_s = 0.0
        """It answers so much later."""

    async def take(self, request: web.Request) -> web.Response:
        self.requests += 1
        await asyncio.sleep(self.pause_s)
        body = await request.read()
        status = self.answers.pop(0) if self.answers else 204
        progress = check_callback(KEY, request.headers, body, now=time.time())
        if status == 204:
            self.heard.append((request.headers["P2pdist-Callback-Id"], progress))
        return web.Response(status=status, headers={"Location": "/elsewhere"} if status == 302 else None)

    async def until(self, count: int) -> None:
        async with asyncio.timeout(60):
            while len(self.heard) < count:
                await asyncio.sleep(0.02)


@pytest.fixture
async def receiver(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Receiver]:
    monkeypatch.setattr(module, "PAUSE_S", 0.05)
    monkeypatch.setattr(module, "PAUSE_S_MAX", 0.2)
    monkeypatch.setattr(module, "LOOK_S", 0.02)
    receiver = Receiver()
    app = web.Application()
    app.router.add_post("/done", receiver.take)
    app.router.add_route("*", "/elsewhere", receiver.take)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    receiver.url = f"http://127.0.0.1:{runner.addresses[0][1]}/done"
    yield receiver
    await runner.cleanup()


@asynccontextmanager
async def telling(layout: Path, state: str, *hosts: str) -> AsyncIterator[tuple[At, PreseedDatabase]]:
    """A tracker that may call these hosts."""
    origin = open_origin(layout.as_uri())
    service = Service(Fleet(started_at=asyncio.get_running_loop().time()), Content(origin))
    database = PreseedDatabase(state)
    preseeds = service.listener = PreseedService(service, database, grace_s=0.5)
    settings = CallbackSettings(hosts or ("127.0.0.1",), KEY)
    preseeds.check_callback = settings.check
    await preseeds.load()
    app = make_app(service, preseeds)
    runner = web.AppRunner(app, shutdown_timeout=0.2, handler_cancellation=True)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    parts = (service.run(), preseeds.run(), Callbacks(preseeds, database, settings).run())
    clocks = [asyncio.create_task(part) for part in parts]
    try:
        async with contextlib.AsyncExitStack() as stack:
            http = await stack.enter_async_context(aiohttp.ClientSession())
            yield At(f"http://127.0.0.1:{runner.addresses[0][1]}", http, app), database
    finally:
        for clock in clocks:
            clock.cancel()
        await asyncio.gather(*clocks, return_exceptions=True)
        await runner.cleanup()
        await preseeds.stop()
        await origin.close()


async def until_call(database: PreseedDatabase, call: Call) -> None:
    """Until the record says so, whatever it says of times."""
    async with asyncio.timeout(60):
        while True:
            record = await asyncio.to_thread(database.read, "p1")
            found = record.call if record is not None else None
            if found is not None and (found.state, found.tries, found.told) == (call.state, call.tries, call.told):
                return
            await asyncio.sleep(0.02)


async def test_ends_are_told_once_each(layout: Path, blobs: list[Digest], receiver: Receiver) -> None:
    """By the typed client, with a quorum, from the order to the end."""
    async with telling(layout, "") as (at, database), connected(at, "a/r/h1"), Tracker(at.url) as client:
        order = PreseedRequest(package(blobs[0]), id="p1", hosts=("h1", "h2"), callback=receiver.url)
        made = await client.preseed(order)
        assert (await client.wait(made.id, quorum=0.5)).hosts_done == 1
        assert receiver.requests == 0, "one of two hosts is not done"
        async with connected(at, "a/r/h2"):
            await receiver.until(1)
        await until_call(database, Call("done", 1, 0.0, told=True))
        await client.cancel("p1")
        await receiver.until(2)
        await until_call(database, Call("cancelled", 1, 0.0, told=True))
    (done_id, done), (cancelled_id, cancelled) = receiver.heard
    assert (done.id, done.state, done.hosts_done) == ("p1", "done", 2)
    assert (cancelled.id, cancelled.state) == ("p1", "cancelled")
    assert done_id != cancelled_id and receiver.requests == 2


async def test_failures_are_told_again_under_the_same_id(layout: Path, blobs: list[Digest], receiver: Receiver) -> None:
    """A redirect is a failure: it might lead anywhere."""
    receiver.answers = [500, 302, 204]
    async with telling(layout, "") as (at, database), connected(at, "a/r/h1"), Tracker(at.url) as client:
        await client.preseed(PreseedRequest(package(blobs[0]), id="p1", hosts=("h1",), callback=receiver.url))
        await receiver.until(1)
        await until_call(database, Call("done", 3, 0.0, told=True))
    assert receiver.requests == 3


async def test_attempts_have_a_limit(
    layout: Path, blobs: list[Digest], receiver: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "TRIES_MAX", 2)
    receiver.answers = [500, 500]
    async with telling(layout, "") as (at, database), connected(at, "a/r/h1"), Tracker(at.url) as client:
        await client.preseed(PreseedRequest(package(blobs[0]), id="p1", hosts=("h1",), callback=receiver.url))
        await until_call(database, Call("done", 2, 0.0))
        await client.cancel("p1")
        await receiver.until(1)
    assert [progress.state for _, progress in receiver.heard] == ["cancelled"] and receiver.requests == 3


@pytest.mark.slow
async def test_another_tracker_goes_on_with_the_attempts(
    layout: Path, blobs: list[Digest], receiver: Receiver, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once the one that is stopped amid an attempt would have given it up."""
    monkeypatch.setattr(module, "REQUEST_S_MAX", 2.0)
    state = tmp_path / "state"
    state.mkdir()
    async with telling(layout, str(state), "127.0.0.1") as (at, database), connected(at, "a/r/h1"):
        receiver.answers = [500] * 3
        async with Tracker(at.url) as client:
            await client.preseed(PreseedRequest(package(blobs[0]), id="p1", hosts=("h1",), callback=receiver.url))
            await until_call(database, Call("done", 1, 0.0))
    receiver.answers = []
    async with telling(layout, str(state)) as (at, database):
        await receiver.until(1)
    assert [progress.state for _, progress in receiver.heard] == ["done"]


@pytest.mark.slow
async def test_of_several_trackers_one_tells(
    layout: Path, blobs: list[Digest], receiver: Receiver, postgresql_server: str
) -> None:
    """Both know of the end, and both look all the time, also while the answer takes longer than the
    pause before the next attempt."""
    receiver.pause_s = 2.0
    async with (
        telling(layout, postgresql_server) as (one, database),
        telling(layout, postgresql_server) as (two, _),
        connected(one, "a/r/h1"),
        Tracker(one.url) as client,
    ):
        for number in range(20):
            order = PreseedRequest(package(blobs[0]), id=f"p{number}", hosts=("h1",), callback=receiver.url)
            await client.preseed(order)
        await receiver.until(20)
        for number in range(20):
            await two.until(f"/v1/preseeds/p{number}", lambda found: found.get("state") == "done")
        await until_call(database, Call("done", 1, 0.0, told=True))
    assert len({identifier for identifier, _ in receiver.heard}) == receiver.requests == 20


async def test_callbacks_lead_only_where_the_operator_says(
    layout: Path, blobs: list[Digest], receiver: Receiver
) -> None:
    order = PreseedRequest(package(blobs[0]), id="p1", hosts=("h1",), callback=receiver.url)
    async with telling(layout, "", "scheduler.example.org") as (at, _), Tracker(at.url) as client:
        with pytest.raises(Refused, match=r"may not lead to 127\.0\.0\.1"):
            await client.preseed(order)
        assert await client.preseeds() == []
    service = PreseedService(Service(Fleet(started_at=0.0), Content(open_origin(layout.as_uri()))), PreseedDatabase(""))
    with pytest.raises(Refused, match="sends no callbacks"):
        await service.create(order)
    await service.stop()


@pytest.mark.parametrize(
    ("url", "allowed"),
    [
        ("https://a.example.org/x?y=1", True),
        ("http://A.example.org:80/", True),
        ("https://b.example.org:8443/", True),
        ("https://b.example.org/", False),
        ("https://a.example.org.evil.test/", False),
        ("https://a.example.org@169.254.169.254/", None),
        ("file:///etc/passwd", None),
        ("https://[::1", None),
        ("https://a.example.org:99999/", None),
        ("https:///x", None),
        ("https://a.example.org/\n", None),
        ("http://169.254.169.254/", False),
        ("http://2130706433/", False),
    ],
)
def test_which_urls_are_allowed(url: str, allowed: bool | None) -> None:
    settings = CallbackSettings(("a.example.org", "b.example.org:8443"), KEY)
    if allowed:
        settings.check(url)
        return
    with pytest.raises(UsageError if allowed is None else Refused):
        settings.check(url)


@pytest.mark.parametrize(
    ("text", "mode", "says"),
    [
        (f'hosts = ["a"]\nkey = "{KEY}"', 0o600, ""),
        (f'hosts = ["a"]\nkey = "{KEY}"', 0o644, "others may read"),
        ('hosts = ["a"]\nkey = "short-secret"', 0o600, "is short"),
        (f'hosts = []\nkey = "{KEY}"', 0o600, "names 0 hosts"),
        (f'hosts = ["a"]\nkey = "{KEY}"\nmore = 1', 0o600, "no file of callbacks"),
        (f'hosts = ["a"\nkey = "{KEY}"', 0o600, "no file of callbacks"),
        ("#" * 70_000, 0o600, "more than 65536 bytes"),
    ],
)
def test_what_a_file_of_callbacks_says(tmp_path: Path, text: str, mode: int, says: str) -> None:
    path = tmp_path / "callbacks.toml"
    path.write_text(text)
    path.chmod(mode)
    if not says:
        assert read_callbacks(path).hosts == ("a",) and KEY not in repr(read_callbacks(path))
        return
    with pytest.raises(UsageError, match=says) as failure:
        read_callbacks(path)
    assert KEY not in str(failure.value) and "short-secret" not in str(failure.value)


def test_a_forged_or_old_callback_is_refused() -> None:
    from p2pdist.model.callback import signature

    body, now = b"{}", 1_000_000.0
    headers = {"P2pdist-Callback-Time": "1000000", "P2pdist-Callback-Signature": signature(KEY, "1000000", body)}
    with pytest.raises(Refused, match="holds no progress"):
        check_callback(KEY, headers, body, now=now)
    for wrong in ({**headers, "P2pdist-Callback-Time": "1000001"}, {}, {"P2pdist-Callback-Signature": "ü"}):
        with pytest.raises(Refused, match="not signed"):
            check_callback(KEY, wrong, body, now=now)
    with pytest.raises(Refused, match="not signed"):
        check_callback(KEY, headers, b"{} ", now=now)
    with pytest.raises(Refused, match="too old"):
        check_callback(KEY, headers, body, now=now + 301)
