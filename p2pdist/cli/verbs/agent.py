"""`p2pdist agent`: runs the agent of this host in the foreground."""

from __future__ import annotations

import functools
import logging
import socket as sockets
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias, TypedDict, TypeVar, cast

import click

from p2pdist.cli.daemon import discovery_settings, listen_address, log_options, run, set_level
from p2pdist.cli.main import read_again
from p2pdist.cli.options import Seconds, discovery_options, hostnames_option, origin_options, parse_rate
from p2pdist.model.address import address_text
from p2pdist.model.errors import Conflict, P2PDistError, UsageError
from p2pdist.model.image import MIRROR_PORT
from p2pdist.model.units import parse_size
from p2pdist.model.upstream import parse_upstream, unique
from p2pdist.model.url import tracker_urls

if TYPE_CHECKING:
    import ssl

    from aiohttp import web

    from p2pdist.agent.access.spiffe import SpiffeSettings
    from p2pdist.agent.agent import Agent, AgentSettings
    from p2pdist.agent.bittorrent.service import SwarmSettings
    from p2pdist.agent.buckets.settings import S3Settings
    from p2pdist.agent.discovery.links import DiscoverySettings
    from p2pdist.agent.lazy.views import LazySettings
    from p2pdist.core.transport import Policy
    from p2pdist.transfer.connections import ConnectionBook
    from p2pdist.transfer.tls import TlsFiles

Function = TypeVar("Function", bound=Callable[..., Any])
File = click.Path(path_type=Path, dir_okay=False)

MIRROR_ADDRESS = f"127.0.0.1:{MIRROR_PORT}"

logger = logging.getLogger(__name__)


Reached: TypeAlias = "tuple[tuple[str, int], tuple[str, ...], DiscoverySettings | None]"
"""Where an agent listens, the trackers that were named, and how others are discovered."""


def _reaching(command: Function) -> Function:
    """The command gets `reached` for the options that say how agent, trackers and neighbours reach
    each other."""

    @functools.wraps(command)
    def resolved(
        *args: Any,
        listen: str,
        tracker: str,
        discover: bool | None,
        network_id: str,
        discovery_interface: tuple[str, ...],
        **more: Any,
    ) -> Any:
        return command(*args, reached=_reached(listen, tracker, discover, network_id, discovery_interface), **more)

    return resolved  # type: ignore[return-value]


def _reached(
    listen: str, trackers: str, discover: bool | None, network_id: str, interfaces: tuple[str, ...]
) -> Reached:
    """Where the agent listens, the trackers that were named, and how others are discovered: where
    none was named, or where that was asked for."""
    address, urls = listen_address(listen), tuple(tracker_urls(trackers.split(",")))
    discovers = not urls if discover is None else discover
    return address, urls, discovery_settings(address, network_id, interfaces) if discovers else None


def lazy_options(command: Function) -> Function:
    """--lazy-wait and --lazy-way. The command gets `lazy`."""

    @functools.wraps(command)
    def configured(*args: Any, lazy_wait: float, lazy_way: tuple[str, ...], **more: Any) -> Any:
        from p2pdist.agent.lazy.views import LazySettings

        return command(*args, lazy=LazySettings(lazy_wait, lazy_way), **more)

    wrapped: Any = configured
    for option in (
        click.option(
            "--lazy-way",
            multiple=True,
            type=click.Choice(["fanotify", "fuse"]),
            help="Fill lazy views in this way only; may be given again [default: the first that works here].",
        ),
        click.option(
            "--lazy-wait",
            default=60.0,
            show_default=True,
            type=Seconds(0.1, 86400.0),
            metavar="SECONDS",
            help="How long a read of a lazy view waits for its bytes; then it fails with EIO.",
        ),
    ):
        wrapped = option(wrapped)
    return wrapped  # type: ignore[no-any-return]


@dataclass(frozen=True, slots=True)
class Doors:
    """Where an agent listens besides the port for other agents and its socket; None: nowhere."""

    probe: tuple[str, int] | None
    mirror: tuple[str, int] | None
    s3: tuple[tuple[str, int], S3Settings] | None


