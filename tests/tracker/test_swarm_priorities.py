"""Swarms of preseeds and swarms that a job waits for: which is which, and how they share the
origin's leases."""

from __future__ import annotations

import pytest

from p2pdist.model.digest import Digest, digest_of
from p2pdist.model.messages import PROTOCOL_VERSION, Advance, Hello, Holding, Left, Priority, Report
from p2pdist.model.pieces import PieceLayout
from tracker.core.events import Received, SessionClosed, SessionOpened, Tick
from tracker.core.fleet import RETRY_S, Fleet
from tracker.core.member import FROM_ORIGIN
from tracker.core.origin.leases import Leases
from tracker.core.planning.schedule import JOIN_BATCH_S
from tracker.core.repair.reputation import RECOVERY_S
from tracker.core.swarm import Swarm

PIECE = 65536
PIECES = 8


class Control:
    """A fleet, its sessions, and the time kept. Blobs have 8 pieces in one stripe."""

    def __init__(self, **more: int) -> None:
        self.fleet = Fleet(-100.0, **more)
        self.sessions: dict[str, int] = {}
        self.now = 0.0

    def wants(self, host: str, name: str, priority: Priority, count: int = 0) -> None:
        if host not in self.sessions:
            self.sessions[host] = len(self.sessions)
            hello = Hello(PROTOCOL_VERSION, host, f"{host}:1")
            self.fleet.handle(SessionOpened(self.sessions[host], hello), now=self.now)
        blob = digest_of(name.encode())
        holding = Holding(blob, PIECES * PIECE, PIECE, (count,), (), priority)
        self.fleet.handle(Received(self.sessions[host], holding), now=self.now)

    def has(self, host: str, name: str, count: int = PIECES) -> None:
        report = Report((Advance(digest_of(name.encode()), (count,)),))
        self.fleet.handle(Received(self.sessions[host], report), now=self.now)

    def go(self, seconds: float = JOIN_BATCH_S) -> None:
        self.now += seconds
        self.fleet.handle(Tick(), now=self.now)

    def swarm(self, name: str) -> Swarm:
        return self.fleet.swarms[digest_of(name.encode())]

    def leases(self, *names: str) -> int:
        return sum(self.swarm(name).leases() for name in names)


# -- which is which


def test_a_swarm_is_as_urgent_as_its_most_urgent_receiver() -> None:
    control = Control()
    for host in ("h1", "h2", "h3"):
        control.wants(host, "x", "preseed")
    assert control.swarm("x").priority == "preseed"
    control.wants("h2", "x", "start")
    assert control.swarm("x").priority == "start"
    control.has("h2", "x", 4)
    assert control.swarm("x").priority == "start"
    control.has("h2", "x")
    assert control.swarm("x").priority == "preseed", "the one that was waited for is complete"


def test_an_older_agent_says_nothing_of_priorities_and_is_waited_for() -> None:
    control = Control()
    control.wants("h1", "x", "preseed")
    control.fleet.handle(SessionOpened(9, Hello(PROTOCOL_VERSION, "old", "old:1")), now=0.0)
    control.fleet.handle(Received(9, Holding(digest_of(b"x"), PIECES * PIECE, PIECE, (0,))), now=0.0)
    assert control.swarm("x").priority == "start"


def test_who_is_absent_or_gone_waits_for_nothing() -> None:
    control = Control()
    control.wants("h1", "x", "preseed")
    control.wants("h2", "x", "start")
    control.fleet.handle(SessionClosed(control.sessions.pop("h2")), now=0.0)
    assert control.swarm("x").priority == "preseed"
    control.sessions["h2"] = 7
    control.fleet.handle(SessionOpened(7, Hello(PROTOCOL_VERSION, "h2", "h2:1")), now=0.0)
    control.wants("h2", "x", "start", 3)
    assert control.swarm("x").priority == "start"
    control.fleet.handle(Received(7, Left(digest_of(b"x"))), now=0.0)
    assert control.swarm("x").priority == "preseed"


def test_a_host_that_lost_its_store_says_again_how_urgent_it_is() -> None:
    control = Control()
    control.wants("h1", "x", "start")
    control.has("h1", "x")
    control.wants("h1", "x", "preseed", 2)
    assert control.swarm("x").priority == "preseed"
    control.wants("h1", "x", "start", 2)
    assert control.swarm("x").priority == "start"
    control.wants("h1", "x", "start", PIECES)
    assert control.swarm("x").priority == "preseed"


# -- leases


