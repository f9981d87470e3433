"""What a tracker keeps of a host and blob."""

from __future__ import annotations

import gc
import tracemalloc

from p2pdist.model.digest import digest_of
from p2pdist.model.messages import PROTOCOL_VERSION, Hello, Holding, decode_from_agent, encode
from tracker.core.events import Due, Received, SessionOpened, Tick
from tracker.core.fleet import Fleet

HOSTS = 2000
KEPT_MAX, PEAK_MAX = 1200, 1800
"""Bytes of the core for each host and blob: what stays, and the most while a plan is made and told.
At a tracker there are frames, and the room between objects, besides."""


def test_what_is_kept_of_each_host_and_blob_is_small() -> None:
    """Of a blob that all hosts of a site join at once and that has four stripes; the second one,
    since a host has dictionaries of its blobs that the first one makes."""
    fleet = Fleet(0.0)
    for number in range(HOSTS):
        hello = Hello(
            PROTOCOL_VERSION, f"host-{number}", f"10.0.{number >> 8}.{number & 255}:7071", "z1", f"r{number // 40}"
        )
        fleet.handle(SessionOpened(number, decode_from_agent(encode(hello))), now=100.0)  # type: ignore[arg-type]
    join(fleet, b"first", 110.0)
    gc.collect()
    tracemalloc.start()
    try:
        join(fleet, b"second", 120.0)
        gc.collect()
        kept, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert all(not swarm.edges.unplanned for swarm in fleet.swarms.values())
    assert kept / HOSTS <= KEPT_MAX and peak / HOSTS <= PEAK_MAX, (kept / HOSTS, peak / HOSTS)


def join(fleet: Fleet, name: bytes, now: float) -> None:
    """All hosts join a blob, and are planned."""
    for number in range(HOSTS):
        holding = Holding(digest_of(name), 4096 << 20, 1 << 20, (0, 0, 0, 0))
        fleet.handle(Received(number, decode_from_agent(encode(holding))), now=now)
    for step in range(1, 5):
        fleet.handle(Tick(), now=now + step / 2)
        while fleet.wake_at < now:
            fleet.handle(Due(), now=now + step / 2)
