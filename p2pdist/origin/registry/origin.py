"""Packages in a repository of an OCI registry (OCI distribution specification 1.1):
`oci://registry/repository`.

One repository holds all packages of an origin, so that blobs are sent once; names.py says which tag
a package has.

A registry removes what no manifest names by itself, at times of its own, and does not tell what it
has. So it is not listed and not collected from here, and the notes by which writers and collections
of an image layout know of each other stay in this process.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import time
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

from aiohttp import ClientResponse
from yarl import URL

from p2pdist.model.digest import Digest, digest_of, is_digest
from p2pdist.model.errors import Corrupt, NotFound, P2PDistError, Refused, TooLarge, UsageError
from p2pdist.model.manifest import DOCUMENT_BYTES_MAX, MANIFEST_BYTES_MAX, MANIFEST_TYPE, Descriptor, Reference
from p2pdist.model.url import redacted
from p2pdist.origin.contract import Tagged
from p2pdist.origin.layout import altered
from p2pdist.origin.registry.client import RegistryClient, read_limited, whole_size
from p2pdist.origin.registry.names import REPOSITORY, TAG, RepositoryNames
from p2pdist.origin.registry.upload import Upload
from p2pdist.origin.registry.whole_read import READ_BYTES, WholeRead

CHUNK_BYTES = 16 << 20
"""Of one request of an upload, which is repeated from where the registry says that it stands."""

TAGS_MAX = 100_000
TAG_PAGE = 1000
LOOKS_AT_ONCE = 8
MANIFESTS_KEPT = 64
_DOCUMENT_TYPES = (
    MANIFEST_TYPE,
    "application/vnd.docker.distribution.manifest.v2+json",
    "application/vnd.oci.image.index.v1+json",
)
_PLACEHOLDER = (
    b'{"schemaVersion":2,"mediaType":"application/vnd.oci.image.manifest.v1+json","config":{"mediaType":'
    b'"application/vnd.oci.empty.v1+json","digest":"sha256:44136fa355b3678a1146ad16f7e8649e94fb4fc21fe77e8310c060f61caaff8a"'
    b',"size":2},"layers":[],"annotations":{"org.p2pdist.untagged":"%s"}}'
)
"""A manifest that names nothing, which a tag is moved to before both are deleted."""


class RegistryOrigin:
    """An Origin in a registry; the Protocol states the contract of each method."""

    def __init__(self, url: str) -> None:
        """Raises UsageError for a URL that names no repository."""
        parts = urlsplit(url)
        self.url = redacted(url)
        repository = parts.path.strip("/")
        if not parts.hostname or not REPOSITORY.match(repository) or parts.fragment:
            raise UsageError(
                f"{self.url!r} names no repository", remedy="Write oci://registry.example.org/team/packages"
            )
        query = parse_qs(parts.query)
        mounts = tuple(query.pop("mount", ()))
        if query or not all(map(REPOSITORY.match, mounts)):
            raise UsageError(
                f"the URL of {self.url!r} has a part that is not used", remedy="Only ?mount=REPOSITORY is known"
            )
        self._client = RegistryClient.of(url, self.url)
        self._names = RepositoryNames(repository, self._client.base, self.url)
        self._upload = Upload(self._client, self._names, mounts)
        self._manifests: OrderedDict[Digest, tuple[str, bytes] | None] = OrderedDict()
        """Media types and bytes of manifests written here, None for those only known to be one."""
        self._notes: dict[str, tuple[float, bytes]] = {}
        self._blobs = _Blobs(self._client, self._names)

    # -- reading

    async def resolve(self, reference: Reference) -> Descriptor:
        target = reference.digest or self._names.tag_of(reference)
        described = await self._head_manifest(target)
        if described is None:
            raise NotFound(
                f"{reference} is not at {self.url}",
                remedy="Check the name, and where it was packed or pushed to",
                origin=self.url,
                reference=str(reference),
            )
        if described.size > MANIFEST_BYTES_MAX:
            raise Corrupt(f"{reference} at {self.url} is a document of {described.size} bytes, not a manifest")
        return described

    async def _head_manifest(self, target: str) -> Descriptor | None:
        """The descriptor of the manifest that a tag or digest names, None where there is none."""
        accept = {"Accept": ", ".join(_DOCUMENT_TYPES)}
        path = self._names.path(f"manifests/{target}")
        async with self._client.request(
            "HEAD", path, self._names.scope("pull"), headers=accept, expect=frozenset({200, 404})
        ) as response:
            if response.status == 404:
                return None
            stated, size = response.headers.get("Docker-Content-Digest", ""), response.content_length
            media_type = response.content_type
        if not is_digest(stated) or size is None:
            data = await self._get_manifest(target)
            stated, size = digest_of(data), len(data)
        if is_digest(target) and stated != target:
            raise _corrupt(Digest(target), self.url, "the registry names another digest")
        _remember(self._manifests, Digest(stated), None)
        return Descriptor(media_type, Digest(stated), size)

    async def _get_manifest(self, target: str, limit: int = MANIFEST_BYTES_MAX) -> bytes:
        accept = {"Accept": ", ".join(_DOCUMENT_TYPES)}
        path = self._names.path(f"manifests/{target}")
        async with self._client.request("GET", path, self._names.scope("pull"), headers=accept) as response:
            return await read_limited(response, limit, self.url)

    async def read(self, digest: Digest, *, limit: int = DOCUMENT_BYTES_MAX) -> bytes:
        kept = self._manifests.get(digest)
        if kept is not None:
            return kept[1]
        readers = (self._get_blob, self._get_manifest)
        first, second = readers[::-1] if digest in self._manifests else readers
        try:
            data = await first(digest, limit)
        except NotFound:
            data = await second(digest, limit)
        if digest_of(data) != digest:
            raise _corrupt(digest, self.url, f"its {len(data)} bytes do not match its digest")
        return data

    async def _get_blob(self, digest: str, limit: int) -> bytes:
        async with self._client.request(
            "GET", self._names.path(f"blobs/{digest}"), self._names.scope("pull")
        ) as response:
            return await read_limited(response, limit, self.url)

    async def read_range(self, digest: Digest, start: int, length: int) -> bytes:
        return await self._blobs.read_range(digest, start, length) if length > 0 else b""

    async def size(self, digest: Digest) -> int | None:
        if digest not in self._manifests and (size := await self._blobs.size(digest)) is not None:
            return size
        described = await self._head_manifest(digest)
        return described.size if described is not None else None

    # -- writing

    async def write_blob(self, digest: Digest, path: Path, *, on_bytes: Callable[[int], None] | None = None) -> int:
        try:
            size = path.stat().st_size
        except OSError as error:
            raise _unreadable(path, error) from error
        if await self.size(digest) == size:
            return 0
        await asyncio.to_thread(_check_file, path, digest)

        async def read(at: int) -> bytes:
            return await asyncio.to_thread(_read_chunk, path, at)

        return size if await self._upload.blob(digest, size, read, on_bytes or (lambda length: None)) else 0

    async def write_document(self, data: bytes) -> Digest:
        digest = digest_of(data)
        if (media_type := _manifest_type(data)) is not None:
            await self._upload.put_manifest(digest, media_type, data)
            _remember(self._manifests, digest, (media_type, data))
        elif await self.size(digest) != len(data):

            async def read(at: int) -> bytes:
                return data[at : at + CHUNK_BYTES]

            await self._upload.blob(digest, len(data), read)
        return digest

    # -- tags

    async def tag(self, reference: Reference, descriptor: Descriptor) -> None:
        data = await self.read(descriptor.digest, limit=MANIFEST_BYTES_MAX)
        media_type = _manifest_type(data) or descriptor.media_type
        await self._upload.put_manifest(self._names.tag_of(reference), media_type, data)

    async def tags(self) -> list[tuple[str, Descriptor]]:
        slots = asyncio.Semaphore(LOOKS_AT_ONCE)

        async def look(tag: str) -> tuple[str, Descriptor] | None:
            async with slots:
                described = await self._head_manifest(tag)
            return (str(self._names.reference_of(tag)), described) if described is not None else None

        found = await asyncio.gather(*(look(tag) for tag in await self._tag_names() if self._names.reference_of(tag)))
        return sorted(entry for entry in found if entry is not None)

    async def listing(self) -> list[Tagged]:
        return [Tagged(name, described) for name, described in await self.tags()]

    async def _tag_names(self) -> list[str]:
        """All tags of the repository, page by page; none where it does not exist yet."""
        names: list[str] = []
        url: URL | None = URL(self._names.path("tags/list")).update_query({"n": str(TAG_PAGE)})
        while url is not None:
            async with self._client.request(
                "GET", url, self._names.scope("pull"), expect=frozenset({200, 404})
            ) as response:
                if response.status == 404:
                    return names
                data = await read_limited(response, DOCUMENT_BYTES_MAX, self.url)
                following = response.links["next"]["url"] if "next" in response.links else None
            try:
                page = json.loads(data).get("tags") or []
                names += [str(name) for name in page if TAG.match(str(name))]
            except (ValueError, AttributeError, TypeError) as error:
                raise Corrupt(f"the list of tags at {self.url} is malformed: {error}") from error
            if len(names) > TAGS_MAX:
                raise TooLarge(f"{self.url} has more than {TAGS_MAX} tags")
            url = self._names.location(str(following)) if following is not None and page else None
        return names

    async def untag(self, reference: Reference) -> Descriptor:
        tag = self._names.tag_of(reference)
        described = await self._head_manifest(tag)
        if described is None:
            raise NotFound(f"{reference} is not at {self.url}", remedy="p2pdist ls --at-origin lists what is")
        try:
            await self._upload.delete(f"manifests/{tag}")
        except Refused:
            # Registries from before version 1.1 of the specification delete manifests alone, with
            # all their tags: so the tag is moved to a manifest of its own first.
            placeholder = _PLACEHOLDER.replace(b"%s", f"{tag} {time.time_ns()}".encode())
            await self.write_document(b"{}")
            await self._upload.put_manifest(tag, MANIFEST_TYPE, placeholder)
            await self._upload.delete(f"manifests/{digest_of(placeholder)}")
        return described

    async def roots(self) -> list[tuple[str, Descriptor]]:
        return await self.tags()

    # -- what a registry does by itself

    async def blobs(self) -> list[tuple[Digest, int, float]]:
        raise UsageError(
            f"{self.url} is a registry, and registries list no blobs",
            remedy="Remove tags with p2pdist rm --at-origin; the registry removes what no manifest names",
        )

    async def remove(self, digests: Sequence[Digest]) -> None:
        for digest in digests:
            await self._upload.delete(f"blobs/{digest}")

    async def remove_unfinished(self, *, dry_run: bool = False) -> tuple[int, int]:
        return 0, 0

    async def notes(self) -> list[tuple[str, float]]:
        return [(name, written) for name, (written, _) in self._notes.items()]

    async def read_note(self, name: str) -> bytes | None:
        note = self._notes.get(name)
        return note[1] if note is not None else None

    async def write_note(self, name: str, data: bytes) -> None:
        self._notes[name] = (time.time(), data)

    async def remove_notes(self, names: Sequence[str]) -> None:
        for name in names:
            self._notes.pop(name, None)

    @contextlib.asynccontextmanager
    async def packing(self, *, alone: bool = False) -> AsyncIterator[None]:
        yield

    async def close(self) -> None:
        self._blobs.close()
        await self._client.close()


class _Blobs:
    """Reads the blobs of one repository."""

    def __init__(self, client: RegistryClient, names: RepositoryNames) -> None:
        self._client, self._names = client, names
        self._whole: dict[Digest, WholeRead] = {}
        """Those that are being read whole, since the registry ignores ranges."""
        self._parked: set[WholeRead] = set()

    def close(self) -> None:
        """End what is being read."""
        for whole in list(self._whole.values()):
            whole.close()

    async def read_range(self, digest: Digest, start: int, length: int) -> bytes:
        """`length` bytes from `start`, not none. Raises what Origin.read_range raises."""
        if digest not in self._whole:
            async with AsyncExitStack() as held:
                response = await held.enter_async_context(self._response(digest, start, length))
                if response.status != 200 or (not start and response.content_length == length):
                    return await _range_of(response, digest, self._client.url, start, length)
                whole = self._whole_of(digest)
                if whole.is_new:
                    whole.begin(response, held.pop_all())
        return await self._whole_of(digest).read(start, length)

    async def size(self, digest: Digest) -> int | None:
        """The size of a blob, None where there is none."""
        path, scope = self._names.path(f"blobs/{digest}"), self._names.scope("pull")
        with contextlib.suppress(Refused):  # storage behind a redirect may take signed GETs alone
            async with self._client.request("HEAD", path, scope, expect=frozenset({200, 404})) as response:
                if response.status == 404 or response.content_length is not None:
                    return response.content_length if response.status == 200 else None
        expect = frozenset({200, 206, 404, 416})
        async with self._client.request("GET", path, scope, headers={"Range": "bytes=0-0"}, expect=expect) as response:
            return whole_size(response)

    def _whole_of(self, digest: Digest) -> WholeRead:
        """The response with all of a blob that its readers share."""
        whole = self._whole.get(digest)
        if whole is None:
            respond, ended = partial(self._response, digest), partial(self._whole.pop, digest, None)
            whole = self._whole[digest] = WholeRead(self._client.url, digest, respond, ended, self._parked)
        return whole

    @contextlib.asynccontextmanager
    async def _response(self, digest: Digest, start: int = 0, length: int = 0) -> AsyncIterator[ClientResponse]:
        """The response to a request for a range of a blob, or with no length for all of it."""
        headers = {"Range": f"bytes={start}-{start + length - 1}"} if length else {}
        path, expect = self._names.path(f"blobs/{digest}"), frozenset({200, 206, 416})
        async with self._client.request(
            "GET", path, self._names.scope("pull"), headers=headers, expect=expect
        ) as response:
            yield response


def _remember(
    manifests: OrderedDict[Digest, tuple[str, bytes] | None], digest: Digest, manifest: tuple[str, bytes] | None
) -> None:
    """Keep a manifest among the last MANIFESTS_KEPT ones."""
    if manifest is not None or digest not in manifests:
        manifests[digest] = manifest
    while len(manifests) > MANIFESTS_KEPT:
        manifests.popitem(last=False)


def _corrupt(digest: str, url: str, why: str) -> Corrupt:
    return Corrupt(f"blob {digest} at {url} is corrupt: {why}", remedy="Delete it there and push it again", blob=digest)


def _manifest_type(data: bytes) -> str | None:
    """The media type of a document that is a manifest; None for any other."""
    if len(data) > MANIFEST_BYTES_MAX or not data.startswith(b"{"):
        return None
    try:
        document = json.loads(data)
    except (ValueError, RecursionError):
        return None
    media_type = document.get("mediaType") if isinstance(document, dict) else None
    return media_type if media_type in _DOCUMENT_TYPES and "schemaVersion" in document else None


def _check_file(path: Path, digest: Digest) -> None:
    """Raises Corrupt unless the file is the blob: a registry would refuse it only at the end."""
    try:
        with path.open("rb") as stream:
            actual = "sha256:" + hashlib.file_digest(stream, "sha256").hexdigest()
    except OSError as error:
        raise _unreadable(path, error) from error
    if actual != digest:
        raise altered(path, digest)


def _read_chunk(path: Path, start: int) -> bytes:
    """Bytes of a file from `start` on. Raises Corrupt where it has none there any more."""
    try:
        with path.open("rb") as stream:
            stream.seek(start)
            chunk = stream.read(CHUNK_BYTES)
    except OSError as error:
        raise _unreadable(path, error) from error
    if not chunk:
        raise Corrupt(f"the file {path} became shorter while it was sent", remedy="Try again when nothing writes to it")
    return chunk


def _unreadable(path: Path, error: OSError) -> P2PDistError:
    if isinstance(error, FileNotFoundError):
        return NotFound(f"there is no file {path}", remedy="Check the path")
    return P2PDistError(f"cannot read {path}: {error.strerror}")


async def _range_of(response: ClientResponse, digest: str, url: str, start: int, length: int) -> bytes:
    """What a response to a request for a range has of it. Raises Corrupt for another range, or for
    less."""
    data = bytearray()
    if response.status == 206 and not response.headers.get("Content-Range", "").startswith(f"bytes {start}-"):
        raise _corrupt(digest, url, "another range was sent than was asked for")
    if response.status != 416:
        async for chunk in response.content.iter_chunked(READ_BYTES):
            data += chunk
            if len(data) >= length:
                break
    if len(data) < length:
        raise _corrupt(digest, url, f"it is truncated: {len(data)} of {length} bytes at offset {start}")
    return bytes(data[:length])
