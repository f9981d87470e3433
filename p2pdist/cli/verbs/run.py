"""`p2pdist run`: the program of a package, from a view that lasts as long as the program."""

from __future__ import annotations

import hashlib
import os
import re
import signal
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

import click

from p2pdist.cli import output
from p2pdist.cli.references.names import offer_files
from p2pdist.cli.services import (
    HOW_HELP,
    check_seen,
    follow_pull,
    layout_option,
    lazy_option,
    lazy_or_pulled,
    own_socket,
    pulled_name,
    unchecked_socket_option,
)
from p2pdist.model.errors import Conflict, P2PDistError, Unavailable, UsageError
from p2pdist.model.manifest import Config
from p2pdist.model.messages import MOUNT_METHODS, MountRequest, MountStatus, PullStatus

if TYPE_CHECKING:
    from p2pdist.agent.api.client import LocalClient
    from p2pdist.cli.desk import Run
    from p2pdist.mount.program import Program
    from p2pdist.mount.program_root import Bind

WORDS_SENT = 8
"""Of the command line the agent hears so many words: they name the program."""

NAME_CHARACTERS_MAX = 250
"""Of a package that is called as its directory is: with "desk/" what a reference may have."""

_NO_NAME = re.compile(r"[^a-z0-9]+")
_OTHER_MOUNTS = (
    "Run it among the host's mounts, let these be shared (mount --make-rshared, Shared=true in job_container.conf), or use "
    "--how unpack where this process sees the agent's store"
)


@click.command("run", context_settings={"allow_interspersed_args": False})
@click.option("--writable", is_flag=True, help="Let the program write to its view; what it writes goes with it.")
@click.option(
    "--how",
    type=click.Choice([*MOUNT_METHODS, "userns"]),
    help=f"{HOW_HELP} userns: to the program only, for squashfs layers.",
)
@click.option("--root", is_flag=True, help="Make the package the root of the file system, as its image expects.")
@click.option(
    "--bind",
    "binds",
    multiple=True,
    metavar="PATH[:INSIDE]",
    help="With --root: show this path of the host to the program as well; may be repeated.",
)
@click.option("--local", is_flag=True, help="Run it from the local layout, without an agent.")
@layout_option
@lazy_option
@click.option(
    "--cache", metavar="NAMESPACE", help="Bring the compile caches NAMESPACE/KEY for this host, see p2pdist cache."
)
@click.option("--cache-dir", type=click.Path(path_type=Path, file_okay=False), help="Where the caches are.")
@unchecked_socket_option
@output.quiet_options
@click.argument("reference", metavar="REF|DIRECTORY")
@click.argument("arguments", metavar="[-- ARG...]", nargs=-1, type=click.UNPROCESSED, shell_complete=offer_files)
def command(
    reference: str,
    arguments: tuple[str, ...],
    *,
    writable: bool,
    how: str | None,
    root: bool,
    binds: tuple[str, ...],
    local: bool,
    layout: Path,
    lazy: bool | None,
    cache: str | None,
    cache_dir: Path | None,
    socket: Path,
) -> int:
    """Run the program of the package REF, with ARG after its entrypoint, and end with its exit
    code. The package is pulled first where it is missing. Options of this command come before REF.

    A DIRECTORY, written as a path, is packed and run at once, and with --local a package runs as it
    was packed: both need no agent.

    In the entrypoint, ARG and the package's environment ${P2PDIST_ROOT} is the directory where the
    package is seen. With --root that is /: programs and interpreters of the package are found as in
    its image, the program is root there with the caller's rights outside, it sees /dev, /proc,
    /sys and /tmp of the host, and what it writes elsewhere goes with it.

    With --cache, variables such as TRITON_CACHE_DIR and NUMBA_CACHE_DIR lead to what hosts like
    this one have compiled before, unless they are set already. The python3 that the program would
    find says for which versions.

    \b
    Example:
      p2pdist run ./app -- python3 train.py
      p2pdist run team/trainer:v3 -- --epochs 3
      p2pdist run --root --bind /data team/image:v3
    """
    from p2pdist.cli.desk import is_directory, run_from_layout

    # From here on the view must be unmounted again, also when a signal ends this process.
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) != signal.SIG_IGN:  # as under nohup(1)
            signal.signal(number, _leave)
    arguments = arguments[1:] if arguments[:1] == ("--",) else arguments
    run = _checked(arguments, writable, how, root, binds)
    if cache and (root or local or is_directory(reference)):
        raise UsageError("--cache is for packages that an agent shows, without --root", remedy="Leave one of them out")
    if is_directory(reference):
        reference, local = _pack_directory(Path(reference), layout), True
    if local:
        return run_from_layout(reference, layout, run)
    from p2pdist.agent.api.client import LocalClient

    client = LocalClient(own_socket(click.get_current_context(), socket))
    caches = _Caches(cache, cache_dir, client) if cache else None
    return _run_from_agent(reference, run, client, caches, lazy=lazy)


