"""Joins and renewals: how a host gets its certificate.

A join token, used by a thief, makes a host of any name; what a join cannot show is that the sender
is the machine of that name. While a name's certificate is valid, only the join token by which it
came may be used for it again, or any when that one is revoked, with what it made. Which token a
name came by, the record of joins in the tracker's state says (tracker/state/joins.py), and the
certificate with which a host opens its session, whichever tracker issued it.
"""

from __future__ import annotations

import asyncio
import logging
import ssl
import time
from collections import OrderedDict
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import lru_cache
from typing import Any

from p2pdist.credentials.authority import CERTIFICATE_S
from p2pdist.credentials.join import JoinToken
from p2pdist.model.access import Identity
from p2pdist.model.errors import P2PDistError, Refused, Unauthenticated, Unavailable, UsageError
from p2pdist.model.messages import Joined, JoinRequest, RenewRequest
from p2pdist.transfer.audit import WINDOW_S, Audit, Window
from tracker.access.directory import AccessState
from tracker.networks import Network, check_own
from tracker.state.joins import JoinEntry, JoinRecords, is_valid

WRONG_TOKENS_MAX = 20
"""Joins with a wrong token of one address in WINDOW_S, after which it is asked to wait. Right ones
of others behind the same address are taken all the same: a secret is too long to be guessed."""

NAMES_MAX = 200_000
WRITTEN_MAX = 256
"""Joins that one transaction writes down."""
GATHER_S = 0.01
"""For so long joins gather: a transaction for each would be a fifth of a join's cost."""

_seconds = lru_cache(64)(ssl.cert_time_to_seconds)
"""Many hosts come at once whose certificates end in the same seconds."""

logger = logging.getLogger(__name__)


class _Writer:
    """Writes joins into the record: those of GATHER_S, and those that come while others are being
    written, share a transaction. Each waits until its own is committed. On the event loop."""

    def __init__(self, records: JoinRecords, holds: Callable[[str], bool]) -> None:
        self._records, self._holds = records, holds
        self._waiting: list[tuple[JoinEntry, asyncio.Future[str]]] = []
        self._task: asyncio.Task[None] | None = None

    async def take(self, entry: JoinEntry) -> str:
        """The token by which a host is known once this was written (tracker/state/joins.py).
        Raises Unavailable."""
        written: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._waiting.append((entry, written))
        if self._task is None:
            self._task = asyncio.create_task(self._write())
        return await written

    def close(self) -> None:
        """Leave the record of joins."""
        self._records.close()

    async def _write(self) -> None:
        try:
            while self._waiting:
                await asyncio.sleep(GATHER_S)
                batch, self._waiting = self._waiting[:WRITTEN_MAX], self._waiting[WRITTEN_MAX:]
                entries, futures = [entry for entry, _ in batch], [written for _, written in batch]
                try:
                    tokens = await asyncio.to_thread(self._records.take, entries, now=time.time(), holds=self._holds)
                except Exception as error:
                    for written in futures:
                        if not written.done():  # its client may have left
                            written.set_exception(error)
                else:
                    for written, token in zip(futures, tokens, strict=True):
                        if not written.done():
                            written.set_result(token)
        finally:
            self._task = None


