"""The service of preseeds and rankings: joins their core with the database, the sessions and the
content of packages.

All events of the core go through `submit` on the event loop; its commands go to sessions and to the
database, for which a thread of its own waits.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections import Counter, OrderedDict
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Protocol

import msgspec

from p2pdist.model.access import Identity, Right
from p2pdist.model.digest import Digest, digest_of
from p2pdist.model.errors import Conflict, NotFound, P2PDistError, Refused, UsageError
from p2pdist.model.fleet import Assignment, Ranked, RoleHosts
from p2pdist.model.hub import HubReference, is_hub, parse_hub
from p2pdist.model.image import ImageReference, is_image, package_reference, parse_image
from p2pdist.model.manifest import Reference, decode_manifest, is_bootstrap, parse_reference
from p2pdist.model.messages import Keep, Kept, Release, Spares
from p2pdist.model.platform import Platform, parse_platform
from p2pdist.model.preseed import (
    PreseedBrief,
    PreseedRecord,
    PreseedRequest,
    PreseedSummary,
    Progress,
    RankRequest,
    canonical,
    fingerprint,
    own_id,
)
from tracker.content import Content
from tracker.core.affinity import Affinity, Parts, RedundantPacks, RoleNeed
from tracker.core.fleet import Fleet
from tracker.core.host import Host
from tracker.core.preseeds.orders import RECONNECT_GRACE_S, Preseeds
from tracker.core.preseeds.preseed import (
    AskCandidates,
    Candidates,
    Event,
    Gone,
    HostReport,
    Joined,
    Loaded,
    Reported,
    SaveFailed,
    Send,
    Synced,
    Tally,
    Tick,
)
from tracker.core.preseeds.selectors import parse_selector
from tracker.state.preseeds import PreseedDatabase
from tracker.upstreams.hubs import Hubs
from tracker.upstreams.upstreams import Upstreams

TICK_S = 0.25
EXCHANGE_S = 1.0
PURGE_S = 600.0
CLOCK_STEP_S = 0.25
"""By less the time is not corrected: to ask the database for it takes some time, too."""

STOP_S_MAX = 5.0
"""How long a tracker that ends waits for the database."""

COSTLY_S = 0.005
REUSED_FACTOR, REUSED_S_MAX = 10.0, 1.0
ANSWERS_MAX = 64
"""Where it takes longer than COSTLY_S to say how far a preseed is, the answer is given again for so
many times as long, REUSED_S_MAX at most: all nodes of a job may ask at one moment, and all hosts of
the fleet are looked at for each answer. So many answers are kept."""

PACKAGES_REMEMBERED_MAX = 1000
PACKAGE_CHARACTERS_MAX = 512
"""Of the name of a package that agents are asked to hold (`Keep`)."""

logger = logging.getLogger(__name__)
_reports_decoder = msgspec.json.Decoder(dict[str, HostReport])


class _Clock:
    """Seconds since the epoch, for deadlines and times to live. A tracker alone on its database
    reads the system's clock once and counts on from there, so that a clock which is set meanwhile
    ends no preseed early or late. Several trackers on one database go by its clock: one whose own
    is ahead would end the preseeds of all."""

    def __init__(self) -> None:
        self._epoch_s = time.time() - time.monotonic()

    def now(self) -> float:
        return time.monotonic() + self._epoch_s

    def set(self, core: Preseeds, epoch_s: float | None) -> None:
        """The monotonic clock began at this time by the database's clock, None where that does not
        count."""
        if epoch_s is not None and abs(epoch_s - self._epoch_s) >= CLOCK_STEP_S:
            core.set_clock(epoch_s - self._epoch_s)
            self._epoch_s = epoch_s


class _Answers:
    """How far preseeds are, as it was said a moment ago where that took long."""

    def __init__(self) -> None:
        self._kept: OrderedDict[str, tuple[object, float, Progress]] = OrderedDict()
        """By preseed: what an answer goes by, until when it is given again, and the answer."""

    def find(self, core: Preseeds, identifier: str, *, now: float) -> Progress:
        """The progress of a preseed. Raises NotFound."""
        began_at, preseed = time.monotonic(), core.find(identifier)
        goes_by = preseed.record, preseed.tally, core.all_known(identifier, now=now)
        known = self._kept.get(identifier)
        if known is not None and known[0] == goes_by and began_at < known[1]:
            return known[2]
        found = core.progress(identifier, now=now)
        ended_at = time.monotonic()
        self._kept.pop(identifier, None)
        if (took_s := ended_at - began_at) > COSTLY_S:
            self._kept[identifier] = goes_by, ended_at + min(REUSED_S_MAX, REUSED_FACTOR * took_s), found
            if len(self._kept) > ANSWERS_MAX:
                self._kept.popitem(last=False)
        return found


def sees(record: PreseedRecord, identity: Identity, *rights: Right) -> bool:
    """Whether an identity ordered a preseed, or has one of these rights and may read its
    package."""
    if record.owner and record.owner == str(identity):
        return True
    return any(map(identity.may, rights)) and identity.may_read([package_reference(record.package).name])


class Sessions(Protocol):
    """What preseeds need of the tracker's service."""

    fleet: Fleet
    content: Content
    upstreams: Upstreams
    hubs: Hubs

    def send(self, host: str, message: Keep | Release) -> None:
        """Queue a message for a host; nothing happens when it is not connected."""


