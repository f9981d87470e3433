"""Traces of packages for their hosts: recordings are checked as they come, kept
(tracker/core/traces, tracker/state/traces.py), and merged when a trace is asked for.

Thousands of agents ask for the same trace at the same moment, so it is made once, in a thread.
What is not in the database, because it does not answer, is kept in memory all the same: a trace is
a convenience.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from p2pdist.model.errors import Corrupt, Unavailable, UsageError
from p2pdist.model.trace import Trace, decode_trace, encode_trace, merge
from tracker.core.traces.index import Key, Recording, Summary, TraceIndex
from tracker.joined_reads import JoinedReads
from tracker.state.traces import Row, TraceRecords

REFRESH_S = 30.0
"""So often the database is asked what other trackers have heard."""

FORGET_S = 3600.0
OVERLAP_S = 60.0
"""The clocks of trackers with one database differ by less."""

HOST_CHARACTERS_MAX = 320

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class TraceCounts:
    """What a tracker keeps: packages' entry points that have recordings, recordings, and the bytes
    of these."""

    entries: int
    recordings: int
    bytes: int


class Traces:
    """The traces of one tracker. `records` outlive the process; None: nothing does."""

    def __init__(self, records: TraceRecords | None = None) -> None:
        self._records, self._index = records, TraceIndex()
        self._reads = JoinedReads("the tracker")
        self._refreshed_at: float | None = None
        """When the database was read last, of the monotonic clock; None: never."""
        self._newest = 0.0
        """When the newest recording that was read from it was stated, or when it was read where
        that is earlier."""
        self._forgot_at = 0.0
        self.answered: Counter[str] = Counter()
        """Requests for a trace: "found", and "none" where none is kept."""
        self.merged = 0
        """Traces that were made of recordings."""

    async def state(self, key: Key, host: str, data: bytes) -> Trace:
        """Keep what a host recorded of a start, and return it decoded. Raises UsageError for what
        is no trace, or says nothing."""
        if not host or len(host) > HOST_CHARACTERS_MAX or not host.isprintable():
            raise UsageError(f"{host[:100]!r} is no name of a host")
        try:
            trace = await asyncio.to_thread(decode_trace, data)
        except Corrupt as error:  # nothing that was kept is wrong: the host sent it
            raise UsageError(error.what) from error
        if not trace.spans:
            raise UsageError("the trace is empty")
        await self._refresh()
        recording = Recording(host, time.time(), data)
        forgotten = self._index.state(key, recording) + self._forget(recording.stated_at)
        if self._records is not None:
            row = (key.name, key.entry, host, recording.stated_at, data)
            await self._write(self._records, row, [(gone.name, gone.entry, name) for gone, name in forgotten])
        return trace

    async def find(self, key: Key) -> bytes:
        """The encoded trace of a key, empty when there is none."""
        await self._refresh()
        trace = self._index.trace(key)
        if trace is None:
            recordings = self._index.recordings(key, now=time.time())
            trace = await self._reads.read(f"{key}", lambda: self._merge(key, recordings)) if recordings else b""
        self.answered["found" if trace else "none"] += 1
        return trace

    def invite(self, key: Key) -> bool:
        """Whether a host that starts the package now is to record it."""
        return self._index.invite(key, now=time.time())

    async def summaries(self) -> list[Summary]:
        """What is kept."""
        await self._refresh()
        return self._index.summaries()

    @property
    def counts(self) -> TraceCounts:
        """How much is kept now."""
        return TraceCounts(*self._index.counts, self._index.bytes)

    def close(self) -> None:
        """Disconnect from the database."""
        if self._records is not None:
            self._records.close()

    async def _merge(self, key: Key, recordings: tuple[bytes, ...]) -> bytes:
        trace = await asyncio.to_thread(_merged, recordings)
        self.merged += 1
        self._index.note_trace(key, recordings, trace, now=time.time())
        return trace

    def _forget(self, now: float) -> list[tuple[Key, str]]:
        if now - self._forgot_at < FORGET_S:
            return []
        self._forgot_at = now
        return self._index.forget(now=now)

    async def _refresh(self) -> None:
        """Hear what the database has that this tracker has not heard."""
        records, now = self._records, time.monotonic()
        if records is None or (self._refreshed_at is not None and not records.shared):
            return
        if self._refreshed_at is None or now - self._refreshed_at >= REFRESH_S:
            await self._reads.read("refresh", lambda: self._read(records))

    async def _read(self, records: TraceRecords) -> None:
        self._refreshed_at = time.monotonic()
        try:
            rows = await records.call(records.read, self._newest - OVERLAP_S)
            # No later than now: what a tracker whose clock was ahead has written would hide all
            # that others write until then.
            self._newest = min(time.time(), max([self._newest, *(row[3] for row in rows)]))
            forgotten = self._index.restore((Key(row[0], row[1]), Recording(*row[2:])) for row in rows)
            await records.call(records.remove, [(key.name, key.entry, host) for key, host in forgotten])
        except Unavailable as error:
            logger.warning("traces that were kept are not known: %s", error)

    @staticmethod
    async def _write(records: TraceRecords, row: Row, forgotten: Sequence[tuple[str, str, str]]) -> None:
        try:
            await records.call(records.write, row, forgotten)
        except Unavailable as error:
            logger.warning("a trace of %s is not written down: %s", row[0], error)


def _merged(recordings: Sequence[bytes]) -> bytes:
    """The encoded trace of encoded recordings, empty without one that can be read: a release before
    or behind this one may have kept them. In a thread."""
    traces = []
    for data in recordings:
        try:
            traces.append(decode_trace(data))
        except Corrupt as error:
            logger.warning("a recording that was kept is left out: %s", error)
    merged = merge(traces)
    return encode_trace(merged) if merged.spans else b""
