"""Which paths a program and its children used, by strace(1): running a command under it and reading
its logs.

Only calls that read are recorded: opening, executing, asking for status, following links. A file
that the program makes itself is none that it needs. Strings and descriptor paths are logged as
hexadecimal escapes (-xx, -y), so no file name can look like something else; each process has a log
of its own (-ff), so no call is cut in two by another process. Not seen: files opened through
io_uring.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType

from p2pdist.model.errors import NotFound, P2PDistError, TooLarge, UsageError

PATHS_MAX = 1 << 24
SCRIPTS_MAX = 4
"""How many interpreters in a row the kernel runs for a script (execve(2))."""

# fmt: off
_READING = ("access", "chdir", "execve", "execveat", "faccessat", "faccessat2", "getxattr", "lgetxattr", "lstat", "newfstatat", "open",
            "openat", "openat2", "readlink", "readlinkat", "stat", "statfs", "statx", "uselib")
# fmt: on
_FOLLOWED = ("chdir", "fchdir", "clone", "clone3", "fork", "vfork")
_OPENING = (b"open", b"openat", b"openat2", b"execve", b"execveat", b"uselib")
_CALL = re.compile(rb"(\w+)\((.*)\) += (-?\d+)(?:<([^>]*)>)?", re.DOTALL)
_DIRECTORY = re.compile(rb"(?:AT_FDCWD|\d+)<([^>]*)>")
_AT_CWD = re.compile(rb"AT_FDCWD<([^>]*)>")
_STRING = re.compile(rb'"([^"]*)"(\.\.\.)?')
_ESCAPE = re.compile(rb"\\x([0-9a-f]{2})")
_MADE = re.compile(rb"\bO_CREAT\b")
_MADE_ANEW = re.compile(rb"\b(?:O_WRONLY|O_EXCL|O_TRUNC)\b")


@dataclass(slots=True)
class Used:
    """Absolute paths as the processes wrote them: `paths` all of them, `opened` the ones that were
    opened or executed."""

    paths: set[bytes] = field(default_factory=set)
    opened: set[bytes] = field(default_factory=set)

    def add(self, path: bytes, *, opened: bool) -> None:
        """Add a path. Raises TooLarge over PATHS_MAX."""
        if len(self.paths) >= PATHS_MAX:
            raise TooLarge(
                f"the program used more than {PATHS_MAX} files",
                remedy="Trace a part of the run, or a directory further down with --root",
            )
        self.paths.add(path)
        if opened:
            self.opened.add(path)


def run(command: Sequence[str], logs: Path, *, stdout: int | None = None) -> int:
    """Run `command` to its end with its logs in the empty directory `logs`; returns its exit code,
    or 128 + n when signal n ended it. SIGTERM and SIGHUP are passed on; a terminal's Ctrl-C reaches
    the command by itself. Call it from the main thread. Raises NotFound, UsageError, and
    P2PDistError when strace is missing or not allowed."""
    tool = shutil.which("strace")
    if tool is None:
        raise P2PDistError("strace is not installed", remedy="Install the Debian package strace")
    if not command:
        raise UsageError("there is no command to trace", remedy="Write it after --")
    if shutil.which(command[0]) is None:
        raise NotFound(f"there is no program {command[0]}", remedy="Check the name, or give its path")
    calls = ",".join(f"?{name}" for name in dict.fromkeys((*_READING, *_FOLLOWED)))
    arguments = [
        tool,
        "-ff",
        "--seccomp-bpf",
        "-qq",
        "-xx",
        "-y",
        "-s",
        "8192",
        "-e",
        "signal=none",
        "-e",
        f"trace={calls}",
    ]
    before: dict[int, object] = {}
    process = subprocess.Popen([*arguments, "-o", str(logs / "log"), "--", *command], stdout=stdout)

    def forward(number: int, _frame: FrameType | None) -> None:
        for child in _children(process.pid):
            os.kill(child, number)

    try:
        for passed in (signal.SIGTERM, signal.SIGHUP):
            before[passed] = signal.signal(passed, forward)
        before[signal.SIGINT] = signal.signal(signal.SIGINT, lambda number, frame: None)
        code = process.wait()
    except BaseException:
        process.kill()
        process.wait()
        raise
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)  # type: ignore[arg-type]
    if not any(logs.iterdir()):
        raise P2PDistError(
            f"strace could not run {command[0]} (exit code {code})",
            remedy="Tracing needs ptrace(2): in a container add SYS_PTRACE; see kernel.yama.ptrace_scope",
        )
    return code if code >= 0 else 128 - code


def _children(pid: int) -> list[int]:
    try:
        return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:
        return []


def read_logs(logs: Path, directory: bytes) -> Used:
    """What the processes with logs in `logs` used; the first was started in `directory`. A child is
    in the directory where its parent was when it made it, and strace tells of most calls where the
    process is."""
    used = Used()
    files = {path.suffix[1:]: path for path in logs.iterdir()}
    where: dict[str, bytes] = {}
    # Parents mostly have smaller numbers than their children; where they have not, strace's own
    # word has to do.
    for pid in sorted(files, key=int):
        _read_log(files[pid], where.get(pid, directory), used, where)
    return used


def _read_log(file: Path, directory: bytes, used: Used, where: dict[str, bytes]) -> None:
    with file.open("rb") as lines:
        for line in lines:
            match = _CALL.match(line)
            if match is None or match[3].startswith(b"-"):
                continue
            call, arguments = match[1], match[2]
            if at_cwd := _AT_CWD.match(arguments):
                directory = _plain(at_cwd[1])
            if call in (b"clone", b"clone3", b"fork", b"vfork"):
                where[match[3].decode()] = directory
            elif call == b"fchdir":
                directory = _described(arguments) or directory
            elif path := _path(call, arguments, directory):
                if call == b"chdir":
                    directory = path
                opened = call in _OPENING
                used.add(path, opened=opened)
                if opened and match[4]:
                    used.add(_plain(match[4]), opened=True)
                if call in (b"execve", b"execveat"):
                    for interpreter in _interpreters(path, directory):
                        used.add(interpreter, opened=True)


def _path(call: bytes, arguments: bytes, directory: bytes) -> bytes | None:
    """The absolute path that a call names; None when it names none, or a file that it makes."""
    string = _STRING.search(arguments)
    if string is None or string[2]:
        return None
    if call.startswith(b"open") and _MADE.search(arguments) and _MADE_ANEW.search(arguments):
        return None
    path = _plain(string[1])
    start = _described(arguments) if _DIRECTORY.match(arguments) else directory
    if not path:
        return start if call == b"execveat" else None
    return os.path.join(start or directory, path)


def _described(arguments: bytes) -> bytes | None:
    """The path of the descriptor that comes first."""
    match = _DIRECTORY.match(arguments)
    return _plain(match[1]) if match else None


def _plain(text: bytes) -> bytes:
    return _ESCAPE.sub(lambda match: bytes([int(match[1], 16)]), text)


def _interpreters(path: bytes, directory: bytes) -> Iterator[bytes]:
    """The interpreters of a script, which the kernel opens itself."""
    for _turn in range(SCRIPTS_MAX):
        try:
            with open(path, "rb") as stream:
                head = stream.read(512)
        except OSError:
            return
        words = head[2:].split(b"\n", 1)[0].split(None, 1) if head.startswith(b"#!") else []
        if not words:
            return
        path = os.path.join(directory, words[0])
        yield path
