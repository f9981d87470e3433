"""All preseeds of a fleet: which hosts to ask, to release, to pick and to replace; and how far each
preseed is.

Events in, commands out. `Save` is the only way in which a record changes: the shell writes it if
the database still has the version that it was made from, and brings back (`Loaded`) what the
database has then. Until then the core changes nothing else of the preseed, and it asks a host only
for what is saved. So several trackers act on one database, each for the hosts that are connected to
it, and none undoes what another did. Before a tracker picks some number of hosts it asks the others
(`AskCandidates`), and picks among the hosts of all that answer.

Times are in seconds since the epoch, because deadlines outlive a tracker. For RECONNECT_GRACE_S
after the start, and as long as hosts come one after the other, no host is given up: hosts are on
their way back. One call looks at VISITS_MAX hosts; the rest waits for the next.

Invariants: a host is told to keep only what a saved record says; a host that keeps something no
record asks of it is told to release it; a preseed picks no more hosts than it needs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from heapq import nsmallest
from math import inf

import msgspec

from p2pdist.model.errors import Conflict, NotFound
from p2pdist.model.messages import Keep, Kept, KeptState, Release
from p2pdist.model.preseed import ENDED, PreseedRecord, Progress
from tracker.core.affinity import Affinity
from tracker.core.host import AtHome, Host
from tracker.core.preseeds.picks import Picker
from tracker.core.preseeds.preseed import (
    Candidates,
    Command,
    Event,
    Gone,
    Holder,
    HostReport,
    Joined,
    Loaded,
    Preseed,
    Reported,
    Save,
    SaveFailed,
    Send,
    Synced,
    Tick,
)
from tracker.core.preseeds.selectors import NAMES_SHOWN_MAX, near, no_match

FAILURES_SHOWN_MAX = 1000
WAITING_SHOWN_MAX = 20
WAITS_SHOWN_MAX = 3
GUESSES_MAX = 3
"""Names of one preseed for which it is said what was probably meant."""


def progress(
    preseed: Preseed,
    affinity: Affinity,
    hosts: Mapping[str, Host],
    lost: Mapping[str, Host],
    *,
    settled: bool,
    now: float,
) -> Progress:
    """How far a preseed is. `settled`: all its members are known; `hosts`: those of this tracker;
    `lost`: hosts with sessions that broke in the last hour."""
    record, request = preseed.record, preseed.request
    members, others = preseed.members(hosts), dict(preseed.others())
    ended = record.state in ("cancelled", "expired")
    states = {name: preseed.state_of(name, hosts, others) for name in members}
    done = [name for name, state in states.items() if state == "done" and not ended]
    asked = [name for name in members if name not in preseed.lost] if not ended else []
    failures = [failure for name in asked if (failure := preseed.failure(name, hosts, others)) is not None]
    failures += preseed.lost.values()
    failures.sort(key=lambda failure: (failure.reason, failure.host))
    tally = preseed.count(states, settled=settled)
    bytes_total = preseed.size * tally.hosts_total
    bytes_done = _bytes_done(preseed, affinity, states, others)
    return Progress(
        record.id,
        tally.state,
        settled,
        record.package,
        request.priority,
        tally.hosts_total,
        tally.hosts_done,
        len(_absent(preseed, states, lost)) if not ended else 0,
        bytes_total,
        bytes_done,
        preseed.seconds_left(bytes_done, bytes_total, now=now) if not ended else None,
        failures[:FAILURES_SHOWN_MAX],
        dict(Counter(failure.reason for failure in failures)),
        dict(Counter(preseed.zone_of(name, hosts, others) for name in done)),
        record.picked,
        record.created_at,
        record.deadline_at,
        record.expires_at,
        tuple(_notes(preseed, states, hosts, lost)) if record.state not in ENDED and tally.state != "done" else (),
        record.owner,
        _waiting(preseed, states, others) if record.state not in ENDED else (),
        request.package,
    )


def _waiting(
    preseed: Preseed, states: Mapping[str, KeptState | None], others: Mapping[str, HostReport]
) -> tuple[str, ...]:
    """The connected hosts that do not hold the package, by the bytes that they report."""

    def bytes_done(name: str) -> int:
        holder, other = preseed.holders.get(name), others.get(name)
        return max(holder.bytes_done if holder else 0, other.bytes_done if other else 0)

    late = (name for name, state in states.items() if state not in ("done", None))
    return tuple(nsmallest(WAITING_SHOWN_MAX, late, key=lambda name: (bytes_done(name), name)))


def _absent(preseed: Preseed, states: Mapping[str, KeptState | None], lost: Mapping[str, Host]) -> list[str]:
    """The hosts that a preseed is for and that are connected nowhere."""
    found = [name for name, state in states.items() if state is None]
    if preseed.selector is not None and preseed.request.count is None:
        found += [name for name, host in lost.items() if name not in states and preseed.selector.matches(host)]
    return found


def _notes(
    preseed: Preseed, states: Mapping[str, KeptState | None], hosts: Mapping[str, Host], lost: Mapping[str, Host]
) -> Iterator[str]:
    request, selector = preseed.request, preseed.selector
    choosy = selector is not None or preseed.picks
    pool = [host for host in hosts.values() if host.available and preseed.is_candidate(host)] if choosy else []
    if selector is not None and not pool and not states:
        yield no_match(selector, hosts.values())
    absent = _absent(preseed, states, lost)
    unknown = [name for name in absent if name not in lost and name not in hosts]
    for name in unknown[:NAMES_SHOWN_MAX]:
        guess = _guess(preseed, name, hosts)
        yield f"no host called {name} is connected" + (f"; did you mean {guess}?" if guess else "")
    if len(unknown) > NAMES_SHOWN_MAX:
        yield f"{len(unknown) - NAMES_SHOWN_MAX} more names that no connected host has"
    away = [name for name in absent if name in lost or name in hosts]
    if away:
        more = f" and {len(away) - NAMES_SHOWN_MAX} more" if len(away) > NAMES_SHOWN_MAX else ""
        yield f"not connected: {', '.join(away[:NAMES_SHOWN_MAX])}{more}"
    for why, number in preseed.waits(states).most_common(WAITS_SHOWN_MAX):
        yield f"{number} {'host waits' if number == 1 else 'hosts wait'}: {why}"
    here = max(len(pool), preseed.pool_hosts)
    if request.count is not None and here < request.count and (pool or selector is None):
        yield f"{request.count} hosts are wanted, {here} that may be taken are connected"
    zones = Counter(host.zone for host in pool)
    for zone in sorted(zone for zone, number in zones.items() if number < (request.replicas or 0)):
        yield f"{request.replicas} copies are wanted in each zone, {zone or 'the one without a name'} has {zones[zone]}"


def _guess(preseed: Preseed, name: str, hosts: Mapping[str, Host]) -> str:
    """The name that an unknown one was meant to be, empty where there is none like it, or enough
    have been looked for: each time all of a large fleet's names are compared with it."""
    if hosts and name not in preseed.guesses and len(preseed.guesses) < GUESSES_MAX:
        preseed.guesses[name] = near(name, hosts)
    return preseed.guesses.get(name, "")


