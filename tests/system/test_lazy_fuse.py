"""Whole processes: packages that are shown before their contents are here, through FUSE."""

from __future__ import annotations

import os
import random
import shutil
import signal
import subprocess
import tempfile
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
from ports import free_pair
from site_rig import P2PDIST, Agent, Site, wait_for
from test_lazy_views import (
    PATIENCE_S,
    SLOW_BYTES_S,
    View,
    nothing_stays,  # noqa: F401
    reader,
    source,  # noqa: F401
    until,
    wrong_files,
)
from unprivileged import NOBODY, as_nobody

from p2pdist.model.trace import WANTED_HEADER
from p2pdist.mount.lazy.fuse import binding
from tracker.core.traces.index import INVITED_MAX

MIB = 1 << 20


def _fuse_works() -> bool:
    try:
        binding()
    except OSError:
        return False
    return os.geteuid() == 0


pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not _fuse_works(), reason="needs root and p2pdist[fuse]"),
]


def agent_with_fuse(site: Site, **options: str) -> Agent:
    return Agent(site, "h0", lazy_way="fuse", **options).start()


def push(site: Site, name: str, *words: str) -> None:
    layout = ("--layout", str(site.directory / "layout"))
    for command in (("pack", *words, "-t", name), ("push", name, "--origin", f"file://{site.layout}")):
        code, _, errors = site.command(*command, *layout)
        assert code == 0, errors


def servers(view: View) -> list[int]:
    """The server of FUSE and its guard."""
    found = []
    for pid in filter(str.isdecimal, os.listdir("/proc")):
        try:
            words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
        except OSError:
            continue
        if b"p2pdist.mount.lazy.fuse" in words and os.fsencode(view.directory) in words:
            found.append(int(pid))
    return found


