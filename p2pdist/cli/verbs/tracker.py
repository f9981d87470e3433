"""`p2pdist tracker`: runs a tracker in the foreground."""

from __future__ import annotations

import asyncio
import logging
import socket
from pathlib import Path
from typing import TYPE_CHECKING

import click

from p2pdist.cli.daemon import log_options
from p2pdist.cli.options import Seconds, discovery_options, origin_options, parse_rate

if TYPE_CHECKING:
    from p2pdist.agent.discovery.links import DiscoverySettings
    from p2pdist.agent.discovery.mdns import Discovery
    from tracker.core.fleet import Fleet
    from tracker.networks import Network
    from tracker.policies import PolicyFile
    from tracker.preseed_service import PreseedService
    from tracker.service import Service

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
    "--networks",
    default="",
    metavar="CIDR[,CIDR]",
    help="Networks in which agents may be reached, such as 10.0.0.0/8 [default: anywhere].",
)
@discovery_options
@click.option("--no-discovery", is_flag=True, help="Do not announce this tracker on the local network.")
@click.option("--zone", default="", help="The zone of this tracker: agents that find it prefer one of their own.")
@click.option("--name", default="", metavar="HOST", help="The name to announce [default: its hostname].")
@log_options
def command(
    listen: str,
    origin: str,
    state: str,
    origin_streams: int,
    origin_limit: str,
    report_interval: float,
    policies: Path | None,
    networks: str,
    network_id: str,
    discovery_interface: tuple[str, ...],
    no_discovery: bool,
    zone: str,
    name: str,
) -> None:
    """Run a tracker: it decides which agent sends what to which. Data never passes through it.

    \b
    Examples:
      p2pdist tracker --listen 0.0.0.0:7070 --origin s3://packages/prod
      p2pdist tracker --origin s3://packages/prod --policies /etc/p2pdist/policies.toml
    """
    from p2pdist.cli.daemon import discovery_settings, listen_address, raise_file_limit, run
    from tracker.networks import parse_networks

    raise_file_limit()
    address, believed = listen_address(listen), parse_networks(networks)
    settings = None if no_discovery else discovery_settings(address, network_id, discovery_interface)
    discovery = _discovery(settings, name, zone) if settings is not None else None
    origin_bytes_s = parse_rate(origin_limit) if origin_limit else 0.0
    run(_serve(address, origin, state, origin_streams, origin_bytes_s, report_interval, policies, believed, discovery))


def _discovery(settings: DiscoverySettings, name: str, zone: str) -> Discovery:
    from p2pdist.agent.discovery.mdns import Discovery
    from p2pdist.core.trackerless import Announcement

    return Discovery("tracker", Announcement(settings.network, name or socket.gethostname(), zone=zone), settings)


def _policy_file(path: Path, fleet: Fleet) -> PolicyFile:
    """The policies of a file, in force. Raises UsageError."""
    from tracker.policies import PolicyFile

    file = PolicyFile(path.absolute(), fleet.policies)
    file.load()
    return file


def _follow(file: PolicyFile, service: Service, preseeds: PreseedService) -> list[asyncio.Task[None]]:
    """Keep to the file as it changes, SIGHUP or not, and warm what it says."""
    import signal

    from tracker.warm_tags import WarmTags

    asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, file.reload)
    warm_tags = WarmTags(service.fleet.policies, service.content, preseeds)
    return [asyncio.create_task(file.watch()), asyncio.create_task(warm_tags.run())]


async def _serve(
    address: tuple[str, int],
    origin_options: str,
    state: str,
    origin_streams: int,
    origin_bytes_s: float,
    report_interval_s: float,
    policies: Path | None,
    networks: tuple[Network, ...],
    discovery: Discovery | None,
) -> None:
    import time

    from p2pdist.cli.daemon import address_text, close, listen, stop_listening, until_stopped
    from p2pdist.origin.drivers import open_origin
    from tracker.content import Content
    from tracker.core.fleet import Fleet
    from tracker.http.app import make_app
    from tracker.http.connections import limit_connections
    from tracker.preseed_service import PreseedService
    from tracker.service import Service
    from tracker.state.documents import Documents
    from tracker.state.preseeds import PreseedDatabase, is_postgresql

    origin = open_origin(origin_options, serving=True) if origin_options else None
    fleet = Fleet(
        started_at=time.monotonic(),
        origin=origin_options,
        origin_streams_max=origin_streams,
        origin_bytes_s=origin_bytes_s,
        report_interval_s=report_interval_s,
    )
    policy_file = _policy_file(policies, fleet) if policies is not None else None
    documents = Documents(Path(state)) if state and not is_postgresql(state) else None
    service = Service(fleet, Content(origin, documents))
    service.networks = networks
    preseeds = service.listener = PreseedService(service, PreseedDatabase(state))
    await preseeds.load()
    app = make_app(service, preseeds)
    runner = await listen(app, address)
    limit_connections(app, runner)
    clocks = [asyncio.create_task(service.run()), asyncio.create_task(preseeds.run())]
    clocks += _follow(policy_file, service, preseeds) if policy_file is not None else []
    logger.info("listening on %s origin=%s", address_text(*address), origin.url if origin else "none")
    try:
        if discovery is not None:
            await discovery.start()
        await until_stopped()
    finally:
        if discovery is not None:
            await discovery.stop()
        await stop_listening([runner])
        for clock in clocks:
            clock.cancel()
        await close([runner])
        await preseeds.stop()
        if origin is not None:
            await origin.close()
        if documents is not None:
            documents.close()
