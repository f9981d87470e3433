"""Whole processes: one blob from the origin to many agents, through crashes of agents and
tracker."""

from __future__ import annotations

import hashlib

import pytest
from site_rig import Agent, Site, until

MIB = 1 << 20


@pytest.mark.slow
def test_every_agent_gets_the_blob_and_the_origin_is_read_once(site: Site) -> None:
    digest = site.publish(24 * MIB)
    agents = site.agents(6)
    pulls = [agent.start_pull(blob=digest, output=str(site.directory / f"out-{agent.name}")) for agent in agents]
    statuses = [pull.result() for pull in pulls]
    for agent in agents:
        content = (site.directory / f"out-{agent.name}").read_bytes()
        assert "sha256:" + hashlib.sha256(content).hexdigest() == digest
    read = site.origin_bytes(digest)
    assert 24 * MIB <= read < 2 * 24 * MIB, "but for leases that moved, since hosts stand still on a busy machine"
    assert 24 * MIB <= sum(status.bytes_origin for status in statuses) <= read
    assert all(status.bytes_origin + status.bytes_peers == 24 * MIB for status in statuses)


@pytest.mark.slow
def test_a_killed_agent_goes_on_where_it_was(site: Site) -> None:
    """kill -9 at half: at most 16 pieces (of 64 KiB here) come twice, and who waited for the pull
    before has it."""
    digest = site.publish(32 * MIB)
    site.origin.rate_bytes_s = 8 * MIB
    agents = site.agents(4)
    pulls = [agent.start_pull(blob=digest) for agent in agents]
    victim = agents[1]
    until(lambda: victim.received() > 16 * MIB)
    before = victim.received()
    victim.kill()
    victim.start()
    again = victim.pull(blob=digest)
    for number in (0, 2, 3):
        pulls[number].result()
    assert again.bytes_cached >= before - 16 * 65536  # of what had come some may have come twice
    assert again.bytes_cached + again.bytes_origin + again.bytes_peers <= (32 * MIB) + 16 * 65536
    assert site.origin_bytes(digest) <= 1.05 * 32 * MIB
    assert pulls[1].result().state == "done"  # its client asked the agent anew


@pytest.mark.slow
def test_transfers_survive_a_killed_tracker(site: Site) -> None:
    digest = site.publish(32 * MIB)
    site.origin.rate_bytes_s = 8 * MIB
    agents = site.agents(5)
    pulls = [agent.start_pull(blob=digest) for agent in agents]
    until(lambda: sum(agent.received() for agent in agents) > 5 * 16 * MIB)
    site.kill_tracker()
    site.start_tracker()
    for pull in pulls:
        assert pull.result().state == "done"
    assert site.origin_bytes(digest) <= 1.05 * 32 * MIB


@pytest.mark.slow
def test_transfers_end_without_a_tracker(site: Site) -> None:
    digest = site.publish(16 * MIB)
    site.origin.rate_bytes_s = 8 * MIB
    agents = site.agents(4)
    pulls = [agent.start_pull(blob=digest) for agent in agents]
    until(lambda: all(agent.received() > 1 * MIB for agent in agents))
    site.kill_tracker()
    for pull in pulls:
        assert pull.result().state == "done"


@pytest.mark.slow
def test_a_late_agent_is_served_by_peers_alone(site: Site) -> None:
    digest = site.publish(8 * MIB)
    first, second = site.agents(2)
    first.pull(blob=digest)
    read = site.origin_bytes(digest)
    assert second.pull(blob=digest).bytes_peers == 8 * MIB
    assert site.origin_bytes(digest) == read


@pytest.mark.slow
def test_what_peers_hold_is_served_while_the_origin_is_away(site: Site) -> None:
    digest = site.publish(8 * MIB)
    first, second = site.agents(2)
    first.pull(blob=digest)
    site.origin.stop()
    assert second.pull(blob=digest).bytes_peers == 8 * MIB


@pytest.mark.slow
def test_a_clean_stop_exits_with_0_and_the_store_is_kept(site: Site) -> None:
    digest = site.publish(1 * MIB)
    (agent,) = site.agents(1)
    agent.pull(blob=digest)
    assert agent.stop() == 0
    assert not agent.socket.exists()
    agent.start()
    assert agent.pull(blob=digest).bytes_cached == 1 * MIB


@pytest.mark.slow
def test_two_pulls_of_one_blob_fetch_it_once(site: Site) -> None:
    digest = site.publish(8 * MIB)
    agent = Agent(site, "alone").start()
    pulls = [agent.start_pull(blob=digest) for _ in range(3)]
    for pull in pulls:
        pull.result()
    assert agent.received() == 8 * MIB