class PreseedService:
    """Takes orders of preseeds and answers rankings. `grace_s` is how long after the start hosts
    may take to return."""

    def __init__(self, sessions: Sessions, database: PreseedDatabase, *, grace_s: float = RECONNECT_GRACE_S) -> None:
        fleet = sessions.fleet
        self._redundant = RedundantPacks()
        self.affinity = Affinity(fleet.hosts, fleet.swarms, fleet.capacities, self._redundant.hosts)
        self._clock = _Clock()
        self.core = Preseeds(
            self.affinity, started_at=self._clock.now(), shared=database.shared, grace_s=grace_s, lost=fleet.lost
        )
        self._sessions, self._database = sessions, database
        self._saving: set[asyncio.Task[None]] = set()
        """Changes that are being written, and questions to the other trackers."""
        self._ordering = asyncio.Lock()
        """Held from the look at the limits until the core knows the order: orders of one moment
        count each other."""
        self.check_callback: Callable[[str], None] = _no_callbacks
        """Raises Refused or UsageError for a URL to which a callback may not lead."""

        self.candidates: Callable[[Parts], Awaitable[Affinity]] = self._own_view
        """Says what all trackers know of the hosts that need some blobs, where
        `core.asks_others`."""
        self._parts: OrderedDict[Digest, tuple[tuple[Digest, ...], dict[Digest, int]]] = OrderedDict()
        """By manifest; `_parts`."""
        self._answers = _Answers()

    def now(self) -> float:
        """The time by which preseeds go, in seconds since the epoch."""
        return self._clock.now()

    async def load(self) -> None:
        """Take up what earlier trackers were asked for. Raises Unavailable."""
        self._clock.set(self.core, await self._database.call(self._database.epoch_s))
        self.submit(Loaded(tuple(await self._database.call(self._database.read_all))))

    async def run(self) -> None:
        """Drive the core's clock until cancelled, and exchange news with other trackers."""
        exchanged_at = purged_at = time.monotonic()
        while True:
            await asyncio.sleep(TICK_S)
            now = time.monotonic()
            try:
                self.submit(Tick())
                if now - purged_at >= PURGE_S:
                    purged_at, exchanged_at = now, 0.0
                    await self._database.call(self._database.purge, now=self._clock.now())
                if now - exchanged_at >= (EXCHANGE_S if self.core.shared else 2 * PURGE_S):
                    exchanged_at = now
                    await self._exchange()
            except P2PDistError as error:
                logger.warning("preseeds: %s", error)
            except Exception:
                logger.exception("preseeds: a tick failed")

    async def stop(self) -> None:
        """Wait until the changes under way are written, at most STOP_S_MAX; leave the database."""
        try:
            async with asyncio.timeout(STOP_S_MAX):
                await asyncio.gather(*self._saving, return_exceptions=True)
                await asyncio.to_thread(self._database.close)  # its own thread may hang
        except TimeoutError:
            logger.warning("the last changes of preseeds may not be written: the database does not answer")

    def submit(self, event: Event) -> None:
        """Hand an event to the core and carry out its commands."""
        for command in self.core.handle(event, now=self._clock.now()):
            if isinstance(command, Send):
                self._sessions.send(command.host, command.message)
                continue
            work = _candidates(self, command) if isinstance(command, AskCandidates) else self._save(command.record)
            task = asyncio.create_task(work)
            self._saving.add(task)
            task.add_done_callback(self._saving.discard)

    # -- events of sessions (Listener in service.py)

    def opened(self, host: str) -> None:
        self._redundant.forget(host)
        self.submit(Joined(host))

    def closed(self, host: str) -> None:
        self._redundant.forget(host)
        self.submit(Gone(host))

    def draining(self, host: str) -> None:
        self.submit(Gone(host))

    def heard(self, host: str, message: Kept | Spares) -> None:
        if isinstance(message, Spares):
            self._redundant.note(host, message)
        else:
            self.submit(Reported(host, message))

    # -- the database

    async def _save(self, record: PreseedRecord) -> None:
        try:
            present = await self._database.call(self._database.replace, record)
        except P2PDistError as error:
            logger.warning("preseed %s: %s", record.id, error)
            await asyncio.sleep(EXCHANGE_S)
            present = None
        self.submit(Loaded((present,)) if present is not None else SaveFailed(record.id))

    async def _exchange(self) -> None:
        preseeds = self.core.by_id
        reports = self.core.local_reports(now=self._clock.now()) if self.core.shared else {}
        ours = {identifier: msgspec.json.encode(hosts).decode() for identifier, hosts in reports.items()}
        versions = {identifier: preseed.record.version for identifier, preseed in preseeds.items()}
        exchange = await self._database.call(self._database.exchange, versions, ours)
        self._clock.set(self.core, exchange.epoch_s)
        self.submit(Loaded(exchange.records))
        theirs = {
            tracker: {identifier: _reports_decoder.decode(text) for identifier, text in texts.items()}
            for tracker, texts in exchange.reports.items()
        }
        # Orders that were taken here meanwhile are in the database, too.
        fresh = frozenset(preseeds) - versions.keys()
        self.submit(Synced(exchange.ids | fresh, theirs))

    # -- what schedulers ask

    async def create(
        self,
        request: PreseedRequest,
        *,
        owner: str = "",
        source: str = "",
        sees: Callable[[PreseedRecord], bool] = lambda record: True,
    ) -> tuple[Progress, bool]:
        """Take a preseed of this owner, while access is off of the address `source`, and whether it
        is new. An id that stands for a preseed which the owner does not see is free to it: that one
        is kept under another. Raises UsageError, NotFound for an unknown package, Conflict when its
        id stands for another one, Unavailable."""
        body = canonical(request)
        if request.selector is not None:
            parse_selector(request.selector)
        if request.callback is not None:
            self.check_callback(request.callback)
        given = identifier = request.id or secrets.token_hex(8)
        stored, created = await self._stored(request, identifier, owner, source)
        if not (stored.owner in ("", owner) and stored.body == body) and not sees(stored):
            identifier = own_id(given, owner)
            stored, created = await self._stored(request, identifier, owner, source)
        if stored.body != body or (owner and stored.owner not in ("", owner)):
            raise Conflict(
                f"the preseed {given} was asked for otherwise",
                remedy="Give it another id: one stands for its first order, also for a day after that has ended",
            )
        self.submit(Loaded((stored,)))
        return self.progress(identifier), created

    async def _stored(
        self, request: PreseedRequest, identifier: str, owner: str, source: str
    ) -> tuple[PreseedRecord, bool]:
        """The preseed that is kept under an id: the one of `request` where none was, which the
        second value says."""
        stored = await self._database.call(self._database.read, identifier)
        created = stored is None
        if stored is None:
            self.core.check_room(owner, source)
            package, parts = await self._package(request.package, request.platform or "")
            now = self._clock.now()
            record = PreseedRecord(
                identifier,
                1,
                canonical(request),
                package,
                tuple(parts.items()),
                "running",
                now,
                deadline_at=now + request.deadline if request.deadline is not None else None,
                expires_at=now + request.ttl if request.ttl is not None else None,
                owner=owner,
                source=source,
            )
            async with self._ordering:
                if identifier not in self.core.by_id:  # another node of the job may have been faster
                    self.core.check_room(owner, source)
                stored = await self._database.call(self._database.insert, record)
                self.submit(Loaded((stored,)))
            created = stored == record
        return stored, created

    async def know(self, *identifiers: str) -> None:
        """Take up the preseeds of these ids that another tracker was asked for a moment ago: the
        next exchange would tell of them. Raises Unavailable."""
        for identifier in identifiers:
            if self.core.shared and identifier not in self.core.by_id:
                record = await self._database.call(self._database.read, identifier)
                if record is not None:
                    self.submit(Loaded((record,)))

    async def cancel(self, identifier: str) -> None:
        """Release all hosts. Raises NotFound, Conflict, Unavailable."""
        preseed = self.core.by_id.get(identifier)
        if preseed is not None and preseed.record.state in ("cancelled", "expired"):
            return  # every node of a job may cancel it

        def cancelled(record: PreseedRecord) -> PreseedRecord:
            if record.state in ("cancelled", "expired"):
                return record
            return replace(record, state="cancelled", ended_at=self._clock.now())

        record = await self._database.call(self._database.change, identifier, cancelled)
        if record is None:
            raise NotFound(f"there is no preseed {identifier[:128]!r}", remedy="p2pdist preseed --list names them")
        self.submit(Loaded((record,)))

    def visible(self, identifier: str, identity: Identity, *rights: Right) -> bool:
        """Whether there is such a preseed, and `sees` lets an identity see it."""
        preseed = self.core.by_id.get(identifier)
        return preseed is not None and sees(preseed.record, identity, *rights)

    def ordered(self, package: str) -> bool:
        """Whether an identity ordered a preseed of a package, by `name@digest`."""
        records = (preseed.record for preseed in self.core.by_id.values())
        return any(record.package == package and record.owner for record in records)

    def progress(self, identifier: str) -> Progress:
        """How far a preseed is; its numbers of bytes may be REUSED_S_MAX old. Raises NotFound."""
        return self._answers.find(self.core, identifier, now=self._clock.now())

    def brief(self, identifier: str) -> PreseedBrief:
        """A preseed as far as that costs the same however many hosts it has. Raises NotFound."""
        record = self.core.find(identifier).record
        return PreseedBrief(record.id, record.state, record.package, fingerprint(record.body))

    def summaries(self) -> list[PreseedSummary]:
        """All preseeds, the newest last."""
        preseeds = sorted(self.core.by_id.values(), key=lambda preseed: (preseed.record.created_at, preseed.record.id))
        return [_summary(preseed.record, preseed.tally) for preseed in preseeds]

    async def rank(
        self, request: RankRequest, candidates: Callable[[Parts], Awaitable[Affinity]] | None = None
    ) -> list[Ranked] | Assignment:
        """Hosts, best first; for roles, which hosts each of them gets. `candidates` says what all
        trackers know of hosts that need some blobs; None: this one alone is asked. Raises
        UsageError, NotFound for an unknown package, Conflict for roles that need more hosts than
        there are, Unavailable."""
        if (request.packages is None) == (request.roles is None):
            raise UsageError("a ranking is for packages or for roles", remedy="Give one of them")
        if request.hosts is not None and request.selector is not None:
            raise UsageError("a ranking is of hosts or of a selector's hosts, not both")
        if request.roles is not None:
            if request.count is not None or request.coherent is not None:
                raise UsageError("roles have their own counts, and are not placed rack by rack")
            if len({role.name for role in request.roles}) < len(request.roles):
                raise UsageError("two roles have the same name")
            needs = [RoleNeed(role.name, await self._needed(role.packages), role.count) for role in request.roles]
            affinity = await (candidates or self._own_view)(
                {blob: size for need in needs for blob, size in need.parts.items()}
            )
            hosts = affinity.hosts
            present = [name for name in _names(request, hosts) if name in hosts and hosts[name].available]
            assigned = affinity.assign(needs, present)
            return Assignment(
                [RoleHosts(role.name, assigned[role.name]) for role in needs],
                sum(host.bytes_missing for hosts in assigned.values() for host in hosts),
            )
        parts = await self._needed(request.packages or ())
        affinity = await (candidates or self._own_view)(parts)
        ranked = affinity.rank(parts, _names(request, affinity.hosts))
        if request.hosts is None:
            ranked = [host for host in ranked if host.present]
        if request.coherent is not None:
            return affinity.coherent([host for host in ranked if host.present], request.count or len(ranked))
        return ranked[: request.count]

    async def _own_view(self, parts: Parts) -> Affinity:
        return self.affinity

    async def _needed(self, packages: Sequence[str]) -> dict[Digest, int]:
        """The blobs of packages, each once, with their sizes."""
        needed: dict[Digest, int] = {}
        for _, parts in await asyncio.gather(*map(self._package, packages)):
            needed.update(parts)
        return needed

    async def _package(self, text: str, platform: str = "") -> tuple[str, dict[Digest, int]]:
        """A package or image by digest, and the blobs that a host needs of it, with their sizes. An
        image is that of `platform`, or of the platform of most hosts."""
        if is_image(text):
            return await _image(self._sessions, parse_image(text), platform)
        if is_hub(text):
            return await _commit(self._sessions, parse_hub(text), platform)
        if platform:
            raise UsageError("a package is the same on all platforms", remedy="Give a platform for docker://... alone")
        reference, content = parse_reference(text), self._sessions.content
        digest = (await content.resolve(reference)).digest
        if digest not in self._parts:
            self._parts[digest] = await _parts(content, digest)
        self._parts.move_to_end(digest)
        named, parts = self._parts[digest]
        self._sessions.fleet.policies.note(reference, digest, named)
        while len(self._parts) > PACKAGES_REMEMBERED_MAX:
            self._parts.popitem(last=False)
        return str(Reference(reference.name, digest=digest)), parts


