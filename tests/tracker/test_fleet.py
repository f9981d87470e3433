"""The tracker's core: sessions, swarms, leases, complaints, and what a restart finds again."""

from typing import Any

import msgspec
import pytest

from p2pdist.model.digest import Digest, digest_of
from p2pdist.model.messages import (
    PROTOCOL_VERSION,
    Advance,
    Assign,
    Complaint,
    FromAgent,
    Hello,
    Holding,
    Holdings,
    Left,
    Reject,
    Report,
    Welcome,
)
from p2pdist.model.pieces import PieceLayout
from p2pdist.model.plan import ORIGIN, StripePlan
from tracker.core import fleet as module
from tracker.core.events import (
    Command,
    Described,
    Drop,
    LookAtOrigin,
    OriginSeen,
    Received,
    Send,
    SessionClosed,
    SessionOpened,
    Tick,
)
from tracker.core.fleet import RETRY_S, Fleet
from tracker.core.host import PENALTY_S, VOUCHERS_MAX
from tracker.core.monitor.presence import ABSENCE_S, START_GRACE_S
from tracker.core.planning.schedule import JOIN_BATCH_S, SMALL_BATCH_S
from tracker.core.repair.remedies import AVOID_S, STUCK_COMPLAINTS
from tracker.core.swarm import LEASE_MOVE_S

BLOB = digest_of(b"blob")
OTHER = digest_of(b"other blob")
PIECE = 65536


class Control:
    """A fleet, its sessions by host name, and the time kept. The blob has 8 pieces in one
    stripe."""

    def __init__(self, started_at: float = -100.0, **more: Any) -> None:
        self.fleet = Fleet(started_at, **more)
        self.sessions: dict[str, int] = {}
        self.now = 0.0
        self.parents: dict[str, str] = {}

    def open(self, *hosts: str, address: str = "") -> list[Command]:
        out: list[Command] = []
        for host in hosts:
            self.sessions[host] = len(self.sessions) + 1 + int(1000 * self.now)
            hello = Hello(PROTOCOL_VERSION, host, address or f"{host}:1")
            out += self._take(self.fleet.handle(SessionOpened(self.sessions[host], hello), now=self.now))
        return out

    def close(self, host: str) -> list[Command]:
        return self._take(self.fleet.handle(SessionClosed(self.sessions[host]), now=self.now))

    def say(self, host: str, message: FromAgent) -> list[Command]:
        return self._take(self.fleet.handle(Received(self.sessions[host], message), now=self.now))

    def join(self, host: str, count: int = 0, parent: str | None = None, blob: Digest = BLOB) -> list[Command]:
        return self.say(host, Holding(blob, 8 * PIECE, PIECE, (count,), (parent,)))

    def report(self, host: str, count: int) -> list[Command]:
        return self.say(host, Report((Advance(BLOB, (count,)),)))

    def complain(self, host: str, source: str, reason: str) -> list[Command]:
        return self.say(host, Complaint(BLOB, 0, source, reason))  # type: ignore[arg-type]

    def tick(self, after_s: float) -> list[Command]:
        self.now += after_s
        return self._take(self.fleet.handle(Tick(), now=self.now))

    def _take(self, commands: list[Command]) -> list[Command]:
        """Remember which host was told which parent."""
        names = {session: host for host, session in self.sessions.items()}
        for command in commands:
            if isinstance(command, Send) and isinstance(command.message, Assign):
                for plan in command.message.plan.stripes:
                    assert plan.parent is not None
                    self.parents[names[command.session]] = plan.parent.host
        return commands

    def parent(self, host: str) -> str | None:
        return self.fleet.swarms[BLOB].members[host].parents[0]


def chain(*hosts: str, **more: int) -> Control:
    """Hosts of which each receives from the one before, and the first from the origin, as they said
    when they came."""
    control = Control(**more)
    control.open(*hosts)
    for above, host in zip(("", *hosts), hosts, strict=False):
        control.join(host, 0, above)
    control.tick(JOIN_BATCH_S)
    assert [control.parent(host) for host in hosts] == ["", *hosts[:-1]]
    return control


def test_a_session_is_told_the_origin_without_its_credentials() -> None:
    """Any process that reaches the tracker may open a session."""
    control = Control(origin="https://deploy:S3cr3t@storage:9/pk?sig=TOKEN")
    assert Welcome(PROTOCOL_VERSION, control.fleet.report_interval_s, "https://storage:9/pk") in [
        each.message for each in control.open("h1") if isinstance(each, Send)
    ]


