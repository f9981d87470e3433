"""Bringing complete blobs to the disk in the background, so that a restart of the machine need not verify them again."""

from __future__ import annotations

import logging
import os
import queue
import threading

from p2pdist.model.digest import Digest
from p2pdist.model.errors import P2PDistError
from p2pdist.store.disk import sync_path
from p2pdist.store.index import Index
from p2pdist.store.paths import Paths

log = logging.getLogger(__name__)


class Settler:
    """One thread that synchronises the blobs it is told of, in order: content, piece list, directories, index; then marks them durable."""

    def __init__(self, paths: Paths, index: Index) -> None:
        self._paths = paths
        self._index = index
        self._queue: queue.SimpleQueue[tuple[Digest, Digest] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="store-settler", daemon=True)
        self._thread.start()

    def add(self, digest: Digest, pieces_digest: Digest) -> None:
        self._queue.put((digest, pieces_digest))

    def close(self) -> None:
        """Return when all that was added is settled."""
        self._queue.put(None)
        self._thread.join()

    def _run(self) -> None:
        while (found := self._queue.get()) is not None:
            digest, pieces_digest = found
            try:
                self._settle(digest, pieces_digest)
            except FileNotFoundError:
                continue  # removed, or partial again, in the meantime
            except (OSError, P2PDistError) as error:
                log.error(
                    "%s could not be brought to the disk and will be verified at the next start: %s", digest, error
                )
                self._distrust(digest)

    def _settle(self, digest: Digest, pieces_digest: Digest) -> None:
        # By path, not through the blob: a blob that is being synchronised may be removed.
        fd = os.open(self._paths.complete(digest), os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.fdatasync(fd)
        finally:
            os.close(fd)
        sync_path(self._paths.small(pieces_digest))
        sync_path(self._paths.smalls)
        sync_path(self._paths.blobs)
        self._index.checkpoint()
        self._index.set_durable(digest)

    def _distrust(self, digest: Digest) -> None:
        try:
            self._index.distrust(digest)
        except P2PDistError as error:
            log.error("%s could not be marked for verification: %s", digest, error)
