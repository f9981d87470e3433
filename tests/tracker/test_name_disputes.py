"""Disputes about a host's name: which of two agents that say it gets the session. Real agents and
sockets, on loopback."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from aiohttp import web
from ports import free_pair

from p2pdist.agent.agent import Agent, AgentSettings
from p2pdist.agent.api.server import make_apps
from p2pdist.cli.daemon import listen, listen_unix
from p2pdist.model.errors import Conflict, Unavailable
from p2pdist.model.messages import PROTOCOL_VERSION, Hello, instance_proof
from tracker import names as module
from tracker.content import Content
from tracker.core.fleet import Fleet
from tracker.service import Service

SILENT = "127.0.0.1:9"
NONCE = "0123456789abcdef" * 2


@pytest.fixture
def service() -> Service:
    return Service(Fleet(0.0), Content(None))


@asynccontextmanager
async def agent(directory: Path, name: str) -> AsyncIterator[Hello]:
    """An agent that answers at an address; the hello that it says."""
    address = ("127.0.0.1", free_pair())
    made = Agent(AgentSettings((), name, f"127.0.0.1:{address[1]}", directory / f"{name}-{address[1]}"))
    public, local = make_apps(made)
    runners = [await listen(public, address), await listen_unix(local, directory / f"{address[1]}.sock")]
    try:
        yield Hello(PROTOCOL_VERSION, name, f"127.0.0.1:{address[1]}", instance=made.session.instance)
    finally:
        for runner in runners:
            await runner.cleanup()
        await made.stop()


@asynccontextmanager
async def program(answer: dict[str, str] | None) -> AsyncIterator[str]:
    """The address of a program that answers GET /healthz with this document; None: never."""

    async def health(request: web.Request) -> web.Response:
        if answer is None:
            await asyncio.sleep(3600)
        return web.json_response(answer)

    app = web.Application()
    app.router.add_get("/healthz", health)
    runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        yield f"127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


async def say(service: Service, hello: Hello) -> int:
    replaces = await service.resolve_name(hello, "127.0.0.1")
    return service.open_session(hello, replaces=replaces)[0]


async def test_the_agent_that_answers_gets_its_name_from_a_session_whose_address_does_not(
    tmp_path: Path, service: Service
) -> None:
    old_version = {"status": "ok", "host": "h1"}
    async with (
        agent(tmp_path, "h1") as hello,
        agent(tmp_path, "h2") as other,
        program(None) as mute,
        program(old_version) as old,
    ):
        for address in (SILENT, mute, other.address, old):
            await say(service, Hello(PROTOCOL_VERSION, "h1", address, instance="stranger"))
            session = await say(service, hello)
            host = service.fleet.hosts["h1"]
            assert (host.session, host.address) == (session, hello.address)
            service.close_session(session)


async def test_no_hello_takes_the_session_of_an_agent_that_answers(tmp_path: Path, service: Service) -> None:
    """Neither from elsewhere nor with the agent's own address, with an instance or without."""
    async with agent(tmp_path, "h1") as hello, agent(tmp_path, "h1") as twin, program(None) as mute:
        session = await say(service, hello)
        for address, instance in (
            (SILENT, "x"),
            (mute, ""),
            (hello.address, "x"),
            (hello.address, ""),
            (twin.address, twin.instance),
        ):
            with pytest.raises(Conflict):
                await say(service, Hello(PROTOCOL_VERSION, "h1", address, instance=instance))
            assert service.fleet.hosts["h1"].session == session


async def test_an_agent_that_was_started_anew_at_its_address_gets_in_at_once(tmp_path: Path, service: Service) -> None:
    async with agent(tmp_path, "h1") as hello:
        await say(service, Hello(PROTOCOL_VERSION, "h1", hello.address, instance="before"))
        session = await say(service, hello)
        assert service.fleet.hosts["h1"].session == session


async def test_agents_of_earlier_versions_keep_their_names(service: Service) -> None:
    async with program({"status": "ok", "host": "h1"}) as first, program({"status": "ok", "host": "h1"}) as second:
        await say(service, Hello(PROTOCOL_VERSION, "h1", SILENT))
        session = await say(service, Hello(PROTOCOL_VERSION, "h1", first))
        with pytest.raises(Conflict):
            await say(service, Hello(PROTOCOL_VERSION, "h1", second))
        assert service.fleet.hosts["h1"].session == session
        assert await say(service, Hello(PROTOCOL_VERSION, "h1", first)) > session, "started anew"


async def test_a_proof_that_is_wrong_counts_for_less_than_none(service: Service) -> None:
    wrong = {"status": "ok", "host": "h1", "proof": instance_proof("other", "h1", NONCE)}
    async with program(wrong) as liar, program({"status": "ok", "host": "h1"}) as named:
        await say(service, Hello(PROTOCOL_VERSION, "h1", named))
        with pytest.raises(Conflict):
            await say(service, Hello(PROTOCOL_VERSION, "h1", liar, instance="mine"))


async def test_disputes_are_bounded_for_each_address(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "DISPUTES_PER_HOST_MAX", 2)
    async with program(None) as mute:
        await say(service, Hello(PROTOCOL_VERSION, "h1", mute))
        found = await asyncio.gather(
            *(say(service, Hello(PROTOCOL_VERSION, "h1", SILENT, instance=f"{n}")) for n in range(5)),
            return_exceptions=True,
        )
        assert sorted(type(each).__name__ for each in found) == ["Conflict"] * 2 + [Unavailable.__name__] * 3


def test_the_proof_depends_on_all_of_it() -> None:
    proofs = {
        instance_proof(*each) for each in (("a", "h", NONCE), ("b", "h", NONCE), ("a", "i", NONCE), ("a", "h", "0"))
    }
    assert len(proofs) == 4
