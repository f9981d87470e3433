"""A hub of models and data sets that behaves as clients of Hugging Face know it, written from what
its clients ask for: info, trees in pages, files by HEAD and GET with Range, large ones by a
redirect to other storage, tokens and gates, errors by header. It counts every request and byte,
and misbehaves on purpose."""

from __future__ import annotations

import asyncio
import hashlib
import json
import re
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote

from aiohttp import web

KINDS = ("models", "datasets", "spaces")
REPO = r"(?P<kind>models|datasets|spaces)/(?P<repo>[^/]+(?:/[^/]+)?)"


def git_oid(data: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


def pointer_of(data: bytes) -> bytes:
    """What git keeps in place of a file of LFS."""
    digest = hashlib.sha256(data).hexdigest()
    return f"version https://git-lfs.github.com/spec/v1\noid sha256:{digest}\nsize {len(data)}\n".encode()


@dataclass
class Repository:
    """A repository: its commits, and what its branches and tags name."""

    commits: dict[str, dict[str, bytes]] = field(default_factory=dict)
    refs: dict[str, str] = field(default_factory=dict)
    private: bool = False
    gated: bool = False
    listings: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    """What is said of the files of commits that were asked for."""
    lost: set[str] = field(default_factory=set)
    """Files that are listed, and that it does not have."""
    lfs: Callable[[str], bool] = lambda path: path.endswith((".safetensors", ".bin", ".parquet"))

    def commit(self, files: Mapping[str, bytes], ref: str = "main") -> str:
        """Make a commit; returns its name."""
        text = json.dumps([[path, hashlib.sha256(data).hexdigest()] for path, data in sorted(files.items())])
        name = hashlib.sha1(f"{len(self.commits)}{text}".encode()).hexdigest()
        self.commits[name] = dict(files)
        self.refs[ref] = name
        return name


@dataclass
class Hub:
    """The hub, and what it was asked for. Tests change it from their own thread."""

    repositories: dict[tuple[str, str], Repository] = field(default_factory=dict)
    tokens: dict[str, set[str]] = field(default_factory=dict)
    """By token the repositories, without their kinds, that it may read besides the open ones."""
    limited: dict[str, int] = field(default_factory=dict)
    """By token for how many seconds the hub wants to be left alone by it (429)."""
    requests: Counter[tuple[str, str]] = field(default_factory=Counter)
    """By method and path."""
    sent: Counter[str] = field(default_factory=Counter)
    """Bytes of content by SHA-256 or path."""
    shown: list[str] = field(default_factory=list)
    """Every Authorization that came, "" for none."""
    page: int = 1000
    """Entries of a page of a tree."""
    statuses: list[tuple[str, int, dict[str, str]]] = field(default_factory=list)
    """Requests whose path has the text are answered with the status, each entry once."""
    always: dict[str, int] = field(default_factory=dict)
    """By a text in their path the status of requests that always fail."""
    change: Callable[[str, bytes], bytes] = lambda path, data: data
    """Makes other content of a file."""
    hangs: str = ""
    """Requests whose path has this text are not answered."""
    rate_bytes_s: float = 0.0
    """How fast content of LFS is sent; 0 for at once."""
    auth_check: bool = True
    """Whether there is the route that says whether a client may read a repository."""
    base: str = ""
    storage: str = ""
    loop: asyncio.AbstractEventLoop = field(default_factory=asyncio.new_event_loop)

    def repository(self, name: str, kind: str = "models") -> Repository:
        """A repository, made if it is new."""
        return self.repositories.setdefault((kind, name), Repository())

    def count(self, method: str, text: str) -> int:
        """How many requests of a method had the text in their path."""
        return sum(number for (one, path), number in list(self.requests.items()) if one == method and text in path)

    # -- answers

    def _failure(self, status: int, code: str, message: str) -> web.Response:
        headers = {"X-Error-Message": message, **({"X-Error-Code": code} if code else {})}
        return web.json_response({"error": message}, status=status, headers=headers)

    def _open(self, request: web.Request, kind: str, name: str, *, files: bool) -> Repository | web.Response:
        given = request.headers.get("Authorization", "").removeprefix("Bearer ")
        found = self.repositories.get((kind, name))
        if given and given not in self.tokens:
            return self._failure(401, "", "Invalid credentials in Authorization header")
        allowed = name in self.tokens.get(given, ())
        if found is None or (found.private and not allowed):
            return self._failure(404 if given else 401, "RepoNotFound", "Repository not found")
        if files and found.gated and not allowed:
            return self._failure(403 if given else 401, "GatedRepo", f"Access to {name} is restricted")
        return found

    async def answer(self, request: web.Request) -> web.StreamResponse:
        path = request.rel_url.raw_path
        self.requests[request.method, path] += 1
        self.shown.append(request.headers.get("Authorization", ""))
        if self.hangs and self.hangs in path:
            await asyncio.sleep(3600)
        if left_s := self.limited.get(self.shown[-1].removeprefix("Bearer ")):
            return web.Response(status=429, headers={"Retry-After": str(left_s)})
        for entry in list(self.statuses):
            if entry[0] in path:
                self.statuses.remove(entry)
                return web.Response(status=entry[1], headers=entry[2])
        for text, status in self.always.items():
            if text in path:
                return web.Response(status=status)
        if match := re.fullmatch(rf"/api/{REPO}/auth-check", path):
            if not self.auth_check:
                return web.Response(status=404)
            found = self._open(request, match["kind"], match["repo"], files=True)
            return found if isinstance(found, web.Response) else web.Response(text="OK")
        if match := re.fullmatch(rf"/api/{REPO}/tree/(?P<rev>[^/]+)(?:/(?P<path>.+))?", path):
            return self._tree(request, match)
        if match := re.fullmatch(rf"/api/{REPO}/refs", path):
            return self._refs(request, match)
        if match := re.fullmatch(
            r"/(?:(?P<kind>datasets|spaces)/)?(?P<repo>[^/]+(?:/[^/]+)?)/resolve/(?P<rev>[^/]+)/(?P<path>.+)", path
        ):
            return await self._file(request, match)
        if match := re.fullmatch(rf"/api/{REPO}(?:/revision/(?P<rev>[^/]+))?", path):
            return self._info(request, match)
        return web.Response(status=404)

    def _commit(self, found: Repository, revision: str | None) -> str | None:
        text = unquote(revision or "main")
        return found.refs.get(text) or (text if text in found.commits else None)

    def _info(self, request: web.Request, match: re.Match[str]) -> web.Response:
        found = self._open(request, match["kind"], match["repo"], files=False)
        if isinstance(found, web.Response):
            return found
        commit = self._commit(found, match["rev"])
        if commit is None:
            return self._failure(404, "RevisionNotFound", "Invalid rev id")
        return web.json_response(
            {
                "_id": "1", "id": match["repo"], "modelId": match["repo"], "private": found.private,
                "gated": "auto" if found.gated else False, "disabled": False, "tags": ["safetensors"], "sha": commit,
                "downloads": 1, "likes": 0, "lastModified": "2026-01-01T00:00:00.000Z",
                "createdAt": "2026-01-01T00:00:00.000Z",
                "siblings": [{"rfilename": path} for path in sorted(found.commits[commit])],
            }
        )  # fmt: skip

    def _refs(self, request: web.Request, match: re.Match[str]) -> web.Response:
        found = self._open(request, match["kind"], match["repo"], files=False)
        if isinstance(found, web.Response):
            return found
        branches = [
            {"name": name, "ref": f"refs/heads/{name}", "targetCommit": commit} for name, commit in found.refs.items()
        ]
        return web.json_response({"branches": branches, "converts": [], "tags": []})

    def _tree(self, request: web.Request, match: re.Match[str]) -> web.Response:
        found = self._open(request, match["kind"], match["repo"], files=True)
        if isinstance(found, web.Response):
            return found
        commit = self._commit(found, match["rev"])
        if commit is None:
            return self._failure(404, "RevisionNotFound", "Invalid rev id")
        entries = found.listings.get(commit)
        if entries is None:
            entries = found.listings[commit] = self._entries(found, commit)
        first = int(request.query.get("cursor", "0"))
        shown = entries[first : first + self.page]
        headers = {}
        if first + self.page < len(entries):
            following = request.rel_url.update_query(cursor=str(first + self.page))
            headers["Link"] = f'<{self.base}{following}>; rel="next"'
        return web.json_response(shown, headers=headers)

    def _entries(self, found: Repository, commit: str) -> list[dict[str, Any]]:
        entries: list[dict[str, Any]] = []
        directories = {str(parent) for path in found.commits[commit] for parent in Path(path).parents} - {"."}
        for directory in directories:
            entries.append({"type": "directory", "oid": git_oid(directory.encode()), "size": 0, "path": directory})
        for path, data in found.commits[commit].items():
            entry: dict[str, Any] = {"type": "file", "oid": git_oid(data), "size": len(data), "path": path}
            if found.lfs(path):
                pointer, digest = pointer_of(data), hashlib.sha256(data).hexdigest()
                entry["oid"] = git_oid(pointer)
                entry["lfs"] = {"oid": digest, "size": len(data), "pointerSize": len(pointer)}
                entry["xetHash"] = hashlib.sha256(digest.encode()).hexdigest()
            entries.append(entry)
        return sorted(entries, key=lambda entry: str(entry["path"]))

    async def _file(self, request: web.Request, match: re.Match[str]) -> web.StreamResponse:
        kind = match["kind"] or "models"
        found = self._open(request, kind, match["repo"], files=True)
        if isinstance(found, web.Response):
            return found
        commit, path = self._commit(found, match["rev"]), unquote(match["path"])
        if commit is None:
            return self._failure(404, "RevisionNotFound", "Invalid rev id")
        if path not in found.commits[commit]:
            return self._failure(404, "EntryNotFound", "Entry not found")
        data = found.commits[commit][path]
        headers = {"X-Repo-Commit": commit, "Accept-Ranges": "bytes"}
        if path in found.lost:
            return self._failure(404, "EntryNotFound", "Entry not found")
        if not found.lfs(path):
            headers["ETag"] = f'"{git_oid(data)}"'
            return await self._send(request, path, self.change(path, data), headers)
        digest = hashlib.sha256(data).hexdigest()
        headers |= {
            "X-Linked-Size": str(len(data)),
            "X-Linked-ETag": f'"{digest}"',
            "ETag": f'"{git_oid(pointer_of(data))}"',
        }
        headers |= {"X-Xet-Hash": "0" * 64, "Link": f'<{self.base}/api/xet>; rel="xet-auth"'}
        headers["Location"] = f"{self.storage}/lfs/{digest}?Signature=secret&name={quote(path)}"
        return web.Response(status=302, headers=headers)

    async def stored(self, request: web.Request) -> web.StreamResponse:
        """A file of LFS, at the other storage."""
        digest = request.match_info["digest"]
        self.requests[request.method, request.path] += 1
        self.shown.append(request.headers.get("Authorization", ""))
        if self.hangs and self.hangs in request.path:
            await asyncio.sleep(3600)
        for entry in list(self.statuses):
            if entry[0] in request.path:
                self.statuses.remove(entry)
                return web.Response(status=entry[1], headers=entry[2])
        for text, status in self.always.items():
            if text in request.path:
                return web.Response(status=status)
        for repository in list(self.repositories.values()):
            for files in list(repository.commits.values()):
                for path, data in files.items():
                    if repository.lfs(path) and hashlib.sha256(data).hexdigest() == digest:
                        asked = request.query.get("name", path)  # repositories may name it differently
                        return await self._send(request, digest, self.change(asked, data), {})
        return web.Response(status=404)

    async def _send(self, request: web.Request, name: str, data: bytes, headers: dict[str, str]) -> web.StreamResponse:
        match = re.fullmatch(r"bytes=(\d+)-(\d*)", request.headers.get("Range", ""))
        start, end = 0, len(data)
        if match and request.method == "GET":
            start, end = int(match[1]), min(len(data), int(match[2] or len(data)) + 1 if match[2] else len(data))
            if start >= len(data):
                return web.Response(status=416, headers={**headers, "Content-Range": f"bytes */{len(data)}"})
            headers["Content-Range"] = f"bytes {start}-{end - 1}/{len(data)}"
        if request.method == "HEAD":
            return web.Response(headers={**headers, "Content-Length": str(len(data))})
        body = data[start:end]
        if self.rate_bytes_s:
            await asyncio.sleep(len(body) / self.rate_bytes_s)
        self.sent[name] += len(body)
        return web.Response(body=body, status=206 if match else 200, headers=headers)


@contextmanager
def running_hub() -> Iterator[Hub]:
    """Start a hub and its storage, in a thread of their own, and end them."""
    hub, runners = Hub(), list[web.AppRunner]()

    async def start() -> None:
        for route, handler in (("/{path:.*}", hub.answer), ("/lfs/{digest}", hub.stored)):
            app = web.Application()
            app.router.add_get(route, handler)
            runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1, handler_cancellation=True)
            await runner.setup()
            await web.TCPSite(runner, "127.0.0.1", 0).start()
            runners.append(runner)
        hub.base, hub.storage = (f"http://127.0.0.1:{runner.addresses[0][1]}" for runner in runners)

    async def stop() -> None:
        for runner in runners:
            await runner.cleanup()

    thread = threading.Thread(target=hub.loop.run_forever, daemon=True, name="hub")
    thread.start()
    try:
        asyncio.run_coroutine_threadsafe(start(), hub.loop).result(30)
        yield hub
    finally:
        asyncio.run_coroutine_threadsafe(stop(), hub.loop).result(30)
        hub.loop.call_soon_threadsafe(hub.loop.stop)
        thread.join(30)
        hub.loop.close()
