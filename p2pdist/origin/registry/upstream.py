"""Images of an upstream registry (OCI distribution specification 1.1, "Pull" and "Content
Discovery"): manifests with their media types as they are, ranges of blobs, tags and referrers.

What a registry says is checked where it can be: a document against its digest, a range against
the range that was asked for. Nothing else about a registry is trusted; sizes, names and times have
limits.

Some registries, or the storage behind them, ignore Range and send a blob whole. Then all readers of
one blob in this process share a response that runs forward through the blob (whole_read.py).
"""

from __future__ import annotations

import asyncio
import json
import logging
import re
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

from aiohttp import ClientResponse
from yarl import URL

from p2pdist.model.digest import EMPTY_DIGEST, Digest, digest_of, hex_of, is_digest, parse_digest
from p2pdist.model.errors import (
    Corrupt,
    NotFound,
    Refused,
    TooLarge,
    Unavailable,
    UsageError,
)
from p2pdist.model.image import ImageName, image_name, is_tag
from p2pdist.model.image_manifest import (
    ACCEPTED_TYPES,
    EMPTY_INDEX,
    INDEX_TYPE,
    SIZE_MAX,
    ImageDocument,
    TagPage,
    clean_media_type,
    decode_image,
)
from p2pdist.model.manifest import MANIFEST_BYTES_MAX
from p2pdist.model.upstream import UpstreamSettings
from p2pdist.origin.registry.accounts import Accounts, docker_accounts
from p2pdist.origin.registry.authentication import PullToken, TokenSource
from p2pdist.origin.registry.client import RegistryClient, read_limited, whole_size
from p2pdist.origin.registry.whole_read import READ_BYTES, WholeRead

DOCUMENT_TIMEOUT_S = 30.0
"""How long a manifest, a list or a size may take in all."""

RANGE_TIMEOUT_S = 60.0
RANGE_BYTES_S_MIN = 64 << 10
"""A range may take RANGE_TIMEOUT_S, and as much more as it has bytes at this rate."""

RANGE_BYTES_MAX = 32 << 20
TRIES_MAX = 2
PAUSE_MAX_S = 1.0
"""Clients wait for what is read here, and have another registry to ask: so a busy upstream is left
alone soon."""

RANGES_AGAIN_S = 300.0
"""So long a registry that ignored a range is taken to have none: it may have been one machine of
many, or a proxy on the way."""

TAGS_BYTES_MAX = 4 << 20
TAG_PAGE_MAX = 1000
PAGES_MAX = 100
REFERRERS_MAX = 1000
logger = logging.getLogger(__name__)
_RANGE = re.compile(r"bytes ([0-9]{1,19})-([0-9]{1,19})/(?:[0-9]{1,19}|\*)\Z")


class UpstreamRegistry:
    """One upstream, and the connections to it. Failures name the upstream as users write it."""

    def __init__(self, settings: UpstreamSettings, *, source: TokenSource | None = None) -> None:
        """`source` is asked for tokens before the registry's own realm. Raises UsageError where
        the file with its credentials cannot be read."""
        self.settings = settings
        base = URL(settings.url)
        config = Path(settings.credentials) if settings.credentials else None
        accounts: Accounts = docker_accounts(base.authority, config)
        self._client = RegistryClient(
            f"the registry {settings.name}",
            base,
            accounts,
            source,
            tries_max=TRIES_MAX,
            pause_max_s=PAUSE_MAX_S,
            redirects=settings.redirects,
        )
        self._ranges: tuple[float, bool] | None = None
        """When it was seen last whether blobs can be read by ranges (time.monotonic)."""
        self._whole: dict[Digest, WholeRead] = {}
        self._parked: set[WholeRead] = set()

    @property
    def ranges(self) -> bool | None:
        """Whether blobs can be read by ranges; None while that is to be found out."""
        seen_at, ranges = self._ranges or (0.0, None)
        return None if ranges is False and time.monotonic() - seen_at >= RANGES_AGAIN_S else ranges

    def note_ranges(self, ranges: bool) -> None:
        """A response shows whether blobs can be read by ranges."""
        if not ranges and self.ranges is not False:
            logger.warning("the registry %s ignores Range: blobs are read whole", self.settings.name)
        self._ranges = time.monotonic(), ranges

    def repository(self, name: str) -> UpstreamRepository:
        """A repository of it. Raises UsageError for what no repository is called."""
        return UpstreamRepository(self, self._client, image_name(self.settings.name, name))

    async def pull_token(self, repository: str) -> PullToken:
        """What lets another host read a repository; empty where nothing is asked for. Raises
        Refused, NotFound, Unavailable."""
        async with _in_time(self.settings.name, DOCUMENT_TIMEOUT_S):
            return await self._client.pull_token(image_name(self.settings.name, repository).repository)

    def whole(self, repository: UpstreamRepository, digest: Digest) -> WholeRead:
        """The response that all readers of a blob share."""
        running = self._whole.get(digest)
        if running is None:
            running = self._whole[digest] = WholeRead(
                str(repository.name),
                digest,
                partial(repository.blob_response, digest),
                lambda: self._whole.pop(digest, None),
                self._parked,
            )
        return running

    async def close(self) -> None:
        """End the connections."""
        for running in list(self._whole.values()):
            running.close()
        await self._client.close()


