"""From one transport to the other: what writes ends before the next one begins."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from p2pdist.core.transport import (
    LEAVE_S,
    STUCK_S,
    Begin,
    CutShort,
    Leave,
    Policy,
    Step,
    TransportChoice,
    TransportSwitch,
)
from p2pdist.model.digest import digest_of


def pair(policy: Policy = "auto", torrent: bool | None = True) -> tuple[TransportSwitch, TransportChoice]:
    return TransportSwitch(), TransportChoice(policy, "h1", digest_of(b"blob"), 0.0, torrent)


def steer(switch: TransportSwitch, choice: TransportChoice, now: float, writers: int) -> list[Step]:
    return switch.steer(choice, writers=writers, fed=True, priority="start", now=now)


def test_streams_end_before_the_swarm_begins() -> None:
    switch, choice = pair()
    assert steer(switch, choice, 0.0, 2) == []
    still = 2 * STUCK_S
    assert steer(switch, choice, still, 2) == [Leave("trees", "swarm")]
    assert switch.transport is None and switch.target == "swarm"
    assert steer(switch, choice, still + LEAVE_S / 2, 1) == []
    assert steer(switch, choice, still + LEAVE_S, 1) == [CutShort()]
    assert steer(switch, choice, still + LEAVE_S, 0) == [Begin("swarm")]
    assert steer(switch, choice, still + LEAVE_S, 1) == []


def test_where_nothing_writes_it_switches_at_once() -> None:
    switch, choice = pair()
    steer(switch, choice, 0.0, 0)
    assert steer(switch, choice, 2 * STUCK_S, 0) == [Leave("trees", "swarm"), Begin("swarm")]


def test_a_pull_that_waits_for_the_torrent_begins_nothing() -> None:
    switch, choice = pair("swarm", None)
    assert steer(switch, choice, 0.0, 0) == [Leave("trees", None)]
    assert steer(switch, choice, 0.1, 0) == []
    choice.torrent = True
    assert steer(switch, choice, 0.2, 0) == [Begin("swarm")]


@given(st.lists(st.tuples(st.floats(0, 5), st.booleans(), st.booleans(), st.integers(0, 3)), max_size=80))
def test_whatever_happens_a_transport_begins_only_when_nothing_writes(
    events: list[tuple[float, bool, bool, int]],
) -> None:
    """And the one before it was left."""
    switch, choice = pair()
    now, running = 0.0, "trees"
    for later, piece, tracker, writers in events:
        now += later
        if piece:
            choice.progressed(now=now)
        choice.tracker_changed(tracker, now=now)
        for step in steer(switch, choice, now, writers):
            match step:
                case Leave(transport):
                    assert transport == running
                    running = ""
                case Begin(transport):
                    assert not writers and not running
                    running = transport
                case CutShort():
                    assert writers and not running