def test_the_first_host_reads_the_origin_and_the_second_receives_from_it() -> None:
    control = Control()
    assert control.open("h1", "h2") == [
        Send(1, Welcome(PROTOCOL_VERSION, 0.25)),
        Send(2, Welcome(PROTOCOL_VERSION, 0.25)),
    ]
    assert control.join("h1") == []
    (send,) = control.tick(JOIN_BATCH_S)
    assert isinstance(send, Send) and isinstance(send.message, Assign)
    assert send.message.plan.stripes == (StripePlan(0, ORIGIN, ()),)
    control.join("h2")
    control.tick(JOIN_BATCH_S)
    assert control.parents == {"h1": "", "h2": "h1"}


def test_joins_of_a_moment_are_planned_together() -> None:
    """One plan for all, and nothing before the batch is due."""
    control = Control()
    control.open("h1", "h2", "h3")
    assert [control.join(host) for host in ("h1", "h2", "h3")] == [[], [], []]
    assert control.tick(SMALL_BATCH_S / 2) == []
    assert len(control.tick(SMALL_BATCH_S / 2)) == 3
    assert sorted(control.parents.values()).count("") == 1


def test_a_whole_copy_spares_the_origin() -> None:
    control = Control()
    control.open("h1", "h2")
    control.join("h1", 8)
    control.join("h2")
    control.tick(JOIN_BATCH_S)
    assert control.parents == {"h2": "h1"}
    assert control.fleet.leases() == 0


def test_reports_end_edges_and_make_seeds() -> None:
    control = chain("h1", "h2")
    control.report("h1", 8)
    assert control.fleet.leases() == 0
    assert control.fleet.swarms[BLOB].members["h1"].seed
    control.report("h2", 8)
    assert control.fleet.swarms[BLOB].receivers == 0
    assert control.fleet.swarms[BLOB].members["h1"].load == 0


def test_a_broken_parent_is_replaced_at_once() -> None:
    control = chain("h1", "h2", "h3")
    control.complain("h3", "h2", "reset")
    assert control.parents["h3"] == "h1"


def test_a_host_that_is_refused_and_whose_session_is_gone_is_dead() -> None:
    control = chain("h1", "h2", "h3")
    control.close("h2")
    control.complain("h3", "h2", "refused")
    assert "h2" not in control.fleet.swarms[BLOB].members
    assert control.parents["h3"] == "h1"


def test_thousands_of_hosts_that_are_lost_at_once_go_some_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """A switch takes them along, and each is in the swarms of all that it holds: to take them out
    in one tick would keep the tracker from all others for seconds."""
    monkeypatch.setattr(module, "LEAVES_MAX", 8)
    control, blobs = Control(), [digest_of(b"%d" % number) for number in range(3)]
    names = [f"h{number}" for number in range(10)]
    control.open(*names)
    for name in names:
        for blob in blobs:
            control.join(name, 8, blob=blob)
    for name in names:
        control.close(name)
    control.tick(ABSENCE_S + 0.1)
    left = [sum(len(swarm.members) for swarm in control.fleet.swarms.values())]
    while left[-1]:
        control.tick(0.05)
        left.append(sum(len(swarm.members) for swarm in control.fleet.swarms.values()))
    assert left == [22, 14, 6, 0]
    control.tick(0.05)
    assert not control.fleet.hosts and len(control.fleet.lost) == 10


def test_an_absent_host_keeps_its_place_for_a_while() -> None:
    """Its streams may well be running. It gets no new children, and comes back where it was."""
    control = chain("h1", "h2", "h3")
    control.close("h2")
    control.open("h4")
    control.join("h4")
    control.tick(JOIN_BATCH_S)
    assert control.parents["h4"] != "h2"
    control.tick(ABSENCE_S - 0.5)
    assert control.parent("h3") == "h2"
    control.open("h2")
    control.join("h2", 1, "h1")
    control.tick(ABSENCE_S)
    assert (control.parent("h2"), control.parent("h3")) == ("h1", "h2")


def test_an_absent_host_is_forgotten_and_its_children_move() -> None:
    control = chain("h1", "h2", "h3")
    control.close("h2")
    control.tick(ABSENCE_S)
    assert "h2" not in control.fleet.hosts
    assert control.parents["h3"] == "h1"


