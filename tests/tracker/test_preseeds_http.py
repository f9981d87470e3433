"""Preseeds and rankings over HTTP: real trackers on loopback, a real layout, sessions that speak as
agents do."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import programs
import psycopg
import pytest
from aiohttp import web
from waits import until

from p2pdist.cli.verbs.slurm.job import Job
from p2pdist.cli.verbs.slurm.prolog import _order, _Settings
from p2pdist.model.digest import Digest
from p2pdist.model.manifest import is_bootstrap, parse_reference
from p2pdist.model.messages import (
    PROTOCOL_VERSION,
    Hello,
    Holding,
    Keep,
    Kept,
    Release,
    decode_from_tracker,
    encode,
)
from p2pdist.mount.erofs.writer import device_image
from p2pdist.origin.drivers import open_origin
from p2pdist.origin.layout import LocalLayout
from p2pdist.package.pack import pack
from p2pdist.package.tree.bootstrap import Bootstrapping
from tracker import preseed_service as module
from tracker.content import Content
from tracker.core.fleet import Fleet
from tracker.core.preseeds import orders
from tracker.http.app import make_app
from tracker.http.keys import PRESEEDS
from tracker.http.scheduler import WAITS
from tracker.preseed_service import PreseedService
from tracker.service import Service
from tracker.state.preseeds import PreseedDatabase

SIZE = 200_000
PIECE = 65536


@pytest.fixture(scope="module")
def layout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two blobs that were pushed alone."""
    directory = tmp_path_factory.mktemp("layout")
    for name in ("one", "two"):
        file = directory / name
        file.write_bytes(os.urandom(SIZE))
        programs.run("blob", "push", file, "--origin", f"file://{directory}/origin", check=True)
    return directory / "origin"


@pytest.fixture(scope="module")
def blobs(layout: Path) -> list[Digest]:
    sizes = {file.name: file.stat().st_size for file in (layout / "blobs" / "sha256").iterdir()}
    return sorted(Digest(f"sha256:{name}") for name, size in sizes.items() if size == SIZE)


def package(blob: Digest) -> str:
    return f"blob:{blob.replace(':', '-')}"


class Tracker:
    """One tracker and a client of it."""

    def __init__(self, url: str, http: aiohttp.ClientSession, app: web.Application) -> None:
        self.url, self.http, self.app = url, http, app

    async def ask(self, method: str, path: str, body: Any = None) -> tuple[int, Any]:
        async with self.http.request(method, self.url + path, json=body) as answer:
            return answer.status, await answer.json(content_type=None)

    async def until(self, path: str, holds: Callable[[Any], bool]) -> Any:
        """Ask again until the answer is as it should be."""
        found: Any = None
        for _ in range(3000):
            found = (await self.ask("GET", path))[1]
            if holds(found):
                return found
            await asyncio.sleep(0.02)
        raise AssertionError(found)


@asynccontextmanager
async def tracker(layout: Path, state: str = "") -> AsyncIterator[Tracker]:
    origin = open_origin(layout.as_uri())
    service = Service(Fleet(started_at=asyncio.get_running_loop().time()), Content(origin))
    preseeds = service.listener = PreseedService(service, PreseedDatabase(state), grace_s=0.5)
    await preseeds.load()
    runner = web.AppRunner(make_app(service, preseeds), shutdown_timeout=0.2, handler_cancellation=True)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    clocks = [asyncio.create_task(service.run()), asyncio.create_task(preseeds.run())]
    try:
        async with aiohttp.ClientSession() as http:
            yield Tracker(f"http://127.0.0.1:{runner.addresses[0][1]}", http, runner.app)
    finally:
        for clock in clocks:
            clock.cancel()
        await runner.cleanup()
        await preseeds.stop()
        await origin.close()


