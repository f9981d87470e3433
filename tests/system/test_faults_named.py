"""Ten faults, each made for real in a fleet of processes: what an operator looks at names the
cause, the host and the package, and what to do."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import programs
import pytest
from aiohttp import web
from site_rig import P2PDIST, Agent, Site, WebOrigin, free_port, running_site, until

from p2pdist.model.errors import P2PDistError

pytestmark = pytest.mark.long

MIB = 1 << 20
FAKETIME = shutil.which("faketime")
RELAY = """
import asyncio, sys, time
port, behind, rate = (int(word) for word in sys.argv[1:])
free_at = 0.0
async def pump(reader, writer, limited):
    global free_at
    try:
        while data := await reader.read(65536 if not limited else 16384):
            if limited:
                now = time.monotonic()
                free_at = max(now, free_at) + len(data) / rate
                await asyncio.sleep(free_at - now)
            writer.write(data)
            await writer.drain()
    except OSError:
        pass
    finally:
        writer.close()
async def serve(reader, writer):
    below, above = await asyncio.open_connection("127.0.0.1", behind)
    await asyncio.gather(pump(reader, above, False), pump(below, writer, True))
async def main():
    async with await asyncio.start_server(serve, "127.0.0.1", port) as server:
        await server.serve_forever()
asyncio.run(main())
"""
"""A link before an agent: what the agent sends passes at a rate, for all receivers together."""


class Origin(WebOrigin):
    """An origin that can refuse, and that can be away."""

    refuses = False

    async def _file(self, request: web.Request) -> web.Response:
        if self.refuses:
            raise web.HTTPForbidden(text="no credentials")
        return await super()._file(request)


class Fleet:
    """A site with four agents, and what an operator sees of it."""

    def __init__(self, site: Site) -> None:
        self.site = site
        self.policies = site.directory / "policies.toml"
        self.policies.write_text("")
        self.agents: list[Agent] = []

    def start(self) -> None:
        self.site.start_tracker("--log-level", "info", "--policies", str(self.policies))
        self.agents = self.site.agents(4, zone="eu-1")

    def push(self, package: str, size: int) -> None:
        """Put a package with so many random bytes at the origin."""
        source = self.site.directory / package.replace("/", "-").replace(":", "-")
        source.mkdir()
        (source / "weights").write_bytes(os.urandom(size))
        layout = ("--layout", str(self.site.directory / "layout"))
        for words in (
            ("pack", str(source), "-t", package, *layout),
            ("push", package, "--origin", f"file://{self.site.layout}", *layout),
        ):
            code, _, errors = self.site.command(*words)
            assert code == 0, errors
        shutil.rmtree(source)

    def pull(self, package: str, agents: list[Agent] | None = None) -> None:
        for pull in [agent.start_pull(package=package) for agent in agents or self.agents]:
            assert pull.result(120).state == "done"

    def events(self, kind: str, *words: str) -> str:
        """The line of `p2pdist events` with all these words, once it is there: within a minute."""

        def lines() -> list[str]:
            done = programs.run("events", "--tracker", self.site.tracker_url, "--kind", kind)
            assert done.returncode == 0, done.stderr
            return [line for line in done.stdout.splitlines() if all(word in line for word in words)]

        try:
            until(lambda: lines())
        except AssertionError:
            done = programs.run("events", "--tracker", self.site.tracker_url)
            raise AssertionError(f"no event {kind} has {words}:\n{done.stdout}") from None
        return lines()[-1]

    def shown(self, *words: str) -> str:
        """What a command about this tracker prints."""
        done = programs.run(*words, "--tracker", self.site.tracker_url)
        return str(done.stdout) + str(done.stderr)

    def metric(self, line: str) -> float:
        import urllib.request

        text = urllib.request.urlopen(self.site.tracker_url + "/metrics", timeout=60).read().decode()
        found = [float(each.rpartition(" ")[2]) for each in text.splitlines() if each.startswith(line)]
        assert found, f"the tracker has no metric {line}"
        return sum(found)

    def page(self, kind: str) -> list[dict[str, Any]]:
        """GET /v1/history."""
        import urllib.request

        with urllib.request.urlopen(f"{self.site.tracker_url}/v1/history?kind={kind}", timeout=60) as answer:
            return [record["event"] for record in json.load(answer)["records"]]


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    with running_site(tmp_path_factory.mktemp("site"), tracker=False) as site:
        site.origin.stop()
        site.origin = Origin(site.layout)
        site.origin.start()
        fleet = Fleet(site)
        fleet.start()
        yield fleet


@contextmanager
def link(agent: Agent, rate_bytes_s: int) -> Iterator[int]:
    """A port that leads to an agent, and back at a rate."""
    port = free_port()
    process = subprocess.Popen([sys.executable, "-c", RELAY, str(port), str(agent.port), str(rate_bytes_s)])
    try:
        yield port
    finally:
        process.kill()
        process.wait()


def test_a_dead_host(fleet: Fleet) -> None:
    """Killed while it receives: when, which, where it was, and what it did not get."""
    fleet.push("team/dead:v1", 24 * MIB)
    fleet.site.origin.rate_bytes_s = 2 * MIB
    pulls = [agent.start_pull(package="team/dead:v1") for agent in fleet.agents]
    until(lambda: fleet.agents[3].received() > 0)
    fleet.agents[3].kill()
    line = fleet.events("host-lost", "lost h3 at 127.0.0.1:", "zone eu-1", "its connection broke", "team/dead:v1")
    assert "did not get all of" in line
    assert fleet.metric('p2pdist_tracker_hosts{state="absent",zone="eu-1"}') == 1
    assert "absent   h3" in fleet.shown("status")
    assert "h3" in fleet.shown("top", "--once")
    fleet.site.origin.rate_bytes_s = 0
    for pull in pulls[:3]:
        assert pull.result(120).state == "done"
    until(lambda: "h3" in fleet.shown("report", "team/dead:v1"))
    assert "its session broke before it was complete" in fleet.shown("report", "team/dead:v1")
    fleet.agents[3].start()
    fleet.events("host-back", "h3 is back after")


@contextmanager
def restarted(fleet: Fleet, agent: Agent, rate_bytes_s: float, **options: str) -> Iterator[None]:
    """An agent with other options, beside an origin with this rate; both as before in the end."""
    agent.stop()
    agent.options.update(options)
    agent.start()
    fleet.site.origin.rate_bytes_s = rate_bytes_s
    try:
        yield
    finally:
        fleet.site.origin.rate_bytes_s = 0
        agent.stop()
        for option in options:
            del agent.options[option]
        agent.start()


def test_a_slow_uplink(fleet: Fleet) -> None:
    """Hosts that receive from this one get far less than from others. Which hosts serve most is the
    tracker's choice, and another one for each blob."""
    slow = fleet.agents[0]

    def told() -> bool:
        return any(event["host"] == "h0" and "slow uplink" in event["reason"] for event in fleet.page("host-slow"))

    with link(slow, MIB // 8) as port, restarted(fleet, slow, 4 * MIB, advertise=f"127.0.0.1:{port}"):
        for number in range(8):
            package = f"team/uplink:v{number}"
            fleet.push(package, 24 * MIB)
            pulls = [agent.start_pull(package=package) for agent in fleet.agents]
            until(lambda pulls=pulls: told() or all(pull.ended for pull in pulls), within_s=600)
            if told():
                break
        line = fleet.events("host-slow", "h0 (zone eu-1) has a slow uplink", "team/uplink:v")
        assert "See its link" in line
        assert fleet.metric("p2pdist_tracker_slow_hosts") >= 1
        assert "slow uplink" in fleet.shown("top", "--once")
        for pull in pulls:
            assert pull.result(600).state == "done"


def test_a_slow_downlink(fleet: Fleet) -> None:
    slow = fleet.agents[1]
    with restarted(fleet, slow, 4 * MIB, download_limit="200KB/s"):
        fleet.push("team/downlink:v1", 48 * MIB)
        pulls = [agent.start_pull(package="team/downlink:v1") for agent in fleet.agents]
        line = fleet.events("host-slow", "h1 (zone eu-1) has a slow downlink", "team/downlink:v1")
        assert "limits itself to 0.2 MB/s: see --download-limit" in line
        assert "slow downlink" in fleet.shown("top", "--once")
        for number, pull in enumerate(pulls):
            if number != 1:
                assert pull.result(240).state == "done"


@pytest.mark.skipif(os.geteuid() != 0, reason="mounts a file system")
def test_a_full_disk(fleet: Fleet, tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    fleet.push("team/large:v1", 24 * MIB)
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=16m", "tmpfs", disk], check=True)
    try:
        small = Agent(fleet.site, "small", store=str(disk / "store"), zone="eu-1").start()
        with pytest.raises(P2PDistError):
            small.pull(package="team/large:v1")
        line = fleet.events("pull-failed", "small could not pull team/large:v1", "disk-full")
        assert str(disk) in line and "free" in line
        assert small.metric('p2pdist_agent_pulls_failed_total{reason="disk-full"}') == 1
        assert small.metric('p2pdist_agent_disk_bytes{state="total"}') == 16 * MIB
        small.stop()
    finally:
        subprocess.run(["umount", "--lazy", disk], check=True)


def test_a_peer_that_corrupts(fleet: Fleet) -> None:
    """The bytes below a host's blob change while it serves them."""
    fleet.push("team/corrupt:v1", 8 * MIB)
    holder, receiver = fleet.agents[2], fleet.agents[3]
    fleet.pull("team/corrupt:v1", [holder])
    for path in (holder.store / "blobs" / "sha256").iterdir():
        if path.stat().st_size >= 8 * MIB:
            path.chmod(0o600)
            with path.open("r+b") as file:
                file.write(os.urandom(path.stat().st_size))
    fleet.pull("team/corrupt:v1", [receiver])
    line = fleet.events("wrong-bytes", "h2 (zone eu-1) sent wrong bytes of team/corrupt:v1 to h3")
    assert "p2pdist verify" in line
    assert receiver.metric("p2pdist_agent_pieces_rejected_total") > 0
    assert fleet.page("wrong-bytes")[0]["host"] == "h2"


def test_an_origin_without_credentials(fleet: Fleet) -> None:
    origin = fleet.site.origin
    assert isinstance(origin, Origin)
    origin.refuses = True
    try:
        line = fleet.events("origin", "the tracker cannot read the origin", origin.url)
        assert "403" in line or "refuse" in line
        assert "origin   cannot be read" in fleet.shown("status")
        assert fleet.metric("p2pdist_tracker_origin_reachable") == 0
        with pytest.raises(P2PDistError):
            fleet.agents[0].pull(package="team/refused:v1")
        fleet.events("pull-failed", "h0 could not pull team/refused:v1", "refused")
    finally:
        origin.refuses = False
    fleet.events("origin", "can read the origin", "again")
    assert fleet.metric("p2pdist_tracker_origin_reachable") == 1


def test_an_origin_that_is_down(fleet: Fleet) -> None:
    origin = fleet.site.origin
    port = origin.port
    origin.stop()
    line = fleet.events("origin", "the tracker cannot read the origin", f":{port}", "onnect")
    assert "Hosts get what others hold" in line
    with pytest.raises(P2PDistError):
        fleet.agents[1].pull(package="team/away:v1")
    fleet.events("pull-failed", "h1 could not pull team/away:v1", "unavailable")
    fleet.site.origin = Origin(fleet.site.layout)
    fleet.site.origin.port = port
    fleet.site.origin.start()
    until(lambda: fleet.metric("p2pdist_tracker_origin_reachable") == 1)


def test_a_wrong_zone_in_a_preseed(fleet: Fleet) -> None:
    fleet.push("team/zone:v1", MIB)
    said = fleet.shown("preseed", "team/zone:v1", "--selector", "zone=eu-2", "--deadline", "3s", "--wait")
    assert "no host has zone=eu-2; zones here: eu-1" in said
    line = fleet.events("preseed-failed", "team/zone@")
    assert "no host has zone=eu-2; zones here: eu-1" in line
    assert fleet.metric('p2pdist_tracker_preseeds{state="failed"}') >= 1


def test_a_stale_policy(fleet: Fleet) -> None:
    fleet.policies.write_text('[[policy]]\nmatch = ["team/*"]\nkeeps = "1h"\n')
    fleet.events("change", "the policies stay as they were", str(fleet.policies), "keeps")
    assert fleet.metric("p2pdist_tracker_policies_stale") == 1
    assert "policies stale" in fleet.shown("status") and "keeps" in fleet.shown("status")
    fleet.policies.write_text("")
    until(lambda: fleet.metric("p2pdist_tracker_policies_stale") == 0)


@pytest.mark.skipif(FAKETIME is None, reason="needs faketime (Debian package faketime)")
def test_a_clock_that_is_off(fleet: Fleet) -> None:
    late = Agent(fleet.site, "late")
    words = ["-f", "-10m", *P2PDIST, "agent", "--listen", f"127.0.0.1:{late.port}", "--store", str(late.store)]
    words += ["--socket", str(late.socket), "--name", "late", "--zone", "eu-1", "--tracker", fleet.site.tracker_url]
    environment = os.environ | {"FAKETIME_DONT_FAKE_MONOTONIC": "1", "DONT_FAKE_MONOTONIC": "1"}
    with late.log.open("ab") as log:
        process = subprocess.Popen(
            [str(FAKETIME), *words], stdout=log, stderr=log, env=environment, start_new_session=True
        )
    try:
        line = fleet.events("clock-off", "late (zone eu-1): its clock is", "behind the tracker's")
        assert "chrony" in line and ("600 s" in line or "599 s" in line)
        assert fleet.metric("p2pdist_tracker_clock_off_hosts") == 1
        assert 590 < fleet.metric("p2pdist_tracker_clock_skew_seconds") < 660
    finally:
        os.killpg(process.pid, signal.SIGKILL)  # faketime waits for the agent, and hands no signals on
        process.wait()
