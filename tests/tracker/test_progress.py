"""Hosts that hold others up: silent, slow, overloaded; and the tail, when others are done."""

import pytest

from p2pdist.model.digest import digest_of
from p2pdist.model.messages import PROTOCOL_VERSION, Advance, Complaint, Hello, Holding, Pace, Report
from p2pdist.model.pieces import PieceLayout
from tracker.core import member as member_module
from tracker.core.capacity import Capacities
from tracker.core.events import Command, Drop, Received, Send, SessionClosed, SessionOpened, Tick
from tracker.core.fleet import Fleet
from tracker.core.member import Lag, Member
from tracker.core.monitor import probing
from tracker.core.monitor.probing import PROBE_INTERVAL_S
from tracker.core.monitor.progress import (
    FAIR_REPORTS,
    OTHERS_MIN,
    YIELDS_TIMES,
    little_beside,
    note_rates,
    slow_host,
)
from tracker.core.planning.planner import Planner
from tracker.core.rebalance.overload import spread_overload
from tracker.core.rebalance.tail import hand_over
from tracker.core.repair.remedies import SLOW_RECEIVER_COMPLAINTS, demote
from tracker.core.swarm import Swarm

BLOB, OTHER = digest_of(b"blob"), digest_of(b"another blob")
PIECE = 65536
PIECES = 1024
INTERVAL_S = 0.5


