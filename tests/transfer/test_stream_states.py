"""What one stream may still do, as its table of transitions says."""

from __future__ import annotations

from typing import get_args

import pytest

from p2pdist.transfer.stream.protocol import TRANSITIONS, Cause, State


def after(*causes: Cause) -> State:
    """The state of a stream that these causes have changed, one after the other."""
    state: State = "opening"
    for cause in causes:
        state = TRANSITIONS.get((state, cause), state)
    return state


@pytest.mark.parametrize(
    ("causes", "state"),
    [
        (["responded"], "receiving"),
        (["responded", "piece stored", "piece stored"], "receiving"),
        (["responded", "all stored"], "end due"),
        (["responded", "all stored", "close"], "end optional"),
        (["responded", "all stored", "finish now"], "end due"),
        (["responded", "finish after piece"], "last piece"),
        (["responded", "finish after piece", "piece stored"], "closing"),
        (["responded", "finish after piece", "all stored"], "end due"),
        (["responded", "finish after piece", "close"], "closing"),
        (["responded", "finish now"], "closing"),
        (["finish now", "responded"], "closing"),
        (["close", "responded", "all stored"], "closing"),
    ],
)
def test_causes_lead_to_a_state(causes: list[Cause], state: State) -> None:
    """A closed stream stays closed; one that has everything waits for its closing frame."""
    assert after(*causes) == state


def test_every_state_is_reached_and_ends() -> None:
    """No state is without a way in or out, and nothing begins again after the end."""
    assert {"opening", *TRANSITIONS.values()} == set(get_args(State))
    assert {state for state, cause in TRANSITIONS if cause == "end"} == set(get_args(State)) - {"ended"}
    assert not any(state == "ended" for state, _ in TRANSITIONS)
