"""Looking at everything that a store holds: are the bytes on the disk still those of the name?"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from p2pdist.model.errors import NotFound, P2PDistError
from p2pdist.store.objects.recovery import file_hash

if TYPE_CHECKING:
    from p2pdist.store.store import BlobStore

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Checked:
    """One thing that was read: a blob, by digest, an object, by the hexadecimal BLAKE3, or a
    variant of one, as one of a tree; `size` is in bytes."""

    kind: Literal["blob", "object", "variant"]
    name: str
    size: int
    ok: bool


def verify(store: BlobStore, *, bytes_s: float | None = None) -> Iterator[Checked]:
    """Read all complete blobs, all objects and their variants, at `bytes_s` bytes a second in the
    mean, and say of each whether it is right. A wrong piece is dropped, which makes its blob
    partial; a wrong object is removed, which makes its trees incomplete: the next pull fetches what
    is missing. A wrong variant is removed, and made again when its tree is shown. What comes or
    goes meanwhile may or may not be seen. Blocks: iterate in a thread."""
    begun, read = time.monotonic(), 0
    for checked in _each(store):
        read += checked.size
        if bytes_s is not None:
            time.sleep(max(0.0, begun + read / bytes_s - time.monotonic()))
        yield checked


def _each(store: BlobStore) -> Iterator[Checked]:
    for blob in store.blobs():
        if blob.complete:
            try:
                yield Checked("blob", blob.digest, blob.size, not blob.verify(drop=True))
            except NotFound:
                continue  # removed meanwhile
            except P2PDistError as error:
                log.error("%s cannot be verified: %s", blob.digest, error)
                yield Checked("blob", blob.digest, blob.size, False)
    for content, size in list(store.objects.sizes.items()):
        try:
            path = store.objects.path(content)
            good = path.stat().st_size == size and file_hash(path) == content
        except (OSError, NotFound):
            if content not in store.objects:
                continue
            good = False
        if not good and content in store.objects:
            log.error("the object %s is damaged and is removed", content.hex())
            store.trees.drop_object(content)
        yield Checked("object", content.hex(), size, good)
    for root, size, good in store.trees.variants.verify():
        if not good:
            log.error("a variant of an object of %s is damaged and is removed", root)
        yield Checked("variant", f"variant {root}", size, good)
