"""The agent's HTTP interfaces: what peers and any HTTP client may request over TCP, and the local
API on the Unix socket.

Handlers are thin: decode, ask the agent, encode.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TypeVar

import msgspec
from aiohttp import web
from aiohttp.typedefs import Middleware
from msgspec.structs import replace
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest

from p2pdist.agent.agent import Agent
from p2pdist.agent.api.audit import BODY, AgentAudit
from p2pdist.agent.api.guard import (
    admit,
    caller_of,
    local_identities,
    may_read,
    may_read_digest,
    remote_identities,
    require_agent,
    require_blob,
    require_digest,
    require_named,
    require_reference,
    serving,
)
from p2pdist.agent.api.load import blob_file, model_files
from p2pdist.agent.api.metrics import registry
from p2pdist.agent.api.mirror import (
    image_identities,
    make_mirror,
    mirror_routes,
    with_images,
)
from p2pdist.agent.bodies import gone_again
from p2pdist.agent.pull.blob import BlobPull, demanded
from p2pdist.agent.upkeep.scrub import ScrubStatus
from p2pdist.agent.uplink import RangeFlow
from p2pdist.core.stream_slots import Peer
from p2pdist.gateway.registry.counts import MirrorCounts
from p2pdist.model.digest import Digest, is_digest, parse_digest
from p2pdist.model.errors import (
    UNDECODABLE,
    Conflict,
    Corrupt,
    DiskFull,
    NotFound,
    Refused,
    TooLarge,
    Unavailable,
    UsageError,
)
from p2pdist.model.image import SCHEME
from p2pdist.model.manifest import blob_reference
from p2pdist.model.messages import (
    DEMAND_PIECES_MAX,
    NONCE_PATTERN,
    BlobFile,
    BlobHolding,
    Drained,
    DrainRequest,
    ModelFiles,
    MountRequest,
    Mounts,
    MountStatus,
    Packages,
    PackageStatus,
    PinRequest,
    Pins,
    PinStatus,
    Pruned,
    PruneRequest,
    PullRequest,
    Pulls,
    PullStatus,
    Removed,
    StoreUse,
    StreamRequest,
    Verified,
    VerifyRequest,
    instance_proof,
)
from p2pdist.model.pieces import PieceSet
from p2pdist.model.tree import PATH_BYTES_MAX
from p2pdist.store.blobs.blob import Blob
from p2pdist.store.disk import HANGS_S
from p2pdist.store.store import BlobStore, Usage
from p2pdist.transfer.connections import address_key, in_use
from p2pdist.transfer.documents import large_answers
from p2pdist.transfer.guard import OwnNames, guard, identity_of
from p2pdist.transfer.openapi import Answer, Query, Route, serve
from p2pdist.transfer.problems import name_request, problems
from p2pdist.transfer.stream.frames import stream_length
from p2pdist.transfer.stream.ranges import Unsatisfiable, document_response, parse_range, serve_range
from p2pdist.transfer.stream.server import read_stream_request, serve_stream

BODY_BYTES_MAX = 1 << 20
BODY_S_MAX = 30.0

DEMAND_BYTES_MAX = 4 << 20
"""A longer range at the Unix socket is read by a program that takes what comes."""

WAIT_S_MAX = 60.0
SYSTEM_OWNERS = ("preseed:", "policy:", "slurm-")
"""How names of owners begin that pin for the system; users of the socket may not change their
pins."""

DISK_OK = "ok"
PULSE_LOOK_S = 0.005
BYTES_TYPE = "application/octet-stream"
MESSAGE_PACK_TYPE = "application/vnd.msgpack"
LOOK_S_MAX = 5.0
AGENT: web.AppKey[Agent] = web.AppKey("agent", Agent)
REGISTRY: web.AppKey[CollectorRegistry] = web.AppKey("registry", CollectorRegistry)


class AgentHealth(msgspec.Struct, frozen=True):
    """Answer to GET /healthz. `disk` is "ok", or for how long the store's disk has not answered,
    or that its directory was removed. `proof` answers the nonce of the query
    (messages.instance_proof), empty without one: a tracker learns by it which agent answers at an
    address."""

    status: str
    host: str
    disk: str
    proof: str = ""


class AgentReadiness(msgspec.Struct, frozen=True):
    """Answer to GET /readyz. `status` is "ok", "leaving", or what the agent waits for; `problem`
    is why no tracker answers."""

    status: str
    tracker: str
    problem: str
    disk: str


class TrackerStatus(msgspec.Struct, frozen=True):
    """The tracker of an agent. `clock_ahead_s` is the host's clock less the tracker's, null while
    it is not known."""

    url: str
    connected: bool
    problem: str
    clock_ahead_s: float | None


class StoreStatus(msgspec.Struct, frozen=True):
    """The store of an agent. `usage` is null while its disk does not answer."""

    path: str
    usage: Usage | None
    capacity: int | None
    disk: str


class ArrivingImage(msgspec.Struct, frozen=True):
    """An image of a registry of which blobs are being pulled: how many, what of them is here, and
    their size, in bytes."""

    image: str
    blobs: int
    bytes_done: int
    bytes_total: int


class MirrorStatus(msgspec.Struct, frozen=True):
    """The mirror for clients of registries on this host: its host and port, and how many requests
    it has answered, whatever the answers were. `checks` are the repositories that `p2pdist mirror
    check` had runtimes ask for last."""

    address: str
    requests: int
    checks: list[str]


class AgentStatus(msgspec.Struct, frozen=True):
    """Answer to GET /v1/status. `unreachable` is why other hosts cannot reach the agent, empty when
    they can; `leaving`: it is about to end. `scrub` is the background reading of the store,
    `upstreams` the registries whose images come through this agent, and `images` those that are on
    their way, for clients of the mirror too; `mirror` is null when the agent has no port for
    clients of registries."""

    host: str
    address: str
    tracker: TrackerStatus
    unreachable: str
    store: StoreStatus
    streams: int
    leaving: bool
    pulls: list[PullStatus]
    scrub: ScrubStatus
    upstreams: list[str]
    mirror: MirrorStatus | None
    images: list[ArrivingImage]


Body = TypeVar("Body", bound=msgspec.Struct)
Value = TypeVar("Value")

_lookers = ThreadPoolExecutor(2, thread_name_prefix="status")
"""Threads for the requests of operators, so that threads that wait for a hanging disk do not delay
them."""


def _answer(value: object, status: int = 200) -> web.Response:
    return web.Response(body=msgspec.json.encode(value), status=status, content_type="application/json")


async def _decode(request: web.Request, kind: type[Body]) -> Body:
    try:
        request[BODY] = body = msgspec.json.decode(await request.read(), type=kind)
        return body
    except UNDECODABLE as error:
        raise UsageError(f"malformed request: {error}", remedy="See docs/protocol.md") from error


def _seconds(text: str) -> float:
    """A time to wait, up to WAIT_S_MAX. Raises UsageError."""
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not 0 <= seconds <= WAIT_S_MAX:
        raise UsageError(f"{text[:50]!r} is not a time to wait", remedy=f"Give 0 to {WAIT_S_MAX:.0f} seconds")
    return seconds


async def _opened(blob: Blob) -> int:
    """The file of a held blob. Opening one may wait for the disk, so the loop does it only in
    memory."""
    return blob.fileno() if blob.files.opened or blob.in_memory else await asyncio.to_thread(blob.fileno)


# -- over TCP and on the Unix socket


async def _healthz(request: web.Request) -> web.Response:
    """Say that the process answers, which host it is on, and whether the store's disk answers."""
    agent, nonce = request.app[AGENT], request.query.get("nonce", "")
    if nonce:
        if not re.fullmatch(NONCE_PATTERN, nonce):
            raise UsageError("a nonce is 32 hexadecimal digits")
        proof = instance_proof(agent.session.instance, agent.host, nonce)
        return _answer(AgentHealth("ok", agent.host, "", proof))  # must not wait for a disk
    return _answer(AgentHealth("ok", agent.host, await _disk_words(agent)))


