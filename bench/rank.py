"""Ranking many hosts for a package: how long a tracker takes to answer a scheduler.

    python bench/rank.py --hosts 10000 --blobs 20 --json

The tracker's own core, filled as agents fill it: a share of the hosts holds every blob, a share
holds part of them, the rest nothing. Each question ranks hosts and encodes the answer; while it
does, the tracker serves no session. The goal is 50 ms of CPU, for the first question about a
package, too. Each round asks a fleet that was made anew.
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

from p2pdist.cli.daemon import COLLECT_AFTER
from p2pdist.model.digest import Digest, digest_of
from p2pdist.model.messages import PROTOCOL_VERSION, Hello, Holding, Holdings
from p2pdist.model.pieces import PieceLayout
from tracker.core.affinity import Affinity, RoleNeed
from tracker.core.events import Received, SessionOpened
from tracker.core.fleet import Fleet

GOAL_MS = 50.0
RACK_HOSTS = 40
SIZE = 512 << 20
PIECE = 1 << 20


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hosts", type=int, default=10_000)
    parser.add_argument("--blobs", type=int, default=20)
    parser.add_argument("--repeat", type=int, default=9, help="questions of each kind in a round")
    parser.add_argument("--rounds", type=int, default=3, help="fleets that are made anew and asked for the first time")
    parser.add_argument("--json", action="store_true")
    chosen = parser.parse_args()
    gc.set_threshold(*COLLECT_AFTER)
    rounds = [one_round(chosen.hosts, chosen.blobs, chosen.repeat) for _ in range(chosen.rounds)]
    found = {name: [each[name] for each in rounds] for name in rounds[0]}
    figures = {name: round(statistics.median(took), 2) for name, took in found.items()}
    worst = {name: round(max(took), 2) for name, took in found.items()}
    result = {"hosts": chosen.hosts, "blobs": chosen.blobs, "rounds": chosen.rounds, "goal_ms": GOAL_MS}
    result |= {"cpu_ms": figures, "cpu_ms_worst": worst}
    result["met"] = max(figures["first"], figures["all"]) <= GOAL_MS
    if chosen.json:
        print(json.dumps(result))
        return 0
    print(f"{'ms of CPU':28} {'median':>8} {'worst':>8}   of {chosen.rounds} rounds")
    for name, took_ms in figures.items():
        print(f"{name.replace('_', ' '):28} {took_ms:8.1f} {worst[name]:8.1f}")
    print(f"goal for all hosts, the first time and again: {GOAL_MS:.0f} ms {'met' if result['met'] else 'MISSED'}")
    return 0


def one_round(hosts: int, count: int, repeat: int) -> dict[str, float]:
    """Milliseconds of CPU by question, about a fleet that was never asked before."""
    digests = blobs(count)
    fleet = filled(hosts, digests)
    affinity = Affinity(fleet.hosts, fleet.swarms, fleet.capacities)
    parts = dict.fromkeys(digests, SIZE)
    names, few, half = list(fleet.hosts), list(fleet.hosts)[: max(1, hosts // 100)], hosts // 2
    roles = [RoleNeed("load", dict.fromkeys(digests[: count // 2], SIZE), hosts // 10), RoleNeed("train", parts, half)]
    questions: dict[str, Callable[[], object]] = {
        "all": lambda: affinity.rank(parts, names),
        "selection": lambda: affinity.rank(parts, few),
        "best_half_in_whole_racks": lambda: affinity.coherent(affinity.rank(parts, names), half),
        "pick_half": lambda: affinity.pick(parts, names, half),
        "two_roles": lambda: affinity.assign(roles, names),
    }
    took = {"first": measure(questions["all"], 1)}
    return took | {name: measure(ask, repeat) for name, ask in questions.items()}


def measure(ask: Callable[[], object], repeat: int) -> float:
    """Median milliseconds of CPU for a question and the encoding of its answer."""
    took = []
    for _ in range(repeat):
        started = time.thread_time()
        msgspec.json.encode(ask())
        took.append(1000 * (time.thread_time() - started))
    return statistics.median(took)


def blobs(count: int) -> list[Digest]:
    return [digest_of(str(number).encode()) for number in range(count)]


def filled(hosts: int, digests: list[Digest]) -> Fleet:
    """A fleet in which a third of the hosts has everything, a third nothing and a third some pieces
    of each blob."""
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
