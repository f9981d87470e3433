"""A connection between two members of a simulated BitTorrent swarm, as one of them sees it; see
mesh.py."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from p2pdist.simulate.mesh import Member


class Peer:
    """One side of a connection. `choking`: this side uploads nothing to the other; `asked` is what
    it asked the other for, and when; `queue` what the other waits for from it; `got` what it got
    since the last choice of whom to upload to."""

    __slots__ = (
        "asked",
        "choking",
        "cut_since",
        "dialled",
        "got",
        "member",
        "open",
        "other",
        "queue",
        "seen",
        "sending",
    )

    def __init__(self, member: Member, *, dialled: bool) -> None:
        self.member, self.dialled = member, dialled
        self.other: Peer = self
        self.open = self.choking = True
        self.sending = False
        self.seen = 0
        self.asked: dict[int, float] = {}
        self.queue: deque[int] = deque()
        self.got = 0
        self.cut_since: float | None = None

    @property
    def wanted(self) -> bool:
        """Whether the other side lacks something that this one has, as far as it knows."""
        return bool(self.other.seen & ~self.other.member.have)

    def look(self) -> None:
        """See what the other side has."""
        new = self.other.member.have & ~self.seen
        self.seen |= new
        self.member.count(new, 1)
