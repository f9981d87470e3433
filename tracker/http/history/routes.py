"""The history of the fleet over HTTP: a page of it, and what is reported from now on as server-sent
events (HTML standard, 9.2).

A record about a package is for identities that may read the package, one about a blob of no known
package for those that may read everything. Hosts are seen by all that may watch the fleet. What is
said of settings may name packages, and is for those that may read everything.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from functools import partial

import msgspec
from aiohttp import web

from p2pdist.model.access import Identity
from p2pdist.model.digest import Digest, is_digest
from p2pdist.model.errors import Unavailable, UsageError
from p2pdist.model.history import (
    HOST_KINDS,
    KINDS,
    PACKAGE_CHARACTERS_MAX,
    RECORDS_PER_PAGE_MAX,
    HistoryFilter,
    HistoryPage,
    HistoryRecord,
    digest_prefix,
    parse_kinds,
    parse_since,
)
from p2pdist.model.image import SCHEME
from p2pdist.model.manifest import parse_reference
from p2pdist.transfer.connections import in_use
from p2pdist.transfer.guard import identity_of
from p2pdist.transfer.openapi import JSON_TYPE, Answer, Query, Route
from tracker.core.policy.book import PolicyBook
from tracker.http.access import still_allowed
from tracker.http.keys import SERVICE
from tracker.state.history import name_of

WRITE_S_MAX = 20.0
"""A follower that takes nothing for so long is given up."""

SILENCE_S = 10.0
"""So often a follower hears that the tracker is there."""


def sees(identity: Identity, book: PolicyBook, record: HistoryRecord) -> bool:
    """Whether an identity that may watch the fleet may see a record."""
    if identity.reads_everything or record.event.kind in HOST_KINDS:
        return True
    names = [name_of(record.event.package)] if record.event.package else []
    if not names and is_digest(record.event.digest):
        names = list(book.readers_of(Digest(record.event.digest)))
    return bool(names) and identity.may_read(names)


async def page(request: web.Request) -> web.Response:
    """List what has happened, the newest first."""
    service, identity = request.app[SERVICE], identity_of(request)
    book = service.fleet.policies
    seen = None if identity.reads_everything else partial(sees, identity, book)
    found = await service.history.page(await _filter(request), seen, remote=request.remote or "")
    return web.Response(body=msgspec.json.encode(found), content_type=JSON_TYPE)


async def follow(request: web.Request) -> web.StreamResponse:
    """Report what happens from now on, as server-sent events named `record`. The stream begins and
    goes on with comments, so that a reader knows that it is connected."""
    service, identity = request.app[SERVICE], identity_of(request)
    book, wanted = service.fleet.policies, await _filter(request)
    records = service.history.follow(request.remote or "")
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-store"})
    try:
        await anext(records)  # raises what is wrong before the head goes out
        await response.prepare(request)
        with in_use(request):
            await response.write(b": following\n\n")
            wrote_at = time.monotonic()
            async with aclosing(_or_silence(records)) as followed:  # which may wait for a record
                async for record in followed:
                    if not await still_allowed(request):
                        break
                    if record is not None and _matches(wanted, record) and sees(identity, book, record):
                        news = b"event: record\ndata: %b\n\n" % msgspec.json.encode(record)
                    elif record is None or time.monotonic() - wrote_at >= SILENCE_S:  # only records of others came
                        news = b": silence\n\n"
                    else:
                        continue
                    wrote_at = time.monotonic()
                    async with asyncio.timeout(WRITE_S_MAX):
                        await response.write(news)
        return response
    except (TimeoutError, ConnectionError):
        return response
    finally:
        await records.aclose()


async def end_following(app: web.Application) -> None:
    """Let followers go: the tracker stops."""
    app[SERVICE].history.end()


async def _or_silence(records: AsyncIterator[HistoryRecord | None]) -> AsyncGenerator[HistoryRecord | None]:
    """Records as they come, and None when none came for SILENCE_S."""
    coming: asyncio.Task[HistoryRecord | None] | None = None
    try:
        while True:
            coming = coming or asyncio.ensure_future(anext(records))
            done, _ = await asyncio.wait([coming], timeout=SILENCE_S)
            if not done:
                yield None
                continue
            ended, coming = coming, None
            try:
                yield ended.result()
            except StopAsyncIteration:
                return
    finally:
        if coming is not None:
            coming.cancel()
            await asyncio.wait([coming])


async def _filter(request: web.Request) -> HistoryFilter:
    """What a request asks for. Raises UsageError."""
    query = request.query
    package, host = query.get("package", "").removeprefix(SCHEME), query.get("host", "")
    if max(len(package), len(host)) > PACKAGE_CHARACTERS_MAX:
        raise UsageError(f"the name {max(package, host, key=len)[:40]}... is too long")
    return HistoryFilter(
        parse_kinds(query.get("kind", "")),
        package,
        host,
        parse_since(query["since"], now=time.time()) if query.get("since") else 0.0,
        _number(request, "before", 0, 1 << 62),
        _number(request, "limit", 100, RECORDS_PER_PAGE_MAX) or 1,
        await _meaning(request, package),
    )


async def _meaning(request: web.Request, package: str) -> str:
    """The digest that a tag names, or named last; "" for what is no tag, and where that is not
    known."""
    if ":" not in package.rpartition("/")[2] or "@" in package or digest_prefix(package):
        return ""
    try:
        reference = parse_reference(package)
    except UsageError:  # an image, whose records have its tag
        return ""
    if not identity_of(request).may_read([reference.name]):
        return ""
    return await request.app[SERVICE].content.last_meaning(reference) or ""


def _number(request: web.Request, name: str, otherwise: int, most: int) -> int:
    text = request.query.get(name, "")
    if not text:
        return otherwise
    if not (text.isascii() and text.isdigit() and len(text) < 20 and int(text) <= most):
        raise UsageError(f"{name} is {text[:40]!r}", remedy=f"Write a number up to {most}")
    return int(text)


def _matches(wanted: HistoryFilter, record: HistoryRecord) -> bool:
    event = record.event
    prefix = digest_prefix(wanted.package)
    return (
        (not wanted.kinds or event.kind in wanted.kinds)
        and wanted.host in ("", event.host)
        and record.at >= wanted.since
        and (
            wanted.package in ("", event.package, name_of(event.package))
            or bool(wanted.meaning and event.digest == wanted.meaning)
            or bool(prefix and event.digest.startswith(prefix))
        )
    )


_QUERY = (
    Query("kind", f"kinds with commas, of {', '.join(KINDS)}; all if left out"),
    Query("package", "a reference, a name without a tag, or a digest or its beginning"),
    Query("host", "the name of a host"),
    Query("since", "a time ago such as 2h, or seconds since the epoch"),
)

ROUTES = (
    Route(
        "GET",
        "/v1/history",
        page,
        (Answer(HistoryPage),),
        (
            *_QUERY,
            Query("limit", f"records, up to {RECORDS_PER_PAGE_MAX}; 100 if left out"),
            Query("before", "`next` of the page before this one"),
        ),
        errors=(UsageError, Unavailable),
        right="watch",
    ),
    Route(
        "GET",
        "/v1/history/events",
        follow,
        (Answer(HistoryRecord, media_type="text/event-stream"),),
        _QUERY,
        errors=(UsageError, Unavailable),
        right="watch",
    ),
)
