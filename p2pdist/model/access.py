"""Access: which rights an identity has, which packages it may read, and tickets, by which one host
proves to another that the tracker lets it receive a blob.

Theory. The tracker decides once what a host may receive, and says so in a ticket that comes with
the plan. The sender of a blob checks a ticket without a question to the tracker: its
signature, the blob, the time, and that the receiver is the host in the peer's certificate. So a
fleet goes on while its trackers are away.

Patterns are compared by component, as the names of packages are written: `team/*` is every package
below `team` at any depth, `team/trainer` is that package alone, `*` is everything. No pattern
reaches into a component: `team/tr*` is none.

Everything here is pure: signatures are made and checked by functions that the caller hands in.
"""

from __future__ import annotations

import base64
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from p2pdist.model.digest import WireDigest
from p2pdist.model.errors import UNDECODABLE, NotFound, Refused, Unauthenticated, UsageError
from p2pdist.model.plan import TICKET_CHARACTERS_MAX

Right = Literal[
    "open",
    "join",
    "agent",
    "read",
    "rank",
    "preseed",
    "cancel-any",
    "watch",
    "metrics",
    "trackers",
    "hosts",
    "ticket",
    "image",
    "object",
    "local",
    "local-admin",
]
"""What a route asks of the identity that requests it.

open: nothing. join: a join token. agent: a certificate of this fleet's agents. read: some packages,
of which the route answers for those that the identity may read. rank: rank hosts. preseed: order
preseeds and cancel one's own. cancel-any: cancel the preseeds of others. watch: see hosts, swarms
and events. metrics: read metrics. trackers: have a tracker give its blobs to others. hosts:
drain hosts, and evict packages from them. ticket: a
ticket for the blob (between agents). image: reading the image that is asked for, which the registry
interface judges. object: reading the object that is asked for, which the S3 interface judges.
local: a process at the agent's Unix socket. local-admin: root, or the agent's own user, at that
socket.
"""

GRANTABLE: tuple[Right, ...] = ("rank", "preseed", "cancel-any", "watch", "metrics", "trackers", "hosts")
"""Rights that a role may have. `read` comes with the role's patterns."""

PATTERN_CHARACTERS_MAX = 255
PATTERNS_MAX = 1000
TICKET_S = 600.0
"""How long a ticket is valid while a tracker answers the sender."""

TICKET_ALONE_S = 86400.0
"""How long after its end a ticket is still taken by a sender to which no tracker answers."""

SKEW_S = 60.0
"""How far two clocks may differ."""

_PATTERN = re.compile(
    r"(?:\*|[a-z0-9]+(?:[._-]+[a-z0-9]+)*(?::[0-9]{1,5})?(?:/[a-z0-9]+(?:[._-]+[a-z0-9]+)*)*(?:/\*)?"
    r"|hf\.co(?:/[A-Za-z0-9][A-Za-z0-9._-]{0,95}){1,3}(?:/\*)?)\Z"
)
"""An image's name begins with that of its registry, which may have a port; that of a repository of
a hub, which has capitals where the hub writes them, with hf.co."""

Now = float
"""Seconds since the epoch: tickets and tokens are compared on several machines."""


@dataclass(frozen=True, slots=True)
class Patterns:
    """Which packages something holds for, by the names of packages without tag and digest."""

    patterns: tuple[str, ...] = ()

    @classmethod
    def parse(cls, patterns: Iterable[str], where: str) -> Patterns:
        """Raises UsageError for what no name could match; `where` names the place it stands."""
        parsed = tuple(patterns)
        if len(parsed) > PATTERNS_MAX:
            raise UsageError(f"{where} has {len(parsed)} patterns, more than {PATTERNS_MAX}")
        for pattern in parsed:
            if len(pattern) > PATTERN_CHARACTERS_MAX or not _PATTERN.match(pattern):
                raise UsageError(
                    f"{where}: {pattern[:80]!r} is no pattern of package names",
                    remedy='Write "team/trainer", "team/*" for all below it, or "*" for everything; images are "docker.io/library/debian"',
                )
        return cls(parsed)

    @property
    def everything(self) -> bool:
        """Whether every package matches, of whatever name or of none."""
        return "*" in self.patterns

    def match(self, name: str) -> bool:
        """Whether a package of this name matches."""
        return any(_matches(pattern, name) for pattern in self.patterns)

    def match_any(self, names: Iterable[str]) -> bool:
        """Whether a blob of packages of these names matches: one of them is enough."""
        return self.everything or any(map(self.match, names))

    def joined(self, other: Patterns) -> Patterns:
        """Patterns that match what either matches."""
        return Patterns(tuple(dict.fromkeys((*self.patterns, *other.patterns))))

    def contains(self, pattern: str) -> bool:
        """Whether all that `pattern` matches is matched here."""
        least = pattern.removesuffix("*")  # what everything that it matches begins with, or is
        return any(
            own in ("*", pattern) or (own.endswith("/*") and least.startswith(own[:-1])) for own in self.patterns
        )


