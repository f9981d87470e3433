"""A real Slurm 22.05 with four nodes: packages come with the prolog of a job and go with its
epilog; a job is placed where they are; what is the job's fault drains no node, and what is the
node's fault does."""

from __future__ import annotations

import json
import os
import sys
import tempfile
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from site_rig import Agent, Background, Site, free_port, running_site, until
from slurm_rig import Slurm, lacking, running_slurm

from p2pdist.agent.api.client import LocalClient
from p2pdist.cli.verbs.cache.key import cache_key

pytestmark = [
    pytest.mark.slow,
    pytest.mark.root,
    pytest.mark.skipif(lacking() != "", reason=f"needs Slurm and munge, lacks {lacking()}"),
    pytest.mark.xdist_group("slurm"),
]
NODES = ["node1", "node2", "node3", "node4"]
PROGRAM = """#!/bin/sh
echo "$SLURMD_NODENAME $(cat "$(dirname "$0")/../words") $0"
"""


@dataclass
class Cluster:
    site: Site
    slurm: Slurm
    agents: dict[str, Agent]

    def program(self) -> str:
        """A line of shell that starts the program of team/app from where it is shown on each
        node."""
        return f"{self.slurm.jobs}/$SLURMD_NODENAME/$SLURM_JOB_ID/team/app/bin/greet"

    def preseeds(self) -> dict[str, dict[str, Any]]:
        with urllib.request.urlopen(self.site.tracker_url + "/v1/preseeds", timeout=60) as answer:
            return {each["id"]: each for each in json.load(answer)}

    def owners(self) -> dict[str, list[str]]:
        """Who pins what on the nodes, where anything is pinned."""
        found = {name: [pin.owner for pin in LocalClient(agent.socket).pins()] for name, agent in self.agents.items()}
        return {name: owners for name, owners in found.items() if owners}

    def shown(self) -> list[str]:
        return [mount.path for agent in self.agents.values() for mount in LocalClient(agent.socket).mounts()]

    def all_idle(self) -> bool:
        return self.slurm.states() == dict.fromkeys(NODES, "idle")

    def tidy(self) -> bool:
        """Whether nothing of any job is left on the nodes."""
        return not self.owners() and not self.shown() and list(self.slurm.jobs.glob("*/*")) == []


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    # Not tmp_path: a Unix socket's path may have 107 bytes only.
    with tempfile.TemporaryDirectory(prefix="p2pdist-") as name, running_site(Path(name)) as site:
        agents = {name: Agent(site, name, log_level="warning") for name in NODES}
        starting = [Background(agent.start) for agent in agents.values()]
        with running_slurm(site, NODES) as slurm:
            _publish(site, "team/app:v1", "first")
            for each in starting:
                each.result()
            yield Cluster(site, slurm, agents)


def _publish(site: Site, reference: str, words: str) -> None:
    """A package whose program says `words` and where it stands."""
    source = site.directory / "source"
    (source / "bin").mkdir(parents=True, exist_ok=True)
    (source / "bin/greet").write_text(PROGRAM)
    (source / "bin/greet").chmod(0o755)
    (source / "words").write_text(words)
    layout = ("--layout", str(site.directory / "layout"))
    assert site.command("pack", str(source), "-t", reference, *layout)[0] == 0
    code, _, errors = site.command("push", reference, "--origin", f"file://{site.layout}", *layout)
    assert code == 0, errors


