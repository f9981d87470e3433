"""The file of upstreams (TOML): which registries the tracker reads for its fleet, and how.

[[upstream]]
host = "docker.io"
credentials = "/etc/p2pdist/docker-hub.json"
tags_ttl = "1m"

[[upstream]]
host = "registry.example.org:5000"
url = "https://registry.internal"
serve_stale = false
namespaces = ["team/*"]
redirects = ["10.0.0.0/8", "storage.internal"]

`host` is the name under which references know the registry; `url` where it is reached, if that is
elsewhere; `credentials` a file in the form of Docker's config.json; `tags_ttl` how long a tag's
meaning is taken for known (seconds, or such as "5m"); `namespaces` patterns of repositories, as in
fnmatch; `redirects` hosts and networks of private addresses to which it may send its readers, if it
is not there itself. `insecure = true` stands for plain HTTP where no URL is given.
"""

from __future__ import annotations

import asyncio
import logging
import os
import re
import tomllib
from collections.abc import Awaitable, Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec

from p2pdist.files import decoded, read_content
from p2pdist.model.errors import UsageError
from p2pdist.model.units import parse_duration
from p2pdist.model.upstream import TAGS_TTL_S, UpstreamSettings, parse_redirects, parse_upstream, unique, upstream_of

POLL_S = 1.0
BYTES_MAX = 1 << 20
NAMESPACES_MAX = 1000
TAGS_TTL_S_MAX = 7 * 86400.0
_ALIASES = {"name": "host", "tag_ttl_s": "tags_ttl", "tags_ttl_s": "tags_ttl", "allow": "namespaces"}
_NAMESPACE = re.compile(r"[a-z0-9._/*?\[\]!-]{1,255}\Z")


logger = logging.getLogger(__name__)


class _Entry(msgspec.Struct, forbid_unknown_fields=True):
    host: str
    url: str = ""
    kind: str = "registry"
    credentials: str = ""
    tags_ttl: float | str = TAGS_TTL_S
    serve_stale: bool = True
    namespaces: tuple[str, ...] = ("*",)
    insecure: bool = False
    redirects: tuple[str, ...] = ()


def read_upstreams(path: Path) -> tuple[UpstreamSettings, ...]:
    """The upstreams that a file names. Raises UsageError, which says which entry is wrong."""
    try:
        data = read_content(path, BYTES_MAX).data
    except OSError as error:
        raise UsageError(
            f"the upstreams in {path} cannot be read: {error.strerror}", remedy="Check --upstreams"
        ) from error
    if len(data) > BYTES_MAX:
        raise UsageError(f"{path} has more than {BYTES_MAX} bytes, and is no file of upstreams")
    try:
        document = tomllib.loads(decoded(data))
    except (ValueError, RecursionError) as error:
        said = " ".join(str(error).split())[:300]
        raise UsageError(f"{path} is no TOML: {said}", remedy="Correct that place; see https://toml.io") from error
    unknown = [name for name in document if name != "upstream"]
    entries = document.get("upstream", [])
    if unknown or not isinstance(entries, list):
        shown = ", ".join(map(repr, unknown))[:100] or "'upstream'"
        raise UsageError(f"{path} has {shown}, which is not known here", remedy="Write [[upstream]] for each one")
    return unique(tuple(_settings(path, number, entry) for number, entry in enumerate(entries, 1)))


def all_upstreams(named: Iterable[str], path: Path | None) -> tuple[UpstreamSettings, ...]:
    """The upstreams of the command line and of a file. Raises UsageError."""
    return unique((*map(parse_upstream, named), *(read_upstreams(path) if path is not None else ())))


def _settings(path: Path, number: int, plain: Any) -> UpstreamSettings:
    where = f"the upstream number {number} in {path}"
    try:
        named = {_ALIASES.get(key, key): value for key, value in dict(plain).items()}
        entry = msgspec.convert(named, _Entry)
        ttl_s = parse_duration(entry.tags_ttl) if isinstance(entry.tags_ttl, str) else float(entry.tags_ttl)
        found = upstream_of(entry.host, entry.url, insecure=entry.insecure)
        redirects = parse_redirects(entry.redirects)
    except (msgspec.ValidationError, TypeError, ValueError) as error:
        raise UsageError(f"{where} cannot be used: {' '.join(str(error).split())[:300]}") from error
    except UsageError as error:
        raise UsageError(f"{where} cannot be used: {error.what}", remedy=error.remedy) from error
    if entry.kind != "registry":
        raise UsageError(f"{where} is of the kind {entry.kind[:50]!r}", remedy='Only kind = "registry" is known')
    if not 0 <= ttl_s <= TAGS_TTL_S_MAX:
        raise UsageError(f"{where} has tags_ttl {ttl_s:g} s", remedy="Give 0 s to 7 days")
    if not entry.namespaces or len(entry.namespaces) > NAMESPACES_MAX:
        raise UsageError(f"{where} has {len(entry.namespaces)} namespaces", remedy=f"Give 1 to {NAMESPACES_MAX}")
    for namespace in entry.namespaces:
        if not _NAMESPACE.match(namespace):
            raise UsageError(f"{where}: {namespace[:80]!r} matches no repository", remedy='Write one such as "team/*"')
    credentials = str((path.parent / entry.credentials).absolute()) if entry.credentials else ""
    return msgspec.structs.replace(
        found,
        credentials=credentials,
        tags_ttl_s=ttl_s,
        serve_stale=entry.serve_stale,
        namespaces=tuple(entry.namespaces),
        redirects=redirects,
    )


class UpstreamsFile:
    """Keeps upstreams at what the command line and a file say: the file is read again when it
    changes, and on SIGHUP. One with a mistake changes nothing."""

    def __init__(
        self,
        named: tuple[str, ...],
        path: Path,
        take: Callable[[tuple[UpstreamSettings, ...]], Awaitable[None]],
    ) -> None:
        self._named, self._path, self._take = named, path, take
        self._stamp = self._look()
        self._asked = asyncio.Event()

    def reload(self) -> None:
        """Read the file again soon, whether or not it looks changed."""
        self._asked.set()

    async def watch(self) -> None:
        """Read the file again when it has changed, until cancelled."""
        while True:
            with suppress(TimeoutError):
                async with asyncio.timeout(POLL_S):
                    await self._asked.wait()
            asked = self._asked.is_set()
            self._asked.clear()
            try:
                stamp = await asyncio.to_thread(self._look)
                if asked or stamp != self._stamp:
                    self._stamp = stamp
                    upstreams = await asyncio.to_thread(all_upstreams, self._named, self._path)
                    await self._take(upstreams)
                    logger.info("the upstreams %s hold", ", ".join(upstream.name for upstream in upstreams) or "(none)")
            except UsageError as error:
                logger.warning("the upstreams stay as they were: %s", error)
            except Exception:
                logger.exception("the upstreams in %s are not watched", self._path)

    def _look(self) -> tuple[int, int, int] | None:
        """What changes with the file."""
        try:
            found = os.stat(self._path)
        except OSError:
            return None
        return found.st_mtime_ns, found.st_size, found.st_ino
