"""`p2pdist trace`: which files below a directory a run of a program uses; and the traces that a
fleet has of the starts of packages.

`p2pdist trace -- CMD` was there first: a word that is no subcommand begins the command to run.
"""

from __future__ import annotations

import asyncio
import base64
import os
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlencode

import click

from p2pdist.cli import output
from p2pdist.cli.options import OutputFile
from p2pdist.cli.references.names import offer_files
from p2pdist.cli.services import tracker_option
from p2pdist.model.errors import Corrupt, NotFound, UsageError, printable

if TYPE_CHECKING:
    from click.shell_completion import CompletionItem

    from p2pdist.model.trace import Trace

NAMED_MAX = 20
IMPORTED = "imported"
"""Stands for the host of a trace that a person gives."""


@click.group("trace")
def _traces() -> None:
    """The subcommands."""


class _Trace(click.Command):
    """Runs and records a command, unless the first word is a subcommand."""

    subcommands = _traces.commands

    def make_context(
        self, info_name: str | None, args: list[str], parent: click.Context | None = None, **extra: Any
    ) -> click.Context:
        """The context of the subcommand, where one is named first."""
        if args and args[0] in self.subcommands:
            return _traces.make_context(info_name, args, parent, **extra)
        return super().make_context(info_name, args, parent, **extra)

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the options, and the subcommands behind them."""
        super().format_options(ctx, formatter)
        with formatter.section("Commands about the starts of packages"):
            formatter.write_dl([(name, each.get_short_help_str(100)) for name, each in self.subcommands.items()])


def _offered(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem[Any]]:
    """For a shell: the subcommands for the first word, and files."""
    from click.shell_completion import CompletionItem

    parts = [] if ctx.params.get("arguments") else _traces.list_commands(ctx)
    named = [CompletionItem(name) for name in parts if name.startswith(incomplete)]
    return [*named, *offer_files(ctx, param, incomplete)]


@click.command("trace", cls=_Trace, context_settings={"allow_interspersed_args": False})
@click.option(
    "-o",
    "--output",
    "file",
    type=OutputFile(),
    default=Path("p2pdist-trace.json"),
    show_default=True,
    help="Where to write the trace.",
)
@click.option(
    "--root",
    type=click.Path(path_type=Path, file_okay=False, exists=True),
    help="The directory whose files are recorded.  [default: $P2PDIST_ROOT, else the working directory]",
)
@output.json_option
@click.argument(
    "arguments", metavar="-- CMD...", nargs=-1, type=click.UNPROCESSED, required=True, shell_complete=_offered
)
def command(arguments: tuple[str, ...], file: Path, root: Path | None, as_json: bool) -> int:
    """Run CMD, record which files below a directory it and its children use, and end with its exit
    code.

    What p2pdist pack --only-used makes of the trace holds what that run needed and no more, so
    trace a run that does all that matters, or several. Needs strace and the right to trace
    (ptrace). With --json the output of CMD goes to standard error.

    Traces of another kind come by themselves: what lazy starts of a package read, in order. The
    tracker keeps them, and the commands below show them.

    \b
    Example:
      p2pdist trace -o train.json --root ./venv -- ./venv/bin/python -m train --steps 1
      p2pdist pack ./venv -t trainer:slim --only-used train.json
      p2pdist trace show team/trainer:v3 --entry train
    """
    from p2pdist.mount.scratch import scratch_parent
    from p2pdist.package.archive.export import new_file
    from p2pdist.package.source.strace import read_logs, run
    from p2pdist.package.source.trace import encode_trace, make_trace

    words = arguments[1:] if arguments[:1] == ("--",) else arguments
    place = root or Path(os.environ.get("P2PDIST_ROOT") or ".")
    with tempfile.TemporaryDirectory(prefix="p2pdist-trace-", dir=scratch_parent()) as logs:
        code = run(words, Path(logs), stdout=sys.stderr.fileno() if as_json else None)
        trace = make_trace(place, read_logs(Path(logs), os.fsencode(os.getcwd())))
    data = encode_trace(trace)
    with new_file(file, needed=len(data), mode=0o666) as stream:
        stream.write(data)
    document = {"trace": str(file), "root": trace.root, "files": len(trace.files), "modules": len(trace.modules)}
    if as_json:
        output.print_json({**document, "exit_code": code})
    else:
        output.line(f"{file}: {len(trace.files)} files and {len(trace.modules)} modules of {trace.root}")
    return code


_entry_option = click.option(
    "--entry", metavar="NAME", help='The entry point, as ls prints it; "" for mounts.  [default: the only one]'
)


@_traces.command("ls")
@click.argument("reference", metavar="[REF]", required=False)
@tracker_option
@output.json_option
def ls(reference: str | None, tracker: str, as_json: bool) -> None:
    """List the entry points of which there are traces, of the package REF or of all.

    \b
    Example:
      p2pdist trace ls team/trainer:v3
    """
    listed = asyncio.run(_listed(tracker, reference))
    if as_json:
        output.print_json({"traces": listed})
        return
    for row in listed:
        entry = row["entry"] or "(mounts)"
        recorded = output.counted(row["recordings"], "recording")
        output.say(f"{row['package']:40} {entry:24} {recorded}, {output.amount(row['bytes'])}")


@_traces.command("show")
@click.argument("reference", metavar="REF")
@_entry_option
@tracker_option
@output.json_option
def show(reference: str, entry: str | None, tracker: str, as_json: bool) -> None:
    """Print what a start of the package REF reads, in order: when, how many chunks, and of what.

    \b
    Example:
      p2pdist trace show team/trainer:v3 --entry train
    """
    trace, name = asyncio.run(_found(tracker, reference, entry))
    spans = [
        {
            "at_ms": span.at_ms,
            "path": printable(os.fsdecode(traced.path)),
            "content": traced.content.hex(),
            "first": span.first,
            "chunks": span.count,
        }
        for span, traced in ((span, trace.contents[span.content]) for span in trace.spans)
    ]
    if as_json:
        output.print_json({"package": reference, "entry": name, "lasted_ms": trace.lasted_ms, "spans": spans})
        return
    for row in spans:
        output.say(f"{row['at_ms']:>8} ms  {row['chunks']:>5}  {row['path'] or row['content']}")
    files = output.counted(len(trace.contents), "content")
    output.line(f"{output.counted(trace.chunks, 'chunk')} of {files} in {trace.lasted_ms / 1000:.1f} s")


@_traces.command("export")
@click.argument("reference", metavar="REF")
@_entry_option
@click.option(
    "-o",
    "--output",
    "file",
    type=OutputFile(),
    required=True,
    help="Where to write the trace.",
)
@tracker_option
@output.json_option
def export(reference: str, entry: str | None, file: Path, tracker: str, as_json: bool) -> None:
    """Write the trace of a start of the package REF to a file, for p2pdist pack --order and
    p2pdist trace import.

    \b
    Example:
      p2pdist trace export team/trainer:v3 -o start.json
      p2pdist pack ./venv -t team/trainer:v4 --format tree --order start.json
    """
    from p2pdist.model.trace import encode_trace
    from p2pdist.package.archive.export import new_file

    trace, name = asyncio.run(_found(tracker, reference, entry))
    data = encode_trace(trace)
    with new_file(file, needed=len(data), mode=0o666) as stream:
        stream.write(data)
    if as_json:
        output.print_json({"trace": str(file), "entry": name, "bytes": len(data), "chunks": trace.chunks})
    else:
        output.line(f"{file}: {output.counted(trace.chunks, 'chunk')}, {output.amount(len(data))}")


@_traces.command("import")
@click.argument("reference", metavar="REF")
@click.argument("file", type=click.Path(path_type=Path, dir_okay=False))
@click.option("--entry", metavar="NAME", default="", help="The entry point; left out, mounts.")
@tracker_option
@output.json_option
def import_(reference: str, file: Path, entry: str, tracker: str, as_json: bool) -> None:
    """Give the tracker the trace in FILE as one recording of the package REF. It counts as much as
    that of a host.

    \b
    Example:
      p2pdist trace import team/trainer:v4 start.json --entry train
    """
    from p2pdist.model.trace import check_entry, encode_trace

    trace = read_trace_file(file)
    data = base64.b64encode(encode_trace(trace)).decode()
    body = {"reference": reference, "entry": check_entry(entry), "trace": data, "host": IMPORTED}
    asyncio.run(_put(tracker, body))
    if as_json:
        output.print_json({"package": reference, "entry": entry, "chunks": trace.chunks})
    else:
        output.line(f"{reference}: {output.counted(trace.chunks, 'chunk')}")


def read_trace_file(file: Path) -> Trace:
    """The trace in a file that p2pdist trace export wrote. Raises NotFound, UsageError, Corrupt."""
    from p2pdist.model.trace import TRACE_BYTES_MAX, decode_trace

    try:
        with file.open("rb") as stream:
            data = stream.read(TRACE_BYTES_MAX + 1)
    except FileNotFoundError as error:
        raise NotFound(f"there is no trace {file}", remedy="Write one with p2pdist trace export") from error
    except OSError as error:
        raise UsageError(
            f"cannot read the trace {file}: {error.strerror}", remedy="Name a file that this user may read"
        ) from error
    try:
        return decode_trace(data)
    except Corrupt as error:
        remedy = error.remedy or "p2pdist trace export writes one; p2pdist trace -- CMD writes another kind"
        raise Corrupt(f"{file}: {error.what}", remedy=remedy) from error


async def _put(tracker: str, body: dict[str, Any]) -> None:
    from p2pdist.cli.services import tracker_client

    async with tracker_client(tracker) as client:
        await client.ask("POST", "/v1/traces", body, fields=["chunks"])


async def _listed(tracker: str, reference: str | None) -> list[dict[str, Any]]:
    from p2pdist.cli.services import tracker_client

    query = f"?{urlencode({'reference': reference})}" if reference else ""
    async with tracker_client(tracker) as client:
        answer = await client.ask("GET", f"/v1/traces/entries{query}", fields=["traces"])
    return list(answer["traces"])


async def _found(tracker: str, reference: str, entry: str | None) -> tuple[Trace, str]:
    """The trace of an entry point, of the only one where none is named. Raises NotFound,
    UsageError."""
    from p2pdist.cli.services import tracker_client
    from p2pdist.model.trace import check_entry, decode_trace

    if entry is None:
        names = [row["entry"] for row in await _listed(tracker, reference)]
        if len(names) > 1:
            shown = ", ".join(repr(name) for name in names[:NAMED_MAX])
            raise UsageError(f"{reference} has traces of several entry points: {shown}", remedy="Give one with --entry")
        entry = names[0] if names else ""
    query = urlencode({"reference": reference, "entry": check_entry(entry)})
    async with tracker_client(tracker) as client:
        data = await client.read(f"/v1/traces?{query}")
    if not data:
        remedy = "Lazy starts make traces: p2pdist run --lazy"
        raise NotFound(f"there is no trace of {reference}{f' {entry}' if entry else ''}", remedy=remedy)
    return decode_trace(data), entry
