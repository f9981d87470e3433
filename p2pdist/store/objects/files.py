"""Objects: the contents of trees, each once, as read-only files named by their BLAKE3.

    objects/<2 hex>/<62 hex>    mode 0444; an empty content has none

A file counts after its bytes have verified and were written; two writers of one content are
harmless. Drafts are files without a name, which the kernel removes with the process, or files in
tmp/ where the filesystem has no such files. On Btrfs, where a name given later costs much, contents
that are in memory, verified, are written under their names at once, some together (btrfs.py); a
killed process may leave torn ones. The objects that exist are known in memory, and written to the
index in batches behind the files; recovery.py says what is believed at the next opening. What
objects take is counted without the chunks of zeros, which are left as holes.

A pull that is about to make objects says so (`Expected`), so that their room is counted before they
exist.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import secrets
import threading
from collections import ChainMap
from collections.abc import Callable, Collection, Iterable, KeysView, Mapping, Sequence
from itertools import repeat
from pathlib import Path
from uuid import UUID

from p2pdist.model.catalog import decode_chunk
from p2pdist.model.errors import NotFound
from p2pdist.model.tree import HOLE_BYTES, ChunkList, content_hash
from p2pdist.store.disk import failure, failures, sync_filesystem_of
from p2pdist.store.index import FAILED, Index, ObjectsState
from p2pdist.store.layout import Paths
from p2pdist.store.objects.btrfs import EncodedWriter, Extents, NamedFiles, Verified, on_btrfs, write_content
from p2pdist.store.objects.recovery import recover_objects

logger = logging.getLogger(__name__)

ROWS_MAX = 100_000
"""So many rows are kept in memory before they are written: each time most pages of the table are,
whatever the number."""

HOLE_CHUNK = 512 << 10
"""Packing cuts a hole into chunks of so many zeros (package/tree/reader.py)."""

_HOLE_RECORD = ChunkList(((content_hash(bytes(HOLE_CHUNK)), HOLE_CHUNK),)).encode()

_NO_UNNAMED = {errno.EOPNOTSUPP, errno.EISDIR, errno.ENOENT, errno.EINVAL}


def bytes_taken(size: int, chunks: bytes) -> int:
    """What an object of `size` bytes with this encoded chunk list takes. Of a hole each chunk
    counts a block: it costs memory and time to make, and what is claimed of these must have a
    limit, too."""
    return size - chunks.count(_HOLE_RECORD) * (HOLE_CHUNK - HOLE_BYTES)


class TemporaryFile:
    """A file in the making: `fd` is open for reading and writing. Ends in Objects.name or
    close()."""

    __slots__ = ("extents", "fd", "path")

    def __init__(self, fd: int, path: str) -> None:
        self.fd, self.path = fd, path
        self.extents: Extents | None = None

    def flush(self) -> None:
        """Have all that was written in the file; raises OSError."""
        if self.extents is not None:
            self.extents.flush()

    def close(self) -> None:
        """Give the file up, unless it got its name. Idempotent."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1
            if self.path:
                os.unlink(self.path)


class Expected:
    """Contents that pulls are about to make objects of, and what these will take. Each counts once,
    however many pulls expect it, until it has an object or no pull expects it any more."""

    def __init__(self, objects: KeysView[bytes], lock: threading.Lock) -> None:
        """`objects` are the contents that have an object, a live view that `lock` guards."""
        self._objects, self._lock = objects, lock
        self._contents: dict[bytes, tuple[int, int]] = {}
        """By content: bytes, and the number of pulls."""
        self.bytes_total = 0

    def add(self, contents: Mapping[bytes, int]) -> None:
        """Expect contents, whose objects take so many bytes."""
        with self._lock:
            again = contents.keys() & self._contents.keys()
            for content in again:  # none of them has an object
                size, pulls = self._contents[content]
                self._contents[content] = size, pulls + 1
            # Of most pulls nothing is expected yet, and that of a large tree is many contents.
            new = [content for content in contents if content not in again and content not in self._objects]
            sizes = [contents[content] for content in new]
            self._contents.update(zip(new, zip(sizes, repeat(1)), strict=False))
            self.bytes_total += sum(sizes)

    def __len__(self) -> int:
        """How many contents are expected."""
        return len(self._contents)

    def bytes_new(self, contents: Mapping[bytes, int]) -> int:
        """Bytes of the contents that no pull expects yet."""
        if not self._contents:
            return sum(contents.values())
        return sum(size for content, size in contents.items() if content not in self._contents)

    def files_new(self, contents: Mapping[bytes, int]) -> int:
        """How many of the contents no pull expects yet."""
        return len(contents.keys() - self._contents.keys())

    def remove(self, contents: Iterable[bytes]) -> None:
        """Undo one `add` for contents that were not made."""
        with self._lock:
            for content in contents:
                size, pulls = self._contents.pop(content, (0, 0))
                if pulls > 1:
                    self._contents[content] = size, pulls - 1
                else:
                    self.bytes_total -= size

    def made(self, content: bytes) -> None:
        """A content has an object now. The caller holds the lock."""
        if self._contents and (expected := self._contents.pop(content, None)):
            self.bytes_total -= expected[0]