class UpstreamRepository:
    """One repository of an upstream. Every failure of the registry is NotFound, Refused, Corrupt,
    TooLarge or Unavailable, the last with `retry_after` seconds where the registry asks to be left
    alone."""

    def __init__(self, registry: UpstreamRegistry, client: RegistryClient, name: ImageName) -> None:
        self.name = name
        self._registry, self._client = registry, client
        self._scope = f"repository:{name.repository}:pull"
        self._probing = asyncio.Lock()

    def __eq__(self, other: object) -> bool:
        """Whether the other one reads the same repository by the same connections."""
        return isinstance(other, UpstreamRepository) and (self._registry, self.name) == (other._registry, other.name)

    def __hash__(self) -> int:
        return hash((self._registry, self.name))

    @property
    def ranges(self) -> bool | None:
        """Whether blobs can be read by ranges; None while that is to be found out."""
        return self._registry.ranges

    # -- manifests

    async def manifest(
        self, target: str, accept: tuple[str, ...] = ACCEPTED_TYPES, *, known: Digest | None = None
    ) -> ImageDocument | None:
        """The manifest or index that a tag or digest names, verified; None where it still is the
        one with the digest `known`."""
        _check_target(target)
        headers = {"Accept": ", ".join(accept)}
        if known is not None:
            headers["If-None-Match"] = f'"{known}"'
        async with self._request("GET", f"manifests/{target}", headers, frozenset({200, 304})) as response:
            if response.status == 304 and known is not None:
                return None
            data, stated = await self._small(response, MANIFEST_BYTES_MAX), _stated(response)
            media_type = clean_media_type(response.headers.get("Content-Type", ""))
        digest = digest_of(data)
        for expected in (target if is_digest(target) else "", stated):
            if expected and digest != expected:
                raise Corrupt(
                    f"{self.name} at its registry sent {digest} as {expected}", remedy="Tell the registry's operator"
                )
        kind = decode_image(data, media_type).media_type
        return None if digest == known else ImageDocument(data, kind, digest)

    async def head(self, target: str, accept: tuple[str, ...] = ACCEPTED_TYPES) -> tuple[Digest, int, str] | None:
        """Digest, size and media type of what a tag or digest names; None where there is nothing.
        Registries that count what each client pulls do not count this."""
        _check_target(target)
        headers = {"Accept": ", ".join(accept)}
        try:
            async with self._request("HEAD", f"manifests/{target}", headers, frozenset({200})) as response:
                stated, size = _stated(response), response.content_length
                media_type = clean_media_type(response.headers.get("Content-Type", ""))
        except NotFound:
            return None
        if not stated or size is None or media_type not in ACCEPTED_TYPES:
            found = await self.manifest(target, accept)
            assert found is not None
            return found.digest, len(found.data), found.media_type
        if is_digest(target) and stated != target:
            raise Corrupt(f"{self.name} at its registry calls {target} {stated}")
        return stated, size, media_type

    # -- blobs

    async def blob_size(self, digest: Digest) -> int | None:
        """The size of a blob; None where the repository has none of this digest."""
        parse_digest(digest)
        try:
            async with self._request("HEAD", f"blobs/{digest}", {}, frozenset({200})) as response:
                if response.content_length is not None:
                    return _possible(response.content_length, self.name, digest)
        except NotFound:
            return None
        except Refused:
            pass  # storage behind a redirect may take signed GETs alone
        try:
            async with self._request(
                "GET", f"blobs/{digest}", {"Range": "bytes=0-0"}, frozenset({200, 206, 416})
            ) as response:
                return _possible(whole_size(response), self.name, digest)
        except NotFound:
            return None

    async def read_range(self, digest: Digest, start: int, length: int) -> bytes:
        """Bytes of a blob, as the registry sends them: only the blob's digest can show whether they
        are right. Raises Corrupt where there are fewer."""
        parse_digest(digest)
        if length <= 0:
            return b""
        if length > RANGE_BYTES_MAX:
            raise UsageError(f"a range of {length} bytes is over the limit of {RANGE_BYTES_MAX}")
        async with _in_time(self.name.upstream, RANGE_TIMEOUT_S + length / RANGE_BYTES_S_MIN):
            if self._registry.ranges is None:
                async with self._probing:
                    if self._registry.ranges is None:
                        data = await self._first_range(digest, start, length)
                        if data is not None:
                            return data
            if self._registry.ranges:
                return await self._range(digest, start, length)
            return await self._registry.whole(self, digest).read(start, length)

    async def _first_range(self, digest: Digest, start: int, length: int) -> bytes | None:
        """Read a range, and find out whether there are any. None where a response with the whole
        blob came instead, which is not thrown away: all readers of the blob share it, and the one
        that found out waits for its bytes as they do."""
        async with AsyncExitStack() as held:
            response = await held.enter_async_context(self.blob_response(digest, start, length))
            if response.status != 200 or (not start and response.content_length == length):
                data = await self._taken(response, digest, start, length)
                if response.status == 206:
                    self._registry.note_ranges(True)
                return data
            self._registry.note_ranges(False)
            whole = self._registry.whole(self, digest)
            if whole.is_new:
                whole.begin(response, held.pop_all())
        return None

    async def _range(self, digest: Digest, start: int, length: int) -> bytes:
        async with self.blob_response(digest, start, length) as response:
            if response.status == 200 and (start or response.content_length != length):
                self._registry.note_ranges(False)
            else:
                return await self._taken(response, digest, start, length)
        return await self._registry.whole(self, digest).read(start, length)

    @asynccontextmanager
    async def blob_response(self, digest: Digest, start: int = 0, length: int = 0) -> AsyncIterator[ClientResponse]:
        """The response to a request for a range of a blob, or with no length for all of it: 206 or
        200, as the registry does it, or 416."""
        headers = {"Range": f"bytes={start}-{start + length - 1}"} if length else {}
        expect = frozenset({200, 206, 416})
        where = self._path(f"blobs/{digest}")
        async with self._client.request("GET", where, self._scope, headers=headers, expect=expect) as response:
            if response.headers.get("Content-Encoding", "identity") != "identity":
                raise Corrupt(f"{self.name}: the registry encodes {digest} on its way, which changes its bytes")
            if response.status == 206 and not _is_range(response, start, length):
                raise Corrupt(f"{self.name}: another range of {digest} was sent than was asked for")
            yield response

    async def _taken(self, response: ClientResponse, digest: Digest, start: int, length: int) -> bytes:
        data = bytearray()
        if response.status != 416:
            async for chunk in response.content.iter_chunked(READ_BYTES):
                data += chunk
                if len(data) > length:
                    break
        if len(data) != length:
            raise Corrupt(
                f"{self.name}: the registry sent {len(data)} bytes of {length} of {digest} at offset {start}",
                remedy="Try again; if it stays so, the registry's copy is damaged",
            )
        return bytes(data)

    # -- lists

    async def tags(self, n: int = TAG_PAGE_MAX, last: str = "") -> TagPage:
        """Up to `n` tags after the tag `last`, in the registry's order."""
        if last and not is_tag(last):
            raise UsageError(f"{last[:100]!r} is no tag")
        wanted = max(0, min(n, TAG_PAGE_MAX))
        names: list[str] = []
        query = {"n": str(wanted or 1), **({"last": last} if last else {})}
        url: URL | None = URL(self._path("tags/list")).update_query(query)
        for _ in range(PAGES_MAX):
            if url is None or len(names) > wanted:
                break
            async with self._request("GET", url, {}, frozenset({200})) as response:
                page = _tags_in(await self._small(response, TAGS_BYTES_MAX), self.name)
                url = self._following(response) if page else None
            if not names and url is None and (not last or last in page or len(page) > wanted):
                page = sorted(tag for tag in page if tag > last)  # a registry without pages sends all tags
            names += page
        return TagPage(tuple(names[:wanted]), len(names) > wanted or url is not None)

    async def referrers(self, digest: Digest, artifact_type: str = "") -> ImageDocument:
        """The index of what refers to a manifest, such as signatures. A registry that has no list
        of these keeps them under a tag (specification, "Unavailable Referrers API")."""
        parse_digest(digest)
        listed: list[Any] = []
        query = {"artifactType": artifact_type} if artifact_type else {}
        url: URL | None = URL(self._path(f"referrers/{digest}")).update_query(query)
        for _ in range(PAGES_MAX):
            if url is None or len(listed) >= REFERRERS_MAX:
                break
            try:
                async with self._request("GET", url, {"Accept": INDEX_TYPE}, frozenset({200})) as response:
                    kind = clean_media_type(response.headers.get("Content-Type", ""))
                    data = await self._small(response, MANIFEST_BYTES_MAX)
                    url = self._following(response)
            except NotFound:
                return await self._tagged_referrers(digest, artifact_type)
            if kind != INDEX_TYPE and not listed:
                return await self._tagged_referrers(digest, artifact_type)
            listed += _manifests_in(data, self.name)
        return _referrers(listed, artifact_type)

    async def _tagged_referrers(self, digest: Digest, artifact_type: str) -> ImageDocument:
        try:
            found = await self.manifest(f"sha256-{hex_of(digest)}", (INDEX_TYPE,))
        except NotFound:
            return ImageDocument(EMPTY_INDEX, INDEX_TYPE, digest_of(EMPTY_INDEX))
        assert found is not None
        return _referrers(_manifests_in(found.data, self.name), artifact_type)

    # -- requests

    def _path(self, rest: str) -> str:
        return f"/v2/{self.name.repository}/{rest}"

    @asynccontextmanager
    async def _request(
        self, method: str, path: str | URL, headers: dict[str, str], expect: frozenset[int]
    ) -> AsyncIterator[ClientResponse]:
        where = path if isinstance(path, URL) else self._path(path)
        async with (
            _in_time(self.name.upstream, DOCUMENT_TIMEOUT_S),
            self._client.request(method, where, self._scope, headers=headers, expect=expect) as response,
        ):
            yield response

    async def _small(self, response: ClientResponse, limit: int) -> bytes:
        if response.headers.get("Content-Encoding", "identity") != "identity":
            raise Corrupt(f"{self.name}: the registry encodes what it sends, which changes its digest")
        try:
            return await read_limited(response, limit, f"the registry {self.name.upstream}")
        except TooLarge as error:  # the caller did not ask for too much: the registry sent it
            raise Corrupt(error.what, remedy="Tell the registry's operator") from error

    def _following(self, response: ClientResponse) -> URL | None:
        """The next page of a list, which is at the registry itself."""
        if "next" not in response.links:
            return None
        url = URL(str(response.links["next"]["url"]))
        at_home = url.origin() == response.url.origin() == URL(self._registry.settings.url).origin()
        if not at_home or not url.path.startswith("/v2/"):
            raise Refused(f"the registry {self.name.upstream} sends lists on to {url.origin()}")
        return url


