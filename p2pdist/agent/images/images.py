"""Images on one host: their manifests, and blobs, which come through the swarm like any other.

Small answers come from this host's store, else from the tracker, which reads each document once for
the whole fleet, else from the registry itself, if this agent was given it (`--upstream`). What a
digest names never changes, so what is in the store is answered without a question. What a tag names
is asked of the tracker each time; while none answers, the last known meaning is given.

The size of a blob is what cuts it into pieces, and the manifest that names the blob states it. A
tracker that has just started may not know the blobs of images that this host has known for long,
and would not let it join their swarms; so it is asked for the manifest once before a blob is
fetched.
"""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Protocol, TypeVar

from p2pdist.agent.images.lists import AskEither, ImageLists
from p2pdist.agent.images.registries import TrackedImages, UpstreamBlobs, UpstreamRegistries
from p2pdist.agent.pull.blob import BlobPull
from p2pdist.agent.tasks import Tasks
from p2pdist.model.digest import Digest, is_digest
from p2pdist.model.errors import Corrupt, NotFound, P2PDistError, Unavailable, UsageError
from p2pdist.model.image import ImageName, ImageReference, is_tag
from p2pdist.model.image_manifest import (
    INDEX_DEPTH_MAX,
    Image,
    ImageDocument,
    ImageIndex,
    ImageManifest,
    TagPage,
    decode_image,
)
from p2pdist.model.manifest import Manifest
from p2pdist.model.messages import Priority
from p2pdist.model.platform import Platform
from p2pdist.model.policy import PackagePolicy
from p2pdist.model.upstream import UpstreamSettings
from p2pdist.origin.registry.upstream import UpstreamRepository
from p2pdist.store.blobs.blob import Blob
from p2pdist.store.store import BlobStore

TAG_FRESH_S = 1.0
"""So long what a tag names is not asked for again: clients ask twice, with HEAD and GET."""

KNOWN_WAIT_S = 1.5
"""So long a tracker may take to say what a tag names whose last meaning is in the store."""

ANNOUNCE_WAIT_S = 1.0
"""So long a pull waits at most until the tracker has been asked for the blob's manifest: half of
what a client of the mirror waits for."""

CACHED_MAX = 256
CACHED_BYTES_MAX = 256 << 10
"""Documents up to this size that are kept in memory besides."""

SIZES_MAX = 100_000

Value = TypeVar("Value")
Note = Callable[[str], None]
Learn = Callable[[str, tuple[Digest, ...]], None]
LearnPolicy = Callable[[str, Digest, Manifest, PackagePolicy], Awaitable[None]]
logger = logging.getLogger(__name__)


class BlobFetcher(Protocol):
    """Fetches blobs that have no piece list."""

    async def fetch_vouched(
        self, digest: Digest, size: int, upstream: UpstreamBlobs, priority: Priority
    ) -> tuple[Blob, BlobPull | None]:
        """The blob, not yet held, and its pull, started or joined; None when the blob is
        complete. Hosts with a lease read it from `upstream`."""


class ConfirmedBlobs:
    """Blobs that registries have in a repository, whatever manifests name: a manifest may name any
    blob, also such as belong to images of others. `learn` hears of each under its name. On the
    event loop."""

    def __init__(self, tracked: TrackedImages, registries: UpstreamRegistries, ask: AskEither, learn: Learn) -> None:
        self._tracked, self._registries, self._ask, self._learn = tracked, registries, ask, learn
        self._tasks = Tasks(logger, "a blob could not be confirmed at its registry")
        self._known: OrderedDict[str, None] = OrderedDict()
        """By `name@digest`."""

    async def require(self, name: ImageName, digest: Digest) -> None:
        """Raises NotFound for a blob that the registry does not have in this repository. Each one
        is asked for once. Raises Refused and Unavailable where nothing says it."""
        key = f"{name}@{digest}"
        if key in self._known:
            self._learn(str(name), (digest,))
            return
        await self._registries.require(name)
        size = await self._ask(
            name, lambda: self._tracked.confirmed(name, digest), lambda upstream: upstream.blob_size(digest)
        )
        if size is None:
            raise NotFound(f"{name} has no blob {digest} at its registry")
        self._known[key] = None
        _trim(self._known, SIZES_MAX)
        self._learn(str(name), (digest,))

    def ask_later(self, name: ImageName, digest: Digest) -> None:
        """Ask for a blob, if it was not asked for, while others go on with it."""
        if f"{name}@{digest}" not in self._known:
            self._tasks.spawn(self._try(name, digest))

    async def _try(self, name: ImageName, digest: Digest) -> None:
        try:
            await self.require(name, digest)
        except P2PDistError as error:
            logger.info("%s counts as no blob of %s: %s", digest, name, error.what)

    async def stop(self) -> None:
        """End what is under way."""
        await self._tasks.stop()