class Joins:
    """Issues certificates of agents. `names` are those of trackers, and `networks` where agents may
    be reached, none for anywhere: certificates are for none of the former, and within the
    latter."""

    def __init__(
        self,
        state: AccessState,
        audit: Audit,
        records: JoinRecords,
        *,
        names: Collection[str] = (),
        networks: Sequence[Network] = (),
    ) -> None:
        self._audit, self._records = audit, _Writer(records, self._holds)
        self._taken, self._within = frozenset(name.lower().rstrip(".") for name in names), tuple(networks)
        self._wrong = Window(WRONG_TOKENS_MAX)
        self._names: OrderedDict[str, tuple[str, float]] = OrderedDict()
        """By host: the join token of its certificate, and when that ends."""
        self.use(state)

    def use(self, state: AccessState) -> None:
        """This holds from now on."""
        self._state = state

    async def join(self, request: JoinRequest, remote: str) -> Joined:
        """The certificate of a host that has a join token. Raises Unauthenticated for a wrong one,
        Unavailable for one of an address with many of these, and where the record of joins does not
        answer, Refused for a host or an address that may not be, UsageError."""
        try:
            join = self._checked(request, remote)
        except Unauthenticated as error:
            if self._wrong.full(remote):
                raise Unavailable(
                    f"{remote} sent {WRONG_TOKENS_MAX} wrong join tokens", remedy=f"Try again after {WINDOW_S:.0f} s"
                ) from error
            self._wrong.add(remote)
            raise
        self._check_addresses(request.host, request, remote)
        known = await self._records.take(JoinEntry(request.host, join, time.time() + CERTIFICATE_S))
        if known != join:
            raise _taken(request.host)
        return self._issue("join", request.host, join, request, remote)

    async def renew(self, identity: Identity, request: RenewRequest, remote: str) -> Joined:
        """A new certificate of a host that has one."""
        if identity.kind != "agent":
            raise Refused("only an agent renews its certificate", remedy="Connect with the certificate of the agent")
        if not identity.credential:
            raise Refused(f"another authority issued the certificate of {identity.name[:100]}", remedy="Renew it there")
        host, join = identity.name, identity.credential.removeprefix("join:")
        self._check_addresses(host, request, remote)
        try:
            await self._records.take(JoinEntry(host, join, time.time() + CERTIFICATE_S))
        except P2PDistError as error:  # the certificate itself shows which host it is
            logger.warning("the renewal of %s is not in the record of joins: %s", host, error)
        return self._issue("renewal", host, join, request, remote)

    def seen(self, identity: Identity, peer: Mapping[str, Any] | None) -> None:
        """A host has shown its certificate."""
        try:
            until = _seconds(str((peer or {}).get("notAfter", "")))
        except ValueError:
            return
        self._note(identity.name, identity.credential.removeprefix("join:"), float(until))

    def close(self) -> None:
        """Leave the record of joins."""
        self._records.close()

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
        now = time.time()
        valid = is_valid(until, now=now) if known else until > now  # another authority's may last for longer
        if known != token.id and valid and self._holds(known):
            raise _taken(request.host)
        return token.id

    def _holds(self, join: str) -> bool:
        """Whether certificates by a join token, or with "" by another authority, are of use."""
        rules = self._state.rules
        rule = rules.joins.get(join) if join else rules.certificates
        return rule is not None and f"join:{join}" not in rules.revoked

    def _check_addresses(self, host: str, request: JoinRequest | RenewRequest, remote: str) -> None:
        check_own(
            request.addresses,
            host=host,
            remote=remote,
            networks=self._state.rules.networks,
            within=self._within,
            taken=self._taken,
        )

    def _note(self, host: str, join: str, until: float) -> None:
        self._names[host] = join, until
        self._names.move_to_end(host)
        if len(self._names) > NAMES_MAX:
            self._names.popitem(last=False)

    def _issue(self, event: str, host: str, join: str, request: JoinRequest | RenewRequest, remote: str) -> Joined:
        state, now = self._state, time.time()
        certificate = state.authorities[0].issue(
            request.request.encode(), "agent", host, request.addresses, now=now, join=join
        )
        self._note(host, join, now + CERTIFICATE_S)
        self._audit.note(event, address=remote, right="join", subject=f"host:{host}", token=f"join:{join}")
        return Joined(state.rules.fleet, state.chain(certificate).decode(), state.trusted.decode())


def _taken(host: str) -> Refused:
    return Refused(
        f"a host named {host} joined with another token",
        remedy="Give each host its own --name, or wait until the certificate of that one has ended",
    )
