"""Pulls of packages and blobs: requests that bring what the store lacks, blob by blob, each blob
once however many pulls need it.

A blob that is requested by digest alone is cut by a piece list for which only the origin vouches,
so its SHA-256 is compared as well while it arrives (`check_whole`). The hash follows the part that
has come without gaps. Its steps become shorter towards the end, which leaves little to do when the
last piece arrives: where many hosts share a machine, all of them finish at the same moment.
"""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import logging
import os
import time
from collections import Counter, OrderedDict
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Literal, Protocol

from p2pdist.agent.caller import Caller
from p2pdist.agent.pull.blob import BlobPull, agent_stops
from p2pdist.agent.pull.image import BLOBS_AT_ONCE, SMALL_BLOBS_AT_ONCE, FetchBlob, HubSource, ImagePull, ImageSource
from p2pdist.agent.pull.packages import Package, Packages
from p2pdist.agent.pull.trees import Sources, TreePull, together
from p2pdist.agent.sealed_packages import Follow, Opening, Sealed
from p2pdist.model.digest import Digest, parse_digest
from p2pdist.model.errors import (
    Conflict,
    Corrupt,
    Damaged,
    DiskFull,
    NotFound,
    P2PDistError,
    Unavailable,
    UsageError,
    foreseen,
)
from p2pdist.model.hub import is_hub, parse_hub
from p2pdist.model.image import canonical_reference, is_image, parse_image
from p2pdist.model.image_manifest import Image
from p2pdist.model.manifest import (
    PACK_TYPE,
    SEALED_TYPE,
    TREE_TYPE,
    Config,
    Descriptor,
    Manifest,
    decode_config,
    parse_reference,
)
from p2pdist.model.messages import Priority, PullRequest, PullStatus
from p2pdist.model.modelpack import decode_model, model_layers
from p2pdist.model.selection import Selection
from p2pdist.model.tree import PATH_BYTES_MAX
from p2pdist.store.blobs.blob import Blob
from p2pdist.store.blobs.placement import Copy
from p2pdist.store.store import BlobStore
from p2pdist.store.trees.damage import damaged
from p2pdist.store.trees.missing_contents import Missing

logger = logging.getLogger(__name__)

PULLS_MAX = 1000
PULLS_OF_USER_MAX, PULLS_OF_USERS_MAX = 500, 900
"""Those of one user, as many as it may have shown (mounts.py): each rank of a job begins one. And
those of all users but root and the agent's own: what is left is for these two, and for preseeds and
repairs."""

REMEMBERED_MAX = 1000
"""Ended pulls whose status can be queried."""

ATTEMPTS = 3
"""Attempts to hold a blob of the store, which may be evicted at the same moment."""

DAMAGES_MAX = 100
"""So often one pull meets what changed on the disk, the same blob or object ATTEMPTS times."""

WAITED_FOR_S = 1.0
"""Readers that waited for pieces so short a time ago are going to wait for others."""

STEP_BYTES = 4 << 20
BUFFER_BYTES = 256 << 10
"""Size of the read buffer, which is used again: new memory for a whole step would cost more than
reading it."""

INLINE_BYTES = 64 << 10
"""So few bytes, which have just been written, are read and hashed faster than a thread starts."""


