"""Access in sessions: which host a session is, which blobs it may join the swarms of, and the
tickets of its plans.

A host joins the swarm of a blob when it may read a package of the blob. A tracker that has just
started knows no packages of a blob; then the ticket that the host got from the last tracker counts,
and a host that has the whole blob may serve it, but gets no ticket for it. A selection belongs to
the packages of its pack, which the host shows by saying what it selected.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import msgspec

from p2pdist.credentials.authority import addresses_in
from p2pdist.model.access import Identity
from p2pdist.model.address import host_part
from p2pdist.model.digest import Digest
from p2pdist.model.errors import NotFound, P2PDistError, Refused, UsageError
from p2pdist.model.messages import Assign, FromAgent, Hello, Holding, Holdings, Priority, Reject
from p2pdist.model.plan import Plan
from p2pdist.model.selection import selection_digest
from tracker.access.control import AccessControl
from tracker.access.packages import ImageAccess, PackageAccess
from tracker.access.sealed_keys import SealedKeys
from tracker.content import Content
from tracker.core.fleet import Fleet
from tracker.core.swarm import layout_of
from tracker.networks import check_own
from tracker.upstreams.upstreams import Upstreams


class SessionAccess:
    """Access in the sessions of one fleet, and to its packages."""

    def __init__(self, control: AccessControl, fleet: Fleet, content: Content, upstreams: Upstreams) -> None:
        self.control = control
        self.packages = PackageAccess(control, fleet.policies, content)
        self.images = ImageAccess(fleet.policies, upstreams)
        self.sealed = SealedKeys(control, content)
        self._fleet = fleet
        self._identities: dict[int, Identity] = {}
        self._serving: dict[int, set[Digest]] = {}
        """By session: blobs that the host may serve, and of which it is not known whether it may
        read them."""

    def check_hello(self, hello: Hello, peer: Mapping[str, Any] | None, remote: str) -> Identity:
        """The identity of a session. `peer` is the verified certificate of its connection. Raises
        Refused for a host, address or zone that is not its own."""
        rules = self.control.state.rules
        identity = self.control.identities.peer(peer)
        if identity is None:
            raise Refused("the connection shows no certificate of an agent", remedy="Start the agent with --join-file")
        name = identity.name
        if hello.host != name:
            raise Refused(
                f"the certificate is that of {name[:100]}, and the agent says that it is {hello.host[:100]}",
                remedy="Give the agent the --name under which it joined, or let it join again",
            )
        address = host_part(hello.address).lower()
        if address not in addresses_in(peer):
            check_own([address], host=name, remote=remote, networks=rules.networks)
        if identity.zones and hello.zone not in identity.zones:
            raise Refused(
                f"{name[:100]} may not be in the zone {hello.zone[:100]!r}",
                remedy=f"Its join token is for {', '.join(identity.zones[:5])}",
            )
        self.control.joins.seen(identity, peer)
        return identity

    def open(self, session: int, identity: Identity) -> None:
        """A session is open."""
        self._identities[session] = identity

    def close(self, session: int) -> None:
        """A session has ended."""
        self._identities.pop(session, None)
        self._serving.pop(session, None)

    def refused(self) -> dict[int, P2PDistError]:
        """Why the sessions of hosts that may no longer be here must end; the others read by the
        rules of now."""
        ending: dict[int, P2PDistError] = {}
        for session, identity in self._identities.items():
            try:
                join = identity.credential.removeprefix("join:")
                self._identities[session] = self.control.identities.agent(identity.name, join)
            except P2PDistError as error:
                ending[session] = error
        return ending

    # -- messages

    def admit(self, session: int, message: FromAgent) -> tuple[FromAgent | None, list[Reject]]:
        """What of a message reaches the fleet, and how the rest is answered."""
        if not isinstance(message, Holding | Holdings):
            return message, []
        identity = self._identities.get(session)
        if identity is None:
            return None, []
        if identity.reads_everything:
            self._serving.pop(session, None)
            return message, []
        blobs = message.blobs if isinstance(message, Holdings) else (message,)
        kept: list[Holding] = []
        rejects: list[Reject] = []
        problem = NotFound(
            "no package that this host may read has that blob", remedy="Ask for the package first"
        ).problem()
        for holding in blobs:
            if self._may_hold(identity, holding):
                self._serving.get(session, set()).discard(holding.blob)
                kept.append(holding)
            elif self._may_serve(session, holding):
                kept.append(holding)
            else:
                rejects.append(Reject(problem, holding.blob))
        if isinstance(message, Holdings):
            return (Holdings(tuple(kept)) if kept else None), rejects
        return (message if kept else None), rejects

    def _may_hold(self, identity: Identity, holding: Holding) -> bool:
        book, blob = self._fleet.policies, holding.blob
        names = book.readers_of(blob)
        if not names and holding.selected is not None and selection_digest(*_parts(holding)) == blob:
            names = book.readers_of(holding.selected.blob)
        if names:
            return identity.may_read(names)
        return bool(holding.ticket) and self.control.tickets.good(holding.ticket, blob, identity, now=time.time())

    def _may_serve(self, session: int, holding: Holding) -> bool:
        """Whether the host has all of a blob of which no package is known here."""
        try:
            whole = sum(holding.counts) >= layout_of(holding).count
        except UsageError:
            return False
        if not whole or self._fleet.policies.readers_of(holding.blob):
            return False
        self._serving.setdefault(session, set()).add(holding.blob)
        return True

    def _may_receive(self, session: int, blob: Digest) -> bool:
        """Whether the host of a session in the swarm of a blob may read the blob, by the rules of
        now: those by which it came into the swarm may have been others."""
        identity, names = self._identities.get(session), self._fleet.policies.readers_of(blob)
        if identity is None:
            return False
        if names or identity.reads_everything:
            return identity.may_read(names)
        return blob not in self._serving.get(session, ())

    def with_ticket(self, session: int, host: str, assign: Assign) -> Assign:
        """A plan with the ticket that lets the host carry it out."""
        blob = assign.plan.blob
        if not self._may_receive(session, blob):
            return assign
        swarm = self._fleet.swarms.get(self._fleet.hosts[host].key(blob))
        priority: Priority = "start" if swarm is not None and host in swarm.starting else "preseed"
        text = self.control.tickets.ticket(blob, priority, self._identities[session], now=time.time())
        return msgspec.structs.replace(assign, ticket=text)

    def renewals(self, session: int, host: str, message: FromAgent) -> list[Assign]:
        """Plans that change nothing, with new tickets for the blobs that the host still receives by
        old ones."""
        blobs = message.blobs if isinstance(message, Holdings) else (message,) if isinstance(message, Holding) else ()
        found: list[Assign] = []
        identity = self._identities.get(session)
        if identity is None:
            return found
        for holding in blobs:
            ticket, blob = holding.ticket, holding.blob
            receives = ticket and self._receives(host, blob)
            if receives and self.control.tickets.ending(ticket, blob, identity, now=time.time()):
                found.append(self.with_ticket(session, host, Assign(self._unchanged(host, blob))))
        return found

    def _receives(self, host: str, blob: Digest) -> bool:
        known = self._fleet.hosts.get(host)
        return known is not None and known.key(blob) in known.receiving

    def _unchanged(self, host: str, blob: Digest) -> Plan:
        swarm = self._fleet.swarms[self._fleet.hosts[host].key(blob)]
        dealt = host in swarm.swarming and swarm.members[host].site in swarm.origin.shares
        return Plan(blob, (), dealt=dealt, epoch=self._fleet.handover.epoch)


def _parts(holding: Holding) -> tuple[Digest, Digest, bytes]:
    assert holding.selected is not None
    return holding.selected.blob, holding.selected.pieces, holding.selected.chosen
