"""Who of those that announce themselves counts, in which order trackers are tried, and the plan
that an agent makes itself."""

from __future__ import annotations

from contextlib import suppress
from ipaddress import ip_network
from itertools import permutations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from p2pdist.core.sources import Candidates, Sources
from p2pdist.core.trackerless import (
    CHILDREN,
    EARLIER_MAX,
    LABEL_BYTES_MAX,
    PEERS_MAX,
    Announcement,
    LinkPeers,
    address_on,
    label_of,
    plan_without_tracker,
    read_text,
    text_of,
)
from p2pdist.model.digest import digest_of
from p2pdist.model.errors import UsageError
from p2pdist.model.messages import PROTOCOL_VERSION
from p2pdist.model.pieces import PieceLayout
from p2pdist.model.plan import KEEPERS_MAX, ORIGIN

BLOB = digest_of(b"blob")
SMALL, LARGE = PieceLayout(1 << 19, 1 << 16), PieceLayout(4 << 30, 1 << 20)
ME = Announcement("default", "me", "10.0.0.1:7071", zone="a", origin=True)


def agent(name: str, zone: str = "a", *, origin: bool = True) -> Announcement:
    return Announcement("default", name, f"10.0.0.2:{sum(name.encode())}", zone=zone, origin=origin)


def tracker(name: str, zone: str = "", protocol: int = PROTOCOL_VERSION) -> Announcement:
    return Announcement("default", name, f"{name}:7070", zone=zone, protocol=protocol)


def fleet(count: int, zone: str = "a") -> list[Announcement]:
    return [agent(f"h{number}", zone) for number in range(count)]


# -- texts


def encoded(announcement: Announcement) -> dict[bytes, bytes | None]:
    return {key.encode(): value.encode() for key, value in text_of(announcement).items()}


@given(
    st.builds(
        Announcement,
        network=st.from_regex(r"\A[A-Za-z0-9][A-Za-z0-9._-]{0,62}\Z"),
        host=st.from_regex(r"\A[a-z0-9.é-]{1,60}\Z"),
        address=st.just("10.0.0.9:1"),
        zone=st.from_regex(r"\A[a-z0-9]{0,60}\Z"),
        rack=st.from_regex(r"\A[a-z0-9]{0,60}\Z"),
        protocol=st.integers(0, 0xFFFF),
        tls=st.booleans(),
        origin=st.booleans(),
    )
)
def test_what_is_announced_is_understood(said: Announcement) -> None:
    assert read_text(encoded(said), said.address) == said


@pytest.mark.parametrize(
    "change",
    [
        {b"host": b"two words"},
        {b"host": b"line\nbreak"},
        {b"host": b""},
        {b"host": None},
        {b"host": b"\xff\xfe"},
        {b"host": b"h" * 256},
        {b"net": b"../default"},
        {b"net": b""},
        {b"net": b"n" * 64},
        {b"zone": b"\x1b[31m"},
        {b"proto": b"-1"},
        {b"proto": b"one"},
        {b"proto": b"99999999999999999999"},
        {b"tls": b"maybe"},
        {b"txtvers": b"2"},
        {b"txtvers": None},
        {b"more%d" % number: b"x" * 250 for number in range(6)},
    ],
    ids=str,
)
def test_what_a_stranger_may_say_is_refused(change: dict[bytes, bytes | None]) -> None:
    with pytest.raises(UsageError):
        read_text({**encoded(ME), **change}, "10.0.0.9:1")


@given(st.dictionaries(st.binary(max_size=20), st.none() | st.binary(max_size=300), max_size=12))
def test_noise_is_refused_and_does_no_harm(pairs: dict[bytes, bytes | None]) -> None:
    with pytest.raises(UsageError):
        read_text(pairs, "10.0.0.9:1")
    heard = {**encoded(ME), **{key: value for key, value in pairs.items() if key.lower() not in encoded(ME)}}
    with suppress(UsageError):
        assert read_text(heard, ME.address) == ME


@pytest.mark.parametrize(
    "wrong",
    [{"network": "two words"}, {"network": ""}, {"host": "two words"}, {"zone": "z" * 251}, {"host": "é" * 130}],
)
def test_what_nobody_would_understand_is_not_announced(wrong: dict[str, str]) -> None:
    with pytest.raises(UsageError):
        text_of(replace(ME, **wrong))


