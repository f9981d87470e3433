"""Small blobs of a store: manifests, configs, piece lists. Read and written whole; the name is the SHA-256, checked at every reading, so
that nothing needs to be synchronised: what a lost machine tears is found out and fetched again.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import time
from pathlib import Path

from p2pdist.model.digest import Digest, digest_of
from p2pdist.model.errors import TooLarge
from p2pdist.model.package import SMALL_BYTES_MAX
from p2pdist.store.disk import failures
from p2pdist.store.paths import Paths


class SmallBlobs:
    """Thread-safe, but that the caller serialises put and remove of one digest."""

    def __init__(self, paths: Paths) -> None:
        self._paths = paths
        self._sizes = {entry.name: entry.stat().st_size for entry in os.scandir(paths.smalls)}

    @property
    def bytes_total(self) -> int:
        return sum(list(self._sizes.values()))

    def put(self, data: bytes) -> Digest:
        """Store `data`; raises TooLarge over SMALL_BYTES_MAX, DiskFull."""
        if len(data) > SMALL_BYTES_MAX:
            raise TooLarge(f"a small blob of {len(data)} bytes is over the limit of {SMALL_BYTES_MAX}")
        digest = digest_of(data)
        if self.read(digest) is not None:
            return digest
        path = self._paths.small(digest)
        temporary = os.fspath(self._paths.temporary / secrets.token_hex(8))
        with failures(path, needed=len(data)):
            try:
                with open(temporary, "xb", opener=_read_only) as file:
                    file.write(data)
                os.rename(temporary, path)
            except BaseException:
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(temporary)
                raise
        self._sizes[path.name] = len(data)
        return digest

    def read(self, digest: Digest) -> bytes | None:
        """The bytes, or None when they are not here or damaged."""
        path = self._paths.small(digest)
        with failures(path):
            try:
                if path.stat().st_size <= SMALL_BYTES_MAX and digest_of(data := path.read_bytes()) == digest:
                    return data
            except FileNotFoundError:
                return None
        return None

    def remove(self, digest: Digest) -> None:
        path = self._paths.small(digest)
        with failures(path):
            path.unlink(missing_ok=True)
        self._sizes.pop(path.name, None)

    def sweep(self, wanted: set[Digest], *, idle_s: float) -> None:
        """Remove those that are neither wanted nor younger than `idle_s` seconds, and files that are no small blobs."""
        oldest = time.time() - idle_s
        for name in list(self._sizes):
            path: Path = self._paths.smalls / name
            with failures(path):
                if f"sha256:{name}" not in wanted and path.stat().st_mtime < oldest:
                    path.unlink()
                    del self._sizes[name]


def _read_only(path: str, flags: int) -> int:
    """Opens a new file that nobody can write to but through this descriptor."""
    return os.open(path, flags | os.O_CLOEXEC, 0o444)
