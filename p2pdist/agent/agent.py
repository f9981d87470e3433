"""The agent: one per host. Owns the store, the uplink, the session with a tracker, the pulls and
the mounts."""

from __future__ import annotations

import asyncio
import logging
import secrets
import socket
from collections import Counter
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from p2pdist.agent.bittorrent.service import SwarmSettings, open_swarming
from p2pdist.agent.discovery.mdns import DiscoverySettings
from p2pdist.agent.discovery.trackerless import neighbourhood
from p2pdist.agent.drain import DRAIN_S, Departure
from p2pdist.agent.maintenance import Housekeeping
from p2pdist.agent.mounts import Mounts, Showing
from p2pdist.agent.preseeds import Preseeding
from p2pdist.agent.pull.blob import BlobPull
from p2pdist.agent.pull.origin import Origins
from p2pdist.agent.pull.packages import WAIT_S, Packages
from p2pdist.agent.pull.pulls import Pulls
from p2pdist.agent.retention import CacheOrder, Caching
from p2pdist.agent.tasks import Tasks, in_thread
from p2pdist.agent.tracker.policies import Policies
from p2pdist.agent.tracker.reachability import Reached
from p2pdist.agent.tracker.session import TrackerSession
from p2pdist.agent.uplink import Turn, Turns
from p2pdist.core.downlink import Downlink
from p2pdist.core.eviction import choose
from p2pdist.core.sources import Sources
from p2pdist.core.token_bucket import TokenBucket
from p2pdist.core.trackerless import Announcement, plan_without_tracker
from p2pdist.model.digest import Digest
from p2pdist.model.errors import Conflict, Corrupt, P2PDistError, from_problem
from p2pdist.model.manifest import Descriptor, Manifest
from p2pdist.model.messages import (
    BLOBS_PER_MESSAGE_MAX,
    PROTOCOL_VERSION,
    Assign,
    Complaint,
    Hello,
    Holding,
    Keep,
    Leaving,
    Left,
    OriginShare,
    Priority,
    Reject,
    Release,
    Report,
    StreamRequest,
    check_hello,
)
from p2pdist.model.pieces import PieceSet
from p2pdist.model.policy import PackagePolicy
from p2pdist.model.selection import Selection
from p2pdist.origin.origin import Origin, open_origin
from p2pdist.store.blobs.blob import Blob
from p2pdist.store.store import BlobStore
from p2pdist.transfer.pacer import Pacer
from p2pdist.transfer.stream.connect import IDLE_S, KeptConnections
from p2pdist.transfer.tls import Tls, TlsFiles

DISCARD_TRIES = 50
DISCARD_PAUSE_S = 0.1

_logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class AgentSettings:
    """How an agent is set up. `address` is where other agents reach it (host:port); with 0.0.0.0 or
    :: in it at the address from which this host reaches its tracker; `origin` overrides the
    tracker's; `tracker_wait_s` is how long a new pull waits for a tracker; with `tls` it speaks TLS
    with other agents; `upload_bytes_s` and `download_bytes_s` limit what it gives and takes over
    the network, `preseed_bytes_s` what of either is for preseeds; with `discovery` it looks for
    trackers and others on its network, and is found by them; with `swarm` blobs may come by
    BitTorrent, too. It may hand over to others for `drain_s` before it ends."""

    trackers: tuple[str, ...]
    host: str
    address: str
    store: Path
    origin: str = ""
    zone: str = ""
    rack: str = ""
    capacity_bytes: int | None = None
    tracker_wait_s: float = WAIT_S
    tls: TlsFiles | None = None
    upload_bytes_s: float | None = None
    download_bytes_s: float | None = None
    preseed_bytes_s: float | None = None
    discovery: DiscoverySettings | None = None
    swarm: SwarmSettings | None = None
    drain_s: float = DRAIN_S


