"""The engineer's verbs as processes: pack, push, inspect, diff and blob."""

from __future__ import annotations

import json
import os
import pty
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import programs
import pytest
from test_cli_main import run

from p2pdist.model.digest import digest_of


@pytest.fixture
def place(tmp_path: Path) -> Path:
    (tmp_path / "env").mkdir()
    (tmp_path / "env/content").write_bytes(os.urandom(300_000))
    (tmp_path / "app").mkdir()
    (tmp_path / "app/run").write_text("#!/bin/sh\necho hello\n")
    os.mkfifo(tmp_path / "app/fifo")
    return tmp_path


def done(place: Path, *arguments: str | Path, code: int = 0) -> Any:
    """Run a verb with --json on the layout and origin of the test; its only output is one
    document."""
    environment = {"P2PDIST_LAYOUT": str(place / "layout"), "P2PDIST_ORIGIN": (place / "origin").as_uri()}
    finished = run(*arguments, "--json", **environment)
    assert finished.returncode == code, finished.stderr
    return json.loads(finished.stdout)


def test_from_two_directories_to_an_origin(place: Path) -> None:
    env = done(place, "pack", place / "env", "-t", "team/env:1", "--env", "A=1")
    assert set(env) >= {"reference", "digest", "layers", "files", "bytes_total", "seconds"}
    assert set(env["layers"][0]) == {"digest", "size", "mediaType"}
    entrypoint = '["sh", "${P2PDIST_ROOT}/run"]'
    app = done(place, "pack", place / "app", "-t", "trainer:v1", "--base", "team/env:1", "--entrypoint", entrypoint)
    assert app["layers"][0] == env["layers"][0]
    assert app["dropped"] == [{"path": "fifo", "what": "FIFO"}]
    pushed = done(place, "push", "trainer:v1")
    assert (pushed["reference"], pushed["digest"], pushed["bytes_skipped"]) == ("trainer:v1", app["digest"], 0)
    assert done(place, "push", "trainer:v1")["bytes_sent"] == 0
    found = done(place, "inspect", "trainer:v1", "--layout", place / "elsewhere")
    assert found["at"] == (place / "origin").as_uri()
    assert found["entrypoint"] == ["sh", "${P2PDIST_ROOT}/run"]
    assert found["env"] == ["A=1"]
    assert [layer["digest"] for layer in found["layers"]] == [layer["digest"] for layer in app["layers"]]
    moved = done(place, "diff", "team/env:1", "trainer:v1")
    layers = {"added": [app["layers"][1]["digest"]], "changed": [], "removed": []}
    assert moved == {"bytes_to_move": app["layers"][1]["size"], **layers, "layers": layers}


def test_words_for_people(place: Path) -> None:
    environment = {"P2PDIST_LAYOUT": str(place / "layout"), "P2PDIST_ORIGIN": (place / "origin").as_uri()}
    packed = run("pack", place / "app", "-t", "trainer:v1", **environment)
    assert packed.stderr == "left out: fifo (FIFO)\n"
    assert packed.stdout.startswith("trainer:v1  sha256:")
    assert run("push", "trainer:v1", **environment).stdout.startswith("trainer:v1  sha256:")
    assert "layer " in run("inspect", "trainer:v1", **environment).stdout
    pushed = run("blob", "push", place / "env/content", **environment)
    assert pushed.stdout == digest_of((place / "env/content").read_bytes()) + "\n"
    assert pushed.stderr.startswith(f"{place / 'env/content'}: 293.0 KiB, ") and pushed.stderr.count("\n") == 1


def test_a_blob_of_its_own(place: Path) -> None:
    content = place / "env/content"
    pushed = done(place, "blob", "push", content)
    assert (pushed["digest"], pushed["size"]) == (digest_of(content.read_bytes()), 300_000)


@pytest.mark.slow
def test_failures_have_their_exit_codes(place: Path) -> None:
    """Also with --json, where the problem document is the only output."""
    done(place, "pack", place / "app", "-t", "trainer:v1")
    done(place, "push", "trainer:v1")
    assert "trainer:v9" in done(place, "push", "trainer:v9", code=3)["detail"]
    problem = done(place, "inspect", "trainer:v9", code=3)
    assert (place / "origin").as_uri() in problem["detail"]
    assert done(place, "pack", place / "absent", "-t", "trainer:v1", code=3)["status"] == 404
    done(place, "pack", place / "app", "-t", "trainer:v1", "--entrypoint", "sh run", code=2)
    done(place, "pack", place / "app", "-t", "trainer:v1", "--format", "zip", code=2)
    done(place, "push", "trainer:v1", "--origin", "http://127.0.0.1:1/x", code=5)
    (place / "layout/index.json").write_text("{")
    assert "index.json" in done(place, "push", "trainer:v1", code=6)["detail"]


def test_an_origin_must_be_named(place: Path) -> None:
    finished = run("push", "trainer:v1", "--layout", place)
    assert finished.returncode == 2
    assert "--origin" in finished.stderr


def test_the_layout_lies_in_the_users_data_directory(place: Path) -> None:
    run("pack", place / "app", "-t", "trainer:v1", XDG_DATA_HOME=str(place / "data"))
    assert (place / "data/p2pdist/layout/index.json").exists()
    run("pack", place / "app", "-t", "trainer:v1", HOME=str(place / "home"))
    assert (place / "home/.local/share/p2pdist/layout/index.json").exists()


