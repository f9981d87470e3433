"""Types of option values: rates, times, shares and ratios as people write them (300MB/s, 0.2ms, 5%,
4:1), and the options for discovery on the local network."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import Any, TypeVar

import click

from p2pdist.model.errors import UsageError
from p2pdist.model.units import parse_rate

__all__ = ["parse_rate", "parse_ratio", "parse_share", "parse_time"]

_TIME = re.compile(r"([0-9]+(?:\.[0-9]+)?) ?(us|ms|s|)\Z")
_NUMBER = re.compile(r"([0-9]+(?:\.[0-9]+)?|\.[0-9]+) ?(%?)\Z")
_SECONDS = {"us": 1e-6, "ms": 1e-3, "s": 1.0}

Command = TypeVar("Command", bound=Callable[..., object])


def discovery_options(command: Command) -> Command:
    """--network-id and --discovery-interface."""
    command = click.option(
        "--discovery-interface",
        multiple=True,
        metavar="IP or NAME",
        help="Discover others on this interface; may be repeated [default: the ones of --listen, without loopback].",
    )(command)
    return click.option(
        "--network-id",
        default="default",
        show_default=True,
        metavar="NAME",
        help="Agents and trackers with another name on this network are ignored.",
    )(command)


class Seconds(click.FloatRange):
    """A number of seconds, or of another unit, from `low` to `high`; unlike click's own type it
    refuses nan, which is neither below nor above anything."""

    name = "seconds"

    def __init__(self, low: float, high: float, *, unit: str = "seconds") -> None:
        super().__init__(low, high)
        self._unit = unit

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        """The number of a text; fails as click's types do."""
        seconds = super().convert(value, param, ctx)
        if math.isnan(seconds):
            self.fail(f"{value!r} is not a number of {self._unit}.", param, ctx)
        return float(seconds)


def parse_time(text: str, *, bare: bool = False) -> float:
    """Seconds of a time such as 0.2ms; with `bare` a number alone is seconds. Raises UsageError."""
    match = _TIME.match(text.strip())
    if not match or not (match[2] or bare):
        raise UsageError(f"{text!r} is not a time", remedy="Write a number and a unit, such as 0.2ms")
    return float(match[1]) * _SECONDS[match[2] or "s"]


def parse_share(text: str) -> float:
    """A share from 0 to 1 of a text such as 5% or 0.05. Raises UsageError."""
    match = _NUMBER.match(text.strip())
    share = float(match[1]) / (100 if match[2] else 1) if match else math.nan
    if not 0 <= share <= 1:
        raise UsageError(f"{text!r} is not a share", remedy="Write 5% or 0.05")
    return share


def parse_ratio(text: str) -> float:
    """How many to one a text such as 4:1 says, more than 0. Raises UsageError."""
    over, _, under = text.strip().partition(":")
    matches = _NUMBER.match(over), _NUMBER.match(under or "1")
    if not all(match and not match[2] and float(match[1]) > 0 for match in matches):
        raise UsageError(f"{text!r} is not a ratio", remedy="Write two numbers, such as 4:1")
    return float(over) / float(under or "1")
