"""Tickets as the tracker makes them: signed once for a blob and a priority in each half of
TICKET_S, for any agent of the fleet.

A ticket is for every agent, as its holder shows a certificate besides; one for each host would cost
a signature a host and blob.
"""

from __future__ import annotations

from p2pdist.credentials.signing import SigningKey, VerifyKeys
from p2pdist.model.access import TICKET_S, Ticket, check_ticket, decode_ticket, encode_ticket
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
        self._made: dict[tuple[Digest, Priority], str] = {}

    def ticket(self, blob: Digest, priority: Priority, *, now: float) -> str:
        """The ticket for a blob, valid for half of TICKET_S to TICKET_S from now. `now`: seconds
        since the epoch."""
        half = int(now // HALF_S)
        if half != self._half:
            self._half, self._made = half, {}
        text = self._made.get((blob, priority))
        if text is None:
            ticket = Ticket(self._key.name, blob, "*", priority, (half + 2) * HALF_S)
            text = self._made[blob, priority] = encode_ticket(ticket, self._key.sign)
        return text

    def good(self, text: str, blob: Digest, receiver: str, *, now: float) -> bool:
        """Whether a ticket that a host shows lets it receive the blob; also one that ended while no
        tracker answered."""
        return self._decoded(text, blob, receiver, now) is not None

    def ending(self, text: str, blob: Digest, receiver: str, *, now: float) -> bool:
        """Whether a ticket that a host shows is good for less than half of TICKET_S, or not at
        all."""
        ticket = self._decoded(text, blob, receiver, now)
        return ticket is None or ticket.until - now < HALF_S

    def _decoded(self, text: str, blob: Digest, receiver: str, now: float) -> Ticket | None:
        try:
            ticket = decode_ticket(text, self._verify.verify)
            check_ticket(ticket, blob=blob, receiver=receiver, alone=True, now=now)
        except Refused:
            return None
        return ticket
