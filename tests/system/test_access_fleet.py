"""A fleet with access on, as processes: hosts join, packages come from peers, tokens open what they
are for, authorities rotate, the tracker dies and the fleet goes on."""

from __future__ import annotations

import os
import ssl
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import programs
import pytest
from site_rig import Agent, Site, free_port, running_site, until

MIB = 1 << 20


class AccessSite:
    """A site whose tracker has an access file."""

    def __init__(self, site: Site) -> None:
        self.site = site
        self.file = site.directory / "access" / "access.toml"
        self.file.parent.mkdir()
        self.url = f"https://127.0.0.1:{site.tracker_port}"
        self.log = site.directory / "tracker.log"

    def start_tracker(self) -> None:
        words = ["tracker", "--listen", f"127.0.0.1:{self.site.tracker_port}", "--origin", self.site.origin.url]
        words += ["--state", str(self.site.directory / "state"), "--access", str(self.file)]
        self.site.tracker_process = self.site.spawn(words, self.log)
        until(lambda: self.join_file.exists() and self.command("doctor")[0] is not None)

    @property
    def join_file(self) -> Path:
        return self.file.parent / "join-default.token"

    def agent(self, name: str, **options: str) -> Agent:
        probe = str(free_port())
        return Agent(self.site, name, tracker=self.url, join_file=str(self.join_file), probe_listen=probe, **options)

    def command(self, *words: str, token: str = "") -> tuple[int, str, str]:
        environment = {**os.environ, "P2PDIST_TOKEN": token}
        done = programs.run(*words, env=environment)
        return done.returncode, done.stdout, done.stderr

    def authorities(self) -> int:
        """How many authorities the tracker states."""
        unverified = ssl._create_unverified_context()  # as a client that compares them with its pin
        with urllib.request.urlopen(f"{self.url}/v1/access/authorities", timeout=10, context=unverified) as answer:
            return int(answer.read().count(b"BEGIN CERTIFICATE"))

    def token(self, role: str) -> str:
        code, out, errors = self.command("token", "create", "--access", str(self.file), "--role", role, "--ttl", "1d")
        assert code == 0, errors
        return out.strip()


@pytest.fixture
def fleet(tmp_path: Path) -> Iterator[AccessSite]:
    with running_site(tmp_path, tracker=False) as site:
        made = AccessSite(site)
        made.start_tracker()
        yield made


@pytest.mark.slow
def test_a_fleet_joins_and_feeds_itself(fleet: AccessSite) -> None:
    digest = fleet.site.publish(16 * MIB)
    agents = [fleet.agent(f"h{number}").start() for number in range(3)]
    statuses = [pull.result() for pull in [agent.start_pull(blob=digest) for agent in agents]]
    assert sum(status.bytes_origin for status in statuses) == 16 * MIB
    assert sum(status.bytes_peers for status in statuses) == 2 * 16 * MIB
    # The probe port is plain, and knows what the port of the fleet does not tell a stranger.
    port = agents[0].options["probe_listen"]
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=60) as answer:
        assert b"p2pdist_agent_received_bytes_total" in answer.read()
    with pytest.raises(urllib.error.HTTPError) as caught:
        urllib.request.urlopen(f"http://127.0.0.1:{port}/v1/blobs/{digest}", timeout=60)
    assert caught.value.code == 404
    # A host that comes after a rotation has a token with the old pin.
    code, _, errors = fleet.command("access", "rotate", "--access", str(fleet.file))
    assert code == 0, errors
    until(lambda: fleet.authorities() == 2)  # the tracker has noticed
    late = fleet.agent("h3").start()
    assert late.pull(blob=digest).bytes_peers == 16 * MIB
    # The tracker dies: a host that is started again knows its fleet, and its packages.
    fleet.site.kill_tracker()
    assert agents[1].stop() == 0
    again = agents[1].start(ready=False)
    assert again.pull(blob=digest).bytes_cached == 16 * MIB


