"""The hosts of a large swarm are told their plan some at a time, without a pause between."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from math import inf
from pathlib import Path

import pytest

from p2pdist.model.digest import digest_of
from p2pdist.model.messages import PROTOCOL_VERSION, Assign, Hello, Holding, Left, Report
from p2pdist.origin.drivers import open_origin
from tracker.content import Content
from tracker.core.events import Command, Due, HostDrained, Received, Send, SessionOpened, Tick
from tracker.core.fleet import Fleet
from tracker.core.planning.assignments import SLICE
from tracker.core.planning.schedule import JOIN_BATCH_S, SMALL_BATCH_S
from tracker.service import Service

HOSTS, STRIPES = 3 * SLICE + 10, 2
BLOB, SMALL = digest_of(b"blob"), digest_of(b"small")


def joined(hosts: int) -> Fleet:
    """So many hosts have just joined a blob."""
    fleet = Fleet(-100.0)
    for number in range(hosts):
        hello = Hello(PROTOCOL_VERSION, f"h{number}", f"10.0.{number >> 8}.{number & 255}:7071")
        fleet.handle(SessionOpened(number, hello), now=0.0)
        fleet.handle(Received(number, Holding(BLOB, 64 << 20, 65536, (0,) * STRIPES)), now=0.0)
    return fleet


def plans(commands: list[Command]) -> list[tuple[int, Assign]]:
    return [
        (each.session, each.message) for each in commands if isinstance(each, Send) and isinstance(each.message, Assign)
    ]


def test_each_host_is_told_once_and_the_core_asks_to_go_on_at_once() -> None:
    fleet, now = joined(HOSTS), JOIN_BATCH_S
    told = plans(fleet.handle(Due(), now=now))
    while fleet.wake_at == -inf:
        assert len(told) % SLICE == 0
        told += plans(fleet.handle(Due(), now=now))
    assert sorted(session for session, _ in told) == list(range(HOSTS))
    assert all(len(message.plan.stripes) == STRIPES for _, message in told)
    assert now < fleet.wake_at and not plans(fleet.handle(Tick(), now=now))


async def test_a_service_has_one_timer_for_the_core(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Swarms that gather joins, while others have hosts to be told, ask for ever earlier ones."""
    service = Service(Fleet(time.monotonic()), Content(open_origin(tmp_path.as_uri())))
    loop, timers = asyncio.get_running_loop(), list[asyncio.TimerHandle]()
    call_later = loop.call_later

    def counted(delay_s: float, call: Callable[..., object], *args: object) -> asyncio.TimerHandle:
        timers.append(call_later(delay_s, call, *args))
        return timers[-1]

    monkeypatch.setattr(loop, "call_later", counted)
    for after_s in (60.0, 50.0, 40.0, -inf):
        wake_at = service.fleet.started_at + after_s
        monkeypatch.setattr(Fleet, "wake_at", property(lambda fleet: wake_at))  # noqa: B023
        service.submit(HostDrained("nobody", False))
    assert [timer.cancelled() for timer in timers] == [True, True, True, False]
    timers[-1].cancel()


def test_the_messages_of_a_moment_do_not_have_all_hosts_told_at_once() -> None:
    """They are handled one after the other, and what each gives out is sent only after all."""
    fleet, now = joined(HOSTS), JOIN_BATCH_S
    fleet.handle(Due(), now=now)
    for number in range(8):
        assert not plans(fleet.handle(Received(number, Report(())), now=now))
    assert len(plans(fleet.handle(Due(), now=now))) == SLICE


def test_hosts_of_other_blobs_are_told_between() -> None:
    fleet, now = joined(HOSTS), JOIN_BATCH_S
    fleet.handle(Due(), now=now)
    fleet.handle(Received(0, Holding(SMALL, 8 * 65536, 65536, (0,))), now=now)
    now += SMALL_BATCH_S
    blobs = [message.plan.blob for _ in range(3) for _, message in plans(fleet.handle(Due(), now=now))]
    assert SMALL in blobs and len(blobs) < HOSTS


def test_what_changes_meanwhile_is_told_as_it_is_then() -> None:
    """A host that leaves before it is told is no parent, and is told nothing."""
    fleet, now = joined(HOSTS), JOIN_BATCH_S
    told = {session for session, _ in plans(fleet.handle(Due(), now=now))}
    swarm = fleet.swarms[BLOB]
    gone = next(name for name in swarm.edges.changed if any(swarm.members[name].children))
    commands = fleet.handle(Received(int(gone[1:]), Left(BLOB)), now=now)
    while fleet.wake_at == -inf or swarm.edges.unplanned:
        now += 0.05
        commands += fleet.handle(Tick(), now=now)
    messages = plans(commands)
    assert int(gone[1:]) not in told | {session for session, _ in messages}
    assert told | {session for session, _ in messages} == set(range(HOSTS)) - {int(gone[1:])}
    assert gone not in {each.parent.host for _, message in messages for each in message.plan.stripes if each.parent}
