"""Running a service in the foreground: its log, its listeners, and a clean stop on SIGTERM or
Ctrl-C.

A daemon logs one line an event on standard error, as text, logfmt or JSON, with the time (UTC, ISO
8601), level, logger, message, the id of the request if there is one (p2pdist/model/request_id.py),
and the package of a blob in the message if it is known. Input from the network cannot forge lines:
control characters are escaped. No line holds credentials, whichever library logs it: user
information in URLs, and values behind the usual names of secrets, are replaced. The standard
library does this with one formatter; a logging library would write JSON but not logfmt, or bring
loggers that the libraries here do not use.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import errno
import functools
import gc
import json
import logging
import os
import re
import resource
import signal
import socket
import ssl
import stat
import sys
from collections.abc import Callable, Coroutine
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal, TypeVar, cast

import click
import uvloop
from aiohttp import web

from p2pdist.agent.discovery.links import DiscoverySettings
from p2pdist.model.address import address_text, on_this_machine, parse_address
from p2pdist.model.digest import Digest
from p2pdist.model.errors import Conflict, P2PDistError, Refused, UsageError
from p2pdist.model.request_id import REQUEST_ID
from p2pdist.model.url import without_secrets
from p2pdist.transfer.connections import (
    CONNECTIONS,
    HANDSHAKE_S_MAX,
    ConnectionBook,
    LimitedSite,
    LimitedUnixSite,
    connections_max,
    in_use_while_answered,
    local_book,
    local_connections_max,
)
from p2pdist.transfer.input import count_request

M_TRIM_THRESHOLD = -1
"""The name of that option of mallopt(3)."""

TRIM_BYTES = 128 << 10
"""So much a process keeps at the end of its heap: glibc's first value, which then stays."""

LEVELS = ("debug", "info", "warning", "error")
FORMATS = ("text", "logfmt", "json")
Format = Literal["text", "logfmt", "json"]
_CONTROL = {code: f"\\x{code:02x}" for code in (*range(32), *range(127, 160), 0x2028, 0x2029)} | {
    10: "\\n",
    13: "\\r",
    9: "\\t",
}
_DIGEST = re.compile(r"\bsha256:[0-9a-f]{64}\b")
DIGESTS_LOOKED_UP = 4
"""Of the digests in one message."""

_NAMERS: list[Callable[[Digest], str]] = []
"""The function that name_packages was given last."""

_PLAIN = re.compile(r"[^\s\"=\\]+")

SHUTDOWN_S = 2.0
"""How long requests may take that are being answered when the service ends."""
COLLECT_AFTER = (50_000, 20, 20)
"""Thresholds of Python's cycle collector. A plan for 10,000 hosts makes some 100,000 objects, and a
filled store a row for each file, none of them in cycles; with the default thresholds the collector
would look through all of memory again and again."""

THREADS_S = 3.0
IDLE_S = 75.0
"""A connection that sends no whole request for so long is closed, also before its first."""

NEIGHBOUR_S = 1.0
EARLY: list[str] = []
"""Warnings of a daemon from before it was known how it logs."""

Function = TypeVar("Function", bound=Callable[..., Any])

logger = logging.getLogger(__name__)


def log_options(function: Function) -> Function:
    """--log-level and --log-format, for a daemon's verb: logging is set up before it begins."""

    @functools.wraps(function)
    def logged(*args: Any, log_level: str, log_format: Format, **more: Any) -> Any:
        set_up_logging(log_level, log_format)
        return function(*args, **more)

    command: Any = logged
    for option in (
        click.option(
            "--log-format",
            default="text",
            show_default=True,
            type=click.Choice(FORMATS),
            help="How a line of the log is written.",
        ),
        click.option(
            "--log-level", default="info", show_default=True, type=click.Choice(LEVELS), help="How much to log."
        ),
    ):
        command = option(command)
    return cast(Function, command)


