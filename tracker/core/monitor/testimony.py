"""Testimony: what a host's children say of its uplink, added up over its swarms, also by children
that have left it.

Theory. `progress.py` finds a slow uplink while all children of a host lag. Where links are slow
beside the pieces, a piece now and then hides that a child lags, and where nothing comes for a
moment it leaves for another parent. So what each child got over a stream is added up, in the
stretches between two reports in which pieces waited at the parent from beginning to end and the
parent showed that it runs: neither the origin nor the hosts above, nor a process that stands still,
held the stream up then. What the child got by its other streams meanwhile is the measure: a child
whose own downlink is slow gets little of all its parents, and a fleet that is slow as a whole gives
its hosts little everywhere. The unit is a second of the swarm's typical stream, so that blobs with
large and small pieces, and swarms with fast and slow origins, add up.

A child testifies against its parent when it got far less than by other streams. One alone may lie,
or have a bad path to that parent. So WITNESSES of them, one an address, must agree, and most of
those that say anything: children that got their share, and those that get it now, speak for the
host. No upload slot is taken on such a word, it is for people: the children have left already.

A sum loses weight by e in WINDOW_S, and ends when nothing was added for so long. What a host is
expected to give a child is less where it has more children than upload slots. Not counted are
imports over a WAN, what slow receivers get, and stretches in which a stream began. Of a stretch in
which the child yields, a part counts, as what is expected in it is less.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from math import exp, inf
from operator import sub
from typing import NamedTuple

from p2pdist.model.digest import Digest
from tracker.core.host import SITE_END, Host
from tracker.core.member import FROM_ORIGIN, Member, yields
from tracker.core.monitor.progress import (
    FULL_SHARE,
    LAG_PIECES,
    PLAIN_S,
    REPORT_MIN_S,
    SLOW_SHARE,
    TRICKLE_SHARE,
    YIELDS_TIMES,
    imports,
)
from tracker.core.swarm import Swarm

WINDOW_S = 60.0
WITNESSES = 2
MAJORITY = 3
"""For each host that speaks for another, so many must speak against it."""

WAITED_MIN_S = 0.5
"""A child must have waited so long for what its parent had."""

ALONE_MIN_S = 1.5
"""A child that had no other stream meanwhile, but has some later, must have waited for so long."""

PIECES_MIN = 6.0
"""A typical stream must have brought so many pieces meanwhile."""

ALIVE_TIMES = 2.0
"""A host runs that was heard within so many times the length of a stretch."""

STALLED_S = 0.6
"""A host that complains that a source stands still has got nothing for so long
(p2pdist/core/download, STALL_FIRST_S)."""

PARENTS_MAX, CHILDREN_MAX = 8, 64
"""So many parents of one child, and children of one parent, have sums; the oldest end first."""

HOSTS_MAX, MARKS_MAX = 20_000, 60_000
"""Hosts with sums as children, and members of swarms whose last reports are kept; the oldest end
first."""

LOOK_S = WINDOW_S / 10


class Evidence(NamedTuple):
    """What shows that a host's uplink is slow."""

    host: str
    share: float
    """Of what a typical uplink would have given these children."""


class _Mark(NamedTuple):
    """What was known of a member at its last report, with which a stretch began."""

    at: float
    counts: tuple[int, ...]
    parents: tuple[str | None, ...]


