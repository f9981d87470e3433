"""Case: the vouched list of one swarm, the hosts that follow it, and what they have been sent."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from math import inf

from p2pdist.model.messages import LISTED_MAX, Basis, Listed
from tracker.core.events import Broadcast
from tracker.core.host import Host
from tracker.core.swarm import Swarm
from tracker.core.vouching.statements import ARBITER_S, Statements

RECALL_FIRST_S, RECALL_MAX_S = 0.3, 5.0
"""How long gaps of a list are left to the hosts that read, before others are asked; the pauses
grow up to RECALL_MAX_S."""


@dataclass(slots=True)
class Case:
    """The vouched list of one swarm, and the hosts that follow it."""

    swarm: Swarm
    statements: Statements
    followers: dict[str, int] = field(default_factory=dict)
    """By host the session in which it was sent what is listed."""
    readers: dict[str, set[int]] = field(default_factory=dict)
    """The stripes of which a host has, or had, the lease."""
    brought: dict[str, None] = field(default_factory=dict)
    """Hosts that had pieces when their session first spoke of the blob, and may have read these."""
    to_recall: dict[str, None] = field(default_factory=dict)
    """Those of them that were not asked yet for what they know."""
    recalled: dict[str, None] = field(default_factory=dict)
    """Hosts that were asked."""
    recall_at: float = inf
    """When the next one is asked."""
    recall_pause_s: float = RECALL_FIRST_S
    sent: int = 0
    """How many of the round's statements all followers were sent."""
    sent_at: float = -inf
    """When they were sent something last."""
    began_at: float = 0.0
    """When they were sent something of this round first."""
    sent_before: list[Listed] = field(default_factory=list)
    """What was sent, in few messages, for hosts that come later."""
    accusations: dict[tuple[str, str], None] = field(default_factory=dict)
    """(host, voter) of complaints of wrong bytes in this round."""
    awaited: str = ""
    """A host that had not judged the present round when that was looked at last. `all_judged`."""
    failed_at: float = inf

    @property
    def rests(self) -> bool:
        """Whether time changes nothing here."""
        statements = self.statements
        settled = statements.phase == "held" or (not self.followers and statements.round.arbiter is None)
        return settled and self.sent == len(statements.round.order) and statements.phase != "failed"

    @property
    def news(self) -> bool:
        """Whether something is listed that followers have not been sent."""
        return self.sent < len(self.statements.round.order)

    def note_readers(self) -> None:
        """Remember which hosts have leases."""
        for stripe, roots in enumerate(self.swarm.edges.roots):
            for name in roots:
                self.readers.setdefault(name, set()).add(stripe)

    def believes(self, host: str, stripe: int, basis: Basis) -> bool:
        """Whether a host may state hashes of a stripe."""
        arbiter = self.statements.round.arbiter
        if self.statements.phase == "held" and basis != "read":
            return False
        if host == arbiter:
            return basis != "told"
        if basis == "read":
            reads = stripe in self.readers.get(host, ()) or host in self.swarm.edges.roots[stripe]
            return reads or (arbiter is None and host in self.brought)
        if arbiter is not None:
            return False
        return self.swarm.members[host].seed if basis == "whole" else host in self.recalled

    def drop_stale(self, hosts: Mapping[str, Host]) -> None:
        """Forget followers that are gone: they come again with a Holding."""
        for name, session in list(self.followers.items()):
            host = hosts.get(name)
            if host is None or host.session != session or name not in self.swarm.members:
                del self.followers[name]

    def send_news(self, hosts: Mapping[str, Host], *, now: float) -> Iterator[Broadcast]:
        """Send all followers what they have not been sent."""
        order = self.statements.round.order
        if not self.news:
            return
        self.drop_stale(hosts)
        sessions = tuple(self.followers.values())
        self.began_at = self.began_at if self.sent else now
        self.sent_at = now
        for start in range(self.sent, len(order), LISTED_MAX):
            yield Broadcast(sessions, self._listed(order[start : start + LISTED_MAX]))
        self.sent = len(order)

    def so_far(self) -> list[Listed]:
        """What all followers were sent, for one that comes now."""
        number = self.statements.round.number
        known = sum(len(message.pieces) for message in self.sent_before)
        if known < self.sent or (self.sent_before and self.sent_before[0].round != number):
            whole = [message for message in self.sent_before if len(message.pieces) == LISTED_MAX]
            whole = whole if whole and whole[0].round == number else []
            rest = self.statements.round.order[len(whole) * LISTED_MAX : self.sent]
            parts = [rest[start : start + LISTED_MAX] for start in range(0, len(rest), LISTED_MAX)]
            self.sent_before = [*whole, *map(self._listed, parts)]
        return self.sent_before or ([Listed(self.swarm.blob, number, (), b"")] if number else [])

    def begin(self, arbiter: str, *, failed: bool, now: float) -> Broadcast:
        """Begin the next round: the message of it for all followers."""
        self.statements.begin(arbiter, failed=failed, now=now)
        self.sent, self.sent_before, self.sent_at = 0, [], now
        self.accusations.clear()
        return Broadcast(tuple(self.followers.values()), Listed(self.swarm.blob, self.statements.round.number, (), b""))

    def lapse(self, hosts: Mapping[str, Host], *, now: float) -> str:
        """Why the arbiter of the present round is to be replaced, in words; "" where it is not."""
        here, arbiter = self.statements.round, self.statements.round.arbiter
        if arbiter is None or self.statements.phase != "open" or here.complete:
            return ""
        host, member = hosts.get(arbiter), self.swarm.members.get(arbiter)
        reads = arbiter in self.followers or (member is not None and member.seed)
        if host is None or not host.available or not reads or now - here.heard_at >= ARBITER_S:
            return f"the arbiter {arbiter or '(none)'} is gone"
        return f"the arbiter {arbiter} is far slower than others were" if self.statements.lags(now=now) else ""

    def all_judged(self, hosts: Mapping[str, Host]) -> bool:
        """Whether each host that follows the list has judged the present round. One that has not is
        remembered: many hosts judge at one moment, and this is asked after each."""
        if self._waits(self.awaited, hosts):
            return False
        self.drop_stale(hosts)
        # Hosts that came first are the first to judge: the last one is awaited for longest.
        self.awaited = next((name for name in reversed(self.followers) if self._waits(name, hosts)), "")
        return not self.awaited

    def _waits(self, name: str, hosts: Mapping[str, Host]) -> bool:
        """Whether a host follows the list, is there, and has not judged the present round."""
        here, host = self.statements.round, hosts.get(name)
        if host is None or self.followers.get(name) != host.session or name not in self.swarm.members:
            return False
        voter = host.voter or name
        return voter not in here.matching and voter not in here.own and voter not in here.against

    def _listed(self, pieces: list[int]) -> Listed:
        hashes = self.statements.round.hashes
        assert hashes is not None
        stated = b"".join(hashes.hash_of(piece) or b"" for piece in pieces)
        return Listed(self.swarm.blob, self.statements.round.number, tuple(pieces), stated)