def s3_options(command: Function) -> Function:
    """--s3, --bucket and --s3-settings. The command gets `doors` for these, --probe-listen and
    --mirror. Raises UsageError."""

    @functools.wraps(command)
    def served(
        *args: Any,
        probe_listen: str,
        mirror: str,
        s3: str,
        bucket: tuple[str, ...],
        s3_settings: Path | None,
        **more: Any,
    ) -> Any:
        probe, mirrored = _host_address("--probe-listen", probe_listen), _loopback_address("--mirror", mirror)
        return command(*args, doors=Doors(probe, mirrored, _s3(s3, bucket, s3_settings)), **more)

    wrapped: Any = served
    for option in (
        click.option(
            "--s3-settings",
            type=File,
            help="More buckets, and access keys with which requests must be signed then: TOML tables [[bucket]] and [[key]].",
        ),
        click.option(
            "--bucket",
            multiple=True,
            metavar="NAME=PACKAGE:TAG",
            help="A bucket with the files of a package (of trees); may be repeated.",
        ),
        click.option(
            "--s3",
            default="",
            metavar="[127.0.0.1:]PORT",
            help="Where programs on this host read packages and blobs as from S3, without TLS; on loopback alone [default: nowhere].",
        ),
    ):
        wrapped = option(wrapped)
    return wrapped  # type: ignore[no-any-return]


def _s3(text: str, buckets: tuple[str, ...], file: Path | None) -> tuple[tuple[str, int], S3Settings] | None:
    from p2pdist.agent.buckets.settings import s3_settings

    address = _loopback_address("--s3", text)
    if address is None:
        if buckets or file is not None:
            raise UsageError("--bucket and --s3-settings are of no use without a port", remedy="Give --s3 7074, too")
        return None
    settings = s3_settings(buckets, file)
    if not settings.buckets:
        raise UsageError("there is no bucket to serve", remedy="Give --bucket NAME=PACKAGE:TAG, or --s3-settings")
    return address, settings


_CERTIFICATE_OPTIONS = (
    click.option(
        "--trust-domain",
        default="",
        metavar="NAME",
        help="The trust domain that --spiffe must give [default: that of the first SVID].",
    ),
    click.option(
        "--spiffe",
        is_flag=False,
        flag_value="",
        default=None,
        metavar="[ADDRESS]",
        help="Take this host's certificate from the SPIFFE Workload API there, such as unix:///run/spire/api.sock [without ADDRESS:"
        " SPIFFE_ENDPOINT_SOCKET].",
    ),
    click.option(
        "--tls-name",
        default="",
        metavar="NAME",
        help="The name in all agents' certificates [default: each one's own address].",
    ),
    click.option(
        "--tls-ca",
        type=File,
        help="The authority of all agents' certificates, PEM; peers without one are refused. With --spiffe: a further one, such as"
        " the tracker's.",
    ),
    click.option("--tls-key", type=File, help="Its key, PEM, not encrypted."),
    click.option("--tls-cert", type=File, help="Speak TLS with other agents: this host's certificate, PEM."),
    click.option(
        "--join-file",
        type=File,
        help="Join the fleet of the token in this file, for trackers with --access: the agent gets a certificate of its own.",
    ),
)


class Identity(TypedDict):
    """Where an agent's certificate comes from: settings of that name (AgentSettings), at most one
    of which is not None."""

    join_file: Path | None
    spiffe: SpiffeSettings | None
    tls: TlsFiles | None


