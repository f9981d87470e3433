"""`p2pdist tracker`: runs a tracker in the foreground."""

from __future__ import annotations

import asyncio
import logging
import signal
import socket
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import click

from p2pdist.cli.daemon import log_options
from p2pdist.cli.options import Seconds, discovery_options, hostnames_option, origin_options, parse_rate
from p2pdist.model.errors import UsageError

if TYPE_CHECKING:
    from aiohttp import web

    from p2pdist.agent.discovery.links import DiscoverySettings
    from p2pdist.agent.discovery.mdns import Discovery
    from p2pdist.model.upstream import UpstreamSettings
    from tracker.access.control import AccessControl
    from tracker.callbacks import CallbackSettings
    from tracker.cluster.siblings import Siblings
    from tracker.core.fleet import Fleet
    from tracker.history.recorder import HistoryRecorder
    from tracker.hosts.drains import Drains
    from tracker.networks import Network
    from tracker.policies import PolicyFile
    from tracker.preseed_service import PreseedService
    from tracker.service import Service
    from tracker.state.documents import Documents
    from tracker.state.preseeds import PreseedDatabase
    from tracker.traces import Traces
    from tracker.upstreams.hubs import Hubs
    from tracker.upstreams.settings import UpstreamsFile
    from tracker.upstreams.upstreams import Upstreams

OWN_ADDRESSES_MAX = 50
"""Addresses of this machine in the tracker's certificate."""

logger = logging.getLogger(__name__)


def _read_callbacks(ctx: click.Context, param: click.Parameter, path: Path | None) -> CallbackSettings | None:
    """The settings in the file of --callbacks. Raises UsageError."""
    from tracker.callbacks import read_callbacks

    return read_callbacks(path.absolute()) if path is not None else None


def _checked_state(ctx: click.Context, param: click.Parameter, where: str) -> str:
    """The --state: a directory, or the URL of a PostgreSQL. A URL of another kind would name a
    directory, and this tracker would share nothing. Raises UsageError."""
    from p2pdist.model.url import redacted
    from tracker.state.database import is_postgresql

    if "://" in where and not is_postgresql(where):
        raise UsageError(
            f"--state {redacted(where)} is of no database that trackers use",
            remedy="Write postgresql://user@host/name, or the path of a directory",
        )
    return where


