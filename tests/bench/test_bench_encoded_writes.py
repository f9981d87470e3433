"""The benchmark of encoded writes: it runs to its end on a small tree, and neither mount nor loop
device nor file outlives it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from itertools import product
from pathlib import Path

import pytest

from bench.btrfs import Btrfs, KernelClock, Lies, Meter, Spent, device_image
from bench.encoded_writes import PROCESS_BYTES, check_memory, missing
from bench.place import NoRoom, available_memory
from bench.processes import ProgramFailed
from p2pdist.mount.kernel import mounted_at
from p2pdist.store.disk import sync_filesystem

ROOT = Path(__file__).resolve().parents[2]
MIB = 1 << 20

needs_btrfs = pytest.mark.skipif(bool(missing()), reason=missing())


def is_free(device: str) -> bool:
    """Whether a loop device has no image, which one that is detached loses a moment later."""
    deadline = time.monotonic() + 5.0
    while (attached := Path("/sys/block", Path(device).name, "loop").exists()) and time.monotonic() < deadline:
        time.sleep(0.02)
    return not attached


@pytest.mark.slow
@pytest.mark.root
@needs_btrfs
def test_both_ways_make_the_objects_of_a_small_tree(tmp_path: Path) -> None:
    """Wherever the image of the filesystem lies."""
    words = [
        "--tree",
        "generated",
        "--files",
        "60",
        "--size-mib",
        "12",
        "--compress",
        "zstd",
        "--image",
        "memory",
        "file",
        "--repeat",
        "1",
        "--json",
    ]
    env = {**os.environ, "TMPDIR": str(tmp_path), "PYTHONPATH": str(ROOT)}
    words = [sys.executable, "-m", "bench.encoded_writes", *words]
    ended = subprocess.run(words, capture_output=True, text=True, cwd=ROOT, env=env, check=False)
    assert ended.returncode == 0, ended.stderr
    rows = {(row["image"], row["step"], row["way"]): row for row in json.loads(ended.stdout)["rows"]}
    assert set(rows) == set(product(("memory", "file"), ("fill", "write"), ("encoded", "decompressed")))
    for (_, _, way), row in rows.items():
        assert (row["encoded_bytes"] > 8 * MIB) == (way == "encoded")
        assert row["seconds"] > 0 and row["cpu_s"] > 0 and row["used_bytes"] > MIB
        assert row["written_bytes"] >= row["used_bytes"] // 2
    assert list(tmp_path.iterdir()) == []


@pytest.mark.root
@needs_btrfs
@pytest.mark.parametrize("compress", ["zstd", "none", "nonsense"])
@pytest.mark.parametrize("lies", ["memory", "file"])
def test_a_btrfs_is_gone_whatever_happens(tmp_path: Path, lies: Lies, compress: str) -> None:
    """Also when the mount fails, as with an option that there is not."""
    with device_image(tmp_path, lies) as image:
        disk = Btrfs(tmp_path / "place", image, compress)
        with pytest.raises((ValueError, ProgramFailed)), disk:
            assert mounted_at(disk.directory) is not None
            raise ValueError
        assert disk.device and is_free(disk.device)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.root
@needs_btrfs
@pytest.mark.parametrize("lies", ["memory", "file"])
def test_two_images_at_once(tmp_path: Path, lies: Lies) -> None:
    with (
        device_image(tmp_path, lies) as one,
        Btrfs(tmp_path / "one", one, "none"),
        device_image(tmp_path, lies) as other,
        Btrfs(tmp_path / "other", other, "none") as disk,
    ):
        assert disk.directory.is_mount()


@pytest.mark.root
@needs_btrfs
@pytest.mark.parametrize("lies", ["memory", "file"])
def test_an_image_bears_one_new_filesystem_after_another(tmp_path: Path, lies: Lies) -> None:
    with device_image(tmp_path, lies) as image:
        for number in range(2):
            with Btrfs(tmp_path / "place", image, "none") as disk:
                assert list(disk.directory.iterdir()) == []
                (disk.directory / str(number)).write_bytes(os.urandom(MIB))


def test_an_image_in_memory_that_does_not_fit_is_refused() -> None:
    check_memory(1, 1)
    with pytest.raises(NoRoom, match="--image file"):
        check_memory(max(1, available_memory() - PROCESS_BYTES), 1)


@pytest.mark.root
@needs_btrfs
def test_what_is_written_is_counted_once_it_is_on_the_device(tmp_path: Path) -> None:
    with device_image(tmp_path, "file") as image, Btrfs(tmp_path / "place", image, "none") as disk:
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