class Host:
    """A session that does what Keep and Release say, at once."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self.socket = socket
        self.keeps: dict[str, Keep] = {}

    async def run(self) -> None:
        async for frame in self.socket:
            match decode_from_tracker(frame.data):
                case Keep() as keep:
                    self.keeps[keep.id] = keep
                    await self.say(Kept(keep.id, "done", SIZE, SIZE))
                case Release(identifier):
                    self.keeps.pop(identifier, None)

    async def say(self, message: Any) -> None:
        await self.socket.send_str(encode(message).decode())

    async def until(self, holds: Callable[[], bool]) -> None:
        await until(holds, "what the host is to keep")


@asynccontextmanager
async def connected(at: Tracker, *names: str) -> AsyncIterator[list[Host]]:
    """Hosts zone/rack/name."""
    hosts, tasks = [], []
    async with contextlib.AsyncExitStack() as stack:
        for text in names:
            zone, rack, name = text.split("/")
            socket = await stack.enter_async_context(at.http.ws_connect(at.url + "/v1/session"))
            host = Host(socket)
            await host.say(Hello(PROTOCOL_VERSION, name, f"{name}:1", zone, rack))
            decode_from_tracker((await socket.receive(timeout=60)).data)
            hosts.append(host)
            tasks.append(asyncio.create_task(host.run()))
        try:
            yield hosts
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


async def test_a_preseed_from_the_order_to_the_release(layout: Path, blobs: list[Digest]) -> None:
    body = {"package": package(blobs[0]), "hosts": ["h1", "h2"], "priority": "start", "ttl": 600}
    async with tracker(layout) as at, connected(at, "a/r/h1") as [host]:
        status, made = await at.ask("POST", "/v1/preseeds", body)
        assert (status, made["hosts_total"], made["bytes_total"]) == (201, 2, 2 * SIZE)
        identifier = made["id"]
        found = await at.until(f"/v1/preseeds/{identifier}", lambda found: found["hosts_done"] == 1)
        assert found["state"] == "running" and found["failures_by_reason"] == {"not-connected": 1}
        assert found["package"].startswith("blob@sha256:")
        keep = host.keeps[identifier]
        assert (keep.package, keep.priority, keep.until) == (found["package"], "start", found["expires_at"])
        assert [each["id"] for each in (await at.ask("GET", "/v1/preseeds"))[1]] == [identifier]
        status, found = await at.ask("DELETE", f"/v1/preseeds/{identifier}")
        assert (status, found["state"], found["hosts_done"]) == (200, "cancelled", 0)
        await host.until(lambda: not host.keeps)


async def test_an_id_stands_for_one_order(layout: Path, blobs: list[Digest]) -> None:
    body = {"package": package(blobs[0]), "selector": {"zone": "a"}}
    async with tracker(layout) as at:
        first = await at.ask("PUT", "/v1/preseeds/p1", body)
        assert first[0] == 201
        assert (await at.ask("PUT", "/v1/preseeds/p1", body))[0] == 200
        assert (await at.ask("POST", "/v1/preseeds", body | {"id": "p1"}))[0] == 200
        assert (await at.ask("PUT", "/v1/preseeds/p1", body | {"count": 1}))[0] == 409
        assert (await at.ask("PUT", "/v1/preseeds/p1", body | {"id": "p2"}))[0] == 400
        many = [at.ask("PUT", "/v1/preseeds/p3", body | {"count": number % 2 + 1}) for number in range(8)]
        statuses = sorted(status for status, _ in await asyncio.gather(*many))
        assert statuses == [200, 200, 200, 201, 409, 409, 409, 409]


async def test_of_many_nodes_of_a_job_one_gives_the_order(
    layout: Path, blobs: list[Digest], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The order names every node, so that each of them gives it must not be: the others hear what
    it came to. Its end costs little, too."""
    for limit in ("FIRST_S", "GIVE_S_MAX", "TRACKER_S_MAX"):
        monkeypatch.setattr(sys.modules[_order.__module__], limit, 600.0)
    caplog.set_level(logging.DEBUG, "p2pdist.transfer.problems")
    names = [f"h{number:03}" for number in range(40)]
    reference = parse_reference(package(blobs[0]))
    async with tracker(layout) as at:

        async def order(node: str) -> list[str]:
            settings = _Settings(at.url, Path(), Path(), False, 600.0, 60.0, 1.0)
            return await _order(Job("4711", node), [reference], names, settings)

        versions = await asyncio.gather(*map(order, reversed(names)))
        assert all(version == versions[0] for version in versions) and "@sha256:" in versions[0][0]
        told = [record.getMessage() for record in caplog.records]
        assert len([line for line in told if line.startswith("PUT")]) == 1

        (late,) = await order("h039")
        assert late == versions[0][0], "one that comes later"
        found = [await at.ask("DELETE", "/v1/preseeds/slurm-4711?brief=1") for _ in names]
        assert {(status, body["state"]) for status, body in found} == {(200, "cancelled")}
        assert found[0][1].keys() == {"id", "state", "package", "fingerprint"}