async def _readyz(request: web.Request) -> web.Response:
    """Say whether a tracker and the store's disk answer. An agent without trackers is ready, one
    that is about to end is not."""
    agent = request.app[AGENT]
    session, leaving = agent.session, agent.drain.draining
    tracked, disk = session.connected or not session.urls, await _disk_words(agent)
    ready = tracked and not leaving and disk == DISK_OK
    status = (
        "ok" if ready else "leaving" if leaving else "waiting for a tracker" if not tracked else "waiting for the disk"
    )
    return _answer(AgentReadiness(status, session.url, session.problem, disk), 200 if ready else 503)


async def _disk_hangs_s(agent: Agent) -> float:
    """For how many seconds the store's disk has not answered, 0 where it does. Waits for the disk
    for about HANGS_S."""
    pulse, loop = agent.store.pulse, asyncio.get_running_loop()
    hangs_s, end = pulse.hangs_s(), loop.time() + 2 * HANGS_S
    while not hangs_s and pulse.waiting and loop.time() < end:
        await asyncio.sleep(PULSE_LOOK_S)
        hangs_s = pulse.hangs_s() if pulse.waiting else 0.0
    return hangs_s


async def _disk_words(agent: Agent) -> str:
    """DISK_OK, or what is wrong with the store's disk."""
    if hangs_s := await _disk_hangs_s(agent):
        return f"the store's disk has not answered for {hangs_s:.0f} s"
    if agent.store.pulse.lost:
        return "the store's directory was removed, or something is mounted over it: restart the agent"
    return DISK_OK


