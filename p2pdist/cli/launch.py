"""What a command's process inherits, put right before it imports anything of others: modules,
standard streams, signals.

Modules. PYTHONPATH of a user's job names other environments, and their modules would take the place
of ours. Python has read it by the time that any line of ours runs. Its directories leave the search
path of this process; where something was imported from them already, and for the other variables,
the process starts itself again as `python -E`, which reads none of them. The environment stays as
it is for the programs that the command runs.

Locale. In that of C Python sets LC_CTYPE for itself and for what it starts (PEP 538). The programs
of packages are to see the locale that the user has, so it goes again.

Streams. A daemon may have closed them. The next file that is opened would get the number 0, 1 or 2,
and messages would go into it.

Memory. Nearly all that a command makes is modules, which stay. Looking through them for garbage, as
they grow and once more at the end, took a `run` 20 of its 140 ms.
"""

from __future__ import annotations

import atexit
import gc
import os
import re
import sys

PYTHON_VARIABLES = (
    "PYTHONHOME",
    "PYTHONPLATLIBDIR",
    "PYTHONOPTIMIZE",  # drops the texts of --help
    "PYTHONWARNINGS",  # may make errors of warnings in libraries
    "PYTHONINSPECT",  # would wait for input at the end
)
"""They change which modules a program has, or what these do."""

_COERCED = ("C.UTF-8", "C.utf8", "UTF-8")
"""What Python sets LC_CTYPE to in the locale of C."""

_FLAGS = re.compile(r"-[bBdEhiIOPqRsSuvVx?]*\Z")
"""Options of Python without values, which may stand in one word with -m, as its module may: -Im,
-mp2pdist."""

_GARBAGE_OBJECTS = 50_000
"""So many new objects let Python look for cycles: more than the imports of a command make."""

_OWN = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))


def launch() -> None:
    """Put right what this process has inherited, where it is a command of ours and not a program
    that imports one."""
    module = _is_module()
    script = sys.argv[0] in sys.orig_argv and os.path.basename(sys.argv[0]) == "p2pdist"
    if module or script:
        _open_standard_streams()
        _undo_coercion()
        _use_own_modules(module=module)
        _take_signals()
        gc.set_threshold(_GARBAGE_OBJECTS)
        atexit.register(gc.freeze)  # what is left at the end goes with the process


def _is_module() -> bool:
    """Whether Python was started as `python -m p2pdist`, or with a module below it."""
    if sys.argv[0] != "-m":  # which it is while Python looks for the module
        return sys.argv[0] == os.path.join(_OWN, "__main__.py")
    words = sys.orig_argv
    for at, word in enumerate(words):
        options, flag, name = word.partition("m")
        if flag and _FLAGS.match(options):
            return (name or words[at + 1]).partition(".")[0] == "p2pdist"
    return False


def _open_standard_streams() -> None:
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(number)
        except OSError:
            opened = os.open(os.devnull, os.O_RDWR)  # the lowest number that is free
            os.set_inheritable(opened, True)
            if getattr(sys, name) is None:
                stream = open(opened, "r" if number == 0 else "w", closefd=False, errors="backslashreplace")  # noqa: SIM115
                setattr(sys, name, stream)


def _undo_coercion() -> None:
    if os.environ.get("LC_CTYPE") not in _COERCED:
        return
    try:
        with open("/proc/self/environ", "rb") as file:
            given = file.read()
    except OSError:
        return
    if b"\0LC_CTYPE=" not in b"\0" + given:
        del os.environ["LC_CTYPE"]


def _use_own_modules(*, module: bool) -> None:
    home = os.path.dirname(_OWN)
    if module and not sys.flags.safe_path and sys.path[:1] != [home]:
        del sys.path[:1]  # the working directory
    site = sys.modules.get("site")
    user = getattr(site, "USER_SITE", None)
    if user in sys.path and home != user:
        sys.path.remove(user)
        sys.path.append(user)  # an extra that is installed there is still found
    if sys.flags.ignore_environment or not sys.executable:
        return
    named = _python_path().intersection(sys.path)
    if home in named:
        return  # by which we are found
    needed: list[str] = getattr(site, "getsitepackages", list)()
    if any(map(os.environ.get, PYTHON_VARIABLES)) or named.intersection(needed) or _imported_from(named):
        _start_again()
    sys.path[:] = [path for path in sys.path if path not in named]


def _python_path() -> set[str]:
    value = os.environ.get("PYTHONPATH", "")
    try:
        return {os.path.abspath(path) for path in value.split(os.pathsep)} if value else set()
    except FileNotFoundError:  # the working directory was removed
        return {os.path.normpath(path) for path in value.split(os.pathsep)}


def _imported_from(directories: set[str]) -> bool:
    files = [getattr(module, "__file__", None) or "" for module in sys.modules.values()]
    return any(file.startswith(f"{directory}/") for directory in directories for file in files)


def _start_again() -> None:
    kept = {"-s": sys.flags.no_user_site, "-B": sys.flags.dont_write_bytecode, "-P": sys.flags.safe_path}
    kept |= {"-Xutf8": sys.flags.utf8_mode, "-u": bool(os.environ.get("PYTHONUNBUFFERED"))}
    options = [option for option, given in kept.items() if given]
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, f"__{name}__") is None:
            os.close(number)  # as it was found, which tells export that nobody reads
    os.execv(sys.executable, [sys.executable, "-E", *options, *sys.orig_argv[1:]])  # noqa: S606


def _take_signals() -> None:
    """A caller that ignores SIGCHLD would leave us without exit codes of the programs we start;
    what it blocks could not stop us."""
    import signal

    if signal.getsignal(signal.SIGCHLD) == signal.SIG_IGN:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    if signal.getsignal(signal.SIGINT) == signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # until main() takes it: an import has nothing to tidy
