"""Images of upstream registries, read once for the whole fleet: manifests and indexes with their
media types, tags, referrers, sizes of blobs, and short-lived tokens for the hosts that read blobs.

Theory. Thousands of hosts ask for the same image at the same moment, and registries limit how often
they are asked. So reads of one thing are joined into one; a document, which never changes, is kept
by its digest, over restarts too; a tag's meaning is taken for known for a while, and asked for with
HEAD, which registries do not count, before anything is read again. A registry that asks to be left
alone is left alone by the whole fleet. While it does not answer, what it said last holds.

A digest says nothing of a repository: any digest could be asked for under any name, and a manifest
may name blobs that its repository does not have. So documents are known by name and digest
together, and `confirmed` asks the registry whether a repository has the blobs that its manifest
names.

Only upstreams of the settings are asked, and of these only repositories that a pattern allows.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter, OrderedDict
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import partial
from typing import TypeVar

from p2pdist.model.digest import Digest, digest_of, is_digest
from p2pdist.model.errors import Corrupt, NotFound, P2PDistError, Refused, Unavailable
from p2pdist.model.image import ImageName, ImageReference
from p2pdist.model.image_manifest import (
    INDEX_DEPTH_MAX,
    ImageDocument,
    ImageIndex,
    ImageManifest,
    TagPage,
    decode_image,
)
from p2pdist.model.manifest import Descriptor
from p2pdist.model.pieces import PieceLayout
from p2pdist.model.platform import Platform
from p2pdist.model.upstream import Upstream, UpstreamSettings
from p2pdist.model.vouched_list import vouched_layout
from p2pdist.origin.registry.authentication import PullToken
from p2pdist.origin.registry.upstream import UpstreamRegistry, UpstreamRepository
from tracker.joined_reads import DocumentCache, JoinedReads, remember
from tracker.state.documents import Documents
from tracker.upstreams.lists import LastLists, ListKind
from tracker.upstreams.pauses import Pause

ABSENT_S = 5.0
"""So long an upstream is not asked again for what it did not have."""

WAIT_S = 2.0
"""So long an upstream may take to say what a tag means whose last meaning is known."""

AWAY_S = 5.0
"""So long an upstream that did not answer is not asked for tags whose last meaning is known."""

REFUSED_S = 30.0
"""So long an upstream that refused something is not asked for it again."""

CACHE_BYTES_MAX = 64 << 20
TAGS_MAX = 20_000
MANIFESTS_MAX = 20_000
SIZES_MAX = 200_000
NOTES_MAX = 500
"""Refusals, and repositories that are open to everybody, that are remembered."""

OPEN_S = 60.0
"""So long a registry that asked for no token is taken not to."""

DESCRIBED_S = 60.0
"""So long the core is taken to know how the blobs of a manifest are cut."""

CONFIRMATIONS_AT_ONCE = 8

Value = TypeVar("Value")
Ask = Callable[[UpstreamRepository], Awaitable[Value]]
logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ResolvedImage:
    """What an image means for one platform."""

    digest: Digest
    """Of the index or manifest that its reference names."""
    documents: tuple[Digest, ...]
    """The documents from there to the manifest."""
    parts: Mapping[Digest, int]
    """Config and layers, with their sizes in bytes."""


@dataclass(slots=True)
class _Registry:
    """One upstream, and what it asked of its clients."""

    registry: UpstreamRegistry
    reads: JoinedReads
    pause: Pause
    """Whether it asked to be left alone."""
    away_until: float = 0.0
    """Until when it is taken not to answer."""
    refusals: OrderedDict[str, tuple[float, Refused]] = field(default_factory=OrderedDict)
    """By key of a read until when it is taken to be refused."""

    @classmethod
    def of(cls, upstream: UpstreamSettings) -> _Registry:
        """Raises UsageError where credentials cannot be read."""
        name = f"the registry {upstream.name}"
        pause = Pause(name, "Try again then; give the tracker an account there to be allowed more")
        return cls(UpstreamRegistry(upstream), JoinedReads(name, absent_s=ABSENT_S), pause)

    def require_open(self, key: str) -> None:
        """Raises Refused for a read that was refused a while ago, and Unavailable while the
        upstream asks to be left alone."""
        refusal = self.refusals.get(key)
        if refusal is not None and time.monotonic() < refusal[0]:
            raise Refused(refusal[1].what, remedy=refusal[1].remedy)
        self.pause.require_over()

    def note_failure(self, key: str, error: P2PDistError) -> None:
        """A read failed: note what it says of those to come."""
        if isinstance(error, Refused):
            remember(self.refusals, key, (time.monotonic() + REFUSED_S, error), NOTES_MAX)
        elif asked_s := self.pause.note(error):
            logger.warning("%s; the whole fleet waits for %.0f s", error.what, asked_s)


class Upstreams:
    """The upstreams of a tracker. `documents` outlive it. Raises UsageError where credentials
    cannot be read."""

    def __init__(self, settings: Iterable[UpstreamSettings] = (), documents: Documents | None = None) -> None:
        self._registries = {upstream.name: _Registry.of(upstream) for upstream in settings}
        self.asked: Counter[tuple[str, str]] = Counter()
        """Questions by upstream and what became of them: ok, or the slug of the failure."""
        self._documents = documents
        self._cache: DocumentCache[bytes] = DocumentCache(CACHE_BYTES_MAX)
        self._tags: OrderedDict[str, tuple[float, Descriptor]] = OrderedDict()
        """By `name:tag` when it was asked for, and what it means."""
        self._manifests: OrderedDict[str, Descriptor] = OrderedDict()
        """By `name@digest`: the registry has it under that name."""
        self._sizes: OrderedDict[str, int] = OrderedDict()
        """By `name@digest`, of blobs that manifests name."""
        self._confirmed: OrderedDict[str, None] = OrderedDict()
        """By `name@digest`: the registry has the blob under that name."""
        self._lists = LastLists(documents)
        """Tags and referrers."""
        self._open: OrderedDict[str, float] = OrderedDict()
        """By name until when the repository is taken to be open to all users."""
        self._described: OrderedDict[str, float] = OrderedDict()
        """By `name@digest` when `learned` heard of a manifest's blobs."""
        self.learned: Callable[[tuple[tuple[Digest, PieceLayout], ...]], None] = lambda layouts: None
        """Hears how the blobs of a manifest are cut."""

    @property
    def listed(self) -> list[Upstream]:
        """The upstreams, for agents."""
        known = (registry.registry.settings for registry in self._registries.values())
        return [Upstream(upstream.name, upstream.url, upstream.redirects) for upstream in known]

    async def replace(self, settings: Iterable[UpstreamSettings]) -> None:
        """Go by other settings from now on; those that stay are not disturbed. Raises UsageError
        where credentials cannot be read, and nothing has changed."""
        former, self._registries = self._registries, _replaced(self._registries, settings)
        for name, registry in former.items():
            if self._registries.get(name) is not registry:
                await registry.registry.close()

    async def close(self) -> None:
        """End the connections."""
        for registry in self._registries.values():
            await registry.registry.close()

    # -- manifests

    async def manifest(self, name: ImageName, target: str) -> ImageDocument:
        """The manifest or index that a tag or digest names. Raises NotFound, Refused, Corrupt,
        Unavailable."""
        registry = self._registry(name)
        digest = Digest(target) if is_digest(target) else (await self._meaning(registry, name, target)).digest
        return await self._by_digest(registry, name, digest)

    async def _meaning(self, registry: _Registry, name: ImageName, tag: str) -> Descriptor:
        """What a tag means; while the upstream does not answer, what it meant last."""
        key, now, settings = f"{name}:{tag}", time.monotonic(), registry.registry.settings
        asked_at, known = self._tags.get(key, (0.0, None))
        if known is not None and now - asked_at < settings.tags_ttl_s:
            return known
        known = known or await self._recall(f"image {key}")
        stale = known if settings.serve_stale else None
        if stale is not None and now < max(registry.away_until, registry.pause.until):
            return stale

        async def look_up(repository: UpstreamRepository) -> Descriptor:
            """Keeps what it finds: the client that asked may not have waited for it."""
            found = await self._look_up(repository, name, tag, known)
            remember(self._tags, key, (time.monotonic(), found), TAGS_MAX)
            if found != known:
                await self._note({f"image {key}": found})
            return found

        try:
            async with asyncio.timeout(WAIT_S if stale is not None else None):
                found = await self._ask(registry, name, f"tag {key}", look_up)
        except (Unavailable, TimeoutError) as error:
            if stale is None:
                raise
            registry.away_until = time.monotonic() + AWAY_S
            why = error if isinstance(error, Unavailable) else f"no answer within {WAIT_S:.0f} s"
            logger.warning("%s: the last known meaning of %s is given", why, key)
            return stale
        except NotFound:
            self._tags.pop(key, None)
            raise
        registry.away_until = 0.0
        return found

    async def _look_up(
        self, repository: UpstreamRepository, name: ImageName, target: str, known: Descriptor | None
    ) -> Descriptor:
        """Ask what a tag or digest means; what is known by HEAD alone, where there is HEAD."""
        if known is None:
            found = await repository.manifest(target)
            assert found is not None
            return await self._keep(name, found)
        with suppress(Refused):
            stated = await repository.head(target)
            if stated is not None and stated[0] == known.digest:
                return known
        found = await repository.manifest(target, known=known.digest)
        return await self._keep(name, found) if found is not None else known

    async def _by_digest(self, registry: _Registry, name: ImageName, digest: Digest) -> ImageDocument:
        key = f"{name}@{digest}"
        described = self._manifests.get(key) or await self._recall(f"image {key}")
        data = await self._held(digest) if described is not None else None
        if described is None or data is None:
            described = await self._ask(
                registry, name, f"manifest {key}", lambda repository: self._look_up(repository, name, digest, None)
            )
            data = await self._held(digest)
        if data is None:
            raise Unavailable(f"{key} was evicted as soon as it was read", remedy="Try again")
        self._cache.put(digest, data)
        remember(self._manifests, key, described, MANIFESTS_MAX)
        found = ImageDocument(data, described.media_type, digest)
        self._describe(name, found)
        return found

    async def _keep(self, name: ImageName, found: ImageDocument) -> Descriptor:
        """Keep a document that a registry sent under this name."""
        described = Descriptor(found.media_type, found.digest, len(found.data))
        self._cache.put(found.digest, found.data)
        remember(self._manifests, f"{name}@{found.digest}", described, MANIFESTS_MAX)
        if self._documents is not None:
            await asyncio.to_thread(self._documents.write, found.digest, found.data)
            await self._note({f"image {name}@{found.digest}": described})
        return described

    def _describe(self, name: ImageName, found: ImageDocument) -> None:
        """Note the sizes of a manifest's blobs, and have the core hear of them."""
        key, now = f"{name}@{found.digest}", time.monotonic()
        if now - self._described.get(key, -DESCRIBED_S) < DESCRIBED_S:
            return
        document = decode_image(found.data, found.media_type)
        if isinstance(document, ImageManifest):
            for blob in document.blobs:
                remember(self._sizes, f"{name}@{blob.digest}", blob.size, SIZES_MAX)
            self.learned(tuple((blob.digest, vouched_layout(blob.size)) for blob in document.blobs if blob.size))
        remember(self._described, key, now, MANIFESTS_MAX)

    async def image(self, reference: ImageReference, platform: Platform, *, exact: bool = True) -> ResolvedImage:
        """What an image consists of, for hosts of this platform. Raises what `manifest` does, and
        NotFound where there is none for the platform."""
        found = await self.manifest(reference.name, reference.target)
        digest, documents = found.digest, [found.digest]
        for _ in range(INDEX_DEPTH_MAX):
            document = decode_image(found.data, found.media_type)
            if not isinstance(document, ImageIndex):
                parts = {blob.digest: blob.size for blob in (*document.blobs, *document.foreign)}
                return ResolvedImage(digest, tuple(documents), parts)
            found = await self.manifest(reference.name, document.choose(platform, exact=exact).digest)
            documents.append(found.digest)
        raise Corrupt(f"{reference} is an index of indexes, more than {INDEX_DEPTH_MAX} deep")

    # -- blobs

    async def blob_size(self, name: ImageName, digest: Digest) -> int:
        """The size of a blob of an image. Raises NotFound, Refused, Unavailable."""
        registry, key = self._registry(name), f"{name}@{digest}"
        size = self._sizes.get(key)
        if size is None:
            size = await self._ask(registry, name, f"size {key}", lambda repository: _size(repository, name, digest))
            remember(self._sizes, key, size, SIZES_MAX)
            remember(self._confirmed, key, None, SIZES_MAX)
        if size:
            self.learned(((digest, vouched_layout(size)),))
        return size

    async def confirmed(self, name: ImageName, blobs: Sequence[Digest], of: Digest) -> set[Digest]:
        """The blobs of these, all that the document `of` names, of which the registry says that
        the repository has them. Raises Refused, Unavailable."""
        if await self._recall(f"parts {name}@{of}") is not None:
            return set(blobs)
        asked = list(dict.fromkeys(blobs))
        answers = await self._all_confirmed(name, asked)
        if all(answers):
            await self._note({f"parts {name}@{of}": Descriptor("", of, 0)})
        return {digest for digest, has in zip(asked, answers, strict=True) if has}

    async def has_blob(self, name: ImageName, digest: Digest) -> bool:
        """Whether the registry says that the repository has a blob. That says nothing of what the
        blob names, should it be a manifest. Raises Refused, Unavailable."""
        key = f"{name}@{digest}"
        if key in self._confirmed or await self._recall(f"blob {key}") is not None:
            return True
        has = (await self._all_confirmed(name, [digest]))[0]
        if has:
            await self._note({f"blob {key}": Descriptor("", digest, 0)})
        return has

    async def _all_confirmed(self, name: ImageName, blobs: Sequence[Digest]) -> list[bool]:
        slots = asyncio.Semaphore(CONFIRMATIONS_AT_ONCE)
        registry = self._registry(name)

        async def confirm(digest: Digest) -> bool:
            key = f"{name}@{digest}"
            async with slots:
                if key not in self._confirmed:
                    try:
                        await self._ask(registry, name, f"size {key}", lambda found: _size(found, name, digest))
                    except NotFound:
                        return False
            remember(self._confirmed, key, None, SIZES_MAX)
            return True

        return await asyncio.gather(*map(confirm, blobs))

    async def token(self, name: ImageName) -> PullToken:
        """What lets a host read the blobs of a repository for a while; empty where nothing is asked
        for. Raises Refused where the registry takes an account alone, NotFound, Unavailable."""
        registry, now = self._registry(name), time.monotonic()
        if self._open.get(str(name), now) > now:
            return PullToken("", OPEN_S)
        found = await self._ask(
            registry, name, f"token {name}", lambda repository: registry.registry.pull_token(name.repository)
        )
        if not found.token:
            remember(self._open, str(name), time.monotonic() + OPEN_S, NOTES_MAX)
        return found

    # -- lists

    async def tags(self, name: ImageName, n: int, last: str = "") -> TagPage:
        """Some tags of a repository. Raises NotFound, Refused, Corrupt, Unavailable."""
        return await self._list(name, f"tags {name} {n} {last}", TagPage, lambda repository: repository.tags(n, last))

    async def referrers(self, name: ImageName, digest: Digest, artifact_type: str = "") -> ImageDocument:
        """The index of what refers to a manifest. Raises NotFound, Refused, Corrupt,
        Unavailable."""
        key = f"referrers {name}@{digest} {artifact_type}"
        ask = partial(UpstreamRepository.referrers, digest=digest, artifact_type=artifact_type)
        return await self._list(name, key, ImageDocument, ask)

    async def _list(self, name: ImageName, key: str, kind: type[ListKind], ask: Ask[ListKind]) -> ListKind:
        registry, now = self._registry(name), time.monotonic()
        settings, (asked_at, kept) = registry.registry.settings, await self._lists.find(key, kind)
        stale = kept if settings.serve_stale else None
        if kept is not None and now - asked_at < settings.tags_ttl_s:
            return kept
        if stale is not None and now < max(registry.away_until, registry.pause.until):
            return stale
        try:
            async with asyncio.timeout(WAIT_S if stale is not None else None):
                return await self._ask(registry, name, key, partial(_read_list, self._lists, key, ask))
        except (Unavailable, TimeoutError):
            if stale is None:
                raise
            registry.away_until = time.monotonic() + AWAY_S
            return stale

    # -- asking

    def _registry(self, name: ImageName) -> _Registry:
        """Raises NotFound for an upstream that is not one of the settings, and a repository that no
        pattern allows."""
        registry = self._registries.get(name.upstream)
        if registry is None:
            remedy = f"Start the tracker with --upstream {name.upstream}"
            raise NotFound(f"{name.upstream} is no upstream of this fleet", remedy=remedy)
        if not any(fnmatchcase(name.repository, pattern) for pattern in registry.registry.settings.namespaces):
            raise NotFound(f"{name} is not among the repositories that this fleet may read")
        return registry

    async def _ask(self, registry: _Registry, name: ImageName, key: str, ask: Ask[Value]) -> Value:
        """Ask an upstream, once for all that want the same, unless it is left alone."""
        registry.require_open(key)

        async def asking() -> Value:
            async with registry.pause.question():
                try:
                    found = await ask(registry.registry.repository(name.repository))
                except P2PDistError as error:
                    self.asked[name.upstream, error.slug] += 1
                    registry.note_failure(key, error)
                    raise
            self.asked[name.upstream, "ok"] += 1
            return found

        return await registry.reads.read(key, asking)

    # -- what outlives the tracker

    async def _held(self, digest: Digest) -> bytes | None:
        data, documents = self._cache.get(digest), self._documents
        if data is None and documents is not None:
            data = await asyncio.to_thread(documents.read, digest)
        return data if data is not None and digest_of(data) == digest else None

    async def _note(self, named: dict[str, Descriptor]) -> None:
        if self._documents is not None:
            await asyncio.to_thread(self._documents.note, named)

    async def _recall(self, name: str) -> Descriptor | None:
        return await asyncio.to_thread(self._documents.recall, name) if self._documents is not None else None


def _replaced(former: Mapping[str, _Registry], settings: Iterable[UpstreamSettings]) -> dict[str, _Registry]:
    """The registries of other settings, of which those stay that are set as before."""
    registries = {}
    for upstream in settings:
        known = former.get(upstream.name)
        same = known is not None and known.registry.settings == upstream
        registries[upstream.name] = known if same and known is not None else _Registry.of(upstream)
    return registries


async def _read_list(lists: LastLists, key: str, ask: Ask[ListKind], repository: UpstreamRepository) -> ListKind:
    """A list, which is kept although the client that asked may not have waited for it."""
    found = await ask(repository)
    await lists.keep(key, found)
    return found


async def _size(repository: UpstreamRepository, name: ImageName, digest: Digest) -> int:
    size = await repository.blob_size(digest)
    if size is None:
        raise NotFound(f"{name} has no blob {digest} at its registry")
    return size
