"""Objects behind HTTP: S3, Google and Azure buckets, and any web server (read only), all through
obstore.

obstore's blocking calls are used, from worker threads. Its awaitable calls cost the same but finish
on threads of its own, which now and then abort the process when the interpreter exits at that
moment. A ranged read is one request on a kept-alive connection.
"""

from __future__ import annotations

import base64
import contextlib
import dataclasses
import os
import random
import re
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast
from urllib.parse import unquote, urlsplit

from obstore.exceptions import AlreadyExistsError, BaseError, NotSupportedError, PreconditionError
from obstore.store import HTTPStore, from_url

from p2pdist.files import read_content
from p2pdist.model.errors import P2PDistError, Refused, TooLarge, Unavailable, Unsuitable, UsageError
from p2pdist.model.url import redacted
from p2pdist.origin.answer import Cloud, failure, missing_storage, read_answer
from p2pdist.origin.contract import WEB_SCHEMES
from p2pdist.origin.objects import Stored

if TYPE_CHECKING:
    from obstore import UpdateVersion
    from obstore.store import ObjectStore

CONNECT_TIMEOUT_S = 3
READ_TIMEOUT_S = 10
REQUEST_TIMEOUT_S = 300
RETRIES_MAX = 2
RETRY_TIMEOUT_S = 15
UPDATE_ATTEMPTS_MAX = 30
PART_BYTES_MIN = 8 << 20
PARTS_MAX = 9_000
"""S3 takes at most 10,000 parts."""
PARTS_IN_FLIGHT = 4
READ_CHUNK_BYTES = 4 << 20
LIST_CHUNK_KEYS = 1_000
CA_BUNDLE_BYTES_MAX = 16 << 20
_NO_SUCH_METHOD = 405
"""obstore takes it for a key that is not there."""

_HTML = re.compile(rb"\s*(?:<!doctype html|<html)", re.IGNORECASE)