@pytest.mark.parametrize("kind", ["tree", "squashfs", "layers"])
def test_a_view_is_there_before_its_contents_and_ends_up_whole(site: Site, source: Path, kind: str) -> None:  # noqa: F811
    top = source
    if kind != "tree":
        push(site, "app:v1", str(source), "--format", "squashfs")
    if kind == "layers":
        top = site.directory / "more"
        subprocess.run(["cp", "-a", str(source), str(top)], check=True)
        (top / "extra.bin").write_bytes(random.Random(9).randbytes(3 * MIB))
        (top / "greet.sh").write_text("#!/bin/sh\necho another\n")
        push(site, "app:v1", str(top), "--format", "tree", "--base", "app:v1")
    site.origin.rate_bytes_s = SLOW_BYTES_S / 4
    agent = agent_with_fuse(site)
    view = View(agent)
    assert view.how == "lazy" and "eager" not in view.said
    assert reader(view.path / "greet.sh").communicate()[0] == (top / "greet.sh").read_bytes()
    status = view.status()
    assert not status["whole"] and status["stalls"] >= 1
    assert status["bytes_filled"] < status["bytes_total"]
    site.origin.rate_bytes_s = 0
    assert wrong_files(view.path, top) == []
    until(lambda: view.status()["whole"], "the view lacks something")
    until(lambda: not servers(view), "the servers stay")
    for path in filter(Path.is_file, view.path.rglob("*")):
        with path.open("rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    assert wrong_files(view.path, top) == []
    view.umount()
    # What is read of images is not recorded: such a start leaves that to others.
    url = f"{site.tracker_url}/v1/traces?reference=app:v1&entry=&starts=1"
    invited = [WANTED_HEADER in urllib.request.urlopen(url, timeout=60).headers for _ in range(INVITED_MAX)]
    assert all(invited) == (kind != "tree")


@pytest.mark.parametrize("victims", ["server", "all", "agent", "servers"])
def test_kills_leave_no_wrong_byte(site: Site, source: Path, victims: str) -> None:  # noqa: F811
    site.origin.rate_bytes_s = SLOW_BYTES_S
    agent = agent_with_fuse(site)
    view = View(agent)
    files = [path.relative_to(source) for path in source.rglob("*") if path.is_file() and not path.is_symlink()]
    random.Random(5).shuffle(files)
    readers = [(name, reader(view.path / name)) for name in files[:40]]
    for round_ in range(3):
        until(lambda: view.status()["readers"] or view.status()["whole"], "the agent hears of no reader")
        pids = sorted(servers(view))
        for pid in {"server": pids[-1:], "agent": [], "servers": pids, "all": pids}[victims]:
            os.kill(pid, signal.SIGKILL)
        if victims in ("agent", "all"):
            agent.kill()
        readers += [(name, reader(view.path / name)) for name in files[40 + round_ * 3 : 43 + round_ * 3]]
        if victims in ("agent", "all"):
            agent.start()
        until(lambda: view.status()["whole"] or len(servers(view)) == 2, "nothing serves")
    site.origin.rate_bytes_s = 0
    for name, process in readers:
        got, errors = process.communicate(timeout=PATIENCE_S)
        assert got == (source / name).read_bytes() or b"Input/output error" in errors, name
        assert (source / name).read_bytes().startswith(got), name
    until(lambda: view.status()["whole"], "the view lacks something")
    assert wrong_files(view.path, source) == []
    view.umount()


def test_where_only_the_other_way_is_allowed_images_are_eager(site: Site, source: Path) -> None:  # noqa: F811
    push(site, "image:v1", str(source / "lib"), "--format", "squashfs")
    agent = Agent(site, "h0", lazy_way="fanotify").start()
    target = site.directory / "image"
    words = ("mount", "--lazy", "image:v1", str(target), "--socket", str(agent.socket))
    code, status, said = site.command(*words)
    assert code == 0 and status["how"] == "squashfs" and "only FUSE fills images" in said
    assert site.command("umount", str(target), "--socket", str(agent.socket))[0] == 0


@pytest.fixture
def place() -> Iterator[Path]:
    """A directory that NOBODY can reach."""
    path = Path(tempfile.mkdtemp(prefix="p2pdist-test-", dir="/tmp"))
    path.chmod(0o755)
    for name in ("agent", "run", "home"):
        (path / name).mkdir()
    os.chown(path / "home", NOBODY, NOBODY)
    yield path
    shutil.rmtree(path)


@pytest.mark.skipif(shutil.which("squashfuse") is None, reason="needs squashfuse")
def test_without_root_a_program_begins_before_its_images_are_here(
    site: Site,
    source: Path,  # noqa: F811
    place: Path,
) -> None:
    push(site, "app:v1", str(source), "--format", "squashfs", "--entrypoint", '["${P2PDIST_ROOT}/greet.sh"]')
    site.origin.rate_bytes_s = SLOW_BYTES_S
    socket, port = place / "home/agent.sock", free_pair()
    words = ("agent", "--listen", f"127.0.0.1:{port}", "--store", place / "home/store", "--socket", socket)
    words += ("--tracker", site.tracker_url, "--name", "h0")
    environment = {**os.environ, "TMPDIR": str(place / "home")}
    with (place / "log").open("wb") as log:
        agent = subprocess.Popen(
            as_nobody(place / "agent", *P2PDIST, *words), stdout=log, stderr=log, env=environment, cwd="/"
        )
    try:
        wait_for(f"http://127.0.0.1:{port}/readyz", agent, place / "log")
        run = as_nobody(place / "run", *P2PDIST, "run", "--lazy", "--socket", socket, "app:v1")
        ran = subprocess.run(run, capture_output=True, text=True, env=environment, cwd="/", timeout=60)
        assert (ran.returncode, ran.stdout) == (0, "first line\n"), ran.stderr
        assert "contents come when they are read" in ran.stderr and "eager" not in ran.stderr
    finally:
        agent.terminate()
        agent.wait(30)
