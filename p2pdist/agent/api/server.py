"""The agent's HTTP interfaces: what peers and any HTTP client may ask over TCP, and the local API
on the Unix socket.

Thin handlers: decode, ask the agent, encode.

The agent's metrics, read from its state at scrape time. Labels are bounded: no host or blob
names.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import msgspec
from aiohttp import web
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from p2pdist.agent.agent import Agent
from p2pdist.agent.api.caller import Caller
from p2pdist.agent.uplink import RangeTurn
from p2pdist.model.digest import parse_digest
from p2pdist.model.errors import UNDECODABLE, NotFound, Unavailable, UsageError
from p2pdist.model.messages import BlobHolding, DrainRequest, MountRequest, PinRequest, PullRequest, VerifyRequest
from p2pdist.model.pieces import PieceSet
from p2pdist.store.blobs.blob import Blob
from p2pdist.store.disk import HANGS_S
from p2pdist.transfer.problems import name_request, problems
from p2pdist.transfer.stream.frames import stream_length
from p2pdist.transfer.stream.ranges import serve_range
from p2pdist.transfer.stream.server import read_stream_request, serve_stream

PULL_BUCKETS_S = (0.1, 0.5, 1, 2, 5, 10, 20, 60, 120, 300, 1200)


class AgentCollector(Collector):
    """Snapshots the agent."""

    def __init__(self, agent: Agent) -> None:
        self._agent = agent

    def collect(self) -> Iterator[Metric]:
        agent = self._agent
        received = CounterMetricFamily("p2pdist_agent_received_bytes", "Verified bytes received", labels=["source"])
        for source in ("origin", "peer", "bittorrent"):
            received.add_metric([source], agent.received_bytes[source])
        yield received
        sent = CounterMetricFamily("p2pdist_agent_sent_bytes", "Bytes sent to other agents", labels=["transport"])
        sent.add_metric(["trees"], agent.turns.sent_bytes_total)
        sent.add_metric(["bittorrent"], agent.swarming.sent_bytes if agent.swarming is not None else 0)
        yield sent
        rejected = CounterMetricFamily("p2pdist_agent_pieces_rejected", "Pieces that did not verify", labels=["reason"])
        for reason in ("corrupt",):
            rejected.add_metric([reason], agent.rejected[reason])
        yield rejected
        yield from self._store()
        yield GaugeMetricFamily("p2pdist_agent_streams", "Streams served to other agents", value=agent.turns.streams)
        yield from self._tracker()

    def _tracker(self) -> Iterator[Metric]:
        agent = self._agent
        yield GaugeMetricFamily(
            "p2pdist_agent_tracker_connected", "Whether a tracker answers", value=float(agent.session.connected)
        )
        yield GaugeMetricFamily(
            "p2pdist_agent_unreachable",
            "Whether other hosts cannot reach this one",
            value=float(bool(agent.reached.problem)),
        )
        name, text = (
            "p2pdist_agent_clock_ahead_seconds",
            "This host's clock less the tracker's; 0 where it is not known",
        )
        yield GaugeMetricFamily(name, text, value=agent.session.clock_ahead_s or 0.0)

    def _store(self) -> Iterator[Metric]:
        """The states add up to all that the store counts; what is held is part of them."""
        usage = self._agent.store.usage()
        store = GaugeMetricFamily("p2pdist_agent_store_bytes", "Bytes in the store", labels=["state"])
        store.add_metric(["complete"], usage.bytes_complete)
        store.add_metric(["partial"], usage.bytes_partial)
        store.add_metric(["small"], usage.bytes_small)
        store.add_metric(["objects"], usage.bytes_objects)
        store.add_metric(["expected"], usage.bytes_expected)
        store.add_metric(["images"], usage.bytes_images)
        store.add_metric(["variants"], usage.bytes_variants)
        yield store
        capacity = usage.capacity if usage.capacity is not None else usage.bytes_total + usage.disk_free
        yield GaugeMetricFamily("p2pdist_agent_store_capacity_bytes", "Bytes that the store may hold", value=capacity)
        held = sum(
            blob.size for blob in self._agent.store.blobs() if blob.in_use or self._agent.store.owners(blob.digest)
        )
        name = "p2pdist_agent_store_held_bytes"
        yield GaugeMetricFamily(name, "Bytes of blobs that may not go: pinned, shown or being pulled", value=held)


def registry(agent: Agent) -> CollectorRegistry:
    """A registry with the agent's metrics."""
    made = CollectorRegistry()
    made.register(AgentCollector(agent))
    seconds = Histogram(
        "p2pdist_agent_pull_seconds", "Time of pulls that succeeded", registry=made, buckets=PULL_BUCKETS_S
    )
    agent.pulls.observe_seconds = seconds.observe
    return made