def test_a_host_that_comes_back_is_absent_until_it_has_said_what_it_holds() -> None:
    """Between its greeting and its holdings it gets no parents: it may be receiving already."""
    control = Control(started_at=0.0)
    control.open("h2")
    control.join("h2", 3, "h1")
    commands = control.open("h1")
    assert [type(command.message) for command in commands if isinstance(command, Send)] == [Welcome]
    control.tick(JOIN_BATCH_S)
    assert "h1" not in control.parents
    control.join("h1", 5, "")
    control.tick(JOIN_BATCH_S)
    assert (control.parent("h1"), control.parent("h2")) == ("", "h1")


def test_what_a_host_no_longer_holds_is_taken_from_it() -> None:
    """It came back without the blob: after a while it is no member any more, though its session is
    open."""
    control = chain("h1", "h2")
    control.close("h2")
    control.open("h2")
    control.tick(ABSENCE_S)
    assert "h2" in control.fleet.hosts
    assert "h2" not in control.fleet.swarms[BLOB].members


def test_a_host_that_restarted_is_told_its_parent_again() -> None:
    """It holds pieces and receives nothing."""
    control = chain("h1", "h2")
    control.close("h2")
    control.open("h2")
    control.parents.clear()
    control.join("h2", 2, None)
    control.tick(JOIN_BATCH_S)
    assert control.parents == {"h2": "h1"}


def test_children_learn_the_new_address_of_their_parent() -> None:
    control = chain("h1", "h2", "h3")
    control.close("h2")
    control.open("h2", address="elsewhere:9")
    control.join("h2", 1, "h1")
    sends = [each for each in control.tick(JOIN_BATCH_S) if isinstance(each, Send)]
    (to_h3,) = [each for each in sends if each.session == control.sessions["h3"]]
    assert isinstance(to_h3.message, Assign)
    (plan,) = to_h3.message.plan.stripes
    assert plan.parent is not None and plan.parent.address == "elsewhere:9"


# -- a new tracker


def test_a_new_tracker_takes_the_trees_over_as_they_are() -> None:
    """In whatever order the hosts come back; no host is told to change, and no lease is granted
    anew."""
    edges = {"h1": "", "h2": "h1", "h3": "h2", "h4": "h2"}
    for order in (("h1", "h2", "h3", "h4"), ("h4", "h3", "h2", "h1"), ("h3", "h1", "h4", "h2")):
        control = Control(started_at=0.0)
        for host in order:
            control.open(host)
            control.join(host, 5, edges[host])
            control.tick(0.3)
        control.tick(START_GRACE_S)
        assert {host: control.parent(host) for host in order} == edges
        assert all(edges[host] == parent for host, parent in control.parents.items())
        assert control.fleet.leases() == 1


def test_what_a_host_had_before_it_speaks_of_itself_is_no_rate() -> None:
    """Others name it to a new tracker as their parent, and what it holds came long ago: else each
    restart would show a rate that no host can keep up with."""
    control = Control()
    control.open("h1", "h2", "h3")
    control.join("h2", 5, "h1")
    control.tick(0.2)
    control.join("h1", 6, "h3")
    swarm = control.fleet.swarms[BLOB]
    assert swarm.members["h1"].counts == (6,)
    assert swarm.typical_rate == 0
    control.tick(0.5)
    control.report("h1", 7)
    assert swarm.typical_rate == pytest.approx(2.0)


def test_two_hosts_that_say_they_receive_from_each_other_make_no_cycle() -> None:
    """Without a tracker their alternates may have crossed. One keeps its stream, the other gets a
    parent that leads up."""
    control = Control(started_at=0.0)
    control.open("h1", "h2", "h3")
    control.join("h3", 6, "")
    control.join("h1", 2, "h2")
    control.join("h2", 2, "h1")
    control.tick(JOIN_BATCH_S)
    swarm = control.fleet.swarms[BLOB]
    assert all(swarm.edges.rooted(0, host) for host in ("h1", "h2", "h3"))
    assert swarm.edges.depth(0, "h1") <= 3 and swarm.edges.depth(0, "h2") <= 3


def test_a_longer_ring_of_claims_makes_no_cycle_either() -> None:
    control = Control(started_at=0.0)
    hosts = [f"h{number}" for number in range(6)]
    control.open("root", *hosts)
    control.join("root", 7, "")
    for number, host in enumerate(hosts):
        control.join(host, 1, hosts[number - 1])
    control.tick(JOIN_BATCH_S)
    swarm = control.fleet.swarms[BLOB]
    assert all(swarm.edges.rooted(0, host) for host in hosts)


def test_no_host_receives_from_itself() -> None:
    control = Control(started_at=0.0)
    control.open("h1")
    (send,) = control.join("h1", 1, "h1")
    assert isinstance(send, Send) and isinstance(send.message, Reject)


