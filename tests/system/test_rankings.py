"""Rankings with a real tracker and real agents: whole racks, roles of a job, and packs that went
when their tree was whole."""

from __future__ import annotations

import json
import random
import urllib.request
from pathlib import Path
from typing import Any

import programs
import pytest
from site_rig import Agent, Background, Site, until

KIB = 1 << 10
MIB = 1 << 20
LACKING = {"h1": 0, "h2": 3 * MIB, "h3": 2 * MIB, "h4": MIB, "h5": 3 * MIB}


def ask(site: Site, body: dict[str, Any]) -> Any:
    """The JSON that the tracker answers to a ranking over HTTP."""
    request = urllib.request.Request(
        site.tracker_url + "/v1/rank", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=60) as answer:
        return json.load(answer)


def reference(digest: str) -> str:
    """The package under which a blob was pushed alone."""
    return f"blob:{digest.replace(':', '-')}"


def missing(ranked: list[dict[str, Any]]) -> dict[str, int]:
    return {row["host"]: row["bytes_missing"] for row in ranked}


def started(site: Site, *places: str) -> list[Agent]:
    """Agents at zone/rack/name."""
    agents = [
        Agent(site, name, zone=zone, rack=rack, log_level="warning")
        for zone, rack, name in (place.split("/") for place in places)
    ]
    for each in [Background(agent.start) for agent in agents]:
        each.result()
    return agents


@pytest.mark.slow
def test_whole_racks_and_roles_over_http_and_as_commands(site: Site) -> None:
    first, second = site.publish(MIB), site.publish(2 * MIB)
    one, two = reference(first), reference(second)
    agents = started(site, "a/r1/h1", "a/r1/h2", "a/r2/h3", "a/r2/h4", "a/r1/h5")
    agents[0].pull(blob=first)
    agents[0].pull(blob=second)
    agents[2].pull(blob=first)
    agents[3].pull(blob=second)
    tracker = ("--tracker", site.tracker_url)
    body = {"packages": [one, two]}
    until(lambda: missing(ask(site, body)) == LACKING)
    assert list(missing(ask(site, body | {"count": 3}))) == ["h1", "h4", "h3"]

    # Four hosts stand in two racks at least: all of the better rack, and the best hosts of the
    # other one. Two fit one rack.
    coherent = ask(site, body | {"count": 4, "coherent": "rack"})
    assert list(missing(coherent)) == ["h4", "h3", "h1", "h2"]
    assert site.command("rank", one, two, "--count", "4", "--coherent", "rack", *tracker)[1] == coherent
    assert list(missing(ask(site, body | {"count": 2, "coherent": "rack"}))) == ["h4", "h3"]
    code, nobody, _ = site.command("rank", one, "--selector", "rack=r9", *tracker)
    assert (code, nobody["detail"]) == (3, "no host has rack=r9; racks here: r1, r2")

    roles = [
        {"name": "trainers", "packages": [one, two], "count": 1},
        {"name": "parameter-servers", "packages": [two], "count": 1},
        {"name": "readers", "packages": [one], "count": 2},
    ]
    answer = ask(site, {"roles": roles})
    assert {role["role"]: list(missing(role["hosts"])) for role in answer["assignment"]} == {
        "trainers": ["h1"],
        "parameter-servers": ["h4"],
        "readers": ["h3", "h2"],
    }
    assert answer["bytes_missing"] == MIB
    words = [
        word for role in roles for word in ("--role", role["name"], str(role["count"]), ",".join(role["packages"]))
    ]
    assert site.command("rank", *words, *tracker)[1] == answer
    said = programs.run("rank", *words, *tracker, check=True)
    assert [line.split()[0] for line in said.stdout.splitlines()] == [
        *("trainers:", "h1", "parameter-servers:", "h4", "readers:", "h3", "h2"),
    ]
    words[2] = "5"
    code, _, errors = site.command("rank", *words, *tracker)
    assert code == 1 and "8 hosts are asked for and 5 may be chosen" in errors


def publish(site: Site, source: Path, name: str) -> None:
    """Pack a directory as a tree and push it."""
    layout = ("--layout", str(site.directory / "layout"))
    code, _, errors = site.command("pack", str(source), "-t", name, "--format", "tree", *layout)
    assert code == 0, errors
    code, _, errors = site.command("push", name, "--origin", f"file://{site.layout}", *layout)
    assert code == 0, errors


@pytest.mark.long
def test_packs_that_went_when_their_tree_was_whole_are_not_missing(site: Site) -> None:
    """Nor are they for the next version, of which only what is new is counted; and when the tree
    goes they are missing again."""
    source = site.directory / "source"
    source.mkdir()
    drawn = random.Random(1)
    (source / "weights.bin").write_bytes(drawn.randbytes(6 * MIB))
    publish(site, source, "app:v1")
    warm, _ = started(site, "a/r1/warm", "a/r1/cold")
    warm.stop()
    warm.options["capacity"] = f"{16 * MIB}B"
    warm.start()
    warm.pull(package="app:v1")
    total = ask(site, {"packages": ["app:v1"]})[0]["bytes_total"]
    assert total > 6 * MIB
    until(lambda: missing(ask(site, {"packages": ["app:v1"]})) == {"warm": 0, "cold": total})

    other = site.publish(8 * MIB)
    warm.pull(blob=other)
    held = {file.name for file in (warm.store / "blobs" / "sha256").iterdir()}
    assert not any((site.layout / "blobs" / "sha256" / name).stat().st_size > 5 * MIB for name in held - {other[7:]}), (
        "the pack was evicted"
    )
    until(lambda: hosts_of_largest(site) == 0)
    until(lambda: missing(ask(site, {"packages": ["app:v1"]})) == {"warm": 0, "cold": total})  # told every two seconds

    (source / "more.bin").write_bytes(drawn.randbytes(MIB))
    publish(site, source, "app:v2")
    found = missing(ask(site, {"packages": ["app:v2"]}))
    assert MIB < found["warm"] < MIB + 64 * KIB and found["cold"] > total
    warm.stop()
    warm.start()  # its word ended with its session, and it gives it anew
    until(lambda: missing(ask(site, {"packages": ["app:v2"]})) == found)
    status = warm.pull(package="app:v2")
    assert status.bytes_origin + status.bytes_peers == found["warm"], "what was said to be missing is what was moved"

    for name in ("app:v1", "app:v2"):
        assert site.command("rm", name, "--socket", str(warm.socket))[0] == 0
    until(lambda: missing(ask(site, {"packages": ["app:v1"]}))["warm"] > 6 * MIB)


def hosts_of_largest(site: Site) -> int:
    """How many hosts hold the largest blob of app:v1 that the tracker was told of, other than a
    blob of 8 MiB."""
    with urllib.request.urlopen(site.tracker_url + "/v1/swarms", timeout=60) as answer:
        swarms = json.load(answer)
    return sum(swarm["hosts"] for swarm in swarms if 5 * MIB < swarm["size"] < 8 * MIB)
