"""One name for all that a command causes, at its agent and at its peers; and what a shell offers of
the agent's packages."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from site_rig import Agent, Site, until

pytestmark = pytest.mark.slow


def lines(agent: Agent) -> list[dict[str, Any]]:
    return [json.loads(line) for line in agent.log.read_text().splitlines()]


def test_a_pull_has_one_name_at_the_agent_and_at_its_peer(site: Site) -> None:
    digest = site.publish(1 << 20)
    first, second = site.agents(2, log_level="debug", log_format="json", transport="trees")
    first.pull(blob=digest)
    second.pull(blob=digest)
    (done,) = [line for line in lines(second) if line["message"].startswith("pull=") and " done " in line["message"]]
    until(lambda: any("POST /v1/streams is answered" in line["message"] for line in lines(first)))
    served = [line for line in lines(first) if "POST /v1/streams is answered" in line["message"]]
    assert {line["request_id"] for line in served} == {done["request_id"]}
    asked = [line for line in lines(second) if "/v1/pulls" in line["message"]]
    assert asked and {line["request_id"] for line in asked} == {done["request_id"]}


def test_a_shell_offers_what_the_agent_holds(site: Site) -> None:
    (agent,) = site.agents(1)
    source = site.directory / "source"
    source.mkdir()
    (source / "file").write_text("content")
    layout, origin = str(site.directory / "layout"), f"file://{site.layout}"
    assert site.command("pack", str(source), "-t", "held/here:v7", "--layout", layout)[0] == 0
    assert site.command("push", "held/here:v7", "--layout", layout, "--origin", origin)[0] == 0
    agent.pull(package="held/here:v7")
    line = f"p2pdist run --socket {agent.socket} held/h"
    environment = os.environ | {"COMP_LINE": line, "COMP_WORDBREAKS": ":=", "_P2PDIST_COMPLETE": "bash_complete"}
    done = subprocess.run(
        [Path(sys.executable).parent / "p2pdist"],
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert "plain,held/here:v7" in done.stdout.splitlines()
