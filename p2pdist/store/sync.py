"""Synchronisation of complete blobs and objects with the disk, in the background: after a restart
of the machine the store need not verify them again."""

from __future__ import annotations

import logging
import os
import queue
import threading
from collections.abc import Callable
from contextlib import suppress

from p2pdist.model.digest import Digest
from p2pdist.model.errors import P2PDistError
from p2pdist.store.disk import sync_path
from p2pdist.store.index import Index
from p2pdist.store.layout import Paths

logger = logging.getLogger(__name__)

GATHER_S = 1.0
"""So long blobs are gathered: the layers of one package share the synchronisation of directories
and index, and no pull waits for the disk. A machine that is lost meanwhile costs a verification."""

_Task = Callable[[], None]
_Work = tuple[Digest, Digest] | _Task


class BackgroundSync:
    """One thread that synchronises blobs in batches (contents, piece lists, directories, index) and
    then marks them durable. It runs each task, which synchronises something else, once a batch."""

    def __init__(self, paths: Paths, index: Index) -> None:
        self._paths = paths
        self._index = index
        self._queue: queue.SimpleQueue[_Work | None] = queue.SimpleQueue()
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="store-sync", daemon=True)
        self._thread.start()

    def add(self, digest: Digest, pieces_digest: Digest) -> None:
        """Synchronise a complete blob and its piece list. Returns at once."""
        self._queue.put((digest, pieces_digest))

    def add_task(self, task: Callable[[], None]) -> None:
        """Run `task` with the next batch. It may raise P2PDistError, and itself counts as not
        durable what it did not synchronise."""
        self._queue.put(task)

    def close(self) -> None:
        """Return when all that was added is synchronised."""
        self._closing.set()
        self._queue.put(None)
        self._thread.join()

    def _run(self) -> None:
        while (first := self._queue.get()) is not None:
            self._closing.wait(GATHER_S)
            batch: list[_Work] = [first]
            last = False
            while not self._queue.empty() and not last:
                more = self._queue.get()
                last = more is None
                if more is not None:
                    batch.append(more)
            self._sync_batch([work for work in batch if isinstance(work, tuple)])
            for task in dict.fromkeys(work for work in batch if not isinstance(work, tuple)):
                try:
                    task()
                except P2PDistError as error:
                    logger.error(
                        "objects could not be brought to the disk and will be verified at the next start: %s", error
                    )
            if last:
                return

    def _sync_batch(self, batch: list[tuple[Digest, Digest]]) -> None:
        synchronised = [digest for digest, pieces_digest in batch if self._synchronised(digest, pieces_digest)]
        if not synchronised:
            return
        try:
            sync_path(self._paths.documents)
            sync_path(self._paths.blobs)
            self._index.checkpoint()
            self._index.set_durable(synchronised)
        except (OSError, P2PDistError) as error:
            self._distrust(synchronised, error)

    def _synchronised(self, digest: Digest, pieces_digest: Digest) -> bool:
        """Synchronise content and piece list of one blob; False when it could not be."""
        try:
            # By path, not through the blob: a blob that is being synchronised may be removed.
            fd = os.open(self._paths.complete(digest), os.O_RDONLY | os.O_CLOEXEC)
            try:
                os.fdatasync(fd)
            finally:
                os.close(fd)
            with suppress(FileNotFoundError):  # it may be a row of the index
                sync_path(self._paths.document(pieces_digest))
        except FileNotFoundError:
            return False  # removed, or partial again, in the meantime
        except OSError as error:
            self._distrust([digest], error)
            return False
        return True

    def _distrust(self, digests: list[Digest], error: Exception) -> None:
        for digest in digests:
            logger.error(
                "%s could not be brought to the disk and will be verified at the next start: %s", digest, error
            )
            try:
                self._index.distrust(digest)
            except P2PDistError as failure:
                logger.error("%s could not be marked for verification: %s", digest, failure)
