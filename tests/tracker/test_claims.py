"""Hosts that say they hold pieces: they are believed until a child got nothing."""

from __future__ import annotations

import pytest

from p2pdist.model.digest import digest_of
from p2pdist.model.messages import PROTOCOL_VERSION, Advance, Complaint, Hello, Holding, Left, Report
from tracker.core.complaints import was_named
from tracker.core.events import Received, SessionOpened, Tick
from tracker.core.fleet import Fleet
from tracker.core.member import GIVING_STILL_S, STARVED_BY, STILL_S, Starvation
from tracker.core.monitor.presence import START_GRACE_S
from tracker.core.origin.leases import RESCUES_BEYOND, Leases
from tracker.core.planning.rescue import RESCUES_MAX
from tracker.core.planning.schedule import SMALL_BATCH_S
from tracker.core.repair.claims import DISBELIEF_S, DOUBT_S, FIRST_PIECE_S
from tracker.core.repair.remedies import DRY_S

PIECE, ALL = 65536, 8
BLOB = digest_of(b"blob")


class Control:
    """A fleet, its time, and hosts that report as long as they are `alive`."""

    def __init__(self, started_at: float = -100.0) -> None:
        self.fleet, self.now = Fleet(started_at), 0.0
        self.numbers: dict[str, int] = {}

    def open(self, host: str) -> None:
        self.numbers[host] = len(self.numbers)
        hello = Hello(PROTOCOL_VERSION, host, f"{host}:1")
        self.fleet.handle(SessionOpened(self.numbers[host], hello), now=self.now)

    def join(self, host: str, count: int = 0) -> None:
        if host not in self.numbers:
            self.open(host)
        holding = Holding(BLOB, ALL * PIECE, PIECE, (count,))
        self.fleet.handle(Received(self.numbers[host], holding), now=self.now)

    def report(self, host: str, count: int) -> None:
        self.fleet.handle(Received(self.numbers[host], Report((Advance(BLOB, (count,)),))), now=self.now)

    def complain(self, host: str, source: str, reason: str) -> None:
        message = Complaint(BLOB, 0, source, reason)  # type: ignore[arg-type]
        self.fleet.handle(Received(self.numbers[host], message), now=self.now)

    def run(self, seconds: float) -> None:
        end = self.now + seconds
        while self.now < end:
            self.now += 0.05
            for number in self.numbers.values():  # no host is silent
                self.fleet.handle(Received(number, Report(())), now=self.now)
            self.fleet.handle(Tick(), now=self.now)

    def parent(self, host: str) -> str | None:
        return self.fleet.swarms[BLOB].members[host].parents[0]


def silent_seeds(count: int, **more: float) -> Control:
    control = Control(**more)
    for number in range(count):
        control.join(f"s{number}", ALL)
    control.run(SMALL_BATCH_S)
    return control


@pytest.mark.parametrize("count", [2, 20, 120])
def test_silent_seeds_hold_a_host_up_for_two_deadlines_however_many_they_are(count: int) -> None:
    control = silent_seeds(count)
    control.join("h1")
    control.run(0.2)
    assert control.parent("h1") in control.numbers
    control.run(2 * (FIRST_PIECE_S + 0.5))
    assert control.parent("h1") == "", "it reads the origin"
    control.report("h1", 3)
    control.join("h2")
    control.run(0.2)
    assert control.parent("h2") == "h1", "and others receive from the host that does"


def test_seeds_that_give_are_believed() -> None:
    control = silent_seeds(2)
    control.join("h1")
    control.run(0.2)
    seed = control.parent("h1")
    control.report("h1", 1)
    control.run(2 * FIRST_PIECE_S + 1)
    assert control.parent("h1") == seed and control.fleet.hosts[seed or ""].proved
    assert control.fleet.leases() == 0


def test_a_complaint_is_as_good_as_the_deadline() -> None:
    control = silent_seeds(20)
    control.join("h1")
    control.run(0.2)
    for _ in range(2):
        control.complain("h1", control.parent("h1") or "", "stalled")
        control.run(0.1)
    assert control.parent("h1") == ""


@pytest.mark.parametrize(("claimed", "doubted"), [(3, False), (4, True)])
def test_a_parent_that_claims_no_more_than_its_child_has_is_not_doubted(claimed: int, doubted: bool) -> None:
    """Whatever is above it has stopped: a complaint proves something of a host that could give."""
    control = Control()
    control.join("a", claimed)
    control.run(SMALL_BATCH_S)
    control.join("b", 3)
    control.run(0.2)
    assert (control.parent("a"), control.parent("b")) == ("", "a")
    control.complain("b", "a", "stalled")
    assert bool(control.fleet.hosts["a"].doubted_until) is doubted


