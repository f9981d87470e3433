"""Starting a benchmark's program so that nothing of it outlives the run: not on Ctrl-C, not on
failure, not when it takes too long.

A program runs in a session of its own, so Ctrl-C on the terminal reaches only this process. It then
interrupts the program, gives it time to tidy up, and ends what is left of its group. What the
program puts into network namespaces has groups of its own; it is found by the namespaces' prefix
(remove_network).
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

TIDY_UP_S = 20.0
TAIL_LINES = 4
STOPS = (signal.SIGINT, signal.SIGTERM)
CPU_ACCOUNTS = Path("/sys/fs/cgroup/cpuacct")


class ProgramFailed(Exception):
    """A program could not be run to its end; the text says which and why, with the last lines that
    it wrote."""


@dataclass(frozen=True)
class Ended:
    """What a program wrote, and its exit code."""

    code: int
    output: str
    errors: str

    def tail(self) -> str:
        """The last lines of what went wrong, in one."""
        lines = [line.strip() for line in (self.errors or self.output).splitlines() if line.strip()]
        return " | ".join(lines[-TAIL_LINES:]) or "it said nothing"


@contextlib.contextmanager
def undisturbed() -> Iterator[None]:
    """Starting and tidying up are not interrupted: a Ctrl-C waits until they are over."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, STOPS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def cpu_s(pid: int) -> float:
    """User and system time of a process so far (proc_pid_stat(5))."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def idle_s() -> float:
    """Processor seconds since the boot that nothing used (proc_stat(5))."""
    fields = Path("/proc/stat").read_text().split(maxsplit=6)
    return (int(fields[4]) + int(fields[5])) / os.sysconf("SC_CLK_TCK")


def end(process: subprocess.Popen[bytes]) -> None:
    """Interrupt a program that leads a group, wait for it, and kill what is left of the group."""
    if process.poll() is None:
        process.send_signal(signal.SIGINT)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(TIDY_UP_S)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def run(words: Sequence[str], *, timeout_s: float, env: Mapping[str, str] | None = None) -> Ended:
    """Run a program to its end. Raises ProgramFailed when it cannot be started or takes longer than
    `timeout_s`; whatever happens, it has ended afterwards."""
    with tempfile.TemporaryFile() as output, tempfile.TemporaryFile() as errors:
        process: subprocess.Popen[bytes] | None = None
        late = False
        try:
            with undisturbed():
                process = _start(words, output, errors, {**os.environ, **(env or {})})
            process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            late = True
        finally:
            if process is not None:
                with undisturbed():
                    end(process)
        assert process is not None, "it has been started, or that has raised"
        output.seek(0)
        errors.seek(0)
        ended = Ended(
            process.returncode, output.read().decode(errors="replace"), errors.read().decode(errors="replace")
        )
    if late:
        raise ProgramFailed(f"took longer than {timeout_s:.0f} s: {ended.tail()}")
    return ended


def _start(
    words: Sequence[str], output: IO[bytes], errors: IO[bytes], env: Mapping[str, str]
) -> subprocess.Popen[bytes]:
    try:
        return subprocess.Popen(
            words,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=errors,
            env=env,
            start_new_session=True,
            preexec_fn=_disturbable,  # noqa: PLW1509 - there are no threads here
        )
    except OSError as error:
        raise ProgramFailed(f"{words[0]} could not be started: {error.strerror}") from error


def _disturbable() -> None:
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOPS)


def remove_network(prefix: str) -> None:
    """End the processes in all network namespaces of this prefix, and remove these and the account
    of their CPU time."""
    listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=False).stdout
    names = [line.split()[0] for line in listed.splitlines() if line.startswith(prefix)]
    for name in names:
        found = subprocess.run(["ip", "netns", "pids", name], capture_output=True, text=True, check=False).stdout
        for pid in found.split():
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)
        subprocess.run(["ip", "netns", "delete", name], capture_output=True, check=False)
    if not CPU_ACCOUNTS.is_dir():
        return
    for account in CPU_ACCOUNTS.glob(f"*-{prefix.rstrip('-')}"):
        deadline = time.monotonic() + 2.0  # processes that were just killed are still in it
        while time.monotonic() < deadline:
            try:
                account.rmdir()
            except FileNotFoundError:
                break
            except OSError:
                time.sleep(0.05)
            else:
                break