class Site:
    """A fleet whose hosts report every INTERVAL_S; `speed` is how many pieces of a stripe a host
    gets in that time, by (host, stripe)."""

    def __init__(self, hosts: int, *, other: bool = False) -> None:
        """`other`: the hosts receive another blob as well, of which they all get what is usual."""
        self.other = other
        self.fleet = Fleet(-100.0, report_interval_s=INTERVAL_S)
        self.now = 0.0
        self.counts = {f"h{number}": [0, 0] for number in range(hosts)}
        self.speed: dict[tuple[str, int], int] = {}
        self.mute: set[str] = set()
        self.yielding: set[str] = set()
        self.out: list[Command] = []
        for number, host in enumerate(self.counts):
            self.do(SessionOpened(number, Hello(PROTOCOL_VERSION, host, f"{host}:1")))
            for blob in (BLOB, OTHER)[: 1 + other]:
                self.do(Received(number, Holding(blob, PIECES * PIECE, PIECE, (0, 0), (None, None))))
        self.usual = [0, 0]
        self.go(1, speed=0)

    def do(self, event: object) -> None:
        self.out += self.fleet.handle(event, now=self.now)  # type: ignore[arg-type]

    def go(self, reports: int, *, speed: int = 20) -> None:
        """Let time pass: every host reports in turn, with what its parents let it have."""
        for _ in range(reports):
            self.usual = [min(PIECES // 2, count + speed) for count in self.usual]
            for number, (host, counts) in enumerate(self.counts.items()):
                if host not in self.mute:
                    before = tuple(counts)
                    for stripe in range(2):
                        counts[stripe] = min(PIECES // 2, counts[stripe] + self.speed.get((host, stripe), speed))
                    yields = host in self.yielding
                    news = yields or tuple(counts) != before  # as agents do
                    advanced = (Advance(BLOB, tuple(counts), None, yields),) if news else ()
                    if self.other:
                        advanced += (Advance(OTHER, tuple(self.usual)),)
                    self.do(Received(number, Report(advanced)))
            for _ in range(5):
                self.now += INTERVAL_S / 5
                self.do(Tick())

    @property
    def swarm(self) -> Swarm:
        return self.fleet.swarms[BLOB]

    def member(self, host: str) -> Member:
        return self.swarm.members[host]

    def inner(self) -> str:
        """A host with a parent and children in stripe 0."""
        return next(each.host for each in self.swarm.members.values() if each.parents[0] and each.children[0])

    def hold_up(self, host: str, speed: int) -> list[str]:
        """Hosts that receive stripe 0 through `host` get no more than `speed`."""
        below = [each for each in self.counts if each != host and self.swarm.edges.receives_through(0, each, host)]
        for each in below:
            self.speed[each, 0] = speed
        return below


def test_a_root_that_is_slow_makes_room_for_another() -> None:
    """Its children keep up with it, and only the other stripe shows that more would be possible."""
    site = Site(12)
    site.go(4)
    root = next(iter(site.swarm.edges.roots[0]))
    for host in site.counts:
        site.speed[host, 0] = 2
    site.go(4)
    assert root not in site.swarm.edges.roots[0]
    assert site.member(root).slots == 0
    assert len(site.swarm.edges.roots[0]) == 1


def test_a_host_that_alone_reads_several_stripes_is_not_compared_with_itself() -> None:
    """The first of the hosts that join one after the other reads everything, and has one uplink for
    it."""
    site = Site(1)
    site.go(2)
    (host,) = site.counts
    assert site.member(host).parents == ["", ""]
    site.speed[host, 0] = 2
    site.go(4)
    assert site.member(host).slots == 2


def test_roots_are_not_called_slow_where_pieces_come_in_bursts() -> None:
    """Large pieces over a slow link: now this stripe gets four, now that one."""
    site = Site(12)
    site.go(4)
    for step in range(40):
        for host in site.counts:
            site.speed[host, 0], site.speed[host, 1] = (4, 1) if step % 4 == 0 else (1, 4) if step % 4 == 2 else (0, 0)
        site.go(1)
    assert all(member.slots == 2 for member in site.swarm.members.values())


@pytest.mark.parametrize("other", [False, True])
def test_a_host_with_several_swarms_is_slow_where_all_of_them_show_it(other: bool) -> None:
    """Its children in one swarm get next to nothing of its uplink, those in another what is
    usual: nothing says that the link is slow."""
    site = Site(12, other=other)
    site.go(4)
    host = next(
        each for each in site.counts if site.member(each).parents[0] and len(site.member(each).children[0]) >= 2
    )
    site.hold_up(host, 2)
    site.go(4)
    assert (site.member(host).slots == 0) is not other


def test_a_swarm_that_has_ended_says_nothing_of_a_link() -> None:
    site = Site(12, other=True)
    site.usual = [PIECES // 2] * 2
    site.go(4, speed=0)
    site.go(4)
    slow = site.inner()
    site.hold_up(slow, 2)
    site.go(4)
    assert site.member(slow).slots == 0


def test_roots_report_often_from_the_start() -> None:
    site = Site(12)
    asked = {each.session for each in site.out if isinstance(each, Send) and isinstance(each.message, Pace)}
    names = list(site.counts)
    assert {names[number] for number in asked} >= {root for roots in site.swarm.edges.roots for root in roots}


def test_no_host_is_penalised_for_a_slow_origin() -> None:
    site = Site(12)
    site.go(4)
    roots = [dict(each) for each in site.swarm.edges.roots]
    site.go(8, speed=3)
    assert site.swarm.edges.roots == roots
    assert all(member.slots == 2 for member in site.swarm.members.values())


def test_a_host_that_lags_where_there_is_something_and_starves_elsewhere_is_slow_itself() -> None:
    """Another slow host starves it in one stripe, which says nothing of its own downlink."""
    site = Site(24)
    site.go(4)
    slow = next(
        each
        for each in site.swarm.members.values()
        if each.parents[1] and each.parents[0] and len(site.member(each.parents[1]).children[1]) == 2
    )
    above: str | None = slow.parents[0]
    while above:
        site.speed[above, 0] = 2
        above = site.member(above).parents[0]
    for host in (each for each in site.counts if site.swarm.edges.receives_through(0, each, slow.parents[0] or "")):
        site.speed[host, 0] = 2
    site.speed[slow.host, 1] = 2
    site.hold_up(slow.host, 2)
    site.go(4)
    assert slow.slow_receiver


def test_a_host_that_says_nothing_while_its_children_wait_loses_them() -> None:
    site = Site(12)
    site.go(4)
    gone = site.inner()
    children = list(site.member(gone).children[0])
    site.mute.add(gone)
    site.hold_up(gone, 0)
    site.go(4)
    assert all(site.member(child).parents[0] not in (None, gone) for child in children)
    assert site.member(gone).load == 0
    assert not site.member(gone).present


def test_a_quiet_host_whose_children_go_on_is_left_alone() -> None:
    """Reports may be late when nothing else is."""
    site = Site(12)
    site.go(4)
    quiet = site.inner()
    children = list(site.member(quiet).children[0])
    site.mute.add(quiet)
    site.go(4)
    assert list(site.member(quiet).children[0]) == children


def test_a_silent_host_that_speaks_again_gets_parents() -> None:
    site = Site(12)
    site.go(4)
    host = site.inner()
    site.mute.add(host)
    site.hold_up(host, 0)
    site.go(4)
    assert not site.member(host).present
    site.mute.clear()
    site.go(2)
    assert site.member(host).present
    assert all(parent is not None for parent in site.member(host).parents)


def test_a_silent_host_that_was_given_up_is_made_to_say_anew_what_it_holds() -> None:
    site = Site(12)
    site.go(4)
    host = site.inner()
    number = list(site.counts).index(host)
    site.mute.add(host)
    site.hold_up(host, 0)
    site.go(12)
    assert host not in site.swarm.members
    assert Drop(number) in site.out


def test_a_slow_uplink_is_found_within_a_few_reports_and_becomes_a_leaf() -> None:
    site = Site(12)
    site.go(2)
    slow = site.inner()
    site.hold_up(slow, 2)
    site.go(3)
    assert site.member(slow).load == 0
    assert site.member(slow).slots == 0
    assert site.member(slow).parents[0]
    assert not [each for each in site.swarm.members.values() if each.load > each.slots and each.slots]


def test_a_new_parent_is_not_called_slow_for_what_comes_from_the_old_one() -> None:
    """The piece under way is waited for, and may take long where the old parent was slow."""
    for slow_reports, slots in ((2, 2), (8, 0)):
        site = Site(12)
        site.go(4)
        parent = next(each for each in site.swarm.members.values() if each.parents[0] and len(each.children[0]) == 2)
        children = list(parent.children[0])
        site.swarm.edges.set_now(site.now)
        for child in children:
            site.swarm.edges.detach(0, child)
            site.swarm.edges.attach(0, child, parent.host)
            site.speed[child, 0] = 1
        for _ in range(slow_reports):
            site.go(1)
        for child in children:
            site.speed[child, 0] = 20
        site.go(4)
        assert parent.slots == slots


def test_a_slow_downlink_is_not_penalised_on_the_parent() -> None:
    """Its other stripes lag as well, and its sisters do not."""
    site = Site(12)
    site.go(2)
    parent = site.inner()
    child = next(iter(site.member(parent).children[0]))
    slots = site.member(parent).slots
    site.speed[child, 0] = site.speed[child, 1] = 2
    site.go(5)
    assert site.member(parent).slots == slots


def with_a_slow_downlink() -> tuple[Site, Member]:
    """A site of twelve, and one of its leaves that was called slow."""
    site = Site(12)
    site.go(2)
    child = next(each for each in site.swarm.members.values() if all(each.parents) and not each.load)
    site.speed[child.host, 0] = site.speed[child.host, 1] = 2
    site.go(5)
    assert child.slow_receiver
    return site, child


def with_a_laggard(*, since: float) -> tuple[Swarm, Member]:
    """A swarm in which a leaf lags in both stripes since then."""
    swarm = full(12)
    swarm.typical_rate = 40.0
    late = next(each for each in swarm.members.values() if all(each.parents) and not each.load)
    for each in swarm.members.values():
        each.counts, each.rates, each.heard_at = [60, 60], [40.0, 40.0], 1.5
    late.counts, late.rates, late.lags = [20, 20], [5.0, 5.0], [Lag(since, 18), Lag(since, 18)]
    return swarm, late


def test_a_host_whose_uplink_was_just_found_to_be_slow_has_time_to_show_its_downlink() -> None:
    """Acknowledgements waited behind what it sent."""
    swarm, late = with_a_laggard(since=1.1)
    late.slots = 0
    for relieved_at, found in ((1.0, None), (0.8, late.host)):
        late.relieved_at = relieved_at
        judged = slow_host(swarm, late, now=1.6)
        assert (judged and judged[0]) == found


def test_a_receiver_that_yields_is_not_called_slow() -> None:
    """The program that runs on its host waits for other pieces than come next. Once it says so no
    more, it is judged as others are."""
    site = Site(12)
    site.go(2)
    child = next(each for each in site.swarm.members.values() if all(each.parents) and not each.load)
    slots = {name: member.slots for name, member in site.swarm.members.items()}
    parents = list(child.parents)
    site.yielding.add(child.host)
    site.speed[child.host, 0] = site.speed[child.host, 1] = 8
    site.go(6)
    assert not child.slow_receiver and child.parents == parents
    assert {name: member.slots for name, member in site.swarm.members.items()} == slots
    site.yielding.clear()
    site.go(4)
    assert child.slow_receiver


def reports_until_slow(speed: int, *, yields: str = "") -> int:
    """How many reports it takes to find a slow uplink that gives `speed`, where the `children`, or
    the `parent`, say that they yield."""
    site = Site(12)
    site.go(2)
    slow = site.inner()
    below = site.hold_up(slow, speed)
    site.yielding.update({"children": below, "parent": [slow]}.get(yields, []))
    for reports in range(1, 20):
        site.go(1)
        if site.member(slow).slots < 2:
            return reports
    raise AssertionError("the slow uplink was not found")


def test_a_slow_parent_of_children_that_yield_is_found_within_twice_as_long() -> None:
    """A trickle is no plain sign then, and takes as long as anything else."""
    assert reports_until_slow(8) < reports_until_slow(8, yields="children") <= YIELDS_TIMES * reports_until_slow(8)
    assert reports_until_slow(2, yields="children") <= YIELDS_TIMES * reports_until_slow(8)


@pytest.mark.parametrize("speed", [2, 8])
def test_a_slow_parent_that_says_that_it_yields_is_found_as_soon(speed: int) -> None:
    """What an agent says of its own readers is no use to its uplink."""
    assert reports_until_slow(speed, yields="parent") == reports_until_slow(speed)


def test_a_silent_parent_is_found_as_soon_where_its_children_yield() -> None:
    for yields in (False, True):
        site = Site(12)
        site.go(4)
        gone = site.inner()
        site.mute.add(gone)
        below = site.hold_up(gone, 0)
        site.yielding.update(below if yields else ())
        site.go(4)
        assert not site.member(gone).present and not site.member(gone).load


@pytest.mark.parametrize("always", [True, False])
def test_what_an_agent_says_of_yielding_counts_for_a_limited_time(
    always: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where it says so now and then: it could be slow for ever, and those below it with it."""
    monkeypatch.setattr(member_module, "YIELDS_MAX_S", 6 * INTERVAL_S)
    site = Site(12)
    site.go(2)
    child = next(each for each in site.swarm.members.values() if all(each.parents) and not each.load)
    site.speed[child.host, 0] = site.speed[child.host, 1] = 2
    for report in range(12):
        site.yielding = {child.host} if always or report % 2 == 0 else set()
        assert not child.slow_receiver or report > 5
        site.go(1)
    site.yielding = {child.host}
    site.go(4)
    assert child.slow_receiver


@pytest.mark.parametrize(
    ("others", "host", "little"), [(40.0, 5.0, True), (40.0, 20.0, False), (8.0, 5.0, False), (8.0, 1.0, True)]
)
def test_a_host_that_gets_what_others_get_now_is_not_slow_though_more_was_usual(
    others: float, host: float, little: bool
) -> None:
    swarm = full(12)
    swarm.typical_rate = 40.0
    late, *rest = (each for each in swarm.members.values() if all(each.parents))
    for each in rest:
        each.rates = [others, others]
    late.rates = [host, host]
    compared = [(each.host, [swarm]) for each in rest]
    assert len(compared) >= OTHERS_MIN
    assert little_beside([swarm], late.host, compared, host / 40.0, downlink=True) == little
    few = compared[: OTHERS_MIN - 1]
    assert little_beside([swarm], late.host, few, 0.0, downlink=True), "there is nothing to compare it with"


def test_a_host_in_several_swarms_may_lag_in_one_for_as_many_times_as_long() -> None:
    """They have its downlink in turns."""
    swarm, late = with_a_laggard(since=1.2)
    late.relieved_at = -10.0
    for turns, now, found in ((1, 1.6, True), (4, 1.6, False), (4, 2.2, True)):
        assert (slow_host(swarm, late, turns=turns, now=now) is not None) == found


def test_who_has_whole_stripes_does_not_raise_what_is_typical() -> None:
    """It gets the others as fast as its downlink can, and hosts that lack all of them would look
    slow beside it."""
    swarm = full(4)
    host = swarm.members["h0"]
    for first, raised in ((0, True), (swarm.totals[0], False)):
        swarm.typical_rate, host.counts, host.heard_at = 40.0, [first, 0], 0.0
        for second in range(20, 2000, 20):
            counts = [first, min(second, swarm.totals[1])]
            note_rates(swarm, host, counts, now=second / 80)
            host.counts, host.heard_at = counts, second / 80
        assert (swarm.typical_rate > 60) is raised
        assert raised or swarm.typical_rate == pytest.approx(40.0)


def test_one_stripe_that_fills_a_downlink_is_not_held_against_the_parent_of_another() -> None:
    """A stream that has just begun gets little beside one that has run for long."""
    for other, lags in ((64, False), (40, True)):
        swarm = full(4)
        parent = next(each for each in swarm.members.values() if each.children[0])
        child = swarm.members[next(iter(parent.children[0]))]
        swarm.typical_rate, parent.counts, parent.rates = 40.0, [100, 100], [40.0, 40.0]
        child.counts, child.heard_at = [20, 20], 0.0
        note_rates(swarm, child, [28, 20 + other], now=1.0)
        assert (child.lags[0] is not None) is lags


def test_a_downlink_on_which_a_fair_share_arrives_is_not_slow() -> None:
    """What was called slow, since acknowledgements waited behind uploads, shares its parents with
    others as if it took nothing."""
    for speed, slow_receiver in (((6, 16), False), ((8, 8), True)):
        site, child = with_a_slow_downlink()
        site.swarm.passes.strained = False
        site.speed[child.host, 0], site.speed[child.host, 1] = speed
        site.go(FAIR_REPORTS)
        assert child.slow_receiver is slow_receiver
        assert not site.swarm.passes.strained
        assert [each.load for each in site.swarm.members.values()] == [
            sum(not site.member(name).slow_receiver for names in each.children for name in names)
            for each in site.swarm.members.values()
        ]


def test_a_slow_downlink_on_which_pieces_come_in_bursts_stays_slow() -> None:
    site, child = with_a_slow_downlink()
    for speed in (2, 2, 12) * 5:
        site.speed[child.host, 0] = site.speed[child.host, 1] = speed
        site.go(1)
        assert child.slow_receiver


def test_one_piece_now_and_then_does_not_make_a_downlink_quick() -> None:
    """Nothing that came in the reports between them must count as if as much came in each."""
    site, child = with_a_slow_downlink()
    for step in range(40):
        site.speed[child.host, 0], site.speed[child.host, 1] = (20, 20) if step % 8 == 0 else (0, 0)
        site.go(1, speed=2)
        assert child.slow_receiver


def test_a_slow_downlink_does_not_lower_what_is_typical() -> None:
    """When only such hosts are left they would else be found to be like all others, again and
    again."""
    site, child = with_a_slow_downlink()
    typical = site.swarm.typical_rate
    site.mute = set(site.counts) - {child.host}
    site.go(40)
    assert child.slow_receiver and site.swarm.typical_rate == typical


def test_over_a_slow_downlink_a_piece_that_takes_long_is_not_held_against_the_parent() -> None:
    site, child = with_a_slow_downlink()
    parent = child.parents[0]
    number = list(site.counts).index(child.host)
    site.speed[child.host, 0] = 0
    site.go(1)
    for told in range(1, SLOW_RECEIVER_COMPLAINTS + 1):
        assert child.parents[0] == parent
        site.do(Received(number, Complaint(BLOB, 0, parent or "", "stalled")))
        assert child.complaints[0] == told
    site.go(1)
    assert child.parents[0] not in (None, parent)


def test_where_all_have_whole_stripes_what_is_typical_can_still_rise() -> None:
    """Every host goes on from one whole stripe, and the first to report is slow."""
    swarm = full(12)
    whole = swarm.totals[0]
    for step in range(1, 41):
        for number, member in enumerate(swarm.members.values()):
            counts = (whole, member.counts[1] + (10 if number else step == 1))
            member.counts = (whole, *member.counts[1:])
            note_rates(swarm, member, counts, now=step / 4)
            member.counts, member.heard_at = counts, step / 4
    assert swarm.typical_rate > 15


def test_hosts_that_lost_all_their_slots_by_mistake_get_them_back_when_somebody_hangs_there_all_the_same() -> None:
    site = Site(4)
    site.go(3)
    for host in site.counts:
        site.fleet.capacities.mark_slow(host, 0.01, downlink=False, now=site.now)
        site.fleet.reputation.fit_children(site.fleet.hosts[host], "children lag", now=site.now)
    site.go(8)
    site.counts["h9"] = [0, 0]
    site.do(SessionOpened(4, Hello(PROTOCOL_VERSION, "h9", "h9:1")))
    site.do(Received(4, Holding(BLOB, PIECES * PIECE, PIECE, (0, 0), (None, None))))
    site.go(12)
    assert any(site.member(host).slots for host in ("h0", "h1", "h2", "h3"))


def test_a_child_that_alone_gets_little_gets_another_parent() -> None:
    """Neither host is slow: it is the connection."""
    site = Site(12)
    site.go(2)
    parent = next(each.host for each in site.swarm.members.values() if each.parents[0] and len(each.children[0]) == 2)
    child = next(iter(site.member(parent).children[0]))
    site.hold_up(child, 2)
    site.speed[child, 0] = 2
    site.go(5)
    assert site.member(child).parents[0] not in (None, parent)
    assert site.member(parent).slots == site.member(child).slots == 2


def test_a_host_that_is_a_little_slower_keeps_its_children() -> None:
    site = Site(12)
    site.go(2)
    host = site.inner()
    site.hold_up(host, 12)
    site.go(5)
    assert site.member(host).children[0]


def test_in_a_large_fleet_those_around_a_complaint_are_asked_to_report_often_and_who_does_not_is_away() -> None:
    site = Site(12)
    site.fleet.report_interval_s = 5.0
    site.go(1)
    gone = site.inner()
    child = next(iter(site.member(gone).children[0]))
    numbers = {host: number for number, host in enumerate(site.counts)}
    site.mute.add(gone)
    site.hold_up(gone, 0)
    site.do(Received(numbers[child], Complaint(BLOB, 0, gone, "stalled")))
    told = {
        each.session: each.message for each in site.out if isinstance(each, Send) and isinstance(each.message, Pace)
    }
    assert told[numbers[child]] == told[numbers[gone]] == Pace(PROBE_INTERVAL_S)
    site.go(3)
    assert not site.member(gone).load
    site.out.clear()
    site.go(8)
    assert Send(numbers[child], Pace(5.0)) in site.out


def test_a_host_that_was_called_slow_is_tried_again_where_slots_are_short() -> None:
    """And for good if it was a mistake."""
    site = Site(12)
    site.go(2)
    mistaken = site.inner()
    below = site.hold_up(mistaken, 0)
    site.go(3)
    assert site.member(mistaken).slots == 0
    for host in below:
        site.speed[host, 0] = 20
    site.go(8)
    assert site.member(mistaken).slots == 0  # no host lacks its slots
    site.swarm.passes.strained = True
    for other in [each for each in site.swarm.members.values() if each.load == 2][:2]:
        demote(site.swarm, other, 0, now=site.now)
    site.fleet.schedule.ask(BLOB, "test", site.now)
    site.go(6)
    assert site.member(mistaken).slots == 2


def test_reports_that_were_kept_waiting_say_nothing_of_the_pace() -> None:
    """After a pause of the tracker the next ones come at once."""
    site = Site(12)
    site.go(4)
    typical = site.swarm.typical_rate
    for counts in site.counts.values():
        for stripe in range(2):
            counts[stripe] += 20
    for number, counts in enumerate(site.counts.values()):
        site.now += 0.0001
        site.do(Received(number, Report((Advance(BLOB, tuple(counts)),))))
    assert site.swarm.typical_rate <= 4 * typical


def test_a_host_that_comes_back_is_no_member_of_what_it_does_not_confirm() -> None:
    site = Site(4)
    site.go(2)
    site.do(SessionClosed(1))
    site.do(SessionOpened(9, Hello(PROTOCOL_VERSION, "h1", "h1:1")))
    site.do(Received(9, Report()))
    assert not site.member("h1").present


def test_a_host_says_anew_where_it_stands() -> None:
    site = Site(4)
    site.do(SessionClosed(1))
    site.do(SessionOpened(9, Hello(PROTOCOL_VERSION, "h1", "h1:1", "z", "r")))
    site.do(Received(9, Holding(BLOB, PIECES * PIECE, PIECE, (0, 0), (None, None))))
    assert "h1" in site.swarm.racks["z r"]


def test_a_limited_host_that_is_slow_as_well_has_no_slots_and_not_fewer() -> None:
    capacities = Capacities()
    capacities.sample("a", 10**8, 1.0)
    for limit in (1e5, 1.7e308):
        capacities.declare("b", limit)
        capacities.mark_slow("b", 0.1, downlink=True, now=0.0)
        assert capacities.slots("b", 2, now=0.0) == 0


def test_complaints_of_strangers_about_strangers_leave_no_trace() -> None:
    site = Site(4)
    for number in range(50):
        site.do(Received(0, Complaint(BLOB, 0, f"nobody{number}", "corrupt")))
    site.do(Received(0, Complaint(BLOB, 0, "h0", "corrupt")))
    assert not site.swarm.edges.avoided
    leaseless = next(number for number, host in enumerate(site.counts) if site.member(host).parents[0])
    for _ in range(3):
        site.do(Received(leaseless, Complaint(BLOB, 0, "", "corrupt")))
    assert not site.swarm.origin.failures


def full(hosts: int) -> Swarm:
    swarm = Swarm(BLOB, Site(1).swarm.layout)
    for number in range(hosts):
        swarm.add(f"h{number}", [0, 0], slots=2, now=0.0)
    Planner().plan(swarm, leases=8)
    return swarm


def test_idle_hosts_that_have_all_take_over_those_who_lack_most() -> None:
    swarm = full(12)
    late = [host for host in swarm.members if swarm.members[host].parents[0] and not swarm.members[host].children[0]][
        :2
    ]
    for host in swarm.members:
        if host not in late:
            swarm.advance(host, [512, 512], now=9.0)
    for host in late:
        swarm.advance(host, [400, 512], now=9.0)
    while hand_over(swarm):
        pass
    parents = [swarm.members[host].parents[0] for host in late]
    assert len(set(parents)) == 2
    assert all(swarm.members[parent or ""].load == 1 for parent in parents)


def test_no_host_is_moved_for_a_few_pieces() -> None:
    swarm = full(12)
    late = next(host for host, member in swarm.members.items() if member.parents[0])
    parent = swarm.members[late].parents[0]
    for host in swarm.members:
        swarm.advance(host, [508, 512] if host in (late, parent) else [512, 512], now=9.0)
    assert hand_over(swarm) == 0


def test_a_third_child_goes_to_a_host_with_an_idle_slot() -> None:
    swarm = full(12)
    member = next(each for each in swarm.members.values() if len(each.children[0]) == 2)
    child = next(
        each for each in swarm.members.values() if each.parents[0] not in (None, "", member.host) and not each.children[0]
        and not swarm.edges.receives_through(0, member.host, each.host)
    )  # fmt: skip
    swarm.edges.attach(0, child.host, member.host)
    swarm.passes.strained = True
    for step in range(5):
        spread_overload(swarm, now=step * 0.5)
    assert not [each for each in swarm.members.values() if each.load > each.slots]
    assert not swarm.passes.strained


def test_where_slots_are_short_the_burden_goes_round() -> None:
    swarm = full(12)
    # Three hosts lose their slots: the others have fewer than are needed.
    for member in [each for each in swarm.members.values() if each.load and "" not in each.parents][:3]:
        demote(swarm, member, 0, now=0.0)
    Planner().plan(swarm, leases=8)
    carried = set()
    for step in range(40):
        swarm.edges.set_now(step * 0.5)
        spread_overload(swarm, now=swarm.edges.now)
        carried |= {each.host for each in swarm.members.values() if each.slots and each.load > each.slots}
        assert all(swarm.edges.rooted(stripe, host) for stripe in range(2) for host in swarm.members)
    assert len(carried) >= 4


def test_in_a_large_fleet_those_far_below_a_slow_host_are_not_asked_to_report_often() -> None:
    """Nor are its children any longer, once it has been judged."""
    site = Site(12)
    site.fleet.report_interval_s = 5.0
    site.go(1)
    slow = site.inner()
    watched = site.fleet.probing.asked_at
    child = next(each for each in site.member(slow).children[0] if each not in watched)
    numbers = {host: number for number, host in enumerate(site.counts)}
    known = {slow, *watched, *site.member(slow).children[0]}
    below = next(host for host in site.counts if host not in known)
    site.out.clear()
    site.do(Received(numbers[child], Complaint(BLOB, 0, slow, "slow")))
    assert Send(numbers[child], Pace(PROBE_INTERVAL_S)) in site.out
    site.out.clear()
    site.do(Received(numbers[below], Complaint(BLOB, 0, child, "slow")))
    assert Send(numbers[below], Pace(PROBE_INTERVAL_S)) not in site.out
    site.hold_up(slow, 0)
    site.go(3)
    assert site.member(slow).slots == 0
    assert Send(numbers[child], Pace(5.0)) in site.out


def test_who_finds_no_room_is_asked_to_report_often_once_there_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """At a tick: no host need complain again."""
    site = Site(12)
    site.fleet.report_interval_s = 5.0
    site.go(1)
    slow = site.inner()
    child = next(each for each in site.member(slow).children[0] if each not in site.fleet.probing.asked_at)
    number = list(site.counts).index(child)
    monkeypatch.setattr(probing, "PROBED_MAX", len(site.fleet.probing.asked_at))
    site.out.clear()
    site.do(Received(number, Complaint(BLOB, 0, slow, "slow")))
    site.do(Tick())
    assert Send(number, Pace(PROBE_INTERVAL_S)) not in site.out
    monkeypatch.undo()
    site.do(Tick())
    assert Send(number, Pace(PROBE_INTERVAL_S)) in site.out


def test_a_lone_child_says_nothing_against_a_host_from_which_it_gets_another_stripe_well() -> None:
    """A slow uplink would be slow for both; where hosts joined one after another each has one
    child, for all stripes."""
    for other, judged in (("parent", None), ("root", "parent")):
        swarm = Swarm(BLOB, PieceLayout(PIECES * PIECE, PIECE))
        swarm.typical_rate = 20.0
        for host, counts, parents in (
            ("root", [60, 60], ["", ""]),
            ("parent", [50, 50], ["root", "root"]),
            ("child", [20, 45], ["parent", other]),
        ):
            member = swarm.add(host, counts, slots=2, now=0.0)
            member.rates = [20.0, 20.0]
            for stripe, above in enumerate(parents):
                swarm.edges.attach(stripe, host, above)
        child = swarm.members["child"]
        child.rates, child.lags = [1.0, 20.0], [Lag(0.0, 18), None]
        found = slow_host(swarm, child, now=2.0)
        assert (found and found[0]) == judged
