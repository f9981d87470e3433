"""Running a package's program: what to execute, and waiting for it while signals are passed on.

A terminal sends its signals (Ctrl-C) to every process of the foreground group, so the program has them already; those that were sent
to this process alone are forwarded. The two are told apart by the signal's si_code (sigaction(2)): SI_KERNEL is the terminal.
"""

from __future__ import annotations

import errno
import os
import signal
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from p2pdist.model.errors import NotFound, P2PDistError, UsageError
from p2pdist.model.package import Config

ROOT_VARIABLE = "P2PDIST_ROOT"
_SI_KERNEL = 0x80
_FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2)
_AWAITED = (*_FORWARDED, signal.SIGCHLD)

LOOK_AGAIN_S = 5.0
"""A thread of a library that does not block SIGCHLD may have been given it."""


@dataclass(frozen=True, slots=True)
class Program:
    """What execve(2) is given: the first of `argv` is looked up in the PATH of `env`, from the directory `cwd`."""

    argv: tuple[str, ...]
    env: Mapping[str, str]
    cwd: str


def program(config: Config, arguments: Sequence[str], *, root: Path, environ: Mapping[str, str]) -> Program:
    """The program of a package that is shown at `root`: its entrypoint, then `arguments` (alone when it has no entrypoint). In both,
    and in its environment and working directory, `${P2PDIST_ROOT}` becomes `root`. The environment is `environ`, then the package's,
    then P2PDIST_ROOT, with `<root>/bin` in front of PATH. Raises UsageError when there is nothing to run, or nowhere to run it."""

    def expand(text: str) -> str:
        return text.replace("${" + ROOT_VARIABLE + "}", str(root))

    argv = tuple(expand(word) for word in (*config.entrypoint, *arguments))
    if not argv or not argv[0]:
        raise UsageError("the package names no program to run", remedy="Give one: p2pdist run REF -- PROGRAM ARG...")
    env = dict(environ)
    for entry in config.env:
        name, _, value = entry.partition("=")
        env[name] = expand(value)
    env["PATH"] = f"{root}/bin:" + env.get("PATH", os.defpath)
    env[ROOT_VARIABLE] = str(root)
    return Program(argv, env, _working_directory(expand(config.working_dir), root))


def _working_directory(text: str, root: Path) -> str:
    """`/app` and `app` are both below `root`; so is a path that begins with `root`."""
    if text != str(root) and not text.startswith(f"{root}/"):
        text = f"{root}/{text.lstrip('/')}"
    path = os.path.normpath(text)
    if path != str(root) and not path.startswith(f"{root}/"):
        raise UsageError(f"the package's working directory {text} is outside the package")
    return path


def run(
    program: Program,
    *,
    prepare: Callable[[], None] = lambda: None,
    started: Callable[[], None] = lambda: None,
    keep: Sequence[int] = (),
) -> int:
    """Run it to its end and return its exit code, or 128 + n when signal n ended it. `prepare` is called in the new process before the
    program replaces it, `started` here afterwards; the descriptors `keep` stay open in it. Call it from a process with one thread.
    Raises NotFound when the program does not exist, P2PDistError when it cannot be executed."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _AWAITED)
    try:
        failure, report = os.pipe()  # closed by a successful execve, as all of Python's descriptors are
        child = os.fork()
        if child == 0:
            _become(program, prepare, keep, before, report)
        os.close(report)
        with os.fdopen(failure, "rb") as file:
            reason = file.read().decode(errors="replace")
        if not reason:
            started()
        code = _wait(child)
        if reason:
            raise _not_started(program, reason)
        return code
    finally:
        # A signal that came while the program was ending was meant for the program: it must not end this process now.
        while signal.sigtimedwait(_AWAITED, 0) is not None:
            pass
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _become(
    program: Program, prepare: Callable[[], None], keep: Sequence[int], mask: set[int | signal.Signals], report: int
) -> None:
    """In the new process: become the program, or report why not and end. Never returns."""
    executing = False
    try:
        prepare()
        for descriptor in keep:
            os.set_inheritable(descriptor, True)
        for name in (*_FORWARDED, signal.SIGPIPE):
            signal.signal(name, signal.SIG_DFL)  # Python ignores SIGPIPE, and execve would keep that
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        os.chdir(program.cwd)
        executing = True
        os.execvpe(program.argv[0], program.argv, dict(program.env))  # noqa: S606
    except BaseException as error:
        number = (error.errno or 0) if isinstance(error, OSError) else 0
        # Where a directory in PATH may not be searched, exec(3) says that rather than that nothing was found.
        if executing and number == errno.EACCES and not _found(program):
            number = errno.ENOENT
        os.write(report, f"{number}:{error}".encode(errors="replace"))
    finally:
        os._exit(127)


def _found(program: Program) -> bool:
    """Whether there is a file that the program may be, in the directories that may be searched."""
    name = program.argv[0]
    return "/" in name or any(os.path.lexists(os.path.join(each, name)) for each in os.get_exec_path(program.env))


def _wait(child: int) -> int:
    while True:
        # A signal that arrives now is pending, so none is missed between the two calls.
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            code = os.waitstatus_to_exitcode(status)
            return code if code >= 0 else 128 - code
        found = signal.sigtimedwait(_AWAITED, LOOK_AGAIN_S)
        if found is not None and found.si_signo != signal.SIGCHLD and found.si_code != _SI_KERNEL:
            os.kill(child, found.si_signo)


def _not_started(program: Program, reason: str) -> P2PDistError:
    number, _, text = reason.partition(":")
    if int(number) in (errno.ENOENT, errno.ENOTDIR):
        return NotFound(
            f"{program.argv[0]} cannot be run in {program.cwd}: it, its interpreter or that directory does not exist",
            remedy="See the package's entrypoint, working directory and PATH with p2pdist inspect",
        )
    return P2PDistError(f"{program.argv[0]} cannot be run: {text}", remedy="See that the file may be executed")
