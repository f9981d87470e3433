"""Limits on memory: those of control groups and of the process, and what mksquashfs is told of
them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from p2pdist.model.errors import P2PDistError
from p2pdist.package.image.memory import memory_groups
from p2pdist.package.image.squashfs import build_image

UNIFIED = "35 24 0:30 {root} /sys/fs/cgroup rw,nosuid - cgroup2 cgroup2 rw,nsdelegate\n"
DIVIDED = (
    "40 24 0:31 {root} /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\n"
    "41 24 0:32 / /sys/fs/cgroup/cpu rw - cgroup cgroup rw,cpu\n"
)


def groups(text: str, mounts: str, root: str = "/") -> list[str]:
    return list(dict.fromkeys(str(file.parent) for file in memory_groups(text, mounts.format(root=root))))


def test_the_group_of_a_process_and_those_above_it_count() -> None:
    top = "/sys/fs/cgroup"
    assert groups("0::/job/step\n", UNIFIED) == [f"{top}/job/step", f"{top}/job", top]
    assert groups("0::/\n", UNIFIED) == [top]
    assert groups("4:memory:/job\n0::/\n", DIVIDED) == [f"{top}/memory/job", f"{top}/memory"]
    assert groups("0::/pods/one/step\n", UNIFIED, root="/pods/one") == [f"{top}/step", top]


def test_a_group_out_of_sight_is_that_of_the_mount() -> None:
    """As in a container that has its own part of the hierarchy mounted and sees the names of the
    host."""
    assert groups("4:cpuset,memory:/docker/abc\n", DIVIDED, root="/docker/abc") == ["/sys/fs/cgroup/memory"]
    assert groups("4:memory:/other\n", DIVIDED, root="/docker/abc") == ["/sys/fs/cgroup/memory"]
    assert groups("0::/../sibling\n", UNIFIED) == ["/sys/fs/cgroup"]


@pytest.fixture
def group() -> Iterator[tuple[Path, Path]]:
    """A new control group, and its file with the limit on memory."""
    old, new = Path("/sys/fs/cgroup/memory"), Path("/sys/fs/cgroup")
    controllers = new / "cgroup.subtree_control"
    if not (old / "memory.limit_in_bytes").exists() and not (
        controllers.exists() and "memory" in controllers.read_text().split()
    ):
        pytest.skip("there is no control group with a memory controller here")
    top, limit = (old, "memory.limit_in_bytes") if (old / "memory.limit_in_bytes").exists() else (new, "memory.max")
    made = top / f"p2pdist-test-{os.getpid()}"
    try:
        made.mkdir()
    except OSError as error:
        pytest.skip(f"no control group can be made here: {error}")
    try:
        yield made, made / limit
    finally:
        made.rmdir()


@pytest.mark.root
def test_the_limit_of_a_group_is_found_from_within(group: tuple[Path, Path]) -> None:
    made, limit = group
    limit.write_text(str(200 << 20))
    code = f"""
from pathlib import Path
Path({str(made)!r}, "cgroup.procs").write_text("0")
from p2pdist.package.image.memory import memory_limit
print(memory_limit())
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert int(done.stdout) == 200 << 20


@pytest.fixture
def source(tmp_path: Path) -> Path:
    made = tmp_path / "source"
    made.mkdir()
    (made / "file").write_bytes(os.urandom(200_000))
    return made


def test_an_image_is_made_within_a_limit_on_address_space(source: Path, tmp_path: Path) -> None:
    """With the quarter of the machine's memory that mksquashfs plans with by itself it would run
    out of it."""
    code = f"""
import asyncio, os, resource, sys
from pathlib import Path
from p2pdist.package.image.squashfs import build_image
limit = min(1 << 30, os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 4)
resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
asyncio.run(build_image(Path({str(source)!r}), Path({str(tmp_path / "image")!r})))
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
    assert (tmp_path / "image").stat().st_size > 200_000


@pytest.mark.parametrize(
    ("sent", "said"), [(signal.SIGKILL, "signal 9.*memory"), (signal.SIGTERM, r"signal 15 \(Terminated\)")]
)
async def test_a_signal_is_named(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sent: int, said: str
) -> None:
    (tmp_path / "bin").mkdir()
    program = tmp_path / "bin/mksquashfs"
    program.write_text(f"#!/bin/sh\nkill -{sent:d} $$\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    with pytest.raises(P2PDistError, match=said):
        await build_image(source, tmp_path / "image")
