"""Probing: a few hosts report often for a while, because one of them complained.

In a large fleet hosts report seldom, and faults would be seen late. So a host complains when a
stripe stands still or lags, and then it, its parent and the parent's other children are asked to
report every PROBE_INTERVAL_S for PROBE_S. A host that does not is taken for absent. Hosts that
begin to read the origin are probed as well, since all depend on them.

One slow host makes all hosts below it complain within a moment, however deep. All but its children
complain of a parent that is held up itself: probing such parents would tell nothing, and would
leave no room for others. So a parent that complains of the same stripe is not probed on account of
its children, nor are they, and a probe ends early when the parent for which it began has been
judged.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import chain

from p2pdist.model.digest import Digest
from p2pdist.model.messages import Pace
from tracker.core.events import Send
from tracker.core.host import Host

PROBE_INTERVAL_S = 0.25
SELDOM_S = 0.4
"""Hosts that report more often than this are not probed: it would not show anything sooner."""

PROBE_S = 3.0
PROBED_MAX = 2000
"""Two thousand hosts that report four times a second nearly double what a fleet of ten thousand
says, for a second or two."""

HELD_S = 0.7
"""A host that complained of a stripe so lately is held up there: its next complaint comes after
half a second and a tick of its clock."""

Stripe = tuple[Digest, int]


@dataclass(slots=True)
class Probing:
    """The hosts that are being probed, and why."""

    asked_at: dict[str, float] = field(default_factory=dict)
    """Since when each host is probed. `probe`, `begin`, `ended`."""
    _until: dict[str, float] = field(default_factory=dict)
    """Until when each host is probed."""
    _held: dict[tuple[Stripe, str], float] = field(default_factory=dict)
    """When hosts complained last, by stripe and host."""
    _groups: dict[str, dict[str, None]] = field(default_factory=dict)
    """The hosts that are probed because of one host; "" for hosts that are probed in any case."""
    _named: Counter[str] = field(default_factory=Counter)
    """How many groups each host is in."""
    _waiting: dict[str, dict[str, None]] = field(default_factory=dict)
    """The groups that are not probed yet."""

    def probe(self, names: Iterable[str], *, now: float) -> list[str]:
        """Probe hosts, whatever becomes known of others; returns the hosts to ask."""
        chosen = dict.fromkeys(names)
        self._group("", self._groups.get("", {}) | chosen)
        return self._probe(chosen, now=now)

    def _probe(self, names: Iterable[str], *, now: float) -> list[str]:
        to_ask = []
        for name in names:
            if name not in self.asked_at:
                if len(self.asked_at) >= PROBED_MAX:
                    break
                self.asked_at[name] = now
                to_ask.append(name)
            self._until[name] = now + PROBE_S
        return to_ask

    def complained(self, child: str, parent: str, sisters: Iterable[str], stripe: Stripe, *, now: float) -> None:
        """A host is held up in a stripe: it and the hosts that can tell why are to be probed as
        soon as there is room."""
        self._held[stripe, child] = now
        self.judged(child, now=now)
        if now - self._held.get((stripe, parent), -HELD_S) >= HELD_S:
            self._waiting[parent] = self._group(parent, dict.fromkeys((parent, child, *sisters)))

    def begin(self, *, now: float) -> list[str]:
        """Probe the groups that wait, as far as there is room; returns the hosts to ask. Called
        often and regularly."""
        to_ask: list[str] = []
        while self._waiting and len(self.asked_at) < PROBED_MAX:
            to_ask += self._probe(self._waiting.pop(next(iter(self._waiting))), now=now)
        return to_ask

    def judged(self, host: str, *, now: float) -> None:
        """It is known why a host gives too little: hosts that were probed for that need not be any
        longer."""
        self._waiting.pop(host, None)
        for name in self._ungroup(host):
            if name in self._until and not self._named[name]:
                self._until[name] = now

    def _group(self, of: str, names: dict[str, None]) -> dict[str, None]:
        self._ungroup(of)
        self._groups[of] = names
        self._named.update(names.keys())
        return names

    def _ungroup(self, of: str) -> dict[str, None]:
        names = self._groups.pop(of, {})
        self._named.subtract(names.keys())
        return names

    def ended(self, now: float) -> list[str]:
        """Hosts that are probed no longer, and are to be asked to report as usual."""
        ended = [name for name, until in self._until.items() if until <= now]
        for name in ended:
            del self._until[name], self.asked_at[name]
        if ended:
            watched, waiting = self._until.keys(), self._waiting
            self._groups = {
                of: group for of, group in self._groups.items() if of in waiting or not watched.isdisjoint(group)
            }
            self._named = Counter(chain.from_iterable(self._groups.values()))
        if self._held:
            self._held = {key: at for key, at in self._held.items() if now - at < HELD_S}
        return ended


def ask_reports(hosts: Mapping[str, Host], names: Iterable[str], interval_s: float) -> list[Send]:
    """What asks hosts to report at this interval; nothing for hosts without a session."""
    sessions = (hosts[name].session for name in names if name in hosts)
    return [Send(session, Pace(interval_s)) for session in sessions if session is not None]
