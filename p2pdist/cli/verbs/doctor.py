"""`p2pdist doctor`: looks for what would keep this host from working, and says what to do about
it."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from p2pdist.cli import output
from p2pdist.cli.services import socket_option, tracker_option
from p2pdist.model.errors import P2PDistError, printable
from p2pdist.model.url import tracker_urls

if TYPE_CHECKING:
    from p2pdist.cli.diagnosis import Finding

LISTEN, STORE = "0.0.0.0:7071", "/var/lib/p2pdist"
MARKS = {"ok": ("ok", "green"), "warning": ("warning", "yellow"), "failed": ("FAILED", "red")}


@click.command("doctor")
@tracker_option
@click.option(
    "--listen",
    default=LISTEN,
    show_default=f"that of the agent on the socket, else {LISTEN}",
    metavar="HOST:PORT",
    help="Where the agent listens.",
)
@click.option(
    "--store",
    default=STORE,
    show_default=f"that of the agent on the socket, else {STORE}",
    type=click.Path(path_type=Path),
    help="Its store.",
)
@click.option("--origin", default="", metavar="URL", help="Central storage: see whether this host can read it.")
@click.option(
    "--policies",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Look at a tracker's policies instead, and name every mistake in them.",
)
@click.option(
    "--image",
    default="",
    metavar="REF",
    help="A small image that container runtimes pull, to see whether they ask the mirror [default: one of Docker Hub, or none].",
)
@socket_option
@output.json_option
def command(
    tracker: str, listen: str, store: Path, origin: str, policies: Path | None, image: str, socket: Path, as_json: bool
) -> int:
    """Look at this host as an agent would need it: clock, ports, mounts, origin, disk, versions,
    tracker, whether others reach its agent, and whether the container runtimes that `p2pdist mirror
    install` set up ask it. --tracker, --listen, --store, --origin and their variables are those of
    the agent. Ends with 1 when something fails; warnings say what will be slower or less
    convenient. Tracker, port and store are those of the agent on the socket, unless options name
    others.

    \b
    Examples:
      p2pdist doctor --tracker http://tracker:7070 --origin s3://packages/prod
      p2pdist doctor --policies /etc/p2pdist/policies.toml
    """
    if policies is not None:
        findings = _policies(policies)
    else:
        tracker, where, store = _of_agent(tracker, listen, store, socket)
        findings = asyncio.run(_check(tracker, where, store.absolute(), origin, image, socket.absolute()))
    failed = any(finding.state == "failed" for finding in findings)
    if as_json:
        output.print_json({"ok": not failed, "checks": findings})
    else:
        for finding in findings:
            _print(finding)
    return int(failed)


def _of_agent(tracker: str, listen: str, store: Path, socket: Path) -> tuple[str, str | None, Path]:
    """Where to look: at the tracker, port and store of the agent that answers, where neither the
    user nor the settings name others. No port where it gives out an address that is not this
    host's: where it listens is not known, and whether others reach it is looked at all the same."""
    from p2pdist.agent.api.client import LocalClient
    from p2pdist.cli.diagnosis import ANSWER_S, why_taken
    from p2pdist.model.address import host_part

    context = click.get_current_context()
    given = {"tracker": tracker, "listen": listen, "store": str(store)}
    default = [name for name in given if context.get_parameter_source(name) is click.core.ParameterSource.DEFAULT]
    if default:
        try:
            status = LocalClient(socket, answer_s=ANSWER_S).status()
        except P2PDistError:
            return tracker, listen, store  # a finding says why
        url, path = (status.get("tracker") or {}).get("url"), (status.get("store") or {}).get("path")
        said = {"tracker": url, "listen": status.get("address"), "store": path}
        # Of an agent that has no tracker the URL is empty: then none is asked.
        given |= {name: str(said[name]) for name in default if said[name] or (name == "tracker" and url == "")}
        if "listen" in default and said["listen"] and why_taken(host_part(given["listen"]), 0):
            return given["tracker"], None, Path(given["store"])
    return given["tracker"], given["listen"], Path(given["store"])


async def _check(tracker: str, listen: str | None, store: Path, origin: str, image: str, socket: Path) -> list[Finding]:
    from p2pdist.cli import diagnosis
    from p2pdist.cli.daemon import listen_address
    from p2pdist.cli.runtimes import check

    urls = tracker_urls(tracker.split(","))
    addresses = [] if listen is None else [listen_address(listen)]
    parts: list[Any] = await asyncio.gather(
        diagnosis.checked("versions", asyncio.to_thread(diagnosis.versions)),
        diagnosis.checked("tracker", diagnosis.trackers(urls)),
        *(diagnosis.checked("port", diagnosis.port(address)) for address in addresses),
        diagnosis.checked("agent", diagnosis.agent(socket)),
        diagnosis.checked("reachability", diagnosis.reachability(socket, urls)),
        diagnosis.checked("origin", diagnosis.origin(origin)),
        diagnosis.checked("store", asyncio.to_thread(diagnosis.store, store)),
        diagnosis.checked("mounts", asyncio.to_thread(diagnosis.mounts, store)),
        diagnosis.checked("mirror", asyncio.to_thread(check.mirrors, socket, (), image)),
    )
    return [finding for part in parts for finding in part]


def _policies(path: Path) -> list[Finding]:
    from p2pdist.cli import diagnosis

    return diagnosis.policies(path)


def _print(finding: Finding) -> None:
    word, colour = MARKS[finding.state]
    plain = bool(os.environ.get("NO_COLOR")) or os.environ.get("TERM", "").lower() in output.DUMB
    click.echo(
        f"{click.style(f'{word:8}', fg=None if plain else colour, reset=not plain)} {finding.name:16} {printable(finding.detail)}"
    )
    if finding.remedy:
        click.echo(f"{'':8} {'':16} {printable(finding.remedy)}")
