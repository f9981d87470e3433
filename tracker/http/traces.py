"""Traces for agents and for people: which chunks of a package a start reads, in order.

A trace is asked for by a package's name and an entry point, and is for identities that may read the
package. Hosts and schedulers, which act for hosts, may state one.
"""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from aiohttp import web
from msgspec import Meta

from p2pdist.model.access import Identity, Right
from p2pdist.model.address import is_loopback
from p2pdist.model.errors import Corrupt, NotFound, TooLarge, Unavailable, UsageError
from p2pdist.model.manifest import parse_reference
from p2pdist.model.preseed import decode_request
from p2pdist.model.trace import TRACE_BYTES_MAX, TRACE_TYPE, WANTED_HEADER, check_entry
from p2pdist.transfer.connections import address_key
from p2pdist.transfer.guard import identity_of
from p2pdist.transfer.openapi import Answer, Query, Route
from tracker.core.traces.index import Key
from tracker.http.content import CHUNK, readable_package
from tracker.http.keys import SERVICE

RECORDERS: tuple[Right, ...] = ("agent", "preseed")
"""Rights of the identities that may state a recording: hosts, and schedulers for them."""


class TraceRequest(msgspec.Struct, frozen=True):
    """Body of POST /v1/traces: the encoded trace of one start of a package. `host` is the host that
    recorded it; while access is on the identity says that, else
    the address of the client, but on loopback."""

    reference: str
    entry: str
    trace: Annotated[bytes, Meta(max_length=TRACE_BYTES_MAX)]
    host: str = ""


class TraceStated(msgspec.Struct, frozen=True):
    """Answer to POST /v1/traces: what the recording is of, and how many chunks it names."""

    package: str
    entry: str
    chunks: int


class TraceStatus(msgspec.Struct, frozen=True):
    """The entry point of a package of which there is a trace: how many hosts recorded it, the bytes
    of the recordings, and when the last one was stated, in seconds since the epoch."""

    package: str
    entry: str
    recordings: int
    bytes: int
    stated_at: float


class TraceList(msgspec.Struct, frozen=True):
    """Answer to GET /v1/traces/entries."""

    traces: list[TraceStatus]


def _json(body: Any) -> web.Response:
    return web.Response(body=msgspec.json.encode(body), content_type="application/json", charset="utf-8")


async def _key(request: web.Request, reference: str, entry: str) -> Key:
    """What a trace is of, for an identity that may read the package. Raises NotFound otherwise."""
    named = parse_reference(reference)
    if request.app[SERVICE].access is not None:
        await readable_package(request, named)
    return Key(named.name, check_entry(entry))


def recorder(identity: Identity, given: str, remote: str) -> str:
    """Whose recording it is, of which one is kept. While access is off a request may give any name,
    and an address from elsewhere counts as one host: otherwise one client could push out what all
    others have recorded."""
    if identity.kind != "open":
        return str(identity)
    return given if not remote or is_loopback(remote) else address_key(remote)


async def trace(request: web.Request) -> web.StreamResponse:
    """Serve the trace of an entry point of a package, for all its versions; nothing where none is
    known. The header P2pdist-Trace-Wanted asks a host that starts the package to record that."""
    traces = request.app[SERVICE].traces
    key = await _key(request, request.query.get("reference", ""), request.query.get("entry", ""))
    body = memoryview(await traces.find(key))
    records = any(map(identity_of(request).may, RECORDERS))  # others have no start to record
    wanted = bool(request.query.get("starts")) and records and traces.invite(key)
    response = web.StreamResponse(headers={"Content-Type": TRACE_TYPE} | ({WANTED_HEADER: "1"} if wanted else {}))
    response.content_length = len(body)
    await response.prepare(request)
    for start in range(0, len(body), CHUNK):
        await response.write(body[start : start + CHUNK])
    return response


async def state(request: web.Request) -> web.Response:
    """Keep what a host recorded of a start. Later starts on other hosts prefetch by it."""
    body = decode_request(await request.read(), TraceRequest)
    identity = identity_of(request)
    key = await _key(request, body.reference, body.entry)
    host = recorder(identity, body.host, request.remote or "")
    recorded = await request.app[SERVICE].traces.state(key, host, body.trace)
    return _json(TraceStated(key.name, key.entry, recorded.chunks))


async def entries(request: web.Request) -> web.Response:
    """List the entry points that have traces, of one package or of all that may be read."""
    service, identity = request.app[SERVICE], identity_of(request)
    name = ""
    if "reference" in request.query:
        name = parse_reference(request.query["reference"]).name
        identity.require_read([name], name)
    listed = [
        TraceStatus(kept.key.name, kept.key.entry, kept.recordings, kept.bytes, round(kept.stated_at, 3))
        for kept in await service.traces.summaries()
        if kept.key.name == name or (not name and identity.may_read([kept.key.name]))
    ]
    return _json(TraceList(listed))


_ENTRY = Query("entry", "the entry point: the name of the program; empty for views that no program has")
_ERRORS = (UsageError, NotFound, Corrupt, Unavailable)

ROUTES = (
    Route(
        "GET",
        "/v1/traces",
        trace,
        (Answer(media_type=TRACE_TYPE),),
        (
            Query("reference", "the package, as name:tag or name@digest", required=True),
            _ENTRY,
            Query("starts", "1: a host that starts the package asks, and can record the start"),
        ),
        errors=_ERRORS,
        right="read",
    ),
    Route(
        "POST",
        "/v1/traces",
        state,
        (Answer(TraceStated),),
        request=TraceRequest,
        errors=(*_ERRORS, TooLarge),
        right=RECORDERS[0],
        also=RECORDERS[1:],
    ),
    Route(
        "GET",
        "/v1/traces/entries",
        entries,
        (Answer(TraceList),),
        (Query("reference", "a package; all of them if left out"),),
        errors=(UsageError, NotFound),
        right="read",
    ),
)
