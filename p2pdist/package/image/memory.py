"""How much memory the kernel lets this process and its children have: limits of its control groups
(cgroups(7), version 1 and 2) and of its own (getrlimit(2)). A program that plans with a share of
the machine's memory is given a share of this instead."""

from __future__ import annotations

import re
import resource
from collections.abc import Iterator
from pathlib import Path

_LIMITS = ("memory.max", "memory.high", "memory.limit_in_bytes")
"""Files of a control group: the first two of version 2, the last of version 1."""
_ESCAPE = re.compile(r"\\([0-7]{3})")


def memory_limit() -> int | None:
    """Bytes of memory that this process and its children may use together; None without a limit."""
    try:
        groups = list(memory_groups(Path("/proc/self/cgroup").read_text(), Path("/proc/self/mountinfo").read_text()))
    except OSError:  # no /proc, hence no control groups to be seen
        groups = []
    limits = [limit for group in groups if (limit := _read_limit(group)) is not None]
    return min(limits, default=None)


def address_limit() -> int | None:
    """Bytes of address space that one process may have (`ulimit -v`); None without a limit."""
    limit = resource.getrlimit(resource.RLIMIT_AS)[0]
    return None if limit == resource.RLIM_INFINITY else limit


def memory_groups(groups: str, mounts: str) -> Iterator[Path]:
    """The files that may hold a limit on memory: of the control group of a process and its
    ancestors, given its /proc/PID/cgroup and /proc/PID/mountinfo. A group that is out of sight in a
    container is that at the root of what is mounted there."""
    paths = {}
    for line in groups.splitlines():
        _, controllers, path = line.split(":", 2)
        if not controllers or "memory" in controllers.split(","):
            paths["cgroup" if controllers else "cgroup2"] = path
    for line in mounts.splitlines():
        before, _, after = line.partition(" - ")
        root, point = (_ESCAPE.sub(lambda code: chr(int(code[1], 8)), word) for word in before.split(" ")[3:5])
        kind, _, options = after.split(" ", 2)
        if kind not in paths or (kind == "cgroup" and "memory" not in options.split(",")):
            continue
        above = root.rstrip("/") + "/"
        inside = paths[kind].removeprefix(above) if paths[kind].startswith(above) else ""
        parts = [part for part in inside.split("/") if part]
        if ".." in parts:  # the process is outside of the cgroup namespace whose mount it sees
            parts = []
        for depth in range(len(parts), -1, -1):
            yield from (Path(point, *parts[:depth], name) for name in _LIMITS)


def _read_limit(file: Path) -> int | None:
    try:
        text = file.read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdecimal() else None
