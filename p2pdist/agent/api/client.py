"""The client of the agent of this host, over its Unix socket (docs/protocol.md, the local API).

Calls block. Every command that asks an agent loads this module, also `run`, of which many start at
once: it needs neither an event loop nor an HTTP library, whose loading takes several times as long
as all the rest of such a command. Each call is one connection and an HTTP/1.0 request, so that an
answer never comes in chunks: it has a stated length, or ends with the connection and says in itself
that it is whole.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlencode

import msgspec

from p2pdist.model.errors import UNDECODABLE, NotFound, P2PDistError, Refused, Unavailable, UsageError, from_problem
from p2pdist.model.messages import (
    DRAIN_S_MAX,
    BlobFile,
    Drained,
    DrainRequest,
    ModelFiles,
    MountRequest,
    MountStatus,
    PinRequest,
    PinStatus,
    Pruned,
    PruneRequest,
    PullRequest,
    PullStatus,
    Removed,
    StoreUse,
    Verified,
    VerifyRequest,
)
from p2pdist.model.request_id import HEADER

DEFAULT_SOCKET = Path("/run/p2pdist/agent.sock")
SOCKET_PATH_BYTES_MAX = 107
"""sockaddr_un.sun_path has 108 bytes, the last of which is zero (unix(7))."""

POLL_S = 0.2
HEAD_BYTES_MAX = 64 << 10
ANSWER_BYTES_MAX = 64 << 20
CONNECT_S_MAX = 10.0
REQUEST_S_MAX = 60.0
PIN_S_MAX = MOUNT_S_MAX = 3600.0
"""Unpacking a large package takes minutes."""

BYTES_S_MAX = 3600.0
"""How long a program that loads weights waits for a range."""

AWAY_S_MAX = 5.0
"""How long `pull` waits for an agent that does not answer, as while it restarts."""

LOADS_AWAY_S_MAX = 30.0
"""How long a program that loads weights waits for the next agent, where its agent ends."""

LOST_MAX = 3
"""How often `pull` asks anew for what an agent that was killed no longer knows: one may be killed
by the pull itself."""

_READ = 1 << 16
_T = TypeVar("_T")


class _Mounts(msgspec.Struct):
    mounts: list[MountStatus]


class _Packages(msgspec.Struct):
    packages: list[dict[str, Any]]


class _Pins(msgspec.Struct):
    pins: list[PinStatus]


class NoAgent(Unavailable):
    """No agent takes connections, or one that did ended before it had answered."""


class LocalClient:
    """A client of one agent. Every call raises the failure that the agent reports; Unavailable when
    no agent answers, within `answer_s` seconds for calls that are short; Refused when this user may
    not use the socket. Several threads may use one client."""

    def __init__(self, socket_path: Path = DEFAULT_SOCKET, *, answer_s: float = REQUEST_S_MAX) -> None:
        length = len(os.fsencode(socket_path))
        if length > SOCKET_PATH_BYTES_MAX:
            raise UsageError(
                f"the socket path {socket_path} has {length} bytes; Unix sockets allow {SOCKET_PATH_BYTES_MAX}",
                remedy="Give a shorter one with --socket or P2PDIST_SOCKET",
            )
        self._path, self._answer_s = socket_path, answer_s
        self._met = False
        """Whether an agent has answered this client, or ended before it had."""
        self._named = {HEADER: os.urandom(8).hex()}  # all calls of this client have one request's name in the logs

    @property
    def socket_path(self) -> Path:
        """Where the agent listens."""
        return self._path

    def pull(self, request: PullRequest, on_progress: Callable[[PullStatus], None] | None = None) -> PullStatus:
        """Start a pull and follow it to its end, calling `on_progress` every POLL_S seconds. An
        agent that was killed and runs again goes on with it. Raises why the pull failed."""
        status, lost = self.begin_pull(request), 0
        answered = time.monotonic()
        while True:
            if on_progress is not None:
                on_progress(status)
            if status.state == "done":
                return status
            if status.state == "failed":
                raise from_problem(status.error or {"detail": f"the pull of {status.reference} failed"})
            asked = time.monotonic()
            try:
                status = self._ask("GET", f"/v1/pulls/{status.id}", PullStatus, query={"wait_s": str(POLL_S)})
                answered = time.monotonic()
            except NotFound:
                if (lost := lost + 1) > LOST_MAX:
                    raise
                status = self.begin_pull(request)
            except Unavailable:
                if time.monotonic() - answered > AWAY_S_MAX:
                    raise
            if status.state not in ("done", "failed"):  # the agent did not wait: it is away, or of an older version
                time.sleep(max(0.0, asked + POLL_S - time.monotonic()))

    def mount(self, request: MountRequest) -> MountStatus:
        """Pull and mount a package, or hand out its images."""
        return self._ask("POST", "/v1/mounts", MountStatus, body=request, timeout_s=MOUNT_S_MAX)

    def unmount(self, path: str, force: bool = False, sees: tuple[int, int] | None = None) -> None:
        """Unmount the view at `path`; where `sees` gives the device and inode that the caller sees
        there, only if the view has these."""
        query = {"path": path, "force": "1" if force else "0"}
        if sees is not None:
            query |= {"device": str(sees[0]), "inode": str(sees[1])}
        self._ask("DELETE", "/v1/mounts", None, query=query, timeout_s=MOUNT_S_MAX)

    def mounts(self) -> list[MountStatus]:
        """The mounted views."""
        return self._ask("GET", "/v1/mounts", _Mounts).mounts

    def packages(self) -> list[dict[str, Any]]:
        """Packages in the store: reference, digest, size (bytes), complete."""
        return self._ask("GET", "/v1/packages", _Packages).packages

    def remove(self, reference: str) -> Removed:
        """Remove a package from the store."""
        return self._ask("DELETE", "/v1/packages", Removed, query={"reference": reference})

    def usage(self) -> StoreUse:
        """What packages take on the disk."""
        return self._ask("GET", "/v1/usage", StoreUse)

    def prune(self, request: PruneRequest) -> Pruned:
        """Remove what nothing keeps, or say what that is."""
        return self._ask("POST", "/v1/prune", Pruned, body=request, timeout_s=MOUNT_S_MAX)

    def collect(self) -> Removed:
        """Remove all that no package names."""
        return self._ask("POST", "/v1/collect", Removed, timeout_s=MOUNT_S_MAX)

    def pin(self, reference: str, owner: str = "") -> PinStatus:
        """Pull and pin a package."""
        return self._ask("POST", "/v1/pins", PinStatus, body=PinRequest(reference, owner), timeout_s=PIN_S_MAX)

    def unpin(self, reference: str = "", owner: str = "") -> PinStatus:
        """Remove a pin."""
        return self._ask("DELETE", "/v1/pins", PinStatus, query={"package": reference, "owner": owner})

    def pins(self) -> list[PinStatus]:
        """All pins, by owner."""
        return self._ask("GET", "/v1/pins", _Pins).pins

    def verify(self, request: VerifyRequest, on_progress: Callable[[Verified], None]) -> Verified:
        """Have the agent verify its store, calling `on_progress` now and then; returns the
        result."""
        last = Verified(0, 0, ())
        with closing(self._lines("POST", "/v1/verify", request)) as lines:
            for line in lines:
                last = self._decode(200, line, Verified)
                on_progress(last)
        if not last.done:
            raise Unavailable("the agent ended before everything was verified", remedy="See its log; verify again")
        return last

    def blob_file(self, digest: str, start: int, end: int, model: str = "") -> BlobFile:
        """Where in the store a blob is, once bytes `start` to `end` of it are there. A file of a
        model of the hub is fetched from there if need be. Where the agent ends meanwhile, the next
        one goes on with it."""
        query = {"start": str(start), "end": str(end), **({"model": model} if model else {})}
        return self._ask_any(f"/v1/blobs/{digest}/file", BlobFile, query)

    def model_files(self, reference: str) -> ModelFiles:
        """The files of a model. One of a registry is pulled before; where the agent ends meanwhile,
        the next one goes on with it."""
        return self._ask_any("/v1/models", ModelFiles, {"reference": reference})

    def begin_pull(self, request: PullRequest) -> PullStatus:
        """Start a pull, and do not wait for it."""
        return self._ask("POST", "/v1/pulls", PullStatus, body=request)

    def drain(self, seconds: float | None = None) -> Drained:
        """Have the agent drain, within `seconds` or the time in its settings, and end."""
        limit_s = REQUEST_S_MAX + (DRAIN_S_MAX if seconds is None else seconds)
        return self._ask("POST", "/v1/drain", Drained, body=DrainRequest(seconds), timeout_s=limit_s)

    def status(self) -> dict[str, Any]:
        """The agent, its tracker, its store and its pulls, as one document."""
        return self._ask("GET", "/v1/status", dict[str, Any])

    def _ask(
        self,
        method: str,
        path: str,
        kind: type[_T] | None,
        *,
        body: msgspec.Struct | None = None,
        query: dict[str, str] | None = None,
        timeout_s: float = 0.0,
    ) -> _T:
        try:
            target = f"{path}?{urlencode(query)}" if query else path
        except UnicodeEncodeError as error:
            raise _not_utf8() from error
        request = _request(method, target, body, self._named)
        try:
            with _Exchange(self._path, request, time.monotonic() + (timeout_s or self._answer_s)) as exchange:
                data = exchange.body(ANSWER_BYTES_MAX)
        except OSError as error:
            raise self._no_answer(error) from error
        if data is None:
            raise P2PDistError(f"the agent on {self._path} answered more than {ANSWER_BYTES_MAX} bytes")
        self._met = True
        return self._decode(exchange.status, data, kind)

    def _ask_any(self, path: str, kind: type[_T], query: dict[str, str]) -> _T:
        """Ask the agent, and where it ends before it has answered, the next one."""
        begun, there_at = time.monotonic(), 0.0
        while True:
            asked = time.monotonic()
            try:
                return self._ask("GET", path, kind, query=query, timeout_s=BYTES_S_MAX)
            except Unavailable as error:
                now, stops = time.monotonic(), "stops" in error.details
                if stops or not there_at or now - asked > LOADS_AWAY_S_MAX:
                    there_at = now  # one that stops goes on serving other hosts for a while
                met = stops or (isinstance(error, NoAgent) and self._met)
                if not met or now - there_at >= LOADS_AWAY_S_MAX or now - begun >= BYTES_S_MAX:
                    raise
            time.sleep(POLL_S)

    def _lines(self, method: str, path: str, body: msgspec.Struct) -> Generator[bytes]:
        """The lines of an answer as they come, however long it takes."""
        try:
            with _Exchange(self._path, _request(method, path, body, self._named), None) as exchange:
                if exchange.status >= 400:
                    self._decode(exchange.status, exchange.body(ANSWER_BYTES_MAX) or b"", None)
                yield from exchange.lines(ANSWER_BYTES_MAX)
        except OSError as error:
            raise self._no_answer(error) from error

    def _decode(self, code: int, data: bytes, kind: type[_T] | None) -> _T:
        try:
            if code >= 400:
                raise from_problem(msgspec.json.decode(data, type=dict[str, Any]))
            return msgspec.json.decode(data, type=kind) if kind is not None else None  # type: ignore[return-value]
        except UNDECODABLE as error:
            raise Unavailable(
                f"what answers on {self._path} does not speak as an agent does (HTTP {code}: {error})",
                remedy="See what listens there, and that agent and command have the same version",
            ) from error

    def _no_answer(self, error: OSError) -> P2PDistError:
        if isinstance(error, PermissionError):
            return _refused(self._path)
        if isinstance(error, TimeoutError):
            return Unavailable(f"no agent answers on {self._path} (it took too long)", remedy="See the agent's log")
        if type(error) is ConnectionError or isinstance(error, ConnectionResetError | BrokenPipeError):
            self._met = True
            reason, remedy = (
                str(error.strerror or error),
                "See whether the agent still runs, and its log; then ask again",
            )
        else:
            reason = str(error.strerror or error or type(error).__name__)
            if isinstance(error, FileNotFoundError) and not self._path.parent.is_dir():
                reason = f"there is no directory {self._path.parent}"
            remedy = "Start `p2pdist agent`, or name its socket with --socket or P2PDIST_SOCKET"
        return NoAgent(f"no agent answers on {self._path} ({reason})", remedy=remedy)


def _refused(path: Path) -> Refused:
    """The failure of a user that may not connect to the socket, or not enter a directory on its
    path: it names the barrier and the group that may pass. The detail `socket` distinguishes it
    from the refusals of an agent, a tracker or an origin."""
    import grp
    import pwd

    barrier, status = path, None
    for parent in (*reversed(path.absolute().parents), path.absolute()):
        try:
            status, barrier = os.stat(parent), parent
        except OSError:
            break  # the last path that can be read is the barrier
    kind, bit = ("socket", 0o020) if barrier == path.absolute() else ("directory", 0o010)
    if status is None:
        return Refused(f"this user may not use the agent's socket {path}", remedy="Use sudo", socket=str(path))
    try:
        user, group = pwd.getpwuid(os.geteuid()).pw_name, grp.getgrgid(status.st_gid)
        owner = pwd.getpwuid(status.st_uid).pw_name
    except KeyError:
        user, group, owner = "", None, str(status.st_uid)
    group_name = group.gr_name if group is not None else str(status.st_gid)
    if not status.st_mode & bit or status.st_gid == 0:
        remedy = "Use sudo, or have the agent started in a group that you are in (Group= of its systemd unit)"
    elif group is not None and user in group.gr_mem:
        remedy = f"You are in the group {group_name}, but not yet in this session: log in anew"
    else:
        remedy = (
            f"Ask to be let into the group {group_name} (usermod -aG {group_name} {user or 'USER'}), then log in anew"
        )
    return Refused(
        f"this user may not use the agent's socket {path}: the {kind} {barrier} belongs to {owner}:{group_name}",
        remedy=remedy,
        socket=str(path),
    )


class _Exchange:
    """One request and its answer (RFC 9112), whose head has come when the block begins. Raises
    OSError, TimeoutError after `deadline` on the monotonic clock, and ConnectionError for what is
    no whole answer."""

    def __init__(self, path: Path, request: bytes, deadline: float | None) -> None:
        self._deadline = deadline
        self._socket = socket.socket(socket.AF_UNIX)
        try:
            self._socket.settimeout(CONNECT_S_MAX)
            self._socket.connect(os.fspath(path))
            self._socket.sendall(request)
            self._rest = bytearray()
            self.status, self._length = self._head()
        except BaseException:
            self._socket.close()
            raise

    def __enter__(self) -> _Exchange:
        return self

    def __exit__(self, *_: object) -> None:
        self._socket.close()

    def body(self, limit: int) -> bytes | None:
        """All of it; None when it is over the limit."""
        rest = self._rest
        while len(rest) <= limit and len(rest) != self._length and self._more():
            pass
        if len(rest) > limit:
            return None
        if self._length is not None and len(rest) != self._length:
            raise ConnectionError("its answer was cut off")
        return bytes(rest)

    def lines(self, limit: int) -> Iterator[bytes]:
        """Whole lines as they come. Ends before a line that is longer than `limit` bytes."""
        more = True
        while more and len(self._rest) <= limit:
            *lines, self._rest = self._rest.split(b"\n")
            yield from map(bytes, lines)
            more = self._more()

    def _head(self) -> tuple[int, int | None]:
        """Status and length of the body, None when it ends with the connection."""
        while (end := self._rest.find(b"\r\n\r\n")) < 0:
            if len(self._rest) > HEAD_BYTES_MAX or not self._more():
                raise ConnectionError("its answer is not HTTP" if self._rest else "it closed the connection")
        first, *fields = bytes(self._rest[:end]).split(b"\r\n")
        del self._rest[: end + 4]
        version, _, reason = first.partition(b" ")
        lengths = [field.partition(b":")[2].strip() for field in fields if field.lower().startswith(b"content-length:")]
        status = reason[:3]
        if not version.startswith(b"HTTP/1.") or not all(number.isdigit() for number in (status, *lengths)):
            raise ConnectionError("its answer is not HTTP")
        return int(status), int(lengths[0]) if lengths else None

    def _more(self) -> bool:
        """Read more of the answer; False at its end."""
        left = None
        if self._deadline is not None:
            left = self._deadline - time.monotonic()
            if left <= 0:
                raise TimeoutError
        self._socket.settimeout(left)
        data = self._socket.recv(_READ)
        self._rest += data
        return bool(data)


def _not_utf8() -> UsageError:
    return UsageError("a name that is not UTF-8 cannot be given to the agent", remedy="Name another path")


def _request(method: str, target: str, body: msgspec.Struct | None, named: dict[str, str]) -> bytes:
    fields = "".join(f"{key}: {value}\r\n" for key, value in named.items())
    head = f"{method} {target} HTTP/1.0\r\nHost: agent\r\n{fields}"
    if body is None:
        return f"{head}\r\n".encode()
    try:
        data = msgspec.json.encode(body)
    except UnicodeEncodeError as error:
        raise _not_utf8() from error
    return f"{head}Content-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n".encode() + data