def test_a_swarm_that_was_under_way_gets_no_lease_at_first() -> None:
    """Its root may be on its way back; it is given up after START_GRACE_S. So is the parent
    that a host says it receives from."""
    control = Control(started_at=0.0)
    control.open("h1", "h2")
    control.join("h1", 3, None)
    control.join("h2", 2, "h0")
    control.tick(START_GRACE_S - 0.1)
    assert control.fleet.leases() == 0
    assert control.parent("h2") == "h0"
    control.tick(0.1)
    control.tick(RETRY_S)
    assert control.parents == {"h1": "", "h2": "h1"}


def test_a_new_swarm_gets_a_lease_at_once_from_a_new_tracker() -> None:
    control = Control(started_at=0.0)
    control.open("h1")
    control.join("h1")
    control.tick(JOIN_BATCH_S)
    assert control.parents["h1"] == ""


def test_of_two_readers_the_one_with_more_goes_on() -> None:
    """A newcomer spoke to the new tracker before the old root did."""
    control = Control(started_at=0.0)
    control.open("new", "root")
    control.join("new")
    control.tick(JOIN_BATCH_S)
    control.join("root", 5, "")
    control.tick(JOIN_BATCH_S)
    assert (control.parent("root"), control.parents["new"]) == ("", "root")
    assert control.fleet.leases() == 1


def test_a_reader_with_less_is_told_to_receive_from_the_other() -> None:
    control = chain("h1", "h2")
    control.report("h1", 6)
    control.open("h3")
    control.join("h3", 2, "")
    control.tick(JOIN_BATCH_S)
    assert control.fleet.leases() == 1
    assert control.parents["h3"] in ("h1", "h2")


def test_once_somebody_has_it_all_no_host_reads_the_origin() -> None:
    control = chain("h1", "h2")
    control.open("h3")
    control.join("h3", 8)
    control.tick(JOIN_BATCH_S)
    assert control.fleet.leases() == 0
    assert control.parents["h1"] == "h3"


def test_an_unknown_parent_stands_in_as_absent() -> None:
    """Its child is told nothing of it before it has said where it is."""
    control = Control(started_at=0.0)
    control.open("h2")
    control.join("h2", 1, "h1")
    control.tick(JOIN_BATCH_S)
    assert control.parent("h2") == "h1"
    assert "h2" not in control.parents
    assert not control.fleet.swarms[BLOB].members["h1"].present


# -- leases


def test_leases_of_all_swarms_stay_within_the_cap() -> None:
    control = Control(origin_streams_max=1)
    control.open("h1", "h2")
    control.join("h1")
    control.join("h2", blob=OTHER)
    control.tick(JOIN_BATCH_S)
    assert control.fleet.leases() == 1
    control.report("h1", 8)
    control.tick(RETRY_S)
    control.tick(RETRY_S)
    assert control.fleet.leases() == 1
    assert control.parents == {"h1": "", "h2": ""}


def test_a_lost_lease_is_granted_again_though_the_others_are_out() -> None:
    """With a cap of just as many leases as are in use, the one that became free can be used."""
    control = chain("h1", "h2", origin_streams_max=1)
    control.say("h1", Left(BLOB))
    control.tick(RETRY_S)
    assert control.parents["h2"] == ""


def test_a_lease_whose_holder_cannot_read_the_origin_moves_on() -> None:
    """To the child with the most pieces; but not again at once, for the origin itself may be
    away."""
    control = chain("h1", "h2", "h3")
    control.report("h2", 1)
    control.complain("h1", "", "unavailable")
    assert control.parent("h2") == ""
    assert control.fleet.leases() == 1
    control.complain("h2", "", "unavailable")
    assert control.parent("h2") == ""
    control.tick(LEASE_MOVE_S + 0.01)
    control.complain("h2", "", "unavailable")
    assert control.parent("h2") != ""


def test_the_only_reader_keeps_its_lease() -> None:
    control = Control()
    control.open("h1")
    control.join("h1")
    control.tick(JOIN_BATCH_S)
    control.complain("h1", "", "unavailable")
    assert control.parent("h1") == ""


