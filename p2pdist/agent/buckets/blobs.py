"""A bucket of blobs that have keys: each is an object, also while it is on its way.

Where keys and bytes come from is said by `NamedBlobs`: here the settings name blobs of the origin,
and any other list of files whose digests are known beforehand may be shown in the same way.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from email.utils import formatdate
from functools import partial
from typing import Protocol

from aiohttp import web

from p2pdist.agent.bodies import BlobBodies, Brought, demanded
from p2pdist.agent.buckets.package import IDLE_S, BucketContext
from p2pdist.agent.pull.trees import together
from p2pdist.gateway.answers import Sent
from p2pdist.gateway.s3.contract import ObjectInfo, Objects
from p2pdist.model.digest import Digest
from p2pdist.model.errors import NotFound, Unavailable
from p2pdist.transfer.stream.ranges import RangeOptions, serve_content
from p2pdist.transfer.stream.sendfile import Connection

DESCRIBED_AT_ONCE = 16

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class NamedBlob:
    """A blob: its SHA-256, its size in bytes, and when it was changed, in seconds since the epoch,
    0 where that is not known."""

    digest: Digest
    size: int
    modified_s: float = 0.0


class NamedBlobs(Protocol):
    """Files of which size and digest are known before their bytes have come: of a repository, of an
    origin. On the event loop; raises P2PDistError."""

    @property
    def names(self) -> Sequence[str]:
        """The names by which rules know what they are; none where only identities that may read
        everything may read them."""

    async def blobs(self, key: bytes = b"") -> Mapping[bytes, NamedBlob]:
        """The files by key, UTF-8, with `key` that one alone. Nothing of their bytes is fetched."""

    async def fetch(self, blob: NamedBlob) -> Brought:
        """A blob, and its pull, started or joined; None when it is complete."""


class BlobObjects:
    """The objects of a bucket of blobs."""

    def __init__(self, blobs: Mapping[bytes, NamedBlob]) -> None:
        self.blobs = blobs
        self.keys: Sequence[bytes] = sorted(blobs)

    def describe(self, key: bytes) -> ObjectInfo | None:
        """What is known of an object: its tag is the digest."""
        blob = self.blobs.get(key)
        return ObjectInfo(blob.size, str(blob.digest), blob.modified_s) if blob is not None else None


class BlobBucket:
    """The bucket of some blobs. On the event loop."""

    def __init__(self, name: str, source: NamedBlobs, context: BucketContext) -> None:
        self.name, self._source = name, source
        self._bodies = BlobBodies(context.store, context.count)

    @property
    def names(self) -> Sequence[str]:
        """The names by which rules know what is in it."""
        return self._source.names

    async def objects(self, key: bytes = b"") -> Objects:
        """What is in it now, with a key that object alone: it waits for no other one."""
        return BlobObjects(await self._source.blobs(key))

    async def send(self, request: web.Request, objects: Objects, key: bytes, deadline: float) -> Sent:
        """Answer a GET or HEAD for a blob; see gateway.s3.contract.Bucket."""
        assert isinstance(objects, BlobObjects)
        named = objects.blobs[key]
        head = {"Last-Modified": formatdate(max(0.0, named.modified_s), usegmt=True)}
        options = RangeOptions(head, begin_by=deadline, idle_s=IDLE_S, refuses_nothing=True)
        if request.method == "HEAD":  # which brings nothing
            return Sent(await serve_content(request, named.digest, named.size, _NOTHING, options=options))
        fetch = partial(self._source.fetch, named)
        return await self._bodies.send(request, named.digest, fetch, options, read=partial(demanded, request))


class _Nothing:
    """The body of an answer to HEAD."""

    async def begin(self, position: int, end: int, by: float | None) -> None:
        raise AssertionError("HEAD has no body")

    async def send(self, connection: Connection, start: int, end: int) -> None:
        raise AssertionError("HEAD has no body")


_NOTHING = _Nothing()


class OriginBlobs:
    """Blobs of the origin that settings give keys. To clients they were changed when the settings
    were read: a key may have named another blob before."""

    def __init__(self, digests: Mapping[bytes, Digest], context: BucketContext) -> None:
        self.names: Sequence[str] = ()
        self._digests, self._context, self._since_s = digests, context, time.time()
        self._known: dict[Digest, NamedBlob] = {}
        """Blobs whose size is known."""
        self._slots = asyncio.Semaphore(DESCRIBED_AT_ONCE)

    async def blobs(self, key: bytes = b"") -> Mapping[bytes, NamedBlob]:
        """Those of the blobs, with `key` of that one, that the origin has. One that it lacks is
        looked for again."""
        asked = self._digests if not key else {key: self._digests[key]} if key in self._digests else {}
        missing = [digest for digest in set(asked.values()) if digest not in self._known]
        await together(map(self._describe, missing))  # none goes on for a request that has failed
        return {name: self._known[digest] for name, digest in asked.items() if digest in self._known}

    async def _describe(self, digest: Digest) -> None:
        async with self._slots:
            try:
                descriptor = await self._context.registry.describe(digest)
            except NotFound:
                logger.warning("%s, which a bucket names, is nowhere: push it to the origin", digest)
                return
        self._known[digest] = NamedBlob(digest, descriptor.size, self._since_s)

    async def fetch(self, blob: NamedBlob) -> Brought:
        """A blob, and its pull, started or joined."""
        store = self._context.store
        stored = store.get(blob.digest)
        if stored is not None and stored.complete:
            return stored, None
        pull = await self._context.pulls.blob(blob.digest)
        here = pull.blob if pull is not None else store.get(blob.digest)
        if here is None or (pull is None and not here.complete):
            raise Unavailable(f"{blob.digest} was here and is gone again", remedy="Ask again")
        return here, pull
