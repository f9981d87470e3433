"""What verbs talk to, and the options that name it: the agent of this host, a tracker, the local
layout and an origin."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import AsyncIterator, Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from p2pdist.cli import output
from p2pdist.model.errors import (
    Conflict,
    NotFound,
    P2PDistError,
    Refused,
    UsageError,
)
from p2pdist.model.manifest import parse_reference
from p2pdist.model.messages import MountRequest, MountStatus, Priority, PullRequest, PullStatus

if TYPE_CHECKING:
    import threading

    from p2pdist.agent.api.client import LocalClient
    from p2pdist.client.tracker import Tracker
    from p2pdist.origin.contract import Origin
    from p2pdist.origin.layout import LocalLayout

BLOB_PREFIX = "blob:sha256-"
"""How the references of single files begin."""

TORRENT_PREFIX = "torrent:"
"""How references to torrents begin, which p2pdist made of packages and files: people did not."""

SCHEME_END = "://"
"""Stands in references to images and to repositories of hubs, and in no other."""

TAGS_NAMED_MAX = 10
HINT = "hint"
"""The detail of a failure whose remedy has a hint."""

GOES_ON = "the agent goes on to pull it; p2pdist status says how far it is"
"""Of a pull whose command was interrupted."""

HOW_HELP = (
    "Use this mount method instead of the best one that works. overlay: the best one that mounts. unpack: the best one that "
    "does not. For packages with trees also erofs, reflink, hardlink and copy."
)

Function = TypeVar("Function", bound=Callable[..., Any])


def socket_option(function: Function) -> Function:
    """--socket, of the agent, which the command uses."""
    return _socket_option(function, lambda ctx, param, socket: own_socket(ctx, socket))


def unchecked_socket_option(function: Function) -> Function:
    """--socket of a command that may need no agent, and calls `own_socket` where it does."""
    return _socket_option(function, None)


def _socket_option(
    function: Function, callback: Callable[[click.Context, click.Parameter, Path], Path] | None
) -> Function:
    return click.option(
        "--socket",
        # The call itself says whether this user may use it, and which group may.
        type=click.Path(path_type=Path, readable=False),
        default=Path("/run/p2pdist/agent.sock"),
        show_default=True,
        callback=callback,
        help="The agent's socket. Also from P2PDIST_SOCKET.",
    )(function)


def own_socket(ctx: click.Context, socket: Path) -> Path:
    """The socket that the option names. Root runs what an agent shows. A socket that its
    environment names, which may be that of another user (sudo -E), must lie where no other user can
    put another one in its place. Raises Refused."""
    source = ctx.get_parameter_source("socket")
    named = source in (click.core.ParameterSource.ENVIRONMENT, click.core.ParameterSource.DEFAULT_MAP)
    if os.geteuid() == 0 and named and os.path.lexists(socket):
        from p2pdist.mount.scratch import is_safe

        if not is_safe(socket.absolute().parent):
            raise Refused(
                f"another user can change the socket {socket}, which the environment or a file names",
                remedy=f"Give --socket {socket} to use it all the same",
            )
    return socket


def follow_pull(
    client: LocalClient,
    reference: str,
    *,
    quiet: bool,
    priority: Priority = "start",
    lazy: bool = False,
    beside: output.Progress | None = None,
    stopped: threading.Event | None = None,
) -> PullStatus:
    """Pull a package and show the progress by source, `beside` that of others. A reference without
    a tag means `latest`. `lazy`: not where its policy has it shown lazily. Raises the failure that
    the agent reports, and KeyboardInterrupt soon after `stopped` is set: no signal reaches another
    thread than the main one."""
    name, noted, begun = _canonical(reference), "", False

    with output.Progress(quiet=quiet, beside=beside) as progress:

        def show(status: PullStatus) -> None:
            nonlocal noted, begun
            begun = True
            if stopped is not None and stopped.is_set():
                raise KeyboardInterrupt
            if status.note and status.note != noted and not quiet:
                output.note(f"{name}: {status.note}")
            noted = status.note
            progress(name, status.bytes_done, status.bytes_total)
            sources = (
                ("peers", status.bytes_peers),
                ("the origin", status.bytes_origin),
                ("its registry", status.bytes_upstream),
            )
            for source, count in sources:
                if count:  # told apart by the name, of which there may be several
                    progress(f"{name} from {source}", count, status.bytes_total - status.bytes_cached)

        try:
            status = client.pull(PullRequest(package=name, priority=priority, lazy=lazy), show)
        except KeyboardInterrupt:
            if begun:
                output.note(f"{name}: {GOES_ON}")
            raise
    if status.tag_age_s is not None:
        told = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(time.time() - status.tag_age_s))
        output.line(f"{name}: as of {told}, no tracker answers; the tag may have moved since")
    if status.warning:
        output.line(f"{name}: {status.warning}. Run p2pdist doctor on the hosts that are named")
    return status


def _canonical(reference: str) -> str:
    """A reference in its full form. Raises UsageError."""
    if SCHEME_END not in reference:  # as most, and a start waits for no module that it does not need
        return str(parse_reference(reference))
    from p2pdist.model.image import canonical_reference

    return canonical_reference(reference)


def check_seen(view: MountStatus, remedy: str) -> None:
    """Raises Conflict when this process does not see the view that the agent mounted."""
    from p2pdist.mount.sight import differs

    if view.how == "images":
        hidden = next((image for image in view.images if not os.path.lexists(image)), "")
    else:
        hidden = view.path if differs(view.path, (view.device, view.inode)) else ""
    if hidden:
        raise Conflict(
            f"the agent shows the package at {hidden}, where this process does not see it: it has mounts or a root of its own "
            f"(a container, chroot, PrivateTmp of systemd, job_container/tmpfs of Slurm)",
            remedy=remedy,
        )


def pulled_name(reference: str, pulled: PullStatus) -> str:
    """The pulled version by its digest: it stays the same when the tag moves, and needs no
    tracker."""
    if SCHEME_END in reference:
        from p2pdist.model.digest import Digest
        from p2pdist.model.image import ImageReference, is_image, parse_image

        if is_image(reference):
            return str(ImageReference(parse_image(reference).name, digest=Digest(pulled.digest)))
    return f"{parse_reference(reference).name}@{pulled.digest}"


LAZY_HELP = (
    "Show the package at once and fetch contents when they are read, or pull "
    "it first. Where --lazy is not possible the package is pulled first, and the reason printed [default: as its policy "
    "says, else --eager]."
)


def lazy_option(function: Function) -> Function:
    """--lazy and --eager."""
    return click.option("--lazy/--eager", default=None, help=LAZY_HELP)(function)


def lazy_or_pulled(
    client: LocalClient, request: MountRequest, *, lazy: bool | None, quiet: bool
) -> MountStatus | PullStatus:
    """Have the agent show a package lazily, where `lazy` or, without it, the policy of the package
    says so and it is possible; else have it pulled. Raises what mounting and pulling raise."""
    shown = mount_lazily(client, request) if lazy else None
    if shown is not None:
        return shown
    pulled = follow_pull(client, request.package, quiet=quiet, lazy=lazy is None)
    if not pulled.lazy:
        return pulled
    return mount_lazily(client, request) or follow_pull(client, request.package, quiet=quiet)


def mount_lazily(client: LocalClient, request: MountRequest) -> MountStatus | None:
    """Have the agent show a package whose contents come later; None, with the reason printed, where
    it has to be pulled first. Raises what mounting raises."""
    from msgspec.structs import replace

    try:
        shown = client.mount(replace(request, lazy=True))
    except Conflict as error:
        if "eager" not in error.details:
            raise
        output.line(f"eager: {error.details['eager']}")
        return None
    if shown.lazy is None:
        output.line("eager: all of the package is here")
    return shown


def tracker_option(function: Function) -> Function:
    """--tracker and --token-file."""
    from p2pdist.cli.tracker_access import token_option

    return click.option(
        "--tracker",
        default="http://127.0.0.1:7070",
        show_default=True,
        metavar="URL[,URL]",
        help="Trackers, tried in turn. Also from P2PDIST_TRACKER.",
    )(token_option(function))


def filled(ctx: click.Context, param: click.Parameter, value: Any) -> Any:
    """The value of an option, which must not be empty where it is given, as a script with an unset
    variable gives it. Raises UsageError."""
    if value == "" or (isinstance(value, tuple) and "" in value):
        raise UsageError(f"{param.opts[0]} is empty", remedy=f"Write {param.opts[0]} {param.metavar}, or leave it out")
    return value


def hosts_options(function: Function) -> Function:
    """--host and --selector: hosts by name, or by what is known of them. An empty one does not mean
    all hosts."""
    function = click.option(
        "--selector",
        metavar="KEY=VALUE,...",
        callback=filled,
        help="Hosts by zone, rack, host and site, such as zone=a,rack=r1.",
    )(function)
    return click.option(
        "--host", "hosts", multiple=True, metavar="HOST", callback=filled, help="A host by name; may be repeated."
    )(function)


def tracker_client(urls: str) -> Tracker:
    """The trackers of --tracker, with the token of the verb that runs. Raises UsageError where none
    is named."""
    from p2pdist.cli.tracker_access import TrackerAccess
    from p2pdist.client.tracker import Tracker

    if not any(url.strip() for url in urls.split(",")):
        raise UsageError("--tracker names no tracker", remedy="Write http://host:7070")
    return Tracker(urls, access=TrackerAccess.current())


def note_unanswered(client: Tracker) -> None:
    """Say which trackers are not in the last answer for the whole fleet."""
    from p2pdist.cli import output

    if client.unanswered:
        output.line(f"p2pdist: no answer from the tracker {', '.join(client.unanswered)}: what it knows is left out")


def tracker_named(ctx: click.Context, tracker: str) -> str:
    """The trackers that the command line names, before the verb of this command or behind it."""
    line = click.core.ParameterSource.COMMANDLINE
    before = ctx.parent if ctx.get_parameter_source("tracker") is not line else None
    if before is not None and before.get_parameter_source("tracker") is line:
        return str(before.params["tracker"])
    return tracker


def default_layout() -> Path:
    """The layout that P2PDIST_LAYOUT names for all verbs, also those without --layout, else the one
    in the user's data directory (XDG Base Directory specification). Root, which may have another
    user's environment (sudo -E), does not take that user's. Raises UsageError for a user without a
    home directory."""
    if named := os.environ.get("P2PDIST_LAYOUT"):
        return Path(named)
    data = os.environ.get("XDG_DATA_HOME", "")
    try:
        directory = Path(data) if Path(data).is_absolute() else Path.home() / ".local/share"
        if os.geteuid() == 0 and not _of_root(directory):
            directory = Path("~root/.local/share").expanduser()
        return directory / "p2pdist/layout"
    except RuntimeError as error:  # neither HOME nor an entry in passwd(5)
        raise UsageError("this user has no home directory for the layout", remedy="Name one with --layout") from error


def _of_root(directory: Path) -> bool:
    """Whether a directory, or the nearest one above that exists, belongs to root."""
    for path in (directory, *directory.parents):
        try:
            return path.stat().st_uid == 0
        except OSError:
            continue
    return True


def layout_option(function: Function) -> Function:
    """--layout."""
    return click.option(
        "--layout",
        type=click.Path(path_type=Path, file_okay=False),
        default=default_layout,
        show_default="p2pdist/layout in the user's data directory",
        help="The directory where packed packages are kept (an OCI image layout).",
    )(function)


def origin_option(function: Function) -> Function:
    """--origin."""
    return click.option(
        "--origin",
        metavar="URL",
        help="Central storage: file:///dir, s3://bucket/prefix, gs://, az://, oci:// or http(s)://. Also from P2PDIST_ORIGIN.",
    )(function)


def encrypt_option(*, refused: str = "") -> Callable[[Function], Function]:
    """--encrypt-to, for a verb that pushes. An empty value, as a variable without one gives,
    is an error, and no push in the clear. `refused` says why this verb cannot encrypt, where it
    cannot; then it has the option to refuse it, wherever it is set."""

    def checked(ctx: click.Context, param: click.Parameter, value: str | None) -> str | None:
        variables = [param.envvar] if isinstance(param.envvar, str) else param.envvar or ()
        if value is None and not any(name in os.environ for name in variables):
            return None
        if not (value or "").strip():
            raise UsageError(
                "the recipient to encrypt to is empty",
                remedy="Give a recipient that p2pdist key list prints, or unset P2PDIST_ENCRYPT_TO",
            )
        if refused:
            raise UsageError(refused, remedy="Unset --encrypt-to and P2PDIST_ENCRYPT_TO to push it in the clear")
        return (value or "").strip()

    return click.option(
        "--encrypt-to",
        metavar="RECIPIENT",
        hidden=bool(refused),
        expose_value=not refused,
        callback=checked,
        help="Encrypt the package for this recipient of age, which p2pdist key create prints. "
        "Also from P2PDIST_ENCRYPT_TO.",
    )


def elsewhere_options(what: str) -> Callable[[Function], Function]:
    """--at-origin and --layout, which direct a verb to an origin or a layout instead of the agent's
    store. They count on the command line only: a variable or file that names a layout for other
    verbs must not redirect this verb."""

    def named(ctx: click.Context, param: click.Parameter, value: Any) -> Any:
        given = ctx.get_parameter_source(param.name or "") is click.core.ParameterSource.COMMANDLINE
        return value if given else (False if isinstance(value, bool) else None)

    def decorate(function: Function) -> Function:
        layout = click.option(
            "--layout",
            type=click.Path(path_type=Path, file_okay=False),
            callback=named,
            help=f"{what} the local layout in this directory instead.",
        )
        at_origin = click.option(
            "--at-origin", is_flag=True, callback=named, help=f"{what} central storage instead; needs --origin."
        )
        return at_origin(layout(function))

    return decorate


def require_no_origin() -> None:
    """Raises UsageError where the command line names an origin, for a verb that would not look at
    it."""
    if click.get_current_context().get_parameter_source("origin") is click.core.ParameterSource.COMMANDLINE:
        raise UsageError(
            "--origin names central storage, and nothing there is meant without --at-origin",
            remedy="Add --at-origin, or leave --origin out",
        )


@contextlib.asynccontextmanager
async def opened_elsewhere(at_origin: bool, origin: str | None, layout: Path | None) -> AsyncIterator[Origin]:
    """The repository that elsewhere_options name. Raises UsageError when they name two."""
    if at_origin and layout:
        raise UsageError("--at-origin and --layout name two places", remedy="Give one of them")
    if layout:
        async with opened_layout(layout) as local:
            yield local
    else:
        async with required_origin(origin) as central:
            yield central


def asks_origin_first() -> bool:
    """Whether the verb that runs was given --origin on the command line: then it asks this origin
    before the local layout. An origin that a variable or file names for all verbs comes after the
    layout, where a package was packed a moment ago."""
    source = click.get_current_context().get_parameter_source("origin")
    return source is click.core.ParameterSource.COMMANDLINE


@contextlib.asynccontextmanager
async def opened_layout(directory: Path) -> AsyncIterator[LocalLayout]:
    """The local layout in `directory`, which need not exist yet."""
    from p2pdist.origin.layout import LocalLayout

    try:
        directory = directory.absolute()
    except FileNotFoundError as error:
        raise NotFound(
            f"cannot look for the layout {directory}: the working directory was removed",
            remedy="Name an absolute path with --layout",
        ) from error
    layout = LocalLayout(directory)
    try:
        yield layout
    except NotFound as error:
        await _hint(error, layout)
        raise
    finally:
        await layout.close()


async def _hint(error: NotFound, repository: Origin) -> None:
    """Add to a failure to find a reference what there is in a repository."""
    if "reference" in error.details:
        with contextlib.suppress(P2PDistError):
            add_hint(error, [name for name, _ in await repository.tags()])


def hint(reference: str, names: Iterable[str], place: str = "there") -> str:
    """What may have been meant by a reference that is not there: the tags that its name has in
    `names`, which are those of `place`, else the most similar name; empty where none is similar."""
    import difflib

    known = {name for name in names if "@" not in name and not name.startswith((BLOB_PREFIX, TORRENT_PREFIX))}
    name, _, _ = (
        reference.partition("@")[0].rpartition(":") if "@" not in reference else (reference.partition("@")[0], "", "")
    )
    tags = sorted(tag for one, _, tag in (each.rpartition(":") for each in known) if one == name)
    if tags:
        more = f" and {len(tags) - TAGS_NAMED_MAX} more" if len(tags) > TAGS_NAMED_MAX else ""
        return f"Tags of {name} {place}: {', '.join(tags[-TAGS_NAMED_MAX:])}{more}"
    near = difflib.get_close_matches(reference, known, n=1, cutoff=0.7)
    return f"Did you mean {near[0]}?" if near else ""


def add_hint(error: NotFound, names: Iterable[str], place: str = "there") -> None:
    """Let the remedy of a failure to find the reference in its details begin with what there is, in
    `place`. The first hint stays the only one."""
    reference = error.details.get("reference")
    if not isinstance(reference, str) or HINT in error.details or "tags" in error.details:
        return
    if said := hint(reference, names, place):
        error.details[HINT] = said
        error.remedy = f"{said} {error.remedy}" if said.endswith("?") else f"{said}. {error.remedy}"


@contextlib.asynccontextmanager
async def opened_origin(url: str | None) -> AsyncIterator[Origin | None]:
    """The origin at `url`, None without a URL."""
    if not url:
        yield None
        return
    from p2pdist.origin.drivers import open_origin

    origin = open_origin(url)
    try:
        yield origin
    except NotFound as error:
        await _hint(error, origin)
        raise
    finally:
        await origin.close()


@contextlib.asynccontextmanager
async def required_origin(url: str | None) -> AsyncIterator[Origin]:
    """The origin at `url`; raises UsageError without a URL."""
    async with opened_origin(url) as origin:
        if origin is None:
            raise UsageError("no origin is named", remedy="Give --origin URL or set P2PDIST_ORIGIN")
        yield origin
