"""Leases that bring nothing go to hosts that wait, and what strangers want in vain costs little."""

from __future__ import annotations

import pytest

from p2pdist.model.digest import Digest, digest_of
from p2pdist.model.errors import UsageError
from p2pdist.model.messages import PROTOCOL_VERSION, Advance, Complaint, Hello, Holding, Holdings, Reject, Report
from p2pdist.model.pieces import PieceLayout
from tracker.core import membership
from tracker.core.events import Command, Described, Received, Send, SessionOpened, Tick
from tracker.core.fleet import Fleet
from tracker.core.member import FROM_ORIGIN
from tracker.core.planning.schedule import JOIN_BATCH_S
from tracker.core.repair.lease_turnover import DEADLINE_MAX_S, DEADLINE_MIN_S, PATIENCE
from tracker.core.repair.remedies import AVOID_S

PIECE, LEASES = 65536, 8
SIZE = 8 * PIECE
REAL = digest_of(b"real")


def invented(number: int) -> Digest:
    return digest_of(b"%d" % number)


class Control:
    """A fleet whose leases are few, and its time."""

    def __init__(self, *hosts: str) -> None:
        self.fleet, self.now = Fleet(-100.0, origin_streams_max=LEASES), 0.0
        self.numbers = {host: number for number, host in enumerate(hosts)}
        for host, number in self.numbers.items():
            self.do(SessionOpened(number, Hello(PROTOCOL_VERSION, host, f"{host}:1")))

    def do(self, event: object) -> list[Command]:
        return self.fleet.handle(event, now=self.now)  # type: ignore[arg-type]

    def want(self, host: str, *blobs: Digest, count: int = 0, reads: bool = False) -> list[Command]:
        parents = ("",) if reads else ()
        held = tuple(Holding(blob, SIZE, PIECE, (count,), parents) for blob in blobs)
        return self.do(Received(self.numbers[host], Holdings(held)))

    def report(self, host: str, count: int, *blobs: Digest) -> None:
        self.do(Received(self.numbers[host], Report(tuple(Advance(blob, (count,)) for blob in blobs))))

    def run(self, seconds: float) -> None:
        end = self.now + seconds
        while self.now < end:
            self.now += 0.05
            self.do(Tick())

    def reads(self, host: str, blob: Digest) -> bool:
        return host in self.fleet.swarms[blob].readers()

    def describe(self, *blobs: Digest) -> None:
        self.do(Described(tuple((blob, PieceLayout(SIZE, PIECE)) for blob in blobs)))


@pytest.mark.parametrize("named", [True, False])
@pytest.mark.parametrize("reads", [True, False], ids=["brought along", "granted"])
def test_one_session_does_not_keep_the_leases_from_others(named: bool, reads: bool) -> None:
    """Neither where a manifest names the blob that others want, nor where none does."""
    control = Control("hoarder", "h1")
    control.want("hoarder", *map(invented, range(100)), reads=reads)
    control.run(3.0)
    assert control.fleet.leases() >= LEASES
    if named:
        control.describe(REAL)
    control.want("h1", REAL)
    control.run(2 * JOIN_BATCH_S + 0.25)
    assert control.reads("h1", REAL)


def test_many_sessions_with_one_lease_each_do_not_either() -> None:
    control = Control(*(f"s{n}" for n in range(3 * LEASES)), "h1")
    for number in range(3 * LEASES):
        control.want(f"s{number}", invented(number))
    control.run(3.0)
    control.want("h1", REAL)
    control.run(control.fleet._turnover.deadline_s(0.25) + 0.5)
    assert control.reads("h1", REAL)


def test_progress_of_which_only_its_holders_speak_keeps_half_of_the_leases() -> None:
    """A host may say what it likes of a blob that no manifest names."""
    control = Control("hoarder", "h1")
    blobs = [invented(number) for number in range(LEASES)]
    control.want("hoarder", *blobs)
    control.run(JOIN_BATCH_S)
    control.describe(REAL)
    for count in range(1, 7):
        control.report("hoarder", count, *blobs)
        control.run(0.3)
    control.want("h1", REAL)
    control.run(2 * JOIN_BATCH_S + 0.25)
    assert control.reads("h1", REAL)
    assert sum(control.reads("hoarder", blob) for blob in blobs) >= LEASES // 2


def test_readers_with_progress_keep_their_leases_where_manifests_name_their_blobs() -> None:
    control = Control("reader", "h1")
    blobs = [invented(number) for number in range(LEASES)]
    control.describe(REAL, *blobs)
    control.want("reader", *blobs)
    control.run(JOIN_BATCH_S)
    control.report("reader", 1, *blobs)
    control.want("h1", REAL)
    control.run(3.0)
    assert not control.reads("h1", REAL) and all(control.reads("reader", blob) for blob in blobs)
    control.report("reader", 8, blobs[0])
    control.run(0.3)
    assert control.reads("h1", REAL), "the lease that is free goes to the one that waits, at once"


def test_a_holder_that_reads_nothing_hands_its_lease_on_within_the_swarm() -> None:
    control = Control("mute", "h1", "other")
    control.want("other", invented(1))
    control.run(0.2)
    control.report("other", 1, invented(1))  # shows how long a first piece takes
    control.want("mute", REAL)
    control.run(PATIENCE * control.fleet._turnover.deadline_s(0.25) + 0.5)
    assert control.reads("mute", REAL), "nobody else wants it"
    control.want("h1", REAL)
    control.run(0.5)
    assert control.reads("h1", REAL)