async def _looked_up(look: Callable[[], Value]) -> Value | None:
    """What `look` reads from the store, in one of the threads for operators; None where it does not
    end, because the disk hangs."""
    asked = asyncio.get_running_loop().run_in_executor(_lookers, look)
    done, _ = await asyncio.wait([asked], timeout=LOOK_S_MAX)
    return asked.result() if done else None


async def _metrics(request: web.Request) -> web.Response:
    """Serve metrics in the Prometheus text format."""
    body = await _looked_up(lambda: generate_latest(request.app[REGISTRY]))
    if body is None:
        raise Unavailable("the store cannot be looked at: its disk does not answer", remedy="See dmesg")
    return web.Response(body=body, headers={"Content-Type": CONTENT_TYPE_LATEST})


async def _stream(request: web.Request) -> web.StreamResponse:
    """Send the pieces of a stripe to another agent, as they become available."""
    agent = request.app[AGENT]
    require_agent(request)
    try:
        async with asyncio.timeout(BODY_S_MAX):
            stream = await read_stream_request(request)
    except TimeoutError as error:
        raise UsageError(f"the request did not arrive within {BODY_S_MAX:.0f} s") from error
    stream = replace(stream, priority=admit(agent, request, stream.blob, stream.priority))
    blob = agent.store.get(stream.blob)
    if blob is None or not agent.registry.serves(stream.blob):
        raise NotFound(f"this agent neither holds nor fetches {stream.blob}")
    if stream.stripes != blob.layout.stripes:
        raise UsageError(f"{stream.blob} has {blob.layout.stripes} stripes, not {stream.stripes}")
    if len(stream.have) != (blob.layout.count + 7) // 8:
        raise UsageError(f"a bitmap of {len(stream.have)} bytes does not fit {blob.layout.count} pieces")
    have = PieceSet(blob.layout.count, stream.have)
    # A blob of one stripe is small, and others of its kind will follow over the same connection.
    reusable = request.keep_alive and stream.stripes == 1
    length = stream_length(blob.layout, have.missing()) if reusable else None
    wanted = tuple(have.missing(stream.stripe, stream.stripes)) if stream.demand else ()
    if len(wanted) > DEMAND_PIECES_MAX:
        raise UsageError(f"{len(wanted)} pieces are demanded at once, over the limit of {DEMAND_PIECES_MAX}")
    pull = agent.registry.fetching(stream.blob)
    flow = agent.registry.open_flow(stream, have, _address(request), partial(_cut, request))
    try:
        demand = demanded(pull, wanted, prefetch=stream.prefetch)
        with in_use(request), blob.held(), serving(agent, request, flow), demand:
            file = await _opened(blob)
            waits = not blob.have.offers(have, stream.stripe, stream.stripes)
            disk = not blob.in_memory
            return await serve_stream(request, flow, file, blob.layout, length=length, waits=waits, disk=disk)
    finally:
        flow.close()


def _address(request: web.Request) -> str:
    """What counts as the one address of the client."""
    return address_key(request.remote or "")


def _cut(request: web.Request) -> None:
    """Break the connection of a request."""
    if request.transport is not None:
        request.transport.abort()


async def _holding(request: web.Request) -> web.Response:
    """Say how much of a blob is here, and whether this agent may yet turn to `host` for it. Nothing
    is fetched."""
    agent, digest = request.app[AGENT], parse_digest(request.match_info["digest"])
    require_blob(agent, request, digest)
    blob, neighbourhood = agent.store.get(digest), agent.neighbourhood
    if blob is None or not agent.registry.serves(digest):
        raise NotFound(f"this agent neither holds nor fetches {digest}")
    asker = request.query.get("host", "")
    settled = blob.complete or neighbourhood is None or neighbourhood.has_chosen_others(digest, asker)
    return _answer(BlobHolding(len(blob.have), blob.layout.count, settled))


async def _pieces(request: web.Request) -> web.Response:
    """Say which hashes of a blob's pieces are known here, as MessagePack. Other agents ask while no
    tracker tells them, and believe it provisionally. Nothing is fetched."""
    agent, digest = request.app[AGENT], parse_digest(request.match_info["digest"])
    require_blob(agent, request, digest)
    first = request.query.get("first", "0")
    if not (first.isascii() and first.isdecimal()) or len(first) > 10:
        raise UsageError(f"{first[:50]!r} is not the number of a piece")
    known = await agent.vouched_blobs.known(digest, int(first))
    return web.Response(body=msgspec.msgpack.encode(known), content_type=MESSAGE_PACK_TYPE)


