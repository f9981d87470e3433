"""Which file a package's program is, so that what stands in the package is what runs, or nothing
does.

execvp(3) goes on to the next directory of PATH when a file may not be executed, or its interpreter
is missing, and so ends at this host's program of the same name. Here the first name that exists
below the package's root decides. A package may have been made to be the root of a file system, as
container images are: an absolute path, that of a program, of the interpreter in a script's first
line or of a link on the way, is taken from the package where it is there, else from this host.
"""

from __future__ import annotations

import errno
import os
import shlex
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from p2pdist.model.errors import NotFound, P2PDistError

LINKS_MAX = 40
SCRIPTS_MAX = 5
"""As in the kernel: links on the way to a file, and scripts that are interpreters of scripts."""

_LINE_BYTES_MAX = 256
_PT_INTERP = 3
_WINDOWS = "Its lines end as on Windows (CR LF): convert it, as dos2unix does"
INSPECT = "p2pdist inspect shows the package's entrypoint, working directory and PATH"
_NOT_ENTERED = "run makes the package the root of the file system only with --root: give that, or pack what it needs, or install that here"


@dataclass(frozen=True, slots=True)
class Executable:
    """What execve(2) is given: the file and its words, the name of the program first."""

    path: str
    argv: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class _File:
    """A file that may be executed. `name` is what the program takes for its own path, "" when it is
    the name that was looked up in PATH; `packaged`: it is part of the package."""

    path: str
    name: str
    packaged: bool


@dataclass(frozen=True, slots=True)
class Search:
    """Where programs are looked for: in PATH of `env`, from the directory `cwd`, and below the
    package's `root` ("" for none)."""

    env: Mapping[str, str]
    cwd: str
    root: str

    def executable(self, argv: Sequence[str]) -> Executable:
        """The file to execute for `argv`. Raises NotFound when it or its interpreter does not
        exist, P2PDistError when it cannot be a program."""
        file = self._file(argv[0])
        words = (file.name or argv[0], *argv[1:])
        for _ in range(SCRIPTS_MAX):
            line = _first_line(file.path)
            if line is None:
                break
            interpreter, argument = line
            found, before = self._interpreter(file, interpreter, argument)
            if found is None:
                break
            words = (found.name or before[0], *before[1:], file.path, *words[1:])
            file = found
        return Executable(file.path, words)

    def _interpreter(self, script: _File, interpreter: str, argument: str) -> tuple[_File | None, tuple[str, ...]]:
        """The interpreter to execute for a script and its words before the script's path; None when
        the kernel finds it itself."""
        if os.path.basename(interpreter) == "env" and argument:
            words = _words_of_env(argument)
            program = next((word for word in words if "=" not in word), "-")
            if program.startswith("-"):
                return None, ()  # options: env decides
            try:
                named = self._file(program)
            except NotFound as error:
                remedy = _WINDOWS if program.endswith("\r") else error.remedy
                raise NotFound(f"{script.path} is a script, and {error.what}", remedy=remedy) from error
            return (named, words) if program == words[0] else (None, ())  # else env sets variables
        path = os.path.join(self.cwd, interpreter)
        if script.packaged and (found := self._packaged(self._below(path) or path)) is not None:
            return found, (found.name or found.path, *([argument] if argument else ()))
        if not os.path.exists(path):
            raise NotFound(
                f"{script.path} cannot be run: it is a script for {interpreter}, which does not exist",
                remedy=_WINDOWS
                if interpreter.endswith("\r")
                else "Pack an environment that can be moved, or start it with an interpreter: python -m MODULE",
            )
        return None, ()

    def _file(self, name: str) -> _File:
        if "/" not in name:
            return self._in_path(name)
        path = os.path.join(self.cwd, name)
        below = self._below(path)
        if self.root and (found := self._packaged(path if below is None else below)) is not None:
            # The name stays as it was given where the kernel finds the same.
            return found if below is None or found.path != path else _File(found.path, name, found.packaged)
        return _checked(_File(path, name, False), name)

    def _in_path(self, name: str) -> _File:
        refused: P2PDistError | None = None
        for directory in os.get_exec_path(self.env):
            path = os.path.join(self.cwd, directory, name)
            below = self._below(path)
            if below is not None:
                if (found := self._packaged(below)) is not None:
                    return _File(found.path, "" if found.path == path else found.name, found.packaged)
            elif os.path.exists(path) and not os.path.isdir(path):
                try:
                    return _checked(_File(path, "", False), name)
                except P2PDistError as error:
                    refused = refused or error
        raise refused or NotFound(
            f"{name} cannot be run: neither the package nor PATH of this host has a program of that name",
            remedy=INSPECT,
        )

    def _below(self, path: str) -> str | None:
        """`path` as seen from the package's root, None when it is elsewhere."""
        return path[len(self.root) :] if self.root and path.startswith(f"{self.root}/") else None

    def _packaged(self, below: str) -> _File | None:
        """The file of the package at `below`, seen from its root; None when the package has no such
        name. Raises P2PDistError when what is there cannot be executed."""
        path = f"{self.root}/{below.lstrip('/')}"
        found = self._within(below)
        if found is None:
            if not os.path.lexists(path):
                return None
            if not os.path.exists(path):
                raise NotFound(
                    f"{path} cannot be run: it is a link to {_target(path)}, which does not exist",
                    remedy="Pack the directory that it leads to as well, or an environment that can be moved",
                )
            return _checked(_File(path, path, False), path)  # the package refers to a file of this host
        if _same(found, path):
            return _checked(_File(path, path, True), path)
        # The directory is where the file looks for what belongs to it; the last name is what it is
        # called by.
        return _checked(_File(found, f"{os.path.dirname(found)}/{os.path.basename(path)}", True), path)

    def _within(self, below: str) -> str | None:
        """Where `below` leads when links are followed as if the package were the root; None when
        nothing is there. Raises P2PDistError for a directory that may not be searched."""
        place: list[str] = []
        ahead = below.split("/")[::-1]
        links = 0
        while ahead:
            name = ahead.pop()
            if name in ("", "."):
                continue
            if name == "..":
                del place[-1:]
                continue
            here = "/".join((self.root, *place, name))
            try:
                target = os.readlink(here)
            except OSError as error:
                if error.errno == errno.EINVAL:  # no link
                    place.append(name)
                    continue
                if error.errno == errno.EACCES:
                    raise P2PDistError(
                        f"{here} cannot be looked up: a directory of the package may not be searched by this user",
                        remedy="Pack it so that all may read it",
                    ) from error
                return None
            links += 1
            if links > LINKS_MAX:
                return None
            if target.startswith("/"):
                place = []
                target = self._below(target) or target
            ahead += target.split("/")[::-1]
        return "/".join((self.root, *place))


