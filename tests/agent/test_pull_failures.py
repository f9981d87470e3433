"""Failed pulls on their way to a tracker, over real sockets: what waits, what is cut, and trackers
of earlier releases."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

import pytest
from aiohttp import web
from test_session import Host, running, tracker
from waits import until

from p2pdist.agent.tracker import failures as module
from p2pdist.agent.tracker.failures import EndedPull, PullFailures
from p2pdist.model.digest import digest_of
from p2pdist.model.errors import DiskFull, NotFound, P2PDistError
from p2pdist.model.messages import (
    PROTOCOL_VERSION,
    REASON_CHARACTERS_MAX,
    Left,
    PullFailed,
    Report,
    Welcome,
    decode_from_agent,
    encode,
)

MANIFEST = digest_of(b"manifest")


@dataclass(frozen=True)
class Ended:
    """A pull that has ended."""

    reference: str
    error: P2PDistError | None = None
    digest: str = ""


class Told:
    """A tracker that takes failures, or not, and what it was told."""

    def __init__(self, *, takes: bool) -> None:
        self.welcome = encode(Welcome(PROTOCOL_VERSION, 5.0, failures=takes)).decode()
        self.messages: list[object] = []

    async def __call__(self, socket: web.WebSocketResponse, number: int) -> None:
        await socket.send_str(self.welcome)
        async for frame in socket:
            message = decode_from_agent(frame.data)
            if not isinstance(message, Report):
                self.messages.append(message)


async def test_failures_wait_for_a_tracker_and_are_told_once() -> None:
    told, observers = Told(takes=True), list[Callable[[EndedPull], None]]()
    async with tracker(told) as url:
        host = Host(url)
        failures = PullFailures(host.session, observers.append)
        (ended,) = observers
        ended(Ended("team/a:v1", NotFound("it is nowhere"), MANIFEST))
        ended(Ended("team/a:v2"))
        async with running(host):
            assert await host.session.wait_connected(30)
            failures.report()
            failures.report()
            ended(Ended("team/b:v1", P2PDistError("\x1b[2J" + "x" * 1_000_000)))
            await until(lambda: len(told.messages) == 2)
    first, second = told.messages
    assert isinstance(first, PullFailed) and isinstance(second, PullFailed)
    assert (first.reference, first.reason, first.digest) == ("team/a:v1", "not-found: it is nowhere", MANIFEST)
    assert first.age_s > 0 and second.reason.isprintable() and len(second.reason) == REASON_CHARACTERS_MAX


async def test_a_tracker_of_an_earlier_release_is_not_told() -> None:
    told, observers = Told(takes=False), list[Callable[[EndedPull], None]]()
    async with tracker(told) as url:
        host = Host(url)
        PullFailures(host.session, observers.append)
        async with running(host):
            assert await host.session.wait_connected(30)
            observers[0](Ended("team/a:v1", NotFound("it is nowhere")))
            host.session.send(Left(MANIFEST))
            await until(lambda: told.messages)
    assert told.messages == [Left(MANIFEST)]


async def test_few_failures_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "WAITING_MAX", 3)
    told, observers = Told(takes=True), list[Callable[[EndedPull], None]]()
    async with tracker(told) as url:
        host = Host(url)
        failures = PullFailures(host.session, observers.append)
        for number in range(10):
            observers[0](Ended(f"team/a:v{number}", DiskFull("/store", needed=2, free=1, capacity=1)))
        async with running(host):
            assert await host.session.wait_connected(30)
            failures.report()
            await until(lambda: len(told.messages) == 3)
            await asyncio.sleep(0)
    assert [message.reference for message in told.messages if isinstance(message, PullFailed)] == [
        "team/a:v7",
        "team/a:v8",
        "team/a:v9",
    ]
