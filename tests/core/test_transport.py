"""Which transport brings a blob: trees while they go well, a swarm when no tracker plans, and back
when that gives nothing."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from p2pdist.core.transport import (
    AWAY_S,
    DOCUMENT_S,
    ELSEWHERE_STILL_S,
    STILL_S,
    STUCK_S,
    SWARM_STILL_S,
    UNFED_S,
    Policy,
    Transport,
    TransportChoice,
)
from p2pdist.model.digest import Digest, digest_of

BLOB = digest_of(b"blob")


def choice(policy: Policy, torrent: bool | None = True, blob: Digest = BLOB) -> TransportChoice:
    return TransportChoice(policy, "h1", blob, 0.0, torrent)


def at(made: TransportChoice, now: float, *, fed: bool = True) -> Transport | None:
    return made.choose(fed=fed, now=now)


def moves_between(made: TransportChoice, early: float, late: float) -> Transport | None:
    """The transport that is chosen before `late`, and not before `early`."""
    before = made.transport
    assert at(made, early - 0.01) == before
    return at(made, late)


def test_trees_never_become_anything_else() -> None:
    made = choice("trees")
    made.tracker_changed(False, now=0.0)
    assert {at(made, 10.0 * step, fed=False) for step in range(50)} == {"trees"}


def test_a_swarm_is_joined_as_soon_as_its_torrent_is_known() -> None:
    """Until then nothing is begun, as it would only be broken off."""
    made = choice("swarm", None)
    assert at(made, 0.1) is None
    made.torrent = True
    assert at(made, 0.2) == "swarm"


def test_without_a_torrent_it_is_trees() -> None:
    made = choice("swarm", None)
    assert at(made, 0.1) is None
    made.torrent = False
    assert at(made, 0.2) == "trees"


def test_no_pull_waits_long_for_a_torrent_that_may_come_late() -> None:
    made = choice("swarm", None)
    assert at(made, DOCUMENT_S - 0.1) is None
    assert at(made, DOCUMENT_S + 0.1) == "trees"
    made.progressed(now=6.0)
    assert at(made, 6.1) == "trees"
    made.torrent = True
    assert at(made, 6.2) == "swarm"


def test_trees_go_on_without_a_tracker_as_long_as_pieces_come() -> None:
    made = choice("auto")
    at(made, 0.0)
    made.tracker_changed(False, now=1.0)
    for step in range(200):
        made.progressed(now=1.0 + step / 10)
        assert at(made, 1.0 + step / 10) == "trees"


def test_a_pull_that_stands_still_without_a_tracker_goes_to_the_swarm() -> None:
    made = choice("auto")
    at(made, 0.0)
    made.progressed(now=5.0)
    made.tracker_changed(False, now=5.0)
    assert moves_between(made, 5.0 + AWAY_S, 5.0 + 2 * AWAY_S) == "swarm"


def test_a_tracker_that_is_away_for_a_moment_changes_nothing() -> None:
    made = choice("auto")
    at(made, 0.0)
    made.progressed(now=5.0)
    made.tracker_changed(False, now=5.0)
    assert at(made, 5.0 + AWAY_S - 0.1) == "trees"
    made.tracker_changed(True, now=5.0 + AWAY_S)
    assert at(made, 5.0 + 2 * AWAY_S + STILL_S) == "trees"


def test_a_stripe_without_a_source_is_as_good_as_standing_still() -> None:
    """The other stripes go on meanwhile."""
    made = choice("auto")
    at(made, 0.0)
    made.tracker_changed(False, now=0.0)
    made.progressed(now=9.9)
    transports = [at(made, 9.9)]
    for step in range(100):
        now = 10.0 + step / 20
        made.progressed(now=now)
        transports.append(at(made, now, fed=False))
    assert transports[0] == "trees"
    assert transports.count("trees") / 20 <= 2 * UNFED_S
    assert transports[-1] == "swarm"


def test_a_host_that_tries_one_source_after_the_other_is_given_time() -> None:
    made = choice("auto")
    at(made, 0.0)
    made.tracker_changed(False, now=0.0)
    made.progressed(now=9.9)
    assert at(made, 9.9) == "trees"
    for step in range(100):
        made.progressed(now=10.0 + step / 2)
        assert at(made, 10.0 + step / 2, fed=step % 3 == 0) == "trees"


def test_long_stillness_is_enough_whatever_the_tracker_says() -> None:
    made = choice("auto")
    at(made, 0.0)
    made.progressed(now=2.0)
    assert moves_between(made, 2.0 + STUCK_S, 2.0 + 2 * STUCK_S) == "swarm"


def test_no_torrent_no_swarm() -> None:
    made = choice("auto", None)
    at(made, 0.0)
    made.tracker_changed(False, now=0.0)
    assert at(made, 100.0, fed=False) == "trees"
    made.torrent = False
    assert at(made, 200.0, fed=False) == "trees"


def test_a_preseed_stays_in_the_trees() -> None:
    """Only there it gives way to starts."""
    made = choice("auto")
    at(made, 0.0)
    made.tracker_changed(False, now=0.0)
    assert made.choose(fed=False, priority="preseed", now=50.0) == "trees"
    assert made.choose(fed=False, priority="start", now=50.0) == "swarm"


def in_swarm(now: float = 20.0) -> TransportChoice:
    made = choice("auto")
    at(made, 0.0)
    made.tracker_changed(False, now=0.0)
    assert at(made, now) == "swarm"
    return made


def test_a_tracker_that_is_back_does_not_end_a_swarm_that_gives() -> None:
    made = in_swarm()
    made.tracker_changed(True, now=21.0)
    made.planned()
    for step in range(100):
        made.progressed(now=21.0 + step / 4)
        assert at(made, 21.0 + step / 4) == "swarm"


def test_a_swarm_that_gives_nothing_is_left_sooner_once_a_tracker_has_planned() -> None:
    made = in_swarm()
    made.tracker_changed(True, now=21.0)
    made.planned()
    made.progressed(now=22.0)
    assert moves_between(made, 22.0 + ELSEWHERE_STILL_S, 22.0 + 2 * ELSEWHERE_STILL_S) == "trees"


def test_a_plan_of_its_own_making_does_not_count() -> None:
    made = in_swarm()
    made.planned()
    assert at(made, 20.0 + SWARM_STILL_S - 0.1) == "swarm"


def test_peers_of_version_1_are_tried_where_there_are_any() -> None:
    made = in_swarm()
    made.peers_v1 = True
    assert moves_between(made, 20.0 + ELSEWHERE_STILL_S, 20.0 + 2 * ELSEWHERE_STILL_S) == "swarm-v1"
    assert at(made, 1000.0) == "trees"


def test_transports_that_give_nothing_are_left_ever_later() -> None:
    """The last pauses are at least four times as long as the first ones."""
    made = in_swarm()
    moved, transport = [20.0], made.transport
    for step in range(40_000):
        now = 20.0 + step / 20
        if at(made, now) != transport:
            moved.append(now)
            transport = made.transport
    pauses = [later - earlier for earlier, later in pairwise(moved)]
    assert len(pauses) > 6
    assert pauses[4] > 3 * pauses[0]
    assert pauses[-2] + pauses[-1] > 4 * (pauses[0] + pauses[1])


def test_pieces_that_take_long_are_no_stillness() -> None:
    """Over a slow link one comes every three seconds."""
    made = choice("auto")
    at(made, 0.0)
    made.tracker_changed(False, now=0.0)
    for step in range(1, 30):
        now = 0.1 * step if step < 3 else 3.0 * (step - 2)
        made.progressed(now=now)
    assert at(made, 84.0 - 3.0 + 2.9) == "trees"


def test_hosts_move_at_times_of_their_own() -> None:
    """Of a hundred that stand still at once, no quarter moves in the same tenth of the time."""
    times = []
    for host in range(100):
        made = TransportChoice("auto", f"h{host}", BLOB, 0.0, True)
        at(made, 0.0)
        made.tracker_changed(False, now=0.0)
        times.append(next(step for step in range(1000) if at(made, step / 100) == "swarm"))
    assert min(times) >= AWAY_S * 100
    assert max(times) <= 2 * AWAY_S * 100 + 1
    width = int(AWAY_S * 10)
    assert max(sum(low <= time < low + width for time in times) for low in range(300, 600, width)) < 25


@given(st.lists(st.sampled_from(["piece", "away", "back", "plan", "unfed", "wait"]), max_size=60), st.booleans())
def test_the_torrent_decides_what_is_possible(events: list[str], torrent: bool) -> None:
    """Whatever happens: no swarm without a torrent, no version 1 without peers of it."""
    made = choice("auto", torrent)
    at(made, 0.0)
    now = 0.0
    for event in events:
        now += 2.0
        match event:
            case "piece":
                made.progressed(now=now)
            case "away" | "back":
                made.tracker_changed(event == "back", now=now)
            case "plan":
                made.planned()
        transport = at(made, now, fed=event != "unfed")
        assert transport in (("trees", "swarm") if torrent else ("trees",))


@pytest.mark.parametrize("policy", ["swarm", "auto"])
def test_a_torrent_that_lies_ends_the_swarm(policy: Policy) -> None:
    made = choice(policy)
    at(made, 0.0)
    made.tracker_changed(False, now=0.0)
    assert at(made, 7.0) == "swarm"
    made.torrent = False
    assert at(made, 7.1) == "trees"
