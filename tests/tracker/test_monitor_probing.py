"""Who is asked to report often when hosts complain."""

import pytest

from p2pdist.model.digest import digest_of
from tracker.core.monitor import probing
from tracker.core.monitor.probing import WATCH_S, CloseWatch

STRIPE = (digest_of(b"blob"), 0)
OTHER = (digest_of(b"blob"), 1)


def test_a_host_that_is_held_up_itself_is_not_watched_for_its_children() -> None:
    """Of all that hang below a slow host its children alone can tell."""
    watch = CloseWatch()
    watch.complained("child", "slow", ["child", "sister"], STRIPE, now=0.0)
    assert watch.begin(now=0.0) == ["slow", "child", "sister"]
    watch.complained("grandchild", "child", ["grandchild"], STRIPE, now=0.1)
    assert watch.begin(now=0.1) == []
    watch.complained("grandchild", "child", ["grandchild"], OTHER, now=0.1)
    assert watch.begin(now=0.1) == ["grandchild"]


def test_who_was_watched_for_a_host_that_then_complains_itself_makes_room() -> None:
    watch = CloseWatch()
    watch.complained("grandchild", "child", ["grandchild"], STRIPE, now=0.0)
    assert watch.begin(now=0.0) == ["child", "grandchild"]
    watch.complained("child", "slow", ["child"], STRIPE, now=0.1)
    assert watch.over(0.1) == ["child", "grandchild"]
    assert watch.begin(now=0.1) == ["slow", "child"]


def test_those_for_whom_there_is_no_room_are_watched_later(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probing, "WATCHED_MAX", 2)
    watch = CloseWatch()
    for name in ("a", "b"):
        watch.complained(f"{name}1", name, [f"{name}1"], STRIPE, now=0.0)
    assert watch.begin(now=0.0) == ["a", "a1"]
    assert watch.begin(now=0.1) == []
    watch.judged("a", now=0.2)
    assert watch.over(0.2) == ["a", "a1"]
    assert watch.begin(now=0.2) == ["b", "b1"]
    assert watch.over(0.2 + WATCH_S) == ["b", "b1"]


def test_who_held_others_up_is_watched_no_longer_once_that_is_known() -> None:
    """But those who are watched for another host as well are."""
    watch = CloseWatch()
    watch.complained("a", "slow", ["a", "b"], STRIPE, now=0.0)
    watch.complained("b", "slower", ["b"], OTHER, now=0.0)
    watch.begin(now=0.0)
    watch.judged("slow", now=0.2)
    assert watch.over(0.2) == ["slow", "a"]
    assert list(watch.asked_at) == ["b", "slower"]


def test_a_host_that_was_held_up_a_while_ago_may_be_at_fault_now() -> None:
    watch = CloseWatch()
    watch.complained("child", "slow", ["child"], STRIPE, now=0.0)
    watch.begin(now=0.0)
    watch.over(1.0)
    watch.complained("grandchild", "child", ["grandchild"], STRIPE, now=1.0)
    assert watch.begin(now=1.0) == ["grandchild"]


def test_who_reads_from_the_origin_stays_watched_whatever_becomes_known_of_its_parents() -> None:
    watch = CloseWatch()
    assert watch.watch(["reader"], now=0.0) == ["reader"]
    watch.complained("reader", "slow", ["reader", "sister"], STRIPE, now=0.0)
    assert watch.begin(now=0.0) == ["slow", "sister"]
    watch.judged("slow", now=0.2)
    assert watch.over(0.2) == ["slow", "sister"]
    assert watch.over(WATCH_S) == ["reader"]


def test_what_was_known_of_a_storm_is_forgotten_with_it() -> None:
    """Also where somebody is watched all the time."""
    watch = CloseWatch()
    watch.complained("child", "slow", ["child"], STRIPE, now=0.0)
    watch.begin(now=0.0)
    watch.watch(["reader"], now=1.0)
    assert watch.over(WATCH_S) == ["slow", "child"]
    assert list(watch._groups) == [""] and not watch._held and not watch._waiting
