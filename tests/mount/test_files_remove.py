"""Removing directories: what is mounted in them stays."""

from __future__ import annotations

import errno
import os
import subprocess
from pathlib import Path

import pytest

from p2pdist.mount import kernel
from p2pdist.removal import remove_tree


@pytest.mark.root
@pytest.mark.parametrize("kind", ["another file system", "the same one"])
@pytest.mark.parametrize("place", ["top/mounted", "top/a/b/mounted"])
def test_what_is_mounted_inside_is_not_removed(tmp_path: Path, kind: str, place: str) -> None:
    """Neither is a directory that is shown at a second place, whose device tells nothing."""
    elsewhere, point = tmp_path / "elsewhere", tmp_path / place
    elsewhere.mkdir()
    (elsewhere / "kept").write_text("x")
    point.mkdir(parents=True)
    (tmp_path / "top" / "file").write_text("x")
    if kind == "the same one":
        subprocess.run(["mount", "--bind", elsewhere, point], check=True)
    else:
        kernel.mount("test", point, "tmpfs")
        (point / "kept").write_text("x")
    points = [entry.point for entry in kernel.mounted() if tmp_path in entry.point.parents]
    try:
        with pytest.raises(OSError, match=r"mounted there|busy"):
            remove_tree(tmp_path / "top")
    finally:
        (point,) = [entry.point for entry in kernel.mounted() if tmp_path in entry.point.parents]
        found = [path.name for path in point.iterdir()]
        kernel.unmount(point)
    assert len(points) == 1 and found == ["kept"]
    remove_tree(tmp_path / "top")
    assert not (tmp_path / "top").exists()
    assert (elsewhere / "kept").exists()


def test_only_what_is_in_it_goes(tmp_path: Path) -> None:
    """Hard links have another name, links lead nowhere, and a name may be any."""
    (tmp_path / "kept").write_text("x")
    top = tmp_path / "top"
    (top / "\udcff\n" / "d").mkdir(parents=True)
    (top / "hard").hardlink_to(tmp_path / "kept")
    (top / "\udcff\n" / "soft").symlink_to(tmp_path)
    remove_tree(top, keep=True)
    assert not list(top.iterdir())
    remove_tree(top)
    assert [path.name for path in tmp_path.iterdir()] == ["kept"]


def test_removing_takes_no_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A full disk has none for an entry at another place, and has to be emptied."""

    def full(*_arguments: object, **_more: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    for name in ("a/b/c", "a/d", "e"):
        (tmp_path / "top" / name).mkdir(parents=True)
        (tmp_path / "top" / name / "file").write_text("x")
    for name in ("rename", "replace", "link", "mkdir"):
        monkeypatch.setattr(os, name, full)
    remove_tree(tmp_path / "top")
    assert not (tmp_path / "top").exists()


def test_what_another_moved_meanwhile_leads_nowhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "top/a/b").mkdir(parents=True)
    (tmp_path / "top/a/b/file").write_text("x")
    (tmp_path / "elsewhere/a").mkdir(parents=True)
    unlink = os.unlink

    def unlink_and_move(name: bytes, *, dir_fd: int) -> None:
        unlink(name, dir_fd=dir_fd)
        (tmp_path / "top/a/b").rename(tmp_path / "elsewhere/b")

    monkeypatch.setattr(os, "unlink", unlink_and_move)
    with pytest.raises(FileNotFoundError, match="moved"):
        remove_tree(tmp_path / "top")
    assert {path.name for path in (tmp_path / "elsewhere").iterdir()} == {"a", "b"}
