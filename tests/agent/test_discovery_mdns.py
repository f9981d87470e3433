"""Discovery with real multicast DNS on loopback: found, forgotten, strangers, names that are taken;
and the session that is offered what was found."""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import pytest
from aiohttp import web
from waits import LoopClock, until
from zeroconf import ServiceInfo
from zeroconf.asyncio import AsyncZeroconf

from p2pdist.agent.discovery.links import DiscoverySettings, Link, addresses_of, find_links
from p2pdist.agent.discovery.mdns import TYPES, Discovery
from p2pdist.agent.tracker import session as session_module
from p2pdist.agent.tracker.connection import Handlers
from p2pdist.agent.tracker.session import TrackerSession
from p2pdist.core.trackerless import Announcement, Kind, text_of
from p2pdist.model.errors import UsageError
from p2pdist.model.messages import PROTOCOL_VERSION, Hello, Welcome, encode

ADDRESS = "127.0.0.1"
_numbers = itertools.count(1)


@pytest.fixture
def network() -> str:
    """A network of this test alone: others may be running on the same loopback."""
    return f"test-{os.getpid()}-{next(_numbers)}"


def discovery(
    kind: Kind,
    network: str,
    name: str,
    port: int,
    *,
    on_change: Callable[[], None] = lambda: None,
    interfaces: tuple[str, ...] = ("lo",),
    host: str = ADDRESS,
) -> Discovery:
    own = Announcement(network, f"{network}-{name}", zone="a", rack="r1", origin=kind == "agent")
    settings = DiscoverySettings((host, port), network, interfaces)
    browse: tuple[Kind, ...] = ("tracker", "agent") if kind == "agent" else ()
    return Discovery(kind, own, settings, browse=browse, on_change=on_change)


@asynccontextmanager
async def running(*found: Discovery) -> AsyncIterator[None]:
    try:
        await asyncio.gather(*(each.start() for each in found))
        yield
    finally:
        await asyncio.gather(*(each.stop() for each in found))


def announced(discovery: Discovery) -> list[Link]:
    """The links on which the name is that of `discovery`."""
    return [link for link, responder in discovery._responders.items() if responder.announced]


def names(found: Discovery) -> list[str]:
    return [each.host.rpartition("-")[2] for each in found.neighbours.agents()]


def addresses(found: Discovery) -> list[str]:
    return [each.address for each in found.neighbours.agents()]


async def test_agents_find_trackers_and_each_other_and_forget_who_leaves(network: str) -> None:
    told: list[int] = []
    tracker = discovery("tracker", network, "t1", 7070)
    h1 = discovery("agent", network, "h1", 7071, on_change=lambda: told.append(1))
    h2 = discovery("agent", network, "h2", 7072)
    async with running(h1, h2):
        async with running(tracker):
            await until(lambda: names(h1) == ["h2"] and names(h2) == ["h1"])
            await until(lambda: bool(h1.neighbours.trackers()))
            (found,) = h1.neighbours.trackers()
            assert found == Announcement(network, f"{network}-t1", f"{ADDRESS}:7070", "a", "r1")
            assert found.url == f"http://{ADDRESS}:7070"
            assert h1.neighbours.agents()[0] == Announcement(
                network, f"{network}-h2", f"{ADDRESS}:7072", "a", "r1", origin=True
            )
            heard = len(told)
        await until(lambda: not h1.neighbours.trackers())
        await until(lambda: len(told) > heard)
        assert names(h1) == ["h2"]


async def test_networks_do_not_mix(network: str) -> None:
    other = network + "-other"
    h1, h2 = discovery("agent", network, "h1", 7071), discovery("agent", network, "h2", 7072)
    stranger, tracker = discovery("agent", other, "h3", 7073), discovery("tracker", other, "t1", 7070)
    async with running(stranger, tracker, h1, h2):
        await until(lambda: names(h1) == ["h2"] and names(h2) == ["h1"] and bool(stranger.neighbours.trackers()))
        assert not h1.neighbours.trackers() and not h2.neighbours.trackers() and not names(stranger)


