"""Virtual environments in two layers."""

from __future__ import annotations

import os
import shutil
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from environments import install, install_editable, make_environment, make_wheel, site_of

from p2pdist.model.errors import UsageError
from p2pdist.model.package import parse_reference
from p2pdist.origin.layout import LocalLayout
from p2pdist.package.layering import Making, pack_layers, plain_layer, split_layer
from p2pdist.package.pack import Packed
from p2pdist.package.split import split


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With one third-party distribution, one of one's own, one editable, and a loose module."""
    place = tmp_path_factory.mktemp("split")
    made = make_environment(place / "venv")
    body = {"__init__.py": "def main():\n    print('hello')\n", "deep/__init__.py": ""}
    wheels = [
        make_wheel(place, name, {f"{name}/{path}": text for path, text in body.items()})
        for name in ("thirdlib", "our_lib")
    ]
    install(made, *wheels)
    install_editable(made, "editlib", place / "editlib")
    (site_of(made) / "loose.py").write_text("x = 1\n")
    (made / "data").mkdir()
    (made / "empty").mkdir()
    (made / "data/weights").write_text("w")
    return made


def in_site(paths: frozenset[bytes], environment: Path) -> set[str]:
    """Top-level names in site-packages."""
    prefix = os.fsencode(site_of(environment).relative_to(environment)) + b"/"
    return {os.fsdecode(path[len(prefix) :].split(b"/")[0]) for path in paths if path.startswith(prefix)}


def test_every_file_goes_to_one_layer(environment: Path) -> None:
    found = split(environment, first_party=["Our-Lib"])
    assert found.third_party == ("thirdlib",)
    assert found.first_party == ("editlib", "our-lib")
    files = {os.fsencode(path.relative_to(environment)) for path in environment.rglob("*")}
    assert found.lower | found.upper == files
    both = found.lower & found.upper
    assert all((environment / os.fsdecode(path)).is_dir() for path in both)
    lower, upper = in_site(found.lower, environment), in_site(found.upper, environment)
    assert {"thirdlib", "thirdlib-1.0.dist-info"} <= lower
    ours = {"our_lib", "our_lib-1.0.dist-info", "editlib-1.0.dist-info", "__editable__.editlib.pth", "loose.py"}
    assert ours <= upper
    assert not ours & lower and "thirdlib" not in upper
    assert {b"pyvenv.cfg", b"bin/python", b"bin/activate", b"bin/thirdlib-run"} <= found.lower
    assert {b"bin/our_lib-run", b"data/weights", b"empty"} <= found.upper
    assert not {b"data", b"empty"} & found.lower


def test_compiled_files_go_with_their_source(environment: Path) -> None:
    """Also those that no RECORD lists, as when the interpreter compiled them later."""
    site = site_of(environment)
    for name in ("thirdlib", "our_lib"):
        cache = site / name / "deep/__pycache__"
        cache.mkdir(exist_ok=True)
        (cache / "__init__.cpython-39.opt-2.pyc").write_bytes(b"")
    found = split(environment, first_party=["our_lib"])
    prefix = os.fsencode(site.relative_to(environment))
    assert prefix + b"/thirdlib/deep/__pycache__/__init__.cpython-39.opt-2.pyc" in found.lower
    assert prefix + b"/our_lib/deep/__pycache__/__init__.cpython-39.opt-2.pyc" in found.upper


def test_an_environment_within_a_project(environment: Path, tmp_path: Path) -> None:
    project = tmp_path / "project"
    shutil.copytree(environment, project / ".venv", symlinks=True)
    (project / "train.py").write_text("")
    found = split(project, first_party=["our_lib"])
    assert b"train.py" in found.upper
    assert b".venv/pyvenv.cfg" in found.lower
    assert b".venv/data/weights" in found.upper
    assert b"train.py" not in found.lower


def test_what_cannot_be_split(environment: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"pyvenv\.cfg"):
        split(tmp_path)
    with pytest.raises(UsageError, match="our-libb"):
        split(environment, first_party=["our_libb"])


def test_a_distribution_without_a_record_is_said(environment: Path) -> None:
    info = site_of(environment) / "odd-1.0.dist-info"
    info.mkdir()
    try:
        found = split(environment)
    finally:
        info.rmdir()
    assert found.notes == ("odd has no RECORD and goes to the upper layer",)


@pytest.mark.timeout(20)
@pytest.mark.parametrize("name", ["RECORD", "direct_url.json"])
def test_metadata_that_is_no_file_is_not_waited_for(environment: Path, name: str) -> None:
    info = site_of(environment) / "odd-1.0.dist-info"
    info.mkdir()
    try:
        os.mkfifo(info / name)
        found = split(environment)
    finally:
        shutil.rmtree(info)
    assert found.notes == ("odd has no RECORD and goes to the upper layer",)


@pytest.fixture
async def layout(tmp_path: Path) -> AsyncIterator[LocalLayout]:
    opened = LocalLayout(tmp_path / "layout")
    yield opened
    await opened.close()


@pytest.mark.parametrize("form", ["squashfs", "tree"])
async def test_only_the_upper_layer_changes_with_ones_own_code(
    environment: Path, tmp_path: Path, layout: LocalLayout, form: str
) -> None:
    """One package of two layers; the intermediate one gets no tag."""
    copy = tmp_path / "venv"
    shutil.copytree(environment, copy, symlinks=True)

    async def packed(tag: str) -> Packed:
        layers, _ = split_layer(plain_layer(copy, form), ["our_lib"])  # type: ignore[arg-type]
        return (await pack_layers(layers, parse_reference(f"app:{tag}"), layout, Making(mtime=0)))[0]

    first = await packed("v1")
    (site_of(copy) / "our_lib/new.py").write_text("y = 2\n")
    (site_of(copy) / "our_lib/__init__.py").write_text("z = 3\n")
    (site_of(copy) / "loose.py").unlink()
    second = await packed("v2")
    assert len(first.layers) == len(second.layers) == 2
    assert first.layers[0] == second.layers[0]
    assert first.layers[1] != second.layers[1]
    assert first.files == sum(1 for path in environment.rglob("*") if path.is_file() and not path.is_symlink())
    assert sorted(name for name, _ in await layout.tags()) == ["app:v1", "app:v2"]
    assert not [path for path in layout.scratch().iterdir() if path.name.startswith("stage")]