def test_two_hosts_that_met_wrong_content_at_the_origin_end_the_swarm() -> None:
    """The first loses the lease to a child, which sees the same, as the tracker does: all that
    still want the blob are told, seeds are not."""
    control = chain("h1", "h2", "h3")
    control.complain("h1", "", "corrupt")
    assert control.parents["h2"] == ""
    assert any(isinstance(each, LookAtOrigin) for each in control.complain("h2", "", "corrupt"))
    commands = control.fleet.handle(OriginSeen(BLOB, "corrupt"), now=control.now)
    rejects = [each for each in commands if isinstance(each, Send) and isinstance(each.message, Reject)]
    assert sorted(each.session for each in rejects) == sorted(control.sessions.values())
    assert all(each.message.blob == BLOB and "corrupt" in each.message.problem["type"] for each in rejects)  # type: ignore[union-attr]


# -- complaints


def test_a_starved_parent_is_not_penalised() -> None:
    """It has no more than its child: the fault is further up, and moving the child would help
    nobody."""
    control = chain("h1", "h2", "h3")
    control.report("h2", 2)
    control.report("h3", 2)
    assert control.complain("h3", "h2", "stalled") == []
    assert control.parent("h3") == "h2"


def test_a_parent_that_has_more_and_gives_nothing_is_left() -> None:
    control = chain("h1", "h2", "h3")
    control.report("h1", 5)
    control.report("h2", 4)
    control.complain("h3", "h2", "stalled")
    assert control.parents["h3"] == "h1"


def test_a_large_piece_may_be_under_way_when_its_receiver_complains() -> None:
    """Its parent had nothing itself until now, and has one piece for its child. The same child
    complains with right once the piece has had its time."""
    control = Control()
    control.open("h1", "h2", "h3")
    large = 16 << 20
    for above, host in (("", "h1"), ("h1", "h2"), ("h2", "h3")):
        control.say(host, Holding(BLOB, 8 * large, large, (0,), (above,)))
    control.tick(JOIN_BATCH_S)

    def go_on(seconds: int, *counts: int) -> None:
        for _ in range(4 * seconds):
            control.tick(0.25)
            for host, count in zip(("h1", "h2", "h3"), counts, strict=True):
                control.report(host, count)

    go_on(5, 1, 0, 0)
    go_on(1, 1, 1, 0)
    control.complain("h3", "h2", "stalled")
    assert control.parent("h3") == "h2"
    go_on(10, 1, 1, 0)
    control.complain("h3", "h2", "stalled")
    assert control.parent("h3") == "h1"


def test_a_lease_holder_that_gives_nothing_loses_the_lease() -> None:
    control = chain("h1", "h2", "h3")
    control.report("h1", 5)
    for _ in range(STUCK_COMPLAINTS):
        assert control.parent("h2") == "h1"
        control.complain("h2", "h1", "stalled")
    assert control.parent("h2") == ""


def test_a_lease_stays_where_a_reader_waits_for_the_origin_once() -> None:
    """It may wait for children that are slow to take what it has read. Only when nothing has come
    since is the lease another's."""
    control = chain("h1", "h2", "h3")
    control.complain("h1", "", "stalled")
    assert control.parent("h1") == ""
    control.report("h1", 1)
    control.complain("h1", "", "stalled")
    assert control.parent("h1") == ""
    control.complain("h1", "", "stalled")
    assert control.parent("h1") != ""


def test_those_below_a_host_that_is_stuck_are_freed() -> None:
    """h2 gets nothing from anybody, for it is cut off; its child has no more than it has, and must
    not wait for ever."""
    control = chain("h1", "h2", "h3")
    control.open("h4")
    control.join("h4", 1)
    control.tick(JOIN_BATCH_S)
    control.report("h1", 6)
    for _ in range(STUCK_COMPLAINTS):
        control.complain("h2", "h1", "refused")
    child = next(host for host in ("h3", "h4") if control.parent(host) == "h2")
    control.complain(child, "h2", "stalled")
    assert control.parent(child) not in ("h2", None)


def test_wrong_bytes_part_two_hosts_for_long() -> None:
    """Longer than other failures: the one that met them does not open the other again."""
    control = chain("h1", "h2", "h3")
    control.complain("h3", "h2", "corrupt")
    control.tick(AVOID_S + 1)
    assert ("h3", "h2") in control.fleet.swarms[BLOB].edges.avoided
    control.complain("h3", "h1", "reset")
    assert control.parents["h3"] != "h2"


def test_a_host_that_several_blame_loses_its_slots() -> None:
    control = chain("h1", "h2", "h3")
    control.open("h4")
    control.join("h4")
    control.tick(JOIN_BATCH_S)
    for host in ("h3", "h4"):
        control.complain(host, "h2", "corrupt")
    assert control.fleet.swarms[BLOB].members["h2"].slots == 0
    assert control.fleet.swarms[BLOB].members["h2"].load == 0


