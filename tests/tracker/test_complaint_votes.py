"""Whose complaints count, and how often: what has proved nothing bans nothing that has."""

from __future__ import annotations

import pytest

from p2pdist.model.address import network_of
from p2pdist.model.digest import digest_of
from p2pdist.model.messages import PROTOCOL_VERSION, Advance, Complaint, Hello, Holding, Report
from tracker.core.events import Received, SessionOpened, Tick
from tracker.core.fleet import Fleet
from tracker.core.planning.schedule import JOIN_BATCH_S

PIECE, ALL = 65536, 8
BLOB, OTHER = digest_of(b"blob"), digest_of(b"other")


class Control:
    """A fleet, its time, and hosts at addresses."""

    def __init__(self) -> None:
        self.fleet, self.now = Fleet(-100.0), 0.0
        self.numbers: dict[str, int] = {}

    def open(self, host: str, source: str, *, certified: bool = False) -> None:
        self.numbers[host] = len(self.numbers)
        hello = Hello(PROTOCOL_VERSION, host, f"{host}:1")
        self.fleet.handle(SessionOpened(self.numbers[host], hello, source, certified), now=self.now)

    def tell(self, host: str, message: object) -> None:
        self.fleet.handle(Received(self.numbers[host], message), now=self.now)  # type: ignore[arg-type]

    def join(self, host: str, count: int = 0, *parents: str, blob: object = BLOB) -> None:
        self.tell(host, Holding(blob, ALL * PIECE, PIECE, (count,), parents))  # type: ignore[arg-type]
        self.run()

    def run(self) -> None:
        for _ in range(10):
            self.now += JOIN_BATCH_S / 5
            self.fleet.handle(Tick(), now=self.now)

    def receives(self, host: str, parent: str, *, blob: object = BLOB) -> None:
        """The host has got its first piece from a parent."""
        self.join(host, 0, parent, blob=blob)
        self.tell(host, Report((Advance(blob, (1,)),)))  # type: ignore[arg-type]

    def complain(self, host: str, source: str = "seed", reason: str = "corrupt") -> None:
        """The host is told of the source, and says that it sent wrong bytes."""
        self.fleet.swarms[BLOB].members[host].told = (source,)
        self.tell(host, Complaint(BLOB, 0, source, reason))  # type: ignore[arg-type]

    def banned(self, host: str = "seed") -> bool:
        return self.fleet.hosts[host].banned


def fleet(*sources: str, proved: bool) -> Control:
    """A seed, `proved` by a child that has left since, and hosts s0, s1, ... that want the blob."""
    control = Control()
    control.open("seed", "10.9.9.9")
    control.join("seed", ALL)
    if proved:
        control.open("child", "10.8.8.8")
        control.receives("child", "seed")
        control.fleet.hosts["seed"].vouchers.clear()
    for number, source in enumerate(sources):
        control.open(f"s{number}", source)
        control.join(f"s{number}")
    return control


MANY = tuple(f"10.{number}.0.1" for number in range(20))


@pytest.mark.parametrize("reason", ["corrupt", "refused", "reset", "protocol", "short"])
@pytest.mark.parametrize("proved", [True, False])
def test_what_has_proved_nothing_bans_no_host_that_has(proved: bool, reason: str) -> None:
    """However many addresses it has; and a host that has not is banned as ever."""
    control = fleet(*MANY, proved=proved)
    for number in range(len(MANY)):
        control.complain(f"s{number}", reason=reason)
    assert control.banned() != proved


@pytest.mark.parametrize(
    "sources, banned",
    [
        (("10.1.0.1", "10.1.0.2", "10.1.0.3"), False),
        (("10.1.0.1", "10.1.1.1"), True),
        (("2001:db8::1", "2001:db8::2:1"), False),
        (("2001:db8::1", "2001:db8:0:1::1"), True),
        (("::ffff:10.1.0.1", "10.1.0.2"), False),
        (("127.0.0.1", "127.0.0.1"), True),
    ],
)
def test_what_has_proved_nothing_has_one_vote_a_network(sources: tuple[str, ...], banned: bool) -> None:
    """On loopback each host speaks for itself."""
    control = fleet(*sources, proved=False)
    for number in range(len(sources)):
        control.complain(f"s{number}")
    assert control.banned() == banned


def test_hosts_that_gave_pieces_have_a_vote_each() -> None:
    """Neighbours in one network, which found a host that had proved itself sending wrong bytes."""
    control = fleet("10.1.0.1", "10.1.0.2", "10.2.0.1", proved=True)
    for number in range(2):
        control.join(f"s{number}", ALL, blob=OTHER)
        control.receives("s2", f"s{number}", blob=OTHER)
        control.tell("s2", Report((Advance(OTHER, (0,)),)))
        control.complain(f"s{number}")
        assert control.banned() == bool(number)


def test_a_host_is_not_proved_by_one_with_its_own_vote() -> None:
    """One process can open several sessions."""
    control = Control()
    for host, source in (("giver", "10.1.0.1"), ("same", "10.1.0.1"), ("other", "10.1.0.2")):
        control.open(host, source)
    control.join("giver")  # it claims nothing, and reads the origin
    for host, gave in (("same", False), ("other", True)):
        control.receives(host, "giver")
        assert control.fleet.hosts["giver"].gave == gave


def test_certified_hosts_of_one_network_have_a_vote_each() -> None:
    control = fleet(proved=False)
    for number in range(2):
        control.open(f"c{number}", "10.1.0.1", certified=True)
        control.join(f"c{number}")
        control.complain(f"c{number}")
    assert control.banned()


@pytest.mark.parametrize(
    "host, network",
    [
        ("192.0.2.77", "192.0.2.0/24"),
        ("::ffff:192.0.2.77", "192.0.2.0/24"),
        ("2001:db8:1:2:3::4", "2001:db8:1:2::/64"),
        ("fe80::1%eth0", "fe80::/64"),
        ("a.name", "a.name"),
        ("", ""),
    ],
)
def test_networks_of_addresses(host: str, network: str) -> None:
    assert network_of(host) == network


@pytest.mark.parametrize("reason", ["refused", "reset", "short", "protocol", "corrupt"])
@pytest.mark.parametrize("gets", [True, False])
def test_hosts_to_which_nothing_comes_from_any_parent_ban_none(gets: bool, reason: str) -> None:
    """A switch stands still, and all below it call each other dead. A host to which other pieces
    come is heard as ever, and so is one that got wrong bytes: these did come."""
    control = Control()
    for seed in ("seed", "other"):
        control.open(seed, "10.9.9.9")
        control.join(seed, ALL)
    for number, source in enumerate(MANY[:4]):
        host = f"s{number}"
        control.open(host, source)
        control.join(host, 1)
        control.complain(host, "other", "stalled")
        control.fleet.swarms[BLOB].edges.detach(0, host)
        if gets:  # of a host that is its parent no more
            control.tell(host, Report((Advance(BLOB, (2,)),)))  # type: ignore[arg-type]
        control.complain(host, reason=reason)
    assert control.banned() == (gets or reason == "corrupt")
