"""Agents on real sockets in one process: job starts before preseeds, preseeds that somebody comes
to wait for, and limits that hold for everything. The tracker's plans are given by hand. A limit of
one byte a second lets the first block through and then nothing."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import aiohttp
import programs
import pytest
from aiohttp import web
from waits import until

from p2pdist.agent.agent import Agent, AgentSettings
from p2pdist.agent.api.server import make_apps
from p2pdist.agent.pull.blob import BlobPull
from p2pdist.agent.pull.origin import REQUESTS_MAX
from p2pdist.agent.pull.pulls import WAITED_FOR_S, Pull, waited_for
from p2pdist.agent.pull.streams import UNREAD_BESIDE_BYTES
from p2pdist.core.download.stripe import Stripe
from p2pdist.core.fair_queue import TokenBucket
from p2pdist.core.sources import ResponseTimes
from p2pdist.model.digest import Digest
from p2pdist.model.messages import Priority, PullRequest
from p2pdist.model.plan import ORIGIN, Plan, Source, StripePlan
from p2pdist.origin.layout import LocalLayout
from p2pdist.package.repository.push import push_blob
from p2pdist.transfer.stream.client import IncomingStream
from p2pdist.transfer.stream.ranges import BLOCK_BYTES

PIECE = 64 << 10
PIECES = 15


class Host:
    """An agent that serves on loopback, over TCP and on a Unix socket."""

    def __init__(self, site: Site, name: str, **limits: float) -> None:
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.port = int(self.listener.getsockname()[1])
        self.source = Source(name, f"127.0.0.1:{self.port}")
        self.unix = site.directory / f"{name}.sock"
        store = site.directory / name
        self.agent = Agent(AgentSettings((), name, self.source.address, store, origin=site.layout.url, **limits))  # type: ignore[arg-type]
        self._runners: list[web.AppRunner] = []

    async def start(self) -> None:
        await self.agent.start()
        public, local = make_apps(self.agent)
        for app in (public, local):
            runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
            self._runners.append(runner)
            await runner.setup()
        await web.SockSite(self._runners[0], self.listener).start()
        await web.UnixSite(self._runners[1], str(self.unix)).start()

    async def stop(self) -> None:
        await self.agent.stop()
        for runner in self._runners:
            await runner.cleanup()

    async def pull(self, digest: Digest, source: Source, priority: Priority = "start") -> tuple[Pull, BlobPull]:
        """Begin to pull a blob, every stripe from `source`."""
        pull = self.agent.pulls.start(PullRequest(blob=digest, priority=priority))
        await until(lambda: pull.blobs)
        fetching = pull.blobs[0]
        stripes = fetching.blob.layout.stripes
        fetching.planned(Plan(digest, tuple(StripePlan(stripe, source) for stripe in range(stripes))))
        return pull, fetching

    async def seed(self, digest: Digest) -> None:
        """Hold a whole blob."""
        pull, _ = await self.pull(digest, ORIGIN)
        await ended(pull)


class Site:
    """An origin, and agents without a tracker."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.layout = LocalLayout(directory / "origin")
        self.layout.scratch()
        self.hosts: list[Host] = []

    async def host(self, name: str, **limits: float) -> Host:
        host = Host(self, name, **limits)
        self.hosts.append(host)
        await host.start()
        return host

    async def publish(self, pieces: int = PIECES) -> Digest:
        file = self.directory / "content"
        file.write_bytes(os.urandom(pieces * PIECE))
        return (await push_blob(file, self.layout)).digest


@pytest.fixture
async def site(tmp_path: Path) -> AsyncIterator[Site]:
    made = Site(tmp_path)
    try:
        yield made
    finally:
        for host in reversed(made.hosts):
            await host.stop()
        await made.layout.close()


async def ended(pull: Pull) -> None:
    assert pull.task is not None
    await asyncio.wait_for(asyncio.shield(pull.task), 60)
    assert pull.error is None, pull.error


