"""The blobs of an image, or of a commit of a hub, on their way into the store."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from contextlib import ExitStack, suppress
from typing import Protocol

from p2pdist.agent.pull.blob import BlobPull
from p2pdist.agent.pull.trees import together
from p2pdist.model.digest import Digest
from p2pdist.model.errors import NotFound
from p2pdist.model.hub import HubReference
from p2pdist.model.image import ImageName, ImageReference
from p2pdist.model.image_manifest import Image
from p2pdist.model.manifest import Descriptor
from p2pdist.model.messages import Priority
from p2pdist.model.vouched_list import vouched_layout
from p2pdist.store.blobs.blob import Blob
from p2pdist.store.store import BlobStore

BLOBS_AT_ONCE = 4
"""Blobs of several stripes that one pull fetches at once."""

SMALL_BLOBS_AT_ONCE = 16
"""As many blobs of one stripe, which take little of the link, and wait for a parent each."""

ATTEMPTS = 3
"""Attempts to hold a blob of the store, which may be evicted at the same moment."""


FetchBlob = Callable[[Digest, Priority], Awaitable[tuple[Blob, BlobPull | None]]]
"""Gives a blob, not yet held, and its pull; None when the blob is complete."""


class ImageSource(Protocol):
    """Finds images and fetches their blobs."""

    async def find(self, reference: ImageReference, note: Callable[[str], None]) -> Image:
        """The image that a reference names, for this host's platform."""

    async def fetch_blob(self, name: ImageName, digest: Digest, priority: Priority) -> tuple[Blob, BlobPull | None]:
        """A blob of an image, not yet held, and its pull; None when the blob is complete."""


class HubSnapshot(Protocol):
    """A commit of a repository of a hub, whose files are known."""

    @property
    def commit(self) -> str:
        """Its name."""

    @property
    def blobs(self) -> tuple[Descriptor, ...]:
        """The files that LFS keeps, each content once."""

    async def fetch(self, digest: Digest, priority: Priority) -> tuple[Blob, BlobPull | None]:
        """One of these, not yet held, and its pull; None when the blob is complete."""

    async def bring_documents(self) -> None:
        """Have the other files in the store."""


class HubSource(Protocol):
    """Finds commits of the fleet's hub."""

    async def find(self, reference: HubReference, note: Callable[[str], None]) -> HubSnapshot:
        """The commit that a reference names."""


class ImagePull:
    """Brings the blobs of one image or commit into the store. `cached` hears of bytes that were
    there, `begun` of each blob that is fetched."""

    def __init__(
        self,
        blobs: Sequence[Descriptor],
        fetch: FetchBlob,
        store: BlobStore,
        priority: Priority,
        *,
        cached: Callable[[int], None],
        begun: Callable[[BlobPull], None],
    ) -> None:
        self._blobs, self._fetch, self._store, self._priority = blobs, fetch, store, priority
        self._cached, self._begun = cached, begun
        self._large, self._small = asyncio.Semaphore(BLOBS_AT_ONCE), asyncio.Semaphore(SMALL_BLOBS_AT_ONCE)

    async def run(self) -> None:
        """Return once every blob is here, whole and verified. Raises the first failure."""
        with ExitStack() as holds:
            for blob in self._blobs:  # held first, so that new blobs do not evict those that are here
                here = self._store.get(blob.digest)
                if here is not None and here.complete:
                    with suppress(NotFound):  # evicted this very moment
                        holds.enter_context(here.held())
            await together([self._bring(blob, holds) for blob in self._blobs])

    async def _bring(self, blob: Descriptor, holds: ExitStack) -> None:
        if not blob.size:
            return  # there is nothing to be had of it
        async with self._large if vouched_layout(blob.size).stripes > 1 else self._small:
            for attempt in range(ATTEMPTS):
                try:
                    stored, fetching = await self._fetch(blob.digest, self._priority)
                    holds.enter_context(stored.held())
                    break
                except NotFound:
                    if attempt + 1 == ATTEMPTS:
                        raise
            if fetching is None:
                self._cached(blob.size)
                return
            self._begun(fetching)
            await asyncio.shield(fetching.done)
