"""What a run of the tests may leave behind, and finding it.

Whatever a test starts inherits TOKEN_VARIABLE, so a process that outlives its test is found even
when it has detached itself from its parent. Mounts are looked for below the run's own temporary
directory, namespaces by NETNS_PREFIX, without those in which another run's processes are and those
of one set with them; so several runs can share a machine.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from pathlib import Path

TOKEN_VARIABLE = "P2PDIST_TEST_RUN"
NETNS_PREFIX = "p2pd"
NETNS_DIRECTORY = Path("/run/netns")
SETTLE_S = 3.0
"""How long what is being torn down may take to vanish after the last test."""


def mounts_below(directory: Path) -> list[str]:
    """Mount points of this process's namespace at or below `directory` (proc(5), mountinfo)."""
    root = os.fsencode(directory.resolve())
    points = [
        line.split()[4].decode("unicode_escape").encode("latin-1")
        for line in Path("/proc/self/mountinfo").read_bytes().splitlines()
    ]
    return [os.fsdecode(point) for point in points if point == root or point.startswith(root + b"/")]


def processes_with(token: str) -> dict[int, str]:
    """Running processes, except this one, whose environment carries `token`: pid to command
    line."""
    found: dict[int, str] = {}
    entry = f"{TOKEN_VARIABLE}={token}".encode()
    for directory in Path("/proc").iterdir():
        if not directory.name.isdecimal() or int(directory.name) == os.getpid():
            continue
        try:
            if entry in (directory / "environ").read_bytes().split(b"\0"):
                command = (directory / "cmdline").read_bytes().replace(b"\0", b" ")
                found[int(directory.name)] = command.decode(errors="replace").strip()
        except OSError:
            continue  # it ended meanwhile, or belongs to somebody else
    return {pid: command for pid, command in found.items() if "multiprocessing.resource_tracker" not in command}


def namespaces() -> set[str]:
    """Network namespaces that carry the project's prefix."""
    try:
        return {name for name in os.listdir(NETNS_DIRECTORY) if name.startswith(NETNS_PREFIX)}
    except FileNotFoundError:
        return set()


def others_namespaces(token: str | None) -> set[str]:
    """Those in which processes run whose environment does not carry `token` (None: any process),
    and those that were made with one of these for a network: they share a name up to the last
    hyphen."""
    ours, used = processes_with(token) if token is not None else {}, set()
    for directory in Path("/proc").iterdir():
        if directory.name.isdecimal() and int(directory.name) not in ours:
            with contextlib.suppress(OSError):  # it ended meanwhile, or belongs to somebody else
                used.add((directory / "ns" / "net").stat().st_ino)
    sets = set()
    for name in namespaces():
        with contextlib.suppress(OSError):
            if (NETNS_DIRECTORY / name).stat().st_ino in used:
                sets.add(name.rpartition("-")[0])
    return {name for name in namespaces() if name.rpartition("-")[0] in sets}


def namespaces_left(before: set[str], *, settle_s: float = SETTLE_S) -> set[str]:
    """Namespaces that were not there before, and in which nobody works within `settle_s` seconds:
    another run makes its own before it starts something in them."""
    deadline = time.monotonic() + settle_s
    while (left := namespaces() - before - others_namespaces(None)) and time.monotonic() < deadline:
        time.sleep(0.1)
    return left


def leftovers(directory: Path, token: str, namespaces_before: set[str], *, settle_s: float = SETTLE_S) -> list[str]:
    """What outlived a run: one line for each mount, process and namespace. Empty when all is tidy
    within `settle_s` seconds."""
    deadline = time.monotonic() + settle_s
    while True:
        found = [f"mount {point}" for point in mounts_below(directory)]
        found += [f"process {pid}: {command}" for pid, command in processes_with(token).items()]
        found += [f"network namespace {name}" for name in sorted(namespaces() - namespaces_before)]
        if any(line.startswith("network") for line in found):
            others = others_namespaces(token)
            found = [line for line in found if line.removeprefix("network namespace ") not in others]
        if not found or time.monotonic() > deadline:
            return found
        time.sleep(0.1)


def remove_leftovers(directory: Path, token: str) -> None:
    """End and unmount what `leftovers` names, so that one untidy test does not spoil the
    machine."""
    for pid in processes_with(token):
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            continue
    for point in reversed(mounts_below(directory)):
        subprocess.run(["umount", "--lazy", point], check=False, capture_output=True)
