"""Options of those who announce themselves on the local network."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import click

Command = TypeVar("Command", bound=Callable[..., object])


def discovery_options(command: Command) -> Command:
    """--network-id and --discovery-interface."""
    command = click.option(
        "--discovery-interface",
        multiple=True,
        metavar="IP or NAME",
        help="Where to discover others; may be repeated [default: where this one listens, loopback left out].",
    )(command)
    return click.option(
        "--network-id",
        default="default",
        show_default=True,
        metavar="NAME",
        help="Those with another one on the same network are not seen.",
    )(command)