def test_a_job_starts_from_what_its_prolog_brought(cluster: Cluster) -> None:
    """On four nodes: one preseed for all of them, the program starts from the mount, pins last as
    long as the job."""
    slurm, go = cluster.slurm, cluster.slurm.directory / "go"
    script = f"{cluster.program()} && until [ -e {go} ]; do sleep 0.05; done"
    words = ("srun", "-N4", "--comment", "nightly; p2pdist:team/app:v1", "sh", "-c", script)
    job = Background(lambda: slurm.ask(*words))
    until(lambda: all(len(owners) == 2 for owners in cluster.owners().values()) and len(cluster.shown()) == 4)
    [identifier] = slurm.ask("squeue", "-h", "-o", "%A").split()
    assert cluster.owners() == {name: [f"preseed:slurm-{identifier}", f"slurm-{identifier}"] for name in NODES}
    # The agents show and pin what they have before the tracker has heard of it.
    until(lambda: cluster.preseeds()[f"slurm-{identifier}"]["state"] == "done")
    assert cluster.preseeds()[f"slurm-{identifier}"]["hosts_total"] == 4
    go.touch()
    places = {node: slurm.jobs / node / identifier / "team/app/bin/greet" for node in NODES}
    assert sorted(job.result().split("\n")) == [f"{node} first {place}" for node, place in places.items()]
    until(cluster.tidy)
    assert cluster.preseeds()[f"slurm-{identifier}"]["state"] == "cancelled"
    until(cluster.all_idle)


def test_a_job_is_placed_where_its_package_is(cluster: Cluster) -> None:
    """Two of four nodes hold a package: these are named, the job runs there, and nothing is moved.
    One that is drained is not named."""
    slurm = cluster.slurm
    _publish(cluster.site, "team/app:v2", "second")
    for node in ("node2", "node4"):
        cluster.agents[node].pull(package="team/app:v2")
    place = ("p2pdist", "slurm", "place", "--tracker", cluster.site.tracker_url)
    until(lambda: slurm.ask(*place, "team/app:v2", "--count", "2") == "node2,node4")  # once they said that they hold it
    before = sum(agent.received() for agent in cluster.agents.values())
    words = ("-N2", "--nodelist=node2,node4", "--comment=p2pdist:team/app:v2", "sh", "-c", cluster.program())
    said = sorted(line.split()[:2] for line in slurm.ask("srun", *words).split("\n"))
    assert said == [["node2", "second"], ["node4", "second"]]
    assert sum(agent.received() for agent in cluster.agents.values()) == before
    until(lambda: cluster.tidy() and cluster.all_idle())

    roles = ("--role", "trainer=2:team/app:v2", "--role", "reader=1:team/app:v1")
    assert slurm.ask(*place, *roles).split("\n")[0] == "trainer  node2,node4"
    slurm.ask("scontrol", "update", "NodeName=node2", "State=DRAIN", "Reason=test")
    try:
        named = slurm.ask(*place, "team/app:v2", "--count", "2").split(",")
        assert named[0] == "node4" and named[1] in ("node1", "node3")
        refused = slurm.run(*place, "team/app:v2", "--count", "4")
        assert (refused.returncode, "there are 3 idle nodes" in refused.stderr) == (1, True)
    finally:
        slurm.ask("scontrol", "update", "NodeName=node2", "State=RESUME")
    until(cluster.all_idle)


def test_a_package_that_does_not_exist_drains_no_node(cluster: Cluster) -> None:
    """A batch job is requeued and held, srun is cancelled, both are told why; no node is drained
    and nothing is left."""
    slurm = cluster.slurm
    batch = slurm.ask("sbatch", "--parsable", "-N2", "--comment", "p2pdist:team/none:v1", "--wrap", "touch started")
    until(lambda: "Reason=job_requeued_in_held_state" in slurm.ask("scontrol", "show", "job", batch))
    told = slurm.ask("scontrol", "show", "job", batch)
    assert "AdminComment=p2pdist: node" in told and "team/none:v1" in told.partition("AdminComment=")[2].split("\n")[0]
    slurm.ask("scancel", batch)
    done = slurm.run("srun", "-N2", "--comment", "p2pdist:not a reference,", "touch", "started")
    assert done.returncode != 0
    until(lambda: cluster.tidy() and cluster.all_idle())
    assert not (slurm.directory / "started").exists()


