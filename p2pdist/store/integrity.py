"""Whether what is at rest is still what was verified, for little more than nothing.

Peers verify what they receive. A mount, an HTTP client and an output do not, so before one of them
reads a blob or a tree, `look` compares what is recorded with what is there:

- A blob: length and inode (one lstat(2) each).
- An object: nothing, unless the kernel said that it was changed (watch.py). Then, and once after
  each opening of the store, its length.
- What was written to since it was verified is read again and compared with its name. That is what
  the kernel named, and after an opening what changed later than the store was last known to be
  right (`mark`), by the change time of its inode.

What turns out to be wrong is dropped, as verification.py drops it: the pull that goes before each
use brings it again. A bit that the disk turned changes no time; a read of everything
(verification.py) finds that, or the file system does (Btrfs, dm-integrity).
"""

from __future__ import annotations

import logging
import os
import stat
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import suppress
from itertools import islice
from math import inf
from pathlib import Path
from typing import Literal

from p2pdist.model.digest import Digest
from p2pdist.model.errors import Corrupt, NotFound, P2PDistError
from p2pdist.store.blobs.audit import sha256_of, wrong_pieces_in_threads
from p2pdist.store.blobs.blob import Blob
from p2pdist.store.disk import failures
from p2pdist.store.index import Index
from p2pdist.store.layout import Paths
from p2pdist.store.objects.files import Objects
from p2pdist.store.objects.recovery import file_hash
from p2pdist.store.trees.inventory import Trees
from p2pdist.store.watch import Watch

logger = logging.getLogger(__name__)

SLACK_S = 0.1
"""Change times of files are up to a tick of the kernel's clock behind."""

AT_ONCE, AT_ONCE_BYTES = 2000, 256 << 20
"""So many objects, and of so many bytes, `look_at_all` looks at before others that want to look
have their turn."""

NAMED_MAX = 20
"""The log names so many objects that are found to be wrong at once."""

MARK = "right_until"

Kind = Literal["blob", "object", "image", "variant"]


