"""`p2pdist doctor`: a sound host, and one failure at a time, each with its remedy."""

from __future__ import annotations

import asyncio
import email.utils
import errno
import json
import os
import socket
import subprocess
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import programs
import pytest
from aiohttp import web
from fleet_rig import fleet_of, tracker_of
from ports import free_port
from test_cli_main import run as run_quick

from p2pdist.cli import diagnosis, probe
from p2pdist.cli.diagnosis import Finding
from p2pdist.mount import kernel


@pytest.fixture
def origin(tmp_path: Path) -> str:
    """A layout with one package."""
    (tmp_path / "source").mkdir()
    (tmp_path / "source" / "file").write_text("content")
    url = (tmp_path / "origin").as_uri()
    layout = {"P2PDIST_LAYOUT": str(tmp_path / "layout")}
    assert run_quick("pack", tmp_path / "source", "-t", "trainer:v1", **layout).returncode == 0
    assert run_quick("push", "trainer:v1", "--origin", url, **layout).returncode == 0
    return url


async def run(*words: str | Path) -> tuple[int, str]:
    done = await asyncio.to_thread(programs.run, "doctor", *words)
    return done.returncode, done.stdout


async def test_names_do_not_reach_the_terminal_as_they_are(tmp_path: Path) -> None:
    _, out = await run("--store", tmp_path / "st\x1b]0;owned\a", "--socket", tmp_path / "none.sock")
    assert [char for char in out if not char.isprintable() and char != "\n"] == []
    assert "st\\x1b]0;owned" in out


