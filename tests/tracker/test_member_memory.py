"""What a tracker keeps of a host and blob."""

from __future__ import annotations

import gc
import tracemalloc
from collections.abc import Collection

from hypothesis import given
from hypothesis import strategies as st

from p2pdist.model.digest import Digest, digest_of
from p2pdist.model.messages import PROTOCOL_VERSION, Hello, Holding, decode_from_agent, encode
from p2pdist.model.pieces import PieceLayout
from p2pdist.model.plan import ORIGIN, Source, StripePlan
from tracker.core.events import Due, Received, SessionOpened, Tick
from tracker.core.fleet import Fleet
from tracker.core.host import KEYS_SHARED_MAX, with_key, without_key
from tracker.core.member import TOLD_MAX
from tracker.core.repair.starvation import was_named
from tracker.core.swarm import Swarm

HOSTS = 2000
KEPT_MAX, PEAK_MAX = 1150, 1700
"""Bytes of the core for each host and blob: what stays, and the most while a plan is made and told.
At a tracker there are frames, and the room between objects, besides."""


def test_what_is_kept_of_each_host_and_blob_is_small() -> None:
    """Of a blob that all hosts of a site join at once and that has four stripes, the first one and
    another."""
    fleet = Fleet(0.0)
    for number in range(HOSTS):
        hello = Hello(
            PROTOCOL_VERSION, f"host-{number}", f"10.0.{number >> 8}.{number & 255}:7071", "z1", f"r{number // 40}"
        )
        fleet.handle(SessionOpened(number, decode_from_agent(encode(hello))), now=100.0)  # type: ignore[arg-type]
    for name, now in ((b"first", 110.0), (b"second", 120.0)):
        gc.collect()
        tracemalloc.start()
        try:
            join(fleet, name, now)
            gc.collect()
            kept, peak = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        assert all(not swarm.edges.unplanned for swarm in fleet.swarms.values())
        assert kept / HOSTS <= KEPT_MAX and peak / HOSTS <= PEAK_MAX, (name, kept / HOSTS, peak / HOSTS)


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 2 * KEYS_SHARED_MAX)), max_size=80))
def test_keys_that_hosts_share_are_those_of_a_dictionary_in_its_order(steps: list[tuple[bool, int]]) -> None:
    """A host's swarms decide in which order it is looked at, whether it is in few or many."""
    keys: Collection[Digest] = ()
    expected: dict[Digest, None] = {}
    for enters, number in steps:
        key = digest_of(b"%d" % number)
        before, held = keys, list(expected)
        keys = with_key(keys, key) if enters else without_key(keys, key)
        if enters:
            expected[key] = None
        else:
            expected.pop(key, None)
        assert list(keys) == list(expected) and bool(keys) == bool(expected)
        assert isinstance(before, dict) or list(before) == held  # another host may have it


def test_a_member_remembers_the_hosts_of_its_latest_plans_alone() -> None:
    """It may complain of what the last TOLD_MAX plans named, and of nothing before."""
    swarm = Swarm(digest_of(b"first"), PieceLayout(4 << 20, 1 << 20))
    member = swarm.add("h", (0,) * swarm.stripes, slots=1, now=0.0)
    for number in range(TOLD_MAX + 2):
        member.record_plan(
            [StripePlan(0, Source(f"p{number}", "10.0.0.1:7071"), (Source("a", "10.0.0.2:7071"), ORIGIN))]
        )
    assert [number for number in range(TOLD_MAX + 2) if was_named(member, f"p{number}")] == list(range(2, TOLD_MAX + 2))
    assert was_named(member, "a")
    for _ in range(TOLD_MAX):
        member.record_plan([StripePlan(0, ORIGIN)])
    assert not was_named(member, "a")


def join(fleet: Fleet, name: bytes, now: float) -> None:
    """All hosts join a blob, and are planned."""
    for number in range(HOSTS):
        holding = Holding(digest_of(name), 4096 << 20, 1 << 20, (0, 0, 0, 0))
        fleet.handle(Received(number, decode_from_agent(encode(holding))), now=now)
    for step in range(1, 5):
        fleet.handle(Tick(), now=now + step / 2)
        while fleet.wake_at < now:
            fleet.handle(Due(), now=now + step / 2)