BODY_BYTES_MAX = 1 << 20
BODY_S_MAX = 30.0
WAIT_S_MAX = 60.0
SYSTEM_OWNERS = ("preseed:", "slurm-")
"""How names begin of those that keep packages for others than the users of the socket."""

PULSE_LOOK_S = 0.005
LOOK_S_MAX = 5.0
AGENT: web.AppKey[Agent] = web.AppKey("agent", Agent)
REGISTRY: web.AppKey[CollectorRegistry] = web.AppKey("registry", CollectorRegistry)

Body = TypeVar("Body", bound=msgspec.Struct)
Value = TypeVar("Value")

_lookers = ThreadPoolExecutor(2, thread_name_prefix="status")
"""Threads for what operators ask, which those that wait for a disk that hangs do not take."""


def _answer(value: object, status: int = 200) -> web.Response:
    return web.Response(body=msgspec.json.encode(value), status=status, content_type="application/json")


async def _decode(request: web.Request, kind: type[Body]) -> Body:
    try:
        return msgspec.json.decode(await request.read(), type=kind)
    except UNDECODABLE as error:
        raise UsageError(f"malformed request: {error}", remedy="See docs/protocol.md") from error


def _seconds(text: str) -> float:
    """Raises UsageError unless it says how long to wait: up to WAIT_S_MAX."""
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not 0 <= seconds <= WAIT_S_MAX:
        raise UsageError(f"{text[:50]!r} is not a time to wait", remedy=f"Give 0 to {WAIT_S_MAX:.0f} seconds")
    return seconds


def _caller(request: web.Request) -> Caller:
    """The process that asks over the Unix socket. Raises ConnectionError when it is gone."""
    connection = request.transport.get_extra_info("socket") if request.transport is not None else None
    if connection is None:
        raise ConnectionResetError("the process that asked is gone")
    return Caller.of(connection)


async def _opened(blob: Blob) -> int:
    """The file of a held blob. Opening one may wait for the disk, so the loop does it only in
    memory."""
    return blob.fileno() if blob.opened or blob.in_memory else await asyncio.to_thread(blob.fileno)


# -- for everybody


async def _healthz(request: web.Request) -> web.Response:
    """GET /healthz: the process answers, whose agent it is, and whether the store's disk
    answers."""
    agent = request.app[AGENT]
    return _answer({"status": "ok", "host": agent.host, "disk": _disk_words(await _disk_hangs_s(agent))})


async def _readyz(request: web.Request) -> web.Response:
    """GET /readyz: 200 while a tracker answers and the store's disk does, else 503 and why not; an
    agent without trackers is ready, one that is about to end is not."""
    agent = request.app[AGENT]
    session, leaving = agent.session, agent.departure.leaving
    tracked, hangs_s = session.connected or not session.urls, await _disk_hangs_s(agent)
    ready = tracked and not leaving and not hangs_s
    status = (
        "ok" if ready else "leaving" if leaving else "waiting for a tracker" if not tracked else "waiting for the disk"
    )
    return _answer(
        {"status": status, "tracker": session.url, "problem": session.problem, "disk": _disk_words(hangs_s)},
        200 if ready else 503,
    )


