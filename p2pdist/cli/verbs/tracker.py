"""`p2pdist tracker`: runs a tracker in the foreground."""

from __future__ import annotations

import asyncio
import logging
import socket
from pathlib import Path
from typing import TYPE_CHECKING

import click

from p2pdist.cli.daemon import log_options
from p2pdist.cli.options import Seconds, discovery_options, hostnames_option, origin_options, parse_rate

if TYPE_CHECKING:
    from aiohttp import web

    from p2pdist.agent.discovery.links import DiscoverySettings
    from p2pdist.agent.discovery.mdns import Discovery
    from p2pdist.model.upstream import UpstreamSettings
    from tracker.access.control import AccessControl
    from tracker.core.fleet import Fleet
    from tracker.networks import Network
    from tracker.policies import PolicyFile
    from tracker.preseed_service import PreseedService
    from tracker.service import Service

OWN_ADDRESSES_MAX = 50
"""Addresses of this machine in the tracker's certificate."""

logger = logging.getLogger(__name__)


@click.command("tracker")
@click.option("--listen", default="0.0.0.0:7070", show_default=True, metavar="HOST:PORT", help="Where to answer.")
@origin_options("Central storage, which agents read under lease.")
@click.option(
    "--state",
    default="",
    metavar="DIR|URL",
    help="Where to keep preseeds and small documents over a restart; postgresql://... for several trackers.",
)
@click.option(
    "--origin-streams",
    default=64,
    show_default=True,
    type=click.IntRange(1, 100_000),
    help="Origin reads at once, over all swarms.",
)
@click.option(
    "--origin-limit",
    default="",
    metavar="RATE",
    help="What all agents together read from the origin, such as 2GB/s [default: no limit].",
)
@click.option(
    "--report-interval",
    default=0.25,
    show_default=True,
    type=Seconds(0.05, 60.0),
    metavar="SECONDS",
    help="How often agents report at most; large fleets less often.",
)
@click.option(
    "--policies",
    type=click.Path(path_type=Path, dir_okay=False),
    metavar="FILE",
    help="What holds for which packages, TOML; read again when it changes.",
)
@click.option(
    "--access",
    type=click.Path(path_type=Path, dir_okay=False),
    metavar="FILE",
    help="Rights of hosts, tokens and people, TOML; made when it is not there. Agents then join, and all speak TLS.",
)
@click.option(
    "--audit-log",
    type=click.Path(path_type=Path, dir_okay=False),
    metavar="FILE",
    help="Where to write joins, refusals and changes [default: the log].",
)
@click.option(
    "--probe-listen",
    default="",
    metavar="HOST:PORT",
    help="Where /healthz, /readyz and /metrics answer without TLS and tokens.",
)
@click.option(
    "--networks",
    default="",
    metavar="CIDR[,CIDR]",
    help="Networks in which agents may be reached, such as 10.0.0.0/8 [default: anywhere].",
)
@click.option(
    "--upstream",
    "named_upstreams",
    multiple=True,
    metavar="NAME[=URL]",
    help="A registry whose images agents may pull through each other, such as docker.io; may be repeated.",
)
@click.option(
    "--upstreams",
    "upstreams_file",
    type=click.Path(path_type=Path, dir_okay=False),
    metavar="FILE",
    help="Such registries with their settings and credentials, TOML.",
)
@discovery_options
@click.option("--no-discovery", is_flag=True, help="Do not announce this tracker on the local network.")
@click.option("--zone", default="", help="The zone of this tracker: agents that find it prefer one of their own.")
@click.option("--name", default="", metavar="HOST", help="The name to announce [default: its hostname].")
@hostnames_option
@log_options
def command(
    listen: str,
    origin: str,
    state: str,
    origin_streams: int,
    origin_limit: str,
    report_interval: float,
    policies: Path | None,
    access: Path | None,
    audit_log: Path | None,
    probe_listen: str,
    networks: str,
    named_upstreams: tuple[str, ...],
    upstreams_file: Path | None,
    network_id: str,
    discovery_interface: tuple[str, ...],
    no_discovery: bool,
    zone: str,
    name: str,
    hostnames: tuple[str, ...],
) -> None:
    """Run a tracker: it decides which agent sends what to which. Data never passes through it.

    \b
    Examples:
      p2pdist tracker --listen 0.0.0.0:7070 --origin s3://packages/prod
      p2pdist tracker --origin s3://packages/prod --policies /etc/p2pdist/policies.toml
      p2pdist tracker --origin s3://packages/prod --access /etc/p2pdist/access.toml
      p2pdist tracker --upstream docker.io --upstream registry.example.org:5000
    """
    from p2pdist.cli.daemon import discovery_settings, listen_address, raise_file_limit, run
    from tracker.networks import parse_networks
    from tracker.upstreams.settings import all_upstreams

    raise_file_limit()
    address, believed = listen_address(listen), parse_networks(networks)
    settings = None if no_discovery else discovery_settings(address, network_id, discovery_interface)
    discovery = _discovery(settings, name, zone, tls=access is not None) if settings is not None else None
    origin_bytes_s = parse_rate(origin_limit) if origin_limit else 0.0
    probes = listen_address(probe_listen) if probe_listen else None
    control = _access_control(address, access, audit_log, hostnames, believed, state) if access is not None else None
    if control is None:
        _warn_of_strangers(address[0])
    limits = origin_streams, origin_bytes_s, report_interval
    upstreams = all_upstreams(named_upstreams, upstreams_file)
    sources = origin, upstreams
    run(_serve((address, probes), hostnames, sources, state, limits, policies, control, believed, discovery))


