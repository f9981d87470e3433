"""Tags at an origin and in the local layout: `p2pdist tag` and `p2pdist resolve`."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest
from test_cli_main import run


@pytest.fixture
def place(tmp_path: Path) -> Path:
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "file").write_text(name)
    return tmp_path


def call(place: Path, *words: str, origin: bool = True) -> subprocess.CompletedProcess[str]:
    variables = {"P2PDIST_LAYOUT": str(place / "layout")}
    if origin:
        variables["P2PDIST_ORIGIN"] = (place / "origin").as_uri()
    return run(*words, **variables)


def packed(place: Path, name: str) -> str:
    """Pack and push a version; returns its digest."""
    assert call(place, "pack", str(place / name), "-t", f"trainer:{name}", origin=False).returncode == 0
    return str(json.loads(call(place, "push", f"trainer:{name}", "--json").stdout)["digest"])


@pytest.mark.slow
def test_an_alias_moves_from_one_package_to_the_next(place: Path) -> None:
    one, two = packed(place, "one"), packed(place, "two")
    told = json.loads(call(place, "tag", "trainer:one", "trainer:warm", "--json").stdout)
    assert told == {"reference": "trainer:warm", "digest": one, "at": (place / "origin").as_uri()}
    assert call(place, "resolve", "trainer:warm").stdout == f"trainer@{one}\n"
    call(place, "tag", f"trainer@{two}", "trainer:warm")
    found = json.loads(call(place, "resolve", "trainer:warm", "--json").stdout)
    assert (found["reference"], found["tag"], found["digest"]) == (f"trainer@{two}", "warm", two)
    assert call(place, "resolve", "trainer:one").stdout == f"trainer@{one}\n"


def test_without_an_origin_the_local_layout_is_meant(place: Path) -> None:
    one = packed(place, "one")
    assert call(place, "tag", "trainer:one", "trainer:mine", origin=False).returncode == 0
    assert call(place, "resolve", "trainer:mine", origin=False).stdout == f"trainer@{one}\n"
    assert call(place, "resolve", "trainer:mine").returncode == 3


@pytest.mark.parametrize(
    ("reference", "remedy"), [("docker://ghcr.io/a/b:v1", "p2pdist import docker://..."), ("hf://a/b", "HF_ENDPOINT=")]
)
@pytest.mark.parametrize("verb", ["inspect", "resolve", "push", "torrent"])
def test_what_other_servers_have_is_no_package(place: Path, verb: str, reference: str, remedy: str) -> None:
    finished = run(verb, reference, "--origin", (place / "origin").as_uri())
    assert finished.returncode == 2
    assert f"{reference!r} is not a reference" in finished.stderr and remedy in finished.stderr


def test_what_cannot_be_named(place: Path) -> None:
    one = packed(place, "one")
    assert call(place, "tag", "trainer:none", "trainer:warm").returncode == 3
    assert call(place, "tag", f"trainer@sha256:{'0' * 64}", "trainer:warm").returncode == 3
    assert call(place, "tag", "trainer:one", f"trainer@{one}").returncode == 2


def test_a_tag_that_cannot_be_removed_is_told_with_those_that_can(place: Path) -> None:
    """In a layout, too, of which no origin says anything."""
    assert call(place, "pack", str(place / "one"), "-t", "trainer:one", origin=False).returncode == 0
    for name, remedy in (("trainer:two", "Its tags there: one"), ("other:one", "Check the name")):
        removed = call(place, "rm", name, "--layout", str(place / "layout"), origin=False)
        assert (removed.returncode, remedy in removed.stderr, "--at-origin" in removed.stderr) == (3, True, False)
