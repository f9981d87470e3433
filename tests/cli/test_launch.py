"""A command works whatever it inherits: Python's variables, streams that are closed or full,
signals that are ignored or blocked."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest

P2PDIST = str(Path(sys.executable).with_name("p2pdist"))
MODULE = (sys.executable, "-m", "p2pdist")
REPOSITORY = str(Path(__file__).resolve().parents[2])

AS_COMMAND = f"import sys; sys.argv[0] = {P2PDIST!r}; sys.orig_argv.append({P2PDIST!r}); import p2pdist.cli\n"
"""What the command's own script begins with."""

FOREIGN = "raise ImportError('of another environment')\n"


@pytest.fixture
def foreign(tmp_path: Path) -> Path:
    """A directory with modules of the names of those that every command needs."""
    for name in ("msgspec", "click"):
        (tmp_path / "site" / name).mkdir(parents=True)
        (tmp_path / "site" / name / "__init__.py").write_text(FOREIGN)
    (tmp_path / "site" / "p2pdist").mkdir()
    return tmp_path / "site"


def run(*command: str, cwd: Path | str = "/", **environment: str) -> subprocess.CompletedProcess[str]:
    env = {"PATH": os.environ["PATH"], "P2PDIST_SOCKET": "/nowhere/agent.sock", **environment}
    return subprocess.run(command, env=env, cwd=cwd, capture_output=True, text=True, timeout=60, check=False)


def no_agent(done: subprocess.CompletedProcess[str]) -> bool:
    """Whether the command came as far as to look for an agent, and said nothing else."""
    return done.returncode == 5 and done.stderr.startswith("p2pdist: no agent answers on /nowhere")


@pytest.mark.parametrize("value", ["{}", "/nothing:{}:", ":"])
def test_modules_of_pythonpath_do_not_replace_ours(foreign: Path, value: str) -> None:
    """Another environment's directory, and an empty word, which stands for the working
    directory."""
    done = run(P2PDIST, "ls", cwd=foreign, PYTHONPATH=value.format(foreign))
    assert no_agent(done), done.stderr


def test_modules_of_the_working_directory_do_not_replace_ours(foreign: Path) -> None:
    """`python -m` puts it in front."""
    done = run(*MODULE, "ls", cwd=foreign)
    assert no_agent(done), done.stderr


@pytest.mark.parametrize(
    "words", [("-mp2pdist.cli.main",), ("-Im", "p2pdist.cli.main"), ("-Ximporttime", "-sm", "p2pdist.cli.main")]
)
def test_a_module_is_known_however_it_is_named(words: tuple[str, ...]) -> None:
    """Options and the name may stand in one word."""
    done = run(sys.executable, *words, "--help")
    assert (done.returncode, "Traceback" in done.stderr) == (0, False), done.stderr
    assert done.stdout.startswith("Usage: ")


def test_what_was_imported_before_us_is_left_behind(foreign: Path) -> None:
    """A sitecustomize of another environment has run by then; so the command starts anew without
    it."""
    (foreign / "sitecustomize.py").write_text("import sys, types\nsys.modules['click'] = types.ModuleType('click')\n")
    done = run(P2PDIST, "ls", PYTHONPATH=str(foreign))
    assert no_agent(done), done.stderr


def test_the_directory_that_we_are_found_by_stays(foreign: Path) -> None:
    """A checkout that is named in PYTHONPATH, as developers do."""
    done = run(*MODULE, "ls", PYTHONPATH=REPOSITORY)
    assert no_agent(done), done.stderr


@pytest.mark.parametrize(
    ("name", "value"), [("PYTHONOPTIMIZE", "2"), ("PYTHONWARNINGS", "error"), ("PYTHONINSPECT", "1")]
)
def test_other_variables_of_python_change_nothing(name: str, value: str) -> None:
    """Help has its text, and the process ends."""
    done = run(P2PDIST, "ls", "--help", **{name: value})
    assert (done.returncode, done.stderr) == (0, "")
    assert "Example" in done.stdout