@given(st.text(min_size=1, max_size=255))
def test_a_label_fits_and_differs(name: str) -> None:
    try:
        name.encode()
    except UnicodeEncodeError:
        return
    label = label_of(name)
    assert 0 < len(label.encode()) <= LABEL_BYTES_MAX and "." not in label
    assert label_of("a.b") not in ("a-b", label_of("a-b"), label_of("a.b."))
    assert label_of("h" * 64) != label_of("h" * 65)


def test_the_address_is_one_of_the_link() -> None:
    link = ip_network("10.0.0.0/24")
    assert address_on(link, ["172.17.0.1", "fe80::1%eth0", "fd00::1", "10.0.0.7", "10.0.0.8"]) == "10.0.0.7"
    assert address_on(link, ["172.17.0.1"]) is None
    assert address_on(ip_network("fd00::/64"), ["10.0.0.7", "fd00::7"]) == "fd00::7"


# -- who counts


def test_only_those_of_the_same_network_that_speak_alike_count() -> None:
    known = LinkPeers(ME)
    stranger = replace(agent("h1"), network="other")
    assert not known.heard("agent", "eth0", "1", stranger)
    assert not known.heard("tracker", "eth0", "t", replace(tracker("t1"), network="other"))
    assert not known.heard("agent", "eth0", "2", replace(agent("h2"), tls=True))
    assert not known.heard("agent", "eth0", "3", replace(agent("h3"), protocol=PROTOCOL_VERSION + 1))
    assert not known.heard("agent", "eth0", "4", agent("me"))
    assert known.agents() == [] and known.trackers() == []
    assert known.heard("agent", "eth0", "1", agent("h1"))
    assert not known.heard("agent", "eth0", "1", agent("h1")), "nothing new"
    assert known.agents() == [agent("h1")]
    assert known.heard("agent", "eth0", "1", stranger), "it has moved to another network"
    assert known.agents() == []


def test_who_takes_its_leave_is_forgotten_and_a_link_with_all_on_it() -> None:
    known = LinkPeers(ME)
    for link in ("eth0", "eth1"):
        known.heard("agent", link, "1", agent("h1"))
        known.heard("tracker", link, "t", tracker("t1"))
    assert known.agents() == [agent("h1")], "one host on two links"
    assert known.gone("agent", "eth0", "1") and not known.gone("agent", "eth0", "1")
    assert known.agents() == [agent("h1")]
    assert known.cut_off("eth1") and not known.cut_off("eth1")
    assert known.agents() == [] and known.trackers() == [tracker("t1")]


def test_no_more_are_known_than_the_limit() -> None:
    known = LinkPeers(ME)
    for number in range(PEERS_MAX):
        assert known.heard("agent", "eth0", str(number), agent(f"h{number}"))
    assert not known.heard("agent", "eth0", "more", agent("more"))
    assert known.heard("tracker", "eth0", "t", tracker("t1")), "agents take no place from trackers"
    known.gone("agent", "eth0", "7")
    assert known.heard("agent", "eth0", "more", agent("more"))
    assert len(known.agents()) == PEERS_MAX


def test_trackers_of_the_zone_come_first_then_the_same_protocol_then_the_newest() -> None:
    near, same = tracker("near", "a", PROTOCOL_VERSION + 1), tracker("same", "b")
    newer, older = tracker("newer", "b", PROTOCOL_VERSION + 2), tracker("older", "b", PROTOCOL_VERSION - 1)
    for order in permutations([near, same, newer, older]):
        known = LinkPeers(ME)
        for number, each in enumerate(order):
            known.heard("tracker", "eth0", str(number), each)
        assert known.trackers() == [near, same, newer, older]


def test_agents_spread_over_equal_trackers() -> None:
    first = []
    for number in range(300):
        known = LinkPeers(replace(ME, host=f"h{number}"))
        for name in ("t1", "t2", "t3"):
            known.heard("tracker", "eth0", name, tracker(name))
        first.append(known.trackers()[0].host)
    assert all(first.count(name) > 60 for name in ("t1", "t2", "t3"))


# -- plans


def parents(names: list[Announcement], layout: PieceLayout) -> list[dict[str, str | None]]:
    """For each stripe, whom each host hangs below when all know each other."""
    trees: list[dict[str, str | None]] = [{} for _ in range(layout.stripes)]
    for each in names:
        for stripe in plan_without_tracker(BLOB, layout, each, names).stripes:
            trees[stripe.stripe][each.host] = stripe.parent.host if stripe.parent else None
    return trees


