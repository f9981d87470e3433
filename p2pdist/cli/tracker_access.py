"""What a command shows to trackers with access on (p2pdist/client/access.py), by its options and
environment. A token is never an argument, which all users of a host can read.
"""

from __future__ import annotations

import codecs
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

from p2pdist.cli import output
from p2pdist.client.access import Access, failure_of
from p2pdist.files import PIPE_S, read_content
from p2pdist.model.errors import P2PDistError, Unauthenticated, UsageError

VARIABLE = "P2PDIST_TOKEN"
TOKEN_BYTES_MAX = 8192

_FILE = "p2pdist.token_file"

Function = TypeVar("Function", bound=Callable[..., Any])


def token_option(function: Function) -> Function:
    """--token-file, which TrackerAccess reads."""

    def note(ctx: click.Context, param: click.Parameter, value: Path | None) -> None:
        ctx.meta[_FILE] = value

    return click.option(
        "--token-file",
        type=click.Path(path_type=Path, dir_okay=False),
        expose_value=False,
        callback=note,
        help="A token for trackers with --access, which p2pdist token create prints. Also from P2PDIST_TOKEN.",
    )(function)


class TrackerAccess(Access):
    """How the requests of this command to trackers are secured, and what options help where they
    fail. Raises as Access does."""

    @classmethod
    def current(cls) -> TrackerAccess:
        """By --token-file of the verb that runs, else by P2PDIST_TOKEN."""
        ctx = click.get_current_context(silent=True)
        file: Path | None = ctx.meta.get(_FILE) if ctx is not None else None
        return cls(_read(file) if file is not None else os.environ.get(VARIABLE, ""))

    def remedy(self, url: str, error: BaseException) -> str:
        """What to do about a tracker that does not answer."""
        from p2pdist.credentials import exchange

        if hint := exchange.wrong_time(error):
            return hint
        if "certificate" in str(error).lower() and not self._pin:
            return f"Give a token of its fleet with --token-file or in {VARIABLE}: it names the tracker's authority"
        if url.startswith("http://") and self._token:
            return "Start it, or write https:// in --tracker: a token is sent over TLS alone"
        if url.startswith("http://") and ("disconnected" in str(error).lower() or "reset" in str(error).lower()):
            return f"If it runs with --access, write https:// in --tracker and give a token in {VARIABLE}"
        if url.startswith("https://") and "wrong version number" in str(error).lower().replace("_", " "):
            return "Write http:// in --tracker, or start it with --access"
        return "Start it, or name it with --tracker"

    def hinted(self, error: P2PDistError, url: str) -> P2PDistError:
        """A failure that a tracker reports; one for want of a token names the options."""
        return with_hint(error, url)


def _read(file: Path) -> str:
    try:
        data, mode = read_content(file, TOKEN_BYTES_MAX, pipe_s=PIPE_S)
    except OSError as error:
        raise UsageError(
            f"the token file {file} cannot be read: {error.strerror}",
            remedy="Name a file that this user may read with --token-file",
        ) from error
    text = data.removeprefix(codecs.BOM_UTF8).decode("ascii", "replace")
    if len(data) > TOKEN_BYTES_MAX:
        raise UsageError(f"the token file {file} is too large for a token", remedy="p2pdist token create prints one")
    if mode & 0o077:
        output.line(f"warning: the token file {file} may be read by others. chmod 600 it")
    if not text.strip():
        raise UsageError(f"the token file {file} is empty", remedy="p2pdist token create prints a token")
    return text


def with_hint(error: P2PDistError, url: str) -> P2PDistError:
    """A failure that a tracker reports; one for want of a token says how to give it."""
    if isinstance(error, Unauthenticated) and url.startswith("http://"):
        error.remedy = f"Write https:// in --tracker, and give a token with --token-file or in {VARIABLE}"
    return failure_of(url, error)