def test_interrupting_leaves_no_traceback_and_no_leftovers(place: Path) -> None:
    (place / "env/more").write_bytes(os.urandom(24 << 20))
    words = ["pack", place / "env", "-t", "env:1", "--level", "22", "--layout", place / "layout"]
    with programs.start(*words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline and not list((place / "layout").glob(".incoming/*")):
            time.sleep(0.01)
        process.send_signal(signal.SIGINT)
        out, said = process.communicate(timeout=60)
    assert process.returncode == 130
    assert out == ""
    assert "Traceback" not in said
    assert list((place / "layout/.incoming").iterdir()) == []


def test_a_terminal_shows_bars(place: Path) -> None:
    """Bars go to the terminal on standard error; standard output holds the result alone."""
    master, slave = pty.openpty()
    (place / "large").write_bytes(bytes(30 << 20))
    command = [sys.executable, "-m", "p2pdist.cli.main", "blob", "push", str(place / "large")]
    environment = {**os.environ, "TERM": "xterm", "COLUMNS": "100", "P2PDIST_ORIGIN": (place / "origin").as_uri()}
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=slave, env=environment)
    os.close(slave)
    shown = b""
    try:
        while chunk := os.read(master, 4096):
            shown += chunk
    except OSError:
        pass  # the other end was closed
    finally:
        os.close(master)
    out, _ = process.communicate(timeout=60)
    assert process.returncode == 0
    assert b"pushing" in shown
    assert b"31.5" in shown or b"30.0" in shown
    assert out.decode().strip() == digest_of(bytes(30 << 20))


@pytest.mark.parametrize(
    "words",
    [
        ("diff", "a:1", "a:2"),
        ("inspect", "a:2"),
        ("ls", "--at-origin", "--origin", "file://{place}/layout"),
        ("pack", "{place}/absent\x1b[2J", "-t", "a:3"),
    ],
    ids=lambda words: words[0],
)
def test_what_others_chose_does_not_reach_the_terminal_as_it_is(place: Path, words: tuple[str, ...]) -> None:
    """Names of files and tags, settings, what errors quote: their control characters are
    escaped."""
    evil = "evil\x1b]0;owned\a"
    done(place, "pack", place / "app", "-t", "a:1", "--format", "tree")
    (place / "app" / evil).write_text("")
    done(place, "pack", place / "app", "-t", "a:2", "--format", "tree", "--env", f"A={evil}")
    index = place / "layout/index.json"
    listed = json.loads(index.read_text())
    (entry, *_) = listed["manifests"]
    renamed = json.loads(json.dumps(entry).replace("a:1", "a:\\u001b[2J").replace("a:2", "a:\\u001b[2J"))
    listed["manifests"].append(renamed)
    index.write_text(json.dumps(listed))
    finished = run(*(word.format(place=place) for word in words), P2PDIST_LAYOUT=str(place / "layout"))
    printed = finished.stdout + finished.stderr
    assert [char for char in printed if not char.isprintable() and char != "\n"] == []
    assert "\\x1b" in printed


@pytest.mark.slow
def test_the_origin_that_is_named_is_told_of(place: Path) -> None:
    """The layout has another package of the same tag. An origin that a variable names comes after
    what was just packed."""
    old = done(place, "pack", place / "app", "-t", "trainer:v1")["digest"]
    done(place, "push", "trainer:v1")
    (place / "app/run").write_text("#!/bin/sh\necho another\n")
    new = done(place, "pack", place / "app", "-t", "trainer:v1")["digest"]
    named = ("--origin", (place / "origin").as_uri())
    assert done(place, "inspect", "trainer:v1", *named)["digest"] == old != new
    assert done(place, "inspect", "trainer:v1", *named, "--layout", place / "layout")["digest"] == old
    assert done(place, "inspect", "trainer:v1")["digest"] == new
    done(place, "pack", place / "app", "-t", "trainer:v2")
    assert done(place, "diff", "trainer:v1", "trainer:v2")["bytes_to_move"] == 0
    assert done(place, "diff", "trainer:v1", "trainer:v2", *named)["bytes_to_move"] > 0, "v2 is in the layout alone"
    assert "is not at" in done(place, "inspect", "trainer:v2", *named, code=3)["detail"]


def test_the_total_of_a_tree_is_what_a_host_brings(place: Path) -> None:
    """Its layer is the list of its files; the bytes are in packs."""
    packed = run("pack", place / "env", "-t", "env:1", "--format", "tree", P2PDIST_LAYOUT=str(place / "layout"))
    assert "-> package of 293" in packed.stdout and "KiB in 1 layer, 1 catalog, 1 pack, " in packed.stdout
    found = done(place, "inspect", "env:1")
    assert found["bytes_total"] == sum(blob["size"] for blob in (*found["layers"], *found["parts"])) > 300_000
    assert {part["mediaType"].rpartition(".")[0].rpartition(".")[2] for part in found["parts"]} == {"catalog", "pack"}
    told = run("inspect", "env:1", P2PDIST_LAYOUT=str(place / "layout")).stdout
    assert "KiB in 1 layer, 1 catalog, 1 pack\n" in told and told.count("\npart ") == 2
