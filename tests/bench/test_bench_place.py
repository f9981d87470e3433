"""A benchmark begins only where there is room, and leaves nothing behind, whatever is mounted there
and however it ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from bench.edit_to_start import needed_bytes
from bench.place import NoRoom, place, remove
from p2pdist.mount.kernel import mounted_at

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def full(tmp_path: Path) -> Path:
    """Files in several depths, links that lead out of it, an awkward name."""
    made = tmp_path / "full"
    for number in range(40):
        place = made / f"store{number % 3}" / f"{number:02}" / "below"
        place.mkdir(parents=True)
        (place / "a b\n-rf").touch()
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside/kept").touch()
    (made / "link").symlink_to(tmp_path / "outside")
    (made / "store0/link").symlink_to(tmp_path / "outside")
    (made / "agent.log").touch()
    return made


def test_all_is_removed_and_nothing_else(full: Path) -> None:
    assert remove(full)
    assert not full.exists()
    assert (full.parent / "outside/kept").exists()


def test_no_time_removes_not_all_and_says_so(full: Path) -> None:
    assert not remove(full, within_s=0.0)


@pytest.mark.skipif(os.geteuid() != 0, reason="mounts need root")
def test_what_is_mounted_there_is_left_whole(full: Path) -> None:
    source, target = full.parent / "outside", full / "shown here"
    target.mkdir()
    subprocess.run(["mount", "--bind", str(source), str(target)], check=True)
    try:
        assert mounted_at(target) is not None
        assert remove(full)
        assert mounted_at(target) is None
    finally:
        subprocess.run(["umount", "--lazy", str(target)], check=False, capture_output=True)
    assert (source / "kept").exists() and not full.exists()


def test_without_room_nothing_begins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with pytest.raises(NoRoom, match="GB are needed"), place("bench-", needed=1 << 60):
        pytest.fail("it began")
    assert not list(tmp_path.iterdir())
    with place("bench-", needed=0) as made:
        (made / "file").touch()
    assert not list(tmp_path.iterdir())


def test_a_benchmark_that_is_told_to_end_tidies_up(tmp_path: Path) -> None:
    program = (
        "import time\nfrom bench.place import place\n"
        "with place('bench-', needed=0) as made:\n    (made / 'file').touch()\n    print(made, flush=True)\n    time.sleep(60)\n"
    )
    words = [sys.executable, "-c", program]
    with subprocess.Popen(
        words, stdout=subprocess.PIPE, text=True, cwd=ROOT, env={**os.environ, "TMPDIR": str(tmp_path)}
    ) as process:
        assert process.stdout is not None
        made = Path(process.stdout.readline().strip())
        assert (made / "file").exists()
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 128 + signal.SIGTERM
    assert not list(tmp_path.iterdir())


def test_the_room_that_is_asked_for_grows_with_everything() -> None:
    least = needed_bytes(1000, 1 << 30, 2, 1)
    assert least > 4 * (1 << 30)  # the source, two agents, and what is packed
    assert all(more > least for more in (needed_bytes(1001, 1 << 30, 2, 1), needed_bytes(1000, 1 << 31, 2, 1)))
    assert all(more > least for more in (needed_bytes(1000, 1 << 30, 3, 1), needed_bytes(1000, 1 << 30, 2, 2)))
