"""What a tracker knows of its hub, and the files of LFS as blobs that hosts with a lease read.

The tracker resolves where a file is read once for the fleet; hosts read ranges there themselves,
and ask anew when storage does not take that address any more.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TypeVar
from urllib.parse import quote

import msgspec

from p2pdist.agent.tracker.attention import answer_unless_silent
from p2pdist.agent.tracker.session import TrackerSession
from p2pdist.model.digest import Digest
from p2pdist.model.errors import UNDECODABLE, Corrupt, Unavailable
from p2pdist.model.hub import (
    CLIENT_HEADER,
    HubAdmission,
    HubFile,
    HubLocation,
    HubName,
    HubRevision,
    hub_url,
    is_commit,
)
from p2pdist.origin.huggingface.hub import StaleLocation, UpstreamHub

TRIES_MAX = 3
HUBS_MAX = 16
"""Different hubs that trackers may name while an agent runs."""

Document = TypeVar("Document")
Value = TypeVar("Value")


class TrackedHub:
    """What a tracker knows of its hub. `token` is the client's own, "" for none. Every method
    raises what the tracker answers: NotFound, Refused, Corrupt, Unavailable."""

    def __init__(self, session: TrackerSession) -> None:
        self._session = session

    @property
    def connected(self) -> bool:
        """Whether a tracker answers."""
        return self._session.connected

    async def ask(self, question: Callable[[], Awaitable[Value]]) -> Value:
        """What the tracker answers, for a caller that can go on without it. Raises Unavailable soon
        where the tracker hangs."""
        return await answer_unless_silent(self._session, question)

    async def admission(self, name: HubName, token: str) -> HubAdmission:
        """Whether all clients may read a repository, or the bearer of the token may."""
        return _decoded(await self._get(name, "", {}, token), HubAdmission)

    async def revision(self, name: HubName, revision: str, token: str) -> HubRevision:
        """The commit that a branch, tag or commit names."""
        found = _decoded(await self._get(name, "/revision", {"revision": revision}, token), HubRevision)
        if not is_commit(found.commit):
            raise Corrupt(f"the tracker names no commit for {name} at {revision}")
        return found

    async def listing(self, name: HubName, commit: str, token: str) -> bytes:
        """Everything in a commit."""
        return await self._get(name, "/files", {"commit": commit}, token)

    async def file(self, name: HubName, commit: str, path: str, token: str) -> HubFile:
        """One file of a commit; the tracker lets hosts join its swarm from then on."""
        return _decoded(await self._get(name, "/file", {"commit": commit, "path": path}, token), HubFile)

    async def content(self, name: HubName, commit: str, path: str, token: str) -> bytes:
        """The content of a file that LFS does not keep."""
        return await self._get(name, "/content", {"commit": commit, "path": path}, token)

    async def location(self, name: HubName, commit: str, path: str, token: str, stale: str = "") -> HubLocation:
        """Where a file of LFS is read."""
        query = {"commit": commit, "path": path, **({"stale": stale} if stale else {})}
        return _decoded(await self._get(name, "/location", query, token), HubLocation)

    async def refs(self, name: HubName, token: str) -> bytes:
        """The branches and tags of a repository."""
        return await self._get(name, "/refs", {}, token)

    async def _get(self, name: HubName, rest: str, query: dict[str, str], token: str) -> bytes:
        path = f"/v1/hub/{name.kind}/{quote(name.repository, safe='')}{rest}"
        headers = {CLIENT_HEADER: token} if token else {}
        return (await self._session.exchange(path, query, headers))[1]


class HubStorage:
    """Connections to where files are read, by the hub that names it. On the event loop."""

    def __init__(self) -> None:
        self._hubs: dict[str, UpstreamHub] = {}

    async def read_range(self, location: HubLocation, start: int, length: int, token: str) -> bytes:
        """Bytes of a file; see UpstreamHub.read_range."""
        if location.hub not in self._hubs:
            if len(self._hubs) >= HUBS_MAX:
                raise Unavailable(f"trackers have named {HUBS_MAX} hubs by now", remedy="Restart this agent")
            self._hubs[location.hub] = UpstreamHub(hub_url(location.hub))
        return await self._hubs[location.hub].read_range(location, start, length, token)

    async def close(self) -> None:
        """End the connections."""
        for hub in self._hubs.values():
            await hub.close()


class HubBlob:
    """A file of LFS, to be read where no other host gives it. `token` is that of the client for
    which it is read; it is kept as long as the pull."""

    def __init__(
        self, tracked: TrackedHub, storage: HubStorage, name: HubName, commit: str, path: str, token: str
    ) -> None:
        self._tracked, self._storage, self._token = tracked, storage, token
        self._file = name, commit, path
        self._location: HubLocation | None = None

    @property
    def repository(self) -> str:
        """The name of the repository at the fleet's hub."""
        return str(self._file[0])

    def __eq__(self, other: object) -> bool:
        """Whether the other one reads the same file."""
        return isinstance(other, HubBlob) and (self._tracked, self._file) == (other._tracked, other._file)

    def __hash__(self) -> int:
        return hash((self._tracked, self._file))

    async def read_range(self, digest: Digest, start: int, length: int) -> bytes:
        """`length` bytes of the blob. Raises P2PDistError."""
        if not length:
            return b""
        stale = ""
        for attempt in range(1, TRIES_MAX + 1):
            location = self._location
            if location is None or location.url == stale:
                location = self._location = await self._tracked.location(*self._file, self._token, stale)
            try:
                return await self._storage.read_range(location, start, length, self._token)
            except StaleLocation:
                if attempt == TRIES_MAX:
                    raise
                stale = location.url
        raise AssertionError("the last attempt raises")


def _decoded(data: bytes, kind: type[Document]) -> Document:
    try:
        return msgspec.json.decode(data, type=kind)
    except UNDECODABLE as error:
        raise Corrupt(f"the tracker sent something else than was asked for: {error}") from error