async def _blob(request: web.Request) -> web.StreamResponse:
    """Serve a blob or a range of it. Missing pieces are fetched through the swarm where that evicts
    nothing; the bytes take turns with streams."""
    agent, digest = request.app[AGENT], parse_digest(request.match_info["digest"])
    require_blob(agent, request, digest)
    flow = agent.uplink.open_range(peer=Peer(_address(request)), cut=partial(_cut, request))
    try:
        with in_use(request), agent.readers.reading(digest), serving(agent, request, flow):
            return await _send_blob(request, flow)
    finally:
        flow.close()


async def _local_blob(request: web.Request) -> web.StreamResponse:
    """Serve a blob or a range of it, without the limits of the network. Missing pieces are fetched
    through the swarm."""
    require_digest(request.app[AGENT], request, parse_digest(request.match_info["digest"]))
    return await _send_blob(request, None)


def _read_or_look(store: BlobStore, digest: Digest) -> bytes | None:
    """A document; None where it is none, and then the blob was looked at: HTTP clients compare
    nothing."""
    small = store.read_document(digest)
    if small is None:
        store.integrity.look([digest])
    return small


def _require_given(agent: Agent, digest: Digest) -> None:
    """Raises NotFound for what was decrypted here, which other hosts do not get."""
    if digest in agent.store.opened:
        raise NotFound(f"{digest} is not given to other hosts: it was decrypted here")


async def _send_blob(request: web.Request, flow: RangeFlow | None) -> web.StreamResponse:
    agent = request.app[AGENT]
    digest = parse_digest(request.match_info["digest"])
    small = await asyncio.to_thread(_read_or_look, agent.store, digest)
    if flow is not None:
        _require_given(agent, digest)
    if small is not None:
        response = document_response(request, digest, small)
        if flow is not None and request.method == "GET" and (length := response.content_length):
            await flow.wait(length)
            flow.block_sent(length)
        return response
    blob, fetching = agent.store.get(digest), None
    if blob is None or not blob.complete:
        fetching = agent.registry.fetching(digest)
        if request.method == "HEAD":
            layout = fetching.blob.layout if fetching is not None else (await agent.registry.describe(digest)).layout
            return await serve_range(request, digest, -1, layout)
        if fetching is None or fetching.vouched is None:  # else there is nothing to be found out about it
            fetching = await (
                agent.pulls.blob(digest, caller_of(request))
                if flow is None
                else agent.readers.fetch(digest, _address(request))
            )
        blob = fetching.blob if fetching is not None else agent.store.get(digest)
    if blob is None or (fetching is None and not blob.complete):
        raise gone_again(digest)
    if flow is not None:
        _require_given(agent, digest)  # it may have been decrypted meanwhile
    if flow is None and fetching is not None:
        await _demand(request, fetching)
    with contextlib.ExitStack() as stack:
        try:
            stack.enter_context(blob.held())
        except NotFound as error:  # evicted this very moment: clients would take it for nowhere
            raise gone_again(digest) from error
        body = fetching.body() if fetching is not None else None
        file, disk = await _opened(blob), not blob.in_memory
        return await serve_range(
            request,
            digest,
            file,
            blob.layout,
            have=blob.have if body is not None else None,
            wait_for=body.piece if body is not None else None,
            proven=body.proven if body is not None else None,
            flow=flow,
            disk=disk,
        )


async def _demand(request: web.Request, fetching: BlobPull) -> None:
    """Have a short range that a program of this host waits for come before all else."""
    layout = fetching.blob.layout
    try:
        asked = parse_range(request.headers.get("Range", ""), layout.size)
    except Unsatisfiable:
        return  # the answer says so
    if asked is not None and asked[1] - asked[0] <= DEMAND_BYTES_MAX and fetching.vouched is None:
        await fetching.demand(layout.covering(*asked))


# -- on the Unix socket only


async def _blob_file(request: web.Request) -> web.Response:
    """Say where in the store a blob is, once the bytes of a range are there."""
    return _answer(await blob_file(request.app[AGENT], request))


async def _model_files(request: web.Request) -> web.Response:
    """Say which files a model has, and which blobs they are."""
    return _answer(await model_files(request.app[AGENT], request))


