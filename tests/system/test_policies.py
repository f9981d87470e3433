"""Policies with a real tracker and real agents: zones, rates, what stores keep, transports, tags
kept warm, a file that changes."""

from __future__ import annotations

import json
import os
import signal
import tempfile
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from site_rig import Agent, Background, Site, running_site, until, wait_for

from p2pdist.agent.api.client import LocalClient
from p2pdist.model.errors import Refused

MIB = 1 << 20


class Governed:
    """A site whose tracker goes by a file of policies."""

    def __init__(self, site: Site) -> None:
        self.site = site
        self.file = site.directory / "policies.toml"

    def start(self, text: str) -> None:
        """Run the tracker with these policies."""
        self.file.write_text(text)
        site, log = self.site, self.site.directory / "tracker.log"
        words = ["tracker", "--listen", f"127.0.0.1:{site.tracker_port}", "--origin", site.origin.url]
        words += ["--policies", str(self.file), "--state", str(site.directory / "state")]
        site.tracker_process = site.spawn(words, log)
        wait_for(site.tracker_url + "/readyz", site.tracker_process, log)

    def write(self, text: str) -> None:
        """Put other policies in their place, as an editor does."""
        fresh = self.file.with_suffix(".new")
        fresh.write_text(text)
        os.replace(fresh, self.file)

    def health(self) -> dict[str, Any]:
        with urllib.request.urlopen(self.site.tracker_url + "/healthz", timeout=5) as answer:
            found: dict[str, Any] = json.load(answer)["policies"]
            return found

    def metric(self, name: str) -> float:
        with urllib.request.urlopen(self.site.tracker_url + "/metrics", timeout=60) as answer:
            lines = answer.read().decode().splitlines()
        return next(float(line.split()[1]) for line in lines if line.startswith(name + " "))

    def agents(self, **zones: str) -> dict[str, Agent]:
        """Agents by name, each in its zone."""
        made = {name: Agent(self.site, name, zone=zone) for name, zone in zones.items()}
        for started in [Background(agent.start) for agent in made.values()]:
            started.result()
        return made


@pytest.fixture
def governed() -> Iterator[Governed]:
    directory = tempfile.TemporaryDirectory(
        prefix="p2pdist-"
    )  # not tmp_path: a Unix socket's path may have 107 bytes only
    with directory as root, running_site(Path(root), tracker=False) as site:
        yield Governed(site)


def name(digest: str) -> str:
    """The package under which a blob was pushed alone."""
    return f"blob:{digest.replace(':', '-')}"


def policy(match: str, **values: object) -> str:
    """One table of a policy file."""
    lines = [f"{key} = {json.dumps(value)}" for key, value in values.items()]
    return "\n".join(["[[policy]]", f"match = {json.dumps(match)}", *lines, ""])


def pins(agent: Agent) -> set[tuple[str, str]]:
    """(digest, owner) of the blobs that an agent keeps."""
    return {(layer, pin.owner) for pin in LocalClient(agent.socket).pins() for layer in pin.layers}


def held(agent: Agent) -> set[str]:
    """The complete blobs in an agent's store."""
    return {f"sha256:{path.name}" for path in (agent.store / "blobs" / "sha256").iterdir()}


def command(agent: Agent, *words: str) -> tuple[int, dict[str, Any], str]:
    return agent.site.command(*words, "--socket", str(agent.socket))


@pytest.mark.slow
def test_zones_and_a_file_that_changes(governed: Governed) -> None:
    """A host elsewhere is refused, with a reason; a new file changes that without a restart; a
    wrong one changes nothing and shows."""
    blob = name(governed.site.publish(MIB))
    governed.start(policy("blob:*", zones=["a"]))
    agents = governed.agents(h0="a", h1="b", h2="c")
    assert command(agents["h0"], "pull", blob)[0] == 0
    code, problem, _ = command(agents["h1"], "pull", blob)
    assert (code, problem["type"]) == (4, "urn:p2pdist:problem:refused")
    assert "for hosts in a" in problem["detail"] and "zone b" in problem["detail"]
    assert held(agents["h1"]) == set()

    governed.write(policy("blob:*", zones=["a", "b"]))
    until(lambda: command(agents["h1"], "pull", blob)[0] == 0)
    assert governed.health() == {"count": 1, "problem": ""}

    governed.write(policy("blob:*", zone="c"))
    until(lambda: governed.health()["problem"])
    assert "there is no such key" in governed.health()["problem"]
    assert governed.metric("p2pdist_tracker_policies_stale") == 1
    assert command(agents["h2"], "pull", blob)[0] == 4, "the old policies hold"

    governed.file.write_text("")
    assert governed.site.tracker_process is not None
    governed.site.tracker_process.send_signal(signal.SIGHUP)
    until(lambda: governed.health() == {"count": 0, "problem": ""})
    assert governed.metric("p2pdist_tracker_policies_stale") == 0
    assert command(agents["h2"], "pull", blob)[0] == 0


