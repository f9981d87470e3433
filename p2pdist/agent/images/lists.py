"""Tags and referrers of images as they were listed last, in the store: while neither tracker nor
registry answers a host gives them as they were."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Protocol, TypeVar

from p2pdist.agent.images.registries import TrackedImages, UpstreamRegistries
from p2pdist.model.digest import Digest, digest_of
from p2pdist.model.errors import Unavailable
from p2pdist.model.image import ImageName
from p2pdist.model.image_lists import LIST_TYPE, Listed, decode_list, encode_list
from p2pdist.model.image_manifest import ImageDocument, TagPage
from p2pdist.origin.registry.upstream import UpstreamRepository
from p2pdist.store.store import BlobStore

LISTS_MAX = 500
"""Lists that are kept, those that changed last: clients choose pages and types, and records of
manifests, without which an image is not given, are limited as well."""

Answer = TypeVar("Answer")
ListKind = TypeVar("ListKind", TagPage, ImageDocument)


class AskEither(Protocol):
    """Asks the tracker, or where none answers the upstream itself; see Images._ask."""

    async def __call__(
        self,
        name: ImageName,
        tracker: Callable[[], Awaitable[Answer]],
        upstream: Callable[[UpstreamRepository], Awaitable[Answer]],
        *,
        quick: bool = False,
    ) -> Answer: ...


class ImageLists:
    """Asks for lists, and keeps them in the store. On the event loop."""

    def __init__(
        self, store: BlobStore, tracked: TrackedImages, registries: UpstreamRegistries, ask: AskEither
    ) -> None:
        self._store, self._tracked, self._registries, self._ask = store, tracked, registries, ask

    async def tags(self, name: ImageName, n: int, last: str) -> TagPage:
        """See Images.tags."""
        return await self._list(
            name,
            f"tags {n} {last}",
            TagPage,
            lambda: self._tracked.tags(name, n, last),
            lambda upstream: upstream.tags(n, last),
        )

    async def referrers(self, name: ImageName, digest: Digest, artifact_type: str) -> ImageDocument:
        """See Images.referrers."""
        return await self._list(
            name,
            f"referrers {digest} {artifact_type}",
            ImageDocument,
            lambda: self._tracked.referrers(name, digest, artifact_type),
            lambda upstream: upstream.referrers(digest, artifact_type),
        )

    async def _list(
        self,
        name: ImageName,
        key: str,
        kind: type[ListKind],
        tracker: Callable[[], Awaitable[ListKind]],
        upstream: Callable[[UpstreamRepository], Awaitable[ListKind]],
    ) -> ListKind:
        """A list as it is now, else as it was last. `key` has a space, as no tag and no digest
        has: it is kept beside them."""
        kept = await asyncio.to_thread(self._find, str(name), key)
        known = kept if isinstance(kept, kind) else None
        if known is None:
            await self._registries.require(name)
        try:
            found = await self._ask(name, tracker, upstream, quick=known is not None)
        except Unavailable:
            if known is None:
                raise
            return known
        if found != known:
            await asyncio.to_thread(self._keep, str(name), key, found)
        return found

    def _find(self, name: str, key: str) -> Listed | None:
        record = self._store.images.get(name, key)
        data = self._store.read_document(record.digest) if record is not None else None
        return decode_list(data) if data is not None else None

    def _keep(self, name: str, key: str, found: Listed) -> None:
        if (data := encode_list(found)) is not None:
            self._store.put_document(data)
            self._store.images.record(name, (key,), digest_of(data), LIST_TYPE)
            lists = [record for record in self._store.images.list() if record.media_type == LIST_TYPE]
            for record in lists[:-LISTS_MAX]:
                self._store.images.forget(record.name, [record.target])
