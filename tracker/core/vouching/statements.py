"""What hosts stated of the hashes of one blob, in rounds, and what follows from how
other hosts judged the whole.

Theory. In round 0 the hash that is stated first for a piece counts. In a later round only what its
arbiter states does; another reader that states otherwise objects. Hosts judge a list by the SHA-256
of the whole, once they have stored all pieces as it says:

    open    -> held     TRUST hosts that stated nothing of it say that it matches, and not fewer
                        than say otherwise; or all that can judge it say so
    open,   -> open     the next round: more hosts say that it does not match than that it does, or
    held                two readers state different hashes for a piece, unless TRUST hosts say that
                        the list which is held matches
    open    -> failed   two rounds that read independently came to the same list, and it does not
                        match, as its arbiter says too: upstream itself is wrong; or too many rounds
                        went by

One host that says otherwise may have a broken disk, or lie: others are waited for. What a list's
own vouchers say of it weighs nothing against another host's word. A round that comes to the same
list as the one before it outweighs one host that says otherwise, once any host says that it
matches. Several that say otherwise may be liars, or the arbiter may have repeated what it was told:
the others have time to judge, and then another arbiter reads.

A list may be held on few words: of a host that was alone then, or of an earlier tracker. If it is
wrong no host can store pieces by it, and none will judge it, so a reader that finds other bytes is
enough to have all read again.

Blame. When a list is held, each host that stated another hash, in whatever round, gave what is not
of the blob: it lied, or upstream gave it other bytes. One voice is not enough for a list to be
held, or one liar, as arbiter and judge, could have the others blamed. What a host was told and
passes on names no host.

Invariants: a piece has one hash in a round; statements are never changed; a host is blamed only for
a hash that it stated itself and that the list which is held contradicts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from itertools import islice
from typing import Literal

from p2pdist.model.pieces import PieceLayout, PieceList
from p2pdist.model.vouched_list import VouchedList

ROUNDS_MAX = 4
"""Rounds after the first that may be begun because the one before did not hold."""

ARBITERS_MAX = 16
"""Rounds in all, those that an arbiter left included."""

OBJECTIONS_MAX = 4096
"""Statements of a round that differ from its list and are remembered."""

JUDGES_WAIT_S = 0.5
"""After the first host says that a list does not match, others may say that it does."""

DISPUTE_S = 10.0
"""Where two rounds came to the same list and hosts say different things of it, or its arbiter says
nothing, it is decided after so long."""

ARBITER_S = 30.0
"""An arbiter that states nothing new for so long is replaced."""

ARBITER_PACES, ARBITER_BYTES_S = 8.0, 4 << 20
"""So is one that takes for its pieces, after a while, ARBITER_PACES times as long as the readers of
an earlier round did, and longer than at ARBITER_BYTES_S."""

TRUST = 2
"""So many hosts must say that a list matches, where others are still to judge it."""

Phase = Literal["open", "held", "failed"]
Decision = Literal["wait", "next", "held", "failed"]
NO_ARBITER = ""
"""Stands for the arbiter of a round for which no host could be chosen yet."""


@dataclass(slots=True)
class Round:
    """What was stated in one round."""

    number: int
    arbiter: str | None
    """The host that reads all pieces; None in round 0, NO_ARBITER where none was there."""
    heard_at: float
    """When the round began, or something new was stated in it last."""
    began_at: float = 0.0
    """When the round began."""
    first_at: float | None = None
    """When something was stated in it first."""
    hashes: VouchedList | None = None
    """The list; None while nothing is stated."""
    vouchers: list[str | None] = field(default_factory=list)
    """By piece the host that stated the hash of the list; None where none is to blame for it."""
    named: dict[str, None] = field(default_factory=dict)
    """The hosts among them."""
    order: list[int] = field(default_factory=list)
    """The pieces in the order in which they were stated."""
    objections: dict[int, list[tuple[str, bytes]]] = field(default_factory=dict)
    """By piece host and hash of what was stated beside the list; some of it agrees with what the
    arbiter stated afterwards. `note`."""
    noted: int = 0
    """How many these are."""
    matching: dict[str, None] = field(default_factory=dict)
    """Voters of which a host said that the list matches, and stated nothing of it."""
    own: dict[str, None] = field(default_factory=dict)
    """Voters of which a host said so of a list that is also its own."""
    against: dict[str, None] = field(default_factory=dict)
    """Voters of which a host said that the list does not match."""
    doubted_at: float | None = None
    """When the first one said so."""
    judged: dict[str, bool] = field(default_factory=dict)
    """By host what it said last of the list."""
    arbiter_against: bool = False
    """Whether the arbiter says so of its own list."""

    @property
    def complete(self) -> bool:
        """Whether every piece has a hash."""
        return self.hashes is not None and self.hashes.complete

    def piece_s(self) -> float | None:
        """How long one of its readers took for a piece, on an average; None where that is not
        known."""
        if self.first_at is None or len(self.order) < 2 or not self.named:
            return None
        return (self.heard_at - self.first_at) * len(self.named) / (len(self.order) - 1)

    def authors(self) -> dict[str, None]:
        """The hosts that stated something."""
        objectors = {host: None for stated in self.objections.values() for host, _ in stated}
        return self.named | objectors | ({self.arbiter: None} if self.arbiter else {})

    def note(self, host: str, piece: int, stated: bytes) -> None:
        """Remember what a host stated beside the list, up to OBJECTIONS_MAX times."""
        if self.noted < OBJECTIONS_MAX:
            self.noted += 1
            self.objections.setdefault(piece, []).append((host, stated))


@dataclass(slots=True)
class Statements:
    """What hosts stated of one blob, in rounds."""

    layout: PieceLayout
    rounds: list[Round] = field(default_factory=lambda: [Round(0, None, 0.0)])
    """All rounds, the present one last. `begin`."""
    phase: Phase = "open"
    """What is known of the present round's list. `hold`, `fail`, `begin`."""
    failures: int = 0
    """Rounds that did not hold. `begin`."""
    involved: dict[str, None] = field(default_factory=dict)
    """Hosts that stated something in earlier rounds. `begin`."""
    said: int = 0
    """How many voters `hold` named last."""
    _same: bool | None = None
    """Whether the present list is the one of the round before; None before that is known."""

    @classmethod
    def from_held(cls, pieces: PieceList, voters: Iterable[str] = ()) -> Statements:
        """The statements of a list that was held before this tracker started, and that these voters
        found to match."""
        statements = cls(pieces.layout, phase="held")
        statements.round.hashes = VouchedList.of(pieces)
        statements.round.vouchers = [None] * pieces.layout.count
        statements.round.order = list(range(pieces.layout.count))
        statements.round.matching.update(dict.fromkeys(voters))
        statements.said = len(statements.round.matching)
        return statements

    @property
    def round(self) -> Round:
        """The present round."""
        return self.rounds[-1]

    @property
    def begun(self) -> bool:
        """Whether anything was stated, in whatever round."""
        return len(self.rounds) > 1 or self.round.hashes is not None

    @property
    def size_bytes(self) -> int:
        """About how much memory the hashes take."""
        return sum(1 for each in self.rounds if each.hashes is not None) * self.layout.count * 64

    # -- statements

    def state(self, host: str, piece: int, stated: bytes, *, named: bool, now: float) -> bool:
        """A host that is believed states a hash; returns whether the present round cannot hold, for
        two readers differ. `named`: the host is to blame if the hash is wrong."""
        now_round = self.round
        if self.phase == "held":
            doubtful = named and len(now_round.matching) < TRUST and self.may_begin()
            return doubtful and self._object(host, piece, stated)
        if now_round.arbiter is not None and host != now_round.arbiter:
            return named and self._object(host, piece, stated)
        if now_round.hashes is None:
            now_round.hashes = VouchedList(self.layout)
            now_round.vouchers = [None] * self.layout.count
        if piece not in now_round.hashes.confirmed:
            now_round.heard_at = now  # what it repeats is no sign that it goes on
            now_round.first_at = now if now_round.first_at is None else now_round.first_at
            now_round.hashes.put(piece, stated)
            if named:
                now_round.vouchers[piece] = host
                now_round.named[host] = None
            now_round.order.append(piece)
            return any(self._weighs(other, piece, each) for other, each in now_round.objections.get(piece, ()))
        if now_round.hashes.hash_of(piece) == stated:
            return False
        if named:
            now_round.note(host, piece, stated)
        return True

    def _object(self, host: str, piece: int, stated: bytes) -> bool:
        """A reader states a hash beside the list: another than the arbiter, or while the list is
        held; returns whether that contradicts the list."""
        hashes = self.round.hashes
        known = hashes.hash_of(piece) if hashes is not None else None
        if known == stated:
            return False
        self.round.note(host, piece, stated)
        return known is not None and self._weighs(host, piece, stated)

    def _weighs(self, host: str, piece: int, stated: bytes) -> bool:
        """Whether an objection counts against the arbiter: it contradicts the list, and its host
        has no part in an earlier round, which it might defend."""
        hashes = self.round.hashes
        return hashes is not None and hashes.hash_of(piece) != stated and host not in self.involved

    # -- judgements

    def judge(self, host: str, voter: str, matches: bool, *, now: float) -> bool:
        """A host that has all pieces as the present list says has compared the whole; returns
        whether that is news. What a host found to match it cannot find otherwise. `voter`: for
        which host or address it speaks."""
        now_round = self.round
        if now_round.judged.get(host) in (True, matches):
            return False
        now_round.judged[host] = matches
        for votes in (now_round.matching, now_round.own, now_round.against):
            votes.pop(voter, None)
        if host == now_round.arbiter:
            now_round.arbiter_against = not matches
        if not matches:
            now_round.against[voter] = None
            now_round.doubted_at = now if now_round.doubted_at is None else now_round.doubted_at
        elif host == now_round.arbiter or host in now_round.named:
            now_round.own[voter] = None
        else:
            now_round.matching[voter] = None
        return True

    def decide(self, all_judged: Callable[[], bool], *, now: float) -> Decision:
        """What becomes of the present list. `all_judged` says whether no other host is there that
        could judge it."""
        now_round = self.round
        matching, against = len(now_round.matching), len(now_round.against)
        if not now_round.complete or self.phase == "failed":
            return "wait"
        if self.phase == "held" and not against:
            return "held"
        if matching >= max(TRUST, against):
            return "held"
        if against > matching or (against and all_judged()):
            return self._doubted(all_judged, now)
        return "held" if (matching or now_round.own) and all_judged() else "wait"

    def _doubted(self, all_judged: Callable[[], bool], now: float) -> Decision:
        """At least as many hosts say that the list does not match as say that it does."""
        now_round = self.round
        several = len(now_round.against) > 1
        waited = now_round.doubted_at is not None and now - now_round.doubted_at >= JUDGES_WAIT_S
        if self._confirmed():
            late = now_round.doubted_at is not None and now - now_round.doubted_at >= DISPUTE_S
            supported = bool(now_round.matching or now_round.own)
            if supported and not several:
                return "held"
            if several and waited and now_round.arbiter_against:
                return "failed"
            if all_judged() or (several and late):
                return "next" if supported else "failed"
            return "wait"
        return "next" if several or waited or all_judged() else "wait"

    def _confirmed(self) -> bool:
        """Whether the round before came to the same list."""
        if self._same is None:
            hashes, before = self.round.hashes, self.rounds[-2].hashes if len(self.rounds) > 1 else None
            self._same = (
                hashes is not None
                and before is not None
                and before.complete
                and before.piece_list() == hashes.piece_list()
            )
        return self._same

    # -- arbiters

    def lags(self, *, now: float) -> bool:
        """Whether the arbiter of the present round is far slower than hosts have read before. Each
        one that was replaced gives the next one more time: upstream may have become slow."""
        here, paces = self.round, [pace for each in self.rounds[:-1] if (pace := each.piece_s()) is not None]
        least_s = self.layout.piece_size / ARBITER_BYTES_S
        piece_s = max([least_s, *([ARBITER_PACES * min(paces)] if paces else [])])
        stated = len(here.order) + 1
        allowed_s = 2 * ARBITER_S + stated * piece_s * 2.0 ** (len(self.rounds) - 2 - self.failures)
        return now - here.began_at >= allowed_s

    # -- what becomes of the list

    def may_begin(self) -> bool:
        """Whether another round may follow one that did not hold."""
        return self.failures < ROUNDS_MAX and len(self.rounds) < ARBITERS_MAX

    def begin(self, arbiter: str, *, failed: bool, now: float) -> None:
        """Begin the next round. `failed`: the present one does not hold; else its arbiter is
        gone."""
        self.failures += failed
        self.involved |= self.round.authors()
        self.rounds.append(Round(self.round.number + 1, arbiter, now, now))
        self.phase, self._same, self.said = "open", None, 0

    def hold(self) -> tuple[PieceList, tuple[str, ...]]:
        """The present list is right; returns it, with as many of its voters as are of use."""
        assert self.round.hashes is not None
        voters = tuple(islice(self.round.matching, TRUST))
        self.phase, self.said = "held", len(voters)
        return self.round.hashes.piece_list(), voters

    @property
    def more_voters(self) -> bool:
        """Whether `hold` would name more voters than last."""
        return self.phase == "held" and self.said < min(TRUST, len(self.round.matching))

    def fail(self) -> None:
        """No list holds."""
        self.phase = "failed"

    def guilty(self) -> dict[str, int]:
        """How many hashes each host stated that the list which is held contradicts. None is blamed
        where only hosts that stated the list say that it matches."""
        right = self.round.hashes if self.round.matching else None
        wrong: dict[str, int] = {}
        for each in self.rounds if right is not None else ():
            stated = [
                (voucher, piece, each.hashes.hash_of(piece))
                for piece, voucher in enumerate(each.vouchers)
                if voucher is not None and each.hashes is not None and piece in each.hashes.confirmed
            ]
            objected = [(host, piece, found) for piece, others in each.objections.items() for host, found in others]
            for host, piece, found in (*stated, *objected):
                if right is not None and found != right.hash_of(piece) and host != self.round.arbiter:
                    wrong[host] = wrong.get(host, 0) + 1
        return wrong
