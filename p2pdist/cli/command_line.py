"""The command line as other users of the machine see it: /proc/PID/cmdline is readable to all of
them, unlike the environment."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from p2pdist.model.url import secrets_in

_ARG_START, _ARG_END = 45, 46
"""Fields of /proc/self/stat (proc_pid_stat(5), 48 and 49) behind the name of the program, which is
the second."""


def conceal(arguments: Sequence[str]) -> bool:
    """Write over what may be secrets in the URLs that options are given, where the kernel keeps
    this process's command line. Returns whether there are any. Raises OSError where that cannot be
    done."""
    credentials = [secret for url in _urls(arguments) for secret in secrets_in(url)]
    if not credentials:
        return False
    import ctypes
    import os
    from pathlib import Path

    fields = Path("/proc/self/stat").read_bytes().rpartition(b")")[2].split()
    start, end = int(fields[_ARG_START]), int(fields[_ARG_END])
    shown = ctypes.string_at(start, end - start)
    for secret in map(os.fsencode, credentials):
        at = shown.find(secret)
        while at >= 0:
            ctypes.memset(start + at, ord("x"), len(secret))
            at = shown.find(secret, at + len(secret))
    return True


def _urls(arguments: Sequence[str]) -> Iterator[str]:
    """What options are given that may be one or more URLs; what follows `--` is another
    program's."""
    option = False
    for argument in arguments:
        if argument == "--":
            return
        begins = argument.startswith("--")
        value = argument.partition("=")[2] if begins else argument if option else ""
        option = begins
        if "://" in value:
            yield from value.split(",") if value.count("://") > 1 else [value]
