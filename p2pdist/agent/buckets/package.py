"""A bucket with the files of a package, which may be on their way.

Roots and catalogs of the package's trees say what is in it: they are brought for the first request,
nothing else is. The first GET for a content that is not here begins the pull of the whole package,
as any pull does. Until a content is an object of the store its bytes are given chunk by chunk, each
verified; the chunk that a client waits for comes before all else, those behind it right after it,
and the rest in the order of the stripes. From then on the kernel sends from the object.

A tag is looked up again every REFRESH_S. Requests go on with the version that they began with.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from email.utils import formatdate

from aiohttp import web

from p2pdist.agent.bodies import Count
from p2pdist.agent.buckets.files import PackageFiles, files_of
from p2pdist.agent.lazy.chunks import Chunks, Whereabouts
from p2pdist.agent.lazy.view import images_of, layout_of
from p2pdist.agent.pull.packages import Package, Packages
from p2pdist.agent.pull.pulls import Pulls, check_whole
from p2pdist.agent.pull.registry import Registry
from p2pdist.agent.pull.trees import Sources, together
from p2pdist.core.demand.reading_queue import SHORT_BYTES, Reading
from p2pdist.gateway.answers import Sent
from p2pdist.gateway.s3.contract import Objects
from p2pdist.gateway.s3.failures import S3Failure
from p2pdist.model.device import DeviceChunk, DeviceLayout
from p2pdist.model.errors import NotFound, P2PDistError, Unavailable
from p2pdist.model.manifest import CATALOG_TYPE, TREE_TYPE, Descriptor, Manifest, Reference
from p2pdist.model.messages import PullRequest
from p2pdist.model.tree import File
from p2pdist.store.store import BlobStore
from p2pdist.store.trees.missing_contents import Missing
from p2pdist.transfer.connections import in_use
from p2pdist.transfer.stream.ranges import RUN_BYTES, RangeOptions, serve_content
from p2pdist.transfer.stream.sendfile import Connection

REFRESH_S = 30.0
REFRESH_WAIT_S = 1.0
"""So long requests wait for what a tag means now, and then go on with what it meant: those that
come while it is still looked up do so at once."""

AHEAD_BYTES = 8 << 20
"""So much behind the chunk that a client waits for is brought as well."""

IDLE_S = 300.0
"""A client that takes nothing of what is there for it for so long is left: requests are limited."""

ATTEMPTS = 3
"""So often what a request needs may be evicted meanwhile."""

_lookers = ThreadPoolExecutor(2, thread_name_prefix="s3-looks")
"""For what may take as long as reading a file of any size: all else goes on meanwhile."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class BucketContext:
    """What buckets need of their agent."""

    store: BlobStore
    packages: Packages
    pulls: Pulls
    registry: Registry
    count: Count


class PackageVersion(PackageFiles):
    """One version of a package: its files, and the pull that brings them. On the event loop."""

    def __init__(
        self, context: BucketContext, package: Package, files: dict[bytes, File], layout: DeviceLayout
    ) -> None:
        super().__init__(files)
        self.digest, self.layout, self._context = package.digest, layout, context
        self._pinned = f"{package.reference.name}@{package.digest}"
        """What is pulled: the tag may move meanwhile."""
        self._beginning: asyncio.Task[Chunks] | None = None
        """The pull that is under way, as far as its plan."""
        self._looks: dict[bytes, asyncio.Future[None]] = {}
        """Looks at objects that are in doubt, by content: each takes as long as reading it."""

    def has(self, content: bytes) -> bool:
        """Whether a content is an object of the store."""
        return content in self._context.store.objects

    async def has_sound(self, content: bytes) -> bool:
        """Whether a content is an object of the store, and what it was when it was verified."""
        integrity = self._context.store.integrity
        if self.has(content) and await asyncio.to_thread(integrity.doubts, content):  # S3 clients compare nothing
            look = self._looks.get(content)
            if look is None:
                loop = asyncio.get_running_loop()
                look = self._looks[content] = loop.run_in_executor(_lookers, integrity.look_at_object, content)
                look.add_done_callback(lambda _: self._looks.pop(content))
            await asyncio.shield(look)  # which goes on for the next request
        return self.has(content)

    def open(self, content: bytes) -> int | None:
        """Open the object with a content; None where it is gone, and then the store knows so. In a
        thread."""
        store = self._context.store
        try:
            return os.open(store.objects.path(content), os.O_RDONLY | os.O_CLOEXEC)
        except NotFound:  # evicted
            return None
        except FileNotFoundError:
            store.trees.drop_objects({content})
            return None

    async def chunks(self) -> Chunks:
        """The chunks of the package, with its pull begun or joined. Raises what pulling raises."""
        if self._beginning is None:
            self._beginning = asyncio.create_task(self._begin())
        return await asyncio.shield(self._beginning)

    async def _begin(self) -> Chunks:
        chunks = Chunks(self._context.store, self._context.registry, "start")
        planned = asyncio.Event()

        def plan(package: Package, incomplete: Sequence[Missing], sources: Sources) -> None:
            chunks.whereabouts = Whereabouts.of(incomplete, sources)
            planned.set()

        known = asyncio.create_task(planned.wait())
        try:
            pull = self._context.pulls.start(PullRequest(package=self._pinned), planned=plan)
            assert pull.task is not None
            pull.task.add_done_callback(self._ended)
            await asyncio.wait([pull.task, known], return_when=asyncio.FIRST_COMPLETED)
            if pull.error is not None:
                raise pull.error
        except BaseException:
            self._beginning = None
            raise
        finally:
            known.cancel()
        return chunks

    def _ended(self, _: object) -> None:
        """The pull has ended: everything is here, or the next request begins another one."""
        self._beginning = None

    def arrived_bytes(self, chunks: Chunks) -> int:
        """How many bytes of the packs are here."""
        blobs = (self._context.store.get(part.digest) for part, _ in chunks.whereabouts.sources.values())
        return sum(len(blob.have) * blob.layout.piece_size for blob in blobs if blob is not None)


