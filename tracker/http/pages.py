"""The page of swarm health at `/`, and the events that it lives on (`/v1/events`, server-sent
events of the HTML standard, 9.2).

One task updates the view of the fleet, every second while there are watchers. Each watcher gets
what changed since its last report; a slow reader gets reports less often and misses nothing.
Watchers that ask for the same thing get the same bytes, which are made once.

Where several trackers share the blobs, watchers see the hosts and swarms of all of them, and hear
which trackers say nothing (tracker/cluster/sibling_views.py). What a tracker itself knows it tells
the others at VIEW_PATH.

The page is one document, a few modules of script and one style sheet, all of them from here; its
policy lets the browser load nothing else (Content Security Policy Level 3).
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import msgspec
from aiohttp import ETag, web

from p2pdist.model.digest import Digest, digest_of, parse_digest
from p2pdist.model.errors import NotFound, Refused, Unavailable, UsageError
from p2pdist.transfer.connections import in_use
from p2pdist.transfer.guard import identity_of
from p2pdist.transfer.openapi import Answer, Query, Route
from tracker.cluster.sibling_views import SiblingViews
from tracker.cluster.siblings import LOCAL, VIEW_PATH, Siblings
from tracker.core.views.fleet_view import Change, View
from tracker.core.views.joined_view import JoinedView, RelayedTree
from tracker.core.views.tree_view import TreeView
from tracker.http.access import still_allowed
from tracker.http.keys import SERVICE, SIBLINGS
from tracker.http.trackers import LOCAL_QUERY, require_tracker
from tracker.preseed_service import PreseedService
from tracker.service import Service

WATCHED_S = 1.0
UNWATCHED_S = 5.0
"""How often the view is updated; without watchers for the sake of metrics alone."""

WATCHERS_MAX = 64
WATCHERS_PER_ADDRESS_MAX = 32
"""One address leaves places for others."""

TREES_MAX = 16
"""Stripes whose trees are being watched at once."""

STRIPES_MAX = 16
"""Stripes of a blob that another tracker owns."""

WRITE_S_MAX = 20.0
"""A watcher that takes nothing for so long is given up."""

PRESEEDS_SHOWN = 20
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src data:; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
_STATIC = Path(__file__).parent / "static"
_FILES = {"/": "health.html"} | {
    f"/static/{name}": name
    for name in (
        "health.css",
        "vendor/uPlot.min.css",
        "vendor/uPlot.iife.min.js",
        "main.js",
        "api.js",
        "canvas.js",
        "credential.js",
        "day.js",
        "feed.js",
        "host_map.js",
        "host_view.js",
        "orders.js",
        "packages.js",
        "plot.js",
        "preseeds.js",
        "tables.js",
        "tree.js",
        "verdict.js",
        "words.js",
    )
}
_TYPES = {".html": "text/html", ".js": "text/javascript", ".css": "text/css"}
logger = logging.getLogger(__name__)

Tree = tuple[Digest, int]
"""A blob and one of its stripes."""

MayRead = Callable[[Digest], bool]


@dataclass(slots=True)
class _Watched:
    """A tree that is watched, and what follows it where another tracker owns the blob."""

    view: TreeView | RelayedTree
    watchers: int = 0
    following: asyncio.Task[None] | None = None


class _Key(NamedTuple):
    """What a watcher asks for: only what this tracker itself knows (`own`), or what all know, and
    the tree of a stripe of a blob."""

    own: bool
    tree: Tree | None


class Watch:
    """The watchers of the fleet, and what they see. All methods are called on the event loop."""

    def __init__(
        self, service: Service, preseeds: PreseedService | None = None, siblings: Siblings | None = None
    ) -> None:
        self.view = View(service.fleet)
        self._joined = JoinedView(self.view) if siblings is not None else None
        self._others = SiblingViews(siblings, self._joined) if siblings is not None and self._joined else None
        self._siblings = siblings
        self._following: asyncio.Task[None] | None = None
        """Follows the other trackers while the whole fleet is watched."""
        self._ended_following: asyncio.Task[None] | None = None
        """The one before it, which may still be ending."""
        self.preseeds = b""
        self._swarms, self._preseeds = service.fleet.swarms, preseeds
        self._watchers = self._of_all = 0
        """How many watch, and how many of them the whole fleet of several trackers."""
        self._by_address: Counter[str] = Counter()
        self._trees: dict[_Key, _Watched] = {}
        self._encoded: dict[tuple[int, _Key], bytes] = {}
        self._requested = asyncio.Event()
        self._updated: asyncio.Future[None] | None = None
        self._ended = False

    async def run(self) -> None:
        """Update the view until cancelled."""
        while True:
            try:
                self._update()
            except Exception:
                logger.exception("the view of the fleet could not be updated")
            try:
                async with asyncio.timeout(WATCHED_S if self._watchers else UNWATCHED_S):
                    await self._requested.wait()
            except TimeoutError:
                continue
            self._requested.clear()

    def _update(self) -> None:
        if self._joined is not None and self._of_all:
            self._joined.update(now=time.monotonic())  # and with it this tracker's own view
        else:
            self.view.update(now=time.monotonic())
        for key, watched in self._trees.items():
            version = self._seen(key).version
            match watched.view:
                case RelayedTree() as told:
                    told.update(version)
                case TreeView() as tree if key.tree is not None:
                    tree.update(self._swarms.get(key.tree[0]), version)
        if self._preseeds is not None and self._watchers:
            self.preseeds = msgspec.json.encode(self._preseeds.summaries()[-PRESEEDS_SHOWN:])
        self._encoded.clear()
        self._notify()

    def _notify(self) -> None:
        if self._updated is not None:
            self._updated.set_result(None)
            self._updated = None

    def _seen(self, key: _Key) -> View | JoinedView:
        """The view that a watcher sees."""
        return self.view if key.own or self._joined is None else self._joined

    def end(self) -> None:
        """The tracker stops: let all watchers go."""
        self._ended = True
        if self._following is not None:
            self._following.cancel()
        self._notify()

    async def changes(
        self, tree: Tree | None, remote: str = "", may_read: MayRead | None = None, *, own: bool = False
    ) -> AsyncGenerator[bytes, None]:
        """Everything, then what changes, as JSON documents, for a watcher at the address `remote`,
        of the blobs that it may read, None for all. `own`: only what this tracker itself knows.
        Raises Unavailable over WATCHERS_MAX watchers, WATCHERS_PER_ADDRESS_MAX of them at one
        address, or TREES_MAX trees."""
        key = _Key(own or self._joined is None, tree)
        if self._watchers >= WATCHERS_MAX:
            raise Unavailable(f"{WATCHERS_MAX} watch this fleet already", remedy="Close some of the pages")
        if self._by_address[remote] >= WATCHERS_PER_ADDRESS_MAX:
            raise Unavailable(
                f"{remote} watches this fleet {self._by_address[remote]} times already",
                remedy="Close some of the pages",
            )
        if tree is not None:
            self._begin(key, tree)
        self._watchers += 1
        self._of_all += not key.own
        if self._others is not None and not key.own and self._following is None:
            self._following = asyncio.create_task(_after(self._ended_following, self._others.run))
        self._by_address[remote] += 1
        self._requested.set()
        version, view = 0, self._seen(key)
        try:
            while not self._ended:
                if view.version == version or self._requested.is_set():
                    if self._updated is None:
                        self._updated = asyncio.get_running_loop().create_future()
                    await asyncio.shield(self._updated)
                    continue
                document, version = self._document(version, key, may_read), view.version
                yield document
        finally:
            self._watchers -= 1
            self._of_all -= not key.own
            if not self._of_all and self._following is not None:
                self._following.cancel()
                self._ended_following, self._following = self._following, None
            self._by_address[remote] -= 1
            self._by_address += Counter()  # forgets what is zero
            if tree is not None:
                self._end(key)

    def _begin(self, key: _Key, tree: Tree) -> None:
        if key not in self._trees:
            if len(self._trees) >= TREES_MAX:
                raise Unavailable(f"{TREES_MAX} trees are watched already", remedy="Close some of the pages")
            blob, stripe = tree
            owner = self._siblings.owner(blob) if self._siblings is not None and not key.own else None
            if owner is not None and self._joined is not None and self._others is not None:
                told = RelayedTree(self._joined, owner.id)
                following = asyncio.create_task(self._others.follow_tree(blob, stripe, told))
                self._trees[key] = _Watched(told, following=following)
            else:
                self._trees[key] = _Watched(self._seen(key).tree(stripe))
        self._trees[key].watchers += 1

    def _end(self, key: _Key) -> None:
        watched = self._trees[key]
        watched.watchers -= 1
        if not watched.watchers:
            del self._trees[key]
            if watched.following is not None:
                watched.following.cancel()

    def _document(self, version: int, key: _Key, may_read: MayRead | None) -> bytes:
        """What changed after `version`, encoded once for all watchers that may read everything."""
        found = self._encoded.get((version, key)) if may_read is None else None
        if found is None:
            watched = self._trees[key].view if key.tree is not None else None
            change = self._seen(key).since(version, now=time.monotonic(), tree=watched)
            if may_read is not None:
                return msgspec.json.encode(_readable(change, may_read))
            found = self._encoded[version, key] = msgspec.json.encode(change)
        return found


async def _after(former: asyncio.Task[None] | None, work: Callable[[], Awaitable[None]]) -> None:
    """Do some work once a task that was cancelled has ended."""
    if former is not None:
        await asyncio.wait([former])
    await work()


def _readable(change: Change, may_read: MayRead) -> Change:
    """A change without the blobs that a watcher may not read, and what happened to them."""
    return replace(
        change,
        swarms=[row for row in change.swarms if may_read(row.digest)],
        story=[line for line in change.story if not line.swarm or may_read(Digest(line.swarm))],
    )


WATCH: web.AppKey[Watch] = web.AppKey("watch", Watch)


async def events(request: web.Request) -> web.StreamResponse:
    """Report the fleet as server-sent events. They are of the hosts and swarms of all trackers, or
    with `local=1` of this one. Events named `change` carry everything at first, then what changed,
    and name the trackers that say nothing; events named `preseeds` list preseeds."""
    watch, identity = request.app[WATCH], identity_of(request)
    book = request.app[SERVICE].fleet.policies

    def may_read(blob: Digest) -> bool:
        return identity.may_read(book.readers_of(blob))

    tree, names = _tree_of(request), identity.reads_everything
    if tree is not None and not (names or may_read(tree[0])):
        raise NotFound(f"no agent holds or wants {tree[0]}")
    own = request.query.get(LOCAL) == "1"
    return await _report(
        request, watch.changes(tree, request.remote or "", None if names else may_read, own=own), names
    )


async def own_view(request: web.Request) -> web.StreamResponse:
    """Report this tracker's own hosts and swarms to another tracker, as `/v1/events` does."""
    require_tracker(request)
    watch = request.app[WATCH]
    return await _report(request, watch.changes(_tree_of(request), request.remote or "", own=True), False, _of_tracker)