def test_one_that_blames_alone_does_not_take_the_slots() -> None:
    control = chain("h1", "h2", "h3")
    for _ in range(5):
        control.complain("h3", "h2", "corrupt")
    assert control.fleet.swarms[BLOB].members["h2"].slots == 1


@pytest.mark.parametrize("source, banned", [("10.0.0.9", False), ("127.0.0.1", True), ("::1", True), ("", True)])
def test_many_hosts_at_one_address_have_one_vote(source: str, banned: bool) -> None:
    """On loopback, and where no address is known, each host speaks for itself."""
    control = Control()
    for number, host in enumerate(("h1", "h2", "h3", "h4", "h5")):
        control.sessions[host] = number
        hello = Hello(PROTOCOL_VERSION, host, f"{host}:1")
        control.fleet.handle(SessionOpened(number, hello, "10.0.0.1" if host == "h1" else source), now=0.0)
    control.join("h1", 8)
    for host in ("h2", "h3", "h4", "h5"):
        control.join(host)
    control.tick(JOIN_BATCH_S)
    for host in ("h2", "h3", "h4", "h5"):
        control.complain(host, "h1", "corrupt")
    assert control.fleet.hosts["h1"].banned is banned


def test_complaints_of_hosts_that_the_tracker_did_not_name_do_not_count() -> None:
    control = chain("h1", "h2")
    control.open("s1", "s2", "s3", "seed")
    control.join("seed", 8)
    for host in ("s1", "s2", "s3"):
        control.join(host, 8)
        control.complain(host, "seed", "corrupt")
    assert not control.fleet.hosts["seed"].penalties


def test_hosts_that_get_good_pieces_outweigh_complaints() -> None:
    control = Control()
    control.open("seed", "h1", "h2")
    control.join("seed", 8)
    control.join("h1")
    control.tick(JOIN_BATCH_S)
    control.report("h1", 1)
    host = control.fleet.hosts["seed"]
    assert list(host.vouchers) == ["h1"]
    for number in range(5):
        host.vouch(f"v{number}", now=control.now)
    for voter in ("v0", "x"):
        host.penalise(voter, "corrupt", now=control.now)
    assert not host.banned, "four got good pieces and do not complain"
    host.penalise("v1", "corrupt", now=control.now)
    assert host.banned
    host.vouch("x", now=control.now)
    assert "x" not in host.vouchers, "a piece does not take a complaint back"


def test_children_that_are_getting_pieces_speak_for_their_parent_however_long_ago_the_first_one_came() -> None:
    control = Control()
    control.open("seed", *(f"h{number}" for number in range(5)))
    control.join("seed", 8)
    for number in range(5):
        control.join(f"h{number}", 0, "seed")
        control.report(f"h{number}", 1)
    host = control.fleet.hosts["seed"]
    control.tick(2 * PENALTY_S)
    for number in range(5):
        control.report(f"h{number}", 2)
    for voter in ("s0", "s1"):
        control.fleet.reputation.penalise(host, voter, "refused", now=control.now)
    assert not host.banned


def test_hosts_that_got_good_pieces_long_ago_do_not_speak_for_a_host() -> None:
    control = chain("h1", "h2", "h3")
    control.open("h4")
    control.join("h4")
    control.tick(JOIN_BATCH_S)
    host = control.fleet.hosts["h2"]
    for number in range(2 * VOUCHERS_MAX):
        host.vouch(f"v{number}", now=control.now)
    assert len(host.vouchers) == VOUCHERS_MAX and f"v{2 * VOUCHERS_MAX - 1}" in host.vouchers, "the latest ones"
    control.now += 2 * PENALTY_S
    for name in ("h3", "h4"):
        control.complain(name, "h2", "corrupt")
    assert host.banned and control.fleet.swarms[BLOB].members["h2"].slots == 0


def test_a_host_whose_last_vouchers_end_while_others_complain_loses_its_slots() -> None:
    control = chain("h1", "h2", "h3")
    host = control.fleet.hosts["h2"]
    for number in range(4):
        host.vouch(f"v{number}", now=control.now)
    for voter in ("x", "y"):
        control.fleet.reputation.penalise(host, voter, "corrupt", now=control.now)
    assert not host.banned and control.fleet.swarms[BLOB].members["h2"].slots
    control.tick(PENALTY_S + 1)
    assert host.banned and control.fleet.swarms[BLOB].members["h2"].slots == 0


# -- what agents may not say