def _bytes_done(
    preseed: Preseed, affinity: Affinity, states: Mapping[str, KeptState | None], others: Mapping[str, HostReport]
) -> int:
    """The bytes that members report, or that swarms count for them if that is more. A member that
    is connected nowhere counts for nothing."""
    size = preseed.size
    missing = affinity.missing(dict(preseed.record.blobs), states)
    bytes_done = 0
    for name, state in states.items():
        if state == "done":
            bytes_done += size
        elif state is not None:
            holder, other = preseed.holders.get(name), others.get(name)
            reported = max(holder.bytes_done if holder else 0, other.bytes_done if other else 0)
            bytes_done += min(size, max(reported, size - missing[name]))
    return bytes_done


RECONNECT_GRACE_S, RETURNING_PART, RECONNECT_S_MAX = 8.0, 0.375, 120.0
"""An agent that lost its tracker tries every 5 s at least. Where hosts come back to a tracker that
has just started, others are believed to be on their way for this part of the grace more, until a
time of all: ten thousand TLS handshakes take half a minute."""

LIVE_MAX = 1000
KEPT_MAX = 4000
"""Preseeds that go on, and all that are remembered."""

OWNER_PART = 2
"""Of either one identity, while access is off one address, has one of so many parts, so that the
others can order theirs."""

VISITS_MAX, SELECTED_PER_VISIT = 50_000, 8
"""Hosts that one call looks at; so many that a selector is compared with count as one."""

UNKNOWN_MAX = 10_000
LEFT_MAX = 200_000


