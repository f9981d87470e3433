"""Trackers' cores of preseeds, a database and hosts that do as they are told, on one clock; for
tests that read as scripts."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import msgspec

from p2pdist.model.digest import digest_of
from p2pdist.model.messages import PROTOCOL_VERSION, Hello, Keep, Kept, Release
from p2pdist.model.preseed import PreseedRecord, PreseedRequest, canonical
from tracker.core.affinity import Affinity
from tracker.core.events import SessionClosed, SessionOpened
from tracker.core.fleet import Fleet
from tracker.core.preseeds.orders import RECONNECT_GRACE_S, Preseeds
from tracker.core.preseeds.preseed import (
    AskCandidates,
    Candidates,
    Event,
    Gone,
    Joined,
    Loaded,
    Reported,
    Save,
    SaveFailed,
    Synced,
    Tick,
)

BLOB = digest_of(b"blob")
SIZE = 1000


class Tracker:
    """One tracker of a world. `told` is all that it told its hosts, in order."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.fleet = Fleet(-1000.0)
        self.sessions: dict[str, int] = {}
        affinity = Affinity(self.fleet.hosts, self.fleet.swarms, self.fleet.capacities)
        self.core = Preseeds(affinity, started_at=world.now, shared=world.shared, lost=self.fleet.lost)
        self.told: list[tuple[str, Keep | Release]] = []
        self.unsaved: list[PreseedRecord] = []
        self.handle(Loaded(tuple(world.rows.values())))

    def handle(self, event: Event) -> None:
        """Tell the core; what it wants to save waits in `unsaved` while the world's database is
        slow."""
        for command in self.core.handle(event, now=self.world.now):
            if isinstance(command, Save):
                self.unsaved.append(command.record)
                continue
            if isinstance(command, AskCandidates):
                self.handle(Candidates(command.id, self.world.candidates(self)))
                continue
            if command.host in self.sessions:
                self.told.append((command.host, command.message))
                self.world.hosts[command.host].hear(command.message)
        if not self.world.slow:
            self.save()

    def save(self) -> None:
        """Write what waits, where the database still has its version."""
        while self.unsaved:
            record = self.unsaved.pop(0)
            present = self.world.rows.get(record.id)
            if present is not None and present.version == record.version:
                self.world.rows[record.id] = replace(record, version=record.version + 1)
            found = self.world.rows.get(record.id)
            self.handle(Loaded((found,)) if found is not None else SaveFailed(record.id))

    def tick(self) -> None:
        self.handle(Tick())

    def exchange(self) -> None:
        said = {
            f"t{number}": other.core.local_reports(now=self.world.now)
            for number, other in enumerate(self.world.trackers)
            if other is not self
        }
        self.handle(Loaded(tuple(self.world.rows.values())))
        self.handle(Synced(frozenset(self.world.rows), said))


class Agent:
    """A host: what it keeps, by preseed, and how far it is with it."""

    def __init__(self, name: str, zone: str, rack: str) -> None:
        self.name, self.zone, self.rack = name, zone, rack
        self.keeps: dict[str, str] = {}
        self.tracker: Tracker | None = None

    def hear(self, message: Keep | Release) -> None:
        match message:
            case Keep(identifier):
                self.keeps[identifier] = "done" if self.keeps.get(identifier) == "done" else "pulling"
            case Release(identifier):
                self.keeps.pop(identifier, None)

    def say(self, identifier: str, state: Any, reason: str = "") -> None:
        """Tell the tracker how far it is."""
        assert self.tracker is not None
        if identifier in self.keeps:
            self.keeps[identifier] = state
            done = SIZE if state == "done" else 0
            self.tracker.handle(Reported(self.name, Kept(identifier, state, done, SIZE, reason)))


