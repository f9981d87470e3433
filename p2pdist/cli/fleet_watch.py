"""Watching a fleet through a tracker's `/v1/events`: takes in what changes and keeps the whole."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any
from urllib.parse import urlencode

import msgspec

from p2pdist.cli.tracker_access import TrackerAccess, with_hint
from p2pdist.model.errors import UNDECODABLE, Unavailable, from_problem, unreached
from p2pdist.transfer.server_events import events_of
from tracker.core.views.fleet_view import AWAY, BLAMED, RECEIVING, SHUNNED, SLOW, Change, SwarmRow, Totals
from tracker.core.views.tree_view import ABSENT

if TYPE_CHECKING:
    import aiohttp

CONNECT_S_MAX = 5.0
SILENCE_S_MAX = 20.0
"""Trackers say something every second."""

STORY_MAX = 500


@dataclass(slots=True)
class HostState:
    """`done` is in thousandths of what the host is receiving; see the flags of
    tracker/core/views/fleet_view.py."""

    name: str
    zone: str
    rack: str
    done: int = 1000
    flags: int = 0


@dataclass(frozen=True, slots=True)
class Happening:
    """A line of the story. A tracker sends its age; `at` is its time, in seconds since the epoch by
    this machine's clock, so the line stays true however long it is shown. `swarm` is a digest, or
    empty."""

    at: float
    swarm: str
    event: str


@dataclass(slots=True)
class FleetState:
    """All that is known of a fleet; the tree is (thousandths, parent's number) by host number."""

    totals: Totals | None = None
    swarms: list[SwarmRow] = field(default_factory=list)
    hosts: dict[int, HostState] = field(default_factory=dict)
    troubled: list[tuple[int, str]] = field(default_factory=list)
    story: deque[Happening] = field(default_factory=lambda: deque(maxlen=STORY_MAX))
    tree: dict[int, tuple[int, int]] = field(default_factory=dict)
    preseeds: list[dict[str, Any]] = field(default_factory=list)
    silent: list[tuple[str, str]] = field(default_factory=list)
    """Trackers whose hosts and swarms are not here, and why."""

    def take(self, change: Change) -> None:
        """Take in what changed."""
        if change.whole:
            self.hosts.clear()
            self.tree.clear()
            self.story.clear()
        for number, name, zone, rack in change.hosts:
            old = self.hosts.get(number)
            self.hosts[number] = HostState(name, zone, rack, *((old.done, old.flags) if old else ()))
        for number in change.forgotten:
            self.hosts.pop(number, None)
        for number, done, flags in change.states:
            if number in self.hosts:
                self.hosts[number].done, self.hosts[number].flags = done, flags
        for number, done, parent in change.tree:
            if done == ABSENT:
                self.tree.pop(number, None)
            else:
                self.tree[number] = (done, parent)
        self.totals, self.swarms, self.troubled = change.totals, change.swarms, change.troubled
        self.silent = change.silent
        now = time.time()
        self.story.extend(Happening(now - line.age_s, line.swarm, line.event) for line in change.story)

    def name(self, number: int) -> str:
        """A host's name; empty when it is known no more."""
        return self.hosts[number].name if number in self.hosts else ""

    def document(self) -> dict[str, Any]:
        """All of it, for scripts."""
        now = time.time()
        return {
            "totals": self.totals,
            "swarms": self.swarms,
            "hosts": [
                {
                    "host": host.name,
                    "zone": host.zone,
                    "rack": host.rack,
                    "done": host.done / 1000,
                    "away": bool(host.flags & AWAY),
                    "receiving": bool(host.flags & RECEIVING),
                    "slow": bool(host.flags & SLOW),
                    "blamed": bool(host.flags & BLAMED),
                    "shunned": bool(host.flags & SHUNNED),
                }
                for host in self.hosts.values()
            ],
            "troubled": [{"host": self.name(number), "why": why} for number, why in self.troubled],
            "tree": [
                {"host": self.name(number), "done": done / 1000, "parent": "" if parent < 0 else self.name(parent)}
                for number, (done, parent) in self.tree.items()
            ],
            "preseeds": self.preseeds,
            "silent": [{"tracker": tracker, "why": why} for tracker, why in self.silent],
            "story": [
                {"age_s": round(now - line.at, 3), "swarm": line.swarm, "event": line.event} for line in self.story
            ],
        }


async def follow(
    http: aiohttp.ClientSession, url: str, swarm: str = "", stripe: int = 0
) -> AsyncGenerator[FleetState, None]:
    """The state of the fleet after each change. Raises Unavailable when the tracker does not
    answer, or no more."""
    import aiohttp

    from p2pdist.model.url import redacted

    where = f"{url}/v1/events" + (f"?{urlencode({'swarm': swarm, 'stripe': stripe})}" if swarm else "")
    timeout = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_S_MAX, sock_read=SILENCE_S_MAX)
    state = FleetState()
    access = TrackerAccess.current()
    try:
        async with http.get(where, timeout=timeout, **await access.request(url)) as answer:
            if answer.status >= 400:
                problem = msgspec.json.decode(await answer.content.read(1 << 20), type=dict[str, Any])
                raise with_hint(from_problem(problem), url)
            async for kind, data in events_of(answer.content):
                if kind == "change":
                    state.take(msgspec.json.decode(data, type=Change))
                    yield state
                elif kind == "preseeds":
                    state.preseeds = msgspec.json.decode(data, type=list[dict[str, Any]])
    except UNDECODABLE as error:
        raise Unavailable(
            f"what answers at {redacted(url)} does not speak as a tracker of this version does: {error}",
            remedy="Name the tracker with --tracker, and use the same version",
        ) from error
    except (aiohttp.ClientError, TimeoutError, asyncio.IncompleteReadError, OSError) as error:
        reason = unreached(error).replace(url, redacted(url))
        raise Unavailable(
            f"the tracker {redacted(url)} does not answer: {reason}", remedy=access.remedy(url, error)
        ) from error
    raise Unavailable(f"the tracker {redacted(url)} has stopped", remedy="Start it again")
