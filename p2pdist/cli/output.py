"""What commands print. Results go to standard output, for people or as one JSON document
(`--json`); progress and failures go to standard error, as bars on a terminal and plain lines
elsewhere."""

from __future__ import annotations

import contextlib
import json
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, TypeVar

import click
import msgspec

from p2pdist.model.errors import NotFound, P2PDistError, UsageError, foreseen, printable
from p2pdist.model.manifest import CATALOG_TYPE, SEALED_TYPE, Descriptor, is_bootstrap

if TYPE_CHECKING:
    from rich.progress import Progress as Bars
    from rich.progress import TaskID

PLAIN_INTERVAL_S = 5.0
"""Away from a terminal, a line of progress at most this often."""
INTERRUPTED = 130
DUMB = ("dumb", "unknown")
"""Terminals of which the library that draws bars shows nothing."""

_on_terminal: list[Bars] = []
"""The bars that are shown now, at most one set of them."""

_MORE_MEMORY = "Give the host, the control group (memory.max) or this process (ulimit -v) more memory"
_MORE_THREADS = (
    "Raise pids.max of its control group, ulimit -u of its user, or ulimit -v, of which each thread takes some"
)


def silence_event_loop() -> None:
    """Keep from the terminal what asyncio says of tasks that a failure left behind: the failure is
    reported. A daemon's log has it. For what loads asyncio when a verb runs; the others need not
    load a module for logs."""
    import logging

    if os.environ.get("P2PDIST_DEBUG") != "1":
        logging.getLogger("asyncio").addHandler(logging.NullHandler())


json_option = click.option("--json", "as_json", is_flag=True, help="Print one JSON document and nothing else.")


def wants_json(ctx: click.Context, as_json: bool) -> bool:
    """Whether --json was given to this verb (`as_json`) or to the one that it is part of."""
    return as_json or (ctx.parent is not None and bool(ctx.parent.params.get("as_json")))


QUIET, NO_PROGRESS = "p2pdist.quiet", "p2pdist.no_progress"
"""Keys of a command's context: whether --quiet and --no-progress are given."""

Command = TypeVar("Command", bound=Callable[..., Any])


def quiet_options(command: Command) -> Command:
    """--quiet and --no-progress. They act through `Progress`, `note` and `is_quiet`."""

    def keep(key: str) -> Callable[[click.Context, click.Parameter, bool], None]:
        def store(ctx: click.Context, _: click.Parameter, value: bool) -> None:
            ctx.meta[key] = value

        return store

    command = click.option(
        "--no-progress", is_flag=True, expose_value=False, callback=keep(NO_PROGRESS), help="Show no progress."
    )(command)
    text = "Print results in their shortest form, and neither progress nor notes; warnings and failures remain."
    return click.option("-q", "--quiet", is_flag=True, expose_value=False, callback=keep(QUIET), help=text)(command)


def is_quiet() -> bool:
    """Whether the command that runs was given --quiet."""
    return _is_set(QUIET)


def _is_set(key: str) -> bool:
    context = click.get_current_context(silent=True)
    return context is not None and bool(context.meta.get(key))


def note(text: str) -> None:
    """Print a line on standard error as `line` does, unless the command is to be quiet."""
    if not is_quiet():
        line(text)


def print_json(value: Any) -> None:
    """One JSON document on standard output. Names that are not UTF-8 are escaped as json.dumps does
    it."""
    try:
        text = msgspec.json.encode(value).decode()
    except UnicodeEncodeError:
        text = json.dumps(msgspec.to_builtins(value), separators=(",", ":"))
    click.echo(text)


def line(text: str) -> None:
    """Print a line on standard error, with control characters escaped, above the bars that are
    shown there. When it cannot be written, as on a full disk, the command goes on: a lost message
    must not keep a program from running."""
    with contextlib.suppress(OSError):
        if _on_terminal:
            _on_terminal[0].console.print(printable(text), markup=False, highlight=False, emoji=False, soft_wrap=True)
        else:
            click.echo(printable(text), err=True)


def say(text: str) -> None:
    """Print a line on standard output, with control characters escaped."""
    click.echo(printable(text))


def _lines(text: str) -> None:
    for row in text.split("\n"):
        line(row)


class Listed(click.exceptions.Exit):
    """The exit code of a failure that the printed list holds already; its line comes before it."""

    def __init__(self, failure: P2PDistError) -> None:
        line(f"p2pdist: {failure}")
        super().__init__(failure.exit_code)