def test_a_requeued_job_gets_its_package_again(cluster: Cluster) -> None:
    """The preseed of its first run is cancelled and stays so; the second run has one of its own."""
    slurm = cluster.slurm
    go = slurm.directory / "go-again"
    comment = ("--comment", "p2pdist:team/app:v1")
    script = f"{cluster.program()}; until [ -e {go} ]; do sleep 0.05; done"
    job = slurm.ask("sbatch", "--parsable", "-N2", "-o", "%j.out", *comment, "--wrap", script)
    until(lambda: len(cluster.shown()) == 2 and slurm.ask("squeue", "-h", "-j", job, "-o", "%T") == "RUNNING")
    slurm.ask("scontrol", "requeuehold", job)
    until(lambda: cluster.tidy() and cluster.all_idle())
    go.touch()
    slurm.ask("scontrol", "release", job)
    # Slurm lets a requeued job wait two minutes. What nodes remember of its first run has the
    # second as its grain.
    slurm.ask("scontrol", "update", f"JobId={job}", "StartTime=now+2")
    until(lambda: "JobState=COMPLETED" in slurm.ask("scontrol", "show", "job", job))
    assert " first " in (slurm.directory / f"{job}.out").read_text()
    until(cluster.tidy)
    preseeds = {name: each["state"] for name, each in cluster.preseeds().items() if name.startswith(f"slurm-{job}")}
    assert preseeds == {f"slurm-{job}": "cancelled", f"slurm-{job}-r1": "cancelled"}
    until(cluster.all_idle)


def test_an_agent_that_is_away_drains_its_node_alone(cluster: Cluster) -> None:
    """The job is requeued in a held state by Slurm; the other node's epilog undoes what its prolog
    did, and so, later, does this one's."""
    slurm, agent = cluster.slurm, cluster.agents["node3"]
    agent.stop()
    try:
        job = slurm.ask(
            "sbatch", "--parsable", "--nodelist=node1,node3", "--comment=p2pdist:team/app:v1", "--wrap=true"
        )
        until(lambda: slurm.states()["node3"] == "drained")
        until(lambda: slurm.states()["node1"] == "idle")
        assert slurm.ask("sinfo", "-h", "-n", "node3", "-o", "%E") == "Prolog error"
        assert "held" in slurm.ask("squeue", "-h", "-j", job, "-o", "%r")
        slurm.ask("scancel", job)
    finally:
        agent.start()
    assert [path.name for path in slurm.jobs.glob("*/*")] == [job]
    slurm.ask("p2pdist", "slurm", "epilog", "--job", job, *slurm.options("node3"))
    until(cluster.tidy)
    slurm.ask("scontrol", "update", "NodeName=node3", "State=RESUME")
    until(cluster.all_idle)


def _variables(job: str, comment: str) -> dict[str, str]:
    """What Slurm tells the prolog of a job on node1."""
    return {
        "SLURM_JOB_ID": job,
        "SLURMD_NODENAME": "node1",
        "SLURM_NODELIST": "node1",
        "SLURM_JOB_COMMENT": comment,
    }


def test_a_package_that_takes_too_long_holds_the_job(cluster: Cluster) -> None:
    """The node is not at fault; what the prolog began, the epilog ends."""
    slurm = cluster.slurm
    _publish(cluster.site, "team/slow:v1", os.urandom(1 << 20).hex())
    job = slurm.ask("sbatch", "--parsable", "--nodelist=node1", "--wrap", "sleep 60")
    until(lambda: slurm.ask("squeue", "-h", "-j", job, "-o", "%T") == "RUNNING")
    cluster.site.origin.rate_bytes_s = 100_000
    try:
        prolog = ("p2pdist", "slurm", "prolog", "--timeout", "1.5", *slurm.options("node1"))
        done = slurm.run(*prolog, variables=_variables(job, "p2pdist:team/slow:v1"))
    finally:
        cluster.site.origin.rate_bytes_s = 0
    assert (done.returncode, f"job {job} was requeued and held" in done.stderr) == (0, True), done.stderr
    until(lambda: "Reason=job_requeued_in_held_state" in slurm.ask("scontrol", "show", "job", job))
    assert "were not there after 1.5 s" in slurm.ask("scontrol", "show", "job", job)
    slurm.ask("scancel", job)
    until(lambda: cluster.tidy() and cluster.all_idle())
    assert cluster.preseeds()[f"slurm-{job}"]["state"] == "cancelled"


