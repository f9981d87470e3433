"""Reproducible packages: equal packages from equal checkouts, whenever and wherever they were made.

Three things differ between checkouts of one tree. Modification times: packing clamps later times to
a given one (pack's `mtime`). Permissions, which follow the user's umask: stages.py keeps only
whether the owner may execute a file. And compiled Python: a .pyc file holds the time of its source
and the path where it was compiled. This module compiles each one again from its source to a
hash-based one (PEP 552, checked: the interpreter compares the hash of the source when it imports)
with the path within the package. That needs an interpreter with the same magic number. Without one,
or without a source, the file is left out with a note, and Python compiles it at the first import. A
.pyc file outside `__pycache__` without a source is the module itself: it stays as it is.

Every file is compiled in a process of its own, forked from one that has compiled nothing, with a
fixed hash seed, since the output of marshal depends on other live objects (bpo-34093).
"""

from __future__ import annotations

import json
import os
import re
import shutil
import stat
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from p2pdist.files import open_regular
from p2pdist.model.errors import P2PDistError, UsageError, printable
from p2pdist.package.image.squashfs import MTIME_MAX
from p2pdist.package.source.stages import SourceEntry

TIME_DEFAULT_S = 315_532_800
"""1980-01-01, the earliest time that zip files can hold."""
INTERPRETER_S_MAX = 20.0
BATCH = 256
"""Files that one interpreter compiles."""
HEADER_BYTES = 4
"""The magic number of a .pyc file."""

Report = Callable[[str, int, int], None]

_CACHED = re.compile(rb"(?:(.*)/)?__pycache__/([^/]+?)\.([^./]+)(?:\.opt-([0-9]))?\.pyc\Z", re.DOTALL)
_VERSION = re.compile(r"cpython-(\d)(\d+)\Z")

# Read by any Python from 3.7 on. Output: the numbers of the jobs that failed.
_COMPILE = """
import json, os, py_compile, sys, warnings
warnings.simplefilter("ignore")
task = json.load(sys.stdin)
running, failed = {}, []
def reap():
    pid, status = os.wait()
    number = running.pop(pid)
    if status:
        failed.append(number)
for number, (source, compiled, shown, level) in enumerate(task["jobs"]):
    if len(running) >= task["processes"]:
        reap()
    pid = os.fork()
    if pid == 0:
        try:
            mode = py_compile.PycInvalidationMode.CHECKED_HASH
            py_compile.compile(source, compiled, shown, True, level, mode)
        except BaseException:
            os._exit(1)
        os._exit(0)
    running[pid] = number
while running:
    reap()
print(json.dumps(failed))
"""
_MAGIC = "import importlib.util, sys; sys.stdout.write(importlib.util.MAGIC_NUMBER.hex())"


@dataclass(slots=True)
class Replaced:
    """Compiled files by path in the source, None for one that is left out; and notes for the
    user."""

    files: dict[bytes, Path | None] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class _Job:
    compiled: bytes
    source: bytes
    level: int


def clamp_time(environ: Mapping[str, str]) -> int:
    """The time that no file is later than, in seconds since 1970: SOURCE_DATE_EPOCH
    (reproducible-builds.org), else TIME_DEFAULT_S. Raises UsageError."""
    text = environ.get("SOURCE_DATE_EPOCH", "")
    if not text:
        return TIME_DEFAULT_S
    if not text.isascii() or not text.isdecimal() or int(text) > MTIME_MAX:
        raise UsageError(f"SOURCE_DATE_EPOCH is {text[:50]!r}, not a time", remedy="Give seconds since 1970")
    return int(text)