class World:
    """See the module's text. `slow`: saves wait until somebody calls `save`."""

    def __init__(self, *, trackers: int = 1) -> None:
        self.now = 1_000_000.0
        self.shared = trackers > 1
        self.slow = False
        self.rows: dict[str, PreseedRecord] = {}
        self.hosts: dict[str, Agent] = {}
        self.numbers = itertools.count(1)
        self.deaf: list[Tracker] = []
        self.surveys = 0
        self.trackers: list[Tracker] = []
        for _ in range(trackers):
            self.trackers.append(Tracker(self))

    @property
    def tracker(self) -> Tracker:
        return self.trackers[0]

    def candidates(self, asking: Tracker) -> Affinity:
        """What all trackers that are not `deaf` know of hosts."""
        hosts = dict(asking.fleet.hosts)
        for other in self.trackers:
            if other not in self.deaf:
                hosts.update({name: host for name, host in other.fleet.hosts.items() if name not in hosts})
        self.surveys += 1
        return Affinity(hosts, asking.fleet.swarms, asking.fleet.capacities)

    def join(self, *names: str, tracker: int = 0) -> None:
        """Hosts named zone/rack/name, or just by name, connect, and say what they keep."""
        for text in names:
            zone, rack, name = text.split("/") if "/" in text else ("", "", text)
            agent = self.hosts.setdefault(name, Agent(name, zone, rack))
            agent.tracker = at = self.trackers[tracker]
            at.sessions[name] = next(self.numbers)
            hello = Hello(PROTOCOL_VERSION, name, f"{name}:1", agent.zone, agent.rack)
            at.fleet.handle(SessionOpened(at.sessions[name], hello), now=self.now)
            at.handle(Joined(name))
            for identifier, state in list(agent.keeps.items()):
                agent.say(identifier, state)
            at.tick()

    def leave(self, *names: str) -> None:
        for name in names:
            at = self.hosts[name].tracker
            assert at is not None
            at.fleet.handle(SessionClosed(at.sessions.pop(name)), now=self.now)
            self.hosts[name].tracker = None
            at.handle(Gone(name))

    def ask(self, identifier: str, **asked: Any) -> None:
        """Order a preseed at the first tracker."""
        deadline, ttl = asked.get("deadline"), asked.get("ttl")
        request = msgspec.convert({"package": "a:v1", **asked}, PreseedRequest)
        record = PreseedRecord(
            identifier,
            1,
            canonical(request),
            f"a@{BLOB}",
            ((BLOB, SIZE),),
            "running",
            self.now,
            deadline_at=self.now + deadline if deadline else None,
            expires_at=self.now + ttl if ttl else None,
        )
        self.rows[identifier] = record
        self.tracker.handle(Loaded((record,)))

    def cancel(self, identifier: str) -> None:
        row = self.rows[identifier]
        self.rows[identifier] = replace(row, version=row.version + 1, state="cancelled", ended_at=self.now)
        self.tracker.handle(Loaded((self.rows[identifier],)))

    def restart(self) -> None:
        """The first tracker is killed and started again; its hosts are yet to return."""
        for agent in self.hosts.values():
            if agent.tracker is self.tracker:
                agent.tracker = None
        self.trackers[0] = Tracker(self)

    def wait(self, seconds: float) -> None:
        for _ in range(int(seconds * 4)):
            self.now += 0.25
            for tracker in self.trackers:
                tracker.tick()
                if self.shared:
                    tracker.exchange()

    def settle(self) -> None:
        self.wait(RECONNECT_GRACE_S + 1)

    def say(self, identifier: str, state: str, *names: str, reason: str = "") -> None:
        for name in names:
            self.hosts[name].say(identifier, state, reason)
        for tracker in self.trackers:
            tracker.tick()

    def finish(self, identifier: str) -> None:
        """All hosts that pull for it are done."""
        for agent in self.hosts.values():
            if agent.keeps.get(identifier) == "pulling" and agent.tracker is not None:
                agent.say(identifier, "done")
        for tracker in self.trackers:
            tracker.tick()

    def keeping(self, identifier: str) -> list[str]:
        """Hosts that are connected and keep something for it."""
        return sorted(
            agent.name for agent in self.hosts.values() if agent.tracker is not None and identifier in agent.keeps
        )

    def progress(self, identifier: str, tracker: int = 0) -> Any:
        return self.trackers[tracker].core.progress(identifier, now=self.now)

    def state(self, identifier: str, tracker: int = 0) -> str:
        return str(self.progress(identifier, tracker).state)

    def failures(self, identifier: str) -> dict[str, str]:
        return {each.host: each.reason for each in self.progress(identifier).failures}
