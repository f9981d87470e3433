"""Chains in the tail: hosts that lag as one line up, racks receive from idle hosts of others, and
none moves for nothing."""

from __future__ import annotations

from random import Random

import pytest

from p2pdist.model.digest import digest_of
from p2pdist.model.pieces import PieceLayout
from tracker.core.edges import pairs
from tracker.core.member import FROM_ORIGIN, Member
from tracker.core.planning.planner import Planner
from tracker.core.rebalance.chains import MOVES_MIN, PAUSE_S, PAUSE_S_PER_MEMBER, PIECES_MIN, STAY_S, due, line_up
from tracker.core.rebalance.tail import Tail
from tracker.core.swarm import Swarm

BLOB = digest_of(b"blob")
LAYOUT = PieceLayout(1024 << 16, 1 << 16)
WHOLE = LAYOUT.count // 2
NOW = 10.0


class Late:
    """Two stripes, of which all have the second one. `tree` names the parent of each host in the
    first one, from whom; all but the first of it lack `lack` pieces. The first part of a name is
    the rack."""

    def __init__(
        self, tree: dict[str, str], *, lack: int = 100, idle: tuple[str, ...] = (), moved_at: float = 0.0
    ) -> None:
        self.swarm = Swarm(BLOB, LAYOUT)
        self.swarm.edges.set_now(moved_at)
        for name in (*dict.fromkeys(tree.values()), *idle):
            if name not in tree:
                self.add(name, 0)
        for name in tree:
            self.add(name, lack)
        for name, parent in tree.items():
            self.swarm.edges.attach(0, name, parent)

    def add(self, name: str, lack: int, *, slots: int = 4) -> Member:
        rack = name.partition(" ")[0]
        return self.swarm.add(name, [WHOLE - lack, WHOLE], slots=slots, now=NOW, rack=rack)

    def member(self, name: str) -> Member:
        return self.swarm.members[name]

    def settle(self, looks: int = 8) -> int:
        """Look until no host moves any more; returns how many moved."""
        return sum(line_up(self.swarm, now=NOW + look) for look in range(looks))

    def parents(self) -> dict[str, str | None]:
        return {name: member.parents[0] for name, member in self.swarm.members.items() if member.parents[0]}

    def most(self) -> int:
        """How many children the host has that has most."""
        return max(member.load for member in self.swarm.members.values())


FOUR = {f"a {number}": "a head" for number in range(4)} | {"a head": "b source"}
"""A rack whose importer feeds four that lag as it does."""


def test_those_who_lag_as_one_pass_the_stripe_on_from_one_to_the_next() -> None:
    late = Late(FOUR)
    assert line_up(late.swarm, now=NOW) == 3
    assert late.most() == 1, "each has an uplink to itself"
    assert late.swarm.edges.depth(0, max(FOUR, key=lambda name: late.swarm.edges.depth(0, name))) == 5
    assert late.parents()["a head"] == "b source", "the importer stays"
    assert line_up(late.swarm, now=NOW + STAY_S) == 0


def test_those_who_are_ahead_stand_first() -> None:
    late = Late(FOUR)
    order = ["a 2", "a 0", "a 3", "a 1"]
    for place, name in enumerate(order):
        member = late.member(name)
        member.counts = (member.counts[0] - 10 * place, *member.counts[1:])
    line_up(late.swarm, now=NOW)
    assert [late.parents()[name] for name in order] == ["a head", *order[:-1]]


def test_no_host_moves_below_one_who_gets_too_little_himself() -> None:
    """Four racks share an uplink, and no other rack has the stripe: what they get all their hosts
    can have."""
    tree = {f"{rack} head": "source" for rack in "abcd"}
    late = Late(tree | {f"{rack} {number}": f"{rack} head" for rack in "abcd" for number in range(4)})
    assert line_up(late.swarm, now=NOW) == 0
    tree |= {f"{rack} second": f"{rack} head" for rack in "abcd"}
    deep = Late(tree | {f"{rack} {number}": f"{rack} second" for rack in "abcd" for number in range(4)})
    assert line_up(deep.swarm, now=NOW) == 0