async def _pull(request: web.Request) -> web.Response:
    """Pull a package or blob. The answer is 202 at once, or with `wait` 200 when it has arrived."""
    body, agent = await _decode(request, PullRequest), request.app[AGENT]
    if body.package is not None:
        require_reference(agent, request, body.package)
    if body.blob is not None:
        require_digest(agent, request, parse_digest(body.blob))
    pull = agent.pulls.start(body, caller_of(request))
    if not body.wait:
        return _answer(pull.status(), 202)
    assert pull.task is not None
    await asyncio.wait([pull.task])
    if pull.error is not None:
        raise pull.error
    return _answer(pull.status())


def _readable(agent: Agent, request: web.Request, name: str) -> bool:
    """Whether the process that asks may know of a pull of `name`, a reference or a digest."""
    return may_read_digest(agent, request, Digest(name)) if is_digest(name) else may_read(agent, request, name)


def _may_see(agent: Agent, request: web.Request, package: PackageStatus) -> bool:
    """Whether the process that asks may know of a package or single blob of the store."""
    return _readable_use(agent, request, package.reference, package.digest)


async def _pull_status(request: web.Request) -> web.Response:
    """Say how far a pull is: at once, or when it has ended or `wait_s` seconds have passed."""
    agent = request.app[AGENT]
    pull = agent.pulls.get(request.match_info["id"])
    if not _readable(agent, request, pull.reference):
        raise NotFound(f"there is no pull {pull.id}")
    if (wait_s := _seconds(request.query.get("wait_s", "0"))) and pull.task is not None:
        await asyncio.wait((pull.task,), timeout=wait_s)
    return _answer(pull.status())


async def _pull_list(request: web.Request) -> web.Response:
    """List the pulls."""
    agent = request.app[AGENT]
    return _answer(Pulls([pull for pull in agent.pulls.list() if _readable(agent, request, pull.reference)]))


def _check_path(path: str) -> None:
    """Raises UsageError for what the kernel takes for no path."""
    if "\0" in path or len(os.fsencode(path)) > PATH_BYTES_MAX:
        raise UsageError(f"{path[:100]!r} is not a path", remedy=f"Give one of up to {PATH_BYTES_MAX} bytes")


async def _mount(request: web.Request) -> web.Response:
    """Show a package that is in the store, or hand out its images."""
    body, agent = await _decode(request, MountRequest), request.app[AGENT]
    _check_path(body.path)
    require_reference(agent, request, body.package)
    return _answer(_with_tags(agent, [await agent.package_mounts.mount(body, caller_of(request))])[0])


async def _mounts(request: web.Request) -> web.Response:
    """List what is shown."""
    agent = request.app[AGENT]
    views = [view for view in agent.mounts.list() if may_read(agent, request, view.reference)]
    return _answer(Mounts(_with_tags(agent, views)))


def _with_tags(agent: Agent, views: list[MountStatus]) -> list[MountStatus]:
    """Views with the tags that their packages have here."""
    records = agent.store.packages.list()
    tags: dict[str, list[str]] = {}
    for record in records:
        if "@" not in record.reference:
            tags.setdefault(record.manifest_digest, []).append(record.reference)
    return [replace(view, tags=tuple(tags.get(view.digest, ()))) for view in views]


async def _unmount(request: web.Request) -> web.Response:
    """Take down what is shown at a path."""
    path = request.query.get("path", "")
    if not path:
        raise UsageError("say which path to unmount")
    _check_path(path)
    numbers = [request.query.get(name, "") for name in ("device", "inode")]
    if any(numbers) and not all(number.isascii() and number.isdecimal() for number in numbers):
        raise UsageError("device and inode are two numbers, of what the caller sees at the path")
    sees = (int(numbers[0][:20]), int(numbers[1][:20])) if any(numbers) else None
    force = request.query.get("force") == "1"
    return _answer(await request.app[AGENT].mounts.unmount(path, force, caller_of(request), caller_sees=sees))


async def _packages(request: web.Request) -> web.Response:
    """List the packages and single blobs in the store."""
    agent = request.app[AGENT]
    packages = await agent.inventory.packages()
    return _answer(Packages([package for package in packages if _may_see(agent, request, package)]))


async def _usage(request: web.Request) -> web.Response:
    """Say what packages take on the disk, what they share, and what keeps each."""
    agent = request.app[AGENT]
    return _answer(await agent.disk_use.use(partial(_readable_use, agent, request)))


async def _prune(request: web.Request) -> web.Response:
    """Remove the packages and blobs that nothing keeps, or say which."""
    body, agent = await _decode(request, PruneRequest), request.app[AGENT]
    return _answer(await agent.disk_use.prune(body, partial(_readable_use, agent, request)))