def recompile(
    source: Path,
    files: Iterable[SourceEntry],
    work: Path,
    *,
    others: Iterable[SourceEntry] = (),
    report: Report = lambda what, done, total: None,
) -> Replaced:
    """Compile every .pyc file among `files` of `source` anew, into the empty directory `work`;
    their sources are among `files` and `others`. `report` is called with bytes of source. Blocks.
    Never writes to `source`."""
    source, work = Path(os.path.abspath(source)), Path(os.path.abspath(work))  # the interpreter runs elsewhere
    taken = {entry.path: entry.status.st_size for entry in files if _is_file(source, entry)}
    sources = {**{entry.path: entry.status.st_size for entry in others if _is_file(source, entry)}, **taken}
    replaced = Replaced()
    jobs: dict[tuple[bytes, str], list[_Job]] = {}
    for path in sorted(path for path in taken if path.endswith(b".pyc")):
        cached = _CACHED.match(path)
        name = os.path.join(cached[1] or b"", cached[2] + b".py") if cached else path[:-1]
        tag = os.fsdecode(cached[3]) if cached else ""
        if name in sources:
            jobs.setdefault((_magic(source, path), tag), []).append(_Job(path, name, int((cached and cached[4]) or 0)))
        elif cached:
            _leave_out(replaced, path, "there is no source for it")
        else:
            replaced.notes.append(f"kept as it is: {_shown(path)} (compiled Python without a source)")
    total, done = sum(sources[job.source] for group in jobs.values() for job in group), 0
    for (magic, tag), group in jobs.items():
        interpreter = _interpreter(magic, tag)
        for start in range(0, len(group), BATCH):
            batch = group[start : start + BATCH]
            if interpreter is None:
                for job in batch:
                    _leave_out(replaced, job.compiled, f"no interpreter here has its magic number {magic.hex()}")
            else:
                _compile(source, interpreter, batch, work, replaced)
            done += sum(sources[job.source] for job in batch)
            report("compiling", done, total)
    return replaced


def _is_file(source: Path, entry: SourceEntry) -> bool:
    """Whether it is a regular file or a link to one: an interpreter that opened a FIFO would wait
    for ever."""
    mode = entry.status.st_mode
    return stat.S_ISREG(mode) or (stat.S_ISLNK(mode) and os.path.isfile(os.path.join(os.fsencode(source), entry.path)))


def _magic(source: Path, path: bytes) -> bytes:
    try:
        with open_regular(os.path.join(os.fsencode(source), path)) as stream:
            return stream.read(HEADER_BYTES)
    except OSError:
        return b""  # packing says what is wrong with it


def _compile(source: Path, interpreter: str, group: list[_Job], work: Path, replaced: Replaced) -> None:
    outputs = [work / f"{len(replaced.files) + number}.pyc" for number in range(len(group))]
    jobs = [
        [str(source / os.fsdecode(job.source)), str(output), os.fsdecode(job.source), job.level]
        for job, output in zip(group, outputs, strict=True)
    ]
    done = subprocess.run(
        [interpreter, "-S", "-s", "-B", "-c", _COMPILE],
        input=json.dumps(
            {"jobs": jobs, "processes": os.cpu_count() or 1}
        ),  # ASCII escapes carry names that are not UTF-8
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        check=False,
        cwd=work,
        env=_ENVIRONMENT,
    )
    if done.returncode:
        raise P2PDistError(
            f"{interpreter} failed to compile {len(jobs)} files (exit code {done.returncode})",
            remedy="Try it by hand with python -m compileall, or pack without --reproducible",
        )
    failed = set(json.loads(done.stdout))
    for number, (job, output) in enumerate(zip(group, outputs, strict=True)):
        if number in failed:
            _leave_out(replaced, job.compiled, "its source does not compile")
        else:
            replaced.files[job.compiled] = output


_ENVIRONMENT = {"PYTHONHASHSEED": "0", "LC_ALL": "C.UTF-8", "PATH": "/usr/bin:/bin"}


def _interpreter(magic: bytes, tag: str) -> str | None:
    """A program from PATH, or this one, whose .pyc files begin with `magic`. None of the source is
    ever executed."""
    version = _VERSION.match(tag)
    names = [f"python{version[1]}.{version[2]}"] if version else []
    programs = [shutil.which(name, path=part) for name in (*names, "python3") for part in os.get_exec_path()]
    for program in dict.fromkeys((sys.executable, *(path for path in programs if path))):
        try:
            done = subprocess.run(
                [program, "-S", "-s", "-B", "-c", _MAGIC],
                capture_output=True,
                text=True,
                timeout=INTERPRETER_S_MAX,
                check=False,
                cwd="/",
                env=_ENVIRONMENT,
            )
        except (OSError, subprocess.TimeoutExpired):
            continue
        if done.returncode == 0 and done.stdout == magic.hex():
            return program
    return None


def _leave_out(replaced: Replaced, path: bytes, why: str) -> None:
    replaced.files[path] = None
    replaced.notes.append(f"left out: {_shown(path)} ({why})")


def _shown(path: bytes) -> str:
    return printable(os.fsdecode(path))
