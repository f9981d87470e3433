"""Affinity: against a slow implementation that is obvious, and its rules as examples."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Collection

import pytest
from effort import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from p2pdist.model.digest import Digest, digest_of
from p2pdist.model.errors import Conflict
from p2pdist.model.fleet import Ranked
from p2pdist.model.messages import PROTOCOL_VERSION, Advance, Hello, Holding, Left, Report, Spares
from p2pdist.model.pieces import PieceLayout
from tracker.core.affinity import RATE_ASSUMED_BYTES_S, Affinity, RedundantPacks, RoleNeed
from tracker.core.events import Received, SessionClosed, SessionOpened, Tick
from tracker.core.fleet import Fleet

PIECE = 65536
BLOBS = [digest_of(str(number).encode()) for number in range(4)]
SIZES = [8 * PIECE, 20 * PIECE - 7, PIECE // 2, 3 * PIECE]
PARTS = dict(zip(BLOBS, SIZES, strict=True))
TOTAL = sum(SIZES)


class Site:
    """A fleet and its affinity; hosts open sessions and say what they hold."""

    def __init__(self) -> None:
        self.fleet = Fleet(-1000.0)
        self.redundant = RedundantPacks()
        self.affinity = Affinity(self.fleet.hosts, self.fleet.swarms, self.fleet.capacities, self.redundant.hosts)
        self.sessions: dict[str, int] = {}
        self.numbers = itertools.count(1)
        self.now = 0.0

    def join(self, name: str, zone: str = "", rack: str = "") -> None:
        self.sessions[name] = next(self.numbers)
        hello = Hello(PROTOCOL_VERSION, name, f"{name}:1", zone, rack)
        self.fleet.handle(SessionOpened(self.sessions[name], hello), now=self.now)

    def leave(self, name: str) -> None:
        self.fleet.handle(SessionClosed(self.sessions.pop(name)), now=self.now)

    def hold(self, name: str, blob: int, pieces: int | None = None) -> None:
        """The host holds so many pieces of a blob, or all."""
        counts = counts_of(blob, pieces)
        holding = Holding(BLOBS[blob], SIZES[blob], PIECE, counts)
        self.fleet.handle(Received(self.sessions[name], holding), now=self.now)

    def lacks(self, *names: str) -> list[int]:
        found = self.affinity.missing(PARTS, names)
        return [found[name] for name in names]


def counts_of(blob: int, pieces: int | None) -> tuple[int, ...]:
    layout = PieceLayout(SIZES[blob], PIECE)
    held = range(layout.count if pieces is None else min(pieces, layout.count))
    return tuple(sum(piece % layout.stripes == stripe for piece in held) for stripe in range(layout.stripes))


def slowly(fleet: Fleet, parts: dict[Digest, int], name: str, spared: Collection[Digest] = ()) -> int:
    """Bytes missing, blob by blob."""
    missing = 0
    for blob, size in parts.items():
        swarm = fleet.swarms.get(blob)
        member = swarm.members.get(name) if swarm is not None else None
        held = 0
        if swarm is not None and member is not None:
            pieces = sum(member.counts)
            held = size if pieces == swarm.layout.count else pieces * PIECE
        if blob in spared:
            held = size
        missing += size - held
    return missing


STEPS = st.lists(
    st.tuples(
        st.sampled_from(["join", "leave", "hold", "report", "left", "tick", "spare"]),
        st.sampled_from(["h1", "h2", "h3"]),
        st.integers(0, 3),
        st.integers(0, 20),
    ),
    max_size=60,
)


@settings(max_examples=examples(200), deadline=None)
@given(STEPS)
def test_it_agrees_with_the_slow_way_whatever_was_asked_before(steps: list[tuple[str, str, int, int]]) -> None:
    site = Site()
    spared: dict[str, set[Digest]] = {}
    for what, name, blob, pieces in steps:
        site.now += 0.2
        connected = name in site.sessions
        match what:
            case "join" if not connected:
                site.join(name)
            case "leave" if connected:
                site.leave(name)
            case "hold" if connected:
                site.hold(name, blob, pieces)
            case "report" if connected:
                advance = Report((Advance(BLOBS[blob], counts_of(blob, pieces)),))
                site.fleet.handle(Received(site.sessions[name], advance), now=site.now)
            case "left" if connected:
                site.fleet.handle(Received(site.sessions[name], Left(BLOBS[blob])), now=site.now)
            case "spare":
                spared[name] = {BLOBS[blob], *(spared.get(name, ()) if pieces % 2 else ())}
                site.redundant.note(name, Spares((BLOBS[blob],), more=bool(pieces % 2)))
            case "tick":
                site.now += pieces
                site.fleet.handle(Tick(), now=site.now)
        everybody = list(site.fleet.hosts)
        for names in (everybody, ["h1", "elsewhere"]):
            found = site.affinity.missing(PARTS, names)
            assert found == {each: slowly(site.fleet, PARTS, each, spared.get(each, ())) for each in names}


def test_a_report_is_noticed_after_a_question() -> None:
    """Nothing else tells of it: nobody came, left or became complete."""
    site = Site()
    site.join("h1")
    site.hold("h1", 1, 3)
    assert site.lacks("h1") == [TOTAL - 3 * PIECE]
    site.now += 1.0
    report = Report((Advance(BLOBS[1], counts_of(1, 5)),))
    site.fleet.handle(Received(site.sessions["h1"], report), now=site.now)
    assert site.lacks("h1") == [TOTAL - 5 * PIECE]


def test_what_a_host_lost_is_missing_again() -> None:
    site = Site()
    site.join("h1")
    site.hold("h1", 1)
    site.hold("h1", 1, 5)
    assert site.lacks("h1") == [TOTAL - 5 * PIECE]
    site.fleet.handle(Received(site.sessions["h1"], Left(BLOBS[1])), now=site.now)
    assert site.lacks("h1") == [TOTAL]


def test_shared_content_is_counted_once_and_the_best_come_first() -> None:
    site = Site()
    for name in ("cold", "part", "warm", "away"):
        site.join(name)
    for blob in range(4):
        site.hold("warm", blob)
        site.hold("away", blob)
    site.hold("part", 0, 3)
    site.leave("away")
    ranked = site.affinity.rank(PARTS, ["cold", "away", "part", "warm", "unknown"])
    assert [(each.host, each.bytes_missing, each.present) for each in ranked] == [
        ("warm", 0, True),
        ("part", TOTAL - 3 * PIECE, True),
        ("cold", TOTAL, True),
        ("away", 0, False),
        ("unknown", TOTAL, False),
    ]
    assert ranked[2].seconds_estimated == TOTAL / RATE_ASSUMED_BYTES_S
    assert site.affinity.rank(PARTS, site.fleet.hosts) == [each for each in ranked if each.host != "unknown"]


def test_seconds_follow_the_rate_that_a_host_has_shown() -> None:
    site = Site()
    for name in ("fast", "slow", "new"):
        site.join(name)
    site.fleet.capacities.sample("fast", 1000 * PIECE, 1.0)
    site.fleet.capacities.sample("slow", 10 * PIECE, 1.0)
    seconds = {each.host: each.seconds_estimated for each in site.affinity.rank(PARTS, site.fleet.hosts)}
    assert seconds["fast"] == TOTAL / (1000 * PIECE)
    assert seconds["slow"] == TOTAL / (10 * PIECE)
    assert seconds["fast"] < seconds["new"] < seconds["slow"]


def test_a_host_that_holds_nothing_of_no_swarm() -> None:
    site = Site()
    site.join("h1")
    assert site.affinity.rank(PARTS, site.fleet.hosts) == [Ranked("h1", TOTAL, TOTAL, TOTAL / RATE_ASSUMED_BYTES_S)]
    assert site.affinity.rank({}, site.fleet.hosts) == [Ranked("h1", 0, 0, 0.0)]


def test_picks_lack_least_and_then_spread_over_racks() -> None:
    site = Site()
    for number in range(9):
        site.join(f"h{number}", "z", f"r{number // 3}")
    site.hold("h4", 1)
    names = list(site.fleet.hosts)
    assert site.affinity.pick(PARTS, names, 4) == ["h4", "h0", "h6", "h1"]
    assert site.affinity.pick(PARTS, names, 3, taken=["h0", "h1"]) == ["h4", "h6", "h3"], "rack r0 has two already"
    assert site.affinity.pick(PARTS, names, 0) == []
    assert site.affinity.pick(PARTS, ["h0"], 5) == ["h0"]


@settings(max_examples=examples(150), deadline=None)
@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 8)), min_size=1, max_size=9), st.integers(1, 10))
def test_whole_racks_are_as_few_as_can_be(hosts: list[tuple[int, int]], count: int) -> None:
    """Against all choices of hosts: no other choice of as many hosts stands in fewer racks."""
    site = Site()
    for number, (rack, pieces) in enumerate(hosts):
        site.join(f"h{number}", rack=f"r{rack}")
        site.hold(f"h{number}", 0, pieces)
    ranked = site.affinity.rank(PARTS, site.fleet.hosts)
    chosen = site.affinity.coherent(ranked, count)
    rack_of = {name: host.rack for name, host in site.fleet.hosts.items()}
    wanted = min(count, len(hosts))
    assert len({each.host for each in chosen}) == len(chosen) == wanted
    choices = itertools.combinations(rack_of, wanted)
    racks = len({rack_of[each.host] for each in chosen})
    assert racks == min(len({rack_of[name] for name in choice}) for choice in choices)
    if racks == 1:
        best = min(
            sum(sorted(each.bytes_missing for each in ranked if rack_of[each.host] == rack)[:wanted])
            for rack, size in Counter(rack_of.values()).items()
            if size >= wanted
        )
        assert sum(each.bytes_missing for each in chosen) == best


def test_roles_get_distinct_hosts_and_who_is_good_for_one_role_only_goes_there() -> None:
    site = Site()
    for name in ("both", "first", "cold"):
        site.join(name)
    site.hold("both", 0)
    site.hold("both", 1)
    site.hold("first", 0)
    roles = [RoleNeed("load", {BLOBS[0]: SIZES[0]}, 1), RoleNeed("train", {BLOBS[1]: SIZES[1]}, 1)]
    found = site.affinity.assign(roles, list(site.fleet.hosts))
    assert {role: [each.host for each in hosts] for role, hosts in found.items()} == {
        "load": ["first"],
        "train": ["both"],
    }
    with pytest.raises(Conflict, match="4 hosts are asked for and 3"):
        site.affinity.assign([RoleNeed("load", PARTS, 4)], list(site.fleet.hosts))


@settings(max_examples=examples(100), deadline=None)
@given(
    st.lists(st.lists(st.integers(0, 3), max_size=3), min_size=1, max_size=8),
    st.lists(st.tuples(st.sets(st.integers(0, 3), min_size=1), st.integers(1, 3)), min_size=1, max_size=3),
)
def test_every_role_is_filled_with_hosts_of_its_own(
    holding: list[list[int]], wanted: list[tuple[set[int], int]]
) -> None:
    site = Site()
    for number, blobs in enumerate(holding):
        site.join(f"h{number}")
        for blob in blobs:
            site.hold(f"h{number}", blob)
    roles = [
        RoleNeed(f"role{number}", {BLOBS[blob]: SIZES[blob] for blob in blobs}, count)
        for number, (blobs, count) in enumerate(wanted)
    ]
    names = list(site.fleet.hosts)
    if sum(role.count for role in roles) > len(names):
        with pytest.raises(Conflict):
            site.affinity.assign(roles, names)
        return
    found = site.affinity.assign(roles, names)
    assert {role.name: role.count for role in roles} == {role: len(hosts) for role, hosts in found.items()}
    chosen = [each.host for hosts in found.values() for each in hosts]
    assert len(set(chosen)) == len(chosen)
    for role in roles:
        for each in found[role.name]:
            assert each.bytes_missing == slowly(site.fleet, dict(role.parts), each.host)


def test_what_need_not_be_fetched_is_not_missing() -> None:
    """A pack that went when its tree was whole: not missing where that was said, partly there or
    not at all; missing elsewhere."""
    site = Site()
    for name in ("whole", "part", "cold"):
        site.join(name)
    site.hold("part", 1, 3)
    site.hold("cold", 1, 3)
    site.redundant.note("whole", Spares((BLOBS[0], BLOBS[1])))
    site.redundant.note("part", Spares((BLOBS[1],)))
    assert site.lacks("whole", "part", "cold") == [
        TOTAL - SIZES[0] - SIZES[1],
        TOTAL - SIZES[1],
        TOTAL - 3 * PIECE,
    ]
    site.redundant.forget("whole")
    assert site.lacks("whole") == [TOTAL]


def test_nobody_is_believed_who_states_another_size_than_the_manifest() -> None:
    site = Site()
    site.join("h1")
    site.hold("h1", 0)
    assert site.affinity.missing({BLOBS[0]: SIZES[0] + 1}, ["h1"]) == {"h1": SIZES[0] + 1}
