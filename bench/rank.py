"""Ranking many hosts for a package: how long a tracker takes to answer a scheduler.

    python bench/rank.py --hosts 10000 --blobs 20 --json

The tracker's own core, filled as agents fill it: a share of the hosts holds every blob, a share holds part of them, the rest nothing. Each
question ranks hosts and encodes the answer; while it does, the tracker serves no session. The goal is 50 ms. The first
question about a package takes longer than those that follow, and so do those after its swarms have changed.
"""

from __future__ import annotations

import argparse
import gc
import json
import random
import statistics
import sys
import time
from collections.abc import Callable

import msgspec

from p2pdist.model.digest import Digest, digest_of
from p2pdist.model.messages import PROTOCOL_VERSION, Hello, Holding, Holdings
from p2pdist.model.pieces import PieceLayout
from tracker.core.affinity import Affinity, Wanted
from tracker.core.events import Received, SessionOpened
from tracker.core.fleet import Fleet
from tracker.service import COLLECT_AFTER

GOAL_MS = 50.0
RACK_HOSTS = 40
SIZE = 512 << 20
PIECE = 1 << 20


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hosts", type=int, default=10_000)
    parser.add_argument("--blobs", type=int, default=20)
    parser.add_argument("--repeat", type=int, default=9)
    parser.add_argument("--json", action="store_true")
    chosen = parser.parse_args()
    fleet = filled(chosen.hosts, blobs(chosen.blobs))
    affinity = Affinity(fleet.hosts, fleet.swarms, fleet.capacities)
    parts = dict.fromkeys(blobs(chosen.blobs), SIZE)
    names, few = list(fleet.hosts), list(fleet.hosts)[: max(1, chosen.hosts // 100)]
    half = chosen.hosts // 2
    gc.set_threshold(*COLLECT_AFTER)
    first = measure(lambda: affinity.rank(parts, names), 1)
    questions: dict[str, Callable[[], object]] = {
        "all": lambda: affinity.rank(parts, names),
        "selection": lambda: affinity.rank(parts, few),
        "best_half_in_whole_racks": lambda: affinity.coherent(affinity.rank(parts, names), half),
        "pick_half": lambda: affinity.pick(parts, names, half),
        "two_roles": lambda: affinity.assign(
            [Wanted("train", parts, half), Wanted("load", dict(list(parts.items())[:2]), chosen.hosts // 10)], names
        ),
    }
    figures = {"first": first} | {name: measure(ask, chosen.repeat) for name, ask in questions.items()}
    result = {"hosts": chosen.hosts, "blobs": chosen.blobs, "cpu_ms": figures, "goal_ms": GOAL_MS}
    result["met"] = figures["all"] <= GOAL_MS
    if chosen.json:
        print(json.dumps(result))
        return 0
    for name, took_ms in figures.items():
        print(f"{name.replace('_', ' '):28} {took_ms:8.1f} ms of CPU")
    print(f"goal for all hosts: {GOAL_MS:.0f} ms {'met' if result['met'] else 'MISSED'}")
    return 0


def measure(ask: Callable[[], object], repeat: int) -> float:
    """Median milliseconds of CPU for a question and the encoding of its answer."""
    took = []
    for _ in range(repeat):
        started = time.thread_time()
        msgspec.json.encode(ask())
        took.append(1000 * (time.thread_time() - started))
    return round(statistics.median(took), 2)


def blobs(count: int) -> list[Digest]:
    return [digest_of(str(number).encode()) for number in range(count)]


def filled(hosts: int, digests: list[Digest]) -> Fleet:
    """A fleet in which a third of the hosts has everything, a third nothing and a third some pieces of each blob."""
    fleet, chance = Fleet(started_at=-1000.0), random.Random(1)
    layout = PieceLayout(SIZE, PIECE)
    whole = tuple(len(range(stripe, layout.count, layout.stripes)) for stripe in range(layout.stripes))
    for number in range(hosts):
        rack = f"r{number // RACK_HOSTS}"
        hello = Hello(PROTOCOL_VERSION, f"h{number:05}", f"10.0.0.1:{number}", f"z{number % 3}", rack)
        fleet.handle(SessionOpened(number + 1, hello), now=0.0)
        if number % 3 == 0:
            continue
        share = 1.0 if number % 3 == 1 else chance.random()
        counts = tuple(int(share * count) for count in whole)
        # All in one message, without planning in between: a plan comes when its time has come.
        held = Holdings(tuple(Holding(digest, SIZE, PIECE, counts) for digest in digests))
        fleet.handle(Received(number + 1, held), now=0.0)
    return fleet


if __name__ == "__main__":
    sys.exit(main())
