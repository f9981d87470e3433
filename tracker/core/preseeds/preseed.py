"""One preseed, as a tracker knows it: the order, the hosts that it means now, and how far they are;
and the events and commands of the core of preseeds (orders.py).

The record (p2pdist/model/preseed.py) outlives the tracker: the order and the hosts that were
picked. All else is soft: hosts report what they keep for a preseed when they connect (`Kept`).

Theory. A preseed's members are the hosts that are named or match its selector, unless only `count`
of them are wanted, and the hosts that were picked. A member holds the package when it reports that
it is done. One that failed is asked again, TRIES_MAX times in all in one session; then it is given
up until it connects anew. A pick that was given up, or has been away for REPLACE_S, is replaced by
another host."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from math import inf

import msgspec

from p2pdist.model.digest import Digest
from p2pdist.model.messages import Keep, Kept, KeptState, Release
from p2pdist.model.preseed import ENDED, Failure, PreseedRecord, PreseedRequest, ShownState
from tracker.core.affinity import Affinity
from tracker.core.host import Host
from tracker.core.preseeds.selectors import Selector, parse_selector

# -- events


@dataclass(frozen=True, slots=True)
class Loaded:
    """Records as the database has them."""

    records: tuple[PreseedRecord, ...]


@dataclass(frozen=True, slots=True)
class Synced:
    """All that is in the database has been loaded. Ids that are not in `ids` are gone. `reports`
    are those of the other trackers that live, by tracker, preseed and host."""

    ids: frozenset[str]
    reports: Mapping[str, Mapping[str, dict[str, HostReport]]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class SaveFailed:
    """A record could not be written; it stays as it was."""

    id: str


@dataclass(frozen=True, slots=True)
class Joined:
    """A host opened a session."""

    host: str


@dataclass(frozen=True, slots=True)
class Gone:
    """A host's session ended, or the host reported that it is about to leave."""

    host: str


@dataclass(frozen=True, slots=True)
class Reported:
    """A host reported how far it is with a preseed."""

    host: str
    kept: Kept


@dataclass(frozen=True, slots=True)
class Candidates:
    """What all trackers that answer know of the hosts that a preseed may pick."""

    id: str
    affinity: Affinity


@dataclass(frozen=True, slots=True)
class Tick:
    """Comes often and regularly."""


Event = Loaded | Synced | SaveFailed | Joined | Gone | Reported | Candidates | Tick

# -- commands


@dataclass(frozen=True, slots=True)
class Send:
    """Send a message to a host."""

    host: str
    message: Keep | Release


@dataclass(frozen=True, slots=True)
class Save:
    """Write the record if the database still has its version."""

    record: PreseedRecord


@dataclass(frozen=True, slots=True)
class AskCandidates:
    """Ask the other trackers which hosts a preseed may pick; `Candidates` answers."""

    id: str
    blobs: tuple[tuple[Digest, int], ...]
    """What hosts need, with sizes."""


Command = Send | Save | AskCandidates


TRIES_MAX = 3
RETRY_S = 2.0
RETRY_FACTOR = 4.0
"""A host that failed is asked again after 2 s, then after 8 s."""

CANDIDATES_S = 3.0
"""For so long picks go by what all trackers knew; by then its tracker has told of a pick."""

CANDIDATES_AGAIN_S = 5.0
"""After so long without an answer the trackers are asked again."""

RATE_WINDOW_S = 20.0
"""Over so long, and twice as long at most, bytes are counted for the estimate of what is left."""


@dataclass(frozen=True, slots=True)
class Tally:
    """How far a preseed is, in hosts."""

    state: ShownState
    hosts_total: int
    hosts_done: int


class HostReport(msgspec.Struct, frozen=True, array_like=True):
    """What one tracker reports to the others of a member that is connected to it."""

    state: KeptState
    bytes_done: int = 0
    zone: str = ""
    reason: str = ""


@dataclass(slots=True)
class Holder:
    """A host that was asked to hold the package, or reports that it does."""

    session: int | None = None
    """The session in which it was asked; None if this tracker has not asked it."""

    state: KeptState = "waiting"
    bytes_done: int = 0
    reason: str = ""
    tries: int = 0
    retry_at: float = inf
    """When it is asked again."""

    @property
    def given_up(self) -> bool:
        return self.state == "failed" and self.tries >= TRIES_MAX

    def failure(self, name: str) -> Failure:
        """Why it does not hold the package, as it reported; of one that was pulling the deadline,
        and what it waited for."""
        return Failure(name, "deadline", self.reason) if self.state == "pulling" else _failure(name, self.reason)

    def ask(self, session: int, *, now: float) -> bool:
        """Whether the host is to be asked now: for the first time in this session, or again after a
        failure. Then this is noted."""
        if self.session != session:
            self.session, self.tries = session, 0
        elif self.state != "failed" or now < self.retry_at:
            return False
        if self.state == "failed":
            self.state, self.retry_at = "waiting", inf
        return True

    def fail(self, reason: str, *, now: float) -> None:
        """Note a failure, and when to try again."""
        self.state, self.reason = "failed", reason
        self.tries += 1
        self.retry_at = now + RETRY_S * RETRY_FACTOR ** (self.tries - 1) if self.tries < TRIES_MAX else inf