def amount(count: float) -> str:
    """A byte count for people, in binary units."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(count) < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"


def age(seconds: float) -> str:
    """A time that has passed, for people: in the largest unit of which there is more than one."""
    for name, length in (("day", 86400), ("hour", 3600), ("minute", 60)):
        if seconds >= 2 * length:
            return f"{int(seconds // length)} {name}s"
    return f"{max(0, int(seconds))} s"


def hexes(digest: str) -> str:
    """The first 12 hex digits of a digest, by which people tell packages apart and which `pull`
    takes."""
    return digest.removeprefix("sha256:")[:12]


def table(heads: Sequence[str], rows: Sequence[Sequence[str]], *, right: Sequence[int] = ()) -> None:
    """Print rows below their heads on standard output, in columns; those numbered in `right` are
    aligned to the right. Control characters are escaped."""
    lines = [tuple(heads), *(tuple(map(printable, row)) for row in rows)]
    widths = [max(len(row[column]) for row in lines) for column in range(len(heads))]
    for row in lines:
        padded = zip(row, widths, range(len(widths)), strict=True)
        cells = [f"{cell:>{width}}" if at in right else f"{cell:<{width}}" for cell, width, at in padded]
        click.echo("  ".join(cells).rstrip())


def counted(number: int, noun: str) -> str:
    """`1 layer`, `2 layers`."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def contents(layers: Sequence[Descriptor], parts: Sequence[Descriptor]) -> str:
    """The bytes that an empty host fetches for a package, and what they are: layers, and the
    catalogs and packs that its trees draw on, or encrypted blobs. A blob that is named twice counts
    once."""
    size = sum({blob.digest: blob.size for blob in (*layers, *parts)}.values())
    catalogs = sum(part.media_type == CATALOG_TYPE for part in parts)
    encrypted = sum(part.media_type == SEALED_TYPE for part in parts)
    bootstraps = sum(map(is_bootstrap, parts))
    packs = len(parts) - catalogs - encrypted - bootstraps
    words = [counted(len(layers), "layer")] if layers or not encrypted else []
    words += [counted(catalogs, "catalog")] if catalogs else []
    words += [counted(packs, "pack")] if packs else []
    words += [counted(bootstraps, "bootstrap")] if bootstraps else []
    words += [counted(encrypted, "encrypted blob")] if encrypted else []
    return f"{amount(size)} in {', '.join(words)}"


class Progress:
    """Shows how far something is; `__call__(what, bytes_done, bytes_total)` may come from any
    thread.

    A bar per `what` on a terminal that can draw; elsewhere a line at most every PLAIN_INTERVAL_S
    and none for what ends sooner; nothing when `quiet`, or with --quiet or --no-progress. `beside`:
    the bars are those of another one, which is shown meanwhile, since two at once would overwrite
    each other.
    """

    def __init__(self, *, quiet: bool, beside: Progress | None = None) -> None:
        self._beside = beside
        self._quiet = quiet or _is_set(QUIET) or _is_set(NO_PROGRESS)
        self._lock = threading.Lock()
        self._bars: Bars | None = None
        self._tasks: dict[str, TaskID] = {}
        self._last = time.monotonic()

    def __enter__(self) -> Progress:
        if self._beside is not None:
            self._bars = self._beside._bars
        elif not self._quiet and sys.stderr.isatty() and os.environ.get("TERM", "").lower() not in DUMB:
            from rich.console import Console
            from rich.progress import BarColumn, DownloadColumn, TextColumn, TimeRemainingColumn, TransferSpeedColumn
            from rich.progress import Progress as Bars

            columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(binary_units=True))
            self._bars = Bars(
                *columns, TransferSpeedColumn(), TimeRemainingColumn(), console=Console(stderr=True), transient=True
            )
            self._bars.start()
            _on_terminal.append(self._bars)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bars and self._beside is None:
            _on_terminal.remove(self._bars)
            self._bars.stop()
        elif self._bars:
            for task in self._tasks.values():
                self._bars.remove_task(task)

    def __call__(self, what: str, done: int, total: int) -> None:
        if self._quiet:
            return
        with self._lock:
            if self._bars:
                if what not in self._tasks:
                    self._tasks[what] = self._bars.add_task(what, total=total)
                self._bars.update(self._tasks[what], completed=done, total=total)
            elif time.monotonic() - self._last >= PLAIN_INTERVAL_S:
                self._last = time.monotonic()
                line(f"{what}: {amount(done)} of {amount(total)}")


