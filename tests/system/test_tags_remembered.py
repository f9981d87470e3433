"""Whole processes: tracker and origin are gone for good, and an agent that has been killed pulls by
tag what the tracker said before."""

from __future__ import annotations

import os

import programs
import pytest
from site_rig import Agent, Site, until

MIB = 1 << 20
TAG = "team/app:v1"
RATE = "4MB/s"
PACK = ("pack", "-t", TAG, "--push")

pytestmark = pytest.mark.slow


def test_a_pull_by_tag_goes_on_without_a_tracker_and_says_as_of_when(site: Site) -> None:
    source = site.directory / "source"
    source.mkdir()
    (source / "weights").write_bytes(os.urandom(12 * MIB))
    packed = programs.run(
        *PACK, str(source), "--layout", site.directory / "layout", "--origin", f"file://{site.layout}"
    )
    assert packed.returncode == 0, packed.stderr
    seed = Agent(site, "seed", upload_limit=RATE).start()
    assert seed.pull(package=TAG).tag_age_s is None
    host = Agent(site, "host").start()
    host.start_pull(package=TAG)
    until(lambda: host.received() > 2 * MIB and list(host.store.glob("sources/*.json")) != [])
    site.kill_tracker()
    site.origin.stop()
    host.kill()
    host.start(ready=False)
    code, document, errors = site.command("pull", TAG, "--socket", str(host.socket))
    assert code == 0 and document["tag_age_s"] > 0, errors
    assert f"{TAG}: as of 20" in errors and "no tracker answers" in errors
    assert "as of 20" in host.log.read_text()
    host.kill()
    host.options["stale_tag_days"] = "0"
    host.options["tracker_wait"] = "1"
    host.start(ready=False)
    code, _, errors = site.command("pull", TAG, "--socket", str(host.socket))
    assert code == 5 and "no tracker answered" in errors