@pytest.mark.parametrize(("gained", "doubted"), [(0, False), (1, True)])
def test_a_host_to_which_nothing_comes_at_all_says_nothing_of_a_parent(gained: int, doubted: bool) -> None:
    """Its own link may be cut, or that of its rack or site; where other pieces come to it, that is
    not so. `gained`: pieces of the other stripe since it joined."""
    control = Control()
    holdings = {"a": (20, 20), "b": (15, 15), "c": (8, 8)}
    for host, counts in holdings.items():
        control.open(host)
        holding = Holding(BLOB, 64 * PIECE, PIECE, counts, ("a", "b") if host == "c" else ("", ""))
        control.fleet.handle(Received(control.numbers[host], holding), now=control.now)
    control.run(0.2)
    swarm = control.fleet.swarms[BLOB]
    assert swarm.members["c"].parents == ["a", "b"]
    control.fleet.handle(Received(control.numbers["c"], Report((Advance(BLOB, (8, 8 + gained)),))), now=control.now)
    swarm.members["c"].told = ("a", "b")
    control.complain("c", "a", "stalled")
    assert bool(control.fleet.hosts["a"].doubted_until) is doubted


def test_hosts_that_proved_something_stay_in_play_beside_those_that_did_not() -> None:
    control = silent_seeds(1)
    control.join("h1")
    control.run(0.2)
    control.report("h1", 1)  # s0 has given
    for number in range(1, 10):
        control.join(f"s{number}", ALL)
    control.run(0.1)
    for number in range(2, 9):
        control.join(f"h{number}")
    control.run(3 * (FIRST_PIECE_S + 0.5))
    assert control.fleet.leases() == 0
    assert {control.parent(f"h{number}") for number in range(2, 9)} <= {"s0", *(f"h{n}" for n in range(1, 9))}


def test_a_doubt_ends() -> None:
    control = silent_seeds(3)
    control.join("h1")
    control.run(2 * (FIRST_PIECE_S + 0.5) + 0.2)
    members = control.fleet.swarms[BLOB].members
    assert sum(bool(members[f"s{number}"].doubted_until) for number in range(3)) == 3
    control.run(DISBELIEF_S)
    assert sum(bool(members[f"s{number}"].doubted_until) for number in range(3)) == 2
    control.run(DOUBT_S)
    assert all(members[f"s{number}"].slots for number in range(3))


@pytest.mark.parametrize("new", [False, True])
def test_in_a_large_fleet_a_few_that_die_cost_the_others_nothing(new: bool) -> None:
    """Most are leaves, which can prove nothing: nobody asks them. Nor could any host yet where the
    tracker has just started."""
    control = Control(started_at=0.0 if new else -100.0)
    names = [f"h{number}" for number in range(300)]
    for name in names:
        control.join(name, ALL if name == "h0" else 2)
    control.run(3.0 if new else 0.2)
    members = control.fleet.swarms[BLOB].members
    dead = [name for name in names if members[name].children[0] and members[name].parents[0]][:3]
    for name in names if not new else ():
        if members[name].parents[0] not in dead:
            control.report(name, 3)
    for name in dead:
        child = members[name].children[0][0]
        control.report(name, 5)
        control.complain(child, name, "stalled")
    assert [name for name in names if members[name].doubted_until] == dead and len(dead) == 3


def test_a_host_that_is_believed_again_reads_beside_no_other_of_its_site() -> None:
    """While it is doubted, its lease counts for nothing and another host reads the origin, too."""
    control = Control()
    control.join("a", 4)
    control.run(SMALL_BATCH_S)
    for name in ("b", "c"):
        control.join(name)
    control.run(0.2)
    assert control.parent("a") == ""
    control.run(2 * (FIRST_PIECE_S + 0.5))
    roots = control.fleet.swarms[BLOB].edges.roots[0]
    assert len(roots) == 2 and "a" in roots
    control.run(DOUBT_S + 1.0)
    assert not control.fleet.hosts["a"].doubted_until > control.now
    assert len(roots) == 1