class Agent:
    """See the module's text. Everything runs on one event loop but for disk work and receiver
    threads."""

    def __init__(self, settings: AgentSettings) -> None:
        self.settings = settings
        self.host = settings.host
        self.swarming = open_swarming(settings.swarm, self)
        hello = _hello(settings, self.swarming.port if self.swarming is not None else 0)
        self.session = TrackerSession(
            settings.trackers,
            hello,
            holdings=self._holdings,
            report=self._report,
            on_message=self._on_message,
            on_change=self._on_tracker_change,
        )
        self.session.listens = _all_addresses(settings.address)
        self.reached = Reached(settings.host, self.session)
        self.tls = Tls(settings.tls) if settings.tls is not None else None
        self.own_origin = open_origin(settings.origin, serving=True) if settings.origin else None
        self.neighbourhood = neighbourhood(settings.discovery, hello, self.session, self.tls, settings.origin)
        self._origins = Origins(self.own_origin, self.session)
        order = CacheOrder(self.swarming.choose if self.swarming is not None else choose)
        # What can be wrong with the settings is found before the store is opened, which may take
        # long after a crash.
        self.store = BlobStore(settings.store, capacity_bytes=settings.capacity_bytes, choose=order.choose)
        try:
            self.mounts = Mounts(settings.store / "mounts")
        except BaseException:
            self.store.close()
            raise
        self.turns = Turns(limit_bytes_s=settings.upload_bytes_s, preseed_limit_bytes_s=settings.preseed_bytes_s)
        self.departure = Departure(self.turns, lambda: self.session.send(Leaving()), self._stop_fetching)
        downlink = Downlink(settings.download_bytes_s, settings.preseed_bytes_s)
        self.policies = Policies(self.store, downlink, Pacer(downlink), self.turns.relimit)
        self.turns.limit_of = self.policies.upload_limit
        if self.swarming is not None:
            self.swarming.wanted_for = self.policies.transport
        self.origin_share = TokenBucket(None)
        self.kept = KeptConnections()
        self._expiring: asyncio.TimerHandle | None = None
        self.sources = Sources()
        self.received_bytes: Counter[str] = Counter()
        self.rejected: Counter[str] = Counter()
        wait_s = settings.tracker_wait_s
        self._packages = Packages(self.store, self.session, self.own_origin, wait_s=wait_s, learn=self._learned)
        self.pulls = Pulls(self.store, self._packages, self, unreachable=self._unreachable)
        self.preseeding = Preseeding(
            self.store, self.pulls, self._packages, self.session.send, lambda: self.session.clock_ahead_s
        )
        self.showing = Showing(self.store, self.pulls, self.mounts)
        self.housekeeping = Housekeeping(self.store, self.pulls, self.mounts)
        self._caching = Caching(self.store, self.policies, self.housekeeping, order)
        self.writers: Counter[Digest] = Counter()
        self._fetching: dict[Digest, BlobPull] = {}
        self._served, self._unwanted = set[Digest](), set[Digest]()
        self._session_task: asyncio.Task[None] | None = None
        self._caching_task: asyncio.Task[None] | None = None
        self._reached_task: asyncio.Task[None] | None = None
        self._waits = Tasks(_logger, "waiting for a tracker failed")

    async def start(self) -> None:
        """Serve what the store holds and begin to look for a tracker."""
        for blob in self.store.blobs():
            if blob.complete:
                self._serve(blob)
        if self.swarming is not None:
            self.swarming.start()
        self._session_task = asyncio.create_task(self.session.run(), name="tracker-session")
        self._caching_task = asyncio.create_task(self._caching.run(), name="caching")
        self._reached_task = asyncio.create_task(self.reached.run(), name="reachability")
        self.mounts.start()
        if self.neighbourhood is not None:
            await self.neighbourhood.start()

    async def stop(self) -> None:
        """A clean stop: end pulls and streams, close the store. What is shown stays."""
        if self.neighbourhood is not None:
            await self.neighbourhood.stop()
        await self._stop_fetching()
        await self._waits.stop()
        if self.swarming is not None:
            await self.swarming.stop()
        self.turns.stop()
        if self._expiring is not None:
            self._expiring.cancel()
        self.kept.close()
        for task in filter(None, (self._session_task, self._caching_task, self._reached_task)):
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        await self.mounts.close()
        await self._origins.close()
        await asyncio.to_thread(self.store.close)

    async def _stop_fetching(self) -> None:
        """End all pulls and begin no more; what has arrived stays, and is served."""
        for fetching in list(self._fetching.values()):
            fetching.stop()
        await self.preseeding.stop()
        await self.pulls.stop()

    # -- blobs

    async def fetch(
        self, layer: Descriptor, priority: Priority = "start", selection: Selection | None = None
    ) -> tuple[Blob, BlobPull | None]:
        """See Fetcher in pulls.py. A policy's priority holds whatever was asked for."""
        if selection is not None:
            self.policies.selected(layer.digest, selection.blob.digest)
        priority = self.policies.priority(layer.digest, priority)
        running = self._join(layer.digest, priority)
        if running is not None:
            return running.blob, running
        blob = await in_thread(lambda: self._claim(layer, selection), Blob.release)
        running = self._join(layer.digest, priority)
        complete = blob.complete  # once: a verification may find it wrong at any moment
        if running is not None or complete:
            blob.release()
        if running is not None:
            return running.blob, running
        if complete:
            if layer.digest not in self._served:
                self._serve(blob)
                self._announce(_holding_of(blob))
            return blob, None
        if layer.digest in self._served:  # evicted a moment ago: what was there must not be offered any more
            self._unserve(layer.digest)
        self._unwanted.discard(layer.digest)
        fetching = self._fetching[layer.digest] = BlobPull(
            blob, self, tracker_present=self.session.connected, priority=priority, selection=selection
        )
        self._served.add(layer.digest)
        fetching.done.add_done_callback(lambda done: self._fetched(fetching, done))
        self._announce(fetching.holding())
        fetching.start()
        if self.neighbourhood is not None:
            self.neighbourhood.plan(fetching)
        elif not self.session.connected:
            self._plan_alone(fetching)
        return blob, fetching

    def _plan_alone(self, fetching: BlobPull) -> None:
        """A pull begins while no tracker answers, and this agent looks for no neighbours. An agent
        that was given trackers waits for one of them: others wait like it, and all would read the
        origin at once. One that was given none is alone and reads its own origin."""
        if self.session.urls:
            self._waits.spawn(self._wait_for_tracker(fetching))
        elif self.own_origin is not None:
            blob = fetching.blob
            me = Announcement("alone", self.host, self.settings.address, origin=True)
            fetching.planned(plan_without_tracker(blob.digest, blob.layout, me, ()))

    async def _wait_for_tracker(self, fetching: BlobPull) -> None:
        """Say what the pull waits for, and end it when no tracker answered for as long as a new
        pull may wait."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self.settings.tracker_wait_s
        while not fetching.done.done() and not self.session.connected:
            fetching.note, failure = self._packages.no_tracker()
            if loop.time() >= deadline:
                fetching.reject(failure)
            await self.session.wait_connected(max(0.0, min(1.0, deadline - loop.time())))
        fetching.note = ""

    def _claim(self, layer: Descriptor, selection: Selection | None) -> Blob:
        """The blob of a layer in the store, new if need be, held; waits for the disk."""
        return self.store.claim(layer.digest, selection.pieces if selection else self._packages.pieces(layer))

    def _join(self, digest: Digest, priority: Priority) -> BlobPull | None:
        """The pull of a blob that is running, if there is one. A preseed that somebody waits for is
        one no longer."""
        fetching = self._fetching.get(digest)
        if fetching is not None and priority == "start" and fetching.priority == "preseed":
            fetching.escalate()
            self._announce(fetching.holding())
        return fetching

    def open_turn(self, wanted: StreamRequest, have: PieceSet) -> Turn:
        """Let a child take turns. What a child waits for, this host waits for as well (priority
        inheritance; Sha, Rajkumar and Lehoczky, 1990): it comes through here. Raises Unavailable
        when there are too many streams."""
        turn = self.turns.open(wanted.blob, wanted.stripe, have, wanted.priority)
        self._join(wanted.blob, wanted.priority)
        return turn

    def _fetched(self, fetching: BlobPull, done: asyncio.Future[None]) -> None:
        blob = fetching.blob
        if self._expiring is None:
            self._expiring = asyncio.get_running_loop().call_later(IDLE_S, self._expire_kept)
        del self._fetching[blob.digest]
        blob.release()
        error = None if done.cancelled() else done.exception()
        if error is None:
            if self.swarming is not None:
                self.swarming.changed()
            self.session.send(Report(tuple(filter(None, [fetching.advance()]))))
            return
        if not (self.departure.leaving and self.session.connected):  # else its children are being given other parents
            self._unserve(blob.digest)

    def _expire_kept(self) -> None:
        left = self.kept.expire()
        self._expiring = asyncio.get_running_loop().call_later(IDLE_S, self._expire_kept) if left else None

    async def discard(self, digest: Digest) -> None:
        """See Fetcher in pulls.py: what a corrupt origin gave is not kept."""
        self._unwanted.add(digest)
        fetching = self._fetching.get(digest)
        if fetching is not None:
            fetching.reject(Corrupt(f"{digest} is not what its digest says"))
        if digest in self._served:
            self._unserve(digest)
        failure: P2PDistError | None = None
        for _ in range(DISCARD_TRIES):
            blob = self.store.get(digest)
            if blob is None or digest not in self._unwanted:  # else it is being fetched again since
                failure = None
                break
            try:
                await asyncio.to_thread(self.store.remove if blob.complete else self.store.drop_partial, digest)
            except Conflict as error:  # somebody is still reading it, but not for long: its streams have been ended
                failure = error
                await asyncio.sleep(DISCARD_PAUSE_S)
            except P2PDistError as error:
                failure = error
                break
        self._unwanted.discard(digest)
        if failure is not None:
            _logger.error("what is stored as %s is wrong and could not be removed: %s", digest, failure)

    async def describe(self, digest: Digest) -> Descriptor:
        """What is known of a blob that is asked for by digest, without fetching it. Raises
        NotFound, Unavailable."""
        return await self._packages.find_blob(digest, lambda text: None)

    def serves(self, digest: Digest) -> bool:
        return digest in self._served

    async def _learned(self, reference: str, digest: Digest, manifest: Manifest, policy: PackagePolicy) -> None:
        await self._caching.learned(reference, digest, manifest, policy)

    def _serve(self, blob: Blob) -> None:
        self.turns.held(blob.digest, blob.layout, blob.layout.stripes, blob.have)
        self._served.add(blob.digest)

    def _announce(self, holding: Holding) -> None:
        """An empty blob has no piece that anybody could give or want."""
        if holding.size:
            self.session.send(holding)

    def _unserve(self, digest: Digest) -> None:
        self._served.discard(digest)
        self.turns.dropped(digest)
        self.session.send(Left(digest))

    # -- what a blob's pull needs (Surroundings in blob_pull.py)

    def origin(self) -> Origin:
        """Central storage. Raises Unavailable."""
        return self._origins.get()

    def pacer_of(self, blob: Digest) -> Pacer:
        return self.policies.pacer(blob)

    def tell_tracker(self, message: Complaint | Holding) -> None:
        self.session.send(message)

    def count_received(self, source: str, length: int) -> None:
        self.received_bytes[source] += length

    def count_rejected(self, reason: str) -> None:
        self.rejected[reason] += 1

    # -- the tracker

    def _unreachable(self) -> str:
        """What to say of it where other hosts cannot reach this one."""
        problem = self.reached.problem
        return f"other hosts cannot reach this agent at {self.session.address}: {problem}" if problem else ""

    def _holdings(self) -> list[Holding]:
        held = [fetching.holding() for fetching in self._fetching.values()]
        for digest in self._served - self._fetching.keys():
            blob = self.store.get(digest)
            if blob is not None and blob.complete:
                held.append(_holding_of(blob))
        return [holding for holding in held if holding.size and not self.departure.leaving]

    def _report(self) -> Report | None:
        for digest in self._served - self._fetching.keys():
            if self.store.get(digest) is None:  # evicted
                self._unserve(digest)
        news = filter(None, (fetching.advance() for fetching in self._fetching.values()))
        advances = list(islice(news, BLOBS_PER_MESSAGE_MAX))
        sent_bytes, busy_s = self.turns.take_sample()
        if not advances and not sent_bytes and not self._fetching:
            return None
        return Report(tuple(advances), sent_bytes, busy_s)

    def _on_message(self, message: Assign | OriginShare | Keep | Release | Reject) -> None:
        match message:
            case OriginShare(bytes_s):
                self.origin_share.limit_bytes_s = bytes_s
            case Keep() | Release():
                if not self.departure.leaving:  # else it is told again when it has been started again
                    self.preseeding.heard(message)
            case Assign(plan):
                fetching = self._fetching.get(plan.blob)
                if fetching is not None:
                    fetching.planned(plan)
            case Reject(problem, blob):
                error = from_problem(problem)
                _logger.warning("the tracker rejects %s: %s", blob or "a message", error)
                fetching = self._fetching.get(blob) if blob is not None else None
                if fetching is not None:
                    fetching.reject(error)

    def _on_tracker_change(self, present: bool) -> None:
        if present:
            self._origins.prepare()
            self.reached.connected()
        for fetching in list(self._fetching.values()):
            fetching.tracker_changed(present)
        if self.swarming is not None:
            self.swarming.tracker_changed(present)
        if present and self.departure.leaving:
            self.session.send(Leaving())
        elif present:
            self.preseeding.connected()


def _hello(settings: AgentSettings, bt_port: int) -> Hello:
    """What this agent says of itself. Raises UsageError for what every tracker would refuse."""
    listens = _all_addresses(settings.address)
    hello = Hello(
        PROTOCOL_VERSION,
        settings.host,
        # Which one of all addresses it is shows when a tracker is reached.
        settings.address if listens is None else f"{socket.gethostname()}:{listens[1]}",
        settings.zone,
        settings.rack,
        settings.upload_bytes_s or 0.0,
        bt_port,
        settings.tls is not None,
        secrets.token_hex(8),
        settings.download_bytes_s or 0.0,
    )
    check_hello(hello)
    return hello


def _all_addresses(address: str) -> tuple[str, int] | None:
    """0.0.0.0 or ::, and the port, where `address` is one of these; None where it is the address of
    one host."""
    host, _, port = address.rpartition(":")
    host = host.strip("[]")
    return (host, int(port)) if host in ("0.0.0.0", "::") and port.isdecimal() else None


def _holding_of(blob: Blob) -> Holding:
    layout = blob.layout
    counts = blob.have.stripe_counts(layout.stripes)
    return Holding(blob.digest, layout.size, layout.piece_size, tuple(counts))
