"""Preseeds with real trackers and agents: quorum, hosts that die, replicas, trackers that die,
restarts, releases."""

from __future__ import annotations

import contextlib
import json
import subprocess
import tempfile
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from postgresql import binaries, running_server
from site_rig import Agent, Background, Site, free_port, running_site, until, wait_for

from p2pdist.agent.api.client import LocalClient

MIB = 1 << 20


def ask(site: Site, method: str, path: str, body: Any = None) -> tuple[int, Any]:
    """Status and JSON of an answer of the site's tracker."""
    return ask_at(site.tracker_url, method, path, body)


def ask_at(tracker: str, method: str, path: str, body: Any = None) -> tuple[int, Any]:
    data = json.dumps(body).encode() if body is not None else None
    request = urllib.request.Request(tracker + path, data, {"Content-Type": "application/json"}, method=method)
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            return answer.status, json.load(answer)
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)


def reference(digest: str) -> str:
    """The package under which a blob was pushed alone."""
    return f"blob:{digest.replace(':', '-')}"


def pins(agent: Agent) -> set[tuple[str, str]]:
    """(digest, owner) of the blobs that an agent keeps."""
    return {(layer, pin.owner) for pin in LocalClient(agent.socket).pins() for layer in pin.layers}


def progress(site: Site, identifier: str) -> dict[str, Any]:
    status, found = ask(site, "GET", f"/v1/preseeds/{identifier}")
    assert status == 200, found
    return found


def start(site: Site, number: int, **options: str) -> list[Agent]:
    """Agents in two zones of two racks."""
    agents = [
        Agent(site, f"h{each}", zone=f"z{each % 2}", rack=f"r{each // 2 % 2}", log_level="warning", **options)
        for each in range(number)
    ]
    for started in [Background(agent.start) for agent in agents]:
        started.result()
    return agents


class Trackers:
    """As many trackers of one fleet as the state allows: one on SQLite, two on PostgreSQL."""

    def __init__(self, site: Site, state: str, count: int) -> None:
        self.site, self.state = site, state
        self.ports = [free_port() for _ in range(count)]
        self.processes: dict[int, subprocess.Popen[bytes]] = {}
        for number in range(count):
            self.start(number)

    def url(self, number: int) -> str:
        return f"http://127.0.0.1:{self.ports[number]}"

    def urls(self, *, first: int = 0) -> str:
        """All of them, as --tracker takes them."""
        return ",".join(self.url((first + number) % len(self.ports)) for number in range(len(self.ports)))

    def start(self, number: int) -> None:
        words = ["tracker", "--listen", f"127.0.0.1:{self.ports[number]}", "--origin", self.site.origin.url]
        log = self.site.directory / f"tracker-{number}.log"
        self.processes[number] = self.site.spawn([*words, "--state", self.state], log)
        wait_for(self.url(number) + "/readyz", self.processes[number], log)

    def kill(self, number: int) -> None:
        self.processes[number].kill()
        self.processes[number].wait()


@contextlib.contextmanager
def trackers_on(kind: str, site: Site) -> Iterator[Trackers]:
    if kind == "sqlite":
        yield Trackers(site, str(site.directory / "state"), 1)
        return
    if binaries() is None:
        pytest.skip("PostgreSQL is not installed (Debian: postgresql)")
    with running_server() as url:
        yield Trackers(site, url, 2)


