"""What a tracker says of others in its Access message, and judgements by it: of the hosts and
tickets of peers, and of the bearers of tokens.

The agent keeps the last message beside its identity, so that a fleet goes on, and keeps its locks,
while its trackers are away. Signatures are checked once for each ticket; what depends on the time
is compared for each stream.
"""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

import msgspec

from p2pdist.agent.access.files import make_private, read, replace
from p2pdist.credentials.authority import dns_name_in, issued_by_fleet, join_in, name_in, trust_domain_in
from p2pdist.credentials.signing import VerifyKeys
from p2pdist.credentials.tokens import split_token, verify_token
from p2pdist.model.access import (
    GRANTABLE,
    Identity,
    LocalRules,
    Patterns,
    Ticket,
    check_ticket,
    decode_ticket,
)
from p2pdist.model.digest import Digest
from p2pdist.model.errors import UNDECODABLE, P2PDistError, Refused, Unauthenticated, UsageError
from p2pdist.model.messages import Access, Priority

SOURCES_MAX = 20_000
CHECKED_MAX = 4096
"""Tickets whose signature was right."""

logger = logging.getLogger(__name__)

_decoder = msgspec.json.Decoder(Access)


class Ends(Protocol):
    """A stream or reader that is being served."""

    def fail(self, error: P2PDistError) -> None:
        """End it as truncated."""