async def _parts(content: Content, digest: Digest) -> tuple[tuple[Digest, ...], dict[Digest, int]]:
    """The blobs that a manifest names, and those that a host needs, with their sizes: no bootstrap,
    which a host that has all contents of the package never fetches."""
    blobs = decode_manifest(await content.manifest(digest)).blobs
    return tuple(blob.digest for blob in blobs), {blob.digest: blob.size for blob in blobs if not is_bootstrap(blob)}


def _summary(record: PreseedRecord, tally: Tally) -> PreseedSummary:
    return PreseedSummary(
        record.id, tally.state, record.package, tally.hosts_total, tally.hosts_done, record.created_at, record.owner
    )


async def _image(sessions: Sessions, reference: ImageReference, platform: str) -> tuple[str, dict[Digest, int]]:
    """An image, and the blobs that a host needs of it, with their sizes."""
    fleet = sessions.fleet
    target, exact = parse_platform(platform) if platform else (_usual_platform(fleet.hosts.values()), False)
    found = await sessions.upstreams.image(reference, target, exact=exact)
    for document in found.documents:
        fleet.policies.note(reference.package, document, found.parts)
    digest = found.documents[-1] if platform else found.digest
    package = str(ImageReference(reference.name, reference.tag, digest))
    if len(package) > PACKAGE_CHARACTERS_MAX:
        raise UsageError(f"the name {package[:80]}... has more than {PACKAGE_CHARACTERS_MAX} characters")
    return package, dict(found.parts)