async def test_orders_of_one_moment_keep_within_the_share_of_their_address(
    layout: Path, blobs: list[Digest], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(orders, "LIVE_MAX", 6)
    async with tracker(layout) as at:
        body = {"package": package(blobs[0]), "hosts": ["h1"]}
        answers = await asyncio.gather(*(at.ask("POST", "/v1/preseeds", body) for _ in range(10)))
        assert sorted(status for status, _ in answers) == [201] * 3 + [409] * 7
        refused = next(answer for status, answer in answers if status == 409)
        assert "127.0.0.1" in refused["detail"] and "--access" in refused["remedy"]
        async with (
            aiohttp.ClientSession(connector=aiohttp.TCPConnector(local_addr=("127.0.0.2", 0))) as other,
            other.post(f"{at.url}/v1/preseeds", json=body) as answer,
        ):
            assert answer.status == 201, "another address has a share of its own"


async def test_an_order_of_somebody_else_is_not_taken_for_that_of_the_job(layout: Path, blobs: list[Digest]) -> None:
    """Whoever guesses a job's id must not choose what it runs; and without its first node the
    others give the order."""
    names = ["h0", "h1", "h2"]
    one, two = map(package, blobs)
    async with tracker(layout) as at:
        settings = _Settings(at.url, Path(), Path(), False, 600.0, 60.0, 1.0)
        assert (await at.ask("PUT", "/v1/preseeds/slurm-1", {"package": one, "hosts": names}))[0] == 201
        assert await _order(Job("1", "h1"), [parse_reference(two)], names, settings) == [two]
        (version,) = await _order(Job("2", "h2"), [parse_reference(two)], names, settings)
        assert version.startswith("blob@sha256:")


async def test_orders_outlive_the_tracker(layout: Path, blobs: list[Digest], tmp_path: Path) -> None:
    state = str(tmp_path / "state")
    async with tracker(layout, state) as at, connected(at, "a/r/h1", "a/r/h2"):
        await at.ask("PUT", "/v1/preseeds/p1", {"package": package(blobs[0]), "count": 1})
        before = await at.until("/v1/preseeds/p1", lambda found: found["state"] == "done")
    async with tracker(layout, state) as at:
        found = (await at.ask("GET", "/v1/preseeds/p1"))[1]
        assert (found["picked"], found["package"]) == (before["picked"], before["package"])
        assert found["state"] == "pending"
        async with connected(at, "a/r/h1", "a/r/h2") as hosts:
            await at.until("/v1/preseeds/p1", lambda found: found["state"] == "done")
            assert [len(host.keeps) for host in hosts] == [1, 0]
            await hosts[1].say(Kept("p0", "done"))
            hosts[1].keeps["p0"] = Keep("p0", "")
            await hosts[1].until(lambda: not hosts[1].keeps)


@pytest.mark.parametrize(
    ("body", "status"),
    [
        ({"package": "nobody/knows:v1", "count": 1}, 404),
        ({"package": "UPPER", "count": 1}, 400),
        ({"package": "a:v1"}, 400),
        ({"package": "a:v1", "hosts": ["h0"], "selector": "zone=a"}, 400),
        ({"package": "a:v1", "hosts": []}, 400),
        ({"package": "a:v1", "selector": "planet=earth"}, 400),
        ({"package": "a:v1", "count": 0}, 400),
        ({"package": "a:v1", "count": 1, "deadline": -1}, 400),
        ({"package": "a:v1", "hosts": ["a b"]}, 400),
        ({"package": "a:v1", "count": 1, "id": "../x"}, 400),
        ({"package": "a:v1", "count": 1, "colour": "red"}, 400),
        ([], 400),
        ({"package": "a:v1", "hosts": [f"h{number:060}" for number in range(20_000)]}, 413),
    ],
)
async def test_what_cannot_be_asked_for(layout: Path, body: Any, status: int) -> None:
    async with tracker(layout) as at:
        found, problem = await at.ask("POST", "/v1/preseeds", body)
        assert (found, problem["status"]) == (status, status), problem
        assert (await at.ask("GET", "/v1/preseeds"))[1] == []
        for method in ("GET", "DELETE"):
            assert (await at.ask(method, "/v1/preseeds/none"))[0] == 404


async def test_ranking(layout: Path, blobs: list[Digest]) -> None:
    packages = [package(blob) for blob in blobs]
    async with (
        tracker(layout) as at,
        connected(at, "a/r1/h1", "a/r1/h2", "a/r2/h3", "b/r3/h4") as [_, second, third, fourth],
    ):
        counts = (4,)
        for host, blob in ((second, 0), (second, 1), (third, 1), (fourth, 0)):
            await host.say(Holding(blobs[blob], SIZE, PIECE, counts if host is not third else (2,)))
        await at.until(f"/v1/swarms/{blobs[0]}", lambda found: found.get("complete") == 2)
        await at.until(f"/v1/swarms/{blobs[1]}", lambda found: found.get("hosts") == 2)

        async def ranked(**asked: Any) -> list[tuple[str, int]]:
            status, found = await at.ask("POST", "/v1/rank", {"packages": packages, **asked})
            assert status == 200, found
            return [(row["host"], row["bytes_missing"]) for row in found]

        assert await ranked() == [
            ("h2", 0),
            ("h4", SIZE),
            ("h3", 2 * SIZE - 2 * PIECE),
            ("h1", 2 * SIZE),
        ]
        assert await ranked(packages=[*packages, packages[0]], count=2) == [("h2", 0), ("h4", SIZE)]
        assert await ranked(selector="zone=b") == [("h4", SIZE)]
        assert await ranked(hosts=["h1", "unknown"]) == [("h1", 2 * SIZE), ("unknown", 2 * SIZE)]
        assert await ranked(count=2, coherent="rack") == [("h2", 0), ("h1", 2 * SIZE)]
        roles = [
            {"name": "load", "packages": packages[:1], "count": 1},
            {"name": "train", "packages": packages, "count": 1},
        ]
        status, found = await at.ask("POST", "/v1/rank", {"roles": roles})
        assert status == 200
        assert [(role["role"], [host["host"] for host in role["hosts"]]) for role in found["assignment"]] == [
            ("load", ["h4"]),
            ("train", ["h2"]),
        ]
        for body, status in (
            ({}, 400),
            ({"packages": packages, "roles": roles}, 400),
            ({"roles": roles, "count": 2}, 400),
            ({"roles": [*roles, roles[0]]}, 400),
            ({"roles": [roles[0] | {"count": 5}]}, 409),
            ({"packages": ["no/such:v1"]}, 404),
            ({"packages": packages, "hosts": ["h1"], "selector": "zone=a"}, 400),
        ):
            assert (await at.ask("POST", "/v1/rank", body))[0] == status, body


async def test_a_bootstrap_is_nothing_that_a_host_needs(tmp_path: Path) -> None:
    """A host that has pulled the package has not fetched it, and would rank as lacking something
    for ever."""
    (tmp_path / "source").mkdir()
    (tmp_path / "source/file").write_bytes(bytes(SIZE))
    layout, reference = LocalLayout(tmp_path / "layout"), parse_reference("app:v1")
    how = Bootstrapping(device_image, always=True)
    made = await pack(tmp_path / "source", reference, layout, format="tree", bootstrapping=how)
    sizes = [(blob.size, is_bootstrap(blob)) for blob in (*made.layers, *made.parts)]
    assert [bootstrap for _, bootstrap in sizes].count(True) == 1
    async with tracker(tmp_path / "layout") as at:
        for _ in range(2):  # then it is remembered
            status, found = await at.ask("POST", "/v1/rank", {"packages": ["app:v1"], "hosts": ["h1"]})
            assert status == 200, found
            assert found[0]["bytes_missing"] == sum(size for size, bootstrap in sizes if not bootstrap)


@pytest.mark.slow
async def test_two_trackers_on_one_database(layout: Path, blobs: list[Digest], postgresql_server: str) -> None:
    """What one is asked for, the other carries out for its hosts; either says how far it is, and
    either cancels."""
    async with (
        tracker(layout, postgresql_server) as one,
        tracker(layout, postgresql_server) as two,
        connected(one, "a/r1/h1"),
        connected(two, "b/r1/h2", "b/r2/h3") as [second, third],
    ):
        status, _ = await one.ask("PUT", "/v1/preseeds/p1", {"package": package(blobs[0]), "replicas": 1})
        assert status == 201
        for at in (one, two):
            found = await at.until(
                "/v1/preseeds/p1",
                lambda found: found.get("state") == "done" and found["replicas"] == {"a": 1, "b": 1},
            )
            assert (found["hosts_done"], found["bytes_done"]) == (2, 2 * SIZE)
        assert len(second.keeps) + len(third.keeps) == 1
        changes: list[Awaitable[Any]] = [at.ask("DELETE", "/v1/preseeds/p1") for at in (one, two)]
        assert {status for status, _ in await asyncio.gather(*changes)} == {200}
        await second.until(lambda: not second.keeps and not third.keeps)
        await one.until("/v1/preseeds", lambda found: [each["state"] for each in found] == ["cancelled"])


@pytest.mark.slow
async def test_what_one_tracker_was_asked_for_the_other_knows_at_once(
    layout: Path, blobs: list[Digest], postgresql_server: str
) -> None:
    """A scheduler whose requests go to several trackers by turns is not told that its order does
    not exist."""
    async with tracker(layout, postgresql_server) as one, tracker(layout, postgresql_server) as two:
        for number in range(5):
            path = f"/v1/preseeds/turn-{number}"
            assert (await one.ask("PUT", path, {"package": package(blobs[0]), "hosts": ["h1"]}))[0] == 201
            status, found = await two.ask("GET", f"{path}?wait_s=0.1")
            assert (status, found["hosts_total"]) == (200, 1)
            path = f"/v1/preseeds/gone-{number}"
            assert (await one.ask("PUT", path, {"package": package(blobs[0]), "hosts": ["h1"]}))[0] == 201
            status, found = await two.ask("DELETE", path)
            assert (status, found["state"]) == (200, "cancelled")
        assert (await two.ask("GET", "/v1/preseeds/none"))[0] == 404


async def test_a_clock_that_is_set_meanwhile_ends_no_preseed_early(
    layout: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A tracker alone counts on from the time at its start."""
    async with tracker(layout) as at:
        began = time.time()
        monkeypatch.setattr(module.time, "time", lambda: began + 7200)
        assert abs(at.app[PRESEEDS].now() - began) < 60


@pytest.mark.slow
async def test_a_tracker_whose_clock_is_ahead_ends_no_preseed_of_the_others(
    layout: Path, blobs: list[Digest], postgresql_server: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Trackers on one database go by its clock: by that of one which is two hours ahead each order
    with a deadline of an hour would have failed at once, and each with a time to live expired."""
    order = {"package": package(blobs[0]), "hosts": ["h1"], "deadline": 3600, "ttl": 3600}
    async with tracker(layout, postgresql_server) as one:
        assert (await one.ask("PUT", "/v1/preseeds/clock", order))[0] == 201
        began, right = time.time(), time.time
        monkeypatch.setattr(module.time, "time", lambda: right() + 7200)
        async with tracker(layout, postgresql_server) as two, connected(two, "a/r/h2") as [host]:
            mine = order | {"selector": "zone=a"}
            del mine["hosts"]
            assert (await two.ask("PUT", "/v1/preseeds/mine", mine))[0] == 201
            await two.until("/v1/preseeds/mine", lambda found: found["state"] == "done" and found["settled"])
            assert 3500 < (host.keeps["mine"].left_s or 0.0) <= 3600
            for at in (one, two):
                found = (await at.ask("GET", "/v1/preseeds/clock"))[1]
                assert found["state"] == "pending" and abs(found["created_at"] - began) < 60


async def test_a_question_waits_until_the_preseed_is_done(layout: Path, blobs: list[Digest]) -> None:
    """One answer, which comes when the last host is done."""
    body = {"package": package(blobs[0]), "hosts": ["h1"], "id": "p1"}
    async with tracker(layout) as at:
        await at.ask("POST", "/v1/preseeds", body)
        asked = asyncio.create_task(at.ask("GET", "/v1/preseeds/p1?wait_s=50"))
        async with connected(at, "a/r/h1"):
            status, found = await asyncio.wait_for(asked, 40)
            assert (status, found["state"], found["hosts_done"]) == (200, "done", 1)


async def test_a_question_waits_for_a_quorum_or_the_end(layout: Path, blobs: list[Digest]) -> None:
    body = {"package": package(blobs[0]), "hosts": ["h1", "h2"], "id": "p1"}
    async with tracker(layout) as at:
        await at.ask("POST", "/v1/preseeds", body)
        asked = asyncio.create_task(at.ask("GET", "/v1/preseeds/p1?wait_s=50&quorum=0.5"))
        async with connected(at, "a/r/h1"):
            found = (await asyncio.wait_for(asked, 40))[1]
            assert (found["state"], found["hosts_done"]) == ("running", 1)
            found = (await at.ask("GET", "/v1/preseeds/p1?wait_s=0.1"))[1]
            assert (found["state"], found["hosts_done"]) == ("running", 1), "the time is over"
            asked = asyncio.create_task(at.ask("GET", "/v1/preseeds/p1?wait_s=50&brief=1"))
            await at.ask("DELETE", "/v1/preseeds/p1")
            assert (await asyncio.wait_for(asked, 40))[1]["state"] == "cancelled"


async def test_all_nodes_of_a_job_that_wait_are_answered_at_the_price_of_a_few(
    layout: Path, blobs: list[Digest], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The progress of ten thousand hosts takes a twentieth of a second. When the last one is done,
    a thousand questions would keep the tracker from all its sessions for a minute."""
    made, before = list[float](), orders.progress

    def slow(*given: Any, **named: Any) -> Any:
        made.append(time.monotonic())
        time.sleep(0.05)
        return before(*given, **named)

    monkeypatch.setattr(orders, "progress", slow)
    async with tracker(layout) as at:
        await at.ask("POST", "/v1/preseeds", {"package": package(blobs[0]), "hosts": ["h1"], "id": "p1"})
        asked = [asyncio.create_task(at.ask("GET", "/v1/preseeds/p1?wait_s=50")) for _ in range(90)]
        async with asyncio.timeout(60):
            while len(at.app[WAITS].places) < 90:
                await asyncio.sleep(0.02)
        made.clear()
        async with connected(at, "a/r/h1"):
            answers = await asyncio.wait_for(asyncio.gather(*asked), 50)
        assert {(status, found["state"], found["hosts_done"]) for status, found in answers} == {(200, "done", 1)}
        assert len(made) <= 30
        assert (await at.ask("DELETE", "/v1/preseeds/p1"))[1]["state"] == "cancelled", "no answer is of before"


@pytest.mark.slow
async def test_an_open_preseed_is_not_counted_anew_for_each_that_waits_while_hosts_may_return(
    layout: Path, blobs: list[Digest], monkeypatch: pytest.MonkeyPatch
) -> None:
    made, before = list[str](), orders.progress
    monkeypatch.setattr(orders, "progress", lambda *given, **named: made.append("") or before(*given, **named))
    async with tracker(layout) as at:
        at.app[PRESEEDS].core.grace_s = 5.0
        async with connected(at, "a/r/h1"):
            await at.ask("POST", "/v1/preseeds", {"package": package(blobs[0]), "selector": "zone=a", "id": "p1"})
            await at.until("/v1/preseeds/p1", lambda found: found["hosts_done"] == 1 and not found["settled"])
            made.clear()
            assert (await at.ask("GET", "/v1/preseeds/p1?wait_s=50"))[1]["settled"]
            assert len(made) == 1


async def test_a_tracker_that_stops_answers_what_waits(layout: Path, blobs: list[Digest]) -> None:
    async with aiohttp.ClientSession() as http:
        async with tracker(layout) as at:
            await at.ask("POST", "/v1/preseeds", {"package": package(blobs[0]), "hosts": ["h1"], "id": "p1"})
            asked = asyncio.create_task(Tracker(at.url, http, at.app).ask("GET", "/v1/preseeds/p1?wait_s=60"))
            await at.until("/v1/preseeds", lambda found: len(at.app[WAITS].places) == 1)
        status, found = await asyncio.wait_for(asked, 60)
        assert (status, found["state"]) == (200, "pending")


@pytest.mark.parametrize("query", ["wait_s=61", "wait_s=soon", "wait_s=nan", "wait_s=1&quorum=1.5", "wait_s=-1"])
async def test_a_time_to_wait_has_limits(layout: Path, blobs: list[Digest], query: str) -> None:
    async with tracker(layout) as at:
        await at.ask("POST", "/v1/preseeds", {"package": package(blobs[0]), "hosts": ["h1"], "id": "p1"})
        status, found = await at.ask("GET", f"/v1/preseeds/p1?{query}")
        assert (status, found["title"]) == (400, "The request is malformed")


@pytest.mark.parametrize(
    ("path", "body", "pointer", "named"),
    [
        ("/v1/preseeds", {"package": "a:v1", "hots": ["h1"]}, "#/hots", "Did you mean hosts?"),
        ("/v1/preseeds", {"package": "a:v1", "a/b": 1}, "#/a~1b", "Known fields are package, id, hosts"),
        ("/v1/preseeds", {"package": "a:v1", "count": "2"}, "#/count", ""),
        ("/v1/rank", {"roles": [{"name": "r", "packages": ["a:v1"], "cuont": 1}]}, "#/roles/0/cuont", "mean count?"),
        ("/v1/rank", {"roles": [{"name": "r", "packages": ["a:v1"], "count": 0}]}, "#/roles/0/count", ""),
        ("/v1/rank", [], "#", ""),
    ],
)
async def test_a_mistake_says_where_it_is(layout: Path, path: str, body: Any, pointer: str, named: str) -> None:
    async with tracker(layout) as at:
        status, found = await at.ask("POST", path, body)
        assert (status, [each["pointer"] for each in found["errors"]]) == (400, [pointer])
        assert named in found["remedy"]


async def test_a_ranking_of_nobody_says_why(layout: Path, blobs: list[Digest]) -> None:
    body = {"packages": [package(blobs[0])], "selector": "zone=é"}
    async with tracker(layout) as at, connected(at, "a/r/h1"), at.http.post(at.url + "/v1/rank", json=body) as answer:
        assert (answer.status, await answer.json()) == (200, [])
        assert answer.headers["P2pdist-Note"] == "no host has zone=\\xe9; zones here: a"


async def test_the_index_names_every_route(layout: Path) -> None:
    async with tracker(layout) as at:
        found = (await at.ask("GET", "/v1"))[1]
        lines = {(line["method"], line["path"]): line["summary"] for line in found["routes"]}
        assert lines["GET", "/v1/preseeds/{id}"] == "Say how far a preseed is"
        document = (await at.ask("GET", found["openapi"]))[1]
        described = {
            (method.upper(), path): operation["summary"]
            for path, operations in document["paths"].items()
            for method, operation in operations.items()
        }
        assert lines == described


async def test_a_database_that_hangs_keeps_no_other_work_of_the_tracker(
    layout: Path, blobs: list[Digest], postgresql_server: str
) -> None:
    """Beats of a cluster and reads of the origin go through the threads that all share."""
    async with tracker(layout, postgresql_server) as at:
        body = {"package": package(blobs[0]), "hosts": ["h1"]}
        with psycopg.connect(postgresql_server) as other:
            other.execute("LOCK TABLE preseeds IN ACCESS EXCLUSIVE MODE")
            orders = [asyncio.create_task(at.ask("POST", "/v1/preseeds", body)) for _ in range(40)]
            await until(lambda: at.app[PRESEEDS]._database._database._thread._work_queue.qsize() >= 39)
            async with asyncio.timeout(10):
                assert await asyncio.to_thread(lambda: "done") == "done"
            assert not any(order.done() for order in orders)
        assert {status for status, _ in await asyncio.gather(*orders)} == {201}


async def test_a_database_that_hangs_keeps_no_tracker_from_its_end(
    postgresql_server: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where the machine of the database is cut off, and the kernel waits for it for minutes."""
    monkeypatch.setattr(module, "STOP_S_MAX", 0.1)
    service = Service(Fleet(started_at=0.0), Content(None))
    preseeds = PreseedService(service, PreseedDatabase(postgresql_server))
    with psycopg.connect(postgresql_server) as other:
        other.execute("LOCK TABLE preseed_hosts IN ACCESS EXCLUSIVE MODE")
        async with asyncio.timeout(10):
            await preseeds.stop()