def explain(executable: Executable, error: OSError) -> P2PDistError:
    """Why execve(2) failed, for a file that was there before."""
    path = executable.path
    if error.errno == errno.ENOENT and os.path.exists(path):
        loader = _loader(path)
        what = f"its loader {loader} does not exist" if loader else "its interpreter does not exist"
        return NotFound(f"{path} cannot be run: {what} on this host", remedy=_NOT_ENTERED)
    if error.errno == errno.ENOEXEC:
        binary = _head(path, 4) == b"\x7fELF"
        what = (
            "it is a program for another processor"
            if binary
            else "it is neither a program nor a script that begins with #!"
        )
        remedy = f"Pack it for this host ({os.uname().machine})" if binary else "Begin it with #!/bin/sh or the like"
        return P2PDistError(f"{path} cannot be run: {what}", remedy=remedy)
    return P2PDistError(f"{path} cannot be run: {error.strerror}", remedy="See that the file may be executed")


def _checked(file: _File, name: str) -> _File:
    """The file itself. Raises NotFound or P2PDistError when it is not one that this user may
    execute."""
    if not os.path.lexists(file.path):
        raise NotFound(f"{name} cannot be run: it does not exist", remedy=INSPECT)
    if os.path.isdir(file.path):
        raise P2PDistError(f"{name} cannot be run: it is a directory", remedy="Name a program in it")
    if not os.path.exists(file.path):
        raise NotFound(f"{name} cannot be run: it is a link that leads nowhere", remedy=INSPECT)
    if not os.access(file.path, os.X_OK):
        raise P2PDistError(
            f"{name} cannot be run: this user may not execute it", remedy="Give it the right before packing: chmod +x"
        )
    return file


def _words_of_env(argument: str) -> tuple[str, ...]:
    """Variables, program and words of `#!/usr/bin/env ARGUMENT`. The kernel passes ARGUMENT as one
    word, which env splits after -S; nothing where that cannot be told here."""
    if not argument.startswith("-S"):
        return (argument,)
    try:
        return tuple(shlex.split(argument[2:])) if "$" not in argument else ()
    except ValueError:
        return ()  # env says what is wrong with it


def _first_line(path: str) -> tuple[str, str] | None:
    """Interpreter and argument in the first line of a script; None for what is none, or cannot be
    read."""
    head = _head(path, _LINE_BYTES_MAX)
    if not head.startswith(b"#!"):
        return None
    words = os.fsdecode(head[2:].partition(b"\n")[0].partition(b"\0")[0]).strip(" \t").replace("\t", " ").split(" ", 1)
    return (words[0], words[1].strip(" ") if len(words) > 1 else "") if words[0] else None


def _head(path: str, count: int) -> bytes:
    try:
        with open(path, "rb") as file:
            return file.read(count)
    except OSError:
        return b""  # a program that may be executed need not be readable


def _loader(path: str) -> str:
    """The interpreter that an ELF file names (elf(5), PT_INTERP), "" when it names none or is not
    of 64 bits in this byte order."""
    head = _head(path, 1 << 16)
    try:
        if head[:5] != b"\x7fELF\x02":
            return ""
        (offset,) = struct.unpack_from("=Q", head, 32)
        size, count = struct.unpack_from("=HH", head, 54)
        for number in range(count):
            kind, _flags, begin, _virtual, _physical, length = struct.unpack_from(
                "=IIQQQQ", head, offset + number * size
            )
            if kind == _PT_INTERP:
                return os.fsdecode(head[begin : begin + length].partition(b"\0")[0])
    except (struct.error, OverflowError):
        pass  # cut off, or it points beyond any file: nothing can be said of it
    return ""


def _same(first: str, second: str) -> bool:
    try:
        return os.path.samefile(first, second)
    except OSError:
        return False


def _target(path: str) -> str:
    """What the last link that exists on the way from `path` says."""
    for _ in range(LINKS_MAX):
        try:
            target = os.readlink(path)
        except OSError:
            break
        following = os.path.join(os.path.dirname(path), target)
        if not os.path.islink(following):
            return target
        path = following
    return path
