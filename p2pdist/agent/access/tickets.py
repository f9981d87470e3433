"""Tickets of this host: what shows other hosts that the tracker lets it receive a blob.

A ticket comes with each plan, and is shown to every host that is to send the blob, and to a tracker
that has just started. While a pull runs on, the agent has the tracker send another one before this
one ends; and when a sender refuses the one that is here.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

from p2pdist.model.access import TICKET_S, peek_priority
from p2pdist.model.digest import Digest
from p2pdist.model.messages import Priority

TICKETS_MAX = 20_000
"""About 5 MB. Those of blobs that were not fetched for long go first."""

ASK_S = 30.0
"""Between two requests for another ticket of a blob."""

RENEW_AFTER_S = TICKET_S / 2 - ASK_S
"""Every ticket is good for half of TICKET_S at least when it comes."""

REFUSED_ASK_S = 1.0
"""The same after a sender refused the one that is here."""


@dataclass(slots=True)
class _Held:
    text: str
    priority: Priority
    came_at: float
    asked_at: float


class Tickets:
    """The last ticket for each blob. `now` is of one clock that never jumps, in seconds."""

    def __init__(self) -> None:
        self._held: OrderedDict[Digest, _Held] = OrderedDict()

    def keep(self, blob: Digest, text: str, *, now: float) -> bool:
        """Keep a ticket that came with a plan; an empty one changes nothing. Returns whether it
        lets the host receive as a start what it might only as a preseed before."""
        if not text:
            return False
        before = self._held.pop(blob, None)
        held = self._held[blob] = _Held(text, peek_priority(text), now, now)
        if len(self._held) > TICKETS_MAX:
            self._held.popitem(last=False)
        return before is not None and before.priority == "preseed" and held.priority == "start"

    def get(self, blob: Digest) -> str:
        """The ticket for a blob, "" where there is none."""
        held = self._held.get(blob)
        return held.text if held is not None else ""

    def due(self, blob: Digest, *, now: float, refused: bool = False) -> bool:
        """Whether to have the tracker send another ticket for a blob that is being fetched now;
        `refused`: a sender did not take the one that is here."""
        held = self._held.get(blob)
        if held is None:
            if not refused:
                return False
            held = self._held[blob] = _Held("", "start", now, float("-inf"))
        pause_s, due = (REFUSED_ASK_S, True) if refused else (ASK_S, now - held.came_at >= RENEW_AFTER_S)
        if not due or now - held.asked_at < pause_s:
            return False
        held.asked_at = now
        return True
