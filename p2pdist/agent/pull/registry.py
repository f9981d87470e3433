"""The pulls of blobs that are under way and the blobs that this host serves.

Each blob is pulled once, however many requests wait for it. A blob is served from the moment its
pull begins until it is evicted, discarded, or its pull fails; the tracker gets a `Holding` when
serving begins and `Left` when it ends.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import islice

from p2pdist.agent.access.service import AgentAccess
from p2pdist.agent.bittorrent.service import SwarmService
from p2pdist.agent.discovery.trackerless import Neighbourhood
from p2pdist.agent.drain import Drain
from p2pdist.agent.pull.blob import BlobPull
from p2pdist.agent.pull.lists import PeerLists
from p2pdist.agent.pull.origin import Origins, RangeSource
from p2pdist.agent.pull.packages import Packages
from p2pdist.agent.tasks import Tasks, in_thread
from p2pdist.agent.tracker.policies import Policies
from p2pdist.agent.tracker.session import TrackerSession
from p2pdist.agent.uplink import Flow, Uplink
from p2pdist.core.fair_queue import TokenBucket
from p2pdist.core.sources import Sources
from p2pdist.core.stream_slots import Peer
from p2pdist.core.trackerless import Announcement, plan_without_tracker
from p2pdist.model.digest import Digest
from p2pdist.model.errors import Conflict, Corrupt, P2PDistError, Unavailable
from p2pdist.model.manifest import Descriptor
from p2pdist.model.messages import (
    BLOBS_PER_MESSAGE_MAX,
    Complaint,
    Holding,
    Judged,
    Left,
    Priority,
    Report,
    Selected,
    StreamRequest,
    Vouched,
)
from p2pdist.model.pieces import PieceSet
from p2pdist.model.plan import Plan, Source
from p2pdist.model.selection import Selection
from p2pdist.model.vouched import vouched_layout
from p2pdist.origin.contract import Origin
from p2pdist.store.blobs.blob import Blob
from p2pdist.store.blobs.vouched import Listing, VouchedPieces
from p2pdist.store.store import BlobStore
from p2pdist.transfer.pacer import Pacer
from p2pdist.transfer.stream.connect import IDLE_S, ConnectionPool
from p2pdist.transfer.tls import Tls

logger = logging.getLogger(__name__)

UPSTREAM_WAIT_S = 0.5
"""How long a pull from an upstream registry waits for a tracker before it reads alone. A mirror
answers within 2 s, and podman ends a pull of which one blob is refused."""

DISCARD_TRIES = 50
DISCARD_PAUSE_S = 0.1
"""A blob that turned out to be wrong may still be read by streams that are about to end."""


@dataclass(slots=True)
class PullResources:
    """What all blob pulls of an agent share (see the Protocol in blob.py)."""

    host: str
    session: TrackerSession
    access: AgentAccess
    policies: Policies
    origins: Origins
    uplink: Uplink
    swarming: SwarmService | None
    received_bytes: Counter[str]
    """Bytes of verified pieces, by "origin", "upstream", "peer" and "bittorrent"."""
    rejected: Counter[str] = field(default_factory=Counter)
    """Pieces that were not stored, by reason."""
    sources: Sources = field(default_factory=Sources)
    origin_share: TokenBucket = field(default_factory=lambda: TokenBucket(None))
    """This host's share of the rate at which all hosts together may read the origin."""
    connections: ConnectionPool = field(default_factory=ConnectionPool)
    """Idle connections to other agents."""
    lists: PeerLists | None = None
    """What other agents know of vouched lists; None: they are not asked."""
    writers: Counter[Digest] = field(default_factory=Counter)
    """The transfers that write into each blob, those of pulls that have ended included."""

    @property
    def tls(self) -> Tls | None:
        """How connections to other agents are secured."""
        return self.access.tls

    def is_revoked(self, host: str) -> bool:
        """Whether nothing may come from a host any more."""
        return self.access.peers.is_revoked_source(host)

    def shown(self, blob: Digest) -> tuple[str, Selected | None]:
        """What a holding of a blob shows while access is on: the ticket, and what the blob was
        selected from."""
        return self.access.tickets.get(blob), self.access.names.selected(blob) if self.access.peers.on else None

    def ask_ticket(self, blob: Digest, holding: Callable[[], Holding], *, refused: bool = False) -> None:
        """Have the tracker send another ticket where one is due: it comes with the plan that
        answers a holding. `refused`: a sender did not take the one that is here."""
        if self.access.tickets.due(blob, now=asyncio.get_running_loop().time(), refused=refused):
            self.session.send(holding())

    def origin(self) -> Origin:
        """Central storage. Raises Unavailable."""
        return self.origins.get()

    def pacer_of(self, blob: Digest) -> Pacer:
        """The pacer for what arrives of a blob."""
        return self.policies.pacer(blob)

    def send_to_tracker(self, message: Complaint | Holding | Vouched | Judged) -> None:
        """Send a message if a tracker answers."""
        self.session.send(message)

    async def ask_list(self, source: Source, blob: Digest, known: VouchedPieces) -> Listing | None:
        """What another host knows of a vouched list beyond `known`; None where it does not say."""
        return await self.lists.ask(source, blob, known) if self.lists is not None else None

    def count_received(self, source: str, length: int) -> None:
        """Count the bytes of a verified piece."""
        self.received_bytes[source] += length

    def count_rejected(self, reason: str) -> None:
        """Count a piece that was not stored."""
        self.rejected[reason] += 1


