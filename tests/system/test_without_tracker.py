"""Whole processes without a tracker: the root is killed as well, and the others complete from a
keeper that reads the origin."""

from __future__ import annotations

import hashlib

import pytest
from site_rig import Site, until

MIB = 1 << 20
SIZE = 24 * MIB


@pytest.mark.slow
def test_without_tracker_and_root_the_rest_complete_and_the_origin_is_read_about_once(site: Site) -> None:
    """Both are killed for good in the middle. The origin gives again only what the dead roots had
    not passed on."""
    digest = site.publish(SIZE)
    site.origin.rate_bytes_s = 8 * MIB
    agents = site.agents(5)
    pulls = {agent: agent.start_pull(blob=digest, output=str(site.directory / f"out-{agent.name}")) for agent in agents}
    until(lambda: all(agent.received() > 0.3 * SIZE for agent in agents))
    site.kill_tracker()
    roots = [agent for agent in agents if agent.metric('p2pdist_agent_received_bytes_total{source="origin"}') > 0]
    assert roots
    for root in roots:
        root.kill()
    assert any(agent.received() < SIZE for agent in agents if agent not in roots), "killed too late"
    rest = [agent for agent in agents if agent not in roots]
    for agent in rest:
        assert pulls[agent].result().state == "done"
        content = (site.directory / f"out-{agent.name}").read_bytes()
        assert "sha256:" + hashlib.sha256(content).hexdigest() == digest
    keepers = [agent.name for agent in rest if agent.metric('p2pdist_agent_received_bytes_total{source="origin"}') > 0]
    assert keepers, "nobody read what the roots had not passed on"
    assert site.origin_bytes(digest) <= 1.2 * SIZE
