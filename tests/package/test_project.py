"""The project file."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from p2pdist.model.errors import NotFound, UsageError
from p2pdist.package.source.project import Project, ProjectFile, find_project, read_project


def written(directory: Path, text: str) -> Path:
    file = directory / "p2pdist.toml"
    file.write_text(text)
    return file


def test_everything_that_can_be_said(tmp_path: Path) -> None:
    text = """
        name = "team/trainer"
        tag = "v3"
        base = "team/cuda:12"
        entrypoint = ["python", "-m", "train"]
        working-dir = "app"
        format = "tree"
        ignore = ["*.log"]
        [env]
        A-B = "1"
        [[layer]]
        source = "venv"
        format = "squashfs"
        [[layer]]
        source = "src"
        only = ["/train/**"]
        ignore = ["*.tmp"]
        target = "app/code"
    """
    file = read_project(written(tmp_path, text))
    project = file.project
    assert project.reference == "team/trainer:v3"
    assert (project.base, project.working_dir, project.format) == ("team/cuda:12", "app", "tree")
    assert project.entrypoint == ("python", "-m", "train")
    assert project.env == {"A-B": "1"}
    venv, code = project.layer
    assert (venv.format, venv.target, venv.only) == ("squashfs", "", ())
    assert (code.format, code.target, code.only, code.ignore) == (None, "app/code", ("/train/**",), ("*.tmp",))
    assert file.source(code) == tmp_path / "src"


def test_an_empty_file_says_nothing(tmp_path: Path) -> None:
    assert read_project(written(tmp_path, "")).project == Project()
    assert read_project(written(tmp_path, 'name = "a"')).project.reference == "a:latest"
    assert Project().reference == ""


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ('entry_point = ["x"]', "entry_point"),
        ('[[layer]]\nsource = "x"\nfromat = "tree"', "fromat"),
        ('format = "zip"', "format"),
        ('[[layer]]\nformat = "tree"', "source"),
        ('entrypoint = "python train.py"', "entrypoint"),
        ("[env]\nA = 1", "env"),
        ('name = "a', "TOML"),
        ('[env]\n"A=B" = "x"', "A=B"),
        ('[env]\n"" = "x"', "no name of an environment entry"),
        (f'[[layer]]\nsource = "x"\ntarget = "d{"/d" * 1200}"', "more than 100 directories deep"),
        *(
            (f'[[layer]]\nsource = "x"\ntarget = "{target}"', "target")
            for target in ("/abs", "../up", "a//b", "a/../b")
        ),
    ],
)
def test_a_mistake_is_named(tmp_path: Path, text: str, named: str) -> None:
    file = written(tmp_path, text)
    with pytest.raises(UsageError, match=named) as failure:
        read_project(file)
    assert str(file) in str(failure.value)


def test_where_it_is_looked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The one named, else the one in the source, else the one here; only a source needs none."""
    source, here = tmp_path / "source", tmp_path / "here"
    for directory in (source, here):
        directory.mkdir()
    monkeypatch.chdir(here)
    assert find_project(source, None) is None
    with pytest.raises(UsageError, match=r"no p2pdist\.toml here"):
        find_project(None, None)
    with pytest.raises(NotFound):
        find_project(source, tmp_path / "absent.toml")
    written(source, 'name = "a"')
    written(here, 'name = "b"')
    names = [found.project.name for found in (find_project(source, None), find_project(None, None)) if found]
    assert names == ["a", "b"]
    found = find_project(source, here / "p2pdist.toml")
    assert isinstance(found, ProjectFile)
    assert found.project.name == "b"


@pytest.mark.timeout(20)
def test_what_is_no_file_is_not_waited_for(tmp_path: Path) -> None:
    """Where nobody named it, it counts for nothing."""
    os.mkfifo(tmp_path / "p2pdist.toml")
    assert find_project(tmp_path, None) is None
    with pytest.raises(UsageError, match="it is not a regular file"):
        find_project(None, tmp_path / "p2pdist.toml")