async def _disk_hangs_s(agent: Agent) -> float:
    """For how long the store's disk has not answered, 0 where it does. Waits for it for about
    HANGS_S."""
    pulse, loop = agent.store.pulse, asyncio.get_running_loop()
    hangs_s, end = pulse.hangs_s(), loop.time() + 2 * HANGS_S
    while not hangs_s and pulse.waiting and loop.time() < end:
        await asyncio.sleep(PULSE_LOOK_S)
        hangs_s = pulse.hangs_s() if pulse.waiting else 0.0
    return hangs_s


def _disk_words(hangs_s: float) -> str:
    return f"the store's disk has not answered for {hangs_s:.0f} s" if hangs_s else "ok"


async def _looked_up(look: Callable[[], Value]) -> Value | None:
    """What a look at the store gives, in a thread kept for that; None where it comes to no end,
    because the disk hangs."""
    asked = asyncio.get_running_loop().run_in_executor(_lookers, look)
    done, _ = await asyncio.wait([asked], timeout=LOOK_S_MAX)
    return asked.result() if done else None


async def _metrics(request: web.Request) -> web.Response:
    """GET /metrics in the Prometheus text format."""
    body = await _looked_up(lambda: generate_latest(request.app[REGISTRY]))
    if body is None:
        raise Unavailable("the store cannot be looked at: its disk does not answer", remedy="See dmesg")
    return web.Response(body=body, headers={"Content-Type": CONTENT_TYPE_LATEST})


async def _stream(request: web.Request) -> web.StreamResponse:
    """POST /v1/streams: a stripe for another agent (see StreamRequest)."""
    agent = request.app[AGENT]
    try:
        async with asyncio.timeout(BODY_S_MAX):
            wanted = await read_stream_request(request)
    except TimeoutError as error:
        raise UsageError(f"the request did not arrive within {BODY_S_MAX:.0f} s") from error
    blob = agent.store.get(wanted.blob)
    if blob is None or not agent.serves(wanted.blob):
        raise NotFound(f"this agent neither holds nor fetches {wanted.blob}")
    if wanted.stripes != blob.layout.stripes:
        raise UsageError(f"{wanted.blob} has {blob.layout.stripes} stripes, not {wanted.stripes}")
    if len(wanted.have) != (blob.layout.count + 7) // 8:
        raise UsageError(f"a bitmap of {len(wanted.have)} bytes does not fit {blob.layout.count} pieces")
    have = PieceSet(blob.layout.count, wanted.have)
    # A blob of one stripe is small, and others of its kind will follow over the same connection.
    kept = request.keep_alive and wanted.stripes == 1
    length = stream_length(blob.layout, have.missing()) if kept else None
    turn = agent.open_turn(wanted, have)
    try:
        with blob.held():
            file = await _opened(blob)
            return await serve_stream(request, turn, file, blob.layout, length=length, disk=not blob.in_memory)
    finally:
        turn.close()


async def _holding(request: web.Request) -> web.Response:
    """GET /v1/blobs/{digest}/holding?host=: how much of a blob is here, and whether it may yet turn
    to `host` for it; fetches nothing."""
    agent, digest = request.app[AGENT], parse_digest(request.match_info["digest"])
    blob, neighbourhood = agent.store.get(digest), agent.neighbourhood
    if blob is None or not agent.serves(digest):
        raise NotFound(f"this agent neither holds nor fetches {digest}")
    asker = request.query.get("host", "")
    settled = blob.complete or neighbourhood is None or neighbourhood.settled(digest, asker)
    return _answer(BlobHolding(len(blob.have), blob.layout.count, settled))


async def _blob(request: web.Request) -> web.StreamResponse:
    """GET /v1/blobs/{digest}: the blob or a range of it; what is missing is fetched through the
    swarm. Takes turns with streams."""
    turn = request.app[AGENT].turns.open_range()
    try:
        return await _send_blob(request, turn)
    finally:
        turn.close()


async def _local_blob(request: web.Request) -> web.StreamResponse:
    """The same on the Unix socket, where no limit of the network holds."""
    return await _send_blob(request, None)


