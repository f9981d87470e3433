"""Running a service in the foreground: listening, and a clean stop on SIGTERM or Ctrl-C."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import os
import resource
import signal
import ssl
import sys
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import uvloop
from aiohttp import web

from p2pdist.agent.links import DiscoverySettings
from p2pdist.model.errors import Conflict, P2PDistError, Refused, UsageError
from p2pdist.transfer.stream.connect import parse_address

SHUTDOWN_S = 2.0
COLLECT_AFTER = (50_000, 20, 20)
"""Thresholds of Python's cycle collector. One plan for 10,000 hosts makes some 100,000 objects, and
a filled store a row for each file, none of them in cycles: with the default thresholds looking
through all of memory again and again took longer than the plan, and a tenth of the filling."""

THREADS_S = 3.0
IDLE_S = 75.0
"""A connection that sends no whole request for so long is closed, also before its first."""


def run(service: Coroutine[Any, Any, None]) -> None:
    """Run a service to its clean stop and end the process with 0; raises what the service raises.

    A thread that waits for a disk or for storage which does not answer cannot be ended. Everything
    worth keeping is on disk by then, so after THREADS_S the process goes without it instead of
    staying as long as the other side pleases.
    """

    async def whole() -> None:
        await service
        loop = asyncio.get_running_loop()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(loop.shutdown_default_executor(), THREADS_S)
        logging.shutdown()
        sys.stdout.flush()
        os._exit(0)

    gc.set_threshold(*COLLECT_AFTER)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(whole())


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


def discovery_settings(
    address: tuple[str, int], network_id: str, interfaces: tuple[str, ...]
) -> DiscoverySettings | None:
    """How to discover others for who listens on `address`; None on loopback, where nobody else is,
    unless interfaces are named."""
    host, _ = address
    if not interfaces and (host in {"localhost", "::1"} or host.startswith("127.")):
        logging.getLogger("p2pdist").info("no discovery: %s is on this machine only", host)
        return None
    return DiscoverySettings(address, network_id, interfaces)


async def listen(app: web.Application, address: tuple[str, int], *, tls: ssl.SSLContext | None = None) -> web.AppRunner:
    """Serve `app` over TCP, with `tls` over TLS only; `::` stands for all addresses of both
    families. Raises Conflict when the address is taken."""
    runner = _runner(app)
    await runner.setup()
    host, port = address
    try:
        for each in ("::", "0.0.0.0") if host == "::" else (host,):
            await web.TCPSite(runner, each, port, backlog=1024, reuse_address=True, ssl_context=tls).start()
    except (OSError, UnicodeError) as error:
        await runner.cleanup()
        raise _taken(address_text(host, port), error, "--listen") from error
    return runner


def address_text(host: str, port: int) -> str:
    """host:port, with an IPv6 address in brackets."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


async def stop_listening(runners: list[web.AppRunner]) -> None:
    """Take no new connections; those that are open go on until `close`."""
    for runner in runners:
        for site in list(runner.sites):
            await site.stop()


async def close(runners: list[web.AppRunner]) -> None:
    """End what is still being answered, within about SHUTDOWN_S."""
    await asyncio.gather(*(runner.cleanup() for runner in runners))


def _runner(app: web.Application) -> web.AppRunner:
    return web.AppRunner(
        app, access_log=None, shutdown_timeout=SHUTDOWN_S, keepalive_timeout=IDLE_S, handler_cancellation=True
    )


async def listen_unix(app: web.Application, path: Path) -> web.AppRunner:
    """Serve `app` on a Unix socket that the owner and the group may use. A socket that nobody
    answers on is replaced."""
    if len(os.fsencode(path)) > 107:
        raise UsageError(f"the socket path {path} is longer than 107 bytes", remedy="Give a shorter --socket")
    runner = _runner(app)
    await runner.setup()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.is_socket():
            await _replace_stale(path)
        await web.UnixSite(runner, str(path)).start()
        path.chmod(0o660)
    except OSError as error:
        await runner.cleanup()
        if isinstance(error, PermissionError):
            raise Refused(
                f"this user may not make the socket {path}: {error.strerror}",
                remedy="Run the agent as root, or give --socket in a directory of yours, such as $XDG_RUNTIME_DIR",
            ) from error
        raise _taken(str(path), error, "--socket") from error
    except P2PDistError:
        await runner.cleanup()
        raise
    return runner


async def _replace_stale(path: Path) -> None:
    try:
        _, writer = await asyncio.open_unix_connection(path)
    except PermissionError:
        raise  # that of another user, whose agent may well run
    except OSError:
        path.unlink(missing_ok=True)
        return
    writer.close()
    raise Conflict(f"another agent answers on {path}", remedy="Stop it, or give this one another --socket")


def _taken(where: str, error: Exception, option: str) -> P2PDistError:
    return Conflict(
        f"cannot listen on {where}: {getattr(error, 'strerror', None) or error}",
        remedy=f"Choose another one with {option}",
    )


async def until_stopped() -> None:
    """Return when the process is told to stop."""
    stopped = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stopped.set)
    await stopped.wait()
