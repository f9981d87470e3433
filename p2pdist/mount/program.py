"""Running a package's program: what to execute, and waiting for it while signals are passed on.

A terminal sends its signals (Ctrl-C) to every process of the foreground group, so the program has
them already; those that were sent to this process alone are forwarded. The two are told apart by
the signal's si_code (sigaction(2)): SI_KERNEL is the terminal. One that goes away, as when a
connection breaks, sends SIGHUP to the leader of its session alone (setsid(2)), which this process
is where `ssh -t HOST` or the window of a terminal runs it without a shell between: that is
forwarded, too.

A program inherits a hold on its view, and so do its children: whatever ends them, the agent sees
when the last one is gone (flock(2)).
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import select
import signal
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from p2pdist.model.errors import NotFound, P2PDistError, UsageError, from_problem
from p2pdist.model.manifest import ROOT_VARIABLE, Config, search_path
from p2pdist.mount.executable import INSPECT, Search, explain

_SI_KERNEL = 0x80
_FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2)
_AWAITED = (*_FORWARDED, signal.SIGCHLD)

LOOK_AGAIN_S = 5.0
"""A thread of a library that does not block SIGCHLD may have been given it."""

PASS_ON_S = 0.1
"""Between two looks for signals to pass on, while the program has not begun."""


@dataclass(frozen=True, slots=True)
class Program:
    """The first of `argv` is looked up in the PATH of `env`, from the directory `cwd`. `root` is
    where its package is seen, "" when it is of none."""

    argv: tuple[str, ...]
    env: Mapping[str, str]
    cwd: str
    root: str = ""


def program(config: Config, arguments: Sequence[str], *, root: Path, environ: Mapping[str, str]) -> Program:
    """The program of a package that is shown at `root`: its entrypoint, then `arguments` (alone
    when it has no entrypoint). In both, and in its environment and working directory,
    `${P2PDIST_ROOT}` becomes `root`. The environment is `environ`, then the package's, then
    P2PDIST_ROOT, with `<root>/bin` in front of PATH; the directories of a PATH of the package's
    come first as they are below `root`. Raises UsageError when there is nothing to run, or nowhere
    to run it."""

    def expand(text: str) -> str:
        return text.replace("${" + ROOT_VARIABLE + "}", str(root))

    argv = tuple(expand(word) for word in (*config.entrypoint, *arguments))
    if not argv or not argv[0]:
        raise UsageError("the package names no program to run", remedy="Give one: p2pdist run REF -- PROGRAM ARG...")
    env = dict(environ)
    for entry in config.env:
        name, _, value = entry.partition("=")
        env[name] = expand(search_path(value) if name == "PATH" else value)
    env["PATH"] = f"{root}/bin:" + env.get("PATH", os.defpath)
    env[ROOT_VARIABLE] = str(root)
    return Program(argv, env, _working_directory(expand(config.working_dir), root), str(root))


def _working_directory(text: str, root: Path) -> str:
    """`/app` and `app` are both below `root`; so is a path that begins with `root`."""
    if text != str(root) and not text.startswith(f"{root}/"):
        text = f"{root}/{text.lstrip('/')}"
    path = os.path.normpath(text)
    if path != str(root) and not path.startswith(f"{root}/"):
        raise UsageError(
            f"the package's working directory {text} is outside the package",
            remedy="Pack it with a --working-dir that is in it",
        )
    return path


def run(
    program: Program,
    *,
    prepare: Callable[[], None] = lambda: None,
    started: Callable[[], None] = lambda: None,
    keep: Sequence[int] = (),
) -> int:
    """Run it to its end and return its exit code, or 128 + n when signal n ended it. `prepare` is
    called in the new process before the program replaces it, `started` here afterwards; the
    descriptors `keep` stay open in it. Call it from a process with one thread. Raises NotFound when
    the program does not exist, P2PDistError when it cannot be executed."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _AWAITED)
    # Where the caller ignores SIGCHLD, as some schedulers do, the kernel keeps no exit code.
    reaped = signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    try:
        failure, report = os.pipe()  # closed by a successful execve, as all of Python's descriptors are
        child = os.fork()
        if child == 0:
            _become(program, prepare, keep, before, report)
        os.close(report)
        reason = _reason(failure, child)
        if not reason:
            started()
        code = _wait(child)
        if reason:
            raise from_problem(json.loads(reason))
        return code
    finally:
        # A signal that came while the program was ending was meant for the program: it must not end
        # this process now.
        while signal.sigtimedwait(_AWAITED, 0) is not None:
            pass
        if reaped is not None:  # a handler that was not set from Python cannot be put back
            signal.signal(signal.SIGCHLD, reaped)
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _reason(failure: int, child: int) -> bytes:
    """What the new process reports until the program replaces it; nothing where it does. That may
    take as long as a view waits for the bytes of the program, so signals are passed on
    meanwhile."""
    with os.fdopen(failure, "rb") as file:
        poll = select.poll()
        poll.register(failure, select.POLLIN)
        while not poll.poll(1000 * PASS_ON_S):
            while (found := signal.sigtimedwait(_AWAITED, 0)) is not None:
                _pass_on(found, child)
        return file.read()


