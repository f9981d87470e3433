"""Vouching: the tracker's part in vouched piece lists (p2pdist/model/vouched_list.py).

Theory. The hosts that hold the lease of a stripe, or held it, state the hashes of its pieces, and
statements.py keeps which host stated what. Every host that follows the list, since it has
not found the whole to match, is sent what is listed: at once what was listed before it came, then
all news together with the others (pause.py), and the end of the list at once. When they show
that a round cannot hold, an arbiter is chosen, which reads all pieces again: a host that had
no part in the rounds so far, nor had one that votes with it, if there is one. An arbiter that is
gone, or far slower than the first readers were, is replaced. The trees go on meanwhile: most of
what is listed is right.

A host that stated what a list which is held contradicts is a liar for a while (liars.py).
Complaints of wrong bytes that were made while a list was in doubt are withdrawn when the next round
begins: the sender may have been right.

A tracker that has just started knows no list. Hosts that read state again what they read; while
that leaves gaps, hosts that joined with pieces are asked, one after the other, for what they were
told (`Recall`). A list that was held before may be given back to the core (`ListFound`).

Invariants: hashes are taken only from hosts that may have read the piece, from hosts that hold
everything, or from hosts that were asked; a message for many hosts is one object; the hashes that
are kept take LISTS_BYTES_MAX at the most.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from math import inf

from p2pdist.model.digest import Digest
from p2pdist.model.errors import Corrupt, Unavailable, UsageError
from p2pdist.model.messages import Holding, Judged, Recall, Reject, Reread, Vouched
from p2pdist.model.pieces import HASH_SIZE
from p2pdist.model.vouched_list import vouched_layout
from tracker.core.events import Command, ListFound, ListMatched, ListWanted, Send, WrongHashes
from tracker.core.host import Host
from tracker.core.planning.schedule import Schedule
from tracker.core.repair.reputation import Reputation
from tracker.core.swarm import Swarm
from tracker.core.vouching.case import RECALL_MAX_S, Case
from tracker.core.vouching.liars import Liars
from tracker.core.vouching.pause import pause_s
from tracker.core.vouching.statements import NO_ARBITER, Statements

FAILED_S = 60.0
"""A blob of which no list held may be tried again after so long."""

SWEEP_S = 5.0
"""How often cases of swarms that are gone are looked for."""

LISTS_BYTES_MAX = 512 << 20
"""Half of it is kept for blobs that a manifest read here names: any host can speak of large ones
that do not exist."""

KEPT_MAX = 256
"""Lists that were given back and that no swarm has asked for yet."""


@dataclass(slots=True)
class Vouching:
    """Knows the lists of all swarms."""

    hosts: dict[str, Host]
    """The fleet's hosts by name."""
    swarms: dict[Digest, Swarm]
    """The fleet's swarms by key."""
    schedule: Schedule
    """Hears which swarms are to be planned anew."""
    reputation: Reputation
    """Hears which hosts lied."""
    described: Callable[[Digest], bool] = lambda blob: False
    """Whether a manifest that was read here names a blob."""
    liars: Liars = field(init=False)
    """Hosts that lied."""
    _cases: dict[Digest, Case] = field(default_factory=dict)
    """By the key of the swarm. `renamed`."""
    _busy: dict[Digest, Case] = field(default_factory=dict)
    """Those that time may change."""
    _kept: dict[Digest, ListFound] = field(default_factory=dict)
    """Lists that were given back."""
    _swept_at: float = 0.0

    def __post_init__(self) -> None:
        self.liars = Liars(self.schedule)

    # -- what the fleet hears

    def holding(self, host: Host, holding: Holding, *, now: float) -> list[Command]:
        """A host has said what it holds of a blob, and is a member of its swarm."""
        swarm = self.swarms[host.key(holding.blob)]
        if not holding.vouched:
            if (case := self._found(swarm)) is not None:
                case.followers.pop(host.name, None)
            return []
        if swarm.layout != vouched_layout(swarm.layout.size):
            raise UsageError(f"{holding.blob} has no vouched list with pieces of {swarm.layout.piece_size} bytes")
        out: list[Command] = []
        case = self._case(swarm, out)
        self._busy[swarm.key] = case
        if self.liars.lies(host.name, now=now):
            self.liars.bar(swarm, swarm.members[host.name], now=now)
        if case.statements.phase == "failed":
            return [*out, *rejections(case.swarm.blob, [host])]
        speaks_first = host.session is not None and case.followers.get(host.name) != host.session
        if speaks_first and any(swarm.members[host.name].counts) and not case.statements.round.complete:
            # Others may have named it before, as one from which they receive.
            case.brought[host.name] = case.to_recall[host.name] = None
            case.recall_at = min(case.recall_at, now + case.recall_pause_s)
        self.planned(swarm)
        if holding.matched:
            case.followers.pop(host.name, None)
        elif host.session is not None and case.followers.get(host.name) != host.session:
            case.followers[host.name] = host.session
            out += (Send(host.session, message) for message in case.so_far())
            if case.statements.round.arbiter == host.name:  # it has begun anew, and its rounds with it
                out.append(Send(host.session, Reread(swarm.blob, case.statements.round.number)))
        return out

    def planned(self, swarm: Swarm) -> None:
        """The swarm was planned, or streams were reattached: its roots may state hashes."""
        if (case := self._found(swarm)) is not None:
            case.note_readers()

    def vouched(self, host: Host, message: Vouched, *, now: float) -> list[Command]:
        """A host states hashes. Those that it may not state are ignored."""
        case = self._case_of(host, message.blob)
        if case is None or self.liars.lies(host.name, now=now):
            return []
        statements, swarm = case.statements, case.swarm
        if len(message.hashes) != HASH_SIZE * len(message.pieces):
            raise UsageError(f"{len(message.hashes)} bytes of hashes were stated for {len(message.pieces)} pieces")
        if any(piece >= swarm.layout.count for piece in message.pieces):
            raise UsageError(f"{swarm.blob} has only {swarm.layout.count} pieces")
        if statements.phase == "failed" or message.round != statements.round.number:
            return []
        if statements.round.hashes is None and _full(self._cases, swarm, described=self.described(swarm.blob)):
            error = Unavailable("this tracker keeps too many vouched lists", remedy="Pull fewer images at once")
            return [Send(host.session, Reject(error.problem(), swarm.blob))] if host.session is not None else []
        self._busy[swarm.key] = case
        conflict = False
        for index, piece in enumerate(message.pieces):
            if case.believes(host.name, piece % swarm.stripes, message.basis):
                stated = message.hashes[index * HASH_SIZE : (index + 1) * HASH_SIZE]
                conflict |= statements.state(host.name, piece, stated, named=message.basis != "told", now=now)
        if conflict:
            return self._next_round(case, f"{host.name} read other bytes than are listed", now=now)
        due = now - case.sent_at >= self._pause_s(case, now)
        out: list[Command] = [*case.send_news(self.hosts, now=now)] if due or statements.round.complete else []
        return [*out, *self._conclude(case, now=now)] if statements.round.complete else out

    def judged(self, host: Host, message: Judged, *, now: float) -> list[Command]:
        """A host has compared the whole."""
        case = self._case_of(host, message.blob)
        if case is None:
            return []
        self._busy[case.swarm.key] = case
        if message.matches:
            case.followers.pop(host.name, None)
        if message.round != case.statements.round.number or not case.statements.judge(
            host.name, host.voter or host.name, message.matches, now=now
        ):
            return []
        case.swarm.record(now, f"{host.name} finds that the whole {'matches' if message.matches else 'does not match'}")
        if message.matches and host.name == case.statements.round.arbiter and not case.statements.round.complete:
            # It has become whole on the way, and reads no further: what it has is the rest.
            return [Send(host.session, Recall(case.swarm.blob))] if host.session is not None else []
        again = [ListMatched(case.swarm.blob, *case.statements.hold())] if case.statements.more_voters else []
        return [*again, *self._conclude(case, now=now)]

    def take_found(self, given: ListFound) -> list[Command]:
        """A list that was held before is given back. Where hashes were stated meanwhile it comes
        too late."""
        swarm = self.swarms.get(given.blob)
        case = self._found(swarm) if swarm is not None else None
        if case is None:
            while len(self._kept) >= KEPT_MAX:
                del self._kept[next(iter(self._kept))]
            self._kept[given.blob] = given
            return []
        if case.statements.begun or case.swarm.layout != given.pieces.layout:
            return []
        case.statements = Statements.from_held(given.pieces, given.voters)
        return [*case.send_news(self.hosts, now=case.sent_at)]

    def keeps(self, swarm: Swarm) -> bool:
        """Whether the hosts of a swarm vouch for its list."""
        return self._found(swarm) is not None

    def renamed(self, old: Digest, key: Digest) -> None:
        """A swarm has another key."""
        for cases in (self._cases, self._busy):
            if old in cases:
                cases[key] = cases.pop(old)

    def accused(self, swarm: Swarm, host: str, voter: str) -> None:
        """A complaint of wrong bytes was held against a host."""
        if (case := self._found(swarm)) is not None and case.statements.phase == "open":
            case.accusations[host, voter] = None

    # -- what time brings

    def tick(self, *, now: float) -> list[Command]:
        """Send what is due, replace arbiters that are gone, and ask for what is missing."""
        out: list[Command] = []
        if now - self._swept_at >= SWEEP_S:
            self._swept_at = now
            self._sweep(now)
        for key, case in list(self._busy.items()):
            if self.swarms.get(case.swarm.key) is not case.swarm or case.rests:
                del self._busy[key]
                continue
            if case.news and now - case.sent_at >= self._pause_s(case, now):
                out += case.send_news(self.hosts, now=now)
            out += self._watch(case, now)
        return out

    def _watch(self, case: Case, now: float) -> list[Command]:
        """What the time asks for in one case."""
        statements, out = case.statements, list[Command]()
        if statements.phase == "failed":
            return out
        if case.swarm.origin.barred:
            self.liars.unbar(case.swarm)
        if reason := case.lapse(self.hosts, now=now):
            case.drop_stale(self.hosts)
            if case.followers and (
                statements.round.arbiter != NO_ARBITER
                or choose_arbiter(case, self.hosts, self.liars, now=now) != NO_ARBITER
            ):
                return self._next_round(case, reason, failed=False, now=now)
        if statements.round.arbiter is None and now >= case.recall_at:
            out += self._recall(case, now)
        if statements.round.against or (statements.round.complete and statements.phase == "open"):
            out += self._conclude(case, now=now)
        return out

    def _recall(self, case: Case, now: float) -> list[Command]:
        """Ask a host for what it knows of a list with gaps."""
        members = case.swarm.members
        there = {name: sum(members[name].counts) for name in case.to_recall if name in members}
        if case.statements.round.complete or not case.followers or not there:
            case.recall_at = inf if not there or case.statements.round.complete else now + case.recall_pause_s
            return []
        case.recall_at = now + case.recall_pause_s
        case.recall_pause_s = min(RECALL_MAX_S, 1.5 * case.recall_pause_s)
        name = max(there, key=lambda each: there[each])
        del case.to_recall[name]
        case.recalled[name] = None
        session = self.hosts[name].session
        return [Send(session, Recall(case.swarm.blob))] if session is not None else []

    def _sweep(self, now: float) -> None:
        """Forget the cases of swarms that are gone, old failures, and old lies."""
        for key, case in list(self._cases.items()):
            gone = self.swarms.get(case.swarm.key) is not case.swarm
            if gone or now - case.failed_at >= FAILED_S:
                del self._cases[key]
                self._busy.pop(key, None)
        self.liars.expire(now=now)
        for case in self._cases.values():
            if case.swarm.origin.barred:
                self.liars.unbar(case.swarm)

    # -- lists

    def _case(self, swarm: Swarm, out: list[Command]) -> Case:
        """The case of a swarm, maybe a new one."""
        case = self._found(swarm)
        if case is None:
            kept = self._kept.pop(swarm.blob, None)
            known = kept is not None and kept.pieces.layout == swarm.layout
            statements = (
                Statements.from_held(kept.pieces, kept.voters)
                if known and kept is not None
                else Statements(swarm.layout)
            )
            case = self._cases[swarm.key] = Case(swarm, statements)
            if not known:
                out.append(ListWanted(swarm.blob))
            case.sent = len(statements.round.order)
        return case

    def _found(self, swarm: Swarm) -> Case | None:
        """The case of a swarm, not that of an earlier swarm of the blob."""
        case = self._cases.get(swarm.key)
        return case if case is not None and case.swarm is swarm else None

    def _case_of(self, host: Host, blob: Digest) -> Case | None:
        """The case of a host's swarm, if it is a member."""
        swarm = self.swarms.get(host.key(blob))
        return self._found(swarm) if swarm is not None and host.name in swarm.members else None

    def _pause_s(self, case: Case, now: float) -> float:
        """Seconds between two messages to the followers of a case."""
        waiting = sum(len(each.followers) for each in self._busy.values() if each.news)
        return pause_s(max(waiting, len(case.followers)), now - case.began_at if case.sent else 0.0)

    # -- rounds

    def _conclude(self, case: Case, *, now: float) -> list[Command]:
        """Do what the judgements so far ask for."""
        statements = case.statements

        match statements.decide(lambda: case.all_judged(self.hosts), now=now):
            case "next":
                return self._next_round(case, "the whole does not match", now=now)
            case "failed":
                return self._fail(case, now)
            case "held":
                if statements.phase == "open":
                    case.swarm.record(now, f"the vouched list holds, in round {statements.round.number}")
                    return [ListMatched(case.swarm.blob, *statements.hold()), *self._blame(case, now)]
        return []

    def _next_round(self, case: Case, reason: str, *, failed: bool = True, now: float) -> list[Command]:
        """Begin another round, for this reason."""
        statements, swarm = case.statements, case.swarm
        if not statements.may_begin():
            return self._fail(case, now)
        arbiter = choose_arbiter(case, self.hosts, self.liars, now=now)
        for name, voter in case.accusations:
            if name in self.hosts:
                self.reputation.forgive(self.hosts[name], voter, now=now)
        swarm.edges.forgive()
        out: list[Command] = [case.begin(arbiter, failed=failed, now=now)]
        number = statements.round.number
        swarm.record(now, f"{reason}: round {number} begins, with {arbiter or 'no host yet'} as arbiter")
        if arbiter != NO_ARBITER:
            out.append(Send(case.followers[arbiter], Reread(swarm.blob, number)))
        return out

    def _fail(self, case: Case, now: float) -> list[Command]:
        """No list holds: the blob cannot be had."""
        case.statements.fail()
        case.failed_at = now
        case.swarm.record(now, "no vouched list holds: upstream sends other bytes than the digest says")
        case.drop_stale(self.hosts)
        hosts = [self.hosts[name] for name in case.followers]
        case.followers.clear()
        return [*rejections(case.swarm.blob, hosts)]

    def _blame(self, case: Case, now: float) -> list[Command]:
        """Name the hosts that stated what the list which is held contradicts."""
        out: list[Command] = []
        arbiter = self.hosts.get(case.statements.round.arbiter or "")
        for name, pieces in case.statements.guilty().items():
            case.swarm.record(now, f"{name} stated wrong hashes of {pieces} pieces, or upstream sent it other bytes")
            out.append(WrongHashes(name, case.swarm.blob, pieces))
            self.liars.add(name, now=now)
            if (host := self.hosts.get(name)) is not None:
                by = (arbiter.voter or arbiter.name) if arbiter is not None else ""
                self.reputation.penalise(host, by, "corrupt", now=now)
                for swarm in [self.swarms[key] for key in host.swarms if self._found(self.swarms[key])]:
                    self.liars.bar(swarm, swarm.members[name], now=now)
        return out