@pytest.mark.slow
async def test_a_name_comes_back_at_another_port_after_a_stop_and_after_a_crash(network: str) -> None:
    h1 = discovery("agent", network, "h1", 7071)
    async with running(h1):
        async with running(discovery("agent", network, "h2", 7072)):
            await until(lambda: names(h1) == ["h2"])
        crashed = discovery("agent", network, "h2", 7073)
        await crashed.start()
        await until(lambda: addresses(h1) == [f"{ADDRESS}:7073"])
        for responder in crashed._responders.values():  # no goodbye: nothing is registered any more
            assert responder._zeroconf is not None
            registry = responder._zeroconf.zeroconf.registry
            registry.async_remove(registry.async_get_service_infos())
        await crashed.stop()
        assert names(h1) == ["h2"], "nobody said that it is gone"
        async with running(discovery("agent", network, "h2", 7074)):
            await until(lambda: addresses(h1) == [f"{ADDRESS}:7074"])


STRANGE: dict[str, dict[bytes, bytes | None]] = {
    "nothing": {},
    "another version": {b"txtvers": b"9"},
    "a name with a line break": {b"host": b"h\n2026 level=INFO all is well"},
    "no UTF-8": {b"host": b"\xff\xff"},
    "too much": {b"zone": b"z" * 240, b"rack": b"r" * 240, **{b"x%d" % n: b"x" * 240 for n in range(5)}},
    "an odd protocol": {b"proto": b"1e9"},
}


@pytest.mark.slow
async def test_strangers_are_ignored_and_told_once(network: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, logger="p2pdist.agent.discovery.mdns")
    hostile = AsyncZeroconf(interfaces=[ADDRESS])
    h1, h2 = discovery("agent", network, "h1", 7071), discovery("agent", network, "h2", 7072)
    good = {key.encode(): value.encode() for key, value in text_of(h1.own).items()}
    infos = []
    try:
        for number, text in enumerate(STRANGE.values()):
            label = f"strange-{number}-{network}.{TYPES['agent']}"
            properties = {**good, **text} if text else {}
            infos.append(ServiceInfo(TYPES["agent"], label, 9, properties=properties, parsed_addresses=[ADDRESS]))
        far = {**good, b"host": b"far"}
        label = f"strange-far-{network}.{TYPES['agent']}"
        infos.append(ServiceInfo(TYPES["agent"], label, 9, properties=far, parsed_addresses=["192.0.2.9"]))
        await asyncio.gather(*(hostile.async_register_service(info) for info in infos))

        def said() -> list[str]:
            return [
                each.getMessage()
                for each in caplog.records
                if f"{network}" in each.getMessage() and "ignoring" in each.getMessage()
            ]

        async with running(h1):
            await until(lambda: len(said()) >= len(infos))
            for info in infos:
                await hostile.async_update_service(info)
            async with running(h2):
                await until(lambda: names(h1) == ["h2"])
            assert len(said()) <= 2 * len(infos), "once each, by each of the two"
            assert all("\n" not in each for each in said())
    finally:
        await hostile.async_close()


@pytest.mark.slow
async def test_a_second_agent_of_a_name_says_so_and_is_not_announced(
    network: str, caplog: pytest.LogCaptureFixture
) -> None:
    first, second, other = (
        discovery("agent", network, "h1", 7071),
        discovery("agent", network, "h1", 7072),
        discovery("agent", network, "h2", 7073),
    )
    async with running(first, other):
        await until(lambda: names(other) == ["h1"])
        async with running(second):
            await until(lambda: any("is used by" in each.getMessage() for each in caplog.records))
            assert "--name" in caplog.text
            assert addresses(other) == [f"{ADDRESS}:7071"]
            await until(lambda: names(second) == ["h2"])
        await asyncio.sleep(0.5)
        assert addresses(other) == [f"{ADDRESS}:7071"], "its leave is not the first one's"


