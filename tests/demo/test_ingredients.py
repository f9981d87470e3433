"""What the demo packs is what it says it packs."""

from __future__ import annotations

from pathlib import Path

import pytest

from p2pdist.cli.verbs.demo.ingredients import check_space, measure, pad, write_app
from p2pdist.cli.verbs.demo.script import SOCKET_PATH_MAX, remove, socket_directory
from p2pdist.model.errors import DiskFull


def contents(directory: Path) -> dict[str, bytes]:
    return {str(path.relative_to(directory)): path.read_bytes() for path in directory.rglob("*") if path.is_file()}


def test_the_second_version_changes_one_file(tmp_path: Path) -> None:
    """All but settings.json is equal, byte for byte, and twice the same version is the same."""
    write_app(tmp_path, version=1)
    first = contents(tmp_path)
    changed = write_app(tmp_path, version=2)
    second = contents(tmp_path)
    assert {name for name in second if second[name] != first.get(name)} == {str(changed.relative_to(tmp_path))}
    assert write_app(tmp_path / "again", version=1)
    assert contents(tmp_path / "again") == first


async def test_padding_reaches_the_size_asked_for(tmp_path: Path) -> None:
    """To the byte, counted from what was there."""
    await pad(tmp_path, up_to=3_000_000, present=500_000)
    assert measure(tmp_path) == (1, 2_500_000)


def test_too_little_space_is_said_before_anything_is_made(tmp_path: Path) -> None:
    """With the bytes needed and free."""
    with pytest.raises(DiskFull) as found:
        check_space(tmp_path, agents=8, base_bytes=1 << 50, unpacks=False)
    assert found.value.details["needed"] > found.value.details["free"]


def test_sockets_get_a_short_path(tmp_path: Path) -> None:
    """A long TMPDIR does not make the paths of Unix sockets too long."""
    short, long = Path("/tmp/x"), tmp_path / ("long" * 30)
    assert socket_directory(short) == short
    made = socket_directory(long)
    try:
        assert len(str(made / "host000.sock")) <= SOCKET_PATH_MAX
    finally:
        assert remove(made) == []


def test_removal_copes_with_directories_that_cannot_be_written(tmp_path: Path) -> None:
    """A package may hold such directories, and an unpacked copy then does."""
    inner = tmp_path / "place" / "locked"
    inner.mkdir(parents=True)
    (inner / "file").write_text("x")
    inner.chmod(0o500)
    assert remove(tmp_path / "place") == []
    assert not (tmp_path / "place").exists()