def _readable_use(agent: Agent, request: web.Request, reference: str, digest: Digest) -> bool:
    """Whether the process that asks may know of a package or single blob."""
    single = reference == str(blob_reference(digest))
    return may_read_digest(agent, request, digest) if single else may_read(agent, request, reference)


async def _remove(request: web.Request) -> web.Response:
    """Remove a package from the store."""
    agent, reference = request.app[AGENT], request.query.get("reference", "")
    require_named(agent, request, reference)
    return _answer(await agent.maintenance.remove(reference))


def _check_owner(request: web.Request, owner: str) -> None:
    """Only trusted processes change the pins of preseeds, policies and jobs. Raises Refused."""
    if owner.startswith(SYSTEM_OWNERS):
        caller_of(request).require_trusted(f"change what {owner[:100]} keeps")


async def _pin(request: web.Request) -> web.Response:
    """Pull a package and keep it from eviction."""
    body = await _decode(request, PinRequest)
    _check_owner(request, body.owner)
    require_named(request.app[AGENT], request, body.package)
    return _answer(await request.app[AGENT].maintenance.pin(body.package, body.owner, caller_of(request)))


async def _pins(request: web.Request) -> web.Response:
    """List what is kept from eviction, by owner."""
    agent = request.app[AGENT]
    pins = agent.maintenance.pins()
    readable = [pin for pin in pins if all(may_read_digest(agent, request, part) for part in pin.layers)]
    sizes = {package.reference: package.size for package in await agent.inventory.packages()}
    return _answer(Pins([_with_packages(agent, pin, sizes) for pin in readable]))


def _with_packages(agent: Agent, pin: PinStatus, sizes: dict[str, int]) -> PinStatus:
    """A pin with the packages that it keeps, which are here with these sizes."""
    named = {agent.access.names.reference(layer) or str(blob_reference(layer)) for layer in pin.layers}
    return replace(pin, packages=tuple(sorted(named)), size=sum(sizes.get(name, 0) for name in named))


async def _unpin(request: web.Request) -> web.Response:
    """Give up a pin, of a package or of an owner."""
    query, agent = request.query, request.app[AGENT]
    package, owner = query.get("package", ""), query.get("owner", "")
    _check_owner(request, owner)
    if package:
        require_named(agent, request, package)
    for pin in agent.maintenance.pins():
        if pin.owner == owner and not all(may_read_digest(agent, request, part) for part in pin.layers):
            raise NotFound(f"nothing is pinned by {owner[:100]}")
    return _answer(await agent.maintenance.unpin(package, owner))


async def _collect(request: web.Request) -> web.Response:
    """Remove what no package names."""
    agent = request.app[AGENT]
    return _answer(await agent.maintenance.collect(partial(may_read_digest, agent, request)))


async def _verify(request: web.Request) -> web.StreamResponse:
    """Read everything in the store and verify it. The answer is a line of JSON now and then."""
    body = await _decode(request, VerifyRequest)
    request.app[AGENT].verification.require_room(trusted=caller_of(request).trusted)  # before the head is sent
    response = web.StreamResponse(headers={"Content-Type": "application/x-ndjson"})
    await response.prepare(request)
    results = request.app[AGENT].verification.verify(repair=body.repair, bytes_s=body.bytes_s)
    async with contextlib.aclosing(results):
        async for result in results:
            seen = _readable_result(request.app[AGENT], request, result)
            await response.write(msgspec.json.encode(seen) + b"\n")
    return response


def _readable_result(agent: Agent, request: web.Request, result: Verified) -> Verified:
    """The result of a verification without the names of what the process that asks may not read."""
    if identity_of(request).reads_everything:
        return result
    digests = {name: name.rpartition(" ")[2] for name in result.wrong}  # contents belong to no package by name
    views = {view.path: view.reference for view in agent.mounts.list()} if result.shown else {}  # the last one's
    return replace(
        result,
        wrong=tuple(
            n for n, text in digests.items() if is_digest(text) and may_read_digest(agent, request, Digest(text))
        ),
        repaired=tuple(name for name in result.repaired if _readable(agent, request, name)),
        failed=tuple(text for text in result.failed if _readable(agent, request, text.partition(": ")[0])),
        shown=tuple(path for path in result.shown if path in views and may_read(agent, request, views[path])),
    )


async def _drain(request: web.Request) -> web.Response:
    """Hand over to other hosts and end. The answer comes when that is done or the time is up."""
    body, agent = await _decode(request, DrainRequest), request.app[AGENT]
    agent.drain.ask(agent.settings.drain_s if body.seconds is None else body.seconds)
    return _answer(await agent.drain.over())


