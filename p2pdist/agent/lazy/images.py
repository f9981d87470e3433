"""The SquashFS images of a package that is shown lazily: pieces of their blobs come while the
kernel reads the images.

The blob is what is read, so nothing is written but what the pull brings.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from pathlib import Path

from p2pdist.agent.lazy.chunks import Fetcher
from p2pdist.agent.lazy.filler import PAUSE_S, PAUSE_S_MAX
from p2pdist.model.errors import Conflict, P2PDistError
from p2pdist.model.manifest import Descriptor
from p2pdist.mount.lazy.fuse import IMAGE
from p2pdist.mount.supervisor.protocol import begins
from p2pdist.store.blobs.blob import Blob


class LazyImages:
    """The images of one view. On the event loop."""

    def __init__(self, fetcher: Fetcher) -> None:
        self.directory: Path | None = None
        """That of the view, with links to their files; None while there is none."""
        self._fetcher = fetcher
        self._blobs: list[tuple[int, Descriptor, Blob]] = []
        """Where each begins, in the counting of the supervisor's protocol."""
        self._gone: Descriptor | None = None
        """One of which the view has another file than the store."""
        self._holds = ExitStack()

    async def begin(self, layers: Sequence[Descriptor], device_bytes: int) -> None:
        """Have the blobs of these `layers`, bottom to top, begun and held. They come behind a
        device of so many bytes. Raises what fetching raises."""
        places = begins([device_bytes, *(layer.size for layer in layers)])[1:]
        blobs = []
        with ExitStack() as holds:
            for place, layer in zip(places, layers, strict=True):
                blob, _ = await self._fetcher.fetch(layer, "preseed", None)
                holds.enter_context(blob.held())
                blobs.append((place, layer, blob))
            self._holds.push(holds.pop_all())
        self._blobs = blobs

    @property
    def bytes_total(self) -> int:
        """Bytes of all images."""
        return sum(layer.size for _, layer, _ in self._blobs)

    @property
    def bytes_here(self) -> int:
        """How many of them are here, but for those of a last piece that is shorter."""
        sizes = ((blob.size, len(blob.have) * blob.layout.piece_size) for _, _, blob in self._blobs)
        return sum(map(min, sizes))

    def paths(self) -> list[Path]:
        """What leads to their files. In a thread."""
        return [Path(f"/proc/self/fd/{blob.fileno()}") for _, _, blob in self._blobs]

    def check(self) -> None:
        """Raises Conflict where an image that the view reads is not the file of the blob: that was
        evicted while no agent held it, and what comes now goes into another file. In a thread."""
        for number, (_, layer, blob) in enumerate(self._blobs, 1):
            with suppress(FileNotFoundError):  # the view is out of sight
                link = self.directory / f"{IMAGE}{number}" if self.directory is not None else None
                if link is not None and not os.path.samestat(link.stat(), os.fstat(blob.fileno())):
                    self._gone = layer
        if self._gone is not None:
            raise Conflict(f"the image {self._gone.digest} was evicted under its view", remedy="Mount the view again")

    async def bring(self, offset: int, count: int, failed: list[str]) -> None:
        """Have what is in a range come, however often that fails: until the caller waits no longer.
        `failed` gets the reason of each failure. Raises Conflict where the view reads other
        files."""
        if self._blobs:
            await asyncio.to_thread(self.check)
        pause_s = PAUSE_S
        for place, layer, _ in self._blobs:
            start, end = max(offset - place, 0), min(offset + count - place, layer.size)
            while start < end:
                try:
                    await self._bring(layer, start, end - start)
                    break
                except (P2PDistError, OSError) as error:
                    failed[:] = [error.what if isinstance(error, P2PDistError) else str(error)]
                await asyncio.sleep(pause_s)
                pause_s = min(2 * pause_s, PAUSE_S_MAX)

    async def _bring(self, layer: Descriptor, start: int, length: int) -> None:
        blob, pull = await self._fetcher.fetch(layer, "preseed", None)
        if pull is not None and not blob.holds(start, length):
            await pull.demand(blob.layout.covering(start, start + length))

    def close(self) -> None:
        """Hold them no longer."""
        self._holds.close()
