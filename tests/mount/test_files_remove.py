"""Removing directories: what is mounted in them stays."""

from __future__ import annotations

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