async def _status(request: web.Request) -> web.Response:
    """Describe the agent, its tracker, its store and its pulls."""
    agent = request.app[AGENT]
    usage, disk = await _looked_up(agent.store.usage), await _disk_words(agent)
    return _answer(
        AgentStatus(
            agent.host,
            agent.session.address,
            TrackerStatus(
                agent.session.url, agent.session.connected, agent.session.problem, agent.session.clock_ahead_s
            ),
            agent.reachability.problem,
            StoreStatus(str(agent.settings.store), usage, agent.store.capacity, disk),
            agent.uplink.streams,
            agent.drain.draining,
            [pull for pull in agent.pulls.list() if _readable(agent, request, pull.reference)],
            agent.scrub.status(),
            sorted(upstream.name for upstream in agent.images.upstreams),
            _mirror_status(agent.mirrored),
            [image for image in _arriving(agent) if _readable(agent, request, image.image)],
        )
    )


def _arriving(agent: Agent) -> list[ArrivingImage]:
    """The images on their way, by name."""
    found: dict[str, tuple[int, int, int]] = {}
    for name, pull in agent.images.arriving.values():
        layout, (blobs, done, total) = pull.blob.layout, found.get(f"{SCHEME}{name}", (0, 0, 0))
        here = min(layout.size, len(pull.blob.have) * layout.piece_size)
        found[f"{SCHEME}{name}"] = blobs + 1, done + here, total + layout.size
    return [ArrivingImage(image, *counts) for image, counts in sorted(found.items())]


def _mirror_status(counts: MirrorCounts) -> MirrorStatus | None:
    return MirrorStatus(counts.address, counts.total, list(counts.checks)) if counts.address else None


_READ_ERRORS = (UsageError, NotFound, Corrupt, Unavailable)
_PULL_ERRORS = (*_READ_ERRORS, Refused, Conflict, DiskFull)
_BLOB = (Answer(media_type=BYTES_TYPE), Answer(status=206, media_type=BYTES_TYPE))

COMMON_ROUTES = (
    Route(
        "GET",
        "/healthz",
        _healthz,
        (Answer(AgentHealth),),
        (Query("nonce", "32 hexadecimal digits for `proof` to answer"),),
        errors=(UsageError,),
        right="open",
    ),
    Route("GET", "/readyz", _readyz, (Answer(AgentReadiness), Answer(AgentReadiness, 503)), right="open"),
    Route("GET", "/metrics", _metrics, (Answer(media_type="text/plain"),), errors=(Unavailable,), right="metrics"),
)

PUBLIC_ROUTES = (
    *COMMON_ROUTES,
    Route(
        "POST",
        "/v1/streams",
        _stream,
        (Answer(media_type=BYTES_TYPE),),
        request=StreamRequest,
        errors=(UsageError, TooLarge, NotFound, Refused, Unavailable),
        right="ticket",
    ),
    Route("GET", "/v1/blobs/{digest}", _blob, _BLOB, errors=_PULL_ERRORS, right="ticket"),
    Route(
        "GET",
        "/v1/blobs/{digest}/holding",
        _holding,
        (Answer(BlobHolding),),
        (Query("host", "the host that asks"),),
        errors=(UsageError, NotFound),
        right="ticket",
    ),
    Route(
        "GET",
        "/v1/blobs/{digest}/pieces",
        _pieces,
        (Answer(media_type=MESSAGE_PACK_TYPE),),
        (Query("first", "the first piece of interest, 0 by default"),),
        errors=(UsageError, NotFound, Refused, Corrupt),
        right="ticket",
    ),
)
"""What peers and any HTTP client may ask over TCP."""

_PIN_QUERY = (Query("package", "the package"), Query("owner", "the owner; one of both"))
_UNMOUNT_QUERY = (
    Query("path", "where it is shown, or the name of images", required=True),
    Query("force", "1: although programs use it"),
    Query("device", "the device that the caller sees at the path"),
    Query("inode", "the inode that the caller sees at the path"),
)

