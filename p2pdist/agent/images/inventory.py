"""The images that this host has something of, by the names under which they came."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from p2pdist.model.digest import Digest, is_digest
from p2pdist.model.errors import Conflict, NotFound, P2PDistError
from p2pdist.model.image import SCHEME, ImageReference, is_tag, parse_image
from p2pdist.model.image_manifest import INDEX_DEPTH_MAX, ImageIndex, ImageManifest, decode_image
from p2pdist.model.manifest import Descriptor
from p2pdist.model.platform import Platform
from p2pdist.store.index import ImageRecord
from p2pdist.store.store import BlobStore

OWNERS_NAMED = 3
"""Of those for which a package is pinned."""


@dataclass(frozen=True, slots=True)
class StoredImage:
    """An image of which at least one blob is in the store."""

    reference: str
    """As `pull` takes it."""
    digest: Digest
    """Of the index or manifest that the reference names."""
    documents: tuple[Digest, ...]
    """From there to the manifest of this platform."""
    blobs: tuple[Descriptor, ...]
    """Config and layers."""
    last_used: float
    """When it was asked for last, in seconds since the epoch."""


class ImageInventory:
    """Lists and removes images. Methods block; call them in a thread."""

    def __init__(self, store: BlobStore, platform: Platform) -> None:
        self._store, self._platform = store, platform

    def images(self) -> list[StoredImage]:
        """All images, by reference. One that was asked for by its digest alone has no tag; a
        manifest that a tag leads to is no image of its own."""
        records: dict[str, list[ImageRecord]] = {}
        for record in self._store.images.list():
            if is_tag(record.target) or is_digest(record.target):
                records.setdefault(record.name, []).append(record)
        return sorted(
            (image for each in records.values() for image in self._of_name(each)), key=lambda image: image.reference
        )

    def _of_name(self, records: list[ImageRecord]) -> Iterator[StoredImage]:
        covered: set[Digest] = set()
        # Tags first, then the longest ways from an index to its manifest.
        images = [image for record in records if (image := self._image(record)) is not None]
        for image in sorted(images, key=lambda image: ("@" in image.reference, -len(image.documents))):
            if "@" not in image.reference or image.digest not in covered:
                covered.update(image.documents)
                yield image

    def _image(self, record: ImageRecord) -> StoredImage | None:
        documents, digest, media_type = [record.digest], record.digest, record.media_type
        for _ in range(INDEX_DEPTH_MAX):
            data = self._store.read_document(digest)
            try:
                document = decode_image(data, media_type) if data is not None else None
                if not isinstance(document, ImageIndex):
                    break
                chosen = document.choose(self._platform)
            except P2PDistError:
                return None
            digest, media_type = chosen.digest, chosen.media_type
            documents.append(digest)
        if not isinstance(document, ImageManifest) or not any(self._store.get(b.digest) for b in document.blobs):
            return None
        mark = ":" if is_tag(record.target) else "@"
        reference = f"{SCHEME}{record.name}{mark}{record.target}"
        return StoredImage(reference, record.digest, tuple(documents), tuple(document.blobs), record.last_used)

    def complete(self, image: StoredImage) -> bool:
        """Whether all blobs are here whole."""
        stored = [self._store.get(blob.digest) for blob in image.blobs if blob.size]
        return all(blob is not None and blob.complete for blob in stored)

    def remove(self, text: str, kept: set[Digest], expected: Digest | None = None) -> str:
        """Remove an image with what neither another image needs nor `kept` has; returns its
        reference. Raises NotFound, and Conflict where it is pinned or in use, or is another one
        than the `expected` one."""
        reference = parse_image(text)
        images = self.images()
        image = next((image for image in images if image.reference == str(reference)), None)
        if image is None:
            raise NotFound(f"{reference} is not on this host", remedy="p2pdist ls says what is")
        require_same(str(reference), image.digest, expected)
        others = [other for other in images if other is not image]
        staying = kept | {blob.digest for other in others for blob in other.blobs}
        going = [blob.digest for blob in image.blobs if blob.digest not in staying]
        for digest in going:  # nothing is removed of an image that must stay
            if owners := self._store.pins.owners(digest):
                raise Conflict(
                    f"{reference} is pinned by {', '.join(sorted(owners)[:OWNERS_NAMED])}",
                    remedy=unpinning(owners),
                )
            blob = self._store.get(digest)
            if blob is not None and blob.in_use:
                raise Conflict(f"{reference} is in use", remedy="Wait for its pulls and transfers to end")
        named = {document for other in others if _name(other) == str(reference.name) for document in other.documents}
        targets = [reference.target, *(str(digest) for digest in image.documents if digest not in named)]
        self._store.images.forget(str(reference.name), targets)
        for digest in going:
            if self._store.get(digest) is not None:
                self._store.remove(digest)
        return str(reference)


def require_same(reference: str, digest: Digest, expected: Digest | None) -> None:
    """Raises Conflict where a reference names another package or image than the expected one."""
    if expected is not None and digest != expected:
        raise Conflict(f"{reference} names another package by now", remedy="p2pdist ls says which")


def unpinning(owners: Iterable[str]) -> str:
    """What ends pins of these owners: each kind has a way of its own, and the verb `pin` ends those
    that it made."""
    ways = []
    for owner in sorted(owners)[:OWNERS_NAMED]:
        kind, _, name = owner.partition(":")
        job = owner.removeprefix("slurm-")
        if kind == "pin":
            ways.append(f"p2pdist pin --remove {name}")
        elif kind == "preseed":
            ways.append(f"p2pdist preseed --cancel {name}")
        elif kind == "policy":
            ways.append(f"have the tracker's policies keep {name} no more")
        elif job != owner:
            ways.append(f"p2pdist slurm epilog --job {job}")
        else:
            ways.append(f"wait for {owner} to unpin it")
    return "Unpin it first: " + "; ".join(ways)


def is_image(text: str) -> bool:
    """Whether a reference names an image of a registry."""
    return text.startswith(SCHEME)


def _name(image: StoredImage) -> str:
    parsed: ImageReference = parse_image(image.reference)
    return str(parsed.name)