class Peers:
    """What is known of others. `required`: access is on although no tracker has said anything yet.
    `secured`: the agent speaks TLS, without which no message counts. `fleet` and `join` are
    the fleet that this host has joined, and the id of the join token. `trust_domain` is that of
    this host's SVID: a certificate with an SPIFFE ID of another one, or of no fleet's, names no
    host.
    `clock` is the tracker's time of day as far as it is known, in seconds since the epoch; `alone`
    says whether no tracker answers. On the event loop."""

    def __init__(
        self,
        directory: Path,
        host: str,
        *,
        fleet: str = "",
        join: str = "",
        trust_domain: str = "",
        required: bool,
        secured: bool,
        clock: Callable[[], float],
        alone: Callable[[], bool],
    ) -> None:
        self._directory, self._file, self._host = directory, directory / "access.json", host
        self._fleet, self._join, self._trust_domain = fleet or trust_domain, join, trust_domain
        self._required, self._clock, self._alone = required, clock, alone
        self.access: Access | None = None
        """The last message, None while access is off."""
        self.public = Patterns()
        """The packages for which no host needs a ticket."""
        self.local = LocalRules()
        self._keys = VerifyKeys({})
        self._revoked: frozenset[str] = frozenset()
        self._checked: OrderedDict[str, Ticket] = OrderedDict()
        """Tickets with right signatures, by their text; the one that was used last at the end."""
        self._served: dict[tuple[str, str], set[Ends]] = {}
        """What is being sent to each host, by its name and the join token by which it came."""
        self._sources: dict[str, str] = {}
        """The join tokens in the certificates of hosts from which this one received."""
        self._writing: set[asyncio.Task[None]] = set()
        self._turn = asyncio.Lock()
        """Is held while a message is written: a thread that is late must not put an older one, of
        fewer revoked hosts, in the place of the last."""
        if secured:
            self._load()

    @property
    def on(self) -> bool:
        """Whether access is on."""
        return self._required or self.access is not None

    @property
    def ruled(self) -> bool:
        """Whether it is known what processes of this host may read: a host that has joined hears of
        rules from its tracker, and keeps them."""
        return self.access is not None or not self._required

    @property
    def revoked_here(self) -> bool:
        """Whether this host is revoked: it serves and fetches nothing more."""
        return self.is_revoked(self._host, self._join)

    def host_in(self, certificate: Mapping[str, Any] | None) -> str:
        """The host in a peer's certificate, which TLS has verified: the one in the fleet's own
        name, else of another authority the first DNS name, as trackers read it; "" where there is
        none."""
        fleet = self.access.fleet if self.access is not None else self._fleet
        if host := name_in(certificate, fleet, "agent"):
            return host
        foreign = self._trust_domain and trust_domain_in(certificate) not in ("", fleet, self._trust_domain)
        return "" if foreign or issued_by_fleet(certificate, fleet) else dns_name_in(certificate)

    def join_in(self, certificate: Mapping[str, Any] | None) -> str:
        """The id of the join token by which the host in a peer's certificate came; "" where another
        authority issued it, whose certificates may say what they like."""
        fleet = self.access.fleet if self.access is not None else self._fleet
        return (join_in(certificate) or "?") if issued_by_fleet(certificate, fleet) else ""

    def is_revoked(self, host: str, join: str = "") -> bool:
        """Whether a host is revoked, or the join token by which it came (its id, "" where that is
        not known)."""
        return f"host:{host}" in self._revoked or bool(join and f"join:{join}" in self._revoked)

    def is_revoked_source(self, host: str) -> bool:
        """Whether this host may receive nothing from another one any more: it, or the join token in
        the certificate that it showed last, is revoked."""
        return self.is_revoked(host, self._sources.get(host, ""))

    def source_in(self, certificate: Mapping[str, Any] | None) -> str:
        """The host in the certificate of a peer from which this host is about to receive; "" where
        there is none. Raises Refused where it is revoked. From any thread."""
        host, join = self.host_in(certificate), self.join_in(certificate)
        if host:
            self.require(host, join)
            self._sources[host] = join
            while len(self._sources) > SOURCES_MAX:
                self._sources.pop(next(iter(self._sources)), None)
        return host

    def require_here(self) -> None:
        """Raises Refused where this host is revoked."""
        if self.revoked_here:
            raise Refused(
                f"this host, {self._host}, is revoked, and fetches nothing",
                remedy="p2pdist access unrevoke, at the tracker, lets it in again",
            )

    def require(self, host: str, join: str = "") -> None:
        """Raises Refused for a host that is revoked."""
        if self.is_revoked(host, join):
            raise _revoked(host)

    def learn(self, access: Access) -> None:
        """Take a message of a tracker in, and end what is sent to hosts that are revoked. Raises
        UsageError, and changes nothing, for one that cannot be used."""
        self._take(access)
        for host, join in [peer for peer in self._served if self.is_revoked(*peer) or self.revoked_here]:
            for served in tuple(self._served[host, join]):
                served.fail(_revoked(host))
        task = asyncio.create_task(self._keep())
        self._writing.add(task)
        task.add_done_callback(self._writing.discard)

    async def stop(self) -> None:
        """Wait until what was learnt is written."""
        await asyncio.gather(*self._writing, return_exceptions=True)

    # -- judging

    def admit(
        self, blob: Digest, text: str, host: str, *, join: str | None = None, public: bool, asked: Priority
    ) -> Priority:
        """The priority at which the peer `host` ("": one without a certificate), which came with
        the join token of the id `join`, may receive a blob with the ticket `text`, when it asks for
        `asked`. `public`: the blob needs none. Raises Refused."""
        if self.revoked_here:
            raise Refused("this host is revoked, and serves nothing")
        if host:
            self.require(host)
        if not text:
            if public:
                return asked
            raise Refused("this blob is sent for a ticket alone", remedy="Ask the tracker for one")
        if not host:
            raise Refused("a ticket counts together with a certificate of the fleet")
        ticket = self._signed(text)
        check_ticket(ticket, blob=blob, receiver=host, join=join, alone=self._alone(), now=self._clock())
        return asked if ticket.priority == "start" else "preseed"

    def bearer(self, text: str) -> Identity:
        """The identity of the bearer of a token of this fleet. Raises Unauthenticated and
        UsageError."""
        access = self.access
        if access is None:
            raise Unauthenticated("this agent knows no tokens yet", remedy="Ask again when its tracker has answered")
        claims = verify_token(split_token(text)[1], access.keys, access.fleet)
        if f"token:{claims.id}" in self._revoked:
            raise Unauthenticated("the token is not valid: it was revoked")
        rights = frozenset(right for right in GRANTABLE if right in access.roles.get(claims.role, ()))
        read = Patterns.parse(access.reads.get(claims.role, ()), f"role {claims.role}")
        return Identity("token", claims.id, rights | {"open"}, read, credential=f"token:{claims.id}")

    @contextmanager
    def serving(self, host: str, join: str, served: Ends) -> Iterator[None]:
        """Within it `served` is sent to a host that came with a join token, and ends when either is
        revoked."""
        peer = (host, join)
        self._served.setdefault(peer, set()).add(served)
        try:
            yield
        finally:
            self._served[peer].discard(served)
            if not self._served[peer]:
                del self._served[peer]

    def _signed(self, text: str) -> Ticket:
        ticket = self._checked.get(text)
        if ticket is None:
            ticket = self._checked[text] = decode_ticket(text, self._keys.verify)
            if len(self._checked) > CHECKED_MAX:
                self._checked.popitem(last=False)
        else:
            self._checked.move_to_end(text)
        return ticket

    # -- what is kept

    def _take(self, access: Access) -> None:
        keys, public = VerifyKeys(access.keys), Patterns.parse(access.public, "public")
        by_subject = {
            subject: Patterns.parse(patterns, f"local {subject[:60]}") for subject, patterns in access.local.items()
        }
        was_revoked = self.revoked_here
        self.access, self._keys, self.public = access, keys, public
        self.local = LocalRules(by_subject, access.mount_roots)
        self._revoked = frozenset(access.revoked)
        self._checked.clear()
        if self.revoked_here and not was_revoked:
            logger.error("this host, %s, was revoked: it neither serves nor fetches from now on", self._host)

    def _load(self) -> None:
        try:
            data = read(self._file)
            if data:
                self._take(_decoder.decode(data))
        except (OSError, UsageError, *UNDECODABLE) as error:
            logger.warning("what a tracker said of access cannot be read in %s: %s", self._file, error)
            self._required = True  # nothing is served for want of the locks

    async def _keep(self) -> None:
        """Write the last message, once the one before is written."""
        async with self._turn:
            await asyncio.to_thread(self._write, msgspec.json.encode(self.access))

    def _write(self, data: bytes) -> None:
        try:
            make_private(self._directory)
            replace(self._file, data)
        except OSError as error:
            logger.warning("what the tracker says of access is not kept in %s: %s", self._file, error.strerror)


def _revoked(host: str) -> Refused:
    return Refused(f"the host {host[:100]} is revoked", remedy="p2pdist access unrevoke lets it in again")