class PackageBucket:
    """The bucket of a package. On the event loop."""

    def __init__(self, name: str, reference: Reference, context: BucketContext) -> None:
        self.name, self._reference, self._context = name, reference, context
        self._version: PackageVersion | None = None
        self._looked_at = float("-inf")
        """When the tag was looked up last, in the event loop's time."""
        self._began_at = float("-inf")
        """When it was begun to look it up last."""
        self._looking: asyncio.Task[PackageVersion] | None = None

    @property
    def names(self) -> tuple[str, ...]:
        """The names by which rules know what is in it."""
        return (self._reference.name,)

    async def objects(self, key: bytes = b"") -> Objects:
        """What the tag means now, or meant a moment ago, whatever the key."""
        loop, version = asyncio.get_running_loop(), self._version
        if version is not None and (self._reference.digest or loop.time() - self._looked_at < REFRESH_S):
            return version
        if self._looking is None:
            self._looking, self._began_at = asyncio.create_task(self._look()), loop.time()
            self._looking.add_done_callback(self._looked)
        looking = self._looking
        if version is None:
            return await asyncio.shield(looking)
        if (wait_s := self._began_at + REFRESH_WAIT_S - loop.time()) > 0:
            await asyncio.wait([looking], timeout=wait_s)
        return self._version or version

    def _looked(self, task: asyncio.Task[PackageVersion]) -> None:
        self._looking = None
        error = None if task.cancelled() else task.exception()
        if error is not None:
            logger.warning("what the bucket %s has is not known anew: %s", self.name, error)

    async def _look(self) -> PackageVersion:
        loop = asyncio.get_running_loop()
        try:
            package = await self._context.packages.find(self._reference, lambda _: None)
            if self._version is None or self._version.digest != package.digest:
                self._version = await self._read(package)
        finally:
            self._looked_at = loop.time()
        return self._version

    async def _read(self, package: Package) -> PackageVersion:
        """What is in a package, by its roots and catalogs."""
        manifest, store = package.manifest, self._context.store
        if manifest.is_sealed:
            raise S3Failure(
                501,
                "NotImplemented",
                f"the bucket {self.name} has no objects: {package.reference} is encrypted, and the files of encrypted"
                " packages are not served one by one. Mount it and read the files",
            )
        if images_of(manifest):
            raise S3Failure(
                501,
                "NotImplemented",
                f"the bucket {self.name} has no objects: {package.reference} has layers that are SquashFS images,"
                " whose files are not served one by one. Pack it with --format tree, or mount it and read the files",
            )

        def read() -> PackageVersion:
            layers, layout, _ = layout_of(store, manifest)
            files = files_of([layer for layer in layers if layer is not None], str(package.reference))
            return PackageVersion(self._context, package, files, layout)

        for attempt in range(ATTEMPTS):
            with ExitStack() as holds:
                try:
                    await self._bring(manifest, holds)
                    return await asyncio.to_thread(read)
                except NotFound:  # evicted this very moment
                    if attempt + 1 == ATTEMPTS:
                        raise
        raise AssertionError("the last attempt returns or raises")

    async def _bring(self, manifest: Manifest, holds: ExitStack) -> None:
        parts = [part for part in (*manifest.layers, *manifest.parts) if part.media_type in (TREE_TYPE, CATALOG_TYPE)]

        async def bring(part: Descriptor) -> None:
            blob, pull = await self._context.registry.fetch(part, "start")
            holds.enter_context(blob.held())
            if pull is not None:
                if blob.pieces_digest != part.pieces_digest:  # it came by another list than the manifest names
                    await check_whole(blob, pull.piece)
                await asyncio.shield(pull.done)

        await together(map(bring, parts))

    async def send(self, request: web.Request, objects: Objects, key: bytes, deadline: float) -> Sent:
        """Answer a GET or HEAD for a file; see gateway.s3.contract.Bucket."""
        assert isinstance(objects, PackageVersion)
        file, info, sent = objects.file(key), objects.describe(key), 0
        assert info is not None
        source = "store" if objects.has(file.content) else "swarm"

        def count(length: int) -> None:
            nonlocal sent
            sent += length
            self._context.count(source, length)

        content = FileContent(objects, file, count)
        head = {"Last-Modified": formatdate(max(0.0, info.modified_s), usegmt=True)}
        options = RangeOptions(head, begin_by=deadline, sent=count, idle_s=IDLE_S, refuses_nothing=True)
        try:
            with in_use(request):
                response = await serve_content(request, info.tag, info.size, content, options=options)
        finally:
            content.close()
        expected = response.content_length if request.method == "GET" and response.status in (200, 206) else 0
        return Sent(response, source, sent >= (expected or 0))