def test_a_doubted_host_is_doubted_in_its_next_swarm_and_goes_on_receiving() -> None:
    control = silent_seeds(1)
    control.join("h1")
    control.run(FIRST_PIECE_S + 0.6)
    control.fleet.handle(
        Received(control.numbers["s0"], Holding(digest_of(b"2"), ALL * PIECE, PIECE, (5,))), now=control.now
    )
    control.run(0.2)
    member = control.fleet.swarms[digest_of(b"2")].members["s0"]
    assert member.doubted_until and member.parents == [""]


def test_pieces_that_come_from_nowhere_are_a_claim() -> None:
    control = Control()
    control.join("h1")
    control.run(0.2)
    control.join("s0")
    control.report("s0", ALL)  # before it had a parent
    assert "s0" in control.fleet.swarms[BLOB].claims


def test_a_new_tracker_sets_no_deadline_and_hears_complaints() -> None:
    """All hosts come again at once, and are late; a child that complains knows more."""
    control = Control(started_at=0.0)
    for number in range(4):
        control.join(f"s{number}", ALL)
    control.join("h1")
    control.run(2 * FIRST_PIECE_S + 1.0)
    members = control.fleet.swarms[BLOB].members
    parent = control.parent("h1")
    assert parent and not any(member.doubted_until for member in members.values())
    for _ in range(2):
        control.complain("h1", control.parent("h1") or "", "stalled")
        control.run(1.0)
    assert all(members[f"s{number}"].doubted_until for number in range(4))
    control.run(START_GRACE_S)
    assert control.parent("h1") == ""


def test_a_complaint_of_a_host_that_was_never_named_to_the_complainer_does_not_count() -> None:
    """Else one process could keep all new seeds of a fleet from their children."""
    control = Control()
    control.join("h1", 1)
    control.join("s0", ALL)
    control.join("stranger")
    control.complain("stranger", "s0", "stalled")
    assert not control.fleet.swarms[BLOB].members["s0"].doubted_until


def test_a_large_piece_has_the_time_that_a_slow_uplink_takes() -> None:
    piece, pieces = 16 << 20, 40
    control = Control()
    for host, counts in (("s0", (20, 20)), ("h1", (0, 0))):
        control.open(host)
        holding = Holding(BLOB, pieces * piece, piece, counts)
        control.fleet.handle(Received(control.numbers[host], holding), now=control.now)
    control.run(2 * piece / (2 << 20))  # two first pieces at 2 MiB/s
    swarm = control.fleet.swarms[BLOB]
    assert swarm.members["h1"].parents == ["s0", "s0"] and not swarm.members["s0"].doubted_until


def strangers(count: int) -> Control:
    """Hosts that say how they get on, vouch for each other, and give nothing; one has the lease."""
    control = Control()
    for number in range(count):
        control.join(f"s{number}")
    control.run(0.5)
    for done in range(1, ALL - 1):
        for number in range(count):
            control.report(f"s{number}", done)
        control.run(0.25)
    return control


def starve(control: Control, host: str, times: int) -> list[str | None]:
    """A host complains of each parent that it gets, as one that gives nothing; returns these."""
    parents = []
    for _ in range(times):
        control.run(0.3)
        parents.append(control.parent(host))
        if not parents[-1]:
            break
        control.complain(host, parents[-1], "stalled")
    return parents


@pytest.mark.parametrize("count", [5, 20, 120])
def test_a_host_that_strangers_starve_reads_the_origin_besides_their_root(count: int) -> None:
    control = strangers(count)
    swarm = control.fleet.swarms[BLOB]
    control.join("h1")
    parents = starve(control, "h1", 12)
    assert parents[-1] == "" and len(set(parents)) == STARVED_BY + 1
    assert len(swarm.edges.roots[0]) == 2, "the root that was there keeps its lease"
    # Another one gets it from that host: one reads beyond the rule.
    control.join("h2")
    assert starve(control, "h2", 12)[-1] == "h1" or control.parent("h2") == "h1"
    assert len(swarm.edges.roots[0]) == 2
    # Strangers that say that they have everything do not take the lease away.
    for number in range(count):
        control.report(f"s{number}", ALL)
    control.run(0.5)
    control.report("h1", 3)
    control.run(0.5)
    assert control.parent("h1") == "" and set(swarm.edges.roots[0]) == {"h1"}
    control.report("h1", ALL)
    control.run(0.5)
    assert not swarm.edges.roots[0] and not swarm.starved