def tls_options(command: Function) -> Function:
    """--join-file, --spiffe and the options of certificates of one's own. The command gets
    `identity`. Raises UsageError where more than one is given."""

    @functools.wraps(command)
    def secured(
        *args: Any,
        join_file: Path | None,
        tls_cert: Path | None,
        tls_key: Path | None,
        tls_ca: Path | None,
        tls_name: str,
        spiffe: str | None,
        trust_domain: str,
        **more: Any,
    ) -> Any:
        if spiffe is not None and (join_file or tls_cert or tls_key or tls_name):
            raise UsageError(
                "--spiffe brings a certificate, and --join-file or --tls options another one",
                remedy="Give one; only --tls-ca goes with --spiffe",
            )
        svid = _spiffe(spiffe, trust_domain, tls_ca)
        tls = _tls_files(tls_cert, tls_key, tls_ca if svid is None else None, tls_name)
        if join_file is not None and tls is not None:
            raise UsageError("--join-file brings a certificate, and --tls options name another one", remedy="Give one")
        joins = join_file.absolute() if join_file is not None else None
        return command(*args, identity=Identity(join_file=joins, spiffe=svid, tls=tls), **more)

    wrapped: Any = secured
    for option in _CERTIFICATE_OPTIONS:
        wrapped = option(wrapped)
    return cast(Function, wrapped)


