"""Equal packages from checkouts made elsewhere and later."""

from __future__ import annotations

import importlib.util
import os
import py_compile
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from p2pdist.model.errors import UsageError
from p2pdist.model.manifest import parse_reference
from p2pdist.origin.layout import LocalLayout
from p2pdist.package.image.reproducible import TIME_DEFAULT_S, clamp_time, recompile
from p2pdist.package.layers import Layer, PackOptions, pack_layers
from p2pdist.package.source.project import Format
from p2pdist.package.source.stages import walk

REFERENCE = parse_reference("app:v1")
SOURCE = "import os\n\ndef where():\n    return where.__code__.co_filename, {'a', 'b', 'c'} == {1}\n"


def checkout(place: Path, *, time_s: int, umask: int = 0o022) -> Path:
    """A tree as a version control system makes it, compiled on the spot."""
    (place / "lib/deep").mkdir(parents=True)
    (place / "lib/__init__.py").write_text(SOURCE)
    (place / "lib/deep/part.py").write_text(SOURCE * 3)
    (place / "lib/broken.py").write_text("def :\n")
    (place / "data").write_text("data")
    (place / "link").symlink_to("data")
    (place / "run").write_text("#!/bin/sh\n")
    for path in place.rglob("*"):
        if not path.is_symlink():
            path.chmod((0o777 if path.is_dir() or path.name == "run" else 0o666) & ~umask)
        os.utime(path, (time_s, time_s), follow_symlinks=False)
    place.chmod(0o777 & ~umask)
    for path in (place / "lib/__init__.py", place / "lib/deep/part.py"):
        for level in (0, 1):
            py_compile.compile(str(path), doraise=True, optimize=level)
    return place


async def packed(source: Path, layout: LocalLayout, form: Format) -> tuple[str, list[str]]:
    making = PackOptions(mtime=TIME_DEFAULT_S, reproducible=True)
    done, notes = await pack_layers([Layer(source, form)], REFERENCE, layout, making)
    return done.layers[0].digest, notes


@pytest.mark.parametrize("form", ["squashfs", "tree"])
async def test_two_checkouts_are_one_layer(tmp_path: Path, layout: LocalLayout, form: Format) -> None:
    first = checkout(tmp_path / "first", time_s=1_600_000_000)
    second = checkout(tmp_path / "another/and longer", time_s=1_700_000_000, umask=0o077)
    before = {path: path.read_bytes() for path in first.rglob("*.pyc")}
    digest, notes = await packed(first, layout, form)
    assert notes == []
    assert (await packed(second, layout, form))[0] == digest
    assert {path: path.read_bytes() for path in first.rglob("*.pyc")} == before
    (second / "run").chmod(0o600)
    assert (await packed(second, layout, form))[0] != digest
    (second / "run").chmod(0o700)
    (second / "data").write_text("DATA")
    assert (await packed(second, layout, form))[0] != digest


