"""Repositories: where packages are read from and written to, as packing and pushing need them; and
a file as a blob, with its digest, piece list and descriptors.

The protocols are structural: the origin drivers fit them and neither side imports the other.
"""

from __future__ import annotations

import hashlib
import os
import threading
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager, AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Protocol, cast

from p2pdist.model.digest import Digest
from p2pdist.model.errors import Corrupt, NotFound, P2PDistError, UsageError, remedy_of
from p2pdist.model.manifest import (
    DOCUMENT_BYTES_MAX,
    MANIFEST_BYTES_MAX,
    PIECES_DIGEST,
    PIECES_SIZE,
    PIECES_TYPE,
    Descriptor,
    Manifest,
    Reference,
    decode_manifest,
)
from p2pdist.model.pieces import PIECES_LIMIT, PieceList, encoded_size, piece_size_for

OnProgress = Callable[[str, int, int], None]
"""Is called with the name of a step, and bytes done and in all; possibly on another thread."""


@dataclass(frozen=True, slots=True)
class Content:
    """Digest and piece list of a file."""

    digest: Digest
    pieces: PieceList

    @property
    def size(self) -> int:
        """Bytes of the file."""
        return self.pieces.layout.size

    def descriptor(self, media_type: str) -> Descriptor:
        """The descriptor of the content, which names its piece list."""
        annotations = {PIECES_DIGEST: self.pieces.digest, PIECES_SIZE: str(self.pieces.layout.piece_size)}
        return Descriptor(media_type, self.digest, self.size, annotations)

    def pieces_descriptor(self) -> Descriptor:
        """The descriptor of the piece list."""
        return Descriptor(PIECES_TYPE, self.pieces.digest, encoded_size(self.pieces.layout))


def read_content(
    path: Path, *, on_bytes: Callable[[int], None] | None = None, stopped: threading.Event | None = None
) -> Content:
    """Hash a regular file, SHA-256 and BLAKE3 in one pass. Blocks; `stopped` ends it early with
    P2PDistError.

    Raises NotFound, UsageError when it is no regular file or too large, and Corrupt when it changes
    meanwhile.
    """
    try:
        if not path.is_file():
            path.stat()
            raise UsageError(
                f"{path} is not a regular file", remedy="Name a file; a directory is packed by p2pdist pack"
            )
        with path.open("rb") as stream:
            size = os.fstat(stream.fileno()).st_size
            if size > piece_size_for(size) * PIECES_LIMIT:
                raise UsageError(f"{path} of {size} bytes is larger than a blob may be", remedy="Split it")
            reader = _Reader(stream, on_bytes, stopped)
            try:
                pieces = PieceList.of_stream(cast(BinaryIO, reader), size)
            except Corrupt as error:
                raise Corrupt(f"{path} became shorter while it was read", remedy=_WRITTEN_TO) from error
            if stream.read(1):
                raise Corrupt(f"{path} grew while it was read", remedy=_WRITTEN_TO)
    except FileNotFoundError as error:
        raise NotFound(f"there is no file {path}", remedy="Check the path") from error
    except OSError as error:
        raise P2PDistError(
            f"cannot read {path}: {error.strerror}",
            remedy=remedy_of(error),
        ) from error
    return Content(Digest("sha256:" + reader.hasher.hexdigest()), pieces)


_WRITTEN_TO = "Try again when nothing writes to it"


class _Reader:
    """A stream that computes the SHA-256 of the bytes that are read from it."""

    def __init__(
        self, stream: BinaryIO, on_bytes: Callable[[int], None] | None, stopped: threading.Event | None
    ) -> None:
        self.hasher = hashlib.sha256()
        self._stream, self._on_bytes, self._stopped = stream, on_bytes, stopped

    def read(self, length: int) -> bytes:
        if self._stopped and self._stopped.is_set():
            raise P2PDistError("reading was cancelled")
        data = self._stream.read(length)
        self.hasher.update(data)
        if self._on_bytes:
            self._on_bytes(len(data))
        return data


class Repository(Protocol):
    """An origin or a local layout. p2pdist/origin/contract.py has the contract of each method."""

    @property
    def url(self) -> str: ...

    async def resolve(self, reference: Reference) -> Descriptor: ...

    async def read(self, digest: Digest, *, limit: int = DOCUMENT_BYTES_MAX) -> bytes: ...

    async def size(self, digest: Digest) -> int | None: ...

    async def write_blob(self, digest: Digest, path: Path, *, on_bytes: Callable[[int], None] | None = None) -> int: ...

    async def write_document(self, data: bytes) -> Digest: ...

    async def tag(self, reference: Reference, descriptor: Descriptor) -> None: ...


class LocalRepository(Repository, Protocol):
    """A repository in a directory of this machine."""

    @property
    def directory(self) -> Path: ...

    def blob_path(self, digest: Digest) -> Path: ...

    def temporary_directory(self) -> AbstractContextManager[Path]: ...

    def stage_directory(self, purpose: str) -> AbstractContextManager[Path]: ...

    async def import_file(self, digest: Digest, path: Path) -> None: ...

    async def tags(self) -> list[tuple[str, Descriptor]]: ...

    def packing(self, *, alone: bool = False) -> AbstractAsyncContextManager[None]: ...


async def read_manifest(
    reference: Reference, repositories: list[Repository]
) -> tuple[Descriptor, Manifest, Repository]:
    """The manifest that `reference` names in the first repository that has it, and that repository.
    Raises NotFound naming all of them."""
    for repository in repositories:
        try:
            descriptor = await repository.resolve(reference)
        except NotFound:
            if repository is repositories[-1] and len(repositories) == 1:
                raise
            continue
        data = await repository.read(descriptor.digest, limit=MANIFEST_BYTES_MAX)
        return descriptor, decode_manifest(data), repository
    raise NotFound(
        f"{reference} is not at {' nor at '.join(repository.url for repository in repositories)}",
        remedy="Check the name, pack it, or name the right --origin",
        reference=str(reference),
    )


async def read_plain_manifest(
    reference: Reference, repositories: list[Repository]
) -> tuple[Descriptor, Manifest, Repository]:
    """What read_manifest gives, of a package that is not encrypted. Raises UsageError for one that
    is: only hosts open it."""
    described, manifest, repository = await read_manifest(reference, repositories)
    if manifest.encrypted:
        raise UsageError(
            f"{reference} at {repository.url} is encrypted, and only hosts that may read it can open it",
            remedy="Name it in the layout from which it was pushed",
        )
    return described, manifest, repository


async def read_document(digest: Digest, repositories: list[Repository], *, limit: int = DOCUMENT_BYTES_MAX) -> bytes:
    """A small blob from the first repository that has it. Raises NotFound naming all of them."""
    for repository in repositories:
        if await repository.size(digest) is not None:
            return await repository.read(digest, limit=limit)
    raise NotFound(
        f"blob {digest} is not at {' nor at '.join(repository.url for repository in repositories)}",
        remedy="Push it there, or name the right --origin",
    )
