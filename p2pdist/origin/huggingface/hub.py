"""Repositories of an upstream hub: whether a client may read one, its revisions, the files of a
commit, small files, and where large ones are read.

What a hub says is checked where it can be: names and sizes in listings, a small file against its
git object id, a range against the range that was asked for. A large file is checked by what reads
it, against the SHA-256 by which the listing names it.

Hints at other ways to fetch a file, such as content-addressed storage, are left out: everything
comes by plain HTTP.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Annotated, TypeVar
from urllib.parse import quote

import aiohttp
import msgspec
from msgspec import Meta
from yarl import URL

from p2pdist.model.errors import UNDECODABLE, Corrupt, NotFound, Refused, Unavailable, UsageError
from p2pdist.model.hub import (
    FILE_BYTES_MAX,
    FILES_MAX,
    SMALL_BYTES_MAX,
    HubDirectory,
    HubFile,
    HubListing,
    HubLocation,
    HubName,
    HubRevision,
    check_listed,
    check_listing,
    failure,
    git_oid,
    is_commit,
)
from p2pdist.origin.huggingface.client import HubClient

TIMEOUT_S = 30.0
"""How long a document may take in all."""

LISTING_TIMEOUT_S = 300.0
RANGE_TIMEOUT_S = 60.0
RANGE_BYTES_S_MIN = 64 << 10
"""A range may take RANGE_TIMEOUT_S, and as much more as it has bytes at this rate."""

RANGE_BYTES_MAX = 32 << 20
READ_BYTES = 1 << 20
INFO_BYTES_MAX = 32 << 20
PAGE_BYTES_MAX = 16 << 20
PAGES_MAX = 1000
REFS_BYTES_MAX = 8 << 20

_STALE = frozenset({400, 401, 403})
"""How storage answers for an address whose time is over."""

_GONE = frozenset({404, 410})

_RANGE = re.compile(r"bytes ([0-9]{1,19})-([0-9]{1,19})/(?:[0-9]{1,19}|\*)\Z")


class StaleLocation(Unavailable):
    """Storage does not take an address any more."""

    slug = "stale-location"


class _Lfs(msgspec.Struct):
    oid: str
    size: Annotated[int, Meta(ge=0, le=FILE_BYTES_MAX)]


class _Entry(msgspec.Struct):
    type: str
    path: str
    oid: str
    size: Annotated[int, Meta(ge=0, le=FILE_BYTES_MAX)] = 0
    lfs: _Lfs | None = None


class _Sibling(msgspec.Struct):
    rfilename: str = ""


class _Revision(msgspec.Struct):
    sha: str
    siblings: list[_Sibling] | None = None


class _Gate(msgspec.Struct):
    gated: bool | str = False
    private: bool = False


class UpstreamHub:
    """One hub. `token` is the client's own, "" for none. Every failure of the hub is NotFound,
    Refused, Corrupt or Unavailable, the last with `retry_after` seconds where the hub asks to be
    left alone. On one event loop."""

    def __init__(self, url: str) -> None:
        self.url = url
        self._client = HubClient(url)

    async def close(self) -> None:
        """End the connections."""
        await self._client.close()

    # -- documents

    async def admit(self, name: HubName, token: str) -> None:
        """Raises NotFound or Refused for a repository whose files the bearer of `token` may not
        read."""
        async with self._in_time(TIMEOUT_S):
            try:
                async with self._client.request("GET", self._api(name, "/auth-check"), token=token):
                    return
            except NotFound as error:
                if error.details.get("hub_code"):
                    raise
            # Mirrors and hubs of other makers may not have that route.
            async with self._client.request("GET", self._api(name), token=token) as response:
                gate = _decoded(await self._client.read_body(response, INFO_BYTES_MAX), _Gate, self.url)
            if gate.gated:
                raise failure(Refused(f"{name} is gated at {self.url}, which does not say for whom"), "GatedRepo", 403)

    async def revision(self, name: HubName, revision: str, token: str = "") -> HubRevision:
        """The commit that a branch, tag or commit names, and what the hub says of it."""
        url = self._api(name, f"/revision/{quote(revision, safe='')}")
        async with self._in_time(TIMEOUT_S), self._client.request("GET", url, token=token) as response:
            data = await self._client.read_body(response, INFO_BYTES_MAX)
        commit = await asyncio.to_thread(_commit, data, name, self.url)
        if is_commit(revision) and commit != revision:
            raise Corrupt(f"{self.url} names another commit for {name} at {revision}")
        return HubRevision(commit, msgspec.Raw(data))

    async def listing(self, name: HubName, commit: str, token: str = "") -> HubListing:
        """Everything in a commit, checked."""
        entries: list[_Entry] = []
        url: URL | None = self._api(name, f"/tree/{commit}").update_query(recursive="true", expand="false")
        async with self._in_time(LISTING_TIMEOUT_S):
            for _ in range(PAGES_MAX):
                if url is None:
                    break
                async with self._client.request("GET", url, token=token) as response:
                    page = await self._client.read_body(response, PAGE_BYTES_MAX)
                    following = response.links["next"]["url"] if "next" in response.links else None
                entries += _decoded(page, list[_Entry], self.url)
                if len(entries) > FILES_MAX:
                    raise Refused(f"{name} at {commit} has more than {FILES_MAX} files, which is over the limit")
                url = self._following(URL(str(following))) if following else None
            else:
                raise Refused(f"{self.url} lists {name} at {commit} in more than {PAGES_MAX} pages")
        return await asyncio.to_thread(_listing, name, commit, entries)

    async def refs(self, name: HubName, token: str = "") -> bytes:
        """The branches and tags of a repository, as the hub lists them."""
        url = self._api(name, "/refs")
        async with self._in_time(TIMEOUT_S), self._client.request("GET", url, token=token) as response:
            data = await self._client.read_body(response, REFS_BYTES_MAX)
        _decoded(data, dict[str, msgspec.Raw], self.url)
        return data

    # -- files

    async def plain_file(self, name: HubName, commit: str, file: HubFile, token: str = "") -> bytes:
        """The content of a file that LFS does not keep, verified."""
        if file.size > SMALL_BYTES_MAX:
            raise Refused(
                f"{file.path} of {name} has {file.size} bytes and is not kept by LFS, which is over the limit",
                remedy=f"Have its owner keep files over {SMALL_BYTES_MAX >> 20} MiB in LFS",
            )
        url = self._file(name, commit, file)
        with _of_file():
            async with self._in_time(RANGE_TIMEOUT_S), self._client.request("GET", url, token=token) as response:
                data = await self._client.read_body(response, SMALL_BYTES_MAX)
        if len(data) != file.size or git_oid(data) != file.oid:
            raise Corrupt(
                f"{self.url} sent something else for {file.path} of {name} at {commit} than it lists",
                remedy="Try again; if it stays so, tell the hub's operator",
            )
        return data

    async def location(self, name: HubName, commit: str, file: HubFile, token: str = "") -> HubLocation:
        """Where a file of LFS is read: for a while, and by whatever knows the address, where it is
        not at the hub itself."""
        url = self._file(name, commit, file)
        expect = frozenset({200, 301, 302, 303, 307, 308})
        with _of_file():
            async with (
                self._in_time(TIMEOUT_S),
                self._client.request("HEAD", url, token=token, expect=expect, follow="home") as response,
            ):
                return self._stated(response, name, file)

    def _stated(self, response: aiohttp.ClientResponse, name: HubName, file: HubFile) -> HubLocation:
        """Where the answer to a HEAD says that a file of LFS is. Raises Corrupt where it says
        something else of the file than the listing."""
        stated = response.headers.get("X-Linked-Size", "")
        if stated.isdecimal() and len(stated) < 20 and int(stated) != file.size:
            raise Corrupt(f"{self.url} states {stated} bytes of {file.path} of {name}, and lists {file.size}")
        tag = response.headers.get("X-Linked-ETag", "").removeprefix("W/").strip('"')
        if tag and tag != file.sha256:
            raise Corrupt(f"{self.url} gives another content for {file.path} of {name} than it lists")
        if response.status == 200:
            return HubLocation(str(response.url), self.url)
        return HubLocation(str(response.url.join(URL(response.headers["Location"], encoded=True))), self.url)

    async def read_range(self, location: HubLocation, start: int, length: int, token: str = "") -> bytes:
        """Bytes of a file of LFS, as storage sends them: only its SHA-256 can show whether they are
        right. Raises StaleLocation where the address is not taken any more."""
        if length > RANGE_BYTES_MAX:
            raise UsageError(f"a range of {length} bytes is over the limit of {RANGE_BYTES_MAX}")
        url, headers = URL(location.url, encoded=True), {"Range": f"bytes={start}-{start + length - 1}"}
        expect = frozenset({200, 206, 416}) | _STALE | _GONE
        async with (
            self._in_time(RANGE_TIMEOUT_S + length / RANGE_BYTES_S_MIN),
            self._client.request("GET", url, token=token, headers=headers, expect=expect) as response,
        ):
            if response.status in _GONE:
                raise failure(NotFound(f"{url.host} does not have a file that the hub names"), "EntryNotFound", 404)
            if response.status in _STALE:
                raise StaleLocation(f"{url.host} does not give a file any more: {response.status}")
            match = _RANGE.match(response.headers.get("Content-Range", ""))
            whole = response.status == 200 and not start and response.content_length == length
            if response.status == 200 and not whole:
                raise Refused(f"{url.host} sends files whole alone, and no ranges of them")
            if response.status == 206 and (
                match is None or (int(match[1]), int(match[2])) != (start, start + length - 1)
            ):
                raise Corrupt(f"{url.host} sent another range than was asked for")
            if response.headers.get("Content-Encoding", "identity") != "identity":
                raise Corrupt(f"{url.host} encodes a file on its way, which changes its bytes")
            data = bytearray()
            if response.status != 416:
                async for chunk in response.content.iter_chunked(READ_BYTES):
                    data += chunk
                    if len(data) > length:
                        break
        if len(data) != length:
            raise Corrupt(f"{url.host} sent {len(data)} bytes of {length} at offset {start}", remedy="Try again")
        return bytes(data)

    # -- addresses

    def _api(self, name: HubName, rest: str = "") -> URL:
        return URL(f"{self.url}/api/{name.kind}/{name.repository}{rest}", encoded=True)

    def _file(self, name: HubName, commit: str, file: HubFile) -> URL:
        return URL(f"{self.url}/{name.path}/resolve/{commit}/{quote(file.path)}", encoded=True)

    def _following(self, url: URL) -> URL:
        """The next page of a listing, which is at the hub itself."""
        if not self._client.is_own(url) or "/tree/" not in url.path:
            raise Refused(f"{self.url} sends listings on to {url.origin()}")
        return url

    @asynccontextmanager
    async def _in_time(self, seconds: float) -> AsyncIterator[None]:
        try:
            async with asyncio.timeout(seconds):
                yield
        except TimeoutError as error:
            raise Unavailable(f"{self.url} does not answer in time", remedy="Try again later") from error


def _commit(data: bytes, name: HubName, url: str) -> str:
    """The commit that a hub describes. Some clients take the names of files from there, so they are
    checked as in a listing; takes a while where there are many."""
    found = _decoded(data, _Revision, url)
    if not is_commit(found.sha):
        raise Corrupt(f"{url} names no commit for {name}")
    for sibling in found.siblings or ():
        if sibling.rfilename:
            check_listed(f"{name} at {found.sha}", sibling.rfilename)
    return found.sha


def _listing(name: HubName, commit: str, entries: list[_Entry]) -> HubListing:
    """What a hub lists, checked; takes a while where there are many files."""
    files = tuple(
        HubFile(entry.path, entry.lfs.size, entry.oid, entry.lfs.oid.removeprefix("sha256:"))
        if entry.lfs is not None
        else HubFile(entry.path, entry.size, entry.oid)
        for entry in entries
        if entry.type == "file"
    )
    directories = tuple(HubDirectory(entry.path, entry.oid) for entry in entries if entry.type == "directory")
    return check_listing(name, HubListing(commit, files, directories))


@contextmanager
def _of_file() -> Iterator[None]:
    """Of a listed file a 404 without a code says that the file is missing; clients would take it
    for the repository."""
    try:
        yield
    except NotFound as error:
        if not error.details.get("hub_code"):
            failure(error, "EntryNotFound", 404)
        raise


_Document = TypeVar("_Document")


def _decoded(data: bytes, kind: type[_Document], url: str) -> _Document:
    try:
        return msgspec.json.decode(data, type=kind)
    except UNDECODABLE as error:
        raise Corrupt(f"{url} sent something else than was asked for: {' '.join(str(error).split())[:200]}") from error