class Bucket:
    """Objects below a URL. Credentials and endpoints come from the environment variables of the
    cloud, such as AWS_ACCESS_KEY_ID and AWS_ENDPOINT_URL, or stand in an http(s) URL as user and
    password."""

    def __init__(self, url: str) -> None:
        self.url = redacted(url)
        scheme = urlsplit(url).scheme.lower()
        self._web = scheme in WEB_SCHEMES
        self._cloud = cast("Cloud", "web" if self._web else scheme)
        try:
            self._store = _open_store(url, web=self._web)
        except (BaseError, ValueError) as error:
            raise UsageError(f"cannot open {self.url}: {_first_line(error)}", remedy="Check the URL") from error

    @property
    def writable(self) -> bool:
        return not self._web

    def read(self, key: str, limit: int) -> bytes | None:
        value = self._read(key, limit)
        return None if value is None else value[0]

    def _read(self, key: str, limit: int) -> tuple[bytes, UpdateVersion] | None:
        """The value of `key` and what names its present version (ETag, or the generation of a
        Google bucket)."""
        try:
            with self._failures(f"read {key}", "read"):
                result = self._store.get(key)
                size, data = result.meta["size"], bytearray()
                if size <= limit:
                    for chunk in result.stream(min_chunk_size=READ_CHUNK_BYTES):
                        data += chunk
                        if len(data) > limit:
                            break
        except FileNotFoundError:
            return None
        if max(size, len(data)) > limit:
            raise TooLarge(f"{key} at {self.url} has {size} bytes, over the limit of {limit}")
        if self._web and _HTML.match(data):
            raise Unavailable(
                f"{self.url} answers {key} with a web page",
                remedy="Open the address in a browser: it may be a login page of the network, or not that of the layout",
            )
        version: Any = {name: result.meta.get(name) for name in ("e_tag", "version")}
        return bytes(data), cast("UpdateVersion", {name: value for name, value in version.items() if value is not None})

    def read_range(self, key: str, start: int, length: int) -> bytes | None:
        try:
            with self._failures(f"read {key}", "read"):
                return self._range(key, start, length)
        except FileNotFoundError:
            return None
        except (Unavailable, Refused) as error:
            # Storage answers a range past the end with an error of its own making, mostly 416; the
            # size tells it from a failure.
            if start or isinstance(error, Unsuitable):
                with contextlib.suppress(P2PDistError):
                    size = self.size(key)
                    if size is not None and size <= start:
                        return b""
            raise

    def _range(self, key: str, start: int, length: int) -> bytes:
        """A range as the server sends it; of one that sends more than was asked for, little more.
        obstore's own get_range takes into memory whatever comes. Raises what obstore raises."""
        data = bytearray()
        for chunk in self._store.get(key, options={"range": (start, start + length)}).stream(min_chunk_size=length + 1):
            data += chunk
            if len(data) > length:
                break
        return bytes(data)

    def size(self, key: str) -> int | None:
        try:
            with self._failures(f"look up {key}", "read"):
                try:
                    return self._store.head(key)["size"]
                except (BaseError, OSError) as error:
                    # An answer to HEAD has no body, and so no reason; one to GET has. A 404 is
                    # plain enough.
                    answer = read_answer(error)
                    if answer.status == _NO_SUCH_METHOD:
                        return self._store.get(key, options={"range": (0, 1)}).meta["size"]
                    if not isinstance(error, FileNotFoundError) and answer.empty:
                        self._range(key, 0, 1)
                    raise
        except FileNotFoundError:
            return None

    def write(self, key: str, chunks: Iterator[bytes], size: int) -> None:
        self._check_writable()
        part = max(PART_BYTES_MIN, -(-size // PARTS_MAX))
        with self._failures(f"write {key}", "write", missing=True):
            if size <= part:
                self._store.put(key, b"".join(chunks), use_multipart=False)
            else:
                self._store.put(key, chunks, use_multipart=True, chunk_size=part, max_concurrency=PARTS_IN_FLIGHT)

    def update(self, key: str, limit: int, edit: Callable[[bytes | None], bytes]) -> None:
        self._check_writable()
        for attempt in range(UPDATE_ATTEMPTS_MAX):
            before = self._read(key, limit)
            value = edit(before[0] if before else None)
            try:
                with self._failures(f"write {key}", "write", missing=True):
                    self._put_if(key, value, before[1] if before else None)
                return
            except (AlreadyExistsError, PreconditionError):
                # Another writer was faster: start again from what it wrote.
                time.sleep(random.uniform(0, min(1.0, 0.02 * 2**attempt)))
        raise Unavailable(
            f"{key} at {self.url} was changed by others {UPDATE_ATTEMPTS_MAX} times while it was being updated",
            remedy="Try again when fewer writers are at work",
        )

    def _put_if(self, key: str, value: bytes, version: UpdateVersion | None) -> None:
        """Write where the present version is still `version`, or nothing is there for None. Raises
        what obstore raises."""
        try:
            self._store.put(key, value, mode=version or "create")
        except NotImplementedError:
            # The user says with AWS_CONDITIONAL_PUT=disabled that no other process pushes
            # meanwhile.
            self._store.put(key, value, use_multipart=False)
        except BaseError as error:
            if read_answer(error).code not in ("NotImplemented", "MethodNotAllowed"):
                raise
            raise Refused(
                f"{self.url} knows no conditional writes, by which pushes keep each other's tags: it refused to write {key}",
                remedy="Where only one push runs at a time set AWS_CONDITIONAL_PUT=disabled; else use other storage",
            ) from error

    def list(self, folder: str) -> Iterator[Stored]:
        self._check_writable()
        prefix = folder + "/"
        with self._failures(f"list {folder}", "list", missing=True):
            for batch in self._store.list(prefix, chunk_size=LIST_CHUNK_KEYS):
                for item in batch:
                    name = item["path"].removeprefix(prefix)
                    if "/" not in name:
                        yield Stored(prefix + name, item["size"], item["last_modified"].timestamp())

    def delete(self, keys: Sequence[str]) -> None:
        self._check_writable()
        with self._failures(f"delete {len(keys)} values", "delete"):
            try:
                if keys:
                    self._store.delete([*keys])
            except FileNotFoundError as error:
                if missing_storage(read_answer(error)):
                    raise
                # Google and Azure, unlike S3, end at one that another collection has deleted
                # already.
                for key in keys:
                    with contextlib.suppress(FileNotFoundError):
                        self._store.delete(key)

    def lock(self, *, alone: bool) -> Callable[[], None]:
        return lambda: None

    def abandoned(self, *, remove: bool) -> Iterator[tuple[str, int]]:
        """Parts of unfinished uploads are seen and deleted by rules of the storage alone
        (AbortIncompleteMultipartUpload)."""
        return iter(())

    def _check_writable(self) -> None:
        if self._web:
            self.size("index.json")  # a server that cannot be reached is told as that
            raise UsageError(
                f"{self.url} is read over HTTP and cannot be written to",
                remedy="Push to the storage behind it, such as file:// or s3://",
            )

    @contextlib.contextmanager
    def _failures(self, what: str, right: str, *, missing: bool = False) -> Iterator[None]:
        """Name what failed, which takes `right` (answer.RIGHTS). FileNotFoundError passes where it
        is about one key, unless `missing`: then the bucket itself is not there."""
        try:
            yield
        except (P2PDistError, AlreadyExistsError, PreconditionError):
            raise
        except NotSupportedError as error:
            raise Unsuitable(
                f"{self.url} cannot {what}: it does not serve byte ranges",
                remedy="Use a web server that honours Range, such as nginx; Python's http.server does not",
            ) from error
        except (BaseError, FileNotFoundError) as error:
            answer = read_answer(error)
            missing_key = isinstance(error, FileNotFoundError) and answer.status != _NO_SUCH_METHOD
            absent = missing_key or answer.status == 410
            if absent and not missing and not missing_storage(answer):
                raise FileNotFoundError(what) from error
            if absent:
                answer = dataclasses.replace(answer, code=answer.code if missing_storage(answer) else "NoSuchBucket")
            raise failure(answer, what, self.url, self._cloud, right) from error


def _open_store(url: str, *, web: bool) -> ObjectStore:
    client: dict[str, Any] = {
        "connect_timeout": timedelta(seconds=CONNECT_TIMEOUT_S),
        "read_timeout": timedelta(seconds=READ_TIMEOUT_S),
        "timeout": timedelta(seconds=REQUEST_TIMEOUT_S),
        "allow_http": True,
    }
    retry: Any = {
        "max_retries": RETRIES_MAX,
        "retry_timeout": timedelta(seconds=RETRY_TIMEOUT_S),
        "backoff": {"init_backoff": timedelta(milliseconds=200), "max_backoff": timedelta(seconds=2), "base": 2},
    }
    parts = urlsplit(url)
    bundle = os.environ.get("AWS_CA_BUNDLE")
    if parts.scheme.lower() == "s3" and bundle and Path(bundle).is_file():
        client["root_certificate"] = authorities = read_content(Path(bundle), CA_BUNDLE_BYTES_MAX).data
        if len(authorities) > CA_BUNDLE_BYTES_MAX:
            raise UsageError(f"{bundle}, which AWS_CA_BUNDLE names, is larger than a file of authorities")
    options: Any = client
    if not web:
        return from_url(url, client_options=options, retry_config=retry)
    if parts.username is not None:
        pair = f"{unquote(parts.username)}:{unquote(parts.password or '')}".encode()
        client["default_headers"] = {"authorization": "Basic " + base64.b64encode(pair).decode()}
    query = f"?{parts.query}" if parts.query else ""  # such as a signature; it goes with every request
    return HTTPStore(redacted(url) + query, client_options=options, retry_config=retry)


def _first_line(error: Exception) -> str:
    return str(error).split("\n", 1)[0][:300]
