"""What the benchmark of packages compares: this system, casync and restic, each packing a directory
into a place of its own."""

from __future__ import annotations

import json
import shutil
import time
from abc import ABC, abstractmethod
from dataclasses import dataclass
from pathlib import Path

from bench.processes import ProgramFailed, run

CALL_S = 900.0


@dataclass(frozen=True)
class Packing:
    """One packing: wall-clock seconds, and the bytes that came to lie in the place where hosts
    read."""

    seconds: float
    bytes_moved: int


def bytes_below(directory: Path) -> int:
    """Bytes of all files below a directory."""
    return sum(path.stat().st_size for path in directory.rglob("*") if path.is_file() and not path.is_symlink())


def call(*words: str, env: dict[str, str] | None = None) -> str:
    """Run a program; returns what it wrote. Raises ProgramFailed with its last words."""
    ended = run(words, timeout_s=CALL_S, env=env)
    if ended.code:
        raise ProgramFailed(f"{words[0]} ended with {ended.code}: {ended.tail()}")
    return ended.output


class Packer(ABC):
    """A tool with an empty place of its own."""

    name: str

    def __init__(self, place: Path) -> None:
        self.place = place
        place.mkdir(parents=True)

    @classmethod
    def missing(cls) -> str:
        """What this machine lacks to run it, or nothing."""
        return "" if shutil.which(cls.name) else cls.name

    @abstractmethod
    def pack(self, source: Path, number: int) -> Packing:
        """Pack `source` as version `number`, and send it to the place."""


class P2PDist(Packer):
    """`p2pdist pack --format tree` and `p2pdist push` into a layout that stands for the origin."""

    name = "p2pdist"

    def __init__(self, place: Path, program: str) -> None:
        super().__init__(place)
        self.program = program
        self.origin = f"file://{place / 'origin'}"
        self.layout = place / "layout"

    @classmethod
    def missing(cls) -> str:
        return ""

    def pack(self, source: Path, number: int) -> Packing:
        started = time.monotonic()
        reference = f"{source.name.lower()}:v{number}"
        options = ("--layout", str(self.layout), "--json")
        call(self.program, "pack", str(source), "-t", reference, "--format", "tree", *options)
        sent = json.loads(call(self.program, "push", reference, "--origin", self.origin, *options))["bytes_sent"]
        return Packing(time.monotonic() - started, sent)


class Casync(Packer):
    """`casync make` into a store of chunks with an index beside it."""

    name = "casync"

    def pack(self, source: Path, number: int) -> Packing:
        before = bytes_below(self.place)
        started = time.monotonic()
        index = self.place / f"{source.name}-{number}.{'caidx' if source.is_dir() else 'caibx'}"
        call("casync", "make", f"--store={self.place / 'store.castr'}", str(index), str(source))
        return Packing(time.monotonic() - started, bytes_below(self.place) - before)


class Restic(Packer):
    """`restic backup` into a repository."""

    name = "restic"

    def pack(self, source: Path, number: int) -> Packing:
        repository = self.place / "repository"
        env = {"RESTIC_PASSWORD": "bench", "RESTIC_CACHE_DIR": str(self.place / "cache")}
        if not repository.exists():
            call("restic", "init", "--quiet", "--repo", str(repository), env=env)
        before = bytes_below(repository)
        started = time.monotonic()
        call("restic", "backup", "--quiet", "--repo", str(repository), str(source), env=env)
        return Packing(time.monotonic() - started, bytes_below(repository) - before)
