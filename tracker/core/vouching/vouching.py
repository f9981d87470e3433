"""Vouching: the tracker's part in vouched piece lists (p2pdist/model/vouched.py).

Theory. The hosts that hold the lease of a stripe, or held it, state the hashes of its pieces, and a
ledger (ledger.py) keeps who stated what. Every host that follows the list, since it has not found
the whole to match, is sent what is listed: at once what was listed before it came, then all news
together with the others (pace.py), and the end of the list at once. When the ledger says that a
round cannot hold, an arbiter is chosen, which reads all pieces again: a host that had no part in
the rounds so far, if there is one. The trees go on meanwhile: most of what is listed is right.

A host that stated what a list which is held contradicts is a liar for PENALTY_S: it is not believed
and does not read blobs of this kind from upstream, unless no other host could. Where it is the root
of a stripe, the lease goes to another host at once. Complaints of wrong bytes that were made while
a list was in doubt are withdrawn when the next round begins: the sender may have been right.

A tracker that has just started knows no list. Hosts that read state again what they read; while
that leaves gaps, hosts that joined with pieces are asked, one after the other, for what they were
told (`Recall`). A list that was held before may be given back to the core (`ListKept`).

Invariants: hashes are taken only from hosts that may have read the piece, from hosts that hold
everything, or from hosts that were asked; a message for many hosts is one object; the hashes that
are kept take LISTS_BYTES_MAX at the most.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from math import inf

from p2pdist.model.digest import Digest
from p2pdist.model.errors import Corrupt, Unavailable, UsageError
from p2pdist.model.messages import LISTED_MAX, Holding, Judged, Listed, Recall, Reject, Reread, Vouched
from p2pdist.model.pieces import HASH_SIZE, PieceLayout, PieceList, piece_size_for
from tracker.core.events import Blamed, Broadcast, Command, ListMatched, ListWanted, Send
from tracker.core.host import Host
from tracker.core.member import FROM_ORIGIN, Member
from tracker.core.planning.schedule import Schedule
from tracker.core.repair.repair import move_lease
from tracker.core.repair.reputation import Reputation
from tracker.core.swarm import Swarm
from tracker.core.vouching.ledger import NO_ARBITER, Ledger
from tracker.core.vouching.pace import pause_s

PENALTY_S = 3600.0
ARBITER_S = 30.0
"""An arbiter that states nothing for so long is replaced."""

RECALL_FIRST_S, RECALL_MAX_S = 0.3, 5.0
"""How long gaps of a list are left to the hosts that read, before others are asked; the pauses
grow up to RECALL_MAX_S."""

FAILED_S = 60.0
"""A blob of which no list held may be tried again after so long."""

SWEEP_S = 5.0
"""How often cases of swarms that are gone are looked for."""

LISTS_BYTES_MAX = 512 << 20
LIARS_MAX = 10_000
KEPT_MAX = 256
"""Lists that were given back and that no swarm has asked for yet."""


@dataclass(slots=True)
class Case:
    """The vouched list of one swarm, and the hosts that follow it."""

    swarm: Swarm
    ledger: Ledger
    followers: dict[str, int] = field(default_factory=dict)
    """By host the session in which it was sent what is listed."""
    readers: dict[str, set[int]] = field(default_factory=dict)
    """The stripes of which a host has, or had, the lease."""
    brought: dict[str, None] = field(default_factory=dict)
    """Hosts that joined with pieces, which they may have read before."""
    to_recall: dict[str, None] = field(default_factory=dict)
    """Those of them that were not asked yet for what they know."""
    recalled: dict[str, None] = field(default_factory=dict)
    """Hosts that were asked."""
    recall_at: float = inf
    """When the next one is asked."""
    recall_pause_s: float = RECALL_FIRST_S
    sent: int = 0
    """How many of the round's statements all followers were sent."""
    sent_at: float = -inf
    """When they were sent something last."""
    began_at: float = 0.0
    """When they were sent something of this round first."""
    sent_before: list[Listed] = field(default_factory=list)
    """What was sent, in few messages, for hosts that come later."""
    accusations: dict[tuple[str, str], None] = field(default_factory=dict)
    """(host, voter) of complaints of wrong bytes in this round."""
    failed_at: float = inf

    @property
    def rests(self) -> bool:
        """Whether time changes nothing here."""
        ledger = self.ledger
        settled = ledger.phase == "held" and ledger.blamed
        idle = not self.followers and (ledger.round.arbiter is None or ledger.phase == "held")
        return (settled or idle) and self.sent == len(ledger.round.order) and ledger.phase != "failed"


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
    liars: dict[str, float] = field(default_factory=dict)
    """Until when hosts are not believed. `_blame`, `tick`."""
    _cases: dict[int, Case] = field(default_factory=dict)
    """By the identity of the swarm, whose key may change."""
    _busy: dict[int, Case] = field(default_factory=dict)
    """Those that time may change."""
    _kept: dict[Digest, PieceList] = field(default_factory=dict)
    """Lists that were given back."""
    _swept_at: float = 0.0

    # -- what the fleet hears

    def holding(self, host: Host, holding: Holding, *, now: float) -> list[Command]:
        """A host has said what it holds of a blob, and is a member of its swarm."""
        swarm = self.swarms[host.key(holding.blob)]
        if not holding.vouched:
            if (case := self._cases.get(id(swarm))) is not None:
                case.followers.pop(host.name, None)
            return []
        if swarm.layout.piece_size != piece_size_for(swarm.layout.size):
            raise UsageError(f"{holding.blob} has no vouched list with pieces of {swarm.layout.piece_size} bytes")
        out: list[Command] = []
        case = self._case(swarm, out)
        self._busy[id(swarm)] = case
        if self._lies(host.name, now):
            self._bar(swarm, swarm.members[host.name], now)
        if case.ledger.phase == "failed":
            return [*out, *self._reject(case, [host])]
        member = swarm.members[host.name]
        if member.joined_at == now and any(member.counts) and not case.ledger.round.complete:
            case.brought[host.name] = case.to_recall[host.name] = None
            case.recall_at = min(case.recall_at, now + case.recall_pause_s)
        self.planned(swarm)
        if holding.matched:
            case.followers.pop(host.name, None)
        elif host.session is not None and case.followers.get(host.name) != host.session:
            case.followers[host.name] = host.session
            out += (Send(host.session, message) for message in self._so_far(case))
            if case.ledger.round.arbiter == host.name:  # it has begun anew, and its rounds with it
                out.append(Send(host.session, Reread(swarm.blob, case.ledger.round.number)))
        return out

    def planned(self, swarm: Swarm) -> None:
        """The swarm was planned, or streams were reattached: its roots may state hashes."""
        case = self._cases.get(id(swarm))
        for stripe, roots in enumerate(swarm.edges.roots) if case is not None else ():
            for name in roots:
                assert case is not None
                case.readers.setdefault(name, set()).add(stripe)

    def vouched(self, host: Host, message: Vouched, *, now: float) -> list[Command]:
        """A host states hashes. Those that it may not state are ignored."""
        case = self._case_of(host, message.blob)
        if case is None or self._lies(host.name, now):
            return []
        ledger, swarm = case.ledger, case.swarm
        if len(message.hashes) != HASH_SIZE * len(message.pieces):
            raise UsageError(f"{len(message.hashes)} bytes of hashes were stated for {len(message.pieces)} pieces")
        if any(piece >= swarm.layout.count for piece in message.pieces):
            raise UsageError(f"{swarm.blob} has only {swarm.layout.count} pieces")
        if ledger.phase != "open" or message.round != ledger.round.number:
            return []
        if ledger.round.hashes is None and self._full(swarm.layout):
            error = Unavailable("this tracker keeps too many vouched lists", remedy="Pull fewer images at once")
            return [Send(host.session, Reject(error.problem(), swarm.blob))] if host.session is not None else []
        self._busy[id(swarm)] = case
        conflict = False
        for index, piece in enumerate(message.pieces):
            if self._believed(case, host.name, piece % swarm.stripes, message.basis):
                stated = message.hashes[index * HASH_SIZE : (index + 1) * HASH_SIZE]
                conflict |= ledger.state(host.name, piece, stated, named=message.basis != "told", now=now)
        if conflict:
            return self._next_round(case, f"{host.name} read other bytes than are listed", now=now)
        due = now - case.sent_at >= self._pause_s(case, now)
        out = [*self._send_news(case, now)] if due or ledger.round.complete else []
        return [*out, *self._conclude(case, now=now)] if ledger.round.complete else out

    def judged(self, host: Host, message: Judged, *, now: float) -> list[Command]:
        """A host has compared the whole."""
        case = self._case_of(host, message.blob)
        if case is None:
            return []
        self._busy[id(case.swarm)] = case
        if message.matches:
            case.followers.pop(host.name, None)
        if message.round != case.ledger.round.number:
            return []
        case.ledger.judge(host.name, host.voter or host.name, message.matches, now=now)
        case.swarm.record(now, f"{host.name} finds that the whole {'matches' if message.matches else 'does not match'}")
        if message.matches and host.name == case.ledger.round.arbiter and not case.ledger.round.complete:
            # It has become whole on the way, and reads no further: what it has is the rest.
            return [Send(host.session, Recall(case.swarm.blob))] if host.session is not None else []
        return self._conclude(case, now=now)

    def kept(self, blob: Digest, pieces: PieceList) -> list[Command]:
        """A list that was held before is given back. Where hashes were stated meanwhile it comes
        too late."""
        swarm = self.swarms.get(blob)
        case = self._cases.get(id(swarm)) if swarm is not None else None
        if case is None:
            while len(self._kept) >= KEPT_MAX:
                del self._kept[next(iter(self._kept))]
            self._kept[blob] = pieces
            return []
        if case.ledger.round.hashes is not None or case.swarm.layout != pieces.layout:
            return []
        case.ledger = Ledger.kept(pieces)
        return [*self._send_news(case, case.sent_at)]

    def accused(self, swarm: Swarm, host: str, voter: str) -> None:
        """A complaint of wrong bytes was held against a host."""
        if (case := self._cases.get(id(swarm))) is not None and case.ledger.phase == "open":
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
            if case.sent < len(case.ledger.round.order) and now - case.sent_at >= self._pause_s(case, now):
                out += self._send_news(case, now)
            out += self._watch(case, now)
        return out

    def _watch(self, case: Case, now: float) -> list[Command]:
        """What the time asks for in one case."""
        ledger, out = case.ledger, list[Command]()
        if ledger.phase == "failed":
            return out
        if case.swarm.origin.barred:
            self._unbar(case.swarm)
        if (arbiter := ledger.round.arbiter) is not None and ledger.phase == "open" and not ledger.round.complete:
            host = self.hosts.get(arbiter)
            there = host is not None and host.available and self._arbitrates(case, arbiter)
            if not there or now - ledger.round.heard_at >= ARBITER_S:
                self._drop_stale(case)
                if case.followers and (arbiter != NO_ARBITER or self._choose(case, now) != NO_ARBITER):
                    return self._next_round(case, f"the arbiter {arbiter or '(none)'} is gone", failed=False, now=now)
        if ledger.round.arbiter is None and now >= case.recall_at:
            out += self._recall(case, now)
        if ledger.round.against or (ledger.phase == "held" and not ledger.blamed):
            out += self._conclude(case, now=now)
        return out

    def _arbitrates(self, case: Case, arbiter: str) -> bool:
        """Whether the arbiter is still in the swarm and either reads, or was found whole and is to
        say what it has."""
        member = case.swarm.members.get(arbiter)
        return arbiter in case.followers or (member is not None and member.seed)

    def _recall(self, case: Case, now: float) -> list[Command]:
        """Ask a host for what it knows of a list with gaps."""
        members = case.swarm.members
        there = {name: sum(members[name].counts) for name in case.to_recall if name in members}
        if case.ledger.round.complete or not case.followers or not there:
            case.recall_at = inf if not there or case.ledger.round.complete else now + case.recall_pause_s
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
        self.liars = {name: until for name, until in self.liars.items() if until > now}
        for case in self._cases.values():
            for name in [name for name in case.swarm.origin.barred if name not in self.liars]:
                case.swarm.origin.unbar(name)

    # -- lists

    def _case(self, swarm: Swarm, out: list[Command]) -> Case:
        """The case of a swarm, maybe a new one."""
        case = self._cases.get(id(swarm))
        if case is None:
            kept = self._kept.pop(swarm.blob, None)
            known = kept is not None and kept.layout == swarm.layout
            ledger = Ledger.kept(kept) if known and kept is not None else Ledger(swarm.layout)
            case = self._cases[id(swarm)] = Case(swarm, ledger)
            if not known:
                out.append(ListWanted(swarm.blob))
            case.sent = len(ledger.round.order)
        return case

    def _case_of(self, host: Host, blob: Digest) -> Case | None:
        """The case of a host's swarm, if it is a member."""
        swarm = self.swarms.get(host.key(blob))
        return self._cases.get(id(swarm)) if swarm is not None and host.name in swarm.members else None

    def _full(self, layout: PieceLayout) -> bool:
        """Whether there is no room for one more list."""
        kept = sum(case.ledger.size_bytes for case in self._cases.values())
        return kept + layout.count * 64 > LISTS_BYTES_MAX

    def _believed(self, case: Case, host: str, stripe: int, basis: str) -> bool:
        """Whether a host may state hashes of a stripe."""
        swarm, first = case.swarm, case.ledger.round.arbiter is None
        if host == case.ledger.round.arbiter:
            return basis != "told"
        if basis == "read":
            reads = stripe in case.readers.get(host, ()) or host in swarm.edges.roots[stripe]
            return reads or (first and host in case.brought)
        return first and (swarm.members[host].seed if basis == "whole" else host in case.recalled)

    def _pause_s(self, case: Case, now: float) -> float:
        """Seconds between two messages to the followers of a case."""
        waiting = sum(len(each.followers) for each in self._busy.values() if each.sent < len(each.ledger.round.order))
        return pause_s(max(waiting, len(case.followers)), now - case.began_at if case.sent else 0.0)

    def _drop_stale(self, case: Case) -> None:
        """Forget followers that are gone: they come again with a Holding."""
        for name, session in list(case.followers.items()):
            host = self.hosts.get(name)
            if host is None or host.session != session or name not in case.swarm.members:
                del case.followers[name]

    def _send_news(self, case: Case, now: float) -> Iterator[Command]:
        """Send all followers what they have not been sent."""
        order = case.ledger.round.order
        if case.sent == len(order):
            return
        self._drop_stale(case)
        sessions = tuple(case.followers.values())
        case.began_at = case.began_at if case.sent else now
        case.sent_at = now
        for start in range(case.sent, len(order), LISTED_MAX):
            yield Broadcast(sessions, _listed(case, order[start : start + LISTED_MAX]))
        case.sent = len(order)

    def _so_far(self, case: Case) -> list[Listed]:
        """What all followers were sent, for one that comes now."""
        number = case.ledger.round.number
        known = sum(len(message.pieces) for message in case.sent_before)
        if known < case.sent or (case.sent_before and case.sent_before[0].round != number):
            whole = [message for message in case.sent_before if len(message.pieces) == LISTED_MAX]
            whole = whole if whole and whole[0].round == number else []
            rest = case.ledger.round.order[len(whole) * LISTED_MAX : case.sent]
            parts = [rest[start : start + LISTED_MAX] for start in range(0, len(rest), LISTED_MAX)]
            case.sent_before = [*whole, *(_listed(case, part) for part in parts)]
        return case.sent_before or ([Listed(case.swarm.blob, number, (), b"")] if number else [])

    # -- rounds

    def _conclude(self, case: Case, *, now: float) -> list[Command]:
        """Do what the judgements so far ask for."""
        ledger = case.ledger

        def all_judged() -> bool:
            """Whether each host that follows the list has judged it."""
            self._drop_stale(case)
            votes = ledger.round.matching | ledger.round.own | ledger.round.against
            return all((self.hosts[name].voter or name) in votes for name in case.followers)

        match ledger.decide(all_judged, now=now):
            case "next":
                return self._next_round(case, "the whole does not match", now=now)
            case "failed":
                return self._fail(case, now)
            case "held":
                out: list[Command] = []
                if ledger.phase == "open":
                    out.append(ListMatched(case.swarm.blob, ledger.hold()))
                    case.swarm.record(now, f"the vouched list holds, in round {ledger.round.number}")
                if not ledger.blamed and ledger.trusted(all_judged):
                    out += self._blame(case, now)
                return out
        return []

    def _next_round(self, case: Case, reason: str, *, failed: bool = True, now: float) -> list[Command]:
        """Begin another round, for this reason."""
        ledger, swarm = case.ledger, case.swarm
        if not ledger.may_begin():
            return self._fail(case, now)
        arbiter = self._choose(case, now)
        ledger.begin(arbiter, failed=failed, now=now)
        number = ledger.round.number
        swarm.record(now, f"{reason}: round {number} begins, with {arbiter or 'no host yet'} as arbiter")
        for name, voter in case.accusations:
            if name in self.hosts:
                self.reputation.forgive(self.hosts[name], voter, now=now)
        case.accusations.clear()
        swarm.edges.forgive()
        case.sent, case.sent_before, case.sent_at = 0, [], now
        self._drop_stale(case)
        out: list[Command] = [Broadcast(tuple(case.followers.values()), Listed(swarm.blob, number, (), b""))]
        if arbiter != NO_ARBITER:
            out.append(Send(case.followers[arbiter], Reread(swarm.blob, number)))
        return out

    def _choose(self, case: Case, now: float) -> str:
        """The arbiter of the next round: a host that had no part in the rounds so far, if there is
        one, with the most pieces."""
        self._drop_stale(case)
        authors = case.ledger.involved | case.ledger.round.authors()
        arbiters = {each.arbiter for each in case.ledger.rounds}
        members = case.swarm.members
        fit = [name for name in case.followers if members[name].present and self.hosts[name].available]
        honest = [name for name in fit if not self._lies(name, now)] or fit

        def order(name: str) -> tuple[bool, bool, int, int]:
            member = members[name]
            return name in authors, name in arbiters, -sum(member.counts), member.order

        return min(honest, key=order, default=NO_ARBITER)

    def _fail(self, case: Case, now: float) -> list[Command]:
        """No list holds: the blob cannot be had."""
        case.ledger.fail()
        case.failed_at = now
        case.swarm.record(now, "no vouched list holds: upstream sends other bytes than the digest says")
        self._drop_stale(case)
        hosts = [self.hosts[name] for name in case.followers]
        case.followers.clear()
        return self._reject(case, hosts)

    def _reject(self, case: Case, hosts: list[Host]) -> list[Command]:
        error = Corrupt(
            f"upstream sends other bytes for {case.swarm.blob} than its digest says",
            remedy="Look at what upstream sends, or at a proxy before it, and pull again after a minute",
        )
        message = Reject(error.problem(), case.swarm.blob)
        return [Send(host.session, message) for host in hosts if host.session is not None]

    # -- lies

    def _lies(self, name: str, now: float) -> bool:
        return bool(self.liars) and self.liars.get(name, 0.0) > now

    def _blame(self, case: Case, now: float) -> list[Command]:
        """Name the hosts that stated what the list which is held contradicts."""
        out: list[Command] = []
        arbiter = case.ledger.round.arbiter
        judge = self.hosts.get(arbiter) if arbiter else None
        for name, pieces in case.ledger.guilty().items():
            case.swarm.record(now, f"{name} stated wrong hashes of {pieces} pieces, or upstream sent it other bytes")
            out.append(Blamed(name, case.swarm.blob, pieces))
            while len(self.liars) >= LIARS_MAX:
                del self.liars[next(iter(self.liars))]
            self.liars[name] = now + PENALTY_S
            host = self.hosts.get(name)
            if host is None:
                continue
            self.reputation.penalise(host, (judge.voter or judge.name) if judge is not None else "", "corrupt", now=now)
            for key in host.swarms:
                if id(self.swarms[key]) in self._cases:
                    self._bar(self.swarms[key], self.swarms[key].members[name], now)
        return out

    def _bar(self, swarm: Swarm, member: Member, now: float) -> None:
        """A liar reads nothing more from upstream: its leases go to other hosts at once."""
        if not any(name != member.host and name not in self.liars for name in swarm.members):
            return
        swarm.origin.bar(member.host)
        for stripe, parent in enumerate(member.parents):
            if parent == FROM_ORIGIN:
                if not move_lease(swarm, stripe, member.host, now=now, at_once=True):
                    swarm.edges.detach(stripe, member.host)
                self.schedule.ask(swarm.key, "liar", now)

    def _unbar(self, swarm: Swarm) -> None:
        """Where none but liars are left, they may read: the digest tells what comes of it."""
        if all(name in swarm.origin.barred for name, member in swarm.members.items() if member.present):
            for name in list(swarm.origin.barred):
                swarm.origin.unbar(name)


def _listed(case: Case, pieces: list[int]) -> Listed:
    hashes = case.ledger.round.hashes
    assert hashes is not None
    stated = b"".join(hashes.hash_of(piece) or b"" for piece in pieces)
    return Listed(case.swarm.blob, case.ledger.round.number, tuple(pieces), stated)
