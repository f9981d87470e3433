"""Running a service in the foreground: logging, listening, and a clean stop on SIGTERM or Ctrl-C."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import resource
import signal
import sys
from pathlib import Path

from aiohttp import web

from p2pdist.model.errors import Conflict, P2PDistError, UsageError
from p2pdist.transfer.client import parse_address

SHUTDOWN_S = 2.0


def set_up_logging(level: str) -> None:
    """Log to standard error, one line an event."""
    logging.basicConfig(
        level=getattr(logging, level.upper()),
        stream=sys.stderr,
        format="%(asctime)s level=%(levelname)s logger=%(name)s %(message)s",
    )


def raise_file_limit() -> None:
    """Streams and blobs are open files: take as many as this process may have."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def listen_address(text: str) -> tuple[str, int]:
    """Host and port of --listen. Raises UsageError."""
    try:
        return parse_address(text)
    except ValueError as error:
        raise UsageError(str(error), remedy="Write --listen 0.0.0.0:7071") from error


async def listen(app: web.Application, address: tuple[str, int]) -> web.AppRunner:
    """Serve `app` over TCP. Raises Conflict when the address is taken."""
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=SHUTDOWN_S, handler_cancellation=True)
    await runner.setup()
    try:
        await web.TCPSite(runner, *address, backlog=1024, reuse_address=True).start()
    except OSError as error:
        await runner.cleanup()
        raise _taken(f"{address[0]}:{address[1]}", error) from error
    return runner


async def listen_unix(app: web.Application, path: Path) -> web.AppRunner:
    """Serve `app` on a Unix socket that the owner and the group may use. A socket that nobody answers on is replaced."""
    if len(os.fsencode(path)) > 107:
        raise UsageError(f"the socket path {path} is longer than 107 bytes", remedy="Give a shorter --socket")
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=SHUTDOWN_S, handler_cancellation=True)
    await runner.setup()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.is_socket():
            await _replace_stale(path)
        await web.UnixSite(runner, str(path)).start()
        path.chmod(0o660)
    except OSError as error:
        await runner.cleanup()
        raise _taken(str(path), error) from error
    return runner


async def _replace_stale(path: Path) -> None:
    try:
        _, writer = await asyncio.open_unix_connection(path)
    except OSError:
        path.unlink(missing_ok=True)
        return
    writer.close()
    raise Conflict(f"another agent answers on {path}", remedy="Stop it, or give this one another --socket")


def _taken(where: str, error: OSError) -> P2PDistError:
    return Conflict(
        f"cannot listen on {where}: {error.strerror or error}",
        remedy="Choose another address with --listen or --socket",
    )


async def until_stopped() -> None:
    """Return when the process is told to stop."""
    stopped = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stopped.set)
    await stopped.wait()
