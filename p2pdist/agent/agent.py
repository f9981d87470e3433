"""The agent of a host, put together from its parts: the store, the uplink, the session with a
tracker, the pulls, the mounts, and what keeps the store in order."""

from __future__ import annotations

import asyncio
import logging
import secrets
import socket
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from importlib.metadata import version
from pathlib import Path

import msgspec

from p2pdist.agent.access.identity import Membership, check_secure, read_join_file
from p2pdist.agent.access.service import IDENTITY_DIRECTORY, AgentAccess
from p2pdist.agent.access.spiffe import SpiffeSettings, WorkloadIdentity
from p2pdist.agent.bittorrent.service import SeededFiles, ServiceContext, SwarmService, SwarmSettings, open_listener
from p2pdist.agent.discovery.links import DiscoverySettings
from p2pdist.agent.discovery.trackerless import looking_for_trackers, neighbourhood
from p2pdist.agent.drain import DRAIN_S, Drain
from p2pdist.agent.images.images import Images
from p2pdist.agent.images.inventory import ImageInventory
from p2pdist.agent.images.registries import TrackedImages, UpstreamRegistries
from p2pdist.agent.lazy.traces import Traces
from p2pdist.agent.lazy.views import LazySettings, LazyViews
from p2pdist.agent.models.models import Models
from p2pdist.agent.models.tracked_hub import TrackedHub
from p2pdist.agent.mounts import Mounts, PackageMounts, mounted_manifests
from p2pdist.agent.preseeds import Preseeds
from p2pdist.agent.pull.lists import PeerLists
from p2pdist.agent.pull.origin import Origins
from p2pdist.agent.pull.packages import STALE_TAG_S, WAIT_S, Packages
from p2pdist.agent.pull.pulls import Pulls
from p2pdist.agent.pull.readers import Readers
from p2pdist.agent.pull.registry import PullResources, Registry
from p2pdist.agent.pull.vouched_blobs import VouchedBlobs
from p2pdist.agent.sealed_packages import Sealed
from p2pdist.agent.tracker.address import address_for_others, wildcard
from p2pdist.agent.tracker.connection import ToHost
from p2pdist.agent.tracker.desk import NOISE_BYTES, Desk
from p2pdist.agent.tracker.failures import PullFailures
from p2pdist.agent.tracker.policies import Policies
from p2pdist.agent.tracker.reachability import ReachabilityCheck
from p2pdist.agent.tracker.session import TrackerSession
from p2pdist.agent.tracker.sources import NamedSources
from p2pdist.agent.tracker.traces import TrackerTraces
from p2pdist.agent.tracker.trackers import HostSide, Trackers
from p2pdist.agent.upkeep.disk_use import DiskUse
from p2pdist.agent.upkeep.maintenance import Inventory, Maintenance, Verification
from p2pdist.agent.upkeep.retention import EvictionOrder, PolicyPins, Retention
from p2pdist.agent.upkeep.scrub import StoreScrub
from p2pdist.agent.uplink import STREAMS_MAX, Uplink
from p2pdist.core.downlink import Downlink
from p2pdist.core.sources import ResponseTimes, Sources
from p2pdist.core.trackerless import Announcement
from p2pdist.gateway.huggingface.counts import HubCounts
from p2pdist.gateway.registry.counts import MirrorCounts
from p2pdist.gateway.s3.counts import S3Counts
from p2pdist.model.address import parse_address
from p2pdist.model.errors import Refused, from_problem
from p2pdist.model.messages import (
    COUNT_MAX,
    MOUNTED_MAX,
    PROTOCOL_VERSION,
    Access,
    Assign,
    Condition,
    Drained,
    Evict,
    Hello,
    Keep,
    Leaving,
    Listed,
    OriginShare,
    Recall,
    Reject,
    Release,
    Reread,
    check_hello,
)
from p2pdist.model.upstream import UpstreamSettings
from p2pdist.origin.contract import Origin
from p2pdist.origin.drivers import open_origin
from p2pdist.package.archive.import_ import this_platform
from p2pdist.store.store import BlobStore
from p2pdist.transfer.connections import connections_max
from p2pdist.transfer.pacer import Pacer
from p2pdist.transfer.tls import TlsFiles

