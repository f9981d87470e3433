"""Reading a part of a store slowly, to find what changed at rest.

A part is a complete blob, or the objects whose names begin with the same byte, or all variants. Two
blocks are read with a pause between them, and nothing is held meanwhile: what is read may be
evicted. Pages that were read are not kept longer for it (posix_fadvise(2), POSIX_FADV_NOREUSE). A
page that the kernel still has is not read from the disk again; then programs do not, either.
"""

from __future__ import annotations

import ctypes
import logging
import os
import platform
import threading
from collections.abc import Iterator
from contextlib import suppress

from p2pdist.model.errors import Corrupt, NotFound
from p2pdist.store.blobs.audit import wrong_pieces
from p2pdist.store.blobs.blob import Blob, drop_if_wrong
from p2pdist.store.store import BlobStore
from p2pdist.store.verification import NOREUSE, READ_BYTES, Checked, Pace, is_right

logger = logging.getLogger(__name__)

_IOPRIO_SET = {"x86_64": 251, "aarch64": 30}
_WHO_PROCESS, _CLASS_IDLE, _NICE = 1, 3 << 13, 19
_libc = ctypes.CDLL(None, use_errno=True)


def yield_to_others() -> None:
    """Let all other threads go before this one, at the processor and at disks whose scheduler knows
    priorities (ioprio_set(2))."""
    thread = threading.get_native_id()
    with suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, thread, _NICE)
    if (number := _IOPRIO_SET.get(platform.machine())) is not None:
        _libc.syscall(number, _WHO_PROCESS, thread, _CLASS_IDLE)


def read_blob(store: BlobStore, blob: Blob, pace: Pace) -> Checked | None:
    """Read a complete blob and drop the pieces that are wrong; None when it was removed meanwhile.
    Blocks; raises P2PDistError."""
    wrong: list[int] = []
    at_once = max(1, READ_BYTES // blob.layout.piece_size)
    try:
        for first in range(0, blob.layout.count, at_once):
            pieces = range(first, min(first + at_once, blob.layout.count))
            with blob.held():
                if not blob.complete:
                    return None
                file = blob.fileno()
                os.posix_fadvise(file, 0, 0, NOREUSE)
                wrong += wrong_pieces(file, blob.layout, pieces, lambda: blob.pieces)
            pace(sum(map(blob.layout.length, pieces)))
        if wrong := drop_if_wrong(blob, wrong):
            logger.error("%s: %d of its %d pieces are damaged", blob.digest, len(wrong), blob.layout.count)
            store.integrity.damaged["blob"] += 1
    except Corrupt as error:  # the piece list is gone: the next pull brings it
        logger.warning("%s cannot be read again: %s", blob.digest, error)
        return None
    except NotFound:
        return None
    return Checked("blob", blob.digest, blob.size, not wrong)


def read_objects(store: BlobStore, prefix: str, pace: Pace) -> Iterator[Checked]:
    """Read the objects of one directory and remove those that are wrong. Blocks; raises
    P2PDistError."""
    objects = store.objects
    first = int(prefix, 16)
    for content in sorted(name for name in list(objects.contents()) if name[0] == first):
        size = objects.sizes.get(content)
        if size is None:
            continue
        try:
            good = is_right(store.objects.path(content), content, size, pace)
        except (OSError, NotFound):
            good = False
        if content not in objects:
            continue
        if not good:
            logger.error("the object %s is damaged and is removed", content.hex())
            store.integrity.damaged["object"] += 1
            store.trees.drop_objects({content})
        yield Checked("object", content.hex(), size, good)


def read_variants(store: BlobStore, pace: Pace) -> Iterator[Checked]:
    """Read all variants and remove those that are wrong. Blocks; raises P2PDistError."""
    for root, size, good in store.trees.variants.verify():
        pace(size)
        if not good:
            logger.error("a variant of an object of %s is damaged and is removed", root)
            store.integrity.damaged["variant"] += 1
        yield Checked("variant", f"variant {root}", size, good)