def test_racks_that_share_an_uplink_receive_from_idle_hosts_of_other_racks() -> None:
    """Not all from one rack, nor with a second importer, and one may stay."""
    tree = {f"{rack} head": "source 0" for rack in "abcd"} | {f"{rack} 0": f"{rack} head" for rack in "abcd"}
    late = Late(tree, idle=("x 0", "x 1", "x 2", "y 0", "y 1", "z 0"))
    assert late.settle() == 3
    sources = {(late.parents()[f"{rack} head"] or "").partition(" ")[0] for rack in "abcd"}
    assert sources == {"source", "x", "y", "z"}
    assert all(late.parents()[f"{rack} 0"] == f"{rack} head" for rack in "abcd")
    assert late.most() == 1


def test_whoever_imports_anew_gets_its_rack_lined_up_in_the_same_look() -> None:
    tree = {f"{rack} head": "source" for rack in "ab"}
    late = Late(
        tree | {f"{rack} {number}": f"{rack} head" for rack in "ab" for number in range(4)}, idle=("x 0", "y 0")
    )
    assert line_up(late.swarm, now=NOW) >= 1 + 2 * 3
    assert late.most() == 1


def test_racks_below_a_rack_that_imports_anew_are_lined_up_in_the_same_look() -> None:
    below = {"c head": "a 0"} | {f"c {number}": "c head" for number in range(4)}
    late = Late(below | {"a head": "source", "b head": "source", "a 0": "a head"}, idle=("x 0", "y 0"))
    late.member("b head").order = late.member("a head").order + 1
    line_up(late.swarm, now=NOW)
    assert late.parents()["a head"] == "x 0" or late.parents()["a head"] == "y 0"
    assert late.member("c head").load == 1


@pytest.mark.parametrize(("busy", "free"), ["xy", "yx"])
def test_racks_that_serve_others_already_come_last(busy: str, free: str) -> None:
    tree = {"a head": "source", "b head": "source", "c head": f"{busy} source"}
    late = Late(tree, idle=(f"{busy} 0", f"{free} 0"))
    assert line_up(late.swarm, now=NOW) == 1
    assert {late.parents()["a head"], late.parents()["b head"]} == {"source", f"{free} 0"}


def test_a_host_of_the_own_rack_that_has_the_stripe_is_better_than_one_elsewhere() -> None:
    late = Late({"a head": "b source", "b 0": "b source"}, idle=("a idle", "x 0"))
    late.member("x 0").order = -1
    assert line_up(late.swarm, now=NOW) >= 1
    assert late.parents()["a head"] == "a idle"


def test_another_zone_is_not_asked_when_the_own_one_has_it() -> None:
    late = Late({"a head": "b source", "c head": "b source"})
    for name in ("far 0", "near 0"):
        late.add(name, 0)
    for name, member in late.swarm.members.items():
        late.swarm.set_location(name, "far" if name == "far 0" else "near", member.rack)
    assert late.settle() == 1
    assert "far 0" not in late.parents().values()
    alone = Late({"a head": "b source", "c head": "b source"}, idle=("far 0",))
    alone.swarm.set_location("far 0", "far", "far")
    assert alone.settle() == 0


def test_while_all_stripes_are_to_come_no_host_moves() -> None:
    """Their downlinks have no room."""
    late = Late(FOUR, idle=("x 0",))
    for name in FOUR:
        late.swarm.forget_pieces(name, [WHOLE - 100, WHOLE - 100])
        late.swarm.edges.attach(1, name, "b source")
    assert late.settle() == 0


def four_stripes(*lacks: int) -> Swarm:
    """Five hosts that receive four stripes from one, and lack so much of each."""
    layout = PieceLayout(2048 << 20, 1 << 20)
    swarm = Swarm(BLOB, layout)
    assert swarm.stripes == len(lacks) == 4
    swarm.add("source", list(swarm.totals), slots=8, now=NOW)
    for number in range(3):
        counts = [total - lack for total, lack in zip(swarm.totals, lacks, strict=True)]
        swarm.add(f"h{number}", counts, slots=4, now=NOW)
        swarm.edges.set_now(0.0)
        for stripe, lack in enumerate(lacks):
            if lack:
                swarm.edges.attach(stripe, f"h{number}", "source")
    return swarm


def test_what_the_downlink_has_to_take_anyway_is_no_reason_to_move() -> None:
    """Of a source that three share three stripes come as fast as three hosts can take them, when
    each has another source for the rest."""
    swarm = four_stripes(100, 0, 0, 0)
    assert line_up(swarm, now=NOW) == 2
    swarm = four_stripes(100, 0, 0, 0)
    for number in range(3):
        swarm.add(f"other{number}", list(swarm.totals), slots=4, now=NOW)
        swarm.forget_pieces(f"h{number}", [swarm.totals[0] - 100, swarm.totals[1] - 200, *swarm.totals[2:]])
        swarm.edges.set_now(0.0)
        swarm.edges.attach(1, f"h{number}", f"other{number}")
    assert line_up(swarm, now=NOW) == 0


