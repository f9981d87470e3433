"""Talking to the agent of this host over its Unix socket (docs/protocol.md, the local API)."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

import aiohttp
import msgspec

from p2pdist.model.errors import P2PDistError, Unavailable, UsageError, from_problem
from p2pdist.model.messages import (
    MountRequest,
    MountStatus,
    PinRequest,
    PinStatus,
    PullRequest,
    PullStatus,
    Removed,
    Verified,
    VerifyRequest,
)

DEFAULT_SOCKET = Path("/run/p2pdist/agent.sock")
SOCKET_PATH_BYTES_MAX = 107
"""sockaddr_un.sun_path has 108 bytes, the last of which is zero (unix(7))."""

POLL_S = 0.2
ANSWER_BYTES_MAX = 64 << 20
CONNECT_S_MAX = 10.0
REQUEST_S_MAX = 60.0
PIN_S_MAX = MOUNT_S_MAX = 3600.0
"""Unpacking a large package takes minutes."""

AWAY_S_MAX = 5.0
"""How long a pull is asked after while the agent does not answer, as when it is being restarted."""

_T = TypeVar("_T")


class _Mounts(msgspec.Struct):
    mounts: list[MountStatus]


class _Packages(msgspec.Struct):
    packages: list[dict[str, Any]]


class _Pins(msgspec.Struct):
    pins: list[PinStatus]


class LocalClient:
    """A client of one agent; an asynchronous context manager. Every call raises the failure that the agent reports, or Unavailable when
    no agent answers."""

    def __init__(self, socket_path: Path = DEFAULT_SOCKET) -> None:
        length = len(os.fsencode(socket_path))
        if length > SOCKET_PATH_BYTES_MAX:
            raise UsageError(
                f"the socket path {socket_path} has {length} bytes; Unix sockets allow {SOCKET_PATH_BYTES_MAX}",
                remedy="Give a shorter one with --socket or P2PDIST_SOCKET",
            )
        self._path = socket_path
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> LocalClient:
        self._session = aiohttp.ClientSession(
            base_url="http://agent",
            connector=aiohttp.UnixConnector(path=str(self._path)),
            timeout=aiohttp.ClientTimeout(total=REQUEST_S_MAX, sock_connect=CONNECT_S_MAX),
        )
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._session is not None:
            await self._session.close()

    async def pull(self, request: PullRequest, on_progress: Callable[[PullStatus], None] | None = None) -> PullStatus:
        """Start a pull and follow it to its end, with `on_progress` told every POLL_S seconds. Raises why the pull failed."""
        status = await self._ask("POST", "/v1/pulls", PullStatus, body=request)
        answered = time.monotonic()
        while True:
            if on_progress is not None:
                on_progress(status)
            if status.state == "done":
                return status
            if status.state == "failed":
                raise from_problem(status.error or {"detail": f"the pull of {status.reference} failed"})
            await asyncio.sleep(POLL_S)
            try:
                status = await self._ask("GET", f"/v1/pulls/{status.id}", PullStatus)
                answered = time.monotonic()
            except Unavailable:
                if time.monotonic() - answered > AWAY_S_MAX:
                    raise

    async def mount(self, request: MountRequest) -> MountStatus:
        """Show a package that is in the store, or hand out its images."""
        return await self._ask("POST", "/v1/mounts", MountStatus, body=request, timeout_s=MOUNT_S_MAX)

    async def unmount(self, path: str, force: bool = False) -> None:
        """Take down what is shown at `path`."""
        query = {"path": path, "force": "1" if force else "0"}
        await self._ask("DELETE", "/v1/mounts", None, query=query, timeout_s=MOUNT_S_MAX)

    async def mounts(self) -> list[MountStatus]:
        """What the agent shows."""
        return (await self._ask("GET", "/v1/mounts", _Mounts)).mounts

    async def packages(self) -> list[dict[str, Any]]:
        """Packages in the store: reference, digest, size (bytes), complete."""
        return (await self._ask("GET", "/v1/packages", _Packages)).packages

    async def remove(self, reference: str) -> Removed:
        """Remove a package from the store."""
        return await self._ask("DELETE", "/v1/packages", Removed, query={"reference": reference})

    async def collect(self) -> Removed:
        """Remove what nothing names."""
        return await self._ask("POST", "/v1/collect", Removed, timeout_s=MOUNT_S_MAX)

    async def pin(self, reference: str, owner: str = "") -> PinStatus:
        """Pull a package and keep it."""
        return await self._ask("POST", "/v1/pins", PinStatus, body=PinRequest(reference, owner), timeout_s=PIN_S_MAX)

    async def unpin(self, reference: str = "", owner: str = "") -> PinStatus:
        """Keep a package no longer."""
        return await self._ask("DELETE", "/v1/pins", PinStatus, query={"package": reference, "owner": owner})

    async def pins(self) -> list[PinStatus]:
        """Who keeps what."""
        return (await self._ask("GET", "/v1/pins", _Pins)).pins

    async def verify(self, request: VerifyRequest, on_progress: Callable[[Verified], None]) -> Verified:
        """Read everything in the store, with `on_progress` told now and then; returns what was found in the end."""
        assert self._session is not None, "a LocalClient is used inside `async with`"
        last = Verified(0, 0, ())
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_S_MAX)
        try:
            async with self._session.post("/v1/verify", data=_encode(request), timeout=timeout) as response:
                if response.status >= 400:
                    self._decode(response.status, await response.read(), None)
                async for line in response.content:
                    last = self._decode(200, line, Verified)
                    on_progress(last)
        except (TimeoutError, aiohttp.ClientError, OSError) as error:
            raise self._no_answer(error) from error
        if not last.done:
            raise Unavailable("the agent ended before everything was verified", remedy="See its log; verify again")
        return last

    async def status(self) -> dict[str, Any]:
        """The agent, its tracker, its store and its pulls, as one document."""
        return await self._ask("GET", "/v1/status", dict[str, Any])

    async def _ask(
        self,
        method: str,
        path: str,
        kind: type[_T] | None,
        *,
        body: msgspec.Struct | None = None,
        query: dict[str, str] | None = None,
        timeout_s: float = REQUEST_S_MAX,
    ) -> _T:
        assert self._session is not None, "a LocalClient is used inside `async with`"
        try:
            async with self._session.request(
                method,
                path,
                params=query,
                data=_encode(body) if body is not None else None,
                headers={"Content-Type": "application/json"} if body is not None else None,
                timeout=aiohttp.ClientTimeout(total=timeout_s, sock_connect=CONNECT_S_MAX),
            ) as response:
                data = await response.content.read(ANSWER_BYTES_MAX + 1)
                while len(data) <= ANSWER_BYTES_MAX and (more := await response.content.read(1 << 20)):
                    data += more
                return self._decode(response.status, data, kind)
        except (TimeoutError, aiohttp.ClientError, OSError) as error:
            raise self._no_answer(error) from error

    def _decode(self, code: int, data: bytes, kind: type[_T] | None) -> _T:
        try:
            if code >= 400:
                raise from_problem(msgspec.json.decode(data, type=dict[str, Any]))
            if len(data) > ANSWER_BYTES_MAX:
                raise P2PDistError(f"the agent on {self._path} answered more than {ANSWER_BYTES_MAX} bytes")
            return msgspec.json.decode(data, type=kind) if kind is not None else None  # type: ignore[return-value]
        except msgspec.DecodeError as error:
            raise Unavailable(
                f"what answers on {self._path} does not speak as an agent does (HTTP {code}: {error})",
                remedy="See what listens there, and that agent and command have the same version",
            ) from error

    def _no_answer(self, error: Exception) -> Unavailable:
        if isinstance(error, PermissionError) or isinstance(getattr(error, "os_error", None), PermissionError):
            reason, remedy = "permission denied", "Ask to be let into the group of the socket, or use sudo"
        elif isinstance(error, TimeoutError):
            reason, remedy = "it took too long", "See the agent's log"
        else:
            reason = str(getattr(error, "strerror", None) or error or type(error).__name__)
            remedy = "Start `p2pdist agent`, or name its socket with --socket or P2PDIST_SOCKET"
        return Unavailable(f"no agent answers on {self._path} ({reason})", remedy=remedy)


def _encode(body: msgspec.Struct) -> bytes:
    try:
        return msgspec.json.encode(body)
    except UnicodeEncodeError as error:
        raise UsageError("a name that is not UTF-8 cannot be given to the agent", remedy="Name another path") from error
