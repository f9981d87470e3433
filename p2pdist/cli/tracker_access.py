"""What a command shows to trackers with access on: the bearer of a token, over TLS to a tracker
that shows a certificate of the authority that the token pins.

A token of the fleet reads `p2pt1.PIN.JWT`. PIN is the fingerprint of the fleet's authority, so a
command needs no file of authorities: it asks the tracker for them without believing it, as a host
does that joins (p2pdist/credentials/join.py), and sends the token over nothing but TLS. A token of
an OIDC issuer is a JWT alone; then the authorities of the system count. A token is never an
argument, which all users of a host can read.
"""

from __future__ import annotations

import base64
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click
import msgspec

from p2pdist.cli import output
from p2pdist.files import PIPE_S, read_small
from p2pdist.model.errors import UNDECODABLE, P2PDistError, Unauthenticated, UsageError

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


class TrackerAccess:
    """How the requests of this command to trackers are secured. Raises UsageError for a token that
    is none, Unauthenticated for one that has expired."""

    def __init__(self, text: str = "") -> None:
        self._token = text.strip()
        self._pin = ""
        self._known: dict[str, dict[str, Any]] = {}
        if self._token:
            from p2pdist.credentials.tokens import split_token

            self._pin, jwt = split_token(self._token)
            _check_expiry(jwt)

    @classmethod
    def current(cls) -> TrackerAccess:
        """By --token-file of the verb that runs, else by P2PDIST_TOKEN."""
        ctx = click.get_current_context(silent=True)
        file: Path | None = ctx.meta.get(_FILE) if ctx is not None else None
        return cls(_read(file) if file is not None else os.environ.get(VARIABLE, ""))

    async def request(self, url: str) -> dict[str, Any]:
        """Arguments for a request of aiohttp to the tracker at `url`. Nothing is shown over plain
        HTTP. Raises Refused where the tracker is of another fleet, Unavailable."""
        if not url.startswith("https://"):
            return {}
        if url not in self._known:
            headers = {"Authorization": f"Bearer {self._token}"} if self._token else {}
            self._known[url] = {"headers": headers, **(await self._pinned(url) if self._pin else {})}
        return self._known[url]

    async def _pinned(self, url: str) -> dict[str, Any]:
        from p2pdist.agent.access import exchange
        from p2pdist.credentials.authority import TRACKER_DNS

        stated, _ = await exchange.authorities(url)
        return {
            "ssl": exchange.trusting(exchange.pinned_authority(stated, self._pin)),
            "server_hostname": TRACKER_DNS,
        }

    def remedy(self, url: str, error: BaseException) -> str:
        """What to do about a tracker that does not answer."""
        if "certificate" in str(error).lower() and not self._pin:
            return f"Give a token of its fleet with --token-file or in {VARIABLE}: it names the tracker's authority"
        if url.startswith("http://") and self._token:
            return "Start it, or write https:// in --tracker: a token is sent over TLS alone"
        if url.startswith("http://") and ("disconnected" in str(error).lower() or "reset" in str(error).lower()):
            return f"If it runs with --access, write https:// in --tracker and give a token in {VARIABLE}"
        if url.startswith("https://") and "wrong version number" in str(error).lower().replace("_", " "):
            return "It speaks no TLS: write http:// in --tracker, or start it with --access"
        return "Start it, or name it with --tracker"


def _check_expiry(jwt: str) -> None:
    """Raises Unauthenticated for a token that says that it has expired."""
    body = jwt.split(".")[1]
    try:
        claims = msgspec.json.decode(base64.urlsafe_b64decode(body + "=" * (-len(body) % 4)), type=dict[str, Any])
    except (ValueError, *UNDECODABLE):
        return  # the tracker says what is wrong with it
    until = claims.get("exp")
    if isinstance(until, int | float) and time.time() > until:
        ended = time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(until))
        raise Unauthenticated(f"the token has expired, on {ended}", remedy="p2pdist token create makes another")


def _read(file: Path) -> str:
    try:
        data, mode = read_small(file, TOKEN_BYTES_MAX, pipe_s=PIPE_S)
    except OSError as error:
        raise UsageError(f"the token file {file} cannot be read: {error.strerror}") from error
    text = data.decode("ascii", "replace")
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
    return error
