"""A PostgreSQL server of its own for a run of tests: in a temporary directory, on a Unix socket, as
another user than root."""

from __future__ import annotations

import os
import pwd
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import quote

import psycopg

START_S_MAX = 60.0
USERS = ("postgres", "nobody")


def binaries() -> Path | None:
    """Where initdb and postgres are; None where PostgreSQL is not installed."""
    on_path = shutil.which("initdb")
    if on_path and shutil.which("postgres"):
        return Path(on_path).resolve().parent
    found = sorted(Path("/usr/lib/postgresql").glob("*/bin/initdb"))
    return found[-1].parent if found else None


def answers(url: str) -> bool:
    """Whether the server takes connections."""
    try:
        psycopg.connect(url).close()
    except psycopg.OperationalError:
        return False
    return True


@contextmanager
def running_server() -> Iterator[str]:
    """The URL of a database that is empty; the server ends with the context, whatever happened."""
    place = binaries()
    assert place is not None
    user = None
    if os.geteuid() == 0:  # it refuses to run as root
        user = next(name for name in USERS if name in {entry.pw_name for entry in pwd.getpwall()})
    with tempfile.TemporaryDirectory(prefix="p2pdist-pg-") as name:
        directory = Path(name)
        if user is not None:
            shutil.chown(directory, user)
        data = directory / "data"
        options = ["-D", str(data), "-U", "tracker", "-A", "trust", "-E", "UTF8", "--no-sync", "--locale=C"]
        environment = {"PATH": "/usr/bin:/bin", "LC_ALL": "C"}
        made = subprocess.run(
            [place / "initdb", *options], user=user, env=environment, cwd="/", capture_output=True, check=False
        )
        assert made.returncode == 0, made.stderr
        settings = ["listen_addresses=", f"unix_socket_directories={directory}", "fsync=off"]
        with (directory / "log").open("wb") as log:
            server = subprocess.Popen(
                [place / "postgres", "-D", data, *(word for setting in settings for word in ("-c", setting))],
                user=user,
                env=environment,
                cwd="/",
                stdout=log,
                stderr=log,
            )
        try:
            url = f"postgresql://tracker@/postgres?host={quote(name, safe='')}"
            deadline = time.monotonic() + START_S_MAX
            while not answers(url):
                assert server.poll() is None and time.monotonic() < deadline, (directory / "log").read_text()
                time.sleep(0.05)
            yield url
        finally:
            server.send_signal(signal.SIGINT)  # fast shutdown: sessions are broken off
            try:
                server.wait(20)
            except subprocess.TimeoutExpired:
                server.kill()
                server.wait()
