"""Encrypted packages as processes: keys, pushes and runs by the command line, and agents that are
killed while they decrypt."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from pathlib import Path

import programs
import pytest
from site_rig import Agent, Site, free_port, running_site, until

from p2pdist.model.errors import Refused
from p2pdist.model.manifest import decode_manifest

pytestmark = [pytest.mark.slow, pytest.mark.root]

MIB = 1 << 20
MARK = b"nobody without the key may read this"


class SealedFleet:
    """A tracker with an access file in which team-a/* has a key, and a layout."""

    def __init__(self, site: Site) -> None:
        self.site = site
        self.access = site.directory / "access" / "access.toml"
        self.access.parent.mkdir()
        self.layout = site.directory / "layout"
        self.url = f"https://127.0.0.1:{site.tracker_port}"
        words = ["tracker", "--listen", f"127.0.0.1:{site.tracker_port}", "--origin", f"file://{site.layout}"]
        words += ["--state", str(site.directory / "state"), "--access", str(self.access)]
        site.tracker_process = site.spawn(words, site.directory / "tracker.log")
        until(self.join_file.exists)
        self.recipient = self.out("key", "create", "team-a", "--access", str(self.access)).strip()
        with self.access.open("a") as file:
            file.write('\n[sealed."team-a/*"]\nkey = "team-a"\n')
        until(lambda: b"holds as it is now" in (site.directory / "tracker.log").read_bytes())

    @property
    def join_file(self) -> Path:
        return self.access.parent / "join-default.token"

    def agent(self, name: str) -> Agent:
        return Agent(self.site, name, tracker=self.url, join_file=str(self.join_file), probe_listen=str(free_port()))

    def out(self, *words: str, code: int = 0) -> str:
        done = programs.run(*words, env={**os.environ, "P2PDIST_LAYOUT": str(self.layout)})
        assert done.returncode == code, done.stderr
        return str(done.stdout) if code == 0 else str(done.stderr)

    def push(self, reference: str, source: Path, form: str) -> None:
        self.out("pack", str(source), "-t", reference, "--format", form, "--entrypoint", '["cat"]', "-q")
        self.out("push", reference, "--origin", f"file://{self.site.layout}", "--encrypt-to", self.recipient, "-q")

    def plain_blob(self, reference: str) -> str:
        """The hexadecimal digits of the first layer of a package in the layout."""
        index = json.loads((self.layout / "index.json").read_text())
        (digest,) = [
            each["digest"]
            for each in index["manifests"]
            if each["annotations"]["org.opencontainers.image.ref.name"] == reference
        ]
        data = (self.layout / "blobs" / "sha256" / digest.partition(":")[2]).read_bytes()
        return decode_manifest(data).layers[0].digest.partition(":")[2]


@pytest.fixture
def fleet(tmp_path: Path) -> Iterator[SealedFleet]:
    with running_site(tmp_path, tracker=False) as site:
        yield SealedFleet(site)


def source(directory: Path, size: int) -> Path:
    directory.mkdir()
    (directory / "data").write_bytes(MARK + os.urandom(size) + MARK)
    (directory / "note").write_bytes(MARK)
    return directory


@pytest.mark.parametrize("form", ["squashfs", "tree"])
def test_an_encrypted_package_runs_on_hosts_that_may(fleet: SealedFleet, tmp_path: Path, form: str) -> None:
    fleet.push("team-a/x:v1", source(tmp_path / "source", 3 * MIB), form)
    assert not any(MARK in path.read_bytes() for path in fleet.site.layout.rglob("*") if path.is_file())
    agents = [fleet.agent(name).start() for name in ("h0", "h1")]
    for agent in agents:
        assert MARK.decode() == fleet.out("run", "--socket", str(agent.socket), "team-a/x:v1", "note")
    assert MARK.decode() == fleet.out("run", "--lazy", "--socket", str(agents[0].socket), "team-a/x:v1", "note")
    listed = json.loads(fleet.out("ls", "--socket", str(agents[0].socket), "--json"))
    assert {entry["encrypted"] for entry in listed} == {True}
    assert "encrypted" in fleet.out("ls", "--at-origin", "--origin", f"file://{fleet.site.layout}", "--json")
    shown = fleet.out("inspect", "team-a/x:v1", "--origin", f"file://{fleet.site.layout}")
    assert "encrypted blobs" in shown and "note" not in shown
    plain = fleet.out(
        "pack",
        str(tmp_path / "source"),
        "-t",
        "team-a/y:v1",
        "--base",
        "team-a/x:v1",
        "--layout",
        str(tmp_path / "other"),
        "--origin",
        f"file://{fleet.site.layout}",
        code=2,
    )
    assert "is encrypted" in plain
    keys = json.loads(fleet.out("key", "list", "--access", str(fleet.access), "--json"))
    assert keys == [{"name": "team-a", "opens": "team-a/*", "recipients": [fleet.recipient]}]
    newer = fleet.out("key", "rotate", "team-a", "--access", str(fleet.access)).strip()
    words = ("--access", str(fleet.access), "--origin", f"file://{fleet.site.layout}")
    assert newer != fleet.recipient and "sha256:" in fleet.out("key", "rewrap", "team-a", "team-a/x:v1", *words)
    assert "already" in fleet.out("key", "rewrap", "team-a", "team-a/x:v1", *words)
    late = fleet.agent("h2").start()
    assert MARK.decode() == fleet.out("run", "--socket", str(late.socket), "team-a/x:v1", "note")
    logs = b"".join(log.read_bytes() for log in fleet.site.directory.glob("*.log"))
    assert b"AGE-SECRET" not in logs and MARK not in logs


def test_a_fleet_without_access_opens_nothing(fleet: SealedFleet, tmp_path: Path) -> None:
    fleet.push("team-a/x:v1", source(tmp_path / "source", MIB), "squashfs")
    (tmp_path / "open").mkdir()
    with running_site(tmp_path / "open", tracker=False) as site:
        words = ["tracker", "--listen", f"127.0.0.1:{site.tracker_port}", "--origin", f"file://{fleet.site.layout}"]
        site.spawn(words, site.directory / "tracker.log")
        agent = Agent(site, "h0").start()
        with pytest.raises(Refused, match="over TLS alone"):
            agent.pull(package="team-a/x:v1")
        assert not any(MARK in path.read_bytes() for path in agent.store.rglob("*") if path.is_file())


def blocks(path: Path) -> int:
    """What a file takes on the disk, which may be renamed at any moment; 0 where there is none."""
    try:
        return path.stat().st_blocks
    except FileNotFoundError:
        return 0


def test_an_agent_that_is_killed_while_it_decrypts_goes_on(fleet: SealedFleet, tmp_path: Path) -> None:
    fleet.push("team-a/x:v1", source(tmp_path / "source", 256 * MIB), "squashfs")
    plain, agent, kills = fleet.plain_blob("team-a/x:v1"), fleet.agent("h0").start(), 0
    partial, complete = agent.store / "partial" / f"{plain}.data", agent.store / "blobs" / "sha256" / plain
    for _ in range(4):
        agent.start_pull(package="team-a/x:v1")
        end = time.monotonic() + 60
        before = blocks(partial)
        while time.monotonic() < end and not complete.exists():
            if blocks(partial) > before:
                agent.kill()
                kills += 1
                break
            time.sleep(0.002)
        if complete.exists():
            break
        agent.start()
    assert kills, "it was never caught at work"
    assert agent.pull(package="team-a/x:v1").state == "done"
    assert complete.read_bytes() == (fleet.layout / "blobs" / "sha256" / plain).read_bytes()
    assert MARK.decode() == fleet.out("run", "--socket", str(agent.socket), "team-a/x:v1", "note")
