"""Whole processes: packages with a bootstrap, by which they are shown before their lists of files
are here."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from lazy_marks import needs_events
from site_rig import P2PDIST, Agent, Site

from p2pdist.model.manifest import CATALOG_TYPE, TREE_TYPE, Descriptor, Manifest, decode_manifest, is_bootstrap
from p2pdist.mount import kernel
from p2pdist.mount.lazy.plain import sees_all_processes
from p2pdist.mount.supervisor.process import WAIT

MIB = 1 << 20
SLOW_BYTES_S = 2 * MIB
PATIENCE_S = 600.0
"""For what never happens: no test is of how soon something does."""

PATIENT = {"lazy-wait": str(PATIENCE_S)}
MODULE = b"p2pdist.mount.supervisor.process"
READ = [f"lib/p{number % 9}/m{number}.py" for number in range(7, 400, 40)]
"""What the program reads, in this order."""

pytestmark = [pytest.mark.slow, needs_events, pytest.mark.timeout(1800)]


@pytest.fixture
def source(site: Site) -> Path:
    """A tree with many small files, some of them alike, large ones and a program; its package is
    app:v1."""
    top, drawn = site.directory / "source", random.Random(7)
    for number in range(400):
        path = top / f"lib/p{number % 9}/m{number}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(drawn.randbytes(drawn.randrange(100, 9000)) if number % 50 else b"alike")
    (top / "weights.bin").write_bytes(drawn.randbytes(8 * MIB))
    (top / "zeros.bin").write_bytes(drawn.randbytes(4096) + bytes(6 * MIB) + drawn.randbytes(5))
    (top / "empty").touch()
    os.link(top / "weights.bin", top / "same.bin")
    (top / "link.bin").symlink_to("weights.bin")
    lines = ["#!/bin/sh", *(f'cat "$P2PDIST_ROOT/{name}"' for name in READ), "# padding" * 2000]
    (top / "start.sh").write_text("\n".join(lines))
    (top / "start.sh").chmod(0o755)
    publish(site, top, "--bootstrap")
    return top


def publish(site: Site, top: Path, *options: str) -> None:
    layout = ("--layout", str(site.directory / "layout"))
    entrypoint = '["${P2PDIST_ROOT}/start.sh"]'
    words = ("pack", str(top), "-t", "app:v1", "--format", "tree", "--entrypoint", entrypoint, *options)
    for done in (words, ("push", "app:v1", "--origin", f"file://{site.layout}")):
        code, _, errors = site.command(*done, *layout)
        assert code == 0, errors


def manifest_of(site: Site) -> Manifest:
    code, told, errors = site.command("inspect", "app:v1", "--layout", str(site.directory / "layout"))
    assert code == 0, errors
    return decode_manifest((site.layout / "blobs/sha256" / told["digest"].partition(":")[2]).read_bytes())


def bootstrap_of(site: Site) -> Descriptor:
    (part,) = filter(is_bootstrap, manifest_of(site).parts)
    return part


class View:
    """app:v1, mounted by an agent."""

    def __init__(self, agent: Agent, *options: str) -> None:
        self.agent, self.path = agent, agent.site.directory / f"view-{agent.name}"
        words = ("mount", *options, "app:v1", str(self.path), "--socket", str(agent.socket))
        code, told, self.said = agent.site.command(*words)
        assert code == 0, self.said
        self.how = str(told["how"])

    def status(self) -> dict[str, Any]:
        code, told, errors = self.agent.site.command("status", "--socket", str(self.agent.socket))
        assert code == 0, errors
        (mount,) = told["mounts"]
        return dict(mount["lazy"])

    def umount(self) -> None:
        code, _, errors = self.agent.site.command("umount", str(self.path), "--socket", str(self.agent.socket))
        assert code == 0, errors

    def check(self, source: Path) -> None:
        """Everything is as it was packed, as other processes see it."""
        words = ["diff", "-r", "--no-dereference", str(source), str(self.path)]
        found = subprocess.run(words, capture_output=True, text=True)
        assert (found.stdout + found.stderr).splitlines() == []


def supervisors(agent: Agent) -> dict[int, list[bytes]]:
    """What supervises views of an agent, or is to, with its command lines."""
    found = {}
    for pid in filter(str.isdecimal, os.listdir("/proc")):
        with suppress(OSError):
            words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
            if MODULE in words and any(word.startswith(os.fsencode(agent.store) + b"/") for word in words):
                found[int(pid)] = words[:-1]
    return found


@pytest.fixture(autouse=True)
def nothing_stays(site: Site) -> Iterator[None]:
    """Whatever a test leaves mounted or running ends with it."""
    yield
    for mounted in reversed(kernel.mounted()):
        if site.directory in mounted.point.parents:
            kernel.unmount(mounted.point, lazily=True)
    site.close()  # an agent would start another supervisor
    for store in site.directory.glob("store-*"):
        while pids := supervisors(Agent(site, "none", store=str(store))):
            for pid in pids:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)


def until(condition: Callable[[], object], what: str) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.05)


def test_a_package_is_shown_by_its_bootstrap(site: Site, source: Path) -> None:
    """What stood by supervises it; in the end it is whole, and covered."""
    part, manifest = bootstrap_of(site), manifest_of(site)
    lists = [blob for blob in (*manifest.layers, *manifest.parts) if blob.media_type in (TREE_TYPE, CATALOG_TYPE)]
    assert part.size < sum(blob.size for blob in lists)
    site.origin.rate_bytes_s = SLOW_BYTES_S
    (agent,) = site.agents(1, **PATIENT)
    view = View(agent, "--lazy")
    assert view.how == "lazy" and "eager" not in view.said
    assert view.status()["metadata_bytes"] == part.size == site.origin_bytes(part.digest)
    found = supervisors(agent)
    assert {words[-1] for words in found.values()} == {WAIT.encode()}, "another one was begun"
    assert (view.path / READ[3]).read_bytes() == (source / READ[3]).read_bytes()
    view.check(source)
    site.origin.rate_bytes_s = 0
    until(lambda: view.status()["whole"], "the view lacks something")
    until(lambda: not supervisors(agent), "the supervisors stay")
    view.check(source)
    if sees_all_processes():
        until(lambda: "covered" in view.status()["steps"], "it is not covered")
        view.check(source)
    assert site.origin_bytes(part.digest) == part.size
    assert "without its bootstrap" not in agent.log.read_text()
    view.umount()
    again = View(agent, "--lazy")
    assert again.how == "erofs"  # all of it is here
    again.umount()
    assert not supervisors(agent)


def test_a_package_with_a_bootstrap_is_mounted_eagerly_too(site: Site, source: Path) -> None:
    (agent,) = site.agents(1)
    view = View(agent)
    assert view.how != "lazy" and site.origin_bytes(bootstrap_of(site).digest) == 0
    view.check(source)
    view.umount()


def test_a_bootstrap_that_is_not_there_costs_nothing_but_a_line(site: Site, source: Path) -> None:
    """As one that storage has lost."""
    part = bootstrap_of(site)
    (site.layout / "blobs/sha256" / part.digest.partition(":")[2]).unlink()
    (agent,) = site.agents(1, **PATIENT)
    view = View(agent, "--lazy")
    assert view.how == "lazy" and "without its bootstrap" in agent.log.read_text()
    view.check(source)
    view.umount()
    until(lambda: not supervisors(agent), "a supervisor stays")


def test_what_runs_by_a_bootstrap_is_recorded(site: Site, source: Path) -> None:
    """By the names that lists give, which may come after the program has ended."""
    site.origin.rate_bytes_s = SLOW_BYTES_S
    (agent,) = site.agents(1, **PATIENT)
    words = [*P2PDIST, "run", "--lazy", "--socket", str(agent.socket), "app:v1"]
    ran = subprocess.run(words, capture_output=True)
    assert ran.returncode == 0 and b"lazy: fanotify" in ran.stderr, ran.stderr
    assert ran.stdout == b"".join((source / name).read_bytes() for name in READ)
    assert site.origin_bytes(bootstrap_of(site).digest)
    tracker = ("--tracker", site.tracker_url)
    until(lambda: site.command("trace", "ls", *tracker)[1]["traces"], "the tracker has no trace")
    code, shown, errors = site.command("trace", "show", "app:v1", *tracker)
    assert code == 0, errors
    read = list(dict.fromkeys(span["path"] for span in shown["spans"]))
    assert set(READ) | {"start.sh"} <= set(read)
    assert "weights.bin" not in read
    until(lambda: not supervisors(agent), "a supervisor stays")


def test_an_agent_that_is_killed_leaves_a_view_that_the_next_one_fills(site: Site, source: Path) -> None:
    """Right after the mount: it has computed nothing of lists yet."""
    site.origin.rate_bytes_s = SLOW_BYTES_S / 4
    (agent,) = site.agents(1, **PATIENT)
    view = View(agent, "--lazy")
    agent.kill()
    reader = subprocess.Popen(["cat", str(view.path / READ[5])], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    site.origin.rate_bytes_s = 0
    agent.start()
    assert reader.communicate(timeout=PATIENCE_S) == ((source / READ[5]).read_bytes(), b"")
    view.check(source)
    until(lambda: view.status()["whole"], "the view lacks something")
    until(lambda: not supervisors(agent), "the supervisors stay")
    view.check(source)
    view.umount()


def test_nothing_stays_of_a_mount_that_failed(site: Site, source: Path) -> None:
    """What stood by for it ends."""
    (agent,) = site.agents(1, **PATIENT)
    path = site.directory / "taken"
    path.mkdir()
    (path / "file").touch()
    words = ("mount", "--lazy", "app:v1", str(path), "--socket", str(agent.socket))
    code, _, errors = site.command(*words)
    assert code and "taken" in errors
    assert site.origin_bytes(bootstrap_of(site).digest), "it has not begun"
    until(lambda: not supervisors(agent), "what stood by stays")
    records = agent.store / "mounts/records"
    assert not [entry for entry in records.iterdir() if entry.is_dir()]
    view = View(agent, "--lazy")
    assert set(supervisors(agent)) and view.how == "lazy"
    view.umount()
    until(lambda: not supervisors(agent), "the supervisors stay")


def test_an_agent_that_is_killed_while_a_supervisor_stands_by_takes_it_along(site: Site, source: Path) -> None:
    """It waits on a pipe of the agent. The trial of ways has others."""
    (agent,) = site.agents(1, **PATIENT)

    def standing_by() -> list[int]:
        return [pid for pid, words in supervisors(agent).items() if words[-1] == WAIT.encode()]

    site.origin.rate_bytes_s = 1000.0  # the bootstrap is waited for
    words = [*P2PDIST, "mount", "--lazy", "app:v1", str(site.directory / "view"), "--socket", str(agent.socket)]
    mounting = subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    until(standing_by, "nothing stands by")
    agent.kill()
    mounting.wait(PATIENCE_S)
    until(lambda: not standing_by(), "what stood by stays")