STREAMS_MIN = 4
MOUNTS = "mounts"
"""The directory of a store that is about its mounted views."""

VERSION = version("p2pdist")

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class AgentSettings:
    """How an agent is set up."""

    trackers: tuple[str, ...]
    """URLs of trackers, in the order in which the agent tries them."""
    host: str
    """The name of this host, unique in its fleet."""
    address: str
    """Where other agents reach this one (host:port). With 0.0.0.0 or :: as the host, that is the
    address from which this host reaches its tracker."""
    store: Path
    origin: str = ""
    """The URL of central storage, which overrides that of the tracker."""
    zone: str = ""
    rack: str = ""
    site: str = ""
    """Where the zone is; empty where the zone is a site by itself."""
    capacity_bytes: int | None = None
    """What the store may hold; None for what the disk does."""
    tracker_wait_s: float = WAIT_S
    """How long a new pull waits for a tracker."""
    peer_wait_s: float = 3600.0
    """How long a pull waits for hosts that may come back, while no tracker answers."""
    stale_tag_s: float = STALE_TAG_S
    """For how long a tag counts as it was last known, while no tracker and no origin answers."""
    tls: TlsFiles | None = None
    """With files, agents speak TLS with each other."""
    join_file: Path | None = None
    """With a join token in this file, the agent joins a fleet with access on."""
    spiffe: SpiffeSettings | None = None
    """With settings, the agent has its certificate from a SPIFFE Workload API."""
    upload_bytes_s: float | None = None
    """Limit of what this host sends over the network; None for no limit."""
    download_bytes_s: float | None = None
    """Limit of what this host receives over the network."""
    preseed_bytes_s: float | None = None
    """Limit of what this host sends, and of what it receives, for preseeds."""
    discovery: DiscoverySettings | None = None
    """With settings, the agent discovers trackers and agents on its links, and announces itself."""
    swarm: SwarmSettings | None = None
    """With settings, blobs may come by BitTorrent."""
    scrub_s: float = 7 * 86400.0
    """Seconds in which everything that is stored is read once; 0 for never."""
    lazy: LazySettings = field(default_factory=LazySettings)
    """How packages are shown lazily."""
    drain_s: float = DRAIN_S
    """How long the agent may go on serving after it was asked to end."""
    upstreams: tuple[UpstreamSettings, ...] = ()
    """Registries that the agent asks itself while no tracker answers."""
    hostnames: tuple[str, ...] = ()
    """Further names under which clients reach this agent, besides those of the machine."""
    audited: bool = False
    """Requests that change something and refusals are written to the audit with access off, too."""


