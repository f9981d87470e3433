"""Forks `p2pdist` processes from one that has imported the code (programs.py asks it to).

A fork is a process like any other: own streams, environment, directory, signals, limits, exit
code. It saves the half second that Python takes for the imports, which hundreds of tests pay
several times each. What a start itself does (arguments of Python, its variables, the order of
imports) is no test's subject here.
"""

from __future__ import annotations

import atexit
import gc
import importlib
import json
import os
import pkgutil
import random
import resource
import runpy
import select
import signal
import socket
import sys
import tempfile
import threading
from dataclasses import dataclass

REQUEST_BYTES_MAX = 1 << 20
STREAMS = 3


def load() -> None:
    """Import all that a verb, an agent or a tracker imports sooner or later. libtorrent stays for
    processes that need it, and the demo's training program has threads of its own."""
    for name in ("p2pdist", "tracker"):
        for module in pkgutil.walk_packages(importlib.import_module(name).__path__, f"{name}."):
            if not module.name.endswith("__main__") and ".demo." not in module.name:
                importlib.import_module(module.name)
    for name in ("aiohttp", "rich.console", "rich.live", "rich.progress", "rich.table", "uvloop"):
        importlib.import_module(name)


@dataclass(frozen=True)
class Request:
    """What a fork is to be. It runs `script`, or `p2pdist` where that is empty."""

    words: list[str]
    environment: dict[str, str]
    directory: str
    script: str
    descriptors: int


def serve(control: socket.socket) -> Request | None:
    """Fork for each request, and say how each fork ended. Returns the request in a fork, None in
    the server when no more requests can come."""
    reading, writing = socket.socketpair()
    writing.setblocking(False)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(writing.fileno(), warn_on_full_buffer=False)
    statuses: dict[int, socket.socket] = {}
    polled = select.poll()
    polled.register(control, select.POLLIN)
    polled.register(reading, select.POLLIN)
    while True:
        ready = {number for number, _ in polled.poll()}
        if reading.fileno() in ready:
            reading.recv(4096)
            _reap(statuses)
        if control.fileno() not in ready:
            continue
        data, descriptors, _, _ = socket.recv_fds(control, REQUEST_BYTES_MAX, STREAMS + 1)
        if not data:
            return None
        status = socket.socket(fileno=descriptors.pop())
        pid = os.fork()
        if pid == 0:
            signal.set_wakeup_fd(-1)
            for ours in (control, reading, writing, status, *statuses.values()):
                ours.close()
            request = Request(**json.loads(data))
            _become(request, descriptors)
            return request
        for descriptor in descriptors:
            os.close(descriptor)
        handle = os.pidfd_open(pid)  # before it can be reaped and its number be another's
        socket.send_fds(status, [str(pid).encode()], [handle])
        os.close(handle)
        statuses[pid] = status


def _reap(statuses: dict[int, socket.socket]) -> None:
    while statuses:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if not pid:
            return
        with statuses.pop(pid) as connection:
            try:
                connection.send(str(os.waitstatus_to_exitcode(status)).encode())
            except OSError:
                continue  # nobody waits for it any more


def _become(request: Request, descriptors: list[int]) -> None:
    """Make this fork what a process is that was started for a request."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for number, descriptor in enumerate(descriptors):
        os.dup2(descriptor, number)
        os.close(descriptor)
    _open_streams()
    os.environ.clear()
    os.environ.update(request.environment)
    os.chdir(request.directory)
    if request.descriptors:
        resource.setrlimit(resource.RLIMIT_NOFILE, (request.descriptors, request.descriptors))
    random.seed()
    tempfile.tempdir = None  # what TMPDIR says now


def _open_streams() -> None:
    """Files of Python know what their descriptors are, such as files that can be sought in."""
    kinds = (("stdin", "r", "surrogateescape"), ("stdout", "w", "surrogateescape"), ("stderr", "w", "backslashreplace"))
    for number, (name, mode, errors) in enumerate(kinds):
        stream = open(number, mode, 1 if name == "stderr" else -1, encoding="utf-8", errors=errors, closefd=False)  # noqa: SIM115
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)


def run(request: Request) -> None:
    """Run what a request asks for."""
    sys.argv = [request.script or "p2pdist", *request.words]
    if request.script:
        sys.path.insert(0, os.path.dirname(request.script))
        runpy.run_path(request.script, run_name="__main__")
    else:
        from p2pdist.cli.main import main

        main()


def end(code: object) -> None:
    """End with an exit code, as Python does: it waits for threads, runs what was registered, and
    flushes the streams. It then takes all modules apart, for which a fork copies every page that it
    shares: that is most of what a short verb costs, and is left out. Returns where Python has to
    say something on its way."""
    if not isinstance(code, int | None):
        return
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    try:
        sys.stdout.flush()
        sys.stderr.flush()
    except (OSError, ValueError):
        return
    os._exit(code or 0)


if __name__ == "__main__":
    with socket.socket(fileno=int(sys.argv[1])) as requests:
        load()
        gc.collect()
        gc.freeze()
        assert len(os.listdir("/proc/self/task")) == 1, "a fork has one thread, whatever locks others held"
        request = serve(requests)
    if request is not None:
        try:
            run(request)
        except SystemExit as ended:
            end(ended.code)
            raise
        end(None)
