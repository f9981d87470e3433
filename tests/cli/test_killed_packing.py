"""What a packing or push that was killed leaves behind: no process, and nothing that stays."""

from __future__ import annotations

import json
import os
import random
import select
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import programs
import pytest
from programs import Program
from test_cli_main import run
from waits import wait_until

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


def drafts(layout: Path) -> list[Path]:
    """Files in which something stands already."""
    found = (Path(place, name) for place, _, names in os.walk(layout / ".incoming") for name in names)
    return [path for path in found if path.exists() and path.stat().st_size]


@contextmanager
def packing(source: Path, layout: Path, form: str, *more: str) -> Iterator[Program]:
    """A packing that has written something."""
    words = ["pack", source, "-t", f"{form}:1", "--format", form, "--layout", layout, *more]
    with programs.start(*words, stderr=subprocess.DEVNULL) as process:
        try:
            wait_until(lambda: bool(drafts(layout)))
            assert process.poll() is None
            yield process
        finally:
            process.kill()


def packed(source: Path, layout: Path, form: str) -> str:
    done = run("pack", "--json", source, "-t", f"{form}:1", "--format", form, "--layout", layout)
    assert done.returncode == 0, done.stderr
    return str(json.loads(done.stdout)["digest"])


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


@pytest.mark.slow
@pytest.mark.parametrize("form", ["squashfs", "tree"])
def test_the_next_packing_removes_what_a_killed_one_left(source: Path, tmp_path: Path, form: str) -> None:
    expected = packed(source, tmp_path / "undisturbed", form)
    layout = tmp_path / "layout"
    with packing(source, layout, form) as process:
        process.kill()
        process.wait()
        assert drafts(layout)
    assert packed(source, layout, form) == expected
    assert list((layout / ".incoming").iterdir()) == []


@pytest.mark.slow
def test_a_collection_removes_what_killed_packings_left(source: Path, tmp_path: Path) -> None:
    """Also stand-ins for sources, which are as large as these."""
    layout = tmp_path / "layout"
    (tmp_path / "small").mkdir()
    packed(tmp_path / "small", layout, "tree")
    with packing(source, layout, "tree") as process:
        process.send_signal(signal.SIGSTOP)
        with packing(source, layout, "squashfs", "--level", "22", "--ignore", "23"):
            wait_until(lambda: len({path.relative_to(layout / ".incoming").parts[0] for path in drafts(layout)}) == 3)
    left = sum(path.stat().st_size for path in drafts(layout))
    for more, count in ((["--dry-run"], 3), ([], 3), ([], 0)):
        done = json.loads(run("gc", "--json", "--layout", layout, *more).stdout)
        assert done["unfinished_removed"] == count
        assert done["bytes_freed"] == (left if count else 0)
    assert list((layout / ".incoming").iterdir()) == []


@pytest.mark.slow
@pytest.mark.parametrize("form", ["squashfs", "tree"])
def test_what_is_being_packed_stays(source: Path, tmp_path: Path, form: str) -> None:
    """However long nothing has been written to it: another packing and a collection pass by."""
    layout = tmp_path / "layout"
    (tmp_path / "small").mkdir()
    with packing(source, layout, form) as process:
        process.send_signal(signal.SIGSTOP)
        before = drafts(layout)
        for path in (*before, *(path.parent for path in before)):
            os.utime(path, (0, 0))
        packed(tmp_path / "small", layout, "tree")
        assert json.loads(run("gc", "--json", "--layout", layout).stdout)["unfinished_removed"] == 0
        assert drafts(layout) == before
        process.send_signal(signal.SIGCONT)
        assert process.wait(LIMIT_S) == 0
    assert list((layout / ".incoming").iterdir()) == []
