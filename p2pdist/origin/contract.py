"""Central storage: what the rest of the system may ask of an origin.

An origin is an OCI image layout (image specification 1.0, "Image Layout"): `oci-layout`,
`index.json` with the tags, and `blobs/sha256/<hex>`. Its URL alone selects the driver (drivers.py).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from p2pdist.model.digest import Digest
from p2pdist.model.manifest import DOCUMENT_BYTES_MAX, Descriptor, Reference

WEB_SCHEMES = ("http", "https")
"""URLs of origins that are only read."""


@dataclass(frozen=True, slots=True)
class Tagged:
    """A tag of an origin. `created` is when it was set (RFC 3339), `title` the name of the file
    that was pushed alone; each empty where the origin does not keep it."""

    reference: str
    descriptor: Descriptor
    created: str = ""
    title: str = ""


class Origin(Protocol):
    """Central storage. Every failure names `url`: NotFound, Refused, Unavailable (try again later)
    or Corrupt."""

    @property
    def url(self) -> str:
        """Where this is, for messages; without credentials."""

    async def resolve(self, reference: Reference) -> Descriptor:
        """The manifest that a reference names. Raises NotFound."""

    async def read(self, digest: Digest, *, limit: int = DOCUMENT_BYTES_MAX) -> bytes:
        """A whole document, verified. Raises NotFound, Corrupt, or TooLarge over `limit` bytes."""

    async def read_range(self, digest: Digest, start: int, length: int) -> bytes:
        """Exactly `length` bytes of a blob from `start`, unverified. Raises NotFound, or Corrupt
        when the blob ends before."""

    async def size(self, digest: Digest) -> int | None:
        """Size in bytes of a blob, None when it is not there."""

    async def write_blob(self, digest: Digest, path: Path, *, on_bytes: Callable[[int], None] | None = None) -> int:
        """Send the file as the blob `digest`, verifying it on the way; the blob appears whole or
        not at all.

        Returns the bytes sent: 0 when a blob of that size was there. `on_bytes` hears of each chunk
        sent, on another thread.
        """

    async def write_document(self, data: bytes) -> Digest:
        """Send `data` as a blob unless it is there; returns its digest."""

    async def tag(self, reference: Reference, descriptor: Descriptor) -> None:
        """Let `reference` name the manifest; tags that others set meanwhile are kept."""

    async def tags(self) -> list[tuple[str, Descriptor]]:
        """All references and their manifests, sorted."""

    async def listing(self) -> list[Tagged]:
        """All tags, sorted by reference, with when each was set."""

    async def untag(self, reference: Reference) -> Descriptor:
        """Remove a tag; the blobs stay. Returns what it named. Raises NotFound."""

    async def roots(self) -> list[tuple[str, Descriptor]]:
        """All that the index names, with and without tags: a name for messages and the descriptor.
        Raises NotFound without an index, and Corrupt when an entry is malformed."""

    async def blobs(self) -> list[tuple[Digest, int, float]]:
        """All blobs: digest, size in bytes, and when each was written, in seconds since 1970 by the
        storage's clock."""

    async def remove(self, digests: Sequence[Digest]) -> None:
        """Delete blobs; one that is not there is passed over."""

    async def remove_unfinished(self, *, dry_run: bool = False) -> tuple[int, int]:
        """Delete what writers that are certainly gone left unfinished; returns how many files, and
        how many bytes, it was."""

    async def notes(self) -> list[tuple[str, float]]:
        """Names of the small notes by which writers and collections know of each other, and when
        each was written, as in blobs()."""

    async def read_note(self, name: str) -> bytes | None:
        """What a note says, None when it is gone."""

    async def write_note(self, name: str, data: bytes) -> None:
        """Write a note, or write it again. Raises TooLarge."""

    async def remove_notes(self, names: Sequence[str]) -> None:
        """Remove notes; one that is not there is passed over."""

    def packing(self, *, alone: bool = False) -> AbstractAsyncContextManager[None]:
        """A lock on a directory: while it is held, no other process holds it `alone`, or none holds
        it at all if this one is `alone`. In a bucket it locks nothing. Raises Conflict after
        PACKING_WAIT_S."""

    async def close(self) -> None:
        """Release threads and connections."""
