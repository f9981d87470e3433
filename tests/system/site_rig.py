"""A small installation of real processes on loopback: origin, tracker, agents; everything it starts
ends with it."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import subprocess
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import programs
from aiohttp import web
from ports import free_pair, free_port
from programs import PROGRAM, Program
from waits import wait_until as until

from p2pdist.agent.api.client import LocalClient
from p2pdist.model.messages import PullRequest, PullStatus

P2PDIST = PROGRAM
"""For tests that start it elsewhere: in a namespace, by a script, as another user."""

ENDING_S = 0.5
READY_S = 600.0
"""For a process that never answers: on a busy machine one takes minutes to begin."""


class WebOrigin:
    """An HTTP server over an OCI layout, in a thread, whose rate can be limited and whose content
    can be spoilt."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.rate_bytes_s = 0.0
        self.spoil: dict[str, str] = {}
        self.sent: dict[str, int] = {}
        self.port = free_port()
        self._free_at = 0.0
        self._loop = asyncio.new_event_loop()
        self._started = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def busy_s(self) -> float:
        """How long it sends what was asked for so far, also by processes that were killed since."""
        return max(0.0, self._free_at - self._loop.time())

    def start(self) -> None:
        self._thread.start()
        assert self._started.wait(60)

    def stop(self) -> None:
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(60)

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        app = web.Application()
        app.router.add_get("/{path:.*}", self._file)
        runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
        self._loop.run_until_complete(runner.setup())
        self._loop.run_until_complete(web.TCPSite(runner, "127.0.0.1", self.port).start())
        self._started.set()
        self._loop.run_forever()
        self._loop.run_until_complete(runner.cleanup())
        left = asyncio.all_tasks(self._loop)
        for task in left:
            task.cancel()
        self._loop.run_until_complete(asyncio.gather(*left, return_exceptions=True))
        self._loop.close()

    async def _file(self, request: web.Request) -> web.Response:
        path = self.directory / request.match_info["path"]
        if not path.is_file():
            raise web.HTTPNotFound
        data = path.read_bytes()
        how = self.spoil.get(path.name)
        if how == "truncate":
            data = data[: len(data) // 2]
        elif how == "alter":
            data = bytes(byte ^ 0xFF for byte in data[:100_000]) + data[100_000:]
        headers = {"Accept-Ranges": "bytes"}
        status = 200
        if "Range" in request.headers:
            size = len(data)
            start, stop, _ = request.http_range.indices(size)
            if start >= stop:
                raise web.HTTPRequestRangeNotSatisfiable(headers={"Content-Range": f"bytes */{size}"})
            headers["Content-Range"] = f"bytes {start}-{stop - 1}/{size}"
            data, status = data[start:stop], 206
        if request.method == "HEAD":  # aiohttp sends no body
            return web.Response(status=status, body=data, headers=headers)
        if self.rate_bytes_s:
            now = self._loop.time()
            self._free_at = max(now, self._free_at) + len(data) / self.rate_bytes_s
            await asyncio.sleep(self._free_at - now)
        self.sent[path.name] = self.sent.get(path.name, 0) + len(data)
        return web.Response(status=status, body=data, headers=headers)


class Agent:
    """One agent process."""

    def __init__(self, site: Site, name: str, **options: str) -> None:
        self.site, self.name, self.options = site, name, options
        self.port = free_pair()
        self.store = Path(options.pop("store", str(site.directory / f"store-{name}")))
        self.socket = site.directory / f"{name}.sock"
        self.log = site.directory / f"{name}.log"
        self.process: Program | None = None
        self.descriptors = 0
        """How many files it may have open; 0 for as many as the tests may."""

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def start(self, *, ready: bool = True) -> Agent:
        words = [
            "agent",
            "--listen",
            f"127.0.0.1:{self.port}",
            "--store",
            str(self.store),
            "--socket",
            str(self.socket),
        ]
        words += ["--name", self.name]
        for option, value in ({"tracker": self.site.tracker_url} | self.options).items():
            words += [f"--{option.replace('_', '-')}", value]
        self.process = self.site.spawn(words, self.log, descriptors=self.descriptors)
        path = "/readyz" if ready else "/healthz"
        if self.options.keys() & {
            "tls_cert",
            "join_file",
            "spiffe",
        }:  # TCP wants a certificate, the Unix socket never does
            until(lambda: self._local(path) == 200)
        else:
            wait_for(self.url + path, self.process, self.log)
        return self

    def _local(self, path: str) -> int:
        """The status that the Unix socket answers, 0 while there is none."""
        try:
            with socket.socket(socket.AF_UNIX) as connection:
                connection.settimeout(2)
                connection.connect(str(self.socket))
                connection.sendall(f"GET {path} HTTP/1.1\r\nHost: agent\r\nConnection: close\r\n\r\n".encode())
                return int(connection.recv(64).split()[1])
        except (OSError, IndexError):
            return 0

    def kill(self) -> None:
        assert self.process is not None
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()

    def stop(self) -> int:
        assert self.process is not None
        self.process.terminate()
        return self.process.wait(READY_S)

    def pull(self, **request: Any) -> PullStatus:
        return LocalClient(self.socket).pull(PullRequest(**request))

    def start_pull(self, **request: Any) -> Background:
        return Background(lambda: self.pull(**request))

    def metric(self, line: str) -> float:
        text = urllib.request.urlopen(self.url + "/metrics", timeout=60).read().decode()
        return sum(float(each.rpartition(" ")[2]) for each in text.splitlines() if each.startswith(line))

    def received(self) -> float:
        return self.metric("p2pdist_agent_received_bytes_total")


class Background:
    """A call in a thread."""

    def __init__(self, call: Any) -> None:
        self._outcome: list[Any] = []
        self._error: list[BaseException] = []

        def run() -> None:
            try:
                self._outcome.append(call())
            except BaseException as error:
                self._error.append(error)

        self._thread = threading.Thread(target=run, daemon=True)
        self._thread.start()

    @property
    def ended(self) -> bool:
        return not self._thread.is_alive()

    def result(self, timeout_s: float = 60.0) -> Any:
        self._thread.join(timeout_s)
        assert not self._thread.is_alive(), f"no result within {timeout_s} s"
        if self._error:
            raise self._error[0]
        return self._outcome[0]


class Site:
    """Origin, tracker and agents below one directory."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.layout = directory / "origin"
        self.layout.mkdir()
        self.origin = WebOrigin(self.layout)
        self.tracker_port = free_port()
        self.tracker_process: Program | None = None
        self._processes: list[Program] = []

    @property
    def tracker_url(self) -> str:
        return f"http://127.0.0.1:{self.tracker_port}"

    def spawn(self, words: list[str], log: Path, *, descriptors: int = 0) -> Program:
        """Start a process; with `descriptors` it may have no more open files."""
        with log.open("ab") as output:
            process = programs.start(*words, stdout=output, stderr=output, descriptors=descriptors)
        self._processes.append(process)
        return process

    def command(self, *words: str) -> tuple[int, dict[str, Any], str]:
        """Run a command with --json: exit code, document, standard error."""
        done = programs.run(*words, "--json")
        return done.returncode, json.loads(done.stdout) if done.stdout.strip() else {}, done.stderr

    def publish(self, size: int) -> str:
        """Push a random blob; returns its digest."""
        path = self.directory / "content"
        path.write_bytes(os.urandom(size))
        code, document, errors = self.command("blob", "push", str(path), "--origin", f"file://{self.layout}")
        assert code == 0, errors
        return str(document["digest"])

    def start_tracker(self, *options: str) -> None:
        words = ["tracker", "--listen", f"127.0.0.1:{self.tracker_port}", "--origin", self.origin.url, *options]
        log = self.directory / "tracker.log"
        self.tracker_process = self.spawn([*words, "--state", str(self.directory / "state")], log)
        wait_for(self.tracker_url + "/readyz", self.tracker_process, log)

    def kill_tracker(self) -> None:
        assert self.tracker_process is not None
        self.tracker_process.send_signal(signal.SIGKILL)
        self.tracker_process.wait()

    def agents(self, count: int, **options: str) -> list[Agent]:
        made = [Agent(self, f"h{number}", **options) for number in range(count)]
        threads = [Background(agent.start) for agent in made]
        for thread in threads:
            thread.result()
        return made

    def origin_bytes(self, digest: str) -> int:
        return self.origin.sent.get(digest.removeprefix("sha256:"), 0)

    def story(self) -> str:
        """Which processes have ended, and the end of each log."""
        ended = {process.pid: code for process in self._processes if (code := process.poll()) is not None}
        logs = (
            f"-- {log.name}\n{log.read_text(errors='replace')[-3000:]}" for log in sorted(self.directory.glob("*.log"))
        )
        return "\n".join([f"ended, with their exit codes: {ended}", *logs])

    def close(self) -> None:
        for end in (time.monotonic(), time.monotonic() + ENDING_S):  # the second signal ends a drain at once
            for process in self._processes:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(max(0.0, end - time.monotonic()))
                process.terminate()
        for process in self._processes:
            try:
                process.wait(60)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        self.origin.stop()


@contextlib.contextmanager
def running_site(directory: Path, *, tracker: bool = True) -> Iterator[Site]:
    site = Site(directory)
    try:
        site.origin.start()
        if tracker:
            site.start_tracker()
        yield site
    finally:
        site.close()


def wait_for(url: str, process: Program, log: Path) -> None:
    deadline = time.monotonic() + READY_S
    while time.monotonic() < deadline:
        assert process.poll() is None, f"ended at once: {log.read_text()[-2000:]}"
        try:
            with urllib.request.urlopen(url, timeout=2):
                return
        except (urllib.error.URLError, OSError):
            time.sleep(0.01)
    raise AssertionError(f"{url} does not answer: {log.read_text()[-2000:]}")