@pytest.mark.parametrize(
    "holding",
    [
        Holding(BLOB, 8 * PIECE, PIECE - 1, (0,)),
        Holding(BLOB, 8 * PIECE, 4096, (0,)),
        Holding(BLOB, 0, PIECE, (0,)),
        Holding(BLOB, 8 * PIECE, PIECE, (9,)),
        Holding(BLOB, 8 * PIECE, PIECE, (-1,)),
        Holding(BLOB, 8 * PIECE, PIECE, (0, 0)),
    ],
)
def test_impossible_holdings_are_rejected_and_leave_nothing_behind(holding: Holding) -> None:
    control = Control()
    control.open("h1")
    (send,) = control.say("h1", holding)
    assert isinstance(send, Send) and isinstance(send.message, Reject) and send.message.blob == BLOB
    assert control.fleet.swarms == {}


LIE = Holding(BLOB, PIECE, PIECE, (1,))
TRUTH = Described(((BLOB, PieceLayout(8 * PIECE, PIECE)),))


def describe(control: Control) -> None:
    control.fleet.handle(TRUTH, now=control.now)


@pytest.mark.parametrize("known", ["before", "between", "after", "never"])
@pytest.mark.parametrize("first", [True, False])
def test_who_says_that_a_blob_is_cut_differently_is_alone_in_its_swarm(known: str, first: bool) -> None:
    """Whichever host spoke first, and whether or not a manifest says which is right, the others get
    their plans. The swarm under the blob's digest is that of what a manifest says, whenever it was
    read."""
    control = Control()
    control.open("h1", "h2", "liar")
    if known == "before":
        describe(control)
    if first:
        control.say("liar", LIE)
    if known == "between":
        describe(control)
    control.join("h1")
    control.join("h2")
    if not first:
        control.say("liar", LIE)
    control.tick(JOIN_BATCH_S)
    assert (control.parents["h1"], control.parents["h2"]) in {("", "h1"), ("h2", "")}
    if known == "after":
        describe(control)
    control.report("h1", 3)
    mine = next(swarm for swarm in control.fleet.swarms.values() if "h1" in swarm.members)
    assert set(mine.members) == {"h1", "h2"} and mine.members["h1"].counts == (3,)
    assert mine.key == BLOB or (first and known == "never")
    assert control.fleet.swarms[mine.key] is mine
    for host in ("h1", "h2", "liar"):
        control.say(host, Left(BLOB))
    assert control.fleet.swarms == {}
    assert all(not host.swarms and not host.keys and not host.receiving for host in control.fleet.hosts.values())


def test_a_host_that_changes_its_mind_changes_its_swarm() -> None:
    control = chain("h1", "h2")
    control.say("h2", LIE)
    assert set(control.fleet.swarms[BLOB].members) == {"h1"}
    control.join("h2", 2, "h1")
    control.tick(JOIN_BATCH_S)
    assert set(control.fleet.swarms) == {BLOB} and control.parent("h2") == "h1"


def test_a_liar_does_not_draw_others_into_its_swarm() -> None:
    """Neither a host that has spoken, nor one that speaks later."""
    control = chain("h1")
    control.open("liar", "h2")
    lie = Holding(BLOB, PIECE, PIECE, (0,), ("h1",))
    control.say("liar", lie)
    control.say("liar", msgspec.structs.replace(lie, parents=("h2",)))
    control.join("h2", 0, "h1")
    control.report("h2", 5)
    assert set(control.fleet.swarms[BLOB].members) == {"h1", "h2"}
    assert control.fleet.swarms[BLOB].members["h2"].counts == (5,)


def test_the_first_manifest_counts() -> None:
    """A manifest that contradicts it changes nothing for the swarm that runs."""
    control = chain("h1")
    describe(control)
    control.fleet.handle(Described(((BLOB, PieceLayout(PIECE, PIECE)),)), now=control.now)
    control.open("h2")
    control.join("h2")
    assert set(control.fleet.swarms) == {BLOB} and set(control.fleet.swarms[BLOB].members) == {"h1", "h2"}


@pytest.mark.parametrize(
    ("size", "piece_size", "counts"),
    [
        (0, PIECE, (0,)),
        (1 << 60, PIECE, (0,)),
        (1 << 60, 1 << 60, (1,)),
        (8 * PIECE, 0, (0,)),
        (8 * PIECE, 3, (0,)),
        (8 * PIECE, PIECE, (9,)),
        (8 * PIECE, PIECE, (1, 1)),
        (8 * PIECE, PIECE, ()),
    ],
)
def test_what_no_blob_can_be_is_rejected_to_the_host_that_says_it(
    size: int, piece_size: int, counts: tuple[int, ...]
) -> None:
    control = chain("h1")
    control.open("liar")
    (send,) = control.say("liar", Holding(BLOB, size, piece_size, counts))
    assert isinstance(send, Send) and isinstance(send.message, Reject)
    assert send.session == control.sessions["liar"]
    assert set(control.fleet.swarms) == {BLOB} and set(control.fleet.swarms[BLOB].members) == {"h1"}


