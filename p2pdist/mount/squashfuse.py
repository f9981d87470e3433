"""The program that mounts a squashfs image without root, and whether it can work here. Loaded by
every `run`, so it loads little itself."""

from __future__ import annotations

import os

PROGRAMS = ("squashfuse_ll", "squashfuse")
"""Best first."""


def missing() -> str:
    """Why it cannot work here, or "" when it is worth trying."""
    places = os.get_exec_path()
    if not any(os.access(os.path.join(place, name), os.X_OK) for place in places for name in PROGRAMS):
        return "squashfuse is not installed"
    if not os.access("/dev/fuse", os.R_OK | os.W_OK):
        return "/dev/fuse is missing or not open to this user"
    return ""
