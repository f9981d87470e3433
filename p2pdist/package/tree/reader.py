"""Reading files into packs: the BLAKE3 of their contents, chunk lists, and the chunks that no
catalog has.

Threads hash and compress (BLAKE3, zstd and system calls release the interpreter's lock): small
files in batches, large ones window by window, which this thread reads and cuts. Results are taken
in the order in which work was handed out, so packs hold chunks in walking order whichever thread
was faster, and the amount of outstanding work is bounded. A file must have the same stat(2) behind
its last byte as in the scan; otherwise it changed meanwhile, and the packing fails.

A file is `stable` when every later change is sure to change its times; the next packing reads all
other files again. Three things make a file unstable:

- It was written just before it was read, so another write may leave its times as they are, as for
  entries that are as new as git's index ("racy git").
- A store through a shared mapping changes the times only when its page is clean, that is after a
  write-back. So a file that changed lately is sent on its way to the disk before it is read. A file
  system in memory never writes back: its files are never stable.
- The file system sets no ctime at a change: sshfs, SMB, rclone, AFS and FAT show the mtime as
  ctime, and a mounted image has the times that it was made with. So only file systems in SET_CTIME
  count.

Large files are cut by content, so that an insertion changes only the chunks around it, by FastCDC
(Xia et al., "The Design of Fast Content-Defined Chunking for Data Deduplication Based Storage
Systems", TPDS 2020) as the library pyfastcdc implements it. A cut depends on at most CUT_MAX bytes
from the start of its chunk, so a window moves along the file: memory does not grow with the file,
and a file that is truncated meanwhile ends in an error, not in a signal as with mmap(2). A hole is
not read; it gives the chunks of as many zeros, so the allocation of a file leaves no mark.
"""

from __future__ import annotations

import ctypes
import errno
import functools
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Container, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

from blake3 import blake3
from pyfastcdc import FastCDC

from p2pdist.model.catalog import ChunkEncoder
from p2pdist.model.errors import P2PDistError
from p2pdist.model.tree import WHOLE_MAX, ChunkList, content_hash
from p2pdist.package.source.scan import Row, changed, file_system, unreadable

CUT_AVERAGE = 128 << 10
CUT_MIN = 32 << 10
CUT_MAX = 512 << 10
WINDOW_BYTES = 8 << 20

BATCH_FILES = 128
BATCH_BYTES = 4 << 20
WORKERS_MAX = 8
STABLE_NS = 100_000_000
"""A time stamp of a local file system is at most a tick of the kernel, 10 ms, old when it is set;
whole seconds betray a coarser one."""
STABLE_COARSE_NS = 2_000_000_000
WRITTEN_BACK_NS = 90_000_000_000
"""By then the kernel has written back what was changed: it begins after 30 s unless the machine is
told otherwise (vm.dirty_expire_centisecs, proc_sys_vm(5))."""
SET_CTIME = {
    *(0xEF53, 0x58465342, 0x9123683E, 0xF2F52010, 0x2FC12FC1, 0xCA451A4E),  # ext2-4, XFS, Btrfs, F2FS, ZFS, bcachefs
    *(0x3153464A, 0x3434, 0x01161970, 0x7461636F),  # JFS, NILFS, GFS2, OCFS2
    *(0x6969, 0x00C36400, 0x0BD00BD0, 0x47504653),  # NFS, Ceph, Lustre, GPFS: their servers do
}
"""File systems that set a file's ctime at each change, by f_type (statfs(2), linux/magic.h)."""
OVERLAY = 0x794C7630
"""overlayfs shows the times of its layers, which may be images: there a ctime counts that is not
the mtime."""

_libc = ctypes.CDLL(None, use_errno=True)
_WAIT_BEFORE_AND_WRITE = 1 | 2
"""Of sync_file_range(2): begin to write all that is dirty, also what is being written while it was
changed again."""

_offset = ctypes.c_int64

Chunk = bytes | memoryview


class Truncated(Exception):
    """The file ended before its stated size."""