LOCAL_ROUTES = (
    *COMMON_ROUTES,
    Route("GET", "/v1/blobs/{digest}", _local_blob, _BLOB, errors=_PULL_ERRORS, right="local"),
    Route(
        "GET",
        "/v1/blobs/{digest}/file",
        _blob_file,
        (Answer(BlobFile),),
        (
            Query("start", "first byte that is waited for"),
            Query("end", "the byte behind the last one"),
            Query("model", "the model of a hub, hf://..., that has the blob as a file"),
        ),
        errors=_PULL_ERRORS,
        right="local",
    ),
    Route(
        "GET",
        "/v1/models",
        _model_files,
        (Answer(ModelFiles),),
        (Query("reference", "the model", required=True),),
        errors=_PULL_ERRORS,
        right="local",
    ),
    Route(
        "POST",
        "/v1/pulls",
        _pull,
        (Answer(PullStatus), Answer(PullStatus, 202)),
        request=PullRequest,
        errors=_PULL_ERRORS,
        right="local",
    ),
    Route("GET", "/v1/pulls", _pull_list, (Answer(Pulls),), right="local"),
    Route(
        "GET",
        "/v1/pulls/{id}",
        _pull_status,
        (Answer(PullStatus),),
        (Query("wait_s", f"seconds to wait for its end, at most {WAIT_S_MAX:.0f}"),),
        errors=(UsageError, NotFound),
        right="local",
    ),
    Route(
        "POST", "/v1/mounts", _mount, (Answer(MountStatus),), request=MountRequest, errors=_PULL_ERRORS, right="local"
    ),
    Route("GET", "/v1/mounts", _mounts, (Answer(Mounts),), right="local"),
    Route(
        "DELETE",
        "/v1/mounts",
        _unmount,
        (Answer(MountStatus),),
        _UNMOUNT_QUERY,
        errors=(UsageError, NotFound, Refused, Conflict),
        right="local",
    ),
    Route("GET", "/v1/packages", _packages, (Answer(Packages),), right="local"),
    Route(
        "DELETE",
        "/v1/packages",
        _remove,
        (Answer(Removed),),
        (Query("reference", "the package", required=True),),
        errors=(UsageError, NotFound, Conflict),
        right="local",
    ),
    Route("POST", "/v1/pins", _pin, (Answer(PinStatus),), request=PinRequest, errors=_PULL_ERRORS, right="local"),
    Route("GET", "/v1/pins", _pins, (Answer(Pins),), right="local"),
    Route(
        "DELETE",
        "/v1/pins",
        _unpin,
        (Answer(PinStatus),),
        _PIN_QUERY,
        errors=(UsageError, NotFound, Refused),
        right="local",
    ),
    Route("GET", "/v1/usage", _usage, (Answer(StoreUse),), right="local"),
    Route("POST", "/v1/prune", _prune, (Answer(Pruned),), request=PruneRequest, errors=(UsageError,), right="local"),
    Route("POST", "/v1/collect", _collect, (Answer(Removed),), right="local"),
    Route(
        "POST",
        "/v1/verify",
        _verify,
        (Answer(Verified, media_type="application/x-ndjson"),),
        request=VerifyRequest,
        errors=(UsageError, Unavailable),
        right="local",
    ),
    Route(
        "POST",
        "/v1/drain",
        _drain,
        (Answer(Drained),),
        request=DrainRequest,
        errors=(UsageError, Refused),
        right="local-admin",
    ),
    Route("GET", "/v1/status", _status, (Answer(AgentStatus),), right="local"),
)
"""What processes on this host may ask over the Unix socket."""


def _application(
    agent: Agent, metrics: CollectorRegistry, routes: tuple[Route, ...], title: str, *middlewares: Middleware
) -> web.Application:
    app = web.Application(middlewares=[problems, *middlewares], client_max_size=BODY_BYTES_MAX)
    app.on_response_prepare.append(name_request)
    app[AGENT], app[REGISTRY] = agent, metrics
    serve(app, routes, title=title)
    return app


def make_apps(agent: Agent) -> tuple[web.Application, web.Application]:
    """The application for TCP and the one for the Unix socket."""
    metrics, settings = registry(agent), agent.settings
    mirror = make_mirror(agent, loopback=False)
    names = OwnNames((settings.host, settings.address, *settings.hostnames))
    remote = with_images(remote_identities(agent), image_identities(agent, loopback=False))
    audit = AgentAudit(agent)
    local = guard(local_identities(agent), audit.refused)
    return (
        _application(
            agent,
            metrics,
            (*PUBLIC_ROUTES, *mirror_routes(mirror)),
            "p2pdist agent",
            mirror.failures,
            guard(remote, audit.refused, names=names),
            large_answers(by_address=True),
        ),
        _application(
            agent,
            metrics,
            LOCAL_ROUTES,
            "p2pdist agent, on its Unix socket",
            audit.changes(),
            local,
            large_answers(),
        ),
    )


def make_probe(agent: Agent) -> web.Application:
    """The application for probes and metrics, in plain and to whatever reaches it."""
    app = web.Application(middlewares=[problems], client_max_size=BODY_BYTES_MAX)
    app[AGENT], app[REGISTRY] = agent, registry(agent)
    serve(app, COMMON_ROUTES, title="p2pdist agent, for probes")
    return app
