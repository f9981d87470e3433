"""From one way to the other in the middle of a blob (transport.py says when): who writes into it
ends before who comes next begins.

Theory. Streams end after the pieces under way, or after LEAVE_S; a swarm has let go of the file
when its transfer is counted no more. What has verified by then is held, and the next way fetches
the rest: so no piece comes twice but those that were under way when a way was left.

Invariants: a way begins only when nothing else writes into the blob, those of an earlier pull
included; `way` is None in between, and while the first way waits for the torrent document.
"""

from __future__ import annotations

from dataclasses import dataclass

from p2pdist.core.transport import TransportChoice, Way

LEAVE_S = 1.0
"""How long streams may take to finish the pieces under way when the way changes."""


@dataclass(frozen=True, slots=True)
class Leave:
    """End a way: streams after the pieces under way, a swarm at once."""

    way: Way
    target: Way | None


@dataclass(frozen=True, slots=True)
class CutShort:
    """Streams have had their time: end them now."""


@dataclass(frozen=True, slots=True)
class Begin:
    way: Way


Step = Leave | CutShort | Begin


@dataclass(slots=True)
class Handover:
    """See the module's text. `way` is the present way, `target` the one that is to be."""

    way: Way | None = "trees"
    target: Way | None = "trees"
    _leave_by: float = 0.0

    def steer(self, choice: TransportChoice, *, writers: int, fed: bool, waited_for: bool, now: float) -> list[Step]:
        """What to do now, in this order. `writers` counts who writes into the blob; see
        TransportChoice for the rest."""
        steps: list[Step] = []
        if self.way == self.target:
            target = choice.choose(fed=fed, waited_for=waited_for, now=now)
            if target == self.way:
                return steps
            left, self.way, self.target, self._leave_by = self.way, None, target, now + LEAVE_S
            if left is not None:
                steps.append(Leave(left, target))
        if writers:
            if now >= self._leave_by:
                steps.append(CutShort())
            return steps
        self.way = self.target
        if self.way is not None:
            steps.append(Begin(self.way))
        return steps