async def stays(value: Callable[[], int], expected: int) -> None:
    """It becomes so, and nothing more happens."""
    await until(lambda: value() >= expected)
    await asyncio.sleep(0.15)
    assert value() == expected


def received(fetching: BlobPull) -> int:
    """Pieces that are here."""
    return len(fetching.blob.have)


# -- who comes first


@pytest.mark.parametrize("together", [False, True], ids=["two children", "one child"])
async def test_a_start_overtakes_a_preseed(site: Site, together: bool) -> None:
    """The parent's uplink is the bottleneck. From when the start's stream is there until it is
    complete, the preseed gets next to nothing; then it goes on."""
    preseed_blob, start_blob = await site.publish(), await site.publish()
    parent = await site.host("parent", upload_bytes_s=60 * PIECE)
    for digest in (preseed_blob, start_blob):
        await parent.seed(digest)
    one = await site.host("one")
    other = one if together else await site.host("other")
    preseed, preseeding = await one.pull(preseed_blob, parent.source, "preseed")
    await until(lambda: received(preseeding) >= 2)
    start, starting = await other.pull(start_blob, parent.source)
    await until(lambda: received(starting) >= 1)
    before = received(preseeding)
    await ended(start)
    assert received(preseeding) <= before + 3 < PIECES
    await ended(preseed)


# -- a preseed that somebody waits for


Ask = Callable[[Host, Digest], Awaitable[None]]


async def pull_it(host: Host, digest: Digest) -> None:
    await ended(host.agent.pulls.start(PullRequest(blob=digest)))


async def read_it(host: Host, digest: Digest) -> None:
    async with (
        aiohttp.ClientSession(connector=aiohttp.UnixConnector(str(host.unix))) as client,
        client.get(f"http://agent/v1/blobs/{digest}") as answer,
    ):
        assert len(await answer.read()) == PIECES * PIECE


@pytest.mark.parametrize("limited", ["sender", "receiver"])
@pytest.mark.parametrize("ask", [pull_it, read_it])
async def test_a_preseed_that_somebody_asks_for_is_one_no_longer(site: Site, limited: str, ask: Ask) -> None:
    """Its streams are opened again as those of a start: what held the preseed back, here or at its
    parent, does not hold any more."""
    digest = await site.publish()
    limits = {limited: {"preseed_bytes_s": 1.0}}
    parent = await site.host("parent", **limits.get("sender", {}))
    await parent.seed(digest)
    child = await site.host("child", **limits.get("receiver", {}))
    preseed, fetching = await child.pull(digest, parent.source, "preseed")
    await stays(lambda: received(fetching), 1)
    assert fetching.holding().priority == "preseed"
    await asyncio.wait_for(ask(child, digest), 60)
    assert fetching.holding().priority == "start"
    await ended(preseed)
    assert child.agent.resources.received_bytes["peer"] == PIECES * PIECE, "nothing comes twice"


async def test_another_preseed_changes_nothing(site: Site) -> None:
    digest = await site.publish()
    parent = await site.host("parent", preseed_bytes_s=1.0)
    await parent.seed(digest)
    child = await site.host("child")
    _, fetching = await child.pull(digest, parent.source, "preseed")
    await stays(lambda: received(fetching), 1)
    child.agent.pulls.start(PullRequest(blob=digest, priority="preseed"))
    await stays(lambda: received(fetching), 1)
    assert fetching.priority == "preseed"


async def test_what_a_child_waits_for_its_parent_waits_for_as_well(site: Site) -> None:
    """Else a start that hangs below a preseed would be no faster than that."""
    digest = await site.publish()
    top = await site.host("top", preseed_bytes_s=1.0)
    await top.seed(digest)
    middle, bottom = await site.host("middle"), await site.host("bottom")
    preseed, fetching = await middle.pull(digest, top.source, "preseed")
    await stays(lambda: received(fetching), 1)
    preseed_below, _ = await bottom.pull(digest, middle.source, "preseed")
    await stays(lambda: received(fetching), 1)
    assert fetching.priority == "preseed", "a preseed's child is in no hurry"
    await pull_it(bottom, digest)
    await ended(preseed_below)
    await ended(preseed)


