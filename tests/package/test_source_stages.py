"""Stand-ins for source directories."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from p2pdist.model.errors import Conflict, Corrupt
from p2pdist.origin.layout import LocalLayout
from p2pdist.origin.temporary_files import stage_directory
from p2pdist.package.source import stages
from p2pdist.package.source.ignore import matcher
from p2pdist.package.source.scan import with_parents
from p2pdist.package.source.stages import stage, walk
from p2pdist.removal import remove_tree


def listing(directory: Path) -> dict[str, tuple[int, int, bytes | str]]:
    """Mode, time and content of everything below a directory."""
    found: dict[str, tuple[int, int, bytes | str]] = {}
    for path in directory.rglob("*"):
        status = path.lstat()
        content: bytes | str = ""
        if path.is_symlink():
            content = os.readlink(path)
        elif path.is_file():
            content = path.read_bytes()
        found[str(path.relative_to(directory))] = (status.st_mode, status.st_mtime_ns, content)
    return found


@pytest.fixture
def source(tmp_path: Path) -> Path:
    made = tmp_path / "source"
    (made / "a/b").mkdir(parents=True)
    (made / "a/one").write_text("1")
    (made / "a/b/two").write_text("2")
    (made / "run").write_text("#!")
    (made / "run").chmod(0o755)
    (made / "link").symlink_to("nowhere/at all")
    os.link(made / "run", made / "a/again")
    for number, path in enumerate(sorted(made.rglob("*"))):
        os.utime(path, (1000 + number, 1000 + number), follow_symlinks=False)
    (made / "a/b").chmod(0o555)
    return made


def test_a_whole_copy_looks_the_same(source: Path, tmp_path: Path) -> None:
    assert stage(source, tmp_path / "made") == []
    assert listing(tmp_path / "made") == listing(source)
    assert (tmp_path / "made/run").stat().st_ino == (tmp_path / "made/a/again").stat().st_ino


def test_the_source_is_not_touched(source: Path, tmp_path: Path) -> None:
    """Not even the ctime of a file, by which packing tells that somebody writes to it."""
    before = {path: path.lstat() for path in source.rglob("*")}
    stage(source, tmp_path / "made", only=with_parents({b"run", b"a/one", b"link"}))
    remove_tree(tmp_path / "made")
    for path, status in before.items():
        assert (path.lstat().st_ctime_ns, path.lstat().st_nlink) == (status.st_ctime_ns, status.st_nlink)


def test_what_changes_meanwhile_is_told(source: Path, tmp_path: Path) -> None:
    """A file that is written to between the look at it and the end of the copy."""

    def ignore(path: bytes, _is_directory: bool) -> bool:
        if path == b"a/one":
            (source / "a/one").write_text("other")
        return False

    with pytest.raises(Corrupt, match="one changed"):
        stage(source, tmp_path / "made", ignore=ignore)


def test_what_vanishes_meanwhile_is_not_to_be_made_readable(source: Path, tmp_path: Path) -> None:
    """Of models and chosen files nothing is looked at again."""

    def ignore(path: bytes, _is_directory: bool) -> bool:
        for name in ("run", "link", "a/one", "a/again"):
            (source / name).unlink(missing_ok=True)
        return False

    with pytest.raises(Corrupt, match=f"{source}.* vanished while it was packed.*nothing writes there"):
        list(walk(source, ignore=ignore))


def test_on_another_file_system_it_is_copied(source: Path, tmp_path: Path) -> None:
    """With modes, times, symbolic links and the names of one file kept together; what cannot be
    copied is named."""
    if not os.path.isdir("/dev/shm") or os.stat("/dev/shm").st_dev == tmp_path.stat().st_dev:
        pytest.skip("there is no other file system")
    os.mkfifo(source / "fifo")
    with stage_directory(Path("/dev/shm"), f"{tmp_path} test") as place:
        dropped = stage(source, place / "made")
        found, expected = listing(place / "made"), listing(source)
        assert (place / "made/run").stat().st_ino == (place / "made/a/again").stat().st_ino
    assert [(item.path, item.what) for item in dropped] == [("fifo", "FIFO")]
    del expected["fifo"]
    assert found == expected
    assert not place.exists()


def test_holes_stay_holes(tmp_path: Path) -> None:
    """A copy of a sparse file would fill the disk of the layout."""
    (tmp_path / "source").mkdir()
    for name, last in (("middle", b"end"), ("last", b"")):
        with (tmp_path / "source" / name).open("wb") as file:
            file.write(b"begin")
            file.seek(16 << 20)
            file.write(last)
            file.truncate((16 << 20) + 100)
    stage(tmp_path / "source", tmp_path / "made", holes=True)
    for name in ("middle", "last"):
        assert (tmp_path / "made" / name).read_bytes() == (tmp_path / "source" / name).read_bytes()
        assert (tmp_path / "made" / name).stat().st_blocks * 512 < 1 << 20


@pytest.mark.parametrize("name", ["/proc/sys/kernel/ostype", "/sys/kernel/mm/transparent_hugepage/enabled"])
def test_a_file_is_copied_to_its_end(tmp_path: Path, name: str) -> None:
    """And not to the size that it is said to have: the kernel makes some as they are read."""
    if not os.access(name, os.R_OK):
        pytest.skip(f"this kernel has no {name}")
    with open(name, "rb") as source, (tmp_path / "made").open("wb") as target:
        stages._copy_bytes(source.fileno(), target.fileno(), holes=True)
    assert (tmp_path / "made").read_bytes() == Path(name).read_bytes()


def test_a_part_of_it(source: Path, tmp_path: Path) -> None:
    """A directory of which something is left out takes the time of what stays."""
    ignore = matcher(["one", "/link"])
    stage(source, tmp_path / "made", ignore=ignore)
    found, expected = listing(tmp_path / "made"), listing(source)
    assert set(found) == set(expected) - {"a/one", "link"}
    assert found["a"][1] == max(expected["a/again"][1], expected["a/b"][1])
    assert found["a/b"] == expected["a/b"]
    (source / "a/one").write_text("changed")
    stage(source, tmp_path / "again", ignore=ignore)
    assert listing(tmp_path / "again") == found


def test_only_what_is_named(source: Path, tmp_path: Path) -> None:
    """A directory stands for itself, not for what is in it."""
    stage(source, tmp_path / "made", only=with_parents({b"a/b", b"run"}))
    assert set(listing(tmp_path / "made")) == {"a", "a/b", "run"}
    assert [item.path for item in walk(source, only={b"a", b"a/b/two"})] == [b"a"]


def test_files_are_replaced_and_the_source_is_not(source: Path, tmp_path: Path) -> None:
    before = listing(source)
    (tmp_path / "other").write_text("other")
    stage(source, tmp_path / "made", replaced={b"run": tmp_path / "other", b"a/one": None})
    found = listing(tmp_path / "made")
    assert found["run"][2] == b"other"
    assert stat.S_IMODE(found["run"][0]) == 0o755
    assert found["a/again"][2] == b"#!"
    assert "a/one" not in found
    remove_tree(tmp_path / "made")
    assert listing(source) == before


def test_a_staging_place_is_for_one_and_cleans_up(tmp_path: Path) -> None:
    """Also after a process that was killed in it."""
    with stage_directory(tmp_path, "x") as first:
        (first / "read-only").mkdir(mode=0o555)
        with pytest.raises(Conflict, match="x"), stage_directory(tmp_path, "x"):
            pass
        assert (first / "read-only").is_dir()
        with stage_directory(tmp_path, "y") as other:
            assert other != first
    assert list(tmp_path.iterdir()) == []
    first.mkdir(parents=True)
    (first / "left").write_text("")
    with stage_directory(tmp_path, "x") as again:
        assert again == first
        assert not list(again.iterdir())


def test_two_may_do_the_same_in_a_layout(tmp_path: Path) -> None:
    """The second has a directory of its own, and both leave nothing."""
    layout = LocalLayout(tmp_path)
    with layout.stage_directory("x") as first, layout.stage_directory("x") as second:
        assert first != second
        for place in (first, second):
            (place / "closed").mkdir()
            (place / "closed/file").touch()
            (place / "closed").chmod(0o500)
    assert list((tmp_path / ".incoming").iterdir()) == []
    with layout.stage_directory("x") as again:
        assert again == first
