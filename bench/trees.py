"""The directories that the benchmark of packages packs: a real Python environment and a generated
tree, and small edits to both."""

from __future__ import annotations

import argparse
import os
import random
import subprocess
import sys
import tomllib
import venv
from collections.abc import Iterator
from pathlib import Path

NAMES = ("environment", "generated")
PROJECT = Path(__file__).resolve().parent.parent

WHEELS = ("numpy", "scipy", "pandas", "pyarrow")
"""What a training program imports; with the project's own environment more than 20,000 files."""

INSTALL_S = 900.0
WORDS = [
    f"{first}{last}"
    for first in ("con", "per", "sub", "trans", "inter")
    for last in ("form", "fer", "mit", "pose", "sist")
]


def add_size_options(parser: argparse.ArgumentParser) -> None:
    """--files and --size-mib: how large the generated tree is."""
    parser.add_argument("--files", type=int, default=200_000, help="of the generated tree [%(default)s]")
    parser.add_argument("--size-mib", type=int, default=5000, help="of the generated tree [%(default)s]")


def made(where: Path, chosen: argparse.Namespace) -> Iterator[Path]:
    """The trees that `chosen.tree` names, one after the other, each below `where` under its
    name."""
    for name in NAMES:
        if name in chosen.tree:
            print(f"making the tree {name!r} ...", file=sys.stderr, flush=True)
            if name == "environment":
                yield environment(where / name)
            else:
                yield generated(where / name, files=chosen.files, size=chosen.size_mib << 20)


def environment(directory: Path) -> Path:
    """A virtual environment with what the project needs and WHEELS in it. Raises CalledProcessError
    where they cannot be had."""
    venv.create(directory, with_pip=True)
    words = [str(directory / "bin" / "python"), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    told = tomllib.loads((PROJECT / "pyproject.toml").read_text())["project"]
    needed = [*told["dependencies"], *told["optional-dependencies"]["test"]]
    subprocess.run([*words, *needed, *WHEELS], check=True, timeout=INSTALL_S, capture_output=True)
    return directory


def generated(directory: Path, *, files: int, size: int, seed: int = 1) -> Path:
    """`files` files of `size` bytes in all, in directories of 200: sizes are spread as in Python
    environments (most are small), and the bytes are words, numbers and some noise, so that they
    compress to about a third."""
    drawn = random.Random(seed)
    weights = [drawn.lognormvariate(0.0, 1.6) for _ in range(files)]
    scale = size / sum(weights)
    text = _text(drawn, 8 << 20)
    for number, weight in enumerate(weights):
        if number % 200 == 0:
            place = directory / f"part{number // 20_000:02d}" / f"module{number // 200:04d}"
            place.mkdir(parents=True)
        length = max(1, int(weight * scale))
        with (place / f"file{number:06d}.py").open("wb") as file:
            file.write(b"%d\n" % number)
            while length > 0:
                start = drawn.randrange(len(text) - 1)
                file.write(text[start : start + length])
                length -= min(length, len(text) - start)
    return directory


def _text(drawn: random.Random, size: int) -> bytes:
    found = bytearray()
    while len(found) < size:
        words = " ".join(drawn.choices(WORDS, k=40))
        found += (
            f"def {words[:12].strip()}_{drawn.getrandbits(24):x}({words}):\n    ".encode() + drawn.randbytes(60) + b"\n"
        )
    return bytes(found)


def large(path: Path, size: int, *, seed: int = 1) -> Path:
    """One file of noise, as weights are."""
    drawn = random.Random(seed)
    with path.open("wb") as file:
        for start in range(0, size, 1 << 24):
            file.write(drawn.randbytes(min(1 << 24, size - start)))
    return path


def edit(directory: Path) -> int:
    """Append a line to a file of middling size, as an engineer does; returns the bytes of the file
    then."""
    files = sorted(path for path in directory.rglob("*.py") if path.is_file() and not path.is_symlink())
    chosen = min(files, key=lambda path: (abs(path.stat().st_size - 20_000), path))
    with chosen.open("ab") as file:
        file.write(b"\n# edited %d\n" % os.getpid())
    return chosen.stat().st_size


def change_in_place(path: Path, share: float) -> None:
    """Overwrite a share of a file, in one run in the middle of it."""
    size = path.stat().st_size
    with path.open("r+b") as file:
        file.seek(size // 2)
        file.write(os.urandom(int(size * share)))


def insert(path: Path, count: int) -> None:
    """Insert bytes a third of the way into a file."""
    data = path.read_bytes()
    at = len(data) // 3
    path.write_bytes(data[:at] + os.urandom(count) + data[at:])


def files_and_bytes(directory: Path) -> tuple[int, int]:
    """Regular files below a directory, and their bytes."""
    count = size = 0
    for place, _, names in os.walk(directory):
        for name in names:
            status = os.lstat(os.path.join(place, name))
            if not os.path.islink(os.path.join(place, name)):
                count, size = count + 1, size + status.st_size
    return count, size