@click.command("tracker")
@click.option("--listen", default="0.0.0.0:7070", show_default=True, metavar="HOST:PORT", help="Where to answer.")
@origin_options("Central storage, which agents read under lease.")
@click.option(
    "--state",
    default="",
    metavar="DIR|URL",
    callback=_checked_state,
    help="Where to keep preseeds, joins, drains, history, traces and small documents over a restart; postgresql://... for "
    "several trackers.",
)
@click.option(
    "--origin-streams",
    default=64,
    show_default=True,
    type=click.IntRange(1, 100_000),
    help="Origin reads at once, over all swarms; hosts that nobody else can serve may add a few.",
)
@click.option(
    "--origin-site",
    "origin_sites",
    multiple=True,
    metavar="SITE",
    help="A site whose hosts read the origin, the others receive from it; may be repeated [default: all sites].",
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
    "--hub",
    default="",
    metavar="URL",
    help="A Hugging Face hub whose models and data sets agents may pull through each other, such as huggingface.co.",
)
@click.option(
    "--upstreams",
    "upstreams_file",
    type=click.Path(path_type=Path, dir_okay=False),
    metavar="FILE",
    help="Such registries with their settings and credentials, TOML.",
)
@click.option(
    "--callbacks",
    type=click.Path(path_type=Path, dir_okay=False),
    metavar="FILE",
    callback=_read_callbacks,
    help="Where callbacks of preseeds may lead, and the key that signs them, TOML  [default: nowhere].",
)
@discovery_options
@click.option("--no-discovery", is_flag=True, help="Do not announce this tracker on the local network.")
@click.option("--zone", default="", help="The zone of this tracker: agents that find it prefer one of their own.")
@click.option("--name", default="", metavar="HOST", help="The name to announce [default: its hostname].")
@hostnames_option
@click.option(
    "--advertise",
    default="",
    metavar="HOST:PORT",
    help="Where agents and other trackers reach this one, with a PostgreSQL --state [default: the address of --listen].",
)
@click.option(
    "--alone",
    is_flag=True,
    help="Do not share the blobs with the other trackers on a PostgreSQL --state, only preseeds.",
)
@log_options
def command(
    listen: str,
    origin: str,
    state: str,
    origin_streams: int,
    origin_sites: tuple[str, ...],
    origin_limit: str,
    report_interval: float,
    policies: Path | None,
    access: Path | None,
    audit_log: Path | None,
    probe_listen: str,
    networks: str,
    named_upstreams: tuple[str, ...],
    hub: str,
    upstreams_file: Path | None,
    callbacks: CallbackSettings | None,
    network_id: str,
    discovery_interface: tuple[str, ...],
    no_discovery: bool,
    zone: str,
    name: str,
    hostnames: tuple[str, ...],
    advertise: str,
    alone: bool,
) -> None:
    """Run a tracker: it decides which agent sends what to which. Data never passes through it.

    \b
    Examples:
      p2pdist tracker --listen 0.0.0.0:7070 --origin s3://packages/prod
      p2pdist tracker --origin s3://packages/prod --policies /etc/p2pdist/policies.toml
      p2pdist tracker --origin s3://packages/prod --access /etc/p2pdist/access.toml
      p2pdist tracker --upstream docker.io --upstream registry.example.org:5000
      p2pdist tracker --hub huggingface.co
      p2pdist tracker --state postgresql://tracker@db/p2pdist --advertise 10.0.0.5:7070
    """
    from p2pdist.cli.daemon import discovery_settings, give_memory_back, listen_address, raise_file_limit, run
    from p2pdist.model.hub import hub_url
    from tracker.networks import parse_networks
    from tracker.upstreams.settings import all_upstreams

    raise_file_limit()
    give_memory_back()
    signal.signal(signal.SIGHUP, signal.SIG_IGN)  # until there is something to read again
    address, believed = listen_address(listen, example="0.0.0.0:7070"), parse_networks(networks)
    settings = None if no_discovery else discovery_settings(address, network_id, discovery_interface)
    discovery = _discovery(settings, name, zone, tls=access is not None) if settings is not None else None
    origin_bytes_s = parse_rate(origin_limit) if origin_limit else 0.0
    probes = listen_address(probe_listen, "--probe-listen", "127.0.0.1:7072") if probe_listen else None
    part = _cluster_part(address, state, advertise, tls=access is not None) if not alone else None
    hostnames += (part.name,) if part is not None else ()
    control = _access_control(address, access, audit_log, hostnames, believed, state) if access is not None else None
    if control is None:
        _warn_of_strangers(address[0], audit_log)
    limits = origin_streams, origin_bytes_s, report_interval, frozenset(origin_sites)
    kept, named = (state, callbacks), (named_upstreams, upstreams_file)
    sources = origin, all_upstreams(*named), named, hub and hub_url(hub)
    run(_serve((address, probes), hostnames, sources, kept, part, limits, policies, control, believed, discovery))


@dataclass(frozen=True, slots=True)
class _ClusterPart:
    """How this tracker is known to the others on its database: its id, the host at which it is
    reached, and its URL."""

    id: str
    name: str
    url: str


def _cluster_part(address: tuple[str, int], state: str, advertise: str, *, tls: bool) -> _ClusterPart | None:
    """This tracker's part in the cluster on its database; None where it has no PostgreSQL. Raises
    UsageError."""
    import re

    from p2pdist.agent.tracker.address import address_for_others
    from p2pdist.cli.daemon import listen_address
    from p2pdist.model.address import address_text
    from tracker.state.database import is_postgresql

    if not is_postgresql(state):
        if advertise:
            raise UsageError(
                "--advertise is for trackers that share a database", remedy="Give --state postgresql://..."
            )
        return None
    host, port = listen_address(advertise, "--advertise", "tracker:7070") if advertise else address
    if host in ("0.0.0.0", "::"):
        host = address_for_others("127.0.0.1" if host == "0.0.0.0" else "::1", host)
    text = address_text(host, port)
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", text).strip("-._")[:63]
    return _ClusterPart(name, host, f"{'https' if tls else 'http'}://{text}")


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

    from p2pdist.transfer.audit import audit_to
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


def _warn_of_strangers(host: str, audit_log: Path | None) -> None:
    from p2pdist.model.address import on_this_machine

    if audit_log is not None:
        logger.warning("nothing is written to --audit-log %s: it is kept with --access FILE", audit_log)
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

    file = PolicyFile(path.absolute(), fleet.policies, fleet.history.changed)
    file.load()
    return file


