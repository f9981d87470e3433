"""The interface of a Hugging Face hub, the reading part: clients of models and data sets read the
fleet's hub through it.

Theory. Such a client has no other place to ask, and waits ten seconds for a head and between two
bytes. So a document that takes longer is 503, which clients ask again, and the read goes on
meanwhile; the head of a file goes out before its first byte when that is late. A file whose pull
has not even begun by then is 429: a GET of a file is asked again on that alone. A file of LFS
begins with its first verified piece and follows the others in order as they come; its last piece is
sent once the SHA-256 of the whole matched. A pull that fails later breaks the connection, so that
the client sees a truncated body and resumes with a Range. Clients compare lengths alone.

Everything is answered by commit: what a branch names is looked up first, and then holds for the
whole request. Hints at other ways to fetch a file are left out, and links name this server.

Where documents and bytes come from is the agent's: see `Repositories` and `Bodies`.
"""

from __future__ import annotations

import asyncio
import re
from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol
from urllib.parse import quote, urlencode

import msgspec
from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError
from aiohttp.typedefs import Handler

from p2pdist.gateway.answers import Answers, Interface, Late, Sent, answer_by, precondition
from p2pdist.gateway.huggingface.counts import HubCounts
from p2pdist.gateway.huggingface.failures import JSON_TYPE, failure_response
from p2pdist.gateway.huggingface.names import PREFIX, HubRequest, parse_request
from p2pdist.model.errors import UNDECODABLE, NotFound, P2PDistError, Unavailable, UsageError
from p2pdist.model.hub import (
    HubDirectory,
    HubFile,
    HubName,
    HubRevision,
    check_path,
    failure,
)

BEGIN_S = 8.0
"""How long a client waits for the head of an answer, at most."""

REQUESTS_MAX = 512
"""Requests answered at once."""

PAGE_MAX = 1000
"""Entries of one page of a tree."""

PATHS_MAX = 10_000
"""Paths of one request about paths."""

BODY_S_MAX = 30.0
"""How long such a request may take to arrive: it counts among those that are answered."""

LAST = "\U0010ffff"
"""Comes after every other character."""

_HOST = re.compile(r"(?:[A-Za-z0-9._-]{1,253}|\[[0-9A-Fa-f:.]{2,45}\])(?::[0-9]{1,5})?\Z")
_NUMBER = re.compile(r"[0-9]{1,9}\Z")
_POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:{sha256}\nsize {size}\n"
"""What git keeps in place of a file of LFS (git-lfs, docs/spec.md)."""


class Listed(Protocol):
    """What is in a commit, by path."""

    @property
    def files(self) -> Mapping[str, HubFile]: ...
    @property
    def directories(self) -> Mapping[str, HubDirectory]: ...
    @property
    def paths(self) -> Sequence[str]:
        """Of all of these, in order."""


class Repositories(Protocol):
    """The repositories of the hub, as far as a request may read them. Methods raise NotFound,
    Refused, Corrupt, Unavailable."""

    async def admit(self, request: web.Request, name: HubName) -> str:
        """The token by which the client of a request reads a repository. Raises NotFound and
        Refused where it may not."""

    async def revision(self, name: HubName, revision: str, token: str) -> HubRevision:
        """What a branch, tag or commit names, and what the hub says of it."""

    async def commit_of(self, name: HubName, revision: str, token: str) -> str:
        """The commit that a branch, tag or commit names."""

    async def files(self, name: HubName, commit: str, token: str) -> Listed:
        """Everything in a commit."""

    async def refs(self, name: HubName, token: str) -> bytes:
        """The branches and tags of a repository."""


@dataclass(frozen=True, slots=True)
class RepositoryFile:
    """A file of a commit, and the token by which a client reads its repository."""

    name: HubName
    commit: str
    file: HubFile
    token: str


class Bodies(Protocol):
    """Sends the bytes of files."""

    async def send(
        self, request: web.Request, read: RepositoryFile, headers: Mapping[str, str], deadline: float
    ) -> Sent:
        """Answer a GET for a file, or for ranges of it, with these fields in the head. Raises what
        `Repositories` raises, before the head was sent."""