@pytest.mark.parametrize("closed", [">&-", "<&- >&- 2>&-"])
def test_closed_streams_are_empty_ones(tmp_path: Path, closed: str) -> None:
    """Nothing that the command opens gets their numbers: a message would go into a file of the
    layout."""
    (tmp_path / "source").mkdir()
    layout = f"--layout {tmp_path}/layout"
    done = run("sh", "-c", f"{P2PDIST} pack {tmp_path}/source -t a:1 --format tree {layout} {closed}")
    assert (done.returncode, done.stderr if "2>" in closed else "") == (0, "")
    assert run(P2PDIST, "inspect", "a:1", *layout.split()).returncode == 0


def test_the_numbers_of_closed_streams_are_taken(tmp_path: Path) -> None:
    """All three lead to /dev/null, and so do the streams of Python."""
    script = (
        f"{AS_COMMAND}import os\n"
        f"names = [os.readlink(f'/proc/self/fd/{{n}}') for n in range(3)]\n"
        f"print('unseen'); print('unseen', file=sys.stderr); sys.stdin.read()\n"
        f"open({str(tmp_path / 'said')!r}, 'w').write(' '.join(names))\n"
    )
    (tmp_path / "script.py").write_text(script)
    assert run("sh", "-c", f"{sys.executable} {tmp_path}/script.py <&- >&- 2>&-").returncode == 0
    assert (tmp_path / "said").read_text() == "/dev/null /dev/null /dev/null"


@pytest.mark.parametrize("words", ["--version", "completion bash"])
def test_output_that_cannot_be_written_is_a_failure(words: str) -> None:
    """A full disk is said in one line; a reader that went away is not."""
    done = run("sh", "-c", f"{P2PDIST} {words} > /dev/full")
    assert done.returncode == 1
    assert done.stderr == "p2pdist: standard output cannot be written: No space left on device\n"


def test_messages_that_cannot_be_written_change_no_exit_code() -> None:
    """Failures keep theirs where neither stream takes the words."""
    assert run("sh", "-c", f"{P2PDIST} ls 2> /dev/full").returncode == 5
    done = run("sh", "-c", f"{P2PDIST} ls --json > /dev/full")
    assert (done.returncode, done.stderr.count("\n")) == (5, 1)


def inherit(number: signal.Signals, *, blocked: bool) -> Callable[[], None]:
    def prepare() -> None:
        if blocked:
            signal.pthread_sigmask(signal.SIG_BLOCK, [number])
        else:
            signal.signal(number, signal.SIG_IGN)

    return prepare


