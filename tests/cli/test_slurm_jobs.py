"""What p2pdist slurm makes of a job: its packages, where they are shown, the names of what is kept
for it. With a real Slurm: tests/system/test_slurm.py."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import click
import programs
import pytest

from p2pdist.cli.main import main
from p2pdist.cli.verbs.slurm.epilog import _remove
from p2pdist.cli.verbs.slurm.job import Job, JobRecord, job_of, packages_of, places_of, read_record, write_record
from p2pdist.cli.verbs.slurm.place import _role
from p2pdist.cli.verbs.slurm.prolog import _at_fault
from p2pdist.model.errors import (
    Conflict,
    Corrupt,
    DiskFull,
    NotFound,
    P2PDistError,
    Refused,
    Unavailable,
    UsageError,
)

DEPLOY = Path(__file__).resolve().parent.parent.parent / "deploy" / "slurm"
DIGEST = "sha256:" + "ab" * 32


def job(comment: str = "", exported: str = "") -> Job:
    return Job("7", "node1", "node[1-2]", 0, comment, exported)


@pytest.mark.parametrize(
    ("comment", "packages"),
    [
        ("", []),
        ("a run of mine", []),
        ("p2pdist", []),
        ("p2pdist:trainer:v3", ["trainer:v3"]),
        ("p2pdist:trainer:v3,team/other:v1", ["trainer:v3", "team/other:v1"]),
        ("run 7; p2pdist:trainer p2pdist:trainer:latest,other:v1;more", ["trainer:latest", "other:v1"]),
        (f"p2pdist:a@{DIGEST}", [f"a@{DIGEST}"]),
        ("xp2pdist:trainer:v3", []),
    ],
)
def test_packages_of_a_comment(comment: str, packages: list[str]) -> None:
    assert list(map(str, packages_of(job(comment)))) == packages


def test_packages_come_from_the_site_a_plugin_and_the_comment() -> None:
    """In this order, each once."""
    found = packages_of(job("p2pdist:c:v1,a:v1", exported="b:v1"), always="a:v1, d:v1")
    assert list(map(str, found)) == ["a:v1", "d:v1", "b:v1", "c:v1"]


@pytest.mark.parametrize(
    "comment",
    [
        "p2pdist:",
        "p2pdist:a:v1,",
        "p2pdist:Not/A/Name:v1",
        "p2pdist:../../etc:v1",
        "p2pdist:/etc",
        "p2pdist:a:v1$(reboot)",
        "p2pdist:" + ",".join(f"a{number}" for number in range(17)),
    ],
)
def test_what_names_no_packages(comment: str) -> None:
    with pytest.raises(UsageError):
        packages_of(job(comment))


def test_the_job_that_slurm_names() -> None:
    """With the variables of Slurm 22.05, and with the name that other versions give the list of
    nodes."""
    variables = {"SLURM_JOB_ID": "12", "SLURMD_NODENAME": "node1", "SLURM_NODELIST": "node[1-4]"}
    assert job_of(variables) == Job("12", "node1", "node[1-4]")
    more = {"SLURM_JOB_NODELIST": "n[1-2]", "SLURM_JOB_RESTART_COUNT": "2", "SLURM_JOB_COMMENT": "c"}
    assert job_of(variables | more) == Job("12", "node1", "n[1-2]", 2, "c")
    assert job_of(variables | {"SPANK_P2PDIST_PACKAGES": "a:v1"}).exported == "a:v1"


@pytest.mark.parametrize("identifier", ["", "x", "1/2", "-1", "..", "1" * 30])
def test_what_is_no_job(identifier: str) -> None:
    """The id becomes a directory's name."""
    with pytest.raises(UsageError):
        job_of({"SLURM_JOB_ID": identifier})


@pytest.mark.parametrize("identifier", ["4711_1", "", "../x"])
def test_the_epilog_of_a_job_that_is_none_says_so(identifier: str, tmp_path: Path) -> None:
    """And not that Slurm did not start it, which is so where a person runs it again."""
    done = programs.run("slurm", "epilog", "--job", identifier, "--jobs-dir", tmp_path / "jobs")
    assert (done.returncode, f"{identifier!r} is not the number of a job" in done.stderr) == (2, True), done.stderr


def test_every_run_and_every_package_has_its_own_preseed() -> None:
    again = Job("7", "node1", "node[1-2]", restarts=1)
    names = [each.preseed(number) for each in (job(), again) for number in (0, 1)]
    assert names == ["slurm-7", "slurm-7-p1", "slurm-7-r1", "slurm-7-r1-p1"]


def test_places() -> None:
    top = Path("/run/jobs/7")
    packages = packages_of(job("p2pdist:team/a:v1,b:v1"))
    assert list(places_of(packages, top).values()) == [top / "team/a", top / "b"]


