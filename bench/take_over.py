"""Several trackers under the load of many hosts, of which one dies: real sessions over loopback, to
every tracker from every host, and one blob.

    python -m bench.take_over --state postgresql://tracker@/postgres?host=/run/postgresql \\
                              [--hosts 4000] [--trackers 3] [--pieces 4096] [--json]

Half of the hosts join the blob at its owner. Then the owner is killed. As soon as a host hears of
it from another tracker, it tells the next owner from which hosts it receives, as agents do, and
again where that one had not heard of it yet and refused; the other half of the hosts joins there in
that moment. The hosts move no data.

Figures: `noticed` from the kill until the first and until the last host heard of the next epoch;
`planned` from then until every host that joined has a parent for every stripe, though a tracker
that takes over waits for what hosts say before it lets one read the origin; `refused` how many had
to speak twice; `cpu_s` of the next owner meanwhile; its resident bytes per session, per host of the
blob, and per host of a second blob that all hosts join there afterwards: the first one's have the
room in them that planning takes for a moment, and that stays for the next plan. The database must
be empty, or that of this benchmark alone.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import os
import signal
import sys
import time
from multiprocessing.connection import Connection
from typing import Any

from bench.load_hosts import BLOB, CONNECTING_MAX, PIECE_BYTES, Host, Load, layout_of, raise_file_limit
from bench.processes import cpu_s
from bench.several_trackers import share_evenly, trackers
from bench.tracker_load import resident
from p2pdist.model.digest import Digest, digest_of
from p2pdist.model.messages import Assign, EpochSeen, Holding, NotOwner, OwnershipChanged, decode_from_tracker
from p2pdist.model.ownership import Ownership, owner

NOTICE_S, PLAN_S = 60.0, 60.0
BLOBS = [digest_of(b"further %d" % number) for number in range(1000)]
"""Of which one belongs to the next owner, too."""


class Session(Host):
    """A session of one host with one tracker."""

    load: Fleet

    def __init__(self, load: Fleet, number: int, tracker: int) -> None:
        super().__init__(load, number)
        self._tracker = tracker

    def _frame(self, opcode: int, payload: bytes) -> None:
        if opcode == 1 and payload.startswith((b'{"type":"ownership', b'{"type":"assign', b'{"type":"notowner')):
            message = decode_from_tracker(payload)
            if isinstance(message, OwnershipChanged) and message.ownership is not None:
                self.load.heard(self.number, self._tracker, message.ownership)
            if isinstance(message, NotOwner):
                self.load.refused(self.number, self._tracker)
            if isinstance(message, Assign):
                self.load.planned_for(self.number, self._tracker, message)
        super()._frame(opcode, payload)

    def connection_lost(self, error: Exception | None) -> None:
        if self._tracker != self.load.dead:
            super().connection_lost(error)


class Fleet(Load):
    """All hosts, with a session at every tracker each."""

    def __init__(self, ports: list[int], ids: list[str], chosen: argparse.Namespace) -> None:
        chosen.vouched = False
        super().__init__(ports[0], chosen)
        self.ports, self.ids, self.dead = ports, ids, -1
        self.sessions: list[list[Session]] = [[] for _ in ports]
        self.parents: dict[int, list[str | None]] = {}
        self.owner = -1
        self.epoch = 0
        self.heard_at: dict[int, float] = {}
        self.refusals: set[int] = set()
        """Hosts that the next owner refused, since it had not heard of the epoch."""
        self.refused_count = 0
        self.missing: dict[int, set[int]] = {}
        self.planned_last = 0.0
        self.done = asyncio.Event()
        self.blob = BLOB
        """The blob whose plans count."""

    async def connect_all(self) -> dict[str, float]:
        """Open every session."""
        started, slots, loop = time.monotonic(), asyncio.Semaphore(CONNECTING_MAX), asyncio.get_running_loop()

        async def open_one(tracker: int, number: int) -> None:
            async with slots:
                session = Session(self, number, tracker)
                await loop.create_connection(lambda: session, "127.0.0.1", self.ports[tracker])
                await session.welcomed
                self.sessions[tracker].append(session)

        async with asyncio.TaskGroup() as group:
            for tracker in range(len(self.ports)):
                for number in range(self.count):
                    group.create_task(open_one(tracker, number))
        for sessions in self.sessions:
            sessions.sort(key=lambda session: session.number)
        return {"accept_s": time.monotonic() - started}

    async def join_half(self, owning: int) -> dict[str, float]:
        """The first half of the hosts joins at the owner."""
        started, self.owner = time.monotonic(), owning
        some = range(self.count // 2)
        self.missing = {number: set(range(self.stripes)) for number in some}
        self.done.clear()
        for number in some:
            self.sessions[owning][number].join()
        await self._all_planned(PLAN_S)
        return {"planned_s": self.planned_last - started}

    async def _all_planned(self, limit_s: float) -> None:
        try:
            await asyncio.wait_for(self.done.wait(), limit_s)
        except TimeoutError:
            stripes = sum(map(len, self.missing.values()))
            raise SystemExit(
                f"{len(self.missing)} hosts lack a parent in {stripes} stripes after {limit_s:.0f} s; "
                f"{len(self.heard_at)} heard of the next epoch"
            ) from None

    def planned_for(self, number: int, tracker: int, message: Assign) -> None:
        """A host has got a plan."""
        if tracker != self.owner or message.plan.blob != self.blob:
            return
        held = self.parents.setdefault(number, [None] * self.stripes)
        for each in message.plan.stripes:
            if each.parent is not None:
                held[each.stripe] = "" if each.parent.is_origin else each.parent.host
        missing = self.missing.get(number)
        if missing is None:
            return
        missing.difference_update(each.stripe for each in message.plan.stripes if each.parent is not None)
        if not missing:
            del self.missing[number]
            if not self.missing:
                self.planned_last = time.monotonic()
                self.done.set()

    def heard(self, number: int, tracker: int, ownership: Ownership) -> None:
        """A host has heard of an epoch: it speaks to the next owner, once, and again where that had
        not heard of the epoch yet."""
        if self.dead < 0:
            return
        following = self.ids.index(owner(ownership, BLOB).id)
        if following == self.dead:
            return
        if number in self.heard_at:
            if tracker == following and number in self.refusals:
                self.refusals.remove(number)
                self._speak(number)
            return
        self.owner, self.epoch = following, ownership.epoch
        self.heard_at[number] = time.monotonic()
        self._speak(number)

    async def join_further(self, blob: Digest) -> dict[str, float]:
        """All hosts join one more blob at the next owner."""
        started, self.blob = time.monotonic(), blob
        self.missing = {number: set(range(self.stripes)) for number in range(self.count)}
        self.done.clear()
        for session in self.sessions[self.owner]:
            session.send(Holding(blob, self.pieces * PIECE_BYTES, PIECE_BYTES, (0,) * self.stripes))
        await self._all_planned(PLAN_S)
        return {"planned_s": self.planned_last - started}

    def refused(self, number: int, tracker: int) -> None:
        """A tracker does not own the blob by what it has heard."""
        if tracker == self.owner and self.dead >= 0:
            self.refusals.add(number)
            self.refused_count += 1
            self.sessions[tracker][number].send(EpochSeen(self.epoch))

    def _speak(self, number: int) -> None:
        session = self.sessions[self.owner][number]
        if number >= self.count // 2:
            session.join()
            return
        size, counts = self.pieces * PIECE_BYTES, (1,) * self.stripes
        session.send(Holding(BLOB, size, PIECE_BYTES, counts, tuple(self.parents[number])))

    def mark(self, dead: int) -> None:
        """The owner is about to be killed."""
        self.dead = dead
        self.missing = {number: set(range(self.stripes)) for number in range(self.count // 2, self.count)}
        self.done.clear()

    async def take_over(self, killed_at: float) -> dict[str, float]:
        """Wait until the second half of the hosts has its plan."""
        await self._all_planned(NOTICE_S + PLAN_S)
        first, last = min(self.heard_at.values()), max(self.heard_at.values())
        return {
            "noticed_first_s": first - killed_at,
            "noticed_last_s": last - killed_at,
            "planned_after_notice_s": self.planned_last - last,
            "planned_after_kill_s": self.planned_last - killed_at,
            "refused": float(self.refused_count),
        }


def hosts(commands: Connection, ports: list[int], ids: list[str], chosen: argparse.Namespace) -> None:
    """The process with the hosts: does what it is told, one command after the other."""
    raise_file_limit()

    async def work() -> None:
        fleet = Fleet(ports, ids, chosen)
        while True:
            name, *words = await asyncio.to_thread(commands.recv)
            answer: dict[str, float] = {}
            match name:
                case "connect":
                    answer = await fleet.connect_all()
                case "join":
                    answer = await fleet.join_half(*words)
                case "mark":
                    fleet.mark(*words)
                case "take over":
                    answer = await fleet.take_over(*words)
                case "join further":
                    answer = await fleet.join_further(*words)
                case _:
                    os._exit(0)
            commands.send((fleet.failure, answer))

    asyncio.run(work())


class Hosts:
    """The process with the hosts, as this one sees it."""

    def __init__(self, ports: list[int], ids: list[str], chosen: argparse.Namespace) -> None:
        self._commands, theirs = multiprocessing.Pipe()
        context = multiprocessing.get_context("spawn")
        self._process = context.Process(target=hosts, args=(theirs, ports, ids, chosen), daemon=True)
        self._process.start()

    def run(self, *command: Any) -> dict[str, float]:
        self._commands.send(command)
        failure, answer = self._commands.recv()
        if failure:
            raise SystemExit(f"{command[0]}: {failure}")
        figures: dict[str, float] = answer
        return figures

    def stop(self) -> None:
        self._process.kill()
        self._process.join()


def measure(chosen: argparse.Namespace) -> dict[str, Any]:
    """One take-over."""
    with trackers(None, chosen.state, chosen.trackers) as running:
        urls = list(running)
        ids = [url.removeprefix("http://").replace(":", "-") for url in urls]
        now = share_evenly(chosen.state, set(ids))
        owning = ids.index(owner(now, BLOB).id)
        rest = Ownership(now.epoch, tuple(tracker for tracker in now.trackers if tracker.id != ids[owning]))
        following = running[urls[ids.index(owner(rest, BLOB).id)]].pid
        crowd = Hosts([int(url.rpartition(":")[2]) for url in urls], ids, chosen)
        try:
            empty = resident(following)
            found: dict[str, Any] = {"connect": crowd.run("connect")}
            connected = resident(following)
            found["join"] = crowd.run("join", owning)
            crowd.run("mark", owning)
            before = cpu_s(following)
            running[urls[owning]].kill()
            found["take_over"] = crowd.run("take over", time.monotonic())
            found["take_over"]["cpu_s"] = cpu_s(following) - before
            found["bytes_per_session"] = (connected - empty) / chosen.hosts
            found["bytes_per_host_and_blob"] = (resident(following) - connected) / chosen.hosts
            joined = resident(following)
            further = next(blob for blob in BLOBS if owner(rest, blob).id == owner(rest, BLOB).id)
            found["join_further"] = crowd.run("join further", further)
            found["bytes_per_host_and_further_blob"] = (resident(following) - joined) / chosen.hosts
            return found
        finally:
            crowd.stop()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--state", required=True, help="the database of the trackers, postgresql://...")
    parser.add_argument("--hosts", type=int, default=4000)
    parser.add_argument("--trackers", type=int, default=3)
    parser.add_argument("--pieces", type=int, default=4096, help="their number decides the stripes")
    parser.add_argument("--json", action="store_true")
    chosen = parser.parse_args()
    raise_file_limit()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    found = measure(chosen)
    if chosen.json:
        print(json.dumps(found))
        return 0
    print(f"{chosen.hosts} hosts, {chosen.trackers} trackers, {layout_of(chosen.pieces).stripes} stripes")
    for key, value in found.items():
        for part, figure in value.items() if isinstance(value, dict) else [("", value)]:
            print(f"{key + ' ' + part:36} {figure:12,.3f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
