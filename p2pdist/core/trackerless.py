"""Peers on the same link: what trackers and agents announce there, which of them count, and the
plan that an agent makes of them while no tracker answers.

Theory. An announcement (RFC 6763) is a hint from an unknown sender on the link: it says where a
tracker or an agent can be asked and is believed in nothing else. Announcements of other networks
(`network` is a name that an operator gives) are ignored.

Trackers are tried in an order that every agent works out for itself: trackers of its zone first,
then trackers that speak its protocol, newest before oldest; among equals by rendezvous hashing on
the agent's name, so that agents spread over them.

An agent that no tracker answers makes itself a plan (`plan_without_tracker`). For each stripe all
hosts that hold or fetch the blob are put in one order, by rendezvous hashing on blob and stripe as
in sources.py, hosts that can read the origin before hosts that cannot. Each host receives from one
that comes before it: the parent of place p in its zone is at place (p - 1) / CHILDREN, and the
first of a zone has its parent by the same rule in the order of all. So the trees have no circles
although no host drew them, each zone imports once, and, the orders of the stripes being different,
the inner hosts of one stripe are leaves in others. Hosts that had the blob before this one began
are alternates, wherever they are in the order. After these come the superpeers, all that can read
the origin, and the host reads it in its own place among them.

Invariants: at most PEERS_MAX of each kind are known; of several that use one name one counts; a
host is never its own peer.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from hashlib import blake2b
from ipaddress import IPv4Network, IPv6Network, ip_address
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from p2pdist.model.digest import Digest
from p2pdist.model.errors import UNDECODABLE, UsageError
from p2pdist.model.messages import PROTOCOL_VERSION
from p2pdist.model.pieces import PieceLayout
from p2pdist.model.plan import ALTERNATES_MAX, KEEPERS_MAX, HostName, Plan, Source, StripePlan
from p2pdist.model.rendezvous import ranked

PEERS_MAX = 256
TEXT_BYTES_MAX = 1300
PAIR_BYTES_MAX = 255
"""The limits of a whole TXT record, so that it fits a packet, and of one pair of it (RFC 6763, 6.1
and 6.2)."""

LABEL_BYTES_MAX = 63
CHILDREN = 2
EARLIER_MAX = 4
"""Alternates: hosts that had the blob before."""

Kind = Literal["tracker", "agent"]
NetworkId = Annotated[str, Meta(max_length=63, pattern=r"\A[A-Za-z0-9][A-Za-z0-9._-]*\Z")]


class Announcement(msgspec.Struct, frozen=True):
    """What a tracker or an agent says of itself. `address` is host:port as it is reached on this
    link; `origin` says that it can read central storage of its own accord."""

    network: NetworkId
    host: Annotated[HostName, Meta(min_length=1)]
    address: str = ""
    zone: HostName = ""
    rack: HostName = ""
    protocol: Annotated[int, Meta(ge=0, le=0xFFFF)] = PROTOCOL_VERSION
    tls: bool = False
    origin: bool = False

    @property
    def source(self) -> Source:
        """The agent as a source of streams."""
        return Source(self.host, self.address)

    @property
    def url(self) -> str:
        """Where a tracker answers."""
        return f"{'https' if self.tls else 'http'}://{self.address}"


_KEYS = {
    "net": "network",
    "host": "host",
    "zone": "zone",
    "rack": "rack",
    "proto": "protocol",
    "tls": "tls",
    "origin": "origin",
}
_FORM = {"txtvers": "1"}
"""RFC 6763, 6.7: text of another version is not understood."""


def text_of(announcement: Announcement) -> dict[str, str]:
    """The pairs of a TXT record. Raises UsageError for what no reader would understand, or what
    does not fit."""
    plain = msgspec.to_builtins(announcement)
    pairs = dict(_FORM)
    for key, name in _KEYS.items():
        value = plain[name]
        pairs[key] = str(int(value)) if isinstance(value, bool) else str(value)
    try:
        msgspec.convert(plain, Announcement)
    except msgspec.ValidationError as error:
        raise UsageError(
            f"{announcement.host!r} cannot be announced to network {announcement.network!r}: {error}",
            remedy="Give it a --network-id of letters, digits, dots and hyphens, or --no-discovery",
        ) from error
    for key, value in pairs.items():
        if len(f"{key}={value}".encode()) > PAIR_BYTES_MAX:
            raise UsageError(
                f"{key}={value[:100]} is too long to be announced", remedy="Shorten it, or give --no-discovery"
            )
    return pairs


def read_text(pairs: Mapping[bytes, bytes | None], address: str) -> Announcement:
    """The announcement of a TXT record, reached at `address`. Raises UsageError for any
    other text that an unknown sender may have sent."""
    if sum(len(key) + len(value or b"") + 2 for key, value in pairs.items()) > TEXT_BYTES_MAX:
        raise UsageError(f"more than {TEXT_BYTES_MAX} bytes of text")
    try:
        values = {key.decode().lower(): value.decode() for key, value in pairs.items() if value is not None}
        if any(values.get(key) != value for key, value in _FORM.items()):
            raise UsageError("text of another version")
        plain = {name: values[key] for key, name in _KEYS.items() if key in values}
        return msgspec.convert({**plain, "address": address}, Announcement, strict=False)
    except UNDECODABLE as error:
        raise UsageError(f"malformed text: {' '.join(str(error).split())[:200]}") from error


def label_of(host: str) -> str:
    """The name of a host as one label of a DNS name (RFC 6763, 4.1): itself where it fits, else
    what fits and a hash of all."""
    if "." not in host and len(host.encode()) <= LABEL_BYTES_MAX:
        return host
    mark = "-" + blake2b(host.encode(), digest_size=4).hexdigest()
    start = host.replace(".", "-").encode()[: LABEL_BYTES_MAX - len(mark)]
    return start.decode(errors="ignore") + mark


def address_on(link: IPv4Network | IPv6Network, addresses: Iterable[str]) -> str | None:
    """The first of `addresses` that belongs to `link`: only senders on the link count (RFC 6762,
    11)."""
    return next((address for address in addresses if "%" not in address and ip_address(address) in link), None)


@dataclass(slots=True)
class LinkPeers:
    """The trackers and agents that announced themselves. Links and instances are names that the
    adapter chooses."""

    me: Announcement
    _known: dict[Kind, dict[tuple[str, str], Announcement]] = field(
        default_factory=lambda: {"tracker": {}, "agent": {}}
    )

    def heard(self, kind: Kind, link: str, instance: str, announcement: Announcement) -> bool:
        """Take in an announcement; returns whether that changed what is known."""
        if not self._counts(kind, announcement):
            return self.gone(kind, link, instance)
        peers = self._known[kind]
        if peers.get((link, instance)) == announcement:
            return False
        if (link, instance) not in peers and len(peers) >= PEERS_MAX:
            return False
        peers[link, instance] = announcement
        return True

    def gone(self, kind: Kind, link: str, instance: str) -> bool:
        """Take in that a peer took its leave, or was not heard of for long; returns whether it was
        known."""
        return self._known[kind].pop((link, instance), None) is not None

    def cut_off(self, link: str) -> bool:
        """Take in that a link is no more; returns whether a peer was known there."""
        changed = False
        for peers in self._known.values():
            for key in [key for key in peers if key[0] == link]:
                del peers[key]
                changed = True
        return changed

    def trackers(self) -> list[Announcement]:
        """The known trackers, best first."""
        me, trackers = self.me, {f"{peer.host} {peer.address}": peer for peer in self._known["tracker"].values()}
        order = [trackers[name] for name in ranked(me.host.encode(), trackers, len(trackers))]
        return sorted(order, key=lambda peer: (peer.zone != me.zone, peer.protocol != me.protocol, -peer.protocol))

    def agents(self) -> list[Announcement]:
        """The known agents in the order of their names; of several with one name the one on the
        first link."""
        peers = self._known["agent"]
        by_name = {peers[key].host: peers[key] for key in sorted(peers, reverse=True)}
        return [by_name[name] for name in sorted(by_name)]

    def _counts(self, kind: Kind, peer: Announcement) -> bool:
        if peer.network != self.me.network:
            return False
        if kind == "tracker":
            return True
        return peer.host != self.me.host and peer.protocol == self.me.protocol and peer.tls == self.me.tls


def plan_without_tracker(
    blob: Digest, layout: PieceLayout, me: Announcement, peers: Iterable[Announcement], earlier: Collection[str] = ()
) -> Plan:
    """A plan for `me` of a blob that `peers` hold or fetch, the ones in `earlier` since before
    `me` began. Hosts among these, `me` included, that can read the origin are superpeers. At most
    KEEPERS_MAX hosts take part, hosts of the same zone first."""
    by_name = {peer.host: peer for peer in peers if peer.host != me.host}
    near = [name for name, peer in by_name.items() if peer.zone == me.zone]
    far = [name for name, peer in by_name.items() if peer.zone != me.zone]
    key = blob.encode()
    chosen = [*ranked(key, near, len(near)), *ranked(key, far, len(far))][: KEEPERS_MAX - 1]
    hosts = {me.host: me, **{name: by_name[name] for name in chosen}}
    stripes = tuple(_stripe_plan(blob, stripe, me, hosts, earlier) for stripe in range(layout.stripes))
    return Plan(blob, stripes, tuple(host.source for host in hosts.values() if host.origin))


def plan_from_memory(blob: Digest, layout: PieceLayout, me: str, hosts: Collection[Source]) -> Plan:
    """A plan for the host `me` of a blob of which trackers named `hosts` before: all of them are
    asked in turn, in an order that differs from stripe to stripe and from host to host."""
    by_name = {source.host: source for source in hosts}

    def order(stripe: int) -> list[Source]:
        return [by_name[name] for name in ranked(f"{blob}/{stripe}/{me}".encode(), by_name, ALTERNATES_MAX)]

    orders = ((stripe, order(stripe)) for stripe in range(layout.stripes))
    return Plan(blob, tuple(StripePlan(stripe, first, tuple(others)) for stripe, (first, *others) in orders))


def _stripe_plan(
    blob: Digest, stripe: int, me: Announcement, hosts: Mapping[str, Announcement], earlier: Collection[str]
) -> StripePlan:
    key = f"{blob}/{stripe}".encode()  # as superpeers are ordered in sources.py
    order = [
        *ranked(key, (name for name, host in hosts.items() if host.origin), len(hosts)),
        *ranked(key, (name for name, host in hosts.items() if not host.origin), len(hosts)),
    ]
    near = [name for name in order if hosts[name].zone == me.zone]
    parent = _parent(me.host, near) or _parent(me.host, order)
    others = [name for name in hosts if name in earlier and name not in (me.host, parent)]
    alternates = ranked(key + me.host.encode(), others, EARLIER_MAX)
    source = hosts[parent].source if parent is not None else None
    return StripePlan(stripe, source, tuple(hosts[name].source for name in alternates))


def _parent(name: str, order: list[str]) -> str | None:
    """The parent of `name` where each host has CHILDREN; None for the first."""
    place = order.index(name)
    return order[(place - 1) // CHILDREN] if place else None
