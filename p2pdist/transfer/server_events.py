"""Server-sent events as a client reads them (HTML standard, 9.2): lines `event:` and `data:`, each
event ended by an empty line."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import TYPE_CHECKING

from p2pdist.model.errors import UsageError

if TYPE_CHECKING:
    import aiohttp

EVENT_BYTES_MAX = 64 << 20


async def events_of(content: aiohttp.StreamReader) -> AsyncIterator[tuple[str, bytes]]:
    """The events of an answer as they come: name and data. Raises UsageError for one of more than
    EVENT_BYTES_MAX bytes."""
    buffer = bytearray()
    async for chunk in content.iter_any():
        searched = max(0, len(buffer) - 1)
        buffer += chunk
        while (end := buffer.find(b"\n\n", searched)) >= 0:
            fields = dict(line.partition(b": ")[::2] for line in bytes(buffer[:end]).split(b"\n"))
            del buffer[: end + 2]
            searched = 0
            yield fields.get(b"event", b"").decode(errors="replace"), fields.get(b"data", b"")
        if len(buffer) > EVENT_BYTES_MAX:
            raise UsageError(f"the tracker sent an event of more than {EVENT_BYTES_MAX} bytes")