async def test_a_preseed_from_the_origin_that_somebody_waits_for(site: Site) -> None:
    """Its reader is not opened again: the origin would be read twice."""
    digest = await site.publish()
    host = await site.host("host", preseed_bytes_s=1.0)
    preseed, fetching = await host.pull(digest, ORIGIN, "preseed")
    await stays(lambda: received(fetching), REQUESTS_MAX)
    await pull_it(host, digest)
    await ended(preseed)
    assert host.agent.resources.received_bytes["origin"] == PIECES * PIECE


async def test_people_say_what_is_a_preseed(site: Site) -> None:
    digest = await site.publish()
    host = await site.host("host")
    words = ["pull", f"blob:{digest.replace(':', '-')}", "--socket", str(host.unix)]
    for more, priority in (["--priority", "preseed"], "preseed"), ([], "start"):
        process = programs.start(*words, *more)
        await until(lambda: host.agent.registry._fetching or len(host.agent.pulls._pulls) == 2)
        if host.agent.registry._fetching:
            host.agent.registry._fetching[digest].planned(Plan(digest, (StripePlan(0, ORIGIN),)))
        assert await asyncio.to_thread(process.wait, 60) == 0
        *_, last = host.agent.pulls._pulls.values()
        assert last.request.priority == priority


# -- limits hold for everything


async def test_the_download_limit_holds_for_reads_of_the_origin(site: Site) -> None:
    """A piece for each request under way, and no more until these are paid for."""
    digest = await site.publish()
    host = await site.host("host", download_bytes_s=1.0)
    _, fetching = await host.pull(digest, ORIGIN)
    await stays(lambda: received(fetching), REQUESTS_MAX)


async def test_the_limit_of_preseeds_is_not_that_of_starts(site: Site) -> None:
    digest, other = await site.publish(), await site.publish()
    host = await site.host("host", preseed_bytes_s=1.0)
    _, fetching = await host.pull(digest, ORIGIN, "preseed")
    await stays(lambda: received(fetching), REQUESTS_MAX)
    start, _ = await host.pull(other, ORIGIN)
    await ended(start)
    assert received(fetching) == REQUESTS_MAX


@pytest.mark.parametrize("part", [None, "bytes=65536-2621439"], ids=["whole", "range"])
async def test_the_upload_limit_holds_for_readers_over_tcp_and_not_on_the_unix_socket(
    site: Site, part: str | None
) -> None:
    """The first block, and then nothing until it is paid for; on this host there is no network to
    spare."""
    digest = await site.publish(48)
    host = await site.host("host", upload_bytes_s=1.0)
    await host.seed(digest)
    headers = {"Range": part} if part else {}
    async with (
        aiohttp.ClientSession(read_bufsize=8 << 20) as client,
        client.get(f"http://127.0.0.1:{host.port}/v1/blobs/{digest}", headers=headers) as answer,
    ):
        assert len(await asyncio.wait_for(answer.content.readexactly(BLOCK_BYTES), 60)) == BLOCK_BYTES
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(answer.content.readany(), 0.15)
    async with (
        aiohttp.ClientSession(connector=aiohttp.UnixConnector(str(host.unix))) as client,
        client.get(f"http://agent/v1/blobs/{digest}", headers=headers) as answer,
    ):
        assert len(await asyncio.wait_for(answer.read(), 60)) == (2621440 - 65536 if part else 48 * PIECE)


async def test_readers_and_streams_share_one_limit(site: Site) -> None:
    """What one of them sent is paid for before the other goes on."""
    digest = await site.publish(48)
    parent = await site.host("parent", upload_bytes_s=1.0)
    await parent.seed(digest)
    async with (
        aiohttp.ClientSession(read_bufsize=8 << 20) as client,
        client.get(f"http://127.0.0.1:{parent.port}/v1/blobs/{digest}") as answer,
    ):
        await asyncio.wait_for(answer.content.readexactly(BLOCK_BYTES), 60)
        child = await site.host("child")
        _, fetching = await child.pull(digest, parent.source)
        await until(lambda: parent.agent.uplink.streams == 2)
        await stays(lambda: received(fetching), 0)