@pytest.mark.slow
def test_commands_show_their_token_to_the_right_tracker_alone(fleet: AccessSite, tmp_path: Path) -> None:
    operator = fleet.token("operator")
    status = ("status", "--tracker", fleet.url)
    code, out, errors = fleet.command(*status, token=operator)
    assert code == 0 and "hosts" in out, errors
    file = tmp_path / "token"
    file.write_text(operator)
    file.chmod(0o600)
    assert fleet.command(*status, "--token-file", str(file))[0] == 0
    code, _, errors = fleet.command(*status)
    assert code == 5 and "--token-file" in errors, "nothing names its authority"
    code, _, errors = fleet.command(*status, token=fleet.token("metrics"))
    assert code == 4 and "lacks the right" in errors
    code, _, errors = fleet.command(*status, token="nonsense")
    assert code == 2 and "no token" in errors and "nonsense" not in errors
    jwt = operator.rpartition("p2pt1.")[2].partition(".")[2]
    code, _, errors = fleet.command(*status, token=f"p2pt1.{'ab' * 32}.{jwt}")
    assert code == 4 and "pins" in errors
    code, out, errors = fleet.command("top", "--tracker", fleet.url, "--once", token=operator)
    assert code == 0, errors
    code, out, errors = fleet.command("doctor", "--tracker", fleet.url, "--store", str(tmp_path / "s"), token=operator)
    assert f"{fleet.url} answers" in out
    plain = fleet.url.replace("https", "http")
    code, _, errors = fleet.command("status", "--tracker", plain, token=operator)
    assert code == 5 and "https://" in errors


OUT_S = 5
"""A revoked host is out within so long."""

RATE = 400_000
"""What each host sends at most, in bytes a second: a count of bytes is a count of seconds."""


def sent_and_received(agent: Agent) -> tuple[float, float]:
    """What an agent has sent to and received from other agents, by its probe port."""
    port = agent.options["probe_listen"]
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=60) as answer:
        lines = [line.rpartition(" ") for line in answer.read().decode().splitlines()]
    named = ("p2pdist_agent_sent_bytes_total{", 'p2pdist_agent_received_bytes_total{source="peer"}')
    sent, received = (sum(float(value) for name, _, value in lines if name.startswith(each)) for each in named)
    return sent, received


@pytest.mark.slow
def test_a_revoked_host_neither_feeds_nor_is_fed_for_longer_than_it_may(fleet: AccessSite) -> None:
    """While a blob is on its way, from a seed to two hosts of another rack, of which one feeds
    the other. Hosts send at a fixed rate, so that bytes tell the time."""
    digest = fleet.site.publish(32 * MIB)
    seed = fleet.agent("h0", rack="one").start()
    seed.pull(blob=digest)
    hosts = [fleet.agent(f"h{number}", rack="two", upload_limit=f"{RATE}B/s").start() for number in (1, 2)]
    assert seed.stop() == 0
    seed.options["upload_limit"] = f"{RATE}B/s"
    seed.start()
    pulls = {host.name: host.start_pull(blob=digest) for host in hosts}
    until(lambda: any(all(sent_and_received(host)) for host in hosts))
    revoked, other = sorted(hosts, key=lambda host: not all(sent_and_received(host)))
    code, _, errors = fleet.command("access", "revoke", "--access", str(fleet.file), f"host:{revoked.name}")
    assert code == 0, errors
    sent, received = sent_and_received(revoked)
    with pytest.raises(Exception, match="revoked"):
        pulls[revoked.name].result()
    sent_after, received_after = sent_and_received(revoked)
    assert sent_after - sent <= OUT_S * RATE
    assert received_after - received <= 2 * OUT_S * RATE, "from two hosts"
    with pytest.raises(Exception, match="revoked"):
        revoked.pull(blob=digest)
    assert sent_and_received(revoked) == (sent_after, received_after)
    _, fed = sent_and_received(other)
    until(lambda: sent_and_received(other)[1] > fed)
    other.stop()
