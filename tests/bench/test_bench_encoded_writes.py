"""The benchmark of encoded writes: it runs to its end on a small tree, and neither mount nor loop device nor file outlives it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from bench.btrfs import Btrfs, KernelClock, Meter, Spent
from bench.encoded_writes import missing
from bench.processes import ProgramFailed
from p2pdist.mount.kernel import mounted_at
from p2pdist.store.disk import sync_filesystem

ROOT = Path(__file__).resolve().parents[2]
MIB = 1 << 20

needs_btrfs = pytest.mark.skipif(bool(missing()), reason=missing())


def loops(below: Path) -> list[str]:
    """The loop devices whose files lie below a directory."""
    told = subprocess.run(["losetup", "--list", "--noheadings"], check=True, capture_output=True, text=True).stdout
    return [line for line in told.splitlines() if str(below) in line]


@pytest.mark.root
@needs_btrfs
def test_both_ways_make_the_objects_of_a_small_tree(tmp_path: Path) -> None:
    words = [
        "--tree",
        "generated",
        "--files",
        "60",
        "--size-mib",
        "12",
        "--compress",
        "zstd",
        "--repeat",
        "1",
        "--json",
    ]
    env = {**os.environ, "TMPDIR": str(tmp_path), "PYTHONPATH": str(ROOT)}
    words = [sys.executable, "-m", "bench.encoded_writes", *words]
    ended = subprocess.run(words, capture_output=True, text=True, cwd=ROOT, env=env, check=False)
    assert ended.returncode == 0, ended.stderr
    rows = {(row["step"], row["way"]): row for row in json.loads(ended.stdout)["rows"]}
    assert set(rows) == {(step, way) for step in ("fill", "write") for way in ("encoded", "decompressed")}
    for (_, way), row in rows.items():
        assert (row["encoded_bytes"] > 8 * MIB) == (way == "encoded")
        assert row["seconds"] > 0 and row["cpu_s"] > 0 and row["used_bytes"] > MIB
        assert row["written_bytes"] >= row["used_bytes"] // 2
    assert not loops(tmp_path) and list(tmp_path.iterdir()) == []


@pytest.mark.root
@needs_btrfs
@pytest.mark.parametrize("compress", ["zstd", "none", "nonsense"])
def test_a_btrfs_is_gone_whatever_happens(tmp_path: Path, compress: str) -> None:
    """Also when the mount fails, as with an option that there is not."""
    place = tmp_path / "place"
    with pytest.raises((ValueError, ProgramFailed)), Btrfs(place, compress) as disk:
        assert loops(tmp_path) and mounted_at(disk.directory) is not None
        raise ValueError
    assert not loops(tmp_path) and list(tmp_path.iterdir()) == []


@pytest.mark.root
@needs_btrfs
def test_what_is_written_is_counted_once_it_is_on_the_device(tmp_path: Path) -> None:
    with Btrfs(tmp_path / "place", "none") as disk:
        meter = Meter(disk)
        for name in ("first", "second"):
            with meter.running():
                (disk.directory / name).write_bytes(os.urandom(8 * MIB))
            (disk.directory / f"{name} uncounted").write_bytes(os.urandom(8 * MIB))
            sync_filesystem(disk.directory)
        assert 16 * MIB <= meter.spent.written_bytes < 24 * MIB and 16 * MIB <= meter.spent.used_bytes < 24 * MIB
        assert meter.spent.seconds > 0


def test_figures_add_up() -> None:
    assert Spent(1.0, 2.0, 3, 4) + Spent(0.5, 0.5, 1, 1) == Spent(1.5, 2.5, 4, 5)


def test_threads_of_the_kernel_are_looked_at() -> None:
    """And this process is none of them: what it burns is not counted."""
    with KernelClock() as clock:
        sum(number * number for number in range(3_000_000))
    assert clock.seconds >= 0.0 and not set(clock._seen) & {str(os.getpid())}
    assert clock._seen


def test_without_the_programs_it_says_what_is_missing(tmp_path: Path) -> None:
    env = {**os.environ, "PATH": "/nowhere", "TMPDIR": str(tmp_path)}
    words = [sys.executable, "-m", "bench.encoded_writes", "--files", "1", "--size-mib", "1"]
    ended = subprocess.run(words, capture_output=True, text=True, cwd=ROOT, env=env, check=False)
    assert ended.returncode == 1 and ("btrfs-progs" in ended.stderr or "root" in ended.stderr)
    assert list(tmp_path.iterdir()) == []
