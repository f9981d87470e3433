"""What one of several trackers plans, refuses and gives away."""

from itertools import pairwise

import pytest
from test_fleet import PIECE, Control

from p2pdist.model.digest import Digest, digest_of
from p2pdist.model.messages import (
    PROTOCOL_VERSION,
    Advance,
    Assign,
    Complaint,
    Hello,
    Holding,
    Holdings,
    NotOwner,
    OriginShare,
    OwnershipChanged,
    Report,
    Welcome,
)
from p2pdist.model.ownership import Ownership, Tracker, owner
from tracker.core.events import Broadcast, Command, Followed, LeasesAllowed, Received, Send, SessionOpened
from tracker.core.monitor.presence import START_GRACE_S
from tracker.core.ownership.handover import GATHER_S, NEWCOMER_S, PUSHED_MAX
from tracker.core.planning.schedule import JOIN_BATCH_S

BOTH = Ownership(5, (Tracker("a"), Tracker("b")))
ALONE = Ownership(6, (Tracker("a"),))
BLOBS = [digest_of(b"%d" % number) for number in range(40)]
MINE = [blob for blob in BLOBS if owner(BOTH, blob).id == "a"]
THEIRS = [blob for blob in BLOBS if owner(BOTH, blob).id == "b"]


class Owner(Control):
    """The tracker `a` of two."""

    def __init__(self, ownership: Ownership = BOTH) -> None:
        super().__init__()
        self.follow(ownership)

    def follow(self, ownership: Ownership) -> list[Command]:
        return self.fleet.handle(Followed(ownership, "a"), now=self.now)

    def hold(self, host: str, blob: Digest, count: int = 0, parent: str | None = None) -> list[Command]:
        return self.join(host, count, parent, blob)


def plans(commands: list[Command]) -> list[Assign]:
    return [each.message for each in commands if isinstance(each, Send) and isinstance(each.message, Assign)]


def test_a_session_is_told_who_owns_what() -> None:
    control = Owner()
    assert control.open("h1") == [Send(1, Welcome(PROTOCOL_VERSION, 0.25, ownership=BOTH, tracker="a"))]


def test_plans_carry_the_epoch() -> None:
    """A lease of this tracker can be told from one of the owner before."""
    control = Owner()
    control.open("h1")
    assert control.hold("h1", MINE[0]) == []
    (plan,) = plans(control.tick(JOIN_BATCH_S))
    assert plan.plan.epoch == 5 and plan.plan.stripes[0].parent is not None
    alone = Control()
    alone.open("h1")
    alone.join("h1")
    (plan,) = plans(alone.tick(JOIN_BATCH_S))
    assert plan.plan.epoch == 0


def test_blobs_of_another_tracker_are_refused_and_the_others_taken() -> None:
    control = Owner()
    control.open("h1")
    assert control.hold("h1", THEIRS[0]) == [Send(1, NotOwner((THEIRS[0],), BOTH))]
    both = Holdings(tuple(Holding(blob, 8 * PIECE, PIECE, (0,), (None,)) for blob in (THEIRS[0], MINE[0], THEIRS[1])))
    assert control.say("h1", both) == [Send(1, NotOwner((THEIRS[0], THEIRS[1]), BOTH))]
    assert list(control.fleet.swarms) == [MINE[0]]
    assert control.say("h1", Complaint(THEIRS[0], 0, "h2", "reset")) == [Send(1, NotOwner((THEIRS[0],), BOTH))]


def test_a_new_ownership_is_told_to_all_and_foreign_swarms_are_given_away() -> None:
    """First every session hears, then the swarms go; nothing else of them is said."""
    control = Owner(ALONE)
    control.open("h1", "h2", "h3")
    for host in ("h1", "h2"):
        control.hold(host, MINE[0])
        control.hold(host, THEIRS[0])
    control.tick(JOIN_BATCH_S)
    back = Ownership(7, BOTH.trackers)
    assert control.follow(back) == []
    assert control.tick(0.05) == [Broadcast((1, 2, 3), OwnershipChanged(back))]
    assert control.tick(0.05) == [Broadcast((1, 2), NotOwner((THEIRS[0],)))]
    assert list(control.fleet.swarms) == [MINE[0]]
    assert list(control.fleet.hosts["h1"].swarms) == [MINE[0]]
    assert control.tick(0.05) == [] and control.tick(5.0) == []


