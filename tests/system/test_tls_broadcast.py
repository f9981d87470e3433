"""Whole processes that speak TLS with each other: a blob from the origin to all, and nothing to
whoever has no certificate."""

from __future__ import annotations

import contextlib
import sys
import tempfile
from pathlib import Path

import pytest
from site_rig import Agent, Site, running_site, until
from workload_api import TrustDomain, WorkloadApi

from p2pdist.model.errors import Unavailable

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


@pytest.mark.slow
def test_agents_with_svids_feed_each_other_at_a_tracker_with_access(tmp_path: Path) -> None:
    """Each has its own Workload API, as each host has its agent of SPIRE. The tracker reads their
    domain's authority from a file, and they the tracker's; one gets another SVID meanwhile."""
    domain, access = TrustDomain("prod"), tmp_path / "access"
    access.mkdir()
    (access / "spire.pem").write_text(domain.pem)
    (access / "access.toml").write_text(
        'fleet = "prod"\npublic = []\n[certificates]\nauthorities = ["spire.pem"]\nread = ["*"]\n'
    )
    with contextlib.ExitStack() as stack:
        place = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="spiffe-")))
        site = stack.enter_context(running_site(tmp_path, tracker=False))
        words = ["tracker", "--listen", f"127.0.0.1:{site.tracker_port}", "--origin", site.origin.url]
        site.spawn([*words, "--access", str(access / "access.toml")], tmp_path / "tracker.log")
        until(lambda: list(access.glob("authority-*.pem")))
        apis, agents = [], []
        for name in ("h0", "h1", "h2", "stranger"):
            issuer = TrustDomain("other") if name == "stranger" else domain
            api = WorkloadApi(place / f"{name}.sock", issuer.svid(f"agent/{name}"))
            stack.callback(api.start().stop)
            apis.append(api)
            options = {"tracker": site.tracker_url.replace("http:", "https:"), "spiffe": api.address}
            authority = str(next(access.glob("authority-*.pem")))
            agents.append(Agent(site, name, **options, tls_ca=authority, tracker_wait="3"))
        stranger = agents.pop()
        digest = site.publish(8 * MIB)
        for agent in agents:
            agent.start()
        first = agents[0].pull(blob=digest)
        apis[0].give(domain.svid("agent/h0"))
        until(lambda: agents[0].log.read_text().count("this host is spiffe://prod/agent/h0, until") == 2)
        assert first.bytes_origin == 8 * MIB
        site.origin.rate_bytes_s = 0.1 * MIB  # what comes in time comes from peers
        pulls = [agent.start_pull(blob=digest) for agent in agents[1:]]
        assert all(pull.result(200.0).bytes_peers > 0 for pull in pulls)
        stranger.start(ready=False)
        with pytest.raises(Unavailable, match="no tracker answered"):
            stranger.pull(blob=digest)