class Integrity:
    """The doubts about one store. Thread-safe. Methods raise P2PDistError when the disk fails."""

    def __init__(self, paths: Paths, index: Index, blobs: Mapping[Digest, Blob], objects: Objects, trees: Trees):
        """`blobs` is the store's own mapping. Of what was changed while the store was closed, blobs
        and images are found here, objects by `look_at_all` or before they are used."""
        self.damaged: Counter[Kind] = Counter()
        """What was found to be wrong since the store was opened."""
        self._paths, self._index, self._blobs, self._objects, self._trees = paths, index, blobs, objects, trees
        self._lock = threading.Lock()
        """Of the sets below."""
        self._looking = threading.Lock()
        """Held while something is looked at: what one thread has taken out of a set, another may
        not use before it is known to be right."""
        self._written: set[Digest] = set()
        """Blobs that may have been written to since they were verified."""
        self._changed: set[bytes] = set()
        """Contents whose object may have been."""
        self._unseen: set[bytes] = set(objects.contents())
        """Contents whose object was not looked at since the store was opened."""
        self._under: set[bytes] = set()
        """Contents whose object a thread looks at now."""
        with failures(paths.root):
            self._watch = Watch(paths.blobs, paths.images, paths.objects)
            self._directory = os.open(paths.objects, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        self._since = _seconds(index.note(MARK) if self._watch.works else None)
        """What changed later than this may be wrong, in seconds since the epoch."""
        if time.time() < self._since < inf:  # the clock was set back, and change times do not tell
            self._since = 0.0
        for blob in list(blobs.values()):
            if blob.complete and self._is_later(_looked_at(blob.path)):
                self._written.add(blob.digest)
        for record in trees.records:
            image = paths.image(record.root)
            if self._is_later(_looked_at(image)):  # perhaps it was made just before a kill
                with failures(image):
                    image.unlink(missing_ok=True)
        objects.named.made_directory, objects.before_count = self._watch_directory, self._hear

    def close(self) -> None:
        """Write down until when all was right, and watch no longer. Idempotent."""
        if self._directory >= 0:
            self.mark()
            self._watch.close()
            os.close(self._directory)
            self._directory = -1

    @property
    def doubtful(self) -> list[Digest]:
        """The blobs that may have been written to since they were verified."""
        self._hear()
        with self._lock:
            return [digest for digest in self._written if digest in self._blobs]

    def look(self, digests: Iterable[Digest]) -> list[str]:
        """Look at blobs and trees that are about to be used, and drop what is not as it is
        recorded: a blob becomes partial, a tree incomplete. What is not here is passed over.
        Returns the names of what was dropped. Blocks; reads what was written to."""
        self._drain()
        dropped: list[str] = []
        with self._looking:
            for digest in digests:
                blob = self._blobs.get(digest)
                if blob is not None and blob.complete and not self._is_right(blob):
                    dropped.append(digest)
                if digest in self._trees.records and (self._changed or self._unseen):
                    contents = self._trees.records.contents(digest)
                    with self._lock:
                        doubtful = contents & (self._changed | self._unseen)
                    dropped += [content.hex() for content in self._look_at_objects(doubtful)]
        return dropped

    def doubts(self, content: bytes) -> bool:
        """Whether the object with a content, which is about to be used by itself, is to be looked
        at first. Waits for no look at others."""
        self._hear()
        with self._lock:
            known = (self._changed, self._unseen, self._under)
            return not self._watch.works or any(content in contents for contents in known)

    def look_at_object(self, content: bytes) -> None:
        """Look at an object that is in doubt, and drop it where it is not as it is recorded.
        Blocks, also while others are looked at; reads it where it was written to."""
        with self._looking:
            if self.doubts(content):
                self._look_at_objects([content])

    def look_at_all(self, go_on: Callable[[], bool] = lambda: True) -> list[str]:
        """Look at all objects that were not looked at since the store was opened, and read those
        that were written to, while `go_on`. Returns the names of what was dropped. Blocks; others
        may look meanwhile."""
        dropped: list[str] = []
        self._hear()
        while go_on():
            with self._looking:
                with self._lock:
                    some = self._some()
                if not some:
                    break
                dropped += [content.hex() for content in self._look_at_objects(some)]
        self.mark()
        return dropped

    def _some(self) -> set[bytes]:
        """Contents that `look_at_all` looks at next."""
        some, left = set(islice(self._changed, 1)), AT_ONCE_BYTES
        for content in islice(self._unseen, AT_ONCE):
            if left <= 0:
                break
            left -= self._objects.sizes.get(content) or 0
            some.add(content)
        return some

    def mark(self, *, after_s: float = 0.0) -> None:
        """Write down that all is right until now, if there is no doubt about anything, and nothing
        was written down for `after_s` seconds. Where the disk is full, more
        is read again after the next opening."""
        now = time.time() - SLACK_S
        self._hear()
        if abs(now - self._since) < after_s:
            return
        if self._watch.works and not (self._written or self._changed or self._unseen):
            try:
                self._index.set_note(MARK, repr(now))
                self._since = now
            except P2PDistError as error:  # such as a full disk
                logger.info("until when the store was right could not be written down: %s", error)

    # -- inner workings

    def _watch_directory(self, name: str) -> None:
        with self._lock:
            self._watch.add(name)

    def _hear(self) -> None:
        """Take in what the kernel says, where it says anything: else each use looks for itself, and
        there is no news for all objects between two uses."""
        if self._watch.works:
            self._drain()

    def _drain(self) -> None:
        """Hear what the kernel has to say. Objects that are being made do not count yet: what is
        said of them is their own making."""
        with self._lock:
            changes = self._watch.changes()
            self._written |= changes.blobs
            self._changed.update(content for content in changes.contents if content in self._objects)
            if changes.unknown:
                self._unseen.update(set(self._objects.contents()))
        for root in changes.images:
            if root in self._trees.records:
                image = self._paths.image(root)
                logger.error("the image %s was written to and is made again", image)
                self.damaged["image"] += 1
                with failures(image):
                    image.unlink(missing_ok=True)

    def _is_later(self, found: os.stat_result | None) -> bool:
        return found is not None and found.st_ctime > self._since

    def _look_at_objects(self, contents: Collection[bytes]) -> list[bytes]:
        """Look at objects, and no longer doubt those that are right. Returns those that were
        dropped. The caller holds `_looking`."""
        with self._lock:
            self._under = set(contents)
        try:
            return self._drop_wrong(contents)
        finally:
            with self._lock:
                self._under = set()

    def _drop_wrong(self, contents: Collection[bytes]) -> list[bytes]:
        wrong = []
        for content in contents:
            with self._lock:
                changed = content in self._changed
                self._changed.discard(content)  # a change from now on counts anew
            if not self._is_object(content, changed=changed):
                wrong.append(content)
        # Others may have dropped some since they were read, and a pull may have made them anew.
        wrong = [content for content in wrong if not self._is_object(content, changed=True)]
        if wrong:
            try:
                self._trees.drop_objects(set(wrong))
            except BaseException:  # on a full disk nothing can be written down
                with self._lock:
                    self._changed.update(wrong)
                raise
            self.damaged["object"] += len(wrong)
            for content in wrong[:NAMED_MAX]:
                logger.error("the object %s is damaged and is removed", content.hex())
            if len(wrong) > NAMED_MAX:
                logger.error("%d other objects are damaged and are removed", len(wrong) - NAMED_MAX)
        with self._lock:
            self._unseen.difference_update(contents)
        return wrong

    def _is_object(self, content: bytes, *, changed: bool) -> bool:
        size, name = self._objects.sizes.get(content), content.hex("/", 31)
        if size is None:
            return True  # removed meanwhile
        try:
            found = os.stat(name, dir_fd=self._directory, follow_symlinks=False)
            if found.st_size != size or not stat.S_ISREG(found.st_mode):
                return content not in self._objects
            return not (changed or self._is_later(found)) or file_hash(self._paths.object(content)) == content
        except OSError:  # it is missing, or cannot be read
            return content not in self._objects

    def _is_right(self, blob: Blob) -> bool:
        """Look at a complete blob, and read it where it may have been written to. False when it
        lost pieces. The caller holds `_looking`."""
        with self._lock:
            written = blob.digest in self._written or blob.files.unsettled
            self._written.discard(blob.digest)  # a change from now on counts anew
        found = _looked_at(blob.path)
        same = found is not None and stat.S_ISREG(found.st_mode) and found.st_size == blob.size
        if found is not None and same and not written and blob.files.inode in (0, found.st_ino):
            blob.files.inode = found.st_ino
            return True
        try:
            wrong = _reread(blob, found)
        except NotFound:
            return True  # removed meanwhile
        except BaseException:
            with self._lock:
                self._written.add(blob.digest)
            raise
        if wrong:
            logger.error(
                "%s: %d of its %d pieces are damaged and are dropped", blob.digest, len(wrong), blob.layout.count
            )
            self.damaged["blob"] += 1
        return not wrong


def _reread(blob: Blob, found: os.stat_result | None) -> list[int]:
    """Read the file at the path of a complete blob, which need not be the one that is open, and
    drop the pieces that are wrong; returns these. The file has its length afterwards."""
    with blob.held(), failures(blob.path):
        if found is None or not stat.S_ISREG(found.st_mode):
            if found is not None:
                blob.path.unlink()
            os.close(os.open(blob.path, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC, 0o444))
        file = os.open(blob.path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            everything = list(range(blob.layout.count))
            try:
                wrong = wrong_pieces_in_threads(file, blob.layout, everything, lambda: blob.pieces)
            except Corrupt:  # the piece list is gone
                wrong = [] if sha256_of(file) == blob.digest else everything
            now = os.fstat(file)
        finally:
            os.close(file)
        if now.st_size > blob.size:  # what is behind the content is nothing of it
            blob.path.chmod(0o644)
            os.truncate(blob.path, blob.size)
            blob.path.chmod(0o444)
        blob.files.inode = now.st_ino
        blob.drop(wrong)
        if wrong and now.st_size < blob.size:
            os.truncate(blob.path, blob.size)
    return wrong


def _looked_at(path: Path) -> os.stat_result | None:
    """What lies at a path, None for nothing. Raises P2PDistError."""
    with failures(path), suppress(FileNotFoundError):
        return os.lstat(path)
    return None


def _seconds(text: str | None) -> float:
    """A time that was written down; without one nothing is later."""
    with suppress(ValueError, TypeError):
        return float(text or inf)
    return inf
