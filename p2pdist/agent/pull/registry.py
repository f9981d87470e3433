"""The pulls of blobs that are under way and the blobs that this host serves.

Each blob is pulled once, however many requests wait for it. A blob is served from the moment its
pull begins until it is evicted, discarded, or its pull fails; the tracker gets a `Holding` when
serving begins and `Left` when it ends.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import Counter
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import islice

from p2pdist.agent.access.service import AgentAccess
from p2pdist.agent.bittorrent.service import SwarmService
from p2pdist.agent.discovery.trackerless import Neighbourhood
from p2pdist.agent.drain import Drain
from p2pdist.agent.pull.blob import BlobPull, agent_stops
from p2pdist.agent.pull.lists import PeerLists
from p2pdist.agent.pull.origin import Origins, RangeSource
from p2pdist.agent.pull.packages import Packages
from p2pdist.agent.tasks import Tasks, in_thread
from p2pdist.agent.tracker.policies import Policies
from p2pdist.agent.tracker.session import TrackerSession
from p2pdist.agent.tracker.sources import NamedSources
from p2pdist.agent.tracker.trackers import Owned, Trackers
from p2pdist.agent.uplink import Flow, Uplink
from p2pdist.core.fair_queue import TokenBucket
from p2pdist.core.sources import Sources
from p2pdist.core.stream_slots import Peer
from p2pdist.core.trackerless import Announcement, plan_from_memory, plan_without_tracker
from p2pdist.core.uplink import Urgency
from p2pdist.model.address import Vicinity
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
from p2pdist.model.plan import ORIGIN, Plan, Source
from p2pdist.model.selection import Selection
from p2pdist.model.vouched_list import vouched_layout
from p2pdist.origin.contract import Origin
from p2pdist.store.blobs.blob import Blob
from p2pdist.store.blobs.vouched_pieces import Listing, VouchedPieces
from p2pdist.store.store import BlobStore, drop_opened
from p2pdist.transfer.pacer import Pacer
from p2pdist.transfer.stream.connections import IDLE_S, ConnectionPool
from p2pdist.transfer.tls import Tls

logger = logging.getLogger(__name__)

UPSTREAM_WAIT_S = 0.5
"""How long a pull from an upstream registry waits for a tracker before it reads alone. A mirror
answers within 2 s, and podman ends a pull of which one blob is refused."""

PLAN_WAIT_S = 0.5
"""A pull that a client of the mirror waits for, and that has no plan after so long, sees whether
the tracker hangs."""

LOOK_S = 1.0
"""A pull that has no plan looks so often whether a tracker is connected still."""

UNWANTED_S = 60.0
"""A pull that clients of the mirror alone wanted ends when none has asked for its blob for so long:
a client that was not answered in time reads from the registry itself."""

DISCARD_TRIES = 50
DISCARD_PAUSE_S = 0.1
"""A blob that turned out to be wrong may still be read by streams that are about to end."""


_of_client = ContextVar("of_client", default=False)
"""Whether what runs is for a client of the mirror."""


@dataclass(slots=True)
class PullResources:
    """What all blob pulls of an agent share (see the Protocol in blob.py)."""

    host: str
    trackers: Trackers
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
    named: NamedSources | None = None
    """The hosts that trackers named; None: they are not remembered."""
    peer_wait_s: float = 0.0
    """How long a pull waits for hosts that may come back, while no tracker answers."""
    lists: PeerLists | None = None
    """What other agents know of vouched lists; None: they are not asked."""
    writers: Counter[Digest] = field(default_factory=Counter)
    """The transfers that write into each blob, those of pulls that have ended included."""

    @property
    def tls(self) -> Tls | None:
        """How connections to other agents are secured."""
        return self.access.tls

    @property
    def vicinity(self) -> Vicinity:
        """From where this host connects to others."""
        return self.trackers.home.vicinity

    def is_revoked(self, host: str) -> bool:
        """Whether nothing may come from a host any more."""
        return self.access.peers.is_revoked_source(host)

    def proof(self, blob: Digest) -> tuple[str, Selected | None]:
        """What a holding of a blob shows while access is on: the ticket, and what the blob was
        selected from."""
        return self.access.tickets.get(blob), self.access.names.selected(blob) if self.access.peers.on else None

    def ask_ticket(self, blob: Digest, holding: Callable[[], Holding], *, refused: bool = False) -> None:
        """Have the tracker send another ticket where one is due: it comes with the plan that
        answers a holding. `refused`: a sender did not take the one that is here."""
        if self.access.tickets.due(blob, now=asyncio.get_running_loop().time(), refused=refused):
            self.trackers.send(holding())

    def origin(self) -> Origin:
        """Central storage. Raises Unavailable."""
        return self.origins.get()

    def pacer_of(self, blob: Digest) -> Pacer:
        """The pacer for what arrives of a blob."""
        return self.policies.pacer(blob)

    def send_to_tracker(self, message: Complaint | Holding | Report | Vouched | Judged) -> None:
        """Send a message to the tracker of its blob, if that one answers."""
        self.trackers.send(message)

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
        self._trackers, self._uplink, self._policies = resources.trackers, resources.uplink, resources.policies
        self._session, self._access = resources.trackers.home, resources.access
        self._drain = drain
        self.clients = ClientInterest(store, self.fetching, resources.uplink.feeds)
        """What clients of the mirror ask for."""
        self._untracked = _UntrackedPulls(resources, packages, neighbourhood, alone, tracker_wait_s, self.clients.waits)
        self._fetching: dict[Digest, BlobPull] = {}
        """The pulls under way."""
        self.served: set[Digest] = set()
        """The blobs that are served, those that are being pulled included."""
        self._unwanted: set[Digest] = set()
        """Blobs that `discard` is removing; a new pull takes its blob out."""
        self._expiring: asyncio.TimerHandle | None = None
        """The next time that idle connections are closed."""

    def start(self) -> None:
        """Serve the complete blobs of the store, but for those that were decrypted here."""
        for blob in self._store.blobs():
            if blob.complete and blob.digest not in self._store.opened:
                self._serve(blob)

    def stop_fetching(self, error: P2PDistError | None = None) -> None:
        """End all pulls, with `error`, or because the agent stops; what has arrived stays."""
        for pull in list(self._fetching.values()):
            pull.reject(error or agent_stops())

    def leave_revoked(self) -> None:
        """Receive nothing more from hosts that are revoked."""
        self._resources.connections.clear()
        for pull in list(self._fetching.values()):
            pull.leave_revoked()

    async def stop(self) -> None:
        """Close idle connections, after all pulls have ended."""
        await self._untracked.stop()
        if self._resources.named is not None:
            await self._resources.named.stop()
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
            self.clients.note(digest)
            return running.blob, running
        blob = await _claimed(self._store, digest, claim)
        running = self._join(digest, priority)
        complete = blob.complete  # once: a verification may find it wrong at any moment
        if running is not None or complete:
            blob.release()
        if not complete:
            self.clients.note(digest)
        if running is not None:
            return running.blob, running
        if complete:
            if digest not in self.served and digest not in self._store.opened:
                self._serve(blob)
                self._announce(_holding_of(blob, self._resources))
            return blob, None
        return blob, self._begin(blob, priority, selection, upstream)

    def _begin(
        self, blob: Blob, priority: Priority, selection: Selection | None, upstream: RangeSource | None
    ) -> BlobPull:
        """Start the pull of a held blob."""
        digest, present = blob.digest, self._trackers.answers(blob.digest)
        if digest in self.served:  # evicted a moment ago: what was there must not be offered any more
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
        self.served.add(digest)
        pull.done.add_done_callback(lambda done: self._fetched(pull, done))
        self._announce(pull.holding())
        pull.start()
        self._untracked.begun(pull, tracked=present, of_upstream=upstream is not None)
        return pull

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
        urgency: Urgency = "none" if not request.demand else "soon waited for" if request.prefetch else "waited for"
        rides = request.rides and request.demand and request.stripes > 1  # else a length may have been said
        kind = (request.blob, request.stripe, have, request.priority)
        flow = self._uplink.open(*kind, peer=peer, cut=cut, urgency=urgency, rides=rides, bytes_s=request.bytes_s)
        if not request.demand:  # else these pieces alone take the priority on
            self._join(request.blob, request.priority)
        return flow

    def _fetched(self, pull: BlobPull, done: asyncio.Future[None]) -> None:
        blob = pull.blob
        if self._expiring is None:
            self._expiring = asyncio.get_running_loop().call_later(IDLE_S, self._expire_connections)
        del self._fetching[blob.digest]
        self.clients.forget(blob.digest)
        blob.release()
        error = None if done.cancelled() else done.exception()
        if error is None:
            if self._resources.named is not None:
                self._resources.named.forget(blob.digest)
            if self._resources.swarming is not None:
                self._resources.swarming.changed()
            self._trackers.send(Report(tuple(filter(None, [pull.advance()]))))
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
        if digest in self.served:
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
        return digest in self.served and digest not in self._store.opened

    def _serve(self, blob: Blob) -> None:
        self._uplink.held(blob.digest, blob.layout, blob.layout.stripes, blob.have)
        self._uplink.limit(blob.digest, self._policies.upload_limit(blob.digest))
        self.served.add(blob.digest)

    def _announce(self, holding: Holding) -> None:
        """Send a holding to the tracker, unless its blob is empty: that has no piece to give."""
        if holding.size:
            self._trackers.send(holding)

    def _unserve(self, digest: Digest) -> None:
        self.served.discard(digest)
        self._uplink.dropped(digest)
        self._trackers.send(Left(digest))

    # -- the tracker

    def planned(self, plan: Plan, ticket: str = "") -> None:
        """The tracker has planned a pull, and sends a ticket for its blob."""
        raised = self._access.tickets.keep(plan.blob, ticket, now=asyncio.get_running_loop().time())
        if self._resources.named is not None and plan.blob in self._fetching:
            self._resources.named.planned(plan, ticket)
        self._untracked.planned(plan.blob)
        pull = self._fetching.get(plan.blob)
        if pull is not None:
            pull.planned(plan, reopen=raised)

    def reject(self, blob: Digest, error: P2PDistError) -> None:
        """The tracker refuses a pull, which fails with `error`."""
        pull = self._fetching.get(blob)
        if pull is not None:
            pull.reject(error)

    def tracker_changed(self, present: bool, owned: Owned) -> None:
        """A tracker of some blobs answers from now on, or none does."""
        for digest, pull in list(self._fetching.items()):
            if owned(digest):
                pull.tracker_changed(present)

    def holdings(self, owned: Owned) -> list[Holding]:
        """What this host holds and fetches of some blobs, for their tracker whose session opens;
        none while it drains."""
        holdings = [pull.holding() for digest, pull in self._fetching.items() if owned(digest)]
        for digest in filter(owned, self.served - self._fetching.keys()):
            blob = self._store.get(digest)
            if blob is not None and blob.complete and digest not in self._store.opened:
                holdings.append(_holding_of(blob, self._resources))
        return [holding for holding in holdings if holding.size and not self._drain.draining]

    def report(self, reader: str, owned: Owned) -> Report | None:
        """Progress of some blobs and use of the uplink since the last report to this tracker; None
        when there is none. Stops serving what was evicted meanwhile."""
        for digest in self.served - self._fetching.keys():
            if self._store.get(digest) is None or digest in self._store.opened:  # evicted, and perhaps decrypted since
                self._unserve(digest)
        pulls = [pull for digest, pull in self._fetching.items() if owned(digest)]
        news = filter(None, (pull.advance() for pull in pulls))
        advances = list(islice(news, BLOBS_PER_MESSAGE_MAX))
        sent_bytes, busy_s = self._uplink.take_sample(reader)
        if not advances and not sent_bytes and not pulls:
            return None
        return Report(tuple(advances), sent_bytes, busy_s)


async def _claimed(store: BlobStore, digest: Digest, claim: Callable[[], Blob]) -> Blob:
    """The blob that `claim` gives, held. What was decrypted here stays marked as such, also where a
    package that is not sealed names it: its bytes have not come from there. So a partial one is
    begun anew, once its opening has ended."""
    while True:
        blob = await in_thread(claim, Blob.release)
        if blob.complete or digest not in store.opened:
            return blob
        blob.release()
        if not await asyncio.to_thread(drop_opened, store, digest):
            await asyncio.sleep(DISCARD_PAUSE_S)


def _holding_of(blob: Blob, resources: PullResources) -> Holding:
    layout = blob.layout
    counts = tuple(blob.have.stripe_counts(layout.stripes))
    ticket, selected = resources.proof(blob.digest)
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


class ClientInterest:
    """Ends pulls that only clients of the mirror wanted, and none does any more. `fetching` finds
    the pull of a blob that is under way; `feeds` says whether other hosts receive a blob from here,
    some of which may have clients that wait. On the event loop."""

    def __init__(
        self,
        store: BlobStore,
        fetching: Callable[[Digest], BlobPull | None],
        feeds: Callable[[Digest], bool],
    ) -> None:
        self._store, self._fetching, self._feeds = store, fetching, feeds
        self._asking: Counter[Digest] = Counter()
        """Requests of clients under way, by blob."""
        self._asked: Counter[Digest] = Counter()
        """Requests of clients so far, by blobs that are on their way."""
        self._others: set[Digest] = set()
        """Blobs on their way that something else wants, too, such as a pull of the whole image."""

    @contextlib.contextmanager
    def asking(self, digest: Digest) -> Iterator[None]:
        """Around a client's request for a blob, in its task and those that begin there."""
        asked = _of_client.set(True)
        self._asking[digest] += 1
        try:
            yield
        finally:
            _of_client.reset(asked)
            self._asking[digest] -= 1
            if not self._asking[digest]:
                del self._asking[digest]
                self._look_later(digest)

    def waits(self, digest: Digest) -> bool:
        """Whether a client waits for a blob."""
        return digest in self._asking

    def note(self, digest: Digest) -> None:
        """A blob that is not here is asked for, by a client or by something else."""
        if not _of_client.get():
            self._others.add(digest)

    def forget(self, digest: Digest) -> None:
        """The pull of a blob has ended."""
        self._others.discard(digest)
        self._asked.pop(digest, None)

    def _look_later(self, digest: Digest) -> None:
        blob = self._store.get(digest)
        if blob is not None and blob.complete:
            return
        self._asked[digest] += 1
        asyncio.get_running_loop().call_later(UNWANTED_S, self._look, digest, self._asked[digest])

    def _look(self, digest: Digest, asked: int) -> None:
        pull = self._fetching(digest)
        if pull is None:
            self._asked.pop(digest, None)
        elif self._asked[digest] != asked or digest in self._others or digest in self._asking:
            return
        elif self._feeds(digest):
            asyncio.get_running_loop().call_later(UNWANTED_S, self._look, digest, asked)
        else:
            pull.reject(Unavailable(f"no client has asked for {digest} for {UNWANTED_S:g} s", remedy="Ask again"))


