"""A hub with one model, for the demo and for measurements: it counts what it sends and is asked.

`python -m p2pdist.cli.verbs.demo.model.hub --directory DIR --repository ORG/NAME --listen ADDRESS`
has the files below DIR as the only commit of a model that everybody may read: its description, its
tree, entries by path (POST), and files by HEAD and GET with one byte range. Files whose names end
with .safetensors are kept as a hub keeps them in LFS: listed by their SHA-256.

GET /-/served answers {"bytes", "requests", "heads", "sent"}: bodies handed to the kernel, requests
for files, and by file the HEADs and the bytes.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import re
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import unquote

from aiohttp import web

from p2pdist.cli.verbs.demo.origin import SERVED_PATH, StaticOrigin, serve
from p2pdist.model.address import parse_address
from p2pdist.model.hub import git_oid

LARGE = ".safetensors"
_API = re.compile(r"/api/models/(?P<repository>[^/]+/[^/]+)(?P<rest>/.*)?\Z")
_FILE = re.compile(r"/(?P<repository>[^/]+/[^/]+)/resolve/(?P<revision>[^/]+)/(?P<path>.+)\Z")
_POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:{sha256}\nsize {size}\n"
"""What git keeps in place of a file of LFS (git-lfs, docs/spec.md)."""


@dataclass(frozen=True, slots=True)
class ModelFile:
    """A file of the model: its size, the id of what git keeps of it, and the SHA-256 of one that
    git does not keep itself, else ""."""

    path: str
    size: int
    oid: str
    sha256: str = ""

    def entry(self) -> dict[str, Any]:
        """What a tree says of it."""
        entry = {"type": "file", "path": self.path, "size": self.size, "oid": self.oid}
        if self.sha256:
            pointer = len(_POINTER.format(sha256=self.sha256, size=self.size))
            entry["lfs"] = {"oid": self.sha256, "size": self.size, "pointerSize": pointer}
        return entry

    def headers(self, commit: str) -> dict[str, str]:
        """What the answer to a request for it says."""
        headers = {"X-Repo-Commit": commit, "ETag": f'"{self.sha256 or self.oid}"'}
        if self.sha256:
            headers |= {"X-Linked-ETag": f'"{self.sha256}"', "X-Linked-Size": str(self.size)}
        return headers


def model_file(directory: Path, path: Path) -> ModelFile:
    """What is to be said of a file; reads it."""
    name, size = path.relative_to(directory).as_posix(), path.stat().st_size
    if not name.endswith(LARGE):
        return ModelFile(name, size, git_oid(path.read_bytes()))
    with path.open("rb") as file:
        sha256 = hashlib.file_digest(file, "sha256").hexdigest()
    return ModelFile(name, size, git_oid(_POINTER.format(sha256=sha256, size=size).encode()), sha256)


class ModelHub(StaticOrigin):
    """Serves the files of a directory as one commit of a model. It reads them all to begin with."""

    def __init__(self, directory: Path, repository: str) -> None:
        super().__init__(directory)
        self.repository = repository
        found = [model_file(self.directory, path) for path in sorted(self.directory.rglob("*")) if path.is_file()]
        self.files = {file.path: file for file in found}
        self.commit = hashlib.sha1(repr(found).encode(), usedforsecurity=False).hexdigest()
        self.heads: Counter[str] = Counter()
        self.sent: Counter[str] = Counter()

    def application(self) -> web.Application:
        """The aiohttp application; HEAD comes with GET."""
        app = web.Application()
        app.router.add_get(SERVED_PATH, self.served)
        app.router.add_get("/{path:.*}", self.answer)
        app.router.add_post("/{path:.*}", self.answer)
        return app

    async def served(self, _request: web.Request) -> web.Response:
        counted = {"bytes": self.bytes_sent, "requests": self.requests}
        return web.json_response({**counted, "heads": dict(self.heads), "sent": dict(self.sent)})

    async def answer(self, request: web.Request) -> web.StreamResponse:
        """A document or a file of the model."""
        path, posted = request.rel_url.raw_path, request.method == "POST"
        asked = _API.match(path) or _FILE.match(path)
        if asked is None or asked["repository"] != self.repository:
            return _absent("RepoNotFound")
        if (named := asked.groupdict().get("revision")) is not None and not posted:
            return await self._file(request, unquote(named), unquote(asked["path"]))
        match (asked.groupdict().get("rest") or "").strip("/").split("/"):
            case ["paths-info", revision] if posted and revision in ("main", self.commit):
                form = await request.post()
                found = [self.files.get(str(path)) for path in form.getall("paths", [])]
                return web.json_response([file.entry() for file in found if file is not None])
            case _ if posted:
                return web.Response(status=405)
            case [""] | ["revision", "main"]:
                return self._info()
            case ["revision", revision] if revision == self.commit:
                return self._info()
            case ["auth-check"]:
                return web.Response(text="OK")
            case ["tree", revision] if revision in ("main", self.commit):
                return web.json_response([file.entry() for file in self.files.values()])
            case ["revision" | "tree", *_]:
                return _absent("RevisionNotFound")
        return web.Response(status=404)

    def _info(self) -> web.Response:
        files = [{"rfilename": path} for path in self.files]
        names = {"id": self.repository, "modelId": self.repository, "sha": self.commit, "siblings": files}
        return web.json_response(
            {**names, "private": False, "gated": False, "disabled": False, "tags": ["safetensors"]}
        )

    async def _file(self, request: web.Request, revision: str, path: str) -> web.StreamResponse:
        file = self.files.get(path)
        if revision not in ("main", self.commit):
            return _absent("RevisionNotFound")
        if file is None:
            return _absent("EntryNotFound")
        self.requests += 1
        if request.method == "HEAD":
            self.heads[path] += 1
        return await self.send(request, self.directory / path, file.headers(self.commit))

    def count(self, path: Path, length: int) -> None:
        """So many bytes of a file were handed to the kernel."""
        super().count(path, length)
        self.sent[path.relative_to(self.directory).as_posix()] += length


def _absent(code: str) -> web.Response:
    return web.json_response({"error": code}, status=404, headers={"X-Error-Code": code, "X-Error-Message": code})


def main() -> None:
    """Parse the command line and serve."""
    parser = argparse.ArgumentParser(description="Serve a directory as a model of a hub, and count what is asked")
    parser.add_argument("--directory", type=Path, required=True)
    parser.add_argument("--repository", required=True, metavar="ORG/NAME")
    parser.add_argument("--listen", required=True, metavar="HOST:PORT")
    options = parser.parse_args()
    hub = ModelHub(options.directory, options.repository)
    asyncio.run(serve(hub, *parse_address(options.listen)))


if __name__ == "__main__":
    main()