@pytest.mark.parametrize("form", ["squashfs", "tree"])
async def test_holes_leave_no_mark(
    tmp_path: Path, layout: LocalLayout, form: Format, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A version control system writes none, and the program that made the file did."""
    monkeypatch.setattr("p2pdist.package.source.stages._FICLONE", 0)  # as where blocks are not shared
    for name in ("sparse", "dense"):
        (tmp_path / name).mkdir()
        with (tmp_path / name / "file").open("wb") as file:
            file.write(b"begin" if name == "sparse" else b"begin" + bytes(1 << 20))
            file.truncate(5 + (1 << 20))
    digests = {(await packed(tmp_path / name, layout, form))[0] for name in ("sparse", "dense")}
    assert len(digests) == 1


def recompiled(source: Path, work: Path) -> tuple[dict[str, Path | None], list[str]]:
    work.mkdir()
    found = recompile(source, walk(source), work)
    return {os.fsdecode(path): file for path, file in found.files.items()}, found.notes


def test_compiled_files_are_hash_based_and_work(tmp_path: Path) -> None:
    """The interpreter loads them without compiling again, whatever time their source has."""
    source = checkout(tmp_path / "source", time_s=1_600_000_000)
    tag = sys.implementation.cache_tag
    files, notes = recompiled(source, tmp_path / "work")
    assert notes == []
    assert set(files) == {
        f"lib/{place}__pycache__/{name}.{tag}{level}.pyc"
        for place, name in (("", "__init__"), ("deep/", "part"))
        for level in ("", ".opt-1")
    }
    for path, made in files.items():
        assert made is not None
        data = made.read_bytes()
        assert data[:4] == importlib.util.MAGIC_NUMBER
        assert int.from_bytes(data[4:8], "little") == 0b11  # hash-based, checked
        assert data[8:16] == importlib.util.source_hash(
            (source / path).parent.parent.joinpath(Path(path).name.split(".")[0] + ".py").read_bytes()
        )
        assert str(tmp_path).encode() not in data
        shutil.copy(made, source / path)
    os.utime(source / "lib/__init__.py", (TIME_DEFAULT_S, TIME_DEFAULT_S))
    script = "import lib; print(lib.where()[0])"
    done = subprocess.run(
        [sys.executable, "-v", "-B", "-c", script], cwd=source, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == str(source / "lib/__init__.py")
    assert f"# {source}/lib/__pycache__/__init__.{tag}.pyc matches" in done.stderr.replace("'", "")


def test_what_cannot_be_compiled_is_left_out_with_a_note(tmp_path: Path) -> None:
    """No source, a source that does not compile, an interpreter that is not here; but a module that
    is compiled only is kept."""
    source = checkout(tmp_path / "source", time_s=1_600_000_000)
    tag = sys.implementation.cache_tag
    cache = source / "lib/__pycache__"
    any_file = next(cache.glob("*.pyc"))
    shutil.copy(any_file, cache / f"gone.{tag}.pyc")
    shutil.copy(any_file, cache / f"broken.{tag}.pyc")
    (cache / "__init__.cpython-27.pyc").write_bytes(b"\x03\xf3\r\n" + bytes(12))
    (cache / "__init__.pypy39.pyc").write_bytes(b"")
    shutil.copy(any_file, source / "alone.pyc")
    files, notes = recompiled(source, tmp_path / "work")
    left = {name for name, made in files.items() if made is None}
    names = (f"gone.{tag}", f"broken.{tag}", "__init__.cpython-27", "__init__.pypy39")
    assert left == {f"lib/__pycache__/{name}.pyc" for name in names}
    assert len(notes) == 5
    assert any("alone.pyc" in note and "kept" in note for note in notes)
    assert any("03f30d0a" in note for note in notes)


@pytest.mark.timeout(60)
def test_what_is_no_file_is_not_waited_for(tmp_path: Path) -> None:
    """A FIFO in the place of compiled Python or of its source, also behind a symbolic link."""
    source = checkout(tmp_path / "source", time_s=1_600_000_000)
    (source / "lib/data.py").write_text("x = 1\n")
    os.mkfifo(source / "lib/data.pyc")
    os.mkfifo(source / "lib/pipe.py")
    (source / "lib/link.py").symlink_to("pipe.py")
    for name in ("pipe", "link"):
        shutil.copy(importlib.util.cache_from_source(str(source / "lib/__init__.py")), source / f"lib/{name}.pyc")
    (source / "lib/way.py").write_text("x = 1\n")
    (source / "lib/way.pyc").symlink_to("pipe.py")
    files, notes = recompiled(source, tmp_path / "work")
    assert {name for name in files if "__pycache__" not in name} == set()
    assert sorted(notes) == [
        f"kept as it is: lib/{name}.pyc (compiled Python without a source)" for name in ("link", "pipe")
    ]


def test_what_is_compiled_does_not_depend_on_its_neighbours(tmp_path: Path) -> None:
    """An edit of one file changes one compiled file."""
    first = checkout(tmp_path / "first", time_s=1_600_000_000)
    second = checkout(tmp_path / "second", time_s=1_600_000_000)
    (second / "lib/another.py").write_text("where = 'where'\nos = co_filename = 1\n")
    py_compile.compile(str(second / "lib/another.py"), doraise=True)
    ours, _ = recompiled(first, tmp_path / "work1")
    theirs, _ = recompiled(second, tmp_path / "work2")
    for path, made in ours.items():
        other = theirs[path]
        assert made is not None and other is not None
        assert made.read_bytes() == other.read_bytes()


def test_nothing_of_the_source_is_executed(tmp_path: Path) -> None:
    """Modules named like those that compiling needs are sources like others."""
    source = tmp_path / "source"
    source.mkdir()
    for name in ("json", "py_compile", "warnings", "sitecustomize", "os"):
        (source / f"{name}.py").write_text(f"open({str(tmp_path / 'executed')!r}, 'w')\n")
        py_compile.compile(str(source / f"{name}.py"), doraise=True)
    files, notes = recompiled(source, tmp_path / "work")
    assert len(files) == 5 and notes == []
    assert not (tmp_path / "executed").exists()


def test_the_time_comes_from_the_environment() -> None:
    assert clamp_time({}) == TIME_DEFAULT_S
    assert clamp_time({"SOURCE_DATE_EPOCH": "1700000000"}) == 1_700_000_000
    for text in ("now", "-1", "1e9", "99999999999"):
        with pytest.raises(UsageError, match="SOURCE_DATE_EPOCH"):
            clamp_time({"SOURCE_DATE_EPOCH": text})
