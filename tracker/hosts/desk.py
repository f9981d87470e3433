"""The operators' desk: how hosts say that they do (`Condition`), and evictions, by which packages
leave the stores of hosts.

A host is asked once and answers once. What is mounted, pinned or being pulled stays there, and the
host says so. A host whose agent is of an earlier release is not asked: its session would end at the
message. An eviction waits for answers for a bounded time; hosts that have not answered by then may
still carry it out, and are named as silent.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from p2pdist.model.errors import Unavailable, printable
from p2pdist.model.fleet import EVICTION_HOSTS_SHOWN_MAX, EvictedHost, Eviction, StayedHost
from p2pdist.model.messages import Condition, Evict, Evicted

EVICTIONS_MAX = 100
"""Evictions that wait at once."""


@dataclass(slots=True)
class _Waiting:
    """An eviction that waits for answers."""

    silent: dict[str, None]
    """Hosts that have not answered."""
    evicted: list[EvictedHost] = field(default_factory=list)
    stayed: list[StayedHost] = field(default_factory=list)
    lacked: int = 0
    """Hosts that did not have the package."""
    answered: asyncio.Event = field(default_factory=asyncio.Event)


class HostDesk:
    """The conditions of hosts that have their home here, and evictions. `send` sends a message to
    a host. On the event loop."""

    def __init__(self, send: Callable[[str, Evict], None]) -> None:
        self._send = send
        self._conditions: dict[str, Condition] = {}
        self._waiting: dict[str, _Waiting] = {}
        """By the id of the eviction."""

    @property
    def conditions(self) -> Mapping[str, Condition]:
        """What hosts said last in the sessions that they have, by name."""
        return self._conditions

    def heard(self, host: str, message: Condition | Evicted) -> None:
        """A host says something at its home."""
        match message:
            case Condition():
                self._conditions[host] = message
            case Evicted():
                self._answered(host, message)

    def closed(self, host: str) -> None:
        """The session of a host has ended: it answers no more."""
        self._conditions.pop(host, None)
        for waiting in self._waiting.values():
            if host in waiting.silent:
                del waiting.silent[host]
                waiting.stayed.append(StayedHost(host, "its session ended before it answered"))
                _end(waiting)

    async def evict(
        self, package: str, digest: str, hosts: Iterable[str], wait_s: float, meaning: str = ""
    ) -> Eviction:
        """Have hosts evict a package, by its manifest where the `digest` is given, else by its tag
        and its `meaning`, and wait for their answers, at most `wait_s`. Raises Unavailable over
        EVICTIONS_MAX."""
        if len(self._waiting) >= EVICTIONS_MAX:
            raise Unavailable(f"{EVICTIONS_MAX} evictions are under way", remedy="Try again in a few seconds")
        names = list(hosts)
        able = [name for name in names if name in self._conditions]
        waiting = _Waiting(dict.fromkeys(able))
        waiting.stayed += [
            StayedHost(name, "its agent is of a release that takes no evictions")
            for name in names
            if name not in self._conditions
        ]
        identifier = secrets.token_hex(8)
        self._waiting[identifier] = waiting
        began_at = time.monotonic()
        try:
            for name in able:
                self._send(name, Evict(identifier, package, digest, meaning))
            _end(waiting)
            async with asyncio.timeout(wait_s):
                await waiting.answered.wait()
        except TimeoutError:
            pass  # those that have not answered are named
        finally:
            del self._waiting[identifier]
        return _report(package, len(names), waiting, time.monotonic() - began_at)

    def _answered(self, host: str, message: Evicted) -> None:
        waiting = self._waiting.get(message.id)
        if waiting is None or host not in waiting.silent:
            return
        del waiting.silent[host]
        if not message.problem:
            waiting.evicted.append(EvictedHost(host, message.bytes_freed))
        elif message.problem == "not-found":
            waiting.lacked += 1
        else:
            waiting.stayed.append(StayedHost(host, printable(" ".join(message.reason.split()))))
        _end(waiting)


def _end(waiting: _Waiting) -> None:
    if not waiting.silent:
        waiting.answered.set()


def _report(package: str, asked: int, waiting: _Waiting, seconds: float) -> Eviction:
    shown = EVICTION_HOSTS_SHOWN_MAX
    return Eviction(
        package,
        asked,
        len(waiting.evicted),
        sum(host.bytes_freed for host in waiting.evicted),
        waiting.lacked,
        len(waiting.stayed),
        len(waiting.silent),
        round(seconds, 3),
        sorted(waiting.evicted, key=lambda host: host.host)[:shown],
        sorted(waiting.stayed, key=lambda host: host.host)[:shown],
        sorted(waiting.silent)[:shown],
    )
