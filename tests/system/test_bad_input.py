"""Whole processes: what bad content, lying peers, full disks and malformed requests get."""

from __future__ import annotations

import json
import subprocess
import time
import urllib.error
import urllib.request
from pathlib import Path

import pytest
from site_rig import Agent, Site

from p2pdist.model.errors import Corrupt, DiskFull, NotFound, Unavailable

MIB = 1 << 20


@pytest.mark.slow
@pytest.mark.parametrize("how", ["truncate", "alter"])
def test_corrupt_content_at_the_origin_fails_with_6_and_nothing_is_stored(site: Site, how: str) -> None:
    digest = site.publish(4 * MIB)
    site.origin.spoil[digest.removeprefix("sha256:")] = how
    agents = site.agents(2)
    pulls = [agent.start_pull(blob=digest) for agent in agents]
    for pull in pulls:
        with pytest.raises(Corrupt, match=digest):
            pull.result()
    code, document, _ = site.command(
        "blob", "pull", digest, "-o", str(site.directory / "o"), "--socket", str(agents[0].socket)
    )
    assert code == 6 and document["type"].endswith(":corrupt")
    for agent in agents:
        assert not list(agent.store.glob("blobs/sha256/*"))
        assert not list(agent.store.glob("partial/*"))


@pytest.mark.slow
def test_an_unknown_digest_and_an_unknown_tag_fail_with_3_and_name_the_origin(site: Site) -> None:
    site.publish(1000)
    (agent,) = site.agents(1)
    with pytest.raises(NotFound, match=site.origin.url):
        agent.pull(blob="sha256:" + "0" * 64)
    code, document, errors = site.command("pull", "nosuch:v1", "--socket", str(agent.socket))
    assert code == 3 and document["type"].endswith(":not-found")
    assert site.origin.url in document["detail"] and "Traceback" not in errors


@pytest.mark.slow
def test_wrong_bytes_of_a_peer_are_never_stored_and_the_peer_is_named(site: Site) -> None:
    digest = site.publish(4 * MIB)
    liar, honest = site.agents(2)
    liar.pull(blob=digest)
    path = next(liar.store.glob("blobs/sha256/*"))
    path.chmod(0o644)
    with path.open("r+b") as file:
        file.seek(100_000)
        file.write(b"\xff" * 1000)
    status = honest.pull(blob=digest, output=str(site.directory / "out"))
    assert status.state == "done"
    assert (site.directory / "out").read_bytes() == (site.directory / "content").read_bytes()
    assert honest.metric('p2pdist_agent_pieces_rejected_total{reason="corrupt"}') >= 1
    assert "source=liar" not in honest.log.read_text()
    assert f"source={liar.name} sent wrong bytes" in honest.log.read_text()


@pytest.mark.slow
@pytest.mark.root
def test_a_full_disk_fails_one_pull_and_leaves_the_others_alone(site: Site) -> None:
    digest, small = site.publish(16 * MIB), site.publish(1 * MIB)
    disk = site.directory / "disk"
    disk.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=8m", "none", str(disk)], check=True)
    agent = Agent(site, "cramped", store=str(disk / "store"))
    try:
        agent.start()
        with pytest.raises(DiskFull) as failure:
            agent.pull(blob=digest)
        assert failure.value.details["needed"] >= 16 * MIB and failure.value.details["free"] < 8 * MIB
        assert agent.pull(blob=small).state == "done"
        code, _, errors = site.command(
            "blob", "pull", digest, "-o", str(site.directory / "o"), "--socket", str(agent.socket)
        )
        assert code == 1 and "free" in errors
    finally:
        agent.stop()
        subprocess.run(["umount", str(disk)], check=True)


@pytest.mark.slow
def test_without_a_tracker_a_new_pull_waits_says_so_and_gives_up(site: Site) -> None:
    digest = site.publish(1000)
    site.kill_tracker()
    agent = Agent(site, "lost", tracker_wait="1").start(ready=False)
    started = time.monotonic()
    with pytest.raises(Unavailable, match="no tracker answered for 1 s"):
        agent.pull(blob=digest)
    assert time.monotonic() - started >= 1
    waiting = Agent(site, "patient", tracker_wait="60").start(ready=False).start_pull(blob=digest)
    time.sleep(0.5)
    site.start_tracker()
    assert waiting.result().state == "done"


@pytest.mark.slow
def test_any_http_client_gets_a_blob_that_is_not_here_yet(site: Site) -> None:
    digest = site.publish(8 * MIB)
    (agent,) = site.agents(1)
    target = site.directory / "fetched"
    subprocess.run(["curl", "-sf", "-o", str(target), f"{agent.url}/v1/blobs/{digest}"], check=True, timeout=30)
    assert target.read_bytes() == (site.directory / "content").read_bytes()
    part = subprocess.run(
        ["curl", "-sf", "-r", "100000-299999", f"{agent.url}/v1/blobs/{digest}"],
        check=True,
        capture_output=True,
        timeout=30,
    ).stdout
    assert part == target.read_bytes()[100000:300000]


def _problem(request: urllib.request.Request | str) -> tuple[int, dict[str, object]]:
    with pytest.raises(urllib.error.HTTPError) as failure:
        urllib.request.urlopen(request, timeout=60)
    assert failure.value.headers["Content-Type"].startswith("application/problem+json")
    return failure.value.code, json.loads(failure.value.read())


def test_malformed_requests_get_problem_documents(site: Site) -> None:
    (agent,) = site.agents(1)
    for url in (
        f"{agent.url}/v1/blobs/sha256:xyz",
        f"{agent.url}/v1/blobs/..%2f..%2fetc%2fpasswd",
        f"{site.tracker_url}/v1/resolve?reference=No%20Such",
        f"{site.tracker_url}/v1/content/nothing",
        f"{site.tracker_url}/v1/swarms/nothing",
    ):
        status, problem = _problem(url)
        assert status == 400 and str(problem["type"]).endswith(":bad-request"), url
    assert _problem(f"{agent.url}/nowhere")[0] == 404
    assert _problem(f"{agent.url}/v1/pulls")[0] == 404, "the local API is on the Unix socket only"
    for body in (b"", b"{", b'{"blob":1}', b'{"blob":"sha256:' + b"0" * 64 + b'","stripe":5,"stripes":4,"have":""}'):
        status, _ = _problem(urllib.request.Request(f"{agent.url}/v1/streams", data=body))
        assert status == 400, body
    status, _ = _problem(urllib.request.Request(f"{agent.url}/v1/streams", data=b"x" * (2 * MIB)))
    assert status == 413


@pytest.mark.slow
def test_a_second_agent_on_the_same_store_is_told_why_it_cannot_start(site: Site) -> None:
    (agent,) = site.agents(1)
    rival = Agent(site, "rival", store=str(agent.store))
    process = site.spawn(
        ["agent", "--listen", f"127.0.0.1:{rival.port}", "--store", str(agent.store), "--socket", str(rival.socket)],
        rival.log,
    )
    assert process.wait(60) == 1
    assert "Traceback" not in rival.log.read_text() and str(agent.store) in rival.log.read_text()


def test_commands_without_an_agent_exit_with_5(tmp_path: Path, site: Site) -> None:
    code, document, errors = site.command("pull", "trainer:v1", "--socket", str(tmp_path / "none.sock"))
    assert code == 5 and document["type"].endswith(":unavailable") and "Traceback" not in errors