async def _send_blob(request: web.Request, turn: RangeTurn | None) -> web.StreamResponse:
    agent = request.app[AGENT]
    digest = parse_digest(request.match_info["digest"])
    small = await asyncio.to_thread(agent.store.read_small, digest)
    if small is not None:
        if small and turn is not None:
            await turn.wait(len(small))
            turn.block_sent(len(small))
        return web.Response(body=small, headers={"ETag": f'"{digest}"'}, content_type="application/octet-stream")
    blob, fetching = agent.store.get(digest), None
    if blob is None or not blob.complete:
        if request.method == "HEAD":
            return await serve_range(request, digest, -1, (await agent.describe(digest)).layout)
        fetching = await agent.pulls.blob(digest)
        blob = fetching.blob if fetching is not None else agent.store.get(digest)
    if blob is None or (fetching is None and not blob.complete):
        raise Unavailable(f"{digest} was here and is gone again", remedy="Ask again")
    with blob.held():
        have, wait_for = (blob.have, fetching.piece) if fetching is not None else (None, None)
        file, disk = await _opened(blob), not blob.in_memory
        return await serve_range(request, digest, file, blob.layout, have=have, wait_for=wait_for, flow=turn, disk=disk)


# -- on the Unix socket only


async def _pull(request: web.Request) -> web.Response:
    """POST /v1/pulls"""
    wanted = await _decode(request, PullRequest)
    pull = request.app[AGENT].pulls.start(wanted, _caller(request))
    if not wanted.wait:
        return _answer(pull.status(), 202)
    assert pull.task is not None
    await asyncio.wait([pull.task])
    if pull.error is not None:
        raise pull.error
    return _answer(pull.status())


async def _pull_status(request: web.Request) -> web.Response:
    """GET /v1/pulls/{id}?wait_s=: how far it is, at once or when it has ended or so many seconds
    have passed"""
    pull = request.app[AGENT].pulls.get(request.match_info["id"])
    if (wait_s := _seconds(request.query.get("wait_s", "0"))) and pull.task is not None:
        await asyncio.wait((pull.task,), timeout=wait_s)
    return _answer(pull.status())


async def _pull_list(request: web.Request) -> web.Response:
    """GET /v1/pulls"""
    return _answer({"pulls": request.app[AGENT].pulls.list()})


async def _mount(request: web.Request) -> web.Response:
    """POST /v1/mounts"""
    return _answer(await request.app[AGENT].showing.mount(await _decode(request, MountRequest), _caller(request)))


async def _mounts(request: web.Request) -> web.Response:
    """GET /v1/mounts"""
    return _answer({"mounts": request.app[AGENT].mounts.list()})


async def _unmount(request: web.Request) -> web.Response:
    """DELETE /v1/mounts?path=...&force=1&device=...&inode=..."""
    path = request.query.get("path", "")
    if not path:
        raise UsageError("say which path to unmount")
    numbers = [request.query.get(name, "") for name in ("device", "inode")]
    if any(numbers) and not all(number.isascii() and number.isdecimal() for number in numbers):
        raise UsageError("device and inode are two numbers, of what the caller sees at the path")
    sees = (int(numbers[0][:20]), int(numbers[1][:20])) if any(numbers) else None
    force = request.query.get("force") == "1"
    return _answer(await request.app[AGENT].mounts.unshow(path, force, _caller(request), caller_sees=sees))


async def _packages(request: web.Request) -> web.Response:
    """GET /v1/packages"""
    return _answer({"packages": await request.app[AGENT].housekeeping.packages()})


async def _remove(request: web.Request) -> web.Response:
    """DELETE /v1/packages?reference=..."""
    return _answer(await request.app[AGENT].housekeeping.remove(request.query.get("reference", "")))


def _check_owner(request: web.Request, owner: str) -> None:
    """Pins of preseeds and jobs are those of the trackers' operators and of the scheduler."""
    if owner.startswith(SYSTEM_OWNERS):
        _caller(request).require_trusted(f"change what {owner[:100]} keeps")


async def _pin(request: web.Request) -> web.Response:
    """POST /v1/pins"""
    wanted = await _decode(request, PinRequest)
    _check_owner(request, wanted.owner)
    return _answer(await request.app[AGENT].housekeeping.pin(wanted.package, wanted.owner))