@pytest.mark.long
@pytest.mark.parametrize("kind", ["sqlite", "postgresql"])
def test_two_hosts_and_a_tracker_die_and_the_preseed_is_done(kind: str) -> None:
    """Five of eight hosts by count, two copies in each zone at least. Two of those that were
    picked, of one zone, are killed while they pull, and so is the tracker: the quorum, which the
    others alone do not reach, is reached with hosts in their place."""
    with (
        tempfile.TemporaryDirectory(prefix="p2pdist-") as directory,
        running_site(Path(directory), tracker=False) as site,
        trackers_on(kind, site) as trackers,
    ):
        digest = site.publish(8 * MIB)
        agents = {}
        for each in range(8):
            where = {"zone": f"z{each % 2}", "rack": f"r{each // 2 % 2}", "log_level": "warning"}
            agents[f"h{each}"] = Agent(site, f"h{each}", tracker=trackers.urls(first=each // 2 % 2), **where)
        for started in [Background(agent.start) for agent in agents.values()]:
            started.result()
        last = len(trackers.ports) - 1

        def found() -> dict[str, Any]:
            status, answer = ask_at(trackers.url(last), "GET", "/v1/preseeds/p1")
            return answer if status == 200 else {"bytes_done": 0}

        # Slowly at first: of two trackers the first picks its own four hosts, and the second, which
        # has just started, adds the fifth only after it has waited for hosts that may return.
        site.origin.rate_bytes_s = MIB // 4
        order = ("preseed", reference(digest), "--count", "5", "--replicas", "2", "--id", "p1", "--wait")
        waiting = Background(lambda: site.command(*order, "--quorum", "80%", "--tracker", trackers.urls()))
        until(lambda: found()["bytes_done"] > 0 and len(found()["picked"]) == 5)
        picked = found()["picked"]
        zone = max((0, 1), key=lambda zone: sum(int(name[1:]) % 2 == zone for name in picked))
        victims = [name for name in picked if int(name[1:]) % 2 == zone][:2]
        for name in victims:
            agents[name].kill()
        trackers.kill(0)
        site.origin.rate_bytes_s = 2 * MIB
        if kind == "sqlite":
            trackers.start(0)
        code, told, said = waiting.result(120)
        assert code == 0, said
        assert told["hosts_total"] == 5 and told["hosts_done"] >= 4
        until(lambda: found()["state"] == "done")
        answer = found()
        assert answer["hosts_done"] == 5 and not set(victims) & set(answer["picked"])
        assert {(each["host"], each["reason"]) for each in answer["failures"]} == {
            (name, "not-connected") for name in victims
        }
        assert set(answer["replicas"]) == {"z0", "z1"} and min(answer["replicas"].values()) >= 2
        holding = {name for name, agent in agents.items() if name not in victims and pins(agent)}
        assert holding == set(answer["picked"]), "who was picked holds the package, and nobody else"


@pytest.mark.long
def test_quorum_is_reached_though_two_hosts_die(site: Site) -> None:
    """Eight hosts by count; two are killed while they pull: the command names them and succeeds,
    since the quorum holds the package."""
    digest = site.publish(8 * MIB)
    agents = start(site, 8)
    site.origin.rate_bytes_s = 3 * MIB
    waiting = Background(
        lambda: site.command(
            *("preseed", reference(digest), "--count", "8", "--id", "p1", "--wait", "--quorum", "75%"),
            *("--tracker", site.tracker_url),
        )
    )
    until(lambda: ask(site, "GET", "/v1/preseeds/p1")[0] == 200 and progress(site, "p1")["bytes_done"] > 0)
    agents[3].kill()
    agents[6].kill()
    code, found, said = waiting.result()
    assert code == 0, said
    assert (found["hosts_total"], found["hosts_done"]) == (8, 6)
    until(lambda: progress(site, "p1")["failures_by_reason"] == {"not-connected": 2})
    assert {each["host"] for each in progress(site, "p1")["failures"]} == {"h3", "h6"}
    assert progress(site, "p1")["state"] == "running", "it waits for hosts that could take their place"
    assert pins(agents[0]) == {(digest, "preseed:p1")}
    agents[3].start()  # a host is here again: it is picked, and finds most of the blob in its store
    until(lambda: progress(site, "p1")["hosts_done"] == 7)


@pytest.mark.long
def test_a_tracker_that_is_killed_carries_on(site: Site) -> None:
    """Killed in the middle: what was asked for is in its database, and how far it is the agents
    say."""
    digest = site.publish(8 * MIB)
    agents = start(site, 4)
    site.origin.rate_bytes_s = 2 * MIB
    waiting = Background(
        lambda: site.command(
            *("preseed", reference(digest), "--selector", "zone=z0", "--replicas", "1", "--id", "p2", "--wait"),
            *("--tracker", site.tracker_url),
        )
    )
    until(lambda: ask(site, "GET", "/v1/preseeds/p2")[0] == 200 and progress(site, "p2")["bytes_done"] > 0)
    site.kill_tracker()
    site.start_tracker()
    code, found, said = waiting.result()
    assert code == 0, said
    assert (found["state"], found["hosts_total"], found["hosts_done"]) == ("done", 2, 2)
    assert [bool(pins(agent)) for agent in agents] == [True, False, True, False]
    assert site.origin_bytes(digest) < 10 * MIB
    ranked = site.command("rank", reference(digest), "--tracker", site.tracker_url)[1]
    assert [row["host"] for row in ranked] == ["h0", "h2", "h1", "h3"]
    assert [row["bytes_missing"] for row in ranked] == [0, 0, 8 * MIB, 8 * MIB]


@pytest.mark.slow
def test_an_agent_that_was_restarted_still_keeps_and_is_released(site: Site) -> None:
    digest = site.publish(MIB)
    [agent, _] = start(site, 2)
    body = {"package": reference(digest), "hosts": ["h0"], "ttl": 3600}
    status, made = ask(site, "PUT", "/v1/preseeds/p3", body)
    assert (status, made["state"], made["hosts_total"]) == (201, "running", 1)
    assert ask(site, "PUT", "/v1/preseeds/p3", body)[0] == 200, "the same, once more"
    status, problem = ask(site, "PUT", "/v1/preseeds/p3", body | {"hosts": ["h1"]})
    assert (status, problem["type"]) == (409, "urn:p2pdist:problem:conflict")
    until(lambda: progress(site, "p3")["state"] == "done")
    agent.stop()
    until(lambda: progress(site, "p3")["failures"] == [{"host": "h0", "reason": "not-connected", "detail": ""}])
    agent.start()
    until(lambda: progress(site, "p3")["state"] == "done")
    assert pins(agent) == {(digest, "preseed:p3")}
    agent.stop()
    assert ask(site, "DELETE", "/v1/preseeds/p3")[1]["state"] == "cancelled"
    agent.start()  # it was away when it was released, and hears of it now
    until(lambda: pins(agent) == set())
    assert ask(site, "DELETE", "/v1/preseeds/p3")[0] == 200
    assert [each["state"] for each in site.command("preseed", "--list", "--tracker", site.tracker_url)[1]] == [
        "cancelled"
    ]
    again = ("preseed", reference(digest), "--host", "h0", "--ttl", "1h", "--id", "p3", "--tracker", site.tracker_url)
    code, _, said = site.command(*again)
    assert (code, "it was ordered before, and is cancelled" in said) == (1, True), "nothing was ordered"
    problem = ask(site, "PUT", "/v1/preseeds/p3", body | {"hosts": ["h1"]})[1]
    assert "another id" in problem["remedy"] and "cancel" not in problem["remedy"], "that frees no id"


@pytest.mark.long
def test_replicas_are_repaired(site: Site) -> None:
    """One copy in each zone; its host dies, and another of that zone takes its place."""
    digest = site.publish(MIB)
    agents = {agent.name: agent for agent in start(site, 4)}
    status, made = ask(site, "POST", "/v1/preseeds", {"package": reference(digest), "replicas": 1})
    assert status == 201
    until(lambda: progress(site, made["id"])["replicas"] == {"z0": 1, "z1": 1})
    first, second = progress(site, made["id"])["picked"]
    agents[first].kill()
    other = next(name for name in agents if name not in (first, second) and int(name[1:]) % 2 == int(first[1:]) % 2)
    until(lambda: sorted(progress(site, made["id"])["picked"]) == sorted([second, other]))
    until(lambda: progress(site, made["id"])["state"] == "done")
    assert [each["host"] for each in progress(site, made["id"])["failures"]] == [first]


@pytest.mark.slow
def test_the_history_of_a_tag_has_what_was_reported_by_its_digest(site: Site) -> None:
    """A preseed is of the package that a tag named when it was ordered."""
    digest = site.publish(MIB)
    start(site, 1)
    assert ask(site, "PUT", "/v1/preseeds/p4", {"package": reference(digest), "hosts": ["h9"], "deadline": 1})[0] == 201
    until(lambda: progress(site, "p4")["state"] == "failed")
    query = f"/v1/history?kind=preseed-failed&package={reference(digest)}"
    until(lambda: len(ask(site, "GET", query)[1]["records"]) == 1)
    other = f"/v1/history?kind=preseed-failed&package={reference(digest)[:-6]}abcdef"
    assert ask(site, "GET", other)[1]["records"] == []


@pytest.mark.slow
def test_failures_of_hosts_are_named(site: Site) -> None:
    """A store without room for the package: the reason is the problem's, and the command fails."""
    digest = site.publish(4 * MIB)
    Agent(site, "small", capacity="2MiB").start()
    Agent(site, "large").start()
    code, found, said = site.command(
        *("preseed", reference(digest), "--host", "small", "--host", "large", "--wait", "--deadline", "4s"),
        *("--tracker", site.tracker_url),
    )
    assert (code, found["state"], found["hosts_done"]) == (1, "failed", 1), said
    assert [(each["host"], each["reason"]) for each in found["failures"]] == [("small", "disk-full")]
