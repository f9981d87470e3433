"""`p2pdist demo`: the whole job on one machine, with the real commands, real bytes and figures at
the end."""

from __future__ import annotations

import asyncio
import sys

import click

from p2pdist.cli import output
from p2pdist.model.errors import P2PDistError

AGENTS_MAX = 64
LOG_WIDTH = 130


@click.command("demo")
@click.option("--agents", type=click.IntRange(1, AGENTS_MAX), default=8, show_default=True, help="How many to start.")
@click.option("--small", is_flag=True, help="A base layer of numpy alone, for CI: less to download, pack and move.")
@click.option("--size", default="", metavar="BYTES", help="Pad the base layer to this size, such as 1GiB.")
@click.option("--keep", is_flag=True, help="Keep the directory with stores, packages and logs.")
@output.json_option
def command(agents: int, small: bool, size: str, keep: bool, as_json: bool) -> None:
    """Pack, push, pull and run a real package on agents on this machine, twice, and check the
    figures.

    An origin, a tracker and the agents run as separate processes with separate stores. The base
    layer is a Python environment with real wheels, the app layer a small training program. Exit
    code 0 means that every claim held. Nothing is left behind, also after Ctrl-C. Files go below
    TMPDIR: about 1 GB for eight agents, 3 GB where packages have to be unpacked.

    \b
    Example:
      p2pdist demo
      p2pdist demo --small --agents 3 --json
    """
    from rich.console import Console

    from p2pdist.cli.verbs.demo.figures import as_document, claims, show
    from p2pdist.cli.verbs.demo.script import Interrupted, Options, Script, play
    from p2pdist.model.units import parse_size

    terminal = (sys.stderr if as_json else sys.stdout).isatty()
    console = Console(stderr=as_json, width=None if terminal else LOG_WIDTH)
    script = Script(Options(agents=agents, small=small, size=parse_size(size) if size else 0, keep=keep), console)
    try:
        figures = asyncio.run(play(script))
    except Interrupted as interrupted:
        output.line(f"p2pdist: the demo was ended early by {interrupted}")
        raise SystemExit(128 + interrupted.number) from None
    judged = claims(figures)
    if as_json:
        output.print_json(as_document(figures, judged))
    else:
        show(console, figures, judged)
    if broken := [claim.text for claim in judged if not claim.held]:
        output.line(f"p2pdist: the demo broke {len(broken)} of its {len(judged)} claims: {'; '.join(broken)}")
        raise SystemExit(P2PDistError.exit_code)