@pytest.mark.parametrize("count", [1, 2, 3, 8, 30])
def test_the_parents_of_a_stripe_make_one_tree(count: int) -> None:
    for tree in parents(fleet(count), LARGE):
        tops = [name for name, parent in tree.items() if parent is None]
        assert len(tops) == 1
        assert list(tree.values()).count(tops[0]) == min(CHILDREN, count - 1)
        assert all(list(tree.values()).count(name) <= CHILDREN for name in tree)
        for name in tree:
            above, steps = tree[name], 0
            while above is not None:
                above, steps = tree[above], steps + 1
                assert steps <= count, "a circle"


def test_another_host_is_on_top_of_each_stripe() -> None:
    tops = {name for tree in parents(fleet(30), LARGE) for name, parent in tree.items() if parent is None}
    assert len(tops) > 1


def test_each_zone_imports_once() -> None:
    names = [*(agent(f"a{number}", "a") for number in range(9)), *(agent(f"b{number}", "b") for number in range(5))]
    for tree in parents(names, LARGE):
        crossing = [name for name, parent in tree.items() if parent is not None and parent[0] != name[0]]
        assert len(crossing) == 1


def test_only_who_can_read_the_origin_is_a_superpeer_and_on_top() -> None:
    poor = [agent(f"p{number}", origin=False) for number in range(20)]
    names = [*poor, agent("rich")]
    for each in names:
        plan = plan_without_tracker(BLOB, LARGE, each, names)
        assert [superpeer.host for superpeer in plan.keepers] == ["rich"]
    assert all(
        tree["rich"] is None and None not in [tree[each.host] for each in poor] for tree in parents(names, LARGE)
    )


def test_superpeers_are_few_and_of_the_same_zone_first() -> None:
    far, near = [agent(f"f{number}", "b") for number in range(200)], [agent(f"n{number}") for number in range(40)]
    plan = plan_without_tracker(BLOB, SMALL, ME, [*far, *near])
    hosts = [superpeer.host for superpeer in plan.keepers]
    assert len(hosts) == KEEPERS_MAX and "me" in hosts
    assert {each.host for each in near} <= set(hosts)


def test_who_had_the_blob_before_is_asked_before_the_origin() -> None:
    names = fleet(10)
    plan = plan_without_tracker(BLOB, SMALL, ME, names, {each.host for each in names})
    (stripe,) = plan.stripes
    assert len(stripe.alternates) == EARLIER_MAX and stripe.parent not in stripe.alternates
    first = {
        plan_without_tracker(BLOB, SMALL, replace(ME, host=f"m{number}"), names, {each.host for each in names})
        .stripes[0]
        .alternates[0]
        .host
        for number in range(40)
    }
    assert len(first) > 3, "they do not all turn to one"


def test_one_host_alone_reads_the_origin_and_not_without_one() -> None:
    plan = plan_without_tracker(BLOB, LARGE, ME, [])
    assert plan.keepers == (ME.source,) and all(stripe.parent is None for stripe in plan.stripes)
    assert plan_without_tracker(BLOB, LARGE, replace(ME, origin=False), []).keepers == ()


@given(st.integers(0, 12), st.integers(0, 3))
def test_of_all_who_begin_together_one_reads_each_stripe(others: int, stripe: int) -> None:
    """The order of parents is that of the superpeers: whoever has nobody above it comes to the
    origin first."""
    names = [ME, *fleet(others)]
    readers = []
    for each in names:
        plan = plan_without_tracker(BLOB, LARGE, each, names)
        candidates = Candidates(each.host, BLOB, stripe)
        candidates.superpeers_named(plan.keepers)
        candidates.planned(plan.stripes[stripe].parent, plan.stripes[stripe].alternates)
        source, at = candidates.choose(Sources(), alone=True, now=0.0)
        if source is None:
            source, _ = candidates.choose(Sources(), alone=True, now=at)
        if source == ORIGIN:
            readers.append(each.host)
            assert candidates.rank == 0
    assert len(readers) == 1


@given(st.permutations(fleet(7)))
def test_the_order_in_which_others_were_heard_makes_no_difference(names: list[Announcement]) -> None:
    plan = plan_without_tracker(BLOB, LARGE, ME, names, {"h1", "h3"})
    assert plan.stripes == plan_without_tracker(BLOB, LARGE, ME, fleet(7), {"h3", "h1"}).stripes