async def test_a_reader_who_goes_away_leaves_no_turn_behind(site: Site) -> None:
    digest = await site.publish(48)
    host = await site.host("host", upload_bytes_s=1.0)
    await host.seed(digest)
    async with (
        aiohttp.ClientSession() as client,
        client.get(f"http://127.0.0.1:{host.port}/v1/blobs/{digest}") as answer,
    ):
        await asyncio.wait_for(answer.content.readexactly(1), 60)
        assert len(host.agent.uplink._flows) == 1
    await until(lambda: not host.agent.uplink._flows)


# -- pieces for which a reader waits


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hosts leave no source: on a busy machine a test takes longer than they wait before they read
    the origin."""
    monkeypatch.setattr(ResponseTimes, "limit_s", lambda _, *, responded: 300.0)
    monkeypatch.setattr(ResponseTimes, "starved_s", lambda _, piece_size, connected_s=None: 300.0)
    monkeypatch.setattr(Stripe, "stalled", lambda *_, **__: False)


@pytest.mark.usefixtures("patient")
async def test_pieces_that_readers_wait_for_come_first_and_once_along_the_whole_path(site: Site) -> None:
    """Preseeds are stopped. What readers of several hosts wait for comes all the same, each piece
    once over each connection; nothing else does, and no pull becomes a start."""
    pieces, first_hosts = 32, 3
    digest = await site.publish(pieces)
    seed = await site.host("seed", preseed_bytes_s=1.0)
    await seed.seed(digest)
    inner = await site.host("inner", preseed_bytes_s=1.0)
    _, between = await inner.pull(digest, seed.source, "preseed")
    readers = [await site.host(f"reader{number}") for number in range(first_hosts)]
    pulls = [(await reader.pull(digest, inner.source, "preseed"))[1] for reader in readers]
    assert between.blob.layout.stripes > 1
    await until(lambda: inner.agent.uplink.streams == first_hosts * between.blob.layout.stripes)
    before = set(between.blob.have), seed.agent.uplink.sent_bytes_total
    wanted = sorted(set(range(pieces)) - before[0])[-5:]
    await asyncio.wait_for(asyncio.gather(*(pull.demand(wanted) for pull in pulls)), 60)
    await asyncio.sleep(0.2)
    for pull in (between, *pulls):
        stripes = {number: stripe for number, (_, stripe) in pull._streams._sources.items()}
        shared = {stripes[number] for number, stream in pull._streams._open.items() if stream._stream._shared}
        assert shared == {piece % pull.blob.layout.stripes for piece in wanted}, "they may end without these pieces"
    assert set(between.blob.have) == before[0] | set(wanted)
    assert seed.agent.uplink.sent_bytes_total - before[1] == len(wanted) * PIECE
    assert {pull.priority for pull in (between, *pulls)} == {"preseed"}
    assert sum(pull.receipts.twice for pull in (between, *pulls)) == 0


async def test_pieces_that_readers_wait_for_ride_on_the_streams_of_their_stripes(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Over a slow uplink they come long before the rest, and over no other connection: one that is
    new would have to get up to speed first, beside the others."""
    pieces = 96
    digest = await site.publish(pieces)
    seed = await site.host("seed", upload_bytes_s=16.0 * PIECE)
    await seed.seed(digest)
    reader = await site.host("reader")
    _, pull = await reader.pull(digest, seed.source)
    stripes = pull.blob.layout.stripes
    await until(lambda: seed.agent.uplink.streams == stripes and len(pull.blob.have) > stripes)
    came: list[tuple[int, int]] = []
    received = pull._received
    monkeypatch.setattr(
        pull, "_received", lambda number, piece, ok: (came.append((number, piece)), received(number, piece, ok))
    )
    carriers, wanted = set(pull._streams._open), [pieces - 3, pieces - 2, pieces - 1]
    await asyncio.wait_for(pull.demand(wanted), 60)
    assert not pull.blob.complete
    assert {number for number, piece in came if piece in wanted} <= carriers
    assert pull.receipts.twice == 0
    await until(lambda: seed.agent.uplink.streams == stripes)
    assert set(pull._streams._open) == carriers, "the streams that asked for them have ended"


