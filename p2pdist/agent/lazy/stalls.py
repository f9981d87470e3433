"""How long readers of lazy views waited for their bytes, and how many got an error in the end."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

KEPT = 4096


class Stalls:
    """The waits of one view, or, without `whole`, of all views of an agent: a view counts towards
    `whole` as well. On the event loop."""

    def __init__(self, whole: Stalls | None = None) -> None:
        self.count = self.refused = 0
        """Readers that waited, and those of them that got an error."""
        self._whole = whole
        self._seconds: deque[float] = deque(maxlen=KEPT)
        self._observers: list[Callable[[float], None]] = []

    def observe(self, observer: Callable[[float], None]) -> None:
        """Call `observer` with the seconds of each wait that ends."""
        self._observers.append(observer)

    def add(self, seconds: float, *, refused: bool) -> None:
        """A reader waited for so long, and got its bytes unless it was `refused`."""
        self.count += 1
        self.refused += refused
        self._seconds.append(seconds)
        for observer in self._observers:
            observer(seconds)
        if self._whole is not None:
            self._whole.add(seconds, refused=refused)

    def refuse(self, count: int = 1) -> None:
        """So many readers got an error that this agent has not given."""
        self.refused += count
        if self._whole is not None:
            self._whole.refuse(count)

    def quantile(self, share: float) -> float:
        """The time, in seconds, below which this share of the last KEPT waits stayed."""
        seconds = sorted(self._seconds)
        return seconds[min(len(seconds) - 1, int(len(seconds) * share))] if seconds else 0.0