async def check_whole(blob: Blob, piece: Callable[[int], Awaitable[None]], copy: Copy | None = None) -> None:
    """Hash `blob` as its pieces come (`piece(i)` waits for piece i), and write what is hashed into
    `copy`. Raises Corrupt when the sum is not the blob's digest, and Damaged where that is because
    pieces changed on the disk since they verified."""
    layout = blob.layout
    running = hashlib.sha256()
    buffer = memoryview(bytearray(min(BUFFER_BYTES, layout.size)))

    def take(start: int, length: int) -> None:
        for offset in range(start, start + length, BUFFER_BYTES):
            view = buffer[: min(BUFFER_BYTES, start + length - offset)]
            blob.read_into(offset, view)
            running.update(view)
            if copy is not None:
                copy.write(offset, view)

    longest = max(1, STEP_BYTES // layout.piece_size)
    after = 0
    while (first := after) < layout.count:
        after += min(longest, (layout.count - first + 1) // 2)
        for number in range(after - 1, first - 1, -1):
            await piece(number)
        start = layout.offset(first)
        length = min(layout.size, layout.offset(after)) - start
        if length <= INLINE_BYTES:
            take(start, length)
        else:
            await asyncio.to_thread(take, start, length)
    if f"sha256:{running.hexdigest()}" != blob.digest:
        if await asyncio.to_thread(partial(blob.verify, drop=True)):
            raise damaged(blob)
        raise Corrupt(
            f"the content stored as {blob.digest} hashes to {running.hexdigest()}", remedy="Push the blob again"
        )


class Fetcher(Protocol):
    """Fetches one blob into the store."""

    async def fetch(
        self, layer: Descriptor, priority: Priority, selection: Selection | None
    ) -> tuple[Blob, BlobPull | None]:
        """The blob, not yet held, and its pull, started or joined; None when the blob is complete.
        `selection` is what `layer` describes where that is a part of another blob. A preseed that
        a start joins becomes a start."""

    async def discard(self, digest: Digest) -> None:
        """Remove what came of a blob that turned out to be wrong or gone."""


@dataclass(slots=True)
class Pull:
    """One request and its progress."""

    id: str
    request: PullRequest
    reference: str
    caller: Caller
    """The process for which it was begun, with whose rights an output is written."""
    state: Literal["waiting", "running", "done", "failed"] = "waiting"
    note: str = ""
    """What the pull waits for before its blobs, in words for the user."""
    digest: str = ""
    bytes_total: int = 0
    bytes_cached: int = 0
    """Bytes that need not be transferred."""
    output: str = ""
    """How the output was written, once it is."""
    copy: Copy | None = None
    """What has been written of the output."""
    started: float = field(default_factory=time.monotonic)
    resolved_at: float | None = None
    """When it was known what is to be pulled, by the monotonic clock as `started`. `resolve`."""
    joined_at: float | None = None
    """When the first blob was asked of others. `begin_blob`."""
    seconds: float | None = None
    """How long the pull took; None while it runs."""
    error: P2PDistError | None = None
    package: Package | None = None
    """The package, once it has been pulled."""
    tag_as_of: float | None = None
    """When it was last said what the tag names, in seconds since the epoch; None where it is said
    now."""
    parts: frozenset[Digest] = frozenset()
    """The blobs of the package, once its manifest is known."""
    blobs: list[BlobPull] = field(default_factory=list)
    """The blobs that are fetched for this pull, and those fetched already."""
    lazy: bool = False
    """Nothing is pulled: the package is to be shown lazily."""
    planned: Callable[[Package, Sequence[Missing], Sources], None] | None = None
    """Hears what the package's trees lack, and from where it comes."""
    listed: Callable[[Package], Awaitable[None]] | None = None
    """Called before that is computed, once the package's lists of files are here."""
    task: asyncio.Task[None] | None = None
    begun: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when the first blob is being fetched, or the pull has ended."""
    unreachable: Callable[[], str] = lambda: ""
    """Why other hosts cannot reach this agent, "" while they can."""

    def skip(self, count: int) -> None:
        """Count bytes that need not be transferred."""
        self.bytes_cached += count

    @property
    def foreign(self) -> bool:
        """Whether it is an image of a registry or a commit of a hub that is pulled, not a package
        of ours."""
        package = self.request.package
        return package is not None and (is_image(package) or is_hub(package))

    def resolve(self) -> None:
        """It is known what is to be pulled."""
        self.state, self.note, self.resolved_at = "running", "", self.resolved_at or time.monotonic()

    def begin_blob(self, fetching: BlobPull) -> None:
        """A blob is being fetched."""
        self.joined_at = self.joined_at or time.monotonic()
        self.blobs.append(fetching)
        self.begun.set()

    def let_go(self) -> None:
        """Give up what was written of the output, unless it has its name."""
        if self.copy is not None:
            self.copy.close()

    def status(self) -> PullStatus:
        """A status report."""
        receipts = [blob.receipts for blob in self.blobs]
        by = {kind: sum(receipt.by_source[kind] for receipt in receipts) for kind in ("origin", "peer")}
        before = sum(receipt.before for receipt in receipts)
        fetched = before + sum(by.values())
        done = self.bytes_total if self.state == "done" else min(self.bytes_total, self.bytes_cached + fetched)
        return PullStatus(
            self.id,
            self.state,
            self.reference,
            self.digest,
            self.bytes_total,
            done,
            0 if self.foreign else by["origin"],
            by["peer"],
            self.bytes_cached + before,
            round(self.seconds if self.seconds is not None else time.monotonic() - self.started, 3),
            self.note or next((blob.note for blob in self.blobs if blob.note), "") or self._trouble(),
            self.output,
            self.error.problem() if self.error else None,
            self._warning() if by["origin"] else "",
            by["origin"] if self.foreign else 0,
            self.lazy,
            round(time.monotonic() - self.started, 3),
            None if self.tag_as_of is None else round(max(0.0, time.time() - self.tag_as_of), 3),
        )

    def _warning(self) -> str:
        """Why this host read the origin where other hosts have the content, and why it will
        again."""
        unreached = {host: why for blob in self.blobs for host, why in blob.unreached.items()}
        reasons = [self.unreachable()]
        if unreached:
            hosts = "1 host" if len(unreached) == 1 else f"{len(unreached)} hosts"
            first = next(iter(unreached.values()))
            reasons.append(f"storage was read because {hosts} could not be reached: {first}")
        return "; ".join(filter(None, reasons))

    def _trouble(self) -> str:
        """What a running pull waits for while no piece comes."""
        if self.state != "running":
            return ""
        return next((f"waiting, {why}" for blob in self.blobs if (why := blob.trouble())), "")


class Pulls:
    """All pulls of an agent, and the last REMEMBERED_MAX that ended. `unreachable` says why other
    hosts cannot reach this one, "" while they can; `lazy` what the policy of a package says of
    showing it lazily. On the event loop."""

    def __init__(
        self,
        store: BlobStore,
        packages: Packages,
        fetcher: Fetcher,
        *,
        images: ImageSource | None = None,
        models: HubSource | None = None,
        unreachable: Callable[[], str] = lambda: "",
        lazy: Callable[[str], bool | None] = lambda reference: None,
        sealed: Sealed | None = None,
    ) -> None:
        self._unreachable, self._images, self._models, self._lazy = unreachable, images, models, lazy
        self.sealed = sealed or Sealed(store)
        self._store, self._packages, self._fetcher = store, packages, fetcher
        self._pulls: OrderedDict[str, Pull] = OrderedDict()
        self._numbers = itertools.count(1)
        self._boot = f"{time.time_ns() & 0xFFFFFFFF:08x}"
        self._stopped = False
        """Set by `stop`."""
        self._observers: list[Callable[[Pull], None]] = []

    def observe(self, observer: Callable[[Pull], None]) -> None:
        """Call `observer` with each pull that is done or failed before `stop`."""
        self._observers.append(observer)

    def start(
        self,
        request: PullRequest,
        caller: Caller | None = None,
        planned: Callable[[Package, Sequence[Missing], Sources], None] | None = None,
    ) -> Pull:
        """Begin a pull for `caller`, with whose rights an output is written, or for the agent
        itself. `planned` hears what trees lack before it comes. Raises Refused where the agent
        cannot take on these rights, UsageError for a malformed request, Unavailable where as many
        pulls run as may and once stopped."""
        caller = caller or Caller.agent()
        name = _checked_name(request, caller)
        _require_room([pull.caller for pull in self._pulls.values() if pull.seconds is None], caller)
        if self._stopped:
            raise agent_stops()
        pull = Pull(f"{self._boot}-{next(self._numbers)}", request, name, caller, unreachable=self._unreachable)
        pull.planned = planned
        self._pulls[pull.id] = pull
        for old in [other for other in self._pulls.values() if other.seconds is not None][:-REMEMBERED_MAX]:
            del self._pulls[old.id]
        pull.task = asyncio.create_task(self._run(pull), name=f"pull-{name}")
        return pull

    def get(self, identifier: str) -> Pull:
        """A pull by its identifier. Raises NotFound."""
        pull = self._pulls.get(identifier)
        if pull is None:
            what = f"there is no pull {identifier[:100]!r}; the agent may have been restarted"
            raise NotFound(what, remedy="Pull again")
        return pull

    def list(self) -> list[PullStatus]:
        """Status reports of all pulls."""
        return [pull.status() for pull in self._pulls.values()]

    @property
    def running(self) -> bool:
        """Whether a pull brings something. From any thread."""
        return any(pull.state == "running" for pull in list(self._pulls.values()))

    def parts(self) -> set[Digest]:
        """The blobs of packages that are being pulled."""
        return {digest for pull in self._pulls.values() if pull.seconds is None for digest in pull.parts}

    async def stop(self) -> None:
        """Cancel running pulls and refuse new ones; what has arrived stays in the store."""
        self._stopped = True
        tasks = [pull.task for pull in self._pulls.values() if pull.task is not None and not pull.task.done()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def blob(self, digest: Digest, caller: Caller | None = None) -> BlobPull | None:
        """The pull of a blob, which all readers share that read it while it arrives, begun for
        `caller` where none runs; None once the blob is complete. Raises its failure."""
        request = PullRequest(blob=digest)
        running = (pull for pull in self._pulls.values() if pull.seconds is None and pull.request == request)
        pull = next(running, None) or self.start(request, caller)
        await pull.begun.wait()
        if pull.error is not None:
            raise pull.error
        return pull.blobs[0] if pull.blobs else None

    async def package(self, reference: str, caller: Caller | None = None) -> Package:
        """Pull a package, or a model of a registry, for `caller`, and wait for it; raises its
        failure."""
        if is_hub(reference):
            raise UsageError(
                f"{reference[:200]} is a model or data set of a hub, which is not shown as it is",
                remedy="Have programs read it through the agent: HF_ENDPOINT=http://localhost:7073/hf",
            )
        if is_image(reference) and self._images is not None:
            image = await self._images.find(parse_image(reference), lambda _: None)
            if await asyncio.to_thread(_model_of, self._store, image) is None:
                raise _no_model(reference)
        pull = self.start(PullRequest(package=reference), caller)
        assert pull.task is not None
        await asyncio.wait([pull.task])
        if pull.package is None or pull.error is not None:
            raise pull.error or _no_model(reference)
        return pull.package

    async def _run(self, pull: Pull) -> None:
        try:
            if is_hub(pull.reference):
                await _bring_commit(self, pull)
            elif pull.foreign:
                await _bring_image(self, pull)
            elif pull.request.package is not None:
                await self._run_package(pull)
            else:
                await _bring_blob(self, pull, parse_digest(pull.request.blob or ""))
            pull.state = "done"
        except P2PDistError as error:
            pull.state, pull.error = "failed", error
            logger.warning("pull=%s reference=%s failed: %s", pull.id, pull.reference, error)
        except Exception as error:
            expected = foreseen(error) if isinstance(error, OSError) else None
            pull.state = "failed"
            pull.error = expected or P2PDistError(f"the agent failed: {error!r}", remedy="See its log")
            logger.exception("pull=%s reference=%s failed", pull.id, pull.reference)
        except asyncio.CancelledError:
            if self._stopped:
                pull.state, pull.error = "failed", agent_stops()
            raise
        finally:
            pull.seconds, pull.note = time.monotonic() - pull.started, ""
            pull.begun.set()
            ended = pull.state in ("done", "failed") and not self._stopped
            for observer in self._observers if ended else ():
                observer(pull)
            if pull.state == "done":
                logger.info("pull=%s reference=%s done seconds=%.3f", pull.id, pull.reference, pull.seconds)

    async def _run_package(self, pull: Pull) -> None:
        losses, damages = 0, Counter[str]()
        while True:
            package = await self._packages.find(
                parse_reference(pull.reference), lambda text: setattr(pull, "note", text)
            )
            pull.tag_as_of = package.as_of
            if pull.request.lazy and self._lazy(str(package.reference)) and not package.manifest.is_sealed:
                pull.lazy, pull.digest = True, package.digest
                return
            try:
                package = await self._bring(pull, package)
                if package.manifest.encrypted:
                    await asyncio.to_thread(_drop_packs, self._store, package.manifest)
                break
            except Damaged as damage:
                await _drop_damage(self, pull, damage, damages)
            except Corrupt:
                losses += 1
                if losses == ATTEMPTS or not await asyncio.to_thread(self._packages.lost, package):
                    raise
        pull.package = package

    async def _bring(self, pull: Pull, package: Package) -> Package:
        """Bring the blobs of a package, and open them where they are sealed; returns what is here
        then."""
        manifest = package.manifest
        pull.digest, pull.bytes_cached = package.digest, 0
        pull.bytes_total = sum(blob.size for blob in manifest.blobs)
        pull.resolve()
        pull.parts = frozenset(blob.digest for blob in manifest.blobs)
        await asyncio.to_thread(self._store.integrity.look, [layer.digest for layer in manifest.layers])
        # What the store must hold at the same moment. Without the check a package that cannot fit
        # would evict everything first.
        self._check_fits(_bytes_at_once(manifest))
        large, small = asyncio.Semaphore(BLOBS_AT_ONCE), asyncio.Semaphore(SMALL_BLOBS_AT_ONCE)
        with ExitStack() as holds:
            _hold(self._store, manifest, holds)

            async def fetch(blob: Descriptor, selection: Selection | None = None) -> Blob:
                slots = large if blob.layout.stripes > 1 else small
                return await self._fetch(pull, blob, slots, holds, selection=selection)

            if manifest.is_sealed:
                return await _open(self, pull, package, (large, small), holds)
            images = {layer.digest: layer for layer in manifest.layers if layer.media_type != TREE_TYPE}
            planned = partial(pull.planned, package) if pull.planned is not None else None
            trees = TreePull(manifest, self._store, fetch, self._packages.pieces, holds, pull.skip, planned)
            trees.listed = partial(pull.listed, package) if pull.listed is not None else None
            trees.waited_for = partial(waited_for, pull)
            try:
                await together([*map(fetch, images.values()), trees.run()])
            except DiskFull as full:
                self._check_fits(_held_bytes(self._store, manifest) + trees.bytes_content + full.details["needed"])
                raise
            await asyncio.to_thread(self._store.packages.record, pull.reference, package.digest)
        return package

    def _check_fits(self, needed: int) -> None:
        """Raises DiskFull when so many bytes would not fit into an empty store."""
        capacity = self._store.capacity
        if needed > capacity:
            raise DiskFull(str(self._store.root), needed=needed, free=capacity, capacity=capacity)

    async def _bring_single(self, pull: Pull, digest: Digest) -> None:
        pull.digest = digest
        with ExitStack() as holds:
            holds.callback(pull.let_go)
            await asyncio.to_thread(self._store.integrity.look, [digest])
            blob = self._store.get(digest)
            if blob is not None and blob.complete:
                holds.enter_context(blob.held())
                pull.bytes_total = pull.bytes_cached = blob.size
            else:
                layer = await self._packages.find_blob(digest, lambda text: setattr(pull, "note", text))
                pull.bytes_total = layer.size
                pull.resolve()
                self._check_fits(layer.size)
                blob = await self._fetch(pull, layer, asyncio.Semaphore(1), holds, whole=True)
            if pull.request.output is not None:
                pull.output = await _give(blob, Path(pull.request.output), pull)

    async def _begin_copy(self, blob: Blob, pull: Pull) -> None:
        """Begin to write the requested output, with the rights of the process that requested it."""
        if pull.request.output is not None:
            output = Path(pull.request.output)
            await asyncio.to_thread(blob.fileno)  # the store is opened with the agent's
            pull.copy = await pull.caller.act(lambda: blob.begin_copy(output), f"write {output}")

    async def _fetch(
        self,
        pull: Pull,
        layer: Descriptor,
        slots: asyncio.Semaphore,
        holds: ExitStack,
        *,
        whole: bool = False,
        selection: Selection | None = None,
        follow: Follow | None = None,
    ) -> Blob:
        """Fetch one blob. `holds` holds it from then on, so that no other layer evicts it."""
        async with slots:
            with ExitStack() as hold:
                blob, fetching = await self._held(pull, layer, selection, hold)
                failure = await self._arrival(pull, layer, fetching, whole=whole, follow=follow)
                if failure is None:
                    holds.push(hold.pop_all())
                    return blob
        await self._fetcher.discard(layer.digest)
        raise failure

    async def _held(
        self, pull: Pull, layer: Descriptor, selection: Selection | None, hold: ExitStack
    ) -> tuple[Blob, BlobPull | None]:
        """A blob that is complete or on its way, held. A complete blob may be evicted before it is
        held."""
        for attempt in range(ATTEMPTS):
            try:
                blob, fetching = await self._fetcher.fetch(layer, pull.request.priority, selection)
                hold.enter_context(blob.held())
                break
            except NotFound:
                if attempt + 1 == ATTEMPTS:
                    raise
        return blob, fetching

    async def _arrival(
        self, pull: Pull, layer: Descriptor, fetching: BlobPull | None, *, whole: bool, follow: Follow | None
    ) -> P2PDistError | None:
        """Wait for a blob, and have it followed. Returns a failure after which nothing of the blob
        is worth keeping, raises any other failure."""
        if fetching is None:
            pull.bytes_cached += layer.size
            return None
        pull.begin_blob(fetching)
        if whole:
            await self._begin_copy(fetching.blob, pull)
        try:
            if follow is not None:
                await follow(fetching.blob, fetching.piece)
        except (Corrupt, NotFound):
            if not _has_failed(fetching):  # the blob is what it should be, and is kept
                raise
        try:
            # A blob that comes by another piece list than this package names is trusted only after
            # its own digest has been compared.
            if whole or fetching.blob.pieces_digest != layer.pieces_digest:
                await check_whole(fetching.blob, fetching.piece, pull.copy)
            await asyncio.shield(fetching.done)
        except (Corrupt, NotFound) as error:
            return error
        return None


async def _give(blob: Blob, output: Path, pull: Pull) -> str:
    """Give an output its name, and its content where that has not been written yet, with the
    rights of the process that requested it."""
    copy = pull.copy
    if copy is not None and not copy.failed:
        await pull.caller.act(copy.publish, f"write {output}")
        return "copy"
    with blob.held():
        await asyncio.to_thread(blob.fileno)  # the store is opened with the agent's
        return await pull.caller.act(lambda: blob.give(output), f"write {output}")


def _hold(store: BlobStore, manifest: Manifest, holds: ExitStack) -> None:
    """Hold the blobs of a package that are here, so that new ones do not evict them. Encrypted ones
    count as used now, and no more: those that are open already make room for others."""
    for blob in manifest.blobs:
        here = store.get(blob.digest)
        if here is not None and here.complete and here.pieces_digest == blob.pieces_digest:
            with suppress(NotFound), ExitStack() as hold:  # NotFound: evicted this very moment
                hold.enter_context(here.held())
                if blob.media_type != SEALED_TYPE:
                    holds.push(hold.pop_all())


def _held_bytes(store: BlobStore, manifest: Manifest) -> int:
    """Bytes of the blobs of a package that are held in the store, by this pull or another."""
    blobs = (store.get(blob.digest) for blob in manifest.blobs)
    return sum(blob.size for blob in blobs if blob is not None and blob.in_use)


def _has_failed(fetching: BlobPull) -> bool:
    done = fetching.done
    return done.done() and (done.cancelled() or done.exception() is not None)


def _bytes_at_once(manifest: Manifest) -> int:
    """Bytes that the store must hold at the same moment for a package: packs and encrypted blobs
    make room once their contents are here."""
    return sum(blob.size for blob in manifest.blobs if blob.media_type not in (PACK_TYPE, SEALED_TYPE))


async def _open(
    pulls: Pulls, pull: Pull, package: Package, slots: tuple[asyncio.Semaphore, asyncio.Semaphore], holds: ExitStack
) -> Package:
    """Bring a sealed package, and open it; returns it opened."""
    store = pulls._store

    async def fetch(part: Descriptor, hold: ExitStack, follow: Follow | None) -> Blob:
        return await pulls._fetch(pull, part, slots[part.layout.stripes == 1], hold, follow=follow)

    async def ask() -> Mapping[str, bytes]:
        return await pulls._packages.keys(package, lambda text: setattr(pull, "note", text))

    name = str(package.reference.name)
    opening = Opening(pulls.sealed, name, package.digest, package.manifest, fetch, ask, holds)
    digest, manifest = await opening.manifest()
    await pulls._packages.learn_opened(package, digest, manifest)
    pull.parts |= {blob.digest for blob in manifest.blobs}
    pulls._check_fits(_bytes_at_once(manifest))
    await asyncio.to_thread(store.integrity.look, [layer.digest for layer in manifest.layers])
    config = await asyncio.to_thread(store.read_document, manifest.config.digest)
    if config is None:
        raise Corrupt(f"the config {manifest.config.digest} is gone from the store", remedy="Pull again")
    images = {layer.digest: layer for layer in manifest.layers if layer.media_type != TREE_TYPE}
    trees = TreePull(manifest, store, opening.blob, pulls._packages.pieces, holds, lambda _: None)
    trees.selects = False
    try:
        await together([*map(opening.blob, images.values()), trees.run()])
    except DiskFull as full:
        plain = replace(manifest, parts=tuple(part for part in manifest.parts if part.media_type != SEALED_TYPE))
        pulls._check_fits(_held_bytes(store, plain) + trees.bytes_content + full.details["needed"])
        raise
    fetched = {fetching.blob.digest: fetching.blob.size for fetching in pull.blobs}
    pull.bytes_cached = pull.bytes_total - sum(fetched.values())
    await asyncio.to_thread(store.packages.record, pull.reference, package.digest)
    return replace(package, manifest=manifest, config=decode_config(config))


def waited_for(pull: Pull) -> bool:
    """Whether readers wait for single pieces of what a pull brings, or did a moment ago."""
    since = asyncio.get_running_loop().time() - WAITED_FOR_S
    return any(fetching.waits.demanded_at >= since for fetching in pull.blobs)


def _drop_packs(store: BlobStore, manifest: Manifest) -> None:
    """Remove the decrypted packs of an opened package, whose trees are here: no other host gets
    them. Blocks."""
    for part in manifest.parts:
        if part.media_type == PACK_TYPE and part.digest in store.opened:
            with suppress(NotFound, Conflict):
                store.remove(part.digest)


async def _bring_blob(pulls: Pulls, pull: Pull, digest: Digest) -> None:
    damages = Counter[str]()
    while True:
        try:
            return await pulls._bring_single(pull, digest)
        except Damaged as damage:
            await _drop_damage(pulls, pull, damage, damages)
            pull.copy = None


async def _drop_damage(pulls: Pulls, pull: Pull, damage: Damaged, damages: Counter[str]) -> None:
    """Drop what else changed on the disk of a blob that is damaged, so that all of it comes again.
    `damages` counts what this pull met. Raises Corrupt where that is too often: then the disk is to
    be replaced, and no other attempt helps."""
    store, key = pulls._store, damage.blob or damage.what
    logger.warning("pull=%s reference=%s goes on again: %s", pull.id, pull.reference, damage.what)
    store.integrity.damaged["blob" if damage.blob else "object"] += 1
    damages[key] += 1
    if damages[key] == ATTEMPTS or damages.total() == DAMAGES_MAX:
        raise Corrupt(
            f"the disk of {store.root} changes what was written to it, again and again: {damage.what}",
            remedy="See dmesg for errors of the disk, test the memory, and replace what fails",
        ) from damage
    for fetching in pull.blobs:  # one under way does not know that pieces are gone
        if fetching.blob.digest == damage.blob and not fetching.done.done():
            fetching.reject(damage)
    blob = store.get(parse_digest(damage.blob)) if damage.blob else None
    if blob is not None:
        with suppress(NotFound):  # evicted meanwhile
            await asyncio.to_thread(partial(blob.verify, drop=True))


def _no_model(reference: str) -> UsageError:
    return UsageError(
        f"{reference[:200]} is an image of a registry, which is not shown as it is",
        remedy="Make a package of it: p2pdist import docker://... -t NAME:TAG",
    )


def _model_of(store: BlobStore, image: Image) -> Package | None:
    """The package that a model of a registry is; None for an image. Blocks. Raises Corrupt for a
    model that could not be shown: it need not come."""
    digest = image.documents[-1]
    document = store.read_document(digest)
    model = decode_model(document) if document is not None else None
    if model is None:
        return None
    model_layers(model.layers)
    return Package(image.reference, digest, model, Config())


async def _bring_image(pulls: Pulls, pull: Pull) -> None:
    if (images := pulls._images) is None:
        raise Unavailable("this agent brings no images")
    image = await images.find(parse_image(pull.reference), lambda text: setattr(pull, "note", text))
    pull.package = await asyncio.to_thread(_model_of, pulls._store, image)
    await _bring_blobs(pulls, pull, image.digest, image.blobs, partial(images.fetch_blob, image.reference.name))


async def _bring_commit(pulls: Pulls, pull: Pull) -> None:
    if (models := pulls._models) is None:
        raise Unavailable("this agent reads no hub")
    found = await models.find(parse_hub(pull.reference), lambda text: setattr(pull, "note", text))
    await together([_bring_blobs(pulls, pull, found.commit, found.blobs, found.fetch), found.bring_documents()])


async def _bring_blobs(pulls: Pulls, pull: Pull, name: str, blobs: Sequence[Descriptor], fetch: FetchBlob) -> None:
    """Bring what a pull is of: `name` is its digest or commit."""
    sizes = {blob.digest: blob.size for blob in blobs}
    pull.digest, pull.bytes_total = name, sum(sizes.values())
    pull.parts = frozenset(sizes)
    pull.resolve()
    await asyncio.to_thread(pulls._store.integrity.look, list(sizes))
    pulls._check_fits(pull.bytes_total)
    await ImagePull(blobs, fetch, pulls._store, pull.request.priority, cached=pull.skip, begun=pull.begin_blob).run()


def _require_room(running: Sequence[Caller], caller: Caller) -> None:
    """Raises Unavailable where as many pulls run as may: of all, and for a caller that is not
    trusted of its user, and of all such users."""
    if len(running) >= PULLS_MAX:
        raise Unavailable(f"{PULLS_MAX} pulls are running", remedy="Wait for some to end")
    if caller.trusted:
        return
    if sum(other.uid == caller.uid for other in running) >= PULLS_OF_USER_MAX:
        raise Unavailable(f"{PULLS_OF_USER_MAX} pulls of user {caller.uid} are running", remedy="Wait for some to end")
    if sum(not other.trusted for other in running) >= PULLS_OF_USERS_MAX:
        raise Unavailable(f"{PULLS_OF_USERS_MAX} pulls of users are running", remedy="Wait for some to end")


def _checked_name(request: PullRequest, caller: Caller) -> str:
    """What a request names, as all requests for it do. Raises UsageError, Refused."""
    if (request.package is None) == (request.blob is None):
        raise UsageError("a pull names either a package or a blob")
    if request.package is not None and request.output is not None:
        raise UsageError("only a blob can be written to an output", remedy="Mount the package instead")
    if request.output is not None and (not Path(request.output).is_absolute() or "\0" in request.output):
        raise UsageError(f"the output {request.output[:100]!r} is not an absolute path")
    if request.output is not None and len(os.fsencode(request.output)) > PATH_BYTES_MAX:
        raise UsageError(f"the output {request.output[:100]!r}... is longer than {PATH_BYTES_MAX} bytes")
    if request.output is not None:
        caller.require_able(f"write {request.output}")
    return canonical_reference(request.package) if request.package else str(parse_digest(request.blob or ""))
