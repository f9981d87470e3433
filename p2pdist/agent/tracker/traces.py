"""Traces at the tracker: an agent asks for the trace of a start, and states what a start read."""

from __future__ import annotations

import asyncio
import base64

import msgspec

from p2pdist.agent.tracker.session import TrackerSession
from p2pdist.model.trace import WANTED_HEADER, Trace, decode_trace, encode_trace


class TrackerTraces:
    """The traces that a session's tracker keeps, for this `host`."""

    def __init__(self, session: TrackerSession, host: str) -> None:
        self._session, self._host = session, host

    async def find(self, reference: str, entry: str, *, records: bool) -> tuple[Trace | None, bool]:
        """The trace of a package and entry point, None when there is none, and whether this start
        is to be recorded, if it `records`. Raises NotFound, Corrupt, Unavailable."""
        query = {"reference": reference, "entry": entry} | ({"starts": "1"} if records else {})
        _, data, headers = await self._session.exchange("/v1/traces", query, {})
        return (await asyncio.to_thread(decode_trace, data) if data else None), WANTED_HEADER in headers

    async def state(self, reference: str, entry: str, trace: Trace) -> None:
        """Give the tracker what a start read. Raises NotFound, Corrupt, TooLarge, Unavailable."""
        data = base64.b64encode(await asyncio.to_thread(encode_trace, trace)).decode()
        document = {"reference": reference, "entry": entry, "trace": data, "host": self._host}
        headers = {"Content-Type": "application/json"}
        await self._session.exchange("/v1/traces", {}, headers, msgspec.json.encode(document))
