"""Joins and renewals: how a host gets its certificate.

A join token, used by a thief, makes a host of any name; what a join cannot show is that the sender
is the machine of that name. While a name's certificate is valid, only the join token by which it
came may be used for it again, as far as this tracker issued it; a token that was stolen is
revoked, with what it made.
"""

from __future__ import annotations

import logging
import time
from collections import OrderedDict

from p2pdist.credentials.authority import CERTIFICATE_S
from p2pdist.credentials.join import JoinToken
from p2pdist.model.access import Identity
from p2pdist.model.errors import Refused, Unauthenticated, Unavailable, UsageError
from p2pdist.model.messages import Joined, JoinRequest, RenewRequest
from tracker.access.audit import WINDOW_S, Audit, Window
from tracker.access.directory import AccessState
from tracker.networks import check_own

WRONG_TOKENS_MAX = 20
"""Joins with a wrong token of one address in WINDOW_S, after which none of it is looked at."""

NAMES_MAX = 200_000

logger = logging.getLogger(__name__)


class Joins:
    """Issues certificates of agents."""

    def __init__(self, state: AccessState, audit: Audit) -> None:
        self._audit = audit
        self._wrong = Window(WRONG_TOKENS_MAX)
        self._names: OrderedDict[str, tuple[str, float]] = OrderedDict()
        """By host: the join token of its certificate, and when that ends."""
        self.use(state)

    def use(self, state: AccessState) -> None:
        """This holds from now on."""
        self._state = state

    def join(self, request: JoinRequest, remote: str) -> Joined:
        """The certificate of a host that has a join token. Raises Unauthenticated for a wrong one,
        Unavailable for an address with many of these, Refused for a host or an address that may not
        be, UsageError."""
        if self._wrong.full(remote):
            raise Unavailable(
                f"{remote} sent {WRONG_TOKENS_MAX} wrong join tokens", remedy=f"Try again after {WINDOW_S:.0f} s"
            )
        try:
            join = self._checked(request, remote)
        except Unauthenticated:
            self._wrong.add(remote)
            raise
        return self._issue("join", request.host, join, request, remote)

    def renew(self, identity: Identity, request: RenewRequest, remote: str) -> Joined:
        """A new certificate of a host that has one."""
        if identity.kind != "agent":
            raise Refused("only an agent renews its certificate", remedy="Connect with the certificate of the agent")
        if not identity.credential:
            raise Refused(f"another authority issued the certificate of {identity.name[:100]}", remedy="Renew it there")
        return self._issue("renewal", identity.name, identity.credential.removeprefix("join:"), request, remote)

    def _checked(self, request: JoinRequest, remote: str) -> str:
        """The id of the join token."""
        rules = self._state.rules
        try:
            token = JoinToken.parse(request.token)
        except UsageError as error:
            raise Unauthenticated(error.what, remedy=error.remedy) from error
        rule = rules.joins.get(token.id)
        fits = token.fits(rule.secret_sha256 if rule is not None else "")
        if not fits or f"join:{token.id}" in rules.revoked:
            raise Unauthenticated(
                f"the join token {token.id} is not valid here", remedy="Fetch the one beside the tracker's access file"
            )
        if f"host:{request.host}" in rules.revoked:
            raise Refused(f"the host {request.host} is revoked", remedy="p2pdist access unrevoke takes that back")
        known, until = self._names.get(request.host, (token.id, 0.0))
        if known != token.id and until > time.time():
            raise Refused(
                f"a host named {request.host} joined with another token",
                remedy="Give each host its own --name, or wait until the certificate of that one has ended",
            )
        return token.id

    def _issue(self, event: str, host: str, join: str, request: JoinRequest | RenewRequest, remote: str) -> Joined:
        state, now = self._state, time.time()
        check_own(request.addresses, host=host, remote=remote, networks=state.rules.networks)
        certificate = state.authorities[0].issue(
            request.request.encode(), "agent", host, request.addresses, now=now, join=join
        )
        self._names[host] = join, now + CERTIFICATE_S
        self._names.move_to_end(host)
        if len(self._names) > NAMES_MAX:
            self._names.popitem(last=False)
        self._audit.note(event, address=remote, right="join", subject=f"host:{host}", token=f"join:{join}")
        return Joined(state.rules.fleet, state.chain(certificate).decode(), state.trusted.decode())