class FileContent:
    """The bytes of one file for one request. Holds at most one chunk in memory. `sent` hears how
    many bytes were sent. On the event loop."""

    def __init__(self, version: PackageVersion, file: File, sent: Callable[[int], None]) -> None:
        self._version, self._content, self._sent = version, file.content, sent
        self._first: tuple[DeviceChunk, bytes] | None = None
        """The chunk with which the body begins."""
        self._ahead: asyncio.Task[None] | None = None
        self._reading = Reading(short=False)
        self._look_at = 0
        """From this byte of the file on it is looked what to bring next."""

    async def begin(self, position: int, end: int, by: float | None) -> None:
        """Wait for the first chunk; see transfer.stream.ranges.Content."""
        self._reading = Reading(end - position <= SHORT_BYTES)
        chunks: Chunks | None = None
        before = 0
        try:
            async with asyncio.timeout_at(by):
                if await self._version.has_sound(self._content):
                    return
                chunks = await self._version.chunks()
                before = self._version.arrived_bytes(chunks)
                self._first = await self._chunk(position, end)
        except TimeoutError:
            if chunks is None or self._version.arrived_bytes(chunks) <= before:
                raise Unavailable("no byte has come in the time that a client may wait", remedy="Ask again") from None

    async def send(self, connection: Connection, start: int, end: int) -> None:
        """Send bytes as they come, from the object once there is one."""
        while start < end:
            if self._first is None and self._version.has(self._content):
                start = await self._send_object(connection, start, end)
                continue
            chunk, data = self._first or await self._chunk(start, end)
            self._first = None
            part = memoryview(data)[start - chunk.offset : end - chunk.offset]
            await connection.send(part)
            self._sent(len(part))
            start += len(part)

    async def _send_object(self, connection: Connection, start: int, end: int) -> int:
        """Send from the object; returns how far, which is nowhere where it is gone."""
        file = await asyncio.to_thread(self._version.open, self._content)
        if file is None:
            return start
        try:
            while start < end:
                length = min(RUN_BYTES, end - start)
                await connection.send_file(file, start, length)
                self._sent(length)
                start += length
        finally:
            os.close(file)
        return start

    async def _chunk(self, position: int, end: int) -> tuple[DeviceChunk, bytes]:
        """The chunk with the byte at `position` of the file, for a body that ends at `end`. Raises
        P2PDistError."""
        needed = next(self._version.layout.range_chunks(self._content, position, position + 1))
        for attempt in range(ATTEMPTS):
            chunks = await self._version.chunks()
            self._look_ahead(chunks, needed, end)
            try:
                return needed, await chunks.read(needed, self._reading)
            except NotFound as error:  # it went after the pull was planned: another pull brings it
                if attempt + 1 == ATTEMPTS:
                    raise Unavailable(error.what, remedy="Ask again: another pull brings it") from error
        raise AssertionError("the last attempt returns or raises")

    def _look_ahead(self, chunks: Chunks, needed: DeviceChunk, end: int) -> None:
        if needed.offset < self._look_at:
            return
        start = needed.offset + needed.length
        self._look_at = start + AHEAD_BYTES // 2
        self._leave_ahead()
        following = list(self._version.layout.range_chunks(self._content, start, min(end, start + AHEAD_BYTES)))
        ahead = _bring(chunks, following, self._reading) if following and start < end else None
        self._ahead = asyncio.create_task(ahead) if ahead is not None else None

    def close(self) -> None:
        """The client waits no longer. Idempotent."""
        self._reading.over = True
        self._leave_ahead()

    def _leave_ahead(self) -> None:
        if self._ahead is not None:
            self._ahead.cancel()


async def _bring(chunks: Chunks, following: Sequence[DeviceChunk], reading: Reading) -> None:
    with suppress(P2PDistError):  # the body meets it as well
        await chunks.bring(following, reading=reading)