async def _of_tracker(request: web.Request) -> bool:
    """Whether another tracker of the fleet still asks: its authority may be trusted no more."""
    try:
        require_tracker(request)
    except Refused:
        return False
    return True


async def _report(
    request: web.Request,
    changes: AsyncGenerator[bytes, None],
    preseeds: bool,
    allowed: Callable[[web.Request], Awaitable[bool]] = still_allowed,
) -> web.StreamResponse:
    """Send documents as events until there are no more, or the request is `allowed` no longer, with
    `preseeds` the preseeds besides."""
    watch = request.app[WATCH]
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-store"})
    try:
        document = await anext(changes)  # raises what is wrong before the head goes out
        await response.prepare(request)
        shown = b""
        with in_use(request):
            while await allowed(request):
                # Preseeds name packages.
                news = (
                    b"event: preseeds\ndata: %b\n\n" % watch.preseeds if preseeds and watch.preseeds != shown else b""
                )
                shown = watch.preseeds
                async with asyncio.timeout(WRITE_S_MAX):
                    await response.write(b"event: change\ndata: %b\n\n" % document + news)
                document = await anext(changes)
        return response
    except (StopAsyncIteration, TimeoutError, ConnectionError):
        return response
    finally:
        await changes.aclose()


def _tree_of(request: web.Request) -> Tree | None:
    digest, stripe = request.query.get("swarm"), request.query.get("stripe", "0")
    if not digest:
        return None
    swarms, siblings = request.app[SERVICE].fleet.swarms, request.app.get(SIBLINGS)
    blob = Digest(digest) if digest in swarms else parse_digest(digest)  # a key that is no digest: see Swarm
    swarm = swarms.get(blob)
    stripes = swarm.stripes if swarm is not None else 1
    if swarm is None and siblings is not None and siblings.owner(blob) is not None:
        stripes = STRIPES_MAX  # its owner knows
    if not (stripe.isascii() and stripe.isdigit() and len(stripe) < 4 and int(stripe) < stripes):
        raise UsageError(f"{blob} has stripes 0 to {stripes - 1}")
    return blob, int(stripe)