class HubDoor:
    """Answers requests of clients. On the event loop."""

    def __init__(self, repositories: Repositories, bodies: Bodies, counts: HubCounts) -> None:
        self._repositories, self._bodies, self._counts = repositories, bodies, counts
        self._answers: Answers[HubRequest] = Answers(
            Interface(REQUESTS_MAX, _busy, lambda asked: asked.wanted, counts.answered, self._failed)
        )

    @web.middleware
    async def failures(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Middleware that answers failures as a hub does where they come from around the door: from
        the guard, or where large answers are too many."""
        if not request.path.startswith(f"{PREFIX}/"):
            return await handler(request)
        try:
            return await handler(request)
        except P2PDistError as error:
            response = failure_response(error)
            self._counts.answered("other", response.status, "none")
            return response

    async def read(self, request: web.Request) -> web.StreamResponse:
        """Serve a document or file of a repository of the hub, as the hub does. HF_ENDPOINT of a
        client is the address of this server and `/hf`."""
        return await self._handle(request)

    async def ask_paths(self, request: web.Request) -> web.StreamResponse:
        """Describe those of the paths in the body that are in a commit."""
        return await self._handle(request)

    async def _handle(self, request: web.Request) -> web.StreamResponse:
        return await self._answers.answer(request, _asked, self._answer)

    def _failed(self, request: web.Request, error: Exception, asked: HubRequest | None) -> web.Response:
        if isinstance(error, Late) and asked is not None and asked.wanted == "file" and request.method == "GET":
            error.details["retry_after"] = 1  # its clients repeat such a request on 429, and fail on 503
        return failure_response(error)

    async def _answer(self, request: web.Request, asked: HubRequest) -> Sent:
        """Answer what is asked for, once the client may read the repository."""
        takes = ("POST",) if asked.wanted == "paths-info" else ("GET", "HEAD")
        if request.method not in takes:
            raise web.HTTPMethodNotAllowed(request.method, takes)
        deadline = asyncio.get_running_loop().time() + BEGIN_S
        repositories, name = self._repositories, asked.name
        token = await answer_by(deadline, repositories.admit(request, name))
        match asked.wanted:
            case "auth-check":
                return Sent(web.json_response({"ok": True}))
            case "refs":
                return Sent(_json(await answer_by(deadline, repositories.refs(name, token))))
            case "info":
                return Sent(await answer_by(deadline, self._info(request, asked, token)))
        commit = await answer_by(deadline, repositories.commit_of(name, asked.revision, token))
        listed = await answer_by(deadline, repositories.files(name, commit, token))
        match asked.wanted:
            case "tree":
                return Sent(await asyncio.to_thread(_tree, request, asked, commit, listed))
            case "paths-info":
                described = await asyncio.to_thread(list, _described(await _paths(request), listed))
                return Sent(_json(msgspec.json.encode(described)))
        return await self._file(request, asked, commit, listed, token, deadline)

    async def _info(self, request: web.Request, asked: HubRequest, token: str) -> web.Response:
        """What the hub says of a repository; with `blobs` the files with their sizes."""
        found = await self._repositories.revision(asked.name, asked.revision, token)
        if request.query.get("blobs", "").lower() not in ("1", "true"):
            return _json(bytes(found.info))
        listed = await self._repositories.files(asked.name, found.commit, token)
        return _json(await asyncio.to_thread(_info_with_files, found, listed))

    async def _file(
        self, request: web.Request, asked: HubRequest, commit: str, listed: Listed, token: str, deadline: float
    ) -> Sent:
        headers = {"X-Repo-Commit": commit, "Accept-Ranges": "bytes"}
        file = listed.files.get(asked.path)
        if file is None:
            error = failure(NotFound(f"{asked.name} at {commit} has no file {asked.path}"), "EntryNotFound", 404)
            return Sent(failure_response(error, headers=headers))
        if asked.wanted == "raw" and file.sha256:
            return Sent(_pointer_response(request, file, headers))
        headers["ETag"] = f'"{file.etag}"'
        if file.sha256:
            headers |= {"X-Linked-ETag": f'"{file.sha256}"', "X-Linked-Size": str(file.size)}
        if (early := precondition(request, file.etag, headers)) is not None:
            return Sent(early)
        if request.method == "HEAD":
            response = web.StreamResponse(headers=headers)
            response.content_type, response.content_length = "application/octet-stream", file.size
            await response.prepare(request)
            return Sent(response)
        return await self._bodies.send(request, RepositoryFile(asked.name, commit, file, token), headers, deadline)


def _busy() -> Unavailable:
    return Unavailable("this door answers as many requests as it may", retry_after=1)


def _asked(request: web.Request) -> HubRequest:
    return parse_request(request.rel_url.raw_path.removeprefix(PREFIX))


def _json(data: bytes) -> web.Response:
    return web.Response(body=data, content_type=JSON_TYPE, charset="utf-8")


# -- files as clients know them


def _info_with_files(found: HubRevision, listed: Listed) -> bytes:
    """What the hub says of a repository, and its files with their sizes. In a thread: it takes a
    while where there are many."""
    info = msgspec.json.decode(found.info, type=dict[str, Any])
    info["siblings"] = [_sibling(file) for file in listed.files.values()]
    return msgspec.json.encode(info)


def _entry(file: HubFile) -> dict[str, Any]:
    entry: dict[str, Any] = {"type": "file", "oid": file.oid, "size": file.size, "path": file.path}
    if file.sha256:
        entry["lfs"] = {"oid": file.sha256, "size": file.size, "pointerSize": len(_pointer(file))}
    return entry


def _sibling(file: HubFile) -> dict[str, Any]:
    entry: dict[str, Any] = {"rfilename": file.path, "size": file.size, "blobId": file.oid}
    if file.sha256:
        entry["lfs"] = {"sha256": file.sha256, "size": file.size, "pointerSize": len(_pointer(file))}
    return entry


def _pointer(file: HubFile) -> bytes:
    return _POINTER.format(sha256=file.sha256, size=file.size).encode()


def _pointer_response(request: web.Request, file: HubFile, headers: Mapping[str, str]) -> web.Response:
    """What git keeps of a file of LFS. It is a line or three: always given whole."""
    sent = {**headers, "ETag": f'"{file.oid}"', "Accept-Ranges": "none"}
    if (early := precondition(request, file.oid, sent)) is not None:
        return early
    return web.Response(body=_pointer(file), content_type="text/plain", charset="utf-8", headers=sent)


def _directory(directory: HubDirectory) -> dict[str, Any]:
    return {"type": "directory", "oid": directory.oid, "size": 0, "path": directory.path}


def _described(paths: Iterable[str], listed: Listed) -> Iterable[dict[str, Any]]:
    for path in paths:
        if (file := listed.files.get(path)) is not None:
            yield _entry(file)
        elif (directory := listed.directories.get(path)) is not None:
            yield _directory(directory)


class _PathsBody(msgspec.Struct):
    paths: list[str] | str = []


async def _paths(request: web.Request) -> list[str]:
    """The paths in the body of a request, which is a form or JSON. Raises UsageError."""
    try:
        async with asyncio.timeout(BODY_S_MAX):
            paths = await _stated_paths(request)
    except TimeoutError as error:
        raise UsageError(f"the paths did not arrive within {BODY_S_MAX:g} s") from error
    if len(paths) > PATHS_MAX:
        raise UsageError(f"{len(paths)} paths are more than {PATHS_MAX}")
    return [check_path(path.strip("/")) for path in paths]


async def _stated_paths(request: web.Request) -> list[str]:
    """What a body says, unchecked. Raises UsageError."""
    if request.content_type == JSON_TYPE:
        try:
            stated = msgspec.json.decode(await request.read(), type=_PathsBody).paths
        except UNDECODABLE as error:
            raise UsageError("the body is no JSON with paths") from error
        return [stated] if isinstance(stated, str) else stated
    try:
        form = await request.post()
    except (ValueError, LookupError, HttpProcessingError) as error:  # no form, or of a charset that is none
        raise UsageError("the body is no form with paths") from error
    return [path for path in form.getall("paths", []) if isinstance(path, str)]


def _tree(request: web.Request, asked: HubRequest, commit: str, listed: Listed) -> web.Response:
    """A page of the entries below a directory. In a thread."""
    below = f"{asked.path}/" if asked.path else ""
    deep = request.query.get("recursive", "").lower() in ("1", "true")
    paths: Sequence[str] = listed.paths
    if below:
        paths = paths[bisect_left(paths, below) : bisect_left(paths, below + LAST)]
    if not deep:
        paths = [path for path in paths if "/" not in path[len(below) :]]
    if below and not paths and asked.path not in listed.directories:
        error = failure(NotFound(f"{asked.name} at {commit} has no directory {asked.path}"), "EntryNotFound", 404)
        return failure_response(error, headers={"X-Repo-Commit": commit})
    first, count = _number(request, "cursor", 0), min(_number(request, "limit", PAGE_MAX) or PAGE_MAX, PAGE_MAX)
    response = _json(msgspec.json.encode(list(_described(paths[first : first + count], listed))))
    if first + count < len(paths):
        query = {key: value for key, value in request.query.items() if key not in ("cursor", "limit")}
        query |= {"limit": str(count), "cursor": str(first + count)}
        host = request.headers.get("Host", "")
        host = host if _HOST.match(host) else "localhost"
        # By commit: the pages after the first are of the same one, whatever the branch names then.
        path = f"{PREFIX}/api/{asked.name.kind}/{asked.name.repository}/tree/{commit}/{quote(asked.path)}".rstrip("/")
        text = urlencode(query, errors="replace")
        response.headers["Link"] = f'<{request.scheme}://{host}{path}?{text}>; rel="next"'
    response.headers["X-Repo-Commit"] = commit
    return response


def _number(request: web.Request, name: str, default: int) -> int:
    text = request.query.get(name, "")
    if text and not _NUMBER.match(text):
        raise UsageError(f"{text[:20]!r} is no {name}")
    return int(text or default)