def test_without_a_tracker_the_agent_is_enough(cluster: Cluster) -> None:
    """A prolog whose tracker is away shows what its agent has, also when it is run twice; its
    epilog takes away what is still in use."""
    slurm, place = cluster.slurm, cluster.slurm.jobs / "node1/900001/team/app"
    cluster.agents["node1"].pull(package="team/app:v1")
    away = ("--tracker", f"http://127.0.0.1:{free_port()}")
    for _ in range(2):
        prolog = ("p2pdist", "slurm", "prolog", *slurm.options("node1"), *away)
        done = slurm.run(*prolog, variables=_variables("900001", "p2pdist:team/app:v1"))
        assert (done.returncode, "pulling without" in done.stderr) == (0, True), done.stderr
    assert (place / "words").read_text() == "first"
    assert cluster.owners() == {"node1": ["slurm-900001"]}
    with (place / "words").open() as held:
        done = slurm.run("p2pdist", "slurm", "epilog", "--job", "900001", *slurm.options("node1"), *away)
        assert (done.returncode, "outlived" in done.stderr) == (0, True), done.stderr
        assert held.read() == "first"
    assert cluster.tidy()


def test_compile_caches_come_before_the_job_and_are_no_condition(cluster: Cluster) -> None:
    slurm, key = cluster.slurm, cache_key("cache", sys.executable)
    _publish(cluster.site, str(key.reference), "compiled")
    asked = ("--cache-python", sys.executable, *slurm.options("node1"))
    prolog = ("p2pdist", "slurm", "prolog", *asked)
    for number, (namespace, said) in enumerate((("cache", f"{key.reference} was here"), ("absent", "without caches"))):
        job = f"90001{number}"
        done = slurm.run(*prolog, "--cache", namespace, variables=_variables(job, "p2pdist:team/app:v1"))
        assert (done.returncode, said in done.stderr) == (0, True), done.stderr
        assert slurm.run("p2pdist", "slurm", "epilog", "--job", job, *slurm.options("node1")).returncode == 0
    assert str(key.reference) in [each["reference"] for each in LocalClient(cluster.agents["node1"].socket).packages()]
    assert cluster.tidy()


def test_what_a_crash_left_is_swept(cluster: Cluster) -> None:
    """Of a job that Slurm knows nothing of everything is released; a job that is there keeps what
    it has."""
    slurm = cluster.slurm
    go = slurm.directory / "go-on"
    script = f"until [ -e {go} ]; do sleep 0.05; done"
    job = slurm.ask("sbatch", "--parsable", "--nodelist=node1", "--comment=p2pdist:team/app:v1", "--wrap", script)
    until(lambda: slurm.ask("squeue", "-h", "-j", job, "-o", "%T") == "RUNNING" and len(cluster.shown()) == 1)
    prolog = ("p2pdist", "slurm", "prolog", *slurm.options("node1"))
    told = {"SLURM_JOB_ID": job, "SLURMD_NODENAME": "node1"}  # as little as other versions tell: the rest is asked for
    again = slurm.run(*prolog, variables=told)
    assert (again.returncode, "was here" in again.stderr, "without" in again.stderr) == (0, True, False), again.stderr
    assert slurm.run(*prolog, variables=_variables("900002", "p2pdist:team/app:v1")).returncode == 0
    LocalClient(cluster.agents["node1"].socket).pin("team/app:v1", "slurm-900003")
    swept = slurm.run("p2pdist", "slurm", "sweep", *slurm.options("node1"))
    assert (swept.returncode, swept.stderr.count("left packages behind")) == (0, 2), swept.stderr
    until(lambda: cluster.owners() == {"node1": [f"preseed:slurm-{job}", f"slurm-{job}"]})
    assert cluster.preseeds()["slurm-900002"]["state"] == "cancelled"
    go.touch()
    until(lambda: cluster.tidy() and cluster.all_idle())
    assert slurm.run("p2pdist", "slurm", "sweep", *slurm.options("node1")).stderr == ""