def _check_room(live: int, kept: int, part: int = 1, whose: str = "", more: str = "") -> None:
    """Raises Conflict where this `part` of all preseeds may not be one more."""
    live_max, kept_max = LIVE_MAX // part, KEPT_MAX // part
    if live < live_max and kept < kept_max:
        return
    # One that is cancelled is remembered all the same.
    later = "Try again later: each is remembered for a day after its end. Order a package for many hosts at once"
    raise Conflict(
        f"{live} preseeds{whose} go on and {kept} are remembered; the limits are {live_max} and {kept_max}",
        remedy=("Cancel some, or give them a --ttl" if live >= live_max else later) + more,
    )


@dataclass(slots=True)
class Preseeds:
    """The core of preseeds: decides for all of them, and answers how far they are."""

    affinity: Affinity
    """The fleet's hosts and what they hold."""

    started_at: float
    shared: bool = False
    """Other trackers use the database, too."""

    asks_others: bool = False
    """The other trackers can be asked of their hosts."""

    grace_s: float = RECONNECT_GRACE_S
    lost: Mapping[str, Host] = field(default_factory=dict)
    """Hosts that lost their sessions in the last hour; the fleet's."""

    by_id: dict[str, Preseed] = field(default_factory=dict)
    _dirty: dict[str, None] = field(default_factory=dict)
    """Ids of the preseeds that the next tick looks at."""

    _left_at: dict[str, float] = field(default_factory=dict)
    """When hosts left, or reported that they were about to."""

    _unknown: dict[tuple[str, str], bool] = field(default_factory=dict)
    """Hosts with ids that they keep and the database may have; whether it was read since."""

    _returning_until: float = 0.0
    """Until when hosts are on their way back, as the last one showed that came while others were.
    `_joined`."""

    _trackers: frozenset[str] = frozenset()
    """The other trackers on the database that were alive at the last exchange."""

    @property
    def hosts(self) -> Mapping[str, Host]:
        return AtHome(self.affinity.hosts) if self.shared else self.affinity.hosts

    def handle(self, event: Event, *, now: float) -> list[Command]:
        out: list[Command] = []
        match event:
            case Loaded(records):
                for record in records:
                    self._take(record)
                    self._look(self.by_id[record.id], now, out)
            case Synced(ids, reports):
                self._synced(ids, reports, now, out)
            case SaveFailed(identifier):
                if (preseed := self.by_id.get(identifier)) is not None:
                    preseed.saving = False
                    self._dirty[identifier] = None
            case Joined(host):
                self._joined(host, now)
            case Gone(host):
                self._gone(host, now)
            case Candidates(identifier, affinity):
                if (preseed := self.by_id.get(identifier)) is not None:
                    preseed.candidates, preseed.candidates_at, preseed.asked_at = affinity, now, -inf
                    self._look(preseed, now, out)
            case Reported(host, kept):
                self._reported(host, kept, now, out)
            case Tick():
                self._tick(now, out)
        return out

    def set_clock(self, change_s: float) -> None:
        """The time is so much later from now on; the tracker started as long ago as before."""
        self.started_at += change_s
        self._returning_until += change_s

    def find(self, identifier: str) -> Preseed:
        """Raises NotFound."""
        preseed = self.by_id.get(identifier)
        if preseed is None:
            raise NotFound(f"there is no preseed {identifier[:128]!r}", remedy="p2pdist preseed --list names them")
        return preseed

    def check_room(self, owner: str = "", source: str = "") -> None:
        """Raises Conflict when no other preseed can be taken, of anybody or of `owner`; while
        access is off that is empty, and the address `source` counts."""
        if owner or source:
            records = (preseed.record for preseed in self.by_id.values())
            own = [record.state not in ENDED for record in records if (record.owner, record.source) == (owner, source)]
            more = "" if owner else "; with --access each token has a share, not each address"
            _check_room(sum(own), len(own), OWNER_PART, f" of {owner or source}", more)
        live = sum(preseed.record.state not in ENDED for preseed in self.by_id.values())
        _check_room(live, len(self.by_id))

    # -- events

    def _take(self, record: PreseedRecord) -> None:
        preseed = self.by_id.get(record.id)
        if preseed is None or preseed.record.created_at != record.created_at:
            self.by_id[record.id] = Preseed(record)
        elif record.version > preseed.record.version:  # a save comes back with another version in any case
            preseed.take(record)

    def _synced(
        self,
        ids: frozenset[str],
        reports: Mapping[str, Mapping[str, dict[str, HostReport]]],
        now: float,
        out: list[Command],
    ) -> None:
        for identifier in [identifier for identifier in self.by_id if identifier not in ids]:
            preseed = self.by_id.pop(identifier)
            out += [Send(name, Release(identifier)) for name in preseed.holders if self._session(name) is not None]
        news, self._trackers = self._trackers != reports.keys(), frozenset(reports)
        for identifier, preseed in self.by_id.items():
            elsewhere = {tracker: hosts[identifier] for tracker, hosts in reports.items() if identifier in hosts}
            if elsewhere != preseed.elsewhere or (news and preseed.open):
                before, preseed.elsewhere = dict(preseed.others()), elsewhere
                for name in before.keys() - dict(preseed.others()).keys() if preseed.picks else ():
                    if self._session(name) is None:
                        self._leaves(name, now)
                self._dirty[identifier] = None
        # Still unknown after the database was read again: the database does not have it. A record
        # that this release cannot read is for trackers of a later one.
        for (host, identifier), waited in list(self._unknown.items()):
            if identifier in ids or waited:
                del self._unknown[host, identifier]
            else:
                self._unknown[host, identifier] = True
            if identifier not in ids and waited and self._session(host) is not None:
                out.append(Send(host, Release(identifier)))

    def _joined(self, name: str, now: float) -> None:
        if now < self._settled_at:
            self._returning_until = min(now + RETURNING_PART * self.grace_s, self.started_at + RECONNECT_S_MAX)
        self._left_at.pop(name, None)
        host = self.hosts.get(name)
        for identifier, preseed in self.by_id.items():
            if preseed.record.state not in ENDED:
                preseed.lost.pop(name, None)
            if name in preseed.holders:
                preseed.holders[name] = Holder()  # what it reported in its last session may not hold any more
            if preseed.record.state in ENDED and name not in preseed.holders:
                continue  # a host reports what it keeps
            if preseed.picks or preseed.is_member(name, host) or name in preseed.holders:
                self._dirty[identifier] = None

    def _gone(self, name: str, now: float) -> None:
        self._leaves(name, self._left_at.get(name, now))  # since it began to leave, if it reported that
        for identifier, preseed in self.by_id.items():
            if name in preseed.holders:
                self._dirty[identifier] = None

    def _leaves(self, name: str, at: float) -> None:
        self._left_at.pop(name, None)
        self._left_at[name] = at
        if len(self._left_at) > LEFT_MAX:
            del self._left_at[next(iter(self._left_at))]

    def _reported(self, name: str, kept: Kept, now: float, out: list[Command]) -> None:
        preseed, host = self.by_id.get(kept.id), self.hosts.get(name)
        if host is None or host.session is None:
            return
        if preseed is None and self.shared:
            if len(self._unknown) < UNKNOWN_MAX:
                self._unknown.setdefault((name, kept.id), False)
            return
        if preseed is not None and kept.package not in ("", preseed.record.package):
            kept = msgspec.structs.replace(kept, state="waiting", bytes_done=0)  # of an earlier order under this id
        if preseed is None or not preseed.stays(name, host, kept.state):
            if preseed is not None:
                preseed.holders.pop(name, None)
            out.append(Send(name, Release(kept.id)))
            return
        holder = preseed.holders.setdefault(name, Holder())
        holder.bytes_done = min(kept.bytes_done, preseed.size)
        if kept.state == holder.state:
            holder.reason = kept.reason if kept.state == "pulling" else holder.reason
            return
        self._dirty[kept.id] = None
        if kept.state == "failed":
            holder.fail(kept.reason or "failed", now=now)
        else:
            holder.state, holder.reason = kept.state, kept.reason if kept.state == "pulling" else ""

    def _tick(self, now: float, out: list[Command]) -> None:
        for identifier, preseed in self.by_id.items():
            if preseed.wake_at <= now:
                self._dirty[identifier] = None
        visits = 0
        for identifier in list(self._dirty):
            if visits >= VISITS_MAX:
                return
            del self._dirty[identifier]
            if identifier in self.by_id:
                visits += 1 + self._look(self.by_id[identifier], now, out)

    # -- decisions

    def _look(self, preseed: Preseed, now: float, out: list[Command]) -> int:
        """Do what is due for one preseed; returns how many hosts were looked at."""
        members, others = preseed.members(self.hosts), dict(preseed.others())
        record = preseed.record
        times = (record.deadline_at, record.expires_at, self._settled_at)
        preseed.wake_at = min((time for time in times if time is not None and time > now), default=inf)
        preseed.forget_candidates(now=now)
        self._send(preseed, members, now, out)
        states = {name: preseed.state_of(name, self.hosts, others) for name in members}
        preseed.tally = preseed.count(states, settled=self._settled(preseed, now))
        if not preseed.saving:
            changed = self._changed(preseed, states, others, now, out)
            if changed != record:
                preseed.saving = True
                out.append(Save(changed))
        if preseed.picks:
            return len(members) + len(self.hosts)
        return len(members) + (len(self.hosts) // SELECTED_PER_VISIT if preseed.selector is not None else 0)

    def _send(self, preseed: Preseed, members: Iterable[str], now: float, out: list[Command]) -> None:
        record, hosts = preseed.record, self.hosts
        for name, holder in list(preseed.holders.items()):
            if not preseed.stays(name, hosts.get(name), holder.state):
                del preseed.holders[name]
                if record.state == "failed" and holder.reason:
                    preseed.lost[name] = holder.failure(name)
                if self._session(name) is not None:
                    out.append(Send(name, Release(record.id)))
        left_s = record.expires_at - now if record.expires_at is not None else None
        keep = Keep(record.id, record.package, preseed.request.priority, record.expires_at, left_s)
        for name in members if record.state not in ENDED else list(preseed.holders):
            session = self._session(name)
            if session is None:
                continue
            holder = preseed.holders.setdefault(name, Holder())
            if not holder.ask(session, now=now):
                preseed.wake_at = min(preseed.wake_at, holder.retry_at)
                continue
            out.append(Send(name, keep))

    def _changed(
        self,
        preseed: Preseed,
        states: Mapping[str, KeptState | None],
        others: Mapping[str, HostReport],
        now: float,
        out: list[Command],
    ) -> PreseedRecord:
        """The record as it should be now."""
        record = preseed.record
        if record.expires_at is not None and now >= record.expires_at and record.state not in ("cancelled", "expired"):
            return replace(record, state="expired", ended_at=now)
        if record.state in ENDED:
            return record
        settled_at = self._settled_at if self._trackers <= preseed.elsewhere.keys() else inf
        picker = Picker(self.affinity, self.hosts, self._left_at, settled_at, self.asks_others, now, out)
        picked = picker.picks(preseed, states, others)
        if picked != record.picked:
            return replace(record, picked=picked)
        if record.done_at is not None:
            return record
        if preseed.finished(states, settled=self._settled(preseed, now)):
            return replace(record, state="done", done_at=now)
        if record.deadline_at is not None and now >= max(record.deadline_at, self._settled_at):
            return replace(record, state="failed", ended_at=now)
        return record

    @property
    def _settled_at(self) -> float:
        return max(self.started_at + self.grace_s, self._returning_until)

    def _settled(self, preseed: Preseed, now: float) -> bool:
        """Whether all members are known: hosts have had time to return, and each other tracker has
        reported its own."""
        return not preseed.open or (now >= self._settled_at and self._trackers <= preseed.elsewhere.keys())

    def _session(self, name: str) -> int | None:
        host = self.hosts.get(name)
        return host.session if host is not None else None

    # -- answers

    def all_known(self, identifier: str, *, now: float) -> bool:
        """Whether all members of a preseed are known. Raises NotFound."""
        return self._settled(self.find(identifier), now)

    def progress(self, identifier: str, *, now: float) -> Progress:
        """Raises NotFound."""
        preseed = self.find(identifier)
        return progress(preseed, self.affinity, self.hosts, self.lost, settled=self._settled(preseed, now), now=now)

    def local_reports(self, *, now: float) -> dict[str, dict[str, HostReport]]:
        """What this tracker reports to the others: its own hosts of each preseed that goes on, once
        they have had time to return."""
        if now < self._settled_at:
            return {}
        return {
            identifier: preseed.local_reports(self.hosts)
            for identifier, preseed in self.by_id.items()
            if preseed.record.state not in ENDED or preseed.holders
        }

    def states(self) -> Counter[str]:
        """How many preseeds there are in each state."""
        return Counter(preseed.tally.state for preseed in self.by_id.values())