@click.command("agent")
@click.option(
    "--tracker",
    default="",
    metavar="URL[,URL]",
    help="Trackers, tried in turn [default: the ones that announce themselves on this network].",
)
@click.option(
    "--listen", default="0.0.0.0:7071", show_default=True, metavar="HOST:PORT", help="Where other agents fetch."
)
@click.option(
    "--advertise",
    default="",
    metavar="HOST:PORT",
    help="Where others reach this agent [default: the address of --listen; where that is all addresses, the one from which this host"
    " reaches the tracker].",
)
@click.option(
    "--store", default="/var/lib/p2pdist", show_default=True, type=click.Path(path_type=Path), help="Verified blobs."
)
@click.option(
    "--socket",
    default="/run/p2pdist/agent.sock",
    show_default=True,
    type=click.Path(path_type=Path),
    help="The local API.",
)
@origin_options("Central storage, instead of the one that the tracker names.")
@click.option(
    "--site", default="", help="The site of this host's zone: a site reads central storage once [default: the zone]."
)
@click.option("--zone", default="", help="The zone of this host.")
@click.option("--rack", default="", help="The rack of this host.")
@click.option(
    "--capacity", default="", metavar="SIZE", help="Bytes the store may hold, such as 200GiB [default: the disk]."
)
@click.option(
    "--tracker-wait",
    default=60.0,
    show_default=True,
    type=Seconds(0.0, 86400.0),
    metavar="SECONDS",
    help="How long a new pull waits for a tracker.",
)
@click.option(
    "--peer-wait",
    default=3600.0,
    show_default=True,
    type=Seconds(0.0, 604800.0),
    metavar="SECONDS",
    help="How long a pull waits for hosts to come back while no tracker answers.",
)
@click.option(
    "--stale-tag-days",
    default=7.0,
    show_default=True,
    type=Seconds(0.0, 3650.0, unit="days"),
    metavar="DAYS",
    help="How long a tag may name what it did when a tracker or central storage last answered, while neither does; 0 for never.",
)
@click.option(
    "--upload-limit", default="", metavar="RATE", help="Never send to others faster, such as 500MB/s or 2Gbit/s."
)
@click.option(
    "--download-limit", default="", metavar="RATE", help="Never receive faster, from other agents and the origin."
)
@click.option(
    "--preseed-limit",
    default="",
    metavar="RATE",
    help="Never send or receive preseeds faster, such as 50MB/s.",
)
@click.option(
    "--upstream",
    "upstreams",
    multiple=True,
    metavar="NAME[=URL]",
    help="A registry that this agent asks itself while no tracker answers, such as docker.io; may be repeated. Trackers name theirs.",
)
@tls_options
@click.option(
    "--audit-log",
    type=click.Path(dir_okay=False),
    metavar="FILE",
    help="Where to write refusals and what local processes change [default: the log, with access control alone].",
)
@click.option(
    "--probe-listen",
    default="",
    metavar="[HOST:]PORT",
    help="Where /healthz, /readyz and /metrics answer without TLS and certificates; without a HOST on loopback alone.",
)
@click.option(
    "--mirror",
    default=MIRROR_ADDRESS,
    show_default=True,
    metavar="[127.0.0.1:]PORT",
    help="Where containerd, Docker, podman and others on this host read images as from a registry, without TLS; on loopback alone."
    ' Nowhere with "" or off.',
)
@click.option(
    "--transport",
    type=click.Choice(["trees", "swarm", "auto"]),
    help="How blobs come: by the tracker's trees, from BitTorrent swarms, or by trees as long as that goes well [default: auto, with TLS"
    " or a join file trees].",
)
@click.option(
    "--bt-listen",
    default="",
    metavar="HOST:PORT",
    help="Where BitTorrent peers connect [default: the address of --listen, at the next port or a free one; nowhere with "
    "--transport trees].",
)
@discovery_options
@click.option(
    "--discover/--no-discovery",
    "discover",
    default=None,
    help="Look for trackers and agents on this network, and be found by agents [default: if no --tracker is given].",
)
@click.option(
    "--scrub-days",
    default=7.0,
    show_default=True,
    type=Seconds(0.0, 3650.0, unit="days"),
    metavar="DAYS",
    help="Read everything in the store once in so many days, slowly, and fetch again what is wrong; 0 for never.",
)
@lazy_options
@s3_options
@click.option(
    "--drain-seconds",
    default=5.0,
    show_default=True,
    type=Seconds(0.0, 3600.0),
    metavar="SECONDS",
    help="How long to hand over to others at SIGTERM, at most; a second signal ends the agent at once.",
)
@click.option("--name", default="", metavar="HOST", help="The name of this host [default: its hostname].")
@hostnames_option
@log_options
@_reaching
def command(
    reached: Reached,
    advertise: str,
    store: Path,
    socket: Path,
    origin: str,
    site: str,
    zone: str,
    rack: str,
    capacity: str,
    tracker_wait: float,
    peer_wait: float,
    stale_tag_days: float,
    upstreams: tuple[str, ...],
    identity: Identity,
    transport: Policy | None,
    bt_listen: str,
    scrub_days: float,
    lazy: LazySettings,
    doors: Doors,
    drain_seconds: float,
    name: str,
    hostnames: tuple[str, ...],
    **more: str,
) -> None:
    """Run the agent of this host: it fetches, keeps, shares and shows packages.

    \b
    Examples:
      p2pdist agent --tracker https://tracker:7070 --join-file /etc/p2pdist/join.token
      p2pdist agent --tracker http://tracker:7070 --upload-limit 2GB/s --transport swarm
    """
    from p2pdist.agent.agent import AgentSettings

    address, trackers, discovery = reached
    settings = AgentSettings(
        trackers=trackers,
        host=name or sockets.gethostname(),
        address=advertise or _address_text(address),
        store=store.absolute(),
        origin=origin,
        zone=zone,
        rack=rack,
        site=site,
        capacity_bytes=parse_size(capacity) if capacity else None,
        tracker_wait_s=tracker_wait,
        peer_wait_s=peer_wait,
        stale_tag_s=86400 * stale_tag_days,
        audited=_audit(more.pop("audit_log", None)),
        **{name.replace("limit", "bytes_s"): parse_rate(rate) for name, rate in more.items() if rate},
        **identity,
        discovery=discovery,
        swarm=_swarm(transport, address, bt_listen, identity),
        scrub_s=86400 * scrub_days,
        lazy=lazy,
        drain_s=drain_seconds,
        upstreams=unique(tuple(map(parse_upstream, upstreams))),
        hostnames=hostnames,
    )
    run(_serve(settings, address, socket.absolute(), doors))


def _address_text(address: tuple[str, int]) -> str:
    from p2pdist.model.address import address_text

    return address_text(*address)


def _audit(path: str | None) -> bool:
    """Write the audit to a file, if one is named; returns whether. Raises P2PDistError."""
    from p2pdist.transfer.audit import audit_to

    if path:
        audit_to(Path(path).absolute())
    return bool(path)


def _host_address(option: str, text: str) -> tuple[str, int] | None:
    """Host and port of an option, of which a port alone is one of loopback. Raises UsageError."""
    return listen_address(text if ":" in text else f"127.0.0.1:{text}", option, "127.0.0.1:7073") if text else None


