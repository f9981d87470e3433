"""Files that have their names from the moment they are created, many of them together.

Where a name that is given later costs much, as on Btrfs, a file is created under its name and
written. Between two calls the interpreter and the filesystem push each other out of the processor's
caches: to create some files, then write them all, then close them all takes a fifth less than one
file after the other, and so does each kind of writing for itself: first the frames so small that
they become items of the filesystem's trees, then those with extents. In the order of their names,
files of one directory come together, which the filesystem enters into it together as well. Several
threads may do so at once: they wait for each other in the filesystem's trees, and yet end a little
earlier than where one creates while another one writes.

Until it is written a file is empty, and torn while it is: so it counts when the call that makes it
has said so, not before.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from typing import NamedTuple

from p2pdist.model.catalog import decode_chunk
from p2pdist.store.disk import pwrite_all
from p2pdist.store.encoded import EncodedWriter
from p2pdist.store.extents import write_content

TOGETHER = 128
"""So many files a thread has open at a time."""

_NEW = os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC


class Verified(NamedTuple):
    """A content of `size` bytes that has verified: as `stored` in a pack, or empty, and as it is,
    or None where `stored` is a frame that the filesystem takes."""

    content: bytes
    size: int
    stored: bytes | memoryview
    data: bytes | memoryview | None


class NamedFiles:
    """Makes files `<2 hex>/<62 hex>` in a directory. Thread-safe."""

    def __init__(self, directory: int, encoded: EncodedWriter, mode_masked: bool) -> None:
        """`directory` is its descriptor, `mode_masked` says that a file does not have the mode that
        it was created with."""
        self._directory, self._encoded, self._masked = directory, encoded, mode_masked
        self.torn = False
        """Whether there may be a file that is not what its name says."""

    def write(self, contents: Sequence[Verified], made: Callable[[Verified], object]) -> list[Verified]:
        """Write contents that are not empty and say of each that it is `made`. Returns those that
        have such a file already, another writer's or a stray. Raises OSError."""
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
            self._write_all(files, made)
        except BaseException:
            # By then the name may be that of another writer's file. Empty ones are removed at the
            # next opening, a torn one as well.
            self.torn = True
            for fd, _ in (*items[-1:], *files[-1:]):
                with suppress(OSError):
                    os.ftruncate(fd, 0)
            raise
        finally:
            for first, end in _runs(opened):
                os.closerange(first, end)
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


def _runs(numbers: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Those that follow one another: the first, and the one behind the last."""
    at = 0
    while at < len(numbers):
        first = end = numbers[at]
        while at < len(numbers) and numbers[at] == end:
            at, end = at + 1, end + 1
        yield first, end
