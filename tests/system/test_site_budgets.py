"""Budgets of sites with a real tracker and real agents at two sites: a site waits, its hosts say
why, and it goes on when it may and receives one copy."""

from __future__ import annotations

import os
import time
import urllib.request
from pathlib import Path

import pytest
from site_rig import Agent, Background, Site, until

from p2pdist.agent.api.client import LocalClient

MIB = 1 << 20
pytestmark = pytest.mark.slow


class Governed:
    """A tracker whose policies may change, an agent at the site `east`, which reads the origin, and
    two at `west`."""

    def __init__(self, site: Site, policies: str) -> None:
        self.site, self.file = site, site.directory / "policies.toml"
        site.kill_tracker()  # that of the rig has no policies
        self.write(policies)
        site.start_tracker("--origin-site", "east", "--policies", str(self.file))
        places = {"e": "east", "w1": "west", "w2": "west"}
        made = [Agent(site, name, zone=place) for name, place in places.items()]
        for agent, place in zip(made, places.values(), strict=True):
            agent.options["site"] = place
        for started in [Background(agent.start) for agent in made]:
            started.result()
        self.east, *self.west = made

    def write(self, policies: str) -> None:
        """Put other policies in their place, as an editor does."""
        fresh = self.file.with_suffix(".new")
        fresh.write_text(policies)
        os.replace(fresh, self.file)

    def metric(self, line: str) -> float:
        with urllib.request.urlopen(self.site.tracker_url + "/metrics", timeout=60) as answer:
            lines = answer.read().decode().splitlines()
        return sum(float(each.rpartition(" ")[2]) for each in lines if each.startswith(line))

    def notes(self) -> list[str]:
        """What the agents at west say that their pulls wait for."""
        pulls = [pull for agent in self.west for pull in LocalClient(agent.socket).status()["pulls"]]
        return [pull["note"] for pull in pulls if pull["state"] == "running"]


def another_hour() -> str:
    """Hours of a site that are twelve hours away."""
    begin = (time.gmtime().tm_hour + 12) % 24
    return f'hours = ["{begin:02d}:00-{(begin + 1) % 24:02d}:00"]'


def west(*lines: str) -> str:
    return "\n".join(['[[site]]\nname = "west"', *lines, ""])


def test_a_site_waits_for_its_hour_and_its_budget_and_gets_one_copy(site: Site) -> None:
    size = 24 * MIB
    governed = Governed(site, west(another_hour()))
    digest = site.publish(size)
    assert governed.east.pull(blob=digest, wait=True).state == "done"
    pulls = [agent.start_pull(blob=digest, wait=True) for agent in governed.west]
    until(lambda: len([note for note in governed.notes() if "site west waits: its WAN is for" in note]) == 2)
    assert sum(agent.received() for agent in governed.west) == 0
    assert governed.metric('p2pdist_tracker_wan_waiting{site="west"}') == 1
    assert governed.metric("p2pdist_tracker_late_sites") == 0

    governed.write(west('rate = "1MiB/s"', 'hourly = "4MiB"'))
    until(lambda: any("it has used its 4.19 MB of the last hour" in note for note in governed.notes()))
    assert max(agent.received() for agent in governed.west) < size
    assert governed.metric('p2pdist_tracker_wan_bytes_total{site="west"}') >= 4 * MIB

    governed.write(west('hourly = "1GB"'))
    assert [pull.result().state for pull in pulls] == ["done", "done"]
    assert site.origin_bytes(digest) == size
    sent = governed.east.metric("p2pdist_agent_sent_bytes_total")
    assert size <= sent < 1.2 * size, "pieces that were under way when the site had to wait come again"


def test_a_package_may_ignore_the_budget(site: Site) -> None:
    governed = Governed(site, west(another_hour(), '[[policy]]\nmatch = "urgent:*"\nbudget = "ignore"'))
    tree = site.directory / "tree"
    tree.mkdir()
    for tag in ("urgent:v1", "other:v1"):
        (tree / "file").write_bytes(os.urandom(4 * MIB))
        push(site, tree, tag)
        assert governed.east.pull(package=tag, wait=True).state == "done"
    waiting = governed.west[0].start_pull(package="other:v1", wait=True)
    until(lambda: any("site west waits" in note for note in governed.notes()))
    assert governed.west[1].pull(package="urgent:v1", wait=True).state == "done"
    governed.write("")
    assert waiting.result().state == "done"


def push(site: Site, tree: Path, tag: str) -> None:
    layout = site.directory / "layout"
    code, _, said = site.command("pack", str(tree), "-t", tag, "--layout", str(layout), "--format", "tree")
    assert code == 0, said
    code, _, said = site.command("push", tag, "--layout", str(layout), "--origin", f"file://{site.layout}")
    assert code == 0, said