async def _pins(request: web.Request) -> web.Response:
    """GET /v1/pins"""
    return _answer({"pins": request.app[AGENT].housekeeping.pins()})


async def _unpin(request: web.Request) -> web.Response:
    """DELETE /v1/pins?package=... or ?owner=..."""
    query = request.query
    _check_owner(request, query.get("owner", ""))
    return _answer(await request.app[AGENT].housekeeping.unpin(query.get("package", ""), query.get("owner", "")))


async def _collect(request: web.Request) -> web.Response:
    """POST /v1/collect"""
    return _answer(await request.app[AGENT].housekeeping.collect())


async def _verify(request: web.Request) -> web.StreamResponse:
    """POST /v1/verify"""
    wanted = await _decode(request, VerifyRequest)
    response = web.StreamResponse(headers={"Content-Type": "application/x-ndjson"})
    await response.prepare(request)
    found = request.app[AGENT].housekeeping.verify(repair=wanted.repair, bytes_s=wanted.bytes_s)
    async with contextlib.aclosing(found):
        async for each in found:
            await response.write(msgspec.json.encode(each) + b"\n")
    return response


async def _drain(request: web.Request) -> web.Response:
    """POST /v1/drain: answers when everything is handed over or the time is up; the agent ends
    then."""
    wanted, agent = await _decode(request, DrainRequest), request.app[AGENT]
    _caller(request).require_trusted("drain this agent")
    agent.departure.ask(agent.settings.drain_s if wanted.seconds is None else wanted.seconds)
    return _answer(await agent.departure.over())


async def _status(request: web.Request) -> web.Response:
    """GET /v1/status"""
    agent = request.app[AGENT]
    usage, hangs_s = await _looked_up(agent.store.usage), await _disk_hangs_s(agent)
    return _answer(
        {
            "host": agent.host,
            "address": agent.session.address,
            "tracker": {
                "url": agent.session.url,
                "connected": agent.session.connected,
                "problem": agent.session.problem,
                "clock_ahead_s": agent.session.clock_ahead_s,
            },
            "unreachable": agent.reached.problem,
            "store": {
                "path": str(agent.settings.store),
                "usage": usage,
                "capacity": agent.store.capacity,
                "disk": _disk_words(hangs_s),
            },
            "streams": agent.turns.streams,
            "leaving": agent.departure.leaving,
            "pulls": agent.pulls.list(),
        }
    )


def _common(agent: Agent, metrics: CollectorRegistry) -> web.Application:
    app = web.Application(middlewares=[problems], client_max_size=BODY_BYTES_MAX)
    app.on_response_prepare.append(name_request)
    app[AGENT], app[REGISTRY] = agent, metrics
    app.add_routes(
        [
            web.get("/healthz", _healthz),
            web.get("/readyz", _readyz),
            web.get("/metrics", _metrics),
        ]
    )
    return app


def make_apps(agent: Agent) -> tuple[web.Application, web.Application]:
    """The application for TCP and the one for the Unix socket."""
    metrics = registry(agent)
    public, local = _common(agent, metrics), _common(agent, metrics)
    public.add_routes(
        [
            web.post("/v1/streams", _stream),
            web.get("/v1/blobs/{digest}", _blob),
            web.get("/v1/blobs/{digest}/holding", _holding),
        ]
    )
    local.add_routes(
        [
            web.get("/v1/blobs/{digest}", _local_blob),
            web.post("/v1/pulls", _pull),
            web.get("/v1/pulls", _pull_list),
            web.get("/v1/pulls/{id}", _pull_status),
            web.post("/v1/mounts", _mount),
            web.get("/v1/mounts", _mounts),
            web.delete("/v1/mounts", _unmount),
            web.get("/v1/packages", _packages),
            web.delete("/v1/packages", _remove),
            web.post("/v1/pins", _pin),
            web.get("/v1/pins", _pins),
            web.delete("/v1/pins", _unpin),
            web.post("/v1/collect", _collect),
            web.post("/v1/verify", _verify),
            web.post("/v1/drain", _drain),
            web.get("/v1/status", _status),
        ]
    )
    return public, local