def _become(
    program: Program, prepare: Callable[[], None], keep: Sequence[int], mask: set[int | signal.Signals], report: int
) -> None:
    """In the new process: become the program, or report why not, as a problem document, and end.
    Never returns."""
    try:
        prepare()
        for descriptor in keep:
            os.set_inheritable(descriptor, True)
        for name in _FORWARDED:
            if signal.getsignal(name) != signal.SIG_IGN:  # what the caller ignores, as under nohup(1), stays ignored
                signal.signal(name, signal.SIG_DFL)
        for name in (signal.SIGPIPE, signal.SIGXFSZ):  # Python ignores them, and execve would keep that
            signal.signal(name, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        try:
            os.chdir(program.cwd)
        except (FileNotFoundError, NotADirectoryError) as error:
            what = "does not exist" if isinstance(error, FileNotFoundError) else "is no directory"
            raise NotFound(
                f"{program.argv[0]} cannot be run: its working directory {program.cwd} {what}", remedy=INSPECT
            ) from error
        found = Search(program.env, program.cwd, program.root).executable(program.argv)
        try:
            os.execve(found.path, found.argv, dict(program.env))  # noqa: S606
        except OSError as error:
            raise explain(found, error) from error
    except P2PDistError as error:
        os.write(report, json.dumps(error.problem()).encode())
    except BaseException as error:
        failure = P2PDistError(f"{program.argv[0]} cannot be run: {error}", remedy="See that the package may be read")
        os.write(report, json.dumps(failure.problem()).encode())
    finally:
        os._exit(127)


def _wait(child: int) -> int:
    while True:
        # A signal that arrives now is pending, so none is missed between the two calls.
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            code = os.waitstatus_to_exitcode(status)
            return code if code >= 0 else 128 - code
        found = signal.sigtimedwait(_AWAITED, LOOK_AGAIN_S)
        if found is not None:
            _pass_on(found, child)


def _pass_on(found: signal.struct_siginfo, child: int) -> None:
    """Forward a signal that was meant for this process alone."""
    if found.si_signo == signal.SIGCHLD:
        return
    gone = found.si_signo == signal.SIGHUP and os.getsid(0) == os.getpid()
    if found.si_code != _SI_KERNEL or gone:
        os.kill(child, found.si_signo)
        if gone:  # as the kernel does: a program that is stopped takes the signal only then
            os.kill(child, signal.SIGCONT)


def hold(target: Path) -> int | None:
    """A descriptor that keeps the view at `target` in use while any process has it open. None where
    this user may not read the view: its programs are then known by their environment alone."""
    try:
        directory = os.open(target, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError:
        return None
    # On a file system without locks the open directory keeps a mount busy all the same.
    with contextlib.suppress(OSError):
        fcntl.flock(directory, fcntl.LOCK_SH)
    return directory


def is_held(target: Path) -> bool:
    """Whether a process has what `hold` returned."""
    try:
        directory = os.open(target, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError:
        return False  # it is not there any more
    try:
        fcntl.flock(directory, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False  # a file system without locks
    finally:
        os.close(directory)
    return False
