"""Whole processes: an agent that is to end hands its children over, and nobody loses anything."""

from __future__ import annotations

import json
import re
import signal
import threading
import urllib.error
import urllib.request

import programs
import pytest
from site_rig import Agent, Site, until

from p2pdist.agent.api.client import LocalClient
from p2pdist.model.errors import Unavailable
from p2pdist.model.messages import PullRequest

pytestmark = pytest.mark.slow

MIB = 1 << 20
SIZE = 16 * MIB
PIECE = 64 << 10


def feeds_most(agents: list[Agent]) -> Agent:
    """The agent from which most streams go out."""
    return max(agents, key=lambda agent: LocalClient(agent.socket).status()["streams"])


def under_way(site: Site, count: int) -> tuple[str, list[Agent]]:
    """Agents that pull a blob, a few pieces of which have come everywhere."""
    digest = site.publish(SIZE)
    site.origin.rate_bytes_s = 8 * MIB
    agents = site.agents(count)
    for agent in agents:
        LocalClient(agent.socket)._ask("POST", "/v1/pulls", None, body=PullRequest(blob=digest))
    until(lambda: all(agent.received() > MIB for agent in agents))
    return digest, agents


def complaints(agents: list[Agent], of: Agent) -> list[str]:
    """What the logs say of streams from an agent that broke off. That one stalls is no failure of
    it: this machine may have no time. Nor is it one that a host finds the agent gone, to which an
    earlier plan sent it: no stream has begun, and it goes to the next source at once."""
    lines = [line for agent in agents for line in agent.log.read_text().splitlines()]
    said = [line for line in lines if f"source={of.name} " in line or f"stream from {of.name}," in line]
    harmless = r"reason=(stalled|slow|refused)|ended: (stalled|slow)|cannot be reached: Connection refused"
    return [line for line in said if not re.search(harmless, line)]


@pytest.mark.parametrize("how", ["signal", "command"])
def test_no_child_of_an_agent_that_leaves_loses_anything(site: Site, how: str) -> None:
    """In the middle of a broadcast, with the agent that feeds most: no stream of it fails, and next
    to nothing comes twice."""
    digest, agents = under_way(site, 4)
    victim = feeds_most(agents)
    assert victim.process is not None
    if how == "signal":
        victim.process.terminate()
    else:
        done = programs.run("drain", "--socket", victim.socket, "--json", check=True)
        assert json.loads(done.stdout)["streams"] == 0
    assert victim.process.wait(60) == 0
    rest = [agent for agent in agents if agent is not victim]
    for agent in rest:
        status = agent.pull(blob=digest)
        assert status.state == "done"
    assert complaints(rest, victim) == []
    assert all(SIZE <= agent.received() <= SIZE + 8 * PIECE for agent in rest)
    log = victim.log.read_text()
    assert "leaving, with" in log and "; 0 streams are left" in log


def test_an_agent_that_was_drained_goes_on_where_it_was(site: Site) -> None:
    digest, agents = under_way(site, 3)
    victim = feeds_most(agents)
    before = victim.received()
    assert victim.stop() == 0
    victim.start()
    again = victim.pull(blob=digest)
    assert before <= again.bytes_cached <= SIZE
    assert again.bytes_cached + again.bytes_origin + again.bytes_peers == SIZE


def test_who_feeds_nobody_does_not_wait(site: Site) -> None:
    """However long it may take: with an hour for it the test would not end."""
    digest = site.publish(1 * MIB)
    (agent,) = site.agents(1, drain_seconds="3600")
    agent.pull(blob=digest)
    assert agent.stop() == 0
    assert "0 streams are left" in agent.log.read_text()


class _Reader:
    """Reads a blob over TCP, and takes nothing after its first bytes; so an agent that leaves is
    held up."""

    def __init__(self, agent: Agent, digest: str) -> None:
        self._answer = urllib.request.urlopen(f"{agent.url}/v1/blobs/{digest}", timeout=30)
        self.first = self._answer.read(1000)

    def rest(self) -> bytes:
        return bytes(self._answer.read())

    def close(self) -> None:
        self._answer.close()


def test_it_serves_until_its_time_is_up_and_takes_nothing_new(site: Site) -> None:
    digest = site.publish(SIZE)
    (agent,) = site.agents(1, drain_seconds="3600")
    agent.pull(blob=digest)
    assert agent.process is not None
    reader = _Reader(agent, digest)
    agent.process.terminate()
    client = LocalClient(agent.socket)
    until(lambda: client.status()["leaving"])
    with pytest.raises(urllib.error.HTTPError) as refused:
        urllib.request.urlopen(f"{agent.url}/readyz", timeout=60)
    assert (refused.value.code, json.load(refused.value)["status"]) == (503, "leaving")
    with pytest.raises(Unavailable, match="the agent stops"):
        client.pull(PullRequest(blob=digest))
    hosts = json.load(urllib.request.urlopen(f"{site.tracker_url}/v1/hosts", timeout=60))
    assert [(each["leaving"], each["blobs"]) for each in hosts] == [(True, 0)]
    assert len(reader.first + reader.rest()) == SIZE
    reader.close()
    assert agent.process.wait(60) == 0


@pytest.mark.parametrize("again", [signal.SIGTERM, signal.SIGINT])
def test_a_second_signal_ends_it_at_once(site: Site, again: signal.Signals) -> None:
    digest = site.publish(SIZE)
    (agent,) = site.agents(1, drain_seconds="3600")
    agent.pull(blob=digest)
    assert agent.process is not None
    reader = _Reader(agent, digest)
    agent.process.terminate()
    until(lambda: LocalClient(agent.socket).status()["leaving"])
    agent.process.send_signal(again)
    assert agent.process.wait(60) == 0
    assert "1 streams are left" in agent.log.read_text()
    reader.close()


def test_the_time_may_be_said_with_the_command(site: Site) -> None:
    """It is told what was left over."""
    digest = site.publish(SIZE)
    (agent,) = site.agents(1, drain_seconds="3600")
    agent.pull(blob=digest)
    reader = _Reader(agent, digest)
    code, said, errors = site.command("drain", "--socket", str(agent.socket), "--seconds", "0.2")
    assert (code, said["streams"]) == (0, 1), errors
    assert agent.process is not None and agent.process.wait(60) == 0
    reader.close()


def test_whoever_waits_for_a_pull_is_told_why_it_ends(site: Site) -> None:
    digest = site.publish(SIZE)
    site.origin.rate_bytes_s = 1 * MIB
    (agent,) = site.agents(1)
    failures: list[str] = []

    def wait() -> None:
        try:
            LocalClient(agent.socket)._ask("POST", "/v1/pulls", None, body=PullRequest(blob=digest, wait=True))
        except Unavailable as error:
            failures.append(error.what)

    waits = threading.Thread(target=wait, daemon=True)
    waits.start()
    until(lambda: agent.received() > 0)
    assert agent.stop() == 0
    waits.join(60)
    assert failures == ["the agent stops"]


def test_without_a_tracker_nobody_is_kept_waiting(site: Site) -> None:
    """Nobody could give its children other parents: they go to their alternates, as when it
    dies."""
    digest, agents = under_way(site, 3)
    site.kill_tracker()
    victim = feeds_most(agents)
    until(lambda: not LocalClient(victim.socket).status()["tracker"]["connected"])
    assert victim.stop() == 0
    site.start_tracker()
    for agent in agents:
        if agent is not victim:
            assert agent.pull(blob=digest).state == "done"