@asynccontextmanager
async def answering(text: bytes) -> AsyncIterator[str]:
    """A server that gives every client the same bytes."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(text)
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    async with server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"


def only(findings: list[Finding], name: str) -> Finding:
    (found,) = [finding for finding in findings if finding.name == name]
    return found


@pytest.mark.slow
async def test_a_sound_host_ends_with_0(tmp_path: Path, origin: str) -> None:
    words = ["--listen", f"127.0.0.1:{free_port()}", "--store", tmp_path / "store", "--origin", origin]
    async with tracker_of(fleet_of(1)) as (_, url):
        code, out = await run("--tracker", url, *words, "--socket", tmp_path / "none.sock", "--json")
        plain_code, plain = await run("--tracker", url, *words, "--socket", tmp_path / "none.sock")
    found = json.loads(out)
    assert code == plain_code == 0 and found["ok"] is True
    states = {check["name"]: check["state"] for check in found["checks"]}
    sound = ("versions", "tracker", "clock", "port", "origin")
    space = {name: states.pop(name) for name in ("store", "disk", "BitTorrent port")}
    assert set(space.values()) <= {"ok", "warning"}, "it depends on the machine"
    assert {states[name] for name in sound} == {"ok"}
    mounts = {
        "root",
        "overlay",
        "loop",
        "writable",
        "erofs",
        "lazy",
        "reflink",
        "squashfs",
        "squashfuse",
        "user namespaces",
    }
    assert set(states) == {*sound, "agent", *mounts}
    assert all(bool(check["remedy"]) == (check["state"] != "ok") for check in found["checks"])
    assert "has 1 packages, and a manifest could be read" in plain and "FAILED" not in plain
    assert not (tmp_path / "store").exists() and not list(tmp_path.glob(".p2pdist-doctor*")), "nothing is left behind"


@pytest.mark.slow
async def test_what_fails_is_told_with_its_remedy_and_ends_with_1(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen(1)
        words = [
            "--listen",
            f"127.0.0.1:{taken.getsockname()[1]}",
            "--store",
            tmp_path,
            "--tracker",
            "http://127.0.0.1:9",
        ]
        code, out = await run(*words, "--origin", f"file://{tmp_path}/nowhere", "--socket", tmp_path / "none.sock")
    assert code == 1
    for name, remedy in (("tracker", "Start it"), ("port", "ss -ltnp"), ("origin", "")):
        lines = out.splitlines()
        at = next(number for number, line in enumerate(lines) if line.startswith("FAILED") and f" {name} " in line)
        assert remedy in lines[at + 1] and lines[at + 1].startswith(" " * 20), out


async def test_a_port_for_bittorrent_that_is_taken_is_told() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen(1)
        number = taken.getsockname()[1]
        found = only(await diagnosis.port(("127.0.0.1", number - 1)), "BitTorrent port")
    assert found.state == "warning" and f"127.0.0.1:{number}" in found.detail and "--bt-listen" in found.remedy
    assert only(await diagnosis.port(("127.0.0.1", 65535)), "BitTorrent port").state == "warning"


@pytest.mark.parametrize(("off_s", "state"), [(0.0, "ok"), (-1.0, "ok"), (60.0, "failed"), (-3600.0, "failed")])
async def test_the_clock_is_compared_with_that_of_the_tracker(off_s: float, state: str) -> None:
    date = email.utils.formatdate(time.time() + off_s, usegmt=True)
    body = b'{"sessions": 0}'
    head = f"HTTP/1.1 200 OK\r\nDate: {date}\r\nContent-Length: {len(body)}\r\n\r\n".encode()
    async with answering(head + body) as url:
        found = only(await diagnosis.trackers([url]), "clock")
    assert found.state == state and bool(found.remedy) == (state == "failed")
    if state == "failed":
        assert ("behind" if off_s > 0 else "ahead of") in found.detail


async def test_what_is_no_tracker_is_not_taken_for_one() -> None:
    async with answering(b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nhello") as url:
        (found,) = await diagnosis.trackers([url])
    assert found.state == "failed" and "not as a tracker does" in found.detail


async def test_an_origin_whose_manifest_is_gone_or_altered_fails(tmp_path: Path, origin: str) -> None:
    assert (await diagnosis.origin(origin))[0].state == "ok"
    index = json.loads((tmp_path / "origin" / "index.json").read_text())
    manifest = tmp_path / "origin" / "blobs" / "sha256" / index["manifests"][0]["digest"].removeprefix("sha256:")
    manifest.chmod(0o600)
    data = manifest.read_bytes()
    manifest.write_bytes(data[:-2] + b"}}")
    (altered,) = await diagnosis.origin(origin)
    manifest.unlink()
    (gone,) = await diagnosis.origin(origin)
    assert altered.state == gone.state == "failed" and altered.remedy and gone.remedy
    assert (await diagnosis.origin(""))[0].state == "warning"


async def test_a_socket_that_nobody_answers_on_fails(tmp_path: Path) -> None:
    path = tmp_path / "agent.sock"
    with socket.socket(socket.AF_UNIX) as left:
        left.bind(str(path))
    (found,) = await diagnosis.agent(path)
    assert found.state == "failed" and "no agent answers" in found.detail and "p2pdist agent" in found.remedy


async def test_of_an_agent_without_trackers_none_is_missed(tmp_path: Path) -> None:
    """It asked the default one, and a sound host failed."""
    status = {"host": "h1", "address": f"127.0.0.1:{free_port()}", "tracker": {"url": "", "connected": False}}

    async def answer(request: web.Request) -> web.Response:
        return web.json_response({**status, "store": {"path": str(tmp_path), "disk": "ok"}})

    app, path = web.Application(), tmp_path / "agent.sock"
    app.add_routes([web.get("/v1/status", answer)])
    runner = web.AppRunner(app)
    await runner.setup()
    try:
        await web.UnixSite(runner, str(path)).start()
        found = json.loads((await run("--socket", path, "--json"))[1])["checks"]
    finally:
        await runner.cleanup()
    states = {check["name"]: check["state"] for check in found}
    assert "tracker" not in states and (states["agent"], states["agent's tracker"]) == ("ok", "warning"), found


def test_a_place_without_room_or_right_to_write_fails(tmp_path: Path) -> None:
    (full,) = diagnosis.store(Path("/proc/p2pdist"))
    assert full.state == "failed" and "--store" in full.remedy
    space, disk = diagnosis.store(tmp_path / "not" / "yet" / "there")
    assert "free for" in space.detail and disk.state in ("ok", "warning") and str(tmp_path) in disk.detail
    assert list(tmp_path.iterdir()) == []


@pytest.mark.root
def test_a_place_without_inodes_fails(tmp_path: Path) -> None:
    """Space is free, and still no file can be made."""
    place = tmp_path / "small"
    place.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=300m,nr_inodes=50", "tmpfs", place], check=True)
    try:
        found = only(diagnosis.store(place), "inodes")
        assert (found.state, "inodes free" in found.detail, "df -i" in found.remedy) == ("failed", True, True)
    finally:
        subprocess.run(["umount", "-l", place], check=True)


@pytest.mark.root
async def test_a_read_only_store_is_a_finding_among_the_others(tmp_path: Path) -> None:
    place = tmp_path / "disk"
    place.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=300m", "tmpfs", place], check=True)
    try:
        subprocess.run(["mount", "-o", "remount,ro", place], check=True)
        code, out = await run("--store", place / "store", "--socket", tmp_path / "none.sock", "--json")
    finally:
        subprocess.run(["umount", "-l", place], check=True)
    checks = {check["name"]: check for check in json.loads(out)["checks"]}
    assert code == 1
    assert "read-only" in checks["store"]["detail"]
    assert "dmesg" in checks["store"]["remedy"]
    assert {"versions", "port", "overlay", "user namespaces"} <= checks.keys()


async def test_what_any_disk_may_meet_is_a_finding() -> None:
    """Not the end of doctor, which has more to say."""

    async def look() -> list[Finding]:
        raise OSError(errno.EIO, os.strerror(errno.EIO), "/dev/disk")

    (found,) = await diagnosis.checked("mounts", look())
    assert (found.name, found.state) == ("mounts", "failed")
    assert "/dev/disk" in found.detail


@pytest.mark.parametrize("way", sorted(probe.WAYS))
def test_trying_a_mount_leaves_nothing_behind(way: str, tmp_path: Path) -> None:
    why = diagnosis._probe(way, tmp_path)
    assert "Traceback" not in why and "\n" not in why
    assert str(tmp_path) not in Path("/proc/self/mountinfo").read_text() and list(tmp_path.iterdir()) == []


@pytest.mark.root
def test_as_root_an_overlay_can_be_mounted(tmp_path: Path) -> None:
    assert diagnosis._probe("overlay", tmp_path) == ""
    states = {finding.name: finding.state for finding in diagnosis.mounts(tmp_path)}
    assert states["root"] == states["overlay"] == "ok"


@pytest.mark.root
def test_a_store_on_an_overlay_shows_what_is_not_written_to(tmp_path: Path) -> None:
    """As in a container without a volume: an overlay takes no other one for its upper layer."""
    memory, merged = tmp_path / "memory", tmp_path / "merged"
    memory.mkdir()
    merged.mkdir()
    kernel.mount("memory", memory, "tmpfs")
    try:
        for name in ("lower", "upper", "work"):
            (memory / name).mkdir()
        options = f"lowerdir={memory}/lower,upperdir={memory}/upper,workdir={memory}/work"
        kernel.mount("overlay", merged, "overlay", 0, options)
        try:
            found = {finding.name: finding for finding in diagnosis.mounts(merged)}
        finally:
            kernel.unmount(merged)
    finally:
        kernel.unmount(memory, lazily=True)
    assert (found["overlay"].state, found["writable"].state) == ("ok", "warning")
    assert "--store" in found["writable"].remedy


async def test_every_mistake_in_policies_is_named(tmp_path: Path) -> None:
    """With --policies only the file is looked at, and each mistake is named by table and key, with
    its remedy."""
    file = tmp_path / "policies.toml"
    file.write_text('[[policy]]\nmatch = "a:*"\ncahce = "pin"\n\n[[policy]]\nmatch = "b:*"\nreaders = 0\n')
    code, out = await run("--policies", file, "--json")
    found = json.loads(out)
    assert code == 1 and found["ok"] is False
    said = [(check["state"], check["detail"]) for check in found["checks"]]
    assert said[0] == ("failed", "[[policy]] 1 (a:*), cahce: there is no such key")
    assert said[1][1].startswith("[[policy]] 2 (b:*), readers: 0 is not a whole number") and len(said) == 2
    assert found["checks"][0]["remedy"] == "Write cache"
    for text, what in (("[[policy", "it is no TOML"), ("\xff", "it is no TOML")):
        file.write_bytes(text.encode("latin-1"))
        assert what in only(diagnosis.policies(file), "policies").detail
    assert "cannot be read" in only(diagnosis.policies(tmp_path / "absent"), "policies").detail
    file.write_text('[[policy]]\nmatch = "a:*"\n')
    assert only(diagnosis.policies(file), "policies").state == "ok"
