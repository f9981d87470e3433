"""An origin that is an OCI image layout, over any Objects. Writers keep this order: content,
manifest, tag."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import hashlib
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import ParamSpec, TypeVar

from p2pdist.model.digest import Digest, digest_of, hex_of, is_digest
from p2pdist.model.errors import Conflict, Corrupt, NotFound, P2PDistError, TooLarge
from p2pdist.model.manifest import (
    BLOB_NAME,
    DOCUMENT_BYTES_MAX,
    MANIFEST_BYTES_MAX,
    MANIFEST_TYPE,
    Descriptor,
    Reference,
)
from p2pdist.origin.contract import Tagged
from p2pdist.origin.directory import Directory
from p2pdist.origin.index import CREATED, INDEX_BYTES_MAX, Index
from p2pdist.origin.objects import Objects
from p2pdist.origin.temporary_files import stage_directory
from p2pdist.removal import remove_tree

CALLS_MAX = 16
"""Calls to storage at a time; more wait."""
CHUNK_BYTES = 1 << 20
NOTE_BYTES_MAX = 1 << 20
PACKING_WAIT_S = 30.0
BLOBS = "blobs/sha256"
NOTES = ".collection"
INDEX_KEY = "index.json"
LAYOUT_KEY = "oci-layout"
LAYOUT_BODY = b'{"imageLayoutVersion":"1.0.0"}'
TAGS_NAMED_MAX = 10
"""Of a package without the tag that was asked for, so many other tags are named."""

Args = ParamSpec("Args")
Result = TypeVar("Result")


def blob_key(digest: Digest) -> str:
    """Where a blob lies in an image layout."""
    return f"{BLOBS}/{hex_of(digest)}"


class LayoutOrigin:
    """An Origin over Objects; the Protocol states the contract of each method."""

    def __init__(self, objects: Objects) -> None:
        self._objects = objects
        self._threads = ThreadPoolExecutor(CALLS_MAX, thread_name_prefix="origin")

    @property
    def url(self) -> str:
        return self._objects.url

    async def resolve(self, reference: Reference) -> Descriptor:
        if reference.digest is not None:
            size = await self.size(reference.digest)
            if size is None:
                raise self._missing(str(reference))
            if size > MANIFEST_BYTES_MAX:
                raise Corrupt(f"{reference} at {self.url} is a blob of {size} bytes, not a manifest")
            return Descriptor(MANIFEST_TYPE, reference.digest, size)
        index = await self._index()
        descriptor = index.find(str(reference))
        if descriptor is None:
            # Other files' digests are no tags of one thing.
            tags = index.tags_of(reference.name) if reference.name != BLOB_NAME else ()
            raise self._missing(str(reference), tags, reference=str(reference))
        return descriptor

    async def read(self, digest: Digest, *, limit: int = DOCUMENT_BYTES_MAX) -> bytes:
        data = await self._call(self._objects.read, blob_key(digest), limit)
        if data is None:
            raise self._missing(digest)
        if digest_of(data) != digest:
            raise _corrupt(self.url, digest, f"its {len(data)} bytes do not match its digest")
        return data

    async def read_range(self, digest: Digest, start: int, length: int) -> bytes:
        if length <= 0:
            return b""
        data = await self._call(self._objects.read_range, blob_key(digest), start, length)
        if data is None:
            raise self._missing(digest)
        if len(data) > length:
            raise _corrupt(self.url, digest, f"more than the {length} bytes at offset {start} come that were asked for")
        if len(data) < length:
            raise _corrupt(self.url, digest, f"it is truncated: {len(data)} of {length} bytes at offset {start}")
        return data

    async def size(self, digest: Digest) -> int | None:
        return await self._call(self._objects.size, blob_key(digest))

    async def write_blob(self, digest: Digest, path: Path, *, on_bytes: Callable[[int], None] | None = None) -> int:
        try:
            size = path.stat().st_size
        except OSError as error:
            raise _unreadable(path, error) from error
        if await self.size(digest) == size:
            return 0
        stopped = threading.Event()
        chunks = _verified(path, digest, on_bytes, stopped)
        try:
            await self._call(self._objects.write, blob_key(digest), chunks, size)
        finally:
            stopped.set()  # when this call is cancelled its thread would otherwise send the rest
        return size

    async def write_document(self, data: bytes) -> Digest:
        digest = digest_of(data)
        if await self.size(digest) != len(data):
            await self._call(self._objects.write, blob_key(digest), iter((data,)), len(data))
        return digest

    async def tag(self, reference: Reference, descriptor: Descriptor) -> None:
        if await self._call(self._objects.size, LAYOUT_KEY) is None:
            await self._call(self._objects.write, LAYOUT_KEY, iter((LAYOUT_BODY,)), len(LAYOUT_BODY))

        now = datetime.now(UTC).isoformat(timespec="seconds").replace("+00:00", "Z")
        dated = replace(descriptor, annotations={**descriptor.annotations, CREATED: now})

        def edit(data: bytes | None) -> bytes:
            return Index(data, self.url).put(str(reference), dated)

        await self._call(self._objects.update, INDEX_KEY, INDEX_BYTES_MAX, edit)

    async def tags(self) -> list[tuple[str, Descriptor]]:
        return (await self._index()).tags()

    async def listing(self) -> list[Tagged]:
        return (await self._index()).listing()

    async def untag(self, reference: Reference) -> Descriptor:
        await self.roots()  # or a mistyped directory would be made
        removed: list[Descriptor] = []

        def edit(data: bytes | None) -> bytes:
            index = Index(data, self.url)
            removed[:] = [descriptor for name, descriptor in index.roots() if name == str(reference)]
            if not removed:
                raise self._missing(str(reference), index.tags_of(reference.name))
            return index.remove(str(reference))

        await self._call(self._objects.update, INDEX_KEY, INDEX_BYTES_MAX, edit)
        return removed[-1]

    async def roots(self) -> list[tuple[str, Descriptor]]:
        data = await self._call(self._objects.read, INDEX_KEY, INDEX_BYTES_MAX)
        if data is None:
            raise _no_layout(self.url)
        return Index(data, self.url).roots()

    async def blobs(self) -> list[tuple[Digest, int, float]]:
        stored = await self._call(lambda: list(self._objects.list(BLOBS)))
        items = ((f"sha256:{item.key.rpartition('/')[2]}", item) for item in stored)
        return [(Digest(digest), item.size, item.modified_s) for digest, item in items if is_digest(digest)]

    async def remove(self, digests: Sequence[Digest]) -> None:
        await self._call(self._objects.delete, [blob_key(digest) for digest in digests])

    async def remove_unfinished(self, *, dry_run: bool = False) -> tuple[int, int]:
        abandoned = await self._call(lambda: list(self._objects.abandoned(remove=not dry_run)))
        return len(abandoned), sum(size for _, size in abandoned)

    async def notes(self) -> list[tuple[str, float]]:
        stored = await self._call(lambda: list(self._objects.list(NOTES)))
        return [(item.key.rpartition("/")[2], item.modified_s) for item in stored]

    async def read_note(self, name: str) -> bytes | None:
        return await self._call(self._objects.read, f"{NOTES}/{name}", NOTE_BYTES_MAX)

    async def write_note(self, name: str, data: bytes) -> None:
        if len(data) > NOTE_BYTES_MAX:
            raise TooLarge(f"a note of {len(data)} bytes for {self.url} is over the limit of {NOTE_BYTES_MAX}")
        await self._call(self._objects.write, f"{NOTES}/{name}", iter((data,)), len(data))

    async def remove_notes(self, names: Sequence[str]) -> None:
        await self._call(self._objects.delete, [f"{NOTES}/{name}" for name in names])

    @contextlib.asynccontextmanager
    async def packing(self, *, alone: bool = False) -> AsyncIterator[None]:
        end = time.monotonic() + PACKING_WAIT_S
        while (release := await self._call(self._objects.lock, alone=alone)) is None:
            if time.monotonic() > end:
                others = "packages are being packed into it" if alone else "blobs are being removed from it"
                raise Conflict(f"{self.url} is in use: {others}", remedy="Wait until that has ended, then try again")
            await asyncio.sleep(0.02)
        try:
            yield
        finally:
            release()

    async def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def _index(self) -> Index:
        data = await self._call(self._objects.read, INDEX_KEY, INDEX_BYTES_MAX)
        if data is None and not self._objects.writable:
            raise _no_layout(self.url)
        return Index(data, self.url)

    async def _call(self, function: Callable[Args, Result], *args: Args.args, **kwargs: Args.kwargs) -> Result:
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._threads, functools.partial(function, *args, **kwargs))

    def _missing(self, name: str, tags: Sequence[str] = (), **details: str) -> NotFound:
        """`tags` are those that the package has here."""
        remedy = "Check the name, and where it was packed or pushed to"
        more: dict[str, object] = {"origin": self.url, **details}
        if tags:
            more["tags"] = named = list(tags[-TAGS_NAMED_MAX:])
            remedy = f"Its tags there: {', '.join(named)}"
        return NotFound(f"{name} is not at {self.url}", remedy=remedy, **more)


class LocalLayout(LayoutOrigin):
    """A layout in a directory of this machine, into which finished files can be moved."""

    def __init__(self, directory: Path) -> None:
        self._directory = Directory(directory.absolute())
        super().__init__(self._directory)

    @property
    def directory(self) -> Path:
        return self._directory.root

    def blob_path(self, digest: Digest) -> Path:
        """Where the blob lies, or would lie."""
        return self._directory.path(blob_key(digest))

    def scratch(self) -> Path:
        """An existing directory on the same file system for unfinished files; makes the layout's
        directory where needed."""
        self._make()
        return self._directory.incoming()

    def temporary_directory(self) -> contextlib.AbstractContextManager[Path]:
        """A new directory on the same file system for unfinished files; gone with what is left in
        it when the block ends. It is locked meanwhile, so no other process takes the files for
        what a killed process left."""
        return self._directory.temporary_directory()

    @contextlib.contextmanager
    def stage_directory(self, purpose: str) -> Iterator[Path]:
        """A directory like that of temporary_directory, with the same name each time for one
        purpose: what is packed from there is known by its path. While another process has it, the
        name is another one."""
        with contextlib.ExitStack() as stack:
            try:
                made = stack.enter_context(stage_directory(self.scratch(), purpose))
            except Conflict:
                made = stack.enter_context(self.temporary_directory()) / "work"
                made.mkdir(mode=0o700)
                stack.callback(remove_tree, made)
            yield made

    @contextlib.asynccontextmanager
    async def packing(self, *, alone: bool = False) -> AsyncIterator[None]:
        self._make()
        async with super().packing(alone=alone):
            if not alone:
                await self._call(self._directory.incoming)
            yield

    def _make(self) -> None:
        try:
            self._directory.root.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise P2PDistError(
                f"cannot make the layout directory {self._directory.root}: {error.strerror}",
                remedy="Name another one with --layout",
            ) from error

    async def import_file(self, digest: Digest, path: Path) -> None:
        """Move a finished file whose digest the caller computed into place."""
        await self._call(self._directory.import_file, blob_key(digest), path)


def _corrupt(url: str, digest: Digest, why: str) -> Corrupt:
    return Corrupt(f"blob {digest} at {url} is corrupt: {why}", remedy="Delete it there and push it again", blob=digest)


def _no_layout(url: str) -> NotFound:
    return NotFound(f"there is no image layout at {url}: it has no {INDEX_KEY}", remedy="Check the address")


def _verified(
    path: Path, digest: Digest, on_bytes: Callable[[int], None] | None, stopped: threading.Event
) -> Iterator[bytes]:
    """The chunks of a file; raises Corrupt at the end unless they add up to `digest`, and
    P2PDistError once `stopped`."""
    hasher = hashlib.sha256()
    try:
        with path.open("rb") as stream:
            while chunk := stream.read(CHUNK_BYTES):
                if stopped.is_set():
                    raise P2PDistError(f"sending {digest} was cancelled")
                hasher.update(chunk)
                yield chunk
                if on_bytes:
                    on_bytes(len(chunk))
    except OSError as error:
        raise _unreadable(path, error) from error
    if "sha256:" + hasher.hexdigest() != digest:
        raise altered(path, digest)


def altered(path: Path, digest: Digest) -> Corrupt:
    """The failure of sending a file that is not the blob that it was taken for: one of a layout, or
    a file of the user, which may change after it was hashed."""
    return Corrupt(
        f"the file {path} is not blob {digest}: it was altered",
        remedy="Try again when nothing writes to it; a blob of a layout has to be deleted, and packed or fetched again",
    )


def _unreadable(path: Path, error: OSError) -> P2PDistError:
    if isinstance(error, FileNotFoundError):
        return NotFound(f"there is no file {path}", remedy="Check the path")
    return P2PDistError(f"cannot read {path}: {error.strerror}")
