"""Virtual environments in layers."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
from environments import install, install_editable, make_environment, make_wheel, site_of

from p2pdist.model.errors import UsageError
from p2pdist.model.manifest import parse_reference
from p2pdist.origin.layout import LocalLayout
from p2pdist.package.layers import PackOptions, pack_layers, plain_layer, split_layer
from p2pdist.package.pack import Packed
from p2pdist.package.source.split import split


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


def test_compiled_files_that_no_record_lists_have_a_layer_of_their_own(environment: Path, tmp_path: Path) -> None:
    """As when the interpreter compiled them later; those of one's own code go with it."""
    environment = shutil.copytree(environment, tmp_path / "venv", symlinks=True)
    site = site_of(environment)
    for name in ("thirdlib", "our_lib"):
        cache = site / name / "deep/__pycache__"
        cache.mkdir(exist_ok=True)
        (cache / "__init__.cpython-39.opt-2.pyc").write_bytes(b"")
    found = split(environment, first_party=["our_lib"])
    assert not any(path.endswith(b"opt-2.pyc") for path in found.lower)
    listed = {path for path in found.lower if path.endswith(b".pyc")}
    assert listed and not listed & found.compiled
    prefix = os.fsencode(site.relative_to(environment))
    assert prefix + b"/thirdlib/deep/__pycache__/__init__.cpython-39.opt-2.pyc" in found.compiled
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


def test_a_record_that_is_none_is_named(environment: Path) -> None:
    """A quotation mark without its other one makes one field of all lines."""
    info = site_of(environment) / "odd-1.0.dist-info"
    info.mkdir()
    try:
        (info / "RECORD").write_text('"odd.py,,\n' + "odd/module.py,,\n" * 10_000)
        with pytest.raises(UsageError, match=f"{info / 'RECORD'} is no list of files.*Install"):
            split(environment)
    finally:
        shutil.rmtree(info)


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


@pytest.mark.parametrize("form", ["squashfs", "tree"])
async def test_only_the_upper_layer_changes_with_ones_own_code(
    environment: Path, tmp_path: Path, layout: LocalLayout, form: str
) -> None:
    """One package of two layers; the intermediate one gets no tag."""
    copy = tmp_path / "venv"
    shutil.copytree(environment, copy, symlinks=True)

    async def packed(tag: str) -> Packed:
        layers, _ = split_layer(plain_layer(copy, form), ["our_lib"])  # type: ignore[arg-type]
        return (await pack_layers(layers, parse_reference(f"app:{tag}"), layout, PackOptions(mtime=0)))[0]

    first = await packed("v1")
    (site_of(copy) / "our_lib/new.py").write_text("y = 2\n")
    (site_of(copy) / "our_lib/__init__.py").write_text("z = 3\n")
    (site_of(copy) / "loose.py").unlink()
    second = await packed("v2")
    assert len(first.layers) == len(second.layers)
    assert first.layers[:-1] == second.layers[:-1]
    assert first.layers[-1] != second.layers[-1]
    assert first.files == sum(1 for path in environment.rglob("*") if path.is_file() and not path.is_symlink())
    assert sorted(name for name, _ in await layout.tags()) == ["app:v1", "app:v2"]
    assert not [path for path in layout.scratch().iterdir() if path.name.startswith("stage")]


@pytest.mark.parametrize("reproducible", [False, True])
@pytest.mark.parametrize("form", ["squashfs", "tree"])
async def test_a_first_run_leaves_the_lower_layer_as_it_is(
    tmp_path: Path, layout: LocalLayout, form: Any, reproducible: bool
) -> None:
    """Where an installer compiled nothing the interpreter does, and with that changes the times of
    directories."""
    made = make_environment(tmp_path / "venv")
    site = site_of(made)
    (site / "third/deep").mkdir(parents=True)
    (site / "third-1.0.dist-info").mkdir()
    listed = ["third/__init__.py", "third/deep/__init__.py", "third-1.0.dist-info/METADATA"]
    for name in listed:
        (site / name).write_text("Name: third\n" if name.endswith("METADATA") else "x = 1\n")
    (site / "third-1.0.dist-info/RECORD").write_text("".join(f"{name},,\n" for name in [*listed, "../gone,,"]))
    for directory in (site / "third", site / "third/deep"):
        os.utime(directory, (1_500_000_000, 1_500_000_000))
    (made / "dangling").symlink_to("nowhere")
    found = []
    for tag in ("v1", "v2"):
        layers, _ = split_layer(plain_layer(made, form), [])
        making = PackOptions(reproducible=reproducible, mtime=315_532_800 if reproducible else None)
        packed, notes = await pack_layers(layers, parse_reference(f"app:{tag}"), layout, making)
        assert notes == []
        found.append(packed)
        (made / "app.py").write_text("import third.deep\n")
        subprocess.run([made / "bin/python", made / "app.py"], check=True, timeout=60, env={"PATH": os.defpath})
    first, second = found
    assert first.layers[0] == second.layers[0]
    assert len(second.layers) == 3
    assert [(link.path, link.target) for link in second.links] == [("dangling", "nowhere")]
    assert second.files == first.files + 3  # app.py, and two modules compiled
