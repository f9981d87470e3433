"""The background reading of a store in an agent that is killed while it reads, again and again."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest
from site_rig import Agent, Site, until

pytestmark = pytest.mark.slow

MIB = 1 << 20


def test_an_agent_that_is_killed_while_it_reads_repairs_all_the_same(site: Site) -> None:
    """A turned bit is mended, what was right stays, and every start after a kill works."""
    first, second = site.publish(4 * MIB), site.publish(4 * MIB)
    agent = Agent(site, "h0", scrub_days="0.00002").start()  # a round takes 2 s
    for digest in (first, second):
        agent.pull(blob=digest)
    right = {digest: stored(agent, digest).read_bytes() for digest in (first, second)}
    for pause_s in (0.2, 0.7, 1.2, 2.2):
        path = stored(agent, first)
        path.chmod(0o644)
        with path.open("r+b") as file:
            file.seek(3 * MIB)
            byte = file.read(1)[0]
            file.seek(3 * MIB)
            file.write(bytes([byte ^ 1]))
        time.sleep(pause_s)  # into a round, which lasts 2 s
        agent.kill()
        agent.start()
        until(lambda: whole(agent, first, right[first]))
    assert stored(agent, second).read_bytes() == right[second]


def stored(agent: Agent, digest: str) -> Path:
    return Path(agent.store) / "blobs" / "sha256" / digest.partition(":")[2]


def whole(agent: Agent, digest: str, content: bytes) -> bool:
    path = stored(agent, digest)
    return os.path.exists(path) and path.read_bytes() == content