class Agent:
    """Builds the parts of an agent, starts and stops them, and passes on what a tracker sends.
    Everything runs on one event loop but for disk work and receiver threads. `identity`, which
    has been entered, is the agent's in a fleet with access on, or its SVID. Raises UsageError,
    Conflict and the store's failures."""

    def __init__(self, settings: AgentSettings, identity: Membership | WorkloadIdentity | None = None) -> None:
        self.settings, self.host = settings, settings.host
        self.mirrored, self.doored, self.s3_counts = MirrorCounts(), HubCounts(), S3Counts()
        # Wrong settings are found before the store is opened, which may take long after a crash.
        listener = open_listener(settings.swarm)
        self.access = access = self._access(identity)
        self.tls = access.tls
        hello = _hello(settings, listener.port if listener is not None else 0, tls=self.tls is not None)
        self.trackers = trackers = _trackers(settings, hello, access)
        self.session = session = trackers.home
        if isinstance(identity, Membership):
            identity.trackers = session.addressed
        self.reachability = ReachabilityCheck(settings.host, session)
        own_origin = open_origin(settings.origin, serving=True) if settings.origin else None
        self.neighbourhood = neighbourhood(settings.discovery, hello, session, access, settings.origin)
        self._origins = Origins(own_origin, session)
        order = EvictionOrder((files := SeededFiles()).choose)
        mounted = mounted_manifests(settings.store / MOUNTS)
        self.store = store = BlobStore(
            settings.store, capacity_bytes=settings.capacity_bytes, choose=order.choose, mounted=mounted
        )
        self.mounts = _mounts(store)
        self.uplink = _uplink(settings)
        self.drain = Drain(self.uplink, lambda: trackers.send(Leaving()))
        downlink = Downlink(settings.download_bytes_s, settings.preseed_bytes_s)
        self.policies = Policies(store, downlink, Pacer(downlink), self.uplink.limit)
        received_bytes = Counter[str]()
        swarming = ServiceContext(
            settings, store, session, own_origin, self.neighbourhood, self.uplink, received_bytes, access.may_swarm
        )
        self.swarming: SwarmService | None = None
        if listener is not None and settings.swarm is not None:
            self.swarming = SwarmService(settings.swarm, swarming, listener, files, self.policies.transport)
        self.resources = self._resources(received_bytes)
        self.policy_pins = PolicyPins(store, self.policies)
        self.sealed = Sealed(store)
        self.packages = self._packages(own_origin)
        self.registry = self._registry(reads_origin=own_origin is not None)
        self.vouched_blobs = VouchedBlobs(store, self.registry, trackers.send)
        self.images = self._images(settings)
        self.models = self._models()
        self.pulls = self._pulls()
        self.failures = PullFailures(session, self.pulls.observe)
        self.readers = Readers(store, self.pulls, self.registry, self.swarming)
        self.preseeds = Preseeds(
            store, self.pulls, self.packages, self.images, self.models, session.send, lambda: session.clock_ahead_s
        )
        traces = Traces(TrackerTraces(session, self.host))
        parts = (store, self.packages, self.pulls, self.registry, traces, self.mounts.work)
        self.lazy = LazyViews(*parts, settings.lazy, policy=self.policies.lazy)
        self.package_mounts = PackageMounts(store, self.pulls, self.mounts, self.lazy, roots=access.mount_roots)
        self.inventory = Inventory(store, self.pulls, ImageInventory(store, this_platform()))
        self.maintenance = Maintenance(store, self.pulls, self.mounts, self.inventory)
        self.disk_use = DiskUse(store, self.pulls, self.mounts, self.inventory, self.maintenance)
        self.verification = Verification(store, self.pulls, self.mounts, self.inventory)
        self.desk = Desk(session, self._condition, self.maintenance.evict)
        self.retention = Retention(store, self.policies, self.maintenance, order)
        self.scrub = StoreScrub(store, self.verification, lambda: self.pulls.running, period_s=settings.scrub_s)
        self._tasks: list[asyncio.Task[None]] = []

    def _condition(self) -> Condition:
        usage, mounted = self.store.usage(), [mount.reference[:512] for mount in self.mounts.list()]
        # Some filesystems in user space say that they have room without end.
        free = min(usage.disk_free, COUNT_MAX) // NOISE_BYTES * NOISE_BYTES
        capacity = min(self.store.capacity, COUNT_MAX) if self.store.capacity is not None else None
        known = tuple(sorted(set(mounted))[:MOUNTED_MAX])
        return Condition(VERSION, usage.bytes_total, capacity, free, len(mounted), known)

    def _access(self, identity: Membership | WorkloadIdentity | None) -> AgentAccess:
        return AgentAccess(
            self.host,
            self.settings.store / IDENTITY_DIRECTORY,
            identity,
            self.settings.tls,
            alone=lambda: not self.session.connected,
            clock_ahead_s=lambda: self.session.clock_ahead_s or 0.0,
        )

    def _resources(self, received_bytes: Counter[str]) -> PullResources:
        return PullResources(
            self.host,
            self.trackers,
            self.access,
            self.policies,
            self._origins,
            self.uplink,
            self.swarming,
            received_bytes,
            sources=Sources(ResponseTimes(certified=self.tls is not None)),
            named=NamedSources(self.settings.store / "sources", self.host),
            peer_wait_s=self.settings.peer_wait_s,
            lists=PeerLists(self.access, lambda: self.session.vicinity),
        )

    def _packages(self, own_origin: Origin | None) -> Packages:
        return Packages(
            self.store,
            self.session,
            own_origin,
            wait_s=self.settings.tracker_wait_s,
            stale_tag_s=self.settings.stale_tag_s,
            learn=self.policy_pins.learned,
            found=self.access.names.learn,
            opened=self.sealed.opened,
        )

    def _registry(self, *, reads_origin: bool) -> Registry:
        alone = Announcement("alone", self.host, self.settings.address, origin=True)
        return Registry(
            self.store,
            self.packages,
            self.resources,
            self.drain,
            self.neighbourhood,
            alone=alone if reads_origin else None,
            tracker_wait_s=self.settings.tracker_wait_s,
        )

    def _images(self, settings: AgentSettings) -> Images:
        tracked = TrackedImages(self.session)
        return Images(
            self.store,
            tracked,
            UpstreamRegistries(settings.upstreams, tracked),
            self.vouched_blobs,
            platform=this_platform(),
            learn=self.access.names.learn_name,
            ruled=lambda: self.access.peers.on,
            learn_policy=self.policy_pins.learned,
            wait_tracker=self.packages.wait_tracker,
        )

    def _models(self) -> Models:
        learn, wait_tracker = self.access.names.learn_name, self.packages.wait_tracker
        return Models(self.store, TrackedHub(self.session), self.vouched_blobs, learn=learn, wait_tracker=wait_tracker)

    def _pulls(self) -> Pulls:
        return Pulls(
            self.store,
            self.packages,
            self.registry,
            images=self.images,
            models=self.models,
            unreachable=self.reachability.warning,
            lazy=self.policies.lazy,
            sealed=self.sealed,
        )

    async def start(self) -> None:
        """Serve what the store holds and begin to look for a tracker."""
        self.access.start(self.store)
        self.registry.start()
        if self.swarming is not None:
            self.swarming.start()
        registry = self.registry
        side = HostSide(
            lambda: registry.served,
            registry.holdings,
            registry.report,
            self._on_message,
            self._on_home_change,
            registry.tracker_changed,
            lambda: self.drain.draining,
        )
        self._tasks = [
            asyncio.create_task(self.trackers.run(side), name="tracker-session"),
            asyncio.create_task(self.retention.run(), name="retention"),
            asyncio.create_task(self.reachability.run(), name="reachability"),
            asyncio.create_task(self.scrub.run(), name="scrub"),
            asyncio.create_task(self.desk.run(), name="desk"),
        ]
        self.mounts.start()
        self.package_mounts.start()
        if self.neighbourhood is not None:
            await self.neighbourhood.start()

    async def drained(self) -> Drained:
        """Wait until the agent is asked to end (`drain`), then until it may."""
        return await self.drain.run(self._stop_fetching)

    async def stop(self) -> None:
        """A clean stop: end pulls and streams, close the store. Mounted views stay."""
        await self.lazy.close()
        if self.neighbourhood is not None:
            await self.neighbourhood.stop()
        await self._stop_fetching()
        if self.swarming is not None:
            await self.swarming.stop()
        self.uplink.stop()
        await self.vouched_blobs.stop()
        await self.registry.stop()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self.access.stop()
        await self.mounts.close()
        await self.images.close()
        await self.models.close()
        await self._origins.close()
        await asyncio.to_thread(self.store.close)

    async def _stop_fetching(self) -> None:
        """End all pulls and begin no more; what has arrived stays, and is served."""
        self.registry.stop_fetching()
        await self.preseeds.stop()
        await self.pulls.stop()

    def _on_message(self, message: ToHost) -> None:
        match message:
            case Listed() | Reread() | Recall():
                self.vouched_blobs.receive(message)
            case OriginShare(bytes_s):
                self.resources.origin_share.limit_bytes_s = bytes_s
            case Keep() | Release():
                if not self.drain.draining:  # else the tracker asks again after the next start
                    self.preseeds.receive(message)
            case Evict():
                self.desk.receive(message)
            case Assign(plan, ticket):
                self.registry.planned(plan, ticket)
            case Access():
                self._learn_access(message)
            case Reject(problem, blob):
                error = from_problem(problem)
                logger.warning("the tracker rejects %s: %s", blob or "a message", error)
                if blob is not None:
                    self.registry.reject(blob, error)

    def _learn_access(self, access: Access) -> None:
        if self.tls is not None and not self.session.secured:
            logger.warning("what %s says of access is not believed: it is no https URL", self.session.url)
            return
        self.access.learn(access)
        self.registry.leave_revoked()
        try:
            self.access.peers.require_here()
        except Refused as error:
            self.registry.stop_fetching(error)

    def _on_home_change(self, present: bool) -> None:
        if present:
            self._origins.prepare()
            self.reachability.connected()
        self.images.tracker_changed(present)
        self.models.tracker_changed()
        if self.swarming is not None:
            self.swarming.tracker_changed(present)
        if present and self.drain.draining:
            self.session.send(Leaving())
        elif present:
            self.failures.report()
            self.desk.connected()
            self.preseeds.connected()


