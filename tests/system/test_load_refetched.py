"""Loading from a blob that is removed and fetched again while a program loads it."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from site_rig import running_site

from p2pdist.agent.api.client import LocalClient
from p2pdist.load.tensors import _File

pytestmark = pytest.mark.slow
SIZE = 8 << 20


def test_bytes_come_from_the_file_that_the_agent_has_now(tmp_path: Path) -> None:
    """The mapped file of a pull that was given up has holes for ever: a program that loads from it
    would take zeros for weights."""
    with running_site(tmp_path) as site:
        digest = site.publish(SIZE)
        content = (tmp_path / "content").read_bytes()
        (agent,) = site.agents(1)
        site.origin.rate_bytes_s = 512 << 10
        file = _File(digest, digest=digest, client=LocalClient(agent.socket))
        first = file.ready(0, 8)
        assert first[:8] == content[:8]
        agent.kill()
        assert first[SIZE - 64 :] == bytes(64), "the rest has not come"
        shutil.rmtree(agent.store)
        site.origin.rate_bytes_s = 0.0
        agent.start()
        assert file.ready(8, SIZE)[8:] == content[8:]
        assert first[SIZE - 64 :] == bytes(64), "the former file never gets it"
