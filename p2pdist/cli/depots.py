"""Where the engineer's verbs look for packages: the local layout and an origin, and the options
that name them."""

from __future__ import annotations

import contextlib
import os
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from p2pdist.model.errors import NotFound, UsageError

if TYPE_CHECKING:
    from p2pdist.origin.layout import LocalLayout
    from p2pdist.origin.origin import Origin

Function = TypeVar("Function", bound=Callable[..., Any])


def default_layout() -> Path:
    """The layout in the user's data directory (XDG Base Directory specification). Raises UsageError
    for a user who has none."""
    data = os.environ.get("XDG_DATA_HOME", "")
    try:
        return (Path(data) if Path(data).is_absolute() else Path.home() / ".local/share") / "p2pdist/layout"
    except RuntimeError as error:  # neither HOME nor an entry in passwd(5)
        raise UsageError("this user has no home directory for the layout", remedy="Name one with --layout") from error


def layout_option(function: Function) -> Function:
    return click.option(
        "--layout",
        type=click.Path(path_type=Path, file_okay=False),
        default=default_layout,
        show_default="p2pdist/layout in the user's data directory",
        help="The directory where packed packages are kept (an OCI image layout).",
    )(function)


def origin_option(function: Function) -> Function:
    return click.option(
        "--origin",
        metavar="URL",
        help="Central storage: file:///dir, s3://bucket/prefix, gs://, az:// or http(s)://. Also from P2PDIST_ORIGIN.",
    )(function)


def elsewhere_options(what: str) -> Callable[[Function], Function]:
    """The options of a verb for the agent's store that send it to an origin (`at_origin`) or a
    layout (`layout`) instead. They count on the command line only: a variable or file that names a
    layout for other verbs must not change what this verb is about."""

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


@contextlib.asynccontextmanager
async def opened_elsewhere(at_origin: bool, origin: str | None, layout: Path | None) -> AsyncIterator[Origin]:
    """What elsewhere_options name. Raises UsageError when that is both."""
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
    finally:
        await layout.close()


@contextlib.asynccontextmanager
async def opened_origin(url: str | None) -> AsyncIterator[Origin | None]:
    """The origin at `url`, None without a URL."""
    if not url:
        yield None
        return
    from p2pdist.origin.origin import open_origin

    origin = open_origin(url)
    try:
        yield origin
    finally:
        await origin.close()


@contextlib.asynccontextmanager
async def required_origin(url: str | None) -> AsyncIterator[Origin]:
    """The origin at `url`; raises UsageError without a URL."""
    async with opened_origin(url) as origin:
        if origin is None:
            raise UsageError("no origin is named", remedy="Give --origin URL or set P2PDIST_ORIGIN")
        yield origin
