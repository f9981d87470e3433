"""From one way to the other: who writes ends before who comes next begins."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from p2pdist.core.transport import LEAVE_S, STUCK_S, Begin, CutShort, Handover, Leave, Policy, Step, TransportChoice
from p2pdist.model.digest import digest_of


def pair(policy: Policy = "auto", torrent: bool | None = True) -> tuple[Handover, TransportChoice]:
    return Handover(), TransportChoice(policy, "h1", digest_of(b"blob"), 0.0, torrent)


def steer(handover: Handover, choice: TransportChoice, now: float, writers: int) -> list[Step]:
    return handover.steer(choice, writers=writers, fed=True, waited_for=True, now=now)


def test_streams_end_before_the_swarm_begins() -> None:
    handover, choice = pair()
    assert steer(handover, choice, 0.0, 2) == []
    still = 2 * STUCK_S
    assert steer(handover, choice, still, 2) == [Leave("trees", "swarm")]
    assert handover.way is None and handover.target == "swarm"
    assert steer(handover, choice, still + LEAVE_S / 2, 1) == []
    assert steer(handover, choice, still + LEAVE_S, 1) == [CutShort()]
    assert steer(handover, choice, still + LEAVE_S, 0) == [Begin("swarm")]
    assert steer(handover, choice, still + LEAVE_S, 1) == []


def test_where_nobody_writes_it_is_done_at_once() -> None:
    handover, choice = pair()
    steer(handover, choice, 0.0, 0)
    assert steer(handover, choice, 2 * STUCK_S, 0) == [Leave("trees", "swarm"), Begin("swarm")]


def test_who_waits_for_the_torrent_begins_nothing() -> None:
    handover, choice = pair("swarm", None)
    assert steer(handover, choice, 0.0, 0) == [Leave("trees", None)]
    assert steer(handover, choice, 0.1, 0) == []
    choice.torrent = True
    assert steer(handover, choice, 0.2, 0) == [Begin("swarm")]


@given(st.lists(st.tuples(st.floats(0, 5), st.booleans(), st.booleans(), st.integers(0, 3)), max_size=80))
def test_whatever_happens_a_way_begins_only_when_nobody_writes(
    events: list[tuple[float, bool, bool, int]],
) -> None:
    """And the one before it was left."""
    handover, choice = pair()
    now, running = 0.0, "trees"
    for later, piece, tracker, writers in events:
        now += later
        if piece:
            choice.progressed(now=now)
        choice.tracker_changed(tracker, now=now)
        for step in steer(handover, choice, now, writers):
            match step:
                case Leave(way):
                    assert way == running
                    running = ""
                case Begin(way):
                    assert not writers and not running
                    running = way
                case CutShort():
                    assert writers and not running