class Objects:
    """The objects of one store. Thread-safe. Methods raise P2PDistError when the disk fails."""

    def __init__(self, paths: Paths, index: Index, boot: UUID) -> None:
        """Open what the store has; verifies what a crash of the machine may have damaged."""
        found = recover_objects(paths, index, boot)
        self.sizes = found.sizes
        """Bytes of each object by content; only this class changes it."""
        self.unsure, self.lost = found.unsure, found.lost
        """Whether what was not brought to the disk may be lost; whether objects were."""
        self._paths, self._index, self.boot = paths, index, boot
        self._sparse: dict[bytes, int] = {}
        """What objects take that take less than their size."""
        for content, chunks in self.chunk_lists():
            if (taken := bytes_taken(self.sizes[content], chunks)) < self.sizes[content]:
                self._sparse[content] = taken
        self.bytes_total = sum(self._sparse.get(content, size) for content, size in self.sizes.items())
        self._batch, self._durable, self._clean, self._torn = found.batch + 1, found.durable, True, False
        self._failed = False
        """Whether the disk failed to take some objects. Which ones is not known, and the next
        synchronisation says nothing of them."""
        self._rows: list[tuple[bytes, int, int]] = []
        self._left: set[bytes] = set()
        self._lock = threading.Lock()
        self.expected = Expected(self.sizes.keys(), self._lock)
        self._saving = threading.Lock()
        with failures(paths.objects):
            self.encoded = EncodedWriter(paths.objects)
            """Writes chunks; on Btrfs as they are stored."""
            self.named_at_once = on_btrfs(paths.objects)
            """Whether contents are written under their names."""
            self._directory = os.open(paths.objects, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            self._unnamed = _has_unnamed_files(paths.objects)
        # The mode is given at creation, which is one call less for each file; a mask that takes it
        # away must be made up for.
        self._masked = bool(_umask() & 0o444)
        self.named = NamedFiles(self._directory, self.encoded, self._masked)
        """Makes files and directories of objects."""
        self.before_count: Callable[[], object] = lambda: None
        """Called when objects were written under their names and do not count yet."""

    # -- looking

    @property
    def directory(self) -> Path:
        """The directory of the objects."""
        return self._paths.objects

    def __contains__(self, content: bytes) -> bool:
        return content in self.sizes

    def __len__(self) -> int:
        return len(self.sizes)

    def contents(self) -> KeysView[bytes]:
        """A live view; copy it before objects may come or go."""
        return self.sizes.keys()

    def path(self, content: bytes) -> Path:
        """The file of an object; raises NotFound."""
        if content not in self.sizes:
            raise NotFound(f"the content {content.hex()} is not in the store", remedy="Pull the package again")
        return self._paths.object(content)

    @property
    def taken(self) -> Mapping[bytes, int]:
        """What each object takes of the disk; a live view."""
        return ChainMap(self._sparse, self.sizes) if self._sparse else self.sizes

    def chunk_lists(self) -> list[tuple[bytes, bytes]]:
        """The objects that were made from chunks, and their encoded chunk lists."""
        return [row for row in self._index.chunk_lists() if row[0] in self.sizes]

    # -- making

    def add(self, content: bytes, data: bytes | memoryview, stored: bytes | memoryview = b"") -> bool:
        """Verify `data` and make it an object. False means other bytes, and nothing was stored.
        `stored` is the form in which a pack has it (model/catalog.py), which some filesystems take
        as it is. Raises DiskFull."""
        if content in self.sizes:
            return True
        if content_hash(data) != content:
            return False
        self.put(content, data, stored)
        return True

    def put(self, content: bytes, data: bytes | memoryview, stored: bytes | memoryview = b"") -> None:
        """Make `data`, which has verified and is not empty, an object. Raises DiskFull."""
        if self.named_at_once:
            self.put_together([Verified(content, len(data), stored, data)])
        else:
            self._put_alone(content, data, stored)

    def put_together(self, contents: Sequence[Verified]) -> None:
        """Make objects of contents that have verified, where they are `named_at_once`; best in the
        order of their names. Raises DiskFull."""
        self._remove_rows()
        if self._clean:
            self._mark_unclean()
        made: list[tuple[bytes, int]] = []
        try:
            left = self.named.write(contents, lambda verified: made.append(verified[:2]))
        except OSError as error:
            raise failure(error, self._paths.objects, needed=sum(verified.size for verified in contents)) from error
        finally:
            self.before_count()
            self._count(made)
        for content, size, stored, data in left:
            self._put_alone(content, decode_chunk(stored, size) if data is None else data, stored)

    def _put_alone(self, content: bytes, data: bytes | memoryview, stored: bytes | memoryview) -> None:
        """Make an object of a temporary file, which gets its name when it is written."""
        self._remove_rows()
        try:
            temporary = self.begin()
            try:
                write_content(self.encoded, temporary.fd, stored or data, data)
                self._name(temporary, content)
            finally:
                temporary.close()
        except OSError as error:
            raise failure(error, self._paths.objects, needed=len(data)) from error
        self._count([(content, len(data))])

    def begin(self) -> TemporaryFile:
        """A new empty file; raises OSError."""
        if self._unnamed:
            return TemporaryFile(os.open(self._paths.objects, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o444), "")
        path = os.fspath(self._paths.temporary / secrets.token_hex(8))
        return TemporaryFile(os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC, 0o444), path)

    def write_chunk(
        self, temporary: TemporaryFile, offset: int, stored: bytes | memoryview, data: bytes | memoryview
    ) -> None:
        """Write a chunk that has verified to a temporary file that has its size; best one behind
        the other, and it is in the file after `flush`. Raises OSError."""
        if temporary.extents is None:
            temporary.extents = Extents(self.encoded, temporary.fd, os.fstat(temporary.fd).st_size)
        temporary.extents.write(offset, stored, data)

    def name(self, temporary: TemporaryFile, content: bytes, size: int, chunks: bytes) -> None:
        """Make a temporary file whose `size` bytes have verified as a whole the object `content`;
        `chunks` is its encoded chunk list. Raises OSError."""
        if content not in self.sizes:
            self._remove_rows()
            temporary.flush()
            self._index.add_chunk_list(content, chunks)
            self._name(temporary, content)
            with self._lock:
                if content not in self.sizes and (taken := bytes_taken(size, chunks)) < size:
                    self._sparse[content] = taken
            self._count([(content, size)])
        temporary.close()

    def _name(self, temporary: TemporaryFile, content: bytes) -> None:
        if self._clean:
            self._mark_unclean()
        if self._masked:
            os.fchmod(temporary.fd, 0o444)
        name = content.hex()
        target = f"{name[:2]}/{name[2:]}"
        # With a directory's descriptor, or link(2) would link the symbolic link.
        source = f"/proc/self/fd/{temporary.fd}"
        try:
            os.link(source, target, dst_dir_fd=self._directory)
        except FileNotFoundError:
            try:
                os.mkdir(name[:2], dir_fd=self._directory)
            except FileExistsError:  # another thread was faster
                self._link_over(source, target)
            else:
                self.named.made_directory(name[:2])
                self._name(temporary, content)
        except FileExistsError:  # another writer's, or a stray; what has just verified is as good or better
            self._link_over(source, target)

    def _link_over(self, source: str, target: str) -> None:
        temporary = os.fspath(self._paths.temporary / secrets.token_hex(8))
        os.link(source, temporary, dst_dir_fd=self._directory)
        os.rename(temporary, target, dst_dir_fd=self._directory)

    def _count(self, made: Iterable[tuple[bytes, int]]) -> None:
        with self._lock:
            for content, size in made:
                if content in self.sizes:
                    continue
                self.sizes[content] = size
                self.bytes_total += self._sparse.get(content, size)
                self._rows.append((content, size, self._batch))
                self.expected.made(content)
            full = len(self._rows) >= ROWS_MAX
        if full:
            self.save()

    # -- removing

    def remove(self, contents: Collection[bytes]) -> int:
        """Remove objects; returns the bytes that they took. No thread may be making one of them."""
        if not contents:
            return 0
        self._index.reserve.use()
        if self._clean:
            self._mark_unclean()
        self.save()
        with self._lock:
            freed = 0
            for content in contents:
                size = self.sizes.pop(content, 0)
                freed += self._sparse.pop(content, size)
            self.bytes_total -= freed
        # Files before the index: on a full disk the index can be written only after they are gone.
        try:
            with failures(self._paths.objects):
                for content in contents:
                    name = content.hex()
                    with contextlib.suppress(FileNotFoundError):
                        os.unlink(f"{name[:2]}/{name[2:]}", dir_fd=self._directory)
        except BaseException:
            self._torn = True  # the files that stay are looked at when the store is opened again
            raise
        finally:
            with self._lock:
                self._left.update(contents)
        self._remove_rows()
        return freed

    def _remove_rows(self) -> None:
        """Rows of what was removed: one that the index could not give up would vouch for whatever
        has the name later. Nothing is made, and files and index are not in line, before it has."""
        if self._left:
            with self._saving:
                with self._lock:
                    left = list(self._left)
                self._index.remove_objects(left)
                with self._lock:
                    self._left.difference_update(left)

    # -- the index

    def save(self) -> None:
        """Write what the index does not know yet."""
        with self._saving:
            with self._lock:
                rows, self._rows = self._rows, []
            try:
                if rows:
                    self._index.add_objects(rows)
            except BaseException:
                with self._lock:
                    self._rows += rows
                raise

    def sync(self) -> None:
        """Bring all objects to the disk, so that they need not be verified after a loss of the
        machine. Once the disk has failed to take some, the next opening verifies them."""
        with self._lock:
            batch = self._batch
            self._batch += 1
        self.save()
        if batch > self._durable:
            try:
                # By the same descriptor each time: of a new one the kernel says nothing of what
                # another synchronisation was told.
                with failures(self._paths.objects):
                    sync_filesystem_of(self._directory)
            except BaseException:
                self._failed = True
                self._write_state()
                raise
            if not self._failed:
                self._durable = batch
            self._write_state()

    def _mark_unclean(self) -> None:
        """From now on the files may be ahead of the index."""
        with self._saving:
            if self._clean:
                self._clean = False
                self._write_state()

    def _write_state(self) -> None:
        boot = f"{FAILED}{self.boot}" if self._failed else str(self.boot)
        self._index.set_objects_state(ObjectsState(boot, self._clean, self._durable))

    def close(self) -> None:
        """Save everything and mark files and index as being in line."""
        try:
            self._remove_rows()
            self.save()
            if not self._clean:
                self.sync()
                if not (self._torn or self.named.torn):
                    self._clean = True
                    self._write_state()
        finally:
            os.close(self._directory)
            self._directory = -1


def _has_unnamed_files(directory: Path) -> bool:
    try:
        os.close(os.open(directory, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o444))
    except OSError as error:
        if error.errno not in _NO_UNNAMED:
            raise
        logger.info("%s has no unnamed files: temporary files get names", directory)
        return False
    return True


def _umask() -> int:
    """The file mode creation mask, which cannot be read without changing it but from here
    (proc_pid_status(5))."""
    with open("/proc/self/status") as file:
        return next((int(line.split()[1], 8) for line in file if line.startswith("Umask:")), 0o777)