async def test_of_two_of_a_name_that_begin_at_once_one_stays(network: str) -> None:
    rivals = [discovery("agent", network, "h1", 7071), discovery("agent", network, "h1", 7072)]
    other = discovery("agent", network, "h2", 7073)
    async with running(other, *rivals):
        await until(lambda: names(other) == ["h1"])
        await until(lambda: len([each for each in rivals if announced(each)]) == 1)
        (left,) = [each for each in rivals if announced(each)]
        await until(lambda: addresses(other) == [f"{ADDRESS}:{left.settings.listen[1]}"])


async def test_a_name_that_another_uses_while_it_is_announced_is_defended_after_that(
    network: str, caplog: pytest.LogCaptureFixture
) -> None:
    h1 = discovery("agent", network, "h1", 7071)
    async with running(h1):
        await until(lambda: announced(h1))
        (responder,) = h1._responders.values()
        await until(lambda: responder._announcing is not None and responder._announcing.done())
        over = asyncio.Event()

        async def announce() -> None:
            await over.wait()

        responder._begin(announce())
        responder._defend()
        assert "uses the name" not in caplog.text
        over.set()
        await until(lambda: "uses the name" in caplog.text)


@asynccontextmanager
async def intruder(own: Announcement, port: int) -> AsyncIterator[None]:
    """Somebody who uses a name without asking whose it is."""
    zeroconf = AsyncZeroconf(interfaces=[ADDRESS])
    label = f"{own.host}.{TYPES['agent']}"
    info = ServiceInfo(TYPES["agent"], label, port, properties=text_of(own), parsed_addresses=[ADDRESS])
    try:
        await zeroconf.async_register_service(info, cooperating_responders=True)
        yield
    finally:
        await zeroconf.async_close()


@pytest.mark.slow
async def test_a_name_that_is_used_without_asking_is_defended(network: str, caplog: pytest.LogCaptureFixture) -> None:
    h1, other = discovery("agent", network, "h1", 7071), discovery("agent", network, "h2", 7073)
    async with running(h1, other):
        await until(lambda: names(other) == ["h1"])
        async with intruder(h1.own, 7072):
            await until(lambda: "uses the name" in caplog.text)
        assert announced(h1)
        await until(lambda: addresses(other) == [f"{ADDRESS}:7071"])
        await asyncio.sleep(1.5)  # what the intruder said is no longer cached
        await until(lambda: addresses(other) == [f"{ADDRESS}:7071"])


@pytest.mark.slow
async def test_the_higher_address_gives_way(network: str, caplog: pytest.LogCaptureFixture) -> None:
    h1, other = discovery("agent", network, "h1", 7072), discovery("agent", network, "h2", 7073)
    async with running(h1, other):
        await until(lambda: names(other) == ["h1"])
        async with intruder(h1.own, 7071):
            await until(lambda: "is used by 127.0.0.1 port 7071" in caplog.text)
            assert not announced(h1)
            await until(lambda: addresses(other) == [f"{ADDRESS}:7071"])
            late = discovery("agent", network, "h3", 7074)
            async with running(late):
                await until(lambda: names(late) == ["h1", "h2"])
                assert addresses(late)[0] == f"{ADDRESS}:7071"
                await asyncio.sleep(1.5)  # time for a second answer, and the second question
                assert addresses(late)[0] == f"{ADDRESS}:7071"


@pytest.mark.slow
async def test_a_second_tracker_of_a_name_takes_another_one(network: str, caplog: pytest.LogCaptureFixture) -> None:
    first, second = discovery("tracker", network, "t1", 7070), discovery("tracker", network, "t1", 7071)
    h1 = discovery("agent", network, "h1", 7072)
    async with running(h1), running(first):
        await until(lambda: len(h1.neighbours.trackers()) == 1)
        async with running(second):
            await until(lambda: len(h1.neighbours.trackers()) == 2)
            assert {each.address for each in h1.neighbours.trackers()} == {f"{ADDRESS}:7070", f"{ADDRESS}:7071"}
            assert "another tracker is announced" in caplog.text
        await until(lambda: [each.address for each in h1.neighbours.trackers()] == [f"{ADDRESS}:7070"])


