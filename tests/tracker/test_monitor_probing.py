"""Which hosts are asked to report often when hosts complain."""

import pytest

from p2pdist.model.digest import digest_of
from tracker.core.monitor import probing
from tracker.core.monitor.probing import PROBE_S, Probing

STRIPE = (digest_of(b"blob"), 0)
OTHER = (digest_of(b"blob"), 1)


def test_a_host_that_is_held_up_itself_is_not_watched_for_its_children() -> None:
    """Of all hosts below a slow one its children alone can tell."""
    probe = Probing()
    probe.complained("child", "slow", ["child", "sister"], STRIPE, now=0.0)
    assert probe.begin(now=0.0) == ["slow", "child", "sister"]
    probe.complained("grandchild", "child", ["grandchild"], STRIPE, now=0.1)
    assert probe.begin(now=0.1) == []
    probe.complained("grandchild", "child", ["grandchild"], OTHER, now=0.1)
    assert probe.begin(now=0.1) == ["grandchild"]


def test_who_was_watched_for_a_host_that_then_complains_itself_makes_room() -> None:
    probe = Probing()
    probe.complained("grandchild", "child", ["grandchild"], STRIPE, now=0.0)
    assert probe.begin(now=0.0) == ["child", "grandchild"]
    probe.complained("child", "slow", ["child"], STRIPE, now=0.1)
    assert probe.ended(0.1) == ["child", "grandchild"]
    assert probe.begin(now=0.1) == ["slow", "child"]


def test_those_for_whom_there_is_no_room_are_watched_later(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probing, "PROBED_MAX", 2)
    probe = Probing()
    for name in ("a", "b"):
        probe.complained(f"{name}1", name, [f"{name}1"], STRIPE, now=0.0)
    assert probe.begin(now=0.0) == ["a", "a1"]
    assert probe.begin(now=0.1) == []
    probe.judged("a", now=0.2)
    assert probe.ended(0.2) == ["a", "a1"]
    assert probe.begin(now=0.2) == ["b", "b1"]
    assert probe.ended(0.2 + PROBE_S) == ["b", "b1"]


def test_who_held_others_up_is_watched_no_longer_once_that_is_known() -> None:
    """But hosts that are probed for another host as well are."""
    probe = Probing()
    probe.complained("a", "slow", ["a", "b"], STRIPE, now=0.0)
    probe.complained("b", "slower", ["b"], OTHER, now=0.0)
    probe.begin(now=0.0)
    probe.judged("slow", now=0.2)
    assert probe.ended(0.2) == ["slow", "a"]
    assert list(probe.asked_at) == ["b", "slower"]


def test_a_host_that_was_held_up_a_while_ago_may_be_at_fault_now() -> None:
    probe = Probing()
    probe.complained("child", "slow", ["child"], STRIPE, now=0.0)
    probe.begin(now=0.0)
    probe.ended(1.0)
    probe.complained("grandchild", "child", ["grandchild"], STRIPE, now=1.0)
    assert probe.begin(now=1.0) == ["grandchild"]


def test_who_reads_from_the_origin_stays_watched_whatever_becomes_known_of_its_parents() -> None:
    probe = Probing()
    assert probe.probe(["reader"], now=0.0) == ["reader"]
    probe.complained("reader", "slow", ["reader", "sister"], STRIPE, now=0.0)
    assert probe.begin(now=0.0) == ["slow", "sister"]
    probe.judged("slow", now=0.2)
    assert probe.ended(0.2) == ["slow", "sister"]
    assert probe.ended(PROBE_S) == ["reader"]


def test_what_was_known_of_a_storm_is_forgotten_with_it() -> None:
    """Also where a host is probed all the time."""
    probe = Probing()
    probe.complained("child", "slow", ["child"], STRIPE, now=0.0)
    probe.begin(now=0.0)
    probe.probe(["reader"], now=1.0)
    assert probe.ended(PROBE_S) == ["slow", "child"]
    assert list(probe._groups) == [""] and not probe._held and not probe._waiting
