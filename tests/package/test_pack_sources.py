"""The directory that is packed, by whatever name: links to it, paths relative to the working
directory, and names of nothing."""

from __future__ import annotations

import errno
import os
import py_compile
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from p2pdist.model.errors import NotFound, UsageError
from p2pdist.model.manifest import parse_reference
from p2pdist.mount import kernel
from p2pdist.origin.layout import LocalLayout
from p2pdist.package.layers import PackOptions, pack_layers, plain_layer, project_layers
from p2pdist.package.pack import Packed, pack
from p2pdist.package.source.project import read_project
from p2pdist.package.source.scan import scan_tree, source_directory, unreadable

REFERENCE = parse_reference("app:v1")


@pytest.fixture
def release(tmp_path: Path) -> Path:
    """A directory, `current`, a link to it, `newest`, a link to that, and `all`, a link to the
    directory above."""
    made = tmp_path / "releases/7"
    made.mkdir(parents=True)
    (made / "module.py").write_text("x = 1\n")
    (tmp_path / "current").symlink_to("releases/7")
    (tmp_path / "newest").symlink_to("current")
    (tmp_path / "all").symlink_to(tmp_path / "releases")
    return made


NAMES = ["current", "current/", "newest", "all/7", "./current", "releases/../current"]


@pytest.mark.parametrize("name", NAMES)
def test_every_name_leads_to_the_directory(
    release: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.chdir(tmp_path)
    assert source_directory(Path(name)) == release
    assert source_directory(tmp_path / name) == release


def test_a_name_of_nothing_is_said(release: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "dangling").symlink_to("releases/8")
    (tmp_path / "circle").symlink_to("circle")
    with pytest.raises(NotFound, match="link to releases/8"):
        source_directory(tmp_path / "dangling")
    with pytest.raises(UsageError, match="leads to itself"):
        source_directory(tmp_path / "circle")
    for name in ("absent", "releases/7/module.py/below"):
        with pytest.raises(NotFound, match="no directory"):
            source_directory(tmp_path / name)
    with pytest.raises(UsageError, match="not a directory"):
        source_directory(release / "module.py")
    with pytest.raises(UsageError, match="not a path"):
        source_directory(Path("a\0b"))
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    with pytest.raises(NotFound, match="working directory was removed"):
        source_directory(Path("releases"))


@pytest.mark.parametrize("form", ["squashfs", "tree"])
async def test_a_link_to_a_directory_is_packed_as_the_directory(
    release: Path, tmp_path: Path, layout: LocalLayout, form: Any
) -> None:
    plain = await pack(release, REFERENCE, layout, format=form)
    assert plain.files == 1
    assert (await pack(tmp_path / "newest", REFERENCE, layout, format=form)).digest == plain.digest
    (tmp_path / "p2pdist.toml").write_text('[[layer]]\nsource = "current"\n[[layer]]\nsource = "newest/"\n')
    both, _ = await pack_layers(
        project_layers(read_project(tmp_path / "p2pdist.toml"), form), REFERENCE, layout, PackOptions()
    )
    assert both.layers == 2 * plain.layers


async def test_reproducible_layers_do_not_depend_on_how_a_directory_is_named(
    release: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Source and layout may be relative, although the compiler runs in another directory."""
    py_compile.compile(str(release / "module.py"))
    monkeypatch.chdir(tmp_path)
    found: list[tuple[Packed, list[str]]] = []
    for source, place in ((release, tmp_path / "one"), (Path("releases/7"), Path("two")), (Path("current"), Path("3"))):
        layout = LocalLayout(place)
        try:
            making = PackOptions(mtime=0, reproducible=True)
            found.append(await pack_layers([plain_layer(source, "squashfs")], REFERENCE, layout, making))
        finally:
            await layout.close()
    assert len({packed.digest for packed, _ in found}) == 1
    assert [(packed.files, notes) for packed, notes in found] == 3 * [(2, [])]
    assert os.path.isdir("two")


@pytest.mark.root
def test_a_source_that_cannot_be_reached_is_said(tmp_path: Path) -> None:
    """By every verb that takes a directory, and without a traceback."""
    (tmp_path / "closed/in").mkdir(parents=True)
    tmp_path.chmod(0o755)
    (tmp_path / "closed").chmod(0o700)
    (tmp_path / "mine").mkdir()
    os.chown(tmp_path / "mine", 65534, 65534)
    program = [sys.executable, "-m", "p2pdist"]
    for verb in ("pack", "import"):
        done = subprocess.run(
            [*program, verb, tmp_path / "closed/in", "-t", "a:b", "--layout", tmp_path / "mine"],
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
            user=65534,
        )
        assert done.returncode == 1
        assert "cannot read" in done.stderr and "permission denied" in done.stderr


def test_what_keeps_a_file_from_being_read_says_what_to_do() -> None:
    """Another mode helps against missing rights alone."""
    denied = unreadable("file", PermissionError(errno.EACCES, "Permission denied"))
    assert denied.remedy == "Make it readable, or pack as its owner"
    for code, word in ((errno.EMFILE, "ulimit -n"), (errno.EIO, "disk"), (errno.ESTALE, "Mount")):
        failure = unreadable("file", OSError(code, os.strerror(code)))
        assert word in failure.remedy and "readable" not in failure.remedy


def test_files_that_the_kernel_makes_up_are_refused() -> None:
    """Their sizes say nothing of what they hold, so a package would have them empty."""
    for source in (Path("/proc/sys/kernel"), Path("/sys/kernel")):
        with pytest.raises(UsageError, match="makes up as they are read"):
            scan_tree(source)


def test_a_mount_point_of_which_everything_is_left_out_is_packed_empty() -> None:
    """As a root file system is packed: its /proc is a directory, and what the kernel shows there
    is not looked at."""

    def ignore(path: bytes, directory: bool) -> bool:
        return path.split(b"/")[0] != b"proc" or path.startswith(b"proc/")

    # Processes come and go there meanwhile.
    with subprocess.Popen(["sh", "-c", "while :; do /bin/true; done"]) as churn:
        try:
            for _ in range(100):
                assert [row.name for row in scan_tree(Path("/"), ignore=ignore).rows(b"")] == [b"proc"]
        finally:
            churn.kill()


@pytest.mark.root
def test_a_mounted_file_of_proc_is_refused_unless_it_is_left_out(tmp_path: Path) -> None:
    (tmp_path / "source").mkdir()
    (tmp_path / "source/cpuinfo").touch()
    (tmp_path / "source/other").write_text("x")
    kernel.mount("/proc/cpuinfo", tmp_path / "source/cpuinfo", "none", kernel.MS_BIND)
    try:
        with pytest.raises(UsageError, match="source/cpuinfo is on proc"):
            scan_tree(tmp_path / "source")
        scan = scan_tree(tmp_path / "source", ignore=lambda path, _: path == b"cpuinfo")
        assert [row.name for row in scan.rows(b"")] == [b"other"]
    finally:
        kernel.unmount(tmp_path / "source/cpuinfo")
