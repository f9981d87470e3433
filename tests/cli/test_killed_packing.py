"""What a packing that was killed leaves behind."""

from __future__ import annotations

import os
import random
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

LIMIT_S = 30.0


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """Takes seconds to pack, and the more so at the highest level."""
    made = tmp_path / "source"
    made.mkdir()
    randomly = random.Random(1)
    words = [randomly.randbytes(9) for _ in range(4096)]
    for number in range(24):
        (made / f"{number:02}").write_bytes(b"".join(randomly.choices(words, k=300_000)))
    return made


def children(pid: int) -> dict[int, str]:
    """Processes whose parent is `pid`: pid to name."""
    found = {}
    for directory in Path("/proc").iterdir():
        if directory.name.isdecimal():
            try:
                name, _, rest = (directory / "stat").read_text().rpartition(")")
            except OSError:
                continue
            if int(rest.split()[1]) == pid:
                found[int(directory.name)] = name.partition("(")[2]
    return found


def wait_for(what: Callable[[], bool]) -> None:
    end = time.monotonic() + LIMIT_S
    while not what():
        assert time.monotonic() < end
        time.sleep(0.01)


def drafts(layout: Path) -> list[Path]:
    return [path for path in (layout / ".incoming").rglob("*") if path.is_file() and path.stat().st_size]


@contextmanager
def packing(source: Path, layout: Path, form: str, *more: str) -> Iterator[subprocess.Popen[bytes]]:
    """A packing that has written something."""
    command = [sys.executable, "-m", "p2pdist.cli.main", "pack", str(source), "-t", f"{form}:1", "--format", form]
    with subprocess.Popen([*command, "--layout", str(layout), *more], stderr=subprocess.DEVNULL) as process:
        try:
            wait_for(lambda: bool(drafts(layout)))
            assert process.poll() is None
            yield process
        finally:
            process.kill()


def test_mksquashfs_ends_with_a_packing_that_is_killed(source: Path, tmp_path: Path) -> None:
    """At the highest level it would go on for a long time."""
    with packing(source, tmp_path / "layout", "squashfs", "--level", "22") as process:
        ((writer, name),) = children(process.pid).items()
        assert name == "mksquashfs"
        opened = os.pidfd_open(writer)
        try:
            process.kill()
            assert select.select([opened], [], [], 3.0)[0] == [opened]
        finally:
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(opened, signal.SIGKILL)
            os.close(opened)
