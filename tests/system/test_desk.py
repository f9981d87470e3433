"""A package at the desk: packed and run at once without an agent, entered as the root of the file
system, and a whole trial with one command."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import programs
import pytest
from docker_rig import libraries_of
from ports import free_ports
from unprivileged import as_nobody
from waits import wait_until

pytestmark = pytest.mark.slow


@pytest.fixture
def place() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="desk-") as name:
        yield Path(name)


def environment(place: Path) -> dict[str, str]:
    return {
        "PATH": os.environ["PATH"],
        "HOME": str(place),
        "TMPDIR": str(place),
        "P2PDIST_SOCKET": str(place / "none.sock"),
    }


def run(place: Path, *words: str | Path, code: int = 0) -> subprocess.CompletedProcess[str]:
    done = programs.run(*words, env=environment(place), cwd=place)
    assert done.returncode == code, done.stderr
    return done


def app(place: Path, name: str = "app") -> Path:
    """A directory whose program prints a file beside it and its arguments, and ends with 7."""
    source = place / name
    source.mkdir()
    (source / "main.py").write_text(
        "import os, sys\nroot = os.environ['P2PDIST_ROOT']\nprint(open(root + '/data').read(), *sys.argv[1:])\nsys.exit(7)\n"
    )
    (source / "data").write_text("data of the package")
    (source / "p2pdist.toml").write_text("entrypoint = ['python3', '${P2PDIST_ROOT}/main.py']\n")
    return source


def left_behind(place: Path) -> list[str]:
    """Mounts below a place, and files of runs."""
    mounts = [line for line in Path("/proc/mounts").read_text().splitlines() if str(place) in line]
    return mounts + [path.name for path in place.iterdir() if path.name.startswith("p2pdist-")]


def test_a_directory_is_packed_and_run(place: Path) -> None:
    app(place)
    done = run(place, "run", "./app", "--", "--epochs", "3", code=7)
    assert done.stdout == "data of the package --epochs 3\n"
    assert "packed as desk/app:latest" in done.stderr
    again = run(place, "run", "-q", "app/", code=7)  # as a shell completes it
    assert again.stdout == "data of the package\n" and again.stderr == ""
    assert left_behind(place) == []


def test_what_a_directory_loses_when_it_is_packed_and_run_is_said(place: Path) -> None:
    source = app(place)
    os.mkfifo(source / "fifo")
    done = run(place, "run", source, code=7)
    assert "left out: fifo (FIFO)" in done.stderr


def test_the_name_of_a_directory_may_be_as_long_as_a_files(place: Path) -> None:
    """And two that differ at the end alone are two packages."""
    said = [run(place, "run", app(place, "a" * 254 + end), code=7).stderr for end in "bc"]
    packed = [line for text in said for line in text.splitlines() if "packed as desk/aaa" in line]
    assert len(packed) == len(set(packed)) == 2


@pytest.mark.parametrize("form", ["tree", "squashfs"])
def test_a_packed_package_runs_without_an_agent(place: Path, form: str) -> None:
    run(place, "pack", app(place), "-t", "team/app:v1", "--format", form)
    done = run(place, "run", "team/app:v1", code=5)
    assert "p2pdist run --local" in done.stderr
    done = run(place, "run", "--local", "team/app:v1", "--", "x", code=7)
    assert done.stdout == "data of the package x\n"
    assert "Did you mean team/app:v1?" in run(place, "run", "--local", "team/ap:v1", code=3).stderr
    assert left_behind(place) == []


def image(place: Path) -> Path:
    """What an image of a container holds: a shell with its libraries, and an absolute entry point,
    a script for /bin/sh."""
    root = place / "image"
    programs_inside = [Path("/bin/sh"), Path("/bin/cat")]
    for file in (*programs_inside, *libraries_of(programs_inside[0]), *libraries_of(programs_inside[1])):
        target = root / str(file).lstrip("/")
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(os.path.realpath(file), target)
    (root / "app").mkdir()
    (root / "app" / "main.sh").write_text('#!/bin/sh\ncat /app/data\nfor word in "$@"; do eval "$word"; done\npwd\n')
    (root / "app" / "main.sh").chmod(0o755)
    (root / "app" / "data").write_text("inside\n")
    (root / "etc").mkdir(exist_ok=True)
    return root


ENTRY = ("--entrypoint", '["/app/main.sh"]', "--working-dir", "/app")


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting needs root")
@pytest.mark.parametrize("form", ["tree", "squashfs"])
def test_a_package_is_entered_as_the_root(place: Path, form: str) -> None:
    """Its program, interpreter and paths are its own; what it writes goes with it."""
    run(place, "pack", image(place), "-t", "team/image:v1", "--format", form, *ENTRY)
    (place / "shared").write_text("outside\n")
    words = ("run", "-q", "--local", "--root", "--bind", f"{place / 'shared'}:/mnt/shared", "team/image:v1", "--")
    script = (
        "cat /mnt/shared",
        "echo new > /etc/new",
        "cat /etc/new",
        "test -e /proc/self && echo proc",
        f"test -e {place} || echo alone",
    )
    done = run(place, *words, *script)
    said = done.stdout.splitlines()
    assert said[:4] == ["inside", "outside", "new", "proc"] and said[-1] == "/app", done
    assert not Path("/etc/new").exists()
    assert left_behind(place) == []


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting needs root")
def test_a_working_directory_that_an_image_lacks_is_made(place: Path) -> None:
    """As container runtimes do it; what is in its place is said."""
    for directory, code in (("/srv/not/there", 0), ("/app/data", 3)):
        entry = (*ENTRY[:2], "--working-dir", directory)
        run(place, "pack", image(place), "-t", "team/image:v1", *entry)
        done = run(place, "run", "-q", "--local", "--root", "team/image:v1", code=code)
        assert done.stdout.splitlines() == ([] if code else ["inside", directory])
        assert ("is no directory" in done.stderr) == bool(code)
        shutil.rmtree(place / "image")


@pytest.mark.skipif(os.geteuid() != 0, reason="setting up needs root")
@pytest.mark.parametrize("form", ["tree", "squashfs"])
def test_a_user_without_rights_enters_a_package(place: Path, form: str) -> None:
    """In a user namespace: as squashfuse shows the image, or from plain files."""
    (place / "hold").mkdir()
    home = place / "home"
    home.mkdir()
    place.chmod(0o755)
    entry = (*ENTRY[:2], "--working-dir", "/srv/new")
    run(place, "pack", image(place), "-t", "team/image:v1", "--format", form, "--layout", home / "layout", *entry)
    subprocess.run(["chown", "-R", "65534:65534", home], check=True)
    words = (
        "run",
        "-q",
        "--root",
        "--local",
        "--layout",
        home / "layout",
        "team/image:v1",
        "--",
        "echo new > /etc/new",
        "cat /etc/new",
    )
    command = as_nobody(place / "hold", sys.executable, "-m", "p2pdist", *words)
    environ = {**os.environ, "TMPDIR": str(home), "HOME": str(home)}
    done = subprocess.run(command, env=environ, cwd="/", capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stdout.splitlines()) == (0, ["inside", "new", "/srv/new"]), done.stderr


def test_what_cannot_be_entered_or_bound_is_said(place: Path) -> None:
    run(place, "pack", app(place), "-t", "team/app:v1")
    for words, said in (
        (("--bind", "/tmp", "team/app:v1"), "--bind is for --root"),
        (("--root", "--bind", "relative", "team/app:v1"), "is no path to bind"),
        (("--root", "--bind", f"{place}/absent", "team/app:v1"), "does not exist"),
        (("--root", "--bind", "/tmp:/a/../b", "team/app:v1"), "is no path to bind"),
        (("--root", "--writable", "team/app:v1"), "Leave out --writable"),
    ):
        assert said in run(place, "run", "--local", *words, code=2).stderr


def test_a_trial_is_started_used_from_a_second_agent_and_ended(place: Path) -> None:
    """What it prints works as it stands."""
    source, trial = app(place), place / "a trial%20"
    log, port = place / "up.log", free_ports(5)
    words = ("up", "--directory", trial, "--local-only", "--port", str(port))
    with log.open("wb") as output, programs.running(*words, env=environment(place), stdout=output, stderr=output) as up:
        wait_until(lambda: "Ctrl-C ends it" in log.read_text() or up.poll() is not None, "the trial runs", within_s=150)
        assert up.poll() is None, log.read_text()
        lines = [shlex.split(line.replace("~/", f"{place}/"))[1:] for line in log.read_text().splitlines()]
        packs, runs, second, again = lines[3][1:], lines[4][1:], lines[7], lines[8]
        assert packs[0] == "./app" and runs[-1] == "app:v1"
        packed = run(place, "pack", source, "-t", "app:v1", "--push", *packs[-2:], "--json")
        assert json.loads(packed.stdout)["bytes_sent"] > 0
        done = programs.run("run", *runs, "--", "here", env=environment(place))
        assert (done.returncode, done.stdout) == (7, "data of the package here\n"), done.stderr
        with programs.running(*second, env=environment(place), stderr=subprocess.DEVNULL):
            wait_until(lambda: (place / "p2pdist.sock").exists(), "the second agent listens")
            done = programs.run(*again, env=environment(place))
            assert (done.returncode, done.stdout) == (7, "data of the package\n"), done.stderr
        again = run(place, "up", "--directory", trial, "--local-only", "--port", str(free_ports(5)), code=1)
        assert f"another trial runs in {trial}" in again.stderr
        up.send_signal(signal.SIGINT)
        assert up.wait(60) == 0, log.read_text()
    assert not (trial / "agent.sock").exists()


@pytest.mark.parametrize(("offset", "name"), [(0, "tracker"), (1, "agent"), (4, "origin")])
def test_a_port_that_is_taken_ends_a_trial_with_the_reason(place: Path, offset: int, name: str) -> None:
    """And with an option that it has. What answers there as a tracker does is not taken for the
    trial's own."""
    import socket

    port = free_ports(5)
    with socket.create_server(("127.0.0.1", port + offset)):
        done = run(place, "up", "--directory", place / "trial", "--local-only", "--port", str(port), code=1)
    assert f"cannot listen on port {port + offset} for the {name}: Address already in use" in done.stderr
    assert done.stderr.endswith("Choose other ports with --port, or end what listens there\n") and not done.stdout


def test_what_no_trial_can_have_is_told_with_its_own_options(place: Path) -> None:
    for words, said in (
        (("--address", "a b"), "'a b' is no address of a host"),
        (("--address", ""), "--address is empty"),
        (("--address", "192.0.2.1", "--local-only"), "--address is for other hosts"),
        (("--directory", place / ("d" * 100), "--local-only"), "Name a shorter --directory"),
    ):
        done = run(place, "up", "--port", str(free_ports(5)), *words, code=2)
        assert said in done.stderr, done.stderr