def test_reports_of_what_a_host_does_not_hold_are_ignored() -> None:
    control = chain("h1")
    control.open("h2")
    assert control.report("h2", 3) == []
    assert control.complain("h2", "h1", "reset") == []
    assert control.say("h2", Left(BLOB)) == []


def test_another_protocol_is_refused() -> None:
    fleet = Fleet(0.0)
    reject, drop = fleet.handle(SessionOpened(1, Hello(99, "h1", "h1:1")), now=0.0)
    assert isinstance(reject, Send) and isinstance(reject.message, Reject)
    assert drop == Drop(1)


def test_a_second_session_of_a_host_replaces_the_first() -> None:
    control = chain("h1")
    first = control.sessions["h1"]
    assert Drop(first) in control.open("h1")
    assert control.fleet.handle(SessionClosed(first), now=control.now) == []
    assert control.fleet.hosts["h1"].session == control.sessions["h1"]


def test_several_holdings_come_in_one_message() -> None:
    control = Control()
    control.open("h1")
    control.say("h1", Holdings(tuple(Holding(blob, 8 * PIECE, PIECE, (0,)) for blob in (BLOB, OTHER))))
    assert set(control.fleet.swarms) == {BLOB, OTHER}


def test_a_host_that_lost_pieces_waits_for_them_again() -> None:
    control = Control()
    control.open("h1", "h2")
    control.join("h1", 8)
    control.join("h2", 8)
    control.report("h2", 3)
    control.tick(JOIN_BATCH_S)
    assert control.parents == {"h2": "h1"}
    assert control.fleet.swarms[BLOB].receivers == 1


def test_an_empty_swarm_is_forgotten() -> None:
    control = chain("h1")
    control.say("h1", Left(BLOB))
    assert control.fleet.swarms == {}
    assert control.tick(10.0) == []


def test_one_impossible_holding_does_not_hide_the_others() -> None:
    control = Control()
    control.open("h1")
    wrong = Holding(BLOB, 8 * PIECE, PIECE, (9,))
    answers = control.say("h1", Holdings((wrong, Holding(OTHER, 8 * PIECE, PIECE, (8,)))))
    assert [
        answer.message.blob for answer in answers if isinstance(answer, Send) and isinstance(answer.message, Reject)
    ] == [BLOB]
    assert list(control.fleet.swarms) == [OTHER]


def test_a_host_that_cannot_look_names_up_is_given_none_that_is_known_by_name() -> None:
    """Its name servers are silent: going through all hosts by name would keep it from the origin
    for long, and none is at fault."""
    control = Control()
    control.open(*(f"h{number}" for number in range(50)), "late")
    for number in range(50):
        control.join(f"h{number}", 8)
    control.join("late")
    control.tick(JOIN_BATCH_S)
    first = control.parent("late")
    assert first
    control.say("late", Complaint(BLOB, 0, first, "refused", nameless=True))
    control.tick(RETRY_S)
    assert control.parent("late") == ""
    assert not any(host.penalties for host in control.fleet.hosts.values())


def test_a_host_that_cannot_look_names_up_receives_from_one_that_is_known_by_its_address() -> None:
    control = Control()
    control.open("h1", "h2", "late")
    control.open("numbers", address="10.0.0.7:7071")
    for host in ("h1", "h2", "numbers"):
        control.join(host, 8)
    control.join("late")
    control.tick(JOIN_BATCH_S)
    if control.parent("late") != "numbers":
        control.say("late", Complaint(BLOB, 0, control.parent("late") or "", "refused", nameless=True))
        control.tick(RETRY_S)
    assert control.parent("late") == "numbers"


def test_a_host_that_another_names_as_its_parent_keeps_its_session() -> None:
    """It never spoke of the blob, which may not even be one."""
    control = Control()
    control.open("h1", "stranger")
    control.join("h1", 8)
    control.join("stranger", 0, parent="h1", blob=OTHER)
    out = control.tick(ABSENCE_S)
    assert not [each for each in out if isinstance(each, Drop)]
    assert control.fleet.hosts["h1"].session is not None and OTHER not in control.fleet.hosts["h1"].swarms
