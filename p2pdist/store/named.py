"""Files that have their names from the moment they are created, many of them together.

Where a name that is given later costs much, as on Btrfs, a file is created under its name and written. Between two calls the interpreter
and the filesystem push each other out of the processor's caches: to create some files, then write them all, then close them all takes a
fifth less than one file after the other. In the order of their names, files of one directory come together, which the filesystem enters
into it together as well. And one thread creates while another one writes: two that do the same wait for each other in the interpreter and
in the filesystem's trees, which takes a tenth more of the processors and no less time. A frame so small that it becomes an item of these
trees is written by the thread that creates, for the same reason. A content of several blocks waits mostly for the disk, and keeps nobody
from writing. Others decode and verify meanwhile.

Until it is written a file is empty, and torn while it is: so it counts when the call that makes it has said so, not before.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from contextlib import nullcontext, suppress
from typing import NamedTuple

from p2pdist.model.catalog import BLOCK_SIZE, decode_chunk
from p2pdist.store.disk import pwrite_all
from p2pdist.store.encoded import EncodedWriter
from p2pdist.store.extents import write_content

TOGETHER = 128
"""So many files a thread has open at a time."""

_NEW = os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC


class Verified(NamedTuple):
    """A content of `size` bytes that has verified: as `stored` in a pack, or empty, and as it is, or None where `stored` is a frame that
    the filesystem takes."""

    content: bytes
    size: int
    stored: bytes | memoryview
    data: bytes | memoryview | None


class NamedFiles:
    """Makes files `<2 hex>/<62 hex>` in a directory. Thread-safe."""

    def __init__(self, directory: int, encoded: EncodedWriter, mode_masked: bool) -> None:
        """`directory` is its descriptor, `mode_masked` says that a file does not have the mode that it was created with."""
        self._directory, self._encoded, self._masked = directory, encoded, mode_masked
        self._creating, self._writing = threading.Lock(), threading.Lock()
        self.torn = False
        """Whether there may be a file that is not what its name says."""

    def write(self, contents: Sequence[Verified], made: Callable[[Verified], object]) -> list[Verified]:
        """Write contents that are not empty and say of each that it is `made`. Returns those that have such a file already, another
        writer's or a stray. Raises OSError."""
        left: list[Verified] = []
        for at in range(0, len(contents), TOGETHER):
            left += self._write_some(contents[at : at + TOGETHER], made)
        return left

    def _write_some(self, contents: Sequence[Verified], made: Callable[[Verified], object]) -> list[Verified]:
        opened: list[int] = []
        items: list[tuple[int, Verified]] = []
        files: list[tuple[int, Verified]] = []
        left: list[Verified] = []
        try:
            with self._creating:
                for each in contents:
                    try:
                        fd = self._create(each.content.hex("/", 31))
                    except FileExistsError:
                        left.append(each)
                        continue
                    opened.append(fd)
                    in_tree = each.data is None and self._encoded.in_tree(len(each.stored), each.size)
                    (items if in_tree else files).append((fd, each))
                self._write_all(items, made)
            if files:
                with nullcontext() if any(each.size > BLOCK_SIZE for each in contents) else self._writing:
                    self._write_all(files, made)
        except BaseException:
            # By then the name may be that of another writer's file. Empty ones are removed at the next opening, a torn one as well.
            self.torn = True
            for fd, _ in (*items[-1:], *files[-1:]):
                with suppress(OSError):
                    os.ftruncate(fd, 0)
            raise
        finally:
            for fd in opened:
                os.close(fd)
        return left

    def _write_all(self, files: list[tuple[int, Verified]], made: Callable[[Verified], object]) -> None:
        """Those that stay in the list are not written; the last of them may have been begun."""
        files.reverse()
        while files:
            fd, each = files[-1]
            self._write_one(fd, each)
            files.pop()
            made(each)

    def _create(self, name: str) -> int:
        try:
            return os.open(name, _NEW, 0o444, dir_fd=self._directory)
        except FileNotFoundError:
            with suppress(FileExistsError):
                os.mkdir(name[:2], dir_fd=self._directory)
            return os.open(name, _NEW, 0o444, dir_fd=self._directory)

    def _write_one(self, fd: int, each: Verified) -> None:
        _, size, stored, data = each
        if data is not None:
            write_content(self._encoded, fd, stored or data, data)
        elif not self._encoded.write_frame(fd, stored, size):
            pwrite_all(fd, decode_chunk(stored, size), 0)
        if self._masked:
            os.fchmod(fd, 0o444)