def ended(code: int, failure: BaseException | None, unwritten: OSError | None, *, as_json: bool) -> int:
    """The exit code of a command that ended with `code` or with a failure, which is reported here.
    `unwritten` is why the last of its standard output could not be written."""
    if failure is not None and not (isinstance(failure, OSError) and (unwritten is not None or _of_echo(failure))):
        return report(failure, as_json=as_json)
    reason = unwritten or failure
    if code == 0 and not isinstance(reason, BrokenPipeError):  # the reader of our output went away, and knows
        line(f"p2pdist: standard output cannot be written: {getattr(reason, 'strerror', '')}")
    return code or 1


def _of_echo(failure: OSError) -> bool:
    """Whether it was met while something was printed."""
    import traceback

    frames = list(traceback.walk_tb(failure.__traceback__))
    return frames[-1][0].f_code is click.echo.__code__


def report(error: BaseException, *, as_json: bool) -> int:
    """Tell the user of a failure; returns the exit code."""
    if isinstance(error, BaseExceptionGroup):
        return report(_first(error), as_json=as_json)
    if isinstance(error, (KeyboardInterrupt, click.Abort)):
        line("p2pdist: interrupted")
        return INTERRUPTED
    if isinstance(error, click.ClickException):
        return _report_usage(error, as_json=as_json)

    from p2pdist.model.url import without_secrets

    if os.environ.get("P2PDIST_DEBUG") == "1":
        import traceback

        _lines(without_secrets("".join(traceback.format_exception(error)).rstrip()))
    if isinstance(error, P2PDistError):
        failure = error
    elif isinstance(error, FileNotFoundError) and not _has_directory():
        failure = NotFound("the working directory was removed", remedy="Change to one that exists: cd")
    elif isinstance(error, OSError) and (problem := foreseen(error)) is not None:
        failure = problem
    elif isinstance(error, MemoryError):
        failure = P2PDistError("no memory is left", remedy=_MORE_MEMORY)
    elif isinstance(error, RuntimeError) and str(error) == "can't start new thread":
        failure = P2PDistError("this process may not start another thread", remedy=_MORE_THREADS)
    elif isinstance(error, UnicodeEncodeError) and error.reason == "surrogates not allowed":
        # Arguments are bytes (os.fsdecode); what is sent on as JSON or in a URL is text.
        failure = UsageError(f"'{printable(error.object[:80])}' is not UTF-8", remedy="Write this name in UTF-8")
    else:
        message = without_secrets(str(error).split("\n", 1)[0])[:300]
        failure = P2PDistError(
            f"unexpected {type(error).__name__}{': ' if message else ''}{message}",
            remedy="Set P2PDIST_DEBUG=1 to see where it happened",
        )
    _lines(f"p2pdist: {failure}")
    if as_json:
        _print_problem(failure)
    return failure.exit_code


def _has_directory() -> bool:
    try:
        os.getcwd()
    except FileNotFoundError:
        return False
    return True


def _print_problem(error: P2PDistError) -> None:
    with contextlib.suppress(OSError):  # the line on standard error is there
        print_json(error.problem())


def _report_usage(error: click.ClickException, *, as_json: bool) -> int:
    if isinstance(error, click.exceptions.NoArgsIsHelpError):
        _lines(error.format_message())
        return UsageError.exit_code
    if isinstance(error, click.UsageError) and error.ctx is not None:
        _lines(error.ctx.get_usage())
        line(f"Try '{error.ctx.command_path} --help'.")
    _lines(f"p2pdist: {error.format_message()}")
    if as_json:
        _print_problem(UsageError(error.format_message()))
    return UsageError.exit_code


def _first(group: BaseExceptionGroup[BaseException]) -> BaseException:
    """The failure of a group to report: one of p2pdist before all others."""
    for failure in _leaves(group):
        if isinstance(failure, (P2PDistError, KeyboardInterrupt)):
            return failure
    return next(_leaves(group))


def _leaves(group: BaseExceptionGroup[BaseException]) -> Iterator[BaseException]:
    for failure in group.exceptions:
        if isinstance(failure, BaseExceptionGroup):
            yield from _leaves(failure)
        else:
            yield failure