def _matches(pattern: str, name: str) -> bool:
    return pattern in ("*", name) or (pattern.endswith("/*") and name.startswith(pattern[:-1]))


NOTHING = Patterns()
EVERYTHING = Patterns(("*",))

IdentityKind = Literal["anonymous", "agent", "token", "person", "local", "open"]
"""anonymous: nothing is known of it. agent: a host with a certificate. token: a scheduler or
operator with a token. person: a user with a token of an OIDC issuer. local: a process at the Unix
socket. open: access is off, and every request may do everything."""


@dataclass(frozen=True, slots=True)
class Identity:
    """What is known of the sender of a request, and what it may do."""

    kind: IdentityKind
    name: str = ""
    """The host of an agent, the id or subject of a token, the number of a local user."""
    rights: frozenset[Right] = frozenset({"open"})
    read: Patterns = NOTHING
    """Packages that it may read."""
    zones: tuple[str, ...] = ()
    """Zones of which an agent may say that it is in; none: any."""
    credential: str = ""
    """What proved its identity, by the name under which it is revoked: `token:ID`, or `join:ID` for
    an agent."""

    def __str__(self) -> str:
        return f"{self.kind}:{self.name}" if self.name else self.kind

    def may(self, right: Right) -> bool:
        """Whether it has a right."""
        return self.kind == "open" or right == "open" or right in self.rights

    def require(self, right: Right, also: tuple[Right, ...] = ()) -> None:
        """Raises Refused where it lacks a right and each of those that do as well; Unauthenticated
        where a credential might help."""
        if self.may(right) or any(map(self.may, also)):
            return
        if self.kind == "anonymous":
            raise Unauthenticated("this request needs a token", remedy=_ANONYMOUS_REMEDY)
        raise Refused(f"{self} may not do that: it lacks the right {right!r}", remedy=f"Ask for a role with {right!r}")

    @property
    def reads_everything(self) -> bool:
        """Whether there is no package that it may not read."""
        return self.kind == "open" or self.read.everything

    def may_read(self, names: Iterable[str]) -> bool:
        """Whether it may read a package of one of these names, or a blob of packages of these
        names. What has no name is for identities that may read everything."""
        return self.kind == "open" or self.read.match_any(names)

    def require_read(self, names: Iterable[str], what: str) -> None:
        """Raises NotFound, as for what does not exist, where it may not read `what`."""
        if not self.may_read(names):
            raise NotFound(f"{what} is not known here")


_ANONYMOUS_REMEDY = "Give one with --token-file or in P2PDIST_TOKEN: p2pdist token create makes it"


ANONYMOUS = Identity("anonymous")
OPEN = Identity("open", rights=frozenset({"open"}), read=EVERYTHING)
"""The identity of every request while access is off."""


def agent_identity(host: str, read: Patterns, zones: tuple[str, ...] = (), *, join: str = "") -> Identity:
    """A host with a certificate of the fleet: it may speak as an agent, and read by its patterns.
    `join` is the id of the join token by which it came."""
    return Identity("agent", host, frozenset({"open", "agent", "read"}), read, zones, f"join:{join}" if join else "")


# -- roles