def set_up_logging(level: str, form: Format = "text") -> None:
    """Log to standard error from now on."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_Lines(form))
    handler.addFilter(_note_request)
    logging.basicConfig(level=getattr(logging, level.upper()), handlers=[handler])
    logging.getLogger("aiohttp.server").addFilter(_malformed_in_one_line)
    while EARLY:
        logger.warning("%s", EARLY.pop(0))


def set_level(level: str) -> None:
    """Log from this level on."""
    logging.getLogger().setLevel(getattr(logging, level.upper()))


class _Lines(logging.Formatter):
    """Formats a record as one line, or with a traceback as text as several."""

    def __init__(self, form: Format) -> None:
        super().__init__()
        self._write = {"text": _text, "logfmt": _logfmt, "json": _json}[form]

    def format(self, record: logging.LogRecord) -> str:
        fields = {
            "time": datetime.fromtimestamp(record.created, UTC)
            .isoformat(timespec="milliseconds")
            .replace("+00:00", "Z"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": without_secrets(record.getMessage()),
        }
        if name := getattr(record, "request_id", ""):
            fields["request_id"] = name
        if package := _package_in(fields["message"]):
            fields["package"] = package
        if record.exc_info and record.exc_info[0] is not None:
            fields["exception"] = without_secrets(self.formatException(record.exc_info))
        return self._write(fields)


def name_packages(reference: Callable[[Digest], str]) -> None:
    """Have each line of the log that holds the digest of a blob say of which package it is, where
    `reference` knows that. It is called from any thread, and waits for nothing."""
    _NAMERS[:] = [reference]


def _package_in(message: str) -> str:
    """The package of the first digest in a message of which one is known."""
    digests = _DIGEST.findall(message)[:DIGESTS_LOOKED_UP] if _NAMERS else []
    found = (_NAMERS[0](Digest(digest)) for digest in digests)
    package = next(filter(None, found), "")
    return "" if package in message else package


def _json(fields: dict[str, str]) -> str:
    return json.dumps(fields)


def _logfmt(fields: dict[str, str]) -> str:
    return " ".join(f"{key}={_value(value)}" for key, value in fields.items())


def _value(value: str) -> str:
    """As it is where it is plain, else quoted as in JSON."""
    return value if _PLAIN.fullmatch(value) and value.isprintable() else json.dumps(value)


def _text(fields: dict[str, str]) -> str:
    """For people: tracebacks keep their lines, which are indented, so that none passes for another
    event."""
    request = f" request={fields['request_id']}" if "request_id" in fields else ""
    package = f" package={fields['package']}" if "package" in fields else ""
    line = f"{fields['time']} level={fields['level'].upper()} logger={fields['logger']}{request}{package} "
    trace = fields["exception"].split("\n") if "exception" in fields else []
    return "\n  ".join((line + fields["message"].translate(_CONTROL), *(row.translate(_CONTROL) for row in trace)))


def _note_request(record: logging.LogRecord) -> bool:
    record.request_id = REQUEST_ID.get()
    return True


def _malformed_in_one_line(record: logging.LogRecord) -> bool:
    """A malformed request from the network, or a client that went away within one, is no failure of
    this service: log one line without a traceback, and nothing of the request."""
    from aiohttp.http import HttpProcessingError  # a verb that prints its help needs none of it

    error = record.exc_info[1] if record.exc_info else None
    if isinstance(error, HttpProcessingError | web.RequestPayloadError | ConnectionError):
        record.msg, record.args = f"{record.getMessage()}: {type(error).__name__}", ()
        record.exc_info = None
        record.levelno, record.levelname = logging.INFO, "INFO"
    return True


def run(service: Coroutine[Any, Any, None]) -> None:
    """Run a service to its clean stop and end the process with 0; raises what the service raises.

    A thread that waits for a disk or an origin cannot be ended. Everything worth keeping is on disk
    by then, so the process exits after THREADS_S without waiting for the thread.
    """

    async def whole() -> None:
        await service
        # Not cancelled, as it would wait for the threads then, and with it the loop.
        ending = asyncio.ensure_future(asyncio.get_running_loop().shutdown_default_executor())
        await asyncio.wait([ending], timeout=THREADS_S)
        logging.shutdown()
        sys.stdout.flush()
        os._exit(0)

    gc.set_threshold(*COLLECT_AFTER)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(whole())


def give_memory_back() -> None:
    """Have the process return what it frees at the end of its heap, rather than keep ever more of
    it (mallopt(3), M_TRIM_THRESHOLD): a plan of thousands of hosts takes much for a moment. Without
    effect where the C library has no such option."""
    libc = ctypes.CDLL(None)
    if hasattr(libc, "mallopt"):
        libc.mallopt(M_TRIM_THRESHOLD, TRIM_BYTES)


def raise_file_limit() -> None:
    """Streams and blobs are open files: take as many as this process may have."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def listen_address(text: str, option: str = "--listen", example: str = "0.0.0.0:7071") -> tuple[str, int]:
    """Host and port that an option names. Raises UsageError."""
    try:
        return parse_address(text)
    except ValueError as error:
        raise UsageError(str(error), remedy=f"Write {option} {example}") from error


