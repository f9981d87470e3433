"""What the demo packs: a base layer of real Python packages and the trainer as app layer."""

from __future__ import annotations

import asyncio
import json
import os
import random
import shutil
import sys
import time
from array import array
from dataclasses import dataclass
from pathlib import Path

from p2pdist.cli.verbs.demo.processes import Processes
from p2pdist.model.errors import DiskFull, Unavailable, UsageError

WHEELS = ("numpy", "scipy", "pandas")
"""About 225 MB on disk, 65 MB to download."""
WHEELS_SMALL = ("numpy",)
"""About 57 MB on disk, 17 MB to download: for CI."""

BASE_BYTES_MIN = 150_000_000
"""What the base layer of a full demo holds at the least, unpacked."""
SIZE_MAX = 1 << 40

PIP_TIMEOUT_S = 600
EMBEDDING_BYTES = 1 << 20
CHUNK = 1 << 20

ENTRYPOINT = ("python3", "-m", "train")
ENVIRONMENT = ("PYTHONPATH=${P2PDIST_ROOT}/site-packages:${P2PDIST_ROOT}/app", "PYTHONDONTWRITEBYTECODE=1")


@dataclass(frozen=True, slots=True)
class Base:
    """A directory to pack as base layer: its wheels, regular files, their bytes and the seconds it
    took to make."""

    directory: Path
    wheels: tuple[str, ...]
    files: int
    bytes: int
    seconds: float


def measure(directory: Path) -> tuple[int, int]:
    """Number of regular files below `directory`, and their bytes."""
    files = total = 0
    for folder, _folders, names in os.walk(directory):
        for name in names:
            files += 1
            total += os.lstat(os.path.join(folder, name)).st_size
    return files, total


def check_space(place: Path, *, agents: int, base_bytes: int, unpacks: bool) -> None:
    """Raises DiskFull unless `place` has room for the base, its package at the origin and a copy
    for each agent."""
    packed = base_bytes // 2
    needed = base_bytes + (3 + agents) * packed + (agents * base_bytes if unpacks else 0)
    free = shutil.disk_usage(place).free
    if free < needed:
        raise DiskFull(str(place), needed=needed, free=free)


async def pad(directory: Path, *, up_to: int, present: int) -> None:
    """Write files that do not compress until the directory holds `up_to` bytes, as a model's
    weights would."""
    source = random.Random(1)
    shard = 0
    while present < up_to:
        length = min(up_to - present, 256 << 20)
        with (directory / f"shard-{shard:05d}.bin").open("wb") as file:
            for start in range(0, length, CHUNK):
                file.write(source.randbytes(min(CHUNK, length - start)))
                await asyncio.sleep(0)  # here the demo can be interrupted; a thread would go on writing
        present += length
        shard += 1


async def install(processes: Processes, target: Path, wheels: tuple[str, ...]) -> None:
    """Install `wheels` into a directory with pip. Raises Unavailable when that fails twice."""
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-input"]
    command += ["--only-binary=:all:", "--no-compile", "--no-warn-script-location", "--target", str(target), *wheels]
    for attempt in (1, 2):
        shutil.rmtree(target, ignore_errors=True)
        done = await processes.call("pip", command, timeout_s=PIP_TIMEOUT_S)
        if done.code == 0:
            break
        if attempt == 2:
            raise Unavailable(
                f"pip could not install {', '.join(wheels)}: {done.last_words()}",
                remedy="The demo needs a package index once, later runs use pip's cache; check the network and pip's settings",
            )
        await asyncio.sleep(3)


async def build_base(directory: Path, processes: Processes, wheels: tuple[str, ...], size: int) -> Base:
    """Install `wheels` into `directory`/site-packages with pip and pad to `size` bytes. Raises
    Unavailable when pip fails twice."""
    began = time.monotonic()
    if size > SIZE_MAX:
        raise UsageError(
            f"a base layer of {size} bytes is over the limit of {SIZE_MAX}", remedy="Ask for less with --size"
        )
    await install(processes, directory / "site-packages", wheels)
    _files, present = measure(directory)
    if size > present:
        weights = directory / "weights"
        weights.mkdir()
        await pad(weights, up_to=size, present=present)
    files, total = measure(directory)
    return Base(directory, wheels, files, total, time.monotonic() - began)


def write_app(directory: Path, *, version: int) -> Path:
    """The app layer's source in `directory`; of two versions only settings.json differs. Returns
    the file that differs."""
    app = directory / "app"
    app.mkdir(parents=True, exist_ok=True)
    if version == 1:
        shutil.copyfile(Path(__file__).with_name("trainer.py"), app / "train.py")
        source = random.Random(2)
        values = array("f", (source.gauss(0.0, 1.0) for _ in range(EMBEDDING_BYTES // 4)))
        (app / "embedding.bin").write_bytes(values.tobytes())
    settings = {
        "version": version,
        "seed": 1,
        "points": 3000,
        "features": 64,
        "hidden": 32,
        "steps": 600,
        "learning_rate": 0.2 if version == 1 else 0.3,
    }
    changed = app / "settings.json"
    changed.write_text(json.dumps(settings, indent=2) + "\n")
    return changed