class RoleDocument(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One role as the access file states it: `may` are rights, `read` patterns."""

    may: tuple[str, ...] = ()
    read: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Role:
    """What a token or a person of this role may do."""

    name: str
    rights: frozenset[Right] = frozenset({"open"})
    read: Patterns = NOTHING

    @classmethod
    def parse(cls, name: str, document: RoleDocument) -> Role:
        """Raises UsageError for rights and patterns that do not exist."""
        unknown = sorted(set(document.may) - set(GRANTABLE))
        if unknown:
            raise UsageError(
                f"role {name}: {unknown[0][:40]!r} is no right", remedy=f"Rights are {', '.join(GRANTABLE)}"
            )
        read = Patterns.parse(document.read, f"role {name}")
        granted: set[Right] = {"open", *(right for right in GRANTABLE if right in document.may)}
        if read.patterns:
            granted.add("read")
        return cls(name, frozenset(granted), read)

    def identity(self, kind: IdentityKind, name: str, *, credential: str = "") -> Identity:
        """An identity of this role."""
        return Identity(kind, name, self.rights, self.read, credential=credential)


# -- local users

MIRROR_SUBJECT = "mirror"
"""The subject of the rule for a mirror's port on loopback."""


@dataclass(frozen=True, slots=True)
class LocalRules:
    """Which packages the processes of an agent's host may read: at its Unix socket by user and
    group, where without rules the socket's group is all that counts, and at its mirror's port on
    loopback, where nothing is known of them."""

    by_subject: Mapping[str, Patterns] = field(default_factory=dict)
    """Patterns by `user:NAME` or `group:NAME`, NAME may be a number, and by MIRROR_SUBJECT."""
    mount_roots: tuple[str, ...] = ()
    """Directories below which views may be mounted; none: wherever the caller may write."""

    def patterns(self, subjects: Iterable[str]) -> Patterns:
        """What a process may read that goes by these subjects."""
        if not self.by_subject.keys() - {MIRROR_SUBJECT}:
            return EVERYTHING
        found = (self.by_subject[subject] for subject in subjects if subject in self.by_subject)
        return Patterns(tuple(dict.fromkeys(pattern for patterns in found for pattern in patterns.patterns)))

    @property
    def mirror(self) -> Patterns:
        """What any process may read at the mirror's port on loopback, besides public packages."""
        return self.by_subject.get(MIRROR_SUBJECT, NOTHING)


# -- tickets


class Ticket(msgspec.Struct, frozen=True, array_like=True):
    """The tracker lets `receiver` receive `blob` until `until`, seconds since the epoch. `receiver`
    is `joined_with` of a join token for all hosts that came with it, or a host. `key` names the
    tracker's signing key."""

    key: Annotated[str, Meta(max_length=64)]
    blob: WireDigest
    receiver: Annotated[str, Meta(max_length=255)]
    priority: Literal["start", "preseed"]
    until: float


_JOINED = "join:"


def joined_with(join: str) -> str:
    """The receiver in tickets for all hosts that came with the join token of this id; "": that have
    a certificate of another authority."""
    return f"{_JOINED}{join}"


Sign = Callable[[bytes], bytes]
Verify = Callable[[str, bytes, bytes], bool]
"""Key's name, message, signature; False also for a key that is not known."""

TICKET_HEADER = "P2pdist-Ticket"
"""Field of requests between agents that carries a ticket."""

_ticket_encoder = msgspec.msgpack.Encoder()
_ticket_decoder = msgspec.msgpack.Decoder(Ticket)
_CONTEXT = b"p2pdist-ticket-1\n"
_SIGNATURE_BYTES = 64


def encode_ticket(ticket: Ticket, sign: Sign) -> str:
    """The signed ticket as one word of ASCII, about 200 characters."""
    body = _ticket_encoder.encode(ticket)
    return base64.urlsafe_b64encode(body + sign(_CONTEXT + body)).decode().rstrip("=")


def decode_ticket(text: str, verify: Verify) -> Ticket:
    """A ticket whose signature is right. Raises Refused for anything else."""
    refused = Refused("the ticket is not one of this fleet", remedy="Ask the tracker for another")
    if not text.isascii() or len(text) > TICKET_CHARACTERS_MAX:
        raise refused
    try:
        data = base64.b64decode(text + "=" * (-len(text) % 4), altchars=b"-_", validate=True)
        body, signature = data[:-_SIGNATURE_BYTES], data[-_SIGNATURE_BYTES:]
        ticket = _ticket_decoder.decode(body)
    except (ValueError, *UNDECODABLE) as error:
        raise refused from error
    if not verify(ticket.key, _CONTEXT + body, signature):
        raise refused
    return ticket


def peek_priority(text: str) -> Literal["start", "preseed"]:
    """The priority in a ticket of this host's own, whose signature is others' to check; "start"
    where it cannot be read."""
    try:
        data = base64.b64decode(text + "=" * (-len(text) % 4), altchars=b"-_", validate=True)
        return _ticket_decoder.decode(data[:-_SIGNATURE_BYTES]).priority
    except (ValueError, *UNDECODABLE):
        return "start"


def check_ticket(ticket: Ticket, *, blob: str, receiver: str, join: str | None = None, alone: bool, now: Now) -> None:
    """Raises Refused unless the ticket lets `receiver`, the host in the peer's certificate, receive
    `blob` now. `join` is the id of the join token in that certificate, "" where another authority
    issued it; None: not known. `alone`: no tracker answers this host, so none could have renewed
    the ticket."""
    if ticket.blob != blob:
        raise Refused("the ticket is for another blob")
    by_join = join is not None and ticket.receiver == joined_with(join)
    by_name = ticket.receiver == receiver and not receiver.startswith(_JOINED)
    if not by_join and not by_name:
        raise Refused(f"the ticket is for another host than {receiver[:100]}")
    if now > ticket.until + SKEW_S + (TICKET_ALONE_S if alone else 0.0):
        raise Refused("the ticket has expired", remedy="Ask the tracker for another")
