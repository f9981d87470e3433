"""How fast sessions may found swarms of blobs that no manifest read here names: each by itself, and
all of one address together. An address outlasts its sessions: another session is no new start."""

from __future__ import annotations

import time
from collections import OrderedDict

FOUNDED_PER_S, FOUNDED_BURST = 500.0, 4000
"""Swarms that one session may found: a second, and at once after a while without. An agent with ten
thousand blobs has said so to a tracker that has just started after 12 s."""

ADDRESS_SHARE = 4
"""The sessions of one address together found as many times that."""

ADDRESSES_MAX = 10_000


class Founding:
    """What sessions and addresses have used of what they may."""

    def __init__(self) -> None:
        self._sessions: dict[int, float] = {}
        """By session until when the swarms that it founded take at the rate FOUNDED_PER_S."""
        self._together: OrderedDict[str, float] = OrderedDict()
        """By address the same, for all its sessions."""
        self._addresses: dict[int, str] = {}

    def opened(self, session: int, address: str) -> None:
        """A session has begun, from this address; empty where that is not known."""
        self._addresses[session] = address

    def closed(self, session: int) -> None:
        """A session has ended."""
        self._sessions.pop(session, None)
        self._addresses.pop(session, None)

    def held_back_s(self, session: int, founded: int) -> float:
        """Count that a session founds so many swarms; returns how long it is to wait before."""
        now, address = time.monotonic(), self._addresses.get(session, "")
        burst_s, of_session_s = FOUNDED_BURST / FOUNDED_PER_S, founded / FOUNDED_PER_S
        due_at = self._sessions[session] = max(self._sessions.get(session, 0.0), now - burst_s) + of_session_s
        if address:
            together = max(self._together.pop(address, 0.0), now - burst_s) + of_session_s / ADDRESS_SHARE
            self._together[address] = together
            due_at = max(due_at, together)
            if len(self._together) > ADDRESSES_MAX:
                self._together.popitem(last=False)
        return max(0.0, due_at - now)
