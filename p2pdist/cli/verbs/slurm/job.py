"""A job as Slurm tells its prolog and epilog of it, and what is kept of it on a node between the
two.

Slurm says these things in variables (slurm.conf(5), "Prolog and Epilog Scripts"). Slurm 22.05 sets,
with and without PrologFlags=Alloc, SLURM_JOB_ID, SLURM_JOB_RESTART_COUNT, SLURMD_NODENAME,
SLURM_NODELIST and, where the job has one, SLURM_JOB_COMMENT; of the job's own environment it passes
nothing on, except what a SPANK plugin exports by spank_job_control_setenv, which arrives with
SPANK_ before its name.

A job's directory, named by its id, is there from the moment at which its prolog does anything until
its epilog has undone all of it. The user can change the comment while the job runs, so the epilog
goes by that directory and not by the comment.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import msgspec

from p2pdist.model.errors import UNDECODABLE, Corrupt, P2PDistError, TooLarge, UsageError
from p2pdist.model.manifest import Reference, parse_reference

PACKAGES_MAX = 16
"""Packages that one job names."""

OWNER = "slurm-"
MARK = "p2pdist:"
PACKAGES_VARIABLE = "P2PDIST_PACKAGES"
RECORD = ".job.json"
"""In a job's directory, where no package can be shown: its name would have to begin with a letter
or digit."""

RECORD_BYTES_MAX = 1 << 16

_NUMBER = re.compile(r"[0-9]{1,18}\Z")
_COMMENT_WORDS = re.compile(r"[\s;]+")
_ADVICE = 'Name packages as in --comment "p2pdist:team/trainer:v3,team/weights:v7"'


@dataclass(frozen=True, slots=True)
class Job:
    """`nodes` is a hostlist expression, empty where Slurm did not say; `restarts` counts how often
    the job was requeued."""

    id: str
    node: str
    nodes: str = ""
    restarts: int = 0
    comment: str = ""
    exported: str = ""

    @property
    def owner(self) -> str:
        """The owner of its pins on its nodes."""
        return OWNER + self.id

    def preseed(self, number: int) -> str:
        """The id of the preseed of its package `number`, from 0 on. Every run of the job has its
        own: one that was cancelled stays so."""
        return self.owner + (f"-r{self.restarts}" if self.restarts else "") + (f"-p{number}" if number else "")


class JobRecord(msgspec.Struct, frozen=True):
    """What the epilog has to undo: the owner of pins, and the ids of preseeds."""

    owner: str
    preseeds: tuple[str, ...]


def job_of(environment: Mapping[str, str]) -> Job:
    """The job for which Slurm runs this process. Raises UsageError where it does not."""
    identifier = environment.get("SLURM_JOB_ID", "")
    if not is_job(identifier):
        raise UsageError(
            "SLURM_JOB_ID is not set, so Slurm did not start this",
            remedy="Start it from the scripts that Prolog= and Epilog= of slurm.conf name (deploy/slurm)",
        )
    restarts = environment.get("SLURM_JOB_RESTART_COUNT", "0")
    return Job(
        identifier,
        environment.get("SLURMD_NODENAME", ""),
        environment.get("SLURM_JOB_NODELIST") or environment.get("SLURM_NODELIST", ""),
        int(restarts) if _NUMBER.match(restarts) else 0,
        environment.get("SLURM_JOB_COMMENT", ""),
        environment.get(f"SPANK_{PACKAGES_VARIABLE}", ""),
    )


def is_job(text: str) -> bool:
    """Whether this is the id of a job."""
    return _NUMBER.match(text) is not None


def packages_of(job: Job, always: str = "") -> list[Reference]:
    """The packages that a job needs, each once, in this order: the ones of every job here
    (`always`), the ones that a plugin exported, and the ones in the comment, which may hold other
    words. Raises UsageError."""
    lists = [always] if always.strip() else []
    lists += [job.exported] if job.exported.strip() else []
    lists += [word.removeprefix(MARK) for word in _COMMENT_WORDS.split(job.comment) if word.startswith(MARK)]
    names = [name.strip() for words in lists for name in words.split(",")]
    if not all(names):
        raise UsageError(f"job {job.id} names a package without a name", remedy=_ADVICE)
    packages = list(dict.fromkeys(map(parse_reference, names)))
    if len(packages) > PACKAGES_MAX:
        raise TooLarge(f"job {job.id} names {len(packages)} packages, more than {PACKAGES_MAX}", remedy=_ADVICE)
    return packages


def places_of(packages: list[Reference], directory: Path) -> dict[Reference, Path]:
    """Where each package is shown: at its name, below the job's directory. Raises UsageError where
    one would hide another."""
    places = {package: directory / package.name for package in packages}
    taken: set[Path] = set()
    for place in places.values():
        if place in taken or any(place in other.parents for other in places.values()):
            raise UsageError(
                f"{place.relative_to(directory)} cannot be shown beside the other packages of the job",
                remedy="Name one version of each package, and no package whose name is the folder of another's",
            )
        taken.add(place)
    return places


def write_record(directory: Path, record: JobRecord) -> None:
    """Make the job's directory, for all to enter and for none but this user to change. Raises
    P2PDistError."""
    try:
        directory.mkdir(mode=0o755, parents=True, exist_ok=True)
        unfinished = directory / f"{RECORD}.new"
        unfinished.write_bytes(msgspec.json.encode(record))
        unfinished.replace(directory / RECORD)
    except OSError as error:
        raise P2PDistError(
            f"cannot write below {directory}: {error.strerror}", remedy="Name another place with --jobs-dir"
        ) from error


def read_record(directory: Path) -> JobRecord | None:
    """What was written of the job; None when it needed no package. Raises Corrupt."""
    try:
        with (directory / RECORD).open("rb") as file:
            return msgspec.json.decode(file.read(RECORD_BYTES_MAX), type=JobRecord)
    except FileNotFoundError:
        return None
    except UNDECODABLE as error:
        raise Corrupt(
            f"{directory / RECORD} is not what a prolog writes: {error}", remedy=f"Unmount what is below {directory}"
        ) from error
