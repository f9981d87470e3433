"""Queries and orders to Slurm by its own commands (scontrol, squeue, scancel, sinfo).

A prolog asks only what its environment does not say, and gives an order only when a job must not
start: thousands of nodes ask one slurmctld at once. `scontrol show hostnames` needs
no daemon.
"""

from __future__ import annotations

import subprocess
from dataclasses import replace
from typing import Literal

from p2pdist.cli.verbs.slurm.job import Job
from p2pdist.model.errors import P2PDistError, Unavailable
from p2pdist.model.preseed import HOSTS_MAX

COMMAND_S_MAX = 10.0
REASON_CHARACTERS_MAX = 400
STARTING = ("RUNNING", "CONFIGURING")
"""States in which a job starts once its prologs have ended."""

ON_A_NODE = ("CONFIGURING", "RUNNING", "SUSPENDED", "STOPPED", "SIGNALING", "STAGE_OUT", "COMPLETING")
"""States in which a job has nodes."""

Answer = Literal["hold", "cancel"]


def host_names(expression: str) -> list[str]:
    """The nodes that a hostlist such as node[1-4,7] names, in order. Raises P2PDistError."""
    names = sorted(set(_ask("scontrol", "show", "hostnames", expression).split()))
    if not 0 < len(names) <= HOSTS_MAX:
        raise P2PDistError(
            f"{expression[:100]!r} names {len(names)} nodes; from 1 to {HOSTS_MAX} are possible",
            remedy="See that Slurm names the nodes of one job",
        )
    return names


def idle_nodes(partition: str = "") -> list[str]:
    """The nodes on which a job could start now. Raises Unavailable.

    sinfo counts drained nodes that run nothing as idle, too; the state that it prints tells them
    apart, as it does nodes that do not answer (`idle*`) or are switched off (`idle~`)."""
    where = ["--partition", partition] if partition else []
    rows = _ask("sinfo", "--noheader", "--Node", "--states=idle", "--format=%N %t", *where).splitlines()
    return sorted({name for name, _, state in (row.strip().partition(" ") for row in rows) if state == "idle"})


def jobs_on(node: str) -> set[str]:
    """The ids of the jobs that have the node, in whatever way. Raises Unavailable."""
    return set(
        _ask("squeue", "--noheader", f"--states={','.join(ON_A_NODE)}", f"--nodelist={node}", "--format=%A").split()
    )


def ask_for(job: Job) -> Job:
    """The job with its nodes and its comment, for a Slurm that does not give them to prologs.
    Raises Unavailable."""
    # A job may have no nodes yet, an array has a row for each of its jobs, and a comment is
    # anything: the first bars end the number of the job and the list of nodes, which have none.
    answer = _ask("squeue", "--noheader", f"--jobs={job.id}", "--format=%A|%N|%k")
    row = next((row for row in answer.splitlines() if row.strip().startswith(f"{job.id}|")), "")
    nodes, _, comment = row.strip().partition("|")[2].partition("|")
    return replace(job, nodes=nodes, comment="" if comment == "(null)" else comment)


def prevent(job: Job, reason: str, answer: Answer) -> str:
    """Keep a job from starting, and say why in its AdminComment: a batch job that may be requeued
    waits, held, if `answer` is to hold it; any other is cancelled. Every node of a job may do this
    at once. Returns what became of the job. Raises Unavailable."""
    comment = " ".join(reason.split())[:REASON_CHARACTERS_MAX]
    _run("scontrol", "update", f"JobId={job.id}", f"AdminComment=p2pdist: {comment}")
    hold = answer == "hold" and _state(job)[1:] == ("1", "1")
    done = _run("scontrol", "requeuehold", job.id) if hold else _run("scancel", job.id)
    if done.returncode and _state(job)[0] in STARTING:  # else another node was the first
        raise _refused(done)
    return "requeued and held" if hold else "cancelled"


def _state(job: Job) -> tuple[str, str, str]:
    """State, whether it is a batch job and whether it may be requeued; of a job that is gone,
    nothing."""
    done = _run("squeue", "--noheader", f"--jobs={job.id}", "--states=all", "--Format=State:20,BatchFlag:4,Requeue:4")
    words = done.stdout.split()
    return (words[0], words[1], words[2]) if len(words) == 3 else ("", "", "")


def _ask(*words: str) -> str:
    done = _run(*words)
    if done.returncode:
        raise _refused(done)
    return done.stdout


def _run(*words: str) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(
            words, capture_output=True, text=True, errors="replace", timeout=COMMAND_S_MAX, check=False
        )
    except FileNotFoundError as error:
        raise P2PDistError(
            f"there is no {words[0]} on PATH", remedy="Install Slurm's commands, or set PATH in the script"
        ) from error
    except subprocess.TimeoutExpired as error:
        raise Unavailable(
            f"{words[0]} took more than {COMMAND_S_MAX:.0f} s", remedy="See whether slurmctld answers: scontrol ping"
        ) from error


def _refused(done: subprocess.CompletedProcess[str]) -> Unavailable:
    message = " ".join(done.stderr.split())[:REASON_CHARACTERS_MAX]
    return Unavailable(
        f"`{' '.join(done.args)}` failed: {message}", remedy="See whether slurmctld answers: scontrol ping"
    )