def _loopback_address(option: str, text: str) -> tuple[str, int] | None:
    """Host and port of an option for programs of this host; None where there is none. Raises
    UsageError for an address that other machines reach: clients show no certificate there."""
    from p2pdist.model.address import on_this_machine

    address = _host_address(option, "" if text == "off" else text)
    if address is not None and not on_this_machine(address[0]):
        raise UsageError(
            f"{option} {text}: that port is for this host alone",
            remedy=f"Write {option} 127.0.0.1:{address[1]}; other machines use the port of --listen",
        )
    return address


def _swarm(
    transport: Policy | None, address: tuple[str, int], bt_listen: str, identity: Identity
) -> SwarmSettings | None:
    """How blobs may come by BitTorrent; None for trees only. An agent that joins a fleet uses
    BitTorrent only when told to, and then for public packages. Raises UsageError."""
    from p2pdist.agent.bittorrent.service import SwarmSettings
    from p2pdist.model.address import parse_address

    tls = identity["tls"] is not None or identity["spiffe"] is not None
    policy: Policy = transport or ("trees" if any(identity.values()) else "auto")
    if policy == "trees":
        if bt_listen:
            raise UsageError("--bt-listen is of no use with trees only", remedy="Give --transport auto or swarm")
        return None
    if tls:
        raise UsageError(
            "BitTorrent peers show no certificates, and agents that speak TLS refuse peers without one",
            remedy="Give --transport trees, or no --tls options",
        )
    host, port = address[0], address[1] + 1
    try:
        if bt_listen:
            host, port = parse_address(bt_listen)
        host = str(sockets.getaddrinfo(host, None, type=sockets.SOCK_STREAM)[0][4][0])
    except (OSError, ValueError) as error:
        if not bt_listen:
            return None  # nor can the agent itself listen there, which says more of it
        raise UsageError(
            f"BitTorrent cannot listen on {bt_listen}: {error}", remedy="Write --bt-listen 0.0.0.0:7072"
        ) from error
    if port >= 1 << 16:
        raise UsageError("there is no port for BitTorrent next to port 65535", remedy="Give --bt-listen, too")
    return SwarmSettings(policy, (host, port), required=bool(bt_listen), forced=transport is not None)


async def _serve(
    settings: AgentSettings,
    address: tuple[str, int],
    socket: Path,
    doors: Doors,
) -> None:
    import asyncio
    import signal

    from p2pdist.agent.agent import Agent, enter
    from p2pdist.agent.api.server import make_apps, make_probe
    from p2pdist.agent.spans import spans
    from p2pdist.cli import daemon
    from p2pdist.transfer.connections import ConnectionBook, connections_max

    level_now = partial(read_again, click.get_current_context(), "log_level")
    daemon.raise_file_limit()
    book = ConnectionBook(connections_max())
    # Until there is something to read again: opening a store may take long.
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    await daemon.prepare_socket(socket)
    traced = spans(settings.host)
    agent = Agent(settings, await enter(settings))
    if traced is not None:
        agent.pulls.observe(traced.pulled)
        agent.package_mounts.observe = traced.mounted
    daemon.name_packages(agent.access.names.reference)
    runners, watchdog = [], asyncio.create_task(daemon.notify_watchdog())
    try:
        public, local = make_apps(agent)
        runners.append(await daemon.listen(public, address, tls=_tls_context(agent), connections=book))
        runners.append(await daemon.listen_unix(local, socket))
        if doors.probe is not None:
            runners.append(await daemon.listen(make_probe(agent), doors.probe, option="--probe-listen"))
        if doors.mirror is not None:
            runners += await _mirror(agent, doors.mirror, book)
        if doors.s3 is not None:
            runners.append(await _serve_s3(agent, *doors.s3, book))
        await agent.start()
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGHUP, _read_again, agent, level_now)
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, agent.drain.insist, settings.drain_s)
        if agent.tls is None:
            _warn_of_strangers(address[0])
        logger.info("host=%s listening on %s socket=%s", settings.host, address_text(*address), socket)
        daemon.notify_manager(daemon.READY)
        await agent.drained()
    finally:
        daemon.notify_manager(daemon.STOPPING)
        watchdog.cancel()
        await daemon.stop_listening(runners)
        if len(runners) >= 2:  # else the socket may be another agent's
            socket.unlink(missing_ok=True)
        await agent.stop()
        await daemon.close(runners)
        if traced is not None:
            await asyncio.to_thread(traced.stop)