def _access_control(
    address: tuple[str, int],
    path: Path,
    audit_log: Path | None,
    hostnames: tuple[str, ...],
    networks: tuple[Network, ...],
    state: str,
) -> AccessControl:
    """Access by a file, in force. Raises UsageError."""
    import sys

    from tracker.access.audit import audit_to
    from tracker.access.control import AccessControl

    if audit_log is not None:
        audit_to(audit_log.absolute())
    control = AccessControl(path, [*own_addresses(address[0]), *hostnames], networks=networks, state=state)
    for token in control.made:
        shown = f": {token.read_text().strip()}" if sys.stdout.isatty() else ""
        logger.info("hosts join with the token in %s", token)
        click.echo(f"join token in {token}{shown}")
    name = socket.gethostname() if address[0] in ("0.0.0.0", "::") else address[0]
    logger.info("on each host: p2pdist agent --tracker https://%s:%d --join-file FILE", name, address[1])
    return control


def own_addresses(host: str) -> list[str]:
    """The names and addresses under which clients may reach a service that listens on `host`; of
    many addresses some."""
    import re

    import ifaddr

    from p2pdist.agent.tracker.address import address_of

    own = [address_of(entry)[0] for adapter in ifaddr.get_adapters() for entry in adapter.ips]
    listed = [str(address) for address in own if not address.is_link_local][:OWN_ADDRESSES_MAX]
    names = [name for name in ("localhost", socket.gethostname()) if re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9.-]*", name)]
    return [*names, *([] if host in ("0.0.0.0", "::", "") else [host]), *listed]


def _warn_of_strangers(host: str) -> None:
    from p2pdist.model.address import on_this_machine

    if not on_this_machine(host):
        logger.warning(
            "access control is off: any client that reaches this port can order preseeds, read packages and act as any host. "
            "Start the tracker with --access FILE to change that"
        )


def _discovery(settings: DiscoverySettings, name: str, zone: str, *, tls: bool) -> Discovery:
    from p2pdist.agent.discovery.mdns import Discovery
    from p2pdist.core.trackerless import Announcement

    own = Announcement(settings.network, name or socket.gethostname(), zone=zone, tls=tls)
    return Discovery("tracker", own, settings)


def _policy_file(path: Path, fleet: Fleet) -> PolicyFile:
    """The policies of a file, in force. Raises UsageError."""
    from tracker.policies import PolicyFile

    file = PolicyFile(path.absolute(), fleet.policies)
    file.load()
    return file