async def _commit(sessions: Sessions, reference: HubReference, platform: str) -> tuple[str, dict[Digest, int]]:
    """A commit of the fleet's hub, and the files of LFS in it, with their sizes."""
    if platform:
        raise UsageError("a model is the same on all platforms", remedy="Give a platform for docker://... alone")
    commit, parts = await sessions.hubs.blobs(reference)
    sessions.fleet.policies.note(reference.package, digest_of(commit.encode()), parts)
    return str(HubReference(reference.name, commit)), parts


def _no_callbacks(url: str) -> None:
    raise Refused("this tracker sends no callbacks", remedy="Start it with --callbacks FILE, which says where to")


async def _candidates(service: PreseedService, command: AskCandidates) -> None:
    """Ask the other trackers what the core wants to know of their hosts."""
    service.submit(Candidates(command.id, await service.candidates(dict(command.blobs))))


def _names(request: RankRequest, hosts: Mapping[str, Host]) -> Sequence[str]:
    """The hosts that a request is about."""
    if request.hosts is not None:
        return list(dict.fromkeys(request.hosts))
    if request.selector is not None:
        selector = parse_selector(request.selector)
        return [name for name, host in hosts.items() if selector.matches(host)]
    return list(hosts)


def _usual_platform(hosts: Iterable[Host]) -> Platform:
    """The platform that most hosts run, at the lowest level of these; linux/amd64 where no host
    says it."""
    counts: Counter[tuple[str, str]] = Counter()
    lowest: dict[tuple[str, str], Platform] = {}
    for host in hosts:
        try:
            platform, _ = parse_platform(host.platform)
        except UsageError:
            continue
        kind = platform.os, platform.architecture
        counts[kind] += 1
        lowest[kind] = min(lowest.get(kind, platform), platform, key=lambda other: other.level)
    return lowest[max(counts, key=lambda kind: (counts[kind], kind))] if counts else parse_platform("linux/amd64")[0]