def test_a_stripe_that_its_holder_does_not_read_goes_to_a_host_with_another_one() -> None:
    """It waits far below the holder, among hosts that all want the blob and read nothing: the lease
    went from one of them to the next."""
    idle = [f"s{number}" for number in range(20)]
    control, size = Control(*idle, "good"), 128 * PIECE
    for host in (*idle, "good"):
        control.do(Received(control.numbers[host], Holding(REAL, size, PIECE, (0, 0))))
        control.run(0.1)
    swarm = control.fleet.swarms[REAL]
    assert (swarm.stripes, "good" in swarm.readers()) == (2, False)
    (holder,) = swarm.edges.roots[1]
    swarm.edges.set_now(control.now)
    swarm.edges.detach(1, holder)
    swarm.edges.attach(1, "good", FROM_ORIGIN)
    control.do(Received(control.numbers["good"], Report((Advance(REAL, (0, 64)),))))
    control.run(DEADLINE_MIN_S + 1.5)
    assert "good" in swarm.edges.roots[0]


def test_a_starved_host_that_reads_nothing_hands_its_lease_to_nobody() -> None:
    """It has the lease besides the root of its site, which goes on: a third host read the stripe as
    a second root."""
    control, size = Control("root", "good", "starved"), 128 * PIECE
    for host in ("root", "good", "starved"):
        control.do(Received(control.numbers[host], Holding(REAL, size, PIECE, (0, 0))))
    control.run(0.5)
    swarm = control.fleet.swarms[REAL]
    swarm.edges.set_now(control.now)
    for stripe, reader in enumerate(("root", "good")):
        for name in (*swarm.edges.roots[stripe], reader):
            swarm.edges.detach(stripe, name)
        swarm.edges.attach(stripe, reader, FROM_ORIGIN)
    swarm.edges.detach(0, "starved")
    swarm.edges.attach(0, "starved", FROM_ORIGIN)
    swarm.edges.rescue(0, "starved")
    for count in range(4, 33, 4):
        control.do(Received(control.numbers["root"], Report((Advance(REAL, (count, 0)),))))
        control.do(Received(control.numbers["good"], Report((Advance(REAL, (0, count)),))))
        control.run(1.0)
        assert "good" not in swarm.edges.roots[0]
    assert list(swarm.edges.roots[0]) == ["root"]


def test_an_origin_that_is_slow_for_all_moves_no_lease_soon() -> None:
    control = Control("h1", "h2")
    control.want("h1", REAL)
    control.want("h2", REAL)
    control.run(DEADLINE_MAX_S - 1)
    assert sum(control.reads(host, REAL) for host in ("h1", "h2")) == 1
    assert not any("loses the lease" in text for _, text in control.fleet.swarms[REAL].story)


@pytest.mark.parametrize("reason", ["refused", "reset", "short", "protocol", "missing"])
def test_a_holder_without_a_piece_that_fails_its_child_loses_the_lease(reason: str) -> None:
    control = Control("mute", "h1")
    control.want("mute", REAL)
    control.run(0.2)
    control.want("h1", REAL)
    control.run(0.2)
    assert control.fleet.swarms[REAL].members["h1"].parents == ["mute"]
    control.do(Received(control.numbers["h1"], Complaint(REAL, 0, "mute", reason)))  # type: ignore[arg-type]
    control.run(0.2)
    assert control.reads("h1", REAL)


def test_a_host_founds_a_bounded_number_of_swarms(monkeypatch: pytest.MonkeyPatch) -> None:
    control = Control("h1", "h2")
    monkeypatch.setattr(membership, "VAIN_MAX", 5)
    monkeypatch.setattr(membership, "FOUNDED_MAX", 9)
    answers = control.want("h1", *map(invented, range(7)))
    rejected = [each.message for each in answers if isinstance(each, Send) and isinstance(each.message, Reject)]
    assert [each.problem["type"].rpartition(":")[2] for each in rejected] == [UsageError("").slug] * 2
    assert len(control.fleet.swarms) == 5
    control.report("h1", 1, invented(0))
    control.want("h1", invented(7))
    assert len(control.fleet.swarms) == 6, "what it has got something of does not count"
    control.want("h1", *map(invented, range(10, 20)), count=8)
    assert len(control.fleet.swarms) == 9
    control.want("h2", *map(invented, range(5)))
    assert len(control.fleet.swarms[invented(0)].members) == 2, "a swarm that is there may be joined"
    control.describe(REAL)
    control.want("h1", REAL)
    assert REAL in control.fleet.swarms


def test_blobs_that_no_manifest_names_leave_room_for_those_of_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    control = Control("stranger", "h1")
    monkeypatch.setattr(membership, "SWARMS_MAX", 10)
    control.want("stranger", *map(invented, range(20)), count=8)
    assert len(control.fleet.swarms) == 5
    control.describe(REAL)
    control.want("h1", REAL)
    assert REAL in control.fleet.swarms


def test_swarms_that_wait_in_vain_are_not_planned_again() -> None:
    """Or the work of the tracker would grow with what strangers want."""
    control = Control("hoarder")
    control.want("hoarder", *map(invented, range(100)))
    control.run(10.0)
    before = sum(control.fleet.schedule.replans.values())
    control.run(5.0)
    assert sum(control.fleet.schedule.replans.values()) - before < 200
    rotations = AVOID_S // control.fleet._turnover.deadline_s(0.25) + 2
    assert len(control.fleet.schedule.restless) <= rotations * LEASES
