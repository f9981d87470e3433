"""Verification of a whole store: are the bytes on the disk still those of the name?"""

from __future__ import annotations

import logging
import os
import stat
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Literal

from blake3 import blake3

from p2pdist.model.errors import NotFound, P2PDistError
from p2pdist.store.blobs.blob import Blob
from p2pdist.store.objects.files import Objects
from p2pdist.store.trees.inventory import Trees

PAUSE_S_MAX = threading.TIMEOUT_MAX
"""A rate may be so low that no clock counts the seconds of a pause."""

READ_BYTES = 4 << 20
"""An object is read in steps of this many bytes."""

NOREUSE = 5
"""POSIX_FADV_NOREUSE (linux/fadvise.h)."""

Pace = Callable[[int], None]
"""Called with the number of bytes that were read; waits, or raises to end the reading."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Checked:
    """One file that was read."""

    kind: Literal["blob", "object", "variant"]
    name: str
    """A blob's digest, an object's hexadecimal BLAKE3, or the tree of a variant."""
    size: int
    """In bytes."""
    ok: bool


def verify(
    blobs: Iterable[Blob],
    objects: Objects,
    trees: Trees,
    *,
    bytes_s: float | None = None,
    stop: threading.Event | None = None,
) -> Iterator[Checked]:
    """Read all complete blobs, all objects and their variants, at `bytes_s` bytes a second in the
    mean, and yield for each whether it is right.

    A wrong piece is dropped, which makes its blob partial; a wrong object is removed, which makes
    its trees incomplete: the next pull fetches what is missing. A wrong variant is removed, and the
    next mount of its tree makes it again. Whatever appears or goes meanwhile may be left out. After
    `stop` it waits no more, and ends with the file that it is reading. Blocks: iterate in a thread.
    """
    begun, read, stop = time.monotonic(), 0, stop or threading.Event()
    for checked in chain(_blobs(blobs), _objects(objects, trees), _variants(trees)):
        read += checked.size
        if bytes_s is not None:
            stop.wait(min(PAUSE_S_MAX, max(0.0, begun + read / bytes_s - time.monotonic())))
        yield checked
        if stop.is_set():
            return


def _blobs(blobs: Iterable[Blob]) -> Iterator[Checked]:
    for blob in blobs:
        if blob.complete:
            try:
                yield Checked("blob", blob.digest, blob.size, not blob.verify(drop=True))
            except NotFound:
                continue  # removed meanwhile
            except P2PDistError as error:
                logger.error("%s cannot be verified: %s", blob.digest, error)
                yield Checked("blob", blob.digest, blob.size, False)


def _objects(objects: Objects, trees: Trees) -> Iterator[Checked]:
    for content, size in list(objects.sizes.items()):
        try:
            good = is_right(objects.path(content), content, size)
        except (OSError, NotFound):
            if content not in objects:
                continue
            good = False
        if not good and content in objects:
            logger.error("the object %s is damaged and is removed", content.hex())
            trees.drop_objects({content})
        yield Checked("object", content.hex(), size, good)


def is_right(path: Path, content: bytes, size: int, pace: Pace | None = None) -> bool:
    """Whether the file of an object is what the object's name says. What was read is not kept in
    memory longer for it (posix_fadvise(2), POSIX_FADV_NOREUSE). Raises OSError, and what `pace`
    raises."""
    while True:
        file = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            found = os.fstat(file)
            if stat.S_ISREG(found.st_mode) and found.st_size == size and _hash_of(file, pace) == content:
                return True
            if os.path.samestat(found, os.lstat(path)):  # else it was made anew meanwhile
                return False
        finally:
            os.close(file)


def _hash_of(file: int, pace: Pace | None) -> bytes:
    os.posix_fadvise(file, 0, 0, NOREUSE)
    state, buffer = blake3(), memoryview(bytearray(min(READ_BYTES, os.fstat(file).st_size + 1)))
    while count := os.readv(file, [buffer]):
        state.update(buffer[:count])
        if pace is not None:
            pace(count)
    return state.digest()


def _variants(trees: Trees) -> Iterator[Checked]:
    for root, size, good in trees.variants.verify():
        if not good:
            logger.error("a variant of an object of %s is damaged and is removed", root)
        yield Checked("variant", f"variant {root}", size, good)
