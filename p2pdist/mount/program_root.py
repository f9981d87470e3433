"""Making a package the root of the file system for one program, as images of containers expect it.

The program gets a mount namespace of its own, and for a user other than root a user namespace in
which it is root and its files outside are those of the caller (user_namespaces(7)). There an
overlay over the package takes what is written below the root, in memory, until the program ends;
/proc, /sys, /dev and /tmp of the host, its files for the resolution of names, and the paths that
the caller names are mounted in it. It is no sandbox: whatever the caller may do at these paths and
over the network, the program may do as well.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from p2pdist.model.errors import Conflict, P2PDistError, Unavailable, UsageError
from p2pdist.model.manifest import ROOT_VARIABLE, Config
from p2pdist.mount import kernel
from p2pdist.mount.program import Program

HOST_DIRECTORIES = ("/proc", "/sys", "/dev", "/tmp")  # noqa: S108 - the host's own
HOST_FILES = ("/etc/resolv.conf", "/etc/hosts", "/etc/hostname")
PATH_DEFAULT = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
BINDS_MAX = 100
_HOST_PATHS = frozenset({"PATH", "HOME", "LD_LIBRARY_PATH", "LD_PRELOAD", "PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV"})
"""Variables of the caller that lead to files of the host, and mean nothing inside."""


@dataclass(frozen=True, slots=True)
class Bind:
    """A path of the host and where it is seen inside."""

    outside: str
    inside: str


def parse_bind(text: str) -> Bind:
    """`/data` or `/data:/inside`. Raises UsageError."""
    outside, colon, inside = text.partition(":")
    inside = inside if colon else outside
    if (
        not outside.startswith("/")
        or not inside.startswith("/")
        or ".." in inside.split("/")
        or inside.strip("/") == ""
    ):
        raise UsageError(f"{text[:200]!r} is no path to bind", remedy="Write an absolute path, or /outside:/inside")
    if not os.path.lexists(outside):
        raise UsageError(f"{outside} to bind does not exist", remedy="Name a file or directory of this host")
    return Bind(outside, inside)


def inner_program(config: Config, arguments: Sequence[str], *, environ: Mapping[str, str]) -> Program:
    """The program of a package that is the root: its entrypoint, then `arguments`. The environment
    is `environ` without what leads to files of the host, then the package's. Raises UsageError when
    there is nothing to run."""

    def expand(text: str) -> str:
        return text.replace("${" + ROOT_VARIABLE + "}/", "/").replace("${" + ROOT_VARIABLE + "}", "/")

    argv = tuple(expand(word) for word in (*config.entrypoint, *arguments))
    if not argv or not argv[0]:
        raise UsageError("the package names no program to run", remedy="Give one: p2pdist run REF -- PROGRAM ARG...")
    env = {name: value for name, value in environ.items() if name not in _HOST_PATHS}
    env |= {"PATH": PATH_DEFAULT, "HOME": "/root", ROOT_VARIABLE: "/"}
    env |= {name: expand(value) for name, _, value in (entry.partition("=") for entry in config.env)}
    return Program(argv, env, os.path.normpath("/" + expand(config.working_dir).lstrip("/")))


def enter(view: Path, scratch: Path, binds: Sequence[Bind], cwd: str) -> None:
    """Make what is seen at `view` the root of this process, which must have one thread and is about
    to become the program. `scratch` is an empty directory, and mounts on it are of this process
    alone. `cwd` is where the program starts; it is made where it is missing, as container runtimes
    do it. Raises Unavailable where this host does not allow it, Conflict where a path cannot be
    seen inside."""
    umask = os.umask(0o022)  # a program that takes on another user is to get into the root, and below
    try:
        _own_namespaces()
        kernel.mount("none", "/", "none", kernel.MS_REC | kernel.MS_PRIVATE)
        root = _overlay(view, scratch)
        for directory in HOST_DIRECTORIES:
            _bind(Bind(directory, directory), root)
        for file in HOST_FILES:
            if os.path.isfile(file):
                _bind(Bind(os.path.realpath(file), file), root)
        for bind in binds:
            _bind_asked(bind, root)
        os.chroot(root)
        os.chdir("/")
        with suppress(FileExistsError, NotADirectoryError):  # then no program can start there
            os.makedirs(cwd)
    except OSError as error:
        raise Unavailable(
            f"the package cannot be entered here: {error.filename or ''} {error.strerror}",
            remedy="Allow user namespaces (p2pdist doctor says whether they work), or run it without --root",
        ) from error
    finally:
        os.umask(umask)


def _own_namespaces() -> None:
    user, group = os.geteuid(), os.getegid()
    if user == 0:
        kernel.unshare(kernel.CLONE_NEWNS)
        return
    kernel.unshare(kernel.CLONE_NEWUSER | kernel.CLONE_NEWNS)
    Path("/proc/self/setgroups").write_text("deny")
    Path("/proc/self/uid_map").write_text(f"0 {user} 1")
    Path("/proc/self/gid_map").write_text(f"0 {group} 1")


def _overlay(view: Path, scratch: Path) -> Path:
    """An overlay over `view` that can be written to, in memory. Mounts by plain names: a path of
    the caller may hold what options of a mount cannot."""
    inside = os.path.realpath(view)
    kernel.mount("p2pdist", scratch, "tmpfs", kernel.MS_NOSUID | kernel.MS_NODEV, "mode=755")
    names = {name: scratch / name for name in ("lower", "upper", "work", "root")}
    for path in names.values():
        path.mkdir()
    kernel.mount(inside, names["lower"], "none", kernel.MS_BIND | kernel.MS_REC)
    os.chdir(scratch)  # so that no option holds its name
    options = "lowerdir=lower,upperdir=upper,workdir=work"
    options += "" if _is_initial() else ",userxattr"
    kernel.mount("p2pdist", names["root"], "overlay", kernel.MS_NOSUID | kernel.MS_NODEV, options)
    return names["root"]


def _is_initial() -> bool:
    """Whether this process is in the first user namespace."""
    return Path("/proc/self/uid_map").read_text().split() == ["0", "0", "4294967295"]


def _bind(bind: Bind, root: Path) -> None:
    """Mount a path of the host below `root`, making its name there."""
    directory = os.path.isdir(bind.outside)
    target = _target(root, bind.inside, directory)
    kernel.mount(bind.outside, target, "none", kernel.MS_BIND | kernel.MS_REC)


def _bind_asked(bind: Bind, root: Path) -> None:
    """As `_bind`, for a path that the caller names."""
    try:
        _bind(bind, root)
    except OSError as error:
        raise P2PDistError(
            f"{bind.outside} cannot be seen at {bind.inside} inside the package: {error.strerror}",
            remedy="Name another path with --bind /outside:/inside",
        ) from error


def _target(root: Path, inside: str, directory: bool) -> Path:
    """A mount point below `root`, which no link of the package leads out of: one on the way is
    refused, one at the end makes room, unless it is the host's."""
    path = root
    parts = [part for part in inside.split("/") if part]
    for part in parts[:-1]:
        path = path / part
        _make_directory(path, inside)
    target = path / parts[-1]
    try:
        status = target.lstat()
    except FileNotFoundError:
        status = None
    if status is not None and (stat.S_ISLNK(status.st_mode) or (stat.S_ISDIR(status.st_mode) != directory)):
        if stat.S_ISDIR(status.st_mode):
            raise Conflict(f"{inside} is a directory in the package, and a file outside", remedy="Name another path")
        if os.lstat(target.parent).st_dev != os.lstat(root).st_dev:
            raise Conflict(
                f"{inside} cannot be seen inside the package: there the host has a link or a file of that name",
                remedy="Name another path with --bind /outside:/inside, or bind what the link leads to",
            )
        target.unlink()
        status = None
    if status is None:
        if directory:
            target.mkdir()
        else:
            target.touch()
    return target


def _make_directory(path: Path, inside: str) -> None:
    try:
        path.mkdir()
    except FileExistsError:
        if path.is_symlink() or not path.is_dir():
            raise Conflict(
                f"{inside} cannot be seen inside the package: {path.name} there is a link or a file",
                remedy="Name another path with --bind /outside:/inside",
            ) from None
    except OSError as error:
        if error.errno == errno.EACCES:
            raise P2PDistError(
                f"{inside} cannot be made inside the package: {error.strerror}",
                remedy="Name another path with --bind /outside:/inside",
            ) from error
        raise