def cut_file(handle: int, size: int) -> Iterator[list[Chunk]]:
    """The chunks of the first `size` bytes of an open file in order, some at a time: what a window
    holds, or a run of zeros in a hole, which is one object again and again. Raises Truncated and
    OSError."""
    at, hole = 0, (0, 0)
    while at < size:
        if at >= hole[1]:
            hole = _next_hole(handle, at, size)
        if hole[0] <= at and hole[1] - at >= CUT_MAX:
            zeros = _zero_chunk()
            count = min((hole[1] - at - CUT_MAX) // len(zeros) + 1, WINDOW_BYTES // len(zeros))
            yield [zeros] * count
            at += count * len(zeros)
            continue
        # The window may reach into a hole far enough for the last cut before it, no further.
        end = min(at + WINDOW_BYTES, size, hole[0] + CUT_MAX if hole[0] > at else size)
        chunks = _cut(_read(handle, at, end - at), last=end == size)
        yield chunks
        at += sum(map(len, chunks))


def _cut(window: bytes, *, last: bool) -> list[Chunk]:
    """The chunks of a window; the last CUT_MAX bytes are left to the next one unless the content
    ends here."""
    chunks: list[Chunk] = []
    left = len(window)
    cuts = _cutter().cut_buf(window)
    while left and (last or left >= CUT_MAX):
        data = next(cuts).data
        chunks.append(data)
        left -= len(data)
    return chunks


def _cutter() -> FastCDC:
    return FastCDC(CUT_AVERAGE, min_size=CUT_MIN, max_size=CUT_MAX)


@functools.cache
def _zero_chunk() -> bytes:
    return bytes(_cut(bytes(2 * CUT_MAX), last=False)[0])


def _next_hole(handle: int, at: int, size: int) -> tuple[int, int]:
    """Start and end of the first hole that ends behind `at`; an empty one at `size` when there is
    none."""
    try:
        start = os.lseek(handle, at, os.SEEK_HOLE)
    except OSError as error:
        if error.errno == errno.ENXIO:
            raise Truncated from error
        raise
    if start >= size:
        return size, size
    try:
        end = os.lseek(handle, start, os.SEEK_DATA)
    except OSError as error:
        if error.errno != errno.ENXIO:
            raise
        end = size
    return start, min(end, size)


def _read(handle: int, at: int, length: int) -> bytes:
    data = os.pread(handle, length, at)
    while len(data) < length:
        more = os.pread(handle, length - len(data), at + len(data))
        if not more:
            raise Truncated
        data += more
    return data


@dataclass(frozen=True, slots=True)
class FileToRead:
    """A file to read: its absolute path, and its row in the scan."""

    path: bytes
    row: Row


@dataclass(slots=True)
class Read:
    """A file that was read."""

    content: bytes
    """BLAKE3 of its content."""
    chunks: bytes = b""
    """BLAKE3 of its chunk list; empty up to WHOLE_MAX bytes."""
    stable: bool = False
    """Whether a later change is sure to change its times."""


class ChangeTimes:
    """Says whether the ctime of an entry tells of every change of it."""

    def __init__(self) -> None:
        self._types: dict[int, int] = {}
        """The types of file systems, by device."""

    def count(self, row: Row, path: bytes) -> bool:
        """Of an entry on the file system of `path`. Raises OSError."""
        kind = self._types.get(row.device)
        if kind is None:
            kind = self._types[row.device] = file_system(path)
        return kind in SET_CTIME or (kind == OVERLAY and row.ctime_ns != row.mtime_ns)


class ChunkWriter(Protocol):
    """Gets the chunks that are new."""

    @property
    def chunks(self) -> Container[bytes]:
        """Those that it has got."""

    def add(self, chunk: bytes, length: int, stored: bytes) -> None:
        """Take the stored form of a chunk of `length` bytes."""


@dataclass(slots=True)
class ContentReader:
    """Reads files and adds to `writer` the chunks that are not in `known`. `on_bytes` is called
    with the number of bytes read. Raises Corrupt when a file changes meanwhile, and P2PDistError
    when a file cannot be read or `stopped` is set.
    """

    known: Container[bytes]
    writer: ChunkWriter
    on_bytes: Callable[[int], None]
    stopped: threading.Event
    chunk_lists: dict[bytes, bytes] = field(default_factory=dict)
    """The encoded chunk lists of large files, by BLAKE3."""
    times: ChangeTimes = field(default_factory=ChangeTimes)
    _depth: int = 2 * min(os.cpu_count() or 1, WORKERS_MAX)
    """Batches and windows that are under way at a time."""
    _waiting: deque[tuple[Future[Any], Callable[[Any], None]]] = field(default_factory=deque)

    def read(self, files: Iterable[FileToRead]) -> list[Read]:
        """Read regular files, results in the same order. Empty ones are not opened."""
        results: list[Read] = []
        with ThreadPoolExecutor(self._depth // 2, thread_name_prefix="pack") as threads:
            try:
                batch: list[FileToRead] = []
                size = 0
                for file in files:
                    if file.row.size > WHOLE_MAX or len(batch) == BATCH_FILES or size > BATCH_BYTES:
                        self._hand_out(threads, batch, results)
                        batch, size = [], 0
                    if file.row.size > WHOLE_MAX:
                        self._cut(threads, file, results)
                    else:
                        batch.append(file)
                        size += file.row.size
                    self._take(self._depth)
                self._hand_out(threads, batch, results)
                self._take(0)
            except BaseException:
                threads.shutdown(wait=True, cancel_futures=True)
                raise
        return results

    def _hand_out(self, threads: ThreadPoolExecutor, batch: list[FileToRead], results: list[Read]) -> None:
        if batch:
            self._waiting.append((threads.submit(self._read_batch, batch), partial(self._add_files, results)))

    def _take(self, most: int) -> None:
        """Take results in order until at most `most` are outstanding."""
        while len(self._waiting) > most:
            if self.stopped.is_set():
                raise P2PDistError("packing was cancelled")
            future, use = self._waiting.popleft()
            use(future.result())

    # -- small files

    def _read_batch(self, batch: list[FileToRead]) -> list[tuple[Read, int, bytes | None]]:
        """On a thread: each file's result, its size, and its stored form unless some pack has
        it."""
        results = []
        own: set[bytes] = set()
        now, encoder = time.time_ns(), ChunkEncoder()
        for file in batch:
            data, clean = _read_whole(file, now)
            content = content_hash(data)
            stored = None
            if data and content not in own and not self._has(content):
                own.add(content)
                stored = encoder.encode(data)
            results.append((Read(content, stable=clean and self._stable(file, now)), len(data), stored))
        return results

    def _add_files(self, results: list[Read], found: list[tuple[Read, int, bytes | None]]) -> None:
        for read, size, stored in found:
            results.append(read)
            if stored is not None and not self._has(read.content):
                self.writer.add(read.content, size, stored)
            self.on_bytes(size)

    def _has(self, chunk: bytes) -> bool:
        # A thread may ask while another chunk is being added: what it misses then is compressed
        # once in vain.
        return chunk in self.known or chunk in self.writer.chunks

    def _stable(self, file: FileToRead, now_ns: int) -> bool:
        try:
            return self.times.count(file.row, file.path) and stable(file.row, now_ns)
        except OSError as error:
            raise unreadable(os.fsdecode(file.path), error) from error

    # -- large files

    def _cut(self, threads: ThreadPoolExecutor, file: FileToRead, results: list[Read]) -> None:
        size = file.row.size
        chunks = list[tuple[bytes, int]]()
        now = time.time_ns()
        handle = _open(file)
        try:
            clean = _write_back(handle, file.row, now)
            status = os.fstat(handle)
            _check_unchanged(file, status)
            # Of a hole there is nothing to compress: its processors are free to hash.
            whole = blake3(max_threads=blake3.AUTO if status.st_blocks * 512 < size else 1)
            for window in cut_file(handle, size):
                job = threads.submit(self._store_chunks, window)
                self._waiting.append((job, partial(self._add_chunks, chunks)))
                for chunk in window:
                    whole.update(chunk)
                self._take(self._depth)
            _check_unchanged(file, os.fstat(handle))
        except Truncated as error:
            raise changed(file.path) from error
        except OSError as error:
            raise unreadable(os.fsdecode(file.path), error) from error
        finally:
            os.close(handle)
        read = Read(whole.digest(), stable=clean and self._stable(file, now))
        done: Future[None] = Future()
        done.set_result(None)
        self._waiting.append((done, lambda _: self._add_list(read, chunks, results)))

    def _store_chunks(self, window: list[Chunk]) -> list[tuple[bytes, int, bytes | None]]:
        """On a thread: BLAKE3, length, and the stored form of each chunk unless some pack has
        it."""
        stored_chunks: list[tuple[bytes, int, bytes | None]] = []
        own: set[bytes] = set()
        encoder = ChunkEncoder()
        last: Chunk | None = None
        for data in window:
            name = stored_chunks[-1][0] if data is last else content_hash(data)
            stored = None
            if name not in own and not self._has(name):
                own.add(name)
                stored = encoder.encode(data, cut=True)
            stored_chunks.append((name, len(data), stored))
            last = data
        return stored_chunks

    def _add_chunks(
        self, chunks: list[tuple[bytes, int]], stored_chunks: list[tuple[bytes, int, bytes | None]]
    ) -> None:
        for name, length, stored in stored_chunks:
            chunks.append((name, length))
            if stored is not None and not self._has(name):
                self.writer.add(name, length, stored)
            self.on_bytes(length)

    def _add_list(self, read: Read, chunks: list[tuple[bytes, int]], results: list[Read]) -> None:
        data = ChunkList(tuple(chunks)).encode()
        read.chunks = content_hash(data)
        self.chunk_lists[read.chunks] = data
        results.append(read)


def stable(row: Row, now_ns: int) -> bool:
    """Whether a change after `now_ns` is sure to give the entry other times."""
    margin_ns = STABLE_NS if row.ctime_ns % 1_000_000_000 else STABLE_COARSE_NS
    # Only the kernel sets a ctime; an mtime far in the future was set by a program.
    return row.ctime_ns < now_ns - margin_ns and abs(row.mtime_ns - now_ns) > margin_ns


def _open(file: FileToRead) -> int:
    try:
        # A FIFO put in its place must not block.
        return os.open(file.path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError as error:
        raise changed(file.path, "vanished") from error
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENXIO):  # a symbolic link, a socket
            raise changed(file.path) from error
        raise unreadable(os.fsdecode(file.path), error) from error


def _write_back(handle: int, row: Row, now_ns: int) -> bool:
    """See that the next store through a mapping gives the file new times; False where that cannot
    be had."""
    if row.ctime_ns < now_ns - WRITTEN_BACK_NS:
        return True
    return bool(_libc.sync_file_range(handle, _offset(0), _offset(0), _WAIT_BEFORE_AND_WRITE) == 0)


def _read_whole(file: FileToRead, now_ns: int) -> tuple[bytes, bool]:
    """The content, and whether a later change is sure to change the file's times if they are old
    enough."""
    size = file.row.size
    if not size:
        return b"", True
    handle = _open(file)
    try:
        clean = _write_back(handle, file.row, now_ns)
        data = os.read(handle, size + 1)
        while 0 < len(data) < size:
            more = os.read(handle, size - len(data))
            if not more:
                break
            data += more
        _check_unchanged(file, os.fstat(handle))
    except OSError as error:
        raise unreadable(os.fsdecode(file.path), error) from error
    finally:
        os.close(handle)
    if len(data) != size:
        raise changed(file.path)
    return data, clean


def _check_unchanged(file: FileToRead, status: os.stat_result) -> None:
    row = file.row
    now = (status.st_ino, status.st_dev, status.st_mode, status.st_size, status.st_mtime_ns, status.st_ctime_ns)
    if now != (row.inode, row.device, row.mode, row.size, row.mtime_ns, row.ctime_ns):
        raise changed(file.path)
