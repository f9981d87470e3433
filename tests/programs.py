"""`p2pdist` processes of tests whose subject is not how a process starts: forks of one process of
this run that has imported the code (program_server.py). Where the start is the subject, a test
runs `PROGRAM` itself."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

PROGRAM = [sys.executable, "-m", "p2pdist.cli.main"]
"""The command itself, which takes half a second before it begins."""

SERVER = Path(__file__).with_name("program_server.py")
END_S_MAX = 20.0


class Program:
    """A process that runs a command, with the interface of `subprocess.Popen`."""

    def __init__(self, words: Sequence[object], status: socket.socket, stdout: IO[Any] | None, stderr: IO[Any] | None):
        self.args = ["p2pdist", *map(str, words)]
        self.stdout, self.stderr, self.stdin = stdout, stderr, None
        self.returncode: int | None = None
        self._status = status
        self._lock = threading.Lock()
        data, handles, _, _ = socket.recv_fds(status, 64, 1)
        assert data, "the process that forks programs has ended"
        self.pid = int(data)
        self._handle = handles[0]

    def __enter__(self) -> Program:
        return self

    def __exit__(self, *_: object) -> None:
        for stream in (self.stdout, self.stderr):
            if stream is not None:
                stream.close()
        self.wait()

    def __del__(self) -> None:
        self._status.close()
        with contextlib.suppress(AttributeError, OSError):
            os.close(self._handle)

    def poll(self) -> int | None:
        """The exit code; None while it runs."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.wait(0)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """The exit code. Raises subprocess.TimeoutExpired."""
        end = None if timeout is None else time.monotonic() + timeout
        polled = select.poll()
        polled.register(self._status, select.POLLIN)
        while self.returncode is None:
            left = None if end is None else max(0.0, end - time.monotonic())
            if not polled.poll(None if left is None else 1000 * left) and left == 0.0:
                raise subprocess.TimeoutExpired(self.args, timeout or 0.0)
            self._take()
        return self.returncode

    def _take(self) -> None:
        with self._lock, contextlib.suppress(BlockingIOError):
            if self.returncode is None:
                data = self._status.recv(64, socket.MSG_DONTWAIT)
                assert data, "the process that forks programs has ended"
                self.returncode = int(data)

    def communicate(self, timeout: float | None = None) -> tuple[Any, Any]:
        """All that it writes into its pipes, once it has ended. Raises
        subprocess.TimeoutExpired."""
        said: list[Any] = [None, None]

        def read(place: int, stream: IO[Any]) -> None:
            said[place] = stream.read()

        streams = (self.stdout, self.stderr)
        readers = [
            threading.Thread(target=read, args=(place, stream), daemon=True)
            for place, stream in enumerate(streams)
            if stream is not None
        ]
        for reader in readers:
            reader.start()
        self.wait(timeout)
        for reader in readers:
            reader.join(timeout)
        return said[0], said[1]

    def send_signal(self, number: int) -> None:
        """Nothing, where it has ended."""
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._handle, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


class Programs:
    """The process that forks, begun when the first program is started."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._server: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None

    def close(self) -> None:
        with self._lock:
            if self._server is None or self._control is None:
                return
            self._control.close()
            try:
                self._server.wait(END_S_MAX)
            finally:
                self._server.kill()
            self._server = self._control = None

    def fork(self, request: Mapping[str, object], streams: Sequence[int]) -> socket.socket:
        """Have it fork; returns the connection that says pid and exit code."""
        with self._lock:
            if self._control is None:
                self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
                with theirs:
                    command = [
                        sys.executable,
                        "-P",
                        str(SERVER),
                        str(theirs.fileno()),
                    ]  # tests/ is no place to import from
                    self._server = subprocess.Popen(command, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL)
            ours, status = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            with status:
                socket.send_fds(self._control, [json.dumps(request).encode()], [*streams, status.fileno()])
            return ours


PROGRAMS = Programs()
"""Of this process; conftest.py closes it."""


def start(
    *words: object,
    stdout: IO[Any] | int | None = None,
    stderr: IO[Any] | int | None = None,
    env: Mapping[str, str] | None = None,
    cwd: Path | str | None = None,
    text: bool = False,
    script: Path | None = None,
    descriptors: int = 0,
) -> Program:
    """Start `p2pdist`, or a script that imports it, with these words and no input. Streams are as
    for `subprocess.Popen`; with `descriptors` it may have no more open files."""
    request = {
        "words": [os.fspath(word) if isinstance(word, Path) else str(word) for word in words],
        "environment": dict(os.environ if env is None else env),
        "directory": os.fspath(cwd or os.getcwd()),
        "script": os.fspath(script or ""),
        "descriptors": descriptors,
    }
    with contextlib.ExitStack() as ends:
        null = os.open(os.devnull, os.O_RDWR)
        ends.callback(os.close, null)

        def end_of(stream: IO[Any] | int | None, inherited: int) -> tuple[int, IO[Any] | None]:
            if stream == subprocess.PIPE:
                reading, writing = os.pipe()
                ends.callback(os.close, writing)
                return writing, os.fdopen(reading, "r" if text else "rb")
            if stream == subprocess.DEVNULL:
                return null, None
            if stream is None:
                return inherited, None
            return (stream if isinstance(stream, int) else stream.fileno()), None

        output, read_output = end_of(stdout, 1)
        errors, read_errors = (output, None) if stderr == subprocess.STDOUT else end_of(stderr, 2)
        status = PROGRAMS.fork(request, [null, output, errors])
        return Program(words, status, read_output, read_errors)


def run(
    *words: object,
    env: Mapping[str, str] | None = None,
    cwd: Path | str | None = None,
    timeout: float = 120.0,
    check: bool = False,
) -> subprocess.CompletedProcess[str]:
    """Run `p2pdist` with these words to its end; returns its exit code and what it wrote."""
    with tempfile.TemporaryFile() as output, tempfile.TemporaryFile() as errors:
        program = start(*words, stdout=output, stderr=errors, env=env, cwd=cwd)
        try:
            code = program.wait(timeout)
        except subprocess.TimeoutExpired:
            program.kill()
            program.wait()
            raise
        said, complained = _text(output), _text(errors)
    if check and code:
        raise subprocess.CalledProcessError(code, program.args, said, complained)
    return subprocess.CompletedProcess(program.args, code, said, complained)


def _text(file: IO[bytes]) -> str:
    file.seek(0)
    return file.read().decode(errors="surrogateescape")


@contextlib.contextmanager
def running(*words: object, **streams: Any) -> Iterator[Program]:
    """`start`, and its end: what still runs afterwards is told to end, then killed."""
    program = start(*words, **streams)
    try:
        yield program
    finally:
        program.terminate()
        try:
            program.wait(END_S_MAX)
        except subprocess.TimeoutExpired:
            program.kill()
            program.wait()
