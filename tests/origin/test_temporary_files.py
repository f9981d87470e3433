"""Which unfinished files are taken for abandoned, and which never."""

from __future__ import annotations

import os
import sys
import threading
import time
from pathlib import Path

import pytest

from p2pdist.origin.temporary_files import (
    ABANDONED_AFTER_S,
    STAGE,
    TEMPORARY,
    abandoned,
    boot_mark,
    new_directory,
    new_file,
    stage_directory,
)

OTHER = f"{TEMPORARY}00000000-0000-4000-8000-000000000000-"
"""Of another boot: its locks may be out of sight."""


def make_old(path: Path) -> None:
    old = time.time() - ABANDONED_AFTER_S - 10
    for each in (*path.rglob("*"), path):
        os.utime(each, (old, old))


def named(directory: Path, *, remove: bool = True) -> set[str]:
    return {name for name, _ in abandoned(directory, remove=remove)}


def test_what_is_locked_stays_however_old(tmp_path: Path) -> None:
    handle, file = new_file(tmp_path)
    with new_directory(tmp_path) as directory:
        (directory / "image").write_bytes(b"x")
        make_old(file)
        make_old(directory)
        assert named(tmp_path) == set()
        assert (directory / "image").exists() and file.exists()
    os.close(handle)
    assert not directory.exists()
    assert list(abandoned(tmp_path, remove=True)) == [(file.name, 0)]
    assert not file.exists()


@pytest.mark.parametrize("remove", [False, True])
@pytest.mark.parametrize("kind", ["file", "directory", "stage"])
def test_what_is_not_locked_goes(tmp_path: Path, kind: str, remove: bool) -> None:
    """At once where it was made under this kernel since it started, else when nobody wrote to it
    for a day."""
    for prefix in (boot_mark(), OTHER, STAGE, ""):
        path = tmp_path / f"{prefix}{kind}"
        if kind == "file":
            path.write_bytes(b"12345")
            continue
        (path / "deep").mkdir(parents=True)
        (path / "deep/file").write_bytes(b"12345")
        (path / "deep").chmod(0o500)
        if prefix == STAGE:
            (path / boot_mark()).touch()
    ours = {boot_mark() + kind} | ({STAGE + kind} if kind != "file" else set())
    assert set(abandoned(tmp_path, remove=remove)) == {(name, 5) for name in ours}
    assert {path.name for path in tmp_path.iterdir()} & ours == (set() if remove else ours)
    for path in list(tmp_path.iterdir()):
        make_old(path)
    old = {OTHER + kind} | ({STAGE + kind, kind} if kind == "file" else set())
    assert named(tmp_path, remove=remove) == (old if remove else old | ours)


def test_who_writes_into_an_old_directory_of_another_boot_keeps_it(tmp_path: Path) -> None:
    path = tmp_path / f"{OTHER}1"
    path.mkdir()
    (path / "image").write_bytes(b"x")
    os.utime(path, (0, 0))
    assert named(tmp_path) == set()


def test_whoever_makes_one_while_others_tidy_up_keeps_it(tmp_path: Path) -> None:
    """A draft is there for a moment before it can be locked."""
    ended = threading.Event()

    def tidy() -> None:
        while not ended.is_set():
            named(tmp_path)

    threads = [threading.Thread(target=tidy) for _ in range(3)]
    for thread in threads:
        thread.start()
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        for _ in range(300):
            handle, file = new_file(tmp_path)
            with new_directory(tmp_path) as directory:
                (directory / "image").touch()
                assert file.exists()
            os.close(handle)
    finally:
        sys.setswitchinterval(before)
        ended.set()
        for thread in threads:
            thread.join()
    named(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_stage_that_another_removes_as_well_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One machine does not see the locks of another everywhere. What was made of it is done."""
    rmdir = os.rmdir

    def removed_twice(path: bytes, *, dir_fd: int | None = None) -> None:
        rmdir(path, dir_fd=dir_fd)
        rmdir(path, dir_fd=dir_fd)

    with stage_directory(tmp_path, "x") as made:
        (made / "d").mkdir()
        monkeypatch.setattr(os, "rmdir", removed_twice)


def test_what_is_nested_deeper_than_a_program_calls_itself_goes(tmp_path: Path) -> None:
    """Also what a killed process left: nothing could be packed beside it any more."""

    def fill(place: Path) -> None:
        place.mkdir(exist_ok=True)
        for _ in range(sys.getrecursionlimit()):
            place /= "d"
            place.mkdir()
        (place / "file").write_bytes(b"12345")

    with stage_directory(tmp_path, "x") as made:
        fill(made)
    with new_directory(tmp_path) as made:
        fill(made)
    assert list(tmp_path.iterdir()) == []
    fill(tmp_path / f"{boot_mark()}1")
    assert list(abandoned(tmp_path, remove=True)) == [(f"{boot_mark()}1", 5)]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("kind", ["directory", "link", "link to nothing", "file"])
def test_a_stage_is_in_nothing_that_another_user_made(tmp_path: Path, kind: str) -> None:
    """Its name can be foreseen, and any user may make it in /tmp: what is written there would be
    that user's to exchange. A link had its victim try for ever."""
    with stage_directory(tmp_path, "x") as made:
        planted = made.parent
    (tmp_path / "elsewhere").mkdir()
    if kind == "directory":
        planted.mkdir(mode=0o777)
        (planted / "work").symlink_to(tmp_path / "elsewhere")
        if os.geteuid():
            pytest.skip("only root can give a directory to another user")
        os.chown(planted, 65534, 65534)
    elif kind == "file":
        planted.touch()
    else:
        planted.symlink_to(tmp_path / ("elsewhere" if kind == "link" else "nowhere"))
    with stage_directory(tmp_path, "x") as made:
        assert made.parent != planted
        assert made.parent.name.startswith(planted.name)
        assert made.parent.stat().st_mode & 0o777 == 0o700
        (made / "file").touch()
        assert named(tmp_path) == set()
    assert {entry.name for entry in tmp_path.iterdir()} == {"elsewhere", planted.name}
    assert not any((tmp_path / "elsewhere").iterdir())