@dataclass(slots=True)
class _Word:
    """What one child got from one parent. All sums but `pieces` are in seconds of a typical
    stream."""

    at: float
    """Time of which the weights are. `age`."""
    given: float = 0.0
    """What came from the parent while pieces waited there. `add`."""
    waited: float = 0.0
    """What should have come. `add`."""
    pieces: float = 0.0
    """The pieces that should have come. `add`."""
    began: float = 0.0
    """Time at which the last stretch of waiting began, or those that it follows without a break.
    `add`."""
    until: float = 0.0
    """Time at which it ended. `add`."""
    streams: int = 1
    """How many streams a child has in this swarm. `add`."""
    others: float = 0.0
    """What came by the child's other streams in the same stretches. `compare`."""
    others_s: float = 0.0
    """Seconds of these streams. `compare`."""
    later: float = 0.0
    """What came by other streams in stretches that were not added. `compare`."""
    later_s: float = 0.0
    """Seconds of these streams. `compare`."""

    def age(self, now: float) -> None:
        """Let what was added before weigh less."""
        left = exp(-max(0.0, now - self.at) / WINDOW_S)
        self.at = now
        self.given, self.waited, self.pieces = self.given * left, self.waited * left, self.pieces * left
        self.others, self.others_s = self.others * left, self.others_s * left
        self.later, self.later_s = self.later * left, self.later_s * left

    def added(self, since: float, now: float) -> float:
        """How many seconds since then were added already."""
        return max(0.0, min(now, self.until) - max(since, self.began))

    def add(self, swarm: Swarm, given: float, waited: float, *, since: float, now: float) -> None:
        """Add a stretch of waiting that began then."""
        self.age(now)
        self.began, self.until = since if since > self.until else min(since, self.began), now
        self.given += given
        self.waited += waited
        self.pieces += waited * swarm.typical_rate
        self.streams = swarm.stripes

    def compare(self, given: list[float], seconds: float, *, same: bool, now: float) -> None:
        """Add what came by each of the child's other streams in so many seconds; `same`: these were
        a stretch of waiting."""
        if not given:
            return
        self.age(now)
        if same:
            self.others += sum(given)
            self.others_s += seconds * len(given)
        else:
            self.later += sum(given)
            self.later_s += seconds * len(given)

    @property
    def usual(self) -> float:
        """What the child gets of a typical stream by its others; 0 where it had none. What it got
        at the same time counts: if nothing came at all, that is not the parent's fault."""
        if self.others_s >= PLAIN_S:
            return self.others / self.others_s
        return self.later / self.later_s if self.later_s >= PLAIN_S and self.waited >= ALONE_MIN_S else 0.0

    @property
    def lags(self) -> bool:
        """Whether the child got far less from the parent than it gets elsewhere, however short that
        was."""
        usual = self.usual
        return self.waited >= PLAIN_S and usual >= SLOW_SHARE and self._far_below(SLOW_SHARE * min(1.0, usual))

    @property
    def says(self) -> bool:
        """Whether it is long enough to say anything."""
        return self.waited >= WAITED_MIN_S and self.pieces >= PIECES_MIN

    @property
    def accuses(self) -> bool:
        """Whether the child says so by itself. A child that gets all that it can take may get less
        by one stream, but not next to nothing."""
        usual = self.usual
        if not self.lags or not self.says:
            return False
        full = self.given / self.waited + (self.streams - 1) * usual > FULL_SHARE * self.streams
        return not full or self._far_below(TRICKLE_SHARE * min(1.0, usual))

    def _far_below(self, share: float) -> bool:
        return self.given < share * self.waited

    @property
    def clears(self) -> bool:
        """Whether the child got its share."""
        return self.says and self.given >= SLOW_SHARE * self.waited


