"""What daemons tell the service manager that started them (sd_notify(3)), and operators of an
origin that cannot be read."""

from __future__ import annotations

import json
import os
import socket
import tempfile
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import programs
import pytest
from ports import free_pair, free_port
from programs import Program
from waits import wait_until


@pytest.fixture
def place() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="notify-") as name:
        yield Path(name)


def manager(place: Path) -> tuple[socket.socket, dict[str, str]]:
    """A service manager's socket, and the environment that it gives to a service."""
    heard = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    heard.bind(str(place / "notify"))
    heard.settimeout(60)
    return heard, {**os.environ, "NOTIFY_SOCKET": str(place / "notify"), "WATCHDOG_USEC": "30000"}


def words(place: Path, kind: str) -> list[str]:
    (place / "origin").mkdir(exist_ok=True)
    if kind == "tracker":
        return ["tracker", "--listen", f"127.0.0.1:{free_port()}", "--origin", f"file://{place}/origin"]
    more = ["--store", str(place / "store"), "--socket", str(place / "agent.sock"), "--mirror", "off"]
    return ["agent", "--listen", f"127.0.0.1:{free_pair()}", "--origin", f"file://{place}/origin", *more]


def until_said(heard: socket.socket, state: str) -> list[str]:
    """What is said until the state comes, which it does."""
    said = []
    while not said or said[-1] != state:
        said.append(heard.recv(4096).decode())
    return said


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["tracker", "agent"])
def test_a_service_says_when_it_answers_that_it_lives_and_that_it_ends(place: Path, kind: str) -> None:
    heard, environ = manager(place)
    given = words(place, kind)
    with heard, programs.running(*given, env=environ) as service:
        until_said(heard, "READY=1")
        with urllib.request.urlopen(f"http://{given[2]}/healthz", timeout=30) as answer:
            assert answer.status == 200
        until_said(heard, "WATCHDOG=1")
        until_said(heard, "WATCHDOG=1")
        service.terminate()
        until_said(heard, "STOPPING=1")
        assert service.wait(60) == 0


@pytest.mark.slow
def test_without_a_manager_nothing_is_said(place: Path) -> None:
    log = place / "log"
    environ = {name: value for name, value in os.environ.items() if name != "NOTIFY_SOCKET"}
    with log.open("wb") as output, programs.running(*words(place, "tracker"), env=environ, stderr=output):
        wait_until(lambda: "listening on" in log.read_text(), "it listens")
        assert "service manager" not in log.read_text()


@pytest.mark.slow
def test_a_tracker_whose_origin_cannot_be_read_is_ready_and_says_so(place: Path) -> None:
    """In /readyz, in its log and in status; and that it can be read again."""
    (place / "origin").mkdir()
    port, away = free_port(), free_port()
    log = place / "log"
    given = ("tracker", "--listen", f"127.0.0.1:{port}", "--origin", f"http://127.0.0.1:{away}/packages")
    with log.open("wb") as output, programs.running(*given, stderr=output) as tracker:
        wait_until(lambda: health(tracker, port).get("status") == "degraded", "it is degraded")
        assert health(tracker, port)["origin"]["reachable"] is False
        assert "connection refused" in health(tracker, port)["origin"]["problem"]
        assert "the origin cannot be read" in log.read_text()
        shown = programs.run("status", "--tracker", f"http://127.0.0.1:{port}")
        assert shown.returncode == 0 and "connection refused" in shown.stdout
        checks = programs.run("doctor", "--tracker", f"http://127.0.0.1:{port}", "--store", place, "--json").stdout
        found = [check for check in json.loads(checks)["checks"] if check["name"] == "tracker's origin"]
        assert [check["state"] for check in found] == ["failed"]


def health(tracker: Program, port: int) -> dict[str, Any]:
    """What /readyz answers, with 200; nothing while the tracker does not answer yet."""
    assert tracker.poll() is None
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/readyz", timeout=30) as answer:
            assert answer.status == 200
            return dict(json.load(answer))
    except OSError:
        return {}
