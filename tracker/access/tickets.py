"""Tickets as the tracker makes them: signed once for a blob, a priority and a join token in each
half of TICKET_S, for all hosts that came with that join token.

What a host may read follows from its join token, which its certificate names. A host shows its
ticket to others, and what they learn from it is of use only to hosts that may read the same. One
for each host would cost a signature a host and blob.
"""

from __future__ import annotations

from p2pdist.credentials.signing import SigningKey, VerifyKeys
from p2pdist.model.access import TICKET_S, Identity, Ticket, check_ticket, decode_ticket, encode_ticket, joined_with
from p2pdist.model.digest import Digest
from p2pdist.model.errors import Refused
from p2pdist.model.messages import Priority
from tracker.access.directory import AccessState

HALF_S = TICKET_S / 2


class Tickets:
    """Makes tickets with the newest signing key, and checks those of all."""

    def __init__(self, state: AccessState) -> None:
        self.use(state)

    def use(self, state: AccessState) -> None:
        """These signing keys hold from now on."""
        self._key: SigningKey = state.signing[0]
        self._verify = VerifyKeys(state.public_keys)
        self._half = -1
        self._made: dict[tuple[Digest, Priority, str], str] = {}

    def ticket(self, blob: Digest, priority: Priority, agent: Identity, *, now: float) -> str:
        """The ticket for a blob that lets an agent receive it, valid for half of TICKET_S to
        TICKET_S from now. `now`: seconds since the epoch."""
        half = int(now // HALF_S)
        if half != self._half:
            self._half, self._made = half, {}
        receiver = joined_with(_join_of(agent))
        text = self._made.get((blob, priority, receiver))
        if text is None:
            ticket = Ticket(self._key.name, blob, receiver, priority, (half + 2) * HALF_S)
            text = self._made[blob, priority, receiver] = encode_ticket(ticket, self._key.sign)
        return text

    def good(self, text: str, blob: Digest, agent: Identity, *, now: float) -> bool:
        """Whether a ticket that an agent shows lets it receive the blob; also one that ended while
        no tracker answered."""
        return self._decoded(text, blob, agent, now) is not None

    def ending(self, text: str, blob: Digest, agent: Identity, *, now: float) -> bool:
        """Whether a ticket that an agent shows is good for less than half of TICKET_S, or not at
        all."""
        ticket = self._decoded(text, blob, agent, now)
        return ticket is None or ticket.until - now < HALF_S

    def _decoded(self, text: str, blob: Digest, agent: Identity, now: float) -> Ticket | None:
        try:
            ticket = decode_ticket(text, self._verify.verify)
            check_ticket(ticket, blob=blob, receiver=agent.name, join=_join_of(agent), alone=True, now=now)
        except Refused:
            return None
        return ticket


def _join_of(agent: Identity) -> str:
    """The id of the join token by which an agent came."""
    return agent.credential.removeprefix("join:")
