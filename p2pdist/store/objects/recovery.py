"""Recovery of objects when a store is opened: which of the files that a stopped, killed or lost
process left can be trusted.

Rows and files agree when the store was closed in order. After a kill they may not: rows are written
in batches, behind the files, and a file may have got its name before it was written to the end. So
files without a row are verified against their names and taken in. Under another boot what has not
reached the disk may be torn, too: objects of batches that are not durable. So may these be where
the disk failed to take some: the kernel says that once, and gives the pages that it lost as they
were for as long as it has them. They are read from the disk then.
"""

from __future__ import annotations

import errno
import logging
import mmap
import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from uuid import UUID

from blake3 import blake3

from p2pdist.model.tree import HASH_SIZE
from p2pdist.store.disk import UNREADABLE, failures, forget
from p2pdist.store.index import FAILED, Index, ObjectsState
from p2pdist.store.layout import Paths

logger = logging.getLogger(__name__)

STEP_BYTES = 1 << 20
_LOST = {errno.ENOSPC, errno.EDQUOT}
"""What the kernel says of a file that the disk failed to take when it is read from the disk."""

_THREADS = min(4, os.cpu_count() or 1)


@dataclass(frozen=True, slots=True)
class Recovered:
    """The objects that a store has when it is opened."""

    sizes: dict[bytes, int]
    """In bytes, by content."""
    batch: int
    """The last batch."""
    durable: int
    """The last batch of which all objects have reached the disk for certain."""
    unsure: bool
    """Whether what was not brought to the disk for certain may be lost: the store was last open
    under another boot, or the disk failed to take something."""
    lost: bool
    """Whether objects were lost."""


def recover_objects(paths: Paths, index: Index, boot: UUID) -> Recovered:
    """All objects of a store that is locked but not yet in use; rows and files agree afterwards.
    Raises P2PDistError."""
    sizes, state = index.objects(), index.objects_state()
    batch = index.last_batch()
    failed = state is not None and state.boot.startswith(FAILED)
    other = state is None or state.boot.removeprefix(FAILED) != str(boot)
    durable = state.durable if state is not None else 0
    gone, strays = [], []
    if state is None or not state.clean:
        with failures(paths.objects):
            listed = _listed(paths.objects)
        gone = [content for content in sizes if content not in listed]
        for content in gone:
            del sizes[content]
        index.remove_objects(gone)
        strays = [content for content in listed if content not in sizes]
    doubtful = list(index.objects(after=durable)) if other or failed else []
    found = _verified(paths, strays, from_disk=failed)
    good = _verified(paths, [content for content in doubtful if content in sizes], from_disk=failed)
    dropped = [content for content in doubtful if content in sizes and good.get(content) != sizes[content]]
    for content in dropped:
        del sizes[content]
    index.remove_objects(dropped)
    sizes |= found
    if found:
        batch += not other
        index.add_objects([(content, size, batch) for content, size in found.items()])
    # What was read after the start of the machine had reached the disk.
    durable = batch if other else durable
    index.set_objects_state(ObjectsState(str(boot), clean=True, durable=durable))
    if dropped:
        logger.warning("%d objects did not survive and are dropped", len(dropped))
    return Recovered(sizes, batch, durable, other or failed, bool(gone or dropped))


def file_hash(path: Path | str) -> bytes:
    """The BLAKE3 of a file; raises OSError. It is read: where a mapped page cannot be, the kernel
    ends the process."""
    state = blake3()
    with open(path, "rb", buffering=0) as file:
        buffer = memoryview(bytearray(min(STEP_BYTES, os.fstat(file.fileno()).st_size + 1)))
        while count := file.readinto(buffer):
            state.update(buffer[:count])
    return state.digest()


def _hash_on_disk(path: Path) -> bytes:
    """The BLAKE3 of a file as the disk has it: the kernel does not let go of pages that a program
    has mapped, as its libraries. Where a file system reads through its pages alone, what these say.
    Raises OSError, also where the disk failed to take the file."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_DIRECT)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        return file_hash(path)
    state, done = blake3(), 0
    try:
        with mmap.mmap(-1, STEP_BYTES) as buffer:  # aligned
            size = os.fstat(fd).st_size
            while done < size and (count := os.preadv(fd, [buffer], done)):
                state.update(buffer[:count])
                done += count
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        return file_hash(path)
    finally:
        os.close(fd)
    return state.digest()


def _listed(directory: Path) -> set[bytes]:
    """The contents that have a file. A file with any other name is removed."""
    contents = set()
    for folder in directory.iterdir():
        prefix = folder.name
        if not _is_hex(prefix, 2) or not folder.is_dir():
            logger.warning("%s does not belong into the store and is left alone", folder)
            continue
        for name in os.listdir(folder):
            if _is_hex(name, 2 * HASH_SIZE - 2):
                contents.add(bytes.fromhex(prefix + name))
            else:
                (folder / name).unlink()
    return contents


def _is_hex(name: str, length: int) -> bool:
    return len(name) == length and not set(name) - set("0123456789abcdef")


def _verified(paths: Paths, contents: list[bytes], *, from_disk: bool) -> dict[bytes, int]:
    """Sizes of the contents whose files are what their names say; the others are removed."""

    def check(content: bytes) -> int | None:
        return _check(paths.object(content), content, from_disk)

    found = {}
    with failures(paths.objects), ThreadPoolExecutor(_THREADS, thread_name_prefix="store-recovery") as pool:
        for content, size in zip(contents, pool.map(check, contents), strict=True):
            if size is not None:
                found[content] = size
    return found


def _check(path: Path, content: bytes, from_disk: bool) -> int | None:
    try:
        size = path.stat().st_size
        if from_disk and size > 0:  # else it may be no file
            forget(path)
        # Empty is what a lost machine leaves of most new files.
        good = size > 0 and (_hash_on_disk(path) if from_disk else file_hash(path)) == content
    except FileNotFoundError:
        return None
    except OSError as error:
        if error.errno not in UNREADABLE and not (from_disk and error.errno in _LOST):
            raise
        good = False
    if not good:
        path.unlink()
    return size if good else None
