"""Programs of packages: what is executed, exit codes, signals."""

from __future__ import annotations

import errno
import os
import select
import shlex
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from waits import wait_until

from p2pdist.model.errors import Conflict, NotFound, P2PDistError, UsageError
from p2pdist.model.manifest import Config
from p2pdist.mount.program import Program, program, run
from p2pdist.mount.program_root import Bind, enter

ROOT = Path("/shown here")


def test_the_root_is_put_in_and_the_package_s_bin_comes_first() -> None:
    """Entrypoint, arguments, environment and working directory may name the directory where the
    package is seen."""
    config = Config(
        ("${P2PDIST_ROOT}/bin/python", "-m", "train"),
        ("PYTHONPATH=${P2PDIST_ROOT}/app:${P2PDIST_ROOT}/lib", "HOME=/app"),
        "/app",
    )
    made = program(config, ["--out=${P2PDIST_ROOT}/x"], root=ROOT, environ={"PATH": "/usr/bin", "HOME": "/root"})
    assert made.argv == ("/shown here/bin/python", "-m", "train", "--out=/shown here/x")
    assert made.env == {
        "PATH": "/shown here/bin:/usr/bin",
        "HOME": "/app",
        "PYTHONPATH": "/shown here/app:/shown here/lib",
        "P2PDIST_ROOT": "/shown here",
    }
    assert made.cwd == "/shown here/app"


@pytest.mark.parametrize(
    ("working_dir", "cwd"),
    [
        ("", "/shown here"),
        ("/", "/shown here"),
        ("app/x", "/shown here/app/x"),
        ("${P2PDIST_ROOT}/app", "/shown here/app"),
        ("${P2PDIST_ROOT}", "/shown here"),
        ("/a/../b", "/shown here/b"),
    ],
)
def test_the_working_directory_is_inside(working_dir: str, cwd: str) -> None:
    """Absolute or relative, it is below the root."""
    assert program(Config(("x",), (), working_dir), [], root=ROOT, environ={}).cwd == cwd


def test_nothing_to_run_and_nowhere_to_run_it() -> None:
    """Both are refused before anything starts."""
    with pytest.raises(UsageError, match="no program"):
        program(Config(), [], root=ROOT, environ={})
    with pytest.raises(UsageError, match="outside"):
        program(Config(("x",), (), "../../etc"), [], root=ROOT, environ={})
    assert program(Config(), ["ls", "-l"], root=ROOT, environ={}).argv == ("ls", "-l")


def started(*argv: str, cwd: str = "/") -> Program:
    return Program(argv, os.environ, cwd)


def test_exit_codes_come_through(tmp_path: Path) -> None:
    """The program's own, 128 + n after signal n, and failures of ours when it could not start."""
    assert run(started("sh", "-c", "exit 7")) == 7
    assert run(started("true")) == 0
    assert run(started("sh", "-c", "kill -KILL $$")) == 128 + 9
    told: list[str] = []
    assert run(started("true"), started=lambda: told.append("started")) == 0
    assert told == ["started"]
    with pytest.raises(NotFound, match="there-is-no-such-program"):
        run(started("there-is-no-such-program"), started=lambda: told.append("not"))
    with pytest.raises(NotFound, match="directory"):
        run(started("true", cwd=str(tmp_path / "none")))
    plain = tmp_path / "plain"
    plain.write_text("x")
    with pytest.raises(NotFound, match="is no directory"):
        run(started("true", cwd=str(plain)))
    with pytest.raises(P2PDistError, match="cannot be run"):
        run(started(str(plain)))
    assert told == ["started"]


def test_what_may_not_be_entered_is_not_said_to_be_missing(tmp_path: Path) -> None:
    """Whether it is the package's directory, or what is to be mounted first."""

    def refused() -> None:
        raise PermissionError(errno.EACCES, "not allowed", "/package")

    unsearchable = tmp_path / "bin"
    unsearchable.mkdir()
    with pytest.raises(P2PDistError, match="not allowed") as failed:
        run(Program(("train",), {"PATH": str(unsearchable)}, "/"), prepare=refused)
    assert not isinstance(failed.value, NotFound)


def test_the_caller_s_signal_mask_comes_back() -> None:
    """Afterwards signals reach this process as before."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [])
    run(started("true"))
    assert signal.pthread_sigmask(signal.SIG_BLOCK, []) == before


_RUNNER = """
import os, sys
from p2pdist.mount.program import Program, run
sys.exit(run(Program(("sh", "-c", sys.argv[1]), os.environ, "/")))
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGUSR1])
def test_signals_sent_to_us_reach_the_program(number: signal.Signals) -> None:
    """The program decides what they mean; its exit code is ours."""
    script = f"trap 'exit 9' {number.name[3:]}; echo ready; while :; do sleep 0.05; done"
    runner = subprocess.Popen([sys.executable, "-c", _RUNNER, script], stdout=subprocess.PIPE)
    assert runner.stdout is not None
    with runner.stdout:
        assert runner.stdout.readline() == b"ready\n"
        runner.send_signal(number)
        assert runner.wait(60) == 9


