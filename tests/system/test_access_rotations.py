"""A fleet with access on whose keys, hosts and trackers change while a package is on its way. Real
processes."""

from __future__ import annotations

import re
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
from site_rig import free_port, running_site, until
from test_access_fleet import MIB, AccessSite

SIZE = 8 * MIB
BROKEN = re.compile(r"stream from \S+, stripe \d+, ended: (\w+)")


@pytest.fixture
def fleet(tmp_path: Path) -> Iterator[AccessSite]:
    with running_site(tmp_path, tracker=False) as site:
        made = AccessSite(site)
        made.start_tracker()
        yield made


def probe(agent: object, line: str) -> float:
    """A metric of an agent, by its port for probes."""
    port = agent.options["probe_listen"]  # type: ignore[attr-defined]
    text = urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=60).read().decode()
    return sum(float(each.rpartition(" ")[2]) for each in text.splitlines() if each.startswith(line))


@pytest.mark.slow
def test_a_rotation_under_a_broadcast_breaks_no_stream(fleet: AccessSite) -> None:
    """Authority and signing key change twice while a slow seed feeds a chain of hosts."""
    digest = fleet.site.publish(SIZE)
    seed = fleet.agent("h0", upload_limit="1MB/s").start()
    seed.pull(blob=digest)
    others = [fleet.agent(f"h{number}", upload_limit="1MB/s").start() for number in (1, 2)]
    pulls = [agent.start_pull(blob=digest) for agent in others]
    for rotations in (1, 2):
        until(lambda: probe(seed, "p2pdist_agent_streams") > 0)
        code, _, errors = fleet.command("access", "rotate", "--access", str(fleet.file))
        assert code == 0, errors
        until(lambda: fleet.authorities() == 1 + rotations)  # noqa: B023
        for agent in (seed, *others):
            kept = agent.store / "identity" / "authorities.pem"
            until(lambda: kept.read_bytes().count(b"BEGIN CERTIFICATE") == 1 + rotations)  # noqa: B023
    statuses = [pull.result(180) for pull in pulls]
    assert [status.state for status in statuses] == ["done", "done"]
    assert sum(status.bytes_origin for status in statuses) == 0
    for agent in others:
        assert not set(BROKEN.findall(agent.log.read_text())) - {"done", "closed"}, agent.log.read_text()[-3000:]


@pytest.mark.slow
@pytest.mark.parametrize("revoked", ["h0", "h1"])
def test_nothing_goes_to_or_comes_from_a_host_that_was_revoked(fleet: AccessSite, revoked: str) -> None:
    """Whichever end of a stream it is at. `pytest -s` shows how long that took."""
    digest = fleet.site.publish(SIZE)
    seed = fleet.agent("h0", upload_limit="200KB/s").start()
    seed.pull(blob=digest)
    child = fleet.agent("h1").start()
    pull = child.start_pull(blob=digest)
    until(lambda: probe(seed, "p2pdist_agent_sent_bytes_total") > 0)
    code, _, errors = fleet.command("access", "revoke", "--access", str(fleet.file), f"host:{revoked}")
    assert code == 0, errors
    revoked_at = time.monotonic()
    until(lambda: probe(seed, "p2pdist_agent_streams") == 0)
    print(f"\n{revoked} was out {time.monotonic() - revoked_at:.1f} s after the command")
    if revoked == "h0":  # the child goes on at the origin
        assert pull.result(120).state == "done"
        assert fleet.site.origin_bytes(digest) > SIZE
    else:
        with pytest.raises(Exception, match="revoked"):
            pull.result(120)


@pytest.mark.slow
def test_two_trackers_of_one_directory_are_one_fleet(fleet: AccessSite) -> None:
    """A host that joined at one is known at the other, which feeds it when the first is gone."""
    digest = fleet.site.publish(SIZE)
    port = free_port()
    words = ["tracker", "--listen", f"127.0.0.1:{port}", "--origin", fleet.site.origin.url, "--access", str(fleet.file)]
    second = fleet.site.spawn(words, fleet.site.directory / "second.log")
    url = f"https://127.0.0.1:{port}"
    token = fleet.token("operator")
    until(lambda: fleet.command("status", "--tracker", url, token=token)[0] == 0)
    seed = fleet.agent("h0")
    seed.options["tracker"] = f"{fleet.url},{url}"
    seed.start().pull(blob=digest)
    fleet.site.kill_tracker()
    child = fleet.agent("h1")
    child.options["tracker"] = url
    child.start()
    until(lambda: hosts(fleet, url, token))
    status = child.pull(blob=digest)
    assert (status.bytes_peers, status.bytes_origin) == (SIZE, 0)
    second.terminate()
    second.wait(60)


def hosts(fleet: AccessSite, url: str, token: str) -> bool:
    """Whether h0 has a session with the tracker at `url`."""
    return "h0" in fleet.command("top", "--tracker", url, "--once", token=token)[1]
