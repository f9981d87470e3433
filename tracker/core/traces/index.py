"""Index of recordings: what hosts recorded of starts, by package and entry point.

A key has the last recordings of RECORDINGS_MAX hosts, one of each; older ones, and those of
KEPT_S ago, are forgotten. Over KEYS_MAX keys, or BYTES_MAX bytes in all, the keys go that were used
least recently. The index does not look into recordings: it says which ones make the trace of a key
(`recordings`), and keeps that while no other recording comes.

Thousands of hosts start a package at the same moment, and few recordings are enough. So hosts
record when they are invited: INVITED_MAX of a key within INVITED_S.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterable
from dataclasses import dataclass, field

RECORDINGS_MAX = 8
KEPT_S = 30 * 86400.0
KEYS_MAX = 4096
BYTES_MAX = 64 << 20
INVITED_MAX = 8
INVITED_S = 1200.0
"""A recording comes at most about ten minutes after its start."""


@dataclass(frozen=True, slots=True)
class Key:
    """What a trace is of: the name of a package, without a tag, and the entry point, "" for views
    that are mounted for no program."""

    name: str
    entry: str


@dataclass(frozen=True, slots=True)
class Recording:
    """An encoded trace (p2pdist/model/trace.py) of one start at a host, and when it was stated, in
    seconds since the epoch."""

    host: str
    stated_at: float
    data: bytes


@dataclass(frozen=True, slots=True)
class Summary:
    """How much is kept of a key: recordings, their bytes, and when the last one was stated."""

    key: Key
    recordings: int
    bytes: int
    stated_at: float


@dataclass(slots=True)
class _Kept:
    """What is kept of one key."""

    recordings: OrderedDict[str, Recording] = field(default_factory=OrderedDict)
    """By host, the oldest first."""
    trace: bytes | None = None
    """The trace of these recordings; None until it is noted."""


class TraceIndex:
    """The recordings of all packages; times are in seconds since the epoch. What a method returns
    as forgotten is to be forgotten by other trackers as well."""

    def __init__(self, *, bytes_max: int = BYTES_MAX, keys_max: int = KEYS_MAX) -> None:
        self._bytes_max, self._keys_max = bytes_max, keys_max
        self._kept: OrderedDict[Key, _Kept] = OrderedDict()
        """The most recently used keys last."""
        self._invited_at: OrderedDict[Key, deque[float]] = OrderedDict()
        """When hosts were invited last. Keys that are asked for push no recordings out."""
        self._bytes = 0
        """Of all recordings; traces, which are no longer than the longest recordings, beside."""

    def state(self, key: Key, recording: Recording) -> list[tuple[Key, str]]:
        """Keep a recording in place of that of the same host, unless that is newer; returns what
        is forgotten for it, by key and host."""
        kept = self._kept.setdefault(key, _Kept())
        self._kept.move_to_end(key)
        before = kept.recordings.get(recording.host)
        if before is not None and before.stated_at > recording.stated_at:
            return []
        if before is not None:
            self._drop(kept, recording.host)
        kept.recordings[recording.host] = recording
        kept.recordings = OrderedDict(sorted(kept.recordings.items(), key=lambda item: item[1].stated_at))
        kept.trace = None
        self._bytes += len(recording.data)
        forgotten = []
        while len(kept.recordings) > RECORDINGS_MAX:
            forgotten.append((key, next(iter(kept.recordings))))
            self._drop(kept, forgotten[-1][1])
        return [*forgotten, *self._shrink()]

    def recordings(self, key: Key, *, now: float) -> tuple[bytes, ...]:
        """The recordings that make the trace of a key, the newest first. The key counts as used."""
        kept = self._kept.get(key)
        if kept is None:
            return ()
        self._kept.move_to_end(key)
        fresh = [each.data for each in kept.recordings.values() if each.stated_at > now - KEPT_S]
        return tuple(reversed(fresh))

    def trace(self, key: Key) -> bytes | None:
        """The trace of a key, if it was noted since the last recording. The key counts as used."""
        kept = self._kept.get(key)
        if kept is None or kept.trace is None:
            return None
        self._kept.move_to_end(key)
        return kept.trace

    def note_trace(self, key: Key, made_of: tuple[bytes, ...], trace: bytes, *, now: float) -> None:
        """Keep the trace that was made of these recordings, unless others have come."""
        kept = self._kept.get(key)
        if kept is not None and self.recordings(key, now=now) == made_of:
            kept.trace = trace

    def invite(self, key: Key, *, now: float) -> bool:
        """Whether a host that starts the package is to record it."""
        invited_at = self._invited_at.setdefault(key, deque(maxlen=INVITED_MAX))
        self._invited_at.move_to_end(key)
        if len(self._invited_at) > self._keys_max:
            self._invited_at.popitem(last=False)
        if len(invited_at) == INVITED_MAX and now - invited_at[0] < INVITED_S:
            return False
        invited_at.append(now)
        return True

    def summaries(self) -> list[Summary]:
        """What is kept, by name and entry point."""
        return sorted(
            (
                Summary(key, len(recordings), sum(len(each.data) for each in recordings), recordings[-1].stated_at)
                for key, kept in self._kept.items()
                if (recordings := tuple(kept.recordings.values()))
            ),
            key=lambda summary: (summary.key.name, summary.key.entry),
        )

    def forget(self, *, now: float) -> list[tuple[Key, str]]:
        """Forget what is too old; returns it by key and host."""
        forgotten: list[tuple[Key, str]] = []
        for key, kept in list(self._kept.items()):
            old = [host for host, each in kept.recordings.items() if each.stated_at <= now - KEPT_S]
            for host in old:
                self._drop(kept, host)
                kept.trace = None
            forgotten += ((key, host) for host in old)
            if not kept.recordings:
                del self._kept[key]
        return forgotten

    def restore(self, stated: Iterable[tuple[Key, Recording]]) -> list[tuple[Key, str]]:
        """Keep recordings that another tracker has; returns what is forgotten for them."""
        forgotten: list[tuple[Key, str]] = []
        for key, recording in sorted(stated, key=lambda row: row[1].stated_at):
            kept = self._kept.get(key)
            if kept is None or kept.recordings.get(recording.host) != recording:
                forgotten += self.state(key, recording)
        return forgotten

    @property
    def bytes(self) -> int:
        """Of all recordings."""
        return self._bytes

    @property
    def counts(self) -> tuple[int, int]:
        """Keys that have recordings, and all recordings."""
        numbers = [len(kept.recordings) for kept in self._kept.values()]
        return sum(map(bool, numbers)), sum(numbers)

    def _drop(self, kept: _Kept, host: str) -> None:
        self._bytes -= len(kept.recordings.pop(host).data)

    def _shrink(self) -> list[tuple[Key, str]]:
        """Forget the keys that were used least recently, down to the limits."""
        forgotten: list[tuple[Key, str]] = []
        while len(self._kept) > 1 and (len(self._kept) > self._keys_max or self._bytes > self._bytes_max):
            key, kept = next(iter(self._kept.items()))
            forgotten += ((key, host) for host in kept.recordings)
            for host in list(kept.recordings):
                self._drop(kept, host)
            del self._kept[key]
        return forgotten
