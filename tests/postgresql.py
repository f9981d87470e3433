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


class Server:
    """A server with a database that is empty, below a directory."""

    def __init__(self, directory: Path) -> None:
        place = binaries()
        assert place is not None
        self._place, self._directory, self._data = place, directory, directory / "data"
        self._user = None
        if os.geteuid() == 0:  # it refuses to run as root
            self._user = next(name for name in USERS if name in {entry.pw_name for entry in pwd.getpwall()})
            shutil.chown(directory, self._user)
        options = ["-D", str(self._data), "-U", "tracker", "-A", "trust", "-E", "UTF8", "--no-sync", "--locale=C"]
        self._environment = {"PATH": "/usr/bin:/bin", "LC_ALL": "C"}
        made = subprocess.run(
            [place / "initdb", *options],
            user=self._user,
            env=self._environment,
            cwd="/",
            capture_output=True,
            check=False,
        )
        assert made.returncode == 0, made.stderr
        self.url = f"postgresql://tracker@/postgres?host={quote(str(directory), safe='')}"
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def socket(self) -> Path:
        """Where it listens."""
        return self._directory / ".s.PGSQL.5432"

    def start(self) -> None:
        """Return when it takes connections."""
        settings = ["listen_addresses=", f"unix_socket_directories={self._directory}", "fsync=off"]
        words = (word for setting in settings for word in ("-c", setting))
        with (self._directory / "log").open("ab") as log:
            self._process = subprocess.Popen(
                [self._place / "postgres", "-D", self._data, *words],
                user=self._user,
                env=self._environment,
                cwd="/",
                stdout=log,
                stderr=log,
            )
        deadline = time.monotonic() + START_S_MAX
        while not answers(self.url):
            assert self._process.poll() is None and time.monotonic() < deadline, (self._directory / "log").read_text()
            time.sleep(0.05)

    def stop(self) -> None:
        """End it; sessions are broken off."""
        if self._process is None:
            return
        self._process.send_signal(signal.SIGINT)  # fast shutdown
        try:
            self._process.wait(60)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process = None


@contextmanager
def server() -> Iterator[Server]:
    """A server that runs, and ends with the context, whatever happened."""
    with tempfile.TemporaryDirectory(prefix="p2pdist-pg-") as name:
        made = Server(Path(name))
        try:
            made.start()
            yield made
        finally:
            made.stop()


@contextmanager
def running_server() -> Iterator[str]:
    """The URL of a database that is empty; the server ends with the context."""
    with server() as made:
        yield made.url