def test_no_host_moves_for_the_few_pieces_of_one_stripe_who_lacks_more_of_another() -> None:
    swarm = four_stripes(PIECES_MIN, PIECES_MIN - 1, 0, 0)
    assert line_up(swarm, now=NOW) > 0
    assert all(swarm.members[f"h{number}"].parents[1] == "source" for number in range(3))


def test_no_host_moves_for_a_few_pieces_or_again_at_once() -> None:
    assert Late(FOUR, lack=PIECES_MIN - 1).settle() == 0
    assert line_up(Late(FOUR, moved_at=NOW - STAY_S / 2).swarm, now=NOW) == 0
    assert line_up(Late(FOUR, moved_at=NOW - 2 * STAY_S).swarm, now=NOW) == 3


def test_slow_hosts_feed_no_host_and_failed_pairs_stay_apart() -> None:
    late = Late(FOUR)
    late.member("a 0").slots = 1
    late.swarm.set_slow_receiver(late.member("a 1"), True)
    late.swarm.edges.avoided["a 2", "a 3"] = late.swarm.edges.avoided["a 3", "a 2"] = NOW + 5
    late.settle()
    assert late.parents()["a 1"] == "a head", "a slow downlink gains nothing"
    assert not late.member("a 0").children[0] and not late.member("a 1").children[0]
    assert late.parents()["a 2"] != "a 3" and late.parents()["a 3"] != "a 2"
    assert late.most() == 2


def test_receivers_that_yield_stay_in_line() -> None:
    late = Late(FOUR)
    for name in FOUR:
        late.member(name).hear(NOW, yields=True)
    assert late.settle() == 0


def test_who_loses_its_slot_to_another_moves_on() -> None:
    """The children of a host that takes in another lack little and would gain nothing; but it has
    four slots."""
    late = Late({"a 0": "a source", "a 1": "a source"} | {f"a below {number}": "a 0" for number in range(4)})
    for number in range(4):
        late.swarm.advance(f"a below {number}", [WHOLE - 25, WHOLE], now=NOW)
    late.member("a 1").order = late.member("a 0").order + 1
    late.member("a source").absent_since = NOW
    assert line_up(late.swarm, now=NOW) == 2
    assert late.parents()["a 1"] == "a 0"
    assert late.most() == 4


def test_who_loses_its_slot_and_finds_no_other_is_one_too_many() -> None:
    """The balance sees to it."""
    below = {f"a below {number}": "a 0" for number in range(4)}
    late = Late({"a 0": "a source", "a 1": "a source"} | below)
    for name in below:
        late.swarm.advance(name, [WHOLE - 25, WHOLE], now=NOW)
        late.swarm.edges.avoided |= {(name, other): NOW + 5 for other in late.swarm.members if other != "a 0"}
    late.member("a 1").order = late.member("a 0").order + 1
    late.member("a source").absent_since = NOW
    line_up(late.swarm, now=NOW)
    assert late.most() == 5
    assert late.swarm.passes.strained


def test_absent_hosts_are_no_parents() -> None:
    late = Late({"a head": "b source", "c head": "b source"}, idle=("x 0",))
    late.member("x 0").absent_since = NOW
    assert late.settle() == 0


def test_what_came_since_the_last_report_counts() -> None:
    """Three children were nearly done when they reported: by now the fourth has the uplink to
    itself."""
    late = Late(FOUR)
    for name in ("a 0", "a 1", "a 2"):
        late.swarm.advance(name, [WHOLE - 10, WHOLE], now=NOW)
        late.member(name).set_rates([20.0, *late.member(name).rates[1:]])
    assert line_up(late.swarm, now=NOW) > 0
    old = Late(FOUR)
    for name in ("a 0", "a 1", "a 2"):
        old.swarm.advance(name, [WHOLE - 10, WHOLE], now=NOW)
        old.member(name).set_rates([20.0, *old.member(name).rates[1:]])
    assert line_up(old.swarm, now=NOW + 1) == 0


def test_a_look_moves_a_bounded_number() -> None:
    late = Late({f"a {number}": f"a {(number - 1) // 4}" for number in range(1, 61)} | {"a 0": "b source"})
    assert MOVES_MIN <= line_up(late.swarm, now=NOW) <= 2 * MOVES_MIN
    assert late.settle() > 0
    assert late.most() <= 2


