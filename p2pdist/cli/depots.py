"""Where the engineer's verbs look for packages: the local layout and an origin, and the options that name them."""

from __future__ import annotations

import contextlib
import os
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from p2pdist.model.errors import UsageError

if TYPE_CHECKING:
    from p2pdist.origin.layout import LocalLayout
    from p2pdist.origin.origin import Origin

Function = TypeVar("Function", bound=Callable[..., Any])


def default_layout() -> Path:
    """The layout in the user's data directory (XDG Base Directory specification)."""
    data = os.environ.get("XDG_DATA_HOME", "")
    return (Path(data) if Path(data).is_absolute() else Path.home() / ".local/share") / "p2pdist/layout"


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


@contextlib.asynccontextmanager
async def opened_layout(directory: Path) -> AsyncIterator[LocalLayout]:
    """The local layout in `directory`, which need not exist yet."""
    from p2pdist.origin.layout import LocalLayout

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
