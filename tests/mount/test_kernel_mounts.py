"""Mounts found by their points, whatever the names."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from p2pdist.mount.kernel import mounted, mounted_at, spread_below


@contextmanager
def mount_at(target: Path) -> Iterator[None]:
    if os.geteuid() != 0:
        pytest.skip("needs root: mounts")
    target.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "some", str(target)], check=True)
    try:
        yield
    finally:
        subprocess.run(["umount", str(target)], check=True)


@pytest.mark.parametrize("name", ["plain", "a b", "a\nb", "a\rb", "a\x0bb\x1c", "a\\b", "a\\040b", "\udcff"])
def test_a_mount_is_found_at_its_point(tmp_path: Path, name: str) -> None:
    with mount_at(tmp_path / name):
        found = mounted_at(tmp_path / name)
        assert found is not None and (found.point, found.kind) == (tmp_path / name, "tmpfs")
        assert found in mounted()
    assert mounted_at(tmp_path / name) is None


def test_a_name_that_looks_like_another_one_in_the_table_of_mounts_is_none(tmp_path: Path) -> None:
    """The kernel shows the space of the one as what the other is called."""
    with mount_at(tmp_path / "a b"):
        assert mounted_at(tmp_path / "a\\040b") is None


def test_a_file_system_that_does_not_spread_directories_is_told_of(tmp_path: Path) -> None:
    with mount_at(tmp_path / "other"):
        assert not spread_below(tmp_path / "other")
    with pytest.raises(OSError):
        spread_below(tmp_path / "none")