async def test_on_loopback_nobody_is_sought_unless_it_is_named(network: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    alone = discovery("agent", network, "h1", 7071, interfaces=())
    async with running(alone):
        assert alone.links == []
    assert "no network to discover" in caplog.text


def test_links() -> None:
    lo = list(find_links(["lo"], frozenset()))
    assert [(link.interface, link.address) for link in lo] == [("lo", ADDRESS)]
    assert find_links([ADDRESS], frozenset()) == lo
    assert all(link.interface != "lo" for link in find_links([], frozenset()))
    assert find_links([], frozenset(["192.0.2.250"])) == []
    assert addresses_of("0.0.0.0") == addresses_of("::") == frozenset()
    assert addresses_of("localhost") >= {ADDRESS}


@pytest.mark.parametrize(
    ("wrong", "told"), [({"interfaces": ("no-such0",)}, "no-such0"), ({"network": "two words"}, "--network-id")]
)
def test_settings_that_cannot_be_used_are_told(wrong: dict[str, object], told: str) -> None:
    with pytest.raises(UsageError, match=told):
        discovery("agent", str(wrong.get("network", "n")), "h1", 1, interfaces=wrong.get("interfaces", ()))  # type: ignore[arg-type]


# -- the session


@asynccontextmanager
async def tracker() -> AsyncIterator[str]:
    """A tracker that welcomes everybody and says nothing more."""
    sockets: set[web.WebSocketResponse] = set()

    async def session(request: web.Request) -> web.WebSocketResponse:
        socket = web.WebSocketResponse()
        await socket.prepare(request)
        await socket.receive()
        await socket.send_str(encode(Welcome(PROTOCOL_VERSION, 0.05)).decode())
        sockets.add(socket)
        async for _ in socket:
            continue
        return socket

    app = web.Application()
    app.router.add_get("/v1/session", session)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, ADDRESS, 0).start()
    try:
        yield f"http://{ADDRESS}:{runner.addresses[0][1]}"
    finally:
        for socket in sockets:
            await socket.close()
        await runner.cleanup()


@asynccontextmanager
async def session(*urls: str, searching: bool = True) -> AsyncIterator[TrackerSession]:
    hello = Hello(PROTOCOL_VERSION, "h1", f"{ADDRESS}:7071")
    made = TrackerSession(urls, hello, searching=searching)
    handlers = Handlers(list, lambda: None, lambda message: None, lambda present: None)
    task = asyncio.create_task(made.run(handlers))
    try:
        yield made
        assert not task.done()
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def test_a_session_without_trackers_waits_for_one_to_be_found_and_falls_to_the_next() -> None:
    async with tracker() as second, session() as made:
        await asyncio.sleep(0.1)
        assert not made.connected and made.url == ""
        async with tracker() as first:
            made.offer([first, second])
            assert await made.wait_connected(60) and made.url == first
            made.offer([second, first])
            await asyncio.sleep(0.2)
            assert made.connected and made.url == first, "a session that works is kept"
        await until(lambda: made.connected and made.url == second)


async def test_a_tracker_that_is_found_later_is_tried_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The pauses between tries have grown to an hour by then."""
    clock = LoopClock(monkeypatch)
    monkeypatch.setattr(session_module, "RETRY_MAX_S", 7200.0)
    async with session() as made:
        made.offer([f"http://{ADDRESS}:1"])
        for tries in range(20):
            while made._next <= tries:
                clock.put_forward(7200.0)
                await asyncio.sleep(0.005)
        async with tracker() as later:
            made.offer([later, f"http://{ADDRESS}:1"])
            assert await made.wait_connected(60) and made.url == later


async def test_trackers_that_were_given_stay_first_and_the_lost_are_not_tried() -> None:
    async with tracker() as given, session(given) as made:
        made.offer(["http://found:1"])
        assert made.urls == [given, "http://found:1"]
        assert await made.wait_connected(60)
        made.offer([])
        assert made.urls == [given] and made.connected
    async with session() as made:
        made.offer([f"http://{ADDRESS}:1"])
        await until(lambda: bool(made.problem))
        made.offer([])
        assert made.urls == [] and made.url == ""
        await asyncio.sleep(0.3)