def test_a_host_that_has_a_piece_or_complains_of_whom_it_was_not_told_is_not_starved() -> None:
    control = strangers(20)
    swarm = control.fleet.swarms[BLOB]
    control.join("h1")
    control.run(0.3)
    member = swarm.members["h1"]
    untold = [name for name in swarm.members if name != "h1" and not was_named(member, name)]
    for name in untold:
        control.complain("h1", name, "reset")
    assert len(untold) > STARVED_BY and not member.starvation
    control.join("h2")
    control.run(0.3)
    control.report("h2", 1)
    assert "" not in starve(control, "h2", 6) and "h2" not in swarm.starved


def complain_for(control: Control, host: str, seconds: float) -> None:
    """A host that gets no more complains of each parent in turn."""
    until = control.now + seconds
    while control.now < until and control.parent(host) != "":
        if parent := control.parent(host):
            control.complain(host, parent, "stalled")
        control.run(0.6)


def strangers_that_stopped() -> Control:
    """Strangers that have given a host half of the blob, and say that they have more."""
    control = strangers(20)
    control.join("h1")
    control.run(0.3)
    control.report("h1", ALL // 2)
    return control


def test_a_host_that_strangers_stopped_giving_to_reads_the_origin_once_it_stood_still_for_long() -> None:
    control = strangers_that_stopped()
    swarm = control.fleet.swarms[BLOB]
    complain_for(control, "h1", STILL_S - 0.6)
    assert control.parent("h1") != "" and not swarm.starved, "honest hosts may all pause for a while"
    complain_for(control, "h1", 2.0)
    assert control.parent("h1") == "" and 0 in swarm.members["h1"].rescued
    assert len(swarm.edges.roots[0]) == 2, "the root that was there keeps its lease"
    control.report("h1", ALL // 2 + 1)
    assert not swarm.starved


def test_a_piece_from_anywhere_ends_the_time_for_which_a_host_stands_still() -> None:
    control = strangers_that_stopped()
    swarm = control.fleet.swarms[BLOB]
    complain_for(control, "h1", STILL_S - 0.6)
    control.report("h1", ALL // 2 + 1)
    complain_for(control, "h1", STILL_S - 0.6)
    assert control.parent("h1") != "" and not swarm.starved


def test_parents_that_give_to_others_count_much_later() -> None:
    """Most likely the paths from them are cut."""
    starvation = Starvation()
    starvation.stand_still(now=0.0)
    for number in range(STARVED_BY):
        starvation.stop_by(0, f"s{number}", gives=True)
    assert not starvation.stopped_in(0, now=GIVING_STILL_S - 0.1) and starvation.stopped_in(0, now=GIVING_STILL_S)
    assert not starvation.stopped_in(1, now=GIVING_STILL_S), "none failed it there"


def test_a_lease_leaves_a_holder_that_stopped_for_the_host_that_waits() -> None:
    control = Control()
    for host in ("root", "child"):
        control.join(host)
        control.run(0.3)
    assert control.parent("root") == "" and control.parent("child") == "root"
    control.report("root", 4)
    control.report("child", 4)
    complain_for(control, "child", DRY_S - 1.2)
    assert control.parent("root") == ""
    complain_for(control, "child", 3.0)
    assert control.parent("child") == "" and control.fleet.leases() == 1


def say_starved(control: Control, host: str, source: str) -> None:
    message = Complaint(BLOB, 0, source, "slow", starved=True)
    control.fleet.handle(Received(control.numbers[host], message), now=control.now)


def test_a_host_without_a_piece_is_rescued_at_its_word_and_no_host_is_blamed() -> None:
    control = strangers(20)
    swarm = control.fleet.swarms[BLOB]
    control.join("h1")
    control.run(0.3)
    parent = control.parent("h1") or ""
    say_starved(control, "h1", parent)
    assert control.parent("h1") == "" and 0 in swarm.members["h1"].rescued
    assert not swarm.members[parent].doubted_until and not swarm.members["h1"].complaints[0]
    assert not control.fleet.hosts[parent].penalties
    control.join("h2")
    control.run(0.3)
    say_starved(control, "h2", control.parent("h2") or "")
    assert control.parent("h2") == "h1"


def test_the_word_of_a_host_counts_of_parents_that_claim_pieces_and_that_it_was_told() -> None:
    control = strangers(20)
    swarm = control.fleet.swarms[BLOB]
    control.join("h1")
    control.run(0.3)
    parent = control.parent("h1") or ""
    others = [name for name in swarm.members if name not in ("h1", parent)]
    for name in others:
        say_starved(control, "h1", name)
    assert control.parent("h1") == parent and not swarm.starved
    swarm.members[parent].counts = (0,)
    control.fleet.hosts[parent].gave = True  # else it may be one that wants the blob and does nothing
    say_starved(control, "h1", parent)
    assert control.parent("h1") == parent, "it may be waiting itself"
    control.report("h1", 1)
    swarm.members[parent].counts = (3,)
    say_starved(control, "h1", parent)
    assert control.parent("h1") == parent, "it has something"


def test_where_no_host_can_be_rescued_a_starved_one_stays_where_it_is() -> None:
    """All places are taken, by hosts that have no room and gave it nothing yet."""
    control = strangers(20)
    swarm = control.fleet.swarms[BLOB]
    for number in range(RESCUES_MAX):
        control.join(f"r{number}")
        control.run(0.3)
        swarm.edges.detach(0, f"r{number}")
        swarm.edges.attach(0, f"r{number}", "")
        swarm.edges.rescue(0, f"r{number}")
        swarm.members[f"r{number}"].reduce_slots(0, now=control.now)
        control.report(f"r{number}", 1)
    control.join("h1")
    control.run(0.3)
    parent = control.parent("h1") or ""
    say_starved(control, "h1", parent)
    control.run(0.3)
    assert control.parent("h1") == parent and ("h1", parent) not in swarm.edges.avoided


def test_a_tracker_that_has_just_started_rescues_starved_hosts() -> None:
    """It grants no other lease while roots may come back."""
    control = Control(started_at=0.0)
    for number in range(4):
        control.join(f"s{number}", ALL)
    control.join("h1")
    control.run(0.3)
    say_starved(control, "h1", control.parent("h1") or "")
    control.run(0.1)
    assert control.now < START_GRACE_S and control.parent("h1") == ""


def seeds_that_stopped(count: int = 6) -> Control:
    """Hosts that joined with everything, and have given a host half of the blob."""
    control = Control()
    for number in range(count):
        control.join(f"s{number}", ALL)
    control.join("h1")
    control.run(0.3)
    control.report("h1", ALL // 2)
    return control


def test_a_host_that_seeds_stopped_giving_to_is_rescued_at_its_word_and_no_host_is_blamed() -> None:
    control = seeds_that_stopped()
    swarm = control.fleet.swarms[BLOB]
    parent = control.parent("h1") or ""
    say_starved(control, "h1", parent)
    control.run(0.1)
    assert control.parent("h1") == "" and 0 in swarm.members["h1"].rescued
    assert not swarm.members[parent].doubted_until and not control.fleet.hosts[parent].penalties
    control.report("h1", ALL // 2 + 1)
    assert not swarm.starved and control.parent("h1") == ""


def test_a_host_whose_parent_got_its_pieces_here_stays_with_it() -> None:
    """It pauses most likely, or waits itself; several in turn that gave to no host count."""
    control = Control()
    for host in ("root", "child"):
        control.join(host)
        control.run(0.3)
    control.report("root", 6)
    control.report("child", 4)
    say_starved(control, "child", "root")
    control.run(0.3)
    assert control.parent("child") == "root" and not control.fleet.swarms[BLOB].starved


def test_a_holder_that_has_stopped_loses_its_lease_soon_to_a_host_whose_pull_stands_still() -> None:
    control = Control()
    for host in ("root", "child"):
        control.join(host)
        control.run(0.3)
    control.report("root", 4)
    control.report("child", 4)
    say_starved(control, "child", "root")
    assert control.parent("root") == "", "it has read a moment ago"
    control.run(3.0)
    say_starved(control, "child", "root")
    control.run(0.3)
    assert control.parent("child") == "" and control.fleet.leases() == 1


@pytest.mark.parametrize("left", [0, 1])
def test_a_host_that_leaves_all_alone_that_have_more_is_starved(left: int) -> None:
    """No complaint of it comes any more, as no host is asked; one of them holds the lease."""
    control = strangers(12)
    swarm = control.fleet.swarms[BLOB]
    control.join("h1")
    control.run(0.3)
    control.report("h1", 1)
    for name in list(swarm.members)[: 12 - left]:
        control.complain("h1", name, "protocol")
    control.run(0.3)
    assert (control.parent("h1") == "") == ("h1" in swarm.starved) == (not left)


def test_a_silent_parent_counts_that_wants_blobs_which_no_manifest_names() -> None:
    """It holds leases of all of them, and reads nothing."""
    control = Control()
    control.join("hoarder")
    control.fleet.hosts["hoarder"].gave = True
    control.run(0.3)
    control.join("h1")
    control.run(0.3)
    assert control.parent("h1") == "hoarder"
    say_starved(control, "h1", "hoarder")
    control.run(0.1)
    assert control.parent("h1") == "hoarder", "it may have nothing yet"
    for number in range(3):
        control.fleet.hosts["hoarder"].found(digest_of(bytes([number])), wants=True)
    say_starved(control, "h1", "hoarder")
    control.run(0.1)
    assert control.parent("h1") == "" and 0 in control.fleet.swarms[BLOB].members["h1"].rescued


def test_a_starved_host_finds_a_lease_where_strangers_hold_all() -> None:
    control = strangers(5)
    swarm = control.fleet.swarms[BLOB]
    leases = Leases([swarm], leases_max=1)
    assert leases.rescues(swarm) == leases.free(swarm) == 0
    swarm.starved["h1"] = None
    assert leases.rescues(swarm) == RESCUES_BEYOND and leases.free(swarm) == 0
    leases.granted(swarm, RESCUES_BEYOND)
    assert leases.rescues(swarm) == 0


@pytest.mark.parametrize("waits, limit_s", [(False, 0.5), (True, 1.0)])
@pytest.mark.parametrize("gave", [True, False])
def test_a_parent_that_never_gave_a_piece_counts_once_its_first_one_takes_long(
    gave: bool, waits: bool, limit_s: float
) -> None:
    """One that wants a blob and does nothing. Where no first piece was measured, the origin may be
    slow for all that say that they wait."""
    control = Control()
    control.fleet._turnover.measured = True
    control.join("idle")
    control.fleet.hosts["idle"].gave = gave
    control.run(0.2)
    control.join("h1")
    control.run(0.1)
    for long in (False, True):
        control.run(limit_s if long else 0.0)
        message = Complaint(BLOB, 0, "idle", "slow", starved=True, waits=waits)
        control.fleet.handle(Received(control.numbers["h1"], message), now=control.now)
        control.run(0.1)
        assert (control.parent("h1") == "") == (long and not gave)


def test_of_starved_hosts_that_read_nothing_the_first_one_makes_room_for_the_next() -> None:
    """Any process can say that it starves."""
    control = strangers(20)
    swarm = control.fleet.swarms[BLOB]
    control.fleet._turnover.measured = True
    for number in range(RESCUES_MAX):
        control.join(f"r{number}")
        control.run(0.3)
        swarm.edges.set_now(control.now)
        swarm.edges.detach(0, f"r{number}")
        swarm.edges.attach(0, f"r{number}", "")
        swarm.edges.rescue(0, f"r{number}")
        swarm.members[f"r{number}"].reduce_slots(0, now=control.now)
    control.join("h1")
    control.run(0.3)
    say_starved(control, "h1", control.parent("h1") or "")
    control.run(0.3)
    assert control.parent("h1") == "" and control.parent("r0") != ""
    assert ("r0", "") in swarm.edges.avoided


@pytest.mark.parametrize("served", [True, False])
def test_a_host_that_leaves_its_children_is_given_none_for_a_while(served: bool) -> None:
    """Unless one of them got a piece from it: else it could come and go, and hold up all that it is
    given."""
    control = Control()
    for host in ("flaps", "h1"):
        control.join(host)
        control.run(0.3)
    assert control.parent("h1") == "flaps"
    if served:
        control.report("flaps", 1)
        control.report("h1", 1)
    control.fleet.handle(Received(control.numbers["flaps"], Left(BLOB)), now=control.now)
    control.run(0.3)
    control.join("flaps")
    control.run(0.3)
    member = control.fleet.swarms[BLOB].members["flaps"]
    assert bool(member.doubted_until) != served and control.parent("h1") == ""
    control.run(DISBELIEF_S)
    assert not member.doubted_until


def test_a_doubted_host_that_is_alone_reads_the_origin_and_gives_way_to_others() -> None:
    control = Control()
    control.open("flaps")
    control.fleet.hosts["flaps"].doubt(control.now + DOUBT_S)
    control.join("flaps")
    control.run(0.3)
    assert control.parent("flaps") == ""
    control.join("h1")
    control.run(0.3)
    assert control.parent("h1") == ""
