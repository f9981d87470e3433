"""Host: what the tracker knows of one host."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from math import inf

from p2pdist.model.address import is_loopback, network_of
from p2pdist.model.digest import Digest
from tracker.core.events import SessionOpened

BAN_REPORTERS_MIN = 2
"""So many hosts must report failures of a host before it is banned: one alone may be at fault
itself."""

VOUCHERS, VOUCHERS_MAX = 2, 64
"""So many hosts that got good pieces outweigh one that complains; how many are remembered."""

SITE_END = "\t"
"""Stands between the names of a site and a zone, in which there is no white space."""

PLACES_MAX = 16384
"""Names of sites, zones and racks that all hosts there share."""


@lru_cache(PLACES_MAX)
def zone_at(site: str, zone: str) -> str:
    """The name of a zone with that of its site, where it has one."""
    return f"{site}{SITE_END}{zone}" if site else zone


KEYS_SHARED_MAX = 8
"""A host with at most so many swarms shares the tuple of their keys with others that are in the
same ones; a longer one would be copied too often."""

KEY_ROWS_MAX = 4096
"""Such tuples that hosts share."""


@lru_cache(KEY_ROWS_MAX)
def _shared(keys: tuple[Digest, ...]) -> tuple[Digest, ...]:
    """The tuple that is kept for all hosts that have an equal one."""
    return keys


def with_key(keys: Collection[Digest], key: Digest) -> Collection[Digest]:
    """Keys with one more, behind the others: a tuple while they are few, a dictionary, which is
    changed in place, from then on. A dictionary of one key takes 0.2 kB, a shared tuple nothing."""
    if isinstance(keys, dict):
        keys[key] = None
        return keys
    if key in keys:
        return keys
    more = (*keys, key)
    return _shared(more) if len(more) <= KEYS_SHARED_MAX else dict.fromkeys(more)


def without_key(keys: Collection[Digest], key: Digest) -> Collection[Digest]:
    """Keys without one of them, in the same order, which need not be there."""
    if isinstance(keys, dict):
        keys.pop(key, None)
        return keys or ()
    return _shared(tuple(each for each in keys if each != key)) if key in keys else keys


PENALTY_S = 60.0
CORRUPT_PENALTY_S = 600.0


@dataclass(slots=True)
class Host:
    """One host: its address, its session, its swarms and its reputation."""

    name: str
    address: str = ""
    """Where other hosts reach it, "host:port"; empty while it was only named by others.
    `connect`."""
    zone: str = ""
    """Name of its zone. `connect`."""
    site: str = ""
    """Name of the site of its zone; empty where the zone is a site by itself. `connect`."""
    rack: str = ""
    """Name of its rack within the zone. `connect`."""
    platform: str = ""
    """What images it runs; empty where its agent does not say. `connect`."""
    version: str = ""
    """Of its agent; empty where that does not say. `connect`."""
    clock_ahead_s: float | None = None
    """Its clock less the tracker's when it connected; None where its agent does not say.
    `connect`."""
    session: int | None = None
    """Number of its session; None while it has none. `connect`, `disconnect`."""
    absent_since: float | None = None
    """Time at which its session ended. `connect`, `disconnect`."""
    ended: str = ""
    """Why its session ended, in words for people. `disconnect`."""
    swarms: Collection[Digest] = ()
    """Keys of its swarms, in the order in which it entered them. `enter`, `leave`."""
    keys: dict[Digest, Digest] = field(default_factory=dict)
    """By blob, those of the keys that are not the blob's digest. `enter`, `leave`."""
    receiving: Collection[Digest] = ()
    """Keys of the swarms in which it still lacks pieces. `set_receiving`, `leave`."""
    penalties: dict[str, tuple[str, float]] = field(default_factory=dict)
    """By the name of the host that met a failure: the reason, and when it expires. `penalise`,
    `expire_penalties`."""
    origin_limit_bytes_s: float = 0.0
    """What it was told in its session that it may read of the origin; 0 before. `limit_origin`."""
    bt_port: int = 0
    """Port at which it answers BitTorrent peers; 0 for none. `connect`."""
    download_bytes_s: float = 0.0
    """What it lets itself receive; 0 for no limit. `connect`."""
    sent_at: float = -inf
    """Time at which it last reported that it had sent bytes. `note_sent`."""
    partial: bool = False
    """Its session is about blobs alone, and its home is with another tracker. `connect`."""
    leaving: bool = False
    """It said that it is about to end. `drain`, `connect`."""
    drained: bool = False
    """An operator drains it: it serves no other host, and no preseed picks it. Reputation.drain."""
    tls: bool = False
    """It speaks TLS with other hosts. `connect`."""
    instance: str = ""
    """Names the agent process that runs there. `connect`."""
    founded: dict[Digest, bool] = field(default_factory=dict)
    """Blobs that no manifest names and of which it made the swarm, as long as it is in one; whether
    it wants the blob and has got nothing yet. `found`, `got`, `leave`."""
    source: str = ""
    """The address that its session comes from; empty where that is not known. `connect`."""
    voter: str = ""
    """The name under which its complaints count: the address of its connection, so that many hosts
    of one machine have one vote; its own where a certificate names it, as hosts of one address may
    be many machines, and where the address is loopback or not known. `connect`."""
    crowd: str = ""
    """The same before it gave a piece to any host: the network of that address, as one operator may
    have many addresses there. `connect`."""
    vouchers: dict[str, float] = field(default_factory=dict)
    """Voters that lately got pieces from it, and when that expires. `vouch`, `penalise`,
    `expire_penalties`."""
    proved: bool = False
    """A child has got a piece from it. `prove`, `doubt`."""
    gave: bool = False
    """The same of a child with another vote, whether it claimed pieces or not. `give`."""
    doubted_until: float = 0.0
    """Until when its claims are not believed, since a child got nothing. `doubt`, `prove`."""
    wanted_in_vain: int = 0
    """How many of them it wants and has got nothing of. `found`, `got`, `leave`."""

    @property
    def location(self) -> str:
        """Its site and zone, as members of swarms have them (member.py)."""
        return zone_at(self.site, self.zone)

    @property
    def available(self) -> bool:
        """Whether anything may be asked of the host: it is connected, not about to end, and not
        drained."""
        return self.session is not None and not self.leaving and not self.drained

    @property
    def banned(self) -> bool:
        """Whether several voters found it sending wrong bytes or refusing to serve, and not many
        more got good pieces from it."""
        return len(self.penalties) >= BAN_REPORTERS_MIN and len(self.vouchers) < VOUCHERS * len(self.penalties)

    def connect(self, opened: SessionOpened, *, now: float) -> None:
        """The host opens a session. Only penalties for wrong bytes outlast a new start."""
        session, hello, source, certified = opened.session, opened.hello, opened.source, opened.certified
        self.expire_penalties(now=now, started_anew=True)
        self.address, self.zone, self.rack, self.bt_port = hello.address, hello.zone, hello.rack, hello.bt_port
        self.site = hello.site
        self.tls, self.instance, self.platform = hello.tls, hello.instance, hello.platform
        self.source = source
        alone = certified or not source or is_loopback(source)
        self.voter, self.crowd = (self.name, self.name) if alone else (source, network_of(source))
        self.session, self.absent_since, self.origin_limit_bytes_s, self.leaving = session, None, 0.0, False
        self.download_bytes_s, self.partial = hello.download_bytes_s, hello.partial
        self.version, self.clock_ahead_s = hello.version, opened.clock_ahead_s

    def disconnect(self, now: float, why: str = "") -> None:
        """The host's session has ended."""
        self.session, self.absent_since, self.ended = None, now, why

    def drain(self) -> None:
        """The host says that it is about to end."""
        self.leaving = True

    def note_sent(self, now: float) -> None:
        """The host reports that it has sent bytes."""
        self.sent_at = now

    def limit_origin(self, rate_bytes_s: float) -> None:
        """The host is told how much of the origin it may read."""
        self.origin_limit_bytes_s = rate_bytes_s

    def key(self, blob: Digest) -> Digest:
        """The key of the host's swarm of a blob, if it is in one."""
        return self.keys.get(blob, blob)

    def enter(self, blob: Digest, key: Digest) -> None:
        """The host is in a swarm of the blob. It is in one at most."""
        self.swarms = with_key(self.swarms, key)
        if key != blob:
            self.keys[blob] = key

    def set_receiving(self, key: Digest, receiving: bool) -> None:
        """The host lacks pieces in one of its swarms, or has all of them."""
        self.receiving = with_key(self.receiving, key) if receiving else without_key(self.receiving, key)

    def prove(self) -> None:
        """A child has got a piece from the host."""
        self.proved, self.doubted_until = True, 0.0

    def doubt(self, until: float) -> None:
        """The host gave a child nothing of what it claims to have."""
        self.proved, self.doubted_until = False, until

    def found(self, blob: Digest, *, wants: bool) -> None:
        """The host makes the swarm of a blob that no manifest names; `wants`: it lacks pieces."""
        self.founded[blob] = wants
        self.wanted_in_vain += wants

    def got(self, blob: Digest) -> None:
        """The host has got pieces of a blob, or is in none of its swarms any more."""
        if self.founded.get(blob):
            self.founded[blob] = False
            self.wanted_in_vain -= 1

    def leave(self, blob: Digest, key: Digest) -> None:
        """The host is no longer in that swarm."""
        self.got(blob)
        self.founded.pop(blob, None)
        self.swarms, self.receiving = without_key(self.swarms, key), without_key(self.receiving, key)
        if self.keys.get(blob) == key:
            del self.keys[blob]

    def vote(self, other: Host) -> str:
        """The name under which its complaints of another host count; empty where they do not: of a
        host that gave pieces only those of hosts count that did so themselves."""
        if self.gave:
            return self.voter or self.name
        return "" if other.gave else self.crowd or self.name

    def penalise(self, by: str, reason: str, *, now: float) -> bool:
        """Another host met a failure here; returns whether this host is banned from now on."""
        self._expire_vouchers(now)
        before = self.banned
        self.vouchers.pop(by, None)
        self.penalties[by] = (reason, now + (CORRUPT_PENALTY_S if reason == "corrupt" else PENALTY_S))
        return self.banned and not before

    def vouch(self, by: str, *, now: float) -> None:
        """A voter got a piece from the host, and has not complained of it."""
        if by in self.penalties:
            return
        self.vouchers.pop(by, None)
        self.vouchers[by] = now + PENALTY_S
        if len(self.vouchers) > VOUCHERS_MAX:
            del self.vouchers[next(iter(self.vouchers))]  # the one that is the first to expire

    def give(self, child: Host, *, now: float) -> None:
        """A child says that it has its first piece from the host."""
        self.gave = self.gave or child.voter != self.voter
        self.vouch(child.voter, now=now)

    def _expire_vouchers(self, now: float) -> None:
        if any(until <= now for until in self.vouchers.values()):
            self.vouchers = {by: until for by, until in self.vouchers.items() if until > now}

    def expire_penalties(self, *, now: float, started_anew: bool = False) -> None:
        """Forget old penalties, and after a new start of the agent all but those for wrong
        bytes."""
        self._expire_vouchers(now)
        self.penalties = {
            by: (reason, until)
            for by, (reason, until) in self.penalties.items()
            if until > now and (reason == "corrupt" or not started_anew)
        }


class AtHome(Mapping[str, Host]):
    """Those of some hosts whose home is this tracker, by name; a view that changes with them."""

    def __init__(self, hosts: Mapping[str, Host]) -> None:
        self._hosts = hosts

    def __getitem__(self, name: str) -> Host:
        host = self._hosts[name]
        if host.partial:
            raise KeyError(name)
        return host

    def __iter__(self) -> Iterator[str]:
        return (name for name, host in self._hosts.items() if not host.partial)

    def __len__(self) -> int:
        return sum(not host.partial for host in self._hosts.values())