def _trackers(settings: AgentSettings, hello: Hello, access: AgentAccess) -> Trackers:
    listens = wildcard(settings.address)

    def connect(urls: Sequence[str]) -> TrackerSession:
        part = msgspec.structs.replace(hello, partial=True)
        return TrackerSession(urls, part, listens=listens, tls=access.tls, tracker_name=access.tracker_name)

    home = TrackerSession(
        settings.trackers,
        hello,
        listens=listens,
        searching=settings.discovery is not None and settings.discovery.trackers,
        tls=access.tls,
        tracker_name=access.tracker_name,
    )
    return Trackers(home, connect, secured=access.joined)


async def enter(settings: AgentSettings) -> Membership | WorkloadIdentity | None:
    """The identity of an agent that joins a fleet or has an SVID, to be had before the agent is
    made; waits for a tracker where there is none yet. None for an agent of neither kind. Raises
    Refused, UsageError, and Unavailable for a Workload API."""
    if settings.spiffe is not None:
        workload = WorkloadIdentity(settings.spiffe, settings.host)
        await workload.enter()
        return workload
    membership = membership_of(settings)
    if membership is not None:
        searched = settings.discovery if not settings.trackers else None
        async with looking_for_trackers(searched, settings.host, settings.zone) as found:
            membership.trackers = lambda: [*settings.trackers, *found()]
            await membership.enter(patient=searched is not None)
    return membership


