"""Whole processes that speak TLS with each other: a blob from the origin to all, and nothing to
whoever has no certificate."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from site_rig import Agent, Site

sys.path.insert(0, str(Path(__file__).parents[1] / "transfer"))
from authority import Authority

MIB = 1 << 20


def options(authority: Authority, file: str) -> dict[str, str]:
    files = authority.issue(file)
    return {"tls_cert": str(files.certificate), "tls_key": str(files.key), "tls_ca": str(files.authority)}


@pytest.mark.slow
def test_agents_with_certificates_feed_each_other_and_nobody_else(site: Site) -> None:
    authority = Authority(site.directory)
    digest = site.publish(16 * MIB)
    agents = [Agent(site, f"h{number}", **options(authority, f"h{number}")).start() for number in range(4)]
    pulls = [agent.start_pull(blob=digest) for agent in agents]
    statuses = [pull.result() for pull in pulls]
    assert sum(status.bytes_origin for status in statuses) == 16 * MIB
    assert sum(status.bytes_peers for status in statuses) == 3 * 16 * MIB
    stranger = Agent(site, "stranger", **options(Authority(site.directory, "other"), "stranger")).start()
    assert stranger.pull(blob=digest).bytes_peers == 0  # its way is the origin, when no peer will have it