def _follow(
    file: PolicyFile | None,
    access: AccessControl | None,
    upstreams: UpstreamsFile | None,
    service: Service,
    preseeds: PreseedService,
) -> list[asyncio.Task[None]]:
    """Keep to the files as they change, SIGHUP or not, and warm what the policies say."""
    from tracker.warm_tags import WarmTags

    followed = [each for each in (file, access, upstreams) if each is not None]

    def reload() -> None:
        if not followed:
            logger.info("SIGHUP: there are no files to read again")
        for each in followed:
            each.reload()

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
        runners.append(await listen(make_probe_app(app), probes, option="--probe-listen"))
    return runners


def _fleet(
    origin: str,
    origin_streams_max: int,
    origin_bytes_s: float,
    report_interval_s: float,
    origin_sites: frozenset[str] = frozenset(),
) -> Fleet:
    import time

    from tracker.core.fleet import Fleet
    from tracker.core.planning.planner import Planner

    return Fleet(
        started_at=time.monotonic(),
        origin=origin,
        origin_streams_max=origin_streams_max,
        origin_bytes_s=origin_bytes_s,
        report_interval_s=report_interval_s,
        planner=Planner(origin_sites=origin_sites),
    )


async def _join_cluster(
    part: _ClusterPart | None,
    state: str,
    service: Service,
    access: AccessControl | None,
    addresses: tuple[tuple[str, int] | None, ...] = (),
) -> Siblings | None:
    """The other trackers, once this one has a place among them; None where it is alone. Raises
    Unavailable, and Conflict where they have another authority or one of its own `addresses` is
    taken: a tracker that was started twice would take the place of the one that runs, and end."""
    import secrets

    from p2pdist.cli.daemon import require_free
    from tracker.cluster.cluster import Cluster
    from tracker.cluster.membership import MembershipDatabase
    from tracker.cluster.siblings import Siblings

    if part is None:
        return None
    for address, option in zip(addresses, ("--listen", "--probe-listen"), strict=False):
        if address is not None:
            await require_free(address, option)

    def authorities() -> list[str]:
        return [each.fingerprint for each in access.state.authorities] if access is not None else []

    words = (state, part.id, (part.url,), secrets.token_hex(8), authorities)
    database = await asyncio.to_thread(MembershipDatabase, *words)
    cluster = Cluster(database, service)
    service.heard_epoch = cluster.heard
    await cluster.start()
    return Siblings(cluster, (lambda: access.tls.client) if access is not None else None)


async def _until_stopped(siblings: Siblings | None) -> None:
    """Return when this process is to end, and the other trackers have its blobs."""
    from p2pdist.cli.daemon import READY, STOPPING, notify_manager, notify_watchdog, until_stopped

    watchdog = asyncio.create_task(notify_watchdog())
    notify_manager(READY)
    await until_stopped()
    watchdog.cancel()
    notify_manager(STOPPING)
    if siblings is not None:
        await siblings.cluster.hand_over()


async def _leave_cluster(siblings: Siblings | None) -> None:
    if siblings is not None:
        await siblings.close()
        await siblings.cluster.stop()


def _history(state: str, part: _ClusterPart | None, fleet: Fleet) -> HistoryRecorder:
    from tracker.history.recorder import HistoryRecorder
    from tracker.state.history import HistoryDatabase

    return HistoryRecorder(fleet.history, HistoryDatabase(state, part.id if part is not None else ""))


def _remember(service: Service, preseeds: PreseedService, drains: Drains, where: str) -> list[asyncio.Task[None]]:
    """Keep what happens in the fleet, and what operators had its hosts do."""
    from importlib.metadata import version

    from tracker.history.preseeds import FailedPreseeds

    service.fleet.history.changed(f"p2pdist {version('p2pdist')} has started at {where}")
    failed = FailedPreseeds(preseeds, service.fleet.history)
    return [asyncio.create_task(part) for part in (service.history.run(), failed.run(), drains.run())]


def _tell(
    preseeds: PreseedService, database: PreseedDatabase, settings: CallbackSettings | None
) -> list[asyncio.Task[None]]:
    """Tell of the ends of preseeds, where callbacks are allowed."""
    from tracker.callbacks import Callbacks

    if settings is None:
        return []
    preseeds.check_callback = settings.check
    return [asyncio.create_task(Callbacks(preseeds, database, settings).run())]


