"""Which processes keep a mount busy, for the message of an unmount that fails."""

from __future__ import annotations

import os
import time
from pathlib import Path

HOLDERS_MAX = 5
SEARCH_S_MAX = 1.0


def holders(target: Path) -> list[str]:
    """Up to HOLDERS_MAX processes, as "name (pid 12)", with a file, directory or program open at or below `target` (a real path);
    found on a best effort basis within SEARCH_S_MAX seconds. Processes of other users show only to root."""
    place = os.fsencode(target)
    found: list[str] = []
    deadline = time.monotonic() + SEARCH_S_MAX
    for directory in Path("/proc").iterdir():
        if len(found) >= HOLDERS_MAX or time.monotonic() > deadline:
            break
        if directory.name.isdecimal() and _uses(directory, place):
            found.append(f"{_name(directory)} (pid {directory.name})")
    return found


def _uses(process: Path, place: bytes) -> bool:
    try:
        links = [process / name for name in ("cwd", "root", "exe")] + list((process / "fd").iterdir())
    except OSError:
        return False  # it ended, or belongs to somebody else
    for link in links:
        try:
            path = os.readlink(os.fsencode(link))
        except OSError:
            continue
        if path == place or path.startswith(place + b"/"):
            return True
    try:
        return b" " + place + b"/" in (process / "maps").read_bytes()
    except OSError:
        return False


def _name(process: Path) -> str:
    try:
        return (process / "comm").read_text(errors="replace").strip()
    except OSError:
        return "a process"
