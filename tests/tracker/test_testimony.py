"""What children say of their parent's uplink: of which hosts people are told, and of which not."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from p2pdist.model.digest import digest_of
from p2pdist.model.pieces import PieceLayout
from tracker.core.host import Host
from tracker.core.member import FROM_ORIGIN
from tracker.core.monitor import testimony as module
from tracker.core.monitor.progress import YIELDS_TIMES, note_rates
from tracker.core.monitor.testimony import CHILDREN_MAX, PARENTS_MAX, STALLED_S, WINDOW_S
from tracker.core.swarm import Swarm

INTERVAL_S = 0.25
PIECE = 65536
USUAL = 8.0
"""Pieces of a stripe that a typical host gets in an interval."""

Rates = dict[tuple[str, int], float]


class Stage:
    """Swarms of two stripes, in which `s` gives stripe 0 to all children and `t` stripe 1. Hosts
    get what is usual, or what is said by host and stripe, in pieces an interval."""

    def __init__(self, children: int = 3, *, swarms: int = 1, slots: int = 8) -> None:
        self.testimony = module.Testimony()
        self.now = 100.0
        self.children = [f"c{number}" for number in range(children)]
        names = ["s", "t", *self.children]
        self.hosts = {name: Host(name) for name in names}
        self.swarms = {}
        self.exact: dict[tuple[str, int], float] = {}
        self.mute: set[str] = set()
        self.yielding = False
        self.told: dict[str, float] = {}
        for number in range(swarms):
            swarm = Swarm(digest_of(b"blob %d" % number), PieceLayout(4096 * PIECE, PIECE))
            for name in names:
                swarm.add(name, [0, 0], slots=slots, now=self.now)
                self.hosts[name].enter(swarm.blob, swarm.key)
            self.swarms[swarm.key] = swarm
            swarm.edges.set_now(self.now)
            swarm.edges.attach(0, "s", FROM_ORIGIN)
            swarm.edges.attach(1, "t", FROM_ORIGIN)
            swarm.edges.attach(1, "s", "t")
            swarm.edges.attach(0, "t", FROM_ORIGIN)
            for child in self.children:
                swarm.edges.attach(0, child, "s")
                swarm.edges.attach(1, child, "t")
            swarm.set_typical_rate(USUAL / INTERVAL_S)

    @property
    def swarm(self) -> Swarm:
        return next(iter(self.swarms.values()))

    def go(
        self, reports: int, rates: Rates | None = None, *, judged: Callable[[str], bool] = lambda host: False
    ) -> None:
        """Let time pass: each host reports in turn what came."""
        for _ in range(reports):
            self.now += INTERVAL_S
            for name in self.hosts:
                for swarm in self.swarms.values():
                    self._report(swarm, name, rates or {}, judged)

    def _report(self, swarm: Swarm, name: str, rates: Rates, judged: Callable[[str], bool]) -> None:
        member = swarm.members[name]
        counts = list(member.counts)
        for stripe in range(2):
            key = (f"{name} {swarm.key}", stripe)
            parent = member.parents[stripe]
            most = swarm.members[parent].counts[stripe] if parent else swarm.totals[stripe]
            exact = min(float(most), self.exact.get(key, 0.0) + rates.get((name, stripe), USUAL))
            self.exact[key] = max(exact, float(counts[stripe]))
            counts[stripe] = int(self.exact[key])
        typical = swarm.typical_rate
        note_rates(swarm, member, counts, now=self.now)
        swarm.set_typical_rate(typical)
        swarm.advance(name, counts, now=self.now)
        if name in self.mute:
            return
        member.hear(self.now, yields=self.yielding and name in self.children)
        self.testimony.reported(swarm, member, self.hosts, counts=True, now=self.now)
        for host, share in self.testimony.against(name, self.swarms, self.hosts, judged):
            self.told[host] = share

    def slow(self, rate: float, *names: str) -> Rates:
        """These children, or all, get so many pieces of stripe 0 in an interval."""
        return {(name, 0): rate for name in names or self.children}

    def stall(self) -> None:
        """All children complain of `s`, which gave them nothing for a while."""
        for swarm in self.swarms.values():
            for child in self.children:
                if swarm.members[child].parents[0] == "s":
                    self.testimony.stalled(swarm, swarm.members[child], 0, self.hosts, now=self.now)

    def move(self, *children: str) -> None:
        """These children have `t` as parent in both stripes."""
        for swarm in self.swarms.values():
            swarm.edges.set_now(self.now)
            for child in children:
                swarm.edges.attach(0, child, "t")


def test_children_that_get_far_less_than_by_others_tell() -> None:
    stage = Stage()
    stage.go(12, stage.slow(0.4))
    assert set(stage.told) == {"s"} and stage.told["s"] == pytest.approx(0.05, abs=0.03)


def test_children_that_yield_tell_as_well_and_take_twice_as_long() -> None:
    """Less is expected of what comes while their readers come first."""
    reports = []
    for yields in (False, True):
        stage = Stage()
        stage.go(2)
        reports.append(0)
        while "s" not in stage.told and reports[-1] < 40:
            stage.yielding = yields
            stage.go(1, stage.slow(0.4))
            reports[-1] += 1
    assert reports[0] < reports[1] <= YIELDS_TIMES * reports[0]


def test_a_piece_now_and_then_hides_nothing() -> None:
    """One piece of a large blob in a report looks like a good rate in that report."""
    stage = Stage()
    for number in range(16):
        stage.go(1, stage.slow(4.0 if number % 8 == 0 else 0.0))
    assert set(stage.told) == {"s"}


def test_children_that_left_have_told() -> None:
    """Each waits for a moment alone, one after the other, and then goes."""
    stage = Stage()
    for child in stage.children:
        stage.go(4, stage.slow(0.2, child))
        stage.move(child)
        stage.go(2)
    assert set(stage.told) == {"s"}


@pytest.mark.parametrize(("swarms", "told"), [(1, False), (3, True)])
def test_moments_in_several_swarms_add_up(swarms: int, told: bool) -> None:
    """One is too short to say anything."""
    stage = Stage(2, swarms=swarms)
    stage.go(3, stage.slow(0.0))
    stage.move(*stage.children)
    stage.go(8)
    assert bool(stage.told) is told


def test_what_stands_still_until_a_child_complains_counts() -> None:
    """The child leaves before two of its reports lie on each side of the wait."""
    stage = Stage(2)
    stage.go(3, stage.slow(0.0))
    stage.stall()
    stage.move(*stage.children)
    stage.go(4)
    assert set(stage.told) == {"s"}


def test_a_moment_in_which_nothing_came_at_all_is_no_parents_fault() -> None:
    """A switch restarts: all streams of both children stand still, and go on elsewhere."""
    stage = Stage(2)
    stage.go(2)
    still = {(child, stripe): 0.0 for child in stage.children for stripe in range(2)}
    stage.go(4, still)
    stage.stall()
    stage.move(*stage.children)
    stage.go(20)
    assert not stage.told


def test_one_child_alone_does_not_tell() -> None:
    stage = Stage()
    stage.go(30, stage.slow(0.2, "c0"))
    assert not stage.told


def test_one_child_is_enough_where_all_children_were_seen_to_lag() -> None:
    stage = Stage(1)
    stage.go(12, stage.slow(0.2), judged=lambda host: host == "s")
    assert set(stage.told) == {"s"}
    stage = Stage(1)
    stage.go(12, judged=lambda host: host == "s")
    assert not stage.told


def test_strangers_of_one_address_have_one_word() -> None:
    stage = Stage(8)
    for child in stage.children:
        stage.hosts[child].voter = "203.0.113.7"
    stage.go(30, stage.slow(0.0))
    assert not stage.told


@pytest.mark.parametrize(("content", "told"), [(1, False), (0, True)])
def test_children_that_get_their_share_speak_for_the_host(content: int, told: bool) -> None:
    """Two strangers say that they get nothing."""
    stage = Stage(2 + content)
    stage.go(30, stage.slow(0.0, "c0", "c1"))
    assert bool(stage.told) is told


def test_slow_downlinks_say_nothing_of_parents() -> None:
    stage = Stage(6)
    stage.go(40, {(child, stripe): 0.6 for child in stage.children for stripe in range(2)})
    assert not stage.told


def test_a_fleet_that_is_slow_as_a_whole_has_no_slow_host() -> None:
    stage = Stage(6)
    stage.go(40, {(name, stripe): 0.6 for name in stage.hosts for stripe in range(2)})
    assert not stage.told


def test_a_host_that_starves_itself_is_not_at_fault() -> None:
    stage = Stage(6)
    stage.go(40, stage.slow(0.6, "s"))
    assert not stage.told


def test_a_process_that_stands_still_has_no_slow_uplink() -> None:
    """It reports nothing meanwhile, and nothing comes from it."""
    stage = Stage(6)
    stage.go(8)
    stage.mute.add("s")
    stage.go(4, stage.slow(0.0))
    stage.move(*stage.children)
    stage.mute.clear()
    stage.go(20)
    assert not stage.told


def test_more_children_than_upload_slots_get_less_each() -> None:
    for rate, told in ((2.0, False), (0.2, True)):
        stage = Stage(8, slots=2)
        stage.go(20, stage.slow(rate))
        assert bool(stage.told) is told


def test_a_child_that_takes_all_it_can_may_get_less_of_one() -> None:
    """A stream that has just begun gets little beside one that has run for long."""
    for rate, told in ((2.4, False), (0.4, True)):
        stage = Stage(4)
        stage.go(20, stage.slow(rate) | {(child, 1): 2 * USUAL for child in stage.children} | {("t", 1): 2 * USUAL})
        assert bool(stage.told) is told


def test_what_was_long_ago_is_forgotten() -> None:
    stage = Stage(2)
    stage.go(4, stage.slow(0.0, "c0"))
    stage.move("c0")
    stage.now += WINDOW_S
    stage.testimony.expire(now=stage.now)
    assert not stage.testimony._words and not stage.testimony._marks
    stage.go(8, stage.slow(0.0, "c1"))
    assert not stage.told


def test_sums_are_few(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "HOSTS_MAX", 4)
    testimony = module.Testimony()
    for number in range(CHILDREN_MAX + 9):
        testimony._word("child", f"parent {number}", 1.0)
        testimony._word(f"child {number}", "parent", 1.0)
    assert len(testimony._words) <= 5
    assert all(len(words) <= PARENTS_MAX for words in testimony._words.values())
    pairs = {(child, parent) for child, words in testimony._words.items() for parent in words}
    assert pairs == {(child, parent) for parent, names in testimony._children.items() for child in names}


@settings(max_examples=20, deadline=None)
@given(
    limits=st.lists(st.lists(st.floats(0.0, 12.0), min_size=3, max_size=3), min_size=1, max_size=14),
    pauses=st.lists(st.booleans(), min_size=14, max_size=14),
    complaints=st.lists(st.booleans(), min_size=14, max_size=14),
)
def test_whatever_limits_receivers_no_parent_is_told_of(
    limits: list[list[float]], pauses: list[bool], complaints: list[bool]
) -> None:
    """Each child gets the same of both parents, however much that is at the moment. Now and then
    the origin stands still, and children complain of one parent."""
    stage = Stage(3)
    for rates, pause, complain in zip(limits, pauses, complaints, strict=False):
        rounds = {(child, stripe): rate for child, rate in zip(stage.children, rates, strict=True) for stripe in (0, 1)}
        if pause:
            rounds |= {(root, stripe): 0.0 for root in "st" for stripe in (0, 1)}
        stage.go(3, rounds)
        if complain and all(rate * STALLED_S / INTERVAL_S < 1 for rate in rates):
            stage.stall()
    assert not stage.told
