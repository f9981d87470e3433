"""A new tracker hears complaints of hosts that have yet to speak, and judges them once it can."""

from __future__ import annotations

import pytest
from test_fleet import Control

from tracker.core.repair.unheard_complaints import UNHEARD_S


def started() -> Control:
    """A tracker has just started. `child` says that it receives from `parent`, which has not
    spoken; `root` reads the origin, and `other` receives from it."""
    control = Control(started_at=0.0)
    control.open("root", "other", "child", "parent")
    control.join("root", 6, "")
    control.join("other", 5, "root")
    control.join("child", 2, "parent")
    control.tick(0.2)
    return control


def go_on(control: Control, seconds: float, child: int = 2, parent: int = 0) -> None:
    """All that have spoken report in time; the parent once it has pieces."""
    counts = {"root": 6, "other": 5, "child": child} | ({"parent": parent} if parent else {})
    for _ in range(round(seconds / 0.25)):
        control.tick(0.25)
        for host, count in counts.items():
            control.report(host, count)
    control.tick(0.05)


def test_a_complaint_is_judged_when_the_parent_speaks() -> None:
    """The child need not stand still until it complains again."""
    control = started()
    control.complain("child", "parent", "stalled")
    go_on(control, 0.5)
    assert control.parent("child") == "parent", "nothing tells yet whether it could give more"
    control.join("parent", 5, "root")
    control.tick(0.05)
    assert control.parent("child") in ("root", "other")


def test_a_complaint_of_a_parent_that_never_speaks_is_judged_when_the_time_is_over() -> None:
    control = started()
    control.complain("child", "parent", "stalled")
    go_on(control, UNHEARD_S - 0.5)
    assert control.parent("child") == "parent"
    go_on(control, 0.5)
    assert control.parent("child") in ("root", "other")


@pytest.mark.parametrize("speaks", [True, False])
def test_a_child_that_got_a_piece_meanwhile_keeps_its_parent(speaks: bool) -> None:
    control = started()
    control.complain("child", "parent", "stalled")
    if speaks:
        control.join("parent", 5, "root")
    go_on(control, UNHEARD_S + 0.25, child=3, parent=5 * speaks)
    assert control.parent("child") == "parent"


def test_a_complaint_waits_for_the_next_report_of_the_child() -> None:
    """It may have got what it waited for while its parent spoke."""
    control = started()
    control.complain("child", "parent", "stalled")
    control.join("parent", 5, "root")
    control.tick(0.05)
    assert control.parent("child") == "parent"
    control.report("child", 2)
    control.tick(0.05)
    assert control.parent("child") in ("root", "other")


def test_a_parent_that_has_no_more_keeps_its_child() -> None:
    """It waits itself, as its child does."""
    control = started()
    control.complain("child", "parent", "stalled")
    control.join("parent", 2, "root")
    go_on(control, UNHEARD_S + 0.25, parent=2)
    assert control.parent("child") == "parent"