def test_preseeds_hold_half_of_the_leases_and_starts_find_the_others() -> None:
    control = Control(origin_streams_max=6)
    for number in range(8):
        control.wants(f"p{number}", f"preseed {number}", "preseed")
    control.go()
    preseeds = [f"preseed {number}" for number in range(8)]
    assert control.leases(*preseeds) == 3
    for number in range(4):
        control.wants(f"s{number}", f"start {number}", "start")
    control.go()
    starts = [f"start {number}" for number in range(4)]
    assert (control.leases(*preseeds), control.leases(*starts)) == (3, 3)
    control.has("p0", "preseed 0")
    control.go(RETRY_S)
    control.go(RETRY_S)
    assert control.leases(*starts) + control.leases(*preseeds) == control.fleet.leases() == 6


@pytest.mark.parametrize("streams_max", [1, 2, 3])
def test_preseeds_always_find_a_lease_when_there_is_one(streams_max: int) -> None:
    control = Control(origin_streams_max=streams_max)
    for number in range(3):
        control.wants(f"p{number}", f"preseed {number}", "preseed")
    control.go()
    assert control.fleet.leases() == 1


def test_starts_alone_may_hold_all() -> None:
    control = Control(origin_streams_max=4)
    for number in range(6):
        control.wants(f"s{number}", f"start {number}", "start")
    control.go()
    assert control.fleet.leases() == 4


def test_a_preseed_that_becomes_a_start_needs_no_share_of_preseeds() -> None:
    """Its lease counts among those of starts from then on, and another preseed gets one."""
    control = Control(origin_streams_max=4)
    for number in range(4):
        control.wants(f"p{number}", f"preseed {number}", "preseed")
    control.go()
    assert control.fleet.leases() == 2
    without = next(number for number in range(4) if not control.leases(f"preseed {number}"))
    control.wants(f"p{without}", f"preseed {without}", "start")
    control.go()
    assert control.leases(f"preseed {without}") == 1
    holder = next(number for number in range(4) if number != without and control.leases(f"preseed {number}"))
    control.wants(f"p{holder}", f"preseed {holder}", "start")
    control.go(RETRY_S)
    control.go(RETRY_S)
    assert control.fleet.leases() == 4


def test_leases_that_agents_brought_along_count() -> None:
    """More may be out than there should be, as after a restart; none is granted then."""
    swarms = []
    for number in range(3):
        swarm = Swarm(Digest(f"sha256:{number:064}"), PieceLayout(PIECES * PIECE, PIECE))
        swarm.add("h", [0], slots=2, now=0.0)
        if number < 2:
            swarm.edges.attach(0, "h", FROM_ORIGIN)
        swarms.append(swarm)
    leases = Leases(swarms, 2)
    assert [leases.free(swarm) for swarm in swarms] == [0, 0, 0]
    swarms[2].set_priority("h", "start")
    assert leases.free(swarms[2]) == 0
    leases.granted(swarms[0], -1)
    assert leases.free(swarms[2]) == 1
    leases.granted(swarms[2], 1)
    assert leases.free(swarms[2]) == 0


# -- no host is called slow for letting others go first


def slow_uplink(priority: Priority, other: Priority, *, gone_for_s: float = 0.0) -> int:
    """The upload slots of a host whose children lag in a swarm, while another host pulls something
    else; or has been done with it for a while."""
    control, hosts, pieces, interval_s = Control(), [f"h{number}" for number in range(12)], 1024, 0.25
    blob = digest_of(b"x")
    counts = {host: [0, 0] for host in hosts}
    for host in hosts:
        control.wants(host, "small", "preseed", PIECES)
        holding = Holding(blob, pieces * PIECE, PIECE, (0, 0), (None, None), priority)
        control.fleet.handle(Received(control.sessions[host], holding), now=control.now)
    control.wants("z", "y", other)
    control.go()
    if gone_for_s:
        control.has("z", "y")
        control.go(gone_for_s)
    swarm = control.fleet.swarms[blob]
    slow = next(each.host for each in swarm.members.values() if each.parents[0] and each.children[0])
    below = [host for host in hosts if host != slow and swarm.edges.receives_through(0, host, slow)]
    for step in range(11):
        for host in hosts:
            for stripe in range(2):
                counts[host][stripe] += 1 if step > 3 and stripe == 0 and host in below else 10
            report = Report((Advance(blob, tuple(counts[host])),))
            control.fleet.handle(Received(control.sessions[host], report), now=control.now)
        for _ in range(5):
            control.go(interval_s / 5)
    return swarm.members[slow].slots


def test_preseeds_are_not_judged_while_a_start_is_under_way() -> None:
    """Hosts give way to it, and so do those below them. Nor right after it, when they have not yet
    made that up."""
    assert slow_uplink("preseed", "start") == 2
    assert slow_uplink("preseed", "start", gone_for_s=RECOVERY_S / 10) == 2


def test_preseeds_are_judged_when_there_is_no_host_to_give_way_to() -> None:
    assert slow_uplink("preseed", "preseed") == 0
    assert slow_uplink("preseed", "start", gone_for_s=2 * RECOVERY_S) == 0


def test_starts_are_judged_at_any_time() -> None:
    assert slow_uplink("start", "start") == 0