def _follow(
    file: PolicyFile | None, access: AccessControl | None, service: Service, preseeds: PreseedService
) -> list[asyncio.Task[None]]:
    """Keep to the files as they change, SIGHUP or not, and warm what the policies say."""
    import signal

    from tracker.warm_tags import WarmTags

    followed = [each for each in (file, access) if each is not None]

    def reload() -> None:
        for each in followed:
            each.reload()

    if followed:
        asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, reload)
    tasks = [asyncio.create_task(each.watch()) for each in followed]
    if file is not None:
        tasks.append(asyncio.create_task(WarmTags(service.fleet.policies, service.content, preseeds).run()))
    return tasks


async def _listen(
    addresses: tuple[tuple[str, int], tuple[str, int] | None],
    app: web.Application,
    access: AccessControl | None,
) -> list[web.AppRunner]:
    """Answer at the tracker's address, and at that for probes."""
    from p2pdist.cli.daemon import listen
    from tracker.http.app import make_probe_app
    from tracker.http.sessions import HANDSHAKE_S_MAX, connection_book

    address, probes = addresses
    tls, book = access.tls.context if access is not None else None, connection_book()
    runners = [await listen(app, address, tls=tls, connections=book, handshake_s=HANDSHAKE_S_MAX)]
    if probes is not None:
        runners.append(await listen(make_probe_app(app), probes))
    return runners


def _fleet(origin: str, origin_streams_max: int, origin_bytes_s: float, report_interval_s: float) -> Fleet:
    import time

    from tracker.core.fleet import Fleet

    return Fleet(
        started_at=time.monotonic(),
        origin=origin,
        origin_streams_max=origin_streams_max,
        origin_bytes_s=origin_bytes_s,
        report_interval_s=report_interval_s,
    )


async def _serve(
    addresses: tuple[tuple[str, int], tuple[str, int] | None],
    hostnames: tuple[str, ...],
    sources: tuple[str, tuple[UpstreamSettings, ...]],
    state: str,
    limits: tuple[int, float, float],
    policies: Path | None,
    access: AccessControl | None,
    networks: tuple[Network, ...],
    discovery: Discovery | None,
) -> None:
    from p2pdist.cli.daemon import close, stop_listening, until_stopped
    from p2pdist.model.address import address_text
    from p2pdist.origin.drivers import open_origin
    from tracker.content import Content
    from tracker.http.app import make_app
    from tracker.preseed_service import PreseedService
    from tracker.service import Service
    from tracker.state.database import is_postgresql
    from tracker.state.documents import Documents
    from tracker.state.preseeds import PreseedDatabase
    from tracker.state.traces import TraceRecords
    from tracker.traces import Traces
    from tracker.upstreams.upstreams import Upstreams

    origin_url, settings = sources
    origin = open_origin(origin_url, serving=True) if origin_url else None
    fleet = _fleet(origin_url, *limits)
    policy_file = _policy_file(policies, fleet) if policies is not None else None
    documents = Documents(Path(state)) if state and not is_postgresql(state) else None
    upstreams = Upstreams(settings, documents)
    service = Service(fleet, Content(origin, documents), access=access, upstreams=upstreams)
    service.networks, service.listener = networks, (preseeds := PreseedService(service, PreseedDatabase(state)))
    service.traces = Traces(TraceRecords(state) if state else None)
    await preseeds.load()
    runners = await _listen(addresses, make_app(service, preseeds, hostnames=(addresses[0][0], *hostnames)), access)
    clocks = [asyncio.create_task(service.run()), asyncio.create_task(preseeds.run())]
    clocks += _follow(policy_file, access, service, preseeds)
    logger.info("listening on %s origin=%s", address_text(*addresses[0]), origin.url if origin else "none")
    try:
        if discovery is not None:
            await discovery.start()
        await until_stopped()
    finally:
        if discovery is not None:
            await discovery.stop()
        await stop_listening(runners)
        for clock in clocks:
            clock.cancel()
        await close(runners)
        await preseeds.stop()
        await upstreams.close()
        if origin is not None:
            await origin.close()
        service.traces.close()
        if documents is not None:
            documents.close()
        if access is not None:
            access.joins.close()
