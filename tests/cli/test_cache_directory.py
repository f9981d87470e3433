"""The directory of a compile cache: nobody else's to write to, and filled with plain files."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from p2pdist.cli.verbs.cache.directory import _copy_missing, make_directory
from p2pdist.model.errors import Refused

NOBODY = 65534


@pytest.fixture
def own() -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as directory:
        yield Path(directory)


@pytest.mark.parametrize("mode", [0o777, 0o707, 0o770])
def test_a_directory_below_one_that_others_write_to_is_refused(own: Path, mode: int) -> None:
    """Another user could exchange the directory after it has been looked at."""
    above = own / "above"
    above.mkdir()
    above.chmod(mode)
    if mode == 0o770:
        os.chown(above, -1, NOBODY) if os.geteuid() == 0 else pytest.skip("needs root")
    with pytest.raises(Refused, match="can write to"):
        make_directory(above / "cache")
    above.chmod(0o1777)
    make_directory(above / "cache")


def test_a_directory_behind_a_link_is_looked_at_where_it_is(own: Path) -> None:
    (own / "open").mkdir()
    (own / "link").symlink_to("open")
    (own / "open").chmod(0o777)
    with pytest.raises(Refused, match="can write to"):
        make_directory(own / "link" / "cache")
    (own / "open").chmod(0o755)
    make_directory(own / "link" / "cache")
    if os.geteuid() == 0:
        os.chown(own / "link", 12345, -1, follow_symlinks=False)
        with pytest.raises(Refused, match="can write to"):
            make_directory(own / "link" / "cache")


def test_directories_that_are_made_are_the_user_s_alone(own: Path) -> None:
    before = os.umask(0o002)
    try:
        for _ in range(2):
            make_directory(own / "a" / "b" / "cache")
    finally:
        os.umask(before)
    assert all(path.stat().st_mode & 0o777 == 0o700 for path in (own / "a", own / "a/b", own / "a/b/cache/numba"))


def test_what_a_package_holds_besides_plain_files_is_left_out(own: Path) -> None:
    source, target, secret = own / "source", own / "target", own / "secret"
    secret.write_text("secret")
    (source / "numba" / "deep").mkdir(parents=True)
    (source / "numba" / "link").symlink_to(secret)
    (source / "numba" / "directory").symlink_to(own)
    (source / "cuda").symlink_to(own)
    os.mkfifo(source / "numba" / "pipe")
    names = ["\u6587" * 85, "n" * 255, "new\nline", "-rf"]
    for name in names:
        (source / "numba" / "deep" / name).write_text(name)
        (source / "numba" / "deep" / name).chmod(0o6777)
    make_directory(target)
    assert _copy_missing(source, target).files == len(names)
    assert sorted(os.listdir(target / "numba")) == ["deep"] and not os.listdir(target / "cuda")
    for name in names:
        path = target / "numba" / "deep" / name
        assert path.read_text() == name and path.stat().st_mode & 0o7777 == 0o700
    assert len(os.listdir(target / "numba" / "deep")) == len(names)
    (target / "triton").rmdir()
    (target / "triton").symlink_to(own)
    (source / "triton").mkdir()
    (source / "triton" / "secret").write_text("other")
    with pytest.raises(Refused):
        _copy_missing(source, target)
    assert secret.read_text() == "secret"