def _tls_context(agent: Agent) -> ssl.SSLContext | None:
    """What the agent speaks TLS with to those that ask it; None while it has no certificate."""
    if agent.tls is None:
        return None
    from p2pdist.transfer.openssl.server import ServerContext

    return ServerContext(agent.tls)


async def _mirror(agent: Agent, address: tuple[str, int], book: ConnectionBook) -> list[web.AppRunner]:
    """Serve the mirror of this host. Where its usual port is taken, perhaps by another agent, the
    agent goes on without. Raises Conflict for another port that is taken."""
    from p2pdist.agent.api.mirror import make_mirror_app
    from p2pdist.cli.daemon import listen

    text = address_text(*address)
    try:
        runner = await listen(make_mirror_app(agent), address, connections=book, option="--mirror")
    except Conflict:
        if text != MIRROR_ADDRESS:
            raise
        logger.warning("%s is taken: programs on this host read no images through this agent; give it --mirror", text)
        return []
    agent.mirrored.address = text
    return [runner]


async def _serve_s3(
    agent: Agent, address: tuple[str, int], settings: S3Settings, book: ConnectionBook
) -> web.AppRunner:
    """Serve S3 clients of this host. Raises Conflict for a port that is taken."""
    from p2pdist.agent.api.s3 import make_s3_app
    from p2pdist.cli.daemon import listen

    runner = await listen(make_s3_app(agent, settings), address, connections=book, option="--s3")
    logger.info("%d buckets for S3 clients at http://%s", len(settings.buckets), address_text(*address))
    return runner


def _warn_of_strangers(host: str) -> None:
    """Warn of an agent without access control, unless it is on this machine alone."""
    from p2pdist.model.address import on_this_machine

    if not on_this_machine(host):
        logger.warning(
            "access control is off: any client that reaches this port can fetch every package of the fleet. Start trackers with "
            "--access FILE and agents with --join-file to change that"
        )


def _spiffe(socket: str | None, trust_domain: str, further: Path | None) -> SpiffeSettings | None:
    from p2pdist.agent.access.spiffe import SpiffeSettings

    if socket is None:
        if trust_domain:
            raise UsageError("--trust-domain goes with --spiffe alone", remedy="Give --spiffe, too")
        return None
    return SpiffeSettings.parse(socket, trust_domain, further.absolute() if further is not None else None)


def _tls_files(certificate: Path | None, key: Path | None, authority: Path | None, name: str) -> TlsFiles | None:
    from p2pdist.transfer.tls import TlsFiles

    if certificate is None and key is None and authority is None and not name:
        return None
    if certificate is None or key is None or authority is None:
        raise UsageError(
            "TLS needs a certificate, its key and an authority", remedy="Give --tls-cert, --tls-key and --tls-ca"
        )
    return TlsFiles(certificate.absolute(), key.absolute(), authority.absolute(), name)


def _read_again(agent: Agent, level_now: Callable[[], Any]) -> None:
    """SIGHUP: the configuration file is read again for the level of the log, and certificates are
    renewed while an agent runs. What cannot be used changes nothing."""
    try:
        set_level(str(level_now()))
    except (P2PDistError, click.ClickException) as error:
        logger.error("the level of the log stays as it was: %s", error)
    if agent.tls is None:
        logger.info("SIGHUP: there are no certificates to read again")
        return
    try:
        agent.tls.reload()
    except UsageError as error:
        logger.error("the certificates stay as they were: %s", error)
    else:
        logger.info("certificates were read again")