def discovery_settings(
    address: tuple[str, int], network_id: str, interfaces: tuple[str, ...]
) -> DiscoverySettings | None:
    """How a service that listens on `address` discovers others; None on loopback, which no other
    host sees, unless interfaces are named."""
    host, _ = address
    if not interfaces and on_this_machine(host):
        logger.info("no discovery: %s is on this machine only", host)
        return None
    return DiscoverySettings(address, network_id, interfaces)


async def listen(
    app: web.Application,
    address: tuple[str, int],
    *,
    tls: ssl.SSLContext | None = None,
    connections: ConnectionBook | None = None,
    handshake_s: float = HANDSHAKE_S_MAX,
    option: str = "--listen",
) -> web.AppRunner:
    """Serve `app` over TCP, with `tls` over TLS only, within the limits of `connections`; `::`
    stands for all addresses of both families. `option` is the one that names the address. Raises
    Conflict when the address is taken."""
    # A book that counts nothing yet is false.
    book = connections if connections is not None else ConnectionBook(connections_max())
    app[CONNECTIONS] = book
    app.middlewares.insert(0, count_request)
    runner = _runner(app)
    await runner.setup()
    host, port = address
    try:
        for name in _names(host):
            await LimitedSite(runner, name, port, book, tls=tls, handshake_s=handshake_s).start()
    except (OSError, UnicodeError) as error:
        await runner.cleanup()
        raise _not_ours(address, error, option) from error
    return runner