def _traces(state: str) -> Traces:
    from tracker.state.traces import TraceRecords
    from tracker.traces import Traces

    return Traces(TraceRecords(state) if state else None)


def _hubs(url: str, documents: Documents | None) -> Hubs:
    from tracker.upstreams.hubs import Hubs

    return Hubs(url, documents)


async def _leave_state(
    service: Service, preseeds: PreseedService, documents: Documents | None, access: AccessControl | None
) -> None:
    """Write what is to outlive this process, and leave its databases."""
    await preseeds.stop()
    await service.history.stop()
    service.traces.close()
    if documents is not None:
        documents.close()
    if access is not None:
        access.joins.close()


def _upstreams_file(
    named: tuple[str, ...], path: Path | None, upstreams: Upstreams, changed: Callable[[str], None]
) -> UpstreamsFile | None:
    from tracker.upstreams.settings import UpstreamsFile

    async def replace(settings: tuple[UpstreamSettings, ...]) -> None:
        await upstreams.replace(settings)
        changed(f"the upstreams {', '.join(upstream.name for upstream in settings) or '(none)'} hold")

    return UpstreamsFile(named, path, replace) if path is not None else None


def _documents(state: str) -> Documents | None:
    from tracker.state.database import is_postgresql
    from tracker.state.documents import Documents

    return Documents(Path(state)) if state and not is_postgresql(state) else None


async def _serve(
    addresses: tuple[tuple[str, int], tuple[str, int] | None],
    hostnames: tuple[str, ...],
    sources: tuple[str, tuple[UpstreamSettings, ...], tuple[tuple[str, ...], Path | None], str],
    kept: tuple[str, CallbackSettings | None],
    part: _ClusterPart | None,
    limits: tuple[int, float, float, frozenset[str]],
    policies: Path | None,
    access: AccessControl | None,
    networks: tuple[Network, ...],
    discovery: Discovery | None,
) -> None:
    from p2pdist.cli.daemon import close, stop_listening
    from p2pdist.model.address import address_text
    from p2pdist.origin.drivers import open_origin
    from tracker.content import Content
    from tracker.http.app import make_app
    from tracker.http.hosts import drains_of
    from tracker.preseed_service import PreseedService
    from tracker.service import Service
    from tracker.state.preseeds import PreseedDatabase
    from tracker.upstreams.upstreams import Upstreams

    (origin_url, settings, (named, upstreams_path), hub), (state, callbacks) = sources, kept
    origin = open_origin(origin_url, serving=True) if origin_url else None
    fleet = _fleet(origin_url, *limits)
    policy_file = _policy_file(policies, fleet) if policies is not None else None
    documents = _documents(state)
    upstreams, hubs = Upstreams(settings, documents), _hubs(hub, documents)
    service = Service(fleet, Content(origin, documents), access=access, upstreams=upstreams, hubs=hubs)
    database, drains = PreseedDatabase(state), drains_of(service, state)
    service.networks, service.listener = networks, (preseeds := PreseedService(service, database))
    service.traces, service.history = _traces(state), _history(state, part, fleet)
    await asyncio.gather(preseeds.load(), drains.load())
    siblings = await _join_cluster(part, state, service, access, addresses)
    app = make_app(service, preseeds, hostnames=(addresses[0][0], *hostnames), siblings=siblings, drains=drains)
    runners = await _listen(addresses, app, access)
    clocks = [asyncio.create_task(part) for part in (service.run(), preseeds.run(), service.content.watch.run())]
    clocks += _remember(service, preseeds, drains, address_text(*addresses[0])) + _tell(preseeds, database, callbacks)
    clocks += [asyncio.create_task(siblings.cluster.run())] if siblings is not None else []
    clocks += _follow(
        policy_file, access, _upstreams_file(named, upstreams_path, upstreams, fleet.history.changed), service, preseeds
    )
    logger.info("listening on %s origin=%s", address_text(*addresses[0]), origin.url if origin else "none")
    try:
        if discovery is not None:
            await discovery.start()
        await _until_stopped(siblings)
    finally:
        if discovery is not None:
            await discovery.stop()
        await stop_listening(runners)
        for clock in clocks:
            clock.cancel()
        await _leave_cluster(siblings)
        await close(runners)
        await asyncio.gather(upstreams.close(), hubs.close())
        if origin is not None:
            await origin.close()
        await asyncio.gather(_leave_state(service, preseeds, documents, access), drains.close())
