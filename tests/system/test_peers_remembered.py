"""Whole processes: tracker and origin are gone for good, and the host that gave a pull its pieces
dies and comes back. The pull that waits ends, and so does one that begins then."""

from __future__ import annotations

import hashlib
import stat

import pytest
from site_rig import Agent, Site, until

from p2pdist.agent.api.client import LocalClient

MIB = 1 << 20
SIZE = 24 * MIB
RATE = "4MB/s"

pytestmark = pytest.mark.slow


def half_pulled(site: Site) -> tuple[str, Agent, Agent]:
    """A blob, a host that has it and sends it slowly, and one that is to pull it from there."""
    digest = site.publish(SIZE)
    seed = Agent(site, "seed", upload_limit=RATE).start()
    assert seed.pull(blob=digest).state == "done"
    host = Agent(site, "host").start()
    return digest, seed, host


def waits(host: Agent) -> bool:
    """Whether a pull says that it waits for hosts."""
    return any(
        "hosts that it named give nothing" in pull["note"] for pull in LocalClient(host.socket).status()["pulls"]
    )


def right(site: Site, digest: str) -> bool:
    return "sha256:" + hashlib.sha256((site.directory / "out").read_bytes()).hexdigest() == digest


def test_a_pull_under_way_waits_for_its_host_and_ends(site: Site) -> None:
    digest, seed, host = half_pulled(site)
    pull = host.start_pull(blob=digest, output=str(site.directory / "out"))
    until(lambda: host.received() > 2 * MIB)
    site.origin.stop()
    site.kill_tracker()
    seed.kill()
    until(lambda: waits(host))
    assert host.received() < SIZE
    seed.start(ready=False)
    assert pull.result().state == "done" and right(site, digest)
    assert site.origin_bytes(digest) == SIZE


def test_a_pull_begins_again_without_a_tracker(site: Site) -> None:
    """Also the host that pulls is killed: it reads on its disk whom the tracker named."""
    digest, seed, host = half_pulled(site)
    host.start_pull(blob=digest)
    until(lambda: host.received() > 2 * MIB and list(host.store.glob("sources/*.json")) != [])
    (file,) = host.store.glob("sources/*.json")
    assert stat.S_IMODE(file.stat().st_mode) == 0o600 and b'"seed"' in file.read_bytes()
    site.kill_tracker()
    host.kill()
    seed.kill()
    host.start(ready=False)
    pull = host.start_pull(blob=digest, output=str(site.directory / "out"))
    until(lambda: waits(host))
    seed.start(ready=False)
    status = pull.result()
    assert status.state == "done" and right(site, digest) and status.bytes_cached >= 2 * MIB - 65536
    assert site.origin_bytes(digest) == SIZE
    until(lambda: not list(host.store.glob("sources/*.json")))