async def file(request: web.Request) -> web.Response:
    """Serve a file of the health page."""
    path = _STATIC / _FILES[request.path]
    data = path.read_bytes()
    etag = digest_of(data)
    headers = {
        "Content-Security-Policy": POLICY,
        "X-Content-Type-Options": "nosniff",
        "Referrer-Policy": "no-referrer",
        "Cache-Control": "no-cache",
    }
    if ETag(etag) in (request.if_none_match or ()):
        return web.Response(status=304, headers=headers)
    response = web.Response(body=data, content_type=_TYPES[path.suffix], charset="utf-8", headers=headers)
    response.etag = etag
    return response


def add_watch(
    app: web.Application, service: Service, preseeds: PreseedService | None = None, siblings: Siblings | None = None
) -> Watch:
    """Let an application update the view of its fleet while it runs; for ROUTES."""
    watch = app[WATCH] = Watch(service, preseeds, siblings)

    async def updating(_: web.Application) -> AsyncIterator[None]:
        task = asyncio.create_task(watch.run(), name="view")
        yield
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    async def end(_: web.Application) -> None:
        watch.end()

    app.cleanup_ctx.append(updating)
    app.on_shutdown.append(end)
    return watch


_TREE_QUERY = (Query("swarm", "the blob whose tree is watched"), Query("stripe", "its stripe, 0 if left out"))

ROUTES = (
    *(
        Route("GET", path, file, (Answer(media_type=_TYPES[Path(name).suffix]),), right="open")
        for path, name in _FILES.items()
    ),
    Route(
        "GET",
        "/v1/events",
        events,
        (Answer(Change, media_type="text/event-stream"),),
        (*_TREE_QUERY, *LOCAL_QUERY),
        errors=(UsageError, NotFound, Unavailable),
        right="watch",
    ),
    Route(
        "GET",
        VIEW_PATH,
        own_view,
        (Answer(Change, media_type="text/event-stream"),),
        _TREE_QUERY,
        errors=(UsageError, NotFound, Refused, Unavailable),
        right="open",
    ),
)
