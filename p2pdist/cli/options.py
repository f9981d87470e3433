"""Types of option values: rates, times, shares and ratios as people write them (300MB/s, 0.2ms, 5%,
4:1), the options for discovery on the local network, and the names of all options."""

from __future__ import annotations

import math
import os
import re
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

from p2pdist.files import PIPE_S, decoded, read_content
from p2pdist.model import units
from p2pdist.model.errors import UsageError
from p2pdist.model.url import secrets_in

_TIME = re.compile(r"([0-9]+(?:\.[0-9]+)?) ?(us|ms|s|)\Z")
_NUMBER = re.compile(r"([0-9]+(?:\.[0-9]+)?|\.[0-9]+) ?(%?)\Z")
_HOSTNAME = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9_.-]{0,251}[A-Za-z0-9])?\Z")
_SECONDS = {"us": 1e-6, "ms": 1e-3, "s": 1.0}

NAMES = frozenset(
    """
    access address advertise agent_wait agents all alone arrivals at_origin audit_log base bind blobs bootstrap
    bt_listen bucket cache cache_dir cache_python callback callbacks cancel capacity certs_dir coherent config
    count crash cut_half cut_tracker deadline dir directory discover discovery_interface download_limit
    drain_seconds dry_run encrypt_to entry entrypoint env everywhere faults first_party follow follow_links force
    force_age format freeze_tracker host hostnames hosts how hub id ignore image job jobs_dir join_file json
    keep kill_tracker kill_tracker_every kind last latency layout lazy lazy_wait lazy_way level limit list
    listen local local_only log_format log_level lose_database lose_tracker mirror model modelpack mount mtime
    name network_id networks nic no_discovery no_progress no_repair older_than on_failure once only_used order
    origin origin_file origin_limit origin_rate origin_site origin_sites origin_streams output
    oversubscription package packages partition peer_wait piece_size platform plot policies port preseed_limit
    priority probe_listen project push python quiet quorum rack rack_rate racks remove replicas report
    report_interval reproducible role roll_trackers root rtt runs s3 s3_settings scrub_days seconds seed
    selector since site sites size slow slow_both slow_downlinks small socket sort spiffe split stale_tag_days
    stat state store stripe swarm tag tar timeout tls_ca tls_cert tls_key tls_name token_file torrent tracker
    tracker_wait trackers transport trust_domain ttl unused_for upload_limit upstream upstreams version
    vouched wait wan_budget wan_hourly wan_rate working_dir world_readable writable xar xattrs yes zone zones
    """.split()  # noqa: SIM905 # a list of names would take several times the lines
)
"""What the options of all verbs are called in a configuration file. To gather them from the verbs
would take longer than most commands; a test compares."""

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


def hostnames_option(command: Command) -> Command:
    """--hostnames; the command takes `hostnames`, a tuple."""

    def parsed(ctx: click.Context, param: click.Parameter, value: str) -> tuple[str, ...]:
        names = tuple(name.strip() for name in value.split(",") if name.strip())
        if wrong := [name for name in names if not _HOSTNAME.match(name)]:
            raise UsageError(
                f"--hostnames: {wrong[0][:80]!r} is the name of no host", remedy="Write such as a.example.com"
            )
        return names

    return click.option(
        "--hostnames",
        default="",
        metavar="NAME[,NAME]",
        callback=parsed,
        help="Further names under which clients reach this server; without access control it refuses requests under other "
        "public names, with it a tracker's certificate names them.",
    )(command)


class FilePath(click.Path):
    """The path of a file; what ends as the path of a directory does (x/) is none, and would become
    a file of that name where there is no directory."""

    def __init__(self, *, dir_okay: bool = True) -> None:
        super().__init__(dir_okay=dir_okay, path_type=Path)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """The path; fails as click's types do."""
        if os.fsdecode(value).endswith(("/", "/.")):
            self.fail(f"{os.fsdecode(value)} names a directory. Name a file", param, ctx)
        return super().convert(value, param, ctx)


class OutputFile(FilePath):
    """A file that is to be written, in a directory that exists: what is to be in it may take hours.
    `-`, which other tools take for standard output, is none."""

    def __init__(self) -> None:
        super().__init__(dir_okay=False)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """The path; fails as click's types do."""
        if value == "-":
            self.fail("- is no file but standard output. Name a file; - is one as ./-", param, ctx)
        path = Path(os.fsdecode(super().convert(value, param, ctx)))
        if not path.absolute().parent.is_dir():
            self.fail(f"there is no directory {path.absolute().parent}. Make it, or name another file", param, ctx)
        return path


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


ORIGIN_URL_BYTES_MAX = 8192


def origin_options(text: str) -> Callable[[Command], Command]:
    """--origin with this help, and --origin-file, which stands for it; the command takes
    `origin`."""

    def add(command: Command) -> Command:
        command = click.option(
            "--origin-file",
            type=click.Path(path_type=Path, dir_okay=False),
            metavar="FILE",
            expose_value=False,
            callback=_read_origin,
            help="A file that holds the URL of --origin, with its password.",
        )(command)
        return click.option("--origin", default="", metavar="URL", is_eager=True, help=text)(command)

    return add


def _read_origin(context: click.Context, _: click.Parameter, file: Path | None) -> None:
    """Take the URL in --origin-file for --origin. Raises UsageError."""
    if file is None:
        return
    if context.params.get("origin"):
        raise UsageError("both --origin and --origin-file are given", remedy="Give one of them")
    try:
        text, mode = read_content(file, ORIGIN_URL_BYTES_MAX, pipe_s=PIPE_S)
        url = decoded(text).strip()
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it holds no text"
        raise UsageError(
            f"--origin-file {file} cannot be read: {why}", remedy="Name a file that holds a URL"
        ) from error
    if not url or len(text) > ORIGIN_URL_BYTES_MAX or len(url.split()) > 1:
        raise UsageError(f"--origin-file {file} holds no URL alone", remedy="Write the URL there, in one line")
    if mode & stat.S_IROTH and secrets_in(url):
        from p2pdist.cli import daemon

        daemon.EARLY.append(f"every user of this host may read the password in --origin-file {file}: chmod o= it")
    context.params["origin"] = url


def parse_rate(text: str) -> float:
    """Bytes per second of a rate, see p2pdist/model/units.py; warns of one that may be bits or
    bytes. Raises UsageError."""
    rate = units.parse_rate(text)
    if doubt := units.doubt_of_rate(text):
        import logging

        logging.getLogger(__name__).warning("%s", doubt)  # standard error, where no daemon has set up its log
    return rate


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
