"""`p2pdist doctor` beside a running agent: its port and its socket answer, and a lost tracker is
named."""

from __future__ import annotations

import pytest
from site_rig import Agent, Site, until


@pytest.mark.slow
def test_an_agent_that_runs_is_found_and_its_lost_tracker_is_told(site: Site) -> None:
    agent = Agent(site, "h0").start()
    words = ["doctor", "--tracker", site.tracker_url, "--listen", f"127.0.0.1:{agent.port}"]
    words += ["--store", str(agent.store), "--socket", str(agent.socket), "--origin", site.origin.url]
    code, document, errors = site.command(*words)
    found = {check["name"]: check for check in document["checks"]}
    assert found["port"]["detail"].startswith("an agent answers at") and found["port"]["state"] == "ok"
    assert found["agent"]["state"] == "ok" and "h0" in found["agent"]["detail"]
    assert found["origin"]["state"] == "warning" and "no packages" in found["origin"]["detail"] and code == 0
    asked = site.command("doctor", "--socket", str(agent.socket))[1]["checks"]
    details = {check["name"]: check["detail"] for check in asked}
    assert details["tracker"].startswith(f"{site.tracker_url} answers") and "reachability" in details
    assert details["port"] == f"an agent answers at 127.0.0.1:{agent.port}", "it says itself where it listens"
    assert str(agent.store) in details["store"]
    behind = Agent(site, "behind", advertise="192.0.2.7:7071").start()
    checks = site.command("doctor", "--socket", str(behind.socket))[1]["checks"]
    assert [check["name"] for check in checks if check["state"] == "failed"] == ["reachability"], "its port is its own"
    behind.stop()
    site.publish(1000)
    code, document, errors = site.command(*words)
    assert code == 0 and document["ok"], errors
    site.kill_tracker()
    until(lambda: agent.metric("p2pdist_agent_tracker_connected") == 0)
    code, document, _ = site.command(*words)
    found = {check["name"]: check for check in document["checks"]}
    assert code == 1 and found["agent"]["state"] == found["tracker"]["state"] == "failed"
    assert site.tracker_url in found["agent"]["detail"]
