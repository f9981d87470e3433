"""`p2pdist trace`: which files below a directory a run of a program uses."""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path

import click

from p2pdist.cli import output


@click.command("trace", context_settings={"allow_interspersed_args": False})
@click.option(
    "-o",
    "--output",
    "file",
    type=click.Path(path_type=Path, dir_okay=False),
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
@click.argument("arguments", metavar="-- CMD...", nargs=-1, type=click.UNPROCESSED, required=True)
def command(arguments: tuple[str, ...], file: Path, root: Path | None, as_json: bool) -> int:
    """Run CMD, record which files below a directory it and its children use, and end with its exit
    code.

    What p2pdist pack --only-used makes of the trace holds what that run needed and no more, so
    trace a run that does all that matters, or several. Needs strace and the right to trace
    (ptrace). With --json the output of CMD goes to standard error.

    \b
    Example:
      p2pdist trace -o train.json --root ./venv -- ./venv/bin/python -m train --steps 1
      p2pdist pack ./venv -t trainer:slim --only-used train.json
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
