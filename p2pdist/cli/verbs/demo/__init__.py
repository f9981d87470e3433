"""`p2pdist demo`: the whole job on one machine, with the real commands, real bytes and figures at
the end."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, TypeVar

import click

from p2pdist.cli import output
from p2pdist.model.errors import P2PDistError

if TYPE_CHECKING:  # these take a while to import, and every command imports this module
    from p2pdist.cli.verbs.demo.figures import Claim
    from p2pdist.cli.verbs.demo.script import Script

Measured = TypeVar("Measured")
AGENTS_MAX = 64
LOG_WIDTH = 130


@click.command("demo")
@click.option("--agents", type=click.IntRange(1, AGENTS_MAX), default=8, show_default=True, help="How many to start.")
@click.option("--model", is_flag=True, help="The second act: a model of 1 GiB from a hub, by snapshot_download.")
@click.option("--small", is_flag=True, help="For CI: a base layer of numpy alone, or a model of 64 MiB.")
@click.option(
    "--size", default="", metavar="BYTES", help="Pad the base layer, or make the model, to this size, such as 1GiB."
)
@click.option("--keep", is_flag=True, help="Keep the directory with stores, packages and logs.")
@output.json_option
def command(agents: int, model: bool, small: bool, size: str, keep: bool, as_json: bool) -> None:
    """Pack, push, pull and run a real package on agents on this machine, twice, and check the
    figures.

    An origin, a tracker and the agents run as separate processes with separate stores. The base
    layer is a Python environment with real wheels, the app layer a small training program. Exit
    code 0 means that every claim held. Nothing is left behind, also after Ctrl-C. Files go below
    TMPDIR: about 1 GB for eight agents, 3 GB where packages have to be unpacked.

    With --model a hub takes the place of the origin. All hosts call snapshot_download of
    huggingface_hub at once and load the tensors. That takes twice the model for each agent, 17 GiB
    for eight; pip installs what this Python lacks of huggingface_hub, safetensors and numpy.

    \b
    Example:
      p2pdist demo
      p2pdist demo --model
      p2pdist demo --small --agents 3 --json
    """
    from rich.console import Console

    from p2pdist.cli.verbs.demo.script import Options, Script
    from p2pdist.model.units import parse_size

    terminal = (sys.stderr if as_json else sys.stdout).isatty()
    console = Console(stderr=as_json, width=None if terminal else LOG_WIDTH)
    script = Script(Options(agents=agents, small=small, size=parse_size(size) if size else 0, keep=keep), console)
    judged = _second(script, as_json) if model else _first(script, as_json)
    if broken := [claim.text for claim in judged if not claim.held]:
        output.line(f"p2pdist: the demo broke {len(broken)} of its {len(judged)} claims: {'; '.join(broken)}")
        raise SystemExit(P2PDistError.exit_code)


def _first(script: Script, as_json: bool) -> Sequence[Claim]:
    """A package, twice; prints the figures."""
    from p2pdist.cli.verbs.demo.figures import as_document, claims, show

    figures = _played(script, script.play)
    judged = claims(figures)
    if as_json:
        output.print_json(as_document(figures, judged))
    else:
        show(script.console, figures, judged)
    return judged


def _second(script: Script, as_json: bool) -> Sequence[Claim]:
    """A model; prints the figures."""
    from p2pdist.cli.verbs.demo.model.figures import model_claims, model_document, show_model
    from p2pdist.cli.verbs.demo.model.script import play_model

    figures = _played(script, partial(play_model, script))
    judged = model_claims(figures)
    if as_json:
        output.print_json(model_document(figures, judged))
    else:
        show_model(script.console, figures, judged)
    return judged


def _played(script: Script, act: Callable[[], Awaitable[Measured]]) -> Measured:
    """What an act measured. Ends this process when a signal has ended it early."""
    from p2pdist.cli.verbs.demo.script import Interrupted, play

    try:
        return asyncio.run(play(script, act))
    except Interrupted as interrupted:
        output.line(f"p2pdist: the demo was ended early by {interrupted}")
        raise SystemExit(128 + interrupted.number) from None