def test_a_large_fleet_is_told_a_part_at_a_time() -> None:
    control = Owner()
    for number in range(PUSHED_MAX + 10):
        control.fleet.handle(SessionOpened(number, Hello(1, f"h{number}", f"h{number}:1")), now=0.0)
    control.follow(ALONE)
    first, then = control.tick(0.05), control.tick(0.05)
    sessions = [each.sessions for each in (*first, *then) if isinstance(each, Broadcast)]
    assert [len(part) for part in sessions] == [PUSHED_MAX, 10]
    assert sorted(sum(sessions, ())) == list(range(PUSHED_MAX + 10))


def test_a_swarm_that_came_from_another_owner_gets_no_lease_before_its_root_has_spoken() -> None:
    """h2 holds pieces and speaks first: h1, which reads the origin, is still on its way."""
    control = Owner()
    control.open("h1", "h2")
    control.follow(ALONE)
    control.hold("h2", THEIRS[0], 2)
    assert plans(control.tick(START_GRACE_S / 2)) == []
    control.hold("h1", THEIRS[0], 3, "")
    control.tick(JOIN_BATCH_S)
    swarm = control.fleet.swarms[THEIRS[0]]
    assert [list(roots) for roots in swarm.edges.roots] == [["h1"]]
    assert swarm.members["h2"].parents == ["h1"]


def test_the_first_ownership_counts_as_a_start_however_late_it_comes() -> None:
    """A tracker that waited long for its place knows nothing of the roots of its swarms."""
    control = Control()
    control.open("h1", "h2")
    control.tick(2 * START_GRACE_S)
    control.fleet.handle(Followed(ALONE, "a"), now=control.now)
    control.join("h2", 2, None, THEIRS[0])
    assert plans(control.tick(START_GRACE_S / 2)) == []
    control.join("h1", 3, "", THEIRS[0])
    control.tick(JOIN_BATCH_S)
    assert control.fleet.swarms[THEIRS[0]].members["h2"].parents == ["h1"]


def test_a_swarm_that_came_from_another_owner_gets_a_lease_in_the_end() -> None:
    control = Owner()
    control.open("h2")
    control.follow(ALONE)
    control.hold("h2", THEIRS[0], 2)
    told = [plan for _ in range(60) for plan in plans(control.tick(0.1))]
    assert told and control.now > START_GRACE_S and told[0].plan.epoch == 6


def test_a_blob_that_begins_just_after_the_change_waits_for_a_moment() -> None:
    """Its hosts may be on their way; one that was this tracker's before does not wait."""
    control = Owner()
    control.open("h1")
    control.follow(ALONE)
    control.hold("h1", THEIRS[0])
    control.hold("h1", MINE[0])
    assert [plan.plan.blob for plan in plans(control.tick(JOIN_BATCH_S))] == [MINE[0]]
    told = [plan for _ in range(round(NEWCOMER_S / 0.1) + 6) for plan in plans(control.tick(0.1))]
    assert [plan.plan.blob for plan in told] == [THEIRS[0]]


@pytest.mark.parametrize("after_s", [START_GRACE_S, GATHER_S + 1])
def test_hosts_that_come_late_from_another_owner_read_the_rest_in_place_of_newcomers(after_s: float) -> None:
    """For as long as such hosts may come. Later, and of a blob that was this tracker's before, what
    a host says that it has is a claim, and takes no lease."""
    control = Owner()
    control.open("new", "old")
    control.follow(ALONE)
    for blob in (THEIRS[0], MINE[0]):
        control.hold("new", blob)
    for _ in range(round(after_s / 0.1)):
        control.tick(0.1)
    for blob in (THEIRS[0], MINE[0]):
        assert roots(control, blob) == ["new"]
        control.hold("old", blob, 6)
    for _ in range(6):
        control.tick(0.1)
    assert roots(control, THEIRS[0]) == (["old"] if after_s < GATHER_S else ["new"])
    assert roots(control, MINE[0]) == ["new"]
    assert not control.fleet.swarms[THEIRS[0]].edges.unplanned, "the other one receives from it"


