"""`p2pdist gc` and `p2pdist rm` at an origin and in the local layout."""

from __future__ import annotations

import json
import os
import subprocess
import time
from pathlib import Path

import pytest
from test_cli_main import run


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """Two packages at an origin and in a layout, everything there old, and no tag on the first any
    more."""
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "file").write_bytes(name.encode() * 1000)
        assert call(tmp_path, "pack", tmp_path / name, "-t", f"app:{name}").returncode == 0
        assert call(tmp_path, "push", f"app:{name}").returncode == 0
    for file in [*(tmp_path / "origin").rglob("*"), *(tmp_path / "layout").rglob("*")]:
        os.utime(file, (time.time() - 90_000,) * 2)
    return tmp_path


def call(place: Path, *words: str | Path) -> subprocess.CompletedProcess[str]:
    return run(*words, P2PDIST_LAYOUT=str(place / "layout"), P2PDIST_ORIGIN=(place / "origin").as_uri())


@pytest.mark.slow
@pytest.mark.parametrize("where", [("--at-origin",), ("--layout", "layout")], ids=["origin", "layout"])
def test_a_tag_is_removed_and_then_what_it_led_to(place: Path, where: tuple[str, ...]) -> None:
    words = [str(place / "layout") if word == "layout" else word for word in where]
    root = place / ("origin" if where[0] == "--at-origin" else "layout")
    blobs = root / "blobs/sha256"
    assert json.loads(call(place, "gc", *words, "--json").stdout)["blobs_removed"] == 0
    told = json.loads(call(place, "rm", "app:one", *words, "--json").stdout)
    assert (told["reference"], told["at"]) == ("app:one", root.as_uri())
    assert (blobs / told["digest"][7:]).exists(), "rm removes the tag alone"
    assert call(place, "rm", "app:one", *words).returncode == 3
    before = {file.name: file.stat().st_size for file in blobs.iterdir()}
    spared = json.loads(call(place, "gc", *words, "--older-than", "2d", "--json").stdout)
    assert spared["blobs_removed"] == 0
    counted = json.loads(call(place, "gc", *words, "--dry-run", "--json").stdout)
    assert {file.name for file in blobs.iterdir()} == before.keys()
    done = json.loads(call(place, "gc", *words, "--json").stdout)
    assert counted == {**done, "dry_run": True}
    left = {file.name for file in blobs.iterdir()}
    assert (done["blobs_removed"], done["blobs_kept"]) == (len(before) - len(left), len(left))
    assert done["bytes_freed"] == sum(size for name, size in before.items() if name not in left) > 0
    assert call(place, "push", "app:two").returncode == (0)
    assert "0 blobs" in call(place, "gc", *words).stdout


def test_of_several_tags_those_that_are_there_are_removed(tmp_path: Path) -> None:
    (tmp_path / "source").mkdir()
    for tag in ("one", "two", "three"):
        assert call(tmp_path, "pack", tmp_path / "source", "-t", f"app:{tag}").returncode == 0
    layout = ("--layout", tmp_path / "layout")
    assert call(tmp_path, "rm", "app:one", "app:two@x", *layout).returncode == 2, "and removes none"
    done = call(tmp_path, "rm", "app:one", "app:gone", "app:two", *layout)
    assert done.returncode == 3
    assert "app:one removed" in done.stdout and "app:two removed" in done.stdout
    assert "app:gone is not at" in done.stderr
    listed = call(tmp_path, "rm", "app:gone", "app:three", *layout, "--json")
    assert listed.returncode == 3
    removed, failed = json.loads(listed.stdout)
    assert removed["reference"] == "app:three"
    assert "app:gone is not at" in failed["detail"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--at-origin", "--older-than", "0"), "--force-age"),
        (("--at-origin", "--older-than", "yesterday"), "is not an age"),
        (("--at-origin", "--older-than", "999999999w"), "is not an age"),
        (("--at-origin", "--layout", "layout"), "two places"),
        (("--older-than", "1d"), "not for the agent's store"),
        (("--dry-run",), "not for the agent's store"),
    ],
)
def test_wrong_usage(tmp_path: Path, words: tuple[str, ...], said: str) -> None:
    done = call(tmp_path, "gc", *words)
    assert (done.returncode, said in done.stderr) == (2, True), done.stderr


def test_an_age_of_0_when_forced(place: Path) -> None:
    orphan = place / "origin/blobs/sha256" / ("0" * 64)
    orphan.write_bytes(b"new")
    time.sleep(0.02)  # an age must be over 0, and file times are as coarse as a timer tick
    done = call(place, "gc", "--at-origin", "--older-than", "0", "--force-age", "--json")
    assert json.loads(done.stdout)["blobs_removed"] == 1
    assert not orphan.exists()


def test_a_layout_that_a_variable_names_is_not_meant(tmp_path: Path) -> None:
    """Without flags both verbs are about the agent's store, whatever other verbs are told."""
    (tmp_path / "p2pdist.toml").write_text(f'layout = "{tmp_path}/layout"\n')
    for words in (("gc",), ("rm", "app:one")):
        socket = ("--socket", str(tmp_path / "none.sock"), "--config", str(tmp_path / "p2pdist.toml"))
        done = call(tmp_path, *words, *socket)
        assert (done.returncode, "no agent answers" in done.stderr) == (5, True), done.stderr


@pytest.mark.parametrize(
    "words", [("gc",), ("rm", "app:one"), ("ls",), ("ls", "--local"), ("gc", "--layout", "layout")]
)
def test_an_origin_that_would_not_be_looked_at_is_refused(place: Path, words: tuple[str, ...]) -> None:
    """Who names one means what is there, not the store of this host."""
    done = call(place, *words, "--origin", (place / "origin").as_uri())
    assert (done.returncode, "Add --at-origin" in done.stderr) == (2, True), done.stderr


def test_an_unreadable_manifest_ends_with_6_and_is_named(place: Path) -> None:
    digest = json.loads(call(place, "resolve", "app:two", "--json").stdout)["digest"]
    (place / "origin/blobs/sha256" / digest[7:]).write_bytes(b"damaged")
    call(place, "rm", "app:one", "--at-origin")
    count = len(list((place / "origin/blobs/sha256").iterdir()))
    done = call(place, "gc", "--at-origin", "--json")
    assert (done.returncode, json.loads(done.stdout)["tag"]) == (6, "app:two")
    assert len(list((place / "origin/blobs/sha256").iterdir())) == count
    assert call(place, "gc", "--at-origin", "--origin", (place / "none").as_uri()).returncode == 3


def test_only_tags_are_removed_elsewhere(place: Path) -> None:
    digest = json.loads(call(place, "resolve", "app:two", "--json").stdout)["digest"]
    assert call(place, "rm", f"app@{digest}", "--at-origin").returncode == 2
