"""Neighbours: what trackers and agents on the same link say of themselves, who of them counts, and
what an agent makes of them.

Theory. An announcement (RFC 6763) is a hint from anybody on the link: it says where somebody can be
asked and is believed in nothing else. Those of other networks (`network` is a name that an operator
gives) are as if they had not been said.

Trackers are tried in an order that every agent works out for itself: those of its zone first, then
those that speak its protocol, newest before oldest; among equals by rendezvous hashing on the
agent's name, so that agents spread over them.

An agent that no tracker answers makes itself a plan (`plan_without_tracker`). For each stripe all
hosts that hold or fetch the blob stand in one order, by rendezvous hashing on blob and stripe as in
candidates.py, those that can read the origin before those that cannot. Each host hangs below one
that stands before it: the parent of place p in its zone is at place (p - 1) / CHILDREN, and the
first of a zone hangs in the same way in the order of all. So the trees have no circles although
nobody drew them, each zone imports once, and, the orders of the stripes being different, the inner
hosts of one stripe are leaves in others. Hosts that had the blob before this one began come next,
wherever they stand. After these come the keepers, all who can read the origin, and the host reads
it in its own place among them.

Invariants: at most NEIGHBOURS_MAX of each kind are known; of several that use one name one counts;
a host is never its own neighbour.
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
from p2pdist.model.plan import KEEPERS_MAX, HostName, Plan, Source, StripePlan
from p2pdist.model.rendezvous import ranked

NEIGHBOURS_MAX = 256
TEXT_BYTES_MAX = 1300
PAIR_BYTES_MAX = 255
"""All of a TXT record, so that it fits a packet, and one pair of it (RFC 6763, 6.1 and 6.2)."""

LABEL_BYTES_MAX = 63
CHILDREN = 2
EARLIER_MAX = 4
"""Hosts that had the blob before, which are asked after the parent."""

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
"""RFC 6763, 6.7: of another version nothing is understood."""


def text_of(announcement: Announcement) -> dict[str, str]:
    """The pairs of a TXT record. Raises UsageError for what nobody would understand, or what does
    not fit."""
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
    """The announcement of a TXT record, reached at `address`. Raises UsageError for whatever else a
    stranger may have sent."""
    if sum(len(key) + len(value or b"") + 2 for key, value in pairs.items()) > TEXT_BYTES_MAX:
        raise UsageError(f"more than {TEXT_BYTES_MAX} bytes of text")
    try:
        said = {key.decode().lower(): value.decode() for key, value in pairs.items() if value is not None}
        if any(said.get(key) != value for key, value in _FORM.items()):
            raise UsageError("text of another version")
        plain = {name: said[key] for key, name in _KEYS.items() if key in said}
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
    """The first of `addresses` that belongs to `link`: who answers on a link lives on it (RFC 6762,
    11)."""
    return next((each for each in addresses if "%" not in each and ip_address(each) in link), None)


@dataclass(slots=True)
class Neighbours:
    """See the module's text. `me` is what this host says of itself. Links and instances are names
    that the adapter chooses."""

    me: Announcement
    _known: dict[Kind, dict[tuple[str, str], Announcement]] = field(
        default_factory=lambda: {"tracker": {}, "agent": {}}
    )

    def heard(self, kind: Kind, link: str, instance: str, announcement: Announcement) -> bool:
        """Somebody announced itself; says whether that changed what is known."""
        if not self._counts(kind, announcement):
            return self.gone(kind, link, instance)
        known = self._known[kind]
        if known.get((link, instance)) == announcement:
            return False
        if (link, instance) not in known and len(known) >= NEIGHBOURS_MAX:
            return False
        known[link, instance] = announcement
        return True

    def gone(self, kind: Kind, link: str, instance: str) -> bool:
        """Somebody took its leave, or was not heard of for long; says whether it was known."""
        return self._known[kind].pop((link, instance), None) is not None

    def cut_off(self, link: str) -> bool:
        """A link is no more; says whether anybody was known there."""
        changed = False
        for known in self._known.values():
            for place in [place for place in known if place[0] == link]:
                del known[place]
                changed = True
        return changed

    def trackers(self) -> list[Announcement]:
        """Best first."""
        found = {f"{each.host} {each.address}": each for each in self._known["tracker"].values()}
        order = [found[name] for name in ranked(self.me.host.encode(), found, len(found))]
        return sorted(
            order,
            key=lambda each: (each.zone != self.me.zone, each.protocol != self.me.protocol, -each.protocol),
        )

    def agents(self) -> list[Announcement]:
        """In the order of their names; where several use one, the one on the first link counts."""
        known = self._known["agent"]
        by_name = {known[place].host: known[place] for place in sorted(known, reverse=True)}
        return [by_name[name] for name in sorted(by_name)]

    def _counts(self, kind: Kind, said: Announcement) -> bool:
        if said.network != self.me.network:
            return False
        if kind == "tracker":
            return True
        return said.host != self.me.host and said.protocol == self.me.protocol and said.tls == self.me.tls


def plan_without_tracker(
    blob: Digest,
    layout: PieceLayout,
    me: Announcement,
    neighbours: Iterable[Announcement],
    earlier: Collection[str] = (),
) -> Plan:
    """A plan for `me` of a blob that `neighbours` hold or fetch, those named in `earlier` since
    before `me` began. Who of them, and of this host, can read the origin is a keeper: KEEPERS_MAX
    at the most, those of the same zone first."""
    known = {each.host: each for each in neighbours if each.host != me.host}
    near = [name for name, each in known.items() if each.zone == me.zone]
    far = [name for name, each in known.items() if each.zone != me.zone]
    key = blob.encode()
    kept = [*ranked(key, near, len(near)), *ranked(key, far, len(far))][: KEEPERS_MAX - 1]
    among = {me.host: me, **{name: known[name] for name in kept}}
    stripes = tuple(_stripe_plan(blob, stripe, me, among, earlier) for stripe in range(layout.stripes))
    return Plan(blob, stripes, tuple(each.source for each in among.values() if each.origin))


def _stripe_plan(
    blob: Digest, stripe: int, me: Announcement, among: Mapping[str, Announcement], earlier: Collection[str]
) -> StripePlan:
    key = f"{blob}/{stripe}".encode()  # as keepers are ordered in candidates.py
    order = [
        *ranked(key, (name for name, each in among.items() if each.origin), len(among)),
        *ranked(key, (name for name, each in among.items() if not each.origin), len(among)),
    ]
    near = [name for name in order if among[name].zone == me.zone]
    above = _above(me.host, near) or _above(me.host, order)
    others = [name for name in among if name in earlier and name not in (me.host, above)]
    alternates = ranked(key + me.host.encode(), others, EARLIER_MAX)
    parent = among[above].source if above is not None else None
    return StripePlan(stripe, parent, tuple(among[name].source for name in alternates))


def _above(name: str, order: list[str]) -> str | None:
    """Whom `name` hangs below where each has CHILDREN; nobody for the first."""
    place = order.index(name)
    return order[(place - 1) // CHILDREN] if place else None