@pytest.mark.parametrize("comment", ["p2pdist:a:v1,a:v2", "p2pdist:a:v1,a/b:v1", "p2pdist:a/b:v1,a:v1"])
def test_packages_that_would_hide_each_other(comment: str) -> None:
    with pytest.raises(UsageError, match="cannot be shown"):
        places_of(packages_of(job(comment)), Path("/run/jobs/7"))


def test_the_record_of_a_job(tmp_path: Path) -> None:
    """It is read as it was written; none is none, and what is no record is told apart from that."""
    directory = tmp_path / "jobs" / "7"
    assert read_record(directory) is None
    record = JobRecord("slurm-7", ("slurm-7", "slurm-7-p1"))
    write_record(directory, record)
    write_record(directory, record)
    assert read_record(directory) == record
    (directory / ".job.json").write_text("{}")
    with pytest.raises(Corrupt):
        read_record(directory)


@pytest.mark.parametrize(
    ("error", "at_fault"),
    [
        (NotFound("no such package"), False),
        (UsageError("no such name"), False),
        (Corrupt("not what its digest says"), False),
        (Refused("not for you"), False),
        (DiskFull("/var", needed=2, free=1), True),
        (DiskFull("/var", needed=9, free=7, capacity=7), False),
        (Refused("not your socket", socket="/run/p2pdist/agent.sock"), True),
        (P2PDistError("the agent failed"), True),
        (Unavailable("no agent answers"), True),
    ],
)
def test_whose_fault_a_failure_is(error: P2PDistError, at_fault: bool, tmp_path: Path) -> None:
    """What any node would meet is not this node's, unless its agent is away. With an agent that
    answers: tests/system/test_slurm.py."""
    assert _at_fault(error, tmp_path / "no.sock") is at_fault


def test_a_directory_that_is_not_empty_keeps_its_record(tmp_path: Path) -> None:
    """So that the epilog can be run again; empty directories go with it."""
    directory = tmp_path / "7"
    write_record(directory, JobRecord("slurm-7", ()))
    (directory / "team/a").mkdir(parents=True)
    (directory / "team/a/file").touch()
    with pytest.raises(Conflict):
        _remove(directory)
    assert read_record(directory) is not None
    (directory / "team/a/file").unlink()
    _remove(directory)
    _remove(directory)
    assert not directory.exists()


def test_roles() -> None:
    assert _role("trainer=4:team/a:v1,b") == {"name": "trainer", "count": 4, "packages": ["team/a:v1", "b:latest"]}


@pytest.mark.parametrize("text", ["", "a", "a=", "a=0:b", "a=x:b", "a=1", "a=1:", "=1:b", "a=1:B!", "a=-1:b"])
def test_what_is_no_role(text: str) -> None:
    with pytest.raises(UsageError):
        _role(text)


@pytest.mark.parametrize("name", ["prolog", "epilog"])
def test_the_scripts_to_install_start_what_there_is(name: str) -> None:
    """They call what the units call, and the agent where the unit has it; their options exist;
    slurm.conf names both, and leaves the prolog more time than it takes."""
    first, *settings_of_host, line = (DEPLOY / f"{name}.sh").read_text().splitlines()
    tracker, token = (text for text in settings_of_host if not text.startswith("#"))
    unit = (DEPLOY.parent / "systemd/p2pdist-agent.service").read_text()
    program = re.findall(r"^ExecStart=(\S+) agent$", unit, re.MULTILINE)
    assert tracker == "export P2PDIST_TRACKER=https://tracker.example.org:7070"
    assert token == "export P2PDIST_TOKEN_FILE=/etc/p2pdist/slurm.token"
    assert tracker.partition("=")[2] in (DEPLOY.parent / "systemd/agent.env.example").read_text()
    words = shlex.split(line.partition(" 2>>")[0])
    group = main.get_command(click.Context(main), "slurm")
    assert (first, words[:4]) == ("#!/bin/sh", ["exec", *program, "slurm", name])
    assert isinstance(group, click.Group)
    verb = group.commands[name]
    assert any("P2PDIST_TOKEN_FILE" in (option.envvar or ()) for option in verb.params if option.name == "token_file")
    options = verb.make_context(name, words[4:]).params
    settings = dict(
        line.split("=", 1)
        for line in (DEPLOY / "slurm.conf").read_text().splitlines()
        if "=" in line and line[0] != "#"
    )
    assert settings[name.capitalize()] == f"/etc/slurm/{name}.sh"
    assert float(settings["PrologEpilogTimeout"]) >= options["timeout"] + 60
    assert f"P2PDIST_AGENT_SOCKET=%t{str(options['socket']).removeprefix('/run')}\n" in unit
    # What is shown to jobs lies in the agent's own directory: their programs pass through it, and a
    # stop of the agent leaves it there.
    assert options["jobs_dir"].parent == options["socket"].parent
    assert "RuntimeDirectoryMode=0751\nRuntimeDirectoryPreserve=yes\n" in unit
