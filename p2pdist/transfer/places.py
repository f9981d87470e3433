"""Places at a service, such as those of requests that wait for news: so many in all, and for one
address a share of them, so that no client takes all and the others find none."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator

from p2pdist.transfer.connections import address_key


class Places:
    """`places_max` places, `address_max` of them for one address. On the event loop."""

    def __init__(self, places_max: int, address_max: int) -> None:
        self.places_max, self._address_max = places_max, address_max
        self._taken: Counter[str] = Counter()
        """By address."""

    def __len__(self) -> int:
        """How many are taken."""
        return self._taken.total()

    @contextlib.contextmanager
    def place(self, remote: str) -> Iterator[bool]:
        """Within it the client at the address `remote` has a place. False: it got none."""
        address = address_key(remote)
        room = len(self) < self.places_max and self._taken[address] < self._address_max
        self._taken[address] += room
        try:
            yield room
        finally:
            self._taken[address] -= room
            self._taken += Counter()  # forgets what is zero