_COUNTS = """
import signal, sys
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
print("ready", flush=True)
found = []
while (one := signal.sigtimedwait([signal.SIGINT], 0.7 if found else 10)):
    found.append(one)
sys.exit(len(found))
"""


def test_ctrl_c_reaches_the_program_once() -> None:
    """A terminal signals its whole foreground group, so nothing is forwarded then."""
    script = f"exec {shlex.quote(sys.executable)} -c {shlex.quote(_COUNTS)}"
    pid, terminal = os.forkpty()
    if pid == 0:
        os.execv(sys.executable, [sys.executable, "-c", _RUNNER, script])
    try:
        said = b""
        while b"ready" not in said:
            said += os.read(terminal, 100)
        os.write(terminal, b"\x03")
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 1
    finally:
        os.close(terminal)


@pytest.mark.parametrize("script", ["exec sleep 600", "kill -STOP $$; exec sleep 600"])
def test_a_terminal_that_goes_away_ends_the_program(script: str) -> None:
    """The kernel tells the leader of the session alone, which we are where no shell is between, as
    with `ssh -t HOST p2pdist run ...`: the program ran on for ever, and we with it."""
    pid, terminal = os.forkpty()
    if pid == 0:
        os.execv(sys.executable, [sys.executable, "-c", _RUNNER, f"echo ready; {script}"])
    said = b""
    while b"ready" not in said:
        said += os.read(terminal, 100)
    os.close(terminal)
    ended = os.pidfd_open(pid)
    try:
        if not select.select([ended], [], [], 30)[0]:
            os.killpg(pid, signal.SIGKILL)
    finally:
        os.close(ended)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 128 + signal.SIGHUP


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_signals_are_passed_on_while_the_program_is_still_read(
    tmp_path: Path, number: signal.Signals, code: int
) -> None:
    """As that of a lazy view may be for as long as its bytes do not come."""
    os.mkfifo(tmp_path / "program", 0o755)
    script = _RUNNER.replace('("sh", "-c", sys.argv[1])', "(sys.argv[1],)")
    runner = subprocess.Popen([sys.executable, "-c", script, tmp_path / "program"])
    children = Path(f"/proc/{runner.pid}/task/{runner.pid}/children")
    wait_until(lambda: any(is_blocked(int(pid)) for pid in children.read_text().split()))
    runner.send_signal(number)
    assert runner.wait(30) == code


def is_blocked(pid: int) -> bool:
    """Whether a process waits for somebody to write to a FIFO."""
    return Path(f"/proc/{pid}/wchan").read_text() == "wait_for_partner"


def entered(view: Path, place: Path, *binds: Bind, script: str = "true", umask: int = 0o022) -> int:
    """The exit code of a shell script of the host's shell inside a package."""
    scratch = place / "scratch"
    scratch.mkdir()
    before = os.umask(umask)
    try:
        host = [
            Bind(directory, directory) for directory in ("/bin", "/usr", "/lib", "/lib64") if os.path.isdir(directory)
        ]
        words = Program(("/bin/sh", "-c", script), {"PATH": "/usr/bin:/bin"}, "/")
        return run(words, prepare=lambda: enter(view, scratch, [*host, *binds], "/"))
    finally:
        os.umask(before)
        scratch.rmdir()


@pytest.mark.root
@pytest.mark.parametrize("what", ["directory", "file", "other"])
def test_what_the_host_has_where_a_path_is_to_be_seen_stays(what: str) -> None:
    """/tmp is the host's also inside: a link there made room, on the host."""
    with tempfile.TemporaryDirectory(prefix="bind-", dir="/tmp") as name:
        place = Path(name)
        (place / "view").mkdir()
        (place / "real").mkdir()
        (place / "real/data").write_text("precious")
        there = place / "there"
        if what == "other":
            there.write_text("kept")
        else:
            there.symlink_to(place / "real" if what == "directory" else place / "real/data")
        before = (there.is_symlink(), os.path.isdir(there))
        bind = Bind(str(place / "real") if what == "other" else str(there), str(there))
        with pytest.raises(Conflict, match="the host has a link or a file"):
            entered(place / "view", place, bind)
        assert (there.is_symlink(), os.path.isdir(there)) == before
        assert what != "other" or there.read_text() == "kept"


@pytest.mark.root
def test_a_path_that_cannot_be_seen_is_named(tmp_path: Path) -> None:
    (tmp_path / "view").mkdir()
    with pytest.raises(P2PDistError, match=f"{tmp_path} cannot be seen at /proc/none/data") as refused:
        entered(tmp_path / "view", tmp_path, Bind(str(tmp_path), "/proc/none/data"))
    assert "--bind" in refused.value.remedy


@pytest.mark.root
def test_the_root_is_open_to_other_users_whatever_the_umask(tmp_path: Path) -> None:
    """A server that takes on a user of its own has to get into it."""
    (tmp_path / "view").mkdir()
    (tmp_path / "data").mkdir()
    script = "test $(stat -c %a / /mnt /mnt/deep | tr '\\n' ,) = 755,755,755, && test $(umask) = 0077"
    assert (
        entered(tmp_path / "view", tmp_path, Bind(str(tmp_path / "data"), "/mnt/deep/data"), script=script, umask=0o077)
        == 0
    )