@pytest.mark.parametrize("seed", range(12))
def test_trees_stay_trees_and_racks_import_once(seed: int) -> None:
    """Subtrees of a planned swarm lag by any number of pieces; no host gets more children than
    slots, and all ends sooner."""
    random = Random(seed)
    swarm = Swarm(BLOB, LAYOUT)
    racks = random.choice((1, 2, 8))
    for number in range(128):
        swarm.add(f"h{number}", [0, 0], slots=random.choice((3, 3, 3, 3, 0)), now=0.0, rack=str(number % racks))
    Planner().plan(swarm, leases=8)
    behind = {host: [0, 0] for host in swarm.members}
    for stripe in range(2):
        for top in random.sample(sorted(swarm.members), 4):
            lag = random.randrange(200)
            for host in swarm.members:
                if swarm.edges.receives_through(stripe, host, top):
                    behind[host][stripe] = max(behind[host][stripe], lag)
    for host, lags in behind.items():
        swarm.advance(host, [WHOLE - lag for lag in lags], now=NOW)
    before, imports = [_ends(swarm, stripe) for stripe in range(2)], [_imports(swarm, stripe) for stripe in range(2)]
    over = sum(max(0, member.load - member.slots) for member in swarm.members.values())
    slots = sum(sum(member.allotted) for member in swarm.members.values())
    for look in range(4):
        line_up(swarm, now=NOW + look)
        for stripe in range(2):
            assert _imports(swarm, stripe) <= imports[stripe]
            assert all(swarm.edges.rooted(stripe, host) for host in swarm.members)
        assert sum(max(0, member.load - member.slots) for member in swarm.members.values()) <= over
        assert sum(sum(member.allotted) for member in swarm.members.values()) <= slots
    assert all(_ends(swarm, stripe) <= before[stripe] + 1 for stripe in range(2))


def _imports(swarm: Swarm, stripe: int) -> int:
    """Hosts that receive from another rack."""
    members = swarm.members
    return sum(
        1 for child, parent in pairs(swarm.edges, stripe) if parent and members[parent].rack != members[child].rack
    )


def _ends(swarm: Swarm, stripe: int) -> float:
    """When the last one would be done, in pieces that an uplink sends; computed host by host, from
    the top."""

    def ends(host: str) -> float:
        member = swarm.members[host]
        lack, parent = swarm.totals[stripe] - member.counts[stripe], member.parents[stripe]
        if not lack or parent is None or parent == FROM_ORIGIN:
            return 2.0 * lack
        return max(ends(parent) + 1, lack * swarm.members[parent].load)

    return max(map(ends, swarm.members))


def test_a_swarm_is_looked_at_again_as_long_as_somebody_moves() -> None:
    late, tail = Late(FOUR), Tail()
    swarms = {BLOB: late.swarm}
    assert tail.catch_up(swarms, now=NOW) == [], "no host got a stripe"
    tail.note(BLOB)
    assert tail.catch_up(swarms, now=NOW) == [BLOB]
    late.swarm.edges.attach(0, "a 1", "a head")
    late.swarm.edges.attach(0, "a 2", "a head")
    assert not due(late.swarm, now=NOW + PAUSE_S / 2)
    assert tail.catch_up(swarms, now=NOW + PAUSE_S / 2) == [], "not so soon"
    assert tail.catch_up(swarms, now=NOW + 2) == [BLOB]
    assert tail.catch_up(swarms, now=NOW + 4) == []
    late.swarm.edges.attach(0, "a 1", "a head")
    assert tail.catch_up(swarms, now=NOW + 8) == [], "forgotten until a host gets a stripe"


def test_a_swarm_that_is_gone_is_forgotten() -> None:
    tail = Tail()
    tail.note(BLOB)
    assert tail.catch_up({}, now=NOW) == []
    assert tail.catch_up({BLOB: Late(FOUR).swarm}, now=NOW) == []


def test_large_swarms_are_looked_at_less_often() -> None:
    swarm = Late(FOUR).swarm
    swarm.passes.lined_up_at = NOW
    pause_s = PAUSE_S + PAUSE_S_PER_MEMBER * len(swarm.members)
    assert due(swarm, now=NOW + 1.01 * pause_s) and not due(swarm, now=NOW + 0.99 * pause_s)
