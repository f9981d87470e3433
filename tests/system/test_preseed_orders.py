"""Preseeds with a real tracker and real agents: quorum, hosts that die, replicas, a tracker that dies, restarts, releases."""

from __future__ import annotations

import json
import sqlite3
import urllib.error
import urllib.request
from typing import Any

import pytest
from site_rig import Agent, Background, Site, until

MIB = 1 << 20


def ask(site: Site, method: str, path: str, body: Any = None) -> tuple[int, Any]:
    """Status and JSON of an answer of the tracker."""
    data = json.dumps(body).encode() if body is not None else None
    request = urllib.request.Request(site.tracker_url + path, data, {"Content-Type": "application/json"}, method=method)
    try:
        with urllib.request.urlopen(request, timeout=10) as answer:
            return answer.status, json.load(answer)
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)


def reference(digest: str) -> str:
    """The package under which a blob was pushed alone."""
    return f"blob:{digest.replace(':', '-')}"


def pins(agent: Agent) -> set[tuple[str, str]]:
    """(digest, owner) in the index of an agent's store."""
    with sqlite3.connect(f"file:{agent.store / 'index.sqlite'}?mode=ro", uri=True) as index:
        return set(index.execute("SELECT digest, owner FROM pins"))


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


@pytest.mark.slow
def test_quorum_is_reached_though_two_hosts_die(site: Site) -> None:
    """Eight hosts by count; two are killed while they pull: the command names them and succeeds, since the quorum holds the package."""
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


@pytest.mark.slow
def test_a_tracker_that_is_killed_carries_on(site: Site) -> None:
    """Killed in the middle: what was asked for is in its database, and how far it is the agents say."""
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


@pytest.mark.slow
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
