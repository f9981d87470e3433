"""What packing and pushing need of the places where packages lie: an origin, and the local layout
that packing writes to.

Structural types: the origin drivers fit them without either side importing the other.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractAsyncContextManager, AbstractContextManager
from pathlib import Path
from typing import Protocol

from p2pdist.model.digest import Digest
from p2pdist.model.errors import NotFound
from p2pdist.model.manifest import (
    MANIFEST_BYTES_MAX,
    SMALL_BYTES_MAX,
    Descriptor,
    Manifest,
    Reference,
    decode_manifest,
)


class Depot(Protocol):
    """A place that packages are read from and written to; see the origin drivers for the full
    contract."""

    @property
    def url(self) -> str: ...

    async def resolve(self, reference: Reference) -> Descriptor: ...

    async def read(self, digest: Digest, *, limit: int = SMALL_BYTES_MAX) -> bytes: ...

    async def size(self, digest: Digest) -> int | None: ...

    async def write_blob(self, digest: Digest, path: Path, *, on_bytes: Callable[[int], None] | None = None) -> int: ...

    async def write_small(self, data: bytes) -> Digest: ...

    async def tag(self, reference: Reference, descriptor: Descriptor) -> None: ...


class LocalDepot(Depot, Protocol):
    """A depot in a directory of this machine."""

    @property
    def directory(self) -> Path: ...

    def blob_path(self, digest: Digest) -> Path: ...

    def drafting(self) -> AbstractContextManager[Path]: ...

    def staging(self, purpose: str) -> AbstractContextManager[Path]: ...

    async def adopt(self, digest: Digest, path: Path) -> None: ...

    async def tags(self) -> list[tuple[str, Descriptor]]: ...

    def packing(self, *, alone: bool = False) -> AbstractAsyncContextManager[None]: ...


async def read_manifest(reference: Reference, depots: list[Depot]) -> tuple[Descriptor, Manifest, Depot]:
    """The manifest that `reference` names in the first depot that knows it. Raises NotFound naming
    all of them."""
    for depot in depots:
        try:
            descriptor = await depot.resolve(reference)
        except NotFound:
            if depot is depots[-1] and len(depots) == 1:
                raise
            continue
        data = await depot.read(descriptor.digest, limit=MANIFEST_BYTES_MAX)
        return descriptor, decode_manifest(data), depot
    raise NotFound(
        f"{reference} is not at {' nor at '.join(depot.url for depot in depots)}",
        remedy="Check the name, pack it, or name the right --origin",
    )


async def read_small(digest: Digest, depots: list[Depot], *, limit: int = SMALL_BYTES_MAX) -> bytes:
    """A small blob from the first depot that has it. Raises NotFound naming all of them."""
    for depot in depots:
        if await depot.size(digest) is not None:
            return await depot.read(digest, limit=limit)
    raise NotFound(f"blob {digest} is not at {' nor at '.join(depot.url for depot in depots)}")