def _run_from_agent(reference: str, run: Run, client: LocalClient, caches: _Caches | None, *, lazy: bool | None) -> int:
    """The exit code of the program of a package that the agent shows."""
    # A word need not be text, and only letters of it count.
    words = tuple(os.fsencode(word).decode(errors="replace") for word in run.arguments[:WORDS_SENT])
    request = MountRequest(reference, "", run.writable, run.how or "", until_exit=True, command=words)
    try:
        shown = lazy_or_pulled(client, request, lazy=lazy, quiet=False)
    except Unavailable as error:
        if not os.path.lexists(client.socket_path):
            error.remedy += "; p2pdist run --local runs without one what was packed here"
        raise
    if not isinstance(shown, PullStatus):
        try:
            return _Run(reference, run, client, caches).run_in(shown)
        except _NotHere as failure:
            output.line(f"eager: {failure.error.what}")
            shown = follow_pull(client, reference, quiet=False)
    return _Run(pulled_name(reference, shown), run, client, caches).run()


def _checked(arguments: tuple[str, ...], writable: bool, how: str | None, root: bool, binds: tuple[str, ...]) -> Run:
    """How the program is to be run. Raises UsageError for options that do not go together."""
    from p2pdist.cli.desk import Run

    if root and writable:
        raise UsageError("with --root the package can be written to anyway", remedy="Leave out --writable")
    return Run(arguments, writable, how, root, _parsed(binds, root=root) if binds else ())


def _parsed(binds: tuple[str, ...], *, root: bool) -> tuple[Bind, ...]:
    from p2pdist.mount.program_root import BINDS_MAX, parse_bind

    if not root or len(binds) > BINDS_MAX:
        raise UsageError(f"--bind is for --root, up to {BINDS_MAX} times", remedy="Give --root, too")
    return tuple(map(parse_bind, binds))


def _pack_directory(directory: Path, layout: Path) -> str:
    """Pack a directory, as a tree unless its project file says otherwise; returns its reference.
    Without a name in the project file it is that of the directory. Raises what packing raises."""
    from p2pdist.cli.verbs.pack import Choices, pack_source, show_dropped
    from p2pdist.package.source.project import find_project

    output.silence_event_loop()
    file = find_project(directory, None)
    given = Choices(
        tag=None if file and file.project.reference else f"desk/{_package_name(directory.resolve().name)}:latest",
        form=None if file and file.project.format else "tree",
    )
    packed, notes = pack_source(directory, given, layout, None, quiet=False)
    show_dropped(packed)
    for note in notes:
        output.note(note)
    output.note(f"packed as {packed.reference}")
    return str(packed.reference)


def _package_name(called: str) -> str:
    """What the package of a directory is called. Of a longer name the hash is its end: directories
    of runs often differ at the end alone."""
    name = _NO_NAME.sub("-", called.lower()).strip("-") or "package"
    if len(name) <= NAME_CHARACTERS_MAX:
        return name
    end = hashlib.sha256(os.fsencode(called)).hexdigest()[:16]
    return f"{name[: NAME_CHARACTERS_MAX - len(end) - 1].strip('-')}-{end}"


def _leave(number: int, _frame: FrameType | None) -> None:
    sys.exit(128 + number)


@dataclass(frozen=True, slots=True)
class _Caches:
    """The compile caches of a program."""

    namespace: str
    directory: Path | None
    client: LocalClient

    def restored(self, program: Program) -> Program:
        """The program with variables that lead to its caches. A cache that cannot be had is
        reported, and costs time alone."""
        from p2pdist.cli.verbs.cache.directory import default_directory, make_directory, restore
        from p2pdist.cli.verbs.cache.key import cache_key
        from p2pdist.mount.executable import Search

        try:
            python = Search(program.env, program.cwd, program.root).executable(("python3",))
            key = cache_key(self.namespace, python.path, *python.argv[1:])
            directory = (self.directory or default_directory(key)).absolute()
            make_directory(directory)
        except UsageError:
            raise
        except P2PDistError as error:
            output.line(f"p2pdist: no caches: {error}")
            return program
        try:
            if not restore(key, directory, self.client).found:
                output.line(f"there is no cache {key.reference} yet")
        except P2PDistError as error:
            output.line(f"p2pdist: the cache {key.reference} is not here: {error}")
        return replace(program, env={**key.variables(directory), **program.env})