def test_without_leave_nobody_takes_the_lease_of_a_newcomer() -> None:
    control = Owner()
    control.open("new", "old")
    control.follow(ALONE)
    control.hold("new", THEIRS[0])
    for _ in range(40):
        control.tick(0.1)
    control.fleet.handle(LeasesAllowed(False), now=control.now)
    control.hold("old", THEIRS[0], 6)
    for _ in range(6):
        control.tick(0.1)
    assert roots(control, THEIRS[0]) == ["new"]


def test_a_newcomer_that_has_nearly_as_much_goes_on_to_read() -> None:
    control = Owner()
    control.open("new", "old")
    control.follow(ALONE)
    control.hold("new", THEIRS[0])
    for _ in range(40):
        control.tick(0.1)
    control.say("new", Report((Advance(THEIRS[0], (6,)),)))
    control.hold("old", THEIRS[0], 6)
    for _ in range(6):
        control.tick(0.1)
    assert roots(control, THEIRS[0]) == ["new"]


def roots(control: Owner, blob: Digest) -> list[str]:
    """Who reads the first stripe."""
    return list(control.fleet.swarms[blob].edges.roots[0])


def test_without_leave_no_lease_is_granted_and_what_runs_goes_on() -> None:
    control = Owner()
    control.open("h1", "h2")
    control.hold("h1", MINE[0])
    control.tick(JOIN_BATCH_S)
    control.fleet.handle(LeasesAllowed(False), now=control.now)
    control.hold("h2", MINE[0])
    control.hold("h2", MINE[1])
    told = [plan for _ in range(20) for plan in plans(control.tick(0.1))]
    assert [plan.plan.blob for plan in told] == [MINE[0]]
    assert [list(roots) for roots in control.fleet.swarms[MINE[0]].edges.roots] == [["h1"]]
    control.fleet.handle(LeasesAllowed(True), now=control.now)
    told = [plan for _ in range(20) for plan in plans(control.tick(0.1))]
    assert [plan.plan.blob for plan in told] == [MINE[1]]


def test_a_message_of_a_session_that_has_ended_is_ignored() -> None:
    control = Owner()
    control.open("h1")
    control.follow(ALONE)
    control.close("h1")
    holding = Holding(MINE[0], 8 * PIECE, PIECE, (0,), (None,))
    assert control.fleet.handle(Received(1, holding), now=0.0) == []
    assert control.tick(0.05) == []


def test_the_trackers_share_the_limits_on_reading_the_origin() -> None:
    """Leases and rates of all of them together stay within what one tracker may grant."""
    control = Control(origin_streams_max=4, origin_bytes_s=4000.0)
    control.fleet.handle(Followed(BOTH, "a"), now=0.0)
    control.open("h1", "h2", "h3", "h4")
    for host, blob in zip(("h1", "h2", "h3", "h4"), MINE, strict=False):
        control.join(host, blob=blob)
    told = control.tick(JOIN_BATCH_S)
    assert len(plans(told)) == 2 and control.fleet.leases() == 2
    rates = [each.message.bytes_s for each in told if isinstance(each, Send) and isinstance(each.message, OriginShare)]
    assert rates == [1000.0, 1000.0]
    control.fleet.handle(Followed(ALONE, "a"), now=control.now)
    for _ in range(20):
        control.tick(0.2)
    assert control.fleet.leases() == 4


def test_hosts_that_come_from_another_owner_do_not_have_to_prove_what_they_hold_in_time() -> None:
    """Thousands of hosts join in the same moment, and get their first pieces late. None of the
    holders may be doubted for that, or the newcomers would have no parent."""
    control = Owner()
    blob = THEIRS[0]
    holders, newcomers = [f"h{number}" for number in range(12)], [f"n{number}" for number in range(12)]
    control.open(*holders, *newcomers)
    control.tick(2 * START_GRACE_S)
    control.follow(ALONE)
    control.hold(holders[0], blob, 4, "")
    for above, host in pairwise(holders):
        control.hold(host, blob, 4, above)
    for host in newcomers:
        control.hold(host, blob)
    for _ in range(100):
        control.tick(0.1)
    swarm = control.fleet.swarms[blob]
    assert all(swarm.members[host].parents[0] is not None for host in newcomers)
    assert not any("claims pieces" in text for _, text in swarm.story)
    assert not any(swarm.members[host].doubted_until for host in holders)