@asynccontextmanager
async def _in_time(upstream: str, seconds: float) -> AsyncIterator[None]:
    """Raises Unavailable where what is done within takes longer."""
    try:
        async with asyncio.timeout(seconds):
            yield
    except TimeoutError as error:
        raise Unavailable(f"the registry {upstream} does not answer in time", remedy="Try again later") from error


def _check_target(target: str) -> None:
    """Raises UsageError for what is neither a tag nor a digest: it becomes part of a path."""
    if not is_tag(target) and not is_digest(target):
        raise UsageError(f"{target[:100]!r} is neither a tag nor a digest")


def _stated(response: ClientResponse) -> Digest | None:
    """The digest that a registry states of a manifest."""
    digest = response.headers.get("Docker-Content-Digest", "")
    return Digest(digest) if is_digest(digest) else None


def _possible(size: int | None, name: ImageName, digest: Digest) -> int | None:
    if size is not None and (not 0 <= size <= SIZE_MAX or (size == 0) != (digest == EMPTY_DIGEST)):
        raise Corrupt(f"{name}: the registry states an impossible size of {digest}: {size}")
    return size


def _is_range(response: ClientResponse, start: int, length: int) -> bool:
    """Whether a partial response is the range that was asked for, or the part of it that is
    there."""
    match = _RANGE.match(response.headers.get("Content-Range", ""))
    return match is not None and int(match[1]) == start and start <= int(match[2]) < start + max(1, length)


def _tags_in(data: bytes, name: ImageName) -> list[str]:
    try:
        listed = json.loads(data).get("tags") or []
        return [tag for tag in listed if isinstance(tag, str) and is_tag(tag)]
    except (ValueError, AttributeError, TypeError, RecursionError) as error:
        raise Corrupt(f"the list of tags of {name} is malformed: {error}") from error


def _manifests_in(data: bytes, name: ImageName) -> list[Any]:
    try:
        listed = json.loads(data)["manifests"]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise Corrupt(f"the list of referrers of {name} is malformed: {error!r}") from error
    if not isinstance(listed, list) or not all(isinstance(entry, dict) for entry in listed):
        raise Corrupt(f"the list of referrers of {name} is malformed")
    return listed


def _referrers(listed: list[Any], artifact_type: str) -> ImageDocument:
    chosen = [entry for entry in listed if not artifact_type or entry.get("artifactType") == artifact_type]
    document = {"schemaVersion": 2, "mediaType": INDEX_TYPE, "manifests": chosen[:REFERRERS_MAX]}
    data = json.dumps(document, separators=(",", ":")).encode()
    return ImageDocument(data, INDEX_TYPE, digest_of(data))