class Registry:
    """Starts, joins and ends the pulls of blobs, and knows which blobs are served. `alone` is how
    an agent with an origin of its own plans when it knows neither trackers nor neighbours; None
    where it has no origin. `tracker_wait_s` is how long a new pull waits for a tracker. All methods
    are called on the event loop."""

    def __init__(
        self,
        store: BlobStore,
        packages: Packages,
        resources: PullResources,
        drain: Drain,
        neighbourhood: Neighbourhood | None,
        *,
        alone: Announcement | None,
        tracker_wait_s: float,
    ) -> None:
        self._store, self._packages, self._resources = store, packages, resources
        self._session, self._uplink, self._policies = resources.session, resources.uplink, resources.policies
        self._access = resources.access
        self._drain, self._neighbourhood = drain, neighbourhood
        self._alone, self._tracker_wait_s = alone, tracker_wait_s
        self._fetching: dict[Digest, BlobPull] = {}
        """The pulls under way."""
        self._served: set[Digest] = set()
        """The blobs that are served, those that are being pulled included."""
        self._unwanted: set[Digest] = set()
        """Blobs that `discard` is removing; a new pull takes its blob out."""
        self._expiring: asyncio.TimerHandle | None = None
        """The next time that idle connections are closed."""
        self._waits = Tasks(logger, "waiting for a tracker failed")

    def start(self) -> None:
        """Serve the complete blobs of the store."""
        for blob in self._store.blobs():
            if blob.complete:
                self._serve(blob)

    def stop_fetching(self, error: P2PDistError | None = None) -> None:
        """End all pulls, with `error`, or because the agent stops; what has arrived stays."""
        for pull in list(self._fetching.values()):
            pull.reject(error or Unavailable("the agent stops"))

    def leave_revoked(self) -> None:
        """Receive nothing more from hosts that are revoked."""
        self._resources.connections.clear()
        for pull in list(self._fetching.values()):
            pull.leave_revoked()

    async def stop(self) -> None:
        """Close idle connections, after all pulls have ended."""
        await self._waits.stop()
        if self._expiring is not None:
            self._expiring.cancel()
        self._resources.connections.close()
        if self._resources.lists is not None:
            await self._resources.lists.close()

    # -- pulls

    async def fetch(
        self, layer: Descriptor, priority: Priority = "start", selection: Selection | None = None
    ) -> tuple[Blob, BlobPull | None]:
        """The blob of `layer`, not yet held, and its pull, started or joined; None when the blob is
        complete. The package's policy may override `priority`. `selection` is what `layer`
        describes where that is a part of another blob."""
        if selection is not None:
            self._policies.selected(layer.digest, selection.blob.digest)
            self._access.names.select(layer.digest, selection)

        def claim() -> Blob:
            pieces = selection.pieces if selection else self._packages.pieces(layer)
            return self._store.begin_held(layer.digest, pieces)

        return await self.bring(layer.digest, claim, priority, selection)

    async def bring(
        self,
        digest: Digest,
        claim: Callable[[], Blob],
        priority: Priority,
        selection: Selection | None = None,
        upstream: RangeSource | None = None,
    ) -> tuple[Blob, BlobPull | None]:
        """As `fetch`. `claim` gives the blob in the store, made if it is new, held, and waits for
        the disk; hosts with a lease read it from `upstream` in place of the origin."""
        self._access.peers.require_here()
        priority = self._policies.priority(digest, priority)
        running = self._join(digest, priority)
        if running is not None:
            return running.blob, running
        blob = await in_thread(claim, Blob.release)
        running = self._join(digest, priority)
        complete = blob.complete  # once: a verification may find it wrong at any moment
        if running is not None or complete:
            blob.release()
        if running is not None:
            return running.blob, running
        if complete:
            if digest not in self._served:
                self._serve(blob)
                self._announce(_holding_of(blob, self._resources))
            return blob, None
        return blob, self._begin(blob, priority, selection, upstream)

    def _begin(
        self, blob: Blob, priority: Priority, selection: Selection | None, upstream: RangeSource | None
    ) -> BlobPull:
        """Start the pull of a held blob."""
        digest, present = blob.digest, self._session.connected
        if digest in self._served:  # evicted a moment ago: what was there must not be offered any more
            self._unserve(digest)
        self._unwanted.discard(digest)
        try:
            pull = BlobPull(
                blob,
                self._resources,
                tracker_present=present,
                priority=priority,
                selection=selection,
                upstream=upstream,
            )
        except BaseException:
            blob.release()
            raise
        self._fetching[digest] = pull
        self._uplink.limit(digest, self._policies.upload_limit(digest))
        self._served.add(digest)
        pull.done.add_done_callback(lambda done: self._fetched(pull, done))
        self._announce(pull.holding())
        pull.start()
        alone = self._alone if upstream is None else Announcement("alone", self._resources.host, origin=True)
        if self._neighbourhood is not None:
            self._neighbourhood.plan(digest, blob.layout, pull.done, pull.planned, origin=upstream is not None)
        elif not self._session.connected:
            self._plan_alone(pull, alone, min(UPSTREAM_WAIT_S, self._tracker_wait_s) if upstream else None)
        return pull

    def _plan_alone(self, pull: BlobPull, alone: Announcement | None, wait_s: float | None) -> None:
        """A pull begins while no tracker answers, at an agent that looks for no neighbours. With
        trackers to wait for it waits: other agents wait as well, and all of them would read the
        origin at once. An agent without trackers is alone and reads its own origin; it reads an
        upstream registry after `wait_s`, since its client would do that otherwise."""
        blob = pull.blob
        if self._session.urls:
            limit_s = self._tracker_wait_s if wait_s is None else wait_s
            goes_on = alone if wait_s is not None else None
            self._waits.spawn(_wait_for_tracker(pull, self._session, self._packages, limit_s, goes_on))
        elif alone is not None:
            pull.planned(plan_without_tracker(blob.digest, blob.layout, alone, ()))

    def _join(self, digest: Digest, priority: Priority) -> BlobPull | None:
        """The pull of a blob that is under way, if there is one. A preseed that a start joins
        becomes a start."""
        pull = self._fetching.get(digest)
        if pull is not None and priority == "start" and pull.priority == "preseed":
            pull.escalate()
            self._announce(pull.holding())
        return pull

    def open_flow(self, request: StreamRequest, have: PieceSet, address: str, cut: Callable[[], None]) -> Flow:
        """Open a stream to a child at `address`; `cut` breaks its connection. This host's own pull
        takes on the child's priority, since the child's pieces come through it (priority
        inheritance; Sha, Rajkumar and Lehoczky, 1990). Raises Unavailable when there is no slot."""
        peer = Peer(address, request.host)
        demand = request.demand
        flow = self._uplink.open(
            request.blob, request.stripe, have, request.priority, peer=peer, cut=cut, demand=demand
        )
        if not demand:  # else these pieces alone take the priority on
            self._join(request.blob, request.priority)
        return flow

    def _fetched(self, pull: BlobPull, done: asyncio.Future[None]) -> None:
        blob = pull.blob
        if self._expiring is None:
            self._expiring = asyncio.get_running_loop().call_later(IDLE_S, self._expire_connections)
        del self._fetching[blob.digest]
        blob.release()
        error = None if done.cancelled() else done.exception()
        if error is None:
            if self._resources.swarming is not None:
                self._resources.swarming.changed()
            self._session.send(Report(tuple(filter(None, [pull.advance()]))))
            return
        if not (self._drain.draining and self._session.connected):  # else the tracker moves its children
            self._unserve(blob.digest)

    def _expire_connections(self) -> None:
        left = self._resources.connections.expire()
        self._expiring = asyncio.get_running_loop().call_later(IDLE_S, self._expire_connections) if left else None

    async def discard(self, digest: Digest) -> None:
        """Remove what came of a blob that turned out to be wrong, or gone at the origin."""
        self._unwanted.add(digest)
        pull = self._fetching.get(digest)
        if pull is not None:
            pull.reject(Corrupt(f"{digest} is not what its digest says"))
        if digest in self._served:
            self._unserve(digest)
        failure: P2PDistError | None = None
        for _ in range(DISCARD_TRIES):
            blob = self._store.get(digest)
            if blob is None or digest not in self._unwanted:  # else it is being fetched again since
                failure = None
                break
            try:
                await asyncio.to_thread(self._store.remove if blob.complete else self._store.drop_partial, digest)
            except Conflict as error:  # a stream still reads it, but not for long: all its streams have been ended
                failure = error
                await asyncio.sleep(DISCARD_PAUSE_S)
            except P2PDistError as error:
                failure = error
                break
        self._unwanted.discard(digest)
        if failure is not None:
            logger.error("what is stored as %s is wrong and could not be removed: %s", digest, failure)

    def fetching(self, digest: Digest) -> BlobPull | None:
        """The pull of the blob that is under way, if there is one."""
        return self._fetching.get(digest)

    async def describe(self, digest: Digest) -> Descriptor:
        """The descriptor of a blob that is requested by digest, without fetching it. Raises
        NotFound, Unavailable."""
        return await self._packages.find_blob(digest, lambda text: None)

    # -- serving

    def serves(self, digest: Digest) -> bool:
        """Whether other agents may receive this blob from here."""
        return digest in self._served

    def _serve(self, blob: Blob) -> None:
        self._uplink.held(blob.digest, blob.layout, blob.layout.stripes, blob.have)
        self._uplink.limit(blob.digest, self._policies.upload_limit(blob.digest))
        self._served.add(blob.digest)

    def _announce(self, holding: Holding) -> None:
        """Send a holding to the tracker, unless its blob is empty: that has no piece to give."""
        if holding.size:
            self._session.send(holding)

    def _unserve(self, digest: Digest) -> None:
        self._served.discard(digest)
        self._uplink.dropped(digest)
        self._session.send(Left(digest))

    # -- the tracker

    def planned(self, plan: Plan, ticket: str = "") -> None:
        """The tracker has planned a pull, and sends a ticket for its blob."""
        raised = self._access.tickets.keep(plan.blob, ticket, now=asyncio.get_running_loop().time())
        pull = self._fetching.get(plan.blob)
        if pull is not None:
            pull.planned(plan, reopen=raised)

    def reject(self, blob: Digest, error: P2PDistError) -> None:
        """The tracker refuses a pull, which fails with `error`."""
        pull = self._fetching.get(blob)
        if pull is not None:
            pull.reject(error)

    def tracker_changed(self, present: bool) -> None:
        """A tracker answers from now on, or none does."""
        for pull in list(self._fetching.values()):
            pull.tracker_changed(present)

    def holdings(self) -> list[Holding]:
        """All that this host holds and fetches, for a tracker whose session opens; none while it
        drains."""
        holdings = [pull.holding() for pull in self._fetching.values()]
        for digest in self._served - self._fetching.keys():
            blob = self._store.get(digest)
            if blob is not None and blob.complete:
                holdings.append(_holding_of(blob, self._resources))
        return [holding for holding in holdings if holding.size and not self._drain.draining]

    def report(self) -> Report | None:
        """Progress and use of the uplink since the last report; None when there is none. Stops
        serving what was evicted meanwhile."""
        for digest in self._served - self._fetching.keys():
            if self._store.get(digest) is None:  # evicted
                self._unserve(digest)
        news = filter(None, (pull.advance() for pull in self._fetching.values()))
        advances = list(islice(news, BLOBS_PER_MESSAGE_MAX))
        sent_bytes, busy_s = self._uplink.take_sample()
        if not advances and not sent_bytes and not self._fetching:
            return None
        return Report(tuple(advances), sent_bytes, busy_s)


def _holding_of(blob: Blob, resources: PullResources) -> Holding:
    layout = blob.layout
    counts = tuple(blob.have.stripe_counts(layout.stripes))
    ticket, selected = resources.shown(blob.digest)
    matched = blob.whole and layout == vouched_layout(layout.size)
    return Holding(
        blob.digest,
        layout.size,
        layout.piece_size,
        counts,
        ticket=ticket,
        selected=selected,
        vouched=matched,
        matched=matched,
    )


async def _wait_for_tracker(
    pull: BlobPull, session: TrackerSession, packages: Packages, limit_s: float, alone: Announcement | None
) -> None:
    """Note what a pull waits for. When no tracker has answered for `limit_s`, end it; with `alone`,
    have it go on alone."""
    loop = asyncio.get_running_loop()
    deadline = loop.time() + limit_s
    while not pull.done.done() and not session.connected:
        pull.note, failure = packages.no_tracker()
        if loop.time() >= deadline:
            if alone is not None:
                pull.planned(plan_without_tracker(pull.blob.digest, pull.blob.layout, alone, ()))
            else:
                pull.reject(failure)
            break  # a pull that has ended waits for nothing
        await session.wait_connected(max(0.0, min(1.0, deadline - loop.time())))
    pull.note = ""