@dataclass(slots=True)
class Preseed:
    """A preseed's record and the soft state around it."""

    record: PreseedRecord
    """As the database has it; written by `take`."""

    request: PreseedRequest = field(init=False)
    selector: Selector | None = field(init=False)
    named: frozenset[str] = field(init=False)
    picked: frozenset[str] = field(init=False)
    holders: dict[str, Holder] = field(default_factory=dict)
    """Hosts of this tracker, by name."""

    lost: dict[str, Failure] = field(default_factory=dict)
    """Why hosts were given up that are asked no longer, by name."""

    elsewhere: dict[str, dict[str, HostReport]] = field(default_factory=dict)
    """Members that are connected to other trackers of the fleet, by tracker and name."""

    saving: bool = False
    """A change is on its way to the database; no other is made before it has arrived."""

    candidates: Affinity | None = None
    """What all trackers knew of hosts a moment ago; it is as large as the fleet, and kept for
    CANDIDATES_S alone."""

    candidates_at: float = -inf
    asked_at: float = -inf
    """When they answered, and when they were asked."""

    pool_hosts: int = 0
    """Hosts that could be picked at the last pick, of all trackers that answered then."""

    guesses: dict[str, str] = field(default_factory=dict)
    """By a name that no host has the one that was most like it, for people; of some names only, as
    it takes long to find."""

    wake_at: float = inf
    """When to look at the preseed though nothing happens."""

    tally: Tally = field(default_factory=lambda: Tally("pending", 0, 0))
    """How far it was at the last look."""

    _samples: list[tuple[float, int]] = field(default_factory=list)
    """Times and bytes done, at most two; written by `seconds_left`."""

    def __post_init__(self) -> None:
        self.request = self.record.request
        self.selector = parse_selector(self.request.selector) if self.request.selector is not None else None
        self.named = frozenset(self.request.hosts or ())
        self.picked = frozenset(self.record.picked)

    def take(self, record: PreseedRecord) -> None:
        """The record as the database has it now."""
        self.record, self.saving = record, False
        self.picked = frozenset(record.picked)

    def forget_candidates(self, *, now: float) -> None:
        """Drop what all trackers knew when that is too old, and look again then."""
        if now - self.candidates_at >= CANDIDATES_S:
            self.candidates = None
        else:
            self.wake_at = min(self.wake_at, self.candidates_at + CANDIDATES_S)

    @property
    def size(self) -> int:
        """Bytes that each host needs."""
        return sum(size for _, size in self.record.blobs)

    @property
    def open(self) -> bool:
        """Whether its members depend on the hosts that are connected, which a tracker knows only
        after a while."""
        return self.request.selector is not None or self.request.replicas is not None

    @property
    def picks(self) -> bool:
        """Whether a tracker picks hosts for it."""
        return self.request.count is not None or self.request.replicas is not None

    # -- members

    def is_member(self, name: str, host: Host | None) -> bool:
        """Whether the host shall hold the package."""
        return name in self.picked or (self.request.count is None and self._meant(name, host))

    def is_candidate(self, host: Host) -> bool:
        """Whether the host may be picked. Where all named hosts are wanted, any other host may."""
        if self.selector is not None:
            return self.selector.matches(host)
        return not self.named or self.request.count is None or host.name in self.named

    def members(self, hosts: Mapping[str, Host]) -> dict[str, None]:
        """The hosts that shall hold the package, whether they are here or not."""
        members = dict.fromkeys(self.record.picked)
        if self.request.count is None:
            members.update(dict.fromkeys(self.request.hosts or ()))
            if self.selector is not None:
                members.update({name: None for name, host in hosts.items() if self.selector.matches(host)})
                members.update((name, None) for name, _ in self.others())
        return members

    def stays(self, name: str, host: Host | None, state: KeptState) -> bool:
        """Whether a host in this state is to keep what it has: after the deadline only a host that
        was done."""
        if self.record.state in ("cancelled", "expired"):
            return False
        return self.is_member(name, host) and (self.record.state != "failed" or state == "done")

    def others(self) -> Iterator[tuple[str, HostReport]]:
        """Members at other trackers."""
        for hosts in self.elsewhere.values():
            yield from hosts.items()

    def _meant(self, name: str, host: Host | None) -> bool:
        if self.selector is not None:
            return host is not None and self.selector.matches(host)
        return name in self.named

    # -- how far

    def state_of(self, name: str, hosts: Mapping[str, Host], others: Mapping[str, HostReport]) -> KeptState | None:
        """How far a member is; None for one that is connected nowhere."""
        host = hosts.get(name)
        if host is not None and host.session is not None:
            holder = self.holders.get(name)
            return holder.state if holder is not None else "waiting"
        return others[name].state if name in others else None

    def finished(self, states: Mapping[str, KeptState | None], *, settled: bool) -> bool:
        """Whether all members hold the package, as far as their `states` are known."""
        if not states or len(states) < (self.request.count or 0):
            return False
        if not settled:
            return False
        return all(state == "done" for state in states.values())

    def count(self, states: Mapping[str, KeptState | None], *, settled: bool) -> Tally:
        """How far the members with these states are. A preseed whose hosts are all done or given up
        has failed, too."""
        total = max(len(states), self.request.count or 0)
        ended = self.record.state in ("cancelled", "expired")
        done = sum(state == "done" for state in states.values()) if not ended else 0
        return Tally(self._shown(states, settled=settled), total, done)

    def _shown(self, states: Mapping[str, KeptState | None], *, settled: bool) -> ShownState:
        if self.record.state in ENDED:
            return self.record.state
        if self.finished(states, settled=settled):
            return "done"
        if not any(states.values()):
            return "pending"
        if len(states) < (self.request.count or 0):
            return "running"
        given_up = [name for name, state in states.items() if state == "failed" and self._given_up(name)]
        done = sum(state == "done" for state in states.values())
        return "failed" if given_up and done + len(given_up) == len(states) else "running"

    def _given_up(self, name: str) -> bool:
        """Whether no tracker asks the host any more: others report a failure only then."""
        return name not in self.holders or self.holders[name].given_up

    def zone_of(self, name: str, hosts: Mapping[str, Host], others: Mapping[str, HostReport]) -> str:
        """The zone of a member, empty while it is not known."""
        host = hosts.get(name)
        return host.zone if host is not None else others[name].zone if name in others else ""

    def failure(self, name: str, hosts: Mapping[str, Host], others: Mapping[str, HostReport]) -> Failure | None:
        """Why a member does not hold the package; None when it does or is on its way."""
        state = self.state_of(name, hosts, others)
        if state == "done":
            return None
        if state is None:
            return Failure(name, "not-connected")
        holder = self.holders.get(name)
        reason = others[name].reason if name in others else holder.reason if holder is not None else ""
        if state == "failed":
            return _failure(name, reason)
        return Failure(name, "deadline") if self.record.state == "failed" else None

    def waits(self, states: Mapping[str, KeptState | None]) -> Counter[str]:
        """What members that pull wait for, as they report it, and how many do."""
        others = dict(self.others())
        pulling = [name for name, state in states.items() if state == "pulling"]
        held = (others[name].reason if name in others else self.holders[name].reason for name in pulling)
        return Counter(filter(None, held))

    def local_reports(self, hosts: Mapping[str, Host]) -> dict[str, HostReport]:
        """What this tracker reports to others of the members that are connected to it."""
        return {
            name: HostReport(
                "waiting" if holder.state == "failed" and not holder.given_up else holder.state,
                holder.bytes_done,
                host.zone,
                holder.reason,
            )
            for name, holder in self.holders.items()
            if (host := hosts.get(name)) is not None and host.session is not None
        }

    def seconds_left(self, bytes_done: int, bytes_total: int, *, now: float) -> float | None:
        """The time left at the rate of the last RATE_WINDOW_S; None while no bytes came."""
        if bytes_done >= bytes_total:
            return 0.0
        samples = self._samples
        if not samples or bytes_done < samples[-1][1]:
            samples[:] = [(now, bytes_done)]
        elif now - samples[-1][0] >= RATE_WINDOW_S:
            samples[:] = [samples[-1], (now, bytes_done)]
        since, before = samples[0]
        if now <= since or bytes_done <= before:
            return None
        return (bytes_total - bytes_done) * (now - since) / (bytes_done - before)


def _failure(name: str, reason: str) -> Failure:
    slug, _, detail = reason.partition(": ")
    return Failure(name, slug or "failed", detail)
