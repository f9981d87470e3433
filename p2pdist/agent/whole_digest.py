"""Checks a blob against its own digest while it arrives.

A blob that is asked for by digest alone is cut by a piece list that only the origin vouches for, so
its SHA-256 is compared as well. The hash follows the part that is there without gaps. Its steps
become shorter towards the end, which leaves next to nothing to do when the last piece arrives:
where many hosts share a machine, all of them come to their end at the same moment.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Awaitable, Callable

from p2pdist.model.errors import Corrupt
from p2pdist.store.blobs.blob import Blob
from p2pdist.store.blobs.placement import Copy

STEP_BYTES = 4 << 20
BUFFER_BYTES = 256 << 10
"""Read at once into memory that is kept: new memory for all of a step would cost more than to read
it."""

INLINE_BYTES = 64 << 10
"""So few bytes, which have just been written, are read and hashed in less time than a thread takes
to begin."""


async def check_whole(blob: Blob, piece: Callable[[int], Awaitable[None]], copy: Copy | None = None) -> None:
    """Hash `blob` as its pieces come (`piece(i)` waits for piece i), and write what is hashed into
    `copy`. Raises Corrupt when the sum is not the blob's digest."""
    layout = blob.layout
    running = hashlib.sha256()
    buffer = memoryview(bytearray(min(BUFFER_BYTES, layout.size)))

    def take(start: int, length: int) -> None:
        for at in range(start, start + length, BUFFER_BYTES):
            view = buffer[: min(BUFFER_BYTES, start + length - at)]
            blob.read_into(at, view)
            running.update(view)
            if copy is not None:
                copy.write(at, view)

    longest = max(1, STEP_BYTES // layout.piece_size)
    after = 0
    while (first := after) < layout.count:
        after += min(longest, (layout.count - first + 1) // 2)
        for number in range(after - 1, first - 1, -1):
            await piece(number)
        start = layout.offset(first)
        length = min(layout.size, layout.offset(after)) - start
        if length <= INLINE_BYTES:
            take(start, length)
        else:
            await asyncio.to_thread(take, start, length)
    if f"sha256:{running.hexdigest()}" != blob.digest:
        raise Corrupt(
            f"the content stored as {blob.digest} hashes to {running.hexdigest()}", remedy="Push the blob again"
        )
