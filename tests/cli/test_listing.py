"""What people read of packages that were packed and pushed: lists with sizes and dates, what
changed between versions, short forms."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

import programs
import pytest


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with two versions of team/app, a tree, in the layout and at an origin, where a
    file is as well. No test changes these."""
    tmp_path = tmp_path_factory.mktemp("listing")
    source = tmp_path / "source"
    source.mkdir()
    (source / "grows").write_text("a")
    (source / "mode").write_text("b")
    (source / "goes").write_text("c" * 2000)
    assert run(tmp_path, "pack", source, "-t", "team/app:v1", "--format", "tree").returncode == 0
    (source / "grows").write_text("a" * 3000)
    (source / "mode").chmod(0o755)
    (source / "goes").unlink()
    (source / "comes").mkdir()
    (source / "comes" / "new").write_text("d" * 1024)
    assert run(tmp_path, "pack", source, "-t", "team/app:v2", "--format", "tree").returncode == 0
    for version in ("v1", "v2"):
        assert run(tmp_path, "push", f"team/app:{version}").returncode == 0
    (tmp_path / "weights.bin").write_bytes(b"w" * 5000)
    assert run(tmp_path, "blob", "push", tmp_path / "weights.bin").returncode == 0
    return tmp_path


@pytest.fixture
def own_place(place: Path, tmp_path: Path) -> Path:
    """A copy of `place` that the test may change."""
    return shutil.copytree(place, tmp_path / "place", symlinks=True)


def run(place: Path, *words: str | Path) -> subprocess.CompletedProcess[str]:
    environ = {"PATH": "/usr/bin:/bin", "HOME": str(place), "P2PDIST_ORIGIN": f"file://{place}/origin"}
    return programs.run(*words, env=environ)


def rows(place: Path, *words: str | Path) -> list[list[str]]:
    done = run(place, *words)
    assert done.returncode == 0, done.stderr
    return [[cell for cell in line.split("  ") if cell] for line in done.stdout.splitlines()]


def test_what_was_packed_is_listed_with_size_and_date(place: Path) -> None:
    heads, *packages = rows(place, "ls", "--local")
    assert [cell.strip() for cell in heads] == ["PACKAGE", "DIGEST", "SIZE", "TAGGED"]
    assert [row[0] for row in packages] == ["team/app:v1", "team/app:v2"]
    assert all(row[3].endswith(" s ago") or row[3].endswith("minutes ago") for row in packages)
    listed = json.loads(run(place, "ls", "--local", "--json").stdout)
    assert all(entry["size"] > 0 and entry["tagged"] > 1e9 for entry in listed)
    assert packages[0][1].strip() == listed[0]["digest"][:19]


def test_an_origin_lists_files_by_their_names(place: Path) -> None:
    names = [row[0] for row in rows(place, "ls", "--at-origin")]
    assert names == ["PACKAGE", "team/app:v1", "team/app:v2", "weights.bin"]
    by_size = [row[0] for row in rows(place, "ls", "--at-origin", "--sort", "size")[1:]]
    listed = json.loads(run(place, "ls", "--at-origin", "--json").stdout)
    sizes = {entry.get("file", entry["reference"]): entry["size"] for entry in listed if "size" in entry}
    assert [sizes[name] for name in by_size] == sorted((sizes[name] for name in by_size), reverse=True)
    assert sizes["weights.bin"] == 5000
    assert [row[0] for row in rows(place, "ls", "--at-origin", "--no-blobs", "-q")] == ["team/app:v1", "team/app:v2"]
    assert [row[0] for row in rows(place, "ls", "weights*", "--at-origin")[1:]] == ["weights.bin"]


def test_files_are_no_tags_of_one_that_is_missing(place: Path) -> None:
    done = run(place, "resolve", f"blob:sha256-{'0' * 64}")
    assert done.returncode == 3 and "Check the name" in done.stderr and "tags" not in done.stderr, done.stderr


def test_two_places_are_not_listed_as_one(place: Path) -> None:
    done = run(place, "ls", "--local", "--at-origin")
    assert (done.returncode, "--local and --at-origin" in done.stderr) == (2, True), done.stderr


def test_nothing_packed_is_an_empty_list(tmp_path: Path) -> None:
    assert rows(tmp_path, "ls", "--local") == []


def test_without_an_agent_ls_says_how_to_list_what_was_packed(place: Path) -> None:
    done = run(place, "ls", "--socket", place / "none.sock")
    assert done.returncode == 5 and "p2pdist ls --local" in done.stderr


def test_a_summary_of_changes_has_sizes_and_says_what_changed(place: Path) -> None:
    said = run(place, "diff", "team/app:v1", "team/app:v2", "--stat").stdout
    lines = said.splitlines()
    assert [line.split("  ")[0] for line in lines[1:-1]] == ["grows", "goes", "comes/new", "mode"]
    assert "1 B -> 2.9 KiB" in lines[1] and lines[1].endswith("content, time")
    assert "2.0 KiB" in lines[2] and lines[2].endswith("removed")
    assert "1.0 KiB" in lines[3] and lines[3].endswith("added")
    assert lines[4].endswith("mode")
    assert lines[-1].startswith("1 added (1.0 KiB), 2 changed (1 content, 1 time, 1 mode), 1 removed (2.0 KiB); ")
    assert lines[-1].endswith(" to move")


def test_changes_are_named_with_what_changed_and_without_directories(place: Path) -> None:
    said = run(place, "diff", "team/app:v1", "team/app:v2").stdout.splitlines()
    assert said[:-1] == [
        "added    comes/new",
        "changed  grows  (content, time)",
        "changed  mode  (mode)",
        "removed  goes",
    ]
    document = json.loads(run(place, "diff", "team/app:v1", "team/app:v2", "--json").stdout)
    assert document["added"] == ["comes", "comes/new"] and document["changed"] == ["grows", "mode"]
    assert {
        "path": "grows",
        "what": "changed",
        "size_before": 1,
        "size_after": 3000,
        "aspects": ["content", "time"],
    } in document["changes"]


def test_quiet_prints_results_alone(own_place: Path) -> None:
    done = run(own_place, "pack", own_place / "source", "-t", "team/app:v3", "-q")
    assert done.stdout.startswith("team/app:v3  sha256:") and done.stdout.count("\n") == 1 and done.stderr == ""
    done = run(own_place, "push", "team/app:v3", "--quiet")
    assert done.stdout.startswith("team/app:v3  sha256:") and done.stdout.count("\n") == 1 and done.stderr == ""


def test_one_reason_for_many_files_is_one_line(own_place: Path) -> None:
    """What --reproducible leaves out is counted, and the first one is named."""
    for number in range(30):
        (own_place / "source" / f"m{number:02}.py").write_text("this is no Python (")
        cache = own_place / "source" / "__pycache__"
        cache.mkdir(exist_ok=True)
        (cache / f"m{number:02}.cpython-399.pyc").write_bytes(b"magic, and code")
    done = run(own_place, "pack", own_place / "source", "-t", "team/app:v4", "--reproducible")
    assert done.returncode == 0
    (line,) = (line for line in done.stderr.splitlines() if line.startswith("left out:"))
    assert line.startswith("left out: 30 files (") and "such as __pycache__/m00.cpython-399.pyc" in line