class _Run:
    """Shows one package by a mount method and runs its program."""

    def __init__(self, name: str, asked: Run, client: LocalClient, caches: _Caches | None) -> None:
        self._name, self._asked, self._client, self._caches = name, asked, client, caches
        self._writable, self._how = asked.writable, asked.how

    def run(self) -> int:
        """The program's exit code. Without root the program is shown the package in a namespace of
        its own where that works."""
        from p2pdist.mount.squashfs import missing

        reason = missing()
        if self._how or not reason:
            try:
                return self._show_and_run(self._how or "images")
            except _NotHere as failure:
                if self._how:
                    raise failure.error from None
                reason = failure.error.what
            return self._show_and_run("unpack", reason)
        return self._show_and_run("", f"a user namespace cannot be used: {reason}")

    def _show_and_run(self, how: str, reason: str = "") -> int:
        return self.run_in(
            self._client.mount(MountRequest(self._name, "", self._writable, how, until_exit=True)), reason
        )

    def run_in(self, shown: MountStatus, reason: str = "") -> int:
        """The program's exit code, from a view that is unmounted afterwards."""
        try:
            if not shown.image_bytes:  # else nothing is there yet that could be seen
                check_seen(shown, _OTHER_MOUNTS)
            if shown.how == "images":
                return self._run_inside(shown)
            note = f" ({reason})" if reason and shown.how == "unpack" else ""
            output.note(f"{shown.why}{note}")
            return self._run_shown(shown)
        finally:
            self._unmount(shown)

    def _run_shown(self, shown: MountStatus) -> int:
        """The program inherits a hold on its view, and so do its children: whatever ends them, the
        agent sees when the last one is gone."""
        from p2pdist.cli.desk import start
        from p2pdist.mount.program import hold

        view = Path(shown.path)
        held = hold(view) if shown.pid else None
        try:
            return start(self._program(shown, view), view, self._asked, keep=() if held is None else (held,))
        finally:
            if held is not None:
                os.close(held)

    def _run_inside(self, shown: MountStatus) -> int:
        from p2pdist.mount.squashfs import RemoteImage
        from p2pdist.mount.userns import run_inside

        try:
            sizes = shown.image_bytes
            remote = [RemoteImage(*image) for image in zip(shown.images, sizes, strict=True)] if sizes else []
            return run_inside(
                remote or [Path(image) for image in shown.images],
                lambda root: self._program(shown, root),
                writable=self._writable,
                announce=output.note,
                agent=self._client.socket_path.absolute(),
                entered=self._asked.binds if self._asked.root else None,
            )
        except Unavailable as error:
            raise _NotHere(error) from error

    def _program(self, shown: MountStatus, root: Path) -> Program:
        found = self._asked.program(Config(shown.entrypoint, shown.env, shown.working_dir), root)
        return found if self._caches is None else self._caches.restored(found)

    def _unmount(self, shown: MountStatus) -> None:
        """Unmount the view. A view that stays is reported and is no failure: the exit code is the
        program's."""
        try:
            self._take_away(shown)
        except Unavailable as error:
            until = " until the agent is back" if shown.pid else ""
            output.line(f"p2pdist: the package stays shown{until}: {error}")
        except P2PDistError as error:
            output.line(f"p2pdist: the package stays shown: {error}")

    def _take_away(self, shown: MountStatus) -> None:
        try:
            self._client.unmount(shown.path)
        except Conflict as conflict:
            left = f"p2pdist: {conflict.what}: the program left processes behind"
            if shown.pid:
                output.line(f"{left}; the package stays shown until they end")
                return
            # An agent in a process namespace of its own cannot see when they end.
            output.line(f"{left}, which lose sight of the package")
            self._client.unmount(shown.path, force=True)


class _NotHere(Exception):
    """A namespace of one's own does not work on this host."""

    def __init__(self, error: P2PDistError) -> None:
        super().__init__(str(error))
        self.error = error