class _UntrackedPulls:
    """Plans pulls for which no tracker does. `alone` is how an agent with an origin of its own
    plans; see Registry. `wanted`: whether a client of the mirror waits for a blob."""

    def __init__(
        self,
        resources: PullResources,
        packages: Packages,
        neighbourhood: Neighbourhood | None,
        alone: Announcement | None,
        tracker_wait_s: float,
        wanted: Callable[[Digest], bool],
    ) -> None:
        self._wanted = wanted
        self._host, self._packages, self._resources = resources.host, packages, resources
        self._trackers, self._session = resources.trackers, resources.trackers.home
        self._neighbourhood, self._alone, self._tracker_wait_s = neighbourhood, alone, tracker_wait_s
        self._unplanned: dict[Digest, BlobPull] = {}
        """The pulls from upstream registries for which a tracker is to plan, and has not."""
        self._waits = Tasks(logger, "waiting for a tracker failed")

    def begun(self, pull: BlobPull, *, tracked: bool, of_upstream: bool) -> None:
        """A pull has begun; `tracked`: while the owner of its blob answered. While the home answers
        another tracker soon takes the place of an owner that is away."""
        if of_upstream and (tracked or self._session.connected):
            self._unplanned[pull.blob.digest] = pull
            self._waits.spawn(self._watch(pull))
        else:
            self._plan(pull, of_upstream=of_upstream)

    def planned(self, digest: Digest) -> None:
        """A tracker has planned the pull of a blob."""
        self._unplanned.pop(digest, None)

    async def stop(self) -> None:
        """End all waiting."""
        await self._waits.stop()

    async def _watch(self, pull: BlobPull) -> None:
        """Where all trackers go away before the owner has planned, have the pull go on as without
        one. Where the owner hangs or is away, that is waited for, as it may be busy or get a
        successor, unless a client waits, which would turn to the registry. What a tracker plans
        later counts as always."""
        digest = pull.blob.digest
        if not self._trackers.attention(digest).silent:
            await asyncio.wait([pull.done], timeout=PLAN_WAIT_S)
        while self._lacks_plan(pull):
            attention = self._trackers.attention(digest)
            awaited = self._session.connected and not self._wanted(digest)
            if not awaited and (attention.silent or not await attention.responds()) and self._lacks_plan(pull):
                del self._unplanned[digest]
                self._plan(pull, of_upstream=True)
                return
            await asyncio.wait([pull.done], timeout=LOOK_S)
        if self._unplanned.get(digest) is pull:
            del self._unplanned[digest]

    def _lacks_plan(self, pull: BlobPull) -> bool:
        return not pull.done.done() and self._unplanned.get(pull.blob.digest) is pull

    def _plan(self, pull: BlobPull, *, of_upstream: bool) -> None:
        """Plan with the neighbours that are known, or alone. With trackers to wait for a pull that
        would read the origin waits: other agents wait as well, and all of them would read it at
        once. An agent without trackers is alone and reads its own origin; it reads an upstream
        registry after UPSTREAM_WAIT_S, or at once where the tracker hangs, since its client would
        do that otherwise. Neighbours plan for each other while no tracker answers at all."""
        blob, session = pull.blob, self._session
        alone = Announcement("alone", self._host, origin=True) if of_upstream else self._alone
        planned = partial(_planned_beside, pull) if session.connected else pull.planned
        if self._neighbourhood is not None and not session.attention.answers:
            self._neighbourhood.plan(blob.digest, blob.layout, pull.done, planned, origin=of_upstream)
        elif session.connected and not of_upstream:
            return
        elif session.urls and not session.connected:
            limit_s = min(UPSTREAM_WAIT_S, self._tracker_wait_s) if of_upstream else self._tracker_wait_s
            goes_on = alone if of_upstream else None
            self._waits.spawn(self._go_on(pull, limit_s, goes_on))
        elif alone is not None:
            planned(plan_without_tracker(blob.digest, blob.layout, alone, ()))

    async def _go_on(self, pull: BlobPull, limit_s: float, alone: Announcement | None) -> None:
        """Without a tracker, ask the hosts that one named before; where it named none, wait for
        one."""
        resources, session, blob = self._resources, self._session, pull.blob
        if resources.named is not None and alone is None:
            named = await resources.named.recall(blob.digest)
            if named.hosts and not (session.connected or pull.done.done()):
                resources.access.tickets.keep(blob.digest, named.ticket, now=asyncio.get_running_loop().time())
                names = ", ".join(str(source) for source in named.hosts)
                logger.info("no tracker answers: asking %s for %s, which one named before", names, blob.digest)
                pull.planned(plan_from_memory(blob.digest, blob.layout, self._host, named.hosts))
                return
        await _wait_for_tracker(pull, session, self._packages, limit_s, alone)


def _planned_beside(pull: BlobPull, plan: Plan) -> None:
    """Give a pull a plan that was made while a tracker is connected, and hangs. Superpeers count
    only without a tracker: a stripe for which no other host is known is read at once."""
    stripes = tuple(replace(stripe, parent=ORIGIN) if stripe.parent is None else stripe for stripe in plan.stripes)
    pull.planned(replace(plan, stripes=stripes))


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
