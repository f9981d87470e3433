"""An image straight from its registry into a directory, as an OCI image layout of that image alone
(image specification 1.1, "Image Layout"). Blobs come in pieces of a response that is asked for
again from where it broke off, and are compared with their digests."""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
from collections.abc import AsyncIterator, Callable
from pathlib import Path

from aiohttp import ClientError

from p2pdist.model.digest import Digest, hex_of
from p2pdist.model.errors import Corrupt, P2PDistError, Unavailable, UsageError, foreseen
from p2pdist.model.image import ImageReference
from p2pdist.model.image_manifest import INDEX_DEPTH_MAX, ImageDocument, ImageManifest, decode_image
from p2pdist.model.manifest import Descriptor
from p2pdist.model.platform import Platform
from p2pdist.origin.registry.upstream import UpstreamRepository

BLOBS_AT_ONCE = 3
READ_BYTES = 1 << 20
TRIES_MAX = 5
ADVANCE_BYTES = 16 << 20
"""Tries that bring so much of a blob count for nothing: a proxy may end every long response."""

Report = Callable[[str, int, int], None]


async def download_image(
    reference: ImageReference,
    repository: UpstreamRepository,
    platform: Platform,
    folder: Path,
    *,
    exact: bool = True,
    report: Report = lambda what, done, total: None,
) -> None:
    """Write the image for a platform below the empty directory `folder`; `report` hears how many
    bytes have come. Raises NotFound, Refused, Corrupt, Unavailable, UsageError, P2PDistError."""
    found, document = await _manifest(reference, repository, platform, exact=exact)
    if document.unnamed:
        raise UsageError(f"{reference} has a blob that is not named by SHA-256: {document.unnamed[0]}")
    download = _Download(repository, folder, (*document.blobs, *document.foreign), report)
    await asyncio.to_thread(download.begin, found)
    try:
        await download.run()
    except BaseExceptionGroup as group:
        raise group.exceptions[0] from group


async def _manifest(
    reference: ImageReference, repository: UpstreamRepository, platform: Platform, *, exact: bool
) -> tuple[ImageDocument, ImageManifest]:
    target: str = reference.target
    for _ in range(INDEX_DEPTH_MAX):
        found = await repository.manifest(target)
        assert found is not None
        document = decode_image(found.data, found.media_type)
        if isinstance(document, ImageManifest):
            return found, document
        target = document.choose(platform, exact=exact).digest
    raise Corrupt(f"{reference} is an index of indexes, more than {INDEX_DEPTH_MAX} deep")


class _Download:
    """The blobs of one image on their way into a layout."""

    def __init__(
        self, repository: UpstreamRepository, folder: Path, blobs: tuple[Descriptor, ...], report: Report
    ) -> None:
        self._repository, self._folder, self._blobs, self._report = repository, folder, blobs, report
        self._slots = asyncio.Semaphore(BLOBS_AT_ONCE)
        self._done, self._total = 0, sum(blob.size for blob in blobs)

    def begin(self, manifest: ImageDocument) -> None:
        """Write all but the blobs."""
        try:
            self._path(manifest.digest).parent.mkdir(parents=True)
            self._path(manifest.digest).write_bytes(manifest.data)
            entry = {"mediaType": manifest.media_type, "digest": manifest.digest, "size": len(manifest.data)}
            (self._folder / "index.json").write_text(json.dumps({"schemaVersion": 2, "manifests": [entry]}))
            (self._folder / "oci-layout").write_text('{"imageLayoutVersion":"1.0.0"}')
        except OSError as error:
            raise self._failed(error) from error

    async def run(self) -> None:
        async with asyncio.TaskGroup() as group:
            for blob in self._blobs:
                group.create_task(self._bring(blob))

    async def _bring(self, blob: Descriptor) -> None:
        path, hasher = self._path(blob.digest), hashlib.sha256()
        async with self._slots:
            try:
                with path.open("wb") as file:
                    came = tries = 0
                    while tries < TRIES_MAX:
                        begun = came
                        broken: Exception | None = None
                        try:
                            async for data in self._rest(blob, came):
                                came += len(data)
                                if came > blob.size:
                                    raise Corrupt(f"the registry sent more of {blob.digest} than its manifest states")
                                await asyncio.to_thread(file.write, data)
                                hasher.update(data)
                                self._done += len(data)
                                self._report("downloading", self._done, self._total)
                        except (Unavailable, ClientError, TimeoutError) as error:
                            broken = error
                        if came == blob.size:
                            break
                        tries = 0 if came - begun >= ADVANCE_BYTES else tries + 1
                        if broken is not None and tries == TRIES_MAX:
                            raise _broken(blob.digest, broken) from broken
            except OSError as error:
                raise self._failed(error) from error
        if came != blob.size or f"sha256:{hasher.hexdigest()}" != blob.digest:
            raise Corrupt(
                f"{self._repository.name}: the registry sent something else for {blob.digest}",
                remedy="Try again; if it stays so, the registry's copy is damaged",
            )

    async def _rest(self, blob: Descriptor, start: int) -> AsyncIterator[bytes]:
        """The bytes of a blob from `start` on."""
        if start >= blob.size:
            return
        async with self._repository.blob_response(blob.digest, start, blob.size - start if start else 0) as response:
            skipped = start if response.status == 200 else 0
            async for data in response.content.iter_chunked(READ_BYTES):
                cut = min(skipped, len(data))
                skipped -= cut
                if cut < len(data):
                    yield data[cut:] if cut else data

    def _path(self, digest: Digest) -> Path:
        return self._folder / "blobs" / "sha256" / hex_of(digest)

    def _failed(self, error: OSError) -> P2PDistError:
        known = foreseen(error)
        return known or P2PDistError(f"cannot write below {self._folder}: {os.strerror(error.errno or 0)}")


def _broken(digest: Digest, error: Exception) -> Unavailable:
    why = error.what if isinstance(error, P2PDistError) else str(error) or type(error).__name__
    return Unavailable(f"{digest} does not come: {why}", remedy="Try again later")