class Images:
    """The images of this host. `learn` hears under which name of packages documents and blobs are
    at their registry, of blobs only while `ruled`: that names decide what may be read;
    `learn_policy` what a tracker stated of an image. On the event loop."""

    def __init__(
        self,
        store: BlobStore,
        tracked: TrackedImages,
        registries: UpstreamRegistries,
        fetcher: BlobFetcher,
        *,
        platform: Platform,
        learn: Learn = lambda name, parts: None,
        ruled: Callable[[], bool] = lambda: False,
        learn_policy: LearnPolicy,
        wait_tracker: Callable[[Note], Awaitable[bool]] | None = None,
    ) -> None:
        self._store, self._tracked, self._registries, self._fetcher = store, tracked, registries, fetcher
        self._platform, self._wait_tracker = platform, wait_tracker
        self._learn, self._ruled, self._learn_policy = learn, ruled, learn_policy
        self._cache: OrderedDict[str, ImageDocument] = OrderedDict()
        """By `name@digest`."""
        self._fresh: OrderedDict[str, tuple[float, Digest]] = OrderedDict()
        """By `name:tag` when it was asked for, and what it named."""
        self._sizes: OrderedDict[str, tuple[int, Digest | None]] = OrderedDict()
        """By `name@digest` the sizes of blobs, and the manifest that says so."""
        self.confirmed = ConfirmedBlobs(tracked, registries, self._ask, learn)
        self._read: set[str] = set()
        """Names of which all manifests in the store have been looked at."""
        self._announced: OrderedDict[str, None] = OrderedDict()
        """Manifests, by `name@digest`, that the tracker which answers has been asked for."""
        self._announcing: dict[str, tuple[asyncio.Task[None], float]] = {}
        """Those that it is being asked for, and until when pulls wait for that."""
        self.arriving: dict[Digest, tuple[ImageName, BlobPull]] = {}
        """The blobs on their way, and the image for which each was asked first."""
        self._reads: dict[str, asyncio.Task[ImageDocument]] = {}
        self._lists = ImageLists(store, tracked, registries, self._ask)

    @property
    def upstreams(self) -> tuple[UpstreamSettings, ...]:
        """The upstreams whose images may be asked for here."""
        return self._registries.known

    def tracker_changed(self, present: bool) -> None:
        """A tracker answers from now on, or none does."""
        self._announced.clear()
        if present:
            self._registries.begin_learning()

    async def close(self) -> None:
        """End what is under way."""
        tasks = [*self._reads.values(), *(task for task, _ in self._announcing.values())]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self.confirmed.stop()
        await self._registries.close()

    # -- manifests

    async def manifest(self, name: ImageName, target: str) -> ImageDocument:
        """The manifest or index that a tag or digest names. Raises NotFound, Refused, Corrupt,
        Unavailable, UsageError."""
        if not is_tag(target) and not is_digest(target):
            raise UsageError(f"{target[:100]!r} is neither a tag nor a digest")
        if is_digest(target):
            digest: Digest | None = Digest(target)
        else:
            asked_at, digest = self._fresh.get(f"{name}:{target}", (0.0, None))
            if asyncio.get_running_loop().time() - asked_at > TAG_FRESH_S:
                digest = None
        kept = await self._kept(name, digest) if digest is not None else None
        if kept is not None:
            return kept
        key = f"{name} {target}"
        task = self._reads.get(key)
        if task is None:
            task = self._reads[key] = asyncio.create_task(self._find(name, target), name="image-manifest")
            task.add_done_callback(lambda done: self._read_ended(key, done))
        return await asyncio.shield(task)

    def _read_ended(self, key: str, task: asyncio.Task[ImageDocument]) -> None:
        del self._reads[key]
        if not task.cancelled():
            task.exception()  # marks it as seen: the callers may have gone away

    async def _find(self, name: ImageName, target: str) -> ImageDocument:
        record = self._store.images.get(str(name), target)
        kept = await self._kept(name, record.digest) if record is not None else None
        if kept is None:
            await self._registries.require(name)
        known = kept.digest if kept is not None else None
        try:
            found = await self._ask(
                name,
                lambda: self._tracked.manifest(name, target, known),
                lambda upstream: upstream.manifest(target, known=known),
                quick=kept is not None,
            )
        except Unavailable as error:
            if kept is None:
                raise
            logger.debug("%s: the last known meaning of %s:%s is given", error, name, target)
            return kept
        if found is None:
            assert kept is not None
            found = kept
        await self._keep(name, target, found)
        if self._tracked.connected:
            await self._note_announced(name, found)
        return found

    async def _keep(self, name: ImageName, target: str, found: ImageDocument) -> None:
        """Keep a document in the store, and what the target of its request names."""
        record = self._store.images.get(str(name), target)
        if record is None or record.digest != found.digest:
            await asyncio.to_thread(_put, self._store, name, target, found)
        if not is_digest(target):
            self._fresh[f"{name}:{target}"] = (asyncio.get_running_loop().time(), found.digest)
            _trim(self._fresh, CACHED_MAX)
        self._take_in(name, found)

    async def _kept(self, name: ImageName, digest: Digest) -> ImageDocument | None:
        """A document of this image that is in the store."""
        key = f"{name}@{digest}"
        found = self._cache.get(key)
        if found is None:
            record = self._store.images.get(str(name), digest)
            data = await asyncio.to_thread(self._store.read_document, digest) if record is not None else None
            if record is None or data is None:
                return None
            found = ImageDocument(data, record.media_type, digest)
            self._take_in(name, found)
        return found

    def _take_in(self, name: ImageName, found: ImageDocument) -> None:
        """Note what a document says of blobs."""
        key = f"{name}@{found.digest}"
        if key in self._cache:
            self._cache.move_to_end(key)
            return
        document = decode_image(found.data, found.media_type)
        if isinstance(document, ImageManifest):
            for blob in document.blobs:
                self._sizes[f"{name}@{blob.digest}"] = (blob.size, found.digest)
            _trim(self._sizes, SIZES_MAX)
        self._learn(str(name), (found.digest,))
        if len(found.data) <= CACHED_BYTES_MAX:
            self._cache[key] = found
            _trim(self._cache, CACHED_MAX)

    async def find(
        self, reference: ImageReference, note: Note = lambda text: None, *, platform: Platform | None = None
    ) -> Image:
        """The image that a reference names, for this host's platform or another one. `note` gets
        what is waited for, in words for the user. Raises NotFound, Refused, Corrupt,
        Unavailable."""
        try:
            found = await self.manifest(reference.name, reference.target)
        except (NotFound, Unavailable):
            if self._tracked.connected or self._wait_tracker is None or not await self._wait_tracker(note):
                raise
            found = await self.manifest(reference.name, reference.target)
        if reference.tag and reference.digest and self._store.images.get(str(reference.name), reference.tag) is None:
            # A preseed states what its tag meant: a client may ask for the tag while no tracker
            # answers.
            await asyncio.to_thread(_put, self._store, reference.name, reference.tag, found)
        documents = [found.digest]
        for _ in range(INDEX_DEPTH_MAX):
            document = decode_image(found.data, found.media_type)
            if not isinstance(document, ImageIndex):
                return _image(reference, documents, document)
            found = await self.manifest(reference.name, document.choose(platform or self._platform).digest)
            documents.append(found.digest)
        raise Corrupt(f"{reference} is an index of indexes, more than {INDEX_DEPTH_MAX} deep")

    # -- lists

    async def tags(self, name: ImageName, n: int = 1000, last: str = "") -> TagPage:
        """Up to `n` tags after the tag `last`. Raises NotFound, Refused, Corrupt, Unavailable."""
        return await self._lists.tags(name, n, last)

    async def referrers(self, name: ImageName, digest: Digest, artifact_type: str = "") -> ImageDocument:
        """The index of what refers to a manifest, such as signatures. Raises NotFound, Refused,
        Corrupt, Unavailable."""
        return await self._lists.referrers(name, digest, artifact_type)

    # -- blobs

    async def blob_size(self, name: ImageName, digest: Digest) -> int:
        """The size of a blob of an image. Raises NotFound, Refused, Corrupt, Unavailable."""
        key = f"{name}@{digest}"
        if key not in self._sizes and str(name) not in self._read:
            await self._read_records(name)
        if key in self._sizes:
            return self._sizes[key][0]
        await self._registries.require(name)
        size = await self._ask(
            name, lambda: self._tracked.blob_size(name, digest), lambda upstream: upstream.blob_size(digest)
        )
        if size is None:
            raise NotFound(f"{name} has no blob {digest} at its registry")
        self._sizes[key] = (size, None)
        _trim(self._sizes, SIZES_MAX)
        return size

    async def _read_records(self, name: ImageName) -> None:
        """Look at all manifests of an image that the store has."""
        records = await asyncio.to_thread(self._store.images.of, str(name))
        for record in records:
            with suppress(P2PDistError):
                await self._kept(name, record.digest)
        if records:
            self._read.add(str(name))

    async def fetch_blob(
        self, name: ImageName, digest: Digest, priority: Priority = "start"
    ) -> tuple[Blob, BlobPull | None]:
        """A blob of an image, not yet held, and its pull, started or joined; None when the blob is
        complete. Raises NotFound, Refused, Corrupt, Unavailable, DiskFull."""
        size = await self.blob_size(name, digest)
        if self._ruled():
            self.confirmed.ask_later(name, digest)
        await self._announce(name, digest)
        blob, pull = await self._fetcher.fetch_vouched(digest, size, self._registries.source(name), priority)
        if pull is not None and digest not in self.arriving:
            self.arriving[digest] = name, pull
            pull.done.add_done_callback(lambda _: self.arriving.pop(digest, None))
        return blob, pull

    async def _announce(self, name: ImageName, digest: Digest) -> None:
        """Have the tracker know the blob's manifest, if it has been asked for neither since it
        answers. What is here whole is not held up by that, nor is anything by a tracker that
        hangs."""
        manifest = self._sizes.get(f"{name}@{digest}", (0, None))[1]
        key = f"{name}@{manifest}"
        if manifest is None or not self._tracked.connected or key in self._announced:
            return
        now = asyncio.get_running_loop().time()
        task, deadline = self._announcing.get(key, (None, now + ANNOUNCE_WAIT_S))
        if task is None:
            task = asyncio.create_task(self._ask_for(name, manifest), name="announce-manifest")
            self._announcing[key] = task, deadline
            task.add_done_callback(lambda _: self._announcing.pop(key, None))
        stored = self._store.get(digest)
        if now < deadline and not (stored is not None and stored.complete):
            await asyncio.wait([task], timeout=deadline - now)

    async def _ask_for(self, name: ImageName, manifest: Digest) -> None:
        """Ask the tracker for a manifest that is in the store."""
        key = f"{name}@{manifest}"
        try:
            await self._tracked.ask(lambda: self._tracked.manifest(name, manifest, manifest))
            if (found := await self._kept(name, manifest)) is not None:
                await self._note_announced(name, found)
        except P2PDistError as error:
            logger.debug("the tracker was not told of %s: %s", key, error)

    async def _note_announced(self, name: ImageName, found: ImageDocument) -> None:
        """The tracker has been asked for a document: apply the policy that it stated."""
        self._announced[f"{name}@{found.digest}"] = None
        _trim(self._announced, SIZES_MAX)
        document = decode_image(found.data, found.media_type)
        if isinstance(document, ImageManifest) and document.blobs:
            reference = str(ImageReference(name, digest=found.digest))
            manifest = Manifest(document.blobs[0], document.blobs, ())
            await self._learn_policy(reference, found.digest, manifest, self._tracked.policy(found.digest))

    # -- asking

    async def _ask(
        self,
        name: ImageName,
        tracker: Callable[[], Awaitable[Value]],
        upstream: Callable[[UpstreamRepository], Awaitable[Value]],
        *,
        quick: bool = False,
    ) -> Value:
        """Ask the tracker; where none answers, the one that is connected hangs, or it does not know
        the upstream, ask the upstream itself, if this agent was given it. `quick`: something is
        known already, and the tracker is not waited for long."""
        own, tracked = self._registries.is_own(name), self._tracked
        if tracked.connected and (self._registries.is_learned(name) or not own):
            if not own and not quick:
                return await tracker()
            try:
                return await tracked.ask(tracker, KNOWN_WAIT_S if quick else None)
            except Unavailable:
                # Else every agent would ask an upstream that the tracker leaves alone.
                if not own or tracked.answers:
                    raise
        if not own:
            raise _unasked(name)
        return await upstream(self._registries.reader(name))


def _image(reference: ImageReference, documents: list[Digest], manifest: ImageManifest) -> Image:
    if manifest.unnamed:
        raise UsageError(f"{reference} has a blob that is not named by SHA-256: {manifest.unnamed[0]}")
    return Image(reference, documents[0], tuple(documents), manifest.blobs)


def _put(store: BlobStore, name: ImageName, target: str, found: ImageDocument) -> None:
    """Keep a document in the store, and that the target and its digest name it."""
    store.put_document(found.data)
    store.images.record(str(name), tuple(dict.fromkeys((target, str(found.digest)))), found.digest, found.media_type)


def _unasked(name: ImageName) -> Unavailable:
    return Unavailable(
        f"no tracker answers for {name}, and this agent was not given --upstream {name.upstream}",
        remedy="Start the tracker, or give the agent the upstream",
    )


def _trim(table: OrderedDict[str, Value], limit: int) -> None:
    while len(table) > limit:
        table.popitem(last=False)