def membership_of(settings: AgentSettings) -> Membership | None:
    """The identity to enter; None without a join file. Raises UsageError."""
    if settings.join_file is None:
        return None
    check_secure(settings.trackers)
    listens = wildcard(settings.address)
    own = parse_address(settings.address)[0] if listens is None else ""

    def addresses(own_end: str) -> list[str]:
        """Where others reach this agent, as its hello says."""
        return [own or address_for_others(own_end, listens[0] if listens else "")] if own or own_end else []

    return Membership(
        settings.store / IDENTITY_DIRECTORY,
        settings.host,
        partial(read_join_file, settings.join_file),
        lambda: settings.trackers,
        addresses,
    )


def _hello(settings: AgentSettings, bt_port: int, *, tls: bool) -> Hello:
    """How this agent introduces itself to trackers. Raises UsageError for what every tracker would
    refuse."""
    listens = wildcard(settings.address)
    hello = Hello(
        PROTOCOL_VERSION,
        settings.host,
        # Which one of all its addresses it gives shows when the session reaches a tracker.
        settings.address if listens is None else f"{socket.gethostname()}:{listens[1]}",
        settings.zone,
        settings.rack,
        settings.upload_bytes_s or 0.0,
        bt_port,
        tls,
        secrets.token_hex(8),
        settings.download_bytes_s or 0.0,
        str(this_platform()),
        settings.site,
        version=version("p2pdist")[:32],
    )
    check_hello(hello)
    return hello


def _mounts(store: BlobStore) -> Mounts:
    """The views below a store, which is closed when they cannot be taken over."""
    try:
        return Mounts(store.root / MOUNTS)
    except BaseException:
        store.close()
        raise


def _uplink(settings: AgentSettings) -> Uplink:
    """The uplink, with as many streams as this process has descriptors for."""
    return Uplink(
        limit_bytes_s=settings.upload_bytes_s,
        preseed_limit_bytes_s=settings.preseed_bytes_s,
        streams_max=min(STREAMS_MAX, max(STREAMS_MIN, connections_max() // 2)),
    )