def choose_arbiter(case: Case, hosts: Mapping[str, Host], liars: Liars, *, now: float) -> str:
    """The arbiter of the next round, NO_ARBITER where no host is there: one that had no part in the
    rounds so far, if there is one, nor has any host that votes with it, which may be the same liar
    under another name. What hosts state of themselves, such as how much they have, does not count:
    those come first that others have had pieces of, or that have been here for longest."""
    case.drop_stale(hosts)
    authors = case.statements.involved | case.statements.round.authors()
    arbiters = {each.arbiter for each in case.statements.rounds}
    heard = {hosts[name].voter for name in (*authors, *filter(None, arbiters)) if name in hosts}
    members = case.swarm.members
    fit = [name for name in case.followers if members[name].present and hosts[name].available]
    honest = [name for name in fit if not liars.lies(name, now=now)] or fit

    def order(name: str) -> tuple[bool, bool, bool, bool, float, int]:
        host, member = hosts[name], members[name]
        known = name in authors, name in arbiters, host.voter in heard
        return *known, not host.proved, member.joined_at, member.order

    return min(honest, key=order, default=NO_ARBITER)


def _full(cases: Mapping[Digest, Case], swarm: Swarm, *, described: bool) -> bool:
    """Whether there is no room for one more list, of this swarm."""
    kept = sum(case.statements.size_bytes for case in cases.values())
    as_described = described and swarm.key == swarm.blob
    return kept + swarm.layout.count * 64 > (LISTS_BYTES_MAX if as_described else LISTS_BYTES_MAX // 2)


def rejections(blob: Digest, hosts: list[Host]) -> list[Send]:
    """Tell hosts that no list of a blob holds."""
    error = Corrupt(
        f"upstream sends other bytes for {blob} than its digest says",
        remedy="Look at what upstream sends, or at a proxy before it, and pull again after a minute",
    )
    message = Reject(error.problem(), blob)
    return [Send(host.session, message) for host in hosts if host.session is not None]
