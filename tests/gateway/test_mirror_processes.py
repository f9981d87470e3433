"""The mirror as operators start it: a tracker with an upstream, agents with --mirror, each a
process of its own."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import programs
import pytest
from joined_rig import free_port
from mirror_rig import Image, make_layer, push_image
from registry_rig import needs_registry, running_registry
from test_mirror_skopeo import SKOPEO, configuration, skopeo


@contextlib.contextmanager
def running(directory: Path, name: str, *arguments: str) -> Iterator[subprocess.Popen[bytes]]:
    """A p2pdist process, ended by SIGTERM; its log is in the directory."""
    with (directory / f"{name}.log").open("wb") as log:
        process = programs.start(*arguments, stdout=log, stderr=log)
    try:
        yield process
    finally:
        process.send_signal(signal.SIGCONT)
        process.terminate()
        assert process.wait(30) == 0, (directory / f"{name}.log").read_text()


async def answers(url: str) -> None:
    for _ in range(600):
        with contextlib.suppress(OSError):
            return (await asyncio.to_thread(urllib.request.urlopen, url, timeout=2)).close()
        await asyncio.sleep(0.05)
    raise AssertionError(f"{url} does not answer")


@needs_registry
@pytest.mark.skipif(SKOPEO is None, reason="needs skopeo")
async def test_two_hosts_pull_through_their_mirrors(tmp_path: Path) -> None:
    with ExitStack() as stack:
        registry = stack.enter_context(running_registry(tmp_path / "registry"))
        image = push_image(registry.address, "team/app", "v1", [make_layer(3 << 20)])
        tracker, state = free_port(), str(tmp_path / "state")
        stack.enter_context(
            running(
                tmp_path,
                "tracker",
                *("tracker", "--listen", f"127.0.0.1:{tracker}", "--state", state, "--upstream", registry.address),
            )
        )
        await answers(f"http://127.0.0.1:{tracker}/healthz")
        mirrors = []
        for name in ("h0", "h1"):
            mirror, port = free_port(), free_port()
            mirrors.append((f"http://127.0.0.1:{mirror}", f"http://127.0.0.1:{port}"))
            options = {
                "--tracker": f"http://127.0.0.1:{tracker}",
                "--listen": f"127.0.0.1:{port}",
                "--mirror": str(mirror),
                "--store": str(tmp_path / name),
                "--socket": f"/tmp/p2pdist-{os.getpid()}-{port}.sock",
                "--name": name,
                "--transport": "trees",
            }
            words = [word for option in options.items() for word in option]
            stack.enter_context(running(tmp_path, name, "agent", *words))
        for mirror, public in mirrors:
            await answers(f"{public}/readyz")
            await answers(f"{mirror}/v2/")
        source = f"docker://{registry.address}/team/app:v1"
        for number, (mirror, public) in enumerate(mirrors):
            place = tmp_path / f"copy{number}"
            place.mkdir()
            options = configuration(place, registry.address, mirror)
            code, _, errors = await skopeo(*options, "copy", "--src-tls-verify=false", source, f"dir:{place / 'image'}")
            assert code == 0, errors
            assert (place / "image" / "manifest.json").read_bytes() == image.manifest
            metrics = (await asyncio.to_thread(urllib.request.urlopen, f"{public}/metrics")).read().decode()
            assert 'p2pdist_agent_mirror_requests_total{kind="blob",result="ok",source="swarm"} 2.0' in metrics
            assert 'p2pdist_agent_mirror_fallbacks_total{reason="unavailable"} 0.0' in metrics
            upstream = float(metrics.partition('received_bytes_total{source="upstream"} ')[2].split()[0])
            assert upstream == (0 if number else sum(map(len, image.blobs.values())))


async def pulls(mirror: str, upstream: str, image: Image) -> None:
    """All that a runtime reads of an image comes from the mirror."""

    def read(path: str) -> bytes:
        with urllib.request.urlopen(f"{mirror}/v2/team/app/{path}?ns={upstream}", timeout=30) as answer:
            return bytes(answer.read())

    assert await asyncio.to_thread(read, "manifests/v1") == image.manifest
    for digest, data in image.blobs.items():
        assert await asyncio.to_thread(read, f"blobs/{digest}") == data


@needs_registry
async def test_a_tracker_that_is_stopped_stops_no_client(tmp_path: Path) -> None:
    """Of an agent that it has welcomed, nor of one that begins meanwhile. SIGHUP has a tracker read
    its upstreams again."""
    with ExitStack() as stack:
        registry = stack.enter_context(running_registry(tmp_path / "registry"))
        image = push_image(registry.address, "team/app", "v1", [make_layer(3 << 20)])
        tracker, mirror, port, upstreams = free_port(), free_port(), free_port(), tmp_path / "upstreams.toml"
        upstreams.write_text("")
        words = ["--listen", f"127.0.0.1:{tracker}", "--upstreams", str(upstreams)]
        stopped = stack.enter_context(running(tmp_path, "tracker", "tracker", *words))
        await answers(f"http://127.0.0.1:{tracker}/healthz")
        upstreams.write_text(f"[[upstream]]\nhost = '{registry.address}'\n")
        stopped.send_signal(signal.SIGHUP)
        while registry.address not in await asyncio.to_thread(_text, f"http://127.0.0.1:{tracker}/v1/upstreams"):
            await asyncio.sleep(0.05)
        words = ["--tracker", f"http://127.0.0.1:{tracker}", "--listen", f"127.0.0.1:{port}", "--mirror", str(mirror)]
        words += ["--store", str(tmp_path / "h"), "--socket", f"/tmp/p2pdist-{os.getpid()}-{port}.sock", "--name", "h"]
        with running(tmp_path, "h", "agent", *words):
            await answers(f"http://127.0.0.1:{port}/readyz")
            await pulls(f"http://127.0.0.1:{mirror}", registry.address, image)
            stopped.send_signal(signal.SIGSTOP)
            await pulls(f"http://127.0.0.1:{mirror}", registry.address, image)
        with running(tmp_path, "again", "agent", *words):
            await answers(f"http://127.0.0.1:{mirror}/v2/")
            await pulls(f"http://127.0.0.1:{mirror}", registry.address, image)


def _text(url: str) -> str:
    with urllib.request.urlopen(url, timeout=60) as answer:
        return str(answer.read().decode())


@pytest.mark.parametrize("address", ["0.0.0.0:5000", "[::]:5000", "10.0.0.1:5000", "example.org:5000"])
def test_a_port_that_others_reach_is_refused(tmp_path: Path, address: str) -> None:
    """Clients of that port show nothing."""
    words = ["agent", "--store", str(tmp_path / "store"), "--mirror", address]
    done = programs.run(*words)
    assert done.returncode == 2 and "for this host alone" in done.stderr
    assert not (tmp_path / "store").exists()
