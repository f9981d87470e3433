"""A view of a package for one program only, without root: in a user namespace with squashfuse and
an overlay.

`run_inside` starts this module as a process of its own, the guardian, since a process with threads
cannot enter a user namespace. The guardian becomes root of a new user namespace and mount namespace
(user_namespaces(7)), mounts there, and starts the program in a second user namespace nested in it,
where the program has its own user number again and no rights over the mounts. When the program ends
the guardian ends the squashfuse processes, and the kernel removes the mounts with the namespace.

Images that an agent is still fetching are files of FUSE, mounted there too (lazy/remote.py).

Between the two: a description as JSON on one descriptor, and on another what came of it
(`{"started": true}`, or an error).
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from itertools import chain
from pathlib import Path
from typing import Any

from p2pdist.model.errors import P2PDistError, Unavailable, from_problem
from p2pdist.mount import kernel, overlay
from p2pdist.mount.program import Program, run
from p2pdist.mount.program_root import Bind, enter
from p2pdist.mount.scratch import scratch_directory
from p2pdist.mount.squashfs import PROGRAMS, RemoteImage, inspect, missing
from p2pdist.removal import remove_tree

READY_S_MAX = 20.0
"""How long all squashfuse processes together may take to mount."""

_INSTALL = "Install squashfuse and fuse3, or let the agent run as root"


def run_inside(
    images: Sequence[Path | RemoteImage],
    describe: Callable[[Path], Program],
    *,
    writable: bool = False,
    announce: Callable[[str], None] = lambda line: None,
    agent: Path | None = None,
    entered: Sequence[Bind] | None = None,
) -> int:
    """Run a program that sees `images` (bottom to top) merged at a directory; all of them are
    files, or images that the agent at the Unix socket `agent` is fetching. `describe` is given that
    directory. What it writes there is gone afterwards. `announce` gets the line that says
    which method and why. With `entered` it is the program's root instead, in which these paths are
    seen (program_root.py). Returns its exit code as `program.run` does. Raises Unavailable, before
    the program has started, when this host does not allow it."""
    if reason := missing():
        raise Unavailable(f"the package cannot be shown in a user namespace: {reason}", remedy=_INSTALL)
    paths = [image.resolve() for image in images if isinstance(image, Path)]
    remote = [image for image in images if isinstance(image, RemoteImage)]
    _require_no_attributes(paths)
    scratch = scratch_directory("p2pdist-run-")
    try:
        (scratch / "view").mkdir()
        wanted = describe(scratch / "view" / "root")
        task = {
            "images": list(map(str, paths)),
            "remote": [str(agent), *chain.from_iterable((image.digest, str(image.size)) for image in remote)]
            if remote
            else [],
            "scratch": str(scratch),
            "writable": writable,
            "argv": wanted.argv,
            "env": dict(wanted.env),
            "cwd": wanted.cwd,
            "root": wanted.root,
            "entered": None if entered is None else [[bind.outside, bind.inside] for bind in entered],
        }
        later = "; contents come when they are read" if remote else ""
        announce(f"userns: not root, {len(images)} layers with squashfuse, seen by this program only{later}")
        return _guard(task)
    finally:
        remove_tree(scratch)


def _require_no_attributes(paths: Sequence[Path]) -> None:
    """Raises P2PDistError where a layer above the first has extended attributes."""
    if any(inspect(path).has_xattrs for path in paths[1:]):
        raise P2PDistError(
            "a layer has extended attributes, which may hide files below it and which only root can read",
            remedy="Let the agent run as root, or pack the layer again with p2pdist pack",
        )


def _guard(task: dict[str, Any]) -> int:
    description = os.memfd_create("p2pdist-task")
    with os.fdopen(description, "r+") as file:
        json.dump(task, file)  # ASCII escapes carry names that are not UTF-8
        file.flush()
        outcome, report = os.pipe()
        # PYTHONPATH is for the package's program, unless it is how this one is found.
        needed = str(Path(__file__).parents[2]) in os.environ.get("PYTHONPATH", "").split(os.pathsep)
        argv = (
            sys.executable,
            *(() if needed else ("-E",)),
            "-P",
            "-m",
            "p2pdist.mount.userns",
            str(description),
            str(report),
        )
        try:
            code = run(Program(argv, os.environ, "/"), keep=(description, report))
        finally:
            os.close(report)
            with os.fdopen(outcome) as answers:
                said = answers.read()
    if not said:
        # Perhaps the program had started, so this is not Unavailable, which invites another try.
        raise P2PDistError(
            f"the process that shows the package ended unexpectedly (exit code {code})",
            remedy="See dmesg, whether memory ran out, and run it again",
        )
    answer = json.loads(said)
    if "started" not in answer:
        raise from_problem(answer)
    return code


# -- the guardian


def _enter(inside: int, outside: int, group: int, outside_group: int, flags: int) -> None:
    """Enter new namespaces in which this process is user `inside`; `outside` is its number in the
    present one."""
    kernel.unshare(kernel.CLONE_NEWUSER | flags)
    Path("/proc/self/setgroups").write_text("deny")
    Path("/proc/self/uid_map").write_text(f"{inside} {outside} 1")
    Path("/proc/self/gid_map").write_text(f"{group} {outside_group} 1")


def _squashfuse(image: Path, point: Path) -> list[str]:
    tool = next(name for name in PROGRAMS if shutil.which(name))
    return [tool, "-f", "-o", "ro,nosuid,nodev", str(image), str(point)]


def _start_fuse(words: Sequence[str], log: int) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        words,
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=log,
        start_new_session=True,  # Ctrl-C is for the program
        preexec_fn=lambda: kernel.die_with_parent(signal.SIGKILL),  # noqa: PLW1509 - this process has one thread
    )


def _wait_for_fuse(daemons: Sequence[subprocess.Popen[bytes]], points: Sequence[Path], log: Path) -> None:
    device = points[0].parent.stat().st_dev
    deadline = time.monotonic() + READY_S_MAX
    for daemon, point in zip(daemons, points, strict=True):
        while point.stat().st_dev == device:
            if daemon.poll() is not None or time.monotonic() > deadline:
                said = log.read_text(errors="replace").strip().splitlines()
                raise Unavailable(f"FUSE did not mount: {said[-1] if said else 'no answer'}", remedy=_INSTALL)
            time.sleep(0.001)


def _fetched(remote: Sequence[str], view: Path, log: Path, daemons: list[subprocess.Popen[bytes]]) -> list[Path]:
    """Mount images that an agent is fetching, and return their paths."""
    point = view / "images"
    point.mkdir()
    with log.open("ab") as file:
        alone = ["-E"] if sys.flags.ignore_environment else []
        words = [sys.executable, *alone, "-P", "-m", "p2pdist.mount.lazy.remote", str(point), *remote]
        daemons.append(_start_fuse(words, file.fileno()))
    _wait_for_fuse(daemons, [point], log)
    paths = [point / str(number) for number in range(1, len(remote) // 2 + 1)]
    _require_no_attributes(paths)
    return paths


def _build(task: dict[str, Any], daemons: list[subprocess.Popen[bytes]]) -> None:
    """Mount everything; the merged view is at view/root of the task's scratch directory. Every FUSE
    process that was started is in `daemons`, also on failure."""
    scratch, writable = Path(task["scratch"]), task["writable"]
    kernel.mount("none", "/", "none", kernel.MS_REC | kernel.MS_PRIVATE)
    view = scratch / "view"
    kernel.mount("p2pdist", view, "tmpfs", kernel.MS_NOSUID | kernel.MS_NODEV, "mode=755")
    root = view / "root"
    root.mkdir()
    log = scratch / "log"
    images = [Path(image) for image in task["images"]] or _fetched(task["remote"], view, log, daemons)
    points = [view / str(number) for number in range(len(images))]
    straight = len(images) == 1 and not writable
    if straight:
        points = [root]
    tools = []
    with log.open("ab") as file:
        for image, point in zip(images, points, strict=True):
            point.mkdir(exist_ok=True)
            tools.append(_start_fuse(_squashfuse(image, point), file.fileno()))
            daemons.append(tools[-1])
    _wait_for_fuse(tools, points, log)
    if not straight:
        uppers = scratch if writable else None
        overlay.merge(view, len(images), root, source="p2pdist", uppers=uppers, more=",userxattr")


def _tell(report: int, answer: dict[str, Any]) -> None:
    os.write(report, json.dumps(answer).encode())


def _serve(task: dict[str, Any], report: int) -> int:
    user, group = os.getuid(), os.getgid()
    wanted = Program(tuple(task["argv"]), task["env"], task["cwd"], task["root"])
    daemons: list[subprocess.Popen[bytes]] = []
    try:
        try:
            _enter(0, user, 0, group, kernel.CLONE_NEWNS)
            _build(task, daemons)
        except overlay.NoUpper as error:
            raise Unavailable(
                f"the user namespace cannot be used: {error.filename}: {error.strerror}",
                remedy="Set TMPDIR to a directory on another file system, or leave out --writable",
            ) from error
        except OSError as error:
            raise Unavailable(
                f"the user namespace cannot be used: {error.filename or ''} {error.strerror}", remedy=_INSTALL
            ) from error
        kernel.die_with_parent(signal.SIGTERM)

        def prepare() -> None:
            if task["entered"] is not None:
                scratch = Path(task["scratch"])
                (scratch / "entered").mkdir()
                enter(
                    scratch / "view" / "root",
                    scratch / "entered",
                    [Bind(*pair) for pair in task["entered"]],
                    wanted.cwd,
                )
            else:
                _enter(user, 0, group, 0, 0)
            kernel.die_with_parent(signal.SIGTERM)

        return run(wanted, prepare=prepare, started=lambda: _tell(report, {"started": True}))
    finally:
        for daemon in daemons:
            with suppress(ProcessLookupError):
                daemon.kill()
            daemon.wait()


def main(arguments: Sequence[str]) -> int:
    """The guardian. Its arguments are two descriptors: where to read the task and where to write
    what came of it."""
    description, report = map(int, arguments)
    os.set_inheritable(report, False)
    with os.fdopen(description) as file:
        file.seek(0)
        task = json.load(file)
    try:
        return _serve(task, report)
    except P2PDistError as error:
        _tell(report, error.problem())
        return error.exit_code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