async def require_free(address: tuple[str, int], option: str) -> None:
    """Raises what `listen` does of an address that is taken, and takes no connection."""
    look_up, (host, port) = asyncio.get_running_loop().getaddrinfo, address
    try:
        for name in _names(host):
            found = await look_up(name, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
            for family, kind, protocol, _, where in found:
                with socket.socket(family, kind, protocol) as probe:
                    probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                    if family == socket.AF_INET6:
                        probe.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
                    probe.bind(where)
    except (OSError, UnicodeError) as error:
        raise _not_ours(address, error, option) from error


def _names(host: str) -> tuple[str, ...]:
    """What is listened at for `host`: `::` alone takes connections of one family."""
    return ("::", "0.0.0.0") if host == "::" else (host,)


def _not_ours(address: tuple[str, int], error: OSError | UnicodeError, option: str) -> P2PDistError:
    return _taken(address_text(*address), error, option, _neighbour(*address, error))


def _neighbour(host: str, port: int, error: Exception) -> str:
    """Whose port it may be that is taken: an agent at the one before has its BitTorrent port there
    unless it was given another."""
    if getattr(error, "errno", None) != errno.EADDRINUSE or port < 2:
        return ""
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    try:
        with socket.create_connection((host, port - 1), timeout=NEIGHBOUR_S):
            return f". What listens at port {port - 1} may be an agent, whose BitTorrent port this is"
    except OSError:
        return ""


async def stop_listening(runners: list[web.AppRunner]) -> None:
    """Take no new connections; open ones stay until `close`."""
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
    """Serve `app` on a Unix socket that the owner and the group may use; none of their users takes
    all connections of the others. A socket file on which no process answers is replaced. Raises
    UsageError, Refused and Conflict."""
    await prepare_socket(path)
    app[CONNECTIONS] = book = local_book(local_connections_max())
    app.middlewares[:0] = [count_request, in_use_while_answered]
    runner = _runner(app)
    await runner.setup()
    try:
        await LimitedUnixSite(runner, str(path), book).start()
        _share_with_group(path)
    except OSError as error:
        await runner.cleanup()
        raise _no_socket(path, error) from error
    except P2PDistError:
        await runner.cleanup()
        raise
    return runner


async def prepare_socket(path: Path) -> None:
    """Make the directory of a Unix socket, and remove one on which no process answers: an agent
    that may not have its socket finds out before it makes a store. Raises what listen_unix
    does."""
    if len(os.fsencode(path)) > 107:
        raise UsageError(f"the socket path {path} is longer than 107 bytes", remedy="Give a shorter --socket")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.is_socket():
            await _replace_stale(path)
        elif not os.access(path.parent, os.W_OK | os.X_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
    except OSError as error:
        raise _no_socket(path, error) from error


def _no_socket(path: Path, error: OSError) -> P2PDistError:
    if isinstance(error, PermissionError):
        return Refused(
            f"this user may not make the socket {path}: {error.strerror}",
            remedy="Run the agent as root, or give --socket in a directory of yours, such as $XDG_RUNTIME_DIR",
        )
    return _taken(str(path), error, "--socket")


def _share_with_group(path: Path) -> None:
    """Let owner and group use a socket, and change nothing else: a link may have taken its
    place."""
    descriptor = os.open(path, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        if not stat.S_ISSOCK(os.fstat(descriptor).st_mode):
            raise OSError(errno.EBUSY, "another program has put something else in its place", str(path))
        os.chmod(f"/proc/self/fd/{descriptor}", 0o660)
    finally:
        os.close(descriptor)


async def _replace_stale(path: Path) -> None:
    try:
        _, writer = await asyncio.open_unix_connection(path)
    except PermissionError:
        raise  # the socket of another user: that agent may well run
    except OSError:
        path.unlink(missing_ok=True)
        return
    writer.close()
    raise Conflict(f"another agent answers on {path}", remedy="Stop it, or give this one another --socket")


def _taken(where: str, error: Exception, option: str, more: str = "") -> P2PDistError:
    reason = "address already in use" if getattr(error, "errno", None) == errno.EADDRINUSE else ""
    return Conflict(
        f"cannot listen on {where}: {reason or getattr(error, 'strerror', None) or error}{more}",
        remedy=f"Choose another one with {option}",
    )


READY, STOPPING = "READY=1", "STOPPING=1"
BEATS = 3
"""Signs of life within the time after which systemd takes the service for hung."""


def notify_manager(state: str) -> None:
    """Tell the service manager that started this process how it is (sd_notify(3)); nothing happens
    where none wants to know."""
    path = os.environ.get("NOTIFY_SOCKET", "")
    if not path:
        return
    address = f"\0{path[1:]}" if path.startswith("@") else path
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as to_manager:
            to_manager.connect(address)
            to_manager.sendall(state.encode())
    except OSError as error:
        logger.warning("the service manager at %s does not hear that this is %s: %s", path, state, error)


async def notify_watchdog() -> None:
    """Give signs of life until cancelled, as often as the service manager wants
    (sd_watchdog_enabled(3)): the event loop runs."""
    interval, pid = os.environ.get("WATCHDOG_USEC", ""), os.environ.get("WATCHDOG_PID", "")
    if not interval.isdecimal() or not int(interval) or (pid and pid != str(os.getpid())):
        return
    while True:
        notify_manager("WATCHDOG=1")
        await asyncio.sleep(int(interval) / 1e6 / BEATS)


async def until_stopped() -> None:
    """Return at SIGTERM or SIGINT."""
    stopped = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stopped.set)
    await stopped.wait()
