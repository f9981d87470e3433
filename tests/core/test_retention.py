"""Which packages a store lets go by their policies, and what goes first when room is needed."""

from __future__ import annotations

from p2pdist.core.eviction import NONE_S, StoredPackage, choose, due, goes_first
from p2pdist.model.candidate import Candidate
from p2pdist.model.digest import digest_of
from p2pdist.model.policy import NO_POLICY, PackagePolicy

A, B, C = (digest_of(each) for each in (b"a", b"b", b"c"))
TTL = PackagePolicy(cache="ttl", ttl_s=100.0)
NONE = PackagePolicy(cache="none")
PIN = PackagePolicy(cache="pin")


def test_packages_go_when_their_time_is_over_the_longest_unused_first() -> None:
    stored = [
        StoredPackage("ttl", TTL, (A,), 1000.0),
        StoredPackage("none", NONE, (B,), 1000.0),
        StoredPackage("older", NONE, (B,), 900.0),
        StoredPackage("used", NONE, (C,), None),
        StoredPackage("pin", PIN, (C,), 0.0),
        StoredPackage("lru", NO_POLICY, (C,), 0.0),
    ]
    assert due(stored, now=1000.0) == ["older"]
    assert due(stored, now=1000.0 + NONE_S) == ["older", "none"]
    assert due(stored, now=1099.9) == ["older", "none"]
    assert due(stored, now=1100.0) == ["older", "none", "ttl"]


def test_what_is_not_kept_goes_first_unless_another_package_keeps_it() -> None:
    stored = [
        StoredPackage("n", NONE, (A, B), None),
        StoredPackage("m", NONE, (A,), 1.0),
        StoredPackage("l", NO_POLICY, (B, C), None),
    ]
    first = goes_first(stored)
    assert first == {A}
    candidates = [Candidate(each, 10, used, first=each in first) for each, used in ((A, 9.0), (B, 1.0), (C, 2.0))]
    assert choose(candidates, 10) == [A]
    assert choose(candidates, 25) == [A, B, C]