@pytest.mark.slow
def test_a_blob_by_its_digest_is_refused_too(governed: Governed) -> None:
    """Who asks for a layer without naming its package meets the policy when it would join the
    swarm."""
    site = governed.site
    (site.directory / "source").mkdir()
    (site.directory / "source" / "file").write_bytes(os.urandom(MIB))
    layout = ("--layout", str(site.directory / "layout"))
    words = ("pack", str(site.directory / "source"), "-t", "team/app:v1", "--format", "tree", *layout)
    code, packed, errors = site.command(*words)
    assert code == 0, errors
    assert site.command("push", "team/app:v1", "--origin", f"file://{site.layout}", *layout)[0] == 0
    governed.start(policy("team/app:*", zones=["a"]))
    agents = governed.agents(h0="a", h1="b")
    assert agents["h0"].pull(package="team/app:v1").state == "done"
    layer = packed["layers"][0]["digest"]
    with pytest.raises(Refused, match="for hosts in a, and this one stands in zone b"):
        agents["h1"].pull(blob=layer)


@pytest.mark.long
def test_what_stores_keep(governed: Governed) -> None:
    """What is pinned and what is under no policy stays, what has had its time goes, and what is not
    kept goes as soon as it is unused; policies outlive the agent."""
    pinned, timed, passing, plain = (governed.site.publish(MIB) for _ in range(4))
    rules = policy(name(timed), ttl="1s") + policy(name(passing), cache="none")
    governed.start(policy(name(pinned), cache="pin") + rules)
    agent = governed.agents(h0="a")["h0"]
    for digest in (pinned, timed, passing, plain):
        assert agent.pull(package=name(digest)).state == "done"
    assert pins(agent) == {(pinned, f"policy:{name(pinned)}")}
    until(lambda: timed not in held(agent))
    assert agent.stop() == 0
    agent.start()
    until(lambda: held(agent) == {pinned, plain})
    references = {each["reference"] for each in command(agent, "ls")[1]}  # type: ignore[index]
    assert references == {name(pinned), name(plain)}
    code, refused, _ = command(agent, "rm", name(pinned))
    assert code == 1 and f"policy:{name(pinned)}" in refused["detail"]

    governed.write(policy(name(pinned), cache="lru") + rules)
    until(lambda: agent.pull(package=name(pinned)).state == "done" and pins(agent) == set())


@pytest.mark.slow
def test_rates_hold(governed: Governed) -> None:
    """What is received of one package, and sent of another, takes as long as its rate asks for; a
    package under no policy does not."""
    download, upload, plain = (governed.site.publish(4 * MIB) for _ in range(3))
    rate = f"{2 * MIB}B/s"
    governed.start(policy(name(download), download=rate) + policy(name(upload), upload=rate))
    agents = governed.agents(h0="a", h1="a")
    least_s = 1.5  # 4 MiB at 2 MiB/s, less what is caught up after a pause and the last piece, which is not waited for
    assert agents["h0"].pull(package=name(download)).seconds >= least_s
    agents["h0"].pull(package=name(upload))
    agents["h0"].pull(package=name(plain))
    limited = agents["h1"].pull(package=name(upload))
    assert limited.bytes_peers == 4 * MIB, "a host that keeps to a rate is not taken for slow"
    assert limited.seconds >= least_s
    assert agents["h1"].pull(package=name(plain)).bytes_peers == 4 * MIB


@pytest.mark.slow
def test_transport_follows_the_policy_but_where_the_agent_says(governed: Governed) -> None:
    """Under auto a package comes by BitTorrent where its policy says so; an agent that was told
    trees uses trees."""
    digest = governed.site.publish(2 * MIB)
    governed.start(policy(name(digest), transport="swarm"))
    governed.agents(h0="a")["h0"].pull(package=name(digest))
    follows = Agent(governed.site, "h1").start()
    assert follows.pull(package=name(digest)).state == "done"
    assert follows.metric('p2pdist_agent_received_bytes_total{source="bittorrent"}') > 0
    assert follows.metric('p2pdist_agent_received_bytes_total{source="peer"}') == 0
    forced = Agent(governed.site, "h2", transport="trees").start()
    assert forced.pull(package=name(digest)).state == "done"
    assert forced.metric('p2pdist_agent_received_bytes_total{source="bittorrent"}') == 0


@pytest.mark.long
def test_a_tag_is_kept_warm_when_it_moves(governed: Governed) -> None:
    """Two of three hosts hold what a tag means, pinned by one order; when it moves another order
    takes its place, also after a restart."""
    origin = ("--origin", f"file://{governed.site.layout}")
    first, second = governed.site.publish(MIB), governed.site.publish(MIB)
    assert governed.site.command("tag", name(first), "team/app:prod", *origin)[0] == 0
    warm = policy("team/app:prod", priority="start") + '[policy.warm]\ncount = 2\nevery = "1s"\n'
    governed.start(warm)
    agents = list(governed.agents(h0="a", h1="a", h2="b").values())

    def orders(digest: str) -> list[str]:
        """Of which orders each host has pins, by host, for those that hold the blob."""
        found = [{owner for each, owner in pins(agent) if each == digest} for agent in agents if digest in held(agent)]
        return [owner for owners in found for owner in owners]

    until(lambda: len(orders(first)) == 2)
    assert len(set(orders(first))) == 1 and orders(first)[0].startswith("preseed:warm-")
    assert governed.site.command("tag", name(second), "team/app:prod", *origin)[0] == 0
    until(lambda: len(orders(second)) == 2 and orders(first) == [])
    before = orders(second)

    governed.site.kill_tracker()
    assert governed.site.command("tag", name(first), "team/app:prod", *origin)[0] == 0
    governed.start(warm)
    until(lambda: len(orders(first)) == 2 and orders(second) == [])
    assert set(orders(first)).isdisjoint(before)

    governed.write("")
    until(lambda: not any(pins(agent) for agent in agents))