@pytest.mark.usefixtures("patient")
async def test_little_lies_unread_of_a_preseed_for_whose_pieces_readers_wait(site: Site) -> None:
    """Of its stripes, which are read seldom then: readers would request it again. A start, which
    the pull becomes, is limited by nothing."""
    digest = await site.publish(32)
    seed = await site.host("seed", preseed_bytes_s=1.0)
    await seed.seed(digest)
    reader = await site.host("reader")
    started, pull = await reader.pull(digest, seed.source, "preseed")
    stripes, streams = pull.blob.layout.stripes, pull._streams
    await until(lambda: seed.agent.uplink.streams == stripes)
    limit = 2 * (PIECE + UNREAD_BESIDE_BYTES)  # the kernel doubles what it is told (socket(7))
    preseeds, before = set(streams._open), asyncio.get_running_loop().time()
    assert not waited_for(started)
    wanted = [piece for piece in range(24, 32) if piece not in pull.blob.have]
    await until(lambda: max(map(room, map(streams._open.get, preseeds))) > limit)
    await asyncio.wait_for(pull.demand(wanted), 60)
    assert set(streams._open) >= preseeds, "they go on"
    assert pull.waits.demanded_at > before
    assert waited_for(started) or asyncio.get_running_loop().time() - pull.waits.demanded_at > WAITED_FOR_S
    assert max(map(room, map(streams._open.get, preseeds))) <= limit
    pull.escalate()
    await until(lambda: preseeds.isdisjoint(streams._open) and (pull.blob.complete or len(streams._open) == stripes))
    assert not streams._unread._stripes


def room(stream: object) -> int:
    """Bytes that the kernel may hold of what a stream has received."""
    assert isinstance(stream, IncomingStream)
    connection = stream._stream.connection
    assert connection is not None
    return connection.getsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF)


@pytest.mark.usefixtures("patient")
async def test_a_reader_overtakes_what_comes_ahead(site: Site, caplog: pytest.LogCaptureFixture) -> None:
    """What is prefetched waits with its sender. A reader that waits for its last pieces gets them
    before those between, each piece once, and both streams end in order."""
    pieces = 128
    digest = await site.publish(pieces)
    seed = await site.host("seed", preseed_bytes_s=1.0)
    await seed.seed(digest)
    reader = await site.host("reader")
    _, pull = await reader.pull(digest, seed.source, "preseed")
    stripes, uplink = pull.blob.layout.stripes, seed.agent.uplink
    await until(lambda: uplink.streams == stripes)
    uplink.limit(digest, TokenBucket(1.0))
    wanted = range(pieces - 48 * stripes, pieces)
    before, last = set(pull.blob.have), wanted[-stripes:]
    came: list[int] = []
    with caplog.at_level(logging.INFO), pytest.MonkeyPatch.context() as patch:
        stored = pull._stored
        patch.setattr(pull, "_stored", lambda number, piece: (came.append(piece), stored(number, piece)))
        ahead = asyncio.create_task(pull.demand(wanted, prefetch=True))
        await until(lambda: uplink.streams == 2 * stripes)
        waiting = asyncio.create_task(pull.demand(last))
        await until(lambda: uplink.streams == 3 * stripes)
        uplink.limit(digest, None)
        await asyncio.wait_for(asyncio.gather(ahead, waiting), 60)
        await until(lambda: uplink.streams == stripes)
    for piece in last:
        assert came.index(piece) < came.index(piece - stripes), "the one before it in its stripe came ahead"
    assert not before.intersection(wanted) and pull.receipts.twice == 0
    assert "protocol" not in caplog.text