@dataclass(slots=True)
class Testimony:
    """The sums of all hosts that lagged below a parent of late."""

    _words: dict[str, dict[str, _Word]] = field(default_factory=dict)
    """By child, and by parent. `_word`, `expire`."""
    _children: dict[str, dict[str, None]] = field(default_factory=dict)
    """By parent the children with such a sum. `_word`, `_drop`."""
    _marks: dict[tuple[Digest, str], _Mark] = field(default_factory=dict)
    """By swarm and member its last report, if what came then counted; the oldest first.
    `reported`, `expire`."""
    _looked_at: float = -inf
    """Time at which old sums were looked for. `expire`."""

    def reported(self, swarm: Swarm, member: Member, hosts: Mapping[str, Host], *, counts: bool, now: float) -> None:
        """A member has reported, and its piece counts are those of the report: a stretch ends and
        another one begins. `counts`: what comes in this swarm says something of uplinks now."""
        key = swarm.key, member.host
        mark = self._marks.pop(key, None)
        if not counts:
            return
        self._marks[key] = _Mark(now, tuple(member.counts), tuple(member.parents))
        if len(self._marks) > MARKS_MAX:
            del self._marks[next(iter(self._marks))]
        if mark is not None and swarm.typical_rate > 0 and not member.slow_receiver:
            self._add(swarm, member, hosts, mark, now)

    def stalled(self, swarm: Swarm, member: Member, stripe: int, hosts: Mapping[str, Host], *, now: float) -> None:
        """A member complains that its parent in a stripe, which has more of it, gives nothing, and
        is about to lose it."""
        parent, counts = member.parents[stripe], (swarm.key, member.host) in self._marks
        if not parent or not counts or swarm.typical_rate <= 0 or member.slow_receiver:
            return
        since = max(now - STALLED_S, member.attached_at[stripe])
        if imports(swarm, member, stripe) or not self._runs(swarm, parent, hosts, STALLED_S, now):
            return
        word = self._word(member.host, parent, now)
        waited = (now - since - word.added(since, now)) * _fair(swarm.members[parent])
        word.add(swarm, 0.0, waited, since=since, now=now)
        others = [
            member.rates[other] / swarm.typical_rate * (now - since) if member.moved_at[other] >= since else 0.0
            for other, source in enumerate(member.parents)
            if source not in (None, parent) and member.counts[other] < swarm.totals[other]
        ]
        word.compare(others, now - since, same=True, now=now)

    def speaks(self, child: str) -> bool:
        """Whether a host has something to say of a parent."""
        return child in self._words

    def against(
        self, child: str, swarms: Mapping[Digest, Swarm], hosts: Mapping[str, Host], judged: Callable[[str], bool]
    ) -> Iterator[Evidence]:
        """The hosts whose uplinks are slow, as far as this child had something to say of them. Of a
        host that was `judged` to have a slow uplink already its word is enough."""
        for parent, word in self._words.get(child, {}).items():
            if word.lags and judged(parent):
                yield Evidence(parent, word.given / word.waited)
            elif word.accuses and parent in hosts and (share := self._judge(parent, swarms, hosts)) is not None:
                yield Evidence(parent, share)

    def expire(self, *, now: float) -> None:
        """Forget what is too old. Called often and regularly."""
        if now - self._looked_at < LOOK_S:
            return
        self._looked_at = now
        while self._marks and now - next(iter(self._marks.values())).at >= WINDOW_S:
            del self._marks[next(iter(self._marks))]
        old = [
            (child, parent)
            for child, words in self._words.items()
            for parent, word in words.items()
            if now - word.until >= WINDOW_S
        ]
        for child, parent in old:
            self._drop(child, parent)

    # -- adding

    def _add(self, swarm: Swarm, member: Member, hosts: Mapping[str, Host], mark: _Mark, now: float) -> None:
        """Add what came in a stretch, by each stream that ran all the time."""
        typical, usual = swarm.typical_rate, SLOW_SHARE * (now - mark.at)
        if member.host not in self._words and min(map(sub, member.counts, mark.counts)) / typical >= usual:
            return  # as most: no stream has anything to say
        seconds = max(now - mark.at, REPORT_MIN_S)
        totals, far = swarm.totals, SITE_END in member.zone
        ran = [
            (stripe, parent, max(0, count - mark.counts[stripe]) / typical)
            for stripe, (parent, count) in enumerate(zip(member.parents, member.counts, strict=True))
            if parent is not None
            and parent == mark.parents[stripe]
            and member.attached_at[stripe] <= mark.at
            and count < totals[stripe]
            and not (far and imports(swarm, member, stripe))
        ]
        if member.host not in self._words and all(given >= usual for _, _, given in ran):
            return
        added: dict[str, None] = {}
        for stripe, parent, given in ran:
            if parent != FROM_ORIGIN and self._says_something(swarm, member, hosts, stripe, given, mark.at, now):
                fair_s = seconds * _fair(swarm.members[parent]) / (YIELDS_TIMES if yields(member) else 1)
                self._word(member.host, parent, now).add(swarm, given, fair_s, since=mark.at, now=now)
                added[parent] = None
        for parent, word in self._words.get(member.host, {}).items():
            others = [given for _, source, given in ran if source != parent]
            word.compare(others, seconds, same=parent in added, now=now)

    def _says_something(
        self,
        swarm: Swarm,
        member: Member,
        hosts: Mapping[str, Host],
        stripe: int,
        given: float,
        since: float,
        now: float,
    ) -> bool:
        """Whether a stretch says something of the parent's uplink: it was the limit all the time,
        or it gave what is usual. A sum begins where it gave less."""
        parent = member.parents[stripe] or ""
        usual = SLOW_SHARE * (now - since)
        if given >= usual:
            return parent in self._words.get(member.host, {})
        runs = given > 0 or self._runs(swarm, parent, hosts, now - since, now)
        return runs and self._waits(swarm, member, stripe, since)

    def _word(self, child: str, parent: str, now: float) -> _Word:
        words = self._words.setdefault(child, {})
        if parent not in words:
            if len(words) >= PARENTS_MAX:
                self._drop(child, next(iter(words)))
            children = self._children.setdefault(parent, {})
            if len(children) >= CHILDREN_MAX:
                self._drop(next(iter(children)), parent)
            words = self._words.setdefault(child, {})
            words[parent] = _Word(now)
            self._children.setdefault(parent, {})[child] = None
            if len(self._words) > HOSTS_MAX:
                oldest = next(iter(self._words))
                for other in list(self._words[oldest]):
                    self._drop(oldest, other)
        return words[parent]

    def _drop(self, child: str, parent: str) -> None:
        for outer, inner, name in ((self._words, child, parent), (self._children, parent, child)):
            outer[inner].pop(name, None)
            if not outer[inner]:
                del outer[inner]

    def _waits(self, swarm: Swarm, member: Member, stripe: int, since: float) -> bool:
        """Whether the parent had more pieces than the member has now, all the time since then. What
        it had then is taken from its last two reports."""
        parent = swarm.members[member.parents[stripe] or ""]
        had = parent.counts[stripe] - parent.rates[stripe] * max(0.0, parent.heard_at - since)
        return had - member.counts[stripe] > LAG_PIECES

    def _runs(self, swarm: Swarm, parent: str, hosts: Mapping[str, Host], seconds: float, now: float) -> bool:
        """Whether a host was heard of late: a seed reports only what it sends."""
        heard_at = max(swarm.members[parent].heard_at, hosts[parent].sent_at if parent in hosts else 0.0)
        return now - heard_at <= ALIVE_TIMES * seconds

    # -- judging

    def _judge(self, parent: str, swarms: Mapping[Digest, Swarm], hosts: Mapping[str, Host]) -> float | None:
        """The share of a typical uplink that a host gave its children; None where they do not agree
        that this is small."""
        against: dict[str, None] = {}
        good: dict[str, None] = {}
        given = waited = 0.0
        for child in self._children.get(parent, {}):
            word, voter = self._words[child][parent], _voter(hosts, child)
            if word.accuses:
                against[voter] = None
                given, waited = given + word.given, waited + word.waited
            elif word.clears:
                good[voter] = None
        for child in self._content(parent, swarms, hosts):
            good[_voter(hosts, child)] = None
        good = {voter: None for voter in good if voter not in against}
        agree = len(against) >= max(WITNESSES, MAJORITY * len(good))
        return given / waited if agree else None

    def _content(self, parent: str, swarms: Mapping[Digest, Swarm], hosts: Mapping[str, Host]) -> Iterator[str]:
        """The children of a host that get their share of it now and have no sum."""
        for key in hosts[parent].swarms:
            swarm = swarms.get(key)
            for stripe, names in enumerate(swarm.members[parent].children if swarm is not None else ()):
                for name in names:
                    rate = swarm.members[name].rates[stripe] if swarm is not None else 0.0
                    if parent not in self._words.get(name, {}) and swarm and rate >= SLOW_SHARE * swarm.typical_rate:
                        yield name


def _fair(parent: Member) -> float:
    """The part of a typical stream that each child of a host may expect of it."""
    if parent.slots:
        return min(1.0, parent.slots / max(1, parent.load))
    return 1.0 / max(1, sum(map(len, parent.children)))


def _voter(hosts: Mapping[str, Host], child: str) -> str:
    """The name under which a child's word counts: hosts of one address have one word."""
    host = hosts.get(child)
    return host.voter or child if host is not None else child
