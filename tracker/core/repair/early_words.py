"""Words of starved hosts that came too early to be judged: they wait.

Theory. A host says once that a parent gives it nothing, a moment after it got it. Whether that
parent takes long shows later, by what others needed for a first piece. So the word is kept until
then, and judged by the parent that the host has at that time: the planner may have moved it, and it
says nothing anew of one that waits as the former did.

Invariants: a host has one word for each stripe of a swarm, the latest; those of one host, and of
all, are limited, as any process may say them.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from p2pdist.model.digest import Digest
from tracker.core.member import Member
from tracker.core.swarm import Swarm

EARLY_MAX, EARLY_OF_HOST_MAX = 10_000, 64
"""So many words of all hosts, and of one, are kept until they can be judged."""

STARVED_S = 0.1
"""No agent says sooner that a parent gives it nothing: what does is not waiting for it."""


class _Word(NamedTuple):
    """What a host said of a parent, and when that can be judged."""

    due: float
    swarm: Digest
    host: str
    stripe: int
    source: str
    waits: bool


@dataclass(slots=True)
class EarlyWords:
    """Keeps words of starved hosts until they can be judged."""

    swarms: Mapping[Digest, Swarm]
    """The fleet's, by key."""
    _heap: list[_Word] = field(default_factory=list)
    """By when they are due. `keep`, `due`."""
    _kept: dict[str, dict[tuple[Digest, int], tuple[float, str]]] = field(default_factory=dict)
    """By host, and there by swarm and stripe, when its words are due and of which parents they are;
    a word of the heap that is not here was followed by another one. `keep`, `due`."""

    def keep(self, due: float, swarm: Swarm, child: Member, stripe: int, *, waits: bool) -> None:
        """Look again at `due` at what a host said of its parent; `waits`: that says that it waits
        itself."""
        source, kept = child.parents[stripe] or "", self._kept.get(child.host, {})
        _, former = kept.get((swarm.key, stripe), (0.0, None))
        if former != source and len(self._heap) < EARLY_MAX and len(kept) < EARLY_OF_HOST_MAX:
            self._kept.setdefault(child.host, kept)[swarm.key, stripe] = due, source
            heapq.heappush(self._heap, _Word(due, swarm.key, child.host, stripe, source, waits))

    def due(self, *, now: float) -> Iterator[tuple[Swarm, Member, Member, int, bool]]:
        """What is to be judged now: swarm, child, its parent, stripe, and whether that waits."""
        while self._heap and self._heap[0].due < now:
            word = heapq.heappop(self._heap)
            if not self._forget(word):
                continue
            swarm, stripe = self.swarms.get(word.swarm), word.stripe
            child = swarm.members.get(word.host) if swarm is not None else None
            if swarm is None or child is None or child.counts[stripe]:
                continue
            parent = child.parents[stripe]
            if parent is None or now - child.attached_at[stripe] < STARVED_S:
                self.keep(now + STARVED_S, swarm, child, stripe, waits=word.waits)
            elif parent:  # of another one than it spoke of nothing is known: it may wait itself
                yield swarm, child, swarm.members[parent], stripe, word.waits or parent != word.source

    def _forget(self, word: _Word) -> bool:
        """Take a word out, and return whether no other one followed it."""
        kept = self._kept.get(word.host, {})
        if kept.get((word.swarm, word.stripe)) != (word.due, word.source):
            return False
        del kept[word.swarm, word.stripe]
        if not kept:
            del self._kept[word.host]
        return True
