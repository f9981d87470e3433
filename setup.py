"""What pyproject.toml cannot say: with P2PDIST_COMPILED=1 the cores are compiled by mypyc. With
P2PDIST_COMPILED=quick the C compiler does not optimise, which takes a fourth of the time and is
enough to see that they decide the same.

The same source stands beside the compiled modules, and tracebacks show it. Without the variable
nothing is compiled, and a wheel is for every interpreter. mypyc needs mypy and everything that the
cores import, so the build takes place in the project's environment (`make wheels-compiled`).
"""

from __future__ import annotations

import os
from pathlib import Path

from setuptools import Extension, setup

VARIABLE = "P2PDIST_COMPILED"

ROOMS = ("p2pdist/core", "p2pdist/simulate", "tracker/core")
"""What takes a tracker's and a simulation's time: decisions alone, without sockets and files."""

LEVELS = {"1": "2", "quick": "0"}
"""How far the C compiler optimises, by what the variable says."""

INTERPRETED = "tracker/core/policy"
"""Its rules inherit from a protocol, which mypyc does not take, and policies are read once."""


def cores() -> list[str]:
    """The modules that are compiled."""
    modules = [path for room in ROOMS for path in Path(room).rglob("*.py")]
    return sorted(str(path) for path in modules if path.name != "__init__.py" and not path.is_relative_to(INTERPRETED))


def extensions() -> list[Extension]:
    """The compiled cores, if they are asked for."""
    asked = os.environ.get(VARIABLE, "")
    if asked in ("", "0"):
        return []
    if asked not in LEVELS:
        raise SystemExit(f"{VARIABLE} is {asked!r}: say 1 to compile the cores, 0 or nothing not to")
    from mypyc.build import mypycify

    compiled: list[Extension] = mypycify(
        cores(), group_name="p2pdist", opt_level=LEVELS[asked], debug_level="0", multi_file=True
    )
    return compiled


setup(ext_modules=extensions())
