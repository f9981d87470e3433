"""Handover: what the fleet core of one tracker does with the ownership that counts.

A host that speaks of a blob which another tracker owns hears which one (`NotOwner`) and joins no
swarm here. When the ownership changes all sessions are told first, PUSHED_MAX at a time; then this
tracker looks through its swarms, CHECKED_MAX at a time, and gives away the ones that it owns no
more: their hosts tell the new owner what they hold and from which hosts they receive, and their
streams run on.

A swarm that comes here from another owner has its roots among hosts that may not have spoken yet.
So for START_GRACE_S after the change a swarm under way gets no new lease, as after a start, and one
of which nothing is known yet none for NEWCOMER_S. Nor is what its hosts hold a claim that they have
to prove in time: thousands join at that moment, and wait for pieces longer than usual.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from itertools import islice

from p2pdist.model.digest import Digest
from p2pdist.model.messages import (
    PROTOCOL_VERSION,
    Complaint,
    FromAgent,
    Holding,
    Holdings,
    Judged,
    NotOwner,
    OwnershipChanged,
    Vouched,
    Welcome,
)
from p2pdist.model.ownership import Ownership, owner
from tracker.core.events import Broadcast, Command, Followed, LeasesAllowed, Send
from tracker.core.host import Host
from tracker.core.monitor.presence import START_GRACE_S
from tracker.core.swarm import Swarm

GATHER_S = 15.0
"""Within so long hosts of a tracker that hangs have turned to another one."""

NEWCOMER_S = 1.0
PUSHED_MAX = 2000
CHECKED_MAX = 1000
GIVEN_MEMBERS_MAX = 4000
"""Members of swarms given away in one tick; one swarm may have more."""

KNOWN_MAX = 200_000
FORMER_MAX = 16
"""Ownerships of the last GATHER_S that are remembered."""


@dataclass(slots=True)
class Handover:
    """Which swarms are this tracker's, and what is still to be told of the latest change. Without
    an ownership all are."""

    hosts: Mapping[str, Host]
    """The fleet's hosts by name."""
    swarms: Mapping[Digest, Swarm]
    """The fleet's swarms by key."""
    started_at: float
    """Time at which this tracker started, or went by an ownership first. `handle`."""
    me: str = ""
    """The id of this tracker; empty where it is alone. `handle`."""
    ownership: Ownership | None = None
    """The ownership that counts. `handle`."""
    leases_allowed: bool = True
    """Whether this tracker may grant leases. `handle`."""
    _former: list[tuple[float, Ownership]] = field(default_factory=list)
    """Ownerships that were replaced, and when, the latest last."""
    _untold: dict[int, None] = field(default_factory=dict)
    """Sessions that have not been told of the ownership."""
    _mine: dict[Digest, bool] = field(default_factory=dict)
    """Blobs that were looked for, and whether they are this tracker's; at most KNOWN_MAX."""
    _unchecked: list[Digest] = field(default_factory=list)
    """Keys of swarms of which it is not known yet whether they are this tracker's still."""

    @property
    def epoch(self) -> int:
        """The number of the ownership that counts; 0 without one."""
        return self.ownership.epoch if self.ownership is not None else 0

    def fraction(self) -> float:
        """The part of what is limited for all trackers together that is this tracker's."""
        shares = {tracker.id: tracker.share for tracker in self.ownership.trackers} if self.ownership else {}
        return shares.get(self.me, 0.0) / total if (total := sum(shares.values())) else 1.0

    def handle(self, event: Followed | LeasesAllowed, sessions: Iterable[int], *, now: float) -> None:
        """Another ownership counts from now on, or leases may be granted, or may not. `sessions`
        are the open ones."""
        match event:
            case LeasesAllowed(allowed):
                self.leases_allowed = allowed
            case Followed(ownership, me):
                if self.ownership is None:
                    self.started_at = now  # until now no swarm was this tracker's
                else:
                    self._former = [each for each in self._former if now - each[0] < GATHER_S][-FORMER_MAX + 1 :]
                    self._former.append((now, self.ownership))
                self.ownership, self.me = ownership, me
                self._mine.clear()
                self._untold = dict.fromkeys(sessions)
                self._unchecked = list(self.swarms)

    def closed(self, session: int) -> None:
        """A session has ended."""
        self._untold.pop(session, None)

    def mine(self, blob: Digest) -> bool:
        """Whether this tracker plans the swarm of a blob."""
        if self.ownership is None:
            return True
        known = self._mine.get(blob)
        if known is None:
            if len(self._mine) >= KNOWN_MAX:
                self._mine.clear()
            known = self._mine[blob] = owner(self.ownership, blob).id == self.me
        return known

    def admit(self, session: int, message: FromAgent, out: list[Command]) -> FromAgent | None:
        """What of a message is about blobs of this tracker; the host hears of the others that they
        are not."""
        if self.ownership is None or not isinstance(message, Holding | Holdings | Complaint | Vouched | Judged):
            return message
        if not isinstance(message, Holdings):
            if self.mine(message.blob):
                return message
            out.append(self._refusal(session, (message.blob,)))
            return None
        kept = tuple(holding for holding in message.blobs if self.mine(holding.blob))
        if len(kept) == len(message.blobs):
            return message
        mine = {holding.blob for holding in kept}
        others = dict.fromkeys(holding.blob for holding in message.blobs if holding.blob not in mine)
        out.append(self._refusal(session, tuple(others)))
        return Holdings(kept) if kept else None

    def welcome(self, report_interval_s: float, origin: str) -> Welcome:
        """The answer to a hello."""
        return Welcome(PROTOCOL_VERSION, report_interval_s, origin, ownership=self.ownership, tracker=self.me)

    def granting(self, swarm: Swarm, *, now: float) -> bool:
        """Whether a swarm may be granted leases now: none is out that hosts have not told this
        tracker of, since it started, or another one owned the swarm, a moment ago."""
        if not self.leases_allowed or (swarm.passes.begun and now - self.started_at < START_GRACE_S):
            return False
        return not self._came(swarm.blob, START_GRACE_S if swarm.passes.begun else NEWCOMER_S, now)

    def is_stable(self, blob: Digest, *, now: float) -> bool:
        """Whether what hosts say of a blob is news. For START_GRACE_S after this tracker started,
        or another one owned the blob, they only say again what they hold, all at once."""
        return now - self.started_at >= START_GRACE_S and not self._came(blob, START_GRACE_S, now)

    def gathers(self, blob: Digest, *, now: float) -> bool:
        """Whether hosts of a blob's swarm may still come from the tracker that owned it before, as
        they do once they know that it is gone, and leases may be granted."""
        return self.leases_allowed and self._came(blob, GATHER_S, now)

    def _came(self, blob: Digest, within_s: float, now: float) -> bool:
        """Whether another tracker owned a blob `within_s` ago."""
        return bool(self._former) and any(
            now - replaced_at < within_s and owner(former, blob).id != self.me for replaced_at, former in self._former
        )

    def tick(self, dissolve: Callable[[Swarm], None]) -> list[Broadcast]:
        """What is to be sent now of the latest change. Swarms that are another tracker's are
        dissolved, and their hosts hear of it so."""
        if self._untold:
            assert self.ownership is not None
            sessions = tuple(islice(self._untold, PUSHED_MAX))
            for session in sessions:
                del self._untold[session]
            return [Broadcast(sessions, OwnershipChanged(self.ownership))]
        out: list[Broadcast] = []
        members = checked = 0
        while self._unchecked and checked < CHECKED_MAX and members < GIVEN_MEMBERS_MAX:
            checked += 1
            swarm = self.swarms.get(self._unchecked.pop())
            if swarm is None or self.mine(swarm.blob):
                continue
            members += len(swarm.members)
            numbers = (self.hosts[name].session for name in swarm.members)
            there = tuple(number for number in numbers if number is not None)
            out += [Broadcast(there, NotOwner((swarm.blob,)))] if there else []
            dissolve(swarm)
        return out

    def _refusal(self, session: int, blobs: tuple[Digest, ...]) -> Send:
        # With the ownership: a host that speaks of these blobs goes by another one.
        return Send(session, NotOwner(blobs, self.ownership))