def test_programs_are_waited_for_where_sigchld_is_ignored(tmp_path: Path) -> None:
    """Schedulers leave it ignored, and the kernel then keeps no exit code: of mksquashfs, here."""
    (tmp_path / "file").write_text("x")
    command = [P2PDIST, "pack", str(tmp_path), "-t", "a:1", "--layout", str(tmp_path.with_name("layout"))]
    prepare = inherit(signal.SIGCHLD, blocked=False)
    done = subprocess.run(command, preexec_fn=prepare, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_what_the_caller_blocks_can_stop_us(tmp_path: Path) -> None:
    """A service that inherits a blocked SIGTERM would have to be killed."""
    (tmp_path / "script.py").write_text(
        f"{AS_COMMAND}import signal; print(signal.pthread_sigmask(signal.SIG_BLOCK, []))"
    )
    command = [sys.executable, tmp_path / "script.py"]
    prepare = inherit(signal.SIGTERM, blocked=True)
    done = subprocess.run(command, preexec_fn=prepare, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout) == (0, "set()\n")


def test_ctrl_c_before_a_command_begins_is_silent(tmp_path: Path) -> None:
    """An import has nothing to tidy and nothing to say."""
    script = AS_COMMAND + "import os, signal; os.kill(os.getpid(), signal.SIGINT); print('goes on')"
    done = run(sys.executable, "-c", script)
    assert (done.returncode, done.stdout, done.stderr) == (-signal.SIGINT, "", "")


def test_a_command_looks_for_no_garbage_while_it_starts(tmp_path: Path) -> None:
    """What imports make stays, and what is left at the end goes with the process."""
    count = "sum(each['collections'] for each in gc.get_stats())"
    script = (
        "import atexit, gc; atexit.register(lambda: print(gc.get_freeze_count() > 0))\n"
        f"{AS_COMMAND}before = {count}\n"
        "from p2pdist.cli.main import main\n"
        f"try: main(['run', '--socket', {str(tmp_path / 'none')!r}, 'app:v1'])\n"
        f"except SystemExit: print({count} - before)"
    )
    assert run(sys.executable, "-c", script).stdout == "0\nTrue\n"


def test_a_hangup_reaches_an_event_loop_that_takes_ctrl_c() -> None:
    script = (
        "import asyncio, os, signal; from p2pdist.cli import main\n"
        "async def wait():\n"
        "    ended = asyncio.Event(); asyncio.get_running_loop().add_signal_handler(signal.SIGINT, ended.set)\n"
        "    os.kill(os.getpid(), signal.SIGHUP); await ended.wait(); print('ended')\n"
        "main._take_signals(['up']); asyncio.run(wait())"
    )
    assert run(sys.executable, "-c", script).stdout == "ended\n"


def test_a_daemon_that_does_not_serve_yet_ends_by_its_signal() -> None:
    """It may look through its store for minutes; a supervisor takes that end for a clean one."""
    script = "import os, signal; from p2pdist.cli import main; main._take_signals(['agent']); signal.raise_signal({})"
    for number in (signal.SIGTERM, signal.SIGHUP):
        assert run(sys.executable, "-c", script.format(int(number))).returncode == -number


def test_run_ignores_a_hangup_that_its_caller_ignores(tmp_path: Path) -> None:
    """As under nohup(1): neither it nor the program ends then."""
    script = (
        "import signal, sys; signal.signal(signal.SIGHUP, signal.SIG_IGN)\n"
        "from p2pdist.cli.main import main\n"
        "try: main(['run', '--local', 'none:1', '--layout', sys.argv[1]])\n"
        "except SystemExit: print(signal.getsignal(signal.SIGHUP) == signal.SIG_IGN)"
    )
    assert run(sys.executable, "-c", script, str(tmp_path)).stdout == "True\n"


def test_a_working_directory_that_was_removed_is_said(tmp_path: Path) -> None:
    """A relative name means nothing there; with absolute ones all goes on."""
    gone = f"mkdir {tmp_path}/gone; cd {tmp_path}/gone; rmdir {tmp_path}/gone;"
    done = run("sh", "-c", f"{gone} {P2PDIST} mount app:1 view")
    assert (done.returncode, done.stderr) == (
        3,
        "p2pdist: the working directory was removed. Change to one that exists: cd\n",
    )
    done = run("sh", "-c", f"{gone} {P2PDIST} pack {tmp_path} -t a:1 --layout {tmp_path}-layout")
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.slow
@pytest.mark.root
def test_a_user_without_a_home_is_told_of_the_layout() -> None:
    """As a job has it whose user number stands in no passwd(5) there."""
    command = ["setpriv", "--reuid=54321", "--clear-groups", sys.executable, "-c", "import p2pdist.cli"]
    if subprocess.run(command, capture_output=True, check=False).returncode:
        pytest.skip("the interpreter is in a directory that others may not enter")
    with tempfile.TemporaryDirectory() as source:  # pytest's directories are its user's alone
        Path(source).chmod(0o755)
        done = run(*command[:3], P2PDIST, "pack", source, "-t", "a:1")
        for words, code, told in (
            (("cache", "key", "cache", "--json"), 2, "no home directory for caches. Name a directory with --dir"),
            (("ls", "--at-origin", "--origin", "oci://127.0.0.1:1/none"), 5, "connection refused"),
        ):
            other = run(*command[:3], P2PDIST, *words)
            assert (other.returncode, told in other.stderr) == (code, True), other.stderr
    assert done.returncode == 2
    assert "this user has no home directory for the layout. Name one with --layout" in done.stderr


def test_the_locale_of_the_user_is_that_of_programs() -> None:
    """Python sets LC_CTYPE in the locale of C, and keeps one that the user has set."""
    script = AS_COMMAND + "import os; print(os.environ.get('LC_CTYPE'))"
    assert run(sys.executable, "-c", script).stdout == "None\n"
    assert run(sys.executable, "-c", script, LC_CTYPE="C.UTF-8").stdout == "C.UTF-8\n"
